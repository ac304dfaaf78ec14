//! The VMX capability MSRs that L1 sees (SDM vol. 3C appendix A): what the host's CPU can do, cut to what
//! Gannet does for a nested guest, and cut again by the VMM.
//!
//! The values are those of stock KVM wherever both can do a thing, so that a guest saved under one is
//! restored under the other.

use x86::vmcs::capability::{self as cap, Allowed, EptVpidCap, VmxBasic};
use x86::vmcs::place::{MAX_INDEX, VMCS12_REVISION};
use x86::vmcs::{EntryControls, ExitControls, PinControls, ProcControls, ProcControls2};
use x86::{Cr0, Cr4};

/// Bits that a CPU without the "true" MSRs fixes to 1 (SDM vol. 3C §A.2 to §A.5).
mod default1 {
    // Stock KVM's names for these end in ALWAYSON_WITHOUT_TRUE_MSR.
    pub const PIN: u32 = 0x16;
    pub const PRIMARY: u32 = 0x0401_e172;
    pub const EXIT: u32 = 0x0003_6dff;
    pub const ENTRY: u32 = 0x0000_11ff;
}

/// Bits of IA32_VMX_EPT_VPID_CAP (SDM vol. 3C §A.10).
pub mod ept_vpid {
    /// Execute-only translations.
    pub const EXECUTE_ONLY: u64 = 1 << 0;
    /// Tables of four levels.
    pub const LEVELS_4: u64 = 1 << 6;
    /// Tables of five levels.
    pub const LEVELS_5: u64 = 1 << 7;
    /// Uncacheable tables.
    pub const UNCACHEABLE: u64 = 1 << 8;
    /// Write-back tables.
    pub const WRITE_BACK: u64 = 1 << 14;
    /// Pages of 2 MiB.
    pub const LARGE_2M: u64 = 1 << 16;
    /// Pages of 1 GiB.
    pub const LARGE_1G: u64 = 1 << 17;
    /// INVEPT.
    pub const INVEPT: u64 = 1 << 20;
    /// Accessed and dirty flags.
    pub const ACCESSED_DIRTY: u64 = 1 << 21;
    /// INVEPT of one EPT pointer.
    pub const INVEPT_SINGLE: u64 = 1 << 25;
    /// INVEPT of all.
    pub const INVEPT_ALL: u64 = 1 << 26;
    /// INVVPID.
    pub const INVVPID: u64 = 1 << 32;
    /// All four kinds of INVVPID.
    pub const INVVPID_KINDS: u64 = 0xf << 40;
}

/// Bits of IA32_VMX_MISC (SDM vol. 3C §A.6).
pub mod misc {
    /// Rate of the preemption timer: it counts when this bit of the TSC changes.
    pub const TIMER_RATE: u64 = 0x1f;
    /// Exits store EFER.LMA into the "IA-32e mode guest" control.
    pub const SAVE_LMA: u64 = 1 << 5;
    /// Activity state HLT.
    pub const HLT: u64 = 1 << 6;
    /// Activity state shutdown.
    pub const SHUTDOWN: u64 = 1 << 7;
    /// Activity state wait-for-SIPI.
    pub const WAIT_FOR_SIPI: u64 = 1 << 8;
    /// VMWRITE reaches every field.
    pub const WRITE_ALL: u64 = 1 << 29;
    /// An event can be injected with an instruction length of 0.
    pub const ZERO_LENGTH: u64 = 1 << 30;
    /// Shift of the number of CR3-target values.
    pub const CR3_TARGETS_SHIFT: u32 = 16;
    /// Shift of the recommended length of MSR lists.
    pub const MSR_LIST_SHIFT: u32 = 25;
}

/// IA32_VMX_BASIC: the CPU reports INS and OUTS in the instruction-information field.
const BASIC_INS_OUTS: u64 = 1 << 54;
/// IA32_VMX_BASIC: the "true" MSRs exist.
const BASIC_TRUE: u64 = 1 << 55;
/// Rate of the preemption timer that L1 sees: stock KVM's.
pub const TIMER_RATE: u8 = 5;
/// VM function 0: EPTP switching.
pub const EPTP_SWITCHING: u64 = 1;

/// The capability MSRs of the host's CPU; 0 for one that it does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // Named as the MSRs, the "true" ones where there are any.
pub struct Host {
    pub basic: u64,
    pub pin: u64,
    pub primary: u64,
    pub secondary: u64,
    pub exit: u64,
    pub entry: u64,
    pub misc: u64,
    pub cr0_fixed1: u64,
    pub cr4_fixed1: u64,
    pub ept_vpid: u64,
}

