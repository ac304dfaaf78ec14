//! The module's parameters, as they stand now: some can be changed while guests run.

use crate::sys;

/// How long, in ns, a halted vCPU polls before its thread sleeps; 0 for never.
pub fn halt_poll_ns() -> u64 {
    sys::gnt_halt_poll_ns()
}
