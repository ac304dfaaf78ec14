//! Operation budgets of the exit path: what one exit of each kind may execute, counted on the
//! model CPU. A budget that has to grow is a decision to be argued for.

mod rig;

use backend::{Gprs, RCX, RDX};
use cpu::Op;
use gannet_vcpu::{RunInput, UserExit};
use rig::{assert_only_vmrun, cost_of, exit, shutdown, vcpu};
use x86::vmcb::{ExitCode, Vmcb};

#[test]
fn a_cpuid_exit_is_one_vmrun() {
    let ten = cost_of(|vmcb, gprs| {
        gprs.0[RCX] = 0;
        vmcb.save.rax = 0x8000_0008;
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    assert_only_vmrun(&ten);
    assert_eq!(ten.of(Op::Rdtsc), 0);
}

#[test]
fn rdmsr_and_wrmsr_exits_are_one_vmrun() {
    const MTRR_CAP: u64 = 0xfe;
    let read = cost_of(|vmcb, gprs| {
        gprs.0[RCX] = MTRR_CAP;
        exit(ExitCode::Msr)(vmcb, gprs);
    });
    assert_only_vmrun(&read);
    const MTRR_PHYS_BASE0: u64 = 0x200;
    let write = cost_of(|vmcb, gprs| {
        (gprs.0[RCX], gprs.0[RDX]) = (MTRR_PHYS_BASE0, 0);
        vmcb.save.rax = 6;
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1;
    });
    assert_only_vmrun(&write);
}

#[test]
fn hypercalls_and_cache_flushes_are_one_vmrun() {
    assert_only_vmrun(&cost_of(|vmcb, gprs| {
        vmcb.save.rax = 9999;
        exit(ExitCode::Vmmcall)(vmcb, gprs);
    }));
    assert_only_vmrun(&cost_of(|vmcb, gprs| exit(ExitCode::Wbinvd)(vmcb, gprs)));
}

#[test]
fn a_control_register_exit_is_one_vmrun() {
    // CR4 is intercepted while OSXSAVE is clear.
    assert_only_vmrun(&cost_of(|vmcb, gprs| {
        gprs.0[RDX] = vmcb.save.cr4 ^ (1 << 4);
        exit(ExitCode::WriteCr4)(vmcb, gprs);
        vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
    }));
}

#[test]
fn a_deadline_that_has_passed_needs_no_host_timer() {
    let ten = cost_of(|vmcb, gprs| {
        (gprs.0[RCX], gprs.0[RDX]) = (0x6e0, 0);
        vmcb.save.rax = 1;
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1;
    });
    assert_only_vmrun(&ten);
    assert!(ten.of(Op::Rdtsc) <= 10);
}

#[test]
fn a_port_of_the_kernel_costs_the_hosts_segments_and_no_more() {
    // One VMSAVE and VMLOAD to the host and one VMLOAD back, for the handler calls the kernel; the
    // loop is not left, so no STGI, no XSETBV, no MSR.
    const PIC_MASK_PORT: u64 = 0x21;
    let ten = cost_of(|vmcb, gprs| {
        exit(ExitCode::Ioio)(vmcb, gprs);
        vmcb.control.exit_info_1 = (PIC_MASK_PORT << 16) | (1 << 4) | 1;
        vmcb.control.exit_info_2 = vmcb.save.rip + 2;
    });
    assert_eq!((ten.of(Op::Vmload), ten.of(Op::Vmsave)), (20, 10));
    assert_eq!((ten.of(Op::Clgi), ten.of(Op::Stgi)), (0, 0));
    assert_eq!((ten.of(Op::Rdmsr), ten.of(Op::Wrmsr), ten.of(Op::Xsetbv)), (0, 0, 0));
}

#[test]
fn an_interrupt_to_oneself_is_taken_and_ended_in_two_vmruns() {
    const X2APIC_SELF_IPI: u64 = 0x83f;
    const X2APIC_EOI: u64 = 0x80b;
    let mut v = vcpu();
    v.write_msr(0x1b, 0xfee0_0d00, true).unwrap();
    v.write_msr(0x80f, 0x1ff, true).unwrap();
    let wrmsr = |msr: u64, value: u64| {
        move |vmcb: &mut Vmcb, gprs: &mut Gprs| {
            (gprs.0[RCX], gprs.0[RDX]) = (msr, 0);
            vmcb.save.rax = value;
            exit(ExitCode::Msr)(vmcb, gprs);
            vmcb.control.exit_info_1 = 1;
        }
    };
    let before = v.backend().cpu().counts();
    v.backend().cpu().inner().then(wrmsr(X2APIC_SELF_IPI, 0x40));
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        // The offer: V_IRQ with the vector; the guest takes it and ends it.
        assert_ne!(vmcb.control.int_ctl & (1 << 8), 0);
        assert_eq!(vmcb.control.int_vector, 0x40);
        vmcb.control.int_ctl &= !(1 << 8);
        wrmsr(X2APIC_EOI, 0)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_eq!(vmcb.control.int_ctl & (1 << 8), 0);
        shutdown(vmcb, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let all = v.backend().cpu().counts().since(&before);
    assert_eq!((all.of(Op::Vmrun), all.of(Op::Vmload), all.of(Op::Wrmsr)), (3, 2, 0));
    assert_eq!(v.shared().lapic.in_service(), None);
}

#[test]
fn leaving_the_loop_costs_one_save_and_two_loads_and_no_msr() {
    let mut v = vcpu();
    v.backend().cpu().inner().then(exit(ExitCode::Intr)).then(exit(ExitCode::Intr)).then(shutdown);
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let all = v.backend().cpu().counts().since(&before);
    // Three times into the loop and out of it: VMLOAD guest, VMSAVE guest, VMLOAD host; the host
    // is saved once a run.
    assert_eq!(all.of(Op::Vmrun), 3);
    assert_eq!(all.of(Op::Vmload), 6);
    assert_eq!(all.of(Op::Vmsave), 4);
    assert_eq!((all.of(Op::Clgi), all.of(Op::Stgi)), (3, 3));
    assert_eq!((all.of(Op::Rdmsr), all.of(Op::Wrmsr)), (0, 0));
    assert_eq!((all.of(Op::Cpuid), all.of(Op::Xsetbv)), (0, 0));
}

#[test]
fn what_the_guest_reads_is_what_was_set() {
    let mut v = vcpu();
    v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.save.rax = 0x8000_0008;
        exit(ExitCode::Cpuid)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rax & 0xff, 0x30);
        assert_eq!(vmcb.save.rip, 0xfff2);
        shutdown(vmcb, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn an_unknown_msr_raises_a_fault_and_nothing_moves() {
    let mut v = vcpu();
    v.backend().cpu().inner().then(|vmcb, gprs| {
        gprs.0[RCX] = 0x1234_5678;
        exit(ExitCode::Msr)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        // The model has delivered and cleared the event; what counts is that RIP stayed.
        assert_eq!(vmcb.save.rip, 0xfff0);
        shutdown(vmcb, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn a_bad_cr0_is_a_general_protection_fault() {
    for flip in [1 << 31, 1 << 29] {
        let mut v = vcpu();
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            // CD and NW are hidden from the hardware after reset: first they go.
            gprs.0[RDX] = 0x11;
            exit(ExitCode::WriteCr0)(vmcb, gprs);
            vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
        });
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            // PG without PE, NW without CD.
            gprs.0[RDX] = (vmcb.save.cr0 ^ flip) & if flip == 1 << 31 { !1 } else { !0 };
            exit(ExitCode::Cr0SelWrite)(vmcb, gprs);
            vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
        });
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            assert_eq!(vmcb.save.rip, 0xfff2, "bit {flip:#x}");
            assert_eq!(vmcb.save.cr0, 0x11);
            shutdown(vmcb, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    }
}

#[test]
fn exits_are_counted_by_reason_and_by_where_they_were_answered() {
    use stats::Reason;
    let mut v = vcpu();
    for _ in 0..3 {
        v.backend().cpu().inner().then(exit(ExitCode::Cpuid));
    }
    v.backend().cpu().inner().then(exit(ExitCode::Wbinvd));
    v.backend().cpu().inner().then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let stats = &v.shared().stats;
    let counted = |reason| (stats.exits_by(reason), stats.answered_by(reason));
    assert_eq!(counted(Reason::Cpuid), (3, 3));
    assert_eq!(counted(Reason::CacheFlush), (1, 1));
    assert_eq!(counted(Reason::Shutdown), (1, 0));
    assert_eq!(stats.exits(), 5);
    assert_eq!(stats.get(stats::VcpuCount::UserExits), 1);
    assert_eq!(stats.get(stats::VcpuCount::HostStateReload), 1);
}
