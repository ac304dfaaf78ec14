//! An APIC whose interrupts the hardware serves (SDM vol. 3C chapter 30): requests, what is in
//! service and the task priority lie with the CPU from [`Lapic::hand_over`] to
//! [`Lapic::take_back`]. Meanwhile senders put requests in as ever, and the owner passes them on
//! ([`Lapic::drain`]). Only the owner calls these.

use x86::{
    Vector,
    apic::{Interrupts, VectorWords},
};

use super::{Lapic, LapicEffect};
use crate::atomic::Ordering::*;

impl Lapic {
    /// Takes out all that is requested.
    #[inline]
    pub fn drain(&self) -> VectorWords {
        // The hint first, as in `take`: who sends after it sets it again. Locked, for words that are
        // found empty are only loaded, and no load may come before this store.
        self.irr_pending.swap(0, SeqCst);
        self.irr.take_shared()
    }

    /// Hands over what was requested and what is in service. Nothing of it is left here.
    pub fn hand_over(&self) -> Interrupts {
        let in_service = self.isr.words();
        // Two copies would be ended twice: by the hardware, and here.
        self.isr.clear();
        self.isr_highest.store(0, Relaxed);
        self.update_ppr();
        Interrupts { requested: self.drain(), in_service, tpr: self.tpr() }
    }

    /// Takes the hardware's state back, beside what has been requested here meanwhile.
    pub fn take_back(&self, state: &Interrupts) {
        // Added and not stored: senders have put more in while the hardware served.
        if state.requested != [0; 4] {
            self.irr.add_shared(&state.requested);
            self.irr_pending.store(1, Release);
        }
        // Replaced: nothing was put into service here while the hardware had it.
        self.isr.replace_owned(&state.in_service);
        self.isr_highest.store(self.isr.highest(), Relaxed);
        // Last: the processor priority follows from the TPR and from what is in service.
        self.set_tpr(state.tpr);
    }

    /// Vectors whose end has to be reported: level-triggered, or somebody waits for it. After
    /// [`drain`](Self::drain), for a sender says so before it requests.
    #[inline]
    pub fn reported(&self) -> VectorWords {
        // A guest that suppresses broadcasts tells the I/O APIC itself.
        let mut words = if self.eoi_broadcast_suppressed() { [0; 4] } else { self.tmr.words() };
        // Spares the cache line of a set that nearly no guest uses.
        if self.any_notify.load(Relaxed) != 0 {
            for (word, more) in words.iter_mut().zip(self.eoi_notify.words()) {
                *word |= more;
            }
        }
        words
    }

    /// The hardware has ended `vector` and reports it.
    pub fn ended(&self, vector: Vector) -> LapicEffect {
        LapicEffect::Eoi { vector, level: self.reports(vector.0) }
    }
}
