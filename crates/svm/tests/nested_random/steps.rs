//! Steps of a hypervisor and of its guest, each held against the model.

use backend::{
    Claim, ControlRegisters, Executed, Gprs, GuestLimits, Level, Nested, Onward, Permissions, RAX,
    RCX, RSP, Registers, SegmentName, Translation, Turn, WorldSwitch,
};
use cpu::{Counting, Model};
use gannet_svm::{Features, Svm, percpu};
use x86::{Cr4, Efer, Exception, Hpa, Rflags, segment::Segment};

use super::architecture::*;

pub struct Test {
    pub random: Random,
    svm: Svm<Counting<Model>>,
    gprs: Gprs,
    memory: Memory,
    /// The model's own: who runs, GIF, L1 as it was at VMRUN, the block, and its control area as it was read.
    level: Level,
    gif: bool,
    l1: State,
    at: u64,
    control: [u64; 64],
    was_entered: bool,
    /// L2 has run since VMRUN: what L1 injected was taken.
    has_run: bool,
    /// Entries, refusals, blocks that went while L2 ran, exits.
    pub counts: [u64; 4],
}

fn limits() -> GuestLimits {
    GuestLimits {
        cr4_allowed: Cr4::from_bits_retain(CR4_ALLOWED),
        efer_allowed: EFER_OF_L1 & !(1 << 10),
        maxphyaddr: WIDTH as u8,
        // NRIP save, flush by ASID.
        svm_features: 1 << 3 | 1 << 6,
        ..GuestLimits::default()
    }
}

impl Test {
    pub fn new(random: Random) -> Self {
        let features = Features {
            asids: 8,
            npt: true,
            nrip_save: true,
            flush_by_asid: true,
            clean_bits: true,
            ..Features::default()
        };
        host::std_port::test::set_cpu(0);
        percpu::set_up(features, 1).unwrap();
        let mut svm = Svm::new(Counting::new(Model::default()), features).unwrap();
        svm.set_limits(limits());
        svm.set_tdp_root(Hpa(0x1000));
        let memory = Memory::new();
        memory.fill(CLOSED..OPEN, u64::MAX);
        let mut test = Self {
            random,
            svm,
            gprs: Gprs::default(),
            memory,
            level: Level::L1,
            gif: true,
            l1: State::default(),
            at: 0,
            control: [0; 64],
            was_entered: false,
            has_run: false,
            counts: [0; 4],
        };
        test.become_l1();
        for page in 0..4 {
            test.make_good(page << 12);
        }
        test.svm.begin_run();
        test.svm.load(0);
        test
    }

    /// A hypervisor in long mode.
    fn become_l1(&mut self) {
        self.svm.set_cr0(x86::Cr0::from_bits_retain(0x8001_0033));
        self.svm.set_cr4(Cr4::PAE);
        self.svm.set_cr3(0x1000);
        self.svm.set_efer(Efer::from_bits_retain(0x1500));
        let cs = Segment { selector: 0x10, attr: 0xa9b, limit: u32::MAX, base: 0 };
        self.svm.set_segment(SegmentName::Cs, cs);
        let ss = Segment { selector: 0x18, attr: 0xc93, limit: u32::MAX, base: 0 };
        self.svm.set_segment(SegmentName::Ss, ss);
    }

    fn make_good(&mut self, at: u64) {
        let random = self.random.next();
        self.memory.fill(at..at + 0x1000, 0);
        for (offset, value, len) in [
            (0x00, random & 0xffff_0000_ffff, 8),
            (0x08, random.rotate_left(13), 8),
            (0x10, random >> 7 | 1, 4),
            (0x40, if random & 1 == 0 { CLOSED } else { OPEN }, 8),
            (0x48, if random & 2 == 0 { CLOSED } else { OPEN }, 8),
            (0x58, 1 + (random >> 4 & 3), 4),
            (0x60, 1 << 24 | random >> 9 & 0x10f, 4),
            (0x578, random & 0xff_ffff, 8),
            (0x5d8, random >> 3 & 0xffff, 8),
            (0x5f8, random, 8),
            (0x668, 0x0007_0406_0007_0406, 8),
        ]
        .into_iter()
        .chain(LONG_MODE)
        {
            self.memory.put(at + offset, value, len);
        }
    }

