//! L1's tables for L2 walked in software, and both translations of a linear address of L2's one after the
//! other: for the emulator, instruction fetch and PDPTEs.
//!
//! [`SecondStage`] is L2-physical memory: what [`crate::walk`] does for a guest it does for L2 over it.

use x86::{Exception, Gpa};

use super::rules::Reading;
use super::{L1Fault, NestedAccess, Part, Refusal, Tables};
use crate::grant::Grant;
use crate::role::{PagingContext, Role};
use crate::source::index_at;
use crate::walk::{Access, AccessKind, GuestMemory, Swap, WalkError, translate as walk};

/// Why an L2-physical address cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageError<E> {
    /// L1's tables refuse: L1 hears of it.
    L1 {
        /// The L2-physical address that is looked for.
        gpa: Gpa,
        /// What it hears.
        fault: L1Fault,
    },
    /// L1's memory cannot be read or updated.
    Memory {
        /// The L1-physical address that it leads to.
        gpa: Gpa,
        /// Why it cannot.
        error: E,
    },
}

/// Where an L2-physical address leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The byte's L1-physical address.
    pub gpa: Gpa,
    /// log2 of the size of L1's page: 12, 21, 30.
    pub page_shift: u32,
    /// L1's tables allow writing.
    pub writable: bool,
    /// L1's tables allow fetching.
    pub exec: bool,
}

/// Most entries that one walk can lose races for.
const RESTARTS: u32 = 64;

/// What a walk does to accessed and dirty flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flags {
    /// It sets them, as the CPU does.
    Set,
    /// It leaves them as they are.
    Left,
}

/// Translates an access of L2's, and sets accessed and dirty bits in L1's tables.
pub fn translate<M: GuestMemory + ?Sized>(
    memory: &M,
    tables: &Tables,
    access: &NestedAccess,
) -> Result<Stage, StageError<M::Error>> {
    repeat(memory, tables, access, Flags::Set)
}

/// Translates like [`translate`], but leaves memory as it is: for debuggers.
pub fn probe<M: GuestMemory + ?Sized>(
    memory: &M,
    tables: &Tables,
    access: &NestedAccess,
) -> Result<Stage, StageError<M::Error>> {
    repeat(memory, tables, access, Flags::Left)
}

fn repeat<M: GuestMemory + ?Sized>(
    memory: &M,
    tables: &Tables,
    access: &NestedAccess,
    flags: Flags,
) -> Result<Stage, StageError<M::Error>> {
    // How often an entry changes is for L1's other CPUs to choose, so the loop has to end by
    // itself.
    for _ in 0..RESTARTS {
        if let Some(stage) = once(memory, tables, access, flags)? {
            return Ok(stage);
        }
    }
    // The entries never held still: L1 sees a fault for nothing, and lets L2 try again.
    Err(refuse(tables.role, access, Refusal::Absent))
}

fn refuse<E>(role: Role, access: &NestedAccess, why: Refusal) -> StageError<E> {
    StageError::L1 { gpa: Gpa(access.gpa), fault: access.refused(role, why) }
}

/// One walk. `None`: an entry changed while it was updated.
fn once<M: GuestMemory + ?Sized>(
    memory: &M,
    tables: &Tables,
    access: &NestedAccess,
    flags: Flags,
) -> Result<Option<Stage>, StageError<M::Error>> {
    let root = tables.role;
    let refuse = |why| refuse(root, access, why);
    if root.is_direct() {
        return flat(root, access, flags).map(Some);
    }
    // The index is taken modulo 512: without this an address beyond the tables would find the entry
    // of a lower one.
    if access.gpa >> root.reach() != 0 {
        return Err(refuse(Refusal::Absent));
    }
    let mut path = [(Gpa(0), 0u64); 5];
    let (mut table, mut grant, mut level) = (tables.base, Grant::ALL, root.level());
    let (role, entry) = loop {
        let role = root.at_level(level);
        let at = Gpa(table | (index_at(access.gpa, level) as u64) << 3);
        let entry = memory.read_u64(at).map_err(|error| StageError::Memory { gpa: at, error })?;
        if let Some(step) = path.get_mut(usize::from(level.wrapping_sub(1))) {
            *step = (at, entry);
        }
        match role.read(entry) {
            Reading::Absent => return Err(refuse(Refusal::Absent)),
            Reading::Broken => return Err(refuse(Refusal::Broken)),
            Reading::Leaf(rights) => {
                grant = grant.and(rights);
                break (role, entry);
            }
            Reading::Table(rights) => grant = grant.and(rights),
        }
        table = role.table_frame(entry).gpa().0;
        // An entry of level 1 reads as a leaf, so the level never comes to 0.
        level -= 1;
    };
    if !access.passes(root, grant) {
        return Err(refuse(Refusal::Rights(grant)));
    }
    let gfn = role.frame_for(entry, access.gpa);
    // A debugger looks where nothing else may.
    if flags == Flags::Set && root.leaves_out(gfn) {
        return Err(StageError::L1 { gpa: Gpa(access.gpa), fault: access.to_left_out() });
    }
    // From the leaf up: where a page has to be logged first, no flag of an upper entry is set yet,
    // and nothing was done.
    let steps = path.iter().enumerate().skip(usize::from(level.wrapping_sub(1)));
    for (n, &(at, entry)) in
        steps.take_while(|(n, _)| flags == Flags::Set && *n < root.level().into())
    {
        let dirty = if n + 1 == usize::from(level) && access.write { root.dirty() } else { 0 };
        if access.logs && dirty & !entry != 0 {
            // A flag that cannot be set is in no log: else L2 would do its access again for ever.
            let swap = memory.cmpxchg_u64(at, entry, entry);
            match swap.map_err(|error| StageError::Memory { gpa: at, error })? {
                Swap::Done => {
                    let fault = L1Fault::Unlogged;
                    return Err(StageError::L1 { gpa: Gpa(access.gpa), fault });
                }
                Swap::ReadOnly => continue,
                Swap::Changed => return Ok(None),
            }
        }
        let wanted = entry | root.at_level(n as u8 + 1).accessed() | dirty;
        // Flags that are there already cost no exchange, and no write to L1's memory.
        if wanted != entry {
            let swap = memory.cmpxchg_u64(at, entry, wanted);
            match swap.map_err(|error| StageError::Memory { gpa: at, error })? {
                Swap::Done | Swap::ReadOnly => {}
                Swap::Changed => return Ok(None),
            }
        }
    }
    Ok(Some(Stage {
        gpa: Gpa(gfn.gpa().0 | access.gpa & 0xfff),
        page_shift: 12 + 9 * (u32::from(level) - 1),
        writable: grant.has(Grant::W),
        exec: grant.has(Grant::X),
    }))
}

