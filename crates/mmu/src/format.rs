//! How an entry of a TDP table spells what the tree means by it.
//!
//! Two formats: AMD's NPT, which is the ordinary long-mode format (APM vol. 2 §15.25.5),
//! and Intel's EPT (SDM vol. 3 §29.3.2). Which one a tree has is data, chosen when it is made, so
//! that nothing above it is generic. *Reading* an entry is the same in both, with constants: a
//! TDP walk on AMD is a user access, so every entry there has bit 2 set and may be executed
//! unless bit 63 says no; EPT's bit 2 is the right to execute, and bit 63 is never set by us; and no
//! EPT entry is ever made that allows less than reading. Only *making* entries and the accessed and
//! dirty bits differ. Bits 52 to 55 are software's in both.

use x86::Hpa;
use x86::paging::{ept, pte};

use crate::grant::Grant;

/// Bits 51:12 of an entry: a physical address.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The entry points to a table that the tree owns. Set and read by `table` alone.
pub(crate) const TABLE: u64 = 1 << 52;
/// The entry pointed to a table that waits for a flush to be freed.
pub(crate) const REMOVED: u64 = 1 << 53;
/// The host's page table lets the page be written; only the dirty log forbids it here.
pub(crate) const HOST_WRITABLE: u64 = 1 << 54;
/// The page is not in the kernel's direct map: device memory or the like.
pub(crate) const NO_DIRECT_MAP: u64 = 1 << 55;
/// In an entry that points to a table: a large page would stand there, were it not for an instruction
/// fetch.
pub(crate) const SPLIT_FOR_FETCH: u64 = 1 << 54;

/// The guest may write, in both formats.
pub const WRITABLE: u64 = 1 << 1;
const PRESENT: u64 = 1 << 0;
const EXEC: u64 = 1 << 2;
const NO_EXEC: u64 = 1 << 63;
const LARGE: u64 = 1 << 7;

const _: () = {
    assert!(PRESENT == pte::PRESENT && PRESENT == ept::READ);
    assert!(WRITABLE == pte::WRITABLE && WRITABLE == ept::WRITE);
    assert!(EXEC == pte::USER && EXEC == ept::EXECUTE);
    assert!(NO_EXEC == pte::NX);
    assert!(LARGE == pte::LARGE && LARGE == ept::LARGE);
};

/// Permissions and state of a leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeafBits {
    /// The guest may write.
    pub writable: bool,
    /// The guest may fetch instructions.
    pub exec: bool,
    /// Ordinary memory in the kernel's direct map.
    pub direct: bool,
    /// The leaf is born accessed.
    pub accessed: bool,
    /// The leaf is born dirty.
    pub dirty: bool,
}

/// What a CPU has of EPT beyond four levels and write-back tables (IA32_VMX_EPT_VPID_CAP, SDM vol. 3
/// appendix A.10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EptSupport {
    /// Leaves of 2 MiB.
    pub pages_2m: bool,
    /// Leaves of 1 GiB.
    pub pages_1g: bool,
    /// Accessed and dirty flags; the EPT pointer turns them on.
    pub accessed_dirty: bool,
    /// Page-modification logging: the CPU notes the pages whose dirty flag it sets (SDM vol. 3
    /// §29.3.6).
    pub page_log: bool,
}

/// The spelling of the entries of one tree, and its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Every leaf, without what depends on the page.
    leaf: u64,
    exec: u64,
    no_exec: u64,
    /// Ordinary memory: memory type, encryption.
    direct: u64,
    /// Memory outside the direct map.
    device: u64,
    /// Every entry that points to a table.
    table: u64,
    /// Set by the CPU on access and on writing; both 0 where it does not.
    accessed: u64,
    dirty: u64,
    /// The dirty log asks the CPU which pages were written, and does not make them read-only.
    logs: bool,
    /// Levels of the tree: 4 or 5.
    levels: u8,
    /// The largest leaf: 1 = 4 KiB, 2 = 2 MiB, 3 = 1 GiB.
    largest: u8,
    /// Large leaves are not executable: a fetch makes them small.
    splits_at_fetch: bool,
    /// Part of every address of ordinary memory: the host's SME bit, or 0.
    encryption: u64,
    /// The permissions of a leaf that stands for an entry of the guest's, by [`Grant`]: shadow pages make
    /// leaves of all eight kinds, a tree of TDP tables of few.
    grants: [u64; 8],
}

