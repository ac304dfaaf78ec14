//! An exit of L2 that L1 sees: what goes into the VMCS12, and the state in which L1 goes on
//! (SDM vol. 3C §28.2 to §28.6).
//!
//! Not all of L2's state is read from the hardware's VMCS (vmcs02) at the exit. What a hypervisor looks at
//! after nearly every exit is; the rest ([`REST`]) stays there until L1 asks for it, by [`save_rest`].

pub mod host;

use x86::vmcs::field::{self, Field, Natural, Width};
use x86::vmcs::{
    ENTRY_FAILURE, EntryControls, ExitControls, ExitReason, Group, Groups, ReadWrite,
    ept_violation, event,
};
use x86::{Cr0, Efer};

use crate::checks::guest::activity_state;
use crate::{EntryFailure, Vmcs12};

/// vmcs02 after an exit. A field is read when it is asked for.
pub trait Exit {
    /// The field's value.
    fn get<W: Width, A>(&self, field: Field<W, A>) -> W::Value;

    /// As [`get`](Self::get), where many fields are copied and not often.
    fn get_rarely<W: Width, A>(&self, field: Field<W, A>) -> W::Value {
        self.get(field)
    }
}

/// Groups of L2's state that stay in vmcs02 after an exit until L1 asks for them.
pub const REST: Groups = Groups::of(Group::Segments)
    .union(Groups::of(Group::ControlRegisters))
    .union(Groups::of(Group::Sysenter));

/// What L1 is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Basic exit reason.
    pub reason: ExitReason,
    /// Exit qualification.
    pub qualification: u64,
    /// Exit-interruption information; 0 is invalid.
    pub interruption: u32,
    /// Error code of that event.
    pub error_code: u32,
    /// Event whose delivery the exit has interrupted, or that was not injected yet; 0 is invalid.
    pub vectoring: u32,
    /// Error code of that event.
    pub vectoring_error: u32,
    /// Length of the instruction that exits, or of the one whose event is told.
    pub length: u32,
    /// Instruction information.
    pub information: u32,
    /// Guest-linear address, where the reason has one.
    pub linear: Option<u64>,
    /// Guest-physical address, where the reason has one.
    pub physical: Option<u64>,
    /// Activity state in which L2 was left. An instruction of L2's that exits is an active L2's.
    pub activity: u32,
}

impl Report {
    /// An exit that no instruction and no event has caused.
    pub const fn plain(reason: ExitReason, qualification: u64) -> Self {
        Self {
            reason,
            qualification,
            interruption: 0,
            error_code: 0,
            vectoring: 0,
            vectoring_error: 0,
            length: 0,
            information: 0,
            linear: None,
            physical: None,
            activity: activity_state::ACTIVE,
        }
    }

    /// An exit for an event.
    pub const fn event(information: u32, error_code: u32, qualification: u64) -> Self {
        let mut report = Self::plain(ExitReason::ExceptionOrNmi, qualification);
        report.interruption = information | event::VALID;
        report.error_code = error_code;
        report
    }

    /// The exit that the hardware reports, as it is.
    pub fn of(exit: &impl Exit) -> Self {
        let reason = ExitReason::of(exit.get(field::EXIT_REASON));
        let mut report = Self::plain(reason, 0);
        if has_qualification(reason) {
            report.qualification = exit.get(field::EXIT_QUALIFICATION);
        }
        if reason == ExitReason::ExceptionOrNmi {
            // The vector of an external interrupt is not told here: it is the host's, and L1 hears of its own by another report.
            report.interruption = exit.get(field::EXIT_INTERRUPTION);
            if report.interruption & event::ERROR_VALID != 0 {
                report.error_code = exit.get(field::EXIT_ERROR_CODE);
            }
        }
        // A VMREAD less for frequent exits: between two instructions nothing is being delivered.
        if !is_between_instructions(reason) {
            report.vectoring = exit.get(field::IDT_VECTORING);
        }
        // Of what is not valid no bit is defined: L1 reads 0, and nothing that the host left.
        if report.vectoring & event::VALID == 0 {
            report.vectoring = 0;
        } else if report.vectoring & event::ERROR_VALID != 0 {
            report.vectoring_error = exit.get(field::IDT_VECTORING_ERROR);
        }
        // The length is of the instruction that exits, or of the one that raises a software event.
        report.length = exit.get(field::INSTRUCTION_LENGTH);
        // Undefined for all others (§28.2.5). Of port accesses INS and OUTS have it.
        let plain = reason == ExitReason::Io && report.qualification & x86::vmcs::io::STRING == 0;
        if has_information(reason) && !plain {
            report.information = exit.get(field::INSTRUCTION_INFO);
        }
        addresses(&mut report, exit);
        report
    }
}

