//! Interrupt controllers, PIT, routes and eventfds of a VM (KVM API §4.24–4.28, §4.52, §4.59,
//! §4.70–4.72, §4.75).

use alloc::boxed::Box;

use super::Reply;
use super::ops::{Irqchip, VmOps};
use crate::errno::Errno;
use crate::uapi::event::*;
use crate::uapi::irqchip::*;
use crate::user;

/// KVM_IRQ_LINE: drives a GSI.
pub fn irq_line<V: VmOps>(vm: &V, arg: u64) -> Reply {
    drive_line(vm, arg)?;
    Ok(0)
}

/// KVM_IRQ_LINE_STATUS: drives a GSI, and says what came of it.
pub fn irq_line_status<V: VmOps>(vm: &V, arg: u64) -> Reply {
    // The whole structure back: the status has the place of the number.
    user::write(arg, &drive_line(vm, arg)?)?;
    Ok(0)
}

/// Drives the GSI that is asked for at `arg`. The question, with what came of it for the GSI.
fn drive_line<V: VmOps>(vm: &V, arg: u64) -> Result<KvmIrqLevel, Errno> {
    let line: KvmIrqLevel = user::read(arg)?;
    // Without controllers there is no line: ENXIO, as in stock KVM.
    if vm.irqchip() == Irqchip::None {
        return Err(Errno::ENXIO);
    }
    // The line has been set: EFAULT here does not take it back, in stock KVM neither.
    let status = vm.set_irq_line(line.irq, line.level != 0)?;
    Ok(KvmIrqLevel { irq: status as u32, ..line })
}

/// KVM_SIGNAL_MSI: sends a message to local APICs (KVM API §4.70).
pub fn signal_msi<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let msi: KvmMsi = user::read(arg)?;
    if vm.irqchip() == Irqchip::None || msi.flags & !MSI_VALID_DEVID != 0 {
        return Err(Errno::EINVAL);
    }
    vm.signal_msi(&msi)
}

/// KVM_SET_GSI_ROUTING: replaces all routes (KVM API §4.52).
pub fn set_routes<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let head: KvmIrqRouting = user::read(arg)?;
    // The count is the VMM's: bounded before so much is read.
    if vm.irqchip() == Irqchip::None || head.nr > MAX_IRQ_ROUTES || head.flags != 0 {
        return Err(Errno::EINVAL);
    }
    let routes: Box<[KvmIrqRoutingEntry]> =
        user::read_array(user::after::<KvmIrqRouting>(arg)?, head.nr as usize)?;
    for route in &routes {
        let flags = match route.type_ {
            IRQ_ROUTING_IRQCHIP => 0,
            IRQ_ROUTING_MSI => MSI_VALID_DEVID,
            // Xen's event channels, Hyper-V's SINTs and s390's adapters.
            _ => return Err(Errno::EINVAL),
        };
        // All entries before the first is used: a table is taken whole or not at all.
        if route.flags & !flags != 0 || route.gsi >= MAX_IRQ_ROUTES {
            return Err(Errno::EINVAL);
        }
    }
    vm.set_routes(&routes)?;
    Ok(0)
}

/// KVM_IOEVENTFD: an eventfd that a guest's write signals (KVM API §4.59).
pub fn ioeventfd<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let what: KvmIoeventfd = user::read(arg)?;
    // As in stock KVM nothing is checked here: what could not be assigned is not found.
    if what.flags & IOEVENTFD_FLAG_DEASSIGN != 0 {
        vm.deassign_ioeventfd(&what)?;
        return Ok(0);
    }
    // Both are the VMM's: a range that wraps would be met by addresses at the other end.
    let wraps = what.addr.checked_add(u64::from(what.len)).is_none();
    let known = what.flags & !IOEVENTFD_VALID_FLAG_MASK == 0;
    // Any length would be asked to match a value of some length.
    let matches_any = what.len == 0 && what.flags & IOEVENTFD_FLAG_DATAMATCH != 0;
    if !matches!(what.len, 0 | 1 | 2 | 4 | 8) || wraps || !known || matches_any {
        return Err(Errno::EINVAL);
    }
    vm.assign_ioeventfd(&what)?;
    Ok(0)
}

