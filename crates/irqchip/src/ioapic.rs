//! The I/O APIC, 82093AA: 24 pins, each with a redirection entry that turns its line into a
//! message. Data sheet §3.2.
//!
//! It stands behind the VM's interrupt lock. Messages leave through a closure that says whether a
//! CPU took them newly.
//!
//! Why a level pin is sent again at the end of its interrupt: several devices share a line, and the guest's
//! handler may have served one of them only. Remote IRR holds the pin back until that end. If that
//! end never comes, because the vector was changed meanwhile, the line is dead; hence guests that switch a stuck pin
//! to edge and back.
//!
//! Why an edge pin remembers that its line is high: an edge is a change, and a second call that says "high" is
//! none. Why an edge under the mask is lost: the chip has no place for it (a level is still there when the mask
//! goes).
//!
//! Why an interrupt storm is put off: a device whose driver does not know it asserts its line again at each end.
//! A real CPU executes some instructions between two interrupts and gets on; here the next one would be pending
//! before the guest's first instruction, and it would never come to the handler's own way out.
//!
//! Why [`IoApic::eoi`] tells of edge pins too: an edge ends nothing in the chip, but the PIT and irqfds with a
//! resample eventfd count acknowledgements, and the only sign of one is the local APIC's EOI.

use host::GuestIndex;
use x86::Vector;

use crate::message::{
    DeliveryMode, DestMode, DestRules, IrqMessage, LineStatus, Shorthand, Trigger,
};

/// Number of input pins.
pub const PINS: usize = 24;
/// Where the I/O APIC's two registers lie on a PC.
pub const DEFAULT_BASE: u64 = x86::apic::IOAPIC_DEFAULT_BASE;
/// Bytes that the I/O APIC decodes from its base.
pub const WINDOW: u64 = 0x100;

const REG_SELECT: u64 = 0x00;
const REG_WINDOW: u64 = 0x10;
// Version 0x11 has no EOI register of its own: a guest ends by the local APIC's broadcast, the one
// way that is wired here.
const VERSION: u32 = 0x11 | (PINS as u32 - 1) << 16;

/// How often in a row a level pin may be found asserted at its end of interrupt before the next
/// delivery is put off: a guest whose handler cannot silence the device must still get to run.
const STORM_LIMIT: u16 = 10_000;

mod rte {
    pub const DELIVERY_STATUS: u64 = 1 << 12;
    pub const LOGICAL: u64 = 1 << 11;
    pub const REMOTE_IRR: u64 = 1 << 14;
    pub const LEVEL: u64 = 1 << 15;
    pub const MASKED: u64 = 1 << 16;
    // The two bits tell of the chip's doings, so a guest that writes back what it has read changes
    // neither.
    pub const READ_ONLY: u64 = DELIVERY_STATUS | REMOTE_IRR;
    pub const IMPLEMENTED: u64 = 0xff00_0000_0001_ffff;
}

/// The state that KVM_GET_IRQCHIP and KVM_SET_IRQCHIP carry (`struct kvm_ioapic_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoApicState {
    /// Guest-physical address of the registers.
    pub base_address: u64,
    /// IOREGSEL: which register IOWIN reaches.
    pub ioregsel: u32,
    /// Id register's bits 27:24, as a number.
    pub id: u32,
    /// Pins whose line is asserted (level) or whose edge is not yet withdrawn.
    pub irr: u32,
    /// The redirection entries, one a pin.
    pub redirtbl: [u64; PINS],
}

impl Default for IoApicState {
    fn default() -> Self {
        Self {
            base_address: DEFAULT_BASE,
            ioregsel: 0,
            id: 0,
            irr: 0,
            // Masked at power-up, as the data sheet has it: with zeros all pins would send vector
            // 0.
            redirtbl: [rte::MASKED; PINS],
        }
    }
}

/// What a guest's store has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Written {
    /// The pin that is unmasked by it.
    pub unmasked: Option<u32>,
    /// Level pins that are asserted and that nothing holds back any more: the caller passes them to
    /// [`IoApic::retry`], once it has lowered those lines of which it is not known whether they are still high.
    pub waiting: u32,
}

