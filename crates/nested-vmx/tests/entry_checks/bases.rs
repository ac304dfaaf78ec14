//! VMCSs that can be entered, and what is changed in them.

use std::sync::LazyLock;

use gannet_nested_vmx::checks::Limits;
use gannet_nested_vmx::{Capabilities, Vmcs12};
use proptest::prelude::*;
use x86::vmcs::field::ALL;
use x86::vmcs::place::{self, Named};

use super::drive::{self, APIC_PAGE, PAGE_DIRECTORIES, SHADOW};
use super::example::good;
use super::set;

/// In which mode the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Long,
    LongUser,
    Compatibility,
    /// PAE paging by CR3 in L1's memory, and by PDPTEs in the VMCS.
    Pae,
    PaeWithEpt,
    Legacy,
    Vm86,
    /// An unrestricted guest without paging, and without protection.
    Unpaged,
    Real,
}

/// Which controls are 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controls {
    /// Those that the mode needs.
    Few,
    /// All that are offered and go together; an unrestricted guest only where the mode needs it.
    All,
    /// All, in an unrestricted guest if there is EPT.
    Unrestricted,
    /// A TPR shadow with a threshold and x2APIC mode.
    X2Apic,
}

/// What is injected, and how the guest waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    None,
    External,
    Nmi,
    Exception,
    Software,
    MonitorTrap,
    HaltedExternal,
    HaltedStep,
    WaitForSipi,
    BlockedBySti,
    BlockedByMovSs,
}

/// A VMCS that can be entered, and the processor that enters it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    pub mode: Mode,
    pub controls: Controls,
    pub event: Event,
    /// L1 is a 32-bit hypervisor.
    pub legacy_host: bool,
    pub physical_bits: u8,
}

pub const MODES: [Mode; 9] = [
    Mode::Long,
    Mode::LongUser,
    Mode::Compatibility,
    Mode::Pae,
    Mode::PaeWithEpt,
    Mode::Legacy,
    Mode::Vm86,
    Mode::Unpaged,
    Mode::Real,
];
pub const CONTROLS: [Controls; 4] =
    [Controls::Few, Controls::All, Controls::Unrestricted, Controls::X2Apic];
pub const EVENTS: [Event; 11] = [
    Event::None,
    Event::External,
    Event::Nmi,
    Event::Exception,
    Event::Software,
    Event::MonitorTrap,
    Event::HaltedExternal,
    Event::HaltedStep,
    Event::WaitForSipi,
    Event::BlockedBySti,
    Event::BlockedByMovSs,
];
/// Widths of physical addresses that processors have.
const WIDTHS: [u8; 4] = [40, 36, 46, 52];

impl Base {
    /// The first base, which is [`good`].
    pub const FIRST: Self = Self {
        mode: Mode::Long,
        controls: Controls::Few,
        event: Event::None,
        legacy_host: false,
        physical_bits: 40,
    };

    pub fn ia32e(&self) -> bool {
        matches!(self.mode, Mode::Long | Mode::LongUser | Mode::Compatibility)
    }

    pub fn limits(&self) -> Limits {
        let physical_bits = self.physical_bits;
        Limits { physical_bits, long_mode: !self.legacy_host, ..drive::LIMITS }
    }

    /// EFER of the guest.
    pub fn efer(&self) -> u64 {
        if self.ia32e() { 0xd01 } else { 0x801 }
    }

    /// The activity state.
    pub fn activity(&self) -> u32 {
        match self.event {
            Event::HaltedExternal | Event::HaltedStep => 1,
            Event::WaitForSipi => 3,
            _ => 0,
        }
    }

    /// What goes together: a mode of user code does not halt, a 64-bit guest needs a 64-bit host.
    pub fn new(mode: Mode, controls: Controls, mut event: Event, host: bool, bits: u8) -> Self {
        let user = matches!(mode, Mode::LongUser | Mode::Vm86);
        if user && matches!(event, Event::HaltedExternal | Event::HaltedStep) {
            event = Event::None;
        }
        let mut base = Self { mode, controls, event, legacy_host: host, physical_bits: bits };
        base.legacy_host &= !base.ia32e();
        base
    }

    pub fn image(&self, c: &Capabilities) -> Vmcs12 {
        let mut v = good();
        self.guest(&mut v);
        self.words(&mut v, c);
        self.flow(&mut v);
        v
    }

