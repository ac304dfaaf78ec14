//! Loads of segment registers, LDTR and TR, far transfers, ENTER and LEAVE, the tables' registers, and
//! MMX moves.

mod machine;

use gannet_emulate::{CodeSize, SegReg, Segment, Stop};
use machine::{Event, RAX, RBP, RBX, RSP, SYSTEM, TestMachine};
use x86::Exception;

const RAM: u64 = 0x1000;
const DEVICE: u64 = 0x8000;
const DATA0: u64 = 0x00cf_9200_0000_ffff;
const DATA3: u64 = 0x00cf_f200_0000_ffff;
const CODE0: u64 = 0x00cf_9a00_0000_ffff;
const CODE64: u64 = 0x00af_9a00_0000_ffff;
const READ_ONLY: u64 = 0x00cf_9000_0000_ffff;
const ACCESSED: u64 = 1 << 40;
const PRESENT: u64 = 1 << 47;

fn fault(e: Exception) -> Result<gannet_emulate::Completion, Stop> {
    Err(Stop::Fault(e))
}

/// 32-bit protected mode with a GDT; EBX points to a device.
fn protected() -> TestMachine {
    let mut m = TestMachine::new(CodeSize::Bits32, RAM, 0x2000);
    m.mmio = DEVICE..DEVICE + 0x1000;
    m.gpr[RBX] = DEVICE;
    m.gpr[RSP] = RAM + 0x800;
    for (selector, raw) in
        [(0x08, CODE0), (0x10, DATA0), (0x18, DATA3), (0x20, READ_ONLY), (0x28, DATA0 & !PRESENT)]
    {
        m.set_descriptor(selector, raw);
    }
    m
}

/// The device answers with `value` at its first read.
fn with_device(mut m: TestMachine, value: u64) -> TestMachine {
    m.device_value = value;
    m
}

#[test]
fn a_stack_segment_comes_from_a_device() {
    let mut m = with_device(protected(), 0x10);
    let done = m.run(&[0x8e, 0x13]).unwrap(); // mov ss, [ebx]
    assert!(done.interrupt_shadow);
    let ss = m.segments[SegReg::Ss as usize];
    assert_eq!((ss.selector, ss.base, ss.limit), (0x10, 0, u32::MAX));
    assert_eq!(m.descriptor(0x10), DATA0 | ACCESSED);
    assert_eq!(m.events, [Event::MmioRead(DEVICE, 2)]);
}

#[test]
fn segments_that_do_not_fit_are_refused() {
    let cases = [
        (0x8e, 0x13, 0, Exception::gp(0)),           // mov ss, null
        (0x8e, 0x13, 0x13, Exception::gp(0x10)),     // RPL 3 at level 0
        (0x8e, 0x13, 0x18, Exception::gp(0x18)),     // DPL 3
        (0x8e, 0x13, 0x20, Exception::gp(0x20)),     // not writable
        (0x8e, 0x13, 0x08, Exception::gp(0x08)),     // code
        (0x8e, 0x13, 0x28, Exception::ss(0x28)),     // not present
        (0x8e, 0x1b, 0x28, Exception::np(0x28)),     // mov ds: not present
        (0x8e, 0x1b, 0x13, Exception::gp(0x10)),     // RPL above DPL
        (0x8e, 0x1b, 0x1000, Exception::gp(0x1000)), // beyond the GDT
        (0x8e, 0x1b, 0x14, Exception::gp(0x14)),     // no LDT
    ];
    for (a, b, selector, exception) in cases {
        let mut m = with_device(protected(), selector);
        let before = m.segments;
        assert_eq!(m.run(&[a, b]), fault(exception), "{selector:#x}");
        assert_eq!(m.segments, before);
    }
    let mut m = with_device(protected(), 0);
    m.run(&[0x8e, 0x1b]).unwrap(); // mov ds, null
    assert_eq!(m.segments[SegReg::Ds as usize], Segment::default());
}

