//! Whose exit of L2 this is: L0's to handle, or L1's to see (SDM vol. 3C §26.1 to §26.3, §26.5).
//!
//! L1 sees what its controls ask for. L0 comes first where it needs the exit for itself: host interrupts, NMIs
//! of the host, EPT violations (the walk of L1's tables decides then), what a debugger of the VMM asked for.

use x86::vmcs::field;
use x86::vmcs::{
    ExitReason, Field, Natural, PinControls, ProcControls, ProcControls2, ReadWrite, cr, event, io,
};
use x86::{Cr0, Direction, Efer};

use crate::checks::segments::LONG;
use crate::leave::Exit;
use crate::merge::bitmaps;
use crate::priority::{self, Access};
use crate::{GuestMemory, Vmcs12};

/// Who handles an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// L0.
    L0,
    /// L1, as an exit.
    L1,
    /// L0, on L1's virtual-APIC page.
    Priority(Access),
    /// L0, which switches L1's tables or tells L1 of it ([`crate::Machine::vmfunc`]).
    Function,
}

impl Claim {
    fn by_l1(wants: bool) -> Self {
        if wants { Self::L1 } else { Self::L0 }
    }
}

/// What L0 wants for itself of exceptions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// It runs L2 on shadow tables: each page fault is looked at first.
    pub page_faults: bool,
    /// Exceptions that a debugger of the VMM asked for.
    pub debug: u32,
}

/// General registers of L2, in encoding order.
pub type Gprs = [u64; 16];

const RCX: usize = 1;

/// Who handles the exit.
pub fn claim(
    v: &Vmcs12,
    exit: &impl Exit,
    gprs: &Gprs,
    wants: &Wants,
    memory: &impl GuestMemory,
) -> Claim {
    let first = v.primary();
    let second = v.secondary();
    let msr = |direction| {
        // L1's bitmap first: what it wants to see is no access to its page.
        if bitmaps::msr_exits(v, gprs[RCX] as u32, direction, memory) {
            return Claim::L1;
        }
        priority::msr_access(v, direction, gprs).map_or(Claim::L0, Claim::Priority)
    };
    // The hardware's reason. vmcs02 has L0's exits, too, so that each is looked at.
    match ExitReason::of(exit.get(field::EXIT_REASON)) {
        ExitReason::ExceptionOrNmi => exception(v, exit, wants),
        ExitReason::Rdmsr => msr(Direction::Read),
        ExitReason::Wrmsr => msr(Direction::Write),
        ExitReason::Io => port(v, exit.get(field::EXIT_QUALIFICATION), memory),
        ExitReason::CrAccess => control_register(v, exit, gprs),
        ExitReason::Vmread => access(v, exit, gprs, Direction::Read, memory),
        ExitReason::Vmwrite => access(v, exit, gprs, Direction::Write, memory),
        ExitReason::MonitorTrap => monitor_trap(v),
        ExitReason::Vmfunc => Claim::Function,
        // Either PAUSE control of L1's; L0's own loop detection is L0's.
        ExitReason::Pause => Claim::by_l1(
            first.contains(ProcControls::PAUSE) || second.contains(ProcControls2::PAUSE_LOOP),
        ),
        // INVPCID exits by the bit of INVLPG, once it is enabled (§26.1.3).
        ExitReason::Invpcid => Claim::by_l1(
            second.contains(ProcControls2::INVPCID) && first.contains(ProcControls::INVLPG),
        ),
        ExitReason::Xsaves | ExitReason::Xrstors => states(v, gprs),
        // They exit with RDTSC (§26.1.3).
        ExitReason::Umwait | ExitReason::Tpause => Claim::by_l1(
            second.contains(ProcControls2::USER_WAIT) && first.contains(ProcControls::RDTSC),
        ),
        reason => match (primary_control(reason), secondary_control(reason)) {
            // L1 hears of an instruction that L0 intercepts only if it asked for it; else L0 answers in the guest's stead.
            (Some(bit), _) => Claim::by_l1(first.contains(bit)),
            (None, Some(bit)) => Claim::by_l1(second.contains(bit)),
            // CPUID and its like, the instructions of VMX, what only L1 can have asked for, and what nobody
            // knows: the hardware knows what L1 has set.
            (None, None) => Claim::by_l1(!is_l0s(reason)),
        },
    }
}

/// The primary control that lets an exit happen.
fn primary_control(reason: ExitReason) -> Option<ProcControls> {
    Some(match reason {
        ExitReason::Hlt => ProcControls::HLT,
        ExitReason::InterruptWindow => ProcControls::INTERRUPT_WINDOW,
        ExitReason::NmiWindow => ProcControls::NMI_WINDOW,
        ExitReason::DrAccess => ProcControls::MOV_DR,
        ExitReason::Invlpg => ProcControls::INVLPG,
        ExitReason::Rdpmc => ProcControls::RDPMC,
        // One control for both.
        ExitReason::Rdtsc | ExitReason::Rdtscp => ProcControls::RDTSC,
        ExitReason::Mwait => ProcControls::MWAIT,
        ExitReason::Monitor => ProcControls::MONITOR,
        // Without L1's shadow nothing has a threshold.
        ExitReason::TprBelowThreshold => ProcControls::TPR_SHADOW,
        _ => return None,
    })
}

