//! Operation budgets of a guest's guest under SVM: a round trip from it to its hypervisor and back, counted on the
//! model CPU. A budget that has to grow is a decision to be argued for.

mod rig;

use backend::Gprs;
use cpu::{Counts, Op};
use gannet_vcpu::UserExit;
use rig::nested::{BLOCK, Hypervisor, L1_RIP, L2_RIP, vmrun};
use rig::{exit, shutdown};
use x86::vmcb::{ExitCode, Vmcb};

/// Words of L1's block: intercepts (the second and third word, and the fourth), RIP, nested paging and its root.
const INTERCEPTS: u64 = BLOCK + 0x08;
const FOURTH: u64 = BLOCK + 0x10;
const RIP: u64 = BLOCK + 0x578;
const NP_ENABLE: u64 = BLOCK + 0x90;
const NCR3: u64 = BLOCK + 0xb0;
const TABLES: u64 = 0x1_0000;

/// A write to a page that is not mapped.
fn npf(at: u64) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone + 'static {
    const FINAL: u64 = 1 << 32;
    move |vmcb, gprs| {
        exit(ExitCode::Npf)(vmcb, gprs);
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (FINAL | 6, at);
    }
}

/// What L2's exit by `step`, which L1 is `told` of, L1's VMRUN and their two entries cost ten times, with the block that
/// `prepare` makes.
fn ten_trips(
    prepare: impl Fn(&Hypervisor),
    step: impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone + 'static,
    told: ExitCode,
) -> Counts {
    let run = |trips: usize| {
        let mut machine = Hypervisor::new(false);
        prepare(&machine);
        // L1 has used its pages: the loop finds them.
        for page in [BLOCK].into_iter().chain((0..4).map(|level| TABLES + level * 0x1000)) {
            machine.then(npf(page));
        }
        machine.vmrun();
        for _ in 0..trips {
            let step = step.clone();
            machine.then(move |vmcb, gprs| {
                assert_eq!(vmcb.save.rip, L2_RIP);
                step(vmcb, gprs);
            });
            machine.then(|vmcb, gprs| {
                assert_eq!(vmcb.save.rip, L1_RIP + 3, "L1 behind its VMRUN");
                vmcb.save.rip = L1_RIP;
                vmrun(vmcb, gprs);
            });
        }
        machine.then(shutdown);
        let before = machine.vcpu.backend().cpu().counts();
        assert_eq!(machine.run(), UserExit::Shutdown);
        assert_eq!(machine.get(BLOCK + 0x70), told.0);
        assert_eq!(machine.get(RIP), L2_RIP);
        let counts = machine.vcpu.backend().cpu().counts().since(&before);
        assert_eq!(machine.vcpu.backend().cpu().inner().steps_left(), 0);
        counts
    };
    let (some, more) = (run(3), run(13));
    more.since(&some)
}

/// Two entries, of L1 and of L2, the barrier that this L1's CPUID promises where L2's run ends (automatic IBRS), and
/// nothing else that is privileged.
fn assert_two_vmruns(ten: &Counts) {
    for (op, count) in [
        (Op::Vmrun, 20),
        (Op::Wrmsr, 10),
        (Op::Rdmsr, 0),
        (Op::Cpuid, 0),
        (Op::Rdtsc, 0),
        (Op::Xsetbv, 0),
        (Op::Xgetbv, 0),
        (Op::Pkru, 0),
        (Op::DebugReg, 0),
        (Op::MovCr, 0),
        (Op::Clgi, 0),
        (Op::Stgi, 0),
        (Op::StiCli, 0),
        (Op::Vmload, 0),
        (Op::Vmsave, 0),
        (Op::Selectors, 0),
        (Op::TaskRegister, 0),
    ] {
        assert_eq!(ten.of(op), count, "{op:?}");
    }
}

fn cpuid(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    exit(ExitCode::Cpuid)(vmcb, gprs);
}

/// L1 has tables for L2's addresses, which map nothing.
fn with_tables(l1: &Hypervisor) {
    for level in 0..3 {
        l1.put(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | 0x67);
    }
    l1.put(NP_ENABLE, 1);
    l1.put(NCR3, TABLES);
}

#[test]
fn a_round_trip_of_cpuid_is_two_vmruns() {
    let ten = ten_trips(|l1| l1.put(INTERCEPTS, 1 << (32 + 18)), cpuid, ExitCode::Cpuid);
    assert_two_vmruns(&ten);
}

#[test]
fn a_round_trip_of_a_hypercall_is_two_vmruns() {
    let step = |vmcb: &mut Vmcb, gprs: &mut Gprs| exit(ExitCode::Vmmcall)(vmcb, gprs);
    assert_two_vmruns(&ten_trips(|l1| l1.put(FOURTH, 3), step, ExitCode::Vmmcall));
}

#[test]
fn a_round_trip_with_tables_of_l1s_is_two_vmruns() {
    let prepare = |l1: &Hypervisor| {
        with_tables(l1);
        l1.put(INTERCEPTS, 1 << (32 + 18));
    };
    assert_two_vmruns(&ten_trips(prepare, cpuid, ExitCode::Cpuid));
}

#[test]
fn a_fault_that_l1s_tables_refuse_is_two_vmruns_a_trip() {
    assert_two_vmruns(&ten_trips(with_tables, npf(0x2_0000), ExitCode::Npf));
}
