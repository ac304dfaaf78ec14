//! The guest's processor: what it does from one entry to the exit, on either vendor's block of controls.

use std::{collections::VecDeque, sync::Arc, sync::Mutex};

use backend::{Event, ShadowBy};
use x86::{Exception, Rflags};

use crate::plain::Plain;

/// What a processor finds between two instructions.
pub enum Boundary {
    /// Nothing.
    Nothing,
    /// An interrupt that is offered to it.
    Takes(Event),
    /// A window, by which it exits.
    Exits,
}

/// An exit.
#[derive(Clone, Copy, Debug)]
pub enum Exit {
    /// CPUID, which is answered in the loop.
    Cpuid,
    /// RDMSR of an MSR that there is not.
    Rdmsr,
    /// An interrupt of the host's.
    HostInterrupt,
    /// A page that is not mapped yet, or that is looked at again, within the delivery of an event or not.
    Page(Option<Event>),
    /// One that nobody knows: user space is asked.
    Unknown,
}

/// The block of one entry, as the CPU sees it.
pub trait Block {
    fn injected(&self) -> Option<Event>;
    fn rip(&self) -> u64;
    fn set_rip(&mut self, rip: u64);
    fn rflags(&self) -> Rflags;
    fn set_rflags(&mut self, rflags: Rflags);
    fn shadow(&self) -> Option<ShadowBy>;
    fn set_shadow(&mut self, by: Option<ShadowBy>);
    /// Whether NMIs are masked, if the block tells.
    fn nmi_masked(&self) -> Option<bool>;
    fn set_nmi_masked(&mut self, on: bool);
    /// Where the handler of what is injected returns to.
    fn return_address(&self, event: Event) -> u64;
    /// Whether the CPU exits when it can take an event.
    fn has_window(&self) -> bool;
    fn boundary(&mut self) -> Boundary;
    /// Whether IRET exits before it is executed.
    fn exits_at_iret(&mut self) -> bool;
    /// Exits behind the instruction that it has executed with TF set.
    fn steps(&mut self);
    fn exit(&mut self, exit: Exit);
    /// Whether an event that is delivered between the exit of an IRET and the IRET is taken for the end of it, as on stock KVM.
    fn iret_is_watched(&self) -> bool;
    /// Whether an NMI behind STI waits for the window of interrupts.
    const NMI_WAITS_BEHIND_STI: bool;
}

/// What the guest does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Any instruction.
    Nop,
    Sti,
    Cli,
    MovSs,
    /// The flag of the frame that it pops.
    Iret(bool),
    Cpuid,
    Rdmsr,
    Page,
    HostInterrupt,
    /// And a signal for the thread.
    Signal,
    /// At the next delivery: an exit interrupts it.
    Interrupts,
}

/// The guest, which outlives each vCPU that it runs on.
pub struct Guest {
    pub plain: Plain,
    /// The CPU pushes the place behind INT n, INT3 and INTO that are injected.
    returns_behind: bool,
    pub acts: VecDeque<Act>,
    /// Between the exit of an IRET and its execution.
    iret: Option<bool>,
    /// An NMI came behind STI, where it waits for the window of interrupts on Intel CPUs, as on stock KVM: with RFLAGS.IF clear behind the next
    /// instruction it waits on.
    behind_sti: bool,
    /// KVM_RUN was asked to return when an interrupt can be given.
    pub wants_window: bool,
    /// How often what was seen.
    pub seen: Seen,
}

/// What a run of the test came by.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub delivered: [u64; 4],
    pub interrupted: u64,
    pub windows: u64,
    pub instructions: u64,
}

impl Seen {
    /// Both.
    pub fn with(self, other: Self) -> Self {
        let mut delivered = self.delivered;
        for (all, more) in delivered.iter_mut().zip(other.delivered) {
            *all += more;
        }
        Self {
            delivered,
            interrupted: self.interrupted + other.interrupted,
            windows: self.windows + other.windows,
            instructions: self.instructions + other.instructions,
        }
    }
}

/// The guest as the CPU's steps share it.
pub type Shared = Arc<Mutex<Guest>>;

fn number(event: Event) -> usize {
    match event {
        Event::Exception(_) => 0,
        Event::Interrupt(_) => 1,
        Event::Nmi => 2,
        Event::Software(_) => 3,
    }
}

/// Whether two name the same event: what an exception carries is another test's.
fn is_same(a: Event, b: Event) -> bool {
    match (a, b) {
        (Event::Exception(a), Event::Exception(b)) => a.vector == b.vector,
        (a, b) => a == b,
    }
}

impl Guest {
    pub fn new(plain: Plain, returns_behind: bool) -> Self {
        Self {
            plain,
            returns_behind,
            acts: VecDeque::new(),
            iret: None,
            behind_sti: false,
            wants_window: false,
            seen: Seen::default(),
        }
    }

    /// From an entry to the exit.
    pub fn run<B: Block>(&mut self, b: &mut B) {
        self.plain.enters();
        self.compare(b);
        let p = &self.plain;
        self.behind_sti |=
            B::NMI_WAITS_BEHIND_STI && p.nmis != 0 && p.shadow == Some(ShadowBy::Sti);
        self.behind_sti &= p.nmis != 0;
        if let Some(event) = b.injected() {
            let behind = self.plain.return_address(event);
            let returns = b.return_address(event);
            assert!(!self.returns_behind || returns == behind, "the place behind {event:?}");
            if !self.delivers(b, event) {
                return;
            }
        }
        while self.goes_on(b) {}
    }

