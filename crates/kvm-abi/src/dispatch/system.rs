//! Commands of /dev/kvm (KVM API §4, "system ioctl").

use super::ops::SystemOps;
use super::{Reply, UNKNOWN, lists};
use crate::caps::{API_VERSION, check_extension};
use crate::errno::Errno;
use crate::uapi::device::{KvmDeviceAttr, X86_XCOMP_GUEST_SUPP};
use crate::uapi::ioctl;
use crate::uapi::run::VCPU_MMAP_SIZE;
use crate::user;

/// A command of /dev/kvm.
pub fn system<S: SystemOps>(kvm: &S, cmd: u32, arg: u64) -> Reply {
    match cmd {
        ioctl::GET_API_VERSION => without_argument(arg, API_VERSION),
        ioctl::GET_VCPU_MMAP_SIZE => without_argument(arg, VCPU_MMAP_SIZE as i32),
        ioctl::CHECK_EXTENSION => Ok(check_extension(kvm.offer(), arg)),
        // The argument is the type of machine; there is one.
        ioctl::CREATE_VM if arg != 0 => Err(Errno::EINVAL),
        ioctl::CREATE_VM => kvm.create_vm(),
        ioctl::GET_MSR_INDEX_LIST => lists::write_indices(arg, &kvm.msr_indices()?),
        ioctl::GET_MSR_FEATURE_INDEX_LIST => lists::write_indices(arg, &kvm.feature_msr_indices()?),
        ioctl::GET_MSRS => lists::get_msrs(arg, |index| kvm.feature_msr(index)),
        ioctl::GET_SUPPORTED_CPUID => lists::write_cpuid(arg, || kvm.supported_cpuid()),
        ioctl::GET_EMULATED_CPUID => {
            lists::check_padding(arg)?;
            lists::write_cpuid(arg, || kvm.emulated_cpuid())
        }
        ioctl::X86_GET_MCE_CAP_SUPPORTED => {
            user::write(arg, &kvm.offer().mce_cap)?;
            Ok(0)
        }
        ioctl::HAS_DEVICE_ATTR => {
            attribute(arg)?;
            Ok(0)
        }
        ioctl::GET_DEVICE_ATTR => {
            let attr = attribute(arg)?;
            user::write(attr.addr, &kvm.offer().xcr0)?;
            Ok(0)
        }
        _ => Err(UNKNOWN),
    }
}

fn without_argument(arg: u64, value: i32) -> Reply {
    if arg != 0 { Err(Errno::EINVAL) } else { Ok(value) }
}

/// The one attribute that /dev/kvm has: the XSAVE components a guest may be given.
fn attribute(arg: u64) -> Result<KvmDeviceAttr, Errno> {
    let attr: KvmDeviceAttr = user::read(arg)?;
    if attr.group != 0 || attr.attr != X86_XCOMP_GUEST_SUPP {
        return Err(Errno::ENXIO);
    }
    Ok(attr)
}
