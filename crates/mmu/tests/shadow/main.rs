//! Shadow pages against a model: guest memory, the VM's tree, and a walker that reads the shadow tables
//! as the hardware does.

mod agree;
mod cases;
mod hardware;
mod machine;
mod properties;
mod run;
#[path = "../section/mod.rs"]
mod section;
