//! What the hardware's VMCS (vmcs02) holds while L2 runs: what L1 asked for, and what L0 needs.
//!
//! Fields are composed by groups ([`Group`]). A group is composed when L1 or L0 has changed something in it,
//! or when the exit before left vmcs02 with another value than the VMCS12 has ([`crate::leave`]). With
//! `nested_dirty_tracking=0` the caller passes [`Groups::ALL`].

pub mod bitmaps;
pub mod time;
pub mod words;

use x86::vmcs::field::{self, Field, Natural, Width};
use x86::vmcs::{
    EntryControls, ExitControls, Group, Groups, PinControls, ProcControls, ProcControls2,
    ReadWrite, event, interruptibility,
};
use x86::{Cr0, Efer, Hpa};

use crate::Vmcs12;

/// The hardware's VMCS, to be written. Whoever knows that a field has the value already leaves it.
pub trait Fields {
    /// Sets a field.
    fn set<W: Width>(&mut self, field: Field<W, ReadWrite>, value: W::Value);
}

/// Pages of L1's that vmcs02 points at, as L0 has found them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// The virtual-APIC page.
    pub virtual_apic: Option<Hpa>,
    /// The APIC-access page.
    pub apic_access: Option<Hpa>,
    /// The posted-interrupt descriptor.
    pub posted_interrupts: Option<Hpa>,
    /// L0's page of both MSR bitmaps, if it could be composed.
    pub msr_bitmap: Option<Hpa>,
    /// L0's own list of one MSR, which an exit stores if L1 has it store any: the TSC.
    pub exit_tsc: Option<Hpa>,
}

/// L0's part: the words of vmcs01, and L1's registers that an entry keeps when the VMCS12 does not load them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L0 {
    /// Pin-based controls.
    pub pin: PinControls,
    /// Primary processor-based controls, with the windows that L0 waits for.
    pub primary: ProcControls,
    /// Secondary processor-based controls.
    pub secondary: ProcControls2,
    /// VM-exit controls.
    pub exit: ExitControls,
    /// VM-entry controls.
    pub entry: EntryControls,
    /// Exceptions that exit to L0.
    pub exceptions: u32,
    /// L0 has to see every page fault: it runs L2 on shadow tables.
    pub page_faults: bool,
    /// CR0 bits that the hardware forces to 1.
    pub cr0_ones: u64,
    /// CR0 bits that L0 owns.
    pub cr0_mask: u64,
    /// CR4 bits that the hardware forces to 1.
    pub cr4_ones: u64,
    /// CR4 bits that L0 owns.
    pub cr4_mask: u64,
    /// L1's TSC, from the host's.
    pub tsc: time::Tsc,
    /// Value for the preemption timer, if it is to run.
    pub preemption_timer: Option<u32>,
    /// The tag of L2's translations.
    pub vpid: u16,
    /// Pages that vmcs02 points at.
    pub pages: Pages,
    /// L1's EFER.
    pub efer: u64,
    /// L1's DR7.
    pub dr7: u64,
    /// L1's DEBUGCTL.
    pub debugctl: u64,
    /// L1's PAT.
    pub pat: u64,
}

impl L0 {
    /// No word of any.
    pub const NONE: Self = Self {
        pin: PinControls::empty(),
        primary: ProcControls::empty(),
        secondary: ProcControls2::empty(),
        exit: ExitControls::empty(),
        entry: EntryControls::empty(),
        exceptions: 0,
        page_faults: false,
        cr0_ones: 0,
        cr0_mask: 0,
        cr4_ones: 0,
        cr4_mask: 0,
        tsc: time::Tsc::SAME,
        preemption_timer: None,
        vpid: 0,
        pages: Pages {
            virtual_apic: None,
            apic_access: None,
            posted_interrupts: None,
            msr_bitmap: None,
            exit_tsc: None,
        },
        efer: 0,
        dr7: 0,
        debugctl: 0,
        pat: 0,
    };
}

/// EFER that L2 starts with (SDM vol. 3C §27.3.2.1).
pub fn efer(l0: &L0, v: &Vmcs12) -> u64 {
    let both = (Efer::LMA | Efer::LME).bits();
    let l1 = l0.efer;
    if v.entry().contains(EntryControls::LOAD_EFER) {
        // Checked: LMA is what the control says.
        v.get(field::GUEST_EFER)
    } else if v.entry().contains(EntryControls::IA32E_GUEST) {
        l1 | both
    } else if v.get(field::GUEST_CR0) & Cr0::PG.bits() != 0 {
        // Paging without the control is a mode of 32 bits, which has neither bit. Without paging LME names a mode to come.
        l1 & !both
    } else {
        l1 & !Efer::LMA.bits()
    }
}