/// What Gannet does for a nested guest. The caller takes away what a parameter or the vCPU's CPUID forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
pub struct Offer {
    pub pin: PinControls,
    pub primary: ProcControls,
    pub secondary: ProcControls2,
    pub exit: ExitControls,
    pub entry: EntryControls,
    pub ept_vpid: u64,
    /// Activity states beside the active one, as bits of IA32_VMX_MISC.
    pub activity: u64,
}

impl Offer {
    /// Everything.
    pub const WHOLE: Self = Self {
        // The five that stock KVM offers, too.
        pin: PinControls::EXTERNAL_INTERRUPT
            .union(PinControls::NMI)
            .union(PinControls::VIRTUAL_NMIS)
            .union(PinControls::PREEMPTION_TIMER)
            .union(PinControls::POSTED_INTERRUPTS),
        primary: ProcControls::INTERRUPT_WINDOW
            .union(ProcControls::NMI_WINDOW)
            .union(ProcControls::TSC_OFFSET)
            .union(ProcControls::HLT)
            .union(ProcControls::INVLPG)
            .union(ProcControls::MWAIT)
            .union(ProcControls::RDPMC)
            .union(ProcControls::RDTSC)
            .union(ProcControls::CR3_LOAD)
            .union(ProcControls::CR3_STORE)
            .union(ProcControls::CR8_LOAD)
            .union(ProcControls::CR8_STORE)
            .union(ProcControls::TPR_SHADOW)
            .union(ProcControls::MOV_DR)
            .union(ProcControls::UNCONDITIONAL_IO)
            .union(ProcControls::IO_BITMAPS)
            .union(ProcControls::MONITOR_TRAP)
            .union(ProcControls::MSR_BITMAPS)
            .union(ProcControls::MONITOR)
            .union(ProcControls::PAUSE)
            .union(ProcControls::SECONDARY),
        // PAUSE-loop exiting is missing, as in stock KVM: its gap and its window have no place in the image.
        secondary: ProcControls2::VIRTUALIZE_APIC_ACCESSES
            .union(ProcControls2::EPT)
            .union(ProcControls2::DESCRIPTOR_TABLES)
            .union(ProcControls2::RDTSCP)
            .union(ProcControls2::VIRTUALIZE_X2APIC)
            .union(ProcControls2::VPID)
            .union(ProcControls2::WBINVD)
            .union(ProcControls2::UNRESTRICTED_GUEST)
            .union(ProcControls2::APIC_REGISTERS)
            .union(ProcControls2::VIRTUAL_INTERRUPTS)
            .union(ProcControls2::RDRAND)
            .union(ProcControls2::INVPCID)
            .union(ProcControls2::VMFUNC)
            .union(ProcControls2::SHADOW_VMCS)
            .union(ProcControls2::RDSEED)
            .union(ProcControls2::PML)
            .union(ProcControls2::XSAVES)
            .union(ProcControls2::TSC_SCALING),
        exit: ExitControls::SAVE_DEBUG
            .union(ExitControls::HOST_64)
            .union(ExitControls::LOAD_PERF_GLOBAL_CTRL)
            .union(ExitControls::ACKNOWLEDGE_INTERRUPT)
            .union(ExitControls::SAVE_PAT)
            .union(ExitControls::LOAD_PAT)
            .union(ExitControls::SAVE_EFER)
            .union(ExitControls::LOAD_EFER)
            .union(ExitControls::SAVE_PREEMPTION_TIMER),
        entry: EntryControls::LOAD_DEBUG
            .union(EntryControls::IA32E_GUEST)
            .union(EntryControls::LOAD_PERF_GLOBAL_CTRL)
            .union(EntryControls::LOAD_PAT)
            .union(EntryControls::LOAD_EFER),
        // No uncacheable tables, as in stock KVM. Tables of five levels, which that offers, are not offered here.
        ept_vpid: ept_vpid::EXECUTE_ONLY
            | ept_vpid::LEVELS_4
            | ept_vpid::WRITE_BACK
            | ept_vpid::LARGE_2M
            | ept_vpid::LARGE_1G
            | ept_vpid::INVEPT
            | ept_vpid::ACCESSED_DIRTY
            | ept_vpid::INVEPT_SINGLE
            | ept_vpid::INVEPT_ALL
            | ept_vpid::INVVPID
            | ept_vpid::INVVPID_KINDS,
        // Not shutdown, nor in stock KVM: L1 hears of the triple fault itself.
        activity: misc::HLT | misc::WAIT_FOR_SIPI,
    };
}

