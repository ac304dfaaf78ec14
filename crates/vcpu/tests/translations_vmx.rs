//! What a vCPU under VMX does about translations: what is flushed by which instruction, and how the
//! CPU's log of dirty pages reaches the bitmap.

mod rig;

use std::sync::atomic::{AtomicU64, Ordering};

use cpu::{Counts, Op};
use gannet_vcpu::{RunInput, UserExit};
use host::{mitigation::Facts, page::Pages, std_port::test as surroundings};
use mmu::{AddressSpace, EptSupport, FlushRemote, Format, Region};
use rig::vmx::{VmxVcpu, exit, features, shutdown, vcpu, vcpu_of, vcpu_with};
use vm::VmRef;
use vmx::Features;
use x86::vmcs::{ExitReason, ProcControls2, field};
use x86::{Cr0, Cr4, Efer};

/// Runs until the guest shuts down, after `exits` external interrupts.
fn run(v: &mut VmxVcpu) -> Counts {
    v.backend().cpu().inner().vmx.then(shutdown);
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    v.backend().cpu().counts().since(&before)
}

fn flushes(counts: &Counts) -> (u64, u64) {
    (counts.of(Op::Invept), counts.of(Op::Invvpid))
}

#[test]
fn a_cpu_is_made_to_forget_when_a_vcpu_comes_to_it_and_not_again() {
    let mut v = vcpu();
    // The first VPID since VMX is on: whoever had the CPU before may have used any.
    assert_eq!(flushes(&run(&mut v)), (1, 1));
    // A shutdown resets the registers: what linear addresses mean has changed.
    let invvpids = flushes(&run(&mut v));
    assert_eq!(invvpids.0, 0);
}

#[test]
fn withdrawn_tdp_translations_are_forgotten_by_one_invept() {
    let (mut v, vm) = vcpu_of(features(), Format::npt(4, 0));
    run(&mut v);
    let quiet = flushes(&run(&mut v));
    vm.flush_remote();
    vm.flush_remote();
    let after = flushes(&run(&mut v));
    assert_eq!((quiet.0, after.0, after.1), (0, 1, quiet.1));
}

#[test]
fn new_registers_forget_linear_translations_alone() {
    let mut v = vcpu();
    run(&mut v);
    let s = v.sregs();
    v.set_sregs(&s, None).unwrap();
    let counts = run(&mut v);
    assert_eq!(flushes(&counts), (0, 1));
}

/// A CPU that logs pages, and a VM with 1024 pages from guest frame 0 in slot 3.
struct Logging {
    v: VmxVcpu,
    vm: VmRef,
    user: Pages,
}

const LOG: u32 = 1;

impl Logging {
    fn cpu() -> (Features, Format) {
        let cpu =
            EptSupport { pages_2m: true, pages_1g: true, accessed_dirty: true, page_log: true };
        (Features { pml: true, ..features() }, Format::ept(cpu))
    }

    fn new() -> Self {
        let (features, tables) = Self::cpu();
        let (v, vm) = vcpu_of(features, tables);
        Self { v, vm, user: Pages::zeroed(10).unwrap() }
    }

    fn region(flags: u32, user: &Pages) -> Region {
        Region { slot: 3, flags, gpa: 0, size: 1024 << 12, hva: user.hpa().0 }
    }

    fn set(&self, flags: u32) {
        self.vm.memory().set_region(&Self::region(flags, &self.user), &**self.vm).unwrap();
    }

    /// Pages that the CPU logs before the guest's next exit, which is `reason`.
    fn then(&mut self, pages: Vec<u64>, reason: ExitReason) {
        self.v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
            let on = vmcs.get(field::PROC_CONTROLS2) & ProcControls2::PML.bits() != 0;
            for page in pages.iter().filter(|_| on) {
                let index = vmcs.get(field::PML_INDEX);
                assert!(index < 512, "logged beyond the end");
                let at = vmcs.get(field::PML_ADDRESS) + u64::from(index) * 8;
                // SAFETY: the log page, whose address is its physical one here.
                unsafe { &*(at as *const AtomicU64) }.store(page << 12, Ordering::Relaxed);
                vmcs.set(field::PML_INDEX, index.wrapping_sub(1));
            }
            exit(reason)(vmcs, gprs);
        });
    }

    fn dirty(&self) -> Vec<u64> {
        let words =
            self.vm.memory().dirty_log(3, true, &**self.vm, |words| Ok(words.to_vec())).unwrap();
        let set = |n: &u64| words[(n / 64) as usize] >> (n % 64) & 1 != 0;
        (0..1024).filter(set).collect()
    }
}

#[test]
fn pages_are_logged_while_a_slot_logs() {
    let mut l = Logging::new();
    l.set(0);
    l.then(vec![3, 4], ExitReason::ExternalInterrupt);
    run(&mut l.v);
    l.set(LOG);
    l.then(vec![5, 6, 5], ExitReason::ExternalInterrupt);
    l.then(vec![7], ExitReason::Cpuid);
    run(&mut l.v);
    assert_eq!(l.dirty(), [5, 6, 7]);
    run(&mut l.v);
    assert_eq!(l.dirty(), []);
    l.set(0);
    l.then(vec![8], ExitReason::ExternalInterrupt);
    run(&mut l.v);
    l.set(LOG);
    assert_eq!(l.dirty(), []);
}

