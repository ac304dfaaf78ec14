//! The wiring: from lines, messages and eventfds to the vCPUs' local APICs and back.

use alloc::{vec, vec::Vec};

use host::{
    Arc, clock,
    std_port::test::{self, eventfd, eventfd_read},
};
use irqchip::pic::Which;
use irqchip::{
    Chip, DeliveryMode, DestMode, IrqMessage, LapicEffect, LineStatus, Msi, Route, Shorthand,
    Target, Trigger,
    lapic::{BaseRules, CpuRole, base},
    message::BROADCAST,
};
use x86::Vector;

use super::*;
use crate::{
    vcpu_shared::{SharedVcpu, VcpuShared},
    vcpus::VcpuTable,
};

const SVR: u32 = 0xf0;
const IOAPIC: u64 = 0xfec0_0000;

/// A VM with so many vCPUs whose APICs are enabled.
struct Bench {
    irq: VmIrq,
    vcpus: Arc<VcpuTable>,
}

fn bench(vcpus: &[u32]) -> Bench {
    let table = Arc::new(VcpuTable::new().unwrap()).unwrap();
    for (index, id) in vcpus.iter().enumerate() {
        let vcpu =
            VcpuShared::new(*id, index as u32, CpuRole::bootstrap_if(index == 0), true).unwrap();
        let _ = vcpu.lapic.write(SVR, 0x1ff);
        table.add(vcpu).unwrap();
    }
    let irq = VmIrq::new(table.clone()).unwrap();
    irq.create(Irqchip::Full).unwrap();
    Bench { irq, vcpus: table }
}

impl Bench {
    fn vcpu(&self, index: usize) -> &SharedVcpu {
        self.vcpus.get(index).unwrap()
    }

    /// Takes the highest pending vector of a vCPU.
    fn take(&self, index: usize) -> Option<u8> {
        let lapic = &self.vcpu(index).lapic;
        let vector = lapic.highest_pending()?;
        lapic.ack(vector);
        Some(vector.0)
    }

    /// Ends it as the run loop does.
    fn end(&self, index: usize) {
        let vcpu = self.vcpu(index);
        if let LapicEffect::Eoi { vector, level: true } = vcpu.lapic.eoi() {
            assert_eq!(self.irq.eoi(vcpu, vector), Ended::Here(Owing::NOTHING));
        }
    }

    fn program(&self, pin: u32, low: u32, dest: u32) {
        for (register, value) in [(0x11 + pin * 2, dest << 24), (0x10 + pin * 2, low)] {
            assert!(self.irq.mmio_write(IOAPIC, &register.to_le_bytes()).is_some());
            assert!(self.irq.mmio_write(IOAPIC + 0x10, &value.to_le_bytes()).is_some());
        }
    }

    fn out(&self, port: u16, value: u8) {
        assert!(self.irq.pio_write(port, 1, value.into()).is_some());
    }

    fn inb(&self, port: u16) -> u8 {
        let mut value = 0;
        assert!(self.irq.pio_read(port, 1, &mut value).is_some());
        value as u8
    }

    fn start_pic(&self) {
        for (command, data, vector) in [(0x20, 0x21, 0x20), (0xa0, 0xa1, 0x28)] {
            for (port, value) in [(command, 0x11), (data, vector), (data, 4), (data, 1), (data, 0)]
            {
                self.out(port, value);
            }
        }
        let _ = self.vcpu(0).lapic.write(0x350, 0x700);
        self.irq.apic_changed();
    }

    /// Programs counter 0 as a rate generator.
    fn start_pit(&self, count: u16) {
        self.out(0x43, 0x34);
        self.out(0x40, count as u8);
        self.out(0x40, (count >> 8) as u8);
    }

    fn user(&self, gsi: u32, level: bool) -> LineStatus {
        self.irq.set_irq_line(gsi, Source::User, level)
    }

    fn send(&self, from: usize, message: &IrqMessage) -> LineStatus {
        self.irq.send_ipi(self.vcpu(from), message)
    }

    /// Which vCPUs have something, and empties them.
    fn receivers(&self) -> Vec<usize> {
        let count = self.vcpus.count() as usize;
        (0..count).filter(|i| self.take(*i).inspect(|_| self.end(*i)).is_some()).collect()
    }
}

const LEVEL: u32 = 1 << 15;
const MASKED: u32 = 1 << 16;