/// Groups that an L1 sets up once: one test for them all at an entry that has changed none.
const SELDOM: Groups =
    Groups::of(Group::Time).union(Groups::of(Group::Apic)).union(Groups::of(Group::MsrLists));

/// What of other groups is composed anew when a field changes: it is looked at there.
///
/// Without this an entry would go by the new word and have what was composed by the old one: an L2 whose EFER is L1's by
/// the controls, and its own in the hardware. Whose PDPTEs are L2's follows from several words at once: that is looked at by
/// the entry ([`crate::machine::Machine::finish_entry`]).
pub(crate) const fn follows(encoding: u32) -> Groups {
    const ENTRY: u32 = field::ENTRY_CONTROLS.encoding();
    const PRIMARY: u32 = field::PROC_CONTROLS.encoding();
    const SECONDARY: u32 = field::PROC_CONTROLS2.encoding();
    match encoding {
        // EFER, PAT, DR7 and DEBUGCTL are L2's or L1's by these.
        ENTRY => Groups::of(Group::Msrs),
        // Whether the TSC has an offset, and whether it is scaled.
        PRIMARY | SECONDARY => Groups::of(Group::Time),
        _ => Groups::NONE,
    }
}

/// Composes the groups.
pub fn compose(l0: &L0, v: &Vmcs12, dirty: Groups, to: &mut impl Fields) {
    let mut wakes = dirty.has(Group::Controls);
    if dirty.has(Group::Flow) {
        flow(v, to);
        wakes |= !(l0.primary | v.primary()).contains(ProcControls::HLT);
    }
    // At each entry: an event is injected once, so that no group tells whether there is one. Behind the flow, of which it may
    // want a bit otherwise.
    inject(v, to);
    // HLT and wait-for-SIPI are L0's to wait in: the hardware's guest is active. Only an HLT that does not exit leaves it
    // in another state: it is active again where L1 sets its flow, or its HLT has an exit now.
    if wakes {
        to.set(field::GUEST_ACTIVITY, crate::checks::guest::activity_state::ACTIVE);
    }
    // Segments and SYSENTER MSRs are nearly never dirty: L2's own are still in vmcs02.
    if dirty.has(Group::Segments) {
        segments(v, to);
    }
    if dirty.has(Group::ControlRegisters) {
        control_registers(l0, v, to);
    }
    if dirty.has(Group::Sysenter) {
        to.set(field::GUEST_SYSENTER_CS, v.get(field::GUEST_SYSENTER_CS));
        to.set(field::GUEST_SYSENTER_ESP, v.get(field::GUEST_SYSENTER_ESP));
        to.set(field::GUEST_SYSENTER_EIP, v.get(field::GUEST_SYSENTER_EIP));
    }
    if dirty.has(Group::Msrs) {
        msrs(l0, v, to);
    }
    // The MSRs and the words both write the entry controls, with one value.
    // Words follow from controls, and some of their bits from pages, bitmaps, times and CR4.
    let words = [Group::Controls, Group::Bitmaps, Group::Apic, Group::Time, Group::Translation];
    if words.iter().any(|group| dirty.has(*group)) {
        // The words are composed as a whole: each has bits that follow from other groups.
        controls(l0, v, to);
        // L0's own bitmap is 0; L1's counts for L2 alone.
        if v.secondary().contains(ProcControls2::XSAVES) {
            to.set(field::XSS_EXIT_BITMAP, v.get(field::XSS_EXIT_BITMAP));
        }
    }
    if dirty.has(Group::Bitmaps) {
        // The hardware shadows nothing for L2: what L1 lets L2 reach, L0 serves.
        to.set(field::VMCS_LINK, Vmcs12::NOWHERE);
        // L0 keeps both levels' maps in a page of vmcs02's own: what the words say does not change with L1's address.
        if let Some(page) = l0.pages.msr_bitmap {
            to.set(field::MSR_BITMAP, page.0);
        }
    }
    if dirty.has(Group::Translation) {
        // One tag of L0's for all of L1's: what changes is what lies under it.
        to.set(field::VPID, l0.vpid);
        if v.secondary().contains(ProcControls2::VMFUNC) {
            // Every VM function exits: L0 has to know which tables L2 runs on.
            to.set(field::VM_FUNCTION_CONTROLS, 0);
        }
    }
    if dirty.meets(SELDOM) {
        if dirty.has(Group::Time) {
            time(l0, v, to);
        }
        if dirty.has(Group::Apic) {
            apic(l0, v, to);
        }
        if dirty.has(Group::MsrLists) {
            msr_lists(l0, v, to);
        }
    }
}

