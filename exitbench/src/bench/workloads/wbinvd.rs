//! `wbinvd`: intercepted because it concerns caches of the host. Cheap to answer: nothing is done
//! unless a device of the host bypasses the caches.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::vm::Irqchip;

guest_program!(
    program,
    "wbinvd",
    setup: [],
    operation: [
        "wbinvd"
    ]
);

pub const WORKLOAD: Workload = Workload {
    name: "wbinvd",
    about: "WBINVD",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |_| Ok(Plan::of(program())),
};
