//! Steal time: how long a vCPU wanted to run and could not. `msr.rst`, MSR_KVM_STEAL_TIME.

use x86::Gpa;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{Shared, versioned};

/// `struct kvm_steal_time`: 64 bytes, aligned to 64.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct StealPage {
    /// Nanoseconds stolen since the guest enabled it.
    pub steal: u64,
    /// Odd while `steal` changes.
    pub version: u32,
    /// Always zero: none are defined.
    pub flags: u32,
    /// Bit 0: the vCPU does not run, as another host had it; never set here. Bit 1: its TLB is to be flushed before it does.
    pub preempted: u8,
    /// Always zero: aligns what follows.
    pub u8_pad: [u8; 3],
    /// Always zero: room for more.
    pub pad: [u32; 11],
}
const _: () = assert!(size_of::<StealPage>() == 64);

/// `preempted`: another vCPU, which found it set, leaves it to the host to flush this one's TLB before it runs (`cpuid.rst`,
/// KVM_FEATURE_PV_TLB_FLUSH).
const FLUSH: u8 = 1 << 1;

const STEAL: usize = core::mem::offset_of!(StealPage, steal);
const VERSION: usize = core::mem::offset_of!(StealPage, version);
const PREEMPTED_AT: usize = core::mem::offset_of!(StealPage, preempted);

/// Steal time of one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StealTime {
    page: Option<Gpa>,
    /// The thread's time in the run queue when it was last accounted.
    last_run_delay_ns: u64,
}

/// A structure in guest memory of which bytes can be taken while other CPUs write them.
pub trait SharedTake: Shared {
    /// Replaces a byte by 0 at once; what it was.
    fn take(&self, offset: usize) -> Result<u8, Self::Error>;
}

/// The vCPU of this page runs: says so to the others. Whether one of them has left it to the host to flush its TLB. `preempted` is
/// never set here; a guest that comes from another host may have it set, and rely on it.
///
/// # Errors
/// Those of the memory.
pub fn take_flush<S: SharedTake>(shared: &S) -> Result<bool, S::Error> {
    // At once: who finds it clear sends an interrupt, and who came before is served.
    Ok(shared.take(PREEMPTED_AT)? & FLUSH != 0)
}

impl StealTime {
    /// A valid write of the MSR. Time is counted from now on: `run_delay_ns` is the thread's time
    /// in the run queue so far.
    pub fn configure(&mut self, page: Option<Gpa>, run_delay_ns: u64) {
        *self = Self { page, last_run_delay_ns: run_delay_ns };
    }

    /// Where the page is, if the guest enabled it.
    #[inline]
    pub fn page(&self) -> Option<Gpa> {
        self.page
    }

    /// Whether [`update`](Self::update) has something to say.
    #[inline]
    pub fn outdated(&self, run_delay_ns: u64) -> bool {
        self.page.is_some() && run_delay_ns != self.last_run_delay_ns
    }

    /// The thread runs again and is about to enter the guest.
    ///
    /// # Errors
    /// Those of the memory; the time is accounted at the next update then.
    pub fn update<S: Shared>(&mut self, shared: &S, run_delay_ns: u64) -> Result<(), S::Error> {
        // Wraps when another thread runs the vCPU than before, with less time to its account. Stock
        // KVM's sum steps back then, too.
        let stolen = run_delay_ns.wrapping_sub(self.last_run_delay_ns);
        versioned(shared, VERSION, || {
            let steal = shared.read_u64(STEAL)?.wrapping_add(stolen);
            shared.write(STEAL, &steal.to_le_bytes())
        })?;
        // Last: what could not be written is counted the next time.
        self.last_run_delay_ns = run_delay_ns;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_memory::Memory;

    fn page(memory: &Memory) -> StealPage {
        StealPage::read_from_bytes(&memory.bytes.borrow()).unwrap()
    }

    #[test]
    fn only_time_after_enabling_is_stolen_and_it_adds_up() {
        let (memory, mut steal) = (Memory::new(64), StealTime::default());
        steal.configure(Some(Gpa(0x40)), 1000);
        assert!(!steal.outdated(1000));
        steal.update(&memory, 1500).unwrap();
        assert_eq!((page(&memory).steal, page(&memory).version), (500, 2));
        assert!(!steal.outdated(1500) && steal.outdated(1501));
        steal.update(&memory, 1700).unwrap();
        assert_eq!((page(&memory).steal, page(&memory).version), (700, 4));
    }

    #[test]
    fn what_another_host_has_left_is_taken() {
        const PREEMPTED: u8 = 1;
        for (left, flush) in [(0, false), (PREEMPTED, false), (PREEMPTED | FLUSH, true)] {
            let memory = Memory::new(64);
            memory.write(PREEMPTED_AT, &[left]).unwrap();
            assert_eq!(take_flush(&memory).unwrap(), flush);
            assert_eq!(page(&memory).preempted, 0);
        }
    }

    #[test]
    fn time_is_not_lost_when_memory_was_out_of_reach() {
        let (memory, mut steal) = (Memory::new(64), StealTime::default());
        steal.configure(Some(Gpa(0x40)), 0);
        assert!(steal.update(&Memory::new(8), 100).is_err());
        steal.update(&memory, 150).unwrap();
        assert_eq!(page(&memory).steal, 150);
    }
}
