//! What L1 hears of L2's exits, and of what L0 carries out for L2, over the model CPU.

use backend::{
    Claim, ControlRegisters as _, Executed, MonitorTrap as _, Nested as _, Permissions as _,
    WorldSwitch as _,
};
use core::sync::atomic::Ordering;

use x86::vmcs::{ExitReason, ProcControls2, field};

use super::round_trip_tests::{Rig, good};
use super::*;
use crate::percpu;

/// The hardware refuses what the checks here let pass: L1 mends it, and its VMLAUNCH is still the right instruction.
#[test]
fn an_entry_that_the_hardware_refuses_launches_nothing() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::InvalidGuestState, |v| {
        v.set(field::EXIT_REASON, 1 << 31 | u32::from(ExitReason::InvalidGuestState.0));
    });
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(backend::Claim::L1));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Retired, "VMfail: not launched");
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
}

/// An INT 80h that L1 injects meets a fault of L0's in its delivery: there need be no INT at RIP.
#[test]
fn a_software_interrupt_of_l1s_is_injected_again() {
    let mut v12 = good();
    let injects = x86::vmcs::event::VALID | x86::vmcs::event::SOFT | 0x80;
    v12.set(field::ENTRY_INTERRUPTION, injects);
    v12.set(field::ENTRY_INSTRUCTION_LENGTH, 2);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::EptViolation, move |v| v.set(field::IDT_VECTORING, injects));
    assert!(r.v.repeats_injection());
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::EptViolation, move |v| v.set(field::IDT_VECTORING, injects));
    assert!(!r.v.repeats_injection(), "this one is L2's own");
}

/// A VMM takes abilities from the capability MSRs, and sets CPUID again.
#[test]
fn what_the_vmm_has_taken_away_stays_away() {
    let mut r = Rig::new(&good(), 0xd01);
    r.v.nested.as_mut().unwrap().machine.reset();
    let msr = x86::vmcs::capability::VMX_PROCBASED_CTLS2;
    let all = r.v.nested_msr_value(msr).unwrap();
    let fewer = all & !(u64::from(ProcControls2::EPT.bits()) << 32);
    assert_ne!(fewer, all);
    r.v.set_nested_msr_value(msr, fewer).unwrap();
    let mut limits = r.v.cold.limits;
    limits.cr4_allowed |= Cr4::from_bits_retain(1 << 16);
    r.v.set_limits(limits);
    assert_eq!(r.v.nested_msr_value(msr), Some(fewer));
    let fixed = r.v.nested_msr_value(x86::vmcs::capability::VMX_CR4_FIXED1).unwrap();
    assert_ne!(fixed & 1 << 16, 0, "this one follows from CPUID");
}

/// L1 waits for the moment at which L2 takes an interrupt. An L2 that halts with interrupts on is entered, so that the
/// window ends its run at once.
#[test]
fn an_open_window_of_l1s_keeps_l2_awake() {
    let mut v12 = good();
    v12.set(field::PROC_CONTROLS, v12.get(field::PROC_CONTROLS) | 1 << 2);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Hlt, |v| v.set(field::GUEST_RFLAGS, 0x202));
    assert!(r.v.keeps_awake());
    r.enter(ExitReason::Hlt, |v| v.set(field::GUEST_RFLAGS, 2));
    assert!(!r.v.keeps_awake());
}

/// The exit behind an instruction that L0 has carried out, and what of a breakpoint L2 takes later.
#[test]
fn a_trap_that_is_owed_ends_l2s_run() {
    let mut v12 = good();
    v12.set(field::PROC_CONTROLS, v12.get(field::PROC_CONTROLS) | 1 << 27);
    let mut r = Rig::new(&v12, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::Rdmsr, |_| {});
    assert!(r.v.traps_each() && !r.v.owes_trap());
    assert_eq!(r.v.gate(&backend::Waiting::MonitorTrap), backend::Gate::AfterEntry);
    r.v.claims(&r.g, &r.m).unwrap();
    r.v.owe_trap();
    assert_eq!(r.v.gate(&backend::Waiting::MonitorTrap), backend::Gate::ExitToL1);
    r.v.keep_debug_trap(1 << 14);
    assert_eq!(
        r.v.exit_to_l1(&mut r.g, &backend::Waiting::MonitorTrap, None, &r.m),
        Executed::Left
    );
    assert!(!r.v.owes_trap());
    let v12 = r.v.nested.as_ref().unwrap().machine.vmcs12();
    assert_eq!(v12.get(field::EXIT_REASON), u32::from(ExitReason::MonitorTrap.0));
    assert_eq!(v12.get(field::GUEST_PENDING_DEBUG), 1 << 14);
}

