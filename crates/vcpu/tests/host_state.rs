//! The host's registers that VMRUN leaves alone: saved, and back in time, whichever way they are kept.
//!
//! The model CPU asserts by itself that nothing of the kernel can run on the guest's GS base or task
//! register: see `cpu::model`.

mod rig;

use std::sync::{Mutex, MutexGuard, PoisonError};

use backend::{Gprs, Onward, RCX, RDX, WorldSwitch};
use cpu::{Counts, Cpu as _, Op, Selectors};
use gannet_vcpu::{RunInput, UserExit};
use proptest::prelude::*;
use rig::{Machine, TestVcpu, exit, features, shutdown, vcpu_of};
use svm::{Features, HostState};
use x86::msr;
use x86::vmcb::{ExitCode, Vmcb};

const BOTH: [HostState; 2] = [HostState::Vmsave, HostState::Msr];

/// What a CPU keeps of the host is there once, and no two threads are on it: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static CPUS: Mutex<()> = Mutex::new(());
    CPUS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn machine(host_state: HostState) -> Machine {
    Machine { features: Features { host_state, ..features() }, ..Machine::default() }
}

fn assert_host_is_back(v: &mut TestVcpu) {
    let model = v.backend().cpu().inner();
    assert!(model.gif);
    assert_eq!(model.moved, model.host);
}

fn port_of_the_kernel(vmcb: &mut Vmcb, gprs: &mut Gprs) {
    exit(ExitCode::Ioio)(vmcb, gprs);
    vmcb.control.exit_info_1 = (0x21 << 16) | (1 << 4) | 1;
    vmcb.control.exit_info_2 = vmcb.save.rip + 2;
}

#[test]
fn every_register_of_the_host_is_back_after_a_run() {
    let _alone = alone();
    for state in BOTH {
        let mut v = vcpu_of(&machine(state));
        for _ in 0..3 {
            let script = v.backend().cpu().inner();
            script.then(exit(ExitCode::Intr)).then(port_of_the_kernel);
            script.then(exit(ExitCode::Wbinvd)).then(exit(ExitCode::Nmi)).then(shutdown);
            assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown, "{state:?}");
            assert_host_is_back(&mut v);
        }
    }
}

#[test]
fn a_handler_that_calls_the_kernel_has_the_hosts_gs_base_and_task_register() {
    let _alone = alone();
    const GS_BASE: u32 = 0xc000_0101;
    for state in BOTH {
        let mut v = vcpu_of(&machine(state));
        let b = v.backend();
        b.begin_run();
        b.load(0);
        let guest = b.cpu().inner().moved;
        assert_ne!(guest, b.cpu().inner().host);
        for _ in 0..2 {
            b.host_segments();
            let model = b.cpu().inner();
            assert!(!model.gif);
            let (base, task) = (model.rdmsr(GS_BASE), model.moved.task);
            let mut host = cpu::Model::default();
            assert_eq!((base, task), (host.rdmsr(GS_BASE), host.host.task));
            b.guest_segments();
            assert_eq!(b.cpu().inner().moved, guest);
        }
        b.unload(Onward::ToGuest);
        assert_host_is_back(&mut v);
    }
}

/// What one more KVM_RUN costs in which the guest executes HLT and nothing else.
fn cost_of_a_halt(state: HostState) -> Counts {
    let machine = Machine { irqchip: false, ..machine(state) };
    let mut v = vcpu_of(&machine);
    let run = |v: &mut TestVcpu| {
        v.backend().cpu().inner().then(exit(ExitCode::Hlt));
        assert_eq!(v.run(&RunInput::default()), UserExit::Hlt);
    };
    run(&mut v);
    let before = v.backend().cpu().counts();
    run(&mut v);
    assert_host_is_back(&mut v);
    v.backend().cpu().counts().since(&before)
}

#[test]
fn a_halt_that_leaves_to_user_space_moves_no_msr() {
    let _alone = alone();
    let cost = cost_of_a_halt(HostState::Vmsave);
    assert_eq!((cost.of(Op::Rdmsr), cost.of(Op::Wrmsr)), (0, 0));
    assert_eq!((cost.of(Op::Selectors), cost.of(Op::TaskRegister)), (0, 0));
    // The host's and the guest's, each saved and loaded once.
    assert_eq!((cost.of(Op::Vmsave), cost.of(Op::Vmload)), (2, 2));
    assert_eq!((cost.of(Op::Vmrun), cost.of(Op::Cpuid)), (1, 0));
}

#[test]
fn register_by_register_the_same_halt_moves_twenty_one_msrs() {
    let _alone = alone();
    let cost = cost_of_a_halt(HostState::Msr);
    assert_eq!((cost.of(Op::Rdmsr), cost.of(Op::Wrmsr)), (10, 11));
    assert_eq!((cost.of(Op::Selectors), cost.of(Op::TaskRegister)), (2, 1));
    // The guest's alone.
    assert_eq!((cost.of(Op::Vmsave), cost.of(Op::Vmload)), (1, 1));
    assert_eq!(cost.of(Op::Vmrun), 1);
}

