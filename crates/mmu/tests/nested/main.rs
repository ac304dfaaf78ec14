//! Tables for a guest's guest against a model: memory of a hypervisor in the guest with NPT or EPT tables in it,
//! a walker of them written apart from the code, and one that reads the shadow tables as the hardware does.

mod agree;
mod cases;
mod entries;
mod hardware;
mod machine;
mod properties;
mod reference;
mod run;
#[path = "../section/mod.rs"]
mod section;
mod told;
mod twins;
