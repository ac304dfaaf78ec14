//! What a vCPU counts beside its exits, which [`exits::table`](crate::exits::table) counts.

use backend::Backend;
use host::task::{Blocked, WaitTimes};
use stats::{VcpuCount, vcpu::HaltHistogram};

use crate::{Vcpu, run::user_exit::UserExit};

impl<B: Backend> Vcpu<B> {
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
