//! Random sequences of what L1 and L2 do, over the model CPU, which refuses what no CPU takes: nothing panics, and
//! what vmcs02 holds is never L1's alone.
//!
//! GANNET_NESTED_STEPS says how many steps: `GANNET_NESTED_STEPS=10000000 cargo test --release -p gannet-vmx random`.

use backend::{
    Asleep as _, Claim, Enlightenment, Executed, FlushTold, Gate, Injection, L1Tables, Level,
    Nested as _, NestedPaging, NestedState as _, Onward, Sleep, TablesRefuse, TellFlush, Waiting,
    WorldSwitch as _,
};
use nested_vmx::Vmcs12;
use x86::vmcs::enlightened::{self, at};
use x86::vmcs::place::{self, VMCS12_REVISION};
use x86::vmcs::{ApicAccess, ExitReason, ProcControls, ProcControls2, field};
use x86::{Exception, Gpa, Hpa, Vector};

extern crate std;
use std::{string::String, vec, vec::Vec};

use super::round_trip_tests::{Rig, features, good};
use crate::fields;

/// A page of each kind, below what the rig has of memory.
const PAGES: [u64; 12] = [
    0x1_0000, 0x1_1000, 0x1_2000, 0x1_3000, 0x1_4000, 0x1_5000, 0x1_6000, 0x1_7000, 0x1_8000,
    0x1_9000, 0x1_f000, 0x50_0000,
];
const OWN: u64 = 0x9000;
/// The VP assist page of an L1 with enlightened VMCSs.
const ASSIST: u64 = 0x1_e000;

/// Secondary controls that L1 is offered.
const OFFERED: [u64; 11] = [
    0,
    1 << 1,
    1 << 4,
    1 << 5,
    1 << 13 | 1 << 1,
    1 << 14,
    1 << 20,
    1 << 8,
    1,
    1 << 9,
    1 << 9 | 1 << 4,
];

pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 20) as usize % n
    }

    pub(super) fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Some of these bits.
    pub(super) fn some(&mut self, bits: u64) -> u64 {
        self.next() & bits
    }
}

/// What L1 begins with: its pages are there, and nothing uses them yet.
fn start() -> Vmcs12 {
    let mut v = good();
    v.set(field::VIRTUAL_APIC_ADDR, PAGES[3]);
    v.set(field::APIC_ACCESS_ADDR, PAGES[2]);
    let leaves = v.exit() | x86::vmcs::ExitControls::ACKNOWLEDGE_INTERRUPT;
    v.set(field::EXIT_CONTROLS, leaves.bits());
    v.set(field::POSTED_INTR_DESC, PAGES[6]);
    v.set(field::POSTED_INTR_VECTOR, 0x40);
    v.set(field::MSR_BITMAP, PAGES[4]);
    v.set(field::VMREAD_BITMAP, PAGES[4]);
    v.set(field::VMWRITE_BITMAP, PAGES[4]);
    v.set(field::EPTP_LIST, PAGES[5]);
    v.set(field::EPT_POINTER, PAGES[5] | 0x1e);
    v.set(field::VPID, 1);
    let first = ProcControls::TPR_SHADOW | ProcControls::MSR_BITMAPS;
    v.set(field::PROC_CONTROLS, v.get(field::PROC_CONTROLS) | first.bits());
    v
}

/// Writes an enlightened VMCS as L1 begins with.
fn fill(rig: &Rig, page: u64) {
    let (v, mut memory) = (start(), rig.m.bytes.borrow_mut());
    let Some(image) = memory.get_mut(page as usize..page as usize + enlightened::BYTES) else {
        return;
    };
    image.fill(0);
    image[..4].copy_from_slice(&enlightened::VERSION.to_le_bytes());
    for line in &enlightened::READ_LINES {
        let encoding = u64::from(line.field.encoding);
        let (offset, bytes) = enlightened::find(encoding).unwrap();
        let value = v.read(place::find(encoding).unwrap()).to_le_bytes();
        image[usize::from(offset)..][..bytes].copy_from_slice(&value[..bytes]);
    }
}

