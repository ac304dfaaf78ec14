//! The 8254 timer of a PC: counter 0 drives interrupt line 0, counter 2 the speaker (port 0x61).
//!
//! It has no thread and no timer: the caller arms a host timer by [`Pit::next_expiry`] and calls
//! [`Pit::expired`] when it fires. Behind the VM's interrupt lock.
//!
//! Why ticks are made up for (*reinjection*): an older guest's clock is the number of its timer interrupts. Ticks
//! that come while the last one is unacknowledged would merge with it, and each time that the host was busy the
//! guest's clock would fall behind. So they are counted, and each acknowledgement brings the next. A guest that
//! knows of lost ticks, or takes its time elsewhere, can do without (KVM_REINJECT_CONTROL).
//!
//! Why periods are reckoned from the start and not from the last tick: a host timer is late by some microseconds
//! each time, and lateness that adds up is drift. After a long stop of the host (it was suspended, a debugger
//! held it) counting goes on from the present instead: a million ticks at once would help nobody.
//!
//! Why counts are functions of the time: nothing happens in the host while a counter runs that makes no interrupts.
//! A guest that reads a counter pays for the reading alone. Counter 2 is read so by guests that calibrate their TSC.

mod channel;

pub use channel::{FREQUENCY_HZ, PitChannelState};

use channel::{Channel, ticks_to_ns};
use host::GuestIndex;

/// The shortest period in input clocks at which interrupts are made (200 µs), so that a guest
/// cannot drown the host in timer interrupts.
const MIN_PERIOD_TICKS: u64 = 239;
/// Ticks kept for reinjection at most; a guest that takes none for minutes will not catch up.
const MAX_PENDING: u64 = 1 << 16;

/// The state that KVM_GET_PIT2 and KVM_SET_PIT2 carry (`struct kvm_pit_state2`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PitState {
    /// The three counters.
    pub channels: [PitChannelState; 3],
    /// KVM_PIT_FLAGS_HPET_LEGACY: the HPET has taken over line 0.
    pub hpet_legacy: bool,
    /// KVM_PIT_FLAGS_SPEAKER_DATA_ON: bit 1 of port 0x61.
    pub speaker_data: bool,
}

/// The 8254 with its three channels.
#[derive(Clone, Debug)]
pub struct Pit {
    channels: [Channel; 3],
    hpet_legacy: bool,
    speaker_data: bool,
    /// When counter 0 was started for interrupts; `None` when it makes none.
    started_ns: Option<u64>,
    /// Input clocks between interrupts.
    interval_ticks: u64,
    periodic: bool,
    /// Interrupts since the start.
    fired: u64,
    /// Deliver every tick, the late ones too.
    reinject: bool,
    /// Ticks that the guest has not acknowledged.
    pending: u64,
    /// The guest has acknowledged the last interrupt.
    acknowledged: bool,
}

impl Pit {
    /// Power-up state: the counters hold 65536 and have no mode.
    pub fn new(now_ns: u64) -> Self {
        Self {
            channels: [
                Channel::new(true, now_ns),
                Channel::new(true, now_ns),
                Channel::new(false, now_ns),
            ],
            hpet_legacy: false,
            speaker_data: false,
            started_ns: None,
            interval_ticks: 0,
            periodic: false,
            fired: 0,
            reinject: true,
            pending: 0,
            // True at the start: the first tick waits for nobody.
            acknowledged: true,
        }
    }

    /// Whether a port is the 8254's.
    #[inline]
    pub const fn covers(port: u16) -> bool {
        matches!(port, 0x40..=0x43)
    }

    /// Reads port 0x40 to 0x43.
    pub fn read(&mut self, port: u16, now_ns: u64) -> u8 {
        match GuestIndex::from(port & 3).of_mut(&mut self.channels) {
            Some(channel) => channel.read(now_ns),
            // The control word cannot be read.
            None => 0,
        }
    }

    /// Writes port 0x40 to 0x43. True when [`next_expiry`](Self::next_expiry) may have changed.
    pub fn write(&mut self, port: u16, value: u8, now_ns: u64) -> bool {
        let number = usize::from(port & 3);
        let Some(channel) = GuestIndex::from(number).of_mut(&mut self.channels) else {
            return self.write_control(value, now_ns);
        };
        // Only counter 0 makes interrupts; the others are functions of the time.
        let loaded = channel.write(value, now_ns) && number == 0;
        if loaded {
            self.start(now_ns);
        }
        loaded
    }

    fn write_control(&mut self, value: u8, now_ns: u64) -> bool {
        let number = usize::from(value >> 6);
        if number == 3 {
            // Read-back: the counters in bits 3:1, what to latch in bits 5:4, active low.
            for (bit, channel) in self.channels.iter_mut().enumerate() {
                if value >> 1 & 1 << bit == 0 {
                    continue;
                }
                if value & 0x20 == 0 {
                    channel.latch_count(now_ns);
                }
                if value & 0x10 == 0 {
                    channel.latch_status(now_ns);
                }
            }
            return false;
        }
        let Some(channel) = GuestIndex::from(number).of_mut(&mut self.channels) else {
            return false;
        };
        // No access mode: this is the latch command, and the counter goes on.
        if value & 0x30 == 0 {
            channel.latch_count(now_ns);
            return false;
        }
        channel.control(value, now_ns);
        if number == 0 {
            // It stands still until a count is written.
            self.started_ns = None;
        }
        number == 0
    }

