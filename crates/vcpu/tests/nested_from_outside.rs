//! What user space does to a guest that is a hypervisor by VMX, and what waits for it: times, modes, halts.

mod rig;

use backend::ShadowBy;
use gannet_vcpu::state::registers::{GivenEvents, SavedEvents};
use gannet_vcpu::{By, RunInput, UserExit};
use host::std_port::test as surroundings;
use nested_vmx::Vmcs12;
use nested_vmx::saved::Header;
use rig::nested_vmx::{Hypervisor, L1_RIP, L2_RIP, features, vmcs12};
use rig::vmx::{exit, shutdown};
use vm::vcpu_shared::MpState;
use x86::msr::{DEBUGCTL, TSC};
use x86::vmcs::{ExitReason, field, interruptibility};
use x86::{Cr0, Cr4, Efer, Rflags, Vector};
use zerocopy::FromBytes;

/// KVM_STATE_NESTED_GUEST_MODE and KVM_STATE_NESTED_RUN_PENDING.
const GUEST_MODE: u16 = 1;
const RUN_PENDING: u16 = 2;

/// A CPU with a preemption timer, which L1 may have.
fn with_timer() -> vmx::Features {
    vmx::Features {
        preemption_timer: Some(5),
        pin: vmx::Controls {
            base: features().pin.base | x86::vmcs::PinControls::PREEMPTION_TIMER,
            ..features().pin
        },
        ..features()
    }
}

/// L2 runs with a timer of `ticks`, which are 32 of the TSC each.
fn timed(ticks: u32) -> Vmcs12 {
    let mut v = vmcs12();
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) | 1 << 6);
    v.set(field::PREEMPTION_TIMER, ticks);
    v
}

/// L2 runs, and user space is asked.
fn stop_in_l2(machine: &mut Hypervisor) {
    machine.vmlaunch();
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        surroundings::set_signal_pending(true);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
}

fn state(machine: &mut Hypervisor) -> Vec<u8> {
    let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
    machine.vcpu.nested_state(&mut state).unwrap();
    state
}

fn header(machine: &mut Hypervisor) -> Header {
    Header::read_from_prefix(&state(machine)).unwrap().0
}

/// What is left of the timer at the next entry.
fn enters_with(machine: &mut Hypervisor, left: std::ops::RangeInclusive<u32>) {
    machine.then(move |vmcs, gprs| {
        let found = vmcs.get(field::PREEMPTION_TIMER);
        assert!(left.contains(&found), "{found}");
        shutdown(vmcs, gprs);
    });
}

