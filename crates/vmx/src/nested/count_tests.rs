//! How many VMREADs and VMWRITEs a round trip takes.

use backend::{Executed, Nested as _};
use nested_vmx::set;
use x86::vmcs::{ExitReason, field};

use super::round_trip_tests::{Rig, features, good};
use crate::features::Features;

/// The honest before: what is not known to be there is written.
#[test]
fn tracking_saves_sixty_writes_a_round_trip() {
    let writes = |without_tracking| {
        let mut r = Rig::new(&good(), 0xd01);
        r.v.nested.as_mut().unwrap().without_tracking = without_tracking;
        r.settle();
        r.round(|_| {});
        let before = r.v.cpu().counts();
        r.round(|_| {});
        r.v.cpu().counts().since(&before).of(cpu::Op::Vmwrite)
    };
    let (without, with) = (writes(true), writes(false));
    assert!(with + 60 <= without, "{without} without, {with} with");
}

/// An L1 as KVM is: null selectors but for CS and SS, and of the fields that it writes without an exit RIP alone.
#[test]
fn a_round_trip_takes_at_most_forty_vmreads_and_vmwrites() {
    let cpuid = round_trip_takes_at_most_forty(ExitReason::Cpuid, 0);
    // Out of one byte, to port 0x60: its qualification is told, and no information, which INS and OUTS have.
    let out = round_trip_takes_at_most_forty(ExitReason::Io, 0x60 << 16);
    assert_eq!(out, cpuid + 1);
}

/// VMREAD of one field of L2's that no shadow VMCS has, and VMWRITE of the same value: vmcs02 is asked for the one field, once.
#[test]
fn a_field_that_l1_asks_for_alone_is_read_alone() {
    let mut r = Rig::new(&good(), 0xd01);
    r.settle();
    r.enter(ExitReason::Cpuid, |v| v.set(field::GUEST_ES_BASE, 0x7000));
    assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
    // The field is named by RCX, and the value is in RDX: bits 31:28 and 6:3.
    let mut access = |reason, encoding: u32, value: u64| {
        (r.g.0[1], r.g.0[2]) = (encoding.into(), value);
        let before = r.v.cpu().counts();
        r.enter(reason, |v| v.set(field::INSTRUCTION_INFO, 1 << 10 | 2 << 3 | 1 << 28));
        assert_eq!(r.v.execute(&mut r.g, 0, &r.m), Executed::Retired);
        let counts = r.v.cpu().counts().since(&before);
        (r.g.0[2], counts.of(cpu::Op::Vmread), counts.of(cpu::Op::Vmptrld))
    };
    let es = field::GUEST_ES_BASE.encoding();
    let (value, alone, loads) = access(ExitReason::Vmread, es, 0);
    assert!(value == 0x7000 && alone <= 10 && loads == 2, "{alone} VMREADs, {loads} VMPTRLDs");
    let (_, known, loads) = access(ExitReason::Vmwrite, es, 0x7000);
    assert!(known < alone && loads == 0, "{known} VMREADs, {loads} VMPTRLDs");
    // Who asks for a second one gets all.
    let (_, all, loads) = access(ExitReason::Vmread, field::GUEST_DS_BASE.encoding(), 0);
    assert!(all > 30 && loads == 2, "{all} VMREADs, {loads} VMPTRLDs");
    let (_, none, loads) = access(ExitReason::Vmread, field::GUEST_FS_BASE.encoding(), 0);
    assert!(none <= known && loads == 0, "{none} VMREADs, {loads} VMPTRLDs");
}

/// How many there are.
fn round_trip_takes_at_most_forty(reason: ExitReason, qualification: u64) -> u64 {
    let count = |rounds| {
        let mut vmcs12 = good();
        set!(vmcs12, HOST_DS_SELECTOR = 0, HOST_ES_SELECTOR = 0);
        set!(vmcs12, HOST_FS_SELECTOR = 0, HOST_GS_SELECTOR = 0);
        let mut r = Rig::on(Features { table_exits: true, ..features() }, &vmcs12, 0xd01);
        r.settle();
        let mut round = |rip| {
            let before = r.v.cpu().counts();
            r.enter(reason, move |v| {
                v.set(field::GUEST_RIP, rip);
                v.set(field::EXIT_QUALIFICATION, qualification);
            });
            assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
            let after = r.v.cpu().counts();
            let exit = after.since(&before);
            r.l1_vmwrite(field::GUEST_RIP.encoding(), rip + 2);
            let before = r.v.cpu().counts();
            assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
            let entry = r.v.cpu().counts().since(&before);
            let of = |op| exit.of(op) + entry.of(op);
            (of(cpu::Op::Vmread) + of(cpu::Op::Vmwrite), of(cpu::Op::Vmptrld))
        };
        (0..rounds).map(|n| round(0x4000 + n * 0x10)).last().unwrap()
    };
    // In the long run; at first each line is looked at.
    let (first, last) = (count(20), count(400));
    assert!(first.0 > 40 && last.0 <= 40 && last.1 <= 4, "{reason:?}: {first:?}, {last:?}");
    last.0
}
