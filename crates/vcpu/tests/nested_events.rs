//! A guest that runs a guest of its own by SVM: where events go, and what L1 asked to hear of.

mod rig;

use backend::RDX;
use gannet_vcpu::{
    By, RunInput, UserExit,
    state::registers::{GivenEvents, SavedEvents},
};
use rig::nested::{BLOCK, Hypervisor, L1_RIP, L2_RIP, vmrun};
use rig::{Machine, exit, shutdown, vcpu_of};
use svm::Features;
use x86::vmcb::{ExitCode, event, vintr};
use x86::{Cr0, Efer, Rflags, Vector, msr};

/// The third intercept word, and where the others lie.
const THIRD: u64 = BLOCK + 0x08;
const INTR: u64 = 1;
const NMI: u64 = 1 << 1;
const SMI: u64 = 1 << 2;
const INIT: u64 = 1 << 3;
const VINTR: u32 = 1 << 4;
const CR0_SEL_WRITE: u64 = 1 << 5;
const CPUID: u64 = 1 << 18;
const SHUTDOWN: u64 = 1 << 31;

const EXIT_CODE: u64 = BLOCK + 0x70;
const EVENTINJ: u64 = BLOCK + 0xa8;
const CR0: u64 = BLOCK + 0x558;

/// INT 0x80 that L1 injects.
const SOFT: u64 = event::VALID | event::SOFT | 0x80;

/// Behind L1's VMRUN.
const BEHIND: u64 = L1_RIP + 3;

/// The block intercepts these, of the third word.
fn intercepting(bits: u64) -> Hypervisor {
    let machine = Hypervisor::new(false);
    // The word is the upper half of what lies there.
    machine.put(THIRD, bits << 32);
    machine
}

/// A fault of ours at `gpa`, in the delivery of `event`.
fn fault_in_delivery(machine: &mut Hypervisor, gpa: u64, event: u64) {
    machine.then(move |vmcb, gprs| {
        exit(ExitCode::Npf)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1 << 32 | 2;
        vmcb.control.exit_info_2 = gpa;
        vmcb.control.next_rip = 0;
        vmcb.control.exit_int_info = event;
    });
}

#[test]
fn a_breakpoint_that_l1_injects_survives_a_fault_of_ours_in_its_delivery() {
    // L2 is in 64-bit mode, which has no #OF.
    for injected in [event::EXCEPTION | 3, event::SOFT | 0x80] {
        let injected = event::VALID | injected;
        let mut machine = intercepting(0);
        machine.put(EVENTINJ, injected);
        machine.put(BLOCK + 0xc8, L2_RIP + 1);
        machine.vmrun();
        fault_in_delivery(&mut machine, 0x5000, injected);
        machine.vcpu.backend().cpu().inner().injects(injected);
        // Twice, on a stack of two pages.
        fault_in_delivery(&mut machine, 0xa000, injected);
        machine.vcpu.backend().cpu().inner().injects(injected);
        machine.then(|vmcb, gprs| {
            assert_eq!((vmcb.save.rip, vmcb.control.next_rip), (L2_RIP, L2_RIP + 1));
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
    }
}

/// L1 injects an interrupt or an NMI for which L2 has no gate: it is lost, as in a CPU, and nothing of L1's machine.
#[test]
fn what_l1_injects_and_l2_has_no_gate_for_is_lost() {
    let cases = [(event::NMI | 2, NMI, 0), (0x31, INTR, vintr::INTR_MASKING)];
    for (irqchip, (injected, asks, int_ctl)) in
        [false, true].into_iter().flat_map(|irqchip| cases.map(|case| (irqchip, case)))
    {
        let injected = event::VALID | injected;
        let mut machine = Hypervisor::new(irqchip);
        machine.put(THIRD, (asks | CPUID) << 32);
        machine.put(BLOCK + 0x60, int_ctl.into());
        machine.put(BLOCK + 0x570, Rflags::IF.bits() | 2);
        machine.put(EVENTINJ, injected);
        // The same vector is in service in L1, which has taken it.
        machine.vcpu.shared().lapic.set_isr(Vector(0x31));
        machine.vmrun();
        machine.then(move |vmcb, gprs| {
            exit(ExitCode::ExcpGp)(vmcb, gprs);
            vmcb.control.exit_info_1 = 0x18;
            vmcb.control.exit_int_info = injected;
        });
        let fault = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;
        machine.vcpu.backend().cpu().inner().injects(fault | 0x18 << 32);
        machine.then(exit(ExitCode::Wbinvd));
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(|vmcb, gprs| {
            assert!(vmcb.save.rip < L2_RIP + 8 && vmcb.save.rip >= L2_RIP);
            exit(ExitCode::Cpuid)(vmcb, gprs);
        });
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.save.rip, BEHIND);
            exit(ExitCode::Stgi)(vmcb, gprs);
        });
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(rig::unknown);
        assert_eq!(machine.run(), rig::UNKNOWN);
        assert_eq!(machine.get(EXIT_CODE), ExitCode::Cpuid.0);
        let events = machine.vcpu.saved_events();
        assert_eq!((events.nmi_pending, events.interrupt), (0, None));
        assert_eq!(machine.vcpu.shared().lapic.in_service(), Some(Vector(0x31)));
    }
}

/// L1 injects an NMI into L2, with these intercepts, and handles one of its own or not. The machine, and what is injected.
fn injecting_an_nmi(intercepts: u64, masked: bool) -> (Hypervisor, u64) {
    let injected = event::VALID | event::NMI | 2;
    let mut machine = intercepting(intercepts);
    machine.put(EVENTINJ, injected);
    let events = SavedEvents { nmi_masked: masked, ..SavedEvents::default() };
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.vmrun();
    (machine, injected)
}

