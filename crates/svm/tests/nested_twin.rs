//! The CPU gets the same control blocks whatever L1 calls clean, as long as that is true. Random sequences of what L1, L2 and
//! whoever runs them do are played twice over the model CPU: once with L1 calling clean all that it has not changed, once with
//! nothing clean, so that all of L2's block is composed anew. What L0 in turn calls clean to the CPU the model holds against
//! what the CPU keeps of the block.
//!
//! GANNET_NESTED_STEPS says how many steps.

#[path = "nested_random/architecture.rs"]
#[allow(dead_code, reason = "the other test's")]
mod architecture;

use std::sync::{Arc, Mutex};

use architecture::{CLOSED, CR4_ALLOWED, EFER_OF_L1, LONG_MODE, Memory, OPEN, Random, WIDTH};
use backend::{
    Claim, Clock as _, ControlRegisters as _, DebuggerWants, Executed, Gprs, GuestLimits, Level,
    LiveRegisters as _, Msrs as _, Nested as _, NestedPaging as _, Onward, Permissions as _, RAX,
    Registers as _, SegmentName, TSC_RATIO_ONE, Translation as _, Turn as _, WorldSwitch as _,
};
use cpu::{Counting, Model};
use gannet_svm::{Features, Svm, percpu};
use x86::vmcb::Clean;
use x86::{Cr0, Cr4, Efer, Hpa, msr, segment::Segment};
use zerocopy::IntoBytes as _;

/// Steps of a sequence.
const STEPS: u64 = 128;
const PATS: [u64; 3] = [0x0007_0406_0007_0406, 0x0606_0606_0606_0606, 0];
/// L1's blocks.
const BLOCKS: [u64; 2] = [0, 0x1000];
/// VMRUN, CPUID, HLT, VMMCALL, and what the host or L0 asked for.
const EXITS: [u64; 5] = [0x72, 0x78, 0x81, 0x60, 0x61];

/// Fields of a block that L1 writes: byte, bytes, and the clean bit that says so. Controls are read whatever is clean.
#[rustfmt::skip] // A table.
const FIELDS: [(u64, usize, Clean); 32] = [
    (0x00, 4, Clean::INTERCEPTS), (0x04, 4, Clean::INTERCEPTS), (0x08, 4, Clean::INTERCEPTS),
    (0x0c, 4, Clean::INTERCEPTS), (0x3c, 4, Clean::INTERCEPTS), (0x50, 8, Clean::INTERCEPTS),
    (0x48, 8, Clean::PERM_MAP), (0x58, 4, Clean::ASID), (0x60, 4, Clean::INTR), (0x60, 4, Clean::INTR),
    (0x64, 4, Clean::INTR), (0x68, 8, Clean::empty()), (0xa8, 8, Clean::empty()),
    (0x90, 8, Clean::NPT), (0x90, 8, Clean::NPT), (0x668, 8, Clean::NPT), (0xb8, 8, Clean::LBR),
    (0xb8, 8, Clean::LBR), (0x670, 8, Clean::LBR), (0x678, 8, Clean::LBR), (0x4d0, 8, Clean::CR),
    (0x548, 8, Clean::CR), (0x550, 8, Clean::CR), (0x558, 8, Clean::CR), (0x560, 8, Clean::DR),
    (0x568, 8, Clean::DR), (0x640, 8, Clean::CR2), (0x480, 8, Clean::DT), (0x410, 8, Clean::SEG),
    (0x4cb, 1, Clean::SEG), (0x570, 8, Clean::empty()), (0x578, 8, Clean::empty()),
];

/// A value of a field, which VMRUN takes.
fn value(r: &mut Random, at: u64) -> u64 {
    let random = r.next();
    match at {
        // MSRs, among others: L2 runs on the map of both levels, or on L0's.
        0x0c => random & 0x1000_00ff,
        0x3c => random & 0x3_0003,
        0x48 => r.of(&[CLOSED, OPEN]),
        0x58 => 1 + (random & 3),
        // V_TPR, V_IRQ with its priority, V_INTR_MASKING.
        0x60 => random & 0x010f_010f,
        0xa8 => r.of(&[0, 0, 0x8000_0202, 0x8000_0b0d]),
        0x90 | 0xb8 => random & 1,
        0x668 => r.of(&PATS),
        0x4d0 => 0x1500 | random & 0x801,
        0x548 => 0x20 | random & 0x680,
        0x550 => r.of(&[0x5000, 0x6000]),
        0x558 => 0x8001_0033 | random & 0x4000_0008,
        0x560 | 0x568 => random & 0x400f,
        0x480 => 0xfff_0000_0000 | random & 1 << 32,
        0x410 => 0xffff_ffff_0a9b_0010,
        0x4cb => 0,
        0x570 => 2 | random & 0x200,
        _ => random & 0xffff,
    }
}

fn features(r: &mut Random) -> Features {
    Features {
        asids: 8,
        npt: true,
        nrip_save: r.below(4) != 0,
        flush_by_asid: true,
        clean_bits: true,
        pause_filter: true,
        pause_threshold: true,
        lbr: true,
        vgif: r.below(2) != 0,
        v_vmload: r.below(2) != 0,
        vnmi: r.below(2) != 0,
        ..Features::default()
    }
}

