//! LGDT, LIDT, LLDT, SLDT and STR that exit on Intel CPUs without UMIP. Inside the loop they are answered by what the CPU tells of
//! the instruction; whatever that answers, the emulator makes of the same bytes.

mod rig;

use core::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use ::vm::VmRef;
use backend::RSP;
use cpu::{Counts, Op};
use gannet_vcpu::{RunInput, UserExit};
use host::page::Pages;
use mmu::Region;
use proptest::prelude::*;
use rig::nested_vmx::{self, Hypervisor, L1_RIP, L2_RIP, vmcs12};
use rig::offered_with_umip;
use rig::vmx::{VmxVcpu, cost_on, exit, features, reads_and_writes, shutdown, vcpu_offered};
use stats::Reason;
use vmx::Features;
use x86::segment::{DescriptorTable, Segment};
use x86::vmcs::{ExitReason, ProcControls2, event, field};
use x86::{Cr0, Cr4, Efer, Rflags};

const PAGES: u64 = 16;
/// Tables of the guest's, one a level: the lower half and the upper one are the same.
const TABLES: u64 = 0x1000;
const UPPER: u64 = 0xffff_8000_0000_0000;
const CODE: u64 = 0x6000;
/// Two pages of data that lie side by side, and behind them one that is not there.
const DATA: u64 = 0x8000;
const GDT: DescriptorTable = DescriptorTable { base: 0x1234_5678, limit: 0x9abc };
const ENTRY: u64 = 0x67;
const ACCESSED: u64 = 1 << 5;

/// A load and what the CPU tells of it.
#[derive(Clone, Debug)]
struct Load {
    reason: ExitReason,
    code: Vec<u8>,
    information: u32,
    displacement: u64,
    gprs: [u64; 16],
    fs: u64,
    gs: u64,
    data: Vec<u8>,
    rflags: u64,
}

/// What is there behind it: what the next entry injects, and the registers there.
#[derive(Clone, Debug, PartialEq, Eq)]
struct After {
    event: u32,
    rip: u64,
    rflags: u64,
    shadow: u32,
    gdt: DescriptorTable,
    idt: DescriptorTable,
    /// Selector, base, limit, access rights.
    ldt: (u16, u64, u32, u32),
    gprs: [u64; 16],
}

struct Guest {
    v: VmxVcpu,
    memory: Pages,
    vm: VmRef,
}

