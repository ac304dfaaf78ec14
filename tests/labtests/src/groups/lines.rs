//! Interrupts from devices: I/O APIC, PIC, PIT, messages, irqfds; and doorbells to them, ioeventfds
//! (KVM API §4.25, §4.59, §4.70, §4.71, §4.75).

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, own};
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::threads::{Target, eventually, within};
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds};
use crate::runner::tests;

tests!("lines":
    an_edge_of_a_line_is_one_interrupt,
    a_masked_pin_is_silent,
    an_edge_while_masked_is_lost,
    a_level_comes_again_until_it_falls,
    a_level_is_reported_by_remote_irr,
    the_pic_interrupts_by_its_vector,
    the_pit_interrupts_through_the_io_apic,
    the_pit_interrupts_through_the_pic,
    the_pits_counter_goes_down,
    the_speaker_port_shows_the_pits_output,
    a_message_is_an_interrupt,
    a_message_wakes_a_halted_guest,
    a_message_to_nobody_is_not_delivered,
    an_irqfd_is_an_interrupt,
    an_irqfd_by_a_message_route_is_an_interrupt,
    a_new_route_is_followed_by_an_old_irqfd,
    an_irqfd_taken_away_is_silent,
    a_level_irqfd_is_resampled_at_its_end,
    a_doorbell_at_a_port_rings_in_the_kernel,
    a_doorbell_in_memory_rings_in_the_kernel,
    a_doorbell_with_data_rings_for_that_data_only,
    a_doorbell_of_any_length_rings_for_all,
    a_doorbell_taken_away_is_silent,
    a_doorbell_rings_an_irqfd,
);

/// The PIC's lines all masked: after reset it would interrupt with its own vectors from 0.
macro_rules! no_pic {
    () => {
        "mov $0xff, %al; out %al, $0x21; out %al, $0xa1"
    };
}

guest_code!(
    // Writes the low half of I/O APIC pin ARGUMENT + 0 from ARGUMENT + 8, the high half zero; then
    // marks for ever with interrupts enabled.
    pin,
    64,
    no_pic!(),
    x2apic!(),
    "mov $0xfec00000, %ebx",
    "mov ARGUMENT, %eax",
    "lea 0x11(%rax,%rax), %ecx",
    "mov %ecx, (%rbx)",
    "movl $0, 0x10(%rbx)",
    "dec %ecx",
    "mov %ecx, (%rbx)",
    "mov ARGUMENT + 8, %eax",
    "mov %eax, 0x10(%rbx)",
    "sti",
    "0: out %al, $PORT_MARK",
    "nop",
    "jmp 0b",
);

/// A guest whose pin is set up, at its first mark.
fn pin_guest(number: u64, low: u64) -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, pin())?;
    guest.memory.write(ARGUMENT, number);
    guest.memory.write(ARGUMENT + 8, low);
    guest.reach_mark()?;
    Ok(guest)
}

/// Lets the guest go on; how often 0x40 has come.
fn count_after_a_step(guest: &Guest) -> Outcome<u64> {
    guest.reach_mark()?;
    guest.reach_mark()?;
    Ok(guest.count(0x40))
}

fn an_edge_of_a_line_is_one_interrupt() -> Outcome {
    let guest = pin_guest(5, 0x40)?;
    for count in 1..4 {
        guest.vm.irq_line(5, 1).granted("up")?;
        equal("interrupts", count_after_a_step(&guest)?, count)?;
        equal("interrupts while it stays up", count_after_a_step(&guest)?, count)?;
        guest.vm.irq_line(5, 0).granted("down")?;
        equal("interrupts when it fell", count_after_a_step(&guest)?, count)?;
    }
    Ok(())
}

fn a_masked_pin_is_silent() -> Outcome {
    let guest = pin_guest(5, 0x10040)?;
    guest.vm.irq_line(5, 1).granted("up")?;
    equal("interrupts", count_after_a_step(&guest)?, 0)
}

/// Rewrites a pin from outside.
fn set_pin(guest: &Guest, number: usize, bits: u64) -> Outcome {
    let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
    guest.vm.exchange(ioctl::GET_IRQCHIP, &mut chip).granted("KVM_GET_IRQCHIP")?;
    // SAFETY: the id says that the union holds an I/O APIC.
    unsafe { chip.chip.ioapic.redirtbl[number].bits = bits };
    guest.vm.send(ioctl::SET_IRQCHIP, &chip).granted("KVM_SET_IRQCHIP").map(drop)
}

