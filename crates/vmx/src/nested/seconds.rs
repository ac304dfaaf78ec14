//! The vmcs02s of a vCPU whose L1 has several VMCSs: one for each that was current of late. What one of them holds is compared with the
//! VMCS12 that VMPTRLD finds, so that an entry composes and checks what differs, and its translations are under a tag of its own.
//!
//! Those that lie here are loaded by nobody: an exchange in the loop is between vmcs01 and [`Nested::other`]. They change
//! places with that one outside the loop alone, at VMPTRLD.

use core::{cell::Cell, mem};

use host::{KBox, NoMemory};
use nested_vmx::{machine::Composed, merge};
use x86::{Cr0, Cr4, Gpa};

use super::kept::{Nested, Sources};
use crate::{passed::Map, state::attention, vmcs::Vmcs};

/// So many lie beside the one that L2 is entered with.
const BESIDE: usize = 3;

/// What is known of a vmcs02 that its fields do not say.
#[derive(Debug)]
pub(crate) struct Made {
    /// L0's part of it as it was composed last.
    pub(crate) l0: merge::L0,
    /// What that was made from. `None`: it was not.
    pub(crate) sources: Cell<Option<Sources>>,
    /// CR0 and CR4 of L2 when it was last left, as far as L0 keeps them and vmcs02 does not.
    pub(crate) kept_by_l0: Option<(Cr0, Cr4)>,
    /// The VPID of L1's that its own stood for last. No two of a vCPU's stand for one: what L2 flushes under it is flushed.
    pub(crate) last_vpid: u16,
    /// What its map of MSRs gives L2.
    pub(crate) map: Map,
    /// Its EPT pointer for an L2 with tables of L1's own; 0, which no entry takes, before there is one.
    pub(crate) root: u64,
    /// L1 executed INVEPT, or what was withdrawn was flushed under other pointers: what the CPU has of L2's root is dropped when the
    /// root is found next.
    pub(crate) flush_due: bool,
}

impl Made {
    /// Nothing is known.
    #[allow(clippy::declare_interior_mutable_const)] // A copy of it is what is wanted.
    pub(crate) const NONE: Self = Self {
        l0: merge::L0::NONE,
        sources: Cell::new(None),
        kept_by_l0: None,
        last_vpid: 0,
        map: Map::Unknown,
        root: 0,
        flush_due: false,
    };
}

/// A vmcs02 that L2 is not entered with.
#[derive(Debug)]
struct Second {
    /// Whose VMCS12 it was composed of last.
    of: Option<Gpa>,
    vmcs: Vmcs,
    made: Made,
    composed: KBox<Composed>,
    /// [`Seconds::flushes`] when it was left: what was flushed until then was under its pointer, too.
    flushes: u64,
    /// [`Seconds::left`] when it was left.
    left: u64,
}

/// What lies beside. All of them are of this type, and [`Nested::beside`] has them all: what becomes of a VMCS that a CPU may hold
/// parts of is said there.
#[derive(Debug)]
pub(crate) struct Seconds {
    all: [Option<KBox<Second>>; BESIDE],
    /// Whose VMCS12 [`Nested::other`] was composed of, and of what, when that ceased to be current.
    of: Option<Gpa>,
    composed: Option<KBox<Composed>>,
    /// Counts flushes of all roots: those reach the EPT pointers of vmcs01 and of [`Nested::other`] alone.
    flushes: u64,
    /// Counts VMCSs that were left.
    left: u64,
}

impl Second {
    fn new(revision: u32, flushes: u64) -> Result<KBox<Self>, NoMemory> {
        let (vmcs, composed) = (Vmcs::new(revision)?, KBox::new(Composed::NOTHING)?);
        KBox::new(Self { of: None, vmcs, made: Made::NONE, composed, flushes, left: 0 })
    }
}

impl Seconds {
    pub(crate) const NONE: Self =
        Self { all: [const { None }; BESIDE], of: None, composed: None, flushes: 0, left: 0 };

    fn each(&self) -> impl Iterator<Item = &Second> {
        self.all.iter().flatten().map(|second| &**second)
    }

    /// Their VMCSs.
    pub(crate) fn vmcss(&self) -> impl Iterator<Item = &Vmcs> {
        self.each().map(|second| &second.vmcs)
    }

    /// What is flushed under the EPT pointers of those that may be entered is to be under theirs as well.
    pub(crate) fn owe_flush(&mut self) {
        self.flushes = self.flushes.wrapping_add(1);
    }

    /// What lies under their VPIDs is given up.
    pub(crate) fn drop_vpids(&mut self) {
        for second in self.all.iter_mut().flatten() {
            second.vmcs.drop_vpid();
        }
    }

