//! The TSC of a guest's guest, where a hypervisor in the guest scales it (TSC_RATIO), on a CPU that can.

mod rig;

use gannet_vcpu::{By, UserExit};
use rig::exit;
use rig::nested::{BLOCK, Hypervisor};
use svm::Features;
use x86::msr::{TSC, TSC_RATIO};
use x86::vmcb::{ExitCode, event};

const ONE: u64 = 1 << 32;
const HALF: u64 = ONE / 2;
/// L1's block adds this to L2's TSC.
const OFFSET: u64 = 0x70_0000;

fn hypervisor() -> Hypervisor {
    let machine = Hypervisor::on(Features { tsc_ratio: true, ..rig::features() }, false);
    machine.put(BLOCK + 0x08, 1 << (18 + 32));
    machine.put(BLOCK + 0x50, OFFSET);
    machine
}

/// What the CPU scaled by, of each entry.
fn ratios(machine: &mut Hypervisor) -> Vec<u64> {
    core::mem::take(&mut machine.vcpu.backend().cpu().inner().ratios)
}

/// What is added to the host's TSC at the next entry, less `of_l1`.
fn enters_with(machine: &mut Hypervisor, of_l1: fn(u64) -> u64, code: ExitCode) {
    let now = machine.vcpu.backend().cpu().inner().tsc;
    let l1 = machine.vcpu.read_msr(TSC, By::Vmm).unwrap();
    let offset = l1.wrapping_sub(now + 1);
    machine.then(move |vmcb, gprs| {
        assert_eq!(vmcb.control.tsc_offset, of_l1(offset));
        exit(code)(vmcb, gprs);
    });
}

#[test]
fn l2_runs_by_l1s_ratio_and_l1_by_its_own() {
    let mut machine = hypervisor();
    machine.vcpu.write_msr(TSC, 0x1000_0000, By::Vmm).unwrap();
    machine.writes_msr(TSC_RATIO, 2 * ONE);
    machine.reads_msr(TSC_RATIO, 2 * ONE);
    machine.vmrun();
    enters_with(&mut machine, |l1| (2 * l1).wrapping_add(OFFSET), ExitCode::Cpuid);
    enters_with(&mut machine, |l1| l1, ExitCode::Hlt);
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(ratios(&mut machine), [ONE, ONE, ONE, ONE, 2 * ONE, ONE]);
}

