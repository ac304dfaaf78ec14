//! A guest to test with: the rig of the tests beside the crate, with a megabyte of memory, and a VMCS12 that every check lets pass.

pub use crate::example::good;
use crate::leave::Known;
pub use crate::set;

// What the rig has of its neighbour.
use crate::example;
#[path = "../tests/rig/mod.rs"]
mod rig;
pub use rig::{CPU, LIMITS, Memory, Vmcs02, capabilities};

/// Bytes of memory, from address 0.
pub const SIZE: usize = 0x10_0000;

/// What L0 knows of an L2 in 64-bit mode when it exits.
pub const KNOWN: Known = Known { cr0_mask: 0x20, ..rig::KNOWN };

impl Memory {
    pub fn new() -> Self {
        Self::of(SIZE)
    }
}
