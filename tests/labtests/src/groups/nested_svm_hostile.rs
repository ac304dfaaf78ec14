//! Hypervisors that mean harm, or whose VMM does: blocks that change or go while their guest runs, maps that are no
//! memory, events that do not exist. What comes of it may differ, but the vCPU stays a vCPU.

use std::thread;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::Memory;
use crate::oracle::is_stock;
use crate::outcome::{Answer, Outcome, equal, fail, holds};
use crate::runner::tests;

use super::nested_svm::{
    BLOCK, EXIT_CPUID, EXIT_INVALID, L2_CODE, L2_CPUID, L2_MARKS, RIP, prepared, program,
    program_of_addresses, with, with_vcpus,
};

tests!("nested_svm_hostile":
    every_event_that_l1_injects_is_delivered_or_refused,
    every_reserved_bit_of_the_save_area_is_refused,
    a_block_that_another_vcpu_rewrites_is_run_or_refused,
    maps_that_are_no_memory_close_all,
    a_block_whose_slot_goes_while_its_guest_runs,
    registers_set_while_l2_runs_are_l2s,
    an_init_ends_the_run_of_a_guest_that_was_to_hear_of_it,
    an_smi_ends_the_run_of_a_guest_that_was_to_hear_of_it,
);

const EXIT_INIT: u64 = 0x63;
const EXIT_SMI: u64 = 0x62;
const EXIT_IO: u64 = 0x7b;
const EXIT_MSR: u64 = 0x7c;
const EXIT_SHUTDOWN: u64 = 0x7f;
/// The third intercept word.
const THIRD: u64 = BLOCK + 0x0c;
const CPUID: u32 = 1 << 18;
const IO: u32 = 1 << 27;
const MSR: u32 = 1 << 28;
const SHUTDOWN: u32 = 1 << 31;

fn put_u32(memory: &Memory, at: u64, value: u32) {
    memory.write_bytes(at, &value.to_le_bytes());
}

/// A guest before its first VMRUN but one, and the block that can be run.
fn ready(l2: &[u8]) -> Outcome<(Guest, Vec<u8>)> {
    let guest = with(program(), l2)?;
    guest.reach_mark()?;
    let good = guest.memory.read_bytes(BLOCK, 4096);
    Ok((guest, good))
}

/// The block that was run before is run as ever.
fn still_runs(guest: &Guest, good: &[u8]) -> Outcome {
    guest.memory.write_bytes(BLOCK, good);
    guest.reach_mark()?;
    equal("the exit code of the good block", guest.result(0), EXIT_CPUID)
}

fn every_event_that_l1_injects_is_delivered_or_refused() -> Outcome {
    let (guest, good) = ready(&L2_CPUID)?;
    for kind in 0..8_u64 {
        for vector in 0..256_u64 {
            let exists = match kind {
                0 | 2 | 4 => true,
                // L2 is in 64-bit mode, without INTO and BOUND.
                3 => matches!(vector, 0 | 1 | 3 | 6..=8 | 10..=14 | 16..=19 | 30),
                _ => false,
            };
            guest.memory.write_bytes(BLOCK, &good);
            put_u32(&guest.memory, THIRD, CPUID | SHUTDOWN);
            // Without an IDT no delivery succeeds.
            guest.memory.write(BLOCK + 0x480, 0);
            guest.memory.write(BLOCK + 0xa8, 1 << 31 | kind << 8 | vector);
            guest.reach_mark()?;
            let code = guest.result(0);
            let what = format!("an exit for type {kind}, vector {vector:#x}");
            // Without NRIP save, stock KVM loses an INT n whose delivery a host interrupt cuts off.
            let lost = kind == 4 && is_stock() && code == EXIT_CPUID;
            if exists {
                holds(&what, code == EXIT_SHUTDOWN || lost, code)?;
            } else if !is_stock() {
                equal(&what, code, EXIT_INVALID)?;
            } else {
                // Stock KVM leaves it to the CPU; the emulated one tells a refusal with 32 bits.
                const REFUSED: u64 = 0xffff_ffff;
                let known = [EXIT_INVALID, REFUSED, EXIT_SHUTDOWN, EXIT_CPUID].contains(&code);
                holds(&what, known, code)?;
            }
        }
        still_runs(&guest, &good)?;
    }
    Ok(())
}