/// An I/O APIC.
#[derive(Clone, Debug, Default)]
pub struct IoApic {
    state: IoApicState,
    /// Who asserts each pin: one bit per source.
    // A bit and not a count: a source that raises its line twice and lowers it once has let go.
    sources: [u32; PINS],
    /// Ends of interrupt in a row that found the pin still asserted.
    storm: [u16; PINS],
    /// Edge pins whose line is high and whose rise was sent.
    delivered: u32,
    /// Pins whose acknowledgements somebody counts, edge or level.
    listeners: u32,
    /// How destinations are understood.
    rules: DestRules,
}

/// What a pin sends by its redirection entry, of whose end nobody hears.
fn message(entry: u64, rules: DestRules) -> Option<IrqMessage> {
    let dest_mode = if entry & rte::LOGICAL != 0 { DestMode::Logical } else { DestMode::Physical };
    // Delivery mode 3 is reserved: such an entry sends nothing.
    Some(IrqMessage {
        // Not checked against 16 here: the receiver logs an illegal vector (SDM vol. 3A §10.5.3).
        vector: Vector(entry as u8),
        delivery: DeliveryMode::from_bits((entry >> 8) as u32)?.to(dest_mode, (entry >> 56) as u32),
        dest_mode,
        trigger: if entry & rte::LEVEL != 0 { Trigger::Level } else { Trigger::Edge },
        assert: true,
        // Filled in by service(), which alone knows the pin.
        notify_eoi: false,
        shorthand: Shorthand::None,
        // An entry has eight bits of destination, also where MSIs have more.
        dest: rules.widen((entry >> 56) as u8),
    })
}

impl IoApic {
    /// Power-up state: every pin masked.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a guest-physical address is one of its registers.
    #[inline]
    pub fn covers(&self, address: u64) -> bool {
        address.wrapping_sub(self.state.base_address) < WINDOW
    }

    /// Guest-physical address of the registers.
    pub fn base_address(&self) -> u64 {
        self.state.base_address
    }

    /// Source number `source` (below 32) drives `pin` to `level`; the pin is the OR of its sources.
    ///
    /// An edge pin delivers at the change from low to high; a level pin whenever it is high and its
    /// last interrupt has ended.
    pub fn set_line(
        &mut self,
        pin: usize,
        source: u8,
        level: bool,
        deliver: &mut impl FnMut(IrqMessage) -> bool,
    ) -> LineStatus {
        // A route was checked when it was set, but a pin is an index all the same.
        let Some(sources) = GuestIndex::from(pin).of_mut(&mut self.sources) else {
            return LineStatus::Ignored;
        };
        // The OR of all sources: one device that lets go must not lower the line for another.
        let bit = 1u32 << (source & 31);
        *sources = if level { *sources | bit } else { *sources & !bit };
        let high = *sources != 0;
        self.drive(pin, high, deliver)
    }

    fn drive(
        &mut self,
        pin: usize,
        high: bool,
        deliver: &mut impl FnMut(IrqMessage) -> bool,
    ) -> LineStatus {
        let Some(entry) = GuestIndex::from(pin).of(&self.state.redirtbl).copied() else {
            return LineStatus::Ignored;
        };
        // The pin is below 24 here: the entry above was found by it.
        let mask = 1u32 << pin;
        if !high {
            // A low line ends the count of a storm: somebody has silenced the device.
            self.state.irr &= !mask;
            if let Some(storm) = GuestIndex::from(pin).of_mut(&mut self.storm) {
                *storm = 0;
            }
            // As stock KVM answers: what lowers a line is never coalesced.
            return LineStatus::Delivered(1);
        }
        let was_high = self.state.irr & mask != 0;
        if !was_high {
            self.delivered &= !mask;
        }
        // Before anything can hold the pin back: what is not sent now is found asserted by eoi()
        // and by a write that takes the mask away.
        self.state.irr |= mask;
        // A level is held back by remote IRR; an edge by the line that is high already.
        let coalesced =
            if entry & rte::LEVEL != 0 { entry & rte::REMOTE_IRR != 0 } else { was_high };
        if coalesced { LineStatus::Coalesced } else { self.service(pin, deliver) }
    }

