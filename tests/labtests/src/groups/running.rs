//! KVM_RUN and the threads and signals around it (KVM API §4.10, §4.20, §5).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::threads::{Target, eventually, prepare, within};
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds, skip};
use crate::runner::{await_end, tests};

tests!("running":
    immediate_exit_returns_before_the_guest_runs,
    immediate_exit_completes_what_user_space_answered,
    a_signal_ends_a_guest_that_spins,
    a_signal_ends_a_guest_that_is_halted,
    a_pending_signal_ends_the_run_at_once,
    an_argument_of_run_is_refused,
    the_signal_mask_holds_during_the_run_only,
    a_signal_mask_of_a_wrong_length_is_einval,
    a_signal_mask_of_a_32_bit_vmm_is_the_same,
    sigkill_cannot_be_masked,
    sigstop_cannot_be_masked,
    a_second_thread_waits_for_the_vcpus_first,
    a_second_run_waits_for_the_first,
    a_vcpu_may_move_between_threads,
    closing_the_files_does_not_stop_a_running_guest,
    a_vmm_killed_while_its_guest_spins_ends,
    a_vmm_killed_while_its_guest_is_halted_ends,
    a_vmm_that_exits_while_a_thread_runs_a_guest_ends,
);

guest_code!(spin, 64, "incq RESULT + 8", "0: incq RESULT", "pause", "jmp 0b");
guest_code!(halt, 64, "0: hlt", "incq RESULT", "jmp 0b");
guest_code!(
    read_device,
    64,
    "mov $NOWHERE, %ebx",
    "mov (%rbx), %eax",
    "mov %rax, RESULT",
    "out %al, $PORT_DONE",
);

fn immediate_exit_returns_before_the_guest_runs() -> Outcome {
    let guest = Guest::new(Chip::None, spin())?;
    guest.vcpu().set_immediate_exit(1);
    for _ in 0..3 {
        guest.vcpu().run().refused("KVM_RUN", libc::EINTR)?;
    }
    equal("the guest's steps", guest.result(0), 0)?;
    equal("rip", guest.vcpu().regs()?.rip, PROGRAM)
}

fn immediate_exit_completes_what_user_space_answered() -> Outcome {
    let guest = Guest::new(Chip::None, read_device())?;
    guest.expect("exit", Exit::mmio(false, NOWHERE, &[0; 4]))?;
    guest.vcpu().answer(&[0x78, 0x56, 0x34, 0x12]);
    guest.vcpu().set_immediate_exit(1);
    guest.vcpu().run().refused("KVM_RUN", libc::EINTR)?;
    equal("rax", guest.vcpu().regs()?.rax, 0x1234_5678)?;
    guest.vcpu().set_immediate_exit(0);
    guest.finish()?;
    equal("what it stored", guest.result(0), 0x1234_5678)
}

/// Runs the vCPU in a thread, waits for `ready`, interrupts the thread; what KVM_RUN said.
fn interrupted(
    guest: &Guest,
    ready: impl Fn(&Target) -> bool,
) -> Outcome<(Result<Exit, Errno>, u32)> {
    let target = Target::new();
    prepare();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.vcpu().run()
        });
        eventually("the guest runs", || ready(&target))?;
        holds("a guest that goes on", !run.is_finished(), "an end")?;
        target.kick();
        eventually("KVM_RUN returns", || run.is_finished())?;
        let answer = run.join().unwrap_or(Err(Errno(0)));
        // SAFETY: a field of the shared page.
        let reason = unsafe { (*guest.vcpu().page()).exit_reason };
        Ok((answer, reason))
    })
}

fn a_signal_ends_a_guest_that_spins() -> Outcome {
    let guest = Guest::new(Chip::None, spin())?;
    for _ in 0..3 {
        let before = guest.result(0);
        let (answer, reason) = interrupted(&guest, |_| guest.result(0) > before + 100)?;
        answer.refused("KVM_RUN", libc::EINTR)?;
        equal("exit_reason", reason, KVM_EXIT_INTR)?;
    }
    equal("times the guest began", guest.result(1), 1)
}

fn a_signal_ends_a_guest_that_is_halted() -> Outcome {
    let guest = Guest::new(Chip::Kernel, halt())?;
    for _ in 0..3 {
        let (answer, reason) = interrupted(&guest, Target::sleeps)?;
        answer.refused("KVM_RUN", libc::EINTR)?;
        equal("exit_reason", reason, KVM_EXIT_INTR)?;
    }
    equal("times it woke", guest.result(0), 0)
}

