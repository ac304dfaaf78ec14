//! What is composed of the dirty groups is what a whole composition gives, and what is checked of them what a whole check
//! finds. Before each entry the machine has a twin for which all is dirty, and nothing is behind. Both have to come to
//! the same end, and vmcs02, of which no more was written than was dirty, has to hold what the twin's has.
//!
//! No reference is needed for that, so that this world may vary what the other one cannot: every word by which something
//! of another group is composed, L1's registers and L0's words beside the VMCS12, and the ways on which L1 writes.

use std::collections::BTreeMap;

use gannet_nested_vmx::leave::{self, Exit as _, Known, Report};
use gannet_nested_vmx::machine::{
    Closed, Entered, EntryBy, Instruction, PendingEntry, Place, enlightened::Loaded,
};
use gannet_nested_vmx::merge::{self, Pages, time::ONE, time::Tsc};
use gannet_nested_vmx::{EntryFailure, GuestMemory, Machine, Vmcs12};
use x86::vmcs::enlightened::{self as page, at};
use x86::vmcs::place::{self, SHADOWED, WRITTEN};
use x86::vmcs::{EntryControls, ExitControls, Group, Groups, PinControls, ProcControls};
use x86::vmcs::{ProcControls2, field};
use x86::{Direction, Gpa, Hpa};
use zerocopy::IntoBytes;

use super::world::{self, CPU, LIMITS, Memory, OPERAND, Vmcs02};

/// Steps of a sequence: L1 then begins anew, lest it stay where it has written itself into a corner.
const STEPS: u64 = 96;
/// L1's regions, its enlightened VMCSs, and the page that names one.
const REGIONS: [u64; 3] = [0x1000, 0x2000, 0x3000];
const PAGES: [u64; 2] = [0x9000, 0xa000];
const ASSIST: u64 = 0x8000;
/// Tables of PDPTEs.
const TABLES: [u64; 2] = [0xc000, 0xd000];
const PATS: [u64; 3] = [0x0007_0406_0007_0406, 0x0606_0606_0606_0606, 0];
const PDPTES: [u64; 4] = [0, 0x1001, 0x2001, 0x5001];

/// Words of a guest in 64-bit mode.
const MODE: [(u32, u64); 4] =
    [(0x4012, 0xd3ff), (0x6800, 0x8005_0033), (0x6804, 0x2020), (0x2806, 0xd01)];

/// Read shadows and their masks: of a shadow only the bits of its mask are looked at.
const SHADOWS: [(usize, usize); 2] = [(0x6004, 0x6000), (0x6006, 0x6002)];
/// What vmcs02 may hold otherwise than a whole composition gives, and why. There is nothing else.
const EXCLUDED: [(u32, &str); 1] = [(
    field::GUEST_ACTIVITY.encoding(),
    "an L2 that halts without an exit goes on halting where L1 has changed nothing of its flow",
)];

/// Groups of which some field is composed.
const COMPOSED: [Group; 9] = [
    Group::Flow,
    Group::Segments,
    Group::ControlRegisters,
    Group::Sysenter,
    Group::Msrs,
    Group::Controls,
    Group::Translation,
    Group::Time,
    Group::MsrLists,
];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[(self.next() % list.len() as u64) as usize]
    }
    /// Some of these bits.
    fn some(&mut self, bits: u64) -> u64 {
        self.next() & bits
    }
}

/// Some of these bits, and all of them more often than not: L2's MSRs are clean behind an exit that saves all of those that
/// the entry loads.
fn some_or_all(r: &mut Random, bits: u64) -> u64 {
    if r.one_in(3) { r.some(bits) } else { bits }
}

