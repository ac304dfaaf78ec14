//! VMRUN: from L1's block to L2's.

use core::mem::swap;

use backend::{Executed, Gprs, L1Memory, Level, LiveRegisters, RAX, RSP};
use cpu::Cpu;
use nested_svm::{Outside, checks, merge, permission::OpenWords, reflect};
use x86::{
    Cr0, Cr4, Dr7, Gpa, Hpa, Rflags,
    vmcb::{Clean, Intercept3, InterceptCr, Save, Vmcb, event, vintr},
};

use super::{Seen, paging::has_tables};
use crate::{
    block::FLUSH_ALL,
    l2::{Injected, State, is_by_instruction, is_interrupt},
    state::{Svm, Virq},
};

/// Whether EVENTINJ holds an event that is known for L1's until it is delivered: one that an instruction makes, which is not
/// executed again for it, an NMI, which masks none of L1's, or an interrupt, which is not one of L1's machine.
fn is_known_for_l1s(event_inj: u64) -> bool {
    event_inj & (event::VALID | event::TYPE) == event::VALID | event::NMI
        || is_by_instruction(event_inj)
        || is_interrupt(event_inj)
}

impl<C: Cpu> Svm<C> {
    /// VMRUN of the block at `at`.
    #[inline(never)]
    pub(super) fn vmrun(
        &mut self,
        gprs: &mut Gprs,
        at: Gpa,
        next_rip: u64,
        l1: &impl L1Memory,
    ) -> Executed {
        if self.nested.is_none() {
            // Inside the loop nothing is allocated.
            if !l1.is_final() {
                return Executed::Outside;
            }
            let Ok(state) = State::new() else { return Executed::Shutdown };
            self.nested = Some(state);
        }
        // L1's block keeps no window and no offer: what waits is asked for again when L1 goes on.
        self.set_virq(Virq::Off);
        let Some(state) = &mut self.nested else { return Executed::Shutdown };
        let seen = Seen::new(l1);
        // Checks and merge see the copy alone: another vCPU of L1's may rewrite the page meanwhile.
        let Ok(dirty) = state.v12.load(&seen, at) else { return self.missing(l1) };
        // All refusals end with one exit code: the order of the checks cannot be seen.
        let v12 = state.v12.get();
        let offered = &self.cold.offered;
        if checks::controls(&v12.control, Some(&v12.save), offered).is_err()
            || checks::save(&v12.save, offered, dirty).is_err()
            || (has_tables(&v12.control)
                && (!may_have_tables(self.block.vmcb(), &v12.save)
                    || lacks_levels(self.block.vmcb(), &mut self.cpu)))
        {
            return self.refuse(at, next_rip, l1);
        }
        // Last of what may fail for a missing page, and before anything of L1 changes.
        let merged = self.merge_msr_map(&seen);
        let Some(state) = &mut self.nested else { return Executed::Shutdown };
        let Ok(msrpm) = merged else {
            if l1.is_final() {
                // A CPU has no word for a map that is no memory; stock KVM refuses the block, too.
                return self.refuse(at, next_rip, l1);
            }
            // Nothing of it was put into block 02: none of it is clean when it is read again.
            state.v12.forget();
            return Executed::Outside;
        };
        // With V_INTR_MASKING L1's IF of now says whether its interrupts end L2's run (APM vol. 2 §15.21.1).
        state.l1_interrupts = self.block.vmcb().save.rflags & Rflags::IF.bits() != 0;
        // From here on nothing fails.
        self.keep_l1(gprs, next_rip);
        self.start_l2(gprs, dirty, msrpm);
        Executed::Entered
    }

    /// L2 runs from now on, with the registers in the copy of its block, of which `dirty` may be other than in block
    /// 02. L1's are in its own block, which runs. `msrpm`: from [`merge_msr_map`](Self::merge_msr_map).
    pub(super) fn start_l2(&mut self, gprs: &mut Gprs, dirty: Clean, msrpm: Hpa) {
        self.change_block();
        self.fill_l2(dirty, msrpm);
        let Some(state) = &mut self.nested else { return };
        let control = state.v12.control();
        let (command, asid) = (control.tlb_ctl, control.asid);
        if command != 0 || asid != state.asid {
            // Another id is how a processor without a flush by id flushes.
            state.asid = asid;
            state.flushed = true;
            self.block.request_flush();
            // That command is about all ids, L1's own among them.
            if command == FLUSH_ALL {
                state.other.request_flush();
            }
        }
        // Nothing may end L2's run before the processor has taken what VMRUN injects.
        state.entry_pending = true;
        let v12 = state.v12.get();
        state.injected = is_known_for_l1s(v12.control.event_inj).then_some(Injected {
            event: v12.control.event_inj,
            rip: Some(v12.save.rip),
            next_rip: self.block.vmcb().control.next_rip,
        });
        let save = &self.block.vmcb().save;
        gprs.0[RAX] = save.rax;
        gprs.0[RSP] = save.rsp;
        // VMRUN sets GIF (APM vol. 2 §15.17).
        self.gif.set();
        self.level = Level::L2;
        // They are to hit at L2's addresses, not at the host's.
        if Dr7::new(self.vmcb().save.dr7).has_breakpoints() {
            self.own_debug_regs();
        }
    }

