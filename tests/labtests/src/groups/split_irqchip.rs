//! Local APICs in the kernel, and PIC and I/O APIC in the VMM (KVM API §7.5, §4.16, §5).

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, System, Vm, own};
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic, xapic};
use crate::machine::guest::{Chip, Guest, Mode, SPLIT_PINS};
use crate::machine::layout::*;
use crate::machine::threads::{Target, within};
use crate::oracle::{is_stock, kernel};
use crate::outcome::{Answer, Errno, Outcome, Reply, equal, fail, holds, skip};
use crate::runner::tests;

tests!("split_irqchip":
    it_is_offered,
    more_routes_than_there_are_cannot_be_kept,
    there_is_one_irqchip_and_it_comes_before_the_vcpus,
    pic_and_ioapic_and_pit_are_not_there,
    routes_to_chips_are_einval_and_messages_are_taken,
    a_resampling_irqfd_is_einval,
    a_vcpu_has_a_local_apic,
    a_line_is_followed_by_a_message_route_alone,
    a_message_reaches_the_guest,
    an_irqfd_reaches_the_guest,
    a_halt_stays_in_the_kernel_until_a_message,
    an_interrupt_of_the_vmms_pic_arrives,
    it_is_no_state_before_it_is_taken,
    it_survives_a_restore_of_events,
    two_at_once_are_eexist,
    it_waits_for_the_window,
    the_window_opens_one_instruction_after_sti,
    a_masked_lint0_holds_it_and_the_window_back,
    a_disabled_apic_takes_it,
    it_wakes_a_halted_guest,
    it_waits_beside_a_message,
    the_end_of_a_level_message_exits,
    the_end_of_a_level_message_exits_in_x2apic_mode,
    a_suppressed_broadcast_exits_all_the_same,
    the_end_of_an_edge_message_does_not_exit,
    a_route_beyond_the_kept_ones_does_not_exit,
    a_message_without_route_does_not_exit,
    a_route_to_another_vcpu_does_not_exit,
    a_logical_route_follows_the_logical_id,
    a_new_route_is_followed_at_once,
    a_route_that_changes_in_service_still_exits,
    what_is_restored_in_service_exits_at_its_end,
    the_end_on_the_second_vcpu_exits_there,
    a_timer_interrupt_comes_between_ends,
);

const LEVEL: u32 = 1 << 15;
const HERE: u32 = 0xfee0_0000;

fn is_old_stock() -> bool {
    is_stock() && kernel() < (6, 12)
}

fn vm() -> Outcome<Vm> {
    let vm = System::open()?.create_vm()?;
    vm.split_irqchip(SPLIT_PINS.into()).granted("KVM_CAP_SPLIT_IRQCHIP")?;
    Ok(vm)
}

fn it_is_offered() -> Outcome {
    equal("KVM_CAP_SPLIT_IRQCHIP", System::open()?.extension(KVM_CAP_SPLIT_IRQCHIP), 1)
}

fn more_routes_than_there_are_cannot_be_kept() -> Outcome {
    let vm = System::open()?.create_vm()?;
    for routes in [4097, 1 << 32, u64::MAX] {
        vm.split_irqchip(routes).refused(&format!("{routes} routes"), libc::EINVAL)?;
    }
    vm.split_irqchip(4096).granted("4096 routes")?;
    vm.split_irqchip(4097).refused("4097 routes, again", libc::EINVAL)?;
    let vm = System::open()?.create_vm()?;
    vm.split_irqchip(0).granted("no routes").map(drop)
}

fn there_is_one_irqchip_and_it_comes_before_the_vcpus() -> Outcome {
    let vm = vm()?;
    vm.split_irqchip(24).refused("twice", libc::EEXIST)?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).refused("KVM_CREATE_IRQCHIP", libc::EEXIST)?;
    let _vcpu = vm.create_vcpu(0)?;
    vm.split_irqchip(24).refused("twice, with a vCPU", libc::EEXIST)?;
    let full = System::open()?.create_vm()?;
    full.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    full.split_irqchip(24).refused("after KVM_CREATE_IRQCHIP", libc::EEXIST)?;
    let late = System::open()?.create_vm()?;
    let _vcpu = late.create_vcpu(0)?;
    late.split_irqchip(24).refused("with a vCPU", libc::EEXIST)?;
    late.split_irqchip(4097).refused("with a vCPU, too many", libc::EINVAL)
}