    /// Changes a field of a block, and says so.
    fn spoil(&mut self, at: u64) {
        const FIELDS: [(u64, usize); 26] = [
            (0x00, 4),
            (0x04, 4),
            (0x08, 4),
            (0x0c, 4),
            (0x10, 4),
            (0x40, 8),
            (0x48, 8),
            (0x58, 4),
            (0x5c, 1),
            (0x60, 4),
            (0x64, 4),
            (0x68, 8),
            (0x90, 8),
            (0xa8, 8),
            (0x410, 8),
            (0x4cb, 1),
            (0x4d0, 8),
            (0x548, 8),
            (0x550, 8),
            (0x558, 8),
            (0x560, 8),
            (0x568, 8),
            (0x570, 8),
            (0x578, 8),
            (0x5d8, 8),
            (0x640, 8),
        ];
        let (offset, len) = self.random.of(&FIELDS);
        let old = self.memory.bits(at + offset, len);
        let value = match self.random.below(4) {
            0 => 0,
            1 => self.random.next(),
            2 => old | 1 << self.random.below(64),
            _ => old ^ 1 << self.random.below(len as u64 * 8),
        };
        // Breakpoints are another matter, and a step of TF is not modelled.
        let value = if offset == 0x560 { value & !0xff } else { value };
        self.memory.put(at + offset, value, len);
        self.memory.put(at + 0xc0, 0, 4);
    }

    /// Whether memory is all there; the other way says what is missing.
    fn hide_pages(&mut self) {
        let hidden = match self.random.below(12) {
            0 => self.random.next() as u16 & self.random.next() as u16,
            _ => 0,
        };
        *self.memory.missing.borrow_mut() = hidden;
        self.memory.is_final = self.random.below(3) == 0;
    }

    fn is_there(&self, at: u64) -> bool {
        at < (PAGES as u64) << 12 && *self.memory.missing.borrow() >> (at >> 12) & 1 == 0
    }

    /// The CPU ends an entry with this exit.
    fn exits_with(&mut self, code: u64, info: [u64; 2], next_rip: u64, event: u64) {
        self.svm.cpu().inner().then(move |vmcb, _| {
            let c = &mut vmcb.control;
            (c.exit_code, c.exit_info_1, c.exit_info_2) = (code, info[0], info[1]);
            (c.next_rip, c.exit_int_info) = (next_rip, event);
        });
        self.svm.enter(&mut self.gprs);
    }

    fn step_l1(&mut self) {
        let code = self.random.of(&[0x80, 0x80, 0x80, 0x80, 0x82, 0x83, 0x84, 0x85, 0x86, 0x7a]);
        let user = self.random.below(40) == 0;
        let off = self.random.below(40) == 0;
        if user {
            let ss = Segment { selector: 0x1b, attr: 0xcf3, limit: u32::MAX, base: 0 };
            self.svm.set_segment(SegmentName::Ss, ss);
        }
        if off {
            self.svm.set_efer(Efer::from_bits_retain(0x500));
            // Without SVM there is no GIF.
            self.gif = true;
        }
        let at = match self.random.below(20) {
            0 => self.random.next(),
            1 => self.random.below(PAGES as u64) << 12 | 8,
            2 => 1 << self.random.below(64),
            _ => self.random.below(4) << 12,
        };
        if at < 4 << 12 && at & 0xfff == 0 {
            match self.random.below(8) {
                0 | 1 => self.spoil(at),
                2 => self.make_good(at),
                3 => {
                    let clean = self.random.next();
                    self.memory.put(at + 0xc0, clean, 4);
                }
                _ => {}
            }
            let changed = at == self.at && self.memory.word(at + 0xc0) as u32 == 0;
            self.was_entered &= !changed;
            // What another block says of itself does not count, since block 02 was made from this one.
            if at == self.at && !self.was_entered {
                self.memory.put(at + 0xc0, 0, 4);
            }
        }
        self.hide_pages();
        self.gprs.0[RAX] = at;
        self.exits_with(code, [0; 2], 0, 0);
        let before = shown(&self.svm, &self.gprs);
        let next = before.rip.wrapping_add(3);
        let done = self.svm.execute(&mut self.gprs, next, &self.memory);
        self.check_l1(code, at, [user, off], &before, next, done);
        if done == Executed::Outside {
            // It is done again outside, with all of memory.
            *self.memory.missing.borrow_mut() = 0;
            self.memory.is_final = true;
            let done = self.svm.execute(&mut self.gprs, next, &self.memory);
            self.check_l1(code, at, [user, off], &before, next, done);
        }
        self.become_l1_again();
    }

