//! Irqfds: an eventfd that raises an interrupt. KVM API §4.75.
//!
//! Without a resample eventfd a signal is an edge. With one, it drives the line high until the
//! guest ends the interrupt; then the line goes low and the resample eventfd is signalled.
//!
//! Why an edge takes no part in the line's level: there is nobody who would lower it again. With a resample eventfd the
//! device asserts until the guest has served it, and is asked then whether it still wants to; all irqfds of that kind drive
//! a GSI as one source, which the end lowers for all: who still has something to say raises it again.

use core::sync::atomic::{AtomicBool, Ordering::*};

use alloc::vec::Vec;
use host::{
    Arc, BadFd, NoMemory,
    event::{EventFd, EventHandler, Watch, WatchError},
    sync::Mutex,
    task,
};

use super::{
    controllers::{SharedCore, Source},
    resample::{MAX_RESAMPLERS, Resampler},
};

/// Why an irqfd is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqFdError {
    /// The eventfd raises an interrupt of this VM already (EBUSY).
    Busy,
    /// There are [`MAX_RESAMPLERS`] (ENOSPC).
    Full,
    /// A descriptor is no eventfd.
    BadFd(BadFd),
    /// There is no memory for it (`-ENOMEM`).
    NoMemory,
}

impl From<BadFd> for IrqFdError {
    fn from(error: BadFd) -> Self {
        Self::BadFd(error)
    }
}

impl From<NoMemory> for IrqFdError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

impl From<WatchError> for IrqFdError {
    fn from(error: WatchError) -> Self {
        match error {
            WatchError::BadFd(error) => Self::BadFd(error),
            WatchError::Busy => Self::Busy,
            WatchError::NoMemory => Self::NoMemory,
        }
    }
}

/// What happens when the eventfd is signalled.
struct Handler {
    core: SharedCore,
    gsi: u32,
    resample: bool,
    /// All descriptors are closed.
    gone: AtomicBool,
}

impl EventHandler for Handler {
    fn fired(&self) {
        if self.resample {
            self.core.set_line(self.gsi, Source::Resample, true);
        } else {
            self.core.pulse(self.gsi);
        }
    }

    fn hung_up(&self) {
        self.gone.store(true, Release);
    }
}

struct IrqFd {
    watch: Arc<Watch<Handler>>,
    resample: Option<Arc<Resampler>>,
}

/// The irqfds of a VM.
pub struct IrqFds {
    list: Mutex<Vec<IrqFd>>,
}

impl IrqFds {
    /// A list without any irqfd.
    pub const fn new() -> Self {
        Self { list: Mutex::new(Vec::new()) }
    }

    /// Connects eventfd `fd` to a GSI; `resamplefd` is signalled at the end of its interrupts.
    /// A counter that is set already raises the interrupt at once. Process context.
    ///
    /// # Errors
    /// All of [`IrqFdError`]; nothing is connected then.
    pub fn assign(
        &self,
        core: &SharedCore,
        fd: i32,
        gsi: u32,
        resamplefd: Option<i32>,
    ) -> Result<(), IrqFdError> {
        // Both descriptors first: what is refused for them has changed nothing.
        let event = EventFd::get(fd)?;
        let resample = match resamplefd {
            Some(fd) => Some(Arc::new(Resampler::new(EventFd::get(fd)?))?),
            None => None,
        };
        let mut list = self.list.lock();
        // hung_up() comes where nothing may sleep, so what was closed is dropped here.
        reap(core, &mut list, |irqfd| irqfd.watch.gone.load(Acquire));
        // One eventfd raises one interrupt of a VM, as stock KVM has it.
        if list.iter().any(|irqfd| irqfd.watch.watches(&event)) {
            return Err(IrqFdError::Busy);
        }
        // Room first, so that nothing fails once the eventfd is watched.
        list.try_reserve(1).map_err(|_| NoMemory)?;
        // Before the eventfd is watched: it may fire at once, and its end has to find somebody to
        // tell.
        if let Some(resample) = &resample {
            add_resampler(core, gsi, resample)?;
        }
        let handler = Handler {
            core: core.clone(),
            gsi,
            resample: resample.is_some(),
            gone: AtomicBool::new(false),
        };
        match Watch::new(fd, &event, handler) {
            Ok(watch) => {
                list.push(IrqFd { watch, resample });
                Ok(())
            }
            Err(error) => {
                if let Some(resample) = &resample {
                    remove_resampler(core, gsi, resample);
                }
                Err(error.into())
            }
        }
    }

