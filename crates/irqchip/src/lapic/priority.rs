//! Interrupts in service: processor priority, ISR, end of interrupt. SDM vol. 3A §10.8. Only the owner calls
//! these; they are the hot half of the APIC.

use x86::{
    Vector,
    apic::{VectorWords, svr},
};

use super::{FEATURE_DIRECTED_EOI, Lapic, LapicEffect};
use crate::atomic::Ordering::*;

impl Lapic {
    /// A vector that was taken has been delivered: it is in service.
    #[inline]
    pub fn set_isr(&self, vector: Vector) {
        self.isr.set_owned(vector.0);
        // Compared and not taken for granted: a VMM may have restored anything into the ISR.
        if vector.0 > self.isr_highest.load(Relaxed) {
            self.isr_highest.store(vector.0, Relaxed);
        }
        self.update_ppr();
    }

    /// Moves `vector` into service: [`clear_irr`](Self::clear_irr) and [`set_isr`](Self::set_isr).
    #[inline]
    pub fn ack(&self, vector: Vector) {
        self.clear_irr(vector);
        self.set_isr(vector);
    }

    /// Puts a vector that was acknowledged but could not be injected back into the IRR, as when an
    /// injection is cancelled before it reached the guest.
    pub fn unack(&self, vector: Vector) {
        self.isr.clear_owned(vector.0);
        self.isr_highest.store(self.isr.highest(), Relaxed);
        self.update_ppr();
        self.irr.set_shared(vector.0);
        self.irr_pending.store(1, Relaxed);
    }

    /// The shortest way of a self-IPI: straight into service, the IRR never touched.
    ///
    /// True when `vector` is in service now and the caller must inject it at once; so call this
    /// only when the guest can take an interrupt. False (nothing changed) when something else is
    /// pending or the priority holds it back: then use [`accept_fixed`](Self::accept_fixed).
    #[inline]
    pub fn self_ipi_direct(&self, vector: Vector) -> bool {
        let v = vector.0;
        // What is pending goes first if its priority is higher; to compare would cost more than
        // this spares.
        if self.irr_pending.load(Relaxed) != 0
            || !self.software_enabled()
            || v & 0xf0 <= self.ppr.load(Relaxed) & 0xf0
            || v < 16
        {
            return false;
        }
        // A self-IPI is an edge. A level bit left from before would send its EOI to the I/O APIC, which knows nothing of it.
        // Looked at first: the locked instruction is spared where the bit is clear, which is nearly
        // always.
        if self.tmr.test(v) {
            self.tmr.clear_shared(v);
        }
        self.set_isr(Vector(v));
        true
    }

    /// A write of the EOI register: ends the highest interrupt in service.
    ///
    /// The effect is [`LapicEffect::Eoi`], with `level` when the I/O APIC must hear of it. After it
    /// a held-back interrupt may have become deliverable.
    #[inline]
    pub fn eoi(&self) -> LapicEffect {
        let vector = self.isr_highest.load(Relaxed);
        // An EOI with nothing in service means nothing; Linux writes one while it sets its timer
        // up.
        if vector == 0 {
            return LapicEffect::None;
        }
        // No locked instruction: nobody but the owner changes the ISR.
        self.isr.clear_owned(vector);
        // Found anew by a look at four words: what was interrupted may be any vector below.
        self.isr_highest.store(self.isr.highest(), Relaxed);
        self.update_ppr();
        LapicEffect::Eoi { vector: Vector(vector), level: self.reports(vector) }
    }

    /// Whether the end of `vector` is reported.
    #[inline]
    pub(super) fn reports(&self, vector: u8) -> bool {
        // What a guest with directed EOIs suppresses is the broadcast; who asked for the vector by
        // name still hears of it.
        // By the trigger mode at the time of the request, which the TMR keeps: the pin may have
        // been changed since.
        (self.tmr.test(vector) && !self.eoi_broadcast_suppressed()) || self.notifies(vector)
    }

    /// Nobody waits for the end of `vector` any more: its EOI is reported no longer.
    pub fn forget_notify(&self, vector: Vector) {
        // The hint stays: other vectors may be waited for, and a look too many costs a cache line
        // only.
        self.eoi_notify.clear_shared(vector.0);
    }

