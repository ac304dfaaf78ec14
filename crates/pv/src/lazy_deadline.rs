//! The lazy TSC deadline: a guest that moves its timer's deadline further away says so in memory
//! and not by WRMSR. Interface of the RFC "KVM: x86: introduce pv feature lazy tscdeadline" (v2,
//! July 2023): a feature bit, an MSR that takes an address, and [`LazyPage`] there.
//!
//! One promise carries all of it: while `armed` is not zero, the host looks at `pending` again no
//! later than at that time. So a guest whose new deadline is not before `armed` need not say more
//! than to store it. See docs/adr/0020-lazy-tsc-deadline.md for why nothing is lost.
//!
//! The page is the guest's: the host keeps what it promised itself, loads `pending` once per
//! decision, and takes any value of it for a deadline.

use x86::Gpa;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Shared;

/// What guest and host of one vCPU share: 64 bytes, aligned to 64. Times are of the guest's TSC.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LazyPage {
    /// The host writes: it looks at `pending` no later than then; 0: not before it is told to by
    /// WRMSR IA32_TSC_DEADLINE.
    pub armed: u64,
    /// The guest writes: its newest deadline.
    pub pending: u64,
    /// Always zero: none are defined.
    pub flags: u32,
    /// Always zero: room for more.
    pub pad: [u32; 11],
}
const _: () = assert!(size_of::<LazyPage>() == 64);

/// Offset of [`LazyPage::armed`].
pub const ARMED: usize = core::mem::offset_of!(LazyPage, armed);
/// Offset of [`LazyPage::pending`].
pub const PENDING: usize = core::mem::offset_of!(LazyPage, pending);

/// The guest's half: makes `deadline` the newest one. True when IA32_TSC_DEADLINE is to be written
/// with it too.
///
/// The fence stands between the store of `pending` and the load of `armed`, as the host's stands
/// between its store of `armed` and its load of `pending`: of two sides that each store and then
/// look, at least one sees the other's store.
///
/// # Errors
/// Those of the memory.
pub fn guest_sets<S: Shared>(shared: &S, deadline: u64) -> Result<bool, S::Error> {
    shared.write(PENDING, &deadline.to_le_bytes())?;
    shared.fence();
    let armed = shared.read_u64(ARMED)?;
    // An earlier one the host would look at too late; without a promise it would not look at all.
    Ok(armed == 0 || deadline < armed)
}

/// The host's half, of one vCPU. All of it is called by the vCPU's own thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LazyDeadline {
    /// The MSR as written; 0 when off.
    msr: u64,
    /// What the host has promised: 0, or a time at which its timer expires and at which
    /// [`expire`](Self::expire) is called.
    armed: u64,
    /// A promise that was taken back while the page was out of reach: the page may show it still.
    stale: u64,
    /// The page may show something else than `armed`.
    in_doubt: bool,
    /// The timer has left TSC-deadline mode: the page is to be given up.
    left: bool,
}

impl LazyDeadline {
    /// A valid write of the MSR. Whatever was promised is to be
    /// [`cancelled`](Self::cancel) before. The page is in doubt until the first
    /// [`sync`](Self::sync).
    pub fn configure(&mut self, msr: u64) {
        let on = msr & 1 != 0;
        // In doubt: the page may hold what another host has promised.
        *self = Self { msr, armed: 0, stale: 0, in_doubt: on, left: false };
    }

    /// The MSR as it reads.
    pub fn msr(&self) -> u64 {
        self.msr
    }

    /// Where the page is, if the guest enabled it.
    #[inline]
    pub fn page(&self) -> Option<Gpa> {
        // Aligned to 64 bytes, so that no page crosses into another frame.
        (self.msr & 1 != 0).then_some(Gpa(self.msr & !0x3f))
    }

    /// Whether the guest enabled it.
    #[inline]
    pub fn enabled(&self) -> bool {
        self.msr & 1 != 0
    }

    /// What is promised; 0 for nothing.
    #[inline]
    pub fn armed(&self) -> u64 {
        self.armed
    }

    /// Whether [`sync`](Self::sync) is to be called before the guest runs on.
    #[inline]
    pub fn in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// Something may have changed the page, or the timer, behind the protocol's back: a restored
    /// state, memory that came or went.
    pub fn doubt(&mut self) {
        self.in_doubt = self.enabled();
    }

    /// The timer has left TSC-deadline mode. Whoever brings it back may be another kernel, which knows
    /// of no page; one that does loses an exit per deadline, and no deadline.
    pub fn leave(&mut self) {
        self.doubt();
        self.left = self.enabled();
    }

    /// Whether the page is to be given up before the guest runs on.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// The VMM has set the timer anew: what was promised is void, whatever the page shows.
    pub fn forget_promise(&mut self) {
        self.armed = 0;
        self.doubt();
    }

