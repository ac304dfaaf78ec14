//! APICv: a local APIC in x2APIC mode whose interrupts the CPU serves. Requests (VIRR), what is in
//! service (VISR) and the task priority lie in the virtual-APIC page; the VMCS has the highest of
//! the first two (RVI and SVI) and a bitmap of the vectors whose EOI exits.
//!
//! RVI and SVI follow from the page, so they are never read: they are put together anew when
//! something is requested, and only RVI can have changed then. Interrupts that another CPU requests
//! come with a kick (ADR 5); posted interrupts are not used.
//!
//! SDM vol. 3C chapter 30, §25.4.2, §25.6.8.

use backend::{Registers, ServedApic};
use cpu::Cpu;
use x86::{
    Directions, Rflags, Vector,
    apic::{Interrupts, VectorWords},
    vmcs::ReadWrite,
};

use crate::{
    apic_page::Serving,
    features::APICV,
    fields::{self, Slot},
    state::{Vmx, attention},
};

/// MSRs that the guest reads without an exit: ID and version; TPR; PPR; LDR; SVR; ISR; IRR; the LVT.
/// The registers that are not among them do not exist, cannot be read, or have values that the page
/// does not hold: TMR, ESR, ICR, the timer.
const READABLE: [(u32, u32); 8] = [
    (0x802, 0x803),
    (0x808, 0x808),
    (0x80a, 0x80a),
    (0x80d, 0x80d),
    (0x80f, 0x80f),
    (0x810, 0x817),
    (0x820, 0x827),
    (0x832, 0x837),
];
/// MSRs that it writes without an exit: TPR, EOI and SELF_IPI, the only ones whose writes the CPU
/// virtualizes. Any other would be written to the host's APIC.
const WRITABLE: [u32; 3] = [0x808, 0x80b, 0x83f];

const EOI_EXITS: [Slot<u64, ReadWrite>; 4] =
    [fields::EOI_EXIT_0, fields::EOI_EXIT_1, fields::EOI_EXIT_2, fields::EOI_EXIT_3];

impl<C: Cpu> Vmx<C> {
    fn pass_apic_msrs(&self, on: bool) {
        for msr in READABLE.into_iter().flat_map(|(first, last)| first..=last) {
            // Writes exit: the CPU would write any but three of them to the host's APIC.
            self.msr_map().intercept(msr, Directions::READS.when(!on) | Directions::WRITES);
        }
        for msr in WRITABLE {
            // Reads stay as they are: EOI and SELF_IPI cannot be read.
            let reads = self.msr_map().intercepted(msr) & Directions::READS;
            self.msr_map().intercept(msr, reads | Directions::WRITES.when(!on));
        }
    }

    fn report_eois(&self, reported: &VectorWords) {
        for (slot, word) in EOI_EXITS.into_iter().zip(reported) {
            self.set(slot, *word);
        }
    }

    /// An instruction has retired in software: the CPU must not hold back for its sake an interrupt
    /// that waits.
    #[inline]
    pub(crate) fn attend_to_requests(&mut self) {
        // What the VMCS says of a shadow is over, and the CPU would hold an interrupt back by it.
        if self.shadow_over.get() && self.apic_page.any_requested() {
            self.attention |= attention::SHADOW;
        }
    }

    /// Before the entry: ends the shadow of STI or MOV SS if it holds an interrupt back.
    pub(crate) fn end_shadow_for_request(&mut self) {
        self.attention &= !attention::SHADOW;
        // Without IF nothing is delivered, and the field may stay as it is.
        if self.rflags().contains(Rflags::IF) {
            self.clear_ended_shadow();
        }
    }

    /// Which accesses of `msr` exit.
    pub fn msr_exits(&self, msr: u32) -> Directions {
        self.msr_map().intercepted(msr)
    }
}

impl<C: Cpu> ServedApic for Vmx<C> {
    #[inline]
    fn can_serve(&self) -> bool {
        // L2's VMCS knows nothing of L1's interrupts.
        // So an L1 in VMX operation does without it, also while it runs itself.
        self.features.apicv && !self.is_hypervisor()
    }

    #[inline]
    fn is_serving(&self) -> bool {
        self.serving == Serving::Yes
    }

    #[inline]
    fn is_stopped(&self) -> bool {
        self.serving == Serving::No
    }

    fn serve(&mut self, state: &Interrupts, reported: &VectorWords) {
        self.apic_page.fill(state);
        self.report_eois(reported);
        // Behind the page, from which it follows.
        self.set(fields::GUEST_INTERRUPT_STATUS, self.apic_page.status());
        self.attend_to_requests();
        if core::mem::replace(&mut self.serving, Serving::Yes) == Serving::No {
            // It is the CPU that compares priorities.
            self.set(fields::TPR_THRESHOLD, 0);
            self.change_proc2(APICV, true);
            self.pass_apic_msrs(true);
        }
    }

    /// One VMWRITE, or none for what has to wait for a higher one.
    fn request(&mut self, vectors: &VectorWords, reported: &VectorWords) {
        // Before the request, whose end the CPU may find to be one that exits.
        self.report_eois(reported);
        if let Some(status) = self.apic_page.request(vectors) {
            self.set(fields::GUEST_INTERRUPT_STATUS, status);
        }
        // Something is requested now.
        // The field of the VMCS may still name a shadow that is over: the CPU would hold the request back.
        if self.shadow_over.get() {
            self.attention |= attention::SHADOW;
        }
    }

    fn show(&mut self, offset: u32, value: u32) {
        self.apic_page.set(offset, value);
    }

    #[inline]
    fn interrupt_waits(&self, more: Option<Vector>) -> bool {
        self.apic_page.delivers(more.map_or(0, |v| v.0))
    }

    fn take_back(&mut self) -> Interrupts {
        // The controls stay as they are: most often the state goes back before the next entry.
        self.serving = Serving::TakenBack;
        self.apic_page.take()
    }

    fn stop(&mut self) {
        if core::mem::replace(&mut self.serving, Serving::No) == Serving::No {
            return;
        }
        // In any order: the guest runs when both are done, and without the control no access may pass.
        self.change_proc2(APICV, false);
        self.pass_apic_msrs(false);
    }
}
