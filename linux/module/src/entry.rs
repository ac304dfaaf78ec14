//! What the kernel calls: load and unload, CPUs coming and going, and `/dev/kvm` itself.
//!
//! VM and vCPU files do not appear here: they call through `host::file`.

use cpu::{Cpu, Native};
use host::{err, info, smp, warn};
use svm::{Features, Unusable, percpu};

const ENOMEM: i32 = -12;
const EBUSY: i32 = -16;
const ENOTTY: i64 = -25;
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
    let features = match Features::read(|leaf, subleaf| here.cpuid(leaf, subleaf), host_cr4) {
        Ok(features) => features,
        Err(why) => return refuse(why),
    };
    // VM_CR exists wherever CPUID reports SVM. Looked at on this CPU before anything is allocated.
    if let Err(why) = percpu::check(&mut here) {
        return refuse(why);
    }
    if percpu::set_up(features, smp::max_cpus()).is_err() {
        percpu::tear_down();
        return ENOMEM;
    }
    info!("SVM with nested paging, {} address-space ids", features.asids);
    0
}

/// Called at unload, after SVM is off on every CPU.
#[unsafe(no_mangle)]
extern "C" fn gannet_exit() {
    percpu::tear_down();
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
extern "C" fn gannet_dev_ioctl(command: u32, _argument: u64, _compat: i32) -> i64 {
    match command {
        0xae00 => 12,
        #[cfg(feature = "selftest")]
        crate::selftest::OPEN => crate::selftest::open(),
        _ => ENOTTY,
    }
}
