//! Command numbers. Direction, size of the argument, type (0xAE) and number are packed as in
//! `<asm-generic/ioctl.h>`; the same number stands for different commands on different kinds of
//! files.

use super::{
    clock::*, cpuid::*, debug::*, device::*, event::*, irqchip::*, memory::*, msr::*, registers::*,
    vcpu_state::*,
};

/// The type byte of every KVM command.
pub const KVMIO: u32 = 0xAE;

const WRITE: u32 = 1;
const READ: u32 = 2;

/// Packs a command number. The size field has 14 bits; a larger type does not compile when used in
/// a constant.
const fn command(direction: u32, number: u32, size: usize) -> u32 {
    assert!(size < 1 << 14);
    direction << 30 | (size as u32) << 16 | KVMIO << 8 | number
}

const fn io(number: u32) -> u32 {
    command(0, number, 0)
}

const fn ior<T>(number: u32) -> u32 {
    command(READ, number, size_of::<T>())
}

const fn iow<T>(number: u32) -> u32 {
    command(WRITE, number, size_of::<T>())
}

const fn iowr<T>(number: u32) -> u32 {
    command(READ | WRITE, number, size_of::<T>())
}

/// The type byte of any command.
pub const fn type_of(cmd: u32) -> u32 {
    cmd >> 8 & 0xff
}

// Commands of /dev/kvm.

pub const GET_API_VERSION: u32 = io(0x00);
pub const CREATE_VM: u32 = io(0x01);
pub const GET_MSR_INDEX_LIST: u32 = iowr::<KvmMsrList>(0x02);
pub const CHECK_EXTENSION: u32 = io(0x03);
pub const GET_VCPU_MMAP_SIZE: u32 = io(0x04);
pub const GET_SUPPORTED_CPUID: u32 = iowr::<KvmCpuid2>(0x05);
pub const GET_EMULATED_CPUID: u32 = iowr::<KvmCpuid2>(0x09);
pub const GET_MSR_FEATURE_INDEX_LIST: u32 = iowr::<KvmMsrList>(0x0a);

// Commands of a VM file.

pub const CREATE_VCPU: u32 = io(0x41);
pub const GET_DIRTY_LOG: u32 = iow::<KvmDirtyLog>(0x42);
pub const SET_NR_MMU_PAGES: u32 = io(0x44);
pub const GET_NR_MMU_PAGES: u32 = io(0x45);
pub const SET_USER_MEMORY_REGION: u32 = iow::<KvmUserspaceMemoryRegion>(0x46);
pub const SET_TSS_ADDR: u32 = io(0x47);
pub const SET_IDENTITY_MAP_ADDR: u32 = iow::<u64>(0x48);
pub const SET_USER_MEMORY_REGION2: u32 = iow::<KvmUserspaceMemoryRegion2>(0x49);
pub const CREATE_IRQCHIP: u32 = io(0x60);
pub const IRQ_LINE: u32 = iow::<KvmIrqLevel>(0x61);
pub const GET_IRQCHIP: u32 = iowr::<KvmIrqchip>(0x62);
pub const SET_IRQCHIP: u32 = ior::<KvmIrqchip>(0x63);
pub const CREATE_PIT: u32 = io(0x64);
pub const GET_PIT: u32 = iowr::<KvmPitState>(0x65);
pub const SET_PIT: u32 = ior::<KvmPitState>(0x66);
pub const IRQ_LINE_STATUS: u32 = iowr::<KvmIrqLevel>(0x67);
pub const REGISTER_COALESCED_MMIO: u32 = iow::<KvmCoalescedMmioZone>(0x67);
pub const UNREGISTER_COALESCED_MMIO: u32 = iow::<KvmCoalescedMmioZone>(0x68);
pub const SET_GSI_ROUTING: u32 = iow::<KvmIrqRouting>(0x6a);
pub const REINJECT_CONTROL: u32 = io(0x71);
pub const IRQFD: u32 = iow::<KvmIrqfd>(0x76);
pub const CREATE_PIT2: u32 = iow::<KvmPitConfig>(0x77);
pub const SET_BOOT_CPU_ID: u32 = io(0x78);
pub const IOEVENTFD: u32 = iow::<KvmIoeventfd>(0x79);
pub const SET_CLOCK: u32 = iow::<KvmClockData>(0x7b);
pub const GET_CLOCK: u32 = ior::<KvmClockData>(0x7c);
pub const GET_PIT2: u32 = ior::<KvmPitState2>(0x9f);
pub const SET_PIT2: u32 = iow::<KvmPitState2>(0xa0);
pub const SIGNAL_MSI: u32 = iow::<KvmMsi>(0xa5);
pub const CLEAR_DIRTY_LOG: u32 = iowr::<KvmClearDirtyLog>(0xc0);
pub const X86_SET_MSR_FILTER: u32 = iow::<KvmMsrFilter>(0xc6);
pub const X86_SET_MSR_FILTER_COMPAT: u32 = iow::<KvmMsrFilterCompat>(0xc6);

