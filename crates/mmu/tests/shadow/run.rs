//! Random guests: edits of tables that lead to each other in every way, accesses, flushes, changes of
//! role, and a host that takes frames back.

use gannet_mmu::PagingContext;
use x86::{Cr0, Cr4, Efer, Gpa};

use super::hardware::Access;
use super::machine::{LARGE, LARGE_END, Machine, Refused, SMALL, long_mode};

/// How the guest pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Level4,
    Level5,
    Pae,
    Legacy,
    Off,
}

const NX: u64 = 1 << 63;

fn context(mode: Mode, bits: u8, cr3: u64) -> PagingContext {
    let mut context = long_mode();
    context.cr3 = cr3;
    match mode {
        Mode::Level4 => {}
        Mode::Level5 => context.cr4 |= Cr4::LA57,
        Mode::Pae => context.efer = Efer::NXE,
        Mode::Legacy => (context.cr4, context.efer) = (Cr4::empty(), Efer::NXE),
        Mode::Off => (context.cr0, context.efer) = (Cr0::PE, Efer::empty()),
    }
    if bits & 1 != 0 {
        context.cr0 -= Cr0::WP;
    }
    if bits & 2 != 0 {
        context.efer -= Efer::NXE;
    }
    let cr4 = [Cr4::SMEP, Cr4::SMAP, Cr4::PSE];
    for (n, bit) in cr4.into_iter().enumerate() {
        context.cr4.set(bit, context.cr4.contains(bit) || bits & (4 << n) != 0);
    }
    context.gbpages = bits & 32 != 0;
    context.amd = bits & 64 == 0;
    context
}

/// Few indices, so that walks meet.
const WIDE: [usize; 6] = [0, 1, 2, 3, 256, 511];
const NARROW: [usize; 8] = [0, 1, 2, 255, 256, 511, 512, 1023];

