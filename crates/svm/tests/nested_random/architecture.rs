//! What the architecture says of SVM, apart from the code: L1's memory, the state that VMRUN and VMEXIT exchange, which
//! blocks may be run, and which exits L1 asked for.

use std::{
    cell::{Cell, RefCell},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use backend::{
    ControlRegisters, Gprs, L1Memory, LiveRegisters, Outside, RAX, RSP, Reach, Registers,
    SegmentName,
};
use cpu::{Counting, Model};
use gannet_svm::Svm;
use x86::{Direction, Gpa, segment::Segment};

pub const PAGES: usize = 16;
pub const EFER_OF_L1: u64 = 0x1d01;
pub const CR4_ALLOWED: u64 = 0x0030_07ff;
pub const WIDTH: u32 = 40;
/// L1's permission maps: all ones, and all zeroes.
pub const CLOSED: u64 = 8 << 12;
pub const OPEN: u64 = 12 << 12;

/// Where in a block, what and how wide: a guest in long mode, which VMRUN takes.
pub const LONG_MODE: [(u64, u64, usize); 11] = [
    (0x410, 0xffff_ffff_0a9b_0010, 8),
    (0x420, 0xffff_ffff_0c93_0018, 8),
    (0x460, 0x7f_0000_0000, 8),
    (0x480, 0xfff_0000_0000, 8),
    (0x4d0, 0x1500, 8),
    (0x548, 0x20, 8),
    (0x550, 0x5000, 8),
    (0x558, 0x8001_0033, 8),
    (0x560, 0x400, 8),
    (0x568, 0xffff_0ff0, 8),
    (0x570, 2, 8),
];

/// Bytes that were given, and behind them a sequence that follows from its seed.
pub struct Random {
    seed: u64,
    given: Vec<u8>,
    at: usize,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { seed, given: Vec::new(), at: 0 }
    }
    /// What a fuzzer chose comes first.
    #[allow(dead_code, reason = "the fuzzer's")]
    pub fn given(bytes: &[u8]) -> Self {
        Self { seed: 1, given: bytes.to_vec(), at: 0 }
    }
    /// Whether what was given is used up.
    #[allow(dead_code, reason = "the fuzzer's")]
    pub fn is_used_up(&self) -> bool {
        self.at >= self.given.len()
    }
    fn take(&mut self, count: usize) -> Option<u64> {
        let bytes = self.given.get(self.at..self.at + count)?;
        self.at += count;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }
    pub fn next(&mut self) -> u64 {
        if let Some(given) = self.take(8) {
            return given;
        }
        self.at = self.given.len();
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        match if n <= 256 { self.take(1) } else { None } {
            Some(given) => given % n,
            None => self.next() % n,
        }
    }
    pub fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// L1's memory. A page may not be there now, or not be memory at all. Every other time it is given in place.
pub struct Memory {
    pub pages: Vec<[AtomicU64; 512]>,
    pub turn: Cell<u32>,
    pub missing: RefCell<u16>,
    pub is_final: bool,
}

impl Memory {
    pub fn new() -> Self {
        let pages = (0..PAGES).map(|_| [const { AtomicU64::new(0) }; 512]).collect();
        Self { pages, turn: Cell::new(0), missing: RefCell::new(0), is_final: false }
    }
    fn byte(&self, at: usize) -> u8 {
        self.pages[at >> 12][at >> 3 & 511].load(Relaxed).to_le_bytes()[at & 7]
    }
    pub fn set_byte(&self, at: usize, byte: u8) {
        let word = &self.pages[at >> 12][at >> 3 & 511];
        let mut bytes = word.load(Relaxed).to_le_bytes();
        bytes[at & 7] = byte;
        word.store(u64::from_le_bytes(bytes), Relaxed);
    }
    /// Fills whole pages.
    pub fn fill(&self, range: std::ops::Range<u64>, word: u64) {
        let pages = &self.pages[range.start as usize >> 12..range.end as usize >> 12];
        pages.iter().flatten().for_each(|to| to.store(word, Relaxed));
    }
    pub fn place(&self, at: Gpa, len: usize) -> Result<usize, Outside> {
        let end = at.0.checked_add(len as u64).ok_or(Outside)?;
        if end > (PAGES as u64) << 12 {
            return Err(Outside);
        }
        let missing = *self.missing.borrow();
        let there = (at.0 >> 12..=(end - 1) >> 12).all(|page| missing >> page & 1 == 0);
        if there { Ok(at.0 as usize) } else { Err(Outside) }
    }
    pub fn word(&self, at: u64) -> u64 {
        if at & 7 == 0 {
            return self.pages[at as usize >> 12][at as usize >> 3 & 511].load(Relaxed);
        }
        u64::from_le_bytes(std::array::from_fn(|n| self.byte(at as usize + n)))
    }
    pub fn put(&self, at: u64, value: u64, len: usize) {
        for (at, byte) in (at as usize..).zip(&value.to_le_bytes()[..len]) {
            self.set_byte(at, *byte);
        }
    }
    pub fn bits(&self, at: u64, len: usize) -> u64 {
        let mut word = [0; 8];
        for (at, to) in (at as usize..).zip(&mut word[..len]) {
            *to = self.byte(at);
        }
        u64::from_le_bytes(word)
    }
}

impl L1Memory for Memory {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        let from = self.place(at, into.len())?;
        (from..).zip(into).for_each(|(at, to)| *to = self.byte(at));
        Ok(())
    }
    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let to = self.place(at, from.len())?;
        (to..).zip(from).for_each(|(at, byte)| self.set_byte(at, *byte));
        Ok(())
    }
    fn page(&self, at: Gpa, _write: Direction) -> Option<&[AtomicU64; 512]> {
        self.turn.set(self.turn.get() + 1);
        let at = self.place(at, 0x1000).ok()?;
        (self.turn.get() & 1 != 0).then(|| &self.pages[at >> 12])
    }
    fn translate(&self, _: u64, _: Direction) -> Result<Gpa, Reach> {
        Err(Reach::Outside)
    }
    fn is_final(&self) -> bool {
        self.is_final
    }
}

