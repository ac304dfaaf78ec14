//! The CPU gets the same VMCSs with `nested_dirty_tracking` on and off. Random sequences of what L1, L2 and whoever runs them
//! do are played twice over the model CPU: once composed of what is dirty and written where it differs from what is known,
//! once composed and written whole. At each entry of the hardware's the VMCS is the same, but for what the CPU does not
//! look at.
//!
//! GANNET_NESTED_STEPS says how many steps.

use backend::{
    Claim, Clock as _, ControlRegisters, DebuggerWants, Executed, Level, LiveRegisters as _,
    Msrs as _, Nested as _, NestedPaging as _, Permissions as _, TSC_RATIO_ONE,
};
use cpu::ModelVmcs;
use nested_vmx::{Vmcs12, merge::time::ONE};
use x86::vmcs::{EntryControls, ExitReason, PinControls, ProcControls2, event, field};
use x86::{Cr0, Cr4, Efer, Gpa, Hpa, msr};

extern crate std;
use std::{
    string::String,
    sync::{Arc, Mutex},
    vec::Vec,
};

use super::{
    random_tests::Random,
    round_trip_tests::{Rig, features, good},
};
use crate::{fields, percpu};

/// Steps of a sequence.
const STEPS: u64 = 96;
/// What the rig has made current, and other regions: more than there are vmcs02s.
const REGIONS: [u64; 6] = [0x1_1000, 0x1_2000, 0x1_3000, 0x1_4000, 0x1_5000, 0x1_6000];
/// Where an operand lies, and tables of PDPTEs.
const OPERAND: u64 = 0x100;
const TABLES: [u64; 2] = [0x5000, 0x6000];
const PATS: [u64; 3] = [0x0007_0406_0007_0406, 0x0606_0606_0606_0606, 0];
const PDPTES: [u64; 4] = [0, 0x1001, 0x2001, 0x3001];

impl Random {
    fn some_or_all(&mut self, bits: u64) -> u64 {
        if self.one_in(3) { self.some(bits) } else { bits }
    }
}

fn start() -> Vmcs12 {
    let mut v = good();
    v.set(field::GUEST_CR3, TABLES[0]);
    v.set(field::EPT_POINTER, 0x701e);
    v.set(field::VPID, 1);
    v.set(field::TSC_MULTIPLIER, ONE);
    v.set(field::HOST_EFER, 0xd00);
    v
}

/// A field that L1 writes, with a value that an entry takes by itself, though not with every other.
#[rustfmt::skip] // A table.
fn written(r: &mut Random) -> (u32, u64) {
    match r.next() % 44 {
        0..=5 => (0x4012, 0x11fb | r.of(&[0x200, 0x200, 0]) | r.some_or_all(0xc004)),
        6..=8 => (0x400c, 0x23_6dfb | 0x200 | r.some_or_all(0x1c_0004)),
        9..=12 => (0x4002, 0x0400_6172 | u64::from(!r.one_in(4)) << 31 | r.some(0x80_008c)),
        13..=16 => (0x401e, r.of(&[0, 2, 2, 0x82]) | r.some(0x210_1028)),
        17 => (r.of(&[0x4004, 0x4006, 0x4008]), r.some(0x4003)),
        18..=20 => (0x2806, r.of(&[0xd01, 0xd00, 0x501, 0x500, 0x801, 0x100, 0])),
        21 => (0x2804, r.of(&PATS)),
        22 => (0x681a, 0x400 | r.some(3)),
        23 | 24 => (0x2010, r.some(0xffff)),
        25 => (0x2032, r.of(&[ONE, ONE / 2, ONE * 3])),
        26 => (0x6800, r.of(&[0x8005_0033, 0x8005_003b, 0x0005_0033])),
        27 => (r.of(&[0x6000, 0x6002]), r.of(&[0, 8, 0x8000_0000, 0x80, u64::MAX])),
        28 => (r.of(&[0x6004, 0x6006]), r.next()),
        29 => (0x6802, r.of(&TABLES)),
        30 => (0x6804, r.of(&[0x2020, 0x20a0, 0x2000, 0x4_2020])),
        31 | 32 => (r.of(&[0x280a, 0x280c, 0x280e, 0x2810]), r.of(&PDPTES)),
        33 => (r.of(&[0x680e, 0x6824, 0x6826]), r.some(0xffff)),
        34 => (0x4816, r.of(&[0xa09b, 0xa09b, 0xc09b])),
        35 => (r.of(&[0x681e, 0x681c]), r.some(0xffff)),
        36 => (0x6820, r.of(&[2, 0x202, 0x246])),
        37 => (0x4824, r.of(&[0, 0, 8])),
        38 => (0x0000, 1 + r.some(3)),
        39 => (0x4016, r.of(&[0, 0x8000_0202, 0x8000_0b0d, 0x202])),
        40 => (0x2c02, r.of(&[0xd00, 0xd01])),
        41 => (r.of(&[0x2c00, 0x6c06]), r.of(&[PATS[0], 0])),
        42 => (0x2802, r.some(3)),
        _ => (r.of(&[0x6c14, 0x6c16, 0x6c10]), r.some(0xffff)),
    }
}

