//! Operation budgets of exits that reach a device, a page or another vCPU: what each may execute,
//! counted on the model CPU. Those of single instructions are in `budget.rs`.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use ::vm::VmRef;
use ::vm::irq::{IoEvent, Space, Zone};
use backend::{Gprs, RBX, RCX, RDX, RSI};
use cpu::{Counts, Op};
use gannet_vcpu::{By, RunInput, UserExit};
use host::page::Page;
use host::std_port::test as surroundings;
use mmu::Region;
use rig::{Machine, TestVcpu, add_vcpu, exit, shutdown, vcpu, vcpu_of, vm};
use x86::vmcb::{ExitCode, Vmcb, vintr};

const APIC: u64 = 0xfee0_0000;
const X2APIC_ON: u64 = 0xfee0_0d00;
const XAPIC_ON: u64 = 0xfee0_0900;
const APIC_BASE: u32 = 0x1b;

/// What an exit inside the loop costs beside VMRUN: `loads` and `saves` of segment state, nothing else.
fn assert_budget(what: &str, counts: &Counts, runs: u64, loads: u64, saves: u64) {
    assert_eq!(counts.of(Op::Vmrun), runs, "{what}");
    assert_eq!((counts.of(Op::Vmload), counts.of(Op::Vmsave)), (loads, saves), "{what}");
    for op in [Op::Rdmsr, Op::Wrmsr, Op::Cpuid, Op::Xsetbv, Op::DebugReg, Op::MovCr] {
        assert_eq!(counts.of(op), 0, "{what}: {op:?}");
    }
}

fn assert_in_loop(what: &str, counts: &Counts) {
    assert_eq!((counts.of(Op::Clgi), counts.of(Op::Stgi)), (0, 0), "{what}");
}

/// Plays ten exits like `step` and then one that ends the run; the difference to one of them. The very
/// first may cost more: what it finds out is known to the others.
fn ten_more(
    v: &mut TestVcpu,
    step: impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone + 'static,
) -> Counts {
    let [_, one, eleven] = [1, 1, 11].map(|exits| {
        for _ in 0..exits {
            v.backend().cpu().inner().then(step.clone());
        }
        v.backend().cpu().inner().then(|vmcb, _| vmcb.control.exit_code = UNKNOWN);
        let before = v.backend().cpu().counts();
        assert!(matches!(v.run(&RunInput::default()), UserExit::InternalError { .. }));
        assert_eq!(v.backend().cpu().inner().steps_left(), 0);
        v.backend().cpu().counts().since(&before)
    });
    eleven.since(&one)
}

/// An exit code that nobody knows: the run ends, and the registers stay.
const UNKNOWN: u64 = 0x3ff;

fn wrmsr(msr: u64, value: u64) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone + 'static {
    move |vmcb, gprs| {
        (gprs.0[RCX], gprs.0[RDX]) = (msr, value >> 32);
        vmcb.save.rax = value & 0xffff_ffff;
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1;
    }
}

fn rdmsr(msr: u64) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone + 'static {
    move |vmcb, gprs| {
        gprs.0[RCX] = msr;
        exit(ExitCode::Msr)(vmcb, gprs);
    }
}

fn long_mode(vmcb: &mut Vmcb) {
    vmcb.save.efer |= (1 << 8) | (1 << 10);
    vmcb.save.segments[x86::vmcb::SEG_CS].attrib |= 0x200;
}

/// Where the guest's code lies. Its linear addresses are physical ones.
const CODE: u64 = 0xf000;
const STORE: [u8; 2] = [0x89, 0x03];
const LOAD: [u8; 2] = [0x8b, 0x03];

/// MOV between EAX and the 4 bytes at `gpa` (RBX), where no memory is: `MOV [RBX], EAX` at CODE or
/// `MOV EAX, [RBX]` behind it.
fn device(gpa: u64, write: bool, value: u64) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone {
    move |vmcb, gprs| {
        long_mode(vmcb);
        gprs.0[RBX] = gpa;
        vmcb.save.rax = value;
        vmcb.control.exit_code = ExitCode::Npf.0;
        vmcb.control.exit_info_1 = (1 << 32) | u64::from(write) << 1;
        vmcb.control.exit_info_2 = gpa;
        vmcb.save.rip = if write { CODE } else { CODE + 2 };
        vmcb.control.insn_len = 2;
        vmcb.control.insn_bytes[..2].copy_from_slice(if write { &STORE } else { &LOAD });
    }
}

const PORT: u16 = 0x99;