impl Format {
    /// AMD TDP. NPT follows the host: `levels` is 5 when the host runs with CR4.LA57, else
    /// 4 (APM vol. 2 §15.25.3). `encryption`: the host's SME bit, or 0.
    pub const fn npt(levels: u8, encryption: u64) -> Self {
        let encryption = encryption & ADDRESS;
        Self {
            // USER in each: the CPU takes every nested walk for an access of CPL 3.
            leaf: pte::PRESENT | pte::USER,
            exec: 0,
            no_exec: pte::NX,
            direct: encryption,
            // Device memory is never encrypted.
            device: 0,
            // Accessed from the start: the walker need not come back to set it.
            table: pte::PRESENT | pte::WRITABLE | pte::USER | pte::ACCESSED | encryption,
            accessed: pte::ACCESSED,
            dirty: pte::DIRTY,
            logs: false,
            levels: if levels == 5 { 5 } else { 4 },
            largest: 3,
            splits_at_fetch: false,
            encryption,
            grants: X86_GRANTS,
        }
    }

    /// EPT with four levels, as far as this CPU has it.
    ///
    /// RAM is write-back whatever the guest's PAT says, as without assigned devices; what the host
    /// does not map as memory is uncacheable.
    pub const fn ept(cpu: EptSupport) -> Self {
        let tracks = cpu.accessed_dirty;
        Self {
            leaf: ept::READ,
            exec: ept::EXECUTE,
            no_exec: 0,
            // IGNORE_PAT: a guest with UC in its PAT would else have uncached RAM, incoherent with
            // the kernel's own write-back mapping of the page.
            direct: (ept::WRITE_BACK << ept::MEMORY_TYPE_SHIFT) | ept::IGNORE_PAT,
            device: ept::UNCACHEABLE << ept::MEMORY_TYPE_SHIFT,
            table: ept::READ | ept::WRITE | ept::EXECUTE | if tracks { ept::ACCESSED } else { 0 },
            accessed: if tracks { ept::ACCESSED } else { 0 },
            dirty: if tracks { ept::DIRTY } else { 0 },
            // PML is of no use without dirty flags: the CPU logs when it sets one (SDM vol. 3C
            // §29.3.6).
            logs: tracks && cpu.page_log,
            levels: 4,
            largest: if !cpu.pages_2m {
                1
            } else if !cpu.pages_1g {
                2
            } else {
                3
            },
            splits_at_fetch: false,
            encryption: 0,
            grants: ept_grants(tracks),
        }
    }

    /// The format, but instructions are fetched from small leaves alone: for CPUs that a change of page
    /// size under an instruction fetch can stop (iTLB multihit). A large leaf is made without the right
    /// to execute, and the first fetch from it splits it.
    pub const fn splitting_at_fetch(self) -> Self {
        Self { splits_at_fetch: true, ..self }
    }

    /// The format without large leaves.
    pub const fn small(self) -> Self {
        Self { largest: 1, ..self }
    }

    /// Levels of the tree: 4 or 5.
    #[inline]
    pub const fn levels(&self) -> u8 {
        self.levels
    }

    /// The largest leaf that the CPU knows: 1 = 4 KiB, 2 = 2 MiB, 3 = 1 GiB.
    #[inline]
    pub const fn largest(&self) -> u8 {
        self.largest
    }

    /// Whether an instruction fetch makes a large leaf small.
    #[inline]
    pub const fn splits_at_fetch(&self) -> bool {
        self.splits_at_fetch
    }

    /// The host's SME bit, or 0.
    #[inline]
    pub const fn encryption(&self) -> u64 {
        self.encryption
    }

    /// What an entry for a page says of its memory. `direct`: ordinary memory.
    #[inline]
    pub(crate) const fn memory(&self, direct: bool) -> u64 {
        if direct { self.direct } else { self.device }
    }

    /// Whether the CPU sets accessed and dirty bits.
    #[inline]
    pub const fn tracks(&self) -> bool {
        self.accessed != 0
    }

    /// Whether the CPU itself logs the pages that it makes dirty.
    #[inline]
    pub const fn logs(&self) -> bool {
        self.logs
    }

    /// The bit that the CPU sets in an accessed leaf; 0 where it has none.
    #[inline]
    pub(crate) const fn accessed(&self) -> u64 {
        self.accessed
    }

    /// The bit that it sets in a written leaf; 0 where it has none.
    #[inline]
    pub(crate) const fn dirty(&self) -> u64 {
        self.dirty
    }

