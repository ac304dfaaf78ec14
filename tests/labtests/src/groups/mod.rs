//! The tests, one file per group.

use crate::runner::Test;

mod guest_memory;
mod slots;
mod system;

/// Every test, in the order in which they run.
pub fn all() -> impl Iterator<Item = Test> {
    [system::TESTS, slots::TESTS, guest_memory::TESTS].into_iter().flatten().copied()
}
