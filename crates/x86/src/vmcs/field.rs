//! The fields. A field's width and access are in its type, so that a 16-bit field cannot take 64
//! bits and a read-only one cannot be written.
//!
//! SDM vol. 3C appendix B; §25.11.2 gives the encoding's own structure, which every constant here
//! is checked against when it is compiled.
#![allow(missing_docs)] // Named as in the manual, where each is explained.

use core::marker::PhantomData;

use super::group::{Group, Place, Shadow};

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

/// May be read and written, and what the CPU has cached goes by it: who writes it answers for what is cached under
/// the new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tagging;

/// What may be done with a field.
pub trait Access {
    /// Whether the field lies in the read-only data area.
    const READ_ONLY: bool;
}

impl Access for ReadOnly {
    const READ_ONLY: bool = true;
}

impl Access for ReadWrite {
    const READ_ONLY: bool = false;
}

impl Access for Tagging {
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

/// What of [`place`] a table line says; a field without a bracket is not in the VMCS12.
macro_rules! place {
    () => {
        None
    };
    ($offset:literal $group:ident) => {
        Some(Place { offset: $offset, group: Group::$group, shadow: Shadow::No })
    };
    ($offset:literal $group:ident read) => {
        Some(Place { offset: $offset, group: Group::$group, shadow: Shadow::Read })
    };
    ($offset:literal $group:ident write) => {
        Some(Place { offset: $offset, group: Group::$group, shadow: Shadow::ReadWrite })
    };
}

macro_rules! fields {
    ($($access:ident $width:ty:
        $($name:ident = $encoding:literal $([$($place:tt)*])?),*;)*) => {
        $($(pub const $name: Field<$width, $access> = Field::new($encoding);)*)*

        /// Every field with its name, for dumps.
        pub const ALL: &[(&str, u32)] = &[$($((stringify!($name), $encoding)),*),*];

        /// Every field: its encoding, which says its width, access and area, and its place in the
        /// VMCS12, if it has one.
        pub const TABLE: &[(u16, Option<Place>)] =
            &[$($(($encoding, place!($($($place)*)?))),*),*];
    };
}

// The table of fields. In brackets: the byte at which the field lies in KVM's `struct vmcs12`, its
// dirty group, and whether a shadow VMCS serves reads (`read`) or reads and writes (`write`) of it.
fields! {
    ReadWrite u16:
        VPID = 0x0000 [960 Translation],
        POSTED_INTR_VECTOR = 0x0002 [962 Apic],
        EPTP_INDEX = 0x0004,
        GUEST_ES_SELECTOR = 0x0800 [964 Segments],
        GUEST_CS_SELECTOR = 0x0802 [966 Segments],
        GUEST_SS_SELECTOR = 0x0804 [968 Segments],
        GUEST_DS_SELECTOR = 0x0806 [970 Segments],
        GUEST_FS_SELECTOR = 0x0808 [972 Segments],
        GUEST_GS_SELECTOR = 0x080a [974 Segments],
        GUEST_LDTR_SELECTOR = 0x080c [976 Segments],
        GUEST_TR_SELECTOR = 0x080e [978 Segments],
        GUEST_INTERRUPT_STATUS = 0x0810 [980 Status write],
        PML_INDEX = 0x0812 [996 Status write],
        HOST_ES_SELECTOR = 0x0c00 [982 Host],
        HOST_CS_SELECTOR = 0x0c02 [984 Host],
        HOST_SS_SELECTOR = 0x0c04 [986 Host],
        HOST_DS_SELECTOR = 0x0c06 [988 Host],
        HOST_FS_SELECTOR = 0x0c08 [990 Host],
        HOST_GS_SELECTOR = 0x0c0a [992 Host],
        HOST_TR_SELECTOR = 0x0c0c [994 Host];
    ReadWrite u64:
        IO_BITMAP_A = 0x2000 [40 Bitmaps],
        IO_BITMAP_B = 0x2002 [48 Bitmaps],
        MSR_BITMAP = 0x2004 [56 Bitmaps],
        EXIT_MSR_STORE_ADDR = 0x2006 [64 MsrLists],
        EXIT_MSR_LOAD_ADDR = 0x2008 [72 MsrLists],
        ENTRY_MSR_LOAD_ADDR = 0x200a [80 MsrLists],
        EXECUTIVE_VMCS = 0x200c,
        PML_ADDRESS = 0x200e [312 Translation],
        TSC_OFFSET = 0x2010 [88 Time],
        VIRTUAL_APIC_ADDR = 0x2012 [96 Apic],
        APIC_ACCESS_ADDR = 0x2014 [104 Apic],
        POSTED_INTR_DESC = 0x2016 [112 Apic],
        VM_FUNCTION_CONTROLS = 0x2018 [296 Translation],
        EOI_EXIT_0 = 0x201c [128 Apic],
        EOI_EXIT_1 = 0x201e [136 Apic],
        EOI_EXIT_2 = 0x2020 [144 Apic],
        EOI_EXIT_3 = 0x2022 [152 Apic],
        EPTP_LIST = 0x2024 [304 Translation],
        VMREAD_BITMAP = 0x2026 [280 Bitmaps],
        VMWRITE_BITMAP = 0x2028 [288 Bitmaps],
        VE_INFO_ADDR = 0x202a,
        XSS_EXIT_BITMAP = 0x202c [160 Bitmaps],
        ENCLS_EXIT_BITMAP = 0x202e [320 Bitmaps],
        TSC_MULTIPLIER = 0x2032 [328 Time],
        VMCS_LINK = 0x2800 [176 Bitmaps],
        GUEST_DEBUGCTL = 0x2802 [184 Msrs],
        GUEST_PAT = 0x2804 [192 Msrs],
        GUEST_EFER = 0x2806 [200 Msrs],
        GUEST_PERF_GLOBAL_CTRL = 0x2808 [208 Msrs],
        GUEST_PDPTE0 = 0x280a [216 ControlRegisters],
        GUEST_PDPTE1 = 0x280c [224 ControlRegisters],
        GUEST_PDPTE2 = 0x280e [232 ControlRegisters],
        GUEST_PDPTE3 = 0x2810 [240 ControlRegisters],
        GUEST_BNDCFGS = 0x2812 [248 Msrs],
        HOST_PAT = 0x2c00 [256 Host],
        HOST_EFER = 0x2c02 [264 Host],
        HOST_PERF_GLOBAL_CTRL = 0x2c04 [272 Host];
    Tagging u64:
        EPT_POINTER = 0x201a [120 Translation];
    ReadOnly u64:
        GUEST_PHYSICAL_ADDRESS = 0x2400 [168 Exit read];
    ReadWrite u32:
        PIN_CONTROLS = 0x4000 [744 Controls],
        PROC_CONTROLS = 0x4002 [748 Controls write],
        EXCEPTION_BITMAP = 0x4004 [752 Controls],
        PAGE_FAULT_MASK = 0x4006 [756 Controls],
        PAGE_FAULT_MATCH = 0x4008 [760 Controls],
        CR3_TARGET_COUNT = 0x400a [764 Controls],
        EXIT_CONTROLS = 0x400c [768 Controls],
        EXIT_MSR_STORE_COUNT = 0x400e [772 MsrLists],
        EXIT_MSR_LOAD_COUNT = 0x4010 [776 MsrLists],
        ENTRY_CONTROLS = 0x4012 [780 Controls],
        ENTRY_MSR_LOAD_COUNT = 0x4014 [784 MsrLists],
        ENTRY_INTERRUPTION = 0x4016 [788 Injection write],
        ENTRY_ERROR_CODE = 0x4018 [792 Injection write],
        ENTRY_INSTRUCTION_LENGTH = 0x401a [796 Injection write],
        TPR_THRESHOLD = 0x401c [800 Apic write],
        PROC_CONTROLS2 = 0x401e [804 Controls],
        PLE_GAP = 0x4020,
        PLE_WINDOW = 0x4022,
        GUEST_ES_LIMIT = 0x4800 [840 Segments],
        GUEST_CS_LIMIT = 0x4802 [844 Segments],
        GUEST_SS_LIMIT = 0x4804 [848 Segments],
        GUEST_DS_LIMIT = 0x4806 [852 Segments],
        GUEST_FS_LIMIT = 0x4808 [856 Segments],
        GUEST_GS_LIMIT = 0x480a [860 Segments],
        GUEST_LDTR_LIMIT = 0x480c [864 Segments],
        GUEST_TR_LIMIT = 0x480e [868 Segments],
        GUEST_GDTR_LIMIT = 0x4810 [872 Segments],
        GUEST_IDTR_LIMIT = 0x4812 [876 Segments],
        GUEST_ES_RIGHTS = 0x4814 [880 Segments],
        GUEST_CS_RIGHTS = 0x4816 [884 Segments read],
        GUEST_SS_RIGHTS = 0x4818 [888 Segments read],
        GUEST_DS_RIGHTS = 0x481a [892 Segments],
        GUEST_FS_RIGHTS = 0x481c [896 Segments],
        GUEST_GS_RIGHTS = 0x481e [900 Segments],
        GUEST_LDTR_RIGHTS = 0x4820 [904 Segments],
        GUEST_TR_RIGHTS = 0x4822 [908 Segments],
        GUEST_INTERRUPTIBILITY = 0x4824 [912 Flow write],
        GUEST_ACTIVITY = 0x4826 [916 Flow],
        GUEST_SMBASE = 0x4828,
        GUEST_SYSENTER_CS = 0x482a [920 Sysenter],
        PREEMPTION_TIMER = 0x482e [928 Time write],
        HOST_SYSENTER_CS = 0x4c00 [924 Host];
    ReadOnly u32:
        INSTRUCTION_ERROR = 0x4400 [808 Exit],
        EXIT_REASON = 0x4402 [812 Exit read],
        EXIT_INTERRUPTION = 0x4404 [816 Exit read],
        EXIT_ERROR_CODE = 0x4406 [820 Exit read],
        IDT_VECTORING = 0x4408 [824 Exit read],
        IDT_VECTORING_ERROR = 0x440a [828 Exit read],
        INSTRUCTION_LENGTH = 0x440c [832 Exit read],
        INSTRUCTION_INFO = 0x440e [836 Exit read];
    ReadWrite Natural:
        CR0_MASK = 0x6000 [344 ControlRegisters],
        CR4_MASK = 0x6002 [352 ControlRegisters],
        CR0_SHADOW = 0x6004 [360 ControlRegisters write],
        CR4_SHADOW = 0x6006 [368 ControlRegisters write],
        CR3_TARGET0 = 0x6008,
        CR3_TARGET1 = 0x600a,
        CR3_TARGET2 = 0x600c,
        CR3_TARGET3 = 0x600e,
        GUEST_CR0 = 0x6800 [424 ControlRegisters],
        GUEST_CR3 = 0x6802 [432 ControlRegisters],
        GUEST_CR4 = 0x6804 [440 ControlRegisters],
        GUEST_ES_BASE = 0x6806 [448 Segments],
        GUEST_CS_BASE = 0x6808 [456 Segments],
        GUEST_SS_BASE = 0x680a [464 Segments],
        GUEST_DS_BASE = 0x680c [472 Segments],
        GUEST_FS_BASE = 0x680e [480 Segments],
        GUEST_GS_BASE = 0x6810 [488 Segments],
        GUEST_LDTR_BASE = 0x6812 [496 Segments],
        GUEST_TR_BASE = 0x6814 [504 Segments],
        GUEST_GDTR_BASE = 0x6816 [512 Segments],
        GUEST_IDTR_BASE = 0x6818 [520 Segments],
        GUEST_DR7 = 0x681a [528 Msrs],
        GUEST_RSP = 0x681c [536 Flow write],
        GUEST_RIP = 0x681e [544 Flow write],
        GUEST_RFLAGS = 0x6820 [552 Flow write],
        GUEST_PENDING_DEBUG = 0x6822 [560 Flow],
        GUEST_SYSENTER_ESP = 0x6824 [568 Sysenter],
        GUEST_SYSENTER_EIP = 0x6826 [576 Sysenter],
        HOST_CR0 = 0x6c00 [584 Host],
        HOST_CR3 = 0x6c02 [592 Host],
        HOST_CR4 = 0x6c04 [600 Host],
        HOST_FS_BASE = 0x6c06 [608 Host],
        HOST_GS_BASE = 0x6c08 [616 Host],
        HOST_TR_BASE = 0x6c0a [624 Host],
        HOST_GDTR_BASE = 0x6c0c [632 Host],
        HOST_IDTR_BASE = 0x6c0e [640 Host],
        HOST_SYSENTER_ESP = 0x6c10 [648 Host],
        HOST_SYSENTER_EIP = 0x6c12 [656 Host],
        HOST_RSP = 0x6c14 [664 Host],
        HOST_RIP = 0x6c16 [672 Host];
    ReadOnly Natural:
        EXIT_QUALIFICATION = 0x6400 [408 Exit read],
        IO_RCX = 0x6402,
        IO_RSI = 0x6404,
        IO_RDI = 0x6406,
        IO_RIP = 0x6408,
        GUEST_LINEAR_ADDRESS = 0x640a [416 Exit read];
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