    /// Flags, shadow, mask and RIP are what they were.
    fn compare<B: Block>(&mut self, b: &B) {
        if b.shadow().is_some() && self.plain.shadow.is_none() {
            // One that is over may be said for an instruction more, if what it holds back is waited for.
            let p = &mut self.plain;
            let settled = p.due().is_empty() || b.injected().is_some() || b.has_window();
            assert!(settled, "a shadow: {p:?}");
            p.shadow = b.shadow();
        }
        let p = &self.plain;
        assert_eq!(b.rflags().contains(Rflags::IF), p.interrupts, "RFLAGS.IF, {p:?}");
        assert_eq!(b.shadow().is_some(), p.shadow.is_some(), "the shadow, {p:?}");
        // STI's with RFLAGS.IF clear is entered as that of MOV SS on Intel.
        self.plain.shadow = b.shadow();
        let p = &self.plain;
        assert_eq!(b.rip(), p.rip, "RIP, {p:?}");
        if let Some(masked) = b.nmi_masked() {
            // It masks with the NMI that it injects.
            let injects = b.injected() == Some(Event::Nmi);
            assert!(injects || masked == p.nmi_masked, "NMIs masked {masked}, {p:?}");
        }
    }

    /// It takes an event. False: an exit has interrupted it.
    fn delivers<B: Block>(&mut self, b: &mut B, event: Event) -> bool {
        let due = self.plain.due();
        assert!(
            due.iter().any(|due| is_same(*due, event)),
            "it takes {event:?}, and {due:?} is due: {:?}",
            self.plain
        );
        assert!(!b.rflags().contains(Rflags::TF), "the handler of {event:?} pops a step of ours");
        self.plain.begin(event);
        if self.acts.front() == Some(&Act::Interrupts) {
            self.acts.pop_front();
            self.seen.interrupted += 1;
            self.plain.is_interrupted(event);
            if event == Event::Nmi {
                b.set_nmi_masked(true);
            }
            b.exit(Exit::Page(Some(event)));
            return false;
        }
        self.seen.delivered[number(event)] += 1;
        if self.iret.take().is_some() && b.iret_is_watched() {
            self.plain.nmi_masked = false;
        }
        self.plain.is_delivered(event);
        b.set_rflags(b.rflags() - Rflags::IF);
        b.set_shadow(None);
        b.set_rip(self.plain.rip);
        if event == Event::Nmi {
            b.set_nmi_masked(true);
        }
        true
    }

    /// From one boundary to the next. False: it exits.
    fn goes_on<B: Block>(&mut self, b: &mut B) -> bool {
        if !host::std_port::test::take_kicks().is_empty() {
            b.exit(Exit::HostInterrupt);
            return false;
        }
        match b.boundary() {
            Boundary::Exits => {
                self.seen.windows += 1;
                return false;
            }
            Boundary::Takes(event) => return self.delivers(b, event),
            Boundary::Nothing => {}
        }
        let mut due = self.plain.due();
        due.retain(|event| *event != Event::Nmi || !self.behind_sti || self.plain.interrupts);
        assert!(due.is_empty(), "an instruction comes before {due:?}: {:?}", self.plain);
        let awaited = self.wants_window && self.plain.is_ready();
        assert!(!awaited, "an instruction is executed in the window: {:?}", self.plain);
        self.executes(b)
    }

    /// The next act. False: it exits.
    fn executes<B: Block>(&mut self, b: &mut B) -> bool {
        let act = match self.iret {
            Some(flag) => Act::Iret(flag),
            None => match self.acts.pop_front() {
                Some(act) => act,
                None => {
                    b.exit(Exit::Unknown);
                    return false;
                }
            },
        };
        self.seen.instructions += 1;
        let (p, mut by) = (&mut self.plain, None);
        let mut flags = b.rflags() - Rflags::IF;
        let steps = flags.contains(Rflags::TF);
        match act {
            Act::Interrupts | Act::Nop => {}
            Act::Sti => {
                by = (!p.interrupts).then_some(ShadowBy::Sti);
                p.interrupts = true;
            }
            Act::Cli => p.interrupts = false,
            Act::MovSs => by = Some(ShadowBy::MovSs),
            Act::Iret(flag) => {
                if self.iret.is_none() && b.exits_at_iret() {
                    self.iret = Some(flag);
                    return false;
                }
                self.iret = None;
                p.nmi_masked = false;
                b.set_nmi_masked(false);
                p.interrupts = flag;
                // It pops the guest's own.
                flags -= Rflags::TF | Rflags::RF;
            }
            Act::HostInterrupt => {
                b.exit(Exit::HostInterrupt);
                return false;
            }
            Act::Signal => {
                host::std_port::test::set_signal_pending(true);
                b.exit(Exit::HostInterrupt);
                return false;
            }
            Act::Page => {
                b.exit(Exit::Page(None));
                return false;
            }
            Act::Cpuid => {
                b.exit(Exit::Cpuid);
                (p.rip, p.shadow) = (p.rip + 2, None);
                return false;
            }
            Act::Rdmsr => {
                b.exit(Exit::Rdmsr);
                p.exception = Some(Exception::gp(0));
                return false;
            }
        }
        p.shadow = by;
        // An IRET leaves its place.
        p.rip += 1;
        b.set_rip(p.rip);
        b.set_shadow(by);
        b.set_rflags(flags | if p.interrupts { Rflags::IF } else { Rflags::empty() });
        if steps {
            b.steps();
        }
        !steps
    }
}
