//! Descriptors: loads of segment registers, LDTR and TR, far transfers at the same privilege level, and
//! the two table registers.
//!
//! SDM vol. 3A §5.4 to §5.8 (checks), §3.4.5 (descriptors); vol. 2, MOV, LLDT, LTR, JMP, CALL, RET.
//!
//! Why the order of the checks matters: each has an exception of its own, and a guest's handler acts by which one
//! comes. Why the accessed bit is written before the register changes: it lies in guest memory, and the write may
//! fault or be refused. If the register were loaded by then, the instruction would have half happened.

use iced_x86::{Code, OpKind};
use x86::Exception;
use x86::segment::{DescriptorTable, kind};

use crate::machine::{Access, Machine, SegReg, Segment, Stop, Table};
use crate::operand::{Place, Run};
use crate::register::{RegRef, size_mask};
use crate::system::Aligned;

const TABLE_INDICATOR: u16 = 1 << 2;
const RPL: u16 = 3;
/// Where the attributes begin in a descriptor's 8 bytes.
const TYPE_BYTE: u64 = 5;
const RSP: usize = 4;

/// A descriptor that was read, and where it lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) segment: Segment,
    raw: u64,
    at: u64,
}

/// Why a segment is loaded: by an instruction, or with a new task at this privilege level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    Instruction,
    Task { cpl: u8 },
}

impl Load {
    /// The fault of a descriptor that does not fit.
    fn fault(self, selector: u16) -> Stop {
        let code = error_code(selector);
        Stop::Fault(match self {
            Self::Instruction => Exception::gp(code),
            Self::Task { .. } => Exception::ts(code),
        })
    }
}

/// A selector as an error code shows it.
pub(crate) const fn error_code(selector: u16) -> u32 {
    // The table indicator stays: the error code has it in the same place (SDM vol. 3A §6.13).
    (selector & !RPL) as u32
}

pub(crate) const fn rpl(selector: u16) -> u8 {
    (selector & RPL) as u8
}

pub(crate) const fn is_null(selector: u16) -> bool {
    selector & !RPL == 0
}

impl Found {
    /// Linear address of the byte that [`Run::mark`] writes.
    pub(crate) const fn place(&self) -> u64 {
        self.at.wrapping_add(TYPE_BYTE) & 0xffff_ffff
    }
}

/// How an instruction goes elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Branch {
    /// JMP, for good.
    Jmp,
    /// CALL, which pushes where it comes back to.
    Call,
}

