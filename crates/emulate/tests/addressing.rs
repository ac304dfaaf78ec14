//! Segmentation, address sizes, canonical addresses, alignment and stack sizes, in all modes.

mod machine;

use gannet_emulate::{CodeSize, Machine, SegReg, Stop, decode};
use machine::{BIG, Event, RAX, RBP, RBX, RCX, RDI, RSI, RSP, TestMachine};
use proptest::prelude::*;
use x86::{Exception, Rflags};

const GP: Stop = Stop::Fault(Exception::gp(0));
const SS: Stop = Stop::Fault(Exception::ss(0));
const RAM: u64 = 0x1000;

fn protected() -> TestMachine {
    TestMachine::new(CodeSize::Bits32, RAM, 0x2000)
}

/// Real mode with 64 KiB segments at 0.
fn real() -> TestMachine {
    let mut m = TestMachine::new(CodeSize::Bits16, 0, 0x2_0000);
    m.cr0 = 0;
    for segment in &mut m.segments {
        segment.limit = 0xffff;
    }
    m.rip = 0x100;
    m
}

#[test]
fn segment_bases_are_added_outside_64_bit_mode_and_wrap_at_4_gib() {
    let mut m = protected();
    m.segments[SegReg::Ds as usize].base = 0xffff_f000;
    m.gpr[RBX] = 0xdead_beef_0000_2010;
    m.set_bytes(RAM + 0x10, &[1, 2, 3, 4]);
    m.run(&[0x8b, 0x03]).unwrap(); // mov eax, [ebx]
    assert_eq!(m.gpr[RAX], 0x0403_0201);
}

#[test]
fn bases_count_only_for_fs_and_gs_in_64_bit_mode() {
    let mut m = TestMachine::new(CodeSize::Bits64, RAM, 0x2000);
    for segment in &mut m.segments {
        segment.base = 0x800;
    }
    m.gpr[RBX] = RAM;
    m.set_bytes(RAM, &[1]);
    m.set_bytes(RAM + 0x800, &[2]);
    for (prefix, expected) in [(0x26, 1), (0x2e, 1), (0x36, 1), (0x3e, 1), (0x64, 2), (0x65, 2)] {
        m.run(&[prefix, 0x8a, 0x03]).unwrap(); // mov al, seg:[rbx]
        assert_eq!(m.gpr[RAX], expected, "prefix {prefix:#x}");
    }
}

#[test]
fn an_access_past_the_limit_faults_by_its_segment() {
    let mut m = protected();
    m.segments[SegReg::Ds as usize].limit = RAM as u32 + 0x102;
    m.segments[SegReg::Ss as usize].limit = RAM as u32 + 0x102;
    m.gpr[RBX] = RAM + 0xff;
    m.gpr[RBP] = RAM + 0x100;
    assert!(m.run(&[0x8b, 0x03]).is_ok()); // mov eax, [ebx]: its last byte is the limit
    assert_eq!(m.run(&[0x8b, 0x43, 0x01]), Err(GP)); // mov eax, [ebx+1]
    assert_eq!(m.run(&[0x8b, 0x45, 0x00]), Err(SS)); // mov eax, [ebp]
    assert_eq!(m.run(&[0x3e, 0x8b, 0x45, 0x00]), Err(GP)); // mov eax, ds:[ebp]
}

#[test]
fn expand_down_segments_are_valid_above_their_limit() {
    const EXPAND_DOWN: u16 = 1 << 2;
    let mut m = protected();
    m.segments[SegReg::Ds as usize].attributes |= EXPAND_DOWN;
    m.segments[SegReg::Ds as usize].limit = RAM as u32 + 0xff;
    m.gpr[RBX] = RAM + 0x100;
    assert!(m.run(&[0x8b, 0x03]).is_ok());
    m.gpr[RBX] = RAM + 0xff;
    assert_eq!(m.run(&[0x8b, 0x03]), Err(GP));
    // A 16-bit one ends at 64 KiB.
    m.segments[SegReg::Ds as usize].attributes &= !BIG;
    m.gpr[RBX] = 0xfffd;
    assert_eq!(m.run(&[0x8b, 0x03]), Err(GP));
}

