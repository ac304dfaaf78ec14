//! The clock page and the TSC that it rests on: what a guest and its VMM write to the TSC, and what vCPUs have that come later.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use ::vm::{
    VmRef,
    time::{Round, ScaledTsc},
    vcpu_shared::VcpuShared,
};
use backend::{RCX, RDX};
use gannet_vcpu::{By, RunInput};
use host::page::Page;
use irqchip::lapic::CpuRole;
use mmu::Region;
use rig::{Machine, TestVcpu, UNKNOWN, add_vcpu, exit, unknown, vm};
use x86::vmcb::ExitCode;

const TSC: u32 = 0x10;
const TSC_ADJUST: u32 = 0x3b;
const SYSTEM_TIME: u32 = 0x4b56_4d01;
const PAGE: u64 = 0x6000;

fn word(page: &Page, offset: usize) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|n| page.bytes()[offset + n].load(Relaxed)))
}

/// What the guest takes the time for, in nanoseconds.
fn time(v: &mut TestVcpu, page: &Page) -> u64 {
    let ticks = v.read_msr(TSC, By::Vmm).unwrap().wrapping_sub(word(page, 8));
    let (mul, shift) = (word(page, 24) as u32, page.bytes()[28].load(Relaxed) as i8);
    let ticks = if shift < 0 { ticks >> -shift } else { ticks << shift };
    word(page, 16).wrapping_add(((u128::from(ticks) * u128::from(mul)) >> 32) as u64)
}

/// A vCPU with TSC_ADJUST and a clock page.
fn with_clock() -> (TestVcpu, VmRef, &'static Page) {
    let machine = Machine::default();
    let vm = vm(&machine);
    let page: &'static Page = Box::leak(Box::new(Page::zeroed().unwrap()));
    let region = Region { slot: 0, flags: 0, gpa: PAGE, size: 4096, hva: page.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    let mut v = add_vcpu(&machine, &vm, 0);
    let mut entries = rig::offered(true).cpuid.entries().to_vec();
    entries.iter_mut().filter(|e| e.leaf == 7).for_each(|e| e.ebx |= 1 << 1);
    v.set_cpuid(&entries).unwrap();
    v.write_msr(SYSTEM_TIME, PAGE | 1, By::Vmm).unwrap();
    (v, vm, page)
}

#[test]
fn a_guest_that_moves_its_tsc_leaves_the_time() {
    for (index, value) in [(TSC_ADJUST, 1u64 << 40), (TSC, 1 << 41), (TSC, 5), (TSC_ADJUST, 0)] {
        let (mut v, _vm, page) = with_clock();
        v.backend().cpu().inner().then(unknown);
        assert_eq!(v.run(&RunInput::default()), UNKNOWN);
        let (before, stamp) = (time(&mut v, page), word(page, 8));
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            (gprs.0[RCX], gprs.0[RDX]) = (index.into(), value >> 32);
            vmcb.save.rax = value & 0xffff_ffff;
            exit(ExitCode::Msr)(vmcb, gprs);
            vmcb.control.exit_info_1 = 1;
        });
        // The guest looks at the page right behind its write.
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            let moved = index != TSC_ADJUST || value != 0;
            assert_eq!(word(page, 8) != stamp, moved, "{index:#x} {value:#x}");
            unknown(vmcb, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UNKNOWN);
        let passed = time(&mut v, page).wrapping_sub(before);
        assert!(passed < 1_000_000_000, "{index:#x} {value:#x}: {passed}");
    }
}

#[test]
fn a_vcpu_that_comes_later_has_the_offset_that_the_vmm_has_set() {
    let machine = Machine::default();
    let vm = vm(&machine);
    let mut first = add_vcpu(&machine, &vm, 0);
    first.set_tsc_offset(0x1234_5678);
    let second = add_vcpu(&machine, &vm, 1);
    assert_eq!(second.tsc_offset(), first.tsc_offset());
}

/// Linux reads the clock by the page of one vCPU everywhere if that says so.
#[test]
fn a_clock_is_told_as_stable_while_all_vcpus_have_one_tsc() {
    const TSC_STABLE: u8 = 1;
    let (mut first, vm, page) = with_clock();
    let mut second = add_vcpu(&Machine::default(), &vm, 1);
    let is_stable = |v: &mut TestVcpu| {
        v.backend().cpu().inner().then(unknown);
        assert_eq!(v.run(&RunInput::default()), UNKNOWN);
        let told = page.bytes()[29].load(Relaxed) & TSC_STABLE != 0;
        assert_eq!(vm.clock_data().flags != 0, told, "KVM_GET_CLOCK says the same");
        told
    };
    assert!(is_stable(&mut first));
    second.set_tsc_offset(first.tsc_offset().wrapping_add(1));
    assert!(!is_stable(&mut first), "told to others than the one that was set");
    first.set_tsc_offset(second.tsc_offset());
    assert!(is_stable(&mut first));
    second.write_msr(TSC, 1 << 50, By::Vmm).unwrap();
    assert!(!is_stable(&mut first));
    first.write_msr(TSC, 1 << 50, By::Vmm).unwrap();
    assert!(is_stable(&mut first));
    // A guest that moves its own TSC is believed to know, as on stock KVM.
    first.write_msr(TSC_ADJUST, 5, By::Guest).unwrap();
    assert!(is_stable(&mut first));
}

#[test]
fn another_clock_of_the_hosts_is_told_while_a_guest_runs() {
    let (mut v, _vm, page) = with_clock();
    v.backend().cpu().inner().then(unknown);
    assert_eq!(v.run(&RunInput::default()), UNKNOWN);
    let version = word(page, 0) as u32;
    v.backend().cpu().inner().then(|vmcb, _| {
        host::std_port::test::clock().sleep(0, 0);
        vmcb.control.exit_code = ExitCode::Intr.0;
    });
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        assert_ne!(word(page, 0) as u32, version);
        unknown(vmcb, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UNKNOWN);
}

/// As KVM_CREATE_VCPU does it: its TSC first.
#[test]
fn a_vcpu_of_another_frequency_ends_that() {
    let vm = vm(&Machine::default());
    let add = |id, khz| {
        vm.new_vcpu_tsc_offset(ScaledTsc { now: 5, lost: 0 }, khz, &mut Round::default());
        vm.add_vcpu(VcpuShared::new(id, id, CpuRole::Application, true).unwrap()).unwrap();
        vm.clock_data().flags != 0
    };
    assert!(add(0, 1_000_000));
    assert!(!add(1, 2_000_000));
    assert!(!add(2, 2_000_000));
}
