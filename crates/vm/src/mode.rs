//! A vCPU's mode: what its owner sets when it enters the guest, what others do who want it out.
//!
//! The mode ([`crate::kick`]) says whether the vCPU is in the guest, or in a section in which it looks at TDP
//! tables and guest memory without a lock. Two others read it:
//!
//! - Who has made something pending *kicks*: a vCPU that sleeps is woken, one in the guest is interrupted.
//!   Store first, kick after; the owner sets the mode first and looks after. So one of the two sees the
//!   other, and the inner loop need not look.
//! - A withdrawal of translations interrupts every CPU on which such a vCPU is and *waits* until the
//!   interrupt was taken, which is after the section, because interrupts are off in it.
//!
//! What `mmu` is promised for that stands here with the two words `unsafe` that say so: who enters gets a
//! [`Section`], and [`Vm`] is a [`FlushRemote`]. `tests/section.rs` and `tests/kick.rs` model-check the mode.

use host::{irq, smp, timer::TimerHandler};
use irqchip::lapic::{Accepted, SwTimerExpired};
use mmu::{FlushRemote, Section};
use stats::VmCount;

use core::sync::atomic::Ordering::AcqRel;

use crate::{
    vcpu_shared::{Request, VcpuShared},
    vm::Vm,
};

/// A vCPU's mode is that of the guest, on this CPU, and interrupts are off.
#[must_use]
#[derive(Debug)]
pub struct Entered {
    off: irq::Off,
    cpu: usize,
    /// Whose mode it is.
    #[cfg(debug_assertions)]
    vcpu: *const VcpuShared,
}

impl Entered {
    /// The proof, for as long as the mode stays.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub fn section(&self) -> Section<'_> {
        // SAFETY: `off` keeps interrupts off. The mode was set before and is taken back by leave_mode()
        // alone, which consumes self: so Vm::flush_remote() finds it, and waits for this CPU.
        unsafe { Section::assume() }
    }

    /// The number of this CPU.
    #[inline(always)]
    pub fn cpu(&self) -> usize {
        self.cpu
    }
}

impl VcpuShared {
    /// The owner is about to enter the guest, or a section, on this CPU. Everything that was made
    /// pending before is visible after this; everything later comes with an IPI.
    #[inline]
    pub fn enter_mode(&self, off: irq::Off) -> Entered {
        let cpu = off.cpu();
        // A section within another would end it too soon.
        assert!(self.state().enter(cpu as u32), "a section is entered twice");
        Entered {
            off,
            cpu,
            #[cfg(debug_assertions)]
            vcpu: self,
        }
    }

    /// The owner has left the guest; interrupts are still off.
    #[inline]
    pub fn leave_mode(&self, entered: Entered) -> irq::Off {
        // Else a section of another vCPU would be taken for over while its thread still looks.
        #[cfg(debug_assertions)]
        assert!(core::ptr::eq(entered.vcpu, self), "another vCPU's mode is left");
        self.state().leave();
        entered.off
    }

    /// Does `work` in a section, outside the inner loop: by the owner, with interrupts on before and
    /// after. A kick that comes meanwhile interrupts in vain; what it was for is found before the next
    /// entry.
    pub fn in_section<T>(&self, work: impl FnOnce(Section<'_>) -> T) -> T {
        let entered = self.enter_mode(irq::disable());
        let result = work(entered.section());
        // Interrupts come on after the mode is back, or one would run in a section that it
        // lengthens.
        irq::enable(self.leave_mode(entered));
        result
    }
}

/// What others make pending, and the kick after it.
impl VcpuShared {
    /// Makes the vCPU look at what is pending: wakes it if it sleeps, interrupts it if it runs.
    pub fn kick(&self) {
        // It sleeps, so it is not in the guest; it looks at everything before it enters.
        if self.waiter.wake() {
            return;
        }
        // On its own CPU only the vCPU itself can find itself in the guest: it asks `is_kicked` behind that.
        if let Some(cpu) = self.state().kick()
            && cpu as usize != smp::cpu_id()
        {
            smp::kick(cpu as usize);
        }
    }

    /// Whether the vCPU was kicked since its owner entered, by itself perhaps, which no IPI tells. The owner
    /// leaves the mode then.
    #[inline]
    pub fn is_kicked(&self) -> bool {
        self.state().is_kicked()
    }

    /// Requests and kicks.
    pub fn request_and_kick(&self, request: Request) {
        self.request(request);
        self.kick();
    }

