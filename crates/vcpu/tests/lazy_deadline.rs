//! The lazy TSC deadline of a vCPU on the model CPU: what a write of the MSR, a ring of the host's
//! timer and a page that went away do, and what they may execute.

mod rig;

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

use backend::{Gprs, RCX, RDX};
use cpu::{Counts, Op};
use gannet_vcpu::{By, RunInput, UserExit};
use host::page::Page;
use host::std_port::test::{clock, invalidate};
use mmu::Region;
use rig::{Machine, TestVcpu, add_vcpu, assert_only_vmrun, exit, vm};
use x86::Hva;
use x86::vmcb::{ExitCode, Vmcb};

const PAGE: u64 = 0x6000;
const LAZY: u32 = 0x4b56_4d09;
const DEADLINE: u32 = 0x6e0;
const LVT_TIMER: u32 = 0x832;
const VECTOR: u8 = 0x40;
/// An exit code that nobody knows: the run ends, and the registers stay.
const UNKNOWN: u64 = 0x3ff;

struct Bench {
    v: TestVcpu,
    page: &'static Page,
}

fn word(page: &Page, offset: usize) -> u64 {
    let bytes = page.bytes();
    u64::from_le_bytes(core::array::from_fn(|n| bytes[offset + n].load(Relaxed)))
}

fn set_word(page: &Page, offset: usize, value: u64) {
    for (byte, value) in page.bytes()[offset..].iter().zip(value.to_le_bytes()) {
        AtomicU8::store(byte, value, Relaxed);
    }
}

fn wrmsr(msr: u32, value: u64) -> impl FnMut(&mut Vmcb, &mut Gprs) + Send + Clone + 'static {
    move |vmcb, gprs| {
        (gprs.0[RCX], gprs.0[RDX]) = (msr.into(), value >> 32);
        vmcb.save.rax = value & 0xffff_ffff;
        exit(ExitCode::Msr)(vmcb, gprs);
        vmcb.control.exit_info_1 = 1;
    }
}

impl Bench {
    /// A vCPU in TSC-deadline mode whose guest has the page mapped and the feature on.
    fn new() -> Self {
        let machine = Machine::default();
        let vm = vm(&machine);
        let mut v = add_vcpu(&machine, &vm, 0);
        let mut entries = rig::offered(true).cpuid.entries().to_vec();
        for entry in entries.iter_mut().filter(|entry| entry.leaf == 1) {
            entry.ecx |= 1 << 24;
        }
        v.set_cpuid(&entries).unwrap();
        let page: &'static Page = Box::leak(Box::new(Page::zeroed().unwrap()));
        let region = Region { slot: 0, flags: 0, gpa: PAGE, size: 4096, hva: page.hpa().0 };
        vm.memory().set_region(&region, &**vm).unwrap();
        v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
        v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
        v.write_msr(LVT_TIMER, (1 << 18) | u64::from(VECTOR), By::Vmm).unwrap();
        v.write_msr(LAZY, PAGE | 1, By::Vmm).unwrap();
        let mut bench = Self { v, page };
        bench.touch();
        bench
    }

    /// The guest writes to its page, so that it is mapped.
    fn touch(&mut self) {
        self.run([|vmcb: &mut Vmcb, _: &mut Gprs| {
            vmcb.control.exit_code = ExitCode::Npf.0;
            vmcb.control.exit_info_1 = (1 << 32) | 2;
            vmcb.control.exit_info_2 = PAGE;
        }]);
    }

    /// Plays these exits and then one that ends the run; what it all executed.
    fn run<S: FnMut(&mut Vmcb, &mut Gprs) + Send + 'static>(
        &mut self,
        steps: impl IntoIterator<Item = S>,
    ) -> Counts {
        for step in steps {
            self.v.backend().cpu().inner().then(step);
        }
        self.v.backend().cpu().inner().then(|vmcb, _| vmcb.control.exit_code = UNKNOWN);
        let before = self.v.backend().cpu().counts();
        let end = self.v.run(&RunInput::default());
        assert!(matches!(end, UserExit::InternalError { .. }), "{end:?}");
        assert_eq!(self.v.backend().cpu().inner().steps_left(), 0);
        self.v.backend().cpu().counts().since(&before)
    }

    fn armed(&self) -> u64 {
        word(self.page, 0)
    }

    /// What the guest does for a deadline that is not before the armed one.
    fn store_pending(&self, deadline: u64) {
        set_word(self.page, 8, deadline);
    }

    /// A deadline so far ahead; one tick is a nanosecond here.
    fn ahead(&mut self, ticks: u64) -> u64 {
        self.v.read_msr(0x10, By::Vmm).unwrap() + ticks
    }

    /// Time passes, for the host's timer and the guest's TSC.
    fn pass(&mut self, ticks: u64) {
        self.v.backend().cpu().inner().tsc += ticks;
        clock().advance(ticks);
    }

    fn pending_interrupt(&self) -> Option<u8> {
        self.v.shared().lapic.highest_pending().map(|vector| vector.0)
    }
}

