//! VM-execution, VM-exit and VM-entry control fields (SDM vol. 3C §27.2.1). What is broken here is
//! VM-instruction error 7.

use x86::Cr0;
use x86::vmcs::capability::Allowed;
use x86::vmcs::controls::{EntryControls, ExitControls, PinControls, ProcControls, ProcControls2};
use x86::vmcs::{Field, ReadWrite, event, field};

use super::{Limits, rule};
use crate::capabilities::{EPTP_SWITCHING, ept_vpid, misc};
use crate::memory::{is_page, is_physical};
use crate::{Capabilities, Vmcs12};

/// The broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named by what the rule is about.
pub enum Broken {
    Pin,
    Primary,
    Secondary,
    Cr3Targets,
    IoBitmaps,
    MsrBitmaps,
    VirtualApic,
    TprThreshold,
    TprShadow,
    Nmi,
    ApicAccess,
    X2Apic,
    VirtualInterrupts,
    PostedInterrupts,
    Vpid,
    EptPointer,
    PageLog,
    NeedsEpt,
    Functions,
    ShadowBitmaps,
    TscMultiplier,
    Exit,
    PreemptionTimer,
    ExitLists,
    Entry,
    Injection,
    EntryList,
    Smm,
}

type Checked = Result<(), Broken>;

/// Checks all control fields. What is asked of memory too is in [`crate::priority::check`].
pub fn check(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    // The manual leaves the order to the CPU (§27.2): each of these ends in the same error.
    words(v, c)?;
    bitmaps(v, limits)?;
    apic(v, limits)?;
    nmi(v)?;
    translation(v, c, limits)?;
    exit(v, c, limits)?;
    entry(v, c, limits)
}

fn fits(value: u32, allowed: Allowed) -> bool {
    // Both ways: a 0 where a 1 must be, and a 1 where none may be.
    value & allowed.must() == allowed.must() && value & !allowed.may() == 0
}

fn words(v: &Vmcs12, c: &Capabilities) -> Checked {
    rule(fits(v.pin().bits(), c.pin), Broken::Pin)?;
    rule(fits(v.primary().bits(), c.primary), Broken::Primary)?;
    // Without their activation they are taken for zero.
    rule(
        !v.primary().contains(ProcControls::SECONDARY) || fits(v.secondary().bits(), c.secondary),
        Broken::Secondary,
    )?;
    // L1 is offered none of these values, by stock KVM neither.
    rule(u64::from(v.get(field::CR3_TARGET_COUNT)) <= c.cr3_targets(), Broken::Cr3Targets)
}

fn page(v: &Vmcs12, at: Field<u64, ReadWrite>, limits: &Limits) -> bool {
    is_page(v.get(at), limits.physical_bits)
}

fn bitmaps(v: &Vmcs12, limits: &Limits) -> Checked {
    // Whether memory lies there is asked by no CPU: an access finds out.
    if v.primary().contains(ProcControls::IO_BITMAPS) {
        let both = page(v, field::IO_BITMAP_A, limits) && page(v, field::IO_BITMAP_B, limits);
        rule(both, Broken::IoBitmaps)?;
    }
    if v.primary().contains(ProcControls::MSR_BITMAPS) {
        rule(page(v, field::MSR_BITMAP, limits), Broken::MsrBitmaps)?;
    }
    if v.secondary().contains(ProcControls2::SHADOW_VMCS) {
        let both = page(v, field::VMREAD_BITMAP, limits) && page(v, field::VMWRITE_BITMAP, limits);
        rule(both, Broken::ShadowBitmaps)?;
    }
    Ok(())
}

