//! L1's instructions against a model of the manual that is written apart from the code: regions are
//! dictionaries of fields, nothing is cached, nothing is lazy. A step is one number, so that a random sequence,
//! a shrunk one and a long run are the same thing.
//!
//! `GANNET_NESTED_STEPS=10000000 cargo test --release -p gannet-nested-vmx --test model long -- --nocapture` runs long, and
//! says what it did.

#[path = "model/enlightened.rs"]
mod enlightened;
#[path = "model/reference.rs"]
mod reference;
#[path = "model/world.rs"]
mod world;

use enlightened::Enlightened;
use gannet_nested_vmx::checks::controls;
use gannet_nested_vmx::machine::enlightened::{Loaded, UNDEFINED};
use gannet_nested_vmx::machine::{By, Cpu, Entered, Instruction, Then};
use gannet_nested_vmx::merge;
use gannet_nested_vmx::{Fail, GuestMemory, Machine, Vmcs12};
use proptest::prelude::*;
use reference::{Model, Outcome};
use world::{L0, LIMITS, Memory, Vmcs02};
use x86::vmcs::{Group, Groups, field};

/// What has been done, so that a sequence that does nothing is seen.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    instructions: u64,
    /// Stores of L1's to its regions and pages.
    stores: u64,
    /// L2 has run, with an ordinary VMCS and with an enlightened one.
    runs: u64,
    runs_by_page: u64,
    /// Entries that failed for L2's state.
    failed: u64,
    /// VMfail and faults.
    refused: u64,
    /// How often all fields and pages were compared.
    comparisons: u64,
}

/// One vCPU: the code's state, the hardware's VMCS, and the model.
struct Pair {
    machine: Machine,
    memory: Memory,
    hardware: Vmcs02,
    model: Model,
    /// L1 may use enlightened VMCSs.
    enlightened: bool,
    counts: Counts,
}

fn outcome(result: &Result<Then, Fail>) -> Outcome {
    match result {
        Ok(Then::Next) => Outcome::Done,
        Ok(Then::Register(_, value)) => Outcome::Value(*value),
        Ok(Then::Invalidate(what)) => Outcome::Invalidates(format!("{what:?}")),
        Ok(Then::Enter(_)) => Outcome::Enters,
        Err(Fail::Invalid) => Outcome::Invalid,
        Err(Fail::Valid(error)) => Outcome::Valid(error.number()),
        Err(Fail::Fault(exception)) => Outcome::Fault(exception.vector.0),
        Err(Fail::Outside) => Outcome::Fault(255),
    }
}

impl Pair {
    fn new(enlightened: bool) -> Self {
        let memory = Memory::new();
        let mut machine = Machine::new(world::capabilities());
        let mut model = Model::new();
        if enlightened {
            model.enlightened = Enlightened::new(&memory, &mut machine);
        }
        let (hardware, counts) = (Vmcs02::new(), Counts::default());
        Self { machine, model, hardware, memory, enlightened, counts }
    }

    fn poke_page(&mut self, number: u64) {
        self.counts.stores += 1;
        self.model.enlightened.poke(number, &self.memory, &mut self.machine);
    }

    /// What an instruction does. An entry looks for an enlightened VMCS first.
    fn execute(&mut self, instruction: Instruction, cpu: &Cpu) -> Result<Then, Fail> {
        let by = match instruction {
            Instruction::Vmlaunch => Some(By::Vmlaunch),
            Instruction::Vmresume => Some(By::Vmresume),
            _ => None,
        };
        let m = &mut self.machine;
        if let Some(by) = by
            && m.asks_assist_page()
        {
            let behind = m.behind();
            m.fetch(&self.hardware, &world::KNOWN, behind);
            match m.load_enlightened(by, cpu, &LIMITS, &self.memory) {
                Ok(Loaded::Page) => {
                    let told = (m.keeps_msr_bitmap(), m.told().unwrap().direct_flush);
                    assert_eq!(told, self.model.enlightened.told);
                }
                Ok(found) => m.give_up_enlightened(found == Loaded::NoAssist),
                Err(Fail::Outside) => {
                    m.refuse_enlightened(&self.memory);
                    return Err(UNDEFINED);
                }
                Err(fail) => return Err(fail),
            }
        }
        let needs = m.needs(&instruction);
        m.fetch(&self.hardware, &world::KNOWN, needs);
        m.execute(instruction, cpu, &LIMITS, &mut self.memory)
    }

