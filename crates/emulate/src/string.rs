//! String instructions with and without REP: MOVS, STOS, LODS, CMPS, SCAS, INS, OUTS.
//!
//! Every finished iteration sets RCX, RSI and RDI at once and calls [`Machine::commit`], so that
//! a restart continues where it was (SDM vol. 2B, REP). A run of INS into plain RAM is one port access.
//!
//! Why runs: an INSB of a sector would otherwise leave to the VMM 512 times, and each of those exits costs thousands of
//! instructions. Only into plain memory, since there all of the run can be done once it is answered; a device at the other
//! end might fault or ask in its middle. And only INS, as on stock KVM: VMMs hand what OUTS writes to a device's code in one
//! piece, and that of a serial port takes one byte.

use iced_x86::{Code, OpKind};
use x86::{Gva, Rflags};

use crate::alu;
use crate::execute::Outcome;
use crate::machine::{Access, Machine, SegReg, Stop};
use crate::operand::{Run, to_page_end};
use crate::port::PortAccess;
use crate::register::{RegRef, size_mask};

/// Iterations of a REP string instruction in one call, after which the vCPU looks for interrupts.
pub const ITERATIONS_PER_CALL: u32 = 64;
/// The longest run of bytes that one INS asks [`Machine`] for at once.
pub const STRING_RUN_BYTES: usize = 512;
/// As [`ITERATIONS_PER_CALL`] while a port's elements wait: so many bytes are as many elements at most.
const ITERATIONS_AT_MOST: u32 = ITERATIONS_PER_CALL + STRING_RUN_BYTES as u32;

const RAX: u8 = 0;
const RCX: u8 = 1;
const RDX: u8 = 2;
const RSI: u8 = 6;
const RDI: u8 = 7;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Movs,
    Stos,
    Lods,
    Cmps,
    Scas,
    Ins,
    Outs,
}

pub(crate) const fn kind_and_size(code: Code) -> Option<(Kind, u8)> {
    Some(match code {
        Code::Movsb_m8_m8 => (Kind::Movs, 1),
        Code::Movsw_m16_m16 => (Kind::Movs, 2),
        Code::Movsd_m32_m32 => (Kind::Movs, 4),
        Code::Movsq_m64_m64 => (Kind::Movs, 8),
        Code::Stosb_m8_AL => (Kind::Stos, 1),
        Code::Stosw_m16_AX => (Kind::Stos, 2),
        Code::Stosd_m32_EAX => (Kind::Stos, 4),
        Code::Stosq_m64_RAX => (Kind::Stos, 8),
        Code::Lodsb_AL_m8 => (Kind::Lods, 1),
        Code::Lodsw_AX_m16 => (Kind::Lods, 2),
        Code::Lodsd_EAX_m32 => (Kind::Lods, 4),
        Code::Lodsq_RAX_m64 => (Kind::Lods, 8),
        Code::Cmpsb_m8_m8 => (Kind::Cmps, 1),
        Code::Cmpsw_m16_m16 => (Kind::Cmps, 2),
        Code::Cmpsd_m32_m32 => (Kind::Cmps, 4),
        Code::Cmpsq_m64_m64 => (Kind::Cmps, 8),
        Code::Scasb_AL_m8 => (Kind::Scas, 1),
        Code::Scasw_AX_m16 => (Kind::Scas, 2),
        Code::Scasd_EAX_m32 => (Kind::Scas, 4),
        Code::Scasq_RAX_m64 => (Kind::Scas, 8),
        Code::Insb_m8_DX => (Kind::Ins, 1),
        Code::Insw_m16_DX => (Kind::Ins, 2),
        Code::Insd_m32_DX => (Kind::Ins, 4),
        Code::Outsb_DX_m8 => (Kind::Outs, 1),
        Code::Outsw_DX_m16 => (Kind::Outs, 2),
        Code::Outsd_DX_m32 => (Kind::Outs, 4),
        _ => return None,
    })
}

/// A decoded string instruction.
#[derive(Clone, Copy)]
struct Element {
    kind: Kind,
    /// Bytes of one element.
    size: u8,
    /// Bytes of rSI, rDI and rCX.
    address_size: u8,
    /// Segment of the source.
    source: SegReg,
    backward: bool,
}

/// How many elements an instruction takes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// One: something happens behind each.
    Single,
    /// As many as can be had.
    Runs,
}

