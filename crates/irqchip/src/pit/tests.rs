//! The PIT held against the 8254 data sheet.

use proptest::prelude::*;

use super::channel::ns_to_ticks;
use super::*;

const NOW: u64 = 5_000_000_000;

/// Host time `ticks` of the input clock after [`NOW`].
fn at(ticks: u64) -> u64 {
    NOW + ticks_to_ns(ticks)
}

fn program(pit: &mut Pit, channel: u16, mode: u8, count: u16, now: u64) {
    pit.write(0x43, (channel as u8) << 6 | 0x30 | mode << 1, now);
    pit.write(0x40 + channel, count as u8, now);
    pit.write(0x40 + channel, (count >> 8) as u8, now);
}

fn count(pit: &mut Pit, channel: u16, now: u64) -> u16 {
    pit.write(0x43, (channel as u8) << 6, now);
    u16::from(pit.read(0x40 + channel, now)) | u16::from(pit.read(0x40 + channel, now)) << 8
}

fn status(pit: &mut Pit, channel: u16, now: u64) -> u8 {
    pit.write(0x43, 0xe0 | 2 << channel, now);
    pit.read(0x40 + channel, now)
}

const OUT: u8 = 0x80;
const NULL_COUNT: u8 = 0x40;

#[test]
fn mode_0_counts_down_once_and_raises_its_output() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 0, 1000, NOW);
    assert_eq!(count(&mut pit, 0, at(0)), 1000);
    assert_eq!(count(&mut pit, 0, at(400)), 600);
    assert_eq!(status(&mut pit, 0, at(999)) & OUT, 0);
    assert_eq!(status(&mut pit, 0, at(1000)) & OUT, OUT);
    assert_eq!(count(&mut pit, 0, at(1001)), 0xffff, "and goes on");
    assert_eq!(pit.next_expiry(), Some(at(1000)));
    assert!(!pit.expired(at(999)));
    assert!(pit.expired(at(1000)));
    assert_eq!(pit.next_expiry(), None);
}

#[test]
fn mode_2_is_periodic_and_low_for_one_tick() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 2, 11932, NOW);
    assert_eq!(count(&mut pit, 0, at(0)), 11932);
    assert_eq!(count(&mut pit, 0, at(11931)), 1);
    assert_eq!(status(&mut pit, 0, at(11931)) & OUT, 0);
    assert_eq!(status(&mut pit, 0, at(11930)) & OUT, OUT);
    assert_eq!(status(&mut pit, 0, at(11932)) & OUT, OUT);
    assert_eq!(count(&mut pit, 0, at(11932 + 5)), 11927);
}

#[test]
fn mode_3_is_a_square_wave_counted_by_two() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 2, 3, 1001, NOW);
    pit.write_speaker(1, NOW);
    assert_eq!(status(&mut pit, 2, at(500)) & OUT, OUT);
    assert_eq!(status(&mut pit, 2, at(501)) & OUT, 0, "odd counts are high for one tick more");
    assert_eq!(status(&mut pit, 2, at(1001)) & OUT, OUT);
    program(&mut pit, 2, 3, 1000, NOW);
    assert_eq!(count(&mut pit, 2, at(100)), 800);
    assert_eq!(count(&mut pit, 2, at(600)), 800);
}

#[test]
fn mode_4_strobes_once_by_software() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 4, 500, NOW);
    assert_eq!(status(&mut pit, 0, at(499)) & OUT, OUT);
    assert_eq!(status(&mut pit, 0, at(500)) & OUT, 0);
    assert_eq!(status(&mut pit, 0, at(501)) & OUT, OUT);
    assert_eq!(pit.next_expiry(), Some(at(500)));
}

#[test]
fn modes_1_and_5_wait_for_the_gate_to_rise() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 2, 1, 1000, NOW);
    assert_eq!(status(&mut pit, 2, at(10)) & OUT, OUT, "not triggered");
    pit.write_speaker(1, at(10));
    assert_eq!(status(&mut pit, 2, at(11)) & OUT, 0);
    assert_eq!(status(&mut pit, 2, at(1011)) & OUT, OUT);
    pit.write_speaker(0, at(2000));
    pit.write_speaker(1, at(3000));
    assert_eq!(status(&mut pit, 2, at(3001)) & OUT, 0, "retriggered");
    program(&mut pit, 0, 1, 1000, NOW);
    assert_eq!(pit.next_expiry(), None, "counter 0's gate never rises");
}