#[test]
fn a_line_reaches_the_cpu_that_its_pin_names() {
    let b = bench(&[0, 1]);
    b.program(4, 0x51, 1);
    assert_eq!(b.user(4, true), LineStatus::Delivered(2), "PIC and I/O APIC");
    assert_eq!(b.take(0), None);
    assert_eq!(b.take(1), Some(0x51));
    b.end(1);
    assert_eq!(b.user(99, true), LineStatus::Ignored);
}

#[test]
fn a_level_line_comes_again_until_it_is_silenced() {
    let b = bench(&[0]);
    b.program(20, LEVEL | 0x61, 0);
    b.user(20, true);
    assert_eq!(b.take(0), Some(0x61));
    b.end(0);
    assert_eq!(b.take(0), Some(0x61));
    b.user(20, false);
    b.end(0);
    assert_eq!(b.take(0), None);
}

#[test]
fn physical_destinations_find_ids_that_are_not_places() {
    let b = bench(&[5, 0, 300]);
    for (id, index) in [(5, 0), (0, 1)] {
        b.send(1, &IrqMessage::fixed(Vector(0x40), id));
        assert_eq!(b.receivers(), [index]);
    }
    let rules = BaseRules { maxphyaddr: 48, x2apic: true, host: false };
    let wide = &b.vcpu(2).lapic;
    wide.set_base(wide.base() | base::EXTD, rules).unwrap();
    b.send(0, &IrqMessage::fixed(Vector(0x40), 300));
    assert_eq!(b.receivers(), [2]);
    b.send(0, &IrqMessage::fixed(Vector(0x40), 4096));
    assert_eq!(b.receivers(), [0usize; 0]);
}

#[test]
fn shorthands_and_broadcasts_reach_whom_they_name() {
    let b = bench(&[0, 1, 2]);
    let msg = IrqMessage::fixed(Vector(0x40), 0);
    for (shorthand, wanted) in [
        (Shorthand::All, vec![0, 1, 2]),
        (Shorthand::AllButSelf, vec![0, 2]),
        (Shorthand::SelfOnly, vec![1]),
    ] {
        b.send(1, &IrqMessage { shorthand, ..msg });
        assert_eq!(b.receivers(), wanted);
    }
    assert_eq!(b.send(1, &IrqMessage { dest: BROADCAST, ..msg }), LineStatus::Delivered(3));
    assert_eq!(b.receivers(), [0, 1, 2]);
}

#[test]
fn logical_destinations_reach_all_they_name() {
    let b = bench(&[0, 1, 2]);
    let msg = IrqMessage { dest_mode: DestMode::Logical, ..IrqMessage::fixed(Vector(0x40), 0b101) };
    for (index, vcpu) in b.vcpus.iter().enumerate() {
        let _ = vcpu.lapic.write(0xd0, 1 << (24 + index));
    }
    b.send(0, &msg);
    assert_eq!(b.receivers(), [0, 2]);
    let rules = BaseRules { maxphyaddr: 48, x2apic: true, host: false };
    for vcpu in b.vcpus.iter() {
        vcpu.lapic.set_base(vcpu.lapic.base() | base::EXTD, rules).unwrap();
    }
    b.send(0, &IrqMessage { dest: 0b110, ..msg });
    assert_eq!(b.receivers(), [1, 2]);
    // Somebody who is not there does not keep the others from it.
    b.send(0, &IrqMessage { dest: 0b1010, ..msg });
    assert_eq!(b.receivers(), [1]);
    b.send(0, &IrqMessage { dest: 0x1_0001, ..msg });
    assert_eq!(b.receivers(), [0usize; 0]);
}

#[test]
fn lowest_priority_picks_one_that_is_enabled_and_least_busy() {
    let b = bench(&[0, 1, 2]);
    let msg = IrqMessage {
        delivery: DeliveryMode::LowestPriority,
        dest: BROADCAST,
        ..IrqMessage::fixed(Vector(0x40), 0)
    };
    b.vcpu(0).lapic.set_tpr(0x20);
    let _ = b.vcpu(1).lapic.write(SVR, 0xff);
    for vector in 0x40..0x48 {
        b.send(0, &IrqMessage { vector: Vector(vector), ..msg });
        assert_eq!(b.receivers(), [2]);
    }
    b.vcpu(0).lapic.set_tpr(0);
    let mut seen = [0; 3];
    for vector in 0x40..0x48 {
        b.send(0, &IrqMessage { vector: Vector(vector), ..msg });
        let [one] = b.receivers()[..] else { panic!("not one") };
        seen[one] += 1;
    }
    assert_eq!(seen, [4, 0, 4], "vectors spread");
    let _ = b.vcpu(0).lapic.write(SVR, 0xff);
    let _ = b.vcpu(2).lapic.write(SVR, 0xff);
    assert_eq!(b.send(0, &msg), LineStatus::Ignored);
}