#[test]
fn a_vcpu_that_is_made_while_a_slot_logs_logs_too() {
    let user = Pages::zeroed(10).unwrap();
    let mut of = None;
    let (features, tables) = Logging::cpu();
    let v = vcpu_with(features, tables, |vm| {
        vm.memory().set_region(&Logging::region(LOG, &user), &***vm).unwrap();
        of = Some(vm.clone());
    });
    let mut l = Logging { v, vm: of.unwrap(), user };
    l.then(vec![5], ExitReason::ExternalInterrupt);
    run(&mut l.v);
    assert_eq!(l.dirty(), [5]);
}

#[test]
fn a_full_log_is_emptied_and_the_guest_goes_on() {
    let mut l = Logging::new();
    l.set(LOG);
    l.then((0..512).collect(), ExitReason::PmlFull);
    l.then((512..1024).collect(), ExitReason::PmlFull);
    l.then(vec![0], ExitReason::ExternalInterrupt);
    run(&mut l.v);
    assert_eq!(l.dirty(), (0..1024).collect::<Vec<_>>());
}

#[test]
fn a_cpu_without_a_log_is_never_told_to_keep_one() {
    let mut v = vcpu();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::PROC_CONTROLS2) & ProcControls2::PML.bits(), 0);
        assert_eq!((vmcs.get(field::PML_ADDRESS), vmcs.get(field::PML_INDEX)), (0, 0));
        shutdown(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}

/// One test, for what is chosen is the machine's; guests of the others reach no device.
#[test]
fn buffers_are_cleared_at_each_entry_from_the_first_page_of_a_device_on() {
    vmx::mitigations::set_up(Facts(Facts::VERW_DEVICES), 0).unwrap();
    let (mut v, vm) = vcpu_of(features(), Format::npt(4, 0));
    let user = Pages::zeroed(1).unwrap();
    let region = Region { slot: 3, flags: 0, gpa: 0x10_0000, size: 2 << 12, hva: user.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    host::std_port::test::make_device(x86::Hva(user.hpa().0 + 4096));
    let mut cleared = |exits: &[Option<u64>]| {
        for reached in exits.iter().copied() {
            v.backend().cpu().inner().vmx.then(move |vmcs, gprs| {
                let Some(gpa) = reached else { return exit(ExitReason::Cpuid)(vmcs, gprs) };
                exit(ExitReason::EptViolation)(vmcs, gprs);
                vmcs.set(field::EXIT_QUALIFICATION, 2);
                vmcs.set(field::GUEST_PHYSICAL_ADDRESS, gpa);
            });
        }
        run(&mut v).of(Op::Verw)
    };
    assert_eq!(cleared(&[Some(0x10_0008), None]), 0, "memory is no device");
    // The fault's own entry finds no translation yet.
    assert_eq!(cleared(&[None, Some(0x10_1008), None]), 2);
    // In this run and all that follow, within the loop too.
    assert_eq!(cleared(&[None, None]), 3);
    vm.memory().set_region(&Region { size: 0, ..region }, &**vm).unwrap();
    // A vCPU that is made behind that has to be told, too.
    let mut late = vcpu_with(features(), Format::npt(4, 0), |vm| vm.note_device());
    late.backend().cpu().inner().vmx.then(exit(ExitReason::Cpuid));
    assert_eq!(run(&mut late).of(Op::Verw), 2);
}

/// System-management mode's handler pages by tables of its own: RSM loads the PDPTEs of the guest that it interrupted.
#[test]
fn rsm_loads_the_pdptes_of_the_interrupted_guest() {
    rsm_with_pdpte(0x5001, true);
    // What no CPU loads: RSM ends in a shutdown.
    rsm_with_pdpte(0x5003, false);
}

fn rsm_with_pdpte(entry: u64, loads: bool) {
    let (mut v, vm) = vcpu_of(features(), Format::npt(4, 0));
    let user = Pages::zeroed(6).unwrap();
    let region = Region { slot: 0, flags: 0, gpa: 0, size: 64 << 12, hva: user.hpa().0 };
    for space in [AddressSpace::Main, AddressSpace::Smm] {
        vm.memory_in(space).set_region(&region, &**vm).unwrap();
    }
    const TABLES: [(u64, u64); 2] = [(0x1000, 0x5001), (0x2000, 0x6001)];
    for (at, entry) in TABLES {
        user.words()[at as usize / 8].store(entry, Ordering::Relaxed);
    }
    let pages_by = |v: &mut VmxVcpu, cr3| {
        let mut sregs = v.sregs();
        (sregs.cr0, sregs.cr3) = (Cr0::PG | Cr0::PE | Cr0::NE | Cr0::ET, cr3);
        (sregs.cr4, sregs.efer) = (Cr4::PAE, Efer::empty());
        v.set_sregs(&sregs, None).unwrap();
    };
    pages_by(&mut v, TABLES[0].0);
    v.queue_smi();
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        surroundings::set_signal_pending(true);
        exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Intr);
    surroundings::set_signal_pending(false);
    pages_by(&mut v, TABLES[1].0);
    user.words()[TABLES[0].0 as usize / 8].store(entry, Ordering::Relaxed);
    v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
        assert_eq!(vmcs.get(field::GUEST_PDPTE0), TABLES[1].1);
        exit(ExitReason::Rsm)(vmcs, gprs);
    });
    if loads {
        v.backend().cpu().inner().vmx.then(|vmcs, gprs| {
            assert_eq!(vmcs.get(field::GUEST_CR3), TABLES[0].0);
            assert_eq!(vmcs.get(field::GUEST_PDPTE0), TABLES[0].1);
            shutdown(vmcs, gprs);
        });
    }
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
}
