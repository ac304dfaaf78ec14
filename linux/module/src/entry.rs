//! What the kernel calls: load and unload, CPUs coming and going, and `/dev/kvm` itself.
//!
//! VM and vCPU files do not appear here: they call through `host::file`.

use core::ffi::c_void;
use core::fmt::Write;

use host::NoMemory;
use kvm_abi::bind::{Host, MakeBackend, SystemHandle};
use kvm_abi::dispatch;

use crate::chosen::{self, Chosen, Found, Refused};
use crate::heap;
use crate::machine::{self, MakeSvm, MakeVmx};

const ENOMEM: i32 = -12;
const ENODEV: i64 = -19;

/// Finds out what the machine offers and allocates what every CPU needs. Called at each start, of which there may be
/// several while the module is loaded.
#[unsafe(no_mangle)]
extern "C" fn gannet_init() -> i32 {
    let found = match chosen::find() {
        Ok(found) => found,
        Err(Refused(code)) => return code,
    };
    if set_up(&found).is_err() {
        gannet_exit();
        return ENOMEM;
    }
    found.announce();
    0
}

fn set_up(found: &Found) -> Result<(), NoMemory> {
    // The decoder makes its tables when they are first needed, which would be in a guest's exit.
    heap::while_keeping(emulate::warm_up)?;
    found.set_up()?;
    machine::find_out(&found.common())
}

/// Ends what [`gannet_init`] began, after virtualization is off on every CPU.
#[unsafe(no_mangle)]
extern "C" fn gannet_exit() {
    machine::forget();
    chosen::forget();
}

/// Called once at unload, after [`gannet_exit`].
#[unsafe(no_mangle)]
extern "C" fn gannet_unload() {
    // SAFETY: no file is open and no command runs: nothing decodes any more.
    unsafe { heap::release_kept() };
}

/// Switches virtualization on, on the CPU itself, which the caller keeps the task on.
#[unsafe(no_mangle)]
extern "C" fn gannet_cpu_online() -> i32 {
    match chosen::enable() {
        Ok(()) => 0,
        Err(Refused(code)) => code,
    }
}

/// Switches it off, on the CPU itself; harmless where it is off. NMI context at a crash.
#[unsafe(no_mangle)]
extern "C" fn gannet_cpu_offline() {
    chosen::disable();
}

/// Gives the MSRs that user space needs their values back, on the CPU itself.
#[unsafe(no_mangle)]
extern "C" fn gannet_user_return() {
    chosen::user_return();
}

/// The parameter vmentry_l1d_flush was written while the module is loaded.
#[unsafe(no_mangle)]
extern "C" fn gannet_l1d_flush_changed() -> i32 {
    if chosen::l1d_flush_changed().is_ok() { 0 } else { ENOMEM }
}

/// An ioctl on `/dev/kvm`.
#[unsafe(no_mangle)]
extern "C" fn gannet_dev_ioctl(command: u32, argument: u64, _compat: i32) -> i64 {
    match (machine::host(), chosen::chosen()) {
        (Some(host), Chosen::Svm) => system::<MakeSvm>(host, command, argument),
        (Some(host), Chosen::Vmx) => system::<MakeVmx>(host, command, argument),
        _ => ENODEV,
    }
}

fn system<M: MakeBackend>(host: &'static Host, command: u32, argument: u64) -> i64 {
    dispatch::code(dispatch::system(&SystemHandle::<M>::new(host), command, argument))
}

/// How a VM is shown in debugfs.
#[unsafe(no_mangle)]
extern "C" fn gannet_debug_totals() -> *const c_void {
    host::debugfs::totals::<vm::statistics::VmStatistics>()
}

/// The file `mitigations` in debugfs.
///
/// # Safety
/// `to` is the file that is being read.
#[unsafe(no_mangle)]
unsafe extern "C" fn gannet_show_mitigations(to: *mut c_void) {
    // SAFETY: by the contract.
    let mut text = unsafe { host::debugfs::Text::of_raw(to) };
    let _ = write!(text, "{}", vmx::mitigations::Report::now());
}
