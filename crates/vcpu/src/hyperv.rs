//! What of Hyper-V's interface is there: what a guest's hypervisor needs that uses an enlightened VMCS. MSRs, hypercalls,
//! of which there is none for L1, and the flush that L2 asks for.
//!
//! All of it lies outside the inner loop but for reads and calls that only answer.

use core::sync::atomic::Ordering::Relaxed;

use backend::{Backend, Enlightenment, FlushTold, Gprs, Nested, RAX, RCX, RDX, TellFlush};
use cpuid::GuestCpuid;
use mmu::FlushRemote as _;
use msr::By;
use pv::hyperv::{Control, ENABLE, code, page, status};
use vm::vcpus::MAX_VCPUS;
use x86::{Cr0, Exception, apic::reg, msr as number};

use crate::{
    Offered, Vcpu, exits::code::CodeState as _, run::outcome::Outcome, state::msrs::Refused,
};

/// What a vCPU's guest and VMM have set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HyperV {
    /// The VMM has switched the enlightened VMCS on.
    enlightened: bool,
    /// The number of the vCPU, if the VMM has set another than its place in the VM.
    vp_index: Option<u32>,
    /// The MSR of the VP assist page.
    assist: u64,
}

impl Offered {
    /// Whether Hyper-V's MSRs are there for who asks.
    fn has_hyperv_msrs(&self, cpuid: &GuestCpuid, by: By) -> bool {
        self.msrs.hyperv && (by == By::Vmm || cpuid.hyperv().interface)
    }
}

/// Whether the code at RIP may make hypercalls: in protected mode, at CPL 0.
fn may_call(b: &impl Backend) -> bool {
    b.cpl() == 0 && b.cr0().contains(Cr0::PE)
}

/// The control word of a hypercall that the code at RIP makes.
fn control(gprs: &Gprs, long: bool) -> Control {
    let [rax, rcx, rdx] = [RAX, RCX, RDX].map(|i| gprs.get(i));
    Control(if long { rcx } else { rdx << 32 | rax & 0xffff_ffff })
}

/// Sets the answer to a hypercall.
fn set_answer(gprs: &mut Gprs, long: bool, answer: u64) {
    if long {
        gprs.0[RAX] = answer;
    } else {
        gprs.0[RAX] = answer & 0xffff_ffff;
        gprs.0[RDX] = answer >> 32;
    }
}

impl<B: Backend> Vcpu<B> {
    /// Whether the guest's hypercalls are Hyper-V's.
    #[inline]
    pub(crate) fn calls_hyperv(&self) -> bool {
        self.cpuid.hyperv().interface && self.vm.settings.hyperv_guest.load(Relaxed) != 0
    }

    /// KVM_CAP_HYPERV_ENLIGHTENED_VMCS: which versions there are.
    pub fn enable_enlightened_vmcs(&mut self) -> u16 {
        self.pv.hyperv.enlightened = true;
        self.follow_enlightenment();
        self.enlightened_versions()
    }

    /// Versions of the enlightened VMCS that the VMM has switched on; 0: none.
    pub fn enlightened_versions(&self) -> u16 {
        if self.pv.hyperv.enlightened { cpuid::ENLIGHTENED_VERSIONS } else { 0 }
    }

    /// The guest's CPUID, its VP assist page or the VMM's choice is another.
    #[cold]
    pub(crate) fn follow_enlightenment(&mut self) {
        let (hyperv, shown) = (self.pv.hyperv, self.cpuid.hyperv());
        if let Some(nested) = self.b.nested_mut() {
            nested.enlighten(Enlightenment {
                enabled: hyperv.enlightened,
                shown: shown.interface,
                direct_flush: shown.direct_flush,
                assist: page(hyperv.assist),
            });
        }
    }

    #[cold]
    pub(crate) fn read_hyperv_msr(&mut self, index: u32, by: By) -> Result<u64, Refused> {
        if !self.rare.offered.has_hyperv_msrs(&self.cpuid, by) {
            return Err(Refused);
        }
        if index == number::HV_TPR {
            // The guest writes CR8 without an exit.
            self.gather_interrupts();
        }
        let settings = &self.vm.settings;
        let apic = |offset| {
            let lapic = &self.shared.lapic;
            let there = self.shared.in_kernel_apic && by == By::Guest;
            if there { Ok(u64::from(lapic.read(offset, || 0))) } else { Err(Refused) }
        };
        Ok(match index {
            number::HV_GUEST_OS_ID => settings.hyperv_guest.load(Relaxed),
            number::HV_HYPERCALL => settings.hyperv_hypercall.load(Relaxed),
            number::HV_VP_INDEX => self.pv.hyperv.vp_index.unwrap_or(self.shared.index).into(),
            number::HV_VP_ASSIST_PAGE => self.pv.hyperv.assist,
            number::HV_EOI => apic(reg::EOI)?,
            number::HV_TPR => apic(reg::TPR)?,
            number::HV_ICR => apic(reg::ICR)? | apic(reg::ICR2)? << 32,
            _ => return Err(Refused),
        })
    }

