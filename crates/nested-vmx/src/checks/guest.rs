//! Guest-state fields (SDM vol. 3C §27.3.1). What is broken here is an exit with reason 33.

use x86::msr::debugctl;
use x86::segment::attr;
use x86::vmcs::controls::{EntryControls, PinControls, ProcControls2};
use x86::vmcs::place::VMCS12_REVISION;
use x86::vmcs::{Field, Natural, ReadWrite, event, field, interruptibility as int};
use x86::{Cr0, Cr4, Efer, Gpa, Rflags};

use super::controls::OTHER;
use super::guest_rules::Broken;
use super::segments::{self, Mode};
use super::{Limits, is_efer, is_fixed, is_pat, rule};
use crate::capabilities::misc;
use crate::memory::{is_page, is_physical};
use crate::{Capabilities, GuestMemory, Vmcs12};

type Checked = Result<(), Broken>;

/// The four entries of a PAE guest's top table.
pub type Pdptes = [u64; 4];

/// Checks all guest-state fields. `current` is the VMCS that is entered. Gives the PDPTEs that L2 starts with,
/// if they come from memory.
pub fn check(
    v: &Vmcs12,
    c: &Capabilities,
    limits: &Limits,
    current: Option<Gpa>,
    memory: &impl GuestMemory,
) -> Result<Option<Pdptes>, Broken> {
    // PDPTEs behind all else, as in the manual (§27.3.1.6): they have a qualification of their own.
    check_saved(v, c, limits, current, memory)?;
    pdptes(v, limits, memory)
}

/// Checks the guest state of a VMCS12 that was saved while L2 ran, whose PDPTEs are no matter of the VMCS.
pub fn check_saved(
    v: &Vmcs12,
    c: &Capabilities,
    limits: &Limits,
    current: Option<Gpa>,
    memory: &impl GuestMemory,
) -> Checked {
    registers(v, c, limits)?;
    msrs(v, limits)?;
    segments::check(v, limits, mode(v))?;
    check_flow(v, c, limits)?;
    // The link last of these: its qualification is told only where nothing else is wrong.
    link(v, limits, current, memory)
}

/// Checks what changes from entry to entry: RIP, RFLAGS, activity, interruptibility, pending exceptions.
pub fn check_flow(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    // All of this L1 sets at nearly every entry, or the last exit has left it: it is never taken for checked.
    flow(v, limits, mode(v))?;
    activity(v, c, limits)?;
    interruptibility(v, limits)?;
    pending_debug(v, limits)
}

fn has(value: u64, bit: Cr0) -> bool {
    value & bit.bits() != 0
}

pub(super) fn mode(v: &Vmcs12) -> Mode {
    Mode {
        // The mode is what VMCS12 says of the entry, not what L2 was in before.
        vm86: v.get(field::GUEST_RFLAGS) & Rflags::VM.bits() != 0,
        long: v.entry().contains(EntryControls::IA32E_GUEST),
        unrestricted: v.secondary().contains(ProcControls2::UNRESTRICTED_GUEST),
        protected: has(v.get(field::GUEST_CR0), Cr0::PE),
    }
}

fn canonical(v: &Vmcs12, at: Field<Natural, ReadWrite>, limits: &Limits) -> bool {
    limits.is_canonical(v.get(at))
}

fn registers(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    let cr0 = v.get(field::GUEST_CR0);
    let cr4 = v.get(field::GUEST_CR4);
    let entry = v.entry();
    let long = entry.contains(EntryControls::IA32E_GUEST);
    let mut ones = c.cr0_fixed0;
    // An unrestricted guest may be in real mode, and without paging (§A.7).
    if v.secondary().contains(ProcControls2::UNRESTRICTED_GUEST) {
        ones &= !(Cr0::PE | Cr0::PG).bits();
    }
    // An entry does not change NW and CD, so it does not look at them.
    let ignored = (Cr0::NW | Cr0::CD).bits();
    rule(is_fixed(cr0 & !ignored, ones & !ignored, c.cr0_fixed1), Broken::Cr0)?;
    // For an unrestricted guest nothing else keeps paging to protected mode.
    rule(has(cr0, Cr0::PE) || !has(cr0, Cr0::PG), Broken::Cr0)?;
    rule(is_fixed(cr4, c.cr4_fixed0, c.cr4_fixed1), Broken::Cr4)?;
    // What an entry does not load it does not check: both registers stay as they are then.
    if entry.contains(EntryControls::LOAD_DEBUG) {
        rule(v.get(field::GUEST_DEBUGCTL) & !limits.debugctl == 0, Broken::Debug)?;
        rule(v.get(field::GUEST_DR7) >> 32 == 0, Broken::Debug)?;
    }
    let paged = if long {
        has(cr0, Cr0::PG) && cr4 & Cr4::PAE.bits() != 0
    } else {
        // There are PCIDs in IA-32e mode alone.
        cr4 & Cr4::PCIDE.bits() == 0
    };
    rule(paged, Broken::LongMode)?;
    rule(is_physical(v.get(field::GUEST_CR3), limits.physical_bits), Broken::Cr3)?;
    // Checked on every CPU that has 64-bit mode, whatever mode the guest is in.
    let both = canonical(v, field::GUEST_SYSENTER_ESP, limits)
        && canonical(v, field::GUEST_SYSENTER_EIP, limits);
    rule(both, Broken::Sysenter)
}

