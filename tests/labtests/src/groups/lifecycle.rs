//! VMs come and go, in every order, and leave nothing behind.

use std::os::fd::{AsRawFd, OwnedFd};

use kvm_bindings::*;

use crate::kvm::file::{Commands, System, own};
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::memory::Memory;
use crate::objects::gives_back;
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds};
use crate::runner::{await_end, tests};

tests!("lifecycle":
    files_may_be_closed_in_any_order,
    a_vm_may_go_while_its_irqfds_are_there,
    an_eventfd_outlives_its_vm,
    many_vms_exist_at_once,
    two_hundred_vms_come_and_go_and_leave_no_memory_behind,
    a_vm_that_was_refused_leaves_no_memory_behind,
    a_signal_interrupts_the_making_of_a_vm_and_does_nothing_else,
    killed_vmms_leave_no_memory_behind,
    processes_that_make_a_vm_leave_no_address_space_behind,
    eventfds_that_come_and_go_leave_no_memory_behind,
    vcpus_go_while_their_timers_fire,
);

guest_code!(short, 64, "mov $0xd, %eax", "cpuid", "movq $1, FREE", done!());

fn files_may_be_closed_in_any_order() -> Outcome {
    for order in 0..6 {
        let guest = Guest::with_vcpus(Chip::KernelAndPit, Mode::Long, 1, short())?;
        guest.finish()?;
        let Guest { vcpus, vm, memory, system } = guest;
        let mut files: [Option<Box<dyn std::any::Any>>; 4] = [
            Some(Box::new(vcpus)),
            Some(Box::new(vm)),
            Some(Box::new(memory)),
            Some(Box::new(system)),
        ];
        for step in 0..4 {
            files[(order + step * (1 + order % 2 * 2)) % 4] = None;
        }
        files.fill_with(|| None);
    }
    Ok(())
}

