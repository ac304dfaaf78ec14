//! Zones, and a ring that user space may spoil.

extern crate std;

use alloc::{vec, vec::Vec};
use std::thread;
use x86::Direction;

use host::{
    Arc,
    std_port::test::{eventfd, eventfd_read},
};

use super::*;
use crate::{
    irq::{IoEvent, Irqchip, VmIrq},
    vcpus::VcpuTable,
};

const AT: u64 = 0xd000_0000;
const FIRST: usize = 0;
const LAST: usize = 1;

fn irq(kind: Irqchip) -> VmIrq {
    let irq = VmIrq::new(Arc::new(VcpuTable::new().unwrap()).unwrap()).unwrap();
    if kind != Irqchip::None {
        irq.create(kind).unwrap();
    }
    irq
}

fn memory(address: u64, len: u32) -> Zone {
    Zone { space: Space::Memory, address, len }
}

fn port(address: u64, len: u32) -> Zone {
    Zone { space: Space::Port, address, len }
}

fn word(irq: &VmIrq, index: usize) -> u32 {
    irq.coalesced.ring.half_words()[index].load(Acquire)
}

fn set_word(irq: &VmIrq, index: usize, value: u32) {
    irq.coalesced.ring.half_words()[index].store(value, Release);
}

/// Takes all entries out as user space does: address, length, space, data.
fn drain(irq: &VmIrq) -> Vec<(u64, u32, u32, u64)> {
    let mut all = vec![];
    while word(irq, FIRST) != word(irq, LAST) {
        let at = HEAD + word(irq, FIRST) as usize * ENTRY;
        let wide = |n| u64::from(word(irq, at + n)) | u64::from(word(irq, at + n + 1)) << 32;
        all.push((wide(0), word(irq, at + 2), word(irq, at + 3), wide(4)));
        set_word(irq, FIRST, (word(irq, FIRST) + 1) % RING_ENTRIES);
    }
    all
}

#[test]
fn a_write_into_a_zone_waits_in_the_ring() {
    let irq = irq(Irqchip::None);
    assert!(!irq.has_address(AT, Direction::Write) && irq.mmio_write(AT, &[1]).is_none());
    irq.register_zone(memory(AT, 0x10)).unwrap();
    irq.register_zone(port(0x70, 4)).unwrap();
    assert!(
        irq.has_address(AT, Direction::Write) && !irq.has_address(AT, Direction::Read),
        "reads exit"
    );
    assert!(irq.mmio_write(AT, &[1]).is_some());
    assert!(irq.mmio_write(AT + 8, &[1, 2, 3, 4, 5, 6, 7, 8]).is_some());
    assert!(irq.pio_write(0x70, 1, 0x9a).is_some() && irq.pio_write(0x72, 2, 0x1234).is_some());
    assert!(irq.pio_write(0x70, 4, 0x8765_4321).is_some());
    let mut value = 0;
    assert!(irq.pio_read(0x70, 1, &mut value).is_none());
    let expected = [
        (AT, 1, 0, 1),
        (AT + 8, 8, 0, 0x0807_0605_0403_0201),
        (0x70, 1, 1, 0x9a),
        (0x72, 2, 1, 0x1234),
        (0x70, 4, 1, 0x8765_4321),
    ];
    assert_eq!(drain(&irq), expected);
}

#[test]
fn a_write_has_to_lie_in_one_zone_whole() {
    let irq = irq(Irqchip::None);
    irq.register_zone(memory(AT, 8)).unwrap();
    irq.register_zone(memory(AT + 8, 8)).unwrap();
    irq.register_zone(port(0x70, 2)).unwrap();
    for (at, len) in [(AT - 1, 2), (AT + 6, 4), (AT + 15, 2), (AT + 16, 1)] {
        assert!(irq.mmio_write(at, &[0; 8][..len]).is_none(), "{at:#x}");
    }
    assert!(irq.mmio_write(AT, &[0; 9]).is_none(), "more than an entry holds");
    assert!(
        irq.mmio_write(0x70, &[0]).is_none() && irq.pio_write(0x71, 2, 0).is_none(),
        "spaces are apart"
    );
    assert!(irq.pio_write(0x71, 1, 0).is_some() && irq.mmio_write(AT + 12, &[0; 4]).is_some());
    assert_eq!(drain(&irq).len(), 2);
}

