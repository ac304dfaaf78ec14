//! `exitbench boot`: starts a Linux guest, streams its console and says whether its user space
//! answered before the VM ended.

mod command;
pub mod console;
pub mod cpus;
pub mod devices;
pub mod emulator;
pub mod keyboard_controller;
pub mod linux;
pub mod marker;
pub mod mp_table;
pub mod session;

pub use command::command;