fn eventfd() -> OwnedFd {
    // SAFETY: plain numbers.
    own(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

fn assigned(guest: &Guest, irqfd: &OwnedFd, bell: &OwnedFd) -> Outcome {
    let request = kvm_irqfd { fd: irqfd.as_raw_fd() as u32, gsi: 4, ..Default::default() };
    guest.vm.send(ioctl::IRQFD, &request).granted("KVM_IRQFD")?;
    let (addr, fd) = (0xd000_0000, bell.as_raw_fd());
    let request = kvm_ioeventfd { addr, len: 4, fd, ..Default::default() };
    guest.vm.send(ioctl::IOEVENTFD, &request).granted("KVM_IOEVENTFD").map(drop)
}

fn a_vm_may_go_while_its_irqfds_are_there() -> Outcome {
    let (irqfd, bell) = (eventfd(), eventfd());
    for _ in 0..5 {
        let guest = Guest::new(Chip::Kernel, short())?;
        assigned(&guest, &irqfd, &bell)?;
        guest.finish()?;
    }
    Ok(())
}

fn an_eventfd_outlives_its_vm() -> Outcome {
    let (irqfd, bell) = (eventfd(), eventfd());
    let guest = Guest::new(Chip::Kernel, short())?;
    assigned(&guest, &irqfd, &bell)?;
    drop(guest);
    let one = 1_u64;
    // SAFETY: 8 bytes.
    let written = unsafe { libc::write(irqfd.as_raw_fd(), (&raw const one).cast(), 8) };
    equal("bytes taken", written, 8)
}

fn many_vms_exist_at_once() -> Outcome {
    let guests: Vec<Guest> =
        (0..16).map(|_| Guest::new(Chip::Kernel, short())).collect::<Outcome<_>>()?;
    guests.iter().try_for_each(Guest::finish)?;
    for guest in guests.iter().rev() {
        guest.place(0, Mode::Long)?;
        guest.finish()?;
    }
    Ok(())
}

/// Kilobytes of memory that are free, or could be: what is in use by the kernel itself is not.
fn free_kilobytes_now() -> i64 {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let number = |text: &str| text.split_whitespace().next().and_then(|n| n.parse::<i64>().ok());
    let (meminfo, zoneinfo) = (read("/proc/meminfo"), read("/proc/zoneinfo"));
    let field = |name: &str| {
        meminfo.lines().find_map(|line| number(line.strip_prefix(name)?)).unwrap_or_default()
    };
    // Free pages that each CPU keeps for itself are not in MemFree.
    let kept = |line: &str| number(line.trim().strip_prefix("count:")?);
    let kept: i64 = zoneinfo.lines().filter_map(kept).sum();
    kept * 4 + ["MemFree:", "Cached:", "Buffers:", "SReclaimable:"].map(field).iter().sum::<i64>()
}

/// Kilobytes that are free when their number has come to rest: the kernel frees much of what it does not need later.
fn free_kilobytes() -> i64 {
    let mut last = 0;
    for _ in 0..20 {
        let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
        std::thread::sleep(std::time::Duration::from_millis(40));
        let now = free_kilobytes_now();
        if now - last < 64 {
            return now;
        }
        last = now;
    }
    last
}

/// Runs rounds of `work`; a leak takes at least `leak` kilobytes in each.
pub fn leaves_nothing(leak: i64, mut work: impl FnMut() -> Outcome) -> Outcome {
    const ROUNDS: i64 = 4;
    work()?;
    let before = free_kilobytes();
    let mut lost = Vec::new();
    for _ in 0..ROUNDS {
        work()?;
        lost.push(before - free_kilobytes());
    }
    // Noise comes once and goes both ways, a leak comes every time.
    let leaked = lost.last().is_some_and(|&all| all >= leak * ROUNDS) && lost.is_sorted();
    if leaked {
        return fail(format!("memory: expected it back got {lost:?} kB lost, round by round"));
    }
    Ok(())
}

fn two_hundred_vms_come_and_go_and_leave_no_memory_behind() -> Outcome {
    // 40 VMs of 2 vCPUs per round, five rounds: a page lost by each vCPU is 320 kB.
    leaves_nothing(300, || {
        for index in 0..40 {
            let chip = [Chip::None, Chip::Kernel, Chip::KernelAndPit][index % 3];
            let guest = Guest::with_vcpus(chip, Mode::Long, 2, short())?;
            guest.finish()?;
        }
        Ok(())
    })
}

fn a_vm_that_was_refused_leaves_no_memory_behind() -> Outcome {
    // With `--failing` each of the calls was refused at every point, a hundred of them and more: a page lost at every fourth.
    leaves_nothing(100, || Guest::with_vcpus(Chip::KernelAndPit, Mode::Long, 1, short())?.finish())
}

extern "C" fn nothing(_: libc::c_int) {}

/// A signal of the real-time timer in `micros` from now; 0: none.
fn signal_in(micros: i64) {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    // One signal and no period: a slow host would come to nothing but signals.
    let timer = libc::itimerval {
        it_interval: none,
        it_value: libc::timeval { tv_sec: 0, tv_usec: micros },
    };
    // SAFETY: a structure of ours.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) };
}

fn a_signal_interrupts_the_making_of_a_vm_and_does_nothing_else() -> Outcome {
    // SAFETY: a handler that does nothing, without SA_RESTART.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
    }
    let system = System::open()?;
    let mut interrupted = 0;
    // From a signal that comes before the call to one that comes when the VM is there.
    for turn in 0..250 {
        // However slow the machine is: from a microsecond to some 16 ms, again and again.
        let micros = (1 << (turn % 15)) + turn;
        signal_in(micros);
        // Not by `call`: with `--failing` that is refused again and again, and the signal is past then.
        // SAFETY: a plain number.
        let made = unsafe { libc::ioctl(system.descriptor(), ioctl::CREATE_VM, 0) };
        let errno = Errno::last();
        signal_in(0);
        if made >= 0 {
            drop(own(made));
            continue;
        }
        equal("what KVM_CREATE_VM is refused with", errno, Errno(libc::EINTR))?;
        interrupted += 1;
    }
    holds("a call that was interrupted", interrupted != 0, interrupted)?;
    system.create_vm().map(drop)
}

guest_code!(
    spin,
    64,
    "sti",
    "0: incq (%rbx)",
    "add $4096, %rbx",
    "and $0x3fffff, %ebx",
    "or $0x200000, %ebx",
    "jmp 0b"
);

fn killed_vmms_leave_no_memory_behind() -> Outcome {
    leaves_nothing(200, || {
        for _ in 0..6 {
            // SAFETY: this process has one thread.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let memory = Memory::new(4 << 20);
                let guest =
                    memory.and_then(|m| Guest::over(m, Chip::KernelAndPit, Mode::Long, 2, spin()));
                if let Ok(guest) = guest {
                    let mut regs = guest.vcpu().regs().unwrap_or_default();
                    regs.rbx = 0x20_0000;
                    let _ = guest.vcpu().set_regs(&regs);
                    let _ = guest.vcpu().run();
                }
                // SAFETY: not reached if all is well.
                unsafe { libc::_exit(1) };
            }
            std::thread::sleep(std::time::Duration::from_millis(15));
            // SAFETY: our own child.
            unsafe { libc::kill(child, libc::SIGKILL) };
            let ended = await_end(child, std::time::Duration::from_secs(5));
            holds("an end by the signal", ended == Some(libc::SIGKILL), ended)?;
        }
        System::open().map(drop)
    })
}