fn pic_and_ioapic_and_pit_are_not_there() -> Outcome {
    let vm = vm()?;
    for chip_id in 0..3 {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        vm.exchange(ioctl::GET_IRQCHIP, &mut chip).refused("KVM_GET_IRQCHIP", libc::ENXIO)?;
        vm.send(ioctl::SET_IRQCHIP, &chip).refused("KVM_SET_IRQCHIP", libc::ENXIO)?;
    }
    if is_old_stock() {
        return skip("the stock module of 6.1 makes a PIT without a PIC");
    }
    let config = kvm_pit_config::default();
    vm.send(ioctl::CREATE_PIT2, &config).refused("KVM_CREATE_PIT2", libc::ENOENT)?;
    let pit: Result<kvm_pit_state2, Errno> = vm.receive(ioctl::GET_PIT2);
    equal("KVM_GET_PIT2", pit.err(), Some(Errno(libc::ENXIO)))
}

#[repr(C)]
struct Routes {
    nr: u32,
    flags: u32,
    entries: [kvm_irq_routing_entry; 4],
}

fn set_routes(vm: &Vm, list: &[kvm_irq_routing_entry]) -> Reply {
    let mut routes = Routes { nr: list.len() as u32, flags: 0, entries: [Default::default(); 4] };
    routes.entries[..list.len()].copy_from_slice(list);
    vm.send(ioctl::SET_GSI_ROUTING, &routes)
}

fn route(gsi: u32, address_lo: u32, data: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    entry.u.msi = kvm_irq_routing_msi { address_lo, data, ..Default::default() };
    entry
}

fn routes_to_chips_are_einval_and_messages_are_taken() -> Outcome {
    let vm = vm()?;
    for irqchip in 0..3 {
        let mut entry =
            kvm_irq_routing_entry { gsi: 1, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
        entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin: 1 };
        set_routes(&vm, &[route(0, HERE, 0x40), entry]).refused("a chip", libc::EINVAL)?;
    }
    set_routes(&vm, &[route(0, HERE, 0x40), route(4095, HERE, 0x41)]).granted("messages").map(drop)
}

