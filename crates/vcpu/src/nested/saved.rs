//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE (KVM API §4.114, §4.115), and how else user space ends L2's run.
//!
//! What the other commands give and take while L2 runs is L2's: its registers are the vCPU's. The nested state has
//! L1's beside, in the format of its instruction set, which is the backend's to know.

use backend::{Backend, Nested, NestedState, Unrestorable};
use host::NoMemory;
use vm::vcpu_shared::Request;
use x86::{cpuid::feature, msr};

use super::{
    events::tell_activity, memory::Whole, paging::has_pdptes_of_l1, transition::owes_trap,
};
use crate::{
    Vcpu,
    apic::stop_serving_apic,
    paging::pdptes::is_pae,
    run::{events::Outer, outcome::Outcome},
};

/// MSRs of which L2 may have its own: on AMD PAT with nested paging of L1's, and DEBUGCTL with the records where its block
/// asks for them; on Intel all that the CPU has. DEBUGCTL goes before the records, which lie where it says.
const OWN_MSRS: [u32; 9] = [
    msr::PAT,
    msr::DEBUGCTL,
    msr::LAST_BRANCH_FROM,
    msr::LAST_BRANCH_TO,
    msr::LAST_INT_FROM,
    msr::LAST_INT_TO,
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
];

/// Bytes of a nested state before the control block that it may have (`struct kvm_nested_state`).
const HEADER: usize = 128;

impl<B: Backend> Vcpu<B> {
    /// Bytes that the nested state has now. `None`: the vCPU has none, for its guest may be no hypervisor.
    pub fn nested_state_size(&self) -> Option<usize> {
        self.b.nested().map(NestedState::state_size)
    }

    /// Writes the nested state into zeros.
    ///
    /// # Errors
    /// There is no memory to make it, or too little room.
    pub fn nested_state(&mut self, into: &mut [u8]) -> Result<(), Unrestorable> {
        // The state says whether L2 halts, which is the vCPU's to know.
        tell_activity(&mut self.b, self.shared.mp_state());
        self.across_levels(|v| {
            let Some(nested) = v.b.nested_mut() else { return Err(Unrestorable::Invalid) };
            nested.save_state(&v.gprs, into, &Whole::new(&v.mmu.memory, None))
        })
    }

