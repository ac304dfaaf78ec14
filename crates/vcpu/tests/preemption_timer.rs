//! The APIC's timer by the VMX-preemption timer, on the model CPU: what a deadline costs while it is
//! armed, when it is moved and when it comes, and that no timer of the host runs for it but in sleep.
//!
//! A tick of the TSC is a nanosecond here, and the model's timer counts every 32nd.

mod rig;

use backend::{Gprs, Onward, RAX, RCX, RDX};
use cpu::{Counts, ModelVmcs, Op};
use gannet_vcpu::{By, RunInput, UserExit};
use host::page::Page;
use host::std_port::test::{clock, invalidate};
use mmu::Region;
use rig::vmx::{
    Step, VmxVcpu, exit, features, features_with_timer, play, reads_and_writes, step, vcpu_of,
};
use stats::Reason;
use vm::vm::Format;
use x86::Hva;
use x86::vmcs::{ExitReason, event, field};

const DEADLINE: u32 = 0x6e0;
const TSC: u32 = 0x10;
const LVT_TIMER: u32 = 0x832;
const INITIAL_COUNT: u32 = 0x838;
const DIVIDE: u32 = 0x83e;
const LAZY: u32 = 0x4b56_4d09;
const VECTOR: u64 = 0x40;
const PAGE: u64 = 0x6000;

/// One that the guest takes interrupts at, in x2APIC mode with the timer's LVT entry.
fn apic(v: &mut VmxVcpu, lvt: u64) {
    let mut entries = rig::offered(true).cpuid.entries().to_vec();
    for entry in entries.iter_mut().filter(|entry| entry.leaf == 1) {
        entry.ecx |= 1 << 24;
    }
    v.set_cpuid(&entries).unwrap();
    v.write_msr(0x1b, 0xfee0_0d00, By::Vmm).unwrap();
    v.write_msr(0x80f, 0x1ff, By::Vmm).unwrap();
    v.write_msr(LVT_TIMER, lvt | VECTOR, By::Vmm).unwrap();
}

/// In TSC-deadline mode.
fn timed() -> VmxVcpu {
    let (mut v, _) = vcpu_of(features_with_timer(), Format::npt(4, 0));
    apic(&mut v, 1 << 18);
    v
}

fn wrmsr(msr: u32, value: u64) -> impl FnMut(&mut ModelVmcs, &mut Gprs) + Send + Clone + 'static {
    move |vmcs, gprs| {
        (gprs.0[RAX], gprs.0[RCX], gprs.0[RDX]) = (value & 0xffff_ffff, msr.into(), value >> 32);
        exit(ExitReason::Wrmsr)(vmcs, gprs);
    }
}

fn cpuid(vmcs: &mut ModelVmcs, gprs: &mut Gprs) {
    (gprs.0[RAX], gprs.0[RCX]) = (0x8000_0008, 0);
    exit(ExitReason::Cpuid)(vmcs, gprs);
}

fn timer_exit(vmcs: &mut ModelVmcs, gprs: &mut Gprs) {
    vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
    exit(ExitReason::PreemptionTimer)(vmcs, gprs);
}

/// What the entry before this step was given.
fn takes_interrupt(vmcs: &mut ModelVmcs, gprs: &mut Gprs) {
    assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION), event::VALID | VECTOR as u32);
    vmcs.set(field::GUEST_RFLAGS, 2);
    exit(ExitReason::Wbinvd)(vmcs, gprs);
}

fn takes_none(vmcs: &mut ModelVmcs, gprs: &mut Gprs) {
    assert_eq!(vmcs.get(field::ENTRY_INTERRUPTION) & event::VALID, 0);
    exit(ExitReason::Wbinvd)(vmcs, gprs);
}

fn ahead(v: &mut VmxVcpu, ticks: u64) -> u64 {
    v.read_msr(TSC, By::Vmm).unwrap() + ticks
}