fn pin_bits(guest: &Guest, number: usize) -> Outcome<u64> {
    let mut chip = kvm_irqchip { chip_id: KVM_IRQCHIP_IOAPIC, ..Default::default() };
    guest.vm.exchange(ioctl::GET_IRQCHIP, &mut chip).granted("KVM_GET_IRQCHIP")?;
    // SAFETY: the id says that the union holds an I/O APIC.
    Ok(unsafe { chip.chip.ioapic.redirtbl[number].bits })
}

fn an_edge_while_masked_is_lost() -> Outcome {
    let guest = pin_guest(5, 0x10040)?;
    guest.vm.irq_line(5, 1).granted("up")?;
    guest.vm.irq_line(5, 0).granted("down")?;
    set_pin(&guest, 5, 0x40)?;
    let count = count_after_a_step(&guest)?;
    holds("none, or one that was remembered", count <= 1, count)?;
    guest.vm.irq_line(5, 1).granted("up again")?;
    equal("interrupts", count_after_a_step(&guest)?, count + 1)
}

fn a_level_comes_again_until_it_falls() -> Outcome {
    let guest = pin_guest(5, 0x8040)?;
    guest.vm.irq_line(5, 1).granted("up")?;
    let target = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            let _ = guest.exit();
        });
        let again = within(Duration::from_secs(5), || guest.count(0x40) >= 3);
        let lowered = guest.vm.irq_line(5, 0).granted("down");
        eventually("the guest comes to its mark", || run.is_finished())?;
        holds("three interrupts", again, guest.count(0x40))?;
        lowered
    })?;
    let count = count_after_a_step(&guest)?;
    equal("interrupts after it fell", count_after_a_step(&guest)?, count)
}

fn a_level_is_reported_by_remote_irr() -> Outcome {
    let guest = pin_guest(5, 0x8040)?;
    // Interrupts off, so that it stays in the local APIC.
    let mut regs = guest.vcpu().regs()?;
    regs.rflags &= !0x200;
    guest.vcpu().set_regs(&regs)?;
    guest.vm.irq_line(5, 1).granted("up")?;
    guest.reach_mark()?;
    equal("remote IRR", pin_bits(&guest, 5)? >> 14 & 1, 1)?;
    guest.vm.irq_line(5, 0).granted("down")?;
    regs = guest.vcpu().regs()?;
    regs.rflags |= 0x200;
    guest.vcpu().set_regs(&regs)?;
    equal("interrupts", count_after_a_step(&guest)?, 1)?;
    equal("remote IRR after the end of interrupt", pin_bits(&guest, 5)? >> 14 & 1, 0)
}

