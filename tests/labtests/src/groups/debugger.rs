//! A debugger in user space, beside a guest with debug registers and interrupts of its own (KVM API
//! §4.87).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::oracle;
use crate::outcome::{Answer, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("debugger":
    breakpoints_leave_the_guests_registers_alone,
    blocked_interrupts_come_later,
    an_unknown_control_bit_is_einval,
);

/// DR7 with nothing enabled, and with DR0 as a breakpoint for execution.
const NOTHING: u64 = 0x400;
const EXECUTION: u64 = 0x402;

fn debug(guest: &Guest, control: u32, breakpoint: u64) -> Outcome {
    let mut debug = kvm_guest_debug { control, ..Default::default() };
    debug.arch.debugreg[0] = breakpoint;
    debug.arch.debugreg[7] = if breakpoint != 0 { EXECUTION } else { NOTHING };
    guest.vcpu().send(ioctl::SET_GUEST_DEBUG, &debug).granted("KVM_SET_GUEST_DEBUG").map(drop)
}

guest_code!(
    two_places,
    64,
    "mov $0x1111, %eax",
    "mov %rax, %dr0",
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "lea 2f(%rip), %rax",
    "mov %rax, RESULT + 8",
    "out %al, $PORT_MARK",
    "1: nop",
    "mov %dr0, %rax",
    "mov %rax, RESULT + 16",
    "mov $0x2222, %eax",
    "mov %rax, %dr1",
    "mov %dr7, %rax",
    "mov %rax, RESULT + 24",
    "2: nop",
    "mov %dr1, %rax",
    "mov %rax, RESULT + 32",
    // Its upper half is reserved.
    "mov $1, %eax",
    "shl $32, %rax",
    guarded!("mov %rax, %dr7"),
    done!()
);

fn registers(guest: &Guest) -> Outcome<[u64; 3]> {
    let now: kvm_debugregs = guest.vcpu().receive(ioctl::GET_DEBUGREGS).granted("get")?;
    Ok([now.db[0], now.db[1], now.dr7])
}

fn breakpoints_leave_the_guests_registers_alone() -> Outcome {
    let guest = Guest::new(Chip::Kernel, two_places())?;
    guest.reach_mark()?;
    for (place, own) in [(0, [0x1111, 0, NOTHING]), (1, [0x1111, 0x2222, NOTHING])] {
        let at = guest.result(place);
        debug(&guest, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP, at)?;
        match guest.exit()? {
            Exit::Debug { exception: 1, pc, dr6, .. } => {
                equal("where it stopped, and DR6", (pc, dr6 & 0xf), (at, 1))?;
            }
            other => return fail(format!("expected the breakpoint got {other:x?}")),
        }
        equal("the guest's own from outside", registers(&guest)?, own)?;
    }
    equal("what the guest read", (guest.result(2), guest.result(3)), (0x1111, NOTHING))?;
    debug(&guest, 0, 0)?;
    guest.finish()?;
    equal("what it wrote meanwhile", guest.result(4), 0x2222)?;
    equal("afterwards", registers(&guest)?, [0x1111, 0x2222, NOTHING])?;
    let (count, vector, error) = guest.faults();
    equal("faults: how many, vector, error", (count, vector, error), (1, 13, 0))
}

guest_code!(
    open_and_closed,
    64,
    x2apic!(),
    "cli",
    "out %al, $PORT_MARK",
    "nop",
    "out %al, $PORT_MARK",
    "sti",
    "nop",
    "nop",
    "xor %eax, %eax",
    "cpuid",
    "out %al, $PORT_MARK",
    "nop",
    done!()
);

fn blocked_interrupts_come_later() -> Outcome {
    let guest = Guest::new(Chip::Kernel, open_and_closed())?;
    let offered = guest.system.extension(KVM_CAP_SET_GUEST_DEBUG2);
    holds("KVM_GUESTDBG_BLOCKIRQ", offered & KVM_GUESTDBG_BLOCKIRQ as i32 != 0, offered)?;
    guest.reach_mark()?;
    let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0x40, ..Default::default() };
    guest.vm.send(ioctl::SIGNAL_MSI, &msi).granted("KVM_SIGNAL_MSI")?;
    guest.reach_mark()?;
    debug(&guest, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_BLOCKIRQ, 0)?;
    guest.vcpu().call(ioctl::NMI, 0).granted("KVM_NMI")?;
    guest.reach_mark()?;
    equal("NMIs and interrupts while blocked", (guest.count(2), guest.count(0x40)), (0, 0))?;
    debug(&guest, 0, 0)?;
    guest.finish()?;
    equal("afterwards", (guest.count(2), guest.count(0x40)), (1, 1))
}

fn an_unknown_control_bit_is_einval() -> Outcome {
    if oracle::is_stock() {
        return skip("the stock module ignores what it does not know");
    }
    let guest = Guest::new(Chip::Kernel, two_places())?;
    for bit in [2, 15, 21, 31] {
        let control = KVM_GUESTDBG_ENABLE | 1 << bit;
        let debug = kvm_guest_debug { control, ..Default::default() };
        guest
            .vcpu()
            .send(ioctl::SET_GUEST_DEBUG, &debug)
            .refused(&format!("bit {bit}"), libc::EINVAL)?;
    }
    guest.reach_mark()
}