    fn guest(&self, v: &mut Vmcs12) {
        match self.mode {
            Mode::Long => {}
            Mode::LongUser => {
                set!(v, GUEST_CS_SELECTOR = 0x33, GUEST_CS_RIGHTS = 0xa0fb);
                set!(v, GUEST_SS_SELECTOR = 0x2b, GUEST_SS_RIGHTS = 0xc0f3);
                data(v, 0x2b, 0xc0f3, u32::MAX);
                set!(v, GUEST_FS_BASE = 0x7fff_ffff_f000, GUEST_GS_BASE = 0xffff_8000_0000_0000);
                set!(v, GUEST_RIP = 0x7fff_ffff_e000, GUEST_LDTR_SELECTOR = 0x50);
                set!(v, GUEST_LDTR_RIGHTS = 0x82, GUEST_LDTR_LIMIT = 0xfff);
            }
            Mode::Compatibility => {
                set!(v, GUEST_CS_RIGHTS = 0xc09f, GUEST_LDTR_RIGHTS = 0x82);
                data(v, 0x10, 0xc09b, u32::MAX);
            }
            Mode::Pae | Mode::PaeWithEpt | Mode::Legacy | Mode::Unpaged => {
                set!(v, GUEST_CS_RIGHTS = 0xc09b, GUEST_CR3 = PAGE_DIRECTORIES);
                data(v, 0x10, 0xc093, u32::MAX);
            }
            Mode::Vm86 | Mode::Real => {
                let rights = if self.mode == Mode::Vm86 { 0xf3 } else { 0x93 };
                data(v, 0x1234, rights, 0xffff);
                set!(v, GUEST_ES_BASE = 0x1_2340, GUEST_DS_BASE = 0x1_2340);
                set!(v, GUEST_FS_BASE = 0x1_2340, GUEST_GS_BASE = 0x1_2340);
                set!(v, GUEST_CS_SELECTOR = 0xf000, GUEST_CS_BASE = 0xf_0000);
                set!(v, GUEST_CS_LIMIT = 0xffff, GUEST_CS_RIGHTS = rights);
                set!(v, GUEST_SS_SELECTOR = 0, GUEST_SS_BASE = 0);
                set!(v, GUEST_SS_LIMIT = 0xffff, GUEST_SS_RIGHTS = rights);
            }
        }
        match self.mode {
            Mode::Legacy | Mode::Vm86 => {
                set!(v, GUEST_CR4 = 0x2000);
            }
            Mode::Unpaged => {
                set!(v, GUEST_CR0 = 0x31, GUEST_CR4 = 0x2000);
            }
            Mode::Real => {
                set!(v, GUEST_CR0 = 0x30, GUEST_CR4 = 0x2000, GUEST_TR_RIGHTS = 0x83);
            }
            _ => {}
        }
        set!(v, GUEST_EFER = self.efer());
        // By EPT the table is not read; entries that are good, and one that is not there with reserved bits set.
        set!(v, GUEST_PDPTE0 = 0x1_0001, GUEST_PDPTE1 = 0x1_2219, GUEST_PDPTE2 = 0x1e6);
    }

    fn words(&self, v: &mut Vmcs12, c: &Capabilities) {
        let (all, needs_unrestricted) = match (self.controls, self.mode) {
            (controls, Mode::Unpaged | Mode::Real) => (controls, true),
            (Controls::Unrestricted, mode) => (Controls::All, mode != Mode::Pae),
            (controls, _) => (controls, false),
        };
        let ept = match (all, self.mode) {
            (_, Mode::Pae) => false,
            (Controls::All | Controls::Unrestricted, _) => true,
            (_, mode) => mode == Mode::PaeWithEpt || needs_unrestricted,
        };
        let mut secondary = 0;
        match all {
            Controls::Few => {}
            Controls::All | Controls::Unrestricted => {
                set!(v, PIN_CONTROLS = c.pin.may(), PROC_CONTROLS = c.primary.may());
                set!(v, EXIT_CONTROLS = c.exit.may(), ENTRY_CONTROLS = c.entry.may());
                // x2APIC mode does not go with APIC accesses.
                secondary = c.secondary.may() & !(1 << 4);
                pages(v);
            }
            Controls::X2Apic => {
                let primary = v.primary().bits() | 1 << 21 | 1 << 28;
                set!(v, PROC_CONTROLS = primary, VIRTUAL_APIC_ADDR = APIC_PAGE);
                set!(v, MSR_BITMAP = 0x1000, TPR_THRESHOLD = 5);
                let entry = v.entry().bits() | 1 << 2;
                set!(v, ENTRY_CONTROLS = entry);
                secondary = 1 << 4 | 1 << 8;
            }
        }
        if !ept {
            // PML needs EPT, and so does the switch of EPTPs by a VM function.
            secondary &= !(1 << 1 | 1 << 7 | 1 << 17);
            set!(v, VM_FUNCTION_CONTROLS = 0);
        }
        secondary &= !(1 << 7);
        secondary |= u32::from(ept) << 1 | u32::from(needs_unrestricted) << 7;
        set!(v, PROC_CONTROLS2 = secondary, EPT_POINTER = 0x501e);
        let entry = v.entry().bits() & !(1 << 9) | u32::from(self.ia32e()) << 9;
        set!(v, ENTRY_CONTROLS = entry);
        if self.legacy_host {
            let exit = v.exit().bits() & !(1 << 9);
            set!(v, EXIT_CONTROLS = exit, HOST_EFER = 0x801);
        }
    }