/// Fields that L1 writes, with values that an entry takes, and some that it does not.
fn written(r: &mut Random) -> (u32, u64) {
    let page = r.of(&PAGES);
    // Posted interrupts more often than the rest.
    let one = r.below(32);
    let bit = r.of(&[1 << one, 1 << 7]);
    let more = r.of(&[1 << 27, 1 << 22, 1 << 2, 1 << 24, 0]);
    let v = start();
    // The more bits, the seldomer.
    let second = r.of(&OFFERED) | r.of(&OFFERED) | r.of(&[0, 0, 0, 0, 0, 0, 0, 0x8001]);
    match r.below(27) {
        24 => (field::GUEST_INTERRUPT_STATUS.encoding(), r.next() & 0xffff),
        25 => (field::EOI_EXIT_1.encoding(), r.next()),
        26 => (field::POSTED_INTR_DESC.encoding(), page | r.next() & 0x40),
        0 | 17..=20 => (field::PROC_CONTROLS2.encoding(), second),
        1 => (field::PROC_CONTROLS.encoding(), u64::from(v.get(field::PROC_CONTROLS)) | more),
        2 => (field::PIN_CONTROLS.encoding(), u64::from(v.get(field::PIN_CONTROLS)) | bit),
        3 => (field::VMCS_LINK.encoding(), r.of(&[u64::MAX, page])),
        4 => (field::VIRTUAL_APIC_ADDR.encoding(), page),
        5 => (field::MSR_BITMAP.encoding(), page),
        6 => (r.of(&[field::VMREAD_BITMAP, field::VMWRITE_BITMAP]).encoding(), page),
        7 => (field::EPT_POINTER.encoding(), page | 0x1e),
        8 => (field::EPTP_LIST.encoding(), page),
        9 => (field::VM_FUNCTION_CONTROLS.encoding(), r.next() & 1),
        10 => (field::GUEST_ACTIVITY.encoding(), r.next() & 3),
        11 => (field::ENTRY_INTERRUPTION.encoding(), r.of(&[0, 0x8000_0202, 0x8000_0301])),
        12 => (field::VPID.encoding(), r.next() & 3),
        13 => (field::GUEST_CR4.encoding(), 0x2020 | r.next() & 0x680),
        14 => (field::TPR_THRESHOLD.encoding(), r.next() & r.next() & r.next() & 15),
        16 => (field::APIC_ACCESS_ADDR.encoding(), page),
        15 => (field::GUEST_INTERRUPTIBILITY.encoding(), r.next() & 11),
        _ => (field::GUEST_RFLAGS.encoding(), r.of(&[2, 0x202])),
    }
}

/// Exits of L2.
const EXITS: [ExitReason; 20] = [
    ExitReason::Cpuid,
    ExitReason::Hlt,
    ExitReason::Vmcall,
    ExitReason::Rdmsr,
    ExitReason::Wrmsr,
    ExitReason::CrAccess,
    ExitReason::Io,
    ExitReason::Vmread,
    ExitReason::Vmwrite,
    ExitReason::Vmfunc,
    ExitReason::Xsaves,
    ExitReason::ExternalInterrupt,
    ExitReason::InterruptWindow,
    ExitReason::NmiWindow,
    ExitReason::MonitorTrap,
    ExitReason::GdtrIdtr,
    ExitReason::EptViolation,
    ExitReason::TripleFault,
    ExitReason::Invpcid,
    ExitReason::Pause,
];

struct Run {
    rig: Rig,
    random: Random,
    asleep: Option<Sleep>,
    cpu: usize,
    entries: usize,
    sleeps: usize,
    accesses: usize,
    taken: usize,
    posted: usize,
    /// L1 may use enlightened VMCSs.
    enlightened: bool,
    /// Entries by one, and flushes that L2 was entitled to.
    pages: (usize, usize),
    /// Entries with each secondary control.
    with: [usize; 32],
}

