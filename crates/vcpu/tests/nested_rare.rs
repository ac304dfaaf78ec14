//! A guest that runs a guest of its own by SVM: what comes seldom. An entry that the CPU refuses, events behind a saved
//! state, registers that are hidden, a halt that nothing may end.

mod rig;

use backend::{Gprs, RDX};
use gannet_vcpu::{
    UserExit,
    state::registers::{GivenEvents, SavedEvents},
};
use host::std_port::test as surroundings;
use rig::exit;
use rig::nested::{BLOCK, Hypervisor, L1_RIP, L1_ROOT, L2_RIP};
use vm::vcpu_shared::MpState;
use x86::vmcb::{ExitCode, Vmcb, event};
use x86::{Cr4, Rflags, Vector};

const THIRD: u64 = BLOCK + 0x08;
const CPUID: u64 = 1 << 18;
const EXIT_CODE: u64 = BLOCK + 0x70;
const EXITINTINFO: u64 = BLOCK + 0x88;
const EVENTINJ: u64 = BLOCK + 0xa8;
const CLEAN: u64 = BLOCK + 0xc0;
const RFLAGS: u64 = BLOCK + 0x570;
const BEHIND: u64 = L1_RIP + 3;
const INTERRUPT: u64 = event::VALID | event::INTR | 0x40;

fn intercepting(bits: u64) -> Hypervisor {
    let machine = Hypervisor::new(false);
    machine.put(THIRD, bits << 32);
    machine
}

/// The CPU refuses the entry, which leaves `event` where it was.
fn refuse(machine: &mut Hypervisor, event: u64) {
    machine.vcpu.backend().cpu().inner().injects(event);
    machine.then(move |vmcb, gprs| {
        exit(ExitCode::Invalid)(vmcb, gprs);
        vmcb.control.event_inj = event;
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, BEHIND);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Invalid.0);
}

#[test]
fn an_interrupt_for_an_l2_that_the_cpu_refuses_is_told_to_l1() {
    let mut machine = intercepting(0);
    machine.put(RFLAGS, Rflags::IF.bits() | 2);
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(Vector(0x40)).unwrap();
    refuse(&mut machine, INTERRUPT);
    assert_eq!((machine.get(EXITINTINFO), machine.get(EVENTINJ)), (INTERRUPT, 0));
}

/// An interrupt of the VMM's local APIC that is to end L2's run is read and set again with the events: it is L1's still.
#[test]
fn an_interrupt_that_waits_for_l1_is_not_given_to_l2_by_getting_and_setting_events() {
    const INTR: u64 = 1;
    let mut machine = intercepting(INTR);
    machine.put(RFLAGS, Rflags::IF.bits() | 2);
    machine.stop_in_l2();
    machine.vcpu.queue_interrupt(Vector(0x40)).unwrap();
    let events = machine.vcpu.saved_events();
    assert_eq!(events.interrupt, Some(Vector(0x40)));
    machine.vcpu.restore_events(&events, GivenEvents::default());
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.control.event_inj), (BEHIND, 0));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(EXIT_CODE), ExitCode::Intr.0);
    assert_eq!(machine.vcpu.saved_events().interrupt, Some(Vector(0x40)));
}

#[test]
fn what_l1_injects_into_an_l2_that_the_cpu_refuses_stays_in_its_block() {
    let mut machine = intercepting(0);
    machine.put(EVENTINJ, INTERRUPT);
    machine.vmrun();
    refuse(&mut machine, INTERRUPT);
    assert_eq!((machine.get(EXITINTINFO), machine.get(EVENTINJ)), (0, INTERRUPT));
}

