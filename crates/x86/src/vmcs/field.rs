//! The fields. A field's width and access are in its type, so that a 16-bit field cannot take 64
//! bits and a read-only one cannot be written.
//!
//! SDM vol. 3C appendix B; §25.11.2 gives the encoding's own structure, which every constant here
//! is checked against when it is compiled.
#![allow(missing_docs)] // Named as in the manual, where each is explained.

use core::marker::PhantomData;

/// How wide a field is.
pub trait Width {
    /// What it holds.
    type Value: Copy + PartialEq + Into<u64>;
    /// Bits 14:13 of the encoding.
    const CODE: u32;
    /// From what VMREAD gives.
    fn from_raw(raw: u64) -> Self::Value;
}

impl Width for u16 {
    type Value = Self;
    const CODE: u32 = 0;
    #[inline]
    fn from_raw(raw: u64) -> Self {
        raw as Self
    }
}

impl Width for u64 {
    type Value = Self;
    const CODE: u32 = 1;
    #[inline]
    fn from_raw(raw: u64) -> Self {
        raw
    }
}

impl Width for u32 {
    type Value = Self;
    const CODE: u32 = 2;
    #[inline]
    fn from_raw(raw: u64) -> Self {
        raw as Self
    }
}

/// As wide as the processor's registers: 64 bits here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Natural;

impl Width for Natural {
    type Value = u64;
    const CODE: u32 = 3;
    #[inline]
    fn from_raw(raw: u64) -> u64 {
        raw
    }
}

/// May be read only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOnly;

/// May be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadWrite;

/// What may be done with a field.
pub trait Access {
    /// Whether it lies in the read-only data area.
    const READ_ONLY: bool;
}

impl Access for ReadOnly {
    const READ_ONLY: bool = true;
}

impl Access for ReadWrite {
    const READ_ONLY: bool = false;
}

/// A field of width `W`.
#[derive(Debug)]
pub struct Field<W, A>(u32, PhantomData<(W, A)>);

impl<W, A> Clone for Field<W, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W, A> Copy for Field<W, A> {}

impl<W: Width, A: Access> Field<W, A> {
    const fn new(encoding: u32) -> Self {
        // Bits 14:13 are the width, bits 11:10 the kind: 1 is read-only data.
        assert!((encoding >> 13) & 3 == W::CODE);
        assert!(((encoding >> 10) & 3 == 1) == A::READ_ONLY);
        assert!(encoding & 1 == 0 && encoding >> 15 == 0);
        Self(encoding, PhantomData)
    }
}

impl<W, A> Field<W, A> {
    /// What VMREAD and VMWRITE take.
    #[inline]
    pub const fn encoding(self) -> u32 {
        self.0
    }
}

macro_rules! fields {
    ($($access:ident $width:ty: $($name:ident = $encoding:literal),* $(,)?;)*) => {
        $($(pub const $name: Field<$width, $access> = Field::new($encoding);)*)*

        /// Every field with its name, for dumps.
        pub const ALL: &[(&str, u32)] = &[$($((stringify!($name), $encoding)),*),*];
    };
}

