//! Random sequences of SVM's instructions and of a guest's guest's exits, through the backend over the model CPU,
//! against a model of the architecture that is written apart: APM vol. 2 §15.5 to §15.8, §15.17, §15.20.
//!
//! GANNET_NESTED_STEPS sets the number of steps, GANNET_NESTED_SEED where the sequence begins.

mod architecture;
mod steps;

use architecture::Random;
use steps::Test;

/// Steps of an ordinary run.
const STEPS: u64 = 3_000_000;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn random_sequences_do_what_the_architecture_says() {
    let steps = number("GANNET_NESTED_STEPS", STEPS);
    let mut test = Test::new(Random::new(number("GANNET_NESTED_SEED", 1)));
    for _ in 0..steps {
        test.step();
    }
    let [entered, refused, lost, left] = test.counts;
    println!("{steps} steps: {entered} entries, {refused} refused, {left} exits, {lost} lost");
    assert!(entered > steps / 50 && refused > steps / 100 && left > steps / 50 && lost > 0);
}
