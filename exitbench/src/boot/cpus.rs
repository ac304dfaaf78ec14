//! The vCPUs of a Linux guest: the first stands at the kernel's entry, the others wait for INIT and
//! SIPI as after power-on.

use anyhow::{Context, Result};
use kvm_bindings::{Msrs, kvm_lapic_state, kvm_msr_entry, kvm_regs};
use kvm_ioctls::VcpuFd;

use super::linux;
use crate::vmm::cpuid::{Features, Topology, of_guest};
use crate::vmm::hypervisor::Hypervisor;
use crate::vmm::long_mode;
use crate::vmm::vm::Vm;

/// RFLAGS with interrupts disabled: the bit that is always set.
const RFLAGS: u64 = 2;

/// IA32_MISC_ENABLE, fast strings (SDM vol. 4).
const MISC_ENABLE: (u32, u64) = (0x1a0, 1);
/// IA32_MTRR_DEF_TYPE: enabled, write-back (SDM vol. 3A §11.11.2.1).
const MTRR_DEF_TYPE: (u32, u64) = (0x2ff, 0x806);

/// Local vector table entries (SDM vol. 3A §10.5.1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVERY_NMI: u32 = 4 << 8;
const DELIVERY_EXTERNAL: u32 = 7 << 8;

/// Creates all vCPUs; the first will start at `entry`.
pub fn create(hypervisor: &Hypervisor, vm: &Vm, cpus: u32, entry: u64) -> Result<Vec<VcpuFd>> {
    (0..cpus)
        .map(|id| {
            let vcpu = vm.create_vcpu(hypervisor, id)?;
            write_msrs(&vcpu)?;
            if id == 0 {
                let cpuid = of_guest(hypervisor, true, Topology { apic_id: 0, vcpus: cpus });
                start_at(&vcpu, entry, Features::of(&cpuid).no_execute)?;
            }
            wire_local_interrupts(&vcpu)?;
            Ok(vcpu)
        })
        .collect()
}

fn start_at(vcpu: &VcpuFd, entry: u64, no_execute: bool) -> Result<()> {
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rsi: linux::BOOT_PARAMETERS,
        rsp: linux::STACK_TOP,
        rbp: linux::STACK_TOP,
        rflags: RFLAGS,
        ..Default::default()
    })
    .context("KVM_SET_REGS failed")?;
    long_mode::enter(vcpu, linux::tables(), no_execute)
}

/// What firmware would set. A hypervisor that knows fewer MSRs sets fewer, and Linux manages.
fn write_msrs(vcpu: &VcpuFd) -> Result<()> {
    let entries = [MISC_ENABLE, MTRR_DEF_TYPE].map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    });
    let msrs = Msrs::from_entries(&entries).context("cannot list the MSRs")?;
    vcpu.set_msrs(&msrs).map(|_written| ()).context("KVM_SET_MSRS failed")
}

/// LINT0 brings the PIC's interrupts and LINT1 NMIs, as firmware leaves them.
fn wire_local_interrupts(vcpu: &VcpuFd) -> Result<()> {
    let mut lapic = vcpu.get_lapic().context("KVM_GET_LAPIC failed")?;
    set_delivery(&mut lapic, LVT_LINT0, DELIVERY_EXTERNAL);
    set_delivery(&mut lapic, LVT_LINT1, DELIVERY_NMI);
    vcpu.set_lapic(&lapic).context("KVM_SET_LAPIC failed")
}

fn set_delivery(lapic: &mut kvm_lapic_state, register: usize, delivery: u32) {
    // The mask bit stays clear: the entry delivers.
    for (place, byte) in lapic.regs[register..register + 4].iter_mut().zip(delivery.to_le_bytes()) {
        *place = byte as _;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_interrupt_gets_its_delivery_mode_unmasked() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LVT_LINT0 + 2] = 1; // masked
        set_delivery(&mut lapic, LVT_LINT0, DELIVERY_EXTERNAL);
        let bytes: Vec<u8> =
            lapic.regs[LVT_LINT0..LVT_LINT0 + 4].iter().map(|&b| b as u8).collect();
        assert_eq!(bytes, [0, 7, 0, 0]);
    }
}
