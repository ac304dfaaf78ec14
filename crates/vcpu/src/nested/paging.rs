//! L2 with tables of L1's: its physical addresses go through those before they are L1's.
//!
//! The hardware walks shadow pages that are composed of L1's tables and the VM's tree ([`mmu::nested`]). Before an
//! entry of L2 their root is looked up, inside the loop if nothing is missing, else before the next entry. A fault
//! on them is L1's if its tables refuse the access; else the frame is brought, or there is a device of L1's.
//!
//! Software that follows an address of L2's (the emulator, instruction fetch) goes through both translations. What
//! L1's tables refuse there is noted, and ends L2's run before anything else happens.

use core::mem::{replace, swap, take};

use backend::{
    Backend, Event, Exit, L1Flush, L1Tables, NestedPageFault, NestedPaging, TablesRefuse, TdpFault,
};
use cpuid::GuestCpuid;
use emulate::{Decoded, Fetched, SimpleMmio, Stop};
use host::{KBox, NoMemory};
use mmu::nested::{
    Part,
    walk::{LinearError, SecondStage, StageError, probe, translate, translate_linear},
};
use mmu::{
    AddressSpace, CodeFetch, EptOffer, GuestMemory, L1Fault, NestedAccess, NestedFault,
    NestedRoots, NestedSwitch, PagingContext, Section, Tables, shadow::NestedFrame, walk,
};
use stats::VcpuCount;
use vm::memory::{MemoryError, NestedOutcome, VmMemory, shadow::Caller};
use x86::{Exception, Gpa, Gva, cpuid::feature, vmcs::ApicAccess};

use super::memory::{Mapped, Whole};
use crate::{
    Vcpu,
    exits::{code::CodeState as _, device::page_offset},
    run::{
        events::Outer,
        outcome::{Break, Next, Outcome},
        user_exit::UserExit,
    },
};

/// A vCPU's side of L1's tables for L2.
#[derive(Debug)]
pub(crate) struct Stage {
    /// The tables that L2 runs with. `None`: L1 runs, or L2 without any.
    pub(crate) tables: Option<Tables>,
    roots: NestedRoots,
    /// The bytes that were fetched for the others: with tables of L1's nothing is remembered.
    fetch: KBox<CodeFetch>,
    /// An access in software that L1's tables refuse, L2-physical.
    pub(crate) refused: Option<(Gpa, TablesRefuse)>,
    /// The frame that a fault inside the loop lacked.
    missing: Option<NestedFrame>,
}

impl Stage {
    #[inline(never)]
    fn new() -> Result<KBox<Self>, NoMemory> {
        let fetch = crate::code_fetch()?;
        let roots = NestedRoots::new();
        KBox::make(|| Self { tables: None, roots, fetch, refused: None, missing: None })
    }
}

/// `linear`: where an access in software was.
const fn told(fault: L1Fault, linear: Option<Gva>) -> TablesRefuse {
    match fault {
        L1Fault::Npf { info } => TablesRefuse::Npf(info),
        L1Fault::Violation { qualification } => TablesRefuse::Violation { qualification, linear },
        L1Fault::Misconfiguration => TablesRefuse::Misconfiguration,
        L1Fault::ApicAccess(access) => TablesRefuse::ApicAccess { access, length: 0 },
        // Where there was room it would have been noted.
        L1Fault::Unlogged => TablesRefuse::LogFull,
    }
}

const fn access_of(fault: NestedPageFault) -> NestedAccess {
    match fault {
        NestedPageFault::Npf { info, gpa } => NestedAccess::npf(info, gpa),
        NestedPageFault::Violation { qualification, gpa } => {
            NestedAccess::violation(qualification, gpa)
        }
    }
}

fn flush(roots: &mut NestedRoots, what: L1Flush) {
    match what {
        L1Flush::None => {}
        L1Flush::All => roots.flush(),
        L1Flush::Of(pointer) => roots.flush_of(pointer),
    }
}

