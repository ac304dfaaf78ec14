//! INVLPG and INVPCID: their operands, and the short way to an INVLPG's address.

mod machine;

use gannet_emulate::{CodeSize, Stop, decode, invlpg};
use machine::{RAX, RBX, TestMachine};
use proptest::prelude::*;
use x86::Exception;

const RAM: u64 = 0x1000;

#[test]
fn invlpg_names_a_linear_address_and_checks_nothing() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = 0x1234_5678_9abc_def0;
    m.run(&[0x0f, 0x01, 0x7b, 0x10]).unwrap(); // invlpg [rbx+16]
    assert_eq!(m.flushed, [(None, 0x1234_5678_9abc_df00)]);
    m.cpl = 3;
    assert_eq!(m.run(&[0x0f, 0x01, 0x3b]), Err(Stop::Fault(Exception::gp(0))));
}

#[test]
fn invpcid_reads_its_descriptor() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = RAM;
    m.set_bytes(RAM, &[5, 0, 0, 0, 0, 0, 0, 0, 0x00, 0x70, 0, 0, 0, 0, 0, 0]);
    m.gpr[RAX] = 1;
    m.run(&[0x66, 0x0f, 0x38, 0x82, 0x03]).unwrap(); // invpcid rax, [rbx]
    assert_eq!(m.flushed, [(Some((1, 5)), 0x7000)]);
    m.gpr[RAX] = 4;
    assert_eq!(m.run(&[0x66, 0x0f, 0x38, 0x82, 0x03]), Err(Stop::Fault(Exception::gp(0))));
    m.gpr[RAX] = 0;
    m.set_bytes(RAM + 1, &[0x10]);
    assert_eq!(m.run(&[0x66, 0x0f, 0x38, 0x82, 0x03]), Err(Stop::Fault(Exception::gp(0))));
}

#[test]
fn the_short_way_leaves_prefixes_and_other_modes_alone() {
    assert!(invlpg(&[0x0f, 0x01, 0x38], CodeSize::Bits64).is_some());
    assert_eq!(invlpg(&[0x0f, 0x01, 0x38], CodeSize::Bits32), None);
    assert_eq!(invlpg(&[0x65, 0x0f, 0x01, 0x38], CodeSize::Bits64), None);
    assert_eq!(invlpg(&[0x67, 0x0f, 0x01, 0x38], CodeSize::Bits64), None);
    // LMSW, SWAPGS.
    assert_eq!(invlpg(&[0x0f, 0x01, 0x30], CodeSize::Bits64), None);
    assert_eq!(invlpg(&[0x0f, 0x01, 0xf8], CodeSize::Bits64), None);
}

proptest! {
    /// The short way and the emulator agree on the address and the length.
    #[test]
    fn both_ways_lead_to_one_address(
        rex in prop::option::of(0x40u8..0x50),
        modrm in any::<u8>(),
        rest in prop::array::uniform6(any::<u8>()),
        gprs in prop::array::uniform16(any::<u64>()),
        cut in 0usize..12,
    ) {
        let mut code: Vec<u8> = rex.into_iter().collect();
        code.extend([0x0f, 0x01, modrm & 0xc7 | 0x38]);
        code.extend(rest);
        code.truncate(cut);
        let Some(short) = invlpg(&code, CodeSize::Bits64) else {
            let long = decode(&code, CodeSize::Bits64);
            prop_assert!(long.is_err() || modrm >> 6 == 3);
            return Ok(());
        };
        prop_assert_eq!(short.length, decode(&code, CodeSize::Bits64).unwrap().len());
        let mut m = TestMachine::long();
        m.gpr = gprs;
        let rip = m.rip;
        m.run(&code[..usize::from(short.length)]).unwrap();
        prop_assert_eq!(&m.flushed, &[(None, short.address(|n| gprs[n & 15], rip))]);
    }
}