/// A field that L1 writes, with a value that an entry takes by itself, though not with every other.
#[rustfmt::skip] // A table.
fn written(r: &mut Random) -> (u32, u64) {
    let tables = TABLES[0] | r.some(TABLES[1] ^ TABLES[0]);
    match r.next() % 56 {
        // The words, by which more is composed than what is in their group.
        0..=5 => (0x4012, 0x11fb | r.of(&[0x200, 0x200, 0]) | some_or_all(r, 0xc004)),
        6..=8 => (0x400c, 0x23_6ffb | some_or_all(r, 0x1c_0004) | u64::from(r.one_in(16)) << 22),
        9..=13 => (0x4002, 0x0400_6172 | u64::from(!r.one_in(4)) << 31 | r.some(0x1880_008c)),
        14..=18 => {
            let ept = r.of(&[0, 2, 2, 0x82]);
            (0x401e, 0x20 | ept | r.some(0x210_1008))
        }
        19 => (0x4000, 0x16 | r.some(0x29) | u64::from(r.one_in(3)) << 6),
        20 => (r.of(&[0x4004, 0x4006, 0x4008]), r.some(0x4003)),
        // Registers that are L2's or L1's by those words.
        21..=23 => (0x2806, r.of(&[0xd01, 0xd00, 0x501, 0x500, 0x801, 0x100, 0])),
        24 => (0x2804, r.of(&PATS)),
        25 => (0x2802, r.some(3)),
        26 => (0x681a, 0x400 | r.some(3)),
        27 | 28 => (0x2010, r.some(0xffff)),
        29 | 30 => (0x2032, r.of(&[ONE, ONE / 2, ONE * 3])),
        31 | 32 => (0x6800, r.of(&[0x8005_0033, 0x8005_003b, 0x0005_0033])),
        33 => (r.of(&[0x6000, 0x6002]), r.of(&[0, 8, 0x8000_0000, 0x80, u64::MAX])),
        34 => (r.of(&[0x6004, 0x6006]), r.next()),
        35 => (0x6802, tables),
        36 => (0x6804, r.of(&[0x2020, 0x20a0, 0x2000])),
        37..=39 => (r.of(&[0x280a, 0x280c, 0x280e, 0x2810]), r.of(&PDPTES)),
        // All others.
        40 => (r.of(&[0x680e, 0x6824, 0x6826]), r.some(0xffff)),
        41 => (0x4816, r.of(&[0xa09b, 0xa09b, 0xc09b])),
        42 => (0x482a, r.some(0xff)),
        43 => (r.of(&[0x681e, 0x681c]), r.some(0xffff)),
        44 => (0x6820, r.of(&[2, 0x202, 0x246])),
        45 => (0x4824, r.of(&[0, 0, 8])),
        46 => (0x4826, u64::from(r.one_in(3))),
        47 => (0x0000, 1 + r.some(3)),
        48 => (0x201a, r.of(&[0x501e, 0x601e])),
        49 => (0x202c, r.some(0xff)),
        50 => (0x4016, r.of(&[0, 0x8000_0202, 0x8000_0b0d, 0x202])),
        51 => (0x4018, r.some(7)),
        52 => (0x482e, r.some(0xff)),
        53 => (0x400e, r.some(1)),
        54 => (0x2800, if r.one_in(6) { REGIONS[2] } else { u64::MAX }),
        _ => (r.of(&[0x6c14, 0x6c16]), r.some(0xffff)),
    }
}

/// A VMCS that can be entered.
fn start() -> Vmcs12 {
    let mut v = world::good();
    v.set(field::GUEST_CR3, TABLES[0]);
    v.set(field::TSC_MULTIPLIER, ONE);
    v
}

/// L1's registers that L2 begins with where the entry loads none.
#[derive(Clone, Copy)]
struct L1Registers {
    efer: u64,
    dr7: u64,
    debugctl: u64,
    pat: u64,
}

impl L1Registers {
    fn into(self, l0: merge::L0) -> merge::L0 {
        let Self { efer, dr7, debugctl, pat } = self;
        merge::L0 { efer, dr7, debugctl, pat, ..l0 }
    }
}

