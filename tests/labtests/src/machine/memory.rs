//! Memory of a guest: a private mapping of ours.

use std::os::fd::{AsFd, AsRawFd};

use guest_machine::memory::{GuestBytes, NoMemory};

use crate::outcome::{Errno, Outcome, fail, skip};

pub use guest_machine::memory::PAGE;

/// A mapping. It is accessed like memory that others change, because a guest does.
pub struct Memory {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: all accesses are volatile and through raw pointers.
unsafe impl Send for Memory {}
// SAFETY: no reference into the mapping is ever made: a `&Memory` reads and writes it volatile.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.address.cast(), self.bytes) };
    }
}

impl GuestBytes for Memory {
    fn put(&self, address: u64, bytes: &[u8]) -> Result<(), NoMemory> {
        self.write_bytes(address, bytes);
        Ok(())
    }
}

impl Memory {
    /// Anonymous memory.
    pub fn new(bytes: u64) -> Outcome<Self> {
        Self::with_flags(bytes, 0)
    }

    /// Anonymous memory with more flags for mmap.
    pub fn with_flags(bytes: u64, flags: i32) -> Outcome<Self> {
        let bytes = bytes as usize;
        // SAFETY: a new mapping.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return fail(format!("cannot map {bytes:#x} bytes: {}", Errno::last()));
        }
        Ok(Self { address: address.cast(), bytes })
    }

    /// A part of a file that is memory itself, as a device's is.
    pub fn of_file(path: &str, offset: u64, bytes: u64) -> Outcome<Self> {
        let file = std::fs::File::open(path);
        let Ok(file) = file else { return skip(format!("{path}: {}", file.unwrap_err())) };
        let bytes = bytes as usize;
        let (protection, at) = (libc::PROT_READ, offset as libc::off_t);
        // SAFETY: a new mapping.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                at,
            )
        };
        if address == libc::MAP_FAILED {
            return skip(format!("{path} cannot be mapped at {offset:#x}: {}", Errno::last()));
        }
        Ok(Self { address: address.cast(), bytes })
    }

    /// The beginning of a file, `MAP_SHARED` or `MAP_PRIVATE`.
    pub fn of_descriptor(file: &impl AsFd, flags: i32, bytes: u64) -> Outcome<Self> {
        let (bytes, fd) = (bytes as usize, file.as_fd().as_raw_fd());
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd, 0) };
        if address == libc::MAP_FAILED {
            return fail(format!("cannot map {bytes:#x} bytes of a file: {}", Errno::last()));
        }
        Ok(Self { address: address.cast(), bytes })
    }

    /// Anonymous memory that begins at a multiple of 2 MiB.
    pub fn aligned(bytes: u64) -> Outcome<Self> {
        const LARGE: u64 = 2 << 20;
        let whole = Self::new(bytes + LARGE)?;
        let start = whole.hva().next_multiple_of(LARGE);
        // The rest stays mapped and untouched until the process ends.
        std::mem::forget(whole);
        Ok(Self { address: start as *mut u8, bytes: bytes as usize })
    }

    /// Where it lies in this process.
    pub fn hva(&self) -> u64 {
        self.address as u64
    }

    /// How large it is.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn at(&self, offset: u64, bytes: usize) -> *mut u8 {
        assert!(offset as usize + bytes <= self.bytes, "{offset:#x} lies outside of this memory");
        // SAFETY: inside of the mapping, as was just seen.
        unsafe { self.address.add(offset as usize) }
    }

    /// Reads 8 bytes.
    pub fn read(&self, offset: u64) -> u64 {
        // SAFETY: checked by `at`.
        unsafe { self.at(offset, 8).cast::<u64>().read_volatile() }
    }

    /// Writes 8 bytes.
    pub fn write(&self, offset: u64, value: u64) {
        // SAFETY: checked by `at`.
        unsafe { self.at(offset, 8).cast::<u64>().write_volatile(value) };
    }

    /// Reads bytes.
    pub fn read_bytes(&self, offset: u64, count: usize) -> Vec<u8> {
        let from = self.at(offset, count);
        // SAFETY: checked by `at`.
        (0..count).map(|i| unsafe { from.add(i).read_volatile() }).collect()
    }

    /// Writes bytes.
    pub fn write_bytes(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: checked by `at`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// madvise on a part.
    pub fn advise(&self, offset: u64, bytes: u64, advice: i32) -> Result<(), Errno> {
        let start = self.at(offset, bytes as usize);
        // SAFETY: our own mapping; what it holds may change, and nobody holds references.
        match unsafe { libc::madvise(start.cast(), bytes as usize, advice) } {
            0 => Ok(()),
            _ => Err(Errno::last()),
        }
    }

    /// mprotect on a part.
    pub fn protect(&self, offset: u64, bytes: u64, protection: i32) -> Result<(), Errno> {
        let start = self.at(offset, bytes as usize);
        // SAFETY: our own mapping.
        match unsafe { libc::mprotect(start.cast(), bytes as usize, protection) } {
            0 => Ok(()),
            _ => Err(Errno::last()),
        }
    }

    /// Takes a part away; this process must not touch it any more.
    pub fn unmap(&self, offset: u64, bytes: u64) {
        let start = self.at(offset, bytes as usize);
        // SAFETY: our own mapping.
        unsafe { libc::munmap(start.cast(), bytes as usize) };
    }
}