fn msrs(v: &Vmcs12, limits: &Limits) -> Checked {
    let entry = v.entry();
    if entry.contains(EntryControls::LOAD_PERF_GLOBAL_CTRL) {
        let value = v.get(field::GUEST_PERF_GLOBAL_CTRL);
        rule(value & !limits.perf_global_ctrl == 0, Broken::PerfGlobalCtrl)?;
    }
    if entry.contains(EntryControls::LOAD_PAT) {
        rule(is_pat(v.get(field::GUEST_PAT)), Broken::Pat)?;
    }
    if entry.contains(EntryControls::LOAD_EFER) {
        let long = entry.contains(EntryControls::IA32E_GUEST);
        let paging = has(v.get(field::GUEST_CR0), Cr0::PG);
        // Without paging LME may be set alone: it names a mode to come.
        let good = is_efer(v.get(field::GUEST_EFER), limits, long, paging.then_some(long));
        rule(good, Broken::Efer)?;
    }
    if entry.contains(EntryControls::LOAD_BNDCFGS) {
        let value = v.get(field::GUEST_BNDCFGS);
        // Bits 11:2 are reserved, the rest is a linear address.
        rule(value & 0xffc == 0 && limits.is_canonical(value & !0xfff), Broken::Bndcfgs)?;
    }
    Ok(())
}

/// Bits of RFLAGS that are always zero.
const RFLAGS_ZERO: u64 = !0x3f_ffff | 1 << 15 | 1 << 5 | 1 << 3;

fn flow(v: &Vmcs12, limits: &Limits, mode: Mode) -> Checked {
    let rip = v.get(field::GUEST_RIP);
    // CS.L means something in IA-32e mode alone.
    let is_64_bit = mode.long && v.get(field::GUEST_CS_RIGHTS) & segments::LONG != 0;
    // Not whether it is canonical: the bits that the CPU does not have are alike, and the highest that it has may
    // differ. Such an entry takes place, and its guest gets #GP (SDM vol. 3C §27.3.1.4).
    let beyond = (rip as i64).checked_shr(limits.linear_bits).unwrap_or(0);
    let rip_fits = if is_64_bit { matches!(beyond, 0 | -1) } else { rip >> 32 == 0 };
    rule(rip_fits, Broken::Rip)?;
    let flags = Rflags::from_bits_retain(v.get(field::GUEST_RFLAGS));
    let reserved = flags.bits() & RFLAGS_ZERO == 0 && flags.contains(Rflags::FIXED);
    let vm = !flags.contains(Rflags::VM) || !mode.long && mode.protected;
    // An interrupt is not injected past a clear IF. An NMI and an exception are.
    let interrupts = !injects(v, event::INTR) || flags.contains(Rflags::IF);
    rule(reserved && vm && interrupts, Broken::Rflags)
}

/// Whether the entry injects an event of a kind.
fn injects(v: &Vmcs12, kind: u32) -> bool {
    let information = v.get(field::ENTRY_INTERRUPTION);
    information & event::VALID != 0 && information & event::TYPE == kind
}

/// Activity states (SDM vol. 3C §25.4.2).
pub mod activity_state {
    /// Running.
    pub const ACTIVE: u32 = 0;
    /// HLT was executed.
    pub const HLT: u32 = 1;
    /// After a triple fault.
    pub const SHUTDOWN: u32 = 2;
    /// After INIT.
    pub const WAIT_FOR_SIPI: u32 = 3;
}
use activity_state as activity_is;

