//! The common measuring frame around an operation, and the guest programs made from it.
//!
//! A program is position-independent 64-bit code that is copied into guest memory. It measures in
//! two passes. The first brackets each operation with the time stamp counter and stores the
//! difference. The second runs the operation alone, in a bare loop between two marker
//! instructions, so that an emulator can count what happens in between. Two writes to a port before
//! the first marker and one after the second have the VMM read the module's own statistics: what one
//! such write adds to them is known from the first two, and taken off.
//!
//! | register | at entry |
//! |---|---|
//! | r12 | where the next sample goes |
//! | r13 | operations of the first pass |
//! | r15 | operations of the second pass; none and no markers if 0 |
//! | rbp | this vCPU's mailbox |
//! | rbx | the workload's argument; of a paged workload the first page |
//! | r8, r9, r10 | of a paged workload: pages to touch after each switch, bytes from one to the next, pages mapped |
//!
//! r14 holds the time stamp meanwhile. An operation leaves r12 to r15, rsp and rbp alone and may use
//! every other register; rbx is its own.

/// Machine code of a measuring guest.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The code. vCPU 0 starts at its first byte.
    pub code: &'static [u8],
    /// Where vCPU 1 starts, from the first byte.
    pub secondary: u64,
}

/// `nopl 0x01544e47(%rax)`: tells an emulator to start counting.
#[cfg(test)]
pub const START_MARKER: [u8; 7] = [0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x01];
/// `nopl 0x02544e47(%rax)`: tells an emulator to stop counting.
#[cfg(test)]
pub const STOP_MARKER: [u8; 7] = [0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x02];

impl Program {
    /// A program between two symbols that [`guest_program!`] defined.
    ///
    /// # Safety
    /// All three addresses lie in one piece of read-only data, in the order `start`, `secondary`,
    /// `end`.
    pub unsafe fn between(start: *const u8, secondary: *const u8, end: *const u8) -> Self {
        let length = end.addr() - start.addr();
        // SAFETY: the caller vouches for the piece between the two.
        let code = unsafe { std::slice::from_raw_parts(start, length) };
        Self { code, secondary: (secondary.addr() - start.addr()) as u64 }
    }
}

/// Defines `fn $function() -> Program` with this setup, run once, this operation, run in both
/// passes, and what vCPU 1 does, if there is one. Assembly in AT&T syntax, with local labels 0 to 7
/// and `exitbench_vector` for the workload's interrupt.
macro_rules! guest_program {
    ($function:ident, $name:literal, setup: [$($setup:expr),*], operation: [$($operation:expr),*]) => {
        guest_program!($function, $name, setup: [$($setup),*], operation: [$($operation),*],
            secondary: ["cli", "hlt"]);
    };
    ($function:ident, $name:literal, setup: [$($setup:expr),*], operation: [$($operation:expr),*],
     secondary: [$($secondary:expr),*]) => {
        core::arch::global_asm!(
            ".pushsection .rodata.guest_programs, \"a\"",
            ".set exitbench_vector, {vector}",
            ".set exitbench_root, {root}",
            ".set exitbench_nested, {nested}",
            ".set exitbench_second_root, {second_root}",
            ".set exitbench_fresh, {fresh}",
            concat!("exitbench_", $name, "_start:"),
            $($setup,)*
            ".balign 64, 0x90",
            // First pass: one sample per operation.
            "8:",
            "lfence",
            "rdtsc",
            "shl $32, %rdx",
            "or %rdx, %rax",
            "mov %rax, %r14",
            $($operation,)*
            "lfence",
            "rdtsc",
            "shl $32, %rdx",
            "or %rdx, %rax",
            "sub %r14, %rax",
            "mov %rax, (%r12)",
            "add $8, %r12",
            "dec %r13",
            "jnz 8b",
            // Second pass: the operation alone, between the markers.
            "test %r15, %r15",
            "jz 9f",
            "out %al, ${count}",
            "out %al, ${count}",
            ".byte 0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x01",
            "8:",
            $($operation,)*
            "dec %r15",
            "jnz 8b",
            ".byte 0x0f, 0x1f, 0x80, 0x47, 0x4e, 0x54, 0x02",
            "out %al, ${count}",
            "9:",
            "cli",
            "out %al, ${done}",
            "8: hlt",
            "jmp 8b",
            concat!("exitbench_", $name, "_secondary:"),
            $($secondary,)*
            concat!("exitbench_", $name, "_end:"),
            ".popsection",
            vector = const crate::bench::layout::VECTOR,
            root = const crate::bench::layout::ROOT,
            nested = const crate::bench::layout::NESTED,
            second_root = const crate::bench::layout::SECOND_ROOT,
            fresh = const crate::bench::layout::FRESH_MEMORY,
            done = const crate::bench::layout::PORT_DONE,
            count = const crate::bench::layout::PORT_COUNT,
            options(att_syntax),
        );

        /// The guest program of this workload.
        fn $function() -> crate::bench::program::Program {
            unsafe extern "C" {
                #[link_name = concat!("exitbench_", $name, "_start")]
                static START: u8;
                #[link_name = concat!("exitbench_", $name, "_secondary")]
                static SECONDARY: u8;
                #[link_name = concat!("exitbench_", $name, "_end")]
                static END: u8;
            }
            // SAFETY: the three symbols delimit the assembly above, in this order.
            unsafe {
                crate::bench::program::Program::between(
                    &raw const START,
                    &raw const SECONDARY,
                    &raw const END,
                )
            }
        }
    };
}
pub(crate) use guest_program;