/// How L1 writes its VMCS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Each VMWRITE exits.
    Exits,
    /// The hardware serves some.
    Served,
    /// There is a page.
    Page,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub cases: u64,
    pub entries: u64,
    /// Groups that were not composed, of all entries.
    pub spared: u64,
    /// Entries that failed, and instructions.
    pub failed: u64,
    pub refused: u64,
}

struct Run {
    r: Random,
    machine: Machine,
    memory: Memory,
    hardware: Vmcs02,
    way: Way,
    /// The shadow VMCS, and whether it serves.
    served: BTreeMap<u32, u64>,
    serves: bool,
    closed: Closed,
    l0: merge::L0,
    /// A word of it is another than at the entry before.
    l0_changed: bool,
    l1: L1Registers,
    tracking: bool,
    /// What L1 has written since it entered last, as it was before.
    undone: Vec<(u32, u64)>,
    counts: Counts,
}

/// Groups that follow from L0's words. What L0 has no page for has nothing of L0's.
fn of_l0() -> Groups {
    [Group::ControlRegisters, Group::Msrs, Group::Controls, Group::Translation, Group::Time]
        .iter()
        .fold(Groups::of(Group::Bitmaps), |all, group| all.union(Groups::of(*group)))
}

impl Run {
    fn new(case: u64) -> Self {
        let mut r = Random(case.wrapping_mul(0x1234_5678_9abc_def1));
        let way = r.of(&[Way::Exits, Way::Served, Way::Page]);
        let memory = Memory::new();
        let mut machine = Machine::new(world::capabilities());
        for (n, table) in TABLES.into_iter().enumerate() {
            for (entry, at) in PDPTES.into_iter().cycle().skip(n).zip((table..).step_by(8)).take(4)
            {
                memory.write(Gpa(at), &entry.to_le_bytes()).unwrap();
            }
        }
        for region in REGIONS {
            memory.write(Gpa(region), start().as_bytes()).unwrap();
        }
        machine.serve(|_| true);
        machine.close_after(r.of(&[2, 4, 128]));
        if way == Way::Page {
            machine.enlighten(true, true, true, Some(Gpa(ASSIST)));
        }
        let l1 = L1Registers { efer: 0xd00, dr7: 0x401, debugctl: 0, pat: PATS[1] };
        let pages = Pages { exit_tsc: Some(Hpa(0x7000)), ..world::L0.pages };
        let l0 = merge::L0 { pages, preemption_timer: Some(u32::MAX), ..world::L0 };
        let tracking = !r.one_in(16);
        let (hardware, counts) = (Vmcs02::new(), Counts::default());
        let mut run = Self {
            r,
            machine,
            memory,
            hardware,
            way,
            served: SHADOWED.iter().map(|line| (u32::from(line.encoding), u64::MAX)).collect(),
            serves: false,
            closed: Closed::default(),
            l0,
            l0_changed: true,
            l1,
            tracking,
            undone: Vec::new(),
            counts,
        };
        run.memory.write(Gpa(OPERAND), &0x4000u64.to_le_bytes()).unwrap();
        run.execute(Instruction::Vmxon { pointer: Ok(OPERAND) });
        for page in PAGES {
            run.fill_page(page);
        }
        run.name_page(PAGES[0]);
        run.load(Instruction::Vmptrld { pointer: Ok(OPERAND) }, REGIONS[0]);
        run
    }

    fn known(&self) -> Known {
        Known {
            activity: 0,
            cr0_mask: self.hardware.get(field::CR0_MASK),
            cr4_mask: self.hardware.get(field::CR4_MASK),
            preemption_timer: 3,
            pat: self.hardware.get(field::GUEST_PAT),
            efer: self.hardware.get(field::GUEST_EFER),
            debugctl: self.hardware.get(field::GUEST_DEBUGCTL),
        }
    }

    fn fetch(&mut self, groups: Groups) {
        let known = self.known();
        self.machine.fetch(&self.hardware, &known, groups);
    }

