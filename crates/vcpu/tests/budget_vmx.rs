//! Operation budgets of the exit path under VMX: VMREADs and VMWRITEs of each kind of exit, its
//! entry included, counted on the model CPU. A budget that has to grow is a decision to be argued
//! for.

mod rig;

use backend::{Gprs, RAX, RBX, RCX, RDX, RSP};
use cpu::{Cpu, Model, ModelVmcs, Op};
use gannet_vcpu::{By, RunInput, UserExit};
use host::std_port::test;
use rig::vmx::{VmxVcpu, cost_of, exit, reads_and_writes, shutdown, vcpu};
use vmx::percpu;
use x86::{
    Cr0, Cr4, Efer,
    vmcs::{ExitReason, ProcControls, event, field},
};

const PAGING: Cr0 = Cr0::PG.union(Cr0::ET).union(Cr0::PE);
/// EFER, and the attributes of CS.
const LONG_MODE: (Efer, u64) = (Efer::LME.union(Efer::LMA), 0xa09b);

fn wrmsr(msr: u64, value: u64) -> impl Fn(&mut ModelVmcs, &mut Gprs) + Send + Sync + Clone {
    move |vmcs, gprs| {
        (gprs.0[RAX], gprs.0[RCX], gprs.0[RDX]) = (value, msr, 0);
        exit(ExitReason::Wrmsr)(vmcs, gprs);
    }
}

#[test]
fn a_cpuid_exit_is_four_reads_and_one_write() {
    // Reason, instruction length, RIP, RFLAGS; RIP.
    let ten = cost_of(|vmcs, gprs| {
        (gprs.0[RAX], gprs.0[RCX]) = (0x8000_0008, 0);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    assert_eq!(reads_and_writes(&ten), (4, 1));
    assert_eq!(ten.of(Op::Rdtsc), 0);
}

#[test]
fn rdmsr_wrmsr_hypercall_and_cache_flush_exits_cost_as_much() {
    const MTRR_CAP: u64 = 0xfe;
    const MTRR_PHYS_BASE0: u64 = 0x200;
    let read = cost_of(|vmcs, gprs| {
        gprs.0[RCX] = MTRR_CAP;
        exit(ExitReason::Rdmsr)(vmcs, gprs);
    });
    assert_eq!(reads_and_writes(&read), (4, 1));
    assert_eq!(reads_and_writes(&cost_of(wrmsr(MTRR_PHYS_BASE0, 6))), (4, 1));
    let flush = cost_of(|vmcs, gprs| exit(ExitReason::Wbinvd)(vmcs, gprs));
    assert_eq!(reads_and_writes(&flush), (4, 1));
    // A hypercall looks at who makes it (SS) and, in long mode, which this guest is not in, at CS.
    let call = cost_of(|vmcs, gprs| {
        gprs.0[RAX] = 9999;
        exit(ExitReason::Vmcall)(vmcs, gprs);
    });
    assert_eq!(reads_and_writes(&call), (5, 1));
}

#[test]
fn a_port_of_the_kernel_reads_the_qualification_more_and_keeps_cr2() {
    const PIC_MASK_PORT: u64 = 0x21;
    let ten = cost_of(|vmcs, gprs| {
        exit(ExitReason::Io)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, (PIC_MASK_PORT << 16) | (1 << 3));
    });
    assert_eq!((ten.of(Op::Vmread), ten.of(Op::Vmwrite)), (50, 10));
    assert_eq!(ten.of(Op::MovCr), 20);
    assert_eq!((ten.of(Op::Rdmsr), ten.of(Op::Wrmsr), ten.of(Op::Xsetbv)), (0, 0, 0));
}

#[test]
fn an_interrupt_to_oneself_is_injected_and_ended_in_two_entries() {
    const X2APIC_SELF_IPI: u64 = 0x83f;
    const X2APIC_EOI: u64 = 0x80b;
    let mut v = vcpu();
    v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
        wrmsr(X2APIC_SELF_IPI, 0x40)(vmcs, gprs);
    });
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), event::VALID | 0x40);
        vmcs.set(field::GUEST_RFLAGS, 2);
        wrmsr(X2APIC_EOI, 0)(vmcs, gprs);
    });
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
        shutdown(vmcs, gprs);
    });
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.shared().lapic.in_service(), None);
    let all = v.backend().cpu().counts().since(&before);
    assert_eq!(all.of(Op::VmxEnter), 3);
    assert_eq!(*v.backend().cpu().inner().vmx.unchanged_writes.borrow(), Vec::<u32>::new());
}

