//! What the kernel calls: load and unload, CPUs coming and going, and `/dev/kvm` itself.
//!
//! VM and vCPU files do not appear here: they call through `host::file`.

use cpu::{Cpu, Native};
use host::{NoMemory, err, info, params, smp, warn};
use kvm_abi::dispatch;
use svm::{Features, HostState, Unusable, percpu};

use crate::{heap, machine};

const ENOMEM: i32 = -12;
const EBUSY: i32 = -16;
const ENODEV: i64 = -19;
const EOPNOTSUPP: i32 = -95;

fn refuse(why: Unusable) -> i32 {
    err!("cannot be used on CPU {}: {}", smp::cpu_id(), why.reason());
    match why {
        Unusable::InUse => EBUSY,
        _ => EOPNOTSUPP,
    }
}

/// Finds out what the machine offers and allocates what every CPU needs. Called once at load.
#[unsafe(no_mangle)]
extern "C" fn gannet_init() -> i32 {
    let mut here = Native;
    let host_cr4 = here.cr4();
    let mut features = match Features::read(|leaf, subleaf| here.cpuid(leaf, subleaf), host_cr4) {
        Ok(features) => features,
        Err(why) => return refuse(why),
    };
    if params::host_state_by_msr() {
        features.host_state = HostState::Msr;
    }
    // VM_CR exists wherever CPUID reports SVM. Looked at on this CPU before anything is allocated.
    if let Err(why) = percpu::check(&mut here) {
        return refuse(why);
    }
    if set_up(features).is_err() {
        gannet_exit();
        return ENOMEM;
    }
    let tables = if params::npt() { "nested" } else { "shadow" };
    info!("SVM with {tables} paging, {} address-space ids", features.asids);
    0
}

fn set_up(features: Features) -> Result<(), NoMemory> {
    // The decoder makes its tables when they are first needed, which would be in a guest's exit.
    heap::while_keeping(emulate::warm_up)?;
    percpu::set_up(features, smp::max_cpus())?;
    machine::find_out(&features)
}

/// Called at unload, after SVM is off on every CPU.
#[unsafe(no_mangle)]
extern "C" fn gannet_exit() {
    machine::forget();
    percpu::tear_down();
    // SAFETY: no file is open and no command runs: nothing decodes any more.
    unsafe { heap::release_kept() };
}

/// Switches SVM on, on the CPU itself, which the caller keeps the task on.
#[unsafe(no_mangle)]
extern "C" fn gannet_cpu_online() -> i32 {
    match percpu::enable(&mut Native, smp::cpu_id()) {
        Ok(()) => 0,
        Err(why) => {
            warn!("SVM stays off on CPU {}", smp::cpu_id());
            refuse(why)
        }
    }
}

/// Switches SVM off, on the CPU itself; harmless where it is off. NMI context at a crash.
#[unsafe(no_mangle)]
extern "C" fn gannet_cpu_offline() {
    percpu::disable(&mut Native);
}

/// An ioctl on `/dev/kvm`.
#[unsafe(no_mangle)]
extern "C" fn gannet_dev_ioctl(command: u32, argument: u64, _compat: i32) -> i64 {
    #[cfg(feature = "selftest")]
    if command == crate::selftest::OPEN {
        return crate::selftest::open();
    }
    match machine::device() {
        Some(device) => dispatch::code(dispatch::system(&device, command, argument)),
        None => ENODEV,
    }
}

/// How a VM is shown in debugfs.
#[unsafe(no_mangle)]
extern "C" fn gannet_debug_totals() -> *const core::ffi::c_void {
    host::debugfs::totals::<vm::statistics::VmStatistics>()
}
