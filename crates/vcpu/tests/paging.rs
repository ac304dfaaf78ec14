//! What a change of the guest's paging costs, counted on the model CPU.

mod rig;

use backend::{Gprs, RCX, RDX};
use cpu::Op;
use gannet_vcpu::{RunInput, UserExit};
use rig::{Machine, assert_only_vmrun, cost_of, cost_with, exit, shutdown, vcpu};
use vm::vm::Paging;
use x86::vmcb::{ExitCode, Vmcb};

/// The guest flips a bit of CR0, of CR4 or of EFER.
const TOGGLES: [(ExitCode, u64); 4] = [
    (ExitCode::WriteCr0, 1 << 16),
    (ExitCode::WriteCr4, 1 << 7),
    (ExitCode::WriteCr4, 1 << 20),
    (ExitCode::Msr, 1 << 11),
];

fn toggle(code: ExitCode, bit: u64, vmcb: &mut Vmcb, gprs: &mut Gprs) {
    const EFER: u64 = 0xc000_0080;
    exit(code)(vmcb, gprs);
    vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
    match code {
        ExitCode::WriteCr0 => gprs.0[RDX] = vmcb.save.cr0 ^ bit,
        ExitCode::WriteCr4 => gprs.0[RDX] = vmcb.save.cr4 ^ bit,
        _ => {
            vmcb.control.exit_info_1 = 1;
            (gprs.0[RCX], gprs.0[RDX]) = (EFER, 0);
            vmcb.save.rax = (vmcb.save.efer & !(1 << 12)) ^ bit;
        }
    }
}

#[test]
fn a_change_of_the_paging_mode_is_one_vmrun_and_keeps_the_root() {
    for (code, bit) in TOGGLES {
        assert_only_vmrun(&cost_of(move |vmcb, gprs| {
            assert_ne!(vmcb.control.nested_cr3, 0);
            toggle(code, bit, vmcb, gprs);
        }));
    }
}

#[test]
fn without_kept_roots_a_change_of_the_paging_mode_leaves_the_loop() {
    let machine =
        Machine { paging: Paging { keep_roots: false, ..Paging::default() }, ..Machine::default() };
    for (code, bit) in TOGGLES {
        let ten = cost_with(&machine, move |vmcb, gprs| {
            // CR0 and CR4 are seen even where the CPU could give them to the guest.
            assert_ne!(vmcb.control.intercepts[3] & (1 << 5), 0);
            assert_ne!(vmcb.control.intercepts[0] & (1 << 20), 0);
            toggle(code, bit, vmcb, gprs);
        });
        assert_eq!((ten.of(Op::Vmload), ten.of(Op::Clgi)), (20, 10), "{code:?} {bit:#x}");
    }
}

#[test]
fn a_flush_that_the_guest_asks_for_is_done_by_the_very_next_entry() {
    let mut v = vcpu();
    v.backend().cpu().inner().then(|vmcb, gprs| toggle(ExitCode::WriteCr4, 1 << 7, vmcb, gprs));
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_eq!(vmcb.control.tlb_ctl, 3);
        toggle(ExitCode::WriteCr4, 1 << 21, vmcb, gprs);
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        // SMAP asks for none.
        assert_eq!(vmcb.control.tlb_ctl, 0);
        shutdown(vmcb, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}
