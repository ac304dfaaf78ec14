//! What CPUs without NRIP save and decode assists do not report: instruction lengths (the commonest
//! exits by a few compares, all others by the decoder) and the registers of MOV CR and MOV DR.

use crate::decode::{CodeSize, decode};

/// Length in bytes of the first instruction of `bytes`, 1 to 15; `None` when it does not decode.
pub fn length(bytes: &[u8], size: CodeSize) -> Option<u8> {
    match common(bytes, size) {
        Some(length) => Some(length),
        None => decode(bytes, size).ok().map(|decoded| decoded.len()),
    }
}

/// [`length`] of the instructions whose exits are hot; `None` also for all others. All 16 bytes count:
/// none of these instructions is longer than 5.
#[inline]
pub fn common_length(bytes: &[u8; 16], size: CodeSize) -> Option<u8> {
    common(bytes, size)
}

/// The instructions whose exits are hot, with at most one operand-size and one REX prefix.
#[inline]
fn common(bytes: &[u8], size: CodeSize) -> Option<u8> {
    let mut at = 0u8;
    let mut byte = *bytes.first()?;
    if byte == 0x66 {
        at = 1;
        byte = *bytes.get(1)?;
    }
    let mut rex = 0;
    if size == CodeSize::Bits64 && byte & 0xf0 == 0x40 {
        rex = byte;
        at = at.wrapping_add(1);
        byte = *bytes.get(usize::from(at))?;
    }
    let next = |n: u8| bytes.get(usize::from(at.wrapping_add(n))).copied();
    let opcode_length = match byte {
        // Two-byte opcodes.
        0x0f => match next(1)? {
            // CPUID, WRMSR, RDTSC, RDMSR, RDPMC, CLTS, INVD, WBINVD
            0xa2 | 0x30..=0x33 | 0x06 | 0x08 | 0x09 => 2,
            // VMCALL, MONITOR, MWAIT, XGETBV, XSETBV, VMRUN … INVLPGA, RDTSCP: some of these are
            // other instructions under a 66 prefix.
            0x01 if at == 0 || rex != 0 && at == 1 => match next(2)? {
                0xc1 | 0xc8 | 0xc9 | 0xd0 | 0xd1 | 0xd8..=0xdf | 0xf9 => 3,
                _ => return None,
            },
            // MOV from and to CR0, CR2, CR3, CR4, CR8: the mod field is ignored.
            0x20 | 0x22 => {
                let register = (next(2)? >> 3) & 7 | (rex & 4) << 1;
                match register {
                    0 | 2 | 3 | 4 | 8 => 3,
                    _ => return None,
                }
            }
            _ => return None,
        },
        // HLT
        0xf4 => 1,
        // IN and OUT by DX, by immediate.
        0xec..=0xef => 1,
        0xe4..=0xe7 => {
            next(1)?;
            2
        }
        // PAUSE
        0xf3 if at == 0 && next(1)? == 0x90 => 2,
        _ => return None,
    };
    at.checked_add(opcode_length)
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
