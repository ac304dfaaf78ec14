//! A VM and its vCPUs, created in the order in which Firecracker and QEMU do it.

use anyhow::{Context, Result};
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Cap, VcpuFd, VmFd};

use super::cpuid::{self, Topology};
use super::hypervisor::Hypervisor;
use super::memory::{self, GuestMemory};

/// Three pages for VMX's real mode, below the BIOS that we do not have (KVM API §4.37).
const TSS_ADDRESS: usize = 0xfffb_d000;
/// One page of page table for VMX's real mode (KVM API §4.41).
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// Which interrupt controllers the kernel emulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Irqchip {
    /// None: the local APIC is absent and HLT leaves to user space.
    None,
    /// PIC, I/O APIC and local APICs.
    Kernel,
    /// Those, and the PIT.
    KernelWithPit,
}

/// A VM. Its guest memory lives as long as it does.
pub struct Vm {
    pub fd: VmFd,
    pub memory: GuestMemory,
    irqchip: Irqchip,
    vcpus: u32,
}

impl Vm {
    /// Creates a VM of `vcpus` vCPUs over `memory`.
    pub fn new(
        hypervisor: &Hypervisor,
        irqchip: Irqchip,
        memory: GuestMemory,
        vcpus: u32,
    ) -> Result<Self> {
        let fd = hypervisor.kvm.create_vm().context("KVM_CREATE_VM failed")?;
        if hypervisor.has(Cap::SetIdentityMapAddr) {
            fd.set_identity_map_address(IDENTITY_MAP_ADDRESS)
                .context("KVM_SET_IDENTITY_MAP_ADDR failed")?;
        }
        if hypervisor.has(Cap::SetTssAddr) {
            fd.set_tss_address(TSS_ADDRESS).context("KVM_SET_TSS_ADDR failed")?;
        }
        if irqchip != Irqchip::None {
            fd.create_irq_chip().context("KVM_CREATE_IRQCHIP failed")?;
        }
        if irqchip == Irqchip::KernelWithPit {
            let config = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
            fd.create_pit2(config).context("KVM_CREATE_PIT2 failed")?;
        }
        memory::register(&fd, &memory, 0)?;
        Ok(Self { fd, memory, irqchip, vcpus })
    }

    /// Creates vCPU `id` and gives it its CPUID.
    pub fn create_vcpu(&self, hypervisor: &Hypervisor, id: u32) -> Result<VcpuFd> {
        let vcpu = self
            .fd
            .create_vcpu(u64::from(id))
            .with_context(|| format!("KVM_CREATE_VCPU failed for vCPU {id}"))?;
        let topology = Topology { apic_id: id, vcpus: self.vcpus };
        let cpuid = cpuid::of_guest(hypervisor, self.irqchip != Irqchip::None, topology);
        vcpu.set_cpuid2(&cpuid).context("KVM_SET_CPUID2 failed")?;
        Ok(vcpu)
    }
}
