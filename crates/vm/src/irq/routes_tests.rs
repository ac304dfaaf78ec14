//! Routes that are replaced while irqfds fire.

extern crate std;

use std::{
    boxed::Box,
    sync::{
        Arc as StdArc,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use host::{
    Arc,
    std_port::test::{self, eventfd},
};
use irqchip::{Msi, Route, Target, lapic::CpuRole};

use super::{controllers::test::BEFORE_AN_MSI, *};
use crate::{vcpu_shared::VcpuShared, vcpus::VcpuTable};

fn to(data: u32) -> [Route; 1] {
    [Route { gsi: 24, target: Target::Msi(Msi { address_lo: 0xfee0_0000, address_hi: 0, data }) }]
}

/// KVM_SET_GSI_ROUTING returns when nobody sends by the old routes any more: a VMM may give the vector to another device.
#[test]
fn what_is_sent_by_the_old_routes_has_been_sent_when_they_are_replaced() {
    let vcpus = Arc::new(VcpuTable::new().unwrap()).unwrap();
    let vcpu = VcpuShared::new(0, 0, CpuRole::Bootstrap, true).unwrap();
    let _ = vcpu.lapic.write(0xf0, 0x1ff);
    vcpus.add(vcpu.clone()).unwrap();
    let irq = VmIrq::new(vcpus).unwrap();
    irq.create(Irqchip::Full).unwrap();
    irq.set_routes(&to(0x88)).unwrap();
    let fd = eventfd();
    irq.assign_irqfd(fd, 24, None).unwrap();
    let (found, is_found) = mpsc::channel();
    let replaced = StdArc::new(AtomicBool::new(false));
    thread::scope(|s| {
        let is_replaced = replaced.clone();
        s.spawn(move || {
            BEFORE_AN_MSI.set(Some(Box::new(move || {
                found.send(()).unwrap();
                // Time enough for who would not wait.
                (0..50).take_while(|_| !is_replaced.load(SeqCst)).for_each(|_| {
                    thread::sleep(Duration::from_millis(2));
                });
            })));
            test::eventfd_signal(fd, 1);
        });
        is_found.recv().unwrap();
        irq.set_routes(&to(0x99)).unwrap();
        replaced.store(true, SeqCst);
        assert_eq!(vcpu.lapic.highest_pending().map(|vector| vector.0), Some(0x88), "sent before");
    });
    vcpu.lapic.ack(x86::Vector(0x88));
    let _ = vcpu.lapic.eoi();
    test::eventfd_signal(fd, 1);
    assert_eq!(vcpu.lapic.highest_pending().map(|vector| vector.0), Some(0x99));
}

/// Interrupts come by the new routes while the call still waits for those of the old ones, and the VMM's I/O APIC is to
/// hear of their ends; and an end may be waited for by the new routes of what came by the old ones last.
#[test]
fn vcpus_look_at_new_routes_before_the_old_ones_are_done_with_and_behind() {
    let vcpus = Arc::new(VcpuTable::new().unwrap()).unwrap();
    let vcpu = VcpuShared::new(0, 0, CpuRole::Bootstrap, true).unwrap();
    let _ = vcpu.lapic.write(0xf0, 0x1ff);
    vcpus.add(vcpu.clone()).unwrap();
    let irq = VmIrq::new(vcpus).unwrap();
    irq.create_split(24).unwrap();
    irq.set_routes(&to(0x88)).unwrap();
    let fd = eventfd();
    irq.assign_irqfd(fd, 24, None).unwrap();
    assert!(vcpu.take_request(Request::Routes));
    let (found, is_found) = mpsc::channel();
    let asked = StdArc::new(AtomicBool::new(false));
    thread::scope(|s| {
        let (was_asked, looks) = (asked.clone(), vcpu.clone());
        s.spawn(move || {
            BEFORE_AN_MSI.set(Some(Box::new(move || {
                found.send(()).unwrap();
                // The call waits for this one.
                let is_asked = (0..500).any(|_| {
                    thread::sleep(Duration::from_millis(2));
                    looks.take_request(Request::Routes)
                });
                was_asked.store(is_asked, SeqCst);
            })));
            test::eventfd_signal(fd, 1);
        });
        is_found.recv().unwrap();
        irq.set_routes(&to(0x99)).unwrap();
        assert!(asked.load(SeqCst), "within the wait");
        assert!(vcpu.take_request(Request::Routes), "behind it");
    });
}