impl Guest {
    /// In 64-bit mode at CPL 0, with UMIP; all memory is mapped.
    fn new() -> Self {
        let features = Features { umip_by_exits: true, ..features() };
        let (v, vm) = vcpu_offered(features, offered_with_umip());
        let memory = Pages::zeroed(4).unwrap();
        let size = PAGES << 12;
        let region = Region { slot: 0, flags: 0, gpa: 0, size, hva: memory.hpa().0 };
        vm.memory().set_region(&region, &**vm).unwrap();
        let mut guest = Self { v, memory, vm };
        for level in 0..3 {
            guest.put(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | ENTRY);
        }
        guest.put(TABLES + 256 * 8, (TABLES + 0x1000) | ENTRY);
        for page in 1..DATA / 0x1000 + 2 {
            guest.put(TABLES + 0x3000 + page * 8, page << 12 | ENTRY);
        }
        let mut sregs = guest.v.sregs();
        (sregs.cr0, sregs.cr3) = (Cr0::from_bits_retain(0x8005_0033), TABLES);
        (sregs.cr4, sregs.efer) = (Cr4::PAE | Cr4::UMIP, Efer::LME | Efer::LMA);
        sregs.cs = Segment { base: 0, limit: u32::MAX, selector: 8, attr: 0xa9b };
        sregs.ss = Segment { base: 0, limit: u32::MAX, selector: 16, attr: 0xc93 };
        sregs.ldt = Segment { base: 0x5000, limit: 0xffff, selector: 0x18, attr: 0x82 };
        sregs.tr.selector = 0x28;
        (sregs.gdt, sregs.idt) = (GDT, GDT);
        guest.v.set_sregs(&sregs, None).unwrap();
        for page in 0..PAGES {
            guest.v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
                exit(ExitReason::EptViolation)(vmcs, gprs);
                vmcs.set(field::EXIT_QUALIFICATION, 0x181);
                vmcs.set(field::GUEST_PHYSICAL_ADDRESS, page << 12);
            });
        }
        guest.v.backend().cpu().inner().vmx.then(shutdown);
        assert_eq!(guest.v.run(&RunInput::default()), UserExit::Shutdown);
        guest
    }

    fn put(&self, at: u64, value: u64) {
        self.memory.words()[at as usize / 8].store(value, Relaxed);
    }

    fn put_bytes(&self, at: u64, bytes: &[u8]) {
        for (n, byte) in bytes.iter().enumerate() {
            let at = at as usize + n;
            let word = &self.memory.words()[at / 8];
            let shift = at % 8 * 8;
            word.store(word.load(Relaxed) & !(0xff << shift) | u64::from(*byte) << shift, Relaxed);
        }
    }

    /// The guest is about to execute this.
    fn prepare(&mut self, load: &Load) {
        self.put_bytes(CODE, &load.code);
        self.put_bytes(DATA, &load.data);
        let mut sregs = self.v.sregs();
        (sregs.fs.base, sregs.gs.base) = (load.fs, load.gs);
        self.v.set_sregs(&sregs, None).unwrap();
        let mut regs = self.v.regs();
        (regs.gpr, regs.rip) = (load.gprs, CODE);
        regs.rflags = Rflags::from_bits_retain(load.rflags);
        self.v.set_regs(&regs);
    }

    /// Executes it, and it exits with this instruction information. What came of it, how many such exits the loop
    /// answered, and what was executed.
    fn executes(&mut self, load: &Load, information: u32) -> (After, u64, Counts) {
        self.prepare(load);
        let seen = Arc::new(Mutex::new(None));
        let (script, saw) = (&mut self.v.backend().cpu().inner().vmx, seen.clone());
        let Load { reason, displacement, .. } = *load;
        let length = load.code.len() as u32;
        script.then(move |vmcs, gprs| {
            exit(reason)(vmcs, gprs);
            vmcs.set(field::EXIT_QUALIFICATION, displacement);
            vmcs.set(field::INSTRUCTION_INFO, information);
            vmcs.set(field::INSTRUCTION_LENGTH, length);
        });
        script.then(move |vmcs, gprs| {
            let mut all = gprs.0;
            all[RSP] = vmcs.get(field::GUEST_RSP);
            let ldt = (
                vmcs.get(field::GUEST_LDTR_SELECTOR),
                vmcs.get(field::GUEST_LDTR_BASE),
                vmcs.get(field::GUEST_LDTR_LIMIT),
                vmcs.get(field::GUEST_LDTR_RIGHTS),
            );
            let gdt = DescriptorTable {
                base: vmcs.get(field::GUEST_GDTR_BASE),
                limit: vmcs.get(field::GUEST_GDTR_LIMIT) as u16,
            };
            let idt = DescriptorTable {
                base: vmcs.get(field::GUEST_IDTR_BASE),
                limit: vmcs.get(field::GUEST_IDTR_LIMIT) as u16,
            };
            *saw.lock().unwrap() = Some(After {
                event: vmcs.get(field::ENTRY_INTERRUPTION),
                rip: vmcs.get(field::GUEST_RIP),
                rflags: vmcs.get(field::GUEST_RFLAGS),
                shadow: vmcs.get(field::GUEST_INTERRUPTIBILITY),
                gdt,
                idt,
                ldt,
                gprs: all,
            });
            shutdown(vmcs, gprs);
        });
        let answered = self.v.shared().stats.answered_by(Reason::DescriptorTable);
        let before = self.v.backend().cpu().counts();
        assert_eq!(self.v.run(&RunInput::default()), UserExit::Shutdown);
        assert_eq!(self.v.backend().cpu().inner().vmx.steps_left(), 0);
        let counts = self.v.backend().cpu().counts().since(&before);
        let answered = self.v.shared().stats.answered_by(Reason::DescriptorTable) - answered;
        (seen.lock().unwrap().take().unwrap(), answered, counts)
    }
}

