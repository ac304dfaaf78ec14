//! Segment and descriptor-table registers of the guest (SDM vol. 3C §27.3.1.2, §27.3.1.3).

use x86::vmcs::{Field, Natural, ReadWrite, access_rights, field};

use super::guest_rules::Broken;
use super::{Limits, rule};
use crate::Vmcs12;

/// What decides which rules hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Virtual-8086 mode.
    pub vm86: bool,
    /// IA-32e mode.
    pub long: bool,
    /// Unrestricted guest.
    pub unrestricted: bool,
    /// CR0.PE.
    pub protected: bool,
}

/// CS.L as access rights have it.
pub(crate) const LONG: u32 = 1 << 13;
const DEFAULT_BIG: u32 = 1 << 14;
const GRANULAR: u32 = 1 << 15;
const PRESENT: u32 = 1 << 7;
const CODE_OR_DATA: u32 = 1 << 4;
/// Bits 11:8 and 31:17.
const RESERVED: u32 = 0xf00 | 0xfffe_0000;
/// Access rights of every segment in virtual-8086 mode.
const VM86: u32 = 0xf3;

/// A segment register as the VMCS12 has it.
#[derive(Clone, Copy)]
struct Register {
    selector: u16,
    base: u64,
    limit: u32,
    rights: u32,
}

type Selector = Field<u16, ReadWrite>;
type Base = Field<Natural, ReadWrite>;
type Word = Field<u32, ReadWrite>;

impl Register {
    fn of(v: &Vmcs12, selector: Selector, base: Base, limit: Word, rights: Word) -> Self {
        Self {
            selector: v.get(selector),
            base: v.get(base),
            limit: v.get(limit),
            rights: v.get(rights),
        }
    }

    fn usable(&self) -> bool {
        self.rights & access_rights::UNUSABLE == 0
    }

    fn kind(&self) -> u32 {
        self.rights & 0xf
    }

    fn dpl(&self) -> u32 {
        self.rights >> 5 & 3
    }

    fn rpl(&self) -> u32 {
        u32::from(self.selector) & 3
    }

    fn is_in_ldt(&self) -> bool {
        self.selector & 4 != 0
    }

    /// The rules for P, reserved bits and G, which all usable registers share.
    fn is_whole(&self) -> bool {
        let granular = self.rights & GRANULAR != 0;
        let small = self.limit & 0xfff != 0xfff;
        let large = self.limit & 0xfff0_0000 != 0;
        self.rights & PRESENT != 0
            && self.rights & RESERVED == 0
            && !(small && granular)
            && (!large || granular)
    }
}

struct Registers {
    es: Register,
    cs: Register,
    ss: Register,
    ds: Register,
    fs: Register,
    gs: Register,
    ldtr: Register,
    tr: Register,
}

macro_rules! register {
    ($v:expr, $selector:ident $base:ident $limit:ident $rights:ident) => {
        Register::of($v, field::$selector, field::$base, field::$limit, field::$rights)
    };
}

impl Registers {
    #[rustfmt::skip] // A table.
    fn of(v: &Vmcs12) -> Self {
        Self {
            es: register!(v, GUEST_ES_SELECTOR GUEST_ES_BASE GUEST_ES_LIMIT GUEST_ES_RIGHTS),
            cs: register!(v, GUEST_CS_SELECTOR GUEST_CS_BASE GUEST_CS_LIMIT GUEST_CS_RIGHTS),
            ss: register!(v, GUEST_SS_SELECTOR GUEST_SS_BASE GUEST_SS_LIMIT GUEST_SS_RIGHTS),
            ds: register!(v, GUEST_DS_SELECTOR GUEST_DS_BASE GUEST_DS_LIMIT GUEST_DS_RIGHTS),
            fs: register!(v, GUEST_FS_SELECTOR GUEST_FS_BASE GUEST_FS_LIMIT GUEST_FS_RIGHTS),
            gs: register!(v, GUEST_GS_SELECTOR GUEST_GS_BASE GUEST_GS_LIMIT GUEST_GS_RIGHTS),
            ldtr: register!(v, GUEST_LDTR_SELECTOR GUEST_LDTR_BASE GUEST_LDTR_LIMIT GUEST_LDTR_RIGHTS),
            tr: register!(v, GUEST_TR_SELECTOR GUEST_TR_BASE GUEST_TR_LIMIT GUEST_TR_RIGHTS),
        }
    }

    fn of_programs(&self) -> [&Register; 6] {
        [&self.es, &self.cs, &self.ss, &self.ds, &self.fs, &self.gs]
    }

    /// DS, ES, FS and GS.
    fn of_data(&self) -> [&Register; 4] {
        [&self.ds, &self.es, &self.fs, &self.gs]
    }
}

/// Checks the registers.
pub(super) fn check(v: &Vmcs12, limits: &Limits, mode: Mode) -> Result<(), Broken> {
    let r = Registers::of(v);
    selectors(&r, mode)?;
    bases(&r, limits, mode)?;
    // Virtual-8086 mode has one form of segment: the rules of protected mode are not asked.
    if mode.vm86 {
        let programs = r.of_programs();
        rule(programs.iter().all(|s| s.limit == 0xffff), Broken::Limits)?;
        rule(programs.iter().all(|s| s.rights == VM86), Broken::Rights)?;
    } else {
        code(&r, mode)?;
        stack(&r, mode)?;
        rule(r.of_data().iter().all(|s| is_data(s, mode)), Broken::Rights)?;
    }
    system(&r, mode)?;
    tables(v, limits)
}

