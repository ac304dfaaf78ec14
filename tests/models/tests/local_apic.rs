//! The local APIC between a sender, its owner and a sleep: nothing that was requested is overlooked for good.

use gannet_models::{
    Accepted, IrqMessage, Lapic, LapicEffect, Trigger,
    atomic::{AtomicU32, Ordering::*, fence, weakened},
    explore, fails_with,
    lapic::CpuRole,
};
use loom::{sync::Arc, thread};
use vm::kick::KickState;
use x86::Vector;

const SVR: u32 = 0xf0;
/// In three words of the IRR, the first two in one.
const LOW: Vector = Vector(0x41);
const NEXT: Vector = Vector(0x51);
const FAR: Vector = Vector(0xc1);

fn lapic() -> Lapic {
    let lapic = Lapic::new(0, CpuRole::Bootstrap);
    let _ = lapic.write(SVR, 0x1ff);
    lapic
}

fn request(lapic: &Lapic, vector: Vector) {
    assert_ne!(lapic.accept_fixed(vector, Trigger::Edge), Accepted::Ignored);
}

fn is_requested(lapic: &Lapic, vector: Vector) -> bool {
    let word = lapic.read(0x200 + u32::from(vector.0 >> 5) * 16, || 0);
    word & 1 << (vector.0 & 31) != 0
}

/// The owner takes an interrupt while a sender requests another.
fn taken_beside_a_request(taken: Vector, sent: Vector) {
    explore(3, move || {
        let lapic = Arc::new(lapic());
        request(&lapic, taken);
        let sender = lapic.clone();
        let sender = thread::spawn(move || request(&sender, sent));
        let first = lapic.highest_pending().unwrap();
        lapic.ack(first);
        assert_eq!(lapic.eoi(), LapicEffect::Eoi { vector: first, level: false });
        sender.join().unwrap();
        let left = if first == taken { sent } else { taken };
        assert!(is_requested(&lapic, left) && !is_requested(&lapic, first));
        assert!(lapic.maybe_pending(), "lost: requested without the hint");
    });
}

#[test]
fn a_request_beside_a_taken_interrupt_keeps_the_hint() {
    taken_beside_a_request(LOW, NEXT);
    taken_beside_a_request(LOW, FAR);
    taken_beside_a_request(FAR, LOW);
}

#[test]
fn without_a_barrier_between_the_hint_and_the_bits_a_request_is_overlooked() {
    assert!(fails_with("lost", || weakened(|| taken_beside_a_request(LOW, FAR))));
}

/// The owner passes requests on to a CPU that serves the APIC.
fn drained_beside_requests() {
    explore(3, || {
        let lapic = Arc::new(lapic());
        let (a, b) = (lapic.clone(), lapic.clone());
        let a = thread::spawn(move || request(&a, LOW));
        let b = thread::spawn(move || request(&b, FAR));
        let first = lapic.drain();
        a.join().unwrap();
        b.join().unwrap();
        // As every entry does it: the hint alone is asked.
        let second = if lapic.maybe_pending() { lapic.drain() } else { [0; 4] };
        let all: Vec<u32> =
            first.iter().zip(second).map(|(x, y)| x.count_ones() + y.count_ones()).collect();
        assert_eq!(all, [0, 1, 0, 1], "lost: requested and not passed on");
        assert!(!lapic.maybe_pending());
    });
}

#[test]
fn what_is_drained_beside_senders_is_all_there_is_or_the_hint_stays() {
    drained_beside_requests();
}

#[test]
fn a_drain_without_barriers_loses_a_request() {
    assert!(fails_with("lost", || weakened(drained_beside_requests)));
}

/// A message whose end is waited for comes while the owner takes and ends what it finds.
fn ended_beside(send: fn(&Lapic)) {
    explore(3, move || {
        let lapic = Arc::new(lapic());
        let sender = lapic.clone();
        let sender = thread::spawn(move || send(&sender));
        if let Some(vector) = lapic.highest_pending() {
            lapic.ack(vector);
            let end = LapicEffect::Eoi { vector, level: true };
            assert_eq!(lapic.eoi(), end, "an end that nobody hears of");
        }
        sender.join().unwrap();
    });
}

fn waiting_for_the_end() -> IrqMessage {
    IrqMessage { notify_eoi: true, ..IrqMessage::fixed(LOW, 0) }
}

#[test]
fn who_waits_for_an_end_is_told_however_soon_it_comes() {
    ended_beside(|lapic| {
        let _ = lapic.accept(&waiting_for_the_end());
    });
    ended_beside(|lapic| {
        let _ = lapic.accept_fixed(LOW, Trigger::Level);
    });
}

#[test]
fn an_end_that_is_waited_for_after_the_request_is_missed() {
    assert!(fails_with("nobody hears", || ended_beside(|lapic| {
        let _ = lapic.accept(&IrqMessage::fixed(LOW, 0));
        let _ = lapic.accept(&waiting_for_the_end());
    })));
}

const CPU: u32 = 3;

