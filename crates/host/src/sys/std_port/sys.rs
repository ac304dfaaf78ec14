//! The functions of `linux/glue/` on the standard library: same names, same contracts.
//!
//! Calls that could sleep panic when made with interrupts off or a spinning lock held, so that a
//! plain test finds what lockdep would.
#![allow(clippy::missing_safety_doc, reason = "the contracts are those of sys::kernel")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::super::{DebugCalls, FileCalls, NotifierCalls, TimerFn, WatchCalls};
use super::world::{Armed, Context, Event, World, descriptors};
use crate::clock::Snapshot;
use crate::gup::RawHostPage;
use crate::sync::RwWords;

thread_local! {
    pub(super) static SIGNAL: Cell<bool> = const { Cell::new(false) };
    pub(super) static RESCHED: Cell<bool> = const { Cell::new(false) };
    pub(super) static CPU: Cell<u32> = const { Cell::new(0) };
    pub(super) static LDT: Cell<bool> = const { Cell::new(false) };
    pub(super) static GUEST_SSBD: Cell<u32> = const { Cell::new(0) };
    pub(super) static USER_RETURN: Cell<Option<u32>> = const { Cell::new(Some(0)) };
    pub(super) static RUN_DELAY: Cell<u64> = const { Cell::new(0) };
    static IRQS_ON: Cell<bool> = const { Cell::new(true) };
    /// The number of this thread's stretch with interrupts off.
    static IRQS_OFF_AS: Cell<u64> = const { Cell::new(0) };
    /// CPUs that are about to be waited for.
    static TO_SYNC: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    static PREEMPT_OFF: Cell<u32> = const { Cell::new(0) };
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Turns interrupts on or off for this thread: one that has them off holds up who waits for its CPU, as
/// [`gnt_sync_end`] does.
pub(crate) fn set_irqs(on: bool) -> bool {
    if on {
        super::test::irqs_came_on();
    }
    let were_on = IRQS_ON.replace(on);
    if were_on != on {
        let world = World::current();
        let mut state = world.lock();
        if on {
            state.irqs_off.remove(&IRQS_OFF_AS.take());
        } else {
            let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
            IRQS_OFF_AS.set(id);
            state.irqs_off.insert(id, CPU.get());
        }
    }
    were_on
}

pub(crate) fn might_sleep() {
    let atomic = !IRQS_ON.get() || PREEMPT_OFF.get() != 0;
    assert!(!atomic || std::thread::panicking(), "sleeps in atomic context");
}

// Pages.

pub(crate) fn direct_map_base() -> u64 {
    0
}

fn pages_layout(order: u32) -> Layout {
    let size = 4096usize << order;
    Layout::from_size_align(size, size).expect("order is at most 10")
}

pub(crate) fn gnt_pages_alloc(order: u32) -> u64 {
    // SAFETY: the layout has a size.
    unsafe { alloc_zeroed(pages_layout(order)) as u64 }
}
pub(crate) unsafe fn gnt_pages_free(hpa: u64, order: u32) {
    // SAFETY: by the contract, allocated with this order.
    unsafe { dealloc(hpa as *mut u8, pages_layout(order)) }
}
pub(crate) fn gnt_page_alloc() -> u64 {
    gnt_pages_alloc(0)
}
/// Where a test's memory lies is not to be chosen; its addresses are not truncated either.
pub(crate) fn gnt_page_alloc_low() -> u64 {
    gnt_pages_alloc(0)
}
pub(crate) unsafe fn gnt_page_free(hpa: u64) {
    // SAFETY: passed on.
    unsafe { gnt_pages_free(hpa, 0) }
}

// User memory.

fn user_ok(hva: u64, len: u64, write: bool) -> bool {
    let Some(end) = hva.checked_add(len) else { return false };
    if hva < 4096 || end > 0x7fff_ffff_f000 {
        return false;
    }
    let world = World::current();
    let state = world.lock();
    let clear = |list: &[(u64, u64)]| list.iter().all(|(s, e)| end <= *s || hva >= *e);
    clear(&state.holes) && (!write || clear(&state.read_only))
}

pub(crate) fn gnt_user_range_ok(hva: u64, len: u64) -> i32 {
    hva.checked_add(len).is_some_and(|end| end <= 0x7fff_ffff_f000).into()
}
pub(crate) unsafe fn gnt_user_read_nofault(to: *mut u8, hva: u64, len: usize) -> i32 {
    if !user_ok(hva, len as u64, false) {
        return -14;
    }
    // SAFETY: user memory of a test is memory of this process.
    unsafe { std::ptr::copy(hva as *const u8, to, len) };
    0
}
pub(crate) unsafe fn gnt_user_write_nofault(hva: u64, from: *const u8, len: usize) -> i32 {
    if !user_ok(hva, len as u64, true) {
        return -14;
    }
    // SAFETY: as above.
    unsafe { std::ptr::copy(from, hva as *mut u8, len) };
    0
}
pub(crate) use gnt_user_read_nofault as gnt_user_read;
pub(crate) use gnt_user_write_nofault as gnt_user_write;
pub(crate) unsafe fn gnt_user_clear(hva: u64, len: usize) -> i32 {
    if !user_ok(hva, len as u64, true) {
        return -14;
    }
    // SAFETY: as above.
    unsafe { std::ptr::write_bytes(hva as *mut u8, 0, len) };
    0
}
pub(crate) unsafe fn gnt_user_cmpxchg(hva: u64, size: u32, old: u64, new: u64) -> i32 {
    if !user_ok(hva, size.into(), true) {
        return -14;
    }
    macro_rules! exchange {
        ($atomic:ty, $int:ty) => {{
            // SAFETY: aligned (checked by the caller) memory of this process.
            let word = unsafe { &*(hva as *const $atomic) };
            word.compare_exchange(old as $int, new as $int, Ordering::SeqCst, Ordering::SeqCst)
                .is_err()
                .into()
        }};
    }
    match size {
        1 => exchange!(std::sync::atomic::AtomicU8, u8),
        2 => exchange!(std::sync::atomic::AtomicU16, u16),
        4 => exchange!(AtomicU32, u32),
        _ => exchange!(AtomicU64, u64),
    }
}

// Frames of user memory.

pub(crate) unsafe fn gnt_fault_in(hva: u64, write: i32, _: i32, out: *mut RawHostPage) -> i32 {
    let (page, write) = (hva & !4095, write != 0);
    if !user_ok(page.max(hva & !15), 16, write) {
        return 1;
    }
    let writable = (write || user_ok(hva & !15, 16, true)).into();
    let raw =
        RawHostPage { pfn: hva >> 12, writable, refcounted: 1, level: 1, ..Default::default() };
    // SAFETY: out is writable by the contract.
    unsafe { out.write(raw) };
    0
}
pub(crate) fn gnt_signal_poisoned(hva: u64) {
    SIGNAL.set(true);
    World::current().lock().poisoned.push(hva);
}
pub(crate) fn gnt_hva_level(_: u64) -> i32 {
    1
}
pub(crate) unsafe fn gnt_page_put(_: u64) {}
pub(crate) unsafe fn gnt_page_set_dirty(_: u64) {}
pub(crate) unsafe fn gnt_page_set_accessed(_: u64) {}

pub(crate) struct NotifierRaw(Option<(World, u64)>);
impl NotifierRaw {
    pub(crate) const fn new() -> Self {
        Self(None)
    }
}
pub(crate) unsafe fn gnt_notifier_register(
    n: *mut NotifierRaw,
    calls: &'static NotifierCalls,
    context: *mut c_void,
) -> i32 {
    let (world, id) = (World::current(), NEXT_ID.fetch_add(1, Ordering::Relaxed));
    world.lock().notifiers.push((id, calls, Context(context)));
    // SAFETY: n is the owner's storage.
    unsafe { (*n).0 = Some((world, id)) };
    0
}
pub(crate) unsafe fn gnt_notifier_unregister(n: *mut NotifierRaw) {
    // SAFETY: n is the owner's storage.
    if let Some((world, id)) = unsafe { (*n).0.take() } {
        world.lock().notifiers.retain(|r| r.0 != id);
    }
}
pub(crate) unsafe fn gnt_notifier_is_current(n: *const NotifierRaw) -> i32 {
    // SAFETY: n is the owner's storage.
    let raw = unsafe { &*n };
    raw.0.as_ref().is_some_and(|r| Arc::ptr_eq(&r.0.state, &World::current().state)).into()
}

// Locks.

static WOKEN: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

fn nap() {
    let guard = WOKEN.0.lock().unwrap_or_else(PoisonError::into_inner);
    drop(WOKEN.1.wait_timeout(guard, Duration::from_micros(200)));
}

pub(crate) unsafe fn gnt_mutex_lock_slow(word: &AtomicU32) {
    while word.swap(2, Ordering::Acquire) != 0 {
        nap();
    }
}
pub(crate) unsafe fn gnt_mutex_lock_killable_slow(word: &AtomicU32) -> i32 {
    while word.swap(2, Ordering::Acquire) != 0 {
        if SIGNAL.get() {
            return -4;
        }
        nap();
    }
    0
}
pub(crate) unsafe fn gnt_mutex_wake(_: &AtomicU32) {
    WOKEN.1.notify_all();
}
pub(crate) unsafe fn gnt_spin_lock_irqsave(word: &AtomicU32) -> usize {
    let irqs_were_on = set_irqs(false);
    super::test::step();
    while word.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::thread::yield_now();
    }
    irqs_were_on.into()
}
pub(crate) unsafe fn gnt_spin_unlock_irqrestore(word: &AtomicU32, flags: usize) {
    word.store(0, Ordering::Release);
    set_irqs(flags != 0);
}
pub(crate) unsafe fn gnt_read_lock(words: &RwWords) {
    PREEMPT_OFF.set(PREEMPT_OFF.get() + 1);
    loop {
        let seen = words.0[0].load(Ordering::Relaxed);
        let next = seen.wrapping_add(1);
        if seen != u32::MAX
            && words.0[0].compare_exchange(seen, next, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            return;
        }
        std::thread::yield_now();
    }
}
pub(crate) unsafe fn gnt_read_unlock(words: &RwWords) {
    words.0[0].fetch_sub(1, Ordering::Release);
    PREEMPT_OFF.set(PREEMPT_OFF.get().saturating_sub(1));
}
pub(crate) unsafe fn gnt_write_lock(words: &RwWords) {
    PREEMPT_OFF.set(PREEMPT_OFF.get() + 1);
    while words.0[0].compare_exchange(0, u32::MAX, Ordering::Acquire, Ordering::Relaxed).is_err() {
        std::thread::yield_now();
    }
}
pub(crate) unsafe fn gnt_write_unlock(words: &RwWords) {
    words.0[0].store(0, Ordering::Release);
    PREEMPT_OFF.set(PREEMPT_OFF.get().saturating_sub(1));
}
pub(crate) unsafe fn gnt_rwlock_is_contended(_: &RwWords) -> i32 {
    0
}

