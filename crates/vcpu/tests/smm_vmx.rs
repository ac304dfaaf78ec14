//! System-management mode on Intel: what is pending of a debug exception, and the way back into a guest's guest.

mod rig;

use backend::{Gprs, Nested as _};
use cpu::ModelVmcs;
use gannet_vcpu::UserExit;
use gannet_vcpu::state::registers::GivenEvents;
use host::page::Pages;
use host::std_port::test::set_signal_pending;
use rig::nested_vmx::{Hypervisor, L2_RIP, features, vmcs12};
use rig::vmx::{exit, shutdown};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use x86::vmcs::interruptibility::{MOV_SS, STI};
use x86::vmcs::{ExitReason, field};
use x86::{Cr0, Cr4, Efer, Rflags, segment::attr};

const SMBASE: u64 = 0x3_0000;
const HANDLER: u64 = 0x8000;
/// CR4, CR0 and RIP in the area of a CPU with long mode.
const CR4: usize = 0xff48;
const CR0: usize = 0xff58;
const RIP: usize = 0xff78;
/// B0 and "an enabled breakpoint was met".
const WATCHPOINT: u64 = 0x1001;

struct Machine {
    h: Hypervisor,
    smram: Pages,
}

impl Machine {
    fn new() -> Self {
        Self::of(&vmcs12())
    }

    fn of(v: &nested_vmx::Vmcs12) -> Self {
        let h = Hypervisor::on(features(), v);
        let smram = Pages::zeroed(4).unwrap();
        let region =
            mmu::Region { slot: 0, flags: 0, gpa: SMBASE, size: 16 << 12, hva: smram.hpa().0 };
        let space = h.vm.memory_in(mmu::AddressSpace::Smm);
        space.set_region(&region, &**h.vm).unwrap();
        Self { h, smram }
    }

    /// A word of the save area.
    fn word(&self, at: usize) -> &AtomicU64 {
        &self.smram.words()[at / 8]
    }

    /// Clears bits of a word of the save area, which are set there.
    fn clears(&self, at: usize, bits: u64) {
        assert_eq!(self.word(at).fetch_and(!bits, Relaxed) & bits, bits);
    }

    /// The guest looks, is interrupted, and user space runs.
    fn stops(&mut self, look: impl Fn(&mut ModelVmcs) + Send + 'static) {
        self.h.then(move |vmcs, gprs| {
            exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
            look(vmcs);
            set_signal_pending(true);
        });
        assert_eq!(self.h.run(), UserExit::Intr);
        set_signal_pending(false);
    }

    /// A signal ends the run of a guest that has read a watched word by MOV SS.
    fn stops_behind_mov_ss(&mut self, shadow: u32) {
        self.stops(move |vmcs| {
            vmcs.set(field::GUEST_INTERRUPTIBILITY, shadow);
            vmcs.set(field::GUEST_PENDING_DEBUG, WATCHPOINT);
        });
    }

    /// The next entry has this pending.
    fn goes_on_with(&mut self, pending: u64) {
        self.h.then(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
            assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG), pending);
            shutdown(vmcs, gprs);
        });
        assert_eq!(self.h.run(), UserExit::Shutdown);
    }
}

/// The handler has no IDT: a #DB of the guest's in it would be a triple fault. It comes behind RSM.
#[test]
fn a_watchpoint_behind_mov_ss_waits_for_the_end_of_the_handler() {
    for shadow in [0, MOV_SS] {
        let mut m = Machine::new();
        m.stops_behind_mov_ss(shadow);
        m.h.vcpu.queue_smi();
        m.stops(|vmcs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER);
            assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG), 0);
            // One of the handler's own ends with it.
            vmcs.set(field::GUEST_PENDING_DEBUG, 2 | 1 << 12);
        });
        m.h.then(exit(ExitReason::Rsm));
        m.goes_on_with(WATCHPOINT);
    }
}

/// User space sets other registers: the trap was of the instruction that RIP has left.
#[test]
fn a_watchpoint_goes_with_the_registers() {
    let mut m = Machine::new();
    m.stops_behind_mov_ss(MOV_SS);
    let regs = m.h.vcpu.regs();
    m.h.vcpu.set_regs(&regs);
    m.goes_on_with(0);
}