#[test]
fn level_three_loads_what_is_for_level_three() {
    let mut m = with_device(protected(), 0x1b);
    m.cpl = 3;
    m.run(&[0x8e, 0x13]).unwrap();
    assert_eq!(m.segments[SegReg::Ss as usize].selector, 0x1b);
    let mut m = with_device(protected(), 0x13);
    m.cpl = 3;
    assert_eq!(m.run(&[0x8e, 0x1b]), fault(Exception::gp(0x10)));
}

#[test]
fn a_null_stack_exists_in_64_bit_mode_below_level_three() {
    let mut m = TestMachine::long();
    m.gpr[RAX] = 0;
    assert!(m.run(&[0x8e, 0xd0]).is_ok()); // mov ss, eax
    m.gpr[RAX] = 1;
    assert_eq!(m.run(&[0x8e, 0xd0]), fault(Exception::gp(0)));
}

#[test]
fn real_mode_segments_are_paragraphs() {
    let mut m = TestMachine::new(CodeSize::Bits16, RAM, 0x2000);
    m.cr0 = 0;
    m.segments[SegReg::Ds as usize].limit = 0xffff;
    m.mmio = DEVICE..DEVICE + 0x1000;
    m.gpr[RBX] = DEVICE;
    m.device_value = 0x1234;
    m.run(&[0x8e, 0x17]).unwrap(); // mov ss, [bx]
    let ss = m.segments[SegReg::Ss as usize];
    assert_eq!((ss.selector, ss.base), (0x1234, 0x12340));
}

#[test]
fn pop_ss_moves_the_old_stack_pointer() {
    let mut m = protected();
    m.set_descriptor(0x30, DATA0 & !(1 << 54)); // a 16-bit stack
    m.gpr[RSP] = 0x1_0000 - 4;
    m.base = 0xf000;
    m.mmio = 0..0;
    m.set_bytes(0x1_0000 - 4, &[0x30, 0, 0, 0]);
    m.run(&[0x17]).unwrap(); // pop ss
    assert_eq!(m.gpr[RSP], 0x1_0000);
}

#[test]
fn task_register_and_local_table_come_from_a_device() {
    let mut m = with_device(protected(), 0x30);
    m.set_descriptor(0x30, 0x0000_8900_5678_0067 | 0x12 << 32);
    m.run(&[0x0f, 0x00, 0x1b]).unwrap(); // ltr [ebx]
    let tr = m.segments[SegReg::Tr as usize];
    assert_eq!((tr.selector, tr.base, tr.limit, tr.attributes), (0x30, 0x0012_5678, 0x67, 0x8b));
    assert_eq!(m.descriptor(0x30) >> 40 & 0xff, 0x8b);
    let mut again = with_device(m, 0x30);
    assert_eq!(again.run(&[0x0f, 0x00, 0x1b]), fault(Exception::gp(0x30)), "busy");

    let mut m = with_device(protected(), 0x38);
    m.set_descriptor(0x38, 0x0000_8200_4000_00ff);
    m.run(&[0x0f, 0x00, 0x13]).unwrap(); // lldt [ebx]
    assert_eq!(m.segments[SegReg::Ldtr as usize].base, 0x4000);
    m.cpl = 3;
    m.device_value = 0x38;
    assert_eq!(m.run(&[0x0f, 0x00, 0x13]), fault(Exception::gp(0)));
    m.cr0 = 0;
    assert_eq!(m.run(&[0x0f, 0x00, 0x13]), fault(Exception::ud()));
}

#[test]
fn system_descriptors_have_sixteen_bytes_in_long_mode() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = RAM;
    m.set_bytes(RAM, &[0x30, 0]);
    m.set_descriptor(0x30, 0x0000_8900_5678_0067);
    m.set_descriptor(0x38, 0xffff_8000);
    m.run(&[0x0f, 0x00, 0x1b]).unwrap(); // ltr [rbx]
    assert_eq!(m.segments[SegReg::Tr as usize].base, 0xffff_8000_0000_5678);
    m.set_descriptor(0x30, 0x0000_8900_5678_0067);
    m.set_descriptor(0x38, 0x1_0000);
    assert_eq!(m.run(&[0x0f, 0x00, 0x1b]), fault(Exception::gp(0x30)), "not canonical");
    m.gdtr.limit = 0x37;
    assert_eq!(m.run(&[0x0f, 0x00, 0x1b]), fault(Exception::gp(0x30)), "half a descriptor");
}

