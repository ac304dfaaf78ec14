//! The shadow VMCS with which the hardware serves L1's VMREAD and VMWRITE (SDM vol. 3C §25.10). It is L0's page:
//! what L1 wrote there is read field by field, and is as little trusted as what it writes by an exit.
//!
//! vmcs01 names it by its link pointer, so that it becomes active with each entry of L1 (§25.1): it is noted as
//! active before, and cleared wherever vmcs01 is.

use cpu::Cpu;

use nested_vmx::machine::Level;
use x86::Cr4;
use x86::vmcs::{EntryControls, ProcControls2};

use super::kept::Nested;
use crate::{fields, percpu::PerCpu, state::Vmx};

/// A link pointer that points nowhere.
const NOWHERE: u64 = u64::MAX;

/// How much of what L1 has written into the shadow VMCS is taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// As much as an entry looks at.
    ForEntry,
    /// All: VMCS12 leaves the CPU, or is shown to user space.
    Whole,
}

impl Nested {
    /// Whether the shadow VMCS may have to be made ready, or given up: L1 is in VMX operation, or was.
    #[inline]
    pub(crate) fn may_use_shadow(&self) -> bool {
        self.machine.vmxon().is_some() || self.is_served()
    }

    /// Whether the hardware serves L1's VMREAD and VMWRITE.
    #[inline]
    pub(super) fn is_served(&self) -> bool {
        self.shadow.as_ref().is_some_and(|shadow| shadow.serves)
    }
}

impl<C: Cpu> Vmx<C> {
    /// Before vmcs01 is loaded: the shadow VMCS serves L1 if it has a current VMCS, holds what that has, and is
    /// active here.
    #[cold]
    #[inline(never)]
    pub(crate) fn ready_shadow(&mut self, at: usize, here: &PerCpu) {
        self.with_nested(|this, n| {
            let Some(shadow) = &n.shadow else { return };
            let m = &n.machine;
            // Each entry of an L1 that may name an enlightened VMCS looks for one first.
            let wanted = m.is_in_operation()
                && m.current().is_some()
                && this.cr4.contains(Cr4::VMXE)
                && !m.asks_assist_page();
            if !wanted {
                if shadow.serves {
                    // Without a current VMCS VMREAD fails, and software tells so. In SMM CR4 is SMM's own.
                    this.stop_shadow(n, here);
                }
                return;
            }
            // Written again on another CPU: what was active elsewhere was cleared there, and the link needs it active
            // here.
            if shadow.serves && shadow.vmcs.is_active_on(at, here) && !m.is_mirror_due() {
                return;
            }
            this.write_shadow(n, here);
            // The bit in the controls last: the link has to name what is active.
            this.serve(n, true);
        });
    }

    /// Makes the shadow VMCS current and writes what L1 is to read there. vmcs01 is not loaded.
    fn write_shadow(&mut self, n: &mut Nested, here: &PerCpu) {
        let Some(shadow) = &mut n.shadow else { return };
        let _ = shadow.vmcs.make_current(&self.cpu, here);
        // Whatever was given stays noted as given: it is in the region.
        let closed = n.machine.give_mirror(|encoding, value| self.cpu.vmwrite(encoding, value));
        shadow.close(closed);
        if shadow.vmcs.is_unnoted() {
            // Nobody would clear it: L1's accesses exit as long as there is no room to note it.
            self.stop_shadow(n, here);
        }
    }

    /// L1's VMREAD and VMWRITE exit from now on. vmcs01 is not loaded.
    #[cold]
    #[inline(never)]
    fn stop_shadow(&mut self, n: &mut Nested, here: &PerCpu) {
        let Some(shadow) = &n.shadow else { return };
        // What L1 has written there would be lost.
        if n.machine.is_mirror_ahead() {
            let _ = shadow.vmcs.make_current(&self.cpu, here);
            n.machine.take_mirror(|encoding| self.cpu.vmread(encoding));
        }
        shadow.vmcs.give_up_unnoted(&self.cpu, here);
        // Unnoted, it is cleared when the loop is left: better not to use it.
        self.serve(n, false);
    }

