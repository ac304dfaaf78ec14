//! One counter of the 8254: its registers, and its count and output as functions of the time.
//! 8254 data sheet, "Mode definitions" and "Read operations".

/// Input clock of a PC's 8254.
pub const FREQUENCY_HZ: u64 = 1_193_182;
const NS_PER_S: u64 = 1_000_000_000;

/// Nanoseconds to ticks of the input clock, rounded down.
pub(super) fn ns_to_ticks(ns: u64) -> u64 {
    // Whole seconds apart: nanoseconds since boot times the frequency would overflow within hours.
    let (whole, rest) = (ns / NS_PER_S, ns % NS_PER_S);
    whole.wrapping_mul(FREQUENCY_HZ).wrapping_add(rest * FREQUENCY_HZ / NS_PER_S)
}

/// Ticks of the input clock to nanoseconds, rounded up: by then the last one has passed.
pub(super) fn ticks_to_ns(ticks: u64) -> u64 {
    let (whole, rest) = (ticks / FREQUENCY_HZ, ticks % FREQUENCY_HZ);
    whole.saturating_mul(NS_PER_S).saturating_add((rest * NS_PER_S).div_ceil(FREQUENCY_HZ))
}

/// Where in a two-byte access the next byte stands (the numbers of `struct kvm_pit_channel_state`).
mod byte {
    pub const LOW: u8 = 1;
    pub const HIGH: u8 = 2;
    pub const WORD_LOW: u8 = 3;
    pub const WORD_HIGH: u8 = 4;
}

/// Long enough ago that any one-shot has run out: a counter that waits for its trigger.
const LONG_AGO_NS: i64 = NS_PER_S as i64;

/// The state of a counter as KVM_GET_PIT2 and KVM_SET_PIT2 carry it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PitChannelState {
    /// Reload value, 1 to 65536 (in binary, whatever `bcd` says).
    pub count: u32,
    /// Count caught by a latch command, as it will be read.
    pub latched_count: u16,
    /// Byte of the latched count that is read next; 0 when none is latched.
    pub count_latched: u8,
    /// A status byte is latched.
    pub status_latched: u8,
    /// The status byte.
    pub status: u8,
    /// Byte that is read next.
    pub read_state: u8,
    /// Byte that is written next.
    pub write_state: u8,
    /// The low byte of a count being written.
    pub write_latch: u8,
    /// Access mode of the control word: 1 low, 2 high, 3 both bytes.
    pub rw_mode: u8,
    /// Mode 0 to 5, 0xff before the first control word.
    pub mode: u8,
    /// Counts in decimal.
    pub bcd: u8,
    /// The gate input.
    pub gate: u8,
    /// Host time at which the count was loaded.
    pub count_load_time: i64,
}

/// A counter of 16 bits, and how it is read and written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Channel {
    pub(super) state: PitChannelState,
    /// Time counted when the gate went low; the count stands still there.
    held_ns: Option<u64>,
    /// A control word came and no count since.
    null_count: bool,
}

impl Channel {
    pub(super) fn new(gate: bool, now_ns: u64) -> Self {
        let state = PitChannelState {
            count: 0x1_0000,
            // No mode: the counter has no output and makes no interrupt until it is programmed.
            mode: 0xff,
            gate: u8::from(gate),
            count_load_time: now_ns as i64,
            ..PitChannelState::default()
        };
        Self { state, held_ns: None, null_count: true }
    }

    pub(super) fn from_state(state: &PitChannelState, now_ns: u64) -> Self {
        // The VMM may give any number, and a count is at most 65536.
        let count = match state.count & 0x1_ffff {
            0 => 0x1_0000,
            count => count.min(0x1_0000),
        };
        let mut channel = Self {
            // The saved load time is of another host's clock.
            state: PitChannelState { count, count_load_time: now_ns as i64, ..*state },
            // A gate that is low holds the count at its beginning.
            held_ns: (state.gate == 0).then_some(0),
            null_count: false,
        };
        if channel.waits_for_trigger() {
            channel.untrigger(now_ns);
        }
        channel
    }