/// Whether L1 intercepts NMIs, and whether it handles one.
fn nmi_cases() -> impl Iterator<Item = (u64, bool)> {
    [NMI | CPUID, CPUID].into_iter().flat_map(|intercepts| [false, true].map(|m| (intercepts, m)))
}

/// An NMI that L1 injects is L2's, and so is its mask, which L1 keeps: L1's own stays as it is, whatever comes between.
#[test]
fn an_injected_nmi_that_goes_in_again_masks_none_of_l1s() {
    for (intercepts, masked) in nmi_cases() {
        let (mut machine, injected) = injecting_an_nmi(intercepts, masked);
        for gpa in [0x5000, 0xa000] {
            fault_in_delivery(&mut machine, gpa, injected);
            machine.vcpu.backend().cpu().inner().injects(injected);
        }
        machine.then(exit(ExitCode::Cpuid));
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.save.rip, BEHIND);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.vcpu.saved_events().nmi_masked, masked);
    }
}

/// L1 handles an NMI of its own, and runs an L2 into which it injects one that does not arrive.
#[test]
fn an_injected_nmi_that_does_not_arrive_leaves_l1s_mask() {
    for (intercepts, masked) in nmi_cases() {
        let (mut machine, injected) = injecting_an_nmi(intercepts, masked);
        machine.then(move |vmcb, gprs| {
            exit(ExitCode::Cpuid)(vmcb, gprs);
            vmcb.control.exit_int_info = injected;
        });
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.get(BLOCK + 0x88), injected);
        assert_eq!(machine.vcpu.saved_events().nmi_masked, masked);
    }
}

/// Behind the one that L1 has injected one of L1's machine goes into L2, which L1 leaves to it: that masks.
#[test]
fn an_nmi_behind_one_that_l1_has_injected_is_masked_as_any() {
    let faulting = event::VALID | event::EXCEPTION | event::ERROR_VALID | 14;
    // The first exit behind the delivery is in that of another event, or in none.
    for info in [0, faulting] {
        let (mut machine, _) = injecting_an_nmi(0, false);
        machine.then(move |vmcb, gprs| {
            exit(ExitCode::Npf)(vmcb, gprs);
            vmcb.control.exit_info_1 = 1 << 32 | 2;
            vmcb.control.exit_info_2 = 0x5000;
            (vmcb.control.next_rip, vmcb.control.exit_int_info) = (0, info);
        });
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        machine.vcpu.queue_nmi();
        machine.vcpu.backend().cpu().inner().injects(event::VALID | event::NMI | 2);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert!(machine.vcpu.saved_events().nmi_masked);
    }
}

/// Of the third word.
const IRET: u32 = 1 << 20;

/// L2 handles an NMI of the machine's, which L1 leaves to it, and another waits. Its IRET at this RIP has begun.
fn in_iret(intercepts: u64, rip: u64) -> Hypervisor {
    let mut machine = intercepting(intercepts);
    machine.stop_in_l2();
    let events = SavedEvents { nmi_pending: 1, nmi_masked: true, ..SavedEvents::default() };
    let given = GivenEvents { nmi_pending: true, ..GivenEvents::default() };
    machine.vcpu.restore_events(&events, given);
    machine.then(move |vmcb, _| {
        assert_ne!(vmcb.control.intercepts[3] & IRET, 0);
        vmcb.save.rip = rip;
        vmcb.control.exit_code = ExitCode::Iret.0;
    });
    machine
}

/// The IRET meets what L1 intercepts, and has not retired: L1's RIP, which is another, does not end the mask.
#[test]
fn an_iret_of_l2s_that_has_not_retired_masks_behind_its_exit() {
    const AT: u64 = L2_RIP + 0x40;
    // A breakpoint of the VMM's, with which the exit is looked at outside of the loop.
    const BREAKPOINT: u32 = 1 | 1 << 17;
    for debugging in [0, BREAKPOINT] {
        let mut machine = in_iret(CPUID, AT);
        machine.vcpu.set_guest_debug(debugging, [0xf000, 0, 0, 0, 0, 0, 0, 0x402]);
        machine.then(|vmcb, gprs| {
            assert_eq!((vmcb.save.rip, vmcb.control.intercepts[3] & IRET), (AT, 0));
            exit(ExitCode::Cpuid)(vmcb, gprs);
        });
        // GIF no longer holds it back.
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.save.rip, BEHIND);
            exit(ExitCode::Stgi)(vmcb, gprs);
        });
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(exit(ExitCode::Wbinvd));
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.put(BLOCK + 0x578, AT);
        machine.then(vmrun);
        machine.then(|vmcb, _| {
            assert_eq!(vmcb.save.rip, AT);
            assert_ne!(vmcb.control.intercepts[3] & IRET, 0);
            vmcb.control.exit_code = ExitCode::Iret.0;
        });
        // It retires, and has popped flags of its own.
        machine.then(|vmcb, gprs| {
            (vmcb.save.rip, vmcb.save.rflags) = (L2_RIP + 0x80, 2);
            exit(ExitCode::Wbinvd)(vmcb, gprs);
        });
        machine.vcpu.backend().cpu().inner().injects(event::VALID | event::NMI | 2);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
    }
}