    /// A block that cannot be run: L1 sees VMEXIT_INVALID, and nothing else of its block changes.
    #[cold]
    #[inline(never)]
    fn refuse(&mut self, at: Gpa, next_rip: u64, l1: &impl L1Memory) -> Executed {
        // The page was read, but block 02 has nothing of it.
        if let Some(state) = &mut self.nested {
            state.v12.forget();
        }
        if nested_svm::leave::write_refused(&Seen::new(l1), at).is_err() {
            return self.missing(l1);
        }
        let block = self.vmcb_mut(Clean::DR | Clean::CR | Clean::INTR);
        // As any VMEXIT, and as where the CPU refuses the block: L1 has no breakpoints behind it.
        nested_svm::leave::to_l1(block);
        // VMRUN retires also when it ends with VMEXIT_INVALID: L1 goes on behind it.
        block.save.rip = next_rip;
        block.save.rflags &= !Rflags::RF.bits();
        self.gif.clear();
        Executed::Left
    }

    /// Keeps what of L1 is not in its block anyway.
    fn keep_l1(&mut self, gprs: &Gprs, next_rip: u64) {
        let block = self.vmcb_mut(Clean::empty());
        block.save.rip = next_rip;
        block.save.rax = gprs.0[RAX];
        block.save.rsp = gprs.0[RSP];
        // VMRUN has retired: what RF kept away it kept from VMRUN.
        block.save.rflags &= !Rflags::RF.bits();
        block.control.int_state = 0;
    }

    /// Has the blocks change places, with what VMRUN leaves alone.
    pub(super) fn change_block(&mut self) {
        let Some(state) = &self.nested else { return };
        // The usual case has nothing to carry: two comparisons.
        let shared = state.other.vmcb().save.dbgctl == self.block.vmcb().save.dbgctl;
        if self.carries || !shared {
            self.carry_over();
            return self.exchange_blocks();
        }
        self.exchange_blocks();
    }

    /// What goes over with the level, or changes with it, where there is any of it.
    #[cold]
    #[inline(never)]
    fn carry_over(&mut self) {
        self.settle_iret();
        self.follow_carried();
        self.carry_branch_records();
        self.change_ratio(match self.level {
            Level::L1 => Level::L2,
            Level::L2 => Level::L1,
        });
    }

    #[inline(always)]
    fn exchange_blocks(&mut self) {
        let Some(state) = &mut self.nested else { return };
        if self.loaded {
            // The CPU holds these registers, and keeps them across the change.
            state.other.take_over_from(&self.block);
        } else {
            let (from, to) = (&self.block.vmcb().save, state.other.vmcb_mut(Clean::empty()));
            super::leave::copy_unswitched(&mut to.save, from);
        }
        // SPEC_CTRL belongs to the vCPU: a block that runs has to hold it.
        if self.features.v_spec_ctrl {
            let spec = self.block.vmcb().save.spec_ctrl;
            state.other.vmcb_mut(Clean::empty()).save.spec_ctrl = spec;
        }
        // The objects change places: the pages stay where they are.
        swap(&mut self.block, &mut state.other);
        swap(&mut self.cr0_hidden, &mut state.cr0_hidden);
    }