    fn execute(&mut self, instruction: Instruction) {
        let mut needs = self.machine.needs(&instruction);
        if let Some(one) = self.machine.asks_one(&instruction, needs) {
            self.machine.put_alone(one, self.hardware.of(one));
            needs = self.machine.needs(&instruction);
        }
        self.fetch(needs);
        let done = self.machine.execute(instruction, &CPU, &LIMITS, &mut self.memory);
        self.counts.refused += u64::from(done.is_err());
    }

    /// VMPTRLD or VMCLEAR.
    fn load(&mut self, instruction: Instruction, region: u64) {
        self.stop_serving();
        self.memory.write(Gpa(OPERAND), &region.to_le_bytes()).unwrap();
        self.execute(instruction);
    }

    fn stop_serving(&mut self) {
        if core::mem::take(&mut self.serves) {
            self.machine.take_mirror(|encoding| self.served[&encoding]);
        }
    }

    /// Before L1 goes on.
    fn serve(&mut self) {
        let wanted = self.way == Way::Served && self.machine.current().is_some();
        if wanted && (!self.serves || self.machine.is_mirror_due()) {
            let served = &mut self.served;
            self.closed = self.machine.give_mirror(|field, value| _ = served.insert(field, value));
            self.serves = true;
        }
    }

    fn fill_page(&mut self, to: u64) {
        let v = start();
        self.memory.write(Gpa(to), &[0; page::BYTES]).unwrap();
        self.memory.write(Gpa(to), &page::VERSION.to_le_bytes()).unwrap();
        for line in &page::READ_LINES {
            let encoding = u64::from(line.field.encoding);
            let value = v.read(place::find(encoding).unwrap());
            self.write_page(to, encoding, value);
        }
    }

    /// A field of a page. False: it has none such.
    fn write_page(&mut self, to: u64, encoding: u64, value: u64) -> bool {
        let Some((offset, bytes)) = page::find(encoding) else { return false };
        let at = Gpa(to + u64::from(offset));
        self.memory.write(at, &value.to_le_bytes()[..bytes]).unwrap();
        true
    }

    fn name_page(&mut self, page: u64) {
        self.memory.write(Gpa(ASSIST + 40), &1u64.to_le_bytes()).unwrap();
        self.memory.write(Gpa(ASSIST + 48), &page.to_le_bytes()).unwrap();
    }

    /// What a field has where L1 writes it.
    fn old(&mut self, encoding: u32) -> u64 {
        if self.way == Way::Page {
            let Some((offset, bytes)) = page::find(encoding.into()) else { return 0 };
            let mut value = [0; 8];
            let at = Gpa(PAGES[0] + u64::from(offset));
            self.memory.read(at, &mut value[..bytes]).unwrap();
            return u64::from_le_bytes(value);
        }
        match self.served.get(&encoding) {
            Some(held) if self.serves => *held,
            _ => {
                let instruction = Instruction::Vmwrite {
                    field: encoding.into(),
                    from: Place::Register(0),
                    value: 0,
                };
                let needs = self.machine.needs(&instruction);
                self.fetch(needs);
                self.machine.vmcs12().read(place::find(encoding.into()).unwrap())
            }
        }
    }

    /// L1 writes a field, and says so where it has to.
    fn write(&mut self, (encoding, value): (u32, u64)) {
        if self.way == Way::Page {
            let (_, carried) =
                field::CARRIED.iter().find(|(e, _)| u32::from(*e) == encoding).unwrap();
            if let Some(place) = carried
                && self.write_page(PAGES[0], encoding.into(), value)
            {
                // Some hypervisors forget to.
                let stale = if self.r.one_in(16) { 0 } else { 1u32 << place.clean as u32 };
                let at = Gpa(PAGES[0] + at::CLEAN as u64);
                let clean = self.memory.read_u32(at).unwrap() & !stale;
                self.memory.write(at, &clean.to_le_bytes()).unwrap();
            }
            return;
        }
        let serves = SHADOWED.iter().take(WRITTEN).any(|l| u32::from(l.encoding) == encoding);
        let exits = self
            .closed
            .changes(Closed::default())
            .any(|(using, field, _)| using == Direction::Write && u32::from(field) == encoding);
        if self.serves && serves && !exits {
            self.served.insert(encoding, value);
        } else {
            let field = u64::from(encoding);
            self.execute(Instruction::Vmwrite { field, from: Place::Register(0), value });
        }
    }

