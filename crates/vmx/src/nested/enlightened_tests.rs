//! The enlightened VMCS over the model CPU.

extern crate std;

use backend::{
    Enlightenment, Executed, L1Memory, Nested as _, NestedState as _, Onward, RAX, RCX,
    WorldSwitch as _,
};
use cpu::Op;
use nested_vmx::{Vmcs12, set};
use x86::vmcs::enlightened::{self, READ_LINES, at};
use x86::vmcs::{ExitReason, ProcControls, field, place};
use x86::{Directions, Gpa, msr};

use super::round_trip_tests::{Rig, features, good};
use crate::features::Features;

const ASSIST: u64 = 0x1_e000;
const PAGE: u64 = 0x1_9000;
const BITMAP: u64 = 0x1_4000;

fn write(r: &Rig, offset: u64, bytes: &[u8]) {
    r.m.write(Gpa(PAGE + offset), bytes).unwrap();
}

fn with(v: &Vmcs12) -> Rig {
    with_on(features(), v)
}

fn with_on(f: Features, v: &Vmcs12) -> Rig {
    let mut r = Rig::on(f, &good(), 0xd01);
    let assist = Some(Gpa(ASSIST));
    let by = Enlightenment { enabled: true, shown: true, direct_flush: true, assist };
    // Outside the loop, as the vCPU says it.
    r.v.complete(&mut r.g);
    r.v.unload(Onward::ToGuest);
    r.v.enlighten(by);
    r.v.load(0);
    write(&r, 0, &enlightened::VERSION.to_le_bytes());
    for line in &READ_LINES {
        let encoding = u64::from(line.field.encoding);
        let (offset, bytes) = enlightened::find(encoding).unwrap();
        let value = v.read(place::find(encoding).unwrap()).to_le_bytes();
        write(&r, offset.into(), &value[..bytes]);
    }
    r.m.write(Gpa(ASSIST + 40), &[1]).unwrap();
    r.m.write(Gpa(ASSIST + 48), &PAGE.to_le_bytes()).unwrap();
    r
}

fn first(r: &mut Rig, reason: ExitReason) {
    // The VMCS that was current is given up, with all of L1's memory.
    r.m.whole.set(true);
    assert_eq!(r.go(reason), Executed::Entered);
    r.m.whole.set(false);
}

fn leave(r: &mut Rig) {
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left, "inside the loop");
}

/// The VMM takes the state out and puts it back.
fn travel(r: &mut Rig) {
    r.v.complete(&mut r.g);
    r.v.unload(Onward::ToGuest);
    let mut bytes = std::vec![0; r.v.state_size()];
    r.v.save_state(&r.g, &mut bytes, &r.m).unwrap();
    r.m.whole.set(true);
    r.restore(&bytes, false);
    r.v.settle_state(&r.m);
    r.m.whole.set(false);
    r.v.load(0);
}

/// User space sets the VP assist page while L2 runs: L1's next entry is by the page.
#[test]
fn an_assist_page_that_comes_while_l2_runs_counts_at_the_next_entry() {
    let mut r = Rig::on(features(), &good(), 0xd01);
    assert_eq!(r.go(ExitReason::Vmlaunch), Executed::Entered);
    leave(&mut r);
    assert!(r.v.nested.as_ref().unwrap().is_served());
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    r.enter(ExitReason::ExternalInterrupt, |_| {});
    r.leave_loop();
    let assist = Some(Gpa(ASSIST));
    r.v.enlighten(Enlightenment { enabled: true, shown: true, direct_flush: true, assist });
    r.come_to(0);
    leave(&mut r);
    let n = r.v.nested.as_ref().unwrap();
    assert!(n.machine.asks_assist_page() && !n.is_served());
}

/// What of an MSR L2 has without an exit.
fn free(r: &Rig, index: u32) -> Directions {
    !r.v.vmcs.msr_map.intercepted(index)
}