    /// A VPID of L1's is that of [`Nested::other`] from now on: theirs is another when they come back.
    pub(crate) fn give_up_vpid(&mut self, vpid: u16) {
        for second in self.all.iter_mut().flatten().filter(|second| second.made.last_vpid == vpid) {
            second.made.last_vpid = 0;
        }
    }
}

/// The one to be used for the VMCS12 at `at`: its own, a new one, or the one that was left longest ago.
fn choose(
    all: &mut [Option<KBox<Second>>; BESIDE],
    at: Gpa,
    make: impl FnOnce() -> Result<KBox<Second>, NoMemory>,
) -> Option<&mut Second> {
    let of = |second: &Option<KBox<Second>>| second.as_ref().and_then(|second| second.of);
    let place = match all.iter().position(|second| of(second) == Some(at)) {
        Some(own) => own,
        None => {
            if let Some(free) = all.iter_mut().find(|second| second.is_none()) {
                *free = make().ok();
            }
            // Without memory for one, too. If there is none, L2 goes on with the one that it has.
            let there = all.iter().enumerate().filter_map(|(n, s)| Some((n, s.as_ref()?.left)));
            there.min_by_key(|(_, left)| *left)?.0
        }
    };
    all.get_mut(place)?.as_deref_mut()
}

#[cfg(test)]
impl Seconds {
    /// How many lie beside, and whether there is room to note what the one in use is composed of.
    pub(super) fn count(&self) -> (usize, bool) {
        (self.vmcss().count(), self.composed.is_some())
    }
}

impl Nested {
    /// Before an instruction after which another VMCS may be current. `other`: it makes another current.
    pub(super) fn set_down(&mut self, other: bool) {
        let m = &self.machine;
        // A shadow VMCS is never entered: vmcs02 stays that of the one before.
        let Some(at) = m.current().filter(|_| !self.without_tracking && !m.vmcs12().is_shadow())
        else {
            return;
        };
        let seconds = &mut self.seconds;
        // An L1 with one VMCS costs no memory, unless it makes that current once more.
        if seconds.composed.is_none() && other {
            seconds.composed = KBox::new(Composed::NOTHING).ok();
        }
        if let Some(composed) = &mut seconds.composed {
            m.set_down(composed);
            seconds.of = Some(at);
        }
    }

    /// Behind such an instruction: the VMCS12 that is current gets the vmcs02 that it had before. `before`: what was current
    /// then. `attention`: the vCPU's.
    pub(super) fn take_up(&mut self, before: Option<Gpa>, revision: u32, attention: u16) {
        let m = &mut self.machine;
        let Some(at) = m.current().filter(|at| Some(*at) != before && !m.vmcs12().is_shadow())
        else {
            return;
        };
        let seconds = &mut self.seconds;
        let Some(here) = seconds.composed.as_mut().filter(|_| !self.without_tracking) else {
            return;
        };
        let of = seconds.of.replace(at);
        if of == Some(at) {
            // A shadow VMCS was current meanwhile, or none.
            return m.take_up(here, here);
        }
        let make = || Second::new(revision, seconds.flushes);
        let Some(second) = choose(&mut seconds.all, at, make) else { return m.take_up(here, here) };
        mem::swap(&mut second.vmcs, &mut self.other);
        mem::swap(&mut second.made, &mut self.made);
        mem::swap(&mut second.composed, here);
        second.of = of;
        seconds.left = seconds.left.wrapping_add(1);
        second.left = seconds.left;
        // Which pointer it was that was flushed meanwhile is not asked.
        let then = mem::replace(&mut second.flushes, seconds.flushes);
        self.made.flush_due |= then != seconds.flushes;
        // What waits was for the one that goes, too, and reaches it no more.
        if attention & attention::FLUSH_TDP != 0 {
            seconds.flushes = seconds.flushes.wrapping_add(1);
        }
        if attention & attention::FLUSH != 0 {
            second.vmcs.drop_vpid();
        }
        if second.vmcs.is_unnoted() {
            // It was read outside the loop, and nobody would clear it later.
            second.vmcs.clear_elsewhere();
        }
        // It has the thread's words of another run.
        self.has_host = false;
        m.take_up(here, &second.composed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_memory_the_ones_that_are_there_go_on() {
        let mut all = [const { None }; BESIDE];
        assert!(choose(&mut all, Gpa(0x1000), || Err(NoMemory)).is_none());
        let one = choose(&mut all, Gpa(0x1000), || Second::new(4, 0)).unwrap();
        one.of = Some(Gpa(0x5000));
        let again = choose(&mut all, Gpa(0x1000), || Err(NoMemory)).unwrap();
        assert_eq!(again.of, Some(Gpa(0x5000)));
    }
}