/// What the loop makes of a load, if it answers, and what the emulator does.
fn both(load: &Load) -> (Option<After>, After) {
    let (inside, answered, _) = Guest::new().executes(load, load.information);
    // SGDT or LTR by the information: it is left to the bytes.
    let other = match load.reason {
        ExitReason::GdtrIdtr => load.information & !(3 << 28),
        _ => load.information | 3 << 28,
    };
    let (outside, none, _) = Guest::new().executes(load, other);
    assert_eq!(none, 0);
    if answered == 0 {
        assert_eq!(inside, outside, "{load:x?}");
        return (None, outside);
    }
    (Some(inside), outside)
}

/// What a random load is made of.
#[derive(Clone, Debug)]
struct Choice {
    what: What,
    segment: Option<bool>,
    /// 32-bit addresses.
    narrow: bool,
    base: Base,
    index: Option<usize>,
    scale: u32,
    displacement: i32,
    gprs: [u64; 16],
    /// Where the operand lies, from DATA on, in which half, and how far from the segment's base.
    at: u64,
    upper: bool,
    offset: u64,
    limit: u16,
    table: u64,
    selector: u16,
    rflags: u64,
    /// What the CPU may leave in bits that mean nothing.
    undefined: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Lgdt,
    Lidt,
    Lldt,
    LldtOf(usize),
    /// Into this register.
    Sldt(usize),
    Str(usize),
}

/// Prefixes of stores, without REX.B.
const PREFIXES: [&[u8]; 9] = [
    &[],
    &[0x66],
    &[0x48],
    &[0x66, 0x48],
    &[0x66, 0x40],
    // REX counts right before the opcode alone.
    &[0x48, 0x66],
    &[0x48, 0x3e],
    &[0x3e, 0x66, 0x42],
    &[0x66, 0x67, 0x66, 0x4a],
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    None,
    Rip,
    Register(usize),
}

impl Choice {
    fn length(&self) -> u64 {
        if matches!(self.what, What::Lgdt | What::Lidt) { 10 } else { 2 }
    }

    /// Whether the loop answers it.
    fn is_simple(&self) -> bool {
        let within = self.at < 0x2000 && (self.at & 0xfff) + self.length() <= 0x1000;
        match self.what {
            What::Lgdt | What::Lidt => {
                within && ((self.table << 16) as i64 >> 16) as u64 == self.table
            }
            What::Lldt => within && self.selector < 4,
            What::LldtOf(_) => self.selector < 4,
            What::Sldt(_) | What::Str(_) => true,
        }
    }

    /// Whether nothing but the displacement says where the operand is.
    fn is_displaced(&self) -> bool {
        match self.base {
            Base::Rip => true,
            Base::None => self.index.is_none() || self.scale != 0,
            Base::Register(_) => false,
        }
    }

