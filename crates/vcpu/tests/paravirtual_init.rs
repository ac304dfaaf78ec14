//! An INIT ends what the host writes into a guest's pages: a kernel that comes behind it has not given them.

mod rig;

use gannet_vcpu::{By, UserExit};
use irqchip::lapic::Accepted;
use rig::{Machine, add_vcpu, shutdown, vm};

/// Steal time, system time, PV EOI, and the two of asynchronous page faults.
const WRITTEN: [(u32, u64); 5] = [
    (0x4b56_4d03, 0x4001),
    (0x4b56_4d01, 0x4101),
    (0x4b56_4d04, 0x4201),
    (0x4b56_4d02, 0x4301),
    (0x4b56_4d06, 0xec),
];
const POLL_CONTROL: u32 = 0x4b56_4d05;

#[test]
fn the_pages_are_the_guests_own_again() {
    let machine = Machine::default();
    let mut v = add_vcpu(&machine, &vm(&machine), 0);
    v.write_msr(POLL_CONTROL, 0, By::Vmm).unwrap();
    for (index, value) in WRITTEN {
        v.write_msr(index, value, By::Vmm).unwrap();
        assert_eq!(v.read_msr(index, By::Vmm), Ok(value), "{index:#x}");
    }
    v.shared().clone().deliver(Accepted::Init);
    v.backend().cpu().inner().then(shutdown);
    assert_eq!(v.run(&gannet_vcpu::RunInput::default()), UserExit::Shutdown);
    for (index, _) in WRITTEN {
        assert_eq!(v.read_msr(index, By::Vmm), Ok(0), "{index:#x}");
    }
    assert_eq!(v.read_msr(POLL_CONTROL, By::Vmm), Ok(0), "no page");
}