fn addresses(report: &mut Report, exit: &impl Exit) {
    // Where the manual gives the field a meaning (§28.2.1). Elsewhere VMCS12 keeps what it had.
    let linear = match report.reason {
        ExitReason::EptViolation => report.qualification & ept_violation::LINEAR_VALID != 0,
        ExitReason::Io => report.qualification & x86::vmcs::io::STRING != 0,
        ExitReason::CrAccess => {
            report.qualification & x86::vmcs::cr::ACCESS == x86::vmcs::cr::LMSW
                && report.qualification & LMSW_MEMORY != 0
        }
        _ => false,
    };
    if linear {
        report.linear = Some(exit.get(field::GUEST_LINEAR_ADDRESS));
    }
    if matches!(report.reason, ExitReason::EptViolation | ExitReason::EptMisconfiguration) {
        report.physical = Some(exit.get(field::GUEST_PHYSICAL_ADDRESS));
    }
}

/// Exit qualification of LMSW: the operand is in memory (SDM vol. 3C table 28-3).
const LMSW_MEMORY: u64 = 1 << 6;

/// Exits of frequent instructions, and interrupts: no event is being delivered then (SDM vol. 3C §28.2.4).
fn is_between_instructions(reason: ExitReason) -> bool {
    // Not all that there are: those that are worth the VMREAD.
    matches!(
        reason,
        ExitReason::Cpuid
            | ExitReason::Rdmsr
            | ExitReason::Wrmsr
            | ExitReason::Hlt
            | ExitReason::Vmcall
            | ExitReason::Io
            | ExitReason::ExternalInterrupt
            | ExitReason::InterruptWindow
            | ExitReason::PreemptionTimer
            | ExitReason::Pause
    )
}

/// Exits with a qualification; elsewhere it is cleared (SDM vol. 3C §28.2.1).
fn has_qualification(reason: ExitReason) -> bool {
    // What is not named here costs a VMREAD, and the CPU gives 0 where it has no qualification.
    !matches!(
        reason,
        ExitReason::ExternalInterrupt
            | ExitReason::TripleFault
            | ExitReason::Init
            | ExitReason::InterruptWindow
            | ExitReason::NmiWindow
            | ExitReason::Cpuid
            | ExitReason::Hlt
            | ExitReason::Rdmsr
            | ExitReason::Wrmsr
            | ExitReason::Rdtsc
            | ExitReason::Rdtscp
            | ExitReason::Rdpmc
            | ExitReason::Vmcall
            | ExitReason::Pause
            | ExitReason::Xsetbv
            | ExitReason::Wbinvd
            | ExitReason::PreemptionTimer
    )
}

/// Exits with instruction information (SDM vol. 3C §28.2.5).
fn has_information(reason: ExitReason) -> bool {
    matches!(
        reason,
        ExitReason::Io
            | ExitReason::Vmclear
            | ExitReason::Vmptrld
            | ExitReason::Vmptrst
            | ExitReason::Vmread
            | ExitReason::Vmwrite
            | ExitReason::Vmxon
            | ExitReason::Invept
            | ExitReason::Invvpid
            | ExitReason::Invpcid
            | ExitReason::GdtrIdtr
            | ExitReason::LdtrTr
            | ExitReason::Rdrand
            | ExitReason::Rdseed
            | ExitReason::Xsaves
            | ExitReason::Xrstors
            | ExitReason::Umwait
            | ExitReason::Tpause
    )
}

