//! `make sanitize`: the tests of the crates with `unsafe` or with locks, once more with every access checked.

use crate::options::Options;
use crate::tally::Tally;
use crate::{fuzz, test};
use anyhow::{Result, bail};
use gannet_lab::Layout;

/// Those whose tests are run: the port to the kernel, page tables, the model CPU, and what VMs share among their threads.
const CRATES: [&str; 4] = ["gannet-host", "gannet-mmu", "gannet-cpu", "gannet-vm"];

/// A sanitizer: its name for the compiler, that of its library, and whether the standard library is built anew with it.
struct Sanitizer {
    name: &'static str,
    library: &'static str,
    builds_std: bool,
}

/// Locks of a standard library without ThreadSanitizer's marks order nothing for it, and all that they guard would be told. What
/// AddressSanitizer needs it finds in the allocator.
const SANITIZERS: [Sanitizer; 2] = [
    Sanitizer { name: "address", library: "asan", builds_std: false },
    Sanitizer { name: "thread", library: "tsan", builds_std: true },
];

/// Runs the tests under the sanitizer that ONLY names, or under both; whether all passed.
pub fn run(layout: &Layout, options: &Options) -> Result<bool> {
    layout.ensure(&["toolchain", "fuzz"])?;
    let chosen = |s: &&Sanitizer| options.only.is_empty() || options.only == s.name;
    let chosen: Vec<&Sanitizer> = SANITIZERS.iter().filter(chosen).collect();
    if chosen.is_empty() {
        bail!("ONLY={}: address or thread", options.only);
    }
    let mut tally = Tally::default();
    for sanitizer in chosen {
        let mut cargo = layout.cargo(&format!("cargo-{}", sanitizer.library));
        // Documentation's examples are compiled without these flags, and could not be linked.
        cargo.args(["test", "--lib", "--tests", "--target", fuzz::TRIPLE]);
        if sanitizer.builds_std {
            cargo.arg("-Zbuild-std");
        }
        for name in CRATES {
            cargo.args(["-p", name]);
        }
        // Models of interleavings are left out by it.
        let mut flags =
            vec![format!("-Zsanitizer={}", sanitizer.name), "--cfg=sanitized".to_owned()];
        flags.extend(fuzz::runtime(layout, sanitizer.library));
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
        let title = format!("unit tests under the {} sanitizer", sanitizer.name);
        test::run_unit_tests(layout, &title, cargo, &mut tally);
    }
    Ok(tally.finish())
}
