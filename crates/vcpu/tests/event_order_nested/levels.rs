//! A plain processor's view of a guest that is a hypervisor: which level runs, what waits, and for which of the two (APM vol. 2 §15.6, §15.17,
//! §15.20 and §15.21, SDM vol. 3C §26.2, §27.6 and §28.5).

use backend::{Event, ShadowBy};
use x86::{Exception, Vector};

/// Which of the two runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    L1,
    L2,
}

/// Why L2's run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Interrupt,
    Nmi,
    /// VMMCALL or VMCALL.
    Call,
}

/// What comes before the next instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The level that runs takes it.
    Take(Event),
    /// L2's run ends.
    Ends(Why),
}

/// Whose instructions they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Svm,
    Vmx,
}

/// What does not change in a run of the test.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub kind: Kind,
    /// L1 hears of interrupts and NMIs. SVM: with V_INTR_MASKING.
    pub hears: bool,
    /// AMD's: the CPU has virtual NMIs, which L1 is not offered.
    pub vnmi: bool,
    /// What is wrong with the model, in a twin.
    pub error: Option<Error>,
}

/// What each level has of its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    pub rip: u64,
    pub interrupts: bool,
    pub shadow: Option<ShadowBy>,
}

/// The processor.
#[derive(Clone, Copy, Debug)]
pub struct Plain {
    pub rules: Rules,
    pub level: Level,
    places: [Place; 2],
    /// SVM's; VMX has none, and here it is set.
    pub gif: bool,
    /// L1 has entered L2, which has not run yet.
    pub entry_pending: bool,
    /// An event whose delivery has begun, or that L1 injects: before all others.
    pub begun: Option<Event>,
    /// It is L1's, for L2.
    pub by_l1: bool,
    /// A fault of the instruction at RIP.
    pub exception: Option<Exception>,
    /// The interrupt that the VMM's own controller has given.
    pub external: Option<Vector>,
    /// User space has told of it as of one that is injected: it may go before an NMI at the next entry.
    pub told: bool,
    pub nmi: bool,
    /// On AMD there is one mask. On Intel each level has one, as on stock KVM (docs/limits.md, "nesting, as on stock KVM").
    masked: [bool; 2],
    /// What L1's block says is to be injected with the next entry.
    pub prepared: Option<Event>,
    pub launched: bool,
    /// Why L1 runs: what its block has to say.
    pub exit: Option<Why>,
}

/// An error of the model, by which it has to be found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    L1HearsOfNothing,
    L2sShadowHoldsExits,
    L2sFlagHoldsExits,
    InjectionIsForgotten,
    InjectionComesTwice,
    DeliveryIsForgotten,
    ExitBeforeInjection,
    ExitTakesInterrupt,
    ExitTakesNmi,
    ExitLeavesNmi,
    ExitMasksNothing,
    ExitLeavesFlag,
    GifHoldsNothing,
    GifStaysSet,
    GifStaysClear,
    InterruptBeforeNmi,
    L1IsL2,
}

/// Errors that either vendor's sequences find.
pub const COMMON: [Error; 10] = [
    Error::L1HearsOfNothing,
    Error::L2sShadowHoldsExits,
    Error::L2sFlagHoldsExits,
    Error::InjectionIsForgotten,
    Error::InjectionComesTwice,
    Error::DeliveryIsForgotten,
    Error::ExitBeforeInjection,
    Error::ExitTakesInterrupt,
    Error::InterruptBeforeNmi,
    Error::L1IsL2,
];
/// AMD's alone: an exit leaves the NMI where it waits, and clears GIF.
pub const OF_SVM: [Error; 4] =
    [Error::ExitTakesNmi, Error::GifHoldsNothing, Error::GifStaysSet, Error::GifStaysClear];
/// Intel's alone: an exit takes the NMI and loads RFLAGS.
pub const OF_VMX: [Error; 3] =
    [Error::ExitLeavesNmi, Error::ExitMasksNothing, Error::ExitLeavesFlag];

