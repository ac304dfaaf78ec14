//! Events from user space: NMIs, and interrupts of a VM whose interrupt controllers are the VMM's
//! (KVM API §4.16, §4.64, §5).

use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::threads::{Target, within};
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, Reply, equal, fail, holds};
use crate::runner::tests;

tests!("injection":
    an_nmi_arrives,
    an_nmi_wakes_a_halted_guest,
    an_nmi_is_held_while_the_guest_handles_one,
    three_nmis_are_two,
    an_interrupt_arrives_when_the_guest_is_ready,
    an_interrupt_waits_for_the_window,
    the_window_opens_one_instruction_after_sti,
    an_interrupt_ends_a_halt,
    of_two_interrupts_at_once_one_arrives,
    an_interrupt_that_is_read_and_set_again_arrives_once,
    an_interrupt_beyond_255_is_einval,
    an_interrupt_with_irqchip_is_enxio,
    an_exception_of_user_space_arrives,
    an_interrupt_that_faults_on_its_way_is_not_lost,
    an_nmi_behind_a_shadow_leaves_no_single_step,
);

fn nmi(guest: &Guest) -> Outcome {
    guest.vcpu().call(ioctl::NMI, 0).granted("KVM_NMI").map(drop)
}

guest_code!(mark, 64, "0: out %al, $PORT_MARK", "jmp 0b");

fn an_nmi_arrives() -> Outcome {
    for chip in [Chip::None, Chip::Kernel] {
        let guest = Guest::new(chip, mark())?;
        guest.reach_mark()?;
        for count in 1..4 {
            nmi(&guest)?;
            guest.reach_mark()?;
            equal("NMIs", guest.count(2), count)?;
        }
    }
    Ok(())
}

guest_code!(halt, 64, "hlt", done!());
guest_code!(halt_with_apic, 64, x2apic!(), "out %al, $PORT_MARK", "hlt", done!());

fn an_nmi_wakes_a_halted_guest() -> Outcome {
    let guest = Guest::new(Chip::None, halt())?;
    guest.expect("exit", Exit::Hlt)?;
    nmi(&guest)?;
    guest.finish()?;
    equal("NMIs", guest.count(2), 1)?;
    // With the kernel's irqchip the halt does not leave the kernel.
    let guest = Guest::new(Chip::Kernel, halt_with_apic())?;
    guest.reach_mark()?;
    let target = Target::new();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            target.is_me();
            guest.finish()
        });
        holds("a halted guest", target.sleeps(), target.state())?;
        // KVM_NMI waits for the vCPU; what does not is a message.
        let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0x400, ..Default::default() };
        let delivered = guest.vm.send(ioctl::SIGNAL_MSI, &msi);
        let ended = within(Duration::from_secs(5), || run.is_finished());
        target.kick();
        equal("deliveries", delivered, Ok(1))?;
        holds("an end", ended, "none")?;
        run.join().unwrap_or_else(|_| fail("the thread died"))
    })
}