/// Addresses whose walks use those indices.
fn addresses(mode: Mode) -> Vec<u64> {
    let mut all = Vec::new();
    if mode == Mode::Legacy {
        for pde in NARROW {
            for pte in NARROW {
                all.push((pde as u64) << 22 | (pte as u64) << 12);
            }
        }
        return all;
    }
    if mode == Mode::Off {
        return (0..SMALL)
            .step_by(3)
            .chain((LARGE..LARGE_END).step_by(200))
            .map(|n| n << 12)
            .collect();
    }
    for a in WIDE {
        for b in WIDE {
            for c in [0, 1, 511] {
                let (a, b, c) = (a as u64, b as u64, c as u64);
                // All levels' indices from a few.
                let low = c << 39 | b << 30 | b << 21 | a << 12;
                let va = match mode {
                    Mode::Level4 => low,
                    Mode::Level5 => a << 48 | low,
                    _ => (b & 3) << 30 | c << 21 | a << 12,
                };
                let unused = if mode == Mode::Level5 { 7 } else { 16 };
                all.push(((va << unused) as i64 >> unused) as u64);
            }
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

#[derive(Clone, Debug)]
pub enum Op {
    /// Table, index, target, flags.
    Edit(u8, u8, u16, u16),
    /// Table, index, bit.
    Tweak(u8, u8, u8),
    Access(u8, u8, u8),
    /// A write that stores an entry where it leads.
    Store(u8, u8, u16, u16),
    Switch {
        vcpu: u8,
        cr3: u8,
        bits: u8,
        flush: bool,
    },
    Invlpg(u8, u8),
    Flush(u8),
    Withdraw(u8),
    WithdrawLarge(u8),
    Migrate(u8, u8),
    WriteProtect(u8),
    ToggleSlot(bool),
    ToggleRom(u8),
    Settle,
    Limit(u8),
    Release(u8),
}

/// An entry: mostly good, and leading to one of a few tables.
fn entry(mode: Mode, target: u16, flags: u16) -> u64 {
    let gfn = match target & 15 {
        0..=8 => 1 + u64::from(target >> 4) % 12,
        9..=11 => 30 + u64::from(target >> 4) % 8,
        12 | 13 => LARGE + u64::from(target >> 4) % (LARGE_END - LARGE),
        14 => LARGE + (u64::from(target >> 4) & 3) * 512,
        _ => 100 + u64::from(target >> 4) % 4,
    };
    let mut bits = 0x63;
    // Most entries are plain, some have one peculiarity, a few have many.
    let peculiar = match flags >> 12 {
        0..=6 => 0,
        7..=13 => 1 << (flags & 7),
        _ => flags & 255,
    };
    let has = |n: u32| peculiar >> n & 1 != 0;
    bits |= if flags & 256 != 0 { 1 << 2 } else { 0 };
    for (n, bit) in [(0, 1), (1, 1 << 1), (2, 1 << 5), (3, 1 << 6)] {
        bits &= if has(n) { !bit } else { u64::MAX };
    }
    bits |= if has(4) || has(5) { 1 << 7 } else { 0 };
    bits |= if has(6) && mode != Mode::Legacy { NX } else { 0 };
    if has(7) && flags & 512 != 0 {
        bits |= if flags & 1024 != 0 { 1 << 13 } else { 1 << 45 };
    }
    // Large pages that are aligned, half of the time.
    let gfn = match flags >> 10 & 3 {
        2 if bits & 1 << 7 != 0 => gfn & !511 | LARGE,
        // Over small frames: a page of small leaves stands for it.
        3 if bits & 1 << 7 != 0 => 0,
        _ => gfn,
    };
    let mask = if mode == Mode::Legacy { 0xffff_ffff } else { u64::MAX };
    (bits | gfn << 12) & mask
}

struct Run {
    machine: Machine,
    mode: Mode,
    vas: Vec<u64>,
    /// Frames that hold PDPTEs or are CR3.
    roots: [u64; 3],
}

impl Run {
    fn new(mode: Mode) -> Self {
        let machine = Machine::new(2);
        // Tables are worth protecting soon, and pages scarce.
        machine.shadow.set_calm(6);
        machine.shadow.set_limit(30, &machine);
        let run = Self { machine, mode, vas: addresses(mode), roots: [1, 2, 33] };
        // A beginning from which something can be reached.
        let steps = [(1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (33, 3)];
        for (from, to) in steps {
            for index in WIDE {
                run.edit(from, index, to << 12 | 0x67);
            }
        }
        for index in WIDE {
            run.edit(6, index, (30 + index as u64 % 7) << 12 | 0x67);
        }
        if mode == Mode::Pae {
            for from in run.roots {
                (0..4).for_each(|n| run.edit(from, n, (3 + n as u64) << 12 | 1));
            }
        }
        for vcpu in 0..2 {
            run.machine.vcpus[vcpu].borrow_mut().context = context(mode, 0, 0x1000);
            run.machine.switch(vcpu, true);
        }
        run
    }

    fn edit(&self, gfn: u64, index: usize, value: u64) {
        if self.mode == Mode::Legacy {
            self.machine.poke32(gfn, index, value as u32);
        } else {
            self.machine.poke(gfn, index, value);
        }
    }

    fn index(&self, n: u8) -> usize {
        if self.mode == Mode::Legacy {
            NARROW[usize::from(n) % NARROW.len()]
        } else {
            WIDE[usize::from(n) % WIDE.len()]
        }
    }

    fn va(&self, n: u8, m: u8) -> u64 {
        // Mostly a few, so that one is met again.
        let n = if n < 192 { n % 12 } else { n };
        self.vas[(usize::from(n) * 7 + usize::from(m >> 6)) % self.vas.len()]
    }

    fn checked(&self, vcpu: usize) {
        self.vas.iter().for_each(|va| self.machine.check(vcpu, *va));
    }

    fn access(&self, vcpu: usize, va: u64, access: Access) -> bool {
        let machine = &self.machine;
        let outcome = machine.access(vcpu, va, access);
        match outcome {
            // The hardware may remember what the tables said; a fault may not.
            Ok(page) => {
                let may = machine.may_reach(vcpu, va, &access, page.pfn);
                assert!(may, "{access:?} to {va:#x} reaches {page:x?}");
                true
            }
            Err(Refused::Guest(exception)) => {
                let guest = machine.guest(vcpu, va, &access, false);
                assert_eq!(guest, Err(Some(exception)), "{access:?} to {va:#x}");
                false
            }
            Err(Refused::NoTable(_)) => {
                assert_eq!(machine.guest(vcpu, va, &access, false), Err(None), "{va:#x}");
                false
            }
            Err(Refused::Mmio(gpa) | Refused::Emulate(gpa)) => {
                let guest = machine.guest(vcpu, va, &access, false);
                assert_eq!(guest, Ok(gpa), "{access:?} to {va:#x}");
                let context = machine.vcpus[vcpu].borrow().context;
                if matches!(outcome, Err(Refused::Emulate(_))) {
                    assert!(!context.cr0.contains(Cr0::WP) && context.cr4.contains(Cr4::SMAP));
                }
                false
            }
        }
    }

    fn step(&self, op: &Op) {
        let machine = &self.machine;
        match *op {
            Op::Edit(table, index, target, flags) => {
                let gfn = match table % 16 {
                    n @ 0..13 => u64::from(n) + 1,
                    n => 20 + u64::from(n),
                };
                let pdpte = self.mode == Mode::Pae && self.roots.contains(&gfn);
                let index = if pdpte { usize::from(index & 3) } else { self.index(index) };
                self.edit(gfn, index, entry(self.mode, target, flags));
            }
            Op::Tweak(table, index, bit) => {
                let gfn = u64::from(table) % 8 + 1;
                let index = self.index(index);
                let bits = [0, 1, 1, 2, 2, 5, 6, 6, 7, 63, 63, 45, 13, 8, 52];
                let bit = bits[usize::from(bit) % bits.len()];
                if self.mode == Mode::Legacy {
                    let old = machine.peek(gfn, index / 2) >> (32 * (index & 1));
                    self.edit(gfn, index, (old ^ 1 << (bit & 31)) & 0xffff_ffff);
                } else if self.mode != Mode::Pae || !self.roots.contains(&gfn) {
                    self.edit(gfn, index, machine.peek(gfn, index) ^ 1 << bit);
                }
            }
            Op::Access(vcpu, va, kind) => {
                let access = Access::all().nth(usize::from(kind) % 12).unwrap();
                self.access(usize::from(vcpu & 1), self.va(va, kind), access);
            }
            Op::Store(va, kind, target, flags) => {
                let vcpu = usize::from(kind & 1);
                let (va, user) = (self.va(va, kind), kind & 2 != 0);
                let access = Access { write: true, fetch: false, user, ac: true };
                if let Ok(page) = machine.access(vcpu, va, access) {
                    // The guest's own store: nobody is told of it.
                    let index = self.index(kind >> 2);
                    let found = machine.pages.iter().find(|p| p.hpa().0 >> 12 == page.pfn);
                    if let (Some(found), Some(gfn)) = (found, machine.frame_of(page.pfn)) {
                        let value = entry(self.mode, target, flags);
                        let at = if self.mode == Mode::Legacy { index / 2 } else { index };
                        let word = &found.table()[at];
                        let old = word.swap(value, std::sync::atomic::Ordering::Relaxed);
                        machine.note_past(Gpa(gfn << 12 | (at as u64) << 3), old);
                    }
                }
            }
            Op::Switch { vcpu, cr3, bits, flush } => {
                let n = usize::from(vcpu & 1);
                let flush = {
                    let vcpu = &mut *machine.vcpus[n].borrow_mut();
                    let cr3 = self.roots[usize::from(cr3) % 3] << 12;
                    let wanted = context(self.mode, if bits & 128 == 0 { 0 } else { bits }, cr3);
                    // What CPUID says is in no register: then all roots go.
                    let cpuid = |c: &PagingContext| (c.amd, c.gbpages, c.maxphyaddr);
                    if cpuid(&wanted) != cpuid(&vcpu.context) {
                        machine.shadow.lock().release(&mut vcpu.roots);
                    }
                    // PDPTEs are loaded with CR3 and not otherwise.
                    let flush = flush || self.mode == Mode::Pae && cr3 != vcpu.context.cr3;
                    vcpu.context = wanted;
                    vcpu.smm = bits & 3 == 3;
                    flush
                };
                machine.switch(n, flush);
                if flush {
                    self.checked(n);
                }
            }
            Op::Invlpg(vcpu, va) => {
                let (n, va) = (usize::from(vcpu & 1), self.va(va, vcpu));
                machine.invlpg(n, va);
                machine.check(n, va);
            }
            Op::Flush(vcpu) => {
                machine.flush(usize::from(vcpu & 1));
                self.checked(usize::from(vcpu & 1));
            }
            Op::Withdraw(gfn) => {
                let first = u64::from(gfn) % SMALL;
                machine.withdraw(first, (first + 1 + u64::from(gfn >> 6)).min(SMALL));
            }
            Op::WithdrawLarge(n) => {
                let first = LARGE + u64::from(n) * 7;
                machine.withdraw(first, first + 1);
            }
            Op::Migrate(gfn, page) => machine.migrate(u64::from(gfn) % SMALL, page.into()),
            Op::WriteProtect(gfn) => machine.write_protect(u64::from(gfn) % SMALL),
            Op::ToggleSlot(clear) => machine.toggle_slot(clear),
            Op::ToggleRom(gfn) => {
                let bit = 1 << (u64::from(gfn) % SMALL);
                machine.withdraw(u64::from(gfn) % SMALL, u64::from(gfn) % SMALL + 1);
                machine.rom.set(machine.rom.get() ^ bit);
            }
            Op::Settle => machine.settle(),
            Op::Limit(pages) => machine.shadow.set_limit(8 + u64::from(pages) / 4, machine),
            Op::Release(n) => {
                let n = usize::from(n & 1);
                machine.shadow.lock().release(&mut machine.vcpus[n].borrow_mut().roots);
                machine.switch(n, true);
                self.checked(n);
            }
        }
    }

    fn finish(&self) {
        for vcpu in 0..2 {
            self.machine.flush(vcpu);
            self.checked(vcpu);
            for va in self.vas.iter().step_by(3) {
                for access in Access::all() {
                    // What is granted after a flush is what the guest's tables grant.
                    self.machine.flush(vcpu);
                    if self.access(vcpu, *va, access) {
                        self.machine.guest(vcpu, *va, &access, true).unwrap();
                    }
                }
            }
            self.checked(vcpu);
        }
        self.machine.audit();
        if std::env::var_os("SHADOW_COUNTS").is_some() {
            println!("{:?}", self.machine.shadow.counters());
        }
    }
}

pub fn run(mode: Mode, ops: &[Op]) {
    let run = Run::new(mode);
    for op in ops {
        run.step(op);
        run.machine.check_host(&run.vas);
        run.machine.audit();
    }
    run.finish();
}