/// KVM_IRQFD: an eventfd that raises an interrupt (KVM API §4.75).
pub fn irqfd<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let what: KvmIrqfd = user::read(arg)?;
    if what.flags & !(IRQFD_FLAG_DEASSIGN | IRQFD_FLAG_RESAMPLE) != 0 {
        return Err(Errno::EINVAL);
    }
    // Asked before the irqchip: parting is fine whatever there is.
    if what.flags & IRQFD_FLAG_DEASSIGN != 0 {
        vm.deassign_irqfd(&what)?;
        return Ok(0);
    }
    // Only an I/O APIC of ours knows of the EOI that resampling waits for.
    let allowed = match vm.irqchip() {
        Irqchip::None => false,
        Irqchip::Split => what.flags & IRQFD_FLAG_RESAMPLE == 0,
        Irqchip::Full => true,
    };
    if !allowed {
        return Err(Errno::EINVAL);
    }
    vm.assign_irqfd(&what)?;
    Ok(0)
}

/// KVM_GET_IRQCHIP: a controller's state (KVM API §4.26).
pub fn get_irqchip<V: VmOps>(vm: &V, arg: u64) -> Reply {
    // Whole, though only `chip_id` counts: what the state does not fill goes back as it came.
    let mut chip: Box<KvmIrqchip> = user::read_boxed(arg)?;
    // Behind the copy: EFAULT goes before ENXIO on stock KVM.
    if vm.irqchip() != Irqchip::Full {
        return Err(Errno::ENXIO);
    }
    match chip.chip_id {
        IRQCHIP_PIC_MASTER | IRQCHIP_PIC_SLAVE => {
            let state = vm.pic(chip.chip_id)?;
            chip.write(&state);
        }
        IRQCHIP_IOAPIC => {
            let state = vm.ioapic()?;
            chip.write(&state);
        }
        _ => return Err(Errno::EINVAL),
    }
    user::write(arg, &*chip)?;
    Ok(0)
}

/// KVM_SET_IRQCHIP: a controller's state back (KVM API §4.27).
pub fn set_irqchip<V: VmOps>(vm: &V, arg: u64) -> Reply {
    // Boxed: half a KiB is too much for a stack frame here.
    let chip: Box<KvmIrqchip> = user::read_boxed(arg)?;
    if vm.irqchip() != Irqchip::Full {
        return Err(Errno::ENXIO);
    }
    match chip.chip_id {
        IRQCHIP_PIC_MASTER | IRQCHIP_PIC_SLAVE => vm.set_pic(chip.chip_id, &chip.read())?,
        IRQCHIP_IOAPIC => vm.set_ioapic(&chip.read())?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// KVM_CREATE_PIT2: makes the PIT (KVM API §4.71).
pub fn create_pit2<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let config: KvmPitConfig = user::read(arg)?;
    // Unknown flags pass, as in stock KVM.
    vm.create_pit(config.flags)?;
    Ok(0)
}

/// KVM_GET_PIT: its state without flags, the older form.
pub fn get_pit<V: VmOps>(vm: &V, arg: u64) -> Reply {
    // Read only to fail: in stock KVM the bad pointer goes before the missing PIT.
    let _: KvmPitState = user::read(arg)?;
    let state = vm.pit()?;
    user::write(arg, &KvmPitState { channels: state.channels })?;
    Ok(0)
}

/// KVM_SET_PIT: its state back, the older form.
pub fn set_pit<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let state: KvmPitState = user::read(arg)?;
    vm.set_pit(&state.channels, None)?;
    Ok(0)
}

/// KVM_GET_PIT2: the PIT's state (KVM API §4.72).
pub fn get_pit2<V: VmOps>(vm: &V, arg: u64) -> Reply {
    user::write(arg, &vm.pit()?)?;
    Ok(0)
}

/// KVM_SET_PIT2: the PIT's state back (KVM API §4.73).
pub fn set_pit2<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let state: KvmPitState2 = user::read(arg)?;
    vm.set_pit(&state.channels, Some(state.flags))?;
    Ok(0)
}

/// KVM_REINJECT_CONTROL: whether missed ticks are made up for.
pub fn reinject_control<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let control: KvmReinjectControl = user::read(arg)?;
    vm.set_pit_reinject(control.pit_reinject != 0)?;
    Ok(0)
}
