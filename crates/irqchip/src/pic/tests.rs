//! The PIC pair held against the 8259A data sheet.

use std::vec::Vec;

use proptest::prelude::*;

use super::*;

/// A pair as a PC's firmware sets it up: vectors 0x20 and 0x28, nothing masked.
fn pic() -> Pic {
    let mut pic = Pic::new();
    setup(&mut pic, 0x01);
    pic
}

fn setup(pic: &mut Pic, icw4: u8) {
    for (command, data, base, wiring) in [(0x20, 0x21, 0x20, 4), (0xa0, 0xa1, 0x28, 2)] {
        pic.write(command, 0x11);
        pic.write(data, base);
        pic.write(data, wiring);
        pic.write(data, icw4);
        pic.write(data, 0);
    }
}

fn pulse(pic: &mut Pic, line: usize) {
    pic.set_line(line, 0, true);
    pic.set_line(line, 0, false);
}

fn take(pic: &mut Pic) -> Option<u8> {
    pic.output().then(|| pic.acknowledge().0)
}

const EOI: u8 = 0x20;

#[test]
fn initialisation_sets_vectors_and_clears_the_mask() {
    let mut pic = Pic::new();
    pic.write(0x21, 0xff);
    setup(&mut pic, 0x01);
    assert_eq!(pic.read(0x21), 0);
    pulse(&mut pic, 1);
    assert_eq!(take(&mut pic), Some(0x21));
    pic.write(0x20, EOI);
    pulse(&mut pic, 8);
    assert_eq!(take(&mut pic), Some(0x28));
}

#[test]
fn without_icw4_the_next_write_is_the_mask() {
    let mut pic = Pic::new();
    pic.write(0x20, 0x10);
    pic.write(0x21, 0x40);
    pic.write(0x21, 0x04);
    pic.write(0x21, 0xfd);
    assert_eq!(pic.read(0x21), 0xfd);
}

#[test]
fn lower_lines_go_first_and_hold_back_higher_ones() {
    let mut pic = pic();
    pulse(&mut pic, 5);
    assert_eq!(take(&mut pic), Some(0x25));
    pulse(&mut pic, 6);
    assert!(!pic.output());
    pulse(&mut pic, 3);
    assert_eq!(take(&mut pic), Some(0x23));
    pic.write(0x20, EOI);
    assert!(!pic.output());
    pic.write(0x20, EOI);
    assert_eq!(take(&mut pic), Some(0x26));
}

#[test]
fn the_slave_comes_through_line_two() {
    let mut pic = pic();
    pulse(&mut pic, 12);
    pulse(&mut pic, 3);
    assert_eq!(take(&mut pic), Some(0x2c));
    pic.write(0x20, 0x0b);
    assert_eq!(pic.read(0x20), 1 << 2);
    pic.write(0xa0, 0x0b);
    assert_eq!(pic.read(0xa0), 1 << 4);
    pic.write(0xa0, EOI);
    pic.write(0x20, EOI);
    assert_eq!(take(&mut pic), Some(0x23));
}

#[test]
fn a_second_slave_interrupt_waits_for_the_masters_end() {
    let mut pic = pic();
    pulse(&mut pic, 12);
    assert_eq!(take(&mut pic), Some(0x2c));
    pulse(&mut pic, 9);
    // Normal nesting: line 2 is in service at the master.
    assert!(!pic.output());
    pic.write(0x20, EOI);
    assert_eq!(take(&mut pic), Some(0x29));
}

#[test]
fn special_fully_nested_mode_lets_the_slave_interrupt_itself() {
    let mut pic = Pic::new();
    setup(&mut pic, 0x11);
    pulse(&mut pic, 12);
    assert_eq!(take(&mut pic), Some(0x2c));
    pulse(&mut pic, 9);
    assert_eq!(take(&mut pic), Some(0x29));
}

#[test]
fn an_edge_is_latched_and_a_level_is_not() {
    let mut pic = pic();
    pic.write(0x4d0, 1 << 5);
    pulse(&mut pic, 5);
    assert!(!pic.output(), "the level went away");
    pic.set_line(5, 0, true);
    assert_eq!(take(&mut pic), Some(0x25));
    pic.write(0x20, EOI);
    assert_eq!(take(&mut pic), Some(0x25), "still high");
    pic.set_line(5, 0, false);
    pic.write(0x20, EOI);
    assert!(!pic.output());
    // An edge line that stays high interrupts once.
    pic.set_line(4, 0, true);
    assert_eq!(take(&mut pic), Some(0x24));
    pic.write(0x20, EOI);
    assert!(!pic.output());
}