/// User space writes L1's TSC while L2 runs: the timer runs on as if nothing had been, and its saved end is a time of the new TSC.
#[test]
fn a_write_of_the_tsc_moves_no_end_of_a_timer() {
    for (by_offset, delta) in
        [(false, 1 << 40), (true, 1 << 40), (true, (1u64 << 20).wrapping_neg())]
    {
        let mut machine = Hypervisor::on(with_timer(), &timed(1000));
        stop_in_l2(&mut machine);
        let before = header(&mut machine).preemption_timer_deadline;
        if by_offset {
            let offset = machine.vcpu.tsc_offset();
            machine.vcpu.set_tsc_offset(offset.wrapping_add(delta));
        } else {
            let now = machine.vcpu.read_msr(TSC, By::Vmm).unwrap();
            machine.vcpu.write_msr(TSC, now.wrapping_add(delta), By::Vmm).unwrap();
        }
        let moved = header(&mut machine).preemption_timer_deadline.wrapping_sub(before);
        assert!((moved << 5).wrapping_sub(delta).wrapping_add(64) <= 128, "{moved:#x}");
        enters_with(&mut machine, 900..=1000);
        // The triple fault is L1's to hear of.
        machine.then(shutdown);
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}

/// A restored end of a timer is a time of the TSC that user space sets behind it.
#[test]
fn a_restored_end_of_a_timer_waits_for_the_tsc() {
    let mut machine = Hypervisor::on(with_timer(), &timed(1000));
    stop_in_l2(&mut machine);
    let (saved, deadline) = (state(&mut machine), header(&mut machine).preemption_timer_deadline);
    let (sregs, regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
    let tsc = machine.vcpu.read_msr(TSC, By::Vmm).unwrap();
    drop(machine);
    let mut machine = Hypervisor::on(with_timer(), &timed(1000));
    machine.vcpu.backend().cpu().inner().tsc = 0x7777_0000;
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.vcpu.set_regs(&regs);
    machine.vcpu.set_nested_state(&saved).unwrap();
    // A VMM that has an access completed before it goes on enters nothing, nor does one whose call a signal ends.
    let at_once = RunInput { immediate_exit: true, ..RunInput::default() };
    assert_eq!(machine.vcpu.run(&at_once), UserExit::Immediate);
    surroundings::set_signal_pending(true);
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    machine.vcpu.write_msr(TSC, tsc, By::Vmm).unwrap();
    assert_eq!(header(&mut machine).preemption_timer_deadline, deadline);
    enters_with(&mut machine, 900..=1000);
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// User space ends system-management mode, or begins it: VMX operation is over, put aside or not.
#[test]
fn a_mode_that_user_space_changes_ends_vmx_operation() {
    let mut machine = Hypervisor::on(features(), &vmcs12());
    assert_ne!(header(&mut machine).vmxon_pa, u64::MAX);
    for smm in [true, false] {
        let mut smi = SavedEvents::default().smi;
        smi.smm = smm;
        machine.vcpu.restore_events(&SavedEvents::default(), GivenEvents::default());
        machine.vcpu.restore_smi(&smi);
        assert_eq!(header(&mut machine).vmxon_pa, u64::MAX, "{smm}");
    }
}

/// The mode has put VMX operation aside, and user space ends it.
#[test]
fn what_a_mode_has_put_aside_goes_with_it() {
    let mut machine = Hypervisor::on(features(), &vmcs12());
    let mut smi = SavedEvents::default().smi;
    smi.smm = true;
    machine.vcpu.restore_smi(&smi);
    let mut aside = header(&mut Hypervisor::on(features(), &vmcs12()));
    aside.smm_flags = 2;
    machine.vcpu.set_nested_state(&rig::nested_vmx::state_of(&aside, &vmcs12())).unwrap();
    assert_eq!(header(&mut machine).smm_flags, 2);
    smi.smm = false;
    machine.vcpu.restore_smi(&smi);
    let gone = header(&mut machine);
    assert_eq!((gone.smm_flags, gone.vmxon_pa), (0, u64::MAX));
}

/// RSM will enter an L2 that was restored with the mode: its CPUID and its capabilities are those that it was checked by.
#[test]
fn an_l2_that_waits_for_rsm_keeps_its_cpuid() {
    let mut machine = Hypervisor::on(features(), &vmcs12());
    let mut entries = machine.vcpu.cpuid_entries().to_vec();
    assert!(machine.vcpu.set_cpuid(&entries).is_ok());
    let mut smi = SavedEvents::default().smi;
    smi.smm = true;
    machine.vcpu.restore_smi(&smi);
    let mut aside = header(&mut Hypervisor::on(features(), &vmcs12()));
    aside.smm_flags = 3;
    machine.vcpu.set_nested_state(&rig::nested_vmx::state_of(&aside, &vmcs12())).unwrap();
    assert!(machine.vcpu.set_cpuid(&entries).is_ok(), "the same");
    let leaf1 = entries.iter_mut().find(|e| e.leaf == 1).unwrap();
    leaf1.eax ^= 1;
    assert!(machine.vcpu.set_cpuid(&entries).is_err(), "another stepping");
    // Without an L2 a VMM may still choose.
    aside.smm_flags = 2;
    machine.vcpu.set_nested_state(&rig::nested_vmx::state_of(&aside, &vmcs12())).unwrap();
    assert!(machine.vcpu.set_cpuid(&entries).is_ok());
}

/// In VMX root operation INIT is held back: a halt goes on.
#[test]
fn an_init_that_is_held_back_ends_no_halt() {
    let mut machine = Hypervisor::on(features(), &vmcs12());
    let shared = machine.vcpu.shared().clone();
    machine.then(move |vmcs, gprs| {
        // It has come, and the request behind it has not.
        shared.set_init(true);
        surroundings::set_signal_pending(true);
        exit(ExitReason::Hlt)(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Intr);
    surroundings::set_signal_pending(false);
    assert_eq!(machine.vcpu.shared().mp_state(), MpState::Halted);
    // It is there still.
    assert!(machine.vcpu.saved_events().smi.latched_init);
}

/// L2 is entered to halt, and the VMM has the local APIC: it hears of that, as of an HLT, and has L2 go on.
#[test]
fn an_entry_into_a_halt_is_the_vmms_where_it_has_the_local_apic() {
    let mut v = vmcs12();
    v.set(field::GUEST_ACTIVITY, 1);
    let mut machine = Hypervisor::without_apic(features(), &v);
    machine.vmlaunch();
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.shared().mp_state(), MpState::Runnable);
    machine.then(|vmcs, gprs| {
        assert_eq!((vmcs.get(field::GUEST_RIP), vmcs.get(field::GUEST_ACTIVITY)), (L2_RIP, 0));
        shutdown(vmcs, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// A restored L2 pages by PAE, on tables of L1's, and user space sets its registers before it has run: its PDPTEs, and what an
/// address means, go through those tables.
#[test]
fn a_restored_l2_is_read_through_the_tables_of_l1() {
    // L2's page 0x3000 is L1's 0x13000, and L1's 0x3000 another's.
    let mut machine = Hypervisor::on(features(), &vmcs12());
    for (table, entry) in [(0x20000, 0x21007), (0x21000, 0x22007), (0x22000, 0x23007)] {
        machine.put(table, entry);
    }
    for page in 0..64 {
        machine.put(0x23000 + page * 8, ((page + 16) % 64) << 12 | 0x37);
    }
    let mut v = vmcs12();
    v.set(field::PROC_CONTROLS2, v.get(field::PROC_CONTROLS2) | 1 << 1);
    v.set(field::EPT_POINTER, 0x20000 | 0x1e);
    let mut header = header(&mut machine);
    header.flags = GUEST_MODE;
    machine.put(0x3000, 0x7001);
    machine.put(0x13000, 0x5001);
    machine.vcpu.set_nested_state(&rig::nested_vmx::state_of(&header, &v)).unwrap();
    let mut sregs = machine.vcpu.sregs();
    (sregs.cr0, sregs.cr3) = (Cr0::from_bits_retain(0x8000_0033), 0x3000);
    (sregs.cr4, sregs.efer) = (Cr4::PAE | Cr4::VMXE, Efer::empty());
    sregs.cs.attr = 0xc9b;
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    // Its directory is page 5, which is L1's 0x15000: one large page.
    machine.put(0x15000, 0xe3);
    assert_eq!(machine.vcpu.translate_address(0x2000).map(|found| found.0), Some(0x12000));
    // L1's tables lead nowhere meanwhile: L2 has made no access of which L1 could hear, and keeps what it has.
    machine.put(0x23000 + 3 * 8, 0);
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        assert_eq!(vmcs.get(field::GUEST_PDPTE0), 0x5001);
        shutdown(vmcs, gprs);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
}

/// What L2 had begun to take is no event of L1's, though user space ends its run: only what user space has given is.
#[test]
fn an_interrupted_delivery_of_l2s_goes_with_it() {
    for given in [false, true] {
        let mut machine = Hypervisor::on(features(), &vmcs12());
        let l1 = state(&mut machine);
        machine.vmlaunch();
        machine.then(|vmcs, gprs| {
            surroundings::set_signal_pending(true);
            exit(ExitReason::EptViolation)(vmcs, gprs);
            vmcs.set(field::EXIT_QUALIFICATION, 3 << 7 | 1);
            vmcs.set(field::GUEST_PHYSICAL_ADDRESS, 0x5000);
            vmcs.set(field::IDT_VECTORING, 0x8000_0306);
        });
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        let events = machine.vcpu.saved_events();
        assert!(events.exception_injected);
        if given {
            machine.vcpu.restore_events(&events, GivenEvents::default());
        }
        machine.vcpu.set_nested_state(&l1).unwrap();
        assert_eq!(machine.vcpu.saved_events().exception_injected, given);
    }
}

/// A state as stock KVM saves it when a signal comes just before an entry: VMCS12's event waits to be injected, and is among
/// the vCPU's events as well. It comes once, with the length that VMCS12 gives.
#[test]
fn an_event_that_a_saved_state_names_twice_comes_once() {
    const INT: u32 = 0x8000_0031;
    const SOFT: u32 = 0x8000_0480;
    let cases = [(INT, ExitReason::Cpuid), (INT, ExitReason::Wbinvd), (SOFT, ExitReason::Wbinvd)];
    for (state_first, (injected, next)) in
        [false, true].into_iter().flat_map(|order| cases.map(|case| (order, case)))
    {
        let mut v = vmcs12();
        v.set(field::ENTRY_INTERRUPTION, injected);
        v.set(field::ENTRY_INSTRUCTION_LENGTH, 2);
        v.set(field::GUEST_RFLAGS, 0x202);
        let mut machine = Hypervisor::on(features(), &v);
        let header = Header { flags: GUEST_MODE | RUN_PENDING, ..header(&mut machine) };
        let state = rig::nested_vmx::state_of(&header, &v);
        let mut regs = machine.vcpu.regs();
        (regs.rip, regs.rflags) = (L2_RIP, x86::Rflags::from_bits_retain(0x202));
        machine.vcpu.set_regs(&regs);
        let events = SavedEvents {
            interrupt: Some(Vector(injected as u8)),
            interrupt_soft: injected == SOFT,
            ..SavedEvents::default()
        };
        rig::restore(&mut machine.vcpu, &state, &events, state_first);
        machine.then(move |vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
            assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), injected);
            if injected == SOFT {
                assert_eq!(vmcs.get(field::ENTRY_INSTRUCTION_LENGTH), 2);
            }
            // As a CPU does with an entry.
            vmcs.set(field::ENTRY_INTERRUPTION, injected & !(1 << 31));
            exit(next)(vmcs, gprs);
        });
        for _ in 0..2 {
            machine.then(|vmcs, gprs| {
                assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & 1 << 31, 0);
                exit(ExitReason::Wbinvd)(vmcs, gprs);
            });
        }
        machine.then(shutdown);
        machine.then(shutdown);
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}

/// What L1 injected was on its way where the state was saved: it is among the vCPU's events, and VMCS12 has its type and its length. A signal
/// comes before the entry, or does not.
#[test]
fn an_event_of_l1s_on_its_way_has_its_type_and_its_length_behind_a_restore() {
    let soft = |vector| SavedEvents {
        interrupt: Some(Vector(vector)),
        interrupt_soft: true,
        ..SavedEvents::default()
    };
    // The last two nobody has checked: no error code, and no length of which an entry is refused.
    let cases =
        [(0x480, 0x80, 2), (0x480, 0x80, 3), (0x501, 1, 1), (0xc80, 0x80, 2), (0x480, 0x80, 200)];
    let ways = (0..4).map(|n| (n & 1 != 0, n & 2 != 0));
    for (state_first, signal) in ways {
        for (word, vector, length) in cases {
            let mut v = vmcs12();
            v.set(field::ENTRY_INTERRUPTION, word);
            v.set(field::ENTRY_INSTRUCTION_LENGTH, length);
            let mut machine = Hypervisor::on(features(), &v);
            let header = Header { flags: GUEST_MODE, ..header(&mut machine) };
            let state = rig::nested_vmx::state_of(&header, &v);
            let mut regs = machine.vcpu.regs();
            regs.rip = L2_RIP;
            machine.vcpu.set_regs(&regs);
            rig::restore(&mut machine.vcpu, &state, &soft(vector), state_first);
            if signal {
                surroundings::set_signal_pending(true);
                assert_eq!(machine.run(), UserExit::Intr);
                surroundings::set_signal_pending(false);
            }
            machine.then(move |vmcs, gprs| {
                assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), word & !0x800 | 1 << 31);
                let kept = vmcs.get(field::ENTRY_INSTRUCTION_LENGTH);
                assert!((1..=15).contains(&kept) && (kept == length || length > 15));
                shutdown(vmcs, gprs);
            });
            machine.then(shutdown);
            assert_eq!(machine.run(), UserExit::Shutdown);
        }
    }
}

/// L1's shadow was given as STI's, with interrupts off, and then comes a state in which L2 runs behind a MOV SS of its own.
#[test]
fn a_shadow_that_was_given_to_l1_is_not_l2s() {
    let mut v = vmcs12();
    v.set(field::GUEST_INTERRUPTIBILITY, interruptibility::MOV_SS);
    let mut machine = Hypervisor::on(features(), &v);
    let header = Header { flags: GUEST_MODE, ..header(&mut machine) };
    let sti = ShadowBy::Sti;
    let events = SavedEvents { interrupt_shadow: true, shadow_by: sti, ..SavedEvents::default() };
    let shadow = GivenEvents { interrupt_shadow: true, ..GivenEvents::default() };
    machine.vcpu.restore_events(&events, shadow);
    assert_eq!(machine.vcpu.saved_events().shadow_by, sti);
    machine.vcpu.set_nested_state(&rig::nested_vmx::state_of(&header, &v)).unwrap();
    let mut regs = machine.vcpu.regs();
    (regs.rip, regs.rflags) = (L2_RIP, Rflags::FIXED | Rflags::IF);
    machine.vcpu.set_regs(&regs);
    assert_eq!(machine.vcpu.saved_events().shadow_by, ShadowBy::MovSs);
}

/// The state has an INT3 that L1 has injected long ago, and nothing is on its way: a later #BP of user space's has its own length.
#[test]
fn what_l1_has_injected_is_no_later_event_of_the_same_vector() {
    for state_first in [false, true] {
        let mut v = vmcs12();
        v.set(field::ENTRY_INTERRUPTION, 0x603);
        v.set(field::ENTRY_INSTRUCTION_LENGTH, 7);
        let mut machine = Hypervisor::on(features(), &v);
        let header = Header { flags: GUEST_MODE, ..header(&mut machine) };
        let state = rig::nested_vmx::state_of(&header, &v);
        let mut regs = machine.vcpu.regs();
        regs.rip = L2_RIP;
        machine.vcpu.set_regs(&regs);
        rig::restore(&mut machine.vcpu, &state, &SavedEvents::default(), state_first);
        machine.then(exit(ExitReason::Wbinvd));
        machine.then(|vmcs, gprs| {
            exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
            surroundings::set_signal_pending(true);
        });
        assert_eq!(machine.run(), UserExit::Intr);
        surroundings::set_signal_pending(false);
        let bp = x86::Exception { vector: Vector(3), error_code: None, payload: None };
        let given = SavedEvents { exception: Some(bp), ..SavedEvents::default() };
        machine.vcpu.restore_events(&given, GivenEvents::default());
        machine.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), 0x8000_0603);
            assert_eq!(vmcs.get(field::ENTRY_INSTRUCTION_LENGTH), 1);
            shutdown(vmcs, gprs);
        });
        machine.then(shutdown);
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}

