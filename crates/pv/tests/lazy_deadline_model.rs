//! The lazy TSC deadline under loom: a guest that sets deadlines and a host whose timer fires at
//! the same time, over every interleaving and every value that the memory model lets a load have.
//! Both run the code of the product, [`guest_sets`] and [`LazyDeadline`]; only the memory under it
//! and the timer beside it are the model's.
//!
//! Nothing is lost: the guest's last deadline is followed by an interrupt at or after its time.
//! Nothing is early: a host that begins to decide at a time before the guest's deadline, which was
//! set completely by then, delivers nothing. Without either fence the model must break one of the
//! two: the tests at the end show that it does.

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
};

use gannet_pv::{
    LazyDeadline, Shared,
    lazy_deadline::{ARMED, PENDING, guest_sets},
};
use loom::{
    model::Builder,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst, fence},
    },
    thread,
};

/// The shared page.
#[derive(Default)]
struct Page {
    armed: AtomicU64,
    pending: AtomicU64,
}

/// The page as one side reaches it, with its fence or without.
struct Side<'a> {
    page: &'a Page,
    fenced: bool,
}

impl Shared for Side<'_> {
    type Error = ();

    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), ()> {
        let word = match offset {
            ARMED => &self.page.armed,
            PENDING => &self.page.pending,
            _ => return Err(()),
        };
        data.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        Ok(())
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), ()> {
        let value = u64::from_le_bytes(data.try_into().map_err(|_| ())?);
        match offset {
            ARMED => self.page.armed.store(value, Relaxed),
            PENDING => self.page.pending.store(value, Relaxed),
            _ => return Err(()),
        }
        Ok(())
    }

    fn fence(&self) {
        if self.fenced {
            fence(SeqCst);
        }
    }
}

/// What happened, in the order of execution; not part of the model.
#[derive(Default)]
struct Log {
    /// Deadlines whose setting has begun, in order.
    begun: Vec<u64>,
    /// How many of them were set completely.
    complete: usize,
    /// Interrupts: when, and how many deadlines had been begun by then.
    delivered: Vec<(u64, usize)>,
}

/// The vCPU's thread in the host: its timer, and the decisions.
struct Host {
    lazy: LazyDeadline,
    now: u64,
    timer: Option<u64>,
    fenced: bool,
}

impl Host {
    fn deliver(&self, log: &RefCell<Log>) {
        let mut log = log.borrow_mut();
        let begun = log.begun.len();
        log.delivered.push((self.now, begun));
    }

    /// WRMSR IA32_TSC_DEADLINE, and what follows an adopted deadline.
    fn set(&mut self, page: &Page, log: &RefCell<Log>, deadline: u64) {
        self.timer = (deadline > self.now).then_some(deadline);
        if self.timer.is_none() {
            self.deliver(log);
        }
        let side = Side { page, fenced: self.fenced };
        self.lazy.arm(&side, self.timer.unwrap_or(0)).unwrap();
    }

    /// The timer expires, if it is armed.
    fn ring(&mut self, page: &Page, log: &RefCell<Log>) -> bool {
        let Some(at) = self.timer.take() else { return false };
        self.now = at;
        // What the guest wants, if it is not in the middle of changing it.
        let wanted = {
            let log = log.borrow();
            if log.complete == log.begun.len() { log.begun.last().copied() } else { None }
        };
        let side = Side { page, fenced: self.fenced };
        match self.lazy.expire(&side).unwrap() {
            Some(later) => self.set(page, log, later),
            None => {
                let early = wanted.is_some_and(|deadline| deadline > at);
                assert!(!early, "early: an interrupt at {at} for a deadline at {wanted:?}");
                self.deliver(log);
            }
        }
        true
    }
}

#[derive(Clone, Copy)]
struct Fences {
    guest: bool,
    host: bool,
}

const AS_WRITTEN: Fences = Fences { guest: true, host: true };

/// The guest sets a deadline, with WRMSR where the protocol asks for it.
fn set(page: &Page, host: &Mutex<Host>, log: &RefCell<Log>, deadline: u64, fenced: bool) {
    log.borrow_mut().begun.push(deadline);
    if guest_sets(&Side { page, fenced }, deadline).unwrap() {
        host.lock().unwrap().set(page, log, deadline);
    }
    let mut log = log.borrow_mut();
    log.complete = log.begun.len();
}

/// The guest sets `first`, and then `later` while the timer rings `rings` times.
fn run(first: u64, later: &'static [u64], rings: usize, fences: Fences) {
    // Every interleaving: no bound on preemptions.
    Builder::new().check(move || {
        let page = Arc::new(Page::default());
        // loom runs its threads one at a time on one thread of the system: no lock, no Send.
        let log = Rc::new(RefCell::new(Log::default()));
        let mut lazy = LazyDeadline::default();
        lazy.configure(1);
        lazy.sync(&Side { page: &page, fenced: true }, 0).unwrap();
        let host = Host { lazy, now: 1, timer: None, fenced: fences.host };
        let host = Arc::new(Mutex::new(host));
        set(&page, &host, &log, first, true);

        let ringing = {
            let (page, host, log) = (page.clone(), host.clone(), log.clone());
            thread::spawn(move || {
                for _ in 0..rings {
                    host.lock().unwrap().ring(&page, &log);
                }
            })
        };
        for deadline in later {
            set(&page, &host, &log, *deadline, fences.guest);
        }
        ringing.join().unwrap();
        while host.lock().unwrap().ring(&page, &log) {}

        let log = log.borrow();
        let (last, all) = (log.begun.last().copied().unwrap(), log.begun.len());
        let heard = log.delivered.iter().any(|(at, begun)| *at >= last && *begun == all);
        assert!(heard, "lost: {:?} set, interrupts {:?}", log.begun, log.delivered);
    });
}

#[test]
fn a_deadline_moved_away_while_the_timer_rings_is_neither_lost_nor_early() {
    run(10, &[20], 1, AS_WRITTEN);
    run(10, &[20], 2, AS_WRITTEN);
}

#[test]
fn deadlines_that_go_back_and_forth_are_neither_lost_nor_early() {
    run(10, &[20, 15], 2, AS_WRITTEN);
    run(10, &[20, 30], 2, AS_WRITTEN);
    run(20, &[10, 15], 2, AS_WRITTEN);
    run(10, &[20, 15, 30], 3, AS_WRITTEN);
}

/// What breaks, or that nothing does.
fn failure(fences: Fences) -> String {
    match catch_unwind(AssertUnwindSafe(|| run(10, &[20], 1, fences))) {
        Ok(()) => "nothing breaks".to_owned(),
        Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
    }
}

#[test]
fn without_the_guests_fence_the_proof_fails() {
    let failure = failure(Fences { guest: false, ..AS_WRITTEN });
    assert!(failure.starts_with("lost") || failure.starts_with("early"), "{failure}");
}

#[test]
fn without_the_hosts_fence_the_proof_fails() {
    let failure = failure(Fences { host: false, ..AS_WRITTEN });
    assert!(failure.starts_with("lost") || failure.starts_with("early"), "{failure}");
}