fn eventfd() -> OwnedFd {
    // SAFETY: plain numbers.
    own(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

fn irqfd(vm: &Vm, event: &OwnedFd, gsi: u32, flags: u32) -> Reply {
    let resamplefd = event.as_raw_fd() as u32;
    let request = kvm_irqfd { fd: resamplefd, gsi, flags, resamplefd, ..Default::default() };
    vm.send(ioctl::IRQFD, &request)
}

fn a_resampling_irqfd_is_einval() -> Outcome {
    let (vm, event) = (vm()?, eventfd());
    irqfd(&vm, &event, 5, KVM_IRQFD_FLAG_RESAMPLE).refused("resampling", libc::EINVAL)?;
    irqfd(&vm, &event, 5, 0).granted("an edge").map(drop)
}

fn a_vcpu_has_a_local_apic() -> Outcome {
    let vm = vm()?;
    let (first, second) = (vm.create_vcpu(0)?, vm.create_vcpu(1)?);
    let apic: kvm_lapic_state = first.receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    first.send(ioctl::SET_LAPIC, &apic).granted("KVM_SET_LAPIC")?;
    for (vcpu, expected) in [(&first, KVM_MP_STATE_RUNNABLE), (&second, KVM_MP_STATE_UNINITIALIZED)]
    {
        let state: kvm_mp_state = vcpu.receive(ioctl::GET_MP_STATE).granted("KVM_GET_MP_STATE")?;
        equal("MP state", state.mp_state, expected)?;
    }
    let halted = kvm_mp_state { mp_state: KVM_MP_STATE_HALTED };
    first.send(ioctl::SET_MP_STATE, &halted).granted("KVM_SET_MP_STATE").map(drop)
}

guest_code!(marks, 64, "sti", "0: out %al, $PORT_MARK", "jmp 0b");
guest_code!(marks_xapic, 64, xapic!(), "sti", "0: out %al, $PORT_MARK", "jmp 0b");
guest_code!(marks_x2apic, 64, x2apic!(), "sti", "0: out %al, $PORT_MARK", "jmp 0b");

/// A guest with interrupts enabled that says mark again and again, at its second mark.
fn marking(code: &[u8]) -> Outcome<Guest> {
    let guest = Guest::new(Chip::Split, code)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    Ok(guest)
}

fn line(guest: &Guest, gsi: u32) -> Outcome<i32> {
    let mut line = kvm_irq_level { level: 1, ..Default::default() };
    line.__bindgen_anon_1.irq = gsi;
    guest.vm.exchange(ioctl::IRQ_LINE_STATUS, &mut line).granted("KVM_IRQ_LINE_STATUS")?;
    // SAFETY: integers.
    Ok(unsafe { line.__bindgen_anon_1.status })
}

fn a_line_is_followed_by_a_message_route_alone() -> Outcome {
    let guest = marking(marks_xapic())?;
    equal("status without routes", line(&guest, 4)?, -1)?;
    set_routes(&guest.vm, &[route(4, HERE, 0x40)]).granted("KVM_SET_GSI_ROUTING")?;
    equal("status with a route", line(&guest, 4)?, 1)?;
    guest.reach_mark()?;
    equal("interrupts", guest.count(0x40), 1)
}

fn message(guest: &Guest, address_lo: u32, data: u32) -> Outcome {
    let msi = kvm_msi { address_lo, data, ..Default::default() };
    equal("takers", guest.vm.send(ioctl::SIGNAL_MSI, &msi), Ok(1))
}

fn a_message_reaches_the_guest() -> Outcome {
    for code in [marks_xapic(), marks_x2apic()] {
        let guest = marking(code)?;
        message(&guest, HERE, 0x40)?;
        guest.reach_mark()?;
        message(&guest, HERE, LEVEL | 0x41)?;
        guest.reach_mark()?;
        equal("interrupts", [0x40, 0x41].map(|v| guest.count(v)), [1, 1])?;
    }
    Ok(())
}

fn signal(event: &OwnedFd) {
    let one = 1u64;
    // SAFETY: eight bytes of ours.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
}

fn an_irqfd_reaches_the_guest() -> Outcome {
    let guest = marking(marks_x2apic())?;
    let event = eventfd();
    set_routes(&guest.vm, &[route(30, HERE, 0x40), route(3, HERE, LEVEL | 0x41)])
        .granted("KVM_SET_GSI_ROUTING")?;
    irqfd(&guest.vm, &event, 30, 0).granted("KVM_IRQFD")?;
    signal(&event);
    guest.reach_mark()?;
    equal("interrupts", guest.count(0x40), 1)?;
    let event = eventfd();
    irqfd(&guest.vm, &event, 3, 0).granted("KVM_IRQFD")?;
    signal(&event);
    guest.expect("exit", Exit::EndOfInterrupt { vector: 0x41 })?;
    guest.reach_mark()?;
    equal("interrupts", guest.count(0x41), 1)
}

guest_code!(halts, 64, x2apic!(), "out %al, $PORT_MARK", "sti", "hlt", done!());

/// Runs a guest that halts, and `wake` when it does. Whether it ended then.
fn wakes(guest: &Guest, wake: impl FnOnce(&Target) -> Outcome) -> Outcome {
    let target = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.finish()
        });
        holds("a halted guest", target.sleeps(), target.state())?;
        let woken = wake(&target);
        let ended = within(Duration::from_secs(5), || run.is_finished());
        target.kick();
        woken?;
        holds("an end", ended, "none")?;
        run.join().unwrap_or_else(|_| fail("the thread died"))
    })
}

fn a_halt_stays_in_the_kernel_until_a_message() -> Outcome {
    let guest = Guest::new(Chip::Split, halts())?;
    guest.reach_mark()?;
    wakes(&guest, |_| message(&guest, HERE, 0x40))?;
    equal("interrupts", guest.count(0x40), 1)
}