/// L1's lists are L0's work: it checks and carries out each entry by itself, for an MSR of L1's list is not to reach the host's. What the
/// hardware has is the time of the exit, which software would read late.
fn msr_lists(l0: &L0, v: &Vmcs12, to: &mut impl Fields) {
    let page = l0.pages.exit_tsc.filter(|_| v.get(field::EXIT_MSR_STORE_COUNT) != 0);
    if let Some(page) = page {
        to.set(field::EXIT_MSR_STORE_ADDR, page.0);
    }
    to.set(field::EXIT_MSR_STORE_COUNT, page.is_some().into());
    to.set(field::EXIT_MSR_LOAD_COUNT, 0);
    to.set(field::ENTRY_MSR_LOAD_COUNT, 0);
}

/// The event that the entry injects. The hardware makes the field invalid at each exit, so that there is
/// nothing to be done without one.
fn inject(v: &Vmcs12, to: &mut impl Fields) {
    let information = v.get(field::ENTRY_INTERRUPTION);
    if information & event::VALID == 0 {
        // Stale, but not valid: the hardware ignores the rest of the field.
        return;
    }
    if information & event::ERROR_VALID != 0 {
        to.set(field::ENTRY_ERROR_CODE, v.get(field::ENTRY_ERROR_CODE));
    }
    // A length that is not used may be anything; to write it would be a VMWRITE.
    let kind = information & event::TYPE;
    let from_instruction = [event::SOFT, event::PRIVILEGED_SOFT_EXCEPTION, event::SOFT_EXCEPTION];
    if from_instruction.contains(&kind) {
        to.set(field::ENTRY_INSTRUCTION_LENGTH, v.get(field::ENTRY_INSTRUCTION_LENGTH));
    }
    if kind == event::NMI && !v.pin().contains(PinControls::VIRTUAL_NMIS) {
        unblock(v, to);
    }
    // Last: with the valid bit the others have to be there.
    to.set(field::ENTRY_INTERRUPTION, information);
}

/// Without virtual NMIs an NMI that is injected is delivered whatever blocks (SDM vol. 3C §27.3.1.5). L0's own virtual NMIs
/// would have the entry refused; the delivery blocks anew.
#[cold]
#[inline(never)]
fn unblock(v: &Vmcs12, to: &mut impl Fields) {
    let state = v.get(field::GUEST_INTERRUPTIBILITY);
    if state & interruptibility::NMI != 0 {
        to.set(field::GUEST_INTERRUPTIBILITY, state & !interruptibility::NMI);
    }
}

fn flow(v: &Vmcs12, to: &mut impl Fields) {
    to.set(field::GUEST_RIP, v.get(field::GUEST_RIP));
    to.set(field::GUEST_RSP, v.get(field::GUEST_RSP));
    // L1 may have emulated an instruction: the shadow is as L1 wants it. L0's own windows are no part of it.
    to.set(field::GUEST_RFLAGS, v.get(field::GUEST_RFLAGS));
    to.set(field::GUEST_INTERRUPTIBILITY, v.get(field::GUEST_INTERRUPTIBILITY));
    to.set(field::GUEST_PENDING_DEBUG, v.get(field::GUEST_PENDING_DEBUG));
}

macro_rules! copy {
    ($v:expr, $to:expr, $($name:ident),* $(,)?) => {
        $($to.set(field::$name, $v.get(field::$name));)*
    };
}

