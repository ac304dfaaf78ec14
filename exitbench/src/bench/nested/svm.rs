//! L1 for SVM: one control block, or two, whose guest runs in L1's own address space; without nested paging but for page faults.
//!
//! APM vol. 2 §15.5 (VMRUN), appendix B (the block). After an exit L1 goes on with GIF clear, which no workload
//! here minds: no interrupt is wanted.

use crate::bench::program::guest_program;

/// L1 moves L2's RIP past an instruction.
macro_rules! skip {
    ($length:literal) => {
        concat!("addq $", $length, ", exitbench_nested + 0x578")
    };
}

/// Defines a program whose L2 executes `instruction` for ever, with these flags, this virtual interrupt and under these
/// words of intercepts, and whose L1 does what is named `after` an exit. `paging` is done last,
/// with the block's address in RDI. `block` has the address of the block to be run in RAX.
macro_rules! svm_program {
    ($function:ident, $name:literal, third: $third:literal, fourth: $fourth:literal, flags: $flags:literal,
     interrupt: $interrupt:literal, $(paging: [$($paging:expr),*],)? before: [$($before:expr),*], instruction: $instruction:expr,
     after: $after:expr) => {
        svm_program!($function, $name, third: $third, fourth: $fourth, flags: $flags, interrupt: $interrupt,
            $(paging: [$($paging),*],)? before: [$($before),*], instruction: $instruction,
            block: "mov $exitbench_nested, %eax", after: $after);
    };
    ($function:ident, $name:literal, third: $third:literal, fourth: $fourth:literal, flags: $flags:literal,
     interrupt: $interrupt:literal, $(paging: [$($paging:expr),*],)? before: [$($before:expr),*], instruction: $instruction:expr,
     block: $block:literal, after: $after:expr) => {
        guest_program!(
            $function,
            $name,
            setup: [
                // SVM on, and a page for the host's state.
                "mov $0xc0000080, %ecx",
                "rdmsr",
                "or $1 << 12, %eax",
                "wrmsr",
                "mov %eax, %esi",
                "mov $0xc0010117, %ecx",
                "mov $exitbench_nested + 0x1000, %eax",
                "xor %edx, %edx",
                "wrmsr",
                // Both permission maps are the same three pages of ones.
                "mov $exitbench_nested + 0x2000, %edi",
                "mov $0x3000 / 8, %ecx",
                "mov $-1, %rax",
                "rep stosq",
                // The control block: zeroes, then the control area.
                "mov $exitbench_nested, %edi",
                "mov $4096 / 8, %ecx",
                "xor %eax, %eax",
                "rep stosq",
                "mov $exitbench_nested, %edi",
                concat!("movl $", $third, ", 0x0c(%rdi)"),
                concat!("movl $", $fourth, " | 1, 0x10(%rdi)"),
                "movq $exitbench_nested + 0x2000, 0x40(%rdi)",
                "movq $exitbench_nested + 0x2000, 0x48(%rdi)",
                "movl $1, 0x58(%rdi)",
                // V_INTR_MASKING.
                concat!("movl $1 << 24 | ", $interrupt, ", 0x60(%rdi)"),
                // The save area: flat segments of 64 bits, level 0, L1's registers.
                "mov %es, 0x400(%rdi)",
                "mov %cs, 0x410(%rdi)",
                "mov %ss, 0x420(%rdi)",
                "mov %ds, 0x430(%rdi)",
                "movw $0xc93, 0x402(%rdi)",
                "movw $0xa9b, 0x412(%rdi)",
                "movw $0xc93, 0x422(%rdi)",
                "movw $0xc93, 0x432(%rdi)",
                "movl $-1, 0x404(%rdi)",
                "movl $-1, 0x414(%rdi)",
                "movl $-1, 0x424(%rdi)",
                "movl $-1, 0x434(%rdi)",
                "sub $16, %rsp",
                "sgdt (%rsp)",
                "movzwl (%rsp), %eax",
                "mov %eax, 0x464(%rdi)",
                "mov 2(%rsp), %rax",
                "mov %rax, 0x468(%rdi)",
                "sidt (%rsp)",
                "movzwl (%rsp), %eax",
                "mov %eax, 0x484(%rdi)",
                "mov 2(%rsp), %rax",
                "mov %rax, 0x488(%rdi)",
                "add $16, %rsp",
                "mov %rsi, 0x4d0(%rdi)",
                "mov %cr4, %rax",
                "mov %rax, 0x548(%rdi)",
                "mov %cr3, %rax",
                "mov %rax, 0x550(%rdi)",
                "mov %cr0, %rax",
                "mov %rax, 0x558(%rdi)",
                "movq $0x400, 0x560(%rdi)",
                "mov $0xffff0ff0, %eax",
                "mov %rax, 0x568(%rdi)",
                concat!("movq $", $flags, ", 0x570(%rdi)"),
                "lea 7f(%rip), %rax",
                "mov %rax, 0x578(%rdi)",
                "lea -512(%rsp), %rax",
                "mov %rax, 0x5d8(%rdi)",
                "movabs $0x0007040600070406, %rax",
                "mov %rax, 0x668(%rdi)",
                $($($paging,)*)?
                "jmp 6f",
                // L2. What it needs in registers it sets each time: L1 shares all but RAX and RSP with it.
                "7:",
                $($before,)*
                $instruction,
                "jmp 7b",
                "6:"
            ],
            operation: [
                $block,
                "vmrun",
                $after
            ]
        );
    };
}

