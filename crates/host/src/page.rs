//! Pages of the kernel's own: page tables, control blocks, permission maps, shared run pages.
//!
//! All memory comes zeroed and is charged to the memory cgroup of the task that asks
//! (`GFP_KERNEL_ACCOUNT`). Access goes through the kernel's direct map of physical memory.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use x86::Hpa;

use crate::error::NoMemory;
use crate::sys;

/// Where the direct map shows physical address `hpa`.
///
/// Only the address is computed; whether it may be read is the caller's business.
#[inline]
pub fn direct_map(hpa: Hpa) -> *mut u8 {
    // Wrapping: a wrong address shows when it is used, not in the sum.
    sys::direct_map_base().wrapping_add(hpa.0) as *mut u8
}

/// A page of the kernel's memory as 512 entries.
///
/// # Safety
/// `hpa` is page-aligned and the first byte of a page that came from [`Page::into_hpa`] and is not
/// freed while the result is used. Only `mmu::table` calls this.
#[inline]
pub unsafe fn table_at(hpa: Hpa) -> &'static [AtomicU64; 512] {
    // SAFETY: by the contract; atomics allow sharing with the hardware walker.
    unsafe { &*direct_map(hpa).cast::<[AtomicU64; 512]>() }
}

/// One zeroed page of 4 KiB, freed when dropped.
#[derive(Debug)]
pub struct Page {
    hpa: Hpa,
}

impl Page {
    /// A fresh page, all zero.
    pub fn zeroed() -> Result<Self, NoMemory> {
        // Physical page 0 is never given out, so 0 can say that there was no memory.
        match sys::gnt_page_alloc() {
            0 => Err(NoMemory),
            hpa => Ok(Self { hpa: Hpa(hpa) }),
        }
    }

    /// A fresh page below 4 GiB, all zero: for what the hardware reads through 32-bit registers.
    pub fn zeroed_low() -> Result<Self, NoMemory> {
        match sys::gnt_page_alloc_low() {
            0 => Err(NoMemory),
            hpa => Ok(Self { hpa: Hpa(hpa) }),
        }
    }

    /// The page's physical address.
    #[inline]
    pub fn hpa(&self) -> Hpa {
        self.hpa
    }

    /// The page's content as 512 words; atomics because hardware, user space or another CPU may share it.
    #[inline]
    pub fn table(&self) -> &[AtomicU64; 512] {
        // SAFETY: the page is owned and stays mapped in the direct map while it is.
        unsafe { &*direct_map(self.hpa).cast() }
    }

    /// The page's content as 1024 words of 32 bits, shareable like [`Page::table`].
    #[inline]
    pub fn half_words(&self) -> &[AtomicU32; 1024] {
        // SAFETY: the page is owned and stays mapped in the direct map while it is; it has 1024 such words.
        unsafe { &*direct_map(self.hpa).cast() }
    }

    /// The page's content as bytes, shareable like [`Page::table`].
    #[inline]
    pub fn bytes(&self) -> &[AtomicU8; 4096] {
        // SAFETY: the page is owned and stays mapped in the direct map while it is; it has 4096 bytes.
        unsafe { &*direct_map(self.hpa).cast() }
    }

    /// The address of its first byte, for code that knows the layout.
    #[inline]
    pub fn bytes_ptr(&self) -> *mut u8 {
        direct_map(self.hpa)
    }

    /// Gives up ownership: the page lives until [`Page::from_hpa`] takes it back.
    pub fn into_hpa(self) -> Hpa {
        // Forgotten: its Drop would free what an entry is about to point to.
        core::mem::ManuallyDrop::new(self).hpa
    }

    /// # Safety
    /// `hpa` came from [`Page::into_hpa`] and is taken back once.
    pub unsafe fn from_hpa(hpa: Hpa) -> Self {
        Self { hpa }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: owned, and freed once.
        unsafe { sys::gnt_page_free(self.hpa.0) }
    }
}

/// 2^order zeroed pages, physically contiguous, freed when dropped.
#[derive(Debug)]
pub struct Pages {
    hpa: Hpa,
    order: u32,
}

impl Pages {
    /// Fresh pages, all zero. `order` up to 10; more is refused.
    pub fn zeroed(order: u32) -> Result<Self, NoMemory> {
        // The buddy allocator's largest block; beyond it the kernel warns.
        if order > 10 {
            return Err(NoMemory);
        }
        match sys::gnt_pages_alloc(order) {
            0 => Err(NoMemory),
            hpa => Ok(Self { hpa: Hpa(hpa), order }),
        }
    }

    /// Physical address of the first page.
    #[inline]
    pub fn hpa(&self) -> Hpa {
        self.hpa
    }

    /// Bytes in all.
    #[inline]
    pub fn len(&self) -> usize {
        4096 << self.order
    }

    /// Never: there is at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The content as words.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: owned, contiguous, mapped in the direct map; atomics allow sharing.
        unsafe { core::slice::from_raw_parts(direct_map(self.hpa).cast(), self.len() / 8) }
    }

    /// The content as bytes.
    #[inline]
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: owned, contiguous, mapped in the direct map; atomics allow sharing.
        unsafe { core::slice::from_raw_parts(direct_map(self.hpa).cast(), self.len()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: owned, and freed once with the order it was allocated with.
        unsafe { sys::gnt_pages_free(self.hpa.0, self.order) }
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_page_is_zero_aligned_and_survives_being_a_number() {
        let page = Page::zeroed().unwrap();
        assert_eq!(page.hpa().0 % 4096, 0);
        assert!(page.table().iter().all(|w| w.load(Ordering::Relaxed) == 0));
        page.table()[511].store(0x1122, Ordering::Relaxed);
        let hpa = page.into_hpa();
        // SAFETY: given up just now; table_at() within the page's life.
        let (word, page) =
            unsafe { (table_at(hpa)[511].load(Ordering::Relaxed), Page::from_hpa(hpa)) };
        assert_eq!((word, page.bytes()[4088].load(Ordering::Relaxed)), (0x1122, 0x22));
    }

    #[test]
    fn many_pages_are_one_stretch() {
        let pages = Pages::zeroed(2).unwrap();
        assert_eq!((pages.len(), pages.words().len(), pages.hpa().0 % 4096), (16384, 2048, 0));
        assert!(Pages::zeroed(11).is_err());
    }
}
