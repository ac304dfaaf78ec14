//! The control words of vmcs02: one function for each, of what L0 and L1 want.

use x86::vmcs::{EntryControls, PinControls, ProcControls, ProcControls2, field};

use super::{L0, efer};
use crate::Vmcs12;

/// Pin-based controls. L1's preemption timer is L0's to keep; posted interrupts are L1's alone.
pub fn pin(l0: &L0, v: &Vmcs12) -> PinControls {
    // L0's own posting is not L2's, and the timer's bit is L0's alone to set.
    let kept = l0.pin.difference(PinControls::POSTED_INTERRUPTS | PinControls::PREEMPTION_TIMER);
    let mut word =
        kept | v.pin().difference(PinControls::PREEMPTION_TIMER | PinControls::POSTED_INTERRUPTS);
    let posted = v.pin().contains(PinControls::POSTED_INTERRUPTS);
    if posted && l0.pages.posted_interrupts.is_some() {
        // Only with a page: else a notification is an interrupt like any other.
        word |= PinControls::POSTED_INTERRUPTS;
    }
    if l0.preemption_timer.is_some() {
        word |= PinControls::PREEMPTION_TIMER;
    }
    word
}

/// What is in vmcs02 only if it can be done with the pages that there are.
const BY_PAGES: ProcControls =
    ProcControls::TPR_SHADOW.union(ProcControls::MSR_BITMAPS).union(ProcControls::IO_BITMAPS);
/// CR8 exits.
const CR8: ProcControls = ProcControls::CR8_LOAD.union(ProcControls::CR8_STORE);

/// Primary processor-based controls. Every port access exits; L1's I/O bitmaps are looked at then.
pub fn primary(l0: &L0, v: &Vmcs12) -> ProcControls {
    // L0's CR8 exits are about L1's priority; L1's are kept for L2's.
    let mut word = l0.primary.difference(BY_PAGES | CR8) | v.primary().difference(BY_PAGES);
    // Each port access exits, since L1's maps are asked by software; an offset is there always, if of 0.
    word |= ProcControls::UNCONDITIONAL_IO | ProcControls::SECONDARY | ProcControls::TSC_OFFSET;
    if v.primary().contains(ProcControls::TPR_SHADOW) && l0.pages.virtual_apic.is_some() {
        word |= ProcControls::TPR_SHADOW;
    } else {
        // Without a shadow MOV of CR8 would reach the host's local APIC.
        word |= CR8;
    }
    // Without the page every MSR exits: slower, and right.
    if l0.pages.msr_bitmap.is_some() {
        word |= ProcControls::MSR_BITMAPS;
    }
    word
}

/// Secondary controls that only L1 decides on.
const OF_L1: ProcControls2 = ProcControls2::VIRTUALIZE_APIC_ACCESSES
    .union(ProcControls2::VIRTUALIZE_X2APIC)
    .union(ProcControls2::APIC_REGISTERS)
    .union(ProcControls2::VIRTUAL_INTERRUPTS)
    .union(ProcControls2::RDTSCP)
    .union(ProcControls2::INVPCID)
    .union(ProcControls2::XSAVES)
    .union(ProcControls2::USER_WAIT)
    .union(ProcControls2::VMFUNC)
    .union(ProcControls2::UNRESTRICTED_GUEST);
/// Secondary controls that are not in vmcs02: a log of L2's addresses would be of no use, and L2's VMREAD and
/// VMWRITE are L0's to serve.
const NEVER: ProcControls2 = ProcControls2::PML.union(ProcControls2::SHADOW_VMCS);

/// Secondary controls that vmcs02 may lack though L1 asks for them: L0 does what they stand for.
pub const BY_L0: ProcControls2 = NEVER
    .union(ProcControls2::VIRTUALIZE_APIC_ACCESSES)
    .union(ProcControls2::VIRTUALIZE_X2APIC)
    .union(ProcControls2::APIC_REGISTERS)
    .union(ProcControls2::VIRTUAL_INTERRUPTS);

/// Secondary processor-based controls.
pub fn secondary(l0: &L0, v: &Vmcs12) -> ProcControls2 {
    let of_l0 = ProcControls2::EPT | ProcControls2::VPID;
    // What L1 decides on is not L0's wish for L1: UNRESTRICTED_GUEST of vmcs01 says nothing of L2.
    let mut word = l0.secondary.difference(OF_L1 | NEVER) | v.secondary().difference(of_l0 | NEVER);
    let apic = ProcControls2::VIRTUALIZE_X2APIC
        | ProcControls2::APIC_REGISTERS
        | ProcControls2::VIRTUAL_INTERRUPTS;
    // These three would have the CPU use a page that L0 does not give it.
    if l0.pages.virtual_apic.is_none() {
        word.remove(apic);
    }
    if l0.pages.apic_access.is_none() {
        word.remove(ProcControls2::VIRTUALIZE_APIC_ACCESSES);
    }
    // L1's TSC may be scaled by L0: that stays, whatever L1 asks.
    if !v.primary().contains(ProcControls::TSC_OFFSET)
        && !l0.secondary.contains(ProcControls2::TSC_SCALING)
    {
        // Without an offset there is no scaling either (SDM vol. 3C §26.3).
        word.remove(ProcControls2::TSC_SCALING);
    }
    word
}

/// VM-entry controls: L0's, and L2's mode.
pub fn entry(l0: &L0, v: &Vmcs12) -> EntryControls {
    let mut word = l0.entry;
    // By EFER as it is composed: an entry wants the control and LMA alike (§27.3.1.1).
    word.set(EntryControls::IA32E_GUEST, efer(l0, v) & x86::Efer::LMA.bits() != 0);
    word
}

/// The exception bitmap.
pub fn exceptions(l0: &L0, v: &Vmcs12) -> u32 {
    // Either wants it: whose it is is asked behind the exit.
    let all_faults = if l0.page_faults { 1 << 14 } else { 0 };
    l0.exceptions | v.get(field::EXCEPTION_BITMAP) | all_faults
}
