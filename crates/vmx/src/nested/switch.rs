//! The two VMCSs change places.

use cpu::{Cpu, VmxSwitch};
use nested_vmx::leave::Known;
use nested_vmx::machine::Instruction;
use nested_vmx::merge::time::Tsc;
use x86::vmcs::{Groups, ProcControls2};

use super::{
    access::Block,
    kept::{Nested, OfL1},
};
use crate::{
    fields,
    state::{NmiBehind, Vmx, attention},
    vmcs::Vmcs,
};

impl<C: Cpu> Vmx<C> {
    /// Makes the other VMCS the vCPU's: in the loop the hardware's too.
    pub(super) fn exchange(&mut self, n: &mut Nested) {
        debug_assert!(self.beside);
        // What was set aside for the shadow VMCS is not loaded, but was: the other one takes its place at once.
        // By either sign: set aside, or loaded all the time.
        let loaded = core::mem::take(&mut n.set_aside) || self.vmcs.is_loaded();
        // Once in a run of the loop: CR3, CR4 and FS base are the thread's, and both VMCSs need them.
        // Read of the one that goes, before it is unloaded: they are read once for both.
        let host = (loaded && !core::mem::replace(&mut n.has_host, true)).then(|| {
            (self.get(fields::HOST_CR3), self.get(fields::HOST_CR4), self.get(fields::HOST_FS_BASE))
        });
        // Read while it is loaded.
        let logged = self.is_logging(n).then(|| self.get(fields::PML_INDEX));
        if loaded {
            // Lent to the vCPU while it is: the flag goes back to its VMCS.
            self.vmcs.launched.set(self.switch.flags & VmxSwitch::LAUNCHED != 0);
            self.vmcs.unload();
            // Its CPU has no note of it: nobody else would clear it later.
            if let Some(here) = self.vmcs.here() {
                self.vmcs.give_up_unnoted(&self.cpu, here);
            }
        }
        // The world switch writes HOST_RSP only where it is another than the VMCS is known to have.
        self.vmcs.host_rsp.set(self.switch.host_rsp);
        // For both: what was to be flushed for one may have been told to the vCPU while the other ran.
        if self.attention & attention::FLUSH != 0 {
            // It waits for the level that was to run, too.
            self.vmcs.drop_vpid();
        }
        // It was said of the VMCS that goes.
        self.shadow_over.set(false);
        self.attention &= !attention::STI_GIVEN;
        self.nmi_behind = NmiBehind::Nothing;
        // A timer belongs to its VMCS: one that was set for a deadline that nobody watches any more ends each run
        // at its first instruction.
        self.vmcs.timer_runs.set(self.attention & attention::TIMER != 0);
        // Three words: the cache, the page and what they say of the CPU go along.
        core::mem::swap(&mut self.vmcs, &mut n.other);
        self.switch.host_rsp = self.vmcs.host_rsp.get();
        self.attention &= !attention::TIMER_SET;
        // A deadline, or a timer that still runs in the VMCS that comes.
        if self.deadline.is_watched() || self.vmcs.timer_runs.get() {
            self.attention |= attention::TIMER;
        }
        if loaded {
            self.load_other(n, host);
        }
        // Behind the load: the field is the CPU's to change.
        if let Some(index) = logged {
            // Both log into the one page.
            self.set(fields::PML_INDEX, index);
        }
    }

    /// Changes vmcs01 too while L2 runs: a word of L0's own has to be there when L1 goes on.
    pub(crate) fn behind_l2(&self, change: impl FnOnce(&C, &Vmcs)) {
        if self.cold.of_l1.runs
            && let Some(n) = &self.nested
        {
            // vmcs02 was changed too: it is not what the words of its entry made it.
            n.made.sources.set(None);
            change(&self.cpu, &n.other);
        }
    }

    /// L1's threshold follows its priority, which L2 has set: the entry of L1 would be refused.
    #[cold]
    #[inline(never)]
    pub(crate) fn lower_threshold_of_l1(&self, priority: u8) {
        let Some(n) = &self.nested else { return };
        // vmcs02 is as it was: nothing of it follows from this.
        if n.other.get(&self.cpu, fields::TPR_THRESHOLD) > priority.into() {
            n.other.set(&self.cpu, fields::TPR_THRESHOLD, priority.into());
        }
    }

    /// The TSC of the level that runs, from the host's.
    pub(crate) fn current_tsc(&self) -> Tsc {
        let l1 = self.tsc_of_l1();
        match &self.nested {
            Some(n) if self.cold.of_l1.runs => l1.of_l2(n.machine.vmcs12()),
            _ => l1,
        }
    }

    /// Whether one of the two VMCSs logs pages.
    pub(super) fn is_logging(&self, n: &Nested) -> bool {
        // By the cache for the one that is not current: 0 where nothing was written yet.
        let both = self.get(fields::PROC_CONTROLS2)
            | n.other.fields.get(fields::PROC_CONTROLS2).unwrap_or(0);
        ProcControls2::from_bits_retain(both).contains(ProcControls2::PML)
    }

