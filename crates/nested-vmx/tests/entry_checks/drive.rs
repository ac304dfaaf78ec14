//! The code under test: L1's memory, the instructions that enter L2, and a hardware VMCS that L2 leaves as it was entered.

use gannet_nested_vmx::checks::Limits;
use gannet_nested_vmx::leave::{self, Known, Report};
use gannet_nested_vmx::machine::{Entered, EntryBy, Instruction, Place, Then};
use gannet_nested_vmx::{Fail, GuestMemory, Machine, Vmcs12, merge};
use x86::Gpa;
use x86::vmcs::field;
use zerocopy::IntoBytes;

use super::bases::Base;
use super::oracle::{End, Processor};
use super::rig::{CPU, KNOWN, L0, Memory, Vmcs02};

/// Bytes of L1's memory.
const SIZE: usize = 0x10000;
const VMXON: u64 = 0x1000;
/// The current VMCS.
pub const REGION: u64 = 0x2000;
/// A shadow VMCS, and one that is none.
pub const SHADOW: u64 = 0x3000;
const OTHER: u64 = 0x4000;
/// PDPTEs of which none is wrong; at the next page some that are.
pub const PAGE_DIRECTORIES: u64 = 0x5000;
/// The virtual-APIC page, with a priority of 5 in VTPR.
pub const APIC_PAGE: u64 = 0xa000;
const OPERAND: u64 = 0xf000;

pub use super::rig::{LIMITS, capabilities};

impl Memory {
    pub fn new(image: &Vmcs12) -> Self {
        let memory = Self::of(SIZE);
        let revision = image.header();
        memory.put(REGION, image.as_bytes());
        memory.put(VMXON, &revision.to_le_bytes());
        memory.put(SHADOW, &(revision | 1 << 31).to_le_bytes());
        memory.put(OTHER, &revision.to_le_bytes());
        let good = [0x6001u64, 0x7e19, 0x1e6, 0];
        let wrong = [0x6001u64, 0x7021, 0x8001, 0x9003];
        for (at, (good, wrong)) in (0..).step_by(8).zip(good.into_iter().zip(wrong)) {
            memory.put(PAGE_DIRECTORIES + at, &good.to_le_bytes());
            memory.put(PAGE_DIRECTORIES + 0x1000 + at, &wrong.to_le_bytes());
        }
        memory.put(APIC_PAGE + 0x80, &[0x50]);
        memory
    }
}

/// One vCPU whose current VMCS is about to be entered.
pub struct Guest {
    machine: Machine,
    memory: Memory,
    hardware: Vmcs02,
    limits: Limits,
    known: Known,
}

impl Guest {
    /// The image lies in L1's memory and is loaded: nothing of it was checked before.
    pub fn new(base: &Base, image: &Vmcs12) -> Self {
        let known = Known { activity: base.activity(), efer: base.efer(), ..KNOWN };
        let mut guest = Self {
            machine: Machine::new(capabilities()),
            memory: Memory::new(image),
            hardware: Vmcs02::new(),
            limits: base.limits(),
            known,
        };
        guest.pointer(Instruction::Vmxon { pointer: Ok(OPERAND) }, VMXON);
        guest.pointer(Instruction::Vmptrld { pointer: Ok(OPERAND) }, REGION);
        guest
    }

    fn pointer(&mut self, instruction: Instruction, to: u64) {
        self.memory.write(Gpa(OPERAND), &to.to_le_bytes()).unwrap();
        assert_eq!(self.execute(instruction), Ok(Then::Next));
    }

    fn execute(&mut self, instruction: Instruction) -> Result<Then, Fail> {
        let needs = self.machine.needs(&instruction);
        self.machine.fetch(&self.hardware, &self.known, needs);
        self.machine.execute(instruction, &CPU, &self.limits, &mut self.memory)
    }

    /// VMWRITE of L1's.
    pub fn write(&mut self, field: u64, value: u64) {
        let write = Instruction::Vmwrite { field, from: Place::Register(0), value };
        assert_eq!(self.execute(write), Ok(Then::Next));
    }

    /// The current VMCS with all that the last exit has left in the hardware's.
    pub fn whole(&self) -> Vmcs12 {
        let mut whole = self.machine.vmcs12().clone();
        let behind = self.machine.behind();
        leave::save_rest(&mut whole, &self.hardware, &self.known, behind);
        whole
    }

    pub fn processor(&self, dr7_zeros: u64) -> Processor<'_> {
        Processor {
            capabilities: &self.machine.capabilities,
            limits: &self.limits,
            memory: &self.memory,
            current: REGION,
            dr7_zeros,
        }
    }

    /// VMLAUNCH or VMRESUME, whichever the VMCS wants. An L2 that runs exits at once.
    pub fn enter(&mut self) -> End {
        let by = match self.machine.vmcs12().is_launched() {
            false => Instruction::Vmlaunch,
            true => Instruction::Vmresume,
        };
        let pending = match self.execute(by) {
            Ok(Then::Enter(pending)) => pending,
            Err(Fail::Valid(error)) => {
                let told = self.machine.vmcs12().get(field::INSTRUCTION_ERROR);
                assert_eq!(told, error.number());
                return End::Error(told);
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(pending.by == EntryBy::Vmlaunch, by == Instruction::Vmlaunch);
        let mut entered = self.machine.finish_entry(&self.limits, &self.memory);
        if let Entered::Fetch(groups) = entered {
            self.machine.fetch(&self.hardware, &self.known, groups);
            entered = self.machine.finish_entry(&self.limits, &self.memory);
        }
        match entered {
            Entered::Fetch(groups) => panic!("{groups:?} were fetched"),
            Entered::Failed(failure) => {
                self.machine.fail_entry(failure);
                let v = self.machine.vmcs12();
                End::Failed(v.get(field::EXIT_REASON), v.get(field::EXIT_QUALIFICATION))
            }
            Entered::L2(dirty) => {
                merge::compose(&L0, self.machine.vmcs12(), dirty, &mut self.hardware);
                self.machine.entered(pending);
                // CPUID.
                self.hardware.put(field::EXIT_REASON, 10);
                let report = Report::of(&self.hardware);
                self.machine.leave(&self.hardware, &report, &self.known, &self.memory);
                End::Runs
            }
        }
    }
}
