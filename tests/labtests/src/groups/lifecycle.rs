//! VMs come and go, in every order, and leave nothing behind.

use std::os::fd::{AsRawFd, OwnedFd};

use kvm_bindings::*;

use crate::kvm::file::{Commands, System, own};
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::memory::Memory;
use crate::outcome::{Answer, Outcome, equal, holds};
use crate::runner::{await_end, tests};

tests!("lifecycle":
    files_may_be_closed_in_any_order,
    a_vm_may_go_while_its_irqfds_are_there,
    an_eventfd_outlives_its_vm,
    many_vms_exist_at_once,
    two_hundred_vms_come_and_go_and_leave_no_memory_behind,
    killed_vmms_leave_no_memory_behind,
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
fn free_kilobytes() -> i64 {
    // Returns what the kernel frees later: caches, and objects that wait for their grace period.
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
    std::thread::sleep(std::time::Duration::from_millis(150));
    let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<i64>().ok()).unwrap_or(0)
    };
    field("MemFree:") + field("Cached:") + field("Buffers:") + field("SReclaimable:")
}

/// Runs rounds of `work` until the free memory does not shrink any more; a leak shrinks it by
/// at least `leak` kilobytes in each round.
fn leaves_nothing(leak: i64, mut work: impl FnMut() -> Outcome) -> Outcome {
    work()?;
    let mut lost = Vec::new();
    let mut before = free_kilobytes();
    for _ in 0..4 {
        work()?;
        let after = free_kilobytes();
        lost.push(before - after);
        before = after;
    }
    lost.sort_unstable();
    // The second smallest: noise goes both ways, a leak is in every round.
    holds(&format!("less than {leak} kB lost per round"), lost[1] < leak, lost)
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

guest_code!(spin, 64, "0: incq (%rbx)", "add $4096, %rbx", "and $0x3fffff, %ebx", "jmp 0b");

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
