//! System-management mode of a guest that is a hypervisor: L2's run is put aside while the handler runs.
//!
//! The handler is L1's firmware, and runs in L1's place. L2's general state is in the save area as any guest's is; what
//! else has to be kept the instruction set says ([`backend::Nested::enter_smm`]).

use backend::{Backend, Nested, NestedState};
use x86::{Cr4, Efer, Gpa, cpuid::feature, segment::Segment};

use super::{memory::Whole, transition::owes_trap};
use crate::{
    Vcpu,
    run::events::Outer,
    state::msrs::Msrs,
    state::smm::{NoSaveArea, SavedCpu},
};

impl Msrs {
    /// Where L1 has its own state kept: by VM_HSAVE_PA. Intel has no such page.
    fn host_save_area(&self) -> Gpa {
        Gpa(self.store.vm_hsave_pa())
    }
}

impl<B: Backend> Vcpu<B> {
    /// Whether an L2 runs that RSM finds again by the save area alone: SVM's. VMX keeps what it puts aside.
    pub(crate) fn has_l2_that_needs_the_area(&self) -> bool {
        self.pending.after_exit.is_nested() && !self.cpuid.has(feature::VMX)
    }

    /// Before the memory of the mode is seen: L2's run, if it runs, ends. Where L1 describes L2.
    pub(crate) fn put_l2_aside(&mut self) -> Result<Option<Gpa>, NoSaveArea> {
        let kept = self.msrs.host_save_area();
        // Asked before, for afterwards L1 runs.
        let ran = self.pending.after_exit.is_nested();
        let l2 = self.across_levels(|v| {
            let Some(nested) = v.b.nested_mut() else { return Ok(None) };
            let l1 = Whole::new(&v.mmu.memory, None);
            nested.enter_smm(&mut v.gprs, kept, &l1).map_err(|_| NoSaveArea)
        })?;
        if ran {
            if self.rare.keeps_l2_apart {
                // The handler is L1's and runs behind L2: as at an exit of L2's.
                self.b.prediction_barrier();
            }
            self.level_changed();
        }
        Ok(l2)
    }

    /// RSM, with the memory of L1 in sight again: L2 runs again, if it did. False: what is kept of it is no state.
    pub(crate) fn take_l2_back(&mut self, cpu: &SavedCpu) -> bool {
        // A vCPU whose CPUID has lost SVM has nothing that could run it.
        let l2 = cpu.guest.filter(|_| self.cpuid.has(feature::SVM));
        // SVM is off in the state that RSM loads, so that no CPU would go on in L2.
        if l2.is_some() && !cpu.efer.is_some_and(|efer| efer.contains(Efer::SVME)) {
            return false;
        }
        let kept = self.msrs.host_save_area();
        let done = self.across_levels(|v| {
            let Some(nested) = v.b.nested_mut() else { return true };
            let l1 = Whole::new(&v.mmu.memory, None);
            nested.leave_smm(&mut v.gprs, kept, l2, &l1)
        });
        self.level_changed();
        // TR is the last in the area. Without one no VMX guest is entered (SDM vol. 3C §26.3.1.2), and it is RSM that fails:
        // the shutdown is L1's, no exit of L2's.
        let has_tr = cpu.segments.last().is_some_and(Segment::is_present);
        // Without VMXE no CPU is in VMX operation: no exit of L2's could load L1.
        let is_entered = has_tr && cpu.cr4.contains(Cr4::VMXE);
        let goes_on = if self.pending.after_exit.is_nested() {
            is_entered || !self.cpuid.has(feature::VMX)
        } else {
            // Nor is there VMX operation with registers that it does not allow.
            self.b.nested().is_none_or(|nested| nested.allows(cpu.cr0, cpu.cr4))
        };
        if !goes_on {
            if self.pending.after_exit.is_nested() {
                self.abandon_l2();
            } else {
                self.end_vmx_operation();
            }
            return false;
        }
        if owes_trap(&self.b) || self.b.nested().is_some_and(NestedState::is_unsettled) {
            self.events.outer.set(Outer::NESTED, true);
        }
        done
    }
}