fn processes_that_make_a_vm_leave_no_address_space_behind() -> Outcome {
    const PROCESSES: i64 = 50;
    gives_back("mm_struct", PROCESSES, || {
        for _ in 0..PROCESSES {
            // SAFETY: this process has one thread.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let made = System::open().and_then(|system| system.create_vm());
                // SAFETY: ends this process, which has the VM still.
                unsafe { libc::_exit(made.is_err().into()) };
            }
            let ended = await_end(child, std::time::Duration::from_secs(5));
            equal("how a process that made a VM ends", ended, Some(0))?;
        }
        Ok(())
    })
}

fn eventfds_that_come_and_go_leave_no_memory_behind() -> Outcome {
    const EVENTFDS: i64 = 1000;
    let guest = Guest::new(Chip::Kernel, short())?;
    // The kernel's general caches, of which an eventfd's counter is an object.
    gives_back("kmalloc-", EVENTFDS, || {
        for _ in 0..EVENTFDS {
            let (irqfd, bell) = (eventfd(), eventfd());
            let fd = irqfd.as_raw_fd() as u32;
            for flags in [0, KVM_IRQFD_FLAG_DEASSIGN] {
                let request = kvm_irqfd { fd, gsi: 4, flags, ..Default::default() };
                guest.vm.send(ioctl::IRQFD, &request).granted("KVM_IRQFD")?;
            }
            let (addr, fd) = (0xd000_0000, bell.as_raw_fd());
            for flags in [0, 1 << kvm_ioeventfd_flag_nr_deassign] {
                let request = kvm_ioeventfd { addr, len: 4, fd, flags, ..Default::default() };
                guest.vm.send(ioctl::IOEVENTFD, &request).granted("KVM_IOEVENTFD")?;
            }
        }
        Ok(())
    })
}

guest_code!(
    // A timer of 1 ms, again and again, which nobody hears of.
    ticking,
    64,
    x2apic!(),
    "mov $0x832, %ecx",
    "mov $0x20040, %eax",
    "wrmsr",
    "mov $0x83e, %ecx",
    "mov $0xb, %eax",
    "wrmsr",
    "mov $0x838, %ecx",
    "mov $1000000, %eax",
    "wrmsr",
    done!()
);

/// Puts this thread on one of two CPUs, if there are two.
fn on_cpu(cpu: usize) {
    // SAFETY: a set of ours; where there is no such CPU nothing changes.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

fn vcpus_go_while_their_timers_fire() -> Outcome {
    // All on one CPU, so that one of them is often being served there when the other CPU closes the files. A handler that
    // is not waited for reaches what is freed: a debug kernel says so. Shorter periods would leave a slow CPU time for nothing else.
    const VCPUS: u32 = 4;
    let rounds = std::env::var("LABTESTS_TURNS").ok().and_then(|text| text.parse().ok());
    for round in 0..rounds.unwrap_or(5) {
        on_cpu(1);
        let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, VCPUS, ticking())?;
        for (index, vcpu) in guest.vcpus.iter().enumerate() {
            // None but the first would begin by itself.
            let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
            vcpu.send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
            guest.finish_of(index)?;
        }
        on_cpu(0);
        std::thread::sleep(std::time::Duration::from_micros(round % 8 * 170));
    }
    Ok(())
}
