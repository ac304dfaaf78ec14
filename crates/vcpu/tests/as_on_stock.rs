//! State that a VMM sets and what becomes of it, as on stock KVM: the APIC base without a local APIC in the kernel, an
//! interrupt given twice, NMIs at INIT; and events whose delivery goes wrong.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use ::vm::VmRef;
use ::vm::vcpu_shared::MpState;
use gannet_vcpu::state::registers::{GivenEvents, SavedEvents};
use gannet_vcpu::{By, RunInput, UserExit};
use host::page::{Page, Pages};
use irqchip::lapic::Accepted;
use mmu::Region;
use rig::{Machine, TestVcpu, add_vcpu, exit, shutdown, vcpu, vcpu_of, vm};
use x86::vmcb::{ExitCode, event, vintr};
use x86::{Rflags, Vector};

const APIC_BASE: u32 = 0x1b;

fn without_irqchip() -> TestVcpu {
    vcpu_of(&Machine { irqchip: false, ..Machine::default() })
}

fn run(v: &mut TestVcpu) -> UserExit {
    v.run(&RunInput::default())
}

/// A guest whose memory at `gpa` holds `bytes`.
fn with_memory(machine: &Machine, gpa: u64, bytes: &[u8]) -> (TestVcpu, VmRef) {
    let vm = vm(machine);
    let page = Box::leak(Box::new(Page::zeroed().unwrap()));
    for (to, from) in page.bytes().iter().zip(bytes) {
        to.store(*from, Relaxed);
    }
    let region = Region { slot: 0, flags: 0, gpa, size: 4096, hva: page.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    (add_vcpu(machine, &vm, 0), vm)
}

#[test]
fn the_apic_base_of_a_vmms_own_apic_is_kept_and_shown() {
    let mut v = without_irqchip();
    let has_apic = |v: &mut TestVcpu| {
        let leaf = v.cpuid_entries().iter().find(|entry| entry.leaf == 1).copied().unwrap();
        leaf.edx & 1 << 9 != 0
    };
    assert!(has_apic(&mut v));
    let mut s = v.sregs();
    s.apic_base = 0xfed0_0000;
    v.set_sregs(&s, None).unwrap();
    assert_eq!((v.sregs().apic_base, v.run_output().apic_base), (0xfed0_0000, 0xfed0_0000));
    assert!(!has_apic(&mut v));
    // What is reserved is refused, and so is to the guest the way from disabled to x2APIC.
    s.apic_base = 0xfee0_0801;
    assert!(v.set_sregs(&s, None).is_err());
    assert!(v.write_msr(APIC_BASE, 0xfee0_0c00, By::Guest).is_err());
    v.write_msr(APIC_BASE, 0xfee0_0900, By::Guest).unwrap();
    assert_eq!(v.read_msr(APIC_BASE, By::Guest), Ok(0xfee0_0900));
    assert!(has_apic(&mut v));
}

/// What is delivered at the next entry: V_IRQ is taken, EVENTINJ is gone.
fn expect(v: &mut TestVcpu, offered: Option<u8>, injected: u64) {
    v.backend().cpu().inner().injects(injected);
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        let virq = vmcb.control.int_ctl & vintr::IRQ != 0;
        assert_eq!(virq.then_some(vmcb.control.int_vector as u8), offered);
        vmcb.control.int_ctl &= !vintr::IRQ;
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(run(v), UserExit::Hlt);
}

#[test]
fn an_interrupt_that_is_read_and_set_again_comes_once() {
    let mut v = without_irqchip();
    v.queue_interrupt(Vector(0x31)).unwrap();
    let (s, interrupt) = (v.sregs(), v.interrupt_in_injection());
    assert_eq!(interrupt, Some(Vector(0x31)));
    v.set_sregs(&s, interrupt).unwrap();
    expect(&mut v, Some(0x31), 0);
    expect(&mut v, None, 0);
    // Another one takes its place.
    v.queue_interrupt(Vector(0x31)).unwrap();
    v.set_sregs(&s, Some(Vector(0x32))).unwrap();
    assert_eq!(v.interrupt_in_injection(), Some(Vector(0x32)));
    // Nor is it forced in: RFLAGS.IF is clear.
    expect(&mut v, Some(0x32), 0);
    expect(&mut v, None, 0);
}

/// KVM_GET_VCPU_EVENTS tells of an interrupt that waits as of one that is injected. Given back, it waits; on another vCPU, where the guest
/// takes none.
#[test]
fn an_interrupt_that_waits_is_not_forced_in_by_getting_and_setting_events() {
    for (open, other) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut v = without_irqchip();
        v.queue_interrupt(Vector(0x31)).unwrap();
        let events = v.saved_events();
        assert_eq!(events.interrupt, Some(Vector(0x31)));
        let mut regs = v.regs();
        regs.rflags = if open { Rflags::FIXED | Rflags::IF } else { Rflags::FIXED };
        if other {
            v = without_irqchip();
        }
        v.set_regs(&regs);
        v.restore_events(&events, GivenEvents::default());
        let (offered, injected) =
            if open && other { (None, event::VALID | 0x31) } else { (Some(0x31), 0) };
        expect(&mut v, offered, injected);
        expect(&mut v, None, 0);
    }
}

