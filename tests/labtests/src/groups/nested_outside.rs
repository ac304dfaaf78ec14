//! What user space and L0 find out while a guest's guest runs, and its hypervisor has to hear: shutdowns that no CPU
//! made, hypercalls by Intel's instruction, a state that cannot be run. On CPUs of both vendors.

use super::capabilities::{give_triple_fault, let_give_triple_faults};
use super::{nested_svm, nested_vmx};
use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::Guest;
use crate::machine::layout::RESULT;
use crate::outcome::{Answer, Outcome, equal, skip};
use crate::runner::tests;
use kvm_bindings::kvm_msi;

tests!("nested_outside":
    vmx_l1_hears_of_a_shutdown_that_user_space_makes,
    svm_l1_hears_of_a_shutdown_that_user_space_makes,
    svm_a_shutdown_that_l1_does_not_intercept_is_the_vms,
    svm_l1_hears_of_hypercalls_by_vmcall,
    vmx_l1_hears_of_a_task_register_that_is_taken_away,
    vmx_l2_has_a_tsc_that_l1_scales,
    vmx_an_interrupt_that_l1_leaves_to_l2_waits_for_if_alone,
);

const VMCALL: [u8; 4] = [0x0f, 0x01, 0xc1, 0xf4];

/// Exit reason of VMX.
const TRIPLE_FAULT: u64 = 2;
/// Exit codes of SVM.
const SHUTDOWN: u64 = 0x7f;
const EXIT_VMMCALL: u64 = 0x81;
/// Where the intercepts lie: the third word above exceptions, with CPUID and the shutdown, and the fourth, with VMRUN
/// and VMMCALL.
const EXCEPTIONS: u64 = nested_svm::BLOCK + 0x08;
const FOURTH: u64 = nested_svm::BLOCK + 0x10;
const CPUID: u64 = 1 << 18;
const INTERCEPT_SHUTDOWN: u64 = 1 << 31;
const BOTH_CALLS: u64 = 3;

/// The VMX guest stops in L2.
fn vmx_in_l2() -> Outcome<Guest> {
    let guest = nested_vmx::with(nested_vmx::program(), &nested_vmx::L2_MARKS)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    Ok(guest)
}

fn vmx_l1_hears_of_a_shutdown_that_user_space_makes() -> Outcome {
    let guest = vmx_in_l2()?;
    let_give_triple_faults(&guest)?;
    give_triple_fault(&guest, 1)?.granted("KVM_SET_VCPU_EVENTS")?;
    guest.reach_mark()?;
    equal("exit", (guest.result(0), guest.result(1)), (nested_vmx::EXITED, TRIPLE_FAULT))
}

/// The SVM guest stops in L2, with these intercepts of the third word; user space gives it a triple fault.
fn svm_with_triple_fault(third: u64) -> Outcome<Guest> {
    let guest = nested_svm::with(nested_svm::program(), &nested_svm::L2_MARKS)?;
    guest.reach_mark()?;
    guest.memory.write(EXCEPTIONS, third << 32);
    guest.reach_mark()?;
    let_give_triple_faults(&guest)?;
    give_triple_fault(&guest, 1)?.granted("KVM_SET_VCPU_EVENTS")?;
    Ok(guest)
}

fn svm_l1_hears_of_a_shutdown_that_user_space_makes() -> Outcome {
    let guest = svm_with_triple_fault(CPUID | INTERCEPT_SHUTDOWN)?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0), SHUTDOWN)
}

fn svm_a_shutdown_that_l1_does_not_intercept_is_the_vms() -> Outcome {
    let guest = svm_with_triple_fault(CPUID)?;
    guest.expect("KVM_RUN", Exit::Shutdown)
}

fn svm_l1_hears_of_hypercalls_by_vmcall() -> Outcome {
    let guest = nested_svm::with(nested_svm::program(), &VMCALL)?;
    guest.reach_mark()?;
    guest.memory.write(FOURTH, BOTH_CALLS);
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_VMMCALL)?;
    equal("RIP", guest.memory.read(nested_svm::BLOCK + nested_svm::RIP), nested_svm::L2_CODE)
}

