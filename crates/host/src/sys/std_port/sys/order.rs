//! The order in which threads take locks, over the whole run of a test program.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

use crate::lockdep::Taken;

type Place = &'static Location<'static>;

/// Which were waited for by a thread that held which: `BEFORE[a]` has b if b was taken while a was held.
static BEFORE: Mutex<Option<HashMap<Place, HashSet<Place>>>> = Mutex::new(None);

thread_local! {
    /// With how each was taken, the newest last.
    static HELD: RefCell<Vec<(Place, Taken)>> = const { RefCell::new(Vec::new()) };
    /// Pairs that are in order already, so that most locks ask no other thread.
    static KNOWN: RefCell<HashSet<(Place, Place)>> = RefCell::new(HashSet::new());
}

/// Whether a lock of `to` was ever waited for, through however many others, by one who held `from`.
fn leads(before: &HashMap<Place, HashSet<Place>>, from: Place, to: Place) -> bool {
    let (mut seen, mut next) = (HashSet::from([from]), vec![from]);
    while let Some(place) = next.pop() {
        if place == to {
            return true;
        }
        next.extend(before.get(place).into_iter().flatten().filter(|later| seen.insert(later)));
    }
    false
}

fn is_tried(how: Taken) -> bool {
    how == Taken::Tried
}

/// What this thread holds, back to the newest that it may have waited for: what came before that one is told by its order.
fn before_this() -> Vec<Place> {
    HELD.with_borrow(|held| {
        let from = held.iter().rposition(|(_, how)| !is_tried(*how)).unwrap_or(0);
        held.get(from..).unwrap_or_default().iter().map(|(place, _)| *place).collect()
    })
}

/// A lock of `place` is waited for by one who holds `held`.
fn note(held: Place, place: Place) {
    assert!(held != place, "two locks of one class are held at once, made at {place}");
    // Each pair is noted once, or every lock would take the lock of all threads.
    if KNOWN.with_borrow_mut(|known| known.insert((held, place))) {
        let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = before.get_or_insert_default();
        let circle = leads(before, place, held);
        before.entry(held).or_default().insert(place);
        assert!(
            !circle,
            "who takes the lock made at {place} under that of {held} waits in a circle"
        );
    }
}

/// Notes that this thread takes a lock made at `place`. Panics as [`crate::lockdep::Class::acquire`] says.
pub(crate) fn acquire(place: Place, how: Taken) {
    // A test that fails already says why.
    if std::thread::panicking() {
        return;
    }
    // An attempt that fails waits for nobody, so it makes no order.
    if !is_tried(how) {
        for held in before_this() {
            note(held, place);
        }
    }
    HELD.with_borrow_mut(|all| all.push((place, how)));
}

/// Forgets the newest lock made at `place` that this thread holds.
pub(crate) fn release(place: Place) {
    HELD.with_borrow_mut(|held| {
        if let Some(at) = held.iter().rposition(|(other, _)| *other == place) {
            held.remove(at);
        }
    });
}
