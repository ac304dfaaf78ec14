//! The guest's ports that the kernel does not serve: the serial port, the keyboard controller, a
//! clock chip that stands still, and nothing elsewhere.

use super::console::{Output, SerialPort};
use super::keyboard_controller::{KeyboardController, Request};

const SERIAL: u16 = 0x3f8;
const SERIAL_LAST: u16 = SERIAL + 7;
const KEYBOARD_DATA: u16 = 0x60;
const KEYBOARD_COMMAND: u16 = 0x64;
/// Its update flag must read as clear, or Linux waits for it.
const CLOCK_DATA: u16 = 0x71;

/// What a read finds where no device is.
const NOBODY: u8 = 0xff;

/// All devices of the guest.
pub struct Devices {
    serial: SerialPort,
    keyboard: KeyboardController,
}

impl Devices {
    pub fn new(serial: SerialPort) -> Self {
        Self { serial, keyboard: KeyboardController::new() }
    }

    /// Answers IN. Only byte accesses meet a device.
    pub fn read(&mut self, port: u16, data: &mut [u8]) {
        data.fill(NOBODY);
        if let [byte] = data {
            *byte = match port {
                SERIAL..=SERIAL_LAST => self.serial.read((port - SERIAL) as u8),
                KEYBOARD_DATA => self.keyboard.take_output(),
                KEYBOARD_COMMAND => self.keyboard.status(),
                CLOCK_DATA => 0,
                _ => NOBODY,
            };
        }
    }

    /// Takes OUT. String instructions bring several bytes for one port.
    pub fn write(&mut self, port: u16, data: &[u8]) -> Request {
        match port {
            SERIAL..=SERIAL_LAST => {
                for &byte in data {
                    // Fails only when the interrupt cannot be raised or input overflows, of which
                    // there is none: Linux then polls.
                    let _ = self.serial.write((port - SERIAL) as u8, byte);
                }
            }
            KEYBOARD_DATA => data.iter().for_each(|&byte| self.keyboard.data(byte)),
            KEYBOARD_COMMAND => {
                let reset = data.iter().any(|&byte| self.keyboard.command(byte) == Request::Reset);
                return if reset { Request::Reset } else { Request::Nothing };
            }
            _ => {}
        }
        Request::Nothing
    }

    /// The console's output.
    pub fn output(&self) -> &Output {
        self.serial.writer()
    }

    /// The console's output.
    pub fn output_mut(&mut self) -> &mut Output {
        self.serial.writer_mut()
    }
}