    fn step(&mut self, number: u64) {
        if self.enlightened && number >> 61 == 0 {
            return self.poke_page(number >> 1);
        }
        let (instruction, cpu) = world::decode(number, &mut self.memory);
        if let Some((at, word)) = world::poke(number) {
            self.counts.stores += 1;
            if self.machine.current().is_none_or(|current| current.0 != at) {
                self.memory.write(x86::Gpa(at), &word.to_le_bytes()).unwrap();
                self.model.poke(at, word);
            }
            return;
        }
        let clears = matches!(instruction, Instruction::Vmclear { .. });
        if clears && number >> 29 & 1 != 0 && self.model.enlightened.named().is_some() {
            let page = enlightened::PAGES[(number >> 8) as usize % 3];
            self.memory.write(x86::Gpa(world::OPERAND), &page.to_le_bytes()).unwrap();
        }
        self.counts.instructions += 1;
        let expected = self.model.execute(&instruction, &cpu, &self.memory);
        let result = self.execute(instruction, &cpu);
        self.counts.refused += u64::from(result.is_err());
        assert_eq!(outcome(&result), expected, "{instruction:x?} {cpu:x?}");
        if let Ok(Then::Enter(entry)) = result {
            self.enter(entry, number);
        }
        let current = self.machine.current().map(|at| at.0);
        assert_eq!(current, self.model.current());
        assert_eq!(self.machine.is_enlightened(), self.model.enlightened.current.is_some());
        let reads_all = number.is_multiple_of(61);
        if reads_all && self.model.has_vmcs() {
            self.compare_all();
        }
        // A vCPU that left VMX operation has given its hardware VMCS up.
        if matches!(instruction, Instruction::Vmxoff) && self.machine.vmxon().is_none() {
            self.hardware = Vmcs02::new();
        }
    }

    fn enter(&mut self, entry: gannet_nested_vmx::machine::PendingEntry, number: u64) {
        if number.is_multiple_of(7) {
            // L0 finds only now that a word of its own is another.
            self.machine.touch(Groups::of(Group::ControlRegisters));
        }
        let mut entered = self.machine.finish_entry(&LIMITS, &self.memory);
        if let Entered::Fetch(groups) = entered {
            self.machine.fetch(&self.hardware, &world::KNOWN, groups);
            entered = self.machine.finish_entry(&LIMITS, &self.memory);
        }
        let failure = self.model.guest_failure();
        match entered {
            Entered::Fetch(groups) => panic!("{groups:?} were fetched"),
            Entered::Failed(failed) => {
                assert_eq!(Some((failed.reason.0, failed.qualification)), failure);
                self.counts.failed += 1;
                self.machine.fail_entry(failed);
                self.machine.store_enlightened(&self.memory);
                self.model.entry_failed(failed.reason.0, failed.qualification);
            }
            Entered::L2(dirty) => {
                assert_eq!(failure, None);
                self.compose(dirty);
                self.machine.entered(entry);
                self.model.entered(entry.by == By::Vmlaunch);
                self.run(number);
            }
        }
    }

    /// Composes the dirty groups, and all of them from scratch: the hardware has to hold the same.
    fn compose(&mut self, dirty: Groups) {
        let mut whole: Vmcs12 = self.machine.vmcs12().clone();
        let behind = self.machine.behind();
        gannet_nested_vmx::leave::save_rest(&mut whole, &self.hardware, &world::KNOWN, behind);
        merge::compose(&L0, self.machine.vmcs12(), dirty, &mut self.hardware);
        let mut scratch = Vmcs02::new();
        merge::compose(&L0, &whole, Groups::ALL, &mut scratch);
        for encoding in &scratch.written {
            let at = *encoding as usize;
            // Of a read shadow only the bits in its mask are looked at.
            let counts = match at {
                0x6004 | 0x6006 => scratch.values[at - 4],
                _ => u64::MAX,
            };
            let differ = (self.hardware.values[at] ^ scratch.values[at]) & counts;
            assert_eq!(differ, 0, "{encoding:#x} {dirty:?}");
        }
    }

    /// L2 runs: it changes what it may, and exits.
    fn run(&mut self, number: u64) {
        if self.enlightened && number & 64 != 0 {
            self.poke_page(number.rotate_right(17));
        }
        match self.machine.is_enlightened() {
            true => self.counts.runs_by_page += 1,
            false => self.counts.runs += 1,
        }
        world::run_l2(&mut self.hardware, number);
        self.model.left(&self.hardware);
        let report = gannet_nested_vmx::leave::Report::of(&self.hardware);
        self.machine.leave(&self.hardware, &report, &world::KNOWN, &self.memory);
    }

