//! The fields. A field's width and access are in its type, so that a 16-bit field cannot take 64
//! bits and a read-only one cannot be written.
//!
//! SDM vol. 3C appendix B; §25.11.2 gives the encoding's own structure, which every constant here
//! is checked against when it is compiled.
#![allow(missing_docs)] // Named as in the manual, where each is explained.

use core::marker::PhantomData;

use super::group::{Clean, Enlightened, Group, Place, Shadow};

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
    // The encoding's own code for the width, bits 14:13 (SDM vol. 3C §25.11.2).
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
    // Not in the order of the sizes: 32 bits came after 64 in the encoding.
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
        // Each access exits: a shadow VMCS is not filled with the field.
        Some(Place { offset: $offset, group: Group::$group, shadow: Shadow::No })
    };
    ($offset:literal $group:ident read) => {
        Some(Place { offset: $offset, group: Group::$group, shadow: Shadow::Read })
    };
    ($offset:literal $group:ident write) => {
        Some(Place { offset: $offset, group: Group::$group, shadow: Shadow::ReadWrite })
    };
}

/// What of [`super::enlightened`] a table line says; a field without braces is not carried there.
macro_rules! enlightened {
    () => {
        None
    };
    ($offset:literal $clean:ident) => {
        Some(Enlightened { offset: $offset, clean: Clean::$clean, is_written: false })
    };
    ($offset:literal $clean:ident out) => {
        Some(Enlightened { offset: $offset, clean: Clean::$clean, is_written: true })
    };
}

macro_rules! fields {
    ($($access:ident $width:ty:
        $($name:ident = $encoding:literal $([$($place:tt)*])? $({$($page:tt)*})?),*;)*) => {
        $($(pub const $name: Field<$width, $access> = Field::new($encoding);)*)*

        /// Every field with its name, for dumps.
        pub const ALL: &[(&str, u32)] = &[$($((stringify!($name), $encoding)),*),*];

        /// Every field: its encoding, which says its width, access and area, and its place in the
        /// VMCS12, if it has one.
        pub const TABLE: &[(u16, Option<Place>)] =
            &[$($(($encoding, place!($($($place)*)?))),*),*];

        /// Every field in the order of [`TABLE`]: its encoding, and its place in an enlightened VMCS, if that carries it.
        pub const CARRIED: &[(u16, Option<Enlightened>)] =
            &[$($(($encoding, enlightened!($($($page)*)?))),*),*];
    };
}