fn apic(v: &Vmcs12, limits: &Limits) -> Checked {
    let second = v.secondary();
    let uses_page = ProcControls2::VIRTUALIZE_X2APIC
        | ProcControls2::APIC_REGISTERS
        | ProcControls2::VIRTUAL_INTERRUPTS;
    if v.primary().contains(ProcControls::TPR_SHADOW) {
        // Looked at only where the CPU would use the page (§27.2.1.1).
        rule(page(v, field::VIRTUAL_APIC_ADDR, limits), Broken::VirtualApic)?;
        // The upper bits count only where the threshold is in use.
        if !second.contains(ProcControls2::VIRTUAL_INTERRUPTS) {
            rule(v.get(field::TPR_THRESHOLD) & !0xf == 0, Broken::TprThreshold)?;
        }
    } else {
        // These three work on the virtual-APIC page, which nothing but the TPR shadow names.
        rule(!second.intersects(uses_page), Broken::TprShadow)?;
    }
    if second.contains(ProcControls2::VIRTUALIZE_APIC_ACCESSES) {
        rule(page(v, field::APIC_ACCESS_ADDR, limits), Broken::ApicAccess)?;
        // An x2APIC has no page of registers: the two exclude each other.
        rule(!second.contains(ProcControls2::VIRTUALIZE_X2APIC), Broken::X2Apic)?;
    }
    if second.contains(ProcControls2::VIRTUAL_INTERRUPTS) {
        // Physical interrupts have to exit where virtual ones are delivered: the same vectors mean other things.
        rule(v.pin().contains(PinControls::EXTERNAL_INTERRUPT), Broken::VirtualInterrupts)?;
    }
    if v.pin().contains(PinControls::POSTED_INTERRUPTS) {
        let descriptor = v.get(field::POSTED_INTR_DESC);
        // A notification is known by the vector that the exit acknowledges. The descriptor is a line of 64 bytes (§30.6).
        let good = second.contains(ProcControls2::VIRTUAL_INTERRUPTS)
            && v.exit().contains(ExitControls::ACKNOWLEDGE_INTERRUPT)
            && v.get(field::POSTED_INTR_VECTOR) & 0xff00 == 0
            && descriptor & 0x3f == 0
            && is_physical(descriptor, limits.physical_bits);
        rule(good, Broken::PostedInterrupts)?;
    }
    Ok(())
}

fn nmi(v: &Vmcs12) -> Checked {
    let virtual_nmis = v.pin().contains(PinControls::VIRTUAL_NMIS);
    // Virtual NMIs without exits for real ones would have two owners of the same blocking.
    rule(!virtual_nmis || v.pin().contains(PinControls::NMI), Broken::Nmi)?;
    // The window is that of virtual NMIs.
    rule(virtual_nmis || !v.primary().contains(ProcControls::NMI_WINDOW), Broken::Nmi)
}

fn translation(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    let second = v.secondary();
    if second.contains(ProcControls2::VPID) {
        // 0 is the tag of VMX root operation (§29.1).
        rule(v.get(field::VPID) != 0, Broken::Vpid)?;
    }
    if v.has_ept() {
        rule(is_ept_pointer(v.get(field::EPT_POINTER), c, limits), Broken::EptPointer)?;
    }
    if second.contains(ProcControls2::PML) {
        rule(v.has_ept() && page(v, field::PML_ADDRESS, limits), Broken::PageLog)?;
    }
    let on_ept = ProcControls2::UNRESTRICTED_GUEST | ProcControls2::MODE_BASED_EXECUTE;
    rule(v.has_ept() || !second.intersects(on_ept), Broken::NeedsEpt)?;
    if second.contains(ProcControls2::VMFUNC) {
        // A function that is not offered fails the entry, not the VMFUNC.
        let functions = v.get(field::VM_FUNCTION_CONTROLS);
        rule(functions & !c.vmfunc == 0, Broken::Functions)?;
        if functions & EPTP_SWITCHING != 0 {
            rule(v.has_ept() && page(v, field::EPTP_LIST, limits), Broken::Functions)?;
        }
    }
    if second.contains(ProcControls2::TSC_SCALING) {
        // With 0 L2's time would stand still.
        rule(v.get(field::TSC_MULTIPLIER) != 0, Broken::TscMultiplier)?;
    }
    Ok(())
}

/// Whether an EPT pointer is one that an entry takes (SDM vol. 3C §25.6.11, §27.2.1.1).
pub fn is_ept_pointer(pointer: u64, c: &Capabilities, limits: &Limits) -> bool {
    let offered = |bit: u64| c.ept_vpid.0 & bit != 0;
    // Bits 2:0 are the memory type in which the tables are walked.
    let memory_type = match pointer & 7 {
        0 => offered(ept_vpid::UNCACHEABLE),
        6 => offered(ept_vpid::WRITE_BACK),
        _ => false,
    };
    // Bits 5:3 are one less than the levels.
    let levels = match pointer >> 3 & 7 {
        3 => offered(ept_vpid::LEVELS_4),
        4 => offered(ept_vpid::LEVELS_5),
        _ => false,
    };
    let dirty = pointer & x86::vmcs::eptp::ACCESSED_DIRTY == 0 || c.ept_vpid.accessed_dirty();
    // Bit 7 asks for supervisor shadow stacks, bits 11:8 are reserved: nothing of it is offered.
    let reserved = pointer & 0xf80 == 0 && is_physical(pointer, limits.physical_bits);
    memory_type && levels && dirty && reserved
}

