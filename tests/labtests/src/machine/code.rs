//! Machine code of guests, written where it is used: `guest_code!(name, 64, "…", …)` defines
//! `fn name() -> &'static [u8]`. AT&T syntax; the labels 7, 8 and 9 belong to the macros here.
//!
//! The code is copied into a guest, so it has to be position-independent but for the addresses of
//! `layout.rs`, which the assembler knows by the same names.
//!
//! A loop that does not end by itself has a PAUSE in it, or interrupts enabled: the lab's emulated Intel
//! CPU does not leave a guest whose interrupts are disabled when the host's timer asks for it, and only
//! PAUSE-loop exits let the host go on.

/// Defines a function that gives the machine code of these lines, for a CPU of so many bits.
macro_rules! guest_code {
    ($name:ident, $bits:literal, $($line:expr),+ $(,)?) => {
        core::arch::global_asm!(
            ".pushsection .rodata.guest_code, \"a\"",
            ".balign 64, 0x90",
            concat!(".code", $bits),
            ".set PORT_DONE, {port_done}",
            ".set PORT_FAULT, {port_fault}",
            ".set PORT_MARK, {port_mark}",
            ".set NOWHERE, {nowhere}",
            ".set RESUME, {resume}",
            ".set FAULTS, {faults}",
            ".set VECTOR, {vector}",
            ".set ERROR, {error}",
            ".set FRAME_RIP, {frame_rip}",
            ".set FRAME_CR2, {frame_cr2}",
            ".set FRAME_DR6, {frame_dr6}",
            ".set EOI_MODE, {eoi_mode}",
            ".set ARGUMENT, {argument}",
            ".set IS_INTEL, {is_intel}",
            ".set DUPLICATES, {duplicates}",
            ".set RESULT, {result}",
            ".set COUNTS, {counts}",
            ".set HOOKS, {hooks}",
            ".set FREE, {free}",
            concat!("labtests_", stringify!($name), "_", line!(), "_start:"),
            $($line,)+
            concat!("labtests_", stringify!($name), "_", line!(), "_end:"),
            ".code64",
            ".popsection",
            port_done = const crate::machine::layout::PORT_DONE,
            port_fault = const crate::machine::layout::PORT_FAULT,
            port_mark = const crate::machine::layout::PORT_MARK,
            nowhere = const crate::machine::layout::NOWHERE,
            resume = const crate::machine::layout::RESUME,
            faults = const crate::machine::layout::FAULTS,
            vector = const crate::machine::layout::VECTOR,
            error = const crate::machine::layout::ERROR,
            frame_rip = const crate::machine::layout::FRAME_RIP,
            frame_cr2 = const crate::machine::layout::FRAME_CR2,
            frame_dr6 = const crate::machine::layout::FRAME_DR6,
            eoi_mode = const crate::machine::layout::EOI_MODE,
            argument = const crate::machine::layout::ARGUMENT,
            is_intel = const crate::machine::layout::IS_INTEL,
            duplicates = const crate::machine::layout::DUPLICATES,
            result = const crate::machine::layout::RESULT,
            counts = const crate::machine::layout::COUNTS,
            hooks = const crate::machine::layout::HOOKS,
            free = const crate::machine::layout::FREE,
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

/// The hypercall of this CPU's maker. Nothing but the flags is lost on the way.
macro_rules! hypercall {
    () => {
        "cmpq $0, IS_INTEL; jne 7f; vmmcall; jmp 8f; 7: vmcall; 8:"
    };
}

/// The hypercall of the other maker. Nothing but the flags is lost on the way.
macro_rules! foreign_hypercall {
    () => {
        "cmpq $0, IS_INTEL; je 7f; vmmcall; jmp 8f; 7: vmcall; 8:"
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

pub(crate) use {done, foreign_hypercall, guarded, guest_code, hypercall, x2apic, xapic};
