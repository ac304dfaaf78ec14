//! The code and the model side by side: both take the same steps.

use gannet_nested_vmx::machine::enlightened::{Loaded, UNDEFINED};
use gannet_nested_vmx::machine::{Cpu, Entered, EntryBy, Instruction, Then};
use gannet_nested_vmx::merge;
use gannet_nested_vmx::{Fail, GuestMemory, Machine, Vmcs12};
use x86::vmcs::{Group, Groups, field};

use super::enlightened::{self, Enlightened};
use super::reference::{Model, Outcome};
use super::world::{self, L0, LIMITS, Memory, Vmcs02};

/// What has been done, so that a sequence that does nothing is seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub instructions: u64,
    /// Stores of L1's to its regions and pages.
    pub stores: u64,
    /// L2 has run, with an ordinary VMCS and with an enlightened one.
    pub runs: u64,
    pub runs_by_page: u64,
    /// Entries that failed for L2's state.
    pub failed: u64,
    /// VMfail and faults.
    pub refused: u64,
    /// How often all fields and pages were compared.
    pub comparisons: u64,
}

/// One vCPU: the code's state, the hardware's VMCS, and the model.
pub struct Pair {
    machine: Machine,
    memory: Memory,
    hardware: Vmcs02,
    model: Model,
    /// L1 may use enlightened VMCSs.
    enlightened: bool,
    pub counts: Counts,
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
    pub fn new(enlightened: bool) -> Self {
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
            Instruction::Vmlaunch => Some(EntryBy::Vmlaunch),
            Instruction::Vmresume => Some(EntryBy::Vmresume),
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

    pub fn step(&mut self, number: u64) {
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
                self.model.entered(entry.by == EntryBy::Vmlaunch);
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

pub fn run(enlightened: bool, steps: impl IntoIterator<Item = u64>) -> Counts {
    let mut pair = Pair::new(enlightened);
    for number in steps {
        pair.step(number);
    }
    pair.counts
}
