//! Requests: what a sender on any CPU, or one of the APIC's own sources, puts into the IRR, and how the owner
//! finds and takes it. SDM vol. 3A §10.5.1, §10.6, §10.8.4.
//!
//! Both halves stand here because they agree on an order. A sender sets the bit and then the hint that
//! something is there; the owner, who looks at the hint alone on its way into the guest, drops the hint first
//! and looks at the bits after. So whoever comes second leaves the hint set.

use x86::{
    Vector,
    apic::{esr, lvt},
};

use super::Lapic;
use crate::atomic::Ordering::*;
use crate::message::{DeliveryMode, IrqMessage, Trigger};

/// What became of a message at one APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Accepted {
    /// Not taken: APIC disabled, or a message that means nothing here.
    Ignored,
    /// Already pending: whoever set it has kicked the vCPU.
    Coalesced,
    /// Newly pending in the IRR: kick the vCPU.
    Pending,
    /// The vCPU is to get an NMI.
    Nmi,
    /// The vCPU is to get an SMI.
    Smi,
    /// The vCPU is to get INIT.
    Init,
    /// The vCPU is to start at this page, if it waits for it.
    Sipi(Vector),
    /// The vCPU is to take a vector from the 8259A.
    ExtInt,
}

impl Accepted {
    /// Whether the vCPU has something new to look at.
    #[inline]
    pub const fn kick(self) -> bool {
        !matches!(self, Self::Ignored | Self::Coalesced)
    }

    /// Whether the message arrived, for KVM_IRQ_LINE_STATUS: false for a coalesced or ignored one.
    #[inline]
    pub const fn delivered(self) -> bool {
        self.kick()
    }
}

/// The local vector table's entries (SDM vol. 3A §10.5.1), in register order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalVector {
    /// LVT entry of the APIC timer.
    Timer = 0,
    /// LVT entry of the thermal sensor.
    Thermal = 1,
    /// LVT entry of the performance counters.
    Performance = 2,
    /// LINT0 pin: the 8259A's output.
    Lint0 = 3,
    /// LINT1 pin: NMI.
    Lint1 = 4,
    /// LVT entry of APIC errors.
    Error = 5,
    /// Corrected machine checks: not in the row of the others, and only with [`Features::cmci`].
    ///
    /// [`Features::cmci`]: super::Features::cmci
    Cmci = 6,
}

impl Lapic {
    /// Takes a message that [`matches`](Self::matches) addressed here.
    #[inline]
    pub fn accept(&self, msg: &IrqMessage) -> Accepted {
        match msg.delivery {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => {
                if msg.notify_eoi {
                    // Before the request: the owner may take and end the vector at once, and has to
                    // report that end.
                    self.eoi_notify.set_shared(msg.vector.0);
                    // The hint behind the bit: who sees the hint finds the bit.
                    self.any_notify.store(1, Release);
                }
                self.accept_fixed(msg.vector, msg.trigger)
            }
            DeliveryMode::Smi => Accepted::Smi,
            DeliveryMode::Nmi => Accepted::Nmi,
            // The INIT level de-assert only synchronised arbitration ids on old buses.
            DeliveryMode::Init if msg.trigger == Trigger::Level && !msg.assert => Accepted::Ignored,
            DeliveryMode::Init => Accepted::Init,
            // Not judged here: whether the vCPU waits for one is known to its own state, in order
            // with the INIT before it.
            DeliveryMode::Startup => Accepted::Sipi(msg.vector),
            // From the bus it goes nowhere: the 8259A is wired to LINT0.
            DeliveryMode::ExtInt => Accepted::Ignored,
        }
    }

    /// Makes a vector pending.
    #[inline]
    pub fn accept_fixed(&self, vector: Vector, trigger: Trigger) -> Accepted {
        // NMI, SMI, INIT and SIPI come through all the same (SDM vol. 3A §10.4.7.2), hence not in accept().
        // A read that races with the owner's write of the SVR is as good as a message a moment
        // earlier or later.
        if !self.software_enabled() {
            return Accepted::Ignored;
        }
        // Below 16 vectors are exceptions'. The error is the receiver's to log, whoever sent it
        // (SDM vol. 3A §10.5.3).
        let (v, level) = match vector.0 {
            16.. => (vector.0, trigger == Trigger::Level),
            _ => match self.log_error(esr::RECEIVED_ILLEGAL_VECTOR) {
                Some(instead) => (instead.0, false),
                None => return Accepted::Ignored,
            },
        };
        // The trigger mode is to be in place when the owner sees the request.
        if self.tmr.test(v) != level {
            if level {
                self.tmr.set_shared(v);
            } else {
                self.tmr.clear_shared(v);
            }
        }
        // The bit before the hint: see the module's head.
        // Locked: two senders may have the same word, and only one of them is to find the bit
        // clear.
        let newly = self.irr.set_shared(v);
        self.irr_pending.store(1, Release);
        if newly { Accepted::Pending } else { Accepted::Coalesced }
    }

    /// Logs an error and, when its LVT entry is unmasked, makes the error vector pending
    /// (SDM vol. 3A §10.5.3).
    pub(super) fn raise_error(&self, bit: u32) -> Accepted {
        match self.log_error(bit) {
            Some(vector) => self.accept_fixed(vector, Trigger::Edge),
            None => Accepted::Ignored,
        }
    }

    /// Logs an error: the vector that tells the guest of it, if its LVT entry is unmasked and names a legal one.
    #[cold]
    fn log_error(&self, bit: u32) -> Option<Vector> {
        // Gathered until the guest writes the ESR; no order is needed, since nothing but the
        // interrupt depends on it.
        self.esr_pending.fetch_or(bit, Relaxed);
        let lvt = self.lvt(LocalVector::Error);
        // An error vector that is itself illegal would be an error again, without end.
        (lvt & lvt::MASKED == 0 && lvt & 0xff >= 16).then_some(Vector(lvt as u8))
    }

