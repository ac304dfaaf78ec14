//! What a change of the guest's paging costs, counted on the model CPU.

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use backend::{Gprs, RCX, RDX};
use cpu::{Counts, Op};
use gannet_vcpu::{RunInput, UserExit};
use host::page::Pages;
use mmu::Region;
use rig::{Machine, TestVcpu, assert_only_vmrun, cost_of, cost_with, exit, shutdown, vcpu};
use vm::vm::Paging;
use x86::vmcb::{ExitCode, Vmcb, event};
use x86::{Cr0, Cr4, Efer};

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
            assert_ne!(vmcb.control.ncr3, 0);
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

/// Shadow paging: a guest in long mode whose tables map 64 pages at their own addresses.
struct Paged {
    vcpu: TestVcpu,
    _memory: Pages,
}

const ROOT: u64 = 0x1000;
const OTHER_ROOT: u64 = 0x5000;
const PAGE: u64 = 0x1_0000;
const PRESENT_AND_USED: u64 = 0x67;

fn paged(paging: Paging) -> Paged {
    let machine = Machine { paging: Paging { tdp: false, ..paging }, ..Machine::default() };
    let memory = Pages::zeroed(6).unwrap();
    let put = |at: u64, value: u64| {
        memory.words()[at as usize / 8].store(value, Ordering::Relaxed);
    };
    for (table, next) in [(ROOT, 0x2000), (OTHER_ROOT, 0x2000), (0x2000, 0x3000), (0x3000, 0x4000)]
    {
        put(table, next | PRESENT_AND_USED);
    }
    for page in 0..64 {
        put(0x4000 + page * 8, page << 12 | PRESENT_AND_USED);
    }
    let vm = rig::vm(&machine);
    let region = Region { slot: 0, flags: 0, gpa: 0, size: 64 << 12, hva: memory.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    let mut vcpu = rig::add_vcpu(&machine, &vm, 0);
    let mut sregs = vcpu.sregs();
    (sregs.cr0, sregs.cr3) = (Cr0::from_bits_retain(0x8001_0033), ROOT);
    (sregs.cr4, sregs.efer) = (Cr4::PAE, Efer::LME | Efer::LMA);
    sregs.cs.attr = 0x29b;
    vcpu.set_sregs(&sregs, None).unwrap();
    Paged { vcpu, _memory: memory }
}

/// What ten exits made by `step` cost, after some that warm up.
fn cost_on_shadow(
    paging: Paging,
    step: impl Fn(&mut Vmcb, &mut Gprs) + Send + Sync + Clone + 'static,
) -> Counts {
    const WARM: usize = 6;
    let run = |exits: usize| {
        let mut guest = paged(paging);
        let v = &mut guest.vcpu;
        for _ in 0..exits {
            let step = step.clone();
            v.backend().cpu().inner().then(move |vmcb, gprs| step(vmcb, gprs));
        }
        v.backend().cpu().inner().then(shutdown);
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        v.backend().cpu().counts().since(&before)
    };
    let ten = run(WARM + 10).since(&run(WARM));
    assert_eq!(ten.of(Op::Vmrun), 10);
    ten
}

fn page_fault(at: u64, code: u64, vmcb: &mut Vmcb) {
    const EXCEPTION_14: u64 = 0x4e;
    vmcb.control.exit_code = EXCEPTION_14;
    vmcb.control.exit_info_1 = code;
    vmcb.control.exit_info_2 = at;
}

#[test]
fn a_shadow_fault_whose_frame_is_known_is_one_vmrun() {
    assert_only_vmrun(&cost_on_shadow(Paging::default(), |vmcb, _| {
        // The hardware walks the shadow root, and never the guest's.
        assert_eq!(vmcb.control.np_ctl, 0);
        assert_ne!(vmcb.save.cr3, ROOT);
        page_fault(PAGE, 0, vmcb);
    }));
}

#[test]
fn a_fault_that_is_the_guests_own_is_one_vmrun() {
    const NOT_MAPPED: u64 = 0x10_0000;
    assert_only_vmrun(&cost_on_shadow(Paging::default(), |vmcb, _| {
        page_fault(NOT_MAPPED, 2, vmcb);
    }));
}

#[test]
fn a_switch_between_two_address_spaces_is_one_vmrun() {
    let turn = Arc::new(AtomicU64::new(0));
    assert_only_vmrun(&cost_on_shadow(Paging::default(), move |vmcb, gprs| {
        let odd = turn.fetch_add(1, Ordering::Relaxed) & 1 != 0;
        gprs.0[RDX] = if odd { ROOT } else { OTHER_ROOT };
        exit(ExitCode::WriteCr3)(vmcb, gprs);
        vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
    }));
}

/// Flips a bit of the guest's register, which is not the hardware's.
fn flip(code: ExitCode, bit: u64) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Sync + Clone + 'static {
    let turn = Arc::new(AtomicU64::new(1));
    move |vmcb, gprs| {
        const EFER: u64 = 0xc000_0080;
        let on = if turn.fetch_add(1, Ordering::Relaxed) & 1 != 0 { bit } else { 0 };
        exit(code)(vmcb, gprs);
        vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
        match code {
            ExitCode::WriteCr0 => gprs.0[RDX] = 0x8000_0033 | on,
            ExitCode::WriteCr4 => gprs.0[RDX] = 1 << 5 | on,
            _ => {
                vmcb.control.exit_info_1 = 1;
                (gprs.0[RCX], gprs.0[RDX]) = (EFER, 0);
                vmcb.save.rax = 0x500 | on;
            }
        }
    }
}