fn far(m: &mut TestMachine, selector: u16, offset: u32) {
    m.gpr[RBX] = RAM;
    m.set_bytes(RAM, &offset.to_le_bytes());
    m.set_bytes(RAM + 4, &selector.to_le_bytes());
}

#[test]
fn far_transfers_in_memory() {
    let mut m = protected();
    far(&mut m, 0x08, 0x1234);
    m.run(&[0xff, 0x2b]).unwrap(); // jmp far [ebx]
    assert_eq!((m.rip, m.segments[SegReg::Cs as usize].selector), (0x1234, 0x08));

    let mut m = protected();
    m.segments[SegReg::Cs as usize].selector = 0x08;
    far(&mut m, 0x08, 0x1234);
    m.run(&[0xff, 0x1b]).unwrap(); // call far [ebx]
    assert_eq!((m.rip, m.gpr[RSP]), (0x1234, RAM + 0x7f8));
    assert_eq!(m.u64_at(RAM + 0x7f8), 0x8_0040_0002);
    m.run(&[0xcb]).unwrap(); // retf
    assert_eq!((m.rip, m.gpr[RSP]), (0x40_0002, RAM + 0x800));

    for (selector, exception) in [
        (0, Exception::gp(0)),
        (0x10, Exception::gp(0x10)),
        (0x0b, Exception::gp(0x08)),
        (0x40, Exception::gp(0x40)),
    ] {
        let mut m = protected();
        far(&mut m, selector, 0);
        assert_eq!(m.run(&[0xff, 0x2b]), fault(exception), "{selector:#x}");
    }
    let mut m = protected();
    m.cpl = 3;
    far(&mut m, 0x08, 0);
    assert_eq!(m.run(&[0xff, 0x2b]), fault(Exception::gp(0x08)), "more privileged code");
    // A call gate is left to be reported.
    let mut m = protected();
    m.set_descriptor(0x30, 0x0000_8c00_0008_0000);
    far(&mut m, 0x30, 0);
    assert_eq!(m.run(&[0xff, 0x1b]), Err(Stop::Unsupported));
}

#[test]
fn long_mode_code_is_left_and_entered() {
    let mut m = TestMachine::long();
    m.set_descriptor(0x08, CODE0);
    m.set_descriptor(0x10, CODE64);
    far(&mut m, 0x08, 0x1234);
    m.run(&[0xff, 0x2b]).unwrap();
    assert_eq!(m.segments[SegReg::Cs as usize].attributes & (1 << 9), 0);
    let mut m = TestMachine::long();
    m.set_descriptor(0x10, CODE64 | 1 << 54);
    far(&mut m, 0x10, 0);
    assert_eq!(m.run(&[0xff, 0x2b]), fault(Exception::gp(0x10)), "L and D");
}

#[test]
fn frames_are_made_and_left() {
    let mut m = TestMachine::long();
    m.gpr[RSP] = RAM + 0x800;
    m.gpr[RBP] = RAM + 0x900;
    m.set_bytes(RAM + 0x8f8, &0x77u64.to_le_bytes());
    m.run(&[0xc8, 0x20, 0, 2]).unwrap(); // enter 32, 2
    assert_eq!(m.gpr[RBP], RAM + 0x7f8);
    assert_eq!(m.gpr[RSP], RAM + 0x800 - 8 * 3 - 32);
    assert_eq!(m.u64_at(RAM + 0x7f8), RAM + 0x900);
    assert_eq!(m.u64_at(RAM + 0x7f0), 0x77);
    assert_eq!(m.u64_at(RAM + 0x7e8), RAM + 0x7f8);
    m.run(&[0xc9]).unwrap(); // leave
    assert_eq!((m.gpr[RSP], m.gpr[RBP]), (RAM + 0x800, RAM + 0x900));
    // From and to a device.
    m.gpr[RBP] = DEVICE;
    m.device_value = 0x1111;
    m.run(&[0xc9]).unwrap();
    assert_eq!((m.gpr[RSP], m.gpr[RBP]), (DEVICE + 8, 0x1111));
    m.run(&[0xc8, 0, 0, 0]).unwrap();
    assert_eq!(m.events.last(), Some(&Event::MmioWrite(DEVICE, 0x1111u64.to_le_bytes().to_vec())));
}

