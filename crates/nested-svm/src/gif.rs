//! The global interrupt flag, and where an event goes.
//!
//! An event that L0 has for its guest goes one of three ways: it is delivered at the level that runs; it ends L2's
//! run, because L1 intercepts it; or it is held. While an entry into L2 that L1 asked for has not taken place yet,
//! nothing may end L2's run: VMRUN is one instruction, and its injected event comes first.

use x86::{
    Exception, Rflags,
    vmcb::{Control, ExitCode, vintr},
};

use crate::{
    Level,
    reflect::{Exit, intercepts},
};

/// The global interrupt flag of L1. Set at reset (APM vol. 2 §15.17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gif(bool);

impl Default for Gif {
    fn default() -> Self {
        // GIF is set by reset: a guest that is no hypervisor never sees it clear.
        Self(true)
    }
}

impl Gif {
    /// The flag with this value.
    pub const fn new(set: bool) -> Self {
        Self(set)
    }

    /// Whether it is set.
    #[inline]
    pub const fn is_set(self) -> bool {
        self.0
    }

    /// Sets the flag: STGI, VMRUN.
    #[inline]
    pub const fn set(&mut self) {
        self.0 = true;
    }

    /// Clears the flag: CLGI, VMEXIT.
    #[inline]
    pub const fn clear(&mut self) {
        self.0 = false;
    }
}

/// An event that waits for the guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pending {
    /// An interrupt of L1's local APIC or PIC.
    Interrupt,
    /// An NMI.
    Nmi,
    /// An SMI.
    Smi,
    /// An INIT.
    Init,
    /// An exception that the instruction of the moment makes.
    Exception(Exception),
}

/// Where an event goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// To the level that runs, by that level's own rules.
    Deliver,
    /// L2's run ends with this exit; the event stays L1's to take.
    ExitToL1(Exit),
    /// Nowhere yet: GIF is clear, or the flag of L1 that masks interrupts.
    Hold,
    /// Nowhere yet: L2 keeps interrupts off, and may let them in without an exit.
    Window,
    /// Nowhere yet: L2 is to be entered first, and left again at once.
    AfterEntry,
}

/// What decides where an event goes.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// Which level runs.
    pub level: Level,
    /// L1's GIF.
    pub gif: Gif,
    /// VMRUN was carried out, and L2 has not been entered yet.
    pub entry_pending: bool,
    /// The copy of VMCB12's controls; what it holds means nothing while L1 runs.
    pub control: &'a Control,
    /// RFLAGS of the level that runs.
    pub rflags: Rflags,
    /// RFLAGS of L1 at VMRUN, or now.
    pub l1_rflags: Rflags,
}

