//! Irqfds with a resample eventfd, by GSI: whom the guest's end of an interrupt is told.
//!
//! A VMM may connect thousands of them to one GSI. So the interrupt lock guards only where they are
//! found, by a search; the lists themselves are shared, never changed, and walked without the lock. A
//! change makes new ones, under the lock of [`IrqFds`](super::IrqFds), and puts them in place of the old.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use alloc::vec::Vec;
use host::{Arc, GuestIndex, NoMemory, event::EventFd, steps, task};
use irqchip::routing::MAX_ROUTES;

/// Most irqfds with a resample eventfd in a VM.
pub const MAX_RESAMPLERS: usize = 4096;
/// How many listeners are told at once, where an interrupt ends. More than that are told outside of the run loop,
/// with interrupts on.
pub(super) const AT_ONCE: usize = 8;
/// Members in one piece of a list.
const PIECE: usize = 64;

/// One of them: whom the end is told, unless it has been taken away.
pub(super) struct Resampler {
    event: EventFd,
    gone: AtomicBool,
}

impl Resampler {
    pub(super) const fn new(event: EventFd) -> Self {
        Self { event, gone: AtomicBool::new(false) }
    }

    /// Says no more, wherever it may still be listed.
    pub(super) fn silence(&self) {
        // Relaxed: who walks an old list meanwhile may signal once more, as it might have a moment
        // before.
        self.gone.store(true, Relaxed);
    }

    fn is_silent(&self) -> bool {
        self.gone.load(Relaxed)
    }

    pub(super) fn signal(&self) {
        if !self.is_silent() {
            self.event.signal(1);
        }
    }
}

type Piece = Arc<Vec<Arc<Resampler>>>;

/// All of one GSI, in pieces: a change copies one piece and the list of pieces.
#[derive(Default)]
pub(super) struct Members {
    pieces: Vec<Piece>,
    count: usize,
}

impl Members {
    /// Signals them all. With more than [`AT_ONCE`], process context with interrupts on.
    pub(super) fn signal(&self) {
        for piece in &self.pieces {
            piece.iter().for_each(|resampler| resampler.signal());
            // Few are told where the interrupt ends, with interrupts off, and no rest is allowed
            // there.
            if self.count > AT_ONCE {
                task::cond_resched();
            }
        }
    }

    /// Planted by a test: found by a walk from the beginning.
    #[cfg(test)]
    pub(super) fn nth_of_all(&self, n: usize) -> Option<Arc<Resampler>> {
        host::steps::each(self.pieces.iter().flat_map(|piece| piece.iter())).nth(n).cloned()
    }

    /// Planted by a test: all at once, wherever it is called.
    #[cfg(test)]
    pub(super) fn signal_here(&self) {
        self.pieces.iter().flat_map(|piece| piece.iter()).for_each(|r| r.signal());
    }

    fn pieces(&self, more: usize) -> Result<Vec<Piece>, NoMemory> {
        let mut pieces = Vec::new();
        pieces.try_reserve_exact(self.pieces.len() + more).map_err(|_| NoMemory)?;
        pieces.extend(self.pieces.iter().cloned());
        Ok(pieces)
    }

    fn with(&self, event: &Arc<Resampler>) -> Result<Self, NoMemory> {
        let mut pieces = self.pieces(1)?;
        // A piece with room is taken first, or pieces of one member would pile up.
        let room = pieces.iter().position(|piece| piece.len() < PIECE);
        // Copied, not changed: the old list may be walked by a vCPU at this moment.
        let mut piece = Vec::new();
        piece.try_reserve_exact(PIECE).map_err(|_| NoMemory)?;
        if let Some(old) = room.and_then(|at| pieces.get(at)) {
            piece.extend(old.iter().cloned());
        }
        piece.push(event.clone());
        let piece = Arc::new(piece)?;
        match room.and_then(|at| pieces.get_mut(at)) {
            Some(old) => *old = piece,
            None => pieces.push(piece),
        }
        Ok(Self { pieces, count: self.count + 1 })
    }