/// An interrupt waits while an exception or an NMI is delivered again: both are told of, and neither is lost.
#[test]
fn an_interrupt_that_waits_beside_an_event_is_kept_with_it() {
    let ud = SavedEvents {
        exception: Some(x86::Exception::ud()),
        exception_injected: true,
        ..SavedEvents::default()
    };
    let nmi = SavedEvents { nmi_injected: true, ..SavedEvents::default() };
    let cases = [(ud, event::VALID | event::EXCEPTION | 6), (nmi, event::VALID | event::NMI | 2)];
    for (events, injected) in cases {
        let mut v = without_irqchip();
        let both = SavedEvents { interrupt: Some(Vector(0x31)), ..events };
        v.restore_events(&both, GivenEvents::default());
        let told = v.saved_events();
        assert_eq!((told.interrupt, told.nmi_injected), (both.interrupt, both.nmi_injected));
        assert_eq!(told.exception_injected, both.exception_injected);
        v.backend().cpu().inner().injects(injected);
        v.backend().cpu().inner().then(exit(ExitCode::Hlt));
        assert_eq!(run(&mut v), UserExit::Hlt);
        assert_eq!(v.saved_events().interrupt, Some(Vector(0x31)));
    }
}

#[test]
fn a_second_interrupt_of_the_vmms_takes_the_place_of_the_first() {
    let mut v = without_irqchip();
    let s = v.sregs();
    v.queue_interrupt(Vector(0x31)).unwrap();
    v.queue_interrupt(Vector(0x32)).unwrap();
    expect(&mut v, Some(0x32), 0);
    expect(&mut v, None, 0);
    // And of one whose delivery was interrupted.
    v.set_sregs(&s, Some(Vector(0x33))).unwrap();
    v.queue_interrupt(Vector(0x34)).unwrap();
    expect(&mut v, Some(0x34), 0);
    expect(&mut v, None, 0);
}

/// INT n was under way where the guest was saved, or its debugger gives a breakpoint back: RIP is at the instruction, and the handler
/// returns behind it.
#[test]
fn what_an_instruction_has_made_returns_behind_it() {
    let int = SavedEvents {
        interrupt: Some(Vector(0x80)),
        interrupt_soft: true,
        ..SavedEvents::default()
    };
    let breakpoint = SavedEvents {
        exception: Some(x86::Exception { vector: Vector(3), ..x86::Exception::ud() }),
        exception_injected: true,
        ..SavedEvents::default()
    };
    let of = |kind: u64, vector: u64| event::VALID | kind | vector;
    for (events, injected, len) in
        [(int, of(event::SOFT, 0x80), 2), (breakpoint, of(event::EXCEPTION, 3), 1)]
    {
        let mut v = vcpu();
        let rip = v.regs().rip;
        v.restore_events(&events, GivenEvents::default());
        v.backend().cpu().inner().injects(injected);
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            assert_eq!((vmcb.save.rip, vmcb.control.next_rip), (rip, rip + len));
            shutdown(vmcb, gprs);
        });
        assert_eq!(run(&mut v), UserExit::Shutdown);
    }
}

