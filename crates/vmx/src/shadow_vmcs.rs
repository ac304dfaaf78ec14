//! The page and the two bitmaps of a shadow VMCS (SDM vol. 3C §25.10); [`crate::nested`] says when it serves.

use core::sync::atomic::Ordering::Relaxed;

use host::{KBox, NoMemory, page::Page};
use nested_vmx::machine::Closed;
use x86::Direction;
use x86::vmcs::place::{BITMAP_BYTES, accesses, fill_bitmap};

use crate::{features::Features, vmcs::Vmcs};

/// Bit 31 of a region's first word: it is a shadow VMCS.
const IS_SHADOW: u32 = 1 << 31;

/// A shadow VMCS, and which fields it serves.
#[derive(Debug)]
pub(crate) struct Shadow {
    pub(crate) vmcs: Vmcs,
    pub(crate) reads: Page,
    pub(crate) writes: Page,
    /// Lines whose accesses exit though it has them.
    closed: Closed,
    /// vmcs01 uses it.
    pub(crate) serves: bool,
}

/// A bitmap with a bit clear for each field that is served.
fn bitmap(direction: Direction, features: &Features) -> Result<Page, NoMemory> {
    // Zeroed, and filled with ones below where nothing serves.
    let page = Page::zeroed()?;
    let mut bits = KBox::new([0u8; BITMAP_BYTES])?;
    fill_bitmap(&mut bits, direction, |encoding| features.has_field(encoding));
    for (to, from) in page.bytes().iter().zip(bits.iter()) {
        to.store(*from, Relaxed);
    }
    Ok(page)
}

impl Shadow {
    /// One that serves nobody yet. `None`: the CPU has none, or it is not to be used.
    #[inline(never)]
    pub(crate) fn new(features: &Features) -> Result<Option<KBox<Self>>, NoMemory> {
        // Decided once: parameters and CPU do not change.
        if !features.shadow_vmcs {
            return Ok(None);
        }
        let vmcs = Vmcs::new(features.revision | IS_SHADOW)?;
        let reads = bitmap(Direction::Read, features)?;
        let writes = bitmap(Direction::Write, features)?;
        let closed = Closed::default();
        KBox::new(Self { vmcs, reads, writes, closed, serves: false }).map(Some)
    }

    /// Has accesses exit as it is told. L1 does not run: the CPU looks into the bitmaps at L1's VMREAD and VMWRITE alone.
    #[inline]
    pub(crate) fn close(&mut self, closed: Closed) {
        if closed != self.closed {
            self.change(closed);
        }
    }

    #[cold]
    #[inline(never)]
    fn change(&mut self, closed: Closed) {
        for (direction, encoding, exits) in closed.changes(self.closed) {
            let page = if direction.is_write() { &self.writes } else { &self.reads };
            for (at, bits) in accesses(encoding) {
                if let Some(byte) = page.bytes().get(at) {
                    let others = byte.load(Relaxed) & !bits;
                    // Whoever reads them is this CPU, later.
                    byte.store(if exits { others | bits } else { others }, Relaxed);
                }
            }
        }
        self.closed = closed;
    }
}