    /// Modes 1 and 5 start at a rising gate and at nothing else.
    fn waits_for_trigger(&self) -> bool {
        matches!(self.state.mode, 1 | 5)
    }

    fn untrigger(&mut self, now_ns: u64) {
        self.state.count_load_time = (now_ns as i64).wrapping_sub(LONG_AGO_NS);
        self.held_ns = None;
    }

    /// Ticks counted since the count was loaded or triggered.
    fn ticks(&self, now_ns: u64) -> u64 {
        let ns = match self.held_ns {
            Some(held) => held,
            // Signed: a restored load time may lie in the future.
            None => (now_ns as i64).wrapping_sub(self.state.count_load_time).max(0) as u64,
        };
        ns_to_ticks(ns)
    }

    /// The counting element, in binary.
    pub(super) fn counter(&self, now_ns: u64) -> u32 {
        let ticks = self.ticks(now_ns);
        // Never 0, whatever was restored: it is divided by.
        let reload = u64::from(self.state.count.max(1));
        let wrap = if self.state.bcd != 0 { 10_000 } else { 0x1_0000 };
        // From the time and not from a count that somebody decrements: nothing runs while nobody reads.
        let value = match self.state.mode {
            2 => reload - ticks % reload,
            // Counts by two, so it passes through the range twice in a period.
            3 => reload - ticks.wrapping_mul(2) % reload,
            // After zero these go on from the top.
            _ => (reload % wrap + wrap - ticks % wrap) % wrap,
        };
        (value % wrap) as u32
    }

    /// The OUT pin.
    pub(super) fn output(&self, now_ns: u64) -> bool {
        let ticks = self.ticks(now_ns);
        let reload = u64::from(self.state.count.max(1));
        match self.state.mode {
            0 => !self.null_count && ticks >= reload,
            1 => ticks >= reload,
            // A low gate forces it high.
            2 => self.state.gate == 0 || ticks % reload != reload - 1,
            3 => self.state.gate == 0 || ticks % reload < reload.div_ceil(2),
            4 | 5 => ticks != reload,
            _ => false,
        }
    }

    /// Drives the gate input.
    pub(super) fn set_gate(&mut self, high: bool, now_ns: u64) {
        let was = self.state.gate != 0;
        // Only a change does anything: a guest writes port 0x61 for the speaker, too.
        if was == high {
            return;
        }
        self.state.gate = u8::from(high);
        match (self.state.mode, high) {
            (1 | 5, true) => self.state.count_load_time = now_ns as i64,
            (1 | 5, false) => {}
            // A periodic counter starts its period anew, the others go on where they stood.
            (2 | 3, true) => {
                self.held_ns = None;
                self.state.count_load_time = now_ns as i64;
            }
            (_, true) => {
                let held = self.held_ns.take().unwrap_or(0);
                self.state.count_load_time = now_ns.wrapping_sub(held) as i64;
            }
            (_, false) => {
                let ns = (now_ns as i64).wrapping_sub(self.state.count_load_time).max(0);
                self.held_ns = Some(ns as u64);
            }
        }
    }

    /// The control word's part for this counter: access mode, mode, BCD.
    pub(super) fn control(&mut self, value: u8, now_ns: u64) {
        let access = value >> 4 & 3;
        let mode = value >> 1 & 7;
        let state = &mut self.state;
        state.rw_mode = access;
        state.read_state = access;
        state.write_state = access;
        // Modes 6 and 7 are 2 and 3: the top bit is a don't-care there.
        state.mode = if mode > 5 { mode & 3 } else { mode };
        state.bcd = value & 1;
        // What was latched belongs to the old program.
        state.count_latched = 0;
        state.status_latched = 0;
        state.count_load_time = now_ns as i64;
        // A gate that is low holds the new count where it begins.
        self.held_ns = (state.gate == 0).then_some(0);
        self.null_count = true;
        if self.waits_for_trigger() {
            self.untrigger(now_ns);
        }
    }

    /// The counter latch command: catches the count until it is read.
    pub(super) fn latch_count(&mut self, now_ns: u64) {
        // A second command before the first was read is ignored by the chip: the guest would get halves of two counts.
        if self.state.count_latched == 0 {
            self.state.latched_count = self.readable(now_ns);
            // By access mode: a latch of a counter that is read by one byte is used up by one read.
            self.state.count_latched = self.state.rw_mode;
        }
    }