    fn load(mut self) -> Load {
        self.index = self.index.filter(|&n| n != 4 && self.base != Base::Rip);
        self.index = self.index.filter(|&n| self.base != Base::Register(n));
        let small = self.is_displaced();
        let upper = self.upper && !small && !self.narrow;
        let linear = (DATA + self.at) | if upper { UPPER } else { 0 };
        let offset = match self.segment {
            None => linear,
            Some(_) if upper => (self.offset >> 24).wrapping_neg(),
            Some(_) if small => self.offset >> 34,
            Some(_) => self.offset >> 32,
        };
        let base = linear.wrapping_sub(offset);
        let mut displacement = i64::from(self.displacement);
        let scaled = |gprs: &[u64; 16], n: usize| gprs[n] << self.scale;
        let cut = |old: u64, new: u64| match self.narrow {
            true => old & !0xffff_ffff | new & 0xffff_ffff,
            false => new,
        };
        let rest = offset.wrapping_sub(displacement as u64);
        let mut code = Vec::new();
        code.extend(self.segment.map(|gs| if gs { 0x65 } else { 0x64 }));
        code.extend(self.narrow.then_some(0x67));
        let (second, extension) = match self.what {
            What::Lgdt => (1, 2),
            What::Lidt => (1, 3),
            What::Lldt | What::LldtOf(_) => (0, 2),
            What::Sldt(n) => return self.store(n, 0, base),
            What::Str(n) => return self.store(n, 1, base),
        };
        if let What::LldtOf(n) = self.what {
            self.gprs[n] = self.gprs[n] & !0xffff | u64::from(self.selector);
            code.extend([0x40 | (n as u8 >> 3), 0x0f, second, 0xc0 | extension << 3 | n as u8 & 7]);
            return self.finish(code, 1 << 10 | (n as u32) << 3 | 2 << 28, !0x3000_0478, 0, base);
        }
        match (self.base, self.index) {
            (Base::Register(b), index) => {
                let rest = rest.wrapping_sub(index.map_or(0, |i| scaled(&self.gprs, i)));
                self.gprs[b] = cut(self.gprs[b], rest);
            }
            (_, Some(i)) if !small => self.gprs[i] = cut(self.gprs[i], rest),
            (_, index) => {
                if let Some(i) = index {
                    self.gprs[i] = cut(self.gprs[i], 0);
                }
                displacement = offset as i64;
            }
        }
        let index = self.index.unwrap_or(4) as u8;
        let b = if let Base::Register(b) = self.base { b as u8 } else { 5 };
        let mode: u8 = if matches!(self.base, Base::Register(_)) { 0x80 } else { 0 };
        code.push(0x40 | index >> 3 << 1 | if mode != 0 { b >> 3 } else { 0 });
        code.extend([0x0f, second]);
        if self.base == Base::Rip {
            code.push(extension << 3 | 5);
            displacement = offset.wrapping_sub(CODE + code.len() as u64 + 4) as i64;
        } else {
            code.push(mode | extension << 3 | 4);
            code.push((self.scale as u8) << 6 | (index & 7) << 3 | b & 7);
        }
        code.extend((displacement as i32).to_le_bytes());
        let told = match self.base {
            Base::Rip => offset,
            _ => i64::from(displacement as i32) as u64,
        };
        let segment = match (self.segment, self.base) {
            (Some(gs), _) => 4 + u32::from(gs),
            (None, Base::Register(4 | 5)) => 2,
            _ => 3,
        };
        let information = self.scale
            | if self.narrow { 1 << 7 } else { 2 << 7 }
            | segment << 15
            | self.index.map_or(1 << 22, |i| (i as u32) << 18)
            | if let Base::Register(b) = self.base { (b as u32) << 23 } else { 1 << 27 }
            | u32::from(extension) << 28;
        self.finish(code, information, 0xc000_787c, told, base)
    }

    /// A store into a register.
    fn store(mut self, n: usize, identity: u8, base: u64) -> Load {
        let mut code = PREFIXES[self.selector as usize % PREFIXES.len()].to_vec();
        if n & 8 != 0 {
            match code.last_mut() {
                Some(rex) if *rex & 0xf0 == 0x40 => *rex |= 1,
                _ => code.push(0x41),
            }
        }
        if self.narrow {
            self.gprs[n] &= 0xffff;
        }
        code.extend([0x0f, 0, 0xc0 | identity << 3 | n as u8 & 7]);
        let information = 1 << 10 | (n as u32) << 3 | u32::from(identity) << 28;
        self.finish(code, information, !0x3000_0478, 0, base)
    }

    fn finish(self, code: Vec<u8>, defined: u32, free: u32, displacement: u64, base: u64) -> Load {
        let mut data = vec![0; self.at as usize];
        if self.length() == 2 {
            data.extend(self.selector.to_le_bytes());
        } else {
            data.extend(self.limit.to_le_bytes());
            data.extend(self.table.to_le_bytes());
        }
        let is_table = matches!(self.what, What::Lgdt | What::Lidt);
        Load {
            reason: if is_table { ExitReason::GdtrIdtr } else { ExitReason::LdtrTr },
            code,
            information: defined | self.undefined & free,
            displacement,
            gprs: self.gprs,
            fs: if self.segment == Some(false) { base } else { 0x1111_0000 },
            gs: if self.segment == Some(true) { base } else { 0x2222_0000 },
            data,
            rflags: 2 | self.rflags & 0x5_0301,
        }
    }
}

