//! APICv: a local APIC in x2APIC mode whose interrupts the CPU serves. Requests (VIRR), what is in
//! service (VISR) and the task priority lie in the virtual-APIC page; the VMCS has the highest of
//! the first two (RVI and SVI) and a bitmap of the vectors whose EOI exits.
//!
//! RVI and SVI follow from the page, so they are never read: they are put together anew when
//! something is requested, and only RVI can have changed then. Interrupts that another CPU requests
//! come with a kick (ADR 5); posted interrupts are not used.
//!
//! SDM vol. 3C chapter 30, §25.4.2, §25.6.8.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use backend::ServedApic;
use cpu::Cpu;
use host::{NoMemory, page::Page};
use x86::{
    Hpa, Vector,
    apic::{Interrupts, VectorWords, highest, reg},
    vmcs::{ProcControls2, ReadWrite},
};

use crate::{
    fields::{self, Slot},
    state::{Vmx, attention},
};

/// What it takes.
pub(crate) const CONTROLS: ProcControls2 = ProcControls2::VIRTUALIZE_X2APIC
    .union(ProcControls2::APIC_REGISTERS)
    .union(ProcControls2::VIRTUAL_INTERRUPTS);

const RFLAGS_IF: u64 = 1 << 9;

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

/// Whether the CPU serves an APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Serving {
    /// It does not.
    No,
    /// It is set up to, but its state was taken back.
    TakenBack,
    /// It has the state.
    Yes,
}

/// The virtual-APIC page. The CPU has it while the guest runs; else it is plain memory.
#[derive(Debug)]
pub struct ApicPage(Page);

impl ApicPage {
    /// A page of zeroes.
    pub fn new() -> Result<Self, NoMemory> {
        Page::zeroed().map(Self)
    }

    /// Physical address, for the VMCS.
    pub fn hpa(&self) -> Hpa {
        self.0.hpa()
    }

    /// The eight bytes at a register: its value, and four that an RDMSR reads along.
    #[inline(always)]
    fn at(&self, register: u32) -> &AtomicU64 {
        &self.0.table()[(register >> 3) as usize % 512]
    }

    /// Sets a register.
    pub fn set(&self, register: u32, value: u32) {
        self.at(register).store(value.into(), Relaxed);
    }

    /// Task priority.
    #[inline]
    pub fn tpr(&self) -> u8 {
        self.at(reg::TPR).load(Relaxed) as u8
    }

    /// Sets the task priority.
    #[inline]
    pub fn set_tpr(&self, value: u8) {
        self.at(reg::TPR).store(value.into(), Relaxed);
    }

    /// The set that begins at a register: eight of 32 bits, sixteen bytes apart.
    #[inline]
    fn vectors(&self, first: u32) -> VectorWords {
        let word = |n: u32| {
            let low = self.at(first + n * 0x20).load(Relaxed) & 0xffff_ffff;
            low | self.at(first + n * 0x20 + 0x10).load(Relaxed) << 32
        };
        [word(0), word(1), word(2), word(3)]
    }

    fn set_vectors(&self, first: u32, words: &VectorWords) {
        for (word, at) in words.iter().zip((first..).step_by(0x20)) {
            self.set(at, *word as u32);
            self.set(at + 0x10, (*word >> 32) as u32);
        }
    }

    /// What is requested.
    #[inline]
    pub fn requested(&self) -> VectorWords {
        self.vectors(reg::IRR)
    }

    /// What is in service.
    #[inline]
    pub fn in_service(&self) -> VectorWords {
        self.vectors(reg::ISR)
    }

    /// Whether anything is requested.
    #[inline]
    fn any_requested(&self) -> bool {
        (0..8).fold(0, |all, n| all | self.at(reg::IRR + n * 0x10).load(Relaxed)) != 0
    }

    /// Replaces all of it.
    pub fn fill(&self, state: &Interrupts) {
        self.set_vectors(reg::IRR, &state.requested);
        self.set_vectors(reg::ISR, &state.in_service);
        self.set_tpr(state.tpr);
    }

    /// Takes all of it out but the priority, which CR8 shows in any case.
    pub fn take(&self) -> Interrupts {
        let state = Interrupts {
            requested: self.requested(),
            in_service: self.in_service(),
            tpr: self.tpr(),
        };
        self.fill(&Interrupts { tpr: state.tpr, ..Interrupts::default() });
        state
    }

