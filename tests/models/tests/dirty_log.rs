//! The dirty log: who reads it has a page as it was written last, or the page is in the log still. Writes of our own, writes of
//! the guest through a TLB, CPUs that log, and the log's being switched on.

use gannet_models::{
    atomic::{AtomicU32, Ordering::*, weakened},
    dirty::{DirtyBitmap, begin_anew},
    explore, fails_with,
};
use loom::{
    sync::{Arc, Mutex},
    thread,
};
use mmu::slots::change_in_order;
use vm::kick::KickState;

const CPU: u32 = 2;
const FLUSH: u32 = 1;

/// The one page of a slot, and a vCPU.
struct Model {
    log: DirtyBitmap,
    /// What the page holds.
    page: AtomicU32,
    /// Under the MMU lock: the leaf lets the guest write.
    writable: Mutex<bool>,
    state: KickState<AtomicU32>,
    /// Interrupts are off on the vCPU's CPU.
    irqs_off: AtomicU32,
    /// The guest has told that its write is done.
    told: AtomicU32,
    /// The slots that are published have a log.
    logs: AtomicU32,
    /// A fault is in its read section of SRCU, whose barriers exchanges stand for.
    reading: AtomicU32,
}

impl Model {
    fn new(writable: bool, logs: bool) -> Arc<Self> {
        Arc::new(Self {
            log: DirtyBitmap::new(1).unwrap(),
            page: AtomicU32::new(0),
            writable: Mutex::new(writable),
            state: KickState::new(0),
            irqs_off: AtomicU32::new(0),
            told: AtomicU32::new(0),
            logs: AtomicU32::new(logs.into()),
            reading: AtomicU32::new(0),
        })
    }

    /// Returns when the vCPU has left the guest once, if it was there.
    fn wait(&self) {
        if let Some(cpu) = self.state.running_on() {
            assert_eq!(cpu, CPU);
            // The interrupt is taken when that CPU has interrupts on.
            while self.irqs_off.load(Acquire) != 0 {
                thread::yield_now();
            }
        }
    }

    fn flush(&self) {
        self.state.request(FLUSH);
        self.wait();
    }

    /// Takes the bit and watches the page. Whether there was anything to do.
    fn take(&self, taken: &mut bool) -> bool {
        let mut writable = self.writable.lock().unwrap();
        *taken = self.log.take(0) != 0;
        *taken && std::mem::take(&mut *writable)
    }

    /// The page as the reader of the log copies it.
    fn copy(&self) -> u32 {
        self.page.load(Relaxed)
    }

    /// Nothing runs beside this. `copy`: what the reader has.
    fn check(&self, copy: u32) {
        let current = copy == self.page.load(Relaxed);
        assert!(current || self.log.is_marked(0), "lost: a write that is in no log");
    }

    /// The guest writes, once, through what the vCPU's TLB has.
    fn guest_writes(&self, tlb: bool) {
        let mut tlb = tlb;
        loop {
            if self.state.take_requests() & FLUSH != 0 {
                tlb = false;
            }
            self.irqs_off.store(1, Release);
            assert!(self.state.enter(CPU));
            let enters = !self.state.has_requests();
            if enters {
                tlb = tlb || *self.writable.lock().unwrap();
                if tlb {
                    self.page.store(7, Relaxed);
                }
            }
            self.state.leave();
            self.irqs_off.store(0, Release);
            if enters && tlb {
                return;
            }
            if enters {
                self.fault(|_| {});
            }
        }
    }

    /// `VmMemory::fault`, for a write. `asleep`: where the host is asked for the page.
    fn fault(&self, asleep: impl FnOnce(&Self)) {
        self.reading.swap(1, AcqRel);
        let logs = self.logs.fetch_or(0, AcqRel) != 0;
        asleep(self);
        let mut writable = self.writable.lock().unwrap();
        *writable = true;
        if logs {
            self.log.mark(0);
        }
        drop(writable);
        self.reading.swap(0, AcqRel);
    }
}

/// We write ourselves, into a page whose bit is set from before, while the log is read.
fn own_write_beside_a_read(masked: bool, write: fn(&Model)) {
    explore(3, move || {
        let model = Model::new(false, true);
        model.log.mark(0);
        let writer = model.clone();
        let writer = thread::spawn(move || write(&writer));
        let mut copy = 0;
        if masked {
            model.log.take_masked(0, 1);
        } else {
            model.log.take(0);
        }
        copy += model.copy();
        writer.join().unwrap();
        model.check(copy);
    });
}

fn write_and_mark(model: &Model) {
    model.page.store(7, Relaxed);
    model.log.mark(0);
}

#[test]
fn a_write_of_our_own_is_in_the_copy_or_in_the_log() {
    own_write_beside_a_read(false, write_and_mark);
    own_write_beside_a_read(true, write_and_mark);
}

#[test]
fn a_bit_taken_without_a_barrier_and_a_mark_before_the_write_are_found_out() {
    let weak = || weakened(|| own_write_beside_a_read(false, write_and_mark));
    assert!(fails_with("lost", weak));
    assert!(fails_with("lost", || own_write_beside_a_read(false, |model| {
        model.log.mark(0);
        model.page.store(7, Relaxed);
    })));
}

