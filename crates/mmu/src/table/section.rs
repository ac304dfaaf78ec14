//! The proof that a withdrawal waits for whoever looks at the tables without a lock.
//!
//! A [`View`](super::View) holds addresses of tables and of guest memory that nothing but the end of a
//! section protects. Interrupts that are off do not make a section by themselves: a withdrawal waits for
//! the vCPUs whose mode says that they are in the guest, and for no other CPU. So the proof comes from
//! whoever sets that mode, and everything that looks borrows it.

use core::marker::PhantomData;

/// This CPU is in a section, until `'s` ends. Stays on its CPU.
#[derive(Clone, Copy, Debug)]
pub struct Section<'s> {
    _here: PhantomData<(&'s (), *const ())>,
}

impl Section<'_> {
    /// The proof itself.
    ///
    /// # Safety
    /// For as long as the result lives, interrupts are off on this CPU, and a
    /// [`FlushRemote`](super::FlushRemote) of the trees that are looked at with it does not return
    /// before it is gone.
    #[inline(always)]
    pub const unsafe fn assume() -> Self {
        Self { _here: PhantomData }
    }
}