/// It has retired, and L1 is where the IRET was: the mask has fallen.
#[test]
fn an_iret_of_l2s_that_has_retired_masks_nowhere() {
    let mut machine = in_iret(CPUID, BEHIND);
    machine.then(|vmcb, gprs| {
        vmcb.save.rip = L2_RIP + 0x80;
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
        vmcb.control.next_rip = BEHIND;
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert!(!machine.vcpu.saved_events().nmi_masked);
}

/// L1's IRET has retired by its VMRUN, whatever RIP L2 begins at.
#[test]
fn an_iret_of_l1s_has_retired_by_its_vmrun() {
    let mut machine = intercepting(CPUID);
    let events = SavedEvents { nmi_masked: true, ..SavedEvents::default() };
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.then(|vmcb, _| {
        vmcb.save.rip = L2_RIP;
        vmcb.control.exit_code = ExitCode::Iret.0;
    });
    machine.then(|vmcb, gprs| {
        vmcb.save.rip = L1_RIP;
        vmrun(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        exit(ExitCode::Hlt)(vmcb, gprs);
        vmcb.control.next_rip = L2_RIP;
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert!(!machine.vcpu.saved_events().nmi_masked);
}

/// A state as stock KVM saves it when a signal comes just before an entry: VMCB12's event waits to be injected, and is among
/// the vCPU's events as well.
#[test]
fn an_event_that_a_saved_state_names_twice_comes_once() {
    const INT: u64 = event::VALID | 0x31;
    let orders = [false, true];
    let cases = [(INT, ExitCode::Cpuid), (INT, ExitCode::Wbinvd), (SOFT, ExitCode::Wbinvd)];
    for (state_first, (injected, next)) in
        orders.into_iter().flat_map(|order| cases.map(|case| (order, case)))
    {
        let mut machine = intercepting(CPUID);
        machine.put(EVENTINJ, injected);
        machine.put(BLOCK + 0x570, Rflags::IF.bits() | 2);
        machine.stop_in_l2();
        let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
        machine.vcpu.nested_state(&mut state).unwrap();
        // RUN_PENDING, and EVENTINJ of the page behind the header.
        state[0] |= 2;
        state[128 + 0xa8..][..8].copy_from_slice(&injected.to_le_bytes());
        state[128 + 0xc8..][..8].copy_from_slice(&(L2_RIP + 2).to_le_bytes());
        let (sregs, mut regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
        regs.rip = L2_RIP;
        let events = SavedEvents {
            interrupt: Some(Vector(injected as u8)),
            interrupt_soft: injected == SOFT,
            ..SavedEvents::default()
        };
        let mut machine = intercepting(CPUID);
        machine.vcpu.set_sregs(&sregs, None).unwrap();
        machine.vcpu.set_regs(&regs);
        rig::restore(&mut machine.vcpu, &state, &events, state_first);
        assert_eq!(machine.vcpu.saved_events().interrupt, events.interrupt);
        machine.vcpu.backend().cpu().inner().injects(injected);
        machine.then(move |vmcb, gprs| {
            assert_eq!((vmcb.save.rip, vmcb.control.next_rip), (L2_RIP, L2_RIP + 2));
            exit(next)(vmcb, gprs);
        });
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(exit(ExitCode::Wbinvd));
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        if next == ExitCode::Cpuid {
            assert_eq!(machine.get(EXIT_CODE), ExitCode::Cpuid.0);
        }
    }
}

/// The state of an L2 that stopped behind its entry, or before it with `injected` in EVENTINJ.
fn state_of_l2(injected: u64) -> Vec<u8> {
    let mut machine = intercepting(CPUID);
    machine.put(BLOCK + 0x570, Rflags::IF.bits() | 2);
    machine.stop_in_l2();
    let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
    machine.vcpu.nested_state(&mut state).unwrap();
    if injected != 0 {
        state[0] |= 2;
        state[128 + 0xa8..][..8].copy_from_slice(&injected.to_le_bytes());
    }
    state
}

/// What user space gives L2 by KVM_SET_VCPU_EVENTS and by KVM_SET_NESTED_STATE is the same in either order, and whatever the
/// vCPU did before and had to give: it runs L1 or an L2, with an event of its own or not. Of two injected ones that of
/// the vCPU's events goes in, as on stock KVM.
#[test]
fn events_and_nested_state_come_in_either_order_on_any_vcpu() {
    const OF_STATE: u64 = event::VALID | 0x31;
    const UD: u64 = event::VALID | event::EXCEPTION | 6;
    let none = SavedEvents::default();
    let interrupt = SavedEvents { interrupt: Some(Vector(0x40)), ..none };
    let nmi = SavedEvents { nmi_injected: true, nmi_masked: true, ..none };
    let injected =
        SavedEvents { exception: Some(x86::Exception::ud()), exception_injected: true, ..none };
    let pending = SavedEvents { exception_injected: false, ..injected };
    // The exception goes first, as on stock KVM, and the interrupt back to where it waits.
    let both = SavedEvents { interrupt: Some(Vector(0x40)), ..pending };
    // What VMCB12 injects, what the events are, and what goes in at the first entry and at the second.
    let cases = [
        (0, none, 0, 0),
        (OF_STATE, none, OF_STATE, 0),
        (0, interrupt, event::VALID | 0x40, 0),
        (OF_STATE, interrupt, event::VALID | 0x40, 0),
        (OF_STATE, nmi, event::VALID | event::NMI | 2, 0),
        (0, injected, UD, 0),
        (OF_STATE, injected, UD, 0),
        (0, pending, UD, 0),
        (OF_STATE, pending, OF_STATE, UD),
        (0, both, UD, event::VALID | 0x40),
    ];
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    for ((in_l2, stale), state_first) in
        kinds.into_iter().flat_map(|kind| [false, true].map(|first| (kind, first)))
    {
        for (of_state, events, first, second) in cases {
            let state = state_of_l2(of_state);
            let mut machine = intercepting(CPUID);
            if in_l2 {
                machine.put(BLOCK + 0x570, Rflags::IF.bits() | 2);
                machine.stop_in_l2();
            }
            if stale {
                let old = SavedEvents { interrupt: Some(Vector(0x77)), ..none };
                machine.vcpu.restore_events(&old, GivenEvents::default());
            }
            let mut regs = machine.vcpu.regs();
            (regs.rip, regs.rflags) = (L2_RIP, Rflags::IF | Rflags::FIXED);
            machine.vcpu.set_regs(&regs);
            rig::restore(&mut machine.vcpu, &state, &events, state_first);
            assert_eq!(machine.vcpu.saved_events().interrupt, events.interrupt);
            for goes_in in [first, second] {
                machine.vcpu.backend().cpu().inner().injects(goes_in);
                machine.then(exit(ExitCode::Wbinvd));
            }
            machine.vcpu.backend().cpu().inner().injects(0);
            machine.then(exit(ExitCode::Cpuid));
            machine.then(exit(ExitCode::Hlt));
            assert_eq!(machine.run(), UserExit::Hlt);
            assert_eq!(machine.get(EXIT_CODE), ExitCode::Cpuid.0, "L2 ran");
        }
    }
}

/// What L1 has injected into L2 waits nowhere else: it is not lost to an exception of user space's, which is hurried behind
/// it, before L2 executes anything that its hypervisor would hear of.
#[test]
fn an_exception_of_user_spaces_is_hurried_behind_an_event_of_l1s() {
    let mut state = state_of_l2(0);
    // VMCB12 intercepts interrupts, and names the one that it has injected.
    state[128 + 0x0c] |= INTR as u8;
    state[128 + 0xa8] = 0x40;
    let ud = Some(x86::Exception::ud());
    let both =
        SavedEvents { interrupt: Some(Vector(0x40)), exception: ud, ..SavedEvents::default() };
    let mut machine = intercepting(CPUID | INTR);
    let mut regs = machine.vcpu.regs();
    (regs.rip, regs.rflags) = (L2_RIP, Rflags::IF | Rflags::FIXED);
    machine.vcpu.set_regs(&regs);
    rig::restore(&mut machine.vcpu, &state, &both, true);
    let _ = host::std_port::test::take_kicks();
    machine.vcpu.backend().cpu().inner().injects(event::VALID | 0x40);
    machine.then(|vmcb, gprs| {
        let kicked = !host::std_port::test::take_kicks().is_empty();
        assert!(kicked, "nothing ends L2's run");
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    machine.vcpu.backend().cpu().inner().injects(event::VALID | event::EXCEPTION | 6);
    machine.then(exit(ExitCode::Wbinvd));
    machine.vcpu.backend().cpu().inner().injects(0);
    machine.then(exit(ExitCode::Cpuid));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
}

#[test]
fn a_breakpoint_of_l2s_own_is_executed_again() {
    let mut machine = intercepting(0);
    machine.put(EVENTINJ, event::VALID | event::EXCEPTION | 3);
    machine.vmrun();
    // Delivered; the handler has one itself.
    machine.then(|vmcb, gprs| {
        vmcb.save.rip = 0xb000;
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    let own = event::VALID | event::EXCEPTION | 3;
    fault_in_delivery(&mut machine, 0x5000, own);
    machine.vcpu.backend().cpu().inner().injects(0);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// L2 has caching off, which we hide: its writes of CR0 are ours to see. It writes `value` by MOV.
fn writes_cr0(machine: &mut Hypervisor, value: u64) {
    machine.put(CR0, 0xc001_0033);
    // Its tables: the first 2 MiB at their own addresses. Its code: MOV to CR0 from RDX.
    for (at, entry) in [(0x2000, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7)] {
        machine.put(at, entry);
    }
    machine.put(L2_RIP, 0xc2_220f);
    machine.vmrun();
    machine.then(move |vmcb, gprs| {
        assert_ne!(vmcb.control.intercepts[0] & 1 << 16, 0);
        exit(ExitCode::WriteCr0)(vmcb, gprs);
        vmcb.control.next_rip = L2_RIP + 3;
        vmcb.control.exit_info_1 = 1 << 63 | RDX as u64;
        gprs.0[RDX] = value;
    });
}

#[test]
fn l1_hears_of_a_change_of_cr0_that_it_asked_for_by_the_selective_intercept() {
    let mut machine = intercepting(CR0_SEL_WRITE);
    writes_cr0(&mut machine, 0x8001_0033);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Cr0SelWrite.0);
    assert_eq!((machine.get(CR0), machine.get(BLOCK + 0x578)), (0xc001_0033, L2_RIP));
}

#[test]
fn a_change_of_ts_alone_is_none_of_those() {
    let mut machine = intercepting(CR0_SEL_WRITE);
    writes_cr0(&mut machine, 0xc001_003b);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP + 3);
        assert_ne!(vmcb.save.cr0 & Cr0::TS.bits(), 0);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

#[test]
fn without_svm_its_instructions_are_undefined_whatever_lies_there() {
    let features = Features { nrip_save: false, ..rig::features() };
    let mut v = vcpu_of(&Machine { features, nested: true, ..Machine::default() });
    for code in [ExitCode::Vmrun, ExitCode::Vmsave, ExitCode::Stgi, ExitCode::Skinit] {
        // No memory lies at RIP.
        v.backend().cpu().inner().then(exit(code));
        v.backend().cpu().inner().injects(event::VALID | event::EXCEPTION | 6);
    }
    v.backend().cpu().inner().then(shutdown);
    assert_eq!(v.run(&Default::default()), UserExit::Shutdown);
}

#[test]
fn an_init_that_l1_intercepts_ends_l2s_run_and_waits_for_gif() {
    let mut machine = intercepting(INIT);
    machine.stop_in_l2();
    machine.vcpu.shared().set_init(true);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Stgi)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, 0xfff0);
        shutdown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Init.0);
}

#[test]
fn an_init_that_nobody_intercepts_resets() {
    let mut machine = intercepting(0);
    machine.stop_in_l2();
    machine.vcpu.shared().set_init(true);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, 0xfff0);
        shutdown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}

#[test]
fn an_init_waits_for_gif_and_for_the_entry_that_is_due() {
    let mut machine = intercepting(INIT);
    machine.then(exit(ExitCode::Clgi));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    machine.vcpu.shared().set_init(true);
    machine.then(vmrun);
    // VMRUN sets GIF; L2 is entered before it is left again.
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L1_RIP + 7);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Init.0);
}

#[test]
fn an_smi_that_l1_intercepts_ends_l2s_run_and_waits_for_gif() {
    let mut machine = intercepting(SMI);
    machine.stop_in_l2();
    machine.vcpu.queue_smi();
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Stgi)(vmcb, gprs);
    });
    // Then it is taken, and the other address space has no memory for the save area.
    assert_eq!(machine.run(), UserExit::Dead);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Smi.0);
}