/// What user space gives L2 by KVM_SET_VCPU_EVENTS and by KVM_SET_NESTED_STATE is the same in either order, and whatever the
/// vCPU did before and had to give: it runs L1 or an L2, with an event of its own or not.
#[test]
fn events_and_nested_state_come_in_either_order_on_any_vcpu() {
    const OF_STATE: u32 = 0x8000_0031;
    const UD: u32 = 0x8000_0306;
    let none = SavedEvents::default();
    let interrupt = SavedEvents { interrupt: Some(Vector(0x40)), ..none };
    let same = SavedEvents { interrupt: Some(Vector(0x31)), ..none };
    let pending = SavedEvents { exception: Some(x86::Exception::ud()), ..none };
    // What VMCS12 injects, what the events are, and what goes in at the first entry and at the second.
    let cases = [
        (0, none, 0, 0),
        (OF_STATE, none, OF_STATE, 0),
        (0, interrupt, 0x8000_0040, 0),
        (OF_STATE, same, OF_STATE, 0),
        (0, pending, UD, 0),
        (OF_STATE, pending, OF_STATE, UD),
    ];
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    for ((in_l2, stale), state_first) in
        kinds.into_iter().flat_map(|kind| [false, true].map(|first| (kind, first)))
    {
        for (of_state, events, first, second) in cases {
            let mut v = vmcs12();
            v.set(field::GUEST_RFLAGS, 0x202);
            let mut machine = Hypervisor::on(features(), &v);
            if in_l2 {
                stop_in_l2(&mut machine);
            }
            v.set(field::ENTRY_INTERRUPTION, of_state);
            let flags = GUEST_MODE | if of_state == 0 { 0 } else { RUN_PENDING };
            let header = Header { flags, ..header(&mut machine) };
            let state = rig::nested_vmx::state_of(&header, &v);
            if stale {
                let old = SavedEvents { interrupt: Some(Vector(0x77)), ..none };
                machine.vcpu.restore_events(&old, GivenEvents::default());
            }
            let mut regs = machine.vcpu.regs();
            (regs.rip, regs.rflags) = (L2_RIP, x86::Rflags::from_bits_retain(0x202));
            machine.vcpu.set_regs(&regs);
            rig::restore(&mut machine.vcpu, &state, &events, state_first);
            for goes_in in [first, second, 0] {
                machine.then(move |vmcs, gprs| {
                    let found = vmcs.get(field::ENTRY_INTERRUPTION);
                    let valid = found >> 31 != 0;
                    assert_eq!(
                        if valid { found } else { 0 },
                        goes_in,
                        "{in_l2} {stale} {state_first}"
                    );
                    // As a CPU does with an entry.
                    vmcs.set(field::ENTRY_INTERRUPTION, found & !(1 << 31));
                    exit(ExitReason::Wbinvd)(vmcs, gprs);
                });
            }
            machine.then(shutdown);
            machine.then(shutdown);
            assert_eq!(machine.run(), UserExit::Shutdown);
        }
    }
}