fn activity(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    let state = v.get(field::GUEST_ACTIVITY);
    let information = v.get(field::ENTRY_INTERRUPTION);
    let injection = information & event::VALID != 0;
    let vector = information & event::VECTOR;
    let kind = information & event::TYPE;
    let exception = |n: u32| kind == event::EXCEPTION && vector == n;
    let nmi = kind == event::NMI;
    let wakes = match state {
        activity_is::ACTIVE => true,
        activity_is::HLT => {
            // HLT is an instruction of CPL 0, which VMX has in SS.
            let dpl = v.get(field::GUEST_SS_RIGHTS) as u16 & attr::DPL_MASK;
            // #DB and #MC wake a halted processor, other exceptions cannot come to one (SDM vol. 3C
            // §27.3.1.5).
            let event = kind == event::INTR || nmi || exception(1) || exception(18);
            c.misc & misc::HLT != 0 && dpl == 0 && (!injection || event || kind == OTHER)
        }
        activity_is::SHUTDOWN => {
            // An NMI and a machine check end a shutdown, and nothing else that can be injected.
            c.misc & misc::SHUTDOWN != 0 && (!injection || nmi || exception(18))
        }
        activity_is::WAIT_FOR_SIPI => {
            // Nothing can be delivered before the startup IPI, so nothing may be injected.
            c.misc & misc::WAIT_FOR_SIPI != 0
                && !injection
                && !limits.smm
                && !v.entry().contains(EntryControls::SMM)
        }
        _ => false,
    };
    // A shadow is on the instruction that comes next: who executes none has none.
    let blocked = v.get(field::GUEST_INTERRUPTIBILITY) & (int::STI | int::MOV_SS) != 0;
    rule(wakes && (state == activity_is::ACTIVE || !blocked), Broken::Activity)
}

fn interruptibility(v: &Vmcs12, limits: &Limits) -> Checked {
    let state = v.get(field::GUEST_INTERRUPTIBILITY);
    let sti = state & int::STI != 0;
    let mov_ss = state & int::MOV_SS != 0;
    let smi = state & int::SMI != 0;
    let nmi = state & int::NMI != 0;
    let enabled = v.get(field::GUEST_RFLAGS) & Rflags::IF.bits() != 0;
    // In this order: bit 4 is of enclaves, which are not offered; one instruction leaves one shadow; STI leaves its own
    // only where it has set IF; an interrupt waits for either shadow, an NMI for that of MOV SS (for STI's the CPU decides);
    // blocking by SMI is there in SMM alone; a virtual NMI does not nest.
    let good = state & !0xf == 0
        && !(sti && mov_ss)
        && (!sti || enabled)
        && !(injects(v, event::INTR) && (sti || mov_ss))
        && !(injects(v, event::NMI) && mov_ss)
        && (!smi || limits.smm)
        && !(v.pin().contains(PinControls::VIRTUAL_NMIS) && injects(v, event::NMI) && nmi);
    rule(good, Broken::Interruptibility)
}

/// Bits of the pending debug exceptions that are always zero.
const PENDING_ZERO: u64 = !0x1_7fff | 0xff0 | 1 << 13;
/// An enabled breakpoint was met.
const ENABLED: u64 = 1 << 12;
/// A single step is pending.
const SINGLE_STEP: u64 = 1 << 14;
/// The exception is of a transactional region.
const TRANSACTION: u64 = 1 << 16;
/// DEBUGCTL.BTF.
const BTF: u64 = 1 << 1;

fn pending_debug(v: &Vmcs12, limits: &Limits) -> Checked {
    // One comparison, at each entry.
    if v.get(field::GUEST_PENDING_DEBUG) & (PENDING_ZERO | TRANSACTION) != 0 {
        return pending_of_transaction(v, limits);
    }
    pending_step(v)
}

/// What an exit leaves of a debug exception in a transactional region is told by two bits alone. Who has transactions may
/// debug them.
#[cold]
#[inline(never)]
fn pending_of_transaction(v: &Vmcs12, limits: &Limits) -> Checked {
    let good = v.get(field::GUEST_PENDING_DEBUG) == ENABLED | TRANSACTION
        && limits.debugctl & debugctl::RTM != 0
        && v.get(field::GUEST_INTERRUPTIBILITY) & int::MOV_SS == 0;
    rule(good, Broken::PendingDebug)?;
    pending_step(v)
}