/// Blocks or unblocks SIGUSR1 in this thread.
fn block_signal(how: i32) {
    // SAFETY: a set of our own.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR1);
        libc::pthread_sigmask(how, &set, std::ptr::null_mut());
    }
}

/// Whether SIGUSR1 waits for this thread.
fn signal_is_pending() -> bool {
    // SAFETY: a set of our own.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigpending(&mut set);
        libc::sigismember(&set, libc::SIGUSR1) == 1
    }
}

fn a_pending_signal_ends_the_run_at_once() -> Outcome {
    // Pending but blocked, and unblocked by the mask of the run: the guest must not get a step.
    let guest = Guest::new(Chip::None, spin())?;
    prepare();
    block_signal(libc::SIG_BLOCK);
    set_mask(&guest, 0).granted("KVM_SET_SIGNAL_MASK")?;
    let me = Target::new();
    me.is_me();
    me.kick();
    guest.vcpu().run().refused("KVM_RUN", libc::EINTR)?;
    equal("the guest's steps", guest.result(0), 0)
}

fn an_argument_of_run_is_refused() -> Outcome {
    let guest = Guest::new(Chip::None, spin())?;
    guest.vcpu().call(ioctl::RUN, 1).refused("KVM_RUN with 1", libc::EINVAL)
}

#[repr(C)]
struct SignalMask {
    len: u32,
    set: [u32; 2],
}

fn set_mask(guest: &Guest, set: u64) -> crate::outcome::Reply {
    let mask = SignalMask { len: 8, set: [set as u32, (set >> 32) as u32] };
    guest.vcpu().send(ioctl::SET_SIGNAL_MASK, &mask)
}

fn the_signal_mask_holds_during_the_run_only() -> Outcome {
    let guest = Guest::new(Chip::None, spin())?;
    prepare();
    block_signal(libc::SIG_BLOCK);
    let me = Target::new();
    me.is_me();
    set_mask(&guest, 0).granted("KVM_SET_SIGNAL_MASK")?;
    me.kick();
    guest.vcpu().run().refused("KVM_RUN", libc::EINTR)?;
    holds("a signal that still waits", signal_is_pending(), "none")?;
    // Its handler has not run: the mask of the thread came back first. And again:
    guest.vcpu().run().refused("KVM_RUN", libc::EINTR)?;
    block_signal(libc::SIG_UNBLOCK);
    holds("a signal that has been taken", !signal_is_pending(), "one")?;
    // NULL: no mask of its own any more. A blocked signal then does not end a run.
    guest.vcpu().call(ioctl::SET_SIGNAL_MASK, 0).granted("NULL")?;
    let stop = AtomicBool::new(false);
    let worker = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            block_signal(libc::SIG_BLOCK);
            worker.is_me();
            let answer = guest.vcpu().run();
            stop.store(true, Ordering::SeqCst);
            answer
        });
        let before = guest.result(0);
        eventually("the guest runs", || guest.result(0) > before + 100)?;
        worker.kick();
        let ended = within(Duration::from_millis(20), || stop.load(Ordering::SeqCst));
        guest.vcpu().set_immediate_exit(1);
        // SAFETY: SIGUSR2 with a handler that does nothing.
        unsafe {
            libc::signal(libc::SIGUSR2, ignore as *const () as usize);
            libc::syscall(libc::SYS_tgkill, libc::getpid(), worker.id(), libc::SIGUSR2);
        }
        eventually("KVM_RUN returns", || run.is_finished())?;
        holds("a blocked signal that changes nothing", !ended, "an end")
    })
}

extern "C" fn ignore(_: libc::c_int) {}

fn a_signal_mask_of_a_wrong_length_is_einval() -> Outcome {
    let guest = Guest::new(Chip::None, spin())?;
    for len in [0, 4, 7, 9, 16, u32::MAX] {
        let mask = SignalMask { len, set: [0; 2] };
        let answer = guest.vcpu().send(ioctl::SET_SIGNAL_MASK, &mask);
        answer.refused(&format!("length {len}"), libc::EINVAL)?;
    }
    Ok(())
}