/// What the CPU got at an entry, and who runs.
type Entry = (u64, Level, ModelVmcs);

struct Play {
    r: Random,
    rig: Rig,
    got: Arc<Mutex<Vec<Entry>>>,
    step: u64,
    entries: u64,
    /// The step of the last entry.
    entered: u64,
    /// What L1 has written since it entered last.
    written: Vec<u32>,
    /// What it has written into regions past VMWRITE.
    stored: [Vec<u32>; REGIONS.len()],
    /// Where the thread is.
    cpu: usize,
}

impl Play {
    fn new(case: u64, whole: bool) -> Self {
        // Never 0, from which no number would follow.
        let mut r = Random(case.wrapping_add(1).wrapping_mul(0x1234_5678_9abc_def1) | 1);
        let mut f = features();
        f.tsc_scaling = true;
        f.shadow_vmcs = r.one_in(2);
        f.umip_by_exits = r.one_in(2);
        if r.one_in(2) {
            f.preemption_timer = Some(5);
            f.pin.base |= PinControls::PREEMPTION_TIMER;
        }
        let mut rig = Rig::on(f, &start(), 0xd00);
        // Soon enough for a short sequence.
        rig.v.nested.as_mut().unwrap().machine.close_after(3);
        rig.v.set_msr(msr::LSTAR, 0x5555).unwrap();
        for (n, table) in TABLES.into_iter().enumerate() {
            for (entry, at) in PDPTES.into_iter().cycle().skip(n).zip((table..).step_by(8)).take(4)
            {
                rig.put(at, &entry.to_le_bytes());
            }
        }
        use zerocopy::IntoBytes as _;
        for region in &REGIONS[1..] {
            rig.put(*region, start().as_bytes());
        }
        rig.v.nested.as_mut().unwrap().without_tracking = whole;
        let got = Arc::new(Mutex::new(Vec::new()));
        let (written, stored) = (Vec::new(), Default::default());
        Self { r, rig, got, step: 0, entries: 0, entered: 0, written, stored, cpu: 0 }
    }

    /// The CPU is entered, and exits.
    fn enter(&mut self, reason: ExitReason, then: impl Fn(&mut ModelVmcs) + Send + 'static) {
        let (got, step, level) = (self.got.clone(), self.step, self.rig.v.level());
        self.rig.enter(reason, move |v| {
            // What the rig has written there for the exit is none of the entry's.
            got.lock().unwrap().push((step, level, v.clone()));
            then(v);
        });
    }

    /// Does it inside the loop, or else outside.
    fn execute(&mut self) -> Executed {
        let done = self.rig.v.execute(&mut self.rig.g, 0, &self.rig.m);
        if done != Executed::Outside {
            return done;
        }
        self.rig.leave_loop();
        let done = self.rig.v.execute(&mut self.rig.g, 0, &self.rig.m);
        self.rig.come_to(self.cpu);
        done
    }