/// A signal comes between VMRUN, which is carried out outside of the loop, and the entry: the event goes in at the next KVM_RUN.
#[test]
fn what_l1_injects_goes_in_behind_a_signal_that_kept_the_entry_back() {
    let mut machine = intercepting(0);
    machine.put(EVENTINJ, INTERRUPT);
    machine.then(|vmcb, gprs| {
        surroundings::set_signal_pending(true);
        rig::nested::vmrun(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    machine.vcpu.backend().cpu().inner().injects(INTERRUPT);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
}

#[test]
fn what_l2_has_taken_before_is_not_given_back_by_a_refusal() {
    let mut machine = intercepting(0);
    machine.put(EVENTINJ, INTERRUPT);
    machine.stop_in_l2();
    refuse(&mut machine, 0);
    assert_eq!((machine.get(EXITINTINFO), machine.get(EVENTINJ)), (0, INTERRUPT & !event::VALID));
}

#[test]
fn caching_that_l2_has_disabled_is_shown_behind_a_clean_entry() {
    const READ_CR0: u32 = 1;
    let mut machine = intercepting(CPUID);
    machine.put(BLOCK + 0x558, 0xc001_0033);
    // L1's tables: the first 2 MiB at their own addresses. Its code: MOV to CR0 from RDX.
    for (at, entry) in [(L1_ROOT, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7), (BEHIND, 0xc2_220f)] {
        machine.put(at, entry);
    }
    // What the entries read is in the tables, so that they take place in the loop.
    for page in [BLOCK, 0, 0x1000, 0x2000, 0x3000] {
        machine.then(fault(page, 0));
    }
    machine.vmrun();
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        exit(ExitCode::WriteCr0)(vmcb, gprs);
        vmcb.control.next_rip = BEHIND + 3;
        vmcb.control.exit_info_1 = 1 << 63 | RDX as u64;
        gprs.0[RDX] = 0x8001_003b;
    });
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.control.intercepts[0] & READ_CR0), (BEHIND + 3, 0));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    machine.put(CLEAN, 0xffff_ffff);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_ne!(vmcb.control.intercepts[0] & READ_CR0, 0);
        assert_eq!(vmcb.save.cr0, 0x8001_0033);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.sregs().cr0.bits(), 0xc001_0033);
}

/// L1 pages by five levels, and the host's tables have four: what would shadow L1's has no place for its upper addresses.
#[test]
fn tables_with_more_levels_than_the_hosts_are_refused() {
    for (wide, np) in [(true, true), (true, false), (false, true)] {
        let mut machine = intercepting(CPUID);
        let mut sregs = machine.vcpu.sregs();
        sregs.cr4.set(Cr4::LA57, wide);
        machine.vcpu.set_sregs(&sregs, None).unwrap();
        machine.put(BLOCK + 0x90, np.into());
        machine.put(BLOCK + 0xb0, L1_ROOT);
        machine.vmrun();
        let runs = !(wide && np);
        if runs {
            machine.then(exit(ExitCode::Cpuid));
        }
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.save.rip, BEHIND);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        let told = if runs { ExitCode::Cpuid } else { ExitCode::Invalid };
        assert_eq!(machine.get(EXIT_CODE), told.0);
    }
    // A state of a host with five.
    let mut machine = intercepting(CPUID);
    machine.stop_in_l2();
    let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
    machine.vcpu.nested_state(&mut state).unwrap();
    let word = |state: &mut [u8], at: usize, bits: u8| state[128 + at] |= bits;
    word(&mut state, 0x90, 1);
    assert!(machine.vcpu.set_nested_state(&state).is_ok());
    word(&mut state, 0x549, 1 << 4);
    assert!(machine.vcpu.set_nested_state(&state).is_err());
}