impl Run {
    fn new(seed: u64) -> Self {
        let f = crate::features::Features { xsaves: true, umip_by_exits: true, ..features() };
        let mut rig = Rig::on(f, &start(), 0xd01);
        let n = rig.v.nested.as_mut().unwrap();
        n.machine.capabilities.cr4_fixed1 |= 1 << 11;
        // Soon enough for a short sequence.
        n.machine.close_after(3);
        let (random, with) = (Random(seed), [0; 32]);
        let enlightened = seed & 3 == 1;
        if enlightened {
            let assist = Some(Gpa(ASSIST));
            let by = Enlightenment { enabled: true, shown: true, direct_flush: true, assist };
            rig.v.enlighten(by);
            let page = PAGES[9];
            fill(&rig, page);
            let mut bytes = rig.m.bytes.borrow_mut();
            bytes[ASSIST as usize + 32] = 1;
            bytes[ASSIST as usize + 40] = 1;
            bytes[ASSIST as usize + 48..][..8].copy_from_slice(&page.to_le_bytes());
        }
        Self {
            rig,
            enlightened,
            pages: (0, 0),
            random,
            asleep: None,
            cpu: 0,
            entries: 0,
            sleeps: 0,
            accesses: 0,
            taken: 0,
            posted: 0,
            with,
        }
    }

    /// What is done outside the loop if it cannot be done inside.
    fn whole(&mut self, act: impl Fn(&mut Rig) -> Executed) -> Executed {
        let done = act(&mut self.rig);
        if done != Executed::Outside {
            return done;
        }
        self.rig.v.complete(&mut self.rig.g);
        self.rig.v.unload(Onward::ToGuest);
        self.rig.m.whole.set(true);
        let done = act(&mut self.rig);
        self.rig.m.whole.set(false);
        self.rig.v.load(self.cpu);
        assert_ne!(done, Executed::Outside);
        done
    }

    fn level(&self) -> Level {
        self.rig.v.level()
    }

    /// What runs next has a root, as whoever runs the loop sees to.
    fn settle(&mut self, done: Executed) {
        match done {
            Executed::Asleep(sleep) => {
                self.asleep = Some(sleep);
                self.sleeps += 1;
            }
            Executed::Entered | Executed::EnteredOwing | Executed::EnteredOffering => {
                self.entries += 1;
                let n = self.rig.v.nested.as_ref().unwrap();
                self.pages.0 += usize::from(n.machine.is_enlightened());
                let second = n.machine.vmcs12().secondary().bits();
                for (at, count) in self.with.iter_mut().enumerate() {
                    *count += (second >> at & 1) as usize;
                }
            }
            _ => {}
        }
        if self.level() == Level::L1 {
            self.asleep = None;
        }
        if self.rig.v.l1_tables().is_some() {
            self.rig.v.set_nested_root(Hpa(OWN), false);
        }
        self.check();
    }

    /// No page of L1's is the hardware's, and nothing that L0 does not offer is on.
    fn check(&self) {
        if self.level() == Level::L1 {
            return;
        }
        let v = &self.rig.v;
        let second = ProcControls2::from_bits_retain(v.get(fields::PROC_CONTROLS2));
        let never = ProcControls2::SHADOW_VMCS
            | ProcControls2::VIRTUALIZE_X2APIC
            | ProcControls2::VIRTUALIZE_APIC_ACCESSES
            | ProcControls2::APIC_REGISTERS
            | ProcControls2::VIRTUAL_INTERRUPTS;
        assert!(!second.intersects(never), "{second:?}");
        let first = ProcControls::from_bits_retain(v.get(fields::PROC_CONTROLS));
        assert!(!first.contains(ProcControls::TPR_SHADOW));
        assert!(first.contains(ProcControls::UNCONDITIONAL_IO | ProcControls::MSR_BITMAPS));
        let root = v.get(fields::EPT_POINTER) & !0xfff;
        assert!([OWN, 0x7000].contains(&root), "{root:x}");
        assert_eq!(v.get(fields::GUEST_ACTIVITY), 0);
    }

