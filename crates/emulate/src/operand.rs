//! Operands: effective addresses, segmentation, and reads and writes of registers and memory.
//! Accesses are split at page borders here, and LOCK's read-modify-write loop lives here.
//!
//! SDM vol. 1 §3.7, vol. 3A §5.3 and §3.3.7.1.
//!
//! Why accesses are split at page borders: each side has its own translation and rights, and one may be memory and the
//! other a device. Nothing is written to the first before the second is known to be writable.
//!
//! Why a locked update gives up after some attempts: the VMM, or another vCPU, can write to that word without end. The
//! vCPU then looks at signals and begins again, so that a thread stuck here can still be killed.

use iced_x86::{Instruction, OpKind, Register};
use x86::addr::PAGE_SIZE;
use x86::{Cr0, Cr4, Exception, Gva, Rflags};

use crate::decode::immediate;
use crate::machine::{Access, CodeSize, Machine, SegReg, Segment, Stop};
use crate::register::{RegRef, segment_of, sign_extend, size_mask};

/// How often a locked update that lost a race is tried again before the vCPU gets a say.
pub(crate) const LOCK_TRIES: u32 = 16;

/// One instruction in execution.
pub(crate) struct Run<'a, M: Machine> {
    pub(crate) m: &'a mut M,
    pub(crate) insn: &'a Instruction,
    pub(crate) size: CodeSize,
    /// RFLAGS: as before the instruction, then with its results.
    pub(crate) flags: Rflags,
    /// RIP of the next instruction; branches change it.
    pub(crate) next_rip: u64,
    /// The instruction blocks interrupts after itself (MOV SS, POP SS).
    pub(crate) interrupt_shadow: bool,
    /// Which instructions are executed.
    pub(crate) scope: Scope,
}

/// When an update of memory is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lock {
    /// With a LOCK prefix.
    IfPrefixed,
    /// With or without.
    Always,
}

/// Which instructions are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Those that an exit may have been made for.
    Exits,
    /// The others too.
    All,
}

/// Where an operand lives: checked, and addressed linearly if in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Reg(RegRef),
    Mem { at: u64, size: u8 },
}

impl Place {
    pub(crate) const fn size(self) -> u8 {
        match self {
            Self::Reg(reg) => reg.size,
            Self::Mem { size, .. } => size,
        }
    }
}