#[test]
fn an_interrupt_that_l1_does_not_intercept_reaches_l2_when_it_lets_interrupts_in() {
    for waited in [0, vintr::IRQ | 3 << vintr::PRIO_SHIFT] {
        let mut machine = intercepting(0);
        machine.put(BLOCK + 0x60, u64::from(waited) | 0x55 << 32);
        machine.stop_in_l2();
        machine.vcpu.queue_interrupt(Vector(0x40)).unwrap();
        machine.then(|vmcb, gprs| {
            let open = vintr::IRQ | vintr::IGN_TPR;
            assert_eq!(vmcb.control.int_ctl & open, open);
            assert_ne!(vmcb.control.intercepts[3] & VINTR, 0);
            vmcb.save.rflags |= Rflags::IF.bits();
            exit(ExitCode::Vintr)(vmcb, gprs);
        });
        machine.vcpu.backend().cpu().inner().injects(event::VALID | event::INTR | 0x40);
        machine.then(move |vmcb, gprs| {
            const BITS: u32 = vintr::IRQ | vintr::IGN_TPR | 0xf << vintr::PRIO_SHIFT;
            assert_eq!((vmcb.control.int_ctl & BITS, vmcb.control.int_vector), (waited, 0x55));
            assert_eq!(vmcb.control.intercepts[3] & VINTR, 0);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
    }
}

#[test]
fn what_stands_for_the_window_is_not_told_to_l1() {
    let mut machine = intercepting(CPUID);
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(Vector(0x40)).unwrap();
    machine.then(|vmcb, gprs| {
        assert_ne!(vmcb.control.int_ctl & vintr::IRQ, 0);
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Cpuid.0);
    assert_eq!(machine.get(BLOCK + 0x60) as u32, 0);
}

#[test]
fn with_interrupts_masked_for_l1_no_window_is_opened() {
    let mut machine = intercepting(0);
    machine.put(BLOCK + 0x60, u64::from(vintr::INTR_MASKING));
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(Vector(0x40)).unwrap();
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & vintr::IRQ, 0);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

#[test]
fn the_predictions_of_l2_are_forgotten_before_l1_goes_on() {
    let mut machine = intercepting(CPUID);
    machine.vmrun();
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    machine.vcpu.backend().cpu().inner().msrs.remove(&msr::PRED_CMD);
    // An exit that is ours leaves L2 running.
    machine.then(exit(ExitCode::Wbinvd));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.backend().cpu().inner().msrs.get(&msr::PRED_CMD), None);
    machine.then(exit(ExitCode::Cpuid));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.backend().cpu().inner().msrs.get(&msr::PRED_CMD), Some(&1));
}

#[test]
fn svm_that_is_disabled_cannot_be_enabled() {
    const SVMDIS: u64 = msr::vm_cr::SVMDIS;
    let mut v = Hypervisor::new(false).vcpu;
    let efer = v.sregs().efer;
    assert!(v.write_msr(msr::VM_CR, SVMDIS, By::Guest).is_err(), "while it is enabled");
    v.write_msr(msr::EFER, (efer - Efer::SVME).bits(), By::Guest).unwrap();
    v.write_msr(msr::EFER, efer.bits(), By::Guest).unwrap();
    v.write_msr(msr::EFER, (efer - Efer::SVME).bits(), By::Guest).unwrap();
    v.write_msr(msr::VM_CR, SVMDIS, By::Guest).unwrap();
    assert!(v.write_msr(msr::EFER, efer.bits(), By::Guest).is_err());
}

/// L2 has a page that is a device of the VMM's, and touches it by what the exit tells of as `code`; at its RIP lie these
/// bytes, in whose place another were when the CPU executed them. What comes of it.
fn touches_a_device(bytes: u64, code: u64) -> (UserExit, Hypervisor) {
    const DEVICE: u64 = 0x10_0000;
    const USED: u64 = 7;
    let mut machine = intercepting(0);
    for (at, entry) in [(0x2000, 0x3000 | USED), (0x3000, 0x4000 | USED), (0x4000, 0x80 | USED)] {
        machine.put(at, entry);
    }
    machine.put(L2_RIP, bytes);
    machine.vmrun();
    machine.then(move |vmcb, gprs| {
        exit(ExitCode::Npf)(vmcb, gprs);
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (1 << 32 | code, DEVICE);
        vmcb.control.next_rip = 0;
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    (machine.run(), machine)
}

#[test]
fn an_instruction_that_l1_may_intercept_is_not_emulated_as_an_access() {
    // OUTSB, OUT, LGDT, INVPCID: L1 heard of none.
    for bytes in [0x6e, 0xee, 0x0017_010f, 0x0007_8238_0f66] {
        let (user, _machine) = touches_a_device(bytes, 4);
        assert_eq!(user, UserExit::Hlt, "{bytes:x}");
    }
    // MOV AL, [RDI]: the device's own page.
    let (user, _machine) = touches_a_device(0x078a, 4);
    assert!(matches!(user, UserExit::Mmio { .. }), "{user:?}");
}

/// User space gives L2 a triple fault.
fn give_triple_fault(machine: &mut Hypervisor) {
    let events = SavedEvents { triple_fault: true, ..SavedEvents::default() };
    let given = GivenEvents { triple_fault: true, ..GivenEvents::default() };
    machine.vcpu.restore_events(&events, given);
}

#[test]
fn a_shutdown_that_no_cpu_made_is_l1s_if_it_intercepts_it() {
    let mut machine = intercepting(SHUTDOWN);
    machine.stop_in_l2();
    give_triple_fault(&mut machine);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        shutdown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Shutdown.0);
    let mut machine = intercepting(0);
    machine.stop_in_l2();
    give_triple_fault(&mut machine);
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(machine.get(EXIT_CODE), 0);
}

/// An event that L2 is to take first, because a fault of ours interrupted its delivery, is delivered before an NMI or
/// an interrupt ends L2's run: no CPU exits for one amid a delivery, and KVM as L1 ends its guest for it.
#[test]
fn an_nmi_waits_for_the_event_that_l2_is_taking() {
    let mut machine = intercepting(NMI);
    machine.vmrun();
    let taken = event::VALID | event::INTR | 0x33;
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcb, gprs| {
        shared.add_nmi();
        exit(ExitCode::Npf)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1 << 32 | 2;
        vmcb.control.exit_info_2 = 0x5000;
        vmcb.control.exit_int_info = taken;
    });
    machine.vcpu.backend().cpu().inner().injects(taken);
    machine.then(exit(ExitCode::Intr));
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Nmi.0);
    assert_eq!(machine.get(BLOCK + 0x88), 0, "EXITINTINFO");
}

