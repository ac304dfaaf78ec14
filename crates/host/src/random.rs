//! Randomness of the kernel's.

use crate::sys;

/// 64 bits that nobody can guess: `get_random_u64()`.
pub fn word() -> u64 {
    sys::gnt_random_word()
}