/// The tables of L1's that L2 is to run with.
fn wanted_tables(b: &impl Backend) -> Option<L1Tables> {
    b.nested().and_then(NestedPaging::l1_tables)
}

/// Whether L2 runs with tables of L1's, and so with the PDPTEs that its control block names.
pub(crate) fn has_pdptes_of_l1(b: &impl Backend) -> bool {
    !matches!(wanted_tables(b), None | Some(L1Tables::Flat { .. }))
}

/// How tables of L1's are read, by what L1's CPUID says.
fn read_tables(cpuid: &GuestCpuid, tables: L1Tables) -> Option<Tables> {
    let maxphyaddr = cpuid.maxphyaddr();
    match tables {
        L1Tables::Npt { ncr3, cr0, cr4, efer } => {
            let gbpages = cpuid.has(feature::GBPAGES);
            let amd = cpuid.vendor().is_amd_like();
            let context = PagingContext {
                cr0,
                cr4,
                efer,
                maxphyaddr,
                gbpages,
                amd,
                ..PagingContext::default()
            };
            Tables::npt(ncr3, &context)
        }
        L1Tables::Ept { pointer, pages_2m, pages_1g, execute_only, apic, logs } => {
            let offer = EptOffer { maxphyaddr, execute_only, pages_2m, pages_1g };
            let tables = Tables::ept(pointer, &offer).logging(logs);
            match apic {
                Some(frame) => tables.without_frame(frame),
                None => Some(tables),
            }
        }
        L1Tables::Flat { apic } => Tables::FLAT.without_frame(apic),
    }
}

/// The access of the last exit of L2, if that was a fault on `tables` of L1's.
#[inline]
fn fault_on_tables(b: &impl Backend, tables: Option<Tables>) -> Option<NestedAccess> {
    let tables = tables?;
    b.nested()?.nested_page_fault().map(|fault| tables.fault(access_of(fault)))
}

/// Where a linear address of L2's leads: L1-physical, whether both translations let it be written, and whether L2's
/// lets a program access it.
#[cold]
pub(crate) fn probe_of_l2(
    memory: &VmMemory,
    tables: &Tables,
    context: &PagingContext,
    linear: u64,
) -> Option<(u64, bool, bool)> {
    let stage = SecondStage::probing(memory, *tables);
    let found = walk::probe(&stage, context, linear, walk::Access::READ).ok()?;
    let access = tables.access(found.gpa, walk::AccessKind::Read, Part::Page);
    let stage = probe(memory, tables, &access).ok()?;
    Some((stage.gpa.0, found.writable && stage.writable, found.user))
}

/// Which tables L2 runs with, and on which root.
impl<B: Backend> Vcpu<B> {
    /// Another level runs from now on.
    #[inline]
    pub(super) fn follow_l1_tables(&mut self) {
        let wanted = wanted_tables(&self.b);
        // A guest whose L2 has no tables of L1's pays two comparisons.
        if wanted.is_some() || self.mmu.l1_tables().is_some() {
            self.change_l1_tables(wanted);
        }
    }

    #[inline(never)]
    fn change_l1_tables(&mut self, wanted: Option<L1Tables>) {
        let tables = wanted.and_then(|wanted| read_tables(&self.cpuid, wanted));
        if wanted.is_some() {
            // Not before its root is there.
            self.mmu.roots.set_due();
        }
        let Some(stage) = &mut self.mmu.stage else { return };
        let had = replace(&mut stage.tables, tables).is_some();
        if had != tables.is_some() {
            // Each level's walks of code lead through other tables: a cache of one must not answer for the other.
            swap(&mut self.code.fetch, &mut stage.fetch);
        }
        // It was an access of a run that is over.
        stage.refused = None;
    }

    /// Whether the hardware may be entered: L2 alone has tables of L1's, and those that its control block names now were
    /// looked at, and their root found. For assertions.
    pub(crate) fn follows_l1_tables(&self) -> bool {
        match wanted_tables(&self.b) {
            None => true,
            Some(wanted) => {
                !self.mmu.roots.is_due() && self.mmu.l1_tables() == read_tables(&self.cpuid, wanted)
            }
        }
    }

