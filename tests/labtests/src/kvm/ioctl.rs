//! Command numbers, packed as in `<asm-generic/ioctl.h>` (KVM API §4).

use kvm_bindings::*;

const fn command(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xae << 8 | number
}

/// A command without an argument, or with a plain number.
pub const fn io(number: u64) -> u64 {
    command(0, number, 0)
}

/// A command that reads a `T` from the kernel.
pub const fn ior<T>(number: u64) -> u64 {
    command(2, number, size_of::<T>())
}

/// A command that hands the kernel a `T`.
pub const fn iow<T>(number: u64) -> u64 {
    command(1, number, size_of::<T>())
}

/// A command that does both.
pub const fn iowr<T>(number: u64) -> u64 {
    command(3, number, size_of::<T>())
}

pub const GET_API_VERSION: u64 = io(0x00);
pub const CREATE_VM: u64 = io(0x01);
pub const GET_MSR_INDEX_LIST: u64 = iowr::<kvm_msr_list>(0x02);
pub const CHECK_EXTENSION: u64 = io(0x03);
pub const GET_VCPU_MMAP_SIZE: u64 = io(0x04);
pub const GET_SUPPORTED_CPUID: u64 = iowr::<kvm_cpuid2>(0x05);
pub const GET_MSR_FEATURE_INDEX_LIST: u64 = iowr::<kvm_msr_list>(0x0a);

pub const CREATE_VCPU: u64 = io(0x41);
pub const GET_DIRTY_LOG: u64 = iow::<kvm_dirty_log>(0x42);
pub const SET_USER_MEMORY_REGION: u64 = iow::<kvm_userspace_memory_region>(0x46);
pub const SET_TSS_ADDR: u64 = io(0x47);
pub const SET_IDENTITY_MAP_ADDR: u64 = iow::<u64>(0x48);
pub const CREATE_IRQCHIP: u64 = io(0x60);
pub const SET_NR_MMU_PAGES: u64 = io(0x44);
pub const IRQ_LINE: u64 = iow::<kvm_irq_level>(0x61);
pub const GET_IRQCHIP: u64 = iowr::<kvm_irqchip>(0x62);
pub const SET_IRQCHIP: u64 = ior::<kvm_irqchip>(0x63);
pub const IRQ_LINE_STATUS: u64 = iowr::<kvm_irq_level>(0x67);
pub const REGISTER_COALESCED_MMIO: u64 = iow::<kvm_coalesced_mmio_zone>(0x67);
pub const UNREGISTER_COALESCED_MMIO: u64 = iow::<kvm_coalesced_mmio_zone>(0x68);
pub const SET_GSI_ROUTING: u64 = iow::<kvm_irq_routing>(0x6a);
pub const IRQFD: u64 = iow::<kvm_irqfd>(0x76);
pub const CREATE_PIT2: u64 = iow::<kvm_pit_config>(0x77);
pub const SET_BOOT_CPU_ID: u64 = io(0x78);
pub const IOEVENTFD: u64 = iow::<kvm_ioeventfd>(0x79);
pub const SET_CLOCK: u64 = iow::<kvm_clock_data>(0x7b);
pub const GET_CLOCK: u64 = ior::<kvm_clock_data>(0x7c);
pub const GET_PIT2: u64 = ior::<kvm_pit_state2>(0x9f);
pub const SET_PIT2: u64 = iow::<kvm_pit_state2>(0xa0);
pub const X86_SET_MSR_FILTER: u64 = iow::<kvm_msr_filter>(0xc6);
pub const ENABLE_CAP: u64 = iow::<kvm_enable_cap>(0xa3);
pub const SIGNAL_MSI: u64 = iow::<kvm_msi>(0xa5);

pub const GET_SUPPORTED_HV_CPUID: u64 = iowr::<kvm_cpuid2>(0xc1);
pub const GET_STATS_FD: u64 = io(0xce);

pub const RUN: u64 = io(0x80);
pub const GET_REGS: u64 = ior::<kvm_regs>(0x81);
pub const SET_REGS: u64 = iow::<kvm_regs>(0x82);
pub const GET_SREGS: u64 = ior::<kvm_sregs>(0x83);
pub const SET_SREGS: u64 = iow::<kvm_sregs>(0x84);
pub const TRANSLATE: u64 = iowr::<kvm_translation>(0x85);
pub const INTERRUPT: u64 = iow::<kvm_interrupt>(0x86);
pub const GET_MSRS: u64 = iowr::<kvm_msrs>(0x88);
pub const SET_MSRS: u64 = iow::<kvm_msrs>(0x89);
pub const SET_SIGNAL_MASK: u64 = iow::<kvm_signal_mask>(0x8b);
pub const GET_FPU: u64 = ior::<kvm_fpu>(0x8c);
pub const SET_FPU: u64 = iow::<kvm_fpu>(0x8d);
pub const GET_LAPIC: u64 = ior::<kvm_lapic_state>(0x8e);
pub const SET_LAPIC: u64 = iow::<kvm_lapic_state>(0x8f);
pub const SET_CPUID2: u64 = iow::<kvm_cpuid2>(0x90);
pub const GET_CPUID2: u64 = iowr::<kvm_cpuid2>(0x91);
pub const GET_MP_STATE: u64 = ior::<kvm_mp_state>(0x98);
pub const SET_MP_STATE: u64 = iow::<kvm_mp_state>(0x99);
pub const NMI: u64 = io(0x9a);
pub const SMI: u64 = io(0xb7);
pub const SET_GUEST_DEBUG: u64 = iow::<kvm_guest_debug>(0x9b);
pub const GET_VCPU_EVENTS: u64 = ior::<kvm_vcpu_events>(0x9f);
pub const SET_VCPU_EVENTS: u64 = iow::<kvm_vcpu_events>(0xa0);
pub const GET_DEBUGREGS: u64 = ior::<kvm_debugregs>(0xa1);
pub const SET_DEBUGREGS: u64 = iow::<kvm_debugregs>(0xa2);
pub const SET_TSC_KHZ: u64 = io(0xa2);
pub const GET_TSC_KHZ: u64 = io(0xa3);
pub const GET_XSAVE: u64 = ior::<kvm_xsave>(0xa4);
pub const SET_XSAVE: u64 = iow::<kvm_xsave>(0xa5);
pub const GET_XCRS: u64 = ior::<kvm_xcrs>(0xa6);
pub const SET_XCRS: u64 = iow::<kvm_xcrs>(0xa7);
pub const KVMCLOCK_CTRL: u64 = io(0xad);
pub const GET_NESTED_STATE: u64 = iowr::<[u64; 16]>(0xbe);
pub const SET_NESTED_STATE: u64 = iow::<[u64; 16]>(0xbf);
pub const GET_SREGS2: u64 = ior::<kvm_sregs2>(0xcc);
pub const SET_SREGS2: u64 = iow::<kvm_sregs2>(0xcd);