#[test]
fn a_later_deadline_by_the_msr_is_one_vmrun_with_the_page_told() {
    let mut bench = Bench::new();
    let first = bench.ahead(1_000_000);
    let step = |n: u64| wrmsr(DEADLINE, first + n * 1000);
    // The first arms the host timer; the others are later and leave it alone.
    let one = bench.run((0..2).map(step));
    let eleven = bench.run((2..14).map(step));
    let ten = eleven.since(&one);
    assert_eq!(ten.of(Op::Vmrun), 10);
    assert_eq!(bench.armed(), first + 13 * 1000);
    let again = bench.run((14..26).map(step));
    let none = again.since(&eleven);
    assert_only_vmrun(&none);
    assert!(again.of(Op::Rdtsc) <= 12 * 2 + 2, "{}", again.of(Op::Rdtsc));
}

#[test]
fn an_earlier_deadline_costs_the_hosts_segments_and_no_more() {
    let mut bench = Bench::new();
    let first = bench.ahead(1_000_000_000);
    let step = |n: u64| wrmsr(DEADLINE, first - n * 1000);
    let [one, eleven] = [0..2, 2..14].map(|range| bench.run(range.map(step)));
    let ten = eleven.since(&one);
    assert_eq!(bench.armed(), first - 13 * 1000);
    assert_eq!((ten.of(Op::Vmload), ten.of(Op::Vmsave)), (20, 10));
    assert_eq!((ten.of(Op::Clgi), ten.of(Op::Stgi)), (0, 0));
    assert_eq!((ten.of(Op::Rdmsr), ten.of(Op::Wrmsr)), (0, 0));
}

#[test]
fn a_deadline_that_comes_costs_no_msr_and_leaves_nothing_armed() {
    let mut bench = Bench::new();
    let deadline = bench.ahead(100_000);
    bench.run([wrmsr(DEADLINE, deadline)]);
    assert_eq!(bench.armed(), deadline);
    bench.store_pending(deadline);
    bench.pass(100_000);
    assert_eq!(bench.pending_interrupt(), None, "the vCPU decides, not the host timer");
    let counts = bench.run([|vmcb: &mut Vmcb, gprs: &mut Gprs| {
        assert_ne!(vmcb.control.int_ctl & (1 << 8), 0, "the offer");
        assert_eq!(vmcb.control.int_vector, u32::from(VECTOR));
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    }]);
    assert_eq!(bench.armed(), 0);
    assert_eq!((counts.of(Op::Vmrun), counts.of(Op::Vmload), counts.of(Op::Stgi)), (2, 2, 1));
    assert_eq!((counts.of(Op::Rdmsr), counts.of(Op::Wrmsr), counts.of(Op::Cpuid)), (0, 0, 0));
    assert!(counts.of(Op::Rdtsc) <= 4, "{}", counts.of(Op::Rdtsc));
}

#[test]
fn a_host_timer_for_a_deadline_that_was_moved_is_no_interrupt() {
    let mut bench = Bench::new();
    let deadline = bench.ahead(100_000);
    bench.run([wrmsr(DEADLINE, deadline)]);
    let later = deadline + 300_000;
    bench.store_pending(later);
    bench.pass(100_000);
    let counts = bench.run([|vmcb: &mut Vmcb, gprs: &mut Gprs| {
        assert_eq!(vmcb.control.int_ctl & (1 << 8), 0, "nothing to be taken");
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    }]);
    assert_eq!(bench.armed(), later);
    assert_eq!((counts.of(Op::Rdmsr), counts.of(Op::Wrmsr)), (0, 0));
    bench.pass(300_000);
    bench.run([exit(ExitCode::Wbinvd)]);
    assert_eq!((bench.armed(), bench.pending_interrupt()), (0, Some(VECTOR)));
}

