//! KVM_SET_GUEST_DEBUG, and the debug registers that a VMM's breakpoints borrow: while it has some,
//! the hardware holds those, and the guest's own lie here, where its MOVs find them.

use backend::{Backend, DebuggerWants, Nested};
use emulate::Stop;
use x86::{Cr4, Dr6, Dr7, Exception, Rflags};

use crate::{Vcpu, run::events::Outer};

/// Bits of `kvm_guest_debug.control` (KVM API §4.87).
pub(crate) mod guestdbg {
    pub const ENABLE: u32 = 1;
    pub const SINGLESTEP: u32 = 2;
    pub const USE_SW_BP: u32 = 0x1_0000;
    pub const USE_HW_BP: u32 = 0x2_0000;
    pub const BLOCKIRQ: u32 = 0x10_0000;
}

/// Debug registers: DR0 to DR3, DR6, DR7.
pub type DebugRegs = [u64; 6];

/// What KVM_SET_GUEST_DEBUG asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Debug {
    /// `kvm_guest_debug.control`; 0: nothing.
    pub control: u32,
    /// RFLAGS.TF is the VMM's.
    pub single_step: bool,
    /// The VMM's breakpoints are in the hardware's debug registers.
    borrowed: Option<Borrowed>,
    /// The guest's own DR6 tells of a step.
    stepped: bool,
}

/// A VMM's breakpoints are in force.
#[derive(Clone, Copy, Debug)]
struct Borrowed {
    /// What the guest would have, and sees.
    own: DebugRegs,
    /// What the hardware holds.
    theirs: DebugRegs,
}

impl Debug {
    /// DR0 to DR3, DR6, DR7 as the guest sees them.
    pub(crate) fn regs(&self, b: &impl Backend) -> DebugRegs {
        self.borrowed.map_or_else(|| b.debug_regs(), |borrowed| borrowed.own)
    }

    /// Sets DR0 to DR3, DR6 and DR7 of the guest.
    pub(crate) fn set_regs(&mut self, b: &mut impl Backend, regs: DebugRegs) {
        let [a, b1, c, d, dr6, dr7] = regs;
        let regs = [a, b1, c, d, Dr6::new(dr6).bits(), Dr7::new(dr7).bits()];
        match &mut self.borrowed {
            Some(borrowed) => borrowed.own = regs,
            None => {
                b.set_debug_regs(regs);
                self.note_own_step(b);
            }
        }
    }

    /// After a reset of the hardware's registers: a VMM's breakpoints outlast it.
    pub(crate) fn regs_reset(&mut self, b: &mut impl Backend) {
        if let Some(borrowed) = &mut self.borrowed {
            borrowed.own = b.debug_regs();
            b.set_debug_regs(borrowed.theirs);
        }
        self.note_own_step(b);
    }

    fn note_own_step(&mut self, b: &impl Backend) {
        let [.., dr6, _] = self.regs(b);
        self.stepped = dr6 & Dr6::BS != 0;
    }

    /// What the hardware's DR6 was before a #DB of which the VMM hears, where the CPU has made `dr6` of it before its exit.
    pub(crate) fn dr6_before(&self, dr6: u64) -> u64 {
        match self.borrowed {
            Some(Borrowed { theirs: [.., before, _], .. }) => before,
            None if self.stepped => dr6,
            None => dr6 & !Dr6::BS,
        }
    }

    /// An exception on its way to the guest, which no entry has injected before.
    #[inline]
    pub(crate) fn deliver(&mut self, b: &mut impl Backend, exception: Exception) -> Exception {
        const DB: u8 = 1;
        if exception.vector.0 == DB { self.deliver_debug(b, exception) } else { exception }
    }

    /// #DB clears DR7.GD, with a payload or without. The injection does it with what the payload leaves in DR6, unless the
    /// VMM's breakpoints are in the hardware: then both are left in the guest's own.
    #[cold]
    #[inline(never)]
    fn deliver_debug(&mut self, b: &mut impl Backend, exception: Exception) -> Exception {
        let Some(bits) = exception.payload else {
            self.end_general_detect(b);
            return exception;
        };
        let Some(Borrowed { own: [.., dr6, dr7], .. }) = &mut self.borrowed else {
            return exception;
        };
        *dr6 = Dr6::new(*dr6).after_db(bits).bits();
        *dr7 = Dr7::new(*dr7).without_general_detect().bits();
        Exception { payload: None, ..exception }
    }