    /// `None`: the last one has gone.
    fn without(&self, event: &Arc<Resampler>) -> Result<Option<Self>, NoMemory> {
        let is_it = |other: &Arc<Resampler>| Arc::ptr_eq(other, event);
        let mut pieces = self.pieces(0)?;
        let Some(at) = pieces.iter().position(|piece| piece.iter().any(is_it)) else {
            return Ok(Some(Self { pieces, count: self.count }));
        };
        let mut rest = Vec::new();
        if let Some(old) = pieces.get(at) {
            rest.try_reserve_exact(old.len()).map_err(|_| NoMemory)?;
            rest.extend(old.iter().filter(|other| !is_it(other)).cloned());
        }
        if rest.is_empty() {
            // The order means nothing: all of a GSI are told.
            pieces.swap_remove(at);
        } else {
            let rest = Arc::new(rest)?;
            if let Some(old) = pieces.get_mut(at) {
                *old = rest;
            }
        }
        // It was found above, so one is there to be counted off.
        let count = self.count - 1;
        Ok((count != 0).then_some(Self { pieces, count }))
    }
}

#[derive(Clone)]
struct Group {
    gsi: u32,
    members: Arc<Members>,
}

/// Where they are found. Under the interrupt lock there is nothing to be done with one but to search
/// it, by a logarithm of steps, and to put another in its place.
#[derive(Default)]
pub(super) struct Resamplers {
    /// Sorted by GSI.
    groups: Vec<Group>,
    count: usize,
}

impl Resamplers {
    /// Whether there is none at all.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    fn find(&self, gsi: u32) -> Result<usize, usize> {
        steps::search(&self.groups, &gsi, |group| group.gsi)
    }

    /// The listeners of a GSI.
    #[inline]
    pub(super) fn of(&self, gsi: u32) -> Option<&Arc<Members>> {
        // Asked at each end of interrupt, under the lock; most VMs have none.
        if self.is_empty() {
            return None;
        }
        self.groups.get(self.find(gsi).ok()?).map(|group| &group.members)
    }

    fn copy(&self, more: usize) -> Result<Vec<Group>, NoMemory> {
        let mut groups = Vec::new();
        groups.try_reserve_exact(self.groups.len() + more).map_err(|_| NoMemory)?;
        groups.extend(self.groups.iter().cloned());
        Ok(groups)
    }

    /// Whether all listeners of a GSI have gone, though there was no memory to take them off the list.
    pub(super) fn is_silent(&self, gsi: u32) -> bool {
        self.of(gsi).is_none_or(|members| {
            members.pieces.iter().flat_map(|piece| piece.iter()).all(|member| member.is_silent())
        })
    }

    /// The list with one listener more. Process context, without the interrupt lock.
    pub(super) fn with(&self, gsi: u32, event: &Arc<Resampler>) -> Result<Self, NoMemory> {
        let mut groups = self.copy(1)?;
        match self.find(gsi) {
            Ok(at) => {
                if let Some(group) = groups.get_mut(at) {
                    group.members = Arc::new(group.members.with(event)?)?;
                }
            }
            Err(at) => {
                let members = Arc::new(Members::default().with(event)?)?;
                // At its place, for the list is searched by halves.
                groups.insert(at, Group { gsi, members });
            }
        }
        Ok(Self { groups, count: self.count + 1 })
    }

    /// The list with one listener less. Process context, without the interrupt lock.
    pub(super) fn without(&self, gsi: u32, event: &Arc<Resampler>) -> Result<Self, NoMemory> {
        let mut groups = self.copy(0)?;
        if let Ok(at) = self.find(gsi)
            && let Some(group) = groups.get_mut(at)
        {
            match group.members.without(event)? {
                Some(members) => group.members = Arc::new(members)?,
                None => {
                    groups.remove(at);
                }
            }
        }
        // Counted anew: one that was not found must not be counted off.
        let count = groups.iter().map(|group| group.members.count).sum();
        Ok(Self { groups, count })
    }
}

/// Whether irqfds wait to be told of an end of interrupt ([`VmIrq::signal_owed`](super::VmIrq::signal_owed)).
/// Who gets this sees to it: the vCPU whose guest has ended the interrupt, before it goes on; unless another
/// vCPU is telling the same GSI's at that moment, which then may do it a little later, once for both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "somebody waits for a signal"]
pub struct Owing(bool);

