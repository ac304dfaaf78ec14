//! A debugger in user space, beside a guest with debug registers and interrupts of its own (KVM API
//! §4.87).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("debugger":
    breakpoints_leave_the_guests_registers_alone,
    blocked_interrupts_come_later,
    an_unknown_control_bit_is_einval,
    a_step_over_sti_is_one_instruction,
    a_step_over_mov_ss_is_two,
    general_detect_is_the_debuggers,
    int1_says_nothing_in_dr6,
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

guest_code!(
    sti_and_more,
    64,
    x2apic!(),
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "mov %ss, %edi",
    "out %al, $PORT_MARK",
    "1: sti",
    "2: xor %eax, %eax",
    "3: cpuid",
    "4: mov %edi, %ss",
    "5: nop",
    "6: cli",
    done!()
);

/// Steps from label 1; where each step ends, as distances from it. Twice: telling each time, and once and for all.
fn step(count: usize) -> Outcome<Vec<Vec<u64>>> {
    if oracle::vendor() == Vendor::Intel {
        return skip("the emulated CPU gives no single step behind an entry");
    }
    let each_and_once = [true, false].map(|each| {
        let guest = Guest::new(Chip::Kernel, sti_and_more())?;
        guest.reach_mark()?;
        let from = guest.result(0);
        // The OUT is completed by the first.
        let mut ends = Vec::new();
        for n in 0..count {
            if n == 0 || each {
                debug(&guest, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP, 0)?;
            }
            match guest.exit()? {
                Exit::Debug { exception: 1, pc, .. } => ends.push(pc.wrapping_sub(from)),
                other => return fail(format!("expected the end of a step got {other:x?}")),
            }
        }
        debug(&guest, 0, 0)?;
        guest.finish()?;
        Ok(ends)
    });
    each_and_once.into_iter().collect()
}

fn a_step_over_sti_is_one_instruction() -> Outcome {
    for ends in step(4)? {
        equal("ends of the steps", &ends[..], &[0, 1, 3, 5][..])?;
    }
    Ok(())
}

fn a_step_over_mov_ss_is_two() -> Outcome {
    for ends in step(6)? {
        equal("ends of the steps", &ends[4..], &[8, 9][..])?;
    }
    Ok(())
}

guest_code!(
    reads_dr0,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "out %al, $PORT_MARK",
    "nop",
    "1: mov %dr0, %rax",
    done!()
);

fn general_detect_is_the_debuggers() -> Outcome {
    if oracle::is_stock() && oracle::vendor() == Vendor::Amd {
        return skip("the stock module leaves it to the CPU, and the emulated one has none");
    }
    let guest = Guest::new(Chip::Kernel, reads_dr0())?;
    guest.reach_mark()?;
    let control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
    let mut on = kvm_guest_debug { control, ..Default::default() };
    on.arch.debugreg[7] = NOTHING | 1 << 13;
    guest.vcpu().send(ioctl::SET_GUEST_DEBUG, &on).granted("KVM_SET_GUEST_DEBUG")?;
    match guest.exit()? {
        Exit::Debug { exception: 1, pc, dr6 } => {
            equal("where it stopped, and DR6", (pc, dr6), (guest.result(0), 0xffff_2ff0))?;
        }
        other => return fail(format!("expected the detection got {other:x?}")),
    }
    debug(&guest, 0, 0)?;
    guest.finish()?;
    equal("faults of the guest's", guest.faults().0, 0)
}

guest_code!(
    int1,
    64,
    "mov $0xffff4ff1, %eax",
    "mov %rax, %dr6",
    "lea 7f(%rip), %rax",
    "mov %rax, RESUME",
    ".byte 0xf1",
    "7: movq $0, RESUME",
    "mov %dr6, %rax",
    "mov %rax, RESULT",
    done!()
);

fn int1_says_nothing_in_dr6() -> Outcome {
    let guest = Guest::new(Chip::Kernel, int1())?;
    guest.finish()?;
    let (count, vector, _) = guest.faults();
    equal("faults, and which", (count, vector), (1, 1))?;
    // Whether the breakpoints' bits go is left to the CPU.
    equal("DR6", guest.result(0) & !0xf, 0xffff_4ff0)
}
