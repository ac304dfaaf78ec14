//! A flush that is owed to a vCPU: no CPU uses a translation of the TLB's after the page has been given back.

use gannet_models::{
    atomic::{AtomicU32, Ordering::*},
    explore, fails_with,
};
use loom::{sync::Arc, thread};
use vm::kick::KickState;

const FLUSH: u32 = 1;
/// Before and after the vCPU's thread is moved.
const CPUS: [u32; 2] = [4, 6];

struct Model {
    state: KickState<AtomicU32>,
    /// The leaf.
    entry: AtomicU32,
    /// The page is the host's again.
    freed: AtomicU32,
    /// Interrupts are off there.
    irqs_off: [AtomicU32; 2],
}

/// As the code does it.
const AS_WRITTEN: u32 = 0;
/// The vCPU looks at requests before its mode is set, and not after.
const LOOKS_OUTSIDE: u32 = 1;
/// Who withdraws asks first where the vCPU is, and requests then.
const ASKS_FIRST: u32 = 2;
/// What the vCPU owed is forgotten when it goes to another CPU.
const FORGETS: u32 = 3;

impl Model {
    /// The vCPU's TLB on each CPU has the translation from before; it runs on the first and then on the second.
    fn run<const HOW: u32>(&self) {
        let mut owed = [false; 2];
        let mut tlb = [true; 2];
        for (at, cpu) in CPUS.into_iter().enumerate() {
            loop {
                if self.state.take_requests() & FLUSH != 0 {
                    // The thread may be on another CPU when it enters: owed by the vCPU, everywhere.
                    owed = [true; 2];
                }
                if HOW == FORGETS && at == 1 {
                    owed[1] = false;
                }
                self.irqs_off[at].store(1, Release);
                assert!(self.state.enter(cpu));
                let enters = HOW == LOOKS_OUTSIDE || !self.state.has_requests();
                if enters {
                    if std::mem::take(&mut owed[at]) {
                        tlb[at] = false;
                    }
                    tlb[at] = tlb[at] || self.entry.load(Acquire) != 0;
                    let freed = self.freed.load(Acquire) != 0;
                    assert!(!tlb[at] || !freed, "stale: a page is used that was given back");
                }
                self.state.leave();
                self.irqs_off[at].store(0, Release);
                if enters {
                    break;
                }
            }
        }
    }

    /// `WriteTree::finish` with `VcpuTable::request_all_and_wait`.
    fn withdraw<const HOW: u32>(&self) {
        self.entry.store(0, Release);
        let early = (HOW == ASKS_FIRST).then(|| self.state.running_on());
        self.state.request(FLUSH);
        if let Some(cpu) = early.unwrap_or_else(|| self.state.running_on()) {
            let at = usize::from(cpu == CPUS[1]);
            while self.irqs_off[at].load(Acquire) != 0 {
                thread::yield_now();
            }
        }
        self.freed.store(1, Release);
    }
}

fn beside_each_other<const HOW: u32>() {
    explore(3, || {
        let model = Arc::new(Model {
            state: KickState::new(0),
            entry: AtomicU32::new(1),
            freed: AtomicU32::new(0),
            irqs_off: [AtomicU32::new(0), AtomicU32::new(0)],
        });
        let vcpu = model.clone();
        let vcpu = thread::spawn(move || vcpu.run::<HOW>());
        model.withdraw::<HOW>();
        vcpu.join().unwrap();
    });
}

#[test]
fn a_page_that_is_given_back_is_reached_through_no_tlb() {
    beside_each_other::<AS_WRITTEN>();
}

#[test]
fn a_look_outside_of_the_mode_and_a_late_request_are_found_out() {
    assert!(fails_with("stale", beside_each_other::<LOOKS_OUTSIDE>));
    assert!(fails_with("stale", beside_each_other::<ASKS_FIRST>));
}

#[test]
fn a_flush_that_is_forgotten_with_the_cpu_is_found_out() {
    assert!(fails_with("stale", beside_each_other::<FORGETS>));
}