/// L0's knowledge of L2 that vmcs02 does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// L2 sleeps in HLT, or waits for a SIPI: L0 does it for L2.
    pub activity: u32,
    /// CR0 bits that vmcs02 lets L0 or L1 own.
    pub cr0_mask: u64,
    /// CR4 bits that vmcs02 lets L0 or L1 own.
    pub cr4_mask: u64,
    /// What is left of L1's preemption timer.
    pub preemption_timer: u32,
    /// L2's PAT.
    pub pat: u64,
    /// L2's EFER.
    pub efer: u64,
    /// L2's DEBUGCTL.
    pub debugctl: u64,
}

/// Saves the hot part of L2's state and the report. Gives the groups in which vmcs02 and the VMCS12 differ now:
/// they are composed at the next entry although L1 has changed nothing.
/// `l1_efer`: as [`Machine::note_l1_efer`] was told it. `rights`: those of SS are among what is hot; otherwise they are saved
/// with the segments.
///
/// [`Machine::note_l1_efer`]: crate::Machine::note_l1_efer
pub fn save(
    v: &mut Vmcs12,
    exit: &impl Exit,
    report: &Report,
    known: &Known,
    (l1_efer, rights): (u64, bool),
) -> Groups {
    let differ = save_state(v, exit, known, l1_efer);
    if rights {
        v.set(field::GUEST_SS_RIGHTS, exit.get(field::GUEST_SS_RIGHTS));
    }
    tell(v, report);
    // Every exit clears the valid bit, lest the event be injected twice (SDM vol. 3C §28.2).
    let information = v.get(field::ENTRY_INTERRUPTION);
    v.set(field::ENTRY_INTERRUPTION, information & !event::VALID);
    differ
}

/// Saves the hot part of L2's state.
pub fn save_state(v: &mut Vmcs12, exit: &impl Exit, known: &Known, l1_efer: u64) -> Groups {
    // What a hypervisor looks at after nearly every exit; the rest waits in vmcs02 until it is asked for.
    v.set(field::GUEST_RIP, exit.get(field::GUEST_RIP));
    v.set(field::GUEST_RSP, exit.get(field::GUEST_RSP));
    v.set(field::GUEST_RFLAGS, exit.get(field::GUEST_RFLAGS));
    v.set(field::GUEST_INTERRUPTIBILITY, exit.get(field::GUEST_INTERRUPTIBILITY));
    v.set(field::GUEST_PENDING_DEBUG, exit.get(field::GUEST_PENDING_DEBUG));
    // Each entry checks RIP by the mode of the code.
    v.set(field::GUEST_CS_RIGHTS, exit.get(field::GUEST_CS_RIGHTS));
    // The hardware's field says active, unless HLT exits for nobody: L0 sleeps for L2.
    v.set(field::GUEST_ACTIVITY, known.activity);
    let mut differ = save_msrs(v, exit, known, l1_efer);
    // An exit updates this control, for the next entry to resume L2 in its mode (SDM vol. 3C
    // §28.2).
    // EFER as L2 left it: it may have changed its mode without an exit that L1 sees.
    let lma = known.efer & Efer::LMA.bits() != 0;
    let mut entry = v.entry();
    if entry.contains(EntryControls::IA32E_GUEST) != lma {
        entry.set(EntryControls::IA32E_GUEST, lma);
        v.set(field::ENTRY_CONTROLS, entry.bits());
        // What the next entry loads has to fit the mode, and PDPTEs come with it.
        differ.add(Group::ControlRegisters);
    }
    // vmcs02 is active and VMCS12 is not: the field has to be composed again, even if L1 writes nothing.
    if known.activity != activity_state::ACTIVE {
        differ.add(Group::Flow);
    }
    differ
}

