//! Segment loads, control registers, vector moves, hints, and what is not emulated.

mod machine;

use gannet_emulate::{CodeSize, DecodeError, SegReg, Stop, decode};
use machine::{Event, RAX, RBX, RCX, RDX, RSP, TestMachine};
use x86::{Exception, Rflags};

const GP: Stop = Stop::Fault(Exception::gp(0));
const RAM: u64 = 0x1000;

fn at_ram() -> TestMachine {
    let mut m = TestMachine::long();
    m.gpr[RBX] = RAM;
    m.gpr[RSP] = RAM + 0x800;
    m
}

#[test]
fn loading_ss_holds_interrupts_off_for_one_instruction() {
    let mut m = at_ram();
    m.set_bytes(RAM, &[0x18, 0]);
    for selector in [0x18, 0x20] {
        m.set_descriptor(selector, 0x00cf_9200_0000_ffff);
    }
    let done = m.run(&[0x8e, 0x13]).unwrap(); // mov ss, [rbx]
    assert!(done.interrupt_shadow);
    assert_eq!(m.segments[SegReg::Ss as usize].selector, 0x18);
    let done = m.run(&[0x8e, 0x03]).unwrap(); // mov es, [rbx]
    assert!(!done.interrupt_shadow);
    let mut m = TestMachine::new(CodeSize::Bits32, RAM, 0x1000);
    m.set_descriptor(0x20, 0x00cf_9200_0000_ffff);
    m.gpr[RSP] = RAM + 0x100;
    m.set_bytes(RAM + 0x100, &[0x20, 0, 0, 0]);
    let done = m.run(&[0x17]).unwrap(); // pop ss
    assert!(done.interrupt_shadow);
    assert_eq!(m.gpr[RSP], RAM + 0x104);
    assert_eq!(m.segments[SegReg::Ss as usize].selector, 0x20);
}

#[test]
fn selectors_are_stored_as_words_and_widen_in_registers() {
    let mut m = at_ram();
    m.set_bytes(RAM, &[0xff; 8]);
    m.run(&[0x8c, 0x1b]).unwrap(); // mov [rbx], ds
    assert_eq!(m.bytes(RAM, 3), [0x10, 0, 0xff]);
    m.gpr[RAX] = u64::MAX;
    m.run(&[0x8c, 0xd8]).unwrap(); // mov eax, ds
    assert_eq!(m.gpr[RAX], 0x10);
    m.run(&[0x0f, 0xa0]).unwrap(); // push fs
    assert_eq!(m.u64_at(RAM + 0x7f8), 0x10);
}

#[test]
fn the_machine_status_word_goes_both_ways() {
    let mut m = at_ram();
    m.cr0 = 0x8000_0011;
    m.run(&[0x0f, 0x01, 0x23]).unwrap(); // smsw [rbx]
    assert_eq!(m.bytes(RAM, 4), [0x11, 0, 0, 0]);
    m.set_bytes(RAM, &[0x0a, 0xff]);
    m.run(&[0x0f, 0x01, 0x33]).unwrap(); // lmsw [rbx]
    assert_eq!(m.cr0, 0x8000_001b, "PE cannot be cleared");
    m.run(&[0x0f, 0x06]).unwrap(); // clts
    assert_eq!(m.cr0, 0x8000_0013);
    m.cpl = 3;
    for code in [&[0x0f, 0x01, 0x33][..], &[0x0f, 0x06], &[0x0f, 0x22, 0xc0], &[0x0f, 0x20, 0xc0]] {
        assert_eq!(m.run(code), Err(GP), "{code:02x?}");
    }
    assert!(m.run(&[0x0f, 0x01, 0x23]).is_ok());
    m.cr4 |= 1 << 11; // UMIP
    assert_eq!(m.run(&[0x0f, 0x01, 0x23]), Err(GP));
}

#[test]
fn control_registers_move_through_the_machine() {
    let mut m = at_ram();
    m.gpr[RAX] = 0x8000_0033;
    m.run(&[0x0f, 0x22, 0xc0]).unwrap(); // mov cr0, rax
    assert_eq!(m.cr0, 0x8000_0033);
    m.run(&[0x0f, 0x20, 0xe1]).unwrap(); // mov rcx, cr4
    assert_eq!(m.gpr[RCX], m.cr4);
    assert_eq!(m.run(&[0x0f, 0x21, 0xf8]), Err(Stop::Unsupported)); // mov rax, dr7
}

#[test]
fn vector_moves_go_to_devices_in_halves() {
    let mut m = at_ram();
    m.gpr[RBX] = 0x8000;
    m.xmm[9] = 0x1111_2222_3333_4444_5555_6666_7777_8888;
    m.run(&[0x44, 0x0f, 0x11, 0x0b]).unwrap(); // movups [rbx], xmm9
    assert_eq!(
        m.events,
        [
            Event::MmioWrite(0x8000, 0x5555_6666_7777_8888u64.to_le_bytes().to_vec()),
            Event::MmioWrite(0x8008, 0x1111_2222_3333_4444u64.to_le_bytes().to_vec())
        ]
    );
}

#[test]
fn vector_moves_need_their_unit() {
    let code = [0x0f, 0x10, 0x03]; // movups xmm0, [rbx]
    let mut m = at_ram();
    m.cr0 |= 1 << 3;
    assert_eq!(m.run(&code), Err(Stop::Fault(Exception::nm())));
    m.cr4 = 0;
    assert_eq!(m.run(&code), Err(Stop::Fault(Exception::ud())));
}

