//! A set of 256 vectors, as IRR, ISR and TMR are. A sender on another CPU may set bits at any
//! time, so there are locked operations for shared sets and plain ones for those that only the
//! owner changes.

use host::GuestIndex;
use x86::apic::VectorWords;

use crate::atomic::{AtomicU64, Ordering::*};

/// 256 bits in four words.
#[derive(Default)]
#[repr(C)]
pub(super) struct VectorSet([AtomicU64; 4]);

impl VectorSet {
    #[inline]
    fn word(&self, vector: u8) -> &AtomicU64 {
        // A vector has two bits above the six within a word, so the index is always in bounds and
        // the compiler sees it.
        &self.0[usize::from(vector >> 6)]
    }

    #[inline]
    fn bit(vector: u8) -> u64 {
        1 << (vector & 63)
    }

    #[inline]
    pub(super) fn test(&self, vector: u8) -> bool {
        self.word(vector).load(Relaxed) & Self::bit(vector) != 0
    }

    /// Sets a bit against other writers; true when it was clear.
    #[inline]
    pub(super) fn set_shared(&self, vector: u8) -> bool {
        let bit = Self::bit(vector);
        // SeqCst: the order against the hint and the timer's words is what keeps an interrupt from
        // being lost.
        self.word(vector).fetch_or(bit, SeqCst) & bit == 0
    }

    /// Clears a bit against other writers.
    #[inline]
    pub(super) fn clear_shared(&self, vector: u8) {
        self.word(vector).fetch_and(!Self::bit(vector), SeqCst);
    }

    /// Sets a bit of a set that only the caller changes: no locked instruction.
    #[inline]
    pub(super) fn set_owned(&self, vector: u8) {
        let word = self.word(vector);
        word.store(word.load(Relaxed) | Self::bit(vector), Relaxed);
    }

    /// Clears a bit of a set that only the caller changes.
    #[inline]
    pub(super) fn clear_owned(&self, vector: u8) {
        let word = self.word(vector);
        word.store(word.load(Relaxed) & !Self::bit(vector), Relaxed);
    }

    /// The highest member; zero when there is none (vector 0 is never a member that counts).
    #[inline]
    pub(super) fn highest(&self) -> u8 {
        let [w0, w1, w2, w3] = &self.0;
        for (word, base) in [(w3, 192u8), (w2, 128), (w1, 64), (w0, 0)] {
            // SeqCst: a look that comes after the hint was dropped must not be made before it. On
            // x86 a plain load.
            let bits = word.load(SeqCst);
            // From the top: the highest word that has any decides.
            if bits != 0 {
                return base | (63 - bits.leading_zeros() as u8);
            }
        }
        0
    }

    /// Whether there is a member.
    #[inline]
    pub(super) fn any(&self) -> bool {
        // SeqCst for the same reason as in highest().
        self.0.iter().any(|word| word.load(SeqCst) != 0)
    }

    /// Takes all members out against other writers: a locked instruction for each word that has
    /// some.
    #[inline]
    pub(super) fn take_shared(&self) -> VectorWords {
        let [w0, w1, w2, w3] = &self.0;
        [w0, w1, w2, w3].map(|word| match word.load(SeqCst) {
            0 => 0,
            // Exchanged and not cleared: what a sender adds after the load is taken along.
            _ => word.swap(0, SeqCst),
        })
    }

    /// Adds members against other writers.
    pub(super) fn add_shared(&self, members: &VectorWords) {
        for (word, more) in self.0.iter().zip(members) {
            // All four words, empty or not: this is done when a CPU gives the APIC back, not on the
            // exit path.
            word.fetch_or(*more, SeqCst);
        }
    }

    /// The vectors in the set, 32 a word.
    #[inline]
    pub(super) fn words(&self) -> VectorWords {
        let [w0, w1, w2, w3] = &self.0;
        [w0, w1, w2, w3].map(|word| word.load(Relaxed))
    }

    /// Replaces all members of a set that only the caller changes.
    pub(super) fn replace_owned(&self, members: &VectorWords) {
        for (word, value) in self.0.iter().zip(members) {
            word.store(*value, Relaxed);
        }
    }

    pub(super) fn clear(&self) {
        for word in &self.0 {
            // What a sender puts in meanwhile goes too: an APIC that is reset drops what it has.
            word.store(0, SeqCst);
        }
    }

    /// The 32-bit register number `index` (0 to 7) of the eight that show this set.
    pub(super) fn register(&self, index: u32) -> u32 {
        match GuestIndex::from(index >> 1).of(&self.0) {
            Some(word) => (word.load(Relaxed) >> ((index & 1) * 32)) as u32,
            None => 0,
        }
    }

    /// Replaces the 32-bit register number `index`; for restoring a saved state.
    pub(super) fn set_register(&self, index: u32, value: u32) {
        if let Some(word) = GuestIndex::from(index >> 1).of(&self.0) {
            let shift = (index & 1) * 32;
            // Not against senders: a VMM that restores while devices interrupt may lose what comes
            // in between.
            let kept = word.load(Relaxed) & !(0xffff_ffff << shift);
            word.store(kept | u64::from(value) << shift, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_is_found_in_every_word() {
        let set = VectorSet::default();
        assert_eq!(set.highest(), 0);
        for vector in [16, 63, 64, 127, 128, 191, 192, 255] {
            assert!(set.set_shared(vector));
            assert!(!set.set_shared(vector));
            assert_eq!(set.highest(), vector);
        }
        for vector in [255, 192, 191, 128, 127, 64, 63] {
            set.clear_shared(vector);
            assert!(set.highest() < vector);
        }
        assert!(set.any());
        set.clear_owned(16);
        assert!(!set.any());
    }

    #[test]
    fn registers_show_thirty_two_vectors_each() {
        let set = VectorSet::default();
        set.set_owned(0x21);
        set.set_owned(0xff);
        assert_eq!(set.register(1), 2);
        assert_eq!(set.register(7), 1 << 31);
        set.set_register(2, 0x8000_0001);
        assert!(set.test(64) && set.test(95));
        assert_eq!(set.register(3), 0);
        assert_eq!(set.register(8), 0);
    }
}