/// The guest writes by a translation of its TLB while `read` reads the log.
fn guest_beside_a_read(read: fn(&Model) -> u32) {
    explore(3, move || {
        let model = Model::new(true, true);
        model.log.mark(0);
        let vcpu = model.clone();
        let vcpu = thread::spawn(move || vcpu.guest_writes(true));
        let copy = read(&model);
        vcpu.join().unwrap();
        model.check(copy);
    });
}

#[test]
fn a_write_through_a_tlb_is_in_the_copy_or_in_the_log() {
    guest_beside_a_read(|model| {
        let mut taken = false;
        begin_anew(|| (), || model.take(&mut taken), || model.flush());
        model.copy()
    });
}

#[test]
fn bits_that_are_handed_out_before_the_flush_or_after_it_are_found_out() {
    assert!(fails_with("lost", || guest_beside_a_read(|model| {
        let any = model.take(&mut false);
        let copy = model.copy();
        if any {
            model.flush();
        }
        copy
    })));
    assert!(fails_with("lost", || guest_beside_a_read(|model| {
        model.flush();
        model.take(&mut false);
        model.copy()
    })));
}

/// The CPU logs the guest's write. What the guest has told of before the log is read is among the bits.
fn logged_beside_a_read(handed_over_after: bool, gather: fn(&Model)) {
    explore(3, move || {
        let model = Model::new(true, true);
        let vcpu = model.clone();
        let vcpu = thread::spawn(move || {
            vcpu.irqs_off.store(1, Release);
            assert!(vcpu.state.enter(CPU));
            vcpu.page.store(7, Relaxed);
            vcpu.told.store(1, Release);
            if !handed_over_after {
                vcpu.log.mark(0);
            }
            vcpu.state.leave();
            if handed_over_after {
                vcpu.log.mark(0);
            }
            vcpu.irqs_off.store(0, Release);
        });
        let told = model.told.load(Acquire) != 0;
        let mut taken = false;
        begin_anew(|| gather(&model), || model.take(&mut taken), || model.flush());
        assert!(taken || !told, "lost: written before the log was read, and not in it");
        vcpu.join().unwrap();
    });
}

#[test]
fn what_a_cpu_has_logged_is_in_the_log_that_is_read_after() {
    logged_beside_a_read(false, Model::wait);
}

#[test]
fn a_log_handed_over_outside_of_the_mode_and_one_not_gathered_are_found_out() {
    assert!(fails_with("lost", || logged_beside_a_read(true, Model::wait)));
    assert!(fails_with("lost", || logged_beside_a_read(false, |_| ())));
}

/// The log is switched on while the guest faults on the page and writes. What it writes after that is in the log.
fn switched_on(switch: fn(&Model)) {
    explore(3, move || {
        let model = Model::new(false, false);
        let vcpu = model.clone();
        let vcpu = thread::spawn(move || {
            vcpu.fault(|_| thread::yield_now());
            vcpu.guest_writes(false);
        });
        switch(&model);
        let copy = model.copy();
        vcpu.join().unwrap();
        model.check(copy);
    });
}

impl Model {
    fn publish(&self) {
        self.logs.swap(1, AcqRel);
        while self.reading.fetch_or(0, AcqRel) != 0 {
            thread::yield_now();
        }
    }

    fn watch(&self) {
        let any = std::mem::take(&mut *self.writable.lock().unwrap());
        if any {
            self.flush();
        }
    }
}

#[test]
fn a_fault_that_is_under_way_when_the_log_is_switched_on_hides_no_write() {
    switched_on(|model| change_in_order(true, |_| (), || model.publish(), |()| model.watch()));
}

#[test]
fn pages_watched_before_the_slot_is_published_or_not_flushed_are_found_out() {
    assert!(fails_with("lost", || switched_on(|model| {
        model.watch();
        model.publish();
    })));
    assert!(fails_with("lost", || switched_on(|model| {
        model.publish();
        *model.writable.lock().unwrap() = false;
    })));
}

/// Pages that only the CPUs' logs watch exist from the publishing to the settling: meanwhile the logs are on.
fn logging_follows(change: fn(&AtomicU32, &AtomicU32, bool)) {
    explore(3, move || {
        // Whether slots log, and whether CPUs do.
        let words = Arc::new((AtomicU32::new(0), AtomicU32::new(0)));
        let vcpu = words.clone();
        let vcpu = thread::spawn(move || {
            let slots_log = vcpu.0.load(Acquire) != 0;
            let cpus_log = vcpu.1.load(Acquire) != 0;
            // Switched off in between: the look began before.
            let still = vcpu.0.load(Acquire) != 0;
            assert!(!slots_log || cpus_log || !still, "lost: watched, and no CPU logs");
        });
        change(&words.0, &words.1, true);
        change(&words.0, &words.1, false);
        vcpu.join().unwrap();
    });
}

#[test]
fn cpus_log_for_as_long_as_slots_are_logged() {
    logging_follows(|slots, cpus, on| {
        let log = |on: bool| cpus.store(on.into(), Release);
        change_in_order(on, log, || slots.store(on.into(), Release), |()| ());
    });
}

#[test]
fn cpus_that_begin_to_log_after_the_slot_or_stop_before_it_are_found_out() {
    assert!(fails_with("lost", || logging_follows(|slots, cpus, on| {
        if on {
            slots.store(1, Release);
            cpus.store(1, Release);
        } else {
            cpus.store(0, Release);
            slots.store(0, Release);
        }
    })));
}
