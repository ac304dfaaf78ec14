//! The walk of L1's tables, from the manuals and apart from the code under test (APM vol. 2 §15.25; SDM vol. 3C
//! §29.3).

use gannet_mmu::{EptOffer, L1Fault, PagingContext, Tables};
use x86::vmcs::ApicAccess;
use x86::{Cr0, Cr4, Efer, Gfn};

/// What kind of tables L1 has, and what its CPU has of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `pae`: L1 is in PAE paging, and its PDPTEs lie so far behind the beginning of the root's frame.
    Npt {
        five: bool,
        nx: bool,
        gbpages: bool,
        amd: bool,
        width: u8,
        pae: Option<u64>,
    },
    Ept {
        flags: bool,
        execute_only: bool,
        pages_2m: bool,
        pages_1g: bool,
        width: u8,
        apic: Apic,
    },
}

/// What else decides where L2's accesses go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Apic {
    /// The frame that stands for L2's local APIC.
    pub frame: Option<u64>,
    /// There are no tables. Then there is such a frame, and there are no flags.
    pub flat: bool,
}

/// An access of L2's, to its own paging entries or to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub write: bool,
    pub fetch: bool,
    /// To an entry of L2's own tables.
    pub table: bool,
}

impl Access {
    pub const READ: Self = Self { write: false, fetch: false, table: false };
    pub const WRITE: Self = Self { write: true, fetch: false, table: false };
    pub const FETCH: Self = Self { write: false, fetch: true, table: false };
    /// The hardware's walk of L2's tables.
    pub const TABLE: Self = Self { write: false, fetch: false, table: true };
    pub const ALL: [Self; 4] = [Self::READ, Self::WRITE, Self::FETCH, Self::TABLE];
}

/// Where L1's tables lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// L1-physical.
    pub gpa: u64,
    pub level: u32,
    /// Every entry on the way has its accessed bit, or there are none.
    pub accessed: bool,
    /// The last one has its dirty bit, or there are none.
    pub dirty: bool,
}

/// Why there is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum No {
    /// L1 hears this.
    L1(L1Fault),
    /// An entry at this address cannot be read.
    Unreadable(u64),
}

impl Kind {
    pub fn levels(&self) -> u32 {
        match self {
            Kind::Npt { pae: Some(_), .. } => 3,
            Kind::Npt { five: true, .. } => 5,
            _ => 4,
        }
    }

    /// Where the root lies within its frame.
    pub fn offset(&self) -> u64 {
        if let Kind::Npt { pae: Some(offset), .. } = *self { offset } else { 0 }
    }

    /// Whether entries of a level are PDPTEs.
    fn has_pdptes(&self, level: u32) -> bool {
        level == 3 && matches!(self, Kind::Npt { pae: Some(_), .. })
    }

    pub fn has_flags(&self) -> bool {
        !matches!(self, Kind::Ept { flags: false, .. })
    }

    pub fn width(&self) -> u8 {
        let (Kind::Npt { width, .. } | Kind::Ept { width, .. }) = *self;
        width
    }

    /// What the code under test is told.
    pub fn tables(&self, root: u64) -> Tables {
        match *self {
            Kind::Npt { five, nx, gbpages, amd, width, pae } => {
                let long = if pae.is_some() { Efer::empty() } else { Efer::LMA | Efer::LME };
                let l1 = PagingContext {
                    cr0: Cr0::PG | Cr0::PE,
                    cr3: 0x7000,
                    cr4: Cr4::PAE | if five { Cr4::LA57 } else { Cr4::empty() },
                    efer: long | if nx { Efer::NXE } else { Efer::empty() },
                    maxphyaddr: width,
                    gbpages,
                    amd,
                    ..PagingContext::default()
                };
                Tables::npt(root << 12 | self.offset() | 0x18, &l1).unwrap()
            }
            Kind::Ept { flags, execute_only, pages_2m, pages_1g, width, apic } => {
                let offer = EptOffer { maxphyaddr: width, execute_only, pages_2m, pages_1g };
                let tables = match apic.flat {
                    true => Tables::FLAT,
                    false => Tables::ept(root << 12 | if flags { 0x5e } else { 0x1e }, &offer),
                };
                apic.frame.map_or(tables, |frame| tables.without_frame(Gfn(frame)).unwrap())
            }
        }
    }

    /// How the hardware describes an access to L1: EXITINFO1, or the exit qualification, without what the
    /// walk finds out.
    pub fn told(&self, access: &Access) -> u64 {
        match self {
            Kind::Npt { .. } => {
                let write = access.write || access.table;
                let part = if access.table { 1 << 33 } else { 1 << 32 };
                part | u64::from(write) << 1 | u64::from(access.fetch) << 4 | 1 << 2
            }
            Kind::Ept { flags, .. } => {
                let read = !access.write && !access.fetch;
                let write = access.write || access.table && *flags;
                let part = if access.table { 1 << 7 } else { 3 << 7 };
                part | u64::from(read) | u64::from(write) << 1 | u64::from(access.fetch) << 2
            }
        }
    }

    /// What L1 hears of it by NPT: of a fetch where it has what forbids one.
    fn heard(&self, access: &Access) -> u64 {
        let fetch = if let Kind::Npt { nx: false, .. } = self { 1 << 4 } else { 0 };
        self.told(access) & !fetch
    }

    fn writes(&self, access: &Access) -> bool {
        access.write || access.table && self.has_flags()
    }

    fn absent(&self, access: &Access) -> No {
        No::L1(match self {
            Kind::Npt { .. } => L1Fault::Npf { info: self.heard(access) },
            Kind::Ept { .. } => L1Fault::Violation { qualification: self.told(access) },
        })
    }