/// L1 goes on behind a block that we refuse as behind one that the CPU does: without breakpoints, and with the rest of it as
/// it was.
#[test]
fn a_refused_entry_is_an_exit_like_any_other() {
    const BREAKPOINT: u64 = 0x402;
    for by_cpu in [false, true] {
        let mut machine = intercepting(CPUID);
        if !by_cpu {
            // No address-space id.
            machine.put(BLOCK + 0x58, 0);
        }
        let mut debug = machine.vcpu.debug_regs();
        (debug[0], debug[5]) = (0xf000, BREAKPOINT);
        machine.vcpu.set_debug_regs(debug);
        let (before, sregs) = (machine.vcpu.regs(), machine.vcpu.sregs());
        machine.vmrun();
        if by_cpu {
            machine.then(exit(ExitCode::Invalid));
        }
        machine.then(|vmcb, gprs| {
            assert_eq!((vmcb.save.rip, vmcb.save.dr7), (BEHIND, 0x400));
            exit(ExitCode::Hlt)(vmcb, gprs);
            vmcb.control.next_rip = BEHIND;
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.get(EXIT_CODE), ExitCode::Invalid.0);
        let after = machine.vcpu.regs();
        assert_eq!((after.rip, after.rflags), (BEHIND, before.rflags));
        assert_eq!(machine.vcpu.sregs(), sregs);
        assert_eq!(machine.vcpu.debug_regs()[0], 0xf000);
        // GIF is clear: an NMI waits.
        machine.vcpu.queue_nmi();
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.vcpu.saved_events().nmi_pending, 1);
    }
}

/// The VMM has the guest run on behind an entry that the CPU refused: nothing of that one counts as loaded.
#[test]
fn behind_a_refused_entry_nothing_is_clean() {
    let mut machine = intercepting(CPUID);
    machine.then(exit(ExitCode::Hlt));
    machine.then(|vmcb, gprs| {
        assert_ne!(vmcb.control.clean, 0);
        exit(ExitCode::Invalid)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.clean, 0);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert!(matches!(machine.run(), UserExit::FailEntry { .. }));
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// An NMI and an SMI are held back by a clear GIF: what waits ends no halt.
#[test]
fn a_halt_with_gif_clear_goes_on() {
    for smi in [false, true] {
        let mut machine = intercepting(CPUID);
        machine.then(exit(ExitCode::Clgi));
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        if smi {
            machine.vcpu.queue_smi();
        } else {
            machine.vcpu.queue_nmi();
        }
        machine.vcpu.shared().set_mp_state(MpState::Halted);
        surroundings::set_signal_pending(true);
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        assert_eq!(machine.vcpu.shared().mp_state(), MpState::Halted);
    }
}

const INT: u64 = event::VALID | event::SOFT | 0x80;

/// A fault of ours at `gpa`, in the delivery of `event`.
fn fault(gpa: u64, event: u64) -> impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static {
    move |vmcb, gprs| {
        exit(ExitCode::Npf)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1 << 32 | 2;
        vmcb.control.exit_info_2 = gpa;
        vmcb.control.next_rip = 0;
        vmcb.control.exit_int_info = event;
    }
}

/// L1 with an L2 into which it injects INT n. `nrips`: its CPUID offers NRIPS; else L1 has RIP behind the instruction, and what lies
/// in the field means nothing. Comes with where the instruction ends.
fn injecting_int(nrips: bool) -> (Hypervisor, u64) {
    let mut machine = intercepting(0);
    let mut cpuid = rig::nested::offered().cpuid.entries().to_vec();
    for entry in cpuid.iter_mut().filter(|entry| entry.leaf == 0x8000_000a && !nrips) {
        entry.edx &= !(1 << 3);
    }
    machine.vcpu.set_cpuid(&cpuid).unwrap();
    machine.put(EVENTINJ, INT);
    machine.put(BLOCK + 0xc8, if nrips { L2_RIP + 2 } else { 0x1234 });
    (machine, if nrips { L2_RIP + 2 } else { L2_RIP })
}

/// The event goes in, is interrupted in its delivery and goes in again, with the same return address.
fn takes_int_twice(machine: &mut Hypervisor, end: u64) {
    machine.vcpu.backend().cpu().inner().injects(INT);
    machine.then(move |vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.control.next_rip), (L2_RIP, end), "the first time");
        fault(0xa000, INT)(vmcb, gprs);
    });
    machine.vcpu.backend().cpu().inner().injects(INT);
    machine.then(move |vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.control.next_rip), (L2_RIP, end));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// INT n that L1 injects is interrupted in its delivery, and the state is saved and restored behind a signal. Interrupted
