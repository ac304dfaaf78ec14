//! Commands of a VM file (KVM API §4, "vm ioctl").

use super::ops::{Irqchip, VmOps};
use super::{Reply, UNKNOWN, interrupts, memory, msr_filter, setting};
use crate::caps::check_extension;
use crate::errno::Errno;
use crate::uapi::clock::{CLOCK_VALID_FLAGS, KvmClockData};
use crate::uapi::device::KvmCreateDevice;
use crate::uapi::ioctl;
use crate::uapi::irqchip::PIT_SPEAKER_DUMMY;
use crate::user;

/// Highest address at which three pages end below 4 GiB.
const TSS_ADDR_MAX: u64 = (1 << 32) - 3 * x86::addr::PAGE_SIZE;
/// Fewest pages of shadow tables that may be asked for.
const MIN_MMU_PAGES: u64 = 64;

/// The same of a 32-bit process, whose pointers make other structures: a command with a number of
/// its own, or one of which only half of a pointer is user space's.
pub fn vm_compat<V: VmOps>(file: &V, cmd: u32, arg: u64) -> Reply {
    if !file.belongs_to_caller() {
        return Err(Errno::EIO);
    }
    match cmd {
        ioctl::X86_SET_MSR_FILTER_COMPAT => msr_filter::set_compat(file, arg),
        ioctl::GET_DIRTY_LOG => memory::dirty_log(file, arg, user::Pointers::Bits32),
        ioctl::CLEAR_DIRTY_LOG => memory::clear_dirty_log(file, arg, user::Pointers::Bits32),
        cmd => vm(file, cmd, arg),
    }
}

/// A command of a VM file. `EIO` from another process than the one that made the VM.
pub fn vm<V: VmOps>(vm: &V, cmd: u32, arg: u64) -> Reply {
    if !vm.belongs_to_caller() {
        return Err(Errno::EIO);
    }
    match cmd {
        ioctl::CREATE_VCPU => create_vcpu(vm, arg),
        ioctl::CHECK_EXTENSION => Ok(check_extension(vm.offer(), arg)),
        ioctl::ENABLE_CAP => setting::enable(vm, arg),

        ioctl::SET_USER_MEMORY_REGION => memory::set_region(vm, arg),
        ioctl::SET_USER_MEMORY_REGION2 => memory::set_region2(vm, arg),
        ioctl::GET_DIRTY_LOG => memory::dirty_log(vm, arg, user::Pointers::Bits64),
        ioctl::CLEAR_DIRTY_LOG => memory::clear_dirty_log(vm, arg, user::Pointers::Bits64),
        ioctl::REGISTER_COALESCED_MMIO => memory::coalesce(vm, arg, true),
        ioctl::UNREGISTER_COALESCED_MMIO => memory::coalesce(vm, arg, false),

        ioctl::IRQ_LINE => interrupts::irq_line(vm, arg, false),
        ioctl::IRQ_LINE_STATUS => interrupts::irq_line(vm, arg, true),
        ioctl::SIGNAL_MSI => interrupts::signal_msi(vm, arg),
        ioctl::IOEVENTFD => interrupts::ioeventfd(vm, arg),
        ioctl::IRQFD => interrupts::irqfd(vm, arg),
        ioctl::SET_GSI_ROUTING => interrupts::set_routes(vm, arg),
        ioctl::CREATE_IRQCHIP => done(vm.create_irqchip()),
        ioctl::GET_IRQCHIP => interrupts::get_irqchip(vm, arg),
        ioctl::SET_IRQCHIP => interrupts::set_irqchip(vm, arg),
        ioctl::CREATE_PIT => done(vm.create_pit(PIT_SPEAKER_DUMMY)),
        ioctl::CREATE_PIT2 => interrupts::create_pit2(vm, arg),
        ioctl::GET_PIT => interrupts::get_pit(vm, arg),
        ioctl::SET_PIT => interrupts::set_pit(vm, arg),
        ioctl::GET_PIT2 => interrupts::get_pit2(vm, arg),
        ioctl::SET_PIT2 => interrupts::set_pit2(vm, arg),
        ioctl::REINJECT_CONTROL => interrupts::reinject_control(vm, arg),

        ioctl::SET_TSS_ADDR => set_tss_addr(vm, arg),
        ioctl::SET_IDENTITY_MAP_ADDR => set_identity_map_addr(vm, arg),
        ioctl::SET_BOOT_CPU_ID => set_boot_cpu_id(vm, arg),
        ioctl::SET_NR_MMU_PAGES if arg < MIN_MMU_PAGES => Err(Errno::EINVAL),
        ioctl::SET_NR_MMU_PAGES => done(vm.set_nr_mmu_pages(arg)),

        ioctl::GET_CLOCK => done(user::write(arg, &vm.clock())),
        ioctl::SET_CLOCK => set_clock(vm, arg),
        ioctl::GET_TSC_KHZ => Ok(vm.tsc_khz() as i32),
        ioctl::SET_TSC_KHZ => set_tsc_khz(vm, arg),

        ioctl::GET_STATS_FD => vm.stats_file(),
        ioctl::X86_SET_MSR_FILTER => msr_filter::set(vm, arg),
        ioctl::CREATE_DEVICE => create_device(arg),
        _ => Err(UNKNOWN),
    }
}

fn done(result: Result<(), Errno>) -> Reply {
    result.map(|()| 0)
}

fn create_vcpu<V: VmOps>(vm: &V, id: u64) -> Reply {
    match u32::try_from(id) {
        Ok(id) if id < vm.offer().max_vcpu_id => vm.create_vcpu(id),
        _ => Err(Errno::EINVAL),
    }
}

fn set_tss_addr<V: VmOps>(vm: &V, addr: u64) -> Reply {
    match u32::try_from(addr) {
        Ok(low) if addr <= TSS_ADDR_MAX => done(vm.set_tss_addr(low)),
        _ => Err(Errno::EINVAL),
    }
}

fn set_identity_map_addr<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let addr: u64 = user::read(arg)?;
    done(vm.set_identity_map_addr(addr))
}

fn set_boot_cpu_id<V: VmOps>(vm: &V, id: u64) -> Reply {
    // Looked at again by the VM under its lock; here only so that the errors come in order.
    if vm.created_vcpus() != 0 {
        return Err(Errno::EBUSY);
    }
    match u32::try_from(id) {
        Ok(id) if id <= vm.offer().max_vcpu_id => done(vm.set_boot_cpu_id(id)),
        _ => Err(Errno::EINVAL),
    }
}

fn set_clock<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let data: KvmClockData = user::read(arg)?;
    if data.flags & !CLOCK_VALID_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    done(vm.set_clock(&data))
}

fn set_tsc_khz<V: VmOps>(vm: &V, arg: u64) -> Reply {
    done(vm.set_tsc_khz(super::state::requested_tsc_khz(vm.offer(), arg)?))
}

/// There is no kind of device yet, known or unknown.
fn create_device(arg: u64) -> Reply {
    let _: KvmCreateDevice = user::read(arg)?;
    Err(Errno::ENODEV)
}

/// Whether a VM has local APICs of ours.
pub(super) fn has_lapic(irqchip: Irqchip) -> bool {
    irqchip != Irqchip::None
}
