//! A guest that runs a guest of its own by SVM: what it sees of good blocks and of bad ones.

use crate::kvm::exit::Exit;
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::{ARGUMENT, FREE, PORT_MARK};
use crate::outcome::{Outcome, equal, fail, skip};
use crate::runner::tests;

tests!("nested_svm":
    a_guest_of_a_guest_runs_and_leaves,
    a_bad_block_is_refused,
    a_block_at_no_address_faults,
    a_block_that_is_no_memory_faults_or_leaves,
    registers_travel_by_vmload_and_vmsave,
    an_interrupt_ends_the_run_and_waits_for_gif,
    what_l1_does_not_intercept_is_answered_below,
    l2_stops_in_user_space_and_goes_on,
    the_hypervisor_is_taken_from_under_its_guest,
    without_svme_the_instructions_are_undefined,
    l2_has_a_gif_of_its_own_where_the_cpu_has_one,
);

/// The block; the host save area, the maps and L2's code follow by pages.
pub(super) const BLOCK: u64 = FREE;
const EXIT_CODE: u64 = 0x70;
pub(super) const EXIT_CPUID: u64 = 0x72;
const EXIT_INTR: u64 = 0x60;
pub(super) const EXIT_INVALID: u64 = u64::MAX;
pub(super) const RIP: u64 = 0x578;
pub(super) const L2_CODE: u64 = FREE + 0x8000;

/// Switches SVM on and makes a block whose guest runs at `L2_CODE` with L1's registers. Intercepts: VMRUN and CPUID.
macro_rules! prepared {
    () => {
        "mov $0xc0000080, %ecx; rdmsr; or $1 << 12, %eax; wrmsr; mov %eax, %esi; \
         mov $0xc0010117, %ecx; mov $FREE + 0x1000, %eax; xor %edx, %edx; wrmsr; \
         mov $FREE + 0x2000, %edi; mov $0x3000 / 8, %ecx; xor %eax, %eax; rep stosq; \
         mov $FREE, %edi; mov $512, %ecx; xor %eax, %eax; rep stosq; mov $FREE, %edi; \
         movl $1 << 18, 0x0c(%rdi); movl $1, 0x10(%rdi); \
         movq $FREE + 0x2000, 0x40(%rdi); movq $FREE + 0x2000, 0x48(%rdi); \
         movl $1, 0x58(%rdi); movl $1 << 24, 0x60(%rdi); \
         mov %es, 0x400(%rdi); mov %cs, 0x410(%rdi); mov %ss, 0x420(%rdi); mov %ds, 0x430(%rdi); \
         movw $0xc93, 0x402(%rdi); movw $0xa9b, 0x412(%rdi); movw $0xc93, 0x422(%rdi); \
         movw $0xc93, 0x432(%rdi); movl $-1, 0x404(%rdi); movl $-1, 0x414(%rdi); \
         movl $-1, 0x424(%rdi); movl $-1, 0x434(%rdi); sub $16, %rsp; sgdt (%rsp); \
         movzwl (%rsp), %eax; mov %eax, 0x464(%rdi); mov 2(%rsp), %rax; mov %rax, 0x468(%rdi); \
         sidt (%rsp); movzwl (%rsp), %eax; mov %eax, 0x484(%rdi); mov 2(%rsp), %rax; \
         mov %rax, 0x488(%rdi); add $16, %rsp; mov %rsi, 0x4d0(%rdi); mov %cr4, %rax; \
         mov %rax, 0x548(%rdi); mov %cr3, %rax; mov %rax, 0x550(%rdi); mov %cr0, %rax; \
         mov %rax, 0x558(%rdi); movq $0x400, 0x560(%rdi); mov $0xffff0ff0, %eax; \
         mov %rax, 0x568(%rdi); movq $2, 0x570(%rdi); movq $FREE + 0x8000, 0x578(%rdi); \
         lea -512(%rsp), %rax; mov %rax, 0x5d8(%rdi); movabs $0x0007040600070406, %rax; \
         mov %rax, 0x668(%rdi)"
    };
}

