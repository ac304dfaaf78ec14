//! The interrupt controllers and timers of a PC: local APIC, I/O APIC, the 8259A pair, the 8254,
//! the routing of GSIs and the decoding of message-signalled interrupts.
//!
//! Pure logic. A device is given the time and a way to send a message, and answers with what is to
//! be done; it knows neither threads nor timers nor guest memory. The local APIC is shared between
//! CPUs and keeps its state in atomics; everything else stands behind the VM's one interrupt lock.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

/// The words that CPUs share. The models of `tests/models` compile the local APIC's files with others in their place.
mod atomic {
    pub(crate) use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
}

pub mod ioapic;
pub mod lapic;
pub mod message;
pub mod msi;
pub mod pic;
pub mod pit;
pub mod routing;

pub use ioapic::{IoApic, IoApicState};
pub use lapic::{Accepted, Gp, Lapic, LapicEffect, LapicMode, TimerClock, TimerOp};
pub use message::{DeliveryMode, DestMode, DestRules, IrqMessage, LineStatus, Shorthand, Trigger};
pub use msi::Msi;
pub use pic::{Pic, PicState};
pub use pit::{Pit, PitChannelState, PitState};
pub use routing::{Chip, Route, Routing, RoutingError, Target};
