//! The vmcs02s of a vCPU whose L1 has several VMCSs: one for each that was current of late. What one of them holds is compared with the
//! VMCS12 that VMPTRLD finds, so that an entry composes and checks what differs, and its translations are under a tag of its own.
//!
//! Those that lie here are loaded by nobody: an exchange in the loop is between vmcs01 and [`Nested::other`]. They change
//! places with that one outside the loop alone, at VMPTRLD.

use core::cell::Cell;

use cpu::Cpu;
use host::{KBox, NoMemory};
use nested_vmx::{machine::Composed, merge};
use x86::{Cr0, Cr4, Gpa, vmcs::field::Width};

use crate::{fields::Counted, passed::Map, vmcs::Vmcs};

/// So many lie beside the one that L2 is entered with.
const BESIDE: usize = 3;

/// The value of a counted field. Nothing else makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source<T>(T);

impl<T: Copy> Source<T> {
    /// The field's value in `vmcs`.
    #[inline(always)]
    pub(crate) fn of<W: Width<Value = T>>(field: Counted<W>, vmcs: &Vmcs, cpu: &impl Cpu) -> Self {
        Self(vmcs.get(cpu, field.slot()))
    }

    #[inline(always)]
    pub(crate) fn value(self) -> T {
        self.0
    }
}

impl Source<u32> {
    /// Without bits of which nothing follows.
    #[inline(always)]
    pub(crate) const fn without(self, bits: u32) -> Self {
        Self(self.0 & !bits)
    }
}

/// Words of vmcs01, and of L0 beside it, that L0's part of vmcs02 follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sources {
    pub(crate) primary: Source<u32>,
    pub(crate) secondary: Source<u32>,
    pub(crate) exit: Source<u32>,
    pub(crate) entry: Source<u32>,
    pub(crate) exceptions: Source<u32>,
    pub(crate) vpid: u16,
    pub(crate) cr0_mask: Source<u64>,
    pub(crate) cr4_mask: Source<u64>,
    pub(crate) tsc_offset: u64,
    pub(crate) tsc_ratio: u64,
}

/// What is known of a vmcs02 that its fields do not say.
#[derive(Debug)]
pub(crate) struct Made {
    /// L0's part of it as it was composed last.
    pub(crate) l0: merge::L0,
    /// What that was made from. `None`: it was not.
    pub(crate) sources: Cell<Option<Sources>>,
    /// [`Fields::changes`](crate::fields::Fields::changes) of vmcs01 when it was compared with that last.
    pub(crate) changes: Cell<u64>,
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
        changes: Cell::new(0),
        kept_by_l0: None,
        last_vpid: 0,
        map: Map::Unknown,
        root: 0,
        flush_due: false,
    };
}

/// A vmcs02 that L2 is not entered with.
#[derive(Debug)]
pub(crate) struct Second {
    /// Whose VMCS12 it was composed of last.
    pub(crate) of: Option<Gpa>,
    pub(crate) vmcs: Vmcs,
    pub(crate) made: Made,
    pub(crate) composed: KBox<Composed>,
    /// [`Seconds::flushes`] when it was left: what was flushed until then was under its pointer, too.
    pub(crate) flushes: u64,
    /// [`Seconds::left`] when it was left.
    pub(crate) left: u64,
}

/// What lies beside. All of them are of this type, and [`Nested::beside`] has them all: what becomes of a VMCS that a CPU may hold
/// parts of is said there.
#[derive(Debug)]
pub(crate) struct Seconds {
    pub(crate) all: [Option<KBox<Second>>; BESIDE],
    /// Whose VMCS12 [`Nested::other`] was composed of, and of what, when that ceased to be current.
    pub(crate) of: Option<Gpa>,
    pub(crate) composed: Option<KBox<Composed>>,
    /// Counts flushes of all roots: those reach the EPT pointers of vmcs01 and of [`Nested::other`] alone.
    pub(crate) flushes: u64,
    /// Counts VMCSs that were left.
    pub(crate) left: u64,
}

impl Second {
    pub(crate) fn new(revision: u32, flushes: u64) -> Result<KBox<Self>, NoMemory> {
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
pub(crate) fn choose(
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
    pub(crate) fn count(&self) -> (usize, bool) {
        (self.vmcss().count(), self.composed.is_some())
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
