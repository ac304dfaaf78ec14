//! What this CPU offers of VMX: the capability MSRs and CPUID, read once at load.
//!
//! A control may be fixed to 0 or to 1; the capability MSRs say which (SDM vol. 3 appendix A). The
//! control words that every VMCS starts with are put together here, so that nothing above looks at
//! a capability MSR again. What must be there is in [`NEEDED`], each with the sentence that the log
//! shows where it is not.

use core::fmt;

use bitflags::Flags;
use nested_vmx::capabilities::Host;
use x86::vmcs::capability::{self as cap, Allowed, EptVpidCap, VmxBasic, VmxMisc};
use x86::vmcs::{
    EntryControls, ExitControls, PinControls, ProcControls, ProcControls2, eptp, field,
};
use x86::{Cr0, Cr4};

use crate::errata;

/// One control word: what is set from the start, and what may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controls<B> {
    /// The word a VMCS starts with.
    pub base: B,
    /// Bits that may be set.
    pub may: B,
}

impl<B: Flags<Bits = u32> + Copy> Controls<B> {
    /// Reads a capability MSR.
    fn read(msr: u64) -> Self {
        let allowed = Allowed(msr);
        // Allowed-0 settings are what must be 1, allowed-1 what may be (§A.2 to §A.5).
        Self { base: B::from_bits_retain(allowed.must()), may: B::from_bits_retain(allowed.may()) }
    }

    /// Whether every one of `bits` may be set.
    #[inline]
    pub fn offers(&self, bits: B) -> bool {
        self.may.contains(bits)
    }

    /// Whether none of `bits` has to be set.
    fn frees(&self, bits: B) -> bool {
        !self.base.intersects(bits)
    }

    /// With those of `bits` set from the start that may be.
    fn with(self, bits: B) -> Self {
        // What may not be set stays clear: whether that can be borne is asked in [`NEEDED`].
        Self { base: self.base.union(bits.intersection(self.may)), may: self.may }
    }
}

/// VMX features of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Identifies the format of VMXON regions and VMCSs.
    pub revision: u32,
    /// Pin-based controls.
    pub pin: Controls<PinControls>,
    /// Primary processor-based controls.
    pub primary: Controls<ProcControls>,
    /// Secondary processor-based controls.
    pub secondary: Controls<ProcControls2>,
    /// VM-exit controls.
    pub exit: Controls<ExitControls>,
    /// VM-entry controls.
    pub entry: Controls<EntryControls>,
    /// CR0 bits that VMX operation fixes to 1. PE and PG are not among them for a guest.
    pub cr0_fixed: Cr0,
    /// CR4 bits that VMX operation fixes to 1.
    pub cr4_fixed: Cr4,
    /// CR4 bits that VMX operation allows.
    pub cr4_allowed: Cr4,
    /// Address-space ids, and an INVVPID that can drop all of them.
    pub vpid: bool,
    /// INVVPID of a single context.
    pub invvpid_single: bool,
    /// INVVPID of one address.
    pub invvpid_address: bool,
    /// INVEPT of a single context.
    pub invept_single: bool,
    /// Guests have extended page tables, and run in real mode and without paging as they are.
    pub ept: bool,
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
    /// The VMX-preemption timer counts at the TSC's rate divided by two to this power. Among the
    /// controls that a VMCS starts with where it is there.
    pub preemption_timer: Option<u8>,
    /// A local APIC in x2APIC mode can be left to the CPU: its registers, the delivery of its
    /// interrupts, their end.
    pub apicv: bool,
    /// PAUSE-loop exiting.
    pub ple: bool,
    /// An event can be injected with an instruction length of 0.
    pub zero_length_injection: bool,
    /// RDTSCP.
    pub rdtscp: bool,
    /// INVPCID can be given to guests.
    pub invpcid: bool,
    /// The CPU has no CR4.UMIP, but the instructions that it is about can exit.
    pub umip_by_exits: bool,
    /// Instructions for table registers can exit.
    pub table_exits: bool,
    /// SPEC_CTRL exists.
    pub spec_ctrl: bool,
    /// XSAVE is enabled by the kernel.
    pub xsave: bool,
    /// XSAVES and IA32_XSS exist and can be given to guests.
    pub xsaves: bool,
    /// Protection keys are enabled by the kernel.
    pub pku: bool,
    /// Guests may be hypervisors.
    pub nested: bool,
    /// VMREAD and VMWRITE of a guest that is one can be served by a shadow VMCS, in which L0 can write every field.
    pub shadow_vmcs: bool,
    /// What this CPU's capability MSRs say, for guests that are.
    pub nested_host: Host,
    /// The CPU delivers virtual interrupts: its VMCSs have the guest interrupt status.
    pub interrupt_status: bool,
    /// Guests that are hypervisors are offered virtual-interrupt delivery and posted interrupts, which L0 does by itself:
    /// where stock KVM does, that is where the CPU has both. `nested_apicv=1`: where it has the first.
    pub nested_virtual_interrupts: bool,
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

