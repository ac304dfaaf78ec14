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
    /// [`PREEMPTED`] while the vCPU's thread does not run.
    pub preempted: u8,
    /// Always zero: aligns what follows.
    pub u8_pad: [u8; 3],
    /// Always zero: room for more.
    pub pad: [u32; 11],
}
const _: () = assert!(size_of::<StealPage>() == 64);

/// `preempted`: the vCPU is not running; do not spin for it.
pub const PREEMPTED: u8 = 1 << 0;

const STEAL: usize = core::mem::offset_of!(StealPage, steal);
const VERSION: usize = core::mem::offset_of!(StealPage, version);
const PREEMPTED_AT: usize = core::mem::offset_of!(StealPage, preempted);

/// Steal time of one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StealTime {
    page: Option<Gpa>,
    /// The thread's time in the run queue when it was last accounted.
    last_run_delay_ns: u64,
    preempted: bool,
}

impl StealTime {
    /// A valid write of the MSR. Time is counted from now on: `run_delay_ns` is the thread's time
    /// in the run queue so far.
    pub fn configure(&mut self, page: Option<Gpa>, run_delay_ns: u64) {
        *self = Self { page, last_run_delay_ns: run_delay_ns, preempted: false };
    }

    /// Where the page is, if the guest enabled it.
    #[inline]
    pub fn page(&self) -> Option<Gpa> {
        self.page
    }

    /// Whether [`update`](Self::update) has something to say.
    #[inline]
    pub fn outdated(&self, run_delay_ns: u64) -> bool {
        self.page.is_some() && (self.preempted || run_delay_ns != self.last_run_delay_ns)
    }

    /// The thread runs again and is about to enter the guest.
    ///
    /// # Errors
    /// Those of the memory; the time is accounted at the next update then.
    pub fn update<S: Shared>(&mut self, shared: &S, run_delay_ns: u64) -> Result<(), S::Error> {
        // Outside the version's window: who spins for this vCPU reads this byte alone.
        shared.write(PREEMPTED_AT, &[0])?;
        self.preempted = false;
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

    /// The thread is being scheduled out, not of its own will.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn mark_preempted<S: Shared>(&mut self, shared: &S) -> Result<(), S::Error> {
        // Asked at each time that the thread is scheduled out; the byte is there already.
        if self.preempted {
            return Ok(());
        }
        shared.write(PREEMPTED_AT, &[PREEMPTED])?;
        self.preempted = true;
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
    fn preempted_shows_from_put_to_load() {
        let (memory, mut steal) = (Memory::new(64), StealTime::default());
        steal.configure(Some(Gpa(0x40)), 0);
        steal.mark_preempted(&memory).unwrap();
        assert_eq!(page(&memory).preempted, PREEMPTED);
        assert!(steal.outdated(0));
        steal.update(&memory, 0).unwrap();
        assert_eq!(page(&memory).preempted, 0);
    }

    #[test]
    fn time_is_not_lost_when_memory_was_out_of_reach() {
        let (memory, mut steal) = (Memory::new(64), StealTime::default());
        steal.configure(Some(Gpa(0x40)), 0);
        assert!(steal.update(&Memory::new(16), 100).is_err());
        steal.update(&memory, 150).unwrap();
        assert_eq!(page(&memory).steal, 150);
    }
}