fn interrupt(guest: &Guest, irq: u32) -> Reply {
    guest.vcpu().send(ioctl::INTERRUPT, &kvm_interrupt { irq })
}

fn an_interrupt_of_the_vmms_pic_arrives() -> Outcome {
    let guest = marking(marks())?;
    for vector in [0x20, 0x40, 0xff] {
        holds("a guest that is ready", guest.vcpu().ready_for_interrupt(), false)?;
        interrupt(&guest, vector.into()).granted("KVM_INTERRUPT")?;
        guest.reach_mark()?;
        guest.came(vector, 1)?;
    }
    interrupt(&guest, 256).refused("256", libc::EINVAL)
}

fn events(guest: &Guest) -> Outcome<kvm_vcpu_events> {
    guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")
}

fn it_is_no_state_before_it_is_taken() -> Outcome {
    let guest = Guest::new(Chip::Split, window())?;
    guest.reach_mark()?;
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    for _ in 0..2 {
        equal("bitmap", guest.vcpu().sregs()?.interrupt_bitmap, [0; 4])?;
        equal("injected", events(&guest)?.interrupt.injected, 0)?;
        guest.vcpu().set_immediate_exit(1);
        let _ = guest.vcpu().run();
        guest.vcpu().set_immediate_exit(0);
    }
    guest.finish()?;
    guest.came(0x40, 1)
}

fn it_survives_a_restore_of_events() -> Outcome {
    let guest = Guest::new(Chip::Split, window())?;
    guest.reach_mark()?;
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    let now = events(&guest)?;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &now).granted("KVM_SET_VCPU_EVENTS")?;
    guest.vcpu().set_sregs(&guest.vcpu().sregs()?)?;
    guest.finish()?;
    guest.came(0x40, 1)
}

fn two_at_once_are_eexist() -> Outcome {
    let guest = marking(marks())?;
    interrupt(&guest, 0x40).granted("first")?;
    interrupt(&guest, 0x41).refused("second", libc::EEXIST)?;
    guest.reach_mark()?;
    guest.came(0x40, 1)?;
    interrupt(&guest, 0x41).granted("third")?;
    guest.reach_mark()?;
    guest.came(0x41, 1)
}

guest_code!(
    window,
    64,
    "cli",
    "out %al, $PORT_MARK",
    "nop",
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "sti",
    "incq RESULT + 8",
    "1: incq RESULT + 16",
    "nop",
    done!()
);

fn it_waits_for_the_window() -> Outcome {
    let guest = Guest::new(Chip::Split, window())?;
    guest.reach_mark()?;
    holds("a guest that is not ready", !guest.vcpu().ready_for_interrupt(), true)?;
    guest.vcpu().request_interrupt_window(1);
    guest.expect("exit", Exit::InterruptWindow)?;
    holds("a guest that is ready", guest.vcpu().ready_for_interrupt(), false)?;
    guest.vcpu().request_interrupt_window(0);
    interrupt(&guest, 0x30).granted("KVM_INTERRUPT")?;
    guest.finish()?;
    guest.came(0x30, 1)
}

fn the_window_opens_one_instruction_after_sti() -> Outcome {
    let guest = Guest::new(Chip::Split, window())?;
    guest.reach_mark()?;
    guest.vcpu().request_interrupt_window(1);
    guest.expect("exit", Exit::InterruptWindow)?;
    equal("rip", guest.vcpu().regs()?.rip, guest.result(0))?;
    equal("steps behind sti", (guest.result(1), guest.result(2)), (1, 0))
}

guest_code!(
    masks_lint0,
    64,
    "mov $0xfee000f0, %eax",
    "movl $0x1ff, (%rax)",
    "mov $0xfee00350, %ebx",
    "movl $0x10700, (%rbx)",
    "sti",
    "out %al, $PORT_MARK",
    "out %al, $PORT_MARK",
    "movl $0x700, (%rbx)",
    "out %al, $PORT_MARK",
    "nop",
    done!()
);

