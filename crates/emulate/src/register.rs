//! General registers and their parts, as operands name them.

use crate::machine::SegReg;
use iced_x86::Register;

/// A general register or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegRef {
    /// 0 = RAX … 15 = R15.
    pub index: u8,
    /// Bytes: 1, 2, 4 or 8.
    pub size: u8,
    /// AH, CH, DH or BH: bits 15:8 of register `index`.
    pub high8: bool,
}

impl RegRef {
    pub(crate) fn of(register: Register) -> Option<Self> {
        // iced numbers the registers in runs: AL…BL, AH…BH, SPL…R15L, AX…, EAX…, RAX….
        let n = (register as u32).checked_sub(Register::AL as u32)?;
        let (index, size, high8) = match n {
            0..4 => (n, 1, false),
            4..8 => (n - 4, 1, true),
            8..20 => (n - 4, 1, false),
            20..36 => (n - 20, 2, false),
            36..52 => (n - 36, 4, false),
            52..68 => (n - 52, 8, false),
            _ => return None,
        };
        Some(Self { index: index as u8, size, high8 })
    }

    /// The register's value out of the whole 64-bit register.
    #[inline]
    pub const fn extract(self, whole: u64) -> u64 {
        match (self.size, self.high8) {
            // AH to BH are named by encodings that with a REX prefix name SPL to DIL: the decoder
            // has told them apart.
            (1, true) => (whole >> 8) & 0xff,
            (1, false) => whole & 0xff,
            (2, _) => whole & 0xffff,
            (4, _) => whole & 0xffff_ffff,
            _ => whole,
        }
    }

    /// The whole register after a write of `value` to this part: 4 bytes clear the upper half,
    /// 1 and 2 keep what they do not cover.
    #[inline]
    pub const fn insert(self, whole: u64, value: u64) -> u64 {
        match (self.size, self.high8) {
            (1, true) => (whole & !0xff00) | ((value & 0xff) << 8),
            (1, false) => (whole & !0xff) | (value & 0xff),
            (2, _) => (whole & !0xffff) | (value & 0xffff),
            // Not by the mode: outside of 64-bit mode nobody sees the upper half.
            (4, _) => value & 0xffff_ffff,
            _ => value,
        }
    }
}

/// All ones in the low `size` bytes.
#[inline]
pub(crate) const fn size_mask(size: u8) -> u64 {
    match size {
        1 => 0xff,
        2 => 0xffff,
        4 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

/// The low `size` bytes of `value`, sign-extended to 64 bits.
#[inline]
pub(crate) const fn sign_extend(value: u64, size: u8) -> u64 {
    match size {
        1 => value as i8 as i64 as u64,
        2 => value as i16 as i64 as u64,
        4 => value as i32 as i64 as u64,
        _ => value,
    }
}

/// The segment register that the decoder names so.
pub(crate) const fn segment_of(register: Register) -> Option<SegReg> {
    Some(match register {
        Register::ES => SegReg::Es,
        Register::CS => SegReg::Cs,
        Register::SS => SegReg::Ss,
        Register::DS => SegReg::Ds,
        Register::FS => SegReg::Fs,
        Register::GS => SegReg::Gs,
        _ => return None,
    })
}
