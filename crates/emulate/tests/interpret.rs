//! Whole stretches of code: what `interpret` knows beyond `emulate`, in real mode.

mod machine;

use gannet_emulate::{Completion, Outside, SegReg, Stop, deliver, interpret};
use machine::{RAX, RBX, RCX, RDI, RDX, RSP, SYSTEM, TestMachine};
use x86::Exception;
use x86::segment::DescriptorTable;

const RAM: u64 = 0x1000;
const CF: u64 = 1;
const ZF: u64 = 1 << 6;
const IF: u64 = 1 << 9;
const DF: u64 = 1 << 10;

/// Real mode: the stack ends at 0x1800, the interrupt table has 16 entries.
fn real() -> TestMachine {
    let mut m = TestMachine::real(RAM, 0x2000);
    m.gpr[RSP] = 0x1800;
    m.idtr = DescriptorTable { base: SYSTEM, limit: 16 * 4 - 1 };
    m.system[5 * 4..6 * 4].copy_from_slice(&[0x34, 0x12, 0x00, 0x20]);
    m
}

fn run(m: &mut TestMachine, code: &[u8]) -> Result<Completion, Stop> {
    m.start();
    let decoded = m.decoded(code);
    let done = interpret(m, &decoded)?;
    m.end(done);
    Ok(done)
}

fn word(m: &TestMachine, at: u64) -> u16 {
    let at = (at - RAM) as usize;
    u16::from_le_bytes([m.ram[at], m.ram[at + 1]])
}

#[test]
fn branches_go_where_they_say() {
    let cases: [(&[u8], u64, u64, u64); 9] = [
        (&[0xeb, 0x10], 0, 0, 0x112),              // jmp short
        (&[0xe9, 0xfd, 0xfe], 0, 0, 0),            // jmp near, back to 0
        (&[0x74, 0xfe], ZF, 0, 0x100),             // je
        (&[0x74, 0xfe], 0, 0, 0x102),              // je, not taken
        (&[0x0f, 0x82, 0x00, 0x01], CF, 0, 0x204), // jb near
        (&[0xe2, 0xfe], 0, 2, 0x100),              // loop
        (&[0xe2, 0xfe], 0, 1, 0x102),              // loop, at its end
        (&[0xe1, 0xfe], 0, 2, 0x102),              // loope without ZF
        (&[0xe3, 0x06], 0, 0x1_0000, 0x108),       // jcxz looks at CX alone
    ];
    for (code, flags, count, to) in cases {
        let mut m = real();
        (m.rflags, m.gpr[RCX]) = (2 | flags, count);
        assert_eq!(run(&mut m, code).unwrap().rip, to, "{code:x?}");
    }
    let mut m = real();
    run(&mut m, &[0xe8, 0x00, 0x02]).unwrap(); // call near
    assert_eq!((m.rip, m.gpr[RSP], word(&m, 0x17fe)), (0x303, 0x17fe, 0x103));
    run(&mut m, &[0xea, 0x78, 0x56, 0x00, 0x30]).unwrap(); // jmp 0x3000:0x5678
    let cs = m.segments[SegReg::Cs as usize];
    assert_eq!((m.rip, cs.selector, cs.base), (0x5678, 0x3000, 0x3_0000));
}

#[test]
fn flags_and_registers_change_as_told() {
    let mut m = real();
    assert!(run(&mut m, &[0xfb]).unwrap().interrupt_shadow); // sti
    assert!(!run(&mut m, &[0xfb]).unwrap().interrupt_shadow);
    run(&mut m, &[0xfd]).unwrap(); // std
    run(&mut m, &[0xf9]).unwrap(); // stc
    assert_eq!(m.rflags, 2 | IF | DF | CF);
    run(&mut m, &[0x9c]).unwrap(); // pushf
    run(&mut m, &[0xfa]).unwrap(); // cli
    run(&mut m, &[0xf5]).unwrap(); // cmc
    assert_eq!(m.rflags, 2 | DF);
    run(&mut m, &[0x9d]).unwrap(); // popf
    assert_eq!((m.rflags, m.gpr[RSP]), (2 | IF | DF | CF, 0x1800));
    run(&mut m, &[0x9f]).unwrap(); // lahf
    assert_eq!(m.gpr[RAX], 0x0300);
    m.gpr[RAX] = 0x80;
    run(&mut m, &[0x98]).unwrap(); // cbw
    run(&mut m, &[0x99]).unwrap(); // cwd
    assert_eq!((m.gpr[RAX], m.gpr[RDX]), (0xff80, 0xffff));
}

