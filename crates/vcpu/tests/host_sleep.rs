//! The host sleeps, and its TSC begins anew: a guest's TSC goes on, its deadlines come as they would have, and its clock
//! has run meanwhile.
//!
//! A tick of the TSC is a nanosecond here.

mod rig;

use backend::Backend;
use cpu::{Counting, Model, ModelVmcs, Op};
use gannet_vcpu::{By, RunInput, UserExit, Vcpu};
use host::page::Pages;
use host::std_port::test::clock;
use mmu::Region;
use rig::{
    Machine, TestVcpu, add_vcpu, unknown, vm,
    vmx::{VmxVcpu, exit, features_with_timer, play, step, vcpu_of},
};
use vm::vm::Format;
use x86::{
    Gpa,
    vmcs::{ExitReason, field},
};

const TSC: u32 = 0x10;
const DEADLINE: u32 = 0x6e0;
const SYSTEM_TIME: u32 = 0x4b56_4d01;

/// What the guests' CPUs have by their own reckoning.
fn guest_tsc<B: Backend>(v: &mut Vcpu<B>) -> u64 {
    v.read_msr(TSC, By::Vmm).unwrap()
}

/// The CPU's TSC is `left` behind the sleep, in which the vCPU has no part.
fn wake(cpu: &mut Counting<Model>, left: u64) {
    cpu.inner().tsc = left;
}

#[test]
fn a_guests_tsc_goes_on_and_those_of_all_vcpus_are_one() {
    let mut machine = Machine { tsc: 9_000_000, ..Machine::default() };
    let vm = vm(&machine);
    let mut all: Vec<TestVcpu> = (0..2).map(|id| add_vcpu(&machine, &vm, id)).collect();
    wake(all[0].backend().cpu(), 9_500_000);
    let before = guest_tsc(&mut all[0]);
    clock().sleep(1_000_000_000, 9_500_000 - 100);
    machine.tsc = 100;
    all.push(add_vcpu(&machine, &vm, 2));
    for v in &mut all {
        wake(v.backend().cpu(), 200);
        v.follow_host_clock();
    }
    let now: Vec<u64> = all.iter_mut().map(|v| guest_tsc(v)).collect();
    assert_eq!(now, [before + 100; 3]);
    // Once: the next command finds nothing new.
    all[0].follow_host_clock();
    assert_eq!(guest_tsc(&mut all[0]), before + 101);
}

#[test]
fn one_that_looks_after_each_sleep_comes_to_the_same_as_one_that_looks_after_two() {
    let mut machine = Machine { tsc: 9_000_000, ..Machine::default() };
    machine.features.tsc_ratio = true;
    let vm = vm(&machine);
    let mut all: Vec<TestVcpu> = (0..2).map(|id| add_vcpu(&machine, &vm, id)).collect();
    for v in &mut all {
        v.set_tsc_khz(700_000, true).unwrap();
        v.set_tsc_offset(5);
    }
    clock().sleep(1, 1_000_001);
    all[0].follow_host_clock();
    clock().sleep(1, 2_000_003);
    all[0].follow_host_clock();
    all[1].follow_host_clock();
    assert_eq!(all[0].tsc_offset(), all[1].tsc_offset());
    assert_eq!(all[0].tsc_offset(), 5 + 3_000_004 * 7 / 10);
}

/// The guest's clock by its page.
fn guest_clock(vm: &vm::vm::VmRef, tsc: u64) -> u64 {
    let mut page = [0; 32];
    vm.memory().read(Gpa(0x5000), &mut page).unwrap();
    let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
    let factor = u64::from(u32::from_le_bytes(page[24..28].try_into().unwrap()));
    let shift = page[28] as i8;
    let ticks = u128::from(tsc.wrapping_sub(word(8)));
    let ticks = if shift < 0 { ticks >> -shift } else { ticks << shift };
    word(16) + ((ticks * u128::from(factor)) >> 32) as u64
}

