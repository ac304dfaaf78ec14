//! The pair of 8259A interrupt controllers of a PC, with the edge/level control registers.
//! 8259A data sheet; ELCR as in the 82371SB, §4.2.5.
//!
//! Behind the VM's interrupt lock. [`Pic::output`] is the INTR line to LINT0 of the CPUs.
//!
//! Why it is here when guests have local APICs: firmware and every kernel begin with it, and a guest that is told of no
//! I/O APIC stays with it. Its interrupts reach a CPU by LINT0.
//!
//! Why it is acknowledged and not read: which line wins is decided in the CPU's acknowledge cycle, and the request
//! may have gone by then, which gives the spurious line 7. So its vector cannot be offered to a guest ahead of time
//! as a local APIC's can (ADR 16).
//!
//! Why ends are gathered ([`Pic::take_ended`]) and not told at once: who waits for one is known by GSI, which
//! is the routes' business, and telling them drives lines again. A chip that called back into itself in the middle of an
//! EOI would be seen half changed.
//!
//! Why the slave's line to the master is pulsed: the master finds edges. Were it held high, the slave's second
//! request would never be seen.

use host::GuestIndex;
use x86::Vector;

use crate::message::LineStatus;

/// Input lines of the pair.
pub const LINES: usize = 16;

/// The state of one chip as KVM_GET_IRQCHIP and KVM_SET_IRQCHIP carry it (`struct kvm_pic_state`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PicState {
    /// Line levels, for finding edges.
    pub last_irr: u8,
    /// Interrupt request register.
    pub irr: u8,
    /// Interrupt mask register.
    pub imr: u8,
    /// ISR, the in-service register.
    pub isr: u8,
    /// Line of highest priority.
    pub priority_add: u8,
    /// Vector of line 0.
    pub irq_base: u8,
    /// A read of the command port gives ISR, not IRR.
    pub read_reg_select: u8,
    /// The next read is a poll.
    pub poll: u8,
    /// Special mask mode.
    pub special_mask: u8,
    /// Which initialisation word comes next: 0 none, 1 ICW2, 2 ICW3, 3 ICW4.
    pub init_state: u8,
    /// Automatic end of interrupt.
    pub auto_eoi: u8,
    /// Rotate on automatic end of interrupt.
    pub rotate_on_auto_eoi: u8,
    /// Special fully nested mode.
    pub special_fully_nested_mode: u8,
    /// ICW4 will come.
    pub init4: u8,
    /// Edge/level control: a set bit is a level line.
    pub elcr: u8,
    /// Bits of `elcr` that can be set.
    pub elcr_mask: u8,
}

/// One of the two chips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one that is wired to the CPUs.
    Master,
    /// The one whose output drives line 2 of the other.
    Slave,
}

impl PicState {
    fn reset(&mut self) {
        let Self { irq_base, elcr, elcr_mask, init4, irr, .. } = *self;
        let (fully_nested, auto_eoi) = (self.special_fully_nested_mode, self.auto_eoi);
        // How the chips are wired stays through ICW1, and so does the vector base until ICW2 comes.
        *self = Self { irq_base, elcr, elcr_mask, init4, ..Self::default() };
        // What is held by a level line is still there; a latched edge is gone.
        self.irr = irr & elcr;
        self.rotate_on_auto_eoi = 0;
        // ICW1 without "ICW4 comes" clears what ICW4 has set; with it those stay until ICW4 does.
        if init4 != 0 {
            self.special_fully_nested_mode = fully_nested;
            self.auto_eoi = auto_eoi;
        }
        // ICW2 always comes next.
        self.init_state = 1;
    }

    /// Drives one line. `None` when it is masked, else whether this is a new request.
    fn set_line(&mut self, line: u8, high: bool) -> Option<bool> {
        let mask = 1u8 << (line & 7);
        let mut new = true;
        // A level line that goes low before it was acknowledged takes its request along; an edge
        // stays.
        // Two kinds of line in one chip: what a low line takes back differs.
        if self.elcr & mask != 0 {
            if high {
                new = self.irr & mask == 0;
                self.irr |= mask;
                self.last_irr |= mask;
            } else {
                self.irr &= !mask;
                self.last_irr &= !mask;
            }
        } else if high {
            if self.last_irr & mask == 0 {
                new = self.irr & mask == 0;
                self.irr |= mask;
            } else {
                new = false;
            }
            self.last_irr |= mask;
        } else {
            self.last_irr &= !mask;
        }
        // The mask holds back the request only: it waits in the IRR and goes when it is unmasked.
        (self.imr & mask == 0).then_some(new)
    }

