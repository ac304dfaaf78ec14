//! Words that no VMM with good intentions writes: they may end the guest, never the host.

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::outcome::{Answer, Outcome, equal, fail, holds};
use crate::runner::tests;

tests!("hostile":
    a_debug_exceptions_payload_with_an_upper_half,
    the_same_payload_by_the_shared_page,
);

guest_code!(
    expecting,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, RESUME",
    "0: out %al, $PORT_MARK",
    "jmp 0b",
    "1: mov %dr6, %rax",
    "mov %rax, RESULT",
    done!()
);

/// A guest with a breakpoint enabled, so that its debug registers are loaded, and the event.
fn prepared() -> Outcome<(Guest, kvm_vcpu_events)> {
    let guest = Guest::new(Chip::None, expecting())?;
    let cap = KVM_CAP_EXCEPTION_PAYLOAD;
    guest.system.require(cap, "KVM_CAP_EXCEPTION_PAYLOAD")?;
    let mut enable = kvm_enable_cap { cap, ..Default::default() };
    enable.args[0] = 1;
    guest.vm.send(ioctl::ENABLE_CAP, &enable).granted("KVM_ENABLE_CAP")?;
    guest.reach_mark()?;
    let mut debug: kvm_debugregs =
        guest.vcpu().receive(ioctl::GET_DEBUGREGS).granted("KVM_GET_DEBUGREGS")?;
    (debug.db[0], debug.dr7) = (0x7000_0000, 0x402);
    guest.vcpu().send(ioctl::SET_DEBUGREGS, &debug).granted("KVM_SET_DEBUGREGS")?;
    let mut events: kvm_vcpu_events =
        guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")?;
    events.flags = KVM_VCPUEVENT_VALID_PAYLOAD;
    events.exception.pending = 1;
    events.exception.nr = 1;
    events.exception_has_payload = 1;
    events.exception_payload = 1 << 40 | 1 << 14;
    Ok((guest, events))
}

/// The guest has its exception, or is refused; and the next one runs.
fn goes_on(guest: &Guest) -> Outcome {
    match guest.exit()? {
        // Stock KVM under SVM hands the CPU the whole payload, and the CPU refuses to enter.
        Exit::FailEntry { .. } => {}
        exit if exit.is_out(crate::machine::layout::PORT_DONE) => {
            equal("vector", guest.faults().1, 1)?;
            let dr6 = guest.result(0);
            holds("a single step in DR6", dr6 & 0xffff_f000 == 0xffff_4000, dr6)?;
        }
        exit => return fail(format!("expected the guest's end got {exit:x?}")),
    }
    let next = Guest::new(Chip::None, expecting())?;
    next.reach_mark()?;
    next.reach_mark()
}

fn a_debug_exceptions_payload_with_an_upper_half() -> Outcome {
    let (guest, events) = prepared()?;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
    goes_on(&guest)
}

fn the_same_payload_by_the_shared_page() -> Outcome {
    let (guest, events) = prepared()?;
    let page = guest.vcpu().page();
    // SAFETY: fields of the mapped page, and KVM_RUN is not under way.
    unsafe {
        (&raw mut (*page).s.regs.events).write_volatile(events);
        (&raw mut (*page).kvm_dirty_regs).write_volatile(KVM_SYNC_X86_EVENTS.into());
    }
    goes_on(&guest)
}
