//! How much is done with interrupts off, counted: every operation of the interrupt system, on tables as
//! long as a VMM can make them. What a vCPU does in its loop counts from the first step to the last,
//! because interrupts are off there from one end to the other.

use alloc::{format, string::String, vec::Vec};

use host::{
    Arc, clock, irq,
    std_port::test::{self, eventfd, eventfd_read, longest_irqs_off},
};
use irqchip::pic::Which;
use irqchip::{IrqMessage, LapicEffect, Msi, Route, Target, lapic::CpuRole, message::BROADCAST};
use x86::Vector;

use super::{resample::AT_ONCE, *};
use crate::vcpus::VcpuTable;

const IOAPIC: u64 = 0xfec0_0000;
const LEVEL: u32 = 1 << 15;
const VCPUS: u32 = 4;

/// What one operation may take: each pin, of both controllers, to each vCPU, looked at three times for
/// the one of lowest priority; a few steps for each pin; the routes that are looked at in one go. Routes
/// and resamplers are not in it.
fn bound() -> u64 {
    let (pins, vcpus) = (40, u64::from(VCPUS));
    pins * (3 * vcpus + 32) + 256
}

struct Long {
    irq: VmIrq,
    vcpus: Arc<VcpuTable>,
    /// One pair of all.
    signalled: i32,
    told: i32,
}

impl Long {
    /// `resamplers` of them, of which `on_pin` on GSI 5, the rest each on a GSI of its own; as many routes as
    /// there can be.
    fn new(kind: Irqchip, resamplers: u32, on_pin: u32) -> Self {
        let vcpus = Arc::new(VcpuTable::new().unwrap()).unwrap();
        for id in 0..VCPUS {
            let vcpu = VcpuShared::new(id, id, CpuRole::bootstrap_if(id == 0), true).unwrap();
            let _ = vcpu.lapic.write(0xf0, 0x1ff);
            vcpus.add(vcpu).unwrap();
        }
        let irq = VmIrq::new(vcpus.clone()).unwrap();
        match kind {
            Irqchip::Split => irq.create_split(4096).unwrap(),
            kind => irq.create(kind).unwrap(),
        }
        if kind == Irqchip::Full {
            irq.create_pit(false).unwrap();
        }
        let (mut signalled, told) = (0, eventfd());
        for n in 0..resamplers {
            signalled = eventfd();
            let gsi = if n < on_pin { 5 } else { 5000 + n };
            irq.assign_irqfd(signalled, gsi, Some(told)).unwrap();
            if n == 0 {
                test::eventfd_read(signalled);
            }
        }
        let long = Self { irq, vcpus, signalled, told };
        long.routes();
        long
    }

    /// The largest table: the pins, and a level-triggered broadcast for each other GSI.
    fn routes(&self) {
        let full = self.irq.kind() == Irqchip::Full;
        let mut routes = Vec::new();
        for gsi in 0..if full { 24 } else { 0 } {
            let pin = |chip, pin| Route { gsi, target: Target::Pin { chip, pin } };
            routes.push(pin(irqchip::Chip::IoApic, gsi));
            if gsi < 16 {
                let chip = if gsi < 8 { irqchip::Chip::PicMaster } else { irqchip::Chip::PicSlave };
                routes.push(pin(chip, gsi & 7));
            }
        }
        for gsi in 0..4096 - routes.len() as u32 {
            let gsi = if full { 24 + gsi } else { gsi };
            let data = LEVEL | (0x40 + gsi % 0x80);
            let msi = Msi { address_lo: 0xfeef_f000, address_hi: 0, data };
            routes.push(Route { gsi, target: Target::Msi(msi) });
        }
        routes.retain(|route| route.gsi < 4096);
        self.irq.set_routes(&routes).unwrap();
    }

    fn program(&self, pin: u32, low: u32, dest: u32) {
        for (register, value) in [(0x11 + pin * 2, dest << 24), (0x10 + pin * 2, low)] {
            assert!(self.irq.mmio_write(IOAPIC, &register.to_le_bytes()).is_some());
            assert!(self.irq.mmio_write(IOAPIC + 0x10, &value.to_le_bytes()).is_some());
        }
    }

    /// Every vCPU ends what it has, as the loop does: with interrupts off.
    fn end_all(&self) {
        for vcpu in self.vcpus.iter() {
            while let Some(vector) = vcpu.lapic.highest_pending() {
                vcpu.lapic.ack(vector);
                let off = irq::disable();
                if let LapicEffect::Eoi { vector, level: true } = vcpu.lapic.eoi() {
                    let _ = self.irq.eoi(vcpu, vector);
                }
                irq::enable(off);
                self.irq.set_irq_line(5, Source::User, false);
            }
        }
    }
}

