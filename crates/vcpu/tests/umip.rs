//! CR4.UMIP on Intel CPUs that have none: the instructions that it is about exit and are emulated, so that
//! programs are refused them and kernels are not.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use ::vm::VmRef;
use gannet_vcpu::{RunInput, UserExit};
use host::page::Page;
use mmu::Region;
use rig::offered_with_umip;
use rig::vmx::{VmxVcpu, exit, features, shutdown, vcpu_offered};
use vmx::Features;
use x86::segment::DescriptorTable;
use x86::vmcs::{ExitReason, ProcControls2, event, field};

const MEMORY: u64 = 0xf000;
const CODE: u64 = MEMORY;
const DATA: u64 = MEMORY + 0x100;
const UMIP: u64 = x86::Cr4::UMIP.bits();
const GP: u32 = event::VALID | event::EXCEPTION | event::ERROR_VALID | 13;

struct Guest {
    v: VmxVcpu,
    page: &'static Page,
    _vm: VmRef,
}

/// In protected mode without paging, at this level, with UMIP.
fn guest(features: Features, cpl: u16, code: &[u8]) -> Guest {
    let (mut v, vm) = vcpu_offered(features, offered_with_umip());
    let page = Box::leak(Box::new(Page::zeroed().unwrap()));
    let region = Region { slot: 0, flags: 0, gpa: MEMORY, size: 0x1000, hva: page.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    for (to, from) in page.bytes().iter().zip(code) {
        to.store(*from, Relaxed);
    }
    let mut sregs = v.sregs();
    sregs.cr0 = x86::Cr0::from_bits_retain(0x31);
    sregs.cr4 = x86::Cr4::UMIP;
    sregs.cs.attr = 0xc9b | cpl << 5;
    sregs.cs.base = 0;
    sregs.cs.limit = u32::MAX;
    for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        data.attr = 0xc93 | cpl << 5;
        data.limit = u32::MAX;
    }
    sregs.gdt = DescriptorTable { base: 0x1234_5678, limit: 0x9abc };
    sregs.tr.selector = 0x40;
    v.set_sregs(&sregs, None).unwrap();
    let mut regs = v.regs();
    regs.rip = CODE;
    v.set_regs(&regs);
    Guest { v, page, _vm: vm }
}

fn by_exits() -> Features {
    Features { umip_by_exits: true, ..features() }
}

/// Whether the instructions exit, and what the CPU and the guest have of UMIP in CR4.
fn umip(vmcs: &cpu::ModelVmcs) -> (bool, bool, bool) {
    let controls = ProcControls2::from_bits_retain(vmcs.get(field::PROC_CONTROLS2));
    (
        controls.contains(ProcControls2::DESCRIPTOR_TABLES),
        vmcs.get(field::GUEST_CR4) & UMIP != 0,
        vmcs.get(field::CR4_SHADOW) & UMIP != 0,
    )
}

impl Guest {
    /// The guest's instruction exits for this; what the next entry injects, and RIP there.
    fn exits(&mut self, reason: ExitReason) -> (u32, u64) {
        use std::sync::{Arc, Mutex};
        let seen = Arc::new(Mutex::new((0, 0)));
        let (script, saw) = (&mut self.v.backend().cpu().inner().vmx, seen.clone());
        script.then(move |vmcs, gprs| {
            assert_eq!(umip(vmcs), (true, false, true));
            exit(reason)(vmcs, gprs);
        });
        script.then(move |vmcs, gprs| {
            *saw.lock().unwrap() =
                (vmcs.get(field::ENTRY_INTERRUPTION), vmcs.get(field::GUEST_RIP));
            shutdown(vmcs, gprs);
        });
        assert_eq!(self.v.run(&RunInput::default()), UserExit::Shutdown);
        assert_eq!(self.v.backend().cpu().inner().vmx.steps_left(), 0);
        *seen.lock().unwrap()
    }

    fn data(&self) -> [u8; 8] {
        let at = (DATA - MEMORY) as usize;
        core::array::from_fn(|n| self.page.bytes()[at + n].load(Relaxed))
    }
}

