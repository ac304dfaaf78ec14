//! CPUs: which one this is, and how to make another leave the guest.

use crate::sys;

/// The CPU this runs on; only meaningful while the task cannot move (interrupts off).
#[inline]
pub fn cpu_id() -> usize {
    sys::gnt_cpu_id() as usize
}

/// One more than the highest number a CPU of this machine can have.
pub fn max_cpus() -> usize {
    sys::gnt_max_cpus() as usize
}

/// How many CPUs are online at this moment.
pub fn online_cpus() -> u32 {
    sys::gnt_online_cpus()
}

/// Makes CPU `cpu` leave the guest soon, by a reschedule interrupt. Does not wait.
#[inline]
pub fn kick(cpu: usize) {
    // Numbers come from words that other CPUs write; one out of range would be read beyond the
    // kernel's tables.
    if cpu < max_cpus() {
        // SAFETY: the number is in range.
        unsafe { sys::gnt_kick(cpu as u32) }
    }
}

/// Interrupts every CPU of `cpus` (out-of-range numbers and this CPU itself are skipped) and waits
/// until each has answered: whatever ran there with interrupts off, or in the guest, has ended.
///
/// Interrupts on. The iterator runs with preemption off and must not sleep.
pub fn sync_cpus(cpus: impl IntoIterator<Item = usize>) {
    let limit = max_cpus();
    // Preemption is off from here on: the CPU that is left out must stay this one.
    let mask = sys::gnt_sync_begin();
    for cpu in cpus {
        if cpu < limit {
            // SAFETY: the mask is this CPU's, preemption is off, the number is in range.
            unsafe { sys::gnt_sync_add(mask, cpu as u32) }
        }
    }
    // SAFETY: begun above.
    unsafe { sys::gnt_sync_end(mask) }
}

/// Runs `f` on every CPU that is online, in interrupt context, and waits.
pub fn run_on_all(f: extern "C" fn()) {
    sys::gnt_run_on_all(f);
}

/// Runs `f` with `argument` on CPU `cpu`, in interrupt context or here, and waits. False: it is not
/// online, and nothing was run. Interrupts on.
pub fn run_on(cpu: usize, f: extern "C" fn(u64), argument: u64) -> bool {
    cpu < max_cpus() && sys::gnt_run_on(cpu as u32, f, argument)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_out_of_range_is_left_alone() {
        kick(usize::MAX);
        sync_cpus([0, usize::MAX]);
    }
}