fn every_reserved_bit_of_the_save_area_is_refused() -> Outcome {
    let (guest, good) = ready(&L2_CPUID)?;
    let upper: Vec<u32> = (32..64).collect();
    let efer: Vec<u32> = (1..8).chain([9, 16, 19]).chain(32..64).collect();
    let beyond: Vec<u32> = (52..64).collect();
    let words: [(&str, u64, &[u32]); 6] = [
        ("EFER", 0x4d0, &efer),
        ("CR4", 0x548, &upper),
        ("CR3", 0x550, &beyond),
        ("CR0", 0x558, &upper),
        ("DR7", 0x560, &upper),
        ("DR6", 0x568, &upper),
    ];
    for (name, at, bits) in words {
        for bit in bits {
            guest.memory.write_bytes(BLOCK, &good);
            guest.memory.write(BLOCK + at, guest.memory.read(BLOCK + at) | 1 << bit);
            guest.reach_mark()?;
            equal(&format!("{name} with bit {bit}"), guest.result(0), EXIT_INVALID)?;
        }
        still_runs(&guest, &good)?;
    }
    Ok(())
}

/// Where the other vCPU's program lies.
const REWRITER: u64 = FREE + 0xc000;

guest_code!(
    // Words of the block go bad and good again, for a while.
    rewrites,
    64,
    "mov $FREE, %edi",
    "mov $200000, %ecx",
    "mov 0x4d0(%rdi), %rbx",
    "mov 0x548(%rdi), %rdx",
    "mov 0x48(%rdi), %rsi",
    "0: movl $0, 0x10(%rdi)",
    "movl $1, 0x10(%rdi)",
    "movl $0, 0x58(%rdi)",
    "movl $1, 0x58(%rdi)",
    "movq $0, 0x4d0(%rdi)",
    "mov %rbx, 0x4d0(%rdi)",
    "movl $1 << 8, 0x54c(%rdi)",
    "mov %rdx, 0x548(%rdi)",
    "movq $-1, 0x48(%rdi)",
    "mov %rsi, 0x48(%rdi)",
    "movl $1 << 26, 0x60(%rdi)",
    "movl $1 << 24, 0x60(%rdi)",
    "dec %ecx",
    "jnz 0b",
    "out %al, $PORT_DONE",
    "hlt",
);

fn a_block_that_another_vcpu_rewrites_is_run_or_refused() -> Outcome {
    let guest = with_vcpus(Chip::None, 2, program(), &L2_CPUID)?;
    guest.reach_mark()?;
    let good = guest.memory.read_bytes(BLOCK, 4096);
    guest.memory.write_bytes(REWRITER, rewrites());
    let mut regs = guest.vcpus[1].regs()?;
    regs.rip = REWRITER;
    guest.vcpus[1].set_regs(&regs)?;
    thread::scope(|scope| {
        let other = scope.spawn(|| guest.finish_of(1));
        while !other.is_finished() {
            guest.reach_mark()?;
            let code = guest.result(0);
            holds("CPUID or a refusal", [EXIT_CPUID, EXIT_INVALID].contains(&code), code)?;
        }
        other.join().unwrap_or_else(|_| fail("the other vCPU's thread has ended"))
    })?;
    // What was begun with what is written there last.
    guest.reach_mark()?;
    still_runs(&guest, &good)
}

fn maps_that_are_no_memory_close_all() -> Outcome {
    // OUT to a port that L1 does not ask for; RDMSR of KERNEL_GS_BASE.
    let io = [0xe6, 0x80, 0x0f, 0xa2, 0xf4];
    let msr = [0xb9, 0x02, 0x01, 0x00, 0xc0, 0x0f, 0x32, 0x0f, 0xa2, 0xf4];
    let cases: [(&[u8], u64, u32, u64); 2] =
        [(&io, 0x40, IO, EXIT_IO), (&msr, 0x48, MSR, EXIT_MSR)];
    for (l2, map, intercept, code) in cases {
        let (guest, good) = ready(l2)?;
        for nowhere in [0x4000_0000, NOWHERE, 0xff_ffff_f000, !0xfff] {
            guest.memory.write_bytes(BLOCK, &good);
            put_u32(&guest.memory, THIRD, CPUID | intercept);
            guest.memory.write(BLOCK + map, nowhere);
            guest.reach_mark()?;
            let found = guest.result(0);
            holds("the exit, or a refusal", [code, EXIT_INVALID].contains(&found), found)?;
        }
        guest.memory.write_bytes(L2_CODE, &L2_CPUID);
        still_runs(&guest, &good)?;
    }
    Ok(())
}