#[rustfmt::skip] // A table.
fn segments(v: &Vmcs12, to: &mut impl Fields) {
    copy!(v, to,
        GUEST_ES_SELECTOR, GUEST_ES_BASE, GUEST_ES_LIMIT, GUEST_ES_RIGHTS,
        GUEST_CS_SELECTOR, GUEST_CS_BASE, GUEST_CS_LIMIT, GUEST_CS_RIGHTS,
        GUEST_SS_SELECTOR, GUEST_SS_BASE, GUEST_SS_LIMIT, GUEST_SS_RIGHTS,
        GUEST_DS_SELECTOR, GUEST_DS_BASE, GUEST_DS_LIMIT, GUEST_DS_RIGHTS,
        GUEST_FS_SELECTOR, GUEST_FS_BASE, GUEST_FS_LIMIT, GUEST_FS_RIGHTS,
        GUEST_GS_SELECTOR, GUEST_GS_BASE, GUEST_GS_LIMIT, GUEST_GS_RIGHTS,
    );
    copy!(v, to,
        GUEST_LDTR_SELECTOR, GUEST_LDTR_BASE, GUEST_LDTR_LIMIT, GUEST_LDTR_RIGHTS,
        GUEST_TR_SELECTOR, GUEST_TR_BASE, GUEST_TR_LIMIT, GUEST_TR_RIGHTS,
        GUEST_GDTR_BASE, GUEST_GDTR_LIMIT, GUEST_IDTR_BASE, GUEST_IDTR_LIMIT,
    );
}

/// A control register as L2 reads it: what L1 owns from L1's shadow.
fn seen(
    v: &Vmcs12,
    register: Field<Natural, ReadWrite>,
    mask: Field<Natural, ReadWrite>,
    shadow: Field<Natural, ReadWrite>,
) -> u64 {
    let mask = v.get(mask);
    // L1's bits from L1's shadow, all others as the register has them (§26.3).
    v.get(register) & !mask | v.get(shadow) & mask
}

fn control_registers(l0: &L0, v: &Vmcs12, to: &mut impl Fields) {
    // An exit for a bit of either: L0 asks in L1's stead which of the two it concerns.
    to.set(field::CR0_MASK, l0.cr0_mask | v.get(field::CR0_MASK));
    to.set(field::CR0_SHADOW, seen(v, field::GUEST_CR0, field::CR0_MASK, field::CR0_SHADOW));
    // L0's fixed bits are ones in the register, and not in what L2 reads.
    to.set(field::GUEST_CR0, v.get(field::GUEST_CR0) | l0.cr0_ones);
    to.set(field::CR4_MASK, l0.cr4_mask | v.get(field::CR4_MASK));
    to.set(field::CR4_SHADOW, seen(v, field::GUEST_CR4, field::CR4_MASK, field::CR4_SHADOW));
    to.set(field::GUEST_CR4, v.get(field::GUEST_CR4) | l0.cr4_ones);
    to.set(field::GUEST_CR3, v.get(field::GUEST_CR3));
    // Without PAE paging nobody looks at them, and the fields keep what they have.
    if crate::checks::guest::is_pae(v) {
        copy!(v, to, GUEST_PDPTE0, GUEST_PDPTE1, GUEST_PDPTE2, GUEST_PDPTE3);
    }
}

fn msrs(l0: &L0, v: &Vmcs12, to: &mut impl Fields) {
    // EFER is always loaded by vmcs02: L0 has composed it, whatever L1's control says.
    to.set(field::GUEST_EFER, efer(l0, v));
    to.set(field::ENTRY_CONTROLS, words::entry(l0, v).bits());
    let entry = v.entry();
    let debug = entry.contains(EntryControls::LOAD_DEBUG);
    // What an entry does not load stays: L2 begins with L1's.
    to.set(field::GUEST_DR7, if debug { v.get(field::GUEST_DR7) } else { l0.dr7 });
    to.set(field::GUEST_DEBUGCTL, if debug { v.get(field::GUEST_DEBUGCTL) } else { l0.debugctl });
    let pat = entry.contains(EntryControls::LOAD_PAT);
    to.set(field::GUEST_PAT, if pat { v.get(field::GUEST_PAT) } else { l0.pat });
}

