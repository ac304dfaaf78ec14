//! Bits of control and debug registers: those that a hypervisor needs for itself and a guest must not
//! notice, those that need a feature, and the instructions that change a few of them (SDM vol. 3A §2.5,
//! §17.2, vol. 3C §23.8).

use crate::kvm::file::CpuidTable;
use crate::machine::code::{done, guarded, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::tables::{CR0, CR4};
use crate::oracle::{self, Vendor};
use crate::outcome::{Outcome, equal, one_of};
use crate::runner::tests;

tests!("control_bits":
    a_guest_without_ne_has_none,
    a_guest_may_turn_its_caches_off,
    lmsw_sets_the_lower_bits_and_never_clears_pe,
    lmsw_from_memory,
    clts_clears_one_bit,
    every_bit_of_cr4_needs_its_feature,
    the_guest_has_no_bit_of_a_hypervisor,
    a_guarded_debug_register_traps_its_use,
    the_old_debug_registers_are_aliases_until_they_are_not,
    upper_halves_of_dr6_and_dr7_are_general_protection_faults,
    a_data_breakpoint_of_the_guest_is_raised,
    the_task_priority_is_four_bits,
);

guest_code!(
    without_ne,
    64,
    "mov %cr0, %rax",
    "btr $5, %rax",
    "mov %rax, %cr0",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT",
    "cpuid",
    "out %al, $PORT_MARK",
    "smsw %eax",
    "mov %rax, RESULT + 8",
    "mov %cr0, %rax",
    "bts $5, %rax",
    "mov %rax, %cr0",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 16",
    done!()
);

const NE: u64 = 1 << 5;

fn a_guest_without_ne_has_none() -> Outcome {
    let guest = Guest::new(Chip::Kernel, without_ne())?;
    guest.reach_mark()?;
    equal("CR0 from outside", guest.vcpu().sregs()?.cr0, CR0 & !NE)?;
    guest.finish()?;
    equal("CR0 without", guest.result(0), CR0 & !NE)?;
    equal("SMSW without", guest.result(1) & 0xffff, CR0 & !NE & 0xffff)?;
    equal("CR0 with", guest.result(2), CR0)
}

guest_code!(
    without_caches,
    64,
    "mov %cr0, %rax",
    "bts $30, %rax",
    "mov %rax, %cr0",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT",
    "wbinvd",
    "bts $29, %rax",
    "mov %rax, %cr0",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 8",
    "btr $29, %rax",
    "btr $30, %rax",
    "mov %rax, %cr0",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 16",
    done!()
);

fn a_guest_may_turn_its_caches_off() -> Outcome {
    let guest = Guest::new(Chip::Kernel, without_caches())?;
    guest.finish()?;
    let got = [0, 1, 2].map(|index| guest.result(index));
    equal("CR0 with CD, with NW too, without", got, [CR0 | 1 << 30, CR0 | 3 << 29, CR0])
}

guest_code!(
    lmsw,
    64,
    "mov $0xe, %eax",
    "lmsw %ax",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT",
    "xor %eax, %eax",
    "lmsw %ax",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 8",
    "mov $0xffff, %eax",
    "lmsw %ax",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 16",
    done!()
);

fn lmsw_sets_the_lower_bits_and_never_clears_pe() -> Outcome {
    let guest = Guest::new(Chip::Kernel, lmsw())?;
    guest.finish()?;
    let got = [0, 1, 2].map(|index| guest.result(index));
    let base = CR0 & !0xf;
    equal("after 0xe, 0, 0xffff", got, [base | 0xf, base | 1, base | 0xf])
}

guest_code!(
    lmsw_memory,
    64,
    "movw $0xb, FREE",
    "lmsw FREE",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT",
    "smsw FREE + 8",
    "mov FREE + 8, %rax",
    "mov %rax, RESULT + 8",
    done!()
);

fn lmsw_from_memory() -> Outcome {
    let guest = Guest::new(Chip::Kernel, lmsw_memory())?;
    guest.finish()?;
    let wanted = CR0 & !0xf | 0xb;
    equal(
        "CR0, and its lower half stored",
        [guest.result(0), guest.result(1)],
        [wanted, wanted & 0xffff],
    )
}

guest_code!(
    clts,
    64,
    "mov %cr0, %rax",
    "bts $3, %rax",
    "mov %rax, %cr0",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT",
    "clts",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 8",
    "clts",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 16",
    done!()
);

fn clts_clears_one_bit() -> Outcome {
    let guest = Guest::new(Chip::Kernel, clts())?;
    guest.finish()?;
    let got = [0, 1, 2].map(|index| guest.result(index));
    equal("CR0 with TS, after CLTS, after another", got, [CR0 | 8, CR0, CR0])
}

guest_code!(
    set_bit_of_cr4,
    64,
    "mov %cr4, %r12",
    "mov ARGUMENT, %rcx",
    "mov %r12, %rbx",
    "bts %rcx, %rbx",
    guarded!("mov %rbx, %cr4"),
    "mov %cr4, %rax",
    "mov %rax, RESULT",
    "mov %r12, %cr4",
    done!()
);

/// Bits of CR4 that come with a feature: leaf, register (0 EAX to 3 EDX) and bit (SDM vol. 3A §2.5).
const FEATURES: [(u64, u32, usize, u32); 9] = [
    (11, 7, 2, 2),
    (13, 1, 2, 5),
    (16, 7, 1, 0),
    (17, 1, 2, 17),
    (18, 1, 2, 26),
    (20, 7, 1, 7),
    (21, 7, 1, 20),
    (22, 7, 2, 3),
    (23, 7, 2, 7),
];

fn register(table: &mut CpuidTable, leaf: u32, register: usize) -> Option<&mut u32> {
    let entry = table.find(leaf, 0)?;
    Some(match register {
        0 => &mut entry.eax,
        1 => &mut entry.ebx,
        2 => &mut entry.ecx,
        _ => &mut entry.edx,
    })
}

fn every_bit_of_cr4_needs_its_feature() -> Outcome {
    for (bit, leaf, word, feature) in FEATURES {
        let guest = Guest::new(Chip::Kernel, set_bit_of_cr4())?;
        let mut table = guest.system.supported_cpuid()?;
        if let Some(word) = register(&mut table, leaf, word) {
            *word &= !(1 << feature);
        }
        guest.vcpu().set_cpuid(&table)?;
        guest.memory.write(ARGUMENT, bit);
        guest.finish()?;
        equal(&format!("bit {bit}: exceptions, vector, error code"), guest.faults(), (1, 13, 0))?;
        equal(&format!("bit {bit}: CR4"), guest.result(0) & !0x40, CR4)?;
    }
    Ok(())
}

guest_code!(
    hypervisor_bits,
    64,
    "mov %cr4, %rax",
    "mov %rax, RESULT",
    "mov $0xc0000080, %ecx",
    "rdmsr",
    "mov %rax, RESULT + 8",
    done!()
);

fn the_guest_has_no_bit_of_a_hypervisor() -> Outcome {
    let guest = Guest::new(Chip::Kernel, hypervisor_bits())?;
    guest.finish()?;
    equal("CR4.VMXE", guest.result(0) >> 13 & 1, 0)?;
    equal("EFER.SVME", guest.result(1) >> 12 & 1, 0)?;
    equal("CR4.VMXE from outside", guest.vcpu().sregs()?.cr4 >> 13 & 1, 0)?;
    equal("EFER.SVME from outside", guest.vcpu().sregs()?.efer >> 12 & 1, 0)
}

guest_code!(
    guarded_debug,
    64,
    "mov $0x2400, %eax",
    "mov %rax, %dr7",
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    guarded!("1: mov %dr0, %rax"),
    // The trap has cleared GD for its handler, and DR6 has to say what it was.
    "mov %dr7, %rax",
    "mov %rax, RESULT + 8",
    done!()
);

fn a_guarded_debug_register_traps_its_use() -> Outcome {
    let guest = Guest::new(Chip::Kernel, guarded_debug())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (1, 1, 0))?;
    equal("rip of the frame", guest.memory.read(FRAME_RIP), guest.result(0))?;
    equal("DR6.BD", guest.memory.read(FRAME_DR6) >> 13 & 1, 1)?;
    equal("DR7", guest.result(1), 0x400)
}