    /// Every field of the current VMCS is what the model has, and every byte of the pages.
    fn compare_all(&mut self) {
        self.counts.comparisons += 1;
        self.model.enlightened.compare(&self.memory);
        let behind = self.machine.behind();
        self.machine.fetch(&self.hardware, &world::KNOWN, behind);
        for (encoding, place) in field::TABLE {
            if place.is_none() {
                continue;
            }
            let named = x86::vmcs::place::find(u64::from(*encoding)).unwrap();
            let value = self.machine.vmcs12().read(named);
            assert_eq!(value, self.model.field(*encoding), "{encoding:#x}");
        }
    }
}

fn run(enlightened: bool, steps: impl IntoIterator<Item = u64>) -> Counts {
    let mut pair = Pair::new(enlightened);
    for number in steps {
        pair.step(number);
    }
    pair.counts
}

/// A generator that needs no crate (xorshift).
fn numbers(mut state: u64) -> impl Iterator<Item = u64> {
    core::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state)
    })
}

/// GANNET_NESTED_STEPS says how many, half of them with enlightened VMCSs.
#[test]
fn a_long_sequence_agrees_with_the_model() {
    let asked = std::env::var("GANNET_NESTED_STEPS").ok();
    let steps: u64 = asked.map_or(120_000, |n| n.parse().expect("a number of steps"));
    let half = steps / 2;
    for (enlightened, seed) in [(false, 0x9e37_79b9_7f4a_7c15), (true, 0x1234_5678_9abc_def1)] {
        let counts = run(enlightened, numbers(seed).take(half as usize));
        println!("{half} steps, enlightened: {enlightened}: {counts:?}");
        assert_eq!(counts.runs_by_page > 0, enlightened && half > 1000);
        assert!((counts.runs + counts.runs_by_page) * 50 > half || half < 1000, "{counts:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sequences_agree_with_the_model(steps in proptest::collection::vec(any::<u64>(), 1..300)) {
        run(false, steps.iter().copied());
        run(true, steps);
    }

    /// What VMWRITE puts into a field VMREAD gives, cut to the field's width.
    #[test]
    fn a_field_keeps_what_its_width_allows(value: u64, noise: u64) {
        let mut image = Vmcs12::new();
        for (encoding, place) in field::TABLE {
            let Some(_) = place else { continue };
            let at = u64::from(*encoding);
            let named = x86::vmcs::place::find(at).unwrap();
            image.write(at, named, noise);
            image.write(at, named, value);
            let bits = [16, 64, 32, 64][usize::from(encoding >> 13 & 3)];
            let rights = (0x4814..=0x4822).contains(&at);
            let mask = if rights { 0x1_f0ff } else { u64::MAX >> (64 - bits) };
            prop_assert_eq!(image.read(named), value & mask);
            if let Some(high) = x86::vmcs::place::find(at | 1) {
                image.write(at | 1, high, noise);
                prop_assert_eq!(image.read(named), value & 0xffff_ffff | noise << 32);
                prop_assert_eq!(image.read(high), noise & 0xffff_ffff);
            }
        }
    }

    /// No VMCS12 makes a check panic, and one that passes can be composed.
    #[test]
    fn any_image_can_be_checked(words in proptest::collection::vec(any::<u64>(), 128), flips in any::<[u16; 8]>()) {
        let memory = Memory::new();
        let c = world::capabilities();
        let mut image = world::good();
        for (flip, word) in flips.iter().zip(&words) {
            let (encoding, place) = field::TABLE[usize::from(*flip) % field::TABLE.len()];
            if place.is_some() {
                let named = x86::vmcs::place::find(u64::from(encoding)).unwrap();
                image.write(u64::from(encoding), named, *word);
            }
        }
        let _ = controls::check(&image, &c, &LIMITS);
        let _ = gannet_nested_vmx::checks::host::check(&image, &c, &LIMITS);
        let _ = gannet_nested_vmx::checks::guest::check(&image, &c, &LIMITS, None, &memory);
        let mut vmcs = Vmcs02::new();
        merge::compose(&L0, &image, Groups::ALL, &mut vmcs);
        let _ = gannet_nested_vmx::reflect::claim(
            &image, &vmcs, &[0; 16], &gannet_nested_vmx::reflect::Wants::default(), &memory,
        );
    }
}