    fn end_general_detect(&mut self, b: &mut impl Backend) {
        let [a, b1, c, d, dr6, dr7] = self.regs(b);
        if dr7 & Dr7::GD != 0 {
            self.set_regs(b, [a, b1, c, d, dr6, dr7 & !Dr7::GD]);
        }
    }

    /// RFLAGS without what a debugger's single step put there.
    pub(crate) fn rflags(&self, b: &impl Backend) -> Rflags {
        let rflags = b.rflags();
        if self.single_step { rflags - Rflags::TF } else { rflags }
    }

    /// Sets RFLAGS, with the step that a debugger may have asked for.
    pub(crate) fn set_rflags(&self, b: &mut impl Backend, rflags: Rflags) {
        b.set_rflags(if self.single_step { rflags | Rflags::TF } else { rflags });
    }

    /// Begins or ends the VMM's debugging of the guest.
    fn set(&mut self, b: &mut impl Backend, control: u32, dr: [u64; 8]) {
        let on = control & guestdbg::ENABLE != 0;
        // As on stock KVM all other bits mean nothing without ENABLE.
        self.control = if on { control } else { 0 };
        let has = |bit| self.control & bit != 0;
        let (steps, breakpoints) = (has(guestdbg::SINGLESTEP), has(guestdbg::USE_SW_BP));
        let borrows = has(guestdbg::USE_HW_BP);
        // Before the flag changes: whose TF is in RFLAGS follows from it.
        let rflags = self.rflags(b);
        self.single_step = steps;
        self.set_rflags(b, rflags);
        b.set_guest_debug(DebuggerWants { breakpoints, steps });
        let [dr0, dr1, dr2, dr3, _, _, _, dr7] = dr;
        let theirs = [dr0, dr1, dr2, dr3, Dr6::RESET.bits(), Dr7::new(dr7).bits()];
        self.borrow_regs(b, borrows.then_some(theirs));
        self.note_own_step(b);
    }

    fn borrow_regs(&mut self, b: &mut impl Backend, theirs: Option<DebugRegs>) {
        // Before they are replaced: with breakpoints of before these are the kept ones, not the hardware's.
        let own = self.regs(b);
        if self.borrowed.is_none() && theirs.is_none() {
            return;
        }
        self.borrowed = theirs.map(|theirs| Borrowed { own, theirs });
        b.watch_debug_regs(theirs.is_some());
        b.set_debug_regs(theirs.unwrap_or(own));
    }

    /// Whether the hardware holds something of a debugger's: breakpoints, or RFLAGS.TF.
    #[inline]
    pub(crate) fn is_in_hardware(&self) -> bool {
        self.control & (guestdbg::SINGLESTEP | guestdbg::USE_HW_BP) != 0
    }

    #[cold]
    #[inline(never)]
    fn put_aside(&mut self, b: &mut impl Backend) -> Option<DebugRegs> {
        // The flags that the other level finds are the guest's own.
        b.set_rflags(self.rflags(b));
        let borrowed = self.borrowed.take()?;
        b.set_debug_regs(borrowed.own);
        Some(borrowed.theirs)
    }

    #[cold]
    #[inline(never)]
    fn bring_back(&mut self, b: &mut impl Backend, theirs: Option<DebugRegs>) {
        if self.single_step {
            b.set_rflags(b.rflags() | Rflags::TF);
        }
        if let Some(theirs) = theirs {
            self.borrowed = Some(Borrowed { own: b.debug_regs(), theirs });
            b.set_debug_regs(theirs);
        }
        self.note_own_step(b);
    }

    /// The guest's MOVs to and from debug registers are done here, not by the hardware.
    pub(crate) fn borrows_regs(&self) -> bool {
        self.borrowed.is_some()
    }

    /// The debugger's DR7, if that makes an access of a debug register a #DB. On VMX the exit comes first.
    pub(crate) fn general_detect(&self, b: &impl Backend, dr: u8) -> Option<u64> {
        let [.., dr7] = self.borrowed?.theirs;
        // DR4 and DR5 are #UD with CR4.DE, which comes before general detect (SDM vol. 3B §18.2.2).
        let missing = matches!(dr, 4 | 5) && b.cr4().contains(Cr4::DE);
        (dr7 & Dr7::GD != 0 && !missing && b.cpl() == 0).then_some(dr7)
    }

