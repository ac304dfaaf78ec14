//! Guests outside of 64-bit mode: real mode with its interrupts and with large segments, protected mode
//! without paging, virtual-8086 mode, and a task switch through a task gate (SDM vol. 3A §7, §20).

use crate::kvm::exit::Exit;
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::*;
use crate::oracle;
use crate::outcome::{Outcome, equal, fail, skip};
use crate::runner::tests;

tests!("modes":
    exceptions_of_real_mode_go_through_its_table,
    real_mode_keeps_large_segments,
    protected_mode_without_paging_reaches_memory_and_devices,
    virtual_8086_mode_runs_and_faults,
    a_task_gate_switches_tasks,
    calls_jumps_and_faults_switch_tasks,
);

fn word(guest: &Guest, at: u64) -> u32 {
    guest.memory.read(at) as u32
}

guest_code!(
    real_exceptions,
    16,
    "0:",
    // #DE and #UD: handlers in the program's segment, which count and continue behind the instruction.
    "movw $2f - 0b, 0x0",
    "movw %cs, 0x2",
    "movw $3f - 0b, 0x18",
    "movw %cs, 0x1a",
    "xor %cx, %cx",
    "mov $7, %ax",
    "xor %dx, %dx",
    "div %cx",
    "ud2",
    "xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "mov %ebx, 0x8010",
    "out %al, $PORT_DONE",
    "2: incw 0x8000",
    "jmp 4f",
    "3: incw 0x8002",
    "4: mov %sp, %bp",
    "addw $2, (%bp)",
    "iretw",
);

fn exceptions_of_real_mode_go_through_its_table() -> Outcome {
    let guest = Guest::real(real_exceptions())?;
    guest.finish()?;
    equal("#DE and #UD", word(&guest, 0x8000), 0x1_0001)?;
    let vendor = guest.system.supported_cpuid()?.find(0, 0).map_or(0, |leaf| leaf.ebx);
    equal("CPUID in between", word(&guest, 0x8010), vendor)
}

/// A GDT at 0x8000: null, code based at the program, flat data; then protected mode.
macro_rules! protected {
    () => {
        "movl $0, 0x8000
         movl $0, 0x8004
         movl $0x0000ffff, 0x8008
         movl $0x00cf9b01, 0x800c
         movl $0x0000ffff, 0x8010
         movl $0x00cf9300, 0x8014
         movw $0x5f, 0x80f0
         movl $0x8000, 0x80f2
         lgdt 0x80f0
         mov %cr0, %eax
         or $1, %eax
         mov %eax, %cr0"
    };
}

pub(super) use protected;

guest_code!(
    large_segments,
    16,
    "0:",
    protected!(),
    "mov $0x10, %bx",
    "mov %bx, %es",
    "and $0xfe, %al",
    "mov %eax, %cr0",
    // Real mode again, but ES reaches as far as it did.
    "mov $0x180000, %ebx",
    "movl $0x11223344, %es:(%ebx)",
    "xor %eax, %eax",
    "cpuid",
    "mov $0x180000, %ebx",
    "incl %es:(%ebx)",
    "mov $NOWHERE, %ebx",
    "mov %es:(%ebx), %eax",
    "mov %eax, 0x8100",
    "out %al, $PORT_DONE",
);

fn real_mode_keeps_large_segments() -> Outcome {
    let guest = Guest::real(large_segments())?;
    guest.expect("a device far away", Exit::mmio(false, NOWHERE, &[0; 4]))?;
    guest.vcpu().answer(&[0x78, 0x56, 0x34, 0x12]);
    guest.finish()?;
    equal("memory above 1 MiB", word(&guest, 0x18_0000), 0x1122_3345)?;
    equal("the device's word", word(&guest, 0x8100), 0x1234_5678)
}

guest_code!(
    unpaged,
    16,
    "0:",
    protected!(),
    "ljmp $8, $1f - 0b",
    ".code32",
    "1: mov $0x10, %ax",
    "mov %ax, %ds",
    "mov %ax, %ss",
    "mov $0x7000, %esp",
    // A gate for vector 0x80.
    "movw $0x7ff, 0x80f8",
    "movl $0x9000, 0x80fa",
    "lidt 0x80f8",
    "movl $(3f - 0b) + 0x80000, 0x9400",
    "movl $0x8e00, 0x9404",
    "int $0x80",
    "int $0x80",
    "movl $0x55667788, 0x1ff000",
    "movl $0x99, NOWHERE",
    "mov %cr3, %eax",
    "mov %eax, %cr3",
    "mov %cr4, %eax",
    "or $0x10, %eax",
    "mov %eax, %cr4",
    "incl 0x1ff000",
    "out %al, $PORT_DONE",
    "3: incl 0x8100",
    "iret",
);