    /// An entry did not come about: what was written for it is taken back.
    fn take_back(&mut self) {
        let mut back = core::mem::take(&mut self.undone);
        if back.is_empty() {
            // L2 has changed its mode, and not all of that is saved.
            back = MODE.to_vec();
        }
        for old in back.into_iter().rev() {
            self.serve();
            self.write(old);
        }
    }

    /// L0 changes a word of its own, or L1 a register.
    fn change(&mut self) {
        let (r, l0, l1) = (&mut self.r, &mut self.l0, &mut self.l1);
        let which = r.next() % 16;
        // Registers of L1's tell nobody.
        self.l0_changed |= which < 11;
        match which {
            0 => {
                let more = r.some(0x1880_008c) as u32;
                l0.primary = ProcControls::SECONDARY | ProcControls::from_bits_retain(more);
            }
            1 => {
                let more = ProcControls2::from_bits_retain(r.some(0x216_100c) as u32);
                l0.secondary = ProcControls2::EPT | ProcControls2::VPID | more;
            }
            2 => {
                l0.exit =
                    ExitControls::HOST_64 | ExitControls::from_bits_retain(r.some(0x3c_0000) as u32)
            }
            3 => {
                l0.entry = EntryControls::LOAD_EFER
                    | EntryControls::from_bits_retain(r.some(0x4004) as u32)
            }
            4 => l0.exceptions = r.some(0x6_4002) as u32,
            5 => l0.cr0_mask = 0x20 | r.some(0xe000_0008),
            6 => l0.cr4_mask = 0x2000 | r.some(0x80),
            7 => l0.tsc = Tsc { multiplier: r.of(&[ONE, ONE * 2]), offset: r.some(0xff) },
            8 => l0.vpid = 1 + r.some(7) as u16,
            9 => l0.page_faults = r.one_in(2),
            10 => l0.pin = PinControls::from_bits_retain(0x3f | r.some(0x80) as u32),
            11 | 12 => l1.efer = r.of(&[0xd01, 0xd00, 0x501, 0x500]),
            13 => l1.dr7 = 0x400 | r.some(0xf),
            14 => l1.debugctl = r.some(3),
            _ => l1.pat = r.of(&PATS),
        }
    }

    /// The enlightened VMCS is taken over. False: the instruction has ended.
    fn load_page(&mut self, by: EntryBy) -> bool {
        let behind = self.machine.behind();
        self.fetch(behind);
        let loaded = self.machine.load_enlightened(by, &CPU, &LIMITS, &self.memory);
        if let Ok(found) = loaded
            && found != Loaded::Page
        {
            self.machine.give_up_enlightened(found == Loaded::NoAssist);
        }
        loaded.is_ok()
    }