#[test]
fn an_interrupt_that_cannot_be_taken_waits_for_the_window() {
    const X2APIC_SELF_IPI: u64 = 0x83f;
    let mut v = vcpu();
    v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    let window = ProcControls::INTERRUPT_WINDOW.bits();
    v.backend().cpu().inner().vmx.then(wrmsr(X2APIC_SELF_IPI, 0x40));
    v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
        // IF is clear.
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
        assert_ne!(vmcs.get(field::PROC_CONTROLS) & window, 0);
        vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
        exit(ExitReason::InterruptWindow)(vmcs, gprs);
    });
    v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), event::VALID | 0x40);
        assert_eq!(vmcs.get(field::PROC_CONTROLS) & window, 0);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.shared().lapic.in_service().map(|v| v.0), Some(0x40));
}

#[test]
fn leaving_the_loop_reloads_no_vmcs_and_writes_only_what_differs() {
    let mut v = vcpu();
    for _ in 0..2 {
        v.backend().cpu().inner().vmx.then(exit(ExitReason::ExternalInterrupt));
    }
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    for _ in 0..2 {
        v.backend().cpu().inner().vmx.then(exit(ExitReason::ExternalInterrupt));
    }
    v.backend().cpu().inner().vmx.then(shutdown);
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let all = v.backend().cpu().counts().since(&before);
    assert_eq!(all.of(Op::VmxEnter), 3);
    assert_eq!((all.of(Op::Vmptrld), all.of(Op::Vmclear), all.of(Op::Vmwrite)), (0, 0, 0));
    assert_eq!((all.of(Op::Cpuid), all.of(Op::Xsetbv)), (0, 0));
    assert_eq!(*v.backend().cpu().inner().vmx.unchanged_writes.borrow(), Vec::<u32>::new());
}

#[test]
fn the_guests_syscall_msrs_stay_while_the_thread_is_in_the_kernel() {
    const LSTAR: u32 = 0xc000_0082;
    const OUTSIDE: u64 = 0x1234 << 16;
    const STAR: u32 = 0xc000_0081;
    const MASK: u32 = 0xc000_0084;
    let of_host = |msr| Model::default().rdmsr(msr);
    let guest = |syscall| {
        let mut v = vcpu();
        let mut s = v.sregs();
        (s.cr0, s.cr4, s.efer) = (PAGING, Cr4::PAE, LONG_MODE.0 | syscall);
        s.cs.attr = LONG_MODE.1 as u16;
        v.set_sregs(&s, None).unwrap();
        v.write_msr(STAR, of_host(STAR), By::Vmm).unwrap();
        v.write_msr(MASK, of_host(MASK), By::Vmm).unwrap();
        v.write_msr(LSTAR, 0x1234_5678, By::Vmm).unwrap();
        v
    };
    // WRMSRs of two runs that end with a port access: at once, and after five interrupts.
    let writes = |v: &mut VmxVcpu| {
        [0, 5].map(|interrupts| {
            for _ in 0..interrupts {
                v.backend().cpu().inner().vmx.then(exit(ExitReason::ExternalInterrupt));
            }
            v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
                exit(ExitReason::Io)(vmcs, gprs);
                vmcs.set(field::EXIT_QUALIFICATION, OUTSIDE);
            });
            let before = v.backend().cpu().counts();
            assert!(matches!(v.run(&RunInput::default()), UserExit::Io { .. }));
            v.backend().cpu().counts().since(&before).of(Op::Wrmsr)
        })
    };
    let [at_once, after_five] = writes(&mut guest(Efer::empty()));
    assert_eq!(test::user_return_watches(), 0);
    let mut v = guest(Efer::SCE);
    // There and back; and there once, until the kernel calls.
    assert_eq!(writes(&mut v), [at_once + 2, after_five + 1]);
    assert_eq!(test::user_return_watches(), 1);
    assert_eq!(v.backend().cpu().rdmsr(LSTAR), 0x1234_5678);
    percpu::user_return(v.backend().cpu(), host::smp::cpu_id());
    assert_eq!(v.backend().cpu().rdmsr(LSTAR), of_host(LSTAR));
}