/// L2 was restored with tables of L1's, and nobody was entered yet.
#[test]
fn user_space_is_told_where_l1s_tables_lead_behind_a_restore() {
    const TABLES: u64 = 0x1_0000;
    let mut v = vmcs12();
    v.set(field::PROC_CONTROLS2, v.get(field::PROC_CONTROLS2) | 1 << 1);
    v.set(field::EPT_POINTER, TABLES | 0x1e);
    v.set(field::GUEST_CR3, 0x1000);
    let mut machine = Hypervisor::on(features(), &v);
    for level in 0..3 {
        machine.put(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | 7);
    }
    // L2's own tables lie where L1's say, and lead to a page that L1's lead elsewhere.
    for (page, frame) in [(1, 5), (2, 6), (3, 7), (4, 8), (9, 10)] {
        machine.put(TABLES + 0x3000 + page * 8, frame << 12 | 0x37);
    }
    for (frame, entry) in [(5, 0x2000), (6, 0x3000), (7, 0x4000), (8, 0x9000)] {
        machine.put(frame << 12, entry | 7);
    }
    let header = Header { flags: GUEST_MODE, ..header(&mut machine) };
    machine.vcpu.set_nested_state(&rig::nested_vmx::state_of(&header, &v)).unwrap();
    assert_eq!(machine.vcpu.sregs().cr3, 0x1000);
    assert_eq!(machine.vcpu.translate_address(4), Some((0xa004, true, true)));
    assert_eq!(machine.vcpu.translate_address(0x1000), None);
}