guest_code!(
    old_registers,
    64,
    "mov $0x500, %eax",
    "mov %rax, %dr7",
    ".byte 0x0f, 0x21, 0xeb", // mov %dr5, %rbx
    "mov %rbx, RESULT",
    ".byte 0x0f, 0x21, 0xe3", // mov %dr4, %rbx
    "mov %rbx, RESULT + 8",
    "mov %cr4, %rax",
    "bts $3, %rax",
    "mov %rax, %cr4",
    guarded!(".byte 0x0f, 0x21, 0xeb"),
    guarded!(".byte 0x0f, 0x23, 0xe3"), // mov %rbx, %dr4
    done!()
);

fn the_old_debug_registers_are_aliases_until_they_are_not() -> Outcome {
    let guest = Guest::new(Chip::Kernel, old_registers())?;
    guest.finish()?;
    equal("DR5 and DR4 without CR4.DE", [guest.result(0), guest.result(1)], [0x500, 0xffff_0ff0])?;
    equal("exceptions, vector, error code", guest.faults(), (2, 6, 0))
}

guest_code!(
    upper_halves,
    64,
    "mov $1, %eax",
    "shl $32, %rax",
    guarded!("mov %rax, %dr6"),
    guarded!("mov %rax, %dr7"),
    "mov %dr7, %rax",
    "mov %rax, RESULT",
    done!()
);

