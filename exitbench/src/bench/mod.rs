//! `exitbench run`: measures what one operation costs in a guest of ours, a fresh VM per workload.

pub mod interrupts;
pub mod layout;
pub mod machine;
pub mod nested;
pub mod program;
pub mod runner;
pub mod workload;
pub mod workloads;
