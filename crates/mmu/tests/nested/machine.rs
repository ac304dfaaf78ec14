//! L1's memory, the VM's tree, vCPUs that run L2, and what must hold after each step.

use host::gup::FrameOf;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use gannet_mmu::shadow::NestedFrame;
use gannet_mmu::tdp::{FlushRemote, Thoroughness, pages_per};
use gannet_mmu::walk::{GuestMemory, Swap};
use gannet_mmu::{
    EptSupport, Format, L1Fault, MapOutcome, Mapping, NestedAccess, NestedFault, NestedRoot,
    NestedRoots, NestedSwitch, ShadowMmu, TableCache, Tdp, View, Wanted,
};
use host::page::Page;
use host::std_port::test::host_frame;
use x86::{Direction, Gfn, Gpa};

use super::hardware::{Hardware, Reached};
use super::reference::{Access, Apic, Found, Kind, No};
use super::section::section;

/// Frames of real memory: 0 to 31 in one slot, 32 to 63 in another.
pub const SMALL: u64 = 64;
/// Four large frames, of no real memory.
pub const LARGE: u64 = 512;
pub const LARGE_END: u64 = LARGE + 4 * 512;
/// Host frames of these.
const LARGE_PFN: u64 = 0x100_0000;

pub struct Vcpu {
    pub roots: NestedRoots,
    /// Frame of L1's root, and what its tables are.
    pub root: u64,
    pub kind: Kind,
    /// Pages whose translation ended by what L1 was told, and the root that it was under: until L2 is entered by that.
    told: Vec<(u64, u64)>,
    /// L1 runs, for it was told of something.
    pub left: bool,
    /// How old what the vCPU goes by may be: of all, since its last flush, and of a page under a root.
    since: u64,
    since_told: HashMap<(u64, u64), u64>,
}

/// What words of memory held before, and till when.
type Past = HashMap<u64, Vec<(u64, u64)>>;

/// What a CPU keeps: by the root that it walks and by page. Also whether it has marked the page as written.
type Tlb = HashMap<(u64, u64), (Reached, bool)>;

pub struct Machine {
    pub tdp: Tdp<()>,
    pub shadow: ShadowMmu,
    pub hardware: Hardware,
    pub pages: Vec<Page>,
    /// Which page backs a small frame.
    backing: RefCell<Vec<usize>>,
    /// Frames that no slot backs now, and frames of read-only slots.
    pub absent: Cell<u64>,
    pub rom: Cell<u64>,
    pub vcpus: Vec<RefCell<Vcpu>>,
    cache: RefCell<TableCache>,
    past: RefCell<Past>,
    /// Counts L1's writes.
    now: Cell<u64>,
    /// Each vCPU's: it has a CPU of its own.
    tlbs: RefCell<Vec<Tlb>>,
    pub flushes: AtomicU64,
    /// Whether shadow pages hear of withdrawals: a twin's do not.
    pub told: Cell<bool>,
}

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Machine {
    fn flush_remote(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.tlbs.borrow_mut().iter_mut().for_each(Tlb::clear);
    }
}

/// Withdraws from the shadow pages what the tree withdrew.
struct Withdraw<'a>(&'a Machine, Gfn, Gfn);

// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Withdraw<'_> {
    fn flush_remote(&self) {
        if self.0.told.get() {
            self.0.shadow.withdraw(self.1, self.2);
        }
        self.0.flush_remote();
    }
}

/// Why an access did not take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    L1(L1Fault),
    /// A table of L1's that nothing backs.
    NoTable(L1Fault),
    Mmio(Gpa),
}

pub fn npt() -> Kind {
    Kind::Npt { five: false, nx: true, gbpages: true, amd: true, width: 40, pae: None }
}

pub fn ept() -> Kind {
    let apic = Apic::default();
    Kind::Ept { flags: true, execute_only: true, pages_2m: true, pages_1g: true, width: 40, apic }
}

