//! A guest with memory of its own for system-management mode: address space 1, which has SMRAM where
//! the ordinary one has memory, and the same as that everywhere else (KVM API §4.35, APM vol. 2 §10).

use kvm_bindings::*;

use super::guest::{Chip, Guest, Mode};
use super::layout::MEMORY_BYTES;
use super::memory::Memory;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::outcome::{Answer, Outcome, equal};

/// SMBASE after reset.
pub const SMBASE: u64 = 0x3_0000;
/// Bytes of SMRAM, from SMBASE.
pub const SMRAM_BYTES: u64 = 0x1_0000;
/// Where the handler lies in SMRAM.
pub const HANDLER: u64 = 0x8000;
/// MSR_IA32_SMBASE.
pub const MSR_SMBASE: u32 = 0x9e;
/// Bit 16 of a slot's id: address space 1.
pub const SPACE_1: u32 = 1 << 16;
/// The slot of SMRAM.
pub const SMRAM_SLOT: u32 = SPACE_1 | 7;

/// A guest and its SMRAM.
pub struct SmmGuest {
    pub guest: Guest,
    pub smram: Memory,
}

impl SmmGuest {
    /// A guest in 64-bit mode whose handler is `handler`, 16-bit code.
    pub fn new(chip: Chip, program: &[u8], handler: &[u8]) -> Outcome<Self> {
        Self::over(Guest::with_vcpus(chip, Mode::Long, 1, program)?, handler)
    }

    /// Gives a guest SMRAM.
    pub fn over(guest: Guest, handler: &[u8]) -> Outcome<Self> {
        guest.system.require(KVM_CAP_X86_SMM, "KVM_CAP_X86_SMM")?;
        let this = Self { guest, smram: Memory::new(SMRAM_BYTES)? };
        this.smram.write_bytes(HANDLER, handler);
        this.place()?;
        Ok(this)
    }

    fn place(&self) -> Outcome {
        let (vm, hva) = (&self.guest.vm, self.guest.memory.hva());
        let above = SMBASE + SMRAM_BYTES;
        let slot = |id, gpa, bytes, hva| {
            vm.set_slot(id, 0, gpa, bytes, hva).granted("a slot of address space 1").map(drop)
        };
        slot(SPACE_1, 0, SMBASE, hva)?;
        slot(SMRAM_SLOT, SMBASE, SMRAM_BYTES, self.smram.hva())?;
        slot(SPACE_1 | 1, above, MEMORY_BYTES - above, hva + above)
    }

    /// A word of the save area, by its offset from SMBASE.
    pub fn saved(&self, offset: u64) -> u64 {
        self.smram.read(offset)
    }

    /// KVM_SMI.
    pub fn smi(&self) -> Outcome {
        self.guest.vcpu().call(ioctl::SMI, 0).granted("KVM_SMI").map(drop)
    }

    /// KVM_GET_VCPU_EVENTS.
    pub fn events(&self) -> Outcome<kvm_vcpu_events> {
        events(self.guest.vcpu())
    }

    /// KVM_SET_VCPU_EVENTS.
    pub fn set_events(&self, events: &kvm_vcpu_events) -> Outcome {
        let vcpu = self.guest.vcpu();
        vcpu.send(ioctl::SET_VCPU_EVENTS, events).granted("KVM_SET_VCPU_EVENTS").map(drop)
    }

    /// An interrupt message of some delivery mode for the first vCPU.
    pub fn message(&self, delivery: u32) -> Outcome {
        let msi = kvm_msi { address_lo: 0xfee0_0000, data: delivery << 8, ..Default::default() };
        let delivered = self.guest.vm.send(ioctl::SIGNAL_MSI, &msi).granted("KVM_SIGNAL_MSI")?;
        equal("vCPUs that took the message", delivered, 1)
    }
}

/// KVM_GET_VCPU_EVENTS.
pub fn events(vcpu: &Vcpu) -> Outcome<kvm_vcpu_events> {
    vcpu.receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")
}

/// Whether `kvm_run.flags` says that the vCPU is in system-management mode.
pub fn in_smm(vcpu: &Vcpu) -> bool {
    // SAFETY: a field of the mapped page.
    unsafe { (&raw const (*vcpu.page()).flags).read_volatile() & KVM_RUN_X86_SMM as u16 != 0 }
}