/// Time passes, for the host and the guest's TSC.
fn pass(v: &mut VmxVcpu, ticks: u64) {
    v.backend().cpu().inner().tsc += ticks;
    clock().advance(ticks);
}

/// What ten steps cost more than none.
fn ten_of(v: &mut VmxVcpu, f: impl Fn(u64) -> Step) -> Counts {
    // The first on a CPU finds out more.
    play(v, [step(cpuid)]);
    let one = play(v, [f(0)]);
    let eleven = play(v, (0..11).map(f));
    let ten = eleven.since(&one);
    assert_eq!(ten.of(Op::VmxEnter), 10);
    ten
}

#[test]
fn a_cpuid_exit_with_no_deadline_knows_of_no_timer() {
    let mut v = timed();
    let ten = ten_of(&mut v, |_| step(cpuid));
    assert_eq!((reads_and_writes(&ten), ten.of(Op::Rdtsc)), ((4, 1), 0));
    // Nor after one that was armed and taken back.
    let deadline = ahead(&mut v, 1_000_000);
    play(&mut v, [step(wrmsr(DEADLINE, deadline)), step(wrmsr(DEADLINE, 0))]);
    let ten = ten_of(&mut v, |_| step(cpuid));
    assert_eq!((reads_and_writes(&ten), ten.of(Op::Rdtsc)), ((4, 1), 0));
}

#[test]
fn a_cpuid_exit_with_a_deadline_armed_costs_an_rdtsc_and_a_vmwrite_more() {
    let mut v = timed();
    let deadline = ahead(&mut v, 1_000_000);
    play(&mut v, [step(wrmsr(DEADLINE, deadline))]);
    let ten = ten_of(&mut v, |_| step(cpuid));
    assert_eq!((reads_and_writes(&ten), ten.of(Op::Rdtsc)), ((4, 2), 10));
    assert_eq!(clock().armed_timers(), 0);
}

#[test]
fn moving_a_deadline_either_way_costs_that_and_the_look_at_the_tsc() {
    for direction in [1, u64::MAX] {
        let mut v = timed();
        let first = ahead(&mut v, 1_000_000_000);
        let at = move |n: u64| first.wrapping_add(direction.wrapping_mul(n * 1000));
        play(&mut v, [step(wrmsr(DEADLINE, first))]);
        let ten = ten_of(&mut v, move |n| step(wrmsr(DEADLINE, at(n))));
        // No kernel call, which would be seen by CR2.
        assert_eq!((reads_and_writes(&ten), ten.of(Op::Rdtsc)), ((4, 2), 10));
        assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(at(10)));
        assert_eq!(clock().armed_timers(), 0);
    }
}

#[test]
fn the_timer_is_set_for_what_is_left_at_each_entry() {
    let mut v = timed();
    let deadline = ahead(&mut v, 64_000);
    v.backend().cpu().inner().vmx.run_ticks = 16_000;
    let left = |from: u32, to: u32| {
        step(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
            let ticks = vmcs.get(field::PREEMPTION_TIMER);
            assert!((from..=to).contains(&ticks), "{ticks}");
            cpuid(vmcs, gprs);
        })
    };
    let none = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        assert_eq!(vmcs.get(field::PREEMPTION_TIMER), u32::MAX);
        cpuid(vmcs, gprs);
    };
    let steps = [
        step(none),
        step(wrmsr(DEADLINE, deadline)),
        // Two runs are over.
        left(990, 1001),
        left(490, 501),
        step(takes_none),
    ];
    // The last run goes on past the deadline: interrupts are off, so it is pending.
    play(&mut v, steps);
    assert_eq!(v.shared().lapic.highest_pending().map(|v| u64::from(v.0)), Some(VECTOR));
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(0));
}

