//! Puts a vCPU into 64-bit mode.

use anyhow::{Context, Result};
use guest_machine::long_mode::{EFER, NXE, Tables, special_registers};
use kvm_ioctls::VcpuFd;

/// Puts `vcpu` into 64-bit mode, at privilege level 0 with flat segments.
///
/// EFER.NXE is set only if `no_execute`, because a guest whose CPUID lacks it must not have it.
pub fn enter(vcpu: &VcpuFd, tables: Tables, no_execute: bool) -> Result<()> {
    let sregs = vcpu.get_sregs().context("KVM_GET_SREGS failed")?;
    let efer = if no_execute { EFER } else { EFER & !NXE };
    vcpu.set_sregs(&special_registers(sregs, tables, efer)).context("KVM_SET_SREGS failed")
}
