//! `vmcall`: a hypercall that the hypervisor does not know (number -1). It answers -ENOSYS, so the
//! figure is that of the way there and back. VMMCALL with AMD, VMCALL with Intel: a hypervisor
//! would have to patch the other one.

use crate::bench::program::guest_program;
use crate::bench::workload::{Plan, Workload};
use crate::vmm::hypervisor::Vendor;
use crate::vmm::vm::Irqchip;

guest_program!(vmcall, "vmcall", setup: [], operation: ["mov $-1, %eax", "vmcall"]);
guest_program!(vmmcall, "vmmcall", setup: [], operation: ["mov $-1, %eax", "vmmcall"]);

pub const WORKLOAD: Workload = Workload {
    name: "vmcall",
    about: "hypercall with a number that nobody serves",
    irqchip: Irqchip::Kernel,
    vcpus: 1,
    plan: |guest| {
        Ok(Plan::of(match guest.vendor {
            Vendor::Intel => vmcall(),
            Vendor::Amd => vmmcall(),
        }))
    },
};
