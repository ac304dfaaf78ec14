//! What this CPU offers of VMX: the capability MSRs and CPUID, read once at load.
//!
//! A control may be fixed to 0 or to 1; the capability MSRs say which (SDM vol. 3 appendix A). The
//! control words that every VMCS starts with are put together here, so that nothing above looks at
//! a capability MSR again. What must be there is in [`NEEDED`], each with the sentence that the log
//! shows where it is not.

use core::fmt;

use crate::bits::{cap, entry, ept, exit, pin, primary, secondary};

/// One control word: what is set from the start, and what may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controls {
    /// The word a VMCS starts with.
    pub base: u32,
    /// Bits that may be set.
    pub may: u32,
}

impl Controls {
    /// Reads a capability MSR: the low half must be set, the high half may be.
    const fn read(msr: u64) -> Self {
        Self { base: msr as u32, may: (msr >> 32) as u32 }
    }

    /// Whether every one of `bits` may be set.
    #[inline]
    pub const fn offers(self, bits: u32) -> bool {
        self.may & bits == bits
    }

    /// Whether none of `bits` has to be set.
    const fn frees(self, bits: u32) -> bool {
        self.base & bits == 0
    }

    /// With those of `bits` set from the start that may be.
    const fn with(self, bits: u32) -> Self {
        Self { base: self.base | bits & self.may, may: self.may }
    }
}

/// VMX features of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Identifies the format of VMXON regions and VMCSs.
    pub revision: u32,
    /// Pin-based controls.
    pub pin: Controls,
    /// Primary processor-based controls.
    pub primary: Controls,
    /// Secondary processor-based controls.
    pub secondary: Controls,
    /// VM-exit controls.
    pub exit: Controls,
    /// VM-entry controls.
    pub entry: Controls,
    /// CR0 bits that VMX operation fixes to 1. PE and PG are not among them for a guest.
    pub cr0_fixed: u64,
    /// CR4 bits that VMX operation fixes to 1.
    pub cr4_fixed: u64,
    /// CR4 bits that VMX operation allows.
    pub cr4_allowed: u64,
    /// Address-space ids, and an INVVPID that can drop all of them.
    pub vpid: bool,
    /// INVVPID of a single context.
    pub invvpid_single: bool,
    /// INVVPID of one address.
    pub invvpid_address: bool,
    /// INVEPT of a single context.
    pub invept_single: bool,
    /// EPT entries have accessed and dirty bits.
    pub ept_dirty: bool,
    /// EPT maps 2 MiB pages.
    pub ept_2m: bool,
    /// EPT maps 1 GiB pages.
    pub ept_1g: bool,
    /// Page-modification log.
    pub pml: bool,
    /// TSC scaling.
    pub tsc_scaling: bool,
    /// The VMX-preemption timer counts at the TSC's rate divided by two to this power.
    pub preemption_timer: Option<u8>,
    /// PAUSE-loop exiting.
    pub ple: bool,
    /// An event can be injected with an instruction length of 0.
    pub zero_length_injection: bool,
    /// RDTSCP.
    pub rdtscp: bool,
    /// INVPCID can be given to guests.
    pub invpcid: bool,
    /// SPEC_CTRL exists.
    pub spec_ctrl: bool,
    /// XSAVE is enabled by the kernel.
    pub xsave: bool,
    /// XSAVES and IA32_XSS exist and can be given to guests.
    pub xsaves: bool,
    /// Protection keys are enabled by the kernel.
    pub pku: bool,
}

/// Why VMX cannot be used on this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// CPUID does not report VMX.
    Absent,
    /// Firmware switched it off.
    DisabledByFirmware,
    /// CR4.VMXE is already set.
    InUse,
    /// VMXON failed.
    Refused,
    /// Something that this module needs; the sentence says what.
    Missing(&'static str),
}

impl Unusable {
    /// The reason in words, for the log.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Absent => "the CPU does not offer VMX",
            Self::DisabledByFirmware => {
                "VMX is disabled by the firmware (IA32_FEATURE_CONTROL is locked without it)"
            }
            Self::InUse => "another hypervisor has enabled VMX (CR4.VMXE is set)",
            Self::Refused => "VMXON failed although the CPU reports VMX",
            Self::Missing(what) => what,
        }
    }
}