/// Saves what the exit controls ask for. What L2 has changed and they do not ask for is loaded again at the
/// next entry.
fn save_msrs(v: &mut Vmcs12, exit: &impl Exit, known: &Known, l1_efer: u64) -> Groups {
    let (leave, entry) = (v.exit(), v.entry());
    if leave.contains(ExitControls::SAVE_DEBUG) {
        v.set(field::GUEST_DR7, exit.get(field::GUEST_DR7));
        // Last branches are not virtualized: vmcs02's field is L0's, and L0 says what L2 is to have had.
        v.set(field::GUEST_DEBUGCTL, known.debugctl);
    }
    if leave.contains(ExitControls::SAVE_PAT) {
        v.set(field::GUEST_PAT, known.pat);
    }
    if leave.contains(ExitControls::SAVE_EFER) {
        v.set(field::GUEST_EFER, known.efer);
    }
    if leave.contains(ExitControls::SAVE_PREEMPTION_TIMER) {
        v.set(field::PREEMPTION_TIMER, known.preemption_timer);
    }
    // Where the entry does not load a register, L1's own counts, which nobody here knows, but for EFER.
    // Only what is saved here and loaded by the next entry is the same in both places.
    let debug =
        leave.contains(ExitControls::SAVE_DEBUG) && entry.contains(EntryControls::LOAD_DEBUG);
    let pat = entry.contains(EntryControls::LOAD_PAT) && v.get(field::GUEST_PAT) == known.pat;
    let loads = entry.contains(EntryControls::LOAD_EFER);
    let composed =
        if loads { v.get(field::GUEST_EFER) } else { l1_efer | (Efer::LMA | Efer::LME).bits() };
    // Without either it follows from CR0 as well, which L2 changes.
    let is_told = entry.intersects(EntryControls::LOAD_EFER | EntryControls::IA32E_GUEST);
    let efer = is_told && known.efer == composed;
    let mut differ = Groups::NONE;
    if !(debug && pat && efer) {
        differ.add(Group::Msrs);
    }
    differ
}

/// Writes the exit information.
fn tell(v: &mut Vmcs12, report: &Report) {
    // Without bit 31: L2 has run.
    v.set(field::EXIT_REASON, u32::from(report.reason.0));
    v.set(field::EXIT_QUALIFICATION, report.qualification);
    v.set(field::EXIT_INTERRUPTION, report.interruption);
    // What has no meaning for this exit keeps the value that it had, as on a CPU.
    if report.interruption & event::ERROR_VALID != 0 {
        v.set(field::EXIT_ERROR_CODE, report.error_code);
    }
    v.set(field::IDT_VECTORING, report.vectoring);
    if report.vectoring & event::ERROR_VALID != 0 {
        v.set(field::IDT_VECTORING_ERROR, report.vectoring_error);
    }
    v.set(field::INSTRUCTION_LENGTH, report.length);
    v.set(field::INSTRUCTION_INFO, report.information);
    if let Some(address) = report.linear {
        v.set(field::GUEST_LINEAR_ADDRESS, address);
    }
    if let Some(address) = report.physical {
        v.set(field::GUEST_PHYSICAL_ADDRESS, address);
    }
}

macro_rules! copy {
    ($v:expr, $exit:expr, $($name:ident),* $(,)?) => {
        $($v.set(field::$name, $exit.get_rarely(field::$name));)*
    };
}