/// An operation and its name.
type Operation = (&'static str, fn(&Long));

/// All that reaches the interrupt lock.
const OPERATIONS: [Operation; 20] = [
    ("an end of interrupt", |l| {
        l.irq.set_irq_line(5, Source::User, true);
        l.end_all();
    }),
    ("an end of all pins to all vCPUs", |l| {
        for pin in 0..24 {
            l.program(pin, LEVEL | 0x51, 0xff);
            l.irq.set_irq_line(pin, Source::User, true);
        }
        let first = l.vcpus.get(0).unwrap();
        let vector = first.lapic.highest_pending().unwrap();
        first.lapic.ack(vector);
        let off = irq::disable();
        let _ = first.lapic.eoi();
        let _ = l.irq.eoi(first, vector);
        irq::enable(off);
    }),
    ("a line", |l| {
        l.irq.set_irq_line(5, Source::User, true);
        l.irq.set_irq_line(5, Source::User, false);
    }),
    ("a line to a message", |l| {
        l.irq.set_irq_line(4000, Source::User, true);
    }),
    ("a message to all", |l| {
        l.irq.signal_msi(&Msi { address_lo: 0xfeef_f000, address_hi: 0, data: 0x60 });
    }),
    ("a message to one of lowest priority", |l| {
        l.irq.signal_msi(&Msi { address_lo: 0xfeef_f00c, address_hi: 0, data: 0x160 });
    }),
    ("an IPI to all", |l| {
        let off = irq::disable();
        let from = l.vcpus.get(0).unwrap();
        l.irq.send_ipi(from, &IrqMessage::fixed(Vector(0x61), BROADCAST));
        irq::enable(off);
    }),
    ("the IPIs of a hypercall", |l| {
        let off = irq::disable();
        l.irq.send_pv_ipi(&pv::SendIpi::new(u64::MAX, u64::MAX, 0, 0x62, true).unwrap());
        irq::enable(off);
    }),
    ("an irqfd", |l| test::eventfd_signal(l.signalled, 1)),
    ("new routes", |l| l.routes()),
    ("the ends to report", |l| {
        l.vcpus.iter().for_each(|vcpu| l.irq.follow_routes(vcpu));
    }),
    ("the PIC's end", |l| {
        for (port, value) in [(0x20, 0x11), (0x21, 0x20), (0x21, 4), (0x21, 1), (0x21, 0)] {
            assert!(l.irq.pio_write(port, 1, value).is_some());
        }
        l.irq.set_irq_line(5, Source::User, true);
        let _ = l.irq.extint_ack();
        let off = irq::disable();
        let _ = l.irq.pio_write(0x20, 1, 0x20);
        irq::enable(off);
        l.irq.set_irq_line(5, Source::User, false);
    }),
    ("the PIC's end by itself", |l| {
        for (port, value) in [(0x20, 0x11), (0x21, 0x20), (0x21, 4), (0x21, 3), (0x21, 0)] {
            assert!(l.irq.pio_write(port, 1, value).is_some());
        }
        l.irq.set_irq_line(5, Source::User, true);
        let off = irq::disable();
        let _ = l.irq.extint_ack();
        irq::enable(off);
        l.irq.set_irq_line(5, Source::User, false);
    }),
    ("the PIC polled", |l| {
        l.irq.set_irq_line(5, Source::User, true);
        let off = irq::disable();
        let _ = l.irq.pio_write(0x20, 1, 0x0c);
        let mut value = 0;
        let _ = l.irq.pio_read(0x20, 1, &mut value);
        irq::enable(off);
    }),
    ("the controllers set", |l| {
        for which in [Which::Master, Which::Slave] {
            let state = l.irq.pic(which);
            l.irq.set_pic(which, &state);
        }
        let state = l.irq.ioapic();
        l.irq.set_ioapic(&state);
    }),
    ("the PIT", |l| {
        for (port, value) in [(0x43, 0x34), (0x40, 0), (0x40, 1)] {
            let _ = l.irq.pio_write(port, 1, value);
        }
        clock::monotonic_ns();
        test::clock().advance(1_000_000);
        let _ = l.irq.set_pit_reinject(true);
    }),
    ("an APIC changed", |l| l.irq.apic_changed()),
    ("an irqfd more and less", |l| {
        let (event, other) = (eventfd(), eventfd());
        l.irq.assign_irqfd(event, 6, None).unwrap();
        l.irq.deassign_irqfd(event, 6).unwrap();
        // One that is told: there is no room for another, so one goes first.
        l.irq.deassign_irqfd(l.signalled, 5).unwrap();
        l.irq.deassign_irqfd(l.signalled, 5000 + 4095).unwrap();
        if l.irq.kind() == Irqchip::Full {
            l.irq.assign_irqfd(event, 5, Some(other)).unwrap();
            l.irq.deassign_irqfd(event, 5).unwrap();
        }
    }),
    ("who is owed a signal is told", |l| l.irq.signal_owed()),
    ("all irqfds gone", |l| l.irq.release_irqfds()),
];

/// The operations that take more than they may.
fn too_long(long: &Long, operations: &[Operation]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, operation) in operations {
        let ((), steps) = longest_irqs_off(|| operation(long));
        if steps > bound() {
            found.push(format!("{name}: {steps} steps with interrupts off, at most {}", bound()));
        }
    }
    found
}

