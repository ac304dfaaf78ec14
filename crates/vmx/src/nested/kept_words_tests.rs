//! What of L2's words an entry does not take from VMCS12: CR0.CD and NW, DEBUGCTL.BTF, and the controls that L0 offers to L1.

extern crate std;
use super::round_trip_tests::{Rig, good};
use super::*;
use crate::fields;
use backend::{Claim, ControlRegisters, Nested as _, Permissions};
use nested_vmx::set;
use x86::msr;
use x86::vmcs::{ExitReason, ProcControls2, field};

/// CR0.CD and NW are no part of an entry, nor of an exit: L2 has L1's own, and L1 none of VMCS12's.
#[test]
fn l2_has_the_cache_bits_of_l1s_cr0() {
    for of_l1 in [Cr0::empty(), Cr0::CD] {
        let mut v12 = good();
        set!(v12, GUEST_CR0 = (Cr0::from_bits_retain(0x8005_0033) | (Cr0::CD_NW - of_l1)).bits());
        let mut r = Rig::new(&v12, 0xd01);
        let bits = |r: &Rig| ControlRegisters::cr0(&r.v) & Cr0::CD_NW;
        let shadow = |r: &Rig| Cr0::from_bits_retain(r.v.get(fields::CR0_SHADOW)) & Cr0::CD_NW;
        r.v.set_cr0(ControlRegisters::cr0(&r.v) | of_l1);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        assert_eq!((bits(&r), shadow(&r)), (of_l1, of_l1));
        r.enter(ExitReason::Cpuid, |_| {});
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        assert_eq!(bits(&r), of_l1, "L1 goes on with its own");
        // L1 changes its own, and nothing is to be composed.
        let new = Cr0::CD - of_l1;
        r.v.set_cr0((ControlRegisters::cr0(&r.v) - Cr0::CD_NW) | new);
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        assert_eq!((bits(&r), shadow(&r)), (new, new));
        // The hardware refuses the entry behind that.
        r.enter(ExitReason::ExternalInterrupt, |v| v.set(field::EXIT_REASON, 1 << 31 | 33));
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        assert_eq!(bits(&r), new, "an entry that fails while it loads");
    }
}

/// What L1 owns of them is saved as the register had it, and a state that is restored has L2's, whatever the vCPU had.
#[test]
fn the_cache_bits_of_a_saved_l2_are_those_it_ran_with() {
    use backend::NestedState as _;
    for mask in [Cr0::empty(), Cr0::CD_NW] {
        let mut v12 = good();
        let new = Cr0::from_bits_retain(0x8005_0033) | Cr0::CD_NW;
        set!(v12, GUEST_CR0 = new.bits(), CR0_MASK = mask.bits());
        let mut r = Rig::new(&v12, 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::ExternalInterrupt, |_| {});
        r.leave_loop();
        let mut bytes = std::vec![0; r.v.state_size()];
        r.v.save_state(&r.g, &mut bytes, &r.m).unwrap();
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        r.v.set_cr0(new);
        r.restore(&bytes, false);
        r.v.set_cr0(new - Cr0::CD_NW);
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        assert_eq!(ControlRegisters::cr0(&r.v) & Cr0::CD_NW, Cr0::empty());
    }
}

/// BTF is not L2's, and a step that pends in a shadow is as the hardware wants it without; L1's check goes by its field.
#[test]
fn a_step_from_branch_to_branch_in_a_shadow_enters() {
    let mut v12 = good();
    set!(
        v12,
        GUEST_RFLAGS = 0x302,
        GUEST_INTERRUPTIBILITY = 2,
        GUEST_DEBUGCTL = msr::debugctl::BTF,
        EXIT_CONTROLS = 0x3_6dfb & !(1 << 2) | 1 << 9 | 1 << 21
    );
    for loads in [true, false] {
        if !loads {
            set!(v12, ENTRY_CONTROLS = 0x11fb & !(1 << 2) | 1 << 9 | 1 << 15);
        }
        let mut r = Rig::new(&v12, 0xd01);
        let mut by = ExitReason::Vmlaunch;
        for _ in 0..3 {
            assert_eq!(r.go(by), Executed::Entered);
            r.enter(ExitReason::EptViolation, |v| {
                assert_eq!(v.get(field::GUEST_PENDING_DEBUG), 1 << 14);
            });
            assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
            by = ExitReason::Vmresume;
        }
    }
}

