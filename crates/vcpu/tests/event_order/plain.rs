//! A plain processor's view of what waits for it, in the order in which it takes it (APM vol. 2 §8.5, SDM vol. 3A §7.9).

use backend::{Event, ShadowBy};
use x86::{Exception, Vector};

/// What waits, and what holds it back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain {
    /// An event whose delivery has begun: before all others.
    pub begun: Option<Event>,
    /// A fault of the instruction at RIP.
    pub exception: Option<Exception>,
    /// The interrupt that the VMM's own controller has given.
    pub external: Option<Vector>,
    /// User space has told of it as of one that is injected: it may go before an NMI at the next entry.
    pub told: bool,
    /// User space has given what has begun: behind a shadow it has not.
    pub given: bool,
    pub nmis: u32,
    pub nmi_masked: bool,
    pub interrupts: bool,
    pub shadow: Option<ShadowBy>,
    pub rip: u64,
    /// What is wrong with it, in a twin.
    pub error: Option<Error>,
}

/// An error of the model, by which it has to be found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    InterruptBeforeNmi,
    ShadowHoldsNothing,
    FlagHoldsNothing,
    MaskHoldsNothing,
    DeliveryIsForgotten,
    ExceptionIsForgotten,
    InterruptIsForgotten,
    NmiIsForgotten,
    InterruptComesTwice,
    InstructionIsNoPlaceToReturnBehind,
}

/// Every error.
pub const ERRORS: [Error; 10] = [
    Error::InterruptBeforeNmi,
    Error::ShadowHoldsNothing,
    Error::FlagHoldsNothing,
    Error::MaskHoldsNothing,
    Error::DeliveryIsForgotten,
    Error::ExceptionIsForgotten,
    Error::InterruptIsForgotten,
    Error::NmiIsForgotten,
    Error::InterruptComesTwice,
    Error::InstructionIsNoPlaceToReturnBehind,
];

impl Plain {
    fn has(&self, error: Error) -> bool {
        self.error == Some(error)
    }

    /// Whether an interrupt is taken, beside what goes before it.
    pub fn is_open(&self) -> bool {
        (self.interrupts || self.has(Error::FlagHoldsNothing))
            && (self.shadow.is_none() || self.has(Error::ShadowHoldsNothing))
    }

    /// What it may take now: nothing, one event, or one of two.
    pub fn due(&self) -> Vec<Event> {
        if let Some(event) = self.begun {
            return vec![event];
        }
        if let Some(exception) = self.exception {
            return vec![Event::Exception(exception)];
        }
        let masked = self.nmi_masked && !self.has(Error::MaskHoldsNothing);
        let nmi = (self.nmis != 0 && !masked && self.shadow.is_none()).then_some(Event::Nmi);
        let interrupt = self.external.filter(|_| self.is_open()).map(Event::Interrupt);
        match (nmi, interrupt) {
            (Some(nmi), Some(interrupt)) if self.told => vec![nmi, interrupt],
            (Some(_), Some(interrupt)) if self.has(Error::InterruptBeforeNmi) => vec![interrupt],
            (nmi, interrupt) => nmi.or(interrupt).into_iter().collect(),
        }
    }

    /// Whether a VMM may give an interrupt, as KVM_RUN tells it.
    pub fn is_ready(&self) -> bool {
        let waits = self.begun.is_some() || self.exception.is_some() || self.external.is_some();
        self.is_open() && !waits
    }

    /// Where the handler of `event` returns to.
    pub fn return_address(&self, event: Event) -> u64 {
        if self.has(Error::InstructionIsNoPlaceToReturnBehind) {
            return self.rip;
        }
        self.rip
            + match event {
                Event::Software(_) => 2,
                Event::Exception(e) if matches!(e.vector.0, 3 | 4) => 1,
                _ => 0,
            }
    }

    /// It begins to take `event`, which waits no more.
    pub fn begin(&mut self, event: Event) {
        self.told = false;
        if self.begun.take().is_some() {
            return;
        }
        match event {
            Event::Exception(_) => self.exception = None,
            Event::Interrupt(_) if self.has(Error::InterruptComesTwice) => {}
            Event::Interrupt(_) => self.external = None,
            Event::Nmi => self.nmis -= 1,
            Event::Software(_) => {}
        }
    }

    /// An exit has interrupted the delivery. INT n, INT3 and INTO are executed again.
    pub fn is_interrupted(&mut self, event: Event) {
        let again = match event {
            Event::Software(_) => None,
            Event::Exception(e) if matches!(e.vector.0, 3 | 4) => None,
            event => Some(event),
        };
        self.begun = again.filter(|_| !self.has(Error::DeliveryIsForgotten));
    }

    /// The handler of `event` has been reached.
    pub fn is_delivered(&mut self, event: Event) {
        self.interrupts = false;
        self.shadow = None;
        if event == Event::Nmi {
            self.nmi_masked = true;
        }
        // A handler of its own: where an IRET was tells on AMD CPUs whether it has been executed.
        self.rip = (self.rip & !0xff) + 0x100;
    }

    /// An entry, before which at most one NMI waits behind one that is handled.
    pub fn enters(&mut self) {
        if core::mem::take(&mut self.given)
            && self.begun == Some(Event::Nmi)
            && self.shadow.is_some()
        {
            (self.begun, self.nmis) = (None, 2.min(self.nmis + 1));
        }
        if self.nmi_masked || self.begun == Some(Event::Nmi) {
            self.nmis = self.nmis.min(1);
        }
        if self.has(Error::ExceptionIsForgotten) {
            self.exception = None;
        }
        if self.has(Error::InterruptIsForgotten) {
            self.external = None;
        }
        if self.has(Error::NmiIsForgotten) {
            self.nmis = 0;
        }
    }
}