    /// The VMCS that came takes the place of the other in the loop. `host`: the thread's words, if it has not got
    /// those of this run.
    fn load_other(&mut self, n: &Nested, host: Option<(u64, u64, u64)>) {
        let (Some(here), at) = (n.other.here(), n.other.last_cpu()) else { return };
        // It may have run elsewhere last.
        // Its words are those of a CPU: on another they are all written again.
        if !self.vmcs.has_host_of(at, here) {
            self.arrive(at, here);
        }
        if !self.vmcs.has_vpid_of(here) {
            self.attention |= attention::FLUSH;
        }
        // The first time in its life: constants are in no cache.
        if self.vmcs.make_current(&self.cpu, here) {
            self.write_constants();
        }
        // By its own flag: VMLAUNCH for the one, VMRESUME for the other.
        self.switch.flags &= !VmxSwitch::LAUNCHED;
        if self.vmcs.launched.get() {
            self.switch.flags |= VmxSwitch::LAUNCHED;
        }
        if let Some((cr3, cr4, fs_base)) = host {
            self.set(fields::HOST_CR3, cr3);
            self.set(fields::HOST_CR4, cr4);
            self.set(fields::HOST_FS_BASE, fs_base);
        }
        self.vmcs.load(&self.cpu);
    }

    /// What L0 knows of L2 that vmcs02 does not have. vmcs02 is `block`'s.
    pub(super) fn known(block: &Block<'_, C>, efer: u64) -> Known {
        let get = |slot| block.vmcs.get(block.cpu, slot);
        // The activity and the timer's rest are put in by who knows them.
        Known {
            activity: 0,
            cr0_mask: get(fields::CR0_MASK),
            cr4_mask: get(fields::CR4_MASK),
            preemption_timer: 0,
            pat: block.vmcs.get(block.cpu, fields::GUEST_PAT),
            efer,
            debugctl: block.vmcs.get(block.cpu, fields::GUEST_DEBUGCTL),
        }
    }

    /// L1 runs, and asks for what the last exit of L2 left in vmcs02.
    #[cold]
    #[inline(never)]
    pub(super) fn fetch(&mut self, n: &mut Nested, groups: Groups) {
        // What was set aside for the shadow VMCS is loaded first: the exchange is between two that are.
        self.bring_back(n);
        let looks_in = self.vmcs.is_loaded();
        // L1's NMI waits behind its STI: an exchange is most often a change of level, where nothing of that is left.
        let nmi_behind = self.nmi_behind;
        if looks_in {
            self.exchange(n);
        }
        // Outside the loop both can be read where they are.
        let vmcs = if looks_in { &self.vmcs } else { &n.other };
        let block = Block { cpu: &self.cpu, vmcs };
        // By the field, not by the vCPU's word: that is L1's.
        let efer = block.vmcs.get(block.cpu, fields::GUEST_EFER);
        let known = Self::known(&block, efer);
        n.machine.fetch(&block, &known, groups);
        if looks_in {
            // Back: L1 is what runs.
            self.exchange(n);
        }
        self.nmi_behind = nmi_behind;
    }

    /// L1's VMREAD or VMWRITE asks for what the last exit of L2 left in vmcs02: the field `one`, or all of `groups`.
    pub(super) fn fetch_for(
        &mut self,
        n: &mut Nested,
        instruction: &Instruction,
        one: Option<u16>,
        groups: Groups,
    ) {
        if let Some(encoding) = one
            && let Some(value) = self.look_aside(n, encoding.into())
        {
            n.machine.put_alone(encoding, value);
            // A VMWRITE of another value makes the group one that L1 has changed: it has to be whole before.
            if n.machine.needs(instruction).is_empty() {
                return;
            }
        }
        self.fetch(n, groups);
    }

    /// Reads a field of vmcs02 while L1's VMCS is the vCPU's. `None`: not in the loop, or vmcs02 is not as the hardware has it.
    fn look_aside(&mut self, n: &mut Nested, encoding: u32) -> Option<u64> {
        let here = self.vmcs.here()?;
        let is_whole =
            !n.other.fields.has_unwritten() && n.other.is_active_on(n.other.last_cpu(), here);
        if !is_whole || !n.other.has_host_of(self.vmcs.last_cpu(), here) {
            return None;
        }
        self.set_aside(n)?;
        // It is active here, so that nothing is made of it but the current one.
        let _ = n.other.make_current(&self.cpu, here);
        let value = self.cpu.vmread(encoding);
        self.bring_back(n);
        Some(value)
    }

    /// L1 runs from now on with registers that somebody sets; L2's are lost.
    pub(super) fn abandon_l2(&mut self, n: &mut Nested) {
        self.end_run(n);
        // Behind `end_run`, which asks who runs.
        n.machine.reset();
        n.timer = None;
    }

    /// L1's VMCS is the vCPU's from now on, as it was when L2 was entered.
    pub(super) fn end_run(&mut self, n: &mut Nested) {
        if self.cold.of_l1.runs {
            // It would be injected into L1.
            self.drop_injection();
            self.cold.of_l1 = OfL1::default();
            self.own();
            self.exchange(n);
            self.stop_timer(n);
            // What an entry's list left was for that L2.
            n.lists.forget();
            // Somebody sets the registers of L1 from now on: what is not known is taken for the guest's own.
            let _ = self.get(fields::GUEST_RSP);
            // Or nobody does: vmcs01 is entered as it is, and what the CPU holds of the host's follows from these words.
            let (cr4, efer) = (self.cr4, self.efer);
            (self.cr0, self.cr4, self.efer) = self.cold.words_of_l1;
            self.after_level_change(cr4, efer);
        }
    }
}
