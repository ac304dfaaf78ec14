//! A local APIC whose interrupts the hardware serves. Requests, what is in service and the task
//! priority lie with it then, across exits and while the loop is left; senders put requests into
//! [`Lapic`](irqchip::lapic::Lapic) as ever, and before an entry they are passed on. Who has to see
//! or change what the hardware has takes it back ([`Vcpu::gather_interrupts`]), and the next entry hands
//! it over again, if it still can be.

use backend::{Backend, ServedApic};
use irqchip::lapic::{ICR_MSR, Lapic, LapicMode};
use x86::{Vector, apic::reg};

use super::{apic_is_served, stop_serving_apic};
use crate::{
    Vcpu,
    run::{
        events::{KernelCalls, offer_nothing},
        outcome::Next,
    },
};

/// Registers that the guest reads without an exit and that only its writes change, or nothing.
const SHOWN: [u32; 10] = [
    reg::ID,
    reg::VERSION,
    reg::LDR,
    reg::SVR,
    reg::LVT_TIMER,
    reg::LVT_THERMAL,
    reg::LVT_PMC,
    reg::LVT_LINT0,
    reg::LVT_LINT1,
    reg::LVT_ERROR,
];

const X2APIC_TPR: u32 = 0x808;
const X2APIC_PPR: u32 = 0x80a;
const X2APIC_EOI: u32 = 0x80b;
const X2APIC_SVR: u32 = 0x80f;
const X2APIC_SELF_IPI: u32 = 0x83f;

/// Shows a register in the page, if the guest reads it there.
#[inline(never)]
fn show_register(b: &mut impl Backend, lapic: &Lapic, offset: u32) {
    if SHOWN.contains(&offset) {
        let value = lapic.read(offset, || 0);
        if let Some(apic) = b.served_apic_mut() {
            apic.show(offset, value);
        }
    }
}

impl<B: Backend> Vcpu<B> {
    /// Before the local APIC's interrupts are looked at or changed: it has them all, and the
    /// priority of now.
    #[inline]
    pub(crate) fn gather_interrupts(&mut self) {
        if apic_is_served(&self.b) {
            self.take_apic_back();
        } else {
            self.sync_priority();
            self.withdraw_offer();
        }
    }

    #[inline(never)]
    fn take_apic_back(&mut self) {
        let Some(apic) = self.b.served_apic_mut() else { return };
        let state = apic.take_back();
        self.shared.lapic.take_back(&state);
        // The page's priority is what CR8 shows: nothing of it is left to be synchronised.
        self.pending.cr8_seen = self.b.cr8();
        // The next look hands the state over again, or offers from it.
        self.pending.raise();
    }

    /// Before the register of an MSR is read that exits.
    #[inline]
    pub(crate) fn before_x2apic_read(&mut self, index: u32) {
        const ISR: u32 = 0x810;
        const ISR_END: u32 = 0x817;
        const IRR: u32 = 0x820;
        const IRR_END: u32 = 0x827;
        let concerned = matches!(index, X2APIC_TPR | X2APIC_PPR | ISR..=ISR_END | IRR..=IRR_END);
        // The others do not lie with the CPU, and to take back copies two sets of 256 bits.
        if !apic_is_served(&self.b) || concerned {
            self.gather_interrupts();
        }
    }

    /// Before the register of an MSR is written.
    #[inline]
    pub(crate) fn before_x2apic_write(&mut self, index: u32) {
        if !apic_is_served(&self.b) {
            self.sync_priority();
        } else if matches!(index, X2APIC_TPR | X2APIC_EOI | X2APIC_SVR) {
            // The write changes what the CPU has, or whether it may serve. Others, as ICR, leave that alone.
            self.take_apic_back();
        }
    }

    /// After a WRMSR of an x2APIC register: shows it in the page that a CPU reads which serves the APIC.
    #[inline]
    pub(crate) fn after_x2apic_write(&mut self, index: u32) {
        if apic_is_served(&self.b) && index != ICR_MSR {
            show_register(&mut self.b, &self.shared.lapic, (index & 0xff) << 4);
        }
    }

    /// Hands the interrupts over if the hardware can serve this APIC as it is now: in x2APIC mode,
    /// and enabled by software, for the hardware does not ask.
    #[inline]
    pub(crate) fn serve_apic_if_possible(&mut self) -> bool {
        if !self.b.served_apic().is_some_and(ServedApic::can_serve) {
            return false;
        }
        let lapic = &self.shared.lapic;
        let possible = lapic.mode() == LapicMode::X2Apic && lapic.software_enabled();
        if possible {
            self.serve_apic();
        } else {
            stop_serving_apic(&mut self.b);
        }
        possible
    }

    #[inline(never)]
    fn serve_apic(&mut self) {
        // What was offered goes over with the IRR.
        self.pending.put_back_offer(&self.shared);
        offer_nothing(&mut self.b);
        let Some(apic) = self.b.served_apic_mut() else { return };
        // Drained first, `reported` read then: a sender says that an end is waited for before it requests.
        let lapic = &self.shared.lapic;
        let state = lapic.hand_over();
        apic.serve(&state, &lapic.reported());
        for offset in SHOWN {
            apic.show(offset, lapic.read(offset, || 0));
        }
        self.pending.cr8_seen = self.b.cr8();
    }

    /// Passes on what has been requested since. The 8259A's comes by injection, as without the
    /// hardware's help; `kernel` is as for [`Vcpu::inject_pending`].
    #[inline(always)]
    pub(crate) fn inject_served(&mut self, kernel: KernelCalls) -> bool {
        // Senders kick, so that nothing comes unseen while the guest runs.
        if self.shared.lapic.maybe_pending() {
            let vectors = self.shared.lapic.drain();
            if let Some(apic) = self.b.served_apic_mut() {
                apic.request(&vectors, &self.shared.lapic.reported());
            }
        }
        // The page knows nothing of the PIC, whose vector is injected.
        if self.pic_pending() {
            if kernel.are_allowed() {
                self.inject_from_pic();
            }
            return kernel.are_allowed();
        }
        if self.pending.window_wanted && self.shared.lapic.accepts_pic() {
            // While it is open the CPU delivers nothing itself (SDM vol. 3C §30.2.2).
            self.b.set_interrupt_window(true);
        }
        true
    }

    /// The hardware has ended an interrupt whose end is reported.
    pub(crate) fn answer_eoi(&mut self, vector: Vector) -> Next {
        let effect = self.shared.lapic.ended(vector);
        self.effect_in_loop(effect)
    }

    /// The guest has sent itself an interrupt with a vector below 16: an error of the APIC's.
    pub(crate) fn answer_illegal_self_ipi(&mut self) -> Next {
        match self.shared.lapic.write_x2(X2APIC_SELF_IPI, 0) {
            Ok(effect) => {
                self.pending.raise_if(self.shared.lapic.maybe_pending());
                self.effect_in_loop(effect)
            }
            Err(_) => Next::Again,
        }
    }
}
