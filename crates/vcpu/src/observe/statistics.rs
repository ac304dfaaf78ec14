//! What a vCPU counts beside its exits, and by which reason an exit is counted.

use backend::{Backend, Exit};
use host::task::{Blocked, WaitTimes};
use stats::{Reason, VcpuCount, vcpu::HaltHistogram};

use crate::{Vcpu, run::user_exit::UserExit};

/// The reason that an exit is counted by.
pub fn reason_of(exit: &Exit) -> Reason {
    match exit {
        Exit::Interrupt => Reason::Interrupt,
        Exit::Deadline => Reason::Deadline,
        Exit::Nmi => Reason::Nmi,
        Exit::MachineCheck => Reason::MachineCheck,
        Exit::Cpuid => Reason::Cpuid,
        Exit::Rdmsr => Reason::Rdmsr,
        Exit::Wrmsr => Reason::Wrmsr,
        Exit::Hypercall => Reason::Hypercall,
        Exit::Hlt => Reason::Hlt,
        Exit::Pause => Reason::Pause,
        Exit::CacheFlush => Reason::CacheFlush,
        Exit::Io(_) => Reason::Io,
        Exit::TdpFault(_) => Reason::TdpFault,
        Exit::Cr(_) => Reason::Cr,
        Exit::DebugReg => Reason::DebugReg,
        Exit::Xsetbv => Reason::Xsetbv,
        Exit::Rdpmc => Reason::Rdpmc,
        Exit::InterruptWindow => Reason::InterruptWindow,
        Exit::Eoi(_) => Reason::Eoi,
        Exit::IllegalSelfIpi => Reason::ApicWrite,
        Exit::Iret => Reason::Iret,
        Exit::PageFault(_) => Reason::PageFault,
        Exit::Exception(_) => Reason::Exception,
        Exit::Mwait => Reason::Mwait,
        Exit::Undefined => Reason::Undefined,
        Exit::Invlpg(_) | Exit::Invpcid => Reason::Invlpg,
        Exit::Rsm => Reason::Rsm,
        Exit::GdtrIdtr | Exit::LdtrTr => Reason::DescriptorTable,
        Exit::TaskSwitch(_) => Reason::TaskSwitch,
        Exit::Shutdown => Reason::Shutdown,
        Exit::HostSignal => Reason::HostSignal,
        Exit::Refused => Reason::Refused,
        Exit::PageLogFull | Exit::Unknown(_) => Reason::Other,
    }
}

/// Whether the inner loop has an arm for this exit, which counts it.
fn counted_inside(reason: Reason, guest_debug: u32) -> bool {
    match reason {
        Reason::DebugReg => guest_debug == 0,
        Reason::Cpuid
        | Reason::Rdmsr
        | Reason::Wrmsr
        | Reason::TdpFault
        | Reason::PageFault
        | Reason::Invlpg
        | Reason::Io
        | Reason::Hypercall
        | Reason::CacheFlush
        | Reason::Hlt
        | Reason::Cr
        | Reason::Xsetbv
        | Reason::InterruptWindow
        | Reason::Mwait
        | Reason::Undefined
        | Reason::Rdpmc
        | Reason::Iret
        | Reason::Deadline
        | Reason::Interrupt => true,
        _ => false,
    }
}

impl<B: Backend> Vcpu<B> {
    /// An exit that the inner loop did not answer.
    #[inline(never)]
    pub(crate) fn count_outside(&mut self, exit: &Exit) {
        let reason = reason_of(exit);
        if !counted_inside(reason, self.guest_debug) {
            self.stats.exit(reason);
        }
        self.stats.outside(reason);
    }

    /// KVM_RUN returns.
    #[inline]
    pub(crate) fn count_return(&mut self, exit: &UserExit) {
        self.stats.count(VcpuCount::UserExits);
        let what = match exit {
            UserExit::Mmio { .. } => VcpuCount::MmioExits,
            UserExit::Intr => VcpuCount::SignalExits,
            UserExit::IrqWindowOpen => VcpuCount::RequestIrqExits,
            _ => return,
        };
        self.stats.count(what);
    }

    /// A halted vCPU has polled, slept or both.
    pub(crate) fn count_halt(&mut self, ended: Blocked, times: WaitTimes, polled: bool) {
        let stats = &self.stats;
        let add = |what, which, ns| {
            stats.add(what, ns);
            stats.halt(which).count(ns);
        };
        if polled {
            stats.count(VcpuCount::HaltAttemptedPoll);
            if matches!(ended, Blocked::AtOnce | Blocked::Polled) {
                stats.count(VcpuCount::HaltSuccessfulPoll);
                add(VcpuCount::HaltPollSuccessNs, HaltHistogram::PollSuccess, times.polled_ns);
            } else {
                add(VcpuCount::HaltPollFailNs, HaltHistogram::PollFail, times.polled_ns);
            }
        }
        if matches!(ended, Blocked::Slept | Blocked::Signal) {
            add(VcpuCount::HaltWaitNs, HaltHistogram::Wait, times.slept_ns);
        }
        if ended == Blocked::Slept {
            stats.count(VcpuCount::HaltWakeup);
        }
    }
}
