//! A guest on shadow pages: memory, the tree, vCPUs, and what must hold after each step.

use host::gup::FrameOf;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use gannet_mmu::tdp::{FlushRemote, Thoroughness, pages_per};
use gannet_mmu::walk::{Access as Wanted, AccessKind, GuestMemory, Swap, probe, translate};
use gannet_mmu::{
    AddressSpace, Format, FrameWanted, MapOutcome, Mapping, PagingContext, Root, RootOutcome,
    ShadowFault, ShadowMmu, ShadowRoots, TableCache, Tdp, Tlb, View, WalkError,
};
use host::page::Page;
use host::std_port::test::host_frame;
use x86::{Cr0, Cr4, Direction, Efer, Exception, Gfn, Gpa};

use super::hardware::{self, Access, Reached};
use super::section::section;

/// Frames of real memory: 0 to 31 in one slot, 32 to 63 in another.
pub const SMALL: u64 = 64;
/// Four large frames, of no real memory.
pub const LARGE: u64 = 512;
pub const LARGE_END: u64 = LARGE + 4 * 512;
/// Host frames of these.
const LARGE_PFN: u64 = 0x100_0000;

pub struct Vcpu {
    pub roots: ShadowRoots,
    pub context: PagingContext,
    pub pdptes: [u64; 4],
    pub smm: bool,
}

pub struct Machine {
    pub tdp: Tdp<()>,
    pub shadow: ShadowMmu,
    pub pages: Vec<Page>,
    /// Which page backs a small frame.
    backing: RefCell<Vec<usize>>,
    /// Frames that no slot backs now.
    pub absent: Cell<u64>,
    /// Frames of read-only slots.
    pub rom: Cell<u64>,
    pub vcpus: Vec<RefCell<Vcpu>>,
    cache: RefCell<TableCache>,
    /// For each vCPU what words of memory held before, since its last flush.
    past: RefCell<Vec<HashMap<Gpa, Vec<u64>>>>,
    pub faults: Cell<u64>,
    pub flushes: AtomicU64,
}

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Machine {
    fn flush_remote(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }
}

/// Withdraws from the shadow pages what the tree withdrew.
struct Withdraw<'a>(&'a Machine, Gfn, Gfn);

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Withdraw<'_> {
    fn flush_remote(&self) {
        self.0.shadow.withdraw(self.1, self.2);
        self.0.flush_remote();
    }
}

pub fn long_mode() -> PagingContext {
    PagingContext {
        cr0: Cr0::PG | Cr0::WP | Cr0::PE,
        cr3: 0x1000,
        cr4: Cr4::PAE | Cr4::PGE,
        efer: Efer::LME | Efer::LMA | Efer::NXE,
        maxphyaddr: 40,
        gbpages: true,
        amd: true,
        ..PagingContext::default()
    }
}

impl Machine {
    pub fn new(vcpus: usize) -> Self {
        let vcpu = || {
            RefCell::new(Vcpu {
                roots: ShadowRoots::new().unwrap(),
                context: long_mode(),
                pdptes: [0; 4],
                smm: false,
            })
        };
        let machine = Self {
            tdp: Tdp::new(Format::npt(4, 0), ()).unwrap(),
            shadow: ShadowMmu::new(Format::npt(4, 0)).unwrap(),
            pages: (0..SMALL + 8).map(|_| Page::zeroed().unwrap()).collect(),
            backing: RefCell::new((0..SMALL as usize).collect()),
            absent: Cell::new(0),
            rom: Cell::new(0),
            vcpus: (0..vcpus).map(|_| vcpu()).collect(),
            cache: RefCell::new(TableCache::new()),
            past: RefCell::new(vec![HashMap::new(); vcpus]),
            faults: Cell::new(0),
            flushes: AtomicU64::new(0),
        };
        machine.shadow.set_limit(1000, &machine);
        machine
    }

    // Guest memory.