    fn flow(&self, v: &mut Vmcs12) {
        let mut rflags = if self.mode == Mode::Vm86 { 0x2_0202 } else { 0x202 };
        match self.event {
            Event::None | Event::WaitForSipi => {}
            Event::External | Event::HaltedExternal => {
                set!(v, ENTRY_INTERRUPTION = 0x8000_0030);
            }
            Event::Nmi => {
                set!(v, ENTRY_INTERRUPTION = 0x8000_0202);
            }
            // #GP, of which an unprotected guest gets no error code.
            Event::Exception => {
                let code = if self.mode == Mode::Real { 0 } else { 0x800 };
                set!(v, ENTRY_INTERRUPTION = 0x8000_030d | code, ENTRY_ERROR_CODE = 0x1234);
            }
            Event::Software => {
                set!(v, ENTRY_INTERRUPTION = 0x8000_0480, ENTRY_INSTRUCTION_LENGTH = 2);
            }
            Event::MonitorTrap => {
                set!(v, ENTRY_INTERRUPTION = 0x8000_0700);
            }
            Event::HaltedStep => {
                rflags |= 0x100;
                set!(v, GUEST_PENDING_DEBUG = 0x4000);
            }
            Event::BlockedBySti => {
                set!(v, GUEST_INTERRUPTIBILITY = 1);
            }
            Event::BlockedByMovSs => {
                rflags |= 0x100;
                set!(v, GUEST_INTERRUPTIBILITY = 2, GUEST_PENDING_DEBUG = 0x4000);
            }
        }
        set!(v, GUEST_RFLAGS = rflags, GUEST_ACTIVITY = self.activity());
    }
}

fn data(v: &mut Vmcs12, selector: u16, rights: u32, limit: u32) {
    set!(v, GUEST_ES_SELECTOR = selector, GUEST_ES_RIGHTS = rights, GUEST_ES_LIMIT = limit);
    set!(v, GUEST_DS_SELECTOR = selector, GUEST_DS_RIGHTS = rights, GUEST_DS_LIMIT = limit);
    set!(v, GUEST_FS_SELECTOR = selector, GUEST_FS_RIGHTS = rights, GUEST_FS_LIMIT = limit);
    set!(v, GUEST_GS_SELECTOR = selector, GUEST_GS_RIGHTS = rights, GUEST_GS_LIMIT = limit);
}

/// Where the pages and lists lie that controls ask for.
fn pages(v: &mut Vmcs12) {
    set!(v, VPID = 1, POSTED_INTR_VECTOR = 0xf2, POSTED_INTR_DESC = 0xb040);
    set!(v, VIRTUAL_APIC_ADDR = APIC_PAGE, APIC_ACCESS_ADDR = 0xc000, MSR_BITMAP = 0xd000);
    set!(v, IO_BITMAP_A = 0xb000, IO_BITMAP_B = 0xc000, PML_ADDRESS = 0xd000);
    set!(v, VM_FUNCTION_CONTROLS = 1, EPTP_LIST = 0xd000, TSC_MULTIPLIER = 1 << 48);
    set!(v, VMREAD_BITMAP = 0xd000, VMWRITE_BITMAP = 0xd000, VMCS_LINK = SHADOW);
    set!(v, EXIT_MSR_STORE_ADDR = 0xe000, EXIT_MSR_STORE_COUNT = 1);
    set!(v, EXIT_MSR_LOAD_ADDR = 0xe010, EXIT_MSR_LOAD_COUNT = 2);
    set!(v, ENTRY_MSR_LOAD_ADDR = 0xe030, ENTRY_MSR_LOAD_COUNT = 3);
}

/// What a field is changed to.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// Bits that become another: one, or two.
    Flip(u32),
    FlipTwo(u32, u32),
    Word(u64),
    LowByte(u8),
    LowHalf(u16),
    /// A page of the first 64 KiB.
    Page(u64),
    /// An injection that is valid.
    Inject(u64),
    /// A value at an edge: of canonical or of physical addresses, or of a width.
    Edge(usize),
}

