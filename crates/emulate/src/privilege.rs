//! What the guest's program may do: the privilege level, IOPL and the TSS's bitmap of ports, UMIP.
//!
//! The hardware made these checks of the instruction that led to an exit. They are made again here,
//! whatever the exit was, because the bytes are read anew: a program that has swapped them meanwhile
//! gets what the architecture gives it for the new ones, and no more. A port is reached with a
//! [`PortAccess`] alone, which IOPL and the bitmap make.

use x86::segment::kind;
use x86::{Cr0, Cr4, Exception, Gva, Rflags};

use crate::machine::{Machine, SegReg, Segment, Stop};
use crate::operand::Run;
use crate::port::PortAccess;

/// Where a TSS of 32 or 64 bits says where its bitmap begins (SDM vol. 3A fig. 8-2 and 8-11).
const BITMAP_OFFSET: u32 = 102;

impl<M: Machine> Run<'_, M> {
    /// Real mode: everything is allowed, and descriptors are not looked at.
    pub(crate) fn real(&self) -> bool {
        !self.m.cr0().contains(Cr0::PE)
    }

    /// Whether the guest is in virtual-8086 mode.
    pub(crate) fn v86(&self) -> bool {
        !self.real() && !self.m.long_mode() && self.m.rflags().contains(Rflags::VM)
    }

    /// Real or virtual-8086 mode, where selectors are paragraphs.
    pub(crate) fn real_or_v86(&self) -> bool {
        self.real() || self.v86()
    }

    /// #GP(0) but at privilege level 0.
    pub(crate) fn privileged(&self) -> Result<(), Stop> {
        // CPL in real mode is 0, so that it passes.
        if self.m.cpl() == 0 { Ok(()) } else { Err(Stop::Fault(Exception::gp(0))) }
    }

    /// SGDT, SIDT, SLDT, STR and SMSW: privileged under CR4.UMIP (SDM vol. 3A §2.5).
    pub(crate) fn umip(&self) -> Result<(), Stop> {
        if !self.m.cr4().contains(Cr4::UMIP) { Ok(()) } else { self.privileged() }
    }

    /// SDM vol. 1 §19.5: by IOPL in protected mode, by the bitmap above it and in virtual-8086 mode.
    pub(crate) fn check_port(&mut self, port: u16, size: u8) -> Result<PortAccess, Stop> {
        let iopl = self.m.rflags().iopl();
        // In virtual-8086 mode the bitmap decides whatever IOPL says (SDM vol. 1 §19.5.2).
        let by_level = self.real() || !self.v86() && self.m.cpl() <= iopl;
        PortAccess::check(port, size, by_level, || self.bitmap_allows(port, size))?
            .ok_or(Stop::Fault(Exception::gp(0)))
    }

    fn bitmap_allows(&mut self, port: u16, size: u8) -> Result<bool, Stop> {
        let tss = self.m.segment(SegReg::Tr);
        let wide = matches!(tss.kind(), kind::TSS_AVAILABLE | kind::TSS_BUSY);
        // Without a 32-bit TSS there is no bitmap, and so no right.
        if !wide || !tss.has(Segment::PRESENT) || tss.limit <= BITMAP_OFFSET {
            return Ok(false);
        }
        let mut two = [0; 2];
        self.read_system(tss.base, BITMAP_OFFSET.into(), &mut two)?;
        // Two bytes are read whatever the size, so that an access may lie in both.
        let first = u32::from(u16::from_le_bytes(two)).wrapping_add(u32::from(port >> 3));
        if first.wrapping_add(1) > tss.limit {
            return Ok(false);
        }
        self.read_system(tss.base, first.into(), &mut two)?;
        let bits = u32::from(u16::from_le_bytes(two)) >> (port & 7);
        // One bit for each byte: all of them have to be clear.
        let ports = 1u32.wrapping_shl(size.into()).wrapping_sub(1);
        Ok(bits & ports == 0)
    }

    /// Reads a table or a TSS, as the processor does for itself: with supervisor's rights.
    pub(crate) fn read_system(
        &mut self,
        base: u64,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Stop> {
        let at = self.system_address(base, offset);
        let first = into.len().min(crate::operand::to_page_end(at));
        // Beside the first part's page may lie another translation, or none.
        let next = self.system_address(at, first as u64);
        let Some((low, high)) = into.split_at_mut_checked(first) else { return Ok(()) };
        self.m.read_system(Gva(at), low)?;
        if high.is_empty() { Ok(()) } else { self.m.read_system(Gva(next), high) }
    }

    pub(crate) fn write_system(&mut self, base: u64, offset: u64, data: &[u8]) -> Result<(), Stop> {
        let at = self.system_address(base, offset);
        let first = data.len().min(crate::operand::to_page_end(at));
        let next = self.system_address(at, first as u64);
        let Some((low, high)) = data.split_at_checked(first) else { return Ok(()) };
        self.m.write_system(Gva(at), low)?;
        if high.is_empty() { Ok(()) } else { self.m.write_system(Gva(next), high) }
    }

    /// Faults as a write of a table or a TSS would.
    pub(crate) fn probe_system(&mut self, base: u64, len: u32) -> Result<(), Stop> {
        let at = self.system_address(base, 0);
        self.m.probe_system(Gva(at))?;
        let last = self.system_address(at, len.saturating_sub(1).into());
        self.m.probe_system(Gva(last))
    }

    pub(crate) fn system_address(&self, base: u64, offset: u64) -> u64 {
        let at = base.wrapping_add(offset);
        if self.m.long_mode() { at } else { at & 0xffff_ffff }
    }
}
