//! L1's instructions against a model of the manual that is written apart from the code: regions are
//! dictionaries of fields, nothing is cached, nothing is lazy. A step is one number, so that a random sequence,
//! a shrunk one and a long run are the same thing.
//!
//! `GANNET_NESTED_STEPS=10000000 cargo test --release -p gannet-nested-vmx --test model long -- --nocapture` runs long, and
//! says what it did.

#[path = "model/composed.rs"]
mod composed;
#[path = "model/enlightened.rs"]
mod enlightened;
#[allow(dead_code, reason = "others begin with its VMCS")]
#[path = "../src/example.rs"]
mod example;
#[path = "model/pair.rs"]
mod pair;
#[path = "model/reference.rs"]
mod reference;
mod rig;
#[path = "model/world.rs"]
mod world;

use gannet_nested_vmx::checks::controls;
use gannet_nested_vmx::{Vmcs12, merge};
use pair::run;
use proptest::prelude::*;
use world::{L0, LIMITS, Memory, Vmcs02};
use x86::vmcs::{Groups, field};

/// A generator that needs no crate (xorshift).
fn numbers(mut state: u64) -> impl Iterator<Item = u64> {
    core::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state)
    })
}

/// GANNET_NESTED_STEPS says how many, half of them with enlightened VMCSs.
#[test]
fn a_long_sequence_agrees_with_the_model() {
    let asked = std::env::var("GANNET_NESTED_STEPS").ok();
    let steps: u64 = asked.map_or(120_000, |n| n.parse().expect("a number of steps"));
    let half = steps / 2;
    for (enlightened, seed) in [(false, 0x9e37_79b9_7f4a_7c15), (true, 0x1234_5678_9abc_def1)] {
        let counts = run(enlightened, numbers(seed).take(half as usize));
        println!("{half} steps, enlightened: {enlightened}: {counts:?}");
        assert_eq!(counts.runs_by_page > 0, enlightened && half > 1000);
        assert!((counts.runs + counts.runs_by_page) * 50 > half || half < 1000, "{counts:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sequences_agree_with_the_model(steps in proptest::collection::vec(any::<u64>(), 1..300)) {
        run(false, steps.iter().copied());
        run(true, steps);
    }

    /// What VMWRITE puts into a field VMREAD gives, cut to the field's width.
    #[test]
    fn a_field_keeps_what_its_width_allows(value: u64, noise: u64) {
        let mut image = Vmcs12::new();
        for (encoding, place) in field::TABLE {
            let Some(_) = place else { continue };
            let at = u64::from(*encoding);
            let named = x86::vmcs::place::find(at).unwrap();
            image.write(at, named, noise);
            image.write(at, named, value);
            let bits = [16, 64, 32, 64][usize::from(encoding >> 13 & 3)];
            let rights = (0x4814..=0x4822).contains(&at);
            let mask = if rights { 0x1_f0ff } else { u64::MAX >> (64 - bits) };
            prop_assert_eq!(image.read(named), value & mask);
            if let Some(high) = x86::vmcs::place::find(at | 1) {
                image.write(at | 1, high, noise);
                prop_assert_eq!(image.read(named), value & 0xffff_ffff | noise << 32);
                prop_assert_eq!(image.read(high), noise & 0xffff_ffff);
            }
        }
    }

    /// No VMCS12 makes a check panic, and one that passes can be composed.
    #[test]
    fn any_image_can_be_checked(words in proptest::collection::vec(any::<u64>(), 128), flips in any::<[u16; 8]>()) {
        let memory = Memory::new();
        let c = world::capabilities();
        let mut image = world::good();
        for (flip, word) in flips.iter().zip(&words) {
            let (encoding, place) = field::TABLE[usize::from(*flip) % field::TABLE.len()];
            if place.is_some() {
                let named = x86::vmcs::place::find(u64::from(encoding)).unwrap();
                image.write(u64::from(encoding), named, *word);
            }
        }
        let _ = controls::check(&image, &c, &LIMITS);
        let _ = gannet_nested_vmx::checks::host::check(&image, &c, &LIMITS);
        let _ = gannet_nested_vmx::checks::guest::check(&image, &c, &LIMITS, None, &memory);
        let mut vmcs = Vmcs02::new();
        merge::compose(&L0, &image, Groups::ALL, &mut vmcs);
        let _ = gannet_nested_vmx::reflect::claim(
            &image, &vmcs, &[0; 16], &gannet_nested_vmx::reflect::Wants::default(), &memory,
        );
    }
}
