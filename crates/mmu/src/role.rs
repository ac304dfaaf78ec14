//! What decides how a paging entry of the guest's is read: one word for the walk, the shadow pages and the
//! roots that a vCPU keeps.
//!
//! The bits of the registers that mean nothing in the paging mode at hand are left out, so that they cannot
//! keep equal roots and equal pages apart. Two shadow pages whose roles differ in any bit are never the
//! same: each bit changes what a guest entry means, or which entries of the guest's table the page stands
//! for. What an entry means in a role is in [`crate::source`].

use x86::{Cr0, Cr4, Efer};

use crate::grant::Grant;

/// The registers that govern a walk, and what the guest's CPUID says about entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagingContext {
    /// The guest's CR0.
    pub cr0: Cr0,
    /// The guest's CR3.
    pub cr3: u64,
    /// The guest's CR4.
    pub cr4: Cr4,
    /// The guest's EFER.
    pub efer: Efer,
    /// RFLAGS.AC: with it SMAP lets the supervisor read user pages.
    pub rflags_ac: bool,
    /// Current privilege level.
    pub cpl: u8,
    /// PKRU, the rights of protection keys.
    pub pkru: u32,
    /// The guest's physical address width (CPUID 8000_0008h EAX[7:0]); 0 is taken for 52.
    pub maxphyaddr: u8,
    /// The guest has 1 GiB pages (CPUID 8000_0001h EDX[26]).
    pub gbpages: bool,
    /// AMD's rule: bit 8 of the upper levels' table pointers is reserved (APM vol. 2 §5.3.3).
    pub amd: bool,
}

impl PagingContext {
    /// Whether paging is on.
    #[inline]
    pub fn is_paging(&self) -> bool {
        self.cr0.contains(Cr0::PG)
    }

    /// Whether long mode is active.
    #[inline]
    pub fn is_long_mode(&self) -> bool {
        self.efer.is_long()
    }

    /// The linear address that `va` is: outside of long mode it has 32 bits.
    #[inline]
    pub fn linear(&self, va: u64) -> u64 {
        if self.is_long_mode() { va } else { va & 0xffff_ffff }
    }

    /// Whether `va` is canonical for the paging mode (always so outside long mode).
    pub fn is_canonical(&self, va: u64) -> bool {
        if !self.is_long_mode() {
            return true;
        }
        // Bits 63:57 or 63:48 must repeat the highest address bit.
        let unused = if self.cr4.contains(Cr4::LA57) { 7 } else { 16 };
        ((va << unused) as i64 >> unused) as u64 == va
    }
}

mod nested;

pub use nested::EptOffer;

/// What a shadow page is made from: how the entries behind its own are found and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A table of 8-byte entries: PAE paging or long mode.
    Wide,
    /// No table: consecutive frames from the page's own on.
    Frames,
    /// A table of 4-byte entries: 32-bit paging.
    Narrow,
    /// An NPT table of a guest that is a hypervisor: 8-byte entries of the ordinary format.
    Npt,
    /// An EPT table of such a guest.
    Ept,
}

/// One of a VM's two address spaces, as KVM numbers them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AddressSpace {
    /// What a vCPU sees in all modes but one.
    #[default]
    Main = 0,
    /// What a vCPU sees in system-management mode.
    Smm = 1,
}

impl AddressSpace {
    /// Both address spaces.
    pub const ALL: [Self; 2] = [Self::Main, Self::Smm];

    /// The address space of system-management mode on a condition; the main one otherwise.
    #[inline]
    pub const fn smm_if(condition: bool) -> Self {
        if condition { Self::Smm } else { Self::Main }
    }

    /// The address space of the other mode.
    #[inline]
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Main => Self::Smm,
            Self::Smm => Self::Main,
        }
    }
}

/// A role, as bits of a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Role(u64);