/// An L2 that is restored has what pends from its state, which comes before the registers.
#[test]
fn a_watchpoint_of_l2s_stays() {
    let mut m = Machine::new();
    m.h.vmlaunch();
    m.stops_behind_mov_ss(0);
    let regs = m.h.vcpu.regs();
    m.h.vcpu.set_regs(&regs);
    m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG), WATCHPOINT));
    // Across the mode as well.
    m.stops_behind_mov_ss(0);
    m.h.vcpu.queue_smi();
    m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG), 0));
    m.h.then(exit(ExitReason::Rsm));
    m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_PENDING_DEBUG), WATCHPOINT));
}

/// Without CR4.VMXE no CPU is in VMX operation: RSM that would enter L2 so is a shutdown, and L1's.
#[test]
fn rsm_into_l2_without_vmxe_is_a_shutdown() {
    for vmxe in [true, false] {
        let mut m = Machine::new();
        m.h.vmlaunch();
        m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP));
        m.h.vcpu.queue_smi();
        m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER));
        if vmxe {
            m.h.then(exit(ExitReason::Rsm));
            m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), L2_RIP));
            continue;
        }
        m.clears(CR4, Cr4::VMXE.bits());
        m.h.then(exit(ExitReason::Rsm));
        assert_eq!(m.h.run(), UserExit::Shutdown);
        assert_eq!(m.h.vcpu.backend().cpu().inner().vmx.steps_left(), 0);
    }
}

/// In a shadow a guest that steps has the step pending: an entry without it is refused. User space sets both, and the mode.
#[test]
fn a_step_stays_pending_where_user_space_changes_the_mode() {
    let mut m = Machine::new();
    let mut regs = m.h.vcpu.regs();
    regs.rflags = Rflags::FIXED | Rflags::TF;
    m.h.vcpu.set_regs(&regs);
    let mut events = m.h.vcpu.saved_events();
    (events.interrupt_shadow, events.smi.smm) = (true, true);
    let given = GivenEvents { interrupt_shadow: true, ..GivenEvents::default() };
    m.h.vcpu.restore_events(&events, given);
    m.h.vcpu.restore_smi(&events.smi);
    m.goes_on_with(1 << 14);
}

/// Nor is L1 in VMX operation without CR4.VMXE, or with what else that does not allow.
#[test]
fn rsm_into_vmx_operation_without_vmxe_is_a_shutdown() {
    for (at, bit, goes_on) in
        [(CR4, 0, true), (CR4, Cr4::VMXE.bits(), false), (CR0, Cr0::NE.bits(), false)]
    {
        let mut m = Machine::new();
        m.stops(|_| {});
        let on = m.h.vcpu.regs().rip;
        m.h.vcpu.queue_smi();
        m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER));
        m.clears(at, bit);
        m.h.then(exit(ExitReason::Rsm));
        if goes_on {
            m.stops(move |vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), on));
        } else {
            assert_eq!(m.h.run(), UserExit::Shutdown);
        }
        assert_eq!(m.h.vcpu.backend().cpu().inner().vmx.steps_left(), 0);
        let mut state = vec![0; m.h.vcpu.nested_state_size().unwrap()];
        m.h.vcpu.nested_state(&mut state).unwrap();
        // The address that VMXON was given, or all ones.
        assert_eq!(state[8..16] == [0xff; 8], !goes_on);
    }
}

/// MOV SS holds off NMIs as well, STI does not: RSM goes on in the shadow that there was.
#[test]
fn rsm_goes_on_in_the_shadow_that_the_smi_has_found() {
    for shadow in [0, STI, MOV_SS] {
        let mut m = Machine::new();
        m.stops(move |vmcs| {
            vmcs.set(field::GUEST_RFLAGS, 2 | Rflags::IF.bits());
            vmcs.set(field::GUEST_INTERRUPTIBILITY, shadow);
        });
        m.h.vcpu.queue_smi();
        m.stops(|vmcs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER);
            assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & (STI | MOV_SS), 0);
        });
        m.h.then(exit(ExitReason::Rsm));
        m.stops(move |vmcs| {
            assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY) & (STI | MOV_SS), shadow);
        });
    }
}

/// In the mode another state is given, whose RSM goes on elsewhere: the watchpoint was of an instruction that is gone.
#[test]
fn a_watchpoint_that_is_aside_is_of_its_instruction() {
    let mut m = Machine::new();
    m.stops_behind_mov_ss(0);
    m.h.vcpu.queue_smi();
    m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER));
    m.word(RIP).store(0x5000, Relaxed);
    m.h.then(exit(ExitReason::Rsm));
    m.goes_on_with(0);
}