impl Machine {
    /// `logs`: the CPU logs the pages that it makes dirty. `levels`: of the hardware's tables.
    pub fn new(vcpus: usize, kind: Kind, levels: u8, logs: bool) -> Self {
        let support =
            EptSupport { pages_2m: true, pages_1g: true, accessed_dirty: true, page_log: logs };
        let (format, flags) = match kind {
            Kind::Npt { .. } => (Format::npt(levels, 0), true),
            Kind::Ept { flags, .. } => (Format::ept(support), flags),
        };
        let vcpu = || {
            RefCell::new(Vcpu {
                roots: NestedRoots::new(),
                root: 1,
                kind,
                told: Vec::new(),
                left: false,
                since: 0,
                since_told: HashMap::new(),
            })
        };
        let machine = Self {
            tdp: Tdp::new(format, ()).unwrap(),
            shadow: ShadowMmu::new(format).unwrap(),
            hardware: Hardware {
                ept: matches!(kind, Kind::Ept { .. }),
                levels: format.levels().into(),
                flags,
            },
            pages: (0..SMALL + 8).map(|_| Page::zeroed().unwrap()).collect(),
            backing: RefCell::new((0..SMALL as usize).collect()),
            absent: Cell::new(0),
            rom: Cell::new(0),
            vcpus: (0..vcpus).map(|_| vcpu()).collect(),
            cache: RefCell::new(TableCache::new()),
            past: RefCell::new(HashMap::new()),
            now: Cell::new(0),
            tlbs: RefCell::new(vec![HashMap::new(); vcpus]),
            flushes: AtomicU64::new(0),
            told: Cell::new(true),
        };
        machine.shadow.set_limit(1000, &machine);
        machine
    }

    // L1's memory.

    fn word(&self, gpa: u64) -> Option<&AtomicU64> {
        let gfn = gpa >> 12;
        if gfn >= SMALL || self.absent.get() >> gfn & 1 != 0 {
            return None;
        }
        let page = self.backing.borrow()[gfn as usize];
        Some(&self.pages[page].table()[(gpa & 0xfff) as usize / 8])
    }

    pub fn read(&self, gpa: u64) -> Option<u64> {
        self.word(gpa).map(|word| word.load(Ordering::Relaxed))
    }

    pub fn peek(&self, gfn: u64, index: u64) -> u64 {
        self.read(gfn << 12 | index << 3).unwrap_or(0)
    }

    /// L1 writes an entry. Nobody is told.
    pub fn poke(&self, gfn: u64, index: u64, value: u64) {
        let gpa = gfn << 12 | index << 3;
        if let Some(word) = self.word(gpa) {
            self.note_past(gpa, word.swap(value, Ordering::Relaxed));
        }
    }