    /// The read-back command's other half: catches the status.
    pub(super) fn latch_status(&mut self, now_ns: u64) {
        // As for the count: a second command does not disturb what waits to be read.
        if self.state.status_latched == 0 {
            // The output at the time of the command, not of the read.
            self.state.status = u8::from(self.output(now_ns)) << 7
                | u8::from(self.null_count) << 6
                | (self.state.rw_mode & 3) << 4
                | (self.state.mode & 7) << 1
                | self.state.bcd & 1;
            self.state.status_latched = 1;
        }
    }

    /// The count as the guest reads it.
    fn readable(&self, now_ns: u64) -> u16 {
        let value = self.counter(now_ns);
        if self.state.bcd != 0 { to_bcd(value) } else { value as u16 }
    }

    /// A read of the counter's port.
    pub(super) fn read(&mut self, now_ns: u64) -> u8 {
        // Status before count, if both were latched (8254 data sheet, read-back).
        if self.state.status_latched != 0 {
            self.state.status_latched = 0;
            return self.state.status;
        }
        let latched = self.state.latched_count;
        if self.state.count_latched != 0 {
            let (value, next) = match self.state.count_latched {
                byte::LOW => (latched as u8, 0),
                byte::HIGH => ((latched >> 8) as u8, 0),
                byte::WORD_LOW => (latched as u8, byte::WORD_HIGH),
                _ => ((latched >> 8) as u8, 0),
            };
            self.state.count_latched = next;
            return value;
        }
        // Without a latch a guest may read two halves of different counts, as on the chip.
        let count = self.readable(now_ns);
        match self.state.read_state {
            byte::HIGH => (count >> 8) as u8,
            byte::WORD_LOW => {
                self.state.read_state = byte::WORD_HIGH;
                count as u8
            }
            byte::WORD_HIGH => {
                self.state.read_state = byte::WORD_LOW;
                (count >> 8) as u8
            }
            _ => count as u8,
        }
    }

    /// A write of the counter's port. True when it completed a count, which is now loaded.
    pub(super) fn write(&mut self, value: u8, now_ns: u64) -> bool {
        let value = u16::from(value);
        let count = match self.state.write_state {
            byte::HIGH => value << 8,
            byte::WORD_LOW => {
                // The old count goes on until the second byte is there.
                self.state.write_latch = value as u8;
                self.state.write_state = byte::WORD_HIGH;
                return false;
            }
            byte::WORD_HIGH => {
                self.state.write_state = byte::WORD_LOW;
                value << 8 | u16::from(self.state.write_latch)
            }
            _ => value,
        };
        self.load(count, now_ns);
        true
    }

    fn load(&mut self, count: u16, now_ns: u64) {
        let bcd = self.state.bcd != 0;
        // 0 stands for the greatest count: the counter passes zero last.
        self.state.count = match if bcd { from_bcd(count) } else { u32::from(count) } {
            0 if bcd => 10_000,
            0 => 0x1_0000,
            count => count,
        };
        self.null_count = false;
        // A counter that waits for its trigger takes the new count at the next one.
        if !self.waits_for_trigger() {
            self.state.count_load_time = now_ns as i64;
            self.held_ns = (self.state.gate == 0).then_some(0);
        }
    }

    /// The state for saving; a count that stands still is given the load time that explains it.
    pub(super) fn save(&self, now_ns: u64) -> PitChannelState {
        let mut state = self.state;
        if let Some(held) = self.held_ns {
            state.count_load_time = now_ns.wrapping_sub(held) as i64;
        }
        state
    }
}

fn from_bcd(value: u16) -> u32 {
    (0..4).rev().fold(0, |sum, digit| sum * 10 + u32::from(value >> (digit * 4) & 0xf))
}

fn to_bcd(value: u32) -> u16 {
    let digit = |divisor: u32, shift: u32| (value / divisor % 10) << shift;
    (digit(1, 0) | digit(10, 4) | digit(100, 8) | digit(1000, 12)) as u16
}