/// What the module cannot do without, in the order in which it is looked for: the first thing that
/// is missing is what the log names.
const NEEDED: [(fn(&Raw) -> bool, &str); 17] = [
    (
        |r| r.basic >> cap::BASIC_TYPE & 0xf == 6 && r.basic & cap::BASIC_32BIT == 0,
        "the CPU wants its VMX structures in memory that is not write-back",
    ),
    (
        |r| r.primary.offers(primary::SECONDARY),
        "the CPU does not offer extended page tables (EPT): this module needs them until shadow paging serves VMX too",
    ),
    (
        |r| r.secondary.offers(secondary::EPT),
        "the CPU does not offer extended page tables (EPT): this module needs them until shadow paging serves VMX too",
    ),
    (
        |r| r.secondary.offers(secondary::UNRESTRICTED_GUEST),
        "the CPU does not offer unrestricted guests: this module needs them until it can run real mode without",
    ),
    (
        |r| r.ept & cap::EPT_WB != 0,
        "the CPU's extended page tables cannot lie in write-back memory",
    ),
    (|r| r.ept & cap::EPT_WALK_4 != 0, "the CPU's extended page tables do not have four levels"),
    (
        |r| r.ept & cap::INVEPT != 0 && r.ept & cap::INVEPT_ALL != 0,
        "the CPU does not offer INVEPT of all contexts",
    ),
    (
        |r| r.primary.frees(primary::CR3_LOAD | primary::CR3_STORE | primary::INVLPG),
        "the CPU does not let guests own CR3",
    ),
    (|r| r.primary.offers(primary::MSR_BITMAPS), "the CPU does not offer MSR bitmaps"),
    (|r| r.primary.offers(primary::TPR_SHADOW), "the CPU does not offer a TPR shadow"),
    (|r| r.primary.offers(primary::TSC_OFFSET), "the CPU does not offer TSC offsetting"),
    (
        |r| r.pin.offers(pin::INTERRUPT | pin::NMI),
        "the CPU does not offer exits on interrupts and NMIs",
    ),
    (
        |r| {
            r.pin.offers(pin::VIRTUAL_NMI)
                && r.primary.offers(primary::NMI_WINDOW | primary::INTERRUPT_WINDOW)
        },
        "the CPU does not offer virtual NMIs",
    ),
    (
        |r| r.exit.offers(exit::HOST_64) && r.entry.offers(entry::GUEST_64),
        "the CPU does not offer VMX in 64-bit mode",
    ),
    (
        |r| r.exit.offers(exit::LOAD_EFER) && r.entry.offers(entry::LOAD_EFER),
        "the CPU does not switch EFER at VM entries and exits",
    ),
    (
        |r| r.exit.offers(exit::LOAD_PAT) && r.entry.offers(entry::LOAD_PAT),
        "the CPU does not switch PAT at VM entries and exits",
    ),
    (
        |r| {
            r.exit.offers(exit::SAVE_DEBUG)
                && r.entry.offers(entry::LOAD_DEBUG)
                && r.primary.offers(ALWAYS_PRIMARY)
        },
        "the CPU lacks a control that every CPU with unrestricted guests has",
    ),
];

/// Exits that every guest starts with: what would stop the CPU, and what is virtualized.
const ALWAYS_PRIMARY: u32 = primary::HLT
    | primary::MWAIT
    | primary::MONITOR
    | primary::RDPMC
    | primary::MOV_DR
    | primary::UNCONDITIONAL_IO;

/// Taken where the CPU has it, whatever the guest's CPUID says. Without the exits a guest could use
/// instructions that it was not offered; RDTSCP, INVPCID and XSAVES are cleared for a guest without
/// them.
const WHERE_THERE: u32 = secondary::RDTSCP
    | secondary::WBINVD
    | secondary::INVPCID
    | secondary::ENCLS
    | secondary::XSAVES;

/// The capability MSRs.
struct Raw {
    basic: u64,
    pin: Controls,
    primary: Controls,
    secondary: Controls,
    exit: Controls,
    entry: Controls,
    misc: u64,
    ept: u64,
    cr0_fixed: u64,
    cr4_fixed: u64,
    cr4_allowed: u64,
}

impl Raw {
    fn read(mut rdmsr: impl FnMut(u32) -> u64) -> Self {
        let basic = rdmsr(cap::BASIC);
        // The true MSRs tell which of the bits that older CPUs fix to 1 need not be.
        let exact = basic & cap::BASIC_TRUE != 0;
        let mut word = |plain, exactly| Controls::read(rdmsr(if exact { exactly } else { plain }));
        let pin = word(cap::PIN, cap::TRUE_PIN);
        let primary = word(cap::PRIMARY, cap::TRUE_PRIMARY);
        let exit = word(cap::EXIT, cap::TRUE_EXIT);
        let entry = word(cap::ENTRY, cap::TRUE_ENTRY);
        let has_secondary = primary.offers(primary::SECONDARY);
        let secondary =
            if has_secondary { Controls::read(rdmsr(cap::SECONDARY)) } else { Controls::default() };
        // The MSR exists where either of the two can be used.
        let has_ept = secondary.may & (secondary::EPT | secondary::VPID) != 0;
        Self {
            basic,
            pin,
            primary,
            secondary,
            exit,
            entry,
            misc: rdmsr(cap::MISC),
            ept: if has_ept { rdmsr(cap::EPT_VPID) } else { 0 },
            cr0_fixed: rdmsr(cap::CR0_FIXED0),
            cr4_fixed: rdmsr(cap::CR4_FIXED0),
            cr4_allowed: rdmsr(cap::CR4_FIXED1),
        }
    }
}