/// What L0 does by itself, whether or not the CPU can.
mod emulated {
    use super::{ExitControls, PinControls, ProcControls, ProcControls2, ept_vpid};
    // The timer is a deadline of L0's; what is posted L0 takes out of L1's descriptor.
    pub const PIN: u32 = PinControls::PREEMPTION_TIMER.union(PinControls::POSTED_INTERRUPTS).bits();
    // L0 merges L1's map of MSRs, and keeps L2's priority in L1's page by itself.
    pub const PRIMARY: u32 = ProcControls::MSR_BITMAPS.union(ProcControls::TPR_SHADOW).bits();
    // vmcs02 has none of these: what they stand for is done when L2 exits for it.
    pub const SECONDARY: u32 = ProcControls2::SHADOW_VMCS
        .union(ProcControls2::VIRTUALIZE_APIC_ACCESSES)
        .union(ProcControls2::VIRTUALIZE_X2APIC)
        .union(ProcControls2::APIC_REGISTERS)
        .union(ProcControls2::VIRTUAL_INTERRUPTS)
        .union(ProcControls2::PML)
        .bits();
    // EFER is exchanged with L0's own word of it; an interrupt that is acknowledged comes out of L0's local APIC.
    pub const EXIT: u32 = ExitControls::LOAD_EFER.bits()
        | ExitControls::SAVE_EFER.bits()
        | ExitControls::SAVE_PREEMPTION_TIMER.bits()
        | ExitControls::ACKNOWLEDGE_INTERRUPT.bits();
    pub const ENTRY: u32 = super::EntryControls::LOAD_EFER.bits();
    /// Large pages are split, INVEPT and INVVPID are L0's own work.
    pub const EPT_VPID: u64 = ept_vpid::LARGE_2M
        | ept_vpid::LARGE_1G
        | ept_vpid::INVEPT_SINGLE
        | ept_vpid::INVEPT_ALL
        | ept_vpid::INVVPID
        | ept_vpid::INVVPID_KINDS;
}

/// Why KVM_SET_MSRS of a capability MSR is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The vCPU is in VMX operation.
    InVmxOperation,
    /// It would offer what is not there, or the MSR follows from others.
    NotNarrower,
    /// There is no such capability MSR.
    Unknown,
}

/// The capability MSRs of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named as the MSRs; the control words are the "true" ones.
pub struct Capabilities {
    pub basic: VmxBasic,
    pub pin: Allowed,
    pub primary: Allowed,
    pub secondary: Allowed,
    pub exit: Allowed,
    pub entry: Allowed,
    pub misc: u64,
    pub cr0_fixed0: u64,
    pub cr0_fixed1: u64,
    pub cr4_fixed0: u64,
    pub cr4_fixed1: u64,
    pub vmcs_enum: u64,
    pub ept_vpid: EptVpidCap,
    pub vmfunc: u64,
}

const fn allowed(must: u32, may: u32) -> Allowed {
    Allowed((may as u64) << 32 | must as u64)
}

/// A control word: what the host allows or L0 emulates of what is offered, and what is always one.
const fn word(host: u64, offer: u32, emulated: u32, always: u32, freed: u32) -> Allowed {
    // What must be 1 may be 1, whatever the host says: else no word at all would pass the checks.
    let may = (Allowed(host).may() | emulated) & offer | always;
    // Freed is what the "true" MSR lets be 0 although older CPUs fix it to 1 (§A.3.2, §A.4, §A.5).
    allowed(always & !freed, may)
}

const fn is_subset(of: u64, bits: u64, mask: u64) -> bool {
    bits & mask & !of == 0
}

impl Capabilities {
    /// Nothing is offered.
    pub(crate) const NONE: Self = Self {
        basic: VmxBasic(0),
        pin: Allowed(0),
        primary: Allowed(0),
        secondary: Allowed(0),
        exit: Allowed(0),
        entry: Allowed(0),
        misc: 0,
        cr0_fixed0: 0,
        cr0_fixed1: 0,
        cr4_fixed0: 0,
        cr4_fixed1: 0,
        vmcs_enum: 0,
        ept_vpid: EptVpidCap(0),
        vmfunc: 0,
    };