#[test]
fn the_host_is_read_once_a_run_and_written_at_every_way_out() {
    let _alone = alone();
    let mut v = vcpu_of(&machine(HostState::Msr));
    let script = v.backend().cpu().inner();
    script.then(exit(ExitCode::Intr)).then(exit(ExitCode::Intr)).then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let all = v.backend().cpu().counts();
    assert_eq!((all.of(Op::Rdmsr), all.of(Op::Wrmsr)), (10, 3 * 11));
    assert_eq!(all.of(Op::TaskRegister), 3);
}

#[test]
fn an_exit_that_the_loop_answers_moves_nothing_either_way() {
    let _alone = alone();
    for state in BOTH {
        let run = |exits: usize| {
            let mut v = vcpu_of(&machine(state));
            for _ in 0..exits {
                v.backend().cpu().inner().then(exit(ExitCode::Wbinvd));
            }
            v.backend().cpu().inner().then(shutdown);
            assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
            v.backend().cpu().counts()
        };
        let more = run(11).since(&run(1));
        for op in [Op::Rdmsr, Op::Wrmsr, Op::Vmsave, Op::Vmload, Op::Selectors, Op::TaskRegister] {
            assert_eq!(more.of(op), 0, "{state:?} {op:?}");
        }
    }
}

/// A panic inside the loop: before anything of the kernel runs, the host's state is loaded.
#[test]
fn a_panic_in_the_loop_has_the_hosts_state() {
    let _alone = alone();
    for state in BOTH {
        let mut v = vcpu_of(&machine(state));
        let at = host::smp::cpu_id();
        let b = v.backend();
        b.begin_run();
        b.load(at);
        assert!(!b.cpu().inner().gif);
        svm::rescue_host(b.cpu(), at);
        assert_host_is_back(&mut v);
    }
}

#[test]
fn what_another_thread_does_to_the_local_descriptor_table_is_not_undone() {
    let _alone = alone();
    for state in BOTH {
        let mut v = vcpu_of(&machine(state));
        let b = v.backend();
        host::std_port::test::set_uses_ldt(true);
        b.begin_run();
        for selectors in [Selectors { fs: 0x4f, gs: 7, ldt: 0x50 }, Selectors::default()] {
            // As the kernel's IPI would, between two stays in the loop of one run.
            let model = b.cpu().inner();
            model.host.selectors = selectors;
            model.moved = model.host;
            b.load(0);
            assert_ne!(b.cpu().inner().moved.selectors, selectors);
            b.unload(Onward::ToGuest);
            assert_eq!(b.cpu().inner().moved.selectors, selectors, "{state:?}");
        }
        host::std_port::test::set_uses_ldt(false);
        assert_host_is_back(&mut v);
    }
}

/// Some CPUs' IBPB leaves the return stack as it is.
#[test]
fn predictions_and_the_return_stack_are_emptied_where_another_vcpu_ran_last() {
    let _alone = alone();
    host::std_port::test::want_ibpb_on_switch();
    let machine = Machine::default();
    let vm = rig::vm(&machine);
    let mut first = rig::add_vcpu(&machine, &vm, 0);
    let mut second = rig::add_vcpu(&machine, &vm, 1);
    let barriers = |v: &mut TestVcpu| {
        v.backend().cpu().inner().msrs.remove(&msr::PRED_CMD);
        let before = host::std_port::test::return_stack_refills();
        v.backend().begin_run();
        v.backend().load(host::smp::cpu_id());
        v.backend().unload(Onward::ToGuest);
        let written = v.backend().cpu().inner().msrs.get(&msr::PRED_CMD).copied();
        (written, host::std_port::test::return_stack_refills() - before)
    };
    assert_eq!(barriers(&mut first), (Some(1), 1));
    assert_eq!(barriers(&mut first), (None, 0));
    assert_eq!(barriers(&mut second), (Some(1), 1));
    assert_eq!(barriers(&mut first), (Some(1), 1));
}

/// The host's DEBUGCTL is none of the guest's: the model CPU refuses to enter one with it.
#[test]
fn a_guest_runs_without_the_hosts_debugctl() {
    const DEBUGCTL: u32 = 0x1d9;
    let _alone = alone();
    for state in BOTH {
        let writes = [0, 1 << 2, 1 << 1].map(|value| {
            let mut v = vcpu_of(&machine(state));
            host::std_port::test::set_host_debugctl(value);
            v.backend().cpu().inner().msrs.insert(DEBUGCTL, value);
            let before = v.backend().cpu().counts();
            v.backend().cpu().inner().then(exit(ExitCode::Intr)).then(shutdown);
            assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
            assert_eq!(v.backend().cpu().inner().msrs[&DEBUGCTL], value);
            host::std_port::test::set_host_debugctl(0);
            v.backend().cpu().counts().since(&before).of(Op::Wrmsr)
        });
        // Two for each stay in the loop, where the host has something in it.
        assert_eq!(writes, [writes[0], writes[0] + 4, writes[0] + 4]);
    }
}