    /// Does what an accepted interrupt message asks for.
    pub fn deliver(&self, accepted: Accepted) {
        match accepted {
            Accepted::Ignored | Accepted::Coalesced => return,
            // The IRR is looked at after the mode is set; a request would cost a locked
            // instruction more.
            Accepted::Pending => {}
            Accepted::Nmi => self.add_nmi(),
            Accepted::Init => self.init_received(),
            Accepted::Sipi(page) => self.sipi_received(page),
            Accepted::Smi => self.request(Request::Smi),
            Accepted::ExtInt => self.request(Request::Event),
        }
        self.kick();
    }
}

impl TimerHandler for VcpuShared {
    /// The local APIC timer's host timer has expired: a hard interrupt on some CPU.
    fn expired(&self) -> Option<u64> {
        let now = host::clock::monotonic_ns();
        let SwTimerExpired { accepted, rearm, ask_owner } = self.lapic.sw_timer_expired(now);
        // A vCPU that serves the deadline itself compares again, for the guest may have moved it
        // since.
        if ask_owner {
            self.request_and_kick(Request::Deadline);
        }
        // What a timer makes pending is in the IRR.
        if accepted.kick() {
            self.kick();
        }
        rearm
    }
}

#[allow(unsafe_code)]
// SAFETY: every vCPU that can look at this VM's memory is in its table before it can enter, its mode is
// set before it looks, and request_all_and_wait() interrupts each whose mode says so and waits for it. The
// request is visible to the others, which flush before they enter the guest.
unsafe impl FlushRemote for Vm {
    fn flush_remote(&self) {
        self.stats().of(VmCount::RemoteTlbFlushRequests).add(1);
        // Counted only if somebody had to be interrupted, as stock KVM counts.
        if self.vcpus().request_all_and_wait(Request::FlushTlb) {
            self.stats().of(VmCount::RemoteTlbFlush).add(1);
        }
    }

    fn log_pages(&self, on: bool) {
        if on {
            // Whoever is the second waits as well: the first may not have asked yet.
            self.page_log_users().fetch_add(1, AcqRel);
            self.vcpus().request_all_and_wait(Request::PageLog);
        } else if self.page_log_users().fetch_sub(1, AcqRel) == 1 {
            // The last one needs no wait: a CPU that logs a little longer does no harm.
            self.vcpus().request_all(Request::PageLog);
        }
    }

    fn note_device(&self) {
        self.device_reach.note(|| {
            self.vcpus().request_all_and_wait(Request::Device);
        });
    }

    fn gather_log(&self) {
        // A CPU's log is handed over at each exit, so that leaving once is all that is wanted.
        self.vcpus().leave_guest();
    }
}

/// Withdraws more, and then flushes.
pub(crate) struct WithdrawFirst<'a, W, R: ?Sized> {
    /// What else follows from the withdrawal.
    pub(crate) withdraw: W,
    /// What flushes after that.
    pub(crate) flush: &'a R,
}

// SAFETY: passes on to what keeps the promise.
#[allow(unsafe_code)]
unsafe impl<W: Fn(), R: FlushRemote + ?Sized> FlushRemote for WithdrawFirst<'_, W, R> {
    fn flush_remote(&self) {
        // The derived leaves before the IPIs: behind them no CPU may find the frame in either
        // table.
        (self.withdraw)();
        self.flush.flush_remote();
    }

    fn note_device(&self) {
        self.flush.note_device();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use core::sync::atomic::{AtomicU64, Ordering};

    use mmu::FlushRemote;

    /// Counts the flushes of a VM.
    #[derive(Default)]
    pub(crate) struct Flushes(AtomicU64);

    // SAFETY: the tests that use it look at tables from the one thread that withdraws.
    #[allow(unsafe_code)]
    unsafe impl FlushRemote for Flushes {
        fn flush_remote(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Flushes {
        pub(crate) fn take(&self) -> u64 {
            self.0.swap(0, Ordering::Relaxed)
        }
    }

    /// Does something when it hears of a device's memory.
    pub(crate) struct Told<F>(pub(crate) F);

    // SAFETY: as `Flushes`.
    #[allow(unsafe_code)]
    unsafe impl<F: Fn()> FlushRemote for Told<F> {
        fn flush_remote(&self) {}

        fn note_device(&self) {
            (self.0)();
        }
    }
}