    /// How far below the highest priority the best line of `set` is; 8 for none.
    fn priority(&self, set: u8) -> u8 {
        // Rotated so that the line of highest priority becomes bit 0: the lowest bit that is set
        // wins.
        set.rotate_right(u32::from(self.priority_add & 7)).trailing_zeros() as u8
    }

    /// The line to be serviced now.
    fn pending(&self, which: Which) -> Option<u8> {
        // No early look at the ISR: an empty chip is the usual case.
        let wanted = self.priority(self.irr & !self.imr);
        if wanted == 8 {
            return None;
        }
        let mut in_service = self.isr;
        if self.special_mask != 0 {
            // Special mask mode: a masked line in service does not hold back others.
            in_service &= !self.imr;
        }
        if which == Which::Master && self.special_fully_nested_mode != 0 {
            // The slave's line may interrupt itself; the slave sorts out its own priorities.
            in_service &= !(1 << 2);
        }
        // Strictly: a line in service holds back itself and all below it.
        (wanted < self.priority(in_service)).then_some((wanted + self.priority_add) & 7)
    }

    /// The CPU's acknowledgement of `line`.
    fn acknowledge(&mut self, line: u8) -> u8 {
        let mask = 1u8 << (line & 7);
        self.isr |= mask;
        // An edge is used up by the acknowledgement; a level stays as long as it is driven.
        if self.elcr & mask == 0 {
            self.irr &= !mask;
        }
        // The end comes by a command then.
        if self.auto_eoi == 0 {
            return 0;
        }
        if self.rotate_on_auto_eoi != 0 {
            self.priority_add = (line + 1) & 7;
        }
        self.end(line)
    }

    /// Ends service of `line`; gives its bit if it was in service.
    fn end(&mut self, line: u8) -> u8 {
        let ended = self.isr & 1 << (line & 7);
        self.isr &= !ended;
        ended
    }

    /// Line of the highest priority in service.
    fn highest_in_service(&self) -> Option<u8> {
        match self.priority(self.isr) {
            8 => None,
            n => Some((n + self.priority_add) & 7),
        }
    }

    /// A write of the command port (A0 = 0): ICW1, OCW2 or OCW3. Gives the lines that ended.
    fn write_command(&mut self, value: u8) -> u8 {
        if value & 0x10 != 0 {
            self.init4 = value & 1;
            // ICW1 ends what was in service, and drops the edges that wait: nobody will send an EOI for these, and who waits
            // for one would wait for ever.
            let ended = self.isr | self.irr & !self.elcr;
            self.reset();
            return ended;
        }
        if value & 0x08 != 0 {
            // The parts of OCW3 are independent, and each has a bit that says whether it counts.
            if value & 0x04 != 0 {
                self.poll = 1;
            }
            if value & 0x02 != 0 {
                self.read_reg_select = value & 1;
            }
            if value & 0x40 != 0 {
                self.special_mask = value >> 5 & 1;
            }
            return 0;
        }
        let line = value & 7;
        match value >> 5 {
            // Rotate in automatic EOI mode: clear, set.
            0 => self.rotate_on_auto_eoi = 0,
            4 => self.rotate_on_auto_eoi = 1,
            // Non-specific EOI, without and with rotation.
            command @ (1 | 5) => {
                // An EOI with nothing in service ends nothing, and rotates nothing.
                if let Some(line) = self.highest_in_service() {
                    if command == 5 {
                        self.priority_add = (line + 1) & 7;
                    }
                    return self.end(line);
                }
            }
            // Specific EOI.
            3 => return self.end(line),
            // Set priority.
            6 => self.priority_add = (line + 1) & 7,
            // Rotate on specific EOI.
            7 => {
                self.priority_add = (line + 1) & 7;
                return self.end(line);
            }
            _ => {}
        }
        0
    }

