//! The I/O APIC held against the 82093AA data sheet.

use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::message::BROADCAST;

const LEVEL: u32 = 1 << 15;
const MASKED: u32 = 1 << 16;

/// An I/O APIC and what it sent.
#[derive(Default)]
struct Bench {
    chip: IoApic,
    sent: Vec<IrqMessage>,
}

impl Bench {
    fn write_register(&mut self, register: u32, value: u32) {
        let _ = self.chip.write(REG_SELECT, register);
        self.store(REG_WINDOW, value);
    }

    fn store(&mut self, offset: u64, value: u32) {
        let Self { chip, sent } = self;
        let Written { waiting, .. } = chip.write(offset, value);
        chip.retry(waiting, &mut |m| {
            sent.push(m);
            true
        });
    }

    fn register(&mut self, register: u32) -> u32 {
        let _ = self.chip.write(REG_SELECT, register);
        self.chip.read(REG_WINDOW)
    }

    fn program(&mut self, pin: u32, low: u32, dest: u32) {
        self.write_register(0x11 + pin * 2, dest << 24);
        self.write_register(0x10 + pin * 2, low);
    }

    fn line(&mut self, pin: usize, level: bool) -> LineStatus {
        let Self { chip, sent } = self;
        chip.set_line(pin, 0, level, &mut |m| {
            sent.push(m);
            true
        })
    }

    fn eoi(&mut self, vector: u8) -> (u32, u32) {
        let pins = self.chip.eoi(Vector(vector));
        let Self { chip, sent } = self;
        let put_off = chip.reassert(pins, &mut |m| {
            sent.push(m);
            true
        });
        (pins, put_off)
    }

    fn vectors(&mut self) -> Vec<u8> {
        self.sent.drain(..).map(|m| m.vector.0).collect()
    }
}

#[test]
fn after_reset_every_pin_is_masked() {
    let mut bench = Bench::default();
    for pin in 0..PINS as u32 {
        assert_eq!(bench.register(0x10 + pin * 2), MASKED);
        assert_eq!(bench.line(pin as usize, true), LineStatus::Ignored);
    }
    assert_eq!(bench.register(1), 0x17_0011);
    assert_eq!(bench.line(24, true), LineStatus::Ignored);
    assert!(bench.sent.is_empty());
}

#[test]
fn an_edge_sends_once_per_rise() {
    let mut bench = Bench::default();
    bench.program(4, 0x51, 3);
    assert_eq!(bench.line(4, true), LineStatus::Delivered(1));
    assert_eq!(bench.line(4, true), LineStatus::Coalesced);
    bench.line(4, false);
    assert_eq!(bench.line(4, true), LineStatus::Delivered(1));
    assert_eq!(bench.vectors(), [0x51, 0x51]);
    assert_eq!(bench.register(0x18) & 1 << 14, 0, "an edge has no remote IRR");
}

#[test]
fn a_level_waits_for_its_end_and_comes_again_while_it_is_high() {
    let mut bench = Bench::default();
    bench.program(10, LEVEL | 0x61, 0);
    assert_eq!(bench.line(10, true), LineStatus::Delivered(1));
    assert_eq!(bench.register(0x24), LEVEL | 1 << 14 | 0x61);
    bench.line(10, false);
    assert_eq!(bench.line(10, true), LineStatus::Coalesced);
    assert_eq!(bench.vectors(), [0x61]);
    assert_eq!(bench.eoi(0x61), (1 << 10, 0));
    assert_eq!(bench.vectors(), [0x61], "still high");
    bench.line(10, false);
    assert_eq!(bench.eoi(0x61), (1 << 10, 0));
    assert_eq!(bench.vectors(), []);
    assert_eq!(bench.eoi(0x62), (0, 0));
}

#[test]
fn a_line_is_the_or_of_its_sources() {
    let mut bench = Bench::default();
    bench.program(10, LEVEL | 0x61, 0);
    bench.line(10, true);
    bench.chip.set_line(10, 1, true, &mut |_| true);
    bench.line(10, false);
    bench.sent.clear();
    bench.eoi(0x61);
    assert_eq!(bench.vectors(), [0x61]);
    bench.chip.set_line(10, 1, false, &mut |_| true);
    bench.eoi(0x61);
    assert_eq!(bench.vectors(), []);
}

