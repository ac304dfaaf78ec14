//! What the hardware makes of the shadow tables: a walk with CR0.WP and EFER.NXE set, whatever the
//! guest has.

use std::sync::atomic::{AtomicU64, Ordering};

use gannet_mmu::Root;
use x86::{Cr4, exception::pf};

const P: u64 = 1;
const W: u64 = 1 << 1;
const U: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// An access as the hardware checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub write: bool,
    pub fetch: bool,
    pub user: bool,
    pub ac: bool,
}

impl Access {
    /// All there are.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..12).map(|n| Self {
            write: n % 3 == 1,
            fetch: n % 3 == 2,
            user: n / 3 % 2 == 1,
            ac: n / 6 == 1,
        })
    }

    /// The error code of a fault with `bits`.
    pub fn code(&self, bits: u32) -> u32 {
        bits | if self.write { pf::WRITE } else { 0 }
            | if self.fetch { pf::FETCH } else { 0 }
            | if self.user { pf::USER } else { 0 }
    }
}

/// A page that the hardware reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Host frame of the 4 KiB that hold the address.
    pub pfn: u64,
    pub writable: bool,
    pub user: bool,
    pub exec: bool,
    /// Level of the leaf.
    pub level: u8,
}

fn table(hpa: u64) -> &'static [AtomicU64; 512] {
    // SAFETY: in the std port a physical address is one of this process, and the shadow tables live
    // as long as the machine under test.
    unsafe { &*(hpa as *const [AtomicU64; 512]) }
}

fn leaf_of(root: &Root, va: u64) -> Option<(&'static AtomicU64, u64, u8)> {
    let mut at = root.cr3.0;
    let mut level = root.levels;
    let mut granted = W | U;
    let mut forbidden = 0;
    if level == 3 {
        assert!(va < 1 << 32);
        let slot = (at & 0xfe0) / 8 + (va >> 30);
        let pdpte = table(at & !0xfff)[slot as usize].load(Ordering::Acquire);
        assert_eq!(pdpte & !(ADDRESS | P), 0, "reserved bits of a PDPTE");
        if pdpte & P == 0 {
            return None;
        }
        (at, level) = (pdpte & ADDRESS, 2);
    }
    loop {
        let index = (va >> (3 + 9 * u32::from(level)) & 511) as usize;
        let word = &table(at)[index];
        let entry = word.load(Ordering::Acquire);
        if entry & P == 0 {
            return None;
        }
        assert_eq!(entry & 0x7ff0_0000_0000_0000, 0, "bits reserved in PAE paging: {entry:#x}");
        granted &= entry;
        forbidden |= entry & NX;
        if level == 1 || entry & PS != 0 {
            assert!(level <= 2);
            return Some((word, (entry & !(W | U | NX)) | granted & (W | U) | forbidden, level));
        }
        word.fetch_or(A, Ordering::AcqRel);
        at = entry & ADDRESS;
        level -= 1;
    }
}

/// The page at `va`, without an access.
pub fn look(root: &Root, va: u64) -> Option<Reached> {
    let (_, entry, level) = leaf_of(root, va)?;
    let within = va >> 12 & ((1 << (9 * (u64::from(level) - 1))) - 1);
    assert_eq!(entry >> 12 & ((1 << (9 * (u64::from(level) - 1))) - 1), 0, "a large page askew");
    Some(Reached {
        pfn: (entry & ADDRESS) >> 12 | within,
        writable: entry & W != 0,
        user: entry & U != 0,
        exec: entry & NX == 0,
        level,
    })
}

/// Whether the hardware allows an access to a page it reached. `cr4`: SMEP and SMAP as it has them.
pub fn allows(page: &Reached, access: &Access, cr4: Cr4) -> bool {
    let refused = access.user && !page.user
        || access.write && !page.writable
        || access.fetch && !page.exec
        || !access.user && page.user && access.fetch && cr4.contains(Cr4::SMEP)
        || !access.user && page.user && !access.fetch && cr4.contains(Cr4::SMAP) && !access.ac;
    !refused
}

/// An access: the host frame, or the error code of the fault.
pub fn access(root: &Root, va: u64, access: &Access, cr4: Cr4) -> Result<Reached, u32> {
    let Some(page) = look(root, va) else { return Err(access.code(0)) };
    if !allows(&page, access, cr4) {
        return Err(access.code(pf::PRESENT));
    }
    let (word, _, _) = leaf_of(root, va).unwrap();
    word.fetch_or(A | if access.write { D } else { 0 }, Ordering::AcqRel);
    Ok(page)
}
