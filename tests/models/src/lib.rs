//! What CPUs share, under `loom`: files of the core, compiled a second time with `loom`'s words in place of the CPU's.
//!
//! A file takes its words from `crate::atomic`, which is `core`'s in its own crate and [`atomic`] here: so the code that is
//! checked is the code that runs, to the letter. The models are in `tests/`, each with a twin that lacks an order or a step
//! and has to fail. Which protocol has which
//! model is in [the list](../../../docs/hardening.md#what-cpus-share).
#![forbid(unsafe_code)]
// Their own tests are for plain words.
#![cfg(not(test))]

extern crate alloc;

use std::panic::{AssertUnwindSafe, catch_unwind};

// What the core's files name.
use host as _;
use x86 as _;

pub mod atomic;

#[path = "../../../crates/vm/src/device_reach.rs"]
#[allow(dead_code)]
pub mod device_reach;
#[path = "../../../crates/mmu/src/dirty.rs"]
#[allow(dead_code)]
pub mod dirty;
#[path = "../../../crates/irqchip/src/lapic/mod.rs"]
#[allow(dead_code, missing_docs, rustdoc::broken_intra_doc_links)]
pub mod lapic;
#[path = "../../../crates/irqchip/src/message.rs"]
#[allow(dead_code)]
pub mod message;
#[path = "../../../crates/vm/src/memory/under_way.rs"]
#[allow(dead_code, rustdoc::broken_intra_doc_links)]
pub mod under_way;

pub use lapic::{Accepted, Lapic, LapicEffect};
pub use message::{DeliveryMode, DestMode, IrqMessage, Shorthand, Trigger};

/// Runs `model` in every interleaving with at most `preemptions`.
pub fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Whether the failing twin fails, and with a panic whose message has `word`: not because it broke otherwise.
pub fn fails_with(word: &str, twin: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(twin)) {
        Ok(()) => false,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            text.contains(word)
        }
    }
}
