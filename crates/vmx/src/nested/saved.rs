//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE: [`nested_vmx::saved`] applied to the two VMCSs.

use backend::{
    ControlRegisters, Gprs, L1Flush, L1Memory, NestedState, RSP, Registers, Unrestorable,
};
use cpu::Cpu;
use host::KBox;
use nested_vmx::machine::{EntryBy, PendingEntry};
use nested_vmx::merge::time::Deadline;
use nested_vmx::saved::{self, Context, Good, Images, Onto, Refused, Restored};
use nested_vmx::{apic_page, virtual_interrupts};
use x86::vmcs::{EntryControls, PinControls, event, field, interruptibility};
use x86::{Cr0, Dr7, Efer};

use super::{
    access::{Block, Memory},
    kept::{Nested, OtherMsrs},
    shadow::Taken,
};
use crate::{fields, inject, state::Vmx};

const SHADOWS: u32 = interruptibility::STI | interruptibility::MOV_SS;

const fn told(refused: Refused) -> Unrestorable {
    match refused {
        // One errno for all but EFAULT, as stock KVM has it.
        Refused::Missing => Unrestorable::Missing,
        _ => Unrestorable::Invalid,
    }
}

impl<C: Cpu> Vmx<C> {
    /// Brings VMCS12 up to date with all that is kept elsewhere.
    pub(super) fn bring_up_to_date(&mut self, n: &mut Nested, gprs: &Gprs) {
        // VMCS12 as user space sees it has all that L1 has written.
        self.take_shadow(n, Taken::Whole);
        // It goes on serving: what it has is given again before L1 runs.
        n.machine.mirror_taken();
        if !self.cold.of_l1.runs {
            let behind = n.machine.behind();
            // L1's VMCS12 is whole then: nothing of L2 is left in vmcs02.
            if !behind.is_empty() {
                self.fetch(n, behind);
            }
            return;
        }
        let left = self.timer_left(n);
        // Saved as an exit would, without one: L2 goes on behind.
        let block = Block { cpu: &self.cpu, vmcs: &self.vmcs };
        let mut known = Self::known(&block, self.efer.bits());
        known.preemption_timer = left;
        known.activity = self.activity_of_l2(n, n.machine.vmcs12().get(field::GUEST_ACTIVITY));
        n.machine.save_running(&block, &known);
        let injection = self.get(fields::ENTRY_INTERRUPTION);
        // The VMCS may say of a shadow what is over.
        let shadow = self.interrupt_shadow();
        // The array has the newest: a handler may have set RSP since the exit.
        let v = n.machine.vmcs12_mut();
        v.set(field::GUEST_RSP, gprs.0[RSP]);
        if !shadow {
            let blocked = v.get(field::GUEST_INTERRUPTIBILITY);
            v.set(field::GUEST_INTERRUPTIBILITY, blocked & !SHADOWS);
        }
        // What waits to be injected is among the events that are saved.
        let asked = v.get(field::ENTRY_INTERRUPTION);
        // By the hardware's valid bit: what was injected is not injected again after a restore.
        let valid = x86::vmcs::event::VALID;
        v.set(field::ENTRY_INTERRUPTION, asked & (!valid | injection & valid));
    }

    fn check_bytes<M: L1Memory>(
        &self,
        n: &Nested,
        bytes: &[u8],
        smm: bool,
        memory: &Memory<'_, M>,
    ) -> Result<(Good, KBox<Images>), Unrestorable> {
        // 2 KiB and more: on the heap.
        let mut images = KBox::<Images>::zeroed().map_err(|_| Unrestorable::NoMemory)?;
        let onto = Onto {
            context: Context {
                offered: self.cold.limits.vmx,
                smm,
                enlightened: n.machine.is_enlightenment_enabled(),
            },
            // By what an entry is checked by: an L1 that may be enlightened has fewer controls.
            capabilities: &n.machine.checked_by(),
            limits: &self.nested_limits(),
        };
        let good = saved::check(bytes, &onto, memory, &mut images).map_err(told)?;
        Ok((good, images))
    }