    /// What a vCPU is shown on a host with these MSRs.
    pub fn compute(host: &Host, offer: &Offer) -> Self {
        // With EPT a hypervisor does not want to hear of CR3: both exits can be off, as stock KVM has it.
        let cr3 = ProcControls::CR3_LOAD.union(ProcControls::CR3_STORE).bits();
        let primary =
            word(host.primary, offer.primary.bits(), emulated::PRIMARY, default1::PRIMARY, cr3);
        let (secondary, ept) = Self::translation(host, offer, primary);
        let vmfunc = ProcControls2::VMFUNC.union(ProcControls2::EPT).bits();
        Self {
            // A region of a page, of which the image takes a quarter: stock KVM says the same. 6 is write-back memory.
            basic: VmxBasic(
                u64::from(VMCS12_REVISION)
                    | 4096 << 32
                    | 6 << 50
                    | host.basic & BASIC_INS_OUTS
                    | BASIC_TRUE,
            ),
            pin: word(host.pin, offer.pin.bits(), emulated::PIN, default1::PIN, 0),
            primary,
            secondary: allowed(0, secondary),
            // Saving and loading the debug controls is freed, as in stock KVM.
            exit: word(
                host.exit,
                offer.exit.bits(),
                emulated::EXIT,
                default1::EXIT,
                ExitControls::SAVE_DEBUG.bits(),
            ),
            entry: word(
                host.entry,
                offer.entry.bits(),
                emulated::ENTRY,
                default1::ENTRY,
                EntryControls::LOAD_DEBUG.bits(),
            ),
            // WRITE_ALL whatever the host has: L1's VMWRITE goes into VMCS12, which has no read-only part.
            misc: host.misc & misc::SAVE_LMA
                | misc::WRITE_ALL
                | offer.activity & (misc::HLT | misc::WAIT_FOR_SIPI)
                | u64::from(TIMER_RATE),
            // No CPU fixes more of CR0 than these three.
            cr0_fixed0: (Cr0::PE | Cr0::NE | Cr0::PG).bits(),
            cr0_fixed1: host.cr0_fixed1,
            // VMXE stays set as long as VMX operation lasts, in L1 and in L2 (SDM vol. 3C §24.8).
            cr4_fixed0: Cr4::VMXE.bits(),
            cr4_fixed1: host.cr4_fixed1,
            vmcs_enum: MAX_INDEX << 1,
            ept_vpid: EptVpidCap(ept),
            // EPTP switching without EPT would have nothing to switch.
            vmfunc: if secondary & vmfunc == vmfunc { EPTP_SWITCHING } else { 0 },
        }
    }

    /// What of it an enlightened VMCS carries the fields for, version 1 as stock KVM filters it (TSC scaling, of which it has
    /// the field, is left out by both).
    #[must_use]
    pub fn enlightened(&self) -> Self {
        // Bits 63:32 say what may be 1. What must be 1 is left alone: none of it is taken away.
        let without = |word: Allowed, bits: u32| Allowed(word.0 & !(u64::from(bits) << 32));
        let pin = PinControls::PREEMPTION_TIMER | PinControls::POSTED_INTERRUPTS;
        let secondary = ProcControls2::VIRTUALIZE_APIC_ACCESSES
            | ProcControls2::APIC_REGISTERS
            | ProcControls2::VIRTUAL_INTERRUPTS
            | ProcControls2::VMFUNC
            | ProcControls2::SHADOW_VMCS
            | ProcControls2::PML
            | ProcControls2::TSC_SCALING;
        Self {
            pin: without(self.pin, pin.bits()),
            secondary: without(self.secondary, secondary.bits()),
            exit: without(self.exit, ExitControls::SAVE_PREEMPTION_TIMER.bits()),
            vmfunc: 0,
            ..*self
        }
    }

    /// What is offered as a whole is something else: what came of secondary controls is offered now, what went is not.
    pub fn follow_secondary(&mut self, old: &Self, new: &Self) {
        // What the VMM has taken away of what was offered before stays away: only what is new is added.
        let came = new.secondary.may() & !old.secondary.may();
        let may = self.secondary.may() & new.secondary.may() | came;
        self.secondary = allowed(self.secondary.must(), may);
    }