#[test]
fn segment_types_are_checked_in_protected_mode_only() {
    let mut m = protected();
    m.gpr[RBX] = RAM;
    assert_eq!(m.run(&[0x2e, 0x89, 0x03]), Err(GP)); // mov cs:[ebx], eax
    assert!(m.run(&[0x2e, 0x8b, 0x03]).is_ok());
    m.segments[SegReg::Cs as usize].attributes &= !2; // execute only
    assert_eq!(m.run(&[0x2e, 0x8b, 0x03]), Err(GP));
    m.segments[SegReg::Ds as usize].attributes &= !2; // read only
    assert_eq!(m.run(&[0x01, 0x03]), Err(GP));
    assert!(m.run(&[0x8b, 0x03]).is_ok());
    m.segments[SegReg::Ds as usize].attributes &= !0x80; // null
    assert_eq!(m.run(&[0x8b, 0x03]), Err(GP));

    let mut m = real();
    assert!(m.run(&[0x2e, 0x89, 0x07]).is_ok()); // mov cs:[bx], ax
    let mut m = real();
    m.cr0 = 1;
    m.rflags |= Rflags::VM.bits();
    assert!(m.run(&[0x2e, 0x89, 0x07]).is_ok());
}

#[test]
fn sixteen_bit_addresses_wrap_at_64_kib() {
    let mut m = real();
    m.gpr[RBX] = 0x1234_ff00;
    m.gpr[RSI] = 0x0210;
    m.set_bytes(0x112, &[0xab]);
    m.run(&[0x8a, 0x40, 0x02]).unwrap(); // mov al, [bx+si+2]
    assert_eq!(m.gpr[RAX], 0xab);
    // A word at 0xffff does not wrap: it exceeds the limit.
    m.gpr[RBX] = 0xffff;
    assert_eq!(m.run(&[0x8b, 0x07]), Err(GP));
}

#[test]
fn real_mode_segments_reach_above_1_mib() {
    let mut m = TestMachine::new(CodeSize::Bits16, 0x10_0000, 0x1000);
    m.cr0 = 0;
    m.segments[SegReg::Es as usize].base = 0xf_fff0;
    m.set_bytes(0x10_0000, &[0x77]);
    m.run(&[0x26, 0xa0, 0x10, 0x00]).unwrap(); // mov al, es:[0x10]
    assert_eq!(m.gpr[RAX], 0x77);
}

#[test]
fn thirty_two_bit_addresses_work_in_16_bit_code() {
    let mut m = real();
    m.gpr[RBX] = 0x4000;
    m.gpr[RCX] = 0x10;
    m.set_bytes(0x4041, &[1, 2]);
    m.run(&[0x67, 0x8b, 0x44, 0x8b, 0x01]).unwrap(); // mov ax, [ebx+ecx*4+1]
    assert_eq!(m.gpr[RAX], 0x0201);
}

#[test]
fn non_canonical_addresses_fault() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = 0x0000_8000_0000_0000;
    m.gpr[RBP] = m.gpr[RBX];
    m.gpr[RSP] = m.gpr[RBX];
    assert_eq!(m.run(&[0x8b, 0x03]), Err(GP)); // mov eax, [rbx]
    assert_eq!(m.run(&[0x8b, 0x45, 0x00]), Err(SS)); // mov eax, [rbp]
    assert_eq!(m.run(&[0x3e, 0x8b, 0x45, 0x00]), Err(SS)); // a DS prefix is ignored
    assert_eq!(m.run(&[0x58]), Err(SS)); // pop rax
    m.gpr[RBX] -= 2;
    assert_eq!(m.run(&[0x8b, 0x03]), Err(GP)); // the last byte counts
    // With 57 bits it is canonical; the test machine has no RAM there, so it is a device's.
    m.cr4 |= 1 << 12;
    m.mmio = 0x0000_7fff_ffff_f000..0x0000_8000_0000_1000;
    assert!(m.run(&[0x8b, 0x03]).is_ok());
    assert_eq!(
        m.events,
        [Event::MmioRead(0x7fff_ffff_fffe, 2), Event::MmioRead(0x8000_0000_0000, 2)]
    );
}

#[test]
fn rip_relative_addresses_count_from_the_next_instruction() {
    let mut m = TestMachine::long();
    m.rip = RAM + 0x100;
    m.set_bytes(RAM + 0x200, &[0x5a]);
    m.run(&[0x8a, 0x05, 0xfa, 0, 0, 0]).unwrap(); // mov al, [rip+0xfa]
    assert_eq!(m.gpr[RAX], 0x5a);
    m.rip = RAM + 0x100;
    m.set_bytes(RAM + 0x201, &[0x5b]);
    m.run(&[0x67, 0x8a, 0x05, 0xfa, 0, 0, 0]).unwrap(); // mov al, [eip+0xfa]
    assert_eq!(m.gpr[RAX], 0x5b);
    // An immediate behind the displacement belongs to the instruction's length.
    m.rip = RAM + 0x100;
    m.run(&[0xc6, 0x05, 0xf9, 0, 0, 0, 0x33]).unwrap(); // mov byte [rip+0xf9], 0x33
    assert_eq!(m.bytes(RAM + 0x200, 1), [0x33]);
}

