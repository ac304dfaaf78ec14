//! The interrupt system's own devices as the guest's instructions reach them: PIC and PIT by port,
//! the I/O APIC by address, and ioeventfds and coalesced writes in both spaces.

use core::sync::atomic::Ordering::Relaxed;
use x86::Direction;

use host::clock;
use irqchip::{
    Chip, Pic, Pit,
    ioapic::{self, Written},
};

use super::{Irqchip, Owing, Space, VmIrq, controllers::arm_timer};

const SPEAKER_PORT: u16 = 0x61;

impl VmIrq {
    #[inline]
    fn is_pic(&self, port: u16) -> bool {
        Pic::covers(port) && self.kind() == Irqchip::Full
    }

    #[inline]
    fn is_pit(&self, port: u16) -> bool {
        Pit::covers(port) && self.pit.load(Relaxed)
            || port == SPEAKER_PORT && self.speaker.load(Relaxed)
    }

    /// Whether an access to this port may be ours: a compare and a load or two, for the exit path.
    #[inline]
    pub fn has_port(&self, port: u16) -> bool {
        // Not `is_pic() || is_pit()`: a chip's ports without the chip may be an ioeventfd's.
        if Pic::covers(port) {
            if self.kind() == Irqchip::Full {
                return true;
            }
        } else if Pit::covers(port) {
            if self.pit.load(Relaxed) {
                return true;
            }
        } else if port == SPEAKER_PORT && self.speaker.load(Relaxed) {
            return true;
        }
        self.ioeventfds.may_match(Space::Port, u64::from(port))
    }

    /// A guest's IN of `size` bytes. `None` when it is not ours.
    ///
    /// The chips are eight bits wide; what a wider access asks beyond reads as zero.
    #[must_use]
    pub fn pio_read(&self, port: u16, size: u8, value: &mut u32) -> Option<Owing> {
        if self.is_pic(port) {
            // The PIC does not answer wide accesses.
            let (byte, owing) = if size == 1 { self.read_pic(port) } else { (0, Owing::NOTHING) };
            *value = u32::from(byte);
            return Some(owing);
        }
        if !self.is_pit(port) {
            // Only writes signal eventfds or are coalesced.
            return None;
        }
        let mut state = self.core.state.lock();
        let pit = state.pit.as_mut()?;
        let now = clock::monotonic_ns();
        *value = match port {
            SPEAKER_PORT => u32::from(pit.read_speaker(now)),
            port => u32::from(pit.read(port, now)),
        };
        Some(Owing::NOTHING)
    }

    fn read_pic(&self, port: u16) -> (u8, Owing) {
        let mut state = self.core.state.lock();
        // A plain read acknowledges nothing, so nobody has to be told.
        if !state.pic.polls(port) {
            return (state.pic.read(port), Owing::NOTHING);
        }
        let value = state.pic.read(port);
        // A poll acknowledges, and may end.
        let told = self.core.ended_lines(&mut state);
        self.core.update_pic(&mut state);
        drop(state);
        (value, told.signal())
    }

    fn write_pic(&self, port: u16, value: u8) -> Owing {
        let mut state = self.core.state.lock();
        // The PIC gathers what ended; it calls nobody back from within a write.
        let masked = state.pic.masked();
        state.pic.write(port, value);
        let unmasked = masked & !state.pic.masked();
        // The timer's line is the master's.
        for line in (0..8).filter(|line| unmasked & 1 << line != 0) {
            state.unmasked(Chip::PicMaster, line);
        }
        let told = self.core.ended_lines(&mut state);
        self.core.update_pic(&mut state);
        drop(state);
        told.signal()
    }

