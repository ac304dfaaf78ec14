//! Addresses that no ioctl may accept.

/// An address in a hole: mapped once, then unmapped.
pub fn unmapped() -> u64 {
    const BYTES: usize = 1 << 20;
    // SAFETY: a fresh private mapping, touched by nobody and given back at once.
    unsafe {
        let hole = libc::mmap(
            std::ptr::null_mut(),
            BYTES,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        libc::munmap(hole, BYTES);
        hole as u64 + BYTES as u64 / 2
    }
}

/// An address of the kernel's half.
pub const KERNEL: u64 = 0xffff_8880_0000_0000;

/// An address of neither half.
pub const NON_CANONICAL: u64 = 0x8000_0000_0000_0000;
