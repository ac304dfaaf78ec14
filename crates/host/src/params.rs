//! The module's parameters, as they stand now: some can be changed while guests run.

use crate::sys;

/// How long, in ns, a halted vCPU polls before its thread sleeps; 0 for never.
pub fn halt_poll_ns() -> u64 {
    sys::gnt_halt_poll_ns()
}

/// Whether the host's segment and system-call registers are kept one by one (`host_state=msr`).
pub fn host_state_by_msr() -> bool {
    sys::gnt_host_state_by_msr() != 0
}

/// Whether the layout of the XSAVE area is read once, at load (`xstate_cache=1`).
pub fn xstate_cache() -> bool {
    sys::gnt_xstate_cache() != 0
}

/// Whether a vCPU keeps its page-table roots when its paging mode changes.
pub fn keep_roots() -> bool {
    sys::gnt_keep_roots() != 0
}

/// Whether vmcs02 is composed from what changed alone (`nested_dirty_tracking=1`).
pub fn nested_dirty_tracking() -> bool {
    sys::gnt_nested_dirty_tracking() != 0
}

/// Whether a guest's hypervisor is offered virtual interrupts where the CPU has no posted interrupts (`nested_apicv=1`).
pub fn nested_apicv() -> bool {
    sys::gnt_nested_apicv() != 0
}

/// Whether the lazy TSC deadline is offered to guests. Fixed at load.
pub fn lazy_tscdeadline() -> bool {
    sys::gnt_lazy_tscdeadline() != 0
}

/// Whether local APICs are left to the CPU, which can or cannot do it; the parameter shows what is
/// said here from then on. Fixed at load.
pub fn enable_apicv(possible: bool) -> bool {
    sys::gnt_enable_apicv(possible.into()) != 0
}

/// Whether guests may be hypervisors, which the backend can or cannot do; the parameter shows what is said here
/// from then on. Fixed at load.
pub fn nested(possible: bool) -> bool {
    sys::gnt_nested(possible.into()) != 0
}

/// Whether a shadow VMCS serves guests that are hypervisors, which the CPU can or cannot do; the parameter shows
/// what is said here from then on. Fixed at load.
pub fn enable_shadow_vmcs(possible: bool) -> bool {
    sys::gnt_enable_shadow_vmcs(possible.into()) != 0
}

/// Whether the VMX-preemption timer is to be used.
pub fn preemption_timer() -> bool {
    sys::gnt_preemption_timer() != 0
}

/// The VMX-preemption timer is not used: the parameter shows that from now on.
pub fn no_preemption_timer() {
    sys::gnt_no_preemption_timer();
}

/// A part of the CPU that a parameter of stock KVM's tells of.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Use {
    /// Virtual branch records, AMD (`lbrv`).
    Lbr,
    /// The address behind an instruction that exits, AMD (`nrips`).
    NripSave,
    /// VMLOAD and VMSAVE of guests without an exit, AMD (`vls`).
    VirtualVmload,
    /// Virtual NMIs, AMD (`vnmi`).
    VirtualNmi,
    /// A ratio of the TSC, AMD (`tsc_scaling`).
    TscScaling,
    /// The page-modification log, Intel (`pml`).
    Pml,
    /// Address-space ids, Intel (`vpid`).
    Vpid,
    /// Accessed and dirty bits of EPT, Intel (`eptad`).
    EptDirty,
}

/// Which of them are used: the parameters show that from now on.
pub fn uses(all: &[(Use, bool)]) {
    sys::gnt_uses(used_bits(all));
}

fn used_bits(all: &[(Use, bool)]) -> u32 {
    // Bits in the order of `enum gnt_use` in gannet.h.
    all.iter().filter(|(_, used)| *used).fold(0, |bits, (what, _)| bits | 1 << *what as u32)
}

/// Whether guests have TDP, of whichever vendor; else shadow paging.
#[inline]
pub fn tdp() -> bool {
    npt() && ept()
}

/// The parameter `npt`: AMD's nested page tables are used.
#[inline]
pub fn npt() -> bool {
    sys::gnt_npt() != 0
}

/// The parameter `ept`: Intel's extended page tables are used.
#[inline]
pub fn ept() -> bool {
    sys::gnt_ept() != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;
    use std::{format, string::String, vec::Vec};

    /// `NripSave` as `GNT_NRIP_SAVE`.
    fn name_in_c(what: Use) -> String {
        format!("{what:?}").chars().fold(String::from("GNT"), |name, c| {
            let between = if c.is_uppercase() { "_" } else { "" };
            name + between + &String::from(c.to_ascii_uppercase())
        })
    }

    #[test]
    fn the_glue_has_them_in_the_same_order() {
        let header = include_str!("../../../linux/glue/gannet.h");
        let body = header.split("enum gnt_use {").nth(1).unwrap().split('}').next().unwrap();
        let there: Vec<&str> = body.split(',').map(str::trim).collect();
        let all = [
            Use::Lbr,
            Use::NripSave,
            Use::VirtualVmload,
            Use::VirtualNmi,
            Use::TscScaling,
            Use::Pml,
            Use::Vpid,
            Use::EptDirty,
        ];
        assert_eq!(there, all.map(name_in_c));
        assert_eq!(used_bits(&[(Use::Lbr, true), (Use::Pml, false), (Use::EptDirty, true)]), 0x81);
    }
}