    fn become_l1_again(&mut self) {
        if self.svm.level() == Level::L1 {
            let ss = Segment { selector: 0x18, attr: 0xc93, limit: u32::MAX, base: 0 };
            self.svm.set_segment(SegmentName::Ss, ss);
            self.svm.set_efer(Efer::from_bits_retain(0x1500));
        }
    }

    fn check_l1(
        &mut self,
        code: u64,
        at: u64,
        [user, off]: [bool; 2],
        before: &State,
        next: u64,
        done: Executed,
    ) {
        let gp = Executed::Fault(Exception::gp(0));
        let missing = if self.memory.is_final { Executed::NoPage } else { Executed::Outside };
        let address = at & 0xfff == 0 && at >> WIDTH == 0;
        let expected =
            match code {
                _ if off || code == 0x86 => Executed::Fault(Exception::ud()),
                _ if user => gp,
                0x84 => Executed::Opened,
                0x85 => Executed::Closed,
                0x7a => Executed::Retired,
                _ if !address => gp,
                0x80 if !self.was_made(done) => Executed::Outside,
                _ if !self.is_there(at) => missing,
                // MSRs are intercepted by a map that is no memory: what can be open lies in its first page.
                0x80 if is_good(&self.memory, at)
                    && self.memory.bits(at + 0xc, 4) >> 28 & 1 == 1
                    && !self.is_there(self.memory.word(at + 0x48) & !0xfff) =>
                {
                    if self.memory.is_final { Executed::Left } else { Executed::Outside }
                }
                0x80 if is_good(&self.memory, at) => Executed::Entered,
                0x80 => Executed::Left,
                _ => Executed::Retired,
            };
        assert_eq!(done, expected, "{code:#x} of {at:#x}");
        match done {
            Executed::Opened => self.gif = true,
            Executed::Closed => self.gif = false,
            Executed::Entered => {
                self.counts[0] += 1;
                (self.level, self.gif, self.at, self.was_entered) = (Level::L2, true, at, true);
                self.has_run = false;
                self.l1 = State { rip: next, ..*before };
                self.control = core::array::from_fn(|n| self.memory.word(at + n as u64 * 8));
                assert_eq!(shown(&self.svm, &self.gprs), described(&self.memory, at));
                return;
            }
            Executed::Left => {
                self.counts[1] += 1;
                assert_eq!(self.memory.word(at + 0x70), u64::MAX);
                (self.gif, self.was_entered) = (false, false);
                let after = State { rip: next, ..*before };
                assert_eq!(shown(&self.svm, &self.gprs), after, "a refused block");
                return;
            }
            Executed::Fault(_) | Executed::NoPage | Executed::Outside if code == 0x80 => {
                self.was_entered &= off || user
            }
            _ => {}
        }
        assert_eq!(shown(&self.svm, &self.gprs), *before);
        assert_eq!(self.svm.level(), Level::L1);
    }

    /// The first VMRUN of all makes L2's block, outside the loop.
    fn was_made(&self, done: Executed) -> bool {
        self.counts[0] + self.counts[1] != 0 || done != Executed::Outside
    }

    /// Another vCPU of L1's writes to the block whose guest runs: L2 goes on by what VMRUN has read.
    fn scribble(&mut self) {
        if self.at >= 4 << 12 {
            return;
        }
        for _ in 0..self.random.below(6) {
            let offset = self.random.below(0x700 / 8) * 8;
            let word = self.random.next();
            // EVENTINJ is written at an exit only if it was read as valid: a later write would stay, too.
            if offset != 0xa8 {
                self.memory.put(self.at + offset, word, 8);
            }
        }
        self.memory.put(self.at + 0xc0, 0, 4);
        self.was_entered = false;
    }