#[test]
fn zones_that_wrap_or_are_empty_take_nothing() {
    let irq = irq(Irqchip::None);
    irq.register_zone(memory(u64::MAX - 7, 8)).unwrap();
    irq.register_zone(memory(u64::MAX - 15, u32::MAX)).unwrap();
    irq.register_zone(memory(AT, 0)).unwrap();
    for at in [u64::MAX - 7, u64::MAX, 0, 8, AT] {
        assert!(irq.mmio_write(at, &[0]).is_none(), "{at:#x}");
    }
    irq.register_zone(memory(0, u32::MAX)).unwrap();
    assert!(irq.mmio_write(u64::from(u32::MAX) - 1, &[0]).is_some());
    assert!(irq.mmio_write(u64::from(u32::MAX) - 1, &[0, 0]).is_none());
}

#[test]
fn zones_go_that_cover_the_range() {
    let irq = irq(Irqchip::None);
    irq.register_zone(memory(AT, 0x1000)).unwrap();
    irq.register_zone(memory(AT, 0x1000)).unwrap();
    irq.register_zone(port(AT, 0x1000)).unwrap();
    for range in [memory(AT, 0x1001), memory(AT - 1, 1), memory(u64::MAX, 2), port(0, 1)] {
        irq.unregister_zones(range).unwrap();
    }
    assert!(irq.mmio_write(AT + 0xfff, &[0]).is_some());
    irq.unregister_zones(memory(AT + 0x10, 1)).unwrap();
    assert!(!irq.has_address(AT, Direction::Write) && irq.mmio_write(AT, &[0]).is_none());
    irq.unregister_zones(memory(AT, 0x1000)).unwrap();
}

#[test]
fn there_are_as_many_zones_in_each_space() {
    let irq = irq(Irqchip::None);
    for n in 0..MAX_ZONES as u64 {
        irq.register_zone(memory(AT + n, 1)).unwrap();
    }
    assert_eq!(irq.register_zone(memory(AT, 1)), Err(ZoneError::Full));
    irq.register_zone(port(0x70, 1)).unwrap();
    irq.unregister_zones(memory(AT + 5, 1)).unwrap();
    irq.register_zone(memory(AT, 1)).unwrap();
}

#[test]
fn a_full_ring_takes_nothing_until_user_space_reads() {
    let irq = irq(Irqchip::None);
    irq.register_zone(port(0x70, 1)).unwrap();
    for round in 0..3 {
        for n in 0..RING_ENTRIES - 1 {
            assert!(irq.pio_write(0x70, 1, n).is_some(), "{round} {n}");
        }
        assert!(irq.pio_write(0x70, 1, 0xff).is_none() && irq.pio_write(0x70, 1, 0xff).is_none());
        let values: Vec<_> = drain(&irq).iter().map(|e| e.3 as u32).collect();
        assert_eq!(values, (0..RING_ENTRIES - 1).collect::<Vec<_>>());
    }
    assert_eq!(RING_ENTRIES, 170);
}

