//! What `make fuzz` asks: each target is a function from bytes to a verdict, and panics where the code and its oracle part.
//! Where there is one, the oracle is that of the tests, taken from their files.
//!
//! The same functions are run by `cargo test` over the corpus and over random bytes (`tests/replay.rs`), without an engine.

mod bytes;
mod cpuid;
mod decode;
mod emulate;
mod ioctl;
mod lapic;
mod msr;
mod nested_svm;
mod nested_tables;
mod nested_vmx;
#[path = "../../crates/mmu/tests/section/mod.rs"]
mod section;
mod shadow;
mod walk;

/// Something that can be fuzzed.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What ONLY= names it by, and its folder under `fuzz/corpus`.
    pub name: &'static str,
    /// Panics where the oracle disagrees.
    pub run: fn(&[u8]),
    /// Longer inputs are not made: they find nothing more.
    pub longest: usize,
}

/// All of them, in the order in which they are run.
pub const TARGETS: &[Target] = &[
    Target { name: "walk", run: walk::run, longest: 128 },
    Target { name: "shadow", run: shadow::run, longest: 768 },
    Target { name: "nested_tables", run: nested_tables::run, longest: 768 },
    Target { name: "emulate", run: emulate::run, longest: 256 },
    Target { name: "decode", run: decode::run, longest: 192 },
    Target { name: "ioctl", run: ioctl::run, longest: 1024 },
    Target { name: "lapic", run: lapic::run, longest: 1024 },
    Target { name: "msr", run: msr::run, longest: 512 },
    Target { name: "cpuid", run: cpuid::run, longest: 512 },
    Target { name: "nested_vmx", run: nested_vmx::run, longest: 1024 },
    Target { name: "nested_svm", run: nested_svm::run, longest: 1024 },
];