    fn enter(&mut self) {
        let mut by = EntryBy::Vmlaunch;
        if self.machine.vmcs12().is_launched() {
            by = EntryBy::Vmresume;
        }
        if self.way == Way::Page && !self.r.one_in(16) {
            by = EntryBy::Vmresume;
        }
        if self.serves {
            if self.machine.asks_mirror() {
                self.machine.take_mirror_for_entry(|encoding| self.served[&encoding]);
            }
        } else if self.machine.asks_assist_page() && !self.load_page(by) {
            return;
        }
        if core::mem::take(&mut self.l0_changed) {
            self.machine.touch(of_l0());
        }
        self.machine.note_l1_efer(self.l1.efer);
        if !self.tracking {
            self.machine.touch_all();
        }
        let mut twin = self.machine.clone();
        twin.fetch(&self.hardware, &self.known(), twin.behind());
        twin.touch_all();
        let needs = self.machine.needs_to_enter();
        self.fetch(needs);
        let entry = self.machine.execute_entry(by, &CPU, &LIMITS, &self.memory);
        assert_eq!(entry, twin.execute_entry(by, &CPU, &LIMITS, &self.memory));
        let entry = match entry {
            Ok(entry) => entry,
            Err(fail) => {
                self.machine.refuse_entry(fail, &self.memory);
                self.counts.refused += 1;
                return;
            }
        };
        let mut entered = self.machine.finish_entry(&LIMITS, &self.memory);
        if let Entered::Fetch(groups) = entered {
            self.fetch(groups);
            entered = self.machine.finish_entry(&LIMITS, &self.memory);
        }
        match (entered, twin.finish_entry(&LIMITS, &self.memory)) {
            (Entered::Failed(failure), Entered::Failed(same)) => {
                assert_eq!(failure, same);
                self.counts.failed += 1;
                self.fail(failure);
            }
            (Entered::L2(dirty), Entered::L2(Groups::ALL)) => {
                if self.r.one_in(32) {
                    // A page of L1's was missing: all of it once more.
                    self.machine.withdraw_entry();
                    return;
                }
                self.compose(dirty, &twin);
                self.machine.entered(entry);
                self.counts.entries += 1;
                match self.r.next() % 32 {
                    // The hardware has found what the checks had not.
                    0 => self.fail_late(twin, entry),
                    1 => self.pass_smm(),
                    _ => self.run_l2(),
                }
            }
            (Entered::L2(dirty), Entered::Failed(failure)) => {
                // L2 has changed its mode, and an exit saves that by halves: the CPU finds it in vmcs02.
                self.l0 = self.l1.into(self.l0);
                merge::compose(&self.l0, self.machine.vmcs12(), dirty, &mut self.hardware);
                assert!(self.is_refused(), "{failure:?}, and the CPU would enter");
                self.machine.entered(entry);
                self.counts.failed += 1;
                self.fail(failure);
            }
            ends => panic!("{ends:?}"),
        }
    }

    /// Whether the CPU refuses vmcs02 for its mode (SDM vol. 3C §27.3.1.1).
    fn is_refused(&self) -> bool {
        let h = &self.hardware.values;
        let (paging, entry, efer) = (h[0x6800] >> 31 & 1, h[0x4012], h[0x2806]);
        let (long, lme, lma) = (entry >> 9 & 1, efer >> 8 & 1, efer >> 10 & 1);
        long > paging || long != lma || paging != 0 && lme != lma
    }

    /// The entry fails in the hardware: VMCS12 has what it had, or lacks it as before.
    fn fail_late(&mut self, mut twin: Machine, entry: PendingEntry) {
        twin.entered(entry);
        twin.fail_entry(EntryFailure::GUEST);
        self.fail(EntryFailure::GUEST);
        let (mut v, known) = (self.machine.vmcs12().clone(), self.known());
        leave::save_rest(&mut v, &self.hardware, &known, self.machine.behind());
        assert!(v == *twin.vmcs12(), "behind an entry that the hardware has refused");
    }

    fn fail(&mut self, failure: EntryFailure) {
        self.machine.fail_entry(failure);
        self.machine.store_enlightened(&self.memory);
    }