fn a_masked_lint0_holds_it_and_the_window_back() -> Outcome {
    let guest = Guest::new(Chip::Split, masks_lint0())?;
    guest.reach_mark()?;
    holds("a guest that is not ready", !guest.vcpu().ready_for_interrupt(), true)?;
    guest.vcpu().request_interrupt_window(1);
    guest.reach_mark()?;
    guest.vcpu().request_interrupt_window(0);
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    interrupt(&guest, 0x41).refused("KVM_INTERRUPT again", libc::EEXIST)?;
    guest.reach_mark()?;
    // The stock module does not look at what waits when LINT0 is unmasked, but now it does.
    let now = events(&guest)?;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &now).granted("KVM_SET_VCPU_EVENTS")?;
    guest.finish()?;
    guest.came(0x40, 1)
}

guest_code!(
    without_apic,
    64,
    "mov $0x1b, %ecx",
    "rdmsr",
    "and $0xfffff7ff, %eax",
    "wrmsr",
    "sti",
    "0: out %al, $PORT_MARK",
    "jmp 0b"
);

fn a_disabled_apic_takes_it() -> Outcome {
    let guest = marking(without_apic())?;
    holds("a guest that is ready", guest.vcpu().ready_for_interrupt(), false)?;
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    guest.reach_mark()?;
    guest.came(0x40, 1)
}

guest_code!(halts_at_once, 64, "out %al, $PORT_MARK", "sti", "hlt", done!());

fn it_wakes_a_halted_guest() -> Outcome {
    let guest = Guest::new(Chip::Split, halts_at_once())?;
    guest.reach_mark()?;
    let target = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.vcpu().run()
        });
        let slept = target.sleeps();
        target.kick();
        holds("a halted guest", slept, target.state())?;
        equal("run", run.join().ok(), Some(Err(Errno(libc::EINTR))))
    })?;
    holds("a guest that is ready", guest.vcpu().ready_for_interrupt(), false)?;
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    guest.finish()?;
    guest.came(0x40, 1)
}

