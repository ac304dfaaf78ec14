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

/// Whether the lazy TSC deadline is offered to guests. Fixed at load.
pub fn lazy_tscdeadline() -> bool {
    sys::gnt_lazy_tscdeadline() != 0
}

/// Whether nested paging is used.
pub fn npt() -> bool {
    sys::gnt_npt() != 0
}
