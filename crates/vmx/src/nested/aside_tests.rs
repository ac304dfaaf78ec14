//! What a saved state, or system-management mode, puts aside of L1 and of L2.

use backend::{
    ControlRegisters, Injection as _, Nested as _, NestedState as _, Permissions as _,
    Registers as _,
};
use x86::vmcs::capability::{VMX_CR4_FIXED1, VMX_PROCBASED_CTLS2};
use x86::vmcs::{ProcControls, ProcControls2};
use x86::{Cr4, Efer, Rflags};

use super::round_trip_tests::{Rig, good};
use super::*;

/// L2 runs, and was left for user space.
fn in_l2() -> Rig {
    let mut r = Rig::new(&good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    r
}

/// User space sets the flags of an L1 that steps behind MOV SS, and then an L2 that runs.
#[test]
fn a_step_that_pends_in_l1_is_over_when_l2_has_run() {
    extern crate std;
    let mut r = in_l2();
    let mut bytes = std::vec![0; r.v.state_size()];
    r.v.save_state(&r.g, &mut bytes, &r.m).unwrap();
    r.v.abandon(&mut r.g);
    r.v.set_rflags(Rflags::FIXED | Rflags::TF);
    r.v.set_interrupt_shadow(true);
    assert_ne!(r.v.get(fields::GUEST_PENDING_DEBUG), 0);
    r.restore(&bytes, false);
    r.come_to(0);
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    assert_eq!(r.v.get(fields::GUEST_PENDING_DEBUG), 0, "a #DB at L1's HOST_RIP");
}

/// RSM enters the L2 that is aside as it was checked: user space changes nothing of that meanwhile.
#[test]
fn what_an_l2_that_is_aside_was_checked_by_stays() {
    let mut r = in_l2();
    assert!(!r.v.has_l2_aside());
    assert!(r.v.enter_smm(&mut r.g, x86::Gpa(0), &r.m).is_ok());
    assert!(r.v.has_l2_aside());
    let all = r.v.nested_msr_value(VMX_PROCBASED_CTLS2).unwrap();
    let fewer = all & !(u64::from(ProcControls2::EPT.bits()) << 32);
    assert_ne!(fewer, all);
    assert!(r.v.set_nested_msr_value(VMX_PROCBASED_CTLS2, fewer).is_err());
    let fixed = r.v.nested_msr_value(VMX_CR4_FIXED1);
    let mut limits = r.v.cold.limits;
    limits.cr4_allowed ^= Cr4::from_bits_retain(1 << 16);
    r.v.set_limits(limits);
    assert_eq!(r.v.nested_msr_value(VMX_CR4_FIXED1), fixed);
    r.v.set_limits(backend::GuestLimits { vmx: false, ..limits });
    assert!(r.v.leave_smm(&mut r.g, x86::Gpa(0), None, &r.m));
    assert_eq!(r.v.level(), backend::Level::L2);
    assert!(!r.v.has_l2_aside());
}

/// RSM finds what it goes on with to be no state, behind L2: vmcs01 is entered as the handler has left it, and what the CPU
/// has of the host's goes by the words of that.
#[test]
fn l1_that_nobody_sets_has_its_own_words_behind_l2() {
    let mut r = in_l2();
    assert!(r.v.enter_smm(&mut r.g, x86::Gpa(0), &r.m).is_ok());
    let of_l2 = (ControlRegisters::cr4(&r.v), ControlRegisters::efer(&r.v));
    r.v.set_cr4(Cr4::PAE | Cr4::OSXSAVE);
    r.v.set_efer(Efer::SCE | Efer::LME | Efer::LMA);
    let of_l1 = (ControlRegisters::cr4(&r.v), ControlRegisters::efer(&r.v));
    assert!(of_l1.0 != of_l2.0 && of_l1.1 != of_l2.1);
    assert!(r.v.leave_smm(&mut r.g, x86::Gpa(0), None, &r.m));
    assert_ne!(ControlRegisters::efer(&r.v), of_l1.1);
    r.v.abandon(&mut r.g);
    assert_eq!((ControlRegisters::cr4(&r.v), ControlRegisters::efer(&r.v)), of_l1);
    r.come_to(0);
    // The model CPU refuses an entry with the host's LSTAR or XCR0.
    r.enter(ExitReason::ExternalInterrupt, |_| {});
}

/// A CPU has no room to note another VMCS: what is read outside the loop does not stay active there, for nobody would clear it.
#[test]
fn what_is_read_outside_without_a_note_is_cleared_at_once() {
    let mut r = Rig::new(&good(), 0xd01);
    r.leave_loop();
    let here = crate::percpu::of(0).unwrap();
    // Cleared, it is in no note; others take all there are.
    here.clear(&r.v.cpu, r.v.vmcs.hpa());
    r.v.vmcs.fields.cpus.active_on.set(None);
    let others = (1..1000u64).map(|n| x86::Hpa(n << 40));
    extern crate std;
    let noted: std::vec::Vec<_> = others.take_while(|other| here.note_active(*other)).collect();
    let cleared = r.v.cpu().counts();
    let _ = r.v.vmcs.read_outside(&r.v.cpu, x86::vmcs::field::GUEST_ES_BASE.encoding());
    let counts = r.v.cpu().counts().since(&cleared);
    let active = r.v.vmcs.fields.cpus.active_on.get();
    // Before anything fails: the notes are those of all tests.
    for other in noted {
        here.clear(&r.v.cpu, other);
    }
    assert_eq!((counts.of(cpu::Op::Vmptrld), counts.of(cpu::Op::Vmclear)), (1, 1));
    assert_eq!(active, None);
}

/// User space sets L2's ES, L1 gets an exit before L2 has run again, on the same CPU or another, and reads the one field: what
/// waits to be written into vmcs02 is what it reads, and not what the hardware has.
#[test]
fn a_field_that_waits_to_be_written_is_what_l1_reads() {
    for cpu in [0, 1] {
        let mut r = in_l2();
        let es = x86::Segment { base: 0x9000, limit: 0xffff, selector: 0, attr: 0xc093 };
        r.v.set_segment(backend::SegmentName::Es, es);
        let waiting = backend::Waiting::MonitorTrap;
        assert_eq!(r.v.exit_to_l1(&mut r.g, &waiting, None, &r.m), Executed::Left);
        r.come_to(cpu);
        (r.g.0[1], r.g.0[2]) = (x86::vmcs::field::GUEST_ES_BASE.encoding().into(), 0);
        r.enter(ExitReason::Vmread, |v| {
            v.set(x86::vmcs::field::INSTRUCTION_INFO, 1 << 10 | 2 << 3 | 1 << 28);
        });
        assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Retired);
        assert_eq!(r.g.0[2], 0x9000, "on CPU {cpu}");
        r.come_to(0);
    }
}

