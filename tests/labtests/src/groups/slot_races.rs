//! Slots that go, and memory that goes, while something sleeps in the middle of it. A page that user space
//! serves (userfaultfd) makes a vCPU's fault last as long as the test likes.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::System;
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::{Memory, PAGE};
use crate::machine::threads::within;
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

use super::lazy_deadline::LAZY;

tests!("slot_races":
    memory_that_goes_while_its_slot_is_deleted_is_not_reached,
    memory_that_goes_while_its_slot_moves_is_not_reached,
    memory_that_goes_while_the_hypervisor_looks_at_it_is_not_written,
    broken_memory_is_a_signal_to_the_thread_that_runs_the_vcpu,
    a_slot_among_many_costs_no_more_than_one_of_few,
);

guest_code!(
    // Loads 8 bytes from RDI to RSI, says so, and again.
    loader,
    64,
    "0:",
    "mov (%rdi), %rax",
    "mov %rax, (%rsi)",
    "out %al, $PORT_MARK",
    "jmp 0b",
);

/// Where the slot that leaves is, and where it moves to.
const LEAVES: u64 = 0x4000_0000;
const MOVED: u64 = 0x4800_0000;
/// Where the page is that user space serves.
const SERVED: u64 = 0x5000_0000;
const PAGES: u64 = 16;
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

/// A userfaultfd over one range, whose faults nobody answers before [`Faults::answer`].
struct Faults {
    fd: i32,
    start: u64,
}

impl Faults {
    fn over(memory: &Memory) -> Outcome<Self> {
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        const MODE_MISSING: u64 = 1;
        // SAFETY: no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) }
            as i32;
        if fd < 0 {
            return skip(format!("no userfaultfd: {}", Errno::last()));
        }
        let faults = Self { fd, start: memory.hva() };
        let mut api = [0xaau64, 0, 0];
        let mut register = [memory.hva(), memory.bytes(), MODE_MISSING, 0];
        for (what, number, data) in
            [("API", API, api.as_mut_ptr()), ("REGISTER", REGISTER, register.as_mut_ptr())]
        {
            // SAFETY: the structures are as long as the numbers say.
            if unsafe { libc::ioctl(fd, number, data) } < 0 {
                return fail(format!("UFFDIO_{what}: {}", Errno::last()));
            }
        }
        Ok(faults)
    }

    /// Whether somebody comes to wait for a page.
    fn somebody_waits(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure.
        unsafe { libc::poll(&mut poll, 1, 5_000) == 1 }
    }

    /// Gives the first page, full of zeroes, to whoever waits for it.
    fn answer(&self) {
        const ZEROPAGE: libc::c_ulong = 0xc020_aa04;
        let mut zero = [self.start, PAGE, 0, 0];
        // SAFETY: the structure is as long as the number says.
        unsafe { libc::ioctl(self.fd, ZEROPAGE, zero.as_mut_ptr()) };
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        // SAFETY: our own descriptor.
        unsafe { libc::close(self.fd) };
    }
}

/// Two vCPUs that load: the first from the slot that leaves, the second from the page that user space
/// serves.
fn loaders(leaving: &Memory, served: &Memory) -> Outcome<Guest> {
    let guest = Guest::with_vcpus(Chip::None, Mode::Long, 2, loader())?;
    guest.vm.set_slot(1, 0, LEAVES, leaving.bytes(), leaving.hva()).granted("slot 1")?;
    guest.vm.set_slot(2, 0, SERVED, served.bytes(), served.hva()).granted("slot 2")?;
    for (vcpu, from, to) in [(0, LEAVES, RESULT), (1, SERVED, RESULT + 8)] {
        let regs = guest.vcpus[vcpu].regs()?;
        guest.vcpus[vcpu].set_regs(&kvm_regs { rdi: from, rsi: to, ..regs })?;
    }
    Ok(guest)
}

/// `change`: of slot 1, made by another thread while the second vCPU sleeps in its fault.
fn memory_goes_during(change: impl Fn(&Guest, u64) -> Outcome + Sync) -> Outcome {
    let leaving = Memory::new(PAGES * PAGE)?;
    (0..PAGES).for_each(|n| leaving.write(n * PAGE, SECRET));
    let served = Memory::new(PAGE)?;
    let faults = Faults::over(&served)?;
    let guest = &loaders(&leaving, &served)?;
    guest.reach_mark()?;
    equal("what lies in the slot", guest.result(0), SECRET)?;
    let changed = &AtomicU64::new(0);
    std::thread::scope(|s| {
        let asleep = s.spawn(|| guest.exit_of(1));
        let waits = faults.somebody_waits();
        let change = s.spawn(|| {
            let outcome = change(guest, leaving.hva());
            changed.store(1, Ordering::SeqCst);
            outcome
        });
        // It waits for whoever saw the slot.
        std::thread::sleep(Duration::from_millis(200));
        let early = changed.load(Ordering::SeqCst) != 0;
        leaving.unmap(0, PAGES * PAGE);
        guest.memory.write(RESULT, 0);
        let read = s.spawn(|| guest.exit());
        let quick = within(Duration::from_millis(300), || read.is_finished());
        let seen = guest.result(0);
        faults.answer();
        let slept = asleep.join().unwrap_or_else(|_| fail("the second vCPU's thread"));
        let change = change.join().unwrap_or_else(|_| fail("the changing thread"));
        // One that met the slot on its way out, or nothing, has it from now on.
        let exit = read.join().unwrap_or_else(|_| fail("the first vCPU's thread"));
        holds("a vCPU that sleeps in its fault", waits, waits)?;
        holds("a change that waits for it", !early, early)?;
        holds("no page of the former memory", seen != SECRET && guest.result(0) != SECRET, seen)?;
        slept?;
        change?;
        // Where the slot was is nothing; with what was read before that nobody is served.
        match exit {
            Ok(exit) => equal("exit", exit, Exit::mmio(false, LEAVES, &[0; 8])),
            Err(_) if quick => Ok(()),
            Err(trouble) => Err(trouble),
        }
    })
}