fn choice() -> impl Strategy<Value = Choice> {
    let what = prop_oneof![
        Just(What::Lgdt),
        Just(What::Lidt),
        Just(What::Lldt),
        (0..16usize).prop_map(What::LldtOf),
        (0..16usize).prop_map(What::Sldt),
        (0..16usize).prop_map(What::Str),
    ];
    let base = prop_oneof![
        1 => Just(Base::None),
        1 => Just(Base::Rip),
        6 => (0..16usize).prop_map(Base::Register),
    ];
    let at = prop_oneof![
        3 => 0u64..0x2010,
        1 => 0xff0u64..0x1000,
        1 => 0x1ff0u64..0x2000,
    ];
    let table = prop_oneof![
        3 => any::<u64>().prop_map(|at| ((at << 16) as i64 >> 16) as u64),
        1 => any::<u64>(),
    ];
    let address = (any::<Option<bool>>(), any::<bool>(), base, any::<Option<u8>>(), 0..4u32);
    let place = (any::<i32>(), any::<[u64; 16]>(), at, any::<bool>(), any::<u64>());
    let value = (any::<u16>(), table, prop_oneof![3 => 0u16..4, 1 => any::<u16>()]);
    (what, address, place, value, any::<(u64, u32)>()).prop_map(
        |(what, address, place, value, (rflags, undefined))| {
            let (segment, narrow, base, index, scale) = address;
            let (displacement, gprs, at, upper, offset) = place;
            let (limit, table, selector) = value;
            let index = index.map(|n| usize::from(n & 15));
            Choice {
                what,
                segment,
                narrow,
                base,
                index,
                scale,
                displacement,
                gprs,
                at,
                upper,
                offset,
                limit,
                table,
                selector,
                rflags,
                undefined,
            }
        },
    )
}

proptest! {
    #[test]
    fn what_the_loop_answers_is_what_the_emulator_does(choice in choice()) {
        let simple = choice.is_simple();
        let load = choice.load();
        let (inside, outside) = both(&load);
        prop_assert_eq!(inside.is_some(), simple, "{:x?}", load);
        if let Some(inside) = inside {
            prop_assert_eq!(&inside, &outside, "{:x?}", load);
            prop_assert_eq!(inside.rip, CODE + load.code.len() as u64);
        }
    }
}

/// LGDT, LIDT or LLDT of what lies at DATA, whose address is in RBX.
fn plain(reason: ExitReason, identity: u32) -> Load {
    let second = if reason == ExitReason::GdtrIdtr { 1 } else { 0 };
    let mut gprs = [0; 16];
    gprs[backend::RBX] = DATA;
    Load {
        reason,
        code: vec![0x0f, second, 3 | (identity as u8) << 3],
        information: 2 << 7 | 3 << 15 | 1 << 22 | 3 << 23 | identity << 28,
        displacement: 0,
        gprs,
        fs: 0,
        gs: 0,
        data: vec![0; 10],
        rflags: 2,
    }
}

const GP: u32 = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;

#[test]
fn stores_and_ltr_leave_the_loop() {
    for (reason, identity) in [
        (ExitReason::GdtrIdtr, 0),
        (ExitReason::GdtrIdtr, 1),
        (ExitReason::LdtrTr, 0),
        (ExitReason::LdtrTr, 1),
        (ExitReason::LdtrTr, 3),
    ] {
        let load = plain(reason, identity);
        let (after, answered, _) = Guest::new().executes(&load, load.information);
        assert_eq!(answered, 0);
        // LTR of a null selector.
        let event = if identity == 3 { GP } else { 0 };
        assert_eq!(after.event, event, "{reason:?} {identity}");
    }
}