#[test]
fn nmi_init_and_sipi_arrive_as_events() {
    let b = bench(&[0, 1]);
    let msg = IrqMessage::fixed(Vector(0x9a), 1);
    b.send(0, &IrqMessage { delivery: DeliveryMode::Nmi, ..msg });
    assert_eq!(b.vcpu(1).nmis(), 1);
    let init = IrqMessage { delivery: DeliveryMode::Init, trigger: Trigger::Level, ..msg };
    b.send(0, &init);
    b.send(0, &IrqMessage { delivery: DeliveryMode::Startup, ..msg });
    assert_eq!(b.vcpu(1).take_init_sipi(), (true, Some(Vector(0x9a))));
    assert_eq!(b.vcpu(0).nmis(), 0);
}

#[test]
fn an_msi_is_delivered_and_coalesced() {
    let b = bench(&[0, 1]);
    let msi = Msi { address_lo: 0xfee0_1000, address_hi: 0, data: 0x77 };
    assert_eq!(b.irq.signal_msi(&msi), LineStatus::Delivered(1));
    assert_eq!(b.irq.signal_msi(&msi), LineStatus::Coalesced);
    assert_eq!(b.take(1), Some(0x77));
    let _ = b.vcpu(1).lapic.write(SVR, 0xff);
    assert_eq!(b.irq.signal_msi(&msi), LineStatus::Ignored);
}

#[test]
fn a_pv_ipi_counts_its_receivers() {
    let b = bench(&[0, 1, 2]);
    let call = pv::SendIpi::new(0b1101, 0, 0, 0xfb, true).unwrap();
    assert_eq!(b.irq.send_pv_ipi(&call), 2);
    assert_eq!(b.receivers(), [0, 2]);
    // 255 is an id, and nobody has it.
    let call = pv::SendIpi::new(0b11, 0, 254, 0xfb, true).unwrap();
    assert_eq!(b.irq.send_pv_ipi(&call), 0);
    assert_eq!(b.receivers(), []);
}

#[test]
fn the_pic_reaches_the_cpu_that_lets_it_through() {
    let b = bench(&[0, 1]);
    b.start_pic();
    assert!(!b.irq.extint_pending());
    b.user(4, true);
    assert!(b.irq.extint_pending());
    assert!(b.vcpu(0).has_requests() && b.vcpu(0).lapic.accepts_pic());
    assert_eq!(b.irq.extint_ack(), Some((Vector(0x24), Owing::NOTHING)));
    assert!(!b.irq.extint_pending());
    assert_eq!(b.irq.extint_ack(), None);
    b.user(4, false);
    b.out(0x20, 0x20);
    // The slave by port, and a wide access that no 8259A hears.
    b.user(12, true);
    assert_eq!(b.irq.extint_ack(), Some((Vector(0x2c), Owing::NOTHING)));
    assert!(b.irq.pio_write(0xa1, 2, 0xffff).is_some());
    assert_eq!(b.inb(0xa1), 0);
    let mut wide = 7;
    assert!(b.irq.pio_read(0xa1, 4, &mut wide).is_some());
    assert_eq!(wide, 0);
}

#[test]
fn ports_are_ours_only_when_the_device_is_there() {
    let b = bench(&[0]);
    assert!(b.irq.has_port(0x20) && !b.irq.has_port(0x40) && !b.irq.has_port(0x61));
    assert!(b.irq.pio_write(0x43, 1, 0).is_none());
    b.irq.create_pit(false).unwrap();
    assert!(b.irq.has_port(0x40) && !b.irq.has_port(0x61));
    assert_eq!(b.irq.create_pit(true), Err(IrqError::Exists));
    assert_eq!(b.irq.create(Irqchip::Split), Err(IrqError::Exists));
    let table = Arc::new(VcpuTable::new().unwrap()).unwrap();
    let split = VmIrq::new(table).unwrap();
    split.create(Irqchip::Split).unwrap();
    assert_eq!(split.create_pit(false), Err(IrqError::Missing));
    assert!(!split.has_port(0x20) && split.mmio_write(IOAPIC, &[0; 4]).is_none());
    assert_eq!(split.set_irq_line(4, Source::User, true), LineStatus::Ignored);
}

