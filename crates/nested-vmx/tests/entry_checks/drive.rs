//! The code under test: L1's memory, the instructions that enter L2, and a hardware VMCS that L2 leaves as it was entered.

use std::cell::RefCell;

use gannet_nested_vmx::capabilities::Offer;
use gannet_nested_vmx::checks::Limits;
use gannet_nested_vmx::leave::{self, Exit, Known, Report};
use gannet_nested_vmx::machine::{Cpu, Entered, EntryBy, Instruction, L1, Place, Stop, Then};
use gannet_nested_vmx::merge::{self, Fields, Pages, time::Tsc};
use gannet_nested_vmx::{Capabilities, Fail, GuestMemory, Machine, Outside, Vmcs12};
use x86::vmcs::field::{self, Field, Width};
use x86::vmcs::{EntryControls, ExitControls, PinControls, ProcControls, ProcControls2, ReadWrite};
use x86::{Exception, Gpa, Hpa};
use zerocopy::IntoBytes;

use super::bases::Base;
use super::example::EVERYTHING;
use super::oracle::{End, Processor};

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

pub struct Memory(RefCell<Vec<u8>>);

impl Memory {
    fn new(image: &Vmcs12) -> Self {
        let memory = Self(RefCell::new(vec![0; SIZE]));
        let put = |at, bytes: &[u8]| memory.write(Gpa(at), bytes).unwrap();
        let revision = image.header();
        put(REGION, image.as_bytes());
        put(VMXON, &revision.to_le_bytes());
        put(SHADOW, &(revision | 1 << 31).to_le_bytes());
        put(OTHER, &revision.to_le_bytes());
        let good = [0x6001u64, 0x7e19, 0x1e6, 0];
        let wrong = [0x6001u64, 0x7021, 0x8001, 0x9003];
        for (at, (good, wrong)) in (0..).step_by(8).zip(good.into_iter().zip(wrong)) {
            put(PAGE_DIRECTORIES + at, &good.to_le_bytes());
            put(PAGE_DIRECTORIES + 0x1000 + at, &wrong.to_le_bytes());
        }
        put(APIC_PAGE + 0x80, &[0x50]);
        memory
    }
}

impl GuestMemory for Memory {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        let at = usize::try_from(at.0).map_err(|_| Outside)?;
        let end = at.checked_add(into.len()).ok_or(Outside)?;
        into.copy_from_slice(self.0.borrow().get(at..end).ok_or(Outside)?);
        Ok(())
    }

    fn write(&self, at: Gpa, from: &[u8]) -> Result<(), Outside> {
        let at = usize::try_from(at.0).map_err(|_| Outside)?;
        let end = at.checked_add(from.len()).ok_or(Outside)?;
        self.0.borrow_mut().get_mut(at..end).ok_or(Outside)?.copy_from_slice(from);
        Ok(())
    }

    fn exchange(&self, at: Gpa, old: u64, new: u64) -> Result<bool, Outside> {
        let same = self.read_u64(at)? == old;
        if same {
            self.write(at, &new.to_le_bytes())?;
        }
        Ok(same)
    }
}

impl L1 for Memory {
    fn read_linear(&mut self, at: u64, into: &mut [u8]) -> Result<(), Stop> {
        self.read(Gpa(at), into).map_err(|_| Stop::Fault(Exception::pf(at, 0)))
    }

    fn write_linear(&mut self, at: u64, from: &[u8]) -> Result<(), Stop> {
        self.write(Gpa(at), from).map_err(|_| Stop::Fault(Exception::pf(at, 2)))
    }
}

/// What all bases have in common.
pub const LIMITS: Limits = Limits {
    physical_bits: 40,
    linear_bits: 48,
    efer: 0xd01,
    perf_global_ctrl: 0x7_0000_000f,
    debugctl: 3,
    long_mode: true,
    smm: false,
    x2apic: false,
};

pub fn capabilities() -> Capabilities {
    Capabilities::compute(&EVERYTHING, &Offer::WHOLE)
}

/// L1 in its kernel. A 32-bit L1 is only one by [`Limits`]: its VMWRITE would write halves.
const CPU: Cpu = Cpu {
    cr0: 0x8005_0033,
    cr4: 0x2020,
    long_mode: true,
    is_64_bit: true,
    vm86: false,
    cpl: 0,
    blocked_by_mov_ss: false,
    feature_control: 5,
};

/// L0's part of every composition.
const L0: merge::L0 = merge::L0 {
    pin: PinControls::from_bits_retain(0x3f),
    primary: ProcControls::HLT.union(ProcControls::SECONDARY),
    secondary: ProcControls2::EPT.union(ProcControls2::VPID),
    exit: ExitControls::HOST_64,
    entry: EntryControls::LOAD_EFER,
    exceptions: 0,
    page_faults: false,
    cr0_ones: 0x20,
    cr0_mask: 0x6000_0020,
    cr4_ones: 0x2000,
    cr4_mask: 0x2000,
    tsc: Tsc { multiplier: 1 << 48, offset: 77 },
    preemption_timer: None,
    vpid: 9,
    pages: Pages {
        virtual_apic: None,
        apic_access: None,
        posted_interrupts: None,
        msr_bitmap: Some(Hpa(0x1000)),
        exit_tsc: None,
    },
    efer: 0xd01,
    dr7: 0x401,
    debugctl: 0,
    pat: 0x0007_0406_0007_0406,
};

/// A VMCS of the hardware's, by encodings without the bits that none has set.
struct Hardware(Vec<u64>);

const fn slot(encoding: u32) -> usize {
    ((encoding >> 13 & 3) << 7 | (encoding >> 10 & 3) << 5 | encoding >> 1 & 31) as usize
}

impl Fields for Hardware {
    fn set<W: Width>(&mut self, field: Field<W, ReadWrite>, value: W::Value) {
        self.0[slot(field.encoding())] = value.into();
    }
}

impl Exit for Hardware {
    fn get<W: Width, A>(&self, field: Field<W, A>) -> W::Value {
        W::from_raw(self.0[slot(field.encoding())])
    }
}

/// One vCPU whose current VMCS is about to be entered.
pub struct Guest {
    machine: Machine,
    memory: Memory,
    hardware: Hardware,
    limits: Limits,
    known: Known,
}

impl Guest {
    /// The image lies in L1's memory and is loaded: nothing of it was checked before.
    pub fn new(base: &Base, image: &Vmcs12) -> Self {
        let known = Known {
            activity: base.activity(),
            cr0_mask: L0.cr0_mask,
            cr4_mask: L0.cr4_mask,
            preemption_timer: 0,
            pat: L0.pat,
            efer: base.efer(),
            debugctl: 0,
        };
        let mut guest = Self {
            machine: Machine::new(capabilities()),
            memory: Memory::new(image),
            hardware: Hardware(vec![0; 512]),
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
                self.hardware.0[slot(field::EXIT_REASON.encoding())] = 10;
                let report = Report::of(&self.hardware);
                self.machine.leave(&self.hardware, &report, &self.known, &self.memory);
                End::Runs
            }
        }
    }
}