#[test]
fn an_msr_bitmap_that_is_clean_is_not_read_again() {
    let mut v = good();
    let primary = v.primary() | ProcControls::MSR_BITMAPS;
    set!(v, PROC_CONTROLS = primary.bits(), MSR_BITMAP = BITMAP);
    let mut r = with(&v);
    first(&mut r, ExitReason::Vmlaunch);
    assert_eq!(free(&r, msr::GS_BASE), Directions::all());
    leave(&mut r);
    let gs = BITMAP + 1024 + u64::from(msr::GS_BASE & 0x1fff) / 8;
    // L1 has not asked for it: it counts at once.
    r.m.write(Gpa(gs), &[2]).unwrap();
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(free(&r, msr::GS_BASE), Directions::WRITES);
    leave(&mut r);
    write(&r, at::CONTROL as u64, &[2]);
    r.m.write(Gpa(gs), &[0]).unwrap();
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(free(&r, msr::GS_BASE), Directions::WRITES, "clean");
    leave(&mut r);
    write(&r, at::CLEAN as u64, &0xfffd_u32.to_le_bytes());
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(free(&r, msr::GS_BASE), Directions::all(), "not clean");
    leave(&mut r);
    r.m.write(Gpa(gs), &[2]).unwrap();
    first(&mut r, ExitReason::Vmlaunch);
    assert_eq!(free(&r, msr::GS_BASE), Directions::WRITES, "a launch takes nothing for clean");
}

/// L1 begins to use a bitmap, then says that it tells of changes, then changes it without telling.
#[test]
fn a_bitmap_counts_from_the_entry_that_brings_it() {
    let mut v = good();
    set!(v, MSR_BITMAP = BITMAP);
    let mut r = with(&v);
    first(&mut r, ExitReason::Vmlaunch);
    assert_eq!(free(&r, msr::GS_BASE), Directions::empty());
    leave(&mut r);
    write(&r, at::CONTROL as u64, &[1]);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    leave(&mut r);
    travel(&mut r);
    let primary = (v.primary() | ProcControls::MSR_BITMAPS).bits();
    let offset = enlightened::find(field::PROC_CONTROLS.encoding().into()).unwrap().0;
    write(&r, offset.into(), &primary.to_le_bytes());
    write(&r, at::CLEAN as u64, &0xffef_u32.to_le_bytes());
    let fs = BITMAP + 1024 + u64::from(msr::FS_BASE & 0x1fff) / 8;
    r.m.write(Gpa(fs), &[1]).unwrap();
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(free(&r, msr::FS_BASE), Directions::WRITES);
    assert_eq!(free(&r, msr::GS_BASE), Directions::all());
    leave(&mut r);
    write(&r, at::CONTROL as u64, &[3]);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(free(&r, msr::GS_BASE), Directions::all());
    leave(&mut r);
    r.m.write(Gpa(fs), &[3]).unwrap();
    write(&r, at::CLEAN as u64, &0xffff_u32.to_le_bytes());
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(free(&r, msr::FS_BASE), Directions::WRITES);
    assert_eq!(free(&r, msr::GS_BASE), Directions::all());
}

/// What L1 says of its map is L1's word: what L0 takes back meanwhile is gone, and what it gives is there.
#[test]
fn a_clean_bitmap_gives_nothing_that_l0_does_not() {
    let mut v = good();
    let primary = v.primary() | ProcControls::MSR_BITMAPS;
    set!(v, PROC_CONTROLS = primary.bits(), MSR_BITMAP = BITMAP);
    let mut r = with(&v);
    write(&r, at::CONTROL as u64, &[2]);
    first(&mut r, ExitReason::Vmlaunch);
    assert_eq!(free(&r, msr::GS_BASE), Directions::all());
    leave(&mut r);
    for exits in [Directions::all(), Directions::WRITES, Directions::READS, Directions::empty()] {
        r.v.vmcs.msr_map.intercept(msr::GS_BASE, exits);
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        assert_eq!(free(&r, msr::GS_BASE), !exits);
        r.v.close_msrs_of_l2();
        assert_eq!(free(&r, msr::GS_BASE), Directions::empty(), "until the next entry");
        leave(&mut r);
    }
}

/// A map that is no memory is not kept: once it is, it counts.
#[test]
fn a_bitmap_that_is_no_memory_is_looked_for_again() {
    let mut v = good();
    let primary = v.primary() | ProcControls::MSR_BITMAPS;
    set!(v, PROC_CONTROLS = primary.bits(), MSR_BITMAP = BITMAP);
    let mut r = with(&v);
    write(&r, at::CONTROL as u64, &[2]);
    r.m.hole.set(BITMAP);
    first(&mut r, ExitReason::Vmlaunch);
    assert_eq!(free(&r, msr::GS_BASE), Directions::empty());
    leave(&mut r);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Outside);
    r.m.hole.set(0);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(free(&r, msr::GS_BASE), Directions::all());
}