#[test]
fn a_vmms_ioapic_waits_for_the_ends_of_what_its_level_pins_send() {
    let table = Arc::new(VcpuTable::new().unwrap()).unwrap();
    for id in 0..2 {
        let vcpu = VcpuShared::new(id, id, CpuRole::bootstrap_if(id == 0), true).unwrap();
        let _ = vcpu.lapic.write(SVR, 0x1ff);
        table.add(vcpu).unwrap();
    }
    let irq = VmIrq::new(table.clone()).unwrap();
    irq.create_split(8).unwrap();
    assert_eq!(irq.create_split(8), Err(IrqError::Exists));
    assert_eq!(irq.create(Irqchip::Full), Err(IrqError::Exists));
    let route = |gsi, dest: u32, data| {
        let msi = Msi { address_lo: 0xfee0_0000 | dest << 12, address_hi: 0, data };
        Route { gsi, target: Target::Msi(msi) }
    };
    let waits = |index: usize, vector: u8| {
        let vcpu = table.get(index).unwrap();
        assert!(vcpu.take_request(Request::Routes));
        irq.follow_routes(vcpu);
        vcpu.request(Request::Routes);
        irq.eoi(vcpu, Vector(vector)) == Ended::ForVmm
    };
    irq.set_routes(&[route(7, 0, LEVEL | 0x51), route(8, 0, LEVEL | 0x61), route(3, 0, 0x41)])
        .unwrap();
    assert_eq!([0x51, 0x61, 0x41].map(|vector| waits(0, vector)), [true, false, false]);
    assert!(!waits(1, 0x51));
    // To the other, and to both; a logical one to nobody; a delivery mode that does not exist.
    irq.set_routes(&[route(0, 1, LEVEL | 0x51), route(1, 0xff, LEVEL | 0x52)]).unwrap();
    assert_eq!(
        [(0, 0x51), (1, 0x51), (0, 0x52), (1, 0x52)].map(|(i, v)| waits(i, v)),
        [false, true, true, true]
    );
    let logical = Msi { address_lo: 0xfee0_1004, address_hi: 0, data: LEVEL | 0x51 };
    let logical = Route { gsi: 2, target: Target::Msi(logical) };
    irq.set_routes(&[logical, route(3, 0, LEVEL | 0x352)]).unwrap();
    assert!(!waits(0, 0x51) && !waits(0, 0x52));
    let _ = table.get(0).unwrap().lapic.write(0xd0, 1 << 24);
    assert!(waits(0, 0x51) && !waits(1, 0x51));
    // What was sent and has not ended waits wherever the route goes.
    let _ = table.get(1).unwrap().lapic.accept_fixed(Vector(0x51), Trigger::Level);
    assert!(waits(1, 0x51));
}

#[test]
fn the_pit_ticks_through_the_ioapic_and_every_tick_arrives() {
    let b = bench(&[0]);
    b.irq.create_pit(true).unwrap();
    b.program(0, 0x30, 0);
    // 11932 ticks are 10 ms.
    b.start_pit(11932);
    let world = test::clock();
    world.advance(10_001_000);
    assert_eq!(b.take(0), Some(0x30));
    world.advance(20_000_000);
    assert_eq!(b.take(0), None, "not before the first has ended");
    b.end(0);
    assert_eq!(b.take(0), Some(0x30));
    b.end(0);
    assert_eq!(b.take(0), Some(0x30));
    b.end(0);
    assert_eq!(b.take(0), None);
    world.advance(10_000_000);
    assert_eq!(b.take(0), Some(0x30));
    b.end(0);
    b.irq.set_pit_reinject(false).unwrap();
    world.advance(30_000_000);
    assert_eq!(b.take(0), Some(0x30));
    b.end(0);
    assert_eq!(b.take(0), None, "late ticks are lost");
}