    /// Right after L2 was entered inside the loop: gives it its root.
    #[inline]
    pub(super) fn nested_root_in_loop(&mut self, s: Section<'_>) -> Next {
        if self.mmu.roots.is_due() { self.find_nested_root(s) } else { Next::Again }
    }

    #[inline(never)]
    fn find_nested_root(&mut self, s: Section<'_>) -> Next {
        let Self { b, mmu, .. } = self;
        let Some((stage, memory, roots, _)) = mmu.staged() else { return Next::Done };
        let (Some(tables), Some(nested)) = (stage.tables, b.nested_mut()) else {
            return Next::Done;
        };
        // Before the root is looked for: one that is found may be stale by a flush that L1 has made.
        flush(&mut stage.roots, nested.take_l1_flush());
        let Some(pages) = memory.nested() else { return Next::Done };
        if let Some(root) = pages.nested_current(&stage.roots, &tables) {
            nested.set_nested_root(root.hpa, tables.tracks_ept());
            roots.nested_found();
            return Next::Again;
        }
        // Another vCPU may hold it for long: outside it is waited for.
        let Some(mut guard) = pages.try_lock() else { return Next::Done };
        match guard.nested_switch(&memory.view(s), &mut stage.roots, &tables) {
            NestedSwitch::Ready { root, replaced } => {
                nested.set_nested_root(root.hpa, tables.tracks_ept());
                if replaced {
                    nested.flush_nested();
                }
                roots.nested_found();
                Next::Again
            }
            NestedSwitch::NeedPages(_) | NestedSwitch::Refused => Next::Done,
        }
    }

    /// Outside the loop: gives L2 its root, if it runs with tables of L1's.
    #[inline]
    pub(crate) fn switch_nested_root(&mut self) -> Result<(), NoMemory> {
        match wanted_tables(&self.b) {
            None => Ok(()),
            wanted => {
                // The next entry tries again, and must not take place without.
                self.find_nested_root_outside(wanted).inspect_err(|_| self.mmu.roots.set_due())
            }
        }
    }

    /// Makes room for an L2 with tables of L1's. Whether there was none.
    #[cold]
    #[inline(never)]
    pub(super) fn make_stage(&mut self) -> Result<bool, NoMemory> {
        let absent = self.mmu.stage.is_none();
        if absent {
            self.mmu.stage = Some(Stage::new()?);
        }
        Ok(absent)
    }

    #[cold]
    #[inline(never)]
    fn find_nested_root_outside(&mut self, wanted: Option<L1Tables>) -> Result<(), NoMemory> {
        if self.make_stage()? {
            // It was not there when the level changed, and has noted nothing.
            self.change_l1_tables(wanted);
        }
        let space = self.smm.space();
        let Self { b, vm, shared, mmu, .. } = self;
        let Some((stage, memory, roots, _)) = mmu.staged() else {
            return Ok(());
        };
        let (Some(tables), Some(nested)) = (stage.tables, b.nested_mut()) else {
            return Err(NoMemory);
        };
        memory.prepare_nested(&***vm)?;
        flush(&mut stage.roots, nested.take_l1_flush());
        let by = || Caller { vcpu: shared, flush: &***vm };
        let (root, replaced) = match memory.nested_switch(by(), &mut stage.roots, &tables) {
            Ok(root) => root,
            Err(_) => {
                // They may be of the memory of the other mode.
                if !vm.memory_in(space.other()).nested_release(&mut stage.roots) {
                    return Err(NoMemory);
                }
                let root = memory.nested_switch(by(), &mut stage.roots, &tables);
                // What those that are given up owed goes with them.
                (root.map_err(|_| NoMemory)?.0, true)
            }
        };
        nested.set_nested_root(root.hpa, tables.tracks_ept());
        if replaced {
            nested.flush_nested();
        }
        roots.nested_found();
        Ok(())
    }