impl Plain {
    /// L1 runs, at `l1`, with interrupts off; its block has L2 at `l2`.
    pub fn new(rules: Rules, l1: u64, l2: u64) -> Self {
        let place = |rip| Place { rip, ..Place::default() };
        Self {
            rules,
            level: Level::L1,
            places: [place(l1), place(l2)],
            gif: true,
            entry_pending: false,
            begun: None,
            by_l1: false,
            exception: None,
            external: None,
            told: false,
            nmi: false,
            masked: [false; 2],
            prepared: None,
            launched: false,
            exit: None,
        }
    }

    pub fn has(&self, error: Error) -> bool {
        self.rules.error == Some(error)
    }

    fn is_svm(&self) -> bool {
        self.rules.kind == Kind::Svm
    }

    /// What the level that runs has.
    pub fn here(&self) -> &Place {
        &self.places[self.level as usize]
    }

    pub fn here_mut(&mut self) -> &mut Place {
        &mut self.places[self.level as usize]
    }

    pub fn l2(&self) -> &Place {
        &self.places[Level::L2 as usize]
    }

    fn mask_of(&self, level: Level) -> usize {
        if self.is_svm() { 0 } else { level as usize }
    }

    /// Whether NMIs are masked for the level that runs.
    pub fn is_masked(&self) -> bool {
        self.masked[self.mask_of(self.level)]
    }

    pub fn set_masked(&mut self, on: bool) {
        self.masked[self.mask_of(self.level)] = on;
    }

    /// Whether an L1 that does not run has a mask of its own.
    pub fn l1_is_masked(&self) -> bool {
        self.masked[0]
    }

    /// Whether L2 has a mask of its own, which holds none of L1's.
    pub fn l2_is_masked(&self) -> bool {
        self.masked[1]
    }

    fn is_open(&self) -> bool {
        let gif = self.gif || self.has(Error::GifHoldsNothing);
        gif && self.here().interrupts && self.here().shadow.is_none()
    }

    /// Whether L2 runs, and L1 hears of what comes between its instructions.
    pub fn is_heard(&self) -> bool {
        self.level == Level::L2 && self.rules.hears && !self.has(Error::L1HearsOfNothing)
    }

    /// Whether an interrupt would end L2's run, of which L1 hears.
    fn would_end(&self) -> bool {
        // With V_INTR_MASKING it is L1's flag that counts, with external-interrupt exiting none.
        let flag = !self.is_svm() || self.places[0].interrupts;
        let here = self.here();
        flag && (here.interrupts || !self.has(Error::L2sFlagHoldsExits))
            && (here.shadow.is_none() || !self.has(Error::L2sShadowHoldsExits))
    }

    /// What comes before the next instruction: nothing, one event, or one of two.
    pub fn due(&self) -> Vec<Due> {
        let exits_first = self.has(Error::ExitBeforeInjection) && self.is_heard();
        if let Some(event) = self.begun.filter(|_| !exits_first) {
            return vec![Due::Take(event)];
        }
        if let Some(exception) = self.exception {
            return vec![Due::Take(Event::Exception(exception))];
        }
        let (nmi, interrupt) = if self.is_heard() {
            // No mask and no shadow of L2's counts, as on stock KVM.
            let nmi = self.nmi.then_some(Due::Ends(Why::Nmi));
            (nmi, self.external.filter(|_| self.would_end()).map(|_| Due::Ends(Why::Interrupt)))
        } else {
            let gif = self.gif || self.has(Error::GifHoldsNothing);
            let nmi = self.nmi && gif && !self.is_masked() && self.here().shadow.is_none();
            let interrupt = self.external.filter(|_| self.is_open()).map(Event::Interrupt);
            (nmi.then_some(Due::Take(Event::Nmi)), interrupt.map(Due::Take))
        };
        match (nmi, interrupt) {
            (Some(nmi @ Due::Take(_)), Some(interrupt)) if self.told => vec![nmi, interrupt],
            (Some(_), Some(interrupt)) if self.has(Error::InterruptBeforeNmi) => vec![interrupt],
            (nmi, interrupt) => nmi.or(interrupt).into_iter().collect(),
        }
    }