/// SWAPGS does not exit. Whoever reads what it left reads the CPU's: the loop is left for that.
#[test]
fn kernel_gs_base_is_read_as_swapgs_left_it() {
    const KERNEL_GS_BASE: u64 = 0xc000_0102;
    const SWAPPED: u64 = 0x7654_3210;
    let mut v = vcpu();
    let mut s = v.sregs();
    (s.cr0, s.cr4, s.efer) = (PAGING, Cr4::PAE, LONG_MODE.0);
    s.cs.attr = LONG_MODE.1 as u16;
    v.set_sregs(&s, None).unwrap();
    let vmx = &mut v.backend().cpu().inner().vmx;
    vmx.guest_swaps_in = Some(SWAPPED);
    vmx.then(|vmcs, gprs| {
        gprs.0[RCX] = KERNEL_GS_BASE;
        exit(ExitReason::Rdmsr)(vmcs, gprs);
    });
    vmx.then(|vmcs, gprs| {
        assert_eq!(gprs.0[RAX], SWAPPED);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn the_stack_pointer_is_there_when_the_loop_was_left_and_goes_back_when_it_is_set() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        vmcs.set(field::GUEST_RSP, 0x7000);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RSP), 0x7000);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let mut regs = v.regs();
    assert_eq!(regs.gpr[RSP], 0x7000);
    regs.gpr[RSP] = 0x8000;
    v.set_regs(&regs);
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_RSP), 0x8000);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn what_the_guest_reads_is_what_was_set() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        gprs.0[RAX] = 0x8000_0008;
        exit(ExitReason::Cpuid)(vmcs, gprs);
    });
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        // With Intel's IBRS and IBPB under AMD's names.
        assert_eq!((gprs.0[RAX] & 0xff, gprs.0[RBX]), (0x30, (1 << 14) | (1 << 12)));
        assert_eq!(vmcs.get(field::GUEST_RIP), 0xfff2);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn an_entry_that_is_refused_tells_why() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(|vmcs, _| {
        vmcs.set(field::EXIT_REASON, (1 << 31) | 33);
    });
    let UserExit::FailEntry { reason, .. } = v.run(&RunInput::default()) else {
        panic!("the entry was not refused");
    };
    assert_eq!(reason, (1 << 31) | 33);
    v.backend().cpu().inner().vmx.refuse = true;
    assert!(matches!(v.run(&RunInput::default()), UserExit::FailEntry { reason: 0, .. }));
}

/// CR4.VMXE is set before VMXON and clear behind VMXOFF only: the model CPU refuses VMPTRLD in between.
#[test]
fn no_instruction_of_vmx_is_executed_where_cr4_vmxe_alone_is_set() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    // As the CPU goes: what is kept of it is shared, and the registers are this vCPU's model's.
    let mut model = Model::default();
    (model.vmx.cr4, model.vmx.on) = (Cr4::VMXE.into(), Some(x86::Hpa(0)).into());
    percpu::disable(&mut model, host::smp::cpu_id());
    v.backend().cpu().inner().vmx.on.set(None);
    assert!(v.backend().cpu().inner().vmx.cr4.get().contains(Cr4::VMXE));
    assert!(matches!(v.run(&RunInput::default()), UserExit::FailEntry { reason: 0, .. }));
}