    /// Lets go of all roots: the vCPU goes.
    pub(crate) fn drop_nested_roots(&mut self) {
        let Self { vm, mmu, .. } = self;
        let Some(stage) = &mut mmu.stage else { return };
        let mut spaces = AddressSpace::ALL.into_iter();
        let gone = spaces.any(|space| vm.memory_in(space).nested_release(&mut stage.roots));
        debug_assert!(gone, "roots of a memory that is not this VM's");
    }
}

/// Where tables of L1's lead that do not lead to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    /// To a device of L1's.
    Device,
    /// To memory that is only read.
    Rom,
}

/// Faults of L2's on its root.
impl<B: Backend> Vcpu<B> {
    /// Answers a fault of L2's on its root inside the loop. `None`: the exit is another.
    #[inline]
    pub(super) fn answer_nested_fault(&mut self, s: Section<'_>) -> Option<Next> {
        let access = fault_on_tables(&self.b, self.mmu.l1_tables())?;
        Some(self.nested_fault_in_loop(s, &access))
    }

    #[inline(never)]
    fn nested_fault_in_loop(&mut self, s: Section<'_>, access: &NestedAccess) -> Next {
        let Self { b, gprs, mmu, rare, .. } = self;
        let Some((stage, memory, _, _)) = mmu.staged() else { return Next::Leave };
        let view = memory.view(s);
        let Some(mut guard) = memory.nested().and_then(|pages| pages.try_lock()) else {
            return Next::Leave;
        };
        // The lock is held for the one look: what follows may call back into the tables.
        let outcome = guard.nested_fault(&view, &stage.roots, access);
        drop(guard);
        match outcome {
            NestedFault::Fixed { replaced } => self.nested_fault_fixed(replaced),
            NestedFault::L1(fault) => {
                let undelivered = b.interrupted_delivery();
                // The instruction has to be decoded, which may wait for memory.
                if undelivered.is_none() && is_by_instruction(fault).is_some() {
                    return Next::Leave;
                }
                // L1's log is L1's memory, and its page may be missing.
                if fault == L1Fault::Unlogged {
                    return Next::Leave;
                }
                let Some(nested) = b.nested_mut() else { return Next::Leave };
                let l1 = Mapped::new(&mmu.memory, &rare.last_pages, s);
                let at = Gpa(access.gpa);
                let done = nested.refuse(gprs, at, told(fault, None), undelivered, &l1);
                self.refused(done)
            }
            NestedFault::NeedFrame(missing) => {
                stage.missing = Some(missing);
                Next::Leave
            }
            NestedFault::NeedPages(_) => Next::Leave,
        }
    }

    fn nested_fault_fixed(&mut self, replaced: bool) -> Next {
        // The CPU may have cached the entry that was replaced. What is new it finds by itself.
        if replaced && let Some(nested) = self.b.nested_mut() {
            nested.flush_nested();
        }
        self.stats.count(VcpuCount::PfFixed);
        self.keep_interrupted_delivery()
    }

    /// Goes on after an attempt to end L2's run for what L1's tables refuse.
    fn refused(&mut self, done: backend::Executed) -> Next {
        if done != backend::Executed::Outside {
            // L1 has it in the exit's information, or it belongs to an instruction that begins anew.
            self.events.again = None;
            self.events.exception = None;
            self.stats.count(VcpuCount::PfGuest);
        }
        self.executed(done, 0)
    }

    /// Handles a fault of L2's on its root outside the loop. `None`: the exit is another.
    pub(super) fn nested_fault_outside(&mut self) -> Option<Outcome> {
        let access = fault_on_tables(&self.b, self.mmu.l1_tables())?;
        Some(self.handle_nested_fault(&access))
    }

