//! Branch records of a guest that is a hypervisor, and of its guest, on a CPU that virtualises them.

mod rig;

use gannet_vcpu::{By, UserExit};
use rig::exit;
use rig::nested::{BLOCK, Hypervisor};
use svm::Features;
use x86::msr::{DEBUGCTL, LAST_BRANCH_FROM, LAST_BRANCH_TO, LAST_INT_FROM, LAST_INT_TO};
use x86::vmcb::{ExitCode, Vmcb};

/// What of L1's block has L2's records kept apart, and where they are.
const VIRT_EXT: u64 = BLOCK + 0xb8;
const DBGCTL: u64 = BLOCK + 0x670;

/// DEBUGCTL: branches are recorded.
const LBR: u64 = 1;

/// L1 on a CPU that virtualises branch records; it intercepts CPUID of L2.
fn hypervisor() -> Hypervisor {
    let machine = Hypervisor::on(Features { lbr: true, ..rig::features() }, false);
    machine.put(BLOCK + 0x08, 1 << (18 + 32));
    machine
}

fn set(vmcb: &mut Vmcb, [from, to, int_from, int_to]: [u64; 4]) {
    let save = &mut vmcb.save;
    (save.br_from, save.br_to) = (from, to);
    (save.last_excp_from, save.last_excp_to) = (int_from, int_to);
}

fn records(vmcb: &Vmcb) -> [u64; 4] {
    let save = &vmcb.save;
    [save.br_from, save.br_to, save.last_excp_from, save.last_excp_to]
}

fn assert_recording(vmcb: &Vmcb, on: bool) {
    assert_eq!((vmcb.control.virt_ext & 1, vmcb.save.dbgctl & LBR), (on.into(), on.into()));
}

trait Branches {
    /// The guest that runs has recording on, and branches: the CPU leaves this in the block.
    fn branches(&mut self, records: [u64; 4]);
    /// The guest that runs finds these records.
    fn finds(&mut self, records: [u64; 4]);
}

impl Branches for Hypervisor {
    fn branches(&mut self, records: [u64; 4]) {
        self.then(move |vmcb, gprs| {
            assert_recording(vmcb, true);
            set(vmcb, records);
            exit(ExitCode::Wbinvd)(vmcb, gprs);
        });
    }

    fn finds(&mut self, records: [u64; 4]) {
        for (index, value) in RECORDS.into_iter().zip(records) {
            self.reads_msr(index, value);
        }
    }
}

const OF_L1: [u64; 4] = [0x1111, 0x1112, 0x1113, 0x1114];
const OF_L2: [u64; 4] = [0x2221, 0x2222, 0x2223, 0x2224];

