//! What series of samples come down to, and whether two of them differ by more than noise.

mod sign_test;
mod summary;

pub use sign_test::{SignTest, holm, least_p};
pub use summary::{Summary, summarise};
