//! Events over the ioctls in any order: a guest that does at random what touches them, a VMM that gives, saves, restores and migrates at
//! random, and a plain processor beside it that knows what is due. Each event is taken once, where nothing holds it back, and in
//! the manual's order; a VMM that gives back what it was told of changes nothing.

#[path = "../rig/mod.rs"]
mod rig;

mod blocks;
mod hardware;
mod plain;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backend::{Event, ShadowBy};
use blocks::{Amd, Intel, Vendor};
use gannet_vcpu::{
    RunInput, UserExit, Vcpu,
    state::registers::{GivenEvents, SavedEvents},
};
use hardware::{Act, Guest, Seen, Shared};
use host::{KBox, page::Pages, std_port::test as surroundings};
use mmu::Region;
use plain::{ERRORS, Error, Plain};
use proptest::{
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use vm::VmRef;
use x86::{Exception, Rflags, Vector};

/// What the VMM does.
#[derive(Clone, Debug)]
enum Op {
    Run {
        acts: Vec<Act>,
        window: bool,
        stop: Stop,
    },
    /// KVM_INTERRUPT.
    Interrupt(Vector),
    /// KVM_NMI.
    Nmi,
    /// KVM_SET_VCPU_EVENTS of what KVM_GET_VCPU_EVENTS tells.
    EventsBack,
    /// KVM_SET_VCPU_EVENTS of anything.
    Events(SavedEvents, GivenEvents),
    /// KVM_SET_SREGS of what KVM_GET_SREGS tells.
    SregsBack,
    /// KVM_SET_REGS with RFLAGS.IF so.
    Regs(bool),
    /// All state moves to a new vCPU, by these calls in this order.
    Migrate([Part; 3]),
}

/// What keeps KVM_RUN from entering the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Nothing,
    /// `immediate_exit`.
    Immediate,
    /// A signal that waits already.
    Signal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Regs,
    Sregs,
    Events,
}

const ORDERS: [[Part; 3]; 4] = [
    [Part::Regs, Part::Sregs, Part::Events],
    [Part::Sregs, Part::Regs, Part::Events],
    [Part::Regs, Part::Events, Part::Sregs],
    [Part::Sregs, Part::Events, Part::Regs],
];

/// A VM with its one vCPU, and the guest in it.
struct Play<V: Vendor> {
    vendor: V,
    vcpu: KBox<Vcpu<V::Backend>>,
    vm: VmRef,
    guest: Shared,
    memory: Pages,
}

impl<V: Vendor> Play<V> {
    fn new(vendor: V, error: Option<Error>) -> Self {
        let memory = Pages::zeroed(6).unwrap();
        let (vcpu, vm) = Self::made(&vendor, &memory);
        let plain = Plain { rip: 0x1000, error, ..Plain::default() };
        let guest = Arc::new(Mutex::new(Guest::new(plain, vendor.returns_behind())));
        let mut this = Self { vendor, vcpu, vm, guest, memory };
        let mut regs = this.vcpu.regs();
        (regs.rip, regs.rflags) = (plain.rip, Rflags::FIXED);
        this.vcpu.set_regs(&regs);
        this
    }

    fn made(vendor: &V, memory: &Pages) -> (KBox<Vcpu<V::Backend>>, VmRef) {
        let (vcpu, vm) = vendor.vcpu();
        let region = Region { slot: 0, flags: 0, gpa: 0, size: 64 << 12, hva: memory.hpa().0 };
        vm.memory().set_region(&region, &**vm).unwrap();
        (vcpu, vm)
    }

