//! From the VMM's virtual address to the host frame behind it.
//!
//! The page is at most referenced, never pinned: the caller installs the translation under the MMU
//! notifier's sequence count, which alone makes it valid, and drops what it was given at once.
//!
//! Why no reference where it can be helped: taking and dropping one is two locked instructions on a line that all CPUs
//! share for a page that many map, and a page that is referenced cannot be moved in the meantime (ADR 17). It would not
//! make the translation valid either: a page stays allocated with a reference, but need not be the VMM's any more.

use x86::{Direction, Hva, Pfn};

use crate::sys;

/// Why there is no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GupError {
    /// Nothing is mapped there, or not with that access.
    Fault,
    /// A signal arrived first.
    Interrupted,
    /// The memory is broken.
    HwPoison,
    /// Only by sleeping, which was not allowed; or another attempt may succeed.
    Again,
}

/// How hard to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Only what is mapped already; usable with interrupts off.
    Never,
    /// Fault the page in, waiting for the disk if need be; a signal ends the wait.
    Interruptible,
    /// Like `Interruptible`, where probably nothing is mapped yet: for writing the fault comes first,
    /// the look after.
    InterruptibleFresh,
    /// Fault the page in, whatever it takes short of a fatal signal.
    Killable,
}

/// A frame that the host's page table named for an address of the VMM's. Nothing but [`fault_in`] makes one,
/// so a translation can name no frame that the VMM did not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFrame {
    pfn: Pfn,
    of: FrameOf,
}

/// What a frame is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameOf {
    /// Memory: it has a `struct page` that counts references, and lies in the kernel's direct map.
    Memory,
    /// Registers or memory of a device.
    Device,
}

impl HostFrame {
    pub(crate) const fn new(pfn: Pfn, of: FrameOf) -> Self {
        Self { pfn, of }
    }

    /// The frame's number.
    #[inline]
    pub const fn pfn(self) -> Pfn {
        self.pfn
    }

    /// Whether the frame is of memory.
    #[inline]
    pub const fn is_memory(self) -> bool {
        matches!(self.of, FrameOf::Memory)
    }
}

/// A host frame, as the host's page table named it when it was looked at. Only the MMU notifier's
/// count says whether it still does.
#[derive(Debug)]
#[must_use]
pub struct HostPage {
    frame: HostFrame,
    writable: bool,
    level: u8,
    /// A reference is this value's own: it was not found by the short way.
    held: bool,
    dirty: bool,
}

/// The border's copy of a [`HostPage`]; `struct gnt_host_page` in C.
#[repr(C)]
#[derive(Default, Debug)]
pub(crate) struct RawHostPage {
    pub pfn: u64,
    pub writable: u8,
    pub refcounted: u8,
    pub level: u8,
    pub held: u8,
    pub dirty: u8,
    pub reserved: [u8; 3],
}
const _: () = assert!(size_of::<RawHostPage>() == 16);

/// Finds the frame behind `hva` in the current task's address space, to be read or written.
/// A read also reports whether writing would be allowed as it stands.
pub fn fault_in(hva: Hva, direction: Direction, patience: Patience) -> Result<HostPage, GupError> {
    let mode = match patience {
        Patience::Never => 0,
        Patience::Interruptible => 1,
        Patience::Killable => 2,
        Patience::InterruptibleFresh => 3,
    };
    // Only the first mode neither faults a page in nor waits.
    if mode != 0 {
        sys::might_sleep();
    }
    let mut raw = RawHostPage::default();
    // SAFETY: raw is writable; the kernel checks the address.
    match unsafe { sys::gnt_fault_in(hva.0, direction as i32, mode, &mut raw) } {
        0 => Ok(HostPage {
            frame: HostFrame::new(
                Pfn(raw.pfn),
                if raw.refcounted != 0 { FrameOf::Memory } else { FrameOf::Device },
            ),
            writable: raw.writable != 0,
            level: raw.level,
            held: raw.held != 0,
            dirty: raw.dirty != 0,
        }),
        2 => Err(GupError::Interrupted),
        3 => Err(GupError::HwPoison),
        4 => Err(GupError::Again),
        // Whatever else the kernel says, there is no memory to be had.
        _ => Err(GupError::Fault),
    }
}