#[test]
fn a_deadline_that_comes_is_one_exit_and_the_interrupt_with_no_timer_of_the_host() {
    let mut v = timed();
    let deadline = ahead(&mut v, 10_000);
    v.backend().cpu().inner().vmx.run_ticks = 10_000;
    let last = move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        assert_eq!(vmcs.get(field::PREEMPTION_TIMER), u32::MAX, "nothing is watched any more");
        takes_interrupt(vmcs, gprs);
    };
    // The run of the WRMSR itself comes before the deadline is set.
    let deadline_late = deadline + 10_000;
    let counts = play(&mut v, [step(wrmsr(DEADLINE, deadline_late)), step(timer_exit), step(last)]);
    assert_eq!(counts.of(Op::VmxEnter), 4);
    assert_eq!(clock().armed_timers(), 0);
    assert_eq!(v.shared().lapic.in_service().map(|v| u64::from(v.0)), Some(VECTOR));
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(0));
    let stats = &v.shared().stats;
    assert_eq!((stats.exits_by(Reason::Deadline), stats.exits_by(Reason::Interrupt)), (1, 0));
}

#[test]
fn what_an_expiry_costs() {
    let mut v = timed();
    play(&mut v, [step(cpuid)]);
    let mut cost = |deadlines: bool| {
        let far = ahead(&mut v, 1_000_000_000);
        let counts = play(&mut v, [step(wrmsr(DEADLINE, far)), step(cpuid), step(cpuid)]);
        if !deadlines {
            return counts;
        }
        let near = ahead(&mut v, 40_000);
        v.backend().cpu().inner().vmx.run_ticks = 20_000;
        let steps = [step(wrmsr(DEADLINE, near)), step(timer_exit), step(cpuid)];
        let counts = play(&mut v, steps);
        v.backend().cpu().inner().vmx.run_ticks = 0;
        counts
    };
    let (without, with) = (cost(false), cost(true));
    // A cpuid exit reads reason, length, RIP and RFLAGS and writes RIP. The timer's reads the reason,
    // and what an interrupt needs: RFLAGS, the shadow; the exit after that, what became of it.
    let (reads, writes) = (with.of(Op::Vmread), with.of(Op::Vmwrite));
    assert!(reads <= without.of(Op::Vmread), "{reads} {}", without.of(Op::Vmread));
    assert!(writes <= without.of(Op::Vmwrite) + 1, "{writes} {}", without.of(Op::Vmwrite));
    assert!(with.of(Op::Rdtsc) <= without.of(Op::Rdtsc) + 1);
    assert_eq!(with.of(Op::MovCr), without.of(Op::MovCr), "no kernel call");
}

#[test]
fn a_time_that_has_passed_before_the_entry_needs_no_entry() {
    let mut v = timed();
    let deadline = ahead(&mut v, 10_000);
    play(&mut v, [step(wrmsr(DEADLINE, deadline))]);
    pass(&mut v, 10_000);
    // In user space nothing is decided, so that whatever is saved, in whatever order, has it.
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(deadline));
    assert_eq!(v.shared().lapic.highest_pending(), None);
    let mut regs = v.regs();
    regs.rflags |= x86::Rflags::IF;
    v.set_regs(&regs);
    let counts = play(&mut v, [step(takes_interrupt)]);
    assert_eq!(counts.of(Op::VmxEnter), 2);
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(0));
}

#[test]
fn a_deadline_beyond_what_the_timer_counts_is_met_in_steps() {
    let mut v = timed();
    let whole = u64::from(u32::MAX) << 5;
    let deadline = ahead(&mut v, 3 * whole + 5_000);
    let most = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        assert_eq!(vmcs.get(field::PREEMPTION_TIMER), u32::MAX);
        takes_none(vmcs, gprs);
        timer_exit(vmcs, gprs);
    };
    play(&mut v, [step(wrmsr(DEADLINE, deadline)), step(most)]);
    v.backend().cpu().inner().vmx.run_ticks = whole;
    let rest = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        assert!(vmcs.get(field::PREEMPTION_TIMER) < 200);
        timer_exit(vmcs, gprs);
    };
    play(&mut v, [step(most), step(most), step(most), step(rest), step(takes_interrupt)]);
}

