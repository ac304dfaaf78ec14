//! What a test can do to its surroundings.

use std::ffi::CStr;
use std::sync::PoisonError;

use x86::{Hva, Pfn};

use super::sys;
use super::world::{Context, Event, World, descriptors};
use crate::gup::{FrameOf, HostFrame, HostPage};
use crate::sys::{NotifierCalls, WatchCalls};

/// The world of this thread, whose time a test advances: `clock().advance(ns)`.
pub fn clock() -> World {
    World::current()
}

/// Makes this (spawned) thread share `world`.
pub fn adopt(world: &World) {
    World::enter(world);
}

/// What `act` does, and the most steps that it took in one go with interrupts off.
pub fn longest_irqs_off<R>(act: impl FnOnce() -> R) -> (R, u64) {
    sys::STEPS.set((0, 0));
    let result = act();
    (result, sys::STEPS.get().1)
}

/// User memory that faults until this is dropped.
#[must_use]
pub struct Hole(World, (u64, u64), bool);

impl Drop for Hole {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let list = if self.2 { &mut state.read_only } else { &mut state.holes };
        if let Some(at) = list.iter().position(|h| *h == self.1) {
            list.swap_remove(at);
        }
    }
}

/// Takes `len` bytes at `hva` out of user memory: copies, cmpxchg and `fault_in` fault there.
pub fn unmap(hva: Hva, len: u64) -> Hole {
    let (world, range) = (World::current(), (hva.0, hva.0.saturating_add(len)));
    world.lock().holes.push(range);
    Hole(world, range, false)
}

/// Makes `len` bytes at `hva` read-only: writes fault, `fault_in` for reading says not writable.
pub fn protect(hva: Hva, len: u64) -> Hole {
    let (world, range) = (World::current(), (hva.0, hva.0.saturating_add(len)));
    world.lock().read_only.push(range);
    Hole(world, range, true)
}

/// Whether the host pages with five levels: user memory may lie beyond 2^47 then.
pub fn set_five_levels(five: bool) {
    World::current().lock().five_levels = five;
}

fn notifiers() -> Vec<(&'static NotifierCalls, Context)> {
    World::current().lock().notifiers.iter().map(|(_, calls, context)| (*calls, *context)).collect()
}

/// Invalidates a range of user memory as the memory manager does: start, `meanwhile`, end.
pub fn invalidate(start: Hva, end: Hva, meanwhile: impl FnOnce()) {
    invalidate_by(start, end, true, meanwhile);
}

/// As [`invalidate`], by somebody who must not sleep, as the OOM reaper.
pub fn invalidate_without_sleep(start: Hva, end: Hva, meanwhile: impl FnOnce()) {
    invalidate_by(start, end, false, meanwhile);
}

fn invalidate_by(start: Hva, end: Hva, may_block: bool, meanwhile: impl FnOnce()) {
    for (calls, context) in notifiers() {
        // SAFETY: registered, and the test does not drop the owner meanwhile.
        unsafe { (calls.invalidate_start)(context.0, start.0, end.0, may_block.into()) }
    }
    meanwhile();
    for (calls, context) in notifiers() {
        // SAFETY: registered, and the test does not drop the owner meanwhile.
        unsafe { (calls.invalidate_end)(context.0, start.0, end.0) }
    }
}

/// Asks all notifiers whether a range was accessed, clearing that.
pub fn clear_young(start: Hva, end: Hva) -> bool {
    // SAFETY: registered, and the test does not drop the owner meanwhile. No short circuit: every notifier clears.
    notifiers().iter().fold(false, |any, (calls, context)| {
        any | (unsafe { (calls.clear_young)(context.0, start.0, end.0) } != 0)
    })
}

/// Asks all notifiers whether a range was accessed.
pub fn test_young(start: Hva, end: Hva) -> bool {
    // SAFETY: registered, and the test does not drop the owner meanwhile.
    notifiers().iter().any(|(c, x)| unsafe { (c.test_young)(x.0, start.0, end.0) } != 0)
}

/// A frame as `host::gup` would find it.
pub fn host_frame(pfn: u64, of: FrameOf) -> HostFrame {
    HostFrame::new(Pfn(pfn), of)
}

/// A page as `host::gup` would find it.
pub fn host_page(pfn: u64, level: u8, writable: bool) -> HostPage {
    HostPage::made_up(host_frame(pfn, FrameOf::Memory), level, writable)
}

/// Where threads of this world were told of broken memory since this was last asked.
pub fn take_poisoned() -> Vec<u64> {
    std::mem::take(&mut World::current().lock().poisoned)
}

/// The frames that the host was told are dirty since this was last asked, each once, in order.
pub fn take_dirtied() -> Vec<u64> {
    std::mem::take(&mut World::current().lock().dirtied).into_iter().collect()
}