    /// Sends the message of an asserted pin if nothing holds it back.
    fn service(&mut self, pin: usize, deliver: &mut impl FnMut(IrqMessage) -> bool) -> LineStatus {
        let Some(entry) = GuestIndex::from(pin).of_mut(&mut self.state.redirtbl) else {
            return LineStatus::Ignored;
        };
        let level = *entry & rte::LEVEL != 0;
        // Asked here for all ways: reassert(), retry() and an unmasking come past drive().
        if *entry & rte::MASKED != 0 || (level && *entry & rte::REMOTE_IRR != 0) {
            return LineStatus::Ignored;
        }
        let Some(message) = message(*entry, self.rules) else {
            return LineStatus::Ignored;
        };
        let message = IrqMessage { notify_eoi: self.listeners & 1 << pin != 0, ..message };
        if !level {
            self.delivered |= 1 << pin;
        }
        // Sent before remote IRR is set: nothing comes in between, for the VM's interrupt lock is
        // held.
        let taken = deliver(message);
        // Only what ends with an EOI waits for one (data sheet §3.2.4, remote IRR).
        let ends = matches!(message.delivery, DeliveryMode::Fixed | DeliveryMode::LowestPriority);
        if level && ends {
            *entry |= rte::REMOTE_IRR;
        }
        if taken { LineStatus::Delivered(1) } else { LineStatus::Coalesced }
    }

    /// A CPU ended `vector`. Clears remote IRR of its level pins and gives the pins, level and
    /// edge, that send this vector: their acknowledgement is to be told to whoever waits for it,
    /// and then [`reassert`](Self::reassert) called with them.
    pub fn eoi(&mut self, vector: Vector) -> u32 {
        // Several pins may share a vector, and one EOI ends them all: the chip knows no better
        // either.
        let mut pins = 0;
        for (pin, entry) in self.state.redirtbl.iter_mut().enumerate() {
            // NMI, SMI and the like have no vector that a local APIC would end.
            let fixed = *entry >> 8 & 7 <= 1;
            if *entry as u8 != vector.0 || !fixed {
                continue;
            }
            // Whatever the entry's destination is: the message of an EOI names a vector and no CPU.
            if *entry & rte::LEVEL != 0 {
                *entry &= !rte::REMOTE_IRR;
            }
            pins |= 1 << pin;
        }
        pins
    }

    /// After [`eoi`](Self::eoi): sends again for those level `pins` that are still asserted.
    ///
    /// Returns the pins put off because they stay asserted time after time; the caller passes them
    /// to [`retry`](Self::retry) some ten milliseconds later.
    pub fn reassert(&mut self, pins: u32, deliver: &mut impl FnMut(IrqMessage) -> bool) -> u32 {
        let mut put_off = 0;
        for pin in bits(pins) {
            let asserted = self.state.irr & 1 << pin != 0;
            let level = self.state.redirtbl.get(pin).is_some_and(|e| e & rte::LEVEL != 0);
            // By pin and not by vector: what shares a vector with a storm is not put off.
            let Some(storm) = self.storm.get_mut(pin) else { continue };
            // Only a level that stays is a storm. An edge that ends is over.
            if !asserted || !level {
                // Counted anew after the pause: the handler gets as many tries again.
                *storm = 0;
                continue;
            }
            *storm += 1;
            if *storm >= STORM_LIMIT {
                *storm = 0;
                put_off |= 1 << pin;
            } else {
                self.service(pin, deliver);
            }
        }
        put_off
    }

    /// Sends for those of `pins` that are asserted and wait for nothing.
    pub fn retry(&mut self, pins: u32, deliver: &mut impl FnMut(IrqMessage) -> bool) {
        for pin in bits(pins) {
            // The line may have gone down during the pause; then there is nothing to be sent.
            if self.state.irr & 1 << pin != 0 {
                self.service(pin, deliver);
            }
        }
    }

    /// Sets the pins whose acknowledgements are wanted though they may be edge-triggered: their
    /// messages ask for a report of their EOI.
    pub fn set_listeners(&mut self, pins: u32) {
        self.listeners = pins;
    }

    /// Sets how destinations are understood.
    pub fn set_dest_rules(&mut self, rules: DestRules) {
        self.rules = rules;
    }

    /// A guest load at `offset` from the base.
    pub fn read(&self, offset: u64) -> u32 {
        match offset & 0xf0 {
            REG_SELECT => self.state.ioregsel,
            REG_WINDOW => self.read_selected(),
            _ => 0,
        }
    }

