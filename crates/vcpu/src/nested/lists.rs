//! MSRs in lists of L1's that are the vCPU's: what an entry loads, and what an exit stores and loads (SDM vol. 3C §27.4,
//! §28.4, §28.6). Each is done as RDMSR or WRMSR of L1's would be.

use backend::{Backend, ListAct, ListMsr, Nested};
use msr::{By, Class};
use x86::Direction;

use super::memory::Whole;
use crate::{Vcpu, run::events::Outer};

impl<B: Backend> Vcpu<B> {
    /// Does what lists have left to the vCPU, which has not followed the change of level yet: it asks nothing of
    /// `pending.after_exit`. What is refused fails the entry before L2 runs, or shuts the vCPU down.
    #[cold]
    #[inline(never)]
    pub(crate) fn do_list_msrs(&mut self) {
        // One at a time and behind the entry or exit itself: each is an MSR of the vCPU's, with all
        // that a write of it does.
        while let Some(msr) = self.next_list_msr() {
            if self.do_list_msr(msr) {
                continue;
            }
            // An exit whose list cannot be loaded is a VMX abort (SDM vol. 3C §28.7), which shuts the processor down.
            let fails = self.b.nested_mut().is_some_and(Nested::refuse_list_msr);
            let what = if fails { Outer::NESTED } else { Outer::TRIPLE_FAULT };
            self.events.outer.set(what, true);
            self.pending.raise();
        }
    }

    fn next_list_msr(&mut self) -> Option<ListMsr> {
        // Read from there one by one: what is stored may be what is loaded behind it.
        let l1 = Whole::new(&self.mmu.memory, None);
        self.b.nested_mut()?.next_list_msr(&l1)
    }

    fn do_list_msr(&mut self, ListMsr { index, act }: ListMsr) -> bool {
        let direction = match act {
            ListAct::Load(_) => Direction::Write,
            ListAct::Store(_) => Direction::Read,
            ListAct::Fail => return false,
        };
        // Those of the x2APIC are in no list while it is one, and else nowhere.
        // The filter is the VMM's, and a list is no way past it.
        if msr::classify(index) == Class::X2Apic || self.msr_denied(index, direction) {
            return false;
        }
        match act {
            ListAct::Load(value) => self.write_msr(index, value, By::Guest).is_ok(),
            // L1 names the slot: it may be no memory, or a device.
            ListAct::Store(slot) => self
                .read_msr(index, By::Guest)
                .is_ok_and(|value| self.mmu.memory.write(slot, &value.to_le_bytes()).is_ok()),
            ListAct::Fail => false,
        }
    }

    /// Before an entry of L2: it fails, if its list was refused.
    pub(crate) fn fail_at_list(&mut self) -> bool {
        let done = self.across_levels(|v| {
            v.b.nested_mut()?.fail_at_list(&mut v.gprs, &Whole::new(&v.mmu.memory, None))
        });
        let Some(done) = done else { return false };
        // L2 has not run: nothing of its is to be delivered again.
        self.events.again = None;
        let _ = self.executed(done, 0);
        true
    }
}
