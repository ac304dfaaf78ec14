//! Looking at nested tables and guest memory with interrupts off, without any lock.
//!
//! Withdrawing a translation changes the entry, bumps the tree's generation, and then waits until
//! every CPU inside such a section has left it; only then does the host reuse the page. So within
//! a section in which the generation read at its start is still the one under which something was
//! remembered, what was remembered holds until the section ends.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use host::page::direct_map;
use x86::Hpa;

use super::{NotSend, Table};

/// The tree as seen within one section with interrupts off. Make a new one after every exit.
#[derive(Clone, Copy)]
pub struct View<'a> {
    generation: u64,
    root: Table<'a>,
    _here: NotSend,
}

/// A 4 KiB page of guest memory, found under some generation.
#[derive(Clone, Copy, Debug)]
pub struct GuestPage {
    hpa: Hpa,
    generation: u64,
    writable: bool,
}

impl<'a> View<'a> {
    #[inline]
    pub(super) fn new(generation: u64, root: Table<'a>) -> Self {
        Self { generation, root, _here: PhantomData }
    }

    /// The root table.
    #[inline]
    pub fn root(&self) -> Table<'a> {
        self.root
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
        // SAFETY: as in load_u64().
        Some(unsafe { &*base.add(offset & 0xffc).cast::<AtomicU32>() }.load(Ordering::Relaxed))
    }

    /// Copies from the page; `false` when the range leaves it or it is of another generation.
    pub fn copy_from(&self, page: &GuestPage, offset: usize, to: &mut [u8]) -> bool {
        let Some(base) = self.base(page) else { return false };
        if offset > 4096 || to.len() > 4096 - offset {
            return false;
        }
        let at = base.wrapping_add(offset);
        // Aligned words are read whole: what the guest publishes by one store is seen so.
        match to.len() {
            8 if offset & 7 == 0 => {
                // SAFETY: as in load_u64(); aligned and within the page.
                let word = unsafe { &*at.cast::<AtomicU64>() }.load(Ordering::Relaxed);
                to.copy_from_slice(&word.to_le_bytes());
            }
            4 if offset & 3 == 0 => {
                // SAFETY: as above.
                let word = unsafe { &*at.cast::<AtomicU32>() }.load(Ordering::Relaxed);
                to.copy_from_slice(&word.to_le_bytes());
            }
            _ => {
                for (n, byte) in to.iter_mut().enumerate() {
                    // SAFETY: as above.
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
        match *from {
            [a, b, c, d, e, f, g, h] if offset & 7 == 0 => {
                let word = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
                // SAFETY: as in copy_from(); the leaf is writable, so the page may be written.
                unsafe { &*at.cast::<AtomicU64>() }.store(word, Ordering::Relaxed);
            }
            [a, b, c, d] if offset & 3 == 0 => {
                let word = u32::from_le_bytes([a, b, c, d]);
                // SAFETY: as above.
                unsafe { &*at.cast::<AtomicU32>() }.store(word, Ordering::Relaxed);
            }
            _ => {
                for (n, byte) in from.iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { &*at.add(n).cast::<AtomicU8>() }.store(*byte, Ordering::Relaxed);
                }
            }
        }
        true
    }

    /// Starts a trail in this view.
    pub fn trail(&self) -> Trail {
        Trail { generation: self.generation, ..Trail::EMPTY }
    }
}

/// The guest paging entries that a walk read, with their values, and the page it led to.
#[derive(Clone, Copy, Debug)]
pub struct Trail {
    generation: u64,
    count: u32,
    wide: bool,
    entries: [Step; Trail::MOST],
    page: Hpa,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    hpa: Hpa,
    value: u64,
}

impl Trail {
    /// Levels of a walk at most.
    pub const MOST: usize = 5;
    /// Holds for nothing: generations begin at 1.
    pub const EMPTY: Self = Self {
        generation: 0,
        count: 0,
        wide: true,
        entries: [Step { hpa: Hpa(0), value: 0 }; Self::MOST],
        page: Hpa(0),
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
        self.wide = false;
        Some(value)
    }

    fn push(&mut self, view: &View<'_>, page: &GuestPage, offset: usize, value: u64) -> Option<()> {
        if self.generation != view.generation {
            return None;
        }
        let place = self.entries.get_mut(self.count as usize)?;
        *place = Step { hpa: Hpa(page.hpa.0 | offset as u64), value };
        self.count += 1;
        Some(())
    }

    /// The page that the walk led to.
    pub fn arrive(&mut self, page: &GuestPage) {
        if page.generation == self.generation {
            self.page = page.hpa;
        } else {
            self.generation = 0;
        }
    }

    /// Whether the walk would give the same again: no translation was withdrawn since, and every
    /// entry has its value still.
    #[inline]
    pub fn holds(&self, view: &View<'_>) -> bool {
        if self.generation != view.generation {
            return false;
        }
        let steps = self.entries.iter().take(self.count as usize);
        let mut changed = 0;
        if self.wide {
            for step in steps {
                // SAFETY: pushed from a GuestPage of this generation, aligned; see load_u64().
                let word = unsafe { &*direct_map(step.hpa).cast::<AtomicU64>() };
                changed |= word.load(Ordering::Relaxed) ^ step.value;
            }
        } else {
            for step in steps {
                // SAFETY: as above.
                let word = unsafe { &*direct_map(step.hpa).cast::<AtomicU32>() };
                changed |= u64::from(word.load(Ordering::Relaxed)) ^ step.value;
            }
        }
        changed == 0
    }

    /// Up to 16 bytes from `offset` of the page, and how many of them lie in it.
    /// Only right after [`Trail::holds`] said yes in the same view; else nothing.
    #[inline]
    pub fn bytes(&self, view: &View<'_>, offset: usize) -> ([u8; 16], usize) {
        if self.generation != view.generation {
            return ([0; 16], 0);
        }
        let offset = offset & 0xfff;
        let base = direct_map(self.page);
        let word = |at: usize| {
            // SAFETY: `at` is aligned and below 4096; see load_u64().
            u128::from(unsafe { &*base.add(at).cast::<AtomicU64>() }.load(Ordering::Relaxed))
        };
        // Three aligned words hold any 16 bytes; near the page's end the last ones repeat, and
        // the length says that they do not count.
        let at = offset & !7;
        let skip = (offset & 7) as u32 * 8;
        let pair = word(at) | word((at + 8).min(4088)) << 64;
        let value =
            if skip == 0 { pair } else { pair >> skip | word((at + 16).min(4088)) << (128 - skip) };
        (value.to_le_bytes(), (4096 - offset).min(16))
    }
}