/// Whether it is there, and what to say where it is not.
type Need = (fn(&Raw) -> bool, &'static str);

/// What EPT takes, where it is not turned off.
const NEEDED_OF_EPT: [Need; 6] = [
    (
        |r| r.secondary.offers(ProcControls2::EPT),
        "the CPU does not offer extended page tables (EPT): with ept=0 this module uses shadow paging",
    ),
    (
        |r| r.secondary.offers(ProcControls2::UNRESTRICTED_GUEST),
        "the CPU does not offer unrestricted guests: with ept=0 this module runs real mode without",
    ),
    (|r| r.ept.write_back(), "the CPU's extended page tables cannot lie in write-back memory"),
    (|r| r.ept.levels_4(), "the CPU's extended page tables do not have four levels"),
    // INVEPT of all contexts is what is left where a single one cannot be named.
    (|r| r.ept.invept() && r.ept.invept_all(), "the CPU does not offer INVEPT of all contexts"),
    (
        |r| {
            r.primary.frees(ProcControls::CR3_LOAD | ProcControls::CR3_STORE | ProcControls::INVLPG)
        },
        "the CPU does not let guests own CR3",
    ),
];

/// What the module cannot do without, in the order in which it is looked for: the first thing that
/// is missing is what the log names.
#[allow(clippy::type_complexity)] // A list, read once.
const NEEDED: [Need; 11] = [
    // The kernel's pages are write-back: regions elsewhere would need mappings of their own.
    (
        |r| r.basic.memory_type() == 6 && !r.basic.is_32_bit(),
        "the CPU wants its VMX structures in memory that is not write-back",
    ),
    (
        |r| r.primary.offers(ProcControls::SECONDARY),
        "the CPU does not offer extended page tables (EPT), nor the other secondary controls",
    ),
    (|r| r.primary.offers(ProcControls::MSR_BITMAPS), "the CPU does not offer MSR bitmaps"),
    (|r| r.primary.offers(ProcControls::TPR_SHADOW), "the CPU does not offer a TPR shadow"),
    (|r| r.primary.offers(ProcControls::TSC_OFFSET), "the CPU does not offer TSC offsetting"),
    (
        |r| r.pin.offers(PinControls::EXTERNAL_INTERRUPT | PinControls::NMI),
        "the CPU does not offer exits on interrupts and NMIs",
    ),
    (
        |r| {
            // Without virtual NMIs a handled NMI could not be told from a pending one: stock KVM guesses then.
            r.pin.offers(PinControls::VIRTUAL_NMIS)
                && r.primary.offers(ProcControls::NMI_WINDOW | ProcControls::INTERRUPT_WINDOW)
        },
        "the CPU does not offer virtual NMIs",
    ),
    (
        |r| r.exit.offers(ExitControls::HOST_64) && r.entry.offers(EntryControls::IA32E_GUEST),
        "the CPU does not offer VMX in 64-bit mode",
    ),
    (
        |r| r.exit.offers(ExitControls::LOAD_EFER) && r.entry.offers(EntryControls::LOAD_EFER),
        "the CPU does not switch EFER at VM entries and exits",
    ),
    (
        |r| r.exit.offers(ExitControls::LOAD_PAT) && r.entry.offers(EntryControls::LOAD_PAT),
        "the CPU does not switch PAT at VM entries and exits",
    ),
    (
        |r| {
            r.exit.offers(ExitControls::SAVE_DEBUG)
                && r.entry.offers(EntryControls::LOAD_DEBUG)
                && r.primary.offers(ALWAYS_PRIMARY)
        },
        "the CPU lacks a control that every CPU with unrestricted guests has",
    ),
];

/// Exits that every guest starts with: what would stop the CPU, and what is virtualized.
// HLT and MWAIT stop the CPU, MONITOR arms it; counters, debug registers and ports are not the guest's.
const ALWAYS_PRIMARY: ProcControls = ProcControls::HLT
    .union(ProcControls::MWAIT)
    .union(ProcControls::MONITOR)
    .union(ProcControls::RDPMC)
    .union(ProcControls::MOV_DR)
    .union(ProcControls::UNCONDITIONAL_IO);

/// Taken where the CPU has it, whatever the guest's CPUID says. Without the exits a guest could use
/// instructions that it was not offered; RDTSCP, INVPCID and XSAVES are cleared for a guest without
/// them.
const WHERE_THERE: ProcControls2 = ProcControls2::RDTSCP
    .union(ProcControls2::WBINVD)
    .union(ProcControls2::INVPCID)
    .union(ProcControls2::ENCLS)
    .union(ProcControls2::XSAVES);

/// What it takes that the CPU serves a local APIC.
pub(crate) const APICV: ProcControls2 = ProcControls2::VIRTUALIZE_X2APIC
    .union(ProcControls2::APIC_REGISTERS)
    .union(ProcControls2::VIRTUAL_INTERRUPTS);

/// VMX_MISC: an event can be injected with an instruction length of 0.
const ZERO_LENGTH: u64 = 1 << 30;
/// VMX_MISC: VMWRITE writes fields of the read-only data area too.
const WRITES_ALL: u64 = 1 << 29;
/// VMX_EPT_VPID_CAP: INVVPID of one address.
const INVVPID_ADDRESS: u64 = 1 << 40;

/// The capability MSRs.
struct Raw {
    basic: VmxBasic,
    pin: Controls<PinControls>,
    primary: Controls<ProcControls>,
    secondary: Controls<ProcControls2>,
    exit: Controls<ExitControls>,
    entry: Controls<EntryControls>,
    misc: VmxMisc,
    ept: EptVpidCap,
    cr0_fixed: u64,
    cr4_fixed: u64,
    cr4_allowed: u64,
}

impl Raw {
    fn read(rdmsr: &mut impl FnMut(u32) -> u64) -> Self {
        let basic = VmxBasic(rdmsr(cap::VMX_BASIC));
        // The true MSRs tell which of the bits that older CPUs fix to 1 need not be.
        // On CPUs without them the plain MSRs are exact.
        let exact = basic.has_true_controls();
        let mut word = |plain, exactly| rdmsr(if exact { exactly } else { plain });
        let pin = Controls::read(word(cap::VMX_PINBASED_CTLS, cap::VMX_TRUE_PINBASED_CTLS));
        let primary: Controls<ProcControls> =
            Controls::read(word(cap::VMX_PROCBASED_CTLS, cap::VMX_TRUE_PROCBASED_CTLS));
        let exit = Controls::read(word(cap::VMX_EXIT_CTLS, cap::VMX_TRUE_EXIT_CTLS));
        let entry = Controls::read(word(cap::VMX_ENTRY_CTLS, cap::VMX_TRUE_ENTRY_CTLS));
        // The MSR does not exist without the activating control: RDMSR would fault.
        let has_secondary = primary.offers(ProcControls::SECONDARY);
        let secondary: Controls<ProcControls2> = if has_secondary {
            Controls::read(rdmsr(cap::VMX_PROCBASED_CTLS2))
        } else {
            Controls::default()
        };
        // The MSR exists where either of the two can be used.
        let has_ept = secondary.may.intersects(ProcControls2::EPT | ProcControls2::VPID);
        Self {
            basic,
            pin,
            primary,
            secondary,
            exit,
            entry,
            misc: VmxMisc(rdmsr(cap::VMX_MISC)),
            ept: EptVpidCap(if has_ept { rdmsr(cap::VMX_EPT_VPID_CAP) } else { 0 }),
            // FIXED0 of CR0 names PE and PG, which unrestricted guests need not have.
            cr0_fixed: rdmsr(cap::VMX_CR0_FIXED0),
            cr4_fixed: rdmsr(cap::VMX_CR4_FIXED0),
            cr4_allowed: rdmsr(cap::VMX_CR4_FIXED1),
        }
    }
}

impl Raw {
    /// The capability MSRs as a guest's are made from them.
    fn nested_host(&self, rdmsr: &mut impl FnMut(u32) -> u64) -> Host {
        let word = |must: u32, may: u32| u64::from(may) << 32 | u64::from(must);
        Host {
            basic: self.basic.0,
            pin: word(self.pin.base.bits(), self.pin.may.bits()),
            primary: word(self.primary.base.bits(), self.primary.may.bits()),
            secondary: word(self.secondary.base.bits(), self.secondary.may.bits()),
            exit: word(self.exit.base.bits(), self.exit.may.bits()),
            entry: word(self.entry.base.bits(), self.entry.may.bits()),
            misc: self.misc.0,
            cr0_fixed1: rdmsr(cap::VMX_CR0_FIXED1),
            cr4_fixed1: self.cr4_allowed,
            ept_vpid: self.ept.0,
        }
    }
}

impl Features {
    /// Reads them; `host_cr4` is the host's, for what its kernel has enabled. `ept`: guests have extended
    /// page tables, else shadow tables.
    pub fn read(
        mut rdmsr: impl FnMut(u32) -> u64,
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
        host_cr4: Cr4,
        ept: bool,
    ) -> Result<Self, Unusable> {
        // Leaves beyond the last give the last one's answers on Intel: each is asked for by its number first.
        let last = cpuid(0, 0)[0];
        if cpuid(1, 0)[2] & (1 << 5) == 0 {
            return Err(Unusable::Absent);
        }
        let raw = Raw::read(&mut rdmsr);
        // EPT's needs come first: their sentences name the parameter that does without.
        let mut needed = NEEDED_OF_EPT.iter().filter(|_| ept).chain(&NEEDED);
        if let Some((_, what)) = needed.find(|(there, _)| !there(&raw)) {
            return Err(Unusable::Missing(what));
        }
        let seven = if last >= 7 { cpuid(7, 0) } else { [0; 4] };
        let extended =
            if cpuid(0x8000_0000, 0)[0] > 0x8000_0000 { cpuid(0x8000_0001, 0)[3] } else { 0 };
        let xsaves = last >= 0xd && cpuid(0xd, 1)[0] & (1 << 3) != 0;
        // Without INVVPID of all contexts numbers could not begin anew: no VPIDs are used then.
        let vpid =
            raw.secondary.offers(ProcControls2::VPID) && raw.ept.invvpid() && raw.ept.invvpid_all();
        let ple = raw.secondary.offers(ProcControls2::PAUSE_LOOP);
        // With a timer that counts wrongly deadlines would come late: better none.
        let timer = raw.pin.offers(PinControls::PREEMPTION_TIMER)
            && !errata::preemption_timer_is_slow(cpuid(1, 0)[0]);
        let mut at_once = WHERE_THERE;
        // Unrestricted guests are there with EPT alone (SDM vol. 3C §27.2.1.1).
        if ept {
            at_once |= ProcControls2::EPT | ProcControls2::UNRESTRICTED_GUEST;
        }
        if vpid {
            at_once |= ProcControls2::VPID;
        }
        if ple {
            at_once |= ProcControls2::PAUSE_LOOP;
        }
        Ok(Self {
            revision: raw.basic.revision(),
            // NMIs have to exit, and to be virtual: the host's and the guest's are two things.
            pin: raw.pin.with(
                PinControls::EXTERNAL_INTERRUPT
                    | PinControls::NMI
                    | PinControls::VIRTUAL_NMIS
                    | if timer { PinControls::PREEMPTION_TIMER } else { PinControls::empty() },
            ),
            primary: raw.primary.with(
                ALWAYS_PRIMARY
                    | ProcControls::TSC_OFFSET
                    | ProcControls::TPR_SHADOW
                    | ProcControls::MSR_BITMAPS
                    | ProcControls::SECONDARY,
            ),
            secondary: raw.secondary.with(at_once),
            // An exit saves DR7 and loads EFER and PAT: no list of MSRs is needed for any of them.
            exit: raw.exit.with(
                ExitControls::SAVE_DEBUG
                    | ExitControls::HOST_64
                    | ExitControls::LOAD_PAT
                    | ExitControls::LOAD_EFER,
            ),
            entry: raw.entry.with(
                EntryControls::LOAD_DEBUG | EntryControls::LOAD_PAT | EntryControls::LOAD_EFER,
            ),
            cr0_fixed: Cr0::from_bits_retain(raw.cr0_fixed),
            cr4_fixed: Cr4::from_bits_retain(raw.cr4_fixed),
            cr4_allowed: Cr4::from_bits_retain(raw.cr4_allowed),
            vpid,
            invvpid_single: vpid && raw.ept.invvpid_single(),
            invvpid_address: vpid && raw.ept.0 & INVVPID_ADDRESS != 0,
            invept_single: raw.ept.invept_single(),
            ept,
            ept_dirty: ept && raw.ept.accessed_dirty(),
            ept_2m: ept && raw.ept.large_2m(),
            ept_1g: ept && raw.ept.large_1g(),
            // The log is of dirty bits being set.
            pml: ept && raw.secondary.offers(ProcControls2::PML) && raw.ept.accessed_dirty(),
            tsc_scaling: raw.secondary.offers(ProcControls2::TSC_SCALING),
            preemption_timer: timer.then_some(raw.misc.timer_shift()),
            // A guest in real mode is executed in software then, which does not see what the CPU holds.
            apicv: ept && raw.secondary.offers(APICV),
            ple,
            zero_length_injection: raw.misc.0 & ZERO_LENGTH != 0,
            // Without their controls RDTSCP and INVPCID are #UD in a guest, whatever CPUID says (SDM vol. 3C §26.3).
            rdtscp: extended & (1 << 27) != 0 && raw.secondary.offers(ProcControls2::RDTSCP),
            invpcid: seven[1] & (1 << 10) != 0 && raw.secondary.offers(ProcControls2::INVPCID),
            umip_by_exits: seven[2] & (1 << 2) == 0
                && raw.secondary.offers(ProcControls2::DESCRIPTOR_TABLES),
            table_exits: raw.secondary.offers(ProcControls2::DESCRIPTOR_TABLES),
            // IBRS, STIBP or SSBD: each means that the MSR exists.
            spec_ctrl: seven[3] & (1 << 26 | 1 << 27 | 1 << 31) != 0,
            // By what the kernel has enabled: with CR4.OSXSAVE clear XSETBV would fault.
            xsave: host_cr4.contains(Cr4::OSXSAVE),
            xsaves: xsaves && raw.secondary.offers(ProcControls2::XSAVES),
            pku: host_cr4.contains(Cr4::PKE),
            // Whoever puts the module together decides: a parameter, and what else nesting needs.
            nested: false,
            // L0 writes exit information there, which is read-only without WRITE_ALL.
            shadow_vmcs: ept
                && raw.secondary.offers(ProcControls2::SHADOW_VMCS)
                && raw.misc.0 & WRITES_ALL != 0,
            nested_host: raw.nested_host(&mut rdmsr),
            interrupt_status: raw.secondary.offers(ProcControls2::VIRTUAL_INTERRUPTS),
            nested_virtual_interrupts: raw
                .secondary
                .offers(ProcControls2::VIRTUAL_INTERRUPTS | ProcControls2::APIC_REGISTERS)
                && (raw.pin.offers(PinControls::POSTED_INTERRUPTS) || host::params::nested_apicv()),
        })
    }

    /// Whether the CPU's VMCSs have a field that a shadow VMCS can serve.
    pub(crate) fn has_field(&self, encoding: u16) -> bool {
        const PML_INDEX: u32 = field::PML_INDEX.encoding();
        const GUEST_INTERRUPT_STATUS: u32 = field::GUEST_INTERRUPT_STATUS.encoding();
        // Fields that only CPUs with the control have: VMWRITE of others fails.
        match u32::from(encoding) {
            PML_INDEX => self.pml,
            GUEST_INTERRUPT_STATUS => self.interrupt_status,
            _ => true,
        }
    }

    /// The preemption timer is not to be used.
    pub fn without_preemption_timer(mut self) -> Self {
        // Out of the base word: no VMCS starts with it.
        self.pin.base.remove(PinControls::PREEMPTION_TIMER);
        self.preemption_timer = None;
        self
    }

    /// `address` as this CPU takes it for a linear one: sign-extended from the widest address it
    /// has, whatever a guest was told.
    #[inline]
    pub const fn canonical(&self, address: u64) -> u64 {
        // LA57 as the CPU may have it, whether or not the kernel uses it.
        let unused = if self.cr4_allowed.contains(Cr4::LA57) { 64 - 57 } else { 64 - 48 };
        ((address << unused) as i64 >> unused) as u64
    }

    /// The EPT pointer for tables whose root is at `root`: four levels, walked in write-back memory.
    #[inline]
    pub const fn ept_pointer(&self, root: u64) -> u64 {
        let dirty = if self.ept_dirty { eptp::ACCESSED_DIRTY } else { 0 };
        root | eptp::WRITE_BACK | eptp::LEVELS_4 | dirty
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
            (self.apicv, "APICv"),
            (self.ple, "PLE"),
            (self.preemption_timer.is_some(), "preemption timer"),
        ];
        f.write_str(if self.ept { "EPT" } else { "no EPT" })?;
        optional.iter().filter(|(there, _)| *there).try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}