impl Role {
    /// Bits 2:0: 1 for a page of 4 KiB leaves, up to 5.
    const LEVEL: u64 = 7;
    /// Made from no guest table: consecutive frames from the page's own on.
    const DIRECT: u64 = 1 << 3;
    /// The guest's entries have 4 bytes.
    const NARROW: u64 = 1 << 4;
    /// Which part of a table of 1024 entries the page stands for.
    const QUADRANT_SHIFT: u32 = 5;
    const QUADRANT: u64 = 3 << Self::QUADRANT_SHIFT;
    /// What the entries above allow ([`Grant`]).
    const GRANT_SHIFT: u32 = 7;
    const GRANT: u64 = 7 << Self::GRANT_SHIFT;
    /// EFER.LMA, at its place in EFER: long mode, where other bits are reserved than in PAE paging.
    const LONG: u64 = Efer::LMA.bits();
    /// EFER.NXE, at its place: bit 63 forbids fetching, else it is reserved.
    const NX: u64 = Efer::NXE.bits();
    /// CR4.LA57, at its place: five levels.
    const LA57: u64 = Cr4::LA57.bits();
    /// In system-management mode.
    const SMM: u64 = 1 << 13;
    /// The guest has 1 GiB pages.
    const GBPAGES: u64 = 1 << 14;
    /// AMD's reserved bits.
    const AMD: u64 = 1 << 15;
    /// CR0.WP, at its place.
    const WP: u64 = Cr0::WP.bits();
    /// CR4.PSE in 32-bit paging.
    const PSE: u64 = 1 << 17;
    /// CR4.SMEP without CR0.WP, at its place: what supervisor writes turn into a supervisor page loses
    /// execution.
    const SMEP: u64 = Cr4::SMEP.bits();
    /// CR4.SMAP without CR0.WP, at its place: such pages are not made at all.
    const SMAP: u64 = Cr4::SMAP.bits();
    /// The guest's physical address width.
    const WIDTH_SHIFT: u32 = 22;
    /// Part of the NPT tables by which a hypervisor in the guest translates for its own guest.
    const NPT: u64 = 1 << 18;
    /// Part of such a hypervisor's EPT tables.
    const EPT: u64 = 1 << 19;
    /// The EPT pointer of L1 turns on accessed and dirty flags.
    const EPT_TRACKS: u64 = 1 << 28;
    /// L1 was offered execute-only translations.
    const EPT_EXECUTE_ONLY: u64 = 1 << 29;
    /// L1 was offered EPT pages of 2 MiB.
    const EPT_2M: u64 = 1 << 30;
    /// Made from no table: the level that the hardware's tables have above the guest's.
    const ABOVE: u64 = 1 << 31;
    /// One more than the number of L1's frame that no entry leads to; 0: there is none.
    const HOLE_SHIFT: u32 = 32;
    const HOLE: u64 = 0xffff_ffff << Self::HOLE_SHIFT;
    /// Where the PDPTEs of an NPT root in PAE paging begin: those of other tables' bits.
    const PDPTES_AT: u64 = Self::QUADRANT
        | Self::SMEP
        | Self::SMAP
        | Self::EPT_TRACKS
        | Self::EPT_EXECUTE_ONLY
        | Self::EPT_2M;

    /// What a page made from no guest table depends on.
    const OF_DIRECT: u64 = Self::WP
        | Self::SMEP
        | Self::SMAP
        | Self::SMM
        | Self::NPT
        | Self::EPT
        | Self::EPT_TRACKS
        | Self::HOLE;

    /// The role of no guest table at all.
    pub(crate) const NONE: Self = Self(0);
    /// The role of the root of a guest that does not page: nothing of the registers counts.
    const UNPAGED: Self = Self(2 | Self::DIRECT | Self::WP | Self::GRANT);

    /// The role under TDP: the guest's registers mean nothing to TDP tables, which only the address
    /// space tells apart.
    #[inline]
    pub const fn tdp(space: AddressSpace) -> Self {
        match space {
            AddressSpace::Main => Self(0),
            AddressSpace::Smm => Self(Self::SMM),
        }
    }

