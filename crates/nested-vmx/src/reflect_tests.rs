use super::*;
use crate::testing::{Memory, Vmcs02, good, set};

const GPRS: Gprs = [0; 16];

fn claim_of(v: &Vmcs12, reason: ExitReason, qualification: u64, gprs: &Gprs) -> Claim {
    let mut exit = Vmcs02::new();
    exit.put(field::EXIT_REASON, u32::from(reason.0));
    exit.put(field::EXIT_QUALIFICATION, qualification);
    claim(v, &exit, gprs, &Wants::default(), &Memory::new())
}

fn exception_of(v: &Vmcs12, information: u32, code: u32, wants: Wants) -> Claim {
    let mut exit = Vmcs02::new();
    exit.put(field::EXIT_INTERRUPTION, information);
    exit.put(field::EXIT_ERROR_CODE, code);
    claim(v, &exit, &GPRS, &wants, &Memory::new())
}

#[test]
fn each_control_lets_its_exit_through() {
    let primary: &[(ExitReason, u32)] = &[
        (ExitReason::InterruptWindow, 2),
        (ExitReason::Hlt, 7),
        (ExitReason::Invlpg, 9),
        (ExitReason::Mwait, 10),
        (ExitReason::Rdpmc, 11),
        (ExitReason::Rdtsc, 12),
        (ExitReason::Rdtscp, 12),
        (ExitReason::TprBelowThreshold, 21),
        (ExitReason::NmiWindow, 22),
        (ExitReason::DrAccess, 23),
        (ExitReason::MonitorTrap, 27),
        (ExitReason::Monitor, 29),
        (ExitReason::Pause, 30),
    ];
    for &(reason, bit) in primary {
        let mut v = good();
        set!(v, PROC_CONTROLS = !(1 << bit));
        assert_eq!(claim_of(&v, reason, 0, &GPRS), Claim::L0, "{reason:?}");
        set!(v, PROC_CONTROLS = 1 << bit);
        assert_eq!(claim_of(&v, reason, 0, &GPRS), Claim::L1, "{reason:?}");
    }
    let secondary: &[(ExitReason, u32)] = &[
        (ExitReason::GdtrIdtr, 2),
        (ExitReason::LdtrTr, 2),
        (ExitReason::Wbinvd, 6),
        (ExitReason::Rdrand, 11),
        (ExitReason::Rdseed, 16),
    ];
    for &(reason, bit) in secondary {
        let mut v = good();
        set!(v, PROC_CONTROLS2 = !(1 << bit));
        assert_eq!(claim_of(&v, reason, 0, &GPRS), Claim::L0, "{reason:?}");
        set!(v, PROC_CONTROLS2 = 1 << bit);
        assert_eq!(claim_of(&v, reason, 0, &GPRS), Claim::L1, "{reason:?}");
    }
}

#[test]
fn some_exits_are_always_l1s_and_some_l0s() {
    for reason in [2, 9, 10, 11, 13, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 33, 44, 45, 50, 53, 55]
    {
        assert_eq!(claim_of(&good(), ExitReason(reason), 0, &GPRS), Claim::L1, "{reason}");
    }
    assert_eq!(claim_of(&good(), ExitReason(59), 0, &GPRS), Claim::Function);
    for reason in [1, 3, 4, 6, 41, 48, 49, 52, 60, 62] {
        assert_eq!(claim_of(&good(), ExitReason(reason), 0, &GPRS), Claim::L0, "{reason}");
    }
}

#[test]
fn exceptions_by_bitmap_and_page_faults_by_code() {
    let mut v = good();
    let none = Wants::default();
    assert_eq!(exception_of(&v, 0x8000_0202, 0, none), Claim::L0, "the host's NMI");
    assert_eq!(exception_of(&v, 0x8000_0306, 0, none), Claim::L0);
    set!(v, EXCEPTION_BITMAP = 1 << 6 | 1 << 1);
    assert_eq!(exception_of(&v, 0x8000_0306, 0, none), Claim::L1);
    let debug = Wants { debug: 1 << 1, ..none };
    assert_eq!(exception_of(&v, 0x8000_0301, 0, debug), Claim::L0);
    for (bit, mask, matching, code, exits) in [
        (false, 0, 0, 6, false),
        (false, 0, 1, 6, true),
        (true, 0, 0, 6, true),
        (true, 0, 1, 6, false),
        (true, 2, 2, 6, true),
        (true, 2, 2, 4, false),
        (false, 2, 2, 4, true),
    ] {
        set!(v, EXCEPTION_BITMAP = u32::from(bit) << 14);
        set!(v, PAGE_FAULT_MASK = mask, PAGE_FAULT_MATCH = matching);
        let expected = if exits { Claim::L1 } else { Claim::L0 };
        assert_eq!(exception_of(&v, 0x8000_0b0e, code, none), expected);
        assert_eq!(exception_exits(&v, 14, code), exits);
        let shadow = Wants { page_faults: true, ..none };
        assert_eq!(exception_of(&v, 0x8000_0b0e, code, shadow), Claim::L0);
    }
}