#[test]
fn no_exception_pushes_an_error_code_in_real_mode() {
    const GP: u64 = event::VALID | event::EXCEPTION | 13;
    for (protected, injected) in [(false, GP), (true, GP | event::ERROR_VALID)] {
        let mut v = vcpu();
        let mut s = v.sregs();
        s.cr0.set(x86::Cr0::PE, protected);
        v.set_sregs(&s, None).unwrap();
        v.backend().cpu().inner().then(exit(ExitCode::Rdpmc));
        v.backend().cpu().inner().injects(injected).then(shutdown);
        assert_eq!(run(&mut v), UserExit::Shutdown);
    }
}

#[test]
fn init_drops_nmis() {
    let mut v = vcpu();
    v.queue_nmi();
    v.shared().deliver(Accepted::Init);
    assert_eq!(v.mp_state(), MpState::Runnable);
    assert_eq!(v.saved_events().nmi_pending, 0);
}

#[test]
fn a_shutdown_that_loses_the_control_block_is_an_init() {
    const SPURIOUS: u32 = 0x80f;
    let mut v = vcpu();
    v.write_msr(APIC_BASE, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(SPURIOUS, 0x1ff, By::Vmm).unwrap();
    let shared = v.shared().clone();
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        shared.add_nmi();
        shutdown(vmcb, gprs);
    });
    assert_eq!(run(&mut v), UserExit::Shutdown);
    assert_eq!((v.saved_events().nmi_pending, v.read_msr(SPURIOUS, By::Vmm)), (0, Ok(0xff)));
}

#[test]
fn a_delivery_that_meets_a_device_is_no_instruction() {
    const DEVICE: u64 = 0xd000_0000;
    // mov [bx], eax: it is not what accesses the device.
    let (mut v, _vm) = with_memory(&Machine::default(), 0xf000, &[0x89, 0x03]);
    v.backend().cpu().inner().then(|vmcb, _| {
        vmcb.save.rip = 0xf000;
        vmcb.save.segments[x86::vmcb::SEG_CS].base = 0;
        vmcb.control.exit_code = ExitCode::Npf.0;
        vmcb.control.exit_info_1 = (1 << 32) | 2;
        vmcb.control.exit_info_2 = DEVICE;
        vmcb.control.exit_int_info = event::VALID | 0x31;
    });
    assert_eq!(run(&mut v), UserExit::InternalError { suberror: 3 });
    // EXITINFO2, the exit code, EXITINFO1, where the device is; and the CPU, whichever it was.
    let words = v.error_data().words();
    assert_eq!(words[..4], [DEVICE, ExitCode::Npf.0, (1 << 32) | 2, DEVICE]);
    assert_eq!(words.len(), 5);
}

#[test]
fn a_clock_that_the_vmm_restores_is_written_behind_memory() {
    const SYSTEM_TIME: u32 = 0x4b56_4d01;
    let (mut v, vm) = with_memory(&Machine::default(), 0x5000, &[]);
    let written = |vm: &VmRef| {
        let mut version = [0; 4];
        vm.memory().read(x86::Gpa(0x5000), &mut version).unwrap();
        version != [0; 4]
    };
    v.write_msr(SYSTEM_TIME, 0x5001, By::Vmm).unwrap();
    assert!(!written(&vm));
    v.backend().cpu().inner().then(shutdown);
    run(&mut v);
    assert!(written(&vm));
}

