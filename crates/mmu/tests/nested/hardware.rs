//! What the hardware makes of the shadow tables: the walk of NPT, every access a user's, or of EPT.

use std::sync::atomic::{AtomicU64, Ordering};

use gannet_mmu::NestedRoot;

use super::reference::Access;

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// How the hardware reads tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hardware {
    pub ept: bool,
    pub levels: u32,
    /// The EPT pointer says that the CPU sets accessed and dirty flags.
    pub flags: bool,
}

/// A page that the hardware reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Host frame of the 4 KiB that hold the address.
    pub pfn: u64,
    pub read: bool,
    pub write: bool,
    pub fetch: bool,
    pub level: u32,
}

impl Reached {
    pub fn allows(&self, access: &Access, walks_write: bool) -> bool {
        let write = access.write || access.table && walks_write;
        (access.fetch || self.read) && (!write || self.write) && (!access.fetch || self.fetch)
    }
}

fn table(hpa: u64) -> &'static [AtomicU64; 512] {
    // SAFETY: in the std port a physical address is one of this process, and the shadow tables live
    // as long as the machine under test.
    unsafe { &*(hpa as *const [AtomicU64; 512]) }
}

impl Hardware {
    /// The page at `gpa`. `access`: also sets the bits that the CPU sets.
    pub fn look(&self, root: &NestedRoot, gpa: u64, access: Option<&Access>) -> Option<Reached> {
        if gpa >> (12 + 9 * self.levels) != 0 {
            return None;
        }
        let (mut at, mut level) = (root.hpa.0, self.levels);
        let (mut rights, mut forbidden) = (7, false);
        loop {
            let word = &table(at & ADDRESS)[(gpa >> (3 + 9 * level) & 511) as usize];
            let entry = word.load(Ordering::Acquire);
            if entry & if self.ept { 7 } else { 1 } == 0 {
                return None;
            }
            rights &= entry;
            forbidden |= entry >> 63 != 0 && !self.ept;
            if level == 1 || entry & 1 << 7 != 0 {
                assert!(level <= 2, "no larger page is ever made");
                let small = (1u64 << (9 * (level - 1))) - 1;
                let pfn = (entry & ADDRESS) >> 12;
                assert_eq!(pfn & small, 0, "a large page askew");
                if self.ept {
                    assert!(entry & 3 != 2, "writable and not readable: {entry:#x}");
                    assert!(entry >> 63 == 0 && [0, 6].contains(&(entry >> 3 & 7)), "{entry:#x}");
                }
                let (a, d) = if self.ept { (8, 9) } else { (5, 6) };
                if let Some(access) = access.filter(|_| !self.ept || self.flags) {
                    word.fetch_or(1 << a | u64::from(access.write) << d, Ordering::AcqRel);
                }
                let user = self.ept || rights & 4 != 0;
                return Some(Reached {
                    pfn: pfn | gpa >> 12 & small,
                    read: rights & 1 != 0 && user,
                    write: rights & 2 != 0 && user,
                    fetch: if self.ept { rights & 4 != 0 } else { user && !forbidden },
                    level,
                });
            }
            if self.ept {
                assert_eq!(entry & 0xf8, 0, "reserved bits of a table's entry: {entry:#x}");
            }
            at = entry & ADDRESS;
            level -= 1;
        }
    }
}
