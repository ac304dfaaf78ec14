//! Accesses to MSRs that the VMM forbids (KVM_X86_SET_MSR_FILTER) or wants to hear of
//! (KVM_CAP_X86_USER_SPACE_MSR). The inner loop leaves what is forbidden or refused to this.

use backend::{Backend, RCX};
use core::sync::atomic::Ordering::Relaxed;
use msr::Class;
use x86::{Direction, Directions, Exception};

use super::device::user_io::Completion;
use crate::{
    Rare, Vcpu,
    run::outcome::{Next, Outcome},
    run::user_exit::UserExit,
};

/// KVM_MSR_EXIT_REASON_*.
mod reason {
    /// The MSR does not take the value, or is not for this guest.
    pub const INVALID: u32 = 1;
    /// Nobody knows the MSR.
    pub const UNKNOWN: u32 = 2;
    /// The filter denies it.
    pub const FILTER: u32 = 4;
}

impl Rare {
    /// Makes the hardware follow the filter: after what the guest's CPUID allows it.
    pub(crate) fn apply_msr_filter(&self, b: &mut impl Backend) {
        let filter = self.msr_filter.as_deref();
        b.set_msr_filter(|index| match filter {
            Some(filter) => filter.denied(index),
            None => Directions::empty(),
        });
    }

    /// Whether there is a filter, and it denies an access.
    #[cold]
    #[inline(never)]
    fn filter_denies(&self, index: u32, direction: Direction) -> bool {
        self.msr_filter.as_ref().is_some_and(|filter| !filter.allows(index, direction))
    }
}

impl<B: Backend> Vcpu<B> {
    /// The VM's filter changed.
    #[cold]
    #[inline(never)]
    pub(crate) fn follow_msr_filter(&mut self) {
        let filter = self.vm.msr_filter();
        self.msrs.filtered = filter.is_some();
        self.rare.msr_filter = filter;
        self.rare.apply_msr_filter(&mut self.b);
    }

    /// Whether the filter denies an access.
    #[inline]
    pub(crate) fn msr_denied(&self, index: u32, direction: Direction) -> bool {
        self.msrs.filtered && self.rare.filter_denies(index, direction)
    }

    /// An access inside the loop is refused: #GP, unless the VMM wants to hear of it.
    #[cold]
    #[inline(never)]
    pub(crate) fn msr_refused(&mut self) -> Next {
        // Which refusals it wants to hear of is asked outside, where the access is tried again: a refused one has
        // changed nothing.
        if self.vm.settings.user_space_msr.load(Relaxed) != 0 {
            return Next::Leave;
        }
        // The backend may have refused it because the CPU alone has such an MSR here. Outside it says whether there is one.
        if msr::classify(self.gprs.0[RCX] as u32) == Class::Backend {
            return Next::Leave;
        }
        self.raise(Exception::gp(0));
        Next::Again
    }

    /// RDMSR or WRMSR outside the loop.
    pub(crate) fn slow_msr(&mut self, direction: Direction) -> Outcome {
        let next = self.slow_next_rip()?;
        self.msr_to(direction, next)
    }

    /// RDMSR or WRMSR outside the loop, behind which the guest goes on at `next`.
    pub(crate) fn msr_to(&mut self, direction: Direction, next: u64) -> Outcome {
        let index = self.gprs.0[RCX] as u32;
        let write = direction.is_write();
        // First: a write that is denied must have no effect.
        let refused = if self.msr_denied(index, direction) {
            Some(reason::FILTER)
        } else {
            let done = match direction {
                Direction::Read => self.do_rdmsr(),
                Direction::Write => self.do_wrmsr(),
            };
            // Asked only after a refusal: the reason is for the VMM, and a successful access needs
            // none.
            let unknown = msr::classify(index) == Class::Unknown;
            done.err().map(|_| if unknown { reason::UNKNOWN } else { reason::INVALID })
        };
        let Some(reason) = refused else {
            self.retire(next);
            return Ok(());
        };
        if self.vm.settings.user_space_msr.load(Relaxed) & reason == 0 {
            self.raise(Exception::gp(0));
            return Ok(());
        }
        // RIP stays until the answer, which may make #GP of it.
        self.device.user_io.completion = Completion::Msr { direction, next, error: false, data: 0 };
        let data = if write { self.gprs.edx_eax() } else { 0 };
        Err(UserExit::Msr { write, reason, index, data }.into())
    }

    /// User space's answers that are looked for only after exits that want them: to an MSR exit whether the access is refused
    /// and the value read, and the items of a port behind the first 8 bytes that a string instruction waits for.
    #[inline]
    pub fn answer_rare(
        &mut self,
        msr: impl FnOnce() -> (bool, u64),
        items: impl FnOnce(&mut [u8]),
    ) {
        match &mut self.device.user_io.completion {
            Completion::Msr { error, data, .. } => (*error, *data) = msr(),
            Completion::Emulation => self.device.user_io.take_items(items),
            _ => {}
        }
    }

    /// Completes the access with what user space said: the value, which only a read takes, or that it is refused.
    pub(crate) fn finish_msr(&mut self, direction: Direction, next: u64, answer: Option<u64>) {
        let Some(data) = answer else {
            self.raise(Exception::gp(0));
            return;
        };
        if direction == Direction::Read {
            // Of a write nothing is left to do: the VMM has done it.
            self.gprs.set_edx_eax(data);
        }
        self.retire(next);
    }
}