/// Translates an access of an L2 without tables of L1's.
fn flat<E>(root: Role, access: &NestedAccess, flags: Flags) -> Result<Stage, StageError<E>> {
    let gpa = Gpa(access.gpa);
    if flags == Flags::Set && root.leaves_out(gpa.gfn()) {
        return Err(StageError::L1 { gpa, fault: access.to_left_out() });
    }
    Ok(Stage { gpa, page_shift: 12, writable: true, exec: true })
}

/// L2-physical memory: what L1's tables lead to in L1's memory.
#[derive(Debug)]
pub struct SecondStage<'a, M: ?Sized> {
    memory: &'a M,
    tables: Tables,
    part: Part,
    /// What becomes of the flags of L1's tables.
    flags: Flags,
}

impl<'a, M: GuestMemory + ?Sized> SecondStage<'a, M> {
    /// As a walk of L2's own tables sees it.
    pub const fn tables(memory: &'a M, tables: Tables) -> Self {
        Self { memory, tables, part: Part::Table, flags: Flags::Set }
    }

    /// As an access sees it that has no linear address.
    pub const fn physical(memory: &'a M, tables: Tables) -> Self {
        Self { memory, tables, part: Part::Physical, flags: Flags::Set }
    }

    /// As a debugger sees it, which sets no flags.
    pub const fn probing(memory: &'a M, tables: Tables) -> Self {
        Self { memory, tables, part: Part::Table, flags: Flags::Left }
    }

    fn at(&self, gpa: Gpa, kind: AccessKind) -> Result<Gpa, StageError<M::Error>> {
        let access = self.tables.access(gpa, kind, self.part);
        Ok(repeat(self.memory, &self.tables, &access, self.flags)?.gpa)
    }
}

impl<M: GuestMemory + ?Sized> GuestMemory for SecondStage<'_, M> {
    type Error = StageError<M::Error>;

    fn read_u64(&self, gpa: Gpa) -> Result<u64, Self::Error> {
        let gpa = self.at(gpa, AccessKind::Read)?;
        self.memory.read_u64(gpa).map_err(|error| StageError::Memory { gpa, error })
    }

    fn read_u32(&self, gpa: Gpa) -> Result<u32, Self::Error> {
        let gpa = self.at(gpa, AccessKind::Read)?;
        self.memory.read_u32(gpa).map_err(|error| StageError::Memory { gpa, error })
    }

    fn cmpxchg_u64(&self, gpa: Gpa, old: u64, new: u64) -> Result<Swap, Self::Error> {
        let gpa = self.at(gpa, AccessKind::Write)?;
        self.memory.cmpxchg_u64(gpa, old, new).map_err(|error| StageError::Memory { gpa, error })
    }

    fn cmpxchg_u32(&self, gpa: Gpa, old: u32, new: u32) -> Result<Swap, Self::Error> {
        let gpa = self.at(gpa, AccessKind::Write)?;
        self.memory.cmpxchg_u32(gpa, old, new).map_err(|error| StageError::Memory { gpa, error })
    }
}

/// Why a linear address of L2's leads nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearError<E> {
    /// L2's own tables refuse: #PF.
    L2(Exception),
    /// The address is not canonical: #GP or #SS, as the instruction says.
    NonCanonical,
    /// L1's tables refuse, or L1's memory.
    Stage(StageError<E>),
}

impl<E> From<StageError<E>> for LinearError<E> {
    fn from(error: StageError<E>) -> Self {
        Self::Stage(error)
    }
}

/// Translates a linear address of L2's through L2's tables and L1's to L1-physical memory.
pub fn translate_linear<M: GuestMemory + ?Sized>(
    memory: &M,
    tables: &Tables,
    l2: &PagingContext,
    va: u64,
    access: Access,
) -> Result<Stage, LinearError<M::Error>> {
    let found = walk(&SecondStage::tables(memory, *tables), l2, va, access);
    let found = found.map_err(|error| match error {
        WalkError::Fault(exception) => LinearError::L2(exception),
        WalkError::NonCanonical => LinearError::NonCanonical,
        WalkError::Memory { error, .. } => LinearError::Stage(error),
    })?;
    // L2's own tables decide first, then L1's about the page: the hardware's order of faults.
    let access = tables.access(found.gpa, access.kind, Part::Page);
    let stage = translate(memory, tables, &access)?;
    Ok(Stage { page_shift: stage.page_shift.min(found.page_shift), ..stage })
}