/// A VP assist page that cannot be had in the loop, as after a restore, is asked outside, and what is clean stays so.
#[test]
fn an_assist_page_that_is_not_mapped_costs_no_clean_field() {
    let mut r = with(&good());
    first(&mut r, ExitReason::Vmlaunch);
    leave(&mut r);
    let rip = enlightened::find(field::HOST_RIP.encoding().into()).unwrap().0;
    write(&r, rip.into(), &(1u64 << 60).to_le_bytes());
    r.m.hole.set(ASSIST);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Outside);
    r.m.hole.set(0);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered, "a host state that is not looked at");
}

/// What Linux's KVM reads at a CPUID of its guest's, by VMREAD where it has no page.
const READ: [u32; 6] = [
    field::EXIT_REASON.encoding(),
    field::IDT_VECTORING.encoding(),
    field::EXIT_INTERRUPTION.encoding(),
    field::GUEST_INTERRUPTIBILITY.encoding(),
    field::INSTRUCTION_LENGTH.encoding(),
    field::GUEST_RIP.encoding(),
];

/// Ten round trips of CPUID whose L1 reads those and moves RIP: L1's exits, and the VMREADs, VMWRITEs and VMPTRLDs of L0.
fn ten_trips(r: &mut Rig, accesses: impl Fn(&mut Rig) -> u64) -> [u64; 4] {
    for trips in [3, 10] {
        let before = r.v.cpu().counts();
        let mut exits = 0;
        for _ in 0..trips {
            leave(r);
            exits += accesses(r) + 1;
            assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        }
        let ran = r.v.cpu().counts().since(&before);
        if trips == 10 {
            return [exits, ran.of(Op::Vmread), ran.of(Op::Vmwrite), ran.of(Op::Vmptrld)];
        }
    }
    [0; 4]
}

/// The budget of a round trip by a page, beside that of an L1 whose VMREAD and VMWRITE exit, on a CPU without shadow VMCSs.
#[test]
fn a_page_spares_l1_an_exit_for_each_field() {
    let without = || Features { shadow_vmcs: false, ..features() };
    let mut r = with_on(without(), &good());
    first(&mut r, ExitReason::Vmlaunch);
    let rip = enlightened::find(field::GUEST_RIP.encoding().into()).unwrap().0;
    let by_page = ten_trips(&mut r, |r| {
        write(r, rip.into(), &0x4002u64.to_le_bytes());
        write(r, at::CLEAN as u64, &0xffff_u32.to_le_bytes());
        0
    });
    drop(r);
    let mut r = Rig::on(without(), &good(), 0xd01);
    first(&mut r, ExitReason::Vmlaunch);
    let by_exits = ten_trips(&mut r, |r| {
        let write = (ExitReason::Vmwrite, field::GUEST_RIP.encoding());
        let all = READ.map(|encoding| (ExitReason::Vmread, encoding));
        for (reason, encoding) in all.into_iter().chain([write]) {
            (r.g.0[RAX], r.g.0[RCX]) = (0x4002, encoding.into());
            r.enter(reason, |v| v.set(field::INSTRUCTION_INFO, 1 << 10 | (RCX as u32) << 28));
            assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Retired);
        }
        READ.len() as u64 + 1
    });
    // VMRESUME alone, against seven more. All of L2's state is read at each exit for it.
    assert_eq!((by_page, by_exits), ([10, 530, 370, 20], [80, 480, 370, 20]));
}

/// An exit in the loop writes the page, and one whose page cannot be had there changes nothing.
#[test]
fn an_exit_waits_for_its_page() {
    let mut r = with(&good());
    first(&mut r, ExitReason::Vmlaunch);
    leave(&mut r);
    let reason = enlightened::find(field::EXIT_REASON.encoding().into()).unwrap().0;
    let mut told = [0; 4];
    r.m.read(Gpa(PAGE + u64::from(reason)), &mut told).unwrap();
    assert_eq!(told, 10u32.to_le_bytes());
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    let memory = core::mem::take(&mut *r.m.bytes.borrow_mut());
    r.enter(ExitReason::Cpuid, |_| {});
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Outside);
    assert_eq!(r.v.level(), backend::Level::L2);
    *r.m.bytes.borrow_mut() = memory;
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
}