    /// Bits that must be 0, or `None`: the entry is broken already.
    fn is_broken(&self, entry: u64, level: u32) -> bool {
        let large = entry & 1 << 7 != 0 && (level == 2 || level == 3);
        let mut zero = 0u64;
        for bit in u32::from(self.width())..52 {
            zero |= 1 << bit;
        }
        match *self {
            Kind::Npt { nx, gbpages, amd, pae, .. } => {
                zero |= if nx { 0 } else { 1 << 63 };
                if pae.is_some() {
                    zero |= 0x7ff << 52;
                }
                match level {
                    1 => {}
                    // The writable and user bits, 8:6, and NX; bit 5 is let pass.
                    3 if pae.is_some() => zero |= 1 << 63 | 0x1c6,
                    // Bit 12 is PAT.
                    2 if large => zero |= 0x1f_e000,
                    2 => {}
                    3 if large && !gbpages => zero |= 1 << 7 | 0x3fff_e000,
                    3 if large => zero |= 0x3fff_e000,
                    3 => zero |= if amd { 1 << 8 } else { 0 },
                    _ => zero |= 1 << 7 | if amd { 1 << 8 } else { 0 },
                }
                entry & zero != 0
            }
            Kind::Ept { execute_only, pages_2m, pages_1g, .. } => {
                let (r, w, x) = (entry & 1 != 0, entry & 2 != 0, entry & 4 != 0);
                if w && !r || x && !r && !execute_only {
                    return true;
                }
                match level {
                    1 => {}
                    2 if large && pages_2m => zero |= 0x1f_f000,
                    3 if large && pages_1g => zero |= 0x3fff_f000,
                    _ => zero |= 0xf8,
                }
                let last = level == 1 || large;
                entry & zero != 0 || last && [2, 3, 7].contains(&(entry >> 3 & 7))
            }
        }
    }

    fn is_present(&self, entry: u64) -> bool {
        entry & if matches!(self, Kind::Npt { .. }) { 1 } else { 7 } != 0
    }

    fn apic(&self) -> Apic {
        match *self {
            Kind::Npt { .. } => Apic::default(),
            Kind::Ept { apic, .. } => apic,
        }
    }

    /// The walk, and whether it leads to L2's local APIC.
    pub fn walk(
        &self,
        root: u64,
        gpa: u64,
        access: &Access,
        read: impl FnMut(u64) -> Option<u64>,
    ) -> Result<Found, No> {
        let found = if self.apic().flat {
            Found { gpa, level: 1, accessed: true, dirty: true }
        } else {
            self.walk_tables(root, gpa, access, read)?
        };
        if self.apic().frame != Some(found.gpa >> 12) {
            return Ok(found);
        }
        Err(No::L1(L1Fault::ApicAccess(ApicAccess {
            offset: (gpa & 0xfff) as u16,
            write: self.writes(access),
            fetch: access.fetch,
            linear: !access.table,
        })))
    }

    /// The walk. `read`: the word at an L1-physical address.
    fn walk_tables(
        &self,
        root: u64,
        gpa: u64,
        access: &Access,
        mut read: impl FnMut(u64) -> Option<u64>,
    ) -> Result<Found, No> {
        let top = self.levels();
        let reach = if self.has_pdptes(top) { 32 } else { 12 + 9 * top };
        if gpa >> reach != 0 {
            return Err(self.absent(access));
        }
        let mut at = root << 12 | self.offset();
        let (mut accessed, mut rights) = (true, u64::MAX);
        let mut forbidden = false;
        let mut level = top;
        loop {
            let index = gpa >> (12 + 9 * (level - 1)) & 511;
            let place = at + 8 * index;
            let entry = read(place).ok_or(No::Unreadable(place))?;
            if !self.is_present(entry) {
                return Err(self.absent(access));
            }
            if self.is_broken(entry, level) {
                return Err(No::L1(match self {
                    Kind::Npt { .. } => L1Fault::Npf { info: self.heard(access) | 9 },
                    Kind::Ept { .. } => L1Fault::Misconfiguration,
                }));
            }
            if self.has_pdptes(level) {
                at = entry & 0x000f_ffff_ffff_f000;
                level -= 1;
                continue;
            }
            rights &= entry;
            forbidden |= entry >> 63 != 0;
            let (a, d) = if matches!(self, Kind::Npt { .. }) { (5, 6) } else { (8, 9) };
            accessed &= !self.has_flags() || entry >> a & 1 != 0;
            let address = entry & 0x000f_ffff_ffff_f000;
            if level > 1 && (entry & 1 << 7 == 0 || level > 3) {
                at = address;
                level -= 1;
                continue;
            }
            self.permit(access, rights, forbidden)?;
            let span = 1u64 << (12 + 9 * (level - 1));
            let dirty = !self.has_flags() || entry >> d & 1 != 0;
            return Ok(Found {
                gpa: address & !(span - 1) | gpa & (span - 1),
                level,
                accessed,
                dirty,
            });
        }
    }

    fn permit(&self, access: &Access, rights: u64, forbidden: bool) -> Result<(), No> {
        let write = self.writes(access);
        match self {
            Kind::Npt { .. } => {
                let fine =
                    rights & 4 != 0 && (!write || rights & 2 != 0) && (!access.fetch || !forbidden);
                if fine {
                    Ok(())
                } else {
                    Err(No::L1(L1Fault::Npf { info: self.heard(access) | 1 }))
                }
            }
            Kind::Ept { .. } => {
                let wanted = self.told(access) & 7;
                if rights & 7 & wanted == wanted {
                    return Ok(());
                }
                let qualification = self.told(access) | (rights & 7) << 3;
                Err(No::L1(L1Fault::Violation { qualification }))
            }
        }
    }
}