#[test]
fn code_in_a_32_bit_segment_stays_it_without_protection() {
    let machine = Machine {
        features: svm::Features { nrip_save: false, decode_assists: false, ..rig::features() },
        ..Machine::default()
    };
    // invlpg [disp32]; with 16 bits it is invlpg [di], of three bytes.
    let code = [0x0f, 0x01, 0x3d, 0, 0, 0, 0];
    let (mut v, _vm) = with_memory(&machine, 0xf000, &code);
    v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.save.rip = 0xf000;
        let cs = &mut vmcb.save.segments[x86::vmcb::SEG_CS];
        (cs.base, cs.attrib) = (0, cs.attrib | 0x400);
        exit(ExitCode::Hlt)(vmcb, gprs);
        vmcb.control.exit_code = ExitCode::Wbinvd.0;
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, 0xf007);
        shutdown(vmcb, gprs);
    });
    assert_eq!(run(&mut v), UserExit::Shutdown);
}

/// A task switch by an instruction: no NRIP is told of it.
#[test]
fn a_task_that_is_left_by_an_instruction_goes_on_behind_it() {
    const GDT: u64 = 0x1000;
    const OLD: u64 = 0x2000;
    const NEW: u64 = 0x3000;
    const CODE: u64 = 0x4000;
    let machine = Machine::default();
    let vm = vm(&machine);
    let memory = Box::leak(Box::new(Pages::zeroed(8).unwrap()));
    let region = Region { slot: 0, flags: 0, gpa: 0, size: 8 << 12, hva: memory.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    let put = |at: u64, bytes: &[u8]| vm.memory().write(x86::Gpa(at), bytes).unwrap();
    let descriptor = |base: u64, limit: u64, kind: u64| {
        (limit | (base & 0xff_ffff) << 16 | kind << 40).to_le_bytes()
    };
    put(GDT + 0x08, &0x00cf_9b00_0000_ffff_u64.to_le_bytes());
    put(GDT + 0x10, &0x00cf_9300_0000_ffff_u64.to_le_bytes());
    put(GDT + 0x18, &descriptor(OLD, 0x67, 0x8b));
    put(GDT + 0x20, &descriptor(NEW, 0x67, 0x89));
    // call 0x20:0
    put(CODE, &[0x9a, 0, 0, 0, 0, 0x20, 0]);
    let tss = |at: u64, word: usize, value: u32| put(at + word as u64 * 4, &value.to_le_bytes());
    tss(NEW, 8, 0x5000);
    tss(NEW, 9, 2);
    tss(NEW, 14, 0x6000);
    for (word, selector) in [(18, 0x10), (19, 8), (20, 0x10), (21, 0x10), (22, 0x10), (23, 0x10)] {
        tss(NEW, word, selector);
    }
    let mut v = add_vcpu(&machine, &vm, 0);
    let mut s = v.sregs();
    s.cr0 |= x86::Cr0::PE;
    let flat = |selector, kind| {
        let mut segment = s.ds;
        (segment.base, segment.limit, segment.selector) = (0, u32::MAX, selector);
        segment.attr = kind;
        segment
    };
    (s.cs, s.ds) = (flat(8, 0xc9b), flat(0x10, 0xc93));
    (s.ss, s.es, s.fs, s.gs) = (s.ds, s.ds, s.ds, s.ds);
    (s.tr.base, s.tr.limit, s.tr.selector) = (OLD, 0x67, 0x18);
    (s.gdt.base, s.gdt.limit) = (GDT, 0x27);
    v.set_sregs(&s, None).unwrap();
    let mut regs = v.regs();
    regs.rip = CODE;
    regs.rflags = Rflags::FIXED;
    v.set_regs(&regs);
    v.backend().cpu().inner().then(|vmcb, _| {
        vmcb.control.exit_code = ExitCode::TaskSwitch.0;
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (0x20, 0);
        vmcb.control.next_rip = 0;
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, 0x5000);
        shutdown(vmcb, gprs);
    });
    assert_eq!(run(&mut v), UserExit::Shutdown);
    let mut eip = [0; 4];
    vm.memory().read(x86::Gpa(OLD + 8 * 4), &mut eip).unwrap();
    assert_eq!(u64::from(u32::from_le_bytes(eip)), CODE + 7);
}

