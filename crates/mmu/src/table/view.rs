//! Looking at TDP tables and guest memory with interrupts off, without any lock.
//!
//! Withdrawing a translation changes the entry, bumps the tree's generation, and then waits until
//! every CPU inside such a section has left it; only then does the host reuse the page. So within
//! a section in which the generation read at its start is still the one under which something was
//! remembered, what was remembered holds until the section ends.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use host::page::direct_map;
use x86::Hpa;

use super::{NotSend, Table, Trunk};
use crate::format::Format;

/// The tree as seen within one [`Section`](super::Section). Make a new one after every exit.
///
/// There is none without a section, and none outlives it:
///
/// ```compile_fail
/// # use gannet_mmu::{Format, Tdp};
/// let tdp = Tdp::new(Format::npt(4, 0), ()).unwrap();
/// let _off = gannet_host::irq::disable();
/// let view = tdp.view(); // Interrupts are off, but no withdrawal waits for us.
/// ```
#[derive(Clone, Copy)]
pub struct View<'a> {
    generation: u64,
    trunk: &'a Trunk,
    _here: NotSend,
}

/// A 4 KiB page of guest memory, found under some generation.
#[derive(Clone, Copy, Debug)]
pub struct GuestPage {
    hpa: Hpa,
    generation: u64,
    writable: bool,
}

impl GuestPage {
    /// Of no view: no tree's generation is 0.
    pub const NONE: Self = Self { hpa: Hpa(0), generation: 0, writable: false };

    /// Whether the guest itself could write there.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

impl<'a> View<'a> {
    #[inline]
    pub(super) fn new(generation: u64, trunk: &'a Trunk) -> Self {
        Self { generation, trunk, _here: PhantomData }
    }

    /// The root table.
    #[inline]
    pub fn root(&self) -> Table<'a> {
        self.trunk.top()
    }