#[test]
fn all_registers_go_to_the_stack_and_come_back() {
    let mut m = real();
    (0..8).filter(|n| *n != RSP).for_each(|n| m.gpr[n] = 0x1111 * n as u64);
    let before = m.gpr;
    run(&mut m, &[0x60]).unwrap(); // pusha
    assert_eq!((m.gpr[RSP], word(&m, 0x17f0), word(&m, 0x17f6)), (0x17f0, 0x7777, 0x1800));
    m.gpr[RBX] = 0;
    m.gpr[RDI] = 0;
    run(&mut m, &[0x61]).unwrap(); // popa
    assert_eq!(m.gpr, before);
}

#[test]
fn an_interrupt_goes_through_the_table_and_iret_comes_back() {
    for (code, back) in [(Some(&[0xcd, 0x05][..]), 0x102), (None, 0x100)] {
        let mut m = real();
        m.rflags = 2 | IF | CF;
        match code {
            Some(code) => run(&mut m, code).map(|_| ()).unwrap(),
            None => {
                let done = deliver(&mut m, 5).unwrap();
                (m.rip, m.rflags) = (done.rip, done.rflags.bits());
            }
        }
        let cs = m.segments[SegReg::Cs as usize];
        assert_eq!((m.rip, cs.selector, cs.base, m.rflags), (0x1234, 0x2000, 0x2_0000, 2 | CF));
        assert_eq!([0x17fa, 0x17fc, 0x17fe].map(|at| word(&m, at)), [back, 0, 0x203]);
        run(&mut m, &[0xcf]).unwrap(); // iret
        assert_eq!((m.rip, m.rflags, m.gpr[RSP]), (back.into(), 2 | IF | CF, 0x1800));
        assert_eq!(m.segments[SegReg::Cs as usize].base, 0);
    }
}

#[test]
fn an_interrupt_that_cannot_be_taken_changes_nothing() {
    let mut m = real();
    let beyond = deliver(&mut m, 16);
    assert_eq!(beyond, Err(Stop::Fault(Exception::gp(0))));
    // The third word would lie beyond the segment.
    m.gpr[RSP] = 5;
    m.absent = 0..RAM;
    let before = m.clone();
    assert!(matches!(deliver(&mut m, 5), Err(Stop::Fault(_))));
    assert_eq!((m.gpr, m.rip, m.rflags), (before.gpr, before.rip, before.rflags));
    // Gates of protected mode are not looked at.
    let mut m = real();
    m.cr0 = 1;
    assert_eq!(deliver(&mut m, 5), Err(Stop::Unsupported));
}

#[test]
fn what_emulate_refuses_it_still_refuses() {
    for code in [&[0xeb, 0x10][..], &[0xcd, 0x05], &[0xfa], &[0xcf], &[0x9d], &[0x60]] {
        let mut m = real();
        assert_eq!(m.once(code), Err(Stop::Unsupported), "{code:x?}");
    }
}

#[test]
fn what_only_a_vcpu_can_do_is_told_apart() {
    let m = real();
    for (code, what) in [
        (&[0x0f, 0xa2][..], Some(Outside::Cpuid)),
        (&[0xf4], Some(Outside::Hlt)),
        (&[0x0f, 0x30], Some(Outside::Wrmsr)),
        (&[0x0f, 0x09], Some(Outside::Nothing)),
        (&[0x0f, 0x0b], Some(Outside::Undefined)),
        (&[0x90], None),
    ] {
        assert_eq!(m.decoded(code).outside(), what, "{code:x?}");
    }
    assert!(m.decoded(&[0xcf]).is_iret());
}