/// A tick comes while the guest has its pin masked, and is lost: the timer does not wait for its end.
#[test]
fn the_pit_ticks_on_behind_a_mask() {
    let b = bench(&[0]);
    b.irq.create_pit(true).unwrap();
    b.program(0, MASKED | 0x30, 0);
    b.start_pit(11932);
    let world = test::clock();
    world.advance(15_000_000);
    assert_eq!(b.take(0), None);
    b.program(0, 0x30, 0);
    world.advance(10_000_000);
    assert_eq!(b.take(0), Some(0x30));
    b.end(0);
    // The 8259A keeps an edge under its mask, so that nothing is lost there.
    let b = bench(&[0]);
    b.irq.create_pit(true).unwrap();
    b.start_pic();
    b.out(0x21, 1);
    b.start_pit(11932);
    world.advance(15_000_000);
    assert_eq!(b.irq.extint_ack(), None);
    b.out(0x21, 0);
    assert_eq!(b.irq.extint_ack(), Some((Vector(0x20), Owing::NOTHING)));
}

/// The first word of an initialisation drops the edge of a tick.
#[test]
fn the_pit_ticks_on_behind_an_initialisation_of_the_pic() {
    let b = bench(&[0]);
    b.irq.create_pit(true).unwrap();
    b.start_pic();
    b.start_pit(11932);
    let world = test::clock();
    world.advance(10_001_000);
    b.start_pic();
    world.advance(10_000_000);
    assert_eq!(b.irq.extint_ack(), Some((Vector(0x20), Owing::NOTHING)));
}

#[test]
fn the_pit_ticks_through_the_pic_and_stops_when_reprogrammed() {
    let b = bench(&[0]);
    b.irq.create_pit(true).unwrap();
    b.start_pic();
    b.start_pit(11932);
    let world = test::clock();
    world.advance(30_000_000);
    for _ in 0..2 {
        assert_eq!(b.irq.extint_ack(), Some((Vector(0x20), Owing::NOTHING)));
        b.out(0x20, 0x20);
    }
    assert_eq!(b.irq.extint_ack(), None);
    b.out(0x43, 0x30);
    world.advance(100_000_000);
    assert_eq!(b.irq.extint_ack(), None);
    assert_eq!(world.armed_timers(), 0);
}

#[test]
fn the_pit_is_an_nmi_watchdog_where_lint0_says_so() {
    let b = bench(&[0, 1]);
    b.irq.create_pit(true).unwrap();
    let _ = b.vcpu(1).lapic.write(0x350, 0x400);
    b.irq.apic_changed();
    b.start_pit(11932);
    test::clock().advance(10_001_000);
    assert_eq!((b.vcpu(0).nmis(), b.vcpu(1).nmis()), (0, 1));
}

#[test]
fn pit_state_survives_and_its_timer_runs_on() {
    let b = bench(&[0]);
    b.irq.create_pit(true).unwrap();
    b.start_pit(11932);
    let state = b.irq.pit().unwrap();
    let other = bench(&[0]);
    assert_eq!(other.irq.set_pit(&state), Err(IrqError::Missing));
    other.irq.create_pit(true).unwrap();
    other.program(0, 0x30, 0);
    other.irq.set_pit(&state).unwrap();
    test::clock().advance(10_001_000);
    assert_eq!(other.take(0), Some(0x30));
}

#[test]
fn an_endless_level_storm_is_put_off() {
    let b = bench(&[0]);
    b.program(20, LEVEL | 0x61, 0);
    b.user(20, true);
    let mut rounds = 0;
    while b.take(0).is_some() {
        b.end(0);
        rounds += 1;
        assert!(rounds < 20_000, "never put off");
    }
    test::clock().advance(10_000_001);
    assert_eq!(b.take(0), Some(0x61));
}

#[test]
fn routes_are_replaced_whole() {
    let b = bench(&[0]);
    let msi = Msi { address_lo: 0xfee0_0000, address_hi: 0, data: 0x88 };
    b.irq
        .set_routes(&[
            Route { gsi: 24, target: Target::Msi(msi) },
            Route { gsi: 3, target: Target::Pin { chip: Chip::IoApic, pin: 7 } },
        ])
        .unwrap();
    b.program(7, 0x57, 0);
    b.program(4, 0x54, 0);
    assert_eq!(b.user(24, true), LineStatus::Delivered(1));
    assert_eq!(b.user(24, false), LineStatus::Ignored);
    assert_eq!(b.take(0), Some(0x88));
    b.end(0);
    b.user(3, true);
    assert_eq!(b.take(0), Some(0x57));
    b.end(0);
    assert_eq!(b.user(4, true), LineStatus::Ignored, "the standard routes are gone");
}