/// One byte written to PORT, or with `input` 1 read from there.
fn port(input: u64) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone {
    move |vmcb, gprs| {
        exit(ExitCode::Ioio)(vmcb, gprs);
        vmcb.control.exit_info_1 = u64::from(PORT) << 16 | (1 << 4) | input;
        vmcb.control.exit_info_2 = vmcb.save.rip + 2;
    }
}

fn alone() -> (TestVcpu, VmRef) {
    let machine = Machine::default();
    let vm = vm(&machine);
    let code = Box::leak(Box::new(Page::zeroed().unwrap()));
    for (to, from) in code.bytes().iter().zip(STORE.into_iter().chain(LOAD)) {
        to.store(from, Relaxed);
    }
    set_memory(&vm, 0, CODE, Some(code));
    (add_vcpu(&machine, &vm, 0), vm)
}

fn with_xapic() -> TestVcpu {
    let mut v = vcpu();
    v.write_msr(APIC_BASE, XAPIC_ON, By::Vmm).unwrap();
    v
}

fn with_x2apic() -> TestVcpu {
    let mut v = vcpu();
    v.write_msr(APIC_BASE, X2APIC_ON, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    v
}

#[test]
fn a_register_of_the_apics_page_is_one_vmrun() {
    for (what, gpa, write, value) in [
        ("id", APIC | 0x20, false, 0),
        ("version", APIC | 0x30, false, 0),
        ("task priority", APIC | 0x80, true, 0x20),
        ("end of interrupt", APIC | 0xb0, true, 0),
        ("spurious vector", APIC | 0xf0, true, 0x1ff),
        ("interrupt command, high", APIC | 0x310, true, 1 << 24),
        ("error status", APIC | 0x280, true, 0),
    ] {
        let mut v = with_xapic();
        let ten = ten_more(&mut v, device(gpa, write, value));
        assert_budget(what, &ten, 10, 0, 0);
        assert_in_loop(what, &ten);
    }
}

#[test]
fn the_error_of_a_load_that_finds_no_register_comes_with_the_next_entry() {
    let mut v = with_xapic();
    let lapic = &v.shared().lapic;
    let (_, _) = (lapic.write(0xf0, 0x1ff), lapic.write(0x370, 0x71));
    v.backend().cpu().inner().then(device(APIC | 0x40, false, 0));
    v.backend().cpu().inner().then(|vmcb, _| {
        assert_ne!(vmcb.control.int_ctl & vintr::IRQ, 0);
        assert_eq!(vmcb.control.int_vector, 0x71);
        vmcb.control.exit_code = UNKNOWN;
    });
    let before = v.backend().cpu().counts();
    assert!(matches!(v.run(&RunInput::default()), UserExit::InternalError { .. }));
    let counts = v.backend().cpu().counts().since(&before);
    assert_eq!((counts.of(Op::Vmrun), counts.of(Op::Stgi)), (2, 1), "in the loop");
}

#[test]
fn x2apic_registers_are_one_vmrun() {
    for (what, msr, write, value) in [
        ("id", 0x802, false, 0),
        ("task priority", 0x808, true, 0x20),
        ("end of interrupt", 0x80b, true, 0),
        ("spurious vector", 0x80f, true, 0x1ff),
        ("timer's entry", 0x832, true, 0x1_0000),
        ("interrupt command, read", 0x830, false, 0),
    ] {
        let mut v = with_x2apic();
        let ten = match write {
            true => ten_more(&mut v, wrmsr(msr, value)),
            false => ten_more(&mut v, rdmsr(msr)),
        };
        assert_budget(what, &ten, 10, 0, 0);
        assert_in_loop(what, &ten);
    }
}

#[test]
fn the_timers_current_count_costs_the_hosts_segments() {
    let ten = ten_more(&mut with_x2apic(), rdmsr(0x839));
    assert_budget("x2APIC", &ten, 10, 20, 10);
    assert_in_loop("x2APIC", &ten);
    let ten = ten_more(&mut with_xapic(), device(APIC | 0x390, false, 0));
    assert_budget("xAPIC", &ten, 10, 20, 10);
    assert_in_loop("xAPIC", &ten);
}

#[test]
fn an_ipi_to_another_vcpu_costs_the_hosts_segments() {
    let machine = Machine::default();
    let vm = vm(&machine);
    let (mut v, mut other) = (add_vcpu(&machine, &vm, 0), add_vcpu(&machine, &vm, 1));
    for v in [&mut v, &mut other] {
        let application_processor = u64::from(v.shared().id);
        v.write_msr(APIC_BASE, X2APIC_ON & !(application_processor << 8), By::Vmm).unwrap();
        v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    }
    let ten = ten_more(&mut v, wrmsr(0x830, 1 << 32 | 0x55));
    assert_budget("physical", &ten, 10, 20, 10);
    assert_in_loop("physical", &ten);
    assert!(other.shared().lapic.maybe_pending());

    let hypercall = |number: u64, args: [u64; 4]| {
        move |vmcb: &mut Vmcb, gprs: &mut Gprs| {
            long_mode(vmcb);
            vmcb.save.cpl = 0;
            vmcb.save.rax = number;
            [gprs.0[RBX], gprs.0[RCX], gprs.0[RDX], gprs.0[RSI]] = args;
            exit(ExitCode::Vmmcall)(vmcb, gprs);
        }
    };
    // KVM_HC_KICK_CPU and KVM_HC_SEND_IPI.
    let ten = ten_more(&mut v, hypercall(5, [0, 1, 0, 0]));
    assert_budget("a kick", &ten, 10, 20, 10);
    assert_in_loop("a kick", &ten);
    let ten = ten_more(&mut v, hypercall(10, [0b10, 0, 0, 0x56]));
    assert_budget("paravirtual", &ten, 10, 20, 10);
    assert_in_loop("paravirtual", &ten);
    assert_eq!(other.shared().lapic.highest_pending().map(|v| v.0), Some(0x56));
}

/// A vCPU that kicked itself and stayed would be in the guest with no IPI for what others make pending.
#[test]
fn a_vcpu_that_kicks_itself_is_still_kicked_by_others() {
    const ALL: u64 = 2 << 18;
    let mut v = with_x2apic();
    let shared = v.shared().clone();
    let own = host::smp::cpu_id();
    // Masked by the priority: nothing of it ends the loop.
    v.backend().cpu().inner().then(wrmsr(0x808, 0xf0));
    v.backend().cpu().inner().then(wrmsr(0x830, ALL | 0x55));
    v.backend().cpu().inner().then(move |vmcb, _| {
        let _ = surroundings::take_kicks();
        // On another CPU a device makes an interrupt pending.
        let world = surroundings::clock();
        let elsewhere = || {
            surroundings::adopt(&world);
            assert_ne!(host::smp::cpu_id(), own, "another CPU");
            shared.kick();
        };
        std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap());
        assert!(!surroundings::take_kicks().is_empty(), "nothing ends the guest's run");
        shutdown(vmcb, &mut Gprs::default());
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn a_halt_with_an_interrupt_pending_goes_on_in_two_vmruns() {
    let mut v = with_x2apic();
    v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.save.rflags &= !(1 << 9);
        wrmsr(0x83f, 0x40)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.save.rflags |= 1 << 9;
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_ne!(vmcb.control.int_ctl & (1 << 8), 0, "the offer stands");
        shutdown(vmcb, gprs);
    });
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let all = v.backend().cpu().counts().since(&before);
    // The way in and the way out, once.
    assert_budget("a halt", &all, 3, 2, 2);
}

#[test]
fn a_halt_that_sleeps_is_one_way_in_and_out() {
    let mut v = with_x2apic();
    v.backend().cpu().inner().then(|vmcb, gprs| {
        vmcb.save.rflags |= 1 << 9;
        exit(ExitCode::Hlt)(vmcb, gprs);
        surroundings::set_signal_pending(true);
    });
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Intr);
    surroundings::set_signal_pending(false);
    let all = v.backend().cpu().counts().since(&before);
    assert_budget("a halt", &all, 1, 2, 2);
    assert_eq!((all.of(Op::Clgi), all.of(Op::Stgi)), (1, 1));
}