    /// The role of the guest's root in `context`: of level 4 or 5 in long mode, else of level 2, of which
    /// four hang below PDPTEs.
    #[inline]
    pub fn of(context: &PagingContext, space: AddressSpace) -> Self {
        let role = Self::of_registers(context.cr0, context.cr4, context.efer);
        let space = Self::tdp(space).0;
        // A guest that does not page has no entries to read, so neither width nor vendor keeps its
        // root apart.
        if role.is_direct() {
            return Self(role.0 | space);
        }
        // What is the same for all guests of a CPUID keeps no roots apart, with meaning or without.
        Self(
            role.0
                | space
                | u64::from(context.maxphyaddr & 63) << Self::WIDTH_SHIFT
                | u64::from(context.gbpages) << Self::GBPAGES.trailing_zeros()
                | u64::from(context.amd) << Self::AMD.trailing_zeros(),
        )
    }

    /// What the registers alone make of the role: the rest is the CPUID's and the address space's.
    #[inline]
    pub fn of_registers(cr0: Cr0, cr4: Cr4, efer: Efer) -> Self {
        if !cr0.contains(Cr0::PG) {
            return Self::UNPAGED;
        }
        // Without branches, and most bits where they are: this is computed whenever one of the registers
        // is written.
        let (cr0, cr4, efer) = (cr0.bits(), cr4.bits(), efer.bits());
        let bit = |word: u64, mask: u64| word >> mask.trailing_zeros() & 1;
        let mask = |on: u64| 0u64.wrapping_sub(on);
        let long = bit(efer, Self::LONG);
        let wide = bit(cr4, Cr4::PAE.bits()) | long;
        // CR4.LA57 has no meaning before long mode is active, and a guest has to set it before.
        let five = bit(cr4, Self::LA57) & long;
        // With WP set a supervisor's write needs no page of its own, so SMEP and SMAP need not be
        // in the role.
        let clear_wp = mask(bit(cr0, Self::WP) ^ 1);
        Self(
            (2 + 2 * long + five)
                | Self::GRANT
                | (efer & Self::LONG)
                | (efer & Self::NX & mask(wide))
                | (cr0 & Self::WP)
                | (cr4 & Self::LA57 & mask(long))
                | (cr4 & (Self::SMEP | Self::SMAP) & clear_wp)
                | (cr4 & Cr4::PSE.bits() & !mask(wide)) << PSE_UP
                | (wide ^ 1) << Self::NARROW.trailing_zeros(),
        )
    }

    /// The role of the table at `level` on the way of a walk.
    #[inline]
    pub(crate) const fn at_level(self, level: u8) -> Self {
        Self((self.0 & !Self::LEVEL) | (level as u64 & Self::LEVEL))
    }

    /// Whose memory the pages lead to.
    #[inline]
    pub const fn space(self) -> AddressSpace {
        AddressSpace::smm_if(self.0 & Self::SMM != 0)
    }

    /// The bits, for hashing and tracing.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// 1 to 5.
    #[inline]
    pub fn level(self) -> u8 {
        (self.0 & Self::LEVEL) as u8
    }

    /// What the page is made from.
    #[inline(always)]
    pub const fn source(self) -> Source {
        if self.0 & Self::DIRECT != 0 {
            Source::Frames
        } else if self.0 & Self::NARROW != 0 {
            Source::Narrow
        } else if self.0 & Self::NPT != 0 {
            Source::Npt
        } else if self.0 & Self::EPT != 0 {
            Source::Ept
        } else {
            Source::Wide
        }
    }

    /// Whether the page is made from no guest table.
    #[inline]
    pub fn is_direct(self) -> bool {
        self.0 & Self::DIRECT != 0
    }

    /// Whether the page's table may be protected from writes, so that flushes pass it by: where it is the guest's own. L1's
    /// tables for L2 never are, and a page of frames has none.
    #[inline]
    pub(crate) const fn may_settle(self) -> bool {
        self.0 & (Self::DIRECT | Self::NPT | Self::EPT) == 0
    }

    /// Whether the guest's entries have 4 bytes.
    #[inline]
    pub fn is_narrow(self) -> bool {
        self.0 & Self::NARROW != 0
    }