    /// A guest's OUT. `None` when it is not ours.
    #[must_use]
    pub fn pio_write(&self, port: u16, size: u8, value: u32) -> Option<Owing> {
        if !self.has_port(port) {
            return None;
        }
        if self.is_pic(port) {
            return Some(if size == 1 {
                self.write_pic(port, value as u8)
            } else {
                Owing::NOTHING
            });
        }
        if !self.is_pit(port) {
            // Eventfds first: what one of them takes is not for the ring.
            let data = value.to_le_bytes();
            let awaited = self.ioeventfds.signal_pio(port, u32::from(size), value)
                || data
                    .get(..usize::from(size))
                    .is_some_and(|data| self.coalesced.append(Space::Port, u64::from(port), data));
            return awaited.then_some(Owing::NOTHING);
        }
        // In a block: the lock has to go before the timer is armed.
        let changed = {
            let mut state = self.core.state.lock();
            let pit = state.pit.as_mut()?;
            let now = clock::monotonic_ns();
            if port == SPEAKER_PORT {
                pit.write_speaker(value as u8, now);
                false
            } else {
                pit.write(port, value as u8, now)
            }
        };
        if changed {
            // Outside of the lock: arming waits for a handler that runs, and that takes it.
            arm_timer(&self.core);
        }
        Some(Owing::NOTHING)
    }

    /// Whether a guest-physical address is the I/O APIC's.
    #[inline]
    fn is_ioapic(&self, address: u64) -> bool {
        // Nobody can move it but KVM_SET_IRQCHIP, and nobody does.
        address.wrapping_sub(ioapic::DEFAULT_BASE) < ioapic::WINDOW && self.kind() == Irqchip::Full
    }

    /// Whether an access to this address without memory may be ours: two loads, for the exit path.
    #[inline]
    pub fn has_address(&self, address: u64, direction: Direction) -> bool {
        self.is_ioapic(address)
            || direction.is_write() && self.ioeventfds.may_match(Space::Memory, address)
    }

    /// A guest's load from an address without memory. False when it is not ours.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) -> bool {
        if !self.is_ioapic(address) {
            return false;
        }
        // One register, whatever the width: a wider load is zeros behind it.
        let value = self.core.state.lock().ioapic.read(address - ioapic::DEFAULT_BASE);
        data.fill(0);
        for (out, byte) in data.iter_mut().zip(value.to_le_bytes()) {
            *out = byte;
        }
        true
    }

    /// A store that an eventfd or a zone may wait for. False when none does.
    fn awaited(&self, address: u64, data: &[u8]) -> bool {
        // An access to the I/O APIC is never coalesced, or the guest's write to it would be lost.
        self.ioeventfds.signal_mmio(address, data)
            || !self.is_ioapic(address) && self.coalesced.append(Space::Memory, address, data)
    }

    /// A guest's store to an address without memory. `None` when it is not ours.
    #[must_use]
    pub fn mmio_write(&self, address: u64, data: &[u8]) -> Option<Owing> {
        // Before the I/O APIC, as the filter is one load, and nearly all writes end with it.
        if self.ioeventfds.may_match(Space::Memory, address) && self.awaited(address, data) {
            return Some(Owing::NOTHING);
        }
        if !self.is_ioapic(address) {
            return None;
        }
        // Registers have 32 bits: a wider store is cut, a narrower one widened, as in stock KVM.
        let mut bytes = [0; 4];
        for (out, byte) in bytes.iter_mut().zip(data) {
            *out = *byte;
        }
        // The lock is held through the write: what the register says and what is sent by it belong
        // together.
        let mut state = self.core.state.lock();
        let Written { unmasked, waiting } =
            state.ioapic.write(address - ioapic::DEFAULT_BASE, u32::from_le_bytes(bytes));
        if let Some(pin) = unmasked {
            state.unmasked(Chip::IoApic, pin);
        }
        if waiting == 0 {
            return Some(Owing::NOTHING);
        }
        let told = self.core.resample(&mut state, waiting);
        state.ioapic.retry(waiting, &mut self.core.output());
        // Who is told may come back, and finds the lock.
        drop(state);
        Some(told.signal())
    }
}