#[test]
fn elcr_cannot_make_the_system_lines_level() {
    let mut pic = pic();
    pic.write(0x4d0, 0xff);
    pic.write(0x4d1, 0xff);
    assert_eq!((pic.read(0x4d0), pic.read(0x4d1)), (0xf8, 0xde));
}

#[test]
fn line_status_tells_masked_coalesced_and_new() {
    let mut pic = pic();
    assert_eq!(pic.set_line(4, 0, true), LineStatus::Delivered(1));
    assert_eq!(pic.set_line(4, 1, true), LineStatus::Coalesced);
    pic.write(0x21, 1 << 5);
    assert_eq!(pic.set_line(5, 0, true), LineStatus::Ignored);
    assert_eq!(pic.set_line(16, 0, true), LineStatus::Ignored);
    pic.set_line(4, 0, false);
    pic.set_line(4, 1, false);
    assert_eq!(pic.set_line(4, 0, true), LineStatus::Coalesced, "not acknowledged yet");
}

#[test]
fn a_request_that_vanished_is_the_spurious_seventh() {
    let mut pic = pic();
    assert_eq!(pic.acknowledge(), Vector(0x27));
    pic.write(0x20, 0x0b);
    assert_eq!(pic.read(0x20), 0, "and not in service");
    // Masked at the slave between request and acknowledge: the master sees it go.
    pulse(&mut pic, 12);
    assert!(pic.output());
    pic.write(0xa1, 0xff);
    assert!(!pic.output());
    pic.write(0xa1, 0);
    assert_eq!(take(&mut pic), Some(0x2c));
}

#[test]
fn masked_requests_wait() {
    let mut pic = pic();
    pic.write(0x21, 1 << 4);
    pulse(&mut pic, 4);
    assert!(!pic.output());
    pic.write(0x20, 0x0a);
    assert_eq!(pic.read(0x20), 1 << 4);
    pic.write(0x21, 0);
    assert_eq!(take(&mut pic), Some(0x24));
}

#[test]
fn specific_eoi_ends_one_line() {
    let mut pic = pic();
    pulse(&mut pic, 5);
    take(&mut pic);
    pulse(&mut pic, 3);
    take(&mut pic);
    pic.write(0x20, 0x60 | 5);
    pic.write(0x20, 0x0b);
    assert_eq!(pic.read(0x20), 1 << 3);
    assert_eq!(pic.take_ended(), 1 << 5);
}

#[test]
fn rotation_makes_the_ended_line_the_lowest() {
    let mut pic = pic();
    pulse(&mut pic, 3);
    take(&mut pic);
    pic.write(0x20, 0xa0);
    pulse(&mut pic, 3);
    pulse(&mut pic, 5);
    assert_eq!(take(&mut pic), Some(0x25));
    pic.write(0x20, EOI);
    assert_eq!(take(&mut pic), Some(0x23));
    pic.write(0x20, EOI);
    // Set priority: line 6 lowest, so 7 first.
    pic.write(0x20, 0xc0 | 6);
    pulse(&mut pic, 0);
    pulse(&mut pic, 7);
    assert_eq!(take(&mut pic), Some(0x27));
}

#[test]
fn special_mask_mode_lets_lower_lines_through() {
    let mut pic = pic();
    pulse(&mut pic, 3);
    take(&mut pic);
    pulse(&mut pic, 6);
    assert!(!pic.output());
    pic.write(0x20, 0x68);
    pic.write(0x21, 1 << 3);
    assert_eq!(take(&mut pic), Some(0x26));
}

#[test]
fn automatic_eoi_ends_at_once_and_can_rotate() {
    let mut pic = Pic::new();
    setup(&mut pic, 0x03);
    pic.write(0x20, 0x80);
    pulse(&mut pic, 3);
    pulse(&mut pic, 4);
    assert_eq!(take(&mut pic), Some(0x23));
    assert_eq!(pic.take_ended(), 1 << 3);
    assert_eq!(take(&mut pic), Some(0x24));
    pulse(&mut pic, 3);
    pulse(&mut pic, 5);
    assert_eq!(take(&mut pic), Some(0x25), "line 4 is the lowest now");
}