/// The VMM's debugger gives L2 its INT3 back, and L1 intercepts #BP: it injects the event again by its length.
#[test]
fn a_breakpoint_that_l0_gives_to_l1_has_the_length_of_its_instruction() {
    // Behind an exit without an instruction the field says nothing: INT3 is one byte long.
    let exits = [(ExitReason::ExceptionOrNmi, 2, 2), (ExitReason::EptViolation, 0, 1)];
    for (reason, given, told) in exits {
        let mut v12 = good();
        v12.set(field::EXCEPTION_BITMAP, 1 << 3);
        let mut r = Rig::new(&v12, 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(reason, move |v| v.set(field::INSTRUCTION_LENGTH, given));
        let bp = x86::Exception { vector: x86::Vector(3), error_code: None, payload: None };
        let waiting = backend::Waiting::Exception(bp);
        assert_eq!(r.v.gate(&waiting), backend::Gate::ExitToL1);
        assert_eq!(r.v.exit_to_l1(&mut r.g, &waiting, None, &r.m), Executed::Left);
        let v12 = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!(v12.get(field::EXIT_INTERRUPTION), 0x8000_0603);
        assert_eq!(v12.get(field::INSTRUCTION_LENGTH), told);
    }
}

/// L2's VMREAD and VMWRITE, which L1 lets a shadow VMCS serve.
#[test]
fn a_shadow_vmcs_serves_l2() {
    const LINK: u64 = 0x1_2000;
    const FIELD: u64 = 0x681c;
    let mut v12 = good();
    v12.set(field::PROC_CONTROLS2, ProcControls2::SHADOW_VMCS.bits());
    v12.set(field::VMREAD_BITMAP, 0x1_3000);
    v12.set(field::VMWRITE_BITMAP, 0x1_4000);
    v12.set(field::VMCS_LINK, LINK);
    let mut r = Rig::new(&v12, 0xd01);
    let shadow = x86::vmcs::place::VMCS12_REVISION | 1 << 31;
    r.m.bytes.borrow_mut()[LINK as usize..][..4].copy_from_slice(&shadow.to_le_bytes());
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    let word = ProcControls2::from_bits_retain(r.v.get(fields::PROC_CONTROLS2));
    assert!(!word.contains(ProcControls2::SHADOW_VMCS), "no page of L1's for the hardware");
    // VMWRITE of RAX and VMREAD into RBX, the field in RDX.
    (r.g.0[0], r.g.0[2]) = (0x1234, FIELD);
    let access = |r: &mut Rig, reason: ExitReason, register: u32| {
        r.enter(reason, move |v| {
            v.set(field::INSTRUCTION_INFO, 1 << 10 | register << 3 | 2 << 28);
        });
        assert_eq!(r.v.claims(&r.g, &r.m), Ok(backend::Claim::L0));
        r.v.execute(&mut r.g, 0, &r.m)
    };
    assert_eq!(access(&mut r, ExitReason::Vmwrite, 0), Executed::Retired);
    assert_eq!(access(&mut r, ExitReason::Vmread, 3), Executed::Retired);
    assert_eq!(r.g.0[3], 0x1234);
    // L1's memory has it when L2's run has ended, which needs that memory.
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Outside);
    r.m.whole.set(true);
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    let at = LINK as usize + usize::from(x86::vmcs::place::find(FIELD).unwrap().place.offset);
    assert_eq!(r.m.bytes.borrow()[at..][..2], [0x34, 0x12]);
}