    fn word(&self, gpa: Gpa) -> Option<&AtomicU64> {
        let gfn = gpa.gfn().0;
        if gfn >= SMALL || self.absent.get() >> gfn & 1 != 0 {
            return None;
        }
        let page = self.backing.borrow()[gfn as usize];
        Some(&self.pages[page].table()[gpa.page_offset() / 8])
    }

    pub fn peek(&self, gfn: u64, index: usize) -> u64 {
        self.word(Gpa(gfn << 12 | (index as u64) << 3)).map_or(0, |w| w.load(Ordering::Relaxed))
    }

    /// The guest writes an 8-byte word, by an instruction that the emulator ran if the frame is
    /// protected.
    pub fn poke(&self, gfn: u64, index: usize, value: u64) {
        let gpa = Gpa(gfn << 12 | (index as u64) << 3);
        if let Some(word) = self.word(gpa) {
            self.note_past(gpa, word.swap(value, Ordering::Relaxed));
            if self.shadow.is_protected(Gfn(gfn)) {
                self.shadow.lock().note_write(Gfn(gfn));
            }
        }
    }

    /// A word of memory was `old` until now.
    pub fn note_past(&self, gpa: Gpa, old: u64) {
        for past in self.past.borrow_mut().iter_mut() {
            let values = past.entry(gpa).or_default();
            if !values.contains(&old) {
                values.push(old);
            }
        }
    }

    /// The guest frame that a host page backs.
    pub fn frame_of(&self, pfn: u64) -> Option<u64> {
        let page = self.pages.iter().position(|page| page.hpa().0 >> 12 == pfn)?;
        self.backing.borrow().iter().position(|at| *at == page).map(|gfn| gfn as u64)
    }

    pub fn poke32(&self, gfn: u64, index: usize, value: u32) {
        let shift = 32 * (index as u64 & 1);
        let old = self.peek(gfn, index / 2) & !(0xffff_ffff << shift);
        self.poke(gfn, index / 2, old | u64::from(value) << shift);
    }

    // The host's side.

    fn slot(gfn: u64) -> Option<(u64, u64)> {
        match gfn {
            0..32 => Some((0, 32)),
            32..SMALL => Some((32, SMALL)),
            LARGE..LARGE_END => Some((LARGE, LARGE_END)),
            _ => None,
        }
    }

    /// Brings a frame into the tree, as `VmMemory::fault` does. `false`: nothing backs it, or not
    /// for writing.
    pub fn find_frame(&self, gfn: u64, write: bool) -> bool {
        let Some((first, end)) = Self::slot(gfn) else { return false };
        if gfn < SMALL && self.absent.get() >> gfn & 1 != 0 {
            return false;
        }
        let rom = gfn < SMALL && self.rom.get() >> gfn & 1 != 0;
        if rom && write {
            return false;
        }
        let (pfn, level) = if gfn < SMALL {
            (self.pages[self.backing.borrow()[gfn as usize]].hpa().0 >> 12, 1)
        } else {
            (LARGE_PFN + gfn - LARGE, 2)
        };
        let mapping = Mapping {
            frame: host_frame(pfn, if gfn < SMALL { FrameOf::Memory } else { FrameOf::Device }),
            level,
            writable: !rom,
            host_writable: !rom,
            exec: true,
            fetch: false,
            refused: 0,
            // Nobody may look into what is no memory.
            fault: Some(Direction::write_if(write)),
        };
        loop {
            let mut cache = self.cache.borrow_mut();
            let outcome = self.tdp.mapper().map(Gfn(gfn), &mapping, &mut cache);
            match outcome {
                MapOutcome::NeedTables(count) => cache.top_up(count).unwrap(),
                MapOutcome::Mapped(_) => break,
                other => panic!("{other:?}"),
            }
        }
        self.shadow.prepare(Gfn(gfn), Gfn(first), Gfn(end)).unwrap();
        true
    }

