//! Faults of two vCPUs that map memory of a device's, and a vCPU that enters the guest: none of its entries reaches such memory without
//! knowing that buffers are to be cleared.

use gannet_models::{
    atomic::{AtomicU32, Ordering::*},
    device_reach::DeviceReach,
    explore, fails_with,
};
use loom::{
    sync::{Arc, Mutex},
    thread,
};

/// One vCPU, as others see it, and the tree.
#[derive(Default)]
struct Model {
    reach: DeviceReach,
    /// `Request::Device`.
    request: AtomicU32,
    /// The vCPU's mode: in the guest, or about to be.
    inside: AtomicU32,
    /// Held while it is: an interrupt is acknowledged outside.
    guest: Mutex<()>,
    /// The guest can reach the device's memory.
    mapped: AtomicU32,
}

impl Model {
    /// `VcpuTable::request_all_and_wait`.
    fn tell(&self) {
        self.request.swap(1, SeqCst);
        if self.inside.load(Acquire) != 0 {
            drop(self.guest.lock().unwrap());
        }
    }

    /// `VmMemory::fault`, by the way that it tells the vCPUs.
    fn fault(&self, note: fn(&Self)) {
        note(self);
        self.mapped.store(1, Release);
    }

    fn as_written(&self) {
        self.reach.note(|| self.tell());
    }

    /// Whoever comes second trusts in the first.
    fn once(&self) {
        if !self.reach.is_reached() {
            self.as_written();
        }
    }

    /// Two entries of the vCPU's.
    fn run(&self) {
        let mut knows = false;
        for _ in 0..2 {
            if self.request.swap(0, SeqCst) != 0 {
                knows |= self.reach.is_reached();
            }
            let _inside = self.guest.lock().unwrap();
            self.inside.swap(1, SeqCst);
            // A request that came meanwhile keeps it out.
            if self.request.load(Acquire) == 0 {
                let reached = self.mapped.load(Acquire) != 0;
                assert!(knows || !reached, "reached: a device, by an entry that clears nothing");
            }
            self.inside.store(0, Release);
        }
    }
}

fn two_faults_beside_a_vcpu(note: fn(&Model)) {
    explore(2, move || {
        let model = Arc::new(Model::default());
        let (a, b) = (model.clone(), model.clone());
        let first = thread::spawn(move || a.fault(note));
        let second = thread::spawn(move || b.fault(note));
        model.run();
        first.join().unwrap();
        second.join().unwrap();
    });
}

#[test]
fn no_entry_reaches_a_device_without_knowing() {
    two_faults_beside_a_vcpu(Model::as_written);
}

#[test]
fn a_second_fault_that_does_not_wait_is_found() {
    assert!(fails_with("reached: a device", || two_faults_beside_a_vcpu(Model::once)));
}
