//! The interrupt handlers of the measuring guests, and the local APIC in its two modes.
//!
//! A workload's own vector counts itself in the vCPU's mailbox, acknowledges and returns. Every
//! other vector tells the VMM its number and ends the run: a guest of ours never faults by intent.

use super::layout::{INTERRUPTS, PORT_FAULT, VECTOR};
use super::program::Program;

/// How the guest speaks to its local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApicMode {
    /// By memory at 0xfee00000 (SDM vol. 3A §10.4).
    Xapic,
    /// By MSRs from 0x800 (SDM vol. 3A §10.12).
    X2apic,
}

/// Bytes from one stub to the next.
const STUB_BYTES: u64 = 16;
/// The two acknowledging handlers stand before the 256 stubs, one stub's place and two.
const STUBS: u64 = 64;

core::arch::global_asm!(
    ".pushsection .rodata.guest_programs, \"a\"",
    "exitbench_interrupts_start:",
    // xAPIC: count, acknowledge, return.
    "incq (%rbp)",
    "push %rax",
    "mov $0xfee000b0, %eax",
    "movl $0, (%rax)",
    "pop %rax",
    "iretq",
    ".balign 32, 0x90",
    // x2APIC: the same by MSR.
    "exitbench_interrupts_x2apic:",
    "incq (%rbp)",
    "push %rax",
    "push %rcx",
    "push %rdx",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "iretq",
    ".balign 64, 0x90",
    // One stub per vector: its number to the VMM. RAX is lost; nobody returns from here.
    ".set exitbench_stub, 0",
    ".rept 256",
    ".balign 16, 0x90",
    "mov $exitbench_stub, %al",
    "out %al, ${fault}",
    "0: hlt",
    "jmp 0b",
    ".set exitbench_stub, exitbench_stub + 1",
    ".endr",
    ".balign 16, 0x90",
    "exitbench_interrupts_end:",
    ".popsection",
    fault = const PORT_FAULT,
    options(att_syntax),
);

/// The code of all handlers, to be copied to [`INTERRUPTS`].
pub fn handlers() -> &'static [u8] {
    unsafe extern "C" {
        #[link_name = "exitbench_interrupts_start"]
        static START: u8;
        #[link_name = "exitbench_interrupts_x2apic"]
        static X2APIC: u8;
        #[link_name = "exitbench_interrupts_end"]
        static END: u8;
    }
    // SAFETY: the three symbols delimit the assembly above, in this order.
    let handlers = unsafe { Program::between(&raw const START, &raw const X2APIC, &raw const END) };
    handlers.code
}

/// The guest-physical address of the handler of `vector`.
pub fn handler(vector: u8, mode: ApicMode) -> u64 {
    match mode {
        _ if vector != VECTOR => INTERRUPTS + STUBS + u64::from(vector) * STUB_BYTES,
        ApicMode::Xapic => INTERRUPTS,
        ApicMode::X2apic => INTERRUPTS + 32,
    }
}

/// The mnemonic of an exception, for messages (SDM vol. 3A §6.3.1).
pub fn exception_name(vector: u8) -> &'static str {
    const NAMES: [&str; 22] = [
        "#DE", "#DB", "NMI", "#BP", "#OF", "#BR", "#UD", "#NM", "#DF", "reserved", "#TS", "#NP",
        "#SS", "#GP", "#PF", "reserved", "#MF", "#AC", "#MC", "#XM", "#VE", "#CP",
    ];
    NAMES.get(usize::from(vector)).unwrap_or(&"interrupt")
}

/// Enables the local APIC in xAPIC mode: software-enable with spurious vector 0xff.
macro_rules! xapic_enable {
    () => {
        "mov $0xfee000f0, %eax; movl $0x1ff, (%rax)"
    };
}

/// Switches to x2APIC mode, then enables as above.
macro_rules! x2apic_enable {
    () => {
        "mov $0x1b, %ecx; rdmsr; or $0xc00, %eax; wrmsr; \
         mov $0x80f, %ecx; mov $0x1ff, %eax; xor %edx, %edx; wrmsr"
    };
}
pub(crate) use {x2apic_enable, xapic_enable};

#[cfg(test)]
mod tests {
    use super::*;

    fn byte_at(address: u64, offset: u64) -> u8 {
        handlers()[(address - INTERRUPTS + offset) as usize]
    }

    #[test]
    fn every_stub_reports_its_own_vector() {
        for vector in (0..=255_u8).filter(|&vector| vector != VECTOR) {
            let stub = handler(vector, ApicMode::Xapic);
            assert_eq!(byte_at(stub, 0), 0xb0, "mov imm8 to al");
            assert_eq!(byte_at(stub, 1), vector);
            assert_eq!(byte_at(stub, 2), 0xe6, "out al to imm8");
            assert_eq!(u16::from(byte_at(stub, 3)), PORT_FAULT);
        }
    }

    #[test]
    fn both_acknowledging_handlers_start_by_counting() {
        for mode in [ApicMode::Xapic, ApicMode::X2apic] {
            let start = handler(VECTOR, mode);
            let bytes: Vec<u8> = (0..4).map(|offset| byte_at(start, offset)).collect();
            assert_eq!(bytes, [0x48, 0xff, 0x45, 0x00], "incq (%rbp)");
        }
    }

    #[test]
    fn the_handlers_end_before_the_program() {
        assert!(INTERRUPTS + handlers().len() as u64 <= super::super::layout::PROGRAM);
    }

    #[test]
    fn exceptions_have_their_mnemonics() {
        assert_eq!(exception_name(13), "#GP");
        assert_eq!(exception_name(14), "#PF");
        assert_eq!(exception_name(200), "interrupt");
    }
}