    /// After IA32_TSC_DEADLINE was written: the timer runs for `deadline`, or for nothing that
    /// interrupts when that is 0. To be called when the timer is armed, not before: it is a promise.
    ///
    /// # Errors
    /// Those of the memory; the page is in doubt then.
    #[inline]
    pub fn arm<S: Shared>(&mut self, shared: &S, deadline: u64) -> Result<(), S::Error> {
        // The page says so already, and the guest reads it each time.
        if self.armed == deadline && !self.in_doubt {
            return Ok(());
        }
        // The timer runs for the new one in any case; of the old one the page may still speak.
        let before = core::mem::replace(&mut self.armed, deadline);
        // The timer runs already. The other way round a guest could trust a promise that nobody
        // keeps yet.
        let stored = shared.write(ARMED, &deadline.to_le_bytes());
        if stored.is_err() {
            self.lose(before);
        }
        stored
    }

    /// The page could not be told that `shown` is no promise any more. Of several such promises
    /// nobody knows which one stands there; the earliest allows for all.
    fn lose(&mut self, shown: u64) {
        self.stale = match (self.stale, shown) {
            (0, only) | (only, 0) => only,
            (one, other) => one.min(other),
        };
        self.in_doubt = true;
    }

    /// The time that was promised has come, or the promise ends sooner while the timer goes on:
    /// takes it back and looks at `pending`. The deadline that the guest has set meanwhile, when
    /// it is later than the promised one: the timer is to be armed for it and the promise made, and no
    /// interrupt is due. `None`: the promised deadline was the newest.
    ///
    /// # Errors
    /// Those of the memory: then the promised deadline is the only one that is known.
    pub fn expire<S: Shared>(&mut self, shared: &S) -> Result<Option<u64>, S::Error> {
        // Given up before the page is: an error must not leave a promise that nobody keeps.
        let promised = core::mem::take(&mut self.armed);
        let looked = Self::take_back(shared);
        match looked {
            // A smaller one came by WRMSR, or is rubbish: no later deadline.
            Ok(pending) => Ok((pending > promised).then_some(pending)),
            Err(error) => {
                self.lose(promised);
                Err(error)
            }
        }
    }

    /// The store, the fence and the one load of a decision. After the fence a guest that stores a
    /// deadline either has stored it, and it is loaded here, or finds `armed` zero and writes the
    /// MSR.
    fn take_back<S: Shared>(shared: &S) -> Result<u64, S::Error> {
        shared.write(ARMED, &0u64.to_le_bytes())?;
        shared.fence();
        shared.read_u64(PENDING)
    }

    /// The timer was stopped: nothing of it is left to look at.
    ///
    /// # Errors
    /// Those of the memory; the page is in doubt then.
    pub fn cancel<S: Shared>(&mut self, shared: &S) -> Result<(), S::Error> {
        self.arm(shared, 0)
    }

    /// Makes the page show the truth again: `running` is the deadline for which the timer runs,
    /// 0 for none that interrupts. A deadline to be set and promised in its place, if the guest
    /// has stored a later one, or one that it may have kept to itself because of a promise that
    /// stood in the page too long.
    ///
    /// # Errors
    /// Those of the memory; the page stays in doubt.
    pub fn sync<S: Shared>(&mut self, shared: &S, running: u64) -> Result<Option<u64>, S::Error> {
        // Until the page was reached: an error leaves it set.
        self.in_doubt = true;
        // What the timer really does, whatever was promised.
        self.armed = running;
        let pending = Self::take_back(shared)?;
        let kept_back = self.stale != 0 && pending > self.stale;
        let later = running != 0 && pending > running;
        // take_back() has stored 0. A promise stands there again only where it is to be kept.
        // A deadline that is adopted is promised by whoever arms the timer for it.
        if !kept_back && !later && running != 0 {
            shared.write(ARMED, &running.to_le_bytes())?;
        }
        // Only behind the stores, none of which has failed: until then the old promise may still
        // stand there.
        self.stale = 0;
        self.in_doubt = false;
        if kept_back || later {
            self.armed = 0;
            return Ok(Some(pending));
        }
        Ok(None)
    }

