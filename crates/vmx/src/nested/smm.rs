//! System-management mode puts VMX operation aside until RSM (SDM vol. 3C §32.14): what L2 is lies in VMCS12 meanwhile.

use backend::{Gprs, L1Memory};
use cpu::Cpu;
use x86::Cr4;

use super::{access::Memory, kept::Nested};
use crate::state::Vmx;

impl<C: Cpu> Vmx<C> {
    /// The mode begins.
    #[cold]
    #[inline(never)]
    pub(super) fn put_aside<M: L1Memory>(&mut self, n: &mut Nested, gprs: &Gprs, l1: &M) {
        // Outside VMX operation SMM has nothing to put aside.
        if n.machine.vmxon().is_none() {
            return;
        }
        if !self.cr4.contains(Cr4::VMXE) && !self.cold.of_l1.runs {
            // The VMM has ended VMX operation with the registers that it set.
            n.machine.reset();
            n.timer = None;
            return;
        }
        if n.machine.current().is_some() || n.machine.is_enlightened() {
            self.bring_up_to_date(n, gprs);
            // A saved state has no place for it, as at an exit.
            // Behind what brings VMCS12 up to date: the copy of the shadow VMCS is whole.
            n.machine.store_shadow(&Memory::new(l1));
        }
        // L1's preemption timer counts on.
        let timer = n.timer;
        self.cold.aside = self.cold.of_l1.runs.then(|| self.other_msrs());
        // Behind what is read of L2.
        // L1's VMCS is the vCPU's, whose registers SMM saves.
        self.end_run(n);
        n.machine.put_aside();
        n.timer = timer.filter(|_| n.machine.smm.guest_mode);
    }

    /// RSM: VMX operation goes on, and L2 runs if it did.
    #[cold]
    #[inline(never)]
    pub(super) fn take_back<M: L1Memory>(&mut self, n: &mut Nested, gprs: &mut Gprs, l1: &M) {
        // Asked for the flag that the SMI left: RSM without one changes nothing here.
        if n.machine.take_back() {
            n.machine.load_shadow(&Memory::new(l1));
            // A state that was restored in the mode has them in VMCS12 alone.
            let others = self.cold.aside.take();
            self.resume_l2(n, gprs, others, &Memory::new(l1));
        }
    }
}
