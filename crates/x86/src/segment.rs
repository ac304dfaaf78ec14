//! Segment registers with their hidden state, and the two descriptor-table registers.
//!
//! Attributes are kept in the 12-bit form of the VMCB (APM vol. 2 §15.5.1 and appendix B): the
//! descriptor's bits 40..=47 and 52..=55 pushed together. VMX keeps them elsewhere; its backend
//! converts.

/// A segment register: selector plus the hidden base, limit and attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Linear base address.
    // 64 bits for all: of FS and GS in long mode, and of system segments there.
    pub base: u64,
    /// Limit in bytes, already scaled by the granularity.
    pub limit: u32,
    /// The selector that software sees.
    pub selector: u16,
    /// Attributes, see [`attr`].
    pub attr: u16,
}

/// Bits of [`Segment::attr`].
pub mod attr {
    /// Segment type, 4 bits (SDM vol. 3A §3.4.5.1, §3.5).
    pub const TYPE_MASK: u16 = 0xf;
    /// Code or data, not a system segment.
    pub const S: u16 = 1 << 4;
    /// Position of the privilege level.
    pub const DPL_SHIFT: u16 = 5;
    /// Descriptor privilege level, 2 bits.
    pub const DPL_MASK: u16 = 3 << DPL_SHIFT;
    /// Present. A register that is not present is unusable.
    pub const P: u16 = 1 << 7;
    /// Available to software.
    pub const AVL: u16 = 1 << 8;
    /// L: code of 64 bits.
    pub const L: u16 = 1 << 9;
    /// Default operand size 32 bits, or big stack.
    pub const DB: u16 = 1 << 10;
    /// Limit counts 4 KiB units.
    pub const G: u16 = 1 << 11;
    /// All twelve bits.
    pub const ALL: u16 = 0xfff;
}

/// Segment types that the hypervisor builds or compares (SDM vol. 3A tables 3-1 and 3-2).
pub mod kind {
    /// Data, read-write, accessed.
    pub const DATA_RW_ACCESSED: u8 = 0x3;
    /// Code, execute-read, accessed.
    pub const CODE_RX_ACCESSED: u8 = 0xb;
    /// System: local descriptor table.
    pub const LDT: u8 = 0x2;
    /// System: available 16-bit task state.
    pub const TSS16_AVAILABLE: u8 = 0x1;
    /// System: busy 16-bit task state.
    pub const TSS16_BUSY: u8 = 0x3;
    /// System: available 32-bit or 64-bit task state.
    pub const TSS_AVAILABLE: u8 = 0x9;
    /// System: busy 32-bit or 64-bit task state.
    pub const TSS_BUSY: u8 = 0xb;
}

/// The fields of a segment's attributes one by one, as `struct kvm_segment` carries them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // Named as in the manuals and explained at `attr`.
pub struct Attributes {
    pub kind: u8,
    pub s: bool,
    pub dpl: u8,
    pub present: bool,
    pub avl: bool,
    pub long: bool,
    pub db: bool,
    pub granularity: bool,
}

impl Attributes {
    /// Packs into the 12-bit form; `kind` and `dpl` are cut to their widths.
    pub const fn pack(self) -> u16 {
        // Cut, for a VMM gives whole bytes.
        (self.kind as u16 & attr::TYPE_MASK)
            | ((self.s as u16) << 4)
            | ((self.dpl as u16 & 3) << attr::DPL_SHIFT)
            | ((self.present as u16) << 7)
            | ((self.avl as u16) << 8)
            | ((self.long as u16) << 9)
            | ((self.db as u16) << 10)
            | ((self.granularity as u16) << 11)
    }

    /// Unpacks the 12-bit form.
    pub const fn unpack(bits: u16) -> Self {
        Self {
            kind: (bits & attr::TYPE_MASK) as u8,
            s: bits & attr::S != 0,
            dpl: ((bits >> attr::DPL_SHIFT) & 3) as u8,
            present: bits & attr::P != 0,
            avl: bits & attr::AVL != 0,
            long: bits & attr::L != 0,
            db: bits & attr::DB != 0,
            granularity: bits & attr::G != 0,
        }
    }
}

impl Segment {
    /// CS after reset or INIT: F000:FFF0 with base FFFF0000 (SDM vol. 3A table 9-1).
    pub const RESET_CS: Self = Self {
        base: 0xffff_0000,
        limit: 0xffff,
        selector: 0xf000,
        // Present and accessed as if it had been loaded, which an entry demands of a usable
        // segment.
        attr: attr::P | attr::S | kind::CODE_RX_ACCESSED as u16,
    };
    /// DS, ES, FS, GS and SS after reset or INIT.
    pub const RESET_DATA: Self = Self {
        base: 0,
        limit: 0xffff,
        selector: 0,
        attr: attr::P | attr::S | kind::DATA_RW_ACCESSED as u16,
    };
    /// LDTR after reset or INIT.
    pub const RESET_LDTR: Self =
        Self { base: 0, limit: 0xffff, selector: 0, attr: attr::P | kind::LDT as u16 };
    /// TR after reset or INIT: a busy 32-bit TSS, as VMX demands (SVM accepts it too).
    pub const RESET_TR: Self =
        Self { base: 0, limit: 0xffff, selector: 0, attr: attr::P | kind::TSS_BUSY as u16 };