    #[inline(never)]
    fn restore_checked<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        (good, images): (Good, KBox<Images>),
        l1: &M,
    ) {
        let memory = Memory::new(l1);
        let (restored, deadline) = saved::take_over(&mut n.machine, &good, &images);
        // Memory may be that of another time: what was made of L1's tables is as stale as after its INVEPT.
        n.made.flush_due = true;
        n.seconds.owe_flush();
        n.drop_vpids();
        n.flushed = L1Flush::All;
        n.msrs_kept = None;
        // It was of an L2 of before.
        self.cold.aside = None;
        // Without one the timer begins anew.
        let counts = n.machine.vmcs12().pin().contains(PinControls::PREEMPTION_TIMER);
        n.timer = deadline.filter(|_| counts).map(Deadline);
        if restored == Restored::L2 {
            // Behind the regions: vmcs02 is composed from VMCS12.
            // The vCPU's registers were set before the nested state: VMMs do it in that order.
            let others = Some(self.other_msrs());
            let pending = n.machine.run_pending;
            self.resume_l2(n, gprs, others, &memory);
            if !pending {
                self.keep_undelivered(n);
            }
        }
    }

    /// MSRs of the level that runs, of which an exit may save nothing.
    pub(super) fn other_msrs(&self) -> OtherMsrs {
        let (pat, debugctl) = (self.get(fields::GUEST_PAT), self.get(fields::GUEST_DEBUGCTL));
        OtherMsrs { pat, debugctl, efer: self.efer }
    }

    /// What L1 injected and was on its way is among the state's events of the vCPU, without all of its kind and without its length. VMCS12
    /// has both, or those of an event of long ago, which no event is then. Nobody has checked them.
    fn keep_undelivered(&mut self, n: &Nested) {
        let v = n.machine.vmcs12();
        // Neither INT n nor #BP has an error code.
        let word = v.get(field::ENTRY_INTERRUPTION) & (event::TYPE | event::VECTOR);
        // An INT3 and an exception of vector 3 have one neutral form.
        let is_exception =
            word & event::TYPE == event::EXCEPTION && matches!(word & event::VECTOR, 3 | 4);
        if inject::has_length(word) || is_exception {
            let length = v.get(field::ENTRY_INSTRUCTION_LENGTH);
            let of_l1 = &mut self.cold.of_l1;
            of_l1.repeated = word | event::VALID;
            // An entry is refused with any other length (SDM vol. 3C §27.2.1.3).
            of_l1.length = if matches!(length, 1..=15) { length } else { 0 };
        }
    }

    /// L2 runs from now on, with the state that VMCS12 has. Where the entry is over, what it loads beside was the
    /// vCPU's before, or L2's own at the SMI; of `others`, if they are not known, VMCS12 has what there is.
    pub(super) fn resume_l2<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        others: Option<OtherMsrs>,
        memory: &Memory<'_, M>,
    ) {
        let pending = n.machine.run_pending;
        // Read before L2's block is composed: with no entry pending they are L2's already.
        let dr7 = self.get(fields::GUEST_DR7);
        let efer = others.map_or(self.efer, |l2| l2.efer);
        self.begin_l2(n, gprs, memory);
        // Of vmcs01: a step that pends in a shadow of L1's is over with its entry, and behind an exit none pends (SDM vol. 3C §28.5).
        n.other.set_rarely(&self.cpu, fields::GUEST_PENDING_DEBUG, 0);
        if !pending {
            self.set_rarely(fields::GUEST_DR7, dr7);
            if let Some(OtherMsrs { pat, debugctl, .. }) = others {
                self.set_rarely(fields::GUEST_PAT, pat);
                self.set_rarely(fields::GUEST_DEBUGCTL, debugctl);
            }
            let long = n.machine.vmcs12().entry().contains(EntryControls::IA32E_GUEST);
            let mode = Efer::LME | Efer::LMA;
            // Without paging LME stands for a mode to come.
            let gone = if self.cr0.contains(Cr0::PG) { mode } else { Efer::LMA };
            self.set_efer(if long { efer | mode } else { efer - gone });
            if Dr7::new(dr7).has_breakpoints() {
                backend::LiveRegisters::own_debug_regs(self);
            }
        }
        // As behind an entry: vmcs02 is what VMCS12 says, and nothing is dirty.
        n.machine.entered(PendingEntry { by: EntryBy::Vmresume });
        let v = n.machine.vmcs12();
        // The page may come later.
        // By the status alone: whoever delivers looks at the page.
        let waits = virtual_interrupts::may_wait(v);
        let falls = v.apic_access_page().is_some() && apic_page::falls_at_entry(v, memory);
        (n.machine.interrupt_pending, n.machine.fall_pending) = (waits, falls);
    }
}