#[test]
fn a_poll_acknowledges() {
    let mut pic = pic();
    pulse(&mut pic, 4);
    pic.write(0x20, 0x0c);
    assert_eq!(pic.read(0x20), 0x84);
    assert!(!pic.output());
    pic.write(0x20, 0x0c);
    assert_eq!(pic.read(0x21), 0, "nothing above it");
    assert_eq!(pic.read(0x21), 0, "the mask again");
}

#[test]
fn only_a_poll_changes_anything_by_reading() {
    let ports = [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1];
    let mut pic = pic();
    pulse(&mut pic, 9);
    let look =
        |pic: &Pic| (pic.save(Which::Master), pic.save(Which::Slave), pic.output(), pic.ended());
    for port in ports {
        assert!(!pic.polls(port), "{port:#x}");
        let before = look(&pic);
        pic.read(port);
        assert_eq!(look(&pic), before, "{port:#x}");
    }
    for (command, data) in [(0x20, 0x21), (0xa0, 0xa1)] {
        pic.write(command, 0x0c);
        let polled: Vec<u16> = ports.into_iter().filter(|port| pic.polls(*port)).collect();
        assert_eq!(polled, [command, data]);
        pic.read(command);
        assert!(!pic.polls(data));
    }
}

#[test]
fn ends_are_reported_with_the_slaves_lines() {
    let mut pic = pic();
    pulse(&mut pic, 9);
    take(&mut pic);
    pic.write(0xa0, EOI);
    pic.write(0x20, EOI);
    assert_eq!(pic.take_ended(), 1 << 9 | 1 << 2);
    assert_eq!(pic.take_ended(), 0);
}

#[test]
fn state_survives() {
    let mut pic = pic();
    pulse(&mut pic, 9);
    pulse(&mut pic, 1);
    take(&mut pic);
    let (master, slave) = (pic.save(Which::Master), pic.save(Which::Slave));
    let mut other = Pic::new();
    other.restore(Which::Master, &master);
    other.restore(Which::Slave, &slave);
    assert_eq!((other.save(Which::Master), other.save(Which::Slave)), (master, slave));
    other.write(0x20, EOI);
    assert_eq!(take(&mut other), Some(0x29));
}

proptest! {
    /// Random port writes and lines: no panic; what is acknowledged is of the best priority.
    #[test]
    fn anything_may_be_written(
        steps in prop::collection::vec((0u8..6, 0usize..18, any::<u8>()), 1..300)
    ) {
        const PORTS: [u16; 6] = [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1];
        let mut pic = Pic::new();
        for (kind, which, value) in steps {
            match kind {
                0 | 1 => pic.write(PORTS[which % 6], value),
                2 => { pic.read(PORTS[which % 6]); }
                3 => { pic.set_line(which, value, value & 1 != 0); }
                4 => {
                    let before = pic.master;
                    let output = pic.output();
                    pic.acknowledge();
                    let entered = pic.master.isr & !before.isr;
                    let best = (0..8)
                        .map(|n| 1u8 << ((n + before.priority_add) & 7))
                        .find(|bit| before.irr & !before.imr & bit != 0);
                    if !output {
                        prop_assert_eq!(entered, 0, "a spurious interrupt is not in service");
                    } else if before.auto_eoi == 0 && before.special_fully_nested_mode == 0 {
                        prop_assert_eq!(Some(entered), best);
                    }
                }
                _ => {
                    let bytes: Vec<u8> = (0..16).map(|n| value.wrapping_mul(n * 2 + 1)).collect();
                    let state = PicState {
                        irr: bytes[0], imr: bytes[1], isr: bytes[2], priority_add: bytes[3],
                        irq_base: bytes[4], poll: bytes[5], special_mask: bytes[6],
                        init_state: bytes[7], auto_eoi: bytes[8], elcr: bytes[9], elcr_mask: bytes[10],
                        ..PicState::default()
                    };
                    pic.restore(if which % 2 == 0 { Which::Slave } else { Which::Master }, &state);
                }
            }
        }
    }
}
