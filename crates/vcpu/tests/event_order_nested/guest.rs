//! Both levels' processor: what they do from one entry to the exit, on either vendor's block of controls.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use backend::{Event, ShadowBy};
use host::{page::Pages, std_port::test as surroundings};
use x86::{Exception, Rflags, Vector};

use crate::{
    hardware::{self, Block, Boundary, Exit},
    levels::{Due, Level, Plain, Why},
};

/// Where L2 begins: L1's code lies below.
pub const L2: u64 = 0x2000_0000;

/// A block with what hypervisors do.
pub trait Levels: Block {
    /// Where an exit leads to.
    const HOST_RIP: u64;
    /// CPUID is no exit that L1 gets, asked for or not.
    const CPUID_IS_OURS: bool;
    /// An entry behind MOV SS fails.
    const MOV_SS_KEEPS_OUT: bool;
    /// There is a GIF.
    const HAS_GIF: bool;
    /// RDMSR of an MSR that there is not and that L1 has left to L2.
    fn reads_no_msr(&mut self);
    fn enters(&mut self, launched: bool);
    fn calls(&mut self);
    fn sets_gif(&mut self, on: bool);
    /// L1 has its block inject this. Whether that takes an exit.
    fn prepares(&mut self, event: Event, memory: &Pages) -> bool;
}

/// What L1 injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    Interrupt(Vector),
    Nmi,
    Exception(Exception),
}

/// What the guest does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// As any guest does.
    Any(hardware::Act),
    /// STGI or CLGI.
    Gif(bool),
    Prepares(Injected),
    /// L1 enters L2; a signal comes with that, or does not.
    Enters(bool),
    /// L2 calls L1, likewise.
    Calls(bool),
    /// At the next delivery: an exit interrupts it; a signal comes with that, or does not.
    Interrupts(bool),
}

/// What a run of the test came by.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// By level and event: exception, interrupt, NMI.
    pub delivered: [[u64; 3]; 2],
    /// What L1 injected.
    pub injected: [u64; 3],
    /// Interrupted deliveries: of what L1 injected, and others.
    pub interrupted: [u64; 2],
    /// For an interrupt, an NMI, a call.
    pub left: [u64; 3],
    pub entered: u64,
    /// Entries of L2 in which what ended its run at once waited for what L1 injects.
    pub left_behind_injection: u64,
    pub gif_set: u64,
    pub windows: u64,
    /// Moves to another vCPU, or the same: with L1, with L2, with an entry that is due, with an event of L1's under way.
    pub moved: [u64; 4],
}

impl Seen {
    /// All numbers.
    pub fn numbers(&self) -> Vec<u64> {
        let mut all = self.delivered.concat();
        all.extend(self.injected.iter().chain(&self.interrupted).chain(&self.left));
        all.extend([self.entered, self.left_behind_injection, self.gif_set, self.windows]);
        all.extend(self.moved);
        all
    }
}

/// Both levels, which outlive each vCPU that they run on.
pub struct Guest {
    pub plain: Plain,
    pub memory: Arc<Pages>,
    pub acts: VecDeque<Act>,
    /// Between the exit of an IRET and its execution.
    iret: Option<bool>,
    /// As in the test without nesting: on Intel CPUs an NMI behind STI waits for the window of interrupts, as on stock KVM.
    behind_sti: bool,
    /// What ends the run at the next boundary.
    kicked: bool,
    pub wants_window: bool,
    pub seen: Seen,
}

/// The guest as the CPU's steps share it.
pub type Shared = Arc<Mutex<Guest>>;