impl<M: Machine> Run<'_, M> {
    pub(crate) fn string(&mut self) -> Result<Outcome, Stop> {
        let (kind, size) = kind_and_size(self.insn.code()).ok_or(Stop::Unsupported)?;
        // Once: prefixes and DF hold for all iterations.
        let element = Element {
            kind,
            size,
            address_size: self.string_address_size()?,
            source: self.effective_segment(SegReg::Ds),
            backward: self.flags.contains(Rflags::DF),
        };
        let until_unequal = self.insn.has_rep_prefix();
        let until_equal = self.insn.has_repne_prefix();
        if !until_unequal && !until_equal {
            self.string_elements(element, 1, Pace::Runs)?;
            return Ok(Outcome::Done);
        }
        // Only these two have a condition; with the others either prefix repeats by the count (SDM
        // vol. 2B, REP).
        let compares = matches!(kind, Kind::Cmps | Kind::Scas);
        let counter = RegRef { index: RCX, size: element.address_size, high8: false };
        let steps = self.flags.contains(Rflags::TF) || self.m.steps();
        let pace = if steps { Pace::Single } else { Pace::Runs };
        let mut iterations = 0;
        loop {
            let count = self.reg(counter);
            // Tested first: a count of 0 does nothing, and touches no memory.
            if count == 0 {
                return Ok(Outcome::Done);
            }
            let done = self.string_elements(element, count, pace)?;
            let left = count.wrapping_sub(done);
            self.set_reg(counter, left);
            let equal = self.flags.contains(Rflags::ZF);
            if left == 0 || compares && if until_equal { equal } else { !equal } {
                return Ok(Outcome::Done);
            }
            // Here and not before: what the log knows of this iteration is not to be done again.
            self.m.commit();
            iterations += 1;
            // What a port has given cannot be given back: it is taken before the guest goes on, whatever became of the
            // memory meanwhile. But nobody looks for a signal in here, so that an end is not left to what is given.
            let waits = self.m.has_port_items() && iterations < ITERATIONS_AT_MOST;
            // After a whole run it is time to look for interrupts. And single-stepping stops after each iteration (SDM
            // vol. 3B §17.3.1.4).
            if !waits && (done > 1 || steps || iterations >= ITERATIONS_PER_CALL) {
                return Ok(Outcome::Continue);
            }
        }
    }

    fn string_address_size(&self) -> Result<u8, Stop> {
        for n in 0..self.insn.op_count() {
            match self.insn.op_kind(n) {
                OpKind::MemorySegSI | OpKind::MemoryESDI => return Ok(2),
                OpKind::MemorySegESI | OpKind::MemoryESEDI => return Ok(4),
                OpKind::MemorySegRSI | OpKind::MemoryESRDI => return Ok(8),
                _ => {}
            }
        }
        Err(Stop::Unsupported)
    }

    /// The linear address of the element at `index` (RSI or RDI).
    fn string_place(&self, e: Element, index: u8, how: Access) -> Result<u64, Stop> {
        let segment = if index == RSI { e.source } else { SegReg::Es };
        let offset = self.m.gpr(usize::from(index)) & size_mask(e.address_size);
        self.linear(segment, offset, e.size, how)
    }

    fn string_advance(&mut self, e: Element, index: u8, elements: u64) {
        let by = u64::from(e.size).wrapping_mul(elements);
        let register = RegRef { index, size: e.address_size, high8: false };
        let now = self.reg(register);
        let next = if e.backward { now.wrapping_sub(by) } else { now.wrapping_add(by) };
        self.set_reg(register, next);
    }

    /// Executes at least one and at most `count` elements and returns how many. RSI and RDI have
    /// moved on, RCX has not.
    fn string_elements(&mut self, e: Element, count: u64, pace: Pace) -> Result<u64, Stop> {
        let accumulator = RegRef { index: RAX, size: e.size, high8: false };
        match e.kind {
            Kind::Movs => {
                let from = self.string_place(e, RSI, Access::Load)?;
                let to = self.string_place(e, RDI, Access::Store)?;
                // Both addresses are checked before: a destination beyond its segment must not cost
                // a device its data.
                let value = self.read(from, e.size, Access::Load)?;
                self.write(to, e.size, value, Access::Store)?;
                self.string_advance(e, RSI, 1);
                self.string_advance(e, RDI, 1);
            }
            Kind::Stos => {
                let to = self.string_place(e, RDI, Access::Store)?;
                let value = self.reg(accumulator);
                self.write(to, e.size, value, Access::Store)?;
                self.string_advance(e, RDI, 1);
            }
            Kind::Lods => {
                let from = self.string_place(e, RSI, Access::Load)?;
                let value = self.read(from, e.size, Access::Load)?;
                self.set_reg(accumulator, value);
                self.string_advance(e, RSI, 1);
            }
            Kind::Cmps => {
                let first = self.string_place(e, RSI, Access::Load)?;
                let second = self.string_place(e, RDI, Access::Load)?;
                let a = self.read(first, e.size, Access::Load)?;
                let b = self.read(second, e.size, Access::Load)?;
                self.set_flags(Rflags::STATUS, alu::sub(e.size, a, b, false).1);
                self.string_advance(e, RSI, 1);
                self.string_advance(e, RDI, 1);
            }
            Kind::Scas => {
                let at = self.string_place(e, RDI, Access::Load)?;
                let b = self.read(at, e.size, Access::Load)?;
                self.set_flags(Rflags::STATUS, alu::sub(e.size, self.reg(accumulator), b, false).1);
                self.string_advance(e, RDI, 1);
            }
            Kind::Ins => return self.ins(e, count, pace),
            Kind::Outs => self.outs(e)?,
        }
        Ok(1)
    }

    /// How many elements an INS may put at `at` and behind by one access of the port: more than one only into plain RAM,
    /// in one page, forwards, and within the segment.
    fn run_length(
        &mut self,
        e: Element,
        access: &PortAccess,
        at: u64,
        count: u64,
    ) -> Result<u64, Stop> {
        // Backward runs would need their bytes turned round, and drivers read forwards.
        if count < 2 || e.backward {
            return Ok(1);
        }
        let size = u64::from(e.size);
        let room = to_page_end(at).min(STRING_RUN_BYTES) as u64;
        let fits = room.checked_div(size).unwrap_or(0).min(count);
        if fits < 2 {
            return Ok(1);
        }
        // The last element must be reachable as the first one was, without wrapping.
        let offset = self.m.gpr(usize::from(RDI)) & size_mask(e.address_size);
        let last = offset.wrapping_add(fits.wrapping_sub(1).wrapping_mul(size));
        let last = (last <= size_mask(e.address_size)).then_some(last);
        let reachable =
            last.is_some_and(|last| self.linear(SegReg::Es, last, e.size, Access::Store).is_ok());
        if !reachable {
            return Ok(1);
        }
        Ok(self.m.port_run(access, Gva(at), fits)?.clamp(1, fits))
    }

    fn ins(&mut self, e: Element, count: u64, pace: Pace) -> Result<u64, Stop> {
        let port = self.m.gpr(usize::from(RDX)) as u16;
        // The right to the port comes first: memory is looked at only behind it.
        let access = self.check_port(port, e.size)?;
        let to = self.string_place(e, RDI, Access::Store)?;
        // One at a time under a step, but for those that are there already.
        let alone = pace == Pace::Single && !self.m.has_port_items();
        let elements = if alone { 1 } else { self.run_length(e, &access, to, count)? };
        // At most STRING_RUN_BYTES, by run_length().
        let len = elements.wrapping_mul(u64::from(e.size)) as usize;
        // Memory that cannot be written must not cost the device its data.
        self.probe(to, len)?;
        let mut buffer = [0u8; STRING_RUN_BYTES];
        let bytes = buffer.get_mut(..len).ok_or(Stop::Unsupported)?;
        self.m.port_in(&access, bytes)?;
        self.write_bytes(to, bytes, Access::Store)?;
        // Behind the store: a fault in it leaves RDI at the element that is to be done again.
        self.string_advance(e, RDI, elements);
        Ok(elements)
    }

    fn outs(&mut self, e: Element) -> Result<(), Stop> {
        let port = self.m.gpr(usize::from(RDX)) as u16;
        // The right to the port first, as with INS.
        let access = self.check_port(port, e.size)?;
        let from = self.string_place(e, RSI, Access::Load)?;
        let value = self.read(from, e.size, Access::Load)?.to_le_bytes();
        self.m.port_out(&access, value.get(..usize::from(e.size)).ok_or(Stop::Unsupported)?)?;
        self.string_advance(e, RSI, 1);
        Ok(())
    }

    fn port_operand(&mut self, n: u32) -> Result<u16, Stop> {
        Ok(self.value(n)? as u16)
    }

    /// IN AL/AX/EAX from DX or a constant port.
    pub(crate) fn port_in(&mut self) -> Result<(), Stop> {
        let to = RegRef::of(self.insn.op0_register()).ok_or(Stop::Unsupported)?;
        let port = self.port_operand(1)?;
        let access = self.check_port(port, to.size)?;
        let mut bytes = [0u8; 8];
        if let Some(part) = bytes.get_mut(..usize::from(to.size)) {
            self.m.port_in(&access, part)?;
        }
        self.set_reg(to, u64::from_le_bytes(bytes));
        Ok(())
    }

    /// OUT of AL/AX/EAX to DX or a constant port.
    pub(crate) fn port_out(&mut self) -> Result<(), Stop> {
        let from = RegRef::of(self.insn.op1_register()).ok_or(Stop::Unsupported)?;
        let port = self.port_operand(0)?;
        let access = self.check_port(port, from.size)?;
        let bytes = self.reg(from).to_le_bytes();
        match bytes.get(..usize::from(from.size)) {
            Some(part) => self.m.port_out(&access, part),
            None => Err(Stop::Unsupported),
        }
    }
}
