//! Events that are pending while L2 runs: does L2 get them, does L1 see an exit, or do they wait
//! (SDM vol. 3A §6.9 for the order, vol. 3C §26.2, §27.7).

use x86::vmcs::field;
use x86::vmcs::{ExitReason, PinControls, ProcControls, event, interruptibility};

use crate::Vmcs12;
use crate::checks::guest::activity_state;
use crate::leave::Report;

/// An event that waits, in the order in which they are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// INIT.
    Init,
    /// Startup IPI with its vector.
    Sipi(u8),
    /// An instruction of L2 has retired under the monitor trap flag.
    MonitorTrap,
    /// L1's preemption timer has run down.
    PreemptionTimer,
    /// SMI.
    Smi,
    /// NMI.
    Nmi,
    /// L2 can take an NMI, and L1 waits for that.
    NmiWindow,
    /// External interrupt.
    Interrupt,
    /// L2 can take an interrupt, and L1 waits for that.
    InterruptWindow,
}

/// What becomes of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// L0 gives it to L2 (an SMI: to the vCPU, which leaves L2 for SMM).
    Deliver,
    /// L1 sees an exit. An interrupt or an NMI stays pending unless the report has it in its interruption
    /// information.
    ExitToL1,
    /// It waits until L2 can take it: the window has to be opened.
    Window,
    /// It waits for an entry that has not run L2 yet, or for an event that was not delivered yet: the next
    /// exit looks again.
    Hold,
    /// It is lost, as the architecture says.
    Drop,
}

/// L2's state as far as events ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// VMLAUNCH or VMRESUME was executed and L2 has not run since.
    pub entry_pending: bool,
    /// An event whose delivery was interrupted has to be injected again.
    pub injecting: bool,
    /// RFLAGS.IF is clear, or an interrupt shadow holds interrupts off.
    pub interrupts_blocked: bool,
    /// NMIs are blocked, or a shadow of MOV SS holds them off.
    pub nmis_blocked: bool,
    /// The vCPU is in SMM.
    pub smm: bool,
}

/// What an entry leaves L2 in, if not running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleeps {
    /// HLT was executed.
    Halt,
    /// It waits for a startup IPI.
    WaitForSipi,
}

/// A pending debug exception that is one: of a step, or of a breakpoint that is enabled (SDM vol. 3C table 25-4).
const STEP: u64 = 1 << 14;
const BREAKPOINT: u64 = 1 << 12;

/// What the entry of an L2 that is not active leaves it in. An event that the entry injects wakes it, as does a debug
/// exception that is pending, and a window of L1's that is open (SDM vol. 3C §27.7.2, §27.7.3, §27.7.5, §27.7.6).
pub fn sleeps(v: &Vmcs12) -> Option<Sleeps> {
    match v.get(field::GUEST_ACTIVITY) {
        // Neither an event nor a window reaches a processor that waits for a startup IPI.
        activity_state::WAIT_FOR_SIPI => return Some(Sleeps::WaitForSipi),
        activity_state::HLT => {}
        _ => return None,
    }
    let first = v.primary();
    let open = v.get(field::GUEST_RFLAGS) & x86::Rflags::IF.bits() != 0;
    let nmis_open = v.get(field::GUEST_INTERRUPTIBILITY) & interruptibility::NMI == 0;
    // A pending debug exception is delivered right behind the entry; the exit for an open window comes there as well.
    let wakes = v.get(field::ENTRY_INTERRUPTION) & event::VALID != 0
        // What is noted of breakpoints is no exception by itself (§27.7.3).
        || v.get(field::GUEST_PENDING_DEBUG) & (STEP | BREAKPOINT) != 0
        || first.contains(ProcControls::INTERRUPT_WINDOW) && open
        || first.contains(ProcControls::NMI_WINDOW) && nmis_open;
    if wakes { None } else { Some(Sleeps::Halt) }
}