#[test]
fn an_exit_to_user_space_is_one_way_in_and_out() {
    const NOWHERE: u64 = 0xd000_0000;
    let each = |what: &str, step: &dyn Fn(&mut cpu::Model), is: fn(&UserExit) -> bool| {
        let (mut v, _) = alone();
        // The first is emulated, for nobody knows yet what is there.
        for turn in 0..4 {
            step(v.backend().cpu().inner());
            let before = v.backend().cpu().counts();
            let end = v.run(&RunInput::default());
            assert!(is(&end), "{what}: {end:?}");
            let all = v.backend().cpu().counts().since(&before);
            // The host's state is saved once a run, and so is the guest's.
            assert_budget(&format!("{what}, turn {turn}"), &all, 1, 2, 2);
            assert_eq!((all.of(Op::Clgi), all.of(Op::Stgi)), (1, 1));
        }
    };
    let io = |e: &UserExit| matches!(e, UserExit::Io { .. });
    each("OUT", &|m| _ = m.then(port(0)), io);
    each("IN", &|m| _ = m.then(port(1)), io);
    let mmio = |e: &UserExit| matches!(e, UserExit::Mmio { .. });
    each("a store", &|m| _ = m.then(device(NOWHERE, true, 7)), mmio);
    each("a load", &|m| _ = m.then(device(NOWHERE, false, 0)), mmio);
}