fn vmx_l1_hears_of_a_task_register_that_is_taken_away() -> Outcome {
    let guest = vmx_in_l2()?;
    let mut sregs = guest.vcpu().sregs()?;
    sregs.tr.unusable = 1;
    guest.vcpu().set_sregs(&sregs)?;
    guest.reach_mark()?;
    equal("exit", (guest.result(0), guest.result(1)), (nested_vmx::EXITED, TRIPLE_FAULT))
}

/// RDTSC, into RAX, to `RESULT[5]`; CPUID.
fn reads_tsc() -> Vec<u8> {
    let mut code = vec![0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0];
    code.extend([0x48, 0x89, 0x04, 0x25]);
    code.extend((RESULT as u32 + 5 * 8).to_le_bytes());
    code.extend([0x0f, 0xa2, 0xf4]);
    code
}

fn vmx_l2_has_a_tsc_that_l1_scales() -> Outcome {
    const SCALING: u64 = 1 << 25;
    const TWICE: u64 = 2 << 48;
    const OFFSET: u64 = 1 << 40;
    let guest = nested_vmx::with(nested_vmx::program(), &reads_tsc())?;
    guest.reach_mark()?;
    if guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 32 & SCALING == 0 {
        return skip("no TSC scaling in VMX_PROCBASED_CTLS2");
    }
    let primary = nested_vmx::must(&guest, 0x482)? | 1 << 31 | 1 << 3;
    let controls = [(0x4002, primary), (0x401e, SCALING)];
    let [first, second] = controls;
    nested_vmx::fails(&guest, "a multiplier of 0", &[first, second, (0x2032, 0)], 7)?;
    let before = guest.vcpu().msr(0x10)?.unwrap_or(0);
    nested_vmx::launch(&guest, &[first, second, (0x2032, TWICE), (0x2010, OFFSET)])?;
    let after = guest.vcpu().msr(0x10)?.unwrap_or(u64::MAX);
    equal("exit reason", guest.result(1), nested_vmx::EXIT_CPUID)?;
    let of_l2 = guest.result(5).wrapping_sub(OFFSET);
    equal("twice L1's", (2 * before..=2 * after).contains(&of_l2), true)
}

guest_code!(
    // Launches L2 with a local APIC of L1's; tells the exit, and how often vector 0x58 came.
    left_to_l2,
    64,
    x2apic!(),
    // The handler's end of interrupt would be an exit of L2.
    "movq $0, EOI_MODE",
    nested_vmx::operation!(),
    "out %al, $PORT_MARK",
    nested_vmx::filled!(),
    "vmlaunch",
    nested_vmx::failure!(),
    done!(),
    "5: movq $0x200, RESULT",
    "mov $0x4402, %edx",
    "vmread %rdx, %rax",
    "mov %rax, RESULT + 8",
    "mov COUNTS + 0x58 * 8, %rax",
    "mov %rax, RESULT + 16",
    done!()
);

fn vmx_an_interrupt_that_l1_leaves_to_l2_waits_for_if_alone() -> Outcome {
    // Marks; STI, two NOPs, CPUID.
    let l2 = [0xe6, 0xf6, 0xfb, 0x90, 0x90, 0x0f, 0xa2, 0xf4];
    let guest = nested_vmx::with(left_to_l2(), &l2)?;
    guest.reach_mark()?;
    nested_vmx::launch(&guest, &[(0x4000, nested_vmx::must(&guest, 0x481)?)])?;
    let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0x58, ..Default::default() };
    guest.vm.send(ioctl::SIGNAL_MSI, &msi).granted("KVM_SIGNAL_MSI")?;
    guest.finish()?;
    equal(
        "exit",
        (guest.result(0), guest.result(1)),
        (nested_vmx::EXITED, nested_vmx::EXIT_CPUID),
    )?;
    equal("interrupts before the CPUID", guest.result(2), 1)
}