    /// An event of one of the APIC's own sources, delivered as its LVT entry says.
    #[inline]
    pub fn deliver_local(&self, source: LocalVector) -> Accepted {
        let lvt = self.lvt(source);
        // Software disabling needs no look: it has set the mask bit of every entry.
        if lvt & lvt::MASKED != 0 || !self.enabled() {
            return Accepted::Ignored;
        }
        // Timer and error have no delivery mode field: their bits read as zero, which is fixed.
        match DeliveryMode::from_bits(lvt >> 8) {
            Some(DeliveryMode::Fixed) => {
                // Only LINT0 and LINT1 have a trigger mode, and LINT1 is always an edge (SDM vol.
                // 3A §10.5.1).
                let level = source == LocalVector::Lint0 && lvt & (1 << 15) != 0;
                let trigger = if level { Trigger::Level } else { Trigger::Edge };
                self.accept_fixed(Vector(lvt as u8), trigger)
            }
            Some(DeliveryMode::Nmi) => Accepted::Nmi,
            Some(DeliveryMode::Smi) => Accepted::Smi,
            Some(DeliveryMode::Init) => Accepted::Init,
            Some(DeliveryMode::ExtInt) => Accepted::ExtInt,
            // These modes do not exist in a local vector table (SDM vol. 3A §10.5.1).
            Some(DeliveryMode::LowestPriority | DeliveryMode::Startup) | None => Accepted::Ignored,
        }
    }

    /// Whether this CPU takes the 8259A's interrupts: APIC off, or LINT0 unmasked in ExtINT mode.
    #[inline]
    pub fn accepts_pic(&self) -> bool {
        // With the APIC off, LINT0 is the CPU's INTR pin (SDM vol. 3A §10.4.3).
        if !self.enabled() {
            return true;
        }
        // Mask and mode in one comparison: ExtINT is 7, and the mask has to be clear.
        let lint0 = self.lvt(LocalVector::Lint0);
        lint0 & (lvt::MASKED | 0x700) == 0x700
    }

    /// Whether LINT0 is unmasked in NMI mode: the PIT then works as an NMI watchdog.
    #[inline]
    pub fn lint0_is_nmi(&self) -> bool {
        self.enabled() && self.lvt(LocalVector::Lint0) & (lvt::MASKED | 0x700) == 0x400
    }
}

/// The owner's half. Only the owner calls these.
impl Lapic {
    /// The highest pending vector whose class is above the processor priority.
    #[inline]
    pub fn highest_pending(&self) -> Option<Vector> {
        // Relaxed: the vCPU's mode was exchanged before, by a locked instruction, and a later
        // sender kicks.
        if self.irr_pending.load(Relaxed) == 0 {
            return None;
        }
        self.pending_above(self.ppr.load(Relaxed))
    }

    /// The highest pending vector, whether or not the processor priority holds it back: what an
    /// SVM entry needs to know to ask for an exit when the guest lowers its TPR.
    #[inline]
    pub fn highest_requested(&self) -> Option<Vector> {
        // Also where the priority holds it back: the TPR may be the guest's to lower without an
        // exit.
        if self.irr_pending.load(Relaxed) == 0 || !self.enabled() {
            return None;
        }
        match self.irr.highest() {
            0 => None,
            vector => Some(Vector(vector)),
        }
    }

    /// Whether anything may be pending: one load, for the entry path.
    #[inline]
    pub fn maybe_pending(&self) -> bool {
        self.irr_pending.load(Relaxed) != 0
    }

    fn pending_above(&self, priority: u8) -> Option<Vector> {
        // Zero for an empty set is above no priority: the comparison below says no by itself.
        let vector = self.irr.highest();
        // By class, that is by the upper four bits: a vector of the same class waits (SDM vol. 3A
        // §10.8.3.1).
        (self.enabled() && vector & 0xf0 > priority & 0xf0).then_some(Vector(vector))
    }

    /// Takes `vector`, which [`highest_pending`](Self::highest_pending) named, out of the IRR, to be
    /// delivered: by then another one may be requested. [`set_isr`](Self::set_isr) or
    /// [`set_irr`](Self::set_irr) follows.
    #[inline]
    pub fn clear_irr(&self, vector: Vector) {
        // A sender sets its bit first and the hint after; so drop the hint first, take the bit out
        // with a locked instruction, and look again. (x86 keeps a store before a locked
        // instruction, which is what makes this order hold.)
        self.irr_pending.store(0, Release);
        // Locked, though only the owner clears: a sender's bit in the same word would be lost by a
        // plain store.
        self.irr.clear_shared(vector.0);
        // Set again by the owner's own look: a sender that came before the hint was dropped will
        // not do it.
        if self.irr.any() {
            self.irr_pending.store(1, Relaxed);
        }
    }

    /// A vector that was taken is not to be delivered now after all.
    #[inline]
    pub fn set_irr(&self, vector: Vector) {
        self.irr.set_shared(vector.0);
        self.irr_pending.store(1, Release);
    }

    /// Sets the hint by looking; after a change that was not made bit by bit. It is cleared before the
    /// look: who sends after that sets it again.
    pub(super) fn refresh_pending(&self) {
        // Locked: no look may come before the hint is dropped.
        self.irr_pending.swap(0, SeqCst);
        if self.irr.any() {
            self.irr_pending.store(1, Release);
        }
    }
}