#[test]
fn an_irqfd_raises_its_msi_until_it_is_disconnected() {
    let b = bench(&[0]);
    let msi = Msi { address_lo: 0xfee0_0000, address_hi: 0, data: 0x88 };
    b.irq.set_routes(&[Route { gsi: 24, target: Target::Msi(msi) }]).unwrap();
    let fd = eventfd();
    b.irq.assign_irqfd(fd, 24, None).unwrap();
    assert_eq!(b.irq.assign_irqfd(fd, 25, None), Err(IrqFdError::Busy));
    test::eventfd_signal(fd, 1);
    assert_eq!(b.take(0), Some(0x88));
    b.end(0);
    b.irq.deassign_irqfd(fd, 23).unwrap();
    test::eventfd_signal(fd, 1);
    assert_eq!(b.take(0), Some(0x88), "another GSI's");
    b.end(0);
    b.irq.deassign_irqfd(fd, 24).unwrap();
    test::eventfd_signal(fd, 1);
    assert_eq!(b.take(0), None);
    assert_eq!(b.irq.assign_irqfd(-1, 24, None), Err(IrqFdError::BadFd(host::BadFd::Closed)));
    assert_eq!(b.irq.assign_irqfd(fd, 24, Some(-1)), Err(IrqFdError::BadFd(host::BadFd::Closed)));
}

#[test]
fn a_closed_eventfd_makes_room_for_the_next() {
    let b = bench(&[0]);
    let fd = eventfd();
    b.irq.assign_irqfd(fd, 24, None).unwrap();
    test::eventfd_close(fd);
    let next = eventfd();
    b.irq.assign_irqfd(next, 24, None).unwrap();
    b.irq.release_irqfds();
    test::eventfd_signal(next, 1);
}

#[test]
fn a_resampled_line_is_high_until_the_guest_ends_it() {
    let b = bench(&[0]);
    b.program(20, LEVEL | 0x61, 0);
    let (fd, resample) = (eventfd(), eventfd());
    b.irq.assign_irqfd(fd, 20, Some(resample)).unwrap();
    test::eventfd_signal(fd, 1);
    assert_eq!(b.take(0), Some(0x61));
    assert_eq!(eventfd_read(resample), 0);
    b.end(0);
    assert_eq!(eventfd_read(resample), 1);
    assert_eq!(b.take(0), None, "the line went down");
    // The device is not done: its back-end signals again.
    test::eventfd_signal(fd, 1);
    assert_eq!(b.take(0), Some(0x61));
    b.irq.deassign_irqfd(fd, 20).unwrap();
    b.end(0);
    assert_eq!(eventfd_read(resample), 0);
    assert_eq!(b.take(0), None, "disconnecting lets the line go");
}

#[test]
fn irqfds_that_share_a_line_are_all_asked() {
    let b = bench(&[0]);
    b.program(20, LEVEL | 0x61, 0);
    let fds: Vec<_> = (0..3).map(|_| (eventfd(), eventfd())).collect();
    for (fd, resample) in &fds {
        b.irq.assign_irqfd(*fd, 20, Some(*resample)).unwrap();
    }
    test::eventfd_signal(fds[1].0, 1);
    assert_eq!(b.take(0), Some(0x61));
    b.end(0);
    assert!(fds.iter().all(|(_, resample)| eventfd_read(*resample) == 1));
}

/// A guest that serves the device behind the end of the interrupt, and unmasks the pin then, finds no interrupt that is over.
#[test]
fn a_pin_that_is_unmasked_asks_who_is_asked_of_its_line() {
    let b = bench(&[0]);
    b.program(20, MASKED | LEVEL | 0x61, 0);
    let (fd, resample) = (eventfd(), eventfd());
    b.irq.assign_irqfd(fd, 20, Some(resample)).unwrap();
    test::eventfd_signal(fd, 1);
    b.program(20, LEVEL | 0x61, 0);
    assert_eq!((b.take(0), eventfd_read(resample)), (None, 1));
    test::eventfd_signal(fd, 1);
    assert_eq!(b.take(0), Some(0x61), "it still wants it");
    b.end(0);
    assert_eq!(eventfd_read(resample), 1);
    // What another source holds goes out.
    b.program(20, MASKED | LEVEL | 0x61, 0);
    test::eventfd_signal(fd, 1);
    b.user(20, true);
    b.program(20, LEVEL | 0x61, 0);
    assert_eq!((b.take(0), eventfd_read(resample)), (Some(0x61), 1));
}