/// The secondary control that lets an exit happen.
fn secondary_control(reason: ExitReason) -> Option<ProcControls2> {
    Some(match reason {
        // One control, two reasons.
        ExitReason::GdtrIdtr | ExitReason::LdtrTr => ProcControls2::DESCRIPTOR_TABLES,
        ExitReason::Wbinvd => ProcControls2::WBINVD,
        ExitReason::Rdrand => ProcControls2::RDRAND,
        ExitReason::Rdseed => ProcControls2::RDSEED,
        _ => return None,
    })
}

/// Whether L0 handles an exit whatever L1 asks for.
fn is_l0s(reason: ExitReason) -> bool {
    match reason {
        // The host's own interrupts, and events of L1's that L0 keeps and tells L1 of when they are due.
        ExitReason::ExternalInterrupt
        | ExitReason::Init
        | ExitReason::Sipi
        | ExitReason::IoSmi
        | ExitReason::OtherSmi
        | ExitReason::MachineCheck
        | ExitReason::PreemptionTimer => true,
        // The walk of L1's tables says whether it is an exit of L1's.
        ExitReason::EptViolation | ExitReason::EptMisconfiguration | ExitReason::PmlFull => true,
        // Not offered to L1.
        ExitReason::Encls | ExitReason::BusLock | ExitReason::Notify | ExitReason::Rsm => true,
        // All else has no control of L0's: L1 has asked for it, or every CPU exits.
        _ => false,
    }
}

/// #MC.
const MACHINE_CHECK: u32 = 18;

fn exception(v: &Vmcs12, exit: &impl Exit, wants: &Wants) -> Claim {
    let information = exit.get(field::EXIT_INTERRUPTION);
    // The host's NMI. One for L1 comes by the gate of events.
    if information & event::TYPE == event::NMI {
        return Claim::L0;
    }
    // Interruption information can name no exception above 31.
    let vector = information & event::VECTOR & 31;
    // Page faults have a filter of their own, beside the bitmap.
    if vector == 14 {
        // Shadow tables: whether the fault is L2's at all the guest's tables tell.
        if wants.page_faults {
            return Claim::L0;
        }
        return Claim::by_l1(page_fault_exits(v, exit.get(field::EXIT_ERROR_CODE)));
    }
    // A machine check is the host's.
    // A debugger of the VMM's comes first; what is not its L1 hears of later.
    if vector == MACHINE_CHECK || wants.debug & 1 << vector != 0 {
        return Claim::L0;
    }
    Claim::by_l1(v.get(field::EXCEPTION_BITMAP) & 1 << vector != 0)
}

/// Whether L1 wants a page fault with this error code (SDM vol. 3C §26.2).
pub fn page_fault_exits(v: &Vmcs12, error_code: u32) -> bool {
    let mask = v.get(field::PAGE_FAULT_MASK);
    // Equal means: the bitmap's bit decides as it is; else it is turned round (§26.2).
    let differs = error_code & mask != v.get(field::PAGE_FAULT_MATCH);
    (v.get(field::EXCEPTION_BITMAP) & 1 << 14 != 0) != differs
}

/// Whether L1 wants an exception that L0 is about to give to L2.
pub fn exception_exits(v: &Vmcs12, vector: u8, error_code: u32) -> bool {
    match vector {
        14 => page_fault_exits(v, error_code),
        // The same rules as for the hardware's own: L1 sees no difference.
        0..=31 => v.get(field::EXCEPTION_BITMAP) & 1 << vector != 0,
        _ => false,
    }
}

fn port(v: &Vmcs12, qualification: u64, memory: &impl GuestMemory) -> Claim {
    let port = (qualification >> io::PORT_SHIFT) as u16;
    // Bits 2:0 are the size less one.
    let bytes = (qualification & io::SIZE) as u8 + 1;
    Claim::by_l1(bitmaps::port_exits(v, port, bytes, memory))
}

/// A register by its number, of which four bits count.
fn register(gprs: &Gprs, number: u8) -> u64 {
    // Four bits: no index is out of reach.
    let at = usize::from(number);
    gprs[at & 15]
}

/// The register that a MOV to or from a control register names.
fn operand(qualification: u64, gprs: &Gprs) -> u64 {
    register(gprs, (qualification >> cr::GPR_SHIFT) as u8)
}

type Register = Field<Natural, ReadWrite>;

/// Whether L2 executed 64-bit code.
#[cold]
#[inline(never)]
fn is_64bit_code(exit: &impl Exit) -> bool {
    exit.get(field::GUEST_EFER) & Efer::LMA.bits() != 0
        && exit.get(field::GUEST_CS_RIGHTS) & LONG != 0
}