    /// Makes L2's block, which runs now, what L1's copy of its own says.
    fn fill_l2(&mut self, dirty: Clean, msrpm: Hpa) {
        let Some(state) = &self.nested else { return };
        let l1 = state.other.vmcb();
        let (l1_cr4, l1_int_ctl) = (l1.save.cr4, l1.control.int_ctl);
        // The level is L1's still: so is the block that `l0` would look at.
        self.level = Level::L2;
        let l0 = self.l0(state, msrpm);
        let v12 = state.v12.get();
        let block = self.block.vmcb_mut(Clean::empty());
        // Compared behind the merge, which writes some of it again.
        let (root, int_ctl) = (block.control.ncr3, block.control.int_ctl);
        let mut stale = merge::enter(block, v12, dirty, &l0, &self.cold.offered);
        // NMIs that L1 leaves to L2 are masked in either by one mask.
        let nmi = l1_int_ctl & (vintr::NMI_ENABLE | vintr::NMI_MASK);
        if nmi != 0 && !reflect::keeps_nmi_mask(&v12.control) {
            block.control.int_ctl |= nmi;
        }
        // Without it L2's CR8 is L1's task priority.
        if v12.control.int_ctl & vintr::INTR_MASKING == 0 {
            block.control.int_ctl =
                (block.control.int_ctl & !vintr::TPR_MASK) | (l1_int_ctl & vintr::TPR_MASK);
        }
        if block.control.int_ctl != int_ctl {
            stale |= Clean::INTR;
        }
        let hidden = block.save.cr0 & (Cr0::CD | Cr0::NW).bits();
        let cr4 = block.save.cr4;
        let same_root = block.control.ncr3 == root;
        self.block.mark(stale);
        // What lies under L2's ASID was made of another root.
        if !same_root {
            self.block.request_flush();
        }
        // Clean registers keep what is hidden of them; L1 may have changed what exits since.
        let kept = if dirty.contains(Clean::CR) { 0 } else { u64::from(self.cr0_hidden) };
        if (dirty.contains(Clean::CR) || kept != 0) && !self.shows_cache_disable {
            self.hide_from_l2(hidden | kept);
        }
        // Whether XCR0 is live follows from the level's CR4.
        if (cr4 ^ l1_cr4) & Cr4::OSXSAVE.bits() != 0 {
            self.sync_extended();
        }
    }

    /// CR0.CD and CR0.NW of L2's are kept from the hardware as L1's are.
    fn hide_from_l2(&mut self, hidden: u64) {
        let hidden = hidden as u32;
        let was = core::mem::replace(&mut self.cr0_hidden, hidden);
        if hidden != 0 {
            self.vmcb_mut(Clean::CR).save.cr0 &= !u64::from(hidden);
        }
        if (was | hidden) != 0 {
            self.intercept_cr(InterceptCr::READ_CR0, hidden != 0);
            self.intercept_cr(InterceptCr::WRITE_CR0, hidden != 0 || !self.features.nrip_save);
        }
    }

    /// The MSR map that L2 runs on where L1's cannot be read: that of
    /// [`merge_msr_map`](Self::merge_msr_map), which has closed what could not be.
    pub(super) fn closed_msr_map(&self) -> Hpa {
        let other = self.nested.as_ref().map(|state| &state.other.msr_map);
        other.unwrap_or(&self.block.msr_map).hpa()
    }

    /// The MSR map that L2 runs on. What neither we nor L1 close stays open.
    ///
    /// # Errors
    /// L1's map cannot be read.
    pub(super) fn merge_msr_map(&mut self, seen: &Seen<'_, impl L1Memory>) -> Result<Hpa, Outside> {
        let own = &self.block.msr_map;
        let Some(state) = &mut self.nested else { return Ok(own.hpa()) };
        let State { other, v12, open, .. } = &mut **state;
        let control = v12.control();
        let [_, _, _, third, ..] = control.intercepts;
        // L1 asks for no MSR: what we close is closed for L2, and nothing else.
        if third & Intercept3::MSR.bits() == 0 {
            return Ok(own.hpa());
        }
        let merged = &other.msr_map;
        let open = match open {
            // The words in which ours is open are looked for once: 1,024 words would be read at each VMRUN.
            Some(open) => open,
            None => {
                merged.close();
                // With more open than there is room for, all exit.
                let Some(found) = OpenWords::of(|at| own.word(at)) else { return Ok(merged.hpa()) };
                open.insert(found)
            }
        };
        open.merge(seen, control.msrpm_base_pa, |at, word| merged.set_word(at, word))?;
        Ok(merged.hpa())
    }
}

/// Whether a block may be run with tables of L1's: L1 has to page by entries of 8 bytes, and the types of the block's
/// PAT have to exist.
pub(super) fn may_have_tables(l1: &Vmcb, save: &Save) -> bool {
    let (cr0, cr4) = (Cr0::from_bits_retain(l1.save.cr0), Cr4::from_bits_retain(l1.save.cr4));
    cr0.contains(Cr0::PG) && cr4.contains(Cr4::PAE) && checks::pat(save.g_pat).is_ok()
}

/// Whether L1 pages by more levels than what shadows its tables has: that of the host's own, as all NPT tables have (APM
/// vol. 2 §15.25.3). Upper addresses of L2 could not be walked.
#[inline]
pub(super) fn lacks_levels(l1: &Vmcb, cpu: &mut impl Cpu) -> bool {
    l1.save.cr4 & Cr4::LA57.bits() != 0 && !cpu.cr4().contains(Cr4::LA57)
}
