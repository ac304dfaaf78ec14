//! Sections of tests that have no vCPU.

use gannet_mmu::Section;

/// Does `work` in a section of this thread's.
pub fn section<T>(work: impl FnOnce(Section<'_>) -> T) -> T {
    let _off = host::irq::disable();
    // SAFETY: interrupts are off, and whoever withdraws in these tests does it in this thread, outside of
    // here, or waits.
    work(unsafe { Section::assume() })
}
