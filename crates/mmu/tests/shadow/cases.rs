//! Behaviour by example.