/// The VMM has the interrupt controllers, and L1 has an interrupt that ends L2's run acknowledged: it is told once.
#[test]
fn an_interrupt_of_the_vmms_that_ends_l2s_run_does_not_come_once_more() {
    let mut v = vmcs12();
    v.set(field::PIN_CONTROLS, v.get(field::PIN_CONTROLS) | 1);
    v.set(field::EXIT_CONTROLS, v.get(field::EXIT_CONTROLS) | 1 << 15);
    let mut machine = Hypervisor::without_apic(features(), &v);
    stop_in_l2(&mut machine);
    machine.vcpu.queue_interrupt(Vector(0x40)).unwrap();
    machine.then(|vmcs, gprs| {
        assert_eq!((vmcs.get(field::GUEST_RIP), vmcs.get(field::ENTRY_INTERRUPTION)), (L1_RIP, 0));
        // L1 has interrupts on again.
        vmcs.set(field::GUEST_RFLAGS, 0x202);
        exit(ExitReason::Wbinvd)(vmcs, gprs);
    });
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), 0);
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(machine.vcpu.interrupt_in_injection(), None);
}

/// DEBUGCTL's bit for transactional regions is taken, and L2 has it, where CPUID has those.
#[test]
fn debugging_of_transactional_regions_goes_by_cpuid() {
    const RTM: u64 = 1 << 15;
    for (offered, taken) in [(false, false), (true, true)] {
        let mut v = vmcs12();
        v.set(field::GUEST_DEBUGCTL, RTM);
        v.set(field::ENTRY_CONTROLS, v.get(field::ENTRY_CONTROLS) | 1 << 2);
        let mut machine = if offered {
            Hypervisor::with_rtm(features(), &v)
        } else {
            Hypervisor::on(features(), &v)
        };
        assert_eq!(machine.vcpu.write_msr(DEBUGCTL, RTM, By::Vmm).is_ok(), taken);
        machine.vmlaunch();
        machine.then(move |vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_RIP) == L2_RIP, taken);
            // An exit, that of an entry that failed too, has cleared L1's.
            assert_eq!(vmcs.get(field::GUEST_DEBUGCTL), if taken { RTM } else { 0 });
            shutdown(vmcs, gprs);
        });
        if taken {
            machine.then(shutdown);
        }
        assert_eq!(machine.run(), UserExit::Shutdown);
    }
}