/// An NMI waits for the end of STI's shadow at the interrupt window, while L1 reads what its L2 has left: that an interrupt which
/// was offered is taken closes no window that the NMI needs.
#[test]
fn an_nmi_behind_sti_keeps_its_window_while_l1_reads_a_field() {
    let mut r = in_l2();
    let es = x86::Segment { base: 0x9000, limit: 0xffff, selector: 0, attr: 0xc093 };
    r.v.set_segment(backend::SegmentName::Es, es);
    assert_eq!(
        r.v.exit_to_l1(&mut r.g, &backend::Waiting::MonitorTrap, None, &r.m),
        Executed::Left
    );
    r.come_to(0);
    (r.g.0[1], r.g.0[2]) = (x86::vmcs::field::GUEST_ES_BASE.encoding().into(), 0);
    r.enter(ExitReason::Vmread, |v| {
        v.set(x86::vmcs::field::INSTRUCTION_INFO, 1 << 10 | 2 << 3 | 1 << 28);
        v.set(x86::vmcs::field::GUEST_INTERRUPTIBILITY, x86::vmcs::interruptibility::STI);
    });
    let _ = r.v.set_nmi_window();
    assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Retired);
    assert_eq!(r.g.0[2], 0x9000);
    r.v.open_window(false);
    let word = ProcControls::from_bits_retain(r.v.get(fields::PROC_CONTROLS));
    assert!(word.contains(ProcControls::INTERRUPT_WINDOW));
}

/// What is restored of an event of L1's is injected, is taken back for a signal, and is injected: no exit tells its length.
#[test]
fn an_event_of_l1s_that_is_taken_back_keeps_its_length() {
    let mut r = in_l2();
    (r.v.cold.of_l1.repeated, r.v.cold.of_l1.length) = (0x8000_0480, 5);
    let int = backend::Event::Software(x86::Vector(0x80));
    for _ in 0..2 {
        r.v.inject(int);
        assert_eq!(r.v.get(fields::ENTRY_INTERRUPTION), 0x8000_0480);
        assert_eq!(r.v.get(fields::ENTRY_INSTRUCTION_LENGTH), 5);
        assert_eq!(r.v.cancel_injection(), Some(int));
    }
}
