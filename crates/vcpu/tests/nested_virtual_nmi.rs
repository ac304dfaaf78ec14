//! Virtual NMIs: those that a hypervisor in the guest gives its own guest, and the CPU's masks of either level.

mod rig;

use gannet_vcpu::{
    UserExit,
    state::registers::{GivenEvents, SavedEvents},
};
use host::std_port::test as surroundings;
use rig::nested::{BLOCK, Hypervisor};
use rig::{Machine, exit, shutdown, vcpu_of};
use svm::Features;
use vm::vcpu_shared::MpState;
use x86::vmcb::{ExitCode, event, vintr};

const THIRD: u64 = BLOCK + 0x08;
const INT_CTL: u64 = BLOCK + 0x60;
const EXIT_CODE: u64 = BLOCK + 0x70;
const EVENTINJ: u64 = BLOCK + 0xa8;
const NMI_INTERCEPT: u64 = 1 << 1;
const CPUID: u64 = 1 << 18;
const MASKING: u32 = vintr::INTR_MASKING;
const OWN: u32 = vintr::NMI_ENABLE;
const ALL: u32 = vintr::NMI | vintr::NMI_MASK | vintr::NMI_ENABLE;
const NMI: u64 = event::VALID | event::NMI | 2;

fn features() -> Features {
    Features { vnmi: true, ..rig::features() }
}

/// L1, which gives L2 virtual NMIs as `int_ctl` says and intercepts CPUID, and NMIs.
fn hypervisor(int_ctl: u32) -> Hypervisor {
    let machine = Hypervisor::on(features(), false);
    machine.put(THIRD, (CPUID | NMI_INTERCEPT) << 32);
    machine.put(INT_CTL, (MASKING | int_ctl).into());
    machine
}

fn nmi_waits(machine: &mut Hypervisor, masked: bool) {
    let events = SavedEvents { nmi_pending: 1, nmi_masked: masked, ..SavedEvents::default() };
    let given = GivenEvents { nmi_pending: true, ..GivenEvents::default() };
    machine.vcpu.restore_events(&events, given);
}

#[test]
fn l2_runs_with_the_virtual_nmi_of_its_block() {
    let mut machine = hypervisor(OWN | vintr::NMI);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN | vintr::NMI);
        // The CPU delivers it.
        vmcb.control.int_ctl = vmcb.control.int_ctl & !vintr::NMI | vintr::NMI_MASK;
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN, "L1's are not L2's");
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(INT_CTL) as u32 & ALL, OWN | vintr::NMI_MASK);
}

/// L1 handles an NMI and runs a guest meanwhile: the masks are two.
#[test]
fn each_level_has_a_mask_of_its_own() {
    let mut machine = hypervisor(OWN);
    let events = SavedEvents { nmi_masked: true, ..SavedEvents::default() };
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert!(machine.vcpu.saved_events().nmi_masked, "user space is told of L1's");
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN | vintr::NMI_MASK);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// An SMI comes while L2 is in its NMI handler, and L1 is in none: it is L1's mask that the mode keeps.
#[test]
fn an_smi_keeps_the_mask_of_l1() {
    let own = [0, OWN | vintr::NMI_MASK];
    for (own, of_l1) in own.into_iter().flat_map(|own| [false, true].map(|of_l1| (own, of_l1))) {
        let mut machine = hypervisor(own).with_smram();
        let events = SavedEvents { nmi_masked: of_l1, ..SavedEvents::default() };
        machine.vcpu.restore_events(&events, GivenEvents::default());
        machine.vmrun();
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        machine.vcpu.queue_smi();
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.control.int_ctl & vintr::NMI_MASK, vintr::NMI_MASK, "the handler runs");
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.vcpu.saved_events().smi.inside_nmi, of_l1);
    }
}

/// Without virtual NMIs of its own L2 has L1's mask, where L1 leaves NMIs to it.
#[test]
fn a_shared_mask_goes_over_with_the_level() {
    let mut machine = hypervisor(vintr::NMI | vintr::NMI_MASK);
    machine.put(THIRD, CPUID << 32);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN, "what L1 did not turn on is nothing");
        vmcb.control.int_ctl |= vintr::NMI_MASK;
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN | vintr::NMI_MASK);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(INT_CTL) as u32 & ALL, vintr::NMI | vintr::NMI_MASK);
}

/// L1, which intercepts NMIs and knows nothing of virtual ones, injects an NMI into L2; it handles one of its own or not. It is
/// in L2, whose block has said to the CPU what it masks.
fn injecting_without(masked: bool) -> Hypervisor {
    let mut machine = hypervisor(0);
    machine.put(EVENTINJ, NMI);
    let events = SavedEvents { nmi_masked: masked, ..SavedEvents::default() };
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.vmrun();
    machine.vcpu.backend().cpu().inner().injects(NMI);
    machine
}

/// What the CPU makes of an NMI that it delivers with this block.
fn takes_nmi(vmcb: &mut x86::vmcb::Vmcb) {
    if vmcb.control.int_ctl & vintr::NMI_ENABLE != 0 {
        vmcb.control.int_ctl |= vintr::NMI_MASK;
    }
}

