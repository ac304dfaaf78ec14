//! L1 for VMX: one VMCS, or two, whose guest runs in L1's own address space; without EPT but for page faults.
//!
//! SDM vol. 3C chapters 24 to 31. The host's RIP is a trampoline that jumps to where the operation goes on, since an
//! operation stands in a program twice. Fields that are not in the table below are zero, as VMCLEAR of a page of
//! zeroes leaves them under every hypervisor that keeps the VMCS in memory.

use crate::bench::program::guest_program;

/// L1 moves L2's RIP past an instruction.
macro_rules! skip {
    ($length:literal) => {
        concat!(
            "mov $0x681e, %edx; vmread %rdx, %rax; add $",
            $length,
            ", %rax; vmwrite %rax, %rdx"
        )
    };
}

/// Defines a program whose L2 executes `instruction` for ever, with these flags and under these primary controls, and
/// whose L1 does what is named `after` an exit. `ept` has what is done for EPT, the control and the fields; `l1_cr4`
/// changes the CR4 in RAX, which L2 has, into L1's. `each` is done behind the setup of a VMCS, and may have another set up;
/// `load` is done before each entry.
macro_rules! vmx_program {
    ($function:ident, $name:literal, primary: $primary:literal, flags: $flags:literal,
     $(ept: [$tables:expr, $control:literal, $fields:literal],)? $(l1_cr4: $l1_cr4:literal,)?
     $(own: $own:literal, each: $each:literal, load: $load:literal,)? before: [$($before:expr),*],
     instruction: $instruction:expr, after: $after:expr) => {
        guest_program!(
            $function,
            $name,
            setup: [
                // CR0.NE and CR4.VMXE; the feature control is for the firmware to lock.
                "mov %cr0, %rax",
                "or $0x20, %rax",
                "mov %rax, %cr0",
                "mov %cr4, %rax",
                "or $1 << 13, %rax",
                "mov %rax, %cr4",
                "mov $0x3a, %ecx",
                "rdmsr",
                "test $1, %al",
                "jnz 2f",
                "mov $5, %eax",
                "xor %edx, %edx",
                "wrmsr",
                "2:",
                // Four pages of zeroes: the VMXON region, a VMCS, what L1 keeps, another VMCS. The regions have their revision.
                "mov $exitbench_nested, %edi",
                "mov $0x4000 / 8, %ecx",
                "xor %eax, %eax",
                "rep stosq",
                "mov $0x480, %ecx",
                "rdmsr",
                "and $0x7fffffff, %eax",
                "mov %eax, exitbench_nested",
                "mov %eax, exitbench_nested + 0x1000",
                "mov %eax, exitbench_nested + 0x3000",
                // What L1 keeps: where to go on behind an exit, the VMCS and its VPID.
                "movq $exitbench_nested + 0x1000, exitbench_nested + 0x2008",
                "movq $1, exitbench_nested + 0x2010",
                "sub $32, %rsp",
                "movq $exitbench_nested, (%rsp)",
                "vmxon (%rsp)",
                "0:",
                "vmclear exitbench_nested + 0x2008",
                "vmptrld exitbench_nested + 0x2008",
                $($tables,)?
                // Controls: what is wanted, and what the capability MSR demands and allows.
                "lea 3f(%rip), %rsi",
                "2:",
                "mov (%rsi), %ecx",
                "jecxz 2f",
                "rdmsr",
                "or 4(%rsi), %eax",
                "and %edx, %eax",
                "mov 8(%rsi), %edx",
                "vmwrite %rax, %rdx",
                "add $12, %rsi",
                "jmp 2b",
                "2:",
                // The VPID, whose encoding is 0.
                "xor %edx, %edx",
                "mov exitbench_nested + 0x2010, %eax",
                "vmwrite %rax, %rdx",
                // Fields with a value of their own, which is extended by its sign.
                "lea 4f(%rip), %rsi",
                "2:",
                "mov (%rsi), %edx",
                "test %edx, %edx",
                "jz 2f",
                "movslq 4(%rsi), %rax",
                "vmwrite %rax, %rdx",
                "add $8, %rsi",
                "jmp 2b",
                "2:",
                // L1's registers, for both.
                "mov %cr0, %rax",
                "mov $0x6800, %edx",
                "vmwrite %rax, %rdx",
                "mov $0x6c00, %edx",
                "vmwrite %rax, %rdx",
                "mov %cr3, %rax",
                "mov $0x6802, %edx",
                "vmwrite %rax, %rdx",
                "mov $0x6c02, %edx",
                "vmwrite %rax, %rdx",
                "mov %cr4, %rax",
                "mov $0x6804, %edx",
                "vmwrite %rax, %rdx",
                $($l1_cr4,)?
                "mov $0x6c04, %edx",
                "vmwrite %rax, %rdx",
                "sgdt (%rsp)",
                "movzwl (%rsp), %eax",
                "mov $0x4810, %edx",
                "vmwrite %rax, %rdx",
                "mov 2(%rsp), %rax",
                "mov $0x6816, %edx",
                "vmwrite %rax, %rdx",
                "mov $0x6c0c, %edx",
                "vmwrite %rax, %rdx",
                "sidt (%rsp)",
                "movzwl (%rsp), %eax",
                "mov $0x4812, %edx",
                "vmwrite %rax, %rdx",
                "mov 2(%rsp), %rax",
                "mov $0x6818, %edx",
                "vmwrite %rax, %rdx",
                "mov $0x6c0e, %edx",
                "vmwrite %rax, %rdx",
                "add $32, %rsp",
                "mov $0x6c14, %edx",
                "vmwrite %rsp, %rdx",
                "lea -512(%rsp), %rax",
                "mov $0x681c, %edx",
                "vmwrite %rax, %rdx",
                "lea 7f(%rip), %rax",
                "mov $0x681e, %edx",
                "vmwrite %rax, %rdx",
                "lea 5f(%rip), %rax",
                "mov $0x6c16, %edx",
                "vmwrite %rax, %rdx",
                $($own,)?
                // The first entry: a VMCS is launched once.
                "lea 6f(%rip), %rax",
                "mov %rax, exitbench_nested + 0x2000",
                "vmlaunch",
                // It failed: an interrupt that nobody asked for tells the VMM.
                "ud2",
                // Controls: MSR, wanted, field.
                ".balign 4",
                "3:",
                ".long 0x481, 0, 0x4000",
                concat!(".long 0x482, 1 << 31 | ", $primary, ", 0x4002"),
                // A tag for L2's translations, as every hypervisor gives one: else all are dropped at each transition.
                concat!(".long 0x48b, 1 << 5", $(" | ", $control,)? ", 0x401e"),
                // The host has 64 bits; the guest is in IA-32e mode.
                ".long 0x483, 1 << 9, 0x400c",
                ".long 0x484, 1 << 9, 0x4012",
                ".long 0",
                // Fields: encoding, value.
                "4:",
                ".long 0x2800, -1",
                ".long 0x800, 0x18, 0x802, 0x10, 0x804, 0x18, 0x806, 0x18, 0x808, 0x18, 0x80a, 0x18, 0x80e, 0x20",
                // L1 has no ES, DS, FS and GS, as every hypervisor of 64 bits that is a Linux.
                ".long 0xc02, 0x10, 0xc04, 0x18, 0xc0c, 0x20",
                ".long 0x4800, -1, 0x4802, -1, 0x4804, -1, 0x4806, -1, 0x4808, -1, 0x480a, -1, 0x480e, 0x67",
                ".long 0x4814, 0xc093, 0x4816, 0xa09b, 0x4818, 0xc093, 0x481a, 0xc093, 0x481c, 0xc093",
                ".long 0x481e, 0xc093, 0x4820, 0x10000, 0x4822, 0x8b",
                concat!(".long 0x681a, 0x400, 0x6820, ", $flags),
                $($fields,)?
                ".long 0",
                // L2. What it needs in registers it sets each time: L1 shares all but RSP with it.
                "7:",
                $($before,)*
                $instruction,
                "jmp 7b",
                "5:",
                "jmp *exitbench_nested + 0x2000",
                "6:",
                $after
                $(, $each)?
            ],
            operation: [
                $($load,)?
                "lea 1f(%rip), %rax",
                "mov %rax, exitbench_nested + 0x2000",
                "vmresume",
                "ud2",
                "1:",
                $after
            ]
        );
    };
}

