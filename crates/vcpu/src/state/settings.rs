//! What a VMM sets on a vCPU beside its registers: TSC frequency and offset, the machine-check
//! architecture, exceptions for a debugger. Called between runs.

use core::sync::atomic::Ordering::Relaxed;

use backend::{Backend, FewerExits};
use irqchip::lapic::LocalVector;
use msr::{McReport, McVerdict};
use vm::vcpu_shared::Request;
use x86::{Cr4, Dr6, Exception, Vector};

use crate::time::tsc::{Tsc, is_close};
use crate::{Vcpu, run::events::Outer, state::registers::Invalid};

impl<B: Backend> Vcpu<B> {
    /// KVM_CAP_X86_DISABLE_EXITS, as it stands when the vCPU is made.
    pub(crate) fn follow_fewer_exits(&mut self) {
        let bits = self.vm.settings.disable_exits.load(Relaxed);
        if bits == 0 {
            return;
        }
        let [mwait, hlt, pause, cstate] = [0, 1, 2, 3].map(|n| bits & 1 << n != 0);
        self.b.give_up_exits(FewerExits { mwait, hlt, pause, cstate });
        self.cpuid.set_hlt_in_guest(hlt);
    }

    /// `on`: paravirtual features that the guest's CPUID lacks do not exist (KVM_CAP_ENFORCE_PV_FEATURE_CPUID).
    pub fn enforce_pv_features(&mut self, on: bool) {
        self.pv.enforced = on;
    }

    /// Whether KVM_RUN was called.
    pub fn has_run(&self) -> bool {
        self.rare.has_run
    }

    /// KVM_SET_TSC_KHZ. `scaling`: the hardware can scale; without it only the host's own
    /// frequency can be had.
    pub fn set_tsc_khz(&mut self, khz: u32, scaling: bool) -> Result<(), Invalid> {
        // Without scaling only the host's rate can be had. Stock KVM takes a faster one and makes up for it in
        // software.
        if khz == 0 || !(scaling || is_close(khz, host::clock::tsc_khz())) {
            return Err(Invalid);
        }
        let host = self.b.host_tsc();
        let guest = self.b.guest_tsc(host);
        let before = core::mem::replace(&mut self.rare.tsc, Tsc::of(khz));
        if self.rare.tsc.ratio != before.ratio {
            self.vm.leave_tsc_round(&mut self.rare.tsc_round);
        }
        // The guest's TSC goes on from where it is.
        // The new ratio without an offset gives what has to be added.
        self.b.set_tsc(0, self.rare.tsc.ratio);
        self.rare.tsc.offset = guest.wrapping_sub(self.b.guest_tsc(host));
        self.put_tsc();
        self.tsc_changed();
        self.shared.request(Request::Clock);
        Ok(())
    }

    /// Guest TSC minus scaled host TSC.
    pub fn tsc_offset(&self) -> u64 {
        self.rare.tsc.offset
    }

    /// Sets the guest TSC minus the scaled host TSC.
    pub fn set_tsc_offset(&mut self, offset: u64) {
        let now = self.scaled_tsc_now();
        self.vm.note_tsc_offset(offset, now, self.rare.tsc.khz, &mut self.rare.tsc_round);
        self.set_tsc_offset_by_vmm(offset);
        self.shared.request(Request::Clock);
    }

    /// Sets up the machine-check banks (KVM_X86_SETUP_MCE).
    pub fn set_up_mce(&mut self, mcg_cap: u64) -> Result<(), Invalid> {
        self.msrs.store.set_up_mce(mcg_cap).map_err(|_| Invalid)?;
        // The version register may change.
        self.gather_interrupts();
        self.set_apic_features();
        Ok(())
    }

    /// Reports a machine check to the guest (KVM_X86_SET_MCE).
    pub fn inject_mce(&mut self, report: &McReport) -> Result<(), Invalid> {
        // With CR4.MCE clear a machine check is a shutdown.
        let enabled = self.b.control().cr4.contains(Cr4::MCE);
        match self.msrs.store.inject_mce(report, enabled).map_err(|_| Invalid)? {
            McVerdict::Logged => {}
            McVerdict::Interrupt if self.shared.in_kernel_apic => {
                // By its LVT entry, which the guest may have masked.
                self.shared.deliver(self.shared.lapic.deliver_local(LocalVector::Cmci));
            }
            McVerdict::Interrupt => {}
            McVerdict::Raise => {
                const MC: Vector = Vector(18);
                self.raise_given(Exception { vector: MC, error_code: None, payload: None });
                self.shared.request(Request::Event);
            }
            McVerdict::TripleFault => self.events.outer.set(Outer::TRIPLE_FAULT, true),
        }
        Ok(())
    }

    /// KVM_GUESTDBG_INJECT_DB and KVM_GUESTDBG_INJECT_BP: raises #DB, or #BP.
    pub fn inject_debug(&mut self, breakpoint: bool) {
        let vector = Vector(if breakpoint { 3 } else { 1 });
        self.raise_given(Exception { vector, error_code: None, payload: None });
        self.shared.request(Request::Event);
    }

    /// Moves what a waiting exception carries into CR2 or DR6, so that it can be saved without.
    pub fn deliver_exception_payload(&mut self) {
        // What is injected already has left its payload where it belongs.
        let Some(exception) = &mut self.events.exception else { return };
        let (vector, payload) = (exception.vector.0, exception.payload.take());
        match (vector, payload) {
            (14, Some(address)) => self.b.set_cr2(address),
            (1, Some(bits)) => {
                let mut regs = self.debug_regs();
                let [.., dr6, _] = &mut regs;
                *dr6 = Dr6::new(*dr6).after_db(bits).bits();
                self.rare.debug.set_regs(&mut self.b, regs);
            }
            _ => {}
        }
    }
}