#[test]
fn a_guest_that_sets_its_tsc_moves_the_time_of_its_deadline_with_it() {
    let mut v = timed();
    let deadline = ahead(&mut v, 320_000_000);
    play(&mut v, [step(wrmsr(DEADLINE, deadline))]);
    let near = deadline - 3_200;
    let soon = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        let ticks = vmcs.get(field::PREEMPTION_TIMER);
        assert!((90..=101).contains(&ticks), "{ticks}");
        cpuid(vmcs, gprs);
    };
    play(&mut v, [step(wrmsr(TSC, near)), step(soon)]);
    // By the VMM, too; beyond it the deadline has come.
    v.write_msr(TSC, deadline + 1, By::Vmm).unwrap();
    play(&mut v, [step(takes_none)]);
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(0));
    assert_eq!(v.shared().lapic.highest_pending().map(|v| u64::from(v.0)), Some(VECTOR));
}

#[test]
fn a_timer_that_rings_for_nothing_is_no_interrupt() {
    let mut v = timed();
    play(&mut v, [step(timer_exit), step(takes_none)]);
    let deadline = ahead(&mut v, 1_000_000);
    play(&mut v, [step(wrmsr(DEADLINE, deadline)), step(timer_exit), step(takes_none)]);
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(deadline));
    // One whose mode was left: nothing is armed any more.
    v.write_msr(LVT_TIMER, VECTOR, By::Vmm).unwrap();
    pass(&mut v, 2_000_000);
    play(&mut v, [step(takes_none), step(takes_none)]);
    assert_eq!(v.shared().lapic.highest_pending(), None);
}

fn halt(vmcs: &mut ModelVmcs, gprs: &mut Gprs) {
    vmcs.set(field::GUEST_RFLAGS, x86::Rflags::IF.bits() | 2);
    exit(ExitReason::Hlt)(vmcs, gprs);
}

#[test]
fn a_halted_vcpu_is_woken_by_the_hosts_timer() {
    let mut v = timed();
    let deadline = ahead(&mut v, 100_000);
    let world = clock();
    let waker = std::thread::spawn({
        let world = world.clone();
        move || {
            host::std_port::test::adopt(&world);
            while world.armed_timers() == 0 {
                std::thread::yield_now();
            }
            let at = world.next_expiry().unwrap();
            assert!(world.advance_to_next_timer());
            at
        }
    });
    let began = world.now();
    play(&mut v, [step(wrmsr(DEADLINE, deadline)), step(halt), step(takes_interrupt)]);
    let rang = waker.join().unwrap();
    assert!((99_000..=100_100).contains(&(rang - began)), "{}", rang - began);
    assert_eq!((clock().armed_timers(), v.read_msr(DEADLINE, By::Vmm)), (0, Ok(0)));
}

#[test]
fn a_host_timer_that_fires_when_the_vcpu_is_awake_does_nothing() {
    let mut v = timed();
    let deadline = ahead(&mut v, 100_000);
    v.backend().cpu().inner().vmx.then(wrmsr(DEADLINE, deadline));
    v.backend().cpu().inner().vmx.then(halt);
    v.backend().cpu().inner().vmx.then(|_, _| unreachable!("it sleeps"));
    let waker = std::thread::spawn({
        let (world, shared) = (clock(), v.shared().clone());
        move || {
            host::std_port::test::adopt(&world);
            while world.armed_timers() == 0 {
                std::thread::yield_now();
            }
            shared.request_and_kick(vm::vcpu_shared::Request::Dead);
        }
    });
    assert_eq!(v.run(&RunInput::default()), UserExit::Dead);
    waker.join().unwrap();
    assert_eq!(clock().armed_timers(), 1);
    clock().advance(100_000);
    assert_eq!((clock().armed_timers(), v.shared().lapic.highest_pending()), (0, None));
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(deadline), "still to come by the guest's TSC");
}