/// Two generations of readers: a writer flips and waits for the old one, twice.
#[derive(Default)]
pub(crate) struct SrcuRaw {
    index: AtomicU32,
    readers: [AtomicU32; 2],
    writer: Mutex<()>,
}
pub(crate) fn gnt_srcu_new() -> *mut SrcuRaw {
    Box::into_raw(Box::default())
}
pub(crate) unsafe fn gnt_srcu_free(domain: *mut SrcuRaw) {
    // SAFETY: made by gnt_srcu_new, freed once.
    drop(unsafe { Box::from_raw(domain) });
}
pub(crate) unsafe fn gnt_srcu_read_lock(domain: *mut SrcuRaw) -> i32 {
    // SAFETY: the domain lives by the contract.
    let domain = unsafe { &*domain };
    let index = domain.index.load(Ordering::SeqCst) & 1;
    domain.readers[index as usize].fetch_add(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    index as i32
}
pub(crate) unsafe fn gnt_srcu_read_unlock(domain: *mut SrcuRaw, index: i32) {
    // SAFETY: the domain lives by the contract.
    unsafe { &*domain }.readers[(index & 1) as usize].fetch_sub(1, Ordering::SeqCst);
}
pub(crate) unsafe fn gnt_srcu_synchronize(domain: *mut SrcuRaw) {
    // SAFETY: the domain lives by the contract.
    let domain = unsafe { &*domain };
    let _writer = domain.writer.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::current();
    for _ in 0..2 {
        fence(Ordering::SeqCst);
        let old = domain.index.fetch_xor(1, Ordering::SeqCst) & 1;
        let waits = || domain.readers[old as usize].load(Ordering::SeqCst) != 0;
        if waits() {
            world.lock().srcu_waiters += 1;
            while waits() {
                std::thread::yield_now();
            }
            world.lock().srcu_waiters -= 1;
        }
    }
}

// Timers.

#[derive(Default)]
struct TimerState {
    id: u64,
    context: Option<(TimerFn, Context)>,
    /// The world on whose clock the timer was last started.
    world: Option<World>,
}
pub(crate) struct TimerRaw(Mutex<TimerState>);
impl TimerRaw {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(TimerState { id: 0, context: None, world: None }))
    }
    fn state(&self) -> std::sync::MutexGuard<'_, TimerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