fields! {
    ReadWrite u16:
        VPID = 0x0000, POSTED_INTR_VECTOR = 0x0002, EPTP_INDEX = 0x0004,
        GUEST_ES_SELECTOR = 0x0800, GUEST_CS_SELECTOR = 0x0802, GUEST_SS_SELECTOR = 0x0804,
        GUEST_DS_SELECTOR = 0x0806, GUEST_FS_SELECTOR = 0x0808, GUEST_GS_SELECTOR = 0x080a,
        GUEST_LDTR_SELECTOR = 0x080c, GUEST_TR_SELECTOR = 0x080e,
        GUEST_INTERRUPT_STATUS = 0x0810, PML_INDEX = 0x0812,
        HOST_ES_SELECTOR = 0x0c00, HOST_CS_SELECTOR = 0x0c02, HOST_SS_SELECTOR = 0x0c04,
        HOST_DS_SELECTOR = 0x0c06, HOST_FS_SELECTOR = 0x0c08, HOST_GS_SELECTOR = 0x0c0a,
        HOST_TR_SELECTOR = 0x0c0c;
    ReadWrite u64:
        IO_BITMAP_A = 0x2000, IO_BITMAP_B = 0x2002, MSR_BITMAP = 0x2004,
        EXIT_MSR_STORE_ADDR = 0x2006, EXIT_MSR_LOAD_ADDR = 0x2008, ENTRY_MSR_LOAD_ADDR = 0x200a,
        EXECUTIVE_VMCS = 0x200c, PML_ADDRESS = 0x200e, TSC_OFFSET = 0x2010,
        VIRTUAL_APIC_ADDR = 0x2012, APIC_ACCESS_ADDR = 0x2014, POSTED_INTR_DESC = 0x2016,
        VM_FUNCTION_CONTROLS = 0x2018, EPT_POINTER = 0x201a, EOI_EXIT_0 = 0x201c,
        EOI_EXIT_1 = 0x201e, EOI_EXIT_2 = 0x2020, EOI_EXIT_3 = 0x2022, EPTP_LIST = 0x2024,
        VMREAD_BITMAP = 0x2026, VMWRITE_BITMAP = 0x2028, VE_INFO_ADDR = 0x202a,
        XSS_EXIT_BITMAP = 0x202c, ENCLS_EXIT_BITMAP = 0x202e, TSC_MULTIPLIER = 0x2032,
        VMCS_LINK = 0x2800, GUEST_DEBUGCTL = 0x2802, GUEST_PAT = 0x2804, GUEST_EFER = 0x2806,
        GUEST_PERF_GLOBAL_CTRL = 0x2808, GUEST_PDPTE0 = 0x280a, GUEST_PDPTE1 = 0x280c,
        GUEST_PDPTE2 = 0x280e, GUEST_PDPTE3 = 0x2810, GUEST_BNDCFGS = 0x2812,
        HOST_PAT = 0x2c00, HOST_EFER = 0x2c02, HOST_PERF_GLOBAL_CTRL = 0x2c04;
    ReadOnly u64:
        GUEST_PHYSICAL_ADDRESS = 0x2400;
    ReadWrite u32:
        PIN_CONTROLS = 0x4000, PROC_CONTROLS = 0x4002, EXCEPTION_BITMAP = 0x4004,
        PAGE_FAULT_MASK = 0x4006, PAGE_FAULT_MATCH = 0x4008, CR3_TARGET_COUNT = 0x400a,
        EXIT_CONTROLS = 0x400c, EXIT_MSR_STORE_COUNT = 0x400e, EXIT_MSR_LOAD_COUNT = 0x4010,
        ENTRY_CONTROLS = 0x4012, ENTRY_MSR_LOAD_COUNT = 0x4014, ENTRY_INTERRUPTION = 0x4016,
        ENTRY_ERROR_CODE = 0x4018, ENTRY_INSTRUCTION_LENGTH = 0x401a, TPR_THRESHOLD = 0x401c,
        PROC_CONTROLS2 = 0x401e, PLE_GAP = 0x4020, PLE_WINDOW = 0x4022,
        GUEST_ES_LIMIT = 0x4800, GUEST_CS_LIMIT = 0x4802, GUEST_SS_LIMIT = 0x4804,
        GUEST_DS_LIMIT = 0x4806, GUEST_FS_LIMIT = 0x4808, GUEST_GS_LIMIT = 0x480a,
        GUEST_LDTR_LIMIT = 0x480c, GUEST_TR_LIMIT = 0x480e, GUEST_GDTR_LIMIT = 0x4810,
        GUEST_IDTR_LIMIT = 0x4812, GUEST_ES_RIGHTS = 0x4814, GUEST_CS_RIGHTS = 0x4816,
        GUEST_SS_RIGHTS = 0x4818, GUEST_DS_RIGHTS = 0x481a, GUEST_FS_RIGHTS = 0x481c,
        GUEST_GS_RIGHTS = 0x481e, GUEST_LDTR_RIGHTS = 0x4820, GUEST_TR_RIGHTS = 0x4822,
        GUEST_INTERRUPTIBILITY = 0x4824, GUEST_ACTIVITY = 0x4826, GUEST_SMBASE = 0x4828,
        GUEST_SYSENTER_CS = 0x482a, PREEMPTION_TIMER = 0x482e, HOST_SYSENTER_CS = 0x4c00;
    ReadOnly u32:
        INSTRUCTION_ERROR = 0x4400, EXIT_REASON = 0x4402, EXIT_INTERRUPTION = 0x4404,
        EXIT_ERROR_CODE = 0x4406, IDT_VECTORING = 0x4408, IDT_VECTORING_ERROR = 0x440a,
        INSTRUCTION_LENGTH = 0x440c, INSTRUCTION_INFO = 0x440e;
    ReadWrite Natural:
        CR0_MASK = 0x6000, CR4_MASK = 0x6002, CR0_SHADOW = 0x6004, CR4_SHADOW = 0x6006,
        CR3_TARGET0 = 0x6008, CR3_TARGET1 = 0x600a, CR3_TARGET2 = 0x600c, CR3_TARGET3 = 0x600e,
        GUEST_CR0 = 0x6800, GUEST_CR3 = 0x6802, GUEST_CR4 = 0x6804, GUEST_ES_BASE = 0x6806,
        GUEST_CS_BASE = 0x6808, GUEST_SS_BASE = 0x680a, GUEST_DS_BASE = 0x680c,
        GUEST_FS_BASE = 0x680e, GUEST_GS_BASE = 0x6810, GUEST_LDTR_BASE = 0x6812,
        GUEST_TR_BASE = 0x6814, GUEST_GDTR_BASE = 0x6816, GUEST_IDTR_BASE = 0x6818,
        GUEST_DR7 = 0x681a, GUEST_RSP = 0x681c, GUEST_RIP = 0x681e, GUEST_RFLAGS = 0x6820,
        GUEST_PENDING_DEBUG = 0x6822, GUEST_SYSENTER_ESP = 0x6824, GUEST_SYSENTER_EIP = 0x6826,
        HOST_CR0 = 0x6c00, HOST_CR3 = 0x6c02, HOST_CR4 = 0x6c04, HOST_FS_BASE = 0x6c06,
        HOST_GS_BASE = 0x6c08, HOST_TR_BASE = 0x6c0a, HOST_GDTR_BASE = 0x6c0c,
        HOST_IDTR_BASE = 0x6c0e, HOST_SYSENTER_ESP = 0x6c10, HOST_SYSENTER_EIP = 0x6c12,
        HOST_RSP = 0x6c14, HOST_RIP = 0x6c16;
    ReadOnly Natural:
        EXIT_QUALIFICATION = 0x6400, IO_RCX = 0x6402, IO_RSI = 0x6404, IO_RDI = 0x6406,
        IO_RIP = 0x6408, GUEST_LINEAR_ADDRESS = 0x640a;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_fields_share_an_encoding() {
        for (i, (name, encoding)) in ALL.iter().enumerate() {
            for (other, again) in ALL.iter().skip(i + 1) {
                assert_ne!(encoding, again, "{name} and {other}");
            }
        }
    }

    #[test]
    fn what_vmread_gives_is_cut_to_the_fields_width() {
        assert_eq!(<u16 as Width>::from_raw(0x1_2345), 0x2345);
        assert_eq!(<u32 as Width>::from_raw(0x1_0000_0001), 1);
        assert_eq!(Natural::from_raw(u64::MAX), u64::MAX);
    }
}
