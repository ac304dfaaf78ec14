//! The handlers of a 64-bit guest's vectors. Each counts itself; then a hook of the test's own takes
//! over, if there is one. Otherwise an exception is written down and continues where the guest said,
//! an NMI returns, and an interrupt is acknowledged and returns.
//!
//! QEMU 10's emulated CPU, asked by EVENTINJ for an interrupt, delivers it twice when it is itself
//! interrupted before the next VMEXIT: the number stays behind in `exception_index`. The copy runs
//! inside of the original, so of the two the second to look no longer finds its bit in service; it
//! counts as a duplicate only.

use super::code::guest_code;
use super::layout::HANDLERS;

/// Bytes from one vector's entry to the next.
const STUB_BYTES: u64 = 16;

guest_code!(
    handlers,
    64,
    ".set vector, 0",
    ".rept 256",
    // #DF, #TS, #NP, #SS, #GP, #PF, #AC and #CP bring an error code.
    ".if !(vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21)",
    "push $0",
    ".endif",
    ".if vector < 128",
    "push $vector",
    ".else",
    "push $vector - 256",
    ".endif",
    "jmp 1f",
    ".balign 16, 0x90",
    ".set vector, vector + 1",
    ".endr",
    // rdx, rcx, rax, vector, error code, rip, cs, rflags, rsp, ss
    "1:",
    "push %rax",
    "push %rcx",
    "push %rdx",
    "movzbl 24(%rsp), %eax",
    // An interrupt that is not in service is one too many.
    "cmp $32, %eax",
    "jb 8f",
    "mov EOI_MODE, %rcx",
    "cmp $1, %ecx",
    "jb 8f",
    "mov %eax, %ecx",
    "ja 7f",
    "shr $5, %ecx",
    "shl $4, %ecx",
    "mov $0xfee00100, %edx",
    "mov (%rdx,%rcx), %edx",
    "jmp 6f",
    "7:",
    "push %rax",
    "shr $5, %ecx",
    "add $0x810, %ecx",
    "rdmsr",
    "mov %eax, %edx",
    "pop %rax",
    "6:",
    "bt %eax, %edx",
    "jc 8f",
    "lock incq DUPLICATES",
    "jmp 5f",
    "8:",
    "lock incq COUNTS(,%rax,8)",
    "mov HOOKS(,%rax,8), %rcx",
    "test %rcx, %rcx",
    "jz 2f",
    "jmp *%rcx",
    "2:",
    "cmp $32, %eax",
    "jae 4f",
    "cmp $2, %eax",
    "je 5f",
    "incq FAULTS",
    "mov %rax, VECTOR",
    "mov 32(%rsp), %rcx",
    "mov %rcx, ERROR",
    "mov 40(%rsp), %rcx",
    "mov %rcx, FRAME_RIP",
    "mov %cr2, %rcx",
    "mov %rcx, FRAME_CR2",
    "cmp $1, %eax",
    "jne 3f",
    "mov %dr6, %rcx",
    "mov %rcx, FRAME_DR6",
    "3:",
    "mov RESUME, %rcx",
    "mov %rcx, 40(%rsp)",
    "movq $0, RESUME",
    "test %rcx, %rcx",
    "jnz 5f",
    "8: out %al, $PORT_FAULT",
    "hlt",
    "jmp 8b",
    "4:",
    "mov EOI_MODE, %rcx",
    "cmp $1, %ecx",
    "jb 5f",
    "ja 6f",
    "mov $0xfee000b0, %ecx",
    "movl $0, (%rcx)",
    "jmp 5f",
    "6:",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "5:",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

/// The code of all handlers, to be copied to [`HANDLERS`].
pub fn code() -> &'static [u8] {
    handlers()
}

/// Where the handler of `vector` begins.
pub fn entry(vector: u8) -> u64 {
    HANDLERS + u64::from(vector) * STUB_BYTES
}

/// The mnemonic of an exception, for messages (SDM vol. 3A §6.3.1).
pub fn exception_name(vector: u64) -> &'static str {
    const NAMES: [&str; 22] = [
        "#DE", "#DB", "NMI", "#BP", "#OF", "#BR", "#UD", "#NM", "#DF", "reserved", "#TS", "#NP",
        "#SS", "#GP", "#PF", "reserved", "#MF", "#AC", "#MC", "#XM", "#VE", "#CP",
    ];
    NAMES.get(vector as usize).unwrap_or(&"interrupt")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::layout::MAILBOX;

    #[test]
    fn the_handlers_end_before_the_mailbox() {
        assert!(HANDLERS + code().len() as u64 <= MAILBOX);
    }

    #[test]
    fn entries_push_their_vector_and_keep_their_distance() {
        // push $0; push $vector; with an error code from the CPU only the second.
        assert_eq!(code()[..4], [0x6a, 0, 0x6a, 0]);
        assert_eq!(code()[14 * 16..][..2], [0x6a, 14]);
        assert_eq!(code()[64 * 16..][..4], [0x6a, 0, 0x6a, 64]);
        // 0xec, sign-extended.
        assert_eq!(code()[0xec * 16..][..4], [0x6a, 0, 0x6a, 0xec]);
    }
}