fn upper_halves_of_dr6_and_dr7_are_general_protection_faults() -> Outcome {
    let guest = Guest::new(Chip::Kernel, upper_halves())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (2, 13, 0))?;
    equal("DR7", guest.result(0), 0x400)
}

guest_code!(
    data_breakpoint,
    64,
    "mov $FREE, %eax",
    "mov %rax, %dr1",
    // Writes of four bytes.
    "mov $0xd00408, %eax",
    "mov %rax, %dr7",
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "mov FREE, %eax",
    guarded!("movl $1, FREE; 1:"),
    done!()
);

fn a_data_breakpoint_of_the_guest_is_raised() -> Outcome {
    let guest = Guest::new(Chip::Kernel, data_breakpoint())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (1, 1, 0))?;
    equal("rip of the frame", guest.memory.read(FRAME_RIP), guest.result(0))?;
    equal("DR6", guest.memory.read(FRAME_DR6) & 0xf, 2)
}

guest_code!(
    priority,
    64,
    "mov $16, %eax",
    guarded!("mov %rax, %cr8"),
    "mov $1, %eax",
    "shl $40, %rax",
    guarded!("mov %rax, %cr8"),
    "mov $15, %eax",
    "mov %rax, %cr8",
    "mov %cr8, %rbx",
    "mov %rbx, RESULT",
    done!()
);

fn the_task_priority_is_four_bits() -> Outcome {
    for chip in [Chip::None, Chip::Kernel] {
        let guest = Guest::new(chip, priority())?;
        guest.finish()?;
        // The stock module takes the lowest eight bits; the lab's emulated AMD CPU takes four, and no fault.
        if oracle::vendor() == Vendor::Intel {
            let (faults, vector, error) = guest.faults();
            equal("vector, error code", (vector, error), (13, 0))?;
            one_of("exceptions", faults, oracle::documented(&[2], &[2, 1]))?;
        }
        equal("CR8", guest.result(0), 15)?;
        equal("CR8 from outside", guest.vcpu().sregs()?.cr8, 15)?;
    }
    Ok(())
}