#[test]
fn a_resampled_line_works_through_the_pic() {
    let b = bench(&[0]);
    b.start_pic();
    let (fd, resample) = (eventfd(), eventfd());
    b.irq.assign_irqfd(fd, 11, Some(resample)).unwrap();
    b.out(0x4d1, 1 << 3);
    test::eventfd_signal(fd, 1);
    assert_eq!(b.irq.extint_ack(), Some((Vector(0x2b), Owing::NOTHING)));
    b.out(0xa0, 0x20);
    b.out(0x20, 0x20);
    assert_eq!(eventfd_read(resample), 1);
    assert!(!b.irq.extint_pending());
}

#[test]
fn an_edge_pin_with_a_resampler_tells_its_end_too() {
    let b = bench(&[0]);
    b.program(20, 0x61, 0);
    let (fd, resample) = (eventfd(), eventfd());
    b.irq.assign_irqfd(fd, 20, Some(resample)).unwrap();
    for _ in 0..3 {
        test::eventfd_signal(fd, 1);
        assert_eq!(b.take(0), Some(0x61));
        b.end(0);
        assert_eq!(eventfd_read(resample), 1);
    }
}

#[test]
fn controllers_can_be_saved_and_restored() {
    let b = bench(&[0]);
    b.start_pic();
    b.program(20, LEVEL | 0x61, 0);
    b.user(12, true);
    let (master, slave, ioapic) =
        (b.irq.pic(Which::Master), b.irq.pic(Which::Slave), b.irq.ioapic());
    let other = bench(&[0]);
    other.irq.set_pic(Which::Master, &master);
    other.irq.set_pic(Which::Slave, &slave);
    assert!(other.irq.extint_pending());
    assert_eq!(other.irq.extint_ack(), Some((Vector(0x2c), Owing::NOTHING)));
    let asserted = irqchip::IoApicState { irr: 1 << 20, ..ioapic };
    other.irq.set_ioapic(&asserted);
    assert_eq!(other.take(0), Some(0x61));
    let mut low = [0; 4];
    assert!(other.irq.mmio_read(IOAPIC, &mut low));
    assert_eq!(u32::from_le_bytes(low), ioapic.ioregsel);
}

fn port(address: u64, len: u32, datamatch: Option<u64>) -> IoEvent {
    IoEvent { space: Space::Port, address, len, datamatch }
}

#[test]
fn an_ioeventfd_fires_for_its_address_length_and_value() {
    let b = bench(&[0]);
    let io = b.irq.ioeventfds();
    let (any, seven, eight) = (eventfd(), eventfd(), eventfd());
    io.assign(port(0x600, 2, Some(7)), seven).unwrap();
    io.assign(port(0x600, 2, Some(8)), eight).unwrap();
    io.assign(port(0x600, 4, None), any).unwrap();
    assert!(b.irq.has_port(0x600));
    assert!(b.irq.pio_write(0x600, 2, 7).is_some());
    assert!(b.irq.pio_write(0x600, 4, 7).is_some());
    assert!(b.irq.pio_write(0x600, 4, 9).is_some());
    assert!(b.irq.pio_write(0x600, 2, 9).is_none());
    assert!(b.irq.pio_write(0x600, 1, 7).is_none());
    assert!(b.irq.pio_write(0x601, 2, 7).is_none());
    let mut value = 0;
    assert!(b.irq.pio_read(0x600, 2, &mut value).is_none());
    assert_eq!((eventfd_read(seven), eventfd_read(eight), eventfd_read(any)), (1, 0, 2));
    io.deassign(port(0x600, 2, Some(7)), seven).unwrap();
    assert!(b.irq.pio_write(0x600, 2, 7).is_none() && b.irq.pio_write(0x600, 2, 8).is_some());
}

#[test]
fn a_wildcard_length_takes_any_write_to_its_address() {
    let b = bench(&[0]);
    let fd = eventfd();
    let what = IoEvent { space: Space::Memory, address: 0xd000_0000, len: 0, datamatch: None };
    b.irq.ioeventfds().assign(what, fd).unwrap();
    for len in [1, 2, 4, 8] {
        assert!(b.irq.mmio_write(0xd000_0000, &[0x5a; 8][..len]).is_some());
    }
    assert!(b.irq.mmio_write(0xd000_0004, &[0; 4]).is_none());
    assert!(!b.irq.has_port(0x600), "memory and ports are apart");
    assert_eq!(eventfd_read(fd), 4);
}