    /// Has vmcs01, which is not loaded, use the shadow VMCS or not.
    fn serve(&mut self, n: &mut Nested, on: bool) {
        let Some(shadow) = &mut n.shadow else { return };
        let on = on && !shadow.vmcs.is_unnoted();
        // Nothing is written where nothing changes: most runs find it as it was.
        if shadow.serves == on {
            return;
        }
        shadow.serves = on;
        // While L2 runs vmcs01 lies beside.
        let vmcs01 = if self.cold.of_l1.runs { &n.other } else { &self.vmcs };
        let link = if on { shadow.vmcs.hpa().0 } else { NOWHERE };
        // The link first: the control without a link would have VMREAD fail.
        vmcs01.set_rarely(&self.cpu, fields::VMCS_LINK, link);
        let bit = ProcControls2::SHADOW_VMCS.bits();
        let mut word = vmcs01.get(&self.cpu, fields::PROC_CONTROLS2) & !bit;
        if on {
            vmcs01.set_rarely(&self.cpu, fields::VMREAD_BITMAP, shadow.reads.hpa().0);
            vmcs01.set_rarely(&self.cpu, fields::VMWRITE_BITMAP, shadow.writes.hpa().0);
            word |= bit;
        }
        vmcs01.set_rarely(&self.cpu, fields::PROC_CONTROLS2, word);
    }

    /// Outside the loop, while L2 runs: L1's VMREAD and VMWRITE will exit.
    #[cold]
    #[inline(never)]
    pub(super) fn end_service(&mut self, n: &mut Nested) {
        // What L1 has written there would be lost.
        self.take_shadow(n, Taken::Whole);
        self.serve(n, false);
    }

    /// L1 goes on after L2: the shadow VMCS gets what L1 is to read there. What was loaded no longer is, and
    /// [`Vmx::exchange`] goes on from there, or [`Vmx::bring_back`]. Outside the loop it waits for the next load.
    #[inline]
    pub(super) fn give_shadow(&mut self, n: &mut Nested) {
        // Before an entry of L1's alone.
        // L2's own VMREAD exits always: it needs nothing of this.
        if !n.is_served() || !n.machine.is_mirror_due() || n.machine.level() == Level::L2 {
            return;
        }
        if let Some(here) = self.set_aside(n) {
            self.write_shadow(n, here);
        }
    }

    /// Takes over what L1 has written into the shadow VMCS.
    pub(super) fn take_shadow(&mut self, n: &mut Nested, taken: Taken) {
        // Nothing is read that L1 cannot have written.
        if !n.is_served() || !n.machine.is_mirror_ahead() {
            return;
        }
        if taken == Taken::ForEntry {
            if !n.machine.asks_mirror() {
                // L1 has written nothing that can count: its VMCS stays where it is.
                return;
            }
            // What is asked of vmcs01 before another is current.
            // Known from here on, so that an entry does not load vmcs01 for them once more.
            let _ = self.get(fields::GUEST_SS_RIGHTS);
            let _ = self.get(fields::GUEST_INTERRUPTIBILITY);
            if !n.machine.vmcs12().entry().contains(EntryControls::LOAD_DEBUG) {
                let _ = self.get(fields::GUEST_DR7);
            }
        }
        let here = self.set_aside(n);
        let Some(shadow) = &n.shadow else { return };
        // Outside the loop each field is read by itself: whatever is current by then.
        let Some(here) = here else {
            let read = |encoding| shadow.vmcs.read_outside(&self.cpu, encoding);
            return n.machine.take_mirror(read);
        };
        let _ = shadow.vmcs.make_current(&self.cpu, here);
        let read = |encoding| self.cpu.vmread(encoding);
        match taken {
            Taken::ForEntry => n.machine.take_mirror_for_entry(read),
            Taken::Whole => n.machine.take_mirror(read),
        }
    }

    /// In the loop: what is loaded gives way to the shadow VMCS. What is set meanwhile is noted, and written when
    /// it is loaded again. `None`: outside the loop.
    pub(super) fn set_aside(&mut self, n: &mut Nested) -> Option<&'static PerCpu> {
        let here = self.vmcs.here()?;
        // Already: two steps of one instruction may ask for it.
        if n.set_aside {
            return Some(here);
        }
        if !self.vmcs.is_loaded() {
            return None;
        }
        // Both VMCSs log into one page: the index goes along.
        if self.is_logging(n) {
            let _ = self.get(fields::PML_INDEX);
        }
        // Without VMCLEAR: it stays active, and is the vCPU's again in a moment.
        self.vmcs.unload();
        n.set_aside = true;
        Some(here)
    }

    /// Loads the vCPU's VMCS again that was set aside.
    #[inline]
    pub(super) fn bring_back(&mut self, n: &mut Nested) {
        if core::mem::take(&mut n.set_aside)
            && let Some(here) = self.vmcs.here()
        {
            // By VMPTRLD; what was set meanwhile is written now.
            let _ = self.vmcs.make_current(&self.cpu, here);
            self.vmcs.load(&self.cpu);
        }
    }

    /// The guest may be a hypervisor no longer: nothing of the shadow VMCS is used when its page is freed.
    pub(super) fn drop_shadow(&mut self, n: &mut Nested) {
        // vmcs01 no longer names it.
        self.serve(n, false);
        if let Some(shadow) = &n.shadow {
            shadow.vmcs.clear_elsewhere();
        }
    }
}