/// A fault belongs to L2's instruction: an event that comes meanwhile, and ends L2's run, gives it neither to L1 nor
/// to nobody.
#[test]
fn a_fault_of_l2s_is_taken_by_l2_though_an_nmi_ends_its_run() {
    let mut machine = intercepting(NMI);
    for (at, entry) in [(0x2000, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7)] {
        machine.put(at, entry);
    }
    // UD2.
    machine.put(L2_RIP, 0x0b0f);
    machine.vmrun();
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcb, gprs| {
        shared.add_nmi();
        exit(ExitCode(ExitCode::Excp0.0 + 6))(vmcb, gprs);
    });
    machine.vcpu.backend().cpu().inner().injects(event::VALID | event::EXCEPTION | 6);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP);
        exit(ExitCode::Intr)(vmcb, gprs);
    });
    machine.vcpu.backend().cpu().inner().injects(0);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Nmi.0);
    assert_eq!(machine.get(BLOCK + 0x88), 0, "EXITINTINFO");
}

/// User space takes SVM from L1 while L2 has a fault or an event to take: neither is L1's.
#[test]
fn what_l2_was_to_take_goes_with_it() {
    for given in [
        SavedEvents { exception: Some(x86::Exception::gp(0)), ..SavedEvents::default() },
        SavedEvents { interrupt: Some(Vector(0x33)), ..SavedEvents::default() },
    ] {
        let mut machine = intercepting(0);
        machine.stop_in_l2();
        machine.vcpu.restore_events(&given, GivenEvents::default());
        let mut sregs = machine.vcpu.sregs();
        sregs.efer -= Efer::SVME;
        machine.vcpu.set_sregs(&sregs, None).unwrap();
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
    }
}