pub(crate) unsafe fn gnt_timer_init(t: *mut TimerRaw, expired: TimerFn, context: *mut c_void) {
    // SAFETY: t lives by the contract; so below.
    let mut state = unsafe { &*t }.state();
    state.id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    state.context = Some((expired, Context(context)));
}
pub(crate) unsafe fn gnt_timer_start(t: *mut TimerRaw, at: u64) {
    // SAFETY: as above.
    let mut state = unsafe { &*t }.state();
    let Some((expired, context)) = state.context else { return };
    if let Some(old) = state.world.take() {
        old.lock().armed.remove(&state.id);
    }
    let world = World::current();
    world.lock().armed.insert(state.id, Armed { at, expired, context });
    state.world = Some(world);
}
pub(crate) unsafe fn gnt_timer_try_cancel(t: *mut TimerRaw) -> i32 {
    // SAFETY: as above.
    let state = unsafe { &*t }.state();
    let Some(world) = &state.world else { return 0 };
    let mut inside = world.lock();
    if inside.firing.contains(&state.id) {
        return -1;
    }
    inside.armed.remove(&state.id).is_some().into()
}
pub(crate) unsafe fn gnt_timer_cancel(t: *mut TimerRaw) -> i32 {
    loop {
        // SAFETY: as above.
        match unsafe { gnt_timer_try_cancel(t) } {
            -1 => nap(),
            armed => return armed,
        }
    }
}

