//! The pages of guest memory that software looked at last, for who looks at the same ones at each exit: an L1's map of MSRs and its
//! virtual-APIC page.
//!
//! They are found without a walk of the tables as long as they are of the view's generation. What was withdrawn or protected since is of
//! another, and so is the memory of the other mode: no generation is met twice. What has become writable since is not: who writes looks
//! again at a page that was found read-only.

use core::cell::Cell;

use x86::{Gfn, Gpa};

use crate::{
    table::{GuestPage, View},
    tdp::page_of,
};

/// The two pages that were looked at last.
#[derive(Debug)]
pub struct LastPages {
    first: Cell<(Gfn, GuestPage)>,
    second: Cell<(Gfn, GuestPage)>,
}

impl Default for LastPages {
    fn default() -> Self {
        Self::new()
    }
}

impl LastPages {
    /// No page was looked at yet.
    pub const fn new() -> Self {
        const NONE: (Gfn, GuestPage) = (Gfn(0), GuestPage::NONE);
        Self { first: Cell::new(NONE), second: Cell::new(NONE) }
    }

    /// The page at `at`, if it is one of them. The tables are not looked at.
    #[inline]
    pub fn known(&self, view: &View<'_>, at: Gpa) -> Option<GuestPage> {
        let is = |(gfn, page): (Gfn, GuestPage)| {
            (gfn == at.gfn() && view.is_current(&page)).then_some(page)
        };
        is(self.first.get()).or_else(|| is(self.second.get()))
    }

    /// The page at `at`, which is one of them from now on. `None` as by [`page_of`].
    #[inline]
    pub fn find(&self, view: &View<'_>, at: Gpa) -> Option<GuestPage> {
        match self.known(view, at) {
            Some(page) => Some(page),
            None => self.look_for(view, at),
        }
    }

    /// The page at `at`, to be written if the guest itself could write there now. `None` as by [`page_of`].
    #[inline]
    pub fn find_to_write(&self, view: &View<'_>, at: Gpa) -> Option<GuestPage> {
        match self.known(view, at) {
            Some(page) if page.is_writable() => Some(page),
            // A fault that gives write access back withdraws nothing, so that the generation says nothing of it.
            _ => self.look_for(view, at),
        }
    }

    #[inline(never)]
    fn look_for(&self, view: &View<'_>, at: Gpa) -> Option<GuestPage> {
        let page = page_of(view, at)?;
        let (gfn, was) = self.first.replace((at.gfn(), page));
        // The older of the two goes, but what is looked at again takes no second place.
        if gfn != at.gfn() || !view.is_current(&was) {
            self.second.set((gfn, was));
        }
        Some(page)
    }
}