fn pending_step(v: &Vmcs12) -> Checked {
    let pending = v.get(field::GUEST_PENDING_DEBUG);
    // In a shadow, and in HLT, the trap of the step before has not come yet: TF says whether there is one.
    let blocked = v.get(field::GUEST_INTERRUPTIBILITY) & (int::STI | int::MOV_SS) != 0;
    if blocked || v.get(field::GUEST_ACTIVITY) == activity_is::HLT {
        let steps = v.get(field::GUEST_RFLAGS) & Rflags::TF.bits() != 0;
        // By the field, whether or not the entry loads DEBUGCTL. L2 runs without BTF, and an exit leaves a step that was none
        // with it: either is taken then, and the entry makes it match.
        let by_branch = steps && v.get(field::GUEST_DEBUGCTL) & BTF != 0;
        rule(by_branch || (pending & SINGLE_STEP != 0) == steps, Broken::PendingDebug)?;
    }
    Ok(())
}

/// Checks the link pointer, and the region that it points at: L1 changes that without VMWRITE.
#[inline]
pub fn link(
    v: &Vmcs12,
    limits: &Limits,
    current: Option<Gpa>,
    memory: &impl GuestMemory,
) -> Checked {
    let at = v.get(field::VMCS_LINK);
    if at == Vmcs12::NOWHERE {
        return Ok(());
    }
    // A VMCS does not shadow itself.
    rule(is_page(at, limits.physical_bits) && current != Some(Gpa(at)), Broken::Link)?;
    // No memory is told as a bad pointer: a CPU would read there what the bus gives.
    let header = memory.read_u32(Gpa(at)).map_err(|_| Broken::Link)?;
    // Bit 31 has to be what the control says, both ways.
    let shadows = v.secondary().contains(ProcControls2::SHADOW_VMCS);
    let wanted = VMCS12_REVISION | u32::from(shadows) << 31;
    rule(header == wanted, Broken::Link)
}

/// Bits of a PDPTE that are reserved below the width of physical addresses (SDM vol. 3A table 4-8).
const PDPTE_ZERO: u64 = 0x1e6;

/// Whether PAE paging may load a PDPTE.
pub fn is_pdpte(entry: u64, physical_bits: u8) -> bool {
    // The other bits of an entry without P are ignored.
    entry & 1 == 0 || entry & PDPTE_ZERO == 0 && is_physical(entry, physical_bits)
}

/// Whether the VMCS12's guest runs with PAE paging.
pub fn is_pae(v: &Vmcs12) -> bool {
    // Before the checks the two may differ: either makes it no PAE paging.
    let long = v.entry().contains(EntryControls::IA32E_GUEST)
        || v.entry().contains(EntryControls::LOAD_EFER)
            && v.get(field::GUEST_EFER) & Efer::LMA.bits() != 0;
    has(v.get(field::GUEST_CR0), Cr0::PG) && v.get(field::GUEST_CR4) & Cr4::PAE.bits() != 0 && !long
}

fn pdptes(
    v: &Vmcs12,
    limits: &Limits,
    memory: &impl GuestMemory,
) -> Result<Option<Pdptes>, Broken> {
    if !is_pae(v) {
        return Ok(None);
    }
    // With EPT the PDPTEs are fields of the VMCS, and CR3 is not followed (§27.3.2.4).
    let in_memory = !v.has_ept();
    let mut entries = [
        v.get(field::GUEST_PDPTE0),
        v.get(field::GUEST_PDPTE1),
        v.get(field::GUEST_PDPTE2),
        v.get(field::GUEST_PDPTE3),
    ];
    if in_memory {
        // In PAE paging the table lies at bits 31:5 of CR3 (SDM vol. 3A §4.4.1).
        let table = v.get(field::GUEST_CR3) & 0xffff_ffe0;
        for (entry, at) in entries.iter_mut().zip((table..).step_by(8)) {
            // A table that is no memory has no entry that could be loaded.
            *entry = memory.read_u64(Gpa(at)).map_err(|_| Broken::Pdptes)?;
        }
    }
    let good = entries.iter().all(|entry| is_pdpte(*entry, limits.physical_bits));
    rule(good, Broken::Pdptes)?;
    Ok(in_memory.then_some(entries))
}