    fn note_past(&self, gpa: u64, old: u64) {
        self.now.set(self.now.get() + 1);
        let mut past = self.past.borrow_mut();
        let values = past.entry(gpa).or_default();
        values.retain(|(value, _)| *value != old);
        values.push((old, self.now.get()));
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

    fn is_rom(&self, gfn: u64) -> bool {
        gfn < SMALL && self.rom.get() >> gfn & 1 != 0
    }

    /// Brings a frame into the tree, as `VmMemory::fault` does. `false`: nothing backs it, or not
    /// for writing.
    pub fn find_frame(&self, gfn: u64, write: bool) -> bool {
        let Some((first, end)) = Self::slot(gfn) else { return false };
        let rom = self.is_rom(gfn);
        if gfn < SMALL && self.absent.get() >> gfn & 1 != 0 || rom && write {
            return false;
        }
        if !self.tdp.mapper().restore_access(Gfn(gfn), Wanted { write, fetch: false }) {
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
        }
        self.shadow.prepare(Gfn(gfn), Gfn(first), Gfn(end)).unwrap();
        true
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
        if self.told.get() {
            self.shadow.write_protect(Gfn(gfn), Gfn(gfn + 1));
        }
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
        if self.told.get() {
            self.shadow.forget_slot(Gfn(32), Gfn(SMALL));
        }
        for gfn in (32..SMALL as usize).filter(|_| clear) {
            let page = self.backing.borrow()[gfn];
            for (n, word) in (0u64..).zip(self.pages[page].table()) {
                let old = word.swap(0, Ordering::Relaxed);
                if old != 0 {
                    self.note_past((gfn as u64) << 12 | n << 3, old);
                }
            }
        }
    }

    // The vCPUs.

    pub fn with_view<T>(&self, work: impl FnOnce(&View<'_>) -> T) -> T {
        section(|s| work(&self.tdp.view(s)))
    }

    /// VMRUN or VMLAUNCH: the root is looked up.
    pub fn enter(&self, n: usize) -> NestedRoot {
        let vcpu = &mut *self.vcpus[n].borrow_mut();
        let tables = vcpu.kind.tables(vcpu.root);
        let settled = self.shadow.nested_current(&vcpu.roots, &tables);
        loop {
            let outcome = self
                .with_view(|view| self.shadow.lock().nested_switch(view, &mut vcpu.roots, &tables));
            match outcome {
                NestedSwitch::Ready { root, replaced } => {
                    assert!(settled.is_none_or(|settled| settled == root && !replaced));
                    let settled = self.shadow.nested_current(&vcpu.roots, &tables);
                    assert_eq!(settled, Some(root), "what L1 was told of is looked for once");
                    if replaced {
                        self.forget(n);
                    }
                    // By this root L2 goes by what L1's tables say from now on.
                    let (now, by) = (self.now.get(), vcpu.root);
                    for told in vcpu.told.extract_if(.., |(root, _)| *root == by) {
                        vcpu.since_told.insert(told, now);
                    }
                    vcpu.left = false;
                    return root;
                }
                NestedSwitch::NeedPages(count) => {
                    assert!(count <= 3);
                    self.shadow.reserve(count, self).unwrap();
                }
                NestedSwitch::Refused => panic!("refused"),
            }
        }
    }

    /// L1 flushes all of L2's translations.
    pub fn flush(&self, n: usize) {
        {
            let vcpu = &mut *self.vcpus[n].borrow_mut();
            vcpu.roots.flush();
            vcpu.since = self.now.get();
            vcpu.since_told.clear();
        }
        self.forget(n);
        self.enter(n);
    }

    /// The vCPU's CPU forgets L2's translations.
    pub fn forget(&self, n: usize) {
        self.tlbs.borrow_mut()[n].clear();
    }

    /// Whether the CPU keeps something of an address under the current root.
    pub fn keeps(&self, n: usize, gpa: u64) -> bool {
        self.remembered(n, gpa, &Access::READ).is_some()
    }

    /// What the CPU keeps of an address, if that lets the access pass.
    fn remembered(&self, n: usize, gpa: u64, access: &Access) -> Option<Reached> {
        let vcpu = self.vcpus[n].borrow();
        let key = (vcpu.roots.current()?.hpa.0, gpa >> 12);
        let (page, written) = *self.tlbs.borrow()[n].get(&key)?;
        // The first write of a page is walked for, to set a flag.
        let passes = page.allows(access, vcpu.kind.has_flags()) && (written || !access.write);
        passes.then_some(page)
    }

    /// L1 is told of an access: a violation ends what the CPU keeps of the address (SDM vol. 3C §29.4.3.1).
    pub fn leave(&self, n: usize, gpa: u64, fault: L1Fault) {
        let vcpu = &mut *self.vcpus[n].borrow_mut();
        vcpu.left = true;
        if !matches!(fault, L1Fault::ApicAccess(_) | L1Fault::Unlogged) {
            vcpu.told.push((vcpu.root, gpa >> 12));
        }
    }

    /// Accesses `gpa` until the hardware allows it, or L1's tables do not.
    pub fn access(&self, n: usize, gpa: u64, access: &Access) -> Result<Reached, Refused> {
        let done = self.try_access(n, gpa, access);
        if let Err(Refused::L1(fault) | Refused::NoTable(fault)) = done {
            self.leave(n, gpa, fault);
        }
        done
    }

    fn try_access(&self, n: usize, gpa: u64, access: &Access) -> Result<Reached, Refused> {
        if let Some(page) = self.remembered(n, gpa, access) {
            return Ok(page);
        }
        for _ in 0..40 {
            let vcpu = &mut *self.vcpus[n].borrow_mut();
            let root = vcpu.roots.current().unwrap();
            let kind = vcpu.kind;
            if let Some(page) = self.hardware.look(&root, gpa, None)
                && page.allows(access, kind.has_flags())
            {
                self.hardware.look(&root, gpa, Some(access));
                let key = (root.hpa.0, gpa >> 12);
                self.tlbs.borrow_mut()[n].insert(key, (page, access.write));
                return Ok(page);
            }
            self.tlbs.borrow_mut()[n].remove(&(root.hpa.0, gpa >> 12));
            let told = match kind {
                Kind::Npt { .. } => NestedAccess::npf(kind.told(access) | 1, gpa),
                // What the shadow tables allow is no business of L1's.
                Kind::Ept { .. } => NestedAccess::violation(kind.told(access) | 5 << 3, gpa),
            };
            let told = kind.tables(vcpu.root).fault(told);
            let fault =
                self.with_view(|view| self.shadow.lock().nested_fault(view, &vcpu.roots, &told));
            match fault {
                NestedFault::Fixed { replaced } => {
                    if replaced {
                        self.forget(n);
                    }
                }
                NestedFault::L1(fault) => return Err(Refused::L1(fault)),
                NestedFault::NeedPages(count) => {
                    assert!(count <= 8, "{count} pages");
                    self.shadow.reserve(count, self).unwrap();
                }
                NestedFault::NeedFrame(NestedFrame { gpa, write, table, .. }) => {
                    // Tables in device memory are not followed.
                    if let Some(fault) = table.filter(|_| gpa.gfn().0 >= SMALL) {
                        vcpu.roots.tell_of_fault(&told);
                        return Err(Refused::NoTable(fault));
                    }
                    if self.find_frame(gpa.gfn().0, write) {
                        continue;
                    }
                    let there = self.find_frame(gpa.gfn().0, false);
                    match table {
                        Some(_) if there => {
                            vcpu.roots.note_rom(gpa.gfn(), self.tdp.generation());
                        }
                        Some(fault) => {
                            vcpu.roots.tell_of_fault(&told);
                            return Err(Refused::NoTable(fault));
                        }
                        None => return Err(Refused::Mmio(gpa)),
                    }
                }
            }
        }
        panic!("{access:?} to {gpa:#x} is neither granted nor refused");
    }

    /// What L1's tables say now.
    pub fn reference(&self, n: usize, gpa: u64, access: &Access) -> Result<Found, No> {
        let vcpu = self.vcpus[n].borrow();
        vcpu.kind.walk(vcpu.root, gpa, access, |gpa| self.read(gpa))
    }

    /// Whether some mixture of what L1's tables say, and have said since the vCPU's last flush, leads the
    /// access to the host frame. Of an address that L1 was told of: since L2 was entered behind that.
    pub fn may_reach(&self, n: usize, gpa: u64, access: &Access, pfn: u64) -> bool {
        let (vcpu, past) = (self.vcpus[n].borrow(), self.past.borrow());
        let told = vcpu.since_told.get(&(vcpu.root, gpa >> 12)).copied();
        let since = told.unwrap_or(0).max(vcpu.since);
        let mut choice: Vec<usize> = Vec::new();
        loop {
            let (mut step, mut options) = (0, Vec::new());
            let found = vcpu.kind.walk(vcpu.root, gpa, access, |gpa| {
                let all = past.get(&gpa).into_iter().flatten();
                let before: Vec<u64> =
                    all.filter(|(_, till)| *till > since).map(|(value, _)| *value).collect();
                options.push(before.len() + 1);
                let taken = choice.get(step).copied().unwrap_or(0);
                step += 1;
                if taken == 0 { self.read(gpa) } else { before.get(taken - 1).copied() }
            });
            let leaf = found.ok().and_then(|f| self.tdp.mapper().lookup(Gfn(f.gpa >> 12)));
            if leaf.is_some_and(|leaf| leaf.pfn.0 == pfn) {
                return true;
            }
            // The next choice, the last read first.
            choice.resize(options.len(), 0);
            loop {
                let Some(last) = choice.pop() else { return false };
                if last + 1 < options[choice.len()] {
                    choice.push(last + 1);
                    break;
                }
            }
        }
    }

    // What must hold.

    /// Right after a flush the hardware allows nothing at `gpa` but what L1's tables and the tree allow, and
    /// nothing of which they do not know.
    pub fn check(&self, n: usize, gpa: u64) {
        let (root, kind) = {
            let vcpu = self.vcpus[n].borrow();
            (vcpu.roots.current().unwrap(), vcpu.kind)
        };
        let Some(page) = self.hardware.look(&root, gpa, None) else { return };
        for access in Access::ALL {
            if !page.allows(&access, kind.has_flags()) {
                continue;
            }
            let found = self.reference(n, gpa, &access).unwrap_or_else(|no| {
                panic!("{access:?} to {gpa:#x} is granted, {page:x?}, not {no:x?}")
            });
            let rom = self.rom.get() != 0;
            assert!(found.accessed || rom, "{gpa:#x} is granted unseen by L1");
            assert!(!page.write || found.dirty || rom, "{gpa:#x} can be written unseen by L1");
            let leaf = self.tdp.mapper().lookup(Gfn(found.gpa >> 12));
            let leaf =
                leaf.unwrap_or_else(|| panic!("{found:x?} is withdrawn, reached by {gpa:#x}"));
            assert_eq!(page.pfn, leaf.pfn.0, "{gpa:#x} leads elsewhere than to {found:x?}");
        }
    }

    /// Nothing that the tree has withdrawn can be reached by anybody, is kept by any CPU, and nothing written that it does not let
    /// be written, or of which a log would not hear.
    pub fn check_host(&self, gpas: &[u64]) {
        let mut known = HashMap::new();
        let logs = self.tdp.format().logs();
        for gfn in (0..SMALL).chain(LARGE..LARGE_END) {
            if let Some(leaf) = self.tdp.mapper().lookup(Gfn(gfn)) {
                known.insert(leaf.pfn.0, leaf.writable && (leaf.dirty || !logs));
            }
        }
        let check = |gpa: u64, page: Reached| {
            let writable = known.get(&page.pfn).copied();
            let writable =
                writable.unwrap_or_else(|| panic!("{gpa:#x} reaches {page:x?}, withdrawn"));
            assert!(writable || !page.write, "{gpa:#x} may write {page:x?}");
        };
        for vcpu in &self.vcpus {
            let Some(root) = vcpu.borrow().roots.current() else { continue };
            for &gpa in gpas {
                if let Some(page) = self.hardware.look(&root, gpa, None) {
                    check(gpa, page);
                }
            }
        }
        for ((_, page), (reached, _)) in self.tlbs.borrow().iter().flatten() {
            check(page << 12, *reached);
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
            assert!(self.shadow.lock().nested_release(&mut vcpu.borrow_mut().roots));
        }
        assert_eq!(self.audit(), 0, "references are left");
    }
}

/// L1-physical memory for the walk in software.
impl GuestMemory for Machine {
    type Error = ();

    fn read_u64(&self, gpa: Gpa) -> Result<u64, ()> {
        self.read(gpa.0).ok_or(())
    }

    fn read_u32(&self, gpa: Gpa) -> Result<u32, ()> {
        Ok((self.read(gpa.0 & !7).ok_or(())? >> (8 * (gpa.0 & 4))) as u32)
    }

    fn cmpxchg_u64(&self, gpa: Gpa, old: u64, new: u64) -> Result<Swap, ()> {
        if self.is_rom(gpa.gfn().0) {
            return Ok(Swap::ReadOnly);
        }
        let word = self.word(gpa.0).ok_or(())?;
        let done = word.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed);
        Ok(if done.is_ok() { Swap::Done } else { Swap::Changed })
    }

    fn cmpxchg_u32(&self, gpa: Gpa, old: u32, new: u32) -> Result<Swap, ()> {
        let word = self.read(gpa.0 & !7).ok_or(())?;
        let shift = 8 * (gpa.0 & 4);
        let put = |half: u32| word & !(0xffff_ffff << shift) | u64::from(half) << shift;
        self.cmpxchg_u64(Gpa(gpa.0 & !7), put(old), put(new))
    }
}
