//! Instructions that flush translations: INVLPG and INVPCID in the emulator, and the address of an
//! INVLPG in 64-bit mode without it, which is what an exit of a busy guest needs.
//!
//! APM vol. 3, INVLPG and INVPCID.

use x86::{Exception, Gva};

use crate::machine::{Access, CodeSize, Machine, SegReg, Stop};
use crate::operand::Run;
use crate::register::RegRef;
use crate::system::Aligned;

impl<M: Machine> Run<'_, M> {
    /// INVLPG. Its address is not checked: one that is not canonical flushes nothing.
    pub(crate) fn invlpg(&mut self) -> Result<(), Stop> {
        self.privileged()?;
        let segment = self.operand_segment();
        let offset = self.effective_offset(0, 0);
        let at = if self.long() {
            match segment {
                SegReg::Fs | SegReg::Gs => self.m.segment(segment).base.wrapping_add(offset),
                _ => offset,
            }
        } else {
            self.m.segment(segment).base.wrapping_add(offset) & 0xffff_ffff
        };
        self.m.invlpg(Gva(at))
    }

    /// INVPCID: the type in a register, the descriptor of 16 bytes in memory.
    pub(crate) fn invpcid(&mut self) -> Result<(), Stop> {
        self.privileged()?;
        let kind = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let kind = self.reg(kind);
        // Read for every type, also for those that need nothing of it (SDM vol. 2A, INVPCID).
        let at = self.vector_place(16, Aligned::Any, Access::Load)?;
        let descriptor = self.vector_load(at, 16)?;
        let (pcid, address) = (descriptor as u64, (descriptor >> 64) as u64);
        if kind > 3 || pcid >> 12 != 0 {
            return Err(Stop::Fault(Exception::gp(0)));
        }
        self.m.invpcid(kind as u8, pcid as u16, Gva(address))
    }
}

/// An INVLPG with its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invlpg {
    /// Length of the instruction in bytes.
    pub length: u8,
    base: Option<u8>,
    index: Option<u8>,
    scale: u8,
    /// The base is the next instruction.
    relative: bool,
    displacement: i32,
}

impl Invlpg {
    /// The linear address. `gpr` gives a general register by index, `rip` is the instruction's.
    #[inline]
    pub fn address(&self, gpr: impl Fn(usize) -> u64, rip: u64) -> u64 {
        let mut at = self.displacement as u64;
        if let Some(base) = self.base {
            at = at.wrapping_add(gpr(usize::from(base)));
        }
        if let Some(index) = self.index {
            at = at.wrapping_add(gpr(usize::from(index)) << (self.scale & 3));
        }
        if self.relative {
            at = at.wrapping_add(rip).wrapping_add(u64::from(self.length));
        }
        at
    }
}

/// Decodes INVLPG in 64-bit mode without any table. `None` for everything else, with a segment or
/// address-size prefix too.
pub fn invlpg(bytes: &[u8], size: CodeSize) -> Option<Invlpg> {
    let byte = |n: u8| bytes.get(usize::from(n)).copied();
    if size != CodeSize::Bits64 {
        return None;
    }
    let (rex, at) = match byte(0)? {
        rex @ 0x40..=0x4f => (rex, 1),
        _ => (0, 0),
    };
    // A missing byte is no INVLPG: the caller then decodes with all that there is.
    let modrm = byte(at + 2)?;
    let (mode, register) = (modrm >> 6, modrm & 7);
    if (byte(at)?, byte(at + 1)?) != (0x0f, 0x01) || modrm >> 3 & 7 != 7 || mode == 3 {
        return None;
    }
    let mut next = at + 3;
    let (mut base, mut index, mut scale, mut relative) = (Some(register), None, 0, false);
    if register == 4 {
        let sib = byte(next)?;
        next += 1;
        base = Some(sib & 7);
        let n = sib >> 3 & 7 | (rex & 2) << 2;
        // RSP is no index.
        index = (n != 4).then_some(n);
        scale = sib >> 6;
        if mode == 0 && sib & 7 == 5 {
            base = None;
        }
    } else if mode == 0 && register == 5 {
        (base, relative) = (None, true);
    }
    let displacement = match mode {
        1 => i32::from(byte(next)? as i8),
        0 if base.is_some() => 0,
        _ => i32::from_le_bytes([byte(next)?, byte(next + 1)?, byte(next + 2)?, byte(next + 3)?]),
    };
    let length = match mode {
        1 => next + 1,
        0 if base.is_some() => next,
        _ => next + 4,
    };
    let base = base.map(|n| n | (rex & 1) << 3);
    Some(Invlpg { length, base, index, scale, relative, displacement })
}