/// On a CPU without UMIP the table instructions of whoever has it set exit: L2's CR4 says so, not L1's.
#[test]
fn umip_by_exits_is_that_of_the_level_that_runs() {
    const UMIP: u64 = 1 << 11;
    let tables = ProcControls2::DESCRIPTOR_TABLES.bits();
    for (l1, l2) in [(0, UMIP), (UMIP, 0), (UMIP, UMIP), (0, 0)] {
        let mut v12 = good();
        v12.set(field::GUEST_CR4, 0x2020 | l2);
        v12.set(field::HOST_CR4, 0x2020 | l1);
        let f = crate::features::Features {
            umip_by_exits: true,
            ..super::round_trip_tests::features()
        };
        let mut r = Rig::on(f, &v12, 0xd01);
        r.v.nested.as_mut().unwrap().machine.capabilities.cr4_fixed1 |= UMIP;
        backend::ControlRegisters::set_cr4(&mut r.v, Cr4::from_bits_retain(0x2020 | l1));
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        for _ in 0..2 {
            assert_eq!(r.v.get(crate::fields::PROC_CONTROLS2) & tables != 0, l2 != 0);
            r.enter(ExitReason::Cpuid, |_| {});
            assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
            assert_eq!(r.v.get(crate::fields::PROC_CONTROLS2) & tables != 0, l1 != 0);
            assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        }
    }
}

/// VMFUNC switches between the tables of L1's list, and is L1's where it cannot.
#[test]
fn l2_switches_its_tables_by_vmfunc() {
    const LIST: u64 = 0x1_5000;
    let (first, second) = (0x3000 | 3 << 3 | 6, 0x5000 | 3 << 3 | 6);
    let mut v12 = good();
    let two = ProcControls2::EPT | ProcControls2::VMFUNC;
    v12.set(field::PROC_CONTROLS2, two.bits());
    v12.set(field::EPT_POINTER, first);
    v12.set(field::VM_FUNCTION_CONTROLS, 1);
    v12.set(field::EPTP_LIST, LIST);
    let mut r = Rig::new(&v12, 0xd01);
    r.root = true;
    for (n, pointer) in [first, second, 0x5000].into_iter().enumerate() {
        r.m.bytes.borrow_mut()[LIST as usize + 8 * n..][..8]
            .copy_from_slice(&pointer.to_le_bytes());
    }
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    let function = |r: &mut Rig, eax: u64, ecx: u64| {
        (r.g.0[0], r.g.0[1]) = (eax, ecx);
        r.enter(ExitReason::Vmfunc, |v| assert_eq!(v.get(field::VM_FUNCTION_CONTROLS), 0));
        assert_eq!(r.v.claims(&r.g, &r.m), Ok(backend::Claim::Instruction));
        r.v.execute_for_l2(&mut r.g, &r.m)
    };
    let pointer = |r: &Rig| match backend::NestedPaging::l1_tables(&r.v) {
        Some(backend::L1Tables::Ept { pointer, .. }) => pointer,
        _ => 0,
    };
    assert_eq!(function(&mut r, 0, 0), Executed::Retired);
    assert_eq!(function(&mut r, 0, 1), Executed::Switched);
    assert_eq!(pointer(&r), second);
    backend::NestedPaging::set_nested_root(&mut r.v, x86::Hpa(0xa000), false);
    assert_eq!(function(&mut r, 64, 0), Executed::Fault(x86::Exception::ud()));
    // No such function, no such entry, a pointer that no entry takes.
    for (eax, ecx) in [(1, 0), (0, 512), (0, 2)] {
        assert_eq!(function(&mut r, eax, ecx), Executed::Left);
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!((v.get(field::EXIT_REASON), v.get(field::EPT_POINTER)), (59, second));
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    }
}

/// L0 carries an instruction of L2's out, and L1's tables refuse its operand: L1 hears where that was, whatever exit
/// came before it.
#[test]
fn an_operand_in_software_that_l1s_tables_refuse_has_its_linear_address() {
    let mut v12 = good();
    v12.set(field::PROC_CONTROLS2, ProcControls2::EPT.bits());
    v12.set(field::EPT_POINTER, 0x3000 | 3 << 3 | 6);
    for reason in [ExitReason::Io, ExitReason::EptViolation] {
        let mut r = Rig::new(&v12, 0xd01);
        r.root = true;
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(reason, |v| v.set(field::GUEST_LINEAR_ADDRESS, 0x1234));
        let linear = Some(x86::Gva(0x800_0010));
        let why = backend::TablesRefuse::Violation { qualification: 0x181, linear };
        let done =
            backend::NestedPaging::refuse(&mut r.v, &mut r.g, x86::Gpa(0x5010), why, None, &r.m);
        assert_eq!(done, Executed::Left);
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!((v.get(field::EXIT_REASON), v.get(field::EXIT_QUALIFICATION)), (48, 0x181));
        assert_eq!(v.get(field::GUEST_LINEAR_ADDRESS), 0x800_0010);
        assert_eq!(v.get(field::GUEST_PHYSICAL_ADDRESS), 0x5010);
    }
}