vmx_program!(cpuid, "nested_vmx_cpuid", primary: "0", flags: "2",
    before: [], instruction: "cpuid", after: skip!("2"));
vmx_program!(vmcall, "nested_vmx_vmcall", primary: "0", flags: "2",
    before: [], instruction: "vmcall", after: skip!("3"));
vmx_program!(hlt, "nested_vmx_hlt", primary: "1 << 7", flags: "2",
    before: [], instruction: "hlt", after: skip!("1"));
// Without MSR bitmaps every access exits.
vmx_program!(wrmsr, "nested_vmx_wrmsr", primary: "0", flags: "2",
    before: ["mov $0xc0000102, %ecx"], instruction: "wrmsr", after: skip!("2"));
vmx_program!(pio, "nested_vmx_pio", primary: "1 << 24", flags: "2",
    before: [], instruction: "out %al, $0x80", after: skip!("2"));
vmx_program!(osxsave, "nested_vmx_osxsave", primary: "0", flags: "2",
    l1_cr4: "bts $18, %rax; mov %rax, %cr4; mov $0xd, %eax; xor %ecx, %ecx; cpuid; xor %ecx, %ecx; xor %edx, %edx; xsetbv; mov %cr4, %rax", before: [], instruction: "cpuid", after: skip!("2"));