    /// Starts making interrupts as counter 0 is now programmed.
    fn start(&mut self, now_ns: u64) {
        // Until all is known: modes that make no interrupts return early.
        self.started_ns = None;
        self.fired = 0;
        // Ticks that were owed were those of the old program.
        self.pending = 0;
        self.acknowledged = true;
        let state = &self.channels[0].state;
        self.periodic = matches!(state.mode, 2 | 3);
        // Modes 1 and 5 wait for a rising gate, and counter 0's is tied high.
        if self.hpet_legacy || !matches!(state.mode, 0 | 2 | 3 | 4) {
            return;
        }
        // A one-shot may be as short as it likes: it fires once.
        // Never 0: a loaded count of 0 stands for the greatest.
        self.interval_ticks = u64::from(state.count);
        if self.periodic {
            self.interval_ticks = self.interval_ticks.max(MIN_PERIOD_TICKS);
        }
        self.started_ns = Some(now_ns);
    }

    /// When counter 0 makes its next interrupt, as absolute host time. Reckoned from the start, so
    /// that periods do not drift.
    pub fn next_expiry(&self) -> Option<u64> {
        let ticks = (self.fired + 1).saturating_mul(self.interval_ticks);
        Some(self.started_ns?.saturating_add(ticks_to_ns(ticks)))
    }

    /// The host timer rang. True when line 0 is to be pulsed.
    pub fn expired(&mut self, now_ns: u64) -> bool {
        let mut ticks = 0;
        // Ends at a thousand, see below: after a long stop there may be millions of them.
        while self.next_expiry().is_some_and(|expiry| expiry <= now_ns) {
            ticks += 1;
            self.fired += 1;
            if !self.periodic {
                self.started_ns = None;
            } else if ticks >= 1000 {
                // After a long stop of the host count on from the present.
                self.started_ns = Some(now_ns);
                self.fired = 0;
            }
        }
        // The host timer was for an older program, or came early.
        if ticks == 0 {
            return false;
        }
        // Late ticks merge into one pulse, which the controllers may merge with one that waits.
        if !self.reinject {
            return true;
        }
        self.pending = (self.pending + ticks).min(MAX_PENDING);
        // One tick in flight at a time: the next goes when the guest has acknowledged this one.
        core::mem::take(&mut self.acknowledged)
    }

    /// The guest acknowledged line 0. True when line 0 is to be pulsed for a tick that is owed.
    pub fn acked(&mut self) -> bool {
        if !self.reinject {
            return false;
        }
        self.acknowledged = true;
        // Saturating: the guest may end line 0 for another source's interrupt.
        self.pending = self.pending.saturating_sub(1);
        if self.pending == 0 {
            return false;
        }
        self.acknowledged = false;
        true
    }

    /// KVM_REINJECT_CONTROL (KVM API §4.63): with it each tick is delivered, late rather than
    /// never; without it a tick that comes while the last is pending is lost.
    pub fn set_reinject(&mut self, on: bool) {
        if self.reinject != on {
            self.reinject = on;
            // What was owed by the other rule is nobody's now.
            self.forget_owed();
        }
    }

    /// Line 0 was unmasked. A tick that came under the mask is lost, and nobody will acknowledge it: the next one does not wait
    /// for that.
    pub fn forget_owed(&mut self) {
        self.pending = 0;
        self.acknowledged = true;
    }

    /// Whether acknowledgements of line 0 must be told to [`acked`](Self::acked).
    pub fn wants_acks(&self) -> bool {
        self.reinject
    }

    /// Reads port 0x61: gate and data bits, the refresh toggle and counter 2's output.
    pub fn read_speaker(&self, now_ns: u64) -> u8 {
        let counter = &self.channels[2];
        // The refresh request toggles every 15 µs or so; nobody needs it exactly.
        let refresh = (now_ns >> 14 & 1) as u8;
        counter.state.gate & 1
            | u8::from(self.speaker_data) << 1
            | refresh << 4
            | u8::from(counter.output(now_ns)) << 5
    }

    /// Writes port 0x61: bit 0 is counter 2's gate, bit 1 lets its output to the speaker.
    pub fn write_speaker(&mut self, value: u8, now_ns: u64) {
        self.speaker_data = value & 2 != 0;
        // Counter 2's alone has a gate that software can reach.
        self.channels[2].set_gate(value & 1 != 0, now_ns);
    }

    /// The state for saving.
    pub fn save(&self, now_ns: u64) -> PitState {
        PitState {
            channels: [
                self.channels[0].save(now_ns),
                self.channels[1].save(now_ns),
                self.channels[2].save(now_ns),
            ],
            hpet_legacy: self.hpet_legacy,
            speaker_data: self.speaker_data,
        }
    }

    /// Takes over a saved state; the counts begin anew at `now_ns`, as under KVM.
    pub fn restore(&mut self, state: &PitState, now_ns: u64) {
        for (channel, saved) in self.channels.iter_mut().zip(&state.channels) {
            *channel = Channel::from_state(saved, now_ns);
        }
        // Their gates are tied high.
        for channel in self.channels.iter_mut().take(2) {
            channel.set_gate(true, now_ns);
        }
        self.hpet_legacy = state.hpet_legacy;
        self.speaker_data = state.speaker_data;
        // Last: it looks at the flags and the channel that were restored.
        self.start(now_ns);
    }
}

#[cfg(test)]
mod tests;
