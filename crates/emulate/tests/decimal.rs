//! Decimal arithmetic and what firmware does to the x87 unit, in real mode.

mod machine;

use gannet_emulate::{Stop, interpret};
use machine::{RAX, TestMachine};
use proptest::prelude::*;
use x86::Exception;

const RAM: u64 = 0x1000;
const CF: u64 = 1;
const AF: u64 = 1 << 4;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;

fn real() -> TestMachine {
    TestMachine::real(RAM, 0x2000)
}

fn step(m: &mut TestMachine, code: &[u8]) -> Result<(), Stop> {
    m.start();
    let decoded = m.decoded(code);
    let done = interpret(m, &decoded)?;
    m.end(done);
    Ok(())
}

/// AX and flags after one instruction.
fn after(code: &[u8], ax: u64, flags: u64) -> (u64, u64) {
    let mut m = real();
    (m.gpr[RAX], m.rflags) = (0xdead_0000 | ax, 2 | flags);
    step(&mut m, code).unwrap();
    assert_eq!(m.gpr[RAX] >> 16, 0xdead);
    (m.gpr[RAX] & 0xffff, m.rflags)
}

const fn packed(n: u64) -> u64 {
    ((n / 10) << 4) | (n % 10)
}

proptest! {
    /// Two packed numbers are added and subtracted, and the result is a packed number.
    #[test]
    fn packed_numbers_stay_decimal(a in 0..100u64, b in 0..100u64) {
        let mut m = real();
        m.gpr[RAX] = packed(a);
        step(&mut m, &[0x04, packed(b) as u8]).unwrap(); // add
        step(&mut m, &[0x27]).unwrap(); // daa
        prop_assert_eq!(m.gpr[RAX], packed((a + b) % 100));
        prop_assert_eq!(m.rflags & CF != 0, a + b > 99);
        m.gpr[RAX] = packed(a);
        step(&mut m, &[0x2c, packed(b) as u8]).unwrap(); // sub
        step(&mut m, &[0x2f]).unwrap(); // das
        prop_assert_eq!(m.gpr[RAX], packed((100 + a - b) % 100));
        prop_assert_eq!(m.rflags & CF != 0, b > a);
    }

    /// Single digits carry into AH and borrow of it.
    #[test]
    fn digits_carry(a in 0..10u64, b in 0..10u64, high in 0..256u64) {
        let mut m = real();
        m.gpr[RAX] = (high << 8) | a;
        step(&mut m, &[0x04, b as u8]).unwrap();
        step(&mut m, &[0x37]).unwrap(); // aaa
        let carry = u64::from(a + b > 9);
        prop_assert_eq!(m.gpr[RAX], (((high + carry) % 256) << 8) | ((a + b) % 10));
        prop_assert_eq!(m.rflags & (CF | AF), carry * (CF | AF));
        m.gpr[RAX] = (high << 8) | a;
        step(&mut m, &[0x2c, b as u8]).unwrap();
        step(&mut m, &[0x3f]).unwrap(); // aas
        let borrow = u64::from(b > a);
        prop_assert_eq!(m.gpr[RAX], (((256 + high - borrow) % 256) << 8) | ((10 + a - b) % 10));
        prop_assert_eq!(m.rflags & (CF | AF), borrow * (CF | AF));
    }

    /// A product is split into digits, and two digits are joined.
    #[test]
    fn digits_of_a_product(al in 0..256u64, base in 1..256u64) {
        let (split, flags) = after(&[0xd4, base as u8], 0x5500 | al, CF);
        prop_assert_eq!(split, ((al / base) << 8) | (al % base));
        prop_assert_eq!(flags & (ZF | SF), (u64::from(al % base == 0) * ZF) | ((al % base) & SF));
        let (joined, _) = after(&[0xd5, base as u8], split, 0);
        prop_assert_eq!(joined, al);
    }
}

#[test]
fn the_manuals_examples() {
    assert_eq!(after(&[0x27], 0xae, AF).0, 0x14); // 79h + 35h, DAA
    assert_eq!(after(&[0x2f], 0xee, CF | AF).0, 0x88); // 35h - 47h, DAS
    // Each with its flags: the borrow of the lower digit alone.
    assert_eq!(after(&[0x2f], 0x05, AF), (0xff, 2 | CF | AF | SF | 4));
    assert_eq!(after(&[0xd6], 0, CF), (0xff, 2 | CF)); // salc
    assert_eq!(after(&[0xd6], 0xff, 0), (0, 2));
    let mut m = real();
    assert_eq!(step(&mut m, &[0xd4, 0]), Err(Stop::Fault(Exception::de())));
}

#[test]
fn firmware_finds_an_x87_unit() {
    let mut m = real();
    m.x87 = [0x1234, 0x80];
    assert_eq!(step(&mut m, &[0x9b]), Err(Stop::Fault(Exception::mf()))); // wait
    step(&mut m, &[0xdb, 0xe3]).unwrap(); // fninit
    step(&mut m, &[0xd9, 0x3e, 0x10, 0x10]).unwrap(); // fnstcw [0x1010]
    assert_eq!(m.bytes(RAM + 0x10, 2), [0x7f, 0x03]);
    m.x87[1] = 0x3800;
    step(&mut m, &[0xdf, 0xe0]).unwrap(); // fnstsw ax
    step(&mut m, &[0xdd, 0x3e, 0x12, 0x10]).unwrap(); // fnstsw [0x1012]
    assert_eq!((m.gpr[RAX], m.bytes(RAM + 0x12, 2)), (0x3800, &[0x00, 0x38][..]));
    step(&mut m, &[0x9b]).unwrap();
    // EM makes all but WAIT fault, TS alone all but WAIT, and MP with TS that too.
    for (cr0, code, faults) in [
        (4, &[0xdb, 0xe3][..], true),
        (8, &[0xdb, 0xe3], true),
        (4, &[0x9b], false),
        (8, &[0x9b], false),
        (0xa, &[0x9b], true),
    ] {
        m.cr0 = cr0;
        let expected = if faults { Err(Stop::Fault(Exception::nm())) } else { Ok(()) };
        assert_eq!(step(&mut m, code), expected, "{cr0:#x} {code:x?}");
    }
}
