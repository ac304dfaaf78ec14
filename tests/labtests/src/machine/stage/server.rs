//! The program of a stage's guest: it does one operation after the other and writes down what came of each.
//! An exception ends an operation like any other result. The same source serves 64-bit and 32-bit guests.
//!
//! RSI points to the operation; RBP is the top of the stack, where the address of the list lies. Bytes of an
//! operation: 0 what, 8 address, 16 value, 24 result, 32 vector with bit 8 set, 40 error code, 48 CR2, 56 flags.

use crate::machine::code::guest_code;
use crate::machine::layout::PROGRAM;

/// Bytes from one vector's entry to the next.
const STUB_BYTES: u64 = 16;
/// The vector by which user mode comes back.
pub const BACK: u8 = 0x80;
/// The vector of a shootdown.
pub const SHOOT: u8 = 0x81;

/// The pieces with the width of a register, `r` or `e`, between them.
macro_rules! w {
    ($r:literal, $first:literal $(, $rest:literal)*) => { concat!($first $(, $r, $rest)*) };
}

macro_rules! server {
    ($name:ident, $user:ident, $bits:literal, $r:literal, $iret:literal, $write64:expr) => {
        guest_code!(
            $name,
            $bits,
            ".set USER_TEXT, 0x30000",
            ".set USER_STACK, 0x31ff0",
            ".set SHOOTDOWN, 0xe100",
            // 32 vectors, then BACK, then SHOOT, then the start.
            ".set vector, 0",
            ".rept 32",
            ".if !(vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21)",
            "push $0",
            ".endif",
            "push $vector",
            "jmp 50f",
            ".balign 16, 0x90",
            ".set vector, vector + 1",
            ".endr",
            "jmp 51f",
            ".balign 16, 0x90",
            "jmp 52f",
            ".balign 16, 0x90",
            // The start, and the loop.
            "60:",
            w!($r, "mov (%", "bp), %", "si"),
            "jmp 62f",
            "61:",
            w!($r, "add $64, %", "si"),
            "62:",
            w!($r, "mov 56(%", "si), %", "ax"),
            w!($r, "push %", "ax"),
            "popf",
            w!($r, "mov (%", "si), %", "ax"),
            w!($r, "mov 8(%", "si), %", "bx"),
            w!($r, "mov 16(%", "si), %", "cx"),
            "cmp $1, %eax; jb 20f; je 21f",
            "cmp $3, %eax; jb 22f; je 23f",
            "cmp $5, %eax; jb 24f; je 25f",
            "cmp $7, %eax; jb 26f; je 27f",
            "cmp $9, %eax; jb 28f; je 29f",
            "cmp $11, %eax; jb 30f; je 31f",
            "cmp $13, %eax; jb 32f; je 33f",
            "cmp $15, %eax; jb 34f; je 35f",
            "cmp $17, %eax; jb 36f; je 37f",
            "cmp $19, %eax; jb 38f; je 39f",
            "cmp $21, %eax; jb 43f; je 44f; jmp 45f",
            "20: out %al, $PORT_DONE",
            "jmp 60b",
            w!($r, "21: mov (%", "bx), %", "ax"),
            w!($r, "40: mov %", "ax, 24(%", "si)"),
            "jmp 61b",
            w!($r, "22: mov %", "cx, (%", "bx)"),
            "jmp 61b",
            w!($r, "23: call *%", "bx"),
            "jmp 40b",
            w!($r, "24: lock xadd %", "cx, (%", "bx)"),
            w!($r, "mov %", "cx, %", "ax"),
            "jmp 40b",
            "25: mov $USER_TEXT, %eax; jmp 41f",
            "26: mov $USER_TEXT + 16, %eax; jmp 41f",
            "27: mov $USER_TEXT + 32, %eax; jmp 41f",
            "28: mov $USER_TEXT + 48, %eax",
            "41:",
            "push $0x3b",
            "push $USER_STACK",
            w!($r, "mov 56(%", "si), %", "dx"),
            w!($r, "push %", "dx"),
            "push $0x33",
            w!($r, "push %", "ax"),
            $iret,
            w!($r, "29: mov %", "cx, %cr0"),
            "jmp 61b",
            w!($r, "30: mov %", "cx, %cr3"),
            "jmp 61b",
            w!($r, "31: mov %", "cx, %cr4"),
            "jmp 61b",
            "32: mov %ecx, %eax",
            "xor %edx, %edx",
            "mov $0xc0000080, %ecx",
            "wrmsr",
            "jmp 61b",
            w!($r, "33: invlpg (%", "bx)"),
            "jmp 61b",
            "34: xor %eax, %eax",
            "cpuid",
            "jmp 61b",
            "35: out %al, $PORT_MARK",
            "jmp 61b",
            "36:",
            $write64,
            "jmp 61b",
            w!($r, "37: pause; cmp %", "cx, (%", "bx)"),
            "jne 37b",
            "jmp 61b",
            // The interrupt command register of the x2APIC.
            "38: mov %ecx, %edx",
            "mov %ebx, %eax",
            "mov $0x830, %ecx",
            "wrmsr",
            "jmp 61b",
            // A page, copied by a string instruction.
            "39:",
            w!($r, "mov %", "bx, %", "di"),
            w!($r, "push %", "si"),
            w!($r, "mov %", "cx, %", "si"),
            "mov $1024, %ecx",
            "cld; rep movsl",
            w!($r, "pop %", "si"),
            "jmp 61b",
            // A page filled with one word.
            "43:",
            w!($r, "mov %", "bx, %", "di"),
            "mov %ecx, %eax",
            "mov $1024, %ecx",
            "cld; rep stosl",
            "jmp 61b",
            // One byte.
            w!($r, "44: mov %cl, (%", "bx)"),
            "jmp 61b",
            // CR4 in PAE paging; see `Stage::switch_cr4`.
            w!($r, "45: andl $~0x20, (%", "bx)"),
            w!($r, "andl $~0x20, 8(%", "bx)"),
            w!($r, "andl $~0x20, 16(%", "bx)"),
            w!($r, "andl $~0x20, 24(%", "bx)"),
            w!($r, "mov %", "cx, %cr4"),
            "jmp 61b",
            // An exception.
            "50:",
            w!($r, "pop %", "ax"),
            w!($r, "pop %", "cx"),
            "or $0x100, %eax",
            w!($r, "mov %", "ax, 32(%", "si)"),
            w!($r, "mov %", "cx, 40(%", "si)"),
            w!($r, "mov %cr2, %", "ax"),
            w!($r, "mov %", "ax, 48(%", "si)"),
            // Where it happened.
            w!($r, "mov (%", "sp), %", "ax"),
            w!($r, "mov %", "ax, 24(%", "si)"),
            w!($r, "mov %", "bp, %", "sp"),
            "jmp 61b",
            // Back from user mode.
            "51:",
            w!($r, "mov %", "bp, %", "sp"),
            "jmp 40b",
            // A shootdown: flushes, says so, and ends the interrupt.
            "52:",
            w!($r, "push %", "ax"),
            w!($r, "push %", "cx"),
            w!($r, "push %", "dx"),
            w!($r, "mov SHOOTDOWN, %", "ax"),
            w!($r, "invlpg (%", "ax)"),
            w!($r, "mov SHOOTDOWN + 16, %", "ax"),
            w!($r, "mov %", "ax, SHOOTDOWN + 8"),
            "mov $0x80b, %ecx",
            "xor %eax, %eax",
            "xor %edx, %edx",
            "wrmsr",
            w!($r, "pop %", "dx"),
            w!($r, "pop %", "cx"),
            w!($r, "pop %", "ax"),
            $iret,
        );
        guest_code!(
            $user,
            $bits,
            w!($r, "mov (%", "bx), %", "ax"),
            "int $0x80",
            ".balign 16, 0x90",
            w!($r, "mov %", "cx, (%", "bx)"),
            "xor %eax, %eax",
            "int $0x80",
            ".balign 16, 0x90",
            w!($r, "call *%", "bx"),
            "int $0x80",
            ".balign 16, 0x90",
            w!($r, "lock xadd %", "cx, (%", "bx)"),
            w!($r, "mov %", "cx, %", "ax"),
            "int $0x80",
        );
    };
}