/// An ioctl as a 32-bit program makes it: everything lies below 4 GiB.
fn call_32(descriptor: i32, request: u64, argument: u64) -> i32 {
    let answer: i64;
    // SAFETY: the kernel reads the structure that the argument names.
    unsafe {
        core::arch::asm!(
            "push rbx",
            "mov ebx, {descriptor:e}",
            "int 0x80",
            "pop rbx",
            descriptor = in(reg) descriptor,
            inlateout("rax") 54_i64 => answer,
            in("rcx") request & 0xffff_ffff,
            in("rdx") argument,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    answer as i32
}

fn a_signal_mask_of_a_32_bit_vmm_is_the_same() -> Outcome {
    let guest = Guest::new(Chip::None, spin())?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
    // SAFETY: a new mapping.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0) };
    let mask = page.cast::<SignalMask>();
    let set = |len, low, high| {
        // SAFETY: a page of ours.
        unsafe { mask.write(SignalMask { len, set: [low, high] }) };
        call_32(guest.vcpu().descriptor(), ioctl::SET_SIGNAL_MASK, mask as u64)
    };
    prepare();
    block_signal(libc::SIG_BLOCK);
    match set(8, 0, 0) {
        answer if answer == -libc::ENOSYS => return skip("a kernel without 32-bit programs"),
        answer => equal("KVM_SET_SIGNAL_MASK", answer, 0)?,
    }
    let me = Target::new();
    me.is_me();
    me.kick();
    guest.vcpu().run().refused("KVM_RUN", libc::EINTR)?;
    equal("the guest's steps", guest.result(0), 0)?;
    for len in [0, 4, 16] {
        equal(&format!("length {len}"), set(len, 0, 0), -libc::EINVAL)?;
    }
    Ok(())
}

/// A VMM whose vCPU masks all signals, in a child.
fn masked(wait: Duration, end: fn(libc::pid_t)) -> Outcome {
    killed_with(Chip::None, spin(), wait, end, |guest| {
        let _ = set_mask(guest, u64::MAX);
    })
}

fn sigkill_cannot_be_masked() -> Outcome {
    masked(Duration::from_millis(50), kill)
}

fn sigstop_cannot_be_masked() -> Outcome {
    masked(Duration::from_millis(50), |child| {
        // SAFETY: our own child; the status has a place.
        unsafe {
            libc::kill(child, libc::SIGSTOP);
            let mut status = 0;
            let start = std::time::Instant::now();
            while libc::waitpid(child, &mut status, libc::WUNTRACED | libc::WNOHANG) == 0
                && start.elapsed() < Duration::from_secs(3)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            // A child that stopped is killed as the test expects; of one that did not nothing is heard.
            if libc::WIFSTOPPED(status) {
                libc::kill(child, libc::SIGKILL);
            }
        }
    })
}

/// While one thread is in KVM_RUN with a halted guest, another calls `command`, which has to wait.
fn waits_for_the_first(command: impl FnOnce(&Guest) -> crate::outcome::Reply + Send) -> Outcome {
    let guest = Guest::new(Chip::Kernel, halt())?;
    let (first, second) = (Target::new(), Target::new());
    prepare();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            first.is_me();
            guest.vcpu().run()
        });
        holds("a halted guest", first.sleeps(), first.state())?;
        let other = scope.spawn(|| {
            second.is_me();
            command(&guest)
        });
        std::thread::sleep(Duration::from_millis(30));
        holds("the second thread to wait", !other.is_finished(), "an end")?;
        holds("the first thread to run on", !run.is_finished(), "an end")?;
        // Whatever is next to run must not halt: immediate_exit is looked at when it begins.
        guest.vcpu().set_immediate_exit(1);
        first.kick();
        eventually("the first returns", || run.is_finished())?;
        eventually("the second returns", || other.is_finished())?;
        run.join().unwrap_or(Err(Errno(0))).refused("first", libc::EINTR)?;
        match other.join().unwrap_or(Err(Errno(0))) {
            Ok(_) | Err(Errno(libc::EINTR)) => Ok(()),
            Err(other) => fail(format!("second: expected success or EINTR got {other}")),
        }
    })
}

fn a_second_thread_waits_for_the_vcpus_first() -> Outcome {
    waits_for_the_first(|guest| {
        let mut regs = kvm_regs::default();
        guest.vcpu().exchange(ioctl::GET_REGS, &mut regs)
    })
}

fn a_second_run_waits_for_the_first() -> Outcome {
    waits_for_the_first(|guest| guest.vcpu().call(ioctl::RUN, 0))
}

guest_code!(mark, 64, "0: incq RESULT", "out %al, $PORT_MARK", "jmp 0b");

