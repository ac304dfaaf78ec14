//! The four CPUs that there seem to be.

use std::cell::RefCell;
use std::sync::atomic::{Ordering, fence};

use super::thread::{CPU, IRQS_OFF_AS, PREEMPT_OFF};
use crate::sys::std_port::world::World;

thread_local! {
    /// CPUs that are about to be waited for.
    static TO_SYNC: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

const CPUS: u32 = 4;
pub(crate) enum CpuMaskRaw {}
pub(crate) fn gnt_cpu_id() -> u32 {
    CPU.get()
}
pub(crate) fn gnt_max_cpus() -> u32 {
    CPUS
}
/// All but one.
pub(crate) fn gnt_online_cpus() -> u32 {
    CPUS - 1
}
pub(crate) unsafe fn gnt_kick(cpu: u32) {
    super::thread::refuse_in_guest("gnt_kick");
    World::current().lock().kicks.push(cpu as usize);
}
pub(crate) fn gnt_sync_begin() -> *mut CpuMaskRaw {
    super::thread::refuse_in_guest("gnt_sync_begin");
    PREEMPT_OFF.set(PREEMPT_OFF.get() + 1);
    std::ptr::null_mut()
}
pub(crate) unsafe fn gnt_sync_add(_: *mut CpuMaskRaw, cpu: u32) {
    super::thread::refuse_in_guest("gnt_sync_add");
    World::current().lock().kicks.push(cpu as usize);
    TO_SYNC.with_borrow_mut(|cpus| cpus.push(cpu));
}
/// Waits for the threads of this world that have interrupts off on those CPUs.
pub(crate) unsafe fn gnt_sync_end(_: *mut CpuMaskRaw) {
    super::thread::refuse_in_guest("gnt_sync_end");
    let (world, own) = (World::current(), IRQS_OFF_AS.get());
    let cpus = TO_SYNC.take();
    // Copied out under the lock and waited for without it: who turns interrupts on takes it.
    let mut rest: Vec<u64> = {
        let state = world.lock();
        let there = state.irqs_off.iter().filter(|(id, cpu)| **id != own && cpus.contains(cpu));
        there.map(|(id, _)| *id).collect()
    };
    while !rest.is_empty() {
        std::thread::yield_now();
        let state = world.lock();
        rest.retain(|id| state.irqs_off.contains_key(id));
    }
    PREEMPT_OFF.set(PREEMPT_OFF.get().saturating_sub(1));
    fence(Ordering::SeqCst);
}
/// Outside the kernel there is no other CPU to be asked: it is offline, and that it was asked is noted.
pub(crate) fn gnt_run_on(cpu: u32, _: extern "C" fn(u64), argument: u64) -> bool {
    super::thread::refuse_in_guest("gnt_run_on");
    World::current().lock().asked.push((cpu as usize, argument));
    false
}

pub(crate) fn gnt_run_on_all(f: extern "C" fn()) {
    super::thread::refuse_in_guest("gnt_run_on_all");
    f();
}
