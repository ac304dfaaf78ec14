//! What libFuzzer drives: one target, named by GANNET_FUZZ_TARGET.
//!
//! With GANNET_FUZZ_LIST it tells the targets instead, and with GANNET_FUZZ_EDGES, folders with colons between, which edges
//! their files reach: a line for each edge, its address in the program and 0 or 1.
#![no_main]

use std::fmt::Write as _;
use std::path::Path;
use std::process::exit;
use std::sync::OnceLock;

use gannet_fuzz::{TARGETS, Target};

fn target() -> &'static Target {
    static TARGET: OnceLock<&'static Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let name = std::env::var("GANNET_FUZZ_TARGET").unwrap_or_default();
        match TARGETS.iter().find(|target| target.name == name) {
            Some(target) => target,
            None => {
                eprintln!("GANNET_FUZZ_TARGET={name}: no such target");
                exit(2);
            }
        }
    })
}

/// What the compiler's pass lays down: a counter for each edge, and for each two words, of which the first is its address.
mod edges {
    unsafe extern "C" {
        #[link_name = "__start___sancov_cntrs"]
        static mut COUNTERS: u8;
        #[link_name = "__stop___sancov_cntrs"]
        static mut COUNTERS_END: u8;
        #[link_name = "__start___sancov_pcs"]
        static ADDRESSES: [usize; 2];
        #[link_name = "__executable_start"]
        static PROGRAM: u8;
    }

    fn counters() -> &'static mut [u8] {
        // SAFETY: the section's two ends, which the linker gives. Nobody else looks at the counters as long as no engine runs;
        // code under test adds to them, and no slice of them lives while it runs.
        unsafe {
            let (start, end) = (&raw mut COUNTERS, &raw mut COUNTERS_END);
            std::slice::from_raw_parts_mut(start, end.offset_from(start) as usize)
        }
    }

    /// How many there are.
    pub fn count() -> usize {
        counters().len()
    }

    /// Adds those that were taken since the last call, and forgets them.
    pub fn gather(taken: &mut [bool]) {
        for (taken, counter) in taken.iter_mut().zip(counters()) {
            *taken |= std::mem::take(counter) != 0;
        }
    }

    /// The address of an edge from the program's beginning on; `None` if the linker left its function out.
    pub fn address(number: usize) -> Option<usize> {
        assert!(number < count());
        // SAFETY: there are as many pairs as counters, in the same order.
        let pair = unsafe { *(&raw const ADDRESSES).add(number) };
        pair[0].checked_sub(&raw const PROGRAM as usize)
    }
}

fn tell_edges(folders: &str) {
    let mut taken = vec![false; edges::count()];
    for folder in folders.split(':').map(Path::new) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if let Ok(bytes) = std::fs::read(entry.path()) {
                (target().run)(&bytes);
                // A counter of eight bits comes back to 0 if it is not looked at.
                edges::gather(&mut taken);
            }
        }
    }
    let mut text = String::new();
    for (number, taken) in taken.into_iter().enumerate() {
        if let Some(address) = edges::address(number) {
            let _ = writeln!(text, "{address:#x} {}", u8::from(taken));
        }
    }
    print!("{text}");
}

#[unsafe(no_mangle)]
extern "C" fn LLVMFuzzerInitialize(_: *mut i32, _: *mut *mut *mut u8) -> i32 {
    if std::env::var_os("GANNET_FUZZ_LIST").is_some() {
        TARGETS.iter().for_each(|target| println!("{} {}", target.name, target.longest));
        exit(0);
    }
    if let Ok(folders) = std::env::var("GANNET_FUZZ_EDGES") {
        tell_edges(&folders);
        exit(0);
    }
    let _ = target();
    0
}

#[unsafe(no_mangle)]
extern "C" fn LLVMFuzzerTestOneInput(data: *const u8, len: usize) -> i32 {
    // SAFETY: libFuzzer hands over `len` bytes that it leaves alone until this returns; of none there may be no address.
    let bytes = if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, len) } };
    (target().run)(bytes);
    0
}
