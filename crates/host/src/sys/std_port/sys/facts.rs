//! Clocks, randomness, parameters and the log. One nanosecond is one TSC tick.

use crate::clock::Snapshot;
use crate::sys::std_port::world::World;

pub(crate) fn gnt_monotonic_ns() -> u64 {
    World::current().now()
}
pub(crate) fn gnt_boottime_ns() -> u64 {
    World::current().snapshot().boot_ns
}
pub(crate) fn gnt_random_word() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}
pub(crate) fn gnt_realtime_ns() -> u64 {
    World::current().snapshot().real_ns
}
pub(crate) fn gnt_tsc_khz() -> u32 {
    1_000_000
}
pub(crate) fn gnt_tsc_is_stable() -> i32 {
    1
}
pub(crate) fn gnt_clock_snapshot(out: &mut Snapshot) {
    *out = World::current().snapshot();
}
pub(crate) fn gnt_clock_generation() -> u32 {
    World::current().lock().sleeps
}
pub(crate) fn gnt_tsc_lost() -> u64 {
    World::current().lock().tsc_lost
}

// Parameters.

pub(crate) fn gnt_keep_roots() -> i32 {
    1
}

pub(crate) fn gnt_npt() -> i32 {
    1
}

pub(crate) fn gnt_ept() -> i32 {
    1
}

pub(crate) fn gnt_halt_poll_ns() -> u64 {
    0
}
pub(crate) fn gnt_host_state_by_msr() -> i32 {
    0
}
pub(crate) fn gnt_nested_dirty_tracking() -> i32 {
    1
}
pub(crate) fn gnt_nested_apicv() -> i32 {
    0
}
pub(crate) fn gnt_xstate_cache() -> i32 {
    1
}
pub(crate) fn gnt_lazy_tscdeadline() -> i32 {
    1
}
pub(crate) fn gnt_enable_apicv(possible: i32) -> i32 {
    possible
}
pub(crate) fn gnt_enable_shadow_vmcs(possible: i32) -> i32 {
    possible
}
pub(crate) fn gnt_nested(possible: i32) -> i32 {
    possible
}
pub(crate) fn gnt_preemption_timer() -> i32 {
    1
}
pub(crate) fn gnt_no_preemption_timer() {}
pub(crate) fn gnt_uses(_: u32) {}

// The log.

pub(crate) fn gnt_log_ratelimit() -> i32 {
    1
}
pub(crate) unsafe fn gnt_log(_: u32, text: *const u8, len: usize) {
    // SAFETY: text is readable for len bytes by the contract.
    let text = String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(text, len) });
    World::current().lock().log.push(text.into_owned());
}
