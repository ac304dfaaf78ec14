//! Words of `loom`'s with the names of those of `core`.
//!
//! `loom` takes a `SeqCst` access for an acquire-release one. On x86, the only CPU that Gannet is for, a locked
//! instruction and an exchange are full barriers, and that is what the core's files mean where they say `SeqCst`: so here a
//! read-modify-write of that order has a `SeqCst` fence before and behind it, a store one behind it, and a load is a plain
//! one. Every other order is taken as it is written, though x86 would do more. In [`weakened`] the fences are left out: the
//! failing twin of every protocol that rests on them.

use std::cell::Cell;

pub use core::sync::atomic::Ordering;
use loom::sync::atomic as words;

thread_local! {
    /// `loom` runs its threads one at a time on one thread of the system.
    static WEAK: Cell<bool> = const { Cell::new(false) };
}

struct Back(bool);

impl Drop for Back {
    fn drop(&mut self) {
        WEAK.set(self.0);
    }
}

/// Does `work` with `SeqCst` taken for no more than acquire-release, on this thread.
pub fn weakened<T>(work: impl FnOnce() -> T) -> T {
    let _back = Back(WEAK.replace(true));
    work()
}

/// A `SeqCst` fence, in [`weakened`] too.
pub fn fence(order: Ordering) {
    words::fence(order);
}

fn barrier(order: Ordering) {
    if order == Ordering::SeqCst && !WEAK.get() {
        words::fence(Ordering::SeqCst);
    }
}

macro_rules! word {
    ($name:ident, $value:ty) => {
        /// A word of `loom`'s.
        #[derive(Debug)]
        pub struct $name(words::$name);

        impl Default for $name {
            fn default() -> Self {
                Self::new(<$value>::default())
            }
        }

        impl $name {
            /// A word that holds `value`.
            pub fn new(value: $value) -> Self {
                Self(words::$name::new(value))
            }

            /// Loads the word.
            pub fn load(&self, order: Ordering) -> $value {
                self.0.load(plain(order, Ordering::Acquire))
            }

            /// Stores to the word.
            pub fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, plain(order, Ordering::Release));
                barrier(order);
            }

            /// Exchanges the word.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                locked(order, |order| self.0.swap(value, order))
            }

            /// Exchanges the word if it is `old`.
            pub fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                order: Ordering,
                failed: Ordering,
            ) -> Result<$value, $value> {
                locked(order, |order| {
                    self.0.compare_exchange(old, new, order, plain(failed, Ordering::Acquire))
                })
            }

            /// Exchanges the word by a function.
            pub fn fetch_update(
                &self,
                order: Ordering,
                failed: Ordering,
                change: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                locked(order, |order| {
                    self.0.fetch_update(order, plain(failed, Ordering::Acquire), change)
                })
            }
        }
    };
}

macro_rules! number {
    ($name:ident, $value:ty) => {
        word!($name, $value);

        impl $name {
            /// Adds bits.
            pub fn fetch_or(&self, bits: $value, order: Ordering) -> $value {
                locked(order, |order| self.0.fetch_or(bits, order))
            }

            /// Keeps bits.
            pub fn fetch_and(&self, bits: $value, order: Ordering) -> $value {
                locked(order, |order| self.0.fetch_and(bits, order))
            }

            /// Adds a number.
            pub fn fetch_add(&self, more: $value, order: Ordering) -> $value {
                locked(order, |order| self.0.fetch_add(more, order))
            }

            /// Subtracts a number.
            pub fn fetch_sub(&self, less: $value, order: Ordering) -> $value {
                locked(order, |order| self.0.fetch_sub(less, order))
            }
        }
    };
}

/// What an access of this order is without its barriers.
fn plain(order: Ordering, without: Ordering) -> Ordering {
    if order == Ordering::SeqCst { without } else { order }
}

fn locked<T>(order: Ordering, instruction: impl FnOnce(Ordering) -> T) -> T {
    barrier(order);
    let value = instruction(plain(order, Ordering::AcqRel));
    barrier(order);
    value
}

word!(AtomicBool, bool);
number!(AtomicU8, u8);
number!(AtomicU32, u32);
number!(AtomicU64, u64);

impl vm::kick::Word for AtomicU32 {
    fn new(value: u32) -> Self {
        Self::new(value)
    }

    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }

    fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        self.fetch_or(bits, order)
    }
}