impl<M: Machine> Run<'_, M> {
    /// The descriptor of a selector that is not null. `None`: it lies beyond its table.
    pub(crate) fn descriptor(&mut self, selector: u16) -> Result<Option<Found>, Stop> {
        let (base, limit) = if selector & TABLE_INDICATOR == 0 {
            let table = self.m.table(Table::Global);
            (table.base, u32::from(table.limit))
        } else {
            let table = self.m.segment(SegReg::Ldtr);
            // A null LDTR has no table at all (SDM vol. 3A §2.4.2).
            if !table.has(Segment::PRESENT) {
                return Ok(None);
            }
            (table.base, table.limit)
        };
        let offset = u32::from(selector & !7);
        // All eight bytes have to lie within: the limit is that of the last byte.
        if offset.wrapping_add(7) > limit {
            return Ok(None);
        }
        let mut bytes = [0; 8];
        // One read: what is checked is what is loaded, whatever another CPU stores there.
        self.read_system(base, offset.into(), &mut bytes)?;
        let raw = u64::from_le_bytes(bytes);
        // Where it was read is kept: the accessed bit goes there, and the guest may move its table
        // meanwhile.
        let at = self.system_address(base, offset.into());
        Ok(Some(Found { segment: Segment::of(selector, raw), raw, at }))
    }

    /// The upper 8 bytes of a system descriptor in long mode: its base's upper half.
    fn upper_base(&mut self, found: &mut Found, selector: u16) -> Result<(), Stop> {
        if !self.m.long_mode() {
            return Ok(());
        }
        let refused = Stop::Fault(Exception::gp(error_code(selector)));
        let limit = u32::from(self.m.table(Table::Global).limit);
        // Sixteen bytes in long mode: the entry behind belongs to this descriptor (SDM vol. 3A
        // §8.2.3).
        if u32::from(selector & !7).wrapping_add(15) > limit {
            return Err(refused);
        }
        let mut bytes = [0; 8];
        self.read_system(found.at, 8, &mut bytes)?;
        let upper = u64::from_le_bytes(bytes);
        found.segment.base = found.segment.base & 0xffff_ffff | upper << 32;
        // The type field of the upper half has to be 0.
        if upper >> 40 & 0x1f != 0 || !self.canonical(found.segment.base) {
            return Err(refused);
        }
        Ok(())
    }

    /// Sets bits of a descriptor's type in memory, if they are not set.
    pub(crate) fn mark(&mut self, found: &mut Found, set: u8, clear: u8) -> Result<(), Stop> {
        // The byte as it was read: what is checked and what is marked are one value.
        let old = (found.raw >> 40) as u8;
        let new = (old | set) & !clear;
        // A descriptor that is accessed already is not written: it may lie in read-only memory.
        if new != old {
            self.write_system(found.at, TYPE_BYTE, &[new])?;
            found.segment.attributes = (found.segment.attributes & 0xff00) | u16::from(new);
        }
        Ok(())
    }

    /// Loads a data segment's register as MOV and POP do; CS is loaded by far transfers alone.
    pub(crate) fn load_segment(&mut self, segment: SegReg, selector: u16) -> Result<(), Stop> {
        // MOV to CS is #UD, and POP CS does not exist (SDM vol. 2B, MOV).
        if segment == SegReg::Cs {
            return Err(Stop::Fault(Exception::ud()));
        }
        let value = if self.real_or_v86() {
            self.paragraphs(segment, selector)
        } else {
            self.protected(segment, selector, Load::Instruction)?
        };
        // Behind everything that can fault.
        self.m.set_segment(segment, value);
        // MOV SS and POP SS hold interrupts off for one instruction.
        self.interrupt_shadow = segment == SegReg::Ss;
        Ok(())
    }

    /// A segment of real mode, where limit and rights stay as they are, or of virtual-8086 mode.
    pub(crate) fn paragraphs(&self, segment: SegReg, selector: u16) -> Segment {
        let base = u64::from(selector) << 4;
        if self.v86() {
            return v86_segment(selector);
        }
        // Limit and rights stay, which is what makes "unreal" mode work.
        Segment { selector, base, ..self.m.segment(segment) }
    }

    /// The segment that a selector names for a data register, checked.
    pub(crate) fn protected(
        &mut self,
        segment: SegReg,
        selector: u16,
        load: Load,
    ) -> Result<Segment, Stop> {
        let cpl = match load {
            Load::Instruction => self.m.cpl(),
            Load::Task { cpl } => cpl,
        };
        let stack = segment == SegReg::Ss;
        if is_null(selector) {
            if !stack {
                // Loaded without a fault; the first use of it is one (SDM vol. 3A §5.4.1).
                return Ok(Segment { selector, ..Segment::default() });
            }
            // A null SS exists in 64-bit mode below level 3.
            if self.long() && cpl < 3 && rpl(selector) == cpl && load == Load::Instruction {
                return Ok(Segment { selector, ..Segment::default() }.with_dpl(cpl));
            }
            return Err(load.fault(0));
        }
        let refused = load.fault(selector);
        let mut found = self.descriptor(selector)?.ok_or(refused)?;
        let s = found.segment;
        let code = s.has(Segment::CODE);
        // SS has to be writable and of exactly this level; a conforming code segment has no
        // level as data (SDM vol. 3A §5.6, §5.7).
        let fits = s.has(Segment::S)
            && if stack {
                !code && s.has(Segment::ACCESSIBLE_TYPE) && rpl(selector) == cpl && s.dpl() == cpl
            } else {
                (!code || s.has(Segment::ACCESSIBLE_TYPE))
                    && (code && s.has(Segment::CONFORMING)
                        || rpl(selector) <= s.dpl() && cpl <= s.dpl())
            };
        if !fits {
            return Err(refused);
        }
        // After the type: a segment that could not be loaded anyway is #GP, not #NP (SDM vol. 2B,
        // MOV).
        if !s.has(Segment::PRESENT) {
            let code = error_code(selector);
            return Err(Stop::Fault(if stack { Exception::ss(code) } else { Exception::np(code) }));
        }
        // Last of all that can fault, and before the register changes.
        self.mark(&mut found, Segment::ACCESSED as u8, 0)?;
        Ok(found.segment)
    }

    /// LLDT and LTR.
    pub(crate) fn load_system(&mut self, register: SegReg) -> Result<(), Stop> {
        if self.real_or_v86() {
            return Err(Stop::Fault(Exception::ud()));
        }
        // Before the operand is read: a program without the right is not to see a page fault of it.
        self.privileged()?;
        let selector = self.value(0)? as u16;
        if is_null(selector) {
            if register == SegReg::Tr {
                return Err(Stop::Fault(Exception::gp(0)));
            }
            self.m.set_segment(register, Segment { selector, ..Segment::default() });
            return Ok(());
        }
        let refused = Stop::Fault(Exception::gp(error_code(selector)));
        // Both are found in the GDT alone (SDM vol. 2A, LLDT and LTR).
        if selector & TABLE_INDICATOR != 0 {
            return Err(refused);
        }
        let mut found = self.descriptor(selector)?.ok_or(refused)?;
        let fits = match (register, found.segment.kind()) {
            (SegReg::Ldtr, kind::LDT) | (SegReg::Tr, kind::TSS_AVAILABLE) => true,
            // Long mode has no TSS of 16 bits.
            (SegReg::Tr, kind::TSS16_AVAILABLE) => !self.m.long_mode(),
            _ => false,
        };
        if found.segment.has(Segment::S) || !fits {
            return Err(refused);
        }
        if !found.segment.has(Segment::PRESENT) {
            return Err(Stop::Fault(Exception::np(error_code(selector))));
        }
        // Behind the present bit: the manual's order, and the upper half may lie on another page.
        self.upper_base(&mut found, selector)?;
        if register == SegReg::Tr {
            // A TSS that is busy already was refused above: it would be a task that calls itself.
            self.mark(&mut found, BUSY, 0)?;
        }
        self.m.set_segment(register, found.segment);
        Ok(())
    }

    /// SLDT and STR.
    pub(crate) fn store_system(&mut self, register: SegReg) -> Result<(), Stop> {
        if self.real_or_v86() {
            return Err(Stop::Fault(Exception::ud()));
        }
        // Before the destination is looked at: a program without the right learns nothing of it.
        self.umip()?;
        let to = self.place(0, Access::Store)?;
        let selector = self.m.segment(register).selector;
        self.store(to, selector.into())
    }

    /// SGDT and SIDT: 16 bits of limit, then the base.
    pub(crate) fn store_table(&mut self, table: Table) -> Result<(), Stop> {
        self.umip()?;
        let DescriptorTable { base, limit } = self.m.table(table);
        let size: u8 = if self.long() { 10 } else { 6 };
        let at = self.vector_place(size, Aligned::Any, Access::Store)?;
        // Both parts or none: the limit must not be written if the base cannot be.
        self.probe(at, size.into())?;
        self.write(at, 2, limit.into(), Access::Store)?;
        self.write(self.after(at, 2), size.wrapping_sub(2), base, Access::Store)
    }

    /// LGDT and LIDT.
    pub(crate) fn load_table(&mut self, table: Table) -> Result<(), Stop> {
        self.privileged()?;
        let size: u8 = if self.long() { 10 } else { 6 };
        // One address for both parts, so that the segment's limit is checked for all of them.
        let at = self.vector_place(size, Aligned::Any, Access::Load)?;
        let limit = self.read(at, 2, Access::Load)? as u16;
        let base = self.read(self.after(at, 2), size.wrapping_sub(2), Access::Load)?;
        let base = match self.insn.code() {
            // With 16-bit operands the base has 24 bits.
            Code::Lgdt_m1632_16 | Code::Lidt_m1632_16 => base & 0xff_ffff,
            _ => base,
        };
        // Outside of 64-bit mode the base has 32 bits, which are canonical.
        if self.long() && !self.canonical(base) {
            return Err(Stop::Fault(Exception::gp(0)));
        }
        self.m.set_table(table, DescriptorTable { base, limit });
        Ok(())
    }

    /// The far pointer in memory: selector and offset of `size` bytes.
    pub(crate) fn far_pointer(&mut self, size: u8) -> Result<(u16, u64), Stop> {
        let Place::Mem { at, .. } = self.memory(size.wrapping_add(2), 0, 0, Access::Load)? else {
            return Err(Stop::Unsupported);
        };
        // Ten bytes do not fit one access.
        if size == 8 {
            let offset = self.read(at, 8, Access::Load)?;
            return Ok((self.read(self.after(at, 8), 2, Access::Load)? as u16, offset));
        }
        // One access where one can hold it.
        let pointer = self.read(at, size.wrapping_add(2), Access::Load)?;
        let bits = u32::from(size).wrapping_mul(8);
        Ok((pointer.wrapping_shr(bits) as u16, pointer & size_mask(size)))
    }

    /// JMP and CALL through a far pointer in memory, to code of the same privilege level.
    pub(crate) fn far(&mut self, kind: Branch) -> Result<(), Stop> {
        let size = match self.insn.code() {
            Code::Jmp_m1616 | Code::Call_m1616 => 2,
            Code::Jmp_m1632 | Code::Call_m1632 => 4,
            Code::Jmp_m1664 | Code::Call_m1664 => 8,
            _ => return Err(Stop::Unsupported),
        };
        let (selector, offset) = self.far_pointer(size)?;
        self.far_transfer(selector, offset, size, kind)
    }

    /// JMP or CALL to `selector:offset`; a CALL pushes words of `size` bytes.
    pub(crate) fn far_transfer(
        &mut self,
        selector: u16,
        offset: u64,
        size: u8,
        kind: Branch,
    ) -> Result<(), Stop> {
        // Checked whole before anything is pushed: a target that cannot be reached leaves the stack
        // as it is.
        let cs = self.code_target(selector, offset, None)?;
        if kind == Branch::Call {
            let old = self.m.segment(SegReg::Cs).selector;
            self.push_two(old.into(), self.next_rip, size)?;
        }
        self.m.set_segment(SegReg::Cs, cs);
        self.next_rip = offset;
        Ok(())
    }

    /// RET to another segment of the same privilege level.
    pub(crate) fn far_return(&mut self) -> Result<(), Stop> {
        let size = match self.insn.code() {
            Code::Retfw | Code::Retfw_imm16 => 2,
            Code::Retfd | Code::Retfd_imm16 => 4,
            Code::Retfq | Code::Retfq_imm16 => 8,
            _ => return Err(Stop::Unsupported),
        };
        let released = match self.insn.op0_kind() {
            OpKind::Immediate16 if self.insn.op_count() == 1 => self.insn.immediate16(),
            _ => 0,
        };
        // Read, not popped: the stack pointer moves when nothing can fault any more.
        let offset = self.peek_at(0, size)?;
        let selector = self.peek_at(size.into(), size)? as u16;
        let cs = self.code_target(selector, offset, Some(rpl(selector)))?;
        self.m.set_segment(SegReg::Cs, cs);
        self.next_rip = offset;
        // Last: what faults above finds the stack as it was.
        self.pop_bytes(u64::from(size).wrapping_mul(2).wrapping_add(released.into()));
        Ok(())
    }

    /// CS for a far transfer to `selector:offset`, checked. `returns`: a RET to this level.
    fn code_target(
        &mut self,
        selector: u16,
        offset: u64,
        returns: Option<u8>,
    ) -> Result<Segment, Stop> {
        let beyond = Stop::Fault(Exception::gp(0));
        if self.real_or_v86() {
            // Rights stay as they are; only the offset can be wrong.
            let cs = self.paragraphs(SegReg::Cs, selector);
            return if offset > cs.limit.into() { Err(beyond) } else { Ok(cs) };
        }
        let cpl = self.m.cpl();
        if is_null(selector) {
            return Err(beyond);
        }
        let refused = Stop::Fault(Exception::gp(error_code(selector)));
        let mut found = self.descriptor(selector)?.ok_or(refused)?;
        let s = found.segment;
        match returns {
            // A return never goes inwards: #GP (SDM vol. 2B, RET).
            Some(level) if level < cpl => return Err(refused),
            // A return to an outer level.
            Some(level) if level > cpl => return Err(Stop::Unsupported),
            _ => {}
        }
        if !s.has(Segment::S) {
            // Gates and task state: known to the architecture, not to us. Others are refused.
            return Err(match s.kind() {
                0x4 | 0x5 | 0xc if returns.is_none() => Stop::Unsupported,
                0x1 | 0x9 if returns.is_none() && !self.m.long_mode() => Stop::Unsupported,
                _ => refused,
            });
        }
        if !s.has(Segment::CODE) {
            return Err(refused);
        }
        let fits = if s.has(Segment::CONFORMING) {
            s.dpl() <= cpl
        } else {
            s.dpl() == cpl && rpl(selector) <= cpl
        };
        let wide = self.m.long_mode() && s.has(Segment::LONG);
        // CS.D means nothing with CS.L, and has to be 0 then (SDM vol. 3A §5.2.1).
        if !fits || wide && s.has(Segment::BIG) {
            return Err(refused);
        }
        if !s.has(Segment::PRESENT) {
            return Err(Stop::Fault(Exception::np(error_code(selector))));
        }
        let reachable = if wide { self.canonical(offset) } else { offset <= s.limit.into() };
        if !reachable {
            return Err(beyond);
        }
        self.mark(&mut found, Segment::ACCESSED as u8, 0)?;
        // The program's level does not change by a far transfer of this kind, whatever RPL it gave.
        found.segment.selector = selector & !RPL | u16::from(cpl);
        Ok(found.segment)
    }

    /// Pushes two values, the first at the higher address, as one: nothing moves unless both could be
    /// written.
    fn push_two(&mut self, first: u64, second: u64, size: u8) -> Result<(), Stop> {
        let mask = size_mask(self.stack_size());
        let upper = self.m.gpr(RSP).wrapping_sub(size.into()) & mask;
        let lower = upper.wrapping_sub(size.into()) & mask;
        // Both addresses first, from the upper down: each may be beyond the segment.
        let upper_at = self.linear(SegReg::Ss, upper, size, Access::Store)?;
        let lower_at = self.linear(SegReg::Ss, lower, size, Access::Store)?;
        // The lower one is probed and the upper one written next: its own fault comes before
        // anything is stored.
        self.probe(lower_at, size.into())?;
        self.write(upper_at, size, first, Access::Store)?;
        self.write(lower_at, size, second, Access::Store)?;
        self.set_stack_pointer(lower);
        Ok(())
    }

    /// The general register or memory word that a selector is in, for MOV to a segment register.
    pub(crate) fn selector_operand(&mut self) -> Result<u16, Stop> {
        match self.insn.op1_kind() {
            OpKind::Register => RegRef::of(self.insn.op1_register())
                .map(|reg| self.reg(reg) as u16)
                .ok_or(Stop::Unsupported),
            _ => {
                let Place::Mem { at, .. } = self.memory(2, 0, 0, Access::Load)? else {
                    return Err(Stop::Unsupported);
                };
                Ok(self.read(at, 2, Access::Load)? as u16)
            }
        }
    }
}

/// The busy bit of a TSS descriptor's type.
pub(crate) const BUSY: u8 = 1 << 1;

/// A segment of virtual-8086 mode: 64 KiB of data for level 3 (SDM vol. 3B §21.2.1).
pub(crate) const fn v86_segment(selector: u16) -> Segment {
    Segment { selector, attributes: 0xf3, limit: 0xffff, base: (selector as u64) << 4 }
}
