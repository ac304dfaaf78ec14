//! Lists of MSRs of L1's, some of which the vCPU has and not this backend: what an exit stores of those, and a list that is
//! loaded up to the next of them. Both go on in the order of the lists, when the vCPU has done what L1's entry or L2's exit
//! was (SDM vol. 3C §27.4, §28.4, §28.6).

use backend::{ListAct, ListMsr};
use host::KBox;
use nested_vmx::checks::Limits;
use nested_vmx::checks::lists::{Bad, Step};
use nested_vmx::leave::host::{entry_loads, loads};
use nested_vmx::{GuestMemory, Machine};
use x86::Gpa;

/// Most of them that one exit stores.
const MOST: usize = 24;

/// What loads a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// An entry of L2.
    Entry,
    /// The exit behind it.
    Exit,
}

/// What an exit stores yet.
#[derive(Debug)]
struct Stores {
    entries: [(u32, Gpa); MOST],
    count: usize,
    /// The next one.
    at: usize,
}

impl Stores {
    /// None. A constant: it is copied to the heap from here.
    const NONE: Self = Self { entries: [(0, Gpa(0)); MOST], count: 0, at: 0 };
}

/// What waits of lists.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    stores: Option<KBox<Stores>>,
    /// What loads a list now.
    by: Option<By>,
    /// How many entries of that were read.
    read: u32,
    // Three words in place of an option, for the stack that it is made on.
    /// The one that was read last is the vCPU's to load.
    found: bool,
    index: u32,
    value: u64,
    /// The number of the MSR at which an entry of L2 fails; 0: it does not.
    failed: u32,
}

impl Lists {
    /// Whether the vCPU has something to do.
    pub(crate) fn wait(&self) -> bool {
        self.by.is_some() || self.has_stores()
    }

    fn has_stores(&self) -> bool {
        self.stores.as_ref().is_some_and(|stores| stores.at < stores.count)
    }

    /// An exit stores one that the vCPU has.
    #[cold]
    #[inline(never)]
    pub(crate) fn store(&mut self, index: u32, slot: Gpa) -> Result<(), ()> {
        // Most lists name nothing that is left to the vCPU: nothing is allocated for them.
        if self.stores.is_none() {
            self.stores = Some(KBox::new(Stores::NONE).map_err(|_| ())?);
        }
        let stores = &mut **self.stores.as_mut().ok_or(())?;
        // L1 names as many as it likes: more than fit fail the exit.
        *stores.entries.get_mut(stores.count).ok_or(())? = (index, slot);
        stores.count += 1;
        Ok(())
    }

    /// A list is to be loaded. Whether something has to be stored before.
    pub(crate) fn load(&mut self, by: By) -> bool {
        (self.by, self.read, self.found) = (Some(by), 0, false);
        self.has_stores()
    }

    /// The next entry of the list that is being loaded.
    pub(crate) fn step(
        &mut self,
        machine: &Machine,
        limits: &Limits,
        memory: &impl GuestMemory,
    ) -> Option<Result<Step, Bad>> {
        // L2's run, or L1's, has not begun: VMCS12 names the list that it named before.
        let list = match self.by? {
            By::Entry => entry_loads(machine.vmcs12(), &machine.capabilities),
            By::Exit => loads(machine.vmcs12(), &machine.capabilities),
        };
        let step = list.load(self.read, limits, memory);
        self.read = self.read.wrapping_add(1);
        if step.is_none() {
            self.by = None;
        }
        step
    }

    /// The entry that was read last is the vCPU's.
    pub(crate) fn leave(&mut self, index: u32, value: u64) {
        (self.found, self.index, self.value) = (true, index, value);
    }

    /// Takes what the vCPU is to do next, of what is known.
    pub(crate) fn take(&mut self) -> Option<ListMsr> {
        if let Some(stores) = &mut self.stores
            && stores.at < stores.count
            && let Some(&(index, slot)) = stores.entries.get(stores.at)
        {
            stores.at += 1;
            return Some(ListMsr { index, act: ListAct::Store(slot) });
        }
        let found = core::mem::take(&mut self.found);
        found.then_some(ListMsr { index: self.index, act: ListAct::Load(self.value) })
    }

    /// The one that was taken last cannot be done, and the others are not. Whether the entry fails, of an L2 that `runs`.
    pub(crate) fn refuse(&mut self, runs: bool) -> bool {
        // An exit's lists fail as a whole.
        let number = match self.by {
            Some(By::Entry) if runs => self.read,
            _ => 0,
        };
        self.forget();
        // 0 is no entry's number.
        self.failed = number;
        number != 0
    }

    /// Takes the number at which an entry fails.
    pub(crate) fn take_failed(&mut self) -> u32 {
        core::mem::take(&mut self.failed)
    }

    /// Nothing waits any more.
    #[cold]
    #[inline(never)]
    pub(crate) fn forget(&mut self) {
        (self.by, self.found, self.failed) = (None, false, 0);
        if let Some(stores) = &mut self.stores {
            (stores.at, stores.count) = (0, 0);
        }
    }
}