    /// L1, on whichever of its CPUs, writes to its enlightened VMCS or its VP assist page.
    fn write_page(&mut self) {
        let r = &mut self.random;
        let page = if r.below(4) == 0 { r.of(&PAGES) } else { PAGES[9] };
        let (encoding, value) = written(r);
        let (offset, bytes) = match r.below(8) {
            0 => return fill(&self.rig, page),
            1 => (at::CLEAN as u16, 4),
            2 => (at::CONTROL as u16, 4),
            3 => (at::PARTITION_ASSIST as u16, 8),
            _ => match enlightened::find(encoding.into()) {
                Some(found) => found,
                None => return,
            },
        };
        let value = match usize::from(offset) {
            at::CLEAN => r.next() | r.next(),
            at::CONTROL => r.next() & 3,
            at::PARTITION_ASSIST => page,
            _ => value,
        };
        let names = r.below(8) == 0;
        let (enlightens, pointer) = (r.next() & 7 != 0, page + r.of(&[0, 0, 0, 8]));
        let mut memory = self.rig.m.bytes.borrow_mut();
        if names {
            memory[ASSIST as usize + 40] = enlightens.into();
            memory[ASSIST as usize + 48..][..8].copy_from_slice(&pointer.to_le_bytes());
        }
        let at = page as usize + usize::from(offset);
        if let Some(field) = memory.get_mut(at..at + bytes) {
            field.copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
    }

    /// L2's hypercall is carried out.
    fn flush(&mut self) -> Executed {
        self.pages.1 += 1;
        self.rig.v.complete(&mut self.rig.g);
        self.rig.v.unload(Onward::ToGuest);
        self.rig.m.whole.set(true);
        let told = self.rig.v.tell_flush(&mut self.rig.g, TellFlush::Tell, &self.rig.m);
        self.rig.m.whole.set(false);
        self.rig.v.load(self.cpu);
        if let FlushTold::Yes(done) = told { done } else { Executed::Retired }
    }

    fn l1(&mut self) -> Executed {
        if self.enlightened && self.random.below(3) == 0 {
            self.write_page();
        }
        let r = &mut self.random;
        let pointer = r.of(&PAGES);
        let (encoding, value) = written(r);
        let which = r.below(16);
        match which {
            0..=5 => {
                let reason = if which < 3 { ExitReason::Vmlaunch } else { ExitReason::Vmresume };
                self.rig.enter(reason, |_| {});
                return self.whole(|rig| rig.v.execute(&mut rig.g, 0, &rig.m));
            }
            6..=12 => {
                (self.rig.g.0[0], self.rig.g.0[2]) = (value, encoding.into());
                let reason = if which < 12 { ExitReason::Vmwrite } else { ExitReason::Vmread };
                self.rig.enter(reason, |v| v.set(field::INSTRUCTION_INFO, 1 << 10 | 2 << 28));
                return self.whole(|rig| rig.v.execute(&mut rig.g, 0, &rig.m));
            }
            _ => {}
        }
        // A pointer in memory: VMCLEAR, VMPTRLD, INVEPT.
        const AT: u64 = 0x100;
        let header = r.of(&[VMCS12_REVISION, VMCS12_REVISION | 1 << 31, 0]);
        let fresh = r.next() & 3 == 0;
        let mut bytes = self.rig.m.bytes.borrow_mut();
        bytes[AT as usize..][..8].copy_from_slice(&pointer.to_le_bytes());
        if fresh && let Some(region) = bytes.get_mut(pointer as usize..pointer as usize + 1024) {
            use zerocopy::IntoBytes as _;
            region.copy_from_slice(start().as_bytes());
            region[..4].copy_from_slice(&header.to_le_bytes());
        }
        drop(bytes);
        self.rig.g.0[0] = 2;
        let reason = [ExitReason::Vmclear, ExitReason::Vmptrld, ExitReason::Invept][which - 13];
        self.rig.enter(reason, |v| {
            v.set(field::EXIT_QUALIFICATION, AT);
            v.set(field::INSTRUCTION_INFO, 1 << 27 | 1 << 22 | 2 << 7 | 3 << 15);
        });
        self.whole(|rig| rig.v.execute(&mut rig.g, 0, &rig.m))
    }

    /// Something comes from outside, whether L2 runs or sleeps.
    fn event(&mut self) -> Executed {
        if self.asleep == Some(Sleep::WaitForSipi) {
            self.rig.v.set_activity(self.asleep);
            let page = Vector(self.random.next() as u8);
            return self.whole(|rig| rig.v.exit_for_sipi(&mut rig.g, page, &rig.m));
        }
        let waiting = self.random.of(&[
            Waiting::Nmi,
            Waiting::Interrupt(None),
            Waiting::Interrupt(Some(Vector(0x40))),
            Waiting::Init,
            Waiting::Exception(Exception::gp(0)),
            Waiting::TripleFault,
        ]);
        if self.rig.v.gate(&waiting) != Gate::ExitToL1 {
            return Executed::Retired;
        }
        if let Waiting::Interrupt(Some(vector)) = waiting {
            let posts = self.in_whole(|rig| rig.v.posts(vector, &rig.m));
            if posts {
                self.posted += 1;
                return Executed::Retired;
            }
        }
        self.rig.v.set_activity(self.asleep);
        let undelivered = self.rig.v.cancel_injection();
        self.whole(|rig| rig.v.exit_to_l1(&mut rig.g, &waiting, undelivered, &rig.m))
    }

    fn l2(&mut self) -> Executed {
        if self.asleep.is_some() || self.random.next() & 7 == 0 {
            let done = self.event();
            if self.level() == Level::L2 && self.asleep == Some(Sleep::Halt) {
                self.rig.v.set_activity(None);
                self.asleep = None;
            }
            return done;
        }
        let r = &mut self.random;
        let (reason, qualification, information) = (r.of(&EXITS), r.next(), r.next() as u32);
        let (_, [a, b, c]) = ((), [r.next() & 0x1ff, r.next() & 0x1fff, r.next() & 0xff]);
        let index = r.of(&[b, 2, 0x808, 0x80b, 0x83f, 0x800 | c, 0x681c, 0, 1]);
        (self.rig.g.0[0], self.rig.g.0[1], self.rig.g.0[2]) = (a, index, r.of(&[0, 0, 0x681c]));
        let flags = r.of(&[2u64, 0x202, 0x102]);
        self.rig.enter(reason, move |v| {
            v.set(field::EXIT_QUALIFICATION, qualification & 0xfff_ff7f);
            v.set(field::INSTRUCTION_INFO, information & 0x7000_0078 | 1 << 10);
            v.set(field::GUEST_RFLAGS, flags);
            if flags & 0x100 != 0 {
                // Instructions have set it: behind one there is no shadow.
                let blocked = v.get(field::GUEST_INTERRUPTIBILITY);
                v.set(field::GUEST_INTERRUPTIBILITY, blocked & !3);
            }
        });
        match self.rig.v.claims(&self.rig.g, &self.rig.m) {
            Ok(Claim::L1 | Claim::Exception) => {
                match self.whole(|rig| rig.v.reflect(&mut rig.g, &rig.m)) {
                    Executed::Flushes => self.flush(),
                    done => done,
                }
            }
            Ok(Claim::Instruction) => self.whole(|rig| rig.v.execute_for_l2(&mut rig.g, &rig.m)),
            Ok(Claim::L0) if matches!(reason, ExitReason::Vmread | ExitReason::Vmwrite) => {
                self.whole(|rig| rig.v.execute(&mut rig.g, 0, &rig.m))
            }
            Ok(Claim::L0) if reason == ExitReason::EptViolation => {
                if self.rig.v.nested_page_fault().is_none() {
                    return Executed::Retired;
                }
                if qualification & 1 << 20 != 0 {
                    return self.access_apic(qualification);
                }
                let why =
                    TablesRefuse::Violation { qualification: qualification & 0x1bf, linear: None };
                self.whole(|rig| rig.v.refuse(&mut rig.g, Gpa(0x5000), why, None, &rig.m))
            }
            Ok(Claim::L0 | Claim::ByValue) => Executed::Retired,
            Err(_) => Executed::Retired,
        }
    }

    /// Does something for L2 with what is mapped of L1's memory, and with all of it where that does not do.
    fn in_whole<T>(&mut self, act: impl Fn(&mut Rig) -> Result<T, backend::Outside>) -> T {
        match act(&mut self.rig) {
            Ok(done) => done,
            Err(backend::Outside) => {
                self.rig.m.whole.set(true);
                let done = act(&mut self.rig).unwrap();
                self.rig.m.whole.set(false);
                done
            }
        }
    }

    /// L2 takes the virtual interrupt that waits for it.
    fn take_virtual(&mut self) {
        let open = !self.rig.v.injecting() && self.asleep.is_none();
        if self.level() == Level::L2 && self.rig.v.offers_interrupt() && open {
            let taken = self.in_whole(|rig| rig.v.take_interrupt(&rig.m));
            self.taken += usize::from(taken.is_some());
            assert!(!self.rig.v.offers_interrupt());
        }
    }

    /// L2 accesses the APIC-access page, if it has one.
    fn access_apic(&mut self, random: u64) -> Executed {
        let write = random & 1 << 21 != 0;
        let offset = (random >> 24 & 0xff0) as u16;
        let access = ApicAccess { offset, write, fetch: false, linear: random & 1 << 22 != 0 };
        let has_page = match self.rig.v.l1_tables() {
            Some(L1Tables::Flat { .. }) => true,
            Some(L1Tables::Ept { apic, .. }) => apic.is_some(),
            _ => false,
        };
        if !has_page {
            return Executed::Retired;
        }
        self.accesses += 1;
        if !self.rig.v.serves_apic_access(access) {
            let why = TablesRefuse::ApicAccess { access, length: 0 };
            return self.whole(|rig| rig.v.refuse(&mut rig.g, Gpa(0x5000), why, None, &rig.m));
        }
        let store = write.then_some(random as u32);
        self.whole(|rig| match rig.v.do_apic_access(&mut rig.g, offset, store, 0x403, &rig.m) {
            Ok(_) => Executed::Retired,
            Err(done) => done,
        })
    }

    /// The state travels, outside the loop.
    fn travel(&mut self) {
        let v = &mut self.rig.v;
        v.complete(&mut self.rig.g);
        v.unload(Onward::ToGuest);
        v.set_activity(self.asleep);
        let mut bytes: Vec<u8> = vec![0; v.state_size()];
        v.save_state(&self.rig.g, &mut bytes, &self.rig.m).unwrap();
        self.rig.m.whole.set(true);
        if let Ok(checked) = v.check_state(&bytes, false, &self.rig.m) {
            // Neither another thread nor the allocator has a say from here on.
            let whole = self.rig.g.0[0] & 1 == 0;
            self.rig.m.whole.set(whole);
            if v.level() == Level::L2 {
                v.abandon(&mut self.rig.g);
            }
            v.restore_state(&mut self.rig.g, checked, &self.rig.m);
            v.settle_state(&self.rig.m);
        }
        self.rig.m.whole.set(false);
        self.rig.v.load(self.cpu);
    }

    /// The thread goes on on another CPU.
    fn move_on(&mut self) {
        self.rig.leave_loop();
        self.cpu ^= 1;
        self.rig.come_to(self.cpu);
    }

    fn step(&mut self) {
        if self.random.next() & 0xff == 0 {
            self.travel();
            return self.settle(Executed::Retired);
        }
        self.take_virtual();
        let done = match self.level() {
            Level::L1 => self.l1(),
            Level::L2 => self.l2(),
        };
        self.settle(done);
    }
}

#[test]
fn random_sequences_break_nothing() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n: String| n.parse().ok());
    let steps = number("GANNET_NESTED_STEPS").unwrap_or(100_000u64);
    let mut run = Run::new(0x1234_5678_9abc_def1);
    for at in 0..steps {
        // Where L1 has written itself into a corner, it begins anew.
        if at % 100 == 99 {
            let seed = run.random.next();
            let (entries, sleeps, accesses) = (run.entries, run.sleeps, run.accesses);
            let (taken, posted, pages, with) = (run.taken, run.posted, run.pages, run.with);
            drop(run);
            run = Run { entries, sleeps, accesses, taken, posted, pages, with, ..Run::new(seed) };
        }
        if run.enlightened && run.random.below(16) == 0 {
            // While L2 runs, too.
            run.write_page();
        }
        if at % 61 == 60 {
            run.move_on();
        }
        run.step();
    }
    std::println!("{} entries and {} flushes by a page", run.pages.0, run.pages.1);
    assert!(run.pages.0 > 0 && run.pages.1 > 0);
    let (entries, with) = (run.entries, run.with);
    std::println!("{entries} entries, {} asleep, with {with:?}", run.sleeps);
    assert!(run.entries as u64 > steps / 200, "{} entries", run.entries);
    assert!(run.sleeps > 0);
    let (accesses, taken, posted) = (run.accesses, run.taken, run.posted);
    assert!(accesses > 0 && taken > 0 && posted > 0, "{accesses} {taken} {posted}");
    // The APIC-access page, EPT, virtual x2APIC mode, virtual interrupts, VPID, VM functions, VMCS shadowing, XSAVES.
    for bit in [0, 1, 4, 9, 5, 13, 14, 20] {
        assert!(run.with[bit] > 0, "no entry with control {bit}");
    }
}