    /// The fault of a page whose dirty flag cannot be set: its end tells why.
    #[cold]
    #[inline(never)]
    fn fault_unlogged(&mut self, access: &NestedAccess) -> NestedOutcome {
        let Self { vm, shared, mmu, .. } = self;
        let Some((stage, memory, _, tables)) = mmu.staged() else {
            return NestedOutcome::Retry;
        };
        let by = Caller { vcpu: shared, flush: &***vm };
        memory.nested_fault(by, tables, &mut stage.roots, &access.unlogged(), None)
    }

    #[inline(never)]
    fn handle_nested_fault(&mut self, access: &NestedAccess) -> Outcome {
        let Self { vm, shared, mmu, .. } = self;
        let Some((stage, memory, _, tables)) = mmu.staged() else {
            return Ok(());
        };
        let by = Caller { vcpu: shared, flush: &***vm };
        // Taken, whatever comes of it: a later fault lacks another frame.
        let missing = take(&mut stage.missing);
        let mut outcome =
            memory.nested_fault(by, tables, &mut stage.roots, access, missing.as_ref());
        if outcome == NestedOutcome::L1(L1Fault::Unlogged) {
            match self.log_dirty(Gpa(access.gpa)) {
                Logged::Done => {
                    let _ = self.keep_interrupted_delivery();
                    return Ok(());
                }
                Logged::Full => {}
                Logged::Never => outcome = self.fault_unlogged(access),
            }
        }
        if let NestedOutcome::L1(fault) = outcome {
            // Whose the event is depends on the outcome: L1's in the exit, else ours to inject again.
            let undelivered = self.b.interrupted_delivery();
            let mut why = told(fault, None);
            if undelivered.is_none()
                && let Some(apic) = is_by_instruction(fault)
                && let Some(decoded) = self.decode_or_refuse()?
            {
                if self.serve_apic_access(apic, &decoded) {
                    return Ok(());
                }
                // L1 may go on behind it without decoding it, as KVM and Xen do with an end of interrupt.
                why = TablesRefuse::ApicAccess { access: apic, length: decoded.len() };
            }
            self.refuse_outside(Gpa(access.gpa), why, undelivered);
            return Ok(());
        }
        let _ = self.keep_interrupted_delivery();
        match outcome {
            NestedOutcome::Fixed { replaced } => {
                let _ = self.nested_fault_fixed(replaced);
                Ok(())
            }
            NestedOutcome::Retry | NestedOutcome::L1(_) => Ok(()),
            // The access is decoded by its address in L1's memory, which L1's tables led to.
            NestedOutcome::Mmio(gpa) => self.nested_device_access(gpa, Behind::Device),
            NestedOutcome::ReadonlyWrite(gpa) => self.nested_device_access(gpa, Behind::Rom),
            NestedOutcome::Error(MemoryError::Interrupted) => Err(UserExit::Intr.into()),
            NestedOutcome::Error(_) => {
                Err(UserExit::MemoryFault { flags: 0, gpa: 0, size: 4096 }.into())
            }
        }
    }

    /// L1's tables lead to no memory that takes the access.
    fn nested_device_access(&mut self, gpa: Gpa, behind: Behind) -> Outcome {
        // The exit tells the access; only its address is L2's.
        let Exit::TdpFault(fault) = self.b.exit() else { return Ok(()) };
        self.stats.count(VcpuCount::PfEmulate);
        self.device_access(TdpFault { gpa, present: behind == Behind::Rom, ..fault })
    }

    /// An access to the APIC-access page that L1 leaves to its virtual-APIC page. False: it does not, or the instruction is no
    /// plain load or store of four bytes. L1 hears of it then.
    #[cold]
    #[inline(never)]
    fn serve_apic_access(&mut self, access: ApicAccess, decoded: &Decoded) -> bool {
        if !self.b.nested().is_some_and(|nested| nested.serves_apic_access(access)) {
            return false;
        }
        let Some((plain, store)) = self.plain_word(access, decoded) else { return false };
        let next = self.b.wrap_rip(self.b.rip().wrapping_add(u64::from(decoded.len())));
        let done = self.across_levels(|v| {
            let l1 = Whole::new(&v.mmu.memory, None);
            let nested = v.b.nested_mut()?;
            Some(nested.do_apic_access(&mut v.gprs, access.offset, store, next, &l1))
        });
        match done {
            Some(Ok(value)) => {
                let [a, b, c, d] = value.to_le_bytes();
                self.finish_load(plain, [a, b, c, d, 0, 0, 0, 0], next);
            }
            Some(Err(done)) => {
                let _ = self.executed(done, next);
            }
            None => {}
        }
        true
    }