/// A vCPU, the interrupt line of its CPU, and its thread's sleep.
struct Vcpu {
    lapic: Lapic,
    state: KickState<AtomicU32>,
    ipi: AtomicU32,
    /// What `rcuwait` and the task's state are: the thread is marked as sleeping.
    asleep: AtomicU32,
}

/// As the code does it.
const AS_WRITTEN: u32 = 0;
/// The vCPU looks, and is marked as sleeping after that.
const LOOKS_FIRST: u32 = 1;
/// The sender wakes, and requests after that.
const WAKES_FIRST: u32 = 2;
/// The vCPU looks, and enters the guest's mode after that.
const LOOKS_OUTSIDE: u32 = 3;

impl Vcpu {
    fn new() -> Arc<Self> {
        let (ipi, asleep) = (AtomicU32::new(0), AtomicU32::new(0));
        Arc::new(Self { lapic: lapic(), state: KickState::new(0), ipi, asleep })
    }

    /// `VcpuShared::kick`.
    fn kick(&self) {
        // rcuwait_wake_up() begins with a full barrier.
        fence(SeqCst);
        if self.asleep.swap(0, AcqRel) != 0 {
            return;
        }
        if let Some(cpu) = self.state.kick() {
            assert_eq!(cpu, CPU);
            self.ipi.swap(1, AcqRel);
        }
    }

    fn send<const HOW: u32>(&self, vector: Vector) {
        if HOW == WAKES_FIRST {
            self.kick();
            request(&self.lapic, vector);
        } else {
            request(&self.lapic, vector);
            self.kick();
        }
    }

    fn take(&self) -> bool {
        let vector = self.lapic.highest_pending();
        if let Some(vector) = vector {
            self.lapic.ack(vector);
            let _ = self.lapic.eoi();
        }
        vector.is_some()
    }

    /// Runs until the thread sleeps, in HLT.
    fn run_to_halt<const HOW: u32>(&self) {
        loop {
            assert!(self.state.enter(CPU));
            let took = self.lapic.maybe_pending() && self.take();
            self.state.leave();
            if took {
                continue;
            }
            // HLT: `Waiter::wait`.
            let early = HOW == LOOKS_FIRST && self.lapic.highest_pending().is_some();
            self.asleep.store(1, Relaxed);
            // set_current_state() ends with a full barrier.
            fence(SeqCst);
            if early || HOW != LOOKS_FIRST && self.lapic.highest_pending().is_some() {
                self.asleep.swap(0, AcqRel);
                continue;
            }
            return;
        }
    }

    /// Runs until the guest runs and nothing ends its run.
    fn run_in_guest<const HOW: u32>(&self) {
        loop {
            let early = HOW == LOOKS_OUTSIDE && self.lapic.maybe_pending();
            assert!(self.state.enter(CPU));
            let look = if HOW == LOOKS_OUTSIDE { early } else { self.lapic.maybe_pending() };
            let took = look && self.take();
            if !took && self.ipi.swap(0, AcqRel) == 0 {
                return;
            }
            self.state.leave();
        }
    }
}

fn sleeps_beside_senders<const HOW: u32>() {
    explore(2, || {
        let vcpu = Vcpu::new();
        let (a, b) = (vcpu.clone(), vcpu.clone());
        let a = thread::spawn(move || a.send::<HOW>(LOW));
        let b = thread::spawn(move || b.send::<HOW>(FAR));
        vcpu.run_to_halt::<HOW>();
        a.join().unwrap();
        b.join().unwrap();
        let sleeps = vcpu.asleep.load(Acquire) != 0;
        assert!(!sleeps || vcpu.lapic.highest_pending().is_none(), "lost: asleep, and requested");
    });
}

#[test]
fn a_vcpu_does_not_sleep_beside_a_request() {
    sleeps_beside_senders::<AS_WRITTEN>();
}

#[test]
fn a_look_before_the_mark_and_a_wake_before_the_request_are_found_out() {
    assert!(fails_with("lost", sleeps_beside_senders::<LOOKS_FIRST>));
    assert!(fails_with("lost", sleeps_beside_senders::<WAKES_FIRST>));
}

fn enters_beside_senders<const HOW: u32>() {
    explore(2, || {
        let vcpu = Vcpu::new();
        let (a, b) = (vcpu.clone(), vcpu.clone());
        let a = thread::spawn(move || a.send::<HOW>(LOW));
        let b = thread::spawn(move || b.send::<HOW>(FAR));
        vcpu.run_in_guest::<HOW>();
        a.join().unwrap();
        b.join().unwrap();
        let ends = vcpu.ipi.load(Acquire) != 0;
        assert!(
            ends || vcpu.lapic.highest_pending().is_none(),
            "lost: in the guest, and requested"
        );
    });
}

#[test]
fn a_guest_does_not_run_on_beside_a_request() {
    enters_beside_senders::<AS_WRITTEN>();
}

#[test]
fn a_look_before_the_mode_and_a_kick_before_the_request_are_found_out() {
    assert!(fails_with("lost", enters_beside_senders::<LOOKS_OUTSIDE>));
    assert!(fails_with("lost", enters_beside_senders::<WAKES_FIRST>));
}