    /// vmcs02 gets what is dirty, and has to hold what the twin's gets, of which all is written.
    fn compose(&mut self, dirty: Groups, twin: &Machine) {
        let l1 = self.l1;
        // As the backend has it: but for EFER, L1's registers are read where they may be composed.
        self.l0.efer = l1.efer;
        if dirty.has(Group::Msrs) {
            self.l0 = l1.into(self.l0);
        }
        let spared = COMPOSED.iter().filter(|group| !dirty.has(**group));
        self.counts.spared += spared.count() as u64;
        merge::compose(&self.l0, self.machine.vmcs12(), dirty, &mut self.hardware);
        let mut whole = Vmcs02::new();
        merge::compose(&l1.into(self.l0), twin.vmcs12(), Groups::ALL, &mut whole);
        for encoding in &whole.written {
            if EXCLUDED.iter().any(|(excluded, _)| excluded == encoding) {
                continue;
            }
            let at = *encoding as usize;
            let mask = SHADOWS.iter().find(|(shadow, _)| *shadow == at);
            let counts = mask.map_or(u64::MAX, |(_, mask)| whole.values[*mask]);
            let (here, there) = (self.hardware.values[at], whole.values[at]);
            assert_eq!(
                (here ^ there) & counts,
                0,
                "{encoding:#x}: {here:#x}, not {there:#x}, {dirty:?}"
            );
        }
        if dirty.has(Group::Flow) {
            assert_eq!(self.hardware.get(field::GUEST_ACTIVITY), 0);
        }
    }

    /// An SMI, and RSM: L2 goes on with all of it composed.
    fn pass_smm(&mut self) {
        let known = self.known();
        self.machine.save_running(&self.hardware, &known);
        self.machine.put_aside();
        self.change();
        assert!(self.machine.take_back());
        self.l0 = self.l1.into(self.l0);
        self.l0_changed = false;
        self.machine.touch_all();
        merge::compose(&self.l0, self.machine.vmcs12(), Groups::ALL, &mut self.hardware);
        self.run_l2();
    }

    /// L2 changes what it may, and exits.
    fn run_l2(&mut self) {
        let (r, h) = (&mut self.r, &mut self.hardware);
        let put = |h: &mut Vmcs02, at: u32, value: u64| h.values[at as usize] = value;
        for (at, bits) in
            [(0x681e, 0xffff), (0x681c, 0xffff), (0x680e, 0xffff), (0x6824, 0xffff), (0x482a, 0xff)]
        {
            if r.one_in(3) {
                put(h, at, r.some(bits));
            }
        }
        let (cr0, cr4) = (h.values[0x6800], h.values[0x6804]);
        let unrestricted = h.values[0x401e] & 0x80 != 0;
        if r.one_in(3) {
            put(h, 0x6802, r.of(&TABLES));
            put(h, 0x6804, cr4 ^ r.some(0x80) & !h.values[0x6002]);
            put(h, 0x6800, cr0 ^ r.some(8) & !h.values[0x6000]);
            put(h, 0x681a, 0x400 | r.some(3));
        }
        if r.one_in(8) && unrestricted && h.values[0x6000] & 1 << 31 == 0 && cr4 & 0x20 != 0 {
            // Paging on or off: with LME, the mode of 64 bits.
            h.values[0x6800] ^= 1 << 31;
            if h.values[0x2806] & 0x100 != 0 {
                let long = h.values[0x6800] >> 31 & 1;
                h.values[0x2806] = h.values[0x2806] & !0x400 | long << 10;
                h.values[0x4012] = h.values[0x4012] & !0x200 | long << 9;
            }
        }
        let pae =
            h.values[0x6800] >> 31 & 1 != 0 && cr4 & 0x20 != 0 && h.values[0x2806] & 0x400 == 0;
        if pae && r.one_in(2) {
            for at in [0x280a, 0x280c, 0x280e, 0x2810] {
                put(h, at, r.of(&PDPTES));
            }
        }
        // What L0 emulates for L2.
        if r.one_in(8) {
            h.values[0x2806] ^= r.some(0x801);
            put(h, 0x2804, r.of(&PATS));
            put(h, 0x2802, r.some(1));
        }
        // An HLT that does not exit. What ends the run need not wake L2, whatever its next HLT does.
        let halts = h.values[0x4002] & 0x80 == 0;
        let halted = if h.values[0x4826] == 0 { halts && r.one_in(4) } else { r.one_in(2) };
        put(h, 0x4826, halted.into());
        put(h, 0x6820, r.of(&[2, 0x202]));
        put(h, 0x4824, r.of(&[0, 0, 8]));
        put(h, 0x4402, r.of(&[10, 12, 18, 30, 48, 1]));
        put(h, 0x6400, r.some(0xffff));
        put(h, 0x440c, 2);
        h.values[0x4016] &= 0x7fff_ffff;
        let asleep = !halts && r.one_in(16);
        let mut known = self.known();
        known.activity = asleep.into();
        let report = Report::of(&self.hardware);
        self.machine.leave(&self.hardware, &report, &known, &self.memory);
    }