/// SGDT, SIDT, SLDT and STR of the word at DATA.
const TELLING: [(ExitReason, [u8; 7]); 4] = [
    (ExitReason::GdtrIdtr, [0x0f, 0x01, 0x05, 0x00, 0xf1, 0, 0]),
    (ExitReason::GdtrIdtr, [0x0f, 0x01, 0x0d, 0x00, 0xf1, 0, 0]),
    (ExitReason::LdtrTr, [0x0f, 0x00, 0x05, 0x00, 0xf1, 0, 0]),
    (ExitReason::LdtrTr, [0x0f, 0x00, 0x0d, 0x00, 0xf1, 0, 0]),
];

#[test]
fn programs_are_refused_what_tells_of_tables() {
    for (reason, code) in TELLING {
        let mut guest = guest(by_exits(), 3, &code);
        assert_eq!(guest.exits(reason), (GP, CODE), "{code:02x?}");
        assert_eq!(guest.data(), [0; 8]);
    }
}

#[test]
fn kernels_are_not() {
    let told = TELLING.map(|(reason, code)| {
        let mut guest = guest(by_exits(), 0, &code);
        assert_eq!(guest.exits(reason), (0, CODE + 7), "{code:02x?}");
        guest.data()
    });
    assert_eq!(told[0], [0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, 0, 0]);
    assert_eq!(told[3], [0x40, 0, 0, 0, 0, 0, 0, 0]);
    // LGDT of what SGDT would store.
    let mut guest = guest(by_exits(), 0, &[0x0f, 0x01, 0x15, 0x00, 0xf1, 0, 0]);
    for (to, from) in guest.page.bytes()[0x100..].iter().zip([0x17, 0, 0, 0xf2]) {
        to.store(from, Relaxed);
    }
    assert_eq!(guest.exits(ExitReason::GdtrIdtr), (0, CODE + 7));
    assert_eq!(guest.v.sregs().gdt, DescriptorTable { base: 0xf200, limit: 0x17 });
}

#[test]
fn other_bytes_than_those_that_made_the_exit_are_left_to_the_cpu() {
    // OUT, CPUID, a store, MOV from CR3, and those of the other exit.
    let others: [&[u8]; 4] = [&[0xe6, 0x99], &[0x0f, 0xa2], &[0x89, 0x03], &[0x0f, 0x20, 0xd8]];
    for reason in [ExitReason::GdtrIdtr, ExitReason::LdtrTr] {
        let crossed = TELLING.iter().filter(|(r, _)| *r != reason).map(|(_, code)| &code[..]);
        for code in others.into_iter().chain(crossed) {
            for cpl in [0, 3] {
                let mut guest = guest(by_exits(), cpl, code);
                assert_eq!(guest.exits(reason), (0, CODE), "{code:02x?} at level {cpl}");
            }
        }
    }
}

#[test]
fn the_exits_go_with_the_bit() {
    let mut guest = guest(by_exits(), 0, &[]);
    let script = &mut guest.v.backend().cpu().inner().vmx;
    script.then(|vmcs, gprs| {
        assert_eq!(umip(vmcs), (true, false, true));
        // MOV CR4, RBX.
        gprs.0[backend::RBX] = 1 << 9;
        exit(ExitReason::CrAccess)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 4 | (backend::RBX as u64) << 8);
    });
    script.then(|vmcs, gprs| {
        assert_eq!(umip(vmcs), (false, false, false));
        gprs.0[backend::RBX] = UMIP;
        exit(ExitReason::CrAccess)(vmcs, gprs);
        vmcs.set(field::EXIT_QUALIFICATION, 4 | (backend::RBX as u64) << 8);
    });
    script.then(|vmcs, gprs| {
        assert_eq!(umip(vmcs), (true, false, true));
        shutdown(vmcs, gprs);
    });
    assert_eq!(guest.v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(guest.v.sregs().cr4, x86::Cr4::UMIP);
    let mut sregs = guest.v.sregs();
    sregs.cr4 = x86::Cr4::empty();
    guest.v.set_sregs(&sregs, None).unwrap();
    guest.v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(umip(vmcs), (false, false, false));
        shutdown(vmcs, gprs);
    });
    assert_eq!(guest.v.run(&RunInput::default()), UserExit::Shutdown);
}

#[test]
fn a_cpu_that_has_it_does_it_by_itself() {
    let mut guest = guest(features(), 3, &[]);
    guest.v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(umip(vmcs), (false, true, true));
        shutdown(vmcs, gprs);
    });
    assert_eq!(guest.v.run(&RunInput::default()), UserExit::Shutdown);
}