/// The frames of which references were given back since this was last asked.
pub fn take_put() -> Vec<u64> {
    std::mem::take(&mut World::current().lock().put)
}

/// The CPUs that were asked to run a function since this was last asked, and its arguments.
pub fn take_asked() -> Vec<(usize, u64)> {
    std::mem::take(&mut World::current().lock().asked)
}

/// The page at `hva` is memory of a device's from now on.
pub fn make_device(hva: Hva) {
    World::current().lock().devices.push(hva.0 >> 12);
}

/// How many threads of this world wait until nobody reads what they have replaced.
pub fn srcu_waiters() -> usize {
    World::current().lock().srcu_waiters
}

/// The address space dies.
pub fn release_mm() {
    for (calls, context) in notifiers() {
        // SAFETY: registered, and the test does not drop the owner meanwhile.
        unsafe { (calls.release)(context.0) }
    }
}

/// Whether a signal is pending for this thread.
pub fn set_signal_pending(pending: bool) {
    sys::SIGNAL.set(pending);
}

/// Whether another task wants this thread's CPU.
pub fn set_need_resched(wanted: bool) {
    sys::RESCHED.set(wanted);
}

/// The CPU this thread pretends to run on (0 to 3).
pub fn set_cpu(cpu: usize) {
    sys::CPU.set(cpu as u32);
}

/// Does what another CPU does, in a test's name for it, while the guest runs on this one.
pub fn on_another_cpu<R>(act: impl FnOnce() -> R) -> R {
    let before = sys::IN_GUEST.replace(false);
    let done = act();
    sys::IN_GUEST.set(before);
    done
}

/// Whether the process of this thread has a local descriptor table.
pub fn set_uses_ldt(uses: bool) {
    sys::LDT.set(uses);
}

/// What the host has in DEBUGCTL while this thread runs.
pub fn set_host_debugctl(value: u64) {
    HOST_DEBUGCTL.set(value);
}

pub(crate) fn host_debugctl() -> u64 {
    HOST_DEBUGCTL.get()
}

/// Whether the kernel detects split locks, and if so, lets a task of which it has warned go on.
pub fn set_split_locks(goes_on: Option<bool>) {
    SPLIT_LOCKS.set(goes_on);
}

/// What perf wants in IA32_PERF_GLOBAL_CTRL while a guest runs, where it differs from the host's value.
pub fn set_perf_guest(global_ctrl: Option<u64>) {
    PERF_GUEST.set(global_ctrl);
}

/// How often counters were stopped for a guest, less how often they were started again.
pub fn perf_stopped() -> i32 {
    PERF_STOPPED.get()
}

pub(crate) fn perf_enter() -> Option<u64> {
    let wanted = PERF_GUEST.get()?;
    PERF_STOPPED.set(PERF_STOPPED.get() + 1);
    Some(wanted)
}

pub(crate) fn perf_leave() {
    PERF_STOPPED.set(PERF_STOPPED.get() - 1);
}

std::thread_local! {
    static HOST_DEBUGCTL: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    static IBPB_ON_SWITCH: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    static REFILLS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    static PERF_GUEST: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
    static PERF_STOPPED: std::cell::Cell<i32> = const { std::cell::Cell::new(0) };
    static SPLIT_LOCKS: std::cell::Cell<Option<bool>> = const { std::cell::Cell::new(None) };
}

pub(crate) fn split_locks() -> Option<bool> {
    sys::refuse_in_guest("what the kernel does about split locks");
    SPLIT_LOCKS.get()
}

/// From now on this thread's kernel wants an IBPB where another vCPU ran last.
pub fn want_ibpb_on_switch() {
    IBPB_ON_SWITCH.set(true);
}

pub(crate) fn ibpb_on_switch() -> bool {
    IBPB_ON_SWITCH.get()
}

/// How often this thread has refilled the return stack.
pub fn return_stack_refills() -> u32 {
    REFILLS.get()
}

pub(crate) fn refill_return_stack() {
    REFILLS.set(REFILLS.get() + 1);
}

pub(crate) fn uses_ldt() -> bool {
    sys::LDT.get()
}

/// Changes of the speculative store bypass for a guest, of this thread: on and off in turns, so an odd
/// number means that it was left on.
pub fn guest_ssbd_changes() -> u32 {
    sys::GUEST_SSBD.get()
}

/// Panics where a guest's setting is put on another, or is taken away twice.
pub(crate) fn guest_ssbd(on: bool) {
    let changes = sys::GUEST_SSBD.get();
    assert!(changes.is_multiple_of(2) == on, "speculative store bypass is already so");
    sys::GUEST_SSBD.set(changes + 1);
}