/// Saves groups of L2's state that an exit left in vmcs02.
#[rustfmt::skip] // Tables.
pub fn save_rest(v: &mut Vmcs12, exit: &impl Exit, known: &Known, groups: Groups) {
    if groups.has(Group::Segments) {
        copy!(v, exit,
            GUEST_ES_SELECTOR, GUEST_ES_BASE, GUEST_ES_LIMIT, GUEST_ES_RIGHTS,
            GUEST_CS_SELECTOR, GUEST_CS_BASE, GUEST_CS_LIMIT, GUEST_CS_RIGHTS,
            GUEST_SS_SELECTOR, GUEST_SS_BASE, GUEST_SS_LIMIT, GUEST_SS_RIGHTS,
            GUEST_DS_SELECTOR, GUEST_DS_BASE, GUEST_DS_LIMIT, GUEST_DS_RIGHTS,
            GUEST_FS_SELECTOR, GUEST_FS_BASE, GUEST_FS_LIMIT, GUEST_FS_RIGHTS,
            GUEST_GS_SELECTOR, GUEST_GS_BASE, GUEST_GS_LIMIT, GUEST_GS_RIGHTS,
            GUEST_LDTR_SELECTOR, GUEST_LDTR_BASE, GUEST_LDTR_LIMIT, GUEST_LDTR_RIGHTS,
            GUEST_TR_SELECTOR, GUEST_TR_BASE, GUEST_TR_LIMIT, GUEST_TR_RIGHTS,
            GUEST_GDTR_BASE, GUEST_GDTR_LIMIT, GUEST_IDTR_BASE, GUEST_IDTR_LIMIT,
        );
    }
    if groups.has(Group::Sysenter) {
        copy!(v, exit, GUEST_SYSENTER_CS, GUEST_SYSENTER_ESP, GUEST_SYSENTER_EIP);
    }
    if groups.has(Group::ControlRegisters) {
        // By the masks with which L2 ran. So whoever changes one has this group fetched first ([`Machine::needs`]); the masks
        // are no fields that the hardware serves L1.
        save_control_registers(v, exit, known);
    }
}

/// A control register of L2: what L2 owns as the hardware has it, what L1 owns as L1 left it, what only L0
/// owns as L2 sees it.
fn register(
    v: &Vmcs12,
    exit: &impl Exit,
    owned: u64,
    register: Field<Natural, ReadWrite>,
    mask: Field<Natural, ReadWrite>,
    shadow: Field<Natural, ReadWrite>,
) -> u64 {
    // L1's bits L2 cannot have changed. L0's own are in the hardware's register as L0 wants them, in the shadow as L2
    // believes them to be.
    let of_l1 = v.get(mask);
    let of_l0 = owned & !of_l1;
    let of_l2 = !(of_l1 | of_l0);
    let mut value = v.get(register) & of_l1;
    // A VMREAD that is spared where L2 owns nothing.
    if of_l2 != 0 {
        value |= exit.get_rarely(register) & of_l2;
    }
    value | exit.get_rarely(shadow) & of_l0
}

fn save_control_registers(v: &mut Vmcs12, exit: &impl Exit, known: &Known) {
    let cr0 =
        register(v, exit, known.cr0_mask, field::GUEST_CR0, field::CR0_MASK, field::CR0_SHADOW);
    let cr4 =
        register(v, exit, known.cr4_mask, field::GUEST_CR4, field::CR4_MASK, field::CR4_SHADOW);
    v.set(field::GUEST_CR0, cr0);
    v.set(field::GUEST_CR4, cr4);
    v.set(field::GUEST_CR3, exit.get_rarely(field::GUEST_CR3));
    // By what was just saved: L2 may have changed its paging without an exit that L1 sees. And not by whether L1 has EPT, without
    // which the fields are undefined after an exit (SDM vol. 3C §28.3.4): L1 may have switched it off since, and reads them now.
    let paging = cr0 & Cr0::PG.bits() != 0 && cr4 & x86::Cr4::PAE.bits() != 0;
    if paging && known.efer & Efer::LMA.bits() == 0 {
        copy!(v, exit, GUEST_PDPTE0, GUEST_PDPTE1, GUEST_PDPTE2, GUEST_PDPTE3);
    }
}

/// An entry that failed after L1's VMCS was found good: only the reason and the qualification are told
/// (SDM vol. 3C §27.8).
pub fn entry_failed(v: &mut Vmcs12, failure: EntryFailure) {
    // Neither L2's state nor the valid bit of the injection changes: L1 may mend a field and enter again.
    v.set(field::EXIT_REASON, u32::from(failure.reason.0) | ENTRY_FAILURE);
    v.set(field::EXIT_QUALIFICATION, failure.qualification);
}

#[cfg(test)]
#[path = "leave_tests.rs"]
mod tests;