impl Owing {
    /// Nobody waits for a signal.
    pub const NOTHING: Self = Self(false);

    /// Whether somebody waits.
    #[inline]
    pub const fn any(self) -> bool {
        self.0
    }
}

/// GSIs whose resamplers are told outside of the run loop. Not pins, whose GSI may be another before
/// that, or none; and a route has no GSI that does not fit in here.
pub(super) struct Owed(Vec<u64>);

impl Owed {
    pub(super) fn new() -> Result<Self, NoMemory> {
        let mut words = Vec::new();
        words.try_reserve_exact(MAX_ROUTES / 64).map_err(|_| NoMemory)?;
        words.resize(MAX_ROUTES / 64, 0);
        Ok(Self(words))
    }

    pub(super) fn add(&mut self, gsi: u32) {
        if let Some(word) = GuestIndex::from(gsi / 64).of_mut(&mut self.0) {
            *word |= 1 << (gsi % 64);
        }
    }

    /// Takes the first of those from `gsi` on.
    pub(super) fn take_from(&mut self, gsi: u32) -> Option<u32> {
        let (first, mut from) = (gsi / 64, u64::MAX << (gsi % 64));
        // One pass over the words for all of them: the caller goes on behind the one it got, and a
        // bit set behind it is somebody else's.
        for (word, number) in steps::each(self.0.iter_mut().zip(0u32..).skip(first as usize)) {
            let bit = (*word & from).trailing_zeros();
            // Only the first word is cut.
            from = u64::MAX;
            if bit < 64 {
                *word &= !(1 << bit);
                return Some(number * 64 + bit);
            }
        }
        None
    }
}

/// The listeners that are told at once, after the interrupt lock has been released: a listener may come back.
#[derive(Default)]
#[must_use]
pub(super) struct AtOnce {
    lists: [Option<Arc<Members>>; 2],
    count: usize,
    owing: bool,
}

impl AtOnce {
    /// Takes the listeners of a GSI, if they are few enough; else they are owed.
    pub(super) fn take(&mut self, gsi: u32, members: &Arc<Members>, owed: &mut Owed) {
        // All ends of one exit together: each signal wakes a thread with interrupts off.
        let few = self.count + members.count <= AT_ONCE;
        // Two lists: nearly always one GSI ends, at most the PIC's and the I/O APIC's together.
        match self.lists.iter_mut().find(|list| list.is_none()) {
            Some(list) if few => {
                *list = Some(members.clone());
                self.count += members.count;
            }
            _ => {
                owed.add(gsi);
                self.owing = true;
            }
        }
    }

    /// Tells the listeners. Whether there are others.
    #[inline]
    pub(super) fn signal(self) -> Owing {
        if self.count != 0 {
            self.lists.iter().flatten().for_each(|members| members.signal());
        }
        Owing(self.owing)
    }
}

#[cfg(test)]
mod tests {
    use alloc::{collections::BTreeSet, vec::Vec};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_owed_is_a_set_of_gsis(
            gsis in proptest::collection::vec(prop_oneof![0..MAX_ROUTES as u32, any::<u32>()], 0..40),
            from in prop_oneof![0..MAX_ROUTES as u32 + 70, any::<u32>()],
        ) {
            let mut owed = Owed::new().unwrap();
            let set: BTreeSet<u32> =
                gsis.iter().copied().filter(|gsi| *gsi < MAX_ROUTES as u32).collect();
            gsis.iter().for_each(|gsi| owed.add(*gsi));
            let mut taken = |mut next| {
                let mut taken = Vec::new();
                while let Some(gsi) = owed.take_from(next) {
                    taken.push(gsi);
                    next = gsi + 1;
                }
                taken
            };
            let (above, below): (Vec<u32>, Vec<u32>) = set.iter().partition(|gsi| **gsi >= from);
            prop_assert_eq!(taken(from), above);
            prop_assert_eq!(taken(0), below);
            prop_assert_eq!(owed.take_from(0), None);
        }
    }
}