    /// The thread goes to user space, with the host's own MSRs, and comes back.
    fn see_user_space(&mut self) {
        self.rig.leave_loop();
        percpu::user_return(self.rig.v.cpu(), self.cpu);
        if self.r.one_in(2) {
            self.cpu ^= 1;
        }
        self.rig.come_to(self.cpu);
    }

    /// L1 writes into a region, whether or not the CPU may have it.
    fn store(&mut self) {
        use zerocopy::{FromBytes as _, IntoBytes as _};
        let at = self.r.next() as usize % REGIONS.len();
        let (encoding, value) = written(&mut self.r);
        self.stored[at].push(encoding);
        let mut image = Vmcs12::new();
        let bytes = REGIONS[at] as usize..REGIONS[at] as usize + image.as_bytes().len();
        image.clone_from(&Vmcs12::read_from_bytes(&self.rig.m.bytes.borrow()[bytes]).unwrap());
        image.write(encoding.into(), x86::vmcs::place::find(encoding.into()).unwrap(), value);
        self.rig.put(REGIONS[at], image.as_bytes());
    }

    fn load(&mut self, reason: ExitReason, region: u64) {
        self.rig.put(OPERAND, &region.to_le_bytes());
        self.rig.g.0[0] = 2;
        self.enter(reason, |v| {
            v.set(field::EXIT_QUALIFICATION, OPERAND);
            v.set(field::INSTRUCTION_INFO, 1 << 27 | 1 << 22 | 2 << 7 | 3 << 15);
        });
        let _ = self.execute();
    }

    fn write(&mut self, (encoding, value): (u32, u64)) {
        let serves = self.rig.v.nested.as_ref().unwrap().is_served();
        if serves && self.rig.is_written_without_exit(encoding) {
            // It is given when L1 is entered.
            self.enter(ExitReason::ExternalInterrupt, |_| {});
            let serves = self.rig.v.nested.as_ref().unwrap().is_served();
            if serves && self.rig.is_written_without_exit(encoding) {
                return self.rig.l1_vmwrite(encoding, value);
            }
        }
        (self.rig.g.0[0], self.rig.g.0[2]) = (value, encoding.into());
        self.enter(ExitReason::Vmwrite, |v| v.set(field::INSTRUCTION_INFO, 1 << 10 | 2 << 28));
        let _ = self.execute();
    }

    fn change(&mut self) {
        let (r, v) = (&mut self.r, &mut self.rig.v);
        match r.next() % 8 {
            0 => v.set_tsc(r.some(0xfff), r.of(&[TSC_RATIO_ONE, TSC_RATIO_ONE * 2])),
            1 => v.set_guest_debug(DebuggerWants { breakpoints: r.one_in(2), steps: r.one_in(2) }),
            2 => v.set_msr(msr::PAT, r.of(&PATS)).unwrap(),
            3 => {
                let [a, b, c, d, dr6, _] = v.debug_regs();
                v.set_debug_regs([a, b, c, d, dr6, 0x400 | r.some(3)]);
            }
            4 => v.set_msr(msr::LSTAR, 0x5555 + r.some(3)).unwrap(),
            5 => {
                let efer = ControlRegisters::efer(v) ^ Efer::from_bits_retain(r.some(0x801));
                v.set_efer(efer);
            }
            6 => {
                let cr4 = ControlRegisters::cr4(v) ^ Cr4::from_bits_retain(r.some(0x4_0880));
                if let Some(new) = v.cr4_of_write(cr4) {
                    v.set_cr4(new);
                }
            }
            _ => {
                let cr0 = ControlRegisters::cr0(v) ^ Cr0::from_bits_retain(r.some(0x4000_0008));
                if let Some(new) = v.cr0_of_write(cr0) {
                    v.set_cr0(new);
                }
            }
        }
    }