#[test]
fn on_shadow_tables_too_a_change_of_the_paging_mode_is_one_vmrun() {
    for (code, bit) in TOGGLES {
        assert_only_vmrun(&cost_on_shadow(Paging::default(), flip(code, bit)));
    }
}

#[test]
fn without_kept_roots_shadow_roots_are_unloaded_outside_the_loop() {
    let paging = Paging { keep_roots: false, ..Paging::default() };
    for (code, bit) in TOGGLES {
        let ten = cost_on_shadow(paging, flip(code, bit));
        assert_eq!(ten.of(Op::Clgi), 10, "{code:?} {bit:#x}");
    }
}

#[test]
fn the_guest_sees_its_own_registers_and_the_hardware_always_pages() {
    let mut guest = paged(Paging::default());
    let v = &mut guest.vcpu;
    v.backend().cpu().inner().then(|vmcb, gprs| {
        gprs.0[RDX] = 0x8000_0033;
        exit(ExitCode::WriteCr0)(vmcb, gprs);
        vmcb.control.exit_info_1 = (1 << 63) | RDX as u64;
    });
    v.backend().cpu().inner().then(|vmcb, gprs| {
        const WP: u64 = 1 << 16;
        assert_eq!(vmcb.save.cr0, 0x8000_0033 | WP);
        // Its own reads exit, for it must not see the hardware's WP.
        assert_ne!(vmcb.control.intercepts[0] & 1, 0);
        shutdown(vmcb, gprs);
    });
    assert_eq!(v.sregs().cr3, ROOT);
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

/// The guest takes an interrupt whose delivery meets a fault that is answered, again and again: no
/// boundary of an instruction is reached, and the host's interrupts wait. The model CPU counts.
#[test]
fn a_delivery_that_faults_without_end_does_not_hold_off_the_host() {
    const INTERRUPT: u64 = 0x31;
    const TURNS: usize = 2_000;
    let mut guest = paged(Paging::default());
    let v = &mut guest.vcpu;
    for _ in 0..TURNS {
        v.backend().cpu().inner().then(|vmcb, _| {
            page_fault(PAGE, 0, vmcb);
            vmcb.control.exit_int_info = event::VALID | event::INTR | INTERRUPT;
        });
    }
    v.backend().cpu().inner().then(|vmcb, gprs| {
        assert_eq!(vmcb.control.event_inj, event::VALID | INTERRUPT);
        shutdown(vmcb, gprs);
    });
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let left = v.backend().cpu().counts().since(&before).of(Op::Stgi);
    assert!(left >= TURNS as u64 / 64, "{left}");
}

/// The same without an event: an instruction in the shadow of STI that faults without end.
#[test]
fn faults_without_end_do_not_hold_off_the_host_either() {
    const TURNS: usize = 5_000;
    let mut guest = paged(Paging::default());
    let v = &mut guest.vcpu;
    for _ in 0..TURNS {
        v.backend().cpu().inner().then(|vmcb, _| {
            page_fault(PAGE, 0, vmcb);
            vmcb.control.int_state = 1;
        });
    }
    v.backend().cpu().inner().then(shutdown);
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    let left = v.backend().cpu().counts().since(&before).of(Op::Stgi);
    assert!((4..=16).contains(&left), "{left}");
}