impl<C: Cpu> NestedState for Vmx<C> {
    /// The images are of our own memory: what was checked is what is taken over.
    type Checked = (Good, KBox<Images>);

    fn state_size(&self) -> usize {
        // A vCPU that is no hypervisor has a header to be saved, too.
        self.nested.as_ref().map_or(saved::HEADER, |n| saved::size(&n.machine))
    }

    fn save_state(
        &mut self,
        gprs: &Gprs,
        into: &mut [u8],
        l1: &impl L1Memory,
    ) -> Result<(), Unrestorable> {
        self.with_nested(|this, n| {
            // Before the page of an enlightened VMCS is read: the one or the other has what L1 wrote last.
            this.take_shadow(n, Taken::Whole);
            n.machine.refresh_enlightened(&Memory::new(l1));
            let v = n.machine.vmcs12();
            let (asked, told) = (v.get(field::ENTRY_INTERRUPTION), v.get(field::GUEST_ACTIVITY));
            // Without a VMCS there is no image, and nothing to be brought up to date.
            if n.machine.current().is_some() || n.machine.is_enlightened() {
                this.bring_up_to_date(n, gprs);
            }
            let deadline = n.timer.map(|deadline| deadline.0);
            let saved = saved::save(&n.machine, deadline, into).map(|_| ());
            // The state alone has them otherwise: it says what is to be injected again, and that the CPU has halted L2, which
            // goes on here.
            let v = n.machine.vmcs12_mut();
            v.set(field::ENTRY_INTERRUPTION, asked);
            if this.cold.of_l1.runs {
                v.set(field::GUEST_ACTIVITY, told);
            }
            saved.ok_or(Unrestorable::Missing)
        })
        .unwrap_or(Err(Unrestorable::Invalid))
    }

    fn check_state(
        &mut self,
        bytes: &[u8],
        smm: bool,
        l1: &impl L1Memory,
    ) -> Result<Self::Checked, Unrestorable> {
        let Some(n) = &self.nested else { return Err(Unrestorable::Invalid) };
        self.check_bytes(n, bytes, smm, &Memory::new(l1))
    }

    fn restore_state(&mut self, gprs: &mut Gprs, checked: Self::Checked, l1: &impl L1Memory) {
        // From now on the other VMCSs may be active.
        self.beside = true;
        self.with_nested(|this, n| this.restore_checked(n, gprs, checked, l1));
    }

    fn has_l2_aside(&self) -> bool {
        self.nested.as_ref().is_some_and(|n| n.machine.smm.guest_mode)
    }

    fn is_unsettled(&self) -> bool {
        self.nested.as_ref().is_some_and(|n| n.machine.is_unsettled())
    }

    fn settle_state(&mut self, l1: &impl L1Memory) {
        let limits = self.nested_limits();
        if let Some(n) = &mut self.nested {
            // When L1's pages are there, before anything runs.
            n.machine.settle_enlightened(&limits, &Memory::new(l1));
        }
    }
}