#[test]
fn a_level_under_the_mask_goes_out_when_it_is_lifted_and_an_edge_is_lost() {
    let mut bench = Bench::default();
    bench.program(5, MASKED | LEVEL | 0x71, 0);
    bench.program(6, MASKED | 0x72, 0);
    assert_eq!(bench.line(5, true), LineStatus::Ignored);
    assert_eq!(bench.line(6, true), LineStatus::Ignored);
    bench.program(5, LEVEL | 0x71, 0);
    bench.program(6, 0x72, 0);
    assert_eq!(bench.vectors(), [0x71]);
    bench.line(6, false);
    bench.line(6, true);
    assert_eq!(bench.vectors(), [0x72]);
}

#[test]
fn what_a_store_lets_go_is_told_and_not_sent() {
    let mut bench = Bench::default();
    bench.program(5, MASKED | LEVEL | 0x71, 0);
    bench.program(6, MASKED | 0x72, 0);
    bench.line(5, true);
    bench.line(6, true);
    let mut write = |register, value| {
        let _ = bench.chip.write(REG_SELECT, register);
        bench.chip.write(REG_WINDOW, value)
    };
    assert_eq!(write(0x1a, MASKED | LEVEL | 0x73), Written::default());
    assert_eq!(write(0x1a, LEVEL | 0x73), Written { unmasked: Some(5), waiting: 1 << 5 });
    assert_eq!(write(0x1c, 0x72), Written { unmasked: Some(6), waiting: 0 });
    assert_eq!(write(0x40, 0), Written::default());
}

#[test]
fn switching_to_edge_and_back_drops_remote_irr() {
    let mut bench = Bench::default();
    bench.program(5, LEVEL | 0x71, 0);
    bench.line(5, true);
    bench.line(5, false);
    bench.program(5, MASKED | 0x71, 0);
    bench.program(5, LEVEL | 0x71, 0);
    assert_eq!(bench.register(0x1a), LEVEL | 0x71);
    bench.line(5, true);
    assert_eq!(bench.vectors(), [0x71, 0x71]);
}

#[test]
fn read_only_bits_cannot_be_written() {
    let mut bench = Bench::default();
    bench.program(5, MASKED | LEVEL | 1 << 14 | 1 << 12 | 0xfffe_0071, 0xab);
    assert_eq!(bench.register(0x1a), MASKED | LEVEL | 0x71);
    assert_eq!(bench.register(0x1b), 0xab00_0000);
    bench.write_register(0, 0xffff_ffff);
    assert_eq!(bench.register(0), 0x0f00_0000);
    bench.write_register(1, 0);
    assert_eq!(bench.register(1), 0x17_0011);
    assert_eq!(bench.register(0x40), 0, "no such entry");
    bench.write_register(0xff, 1);
}

#[test]
fn entries_become_messages() {
    let mut bench = Bench::default();
    bench.program(7, LEVEL | 1 << 11 | 1 << 8 | 0x44, 0x0f);
    bench.line(7, true);
    let msg = bench.sent[0];
    assert_eq!((msg.vector, msg.dest), (Vector(0x44), 0x0f));
    assert_eq!(msg.delivery, DeliveryMode::LowestPriority);
    assert_eq!((msg.dest_mode, msg.trigger), (DestMode::Logical, Trigger::Level));
    assert!(!msg.notify_eoi);
    bench.sent.clear();
    bench.chip.set_listeners(1 << 8);
    bench.program(8, 4 << 8, 0xff);
    bench.line(8, true);
    let msg = bench.sent[0];
    assert_eq!((msg.delivery, msg.dest), (DeliveryMode::Nmi, BROADCAST));
    assert!(msg.notify_eoi);
}

#[test]
fn nobody_arbitrates_for_a_physical_broadcast() {
    const LOGICAL: u32 = 1 << 11;
    let mut bench = Bench::default();
    for (low, dest, mode) in [
        (0x151, 0xff, DeliveryMode::Fixed),
        (0x151, 0xfe, DeliveryMode::LowestPriority),
        (LOGICAL | 0x151, 0xff, DeliveryMode::LowestPriority),
    ] {
        bench.program(4, low, dest);
        bench.line(4, true);
        bench.line(4, false);
        assert_eq!(bench.sent.pop().map(|m| m.delivery), Some(mode), "{low:#x} {dest:#x}");
    }
}

#[test]
fn a_reserved_delivery_mode_sends_nothing() {
    let mut bench = Bench::default();
    bench.program(7, 3 << 8 | 0x44, 0);
    assert_eq!(bench.line(7, true), LineStatus::Ignored);
    assert!(bench.sent.is_empty());
}

#[test]
fn pins_that_share_a_vector_end_together() {
    let mut bench = Bench::default();
    bench.program(3, LEVEL | 0x61, 0);
    bench.program(9, LEVEL | 0x61, 0);
    bench.program(11, 0x61, 0);
    bench.line(3, true);
    bench.line(9, true);
    bench.vectors();
    assert_eq!(bench.eoi(0x61).0, 1 << 3 | 1 << 9 | 1 << 11);
    assert_eq!(bench.vectors(), [0x61, 0x61]);
}

