//! The C functions of `linux/glue/`, as declared in `linux/glue/gannet.h`.
//!
//! A `safe fn` accepts every argument in every context that its wrapper allows: C keeps no reference
//! that it is given. For the others the wrapper keeps the pointers valid, or a lock's word what the
//! kernel made of it. All may be called with the host's GS base loaded only.

use core::arch::asm;
use core::ffi::{c_char, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use super::{DebugCalls, FileCalls, NotifierCalls, TimerFn, WatchCalls};
use crate::clock::Snapshot;
use crate::gup::RawHostPage;
use crate::sync::RwWords;
use crate::trace::ExitRecord;

/// Storage for a struct of the kernel's, large enough on all kernels served (asserted in C).
macro_rules! storage {
    ($(#[$doc:meta])* $name:ident, $words:literal) => {
        $(#[$doc])*
        #[repr(C, align(8))]
        #[derive(Debug)]
        pub(crate) struct $name([u64; $words]);
        impl $name {
            pub(crate) const fn new() -> Self {
                Self([0; $words])
            }
        }
    };
}
storage!(/// `struct gnt_timer`.
    TimerRaw, 24);
storage!(/// `struct gnt_notifier`.
    NotifierRaw, 16);
storage!(/// `struct gnt_watch`.
    WatchRaw, 24);
storage!(/// `struct rcuwait`.
    WaiterRaw, 1);
storage!(/// `struct fpu_guest`.
    FpuRaw, 8);

/// The kernel's `struct srcu_struct`, behind a pointer.
pub(crate) enum SrcuRaw {}
/// The kernel's `struct eventfd_ctx`, behind a pointer.
pub(crate) enum EventFdRaw {}
/// The kernel's `struct file`, behind a pointer.
pub(crate) enum FileRaw {}
/// The kernel's `struct seq_file`, behind a pointer.
pub(crate) enum SeqRaw {}
/// The glue's `struct gnt_debug_dir`, behind a pointer.
pub(crate) enum DebugDirRaw {}
/// The kernel's `struct cpumask`, behind a pointer.
pub(crate) enum CpuMaskRaw {}

#[expect(improper_ctypes, reason = "C does not look at the TypeId of a FileCalls")]
unsafe extern "C" {
    // mm.c
    static gnt_direct_map_base: u64;
    pub(crate) safe fn gnt_page_alloc() -> u64;
    pub(crate) safe fn gnt_page_alloc_low() -> u64;
    pub(crate) fn gnt_page_free(hpa: u64);
    pub(crate) safe fn gnt_pages_alloc(order: u32) -> u64;
    pub(crate) fn gnt_pages_free(hpa: u64, order: u32);
    // gup.c
    pub(crate) fn gnt_fault_in(hva: u64, write: i32, mode: i32, out: *mut RawHostPage) -> i32;
    pub(crate) safe fn gnt_hva_level(hva: u64) -> i32;
    pub(crate) fn gnt_page_put(pfn: u64);
    pub(crate) safe fn gnt_signal_poisoned(hva: u64);
    pub(crate) fn gnt_page_set_dirty(pfn: u64);
    pub(crate) fn gnt_page_set_accessed(pfn: u64);
    // notifier.c
    pub(crate) fn gnt_notifier_register(
        n: *mut NotifierRaw,
        calls: *const NotifierCalls,
        context: *mut c_void,
    ) -> i32;
    pub(crate) fn gnt_notifier_unregister(n: *mut NotifierRaw);
    pub(crate) fn gnt_notifier_is_current(n: *const NotifierRaw) -> i32;
    // user.c
    pub(crate) fn gnt_user_read(to: *mut u8, hva: u64, len: usize) -> i32;
    pub(crate) fn gnt_user_write(hva: u64, from: *const u8, len: usize) -> i32;
    pub(crate) fn gnt_user_read_nofault(to: *mut u8, hva: u64, len: usize) -> i32;
    pub(crate) fn gnt_user_write_nofault(hva: u64, from: *const u8, len: usize) -> i32;
    pub(crate) safe fn gnt_user_cmpxchg(hva: u64, size: u32, old: u64, new: u64) -> i32;
    pub(crate) safe fn gnt_user_clear(hva: u64, len: usize) -> i32;
    pub(crate) safe fn gnt_user_range_ok(hva: u64, len: u64) -> i32;
    pub(crate) safe fn gnt_user_end() -> u64;
    // lock.c
    pub(crate) safe fn gnt_mutex_lock_slow(word: &AtomicU32);
    pub(crate) safe fn gnt_mutex_lock_killable_slow(word: &AtomicU32) -> i32;
    pub(crate) safe fn gnt_mutex_wake(word: &AtomicU32);
    pub(crate) fn gnt_spin_lock_irqsave(word: *const AtomicU32) -> usize;
    pub(crate) fn gnt_spin_unlock_irqrestore(word: *const AtomicU32, flags: usize);
    pub(crate) fn gnt_read_lock(words: *const RwWords);
    pub(crate) fn gnt_read_unlock(words: *const RwWords);
    pub(crate) fn gnt_write_lock(words: *const RwWords);
    pub(crate) fn gnt_write_unlock(words: *const RwWords);
    pub(crate) fn gnt_rwlock_is_contended(words: *const RwWords) -> i32;
    #[cfg(feature = "lockdep")]
    pub(crate) fn gnt_lockdep_acquire(file: *const u8, len: usize, line: u32, how: u32);
    #[cfg(feature = "lockdep")]
    pub(crate) safe fn gnt_irq_disable();
    #[cfg(feature = "lockdep")]
    pub(crate) safe fn gnt_irq_enable();
    #[cfg(feature = "lockdep")]
    pub(crate) fn gnt_lockdep_release(file: *const u8, len: usize, line: u32);
    pub(crate) safe fn gnt_srcu_new() -> *mut SrcuRaw;
    pub(crate) fn gnt_srcu_free(domain: *mut SrcuRaw);
    pub(crate) fn gnt_srcu_read_lock(domain: *mut SrcuRaw) -> i32;
    pub(crate) fn gnt_srcu_read_unlock(domain: *mut SrcuRaw, index: i32);
    pub(crate) fn gnt_srcu_synchronize(domain: *mut SrcuRaw);
    // timer.c
    pub(crate) fn gnt_timer_init(t: *mut TimerRaw, expired: TimerFn, context: *mut c_void);
    pub(crate) fn gnt_timer_start(t: *mut TimerRaw, at: u64);
    pub(crate) fn gnt_timer_cancel(t: *mut TimerRaw) -> i32;
    pub(crate) fn gnt_timer_try_cancel(t: *mut TimerRaw) -> i32;
    // sched.c
    pub(crate) safe fn gnt_may_poll() -> i32;
    pub(crate) fn gnt_waiter_prepare(w: *mut WaiterRaw);
    pub(crate) fn gnt_waiter_finish(w: *mut WaiterRaw);
    pub(crate) fn gnt_waiter_sleep(w: *mut WaiterRaw);
    pub(crate) fn gnt_waiter_wake(w: *mut WaiterRaw) -> i32;
    pub(crate) safe fn gnt_work_pending() -> i32;
    pub(crate) safe fn gnt_handle_work() -> i32;
    pub(crate) safe fn gnt_signal_pending() -> i32;
    pub(crate) safe fn gnt_need_resched() -> i32;
    pub(crate) safe fn gnt_cond_resched();
    pub(crate) safe fn gnt_run_delay_ns() -> u64;
    pub(crate) safe fn gnt_current_tid() -> u32;
    pub(crate) safe fn gnt_sigmask_set(mask: u64);
    pub(crate) safe fn gnt_sigmask_restore();
    pub(crate) safe fn gnt_guest_enter();
    pub(crate) safe fn gnt_guest_exit(interrupted: bool);
    pub(crate) safe fn gnt_guest_time_end();
    pub(crate) safe fn gnt_guest_pause();
    pub(crate) safe fn gnt_guest_resume();
    // smp.c
    pub(crate) safe fn gnt_cpu_id() -> u32;
    pub(crate) safe fn gnt_max_cpus() -> u32;
    pub(crate) safe fn gnt_online_cpus() -> u32;
    pub(crate) fn gnt_kick(cpu: u32);
    pub(crate) safe fn gnt_sync_begin() -> *mut CpuMaskRaw;
    pub(crate) fn gnt_sync_add(mask: *mut CpuMaskRaw, cpu: u32);
    pub(crate) fn gnt_sync_end(mask: *mut CpuMaskRaw);
    pub(crate) safe fn gnt_run_on_all(f: extern "C" fn());
    pub(crate) safe fn gnt_run_on(cpu: u32, f: extern "C" fn(u64), argument: u64) -> bool;
    // fpu.c
    pub(crate) fn gnt_fpu_alloc(f: *mut FpuRaw) -> i32;
    pub(crate) fn gnt_fpu_free(f: *mut FpuRaw);
    pub(crate) fn gnt_fpu_swap(f: *mut FpuRaw, enter: i32, owner: *mut u64);
    pub(crate) safe fn gnt_fpu_ensure();
    pub(crate) fn gnt_fpu_to_uabi(
        f: *mut FpuRaw,
        out: *mut u8,
        len: usize,
        xfeatures: u64,
        pkru: u32,
    );
    pub(crate) fn gnt_fpu_from_uabi(
        f: *mut FpuRaw,
        from: *const u8,
        xcr0: u64,
        pkru: *mut u32,
    ) -> i32;
    pub(crate) fn gnt_fpu_uabi_size(f: *const FpuRaw) -> usize;
    pub(crate) fn gnt_fpu_enable_features(f: *mut FpuRaw, xfeatures: u64) -> i32;
    pub(crate) fn gnt_fpu_update_xfd(f: *mut FpuRaw, xfd: u64);
    pub(crate) safe fn gnt_fpu_sync_xfd();
    pub(crate) safe fn gnt_fpu_guest_xfeatures() -> u64;
    pub(crate) safe fn gnt_host_xcr0() -> u64;
    // eventfd.c
    pub(crate) safe fn gnt_fd_is_open(fd: i32) -> i32;
    pub(crate) safe fn gnt_eventfd_get(fd: i32) -> *mut EventFdRaw;
    pub(crate) fn gnt_eventfd_put(e: *mut EventFdRaw);
    pub(crate) fn gnt_eventfd_signal(e: *mut EventFdRaw, count: u64);
    pub(crate) fn gnt_watch_attach(
        w: *mut WatchRaw,
        fd: i32,
        expected: *const EventFdRaw,
        calls: *const WatchCalls,
        context: *mut c_void,
    ) -> i32;
    pub(crate) fn gnt_watch_detach(w: *mut WatchRaw);
    pub(crate) fn gnt_watch_context(w: *const WatchRaw) -> *mut EventFdRaw;
    // clock.c
    pub(crate) safe fn gnt_monotonic_ns() -> u64;
    pub(crate) safe fn gnt_boottime_ns() -> u64;
    pub(crate) safe fn gnt_random_word() -> u64;
    pub(crate) safe fn gnt_realtime_ns() -> u64;
    pub(crate) safe fn gnt_tsc_khz() -> u32;
    pub(crate) safe fn gnt_tsc_is_stable() -> i32;
    pub(crate) safe fn gnt_clock_snapshot(out: &mut Snapshot);
    pub(crate) safe fn gnt_clock_generation() -> u32;
    pub(crate) safe fn gnt_tsc_lost() -> u64;
    // debugfs.c
    pub(crate) fn gnt_seq_write(to: *mut SeqRaw, text: *const u8, len: usize);
    pub(crate) fn gnt_debug_add(
        name: *const c_char,
        parent: *mut DebugDirRaw,
        calls: *const DebugCalls,
        object: *mut c_void,
    ) -> *mut DebugDirRaw;
    pub(crate) fn gnt_debug_remove(dir: *mut DebugDirRaw);
    // trace.c
    static gnt_observed: AtomicU32;
    pub(crate) safe fn gnt_trace_entry(vcpu_id: u32, rip: u64);
    pub(crate) safe fn gnt_trace_exit(record: &ExitRecord);
    pub(crate) safe fn gnt_trace_pio(write: u32, port: u32, size: u32, count: u32, value: u32);
    pub(crate) safe fn gnt_trace_mmio(kind: u32, len: u32, gpa: u64, value: u64);
    pub(crate) safe fn gnt_trace_msr(write: u32, index: u32, value: u64, faulted: u32);
    pub(crate) safe fn gnt_trace_cpuid(leaf: u32, subleaf: u32, answer: &[u32; 4], found: u32);
    pub(crate) safe fn gnt_trace_hypercall(call: &[u64; 5]);
    pub(crate) safe fn gnt_trace_inj_virq(vector: u32);
    pub(crate) safe fn gnt_trace_page_fault(vcpu_id: u32, rip: u64, address: u64, error: u64);
    // params.c
    pub(crate) safe fn gnt_halt_poll_ns() -> u64;
    pub(crate) safe fn gnt_host_state_by_msr() -> i32;
    pub(crate) safe fn gnt_xstate_cache() -> i32;
    pub(crate) safe fn gnt_keep_roots() -> i32;
    pub(crate) safe fn gnt_nested_dirty_tracking() -> i32;
    pub(crate) safe fn gnt_nested_apicv() -> i32;
    pub(crate) safe fn gnt_lazy_tscdeadline() -> i32;
    pub(crate) safe fn gnt_enable_apicv(possible: i32) -> i32;
    pub(crate) safe fn gnt_nested(possible: i32) -> i32;
    pub(crate) safe fn gnt_enable_shadow_vmcs(possible: i32) -> i32;
    pub(crate) safe fn gnt_preemption_timer() -> i32;
    pub(crate) safe fn gnt_no_preemption_timer();
    pub(crate) safe fn gnt_uses(uses: u32);
    pub(crate) safe fn gnt_npt() -> i32;
    pub(crate) safe fn gnt_ept() -> i32;
    // log.c
    pub(crate) safe fn gnt_log_ratelimit() -> i32;
    pub(crate) fn gnt_log(level: u32, text: *const u8, len: usize);
    // fops.c
    pub(crate) fn gnt_file_new(
        name: *const c_char,
        number: i64,
        calls: *const FileCalls,
        object: *mut c_void,
        fd: *mut i32,
    ) -> *mut FileRaw;
    pub(crate) fn gnt_file_install(file: *mut FileRaw, fd: i32);
    pub(crate) fn gnt_file_cancel(file: *mut FileRaw, fd: i32);
    pub(crate) safe fn gnt_file_get(
        fd: i32,
        calls: &mut *const FileCalls,
        object: &mut *mut c_void,
    ) -> *mut FileRaw;
    pub(crate) fn gnt_file_put(file: *mut FileRaw);
}

/// What is observed; written by C at any time.
#[inline]
pub(crate) fn observed() -> u32 {
    // Relaxed: a change of it interrupts every CPU, which is what orders it.
    // SAFETY: a u32 that lives as long as the module, and is accessed by whole words only.
    unsafe { gnt_observed.load(Ordering::Relaxed) }
}

/// Where the direct map of physical memory begins; set before any other Rust code runs.
#[inline]
pub(crate) fn direct_map_base() -> u64 {
    // SAFETY: written once at load, before this can be called.
    unsafe { gnt_direct_map_base }
}

/// The kernel's own checks (might_sleep) are in the functions called; nothing is needed here.
#[inline]
pub(crate) fn might_sleep() {}

/// The kernel's waiter needs nothing but [`gnt_waiter_prepare`].
///
/// # Safety
/// Nothing is asked for here; the port on the standard library wants the waiter alive.
#[inline]
pub(crate) unsafe fn gnt_waiter_enter(_: *mut WaiterRaw) {}

// Lockdep keeps its own account of the flag, so a kernel that has it is asked to set it.
#[cfg(feature = "lockdep")]
pub(crate) fn irq_disable() {
    gnt_irq_disable();
}

#[cfg(feature = "lockdep")]
pub(crate) fn irq_enable() {
    gnt_irq_enable();
}

#[cfg(feature = "lockdep")]
pub(crate) fn irq_window() {
    gnt_irq_enable();
    gnt_irq_disable();
}

#[cfg(not(feature = "lockdep"))]
#[inline]
pub(crate) fn irq_disable() {
    // SAFETY: ring 0; `irq::Off` turns interrupts on again when it goes.
    unsafe { asm!("cli", options(nostack)) }
}

#[cfg(not(feature = "lockdep"))]
#[inline]
pub(crate) fn irq_enable() {
    // SAFETY: ring 0.
    unsafe { asm!("sti", options(nostack)) }
}

#[cfg(not(feature = "lockdep"))]
#[inline]
pub(crate) fn irq_window() {
    // SAFETY: ring 0; the handlers run on this stack as for any interrupt of kernel code. STI holds
    // interrupts off for one more instruction.
    unsafe { asm!("sti", "nop", "cli", options(nostack)) }
}

#[inline]
pub(crate) fn irq_enabled() -> bool {
    let flags: u64;
    // SAFETY: reads RFLAGS through the stack.
    unsafe { asm!("pushfq", "pop {}", out(reg) flags, options(preserves_flags)) }
    flags & (1 << 9) != 0
}