/// What VMRUN and VMEXIT exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub rip: u64,
    pub rflags: u64,
    pub rax: u64,
    pub rsp: u64,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    pub dr6: u64,
    pub dr7: u64,
    pub cpl: u8,
    pub segments: [Segment; 4],
    pub tables: [(u64, u16); 2],
}

const NAMES: [SegmentName; 4] =
    [SegmentName::Es, SegmentName::Cs, SegmentName::Ss, SegmentName::Ds];

/// The state of whoever runs.
pub fn shown(svm: &Svm<Counting<Model>>, gprs: &Gprs) -> State {
    let c = svm.control();
    let [.., dr6, dr7] = svm.debug_regs();
    let (gdt, idt) = (svm.gdtr(), svm.idtr());
    State {
        rip: svm.rip(),
        rflags: svm.rflags().bits(),
        rax: gprs.0[RAX],
        rsp: gprs.0[RSP],
        cr0: c.cr0.bits(),
        cr2: c.cr2,
        cr3: c.cr3,
        cr4: c.cr4.bits(),
        efer: c.efer.bits(),
        dr6,
        dr7,
        cpl: svm.cpl(),
        segments: NAMES.map(|name| svm.segment(name)),
        tables: [(gdt.base, gdt.limit), (idt.base, idt.limit)],
    }
}

/// What a block says.
pub fn described(m: &Memory, at: u64) -> State {
    let word = |offset: u64| m.word(at + offset);
    let segment = |n: u64| {
        let low = word(0x400 + n * 16);
        Segment {
            selector: low as u16,
            attr: (low >> 16) as u16,
            limit: (low >> 32) as u32,
            base: word(0x408 + n * 16),
        }
    };
    let table = |n: u64| (word(0x408 + n * 16), (word(0x400 + n * 16) >> 32) as u16);
    State {
        rip: word(0x578),
        rflags: word(0x570) | 2,
        rax: word(0x5f8),
        rsp: word(0x5d8),
        cr0: word(0x558) | 0x10,
        cr2: word(0x640),
        cr3: word(0x550),
        cr4: word(0x548),
        efer: word(0x4d0),
        dr6: (word(0x568) | 0xfffe_07f0) & !0x1000,
        dr7: word(0x560) | 0x400,
        cpl: m.bits(at + 0x4cb, 1) as u8 & 3,
        segments: [segment(0), segment(1), segment(2), segment(3)],
        tables: [table(6), table(8)],
    }
}