// The task.

#[derive(Debug)]
pub(crate) struct WaiterRaw(AtomicBool);
impl WaiterRaw {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }
}
pub(crate) unsafe fn gnt_waiter_enter(_: *mut WaiterRaw) {}
pub(crate) unsafe fn gnt_waiter_prepare(w: *mut WaiterRaw) {
    // SAFETY: w lives by the contract; so below.
    unsafe { &*w }.0.store(true, Ordering::SeqCst);
}
pub(crate) unsafe fn gnt_waiter_finish(w: *mut WaiterRaw) {
    // SAFETY: as above.
    unsafe { &*w }.0.store(false, Ordering::SeqCst);
}
pub(crate) unsafe fn gnt_waiter_sleep(_: *mut WaiterRaw) {
    nap();
}
pub(crate) unsafe fn gnt_waiter_wake(w: *mut WaiterRaw) -> i32 {
    // SAFETY: as above.
    let slept = unsafe { &*w }.0.load(Ordering::SeqCst);
    WOKEN.1.notify_all();
    slept.into()
}
pub(crate) fn gnt_may_poll() -> i32 {
    // The test clock does not move by itself: polling would never end.
    0
}
pub(crate) fn gnt_work_pending() -> i32 {
    (SIGNAL.get() || RESCHED.get()).into()
}
pub(crate) fn gnt_handle_work() -> i32 {
    RESCHED.set(false);
    if SIGNAL.get() { -4 } else { 0 }
}
pub(crate) fn gnt_signal_pending() -> i32 {
    SIGNAL.get().into()
}
pub(crate) fn gnt_need_resched() -> i32 {
    RESCHED.get().into()
}
pub(crate) fn gnt_cond_resched() {
    RESCHED.set(false);
}
pub(crate) fn gnt_run_delay_ns() -> u64 {
    RUN_DELAY.get()
}
pub(crate) fn gnt_current_tid() -> u32 {
    thread_local!(static TID: u32 = NEXT_ID.fetch_add(1, Ordering::Relaxed) as u32);
    TID.with(|t| *t)
}
pub(crate) fn gnt_sigmask_set(mask: u64) {
    let never = crate::task::SignalSet::UNBLOCKABLE;
    assert!(mask & never == 0, "a mask that no task may have: {mask:#x}");
}
pub(crate) fn gnt_sigmask_restore() {}
pub(crate) fn gnt_guest_enter() {
    assert!(!IRQS_ON.get(), "the guest is entered with interrupts off");
}
pub(crate) fn gnt_guest_exit(_interrupted: bool) {
    assert!(!IRQS_ON.get(), "the guest is left with interrupts off");
}
pub(crate) fn gnt_guest_time_end() {
    assert!(!IRQS_ON.get(), "guest time ends with interrupts off");
}
pub(crate) fn gnt_guest_pause() {
    gnt_guest_exit(false);
}
pub(crate) fn gnt_guest_resume() {
    gnt_guest_enter();
}
pub(crate) fn irq_window() {
    assert!(!IRQS_ON.get(), "a window is opened where interrupts are off");
}
pub(crate) fn irq_disable() {
    assert!(set_irqs(false), "interrupts are turned off twice");
}
pub(crate) fn irq_enable() {
    set_irqs(true);
}
pub(crate) fn irq_enabled() -> bool {
    IRQS_ON.get()
}