#[test]
fn user_code_with_ac_set_faults_on_misaligned_data() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = RAM + 1;
    m.rflags |= Rflags::AC.bits();
    m.cr0 |= 1 << 18;
    assert!(m.run(&[0x8b, 0x03]).is_ok(), "supervisor code does not");
    m.cpl = 3;
    assert_eq!(m.run(&[0x8b, 0x03]), Err(Stop::Fault(Exception::ac())));
    assert!(m.run(&[0x8a, 0x03]).is_ok(), "bytes are always aligned");
}

#[test]
fn the_stack_pointer_is_as_wide_as_ss_says() {
    let mut m = protected();
    m.gpr[RSP] = 0xaaaa_aaaa_0000_0000 | (RAM + 0x100);
    m.gpr[RAX] = 0x1111_2222;
    m.run(&[0x50]).unwrap(); // push eax
    assert_eq!(m.gpr[RSP], RAM + 0xfc);
    assert_eq!(m.bytes(RAM + 0xfc, 4), 0x1111_2222u32.to_le_bytes());
    // 16-bit stack in 32-bit code: SP wraps, the upper half stays.
    m.segments[SegReg::Ss as usize].attributes &= !BIG;
    m.gpr[RSP] = 0x5555_1004;
    m.run(&[0x50]).unwrap();
    assert_eq!(m.gpr[RSP], 0x5555_1000);
    assert_eq!(m.bytes(RAM, 4), 0x1111_2222u32.to_le_bytes());
    m.run(&[0x59]).unwrap(); // pop ecx
    assert_eq!((m.gpr[RSP], m.gpr[RCX]), (0x5555_1004, 0x1111_2222));
}

#[test]
fn sixteen_bit_calls_and_returns_use_words() {
    let mut m = real();
    m.gpr[RSP] = 0x2000;
    m.gpr[RBX] = 0x3000;
    m.set_bytes(0x3000, &[0x34, 0x12, 0xff, 0xff]);
    m.run(&[0xff, 0x17]).unwrap(); // call [bx]
    assert_eq!(m.rip, 0x1234);
    assert_eq!(m.gpr[RSP], 0x1ffe);
    assert_eq!(m.bytes(0x1ffe, 2), [0x02, 0x01]);
    m.run(&[0xc2, 0x04, 0x00]).unwrap(); // ret 4
    assert_eq!((m.rip, m.gpr[RSP]), (0x102, 0x2004));
}

#[test]
fn a_branch_out_of_reach_faults_and_pushes_nothing() {
    let mut m = protected();
    m.segments[SegReg::Cs as usize].limit = 0xffff;
    m.gpr[RSP] = RAM + 0x800;
    m.gpr[RBX] = RAM;
    m.set_bytes(RAM, &[0, 0, 1, 0]);
    assert_eq!(m.run(&[0xff, 0x13]), Err(GP)); // call [ebx]
    assert_eq!(m.gpr[RSP], RAM + 0x800);
    assert_eq!(m.bytes(RAM + 0x7fc, 4), [0; 4]);

    let mut m = TestMachine::long();
    m.gpr[RBX] = RAM;
    m.set_bytes(RAM, &0x0000_8000_0000_0000u64.to_le_bytes());
    assert_eq!(m.run(&[0xff, 0x23]), Err(GP)); // jmp [rbx]
}

#[test]
fn string_instructions_use_es_for_the_destination_whatever_the_prefix() {
    let mut m = real();
    m.segments[SegReg::Es as usize].base = 0x1_0000;
    m.segments[SegReg::Fs as usize].base = 0x8000;
    (m.gpr[RSI], m.gpr[RDI], m.gpr[RCX]) = (0x5555_0010, 0x6666_0020, 0x7777_0004);
    m.set_bytes(0x8010, b"abcd");
    m.run(&[0xf3, 0x64, 0xa4]).unwrap(); // rep movsb es:[di], fs:[si]
    assert_eq!(m.bytes(0x1_0020, 4), b"abcd");
    // 16-bit registers: the upper halves stay.
    assert_eq!(m.gpr[RSI], 0x5555_0014);
    assert_eq!(m.gpr[RDI], 0x6666_0024);
    assert_eq!(m.gpr[RCX], 0x7777_0000);
}