fn number(event: Event) -> usize {
    match event {
        Event::Exception(_) => 0,
        Event::Interrupt(_) | Event::Software(_) => 1,
        Event::Nmi => 2,
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
    pub fn new(plain: Plain, memory: Arc<Pages>) -> Self {
        Self {
            plain,
            memory,
            acts: VecDeque::new(),
            iret: None,
            behind_sti: false,
            kicked: false,
            wants_window: false,
            seen: Seen::default(),
        }
    }

    /// From an entry to the exit.
    pub fn run<B: Levels>(&mut self, b: &mut B) {
        self.kicked = false;
        if self.plain.level == Level::L2 && b.rip() < L2 {
            self.has_left::<B>();
        }
        self.compare(b);
        self.plain.entry_pending = false;
        let p = &self.plain;
        self.behind_sti |= B::NMI_WAITS_BEHIND_STI && p.nmi && p.here().shadow.is_some();
        self.behind_sti &= p.nmi;
        if let Some(event) = b.injected() {
            if self.plain.by_l1 && self.plain.is_heard() && self.plain.nmi {
                self.seen.left_behind_injection += 1;
            }
            if !self.delivers(b, event) {
                return;
            }
        }
        self.plain.told = false;
        while self.goes_on(b) {}
    }

    /// L1 runs though L2 was to: its run has ended for an event.
    fn has_left<B: Levels>(&mut self) {
        let (p, due) = (&self.plain, self.plain.due());
        // What an entry injects comes first.
        assert!(!p.entry_pending, "L1 goes on in place of an entry: {p:?}");
        let [Due::Ends(why)] = due[..] else { panic!("L1 goes on, and {due:?} is due: {p:?}") };
        self.leaves::<B>(why);
    }

    fn leaves<B: Levels>(&mut self, why: Why) {
        self.seen.left[why as usize] += 1;
        self.plain.leaves(why, B::HOST_RIP);
        // Where it is executed again L1 knows as little as that it has begun.
        (self.iret, self.behind_sti) = (None, false);
    }

    /// Flags, shadow, mask and RIP of the level that runs are what they were.
    fn compare<B: Levels>(&mut self, b: &B) {
        if b.shadow().is_some() && self.plain.here().shadow.is_none() {
            // As without nesting: one that is over may be said for an instruction more, if what it holds back is waited for.
            let p = &mut self.plain;
            let settled = p.due().is_empty() || b.injected().is_some() || b.has_window();
            assert!(settled, "a shadow: {p:?}");
            p.here_mut().shadow = b.shadow();
        }
        let p = &self.plain;
        assert_eq!(b.rip(), p.here().rip, "RIP, {p:?}");
        assert_eq!(b.rflags().contains(Rflags::IF), p.here().interrupts, "RFLAGS.IF, {p:?}");
        assert_eq!(b.shadow().is_some(), p.here().shadow.is_some(), "the shadow, {p:?}");
        // STI's with RFLAGS.IF clear is entered as that of MOV SS on Intel.
        self.plain.here_mut().shadow = b.shadow();
        if let Some(masked) = b.nmi_masked() {
            // It masks with the NMI that it injects.
            let injects = b.injected() == Some(Event::Nmi);
            let p = &self.plain;
            assert!(injects || masked == p.is_masked(), "NMIs masked {masked}, {p:?}");
        }
    }

    /// The level that runs takes an event. False: an exit has interrupted it.
    fn delivers<B: Levels>(&mut self, b: &mut B, event: Event) -> bool {
        let due = self.plain.due();
        let is_due = |due: &Due| matches!(due, Due::Take(due) if is_same(*due, event));
        assert!(due.iter().any(is_due), "it takes {event:?}, and {due:?} is due: {:?}", self.plain);
        assert!(!b.rflags().contains(Rflags::TF), "the handler of {event:?} pops a step of ours");
        self.plain.begin(event);
        if let Some(&Act::Interrupts(signal)) = self.acts.front() {
            self.acts.pop_front();
            if signal {
                self.signals();
            }
            self.seen.interrupted[usize::from(!self.plain.by_l1)] += 1;
            self.plain.is_interrupted(event);
            if event == Event::Nmi {
                b.set_nmi_masked(true);
            }
            b.exit(Exit::Page(Some(event)));
            return false;
        }
        if self.plain.by_l1 {
            self.seen.injected[number(event)] += 1;
        } else {
            self.seen.delivered[self.plain.level as usize][number(event)] += 1;
        }
        if self.iret.take().is_some() && b.iret_is_watched() {
            self.plain.set_masked(false);
        }
        self.plain.is_delivered(event);
        b.set_rflags(b.rflags() - Rflags::IF);
        b.set_shadow(None);
        b.set_rip(self.plain.here().rip);
        if event == Event::Nmi {
            b.set_nmi_masked(true);
        }
        true
    }

    /// From one boundary to the next. False: it exits.
    fn goes_on<B: Levels>(&mut self, b: &mut B) -> bool {
        // An interrupt of the host's waits behind a shadow as any (APM vol. 2 §15.21.5).
        self.kicked |= !surroundings::take_kicks().is_empty();
        if self.kicked && b.shadow().is_none() {
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
        let p = &self.plain;
        let mut due = p.due();
        let waits = self.behind_sti && !p.here().interrupts;
        due.retain(|due| *due != Due::Take(Event::Nmi) || !waits);
        // An entry that is due comes before the exit, and the interrupt of the host's that makes that waits behind a shadow.
        due.retain(|due| matches!(due, Due::Take(_)) || p.here().shadow.is_none());
        assert!(due.is_empty(), "an instruction comes before {due:?}: {p:?}");
        let awaited = self.wants_window && p.is_ready();
        assert!(!awaited, "an instruction is executed in the window: {p:?}");
        self.executes(b)
    }

    /// KVM_RUN returns as soon as it can.
    fn signals(&mut self) {
        surroundings::set_signal_pending(true);
        self.kicked = true;
    }

    /// The next act. False: it exits.
    fn executes<B: Levels>(&mut self, b: &mut B) -> bool {
        let act = match self.iret {
            Some(flag) => Act::Any(hardware::Act::Iret(flag)),
            None => match self.acts.pop_front() {
                Some(act) => act,
                None => {
                    self.signals();
                    b.exit(Exit::HostInterrupt);
                    return false;
                }
            },
        };
        let level = self.plain.level;
        match act {
            Act::Any(act) => return self.executes_any(b, act),
            Act::Gif(on) if B::HAS_GIF && level == Level::L1 => {
                self.seen.gif_set += u64::from(on && !self.plain.gif);
                b.sets_gif(on);
                self.plain.gif = on;
                self.retires();
                return false;
            }
            Act::Prepares(what) if level == Level::L1 => {
                if let Some(event) = self.may_inject(what) {
                    self.plain.prepared = Some(event);
                    if b.prepares(event, &self.memory) {
                        self.retires();
                        return false;
                    }
                }
            }
            Act::Enters(signal) if level == Level::L1 => {
                let kept_out = B::MOV_SS_KEEPS_OUT
                    && self.plain.here().shadow.is_some_and(|by| by != ShadowBy::Sti);
                if !kept_out {
                    if signal {
                        self.signals();
                    }
                    self.seen.entered += 1;
                    b.enters(self.plain.launched);
                    self.plain.enters();
                    self.behind_sti = false;
                    return false;
                }
            }
            Act::Calls(signal) if level == Level::L2 => {
                if signal {
                    self.signals();
                }
                b.calls();
                self.leaves::<B>(Why::Call);
                return false;
            }
            Act::Gif(_)
            | Act::Prepares(_)
            | Act::Enters(_)
            | Act::Calls(_)
            | Act::Interrupts(_) => {}
        }
        self.executes_any(b, hardware::Act::Nop)
    }

    /// An exit that completes the instruction, of two bytes.
    fn retires(&mut self) {
        let here = self.plain.here_mut();
        (here.rip, here.shadow) = (here.rip + 2, None);
    }

    /// What L1 may inject, as L2's flag and shadow are: an entry under VMX is refused with an interrupt and RFLAGS.IF clear, or with one or an
    /// NMI in a shadow (SDM vol. 3C §27.3.1.4, §27.3.1.5), and no hypervisor does so under SVM either.
    fn may_inject(&self, what: Injected) -> Option<Event> {
        let l2 = self.plain.l2();
        match what {
            Injected::Interrupt(vector) => {
                (l2.interrupts && l2.shadow.is_none()).then_some(Event::Interrupt(vector))
            }
            // Nor one into an L2 that handles one.
            Injected::Nmi => {
                let masked = self.plain.l2_is_masked();
                // With virtual NMIs one of an L1 that leaves its own to L2 is not tried.
                let rules = self.plain.rules;
                let tried = rules.hears || !rules.vnmi;
                (tried && l2.shadow.is_none() && !masked).then_some(Event::Nmi)
            }
            Injected::Exception(e) => Some(Event::Exception(e)),
        }
    }

    /// What any guest does.
    fn executes_any<B: Levels>(&mut self, b: &mut B, act: hardware::Act) -> bool {
        use hardware::Act;
        let (p, mut by) = (&mut self.plain, None);
        let mut flags = b.rflags() - Rflags::IF;
        let steps = flags.contains(Rflags::TF);
        match act {
            Act::Interrupts | Act::Signal | Act::Nop => {}
            Act::Sti => {
                by = (!p.here().interrupts).then_some(ShadowBy::Sti);
                p.here_mut().interrupts = true;
            }
            Act::Cli => p.here_mut().interrupts = false,
            Act::MovSs => by = Some(ShadowBy::MovSs),
            Act::Iret(flag) => {
                if self.iret.is_none() && b.exits_at_iret() {
                    self.iret = Some(flag);
                    return false;
                }
                self.iret = None;
                p.pops(flag);
                b.set_nmi_masked(false);
                // It pops the guest's own.
                flags -= Rflags::TF | Rflags::RF;
            }
            Act::HostInterrupt => {
                b.exit(Exit::HostInterrupt);
                return false;
            }
            Act::Page => {
                b.exit(Exit::Page(None));
                return false;
            }
            Act::Cpuid if p.level == Level::L1 || B::CPUID_IS_OURS => {
                b.exit(Exit::Cpuid);
                self.retires();
                return false;
            }
            Act::Cpuid => {}
            Act::Rdmsr => {
                b.reads_no_msr();
                p.exception = Some(Exception::gp(0));
                return false;
            }
        }
        let here = p.here_mut();
        // An IRET leaves its place.
        (here.rip, here.shadow) = (here.rip + 1, by);
        b.set_rip(here.rip);
        b.set_shadow(by);
        b.set_rflags(flags | if here.interrupts { Rflags::IF } else { Rflags::empty() });
        if steps {
            b.steps();
        }
        !steps
    }
}
