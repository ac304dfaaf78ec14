//! Guest-physical memory.

use x86::Gpa;

/// No memory of the guest lies there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside;

/// L1's physical memory. Nothing here relies on two reads giving the same bytes.
pub trait GuestMemory {
    /// Reads the bytes at an address.
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside>;
    /// Writes bytes to an address.
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside>;

    /// Replaces eight bytes, aligned, if they are `old`. Whether they were.
    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside>;

    /// Reads one byte.
    fn read_u8(&self, at: Gpa) -> Result<u8, Outside> {
        let mut byte = [0; 1];
        self.read(at, &mut byte)?;
        Ok(byte[0])
    }

    /// Reads four bytes.
    fn read_u32(&self, at: Gpa) -> Result<u32, Outside> {
        let mut bytes = [0; 4];
        self.read(at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads eight bytes.
    fn read_u64(&self, at: Gpa) -> Result<u64, Outside> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// Whether a page-aligned address lies below the guest's physical-address width.
pub(crate) fn is_page(at: u64, physical_bits: u8) -> bool {
    at & 0xfff == 0 && is_physical(at, physical_bits)
}

/// Whether an address lies below the guest's physical-address width.
pub(crate) fn is_physical(at: u64, physical_bits: u8) -> bool {
    // A width of 64 or more would shift everything out: nothing is beyond it then.
    at.checked_shr(u32::from(physical_bits)).unwrap_or(0) == 0
}