    /// Whether the VMM keeps interrupts, NMIs and SMIs from the guest.
    #[inline]
    pub(crate) fn blocks_events(&self) -> bool {
        self.control & guestdbg::BLOCKIRQ != 0
    }

    /// Where in [`DebugRegs`] a register is, by its number in an instruction.
    fn index(&mut self, b: &mut impl Backend, n: u8) -> Result<usize, Stop> {
        // DR4 and DR5 are other names of DR6 and DR7 while CR4.DE is clear (SDM vol. 3B §18.2.2).
        let old_names = !b.control().cr4.contains(Cr4::DE);
        let n = if matches!(n, 4 | 5) && old_names { n + 2 } else { n };
        let index = match n {
            0..=3 => usize::from(n),
            6 => 4,
            7 => 5,
            _ => return Err(Stop::Fault(Exception::ud())),
        };
        let [.., dr7] = self.regs(b);
        if dr7 & Dr7::GD != 0 {
            // The handler may use them.
            self.end_general_detect(b);
            return Err(Stop::Fault(Exception::db(Dr6::BD)));
        }
        Ok(index)
    }

    /// MOV from a debug register, with the privilege checked.
    pub(crate) fn read(&mut self, b: &mut impl Backend, n: u8) -> Result<u64, Stop> {
        let index = self.index(b, n)?;
        // The guest chose the number: no speculation past the array by it (docs/adr/0039).
        Ok(host::GuestIndex::from(index).of(&self.regs(b)).copied().unwrap_or(0))
    }

    /// MOV to a debug register, with the privilege checked.
    pub(crate) fn write(&mut self, b: &mut impl Backend, n: u8, value: u64) -> Result<(), Stop> {
        let index = self.index(b, n)?;
        let value = match index {
            // SDM vol. 2B, MOV to debug registers.
            4 | 5 if value >> 32 != 0 => return Err(Stop::Fault(Exception::gp(0))),
            4 => (value | Dr6::RESET.bits()) & !Dr6::RESERVED_ZERO,
            5 => (value | Dr7::RESET.bits()) & !Dr7::RESERVED_ZERO,
            _ => value,
        };
        let mut regs = self.regs(b);
        if let Some(reg) = host::GuestIndex::from(index).of_mut(&mut regs) {
            *reg = value;
        }
        self.set_regs(b, regs);
        Ok(())
    }
}

impl<B: Backend> Vcpu<B> {
    /// DR0 to DR3, DR6, DR7 as the guest sees them.
    pub fn debug_regs(&self) -> DebugRegs {
        self.rare.debug.regs(&self.b)
    }

    /// Sets DR0 to DR3, DR6 and DR7, in whose reserved bits a VMM may have put anything.
    pub fn set_debug_regs(&mut self, regs: DebugRegs) {
        let [a, b, c, d, dr6, dr7] = regs;
        let regs = [a, b, c, d, dr6 | Dr6::RESET.bits(), dr7 | Dr7::RESET.bits()];
        self.rare.debug.set_regs(&mut self.b, regs);
    }

    /// Begins or ends the VMM's debugging of the guest (KVM_SET_GUEST_DEBUG).
    pub fn set_guest_debug(&mut self, control: u32, dr: [u64; 8]) {
        self.rare.debug.set(&mut self.b, control, dr);
        if !self.rare.debug.single_step {
            // Who no longer steps hears of no step.
            self.events.outer.set(Outer::STEPPED, false);
        }
        // BLOCKIRQ may have come or gone.
        self.smm.show_pending(&mut self.events, &self.rare.debug);
        self.pending.raise();
    }

    /// Does something that may have another level run, of which each has DR6, DR7 and RFLAGS of its own. Nothing in it
    /// is the debugger's meanwhile, so that no level finds that in place of its own; behind it the level that runs is
    /// debugged.
    #[inline]
    pub(crate) fn across_levels<R>(&mut self, act: impl FnOnce(&mut Self) -> R) -> R {
        let done = if self.rare.debug.is_in_hardware() {
            let theirs = self.rare.debug.put_aside(&mut self.b);
            let done = act(self);
            self.rare.debug.bring_back(&mut self.b, theirs);
            done
        } else {
            act(self)
        };
        if self.b.nested().is_some_and(Nested::has_list_msrs) {
            self.do_list_msrs();
        }
        done
    }
}