/// What the emulator looks at first are the bytes: they may be another instruction's by now, which the CPU did not execute.
#[test]
fn a_store_whose_bytes_are_another_instruction_leaves_the_loop() {
    let executes = |code: &[u8], rdx: u64| {
        let mut load = plain(ExitReason::LdtrTr, 0);
        load.gprs[backend::RDX] = rdx;
        load.code = code.to_vec();
        let information = 1 << 10 | 2 << 3;
        let (after, answered, _) = Guest::new().executes(&load, information);
        (answered, after.gprs[backend::RDX])
    };
    const OLD: u64 = 0x1234_5678_9abc_def0;
    assert_eq!(executes(&[0x66, 0x0f, 0, 0xc2], OLD), (1, OLD & !0xffff | 0x18));
    // What the size does not change needs no bytes.
    for rdx in [0, 0xffff] {
        assert_eq!(executes(&[0x66, 0x0f, 0, 0xc3], rdx), (1, 0x18));
    }
    // Another register by either bit, TR, a load, another opcode.
    for other in [[0x66, 0x0f, 0, 0xc3], [0x49, 0x0f, 0, 0xc2], [0x66, 0x0f, 0, 0xca]] {
        assert_eq!(executes(&other, OLD).0, 0, "{other:x?}");
    }
}

#[test]
fn another_mode_leaves_the_loop() {
    // Compatibility mode: six bytes. And level 3, where the CPU faults before it exits.
    for (code, stack, event) in [(0xc9b, 0xc93, 0), (0xafb, 0xcf3, GP)] {
        let mut guest = Guest::new();
        let mut sregs = guest.v.sregs();
        (sregs.cs.attr, sregs.ss.attr) = (code, stack);
        sregs.ds = sregs.ss;
        guest.v.set_sregs(&sregs, None).unwrap();
        let load = Load { data: vec![0xff; 10], ..plain(ExitReason::GdtrIdtr, 2) };
        let (after, answered, _) = guest.executes(&load, load.information);
        assert_eq!((answered, after.event), (0, event));
        let base = if event == 0 { 0xffff_ffff } else { GDT.base };
        assert_eq!(after.gdt.base, base);
    }
}

#[test]
fn an_entry_that_was_not_used_leaves_the_loop_once() {
    let load = plain(ExitReason::GdtrIdtr, 2);
    let mut guest = Guest::new();
    let entry = TABLES + 0x3000 + DATA / 0x1000 * 8;
    guest.put(entry, DATA | ENTRY & !ACCESSED);
    for answers in [0, 1] {
        let (after, answered, _) = guest.executes(&load, load.information);
        assert_eq!((answered, after.event, after.gdt.base), (answers, 0, 0));
        assert_ne!(guest.memory.words()[entry as usize / 8].load(Relaxed) & ACCESSED, 0);
    }
}

#[test]
fn a_table_in_a_device_leaves_the_loop() {
    let load = plain(ExitReason::GdtrIdtr, 2);
    let mut guest = Guest::new();
    guest.put(TABLES + 0x3000 + DATA / 0x1000 * 8, 0x10_0000 | ENTRY);
    guest.prepare(&load);
    let information = load.information;
    guest.v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
        exit(ExitReason::GdtrIdtr)(vmcs, gprs);
        vmcs.set(field::INSTRUCTION_INFO, information);
    });
    assert!(matches!(guest.v.run(&RunInput::default()), UserExit::Mmio { .. }));
    assert_eq!(guest.v.regs().rip, CODE);
    assert_eq!(guest.v.shared().stats.answered_by(Reason::DescriptorTable), 0);
}

