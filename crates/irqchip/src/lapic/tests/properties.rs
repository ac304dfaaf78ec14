//! Whatever is written, in whatever order: no panic, and the invariants of §10.8 hold.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::{
    thread,
    time::{Duration, Instant},
    vec,
    vec::Vec,
};

use proptest::prelude::*;
use x86::Vector;

use super::*;
use crate::message::{DeliveryMode, Shorthand, Trigger};

#[derive(Clone, Debug)]
enum Step {
    Write(u32, u32),
    WriteX2(u32, u64),
    Read(u32),
    Base(u64, bool),
    Accept(IrqMessage),
    Take,
    SelfDirect(u8),
    Deadline(u64),
    Update(u64),
    Fired(u64),
    Restore(Vec<u8>),
    Init,
}

fn message() -> impl Strategy<Value = IrqMessage> {
    (any::<u8>(), 0u32..8, any::<bool>(), any::<bool>(), any::<bool>(), any::<u32>()).prop_map(
        |(vector, mode, logical, level, assert, dest)| IrqMessage {
            vector: Vector(vector),
            delivery: DeliveryMode::from_bits(mode).unwrap_or(DeliveryMode::Fixed),
            dest_mode: if logical { DestMode::Logical } else { DestMode::Physical },
            trigger: if level { Trigger::Level } else { Trigger::Edge },
            assert,
            notify_eoi: assert,
            shorthand: Shorthand::None,
            dest,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u32..0x110, any::<u32>()).prop_map(|(r, v)| Step::Write(r << 4, v)),
        2 => (0u32..0x1000, any::<u32>()).prop_map(|(o, v)| Step::Write(o, v)),
        4 => (0x800u32..0x900, any::<u64>()).prop_map(|(m, v)| Step::WriteX2(m, v)),
        4 => (0x800u32..0x840, 0u64..0x1ff).prop_map(|(m, v)| Step::WriteX2(m, v)),
        2 => any::<u32>().prop_map(Step::Read),
        2 => (prop_oneof![
                Just(DEFAULT_BASE | base::ENABLE),
                Just(DEFAULT_BASE | base::ENABLE | base::EXTD),
                Just(DEFAULT_BASE),
                any::<u64>(),
            ], any::<bool>()).prop_map(|(b, h)| Step::Base(b, h)),
        6 => message().prop_map(Step::Accept),
        6 => Just(Step::Take),
        2 => any::<u8>().prop_map(Step::SelfDirect),
        2 => any::<u64>().prop_map(Step::Deadline),
        2 => any::<u64>().prop_map(Step::Update),
        2 => any::<u64>().prop_map(Step::Fired),
        1 => prop::collection::vec(any::<u8>(), 1024).prop_map(Step::Restore),
        1 => Just(Step::Init),
    ]
}

fn check(lapic: &Lapic) {
    let isr = lapic.isr.highest();
    assert_eq!(lapic.in_service(), (isr != 0).then_some(Vector(isr)));
    let wanted = if lapic.tpr() & 0xf0 >= isr & 0xf0 { lapic.tpr() } else { isr & 0xf0 };
    assert_eq!(lapic.ppr(), wanted);
    assert!(lapic.maybe_pending() || !lapic.irr.any(), "pending and nobody would look");
    if let Some(vector) = lapic.highest_pending() {
        assert!(vector.0 & 0xf0 > lapic.ppr() & 0xf0);
        assert!(lapic.irr.test(vector.0));
        assert_eq!(vector.0, lapic.irr.highest());
    }
    if !lapic.software_enabled.load(core::sync::atomic::Ordering::Relaxed).eq(&1) {
        for lvt in &lapic.lvt {
            assert_ne!(lvt.load(core::sync::atomic::Ordering::Relaxed) & x86::apic::lvt::MASKED, 0);
        }
    }
}