/// What becomes of one event.
pub fn gate(v: &Vmcs12, event: Event, state: &State) -> Gate {
    // Between VMLAUNCH and L2's first instruction nothing ends its run: what the entry injects comes first.
    let exit_unless_held = |asked: bool, otherwise: Gate| match (asked, state.entry_pending) {
        (true, true) => Gate::Hold,
        (true, false) => Gate::ExitToL1,
        (false, _) => otherwise,
    };
    let waits_for_sipi = v.get(field::GUEST_ACTIVITY) == activity_state::WAIT_FOR_SIPI;
    match event {
        // It waits for the startup IPI behind an earlier INIT: another changes nothing.
        Event::Init if waits_for_sipi => Gate::Drop,
        // No control keeps an INIT for the guest (§26.2). It goes before all that an entry finds pending, a debug exception
        // among it, and behind what the entry injects alone.
        Event::Init if v.get(field::ENTRY_INTERRUPTION) & event::VALID == 0 => Gate::ExitToL1,
        Event::Init => exit_unless_held(true, Gate::Drop),
        // A startup IPI that nobody waits for is lost.
        Event::Sipi(_) => exit_unless_held(waits_for_sipi, Gate::Drop),
        // Nothing else wakes a processor that waits for a SIPI.
        _ if waits_for_sipi => Gate::Hold,
        // The event whose delivery was interrupted comes before a trap behind it.
        Event::MonitorTrap | Event::PreemptionTimer if state.injecting => Gate::Hold,
        Event::MonitorTrap | Event::PreemptionTimer => exit_unless_held(true, Gate::Drop),
        // SMIs do not nest, and neither an entry nor a delivery is cut in two by SMM.
        Event::Smi if state.smm => Gate::Hold,
        Event::Smi if state.entry_pending || state.injecting => Gate::Hold,
        // Without the dual-monitor treatment L1 sees nothing of an SMI.
        Event::Smi => Gate::Deliver,
        Event::Nmi => {
            let exits = v.pin().contains(PinControls::NMI);
            asynchronous(exits, state.nmis_blocked, state)
        }
        Event::NmiWindow => {
            let waits = v.primary().contains(ProcControls::NMI_WINDOW);
            window(waits, state.nmis_blocked, state)
        }
        Event::Interrupt => {
            let exits = v.pin().contains(PinControls::EXTERNAL_INTERRUPT);
            asynchronous(exits, state.interrupts_blocked, state)
        }
        Event::InterruptWindow => {
            let waits = v.primary().contains(ProcControls::INTERRUPT_WINDOW);
            window(waits, state.interrupts_blocked, state)
        }
    }
}

/// An interrupt or an NMI. One that exits does so whether or not L2 could take it.
fn asynchronous(exits: bool, blocked: bool, state: &State) -> Gate {
    match (state.entry_pending || state.injecting, exits, blocked) {
        (true, true, _) => Gate::Hold,
        // Whatever IF says: with the exit it masks nothing (§26.2).
        (false, true, _) => Gate::ExitToL1,
        // An entry has room for one event, and may carry another.
        (true, false, _) | (false, false, true) => Gate::Window,
        (false, false, false) => Gate::Deliver,
    }
}

fn window(waits: bool, blocked: bool, state: &State) -> Gate {
    match (waits, blocked || state.entry_pending || state.injecting) {
        // A window that cannot be yet stays open. It has nothing of its own that could be lost.
        (false, _) => Gate::Drop,
        (true, true) => Gate::Hold,
        (true, false) => Gate::ExitToL1,
    }
}

/// Vector of NMIs.
const NMI: u32 = 2;

/// The exit that L1 sees for an event. `interrupt` is the vector of an external interrupt that L1 has asked to
/// be acknowledged ([`acknowledges`]).
pub fn report(event: Event, interrupt: Option<u8>) -> Report {
    match event {
        Event::Init => Report::plain(ExitReason::Init, 0),
        Event::Sipi(vector) => Report::plain(ExitReason::Sipi, u64::from(vector)),
        Event::MonitorTrap => Report::plain(ExitReason::MonitorTrap, 0),
        Event::PreemptionTimer => Report::plain(ExitReason::PreemptionTimer, 0),
        Event::Smi => Report::plain(ExitReason::OtherSmi, 0),
        Event::Nmi => Report::event(NMI | event::NMI, 0, 0),
        Event::NmiWindow => Report::plain(ExitReason::NmiWindow, 0),
        Event::InterruptWindow => Report::plain(ExitReason::InterruptWindow, 0),
        Event::Interrupt => {
            let mut report = Report::plain(ExitReason::ExternalInterrupt, 0);
            // Without the acknowledgement the information is not valid, and the interrupt stays in the local APIC (§28.2.2).
            if let Some(vector) = interrupt {
                report.interruption = event::VALID | event::INTR | u32::from(vector);
            }
            report
        }
    }
}

