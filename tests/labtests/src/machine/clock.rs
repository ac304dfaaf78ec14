//! The host's clocks, to compare a guest's with.

use std::time::{Duration, Instant};

use crate::kvm::file::{Commands, System};
use crate::kvm::ioctl;
use crate::outcome::{Answer, Outcome, skip};

/// The host's TSC.
pub fn tsc() -> u64 {
    // SAFETY: every x86-64 CPU has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Skips the test where the host itself is wrong about the rate of its TSC: an emulated machine
/// measures it when it boots, errs when the machine below is busy, and measures again later, when
/// the module has taken the first result for true.
pub fn tsc_rate_is_right() -> Outcome {
    let vm = System::open()?.create_vm()?;
    let vcpu = vm.create_vcpu(0)?;
    let believed = vcpu.call(ioctl::GET_TSC_KHZ, 0).granted("KVM_GET_TSC_KHZ")? as u64;
    if vcpu.call(ioctl::SET_TSC_KHZ, believed).is_err() {
        return skip(format!("the host has changed its mind about its TSC's {believed} kHz"));
    }
    let mut measured = 0;
    // A pause in the measurement makes both readings late: the longest of a few is the best.
    for _ in 0..3 {
        let (start, first) = (Instant::now(), tsc());
        std::thread::sleep(Duration::from_millis(10));
        let (ticks, time) = (tsc() - first, start.elapsed());
        measured = ticks * 1000 / (time.as_micros() as u64).max(1);
        if measured.abs_diff(believed) * 10 < believed {
            return Ok(());
        }
    }
    skip(format!("the host's TSC runs at {measured} kHz, the host believes in {believed} kHz"))
}