impl Features {
    /// Reads them; `host_cr4` is the host's, for what its kernel has enabled.
    pub fn read(
        rdmsr: impl FnMut(u32) -> u64,
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
        host_cr4: u64,
    ) -> Result<Self, Unusable> {
        let last = cpuid(0, 0)[0];
        if cpuid(1, 0)[2] & (1 << 5) == 0 {
            return Err(Unusable::Absent);
        }
        let raw = Raw::read(rdmsr);
        if let Some((_, what)) = NEEDED.iter().find(|(there, _)| !there(&raw)) {
            return Err(Unusable::Missing(what));
        }
        let seven = if last >= 7 { cpuid(7, 0) } else { [0; 4] };
        let extended =
            if cpuid(0x8000_0000, 0)[0] > 0x8000_0000 { cpuid(0x8000_0001, 0)[3] } else { 0 };
        let xsaves = last >= 0xd && cpuid(0xd, 1)[0] & (1 << 3) != 0;
        let wide = cap::INVVPID | cap::INVVPID_ALL;
        let vpid = raw.secondary.offers(secondary::VPID) && raw.ept & wide == wide;
        let ple = raw.secondary.offers(secondary::PAUSE_LOOP);
        let timer = raw.pin.offers(pin::PREEMPTION_TIMER);
        let mut at_once = secondary::EPT | secondary::UNRESTRICTED_GUEST | WHERE_THERE;
        if vpid {
            at_once |= secondary::VPID;
        }
        if ple {
            at_once |= secondary::PAUSE_LOOP;
        }
        Ok(Self {
            revision: (raw.basic & cap::BASIC_REVISION) as u32,
            pin: raw.pin.with(pin::INTERRUPT | pin::NMI | pin::VIRTUAL_NMI),
            primary: raw.primary.with(
                ALWAYS_PRIMARY
                    | primary::TSC_OFFSET
                    | primary::TPR_SHADOW
                    | primary::MSR_BITMAPS
                    | primary::SECONDARY,
            ),
            secondary: raw.secondary.with(at_once),
            exit: raw
                .exit
                .with(exit::SAVE_DEBUG | exit::HOST_64 | exit::LOAD_PAT | exit::LOAD_EFER),
            entry: raw.entry.with(entry::LOAD_DEBUG | entry::LOAD_PAT | entry::LOAD_EFER),
            cr0_fixed: raw.cr0_fixed,
            cr4_fixed: raw.cr4_fixed,
            cr4_allowed: raw.cr4_allowed,
            vpid,
            invvpid_single: vpid && raw.ept & cap::INVVPID_SINGLE != 0,
            invvpid_address: vpid && raw.ept & cap::INVVPID_ADDRESS != 0,
            invept_single: raw.ept & cap::INVEPT_SINGLE != 0,
            ept_dirty: raw.ept & cap::EPT_DIRTY != 0,
            ept_2m: raw.ept & cap::EPT_2M != 0,
            ept_1g: raw.ept & cap::EPT_1G != 0,
            // The log is of dirty bits being set.
            pml: raw.secondary.offers(secondary::PML) && raw.ept & cap::EPT_DIRTY != 0,
            tsc_scaling: raw.secondary.offers(secondary::TSC_SCALING),
            preemption_timer: timer.then_some((raw.misc & cap::MISC_TIMER_SHIFT) as u8),
            ple,
            zero_length_injection: raw.misc & cap::MISC_ZERO_LENGTH != 0,
            rdtscp: extended & (1 << 27) != 0 && raw.secondary.offers(secondary::RDTSCP),
            invpcid: seven[1] & (1 << 10) != 0 && raw.secondary.offers(secondary::INVPCID),
            spec_ctrl: seven[3] & (1 << 26) != 0,
            xsave: host_cr4 & (1 << 18) != 0,
            xsaves: xsaves && raw.secondary.offers(secondary::XSAVES),
            pku: host_cr4 & (1 << 22) != 0,
        })
    }

    /// The EPT pointer for tables whose root is at `root`: four levels, walked in write-back memory.
    #[inline]
    pub const fn ept_pointer(&self, root: u64) -> u64 {
        root | ept::WRITE_BACK | ept::FOUR_LEVELS | if self.ept_dirty { ept::DIRTY } else { 0 }
    }
}

/// What was found, for the log.
impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let optional = [
            (self.vpid, "VPID"),
            (self.ept_dirty, "EPT dirty bits"),
            (self.ept_1g, "1 GiB pages"),
            (self.ept_2m && !self.ept_1g, "2 MiB pages"),
            (self.pml, "PML"),
            (self.tsc_scaling, "TSC scaling"),
            (self.preemption_timer.is_some(), "preemption timer"),
            (self.ple, "PLE"),
        ];
        f.write_str("EPT")?;
        optional.iter().filter(|(there, _)| *there).try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}
