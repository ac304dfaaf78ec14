//! VMX for guests that are hypervisors, against the model of `crates/nested-vmx/tests/model`.

// The model names them, and its rig begins with the example.
use gannet_nested_vmx as _;
use gannet_nested_vmx::example;
use zerocopy as _;

#[path = "../../crates/nested-vmx/tests/model/enlightened.rs"]
mod enlightened;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/nested-vmx/tests/model/pair.rs"]
mod pair;
#[path = "../../crates/nested-vmx/tests/model/reference.rs"]
mod reference;
#[path = "../../crates/nested-vmx/tests/rig/mod.rs"]
mod rig;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/nested-vmx/tests/model/world.rs"]
mod world;

pub fn run(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let steps = rest.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    pair::run(first & 1 != 0, steps);
}
