//! SVM for guests that are hypervisors, through the backend over the model CPU, against the model of
//! `crates/svm/tests/nested_random`.

#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/svm/tests/nested_random/architecture.rs"]
mod architecture;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/svm/tests/nested_random/steps.rs"]
mod steps;

// The model names it.
use backend as _;

use architecture::Random;
use steps::Test;

pub fn run(bytes: &[u8]) {
    let mut test = Test::new(Random::given(bytes));
    let mut steps = 0;
    while !test.random.is_used_up() && steps < 300 {
        test.step();
        steps += 1;
    }
}
