//! Where the expectations have to know whom they ask: what the stock module does in another way
//! than it is documented, or in another way in another version.

use std::sync::LazyLock;

use crate::outcome::{Outcome, skip};

/// Whether the stock module answers on `/dev/kvm`. Under KVM's names Gannet has a version, which the stock module has not.
pub fn is_stock() -> bool {
    static STOCK: LazyLock<bool> = LazyLock::new(|| {
        let there = |file: &str| std::path::Path::new("/sys/module/kvm").join(file).exists();
        there("") && !there("version")
    });
    *STOCK
}

/// Who makes the host's CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    Intel,
    Amd,
}

/// The maker of the host's CPU, by CPUID leaf 0. A guest has the same.
pub fn vendor() -> Vendor {
    match core::arch::x86_64::__cpuid(0).ebx.to_le_bytes() {
        [b'G', b'e', b'n', b'u'] => Vendor::Intel,
        _ => Vendor::Amd,
    }
}

/// Whether guests have TDP: the module parameters `npt` and `ept`.
pub fn tdp() -> bool {
    let off = |file: &str| {
        std::fs::read_to_string(format!("/sys/module/{file}"))
            .is_ok_and(|value| matches!(value.trim(), "N" | "0"))
    };
    // Gannet has both, of which the other vendor's is always on.
    let files = [
        "kvm_amd/parameters/npt",
        "kvm_intel/parameters/ept",
        "gannet/parameters/npt",
        "gannet/parameters/ept",
    ];
    !files.into_iter().any(off)
}

/// Whether the CPU serves local APICs in x2APIC mode: the module parameter `enable_apicv`.
pub fn apic_is_served() -> bool {
    ["kvm_intel", "gannet"].iter().any(|module| {
        std::fs::read_to_string(format!("/sys/module/{module}/parameters/enable_apicv"))
            .is_ok_and(|value| value.trim() == "Y")
    })
}

/// Skips where the stock module's shadow paging is known not to do as the architecture says.
pub fn not_of_stock_shadow_paging(reason: &str) -> Outcome {
    if is_stock() && !tdp() {
        return skip(format!("the stock module's shadow paging: {reason}"));
    }
    Ok(())
}

/// Major and minor version of the running kernel.
pub fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split('.').map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// What is expected where the stock module departs from the documented behaviour.
pub fn documented<T>(documented: T, stock: T) -> T {
    if is_stock() { stock } else { documented }
}

/// What is expected where the stock module changed in kernel `since`. Gannet may do either,
/// whatever the kernel.
pub fn changed<T>(since: (u32, u32), before: T, after: T) -> Vec<T> {
    match is_stock() {
        true if kernel() < since => vec![before],
        true => vec![after],
        false => vec![before, after],
    }
}