pub(super) use prepared;

guest_code!(
    // For ever: marks, runs the block, keeps the exit code.
    runs_blocks,
    64,
    prepared!(),
    "0: out %al, $PORT_MARK",
    "movq $0x55, RESULT",
    "mov $FREE, %eax",
    "vmrun",
    "mov FREE + 0x70, %rax",
    "mov %rax, RESULT",
    "jmp 0b",
);

guest_code!(
    // The same, with the address that the test gives.
    runs_addresses,
    64,
    prepared!(),
    "0: out %al, $PORT_MARK",
    "mov ARGUMENT, %rax",
    guarded!("vmrun"),
    "jmp 0b",
);

/// The program that runs the block for ever.
pub(super) fn program() -> &'static [u8] {
    runs_blocks()
}

/// The program that runs blocks at addresses that the test gives.
pub(super) fn program_of_addresses() -> &'static [u8] {
    runs_addresses()
}

/// CPUID, and HLT if it goes on.
pub(super) const L2_CPUID: [u8; 3] = [0x0f, 0xa2, 0xf4];

pub(super) fn with(code: &[u8], l2: &[u8]) -> Outcome<Guest> {
    with_vcpus(Chip::Kernel, 1, code, l2)
}

pub(super) fn with_vcpus(chip: Chip, vcpus: u32, code: &[u8], l2: &[u8]) -> Outcome<Guest> {
    let guest = Guest::with_vcpus(chip, Mode::Long, vcpus, code)?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if cpuid.find(0x8000_0001, 0).is_none_or(|entry| entry.ecx & 1 << 2 == 0) {
        return skip("no SVM in KVM_GET_SUPPORTED_CPUID");
    }
    guest.memory.write_bytes(L2_CODE, l2);
    Ok(guest)
}

fn a_guest_of_a_guest_runs_and_leaves() -> Outcome {
    let guest = with(runs_blocks(), &L2_CPUID)?;
    guest.reach_mark()?;
    for _ in 0..3 {
        guest.reach_mark()?;
        equal("exit code", guest.result(0), EXIT_CPUID)?;
        equal("RIP", guest.memory.read(BLOCK + RIP), L2_CODE)?;
    }
    Ok(())
}

fn a_bad_block_is_refused() -> Outcome {
    let guest = with(runs_blocks(), &L2_CPUID)?;
    guest.reach_mark()?;
    let good = guest.memory.read_bytes(BLOCK, 4096);
    let word = |at: u64| guest.memory.read(BLOCK + at);
    let bad = [
        ("VMRUN is not intercepted", 0x10, 0),
        ("ASID 0", 0x58, 0),
        ("EFER without SVME", 0x4d0, word(0x4d0) & !(1 << 12)),
        ("EFER with a bit that does not exist", 0x4d0, word(0x4d0) | 1 << 40),
        ("CR0.NW without CD", 0x558, word(0x558) | 1 << 29),
        ("CR0's upper half", 0x558, word(0x558) | 1 << 32),
        ("CR4 with a bit that does not exist", 0x548, word(0x548) | 1 << 40),
        ("DR6's upper half", 0x568, word(0x568) | 1 << 32),
        ("DR7's upper half", 0x560, word(0x560) | 1 << 32),
        ("long mode without PAE", 0x548, word(0x548) & !(1 << 5)),
    ];
    for (what, at, value) in bad {
        guest.memory.write_bytes(BLOCK, &good);
        guest.memory.write(BLOCK + at, value);
        guest.reach_mark()?;
        equal(what, guest.result(0), EXIT_INVALID)?;
        guest.memory.write_bytes(BLOCK, &good);
        guest.reach_mark()?;
        equal("the exit code of the good block", guest.result(0), EXIT_CPUID)?;
    }
    equal("exit code", guest.memory.read(BLOCK + EXIT_CODE), EXIT_CPUID)
}