/// XSAVES of L2's is undefined unless L1 says otherwise, and exits for the components that L1 names.
#[test]
fn l2_has_xsaves_if_l1_says_so() {
    let xsaves = ProcControls2::XSAVES.bits();
    let there = |r: &Rig| {
        let msr = r.v.nested_msr_value(x86::vmcs::capability::VMX_PROCBASED_CTLS2);
        msr.unwrap() >> 32 & u64::from(xsaves) != 0
    };
    assert!(!there(&Rig::new(&good(), 0xd01)), "this CPU has none");
    for (control, bitmap) in [(0, 0), (xsaves, 0x100), (xsaves, 0)] {
        let mut v12 = good();
        v12.set(field::PROC_CONTROLS2, control);
        v12.set(field::XSS_EXIT_BITMAP, bitmap);
        let f = crate::features::Features { xsaves: true, ..super::round_trip_tests::features() };
        let mut r = Rig::on(f, &v12, 0xd01);
        assert!(there(&r));
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        assert_eq!(r.v.get(crate::fields::PROC_CONTROLS2) & xsaves, control);
        if bitmap != 0 {
            r.g.0[0] = bitmap;
            r.enter(ExitReason::Xsaves, move |v| {
                assert_eq!(v.get(field::XSS_EXIT_BITMAP), bitmap);
            });
            assert_eq!(r.v.claims(&r.g, &r.m), Ok(backend::Claim::L1));
        }
    }
}

/// What a handler has made of L2's RSP is L2's, though its run ends before another entry.
#[test]
fn l1_sees_the_rsp_that_an_instruction_carried_out_below_it_has_set() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::EptViolation, |v| v.set(field::GUEST_RSP, 0x5008));
    assert_eq!(r.g.0[backend::RSP], 0x5008);
    r.g.0[backend::RSP] = 0x5010;
    let waiting = backend::Waiting::Interrupt(None);
    assert_eq!(r.v.exit_to_l1(&mut r.g, &waiting, None, &r.m), Executed::Left);
    let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
    assert_eq!(v.get(field::GUEST_RSP), 0x5010);
}

/// A field may be named by RSP: whose the exit is, and what is done, go by the same value.
#[test]
fn a_field_that_rsp_names_is_the_one_that_l1_is_asked_about() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    for reason in [ExitReason::Vmread, ExitReason::Vmwrite] {
        r.enter(reason, |v| v.set(field::GUEST_RSP, 0x681e));
        assert_eq!(r.g.0[backend::RSP], 0x681e);
    }
}

/// The handler of an SMI runs without CR4.VMXE, and what it executes in vain changes nothing of what was put aside.
#[test]
fn an_instruction_of_the_handlers_ends_no_operation_that_is_put_aside() {
    use backend::ControlRegisters as _;
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert!(r.v.enter_smm(&mut r.g, x86::Gpa(0), &r.m).is_ok());
    let cr4 = r.v.cr4();
    r.v.set_cr4(cr4 - x86::Cr4::VMXE);
    r.enter(ExitReason::Vmread, |_| {});
    let done = r.v.execute(&mut r.g, 0, &r.m);
    assert!(matches!(done, Executed::Fault(_) | Executed::Outside), "{done:?}");
    r.v.set_cr4(cr4);
    assert!(r.v.leave_smm(&mut r.g, x86::Gpa(0), None, &r.m));
    assert_eq!(r.v.level(), backend::Level::L2);
}

/// User space ends L2's run and sets RSP, which L1 has from then on.
#[test]
fn l1_runs_with_the_rsp_that_user_space_has_set_behind_l2() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.v.abandon(&mut r.g);
    r.g.0[backend::RSP] = 0x7778;
    r.enter(ExitReason::Hlt, |v| assert_eq!(v.get(field::GUEST_RSP), 0x7778));
}