// The table of fields. In brackets: the byte at which the field lies in KVM's `struct vmcs12`, its
// dirty group, and whether a shadow VMCS serves reads (`read`) or reads and writes (`write`) of it. In
// braces: the byte at which it lies in an enlightened VMCS, its clean-field group there, and whether an
// exit writes it (`out`).
fields! {
    ReadWrite u16:
        VPID = 0x0000 [960 Translation] {632 Translation},
        POSTED_INTR_VECTOR = 0x0002 [962 Apic],
        EPTP_INDEX = 0x0004,
        GUEST_ES_SELECTOR = 0x0800 [964 Segments] {128 Guest2 out},
        GUEST_CS_SELECTOR = 0x0802 [966 Segments] {130 Guest2 out},
        GUEST_SS_SELECTOR = 0x0804 [968 Segments] {132 Guest2 out},
        GUEST_DS_SELECTOR = 0x0806 [970 Segments] {134 Guest2 out},
        GUEST_FS_SELECTOR = 0x0808 [972 Segments] {136 Guest2 out},
        GUEST_GS_SELECTOR = 0x080a [974 Segments] {138 Guest2 out},
        GUEST_LDTR_SELECTOR = 0x080c [976 Segments] {140 Guest2 out},
        GUEST_TR_SELECTOR = 0x080e [978 Segments] {142 Guest2 out},
        GUEST_INTERRUPT_STATUS = 0x0810 [980 Status write],
        PML_INDEX = 0x0812 [996 Status write],
        HOST_ES_SELECTOR = 0x0c00 [982 Host] {8 Host1},
        HOST_CS_SELECTOR = 0x0c02 [984 Host] {10 Host1},
        HOST_SS_SELECTOR = 0x0c04 [986 Host] {12 Host1},
        HOST_DS_SELECTOR = 0x0c06 [988 Host] {14 Host1},
        HOST_FS_SELECTOR = 0x0c08 [990 Host] {16 Host1},
        HOST_GS_SELECTOR = 0x0c0a [992 Host] {18 Host1},
        HOST_TR_SELECTOR = 0x0c0c [994 Host] {20 Host1};
    ReadWrite u64:
        IO_BITMAP_A = 0x2000 [40 Bitmaps] {104 IoBitmaps},
        IO_BITMAP_B = 0x2002 [48 Bitmaps] {112 IoBitmaps},
        MSR_BITMAP = 0x2004 [56 Bitmaps] {120 MsrBitmap},
        EXIT_MSR_STORE_ADDR = 0x2006 [64 MsrLists],
        EXIT_MSR_LOAD_ADDR = 0x2008 [72 MsrLists],
        ENTRY_MSR_LOAD_ADDR = 0x200a [80 MsrLists],
        EXECUTIVE_VMCS = 0x200c,
        PML_ADDRESS = 0x200e [312 Translation],
        TSC_OFFSET = 0x2010 [88 Time] {400 Controls2},
        VIRTUAL_APIC_ADDR = 0x2012 [96 Apic] {408 Controls2},
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
        XSS_EXIT_BITMAP = 0x202c [160 Bitmaps] {960 Controls2},
        ENCLS_EXIT_BITMAP = 0x202e [320 Bitmaps] {968 Controls2},
        TSC_MULTIPLIER = 0x2032 [328 Time] {984 Controls2},
        VMCS_LINK = 0x2800 [176 Bitmaps] {416 Guest1},
        GUEST_DEBUGCTL = 0x2802 [184 Msrs] {424 Guest1 out},
        GUEST_PAT = 0x2804 [192 Msrs] {432 Guest1 out},
        GUEST_EFER = 0x2806 [200 Msrs] {440 Guest1 out},
        GUEST_PERF_GLOBAL_CTRL = 0x2808 [208 Msrs] {904 Guest1},
        GUEST_PDPTE0 = 0x280a [216 ControlRegisters] {448 Guest1 out},
        GUEST_PDPTE1 = 0x280c [224 ControlRegisters] {456 Guest1 out},
        GUEST_PDPTE2 = 0x280e [232 ControlRegisters] {464 Guest1 out},
        GUEST_PDPTE3 = 0x2810 [240 ControlRegisters] {472 Guest1 out},
        GUEST_BNDCFGS = 0x2812 [248 Msrs] {896 Guest1 out},
        HOST_PAT = 0x2c00 [256 Host] {24 Host1},
        HOST_EFER = 0x2c02 [264 Host] {32 Host1},
        HOST_PERF_GLOBAL_CTRL = 0x2c04 [272 Host] {976 Host1};
    Tagging u64:
        EPT_POINTER = 0x201a [120 Translation] {624 Translation};
    ReadOnly u64:
        GUEST_PHYSICAL_ADDRESS = 0x2400 [168 Exit read] {680 Report out};
    ReadWrite u32:
        PIN_CONTROLS = 0x4000 [744 Controls] {92 Controls1},
        PROC_CONTROLS = 0x4002 [748 Controls write] {788 Proc},
        EXCEPTION_BITMAP = 0x4004 [752 Controls] {792 Exceptions},
        PAGE_FAULT_MASK = 0x4006 [756 Controls],
        PAGE_FAULT_MATCH = 0x4008 [760 Controls],
        CR3_TARGET_COUNT = 0x400a [764 Controls],
        EXIT_CONTROLS = 0x400c [768 Controls] {96 Controls1},
        EXIT_MSR_STORE_COUNT = 0x400e [772 MsrLists],
        EXIT_MSR_LOAD_COUNT = 0x4010 [776 MsrLists],
        ENTRY_CONTROLS = 0x4012 [780 Controls] {796 Entry out},
        ENTRY_MSR_LOAD_COUNT = 0x4014 [784 MsrLists],
        ENTRY_INTERRUPTION = 0x4016 [788 Injection write] {800 Event out},
        ENTRY_ERROR_CODE = 0x4018 [792 Injection write] {804 Event},
        ENTRY_INSTRUCTION_LENGTH = 0x401a [796 Injection write] {808 Event},
        TPR_THRESHOLD = 0x401c [800 Apic write] {812 Always},
        PROC_CONTROLS2 = 0x401e [804 Controls] {100 Controls1},
        PLE_GAP = 0x4020,
        PLE_WINDOW = 0x4022,
        GUEST_ES_LIMIT = 0x4800 [840 Segments] {144 Guest2 out},
        GUEST_CS_LIMIT = 0x4802 [844 Segments] {148 Guest2 out},
        GUEST_SS_LIMIT = 0x4804 [848 Segments] {152 Guest2 out},
        GUEST_DS_LIMIT = 0x4806 [852 Segments] {156 Guest2 out},
        GUEST_FS_LIMIT = 0x4808 [856 Segments] {160 Guest2 out},
        GUEST_GS_LIMIT = 0x480a [860 Segments] {164 Guest2 out},
        GUEST_LDTR_LIMIT = 0x480c [864 Segments] {168 Guest2 out},
        GUEST_TR_LIMIT = 0x480e [868 Segments] {172 Guest2 out},
        GUEST_GDTR_LIMIT = 0x4810 [872 Segments] {176 Guest2 out},
        GUEST_IDTR_LIMIT = 0x4812 [876 Segments] {180 Guest2 out},
        GUEST_ES_RIGHTS = 0x4814 [880 Segments] {184 Guest2 out},
        GUEST_CS_RIGHTS = 0x4816 [884 Segments read] {188 Guest2 out},
        GUEST_SS_RIGHTS = 0x4818 [888 Segments read] {192 Guest2 out},
        GUEST_DS_RIGHTS = 0x481a [892 Segments] {196 Guest2 out},
        GUEST_FS_RIGHTS = 0x481c [896 Segments] {200 Guest2 out},
        GUEST_GS_RIGHTS = 0x481e [900 Segments] {204 Guest2 out},
        GUEST_LDTR_RIGHTS = 0x4820 [904 Segments] {208 Guest2 out},
        GUEST_TR_RIGHTS = 0x4822 [908 Segments] {212 Guest2 out},
        GUEST_INTERRUPTIBILITY = 0x4824 [912 Flow write] {784 Basic out},
        GUEST_ACTIVITY = 0x4826 [916 Flow] {504 Guest1 out},
        GUEST_SMBASE = 0x4828,
        GUEST_SYSENTER_CS = 0x482a [920 Sysenter] {508 Guest1 out},
        PREEMPTION_TIMER = 0x482e [928 Status write],
        HOST_SYSENTER_CS = 0x4c00 [924 Host] {88 Host1};
    ReadOnly u32:
        INSTRUCTION_ERROR = 0x4400 [808 Exit] {688 Report out},
        EXIT_REASON = 0x4402 [812 Exit read] {692 Report out},
        EXIT_INTERRUPTION = 0x4404 [816 Exit read] {696 Report out},
        EXIT_ERROR_CODE = 0x4406 [820 Exit read] {700 Report out},
        IDT_VECTORING = 0x4408 [824 Exit read] {704 Report out},
        IDT_VECTORING_ERROR = 0x440a [828 Exit read] {708 Report out},
        INSTRUCTION_LENGTH = 0x440c [832 Exit read] {712 Report out},
        INSTRUCTION_INFO = 0x440e [836 Exit read] {716 Report out};
    ReadWrite Natural:
        CR0_MASK = 0x6000 [344 ControlRegisters] {512 Registers},
        CR4_MASK = 0x6002 [352 ControlRegisters] {520 Registers},
        CR0_SHADOW = 0x6004 [360 ControlRegisters write] {528 Registers},
        CR4_SHADOW = 0x6006 [368 ControlRegisters write] {536 Registers},
        CR3_TARGET0 = 0x6008,
        CR3_TARGET1 = 0x600a,
        CR3_TARGET2 = 0x600c,
        CR3_TARGET3 = 0x600e,
        GUEST_CR0 = 0x6800 [424 ControlRegisters] {544 Registers out},
        GUEST_CR3 = 0x6802 [432 ControlRegisters] {552 Registers out},
        GUEST_CR4 = 0x6804 [440 ControlRegisters] {560 Registers out},
        GUEST_ES_BASE = 0x6806 [448 Segments] {216 Guest2 out},
        GUEST_CS_BASE = 0x6808 [456 Segments] {224 Guest2 out},
        GUEST_SS_BASE = 0x680a [464 Segments] {232 Guest2 out},
        GUEST_DS_BASE = 0x680c [472 Segments] {240 Guest2 out},
        GUEST_FS_BASE = 0x680e [480 Segments] {248 Guest2 out},
        GUEST_GS_BASE = 0x6810 [488 Segments] {256 Guest2 out},
        GUEST_LDTR_BASE = 0x6812 [496 Segments] {264 Guest2 out},
        GUEST_TR_BASE = 0x6814 [504 Segments] {272 Guest2 out},
        GUEST_GDTR_BASE = 0x6816 [512 Segments] {280 Guest2 out},
        GUEST_IDTR_BASE = 0x6818 [520 Segments] {288 Guest2 out},
        GUEST_DR7 = 0x681a [528 Msrs] {568 Registers out},
        GUEST_RSP = 0x681c [536 Flow write] {768 Basic out},
        GUEST_RIP = 0x681e [544 Flow write] {816 Always out},
        GUEST_RFLAGS = 0x6820 [552 Flow write] {776 Basic out},
        GUEST_PENDING_DEBUG = 0x6822 [560 Flow] {480 Guest1 out},
        GUEST_SYSENTER_ESP = 0x6824 [568 Sysenter] {488 Guest1 out},
        GUEST_SYSENTER_EIP = 0x6826 [576 Sysenter] {496 Guest1 out},
        HOST_CR0 = 0x6c00 [584 Host] {40 Host1},
        HOST_CR3 = 0x6c02 [592 Host] {48 Host1},
        HOST_CR4 = 0x6c04 [600 Host] {56 Host1},
        HOST_FS_BASE = 0x6c06 [608 Host] {576 HostPointers},
        HOST_GS_BASE = 0x6c08 [616 Host] {584 HostPointers},
        HOST_TR_BASE = 0x6c0a [624 Host] {592 HostPointers},
        HOST_GDTR_BASE = 0x6c0c [632 Host] {600 HostPointers},
        HOST_IDTR_BASE = 0x6c0e [640 Host] {608 HostPointers},
        HOST_SYSENTER_ESP = 0x6c10 [648 Host] {64 Host1},
        HOST_SYSENTER_EIP = 0x6c12 [656 Host] {72 Host1},
        HOST_RSP = 0x6c14 [664 Host] {616 HostPointers},
        HOST_RIP = 0x6c16 [672 Host] {80 Host1};
    ReadOnly Natural:
        EXIT_QUALIFICATION = 0x6400 [408 Exit read] {720 Report out},
        IO_RCX = 0x6402,
        IO_RSI = 0x6404,
        IO_RDI = 0x6406,
        IO_RIP = 0x6408,
        GUEST_LINEAR_ADDRESS = 0x640a [416 Exit read] {760 Report out};
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