/// Whether an exit for an external interrupt takes it from the local APIC.
pub fn acknowledges(v: &Vmcs12) -> bool {
    v.exit().contains(x86::vmcs::ExitControls::ACKNOWLEDGE_INTERRUPT)
}

/// Whether an external interrupt is the notification of posted interrupts for L2, which L0 delivers to L2
/// itself.
pub fn is_notification(v: &Vmcs12, vector: u8) -> bool {
    v.pin().contains(PinControls::POSTED_INTERRUPTS)
        && v.get(field::POSTED_INTR_VECTOR) == u16::from(vector)
}

/// An event that L0 has to inject into L2: its delivery was interrupted by an exit that L0 has handled, or L0
/// has raised it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Interruption information, valid.
    pub information: u32,
    /// Error code, if the information says so.
    pub error_code: u32,
    /// Length of the instruction, for an event that an instruction raises.
    pub length: u32,
}

/// The injection that an exit has interrupted: what the next entry of L2 injects, if L1 does not see the exit.
pub fn interrupted(exit: &impl crate::leave::Exit) -> Option<Injection> {
    let information = exit.get(field::IDT_VECTORING);
    // Valid only where the exit came within a delivery (§28.2.4).
    if information & event::VALID == 0 {
        return None;
    }
    let error_code = if information & event::ERROR_VALID != 0 {
        exit.get(field::IDT_VECTORING_ERROR)
    } else {
        0
    };
    // Bit 12 is undefined here and reserved in what is injected.
    let information = information & !event::NMI_UNBLOCKED;
    Some(Injection { information, error_code, length: exit.get(field::INSTRUCTION_LENGTH) })
}