/// The NMI is L2's, and L1 keeps its mask: the next one of L1's machine comes to L1, if that handles none.
#[test]
fn an_nmi_that_l1_injects_masks_none_of_its_own() {
    for masked in [false, true] {
        let mut machine = injecting_without(masked);
        machine.then(|vmcb, gprs| {
            takes_nmi(vmcb);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.vcpu.saved_events().nmi_masked, masked);
        nmi_waits(&mut machine, masked);
        let mask = if masked { vintr::NMI_MASK } else { 0 };
        machine.then(move |vmcb, gprs| {
            assert_eq!(vmcb.control.int_ctl & ALL, OWN | mask);
            exit(ExitCode::Stgi)(vmcb, gprs);
        });
        machine.vcpu.backend().cpu().inner().injects(if masked { 0 } else { NMI });
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(
            (machine.get(EXIT_CODE), machine.get(INT_CTL)),
            (ExitCode::Nmi.0, MASKING.into())
        );
    }
}

/// A bit of the CPU's that means nothing in L2's block is none of L1's mask.
#[test]
fn a_mask_that_is_no_l2s_stays_there() {
    let mut machine = injecting_without(false);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, 0);
        vmcb.control.int_ctl |= vintr::NMI_MASK;
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// A fault of ours in its delivery, an exit in that of the same, and a state that is saved between: L1's mask is as it was.
#[test]
fn an_nmi_of_l1s_that_goes_in_again_masks_none_of_its_own() {
    for (masked, restored) in
        [false, true].into_iter().flat_map(|masked| [false, true].map(|r| (masked, r)))
    {
        let mut machine = injecting_without(masked);
        machine.then(|vmcb, gprs| {
            takes_nmi(vmcb);
            surroundings::set_signal_pending(true);
            exit(ExitCode::Npf)(vmcb, gprs);
            (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (1 << 32 | 2, 0x5000);
            vmcb.control.exit_int_info = NMI;
        });
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        let events = machine.vcpu.saved_events();
        assert_eq!((events.nmi_injected, events.nmi_masked), (true, masked));
        if restored {
            let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
            machine.vcpu.nested_state(&mut state).unwrap();
            let (sregs, regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
            machine = hypervisor(0);
            machine.vcpu.set_sregs(&sregs, None).unwrap();
            rig::restore(&mut machine.vcpu, &state, &events, masked);
            machine.vcpu.set_regs(&regs);
        }
        machine.vcpu.backend().cpu().inner().injects(NMI);
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.control.int_ctl & ALL, 0);
            exit(ExitCode::Cpuid)(vmcb, gprs);
            vmcb.control.exit_int_info = NMI;
        });
        let mask = if masked { vintr::NMI_MASK } else { 0 };
        machine.then(move |vmcb, gprs| {
            assert_eq!(vmcb.control.int_ctl & ALL, OWN | mask);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.get(BLOCK + 0x88), NMI);
        assert_eq!(machine.vcpu.saved_events().nmi_masked, masked);
    }
}

#[test]
fn virtual_nmis_need_the_intercept_and_the_feature() {
    let refused = |machine: &mut Hypervisor| {
        machine.vmrun();
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        machine.get(EXIT_CODE) == u64::MAX
    };
    let mut machine = hypervisor(OWN);
    machine.put(THIRD, CPUID << 32);
    assert!(refused(&mut machine));
    let mut machine = Hypervisor::new(false);
    machine.put(THIRD, (CPUID | NMI_INTERCEPT) << 32);
    machine.put(INT_CTL, (MASKING | OWN).into());
    assert!(refused(&mut machine));
    assert!(!refused(&mut hypervisor(OWN)));
}

/// An NMI of L1's machine ends L2's run, whatever L2's own mask says.
#[test]
fn an_nmi_for_l1_ends_l2s_run() {
    let mut machine = hypervisor(OWN | vintr::NMI_MASK);
    machine.vmrun();
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    nmi_waits(&mut machine, false);
    machine.then(|vmcb, gprs| {
        // L1, with GIF clear.
        assert_eq!(vmcb.control.int_ctl & ALL, OWN);
        exit(ExitCode::Stgi)(vmcb, gprs);
    });
    machine.vcpu.backend().cpu().inner().injects(NMI);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Nmi.0);
    assert_eq!(machine.get(INT_CTL) as u32 & ALL, OWN | vintr::NMI_MASK);
}

/// L1 injects one, and the CPU comes to a fault of ours in its delivery.
#[test]
fn an_injected_nmi_that_does_not_arrive_is_l2s() {
    let mut machine = hypervisor(OWN);
    machine.put(EVENTINJ, NMI);
    let events = SavedEvents { nmi_masked: true, ..SavedEvents::default() };
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        vmcb.control.int_ctl |= vintr::NMI_MASK;
        exit(ExitCode::Cpuid)(vmcb, gprs);
        vmcb.control.exit_int_info = NMI;
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN | vintr::NMI_MASK, "L1's is as it was");
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(BLOCK + 0x88), NMI);
}

