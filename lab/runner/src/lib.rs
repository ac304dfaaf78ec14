//! The lab: emulated machines that boot real Debian kernels, load a KVM module there, stock or Gannet's, and run a command under it.
//!
//! [`run`] is the whole of it: a [`Job`] says which machine, kernel, module, files and command; an [`Outcome`] brings back the
//! console, the exit status, the kernel log and the files that the command left under `/out`. Whatever the lab takes from Debian
//! was put under `target/lab` by `lab/bootstrap.sh`; [`Layout`] knows the places.

pub mod archive;
pub mod bochs;
pub mod classify;
pub mod exits;
pub mod guest;
pub mod image;
pub mod job;
pub mod layout;
pub mod machine;
pub mod patience;
pub mod programs;
pub mod run;

pub use archive::Archive;
pub use job::{Job, Module};
pub use layout::{BY_OWN_NAME, KERNELS, Kernel, Layout};
pub use machine::{Emulator, MACHINES, Machine};
pub use patience::Patience;
pub use run::{Counts, Event, Outcome, run, untimed};