// Commands of a vCPU file.

pub const RUN: u32 = io(0x80);
pub const GET_REGS: u32 = ior::<KvmRegs>(0x81);
pub const SET_REGS: u32 = iow::<KvmRegs>(0x82);
pub const GET_SREGS: u32 = ior::<KvmSregs>(0x83);
pub const SET_SREGS: u32 = iow::<KvmSregs>(0x84);
pub const TRANSLATE: u32 = iowr::<KvmTranslation>(0x85);
pub const INTERRUPT: u32 = iow::<KvmInterrupt>(0x86);
pub const SET_CPUID: u32 = iow::<KvmCpuid>(0x8a);
pub const SET_SIGNAL_MASK: u32 = iow::<KvmSignalMask>(0x8b);
pub const GET_FPU: u32 = ior::<KvmFpu>(0x8c);
pub const SET_FPU: u32 = iow::<KvmFpu>(0x8d);
pub const GET_LAPIC: u32 = ior::<KvmLapicState>(0x8e);
pub const SET_LAPIC: u32 = iow::<KvmLapicState>(0x8f);
pub const SET_CPUID2: u32 = iow::<KvmCpuid2>(0x90);
pub const GET_CPUID2: u32 = iowr::<KvmCpuid2>(0x91);
pub const TPR_ACCESS_REPORTING: u32 = iowr::<KvmTprAccessCtl>(0x92);
pub const SET_VAPIC_ADDR: u32 = iow::<KvmVapicAddr>(0x93);
pub const GET_MP_STATE: u32 = ior::<KvmMpState>(0x98);
pub const SET_MP_STATE: u32 = iow::<KvmMpState>(0x99);
pub const NMI: u32 = io(0x9a);
pub const SET_GUEST_DEBUG: u32 = iow::<KvmGuestDebug>(0x9b);
pub const X86_SETUP_MCE: u32 = iow::<u64>(0x9c);
pub const X86_SET_MCE: u32 = iow::<KvmX86Mce>(0x9e);
pub const GET_VCPU_EVENTS: u32 = ior::<KvmVcpuEvents>(0x9f);
pub const SET_VCPU_EVENTS: u32 = iow::<KvmVcpuEvents>(0xa0);
pub const GET_DEBUGREGS: u32 = ior::<KvmDebugregs>(0xa1);
pub const SET_DEBUGREGS: u32 = iow::<KvmDebugregs>(0xa2);
pub const GET_XSAVE: u32 = ior::<KvmXsave>(0xa4);
pub const SET_XSAVE: u32 = iow::<KvmXsave>(0xa5);
pub const GET_XCRS: u32 = ior::<KvmXcrs>(0xa6);
pub const SET_XCRS: u32 = iow::<KvmXcrs>(0xa7);
pub const GET_ONE_REG: u32 = iow::<KvmOneReg>(0xab);
pub const SET_ONE_REG: u32 = iow::<KvmOneReg>(0xac);
pub const KVMCLOCK_CTRL: u32 = io(0xad);
pub const GET_REG_LIST: u32 = iowr::<KvmRegList>(0xb0);
pub const SMI: u32 = io(0xb7);
pub const GET_NESTED_STATE: u32 = iowr::<KvmNestedState>(0xbe);
pub const SET_NESTED_STATE: u32 = iow::<KvmNestedState>(0xbf);
pub const GET_SREGS2: u32 = ior::<KvmSregs2>(0xcc);
pub const SET_SREGS2: u32 = iow::<KvmSregs2>(0xcd);
pub const GET_XSAVE2: u32 = ior::<KvmXsave>(0xcf);

// Commands of more than one kind of file.

pub const GET_MSRS: u32 = iowr::<KvmMsrs>(0x88);
pub const SET_MSRS: u32 = iow::<KvmMsrs>(0x89);
pub const X86_GET_MCE_CAP_SUPPORTED: u32 = ior::<u64>(0x9d);
pub const SET_TSC_KHZ: u32 = io(0xa2);
pub const GET_TSC_KHZ: u32 = io(0xa3);
pub const ENABLE_CAP: u32 = iow::<KvmEnableCap>(0xa3);
pub const GET_SUPPORTED_HV_CPUID: u32 = iowr::<KvmCpuid2>(0xc1);
pub const GET_STATS_FD: u32 = io(0xce);
pub const CREATE_DEVICE: u32 = iowr::<KvmCreateDevice>(0xe0);
pub const SET_DEVICE_ATTR: u32 = iow::<KvmDeviceAttr>(0xe1);
pub const GET_DEVICE_ATTR: u32 = iow::<KvmDeviceAttr>(0xe2);
pub const HAS_DEVICE_ATTR: u32 = iow::<KvmDeviceAttr>(0xe3);
