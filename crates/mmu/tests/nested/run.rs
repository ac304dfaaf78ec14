//! Random hypervisors: edits of tables that lead to each other in every way, accesses of L2's, flushes, other
//! roots, and a host that takes frames back.

use std::cell::RefCell;

use gannet_mmu::nested::walk::{StageError, translate};
use gannet_mmu::{L1Fault, Marks};

use super::entries::{full, levels, page, told};
use super::machine::{LARGE, LARGE_END, Machine, Refused, SMALL};
use super::reference::{Access, Apic, Kind, No};

/// Few indices, so that walks meet.
const INDICES: [u64; 6] = [0, 1, 2, 3, 256, 511];
/// Frames that are roots.
const ROOTS: [u64; 3] = [1, 2, 33];

/// Addresses whose walks use those indices.
fn addresses(kind: &Kind) -> Vec<u64> {
    let mut all = Vec::new();
    for a in INDICES {
        for b in INDICES {
            for c in [0, 1, 511] {
                let low = c << 39 | b << 30 | b << 21 | a << 12;
                all.push(if kind.levels() == 5 { a << 48 | low } else { low });
            }
        }
    }
    // Beyond what the tables reach.
    all.push(1 << (12 + 9 * kind.levels()) | 1 << 12);
    // Of an L2 without tables.
    all.extend(
        [8, 30, 31, 33, LARGE, LARGE + 7, LARGE + 8, LARGE + 511, LARGE + 513, 100]
            .map(|n| n << 12),
    );
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
    /// An access that software makes, by a walk of its own, held against the reference.
    Walk(u8, u8, u8),
    /// An access; what is absent for it in the lowest table L1 makes, of this target and these flags, and enters L2 again.
    Serve(u8, u8, u8, u16, u16),
    Enter(u8, u8),
    Flush(u8),
    FlushOf(u8, u8),
    Withdraw(u8),
    WithdrawLarge(u8),
    Migrate(u8, u8),
    WriteProtect(u8),
    ToggleSlot(bool),
    ToggleRom(u8),
    Age(u8),
    Limit(u8),
    Release(u8),
}

/// An entry: mostly good, and leading to one of a few tables.
fn entry(kind: &Kind, target: u16, flags: u16) -> u64 {
    let high = u64::from(target >> 4);
    let gfn = match target & 15 {
        0..=8 => 1 + high % 12,
        9..=11 => 30 + high % 8,
        12 | 13 => LARGE + high % (LARGE_END - LARGE),
        14 => LARGE + (high & 3) * 512,
        _ => 100 + high % 4,
    };
    // Most entries are plain, some have one peculiarity, a few have many.
    let peculiar = match flags >> 12 {
        0..=6 => 0,
        7..=13 => 1 << (flags & 7),
        _ => flags & 255,
    };
    let has = |n: u32| peculiar >> n & 1 != 0;
    let mut bits = page(kind);
    let ept = matches!(kind, Kind::Ept { .. });
    // A table of EPT's has no memory type.
    bits = if ept && flags & 256 != 0 { full(kind) } else { bits };
    let used = if ept { [1 << 8, 1 << 9] } else { [1 << 5, 1 << 6] };
    for (n, bit) in [(0, 1), (1, 1 << 1), (2, used[0]), (3, used[1]), (6, 1 << 2)] {
        bits &= if has(n) { !bit } else { u64::MAX };
    }
    bits |= if has(4) || has(5) { 1 << 7 } else { 0 };
    if has(7) {
        bits |= [1 << 63, 1 << 13, 1 << 45, 1 << 3][usize::from(flags >> 9 & 3)];
    }
    // Large pages that are aligned, half of the time.
    let gfn = match flags >> 10 & 3 {
        2 if bits & 1 << 7 != 0 => gfn & !511 | LARGE,
        // Over small frames: a page of small leaves stands for it.
        3 if bits & 1 << 7 != 0 => 0,
        _ => gfn,
    };
    bits | gfn << 12
}