#[test]
fn an_answer_is_one_entry_of_a_few_reads_and_writes() {
    let vcpu = || {
        let mut guest = Guest::new();
        guest.put_bytes(DATA, &[0x7f, 0, 0, 0x10]);
        let mut regs = guest.v.regs();
        (regs.gpr[backend::RBX], regs.rip) = (DATA, CODE);
        guest.v.set_regs(&regs);
        let Guest { mut v, memory, vm } = guest;
        // What was set from outside is written by the first entry, and is no exit's.
        v.backend().cpu().inner().vmx.then(shutdown);
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        v.backend().cpu().inner().vmx.unchanged_writes.borrow_mut().clear();
        std::mem::forget((memory, vm));
        v
    };
    let load = plain(ExitReason::GdtrIdtr, 2);
    let ten = cost_on(vcpu, move |vmcs, gprs| {
        exit(load.reason)(vmcs, gprs);
        vmcs.set(field::INSTRUCTION_INFO, load.information);
        vmcs.set(field::GUEST_GDTR_BASE, 0x1234);
        vmcs.set(field::GUEST_GDTR_LIMIT, 0x1234);
    });
    assert_eq!((ten.of(Op::Vmread), ten.of(Op::Vmwrite)), (120, 30));
    // CR2, along with those that a walk goes by. The extended state stays.
    assert_eq!(ten.of(Op::MovCr), 10);
    assert_eq!((ten.of(Op::Rdmsr), ten.of(Op::Wrmsr), ten.of(Op::Xsetbv)), (0, 0, 0));
    let load = plain(ExitReason::LdtrTr, 2);
    let ten = cost_on(vcpu, move |vmcs, gprs| {
        exit(load.reason)(vmcs, gprs);
        vmcs.set(field::INSTRUCTION_INFO, load.information | 1 << 10);
        vmcs.set(field::GUEST_LDTR_SELECTOR, 8);
        vmcs.set(field::GUEST_LDTR_BASE, 8);
        vmcs.set(field::GUEST_LDTR_LIMIT, 8);
        vmcs.set(field::GUEST_LDTR_RIGHTS, 0x82);
    });
    assert_eq!(reads_and_writes(&ten), (8, 5));
    let load = plain(ExitReason::LdtrTr, 0);
    let ten = cost_on(vcpu, move |vmcs, gprs| {
        exit(load.reason)(vmcs, gprs);
        gprs.0[backend::RDX] = 7;
        vmcs.set(field::INSTRUCTION_INFO, load.information | 1 << 10 | 2 << 3);
    });
    assert_eq!(reads_and_writes(&ten), (12, 1));
}

/// L2's instruction, of which L1 does not want to hear: its operand lies behind tables of L1's.
#[test]
fn a_guests_guest_leaves_the_loop() {
    let features = Features { umip_by_exits: true, ..nested_vmx::features() };
    let mut machine = Hypervisor::on(features, &vmcs12());
    machine.vmlaunch();
    let load = plain(ExitReason::LdtrTr, 2);
    machine.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        exit(load.reason)(vmcs, gprs);
        vmcs.set(field::INSTRUCTION_INFO, load.information | 1 << 10);
    });
    // L2's shutdown is L1's to hear of.
    machine.then(shutdown);
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    let stats = &machine.vcpu.shared().stats;
    assert_eq!(stats.exits_by(Reason::DescriptorTable), 1);
    assert_eq!(stats.answered_by(Reason::DescriptorTable), 0);
}

/// The watch of a hypervisor's loads ends inside the loop, and the instruction is executed again.
#[test]
fn a_watch_ends_inside_the_loop() {
    let features = Features { table_exits: true, ..nested_vmx::features() };
    let mut machine = Hypervisor::on(features, &vmcs12());
    machine.vmlaunch();
    machine.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    let watched = |vmcs: &cpu::ModelVmcs| {
        vmcs.get(field::PROC_CONTROLS2) & ProcControls2::DESCRIPTOR_TABLES.bits() != 0
    };
    let load = plain(ExitReason::GdtrIdtr, 2);
    machine.then(move |vmcs, gprs| {
        assert_eq!((vmcs.get(field::GUEST_RIP), watched(vmcs)), (L1_RIP, true));
        exit(load.reason)(vmcs, gprs);
        vmcs.set(field::INSTRUCTION_INFO, load.information);
    });
    machine.then(move |vmcs, gprs| {
        assert_eq!((vmcs.get(field::GUEST_RIP), watched(vmcs)), (L1_RIP, false));
        shutdown(vmcs, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    let stats = &machine.vcpu.shared().stats;
    assert_eq!(stats.answered_by(Reason::DescriptorTable), 1);
}
