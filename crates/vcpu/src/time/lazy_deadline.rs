//! The lazy TSC deadline of a vCPU: what `pv::LazyDeadline` asks of the timer and of guest memory.
//!
//! The guest's deadlines reach the timer by WRMSR, in the inner loop, and by the shared page, which
//! is looked at when the timer expires. The host timer's interrupt only asks the vCPU to look
//! ([`Request::Deadline`](vm::vcpu_shared::Request)); so every access to the page is made by the
//! vCPU's own thread: in the inner loop through the TDP tables, with interrupts off; outside
//! through the VMM's mapping. What fails in the loop is made good before the guest runs on.

use backend::Backend;
use cpuid::GuestCpuid;
use irqchip::lapic::GUARD_ADVANCE_NS;
use mmu::Section;
use msr::By;
use pv::{LazyDeadline, Shared};
use vm::vcpu_shared::{Request, VcpuShared};

use super::{Time, hv_timer_in_use, tsc::Tsc};
use crate::{
    Vcpu,
    pv::{GuestPage, MappedPage},
    run::outcome::Next,
    state::msrs::Refused,
};

/// A page, and how it is reached.
enum Reach<'a> {
    Mapped(MappedPage<'a>),
    Slow(GuestPage<'a>),
}

/// The guest's page can be reached neither through the tables nor through the VMM.
struct OutOfReach;

impl Shared for Reach<'_> {
    type Error = OutOfReach;
    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), OutOfReach> {
        match self {
            Self::Mapped(page) => page.read(offset, data).map_err(|_| OutOfReach),
            Self::Slow(page) => page.read(offset, data).map_err(|_| OutOfReach),
        }
    }
    fn write(&self, offset: usize, data: &[u8]) -> Result<(), OutOfReach> {
        match self {
            Self::Mapped(page) => page.write(offset, data).map_err(|_| OutOfReach),
            Self::Slow(page) => page.write(offset, data).map_err(|_| OutOfReach),
        }
    }
}

/// Waits out what is left of the advance. Bounded, whatever the TSC does.
fn await_deadline(b: &mut impl Backend, deadline: u64) {
    // As many turns as nanoseconds at most: a TSC that stands still must not hold the thread.
    for _ in 0..GUARD_ADVANCE_NS {
        let tsc = b.host_tsc();
        if b.guest_tsc(tsc) >= deadline {
            return;
        }
        core::hint::spin_loop();
    }
}

impl Time {
    /// How long before a deadline the host timer fires, in ticks of the guest's TSC.
    fn guard_advance(&self, tsc: &Tsc) -> u64 {
        if !self.lazy.enabled() {
            return 0;
        }
        (u64::from(tsc.khz).saturating_mul(GUARD_ADVANCE_NS)) / 1_000_000
    }

    /// The MSR; a guest to which it is not offered has none.
    pub(crate) fn read_lazy_deadline_msr(
        &self,
        cpuid: &GuestCpuid,
        by: By,
    ) -> Result<u64, Refused> {
        if by == By::Vmm || cpuid.has(x86::cpuid::feature::KVM_LAZY_TSC_DEADLINE) {
            Ok(self.lazy.msr())
        } else {
            Err(Refused)
        }
    }

    /// KVM_SET_LAPIC has taken the timer out of TSC-deadline mode: a VMM resets the vCPU. The page is given
    /// up without a store, for its memory may be the next kernel's already.
    pub(super) fn reset_lazy_deadline(&mut self, shared: &VcpuShared) {
        self.lazy.configure(0);
        // The host timer's interrupt expires the deadline itself from now on, as for a guest
        // without a page.
        shared.lapic.guard_deadline(false);
    }
}