    /// What lies at RIP. `None`: nothing that can be decoded, though it came to an access.
    fn decode_or_refuse(&mut self) -> Outcome<Option<Decoded>> {
        let size = self.b.code_size();
        let mut bytes = [0; 15];
        let len = match self.read_code(&mut bytes) {
            Ok(len) => len,
            Err(Stop::Retry) => return Err(Break::ToGuest),
            Err(_) => return Ok(None),
        };
        let fetched = Fetched::new(bytes.get(..len).unwrap_or(&[]), size);
        Ok(self.code.decode.get(fetched).ok())
    }

    /// The load or store that such an access is, and what is stored. Bytes that access the page otherwise came after the
    /// fault.
    fn plain_word(
        &self,
        access: ApicAccess,
        decoded: &Decoded,
    ) -> Option<(SimpleMmio, Option<u32>)> {
        let simple = decoded.simple_mmio()?;
        let store = match simple {
            SimpleMmio::Load { size: 4, .. } => None,
            SimpleMmio::StoreReg { size: 4, src } => {
                let whole = self.gprs.get(src.index.into());
                Some(src.extract(whole) as u32)
            }
            SimpleMmio::StoreImm { size: 4, value } => Some(value as u32),
            _ => return None,
        };
        // Else a segment's base is part of the address, which the fault does not tell.
        let fits = self.b.is_64bit_code()
            // The offset proves that the bytes are those that made the exit: see ADR 41.
            && page_offset(&self.b, &self.gprs, decoded) == access.offset
            && store.is_some() == access.write;
        fits.then_some((simple, store))
    }

    fn refuse_outside(&mut self, at: Gpa, why: TablesRefuse, undelivered: Option<Event>) {
        // What user space was asked for L2 belongs to a run that ends here.
        self.device.user_io.forget();
        let done = self.across_levels(|v| {
            let l1 = Whole::new(&v.mmu.memory, None);
            Some(v.b.nested_mut()?.refuse(&mut v.gprs, at, why, undelivered, &l1))
        });
        if let Some(done) = done {
            let _ = self.refused(done);
        }
    }
}

/// The access, if the fault is one of an instruction's to the APIC-access page.
const fn is_by_instruction(fault: L1Fault) -> Option<ApicAccess> {
    match fault {
        L1Fault::ApicAccess(access) if access.linear && !access.fetch => Some(access),
        _ => None,
    }
}

/// What became of a page that is to be noted in L1's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Logged {
    /// It is in the log, or need not be any more: the access is done again.
    Done,
    /// There is no room for it.
    Full,
    /// Its flag cannot be set: the VMM has taken the table's memory away.
    Never,
}

/// Addresses of L2's in software.
impl<B: Backend> Vcpu<B> {
    /// Translates a linear address of L2's, which runs with `tables`. What those refuse ends L2's run before the
    /// next entry.
    #[inline(never)]
    pub(crate) fn translate_of_l2(
        &mut self,
        tables: &Tables,
        at: Gva,
        access: walk::Access,
    ) -> Result<Gpa, Stop> {
        let context = self.b.paging_context(&self.cpuid);
        match translate_linear(&*self.mmu.memory, tables, &context, at.0, access) {
            Ok(found) => Ok(found.gpa),
            Err(LinearError::L2(exception)) => Err(Stop::Fault(exception)),
            Err(LinearError::NonCanonical) => Err(Stop::Fault(Exception::gp(0))),
            Err(LinearError::Stage(StageError::L1 { gpa, fault })) => {
                self.note_refused(gpa, fault, Some(Gva(context.linear(at.0))));
                Err(Stop::Retry)
            }
            Err(LinearError::Stage(StageError::Memory { .. })) => Err(Stop::Unsupported),
        }
    }

