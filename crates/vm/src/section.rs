//! Sections that withdrawals of translations wait for, and the waiting.
//!
//! A vCPU's mode ([`crate::kick`]) says whether it is in the guest, or in a section in which it looks at
//! TDP tables and guest memory without a lock. A withdrawal interrupts every CPU on which such a vCPU is
//! and waits until the interrupt was taken, which is after the section, because interrupts are off in it.
//! Both halves of that stand here, with the two words `unsafe` that tell `mmu` of it: who enters gets a
//! [`Section`], and [`Vm`] is a [`FlushRemote`]. `tests/section.rs` model-checks the two together.
#![allow(unsafe_code)]

use host::irq;
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
        irq::enable(self.leave_mode(entered));
        result
    }
}

// SAFETY: every vCPU that can look at this VM's memory is in its table before it can enter, its mode is
// set before it looks, and request_all_and_wait() interrupts each whose mode says so and waits for it. The
// request is visible to the others, which flush before they enter the guest.
unsafe impl FlushRemote for Vm {
    fn flush_remote(&self) {
        self.stats().of(VmCount::RemoteTlbFlushRequests).add(1);
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
            self.vcpus().request_all(Request::PageLog);
        }
    }

    fn gather_log(&self) {
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
unsafe impl<W: Fn(), R: FlushRemote + ?Sized> FlushRemote for WithdrawFirst<'_, W, R> {
    fn flush_remote(&self) {
        (self.withdraw)();
        self.flush.flush_remote();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use core::sync::atomic::{AtomicU64, Ordering};

    use mmu::FlushRemote;

    /// Counts flushes.
    #[derive(Default)]
    pub(crate) struct Flushes(AtomicU64);

    // SAFETY: the tests that use it look at tables from the one thread that withdraws.
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
}