#[test]
fn the_interrupt_is_not_before_its_time_though_the_host_timer_is() {
    let mut bench = Bench::new();
    let deadline = bench.ahead(100_000);
    bench.run([wrmsr(DEADLINE, deadline)]);
    // The host's clock runs ahead of the guest's TSC by a little.
    clock().advance(100_000);
    bench.v.backend().cpu().inner().tsc += 90_000;
    bench.run([exit(ExitCode::Wbinvd)]);
    assert_eq!((bench.armed(), bench.pending_interrupt()), (deadline, None));
    bench.pass(10_000);
    bench.run([exit(ExitCode::Wbinvd)]);
    assert_eq!((bench.armed(), bench.pending_interrupt()), (0, Some(VECTOR)));
    assert!(bench.ahead(0) >= deadline);
}

#[test]
fn a_page_that_is_not_mapped_is_told_before_the_guest_runs_on() {
    let mut bench = Bench::new();
    let (first, page) = (bench.ahead(1_000_000), bench.page);
    bench.run([wrmsr(DEADLINE, first)]);
    let hva = page.hpa().0;
    invalidate(Hva(hva), Hva(hva + 4096), || {});
    // What stands there meanwhile is another's.
    set_word(page, 0, u64::MAX);
    let second = first - 500_000;
    bench.v.backend().cpu().inner().then(wrmsr(DEADLINE, second));
    bench.run([move |vmcb: &mut Vmcb, gprs: &mut Gprs| {
        assert_eq!(word(page, 0), second);
        exit(ExitCode::Wbinvd)(vmcb, gprs);
    }]);
}

#[test]
fn a_deadline_that_is_given_up_while_the_page_is_not_mapped_stays_given_up() {
    let mut bench = Bench::new();
    let (first, page) = (bench.ahead(1_000_000), bench.page);
    bench.run([wrmsr(DEADLINE, first)]);
    let hva = page.hpa().0;
    invalidate(Hva(hva), Hva(hva + 4096), || {});
    bench.run([move |vmcb: &mut Vmcb, gprs: &mut Gprs| {
        // The promise allows the guest to keep a later one to itself; then it stops its timer.
        set_word(page, 8, first + 500);
        wrmsr(DEADLINE, 0)(vmcb, gprs);
    }]);
    assert_eq!((bench.armed(), bench.v.read_msr(DEADLINE, By::Vmm)), (0, Ok(0)));
    bench.pass(2_000_000);
    bench.run([exit(ExitCode::Wbinvd)]);
    assert_eq!(bench.pending_interrupt(), None);
}

#[test]
fn a_page_without_a_slot_costs_the_guest_its_laziness_and_no_interrupt() {
    let mut bench = Bench::new();
    let deadline = bench.ahead(100_000);
    bench.run([wrmsr(DEADLINE, deadline)]);
    let hva = bench.page.hpa().0;
    let gone = host::std_port::test::unmap(Hva(hva), 4096);
    invalidate(Hva(hva), Hva(hva + 4096), || {});
    bench.pass(100_000);
    bench.run([exit(ExitCode::Wbinvd)]);
    assert_eq!(bench.pending_interrupt(), Some(VECTOR));
    assert_eq!(bench.armed(), deadline, "out of reach");
    drop(gone);
    bench.run([exit(ExitCode::Wbinvd)]);
    assert_eq!(bench.armed(), 0, "put right");
}

#[test]
fn a_saved_deadline_is_the_newest_and_saving_changes_nothing() {
    let mut bench = Bench::new();
    let deadline = bench.ahead(100_000);
    bench.run([wrmsr(DEADLINE, deadline)]);
    bench.store_pending(deadline + 5);
    assert_eq!(bench.v.read_msr(DEADLINE, By::Vmm), Ok(deadline + 5));
    assert_eq!(bench.v.read_msr(DEADLINE, By::Guest), Ok(deadline));
    assert_eq!(bench.armed(), deadline);
    assert_eq!(bench.v.read_msr(LAZY, By::Vmm), Ok(PAGE | 1));
}