#[test]
fn a_low_gate_stops_the_count() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 2, 0, 1000, NOW);
    assert_eq!(count(&mut pit, 2, at(500)), 1000, "the gate is low after reset");
    pit.write_speaker(1, at(500));
    assert_eq!(count(&mut pit, 2, at(600)), 900);
    pit.write_speaker(0, at(600));
    assert_eq!(count(&mut pit, 2, at(5000)), 900);
    pit.write_speaker(1, at(5000));
    assert_eq!(pit.read_speaker(at(5899)) & 0x20, 0);
    assert_eq!(pit.read_speaker(at(5901)) & 0x20, 0x20);
    program(&mut pit, 2, 2, 1000, at(6000));
    pit.write_speaker(0, at(6500));
    assert_eq!(status(&mut pit, 2, at(6999)) & OUT, OUT, "a low gate forces it high");
    pit.write_speaker(1, at(7000));
    assert_eq!(count(&mut pit, 2, at(7100)), 900, "the period begins anew");
}

#[test]
fn calibration_by_counter_2_ends_when_its_output_rises() {
    // As Linux does: gate on, speaker off, mode 0, then spin on bit 5 of port 0x61.
    let mut pit = Pit::new(NOW);
    pit.write_speaker(1, NOW);
    program(&mut pit, 2, 0, 11932, NOW);
    assert_eq!(pit.read_speaker(at(11930)) & 0x23, 0x01);
    assert_eq!(pit.read_speaker(at(11933)) & 0x23, 0x21);
}

#[test]
fn a_latched_count_stands_until_it_is_read() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 2, 50000, NOW);
    pit.write(0x43, 0x00, at(100));
    pit.write(0x43, 0x00, at(900));
    let low = pit.read(0x40, at(1000));
    let high = pit.read(0x40, at(1000));
    assert_eq!(u16::from_le_bytes([low, high]), 49900, "a second latch is ignored");
    let low = pit.read(0x40, at(1000));
    let high = pit.read(0x40, at(1000));
    assert_eq!(u16::from_le_bytes([low, high]), 49000, "then it is live");
}

#[test]
fn read_back_gives_status_first_then_count() {
    let mut pit = Pit::new(NOW);
    pit.write(0x43, 0x34, NOW);
    assert_eq!(status(&mut pit, 0, NOW), OUT | NULL_COUNT | 0x34);
    program(&mut pit, 0, 2, 1000, NOW);
    // Status and count of counter 0.
    pit.write(0x43, 0xc2, at(10));
    assert_eq!(pit.read(0x40, at(99)), OUT | 0x34);
    let (low, high) = (pit.read(0x40, at(99)), pit.read(0x40, at(99)));
    assert_eq!(u16::from_le_bytes([low, high]), 990);
    assert_eq!(pit.read(0x43, NOW), 0);
}

#[test]
fn single_byte_access_modes_read_and_write_their_byte() {
    let mut pit = Pit::new(NOW);
    pit.write(0x43, 0x14, NOW);
    assert!(pit.write(0x40, 0x80, NOW));
    assert_eq!(pit.next_expiry(), Some(at(239)), "128 ticks are stretched");
    assert_eq!(pit.read(0x40, at(8)), 0x78);
    pit.write(0x43, 0x24, NOW);
    assert!(pit.write(0x40, 0x80, NOW));
    assert_eq!(pit.next_expiry(), Some(at(0x8000)));
    assert_eq!(pit.read(0x40, at(0x100)), 0x7f);
}

#[test]
fn decimal_counts_read_as_they_were_written() {
    let mut pit = Pit::new(NOW);
    pit.write(0x43, 0x35, NOW);
    pit.write(0x40, 0x00, NOW);
    pit.write(0x40, 0x10, NOW);
    assert_eq!(pit.next_expiry(), Some(at(1000)));
    assert_eq!(count_live(&mut pit, at(1)), 0x0999);
    pit.write(0x40, 0, NOW);
    pit.write(0x40, 0, NOW);
    assert_eq!(pit.next_expiry(), Some(at(10_000)), "zero is ten thousand");
    assert_eq!(count_live(&mut pit, NOW), 0, "which has no fifth digit");
}

fn count_live(pit: &mut Pit, now: u64) -> u16 {
    u16::from(pit.read(0x40, now)) | u16::from(pit.read(0x40, now)) << 8
}