    fn step_l2(&mut self) {
        if self.random.below(8) == 0 {
            self.scribble();
        }
        let random = self.random.next();
        let code = match self.random.below(8) {
            0 => self.random.of(&[0x400, 0x60, 0x61, 0x52, 0x7e, u64::MAX]),
            1 => 0x7b,
            2 => 0x7c,
            _ => self.random.below(0xc0),
        };
        let port = (random & 0xffff) << 16 | self.random.of(&[1, 2, 4]) << 4;
        let info = if code == 0x7b { port } else { random & 0xffff_ffff };
        self.gprs.0[RCX] = match random >> 40 & 3 {
            0 => random >> 50,
            1 => 0xc000_0000 | random >> 50,
            2 => 0xc001_0000 | random >> 50,
            _ => random,
        };
        // L2 has gone on.
        self.svm.set_rip(random >> 8);
        self.gprs.0[RSP] = random >> 5;
        self.svm.set_cr2(random >> 3);
        self.svm.set_rflags(Rflags::from_bits_retain(2 | random & 0x200));
        let delivers = self.random.below(10) == 0 && code != u64::MAX;
        let event = if delivers { 0x8000_0000 | random & 0xff } else { 0 };
        self.has_run |= code != u64::MAX;
        self.exits_with(code, [info, random], random >> 2, event);
        let before = shown(&self.svm, &self.gprs);
        self.hide_pages();
        let claim = self.svm.claims(&self.gprs, &self.memory);
        let rcx = self.gprs.0[RCX];
        // A map that may be had outside the loop is asked there.
        let Ok(claim) = claim else {
            assert!(!self.memory.is_final && matches!(code, 0x7b | 0x7c));
            return;
        };
        if code == 0x10 && self.control[0] >> 16 & 1 == 0 && self.control[1] >> 37 & 1 == 1 {
            assert_eq!(claim, Claim::ByValue);
            return;
        }
        let hidden = *self.memory.missing.borrow() != 0 && matches!(code, 0x7b | 0x7c);
        let theirs = asked(&self.memory, &self.control, code, info, rcx);
        let is_l1s = matches!(claim, Claim::L1 | Claim::Exception);
        if !hidden {
            assert_eq!(is_l1s, theirs, "{code:#x} {info:#x} {rcx:#x}");
        }
        if is_l1s {
            self.leave(code, [info, random], random >> 2, event, &before);
        }
    }

    fn leave(&mut self, code: u64, info: [u64; 2], next: u64, event: u64, before: &State) {
        let there = self.is_there(self.at);
        const KEPT: [u64; 8] = [0x00, 0x08, 0x10, 0x40, 0x48, 0x50, 0x90, 0xb0];
        let kept = KEPT.map(|offset| if there { self.memory.word(self.at + offset) } else { 0 });
        let done = self.svm.reflect(&mut self.gprs, &self.memory);
        if !there && !self.memory.is_final {
            assert_eq!(done, Executed::Outside);
            assert_eq!(shown(&self.svm, &self.gprs), *before);
            return;
        }
        (self.level, self.gif) = (Level::L1, false);
        // No exit loads CR2: it is L2's.
        let cr2 = before.cr2;
        let after = State { cr0: self.l1.cr0 | 1, cr2, dr7: 0x400, cpl: 0, ..self.l1 };
        assert_eq!(shown(&self.svm, &self.gprs), after, "L1 behind its VMRUN");
        if !there {
            assert_eq!(done, Executed::Shutdown);
            self.counts[2] += 1;
            return;
        }
        assert_eq!(done, Executed::Left);
        self.counts[3] += 1;
        let word = |offset: u64| self.memory.word(self.at + offset);
        let told = State { rflags: before.rflags, ..described(&self.memory, self.at) };
        assert_eq!(told, *before, "L2 in its block");
        let info_2 = if code == 0x7c { 0 } else { info[1] };
        assert_eq!([word(0x70), word(0x78), word(0x80)], [code, info[0], info_2]);
        assert_eq!(word(0x88) & 0xffff_ffff, event, "EXITINTINFO");
        let injected = if self.has_run { 0 } else { self.control[21] >> 31 & 1 };
        assert_eq!(word(0xa8) >> 31 & 1, injected, "EVENTINJ");
        let tells = matches!(code, 0..=0x3f | 0x43..=0x45 | 0x65..=0x7c | 0x80..=0xa4);
        assert_eq!(word(0xc8), if tells { next } else { 0 }, "NRIP of {code:#x}");
        // What is L1's own in the control area stays.
        for (offset, kept) in KEPT.into_iter().zip(kept) {
            assert_eq!(word(offset), kept, "{offset:#x}");
        }
    }

    pub fn step(&mut self) {
        match self.random.below(200) {
            0 => {
                // Reset, or registers from user space.
                self.svm.abandon(&mut self.gprs);
                (self.level, self.gif, self.was_entered) = (Level::L1, true, false);
            }
            1 => {
                self.svm.unload(Onward::ToGuest);
                self.svm.begin_run();
                self.svm.load(0);
            }
            _ if self.level == Level::L1 => self.step_l1(),
            _ => self.step_l2(),
        }
        assert_eq!(self.svm.level(), self.level);
        let open = self.gif && self.level == Level::L1;
        assert_eq!(self.svm.is_gated(), !open);
    }
}
