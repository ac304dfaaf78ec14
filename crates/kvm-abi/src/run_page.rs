//! The page shared with a vCPU's VMM, word by word.
//!
//! User space may write to it at any moment. So nothing is ever borrowed from it: each word is
//! loaded once, and stored whole. No word of ours holds a byte that is user space's to write, hence
//! no store of ours can undo one of theirs (KVM API §5).

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zerocopy::{FromBytes, Immutable, IntoBytes};

// Behind a head of 32 bytes and a union of 256 (KVM API §5).
const VALID_REGS: usize = 36;
const DIRTY_REGS: usize = 37;

/// First word of the shared general registers.
pub const SYNC_REGS: usize = 38;
/// First word of the shared system registers.
pub const SYNC_SREGS: usize = 56;
/// First word of the shared events.
pub const SYNC_EVENTS: usize = 95;

/// Accessor of a page of a vCPU's mapping: the first, with [`KvmRun`], or the second, with the data
/// of port I/O.
#[derive(Clone, Copy)]
pub struct RunPage<'a>(&'a [AtomicU64; 512]);

impl core::fmt::Debug for RunPage<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "RunPage({:p})", self.0)
    }
}

impl<'a> RunPage<'a> {
    /// The page with these words.
    pub const fn new(words: &'a [AtomicU64; 512]) -> Self {
        Self(words)
    }

    #[inline]
    pub(crate) fn load(&self, index: usize) -> u64 {
        // Relaxed: the VMM's thread wrote before its system call. What another thread writes
        // meanwhile is ordered with nothing, and is taken or not.
        self.0.get(index).map_or(0, |word| word.load(Relaxed))
    }

    #[inline]
    pub(crate) fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.0.get(index) {
            // Relaxed: the VMM reads after its system call has returned.
            word.store(value, Relaxed);
        }
    }

    /// The first 8 bytes of the page, where the data of port I/O lies.
    #[inline]
    pub fn first(&self) -> [u8; 8] {
        self.load(0).to_le_bytes()
    }

    /// The first bytes of the page, as many as `into` takes: the data of a string instruction.
    pub fn read_bytes(&self, into: &mut [u8]) {
        // Word by word through load(): no slice of bytes is ever made of a page that others write.
        for (index, part) in into.chunks_mut(8).enumerate() {
            for (to, from) in part.iter_mut().zip(self.load(index).to_le_bytes()) {
                *to = from;
            }
        }
    }

    /// Sets the first 8 bytes of the page, where the data of port I/O lies.
    #[inline]
    pub fn set_first(&self, bytes: [u8; 8]) {
        self.store(0, u64::from_le_bytes(bytes));
    }

    /// Register classes that the VMM wants to see and those it changed (KVM_CAP_SYNC_REGS).
    #[inline]
    pub fn shared_registers(&self) -> (u64, u64) {
        (self.load(VALID_REGS), self.load(DIRTY_REGS))
    }

    /// Tells that the changed registers of a class were taken.
    pub fn clear_dirty_registers(&self, class: u64) {
        // Read again, so that classes which another thread has marked meanwhile stay marked.
        self.store(DIRTY_REGS, self.load(DIRTY_REGS) & !class);
    }

    /// The structure at word `index`, for the shared registers.
    pub fn read<T: FromBytes + IntoBytes>(&self, index: usize) -> T {
        let mut value = T::new_zeroed();
        // The shared structures are whole words; a shorter tail would be left out.
        for (offset, bytes) in value.as_mut_bytes().chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&self.load(index.wrapping_add(offset)).to_le_bytes());
        }
        value
    }

    /// Puts a structure at word `index`, for the shared registers.
    pub fn write<T: IntoBytes + Immutable>(&self, index: usize, value: &T) {
        for (offset, bytes) in value.as_bytes().chunks_exact(8).enumerate() {
            if let Ok(bytes) = bytes.try_into() {
                self.store(index.wrapping_add(offset), u64::from_le_bytes(bytes));
            }
        }
    }
}