fn selectors(r: &Registers, mode: Mode) -> Result<(), Broken> {
    // An unrestricted guest may be in real mode, where SS and CS have nothing to do with each other.
    let stack = mode.vm86 || mode.unrestricted || r.ss.rpl() == r.cs.rpl();
    let ldtr = !r.ldtr.usable() || !r.ldtr.is_in_ldt();
    // TR and LDTR come out of the GDT: TI would name an LDT.
    let good = !r.tr.is_in_ldt() && ldtr && stack;
    rule(good, Broken::Selectors)
}

fn bases(r: &Registers, limits: &Limits, mode: Mode) -> Result<(), Broken> {
    if mode.vm86 {
        // As virtual-8086 mode computes a base.
        let shifted = |s: &&Register| s.base == u64::from(s.selector) << 4;
        rule(r.of_programs().iter().all(shifted), Broken::Bases)?;
    }
    // Only FS, GS, TR and LDTR have bases of 64 bits.
    let low = |s: &Register| !s.usable() || s.base >> 32 == 0;
    let good = limits.is_canonical(r.tr.base)
        // FS, GS and TR usable or not: an entry loads their bases in any case.
        && limits.is_canonical(r.fs.base)
        && limits.is_canonical(r.gs.base)
        && (!r.ldtr.usable() || limits.is_canonical(r.ldtr.base))
        && r.cs.base >> 32 == 0
        && low(&r.ss)
        && low(&r.ds)
        && low(&r.es);
    rule(good, Broken::Bases)
}

fn code(r: &Registers, mode: Mode) -> Result<(), Broken> {
    let cs = &r.cs;
    let level = match cs.kind() {
        // Data in CS, as real mode leaves it.
        3 => mode.unrestricted && cs.dpl() == 0,
        // Other code runs at SS's level, conforming code also at the levels outside of its own (13 and 15).
        9 | 11 => cs.dpl() == r.ss.dpl(),
        13 | 15 => cs.dpl() <= r.ss.dpl(),
        _ => false,
    };
    // D and L together are reserved in IA-32e mode.
    let sizes = !(mode.long && cs.rights & LONG != 0 && cs.rights & DEFAULT_BIG != 0);
    // Bit 16 has no rule in CS: all else is asked whether or not it is set, and an entry loads L, D and G by it as well (§27.3.2.2).
    let good = level && sizes && cs.rights & CODE_OR_DATA != 0 && cs.is_whole();
    rule(good, Broken::Rights)
}

fn stack(r: &Registers, mode: Mode) -> Result<(), Broken> {
    let ss = &r.ss;
    // CPL is SS's DPL. RPL says the same, but for an unrestricted guest, which may be in real mode.
    let same = mode.unrestricted || ss.dpl() == ss.rpl();
    // Real mode, of which data in CS is a mark, is CPL 0.
    let lowest = ss.dpl() == 0 || r.cs.kind() != 3 && mode.protected;
    let usable = matches!(ss.kind(), 3 | 7) && ss.rights & CODE_OR_DATA != 0 && ss.is_whole();
    rule(same && lowest && (!ss.usable() || usable), Broken::Rights)
}

fn is_data(s: &Register, mode: Mode) -> bool {
    if !s.usable() {
        return true;
    }
    // Who loads a register sets the accessed bit.
    let accessed = s.kind() & 1 != 0;
    let readable = s.kind() & 8 == 0 || s.kind() & 2 != 0;
    // Conforming code (12 to 15) is read from any level.
    let level = mode.unrestricted || s.kind() > 11 || s.dpl() >= s.rpl();
    accessed && readable && level && s.rights & CODE_OR_DATA != 0 && s.is_whole()
}

fn system(r: &Registers, mode: Mode) -> Result<(), Broken> {
    // IA-32e mode has no 16-bit TSS, type 3.
    let busy = if mode.long { r.tr.kind() == 11 } else { matches!(r.tr.kind(), 3 | 11) };
    // TR is busy and never unusable: something has loaded it.
    let task = busy && r.tr.rights & CODE_OR_DATA == 0 && r.tr.usable() && r.tr.is_whole();
    let ldtr = !r.ldtr.usable()
        || r.ldtr.kind() == 2 && r.ldtr.rights & CODE_OR_DATA == 0 && r.ldtr.is_whole();
    rule(task && ldtr, Broken::Rights)
}

fn tables(v: &Vmcs12, limits: &Limits) -> Result<(), Broken> {
    let good = limits.is_canonical(v.get(field::GUEST_GDTR_BASE))
        && limits.is_canonical(v.get(field::GUEST_IDTR_BASE))
        // The VMCS has 32 bits for a limit that has 16.
        && v.get(field::GUEST_GDTR_LIMIT) >> 16 == 0
        && v.get(field::GUEST_IDTR_LIMIT) >> 16 == 0;
    rule(good, Broken::Tables)
}
