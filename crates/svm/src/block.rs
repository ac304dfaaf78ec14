//! A control block as an object: the VMCB's page, and everything that belongs to one VMCB and not to the
//! vCPU or the CPU that runs it.
//!
//! A vCPU has one. A vCPU whose guest is a hypervisor can have a second one for that guest's guest, so
//! nothing here may be true of the vCPU as a whole: its registers in the CPU, its limits and what it is
//! being told (interrupts, NMIs) stay outside.
//!
//! APM vol. 2 §15.5 (VMRUN), §15.15 (clean bits), §15.16 (ASIDs).
#![allow(unsafe_code)]

use backend::Gprs;
use cpu::{Cpu, SpecCtrl};
use host::{NoMemory, page::Page};
use x86::{
    Hpa,
    vmcb::{Clean, ExitCode, Vmcb},
};

use crate::{
    features::Features,
    percpu::{self, PerCpu},
    permission::MsrMap,
};

/// TLB_CONTROL: flush what is tagged with this ASID (APM vol. 2 table 15-9).
const FLUSH_ASID: u8 = 3;
/// TLB_CONTROL: flush the whole TLB.
pub(crate) const FLUSH_ALL: u8 = 1;

/// One VMCB with what the hypervisor knows of it.
#[derive(Debug)]
pub struct ControlBlock {
    page: Page,
    /// What the next entry must not take from the CPU's cache of this block.
    stale: Clean,
    /// The CPU on which it ran last: only that one's cache and ASIDs are of use.
    last_cpu: usize,
    /// What SVM keeps of that CPU.
    here: Option<&'static PerCpu>,
    /// The generation of that CPU's ASIDs in which this block got its own.
    asid_generation: u64,
    /// The next entry forgets the translations of this block's ASID.
    flush: bool,
    /// Which MSRs exit.
    pub(crate) msr_map: MsrMap,
}