pub struct Run {
    machine: Machine,
    kind: Kind,
    gpas: Vec<u64>,
}

impl Run {
    /// Takes every step, and holds the shadows against the host's view after each.
    pub fn go(&self, ops: &[Op]) {
        for op in ops {
            self.step(op);
            self.machine.check_host(&self.gpas);
        }
        self.machine.audit();
        self.finish();
    }

    pub fn new(kind: Kind, more: bool, logs: bool) -> Self {
        let machine = Machine::new(2, kind, levels(&kind, more), logs);
        // Pages are scarce.
        machine.shadow.set_limit(30, &machine);
        let run = Self { machine, kind, gpas: addresses(&kind) };
        // A beginning from which something can be reached.
        for (from, to) in [(1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (33, 3)] {
            for index in INDICES {
                let bits = if to == 6 && kind.levels() == 4 { page(&kind) } else { full(&kind) };
                run.poke(from, index, to << 12 | bits);
            }
        }
        for index in INDICES {
            run.machine.poke(6, index, (30 + index % 7) << 12 | page(&kind));
        }
        // The other one's local APIC is another frame, or none: pages that both could use.
        if let Kind::Ept { apic: Apic { flat: false, .. }, .. } = kind {
            let frame = [None, Some(30), Some(LARGE + 8)][usize::from(logs) + usize::from(more)];
            let vcpu = &mut *run.machine.vcpus[1].borrow_mut();
            if let Kind::Ept { apic, .. } = &mut vcpu.kind {
                apic.frame = frame;
            }
        }
        (0..2).for_each(|n| {
            run.machine.enter(n);
        });
        run
    }

    /// L1 writes an entry; where PDPTEs are, one of them, without what they have not.
    fn poke(&self, gfn: u64, index: u64, value: u64) {
        if self.kind.levels() == 3 && ROOTS.contains(&gfn) {
            const NONE_OF: u64 = 1 << 63 | 0x1e6;
            self.machine.poke(gfn, self.kind.offset() / 8 + index % 4, value & !NONE_OF);
        } else {
            self.machine.poke(gfn, index, value);
        }
    }

    fn gpa(&self, n: u8, m: u8) -> u64 {
        // Mostly a few, so that one is met again.
        let n = if n < 192 { n % 12 } else { n };
        self.gpas[(usize::from(n) * 7 + usize::from(m >> 6)) % self.gpas.len()] | u64::from(m)
    }

    fn checked(&self, vcpu: usize) {
        self.gpas.iter().for_each(|gpa| self.machine.check(vcpu, *gpa));
    }

    fn access(&self, vcpu: usize, gpa: u64, access: &Access) -> bool {
        let machine = &self.machine;
        if machine.vcpus[vcpu].borrow().left {
            machine.enter(vcpu);
        }
        let outcome = machine.access(vcpu, gpa, access);
        // The hardware may remember what the tables said; a fault may not.
        match outcome {
            Ok(page) => {
                let may = machine.may_reach(vcpu, gpa, access, page.pfn);
                assert!(may, "{access:?} to {gpa:#x} reaches {page:x?}");
                return true;
            }
            Err(Refused::L1(fault)) => {
                let now = machine.reference(vcpu, gpa, access);
                assert_eq!(now, Err(No::L1(fault)), "{access:?} to {gpa:#x}");
            }
            Err(Refused::NoTable(_)) => {
                let now = machine.reference(vcpu, gpa, access);
                // Or bits are to be set in what is no memory to write.
                let nowhere = matches!(now, Err(No::Unreadable(_)));
                assert!(nowhere, "{access:?} to {gpa:#x}: {now:x?}");
            }
            Err(Refused::Mmio(at)) => {
                let now = machine.reference(vcpu, gpa, access);
                assert_eq!(now.map(|found| found.gpa), Ok(at.0), "{access:?} to {gpa:#x}");
            }
        }
        false
    }

    /// L1 hears of an absent entry, makes it, and enters L2. What is there then is held against the tables as after a flush:
    /// nothing is left that could be stale. Sometimes it changes an upper entry, too, without a flush: of the way to
    /// that address a CPU keeps nothing. The other vCPU may use the address at each step, and keep what it finds.
    fn serve(&self, vcpu: usize, gpa: u64, access: &Access, [target, flags, steps]: [u16; 3]) {
        let machine = &self.machine;
        let other = vcpu ^ 1;
        if steps & 1 != 0 {
            machine.vcpus[other].borrow_mut().root = machine.vcpus[vcpu].borrow().root;
            machine.enter(other);
        }
        let other_reads = |step| {
            if steps & step != 0 {
                self.access(other, gpa, &Access::READ);
            }
        };
        // In a table of the lowest level that is there: what L1 would write first.
        let way = {
            let vcpu = machine.vcpus[vcpu].borrow();
            let way = RefCell::new(Vec::new());
            let _ = vcpu.kind.walk(vcpu.root, gpa, access, |at| {
                way.borrow_mut().push(at);
                machine.read(at)
            });
            let way = way.into_inner();
            if way.len() as u64 == u64::from(vcpu.kind.levels()) { way } else { return }
        };
        let [.., upper, last] = *way else { return };
        // Or of one that is there, and lacks a right.
        if flags & 2 == 0 {
            self.poke(last >> 12, last >> 3 & 511, 0);
            machine.flush(vcpu);
        }
        if machine.vcpus[vcpu].borrow().left {
            machine.enter(vcpu);
        }
        other_reads(2);
        let told = machine.access(vcpu, gpa, access);
        other_reads(4);
        if steps & 8 != 0 {
            self.poke(last >> 12, last >> 3 & 511, entry(&self.kind, flags >> 3, flags));
            other_reads(8);
        }
        self.poke(last >> 12, last >> 3 & 511, entry(&self.kind, target, flags));
        if target & 3 == 0 {
            let one_bit = machine.read(upper).map(|entry| entry ^ 1 << (target >> 2 & 15));
            let other = entry(&self.kind, flags, target);
            self.poke(
                upper >> 12,
                upper >> 3 & 511,
                if flags & 1 == 0 { one_bit.unwrap_or(other) } else { other },
            );
        }
        let tables = || (1..14).flat_map(|gfn| INDICES.map(|index| (gfn, index)));
        let before: Vec<u64> = tables().map(|(gfn, n)| machine.peek(gfn, n)).collect();
        machine.enter(vcpu);
        assert!(tables().map(|(gfn, n)| machine.peek(gfn, n)).eq(before), "L1's tables changed");
        match told {
            Err(Refused::L1(L1Fault::ApicAccess(_))) => {}
            Err(Refused::L1(_)) => machine.check(vcpu, gpa),
            _ => {}
        }
        self.access(vcpu, gpa, &Access::READ);
    }

    fn step(&self, op: &Op) {
        let machine = &self.machine;
        match *op {
            Op::Edit(table, index, target, flags) => {
                let gfn = match table % 16 {
                    n @ 0..13 => u64::from(n) + 1,
                    n => 20 + u64::from(n),
                };
                self.poke(gfn, INDICES[usize::from(index) % 6], entry(&self.kind, target, flags));
            }
            Op::Tweak(table, index, bit) => {
                let (gfn, index) = (u64::from(table) % 8 + 1, INDICES[usize::from(index) % 6]);
                let bits = [0, 1, 1, 2, 2, 3, 5, 6, 7, 8, 8, 9, 9, 13, 45, 63];
                let bit = bits[usize::from(bit) % bits.len()];
                machine.poke(gfn, index, machine.peek(gfn, index) ^ 1 << bit);
            }
            Op::Access(vcpu, gpa, n) => {
                let access = Access::ALL[usize::from(n & 3)];
                self.access(usize::from(vcpu & 1), self.gpa(gpa, n), &access);
            }
            Op::Walk(vcpu, gpa, n) => {
                let (vcpu, gpa) = (usize::from(vcpu & 1), self.gpa(gpa, n));
                let access = Access::ALL[usize::from(n & 3)];
                let expected = machine.reference(vcpu, gpa, &access);
                let tables = {
                    let vcpu = machine.vcpus[vcpu].borrow();
                    vcpu.kind.tables(vcpu.root)
                };
                // It sets bits in L1's tables, as L1 itself might.
                let told = told(&self.kind, gpa, &access);
                let found = translate(machine, &tables, &told);
                assert_eq!(found.is_ok(), expected.is_ok(), "{found:x?} {expected:x?}");
                if let (Ok(found), Ok(expected)) = (found, expected) {
                    assert_eq!(found.gpa.0, expected.gpa);
                }
                // L1 is told, as of a fault of the hardware's, and the CPU forgets what it was not asked for.
                if let Err(StageError::L1 { gpa, fault }) = found {
                    machine.vcpus[vcpu].borrow().roots.tell(&tables, &told);
                    machine.forget(vcpu);
                    machine.leave(vcpu, gpa.0, fault);
                }
            }
            Op::Serve(vcpu, gpa, n, target, flags) => {
                let (vcpu, gpa) = (usize::from(vcpu & 1), self.gpa(gpa, n));
                let steps = u16::from(n >> 2 & 15);
                self.serve(vcpu, gpa, &Access::ALL[usize::from(n & 3)], [target, flags, steps]);
            }
            Op::Enter(vcpu, root) => {
                let n = usize::from(vcpu & 1);
                machine.vcpus[n].borrow_mut().root = ROOTS[usize::from(root) % 3];
                machine.enter(n);
            }
            Op::Flush(vcpu) => {
                machine.flush(usize::from(vcpu & 1));
                self.checked(usize::from(vcpu & 1));
            }
            Op::FlushOf(vcpu, root) => {
                let n = usize::from(vcpu & 1);
                let root = ROOTS[usize::from(root) % 3];
                let current = {
                    let vcpu = &mut *machine.vcpus[n].borrow_mut();
                    vcpu.roots.flush_of(root << 12 | self.kind.offset() | 0x1e);
                    vcpu.root == root
                };
                machine.forget(n);
                machine.enter(n);
                // Of one root alone: what others remember stays.
                if current {
                    self.checked(n);
                }
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
                let gfn = u64::from(gfn) % SMALL;
                machine.withdraw(gfn, gfn + 1);
                machine.rom.set(machine.rom.get() ^ 1 << gfn);
            }
            Op::Age(gfn) => {
                let first = x86::Gfn(u64::from(gfn) % SMALL);
                machine.shadow.age(
                    first,
                    x86::Gfn(first.0 + 8),
                    if gfn & 64 != 0 { Marks::Cleared } else { Marks::Kept },
                );
            }
            Op::Limit(pages) => machine.shadow.set_limit(8 + u64::from(pages) / 4, machine),
            Op::Release(n) => {
                let n = usize::from(n & 1);
                let released = {
                    let vcpu = &mut *machine.vcpus[n].borrow_mut();
                    machine.shadow.lock().nested_release(&mut vcpu.roots)
                };
                assert!(released);
                machine.flush(n);
                self.checked(n);
            }
        }
    }

    fn finish(&self) {
        for vcpu in 0..2 {
            self.machine.flush(vcpu);
            self.checked(vcpu);
            for gpa in self.gpas.iter().step_by(3) {
                for access in Access::ALL {
                    // What is granted after a flush is what L1's tables grant.
                    self.machine.flush(vcpu);
                    if self.access(vcpu, *gpa, &access) {
                        self.machine.reference(vcpu, *gpa, &access).unwrap();
                    }
                }
            }
            self.checked(vcpu);
        }
        self.machine.audit();
    }
}