guest_code!(
    // The PICs at vectors 0x30 and 0x38; the lines that BL does not mask.
    pic,
    64,
    "mov $0x11, %al; out %al, $0x20; out %al, $0xa0",
    "mov $0x30, %al; out %al, $0x21",
    "mov $0x38, %al; out %al, $0xa1",
    "mov $4, %al; out %al, $0x21",
    "mov $2, %al; out %al, $0xa1",
    "mov $1, %al; out %al, $0x21; out %al, $0xa1",
    "mov ARGUMENT, %al; out %al, $0x21",
    "mov ARGUMENT + 1, %al; out %al, $0xa1",
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x30 * 8",
    "mov %rax, HOOKS + 0x34 * 8",
    "mov %rax, HOOKS + 0x3a * 8",
    // A PIT that interrupts every 5 ms, if the test asks for it.
    "cmpb $0, ARGUMENT + 2",
    "je 2f",
    "mov $0x34, %al; out %al, $0x43",
    "mov $0x4d, %al; out %al, $0x40",
    "mov $0x17, %al; out %al, $0x40",
    "sti",
    "3: hlt",
    "cmpq $3, COUNTS + 0x30 * 8",
    "jb 3b",
    "cli",
    done!(),
    "2: sti",
    "0: out %al, $PORT_MARK",
    "nop",
    "jmp 0b",
    // Ends the interrupt in both.
    "1: mov $0x20, %al; out %al, $0xa0; out %al, $0x20",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn pic_guest(chip: Chip, masks: u64) -> Outcome<Guest> {
    let guest = Guest::new(chip, pic())?;
    guest.memory.write(ARGUMENT, masks);
    // LINT0 as the BIOS would leave it; the local APIC itself is not enabled.
    let mut apic: kvm_lapic_state = guest.vcpu().receive(ioctl::GET_LAPIC).granted("get")?;
    apic.regs[0x350] = 0;
    apic.regs[0x351] = 7;
    apic.regs[0x352] = 0;
    apic.regs[0xf1] |= 1;
    guest.vcpu().send(ioctl::SET_LAPIC, &apic).granted("set")?;
    Ok(guest)
}

fn the_pic_interrupts_by_its_vector() -> Outcome {
    // Lines 2 and 4 of the first, 2 of the second.
    let guest = pic_guest(Chip::Kernel, 0xfb_eb)?;
    guest.reach_mark()?;
    for (gsi, vector) in [(4, 0x34), (10, 0x3a)] {
        for count in 1..3 {
            guest.vm.irq_line(gsi, 1).granted("up")?;
            guest.reach_mark()?;
            guest.reach_mark()?;
            guest.vm.irq_line(gsi, 0).granted("down")?;
            guest.came(vector, count)?;
        }
    }
    Ok(())
}

guest_code!(
    // The PIT's channel 0 every 5 ms, at pin 0 of the I/O APIC, where the default routes lead it.
    pit,
    64,
    no_pic!(),
    x2apic!(),
    "mov $0xfec00000, %ebx",
    "movl $0x11, (%rbx)",
    "movl $0, 0x10(%rbx)",
    "movl $0x10, (%rbx)",
    "movl $0x40, 0x10(%rbx)",
    "mov $0x34, %al; out %al, $0x43",
    "mov $0x4d, %al; out %al, $0x40",
    "mov $0x17, %al; out %al, $0x40",
    "sti",
    "0: hlt",
    "cmpq $3, COUNTS + 0x40 * 8",
    "jb 0b",
    "cli",
    done!()
);

fn the_pit_interrupts_through_the_io_apic() -> Outcome {
    let guest = Guest::new(Chip::KernelAndPit, pit())?;
    let start = Instant::now();
    guest.finish()?;
    let time = start.elapsed();
    // The first may be one that the reset left pending.
    holds("10 ms or more, and no second", time.as_millis() >= 9 && time.as_millis() < 1000, time)
}

fn the_pit_interrupts_through_the_pic() -> Outcome {
    let guest = pic_guest(Chip::KernelAndPit, 0x01_ff_fe)?;
    let start = Instant::now();
    guest.finish()?;
    let time = start.elapsed();
    holds("10 ms or more, and no second", time.as_millis() >= 9 && time.as_millis() < 1000, time)?;
    holds("at least 3", guest.count(0x30) >= 3, guest.count(0x30))
}

guest_code!(
    pit_counter,
    64,
    "mov $0x34, %al; out %al, $0x43",
    "mov $0xff, %al; out %al, $0x40; out %al, $0x40",
    "mov $0, %al; out %al, $0x43",
    "xor %eax, %eax",
    "in $0x40, %al; mov %al, RESULT; in $0x40, %al; mov %al, RESULT + 1",
    "mov $20000, %ebx",
    "0: dec %ebx",
    "jnz 0b",
    "mov $0, %al; out %al, $0x43",
    "in $0x40, %al; mov %al, RESULT + 8; in $0x40, %al; mov %al, RESULT + 9",
    done!()
);

fn the_pits_counter_goes_down() -> Outcome {
    let guest = Guest::new(Chip::KernelAndPit, pit_counter())?;
    guest.finish()?;
    let (first, second) = (guest.result(0), guest.result(1));
    holds("a counter that goes down", second < first && first <= 0xffff, (first, second))
}

guest_code!(
    speaker,
    64,
    // Channel 2 gated on, mode 0, a short count: its output rises when the count is over.
    "in $0x61, %al",
    "and $0xfc, %al",
    "or $1, %al",
    "out %al, $0x61",
    "mov $0xb0, %al; out %al, $0x43",
    "mov $0x50, %al; out %al, $0x42",
    "mov $0, %al; out %al, $0x42",
    "mov $10000000, %ebx",
    "0: in $0x61, %al",
    "test $0x20, %al",
    "jnz 1f",
    "dec %ebx",
    "jnz 0b",
    "ud2",
    "1:",
    done!()
);

fn the_speaker_port_shows_the_pits_output() -> Outcome {
    Guest::new(Chip::KernelAndPit, speaker())?.finish()
}

guest_code!(marks, 64, x2apic!(), "sti", "0: out %al, $PORT_MARK", "nop", "jmp 0b");

fn message(guest: &Guest, destination: u32, data: u32) -> Result<i32, Errno> {
    let address_lo = 0xfee0_0000 | destination << 12;
    guest.vm.send(ioctl::SIGNAL_MSI, &kvm_msi { address_lo, data, ..Default::default() })
}

fn marking_guest() -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, marks())?;
    guest.reach_mark()?;
    Ok(guest)
}