    /// A write of the data port (A0 = 1): the mask, or an initialisation word.
    fn write_data(&mut self, value: u8) {
        match self.init_state {
            1 => {
                // The low three bits are the line's number, put in by the chip.
                self.irq_base = value & 0xf8;
                self.init_state = 2;
            }
            // ICW3 says how the two are wired, which on a PC is fixed.
            2 => self.init_state = if self.init4 != 0 { 3 } else { 0 },
            3 => {
                self.special_fully_nested_mode = value >> 4 & 1;
                self.auto_eoi = value >> 1 & 1;
                self.init_state = 0;
            }
            // Out of initialisation the data port is the mask.
            _ => self.imr = value,
        }
    }
}

/// The two 8259A of a PC, master and slave.
#[derive(Clone, Debug, Default)]
pub struct Pic {
    master: PicState,
    slave: PicState,
    /// Who drives each line: one bit per source.
    sources: [u32; LINES],
    /// Lines that ended since [`take_ended`](Self::take_ended).
    ended: u16,
}

/// Lines that an ELCR can make level: not the timer, the keyboard, the cascade, the RTC or the FPU.
const MASTER_ELCR_MASK: u8 = 0xf8;
const SLAVE_ELCR_MASK: u8 = 0xde;

impl Pic {
    /// The pair in its power-up state.
    pub fn new() -> Self {
        let mut pic = Self::default();
        pic.master.elcr_mask = MASTER_ELCR_MASK;
        pic.slave.elcr_mask = SLAVE_ELCR_MASK;
        pic
    }

    /// Source number `source` (below 32) drives `line` (0 to 15) to `level`; the line is the OR of
    /// its sources.
    pub fn set_line(&mut self, line: usize, source: u8, level: bool) -> LineStatus {
        let Some(sources) = GuestIndex::from(line).of_mut(&mut self.sources) else {
            return LineStatus::Ignored;
        };
        // A bit for each source, as in the I/O APIC: the lines are shared.
        let bit = 1u32 << (source & 31);
        *sources = if level { *sources | bit } else { *sources & !bit };
        let high = *sources != 0;
        let chip = if line < 8 { &mut self.master } else { &mut self.slave };
        let status = match chip.set_line(line as u8 & 7, high) {
            None => LineStatus::Ignored,
            Some(true) => LineStatus::Delivered(1),
            Some(false) => LineStatus::Coalesced,
        };
        // After any change of a line: the slave may want the master now, or no more.
        self.cascade();
        status
    }

    /// The slave's output drives line 2 of the master. It is pulsed, so that a further request of
    /// the slave is a new edge to the master; and a request that the slave has withdrawn is none
    /// to the master either, as the data sheet has it for an input that falls before INTA.
    fn cascade(&mut self) {
        if self.slave.pending(Which::Slave).is_some() {
            self.master.set_line(2, true);
            self.master.set_line(2, false);
        } else {
            self.master.irr &= !(1 << 2);
        }
    }

    /// The INTR line: some interrupt waits for the CPU's acknowledgement.
    #[inline]
    pub fn output(&self) -> bool {
        self.master.pending(Which::Master).is_some()
    }

    /// The CPU's interrupt acknowledge cycle: the vector. When the request has gone meanwhile it is
    /// the spurious one, line 7, which is not in service afterwards.
    pub fn acknowledge(&mut self) -> Vector {
        let Some(line) = self.master.pending(Which::Master) else {
            return Vector(self.master.irq_base.wrapping_add(7));
        };
        // The master first: its line 2 is in service while the slave is asked, as in two INTA
        // cycles.
        let ended = self.master.acknowledge(line);
        self.ended |= u16::from(ended);
        let vector = if line != 2 {
            self.master.irq_base.wrapping_add(line)
        } else if let Some(line) = self.slave.pending(Which::Slave) {
            let ended = self.slave.acknowledge(line);
            // The slave's lines are 8 to 15.
            self.ended |= u16::from(ended) << 8;
            self.slave.irq_base.wrapping_add(line)
        } else {
            // The slave's request has gone: its spurious line. The master's line 2 is in service
            // all the same.
            self.slave.irq_base.wrapping_add(7)
        };
        self.cascade();
        Vector(vector)
    }