    fn guest(&self) -> MutexGuard<'_, Guest> {
        self.guest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn act(&mut self, op: &Op) {
        match op {
            Op::Run { acts, window, stop } => self.run(acts, *window, *stop),
            Op::Interrupt(vector) => {
                self.vcpu.queue_interrupt(*vector).unwrap();
                let plain = &mut self.guest().plain;
                if matches!(plain.begun, Some(Event::Interrupt(_) | Event::Software(_))) {
                    plain.begun = None;
                }
                (plain.external, plain.told) = (Some(*vector), false);
            }
            Op::Nmi => {
                self.vcpu.queue_nmi();
                let plain = &mut self.guest().plain;
                plain.nmis = 2.min(plain.nmis + 1);
            }
            Op::EventsBack => {
                let told = self.vcpu.saved_events();
                self.compare(&told);
                self.vcpu.restore_events(&told, ALL);
                self.given_back();
            }
            Op::Events(events, given) => self.give(events, *given),
            Op::SregsBack => {
                let (sregs, interrupt) = (self.vcpu.sregs(), self.vcpu.interrupt_in_injection());
                self.vcpu.set_sregs(&sregs, interrupt).unwrap();
                let mut guest = self.guest();
                if let Some(Event::Interrupt(vector)) = guest.plain.begun {
                    (guest.plain.begun, guest.plain.external) = (None, Some(vector));
                    guest.plain.told = true;
                }
            }
            Op::Regs(flag) => {
                let mut regs = self.vcpu.regs();
                regs.rflags = (regs.rflags - Rflags::IF) | flags(*flag);
                self.vcpu.set_regs(&regs);
                let plain = &mut self.guest().plain;
                let had = plain.interrupts;
                (plain.interrupts, plain.exception) = (*flag, None);
                let closes = had && !flag && V::STI_NEEDS_FLAG;
                if closes && plain.shadow == Some(ShadowBy::Sti) {
                    plain.shadow = None;
                }
            }
            Op::Migrate(order) => self.migrate(*order),
        }
    }

    fn run(&mut self, acts: &[Act], window: bool, stop: Stop) {
        {
            let mut guest = self.guest();
            // Without NRIP save these would be read from the guest's code.
            let is_read = |act| matches!(act, Act::Cpuid | Act::Rdmsr);
            let known = |act: &&Act| self.vendor.returns_behind() || !is_read(**act);
            (guest.acts, guest.wants_window) =
                (acts.iter().filter(known).copied().collect(), window);
        }
        let left = V::steps_left(&mut self.vcpu);
        V::steps(&mut self.vcpu, &self.guest, 200usize.saturating_sub(left));
        let input = RunInput {
            request_interrupt_window: window,
            immediate_exit: stop == Stop::Immediate,
            ..RunInput::default()
        };
        surroundings::set_signal_pending(stop == Stop::Signal);
        let exit = self.vcpu.run(&input);
        surroundings::set_signal_pending(false);
        let told = self.vcpu.run_output();
        let plain = self.guest().plain;
        match exit {
            UserExit::IrqWindowOpen => assert!(plain.is_ready() && window, "a window: {plain:?}"),
            UserExit::Immediate => assert_eq!(stop, Stop::Immediate),
            UserExit::Intr => assert!(stop == Stop::Signal || acts.contains(&Act::Signal)),
            rig::UNKNOWN => assert_eq!(stop, Stop::Nothing),
            other => panic!("{other:?}, {plain:?}"),
        }
        assert_eq!(told.ready_for_interrupt_injection, plain.is_ready(), "{plain:?}");
        assert_eq!(told.if_flag, plain.interrupts, "{plain:?}");
        let events = self.vcpu.saved_events();
        self.compare(&events);
    }

    /// What KVM_GET_VCPU_EVENTS tells.
    fn compare(&self, told: &SavedEvents) {
        let p = self.guest().plain;
        let limit = if p.nmi_masked || p.begun == Some(Event::Nmi) { 1 } else { 2 };
        assert_eq!(told.nmi_pending.min(limit), p.nmis.min(limit), "NMIs, {p:?}");
        assert_eq!(told.nmi_injected, p.begun == Some(Event::Nmi), "{p:?}");
        assert_eq!(told.nmi_masked, p.nmi_masked, "the mask, {p:?}");
        assert_eq!(told.interrupt_shadow, p.shadow.is_some(), "the shadow, {p:?}");
        let interrupt = match p.begun {
            Some(Event::Interrupt(v) | Event::Software(v)) => Some(v),
            _ => p.external,
        };
        assert_eq!(told.interrupt, interrupt, "{p:?}");
        assert_eq!(told.interrupt_soft, matches!(p.begun, Some(Event::Software(_))), "{p:?}");
        let exception = match p.begun {
            Some(Event::Exception(e)) => Some(e.vector),
            _ => p.exception.map(|e| e.vector),
        };
        assert_eq!(told.exception.map(|e| e.vector), exception, "{p:?}");
    }

