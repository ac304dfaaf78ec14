//! What an observed vCPU tells, in which order, and what observation costs.

mod rig;

use backend::{Gprs, RAX, RCX};
use cpu::Op;
use gannet_vcpu::{RunInput, UserExit};
use host::std_port::test;
use rig::{exit, shutdown, vcpu};
use stats::{BUCKETS, Reason};
use x86::vmcb::{ExitCode, Vmcb};

const ENTRY: u32 = 1 << 0;
const EXIT: u32 = 1 << 1;
const PIO: u32 = 1 << 2;
const MSR: u32 = 1 << 4;
const CPUID: u32 = 1 << 5;
const HYPERCALL: u32 = 1 << 6;
const CYCLES: u32 = 1 << 9;

fn run(watch: u32, steps: Vec<fn(&mut Vmcb, &mut Gprs)>) -> Vec<String> {
    let mut v = vcpu();
    for step in steps {
        v.backend().cpu().inner().then(step);
    }
    v.backend().cpu().inner().then(shutdown);
    test::observe(watch);
    let left = v.run(&RunInput::default());
    test::observe(0);
    assert_eq!(left, UserExit::Shutdown);
    test::take_traced()
}

fn kinds(traced: &[String]) -> Vec<&str> {
    traced.iter().map(|t| t.split(' ').next().unwrap()).collect()
}

fn cpuid(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    gprs.0[RAX] = 0;
    gprs.0[RCX] = 0;
    exit(ExitCode::Cpuid)(vmcb, gprs);
}

fn read_an_unknown_msr(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    gprs.0[RCX] = 0xdead_beef;
    exit(ExitCode::Msr)(vmcb, gprs);
}

fn hypercall(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    gprs.0[RAX] = 77;
    vmcb.save.rax = 77;
    exit(ExitCode::Vmmcall)(vmcb, gprs);
}

#[test]
fn each_exit_lies_between_two_entries() {
    let told = run(ENTRY | EXIT, vec![cpuid, cpuid]);
    assert_eq!(kinds(&told), ["entry", "exit", "entry", "exit", "entry", "exit"]);
    assert!(told[1].starts_with("exit 0 0x72 "), "{}", told[1]);
    assert!(told[5].starts_with("exit 0 0x7f "), "{}", told[5]);
}

#[test]
fn nothing_is_told_when_nobody_listens() {
    assert!(run(0, vec![cpuid, cpuid]).is_empty());
}

#[test]
fn what_an_exit_asked_for_is_told_after_it() {
    let told =
        run(EXIT | CPUID | MSR | HYPERCALL | PIO, vec![cpuid, read_an_unknown_msr, hypercall]);
    assert_eq!(kinds(&told), ["exit", "cpuid", "exit", "msr", "exit", "hypercall", "exit"]);
    assert!(told[1].contains("68747541") && told[1].ends_with(" 1"), "{}", told[1]);
    assert_eq!(told[3], "msr 0 0xdeadbeef 0x0 1");
    assert!(told[5].starts_with("hypercall [4d"), "{}", told[5]);
}

#[test]
fn cycles_from_exit_to_entry_are_counted_by_reason() {
    let mut v = vcpu();
    for _ in 0..4 {
        v.backend().cpu().inner().then(exit(ExitCode::Cpuid));
    }
    v.backend().cpu().inner().then(shutdown);
    test::observe(CYCLES);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    test::observe(0);
    let stats = &v.shared().stats;
    let counted =
        |reason| -> u64 { (0..BUCKETS).map(|bucket| stats.cycles_bucket(reason, bucket)).sum() };
    assert_eq!(counted(Reason::Cpuid), 4);
    // Not entered again yet.
    assert_eq!(counted(Reason::Shutdown), 0);
    assert!(test::take_traced().is_empty());
}

#[test]
fn a_time_that_spans_a_switch_is_not_counted() {
    let mut v = vcpu();
    v.backend().cpu().inner().then(shutdown);
    test::observe(CYCLES);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    // Off and on again: the next turn.
    test::observe(CYCLES | 2 << 16);
    v.backend().cpu().inner().then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    test::observe(0);
    let stats = &v.shared().stats;
    assert_eq!((0..BUCKETS).map(|b| stats.cycles_bucket(Reason::Shutdown, b)).sum::<u64>(), 0);
}

#[test]
fn a_tracepoint_costs_one_way_to_the_kernel_and_back() {
    let cost = |watch| {
        let mut v = vcpu();
        for _ in 0..10 {
            v.backend().cpu().inner().then(exit(ExitCode::Cpuid));
        }
        v.backend().cpu().inner().then(shutdown);
        test::observe(watch);
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        test::observe(0);
        let _ = test::take_traced();
        v.backend().cpu().counts().since(&before)
    };
    let (plain, exits, both) = (cost(0), cost(EXIT), cost(EXIT | ENTRY));
    // Eleven exits and eleven entries.
    assert_eq!(exits.of(Op::Vmload) - plain.of(Op::Vmload), 22);
    assert_eq!(exits.of(Op::Vmsave) - plain.of(Op::Vmsave), 11);
    assert_eq!(both.of(Op::Vmload) - plain.of(Op::Vmload), 44);
    assert_eq!(both.of(Op::Wrmsr), plain.of(Op::Wrmsr));
}
