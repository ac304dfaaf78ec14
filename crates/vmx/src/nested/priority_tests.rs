//! MOV of CR8 by L2 over the model CPU.

use super::*;
use crate::nested::round_trip_tests::{Rig, good};
use backend::{Claim, Nested as _};
use nested_vmx::{GuestMemory as _, Vmcs12};
use x86::vmcs::field;
use x86::{Exception, Gpa};

const PAGE: u64 = 0x1_8000;
const VTPR: Gpa = Gpa(PAGE + 0x80);
/// MOV to CR8 from R9, and from CR8 into R9.
const TO: u64 = 8 | 9 << 8;
const FROM: u64 = TO | 1 << 4;

fn vmcs12(threshold: u32) -> Vmcs12 {
    let mut v = good();
    let primary = v.get(field::PROC_CONTROLS);
    v.set(field::PROC_CONTROLS, primary | 1 << 21);
    v.set(field::VIRTUAL_APIC_ADDR, PAGE);
    v.set(field::TPR_THRESHOLD, threshold);
    v
}

fn running(v: &Vmcs12, priority: u8) -> Rig {
    let mut r = Rig::new(v, 0xd01);
    Memory::new(&r.m).write(VTPR, &[priority, 0xff, 0xff, 0xff]).unwrap();
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    r
}

/// The MOV, with R9.
fn moves(r: &mut Rig, qualification: u64, value: u64, flags: u64) -> Executed {
    r.g.0[9] = value;
    r.enter(ExitReason::CrAccess, move |v| {
        v.set(field::EXIT_QUALIFICATION, qualification);
        v.set(field::GUEST_RFLAGS, 2 | flags);
        v.set(field::GUEST_INTERRUPTIBILITY, 1);
    });
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::Instruction));
    r.v.execute_for_l2(&mut r.g, &r.m)
}

fn vtpr(r: &Rig) -> u32 {
    Memory::new(&r.m).read_u32(VTPR).unwrap()
}

#[test]
fn the_hardware_has_no_page_of_l1s() {
    let r = running(&vmcs12(0), 0x70);
    let word = r.v.get(fields::PROC_CONTROLS);
    assert_eq!(word & (1 << 19 | 1 << 20 | 1 << 21), 1 << 19 | 1 << 20);
}

#[test]
fn l2_reads_and_writes_its_priority_in_l1s_page() {
    let mut r = running(&vmcs12(0), 0x75);
    assert_eq!(moves(&mut r, FROM, u64::MAX, 0), Executed::Retired);
    assert_eq!(r.g.0[9], 7);
    assert_eq!(moves(&mut r, TO, 3, 0), Executed::Retired);
    assert_eq!(vtpr(&r), 0x30);
    assert_eq!(moves(&mut r, TO, 16, 0), Executed::Fault(Exception::gp(0)));
    assert_eq!(vtpr(&r), 0x30);
    // L1's own priority is another.
    assert_eq!(r.v.apic_page.tpr(), 0);
}

#[test]
fn below_the_threshold_l1_sees_an_exit_behind_the_instruction() {
    for (flags, pending) in [(0, 0), (1 << 8 | 1 << 16, Dr6::BS)] {
        let mut r = running(&vmcs12(6), 0x70);
        assert_eq!(moves(&mut r, TO, 6, 0), Executed::Retired);
        let rip = r.v.get(fields::GUEST_RIP);
        assert_eq!(moves(&mut r, TO, 5, flags), Executed::Left);
        assert_eq!(vtpr(&r), 0x50);
        let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
        assert_eq!(v.get(field::EXIT_REASON), 43);
        assert_eq!(v.get(field::GUEST_RIP), rip + 3);
        assert_eq!(v.get(field::GUEST_RFLAGS), 2 | flags & 1 << 8);
        assert_eq!(v.get(field::GUEST_PENDING_DEBUG), pending);
        assert_eq!(v.get(field::GUEST_INTERRUPTIBILITY), 0, "the shadow of STI is over");
        // An entry below the threshold fails; above it L2 goes on.
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Retired);
        Memory::new(&r.m).write(VTPR, &[0x60]).unwrap();
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    }
}

#[test]
fn nothing_happens_where_leaving_needs_memory_that_is_elsewhere() {
    let mut v = vmcs12(6);
    v.set(field::EXIT_MSR_STORE_COUNT, 1);
    v.set(field::EXIT_MSR_STORE_ADDR, 0x3000);
    let mut r = running(&v, 0x70);
    Memory::new(&r.m).write(Gpa(0x3000), &x86::msr::KERNEL_GS_BASE.to_le_bytes()).unwrap();
    assert_eq!(moves(&mut r, TO, 5, 0), Executed::Outside);
    assert_eq!(vtpr(&r), 0xffff_ff70);
    r.leave_loop();
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::Instruction));
    assert_eq!(r.v.execute_for_l2(&mut r.g, &r.m), Executed::Left);
    assert_eq!(vtpr(&r), 0x50);
}