    /// Replaces the vectors whose ends somebody waits for. Only for an owner whose senders ask for no
    /// reports themselves ([`IrqMessage::notify_eoi`](crate::IrqMessage::notify_eoi)).
    pub fn await_ends(&self, vectors: &VectorWords) {
        // The set before the hint that leads to it.
        self.eoi_notify.replace_owned(vectors);
        self.any_notify.store(u8::from(*vectors != [0; 4]), Release);
    }

    /// Whether somebody waits for the end of `vector`.
    pub fn awaits_end(&self, vector: Vector) -> bool {
        self.notifies(vector.0)
    }

    /// Whether `vector` is requested or in service.
    pub fn has_not_ended(&self, vector: Vector) -> bool {
        self.irr.test(vector.0) || self.isr.test(vector.0)
    }

    #[inline]
    fn notifies(&self, vector: u8) -> bool {
        self.any_notify.load(Relaxed) != 0 && self.eoi_notify.test(vector)
    }

    pub(super) fn eoi_broadcast_suppressed(&self) -> bool {
        self.svr.load(Relaxed) & svr::DIRECTED_EOI != 0 && self.has(FEATURE_DIRECTED_EOI)
    }

    /// Whether the EOI of `vector`, which was taken and is about to be delivered, may be left to a flag in guest
    /// memory (PV EOI): nothing is in service, it is edge-triggered and nobody waits for its end,
    /// and nothing is pending behind it that its EOI would let through.
    #[inline]
    pub fn pv_eoi_possible(&self, vector: Vector) -> bool {
        self.isr_highest.load(Relaxed) == 0
            && !self.tmr.test(vector.0)
            && !self.notifies(vector.0)
            // The hint is enough: it may say too much, and then the EOI exits as ever.
            && self.irr_pending.load(Relaxed) == 0
    }

    /// The vector in service whose EOI may be left to a flag in guest memory (PV EOI): the only
    /// one, edge-triggered, and nothing pending behind it that its EOI would let through.
    #[inline]
    pub fn pv_eoi_candidate(&self) -> Option<Vector> {
        let vector = self.isr_highest.load(Relaxed);
        if vector == 0
            || self.irr_pending.load(Relaxed) != 0
            || self.tmr.test(vector)
            || self.notifies(vector)
        {
            return None;
        }
        Some(Vector(vector))
    }

    /// Highest vector in service.
    #[inline]
    pub fn in_service(&self) -> Option<Vector> {
        match self.isr_highest.load(Relaxed) {
            0 => None,
            vector => Some(Vector(vector)),
        }
    }

    /// Task priority register.
    #[inline]
    pub fn tpr(&self) -> u8 {
        self.tpr.load(Relaxed)
    }

    /// Processor priority register.
    #[inline]
    pub fn ppr(&self) -> u8 {
        self.ppr.load(Relaxed)
    }

    /// Writes the task priority. True when it was lowered, so that a held-back interrupt may have
    /// become deliverable.
    #[inline]
    pub fn set_tpr(&self, value: u8) -> bool {
        // A higher priority frees nothing: the caller then looks for no interrupt.
        let old = self.tpr.load(Relaxed);
        self.tpr.store(value, Relaxed);
        self.update_ppr();
        value < old
    }

    /// CR8: bits 7:4 of the task priority (SDM vol. 3A §10.8.6).
    #[inline]
    pub fn cr8(&self) -> u8 {
        self.tpr() >> 4
    }

    /// Writes CR8 (bits 3:0; the caller has faulted on others). Result as for
    /// [`set_tpr`](Self::set_tpr).
    #[inline]
    pub fn set_cr8(&self, value: u8) -> bool {
        // The low half of the task priority becomes 0 (SDM vol. 3A §10.8.6).
        self.set_tpr(value << 4)
    }

    /// PPR = TPR when its class is at least that of the vector in service, else that class.
    #[inline]
    pub(super) fn update_ppr(&self) {
        let tpr = self.tpr.load(Relaxed);
        let service = self.isr_highest.load(Relaxed) & 0xf0;
        // With equal classes PPR is the whole TPR, as in stock KVM; the SDM leaves the low half
        // open (vol. 3A §10.8.3.1).
        self.ppr.store(if tpr & 0xf0 >= service { tpr } else { service }, Relaxed);
    }
}