/// How often this thread asked to be called before user space runs.
pub fn user_return_watches() -> u32 {
    sys::USER_RETURN.get().unwrap_or_default()
}

/// From now on this thread's kernel cannot call before user space runs.
pub fn refuse_user_return_watches() {
    sys::USER_RETURN.set(None);
}

pub(crate) fn watch_user_return() -> bool {
    let watches = sys::USER_RETURN.get().map(|n| n + 1);
    sys::USER_RETURN.set(watches);
    watches.is_some()
}

/// What `run_delay_ns` answers on this thread.
pub fn set_run_delay_ns(ns: u64) {
    sys::RUN_DELAY.set(ns);
}

/// The CPUs kicked since the last call, by this thread's world.
pub fn take_kicks() -> Vec<usize> {
    std::mem::take(&mut World::current().lock().kicks)
}

/// What is observed in this thread's world (`host::trace`), as bits.
pub fn observe(bits: u32) {
    World::current().lock().observed = bits;
}

/// What the tracepoints said since the last call.
pub fn take_traced() -> Vec<String> {
    std::mem::take(&mut World::current().lock().traced)
}

/// What a file in debugfs shows; `None` where there is none.
pub fn debug_file(path: &str) -> Option<String> {
    let (dir, name) = path.rsplit_once('/')?;
    let (calls, context) = World::current().lock().debug.get(dir).copied()?;
    let mut text = sys::SeqRaw(String::new());
    // SAFETY: the names are static, and the directory is there while the test reads.
    unsafe {
        let named = |file: &u32| CStr::from_ptr((calls.name)(*file)).to_bytes() == name.as_bytes();
        let file = (0..calls.files).find(named)?;
        (calls.show)(context.0, file, &mut text);
    }
    Some(text.0)
}

/// The last message logged in this thread's world.
pub fn last_log() -> String {
    World::current().lock().log.last().cloned().unwrap_or_default()
}

/// A new eventfd with count 0.
pub fn eventfd() -> i32 {
    let mut all = descriptors();
    all.next += 1;
    let fd = all.next;
    all.events.insert(fd, std::sync::Arc::new(Event::default()));
    fd
}

/// Reads and clears the count.
pub fn eventfd_read(fd: i32) -> u64 {
    let event = descriptors().events.get(&fd).cloned();
    event.map_or(0, |e| {
        std::mem::take(&mut e.state.lock().unwrap_or_else(PoisonError::into_inner).count)
    })
}

/// Signals an eventfd as user space would by writing to it.
pub fn eventfd_signal(fd: i32, count: u64) {
    let event = descriptors().events.get(&fd).cloned();
    if let Some(event) = event {
        sys::signal(&event, count);
    }
}

/// Closes the descriptor: watches hear that it hung up.
pub fn eventfd_close(fd: i32) {
    let event = descriptors().events.remove(&fd);
    if let Some(event) = event {
        let state = event.state.lock().unwrap_or_else(PoisonError::into_inner);
        let calls: Vec<(&'static WatchCalls, Context)> =
            state.watches.iter().map(|(_, c, x)| (*c, *x)).collect();
        for (calls, context) in calls {
            // SAFETY: attached; detaching takes the lock held here.
            unsafe { (calls.hung_up)(context.0) }
        }
    }
}

/// An ioctl on one of our files, by a 64-bit process.
pub fn ioctl(fd: i32, command: u32, argument: u64) -> i64 {
    let file = descriptors().files.get(&fd).copied();
    match file {
        // SAFETY: the file is open, and the test does not close it meanwhile.
        Some((calls, context)) => unsafe { (calls.ioctl)(context.0, command, argument, 0) },
        None => -9,
    }
}

/// A read from one of our files at `offset` into `buffer`.
pub fn read_at(fd: i32, offset: u64, buffer: &mut [u8]) -> i64 {
    let file = descriptors().files.get(&fd).copied();
    let (at, len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
    match file {
        // SAFETY: the file is open, and the test does not close it meanwhile.
        Some((calls, context)) => unsafe { (calls.read)(context.0, offset, at, len) },
        None => -9,
    }
}

/// The page that a mapping of the file shows at page offset `offset`; 0 for none.
pub fn mmap_page(fd: i32, offset: u64) -> u64 {
    let file = descriptors().files.get(&fd).copied();
    // SAFETY: the file is open, and the test does not close it meanwhile.
    file.map_or(0, |(calls, context)| unsafe { (calls.page)(context.0, offset) })
}

/// Closes one of our files.
pub fn close(fd: i32) {
    let file = descriptors().files.remove(&fd);
    if let Some((calls, context)) = file {
        // SAFETY: removed above, so released once.
        unsafe { (calls.release)(context.0) }
    }
}
