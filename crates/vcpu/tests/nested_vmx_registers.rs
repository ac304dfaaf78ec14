//! RSP and RIP of both levels, against a plain oracle: RSP is read late, kept beside the VMCS, and written only if it
//! was changed, so each way from an exit to the next entry is one where the other level's, or an old one, could get in.

mod rig;

use std::sync::{Arc, Mutex};

use backend::{Gprs, RCX, RSP};
use cpu::ModelVmcs;
use gannet_vcpu::UserExit;
use proptest::prelude::*;
use rig::nested_vmx::{Hypervisor, L1_RIP, L2_RIP, features, vmcs12};
use rig::vmx::{exit, shutdown};
use x86::vmcs::{ExitReason, field};

/// What user space does before it runs the vCPU again.
#[derive(Clone, Copy, Debug)]
enum User {
    Nothing,
    /// Writes RSP.
    WritesRsp(u64),
    /// Writes RSP, and has an NMI come, which ends the run of an L2.
    WritesRspAndNmi(u64),
    /// Reads the nested state and restores it.
    Restores,
    /// Restores the nested state of the beginning, in which no L2 ran. Then it writes RSP.
    BeginsAnew(u64),
}

/// What a level does next.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// CPUID: L1's is answered, L2's is L1's.
    Cpuid,
    /// The host is interrupted.
    Interrupt,
    /// OUT, which leaves to user space whoever executes it.
    Out(User),
    /// L1 executes VMREAD of HOST_RSP into RSP; L2, for whom that is an exit, the same.
    ReadHostRsp,
    /// L1 executes VMWRITE of RSP to HOST_RSP.
    WriteHostRsp,
    /// L1 executes VMWRITE of RSP to GUEST_RSP.
    WriteGuestRsp,
    /// L1 enters L2; L2 executes VMCALL.
    Cross,
}

/// What the architecture says of the two stacks.
#[derive(Clone, Copy, Debug)]
struct Oracle {
    in_l2: bool,
    launched: bool,
    rsp: u64,
    rip: u64,
    host_rsp: u64,
    /// RSP and RIP of L2 in VMCS12.
    guest: (u64, u64),
    /// Both at the beginning.
    at_first: (u64, (u64, u64)),
    /// The last act of user space was an NMI while L2 ran.
    left_by_nmi: bool,
}

impl Oracle {
    fn leave(&mut self) {
        self.guest = (self.rsp, self.rip);
        (self.in_l2, self.rsp, self.rip) = (false, self.host_rsp, L1_RIP);
    }

    /// The level has RSP `rsp` and does this. The exit for it.
    fn act(&mut self, act: Act, rsp: u64) -> ExitReason {
        self.rsp = rsp;
        match (act, self.in_l2) {
            (Act::Interrupt, _) => ExitReason::ExternalInterrupt,
            (Act::Out(user), in_l2) => {
                self.rip += 2;
                match user {
                    User::Nothing | User::Restores => {}
                    User::WritesRsp(rsp) => self.rsp = rsp,
                    User::WritesRspAndNmi(rsp) => {
                        self.rsp = rsp;
                        self.left_by_nmi = in_l2;
                        if in_l2 {
                            self.leave();
                        }
                    }
                    User::BeginsAnew(rsp) => {
                        (self.in_l2, self.launched, self.rsp) = (false, false, rsp);
                        (self.host_rsp, self.guest) = self.at_first;
                    }
                }
                ExitReason::Io
            }
            (Act::Cpuid, false) => {
                self.rip += 2;
                ExitReason::Cpuid
            }
            (Act::Cpuid, true) => {
                self.leave();
                ExitReason::Cpuid
            }
            (Act::ReadHostRsp, true) => {
                self.leave();
                ExitReason::Vmread
            }
            (Act::ReadHostRsp, false) => {
                (self.rsp, self.rip) = (self.host_rsp, self.rip + 2);
                ExitReason::Vmread
            }
            (Act::WriteHostRsp | Act::WriteGuestRsp, true) => {
                self.leave();
                ExitReason::Vmwrite
            }
            (Act::WriteHostRsp, false) => {
                (self.host_rsp, self.rip) = (rsp, self.rip + 2);
                ExitReason::Vmwrite
            }
            (Act::WriteGuestRsp, false) => {
                (self.guest.0, self.rip) = (rsp, self.rip + 2);
                ExitReason::Vmwrite
            }
            (Act::Cross, true) => {
                self.leave();
                ExitReason::Vmcall
            }
            (Act::Cross, false) => {
                let reason =
                    if self.launched { ExitReason::Vmresume } else { ExitReason::Vmlaunch };
                (self.in_l2, self.launched) = (true, true);
                (self.rsp, self.rip) = self.guest;
                reason
            }
        }
    }
}

fn assert_runs(vmcs: &ModelVmcs, expected: &Oracle) {
    let found = (vmcs.get(field::GUEST_RSP), vmcs.get(field::GUEST_RIP));
    assert_eq!(found, (expected.rsp, expected.rip), "{expected:?}");
}

