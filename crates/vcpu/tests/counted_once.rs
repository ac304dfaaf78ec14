//! Each exit is counted once, by one reason, whoever answers it.

mod rig;

use gannet_vcpu::{RunInput, UserExit};
use rig::{Machine, add_vcpu, vm};
use stats::{VcpuStats, reason::ALL};
use x86::{
    vmcb::ExitCode,
    vmcs::{ExitReason, field},
};

/// Entries that play a shutdown behind the exit that is asked about: more than one, for the loop may come
/// by without that the guest was entered.
const ENOUGH: usize = 8;

fn check(what: &str, stats: &VcpuStats, entries: usize) {
    let exits = ALL.iter().map(|reason| (reason, stats.exits_by(*reason)));
    let exits: Vec<_> = exits.filter(|(_, count)| *count != 0).collect();
    let sum: u64 = exits.iter().map(|(_, count)| count).sum();
    assert_eq!(sum, entries as u64, "{what} is counted as {exits:?}");
}

#[test]
fn every_exit_code_of_svm_is_counted_once() {
    // Exceptions that no CPU has, which it would refuse to inject.
    let is_none = |code: &u64| matches!(code, 0x42 | 0x49 | 0x4f | 0x54 | 0x56..=0x5f);
    let others = [0x100, 0x400, 0x401, 0x402, 0x403, u64::from(u32::MAX), u64::MAX];
    for code in (0..=0xa6).filter(|code| !is_none(code)).chain(others) {
        for decode_assists in [false, true] {
            let features = svm::Features { decode_assists, ..rig::features() };
            let machine = Machine { irqchip: false, features, ..Machine::default() };
            let mut v = add_vcpu(&machine, &vm(&machine), 0);
            let script = v.backend().cpu().inner();
            script.then(rig::exit(ExitCode(code)));
            for _ in 0..ENOUGH {
                script.then(rig::shutdown);
            }
            while v.run(&RunInput::default()) != UserExit::Shutdown {}
            let entries = 1 + ENOUGH - v.backend().cpu().inner().steps_left();
            check(&format!("{code:#x}"), &v.shared().stats, entries);
        }
    }
}

#[test]
fn every_exit_reason_of_vmx_is_counted_once() {
    for reason in (0..=75).filter(|reason| ExitReason(*reason) != ExitReason::Hlt) {
        let mut v = rig::vmx::vcpu();
        let script = &mut v.backend().cpu().inner().vmx;
        script.then(move |vmcs, gprs| {
            rig::vmx::exit(ExitReason(reason))(vmcs, gprs);
            vmcs.set(field::EXIT_INTERRUPTION, 0);
        });
        for _ in 0..ENOUGH {
            script.then(rig::vmx::shutdown);
        }
        while v.run(&RunInput::default()) != UserExit::Shutdown {}
        let entries = 1 + ENOUGH - v.backend().cpu().inner().vmx.steps_left();
        check(&format!("{reason}"), &v.shared().stats, entries);
    }
}