#[test]
fn a_waiting_x87_exception_comes_before_the_operand() {
    const NON_CANONICAL: u64 = 1 << 63;
    for code in [[0x0f, 0x7f, 0x03], [0x0f, 0x6f, 0x03]] {
        // movq [rbx], mm0 and back
        let mut m = at_ram();
        m.gpr[RBX] = NON_CANONICAL;
        assert_eq!(m.run(&code), Err(GP));
        m.x87[1] = 1 << 7;
        assert_eq!(m.run(&code), Err(Stop::Fault(Exception::mf())));
    }
}

#[test]
fn aligned_forms_fault_on_other_addresses() {
    let mut m = at_ram();
    m.gpr[RBX] = RAM + 8;
    assert_eq!(m.run(&[0x0f, 0x28, 0x03]), Err(GP)); // movaps xmm0, [rbx]
    assert_eq!(m.run(&[0x48, 0x0f, 0xc7, 0x0b]), Err(GP)); // cmpxchg16b [rbx]
    assert!(m.run(&[0x0f, 0x10, 0x03]).is_ok()); // movups
    assert!(m.run(&[0x0f, 0xc7, 0x0b]).is_ok()); // cmpxchg8b
}

#[test]
fn a_torn_pair_is_read_again() {
    const CODE: [u8; 5] = [0xf0, 0x48, 0x0f, 0xc7, 0x0b]; // lock cmpxchg16b [rbx]
    let mut m = at_ram();
    m.lost_races = 2;
    m.run(&CODE).unwrap();
    assert_eq!(m.rflags & Rflags::ZF.bits(), 0);
    assert_eq!((m.gpr[RDX], m.gpr[RAX], m.lost_races), (0, 1, 1), "the value after the change");
    // One that differs stores nothing: the machine's exchange of sixteen bytes is a store.
    m.gpr[RAX] = 7;
    m.run(&CODE).unwrap();
    assert_eq!((m.rflags & Rflags::ZF.bits(), m.gpr[RAX], m.lost_races), (0, 1, 1));
}

#[test]
fn division_errors_are_faults() {
    let de = Err(Stop::Fault(Exception::de()));
    let mut m = at_ram();
    assert_eq!(m.run(&[0xf7, 0x33]), de); // div dword [rbx], by zero
    m.set_bytes(RAM, &[1]);
    m.gpr[RDX] = 1;
    assert_eq!(m.run(&[0xf7, 0x33]), de); // too large a quotient
    // The most negative dividend by -1.
    (m.gpr[RDX], m.gpr[RAX]) = (1 << 63, 0);
    m.set_bytes(RAM, &[0xff; 8]);
    assert_eq!(m.run(&[0x48, 0xf7, 0x3b]), de); // idiv qword [rbx]
    assert_eq!((m.gpr[RDX], m.gpr[RAX]), (1 << 63, 0));
}

#[test]
fn hints_touch_nothing() {
    let hints: [&[u8]; 5] = [
        &[0x0f, 0x1f, 0x03],       // nop [rbx]
        &[0x0f, 0x18, 0x0b],       // prefetcht0 [rbx]
        &[0x0f, 0x0d, 0x0b],       // prefetchw [rbx]
        &[0x0f, 0xae, 0x3b],       // clflush [rbx]
        &[0x66, 0x0f, 0xae, 0x3b], // clflushopt [rbx]
    ];
    for code in hints {
        let mut m = at_ram();
        m.gpr[RBX] = 0x8000;
        let before = m.clone();
        let done = m.run(code).unwrap();
        assert_eq!(done.rip, before.rip + code.len() as u64);
        assert_eq!(m.gpr, before.gpr);
        assert!(m.events.is_empty());
    }
}

#[test]
fn the_resume_flag_ends_with_the_instruction() {
    let mut m = at_ram();
    m.rflags |= Rflags::RF.bits();
    assert!(!m.run(&[0x8b, 0x03]).unwrap().rflags.contains(Rflags::RF));
}

#[test]
fn instructions_that_are_not_emulated_say_so_and_change_nothing() {
    let unknown: [&[u8]; 10] = [
        &[0x0f, 0xa2],                   // cpuid
        &[0x74, 0x10],                   // jz
        &[0xe8, 0, 0, 0, 0],             // call rel32
        &[0xcf],                         // iret
        &[0xdd, 0x03],                   // fld qword [rbx]
        &[0x0f, 0x58, 0x03],             // addps xmm0, [rbx]
        &[0xc5, 0xf8, 0x10, 0x03],       // vmovups xmm0, [rbx]
        &[0xf2, 0x0f, 0x10, 0x03],       // movsd xmm0, [rbx]: not the string instruction
        &[0x0f, 0xae, 0x03],             // fxsave [rbx]
        &[0xf2, 0x0f, 0x38, 0xf0, 0x03], // crc32 eax, byte [rbx]
    ];
    for code in unknown {
        let mut m = at_ram();
        let before = m.clone();
        assert_eq!(m.run(code), Err(Stop::Unsupported), "{code:02x?}");
        assert_eq!(m.gpr, before.gpr);
        assert_eq!(m.ram, before.ram);
    }
    assert_eq!(decode(&[0x0f, 0x0b, 0, 0], CodeSize::Bits64).map(|d| d.len()), Ok(2));
    assert_eq!(decode(&[0x06, 0, 0], CodeSize::Bits64).err(), Some(DecodeError::Invalid));
}