/// On Intel an exit makes DS and ES null, and what is loaded behind the loop are those of now: a selector whose descriptor has
/// gone would fault in the kernel. The model CPU asserts it.
#[test]
fn data_selectors_are_those_of_now() {
    let mut v = rig::vmx::vcpu();
    let b = v.backend();
    host::std_port::test::set_uses_ldt(true);
    b.begin_run();
    for data in [(7, 0), (0, 0x4f), (0, 0), (7, 7)] {
        b.cpu().inner().vmx.data = data;
        b.cpu().inner().moved.selectors = Selectors { fs: 0x4f, gs: 7, ldt: 0x50 };
        b.load(host::smp::cpu_id());
        let before = b.cpu().counts();
        b.unload(Onward::ToGuest);
        assert_eq!(b.cpu().counts().since(&before).of(Op::Selectors), 2);
    }
    host::std_port::test::set_uses_ldt(false);
}

/// On AMD an exit reads DS and ES again, which must not name the local table then. The model CPU asserts it.
#[test]
fn no_guest_is_entered_with_data_selectors_of_a_local_table() {
    let _alone = alone();
    for state in BOTH {
        let mut v = vcpu_of(&machine(state));
        host::std_port::test::set_uses_ldt(true);
        for data in [(7, 0), (0x2b, 7), (0, 0), (0x2b, 0x2b)] {
            v.backend().cpu().inner().vmx.data = data;
            v.backend().cpu().inner().then(exit(ExitCode::Intr)).then(shutdown);
            assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
            assert!(!v.backend().cpu().inner().vmx.data_is_null);
        }
        host::std_port::test::set_uses_ldt(false);
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    /// Into the loop, calls of the kernel in it, out of it.
    Stay(u8),
    /// A new KVM_RUN, of a thread whose state differs.
    NewRun(u16, u64),
    /// A WRMSR that exits.
    Write(u8),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..4u8).prop_map(Act::Stay),
        (any::<u16>(), any::<u64>()).prop_map(|(n, base)| Act::NewRun(n, base)),
        (0..4u8).prop_map(Act::Write),
    ]
}

proptest! {
    #[test]
    fn whatever_the_order_the_host_gets_back_what_it_had(
        msr in any::<bool>(),
        acts in proptest::collection::vec(act(), 1..20),
    ) {
        let _alone = alone();
        const FS_BASE: u32 = 0xc000_0100;
        const KERNEL_GS_BASE: u32 = 0xc000_0102;
        let state = if msr { HostState::Msr } else { HostState::Vmsave };
        let mut v = vcpu_of(&machine(state));
        v.backend().begin_run();
        for act in acts {
            match act {
                Act::Stay(calls) => {
                    let b = v.backend();
                    b.load(0);
                    for _ in 0..calls {
                        b.host_segments();
                        b.guest_segments();
                    }
                    b.unload(Onward::ToGuest);
                }
                Act::NewRun(n, base) => {
                    let b = v.backend();
                    b.begin_run();
                    let model = b.cpu().inner();
                    model.moved.selectors = Selectors { fs: n, gs: n >> 3, ldt: n & 0x50 };
                    model.wrmsr(FS_BASE, base >> 17);
                    model.wrmsr(KERNEL_GS_BASE, base >> 19);
                    model.host = model.moved;
                }
                Act::Write(exits) => {
                    for _ in 0..exits {
                        v.backend().cpu().inner().then(|vmcb, gprs| {
                            (gprs.0[RCX], gprs.0[RDX]) = (0x200, 0);
                            vmcb.save.rax = 6;
                            exit(ExitCode::Msr)(vmcb, gprs);
                            vmcb.control.exit_info_1 = 1;
                        });
                    }
                    v.backend().cpu().inner().then(shutdown);
                    prop_assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
                }
            }
            let model = v.backend().cpu().inner();
            prop_assert!(model.gif);
            prop_assert_eq!(model.moved, model.host);
        }
    }
}

proptest! {
    /// Three threads with a vCPU each, on two CPUs, in any order: what a vCPU loads when it leaves is its own thread's, though
    /// another's was saved in the same area meanwhile.
    #[test]
    fn a_vcpu_loads_the_state_of_its_own_thread(
        msr in any::<bool>(),
        acts in proptest::collection::vec((0..3usize, 0..2usize, any::<bool>()), 1..40),
    ) {
        let _alone = alone();
        let state = if msr { HostState::Msr } else { HostState::Vmsave };
        let mut vcpus = [0x10u16, 0x20, 0x30].map(|selector| {
            let mut v = vcpu_of(&machine(state));
            let model = v.backend().cpu().inner();
            model.moved.selectors = Selectors { fs: selector, gs: selector, ldt: selector };
            model.host = model.moved;
            v.backend().begin_run();
            v
        });
        for (which, at, anew) in acts {
            let b = vcpus[which].backend();
            if anew {
                b.begin_run();
            }
            b.load(at);
            b.unload(Onward::ToGuest);
            assert_host_is_back(&mut vcpus[which]);
        }
    }
}