/// A VMM that saves no payloads has saved L2's fault while it waits: L1 is told its address all the same.
#[test]
fn an_address_that_went_to_cr2_early_is_told_to_l1() {
    const PF: u8 = 14;
    const ADDRESS: u64 = 0x1234_5678;
    let mut machine = intercepting(0);
    machine.put(THIRD, 1 << PF);
    machine.stop_in_l2();
    let fault = x86::Exception { vector: Vector(PF), error_code: Some(2), payload: Some(ADDRESS) };
    let given = SavedEvents { exception: Some(fault), ..SavedEvents::default() };
    machine.vcpu.restore_events(&given, GivenEvents::default());
    machine.vcpu.deliver_exception_payload();
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Excp0.0 + u64::from(PF));
    assert_eq!(machine.get(BLOCK + 0x80), ADDRESS);
}

/// The VMM has the interrupt controllers, L1 has interrupts on and intercepts them, and L2 masks its own: the VMM is
/// asked for the interrupt that ends L2's run, and sees the task priority of L1.
#[test]
fn l2_keeps_no_interrupt_of_the_vmms_from_l1() {
    let mut machine = intercepting(INTR);
    machine.put(BLOCK + 0x60, u64::from(vintr::INTR_MASKING | 9));
    let mut regs = machine.vcpu.regs();
    regs.rflags |= Rflags::IF;
    machine.vcpu.set_regs(&regs);
    machine.stop_in_l2();
    let shown = machine.vcpu.run_output();
    assert!(shown.ready_for_interrupt_injection);
    assert_eq!((shown.cr8, machine.vcpu.sregs().cr8), (0, 0), "L2's is 9");
    machine.vcpu.queue_interrupt(Vector(0x40)).unwrap();
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Intr.0);
    // Without V_INTR_MASKING it is L2's own flag.
    let mut machine = intercepting(INTR);
    machine.stop_in_l2();
    assert!(!machine.vcpu.run_output().ready_for_interrupt_injection);
}