fn do_it(oracle: &mut Oracle, act: Act, rsp: u64, vmcs: &mut ModelVmcs, gprs: &mut Gprs) {
    assert_runs(vmcs, oracle);
    let reason = oracle.act(act, rsp);
    exit(reason)(vmcs, gprs);
    vmcs.set(field::GUEST_RSP, rsp);
    match act {
        // Out of one byte, to port 0x60.
        Act::Out(_) => vmcs.set(field::EXIT_QUALIFICATION, 0x60 << 16),
        Act::ReadHostRsp | Act::WriteHostRsp | Act::WriteGuestRsp => {
            let to_guest = matches!(act, Act::WriteGuestRsp);
            let name = if to_guest { field::GUEST_RSP } else { field::HOST_RSP };
            gprs.0[RCX] = name.encoding().into();
            // Registers: RSP, and the field's in RCX.
            let information = 1 << 10 | (RSP as u32) << 3 | (RCX as u32) << 28;
            vmcs.set(field::INSTRUCTION_INFO, information);
        }
        Act::Cpuid | Act::Interrupt | Act::Cross => {}
    }
}

fn write_rsp(machine: &mut Hypervisor, rsp: u64) {
    let mut regs = machine.vcpu.regs();
    regs.gpr[RSP] = rsp;
    machine.vcpu.set_regs(&regs);
}

fn state_of(machine: &mut Hypervisor) -> Vec<u8> {
    let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
    machine.vcpu.nested_state(&mut state).unwrap();
    state
}

fn play(acts: &[(Act, u64)], shadow_vmcs: bool) {
    let mut v = vmcs12();
    // Ports are nobody's but ours.
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) & !(1 << 24 | 1 << 25));
    let features = vmx::Features { shadow_vmcs, ..features() };
    let mut machine = Hypervisor::on(features, &v);
    let regs = machine.vcpu.regs();
    let at_first = (v.get(field::HOST_RSP), (v.get(field::GUEST_RSP), v.get(field::GUEST_RIP)));
    let oracle = Arc::new(Mutex::new(Oracle {
        in_l2: false,
        launched: false,
        rsp: regs.gpr[RSP],
        rip: regs.rip,
        host_rsp: at_first.0,
        guest: at_first.1,
        at_first,
        left_by_nmi: false,
    }));
    let first = state_of(&mut machine);
    assert_eq!(v.get(field::GUEST_RIP), L2_RIP);
    for &(act, rsp) in acts {
        let oracle = oracle.clone();
        // A VMWRITE of what the shadow VMCS holds makes no exit.
        let shadowed = shadow_vmcs && matches!(act, Act::WriteGuestRsp);
        let act = if shadowed { Act::Cpuid } else { act };
        machine.then(move |vmcs, gprs| do_it(&mut oracle.lock().unwrap(), act, rsp, vmcs, gprs));
    }
    let end = oracle.clone();
    machine.then(move |vmcs, gprs| {
        assert_runs(vmcs, &end.lock().unwrap());
        shutdown(vmcs, gprs);
    });
    // L1 has no handler for that of L2's.
    machine.then(shutdown);
    for &(act, rsp) in acts {
        let Act::Out(user) = act else { continue };
        assert!(matches!(machine.run(), UserExit::Io { .. }));
        assert_eq!(machine.vcpu.regs().gpr[RSP], rsp, "what user space sees");
        match user {
            User::Nothing => {}
            User::WritesRsp(rsp) => write_rsp(&mut machine, rsp),
            User::WritesRspAndNmi(rsp) => {
                write_rsp(&mut machine, rsp);
                if oracle.lock().unwrap().left_by_nmi {
                    machine.vcpu.shared().add_nmi();
                }
            }
            User::Restores => {
                let state = state_of(&mut machine);
                machine.vcpu.set_nested_state(&state).unwrap();
            }
            User::BeginsAnew(rsp) => {
                machine.vcpu.set_nested_state(&first).unwrap();
                write_rsp(&mut machine, rsp);
            }
        }
    }
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert!(machine.vcpu.backend().cpu().inner().vmx.steps_left() <= 1);
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        Just(Act::Cpuid),
        Just(Act::Interrupt),
        prop_oneof![
            Just(User::Nothing),
            (0x1000..0x2000_u64).prop_map(User::WritesRsp),
            (0x1000..0x2000_u64).prop_map(User::WritesRspAndNmi),
            Just(User::Restores),
            (0x1000..0x2000_u64).prop_map(User::BeginsAnew),
        ]
        .prop_map(Act::Out),
        Just(Act::ReadHostRsp),
        Just(Act::WriteHostRsp),
        Just(Act::WriteGuestRsp),
        Just(Act::Cross),
        Just(Act::Cross),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn no_stack_is_lost_between_two_levels(
        acts in prop::collection::vec((act(), 0x1000..0x2000_u64), 1..60),
    ) {
        for shadow_vmcs in [false, true] {
            play(&acts, shadow_vmcs);
        }
    }
}