    /// Whether CR0.WP is set.
    #[inline]
    pub fn wp(self) -> bool {
        self.0 & Self::WP != 0
    }

    /// Whether EFER.NXE is set.
    #[inline]
    pub fn nx(self) -> bool {
        self.0 & Self::NX != 0
    }

    /// Whether the tables are those of long mode.
    #[inline]
    pub fn is_long(self) -> bool {
        self.0 & Self::LONG != 0
    }

    /// Whether 32-bit paging has 4 MiB pages.
    #[inline]
    pub fn has_large_narrow(self) -> bool {
        self.0 & Self::PSE != 0
    }

    /// Whether the guest has 1 GiB pages.
    #[inline]
    pub fn has_gbpages(self) -> bool {
        self.0 & Self::GBPAGES != 0
    }

    /// Whether AMD's reserved bits are.
    #[inline]
    pub fn is_amd(self) -> bool {
        self.0 & Self::AMD != 0
    }

    /// The guest's physical address width; 0 is taken for 52.
    #[inline]
    pub fn width(self) -> u32 {
        (self.0 >> Self::WIDTH_SHIFT & 63) as u32
    }

    /// CR4.SMEP, where CR0.WP is clear.
    #[inline]
    pub fn smep_not_wp(self) -> bool {
        self.0 & Self::SMEP != 0
    }

    /// CR4.SMAP, where CR0.WP is clear.
    #[inline]
    pub fn smap_not_wp(self) -> bool {
        self.0 & Self::SMAP != 0
    }

    /// Which part of a table of 1024 entries the page stands for.
    #[inline]
    pub fn quadrant(self) -> usize {
        ((self.0 & Self::QUADRANT) >> Self::QUADRANT_SHIFT) as usize
    }

    /// What the entries above allow.
    #[inline]
    pub fn grant(self) -> Grant {
        Grant::from_index(((self.0 & Self::GRANT) >> Self::GRANT_SHIFT) as usize)
    }

    #[inline]
    fn granting(self, grant: Grant) -> Self {
        Self((self.0 & !Self::GRANT) | (grant.index() as u64) << Self::GRANT_SHIFT)
    }

    /// The role of another part of the table.
    #[inline]
    pub fn in_quadrant(self, quadrant: usize) -> Self {
        Self((self.0 & !Self::QUADRANT) | (quadrant as u64 & 3) << Self::QUADRANT_SHIFT)
    }

    /// The role of the page below, for a guest entry that points to a table. `index`: that of the
    /// shadow entry. `grant`: what the guest entry allows.
    #[inline]
    pub fn below(self, index: usize, grant: Grant) -> Self {
        let level = (self.0 & Self::LEVEL).saturating_sub(1);
        // A table that is reached with other rights makes another page, so that a leaf's bits are
        // right by themselves.
        let child = Self((self.0 & !Self::LEVEL) | level).granting(self.grant().and(grant));
        // A 4-byte entry covers two shadow entries: the lower one is the table's first half.
        if self.is_narrow() { child.in_quadrant(index & 1) } else { child }
    }

    /// The role of a page of consecutive frames below, for a large guest entry or without paging.
    #[inline]
    pub fn direct_below(self, grant: Grant) -> Self {
        let level = (self.0 & Self::LEVEL).saturating_sub(1);
        // What the registers made of the large entry is in the grant by now. Of the rest only what
        // still decides about leaves is kept, so that more pages are shared.
        Self((self.0 & Self::OF_DIRECT) | Self::DIRECT | level).granting(self.grant().and(grant))
    }
}

/// From CR4.PSE to the role's.
const PSE_UP: u32 = Role::PSE.trailing_zeros() - Cr4::PSE.bits().trailing_zeros();