    #[cold]
    pub(crate) fn write_hyperv_msr(
        &mut self,
        index: u32,
        value: u64,
        by: By,
    ) -> Result<(), Refused> {
        if !self.rare.offered.has_hyperv_msrs(&self.cpuid, by) {
            // A VMM that restores what another host's list named.
            let restored = by == By::Vmm && value == 0;
            return if restored { Ok(()) } else { Err(Refused) };
        }
        match index {
            number::HV_GUEST_OS_ID => {
                self.vm.settings.hyperv_guest.store(value, Relaxed);
                if value == 0 {
                    self.vm.settings.hyperv_hypercall.fetch_and(!ENABLE, Relaxed);
                }
            }
            number::HV_HYPERCALL => self.set_hypercall_page(value)?,
            number::HV_VP_INDEX => {
                let given = u32::try_from(value & 0xffff_ffff).ok();
                let given = given.filter(|n| by == By::Vmm && (*n as usize) < MAX_VCPUS);
                self.pv.hyperv.vp_index = Some(given.ok_or(Refused)?);
            }
            number::HV_VP_ASSIST_PAGE => {
                if let Some(at) = page(value) {
                    // No end of an interrupt is left to it. The rest may be what a VMM has restored.
                    self.mmu.memory.write(at, &[0; 4]).map_err(|_| Refused)?;
                }
                self.pv.hyperv.assist = value;
                self.follow_enlightenment();
            }
            number::HV_EOI | number::HV_ICR | number::HV_TPR if by == By::Guest => {
                self.write_hyperv_apic(index, value)?;
            }
            _ => return Err(Refused),
        }
        Ok(())
    }

    fn set_hypercall_page(&mut self, value: u64) -> Result<(), Refused> {
        if self.vm.settings.hyperv_guest.load(Relaxed) == 0 {
            return Ok(());
        }
        if let Some(at) = page(value) {
            self.mmu.memory.write(at, &code(B::HYPERCALL)).map_err(|_| Refused)?;
        }
        self.vm.settings.hyperv_hypercall.store(value, Relaxed);
        Ok(())
    }

    /// A register of the local APIC by its other name.
    fn write_hyperv_apic(&mut self, index: u32, value: u64) -> Result<(), Refused> {
        if !self.shared.in_kernel_apic {
            return Err(Refused);
        }
        let (low, high) = (value as u32, (value >> 32) as u32);
        let offset = match index {
            number::HV_EOI => reg::EOI,
            number::HV_TPR => reg::TPR,
            _ => reg::ICR,
        };
        self.gather_interrupts();
        let effect = if self.shared.lapic.mode() == irqchip::lapic::LapicMode::X2Apic {
            // The ICR is one register there.
            self.shared.lapic.write_x2(number::x2apic(offset), value).map_err(|_| Refused)?
        } else {
            if offset == reg::ICR {
                let _ = self.shared.lapic.write(reg::ICR2, high);
            }
            self.shared.lapic.write(offset, low)
        };
        self.effect(effect);
        Ok(())
    }

    /// A hypercall of L1's, of which there is none. It needs nothing of the kernel.
    #[cold]
    #[inline(never)]
    pub(crate) fn do_hyperv_call(&mut self) -> Result<(), Exception> {
        if !may_call(&self.b) {
            return Err(Exception::ud());
        }
        let long = self.b.is_64bit_code();
        let answer = control(&self.gprs, long).answer();
        set_answer(&mut self.gprs, long, answer);
        Ok(())
    }

    /// L2 asks to have translations flushed, and L1 has left that to us: those of all vCPUs are, of whichever guest. Outside
    /// the loop.
    #[cold]
    #[inline(never)]
    pub(crate) fn flush_for_l2(&mut self) -> Outcome {
        if !may_call(&self.b) {
            self.raise(Exception::ud());
            return Ok(());
        }
        let next = self.slow_next_rip()?;
        let long = self.b.is_64bit_code();
        let mut answer = control(&self.gprs, long).flushed();
        if answer & 0xffff == status::SUCCESS {
            self.vm.flush_remote();
            if self.tell_flush(TellFlush::Ask) == FlushTold::Nowhere {
                answer = status::INVALID_INPUT;
            }
        }
        set_answer(&mut self.gprs, long, answer);
        self.retire(next);
        if answer & 0xffff == status::SUCCESS
            && let FlushTold::Yes(done) = self.tell_flush(TellFlush::Tell)
        {
            self.go_on_after(done);
        }
        Ok(())
    }
}