/// The level (1, 2 or 3) at which the host's page table maps `hva` now; 1 when not mapped.
/// Only a hint unless the caller checks the notifier's sequence count afterwards.
pub fn hva_level(hva: Hva) -> u8 {
    sys::gnt_hva_level(hva.0) as u8
}

/// Tells the current thread that the guest has met broken memory at `hva`, as if it had accessed that itself
/// (SIGBUS, BUS_MCEERR_AR). The signal waits for the way to user space.
pub fn signal_poisoned(hva: Hva) {
    sys::gnt_signal_poisoned(hva.0);
}

impl HostPage {
    #[cfg(not(target_os = "none"))]
    pub(crate) const fn made_up(frame: HostFrame, level: u8, writable: bool) -> Self {
        Self { frame, writable, level, held: false, dirty: false }
    }

    /// The frame that was found.
    #[inline]
    pub fn frame(&self) -> HostFrame {
        self.frame
    }

    /// Whether the VMM's page table allows writing.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// How the host's page table maps it: 1 = 4 KiB, 2 = 2 MiB, 3 = 1 GiB.
    #[inline]
    pub fn level(&self) -> u8 {
        self.level
    }

    /// The guest may have written to the page. Without a reference of its own this is for
    /// the section in which the MMU notifier's count was found unchanged, with its lock held.
    #[inline]
    pub fn set_dirty(&self) {
        // A page that the host's table calls dirty needs no second word of it.
        if self.frame.is_memory() && !self.dirty {
            // SAFETY: a reference is held, or the MMU notifier's lock and count say that the host's mapping still holds
            // the frame; a stale frame would be marked wrongly, but its struct page is there either way.
            unsafe { sys::gnt_page_set_dirty(self.frame.pfn.0) }
        }
    }

    /// The guest may have read the page. As [`HostPage::set_dirty`].
    pub fn set_accessed(&self) {
        if self.frame.is_memory() {
            // SAFETY: a reference is held, or the host's mapping holds the frame; a stale frame would
            // be marked wrongly, but its struct page is there either way.
            unsafe { sys::gnt_page_set_accessed(self.frame.pfn.0) }
        }
    }
}

impl Drop for HostPage {
    #[inline]
    fn drop(&mut self) {
        // Only what was found with a reference gives one back; a look into the table takes none.
        if self.held {
            // SAFETY: the reference is this value's own, and dropped once.
            unsafe { sys::gnt_page_put(self.frame.pfn.0) }
        }
    }
}

/// Marks a frame dirty that was translated earlier and whose translation is being withdrawn under
/// the MMU notifier.
///
/// # Safety
/// `pfn` came from a refcounted [`HostPage`], and the notifier has not yet returned from the
/// invalidation that ends its translation: so the frame still belongs to the same mapping.
pub unsafe fn set_pfn_dirty(pfn: Pfn) {
    // SAFETY: by the contract.
    unsafe { sys::gnt_page_set_dirty(pfn.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::std_port::test;

    #[test]
    fn what_was_found_with_a_reference_gives_it_back_once() {
        test::take_put();
        let page = |held| {
            let frame = HostFrame::new(Pfn(7), FrameOf::Memory);
            HostPage { frame, writable: true, level: 1, held, dirty: false }
        };
        drop(page(false));
        assert_eq!(test::take_put(), []);
        drop(page(true));
        assert_eq!(test::take_put(), [7]);
    }

    #[test]
    fn the_frame_of_test_memory_is_its_address() {
        let memory = vec![0u8; 8192];
        let hva = Hva(memory.as_ptr() as u64);
        let page = fault_in(hva, Direction::Write, Patience::Killable).unwrap();
        assert_eq!((page.frame.pfn.0, page.writable, page.level), (hva.0 >> 12, true, 1));
        assert_eq!(
            fault_in(Hva(16), Direction::Read, Patience::Never).unwrap_err(),
            GupError::Fault
        );
    }
}