/// once more it is injected again, for no instruction stands for it.
#[test]
fn an_int_of_l1s_on_its_way_is_l1s_behind_a_restore() {
    for (nrips, entered) in [(true, true), (true, false), (false, true), (false, false)] {
        let (mut machine, end) = injecting_int(nrips);
        // Before the entry a signal comes, or before the one behind a fault.
        machine.then(move |vmcb, gprs| {
            surroundings::set_signal_pending(!entered);
            rig::nested::vmrun(vmcb, gprs);
        });
        if entered {
            machine.then(|vmcb, gprs| {
                surroundings::set_signal_pending(true);
                fault(0x5000, INT)(vmcb, gprs);
            });
        }
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        let (events, regs, sregs) =
            (machine.vcpu.saved_events(), machine.vcpu.regs(), machine.vcpu.sregs());
        let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
        machine.vcpu.nested_state(&mut state).unwrap();
        assert_eq!((events.interrupt, events.interrupt_soft), (Some(Vector(0x80)), true));
        let (mut other, _) = injecting_int(nrips);
        other.vcpu.set_sregs(&sregs, None).unwrap();
        other.vcpu.set_nested_state(&state).unwrap();
        other.vcpu.set_regs(&regs);
        other.vcpu.restore_events(&events, GivenEvents::default());
        for machine in [&mut other, &mut machine] {
            takes_int_twice(machine, end);
        }
    }
}

/// A state as stock KVM saves it before the entry: EVENTINJ is valid, and the event is among the vCPU's, too, or is not yet. RIP comes
/// behind it.
#[test]
fn an_int_of_l1s_goes_in_at_the_rip_that_comes_behind_its_state() {
    let cases = (0..8).map(|n| (n & 1 != 0, n & 2 != 0, n & 4 != 0));
    for (nrips, state_first, twice) in cases {
        let (mut machine, end) = injecting_int(nrips);
        machine.stop_in_l2();
        let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
        machine.vcpu.nested_state(&mut state).unwrap();
        state[0] |= 2;
        state[128 + 0xa8..][..8].copy_from_slice(&INT.to_le_bytes());
        if nrips {
            state[128 + 0xc8..][..8].copy_from_slice(&end.to_le_bytes());
        }
        let (sregs, mut regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
        regs.rip = L2_RIP;
        let int = twice.then_some(Vector(0x80));
        let events =
            SavedEvents { interrupt: int, interrupt_soft: twice, ..SavedEvents::default() };
        let (mut other, _) = injecting_int(nrips);
        other.vcpu.set_sregs(&sregs, None).unwrap();
        rig::restore(&mut other.vcpu, &state, &events, state_first);
        other.vcpu.set_regs(&regs);
        takes_int_twice(&mut other, end);
    }
}

/// L1 injects INT n, and L2 has no gate for it: the fault comes alone, and INT n is lost, as in a CPU. Injected once more it would
/// fault once more, and the two would be a double fault.
#[test]
fn an_int_of_l1s_without_a_gate_is_lost() {
    for injected in [event::SOFT | 0x80, event::EXCEPTION | 3] {
        let injected = event::VALID | injected;
        let mut machine = intercepting(0);
        machine.put(EVENTINJ, injected);
        machine.put(BLOCK + 0xc8, L2_RIP + 2);
        machine.vmrun();
        machine.then(move |vmcb, gprs| {
            exit(ExitCode::ExcpGp)(vmcb, gprs);
            vmcb.control.exit_info_1 = 0x802;
            vmcb.control.exit_int_info = injected;
        });
        let fault = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;
        machine.vcpu.backend().cpu().inner().injects(fault | 0x802 << 32);
        machine.then(exit(ExitCode::Wbinvd));
        machine.vcpu.backend().cpu().inner().injects(0);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.vcpu.saved_events(), SavedEvents::default());
    }
}