#[test]
fn indexes_out_of_bounds_are_a_full_ring() {
    let irq = irq(Irqchip::None);
    irq.register_zone(port(0x70, 1)).unwrap();
    for (index, other) in [(FIRST, LAST), (LAST, FIRST)] {
        for bad in [RING_ENTRIES, RING_ENTRIES + 1, 0x100, 1 << 31, u32::MAX] {
            for good in [0, 5, RING_ENTRIES - 1] {
                set_word(&irq, index, bad);
                set_word(&irq, other, good);
                assert!(irq.pio_write(0x70, 1, 1).is_none(), "{index} {bad:#x}");
                assert_eq!((word(&irq, index), word(&irq, other)), (bad, good));
            }
        }
    }
    // The last entry ends where the page does, or before.
    set_word(&irq, FIRST, 5);
    set_word(&irq, LAST, RING_ENTRIES - 1);
    assert!(irq.pio_write(0x70, 1, 7).is_some());
    assert_eq!((word(&irq, FIRST), word(&irq, LAST)), (5, 0));
    assert_eq!(word(&irq, HEAD + (RING_ENTRIES as usize - 1) * ENTRY + 4), 7);
}

#[test]
fn eventfds_and_the_kernels_devices_come_first() {
    let irq = irq(Irqchip::Full);
    let fd = eventfd();
    let what = IoEvent { space: Space::Memory, address: AT, len: 4, datamatch: Some(7) };
    irq.register_zone(memory(AT, 8)).unwrap();
    irq.ioeventfds().assign(what, fd).unwrap();
    assert!(
        irq.mmio_write(AT, &[7, 0, 0, 0]).is_some() && irq.mmio_write(AT, &[8, 0, 0, 0]).is_some()
    );
    assert_eq!((drain(&irq), eventfd_read(fd)), (vec![(AT, 4, 0, 8)], 1));
    irq.ioeventfds().deassign(what, fd).unwrap();
    assert!(irq.mmio_write(AT, &[7, 0, 0, 0]).is_some());
    assert_eq!(drain(&irq).len(), 1, "the zone is not forgotten with the eventfd");
    const IOAPIC: u64 = 0xfec0_0000;
    irq.register_zone(memory(IOAPIC, 0x1000)).unwrap();
    irq.register_zone(port(0x20, 0x30)).unwrap();
    assert!(
        irq.mmio_write(IOAPIC, &[1, 0, 0, 0]).is_some() && irq.pio_write(0x21, 1, 0xff).is_some()
    );
    assert!(drain(&irq).is_empty());
    assert!(irq.pio_write(0x43, 1, 0x36).is_some(), "there is no PIT");
    assert_eq!(drain(&irq), [(0x43, 1, 1, 0x36)]);
    irq.create_pit(false).unwrap();
    assert!(irq.pio_write(0x43, 1, 0x36).is_some() && drain(&irq).is_empty());
}

#[test]
fn a_port_without_its_chip_is_like_others() {
    let irq = irq(Irqchip::None);
    let fd = eventfd();
    let what = IoEvent { space: Space::Port, address: 0x20, len: 1, datamatch: None };
    irq.ioeventfds().assign(what, fd).unwrap();
    irq.register_zone(port(0x61, 1)).unwrap();
    let mut value = 0;
    assert!(irq.pio_write(0x20, 1, 1).is_some() && irq.pio_read(0x20, 1, &mut value).is_none());
    assert!(irq.pio_write(0x61, 1, 3).is_some() && irq.pio_read(0x61, 1, &mut value).is_none());
    assert_eq!((drain(&irq).len(), eventfd_read(fd)), (1, 1));
}

#[test]
fn several_append_while_user_space_reads() {
    const EACH: u32 = 20_000;
    let irq = &irq(Irqchip::None);
    irq.register_zone(port(0x70, 4)).unwrap();
    let mut seen = [0; 2];
    thread::scope(|s| {
        for thread in 0..2u32 {
            s.spawn(move || {
                for n in 0..EACH {
                    while irq.pio_write(0x70, 4, thread << 31 | n).is_none() {
                        thread::yield_now();
                    }
                }
            });
        }
        while seen != [EACH; 2] {
            for (_, _, _, data) in drain(irq) {
                let thread = (data >> 31) as usize;
                assert_eq!(data as u32 & !(1 << 31), seen[thread], "in order, none twice");
                seen[thread] += 1;
            }
            thread::yield_now();
        }
    });
}