fn a_block_at_no_address_faults() -> Outcome {
    let guest = with(runs_addresses(), &L2_CPUID)?;
    guest.reach_mark()?;
    for (n, address) in (1..).zip([BLOCK + 8, 1 << 60, !0xfff]) {
        guest.memory.write(ARGUMENT, address);
        guest.reach_mark()?;
        let (faults, vector, _) = guest.faults();
        equal("faults", faults, n)?;
        equal("vector", vector, 13)?;
    }
    Ok(())
}

/// At an address where no memory is older stock KVM makes #GP of it, newer leaves with an error of emulation.
fn a_block_that_is_no_memory_faults_or_leaves() -> Outcome {
    for address in [0x4000_0000, 0xfee0_0000] {
        let guest = with(runs_addresses(), &L2_CPUID)?;
        guest.reach_mark()?;
        guest.memory.write(ARGUMENT, address);
        match guest.exit()? {
            Exit::Internal { suberror: 1, .. } => equal("faults", guest.faults().0, 0)?,
            exit if exit.is_out(PORT_MARK) => {
                let (faults, vector, _) = guest.faults();
                equal("faults and vector", (faults, vector), (1, 13))?;
            }
            exit => return fail(format!("expected a fault or an error, got {exit:x?}")),
        }
    }
    Ok(())
}

guest_code!(
    moves_registers,
    64,
    prepared!(),
    // What is there now, into a second block; then another, and back.
    "mov $FREE + 0x9000, %eax",
    "vmsave",
    "mov $0xc0000102, %ecx",
    "mov $0x1234, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $FREE + 0xa000, %eax",
    "vmsave",
    "mov FREE + 0xa620, %rax",
    "mov %rax, RESULT",
    "mov $FREE + 0x9000, %eax",
    "vmload",
    "mov $0xc0000102, %ecx",
    "rdmsr",
    "mov %eax, RESULT + 8",
    "movq $0x7777, FREE + 0x9620",
    "mov $FREE + 0x9000, %eax",
    "vmload",
    "mov $0xc0000102, %ecx",
    "rdmsr",
    "mov %eax, RESULT + 16",
    done!()
);

fn registers_travel_by_vmload_and_vmsave() -> Outcome {
    let guest = with(moves_registers(), &L2_CPUID)?;
    guest.finish()?;
    equal("KERNEL_GS_BASE saved", guest.result(0), 0x1234)?;
    equal("KERNEL_GS_BASE before", guest.result(1), 0)?;
    equal("KERNEL_GS_BASE loaded", guest.result(2), 0x7777)
}

guest_code!(
    interrupted,
    64,
    prepared!(),
    "push %rdi",
    x2apic!(),
    "pop %rdi",
    // INTR and CPUID.
    "movl $1 << 18 | 1, 0x0c(%rdi)",
    "cli",
    "mov $0x83f, %ecx",
    "mov $0x58, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "clgi",
    "sti",
    "nop",
    "mov COUNTS + 0x58 * 8, %rax",
    "mov %rax, RESULT",
    "mov $FREE, %eax",
    "vmrun",
    "mov FREE + 0x70, %rax",
    "mov %rax, RESULT + 8",
    "mov COUNTS + 0x58 * 8, %rax",
    "mov %rax, RESULT + 16",
    "stgi",
    "nop",
    "mov COUNTS + 0x58 * 8, %rax",
    "mov %rax, RESULT + 24",
    "cli",
    done!()
);

fn an_interrupt_ends_the_run_and_waits_for_gif() -> Outcome {
    let guest = with(interrupted(), &L2_CPUID)?;
    guest.finish()?;
    equal("interrupts with GIF clear", guest.result(0), 0)?;
    equal("exit code", guest.result(1), EXIT_INTR)?;
    equal("interrupts behind the exit", guest.result(2), 0)?;
    equal("interrupts behind STGI", guest.result(3), 1)
}

/// Writes to the port of marks, then CPUID. RAX is L2's.
pub(super) const L2_MARKS: [u8; 5] = [0xe6, 0xf6, 0x0f, 0xa2, 0xf4];

