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