    /// The lines, by bit, that the guest has masked.
    pub fn masked(&self) -> u16 {
        u16::from_le_bytes([self.master.imr, self.slave.imr])
    }

    /// What [`take_ended`](Self::take_ended) will give.
    pub fn ended(&self) -> u16 {
        self.ended
    }

    /// The lines, by bit, that ended service since the last call: their acknowledgement is to be
    /// told to whoever waits for it.
    pub fn take_ended(&mut self) -> u16 {
        core::mem::take(&mut self.ended)
    }

    /// Whether a port is one of these chips'.
    #[inline]
    pub const fn covers(port: u16) -> bool {
        matches!(port, 0x20 | 0x21 | 0xa0 | 0xa1 | 0x4d0 | 0x4d1)
    }

    /// Whether the next read of the port is a poll, which acknowledges: other reads change nothing.
    #[inline]
    pub fn polls(&self, port: u16) -> bool {
        match port {
            0x20 | 0x21 => self.master.poll != 0,
            0xa0 | 0xa1 => self.slave.poll != 0,
            _ => false,
        }
    }

    /// Reads a byte of a port that [`covers`](Self::covers).
    pub fn read(&mut self, port: u16) -> u8 {
        match port {
            // A poll is answered by the next read, of whichever port.
            0x20 | 0x21 if self.master.poll != 0 => self.poll_master(),
            0xa0 | 0xa1 if self.slave.poll != 0 => self.poll_slave(),
            0x20 if self.master.read_reg_select != 0 => self.master.isr,
            0x20 => self.master.irr,
            0x21 => self.master.imr,
            0xa0 if self.slave.read_reg_select != 0 => self.slave.isr,
            0xa0 => self.slave.irr,
            0xa1 => self.slave.imr,
            0x4d0 => self.master.elcr,
            0x4d1 => self.slave.elcr,
            _ => 0xff,
        }
    }

    /// A poll acknowledges like the CPU does: bit 7 and the line, or zero.
    fn poll_master(&mut self) -> u8 {
        // A poll is the acknowledge cycle by software, so it is over after one read.
        self.master.poll = 0;
        match self.master.pending(Which::Master) {
            None => 0,
            Some(line) => {
                self.ended |= u16::from(self.master.acknowledge(line));
                0x80 | line
            }
        }
    }

    fn poll_slave(&mut self) -> u8 {
        self.slave.poll = 0;
        match self.slave.pending(Which::Slave) {
            None => 0,
            Some(line) => {
                self.ended |= u16::from(self.slave.acknowledge(line)) << 8;
                self.cascade();
                0x80 | line
            }
        }
    }

    /// Writes a byte to a port that [`covers`](Self::covers).
    pub fn write(&mut self, port: u16, value: u8) {
        match port {
            0x20 => self.ended |= u16::from(self.master.write_command(value)),
            0x21 => self.master.write_data(value),
            0xa0 => self.ended |= u16::from(self.slave.write_command(value)) << 8,
            0xa1 => self.slave.write_data(value),
            // Lines of the board's own devices are always edges.
            0x4d0 => self.master.elcr = value & self.master.elcr_mask,
            0x4d1 => self.slave.elcr = value & self.slave.elcr_mask,
            _ => {}
        }
        // After every write: each may change what the slave asks of the master.
        self.cascade();
    }

    /// The state of one chip for saving.
    pub fn save(&self, which: Which) -> PicState {
        match which {
            Which::Master => self.master,
            Which::Slave => self.slave,
        }
    }

    /// Takes over the saved state of one chip.
    pub fn restore(&mut self, which: Which, state: &PicState) {
        let chip = match which {
            Which::Master => &mut self.master,
            Which::Slave => &mut self.slave,
        };
        // The VMM's number shifts below, and a shift takes no more than seven.
        *chip = PicState { priority_add: state.priority_add & 7, ..*state };
        self.cascade();
    }
}

#[cfg(test)]
mod tests;
