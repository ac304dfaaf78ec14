//! The virtual-APIC page: what the CPU keeps of a local APIC while it serves it (SDM vol. 3C §30.1).

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use host::{NoMemory, page::Page};
use x86::{
    Hpa,
    apic::{Interrupts, VectorWords, reg},
};

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
        // Eight bytes: the CPU reads an x2APIC register as a whole, so that what lies above has to be 0.
        self.at(register).store(value.into(), Relaxed);
    }

    /// The task priority register in the page.
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
    // Registers of a set are 16 bytes apart, and have 32 bits each: two of them make a word of ours.
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
    pub(crate) fn any_requested(&self) -> bool {
        // Eight loads without a branch: most often all are zero.
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
        // The priority stays, for MOV from CR8, which reads it here in any case.
        self.fill(&Interrupts { tpr: state.tpr, ..Interrupts::default() });
        state
    }

    /// The highest member of the set that begins at a register; 0 when there is none. Downwards, as what is
    /// urgent has a high vector.
    #[inline]
    fn highest(&self, first: u32) -> u8 {
        for n in (0..8).rev() {
            let word = self.at(first + n * 0x10).load(Relaxed) as u32;
            if word != 0 {
                return (n << 5) as u8 | (31 - word.leading_zeros() as u8);
            }
        }
        0
    }

    /// Adds requests. `Some`: the highest of all is a new one, and the guest interrupt status is this now.
    #[inline]
    pub fn request(&self, vectors: &VectorWords) -> Option<u16> {
        for (new, at) in vectors.iter().zip((reg::IRR..).step_by(0x20)) {
            if *new != 0 {
                // Both halves: a store that changes nothing is cheaper than to ask.
                for (half, at) in [(*new & 0xffff_ffff, at), (*new >> 32, at + 0x10)] {
                    let word = self.at(at);
                    word.store(word.load(Relaxed) | half, Relaxed);
                }
            }
        }
        // What is new may lie below what RVI names already: then nothing has to be written.
        let top = self.highest(reg::IRR);
        // `top` is at most 255: the index is at most 3.
        let new = vectors[usize::from(top >> 6)] & (1 << (top & 63)) != 0;
        new.then(|| u16::from(self.highest(reg::ISR)) << 8 | u16::from(top))
    }

    /// The guest interrupt status: RVI, and SVI above it.
    #[inline]
    // SVI is the highest in service, RVI the highest request: the CPU compares these and not the page (SDM vol. 3C §30.1.1).
    pub fn status(&self) -> u16 {
        u16::from(self.highest(reg::ISR)) << 8 | u16::from(self.highest(reg::IRR))
    }

    /// Whether the highest request, or `more`, is above the processor priority.
    #[inline]
    pub fn delivers(&self, more: u8) -> bool {
        // As the CPU evaluates what is pending (SDM vol. 3C §30.2.1).
        let request = self.highest(reg::IRR).max(more);
        // The whole TPR against the whole vector: the lower halves do not decide, since the classes alone are compared below.
        let priority = self.highest(reg::ISR).max(self.tpr());
        request >> 4 > priority >> 4
    }
}