impl<B: Backend> Vcpu<B> {
    /// After a deadline was set inside the loop: the page is told what the timer runs for now.
    #[inline]
    pub(super) fn arm_lazy_deadline_in_loop(&mut self, s: Section<'_>, next: Next) -> Next {
        let live = self.shared.lapic.deadline_live();
        let Some(at) = self.time.lazy.page() else { return next };
        let before = self.time.lazy;
        // The tables' own view, with no user access: faults cannot be taken here.
        let memory = self.vm.memory();
        let view = memory.view(s);
        let page = MappedPage { memory, view: &view, at };
        if self.time.lazy.arm(&page, live).is_ok() {
            return next;
        }
        // The page is told outside, by the VMM's mapping, before the guest reads it again. Nothing is lost until then:
        // what it shows is what was promised before, not a promise that nobody can take back.
        self.time.lazy = before;
        self.time.lazy.doubt();
        if next == Next::Again { Next::Done } else { next }
    }

    /// Arms the lazy deadline outside the loop. A page out of reach stays in doubt.
    pub(super) fn arm_lazy_deadline(&mut self) {
        let live = self.shared.lapic.deadline_live();
        let _ = self.on_page(|lazy, page| lazy.arm(page, live));
    }

    /// Outside the loop: does something with the page as it is mapped, which is quick, or else
    /// through the VMM's mapping. `None`: out of reach, or there is none.
    fn on_page<T>(
        &mut self,
        f: impl Fn(&mut LazyDeadline, &Reach<'_>) -> Result<T, OutOfReach>,
    ) -> Option<T> {
        let at = self.time.lazy.page()?;
        let memory = self.vm.memory();
        // The attempt may have come half way: the page is put right from where it stood.
        let before = self.time.lazy;
        let lazy = &mut self.time.lazy;
        let done = self.shared.in_section(|s| {
            let view = memory.view(s);
            f(lazy, &Reach::Mapped(MappedPage { memory, view: &view, at }))
        });
        if let Ok(done) = done {
            return Some(done);
        }
        // The second attempt begins from what was known: half of a first one must not count twice.
        self.time.lazy = before;
        f(&mut self.time.lazy, &Reach::Slow(GuestPage { memory, at })).ok()
    }

    /// The deadline that the CPU watches has come: interrupts, unless the guest has stored a later one. No advance
    /// is needed for the look, which takes less than the way from a host timer.
    pub(super) fn expire_lazy_deadline_in_loop(&mut self, s: Section<'_>) -> Next {
        // Without a promise the guest has stored nothing that counts.
        let promised = self.time.lazy.armed() != 0;
        let Some(at) = self.time.lazy.page().filter(|_| promised) else {
            return self.expire_deadline();
        };
        let before = self.time.lazy;
        let memory = self.vm.memory();
        let view = memory.view(s);
        match self.time.lazy.expire(&MappedPage { memory, view: &view, at }) {
            Ok(Some(later)) => self.write_deadline_in_loop(s, later),
            Ok(None) => self.expire_deadline(),
            Err(_) => {
                // The look is made again outside, from the beginning.
                self.time.lazy = before;
                self.shared.request(Request::Deadline);
                Next::Done
            }
        }
    }

    /// A TSC deadline has come, or may have: interrupts, unless the guest has stored a later one.
    pub(crate) fn expire_lazy_deadline(&mut self) {
        let deadline = self.shared.lapic.tsc_deadline();
        // The timer was stopped or has expired between the request and here.
        if deadline == 0 {
            return;
        }
        let tsc = self.b.host_tsc();
        // The host timer fires that much before the deadline.
        if deadline > self.b.guest_tsc(tsc).saturating_add(self.time.guard_advance(&self.rare.tsc))
        {
            // Moved meanwhile; or host time, which is disciplined, ran ahead of the guest's TSC.
            return self.arm_deadline(deadline);
        }
        let promised = self.time.lazy.armed() != 0;
        // Where the page cannot be read, the deadline that is known stands.
        let looked = if promised { self.on_page(|lazy, page| lazy.expire(page)) } else { None };
        match looked.flatten() {
            Some(later) => {
                self.arm_deadline(later);
                self.arm_lazy_deadline();
            }
            None => {
                // What is left of the advance is waited out: an interrupt before its deadline is
                // none that a guest expects.
                await_deadline(&mut self.b, deadline);
                self.pending.raise_if(self.shared.lapic.expire_deadline().kick());
                if hv_timer_in_use(&self.b, &self.shared.lapic) {
                    self.arm_hv_timer(self.shared.lapic.next_expiry(), None);
                }
            }
        }
    }

    /// Takes the promise back. A timer that runs on does so for the guest's newest deadline.
    fn end_promise(&mut self) {
        if self.shared.lapic.tsc_deadline() == 0 {
            let _ = self.on_page(|lazy, page| lazy.cancel(page));
        // Only under a promise may the guest have kept a deadline to itself.
        } else if self.time.lazy.armed() != 0
            && let Some(later) = self.on_page(|lazy, page| lazy.expire(page)).flatten()
        {
            self.arm_deadline(later);
        }
    }

    /// Before an entry from the outer loop: puts the page right where it may be wrong. It may be
    /// after every withdrawal of translations, behind which there may be other memory.
    #[inline]
    pub(crate) fn sync_lazy_deadline(&mut self) {
        if !self.time.lazy.enabled() {
            return;
        }
        // The generation says that translations were withdrawn: behind the address may be other memory.
        let generation = self.vm.memory().generation();
        if !self.time.lazy.in_doubt() && generation == self.time.lazy_generation {
            return;
        }
        // Noted before the look: a withdrawal in the meantime is one more reason to look.
        self.time.lazy_generation = generation;
        self.sync_lazy_deadline_now();
    }

    #[cold]
    #[inline(never)]
    fn sync_lazy_deadline_now(&mut self) {
        // Another kernel may run now, to which the page means nothing.
        if self.time.lazy.has_left() {
            return self.forget_lazy_deadline();
        }
        if self.time.lazy.armed() != self.shared.lapic.deadline_live() {
            // Stopped, or masked while it goes on.
            self.end_promise();
        }
        let running = self.shared.lapic.deadline_live();
        let synced = self.on_page(|lazy, page| lazy.sync(page, running));
        if let Some(later) = synced.flatten() {
            self.arm_deadline(later);
            self.arm_lazy_deadline();
        }
    }

    /// A valid write of the MSR: the page is at `value`'s address from now on, or nowhere.
    ///
    /// A guest's page has to be there, writable; a VMM may restore MSRs before memory.
    pub(crate) fn write_lazy_deadline_msr(&mut self, value: u64, by: By) -> Result<(), Refused> {
        let possible = self.rare.offered.msrs.lazy_deadline && self.shared.in_kernel_apic;
        let offered = self.cpuid.has(x86::cpuid::feature::KVM_LAZY_TSC_DEADLINE);
        let off = value & 1 == 0;
        if !(possible && (offered || by == By::Vmm)) && !(by == By::Vmm && off) {
            return Err(Refused);
        }
        // Before the place changes: the old page is the one that holds the promise.
        self.end_promise();
        let before = self.time.lazy.msr();
        self.time.lazy.configure(value);
        // Nothing is promised before the next deadline: what stands in `pending` is no deadline that
        // anyone has set.
        if by == By::Guest
            && self.time.lazy.enabled()
            && self.on_page(|lazy, page| lazy.sync(page, 0)).is_none()
        {
            // #GP leaves everything as it was.
            self.time.lazy.configure(before);
            return Err(Refused);
        }
        // From now on the host timer's interrupt leaves the deadline to this thread, or no more.
        // Before the timer is armed again: its interrupt must find who is to look.
        self.shared.lapic.guard_deadline(self.time.lazy.enabled());
        let clock = self.clock_now();
        let op = self.shared.lapic.tsc_changed(&clock);
        self.arm_timer(op);
        Ok(())
    }

    /// IA32_TSC_DEADLINE for a VMM that saves it: the newest deadline, so that what it restores
    /// does not depend on the page.
    pub(crate) fn newest_deadline(&self) -> u64 {
        let running = self.shared.lapic.tsc_deadline();
        // The guest's newest one may be known to the page alone.
        match self.time.lazy.page() {
            Some(at) => self.time.lazy.newest(&GuestPage { memory: self.vm.memory(), at }, running),
            None => running,
        }
    }

    /// INIT: the next kernel on this vCPU knows of no page.
    pub(crate) fn forget_lazy_deadline(&mut self) {
        if self.time.lazy.enabled() {
            let _ = self.write_lazy_deadline_msr(0, By::Vmm);
        }
    }
}