impl<M: Machine> Run<'_, M> {
    pub(crate) fn long(&self) -> bool {
        self.size == CodeSize::Bits64
    }

    pub(crate) fn reg(&self, reg: RegRef) -> u64 {
        reg.extract(self.m.gpr(usize::from(reg.index)))
    }

    pub(crate) fn set_reg(&mut self, reg: RegRef, value: u64) {
        let index = usize::from(reg.index);
        let whole = reg.insert(self.m.gpr(index), value);
        self.m.set_gpr(index, whole);
    }

    /// Replaces the status flags in `mask` by those of `new`.
    pub(crate) fn set_flags(&mut self, mask: Rflags, new: Rflags) {
        self.flags = (self.flags - mask) | (new & mask);
    }

    /// #SS(0) for the stack segment, #GP(0) for the others.
    pub(crate) fn segment_fault(segment: SegReg) -> Stop {
        Stop::Fault(match segment {
            SegReg::Ss => Exception::ss(0),
            _ => Exception::gp(0),
        })
    }

    pub(crate) fn canonical(&self, at: u64) -> bool {
        // By the paging mode that is on, not by what CPUID offers.
        let width = if self.m.cr4().contains(Cr4::LA57) { 57 } else { 48 };
        let unused = 64 - width;
        ((at << unused) as i64 >> unused) as u64 == at
    }

    /// The linear address of `size` bytes at `segment:offset`, after the segment's checks.
    pub(crate) fn linear(
        &self,
        segment: SegReg,
        offset: u64,
        size: u8,
        how: Access,
    ) -> Result<u64, Stop> {
        let last = u64::from(size.saturating_sub(1));
        let at = if self.long() {
            let base = match segment {
                SegReg::Fs | SegReg::Gs => self.m.segment(segment).base,
                _ => 0,
            };
            let at = base.wrapping_add(offset);
            // Both ends: an access may begin in canonical space and leave it (SDM vol. 1 §3.3.7.1).
            if !self.canonical(at) || !self.canonical(at.wrapping_add(last)) {
                return Err(Self::segment_fault(segment));
            }
            at
        } else {
            let hidden = self.m.segment(segment);
            let offset = offset & 0xffff_ffff;
            if !within_limit(&hidden, offset, last)
                || !self.real_or_v86() && !accessible(&hidden, how)
            {
                return Err(Self::segment_fault(segment));
            }
            // Linear addresses wrap at 4 GiB outside of 64-bit mode.
            hidden.base.wrapping_add(offset) & 0xffff_ffff
        };
        // AC is rarely set, so it is looked at first.
        if self.flags.contains(Rflags::AC)
            && at & last != 0
            && size.is_power_of_two()
            && self.m.cpl() == 3
            && self.m.cr0().contains(Cr0::AM)
        {
            return Err(Stop::Fault(Exception::ac()));
        }
        Ok(at)
    }

    fn address_register(&self, register: Register) -> u64 {
        RegRef::of(register).map_or(0, |reg| self.reg(reg))
    }

    /// The offset within its segment of the explicit memory operand, truncated to the address
    /// size. `rsp_moved` is added to RSP where it is the base (POP to memory), `displaced` to the
    /// offset (BT with a register).
    pub(crate) fn effective_offset(&self, rsp_moved: u64, displaced: u64) -> u64 {
        let insn = self.insn;
        let base = insn.memory_base();
        let index = insn.memory_index();
        let displacement = insn.memory_displacement64().wrapping_add(displaced);
        if matches!(base, Register::RIP | Register::EIP) {
            // Decoded with the instruction at 0, so the displacement holds its length already.
            let at = self.m.rip().wrapping_add(displacement);
            return if base == Register::EIP { at & 0xffff_ffff } else { at };
        }
        let mut at = displacement;
        if base != Register::None {
            at = at.wrapping_add(self.address_register(base));
            if matches!(base, Register::SP | Register::ESP | Register::RSP) {
                at = at.wrapping_add(rsp_moved);
            }
        }
        if index != Register::None {
            let scale = u64::from(insn.memory_index_scale());
            at = at.wrapping_add(self.address_register(index).wrapping_mul(scale));
        }
        // XLAT's index is AL: the base tells the address size.
        // The registers tell it: the decoder has read the address-size prefix.
        let address_size = match RegRef::of(base).or_else(|| RegRef::of(index)) {
            Some(reg) => reg.size,
            None => match insn.memory_displ_size() {
                2 => 2,
                4 => 4,
                _ if self.long() => 8,
                _ => 4,
            },
        };
        at & size_mask(address_size)
    }

    /// The segment of a memory operand whose default is `default`.
    pub(crate) fn effective_segment(&self, default: SegReg) -> SegReg {
        match segment_of(self.insn.segment_prefix()) {
            // In 64-bit mode the other prefixes are ignored.
            Some(segment) if !self.long() || matches!(segment, SegReg::Fs | SegReg::Gs) => segment,
            _ => default,
        }
    }

    pub(crate) fn operand_segment(&self) -> SegReg {
        let default = match self.insn.memory_base() {
            // R12 and R13 are not among them: their default is DS.
            Register::BP | Register::EBP | Register::RBP => SegReg::Ss,
            Register::SP | Register::ESP | Register::RSP => SegReg::Ss,
            _ => SegReg::Ds,
        };
        self.effective_segment(default)
    }

    /// The explicit memory operand as a place of `size` bytes.
    pub(crate) fn memory(
        &self,
        size: u8,
        rsp_moved: u64,
        displaced: u64,
        how: Access,
    ) -> Result<Place, Stop> {
        let offset = self.effective_offset(rsp_moved, displaced);
        let at = self.linear(self.operand_segment(), offset, size, how)?;
        Ok(Place::Mem { at, size })
    }

    /// Bytes of the memory operand, 1 to 8.
    pub(crate) fn memory_bytes(&self) -> Result<u8, Stop> {
        match self.insn.memory_size().size() {
            size @ (1 | 2 | 4 | 8) => Ok(size as u8),
            _ => Err(Stop::Unsupported),
        }
    }

    /// Operand `n` as a place: a general register or memory.
    pub(crate) fn place(&self, n: u32, how: Access) -> Result<Place, Stop> {
        match self.insn.op_kind(n) {
            OpKind::Register => {
                RegRef::of(self.insn.op_register(n)).map(Place::Reg).ok_or(Stop::Unsupported)
            }
            OpKind::Memory => self.memory(self.memory_bytes()?, 0, 0, how),
            _ => Err(Stop::Unsupported),
        }
    }

    /// The value of operand `n`: register, memory or immediate.
    pub(crate) fn value(&mut self, n: u32) -> Result<u64, Stop> {
        match self.insn.op_kind(n) {
            OpKind::Register | OpKind::Memory => {
                let place = self.place(n, Access::Load)?;
                self.load(place)
            }
            kind => immediate(self.insn, kind).ok_or(Stop::Unsupported),
        }
    }

    /// The value at a place.
    pub(crate) fn load(&mut self, place: Place) -> Result<u64, Stop> {
        match place {
            Place::Reg(reg) => Ok(self.reg(reg)),
            Place::Mem { at, size } => self.read(at, size, Access::Load),
        }
    }

    /// Sets the value at a place.
    pub(crate) fn store(&mut self, place: Place, value: u64) -> Result<(), Stop> {
        match place {
            Place::Reg(reg) => {
                self.set_reg(reg, value);
                Ok(())
            }
            Place::Mem { at, size } => self.write(at, size, value, Access::Store),
        }
    }

    /// Replaces the value at `place` by `change(old)`, atomically if it is locked,
    /// and RAM within one page. Faults come as for a write before anything is read. Returns the
    /// old value.
    pub(crate) fn modify(
        &mut self,
        place: Place,
        lock: Lock,
        change: impl Fn(u64) -> u64,
    ) -> Result<u64, Stop> {
        let (at, size) = match place {
            Place::Reg(reg) => {
                let old = self.reg(reg);
                self.set_reg(reg, change(old));
                return Ok(old);
            }
            Place::Mem { at, size } => (at, size),
        };
        // A read-modify-write faults as a write, before its read can reach a device.
        self.probe(at, usize::from(size))?;
        // A lock across pages (a split lock) is not atomic here.
        if !(lock == Lock::Always || self.insn.has_lock_prefix())
            || crosses_page(at, usize::from(size))
        {
            let old = self.read(at, size, Access::Modify)?;
            self.write(at, size, change(old), Access::Modify)?;
            return Ok(old);
        }
        for _ in 0..LOCK_TRIES {
            // Read anew for each try: what another CPU has stored is what has to be changed.
            let old = self.read(at, size, Access::Modify)?;
            if self.exchange(at, size, old, change(old))? {
                return Ok(old);
            }
        }
        Err(Stop::Retry)
    }

    pub(crate) fn exchange(&mut self, at: u64, size: u8, old: u64, new: u64) -> Result<bool, Stop> {
        let (old, new) = (old.to_le_bytes(), new.to_le_bytes());
        let size = usize::from(size);
        match (old.get(..size), new.get(..size)) {
            (Some(old), Some(new)) => self.m.cmpxchg(Gva(at), old, new),
            _ => Err(Stop::Unsupported),
        }
    }

    /// The linear address `by` bytes after `at`; outside 64-bit mode it wraps at 4 GiB.
    pub(crate) fn after(&self, at: u64, by: usize) -> u64 {
        let next = at.wrapping_add(by as u64);
        if self.long() { next } else { next & 0xffff_ffff }
    }

    /// Faults as a write of `len` bytes would.
    pub(crate) fn probe(&mut self, at: u64, len: usize) -> Result<(), Stop> {
        let first = len.min(to_page_end(at));
        // In the order of the addresses: CR2 shows the first that fails.
        self.m.probe_write(Gva(at), first)?;
        if first < len {
            let rest = len.wrapping_sub(first);
            self.m.probe_write(Gva(self.after(at, first)), rest)?;
        }
        Ok(())
    }

    pub(crate) fn read(&mut self, at: u64, size: u8, how: Access) -> Result<u64, Stop> {
        let mut bytes = [0u8; 8];
        if let Some(part) = bytes.get_mut(..usize::from(size)) {
            self.read_bytes(at, part, how)?;
        }
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads `into.len()` (at most 8) bytes, in two accesses if they cross a page.
    pub(crate) fn read_bytes(&mut self, at: u64, into: &mut [u8], how: Access) -> Result<(), Stop> {
        let first = into.len().min(to_page_end(at));
        match into.split_at_mut_checked(first) {
            Some((low, high)) => {
                self.m.read(Gva(at), low, how)?;
                // In the order of the addresses, as the CPU has it: a fault shows the first page
                // that fails.
                if !high.is_empty() {
                    self.m.read(Gva(self.after(at, first)), high, how)?;
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub(crate) fn write(&mut self, at: u64, size: u8, value: u64, how: Access) -> Result<(), Stop> {
        let bytes = value.to_le_bytes();
        match bytes.get(..usize::from(size)) {
            Some(bytes) => self.write_bytes(at, bytes, how),
            None => Ok(()),
        }
    }

    /// Writes `data`; across a page (at most 8 bytes) nothing is written unless all of it can be.
    pub(crate) fn write_bytes(&mut self, at: u64, data: &[u8], how: Access) -> Result<(), Stop> {
        let first = data.len().min(to_page_end(at));
        match data.split_at_checked(first) {
            Some((low, high)) if !high.is_empty() => {
                self.probe(at, data.len())?;
                let (low_at, high_at) = (Gva(at), Gva(self.after(at, first)));
                // If one half is a device, a replay follows and must find the RAM half untouched.
                if self.m.is_writable_ram(low_at, low.len())? {
                    self.m.write(high_at, high, how)?;
                    self.m.write(low_at, low, how)
                } else {
                    self.m.write(low_at, low, how)?;
                    self.m.write(high_at, high, how)
                }
            }
            // One page: its own write faults before it stores anything.
            _ => self.m.write(Gva(at), data, how),
        }
    }

    /// Sets RIP to a near branch's target of `size` bytes.
    pub(crate) fn branch(&mut self, target: u64, size: u8) -> Result<(), Stop> {
        // A branch with 16-bit operands clears the upper bits of RIP (SDM vol. 2A, JMP).
        let target = target & size_mask(size);
        let reachable = if self.long() {
            self.canonical(target)
        } else {
            // The first byte alone: the fetch looks at the others.
            target <= u64::from(self.m.segment(SegReg::Cs).limit)
        };
        if !reachable {
            return Err(Stop::Fault(Exception::gp(0)));
        }
        self.next_rip = target;
        Ok(())
    }

    /// The operand size as the manual's "sign-extended to the operand size" means it.
    pub(crate) fn signed(value: u64, size: u8) -> u64 {
        sign_extend(value, size)
    }
}

/// Bytes from `at` to the end of its page, 1 to 4096.
pub(crate) const fn to_page_end(at: u64) -> usize {
    (PAGE_SIZE - (at & (PAGE_SIZE - 1))) as usize
}

pub(crate) const fn crosses_page(at: u64, len: usize) -> bool {
    len > to_page_end(at)
}

fn within_limit(segment: &Segment, offset: u64, last: u64) -> bool {
    // Of 32 bits and a few more: it cannot wrap in 64.
    let end = offset.wrapping_add(last);
    let limit = u64::from(segment.limit);
    // Such a segment begins behind its limit; its end depends on B (SDM vol. 3A §3.4.5).
    if segment.has(Segment::EXPAND_DOWN) && !segment.has(Segment::CODE) {
        let top = if segment.has(Segment::BIG) { 0xffff_ffff } else { 0xffff };
        offset > limit && end <= top
    } else {
        end <= limit
    }
}

fn accessible(segment: &Segment, how: Access) -> bool {
    // Bit 1 of the type is "writable" for data and "readable" for code.
    segment.has(Segment::PRESENT)
        && match (segment.has(Segment::CODE), how) {
            (false, Access::Load) => true,
            (true, Access::Store | Access::Modify) => false,
            _ => segment.has(Segment::ACCESSIBLE_TYPE),
        }
}