    /// A leaf at `level` (1 = 4 KiB, 2 = 2 MiB, 3 = 1 GiB).
    #[inline]
    pub(crate) fn leaf(&self, hpa: Hpa, level: u8, bits: LeafBits) -> u64 {
        (hpa.0 & ADDRESS)
            | self.leaf
            | if bits.exec && self.may_execute(level) { self.exec } else { self.no_exec }
            // Marked by a bit of software's, since no bit of NPT's tells device memory.
            | if bits.direct { self.direct } else { self.device | NO_DIRECT_MAP }
            | when(bits.writable, WRITABLE)
            | when(bits.accessed, self.accessed)
            | when(bits.dirty, self.dirty)
            // At the last level bit 7 is PAT in the ordinary format, so it says the size only
            // above.
            | when(level > 1, LARGE)
    }

    const fn may_execute(&self, level: u8) -> bool {
        level == 1 || !self.splits_at_fetch
    }

    /// A part, of page size `level`, of a large leaf that was refused to a fetch: small parts may be
    /// executed. All guest memory may; what kept the large leaf from it is its size alone.
    #[inline]
    pub(crate) const fn part(&self, entry: u64, level: u8) -> u64 {
        if self.splits_at_fetch && self.may_execute(level) {
            // Both spellings of "may execute" at once; in each format one of the two is 0.
            (entry & !self.no_exec) | self.exec
        } else {
            entry
        }
    }

    /// The permissions of a leaf for what a guest entry grants, without the address. Where it may be
    /// written it is born dirty: nobody looks, and the CPU need not set the bit.
    #[inline(always)]
    pub(crate) const fn granted(&self, grant: Grant) -> u64 {
        self.grants[grant.index() & 7]
    }

    /// The permission bits of an entry that points to a table, without the address.
    #[inline]
    pub(crate) const fn table_bits(&self) -> u64 {
        self.table
    }
}

/// How the ordinary format spells what a guest entry grants.
const X86_GRANTS: [u64; 8] = {
    let mut all = [0; 8];
    let mut n = 0;
    while n < all.len() {
        let grant = Grant::from_index(n);
        let writable = if grant.has(Grant::W) { pte::WRITABLE | pte::DIRTY } else { 0 };
        let user = if grant.has(Grant::U) { pte::USER } else { 0 };
        let exec = if grant.has(Grant::X) { 0 } else { pte::NX };
        all[n] = pte::PRESENT | writable | user | exec;
        n += 1;
    }
    all
};

/// How EPT does, which knows no users: there [`Grant::U`] is the right to read.
const fn ept_grants(tracks: bool) -> [u64; 8] {
    let mut all = [0; 8];
    let mut n = 0;
    while n < all.len() {
        let grant = Grant::from_index(n);
        let dirty = if tracks { ept::DIRTY } else { 0 };
        let writable = if grant.has(Grant::W) { ept::WRITE | dirty } else { 0 };
        let exec = if grant.has(Grant::X) { ept::EXECUTE } else { 0 };
        // What can be written and not read is a misconfiguration.
        let readable = grant.has(Grant::U) || grant.has(Grant::W);
        all[n] = if readable { ept::READ } else { 0 } | writable | exec;
        n += 1;
    }
    all
}

const fn when(condition: bool, bits: u64) -> u64 {
    if condition { bits } else { 0 }
}

/// Whether hardware takes the entry as present.
#[inline]
pub(crate) const fn is_present(entry: u64) -> bool {
    entry & PRESENT != 0
}

/// Whether the guest may fetch instructions through this leaf.
#[inline]
pub(crate) const fn is_exec(entry: u64) -> bool {
    entry & (EXEC | NO_EXEC) == EXEC
}

/// A leaf as it is at page size `level`, from one of page size `level + 1`: only bits that mark the
/// size change.
#[inline]
pub(crate) const fn shrink(entry: u64, level: u8) -> u64 {
    if level == 1 { entry & !LARGE } else { entry }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_spell_what_a_guest_entry_grants() {
        let cpu = EptSupport { accessed_dirty: true, ..EptSupport::default() };
        let (x86, ept) = (Format::npt(4, 0), Format::ept(cpu));
        for grant in (0..8).map(Grant::from_index) {
            let (a, b) = (x86.granted(grant), ept.granted(grant));
            assert!(is_present(a), "{grant:?}");
            assert_eq!(is_present(b), grant.has(Grant::U) || grant.has(Grant::W), "{grant:?}");
            assert_eq!(a & WRITABLE != 0, grant.has(Grant::W));
            assert_eq!(a & WRITABLE, b & WRITABLE);
            assert_eq!(a & x86.dirty() != 0, b & ept.dirty() != 0);
            assert_eq!(a & pte::USER != 0, grant.has(Grant::U));
            assert_eq!(
                (a & pte::NX == 0, b & EXEC != 0),
                (grant.has(Grant::X), grant.has(Grant::X))
            );
        }
    }
}
