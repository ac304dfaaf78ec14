//! Many irqfds with a resample eventfd on one pin: each end of the interrupt signals all of them, once,
//! and in a time that grows no faster than their number (KVM API §4.75).

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use kvm_bindings::*;

use crate::kvm::file::{Commands, own};
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::oracle::is_stock;
use crate::outcome::{Answer, Errno, Outcome, Reply, equal, fail, holds, skip};
use crate::runner::tests;

tests!("resampling":
    each_end_signals_all_of_them_once,
    a_thousand_of_them_cost_what_they_are,
    they_may_go_while_an_end_is_told,
    there_is_an_end_to_their_number,
);

const GSI: u32 = 5;

guest_code!(
    // Pin 5 is level-triggered with vector 0x40. Marks for ever with interrupts enabled; the hook of the
    // vector notes how long the end of the interrupt took.
    ends,
    64,
    "mov $0xff, %al; out %al, $0x21; out %al, $0xa1",
    x2apic!(),
    "lea 6f(%rip), %rax",
    "mov %rax, HOOKS + 8 * 0x40",
    "mov $0xfec00000, %ebx",
    "movl $0x1b, (%rbx)",
    "movl $0, 0x10(%rbx)",
    "movl $0x1a, (%rbx)",
    "movl $0x8040, 0x10(%rbx)",
    "sti",
    "0: out %al, $PORT_MARK",
    "nop",
    "jmp 0b",
    done!(),
    "6: lfence",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, RESULT",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "lfence",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "sub RESULT, %rax",
    "mov %rax, RESULT + 8",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn eventfd() -> OwnedFd {
    // SAFETY: plain numbers.
    own(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

fn signal(event: &OwnedFd) {
    let one = 1u64;
    // SAFETY: eight bytes of ours.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// What the eventfd has counted since it was last asked.
fn take(event: &OwnedFd) -> u64 {
    let mut count = 0u64;
    // SAFETY: room for eight bytes.
    match unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), 8) } {
        8 => count,
        _ => 0,
    }
}

/// Room for so many descriptors.
fn raise_limit(files: u64) -> Outcome {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    // SAFETY: a whole structure.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } {
        0 => Ok(()),
        _ => skip(format!("RLIMIT_NOFILE: {}", Errno::last())),
    }
}

fn irqfd(guest: &Guest, event: &OwnedFd, resample: &OwnedFd, flags: u32) -> Reply {
    let request = kvm_irqfd {
        fd: event.as_raw_fd() as u32,
        gsi: GSI,
        flags,
        resamplefd: resample.as_raw_fd() as u32,
        ..Default::default()
    };
    guest.vm.send(ioctl::IRQFD, &request)
}

/// A guest at its mark, and so many irqfds that share one resample eventfd.
struct Many {
    guest: Guest,
    events: Vec<OwnedFd>,
    resample: OwnedFd,
}

impl Many {
    fn new(count: usize) -> Outcome<Self> {
        raise_limit(20_000)?;
        let guest = Guest::new(Chip::Kernel, ends())?;
        guest.reach_mark()?;
        let resample = eventfd();
        let mut events = Vec::new();
        for _ in 0..count {
            let event = eventfd();
            irqfd(&guest, &event, &resample, KVM_IRQFD_FLAG_RESAMPLE).granted("KVM_IRQFD")?;
            events.push(event);
        }
        Ok(Self { guest, events, resample })
    }

    /// One interrupt from the first irqfd to its end; the ticks of the end.
    fn once(&self) -> Outcome<u64> {
        self.interrupt()?;
        equal("signals", take(&self.resample), self.events.len() as u64)?;
        Ok(self.guest.result(1))
    }

    /// One interrupt, and a mark after it.
    fn interrupt(&self) -> Outcome {
        let before = self.guest.count(0x40);
        signal(&self.events[0]);
        let start = Instant::now();
        // The stock module raises the line in a thread of the kernel's.
        while self.guest.count(0x40) == before && start.elapsed() < Duration::from_secs(5) {
            self.guest.reach_mark()?;
        }
        self.guest.reach_mark()?;
        equal("interrupts", self.guest.count(0x40), before + 1)
    }

    /// The shortest of several ends.
    fn fastest(&self) -> Outcome<u64> {
        let mut least = u64::MAX;
        for _ in 0..6 {
            least = least.min(self.once()?);
        }
        Ok(least)
    }
}

fn each_end_signals_all_of_them_once() -> Outcome {
    for count in [1, 2, 7, 8, 9, 33, 200] {
        let many = Many::new(count)?;
        for _ in 0..4 {
            many.once()?;
        }
    }
    Ok(())
}

fn a_thousand_of_them_cost_what_they_are() -> Outcome {
    let few = Many::new(250)?.fastest()?;
    let many = Many::new(1000)?.fastest()?;
    println!("# ends of interrupts: {few} ticks with 250 resamplers, {many} with 1000");
    // Four times as many: four times as long if each costs the same, sixteen times if each is looked
    // for from the beginning.
    holds("a time that grows with their number", many < 8 * few, (few, many))
}

fn they_may_go_while_an_end_is_told() -> Outcome {
    let many = Many::new(300)?;
    for event in many.events.iter().skip(1).step_by(2) {
        irqfd(&many.guest, event, &many.resample, KVM_IRQFD_FLAG_DEASSIGN).granted("deassign")?;
    }
    many.interrupt()?;
    equal("signals", take(&many.resample), 150)?;
    for event in many.events.iter().step_by(2) {
        irqfd(&many.guest, event, &many.resample, KVM_IRQFD_FLAG_DEASSIGN).granted("deassign")?;
    }
    signal(&many.events[0]);
    many.guest.reach_mark()?;
    equal("signals of none", take(&many.resample), 0)
}

fn there_is_an_end_to_their_number() -> Outcome {
    if is_stock() {
        return skip("the stock module has no limit but that of descriptors");
    }
    let many = Many::new(4096)?;
    let (event, resample) = (eventfd(), eventfd());
    irqfd(&many.guest, &event, &resample, KVM_IRQFD_FLAG_RESAMPLE)
        .refused("one more", libc::ENOSPC)?;
    irqfd(&many.guest, &event, &resample, 0).granted("one without resampling")?;
    match many.once() {
        Ok(ticks) => {
            println!("# {ticks} ticks with 4096");
            Ok(())
        }
        Err(_) => fail("expected all of them to be told"),
    }
}