fn protected_mode_without_paging_reaches_memory_and_devices() -> Outcome {
    let guest = Guest::real(unpaged())?;
    guest.expect("a device", Exit::mmio(true, NOWHERE, &0x99_u32.to_le_bytes()))?;
    guest.finish()?;
    equal("interrupts", word(&guest, 0x8100), 2)?;
    equal("memory", word(&guest, 0x1f_f000), 0x5566_7789)
}

guest_code!(
    virtual_8086,
    16,
    "0:",
    protected!(),
    // A task state segment, whose stack of level 0 the fault comes back on.
    "movl $0x85000067, 0x8018",
    "movl $0x00008900, 0x801c",
    "movl $0x7000, 0x8504",
    "movl $0x10, 0x8508",
    "movl $0x680000, 0x8564",
    "ljmp $8, $1f - 0b",
    ".code32",
    "1: mov $0x10, %ax",
    "mov %ax, %ds",
    "mov %ax, %ss",
    "mov $0x7000, %esp",
    "mov $0x18, %ax",
    "ltr %ax",
    "movw $0x7ff, 0x80f8",
    "movl $0x9000, 0x80fa",
    "lidt 0x80f8",
    "movl $(3f - 0b) + 0x80000, 0x9068",
    "movl $0x8e00, 0x906c",
    // To virtual-8086 mode: the program at segment 0x1000, data at 0.
    "push $0",
    "push $0",
    "push $0",
    "push $0",
    "push $0",
    "push $0x6000",
    "push $0x20002",
    "push $0x1000",
    "push $2f - 0b",
    "iret",
    ".code16",
    "2: movw $0x4321, 0x8200",
    "mov %cs, %ax",
    "movw %ax, 0x8202",
    // IOPL 0 permits no CLI here.
    "cli",
    ".code32",
    "3: pop %eax",
    "pop %ebx",
    "pop %ecx",
    "pop %edx",
    "mov $0x10, %si",
    "mov %si, %ds",
    "mov %eax, 0x8204",
    "mov %ecx, 0x8208",
    "mov %edx, 0x820c",
    "out %al, $PORT_DONE",
);

fn virtual_8086_mode_runs_and_faults() -> Outcome {
    let guest = Guest::real(virtual_8086())?;
    guest.finish()?;
    equal("what it stored, and its CS", word(&guest, 0x8200), 0x1000_4321)?;
    let got = [0x8204, 0x8208, 0x820c].map(|at| word(&guest, at) & 0x2_ffff);
    equal(
        "error code, CS, VM of the frame",
        [got[0], got[1], got[2] & 0x2_0000],
        [0, 0x1000, 0x2_0000],
    )
}

guest_code!(
    task_gate,
    16,
    "0:",
    protected!(),
    // Two task state segments: ours, and that of vector 0x80.
    "movl $0x85000067, 0x8018",
    "movl $0x00008900, 0x801c",
    "movl $0x86000067, 0x8020",
    "movl $0x00008900, 0x8024",
    "movl $3f - 0b, 0x8620",
    "movl $2, 0x8624",
    "movl $0x6800, 0x8638",
    "movl $0x10, 0x8648",
    "movl $8, 0x864c",
    "movl $0x10, 0x8650",
    "movl $0x10, 0x8654",
    "ljmp $8, $1f - 0b",
    ".code32",
    "1: mov $0x10, %ax",
    "mov %ax, %ds",
    "mov %ax, %ss",
    "mov $0x7000, %esp",
    "mov $0x18, %ax",
    "ltr %ax",
    "movw $0x7ff, 0x80f8",
    "movl $0x9000, 0x80fa",
    "lidt 0x80f8",
    "movl $0x200000, 0x9400",
    "movl $0x8500, 0x9404",
    "mov $0x1234, %ebx",
    "int $0x80",
    "mov %ebx, 0x8100",
    "int $0x80",
    "out %al, $PORT_DONE",
    // The other task: counts, changes a register of its own, and returns.
    "3: incl 0x8104",
    "mov $0x9999, %ebx",
    "str %ax",
    "mov %eax, 0x8108",
    "iret",
    "jmp 3b",
);

fn a_task_gate_switches_tasks() -> Outcome {
    if oracle::vendor() == oracle::Vendor::Amd && !oracle::tdp() {
        return skip("under shadow paging the lab's CPU comes to no end, with either module");
    }
    let guest = Guest::real(task_gate())?;
    match guest.exit()? {
        exit if exit.is_out(PORT_DONE) => {}
        exit => return fail(format!("expected the guest's end got {exit:x?}")),
    }
    equal(
        "switches, task register there",
        [word(&guest, 0x8104), word(&guest, 0x8108) & 0xffff],
        [2, 0x20],
    )?;
    equal("EBX here", word(&guest, 0x8100), 0x1234)
}