#[test]
fn a_device_of_the_kernel_stays_in_the_loop_once_its_page_is_known() {
    const IOAPIC: u64 = 0xfec0_0000;
    let ten = ten_more(&mut alone().0, device(IOAPIC, true, 0));
    assert_budget("I/O APIC", &ten, 10, 20, 10);
    assert_in_loop("I/O APIC", &ten);

    const DOORBELL: u64 = 0xd000_0010;
    let fd = surroundings::eventfd();
    let (mut v, vm) = alone();
    let what = IoEvent { space: Space::Memory, address: DOORBELL, len: 4, datamatch: None };
    vm.irq().ioeventfds().assign(what, fd).unwrap();
    let ten = ten_more(&mut v, device(DOORBELL, true, 1));
    assert_budget("ioeventfd", &ten, 10, 20, 10);
    assert_in_loop("ioeventfd", &ten);
    assert_eq!(surroundings::eventfd_read(fd), 13);
}

#[test]
fn a_coalesced_write_stays_in_the_loop() {
    const FRAME: u64 = 0xd000_0020;
    let (mut v, vm) = alone();
    vm.irq().register_zone(Zone { space: Space::Memory, address: FRAME, len: 4 }).unwrap();
    vm.irq().register_zone(Zone { space: Space::Port, address: PORT.into(), len: 1 }).unwrap();
    let ten = ten_more(&mut v, device(FRAME, true, 1));
    assert_budget("coalesced store", &ten, 10, 20, 10);
    assert_in_loop("coalesced store", &ten);
    let ten = ten_more(&mut v, port(0));
    assert_budget("coalesced OUT", &ten, 10, 20, 10);
    assert_in_loop("coalesced OUT", &ten);
    v.backend().cpu().inner().then(port(1));
    assert!(matches!(v.run(&RunInput::default()), UserExit::Io { write: false, .. }));
}

#[test]
fn memory_where_a_device_was_is_memory() {
    const IOAPIC: u64 = 0xfec0_0000;
    let (mut v, vm) = alone();
    ten_more(&mut v, device(IOAPIC, true, 0));
    let page = Page::zeroed().unwrap();
    set_memory(&vm, 1, IOAPIC, Some(&page));
    v.backend().cpu().inner().then(device(IOAPIC, true, 0)).then(|vmcb, _| {
        // Nothing was done for the guest: the page is there now, and the access happens again.
        assert_eq!(vmcb.save.rip, CODE);
        vmcb.control.exit_code = UNKNOWN;
    });
    assert!(matches!(v.run(&RunInput::default()), UserExit::InternalError { .. }));
    set_memory(&vm, 1, IOAPIC, None);
}

fn set_memory(vm: &VmRef, slot: u32, gpa: u64, page: Option<&Page>) {
    let (size, hva) = page.map_or((0, 0), |page| (4096, page.hpa().0));
    vm.memory().set_region(&Region { slot, flags: 0, gpa, size, hva }, &***vm).unwrap();
}

#[test]
fn a_tdp_fault_is_one_way_out_and_in() {
    let (mut v, vm) = alone();
    let page = Page::zeroed().unwrap();
    set_memory(&vm, 1, 0x5000, Some(&page));
    let fault = |vmcb: &mut Vmcb, _: &mut Gprs| {
        vmcb.control.exit_code = ExitCode::Npf.0;
        vmcb.control.exit_info_1 = (1 << 32) | 2;
        vmcb.control.exit_info_2 = 0x5008;
    };
    let ten = ten_more(&mut v, fault);
    // VMSAVE of the guest, VMLOAD of the host, VMLOAD of the guest.
    assert_budget("a TDP fault", &ten, 10, 20, 10);
    assert_eq!((ten.of(Op::Clgi), ten.of(Op::Stgi)), (10, 10));
    set_memory(&vm, 1, 0x5000, None);
}

#[test]
fn without_an_irqchip_a_halt_is_the_vmms() {
    let mut v = vcpu_of(&Machine { irqchip: false, ..Machine::default() });
    for _ in 0..3 {
        v.backend().cpu().inner().then(exit(ExitCode::Hlt));
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Hlt);
        assert_budget("a halt", &v.backend().cpu().counts().since(&before), 1, 2, 2);
    }
}