fn controls(l0: &L0, v: &Vmcs12, to: &mut impl Fields) {
    // Primary and secondary words have L0's exits, so that an exit is not L1's because it came: [`crate::reflect`].
    to.set(field::PIN_CONTROLS, words::pin(l0, v).bits());
    to.set(field::PROC_CONTROLS, words::primary(l0, v).bits());
    to.set(field::PROC_CONTROLS2, words::secondary(l0, v).bits());
    // L0's exit controls alone: an exit goes to L0, and what L1's controls ask for is done by software.
    to.set(field::EXIT_CONTROLS, l0.exit.bits());
    to.set(field::ENTRY_CONTROLS, words::entry(l0, v).bits());
    to.set(field::EXCEPTION_BITMAP, words::exceptions(l0, v));
    // Bit 14 of the exception bitmap is set then: with mask and match 0 every page fault exits (SDM
    // vol. 3C §26.2).
    let (mask, matching) = if l0.page_faults {
        (0, 0)
    } else {
        // L1's filter of page faults works in the hardware as long as L0 wants none of them.
        (v.get(field::PAGE_FAULT_MASK), v.get(field::PAGE_FAULT_MATCH))
    };
    to.set(field::PAGE_FAULT_MASK, mask);
    to.set(field::PAGE_FAULT_MATCH, matching);
}

fn time(l0: &L0, v: &Vmcs12, to: &mut impl Fields) {
    // Offsets and multipliers of two levels make one: L2's TSC from the host's (§26.3).
    let l2 = l0.tsc.of_l2(v);
    to.set(field::TSC_OFFSET, l2.offset);
    // Without the control the field is not looked at.
    if words::secondary(l0, v).contains(ProcControls2::TSC_SCALING) {
        to.set(field::TSC_MULTIPLIER, l2.multiplier);
    }
    // L0's value, not L1's: the timer counts for whichever of two deadlines comes first.
    if let Some(value) = l0.preemption_timer {
        to.set(field::PREEMPTION_TIMER, value);
    }
}

fn apic(l0: &L0, v: &Vmcs12, to: &mut impl Fields) {
    // Each of these has a page of L1's that L0 would have to pin: with none the words lack the control.
    let second = words::secondary(l0, v);
    if words::primary(l0, v).contains(ProcControls::TPR_SHADOW)
        && let Some(page) = l0.pages.virtual_apic
    {
        to.set(field::VIRTUAL_APIC_ADDR, page.0);
        to.set(field::TPR_THRESHOLD, v.get(field::TPR_THRESHOLD));
    }
    if second.contains(ProcControls2::VIRTUALIZE_APIC_ACCESSES)
        && let Some(page) = l0.pages.apic_access
    {
        to.set(field::APIC_ACCESS_ADDR, page.0);
    }
    if second.contains(ProcControls2::VIRTUAL_INTERRUPTS) {
        copy!(v, to, EOI_EXIT_0, EOI_EXIT_1, EOI_EXIT_2, EOI_EXIT_3, GUEST_INTERRUPT_STATUS);
    }
    if words::pin(l0, v).contains(PinControls::POSTED_INTERRUPTS)
        && let Some(at) = l0.pages.posted_interrupts
    {
        to.set(field::POSTED_INTR_DESC, at.0);
    }
}

/// Which tables L2's addresses go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// L1's own: L1 runs L2 without EPT.
    OfL1,
    /// A shadow of the EPT tables that this pointer names.
    Shadow(u64),
}

/// The tables that L2 runs on.
pub fn tables(v: &Vmcs12) -> Tables {
    // By what VMCS12 says now: VMFUNC may have changed the pointer since the entry.
    if v.has_ept() { Tables::Shadow(v.get(field::EPT_POINTER)) } else { Tables::OfL1 }
}

/// What an entry or an exit does to translations that the hardware keeps (SDM vol. 3C §29.4.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Nothing: L1's tag and L2's differ.
    None,
    /// L2's tag stands for another VPID of L1's than before.
    L2,
    /// Linear and combined translations of both: L1 uses no VPID, and expects that a transition drops them.
    Both,
}

/// Which way the CPU goes between L1 and L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// From L1 to L2.
    Entry,
    /// From L2 to L1.
    Exit,
}

/// What a transition drops. `last` is the VPID of L1's that L2's tag stood for.
pub fn flush(v: &Vmcs12, last: u16, transition: Transition) -> Flush {
    // Without VPIDs of L1's each transition drops translations, as on a CPU: L1 may rely on that.
    if !v.secondary().contains(ProcControls2::VPID) {
        return Flush::Both;
    }
    match transition {
        // L1 has many VPIDs, L2's tag is one: another VPID of L1's must not find what the one before left.
        Transition::Entry if v.get(field::VPID) != last => Flush::L2,
        Transition::Entry | Transition::Exit => Flush::None,
    }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