/// L1 single-steps over VMRUN: the step ends behind it, when L2's run has (APM vol. 2 §15.5).
#[test]
fn a_step_over_vmrun_ends_behind_it() {
    let mut machine = intercepting(CPUID);
    let mut regs = machine.vcpu.regs();
    regs.rflags |= Rflags::TF;
    machine.vcpu.set_regs(&regs);
    machine.vmrun();
    machine.then(exit(ExitCode::Cpuid));
    machine.vcpu.backend().cpu().inner().injects(event::VALID | event::EXCEPTION | 1);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        assert_ne!(vmcb.save.dr6 & 1 << 14, 0);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// RDMSR of the TSC that L1 leaves to L2 reads L2's, as RDTSC does; user space reads L1's.
#[test]
fn l2_reads_its_own_tsc_by_rdmsr() {
    const MSR_TSC: u32 = 0x10;
    let mut machine = intercepting(0);
    machine.put(BLOCK + 0x50, 1 << 40);
    machine.stop_in_l2();
    machine.then(|vmcb, gprs| {
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 0;
        vmcb.control.next_rip = vmcb.save.rip + 2;
        gprs.0[backend::RCX] = u64::from(MSR_TSC);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(gprs.0[RDX] >> 8, 1, "{:#x}", gprs.0[RDX]);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.read_msr(MSR_TSC, By::Vmm).unwrap() >> 40, 0);
}

/// L1 lowers its task priority without an exit and enters L2, which has one of its own: what counts while L2 runs, and
/// what user space sees and writes back, is L1's priority of the entry.
#[test]
fn l1s_priority_of_the_entry_counts_while_l2_runs() {
    fn set_priority(vmcb: &mut x86::vmcb::Vmcb, cr8: u32) {
        vmcb.control.int_ctl = vmcb.control.int_ctl & !vintr::TPR_MASK | cr8;
    }
    let mut machine = intercepting(CPUID);
    machine.put(BLOCK + 0x60, u64::from(vintr::INTR_MASKING | 9));
    // What the second entry reads is in the tables, so that it takes place in the loop.
    for page in [BLOCK, 0, 0x1000, 0x2000, 0x3000] {
        fault_in_delivery(&mut machine, page, 0);
    }
    machine.vmrun();
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        set_priority(vmcb, 15);
        exit(ExitCode::Clgi)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        set_priority(vmcb, 2);
        vmrun(vmcb, gprs);
    });
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.shared().lapic.cr8(), 2);
    let sregs = machine.vcpu.sregs();
    assert_eq!((sregs.cr8, machine.vcpu.run_output().cr8), (2, 2));
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & vintr::TPR_MASK, 2);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// An event of L1's ends the run of an L2 that has halted: L1 is not asleep.
#[test]
fn l1_is_awake_when_the_run_of_a_halted_l2_ends() {
    let mut machine = intercepting(SHUTDOWN);
    machine.stop_in_l2();
    machine.vcpu.shared().set_mp_state(vm::vcpu_shared::MpState::Halted);
    give_triple_fault(&mut machine);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Shutdown.0);
}

/// LMSW is told to an L1 that asked for some writes of CR0 alone, whatever it changes; CLTS of the same bit is not.
#[test]
fn an_l1_that_asked_for_some_writes_of_cr0_hears_of_every_lmsw() {
    for (code, told) in [(0xf0_010f, true), (0x060f, false)] {
        let mut machine = intercepting(u64::from(CR0_SEL_WRITE as u32));
        // LMSW AX, CLTS.
        machine.put(L2_RIP, code);
        for (at, entry) in [(0x2000, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7)] {
            machine.put(at, entry);
        }
        machine.put(CR0, 0x8001_003b);
        machine.vmrun();
        machine.then(|vmcb, gprs| {
            vmcb.save.rax = 0x3b;
            exit(ExitCode::WriteCr0)(vmcb, gprs);
            // The CPU names no register: the emulator looks at the instruction.
            vmcb.control.exit_info_1 = 0;
        });
        machine.then(move |vmcb, gprs| {
            assert_eq!(vmcb.save.rip < L2_RIP, told, "{:x}", vmcb.save.rip);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        let exit_code = machine.get(EXIT_CODE) as u32;
        assert_eq!(exit_code == ExitCode::Cr0SelWrite.0 as u32, told, "{exit_code:x}");
    }
}

/// A map of MSRs that L1 asked for and that is no memory is no map: the entry is refused, as on stock KVM.
#[test]
fn a_map_of_msrs_that_is_no_memory_refuses_the_entry() {
    const MSR: u64 = 1 << 28;
    const NOWHERE: u64 = 0x80_0000;
    for (intercepts, refused) in [(MSR, true), (0, false)] {
        let mut machine = intercepting(intercepts);
        machine.put(BLOCK + 0x48, NOWHERE);
        machine.vmrun();
        machine.then(move |vmcb, gprs| {
            assert_eq!(vmcb.save.rip, if refused { BEHIND } else { L2_RIP });
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.get(EXIT_CODE) == u64::MAX, refused);
    }
}

/// Without records of branches of its own L2 has L1's DEBUGCTL, and leaves its own to L1.
#[test]
fn without_lbr_virtualization_debugctl_is_shared() {
    const DEBUGCTL: u32 = 0x1d9;
    fn wrmsr(value: u64) -> impl FnMut(&mut x86::vmcb::Vmcb, &mut backend::Gprs) + Send + 'static {
        move |vmcb, gprs| {
            exit(ExitCode::Msr)(vmcb, gprs);
            vmcb.control.exit_info_1 = 1;
            (vmcb.save.rax, gprs.0[RDX], gprs.0[backend::RCX]) = (value, 0, DEBUGCTL.into());
        }
    }
    let mut machine = intercepting(CPUID);
    machine.then(wrmsr(2));
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 0;
        gprs.0[backend::RCX] = DEBUGCTL.into();
    });
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.rax), (L2_RIP + 2, 2));
        wrmsr(1)(vmcb, gprs);
    });
    machine.then(exit(ExitCode::Cpuid));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.read_msr(DEBUGCTL, By::Vmm).unwrap(), 1);
}