/// The VMM sets a filter, and the guest's CPUID, while L2 runs: L1 is offered an instruction or is not, and L2 has what L1
/// lets it have.
#[test]
fn what_l1_keeps_from_l2_stays_while_the_vmm_sets_its_filter() {
    let offered = ProcControls2::RDTSCP;
    let word = |r: &Rig| ProcControls2::from_bits_retain(r.v.get(fields::PROC_CONTROLS2));
    for wanted in [ProcControls2::empty(), offered] {
        let mut v12 = good();
        set!(v12, PROC_CONTROLS2 = wanted.bits());
        let mut r = Rig::new(&v12, 0xd01);
        for on in [true, false] {
            let mut limits = r.v.cold.limits;
            limits.tsc_aux = true;
            r.v.set_limits(limits);
            assert!(word(&r).contains(offered));
            let by = if on { ExitReason::Vmlaunch } else { ExitReason::Vmresume };
            assert_eq!(r.go(by), Executed::Entered);
            limits.tsc_aux = on;
            r.v.set_limits(limits);
            r.v.set_msr_filter(|_| x86::Directions::empty());
            assert_eq!(word(&r) & offered, wanted, "L2");
            r.enter(ExitReason::Cpuid, |_| {});
            assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
            assert_eq!(word(&r).contains(offered), on, "L1");
        }
    }
}

/// What else an L2 that goes on has of MSRs. Restored they are the vCPU's, which the VMM has set before; behind RSM they are
/// those of before the SMI, and L1's own the handler's.
#[test]
fn an_l2_that_goes_on_has_its_own_debugctl_and_pat() {
    use backend::{GuestLimits, Msrs as _, NestedState as _};
    const RTM: u64 = msr::debugctl::RTM;
    const PATS: [u64; 2] = [0x0007_0406_0007_0406, 0x0606_0606_0606_0606];
    let mut v12 = good();
    let (entry, exit) = (v12.entry(), v12.exit());
    use x86::vmcs::{EntryControls as E, ExitControls as X};
    set!(
        v12,
        ENTRY_CONTROLS = (entry | E::LOAD_DEBUG | E::LOAD_PAT).bits(),
        EXIT_CONTROLS = (exit | X::SAVE_DEBUG | X::SAVE_PAT).bits(),
        GUEST_PAT = PATS[0]
    );
    let of = |r: &Rig| (r.v.msr(msr::DEBUGCTL).unwrap(), r.v.msr(msr::PAT).unwrap());
    for (before, pat) in [(0, PATS[1]), (RTM, PATS[0])] {
        let mut r = Rig::new(&v12, 0xd01);
        r.v.set_limits(GuestLimits { rtm: true, ..r.v.cold.limits });
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::ExternalInterrupt, |_| {});
        assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::L0), "the entry is over");
        r.leave_loop();
        // L2 has changed them itself.
        r.v.set_msr(msr::DEBUGCTL, RTM - before).unwrap();
        r.v.set_msr(msr::PAT, PATS[1]).unwrap();
        let mut bytes = std::vec![0; r.v.state_size()];
        r.v.save_state(&r.g, &mut bytes, &r.m).unwrap();
        assert!(r.v.enter_smm(&mut r.g, Gpa(0), &r.m).is_ok());
        r.v.set_msr(msr::DEBUGCTL, before).unwrap();
        r.v.set_msr(msr::PAT, pat).unwrap();
        assert!(r.v.leave_smm(&mut r.g, Gpa(0), None, &r.m));
        assert_eq!(of(&r), (RTM - before, PATS[1]), "behind RSM");
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        r.v.set_msr(msr::DEBUGCTL, before).unwrap();
        r.v.set_msr(msr::PAT, pat).unwrap();
        r.restore(&bytes, false);
        assert_eq!(of(&r), (before, pat), "restored");
    }
}

/// What L2 has written to them is there again behind RSM, whether or not its hypervisor loads and saves them.
#[test]
fn rsm_brings_back_what_no_exit_saves() {
    use backend::{GuestLimits, Msrs as _};
    const RTM: u64 = msr::debugctl::RTM;
    const OTHER: u64 = 0x0606_0606_0606_0606;
    use x86::vmcs::{EntryControls as E, ExitControls as X};
    for loads in [true, false] {
        let mut v12 = good();
        let asked = if loads { E::LOAD_DEBUG | E::LOAD_PAT } else { E::empty() };
        let entry = (v12.entry() - (E::LOAD_DEBUG | E::LOAD_PAT)) | asked;
        let exit = v12.exit() - (X::SAVE_DEBUG | X::SAVE_PAT);
        set!(v12, ENTRY_CONTROLS = entry.bits(), EXIT_CONTROLS = exit.bits());
        let mut r = Rig::new(&v12, 0xd01);
        r.v.set_limits(GuestLimits { rtm: true, ..r.v.cold.limits });
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::ExternalInterrupt, |_| {});
        assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::L0), "the entry is over");
        r.leave_loop();
        r.v.set_msr(msr::DEBUGCTL, RTM).unwrap();
        r.v.set_msr(msr::PAT, OTHER).unwrap();
        assert!(r.v.enter_smm(&mut r.g, Gpa(0), &r.m).is_ok());
        assert_ne!(r.v.msr(msr::PAT), Ok(OTHER), "L1's own");
        assert!(r.v.leave_smm(&mut r.g, Gpa(0), None, &r.m));
        assert_eq!((r.v.msr(msr::DEBUGCTL), r.v.msr(msr::PAT)), (Ok(RTM), Ok(OTHER)), "{loads}");
    }
}