svm_program!(cpuid, "nested_svm_cpuid", third: "1 << 18", fourth: "0", flags: "2", interrupt: "0",
    before: [], instruction: "cpuid", after: skip!("2"));
svm_program!(vmmcall, "nested_svm_vmmcall", third: "0", fourth: "2", flags: "2", interrupt: "0",
    before: [], instruction: "vmmcall", after: skip!("3"));
svm_program!(hlt, "nested_svm_hlt", third: "1 << 24", fourth: "0", flags: "2", interrupt: "0",
    before: [], instruction: "hlt", after: skip!("1"));
// KERNEL_GS_BASE, which no hypervisor keeps from its guest of its own accord.
svm_program!(wrmsr, "nested_svm_wrmsr", third: "1 << 28", fourth: "0", flags: "2", interrupt: "0",
    before: ["mov $0xc0000102, %ecx"], instruction: "wrmsr", after: skip!("2"));
svm_program!(pio, "nested_svm_pio", third: "1 << 27", fourth: "0", flags: "2", interrupt: "0",
    before: [], instruction: "out %al, $0x80", after: skip!("2"));
// L2 keeps the CR4 that L1 had.
svm_program!(osxsave, "nested_svm_osxsave", third: "1 << 18", fourth: "0", flags: "2", interrupt: "0",
    paging: ["mov %cr4, %rax; bts $18, %rax; mov %rax, %cr4; mov $0xd, %eax; xor %ecx, %ecx; cpuid; xor %ecx, %ecx; xor %edx, %edx; xsetbv"],
    before: [], instruction: "cpuid", after: skip!("2"));
svm_program!(seldom, "nested_svm_seldom", third: "1 << 18", fourth: "0", flags: "2", interrupt: "0",
    before: [], instruction: "cpuid",
    after: concat!(skip!("2"), "; mov exitbench_nested + 0x408, %rax; mov %rax, exitbench_nested + 0x408"));
// The two blocks are run in turn. Their L2s differ in the ASID and the stack.
svm_program!(two, "nested_svm_two", third: "1 << 18", fourth: "0", flags: "2", interrupt: "0",
    paging: ["mov %rdi, %rsi; mov $exitbench_nested + 0x5000, %edi; mov $4096 / 8, %ecx; rep movsq; sub $4096, %edi",
        "movl $2, 0x58(%rdi); subq $256, 0x5d8(%rdi); mov %edi, %ebx"],
    before: [], instruction: "cpuid",
    block: "xor $exitbench_nested ^ (exitbench_nested + 0x5000), %ebx; mov %ebx, %eax",
    after: "addq $2, 0x578(%rbx)");
// A virtual interrupt waits that L2 can take, and L1 intercepts that: L2 exits before its first instruction.
svm_program!(entry, "nested_svm_entry", third: "1 << 4", fourth: "0", flags: "0x202",
    interrupt: "1 << 8 | 1 << 20", before: [], instruction: "ud2", after: "nop");
// Present, writable, a user's, accessed, dirty.
svm_program!(page_fault, "nested_svm_page_fault", third: "0", fourth: "0", flags: "2", interrupt: "0",
    paging: ["mov $0x67, %esi; mov $0xe7, %edx", write_tables!(), "movq $1, 0x90(%rdi)",
        "movq $exitbench_fresh, 0xb0(%rdi)"],
    before: [], instruction: touch_next!(),
    after: concat!("cmpq $0x400, exitbench_nested + 0x70; je 0f; ud2; 0: ",
        "mov exitbench_nested + 0x80, %rax; mov $0x67, %edx; ", map_page!()));

/// The programs, for L1s of this kind.
pub const PROGRAMS: super::Programs = super::Programs {
    cpuid,
    hypercall: vmmcall,
    hlt,
    wrmsr,
    pio,
    entry,
    page_fault,
    osxsave,
    seldom,
    two,
};