guest_code!(
    tasks,
    16,
    "0:",
    protected!(),
    // Ours; two of 32 bits, for calls and for #GP; one of 16 bits.
    "movl $0x85000067, 0x8018",
    "movl $0x00008900, 0x801c",
    "movl $0x86000067, 0x8020",
    "movl $0x00008900, 0x8024",
    "movl $0x8700002b, 0x8028",
    "movl $0x00008100, 0x802c",
    "movl $0x8a000067, 0x8030",
    "movl $0x00008900, 0x8034",
    "movl $3f - 0b, 0x8620",
    "movl $2, 0x8624",
    "movl $0x6800, 0x8638",
    "movl $0x10, 0x8648",
    "movl $8, 0x864c",
    "movl $0x10, 0x8650",
    "movl $0x10, 0x8654",
    "movw $4f - 0b, 0x870e",
    "movw $2, 0x8710",
    "movw $0x6400, 0x871a",
    "movw $0x10, 0x8722",
    "movw $8, 0x8724",
    "movw $0x10, 0x8726",
    "movw $0x10, 0x8728",
    "movl $5f - 0b, 0x8a20",
    "movl $2, 0x8a24",
    "movl $0x6000, 0x8a38",
    "movl $0x10, 0x8a48",
    "movl $8, 0x8a4c",
    "movl $0x10, 0x8a50",
    "movl $0x10, 0x8a54",
    "ljmp $8, $1f - 0b",
    ".code32",
    "1: mov $0x10, %ax",
    "mov %ax, %ds",
    "mov %ax, %ss",
    "mov $0x7000, %esp",
    "mov $0x18, %ax",
    "ltr %ax",
    "movw $0x7ff, 0x80f8",
    "movl $0x9000, 0x80fa",
    "lidt 0x80f8",
    "movl $0x300000, 0x9068",
    "movl $0x8500, 0x906c",
    "mov $0x12345678, %ebx",
    "lcall $0x20, $0",
    "lcall $0x20, $0",
    "cmpl $0, ARGUMENT",
    "je 2f",
    "lcall $0x28, $0",
    "2: mov $0x1000, %eax",
    // #GP with the selector as its error code, twice.
    "mov %eax, %es",
    "mov %eax, %es",
    // To the other task and back by JMP: neither is nested.
    "movl $6f - 0b, 0x8620",
    "ljmp $0x20, $0",
    "mov %ebx, 0x8100",
    "str %ax",
    "mov %eax, 0x8118",
    "mov %cr0, %eax",
    "mov %eax, 0x8120",
    "pushf",
    "pop 0x8124",
    "out %al, $PORT_DONE",
    "3: incl 0x8104",
    "mov $0x9999, %ebx",
    "pushf",
    "pop 0x8108",
    "iret",
    "jmp 3b",
    "4: incl 0x810c",
    "mov $0x8888, %ebx",
    "iret",
    "5: pop 0x8110",
    "incl 0x8114",
    "addl $2, 0x8520",
    "iret",
    "jmp 5b",
    "6: str %ax",
    "mov %eax, 0x811c",
    "ljmp $0x18, $0",
);

fn calls_jumps_and_faults_switch_tasks() -> Outcome {
    if oracle::vendor() == oracle::Vendor::Amd && !oracle::tdp() {
        return skip("under shadow paging the lab's CPU comes to no end, with either module");
    }
    if oracle::vendor() == oracle::Vendor::Amd && oracle::kernel() < (6, 12) {
        return skip("under a 6.1 host the lab's CPU shuts the guest down, with either module");
    }
    let guest = Guest::real(tasks())?;
    // Stock KVM writes both tasks' state in the form of the new one's TSS.
    let mixed = !oracle::is_stock() || oracle::vendor() == oracle::Vendor::Amd;
    guest.memory.write(ARGUMENT, mixed.into());
    guest.finish()?;
    equal("calls to a task of 32 bits", word(&guest, 0x8104), 2)?;
    equal("NT there", word(&guest, 0x8108) & 0x4000, 0x4000)?;
    equal("calls to one of 16 bits", word(&guest, 0x810c), mixed.into())?;
    equal(
        "#GP's error code, and how often",
        [0x8110, 0x8114].map(|at| word(&guest, at)),
        [0x1000, 2],
    )?;
    equal("EBX here", word(&guest, 0x8100), 0x1234_5678)?;
    let registers = [0x8118, 0x811c].map(|at| word(&guest, at) & 0xffff);
    equal("task registers", registers, [0x18, 0x20])?;
    equal("NT", word(&guest, 0x8124) & 0x4000, 0)?;
    // The lab's AMD machine does not keep CR0.TS under stock KVM.
    if oracle::vendor() == oracle::Vendor::Intel || !oracle::is_stock() {
        equal("CR0.TS", word(&guest, 0x8120) & 8, 8)?;
    }
    let types = [0x801d, 0x8025, 0x802d, 0x8035].map(|at| word(&guest, at) & 0xff);
    equal("busy is ours alone", types, [0x8b, 0x89, 0x81, 0x89])
}