#[test]
fn a_control_word_stops_interrupts_until_a_count_comes() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 2, 1000, NOW);
    assert!(pit.write(0x43, 0x34, at(10)));
    assert_eq!(pit.next_expiry(), None);
    assert!(!pit.write(0x40, 0xe8, at(20)), "half a count");
    assert!(pit.write(0x40, 0x03, at(20)));
    assert_eq!(pit.next_expiry(), Some(at(20) + ticks_to_ns(1000)));
}

#[test]
fn periods_do_not_drift() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 2, 1193, NOW);
    pit.set_reinject(false);
    for n in 1..=100_000u64 {
        let expiry = pit.next_expiry().unwrap();
        assert_eq!(expiry, at(1193 * n));
        assert!(pit.expired(expiry));
    }
}

#[test]
fn reinjection_delivers_every_tick_one_acknowledgement_at_a_time() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 2, 10_000, NOW);
    assert!(pit.expired(at(10_000)));
    assert!(!pit.expired(at(20_000)), "the first is not acknowledged");
    assert!(!pit.expired(at(30_000)));
    assert!(pit.acked());
    assert!(pit.acked());
    assert!(!pit.acked(), "all three are delivered");
    assert!(pit.expired(at(40_000)));
}

#[test]
fn without_reinjection_late_ticks_are_lost() {
    let mut pit = Pit::new(NOW);
    pit.set_reinject(false);
    assert!(!pit.wants_acks());
    program(&mut pit, 0, 2, 10_000, NOW);
    assert!(pit.expired(at(35_000)));
    assert!(!pit.acked());
    assert_eq!(pit.next_expiry(), Some(at(40_000)));
}

#[test]
fn the_hpet_takes_line_0_over() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 2, 10_000, NOW);
    let mut state = pit.save(NOW);
    state.hpet_legacy = true;
    pit.restore(&state, NOW);
    assert_eq!(pit.next_expiry(), None);
    state.hpet_legacy = false;
    pit.restore(&state, NOW);
    assert_eq!(pit.next_expiry(), Some(at(10_000)));
}

#[test]
fn state_survives() {
    let mut pit = Pit::new(NOW);
    program(&mut pit, 0, 3, 20_000, NOW);
    program(&mut pit, 2, 0, 500, NOW);
    pit.write_speaker(2, NOW);
    let state = pit.save(NOW);
    let mut other = Pit::new(0);
    other.restore(&state, NOW);
    assert_eq!(other.save(NOW), state);
    assert_eq!(other.next_expiry(), Some(at(20_000)));
    assert_eq!(count(&mut other, 2, at(300)), 500, "its gate is low");
}

proptest! {
    #[test]
    fn anything_may_be_written_at_any_time(
        steps in prop::collection::vec((0u8..8, 0u16..4, any::<u8>(), 0u64..1 << 40), 1..200),
        start in prop_oneof![Just(0u64), any::<u64>()],
    ) {
        let mut pit = Pit::new(start);
        let mut now = start;
        for (kind, port, value, passed) in steps {
            now = now.wrapping_add(passed);
            match kind {
                0..=2 => { pit.write(0x40 + port, value, now); }
                3 => { pit.read(0x40 + port, now); }
                4 => pit.write_speaker(value, now),
                5 => { pit.read_speaker(now); }
                6 => { pit.expired(now); }
                _ => { pit.acked(); }
            }
            if let Some(expiry) = pit.next_expiry() {
                prop_assert!(kind != 6 || expiry > now || expiry == u64::MAX);
            }
        }
    }

    #[test]
    fn any_saved_state_can_be_restored(
        count in any::<u32>(), bytes in any::<[u8; 10]>(), time in any::<i64>(), now in any::<u64>(),
    ) {
        let channel = PitChannelState {
            count, latched_count: 7, count_latched: bytes[0], status_latched: bytes[1],
            status: bytes[2], read_state: bytes[3], write_state: bytes[4], write_latch: bytes[5],
            rw_mode: bytes[6], mode: bytes[7], bcd: bytes[8], gate: bytes[9],
            count_load_time: time,
        };
        let mut pit = Pit::new(now);
        let state = PitState { channels: [channel; 3], hpet_legacy: false, speaker_data: true };
        pit.restore(&state, now);
        for port in 0x40..0x44 {
            for _ in 0..3 {
                pit.read(port, now.wrapping_add(99));
            }
            pit.write(port, bytes[0], now);
        }
        pit.read_speaker(now);
        pit.expired(now.wrapping_add(1 << 30));
    }

    #[test]
    fn ticks_and_nanoseconds_agree(ticks in 0u64..1 << 42) {
        prop_assert_eq!(ns_to_ticks(ticks_to_ns(ticks)), ticks);
    }
}