#[test]
fn control_registers_by_masks() {
    let mut v = good();
    set!(v, CR0_MASK = 0x8000_0009, CR0_SHADOW = 0x8, CR4_MASK = 0x20, CR4_SHADOW = 0x20);
    set!(v, PROC_CONTROLS = 0);
    let to = |v: &Vmcs12, number: u64, value: u64| {
        let mut gprs = GPRS;
        gprs[3] = value;
        claim_of(v, ExitReason::CrAccess, number | 3 << 8, &gprs)
    };
    assert_eq!(to(&v, 0, 0x8), Claim::L0);
    assert_eq!(to(&v, 0, 0x0), Claim::L1);
    assert_eq!(to(&v, 0, 0xe), Claim::L0);
    assert_eq!(to(&v, 4, 0x20), Claim::L0);
    assert_eq!(to(&v, 4, 0), Claim::L1);
    assert_eq!((to(&v, 3, 0), to(&v, 8, 0)), (Claim::L0, Claim::L0));
    let clts = |v: &Vmcs12| claim_of(v, ExitReason::CrAccess, cr::CLTS, &GPRS);
    assert_eq!(clts(&v), Claim::L1);
    let lmsw =
        |v: &Vmcs12, value: u64| claim_of(v, ExitReason::CrAccess, cr::LMSW | value << 16, &GPRS);
    assert_eq!(lmsw(&v, 0x8), Claim::L0);
    assert_eq!(lmsw(&v, 0x0), Claim::L1);
    assert_eq!(lmsw(&v, 0x9), Claim::L1, "sets PE");
    set!(v, CR0_SHADOW = 0x9);
    assert_eq!(lmsw(&v, 0x8), Claim::L0, "cannot clear PE");
    set!(v, CR0_SHADOW = 0);
    assert_eq!(clts(&v), Claim::L0);
    set!(v, PROC_CONTROLS = 1 << 15 | 1 << 16 | 1 << 19 | 1 << 20);
    for (access, number) in [(0, 3), (1, 3), (0, 8), (1, 8)] {
        let qualification = number | access << 4;
        assert_eq!(claim_of(&v, ExitReason::CrAccess, qualification, &GPRS), Claim::L1);
    }
}

/// What long mode left in the upper half of a register is no part of the operand of 32-bit code.
#[test]
fn outside_64_bit_code_a_register_has_its_lower_half() {
    let mut gprs = GPRS;
    gprs[3] = 0xffff_ffff_0000_0020;
    let to = |v: &Vmcs12, number: u64, efer: u64, rights: u32| {
        let mut exit = Vmcs02::new();
        exit.put(field::EXIT_REASON, u32::from(ExitReason::CrAccess.0));
        exit.put(field::EXIT_QUALIFICATION, number | 3 << 8);
        exit.put(field::GUEST_EFER, efer);
        exit.put(field::GUEST_CS_RIGHTS, rights);
        claim(v, &exit, &gprs, &Wants::default(), &Memory::new())
    };
    let mut v = good();
    set!(v, CR0_MASK = u64::MAX, CR0_SHADOW = 0x20, CR4_MASK = u64::MAX, CR4_SHADOW = 0x20);
    for number in [0, 4] {
        assert_eq!(to(&v, number, 0xd01, 0xa09b), Claim::L1, "64-bit code");
        assert_eq!(to(&v, number, 0xd01, 0xc09b), Claim::L0, "compatibility mode");
        assert_eq!(to(&v, number, 0, 0xc09b), Claim::L0, "protected mode");
        assert_eq!(to(&v, number, 0, 0xa09b), Claim::L0, "CS.L means nothing there");
    }
    set!(v, CR0_SHADOW = 0x21, CR4_SHADOW = 0x21);
    for number in [0, 4] {
        assert_eq!(to(&v, number, 0, 0xc09b), Claim::L1);
    }
}

#[test]
fn a_trap_may_have_been_injected() {
    let mut v = good();
    set!(v, ENTRY_INTERRUPTION = 0x8000_0700);
    assert_eq!(claim_of(&v, ExitReason::MonitorTrap, 0, &GPRS), Claim::L1);
}

#[test]
fn invpcid_exits_as_invlpg_does() {
    let mut v = good();
    set!(v, PROC_CONTROLS = 1 << 31 | 1 << 9);
    assert_eq!(claim_of(&v, ExitReason::Invpcid, 0, &GPRS), Claim::L0);
    set!(v, PROC_CONTROLS2 = 1 << 12);
    assert_eq!(claim_of(&v, ExitReason::Invpcid, 0, &GPRS), Claim::L1);
}

#[test]
fn extended_states_exit_by_their_bitmap() {
    let mut v = good();
    let mut gprs = GPRS;
    gprs[0] = 1 << 8;
    set!(v, PROC_CONTROLS2 = 1 << 20, XSS_EXIT_BITMAP = 1 << 8);
    assert_eq!(claim_of(&v, ExitReason::Xsaves, 0, &gprs), Claim::L1);
    gprs[0] = 1 << 9;
    assert_eq!(claim_of(&v, ExitReason::Xrstors, 0, &gprs), Claim::L0);
}
