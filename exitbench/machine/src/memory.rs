//! Guest memory, as far as tables are written into it.

use std::fmt;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Size of a page, in bytes.
pub const PAGE: u64 = 4096;

/// There is no memory at this guest-physical address.
#[derive(Debug, PartialEq, Eq)]
pub struct NoMemory(pub u64);

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no guest memory at {:#x}", self.0)
    }
}

impl std::error::Error for NoMemory {}

/// Memory of a guest, written before the guest runs.
pub trait GuestBytes {
    /// Writes bytes at a guest-physical address.
    fn put(&self, address: u64, bytes: &[u8]) -> Result<(), NoMemory>;

    /// Writes words of 8 bytes, one behind the other.
    fn put_words(&self, address: u64, words: &[u64]) -> Result<(), NoMemory> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.put(address, &bytes)
    }
}

impl GuestBytes for GuestMemoryMmap<()> {
    fn put(&self, address: u64, bytes: &[u8]) -> Result<(), NoMemory> {
        self.write_slice(bytes, GuestAddress(address)).map_err(|_| NoMemory(address))
    }
}