    /// Backs the 2 MiB from frame `gfn` on by one large page of the host's, from `pfn` on.
    pub fn back_large(&self, gfn: u64, pfn: u64) {
        let mapping = Mapping {
            frame: host_frame(pfn, FrameOf::Memory),
            level: 2,
            writable: true,
            host_writable: true,
            exec: true,
            fetch: false,
            refused: 0,
            fault: Some(Direction::Write),
        };
        let mut cache = self.cache.borrow_mut();
        cache.top_up(TableCache::MOST).unwrap();
        let outcome = self.tdp.mapper().map(Gfn(gfn), &mapping, &mut cache);
        assert_eq!(outcome, MapOutcome::Mapped(2));
        self.shadow.prepare(Gfn(gfn), Gfn(gfn), Gfn(gfn + 512)).unwrap();
    }

    /// The MMU notifier withdraws the frames `first..end`, of which large ones go whole.
    pub fn withdraw(&self, first: u64, end: u64) {
        let mut zapper = self.tdp.zapper();
        let pages = |gfn| zapper.lookup(Gfn(gfn)).map_or(1, |leaf| pages_per(leaf.level));
        let from = first & !(pages(first) - 1);
        let to = ((end - 1) | (pages(end - 1) - 1)) + 1;
        let flush = Withdraw(self, Gfn(from), Gfn(to));
        zapper.zap(Gfn(first), Gfn(end), Thoroughness::Leaves, &flush);
    }

    /// Another page backs a frame from now on, with the same content.
    pub fn migrate(&self, gfn: u64, page: usize) {
        let page = page % self.pages.len();
        let old = self.backing.borrow()[gfn as usize];
        if self.backing.borrow().contains(&page) {
            return;
        }
        self.withdraw(gfn, gfn + 1);
        for (to, from) in self.pages[page].table().iter().zip(self.pages[old].table()) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.backing.borrow_mut()[gfn as usize] = page;
    }

    /// The dirty log begins anew for a frame.
    pub fn write_protect(&self, gfn: u64) {
        let mut zapper = self.tdp.zapper();
        zapper.watch_writes(Gfn(gfn), Gfn(gfn + 1));
        self.shadow.write_protect(Gfn(gfn), Gfn(gfn + 1));
        zapper.flush(self);
    }

    /// The second slot goes, or comes back, with its content or without.
    pub fn toggle_slot(&self, clear: bool) {
        let bits = !0u64 << 32;
        if self.absent.get() & bits != 0 {
            self.absent.set(self.absent.get() & !bits);
            return;
        }
        self.absent.set(self.absent.get() | bits);
        let flush = Withdraw(self, Gfn(32), Gfn(SMALL));
        self.tdp.zapper().zap(Gfn(32), Gfn(SMALL), Thoroughness::Tables, &flush);
        self.shadow.forget_slot(Gfn(32), Gfn(SMALL));
        for gfn in (32..SMALL as usize).filter(|_| clear) {
            let page = self.backing.borrow()[gfn];
            for (n, word) in (0u64..).zip(self.pages[page].table()) {
                let old = word.swap(0, Ordering::Relaxed);
                if old != 0 {
                    self.note_past(Gpa((gfn as u64) << 12 | n << 3), old);
                }
            }
        }
    }

    pub fn settle(&self) {
        if self.shadow.settle_begin() {
            self.flush_remote();
            self.with_view(|view| self.shadow.lock().settle_end(view));
        }
    }

    // The vCPUs.