/// VMRUN retires: a breakpoint at the instruction behind it is not kept away by an RF that was for VMRUN.
#[test]
fn rf_of_vmrun_ends_with_it() {
    for refused in [false, true] {
        let mut machine = intercepting(CPUID);
        if refused {
            machine.put(BLOCK + 0x58, 0);
        }
        machine.then(|vmcb, gprs| {
            vmcb.save.rflags |= Rflags::RF.bits();
            vmrun(vmcb, gprs);
        });
        if !refused {
            machine.then(exit(ExitCode::Cpuid));
        }
        machine.then(|vmcb, gprs| {
            assert_eq!((vmcb.save.rip, vmcb.save.rflags & Rflags::RF.bits()), (BEHIND, 0));
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
    }
}

/// An interrupt of the VMM's own local APIC that L1's block offers is not put into ours, which nobody serves.
#[test]
fn what_the_vmm_offers_does_not_get_into_our_local_apic() {
    let mut machine = intercepting(CPUID);
    machine.vcpu.queue_interrupt(Vector(0x41)).unwrap();
    machine.vmrun();
    machine.then(exit(ExitCode::Hlt));
    let _ = machine.run();
    assert!(!machine.vcpu.shared().lapic.maybe_pending());
}

/// An L2 of SVM cannot wait for a SIPI: a VMM that asks for that gets EINVAL.
#[test]
fn a_vmm_asks_for_no_wait_for_a_sipi_while_l2_runs() {
    let mut machine = intercepting(0);
    assert!(!machine.vcpu.holds_init_back());
    machine.stop_in_l2();
    assert!(machine.vcpu.holds_init_back());
}

/// A VMM that waits until an interrupt can be taken hears of it when L1, which takes none, enters an L2 that does, or
/// whose run an interrupt would end.
#[test]
fn a_vmm_that_waits_for_a_window_hears_of_an_l2_that_takes_interrupts() {
    let input = RunInput { request_interrupt_window: true, ..RunInput::default() };
    for (intercepts, takes, kept) in
        [(CPUID, true, false), (CPUID, false, false), (CPUID | 1, true, true)]
    {
        let mut machine = intercepting(intercepts);
        machine.put(BLOCK + 0x570, if takes { 0x202 } else { 2 });
        for page in [BLOCK, 0, 0x1000, 0x2000, 0x3000] {
            fault_in_delivery(&mut machine, page, 0);
        }
        machine.vmrun();
        machine.then(exit(ExitCode::Cpuid));
        machine.then(exit(ExitCode::Stgi));
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        machine.then(move |vmcb, gprs| {
            vmcb.save.rflags |= if kept { Rflags::IF.bits() } else { 0 };
            vmrun(vmcb, gprs);
        });
        if !takes {
            machine.then(|vmcb, gprs| {
                assert_eq!(vmcb.save.rip, L2_RIP);
                let [_, _, _, third, ..] = vmcb.control.intercepts;
                assert!(third & VINTR != 0 && vmcb.control.int_ctl & vintr::IRQ != 0);
                vmcb.save.rflags |= Rflags::IF.bits();
                exit(ExitCode::Vintr)(vmcb, gprs);
            });
        }
        assert_eq!(machine.vcpu.run(&input), UserExit::IrqWindowOpen);
        assert_eq!(machine.vcpu.regs().rip, L2_RIP);
    }
}

/// An exception that exits for us comes in the delivery of an interrupt: the guest has that fault, and no second one of the
/// same interrupt, which waits again.
#[test]
fn an_exception_in_the_delivery_of_an_interrupt_gives_that_back() {
    const GP: u64 = event::VALID | event::EXCEPTION | event::ERROR_VALID | 0x50 << 32 | 13;
    let mut machine = Hypervisor::new(false);
    machine.then(|vmcb, gprs| {
        exit(ExitCode(ExitCode::Excp0.0 + 13))(vmcb, gprs);
        vmcb.control.exit_info_1 = 0x50;
        vmcb.control.exit_int_info = event::VALID | 0x31;
    });
    machine.vcpu.backend().cpu().inner().injects(GP);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.interrupt_in_injection(), Some(Vector(0x31)));
}