/// No two fields of a role share a bit.
const _: () = {
    let fields = [
        Role::LEVEL,
        Role::DIRECT,
        Role::NARROW,
        Role::QUADRANT,
        Role::GRANT,
        Role::LONG,
        Role::NX,
        Role::LA57,
        Role::SMM,
        Role::GBPAGES,
        Role::AMD,
        Role::WP,
        Role::PSE,
        Role::SMEP,
        Role::SMAP,
        Role::NPT,
        Role::EPT,
        Role::EPT_TRACKS,
        Role::EPT_EXECUTE_ONLY,
        Role::EPT_2M,
        Role::ABOVE,
        Role::HOLE,
        63 << Role::WIDTH_SHIFT,
    ];
    let (mut seen, mut n) = (0, 0);
    while n < fields.len() {
        assert!(seen & fields[n] == 0);
        seen |= fields[n];
        n += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    fn long() -> PagingContext {
        PagingContext {
            cr0: Cr0::PG | Cr0::WP | Cr0::PE,
            cr4: Cr4::PAE,
            efer: Efer::LMA | Efer::NXE | Efer::LME,
            maxphyaddr: 40,
            ..PagingContext::default()
        }
    }

    const MAIN: AddressSpace = AddressSpace::Main;

    #[test]
    fn every_bit_that_changes_what_an_entry_means_makes_another_role() {
        let plain = long();
        let with = |change: fn(&mut PagingContext)| {
            let mut context = plain;
            change(&mut context);
            Role::of(&context, MAIN)
        };
        let roles = [
            Role::of(&plain, MAIN),
            Role::of(&plain, AddressSpace::Smm),
            with(|c| c.cr0 -= Cr0::WP),
            with(|c| (c.cr0, c.cr4) = (c.cr0 - Cr0::WP, c.cr4 | Cr4::SMEP)),
            with(|c| (c.cr0, c.cr4) = (c.cr0 - Cr0::WP, c.cr4 | Cr4::SMAP)),
            with(|c| c.efer -= Efer::NXE),
            with(|c| c.efer -= Efer::LMA),
            with(|c| (c.efer, c.cr4) = (Efer::empty(), Cr4::empty())),
            with(|c| (c.efer, c.cr4) = (Efer::empty(), Cr4::PSE)),
            with(|c| c.cr0 -= Cr0::PG),
            with(|c| c.cr4 |= Cr4::LA57),
            with(|c| c.maxphyaddr = 39),
            with(|c| c.gbpages = true),
            with(|c| c.amd = true),
        ];
        for (n, a) in roles.iter().enumerate() {
            assert!(roles[n + 1..].iter().all(|b| a != b), "{n}: {a:?}");
        }
    }

    #[test]
    fn what_changes_no_meaning_makes_no_other_role() {
        let plain = Role::of(&long(), MAIN);
        // SMEP and SMAP are the hardware's own work while CR0.WP is set; the rest is no entry's.
        for cr4 in [Cr4::SMEP, Cr4::SMAP, Cr4::PSE, Cr4::PGE, Cr4::PCIDE] {
            assert_eq!(Role::of(&PagingContext { cr4: Cr4::PAE | cr4, ..long() }, MAIN), plain);
        }
        let other = PagingContext { cr3: 0x5000, cpl: 3, rflags_ac: true, pkru: 1, ..long() };
        assert_eq!(Role::of(&other, MAIN), plain);
    }

    #[test]
    fn grants_narrow_on_the_way_down_and_halves_are_told_apart() {
        let root = Role::of(&long(), MAIN);
        let child = root.below(7, Grant::of(0b101));
        assert_eq!((child.level(), child.grant()), (3, Grant::U.with(Grant::X)));
        assert_eq!(child.below(0, Grant::of(1 << 63 | 7)).grant(), Grant::U);
        let narrow =
            Role::of(&PagingContext { efer: Efer::empty(), cr4: Cr4::empty(), ..long() }, MAIN);
        assert_ne!(narrow.below(4, Grant::ALL), narrow.below(5, Grant::ALL));
        assert_eq!(narrow.below(4, Grant::ALL), narrow.below(6, Grant::ALL));
        let direct = narrow.direct_below(Grant::ALL);
        assert!(direct.is_direct() && !direct.is_narrow() && direct.level() == 1);
    }
}