/// L1 injects what else an instruction makes, INT n or INT1, and its delivery is interrupted: it is injected again as what it
/// is, also when the state was saved meanwhile.
#[test]
fn what_l1_injects_is_injected_again_as_it_is() {
    use backend::{Event, Injection as _, NestedState as _};
    use zerocopy::FromBytes as _;
    extern crate std;
    use std::vec;
    for (kind, vector) in [
        (event::SOFT, 0x80),
        (event::PRIVILEGED_SOFT_EXCEPTION, 1),
        (event::PRIVILEGED_SOFT_EXCEPTION, 6),
        (event::EXCEPTION, 3),
        (event::EXCEPTION, 4),
        (event::SOFT_EXCEPTION, 3),
    ] {
        let information = event::VALID | kind | vector;
        let mut v = good();
        v.set(field::ENTRY_INTERRUPTION, information);
        v.set(field::ENTRY_INSTRUCTION_LENGTH, 1);
        let mut r = Rig::new(&v, 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        for saves in [false, true, true] {
            r.enter(ExitReason::EptViolation, move |v| {
                assert_eq!(v.get(field::ENTRY_INTERRUPTION), information);
                v.set(field::ENTRY_INTERRUPTION, information & !event::VALID);
                v.set(field::IDT_VECTORING, information);
            });
            assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::L0));
            assert!(r.v.repeats_injection());
            let again = backend::Exits::interrupted_delivery(&r.v).unwrap();
            let soft = again == Event::Software(Vector(vector as u8));
            assert_eq!(soft, !matches!(kind, event::EXCEPTION | event::SOFT_EXCEPTION));
            if saves {
                r.leave_loop();
                let mut state = vec![0; r.v.state_size()];
                r.v.save_state(&r.g, &mut state, &r.m).unwrap();
                let header = nested_vmx::saved::HEADER;
                let saved = nested_vmx::Vmcs12::read_from_prefix(&state[header..]).unwrap().0;
                assert_eq!(saved.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
                assert!(r.v.repeats_injection(), "it goes on here");
                r.v.load(0);
            }
            r.v.inject(again);
            // Not entered: it goes back, and in again.
            assert_eq!(r.v.cancel_injection(), Some(again));
            r.v.inject(again);
        }
        // Of L1's tables, behind ours: L1 is told what it had.
        r.enter(ExitReason::EptViolation, move |v| {
            assert_eq!(v.get(field::ENTRY_INTERRUPTION), information);
            v.set(field::ENTRY_INTERRUPTION, information & !event::VALID);
            v.set(field::IDT_VECTORING, information);
        });
        assert!(r.v.repeats_injection());
        let undelivered = backend::Exits::interrupted_delivery(&r.v);
        backend::Exits::forget_interrupted_delivery(&mut r.v);
        let why = backend::TablesRefuse::Violation { qualification: 0x181, linear: None };
        let refused = Gpa(0x5000);
        use backend::NestedPaging as _;
        assert_eq!(r.v.refuse(&mut r.g, refused, why, undelivered, &r.m), Executed::Left);
        assert_eq!(vmcs12(&mut r).get(field::IDT_VECTORING), information);
    }
}

/// A state has the event of L1's whose delivery was interrupted among the vCPU's, and its VMCS12 none: where it is restored, the
/// delivery meets a fault again, and no instruction at RIP stands for it.
#[test]
fn an_event_of_l1s_that_was_saved_is_injected_again() {
    use backend::{Event, Injection as _};
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.v.inject(Event::Software(Vector(0x80)));
    r.enter(ExitReason::EptViolation, |v| {
        v.set(field::ENTRY_INTERRUPTION, 0x480);
        v.set(field::IDT_VECTORING, 0x8000_0480);
    });
    assert!(r.v.repeats_injection());
    // Behind an exit to L1 it is L2's own.
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::EptViolation, |v| v.set(field::IDT_VECTORING, 0x8000_0480));
    assert!(!r.v.repeats_injection());
}

/// What is injected again goes by the mode of then where its neutral form says all: in real mode nothing pushes an error code.
#[test]
fn an_event_that_went_back_follows_the_mode() {
    use backend::{ControlRegisters as _, Event, Injection as _};
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.v.inject(Event::Exception(x86::Exception::gp(0)));
    let again = r.v.cancel_injection().unwrap();
    r.v.set_cr0(r.v.control().cr0 - x86::Cr0::PE);
    r.v.inject(again);
    assert_eq!(r.v.get(crate::fields::ENTRY_INTERRUPTION), 0x8000_030d);
}