#[test]
fn a_guest_has_its_branches_recorded_while_it_asks_for_that() {
    let mut machine = hypervisor();
    machine.then(|vmcb, gprs| {
        assert_recording(vmcb, false);
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    // Stepping by branches it has not, and what pins show is nothing.
    machine.writes_msr(DEBUGCTL, LBR | 0x3e);
    machine.branches(OF_L1);
    machine.reads_msr(DEBUGCTL, LBR);
    machine.finds(OF_L1);
    machine.writes_msr(DEBUGCTL, 0);
    machine.then(|vmcb, gprs| {
        assert_recording(vmcb, false);
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    machine.finds(OF_L1);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.vcpu.read_msr(LAST_INT_TO, By::Vmm).unwrap(), OF_L1[3]);
}

/// The CPU writes the records. A guest does not, whether it records or not.
#[test]
fn a_guest_writes_no_record() {
    let gp = x86::vmcb::event::VALID | x86::vmcb::event::EXCEPTION | 13 | 1 << 11;
    for debugctl in [0, LBR] {
        let mut machine = hypervisor();
        machine.writes_msr(DEBUGCTL, debugctl);
        machine.writes_msr(LAST_BRANCH_FROM, 5);
        machine.vcpu.backend().cpu().inner().injects(gp);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert!(machine.vcpu.write_msr(DEBUGCTL, 1 << 6, By::Vmm).is_err());
        assert_eq!(machine.vcpu.read_msr(LAST_BRANCH_FROM, By::Vmm), Ok(0));
    }
}

const RECORDS: [u32; 4] = [LAST_BRANCH_FROM, LAST_BRANCH_TO, LAST_INT_FROM, LAST_INT_TO];

/// What a VMM saves of a guest's records, DEBUGCTL with them, it writes back on another host.
fn carry(from: &mut Hypervisor, to: &mut Hypervisor) {
    for index in [DEBUGCTL].into_iter().chain(RECORDS) {
        let value = from.vcpu.read_msr(index, By::Vmm).unwrap();
        to.vcpu.write_msr(index, value, By::Vmm).unwrap();
    }
}

#[test]
fn a_vmm_saves_the_records_and_writes_them_back() {
    for debugctl in [LBR, 0] {
        let mut machine = hypervisor();
        machine.writes_msr(DEBUGCTL, LBR);
        machine.branches(OF_L1);
        machine.writes_msr(DEBUGCTL, debugctl);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        let mut other = hypervisor();
        carry(&mut machine, &mut other);
        other.then(move |vmcb, gprs| {
            assert_recording(vmcb, debugctl != 0);
            exit(ExitCode::Wbinvd)(vmcb, gprs);
        });
        other.finds(OF_L1);
        other.writes_msr(DEBUGCTL, LBR);
        other.finds(OF_L1);
        other.then(exit(ExitCode::Hlt));
        assert_eq!(other.run(), UserExit::Hlt);
    }
}

/// L2 runs with the records of L1, or with its own, recording or not: they are saved and written back before the nested state
/// or behind it.
#[test]
fn the_records_of_an_l2_that_runs_are_written_back_in_either_order() {
    for (own, debugctl, state_first) in [0, 1]
        .into_iter()
        .flat_map(|own| [LBR, 0].map(|on| (own, on)))
        .flat_map(|(own, on)| [false, true].map(|first| (own, on, first)))
    {
        let run = || {
            let mut machine = hypervisor();
            machine.put(VIRT_EXT, own);
            machine.put(DBGCTL, LBR);
            machine.writes_msr(DEBUGCTL, LBR);
            machine.branches(OF_L1);
            machine
        };
        let mut machine = run();
        machine.vmrun();
        machine.branches(OF_L2);
        machine.writes_msr(DEBUGCTL, debugctl);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        let mut state = vec![0; 128 + 4096];
        machine.vcpu.nested_state(&mut state).unwrap();
        let (sregs, regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
        let mut other = hypervisor();
        other.vcpu.set_sregs(&sregs, None).unwrap();
        other.vcpu.set_regs(&regs);
        if state_first {
            other.vcpu.set_nested_state(&state).unwrap();
        }
        carry(&mut machine, &mut other);
        if !state_first {
            other.vcpu.set_nested_state(&state).unwrap();
        }
        for machine in [&mut machine, &mut other] {
            machine.finds(OF_L2);
            machine.reads_msr(DEBUGCTL, debugctl);
            machine.then(exit(ExitCode::Cpuid));
            machine.finds(if own == 1 { OF_L1 } else { OF_L2 });
            machine.reads_msr(DEBUGCTL, if own == 1 { LBR } else { debugctl });
            machine.then(exit(ExitCode::Hlt));
            assert_eq!(machine.run(), UserExit::Hlt);
        }
    }
}

/// Without records of its own L2 goes on with L1's, and L1 with what L2 has left.
#[test]
fn shared_records_go_over_with_the_level() {
    let mut machine = hypervisor();
    machine.writes_msr(DEBUGCTL, LBR);
    machine.branches(OF_L1);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_recording(vmcb, true);
        assert_eq!(records(vmcb), OF_L1);
        set(vmcb, OF_L2);
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    machine.finds(OF_L2);
    machine.reads_msr(DEBUGCTL, LBR);
    machine.writes_msr(DEBUGCTL, 0);
    machine.finds(OF_L2);
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        assert_recording(vmcb, false);
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    machine.finds(OF_L2);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(DBGCTL), 0, "L1's block is not written");
}

/// L2 turns recording on which L1 has turned off.
#[test]
fn l1_finds_what_l2_has_recorded_without_records_of_its_own() {
    let mut machine = hypervisor();
    machine.writes_msr(DEBUGCTL, LBR);
    machine.branches(OF_L1);
    machine.writes_msr(DEBUGCTL, 0);
    machine.vmrun();
    machine.finds(OF_L1);
    machine.writes_msr(DEBUGCTL, LBR);
    machine.then(|vmcb, gprs| {
        assert_recording(vmcb, true);
        assert_eq!(records(vmcb), OF_L1);
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    machine.branches(OF_L2);
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        assert_recording(vmcb, true);
        assert_eq!(records(vmcb), OF_L2);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// With records of its own L2 has those of its block, and L1 keeps its own.
#[test]
fn records_of_l2s_own_leave_l1s_alone() {
    let mut machine = hypervisor();
    machine.put(VIRT_EXT, 1);
    machine.put(DBGCTL, LBR | 0xff3e);
    for (at, value) in OF_L2.into_iter().enumerate() {
        machine.put(DBGCTL + 8 + 8 * at as u64, value);
    }
    machine.writes_msr(DEBUGCTL, LBR);
    machine.branches(OF_L1);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.control.virt_ext, vmcb.save.dbgctl), (1, LBR));
        assert_eq!(records(vmcb), OF_L2);
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    machine.branches([7, 8, 9, 10]);
    machine.writes_msr(DEBUGCTL, 0);
    machine.then(|vmcb, gprs| {
        // Its records stay its own.
        assert_eq!((vmcb.control.virt_ext, vmcb.save.dbgctl), (1, 0));
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    machine.finds([7, 8, 9, 10]);
    machine.then(exit(ExitCode::Cpuid));
    machine.reads_msr(DEBUGCTL, LBR);
    machine.finds(OF_L1);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(DBGCTL), 0);
    let written = [0, 1, 2, 3].map(|n| machine.get(DBGCTL + 8 + 8 * n));
    assert_eq!(written, [7, 8, 9, 10]);
}

/// What block 02 had of L1's meanwhile is not taken for what L1's block calls unchanged.
#[test]
fn records_that_l1_calls_clean_are_those_of_its_block() {
    let mut machine = hypervisor();
    machine.writes_msr(DEBUGCTL, LBR);
    machine.branches(OF_L1);
    machine.vmrun();
    machine.then(exit(ExitCode::Cpuid));
    machine.then(|vmcb, gprs| {
        assert_eq!(records(vmcb), OF_L1);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    machine.put(VIRT_EXT, 1);
    machine.put(BLOCK + 0xc0, 1 << 10);
    machine.put(DBGCTL + 8, 0x77);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.control.virt_ext, vmcb.save.dbgctl), (1, 0));
        assert_eq!(records(vmcb)[0], 0x77);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// Where the CPU does not virtualise them L1 is not offered records for L2, and nothing is recorded.
#[test]
fn without_the_feature_nothing_is_recorded() {
    let mut machine = Hypervisor::new(false);
    machine.put(VIRT_EXT, 1);
    machine.put(DBGCTL, LBR);
    machine.writes_msr(DEBUGCTL, LBR);
    machine.finds([0; 4]);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    // As a VMM writes back what it has read.
    for (index, value) in RECORDS.into_iter().flat_map(|index| [(index, 0), (index, 1)]) {
        assert_eq!(machine.vcpu.write_msr(index, value, By::Vmm).is_ok(), value == 0);
    }
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.control.virt_ext, vmcb.save.dbgctl), (0, LBR));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// L2 runs with records of its own, is saved and restored: both levels go on with theirs.
#[test]
fn records_of_both_levels_are_saved() {
    let mut machine = hypervisor();
    machine.put(VIRT_EXT, 1);
    machine.put(DBGCTL, LBR);
    machine.writes_msr(DEBUGCTL, LBR);
    machine.branches(OF_L1);
    machine.vmrun();
    machine.branches(OF_L2);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    let mut state = vec![0; 128 + 4096];
    machine.vcpu.nested_state(&mut state).unwrap();
    let (sregs, regs) = (machine.vcpu.sregs(), machine.vcpu.regs());
    let debugctl = machine.vcpu.read_msr(DEBUGCTL, By::Vmm).unwrap();
    assert_eq!(debugctl, LBR);
    drop(machine);

    let mut machine = hypervisor();
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.vcpu.set_regs(&regs);
    machine.vcpu.write_msr(DEBUGCTL, debugctl, By::Vmm).unwrap();
    machine.vcpu.set_nested_state(&state).unwrap();
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.control.virt_ext, vmcb.save.dbgctl), (1, LBR));
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    machine.reads_msr(DEBUGCTL, LBR);
    machine.finds(OF_L1);
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
}