#[test]
fn a_halted_vcpu_whose_time_has_come_does_not_sleep() {
    let mut v = timed();
    let deadline = ahead(&mut v, 100_000);
    v.backend().cpu().inner().vmx.run_ticks = 60_000;
    play(&mut v, [step(wrmsr(DEADLINE, deadline)), step(halt), step(takes_interrupt)]);
    assert_eq!(clock().armed_timers(), 0);
}

#[test]
fn a_countdown_is_watched_as_well_and_a_periodic_one_goes_on() {
    let (mut v, _) = vcpu_of(features_with_timer(), Format::npt(4, 0));
    apic(&mut v, 1 << 17);
    v.write_msr(DIVIDE, 0xb, By::Vmm).unwrap();
    // The test's clock stands still in a run, so one period is over between two runs.
    let period = 1_000_000;
    play(&mut v, [step(wrmsr(INITIAL_COUNT, period))]);
    for _ in 0..3 {
        pass(&mut v, period);
        let counts = play(&mut v, [step(takes_none)]);
        assert_eq!(counts.of(Op::VmxEnter), 2);
        let lapic = &v.shared().lapic;
        assert_eq!(lapic.highest_pending().map(|v| u64::from(v.0)), Some(VECTOR));
        let vector = lapic.highest_pending().unwrap();
        lapic.clear_irr(vector);
    }
    // A guest that sets its TSC makes it neither longer nor shorter.
    let far = ahead(&mut v, 1 << 40);
    let ticks = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        let ticks = vmcs.get(field::PREEMPTION_TIMER);
        assert!((31_000..=31_260).contains(&ticks), "{ticks}");
        cpuid(vmcs, gprs);
    };
    play(&mut v, [step(wrmsr(TSC, far)), step(ticks)]);
    assert_eq!(clock().armed_timers(), 0);
}

#[test]
fn without_the_timer_the_hosts_is_armed() {
    let (mut v, _) = vcpu_of(features(), Format::npt(4, 0));
    apic(&mut v, 1 << 18);
    let deadline = ahead(&mut v, 100_000);
    play(&mut v, [step(wrmsr(DEADLINE, deadline))]);
    assert_eq!(clock().armed_timers(), 1);
    pass(&mut v, 100_000);
    assert_eq!(v.shared().lapic.highest_pending().map(|v| u64::from(v.0)), Some(VECTOR));
}

/// A guest with the lazy TSC deadline and its page mapped.
fn lazy() -> (VmxVcpu, &'static Page) {
    let (mut v, vm) = vcpu_of(features_with_timer(), Format::npt(4, 0));
    apic(&mut v, 1 << 18);
    let page: &'static Page = Box::leak(Box::new(Page::zeroed().unwrap()));
    let region = Region { slot: 0, flags: 0, gpa: PAGE, size: 4096, hva: page.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    v.write_msr(LAZY, PAGE | 1, By::Vmm).unwrap();
    play(
        &mut v,
        [step(|vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
            exit(ExitReason::EptViolation)(vmcs, gprs);
            vmcs.set(field::EXIT_QUALIFICATION, 0x182);
            vmcs.set(field::GUEST_PHYSICAL_ADDRESS, PAGE);
        })],
    );
    (v, page)
}

fn word(page: &Page, offset: usize) -> u64 {
    use core::sync::atomic::Ordering::Relaxed;
    let bytes = page.bytes();
    u64::from_le_bytes(core::array::from_fn(|n| bytes[offset + n].load(Relaxed)))
}

fn set_word(page: &Page, offset: usize, value: u64) {
    use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
    for (byte, value) in page.bytes()[offset..].iter().zip(value.to_le_bytes()) {
        AtomicU8::store(byte, value, Relaxed);
    }
}

