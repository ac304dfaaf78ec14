//! The counters of one vCPU. Written by the thread that runs it, read by anybody.

use host::{Arc, NoMemory, once::Once};

use crate::{Counter, Histogram, REASONS, Reason};

macro_rules! counts {
    ($($(#[$doc:meta])* $variant:ident,)*) => {
        /// What is counted per vCPU beside exits by reason.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum VcpuCount {
            $($(#[$doc])* $variant,)*
        }
        /// How many counts there are.
        pub const VCPU_COUNTS: usize = [$(VcpuCount::$variant,)*].len();
    };
}

counts! {
    /// A halt whose polling found something to do.
    HaltSuccessfulPoll,
    /// A halt that polled.
    HaltAttemptedPoll,
    /// A poll that was ended by something that wakes no guest.
    HaltPollInvalid,
    /// A sleep that was ended by a waker.
    HaltWakeup,
    /// Nanoseconds polled in polls that succeeded.
    HaltPollSuccessNs,
    /// Nanoseconds polled in polls that did not.
    HaltPollFailNs,
    /// How many nanoseconds HLT slept.
    HaltWaitNs,
    /// 1 while it sleeps.
    Blocking,
    /// TDP faults that were looked at outside the loop.
    PfTaken,
    /// TDP faults that installed a translation.
    PfFixed,
    /// TDP faults that were device accesses.
    PfEmulate,
    /// TDP faults that found the translation installed already.
    PfSpurious,
    /// TDP faults that only gave back write access.
    PfFast,
    /// Device pages that were marked as such in page tables.
    PfMmioSpteCreated,
    /// Page faults that were handed to the guest (shadow paging).
    PfGuest,
    /// Flushes of this vCPU's translations.
    TlbFlush,
    /// Device accesses in memory that user space answered.
    MmioExits,
    /// Returns to user space for a signal.
    SignalExits,
    /// Returns to user space because an interrupt could be injected.
    RequestIrqExits,
    /// The inner loop was left, and the host's segment state loaded.
    HostStateReload,
    /// How many instructions were emulated.
    InsnEmulation,
    /// Instructions that could not be.
    InsnEmulationFail,
    /// Hypercalls that came as another exit.
    HypercallsByUd,
    /// Interrupts that the guest took.
    IrqInjections,
    /// How many NMIs were injected.
    NmiInjections,
    /// Requests to look for events.
    ReqEvent,
    /// Returns of KVM_RUN.
    UserExits,
    /// Writes of IA32_TSC_DEADLINE by the guest.
    TscDeadlineWrites,
    /// Times that the dynamic bits of the guest's CPUID were computed anew.
    CpuidUpdates,
    /// Entries of a guest's guest, each by an instruction of its hypervisor's.
    NestedRun,
    /// 1 while a guest's guest runs, or would if the vCPU did.
    GuestMode,
    /// What is added to the host's TSC.
    TscOffset,
    /// What the host's TSC is multiplied by, with 32 fractional bits.
    TscRatio,
}

/// A vCPU's counters.
///
/// Exits by reason come first: in each group the few reasons of a running guest share a line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct VcpuStats {
    exits: [Counter; REASONS],
    outside: [Counter; REASONS],
    counts: [Counter; VCPU_COUNTS],
    poll_success: Histogram,
    poll_fail: Histogram,
    wait: Histogram,
    /// Cycles from exit to re-entry, once somebody has asked for them.
    cycles: [Once<Histogram>; REASONS],
}

impl Default for VcpuStats {
    fn default() -> Self {
        Self::new()
    }
}

/// Which of the three histograms of halting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HaltHistogram {
    /// Polls that succeeded, ns.
    PollSuccess,
    /// Polls that did not, ns.
    PollFail,
    /// Time asleep, in nanoseconds.
    Wait,
}

impl VcpuStats {
    /// Statistics that are all zero.
    pub const fn new() -> Self {
        Self {
            exits: [const { Counter::new() }; REASONS],
            outside: [const { Counter::new() }; REASONS],
            counts: [const { Counter::new() }; VCPU_COUNTS],
            poll_success: Histogram::new(),
            poll_fail: Histogram::new(),
            wait: Histogram::new(),
            cycles: [const { Once::new() }; REASONS],
        }
    }

    /// All zero, on the heap; made there, because it is too large for the stack.
    #[inline(never)]
    pub fn shared() -> Result<Arc<Self>, NoMemory> {
        // In its place: the frame of a kernel function has no room for some kilobytes.
        Arc::make(Self::new)
    }

    /// An exit. In the inner loop the reason is a constant, and this one addition to memory.
    #[inline(always)]
    pub fn exit(&self, reason: Reason) {
        // Never out of range. For a constant reason the compiler sees it, and no compare is left.
        if let Some(counter) = self.exits.get(reason as usize) {
            counter.add(1);
        }
    }

    /// An exit that the inner loop could not answer.
    #[inline]
    pub fn outside(&self, reason: Reason) {
        if let Some(counter) = self.outside.get(reason as usize) {
            counter.add(1);
        }
    }

    /// One more of something.
    #[inline(always)]
    pub fn count(&self, what: VcpuCount) {
        self.add(what, 1);
    }

    /// `n` more of something.
    #[inline(always)]
    pub fn add(&self, what: VcpuCount, n: u64) {
        if let Some(counter) = self.counts.get(what as usize) {
            counter.add(n);
        }
    }

    /// Sets a count that is kept elsewhere, or that says how something is now.
    #[inline]
    pub fn set(&self, what: VcpuCount, value: u64) {
        if let Some(counter) = self.counts.get(what as usize) {
            counter.set(value);
        }
    }

    /// What a counter has reached.
    pub fn get(&self, what: VcpuCount) -> u64 {
        self.counts.get(what as usize).map_or(0, Counter::get)
    }

    /// One of the histograms of halting.
    pub fn halt(&self, which: HaltHistogram) -> &Histogram {
        match which {
            HaltHistogram::PollSuccess => &self.poll_success,
            HaltHistogram::PollFail => &self.poll_fail,
            HaltHistogram::Wait => &self.wait,
        }
    }

    /// Exits with this reason.
    pub fn exits_by(&self, reason: Reason) -> u64 {
        self.exits.get(reason as usize).map_or(0, Counter::get)
    }

    /// Exits with this reason that the inner loop answered. An interrupt is never answered there.
    pub fn answered_by(&self, reason: Reason) -> u64 {
        // An interrupt is taken by the host; nothing answers it for the guest.
        if reason == Reason::Interrupt {
            return 0;
        }
        // Read first: an exit is counted as one before it is counted as one for outside.
        let outside = self.outside.get(reason as usize).map_or(0, Counter::get);
        self.exits_by(reason).saturating_sub(outside)
    }

    /// Exits in all.
    pub fn exits(&self) -> u64 {
        // Wrapping, as each counter does.
        self.exits.iter().map(Counter::get).fold(0, u64::wrapping_add)
    }

    /// Makes room for the histograms of cycles. May sleep.
    pub fn prepare_cycles(&self) -> Result<(), NoMemory> {
        // A quarter of a KiB for each reason: made when somebody looks, and kept.
        for place in &self.cycles {
            // Asked first, so that a second observer allocates nothing.
            if place.get().is_none() {
                place.set(Histogram::new())?;
            }
        }
        Ok(())
    }

    fn cycles(&self, reason: Reason) -> Option<&Histogram> {
        self.cycles.get(reason as usize)?.get()
    }

    /// `cycles` passed between an exit and the next entry.
    #[inline]
    pub fn took(&self, reason: Reason, cycles: u64) {
        // Without a reader nobody has made room, and nothing is counted.
        if let Some(histogram) = self.cycles(reason) {
            histogram.count(cycles);
        }
    }

    /// A bucket of a reason's cycles.
    pub fn cycles_bucket(&self, reason: Reason, bucket: usize) -> u64 {
        self.cycles(reason).map_or(0, |histogram| histogram.bucket(bucket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_handled_outside_was_answered_inside() {
        let stats = VcpuStats::new();
        for _ in 0..5 {
            stats.exit(Reason::Io);
        }
        stats.outside(Reason::Io);
        stats.exit(Reason::Interrupt);
        assert_eq!((stats.exits(), stats.exits_by(Reason::Io)), (6, 5));
        assert_eq!(stats.answered_by(Reason::Io), 4);
        assert_eq!(stats.answered_by(Reason::Interrupt), 0);
    }

    #[test]
    fn cycles_are_counted_once_there_is_room() {
        let stats = VcpuStats::new();
        stats.took(Reason::Hlt, 100);
        assert_eq!(stats.cycles_bucket(Reason::Hlt, 7), 0);
        stats.prepare_cycles().unwrap();
        stats.prepare_cycles().unwrap();
        stats.took(Reason::Hlt, 100);
        assert_eq!(stats.cycles_bucket(Reason::Hlt, 7), 1);
        assert_eq!(stats.cycles_bucket(Reason::Cpuid, 7), 0);
    }
}