#[test]
fn the_clock_of_a_guest_runs_while_the_host_sleeps() {
    let machine = Machine { tsc: clock().now(), ..Machine::default() };
    let vm = vm(&machine);
    let memory = Box::leak(Box::new(Pages::zeroed(8).unwrap()));
    let region = Region { slot: 0, flags: 0, gpa: 0, size: 8 << 12, hva: memory.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    let mut v = add_vcpu(&machine, &vm, 0);
    v.write_msr(SYSTEM_TIME, 0x5001, By::Vmm).unwrap();
    let run = |v: &mut TestVcpu| {
        v.follow_host_clock();
        // No shutdown, which would forget where the clock is.
        v.backend().cpu().inner().then(unknown);
        assert!(matches!(v.run(&RunInput::default()), UserExit::InternalError { .. }));
    };
    run(&mut v);
    clock().advance(7_000);
    wake(v.backend().cpu(), clock().now());
    let before = guest_clock(&vm, guest_tsc(&mut v));
    // Whether the TSC begins anew or stands still.
    for (lost, slept) in [(clock().now() - 50, 60_000), (0, 30_000)] {
        clock().sleep(slept, lost);
        let tsc = v.backend().cpu().inner().tsc - lost;
        wake(v.backend().cpu(), tsc);
        run(&mut v);
        assert_eq!(vm.clock_data().host_tsc, 50);
    }
    let after = guest_clock(&vm, guest_tsc(&mut v));
    assert!((90_000..90_100).contains(&(after - before)), "{}", after - before);
}

/// A local APIC in TSC-deadline mode, whose deadlines the CPU watches.
fn timed() -> VmxVcpu {
    let (mut v, _) = vcpu_of(features_with_timer(), Format::npt(4, 0));
    let mut entries = rig::offered(true).cpuid.entries().to_vec();
    for entry in entries.iter_mut().filter(|entry| entry.leaf == 1) {
        entry.ecx |= 1 << 24;
    }
    v.set_cpuid(&entries).unwrap();
    v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    v.write_msr(0x832, 1 << 18 | 0x40, By::Vmm).unwrap();
    v
}

#[test]
fn a_deadline_is_as_far_away_behind_the_sleep_as_before() {
    let mut v = timed();
    wake(v.backend().cpu(), 50_000_000);
    let deadline = guest_tsc(&mut v) + 64_000;
    v.write_msr(DEADLINE, deadline, By::Vmm).unwrap();
    clock().sleep(1_000_000_000, 50_000_000 - 30);
    wake(v.backend().cpu(), 30);
    v.follow_host_clock();
    let left = |vmcs: &mut ModelVmcs, gprs: &mut backend::Gprs| {
        let ticks = vmcs.get(field::PREEMPTION_TIMER);
        assert!((1990..=2001).contains(&ticks), "{ticks}");
        exit(ExitReason::Wbinvd)(vmcs, gprs);
    };
    play(&mut v, [step(left)]);
}

#[test]
fn a_cpu_that_wakes_without_svm_enters_no_guest() {
    let mut v = rig::vcpu();
    let mut locked = Model::default();
    locked.msrs.insert(x86::msr::VM_CR, x86::msr::vm_cr::SVMDIS);
    let at = host::smp::cpu_id();
    svm::percpu::enable(&mut locked, at).unwrap_err();
    let before = v.backend().cpu().counts();
    for _ in 0..2 {
        let refused = UserExit::FailEntry { reason: u64::MAX, cpu: at as u32 };
        assert_eq!(v.run(&RunInput::default()), refused);
    }
    let counts = v.backend().cpu().counts().since(&before);
    assert_eq!((counts.of(Op::Vmrun), counts.of(Op::Clgi), counts.of(Op::Vmload)), (0, 0, 0));
    // Its firmware was asked again.
    svm::percpu::enable(&mut Model::default(), at).unwrap();
    v.backend().cpu().inner().then(unknown);
    assert!(matches!(v.run(&RunInput::default()), UserExit::InternalError { .. }));
}
