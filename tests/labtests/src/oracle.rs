//! Where the expectations have to know whom they ask: what the stock module does in another way
//! than it is documented, or in another way in another version.

use std::sync::LazyLock;

/// Whether the stock module answers on `/dev/kvm`.
pub fn is_stock() -> bool {
    static STOCK: LazyLock<bool> =
        LazyLock::new(|| std::path::Path::new("/sys/module/kvm").exists());
    *STOCK
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
