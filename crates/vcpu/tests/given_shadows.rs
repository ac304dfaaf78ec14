//! Whose a shadow is that user space gives by KVM_SET_VCPU_EVENTS, on Intel.

mod rig;

use backend::{Gprs, ShadowBy};
use cpu::ModelVmcs;
use gannet_vcpu::{
    RunInput, UserExit,
    state::registers::{GivenEvents, SavedEvents},
};
use rig::vmx::{self, VmxVcpu, exit};
use x86::Rflags;
use x86::vmcs::{
    ExitReason, field,
    interruptibility::{MOV_SS, STI},
};

const SHADOW: GivenEvents =
    GivenEvents { interrupt_shadow: true, nmi_pending: false, triple_fault: false };

fn set_flags(v: &mut VmxVcpu, flags: Rflags) {
    let mut regs = v.regs();
    regs.rflags = Rflags::FIXED | flags;
    v.set_regs(&regs);
}

/// The guest is entered in `shadow`, and leaves in `left`.
fn enters_in(v: &mut VmxVcpu, shadow: u32, left: u32) {
    v.backend().cpu().inner().vmx.then(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        assert_eq!(vmcs.get(field::GUEST_INTERRUPTIBILITY), shadow);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
        vmcs.set(field::GUEST_INTERRUPTIBILITY, left);
        host::std_port::test::set_signal_pending(true);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Intr);
    host::std_port::test::set_signal_pending(false);
}

/// KVM_SET_VCPU_EVENTS comes before KVM_SET_REGS, or behind it: no entry takes STI's shadow with interrupts off, and none is
/// made MOV SS's for it.
#[test]
fn a_shadow_of_stis_is_that_whatever_is_set_first() {
    for by in [ShadowBy::Sti, ShadowBy::MovSs] {
        let events =
            SavedEvents { interrupt_shadow: true, shadow_by: by, ..SavedEvents::default() };
        let on = if by == ShadowBy::Sti { STI } else { MOV_SS };
        for flags_first in [false, true] {
            let mut v = vmx::vcpu();
            if flags_first {
                set_flags(&mut v, Rflags::IF);
            }
            v.restore_events(&events, SHADOW);
            assert_eq!(v.saved_events().shadow_by, by);
            // The flag does not name it this time: it stays what it is.
            v.restore_events(&SavedEvents::default(), GivenEvents::default());
            set_flags(&mut v, Rflags::IF);
            assert_eq!(v.saved_events().shadow_by, by);
            enters_in(&mut v, on, 0);
        }
        // Interrupts stay off. What was given is over with the entry: the guest makes its own shadows.
        let mut v = vmx::vcpu();
        v.restore_events(&events, SHADOW);
        enters_in(&mut v, MOV_SS, MOV_SS);
        assert_eq!(v.saved_events().shadow_by, ShadowBy::MovSs);
        set_flags(&mut v, Rflags::IF);
        assert_eq!(v.saved_events().shadow_by, ShadowBy::MovSs);
    }
}