    /// A guest store at `offset` from the base.
    pub fn write(&mut self, offset: u64, value: u32) -> Written {
        match offset & 0xf0 {
            // Eight bits, as the register has: the index is the guest's, and is checked where it is
            // used.
            REG_SELECT => self.state.ioregsel = value & 0xff,
            REG_WINDOW => return self.write_selected(value),
            _ => {}
        }
        Written::default()
    }

    fn read_selected(&self) -> u32 {
        match self.state.ioregsel {
            // The arbitration id is a copy of the id where there is no bus to arbitrate for.
            0x00 | 0x02 => (self.state.id & 0xf) << 24,
            0x01 => VERSION,
            index => {
                // IOREGSEL is the guest's: below 0x10 this wraps to an index that no entry has.
                let pin = GuestIndex::from(index.wrapping_sub(0x10) >> 1);
                match pin.of(&self.state.redirtbl) {
                    Some(entry) => (entry >> ((index & 1) * 32)) as u32,
                    None => 0,
                }
            }
        }
    }

    fn write_selected(&mut self, value: u32) -> Written {
        let index = self.state.ioregsel;
        // Version and arbitration id are read-only: they fall through to a pin that does not exist.
        if index == 0 {
            self.state.id = value >> 24 & 0xf;
            return Written::default();
        }
        let pin = index.wrapping_sub(0x10) >> 1;
        let Some(entry) = GuestIndex::from(pin).of_mut(&mut self.state.redirtbl) else {
            return Written::default();
        };
        let old = *entry;
        let shift = (index & 1) * 32;
        // The other half stays: an entry is written by two stores.
        let written = old & !(0xffff_ffff << shift) | u64::from(value) << shift;
        // What the entry does not implement reads as zero: systems probe for it.
        let mut new = (written & !rte::READ_ONLY | old & rte::READ_ONLY) & rte::IMPLEMENTED;
        if new & rte::LEVEL == 0 {
            // Systems switch a stuck pin to edge and back to get rid of its remote IRR.
            new &= !rte::REMOTE_IRR;
        }
        *entry = new;
        // A level that was held back by the mask goes out now; an edge under the mask is lost.
        let held_back = new & (rte::LEVEL | rte::MASKED | rte::REMOTE_IRR) == rte::LEVEL;
        Written {
            unmasked: (old & !new & rte::MASKED != 0).then_some(pin),
            // The pin is below 24 here: the entry above was found by it.
            waiting: if held_back { self.state.irr & 1 << pin } else { 0 },
        }
    }

    /// The state for saving. An edge that was sent is not asserted in it: [`restore`](Self::restore) would send it
    /// once more.
    pub fn save(&self) -> IoApicState {
        let entries = self.state.redirtbl.iter();
        // What the pin is now counts: one that was made level meanwhile is asserted as long as its line is high.
        let edges = entries.enumerate().filter(|(_, entry)| **entry & rte::LEVEL == 0);
        let sent = edges.fold(0, |pins, (pin, _)| pins | 1 << pin) & self.delivered;
        IoApicState { irr: self.state.irr & !sent, ..self.state }
    }

    /// Takes over a saved state; pins asserted in it are delivered as if they were asserted now.
    pub fn restore(&mut self, state: &IoApicState, deliver: &mut impl FnMut(IrqMessage) -> bool) {
        // Driven again below, one by one, so that each is delivered as by its device.
        let asserted = state.irr & ((1 << PINS) - 1);
        self.state = IoApicState { ioregsel: state.ioregsel & 0xff, irr: 0, ..*state };
        for entry in &mut self.state.redirtbl {
            *entry &= rte::IMPLEMENTED;
        }
        // A storm is no part of the state, and its count is of another run.
        self.storm = [0; PINS];
        self.delivered = 0;
        for pin in bits(asserted) {
            self.drive(pin, true, deliver);
        }
    }
}

/// The numbers of the bits set, below [`PINS`].
fn bits(mask: u32) -> impl Iterator<Item = usize> {
    (0..PINS).filter(move |pin| mask & 1 << pin != 0)
}

#[cfg(test)]
mod tests;
