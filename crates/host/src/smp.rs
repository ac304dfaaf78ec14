//! CPUs: which one this is, and how to make another leave the guest.

use crate::sys;
use x86::Hpa;

/// The CPU this runs on; only meaningful while the task cannot move (interrupts off).
#[inline]
pub fn cpu_id() -> usize {
    sys::gnt_cpu_id() as usize
}

/// One more than the highest number a CPU of this machine can have.
pub fn max_cpus() -> usize {
    sys::gnt_max_cpus() as usize
}

/// Makes CPU `cpu` leave the guest soon, by a reschedule interrupt. Does not wait.
#[inline]
pub fn kick(cpu: usize) {
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

/// The pages that each CPU owns for SVM, allocated when the module loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CpuPage {
    /// VM_HSAVE_PA: where VMRUN keeps the host's state (APM vol. 2 §15.5.1).
    HostSave = 0,
    /// Where VMSAVE keeps the rest of the host's state while a guest is loaded.
    HostVmsave = 1,
}

/// Physical address of a page of CPU `cpu`; `None` for a CPU that cannot exist.
pub fn cpu_page(cpu: usize, which: CpuPage) -> Option<Hpa> {
    if cpu >= max_cpus() {
        return None;
    }
    // SAFETY: the number is in range.
    match unsafe { sys::gnt_cpu_page(cpu as u32, which as u32) } {
        0 => None,
        hpa => Some(Hpa(hpa)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_out_of_range_is_left_alone() {
        kick(usize::MAX);
        sync_cpus([0, usize::MAX]);
        assert!(cpu_page(usize::MAX, CpuPage::HostSave).is_none());
    }

    #[test]
    fn each_cpu_has_pages_of_its_own() {
        let (save, state) = (cpu_page(0, CpuPage::HostSave), cpu_page(0, CpuPage::HostVmsave));
        assert!(save.is_some() && state.is_some() && save != state);
    }
}