/// An offset is negative as often as not.
#[test]
fn a_negative_offset_is_scaled_as_such() {
    let mut machine = hypervisor();
    machine.vcpu.backend().cpu().inner().tsc = 0x5000_0000;
    machine.vcpu.write_msr(TSC, 0, By::Vmm).unwrap();
    machine.writes_msr(TSC_RATIO, HALF);
    machine.vmrun();
    let half = |l1: u64| ((l1 as i64 / 2) as u64).wrapping_add(OFFSET);
    enters_with(&mut machine, half, ExitCode::Hlt);
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// What L2 reads where the MSR exits is what the CPU would give it.
#[test]
fn a_read_that_exits_tells_the_same() {
    let mut machine = hypervisor();
    machine.vcpu.write_msr(TSC, 0x1000_0000, By::Vmm).unwrap();
    machine.writes_msr(TSC_RATIO, HALF);
    machine.vmrun();
    machine.vcpu.backend().cpu().inner().tsc = 0x9000_0001;
    machine.vcpu.backend().cpu().inner().tsc_step = 0;
    let l1 = machine.vcpu.read_msr(TSC, By::Vmm).unwrap();
    let offset = l1.wrapping_sub(0x9000_0001) as i64;
    let below = (0x9000_0001_u64 / 2).wrapping_add((offset / 2) as u64);
    machine.reads_msr(TSC, below.wrapping_add(OFFSET));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    // The VMM's is L1's.
    assert_eq!(machine.vcpu.read_msr(TSC, By::Vmm).unwrap(), l1);
}

/// L1's own TSC is scaled as well, by the VMM's wish.
#[test]
fn ratios_of_both_levels_are_one_for_the_cpu() {
    let mut machine = hypervisor();
    let khz = machine.vcpu.tsc_khz();
    machine.vcpu.set_tsc_khz(3 * khz, true).unwrap();
    machine.writes_msr(TSC_RATIO, HALF);
    machine.vmrun();
    machine.then(exit(ExitCode::Wbinvd));
    // L2 may write it where L1 lets it.
    machine.writes_msr(TSC_RATIO, 0xff_ffff_ffff);
    machine.then(exit(ExitCode::Cpuid));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    let (l1, l2, most) = (3 * ONE, 3 * HALF, 0xff_ffff_ffff);
    assert_eq!(ratios(&mut machine), [l1, l1, l2, l2, most, l1]);
}

/// It is in force again with its feature, as the MSR tells.
#[test]
fn a_ratio_comes_back_with_the_feature() {
    let mut machine = hypervisor();
    machine.vcpu.write_msr(TSC_RATIO, 2 * ONE, By::Vmm).unwrap();
    take_feature(&mut machine);
    machine.vcpu.set_cpuid(rig::nested::offered().cpuid.entries()).unwrap();
    machine.reads_msr(TSC_RATIO, 2 * ONE);
    machine.vmrun();
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert!(ratios(&mut machine).contains(&(2 * ONE)));
}

/// A CPUID without the MSR.
fn take_feature(machine: &mut Hypervisor) {
    let mut cpuid = rig::nested::offered().cpuid.entries().to_vec();
    for entry in cpuid.iter_mut().filter(|entry| entry.leaf == 0x8000_000a) {
        entry.edx &= !(1 << 4);
    }
    machine.vcpu.set_cpuid(&cpuid).unwrap();
}

/// CPUID has lost the MSR after it was written: nobody could take the ratio back.
#[test]
fn a_ratio_goes_with_the_feature() {
    let mut machine = hypervisor();
    machine.vcpu.write_msr(TSC_RATIO, 2 * ONE, By::Vmm).unwrap();
    take_feature(&mut machine);
    machine.vmrun();
    enters_with(&mut machine, |l1| l1.wrapping_add(OFFSET), ExitCode::Hlt);
    assert_eq!(machine.run(), UserExit::Hlt);
    assert!(ratios(&mut machine).iter().all(|&ratio| ratio == ONE));
}

#[test]
fn without_the_feature_there_is_no_such_msr() {
    let mut machine = hypervisor();
    take_feature(&mut machine);
    machine.writes_msr(TSC_RATIO, 2 * ONE);
    let gp = event::VALID | event::EXCEPTION | 13 | event::ERROR_VALID;
    machine.vcpu.backend().cpu().inner().injects(gp);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.read_msr(TSC_RATIO, By::Vmm).unwrap(), ONE);
    assert!(machine.vcpu.write_msr(TSC_RATIO, 2 * ONE, By::Vmm).is_err());
    machine.vcpu.write_msr(TSC_RATIO, 0, By::Vmm).unwrap();
}

/// The VMM saves the ratio among the MSRs, and an L2 that is restored runs by it.
#[test]
fn a_restored_l2_runs_by_the_ratio_that_was_saved() {
    let mut machine = hypervisor();
    machine.writes_msr(TSC_RATIO, HALF);
    machine.stop_in_l2();
    let mut state = vec![0; 128 + 4096];
    machine.vcpu.nested_state(&mut state).unwrap();
    let (sregs, regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
    let ratio = machine.vcpu.read_msr(TSC_RATIO, By::Vmm).unwrap();
    drop(machine);

    let mut machine = hypervisor();
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.vcpu.set_regs(&regs);
    machine.vcpu.set_nested_state(&state).unwrap();
    machine.vcpu.write_msr(TSC_RATIO, ratio, By::Vmm).unwrap();
    machine.then(exit(ExitCode::Cpuid));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(ratios(&mut machine), [HALF, ONE]);
}