impl Situation<'_> {
    /// Where `event` goes.
    pub fn gate(&self, event: &Pending) -> Gate {
        match event {
            // It belongs to the instruction, whatever GIF says.
            Pending::Exception(e) => self.exception(e),
            // GIF holds back everything that comes between instructions (APM vol. 2 §15.17).
            _ if !self.gif.is_set() => Gate::Hold,
            Pending::Interrupt => self.interrupt(),
            // VMRUN is one instruction: an SMI does not come between it and what it injects.
            Pending::Nmi => self.intercepted(ExitCode::Nmi),
            // System-management mode begins between two instructions of L2's.
            Pending::Smi if self.level == Level::L2 && self.entry_pending => Gate::AfterEntry,
            Pending::Smi => self.intercepted(ExitCode::Smi),
            // An INIT that is not intercepted resets L1, L2 and all: whoever delivers it ends L2's run.
            Pending::Init => self.intercepted(ExitCode::Init),
        }
    }

    fn exception(&self, e: &Exception) -> Gate {
        // An exception does not wait: no flag of L1's holds it back, not even an entry that is pending.
        let exit = Exit::of_exception(e);
        if self.level == Level::L2 && intercepts(self.control, exit.code) {
            Gate::ExitToL1(exit)
        } else {
            Gate::Deliver
        }
    }

    /// With V_INTR_MASKING the flag of L1 at VMRUN says whether its machine takes interrupts (APM vol. 2 §15.21.1).
    fn interrupt(&self) -> Gate {
        // Whether L1 itself can take it is asked by its own flag, where interrupts are offered.
        if self.level == Level::L1 {
            return Gate::Deliver;
        }
        let masked = self.control.int_ctl & vintr::INTR_MASKING != 0;
        let (flags, closed) =
            // Else L2's own flag masks physical interrupts, as it does without a hypervisor.
            if masked { (self.l1_rflags, Gate::Hold) } else { (self.rflags, Gate::Window) };
        // Hold: L1 cannot take it as long as L2 runs, whatever L2 does. Window: L2 may let it in without an exit.
        if flags.contains(Rflags::IF) { self.intercepted(ExitCode::Intr) } else { closed }
    }

    fn intercepted(&self, code: ExitCode) -> Gate {
        // Not intercepted, it is L2's: NMIs and SMIs then come as they come to a guest without a hypervisor.
        if self.level == Level::L1 || !intercepts(self.control, code) {
            Gate::Deliver
        } else if self.entry_pending {
            // What VMRUN injects is delivered first; the exit comes before L2's first instruction all the same.
            Gate::AfterEntry
        } else {
            Gate::ExitToL1(Exit::plain(code))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::{
        Vector,
        vmcb::{Intercept3, Vmcb},
    };
    use zerocopy::FromZeros;

    fn control(third: Intercept3, masking: bool) -> Control {
        let mut control = Vmcb::new_zeroed().control;
        control.intercepts[3] = third.bits();
        control.int_ctl = if masking { vintr::INTR_MASKING } else { 0 };
        control
    }

    fn in_l2(control: &Control) -> Situation<'_> {
        Situation {
            level: Level::L2,
            gif: Gif::default(),
            entry_pending: false,
            control,
            rflags: Rflags::FIXED,
            l1_rflags: Rflags::FIXED | Rflags::IF,
        }
    }

    #[test]
    fn nothing_but_exceptions_passes_a_clear_gif() {
        let c = control(Intercept3::all(), true);
        let held = Situation { gif: Gif::new(false), level: Level::L1, ..in_l2(&c) };
        for event in [Pending::Interrupt, Pending::Nmi, Pending::Smi, Pending::Init] {
            assert_eq!(held.gate(&event), Gate::Hold);
        }
        assert_eq!(held.gate(&Pending::Exception(Exception::ud())), Gate::Deliver);
    }

    #[test]
    fn an_intercepted_interrupt_ends_l2s_run_whatever_its_own_flag() {
        let c = control(Intercept3::INTR, true);
        let exit = Exit::plain(ExitCode::Intr);
        assert_eq!(in_l2(&c).gate(&Pending::Interrupt), Gate::ExitToL1(exit));
        let closed = Situation { l1_rflags: Rflags::FIXED, rflags: Rflags::IF, ..in_l2(&c) };
        assert_eq!(closed.gate(&Pending::Interrupt), Gate::Hold);
    }

    #[test]
    fn without_masking_l2s_flag_counts() {
        let c = control(Intercept3::INTR, false);
        assert_eq!(in_l2(&c).gate(&Pending::Interrupt), Gate::Window);
        let open = Situation { rflags: Rflags::IF, ..in_l2(&c) };
        assert_eq!(open.gate(&Pending::Interrupt), Gate::ExitToL1(Exit::plain(ExitCode::Intr)));
    }

    #[test]
    fn what_l1_does_not_intercept_is_delivered_to_l2() {
        let c = control(Intercept3::empty(), true);
        for event in [Pending::Interrupt, Pending::Nmi, Pending::Smi, Pending::Init] {
            assert_eq!(in_l2(&c).gate(&event), Gate::Deliver);
        }
    }

    #[test]
    fn an_entry_that_is_due_comes_first() {
        let c = control(Intercept3::all(), true);
        let due = Situation { entry_pending: true, ..in_l2(&c) };
        assert_eq!(due.gate(&Pending::Nmi), Gate::AfterEntry);
        assert_eq!(due.gate(&Pending::Interrupt), Gate::AfterEntry);
    }

    #[test]
    fn exceptions_of_l2_are_whose_intercept_they_are() {
        let mut c = control(Intercept3::empty(), true);
        c.intercepts[2] = 1 << 14;
        let fault = Exception { vector: Vector(14), error_code: Some(2), payload: Some(0x7000) };
        let exit = Exit { code: ExitCode(0x4e), info_1: 2, info_2: 0x7000 };
        assert_eq!(in_l2(&c).gate(&Pending::Exception(fault)), Gate::ExitToL1(exit));
        assert_eq!(in_l2(&c).gate(&Pending::Exception(Exception::ud())), Gate::Deliver);
        let in_l1 = Situation { level: Level::L1, ..in_l2(&c) };
        assert_eq!(in_l1.gate(&Pending::Exception(fault)), Gate::Deliver);
    }
}
