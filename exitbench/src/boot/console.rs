//! The guest's serial console: a 16550 at 0x3f8 whose output goes to standard output and past the
//! markers, and whose interrupt is IRQ 4, by irqfd.

use std::io::{self, Write};

use anyhow::{Context, Result};
use kvm_ioctls::VmFd;
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::emulator;
use super::marker::Marker;

/// Interrupt of the first serial port of a PC.
const IRQ: u32 = 4;

/// An eventfd that raises the interrupt.
#[derive(Debug)]
pub struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Where the output goes: to standard output, and past the markers.
#[derive(Debug)]
pub struct Output {
    /// Where counting begins, if not with the VM.
    from: Marker,
    /// The time stamp counter when that came.
    from_at: Option<u64>,
    marker: Marker,
    /// The time stamp counter when the marker came.
    marker_at: Option<u64>,
    /// All of it.
    text: Vec<u8>,
}

impl Write for Output {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.from.feed(piece) {
            emulator::begin();
            self.from_at = Some(time_stamp());
        }
        if self.marker.feed(piece) {
            self.marker_at = Some(time_stamp());
            if self.from_at.is_some() {
                emulator::end();
            }
        }
        self.text.extend_from_slice(piece);
        // A closed standard output must not look like a broken UART to the guest.
        let _ = io::stdout().write_all(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = io::stdout().flush();
        Ok(())
    }
}

/// The serial port.
pub type SerialPort = Serial<Interrupt, NoEvents, Output>;

/// Creates the port and connects its interrupt.
pub fn serial_port(vm: &VmFd, from: Marker, marker: Marker) -> Result<SerialPort> {
    let interrupt = EventFd::new(EFD_NONBLOCK).context("cannot create an eventfd")?;
    vm.register_irqfd(&interrupt, IRQ).context("KVM_IRQFD failed for the serial port")?;
    let output = Output { from, from_at: None, marker, marker_at: None, text: Vec::new() };
    Ok(Serial::new(Interrupt(interrupt), output))
}

impl Output {
    /// When the marker came by, as the host's time stamp counter had it.
    pub fn marker_at(&self) -> Option<u64> {
        self.marker_at
    }

    /// Ticks from the text where counting begins to the marker.
    pub fn ticks_between(&self) -> Option<u64> {
        Some(self.marker_at?.wrapping_sub(self.from_at?))
    }

    /// All that came.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.text).into_owned()
    }

    /// Whether the marker came by.
    pub fn marker_seen(&self) -> bool {
        self.marker.seen()
    }
}

/// The host's time stamp counter.
pub fn time_stamp() -> u64 {
    // SAFETY: every x86-64 CPU has the instruction, and Linux lets user space use it.
    unsafe { core::arch::x86_64::_rdtsc() }
}
