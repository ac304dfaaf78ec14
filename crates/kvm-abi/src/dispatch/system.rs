//! What commands of /dev/kvm do beside asking [`SystemOps`].

use alloc::vec::Vec;

use super::ops::SystemOps;
use super::{Reply, lists};
use crate::caps::Offer;
use crate::errno::Errno;
use crate::uapi::cpuid::KvmCpuidEntry2;
use crate::uapi::device::{KvmDeviceAttr, X86_XCOMP_GUEST_SUPP};
use crate::user;

/// The answer of a command that takes no argument.
pub fn without_argument(arg: u64, value: i32) -> Reply {
    // An argument is reserved for a later meaning.
    if arg != 0 { Err(Errno::EINVAL) } else { Ok(value) }
}

/// KVM_CREATE_VM. The argument is the type of machine; there is one.
pub fn create_vm<S: SystemOps>(kvm: &S, arg: u64) -> Reply {
    // Other types are software-protected VMs and those of SEV (KVM_CAP_VM_TYPES is 1).
    if arg != 0 {
        return Err(Errno::EINVAL);
    }
    kvm.create_vm()
}

/// KVM_GET_EMULATED_CPUID: features that are emulated (KVM API §4.88).
pub fn emulated_cpuid<S: SystemOps>(kvm: &S, arg: u64) -> Reply {
    // First, as in stock KVM: EINVAL goes before what fits.
    lists::check_padding(arg)?;
    lists::write_cpuid(arg, || kvm.emulated_cpuid())
}

/// KVM_GET_SUPPORTED_HV_CPUID (KVM API §4.118), of /dev/kvm or a vCPU.
pub fn hyperv_cpuid(
    offer: &Offer,
    arg: u64,
    entries: impl FnOnce() -> Result<Vec<KvmCpuidEntry2>, Errno>,
) -> Reply {
    if !offer.hyperv {
        return Err(Errno::ENOTTY);
    }
    lists::write_cpuid(arg, entries)
}

/// The one attribute that /dev/kvm has: the XSAVE components a guest may be given.
pub fn attribute(arg: u64) -> Result<KvmDeviceAttr, Errno> {
    let attr: KvmDeviceAttr = user::read(arg)?;
    if attr.group != 0 || attr.attr != X86_XCOMP_GUEST_SUPP {
        return Err(Errno::ENXIO);
    }
    Ok(attr)
}

/// KVM_GET_DEVICE_ATTR on /dev/kvm: which XSAVE components a guest may have.
pub fn get_attribute<S: SystemOps>(kvm: &S, arg: u64) -> Result<(), Errno> {
    let attr = attribute(arg)?;
    user::write(attr.addr, &kvm.offer().xcr0)
}