    fn l1(&mut self) {
        match self.r.next() % 64 {
            0..=27 => {
                let (encoding, value) = written(&mut self.r);
                self.written.push(encoding);
                self.write((encoding, value));
            }
            28..=31 => self.change(),
            32..=36 => {
                // The first ones more often: they come back before they are forgotten.
                let at = self.r.next() as usize % self.r.of(&[2, 3, REGIONS.len()]);
                if self.r.one_in(3) {
                    self.load(ExitReason::Vmclear, REGIONS[at]);
                }
                self.load(ExitReason::Vmptrld, REGIONS[at]);
                self.written.clone_from(&self.stored[at]);
            }
            37 => self.see_user_space(),
            38 => self.enter(ExitReason::ExternalInterrupt, |_| {}),
            39 => self.store(),
            _ => {
                let launched = self.rig.v.nested.as_ref().unwrap().machine.vmcs12().is_launched();
                let by = if launched { ExitReason::Vmresume } else { ExitReason::Vmlaunch };
                self.enter(by, |_| {});
                let of_l1 = self.registers();
                if matches!(self.execute(), Executed::Entered) {
                    self.entries += 1;
                    self.entered = self.step;
                    self.check(of_l1);
                    self.written.clear();
                } else {
                    // An entry did not come about: what was written for it is as it was in the beginning.
                    for encoding in core::mem::take(&mut self.written) {
                        let named = x86::vmcs::place::find(encoding.into()).unwrap();
                        self.write((encoding, start().read(named)));
                    }
                }
            }
        }
    }

    /// The registers that an entry loads or leaves: EFER but for the mode, PAT, DR7.
    fn registers(&mut self) -> [u64; 3] {
        let v = &self.rig.v;
        assert_eq!(v.get(fields::GUEST_EFER), ControlRegisters::efer(v).bits());
        let pat = v.msr(msr::PAT).unwrap();
        [ControlRegisters::efer(v).bits() & 0x801, pat, v.debug_regs()[5]]
    }

    /// L2 begins with L1's where its VMCS loads none.
    fn check(&mut self, of_l1: [u64; 3]) {
        let of_l2 = self.registers();
        let v = self.rig.v.nested.as_ref().unwrap().machine.vmcs12();
        let of_vmcs =
            [v.get(field::GUEST_EFER) & 0x801, v.get(field::GUEST_PAT), v.get(field::GUEST_DR7)];
        let loads = [EntryControls::LOAD_EFER, EntryControls::LOAD_PAT, EntryControls::LOAD_DEBUG];
        for (n, control) in loads.into_iter().enumerate() {
            let expected = if v.entry().contains(control) { of_vmcs } else { of_l1 };
            assert_eq!(of_l2[n], expected[n], "step {}, {control:?}", self.step);
        }
    }

    fn l2(&mut self) {
        if self.rig.v.l1_tables().is_some() {
            self.rig.v.set_nested_root(Hpa(0x9000), false);
        }
        match self.r.next() % 8 {
            // L0's, or what it emulates for L2.
            0 => self.change(),
            1 => self.see_user_space(),
            2 => self.enter(ExitReason::ExternalInterrupt, |_| {}),
            _ => {
                let [a, b, c] = [self.r.next(), self.r.next(), self.r.next()];
                let pdptes = [(); 4].map(|()| self.r.of(&PDPTES));
                // What L0 has changed of an L2 that was not entered yet VMCS12 has or has not, where the CPU refuses it.
                let refuses = self.r.one_in(16) && self.entered == self.step.wrapping_sub(1);
                let reason = self.r.of(&[ExitReason::Cpuid, ExitReason::Vmcall, ExitReason::Hlt]);
                let table = self.r.of(&TABLES);
                self.enter(reason, move |v| {
                    if refuses {
                        // The entry fails in the hardware.
                        return v.set(field::EXIT_REASON, 1 << 31 | 33);
                    }
                    v.set(field::GUEST_RIP, a & 0xffff);
                    if a >> 16 & 3 == 0 {
                        v.set(field::GUEST_FS_BASE, a >> 20 & 0xffff);
                        v.set(field::GUEST_SYSENTER_EIP, a >> 20 & 0xffff);
                        v.set(field::GUEST_CR3, table);
                        v.set(field::GUEST_DR7, 0x400 | a >> 40 & 3);
                    }
                    if b & 3 == 0 {
                        let own = !v.get(field::CR0_MASK);
                        v.set(field::GUEST_CR0, v.get(field::GUEST_CR0) ^ b >> 8 & 8 & own);
                        let own = !v.get(field::CR4_MASK);
                        v.set(field::GUEST_CR4, v.get(field::GUEST_CR4) ^ b >> 8 & 0x80 & own);
                    }
                    if is_pae(v) && c & 1 == 0 {
                        v.set(field::GUEST_PDPTE0, pdptes[0]);
                        v.set(field::GUEST_PDPTE1, pdptes[1]);
                        v.set(field::GUEST_PDPTE2, pdptes[2]);
                        v.set(field::GUEST_PDPTE3, pdptes[3]);
                    }
                    v.set(field::GUEST_RFLAGS, 2 | c & 0x200);
                });
                let (v, g, m) = (&mut self.rig.v, &mut self.rig.g, &self.rig.m);
                if matches!(v.claims(g, m), Ok(Claim::L1 | Claim::Exception)) {
                    let done = v.reflect(g, m);
                    assert_ne!(done, Executed::Outside);
                }
            }
        }
    }

