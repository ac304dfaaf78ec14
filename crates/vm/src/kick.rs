//! The kick protocol: how a sender makes sure that a vCPU sees what it has made pending, and how a
//! vCPU that runs the guest gets by without looking.
//!
//! The vCPU disables interrupts, exchanges its mode for `IN_GUEST` and then looks. A sender first
//! makes its event visible, then adds `KICKED` to the mode and sends an IPI if the mode was plain
//! `IN_GUEST`. Both touch the mode by a read-modify-write that always writes, so one comes first:
//! if the sender's, the vCPU's exchange reads from it and the look sees the event; if the vCPU's,
//! the sender sees `IN_GUEST` and the IPI ends the guest's run. Neither needs more than
//! acquire-release order for that. `tests/kick.rs` model-checks these very functions.
//!
//! A vCPU that kicks itself without leaving, by an IPI to all or a line that it raises again, gets no
//! IPI: nothing would look, and `KICKED` keeps every later sender from sending one. So it asks
//! [`KickState::is_kicked`] behind all that may have kicked it, and leaves.

use core::sync::atomic::{
    AtomicU32,
    Ordering::{self, AcqRel, Acquire, Relaxed, Release},
};

/// A 32-bit word shared between CPUs. Production has [`AtomicU32`], the model check its double.
pub trait Word {
    /// A word that holds `value`.
    fn new(value: u32) -> Self;
    /// Loads the word.
    fn load(&self, order: Ordering) -> u32;
    /// Stores to the word.
    fn store(&self, value: u32, order: Ordering);
    /// Exchanges the word.
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Adds bits and returns what was there.
    fn fetch_or(&self, bits: u32, order: Ordering) -> u32;
}

impl Word for AtomicU32 {
    #[inline(always)]
    fn new(value: u32) -> Self {
        Self::new(value)
    }

    #[inline(always)]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline(always)]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    #[inline(always)]
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }

    #[inline(always)]
    fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        self.fetch_or(bits, order)
    }
}

const OUTSIDE: u32 = 0;
const IN_GUEST: u32 = 1;
/// Somebody has kicked since the mode was last set: an IPI is on its way, or the owner itself was it and leaves.
const KICKED: u32 = 2;

/// A vCPU's mode, where it runs, and its requests.
#[derive(Debug)]
pub struct KickState<W = AtomicU32> {
    mode: W,
    cpu: W,
    requests: W,
}

impl<W: Word> KickState<W> {
    /// Outside the guest, with these requests.
    pub fn new(requests: u32) -> Self {
        Self { mode: W::new(OUTSIDE), cpu: W::new(0), requests: W::new(requests) }
    }

    /// The owner is about to enter the guest on `cpu`; interrupts are off. What was made pending
    /// before a kick that sent no IPI is visible after this. False: it was inside already.
    #[inline]
    pub fn enter(&self, cpu: u32) -> bool {
        // Before the mode: whoever sees IN_GUEST by its exchange sees this number, or a later one.
        self.cpu.store(cpu, Relaxed);
        self.mode.swap(IN_GUEST, AcqRel) & IN_GUEST == 0
    }

    /// The owner has left the guest; interrupts are still off.
    #[inline]
    pub fn leave(&self) {
        // An exchange, too: the next entry must see what came with a kick that this wipes out and
        // that sent no IPI because an earlier one had.
        self.mode.swap(OUTSIDE, AcqRel);
    }

    /// Makes requests visible. The vCPU is not kicked.
    #[inline]
    pub fn request(&self, bits: u32) {
        self.requests.fetch_or(bits, Release);
    }

    /// Whether there is a request.
    #[inline]
    pub fn has_requests(&self) -> bool {
        self.requests.load(Acquire) != 0
    }

    /// Takes all requests.
    #[inline]
    pub fn take_requests(&self) -> u32 {
        // A load first: the word is looked at on every entry, and nearly always empty.
        if self.requests.load(Acquire) == 0 {
            return 0;
        }
        self.requests.swap(0, AcqRel)
    }

    /// After an event was made visible: the CPU that has to be interrupted, if any.
    #[inline]
    pub fn kick(&self) -> Option<u32> {
        // Only the first kicker sends the IPI: later ones know that one is on its way, or that the owner leaves.
        // Relaxed: the exchange that set IN_GUEST was read from, and the number was stored before
        // it.
        (self.mode.fetch_or(KICKED, AcqRel) == IN_GUEST).then(|| self.cpu.load(Relaxed))
    }

    /// Whether somebody has kicked since the owner entered. The owner asks behind what it did itself in the guest's
    /// mode: a kick of its own sends no IPI and keeps those of others from sending one, so it must
    /// [`leave`](Self::leave), and look.
    #[inline]
    pub fn is_kicked(&self) -> bool {
        // Its own store it sees in any case; one of another CPU comes with an IPI.
        self.mode.load(Relaxed) & KICKED != 0
    }

    /// After a request was made: the CPU on which the vCPU may run the guest without having seen
    /// it. `None`: it sees the request before it enters.
    #[inline]
    pub fn running_on(&self) -> Option<u32> {
        // Adds nothing, but writes: see the module's head.
        (self.mode.fetch_or(0, AcqRel) & IN_GUEST != 0).then(|| self.cpu.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_in_the_guest_is_interrupted_by_the_first_kick_alone() {
        let state = KickState::<AtomicU32>::new(0);
        assert_eq!((state.running_on(), state.kick()), (None, None));
        assert!(state.enter(3) && !state.enter(3), "once at a time");
        assert_eq!(state.running_on(), Some(3));
        assert_eq!((state.kick(), state.kick()), (Some(3), None));
        assert_eq!(state.running_on(), Some(3), "until it has left");
        state.leave();
        assert_eq!(state.running_on(), None);
        assert!(state.enter(4));
        assert_eq!(state.kick(), Some(4), "an old kick is forgotten");
    }

    #[test]
    fn requests_are_taken_once() {
        let state = KickState::<AtomicU32>::new(1);
        state.request(4);
        assert!(state.has_requests());
        assert_eq!((state.take_requests(), state.take_requests()), (5, 0));
        assert!(!state.has_requests());
    }
}