/// What a vCPU that is not in the loop finds, and one that is and has to leave it.
#[test]
fn a_page_that_is_taken_away_is_no_memory() {
    let mut r = running(&vmcs12(6), 0x70);
    r.m.bytes.borrow_mut().truncate(PAGE as usize);
    assert_eq!(moves(&mut r, FROM, 0, 0), Executed::Outside);
    assert_eq!(moves(&mut r, TO, 9, 0), Executed::Outside);
    r.leave_loop();
    let again = |r: &mut Rig, qualification| {
        r.come_to(0);
        let done = moves(r, qualification, 9, 0);
        assert_eq!(done, Executed::Outside);
        r.leave_loop();
        r.v.execute_for_l2(&mut r.g, &r.m)
    };
    assert_eq!(again(&mut r, TO), Executed::Retired);
    assert_eq!(again(&mut r, FROM), Executed::Retired);
    assert_eq!(r.g.0[9], 15);
}

#[test]
fn l1s_own_exits_come_first() {
    let mut v = vmcs12(6);
    let primary = v.get(field::PROC_CONTROLS);
    v.set(field::PROC_CONTROLS, primary | 1 << 19);
    let mut r = running(&v, 0x70);
    r.enter(ExitReason::CrAccess, |v| v.set(field::EXIT_QUALIFICATION, TO));
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::L1));
}

/// A store that nothing follows leaves what waits waiting: the upper half of the ICR.
#[test]
fn a_store_that_nothing_follows_forgets_no_interrupt() {
    use backend::NestedPaging as _;
    let mut v = vmcs12(0);
    v.set(field::PROC_CONTROLS2, 1 | 1 << 8 | 1 << 9);
    v.set(field::APIC_ACCESS_ADDR, 0x1_9000);
    v.set(field::EXIT_CONTROLS, v.get(field::EXIT_CONTROLS) | 1 << 15);
    v.set(field::GUEST_INTERRUPT_STATUS, 0x41);
    let mut r = Rig::new(&v, 0xd01);
    r.root = true;
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::EnteredOffering);
    assert!(r.v.offers_interrupt());
    for (offset, value, offers) in [(0x310, 0x100_0000, true), (0x80, 0x50, false)] {
        r.enter(ExitReason::EptViolation, |_| {});
        let done = r.v.do_apic_access(&mut r.g, offset, Some(value), 0x403, &r.m);
        assert_eq!(done, Ok(0));
        assert_eq!(r.v.offers_interrupt(), offers, "{offset:x}");
    }
}

/// RDMSR or WRMSR by L2, of an MSR that L1's map lets it have.
fn msr(r: &mut Rig, reason: ExitReason, index: u64, value: u64) -> Executed {
    (r.g.0[0], r.g.0[1], r.g.0[2]) = (value & 0xffff_ffff, index, value >> 32);
    r.enter(reason, |_| {});
    assert_eq!(r.v.claims(&r.g, &r.m), Ok(Claim::Instruction));
    r.v.execute_for_l2(&mut r.g, &r.m)
}

#[test]
fn the_priority_is_an_msr_of_the_x2apic_too() {
    use x86::vmcs::{ProcControls, ProcControls2};
    let mut v = vmcs12(6);
    let primary = v.get(field::PROC_CONTROLS) | ProcControls::MSR_BITMAPS.bits();
    v.set(field::PROC_CONTROLS, primary);
    v.set(field::MSR_BITMAP, 0x1_9000);
    let x2apic = ProcControls2::VIRTUALIZE_X2APIC | ProcControls2::APIC_REGISTERS;
    v.set(field::PROC_CONTROLS2, x2apic.bits());
    let mut r = running(&v, 0x75);
    let word = ProcControls2::from_bits_retain(r.v.get(fields::PROC_CONTROLS2));
    assert!(!word.intersects(x2apic), "no page of L1's for the hardware");
    r.v.change_proc2(x2apic, false);
    let word = ProcControls2::from_bits_retain(r.v.get(fields::PROC_CONTROLS2));
    assert!(!word.intersects(x2apic), "nor when L0 changes its own");
    assert_eq!(msr(&mut r, ExitReason::Rdmsr, 0x808, 0), Executed::Retired);
    assert_eq!((r.g.0[0], r.g.0[2]), (0xffff_ff75, 0));
    assert_eq!(msr(&mut r, ExitReason::Wrmsr, 0x808, 0x61), Executed::Retired);
    assert_eq!(vtpr(&r), 0x61);
    let fault = Executed::Fault(Exception::gp(0));
    assert_eq!(msr(&mut r, ExitReason::Wrmsr, 0x808, 1 << 32), fault);
    assert_eq!(msr(&mut r, ExitReason::Wrmsr, 0x808, 0x5f), Executed::Left);
    assert_eq!(vtpr(&r), 0x5f);
    let v = r.v.nested.as_ref().unwrap().machine.vmcs12();
    assert_eq!(v.get(field::EXIT_REASON), 43);
}