// CPUs.

const CPUS: u32 = 4;
pub(crate) enum CpuMaskRaw {}
pub(crate) fn gnt_cpu_id() -> u32 {
    CPU.get()
}
pub(crate) fn gnt_max_cpus() -> u32 {
    CPUS
}
pub(crate) unsafe fn gnt_kick(cpu: u32) {
    World::current().lock().kicks.push(cpu as usize);
}
pub(crate) fn gnt_sync_begin() -> *mut CpuMaskRaw {
    PREEMPT_OFF.set(PREEMPT_OFF.get() + 1);
    std::ptr::null_mut()
}
pub(crate) unsafe fn gnt_sync_add(_: *mut CpuMaskRaw, cpu: u32) {
    World::current().lock().kicks.push(cpu as usize);
    TO_SYNC.with_borrow_mut(|cpus| cpus.push(cpu));
}
/// Waits for the threads of this world that have interrupts off on those CPUs.
pub(crate) unsafe fn gnt_sync_end(_: *mut CpuMaskRaw) {
    let (world, own) = (World::current(), IRQS_OFF_AS.get());
    let cpus = TO_SYNC.take();
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
/// Outside the kernel there is no other CPU to be asked.
pub(crate) fn gnt_run_on(_: u32, _: extern "C" fn(u64), _: u64) -> bool {
    false
}

pub(crate) fn gnt_run_on_all(f: extern "C" fn()) {
    f();
}
// The FPU: the image as user space sees it, of x87, SSE and AVX.

#[derive(Debug)]
pub(crate) struct FpuRaw(Option<Box<[u8; 4096]>>);
impl FpuRaw {
    pub(crate) const fn new() -> Self {
        Self(None)
    }
}
pub(crate) unsafe fn gnt_fpu_alloc(f: *mut FpuRaw) -> i32 {
    let mut image = Box::new([0u8; 4096]);
    image[..2].copy_from_slice(&0x37fu16.to_le_bytes());
    image[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
    // SAFETY: f lives by the contract; so below.
    unsafe { (*f).0 = Some(image) };
    0
}
pub(crate) unsafe fn gnt_fpu_free(f: *mut FpuRaw) {
    // SAFETY: as above.
    unsafe { (*f).0 = None };
}
pub(crate) unsafe fn gnt_fpu_swap(_: *mut FpuRaw, enter: i32, owner: *mut u64) {
    might_sleep();
    let me = IRQS_ON.with(|word| std::ptr::from_ref(word).addr() as u64);
    // SAFETY: the owner's word is the caller's.
    let owner = unsafe { &mut *owner };
    if *owner == if enter == 0 { me } else { 0 } {
        *owner = if enter == 0 { 0 } else { me };
    }
}
pub(crate) fn gnt_fpu_ensure() {
    assert!(!IRQS_ON.get(), "interrupts are off before the entry");
}
pub(crate) unsafe fn gnt_fpu_to_uabi(f: *mut FpuRaw, out: *mut u8, len: usize, _: u64, _: u32) {
    // SAFETY: as above; out is writable for len bytes.
    unsafe {
        if let Some(image) = &(*f).0 {
            std::ptr::copy_nonoverlapping(image.as_ptr(), out, len.min(4096));
        }
    }
}
pub(crate) unsafe fn gnt_fpu_from_uabi(
    f: *mut FpuRaw,
    from: *const u8,
    xcr0: u64,
    _: *mut u32,
) -> i32 {
    // SAFETY: as above; from is readable for 4096 bytes.
    unsafe {
        let features = from.add(512).cast::<u64>().read_unaligned();
        if features & !xcr0 != 0 {
            return -22;
        }
        if let Some(image) = &mut (*f).0 {
            std::ptr::copy_nonoverlapping(from, image.as_mut_ptr(), 4096);
        }
    }
    0
}
pub(crate) unsafe fn gnt_fpu_uabi_size(_: *const FpuRaw) -> usize {
    4096
}
pub(crate) unsafe fn gnt_fpu_enable_features(_: *mut FpuRaw, _: u64) -> i32 {
    0
}
pub(crate) unsafe fn gnt_fpu_update_xfd(_: *mut FpuRaw, _: u64) {}
pub(crate) fn gnt_fpu_sync_xfd() {}
pub(crate) fn gnt_fpu_guest_xfeatures() -> u64 {
    7
}
pub(crate) fn gnt_host_xcr0() -> u64 {
    7
}

// Eventfds.

pub(crate) type EventFdRaw = Event;

pub(super) fn signal(event: &Event, count: u64) {
    let mut state = event.state.lock().unwrap_or_else(PoisonError::into_inner);
    if state.watches.is_empty() {
        state.count = state.count.saturating_add(count);
        return;
    }
    let irqs_were_on = set_irqs(false);
    for (_, calls, context) in &state.watches {
        // SAFETY: attached; detaching takes the lock held here.
        unsafe { (calls.fired)(context.0) }
    }
    set_irqs(irqs_were_on);
}
pub(crate) fn gnt_fd_is_open(_fd: i32) -> i32 {
    0
}
pub(crate) fn gnt_eventfd_get(fd: i32) -> *mut EventFdRaw {
    let event = descriptors().events.get(&fd).cloned();
    event.map_or(std::ptr::null_mut(), |e| Arc::into_raw(e).cast_mut())
}
pub(crate) unsafe fn gnt_eventfd_put(e: *mut EventFdRaw) {
    // SAFETY: one reference of gnt_eventfd_get is given back.
    drop(unsafe { Arc::from_raw(e.cast_const()) });
}
pub(crate) unsafe fn gnt_eventfd_signal(e: *mut EventFdRaw, count: u64) {
    super::test::step();
    // SAFETY: the reference is held.
    signal(unsafe { &*e }, count);
}

pub(crate) struct WatchRaw(Option<(Arc<Event>, u64)>);
impl WatchRaw {
    pub(crate) const fn new() -> Self {
        Self(None)
    }
}
pub(crate) unsafe fn gnt_watch_attach(
    w: *mut WatchRaw,
    fd: i32,
    calls: &'static WatchCalls,
    context: *mut c_void,
) -> i32 {
    let Some(event) = descriptors().events.get(&fd).cloned() else { return -9 };
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let mut state = event.state.lock().unwrap_or_else(PoisonError::into_inner);
    state.watches.push((id, calls, Context(context)));
    if state.count != 0 {
        // SAFETY: attached just now.
        unsafe { (calls.fired)(context) }
    }
    drop(state);
    // SAFETY: w is the owner's storage.
    unsafe { (*w).0 = Some((event, id)) };
    0
}
pub(crate) unsafe fn gnt_watch_detach(w: *mut WatchRaw) {
    // SAFETY: w is the owner's storage.
    if let Some((event, id)) = unsafe { (*w).0.take() } {
        event.state.lock().unwrap_or_else(PoisonError::into_inner).watches.retain(|x| x.0 != id);
    }
}
pub(crate) unsafe fn gnt_watch_context(w: *const WatchRaw) -> *mut EventFdRaw {
    // SAFETY: w is the owner's storage.
    let raw = unsafe { &*w };
    raw.0.as_ref().map_or(std::ptr::null_mut(), |x| Arc::as_ptr(&x.0).cast_mut())
}

// Clocks: one nanosecond is one TSC tick.

pub(crate) fn gnt_monotonic_ns() -> u64 {
    World::current().now()
}
pub(crate) fn gnt_boottime_ns() -> u64 {
    World::current().now()
}
pub(crate) fn gnt_realtime_ns() -> u64 {
    World::current().now() + super::TEST_EPOCH_NS
}
pub(crate) fn gnt_tsc_khz() -> u32 {
    1_000_000
}
pub(crate) fn gnt_tsc_is_stable() -> i32 {
    1
}
pub(crate) unsafe fn gnt_clock_snapshot(out: *mut Snapshot) {
    // SAFETY: out is writable by the contract.
    unsafe { out.write(Snapshot::of_test(World::current().now())) }
}
pub(crate) fn gnt_clock_generation() -> u32 {
    0
}

// Parameters.

pub(crate) fn gnt_keep_roots() -> i32 {
    1
}

pub(crate) fn gnt_ept() -> i32 {
    1
}

pub(crate) fn gnt_npt() -> i32 {
    1
}

pub(crate) fn gnt_halt_poll_ns() -> u64 {
    0
}
pub(crate) fn gnt_host_state_by_msr() -> i32 {
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
pub(crate) fn gnt_preemption_timer() -> i32 {
    1
}
pub(crate) fn gnt_no_preemption_timer() {}

// The log.

pub(crate) fn gnt_log_ratelimit() -> i32 {
    1
}
pub(crate) unsafe fn gnt_log(_: u32, text: *const u8, len: usize) {
    // SAFETY: text is readable for len bytes by the contract.
    let text = String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(text, len) });
    World::current().lock().log.push(text.into_owned());
}

// debugfs: directories by their path.

/// The text that a reader gathers.
pub(crate) struct SeqRaw(pub(crate) String);
pub(crate) struct DebugDirRaw {
    path: String,
    calls: &'static DebugCalls,
    object: *mut c_void,
}

pub(crate) unsafe fn gnt_seq_write(to: *mut SeqRaw, text: *const u8, len: usize) {
    // SAFETY: both by the contract.
    unsafe { (*to).0 += &String::from_utf8_lossy(std::slice::from_raw_parts(text, len)) }
}
pub(crate) unsafe fn gnt_debug_add(
    name: *const c_char,
    parent: *mut DebugDirRaw,
    calls: &'static DebugCalls,
    object: *mut c_void,
) -> *mut DebugDirRaw {
    // SAFETY: NUL-terminated, and the parent is alive or null, by the contract.
    let (name, parent) = unsafe { (CStr::from_ptr(name).to_string_lossy(), parent.as_ref()) };
    let path = parent.map_or(name.to_string(), |p| format!("{}/{name}", p.path));
    let world = World::current();
    let mut state = world.lock();
    if state.debug.contains_key(&path) {
        return std::ptr::null_mut();
    }
    state.debug.insert(path.clone(), (calls, Context(object)));
    Box::into_raw(Box::new(DebugDirRaw { path, calls, object }))
}
pub(crate) unsafe fn gnt_debug_remove(dir: *mut DebugDirRaw) {
    // SAFETY: made by gnt_debug_add, removed once.
    let dir = unsafe { Box::from_raw(dir) };
    World::current().lock().debug.remove(&dir.path);
    // SAFETY: the share that the directory held.
    unsafe { (dir.calls.release)(dir.object) }
}

// Tracing: what is said goes to a list, in words.

pub(crate) fn observed() -> u32 {
    World::current().lock().observed
}
fn traced(what: String) {
    World::current().lock().traced.push(what);
}
pub(crate) fn gnt_trace_entry(vcpu_id: u32, rip: u64) {
    traced(format!("entry {vcpu_id} {rip:#x}"));
}
pub(crate) unsafe fn gnt_trace_exit(record: *const crate::trace::ExitRecord) {
    // SAFETY: readable by the contract.
    let r = unsafe { &*record };
    traced(format!("exit {} {:#x} {:#x} {:#x} {:#x}", r.vcpu_id, r.code, r.rip, r.info1, r.info2));
}
pub(crate) fn gnt_trace_pio(write: u32, port: u32, size: u32, count: u32, value: u32) {
    traced(format!("pio {write} {port:#x} {size} {count} {value:#x}"));
}
pub(crate) fn gnt_trace_mmio(kind: u32, len: u32, gpa: u64, value: u64) {
    traced(format!("mmio {kind} {len} {gpa:#x} {value:#x}"));
}
pub(crate) fn gnt_trace_msr(write: u32, index: u32, value: u64, faulted: u32) {
    traced(format!("msr {write} {index:#x} {value:#x} {faulted}"));
}
pub(crate) unsafe fn gnt_trace_cpuid(leaf: u32, subleaf: u32, answer: *const [u32; 4], found: u32) {
    // SAFETY: readable by the contract.
    traced(format!("cpuid {leaf:#x} {subleaf} {:x?} {found}", unsafe { *answer }));
}
pub(crate) unsafe fn gnt_trace_hypercall(call: *const [u64; 5]) {
    // SAFETY: readable by the contract.
    traced(format!("hypercall {:x?}", unsafe { *call }));
}
pub(crate) fn gnt_trace_inj_virq(vector: u32) {
    traced(format!("inj_virq {vector:#x}"));
}
pub(crate) fn gnt_trace_page_fault(vcpu_id: u32, rip: u64, address: u64, error: u64) {
    traced(format!("page_fault {vcpu_id} {rip:#x} {address:#x} {error:#x}"));
}

// Files.

pub(crate) struct FileRaw(&'static FileCalls, Context);

pub(crate) unsafe fn gnt_file_new(
    name: *const c_char,
    _: i64,
    calls: &'static FileCalls,
    object: *mut c_void,
    fd: *mut i32,
) -> *mut FileRaw {
    // SAFETY: a NUL-terminated name, and fd is writable.
    unsafe {
        assert!(!CStr::from_ptr(name).is_empty());
        let mut all = descriptors();
        all.next += 1;
        fd.write(all.next);
    }
    Box::into_raw(Box::new(FileRaw(calls, Context(object))))
}
pub(crate) unsafe fn gnt_file_install(file: *mut FileRaw, fd: i32) {
    // SAFETY: made by gnt_file_new, taken once.
    let file = unsafe { Box::from_raw(file) };
    descriptors().files.insert(fd, (file.0, file.1));
}
pub(crate) unsafe fn gnt_file_cancel(file: *mut FileRaw, _: i32) {
    // SAFETY: as above; the object is released as the kernel does when the file goes.
    unsafe {
        let file = Box::from_raw(file);
        (file.0.release)(file.1.0);
    }
}
pub(crate) unsafe fn gnt_file_get(
    fd: i32,
    calls: *mut *const FileCalls,
    object: *mut *mut c_void,
) -> *mut FileRaw {
    let Some(file) = descriptors().files.get(&fd).copied() else { return std::ptr::null_mut() };
    // SAFETY: both are writable.
    unsafe {
        calls.write(file.0);
        object.write(file.1.0);
    }
    std::ptr::NonNull::dangling().as_ptr()
}
pub(crate) unsafe fn gnt_file_put(_: *mut FileRaw) {}