server!(server64, user64, 64, "r", "iretq", "mov %rcx, (%rbx)");
server!(
    server32,
    user32,
    32,
    "e",
    "iret",
    "mov %ebx, %edi; mov 16(%esi), %ebx; mov 20(%esi), %ecx; mov (%edi), %eax; mov 4(%edi), %edx; \
     42: lock cmpxchg8b (%edi); jne 42b"
);

/// The kernel's code, to be copied to [`PROGRAM`].
pub fn kernel(wide: bool) -> &'static [u8] {
    if wide { server64() } else { server32() }
}

/// User mode's code, to be copied to [`USER_TEXT`].
pub fn user(wide: bool) -> &'static [u8] {
    if wide { user64() } else { user32() }
}

/// Where the handler of `vector` begins, if it has one.
pub fn entry(vector: u8) -> Option<u64> {
    let index = match vector {
        0..32 => vector.into(),
        BACK => 32,
        SHOOT => 33,
        _ => return None,
    };
    Some(PROGRAM + index * STUB_BYTES)
}

/// Where the program begins.
pub const START: u64 = PROGRAM + 34 * STUB_BYTES;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::stage::layout::{SHOOTDOWN, USER_STACK, USER_TEXT};

    #[test]
    fn the_assembler_knows_the_layouts_addresses() {
        assert_eq!((USER_TEXT, USER_STACK, SHOOTDOWN), (0x3_0000, 0x3_1ff0, 0xe100));
    }

    #[test]
    fn the_stubs_keep_their_distance() {
        for wide in [false, true] {
            assert_eq!(kernel(wide)[..4], [0x6a, 0, 0x6a, 0]);
            assert_eq!(kernel(wide)[14 * 16..][..2], [0x6a, 14]);
        }
    }
}
