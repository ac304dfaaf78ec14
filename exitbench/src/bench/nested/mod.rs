//! Workloads of nested virtualization: the guest is a small hypervisor of its own (L1), and one operation is a round
//! trip from its guest (L2), which does one instruction that L1 intercepts, and back.
//!
//! L1 shares its page tables with L2 and answers an exit by moving RIP past the instruction, so that what is
//! measured is the hypervisor below. For `nested_page_fault` it has tables for L2's physical addresses beside, and answers by
//! mapping the page: one operation is that exit, and the fault of L2's that finds the page in L1's tables alone. The host has the
//! memory by then: else it had it in some runs and had not in others, and its own fault was a third of the figure.
//!
//! L2 has L1's CR4, but for `nested_osxsave`: there L1 has set CR4.OSXSAVE, as every Linux has, and L2 has not, as the small guests
//! of KVM's unit tests have not. So what CPUID shows changes with each transition, and a hypervisor that keeps it computes it again.
//!
//! For `nested_seldom` L1 also reads the base of L2's ES and writes it back, as an L1 that emulates does. No shadow VMCS has it, so
//! that both exit, and what a hypervisor keeps for such fields is brought up to date both ways.
//!
//! For `nested_two` L1 has two L2s and enters them in turn, as one does whose guest has two vCPUs on one of its own. One operation is an
//! entry, with VMPTRLD before it under VMX, and the exit.

use super::layout::{FRESH_MEMORY, NESTED_TABLES};
use super::program::Program;
use super::workload::{Guest, Plan, Unsupported, Workload, require};
use crate::vmm::hypervisor::Vendor;
use crate::vmm::vm::Irqchip;

/// L1 writes tables for its guest's physical addresses, with the flags of a table in ESI and of a large page in EDX: the
/// first GiB one to one, and tables without a page for the fresh memory.
macro_rules! write_tables {
    () => {
        "lea exitbench_fresh + 0x1000(%rsi), %eax
         mov %rax, exitbench_fresh
         add $0x1000, %eax
         mov %rax, exitbench_fresh + 0x1000
         add $0x1000, %eax
         mov %rax, exitbench_fresh + 0x1008
         xor %ecx, %ecx
      0: mov %ecx, %eax
         shl $21, %eax
         or %edx, %eax
         mov %rax, exitbench_fresh + 0x2000(,%rcx,8)
         mov %ecx, %eax
         shl $12, %eax
         lea exitbench_fresh + 0x4000(%rax,%rsi), %eax
         mov %rax, exitbench_fresh + 0x3000(,%rcx,8)
         inc %ecx
         cmp $512, %ecx
         jb 0b"
    };
}

/// L1 maps the page of the fresh memory at the guest-physical address in RAX, one to one, with the flags in EDX.
macro_rules! map_page {
    () => {
        "and $-4096, %rax
         add %rax, %rdx
         sub $exitbench_fresh, %rax
         shr $9, %rax
         mov %rdx, exitbench_fresh + 0x4000(%rax)"
    };
}

/// L2 touches one page after the other.
macro_rules! touch_next {
    () => {
        "movb $1, (%rbx)
         add $4096, %rbx"
    };
}

mod svm;
mod vmx;

/// The programs for one instruction set.
struct Programs {
    cpuid: fn() -> Program,
    hypercall: fn() -> Program,
    hlt: fn() -> Program,
    wrmsr: fn() -> Program,
    pio: fn() -> Program,
    entry: fn() -> Program,
    page_fault: fn() -> Program,
    osxsave: fn() -> Program,
    seldom: fn() -> Program,
    two: fn() -> Program,
}

/// Every nested workload, in the order in which they run.
pub const ALL: &[Workload] = &[
    workload("nested_cpuid", "CPUID of a guest's guest", |guest| plan(guest, |of| of.cpuid)),
    workload("nested_vmcall", "hypercall of a guest's guest", |guest| {
        plan(guest, |of| of.hypercall)
    }),
    workload("nested_hlt", "HLT of a guest's guest", |guest| plan(guest, |of| of.hlt)),
    workload("nested_wrmsr", "WRMSR of a guest's guest", |guest| plan(guest, |of| of.wrmsr)),
    workload("nested_pio", "OUT of a guest's guest", |guest| plan(guest, |of| of.pio)),
    workload("nested_entry", "entry of a guest's guest that leaves at once", |guest| {
        plan(guest, |of| of.entry)
    }),
    workload("nested_page_fault", "first touch of a page by a guest's guest (4 KiB)", |guest| {
        let touched = FRESH_MEMORY + NESTED_TABLES;
        let plan = plan(guest, |of| of.page_fault)?;
        Ok(Plan { argument: touched, fresh_pages: true, host_has_them: true, ..plan })
    }),
    workload("nested_osxsave", "CPUID of a guest's guest whose CR4.OSXSAVE is not L1's", |guest| {
        require(guest.features.xsave, "the guest's CPUID lacks XSAVE")?;
        plan(guest, |of| of.osxsave)
    }),
    workload(
        "nested_seldom",
        "CPUID of a guest's guest, with a field that L1s seldom use",
        |guest| plan(guest, |of| of.seldom),
    ),
    workload("nested_two", "CPUID of two guests of a guest in turn", |guest| {
        plan(guest, |of| of.two)
    }),
];

const fn workload(
    name: &'static str,
    about: &'static str,
    plan: fn(&Guest) -> Result<Plan, Unsupported>,
) -> Workload {
    Workload { name, about, irqchip: Irqchip::Kernel, vcpus: 1, plan }
}

/// The program that `choose` names, for the instruction set that the guest is offered.
fn plan(guest: &Guest, choose: fn(&Programs) -> fn() -> Program) -> Result<Plan, Unsupported> {
    let programs = match guest.vendor {
        Vendor::Amd => {
            require(
                guest.features.svm,
                "the guest's CPUID lacks SVM: the module runs with nested=0, or cannot nest",
            )?;
            svm::PROGRAMS
        }
        Vendor::Intel => {
            require(
                guest.features.vmx,
                "the guest's CPUID lacks VMX: the module runs with nested=0, or cannot nest",
            )?;
            vmx::PROGRAMS
        }
    };
    Ok(Plan::of(choose(&programs)()))
}