/// A frequency that was set for the whole VM is a vCPU's from its first tick: the offset is in the guest's ticks.
#[test]
fn the_vcpus_of_a_vm_with_a_frequency_of_its_own_are_in_step() {
    let mut machine = Machine::default();
    machine.features.tsc_ratio = true;
    let vm = vm(&machine);
    let khz = vm.tsc_khz();
    vm.settings.tsc_khz.store(3 * khz, Relaxed);
    let first = add_vcpu(&machine, &vm, 0);
    machine.tsc = 1_000_000;
    let second = add_vcpu(&machine, &vm, 1);
    assert_eq!([first.tsc_khz(), second.tsc_khz()], [3 * khz; 2]);
    // The first one's TSC was 0 when the host's was 1.
    assert_eq!([first.tsc_offset(), second.tsc_offset()], [(-3_i64) as u64; 2]);
}

/// One entry, at which the CPU is told to flush or not, and back to user space.
fn entered(v: &mut TestVcpu, flushes: Option<bool>) {
    v.backend().cpu().inner().then(move |vmcb, gprs| {
        assert!(flushes.is_none_or(|wanted| (vmcb.control.tlb_ctl != 0) == wanted));
        exit(ExitCode::Intr)(vmcb, gprs);
        host::std_port::test::set_signal_pending(true);
    });
    assert_eq!(run(v), UserExit::Intr);
    host::std_port::test::set_signal_pending(false);
}

/// A guest that comes from a host where vCPUs leave flushes of others' TLBs to it: done before the vCPU's first entry, and once.
#[test]
fn a_flush_that_was_left_to_another_host_is_done() {
    const STEAL_TIME: u32 = 0x4b56_4d03;
    for (left, flushes) in [(1, false), (3, true)] {
        let mut bytes = [0; 32];
        bytes[16] = left;
        let (mut v, vm) = with_memory(&Machine::default(), 0x5000, &bytes);
        // Whatever a first entry flushes.
        entered(&mut v, None);
        entered(&mut v, Some(false));
        v.write_msr(STEAL_TIME, 0x5001, By::Vmm).unwrap();
        entered(&mut v, Some(flushes));
        entered(&mut v, Some(false));
        let mut left = [0];
        vm.memory().read(x86::Gpa(0x5010), &mut left).unwrap();
        assert_eq!(left, [0]);
    }
}

#[test]
fn a_priority_that_is_none_is_not_set() {
    let mut v = vcpu();
    let mut s = v.sregs();
    for (given, then) in [(5, 5), (16, 5), (u64::MAX, 5), (15, 15)] {
        s.cr8 = given;
        v.set_sregs(&s, None).unwrap();
        assert_eq!(v.sregs().cr8, then, "{given:#x}");
    }
}

/// A kick (KVM_HC_KICK_CPU) ends one halt, whatever interrupts the vCPU lets in, and none that user space sets.
#[test]
fn a_kick_counts_for_one_halt() {
    let mut v = vcpu();
    let halts = |v: &mut TestVcpu| {
        v.backend().cpu().inner().then(|vmcb, gprs| {
            exit(ExitCode::Hlt)(vmcb, gprs);
            host::std_port::test::set_signal_pending(true);
        });
        assert_eq!(run(v), UserExit::Intr);
        host::std_port::test::set_signal_pending(false);
    };
    halts(&mut v);
    assert_eq!(v.mp_state(), MpState::Halted);
    v.shared().unhalt();
    assert_eq!(v.mp_state(), MpState::Runnable, "user space saves it woken");
    halts(&mut v);
    v.shared().unhalt();
    // Woken with interrupts off, it goes on.
    entered(&mut v, None);
    v.shared().unhalt();
    v.set_mp_state(MpState::Halted);
    assert_eq!(v.mp_state(), MpState::Halted);
}