/// An exit to L1 comes before an injection could be done: L1 is told of it as of a delivery that the exit has
/// interrupted (SDM vol. 3C §28.2.4).
pub fn tell_interrupted(report: &mut Report, injection: Injection) {
    report.vectoring = injection.information;
    report.vectoring_error = injection.error_code;
    let kind = injection.information & event::TYPE;
    // Of other events the field is of no instruction of theirs.
    if matches!(kind, event::SOFT | event::PRIVILEGED_SOFT_EXCEPTION | event::SOFT_EXCEPTION) {
        report.length = injection.length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{good, set};

    const FREE: State = State {
        entry_pending: false,
        injecting: false,
        interrupts_blocked: false,
        nmis_blocked: false,
        smm: false,
    };

    #[test]
    fn interrupts_exit_or_wait_for_l2() {
        let asks = good();
        let mut asks_not = good();
        set!(asks_not, PIN_CONTROLS = 0x16);
        let blocked = State { interrupts_blocked: true, nmis_blocked: true, ..FREE };
        let pending = State { entry_pending: true, ..FREE };
        let injecting = State { injecting: true, ..FREE };
        for event in [Event::Interrupt, Event::Nmi] {
            assert_eq!(gate(&asks, event, &FREE), Gate::ExitToL1);
            assert_eq!(gate(&asks, event, &blocked), Gate::ExitToL1);
            assert_eq!(gate(&asks, event, &pending), Gate::Hold);
            assert_eq!(gate(&asks, event, &injecting), Gate::Hold);
            assert_eq!(gate(&asks_not, event, &FREE), Gate::Deliver);
            assert_eq!(gate(&asks_not, event, &blocked), Gate::Window);
            assert_eq!(gate(&asks_not, event, &pending), Gate::Window);
        }
    }

    #[test]
    fn init_and_sipi_look_at_the_activity() {
        let mut v = good();
        assert_eq!(gate(&v, Event::Init, &FREE), Gate::ExitToL1);
        let pending = State { entry_pending: true, ..FREE };
        assert_eq!(gate(&v, Event::Init, &pending), Gate::ExitToL1, "before all but an injection");
        let mut injects = v.clone();
        set!(injects, ENTRY_INTERRUPTION = 0x8000_0202);
        assert_eq!(gate(&injects, Event::Init, &pending), Gate::Hold);
        assert_eq!(gate(&injects, Event::Init, &FREE), Gate::ExitToL1);
        assert_eq!(gate(&v, Event::Sipi(8), &FREE), Gate::Drop);
        set!(v, GUEST_ACTIVITY = 3);
        assert_eq!(gate(&v, Event::Init, &FREE), Gate::Drop);
        assert_eq!(gate(&v, Event::Sipi(8), &FREE), Gate::ExitToL1);
        assert_eq!(gate(&v, Event::Nmi, &FREE), Gate::Hold);
        assert_eq!(report(Event::Sipi(8), None).qualification, 8);
    }

    #[test]
    fn an_entry_into_hlt_sleeps_unless_something_wakes_it() {
        let mut v = good();
        assert_eq!(sleeps(&v), None);
        set!(v, GUEST_ACTIVITY = 3);
        assert_eq!(sleeps(&v), Some(Sleeps::WaitForSipi));
        let mut v = good();
        set!(v, GUEST_ACTIVITY = 1, GUEST_RFLAGS = 0x202);
        assert_eq!(sleeps(&v), Some(Sleeps::Halt));
        let halted = v.clone();
        set!(v, ENTRY_INTERRUPTION = 0x8000_0202);
        assert_eq!(sleeps(&v), None);
        let mut v = halted.clone();
        for (pending, wakes) in [(1 << 14, true), (0x1001, true), (0xf, false)] {
            set!(v, GUEST_PENDING_DEBUG = pending);
            assert_eq!(sleeps(&v).is_none(), wakes);
        }
        let mut v = halted.clone();
        set!(v, PROC_CONTROLS = 1 << 2);
        assert_eq!(sleeps(&v), None);
        set!(v, GUEST_RFLAGS = 2);
        assert_eq!(sleeps(&v), Some(Sleeps::Halt));
        set!(v, PROC_CONTROLS = 1 << 22);
        assert_eq!(sleeps(&v), None);
        set!(v, GUEST_INTERRUPTIBILITY = 8);
        assert_eq!(sleeps(&v), Some(Sleeps::Halt));
    }

    #[test]
    fn windows_are_l1s_only_if_it_waits() {
        let mut v = good();
        assert_eq!(gate(&v, Event::InterruptWindow, &FREE), Gate::Drop);
        set!(v, PROC_CONTROLS = 1 << 2 | 1 << 22);
        for event in [Event::InterruptWindow, Event::NmiWindow] {
            assert_eq!(gate(&v, event, &FREE), Gate::ExitToL1);
            let blocked = State { interrupts_blocked: true, nmis_blocked: true, ..FREE };
            assert_eq!(gate(&v, event, &blocked), Gate::Hold);
        }
    }

    #[test]
    fn smi_goes_to_the_vcpu() {
        let v = good();
        assert_eq!(gate(&v, Event::Smi, &FREE), Gate::Deliver);
        assert_eq!(gate(&v, Event::Smi, &State { smm: true, ..FREE }), Gate::Hold);
        assert_eq!(gate(&v, Event::Smi, &State { entry_pending: true, ..FREE }), Gate::Hold);
    }

    #[test]
    fn an_interrupt_is_told_only_if_it_was_acknowledged() {
        assert_eq!(report(Event::Interrupt, None).interruption, 0);
        assert_eq!(report(Event::Interrupt, Some(0x31)).interruption, 0x8000_0031);
        assert_eq!(report(Event::Nmi, None).interruption, 0x8000_0202);
    }

    #[test]
    fn an_undone_injection_is_told_as_an_interrupted_delivery() {
        let mut told = Report::plain(ExitReason::EptViolation, 0);
        let software = Injection { information: 0x8000_0480, error_code: 0, length: 2 };
        tell_interrupted(&mut told, software);
        assert_eq!((told.vectoring, told.length), (0x8000_0480, 2));
        let fault = Injection { information: 0x8000_0b0e, error_code: 6, length: 0 };
        tell_interrupted(&mut told, fault);
        assert_eq!((told.vectoring, told.vectoring_error, told.length), (0x8000_0b0e, 6, 2));
    }
}