/// L1 has injected INT1, which was delivered. L2's own INT 1 is another event: it asks for the privilege of the gate, and is
/// executed again. What L1's word says is of its event alone.
#[test]
fn an_int_1_of_l2s_is_not_the_int1_that_l1_has_injected() {
    let mut v = good();
    v.set(field::ENTRY_INTERRUPTION, 0x8000_0501);
    v.set(field::ENTRY_INSTRUCTION_LENGTH, 1);
    let mut r = Rig::new(&v, 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |v| v.set(field::ENTRY_INTERRUPTION, 0x501));
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::L0));
    r.enter(ExitReason::EptViolation, |v| v.set(field::IDT_VECTORING, 0x8000_0401));
    assert!(!r.v.repeats_injection());
    r.enter(ExitReason::EptViolation, |v| v.set(field::IDT_VECTORING, 0x8000_0501));
    assert!(r.v.repeats_injection());
}

/// How wide an address of L1's host state may be is what the CPU can do, and not what L1 uses (SDM vol. 3C §27.2.2).
#[test]
fn addresses_of_the_host_state_are_as_wide_as_the_cpu_has_them() {
    use backend::GuestLimits;
    for (la57, done) in [(false, Executed::Retired), (true, Executed::Entered)] {
        let mut v = good();
        v.set(field::HOST_FS_BASE, 1 << 52);
        let mut r = Rig::new(&v, 0xd01);
        let wide = if la57 { Cr4::LA57 } else { Cr4::empty() };
        r.v.set_limits(GuestLimits {
            cr4_allowed: Cr4::from_bits_retain(0x77_27ff) | wide,
            efer_allowed: 0xd01,
            maxphyaddr: 40,
            vmx: true,
            xsave: true,
            ..GuestLimits::default()
        });
        assert_eq!(r.go(ExitReason::Vmlaunch), done, "{la57}");
    }
}

/// The controls of instructions come and go with CPUID.
#[test]
fn a_second_cpuid_gives_and_takes_instructions() {
    use backend::{GuestLimits, Msrs as _};
    let f = crate::features::Features { xsaves: true, ..super::round_trip_tests::features() };
    let mut r = Rig::on(f, &good(), 0xd01);
    r.v.leave_operation();
    for (xsave, tsc_aux, invpcid) in
        [(false, false, true), (true, false, false), (false, true, false), (true, true, true)]
    {
        // RDRAND and RDSEED go by the combinations of two others.
        let (rdrand, rdseed) = (xsave && invpcid, xsave);
        r.v.set_limits(GuestLimits {
            cr4_allowed: Cr4::from_bits_retain(0x77_27ff),
            efer_allowed: 0xd01,
            maxphyaddr: 40,
            vmx: true,
            xsave,
            tsc_aux,
            invpcid,
            rdrand,
            rdseed,
            ..GuestLimits::default()
        });
        let offered = r.v.msr(x86::vmcs::capability::VMX_PROCBASED_CTLS2).unwrap() >> 32;
        let has = |bit: ProcControls2| offered & u64::from(bit.bits()) != 0;
        assert_eq!(has(ProcControls2::XSAVES), xsave);
        assert_eq!(has(ProcControls2::RDTSCP), tsc_aux);
        assert_eq!(has(ProcControls2::INVPCID), invpcid);
        assert_eq!((has(ProcControls2::RDRAND), has(ProcControls2::RDSEED)), (rdrand, rdseed));
    }
}

/// An L2 that has no priority of its own lowers L1's below the threshold at which an interrupt of L1's waits: the CPU would refuse L1.
#[test]
fn a_priority_that_l2_lowers_takes_l1s_threshold_along() {
    use backend::{Chosen, ControlRegisters as _, Injection as _};
    let mut r = Rig::new(&good(), 0xd01);
    r.v.set_cr8(13);
    r.v.watch_priority(Chosen::None, Some(x86::Vector(0x51)));
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::CrAccess, |_| {});
    r.v.set_cr8(3);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    r.enter(ExitReason::Cpuid, |v| assert_eq!(v.get(field::TPR_THRESHOLD), 3));
    r.v.set_cr8(13);
    assert_eq!(r.v.get(crate::fields::TPR_THRESHOLD), 3, "until it is watched anew");
}

