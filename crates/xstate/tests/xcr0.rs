//! The rules of XCR0, exhaustively over the bits that matter.

use gannet_xstate::{Xcr0Fault, xcr0_check, xcr0_valid};
use x86::Xcr0;

#[test]
fn each_rule_refuses_its_violation() {
    let all = Xcr0::all();
    assert_eq!(xcr0_check(0, all), Err(Xcr0Fault::X87Missing));
    assert_eq!(xcr0_check(0x2, all), Err(Xcr0Fault::X87Missing));
    assert_eq!(xcr0_check(0x5, all), Err(Xcr0Fault::AvxNeedsSse));
    assert_eq!(xcr0_check(0x9, all), Err(Xcr0Fault::MpxPair));
    assert_eq!(xcr0_check(0x11, all), Err(Xcr0Fault::MpxPair));
    assert_eq!(xcr0_check(0x27, all), Err(Xcr0Fault::Avx512Trio));
    assert_eq!(xcr0_check(0xe3, all), Err(Xcr0Fault::Avx512Trio));
    assert_eq!(xcr0_check(0x2_0001, all), Err(Xcr0Fault::AmxPair));
    assert_eq!(xcr0_check(0x4_0001, all), Err(Xcr0Fault::AmxPair));
    assert_eq!(xcr0_check(0x7, Xcr0::LEGACY), Err(Xcr0Fault::Unsupported));
    assert_eq!(xcr0_check(1 << 63 | 1, Xcr0::LEGACY), Err(Xcr0Fault::Unsupported));
}

#[test]
fn x87_alone_is_always_allowed() {
    assert!(xcr0_valid(1, Xcr0::empty()));
}

#[test]
fn the_values_that_kernels_write_are_allowed() {
    for value in [0x1, 0x3, 0x7, 0xe7, 0x207, 0x2e7, 0x602e7, 0x1f] {
        assert!(xcr0_valid(value, Xcr0::all()), "{value:#x}");
    }
}

#[test]
fn every_combination_agrees_with_the_rules_spelled_out() {
    for low in 0..=0x3ffu64 {
        for amx in 0..4u64 {
            let value = low & !0x100 | amx << 17;
            let bit = |n: u32| value >> n & 1 == 1;
            let expected = bit(0)
                && (!bit(2) || bit(1))
                && bit(3) == bit(4)
                && (bit(5) == bit(6) && bit(6) == bit(7) && (!bit(5) || bit(2)))
                && bit(17) == bit(18);
            assert_eq!(xcr0_valid(value, Xcr0::all()), expected, "{value:#x}");
        }
    }
}
