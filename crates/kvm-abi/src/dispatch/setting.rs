//! KVM_ENABLE_CAP on a VM file (KVM API §4.37, §7).

use super::Reply;
use super::ops::{Setting, VmOps};
use crate::caps::{Offer, check_extension};
use crate::errno::Errno;
use crate::uapi::capability::*;
use crate::uapi::device::KvmEnableCap;
use crate::uapi::irqchip::MAX_IRQ_ROUTES;
use crate::uapi::run::MSR_EXIT_REASONS;
use crate::user;

/// The longest countdown, 2^32 - 1 times 128 cycles, has to fit into 64 bits of nanoseconds.
const MOST_BUS_CYCLE_NS: u32 = (u64::MAX / (u32::MAX as u64 * 128)) as u32;

/// KVM_ENABLE_CAP. Whatever is not offered, has flags, or has argument bits that mean nothing is
/// `EINVAL`.
pub fn enable<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let cap: KvmEnableCap = user::read(arg)?;
    // By the answer of KVM_CHECK_EXTENSION: what a VMM is told is not there it cannot switch on.
    if cap.flags != 0 || check_extension(vm.offer(), cap.cap.into()) == 0 {
        return Err(Errno::EINVAL);
    }
    let [value, ..] = cap.args;
    vm.set(setting(vm.offer(), cap.cap, value)?)?;
    Ok(0)
}

fn setting(offer: &Offer, cap: u32, value: u64) -> Result<Setting, Errno> {
    // A bit without a meaning is refused, so that it can be given one.
    let within = |mask: u64| if value & !mask == 0 { Ok(value) } else { Err(Errno::EINVAL) };
    let at_most = |limit: u32| match u32::try_from(value) {
        Ok(value) if value <= limit => Ok(value),
        _ => Err(Errno::EINVAL),
    };
    Ok(match cap {
        // No more pins than routes can name, as in stock KVM.
        CAP_SPLIT_IRQCHIP => Setting::SplitIrqchip(at_most(MAX_IRQ_ROUTES)?),
        CAP_X2APIC_API => Setting::X2apicApi(within(offer.x2apic_api)?),
        // The older of the two never looked at bits it did not know.
        CAP_DISABLE_QUIRKS => Setting::DisableQuirks(value & offer.quirks),
        CAP_DISABLE_QUIRKS2 => Setting::DisableQuirks(within(offer.quirks)?),
        CAP_X86_APIC_BUS_CYCLES_NS => match at_most(MOST_BUS_CYCLE_NS)? {
            0 => return Err(Errno::EINVAL),
            ns => Setting::ApicBusCycles(ns),
        },
        // Any value but 0 switches on, as on stock KVM; only words of bits are checked.
        CAP_EXCEPTION_PAYLOAD => Setting::ExceptionPayload(value != 0),
        CAP_X86_TRIPLE_FAULT_EVENT => Setting::TripleFaultEvent(value != 0),
        CAP_MSR_PLATFORM_INFO => Setting::MsrPlatformInfo(value != 0),
        // What is known and cannot be had here is passed over.
        CAP_X86_DISABLE_EXITS => {
            Setting::DisableExits(within(X86_DISABLE_EXITS_VALID)? & offer.disable_exits)
        }
        CAP_EXIT_ON_EMULATION_FAILURE => Setting::ExitOnEmulationFailure(within(1)? != 0),
        // The setting has 32 bits: a time that was cut silently would be another one.
        CAP_HALT_POLL => Setting::HaltPoll(at_most(u32::MAX)?),
        CAP_X86_USER_SPACE_MSR => Setting::UserSpaceMsr(within(MSR_EXIT_REASONS)?),
        CAP_MAX_VCPU_ID => Setting::MaxVcpuId(at_most(offer.max_vcpu_id)?),
        CAP_MANUAL_DIRTY_LOG_PROTECT2 => {
            // That all pages start dirty has no sense unless they are cleared by hand.
            let mask = if value & DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0 {
                offer.manual_dirty_log
            } else {
                0
            };
            Setting::ManualDirtyLog(within(mask)?)
        }
        _ => return Err(Errno::EINVAL),
    })
}