#[test]
fn a_pin_that_is_never_silenced_is_put_off() {
    let mut bench = Bench::default();
    bench.program(3, LEVEL | 0x61, 0);
    bench.line(3, true);
    let mut rounds = 0;
    loop {
        rounds += 1;
        if bench.eoi(0x61).1 != 0 {
            break;
        }
    }
    assert_eq!(rounds, u32::from(STORM_LIMIT));
    bench.vectors();
    bench.chip.retry(1 << 3, &mut |m| {
        assert_eq!(m.vector, Vector(0x61));
        true
    });
    // Delivered again, so it waits for its end again.
    bench.chip.retry(1 << 3, &mut |_| unreachable!());
    // A pin that was silenced in between starts counting anew.
    bench.line(3, false);
    bench.eoi(0x61);
    bench.line(3, true);
    assert_eq!(bench.eoi(0x61).1, 0);
}

#[test]
fn state_survives_and_what_is_asserted_is_delivered_again() {
    let mut bench = Bench::default();
    bench.program(3, LEVEL | 0x61, 2);
    bench.program(4, MASKED | LEVEL | 0x62, 2);
    bench.write_register(0, 5 << 24);
    bench.line(4, true);
    let state = bench.chip.save();
    assert_eq!((state.id, state.irr), (5, 1 << 4));
    let mut other = Bench::default();
    other.chip.restore(&IoApicState { irr: 1 << 3 | 1 << 4, ..state }, &mut |m| {
        assert_eq!(m.vector, Vector(0x61));
        true
    });
    assert_eq!(other.chip.save().irr, 1 << 3 | 1 << 4);
    assert_eq!(other.register(0x16), LEVEL | 1 << 14 | 0x61);
    // One that waits for its end keeps waiting.
    let waiting = other.chip.save();
    let mut third = IoApic::new();
    third.restore(&waiting, &mut |_| unreachable!());
    assert_eq!(third.save(), waiting);
}

#[test]
fn an_edge_that_was_sent_is_not_saved_and_one_under_the_mask_is() {
    let mut bench = Bench::default();
    bench.program(4, 0x51, 0);
    bench.program(5, MASKED | 0x52, 0);
    bench.line(4, true);
    bench.line(5, true);
    assert_eq!(bench.chip.save().irr, 1 << 5);
    assert_eq!(bench.line(4, true), LineStatus::Coalesced, "its line is high all the same");
    // A rise under the mask is another one.
    bench.line(4, false);
    bench.program(4, MASKED | 0x51, 0);
    bench.line(4, true);
    assert_eq!(bench.chip.save().irr, 1 << 4 | 1 << 5);
    // A level is asserted as long as its line is high, whatever was sent before.
    bench.program(6, 0x53, 0);
    bench.line(6, true);
    bench.program(6, LEVEL | 0x53, 0);
    assert_eq!(bench.chip.save().irr, 1 << 4 | 1 << 5 | 1 << 6);
}

proptest! {
    /// Random programming and lines: no panic; a level pin with remote IRR never sends; a rising
    /// edge on an unmasked edge pin always sends.
    #[test]
    fn no_edge_is_lost_and_no_level_is_doubled(
        steps in prop::collection::vec((0u8..6, 0usize..26, any::<u32>(), any::<bool>()), 1..200)
    ) {
        let mut bench = Bench::default();
        for (kind, pin, value, flag) in steps {
            let before = bench.chip.state;
            bench.sent.clear();
            match kind {
                0 => bench.write_register(value & 0xff, value.rotate_left(7)),
                1 => bench.program(pin as u32, value & 0x1_8fff, value >> 24),
                2 => { bench.eoi(value as u8); }
                3 => bench.store(value.into(), value),
                4 => { bench.chip.read(u64::from(value)); }
                _ => {
                    bench.line(pin, flag);
                    let entry = before.redirtbl.get(pin).copied().unwrap_or(rte::MASKED);
                    let valid = message(entry, DestRules::default()).is_some() && entry & rte::MASKED == 0;
                    let was_high = before.irr & 1u32.checked_shl(pin as u32).unwrap_or(0) != 0;
                    let wanted = valid && flag && if entry & rte::LEVEL != 0 {
                        entry & rte::REMOTE_IRR == 0
                    } else {
                        !was_high
                    };
                    prop_assert_eq!(bench.sent.len(), usize::from(wanted));
                }
            }
        }
    }
}