#[test]
fn cr0_is_read_through_the_shadow_and_the_hardware_keeps_its_fixed_bits() {
    let (efer, cs) = LONG_MODE;
    let mut v = vcpu();
    let mut s = v.sregs();
    (s.cr0, s.cr4, s.efer) = (PAGING, Cr4::PAE, efer);
    s.cs.attr = 0xa9b;
    v.set_sregs(&s, None).unwrap();
    v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_CR0), 0x8000_0031);
        assert_eq!(vmcs.get(field::CR0_SHADOW), 0x8000_0011);
        assert_eq!(vmcs.get(field::GUEST_CR4) & !(1 << 6), 1 << 5 | 1 << 13);
        assert_eq!(vmcs.get(field::GUEST_CS_RIGHTS), cs as u32);
        assert_ne!(vmcs.get(field::ENTRY_CONTROLS) & (1 << 9), 0);
        // The guest sets TS and WP, which are its own.
        vmcs.set(field::GUEST_CR0, 0x8001_0039);
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.sregs().cr0, PAGING | Cr0::WP | Cr0::TS);
}

#[test]
fn a_guest_pays_for_its_spec_ctrl_from_its_first_use_on() {
    const SPEC_CTRL: u64 = 0x48;
    const IBRS: u64 = 1;
    let cpuid = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        (gprs.0[RAX], gprs.0[RCX]) = (0x8000_0008, 0);
        exit(ExitReason::Cpuid)(vmcs, gprs);
    };
    // What the three runs of a guest's loop cost: zero written, IBRS written, and ten exits more.
    let mut v = vcpu();
    let mut run = |first: u64, exits: usize| {
        let vmx = &mut v.backend().cpu().inner().vmx;
        vmx.then(wrmsr(SPEC_CTRL, first));
        for _ in 0..exits {
            vmx.then(cpuid);
        }
        vmx.then(shutdown);
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        let counts = v.backend().cpu().counts().since(&before);
        [Op::Rdmsr, Op::Wrmsr].map(|op| counts.of(op))
    };
    // The first run of all arrives on the CPU.
    run(0, 0);
    let ends = run(0, 0);
    assert_eq!(run(0, 10), ends);
    // The entry after the first write is one of its own.
    run(IBRS, 0);
    let used = run(IBRS, 0);
    // A value that is the host's costs the read alone; another one two writes more.
    let ten = run(IBRS, 10);
    assert_eq!([ten[0] - used[0], ten[1] - used[1]], [10, 20]);
    run(0, 0);
    let one = run(0, 0);
    let ten = run(0, 10);
    assert_eq!([ten[0] - one[0], ten[1] - one[1]], [10, 0]);
}

#[test]
fn what_the_guest_writes_to_spec_ctrl_without_an_exit_is_its_value_from_then_on() {
    const SPEC_CTRL: u32 = 0x48;
    const STIBP: u64 = 2;
    let mut v = vcpu();
    v.write_msr(SPEC_CTRL, 1, By::Vmm).unwrap();
    v.backend().cpu().inner().vmx.then(shutdown);
    v.backend().cpu().inner().vmx.guest_writes_spec_ctrl = Some(STIBP);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.backend().cpu().inner().vmx.spec_ctrl_at_entry, 1);
    // For the VMM, for an exit that reads it, and at the next entry.
    assert_eq!(v.read_msr(SPEC_CTRL, By::Vmm), Ok(STIBP));
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        gprs.0[RCX] = SPEC_CTRL.into();
        exit(ExitReason::Rdmsr)(vmcs, gprs);
    });
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!((gprs.0[RAX], gprs.0[RDX]), (STIBP, 0));
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.backend().cpu().inner().vmx.spec_ctrl_at_entry, STIBP);
    // The VMM's own write is what the guest finds next.
    v.write_msr(SPEC_CTRL, 0, By::Vmm).unwrap();
    v.backend().cpu().inner().vmx.then(shutdown);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.backend().cpu().inner().vmx.spec_ctrl_at_entry, 0);
}