    /// The newest deadline as it is to be saved: `running`, for which the timer runs, or the later
    /// one that the guest has stored. Changes nothing.
    pub fn newest<S: Shared>(&self, shared: &S, running: u64) -> u64 {
        // Only under a promise may the guest have kept a later one to itself.
        if running == 0 || running != self.armed || self.in_doubt {
            return running;
        }
        shared.read_u64(PENDING).map_or(running, |pending| pending.max(running))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::guest_memory::Memory;

    const MSR: u64 = 0x1001;

    fn page(memory: &Memory) -> LazyPage {
        LazyPage::read_from_bytes(&memory.bytes.borrow()).unwrap()
    }

    fn on() -> (Memory, LazyDeadline) {
        let (memory, mut lazy) = (Memory::new(64), LazyDeadline::default());
        lazy.configure(MSR);
        assert_eq!(lazy.sync(&memory, 0), Ok(None));
        (memory, lazy)
    }

    #[test]
    fn a_later_deadline_is_only_stored_and_an_earlier_one_is_written() {
        let (memory, mut lazy) = on();
        assert_eq!(guest_sets(&memory, 100), Ok(true), "nothing is armed");
        lazy.arm(&memory, 100).unwrap();
        assert_eq!(guest_sets(&memory, 150), Ok(false));
        assert_eq!(guest_sets(&memory, 100), Ok(false));
        assert_eq!(guest_sets(&memory, 99), Ok(true));
    }

    #[test]
    fn a_fire_adopts_a_later_deadline_and_only_a_later_one() {
        for (pending, adopted) in [(150, Some(150)), (100, None), (99, None), (0, None)] {
            let (memory, mut lazy) = on();
            lazy.arm(&memory, 100).unwrap();
            guest_sets(&memory, pending).unwrap();
            assert_eq!(lazy.expire(&memory), Ok(adopted));
            assert_eq!((lazy.armed(), page(&memory).armed), (0, 0));
        }
    }

    #[test]
    fn a_decision_stores_armed_before_it_loads_pending_once() {
        let (memory, mut lazy) = on();
        lazy.arm(&memory, 100).unwrap();
        memory.stores.borrow_mut().clear();
        memory.loads.borrow_mut().clear();
        lazy.expire(&memory).unwrap();
        assert_eq!(*memory.stores.borrow(), [(ARMED, [0; 8].to_vec())]);
        assert_eq!(*memory.loads.borrow(), [(PENDING, 8)]);
    }

    #[test]
    fn an_unchanged_promise_is_not_stored_again() {
        let (memory, mut lazy) = on();
        lazy.arm(&memory, 100).unwrap();
        memory.stores.borrow_mut().clear();
        lazy.arm(&memory, 100).unwrap();
        assert!(memory.stores.borrow().is_empty());
    }

    #[test]
    fn a_promise_that_could_not_be_taken_back_is_made_good_when_the_page_returns() {
        let (memory, mut lazy) = on();
        guest_sets(&memory, 100).unwrap();
        lazy.arm(&memory, 100).unwrap();
        // The slot goes; the timer expires and nobody can be asked.
        let gone = Memory::new(0);
        assert_eq!(lazy.expire(&gone), Err(()));
        assert!(lazy.in_doubt());
        assert_eq!(lazy.sync(&gone, 0), Err(()));
        // What it shows at first is no news: the guest had that interrupt.
        let mut undisturbed = lazy;
        assert_eq!(undisturbed.sync(&memory, 0), Ok(None));
        lazy.lose(100);
        memory.write(ARMED, &100u64.to_le_bytes()).unwrap();
        // But before the host has been there the guest may have trusted what it saw.
        assert_eq!(guest_sets(&memory, 170), Ok(false));
        assert_eq!(lazy.sync(&memory, 0), Ok(Some(170)));
        assert_eq!((lazy.in_doubt(), page(&memory).armed), (false, 0));
        assert_eq!(lazy.sync(&memory, 0), Ok(None), "and only once");
    }

    #[test]
    fn a_sync_shows_the_running_timer_or_adopts_what_is_later() {
        let (memory, mut lazy) = on();
        guest_sets(&memory, 100).unwrap();
        lazy.doubt();
        assert_eq!(lazy.sync(&memory, 100), Ok(None));
        assert_eq!((lazy.armed(), page(&memory).armed), (100, 100));
        guest_sets(&memory, 130).unwrap();
        lazy.doubt();
        assert_eq!(lazy.sync(&memory, 100), Ok(Some(130)));
        lazy.arm(&memory, 130).unwrap();
        assert_eq!(page(&memory).armed, 130);
        lazy.doubt();
        assert_eq!(lazy.sync(&memory, 0), Ok(None), "the timer was stopped");
        assert_eq!((lazy.armed(), page(&memory).armed), (0, 0));
    }

    #[test]
    fn what_is_saved_is_the_newest_deadline() {
        let (memory, mut lazy) = on();
        guest_sets(&memory, 500).unwrap();
        assert_eq!(lazy.newest(&memory, 0), 0, "nothing runs");
        assert_eq!(lazy.newest(&memory, 400), 400, "nothing was promised");
        lazy.arm(&memory, 500).unwrap();
        assert_eq!(lazy.newest(&memory, 500), 500);
        guest_sets(&memory, 700).unwrap();
        assert_eq!(lazy.newest(&memory, 500), 700);
        assert_eq!(lazy.newest(&Memory::new(0), 500), 500);
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// The guest sets a deadline, so far ahead.
        Set(u64),
        /// So much time passes.
        Wait(u64),
        /// The guest stops its timer.
        Stop,
        /// The page disappears and comes back.
        Absent(bool),
        /// A guest that does not keep to the protocol stores this.
        Scribble(u64, u64),
    }

    fn steps(wild: bool) -> impl Strategy<Value = std::vec::Vec<Step>> {
        let scribble = (any::<u64>(), any::<u64>()).prop_map(|(a, p)| Step::Scribble(a, p));
        let tame = prop_oneof![
            6 => (1..2000u64).prop_map(Step::Set),
            4 => (1..1500u64).prop_map(Step::Wait),
            1 => Just(Step::Stop),
            1 => any::<bool>().prop_map(Step::Absent),
        ];
        let any = prop_oneof![9 => tame.clone(), 3 => scribble].boxed();
        let tame = tame.boxed();
        proptest::collection::vec(if wild { any } else { tame }, 1..80)
    }

    /// A host with one timer: what crates/vcpu does, on a clock of its own.
    struct Host {
        lazy: LazyDeadline,
        now: u64,
        timer: Option<u64>,
        delivered: std::vec::Vec<u64>,
    }

    impl Host {
        fn wrmsr(&mut self, page: &Memory, deadline: u64) {
            self.timer = (deadline > self.now).then_some(deadline);
            if deadline != 0 && deadline <= self.now {
                self.delivered.push(self.now);
            }
            let _ = self.lazy.arm(page, self.timer.unwrap_or(0));
        }

        fn before_entry(&mut self, page: &Memory) {
            if self.lazy.in_doubt()
                && let Ok(Some(deadline)) = self.lazy.sync(page, self.timer.unwrap_or(0))
            {
                self.wrmsr(page, deadline);
            }
        }

        fn advance(&mut self, page: &Memory, to: u64) {
            while let Some(at) = self.timer.filter(|at| *at <= to) {
                self.now = at;
                self.timer = None;
                match self.lazy.expire(page) {
                    Ok(Some(later)) => self.wrmsr(page, later),
                    _ => self.delivered.push(at),
                }
                self.before_entry(page);
            }
            self.now = to;
        }
    }

    proptest! {
        #[test]
        fn every_last_deadline_interrupts_exactly_when_it_is_due(steps in steps(false)) {
            let (memory, lazy) = on();
            let gone = Memory::new(0);
            let mut absent = false;
            let mut host = Host { lazy, now: 1, timer: None, delivered: std::vec![] };
            let mut wanted: Option<u64> = None;
            for step in steps {
                let page = if absent { &gone } else { &memory };
                host.before_entry(page);
                match step {
                    // A guest that cannot reach its page does not run on.
                    Step::Set(ahead) if !absent => {
                        let deadline = host.now + ahead;
                        if guest_sets(&memory, deadline).unwrap() {
                            host.wrmsr(page, deadline);
                        }
                        wanted = Some(deadline);
                    }
                    Step::Stop if !absent => {
                        host.wrmsr(page, 0);
                        wanted = None;
                    }
                    Step::Wait(time) if !absent => {
                        let to = host.now + time;
                        let before = host.delivered.len();
                        host.advance(page, to);
                        let due = wanted.filter(|at| *at <= to);
                        let got = &host.delivered[before..];
                        prop_assert_eq!(got, due.as_slice());
                        if due.is_some() {
                            wanted = None;
                        }
                    }
                    Step::Absent(now) => absent = now,
                    _ => {}
                }
            }
        }

        #[test]
        fn a_page_full_of_lies_never_stops_the_host(steps in steps(true)) {
            let (memory, lazy) = on();
            let mut host = Host { lazy, now: 1, timer: None, delivered: std::vec![] };
            for step in steps {
                host.before_entry(&memory);
                match step {
                    Step::Set(ahead) => {
                        let deadline = host.now + ahead;
                        if guest_sets(&memory, deadline).unwrap() {
                            host.wrmsr(&memory, deadline);
                        }
                    }
                    Step::Stop => host.wrmsr(&memory, 0),
                    Step::Wait(time) => {
                        let (to, before) = (host.now + time, host.delivered.len());
                        host.advance(&memory, to);
                        // A timer fires once for each time it is armed.
                        prop_assert!(host.delivered.len() - before <= 2);
                    }
                    Step::Scribble(armed, pending) => {
                        memory.write(ARMED, &armed.to_le_bytes()).unwrap();
                        memory.write(PENDING, &pending.to_le_bytes()).unwrap();
                    }
                    Step::Absent(_) => {}
                }
                prop_assert!(host.timer.is_none_or(|at| at > host.now));
                prop_assert_eq!(host.lazy.armed(), host.timer.unwrap_or(0));
            }
        }
    }
}