fn a_message_is_an_interrupt() -> Outcome {
    let guest = marking_guest()?;
    for count in 1..4 {
        equal("deliveries", message(&guest, 0, 0x40), Ok(1))?;
        equal("interrupts", count_after_a_step(&guest)?, count)?;
    }
    // To all.
    equal("deliveries", message(&guest, 0xff, 0x40), Ok(1))?;
    equal("interrupts", count_after_a_step(&guest)?, 4)
}

fn a_message_to_nobody_is_not_delivered() -> Outcome {
    let guest = marking_guest()?;
    let answer = message(&guest, 9, 0x40);
    holds("no delivery", !matches!(answer, Ok(1..)), answer)?;
    equal("interrupts", count_after_a_step(&guest)?, 0)
}

guest_code!(
    halts,
    64,
    x2apic!(),
    "out %al, $PORT_MARK",
    "sti",
    "0: hlt",
    "cmpq $20, COUNTS + 0x40 * 8",
    "jb 0b",
    done!()
);

/// Runs the guest in a thread; whenever it sleeps, `ring` has to wake it, 20 times.
fn woken(guest: &Guest, mut ring: impl FnMut()) -> Outcome {
    guest.reach_mark()?;
    let target = Target::new();
    crate::machine::threads::prepare();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.finish()
        });
        let mut all = true;
        for count in 0..20 {
            all = all && within(Duration::from_secs(5), || guest.count(0x40) >= count);
            if all {
                ring();
            }
        }
        let ended = within(Duration::from_secs(5), || run.is_finished());
        target.kick();
        holds("20 wake-ups", all && ended, guest.count(0x40))?;
        run.join().unwrap_or_else(|_| fail("the thread died"))
    })
}

fn a_message_wakes_a_halted_guest() -> Outcome {
    let guest = Guest::new(Chip::Kernel, halts())?;
    woken(&guest, || {
        let _ = message(&guest, 0, 0x40);
    })
}

fn eventfd() -> OwnedFd {
    // SAFETY: plain numbers.
    own(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

fn signal(event: &OwnedFd) {
    let one = 1_u64;
    // SAFETY: 8 bytes.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// What an eventfd has counted; it then counts from 0.
fn counted(event: &OwnedFd) -> u64 {
    let mut count = 0_u64;
    // SAFETY: 8 bytes of room.
    match unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), 8) } {
        8 => count,
        _ => 0,
    }
}

fn irqfd(guest: &Guest, event: &OwnedFd, gsi: u32, flags: u32) -> Outcome {
    let request = kvm_irqfd { fd: event.as_raw_fd() as u32, gsi, flags, ..Default::default() };
    guest.vm.send(ioctl::IRQFD, &request).granted("KVM_IRQFD").map(drop)
}

#[repr(C)]
struct Routes {
    nr: u32,
    flags: u32,
    entries: [kvm_irq_routing_entry; 2],
}

