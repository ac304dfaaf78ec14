//! Whether the guest reaches memory of a device of the host's.
//!
//! Such memory leaks stale data on some CPUs, against which entries clear buffers
//! ([ADR 28](../../../docs/adr/0028-mitigations.md)). So every vCPU has to know before the first translation is there.

use crate::atomic::{AtomicU8, Ordering::SeqCst};

/// It reaches it, and perhaps not every vCPU knows.
const REACHED: u8 = 1;
/// Every vCPU knows.
const KNOWN: u8 = 2;

/// The word of one VM. For good: whether the last such page has gone nobody counts.
#[derive(Debug, Default)]
pub struct DeviceReach(AtomicU8);

impl DeviceReach {
    /// A translation of such memory is about to be made. `tell` has every vCPU outside of the guest once, and look at
    /// [`DeviceReach::is_reached`] before it enters again. Whoever comes while somebody tells does so too: the first may not be done.
    pub fn note(&self, tell: impl FnOnce()) {
        if self.0.load(SeqCst) == KNOWN {
            return;
        }
        self.0.swap(REACHED, SeqCst);
        tell();
        // Somebody who tells meanwhile may say once more that not all know: then the next one tells, too.
        self.0.swap(KNOWN, SeqCst);
    }

    /// Whether entries of this VM's vCPUs have to clear buffers.
    pub fn is_reached(&self) -> bool {
        self.0.load(SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_while_another_tells_does_not_go_before_every_vcpu_knows() {
        let (reach, mut told) = (DeviceReach::default(), 0);
        assert!(!reach.is_reached());
        reach.note(|| {
            assert!(reach.is_reached(), "a vCPU that looks now finds it");
            // Another vCPU's fault, in the middle of the first one's.
            reach.note(|| told += 1);
            assert_eq!(told, 1);
        });
        reach.note(|| told += 1);
        assert_eq!((told, reach.is_reached()), (1, true), "once is enough");
    }
}