    fn play(&mut self) {
        for step in 0..STEPS {
            self.step = step;
            match self.rig.v.level() {
                Level::L1 => self.l1(),
                Level::L2 => self.l2(),
            }
        }
    }
}

impl Rig {
    fn put(&self, at: u64, bytes: &[u8]) {
        use backend::L1Memory as _;
        self.m.write(Gpa(at), bytes).unwrap();
    }
}

fn is_pae(v: &ModelVmcs) -> bool {
    let long = v.get(field::GUEST_EFER) & 0x400 != 0;
    v.get(field::GUEST_CR0) >> 31 & 1 != 0 && v.get(field::GUEST_CR4) & 0x20 != 0 && !long
}

/// Whether the CPU looks at a field, with the rest of the VMCS as it is.
fn counts(v: &ModelVmcs, encoding: u32) -> u64 {
    let second = ProcControls2::from_bits_retain(v.get(field::PROC_CONTROLS2));
    let all_if = |on: bool| if on { u64::MAX } else { 0 };
    match encoding {
        // Of a read shadow the bits of its mask.
        0x6004 => v.get(field::CR0_MASK),
        0x6006 => v.get(field::CR4_MASK),
        // By the mode, and by controls.
        0x280a..=0x2810 => all_if(is_pae(v)),
        0x2032 => all_if(second.contains(ProcControls2::TSC_SCALING)),
        // Valid, or not looked at.
        0x4016 | 0x4018 | 0x401a => all_if(v.get(field::ENTRY_INTERRUPTION) & event::VALID != 0),
        // What an exit has left.
        _ if encoding >> 10 & 3 == 1 => 0,
        // Where L0's own pages lie.
        0x2004 | 0x2006 | 0x2012 | 0x2026 | 0x2028 | 0x2800 => 0,
        // Tags are given out.
        0x0000 => 0,
        _ => u64::MAX,
    }
}

#[test]
fn the_cpu_gets_the_same_with_tracking_and_without() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n: String| n.parse().ok());
    let cases = number("GANNET_NESTED_STEPS").map_or(400, |steps: u64| steps / STEPS);
    let mut entries = 0;
    for case in 1..=cases {
        let played = [false, true].map(|whole| {
            let mut play = Play::new(case, whole);
            play.play();
            entries += play.entries;
            let got = play.got.lock().unwrap();
            got.clone()
        });
        let [tracked, whole] = &played;
        for ((step, level, one), (_, other_level, other)) in tracked.iter().zip(whole) {
            let differ = one.differences(other);
            let differ = differ.iter().filter(|(at, a, b)| (a ^ b) & counts(other, *at) != 0);
            let differ: Vec<_> = differ.collect();
            assert!(
                differ.is_empty() && level == other_level,
                "case {case}, step {step}, {level:?}, {other_level:?}: {differ:x?}"
            );
        }
        assert_eq!(tracked.len(), whole.len(), "case {case}");
    }
    std::println!("{cases} sequences, {entries} entries");
    assert!(entries > cases * STEPS / 4);
}
