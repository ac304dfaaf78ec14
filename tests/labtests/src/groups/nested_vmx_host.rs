//! The state in which a hypervisor by VMX goes on after an exit of its guest, whatever it or the VMM has made of its
//! registers before.
//!
//! SDM vol. 3C §28.5.

use super::nested_vmx::{L2_CPUID, filled, operation, with};
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::ARGUMENT;
use crate::outcome::{Outcome, equal};
use crate::runner::tests;

tests!("nested_vmx_host":
    an_exit_loads_the_tables_that_l1_has_changed,
    an_exit_loads_the_tables_that_the_vmm_has_changed,
    an_exit_loads_the_segments_that_l1_has_changed,
);

/// What L1 loads before its guest goes on, as bits of ARGUMENT.
const GDTR: u64 = 1;
const IDTR: u64 = 2;
const SYSENTER: u64 = 4;
const LDTR: u64 = 8;
const DATA: u64 = 16;

/// What an exit makes of the limits of both tables (SDM vol. 3C §28.5.2).
const LIMIT: u16 = 0xffff;
/// Exits without a change, so that whoever watches for one has begun to.
const QUIET: usize = 120;

guest_code!(
    // For ever: marks, loads what the test names, has L2 go on, which exits at once.
    resumes,
    64,
    operation!(),
    filled!(),
    "vmlaunch",
    "ud2",
    "5: out %al, $PORT_MARK",
    "mov ARGUMENT, %ebx",
    "test $1, %bl",
    "jz 2f",
    "sgdt (%rsp)",
    "movw $0x7f, (%rsp)",
    "lgdt (%rsp)",
    "2: test $2, %bl",
    "jz 2f",
    "sidt (%rsp)",
    "movw $0xfff, (%rsp)",
    "lidt (%rsp)",
    "2: test $4, %bl",
    "jz 2f",
    "mov $0x176, %ecx",
    "mov $0x1234, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "2: test $8, %bl",
    "jz 2f",
    "xor %eax, %eax",
    "lldt %ax",
    "2: test $16, %bl",
    "jz 2f",
    "xor %eax, %eax",
    "mov %eax, %ds",
    "mov %eax, %fs",
    "2: vmresume",
    "ud2",
);

/// L1 loads what `argument` names, and its guest exits once.
fn exits(guest: &Guest, argument: u64) -> Outcome {
    guest.memory.write(ARGUMENT, argument);
    guest.reach_mark()
}

fn quiet(guest: &Guest) -> Outcome {
    for _ in 0..QUIET {
        exits(guest, 0)?;
    }
    Ok(())
}

fn good(guest: &Guest, what: &str) -> Outcome {
    let sregs = guest.vcpu().sregs()?;
    equal(what, (sregs.gdt.limit, sregs.idt.limit), (LIMIT, LIMIT))?;
    equal(what, (sregs.tr.limit, sregs.tr.selector), (0x67, 0x20))?;
    equal(what, sregs.ldt.unusable, 1)?;
    equal(what, guest.vcpu().msr(0x176)?, Some(0))
}

fn an_exit_loads_the_tables_that_l1_has_changed() -> Outcome {
    let guest = with(resumes(), &L2_CPUID)?;
    guest.reach_mark()?;
    for argument in [GDTR, IDTR, SYSENTER, LDTR, GDTR | IDTR | SYSENTER | LDTR] {
        quiet(&guest)?;
        for argument in [argument, argument, 0, argument] {
            exits(&guest, argument)?;
            good(&guest, &format!("changes {argument:#x}"))?;
        }
    }
    Ok(())
}

fn an_exit_loads_the_tables_that_the_vmm_has_changed() -> Outcome {
    let guest = with(resumes(), &L2_CPUID)?;
    guest.reach_mark()?;
    quiet(&guest)?;
    for _ in 0..2 {
        let mut sregs = guest.vcpu().sregs()?;
        (sregs.gdt.limit, sregs.idt.limit, sregs.tr.limit) = (0x7f, 0xfff, 0x1067);
        guest.vcpu().set_sregs(&sregs)?;
        exits(&guest, 0)?;
        good(&guest, "registers of the VMM's")?;
        equal("WRMSR", guest.vcpu().set_msr(0x176, 0x1234)?, true)?;
        exits(&guest, 0)?;
        good(&guest, "an MSR of the VMM's")?;
    }
    Ok(())
}

fn an_exit_loads_the_segments_that_l1_has_changed() -> Outcome {
    let guest = with(resumes(), &L2_CPUID)?;
    guest.reach_mark()?;
    for argument in [0, DATA, 0] {
        exits(&guest, argument)?;
        let sregs = guest.vcpu().sregs()?;
        // The host state of the VMCS has null selectors for both.
        equal("DS and FS", (sregs.ds.selector, sregs.fs.selector), (0, 0))?;
        equal("SS", (sregs.ss.unusable, sregs.ss.dpl), (0, 0))?;
        equal("CS", (sregs.cs.l, sregs.cs.dpl, sregs.cs.limit), (1, 0, u32::MAX))?;
    }
    Ok(())
}