    pub fn with_view<T>(&self, work: impl FnOnce(&View<'_>) -> T) -> T {
        section(|s| work(&self.tdp.view(s)))
    }

    /// Loads the registers of a vCPU's context; see `ShadowGuard::switch`.
    pub fn switch(&self, n: usize, flush: bool) -> Root {
        let vcpu = &mut *self.vcpus[n].borrow_mut();
        if vcpu.context.is_paging()
            && !vcpu.context.is_long_mode()
            && vcpu.context.cr4.contains(Cr4::PAE)
            && (flush || vcpu.roots.current().is_none())
        {
            vcpu.pdptes = self.load_pdptes(vcpu.context.cr3);
        }
        if flush {
            self.past.borrow_mut()[n].clear();
        }
        loop {
            let outcome = self.with_view(|view| {
                let (roots, context) = (&mut vcpu.roots, &vcpu.context);
                let (space, tlb) = (AddressSpace::smm_if(vcpu.smm), Tlb::flushed_if(flush));
                self.shadow.lock().switch(view, roots, context, &vcpu.pdptes, space, tlb)
            });
            match outcome {
                RootOutcome::Ready(root) => return root,
                RootOutcome::NeedPages(count) => {
                    assert!(count <= 4);
                    self.shadow.reserve(count, self).unwrap();
                }
            }
        }
    }

    pub fn load_pdptes(&self, cr3: u64) -> [u64; 4] {
        let gpa = cr3 & 0xffff_ffe0;
        [0, 8, 16, 24].map(|n| {
            let pdpte = self.word(Gpa(gpa + n)).map_or(0, |w| w.load(Ordering::Relaxed));
            // What MOV to CR3 would refuse does not get here.
            if pdpte & (0xfff0_0000_0000_01e6 | 0x000f_ff00_0000_0000) != 0 { 0 } else { pdpte }
        })
    }

    pub fn flush(&self, n: usize) {
        let vcpu = &mut *self.vcpus[n].borrow_mut();
        self.past.borrow_mut()[n].clear();
        self.with_view(|view| self.shadow.lock().flush(view, &mut vcpu.roots));
    }

    pub fn invlpg(&self, n: usize, va: u64) {
        let vcpu = &mut *self.vcpus[n].borrow_mut();
        self.with_view(|view| self.shadow.lock().invlpg(view, &mut vcpu.roots, va));
    }

    /// SMEP and SMAP as the hardware has them: a guest that does not page has neither.
    pub fn hardware_cr4(context: &PagingContext) -> Cr4 {
        if context.is_paging() { context.cr4 } else { Cr4::empty() }
    }

    /// Accesses `va` until the hardware allows it, or the guest's tables do not.
    pub fn access(&self, n: usize, va: u64, access: Access) -> Result<Reached, Refused> {
        for _ in 0..40 {
            let vcpu = &mut *self.vcpus[n].borrow_mut();
            let root = vcpu.roots.current().unwrap();
            let cr4 = Self::hardware_cr4(&vcpu.context);
            let code = match hardware::access(&root, va, &access, cr4) {
                Ok(page) => return Ok(page),
                Err(code) => code,
            };
            let context = PagingContext {
                cpl: if access.user { 3 } else { 0 },
                rflags_ac: access.ac,
                ..vcpu.context
            };
            self.faults.set(self.faults.get() + 1);
            let fault = self
                .with_view(|view| self.shadow.lock().fault(view, &vcpu.roots, &context, va, code));
            match fault {
                ShadowFault::Fixed => {}
                ShadowFault::Guest(exception) => return Err(Refused::Guest(exception)),
                ShadowFault::Emulate { gpa } => return Err(Refused::Emulate(gpa)),
                ShadowFault::NeedPages(count) => {
                    assert!(count <= 8, "{count} pages");
                    self.shadow.reserve(count, self).unwrap();
                }
                ShadowFault::NeedFrame(FrameWanted { gpa, write, table, .. }) => {
                    let table_nowhere = table.filter(|_| gpa.gfn().0 >= SMALL);
                    if let Some(exception) = table_nowhere {
                        return Err(Refused::NoTable(exception));
                    }
                    if self.find_frame(gpa.gfn().0, write) {
                        continue;
                    }
                    let there = self.find_frame(gpa.gfn().0, false);
                    match table {
                        Some(_) if there => {
                            let generation = self.tdp.generation();
                            vcpu.roots.note_rom(gpa.gfn(), generation);
                        }
                        Some(exception) => return Err(Refused::NoTable(exception)),
                        None => return Err(Refused::Mmio(gpa)),
                    }
                }
            }
        }
        panic!("{access:?} to {va:#x} is neither granted nor refused");
    }

    /// What the guest's own tables say, without changing them. `settled`: the accessed and dirty
    /// bits are set already.
    pub fn guest(
        &self,
        n: usize,
        va: u64,
        access: &Access,
        settled: bool,
    ) -> Result<Gpa, Option<Exception>> {
        let vcpu = self.vcpus[n].borrow();
        let choice = Choice::default();
        self.walk(&vcpu, va, access, settled, &choice)
    }

    /// Whether the hardware may give a vCPU this page: by some mixture of what the guest's tables
    /// say and of what they have said since its last flush, as TLBs and paging-structure caches
    /// hold it.
    pub fn may_reach(&self, n: usize, va: u64, access: &Access, pfn: u64) -> bool {
        let (vcpu, past) = (self.vcpus[n].borrow(), self.past.borrow());
        let mut choice = Choice { past: Some(&past[n]), ..Choice::default() };
        loop {
            choice.read.set(0);
            choice.options.borrow_mut().clear();
            if let Ok(gpa) = self.walk(&vcpu, va, access, false, &choice)
                && self.tdp.mapper().lookup(gpa.gfn()).is_some_and(|leaf| leaf.pfn.0 == pfn)
            {
                return true;
            }
            if !choice.advance() {
                return false;
            }
        }
    }

    fn walk(
        &self,
        vcpu: &Vcpu,
        va: u64,
        access: &Access,
        settled: bool,
        choice: &Choice<'_>,
    ) -> Result<Gpa, Option<Exception>> {
        let context = PagingContext {
            cpl: if access.user { 3 } else { 0 },
            rflags_ac: access.ac,
            ..vcpu.context
        };
        let kind = match (access.write, access.fetch) {
            (true, _) => AccessKind::Write,
            (_, true) => AccessKind::Fetch,
            _ => AccessKind::Read,
        };
        let pae = context.is_paging() && !context.is_long_mode() && context.cr4.contains(Cr4::PAE);
        let pdptes = Cell::new(pae.then_some((context.cr3 & 0xffff_ffe0, vcpu.pdptes)));
        let memory = Seen { machine: self, pdptes, choice };
        let wanted = Wanted { kind, implicit: false, marks: true };
        let walk = if settled {
            translate(&memory, &context, va, wanted)
        } else {
            probe(&memory, &context, va, wanted)
        };
        match walk {
            Ok(translation) => Ok(translation.gpa),
            Err(WalkError::Fault(exception)) => Err(Some(exception)),
            Err(_) => Err(None),
        }
    }

    // What must hold.

    /// The hardware allows nothing at `va` but what the guest's tables and the tree allow.
    pub fn check(&self, n: usize, va: u64) {
        let (root, cr4) = {
            let vcpu = self.vcpus[n].borrow();
            (vcpu.roots.current().unwrap(), Self::hardware_cr4(&vcpu.context))
        };
        let Some(page) = hardware::look(&root, va) else { return };
        for access in Access::all() {
            if !hardware::allows(&page, &access, cr4) {
                continue;
            }
            let gpa = match self.guest(n, va, &access, true) {
                Ok(gpa) => gpa,
                Err(error) => {
                    let context = self.vcpus[n].borrow().context;
                    panic!(
                        "{access:?} to {va:#x} is granted, {page:x?}, not {error:?}; {context:x?}"
                    )
                }
            };
            let leaf = self.tdp.mapper().lookup(gpa.gfn());
            let leaf = leaf.unwrap_or_else(|| panic!("{gpa:?} is withdrawn, reached by {va:#x}"));
            assert_eq!(page.pfn, leaf.pfn.0, "{va:#x} leads elsewhere than to {gpa:?}");
            assert!(leaf.writable || !page.writable, "{gpa:?} is read-only, not at {va:#x}");
        }
    }

    /// Nothing that the tree has withdrawn can be reached by anybody.
    pub fn check_host(&self, vas: &[u64]) {
        let mut known = std::collections::HashMap::new();
        for gfn in (0..SMALL).chain(LARGE..LARGE_END) {
            if let Some(leaf) = self.tdp.mapper().lookup(Gfn(gfn)) {
                known.insert(leaf.pfn.0, leaf.writable);
            }
        }
        for vcpu in &self.vcpus {
            let Some(root) = vcpu.borrow().roots.current() else { continue };
            for &va in vas {
                if root.levels == 3 && va >> 32 != 0 {
                    continue;
                }
                if let Some(page) = hardware::look(&root, va) {
                    let writable = known.get(&page.pfn).copied();
                    let writable = writable.unwrap_or_else(|| panic!("{va:#x} reaches {page:?}"));
                    assert!(writable || !page.writable, "{va:#x} may write {page:?}");
                }
            }
        }
    }

    pub fn audit(&self) -> u64 {
        self.shadow.audit().unwrap_or_else(|what| panic!("{what}"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for vcpu in &self.vcpus {
            self.shadow.lock().release(&mut vcpu.borrow_mut().roots);
        }
        assert_eq!(self.audit(), 0, "references are left");
    }
}

/// Why an access did not take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    Guest(Exception),
    /// A guest table that nothing backs.
    NoTable(Exception),
    Mmio(Gpa),
    Emulate(Gpa),
}

/// Which of the values that a word had a walk reads, for each of its reads.
#[derive(Default)]
struct Choice<'a> {
    past: Option<&'a HashMap<Gpa, Vec<u64>>>,
    /// By read: 0 is what the word holds now.
    taken: RefCell<Vec<usize>>,
    /// By read: how many there were.
    options: RefCell<Vec<usize>>,
    read: Cell<usize>,
}

impl Choice<'_> {
    fn pick(&self, gpa: Gpa, now: u64) -> u64 {
        let Some(past) = self.past.and_then(|past| past.get(&gpa)) else {
            self.note(1);
            return now;
        };
        match self.note(past.len() + 1) {
            0 => now,
            n => past[n - 1],
        }
    }