/// GSI 10 becomes this message.
fn route(guest: &Guest, data: u32) -> Outcome {
    let mut entry =
        kvm_irq_routing_entry { gsi: 10, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    entry.u.msi = kvm_irq_routing_msi { address_lo: 0xfee0_0000, data, ..Default::default() };
    let routes = Routes { nr: 1, flags: 0, entries: [entry, Default::default()] };
    guest.vm.send(ioctl::SET_GSI_ROUTING, &routes).granted("KVM_SET_GSI_ROUTING").map(drop)
}

fn an_irqfd_is_an_interrupt() -> Outcome {
    let guest = pin_guest(5, 0x40)?;
    let event = eventfd();
    irqfd(&guest, &event, 5, 0)?;
    for count in 1..4 {
        signal(&event);
        // It is delivered by a worker, perhaps.
        let mut got = 0;
        for _ in 0..500 {
            got = count_after_a_step(&guest)?;
            if got >= count {
                break;
            }
        }
        equal("interrupts", got, count)?;
    }
    Ok(())
}

fn an_irqfd_by_a_message_route_is_an_interrupt() -> Outcome {
    let guest = Guest::new(Chip::Kernel, halts())?;
    route(&guest, 0x40)?;
    let event = eventfd();
    irqfd(&guest, &event, 10, 0)?;
    woken(&guest, || signal(&event))
}

fn a_new_route_is_followed_by_an_old_irqfd() -> Outcome {
    let guest = marking_guest()?;
    let event = eventfd();
    route(&guest, 0x41)?;
    irqfd(&guest, &event, 10, 0)?;
    signal(&event);
    count_after_a_step(&guest)?;
    equal("interrupts by the first route", guest.count(0x41), 1)?;
    route(&guest, 0x42)?;
    signal(&event);
    count_after_a_step(&guest)?;
    equal("interrupts after the second", (guest.count(0x41), guest.count(0x42)), (1, 1))
}

fn an_irqfd_taken_away_is_silent() -> Outcome {
    let guest = marking_guest()?;
    let event = eventfd();
    route(&guest, 0x40)?;
    irqfd(&guest, &event, 10, 0)?;
    irqfd(&guest, &event, 10, KVM_IRQFD_FLAG_DEASSIGN)?;
    signal(&event);
    equal("interrupts", count_after_a_step(&guest)?, 0)?;
    equal("what the eventfd holds", counted(&event), 1)
}

fn a_level_irqfd_is_resampled_at_its_end() -> Outcome {
    let guest = pin_guest(5, 0x8040)?;
    let (event, resample) = (eventfd(), eventfd());
    let request = kvm_irqfd {
        fd: event.as_raw_fd() as u32,
        gsi: 5,
        flags: KVM_IRQFD_FLAG_RESAMPLE,
        resamplefd: resample.as_raw_fd() as u32,
        ..Default::default()
    };
    guest.vm.send(ioctl::IRQFD, &request).granted("KVM_IRQFD")?;
    for count in 1..4 {
        signal(&event);
        let mut rang = 0;
        for _ in 0..500 {
            guest.reach_mark()?;
            rang += counted(&resample);
            if rang > 0 {
                break;
            }
        }
        equal("resample", rang, 1)?;
        // The line fell with the end of interrupt, so there is no other.
        equal("interrupts", count_after_a_step(&guest)?, count)?;
    }
    Ok(())
}

guest_code!(
    // Rings with 1, 2, 4 and 8 bytes of RDI; then at another address.
    memory_bells,
    64,
    "mov $NOWHERE, %ebx",
    "mov %rdi, %rax",
    "mov %eax, (%rbx)",
    "mov %eax, (%rbx)",
    "mov %ax, (%rbx)",
    "mov %rax, (%rbx)",
    "mov %eax, 4(%rbx)",
    done!()
);
guest_code!(
    port_bells,
    64,
    "mov %edi, %eax",
    "mov $0x500, %edx",
    "out %eax, %dx",
    "out %eax, %dx",
    "out %ax, %dx",
    "inc %edx",
    "out %al, %dx",
    done!()
);

const PIO: u32 = 1 << kvm_ioeventfd_flag_nr_pio;
const MATCH: u32 = 1 << kvm_ioeventfd_flag_nr_datamatch;
const DEASSIGN: u32 = 1 << kvm_ioeventfd_flag_nr_deassign;

fn bell(guest: &Guest, addr: u64, len: u32, flags: u32, datamatch: u64) -> Outcome<OwnedFd> {
    let event = eventfd();
    let fd = event.as_raw_fd();
    let request = kvm_ioeventfd { datamatch, addr, len, fd, flags, ..Default::default() };
    guest.vm.send(ioctl::IOEVENTFD, &request).granted("KVM_IOEVENTFD")?;
    Ok(event)
}

fn with_rdi(code: &[u8], rdi: u64) -> Outcome<Guest> {
    let guest = Guest::new(Chip::None, code)?;
    let mut regs = guest.vcpu().regs()?;
    regs.rdi = rdi;
    guest.vcpu().set_regs(&regs)?;
    Ok(guest)
}

/// Runs to the end; the addresses and sizes of what came to user space.
fn reached_us(guest: &Guest) -> Outcome<Vec<(u64, u32)>> {
    let mut list = Vec::new();
    loop {
        match guest.exit()? {
            exit if exit.is_out(PORT_DONE) => return Ok(list),
            Exit::Mmio { address, len, write: true, .. } => list.push((address, len)),
            Exit::Io { port, size, write: true, .. } => list.push((port.into(), size.into())),
            other => return fail(format!("expected writes got {other:x?}")),
        }
    }
}

fn a_doorbell_at_a_port_rings_in_the_kernel() -> Outcome {
    let guest = with_rdi(port_bells(), 7)?;
    let event = bell(&guest, 0x500, 4, PIO, 0)?;
    equal("left to user space", reached_us(&guest)?, vec![(0x500, 2), (0x501, 1)])?;
    equal("rings", counted(&event), 2)
}

fn a_doorbell_in_memory_rings_in_the_kernel() -> Outcome {
    let guest = with_rdi(memory_bells(), 7)?;
    let event = bell(&guest, NOWHERE, 4, 0, 0)?;
    let others = vec![(NOWHERE, 2), (NOWHERE, 8), (NOWHERE + 4, 4)];
    equal("left to user space", reached_us(&guest)?, others)?;
    equal("rings", counted(&event), 2)
}

fn a_doorbell_with_data_rings_for_that_data_only() -> Outcome {
    for (rdi, rings) in [(7, [2, 0]), (8, [0, 2]), (9, [0, 0])] {
        let guest = with_rdi(memory_bells(), rdi)?;
        let seven = bell(&guest, NOWHERE, 4, MATCH, 7)?;
        let eight = bell(&guest, NOWHERE, 4, MATCH, 8)?;
        let left = reached_us(&guest)?.len() as u64;
        equal("rings", [counted(&seven), counted(&eight)], rings)?;
        equal("left to user space", left, 5 - rings[0] - rings[1])?;
    }
    Ok(())
}

fn a_doorbell_of_any_length_rings_for_all() -> Outcome {
    let guest = with_rdi(memory_bells(), 7)?;
    let event = bell(&guest, NOWHERE, 0, 0, 0)?;
    equal("left to user space", reached_us(&guest)?, vec![(NOWHERE + 4, 4)])?;
    equal("rings", counted(&event), 4)
}

fn a_doorbell_taken_away_is_silent() -> Outcome {
    let guest = with_rdi(memory_bells(), 7)?;
    let event = bell(&guest, NOWHERE, 4, 0, 0)?;
    let request = kvm_ioeventfd {
        addr: NOWHERE,
        len: 4,
        fd: event.as_raw_fd(),
        flags: DEASSIGN,
        ..Default::default()
    };
    guest.vm.send(ioctl::IOEVENTFD, &request).granted("deassign")?;
    equal("left to user space", reached_us(&guest)?.len(), 5)?;
    equal("rings", counted(&event), 0)
}

guest_code!(
    bell_and_interrupt,
    64,
    x2apic!(),
    "sti",
    "mov $20, %ebx",
    "mov $0x500, %edx",
    "0: mov COUNTS + 0x40 * 8, %rsi",
    "out %eax, %dx",
    "1: cmp COUNTS + 0x40 * 8, %rsi",
    "je 1b",
    "dec %ebx",
    "jnz 0b",
    done!()
);

fn a_doorbell_rings_an_irqfd() -> Outcome {
    // One eventfd for both: what the guest writes comes back as its interrupt, without user space.
    let guest = Guest::new(Chip::Kernel, bell_and_interrupt())?;
    route(&guest, 0x40)?;
    let event = bell(&guest, 0x500, 4, PIO, 0)?;
    irqfd(&guest, &event, 10, 0)?;
    guest.finish()?;
    equal("interrupts", guest.count(0x40), 20)
}