fn a_vcpu_may_move_between_threads() -> Outcome {
    let guest = Guest::new(Chip::Kernel, mark())?;
    for _ in 0..8 {
        guest.reach_mark()?;
        std::thread::scope(|scope| {
            let there = scope.spawn(|| guest.reach_mark());
            there.join().unwrap_or_else(|_| fail("the thread died"))
        })?;
    }
    equal("steps", guest.result(0), 16)
}

fn closing_the_files_does_not_stop_a_running_guest() -> Outcome {
    let guest = Guest::new(Chip::None, spin())?;
    let target = Target::new();
    prepare();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.vcpu().run()
        });
        eventually("the guest runs", || guest.result(0) > 100)?;
        // The process ends after this test without closing these numbers a second time: they are
        // replaced, as another thread of a VMM might do.
        for file in [guest.vcpu().descriptor(), guest.vm.descriptor(), guest.system.descriptor()] {
            // SAFETY: replaces our own descriptors by others of our own.
            unsafe { libc::dup2(0, file) };
        }
        let before = guest.result(0);
        eventually("the guest runs on", || guest.result(0) > before + 100)?;
        target.kick();
        eventually("KVM_RUN returns", || run.is_finished())?;
        run.join().unwrap_or(Err(Errno(0))).refused("KVM_RUN", libc::EINTR)
    })
}

/// Starts a VMM in a child that runs `code`, waits, ends it by `end`.
fn killed(chip: Chip, code: &[u8], wait: Duration, end: fn(libc::pid_t)) -> Outcome {
    killed_with(chip, code, wait, end, |_| ())
}

/// Starts a VMM in a child that runs `code` in a guest that `prepare` had first, waits, ends it by `end`.
fn killed_with(
    chip: Chip,
    code: &[u8],
    wait: Duration,
    end: fn(libc::pid_t),
    prepare: fn(&Guest),
) -> Outcome {
    let mut ends = [0; 2];
    // SAFETY: room for both.
    unsafe { libc::pipe(ends.as_mut_ptr()) };
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        if let Ok(guest) = Guest::new(chip, code) {
            prepare(&guest);
            // SAFETY: one byte to the parent: about to run.
            unsafe { libc::write(ends[1], c"!".as_ptr().cast(), 1) };
            let _ = guest.vcpu().run();
        }
        // SAFETY: not reached if all is well.
        unsafe { libc::_exit(99) };
    }
    let mut byte = 0_u8;
    // SAFETY: one byte of room; our copy of the other end is closed so that a dead child is noticed.
    let came = unsafe {
        libc::close(ends[1]);
        libc::read(ends[0], (&raw mut byte).cast(), 1)
    };
    equal("signs of the VMM", came, 1)?;
    std::thread::sleep(wait);
    end(child);
    match await_end(child, Duration::from_secs(5)) {
        Some(status) if libc::WIFSIGNALED(status) => {
            equal("signal", libc::WTERMSIG(status), libc::SIGKILL)
        }
        other => fail(format!("expected a kill got wait status {other:x?}")),
    }
}

fn kill(child: libc::pid_t) {
    // SAFETY: our own child.
    unsafe { libc::kill(child, libc::SIGKILL) };
}

fn a_vmm_killed_while_its_guest_spins_ends() -> Outcome {
    killed(Chip::None, spin(), Duration::from_millis(20), kill)?;
    killed(Chip::KernelAndPit, spin(), Duration::ZERO, kill)
}

fn a_vmm_killed_while_its_guest_is_halted_ends() -> Outcome {
    killed(Chip::Kernel, halt(), Duration::from_millis(20), kill)
}

fn a_vmm_that_exits_while_a_thread_runs_a_guest_ends() -> Outcome {
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = match Guest::new(Chip::Kernel, spin()) {
            Ok(guest) => std::thread::scope(|scope| {
                scope.spawn(|| guest.vcpu().run());
                let ran = within(Duration::from_secs(5), || guest.result(0) > 100);
                // SAFETY: ends all threads of the child, the running one with them.
                unsafe { libc::_exit(if ran { 42 } else { 43 }) }
            }),
            Err(_) => 44,
        };
        // SAFETY: ends the child, which has no other thread any more.
        unsafe { libc::_exit(code) };
    }
    match await_end(child, Duration::from_secs(10)) {
        Some(status) if libc::WIFEXITED(status) => {
            equal("exit code", libc::WEXITSTATUS(status), 42)
        }
        other => fail(format!("expected an exit got wait status {other:x?}")),
    }
}
