//! Tells an emulator's plugin what to count: the marker instructions of measuring guests
//! (`bench/program.rs`), executed by this process.

/// Counting begins.
pub fn begin() {
    // SAFETY: an instruction that does nothing.
    unsafe { core::arch::asm!(".byte 0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x01") };
}

/// Counting ends.
pub fn end() {
    // SAFETY: an instruction that does nothing.
    unsafe { core::arch::asm!(".byte 0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x02") };
}