#[test]
fn the_lazy_deadline_is_looked_at_inside_the_loop() {
    let (mut v, page) = lazy();
    let first = ahead(&mut v, 40_000);
    let second = first + 40_000;
    v.backend().cpu().inner().vmx.run_ticks = 20_000;
    let steps = [
        step(wrmsr(DEADLINE, first)),
        step(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
            assert_eq!(word(page, 0), first);
            set_word(page, 8, second);
            timer_exit(vmcs, gprs);
        }),
        step(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
            assert_eq!(word(page, 0), second);
            takes_none(vmcs, gprs);
        }),
        step(timer_exit),
        step(move |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
            assert_eq!(word(page, 0), 0);
            takes_interrupt(vmcs, gprs);
        }),
    ];
    let counts = play(&mut v, steps);
    assert_eq!(counts.of(Op::VmxEnter), 6);
    assert_eq!(counts.of(Op::Rdmsr), play(&mut v, [step(cpuid)]).of(Op::Rdmsr), "one loop");
    assert_eq!(clock().armed_timers(), 0);
}

#[test]
fn a_lazy_deadline_whose_page_is_gone_is_looked_at_outside() {
    let (mut v, page) = lazy();
    let deadline = ahead(&mut v, 40_000);
    play(&mut v, [step(wrmsr(DEADLINE, deadline))]);
    set_word(page, 8, deadline + 70_000);
    let hva = page.hpa().0;
    invalidate(Hva(hva), Hva(hva + 4096), || {});
    pass(&mut v, 40_000);
    play(&mut v, [step(takes_none)]);
    assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(deadline + 70_000));
    pass(&mut v, 70_000);
    play(&mut v, [step(takes_none)]);
    assert_eq!(v.shared().lapic.highest_pending().map(|v| u64::from(v.0)), Some(VECTOR));
    assert_eq!((word(page, 0), clock().armed_timers()), (0, 0));
}

#[test]
fn a_timer_that_was_set_for_an_entry_that_did_not_come_is_set_anew() {
    let (mut v, page) = lazy();
    let hva = page.hpa().0;
    invalidate(Hva(hva), Hva(hva + 4096), || {});
    v.backend().cpu().inner().tsc_step = 320;
    let deadline = ahead(&mut v, 32_000);
    // The write reads the TSC; its page cannot be told inside the loop; the next entry reads it again.
    let second = |vmcs: &mut ModelVmcs, gprs: &mut Gprs| {
        assert!(vmcs.get(field::PREEMPTION_TIMER) <= 981, "{}", vmcs.get(field::PREEMPTION_TIMER));
        cpuid(vmcs, gprs);
    };
    play(&mut v, [step(wrmsr(DEADLINE, deadline)), step(second)]);
    assert_eq!(word(page, 0), deadline);
}

/// A time that has come and that nobody deals with: no entry takes place, so that no interrupt of the host
/// is seen. The loop is told to leave now and then.
#[test]
fn a_deadline_that_stays_due_does_not_hold_off_the_host() {
    use backend::{DeadlineWatch, Exit, Exits, Turn, WorldSwitch};
    let mut v = timed();
    let b = v.backend();
    b.begin_run();
    b.load(host::smp::cpu_id());
    b.watch(1);
    let mut gprs = Gprs::default();
    let mut left = 0;
    for _ in 0..64 {
        b.enter(&mut gprs);
        left += u32::from(b.exit() == Exit::Interrupt);
    }
    b.unload(Onward::ToGuest);
    assert_eq!(left, 4);
}

/// The page says nothing of the deadline, which goes on: a VMM may set the registers of a vCPU that is to run on.
#[test]
fn a_page_that_is_read_and_set_again_leaves_the_deadline() {
    let with_timer = timed();
    let (mut without, _) = vcpu_of(features(), Format::npt(4, 0));
    apic(&mut without, 1 << 18);
    for mut v in [with_timer, without] {
        let deadline = ahead(&mut v, 1_000_000);
        v.write_msr(DEADLINE, deadline, By::Vmm).unwrap();
        let mut page = [0; irqchip::lapic::REGISTER_PAGE];
        v.lapic_page(&mut page);
        v.set_lapic_page(&page).unwrap();
        assert_eq!(v.read_msr(DEADLINE, By::Vmm), Ok(deadline));
        assert_ne!(v.shared().lapic.next_expiry(), irqchip::lapic::Expiry::Never);
    }
}