vmx_program!(seldom, "nested_vmx_seldom", primary: "0", flags: "2",
    before: [], instruction: "cpuid",
    after: concat!(skip!("2"), "; mov $0x6806, %edx; vmread %rdx, %rax; vmwrite %rax, %rdx"));
// The two VMCSs are current in turn. Their L2s differ in the VPID and in the bases of FS and GS.
vmx_program!(two, "nested_vmx_two", primary: "0", flags: "2",
    own: "mov exitbench_nested + 0x2008, %rax; mov $0x680e, %edx; vmwrite %rax, %rdx; mov $0x6810, %edx; vmwrite %rax, %rdx",
    each: "xorl $0x2000, exitbench_nested + 0x2008; incl exitbench_nested + 0x2010; cmpl $3, exitbench_nested + 0x2010; je 2f; sub $32, %rsp; jmp 0b; 2:",
    load: "xorl $0x2000, exitbench_nested + 0x2008; vmptrld exitbench_nested + 0x2008",
    before: [], instruction: "cpuid", after: skip!("2"));
// L2 can take interrupts and L1 waits for that: L2 exits before its first instruction.
vmx_program!(entry, "nested_vmx_entry", primary: "1 << 2", flags: "0x202",
    before: [], instruction: "ud2", after: "nop");
// Readable, writable, executable; a page write-back.
vmx_program!(page_fault, "nested_vmx_page_fault", primary: "0", flags: "2",
    ept: [concat!("mov $7, %esi; mov $0xb7, %edx; ", write_tables!()), "2", ".long 0x201a, exitbench_fresh + 0x1e"],
    before: [], instruction: touch_next!(),
    after: concat!("mov $0x4402, %edx; vmread %rdx, %rax; cmp $48, %eax; je 0f; ud2; 0: ",
        "mov $0x2400, %edx; vmread %rdx, %rax; mov $0x37, %edx; ", map_page!()));

/// The programs, for L1s of this kind.
pub const PROGRAMS: super::Programs = super::Programs {
    cpuid,
    hypercall: vmcall,
    hlt,
    wrmsr,
    pio,
    entry,
    page_fault,
    osxsave,
    seldom,
    two,
};