#[test]
fn sixteen_bit_string_offsets_wrap_between_elements() {
    let mut m = real();
    m.gpr[RDI] = 0xffff;
    m.gpr[RCX] = 2;
    m.gpr[RAX] = 0x9c;
    m.run(&[0xf3, 0xaa]).unwrap(); // rep stosb
    assert_eq!(m.bytes(0xffff, 1), [0x9c]);
    assert_eq!(m.bytes(0, 1), [0x9c]);
    // String input does not run past the wrap in one access either.
    m.gpr[RDI] = 0xfffe;
    m.gpr[RCX] = 4;
    while m.run(&[0xf3, 0x6c]).unwrap().outcome == gannet_emulate::Outcome::Continue {}
    assert_eq!(m.gpr[RDI] & 0xffff, 2);
    assert!(m.events.iter().all(|event| matches!(event, Event::In(0, 1, 1 | 2))));
}

#[test]
fn instruction_pointers_stay_within_32_bits_outside_64_bit_mode() {
    let mut m = protected();
    m.rip = 0xffff_fffe;
    m.gpr[RBX] = RAM;
    assert_eq!(m.run(&[0x8b, 0x03]).unwrap().rip, 0);
}

/// The address of the memory operand as iced-x86 computes it.
fn address_by_the_decoder(code: &[u8], m: &TestMachine, gpr: &[u64; 16]) -> u64 {
    use iced_x86::{Decoder, DecoderOptions, OpKind, Register};
    let bitness = match m.size {
        CodeSize::Bits16 => 16,
        CodeSize::Bits32 => 32,
        CodeSize::Bits64 => 64,
    };
    let insn = Decoder::with_ip(bitness, code, 0x40_0000, DecoderOptions::NONE).decode();
    let operand = u32::from(insn.op0_kind() != OpKind::Memory);
    let at = insn.virtual_address(operand, 0, |register, _, _| {
        if register.is_segment_register() {
            let flat =
                m.size == CodeSize::Bits64 && !matches!(register, Register::FS | Register::GS);
            return Some(if flat { 0 } else { m.segments[register.number()].base });
        }
        Some(gpr[register.number()])
    });
    let at = at.expect("an address");
    if m.size == CodeSize::Bits64 { at } else { at & 0xffff_ffff }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// What the fast path compares with the faulting address is where the emulator goes.
    #[test]
    fn the_page_offset_of_a_simple_access_is_that_of_its_address(
        prefix in prop::sample::select(vec![vec![], vec![0x64], vec![0x67], vec![0x26], vec![0x48]]),
        opcode in prop::sample::select(vec![0x8bu8, 0x89, 0x88, 0xc7, 0xa1]),
        tail in any::<[u8; 12]>(),
        gpr in prop::array::uniform16(prop_oneof![any::<u64>(), 0u64..1 << 44]),
        size in prop::sample::select(vec![CodeSize::Bits16, CodeSize::Bits32, CodeSize::Bits64]),
        fs in any::<u32>(),
        ds in any::<u32>(),
    ) {
        let mut code = prefix;
        code.push(opcode);
        code.extend_from_slice(&tail);
        let mut m = TestMachine::new(size, 0, 0);
        m.mmio = 0..u64::MAX;
        m.gpr = gpr;
        m.segments[SegReg::Fs as usize].base = u64::from(fs);
        m.segments[SegReg::Ds as usize].base = u64::from(ds);
        let Ok(decoded) = decode(&code, size) else { return Ok(()) };
        if decoded.simple_mmio().is_none() {
            return Ok(());
        }
        if m.run(&code[..usize::from(decoded.len())]).is_err() {
            return Ok(());
        }
        let at = match m.events[0] {
            Event::MmioRead(at, _) | Event::MmioWrite(at, _) => at,
            _ => unreachable!(),
        };
        let offset = decoded.page_offset(|n| gpr[n], 0x40_0000, |s| m.segment(s).base);
        prop_assert_eq!(u64::from(offset), at & 0xfff);
        prop_assert_eq!(address_by_the_decoder(&code, &m, &gpr), at);
    }
}