    /// What the tree's entries are made for.
    #[inline]
    pub(crate) fn format(&self) -> &'a Format {
        &self.trunk.format
    }

    /// The generation at the section's start.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The page of a present leaf found in this view. For `tdp` alone: `hpa` is taken on trust.
    #[inline]
    pub(crate) fn page(&self, hpa: Hpa, writable: bool) -> GuestPage {
        GuestPage { hpa: Hpa(hpa.0 & !0xfff), generation: self.generation, writable }
    }

    #[inline]
    fn base(&self, page: &GuestPage) -> Option<*mut u8> {
        // Another generation: the page may have been given back since it was found.
        (page.generation == self.generation).then(|| direct_map(page.hpa))
    }

    /// The aligned 8-byte word at `offset` (its low bits are ignored). `None`: another generation.
    #[inline]
    pub fn load_u64(&self, page: &GuestPage, offset: usize) -> Option<u64> {
        let base = self.base(page)?;
        // SAFETY: the page is mapped by the direct map and belongs to the guest while this view
        // lives (see above); the offset stays within it and aligned. Atomic: the guest writes too.
        Some(unsafe { &*base.add(offset & 0xff8).cast::<AtomicU64>() }.load(Ordering::Relaxed))
    }

    /// The aligned 4-byte word at `offset`.
    #[inline]
    pub fn load_u32(&self, page: &GuestPage, offset: usize) -> Option<u32> {
        let base = self.base(page)?;
        // SAFETY: the page is mapped by the direct map and belongs to the guest while this view
        // lives (see above); the offset stays within it and aligned. Atomic: the guest writes too.
        Some(unsafe { &*base.add(offset & 0xffc).cast::<AtomicU32>() }.load(Ordering::Relaxed))
    }

    /// Whether a page found earlier may still be looked at in this view.
    #[inline]
    pub fn is_current(&self, page: &GuestPage) -> bool {
        page.generation == self.generation
    }

    /// The whole page as words. `None`: another generation.
    #[inline]
    pub fn words(&self, page: &GuestPage) -> Option<&[AtomicU64; 512]> {
        let base = self.base(page)?;
        // SAFETY: the page is mapped and the guest's while this view lives, which is borrowed for as
        // long; pages are aligned. Atomic: the guest writes too.
        Some(unsafe { &*base.cast::<[AtomicU64; 512]>() })
    }

    /// Replaces the aligned 8-byte word at `offset` if it is `old`; whether it was. `None`: of
    /// another generation, or the guest itself could not write there now.
    #[inline]
    pub fn swap_u64(&self, page: &GuestPage, offset: usize, old: u64, new: u64) -> Option<bool> {
        // Not writable for the guest, not writable for us: the log, or a copy-on-write of the
        // host's, would not hear of it.
        let base = self.base(page).filter(|_| page.writable)?;
        // SAFETY: the page is mapped and the guest's while this view lives; the offset stays within it
        // and aligned; the leaf is writable, so the page may be written.
        let word = unsafe { &*base.add(offset & 0xff8).cast::<AtomicU64>() };
        // Locked, as the CPU's own update of accessed and dirty bits: other vCPUs change the word
        // too.
        Some(word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Replaces the aligned 4-byte word at `offset` as [`Self::swap_u64`] does that of 8.
    #[inline]
    pub fn swap_u32(&self, page: &GuestPage, offset: usize, old: u32, new: u32) -> Option<bool> {
        let base = self.base(page).filter(|_| page.writable)?;
        // SAFETY: the page is mapped and the guest's while this view lives; the offset stays within it
        // and aligned; the leaf is writable, so the page may be written.
        let word = unsafe { &*base.add(offset & 0xffc).cast::<AtomicU32>() };
        Some(word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Copies from the page; `false` when the range leaves it or it is of another generation.
    pub fn copy_from(&self, page: &GuestPage, offset: usize, to: &mut [u8]) -> bool {
        let Some(base) = self.base(page) else { return false };
        // Tested without overflow: the length is the caller's and may be anything.
        if offset > 4096 || to.len() > 4096 - offset {
            return false;
        }
        let at = base.wrapping_add(offset);
        // Aligned words are read whole: what the guest publishes by one store is seen so.
        match to.len() {
            8 if offset & 7 == 0 => {
                // SAFETY: the page is mapped and the guest's while this view lives; the word is
                // aligned and within it. Atomic: the guest writes too.
                let word = unsafe { &*at.cast::<AtomicU64>() }.load(Ordering::Relaxed);
                to.copy_from_slice(&word.to_le_bytes());
            }
            4 if offset & 3 == 0 => {
                // SAFETY: the page is mapped and the guest's while this view lives; the word is
                // aligned and within it. Atomic: the guest writes too.
                let word = unsafe { &*at.cast::<AtomicU32>() }.load(Ordering::Relaxed);
                to.copy_from_slice(&word.to_le_bytes());
            }
            len if (offset | len) & 7 == 0 => {
                for (n, bytes) in to.chunks_exact_mut(8).enumerate() {
                    // SAFETY: the page is mapped and the guest's while this view lives; the word is
                    // aligned and within it. Atomic: the guest writes too.
                    let word = unsafe { &*at.cast::<AtomicU64>().add(n) }.load(Ordering::Relaxed);
                    bytes.copy_from_slice(&word.to_le_bytes());
                }
            }
            _ => {
                for (n, byte) in to.iter_mut().enumerate() {
                    // SAFETY: the page is mapped and the guest's while this view lives; the byte
                    // is within it. Atomic: the guest writes too.
                    *byte = unsafe { &*at.add(n).cast::<AtomicU8>() }.load(Ordering::Relaxed);
                }
            }
        }
        true
    }

    /// Copies to the page; `false` when the range leaves it, the guest itself could not write
    /// there (read-only slot, dirty log), or it is of another generation.
    pub fn copy_to(&self, page: &GuestPage, offset: usize, from: &[u8]) -> bool {
        let Some(base) = self.base(page) else { return false };
        if !page.writable || offset > 4096 || from.len() > 4096 - offset {
            return false;
        }
        let at = base.wrapping_add(offset);
        // Release: a guest that sees one store sees those before it, as it would of another CPU (`pv::Shared`).
        match *from {
            [a, b, c, d, e, f, g, h] if offset & 7 == 0 => {
                let word = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
                // SAFETY: the page is mapped and the guest's while this view lives; the word is
                // aligned and within it; the leaf is writable, so the page may be written.
                unsafe { &*at.cast::<AtomicU64>() }.store(word, Ordering::Release);
            }
            [a, b, c, d] if offset & 3 == 0 => {
                let word = u32::from_le_bytes([a, b, c, d]);
                // SAFETY: the page is mapped and the guest's while this view lives; the word is
                // aligned and within it; the leaf is writable, so the page may be written.
                unsafe { &*at.cast::<AtomicU32>() }.store(word, Ordering::Release);
            }
            _ if (offset | from.len()) & 7 == 0 => {
                for (n, bytes) in from.as_chunks::<8>().0.iter().enumerate() {
                    let word = u64::from_le_bytes(*bytes);
                    // SAFETY: the page is mapped and the guest's while this view lives; the word is
                    // aligned and within it; the leaf is writable, so the page may be written.
                    unsafe { &*at.cast::<AtomicU64>().add(n) }.store(word, Ordering::Release);
                }
            }
            _ => {
                for (n, byte) in from.iter().enumerate() {
                    // SAFETY: the page is mapped and the guest's while this view lives; the byte
                    // is within it; the leaf is writable, so the page may be written.
                    unsafe { &*at.add(n).cast::<AtomicU8>() }.store(*byte, Ordering::Release);
                }
            }
        }
        true
    }

    /// Starts a trail in this view.
    pub fn trail(&self) -> Trail {
        Trail { begun: self.generation, ..Trail::EMPTY }
    }
}

/// Stands in for the steps that a walk did not take, so that checking needs no loop.
static NO_STEP: AtomicU64 = AtomicU64::new(0);

/// The guest paging entries that a walk read, with their values, and the page it led to.
#[derive(Clone, Copy, Debug)]
pub struct Trail {
    /// The generation of the view it was begun in.
    begun: u64,
    /// The generation of `begun`, once the walk has arrived; before that 0, which no view has.
    generation: u64,
    /// Equal to `generation` if the walk had the common shape: at most four entries, of 8 bytes. Else 0.
    plain_generation: u64,
    entries: [Step; Trail::MOST],
    page: *const AtomicU64,
    count: u32,
    /// Entries are 4 bytes (32-bit paging).
    narrow: bool,
    /// At most four entries, of 8 bytes: the common shape.
    plain: bool,
}

// SAFETY: the pointers are addresses of the direct map, the same on every CPU; they are followed
// only in a View's section and under the generation they were noted in.
unsafe impl Send for Trail {}
// SAFETY: by reference too the pointers are followed only in a View's section and under the
// generation they were noted in, and what they point to is accessed atomically.
unsafe impl Sync for Trail {}

#[derive(Clone, Copy, Debug)]
struct Step {
    /// A page-table entry in the direct map, or NO_STEP.
    at: *const AtomicU64,
    value: u64,
}

impl Trail {
    /// Levels of a walk at most.
    pub const MOST: usize = 5;
    /// Holds for nothing: no tree's generation is 0.
    pub const EMPTY: Self = Self {
        begun: 0,
        generation: 0,
        plain_generation: 0,
        entries: [Step { at: &raw const NO_STEP, value: 0 }; Self::MOST],
        page: &raw const NO_STEP,
        count: 0,
        narrow: false,
        plain: true,
    };

    /// Loads an 8-byte entry and remembers it. `None`: too many steps, or not of this view.
    pub fn step_u64(&mut self, view: &View<'_>, page: &GuestPage, offset: usize) -> Option<u64> {
        let value = view.load_u64(page, offset)?;
        self.push(view, page, offset & 0xff8, value)?;
        Some(value)
    }

    /// Loads a 4-byte entry (32-bit paging) and remembers it.
    pub fn step_u32(&mut self, view: &View<'_>, page: &GuestPage, offset: usize) -> Option<u32> {
        let value = view.load_u32(page, offset)?;
        self.push(view, page, offset & 0xffc, u64::from(value))?;
        (self.narrow, self.plain) = (true, false);
        Some(value)
    }

    fn push(&mut self, view: &View<'_>, page: &GuestPage, offset: usize, value: u64) -> Option<()> {
        // A trail is of one view: entries of two moments do not make a walk.
        if self.begun != view.generation || self.generation != 0 {
            return None;
        }
        let at = view.base(page)?.wrapping_add(offset).cast_const().cast();
        // A sixth entry makes the walk fail: what is not noted could not be compared.
        *self.entries.get_mut(self.count as usize)? = Step { at, value };
        self.count += 1;
        // plain_place() compares four entries and no loop, so five levels are not for it.
        self.plain &= self.count <= 4;
        Some(())
    }

    /// The page that the walk led to. A page of another view makes the trail hold for nothing.
    pub fn arrive(&mut self, view: &View<'_>, page: &GuestPage) {
        match view.base(page) {
            Some(base) if self.begun == view.generation => {
                self.generation = self.begun;
                self.plain_generation = if self.plain { self.begun } else { 0 };
                self.page = base.cast_const().cast();
            }
            _ => *self = Self::EMPTY,
        }
    }

    /// The eight bytes from `offset` of the page, if the walk would give the same again (no translation was
    /// withdrawn since, and the first four entries have their values still). `None` also for 32-bit
    /// paging, five levels, and within the page's last bytes: [`Trail::bytes`] serves these.
    #[inline(always)]
    pub fn first_bytes(&self, view: &View<'_>, offset: usize) -> Option<u64> {
        let at = self.plain_place::<8>(view, offset)?;
        // SAFETY: 8 bytes of the page from there on; see plain_place().
        // Volatile: the guest writes beside us, and may tear what is read; any bytes will do.
        let bytes = unsafe { at.cast::<Unaligned<u64>>().read_volatile() };
        Some(u64::from_le(bytes.0))
    }

    /// Sixteen bytes, on the conditions of [`Trail::first_bytes`].
    #[inline(always)]
    pub fn bytes_plain(&self, view: &View<'_>, offset: usize) -> Option<[u8; 16]> {
        let at = self.plain_place::<16>(view, offset)?;
        // SAFETY: 16 bytes of the page from there on, which the view keeps; volatile, because the guest may write
        // them meanwhile.
        let bytes = unsafe { at.cast::<Unaligned<u128>>().read_volatile() };
        Some(bytes.0.to_ne_bytes())
    }

    /// Where `SIZE` bytes from `offset` lie, all in the page that arrive() noted with this generation.
    #[inline(always)]
    fn plain_place<const SIZE: usize>(
        &self,
        view: &View<'_>,
        offset: usize,
    ) -> Option<*const AtomicU64> {
        let offset = offset & 0xfff;
        // The bytes must not run into the next page, whose frame may be anyone's.
        if self.plain_generation != view.generation || offset > 4096 - SIZE {
            return None;
        }
        // All are loaded before one branch: a comparison at each level would be a chain of them on
        // each exit.
        let mut changed = 0;
        for step in self.entries.iter().take(4) {
            // SAFETY: pushed by step_u64() from a GuestPage of this generation, aligned (see
            // load_u64()), as the trail is plain; or NO_STEP.
            changed |= unsafe { &*step.at }.load(Ordering::Relaxed) ^ step.value;
        }
        (changed == 0).then(|| self.page.wrapping_byte_add(offset))
    }

    /// Up to 16 bytes from `offset` of the page, and how many lie in it, if the walk would give the same again:
    /// [`Trail::first_bytes`] for every shape of walk.
    pub fn bytes(&self, view: &View<'_>, offset: usize) -> Option<([u8; 16], usize)> {
        // The generation first: only under it may the entries' addresses be followed.
        if self.generation != view.generation || self.changed() != 0 {
            return None;
        }
        Some(self.copy(offset & 0xfff))
    }

    fn changed(&self) -> u64 {
        self.entries.iter().take(self.count as usize).fold(0, |changed, step| {
            // SAFETY: the generation is the view's, so the entries are in pages that belong to the guest
            // while it lives; 4 bytes of the same page when narrow.
            let now = unsafe {
                if self.narrow {
                    u64::from((*step.at.cast::<AtomicU32>()).load(Ordering::Relaxed))
                } else {
                    (*step.at).load(Ordering::Relaxed)
                }
            };
            changed | (now ^ step.value)
        })
    }

    /// Up to 16 bytes, as far as the page goes. The generation was compared.
    fn copy(&self, offset: usize) -> ([u8; 16], usize) {
        let mut bytes = [0; 16];
        // What lies behind the page is another frame.
        let len = 4096usize.saturating_sub(offset).min(16);
        for (n, byte) in bytes.iter_mut().enumerate().take(len) {
            // SAFETY: offset + n is below 4096, so the byte is the page's, which the view keeps; atomic, because the guest
            // may write it meanwhile.
            let at = unsafe { &*self.page.byte_add(offset + n).cast::<AtomicU8>() };
            *byte = at.load(Ordering::Relaxed);
        }
        (bytes, len)
    }
}

/// A word at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T>(T);