fn vmcs12(r: &mut Rig) -> &mut nested_vmx::Vmcs12 {
    r.v.nested.as_mut().unwrap().machine.vmcs12_mut()
}

/// Two VMCSs share a VPID by their fields, and one of them does not use it: what it leaves under L2's tag is not for the other.
#[test]
fn what_runs_without_a_vpid_leaves_nothing_for_one() {
    let mut v12 = good();
    v12.set(field::PROC_CONTROLS2, ProcControls2::VPID.bits());
    v12.set(field::VPID, 5);
    let mut r = Rig::new(&v12, 0xd01);
    let flushes = |r: &mut Rig, by, vpid: ProcControls2| {
        vmcs12(r).set(field::PROC_CONTROLS2, vpid.bits());
        r.v.nested.as_mut().unwrap().machine.touch_all();
        assert_eq!(r.go(by), Executed::Entered);
        let flushes = r.v.attention & attention::FLUSH != 0;
        r.enter(ExitReason::Cpuid, |_| {});
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        flushes
    };
    let (with, without) = (ProcControls2::VPID, ProcControls2::empty());
    assert!(flushes(&mut r, ExitReason::Vmlaunch, with), "never met before");
    assert!(!flushes(&mut r, ExitReason::Vmresume, with));
    assert!(flushes(&mut r, ExitReason::Vmresume, without));
    assert!(flushes(&mut r, ExitReason::Vmresume, with));
    assert!(!flushes(&mut r, ExitReason::Vmresume, with));
}

/// L2 leaves 64-bit mode by itself, and L1 has its EFER loaded but not saved: the next entry has a mode and an EFER that disagree.
#[test]
fn a_mode_that_l2_has_changed_is_checked_against_the_efer_that_is_loaded() {
    use backend::ControlRegisters as _;
    const SAVE_EFER: u32 = 1 << 20;
    for saved in [true, false] {
        let mut v12 = good();
        let exit = v12.get(field::EXIT_CONTROLS) & !SAVE_EFER;
        v12.set(field::EXIT_CONTROLS, if saved { exit | SAVE_EFER } else { exit });
        let mut r = Rig::new(&v12, 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::ExternalInterrupt, |_| {});
        let efer = r.v.control().efer;
        r.v.set_efer(efer - (x86::Efer::LMA | x86::Efer::LME));
        r.enter(ExitReason::Cpuid, |v| v.set(field::GUEST_CS_RIGHTS, 0xc09b));
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        let _ = r.go(ExitReason::Vmresume);
        let failed = vmcs12(&mut r).get(field::EXIT_REASON) == 0x8000_0021;
        assert_eq!(failed, !saved, "{:?}", vmcs12(&mut r).get(field::EXIT_QUALIFICATION));
    }
}

/// The delivery of INT1 meets L1's tables: L1 is told INT1 and no INT 1, which would ask for the privilege of the gate.
#[test]
fn an_int1_that_met_l1s_tables_is_told_as_itself() {
    use backend::{Event, NestedPaging as _, TablesRefuse};
    for information in [0x8000_0501, 0x8000_0401] {
        let mut r = Rig::new(&good(), 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        r.enter(ExitReason::EptViolation, move |v| v.set(field::IDT_VECTORING, information));
        let why = TablesRefuse::Violation { qualification: 0x181, linear: None };
        let undelivered = Some(Event::Software(x86::Vector(1)));
        let done = r.v.refuse(&mut r.g, x86::Gpa(0x5000), why, undelivered, &r.m);
        assert_eq!(done, Executed::Left);
        assert_eq!(vmcs12(&mut r).get(field::IDT_VECTORING), information);
    }
}

/// L2's first access meets L1's tables before the entry has run: L1 is told what it has asked for, INT1 or a pending MTF.
#[test]
fn what_an_entry_was_to_inject_is_told_as_l1_wrote_it() {
    use backend::{Injection as _, NestedPaging as _, TablesRefuse};
    for (information, length) in [(0x8000_0501, 1), (0x8000_0700, 0), (0x8000_0480, 5)] {
        let mut v12 = good();
        v12.set(field::ENTRY_INTERRUPTION, information);
        v12.set(field::ENTRY_INSTRUCTION_LENGTH, length);
        let mut r = Rig::new(&v12, 0xd01);
        assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
        let why = TablesRefuse::Violation { qualification: 0x181, linear: None };
        let undelivered = r.v.cancel_injection();
        assert!(undelivered.is_some());
        let done = r.v.refuse(&mut r.g, x86::Gpa(0x5000), why, undelivered, &r.m);
        assert_eq!(done, Executed::Left);
        let v = vmcs12(&mut r);
        assert_eq!(v.get(field::IDT_VECTORING), information);
        // Of an event of an instruction.
        assert!(length == 0 || v.get(field::INSTRUCTION_LENGTH) == length);
    }
}

/// Nobody has HLT exit: the CPU halts L2, and L1 hears of it and may wake L2.
#[test]
fn an_l2_that_the_cpu_has_halted_is_told_and_woken() {
    let mut v12 = good();
    let halts = v12.get(field::PROC_CONTROLS) & !ProcControls::HLT.bits();
    v12.set(field::PROC_CONTROLS, halts);
    let mut r = Rig::new(&v12, 0xd01);
    r.v.change_proc(ProcControls::HLT, false);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |v| v.set(field::GUEST_ACTIVITY, 1));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(vmcs12(&mut r).get(field::GUEST_ACTIVITY), 1);
    // L1 wakes it, without a word of the field that says so.
    vmcs12(&mut r).set(field::GUEST_ACTIVITY, 0);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::Cpuid, |v| assert_eq!(v.get(field::GUEST_ACTIVITY), 0));
}