proptest! {
    #[test]
    fn any_sequence_keeps_the_invariants(steps in prop::collection::vec(step(), 1..120)) {
        let lapic = xapic(0);
        let mut now = NOW;
        let mut last = TimerChange::Count;
        for step in steps {
            match step {
                Step::Write(offset, value) => {
                    if let LapicEffect::TimerChanged(change) = lapic.write(offset, value) {
                        last = change;
                    }
                }
                Step::WriteX2(msr, value) => {
                    if let Ok(LapicEffect::TimerChanged(change)) = lapic.write_x2(msr, value) {
                        last = change;
                    }
                }
                Step::Read(offset) => {
                    lapic.read(offset, || now);
                    let _ = lapic.read_x2(offset, || now);
                }
                Step::Base(value, host) => {
                    let _ = lapic.set_base(value, BaseRules { host, ..RULES });
                }
                Step::Accept(msg) => {
                    lapic.matches(&msg);
                    let _ = lapic.accept(&msg);
                }
                Step::Take => { take(&lapic); }
                Step::SelfDirect(vector) => { lapic.self_ipi_direct(Vector(vector)); }
                Step::Deadline(at) => {
                    let clock = TimerClock { now_ns: now, guest_tsc: now, tsc_khz: 1_000_000 };
                    let _ = lapic.set_tsc_deadline(at, &clock);
                }
                Step::Update(add) => {
                    now = now.wrapping_add(add);
                    let _ = lapic.timer_update(last, now);
                }
                Step::Fired(add) => { let _ = lapic.sw_timer_expired(now.wrapping_add(add)); }
                Step::Restore(bytes) => {
                    let page: [u8; 1024] = bytes.try_into().unwrap();
                    let _ = lapic.restore(&page, false, now);
                    let mut saved = [0; 1024];
                    lapic.save(&mut saved, true, now);
                }
                Step::Init => lapic.init(Lint0::Masked),
            }
            check(&lapic);
        }
    }

    #[test]
    fn every_accepted_vector_is_taken_exactly_once(vectors in prop::collection::vec(16u8..=255, 1..200)) {
        let lapic = xapic(0);
        let mut newly = 0;
        for vector in &vectors {
            if pend(&lapic, *vector) == Accepted::Pending {
                newly += 1;
            }
        }
        let mut taken = Vec::new();
        while let Some(vector) = take(&lapic) {
            taken.push(vector);
            let _ = lapic.eoi();
        }
        let mut wanted = vectors;
        wanted.sort_unstable();
        wanted.dedup();
        wanted.reverse();
        prop_assert_eq!(newly, wanted.len());
        prop_assert_eq!(taken, wanted);
    }
}

#[test]
fn no_interrupt_is_lost_between_senders_and_owner() {
    // Three senders race with the owner. Whatever was reported as newly pending is taken.
    const EACH: usize = 20_000;
    let lapic = xapic(0);
    let (sent, taken) = thread::scope(|scope| {
        let senders: Vec<_> = (0..3u8)
            .map(|n| {
                let lapic = &lapic;
                scope.spawn(move || {
                    (0..EACH)
                        .filter(|i| {
                            let vector = 0x30 + n * 0x40 + (*i % 8) as u8 * 5;
                            pend(lapic, vector) == Accepted::Pending
                        })
                        .count()
                })
            })
            .collect();
        let mut taken = 0;
        while !senders.iter().all(|s| s.is_finished()) {
            if take(&lapic).is_some() {
                taken += 1;
                let _ = lapic.eoi();
            }
        }
        let sent: usize = senders.into_iter().map(|s| s.join().unwrap()).sum();
        while take(&lapic).is_some() {
            taken += 1;
            let _ = lapic.eoi();
        }
        (sent, taken)
    });
    assert_eq!(sent, taken);
    assert!(!lapic.irr.any());
}

#[test]
fn a_lone_interrupt_is_seen_without_another_to_follow() {
    // Each sender waits until its interrupt was taken before it sends the next, so a hint that is
    // lost once stops it for good.
    let lapic = xapic(0);
    let taken: [AtomicUsize; 2] = Default::default();
    let stuck = AtomicBool::new(false);
    thread::scope(|scope| {
        let senders: Vec<_> = (0..2usize)
            .map(|n| {
                let (lapic, taken, stuck) = (&lapic, &taken[n], &stuck);
                scope.spawn(move || {
                    for round in 0..5_000 {
                        assert_eq!(pend(lapic, 0x30 + n as u8 * 0x50), Accepted::Pending);
                        let start = Instant::now();
                        while taken.load(SeqCst) == round {
                            if start.elapsed() > Duration::from_secs(5) {
                                stuck.store(true, SeqCst);
                                return;
                            }
                            thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        while !senders.iter().all(|s| s.is_finished()) {
            if let Some(vector) = take(&lapic) {
                taken[usize::from(vector >= 0x80)].fetch_add(1, SeqCst);
                let _ = lapic.eoi();
            } else {
                thread::yield_now();
            }
        }
    });
    assert!(!stuck.load(SeqCst), "an interrupt is pending and nobody looks");
}