fn what_l1_does_not_intercept_is_answered_below() -> Outcome {
    // RDMSR of APIC_BASE, XGETBV's kin CPUID last.
    let l2 = [0xb9, 0x1b, 0, 0, 0, 0x0f, 0x32, 0x89, 0xc3, 0x0f, 0xa2, 0xf4];
    let guest = with(runs_blocks(), &l2)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_CPUID)?;
    equal("RIP", guest.memory.read(BLOCK + RIP), L2_CODE + 9)?;
    equal("APIC_BASE", guest.vcpu().regs()?.rbx & 0xffff_f000, 0xfee0_0000)
}

fn l2_stops_in_user_space_and_goes_on() -> Outcome {
    let guest = with(runs_blocks(), &L2_MARKS)?;
    guest.reach_mark()?;
    for _ in 0..3 {
        guest.reach_mark()?;
        let rip = guest.vcpu().regs()?.rip;
        equal("L2 runs", (L2_CODE..L2_CODE + 3).contains(&rip), true)?;
        guest.reach_mark()?;
        equal("exit code", guest.result(0), EXIT_CPUID)?;
        guest.memory.write(BLOCK + RIP, L2_CODE);
    }
    Ok(())
}

fn the_hypervisor_is_taken_from_under_its_guest() -> Outcome {
    let guest = with(runs_blocks(), &L2_MARKS)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    // L2 runs. Without SVM there is none.
    let mut sregs = guest.vcpu().sregs()?;
    sregs.efer &= !(1 << 12);
    let mut regs = guest.vcpu().regs()?;
    regs.rip = crate::machine::layout::PROGRAM;
    guest.vcpu().set_sregs(&sregs)?;
    guest.vcpu().set_regs(&regs)?;
    guest.reach_mark()?;
    guest.reach_mark()
}

guest_code!(
    undefined,
    64,
    "mov $FREE, %eax",
    guarded!("vmrun"),
    guarded!("vmload"),
    guarded!("vmsave"),
    guarded!("stgi"),
    guarded!("clgi"),
    guarded!("invlpga"),
    done!()
);

fn without_svme_the_instructions_are_undefined() -> Outcome {
    let guest = with(undefined(), &L2_CPUID)?;
    guest.finish()?;
    equal("faults", guest.faults().0, 6)?;
    equal("vector", guest.faults().1, 6)
}

/// CLGI, CPUID, STGI, CPUID.
const L2_CHANGES_GIF: [u8; 11] = [0x0f, 0x01, 0xdd, 0x0f, 0xa2, 0x0f, 0x01, 0xdc, 0x0f, 0xa2, 0xf4];

fn l2_has_a_gif_of_its_own_where_the_cpu_has_one() -> Outcome {
    const INT_CTL: u64 = 0x60;
    const V_GIF: u64 = 1 << 9;
    const ENABLE: u64 = 1 << 25;
    let guest = with(runs_blocks(), &L2_CHANGES_GIF)?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if cpuid.find(0x8000_000a, 0).is_none_or(|entry| entry.edx & 1 << 16 == 0) {
        return skip("no virtual GIF in KVM_GET_SUPPORTED_CPUID");
    }
    guest.reach_mark()?;
    let int_ctl = || guest.memory.read(BLOCK + INT_CTL);
    guest.memory.write(BLOCK + INT_CTL, int_ctl() | V_GIF | ENABLE);
    for (rip, flag) in [(L2_CODE + 3, 0), (L2_CODE + 8, V_GIF)] {
        guest.reach_mark()?;
        equal("exit code", guest.result(0), EXIT_CPUID)?;
        equal("RIP", guest.memory.read(BLOCK + RIP), rip)?;
        equal("V_GIF", int_ctl() & (V_GIF | ENABLE), flag | ENABLE)?;
        guest.memory.write(BLOCK + RIP, rip + 2);
    }
    Ok(())
}