/// Whether a block may be run.
pub fn is_good(m: &Memory, at: u64) -> bool {
    let word = |offset: u64| m.word(at + offset);
    let long = |offset: u64| m.bits(at + offset, 4);
    let fits = |map: u64, bytes: u64| {
        let base = u128::from(map & !0xfff);
        base + u128::from(bytes) <= 1 << WIDTH
    };
    let (efer, cr0, cr3, cr4) = (word(0x4d0), word(0x558), word(0x550), word(0x548));
    let event = word(0xa8);
    let event_is_good = event >> 31 & 1 == 0
        || match event >> 8 & 7 {
            0 | 2 | 4 => true,
            3 => {
                let reserved = [2, 9, 15, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 31];
                let in_64_bit_mode =
                    efer >> 8 & 1 == 1 && cr0 >> 31 & 1 == 1 && word(0x410) >> 25 & 1 == 1;
                let vector = event & 0xff;
                vector < 32
                    && !reserved.contains(&vector)
                    && !(in_64_bit_mode && [4, 5].contains(&vector))
            }
            _ => false,
        };
    let paging = efer >> 8 & 1 == 1 && cr0 >> 31 & 1 == 1;
    let code = word(0x410) >> 16;
    long(0x10) & 1 == 1
        && long(0x58) != 0
        && fits(word(0x40), 0x3000)
        && fits(word(0x48), 0x2000)
        && word(0x90) & 1 == 0
        && matches!(m.bits(at + 0x5c, 1), 0 | 1 | 3 | 7)
        && long(0x60) >> 26 & 1 == 0
        && event_is_good
        && efer >> 12 & 1 == 1
        && efer & !EFER_OF_L1 == 0
        && cr0 >> 32 == 0
        && (cr0 >> 29 & 1 == 0 || cr0 >> 30 & 1 == 1)
        && cr4 & !CR4_ALLOWED == 0
        && word(0x560) >> 32 == 0
        && word(0x568) >> 32 == 0
        && (!paging
            || (cr4 >> 5 & 1 == 1 && cr0 & 1 == 1 && cr3 >> WIDTH == 0 && code & 0x600 != 0x600))
}

/// Whether L1 asked for an exit.
pub fn asked(m: &Memory, block: &[u64; 64], code: u64, info: u64, rcx: u64) -> bool {
    let intercepted = |code: u64| code < 0xc0 && block[code as usize / 64] >> (code % 64) & 1 == 1;
    let map_bit = |map: u64, bit: u64| {
        let byte = (map & !0xfff) + bit / 8;
        byte >= (PAGES as u64) << 12 || m.bits(byte, 1) >> (bit % 8) & 1 == 1
    };
    match code {
        0x52 | 0x60..=0x63 | 0x7e | 0x400 => false,
        u64::MAX => true,
        0x7b => {
            intercepted(code)
                && (0..info >> 4 & 7).any(|n| map_bit(block[8], (info >> 16 & 0xffff) + n))
        }
        0x7c => {
            let index = match rcx as u32 {
                n @ 0..=0x1fff => Some(n),
                n @ 0xc000_0000..=0xc000_1fff => Some(n - 0xc000_0000 + 0x2000),
                n @ 0xc001_0000..=0xc001_1fff => Some(n - 0xc001_0000 + 0x4000),
                _ => None,
            };
            let closed = |n: u32| map_bit(block[9], u64::from(n) * 2 + (info & 1));
            intercepted(code) && index.is_none_or(closed)
        }
        _ => intercepted(code),
    }
}