/// Where the slot that goes lies.
const GOES: u64 = 0x4000_0000;

fn a_block_whose_slot_goes_while_its_guest_runs() -> Outcome {
    let guest = with(program_of_addresses(), &L2_MARKS)?;
    guest.reach_mark()?;
    let other = Memory::new(0x1000)?;
    other.write_bytes(0, &guest.memory.read_bytes(BLOCK, 4096));
    guest.vm.set_slot(1, 0, GOES, other.bytes(), other.hva()).granted("the slot")?;
    guest.memory.write(ARGUMENT, GOES);
    guest.reach_mark()?;
    let rip = guest.vcpu().regs()?.rip;
    holds("L2 runs", (L2_CODE..L2_CODE + 3).contains(&rip), rip)?;
    guest.vm.set_slot(1, 0, GOES, 0, other.hva()).granted("no slot")?;
    // L1 cannot be told of the exit: its machine shuts down, or (stock) L2 gets a fault, and runs L1's handler, which
    // goes on behind VMRUN.
    let exit = guest.vcpu().run().granted("KVM_RUN")?;
    let ends = matches!(exit, Exit::Shutdown) || exit.is_out(PORT_FAULT) || exit.is_out(PORT_MARK);
    holds("the end of the guest", ends, &exit)?;
    // A reset makes it a vCPU again.
    let mut sregs = guest.vcpu().sregs()?;
    sregs.efer &= !(1 << 12);
    guest.vcpu().set_sregs(&sregs)?;
    guest.place(0, Mode::Long)?;
    guest.reach_mark()
}

fn registers_set_while_l2_runs_are_l2s() -> Outcome {
    let (guest, _) = ready(&L2_MARKS)?;
    guest.reach_mark()?;
    let mut regs = guest.vcpu().regs()?;
    // The same instructions elsewhere.
    guest.memory.write_bytes(L2_CODE + 0x100, &L2_MARKS);
    (regs.rip, regs.rbx) = (L2_CODE + 0x100, 0x1234);
    guest.vcpu().set_regs(&regs)?;
    let sregs = guest.vcpu().sregs()?;
    guest.vcpu().set_sregs(&sregs)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_CPUID)?;
    equal("RIP", guest.memory.read(BLOCK + RIP), L2_CODE + 0x102)?;
    equal("RBX", guest.vcpu().regs()?.rbx, 0x1234)
}

guest_code!(
    // An INIT of its own, which waits for GIF, and L2 then.
    inits,
    64,
    prepared!(),
    "push %rdi",
    x2apic!(),
    "pop %rdi",
    "movl $1 << 18 | 1 << 3, 0x0c(%rdi)",
    "clgi",
    "mov $0x830, %ecx",
    "mov $0x44500, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $FREE, %eax",
    "vmrun",
    "mov FREE + 0x70, %rax",
    "mov %rax, RESULT",
    "out %al, $PORT_DONE",
    "hlt",
);

fn an_init_ends_the_run_of_a_guest_that_was_to_hear_of_it() -> Outcome {
    let guest = with(inits(), &L2_CPUID)?;
    guest.finish()?;
    equal("exit code", guest.result(0), EXIT_INIT)
}

fn an_smi_ends_the_run_of_a_guest_that_was_to_hear_of_it() -> Outcome {
    let (guest, good) = ready(&L2_MARKS)?;
    guest.memory.write_bytes(BLOCK, &good);
    put_u32(&guest.memory, THIRD, CPUID | 1 << 2);
    guest.reach_mark()?;
    guest.vcpu().call(ioctl::SMI, 0).granted("KVM_SMI")?;
    guest.reach_mark()?;
    equal("exit code", guest.result(0), EXIT_SMI)
}