fn control_register(v: &Vmcs12, exit: &impl Exit, gprs: &Gprs) -> Claim {
    let qualification = exit.get(field::EXIT_QUALIFICATION);
    let primary = |bits| Claim::by_l1(v.primary().contains(bits));
    let changes = |value: u64, mask: Register, shadow: Register| {
        // Only a change of a bit that L1 owns, from what L2 believes it to be (§26.3).
        Claim::by_l1(v.get(mask) & (value ^ v.get(shadow)) != 0)
    };
    let operand = || {
        let value = operand(qualification, gprs);
        // Outside 64-bit code it is the register's lower half. The mode is asked only where it matters.
        if value >> 32 == 0 || is_64bit_code(exit) { value } else { value & 0xffff_ffff }
    };
    // Before the controls of CR8: with a shadow the page is L0's to keep for L1.
    if let Some(access) = priority::access(v, qualification, gprs) {
        return Claim::Priority(access);
    }
    let number = qualification & cr::NUMBER;
    match (qualification & cr::ACCESS, number) {
        (cr::MOV_TO, 0) => changes(operand(), field::CR0_MASK, field::CR0_SHADOW),
        // With EPT of L1's CR3 is L2's own; CR3 targets are not offered.
        (cr::MOV_TO, 3) => primary(ProcControls::CR3_LOAD),
        (cr::MOV_TO, 4) => changes(operand(), field::CR4_MASK, field::CR4_SHADOW),
        (cr::MOV_TO, 8) => primary(ProcControls::CR8_LOAD),
        (cr::MOV_FROM, 3) => primary(ProcControls::CR3_STORE),
        (cr::MOV_FROM, 8) => primary(ProcControls::CR8_STORE),
        (cr::CLTS, _) => {
            // Where L2 reads TS as 0 already CLTS changes nothing, and L1 is not asked.
            let both = v.get(field::CR0_MASK) & v.get(field::CR0_SHADOW);
            Claim::by_l1(both & Cr0::TS.bits() != 0)
        }
        (cr::LMSW, _) => machine_status(v, qualification >> LMSW_SOURCE),
        // Moves that no control of L1's asks for: L0 has its own reasons.
        _ => Claim::L0,
    }
}

/// Shift of LMSW's operand in an exit qualification.
const LMSW_SOURCE: u32 = 16;

/// LMSW changes MP, EM and TS, and can set PE but not clear it.
fn machine_status(v: &Vmcs12, source: u64) -> Claim {
    let mask = v.get(field::CR0_MASK);
    let shadow = v.get(field::CR0_SHADOW);
    // Bits 3:1 change either way, PE only up (SDM vol. 2, LMSW).
    let low = (Cr0::MP | Cr0::EM | Cr0::TS).bits();
    let sets = mask & source & !shadow & Cr0::PE.bits();
    Claim::by_l1(mask & low & (source ^ shadow) | sets != 0)
}

fn access(
    v: &Vmcs12,
    exit: &impl Exit,
    gprs: &Gprs,
    direction: Direction,
    memory: &impl GuestMemory,
) -> Claim {
    if !v.secondary().contains(ProcControls2::SHADOW_VMCS) {
        // Without a shadow VMCS every VMREAD and VMWRITE of L2 is L1's to see.
        return Claim::L1;
    }
    let information = crate::operand::Information(exit.get(field::INSTRUCTION_INFO));
    let mut encoding = register(gprs, information.register2());
    // Outside long mode the upper half of a register does not count.
    // Code of 32 bits in IA-32e mode cannot have executed it.
    if exit.get(field::GUEST_EFER) & Efer::LMA.bits() == 0 {
        encoding &= 0xffff_ffff;
    }
    Claim::by_l1(bitmaps::field_exits(v, encoding, direction, memory))
}

/// The trap that L1 asked for, by the control or by the event that it injected.
fn monitor_trap(v: &Vmcs12) -> Claim {
    let injected =
        // The whole word is compared: an event of type 7 is that and no more.
        v.get(field::ENTRY_INTERRUPTION) == event::VALID | crate::checks::controls::OTHER;
    Claim::by_l1(v.primary().contains(ProcControls::MONITOR_TRAP) || injected)
}

/// XSAVES and XRSTORS exit for a component in L1's bitmap (SDM vol. 3C §26.1.3). Which of the components
/// IA32_XSS has, the hardware has looked at.
fn states(v: &Vmcs12, gprs: &Gprs) -> Claim {
    let asked = gprs[0] & 0xffff_ffff | gprs[2] << 32;
    let exits =
        // L0's own bitmap is empty: the exit came by L1's, or by none.
        v.secondary().contains(ProcControls2::XSAVES) && v.get(field::XSS_EXIT_BITMAP) & asked != 0;
    Claim::by_l1(exits)
}

/// Whether L1 sees the host's interrupts for L1 as exits of L2.
pub fn interrupts_exit(v: &Vmcs12) -> bool {
    // Without the control an interrupt goes through L2's own IDT.
    v.pin().contains(PinControls::EXTERNAL_INTERRUPT)
}

#[cfg(test)]
#[path = "reflect_tests.rs"]
mod tests;
