//! Machine code of guests, written where it is used: `guest_code!(name, 64, "…", …)` defines
//! `fn name() -> &'static [u8]`. AT&T syntax; the labels 7, 8 and 9 belong to the macros here.
//!
//! The code is copied into a guest, so it has to be position-independent but for the addresses of
//! `layout.rs`, which the assembler knows by their names.

/// Defines a function that gives the machine code of these lines, for a CPU of so many bits.
macro_rules! guest_code {
    ($name:ident, $bits:literal, $($line:expr),+ $(,)?) => {
        core::arch::global_asm!(
            ".pushsection .rodata.guest_code, \"a\"",
            ".balign 64, 0x90",
            concat!(".code", $bits),
            ".set PORT_DONE, 0xf4",
            ".set PORT_FAULT, 0xf5",
            ".set PORT_MARK, 0xf6",
            ".set NOWHERE, 0xd0000000",
            ".set RESUME, 0xe000",
            ".set FAULTS, 0xe008",
            ".set VECTOR, 0xe010",
            ".set ERROR, 0xe018",
            ".set FRAME_RIP, 0xe020",
            ".set FRAME_CR2, 0xe028",
            ".set FRAME_DR6, 0xe030",
            ".set EOI_MODE, 0xe038",
            ".set ARGUMENT, 0xe040",
            ".set DUPLICATES, 0xe080",
            ".set RESULT, 0xe100",
            ".set COUNTS, 0xe800",
            ".set HOOKS, 0xf000",
            ".set FREE, 0x20000",
            concat!("labtests_", stringify!($name), "_", line!(), "_start:"),
            $($line,)+
            concat!("labtests_", stringify!($name), "_", line!(), "_end:"),
            ".code64",
            ".popsection",
            options(att_syntax),
        );

        /// Machine code.
        fn $name() -> &'static [u8] {
            unsafe extern "C" {
                #[link_name = concat!("labtests_", stringify!($name), "_", line!(), "_start")]
                static START: u8;
                #[link_name = concat!("labtests_", stringify!($name), "_", line!(), "_end")]
                static END: u8;
            }
            let (start, end) = (&raw const START, &raw const END);
            // SAFETY: the two symbols delimit the read-only data above.
            unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
        }
    };
}

/// The guest has ended well.
macro_rules! done {
    () => {
        "out %al, $PORT_DONE; 9: hlt; jmp 9b"
    };
}

/// Runs an instruction that may raise an exception, which then continues behind it.
macro_rules! guarded {
    ($instruction:literal) => {
        concat!(
            "push %rax; lea 7f(%rip), %rax; mov %rax, RESUME; pop %rax; ",
            $instruction,
            "; 7: movq $0, RESUME"
        )
    };
}

/// Enables the local APIC in x2APIC mode, and tells the handlers.
macro_rules! x2apic {
    () => {
        "mov $0x1b, %ecx; rdmsr; or $0xc00, %eax; wrmsr; movq $2, EOI_MODE; \
         mov $0x80f, %ecx; mov $0x1ff, %eax; xor %edx, %edx; wrmsr"
    };
}

/// Enables the local APIC in xAPIC mode, and tells the handlers.
macro_rules! xapic {
    () => {
        "movq $1, EOI_MODE; mov $0xfee000f0, %eax; movl $0x1ff, (%rax)"
    };
}

pub(crate) use {done, guarded, guest_code, x2apic, xapic};