/// Values at edges, for a width of physical addresses.
fn edge(number: usize, physical_bits: u8) -> u64 {
    let beyond = 1u64 << physical_bits;
    let edges = [
        0,
        u64::MAX,
        0x0000_7fff_ffff_ffff,
        0x0000_8000_0000_0000,
        0x0000_ffff_ffff_ffff,
        0x0001_0000_0000_0000,
        0xffff_0000_0000_0000,
        0xffff_7fff_ffff_ffff,
        0xffff_8000_0000_0000,
        beyond,
        beyond - 1,
        beyond - 16,
        beyond - 32,
        beyond - 64,
        beyond - 0x1000,
        0xffff_ffff,
        1 << 32,
        1 << 31,
        1 << 52,
        0xffff,
        0x1_0000,
        1,
        2,
        3,
        15,
        16,
    ];
    edges[number % edges.len()]
}

impl Change {
    fn of(self, old: u64, bits: u32, physical_bits: u8) -> u64 {
        match self {
            Self::Flip(bit) => old ^ 1 << (bit % bits),
            Self::FlipTwo(one, other) => old ^ 1 << (one % bits) ^ 1 << (other % bits),
            Self::Word(word) => word,
            Self::LowByte(byte) => old & !0xff | u64::from(byte),
            Self::LowHalf(half) => old & !0xffff | u64::from(half),
            Self::Page(page) => page << 12,
            Self::Inject(low) => 1 << 31 | low,
            Self::Edge(number) => edge(number, physical_bits),
        }
    }
}

/// A field's name, its encoding, and where the VMCS12 has it.
type Line = (&'static str, u64, Named);

/// Fields that the VMCS12 has; the others cannot be written.
pub fn fields() -> &'static [Line] {
    static FIELDS: LazyLock<Vec<Line>> = LazyLock::new(|| {
        let found = |(name, encoding): &(&'static str, u32)| {
            let encoding = u64::from(*encoding);
            place::find(encoding).map(|named| (*name, encoding, named))
        };
        ALL.iter().filter_map(found).collect()
    });
    &FIELDS
}

/// Bits of a field, by the width in its encoding.
pub fn bits(encoding: u64) -> u32 {
    [16, 64, 32, 64][encoding as usize >> 13 & 3]
}

/// A case: a VMCS that can be entered, and one to three fields of it that are changed.
#[derive(Clone, Debug)]
pub struct Case {
    pub base: Base,
    pub changes: Vec<(usize, Change)>,
    /// Reserved bits of access rights, which VMWRITE drops, are in the region: L1 has written it by itself.
    pub raw: bool,
}

impl Case {
    /// What VMWRITE writes: names, encodings and values.
    pub fn writes(&self, image: &Vmcs12) -> Vec<(&'static str, u64, u64)> {
        let (fields, mut image) = (fields(), image.clone());
        let mut writes = Vec::new();
        for (index, change) in &self.changes {
            let (name, encoding, named) = fields[index % fields.len()];
            let old = image.read(named);
            let new = change.of(old, bits(encoding), self.base.physical_bits);
            image.write(if self.raw { 0 } else { encoding }, named, new);
            writes.push((name, encoding, image.read(named)));
        }
        writes
    }

    /// The VMCS with what is written.
    pub fn changed(&self, image: &Vmcs12, writes: &[(&str, u64, u64)]) -> Vmcs12 {
        let mut changed = image.clone();
        for (_, encoding, value) in writes {
            let named = place::find(*encoding).unwrap();
            changed.write(if self.raw { 0 } else { *encoding }, named, *value);
        }
        changed
    }
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (0..64u32).prop_map(Change::Flip),
        1 => (0..64u32, 0..64u32).prop_map(|(one, other)| Change::FlipTwo(one, other)),
        1 => any::<u64>().prop_map(Change::Word),
        2 => any::<u8>().prop_map(Change::LowByte),
        1 => any::<u16>().prop_map(Change::LowHalf),
        1 => (0..20u64).prop_map(Change::Page),
        1 => (0..0x1000u64).prop_map(Change::Inject),
        5 => any::<usize>().prop_map(Change::Edge),
    ]
}

pub fn case() -> impl Strategy<Value = Case> {
    let base = (0..MODES.len(), 0..CONTROLS.len(), 0..EVENTS.len(), 0..8u8, 0..WIDTHS.len());
    let base = base.prop_map(|(mode, controls, event, host, width)| {
        Base::new(MODES[mode], CONTROLS[controls], EVENTS[event], host == 7, WIDTHS[width])
    });
    let changes = proptest::collection::vec((any::<usize>(), change()), 1..=3);
    (base, changes, 0..8u8).prop_map(|(base, changes, raw)| Case { base, changes, raw: raw == 7 })
}