    /// Reads words at an address that is physical to L2. `None`: L1's tables refuse, which ends L2's run, or there
    /// is no memory.
    pub(crate) fn read_of_l2(&mut self, tables: &Tables, at: u64, words: &mut [u64]) -> Option<()> {
        for (n, word) in (0..).zip(words) {
            // Word by word: L1's tables may lead each page of it elsewhere.
            let gpa = Gpa(at.wrapping_add(8 * n));
            match SecondStage::physical(&*self.mmu.memory, *tables).read_u64(gpa) {
                Ok(value) => *word = value,
                Err(StageError::L1 { gpa, fault }) => {
                    self.note_refused(gpa, fault, None);
                    return None;
                }
                Err(StageError::Memory { .. }) => return None,
            }
        }
        Some(())
    }

    /// Notes in L1's log that L2 makes a page dirty, and sets its flag: the access is done again.
    #[cold]
    #[inline(never)]
    fn log_dirty(&mut self, at: Gpa) -> Logged {
        let Some(tables) = self.mmu.l1_tables() else { return Logged::Done };
        let access = tables.access(at, walk::AccessKind::Write, Part::Physical);
        // Asked again: another vCPU of L1's may have set the flag, or made room, since the fault.
        match translate(&*self.mmu.memory, &tables, &access) {
            Err(StageError::L1 { fault: L1Fault::Unlogged, .. }) => {}
            Err(StageError::Memory { .. }) => return Logged::Never,
            // L1 has changed it meanwhile: the access finds out.
            Ok(_) | Err(_) => return Logged::Done,
        }
        let Self { b, mmu, .. } = self;
        let memory = &mmu.memory;
        let l1 = Whole::new(memory, None);
        // The log before the flag: a page whose flag is set and that is in no log would be lost to L1 (SDM vol. 3C
        // §29.3.6).
        if !b.nested_mut().is_none_or(|nested| nested.log_dirty(at, &l1)) {
            return Logged::Full;
        }
        // Without the log this time: the entry is there, and setting the flag must not ask for a
        // second one.
        let tables = tables.logging(false);
        let access = tables.access(at, walk::AccessKind::Write, Part::Physical);
        let _ = translate(&*self.mmu.memory, &tables, &access);
        Logged::Done
    }

    #[cold]
    pub(super) fn note_refused(&mut self, gpa: Gpa, fault: L1Fault, linear: Option<Gva>) {
        // The access can be done again now, and L1 need not hear of it.
        if fault == L1Fault::Unlogged && self.log_dirty(gpa) != Logged::Full {
            return;
        }
        if let Some(stage) = &mut self.mmu.stage {
            stage.refused = Some((gpa, told(fault, linear)));
            self.events.outer.set(Outer::NESTED, true);
            self.pending.raise();
        }
    }

    /// Before an entry: ends L2's run for what was noted. Whether something was.
    pub(super) fn refuse_noted(&mut self) -> bool {
        let Self { b, mmu, .. } = self;
        let Some(stage) = &mut mmu.stage else { return false };
        let Some((at, why)) = take(&mut stage.refused) else { return false };
        // The hardware's own refusal ends what the CPU keeps of the address (SDM vol. 3C §29.4.3.1). These are no refusals.
        let allows = matches!(why, TablesRefuse::ApicAccess { .. } | TablesRefuse::LogFull);
        if let Some(tables) = stage.tables.filter(|_| !allows) {
            stage.roots.tell(&tables, &tables.access(at, walk::AccessKind::Read, Part::Page));
            if let Some(nested) = b.nested_mut() {
                nested.flush_nested();
            }
        }
        // What was prepared is not delivered any more: L1 is told of it.
        let undelivered = self.b.cancel_injection().or(self.events.again);
        self.refuse_outside(at, why, undelivered);
        true
    }
}
