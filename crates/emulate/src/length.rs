//! What CPUs without NRIP save and decode assists do not report: instruction lengths (the commonest
//! exits by a few compares, all others by the decoder) and the registers of MOV CR and MOV DR.

use crate::decode::decode;
use crate::machine::CodeSize;

/// Length in bytes of the first instruction of `bytes`, 1 to 15; `None` when it does not decode.
pub fn length(bytes: &[u8], size: CodeSize) -> Option<u8> {
    if let Some(first) = bytes.first_chunk::<8>()
        && let Some(length) = common_length(u64::from_le_bytes(*first), size)
    {
        return Some(length);
    }
    // Everything else by the decoder, which is slow and knows all; it is rare.
    decode(bytes, size).ok().map(|decoded| decoded.len())
}

/// [`length`] of the instructions whose exits are hot, with at most one operand-size and one REX prefix;
/// `None` for all others. `code`: the eight bytes at RIP, which they never fill.
#[inline(always)]
pub fn common_length(code: u64, size: CodeSize) -> Option<u8> {
    // Most exits have no prefix at all, so that is one comparison.
    match unprefixed(code, 0, false) {
        None if code as u8 == 0xf3 => pause(code),
        None => prefixed(code, size),
        length => length,
    }
}

/// The length of a PAUSE.
#[inline]
fn pause(code: u64) -> Option<u8> {
    (code as u16 == 0x90f3).then_some(2)
}

fn prefixed(mut code: u64, size: CodeSize) -> Option<u8> {
    let (mut prefixes, mut rex) = (0, 0);
    let operand = code as u8 == 0x66;
    if operand {
        (prefixes, code) = (1, code >> 8);
    }
    // In other modes 40 to 4F are INC and DEC.
    if size == CodeSize::Bits64 && code & 0xf0 == 0x40 {
        (prefixes, rex, code) = (prefixes + 1, code as u8, code >> 8);
    }
    if prefixes == 0 {
        return None;
    }
    Some(unprefixed(code, rex, operand)? + prefixes)
}

/// The length from the opcode on. `operand`: there was an operand-size prefix.
#[inline(always)]
fn unprefixed(code: u64, rex: u8, operand: bool) -> Option<u8> {
    // No bound to be checked: eight bytes are there, and three are looked at.
    let [byte, second, third, ..] = code.to_le_bytes();
    Some(match byte {
        // Two-byte opcodes.
        0x0f => match second {
            // CPUID, WRMSR, RDTSC, RDMSR, RDPMC, CLTS, INVD, WBINVD
            0xa2 | 0x30..=0x33 | 0x06 | 0x08 | 0x09 => 2,
            // VMCALL, MONITOR, MWAIT, XGETBV, XSETBV, VMRUN … INVLPGA, RDTSCP: some of these are
            // other instructions under a 66 prefix.
            0x01 if !operand => match third {
                0xc1 | 0xc8 | 0xc9 | 0xd0 | 0xd1 | 0xd8..=0xdf | 0xf9 => 3,
                _ => return None,
            },
            // MOV from and to CR0, CR2, CR3, CR4, CR8: the mod field is ignored.
            0x20 | 0x22 => match (third >> 3) & 7 | (rex & 4) << 1 {
                0 | 2 | 3 | 4 | 8 => 3,
                _ => return None,
            },
            _ => return None,
        },
        // HLT, and IN and OUT by DX.
        0xf4 | 0xec..=0xef => 1,
        // IN and OUT by immediate.
        0xe4..=0xe7 => 2,
        _ => return None,
    })
}

/// A MOV between a general register and a control or debug register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemMove {
    /// Length of the instruction in bytes.
    pub length: u8,
    /// A debug register rather than a control register.
    pub debug: bool,
    /// Number of the control or debug register, 0 to 15, as encoded: it may not exist.
    pub register: u8,
    /// Index of the general register, 0 to 15. It is read and written as 64 bits in 64-bit mode
    /// and as 32 bits elsewhere, whatever the prefixes.
    pub gpr: u8,
    /// To the control or debug register.
    pub write: bool,
}

/// [`system_move`] with no prefix or a REX prefix, which is what nearly all programs use; `None` for
/// everything else. `code`: the eight bytes at RIP.
#[inline(always)]
pub fn common_system_move(code: u64, size: CodeSize) -> Option<SystemMove> {
    let rex = size == CodeSize::Bits64 && code & 0xf0 == 0x40;
    let (rex, code) = if rex { (code as u8, code >> 8) } else { (0, code) };
    let [first, opcode, modrm, ..] = code.to_le_bytes();
    // 0F 20 to 0F 23 are the four moves; bit 0 says which registers, bit 1 which way.
    if first != 0x0f || opcode & 0xfc != 0x20 {
        return None;
    }
    Some(SystemMove {
        length: 3 + u8::from(rex != 0),
        debug: opcode & 1 != 0,
        register: (modrm >> 3) & 7 | (rex & 4) << 1,
        gpr: modrm & 7 | (rex & 1) << 3,
        write: opcode & 2 != 0,
    })
}

/// Decodes MOV CR and MOV DR without any table; `None` for everything else.
///
/// Any prefixes are skipped, LOCK too, which names CR8 on AMD (APM vol. 3, MOV CRn).
#[inline]
pub fn system_move(bytes: &[u8], size: CodeSize) -> Option<SystemMove> {
    let mut at = 0u8;
    let mut high = 0;
    let mut rex = 0;
    loop {
        let byte = *bytes.get(usize::from(at))?;
        // More prefixes than that leave no room for the opcode and its ModRM byte.
        at = at.checked_add(1).filter(|at| *at <= 13)?;
        match byte {
            0x0f => break,
            0xf0 => (high, rex) = (8, 0),
            // A REX prefix counts only right before the opcode.
            0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf2 | 0xf3 => rex = 0,
            0x40..=0x4f if size == CodeSize::Bits64 => rex = byte,
            _ => return None,
        }
    }
    let opcode = *bytes.get(usize::from(at))?;
    let modrm = *bytes.get(usize::from(at.wrapping_add(1)))?;
    if !(0x20..=0x23).contains(&opcode) {
        return None;
    }
    Some(SystemMove {
        length: at.wrapping_add(2),
        debug: opcode & 1 != 0,
        register: (modrm >> 3) & 7 | (rex & 4) << 1 | high,
        gpr: modrm & 7 | (rex & 1) << 3,
        write: opcode & 2 != 0,
    })
}