    /// Secondary controls, and what EPT and VPID can do: each needs the other's support.
    fn translation(host: &Host, offer: &Offer, primary: Allowed) -> (u32, u64) {
        let has_secondary = primary.may() & ProcControls::SECONDARY.bits() != 0;
        let mut secondary =
            word(host.secondary, offer.secondary.bits(), emulated::SECONDARY, 0, 0).may();
        // Without the activating bit no CPU looks at the secondary controls: none can be offered.
        if !has_secondary {
            secondary = 0;
        }
        let mut ept = (host.ept_vpid | emulated::EPT_VPID) & offer.ept_vpid;
        if secondary & ProcControls2::EPT.bits() == 0 {
            // Bits 31:0 are of EPT, the upper half is of INVVPID (§A.10).
            ept &= !0xffff_ffff;
            // An entry without EPT refuses both (SDM vol. 3C §27.2.1.1).
            secondary &= !(ProcControls2::UNRESTRICTED_GUEST | ProcControls2::PML).bits();
        }
        if secondary & ProcControls2::VPID.bits() == 0 {
            ept &= 0xffff_ffff;
        }
        // The log tells of dirty flags that are set: without those it would stay empty.
        if ept & ept_vpid::ACCESSED_DIRTY == 0 {
            secondary &= !ProcControls2::PML.bits();
        }
        (secondary, ept)
    }

    /// RDMSR, by L1 or by the VMM.
    pub fn read(&self, msr: u32) -> Option<u64> {
        // The plain MSRs show what older CPUs fix to 1 as fixed, for hypervisors that do not look at the "true" ones.
        let with = |word: Allowed, ones: u32| word.0 | u64::from(ones);
        Some(match msr {
            cap::VMX_BASIC => self.basic.0,
            cap::VMX_PINBASED_CTLS => with(self.pin, default1::PIN),
            cap::VMX_PROCBASED_CTLS => with(self.primary, default1::PRIMARY),
            cap::VMX_EXIT_CTLS => with(self.exit, default1::EXIT),
            cap::VMX_ENTRY_CTLS => with(self.entry, default1::ENTRY),
            cap::VMX_MISC => self.misc,
            cap::VMX_CR0_FIXED0 => self.cr0_fixed0,
            cap::VMX_CR0_FIXED1 => self.cr0_fixed1,
            cap::VMX_CR4_FIXED0 => self.cr4_fixed0,
            cap::VMX_CR4_FIXED1 => self.cr4_fixed1,
            cap::VMX_VMCS_ENUM => self.vmcs_enum,
            cap::VMX_PROCBASED_CTLS2 => self.secondary.0,
            cap::VMX_EPT_VPID_CAP => self.ept_vpid.0,
            cap::VMX_TRUE_PINBASED_CTLS => self.pin.0,
            cap::VMX_TRUE_PROCBASED_CTLS => self.primary.0,
            cap::VMX_TRUE_EXIT_CTLS => self.exit.0,
            cap::VMX_TRUE_ENTRY_CTLS => self.entry.0,
            cap::VMX_VMFUNC => self.vmfunc,
            _ => return None,
        })
    }

    /// KVM_SET_MSRS: a VMM may take away, never add. The order of checks is stock KVM's; `whole` is what
    /// [`Self::compute`] gave, of which a VMM may always have less.
    pub fn restrict(
        &mut self,
        whole: &Self,
        msr: u32,
        value: u64,
        in_vmx_operation: bool,
    ) -> Result<(), Refused> {
        // A VMCS that was checked by them may be current. Stock KVM refuses here, too, before it looks at the number.
        if in_vmx_operation {
            return Err(Refused::InVmxOperation);
        }
        match msr {
            cap::VMX_BASIC => self.restrict_basic(whole, value),
            cap::VMX_TRUE_PINBASED_CTLS => narrow(&mut self.pin, whole.pin, value),
            cap::VMX_TRUE_PROCBASED_CTLS => narrow(&mut self.primary, whole.primary, value),
            cap::VMX_TRUE_EXIT_CTLS => narrow(&mut self.exit, whole.exit, value),
            cap::VMX_TRUE_ENTRY_CTLS => narrow(&mut self.entry, whole.entry, value),
            cap::VMX_PROCBASED_CTLS2 => narrow(&mut self.secondary, whole.secondary, value),
            cap::VMX_MISC => self.restrict_misc(whole, value),
            cap::VMX_CR0_FIXED0 => more_ones(&mut self.cr0_fixed0, whole.cr0_fixed0, value),
            cap::VMX_CR4_FIXED0 => more_ones(&mut self.cr4_fixed0, whole.cr4_fixed0, value),
            cap::VMX_EPT_VPID_CAP => fewer_ones(&mut self.ept_vpid.0, whole.ept_vpid.0, value),
            cap::VMX_VMFUNC => fewer_ones(&mut self.vmfunc, whole.vmfunc, value),
            // Compared with nothing: stock KVM takes any value, and no rule here looks at it.
            cap::VMX_VMCS_ENUM => {
                self.vmcs_enum = value;
                Ok(())
            }
            // They follow from the "true" ones and from CPUID.
            cap::VMX_PINBASED_CTLS
            | cap::VMX_PROCBASED_CTLS
            | cap::VMX_EXIT_CTLS
            | cap::VMX_ENTRY_CTLS
            | cap::VMX_CR0_FIXED1
            | cap::VMX_CR4_FIXED1 => Err(Refused::NotNarrower),
            _ => Err(Refused::Unknown),
        }
    }

