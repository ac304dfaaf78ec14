//! A small machine for guests of a few instructions.

pub mod clock;
pub mod code;
pub mod guest;
pub mod handlers;
pub mod layout;
pub mod memory;
pub mod saved;
pub mod smram;
pub mod stage;
pub mod storm;
pub mod tables;
pub mod threads;