guest_code!(
    // 0x60 ends at the local APIC, 0x40 does not.
    both,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x60 * 8",
    "mov $0xfee000f0, %eax",
    "movl $0x1ff, (%rax)",
    "out %al, $PORT_MARK",
    "sti",
    "nop",
    "nop",
    "nop",
    done!(),
    "1: mov $0xfee000b0, %eax",
    "movl $0, (%rax)",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn it_waits_beside_a_message() -> Outcome {
    let guest = Guest::new(Chip::Split, both())?;
    guest.reach_mark()?;
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    message(&guest, HERE, 0x60)?;
    guest.finish()?;
    guest.came(0x40, 1)?;
    guest.came(0x60, 1)
}

/// A level-triggered route of pin 5 to vCPU 0, and the end of its interrupt.
fn end_exits(code: &[u8]) -> Outcome {
    let guest = marking(code)?;
    set_routes(&guest.vm, &[route(5, HERE, LEVEL | 0x50)]).granted("KVM_SET_GSI_ROUTING")?;
    for times in 1..4 {
        equal("status", line(&guest, 5)?, 1)?;
        guest.expect("exit", Exit::EndOfInterrupt { vector: 0x50 })?;
        guest.reach_mark()?;
        equal("interrupts", guest.count(0x50), times)?;
    }
    guest.reach_mark()
}

fn the_end_of_a_level_message_exits() -> Outcome {
    end_exits(marks_xapic())
}

fn the_end_of_a_level_message_exits_in_x2apic_mode() -> Outcome {
    end_exits(marks_x2apic())
}

guest_code!(
    suppresses,
    64,
    x2apic!(),
    "mov $0x803, %ecx",
    "rdmsr",
    "mov %rax, RESULT",
    "mov $0x80f, %ecx",
    "mov $0x11ff, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "rdmsr",
    "mov %rax, RESULT + 8",
    "sti",
    "0: out %al, $PORT_MARK",
    "jmp 0b"
);

fn a_suppressed_broadcast_exits_all_the_same() -> Outcome {
    end_exits(suppresses())?;
    let guest = marking(suppresses())?;
    equal("suppression in the version register", guest.result(0) >> 24 & 1, 1)?;
    equal("SVR", guest.result(1), 0x11ff)
}

/// Sends a message; with these routes its end does not exit.
fn does_not_exit(routes: &[kvm_irq_routing_entry], data: u32) -> Outcome {
    for code in [marks_xapic(), marks_x2apic()] {
        let guest = marking(code)?;
        set_routes(&guest.vm, routes).granted("KVM_SET_GSI_ROUTING")?;
        // What waits when the routes are followed would count whatever its destination.
        guest.reach_mark()?;
        message(&guest, HERE, data)?;
        guest.reach_mark()?;
        guest.reach_mark()?;
        equal("interrupts", guest.count(data as u8), 1)?;
    }
    Ok(())
}

fn the_end_of_an_edge_message_does_not_exit() -> Outcome {
    does_not_exit(&[route(5, HERE, 0x50), route(6, HERE, LEVEL | 0x51)], 0x50)
}

fn a_route_beyond_the_kept_ones_does_not_exit() -> Outcome {
    does_not_exit(&[route(SPLIT_PINS, HERE, LEVEL | 0x50)], LEVEL | 0x50)
}

fn a_message_without_route_does_not_exit() -> Outcome {
    does_not_exit(&[], LEVEL | 0x50)
}

fn a_route_to_another_vcpu_does_not_exit() -> Outcome {
    does_not_exit(&[route(5, HERE | 1 << 12, LEVEL | 0x50)], LEVEL | 0x50)
}

guest_code!(
    moves,
    64,
    xapic!(),
    "mov $0xfee000d0, %ebx",
    "sti",
    "out %al, $PORT_MARK",
    "movl $0x04000000, (%rbx)",
    "out %al, $PORT_MARK",
    "nop",
    "out %al, $PORT_MARK",
    "movl $0x08000000, (%rbx)",
    "out %al, $PORT_MARK",
    "nop",
    done!()
);

fn a_logical_route_follows_the_logical_id() -> Outcome {
    let guest = Guest::new(Chip::Split, moves())?;
    let logical = HERE | 1 << 2 | 4 << 12;
    set_routes(&guest.vm, &[route(5, logical, LEVEL | 0x50)]).granted("KVM_SET_GSI_ROUTING")?;
    guest.reach_mark()?;
    holds("no taker before", line(&guest, 5)? < 1, "one")?;
    guest.reach_mark()?;
    equal("status", line(&guest, 5)?, 1)?;
    guest.expect("exit", Exit::EndOfInterrupt { vector: 0x50 })?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    // The route goes elsewhere now, and nothing of it is left here.
    holds("no taker after", line(&guest, 5)? < 1, "one")?;
    message(&guest, HERE, LEVEL | 0x50)?;
    guest.finish()?;
    equal("interrupts", guest.count(0x50), 2)
}

fn a_new_route_is_followed_at_once() -> Outcome {
    for code in [marks_xapic(), marks_x2apic()] {
        let guest = marking(code)?;
        for vector in [0x50, 0x61, 0x45] {
            set_routes(&guest.vm, &[route(7, HERE, LEVEL | u32::from(vector))])
                .granted("KVM_SET_GSI_ROUTING")?;
            equal("status", line(&guest, 7)?, 1)?;
            guest.expect("exit", Exit::EndOfInterrupt { vector })?;
            guest.reach_mark()?;
        }
        message(&guest, HERE, LEVEL | 0x50)?;
        guest.reach_mark()?;
        set_routes(&guest.vm, &[]).granted("no routes")?;
        message(&guest, HERE, LEVEL | 0x45)?;
        guest.reach_mark()?;
    }
    Ok(())
}

guest_code!(
    in_service,
    64,
    x2apic!(),
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 0x50 * 8",
    "sti",
    "0: out %al, $PORT_MARK",
    "jmp 0b",
    "1: incq RESULT",
    "out %al, $PORT_MARK",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

/// A guest in the handler of 0x50, which was sent by this route.
fn serving(entry: kvm_irq_routing_entry) -> Outcome<Guest> {
    let guest = marking(in_service())?;
    set_routes(&guest.vm, &[entry]).granted("KVM_SET_GSI_ROUTING")?;
    message(&guest, HERE, LEVEL | 0x50)?;
    guest.reach_mark()?;
    equal("in the handler", guest.result(0), 1)?;
    Ok(guest)
}

fn a_route_that_changes_in_service_still_exits() -> Outcome {
    if is_old_stock() {
        return skip("the stock module of 6.1 forgets what was sent by the old route");
    }
    let guest = serving(route(5, HERE, LEVEL | 0x50))?;
    // Another vCPU's, with the same vector.
    set_routes(&guest.vm, &[route(5, HERE | 1 << 12, LEVEL | 0x50)]).granted("a new route")?;
    guest.expect("exit", Exit::EndOfInterrupt { vector: 0x50 })?;
    guest.reach_mark()
}

fn what_is_restored_in_service_exits_at_its_end() -> Outcome {
    let from = serving(route(5, HERE, LEVEL | 0x50))?;
    let apic: kvm_lapic_state = from.vcpu().receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    let to = Guest::new(Chip::Split, in_service())?;
    from.vcpu().set_immediate_exit(1);
    let _ = from.vcpu().run();
    to.memory.write_bytes(0, &from.memory.read_bytes(0, MEMORY_BYTES as usize));
    to.vcpu().set_sregs(&from.vcpu().sregs()?)?;
    to.vcpu().set_regs(&from.vcpu().regs()?)?;
    set_routes(&to.vm, &[route(5, HERE, LEVEL | 0x50)]).granted("KVM_SET_GSI_ROUTING")?;
    to.vcpu().send(ioctl::SET_LAPIC, &apic).granted("KVM_SET_LAPIC")?;
    to.expect("exit", Exit::EndOfInterrupt { vector: 0x50 })?;
    to.reach_mark()
}

fn the_end_on_the_second_vcpu_exits_there() -> Outcome {
    let guest = Guest::with_vcpus(Chip::Split, Mode::Long, 2, marks_x2apic())?;
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    guest.vcpus[1].send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
    set_routes(&guest.vm, &[route(5, HERE | 1 << 12, LEVEL | 0x50)])
        .granted("KVM_SET_GSI_ROUTING")?;
    for vcpu in [0, 1] {
        let exit = guest.exit_of(vcpu)?;
        holds("a mark", exit.is_out(PORT_MARK), exit)?;
    }
    equal("status", line(&guest, 5)?, 1)?;
    guest.reach_mark()?;
    // STI's shadow may be over only behind the mark.
    let exits = [guest.exit_of(1)?, guest.exit_of(1)?, guest.exit_of(1)?];
    let ends = exits.iter().filter(|e| **e == Exit::EndOfInterrupt { vector: 0x50 }).count();
    equal("ends", ends, 1)
}

guest_code!(
    timer_between,
    64,
    x2apic!(),
    // One shot, vector 0x70; the bus's ticks by one.
    "mov $0x832, %ecx",
    "mov $0x70, %eax",
    "wrmsr",
    "mov $0x83e, %ecx",
    "mov $0xb, %eax",
    "wrmsr",
    "out %al, $PORT_MARK",
    "sti",
    "nop",
    "mov $0x838, %ecx",
    "mov $1000, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "0: pause",
    "cmpq $1, COUNTS + 8 * 0x70",
    "jb 0b",
    done!()
);

fn a_timer_interrupt_comes_between_ends() -> Outcome {
    let guest = Guest::new(Chip::Split, timer_between())?;
    set_routes(&guest.vm, &[route(5, HERE, LEVEL | 0x50)]).granted("KVM_SET_GSI_ROUTING")?;
    guest.reach_mark()?;
    line(&guest, 5)?;
    guest.expect("exit", Exit::EndOfInterrupt { vector: 0x50 })?;
    guest.finish()?;
    equal("interrupts", [0x50, 0x70].map(|v| guest.count(v)), [1, 1])
}