/// What is below the new stack pointer cannot be written: known before the stores, of which a device would have the first.
#[test]
fn a_frame_without_room_stores_nothing() {
    let mut m = TestMachine::long();
    m.gpr[RSP] = DEVICE + 0x800;
    m.gpr[RBP] = RAM + 0x900;
    let end = DEVICE + 0x800 - 8 * 3 - 32;
    // The stores come first, and are made from above.
    for (absent, first) in [(end..end + 1, end), (end..DEVICE + 0x800, DEVICE + 0x7f8)] {
        m.absent = absent;
        let stopped = m.run(&[0xc8, 0x20, 0, 2]); // enter 32, 2
        let Err(Stop::Fault(e)) = stopped else { panic!("{stopped:?}") };
        assert_eq!((e.vector.0, e.payload), (14, Some(first)));
        assert!(m.events.is_empty());
        assert_eq!((m.gpr[RSP], m.gpr[RBP]), (DEVICE + 0x800, RAM + 0x900));
    }
}

#[test]
fn the_tables_go_to_and_from_memory() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = RAM;
    m.run(&[0x0f, 0x01, 0x03]).unwrap(); // sgdt [rbx]
    assert_eq!(m.bytes(RAM, 2), [0xff, 0x0f]);
    assert_eq!(m.u64_at(RAM + 2), SYSTEM);
    m.run(&[0x0f, 0x01, 0x1b]).unwrap(); // lidt [rbx]
    assert_eq!((m.idtr.base, m.idtr.limit), (SYSTEM, 0xfff));
    m.set_bytes(RAM + 2, &(1u64 << 47).to_le_bytes());
    assert_eq!(m.run(&[0x0f, 0x01, 0x13]), fault(Exception::gp(0)), "lgdt, not canonical");
    m.cpl = 3;
    assert!(m.run(&[0x0f, 0x01, 0x0b]).is_ok()); // sidt [rbx]
    m.cr4 |= 1 << 11;
    for code in [[0x0f, 0x01, 0x0b], [0x0f, 0x01, 0x03], [0x0f, 0x00, 0x03], [0x0f, 0x00, 0x0b]] {
        assert_eq!(m.run(&code), fault(Exception::gp(0)), "{code:02x?} under UMIP");
    }
}

#[test]
fn an_mmx_store_that_faults_leaves_the_x87_unit_alone() {
    for code in [[0x0f, 0x7f, 0x0b], [0x0f, 0x7e, 0x0b], [0x0f, 0xe7, 0x0b]] {
        let mut m = TestMachine::long();
        m.gpr[RBX] = RAM;
        m.absent = RAM..RAM + 8;
        assert!(matches!(m.run(&code), Err(Stop::Fault(_))), "{code:02x?}");
        assert!(!m.mmx_used, "{code:02x?}");
    }
}

#[test]
fn mmx_moves_go_to_devices() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = DEVICE;
    m.run(&[0x0f, 0x6f, 0x0b]).unwrap(); // movq mm1, [rbx]
    assert_eq!(m.mm[1], 0x1122_3344_5566_7788);
    m.run(&[0x0f, 0x7e, 0x0b]).unwrap(); // movd [rbx], mm1
    m.run(&[0x0f, 0xe7, 0x0b]).unwrap(); // movntq [rbx], mm1
    assert_eq!(
        m.events[1..],
        [
            Event::MmioWrite(DEVICE, 0x5566_7788u32.to_le_bytes().to_vec()),
            Event::MmioWrite(DEVICE, 0x1122_3344_5566_7788u64.to_le_bytes().to_vec()),
        ]
    );
    m.cr0 |= 1 << 3;
    assert_eq!(m.run(&[0x0f, 0x6f, 0x0b]), fault(Exception::nm()));
    m.cr0 |= 1 << 2;
    assert_eq!(m.run(&[0x0f, 0x6f, 0x0b]), fault(Exception::ud()));
}
