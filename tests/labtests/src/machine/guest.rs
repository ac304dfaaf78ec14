//! A VM with a program of ours, and how to run it to its end.

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_regs};

use super::layout::*;
use super::memory::Memory;
use super::{handlers, tables};
use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, CpuidTable, System, Vm};
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, fail};

/// Which interrupt controllers the kernel emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chip {
    None,
    /// The local APICs; the VMM's I/O APIC has [`SPLIT_PINS`] pins.
    Split,
    Kernel,
    KernelAndPit,
}

/// Routes that [`Chip::Split`] keeps for the VMM's I/O APIC.
pub const SPLIT_PINS: u32 = 24;

/// In which mode the vCPUs start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Real,
    Long,
}

/// A VM with memory from guest-physical 0.
pub struct Guest {
    pub vcpus: Vec<Vcpu>,
    pub vm: Vm,
    pub memory: Memory,
    pub system: System,
}

impl Guest {
    /// One vCPU in 64-bit mode that will run `code`.
    pub fn new(chip: Chip, code: &[u8]) -> Outcome<Self> {
        Self::with_vcpus(chip, Mode::Long, 1, code)
    }

    /// One vCPU in real mode that will run `code`, with flat data segments.
    pub fn real(code: &[u8]) -> Outcome<Self> {
        Self::with_vcpus(Chip::None, Mode::Real, 1, code)
    }

    /// A guest of `vcpus` vCPUs; they all are at the first byte of `code`, if they are not to wait for SIPI.
    pub fn with_vcpus(chip: Chip, mode: Mode, vcpus: u32, code: &[u8]) -> Outcome<Self> {
        Self::over(Memory::new(MEMORY_BYTES)?, chip, mode, vcpus, code)
    }

    /// A guest of `vcpus` vCPUs in a VM over a given memory.
    pub fn over(memory: Memory, chip: Chip, mode: Mode, vcpus: u32, code: &[u8]) -> Outcome<Self> {
        let system = System::open()?;
        let vm = system.create_vm()?;
        vm.call(ioctl::SET_TSS_ADDR, 0xfffb_d000).granted("KVM_SET_TSS_ADDR")?;
        if chip == Chip::Split {
            vm.split_irqchip(SPLIT_PINS.into()).granted("KVM_CAP_SPLIT_IRQCHIP")?;
        } else if chip != Chip::None {
            vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
        }
        if chip == Chip::KernelAndPit {
            let config = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
            vm.send(ioctl::CREATE_PIT2, &config).granted("KVM_CREATE_PIT2")?;
        }
        vm.set_slot(0, 0, 0, memory.bytes(), memory.hva()).granted("memory slot")?;
        memory.write_bytes(PROGRAM, code);
        if mode == Mode::Long {
            tables::write(&memory)?;
            memory.write(IS_INTEL, (oracle::vendor() == Vendor::Intel).into());
        }
        let mut cpuid = system.supported_cpuid()?;
        let mut guest = Self { vcpus: Vec::new(), vm, memory, system };
        for id in 0..vcpus {
            let vcpu = guest.vm.create_vcpu(id.into())?;
            personalise(&mut cpuid, id);
            vcpu.set_cpuid(&cpuid)?;
            guest.vcpus.push(vcpu);
            guest.place(id as usize, mode)?;
        }
        Ok(guest)
    }

    /// One vCPU in 64-bit mode that will run `code`, in a VM that has what it needs but memory and vCPUs.
    pub fn on(vm: Vm, code: &[u8]) -> Outcome<Self> {
        let (system, memory) = (System::open()?, Memory::new(MEMORY_BYTES)?);
        vm.set_slot(0, 0, 0, memory.bytes(), memory.hva()).granted("memory slot")?;
        memory.write_bytes(PROGRAM, code);
        tables::write(&memory)?;
        let mut cpuid = system.supported_cpuid()?;
        personalise(&mut cpuid, 0);
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid(&cpuid)?;
        let guest = Self { vcpus: vec![vcpu], vm, memory, system };
        guest.place(0, Mode::Long)?;
        Ok(guest)
    }

