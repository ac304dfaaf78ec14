//! The roots that a vCPU holds: the current one, and previous ones by base and role.

use host::error::NoMemory;
use host::page::Page;
use x86::Hpa;

use super::Role;

/// A root that is current.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root {
    /// What the hardware's CR3 holds (encryption bit included). Below 4 GiB outside long mode.
    pub cr3: Hpa,
    /// Hardware tables of 4 or 5 levels like the guest's, or 3: PAE, also for a guest with 32-bit
    /// paging or without paging. The PDPTEs lie behind `cr3` and are complete.
    pub levels: u8,
    /// Its role.
    pub role: Role,
}

/// The roots of a vCPU. Released with [`super::ShadowGuard::release`] before it is dropped.
#[derive(Debug)]
pub struct ShadowRoots {
    /// PDPTEs of the roots that need some: 32 bytes for each place.
    low: Page,
    current: Option<Root>,
}

impl ShadowRoots {
    /// Holds nothing.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self { low: Page::zeroed_low()?, current: None })
    }

    /// The current root.
    #[inline]
    pub fn current(&self) -> Option<Root> {
        let _ = &self.low;
        self.current
    }
}
