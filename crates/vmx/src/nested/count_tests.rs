//! How many VMREADs and VMWRITEs a round trip takes.

use backend::{ControlRegisters as _, Executed, Nested as _};
use nested_vmx::set;
use x86::Efer;
use x86::vmcs::{ExitReason, Group, Groups, field};

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

/// Nothing that L0's part of vmcs02 is made from gets another value in a round trip: each entry sees that by the one count, and
/// looks at none of the words.
#[test]
fn a_round_trip_changes_no_word_that_vmcs02_is_made_from() {
    let mut r = Rig::new(&good(), 0xd01);
    r.settle();
    r.round(|_| {});
    let seen = |r: &Rig| {
        let n = r.v.nested.as_ref().unwrap();
        let vmcs01 = if r.v.cold.of_l1.runs { &n.other } else { &r.v.vmcs };
        (vmcs01.fields.changes(), n.made.changes.get())
    };
    let before = seen(&r);
    assert_eq!(before.0, before.1);
    for _ in 0..3 {
        r.round(|_| {});
        assert_eq!(seen(&r), before);
    }
    // A word that changes is looked at by the next entry.
    let vmcs01 = if r.v.cold.of_l1.runs { &r.v.nested.as_ref().unwrap().other } else { &r.v.vmcs };
    let word = vmcs01.get(&r.v.cpu, crate::fields::EXCEPTION_BITMAP);
    vmcs01.set(&r.v.cpu, crate::fields::EXCEPTION_BITMAP, word ^ 1 << 5);
    r.round(|_| {});
    r.round(|_| {});
    let after = seen(&r);
    assert!(after.0 > before.0 && after.0 == after.1);
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

/// An L1 as Debian's KVM is: it has L2 share its EFER, which the entry does not load then, and sets the preemption timer before each
/// entry. No group is composed for either; for another EFER of L1's all that an entry loads of such registers is, once.
#[test]
fn what_l2_shares_with_l1_is_composed_where_it_changes() {
    let mut v = good();
    set!(v, PIN_CONTROLS = v.get(field::PIN_CONTROLS) | 1 << 6, PREEMPTION_TIMER = 1000);
    set!(v, EXIT_CONTROLS = v.get(field::EXIT_CONTROLS) | 1 << 2);
    let entry = v.get(field::ENTRY_CONTROLS) & !(1 << 15);
    set!(v, ENTRY_CONTROLS = entry | 1 << 2 | 1 << 14);
    let mut r = Rig::on(Features { preemption_timer: Some(5), ..features() }, &v, 0xd01);
    r.settle();
    let efer = |r: &Rig| r.v.get(crate::fields::GUEST_EFER);
    assert_eq!(efer(&r), 0xd01);
    let leave = |r: &mut Rig, timer: u64| {
        r.enter(ExitReason::Cpuid, |_| {});
        assert_eq!(r.v.reflect(&mut r.g, &r.m), Executed::Left);
        r.l1_vmwrite(field::PREEMPTION_TIMER.encoding(), timer);
        r.v.nested.as_ref().unwrap().machine.dirty()
    };
    for timer in [900, 800] {
        assert_eq!(leave(&mut r, timer), Groups::NONE);
        assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
        let n = r.v.nested.as_ref().unwrap();
        assert_eq!(u64::from(n.machine.vmcs12().get(field::PREEMPTION_TIMER)), timer);
    }
    // L1 writes its own, and L2 has that at once; then L2 does.
    assert_eq!(leave(&mut r, 700), Groups::NONE);
    r.v.set_efer(Efer::from_bits_retain(0x500));
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(efer(&r), 0x500);
    // The exit has loaded L1's, which it has told nobody.
    assert_eq!(leave(&mut r, 600), Groups::NONE);
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(efer(&r), 0xd01);
    r.v.set_efer(Efer::from_bits_retain(0x500));
    assert_eq!(leave(&mut r, 500), Groups::of(Group::Msrs));
    assert_eq!(r.go(ExitReason::Vmresume), Executed::Entered);
    assert_eq!(efer(&r), 0xd01);
}

/// VMREAD and VMWRITE with a register that may not succeed: none of them is taken for one that does.
#[test]
fn an_access_that_may_fail_is_no_quick_one() {
    let es = u64::from(field::GUEST_ES_BASE.encoding());
    let of = |rig: &mut Rig, reason, field: u64, rights: u32, information: u32| {
        (rig.g.0[1], rig.g.0[2]) = (field, 0x1234);
        rig.enter(reason, move |v| {
            v.set(field::GUEST_SS_RIGHTS, rights);
            v.set(field::INSTRUCTION_INFO, information);
        });
        rig.v.execute(&mut rig.g, 0, &rig.m)
    };
    let plain = 1u32 << 10 | 2 << 3 | 1 << 28;
    let fault = |exception| Executed::Fault(exception);
    for reason in [ExitReason::Vmread, ExitReason::Vmwrite] {
        let mut r = Rig::new(&good(), 0xd01);
        // A program of L1's.
        assert_eq!(of(&mut r, reason, es, 0xc0f3, plain), fault(x86::Exception::gp(0)));
        assert_eq!(r.g.0[2], 0x1234);
        // No field has bit 32 of its encoding set, and 0x6ffe is none: VMfailValid, and the register stays.
        for none in [es | 1 << 32, 0x6ffe] {
            assert_eq!(of(&mut r, reason, none, 0xc093, plain), Executed::Retired);
            assert_eq!(
                (r.v.get(crate::fields::GUEST_RFLAGS) & 0x41, r.g.0[2]),
                (0x40, 0x1234),
                "{none:x}"
            );
        }
        assert_eq!(of(&mut r, reason, es, 0xc093, plain), Executed::Retired);
        assert_eq!(r.v.get(crate::fields::GUEST_RFLAGS) & 0x41, 0);
        // The handler of an SMI is outside of VMX operation.
        r.leave_loop();
        assert!(backend::Nested::enter_smm(&mut r.v, &mut r.g, x86::Gpa(0), &r.m).is_ok());
        r.come_to(0);
        assert_eq!(of(&mut r, reason, es, 0xc093, plain), fault(x86::Exception::ud()));
    }
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