    /// Adds requests. True when the highest of all is a new one, so that RVI has to be set.
    #[inline]
    pub fn request(&self, vectors: &VectorWords) -> bool {
        for (new, at) in vectors.iter().zip((reg::IRR..).step_by(0x20)) {
            if *new != 0 {
                for (half, at) in [(*new & 0xffff_ffff, at), (*new >> 32, at + 0x10)] {
                    let word = self.at(at);
                    word.store(word.load(Relaxed) | half, Relaxed);
                }
            }
        }
        let top = highest(&self.requested());
        vectors[usize::from(top >> 6)] & (1 << (top & 63)) != 0
    }

    /// The guest interrupt status: RVI, and SVI above it.
    #[inline]
    pub fn status(&self) -> u16 {
        u16::from(highest(&self.in_service())) << 8 | u16::from(highest(&self.requested()))
    }

    /// Whether the highest request, or `more`, is above the processor priority.
    #[inline]
    pub fn delivers(&self, more: u8) -> bool {
        let request = highest(&self.requested()).max(more);
        let priority = highest(&self.in_service()).max(self.tpr());
        request >> 4 > priority >> 4
    }
}

impl<C: Cpu> Vmx<C> {
    fn pass_apic_msrs(&self, on: bool) {
        for msr in READABLE.into_iter().flat_map(|(first, last)| first..=last) {
            self.vmcs.msr_map.intercept(msr, !on, true);
        }
        for msr in WRITABLE {
            let (read, _) = self.vmcs.msr_map.intercepted(msr);
            self.vmcs.msr_map.intercept(msr, read, !on);
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
        if self.shadow_over.get() && self.apic_page.any_requested() {
            self.attention |= attention::SHADOW;
        }
    }

    /// Before the entry: ends the shadow of STI or MOV SS if it holds an interrupt back.
    pub(crate) fn end_shadow_for_request(&mut self) {
        self.attention &= !attention::SHADOW;
        if self.get(fields::GUEST_RFLAGS) & RFLAGS_IF != 0 {
            self.settle_shadow();
        }
    }

    /// Whether RDMSR and WRMSR of `msr` exit.
    pub fn msr_exits(&self, msr: u32) -> (bool, bool) {
        self.vmcs.msr_map.intercepted(msr)
    }
}

impl<C: Cpu> ServedApic for Vmx<C> {
    #[inline]
    fn can_serve(&self) -> bool {
        self.features.apicv
    }

    #[inline]
    fn is_serving(&self) -> bool {
        self.serving == Serving::Yes
    }

    fn serve(&mut self, state: &Interrupts, reported: &VectorWords) {
        self.apic_page.fill(state);
        self.report_eois(reported);
        self.set(fields::GUEST_INTERRUPT_STATUS, self.apic_page.status());
        self.attend_to_requests();
        if core::mem::replace(&mut self.serving, Serving::Yes) == Serving::No {
            // It is the CPU that compares priorities.
            self.set(fields::TPR_THRESHOLD, 0);
            self.change_proc2(CONTROLS, true);
            self.pass_apic_msrs(true);
        }
    }

    /// One VMWRITE, or none for what has to wait for a higher one.
    fn request(&mut self, vectors: &VectorWords, reported: &VectorWords) {
        self.report_eois(reported);
        if self.apic_page.request(vectors) {
            self.set(fields::GUEST_INTERRUPT_STATUS, self.apic_page.status());
        }
        self.attend_to_requests();
    }

    fn show(&mut self, offset: u32, value: u32) {
        self.apic_page.set(offset, value);
    }

    #[inline]
    fn interrupt_waits(&self, more: Option<Vector>) -> bool {
        self.apic_page.delivers(more.map_or(0, |v| v.0))
    }

    fn take_back(&mut self) -> Interrupts {
        self.serving = Serving::TakenBack;
        self.apic_page.take()
    }

    fn stop(&mut self) {
        if core::mem::replace(&mut self.serving, Serving::No) == Serving::No {
            return;
        }
        self.change_proc2(CONTROLS, false);
        self.pass_apic_msrs(false);
    }
}