/// One that goes to L2's own mask, and comes to a fault of ours: the mask is down until it goes in again.
#[test]
fn an_injected_nmi_that_waits_again_leaves_l2s_mask_down() {
    let mut machine = hypervisor(OWN);
    machine.put(EVENTINJ, NMI);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        takes_nmi(vmcb);
        surroundings::set_signal_pending(true);
        exit(ExitCode::Npf)(vmcb, gprs);
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (1 << 32 | 2, 0x5000);
        vmcb.control.exit_int_info = NMI;
    });
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
    machine.vcpu.nested_state(&mut state).unwrap();
    let int_ctl = u32::from_le_bytes(state[128 + 0x60..][..4].try_into().unwrap());
    assert_eq!(int_ctl & ALL, OWN);
    machine.vcpu.backend().cpu().inner().injects(NMI);
    machine.then(exit(ExitCode::Cpuid));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(INT_CTL) as u32 & ALL, OWN | vintr::NMI_MASK);
}

#[test]
fn a_virtual_nmi_that_waits_is_saved_and_comes_back() {
    let mut machine = hypervisor(OWN);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        vmcb.control.int_ctl |= vintr::NMI | vintr::NMI_MASK;
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    let mut state = vec![0; 128 + 4096];
    machine.vcpu.nested_state(&mut state).unwrap();
    let (sregs, regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
    let events = machine.vcpu.saved_events();
    assert!(!events.nmi_masked);
    drop(machine);
    let mut machine = hypervisor(OWN);
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.vcpu.set_regs(&regs);
    machine.vcpu.set_nested_state(&state).unwrap();
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, ALL);
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & ALL, OWN);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// HLT of L2 that nobody intercepts does not sleep over a virtual NMI.
#[test]
fn a_virtual_nmi_keeps_l2_awake() {
    for (waits, sleeps) in [(vintr::NMI, false), (vintr::NMI | vintr::NMI_MASK, true), (0, true)] {
        let mut machine = Hypervisor::on(features(), true);
        machine.put(THIRD, (CPUID | NMI_INTERCEPT) << 32);
        machine.put(INT_CTL, (MASKING | OWN).into());
        machine.vmrun();
        machine.then(move |vmcb, gprs| {
            vmcb.control.int_ctl |= waits;
            surroundings::set_signal_pending(true);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        let _ = machine.run();
        surroundings::set_signal_pending(false);
        assert_eq!(machine.vcpu.shared().mp_state() == MpState::Halted, sleeps, "{waits:#x}");
    }
}

/// A second NMI waits for the IRET of the first one's handler, where the CPU keeps the mask.
#[test]
fn the_iret_of_a_handler_lets_the_next_nmi_in() {
    const IRET: u32 = 1 << 20;
    let mut v = vcpu_of(&Machine { features: features(), ..Machine::default() });
    let events = SavedEvents { nmi_pending: 1, nmi_masked: true, ..SavedEvents::default() };
    v.restore_events(&events, GivenEvents { nmi_pending: true, ..GivenEvents::default() });
    let script = v.backend().cpu().inner();
    script.then(|vmcb, _| {
        assert_ne!(vmcb.control.intercepts[3] & IRET, 0, "nothing else would tell of the moment");
        vmcb.control.exit_code = ExitCode::Iret.0;
    });
    script.then(|vmcb, _| {
        assert_eq!(vmcb.control.intercepts[3] & IRET, 0);
        assert_ne!(vmcb.save.rflags & 0x100, 0, "a step over it");
        // It has popped flags of its own, and the CPU has taken the mask away.
        vmcb.save.rflags = 0x202;
        vmcb.save.rip += 0x40;
        vmcb.save.dr6 |= 1 << 14;
        vmcb.control.int_ctl &= !vintr::NMI_MASK;
        vmcb.control.exit_code = 0x41;
    });
    script.injects(NMI);
    script.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rflags & 0x100, 0);
        assert_eq!(vmcb.control.intercepts[3] & IRET, 0);
        shutdown(vmcb, gprs);
    });
    assert_eq!(v.run(&gannet_vcpu::RunInput::default()), UserExit::Shutdown);
}

/// L1 handles an NMI and injects one into an L2 to which it leaves NMIs, so that they share the mask; its delivery meets an exit of
/// L1's. No IRET has retired: L1's stay masked.
#[test]
fn an_nmi_of_l1s_that_is_not_delivered_leaves_the_mask_that_l1_had() {
    for masked in [true, false] {
        let mut machine = hypervisor(0);
        machine.put(THIRD, CPUID << 32);
        machine.put(EVENTINJ, NMI);
        let events = SavedEvents { nmi_masked: masked, ..SavedEvents::default() };
        machine.vcpu.restore_events(&events, GivenEvents::default());
        machine.vmrun();
        machine.then(|vmcb, gprs| {
            vmcb.control.int_ctl |= vintr::NMI_MASK;
            vmcb.control.exit_int_info = NMI;
            exit(ExitCode::Cpuid)(vmcb, gprs);
        });
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.vcpu.saved_events().nmi_masked, masked);
    }
}