    /// What was told of comes back: a begun delivery of an interrupt and one that waits look the same.
    fn given_back(&mut self) {
        let p = &mut self.guest().plain;
        if let Some(Event::Interrupt(vector)) = p.begun {
            (p.begun, p.external) = (None, Some(vector));
        }
        (p.told, p.given) = (p.external.is_some(), true);
    }

    fn give(&mut self, e: &SavedEvents, given: GivenEvents) {
        let told = self.vcpu.saved_events();
        self.compare(&told);
        self.vcpu.restore_events(e, given);
        let p = &mut self.guest().plain;
        // A second one that waits behind the mask may be gone already, or go later.
        p.nmis = told.nmi_pending;
        (p.begun, p.exception, p.external, p.told) = (None, None, None, false);
        p.given = true;
        match e.exception {
            Some(x) if e.exception_injected => p.begun = Some(Event::Exception(x)),
            x => p.exception = x,
        }
        if e.nmi_injected && p.begun.is_none() {
            p.begun = Some(Event::Nmi);
        }
        match e.interrupt {
            Some(v) if e.interrupt_soft => p.begun = p.begun.or(Some(Event::Software(v))),
            // One is injected at a time: it waits, and may be the one that is injected.
            v => (p.external, p.told) = (v, p.begun.is_none()),
        }
        p.nmi_masked = e.nmi_masked;
        if given.nmi_pending {
            p.nmis = e.nmi_pending;
        }
        if given.interrupt_shadow {
            p.shadow = e.interrupt_shadow.then_some(e.shadow_by);
        }
    }

    fn migrate(&mut self, order: [Part; 3]) {
        let (regs, sregs) = (self.vcpu.regs(), self.vcpu.sregs());
        let interrupt = self.vcpu.interrupt_in_injection();
        let events = self.vcpu.saved_events();
        self.compare(&events);
        let (vcpu, vm) = Self::made(&self.vendor, &self.memory);
        (self.vcpu, self.vm) = (vcpu, vm);
        for part in order {
            match part {
                Part::Regs => self.vcpu.set_regs(&regs),
                Part::Sregs => self.vcpu.set_sregs(&sregs, interrupt).unwrap(),
                Part::Events => self.vcpu.restore_events(&events, ALL),
            }
        }
        self.given_back();
        if order[2] == Part::Regs {
            // As on stock KVM.
            self.guest().plain.exception = None;
        }
    }
}

/// All that KVM_GET_VCPU_EVENTS says is valid.
const ALL: GivenEvents =
    GivenEvents { interrupt_shadow: true, nmi_pending: true, triple_fault: true };

fn flags(interrupts: bool) -> Rflags {
    if interrupts { Rflags::IF | Rflags::FIXED } else { Rflags::FIXED }
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => Just(Act::Nop),
        3 => Just(Act::Sti),
        2 => Just(Act::Cli),
        2 => Just(Act::MovSs),
        3 => any::<bool>().prop_map(Act::Iret),
        2 => Just(Act::Cpuid),
        1 => Just(Act::Rdmsr),
        1 => Just(Act::Page),
        1 => Just(Act::HostInterrupt),
        1 => Just(Act::Signal),
        2 => Just(Act::Interrupts),
    ];
    prop::collection::vec(act, 0..12)
}

fn exceptions() -> impl Strategy<Value = Exception> {
    prop_oneof![
        Just(Exception::gp(0)),
        Just(Exception::ud()),
        Just(Exception { vector: Vector(3), error_code: None, payload: None }),
    ]
}