/// Outside 64-bit mode the operand that names a field has 32 bits: what L2 left in the register's upper half names nothing.
#[test]
fn the_upper_half_of_a_register_is_no_part_of_a_fields_name_in_32_bit_code() {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    // L2 has loaded a selector that VMCS12 does not have yet.
    r.enter(ExitReason::Cpuid, |v| v.set(field::GUEST_ES_SELECTOR, 0x1230));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    r.v.set_efer(Efer::empty());
    let encoding = u64::from(field::GUEST_ES_SELECTOR.encoding());
    (r.g.0[1], r.g.0[2]) = (0x5555, 1 << 32 | encoding);
    r.enter(ExitReason::Vmread, |v| v.set(field::INSTRUCTION_INFO, 1 << 10 | 1 << 3 | 2 << 28));
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Retired);
    assert_eq!(r.g.0[1], 0x1230);
}

/// L1 is told of a violation and has not entered L2 again: what another vCPU left on this CPU, under the root that both have, is
/// forgotten. Once, and not where L2 runs or nobody else was here.
#[test]
fn what_another_vcpu_has_filled_in_here_is_forgotten() {
    use backend::{NestedPaging as _, TablesRefuse};
    let mut v12 = good();
    let ept = ProcControls2::EPT.bits() | v12.get(field::PROC_CONTROLS2);
    v12.set(field::PROC_CONTROLS2, ept);
    v12.set(field::EPT_POINTER, 0x6000 | 0x1e);
    let mut r = Rig::new(&v12, 0xd01);
    // The thread leaves the CPU, another one runs there or none does, and it comes back. The INVEPTs of its next entry.
    let away = |r: &mut Rig, others: bool| {
        r.leave_loop();
        let here = percpu::of(0).unwrap();
        if others {
            here.last_vcpu.store(u64::MAX, Ordering::Relaxed);
        }
        r.come_to(0);
        let before = r.invepts();
        r.enter(ExitReason::ExternalInterrupt, |_| {});
        r.invepts() - before
    };
    let refused = |r: &mut Rig| {
        r.enter(ExitReason::EptViolation, |_| {});
        let why = TablesRefuse::Violation { qualification: 0x181, linear: None };
        let done = r.v.refuse(&mut r.g, x86::Gpa(0x5000), why, None, &r.m);
        assert_eq!(done, Executed::Left);
    };
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.v.set_nested_root(x86::Hpa(0x7000), false);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_eq!(away(&mut r, true), 0, "nothing was told");
    refused(&mut r);
    assert_eq!(away(&mut r, false), 0, "nobody was here");
    // L1's root is another one, and both are named.
    assert_eq!(away(&mut r, true), 2);
    assert_eq!(away(&mut r, true), 0, "once");
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    refused(&mut r);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(away(&mut r, true), 0, "L2 was entered behind it");
    refused(&mut r);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.v.set_nested_root(x86::Hpa(0x9000), false);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    assert_eq!(away(&mut r, true), 2, "by another root");
}