    /// Segment type, 0 to 15.
    #[inline]
    pub const fn kind(&self) -> u8 {
        (self.attr & attr::TYPE_MASK) as u8
    }

    /// Descriptor privilege level, 0 to 3. The DPL of SS is the CPL.
    #[inline]
    pub const fn dpl(&self) -> u8 {
        // By the hidden part, and not by the selector's RPL: that is what the CPU checks against.
        ((self.attr & attr::DPL_MASK) >> attr::DPL_SHIFT) as u8
    }

    /// Requested privilege level of the selector, 0 to 3.
    #[inline]
    pub const fn rpl(&self) -> u8 {
        (self.selector & 3) as u8
    }

    /// Whether the descriptor is present.
    #[inline]
    pub const fn is_present(&self) -> bool {
        self.attr & attr::P != 0
    }

    /// Code or data, as against a system segment.
    #[inline]
    pub const fn is_code_or_data(&self) -> bool {
        self.attr & attr::S != 0
    }

    /// 64-bit code (CS only).
    #[inline]
    pub const fn is_long(&self) -> bool {
        self.attr & attr::L != 0
    }

    /// Default operand size 32 bits (CS) or big stack (SS).
    #[inline]
    pub const fn is_default_big(&self) -> bool {
        self.attr & attr::DB != 0
    }

    /// Limit counts 4 KiB units in the descriptor.
    #[inline]
    pub const fn is_granular(&self) -> bool {
        self.attr & attr::G != 0
    }

    /// The attributes one by one.
    pub const fn attributes(&self) -> Attributes {
        Attributes::unpack(self.attr)
    }

    /// The segment with another privilege level.
    pub const fn with_dpl(mut self, dpl: u8) -> Self {
        self.attr = (self.attr & !attr::DPL_MASK) | ((dpl as u16 & 3) << attr::DPL_SHIFT);
        self
    }

    /// A real-mode or virtual-8086 segment for `selector`, limit 64 KiB.
    pub const fn real_mode(selector: u16, code: bool) -> Self {
        let kind = if code { kind::CODE_RX_ACCESSED } else { kind::DATA_RW_ACCESSED };
        Self {
            // A paragraph is sixteen bytes; no table is looked at.
            base: (selector as u64) << 4,
            limit: 0xffff,
            selector,
            attr: attr::P | attr::S | kind as u16,
        }
    }

    /// Reads an 8-byte descriptor from a table (SDM vol. 3A fig. 3-8). A system descriptor of
    /// long mode has 8 more bytes with base bits 63:32, which the caller adds.
    pub const fn from_descriptor(selector: u16, raw: u64) -> Self {
        // In two pieces since the 80286, whose descriptors had 24 bits of base.
        let base = ((raw >> 16) & 0xff_ffff) | ((raw >> 56) << 24);
        let raw_limit = ((raw & 0xffff) | ((raw >> 32) & 0xf_0000)) as u32;
        // Between the two parts lies the upper part of the limit.
        let attr = (((raw >> 40) & 0xff) | ((raw >> 44) & 0xf00)) as u16;
        // The limit names the last byte, of the last page here.
        let limit = if attr & attr::G != 0 { (raw_limit << 12) | 0xfff } else { raw_limit };
        Self { base, limit, selector, attr }
    }
}

/// GDTR or IDTR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescriptorTable {
    /// Linear base address.
    pub base: u64,
    /// Offset of the last byte.
    pub limit: u16,
}

impl DescriptorTable {
    /// Value after reset or INIT.
    pub const RESET: Self = Self { base: 0, limit: 0xffff };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_survive_packing() {
        for bits in 0..=attr::ALL {
            assert_eq!(Attributes::unpack(bits).pack(), bits);
        }
    }

    #[test]
    fn a_flat_long_mode_code_descriptor_is_read() {
        let cs = Segment::from_descriptor(0x10, 0x00af_9b00_0000_ffff);
        assert_eq!((cs.base, cs.limit), (0, 0xffff_ffff));
        assert!(cs.is_long() && cs.is_present() && cs.is_granular() && !cs.is_default_big());
        assert_eq!((cs.kind(), cs.dpl()), (kind::CODE_RX_ACCESSED, 0));
    }

    #[test]
    fn base_and_limit_are_gathered_from_all_their_pieces() {
        let seg = Segment::from_descriptor(8, 0x1245_f267_89ab_cdef);
        assert_eq!(seg.base, 0x1267_89ab);
        assert_eq!(seg.limit, 0x5_cdef);
        assert_eq!(seg.dpl(), 3);
        assert_eq!(seg.attr, 0x4f2);
    }

    #[test]
    fn the_privilege_level_can_be_replaced() {
        let seg = Segment::RESET_DATA.with_dpl(3);
        assert_eq!(seg.dpl(), 3);
        assert_eq!(seg.with_dpl(0), Segment::RESET_DATA);
    }
}