guest_code!(
    slow_nmi,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 16",
    "movq $0, RESULT",
    "0: out %al, $PORT_MARK",
    "jmp 0b",
    // Tells how deep it is.
    "1: incq RESULT",
    "out %al, $PORT_MARK",
    "decq RESULT",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn events(guest: &Guest) -> Outcome<kvm_vcpu_events> {
    guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")
}

fn an_nmi_is_held_while_the_guest_handles_one() -> Outcome {
    let guest = Guest::new(Chip::None, slow_nmi())?;
    guest.reach_mark()?;
    nmi(&guest)?;
    guest.reach_mark()?;
    equal("NMIs, depth", (guest.count(2), guest.result(0)), (1, 1))?;
    equal("masked", events(&guest)?.nmi.masked, 1)?;
    nmi(&guest)?;
    guest.reach_mark()?;
    equal("NMIs, depth of the second", (guest.count(2), guest.result(0)), (2, 1))?;
    guest.reach_mark()?;
    equal("NMIs, depth at the end", (guest.count(2), guest.result(0)), (2, 0))?;
    equal("masked at the end", events(&guest)?.nmi.masked, 0)
}

fn three_nmis_are_two() -> Outcome {
    let guest = Guest::new(Chip::None, slow_nmi())?;
    guest.reach_mark()?;
    nmi(&guest)?;
    guest.reach_mark()?;
    for _ in 0..3 {
        nmi(&guest)?;
    }
    for _ in 0..4 {
        guest.reach_mark()?;
    }
    equal("one handled, one held, the rest merged", guest.count(2), 2)
}

fn interrupt(guest: &Guest, irq: u32) -> Reply {
    guest.vcpu().send(ioctl::INTERRUPT, &kvm_interrupt { irq })
}

guest_code!(mark_enabled, 64, "sti", "0: out %al, $PORT_MARK", "jmp 0b");

fn an_interrupt_arrives_when_the_guest_is_ready() -> Outcome {
    let guest = Guest::new(Chip::None, mark_enabled())?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    for vector in [0x20, 0x40, 0xff] {
        holds("a guest that is ready", guest.vcpu().ready_for_interrupt(), false)?;
        interrupt(&guest, vector.into()).granted("KVM_INTERRUPT")?;
        guest.reach_mark()?;
        guest.came(vector, 1)?;
    }
    Ok(())
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

fn an_interrupt_waits_for_the_window() -> Outcome {
    let guest = Guest::new(Chip::None, window())?;
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
    let guest = Guest::new(Chip::None, window())?;
    guest.reach_mark()?;
    guest.vcpu().request_interrupt_window(1);
    guest.expect("exit", Exit::InterruptWindow)?;
    equal("rip", guest.vcpu().regs()?.rip, guest.result(0))?;
    equal("steps behind sti", (guest.result(1), guest.result(2)), (1, 0))
}

guest_code!(halt_enabled, 64, "sti", "hlt", done!());

fn an_interrupt_ends_a_halt() -> Outcome {
    let guest = Guest::new(Chip::None, halt_enabled())?;
    guest.expect("exit", Exit::Hlt)?;
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    guest.finish()?;
    guest.came(0x40, 1)
}

fn of_two_interrupts_at_once_one_arrives() -> Outcome {
    let guest = Guest::new(Chip::None, mark_enabled())?;
    guest.reach_mark()?;
    interrupt(&guest, 0x40).granted("first")?;
    // EEXIST is documented; the stock module lets the second take the place of the first.
    interrupt(&guest, 0x41).granted("second")?;
    guest.reach_mark()?;
    guest.came(0x40, 0)?;
    guest.came(0x41, 1)
}

fn an_interrupt_that_is_read_and_set_again_arrives_once() -> Outcome {
    let guest = Guest::new(Chip::None, mark_enabled())?;
    guest.reach_mark()?;
    interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
    let sregs = guest.vcpu().sregs()?;
    equal("waiting interrupts", sregs.interrupt_bitmap, [0, 1, 0, 0])?;
    guest.vcpu().set_sregs(&sregs)?;
    for _ in 0..3 {
        guest.reach_mark()?;
    }
    guest.came(0x40, 1)
}

fn an_interrupt_beyond_255_is_einval() -> Outcome {
    let guest = Guest::new(Chip::None, mark_enabled())?;
    interrupt(&guest, 256).refused("256", libc::EINVAL)?;
    interrupt(&guest, u32::MAX).refused("2^32 - 1", libc::EINVAL)
}

fn an_interrupt_with_irqchip_is_enxio() -> Outcome {
    let guest = Guest::new(Chip::Kernel, mark_enabled())?;
    interrupt(&guest, 0x40).refused("KVM_INTERRUPT", libc::ENXIO)
}

guest_code!(
    expecting,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, RESUME",
    "0: out %al, $PORT_MARK",
    "jmp 0b",
    "1:",
    done!()
);

fn an_exception_of_user_space_arrives() -> Outcome {
    let guest = Guest::new(Chip::None, expecting())?;
    guest.reach_mark()?;
    let mut events = events(&guest)?;
    events.flags = 0;
    events.exception.injected = 1;
    events.exception.nr = 13;
    events.exception.has_error_code = 1;
    events.exception.error_code = 0x50;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (1, 13, 0x50))
}

fn an_interrupt_that_faults_on_its_way_is_not_lost() -> Outcome {
    // The page of the stack is taken away: pushing the frame is a TDP fault in delivery, after
    // which the interrupt has to be injected anew.
    let guest = Guest::new(Chip::None, mark_enabled())?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    for count in 1..5 {
        let stack = guest.vcpu().regs()?.rsp & !0xfff;
        guest.memory.advise(stack - 0x1000, 0x1000, libc::MADV_DONTNEED).granted("madvise")?;
        interrupt(&guest, 0x40).granted("KVM_INTERRUPT")?;
        guest.reach_mark()?;
        guest.came(0x40, count)?;
    }
    nmi(&guest)?;
    let stack = guest.vcpu().regs()?.rsp & !0xfff;
    guest.memory.advise(stack - 0x1000, 0x1000, libc::MADV_DONTNEED).granted("madvise")?;
    guest.reach_mark()?;
    equal("NMIs", guest.count(2), 1)
}

guest_code!(
    exits_in_the_shadow,
    64,
    "out %al, $PORT_MARK",
    "xor %eax, %eax",
    "cpuid",
    "pushfq",
    "popq RESULT",
    "mov %dr6, %rax",
    "mov %rax, RESULT + 8",
    done!()
);

fn an_nmi_behind_a_shadow_leaves_no_single_step() -> Outcome {
    const TF: u64 = 1 << 8;
    const BS: u64 = 1 << 14;
    // The shadow holds for one instruction: the first time for one that does not exit, then for CPUID.
    for skipped in [0, 2] {
        let guest = Guest::new(Chip::None, exits_in_the_shadow())?;
        guest.reach_mark()?;
        guest.vcpu().set_immediate_exit(1);
        holds("the mark's end", guest.vcpu().run().is_err(), "an exit")?;
        guest.vcpu().set_immediate_exit(0);
        let mut regs = guest.vcpu().regs()?;
        regs.rip += skipped;
        guest.vcpu().set_regs(&regs)?;
        let mut events = events(&guest)?;
        events.flags = KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW;
        events.nmi.pending = 1;
        events.interrupt.shadow = 1;
        guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
        guest.finish()?;
        equal("NMIs", guest.count(2), 1)?;
        equal("debug exceptions", guest.count(1), 0)?;
        if oracle::is_stock() && oracle::vendor() == Vendor::Amd {
            // Its own step's TF is on in the flags that the guest pushes.
            continue;
        }
        equal("TF", guest.result(0) & TF, 0)?;
        equal("BS", guest.result(1) & BS, 0)?;
    }
    Ok(())
}
