//! What commands of a VM file do beside asking [`VmOps`]: the VM itself and its time.

use super::ops::{VmOps, requested_tsc_khz};
use super::{Done, Reply};
use crate::caps::check_extension;
use crate::errno::Errno;
use crate::uapi::capability::CAP_X86_APIC_BUS_CYCLES_NS;
use crate::uapi::clock::{CLOCK_VALID_FLAGS, KvmClockData};
use crate::uapi::device::KvmCreateDevice;
use crate::user;

/// Highest address at which three pages end below 4 GiB.
const TSS_ADDR_MAX: u64 = (1 << 32) - 3 * x86::addr::PAGE_SIZE;
/// Fewest pages of shadow tables that may be asked for.
const MIN_MMU_PAGES: u64 = 64;

/// KVM_CHECK_EXTENSION on a VM: what was set of it, of a capability that has a value.
pub fn vm_extension(vm: &impl VmOps, capability: u64) -> i32 {
    // The one capability whose answer a VM's own setting changes.
    if capability == u64::from(CAP_X86_APIC_BUS_CYCLES_NS) {
        // A negative answer would be an errno.
        return vm.bus_cycle_ns().min(i32::MAX as u32) as i32;
    }
    check_extension(vm.offer(), capability)
}

/// KVM_CREATE_VCPU: makes a vCPU and its file (KVM API §4.7).
pub fn create_vcpu<V: VmOps>(vm: &V, id: u64) -> Reply {
    match u32::try_from(id) {
        // What can be said without the lock. The limit that the VMM has set is looked at under it.
        Ok(id) if id < vm.offer().max_vcpu_id => vm.create_vcpu(id),
        _ => Err(Errno::EINVAL),
    }
}

/// KVM_SET_TSS_ADDR: where the three pages of real mode under VMX lie (KVM API §4.36).
pub fn set_tss_addr<V: VmOps>(vm: &V, addr: u64) -> Done {
    match u32::try_from(addr) {
        // All three pages below 4 GiB, as in stock KVM.
        Ok(low) if addr <= TSS_ADDR_MAX => vm.set_tss_addr(low),
        _ => Err(Errno::EINVAL),
    }
}

/// KVM_SET_IDENTITY_MAP_ADDR: where the page table of real mode under VMX lies (KVM API §4.40).
pub fn set_identity_map_addr<V: VmOps>(vm: &V, arg: u64) -> Done {
    let addr: u64 = user::read(arg)?;
    vm.set_identity_map_addr(addr)
}

/// KVM_SET_BOOT_CPU_ID: which vCPU boots (KVM API §4.41).
pub fn set_boot_cpu_id<V: VmOps>(vm: &V, id: u64) -> Done {
    // Looked at again by the VM under its lock; here only so that the errors come in order.
    if vm.created_vcpus() != 0 {
        return Err(Errno::EBUSY);
    }
    match u32::try_from(id) {
        Ok(id) if id <= vm.offer().max_vcpu_id => vm.set_boot_cpu_id(id),
        _ => Err(Errno::EINVAL),
    }
}

/// KVM_SET_NR_MMU_PAGES: how many shadow pages there may be.
pub fn set_nr_mmu_pages<V: VmOps>(vm: &V, pages: u64) -> Done {
    if pages < MIN_MMU_PAGES {
        return Err(Errno::EINVAL);
    }
    vm.set_nr_mmu_pages(pages)
}

/// KVM_SET_CLOCK: sets the clock of kvmclock (KVM API §4.30).
pub fn set_clock<V: VmOps>(vm: &V, arg: u64) -> Done {
    let data: KvmClockData = user::read(arg)?;
    // Also flags that ask for nothing are valid: what KVM_GET_CLOCK gave is given back.
    if data.flags & !CLOCK_VALID_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    vm.set_clock(&data)
}

/// KVM_SET_TSC_KHZ on a VM: the TSC frequency of vCPUs to come (KVM API §4.55).
pub fn set_tsc_khz<V: VmOps>(vm: &V, arg: u64) -> Done {
    vm.set_tsc_khz(requested_tsc_khz(vm.offer(), arg)?)
}

/// KVM_CREATE_DEVICE. There is no kind of device yet, known or unknown.
pub fn create_device(arg: u64) -> Reply {
    // Read for the error alone: EFAULT goes before ENODEV.
    let _: KvmCreateDevice = user::read(arg)?;
    Err(Errno::ENODEV)
}
