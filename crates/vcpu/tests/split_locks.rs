//! A guest's split lock on a host that detects them: the host's fault, not the guest's.

mod rig;

use cpu::ModelVmcs;
use gannet_vcpu::{RunInput, UserExit};
use host::std_port::test::set_split_locks;
use rig::vmx::{VmxVcpu, exit, shutdown, vcpu};
use x86::vmcs::{ExitReason, event, field};

const AC: u32 = 17;

fn alignment_check(v: &mut VmxVcpu) {
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        exit(ExitReason::ExceptionOrNmi)(vmcs, gprs);
        let info = event::VALID | event::EXCEPTION | event::ERROR_VALID | AC;
        vmcs.set(field::EXIT_INTERRUPTION, info);
        vmcs.set(field::EXIT_ERROR_CODE, 0);
    });
}

fn injects(wanted: bool) -> impl FnMut(&mut ModelVmcs, &mut backend::Gprs) + Send + 'static {
    move |vmcs, gprs| {
        let info = vmcs.get(field::ENTRY_INTERRUPTION);
        let injected = info & event::VALID != 0 && info & event::VECTOR == AC;
        assert_eq!(injected, wanted, "{info:#x}");
        shutdown(vmcs, gprs);
    }
}

fn outcome(detects: Option<bool>, injected: bool, prepare: impl FnOnce(&mut VmxVcpu)) -> UserExit {
    set_split_locks(detects);
    let mut v = vcpu();
    prepare(&mut v);
    alignment_check(&mut v);
    v.backend().cpu().inner().vmx.then(injects(injected));
    let exit = v.run(&RunInput::default());
    set_split_locks(None);
    exit
}

#[test]
fn where_nothing_is_detected_the_fault_is_the_guests() {
    assert_eq!(outcome(None, true, |_| ()), UserExit::Shutdown);
}

#[test]
fn a_split_lock_is_done_again_when_the_kernel_has_warned() {
    assert_eq!(outcome(Some(true), false, |_| ()), UserExit::Shutdown);
}

#[test]
fn a_split_lock_that_the_kernel_does_not_allow_is_the_vmms() {
    let fatal = UserExit::Exception { vector: AC, error_code: 0 };
    assert_eq!(outcome(Some(false), false, |_| ()), fatal);
}

#[test]
fn a_guest_program_that_asked_for_it_gets_its_alignment_check() {
    let asks = |v: &mut VmxVcpu| {
        let mut sregs = v.sregs();
        sregs.cr0 |= x86::Cr0::AM | x86::Cr0::PE;
        sregs.ss.attr |= 3 << 5;
        sregs.cs.attr |= 3 << 5;
        v.set_sregs(&sregs, None).unwrap();
        let mut regs = v.regs();
        regs.rflags |= x86::Rflags::AC;
        v.set_regs(&regs);
    };
    assert_eq!(outcome(Some(false), true, asks), UserExit::Shutdown);
}
