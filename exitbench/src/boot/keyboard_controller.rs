//! As much of the i8042 as Linux needs to find it, find nothing attached, and reset the machine by
//! command 0xfe on port 0x64.

const OUTPUT_FULL: u8 = 1;
const NOT_LOCKED: u8 = 0x10;
const READ_CONTROL: u8 = 0x20;
const WRITE_CONTROL: u8 = 0x60;
const TEST_CONTROLLER: u8 = 0xaa;
const TEST_PASSED: u8 = 0x55;
const RESET: u8 = 0xfe;

/// Keyboard and mouse clocks off: nothing attached.
const CONTROL: u8 = 0x30;

/// The controller's state.
#[derive(Debug)]
pub struct KeyboardController {
    control: u8,
    output: Option<u8>,
    control_follows: bool,
}

/// What a write to the controller asks of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Nothing,
    Reset,
}

impl KeyboardController {
    pub fn new() -> Self {
        Self { control: CONTROL, output: None, control_follows: false }
    }

    /// Port 0x64, read.
    pub fn status(&self) -> u8 {
        if self.output.is_some() { NOT_LOCKED | OUTPUT_FULL } else { NOT_LOCKED }
    }

    /// Port 0x60, read.
    pub fn take_output(&mut self) -> u8 {
        self.output.take().unwrap_or(0)
    }

    /// Port 0x64, written.
    pub fn command(&mut self, command: u8) -> Request {
        self.control_follows = command == WRITE_CONTROL;
        match command {
            READ_CONTROL => self.output = Some(self.control),
            TEST_CONTROLLER => self.output = Some(TEST_PASSED),
            RESET => return Request::Reset,
            _ => {}
        }
        Request::Nothing
    }

    /// Port 0x60, written. A byte for the keyboard finds none and gets no answer.
    pub fn data(&mut self, byte: u8) {
        if std::mem::take(&mut self.control_follows) {
            self.control = byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_byte_reads_back_as_written() {
        let mut controller = KeyboardController::new();
        controller.command(WRITE_CONTROL);
        controller.data(0x74);
        controller.data(0xff);
        assert_eq!(controller.status(), NOT_LOCKED);
        controller.command(READ_CONTROL);
        assert_eq!(controller.status(), NOT_LOCKED | OUTPUT_FULL);
        assert_eq!(controller.take_output(), 0x74);
        assert_eq!(controller.status(), NOT_LOCKED);
    }

    #[test]
    fn reset_is_asked_for_by_its_command_alone() {
        let mut controller = KeyboardController::new();
        controller.data(RESET);
        assert_eq!(controller.command(TEST_CONTROLLER), Request::Nothing);
        assert_eq!(controller.take_output(), TEST_PASSED);
        assert_eq!(controller.command(RESET), Request::Reset);
    }
}