    /// Puts a vCPU at the first byte of the program.
    pub fn place(&self, index: usize, mode: Mode) -> Outcome {
        let vcpu = &self.vcpus[index];
        let sregs = vcpu.sregs()?;
        let stack = STACKS + (index as u64 + 1) * 0x1000;
        match mode {
            Mode::Long => {
                vcpu.set_sregs(&tables::long_mode(sregs))?;
                let start = kvm_regs { rip: PROGRAM, rsp: stack, rflags: 2, ..Default::default() };
                vcpu.set_regs(&start)
            }
            Mode::Real => {
                let mut sregs = sregs;
                sregs.cs.base = PROGRAM;
                sregs.cs.selector = (PROGRAM >> 4) as u16;
                for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
                    segment.base = 0;
                    segment.selector = 0;
                }
                vcpu.set_sregs(&sregs)?;
                let start = kvm_regs { rip: 0, rsp: 0x8000, rflags: 2, ..Default::default() };
                vcpu.set_regs(&start)
            }
        }
    }

    /// The first vCPU.
    pub fn vcpu(&self) -> &Vcpu {
        &self.vcpus[0]
    }

    /// Runs the first vCPU to its next exit.
    pub fn exit(&self) -> Outcome<Exit> {
        self.exit_of(0)
    }

    /// Runs a vCPU to its next exit. An exception that nobody asked for fails the test.
    pub fn exit_of(&self, index: usize) -> Outcome<Exit> {
        let exit = self.vcpus[index].run().granted("KVM_RUN")?;
        if exit.is_out(PORT_FAULT) {
            return fail(format!("expected no exception got {}", self.exception()));
        }
        Ok(exit)
    }

    /// Runs the first vCPU; its next exit has to be this one.
    pub fn expect(&self, what: &str, expected: Exit) -> Outcome {
        crate::outcome::equal(what, self.exit()?, expected)
    }

    /// Runs the first vCPU until it says that it is done, and takes no other exit.
    pub fn finish(&self) -> Outcome {
        self.finish_of(0)
    }

    /// Runs a vCPU until it says that it is done, and takes no other exit.
    pub fn finish_of(&self, index: usize) -> Outcome {
        match self.exit_of(index)? {
            exit if exit.is_out(PORT_DONE) => Ok(()),
            exit => {
                let rip = self.vcpus[index].regs()?.rip;
                fail(format!("expected the guest's end got {exit:x?} at rip {rip:#x}"))
            }
        }
    }

    /// Runs the first vCPU until it says that it has come to its mark.
    pub fn reach_mark(&self) -> Outcome {
        match self.exit()? {
            exit if exit.is_out(PORT_MARK) => Ok(()),
            exit => fail(format!("expected the guest's mark got {exit:x?}")),
        }
    }

    /// The nth word of what the guest left for us.
    pub fn result(&self, index: u64) -> u64 {
        self.memory.read(RESULT + index * 8)
    }

    /// The words that the guest left from the nth on, up to the first 0. A word that repeats the one
    /// before is left out: they are addresses of traps of single steps, and the lab's emulated Intel CPU
    /// traps once more when it enters a guest that single-steps, before the next instruction.
    pub fn steps(&self, first: u64) -> Vec<u64> {
        let mut words: Vec<u64> =
            (first..64).map(|index| self.result(index)).take_while(|&word| word != 0).collect();
        words.dedup();
        words
    }

    /// How many of the first 16 words that the guest left are this one.
    pub fn words_that_are(&self, value: u64) -> usize {
        (0..16).filter(|&index| self.result(index) == value).count()
    }

    /// How often `vector` came.
    pub fn count(&self, vector: u8) -> u64 {
        self.memory.read(COUNTS + u64::from(vector) * 8)
    }

    /// Whether `vector`, which the handlers cannot look up in the local APIC, came so often. The
    /// emulated CPU may double any of them; see `handlers.rs`.
    pub fn came(&self, vector: u8, times: u64) -> Outcome {
        let count = self.count(vector);
        let expected = format!("{times} times vector {vector:#x}, or copies of them");
        crate::outcome::holds(&expected, (times..=2 * times).contains(&count), count)
    }

    /// How many exceptions came, the last one's vector and its error code.
    pub fn faults(&self) -> (u64, u64, u64) {
        (self.memory.read(FAULTS), self.memory.read(VECTOR), self.memory.read(ERROR))
    }

    /// The last exception, in words.
    pub fn exception(&self) -> String {
        let word = |at| self.memory.read(at);
        format!(
            "{} ({}), error code {:#x}, at {:#x}, cr2 {:#x}",
            handlers::exception_name(word(VECTOR)),
            word(VECTOR),
            word(ERROR),
            word(FRAME_RIP),
            word(FRAME_CR2)
        )
    }
}

/// Tells a vCPU its own number, and that it has a TSC deadline timer (KVM API §4.46).
fn personalise(cpuid: &mut CpuidTable, id: u32) {
    for entry in cpuid.used() {
        match entry.function {
            1 => {
                entry.ebx = entry.ebx & 0x00ff_ffff | id << 24;
                entry.ecx |= 1 << 24 | 1 << 21;
            }
            0xb | 0x1f => entry.edx = id,
            _ => {}
        }
    }
}