fn memory_that_goes_while_its_slot_is_deleted_is_not_reached() -> Outcome {
    memory_goes_during(|guest, hva| {
        guest.vm.set_slot(1, 0, LEAVES, 0, hva).granted("deletion").map(drop)
    })
}

fn memory_that_goes_while_its_slot_moves_is_not_reached() -> Outcome {
    memory_goes_during(|guest, hva| {
        guest.vm.set_slot(1, 0, MOVED, PAGES * PAGE, hva).granted("move").map(drop)
    })
}

guest_code!(
    // Writes to the page that the hypervisor shares with it, so that it is mapped, and says so.
    toucher,
    64,
    "0:",
    "lock orq $0, (%rdi)",
    "out %al, $PORT_MARK",
    "jmp 0b",
);

/// How long to try: LABTESTS_RACE seconds, or 3.
fn patience() -> Duration {
    let seconds = std::env::var("LABTESTS_RACE").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(3))
}

/// The lazy deadline's page is written by the hypervisor through the TDP tables while another thread
/// takes slot and memory away. What is allocated then must stay as it was filled. Wants two CPUs.
fn memory_that_goes_while_the_hypervisor_looks_at_it_is_not_written() -> Outcome {
    const FULL: u64 = u64::MAX;
    let guest = &Guest::new(Chip::Kernel, toucher())?;
    let vcpu = guest.vcpu();
    if !vcpu.set_msr(LAZY, 0)? {
        return skip("there is no lazy deadline");
    }
    vcpu.set_regs(&kvm_regs { rdi: LEAVES, ..vcpu.regs()? })?;
    let begun = Instant::now();
    let mut rounds = 0;
    while begun.elapsed() < patience() {
        rounds += 1;
        let page = Memory::new(PAGE)?;
        guest.vm.set_slot(1, 0, LEAVES, PAGE, page.hva()).granted("slot")?;
        guest.reach_mark()?;
        let stop = &AtomicU64::new(0);
        let wrong = std::thread::scope(|s| {
            let writer = s.spawn(|| {
                while stop.load(Ordering::SeqCst) == 0 {
                    vcpu.set_msr(LAZY, LEAVES | 1)?;
                    vcpu.set_msr(LAZY, 0)?;
                }
                Ok(())
            });
            guest.vm.set_slot(1, 0, LEAVES, 0, 0).granted("deletion")?;
            drop(page);
            let other = Memory::new(16 * PAGE)?;
            for word in (0..16 * PAGE).step_by(8) {
                other.write(word, FULL);
            }
            std::thread::yield_now();
            stop.store(1, Ordering::SeqCst);
            writer.join().unwrap_or_else(|_| fail("the writing thread"))?;
            Ok((0..16 * PAGE).step_by(8).find(|&word| other.read(word) != FULL))
        })?;
        equal("a word that nobody wrote", wrong, None)?;
    }
    holds("some rounds", rounds > 10, rounds)
}

static CODE: AtomicI32 = AtomicI32::new(0);
static ADDRESS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo.
    unsafe {
        CODE.store((*info).si_code, Ordering::SeqCst);
        ADDRESS.store((*info).si_addr() as u64, Ordering::SeqCst);
    }
}

fn broken_memory_is_a_signal_to_the_thread_that_runs_the_vcpu() -> Outcome {
    const MADV_HWPOISON: i32 = 100;
    const BUS_MCEERR_AR: i32 = 4;
    let (memory, other) = (Memory::new(PAGES * PAGE)?, Memory::new(PAGE)?);
    memory.write(0, SECRET);
    let guest = loaders(&memory, &other)?;
    guest.reach_mark()?;
    // SAFETY: a handler that stores two words.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
    if let Err(error) = memory.advise(0, PAGE, MADV_HWPOISON) {
        return skip(format!("memory cannot be broken here: {error}"));
    }
    CODE.store(0, Ordering::SeqCst);
    let run = guest.vcpu().run();
    equal("KVM_RUN", run.err().map(|errno| errno.0), Some(libc::EINTR))?;
    equal("the signal's code", CODE.load(Ordering::SeqCst), BUS_MCEERR_AR)?;
    equal("its address", ADDRESS.load(Ordering::SeqCst), memory.hva())
}

fn a_slot_among_many_costs_no_more_than_one_of_few() -> Outcome {
    let system = System::open()?;
    let slots = system.extension(KVM_CAP_NR_MEMSLOTS).min(32_000) as u32;
    if slots < 8_000 {
        return skip(format!("only {slots} slots"));
    }
    let (vm, memory) = (system.create_vm()?, Memory::new(PAGE)?);
    let add = |from: u32, to: u32| -> Outcome<Duration> {
        let begun = Instant::now();
        for slot in from..to {
            vm.set_slot(slot, 0, u64::from(slot) << 13, PAGE, memory.hva()).granted("slot")?;
        }
        Ok(begun.elapsed())
    };
    let few = add(0, 1_000)?;
    add(1_000, slots - 1_000)?;
    let many = add(slots - 1_000, slots)?;
    holds("no more than eight times as long", many < few * 8, (few, many))
}