impl ControlBlock {
    /// A block of zeroes that has run nowhere, under which every MSR exits.
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self {
            page: Page::zeroed()?,
            // A CPU may still hold what an older block at this address had.
            stale: Clean::ALL,
            // No CPU has this number: the first entry counts as a move.
            last_cpu: usize::MAX,
            here: None,
            asid_generation: 0,
            flush: true,
            // Closed until somebody opens it: a forgotten MSR exits, and does not reach the
            // hardware.
            msr_map: MsrMap::all()?,
        })
    }

    /// The VMCB in its page.
    #[inline]
    pub fn vmcb(&self) -> &Vmcb {
        // SAFETY: the page is owned, 4096 bytes, aligned, and every bit pattern is a Vmcb. The CPU
        // writes to it only inside vmrun(), which borrows it exclusively.
        unsafe { &*self.page.bytes_ptr().cast::<Vmcb>() }
    }

    /// The VMCB, to be changed; `stale` names what the CPU must read anew.
    #[inline]
    pub(crate) fn vmcb_mut(&mut self, stale: Clean) -> &mut Vmcb {
        self.stale |= stale;
        self.unmarked()
    }

    /// Names what of the VMCB the CPU must read anew.
    #[inline]
    pub(crate) fn mark(&mut self, stale: Clean) {
        self.stale |= stale;
    }

    /// Goes on where `other` ran last: between its entries, on the same CPU.
    #[inline]
    pub(crate) fn take_over_from(&mut self, other: &Self) {
        // It runs between two entries of the other, so no CPU number has to be asked for.
        self.arrive(other.last_cpu);
    }

    /// The VMCB, to change what the CPU never caches.
    #[inline]
    fn unmarked(&mut self) -> &mut Vmcb {
        // SAFETY: the page is owned, 4096 bytes, aligned, and every bit pattern is a Vmcb; `&mut self`
        // makes the reference exclusive.
        unsafe { &mut *self.page.bytes_ptr().cast::<Vmcb>() }
    }

    /// Where the VMCB lies, for VMRUN, VMLOAD and VMSAVE.
    #[inline]
    pub(crate) fn hpa(&self) -> Hpa {
        self.page.hpa()
    }

    /// What SVM keeps of the CPU on which this block is to run or ran last.
    #[inline]
    pub(crate) fn here(&self) -> Option<&'static PerCpu> {
        self.here
    }

    /// Has the next entry forget the translations that were made under this block.
    #[inline]
    pub(crate) fn request_flush(&mut self) {
        self.flush = true;
    }

    /// Whether a flush is requested; it is not any more.
    #[cfg(test)]
    pub(crate) fn take_flush(&mut self) -> bool {
        core::mem::take(&mut self.flush)
    }

    /// As if the CPU had refused the entry, which cannot take place.
    pub(crate) fn refuse(&mut self) {
        let control = &mut self.unmarked().control;
        control.exit_code = ExitCode::Invalid.0;
        // No delivery was interrupted.
        control.exit_int_info = 0;
    }

    /// Whether the next entry is to be [`enter_flushing`](Self::enter_flushing).
    #[inline(always)]
    pub(crate) fn wants_flush(&self) -> bool {
        self.flush
    }

    /// The block is to run on CPU `at`, on which this is called with interrupts off. `None`: SVM does not
    /// know that CPU.
    #[inline]
    pub(crate) fn arrive(&mut self, at: usize) -> Option<&'static PerCpu> {
        // The look-up is spared on the way that nearly all entries take.
        let here = if self.last_cpu == at { self.here } else { percpu::of(at) }?;
        // The CPU may have a copy of the block from when it was here last, and translations under an ASID that was
        // given away since (APM vol. 2 §15.15, §15.16).
        if self.last_cpu != at {
            self.last_cpu = at;
            self.here = Some(here);
            self.stale = Clean::ALL;
            self.asid_generation = 0;
        }
        // The numbers began anew: the one that the block has may be another guest's.
        if self.asid_generation != here.generation() {
            self.flush = true;
        }
        Some(here)
    }

    /// The world switch: runs the guest until its next exit.
    #[inline]
    pub(crate) fn enter<C: Cpu>(&mut self, cpu: &mut C, gprs: &mut Gprs, spec: SpecCtrl) {
        let pa = self.hpa();
        // Said anew at each entry: the field is not the CPU's to keep.
        let clean = Clean::ALL.difference(self.stale).bits();
        // Before the entry: what a handler changes behind it is marked for the next one.
        self.stale = Clean::empty();
        let vmcb = self.unmarked();
        vmcb.control.clean = clean;
        // VMRUN loads these two from the block. All others the world switch loads.
        vmcb.save.rax = gprs.0[backend::RAX];
        vmcb.save.rsp = gprs.0[backend::RSP];
        cpu.vmrun(vmcb, pa, gprs, spec);
        gprs.0[backend::RAX] = vmcb.save.rax;
        gprs.0[backend::RSP] = vmcb.save.rsp;
    }

    /// An entry that forgets this guest's translations first: the flush that is owed.
    ///
    /// VMRUN checks the guest's state before it executes the command in TLB_CONTROL (APM vol. 3, VMRUN): an entry
    /// that ends in VMEXIT_INVALID has flushed nothing. Whoever can make such entries must not get rid of a flush by
    /// one, neither of what the host withdrew nor of what other guests left under the numbers that are given out anew.
    #[inline(always)]
    pub(crate) fn enter_flushing<C: Cpu>(
        &mut self,
        features: &Features,
        cpu: &mut C,
        gprs: &mut Gprs,
        spec: SpecCtrl,
    ) {
        self.forget_translations(features);
        self.enter(cpu, gprs, spec);
        let control = &mut self.unmarked().control;
        // Taken back in any case: the next entry is not to flush again.
        let command = core::mem::take(&mut control.tlb_ctl);
        // By 32 bits: emulators write VMEXIT_INVALID with no more.
        if control.exit_code as u32 != ExitCode::Invalid.0 as u32 {
            return;
        }
        self.stale = Clean::ALL;
        self.flush = true;
        self.asid_generation = 0;
        // The numbers began anew for a flush that did not take place.
        if command == FLUSH_ALL
            && let Some(here) = self.here
        {
            here.exhaust_asids();
        }
    }

    /// Makes the entry that follows at once forget this guest's translations: by its ASID where
    /// the CPU can flush one, else with another ASID.
    fn forget_translations(&mut self, features: &Features) {
        let Some(here) = self.here else { return };
        // Before the entry: a flush that is asked for behind it is the next one's.
        self.flush = false;
        // A number of this generation is nobody else's. With an older one nothing is left to be flushed by it.
        if features.flush_by_asid && self.asid_generation == here.generation() {
            // No clean bit is about the command: the CPU reads it at each VMRUN (APM vol. 2
            // §15.15.3).
            self.unmarked().control.tlb_ctl = FLUSH_ASID;
            return;
        }
        // A number that was never used in this generation has no translations: in place of a flush.
        let (asid, generation, all) = here.new_asid(features.asids);
        self.asid_generation = generation;
        let control = &mut self.vmcb_mut(Clean::ASID).control;
        control.asid = asid;
        // All, for the numbers from 1 on were other guests' before.
        control.tlb_ctl = if all { FLUSH_ALL } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use cpu::Model;
    use x86::{Efer, vmcb::Vmcb};

    use super::*;

    fn features() -> Features {
        Features { asids: 4, flush_by_asid: true, ..Features::default() }
    }

    fn block(at: usize) -> ControlBlock {
        let mut block = ControlBlock::new().unwrap();
        let vmcb = block.vmcb_mut(Clean::ALL);
        vmcb.control.intercepts[4] = 0x3f;
        vmcb.save.efer = Efer::SVME.bits();
        block.arrive(at).unwrap();
        block
    }

    /// An entry that ends with `code`.
    fn enter(block: &mut ControlBlock, cpu: &mut Model, code: ExitCode) {
        let (gprs, spec) = (&mut Gprs::default(), SpecCtrl::default());
        cpu.gif = false;
        cpu.then(move |vmcb: &mut Vmcb, _| vmcb.control.exit_code = code.0);
        if block.wants_flush() {
            block.enter_flushing(&features(), cpu, gprs, spec);
        } else {
            block.enter(cpu, gprs, spec);
        }
        assert_eq!(block.vmcb().control.tlb_ctl, 0);
    }

    /// The host takes a page back, and the vCPU's next entry is refused: the one after it flushes.
    #[test]
    fn an_entry_that_is_refused_leaves_the_flush_owed() {
        let _ = percpu::set_up(features(), 4);
        let (mut block, mut cpu) = (block(2), Model::default());
        enter(&mut block, &mut cpu, ExitCode::Hlt);
        let asid = block.vmcb().control.asid;
        for refused in [ExitCode::Invalid, ExitCode(0xffff_ffff)] {
            block.request_flush();
            enter(&mut block, &mut cpu, refused);
            assert!(block.wants_flush());
            enter(&mut block, &mut cpu, ExitCode::Hlt);
            assert_ne!(block.vmcb().control.asid, asid, "its translations are still there");
            assert!(!block.wants_flush());
        }
    }

    /// The numbers begin anew with an entry that is refused: nobody gets one that is not flushed. The model CPU
    /// refuses an entry with an ASID under which another block's translations are.
    #[test]
    fn numbers_begin_anew_with_a_flush_that_takes_place() {
        let _ = percpu::set_up(features(), 4);
        let mut cpu = Model::default();
        let mut others: std::vec::Vec<_> = (0..2).map(|_| block(3)).collect();
        for other in &mut others {
            enter(other, &mut cpu, ExitCode::Hlt);
        }
        let mut failing = block(3);
        for _ in 0..9 {
            // As its thread is moved to another CPU and back.
            failing.arrive(2);
            failing.arrive(3);
            enter(&mut failing, &mut cpu, ExitCode::Invalid);
            for other in &mut others {
                other.arrive(3);
                enter(other, &mut cpu, ExitCode::Hlt);
            }
        }
        failing.arrive(3);
        enter(&mut failing, &mut cpu, ExitCode::Hlt);
    }
}