    fn restrict_basic(&mut self, whole: &Self, value: u64) -> Result<(), Refused> {
        // Features and reserved bits; bit 48, 32-bit addresses, is no feature of ours.
        let bits = 1 << 49 | 1 << 54 | 1 << 55 | 1 << 31 | 7 << 45 | 0xff << 56;
        let new = VmxBasic(value);
        // Another revision would be another layout of the image. A region may be larger, never smaller.
        let fits = is_subset(whole.basic.0, value, bits)
            && !new.is_32_bit()
            && new.revision() == whole.basic.revision()
            && new.region_size() >= whole.basic.region_size();
        if !fits {
            return Err(Refused::NotNarrower);
        }
        self.basic = new;
        Ok(())
    }

    fn restrict_misc(&mut self, whole: &Self, value: u64) -> Result<(), Refused> {
        // Features and reserved bits; the rest are numbers.
        let bits = 1 << 5 | 7 << 6 | 3 << 14 | 7 << 28 | 0x1f << 9 | 1 << 31;
        let timer = self.pin.may() & PinControls::PREEMPTION_TIMER.bits() != 0;
        let cr3_targets = |v: u64| v >> misc::CR3_TARGETS_SHIFT & 0x1ff;
        let list = |v: u64| v >> misc::MSR_LIST_SHIFT & 7;
        // Where L1 has the timer its rate is L0's: saved deadlines are counted in it. Bits 63:32 are the MSEG's revision.
        let fits = is_subset(whole.misc, value, bits)
            && !(timer && (value ^ whole.misc) & misc::TIMER_RATE != 0)
            && cr3_targets(value) <= cr3_targets(whole.misc)
            && list(value) <= list(whole.misc)
            && value >> 32 == whole.misc >> 32;
        if !fits {
            return Err(Refused::NotNarrower);
        }
        self.misc = value;
        Ok(())
    }

    /// How many CR3-target values there are.
    pub fn cr3_targets(&self) -> u64 {
        self.misc >> misc::CR3_TARGETS_SHIFT & 0x1ff
    }

    /// How many entries an MSR list may have.
    pub fn msr_list_limit(&self) -> u32 {
        // n stands for 512 * (n + 1) entries (§A.6).
        ((self.misc >> misc::MSR_LIST_SHIFT & 7) as u32 + 1) * 512
    }

    /// Whether VMWRITE reaches the read-only data area.
    pub fn writes_all(&self) -> bool {
        self.misc & misc::WRITE_ALL != 0
    }

    /// Whether L1 may use one of these secondary controls.
    pub fn has_secondary(&self, bits: ProcControls2) -> bool {
        ProcControls2::from_bits_retain(self.secondary.may()).contains(bits)
    }
}

fn narrow(word: &mut Allowed, whole: Allowed, value: u64) -> Result<(), Refused> {
    // The lower half is what must be 1, the upper what may be: a VMM may ask for more ones there, for fewer here.
    let must_stays = is_subset(value, whole.0, 0xffff_ffff);
    let may_shrinks = is_subset(whole.0, value, !0xffff_ffff);
    if !must_stays || !may_shrinks {
        return Err(Refused::NotNarrower);
    }
    *word = Allowed(value);
    Ok(())
}

fn more_ones(word: &mut u64, whole: u64, value: u64) -> Result<(), Refused> {
    // Ones that have to be: a VMM may demand more of L1.
    if !is_subset(value, whole, u64::MAX) {
        return Err(Refused::NotNarrower);
    }
    *word = value;
    Ok(())
}

fn fewer_ones(word: &mut u64, whole: u64, value: u64) -> Result<(), Refused> {
    if !is_subset(whole, value, u64::MAX) {
        return Err(Refused::NotNarrower);
    }
    *word = value;
    Ok(())
}

#[cfg(test)]
#[path = "capabilities_tests.rs"]
mod tests;