    fn note(&self, options: usize) -> usize {
        let (n, mut taken) = (self.read.get(), self.taken.borrow_mut());
        self.read.set(n + 1);
        self.options.borrow_mut().push(options);
        if taken.len() <= n {
            taken.push(0);
        }
        taken[n]
    }

    /// The next choice; `false` when all were made.
    fn advance(&mut self) -> bool {
        let (taken, options) = (self.taken.get_mut(), self.options.get_mut());
        taken.truncate(options.len());
        while let Some(last) = taken.pop() {
            if last + 1 < options[taken.len()] {
                taken.push(last + 1);
                return true;
            }
        }
        false
    }
}

/// Memory as a walk sees it. The PDPTEs of PAE paging are those that were loaded, and their base.
struct Seen<'a> {
    machine: &'a Machine,
    /// Gone once the walk has read one: behind that it is memory.
    pdptes: Cell<Option<(u64, [u64; 4])>>,
    choice: &'a Choice<'a>,
}

impl Seen<'_> {
    fn word(&self, gpa: Gpa) -> Result<u64, ()> {
        let now = self.machine.word(gpa).ok_or(())?.load(Ordering::Relaxed);
        Ok(self.choice.pick(gpa, now))
    }

    fn swap(&self, gpa: Gpa) -> Result<Swap, ()> {
        let rom = self.machine.rom.get() >> gpa.gfn().0 & 1 != 0;
        assert!(rom, "an accessed or dirty bit of the entry at {gpa:?} is not set");
        Ok(Swap::ReadOnly)
    }
}

impl GuestMemory for Seen<'_> {
    type Error = ();

    fn read_u64(&self, gpa: Gpa) -> Result<u64, ()> {
        match self.pdptes.take() {
            Some((base, pdptes)) => Ok(pdptes[(gpa.0 - base) as usize / 8]),
            None => self.word(gpa),
        }
    }

    fn read_u32(&self, gpa: Gpa) -> Result<u32, ()> {
        Ok((self.word(Gpa(gpa.0 & !7))? >> (8 * (gpa.0 & 4))) as u32)
    }

    fn cmpxchg_u64(&self, gpa: Gpa, _: u64, _: u64) -> Result<Swap, ()> {
        self.swap(gpa)
    }

    fn cmpxchg_u32(&self, gpa: Gpa, _: u32, _: u32) -> Result<Swap, ()> {
        self.swap(gpa)
    }
}