    /// Disconnects eventfd `fd` from a GSI; nothing when they were not connected.
    ///
    /// # Errors
    /// [`IrqFdError::BadFd`].
    pub fn deassign(&self, core: &SharedCore, fd: i32, gsi: u32) -> Result<(), IrqFdError> {
        // Parted by the eventfd and the GSI, as in stock KVM: an eventfd that serves another GSI
        // stays.
        let event = EventFd::get(fd)?;
        let mut list = self.list.lock();
        reap(core, &mut list, |irqfd| {
            irqfd.watch.gone.load(Acquire)
                || (irqfd.watch.gsi == gsi && irqfd.watch.watches(&event))
        });
        Ok(())
    }

    /// Disconnects all: the VM's file was closed, or the VM goes.
    pub fn release(&self, core: &SharedCore) {
        reap(core, &mut self.list.lock(), |_| true);
    }
}

impl Default for IrqFds {
    fn default() -> Self {
        Self::new()
    }
}

/// The steps by which an irqfd goes: first nobody hears of its signals any more, then `lower` takes back what they have raised, so
/// that the line stays down.
pub fn disconnect_in_order<W>(watch: W, lower: impl FnOnce()) {
    drop(watch);
    lower();
}

/// Drops those that `condemned` says.
fn reap(core: &SharedCore, list: &mut Vec<IrqFd>, condemned: impl Fn(&IrqFd) -> bool) {
    let mut index = 0;
    while let Some(irqfd) = list.get(index) {
        if !condemned(irqfd) {
            index += 1;
            continue;
        }
        // The place is filled by the last one, which is looked at next.
        let IrqFd { watch, resample } = list.swap_remove(index);
        let gsi = watch.gsi;
        disconnect_in_order(watch, || {
            if let Some(resample) = resample {
                remove_resampler(core, gsi, &resample);
            }
        });
        // A VMM may have thousands of them.
        task::cond_resched();
    }
}

fn add_resampler(core: &SharedCore, gsi: u32, new: &Arc<Resampler>) -> Result<(), IrqFdError> {
    // The list of irqfds is locked: nobody else replaces the table.
    let old = core.state.lock().resamplers.clone();
    if old.count() >= MAX_RESAMPLERS {
        return Err(IrqFdError::Full);
    }
    let table = Arc::new(old.with(gsi, new)?)?;
    core.state.lock().set_resamplers(table);
    Ok(())
}

fn remove_resampler(core: &SharedCore, gsi: u32, gone: &Arc<Resampler>) {
    // Silent first: a guest's end of interrupt may be walking the list that has it still.
    gone.silence();
    let old = core.state.lock().resamplers.clone();
    // Without memory for another table it stays where it is, and says nothing.
    let table = old.without(gsi, gone).and_then(Arc::new);
    let last = match &table {
        Ok(table) => table.of(gsi).is_none(),
        // Whoever is left there has gone too.
        Err(NoMemory) => old.is_silent(gsi),
    };
    let mut state = core.state.lock();
    if let Ok(table) = table {
        state.set_resamplers(table);
    }
    // With the last one gone nobody would lower the line: the guest's end of interrupt finds no
    // resampler.
    if last {
        core.drive(&mut state, gsi, Source::Resample, false);
        core.update_pic(&mut state);
    }
    drop(state);
    // The old table is freed here, without the lock.
    drop(old);
}
