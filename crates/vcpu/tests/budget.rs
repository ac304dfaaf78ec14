//! Operation budgets of the exit path: what one exit of each kind may execute, counted on the
//! model CPU. A budget that has to grow is a decision to be argued for.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use backend::{Gprs, RCX, RDX};
use cpu::Op;
use gannet_vcpu::{By, RunInput, UserExit};
use host::page::Page;
use mmu::Region;
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
    v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
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

/// VMSAVE would put what is in the CPU over a value that is set in the block, and what the block says is of long ago.
#[test]
fn what_the_cpu_alone_has_in_the_loop_is_accessed_outside_of_it() {
    let sysenter = 0x174..=0x176;
    for index in sysenter.chain(0xc000_0081..=0xc000_0084).chain(0xc000_0100..=0xc000_0102) {
        for write in [false, true] {
            let ten = cost_of(move |vmcb, gprs| {
                (gprs.0[RCX], gprs.0[RDX], vmcb.save.rax) = (index, 0, 0);
                exit(ExitCode::Msr)(vmcb, gprs);
                vmcb.control.exit_info_1 = write.into();
            });
            assert_eq!((ten.of(Op::Stgi), ten.of(Op::Vmsave)), (10, 10), "{index:#x} {write}");
        }
    }
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

fn wrmsr(msr: u64, value: u64) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Sync + Clone + 'static {
    move |vmcb, gprs| {
        (gprs.0[RCX], gprs.0[RDX]) = (msr, value >> 32);
        vmcb.save.rax = value & 0xffff_ffff;
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1;
    }
}

#[test]
fn role_changes_are_one_vmrun() {
    const NXE: u64 = 1 << 11;
    const EFER: u64 = 0xc000_0080;
    assert_only_vmrun(&cost_of(|vmcb, gprs| {
        let efer = vmcb.save.efer & !(1 << 12);
        wrmsr(EFER, efer ^ NXE)(vmcb, gprs);
    }));
    // CR0.WP, CR4.PSE, CR4.PGE, CR4.SMEP.
    for (code, cr4, bit) in [
        (ExitCode::Cr0SelWrite, false, 1 << 16),
        (ExitCode::WriteCr4, true, 1 << 4),
        (ExitCode::WriteCr4, true, 1 << 7),
        (ExitCode::WriteCr4, true, 1 << 20),
    ] {
        assert_only_vmrun(&cost_of(move |vmcb, gprs| {
            let old = if cr4 { vmcb.save.cr4 } else { vmcb.save.cr0 };
            gprs.0[RDX] = old ^ bit;
            exit(code)(vmcb, gprs);
            vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
        }));
    }
}

fn xsetbv(vmcb: &mut Vmcb, gprs: &mut Gprs, value: u64) {
    (gprs.0[RCX], gprs.0[RDX]) = (0, 0);
    vmcb.save.rax = value;
    exit(ExitCode::Xsetbv)(vmcb, gprs);
}

#[test]
fn xsetbv_is_one_xsetbv_of_the_host_and_only_for_another_value_that_is_seen() {
    // Without CR4.OSXSAVE the guest cannot look at XCR0, and it is not loaded.
    assert_only_vmrun(&cost_of(|vmcb, gprs| xsetbv(vmcb, gprs, 7)));
    for (values, expected) in [([7, 7], 0), ([3, 7], 10)] {
        let mut v = vcpu();
        let mut sregs = v.sregs();
        sregs.cr4 |= x86::Cr4::OSXSAVE;
        v.set_sregs(&sregs, None).unwrap();
        v.set_xcr0(7).unwrap();
        for value in values.into_iter().cycle().take(10) {
            v.backend().cpu().inner().then(move |vmcb, gprs| xsetbv(vmcb, gprs, value));
        }
        v.backend().cpu().inner().then(shutdown);
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        let all = v.backend().cpu().counts().since(&before);
        assert_eq!(all.of(Op::Xsetbv), expected, "{values:?}");
        assert_eq!((all.of(Op::Vmrun), all.of(Op::Vmload), all.of(Op::Cpuid)), (11, 2, 0));
        assert_eq!((all.of(Op::Rdmsr), all.of(Op::Wrmsr)), (0, 0));
    }
}