fn events() -> impl Strategy<Value = (SavedEvents, GivenEvents)> {
    let vector = (32..=255u8).prop_map(Vector);
    let which = (prop::option::weighted(0.3, exceptions()), prop::option::weighted(0.4, vector));
    let flags = (any::<[bool; 7]>(), 0..3u32, any::<bool>());
    (which, flags).prop_map(|((exception, interrupt), (f, nmi_pending, by_mov))| {
        let [exception_injected, interrupt_soft, interrupt_shadow, nmi_injected, nmi_masked, a, b] =
            f;
        let events = SavedEvents {
            exception,
            exception_injected,
            interrupt,
            interrupt_soft: interrupt_soft && interrupt.is_some(),
            interrupt_shadow,
            shadow_by: if by_mov { ShadowBy::MovSs } else { ShadowBy::Sti },
            nmi_injected,
            nmi_pending,
            nmi_masked,
            ..SavedEvents::default()
        };
        (events, GivenEvents { interrupt_shadow: a, nmi_pending: b, triple_fault: true })
    })
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let stop =
        prop_oneof![8 => Just(Stop::Nothing), 1 => Just(Stop::Immediate), 1 => Just(Stop::Signal)];
    let run = (acts(), prop::bool::weighted(0.3), stop);
    let op = prop_oneof![
        6 => run.prop_map(|(acts, window, stop)| Op::Run { acts, window, stop }),
        3 => (32..=255u8).prop_map(|v| Op::Interrupt(Vector(v))),
        2 => Just(Op::Nmi),
        1 => Just(Op::EventsBack),
        1 => events().prop_map(|(events, given)| Op::Events(events, given)),
        1 => Just(Op::SregsBack),
        1 => any::<bool>().prop_map(Op::Regs),
        1 => prop::sample::select(&ORDERS[..]).prop_map(Op::Migrate),
    ];
    prop::collection::vec(op, 1..40)
}

/// Plays them, on a thread of their own: who fails in the midst of an entry leaves the thread in the guest.
fn play<V: Vendor + Send>(vendor: V, ops: &[Op], error: Option<Error>) -> Result<Seen, String> {
    let act = || {
        let mut play = Play::new(vendor, error);
        for op in ops {
            play.act(op);
        }
        play.guest().seen
    };
    std::thread::scope(|threads| threads.spawn(act).join()).map_err(|why| {
        let said = why.downcast::<String>().map(|said| *said);
        said.unwrap_or_else(|why| why.downcast::<&str>().map_or("?".into(), |s| s.to_string()))
    })
}

/// The same sequences each time.
fn sequences(seed: u8) -> impl Iterator<Item = Vec<Op>> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let ops = ops();
    std::iter::from_fn(move || Some(ops.new_tree(&mut runner).ok()?.current()))
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::default() })]

    #[test]
    fn each_event_is_taken_once_and_in_order_on_intel(ops in ops()) {
        let done = play(Intel, &ops, None);
        prop_assert!(done.is_ok(), "{}", done.unwrap_err());
    }

    #[test]
    fn each_event_is_taken_once_and_in_order_on_amd(
        ops in ops(),
        vnmi in any::<bool>(),
        nrip_save in any::<bool>(),
    ) {
        let done = play(Amd { nrip_save, vnmi }, &ops, None);
        prop_assert!(done.is_ok(), "{}", done.unwrap_err());
    }
}

/// A model that is wrong is found out, so that a vCPU that is wrong is.
#[test]
fn a_model_with_an_error_is_found_out() {
    for error in ERRORS {
        let intel = sequences(1).take(500).any(|ops| play(Intel, &ops, Some(error)).is_err());
        let amd = Amd { nrip_save: true, vnmi: false };
        let amd = sequences(2).take(500).any(|ops| play(amd, &ops, Some(error)).is_err());
        assert!(intel && amd, "{error:?} is found on Intel {intel}, on AMD {amd}");
    }
}

/// What the sequences come by: none of it is never.
#[test]
fn the_sequences_come_by_everything() {
    let amd = Amd { nrip_save: true, vnmi: false };
    let runs = [
        sequences(3).take(200).map(|ops| play(Intel, &ops, None)).collect::<Vec<_>>(),
        sequences(4).take(200).map(|ops| play(amd, &ops, None)).collect(),
    ];
    for runs in runs {
        let seen = runs.into_iter().map(Result::unwrap).fold(Seen::default(), Seen::with);
        assert!(seen.delivered.iter().all(|n| *n > 5), "{seen:?}");
        assert!(seen.interrupted > 20 && seen.windows > 20, "{seen:?}");
        assert!(seen.instructions > 1000, "{seen:?}");
    }
}
