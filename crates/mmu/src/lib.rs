//! Guest memory: memslots, TDP tables, guest page walks, code fetch on the exit path.
//!
//! Pure logic over `host`'s pages and locks. What is `unsafe` about page tables lives in
//! [`table`] alone; everything else is checked Rust.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

/// The words that CPUs share. The models of `tests/models` compile files of this crate with others in their place.
mod atomic {
    pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};
}

pub mod dirty;
pub mod fetch;
pub mod format;
pub mod grant;
pub mod last_pages;
pub mod nested;
pub mod operand;
pub mod role;
pub mod roots;
pub mod shadow;
pub mod slots;
pub mod source;
pub mod table;
pub mod tdp;
pub mod walk;

pub use dirty::{DirtyBitmap, DirtyLog, begin_anew};
pub use fetch::{CodeBytes, CodeFetch, CodeMode};
pub use format::{EptSupport, Format};
pub use last_pages::LastPages;
pub use nested::{EptOffer, L1Fault, NestedAccess, Tables};
pub use role::{AddressSpace, PagingContext, Role, Source};
pub use shadow::{
    FrameWanted, NestedFault, NestedRoot, NestedRoots, NestedSwitch, Root, RootOutcome,
    ShadowFault, ShadowGuard, ShadowMmu, ShadowRoots, Tlb,
};
pub use slots::{Change, MemSlot, MemSlots, Region, RegionLimits, SlotError, SlotFlags};
pub use table::{Section, TableCache, View};
pub use tdp::{FlushRemote, Leaf, MapOutcome, Mapping, Marks, Tdp, Wanted};
pub use walk::{Access, AccessKind, GuestMemory, Swap, Translation, WalkError, translate};