/// What the CPU got at a VMRUN: the step, the level, the block.
type Entry = (u64, Level, Vec<u8>);

struct Play {
    r: Random,
    svm: Svm<Counting<Model>>,
    gprs: Gprs,
    memory: Memory,
    got: Arc<Mutex<Vec<Entry>>>,
    /// Nothing is called clean.
    whole: bool,
    /// By block: what L1 has changed since it ran it last.
    changed: [Clean; 2],
    step: u64,
    entries: u64,
}

impl Play {
    fn new(case: u64, whole: bool) -> Self {
        let mut r = Random::new(case.wrapping_mul(0x1234_5678_9abc_def1));
        let features = features(&mut r);
        host::std_port::test::set_cpu(0);
        // The first set-up's stay: what is looked at of them does not differ.
        let _ = percpu::set_up(features, 1);
        let mut svm = Svm::new(Counting::new(Model::default()), features).unwrap();
        svm.set_limits(GuestLimits {
            cr4_allowed: Cr4::from_bits_retain(CR4_ALLOWED),
            efer_allowed: EFER_OF_L1 & !(1 << 10),
            maxphyaddr: WIDTH as u8,
            // NPT, LBR, NRIP save, flush by ASID, PAUSE filter, its threshold, virtual VMLOAD, GIF and NMI.
            svm_features: 1
                | 1 << 1
                | 1 << 3
                | 1 << 6
                | 1 << 10
                | 1 << 12
                | 1 << 15
                | 1 << 16
                | 1 << 25,
            ..GuestLimits::default()
        });
        svm.set_tdp_root(Hpa(0x1000));
        svm.set_cr0(Cr0::from_bits_retain(0x8001_0033));
        svm.set_cr4(Cr4::PAE);
        svm.set_cr3(0x1000);
        svm.set_efer(Efer::from_bits_retain(0x1500));
        svm.set_msr(msr::LSTAR, 0x5555).unwrap();
        let cs = Segment { selector: 0x10, attr: 0xa9b, limit: u32::MAX, base: 0 };
        svm.set_segment(SegmentName::Cs, cs);
        let ss = Segment { selector: 0x18, attr: 0xc93, limit: u32::MAX, base: 0 };
        svm.set_segment(SegmentName::Ss, ss);
        let mut memory = Memory::new();
        memory.is_final = true;
        memory.fill(CLOSED..OPEN, u64::MAX);
        for at in BLOCKS {
            for (offset, value, len) in [
                // CPUID, HLT; VMRUN, VMMCALL.
                (0x0c, 1 << 18 | 1 << 24, 4),
                (0x10, 3, 4),
                (0x40, CLOSED, 8),
                (0x48, CLOSED, 8),
                (0x58, 1, 4),
                (0x60, 1 << 24, 4),
                (0x668, PATS[0], 8),
            ]
            .into_iter()
            .chain(LONG_MODE)
            {
                memory.put(at + offset, value, len);
            }
        }
        svm.begin_run();
        svm.load(0);
        let (gprs, got) = (Gprs::default(), Arc::new(Mutex::new(Vec::new())));
        let changed = [Clean::ALL; 2];
        Self { r, svm, gprs, memory, got, whole, changed, step: 0, entries: 0 }
    }