    fn step(&mut self) {
        self.serve();
        match self.r.next() % 64 {
            0..=27 => {
                let (encoding, value) = written(&mut self.r);
                let old = self.old(encoding);
                self.undone.push((encoding, old));
                self.write((encoding, value));
            }
            28..=31 => self.change(),
            32 => {
                // L1 reads what the last exit has left.
                let field = u64::from(self.r.of(&[0x6800u32, 0x280a, 0x680e, 0x6824]));
                self.execute(Instruction::Vmread { field, to: Place::Register(0) });
            }
            33 if self.way == Way::Page => {
                let page = self.r.of(&PAGES);
                match self.r.next() % 4 {
                    0 => self.fill_page(page),
                    1 => {
                        let clean = self.r.next() as u32;
                        self.memory
                            .write(Gpa(page + at::CLEAN as u64), &clean.to_le_bytes())
                            .unwrap();
                    }
                    _ => self.name_page(page),
                }
            }
            33 => {
                let region = self.r.of(&REGIONS[..2]);
                if self.r.one_in(3) {
                    self.load(Instruction::Vmclear { pointer: Ok(OPERAND) }, region);
                }
                self.load(Instruction::Vmptrld { pointer: Ok(OPERAND) }, region);
            }
            34..=36 => self.stop_serving(),
            37 => {
                // L1's tables of PDPTEs are memory.
                let at = self.r.of(&TABLES) + self.r.some(0x18);
                let entry = self.r.of(&PDPTES);
                self.memory.write(Gpa(at), &entry.to_le_bytes()).unwrap();
            }
            _ => {
                let entries = self.counts.entries;
                self.enter();
                if self.counts.entries != entries {
                    self.undone.clear();
                } else if !self.r.one_in(8) {
                    self.take_back();
                }
            }
        }
    }
}

/// Runs so many sequences, from one on.
pub fn run(first: u64, cases: u64) -> Counts {
    let mut all = Counts::default();
    for case in first..first + cases {
        let mut run = Run::new(case);
        for step in 0..STEPS {
            let said = Said(case, step, run.way);
            run.step();
            core::mem::forget(said);
        }
        all.cases += 1;
        all.entries += run.counts.entries;
        all.spared += run.counts.spared;
        all.failed += run.counts.failed;
        all.refused += run.counts.refused;
    }
    all
}

/// Says where it was when a step does not end.
struct Said(u64, u64, Way);

impl Drop for Said {
    fn drop(&mut self) {
        println!("case {}, step {}, {:?}", self.0, self.1, self.2);
    }
}

#[test]
fn what_is_composed_of_dirty_groups_is_what_a_whole_composition_gives() {
    let asked = std::env::var("GANNET_NESTED_STEPS").ok();
    let cases = asked.map_or(3000, |n| n.parse::<u64>().expect("a number of steps") / STEPS);
    let counts = run(1, cases);
    println!("{counts:?}");
    // Most of a sequence are entries, and most groups are not composed.
    assert!(counts.entries * 8 > cases * STEPS || cases < 100, "{counts:?}");
    assert!(counts.spared > counts.entries * 5, "{counts:?}");
}
