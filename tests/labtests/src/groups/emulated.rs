//! Instructions whose operand is a device and which are more than a load or a store; what an access is
//! that user space has answered; single-stepping over a repeated one.

use crate::kvm::exit::Exit;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::memory::{Memory, PAGE};
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, equal, holds, skip};
use crate::runner::tests;

tests!("emulated":
    segments_tasks_and_frames_come_from_devices,
    an_answered_access_completes_the_instruction_that_made_it,
    a_repeated_load_from_a_device_traps_after_each_iteration,
    an_access_by_a_segment_crosses_from_memory_into_a_device,
);

guest_code!(
    from_devices,
    64,
    "mov $NOWHERE, %ebx",
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT + 48",
    "mov (%rbx), %ss",
    "mov %ss, %eax",
    "mov %rax, RESULT",
    "movq (%rbx), %mm1",
    "movq %mm1, RESULT + 8",
    "movq %mm1, 8(%rbx)",
    "mov %rsp, %r8",
    "mov %rbx, %rbp",
    "leave",
    "mov %rsp, RESULT + 16",
    "mov %rbp, RESULT + 24",
    "lea 0x100(%rbx), %rsp",
    "enter $0x20, $0",
    "mov %rsp, RESULT + 32",
    "mov %r8, %rsp",
    // The descriptor of the task register, 0x20, is busy.
    "movb $0x89, 0x1025",
    "ltr (%rbx)",
    "str %eax",
    "mov %rax, RESULT + 40",
    "ljmp *(%rbx)",
    "ud2",
    "1:",
    done!()
);

fn answer(guest: &Guest, what: &str, bytes: &[u8]) -> Outcome {
    equal(what, guest.exit()?, Exit::mmio(false, NOWHERE, &vec![0; bytes.len()]))?;
    guest.vcpu().answer(bytes);
    Ok(())
}

fn segments_tasks_and_frames_come_from_devices() -> Outcome {
    let guest = Guest::new(Chip::None, from_devices())?;
    let all = 0x1122_3344_5566_7788_u64.to_le_bytes();
    answer(&guest, "MOV SS", &[0x18, 0])?;
    answer(&guest, "MOVQ of MMX", &all)?;
    guest.expect("MOVQ back", Exit::mmio(true, NOWHERE + 8, &all))?;
    answer(&guest, "LEAVE", &0x1234_u64.to_le_bytes())?;
    guest.expect("ENTER", Exit::mmio(true, NOWHERE + 0xf8, &0x1234_u64.to_le_bytes()))?;
    answer(&guest, "LTR", &[0x20, 0])?;
    let mut pointer = (guest.result(6) as u32).to_le_bytes().to_vec();
    pointer.extend_from_slice(&[0x10, 0]);
    answer(&guest, "JMP far", &pointer)?;
    guest.finish()?;
    let got = [0, 1, 2, 3, 4, 5].map(|index| guest.result(index));
    equal(
        "SS, MM1, RSP and RBP after LEAVE, RSP after ENTER, TR",
        got,
        [0x18, u64::from_le_bytes(all), NOWHERE + 8, 0x1234, NOWHERE + 0xf8 - 0x20, 0x20],
    )?;
    equal("the descriptor is busy", guest.memory.read(GDT + 0x20) >> 40 & 0xff, 0x8b)
}

guest_code!(
    swapped,
    64,
    "mov $NOWHERE, %ebx",
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "mov $1, %eax",
    "1: add (%rbx), %eax",
    "mov %rax, RESULT + 8",
    done!()
);

fn an_answered_access_completes_the_instruction_that_made_it() -> Outcome {
    let guest = Guest::new(Chip::None, swapped())?;
    // As another CPU of the guest could: OUT to a port where the ADD was.
    for answers in [1, 2] {
        equal("a load", guest.exit()?, Exit::mmio(false, NOWHERE, &[0; 4]))?;
        guest.vcpu().answer(&[7, 0, 0, 0]);
        guest.memory.write_bytes(guest.result(0), &[0xe6, PORT_MARK as u8]);
        if answers == 1 {
            // And once more, with the bytes as they were.
            guest.finish()?;
            equal("the sum", guest.result(1), 8)?;
            guest.memory.write_bytes(guest.result(0), &[0x03, 0x03]);
            guest.place(0, crate::machine::guest::Mode::Long)?;
        }
    }
    guest.finish()?;
    equal("the sum", guest.result(1), 8)
}

guest_code!(
    stepped,
    64,
    "lea 2f(%rip), %rax",
    "mov %rax, HOOKS + 8",
    "mov $NOWHERE, %esi",
    "mov $3, %ecx",
    "xor %edi, %edi",
    "pushf",
    "orl $0x100, (%rsp)",
    "popf",
    "1: rep lodsb",
    "nop",
    "pushf",
    "andl $~0x100, (%rsp)",
    "popf",
    "lea 1b(%rip), %rax",
    "mov %rax, RESULT + 0x80",
    done!(),
    // #DB: writes down RIP of its frame. Three registers and two words lie above it.
    "2: mov 40(%rsp), %rax",
    "mov %rax, RESULT(, %rdi, 8)",
    "inc %edi",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn a_repeated_load_from_a_device_traps_after_each_iteration() -> Outcome {
    let guest = Guest::new(Chip::None, stepped())?;
    for n in 0..3 {
        equal("an element", guest.exit()?, Exit::mmio(false, NOWHERE + n, &[0]))?;
        guest.vcpu().answer(&[n as u8]);
    }
    guest.finish()?;
    if oracle::is_stock() {
        return skip("stock KVM does not trap after each iteration that it emulates");
    }
    let (at, intel) = (guest.result(16), oracle::vendor() == Vendor::Intel);
    let traps = guest.words_that_are(at);
    // The lab's emulated Intel CPU traps once more when it enters a guest that single-steps.
    let most = if intel { 5 } else { 2 };
    holds("2 traps between iterations, or copies of them", (2..=most).contains(&traps), traps)
}

guest_code!(
    across,
    64,
    // FS begins four bytes below the device.
    "mov $0xc0000100, %ecx",
    "mov $NOWHERE - 4, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "movabs $0x8877665544332211, %rax",
    // As any other access of the device before: the next one is looked at in the loop.
    "mov $NOWHERE, %ebx",
    "mov %eax, (%rbx)",
    "mov %eax, (%rbx)",
    "mov %rax, %fs:0",
    "mov %fs:0, %rdx",
    "mov %rdx, RESULT",
    done!()
);

fn an_access_by_a_segment_crosses_from_memory_into_a_device() -> Outcome {
    let (guest, page) = (Guest::new(Chip::None, across())?, Memory::new(PAGE)?);
    guest.vm.set_slot(1, 0, NOWHERE - PAGE, PAGE, page.hva()).granted("slot")?;
    for _ in 0..2 {
        guest.expect("a store", Exit::mmio(true, NOWHERE, &[0x11, 0x22, 0x33, 0x44]))?;
    }
    guest.expect("its upper half", Exit::mmio(true, NOWHERE, &[0x55, 0x66, 0x77, 0x88]))?;
    answer(&guest, "a load's upper half", &[0xa5, 0xa6, 0xa7, 0xa8])?;
    guest.finish()?;
    equal("the store's lower half", page.read(PAGE - 8) >> 32, 0x4433_2211)?;
    equal("both halves of the load", guest.result(0), 0xa8a7_a6a5_4433_2211)
}