#[test]
fn debug_registers_are_loaded_once_and_then_the_guests() {
    let mut v = vcpu();
    v.backend().cpu().inner().then(exit(ExitCode(0x27))).then(|vmcb, gprs| {
        assert_eq!(vmcb.control.intercepts[1], 0, "no access exits any more");
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(shutdown);
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let all = v.backend().cpu().counts().since(&before);
    // DR0 to DR3 and DR7 in; DR0 to DR3 out when the loop is left.
    assert_eq!((all.of(Op::DebugReg), all.of(Op::Vmrun), all.of(Op::Vmload)), (9, 3, 2));
}

#[test]
fn what_the_guest_does_not_have_is_a_fault_in_one_vmrun() {
    for code in [ExitCode::Rdpmc, ExitCode::Vmrun, ExitCode::Vmload] {
        let mut v = vcpu();
        // A guest that dies of it: three faults without a handler are the model's business, so
        // each is delivered.
        for _ in 0..10 {
            v.backend().cpu().inner().then(exit(code));
        }
        v.backend().cpu().inner().then(shutdown);
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        let all = v.backend().cpu().counts().since(&before);
        assert_eq!((all.of(Op::Vmrun), all.of(Op::Vmload), all.of(Op::Stgi)), (11, 2, 1));
    }
}

/// A page of guest memory at `gpa` that the TDP tables have: the flag of PV EOI.
fn flag_page(v: &mut rig::TestVcpu, vm: &vm::VmRef, gpa: u64) -> &'static Page {
    let page: &'static Page = Box::leak(Box::new(Page::zeroed().unwrap()));
    let region = Region { slot: 0, flags: 0, gpa, size: 4096, hva: page.hpa().0 };
    vm.memory().set_region(&region, &***vm).unwrap();
    let touch = move |vmcb: &mut Vmcb, _: &mut Gprs| {
        vmcb.control.exit_code = ExitCode::Npf.0;
        vmcb.control.exit_info_1 = (1 << 32) | 2;
        vmcb.control.exit_info_2 = gpa;
    };
    v.backend().cpu().inner().then(touch).then(|vmcb, _| vmcb.control.exit_code = 0x3ff);
    assert!(matches!(v.run(&RunInput::default()), UserExit::InternalError { .. }));
    page
}

#[test]
fn an_interrupt_that_is_ended_by_a_flag_in_memory_needs_no_exit_and_leaves_the_loop_for_none() {
    const PV_EOI: u32 = 0x4b56_4d04;
    const FLAG: u64 = 0x6000;
    const SELF_IPI: u64 = 0x83f;
    let machine = rig::Machine::default();
    let vm = rig::vm(&machine);
    let mut v = rig::add_vcpu(&machine, &vm, 0);
    let page = flag_page(&mut v, &vm, FLAG);
    v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    v.write_msr(PV_EOI, FLAG | 1, By::Vmm).unwrap();
    let flag = || page.bytes()[0].load(Relaxed);
    let before = v.backend().cpu().counts();
    for turn in 0..10 {
        v.backend().cpu().inner().then(wrmsr(SELF_IPI, 0x40)).then(move |vmcb, gprs| {
            assert_ne!(vmcb.control.int_ctl & (1 << 8), 0, "the offer, turn {turn}");
            assert_eq!(page.bytes()[0].load(Relaxed), 1, "its end by the flag, turn {turn}");
            // The guest takes it, ends it, and writes an MSR of the local APIC.
            vmcb.control.int_ctl &= !(1 << 8);
            page.bytes()[0].store(0, Relaxed);
            wrmsr(0x808, 0)(vmcb, gprs);
        });
    }
    v.backend().cpu().inner().then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!((v.shared().lapic.in_service(), flag()), (None, 0));
    let all = v.backend().cpu().counts().since(&before);
    assert_eq!((all.of(Op::Vmrun), all.of(Op::Vmload), all.of(Op::Stgi)), (21, 2, 1));
}

#[test]
fn a_flag_that_the_guest_left_alone_ends_nothing() {
    const PV_EOI: u32 = 0x4b56_4d04;
    const FLAG: u64 = 0x6000;
    let machine = rig::Machine::default();
    let vm = rig::vm(&machine);
    let mut v = rig::add_vcpu(&machine, &vm, 0);
    let page = flag_page(&mut v, &vm, FLAG);
    v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    v.write_msr(PV_EOI, FLAG | 1, By::Vmm).unwrap();
    v.backend().cpu().inner().then(wrmsr(0x83f, 0x40)).then(|vmcb, gprs| {
        vmcb.control.int_ctl &= !(1 << 8);
        // Reads an MSR of the local APIC in the handler, before the end.
        gprs.0[RCX] = 0x808;
        exit(ExitCode::Msr)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        // Withdrawn: the guest has to write its EOI register.
        assert_eq!(page.bytes()[0].load(Relaxed), 0);
        wrmsr(0x80b, 0)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(|vmcb, _| vmcb.control.exit_code = 0x3ff);
    assert!(matches!(v.run(&RunInput::default()), UserExit::InternalError { .. }));
    assert_eq!(v.shared().lapic.in_service(), None);
}
