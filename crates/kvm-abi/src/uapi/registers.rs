//! Registers as KVM_GET/SET_REGS, SREGS, SREGS2, FPU, DEBUGREGS, XSAVE and XCRS carry them (KVM API
//! §4.11–4.14, §4.42–4.47).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

uapi! {
    /// General registers (KVM_GET_REGS, KVM_SET_REGS).
    struct KvmRegs {
        rax: u64, rbx: u64, rcx: u64, rdx: u64,
        rsi: u64, rdi: u64, rsp: u64, rbp: u64,
        r8: u64, r9: u64, r10: u64, r11: u64,
        r12: u64, r13: u64, r14: u64, r15: u64,
        rip: u64,
        rflags: u64,
    }

    /// One segment register with its hidden part. `type_` is the C field `type`.
    struct KvmSegment {
        base: u64,
        limit: u32,
        selector: u16,
        type_: u8,
        present: u8,
        dpl: u8,
        db: u8,
        s: u8,
        l: u8,
        g: u8,
        avl: u8,
        unusable: u8,
        padding: u8,
    }

    /// GDTR or IDTR.
    struct KvmDtable {
        base: u64,
        limit: u16,
        padding: [u16; 3],
    }

    /// System registers (KVM_GET_SREGS, KVM_SET_SREGS). At most one bit of `interrupt_bitmap` is
    /// set: the vector being injected.
    struct KvmSregs {
        cs: KvmSegment, ds: KvmSegment, es: KvmSegment,
        fs: KvmSegment, gs: KvmSegment, ss: KvmSegment,
        tr: KvmSegment, ldt: KvmSegment,
        gdt: KvmDtable, idt: KvmDtable,
        cr0: u64, cr2: u64, cr3: u64, cr4: u64, cr8: u64,
        efer: u64,
        apic_base: u64,
        interrupt_bitmap: [u64; 4],
    }

    /// System registers with PDPTRs in place of the interrupt bitmap (KVM_GET_SREGS2,
    /// KVM_SET_SREGS2).
    struct KvmSregs2 {
        cs: KvmSegment, ds: KvmSegment, es: KvmSegment,
        fs: KvmSegment, gs: KvmSegment, ss: KvmSegment,
        tr: KvmSegment, ldt: KvmSegment,
        gdt: KvmDtable, idt: KvmDtable,
        cr0: u64, cr2: u64, cr3: u64, cr4: u64, cr8: u64,
        efer: u64,
        apic_base: u64,
        flags: u64,
        pdptrs: [u64; 4],
    }

    /// Legacy FPU and SSE state (KVM_GET_FPU, KVM_SET_FPU).
    struct KvmFpu {
        fpr: [[u8; 16]; 8],
        fcw: u16,
        fsw: u16,
        ftwx: u8,
        pad1: u8,
        last_opcode: u16,
        last_ip: u64,
        last_dp: u64,
        xmm: [[u8; 16]; 16],
        // Never filled in, see convert::fpu().
        mxcsr: u32,
        pad2: u32,
    }

    /// Debug registers (KVM_GET_DEBUGREGS, KVM_SET_DEBUGREGS).
    struct KvmDebugregs {
        db: [u64; 4],
        dr6: u64,
        dr7: u64,
        flags: u64,
        reserved: [u64; 9],
    }

    /// One extended control register.
    struct KvmXcr {
        xcr: u32,
        reserved: u32,
        value: u64,
    }

    /// Extended control registers (KVM_GET_XCRS, KVM_SET_XCRS).
    struct KvmXcrs {
        nr_xcrs: u32,
        flags: u32,
        xcrs: [KvmXcr; MAX_XCRS],
        // Room for components that never came; all of it is zeros.
        padding: [u64; 16],
    }

    /// Answer of KVM_TRANSLATE.
    struct KvmTranslation {
        linear_address: u64,
        physical_address: u64,
        valid: u8,
        writeable: u8,
        usermode: u8,
        pad: [u8; 5],
    }
}

// Not by the macro, whose types are Copy: 4 KiB would soon lie on a stack.
/// The first 4 KiB of an XSAVE area in standard format (KVM_GET_XSAVE, KVM_SET_XSAVE).
/// KVM_GET_XSAVE2 may carry more behind it.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct KvmXsave {
    pub region: [u32; 1024],
}

/// Slots in [`KvmXcrs`].
pub const MAX_XCRS: usize = 16;
/// [`KvmSregs2::flags`]: `pdptrs` holds the PDPTRs.
pub const SREGS2_FLAGS_PDPTRS_VALID: u64 = 1;