    /// The CPU is entered, and exits.
    fn enter(&mut self, code: u64, then: impl Fn(&mut x86::vmcb::Vmcb) + Send + 'static) {
        let (got, step, level) = (self.got.clone(), self.step, self.svm.level());
        self.svm.cpu().inner().then(move |vmcb, _| {
            got.lock().unwrap().push((step, level, vmcb.as_bytes().to_vec()));
            vmcb.control.exit_code = code;
            (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (0, 0);
            vmcb.control.next_rip = vmcb.save.rip + 3;
            then(vmcb);
        });
        self.svm.enter(&mut self.gprs);
    }

    fn change(&mut self) {
        let (r, v) = (&mut self.r, &mut self.svm);
        match r.below(9) {
            0 => v.set_tsc(r.below(0xfff), TSC_RATIO_ONE),
            1 => v.set_guest_debug(DebuggerWants {
                breakpoints: r.below(2) != 0,
                steps: r.below(2) != 0,
            }),
            2 => v.set_msr(msr::PAT, r.of(&PATS)).unwrap(),
            3 => {
                let [a, b, c, d, dr6, _] = v.debug_regs();
                v.set_debug_regs([a, b, c, d, dr6, 0x400 | r.below(4)]);
            }
            4 => v.set_cr2(r.below(0xffff)),
            5 => {
                let efer = v.control().efer ^ Efer::from_bits_retain(r.next() & 0x801);
                v.set_efer(efer);
            }
            6 => {
                let cr4 = v.control().cr4 ^ Cr4::from_bits_retain(r.next() & 0x680);
                v.set_cr4(cr4);
            }
            7 => v.set_tdp_root(Hpa(r.of(&[0x1000, 0x7000]))),
            _ => {
                let cr0 = v.control().cr0 ^ Cr0::from_bits_retain(r.next() & 0x4000_0008);
                v.set_cr0(cr0);
            }
        }
    }

    fn see_user_space(&mut self) {
        self.svm.complete(&mut self.gprs);
        self.svm.unload(Onward::ToGuest);
        self.svm.begin_run();
        self.svm.load(0);
    }

    fn l1(&mut self) {
        match self.r.below(16) {
            0..=6 => {
                let n = usize::from(self.r.below(6) == 0);
                let (offset, len, group) = self.r.of(&FIELDS);
                let mut value = value(&mut self.r, offset);
                match offset {
                    0x0c => value |= 1 << 18 | 1 << 24,
                    0x00 => value &= 0xffff_0000,
                    _ => {}
                }
                self.memory.put(BLOCKS[n] + offset, value, len);
                self.changed[n] |= group;
            }
            7 => self.change(),
            8 => self.see_user_space(),
            9 => self.enter(0x60, |_| {}),
            _ => {
                let n = usize::from(self.r.below(6) == 0);
                // An L1 that forgets a group is another matter: L2 runs with what it had.
                let clean = if self.whole { Clean::empty() } else { Clean::ALL - self.changed[n] };
                self.memory.put(BLOCKS[n] + 0xc0, clean.bits().into(), 4);
                self.enter(0x80, |_| {});
                self.gprs.0[RAX] = BLOCKS[n];
                let next = self.svm.rip() + 3;
                let done = self.svm.execute(&mut self.gprs, next, &self.memory);
                self.changed[n] = Clean::empty();
                if done == Executed::Entered {
                    self.entries += 1;
                } else {
                    assert_eq!(done, Executed::Left, "case with a block that is refused");
                }
            }
        }
    }

    fn l2(&mut self) {
        if self.svm.l1_tables().is_some() {
            self.svm.set_nested_root(Hpa(0x9000), false);
        }
        match self.r.below(10) {
            0 => self.change(),
            1 => self.see_user_space(),
            _ => {
                let [a, b] = [self.r.next(), self.r.next()];
                // One in so many is refused by the CPU.
                let code = if a >> 60 == 0 { u64::MAX } else { self.r.of(&EXITS) };
                self.enter(code, move |vmcb| {
                    if code == u64::MAX {
                        return;
                    }
                    let save = &mut vmcb.save;
                    (save.rip, save.rflags) = (a & 0xffff, 2 | b & 0x200);
                    if b & 3 == 0 {
                        (save.cr2, save.cr3) = (b >> 8 & 0xffff, 0x5000 | b >> 8 & 0x2000);
                        save.cr4 ^= b >> 24 & 0x80;
                        save.dr6 ^= b >> 32 & 1;
                    }
                    if b >> 40 & 3 == 0 {
                        save.g_pat = PATS[(b >> 42 & 1) as usize];
                        vmcb.control.int_ctl ^= (b >> 44) as u32 & 3;
                    }
                });
                let (v, g, m) = (&mut self.svm, &mut self.gprs, &self.memory);
                if matches!(v.claims(g, m), Ok(Claim::L1 | Claim::Exception)) {
                    assert_eq!(v.reflect(g, m), Executed::Left);
                }
            }
        }
    }

    fn play(&mut self) {
        for step in 0..STEPS {
            self.step = step;
            match self.svm.level() {
                Level::L1 => self.l1(),
                Level::L2 => self.l2(),
            }
        }
    }
}

/// Words of a block that are no matter of composition: where L0's own maps lie, ASID and command, what is clean, what the last
/// exit has left there, and guest state that is in the CPU.
fn counts(at: usize) -> bool {
    !matches!(at, 0x40 | 0x48 | 0x58 | 0x70..=0x88 | 0xc0 | 0xc8..=0xd8)
}

#[test]
fn the_cpu_gets_the_same_whatever_l1_calls_clean() {
    let asked = std::env::var("GANNET_NESTED_STEPS").ok();
    let cases = asked.map_or(1000, |n| n.parse::<u64>().expect("a number of steps") / STEPS);
    let mut entries = 0;
    for case in 1..=cases {
        let [clean, whole] = [false, true].map(|whole| {
            let mut play = Play::new(case, whole);
            play.play();
            entries += play.entries;
            let got = play.got.lock().unwrap();
            got.clone()
        });
        for ((step, level, one), (_, other_level, other)) in clean.iter().zip(&whole) {
            let differ = (0..4096).step_by(8).filter(|at| counts(*at));
            let differ: Vec<_> =
                differ.filter(|at| one[*at..at + 8] != other[*at..at + 8]).collect();
            assert!(
                differ.is_empty() && level == other_level,
                "case {case}, step {step}, {level:?}, {other_level:?}: {differ:x?}"
            );
        }
        assert_eq!(clean.len(), whole.len(), "case {case}");
    }
    println!("{cases} sequences, {entries} entries");
    assert!(entries > cases * STEPS / 8);
}