    /// Takes a nested state over. If it is refused nothing has changed. Else L2's run has ended, if it ran, and L1
    /// has the registers that L2 had, but for those that the state has itself.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn set_nested_state(&mut self, bytes: &[u8]) -> Result<(), Unrestorable> {
        let smm = self.smm.active;
        let Some(nested) = self.b.nested_mut() else { return Err(Unrestorable::Invalid) };
        // All is checked before anything changes: a state that is refused leaves the vCPU as it was. What is found good is
        // restored without another look at L1's memory, which other threads may change.
        let checked = nested.check_state(bytes, smm, &Whole::new(&self.mmu.memory, None))?;
        // Whose tables lead where has to be known before the first entry: registers are set, and addresses asked for.
        if bytes.len() > HEADER {
            self.make_stage().map_err(|NoMemory| Unrestorable::NoMemory)?;
        }
        // The hardware serves no hypervisor's local APIC.
        // Before `stop_serving_apic`, which would leave the requests with the hardware.
        self.gather_interrupts();
        if self.b.served_apic().is_some() {
            stop_serving_apic(&mut self.b);
        }
        // What user space has set belongs to the level that the state names: registers, and events.
        self.leave_l2_with_its_registers();
        // Both levels get other tables: the one that runs now, and the one that the state has run.
        self.b.flush_tlb();
        self.across_levels(|v| {
            if let Some(nested) = v.b.nested_mut() {
                nested.restore_state(&mut v.gprs, checked, &Whole::new(&v.mmu.memory, None));
            }
        });
        // Before the next entry: see `settle_injection`.
        self.shared.request(Request::Event);
        self.rare.nested_restored = true;
        self.level_changed();
        self.b.flush_tlb();
        // CR0, CR4 and EFER may be another level's.
        self.mmu.note_role(&self.b);
        self.find_pdptes();
        if owes_trap(&self.b) || self.b.nested().is_some_and(NestedState::is_unsettled) {
            // An entry has to look before L2 runs: what is left of the state lies in L1's memory.
            self.events.outer.set(Outer::NESTED, true);
            self.pending.raise();
        }
        Ok(())
    }

    /// L1 runs, whatever ran, with the registers that user space saw.
    #[inline(never)]
    pub(crate) fn leave_l2_with_its_registers(&mut self) {
        if !self.pending.after_exit.is_nested() {
            return;
        }
        let (debug, msrs) = (self.debug_regs(), OWN_MSRS.map(|index| self.b.msr(index)));
        self.leave_l2_with_its_sregs();
        for (index, value) in OWN_MSRS.into_iter().zip(msrs) {
            // A CPU without the MSR has none to be kept.
            let _ = value.and_then(|value| self.b.set_msr(index, value));
        }
        self.set_debug_regs(debug);
    }

    /// A frame of its own, for what is kept is large.
    #[inline(never)]
    fn leave_l2_with_its_sregs(&mut self) {
        // Kept across: to abandon L2 loads L1's.
        let (gprs, rip, rflags) = (self.gprs.0, self.b.rip(), self.b.rflags());
        let sregs = self.sregs();
        // What user space has given since the guest ran is for whoever runs next. What L2 had begun to take goes with it.
        let given = self.rare.given;
        let again = self.events.again.filter(|_| given.again);
        let exception = self.events.exception.filter(|_| given.exception);
        self.abandon_l2();
        (self.events.again, self.events.exception) = (again, exception);
        self.gprs.0 = gprs;
        self.b.set_rip(rip);
        self.b.set_rflags(rflags);
        self.put_sregs(&sregs);
    }

    /// RSM has set the registers: the PDPTEs are loaded as those say, for the handler may have loaded its own; but an L2 with
    /// tables of L1's has those of its state. False: they are none that a CPU would load.
    #[cold]
    #[inline(never)]
    pub(crate) fn reload_own_pdptes(&mut self) -> bool {
        let c = self.b.control();
        if has_pdptes_of_l1(&self.b) || !is_pae(c.cr0, c.cr4, c.efer) {
            return true;
        }
        self.mmu.forget_fetched_pdptes();
        self.load_own_pdptes(c.cr3).is_ok()
    }

    /// PDPTEs are no part of a state of L2's without tables of L1's: they are loaded as soon as memory is there.
    fn find_pdptes(&mut self) {
        let c = self.b.control();
        if self.b.pdptes().is_some()
            && is_pae(c.cr0, c.cr4, c.efer)
            && !has_pdptes_of_l1(&self.b)
            && self.load_own_pdptes(c.cr3).is_err()
        {
            self.rare.pdptes_due = true;
            self.events.outer.set(Outer::NESTED, true);
        }
        self.pending.raise();
    }

    /// Before an entry: what [`find_pdptes`](Self::find_pdptes) could not load, and what of the state lies in L1's memory.
    pub(crate) fn finish_restore(&mut self) -> Outcome {
        // The handler of SMM is in sight of its own memory, not of L1's: RSM asks for this again.
        if let Some(nested) = self.b.nested_mut().filter(|_| !self.smm.active) {
            nested.settle_state(&Whole::new(&self.mmu.memory, None));
            // No exit could be told to L1. User space may give the page, and the state waits for that.
            if self.pending.after_exit.is_nested() && nested.is_unsettled() {
                return Err(self.no_block());
            }
        }
        if core::mem::take(&mut self.rare.pdptes_due) {
            self.replace_own_pdptes();
        }
        Ok(())
    }

    /// User space writes 0 to IA32_FEATURE_CONTROL, as at a reset: VMX operation ends, as on stock KVM.
    #[cold]
    pub(crate) fn end_vmx_operation(&mut self) {
        if !self.cpuid.has(feature::VMX) {
            return;
        }
        self.leave_l2_with_its_registers();
        if let Some(nested) = self.b.nested_mut() {
            nested.abandon(&mut self.gprs);
        }
        self.follow_gate();
    }
}