/// Whether a list of MSRs lies where it may.
fn is_list(count: u32, at: u64, limits: &Limits) -> bool {
    // A list may begin within the width and end beyond it.
    let last = at.checked_add(u64::from(count) * 16).and_then(|end| end.checked_sub(1));
    // With a count of 0 the address is not looked at.
    count == 0
        || at & 0xf == 0
            && is_physical(at, limits.physical_bits)
            && last.is_some_and(|last| is_physical(last, limits.physical_bits))
}

fn exit(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    rule(fits(v.exit().bits(), c.exit), Broken::Exit)?;
    let saves = v.exit().contains(ExitControls::SAVE_PREEMPTION_TIMER);
    // A timer that does not run leaves nothing to be saved.
    rule(!saves || v.pin().contains(PinControls::PREEMPTION_TIMER), Broken::PreemptionTimer)?;
    let store =
        is_list(v.get(field::EXIT_MSR_STORE_COUNT), v.get(field::EXIT_MSR_STORE_ADDR), limits);
    let load = is_list(v.get(field::EXIT_MSR_LOAD_COUNT), v.get(field::EXIT_MSR_LOAD_ADDR), limits);
    rule(store && load, Broken::ExitLists)
}

fn entry(v: &Vmcs12, c: &Capabilities, limits: &Limits) -> Checked {
    rule(fits(v.entry().bits(), c.entry), Broken::Entry)?;
    // Entries to SMM are of the dual-monitor treatment. The bit is not offered, so the line above has refused it already;
    // the rule stands for the day on which that changes.
    rule(!v.entry().contains(EntryControls::SMM) || limits.smm, Broken::Smm)?;
    check_injection(v, c)?;
    rule(
        is_list(v.get(field::ENTRY_MSR_LOAD_COUNT), v.get(field::ENTRY_MSR_LOAD_ADDR), limits),
        Broken::EntryList,
    )
}

/// Checks the event that an entry injects.
pub fn check_injection(v: &Vmcs12, c: &Capabilities) -> Checked {
    let information = v.get(field::ENTRY_INTERRUPTION);
    // Of an event that is not valid nothing is looked at, its reserved bits neither.
    rule(information & event::VALID == 0 || is_injection(v, c, information), Broken::Injection)
}

/// Event type 1, reserved.
const RESERVED: u32 = 1 << 8;
/// Event type 7: a pending monitor-trap exit.
pub const OTHER: u32 = 7 << 8;
/// Vectors of exceptions that push an error code.
const WITH_ERROR_CODE: u32 = 1 << 8 | 0x1f << 10 | 1 << 17;

fn is_injection(v: &Vmcs12, c: &Capabilities, information: u32) -> bool {
    let vector = information & event::VECTOR;
    let kind = information & event::TYPE;
    // Type 7 makes a monitor-trap exit pending: a CPU without that exit has the type reserved (§27.2.1.3).
    let has_trap = c.primary.may() & ProcControls::MONITOR_TRAP.bits() != 0;
    let vector_fits = match kind {
        RESERVED => false,
        event::NMI => vector == 2,
        event::EXCEPTION => vector <= 31,
        OTHER => vector == 0 && has_trap,
        // An interrupt or an INT n may have any vector, those below 16 too.
        _ => true,
    };
    let unrestricted = v.secondary().contains(ProcControls2::UNRESTRICTED_GUEST);
    // Real mode, which only an unrestricted guest can be in, pushes no error codes.
    let protected = !unrestricted || v.get(field::GUEST_CR0) & Cr0::PE.bits() != 0;
    // The vector is asked before it shifts: an interrupt's may be beyond the word.
    let pushes =
        kind == event::EXCEPTION && protected && vector < 32 && WITH_ERROR_CODE & 1 << vector != 0;
    // Both ways below: who pushes a code must have one, and nobody else may.
    let has_code = information & event::ERROR_VALID != 0;
    // Bit 15 is defined with SGX: bits 31:16 alone have to be clear.
    let code_fits = !has_code || v.get(field::ENTRY_ERROR_CODE) & 0xffff_0000 == 0;
    // Bits 30:12. Bit 31 is the valid bit.
    let reserved = information & 0x7fff_f000 == 0;
    let length = v.get(field::ENTRY_INSTRUCTION_LENGTH);
    // Of the other kinds nobody looks at a length: their handlers return to RIP itself.
    let length_fits = match kind {
        event::SOFT | event::PRIVILEGED_SOFT_EXCEPTION | event::SOFT_EXCEPTION => {
            length <= 15 && (length != 0 || c.misc & misc::ZERO_LENGTH != 0)
        }
        _ => true,
    };
    vector_fits && has_code == pushes && code_fits && reserved && length_fits
}