#[test]
fn eight_byte_values_are_compared_whole() {
    let b = bench(&[0]);
    let what = IoEvent {
        space: Space::Memory,
        address: 0xd000_0000,
        len: 8,
        datamatch: Some(0x1122_3344_5566_7788),
    };
    b.irq.ioeventfds().assign(what, eventfd()).unwrap();
    assert!(b.irq.mmio_write(0xd000_0000, &0x1122_3344_5566_7788u64.to_le_bytes()).is_some());
    assert!(b.irq.mmio_write(0xd000_0000, &0x0122_3344_5566_7788u64.to_le_bytes()).is_none());
}

/// A value is compared with all of what the VMM has given: one that is wider than the write meets none.
#[test]
fn a_value_wider_than_the_write_is_met_by_none() {
    let b = bench(&[0]);
    let at = |datamatch| IoEvent {
        space: Space::Memory,
        address: 0xd000_0000,
        len: 1,
        datamatch: Some(datamatch),
    };
    b.irq.ioeventfds().assign(at(0x107), eventfd()).unwrap();
    assert!(b.irq.mmio_write(0xd000_0000, &[7]).is_none());
    b.irq.ioeventfds().assign(at(7), eventfd()).unwrap();
    assert!(b.irq.mmio_write(0xd000_0000, &[7]).is_some());
}

#[test]
fn ioeventfds_are_refused_as_kvm_refuses_them() {
    let b = bench(&[0]);
    let io = b.irq.ioeventfds();
    let fd = eventfd();
    use IoEventError::*;
    assert_eq!(io.assign(port(0, 3, None), fd), Err(Invalid));
    assert_eq!(io.assign(port(0, 0, Some(1)), fd), Err(Invalid));
    assert_eq!(io.assign(port(u64::MAX, 2, None), fd), Err(Invalid));
    assert_eq!(io.assign(port(0x600, 2, None), -1), Err(BadFd(host::BadFd::Closed)));
    io.assign(port(0x600, 2, None), fd).unwrap();
    assert_eq!(io.assign(port(0x600, 2, None), fd), Err(Exists));
    assert_eq!(io.assign(port(0x600, 2, Some(1)), fd), Err(Exists), "a wildcard is there");
    assert_eq!(io.assign(port(0x600, 0, None), fd), Err(Exists), "any length");
    io.assign(port(0x600, 4, Some(1)), fd).unwrap();
    assert_eq!(io.assign(port(0x600, 4, Some(1)), fd), Err(Exists));
    io.assign(port(0x600, 4, Some(2)), fd).unwrap();
    assert_eq!(io.deassign(port(0x600, 4, Some(3)), fd), Err(NotFound));
    assert_eq!(io.deassign(port(0x600, 2, None), eventfd()), Err(NotFound));
    io.deassign(port(0x600, 2, None), fd).unwrap();
    assert_eq!(io.deassign(port(0x600, 2, None), fd), Err(NotFound));
    for n in 0..MAX_AT_ADDRESS as u64 {
        io.assign(port(0x700, 1, Some(n)), fd).unwrap();
    }
    assert_eq!(io.assign(port(0x700, 1, Some(u64::MAX)), fd), Err(Full));
    for n in 0..(MAX_IOEVENTFDS - MAX_AT_ADDRESS) as u64 - 2 {
        io.assign(port(0x1000 + n, 1, None), fd).unwrap();
    }
    assert_eq!(io.assign(port(0x8000, 1, None), fd), Err(Full));
}

#[test]
fn time_is_the_hosts() {
    // The test clock drives both halves: what the PIT reads and when its timer fires.
    let b = bench(&[0]);
    b.irq.create_pit(true).unwrap();
    b.start_pit(1000);
    let before = clock::monotonic_ns();
    test::clock().advance(419_048);
    assert_eq!(clock::monotonic_ns() - before, 419_048);
    b.out(0x43, 0);
    assert_eq!(u16::from_le_bytes([b.inb(0x40), b.inb(0x40)]), 500);
    b.out(0x61, 3);
    assert_eq!(b.inb(0x61) & 3, 3);
}