    /// Whether a VMM may give an interrupt, as KVM_RUN tells it.
    pub fn is_ready(&self) -> bool {
        let waits = self.begun.is_some() || self.exception.is_some() || self.external.is_some();
        !waits && if self.is_heard() { self.would_end() } else { self.is_open() }
    }

    /// What waits goes in, and waits no more.
    pub fn begin(&mut self, event: Event) {
        self.told = false;
        if self.begun.take().is_some() {
            return;
        }
        match event {
            Event::Exception(_) => self.exception = None,
            Event::Interrupt(_) => self.external = None,
            Event::Nmi => self.nmi = false,
            Event::Software(_) => {}
        }
    }

    /// An exit has interrupted the delivery.
    pub fn is_interrupted(&mut self, event: Event) {
        let forgotten = self.has(Error::DeliveryIsForgotten) && self.by_l1;
        self.begun = (!forgotten).then_some(event);
    }

    /// The handler of `event` has been reached.
    pub fn is_delivered(&mut self, event: Event) {
        let place = self.here_mut();
        (place.interrupts, place.shadow) = (false, None);
        // A handler of its own: where an IRET was tells on AMD CPUs whether it has been executed.
        place.rip = (place.rip & !0xff) + 0x100;
        // One that L1 injects is L2's, and so is its mask: on AMD L1 keeps that.
        if event == Event::Nmi && !(self.by_l1 && self.is_svm()) {
            self.set_masked(true);
        }
        self.by_l1 = false;
    }

    /// IRET.
    pub fn pops(&mut self, interrupts: bool) {
        self.here_mut().interrupts = interrupts;
        // With virtual NMIs an L1 that hears of them keeps its mask (docs/limits.md, "nesting, as on stock KVM").
        let keeps = self.rules.vnmi && self.rules.hears && self.level == Level::L2;
        self.set_masked(self.is_masked() && keeps);
    }

    /// L1 executes VMRUN, VMLAUNCH or VMRESUME.
    pub fn enters(&mut self) {
        self.begun = self.prepared.filter(|_| !self.has(Error::InjectionIsForgotten));
        if !self.has(Error::InjectionComesTwice) {
            self.prepared = None;
        }
        self.by_l1 = self.begun.is_some();
        self.here_mut().shadow = None;
        if self.is_svm() {
            self.here_mut().rip += 2;
        }
        if !self.has(Error::GifStaysClear) {
            self.gif = true;
        }
        (self.entry_pending, self.launched, self.exit) = (true, true, None);
        if !self.has(Error::L1IsL2) {
            self.level = Level::L2;
        }
    }

    /// L2's run ends. `host`: where L1 goes on under VMX.
    pub fn leaves(&mut self, why: Why, host: u64) {
        (self.level, self.exit) = (Level::L1, Some(why));
        (self.begun, self.by_l1, self.exception) = (None, false, None);
        if why == Why::Interrupt && self.has(Error::ExitTakesInterrupt) {
            self.external = None;
        }
        if why == Why::Nmi {
            let takes = if self.is_svm() { Error::ExitTakesNmi } else { Error::ExitLeavesNmi };
            // On AMD it waits for GIF. On Intel L1 has it with the exit, and is blocked.
            self.nmi = self.is_svm() != self.has(takes);
            self.masked[0] |= !self.is_svm() && !self.has(Error::ExitMasksNothing);
        }
        if self.is_svm() {
            self.gif = self.has(Error::GifStaysSet);
        } else {
            let interrupts = self.here().interrupts && self.has(Error::ExitLeavesFlag);
            *self.here_mut() = Place { rip: host, interrupts, shadow: None };
        }
    }
}