/// VMX operation is what the mode puts aside, and there is no other within it: CR4.VMXE is reserved, and VMXON not there, with
/// which the guest would be in an operation behind RSM that it has not begun.
#[test]
fn the_handler_comes_to_no_vmx_operation() {
    let mut m = Machine::new();
    m.h.then(exit(ExitReason::Vmxoff));
    m.stops(|_| {});
    m.h.vcpu.queue_smi();
    m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER));
    // MOV to CR4 from RAX.
    m.h.then(|vmcs, gprs| {
        gprs.0[0] = Cr4::VMXE.bits();
        exit(ExitReason::CrAccess)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 4);
    });
    m.stops(|vmcs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), 0x8000_030d);
    });
    assert!(!m.h.vcpu.sregs().cr4.contains(Cr4::VMXE));
    // User space may set it all the same.
    let mut sregs = m.h.vcpu.sregs();
    sregs.cr4 |= Cr4::VMXE;
    let _ = m.h.vcpu.set_sregs(&sregs, None);
    m.h.then(exit(ExitReason::Vmxon));
    m.stops(|vmcs| assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), 0x8000_0306));
}

/// A VMM ends VMX operation by the registers that it sets, as at a reset: RSM goes on, and in no VMX operation.
#[test]
fn vmx_operation_that_the_vmm_has_ended_is_not_put_aside() {
    let mut m = Machine::new();
    let mut sregs = m.h.vcpu.sregs();
    sregs.cr4 -= Cr4::VMXE;
    m.h.vcpu.set_sregs(&sregs, None).unwrap();
    m.stops(|_| {});
    let on = m.h.vcpu.regs().rip;
    m.h.vcpu.queue_smi();
    m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER));
    m.h.then(exit(ExitReason::Rsm));
    m.stops(move |vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), on));
}

/// The save area of a CPU without long mode has no place for L2, nor for EFER. VMX needs neither: what is put aside waits for
/// RSM, whose registers are L2's.
#[test]
fn without_long_mode_vmx_operation_is_put_aside_too() {
    for in_l2 in [false, true] {
        // Both page with 32 bits, and L2 has no-execute pages.
        let mut v = vmcs12();
        v.set(field::ENTRY_CONTROLS, v.get(field::ENTRY_CONTROLS) & !(1 << 9) | 1 << 15);
        v.set(field::EXIT_CONTROLS, v.get(field::EXIT_CONTROLS) & !(1 << 21 | 1 << 9));
        v.set(field::GUEST_CR4, v.get(field::GUEST_CR4) & !Cr4::PAE.bits());
        v.set(field::HOST_CR4, v.get(field::HOST_CR4) & !Cr4::PAE.bits());
        v.set(field::GUEST_CS_RIGHTS, 0xc09b);
        v.set(field::GUEST_EFER, Efer::NXE.bits());
        let mut m = Machine::of(&v);
        let mut cpuid = m.h.vcpu.cpuid_entries().to_vec();
        for entry in cpuid.iter_mut().filter(|entry| entry.leaf == 0x8000_0001) {
            entry.edx &= !(1 << 29);
        }
        m.h.vcpu.set_cpuid(&cpuid).unwrap();
        let mut sregs = m.h.vcpu.sregs();
        sregs.efer = Efer::empty();
        sregs.cr4 -= Cr4::PAE;
        let code = &mut sregs.cs;
        code.attr = code.attr & !attr::L | attr::DB;
        m.h.vcpu.set_sregs(&sregs, None).unwrap();
        if in_l2 {
            m.h.vmlaunch();
        }
        m.stops(move |vmcs| assert_eq!(vmcs.get(field::GUEST_RIP) == L2_RIP, in_l2));
        let on = m.h.vcpu.regs().rip;
        m.h.vcpu.queue_smi();
        m.stops(|vmcs| assert_eq!(vmcs.get(field::GUEST_RIP), HANDLER));
        let mut state = vec![0; m.h.vcpu.nested_state_size().unwrap()];
        m.h.vcpu.nested_state(&mut state).unwrap();
        // `struct kvm_vmx_nested_state_hdr`: the address of VMXON, and the flags of SMM.
        assert_ne!(state[8..16], [0xff; 8]);
        let flags = u16::from_le_bytes(state[24..26].try_into().unwrap());
        assert_eq!(flags, if in_l2 { 3 } else { 2 });
        m.h.then(exit(ExitReason::Rsm));
        m.stops(move |vmcs| {
            assert_eq!(vmcs.get(field::GUEST_RIP), on);
            assert_eq!(vmcs.get(field::GUEST_EFER) & Efer::NXE.bits() != 0, in_l2);
        });
        assert_eq!(m.h.vcpu.backend().level() == backend::Level::L2, in_l2);
    }
}