#[test]
fn no_operation_grows_with_resamplers_or_routes() {
    for on_pin in [4096, 2000, 8] {
        let full = Long::new(Irqchip::Full, 4096, on_pin);
        full.program(5, LEVEL | 0x50, 0);
        assert_eq!(too_long(&full, &OPERATIONS), Vec::<String>::new(), "{on_pin} on one pin");
    }
    let split = Long::new(Irqchip::Split, 0, 0);
    let of_split: Vec<Operation> = OPERATIONS
        .into_iter()
        .filter(|(name, _)| !name.contains("PI") && !name.contains("end of"))
        .filter(|(name, _)| !name.contains("less") && *name != "an irqfd")
        .collect();
    assert_eq!(too_long(&split, &of_split), Vec::<String>::new(), "split");
}

/// The way it was done before: each resampler is looked for from the beginning.
fn one_by_one(l: &Long) {
    let off = irq::disable();
    let members = (0..).map_while(|skip| {
        let state = l.irq.core.state.lock();
        let members = state.resamplers.of(5)?;
        members.nth_of_all(skip)
    });
    members.for_each(|resampler| resampler.signal());
    irq::enable(off);
}

/// All at once, but where the interrupt ends.
fn in_the_loop(l: &Long) {
    let off = irq::disable();
    let members = l.irq.core.state.lock().resamplers.of(5).cloned();
    members.unwrap().signal_here();
    irq::enable(off);
}

#[test]
fn planted_walks_over_all_resamplers_are_found() {
    let long = Long::new(Irqchip::Full, 4096, 4096);
    let found = too_long(&long, &[("one by one", one_by_one), ("in the loop", in_the_loop)]);
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn few_are_told_at_once_and_many_later_but_each_once() {
    for count in [1, 2, AT_ONCE as u32, AT_ONCE as u32 + 1, 65, 200] {
        let long = Long::new(Irqchip::Full, count, count);
        long.program(5, LEVEL | 0x50, 0);
        for _ in 0..3 {
            test::eventfd_signal(long.signalled, 1);
            let vcpu = long.vcpus.get(0).unwrap();
            let vector = vcpu.lapic.highest_pending().unwrap();
            vcpu.lapic.ack(vector);
            let LapicEffect::Eoi { vector, level: true } = vcpu.lapic.eoi() else { panic!() };
            let Ended::Here(owing) = long.irq.eoi(vcpu, vector) else { panic!() };
            assert_eq!(owing.any(), count > AT_ONCE as u32);
            assert_eq!(eventfd_read(long.told), if owing.any() { 0 } else { count.into() });
            long.irq.signal_owed();
            assert_eq!(eventfd_read(long.told), if owing.any() { count.into() } else { 0 });
            long.irq.signal_owed();
            assert_eq!(eventfd_read(long.told), 0);
        }
    }
}

#[test]
fn who_is_owed_a_signal_gets_it_whatever_becomes_of_the_routes() {
    // The pin of GSI 5 is another's, or nobody's, before anybody is told.
    for gsi in [Some(6), None] {
        let count = AT_ONCE as u32 + 1;
        let long = Long::new(Irqchip::Full, count, count);
        long.program(5, LEVEL | 0x50, 0);
        let other = eventfd();
        for _ in 0..count {
            long.irq.assign_irqfd(eventfd(), 6, Some(other)).unwrap();
        }
        test::eventfd_signal(long.signalled, 1);
        let vcpu = long.vcpus.get(0).unwrap();
        let vector = vcpu.lapic.highest_pending().unwrap();
        vcpu.lapic.ack(vector);
        if let LapicEffect::Eoi { vector, level: true } = vcpu.lapic.eoi() {
            assert!(matches!(long.irq.eoi(vcpu, vector), Ended::Here(owing) if owing.any()));
        }
        let target = Target::Pin { chip: irqchip::Chip::IoApic, pin: 5 };
        let routes: Vec<Route> = gsi.map(|gsi| Route { gsi, target }).into_iter().collect();
        long.irq.set_routes(&routes).unwrap();
        long.irq.signal_owed();
        assert_eq!((eventfd_read(long.told), eventfd_read(other)), (count.into(), 0), "{gsi:?}");
    }
}

#[test]
fn there_is_room_for_so_many_and_no_more() {
    let long = Long::new(Irqchip::Full, MAX_RESAMPLERS as u32, 3000);
    let (event, told) = (eventfd(), eventfd());
    assert_eq!(long.irq.assign_irqfd(event, 7, Some(told)), Err(IrqFdError::Full));
    long.irq.assign_irqfd(event, 7, None).unwrap();
    long.irq.deassign_irqfd(long.signalled, 5000 + 4095).unwrap();
    long.irq.assign_irqfd(eventfd(), 7, Some(told)).unwrap();
    assert_eq!(long.irq.assign_irqfd(eventfd(), 7, Some(told)), Err(IrqFdError::Full));
}
