//! Instructions that the hypervisor answers: CPUID, RDMSR, hypercalls, RDTSC, HLT, control
//! registers; and single-stepping over them.

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, CpuidTable};
use crate::kvm::ioctl;
use crate::machine::code::{done, foreign_hypercall, guest_code, hypercall};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, equal, holds, one_of};
use crate::runner::tests;

use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug};

tests!("instructions":
    cpuid_answers_what_was_set,
    cpuid_of_the_xsave_area_follows_xcr0,
    cpuid_shows_osxsave_only_when_it_is_on,
    an_msr_is_read_as_it_was_set,
    an_msr_is_written_for_user_space_to_see,
    swapgs_and_syscall_registers_are_the_guests_own,
    an_unknown_hypercall_is_enosys,
    a_hypercall_of_user_mode_is_eperm,
    the_tsc_goes_forward,
    rdtscp_gives_the_tsc_aux_of_the_guest,
    caches_and_translations_may_be_flushed,
    control_registers_are_read_as_written,
    debug_registers_are_the_guests_own,
    a_hardware_breakpoint_of_the_guest_is_raised,
    single_steps_go_over_what_is_intercepted,
    single_steps_go_over_ports_and_devices,
    user_space_can_single_step,
    the_fpu_state_survives_exits,
    real_mode_can_become_protected_mode,
    syscall_from_32_bit_code_is_the_guests_makes,
    sysenters_msrs_are_as_wide_as_the_guests_make_has_them,
);

guest_code!(
    cpuid_leaf,
    64,
    "mov ARGUMENT, %eax",
    "mov ARGUMENT + 4, %ecx",
    "cpuid",
    "mov %rax, RESULT",
    "mov %rbx, RESULT + 8",
    "mov %rcx, RESULT + 16",
    "mov %rdx, RESULT + 24",
    done!()
);

fn cpuid(guest: &Guest, function: u32, index: u32) -> Outcome<[u32; 4]> {
    guest.memory.write(ARGUMENT, u64::from(function) | u64::from(index) << 32);
    guest.place(0, crate::machine::guest::Mode::Long)?;
    guest.finish()?;
    let words = [0, 1, 2, 3].map(|index| guest.result(index));
    holds("upper halves of zero", words.iter().all(|word| word >> 32 == 0), words)?;
    Ok(words.map(|word| word as u32))
}

fn cpuid_answers_what_was_set() -> Outcome {
    let guest = Guest::new(Chip::Kernel, cpuid_leaf())?;
    let mut table = guest.system.supported_cpuid()?;
    if let Some(entry) = table.find(0x8000_0003, 0) {
        [entry.eax, entry.ebx, entry.ecx, entry.edx] = [0x1111, 0x2222, 0x3333, 0x4444];
    }
    guest.vcpu().set_cpuid(&table)?;
    equal("a leaf of ours", cpuid(&guest, 0x8000_0003, 9)?, [0x1111, 0x2222, 0x3333, 0x4444])?;
    for entry in table.used() {
        if matches!(entry.function, 0 | 0x4000_0000 | 0x4000_0001 | 0x8000_0002 | 0x8000_0008) {
            let wanted = [entry.eax, entry.ebx, entry.ecx, entry.edx];
            let what = format!("leaf {:#x}.{:#x}", entry.function, entry.index);
            equal(&what, cpuid(&guest, entry.function, entry.index)?, wanted)?;
        }
    }
    equal("a leaf beyond all", cpuid(&guest, 0x8765_4321, 0)?, [0; 4])
}

guest_code!(
    xsave_size,
    64,
    "mov %cr4, %rax",
    "bts $18, %rax",
    "mov %rax, %cr4",
    "mov $0xd, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "mov %rbx, RESULT",
    "xor %ecx, %ecx",
    "xor %edx, %edx",
    "mov $7, %eax",
    "xsetbv",
    "mov $0xd, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "mov %rbx, RESULT + 8",
    done!()
);

fn cpuid_of_the_xsave_area_follows_xcr0() -> Outcome {
    let guest = Guest::new(Chip::Kernel, xsave_size())?;
    let mut table = guest.system.supported_cpuid()?;
    if table.find(0xd, 0).is_none_or(|entry| entry.eax & 4 == 0) {
        return crate::outcome::skip("no AVX");
    }
    guest.finish()?;
    equal("with x87 alone, and with AVX", (guest.result(0), guest.result(1)), (576, 832))
}

guest_code!(
    osxsave,
    64,
    "mov $1, %eax",
    "cpuid",
    "mov %rcx, RESULT",
    "mov %cr4, %rax",
    "bts $18, %rax",
    "mov %rax, %cr4",
    "mov $1, %eax",
    "cpuid",
    "mov %rcx, RESULT + 8",
    done!()
);

fn cpuid_shows_osxsave_only_when_it_is_on() -> Outcome {
    let guest = Guest::new(Chip::Kernel, osxsave())?;
    guest.finish()?;
    let shown = [0, 1].map(|index| guest.result(index) >> 27 & 1);
    equal("OSXSAVE before and after", shown, [0, 1])
}

guest_code!(
    read_msr,
    64,
    "mov ARGUMENT, %ecx",
    "rdmsr",
    "mov %eax, RESULT",
    "mov %edx, RESULT + 4",
    done!()
);

fn an_msr_is_read_as_it_was_set() -> Outcome {
    let cases = [
        (0xc000_0081, 0x0023_0010_0000_0000),
        (0xc000_0082, 0xffff_ffff_8123_4560),
        (0xc000_0102, 0xffff_8880_0000_4000),
        (0x277, 0x0407_0606_0007_0106),
        (0x174, 0x10),
        (0xc000_0103, 0x1234),
        (0x2ff, 0xc06),
    ];
    for (index, value) in cases {
        let guest = Guest::new(Chip::Kernel, read_msr())?;
        equal(&format!("set {index:#x}"), guest.vcpu().set_msr(index, value)?, true)?;
        guest.memory.write(ARGUMENT, index.into());
        guest.finish()?;
        equal(&format!("MSR {index:#x}"), guest.result(0), value)?;
    }
    Ok(())
}

guest_code!(
    write_msrs,
    64,
    "mov $0xc0000082, %ecx",
    "mov $0x81111111, %eax",
    "mov $0xffffffff, %edx",
    "wrmsr",
    "mov $0xc0000102, %ecx",
    "mov $0x2222, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $0xc0000080, %ecx",
    "rdmsr",
    "and $~0x1, %eax",
    "wrmsr",
    "mov $0x277, %ecx",
    "mov $0x00070406, %eax",
    "mov $0x00070106, %edx",
    "wrmsr",
    done!()
);

fn an_msr_is_written_for_user_space_to_see() -> Outcome {
    let guest = Guest::new(Chip::Kernel, write_msrs())?;
    guest.finish()?;
    equal("LSTAR", guest.vcpu().msr(0xc000_0082)?, Some(0xffff_ffff_8111_1111))?;
    equal("KERNEL_GS_BASE", guest.vcpu().msr(0xc000_0102)?, Some(0x2222))?;
    equal("EFER", guest.vcpu().sregs()?.efer, crate::machine::tables::EFER & !1)?;
    equal("PAT", guest.vcpu().msr(0x277)?, Some(0x0007_0106_0007_0406))
}

guest_code!(
    swap,
    64,
    "mov $0xc0000101, %ecx",
    "mov $0x1000, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $0xc0000102, %ecx",
    "mov $0x2000, %eax",
    "wrmsr",
    "swapgs",
    "out %al, $PORT_MARK",
    "mov $0xc0000101, %ecx",
    "rdmsr",
    "mov %rax, RESULT",
    done!()
);

fn swapgs_and_syscall_registers_are_the_guests_own() -> Outcome {
    let guest = Guest::new(Chip::Kernel, swap())?;
    guest.reach_mark()?;
    equal("GS base", guest.vcpu().sregs()?.gs.base, 0x2000)?;
    equal("KERNEL_GS_BASE", guest.vcpu().msr(0xc000_0102)?, Some(0x1000))?;
    guest.finish()?;
    equal("GS base in the guest", guest.result(0), 0x2000)
}

guest_code!(
    hypercalls,
    64,
    "mov $77, %eax",
    hypercall!(),
    "mov %rax, RESULT",
    "mov $-1, %rax",
    hypercall!(),
    "mov %rax, RESULT + 8",
    "mov $77, %eax",
    foreign_hypercall!(),
    "mov %rax, RESULT + 16",
    // KVM_HC_VAPIC_POLL_IRQ.
    "mov $1, %eax",
    hypercall!(),
    "mov %rax, RESULT + 24",
    done!()
);

fn an_unknown_hypercall_is_enosys() -> Outcome {
    let guest = Guest::new(Chip::Kernel, hypercalls())?;
    guest.finish()?;
    let enosys = -1000_i64 as u64;
    let got = [0, 1, 2, 3].map(|index| guest.result(index));
    equal("77, -1, 77 by the other maker's instruction, 1", got, [enosys, enosys, enosys, 0])
}

guest_code!(
    user_hypercall,
    64,
    "lea 2f(%rip), %rax",
    "mov %rax, HOOKS + 13 * 8",
    "push $0x3b",
    "push $0x1bff0",
    "push $2",
    "push $0x33",
    "lea 1f(%rip), %rax",
    "push %rax",
    "iretq",
    "1:",
    "mov $1, %eax",
    hypercall!(),
    "mov %rax, RESULT",
    "hlt",
    "2:",
    done!()
);

fn a_hypercall_of_user_mode_is_eperm() -> Outcome {
    let guest = Guest::new(Chip::Kernel, user_hypercall())?;
    crate::machine::tables::split_first_large_page(&guest.memory);
    for index in 0..512 {
        let at = SMALL_TABLE + index * 8;
        guest.memory.write(at, guest.memory.read(at) | 4);
    }
    guest.finish()?;
    equal("answer", guest.result(0), -1_i64 as u64)
}

guest_code!(
    tsc,
    64,
    "mov $1000, %esi",
    "rdtsc",
    "shl $32, %rdx",
    "or %rax, %rdx",
    "mov %rdx, %rdi",
    "0: rdtsc",
    "shl $32, %rdx",
    "or %rax, %rdx",
    "cmp %rdi, %rdx",
    "jb 1f",
    "mov %rdx, %rdi",
    "dec %esi",
    "jnz 0b",
    "movq $1, RESULT",
    "1:",
    done!()
);

fn the_tsc_goes_forward() -> Outcome {
    let guest = Guest::new(Chip::Kernel, tsc())?;
    guest.finish()?;
    equal("a thousand steps forward", guest.result(0), 1)
}

guest_code!(
    tsc_aux,
    64,
    "mov $0xc0000103, %ecx",
    "mov $0x77, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "out %al, $PORT_MARK",
    "rdtscp",
    "mov %rcx, RESULT",
    done!()
);

fn rdtscp_gives_the_tsc_aux_of_the_guest() -> Outcome {
    let guest = Guest::new(Chip::Kernel, tsc_aux())?;
    let mut table = guest.system.supported_cpuid()?;
    if table.find(0x8000_0001, 0).is_none_or(|entry| entry.edx >> 27 & 1 == 0) {
        return crate::outcome::skip("no RDTSCP");
    }
    guest.reach_mark()?;
    guest.finish()?;
    equal("TSC_AUX", guest.result(0), 0x77)
}

guest_code!(
    flushes,
    64,
    "wbinvd",
    "invd",
    "invlpg FREE",
    "mov %cr3, %rax",
    "mov %rax, %cr3",
    "mov %cr4, %rax",
    "btr $7, %rax",
    "mov %rax, %cr4",
    "bts $7, %rax",
    "mov %rax, %cr4",
    "clflush FREE",
    "pause",
    "mfence",
    done!()
);

fn caches_and_translations_may_be_flushed() -> Outcome {
    Guest::new(Chip::Kernel, flushes())?.finish()
}

guest_code!(
    control_registers,
    64,
    // CR2, CR3, CR4.TSD, CR8, CR0.AM; each read back.
    "mov $0x12345000, %eax",
    "mov %rax, %cr2",
    "mov %cr2, %rbx",
    "mov %rbx, RESULT",
    "mov $5, %eax",
    "mov %rax, %cr8",
    "mov %cr8, %rbx",
    "mov %rbx, RESULT + 8",
    "mov %cr0, %rax",
    "btr $18, %rax",
    "mov %rax, %cr0",
    "mov %cr0, %rbx",
    "mov %rbx, RESULT + 16",
    "mov %cr4, %rax",
    "bts $2, %rax",
    "mov %rax, %cr4",
    "mov %cr4, %rbx",
    "mov %rbx, RESULT + 24",
    "smsw %rax",
    "mov %rax, RESULT + 32",
    "mov %cr3, %rax",
    "mov %rax, RESULT + 40",
    done!()
);

fn control_registers_are_read_as_written() -> Outcome {
    use crate::machine::tables::{CR0, CR4};
    let guest = Guest::new(Chip::Kernel, control_registers())?;
    guest.finish()?;
    // The stock module lets the guest see the host's CR4.MCE.
    let cr4 = guest.result(3) & !0x40;
    let got = [guest.result(0), guest.result(1), guest.result(2), cr4, guest.result(5)];
    equal("cr2, cr8, cr0, cr4, cr3", got, [0x1234_5000, 5, CR0 & !0x4_0000, CR4 | 4, ROOT])?;
    equal("smsw", guest.result(4) & 0xffff, CR0 & 0xffff)?;
    let sregs = guest.vcpu().sregs()?;
    let got = [sregs.cr2, sregs.cr8, sregs.cr0, sregs.cr4];
    let got = [got[0], got[1], got[2], got[3] & !0x40];
    equal("from outside", got, [0x1234_5000, 5, CR0 & !0x4_0000, CR4 | 4])
}

guest_code!(
    debug_registers,
    64,
    "mov $0x1111, %eax",
    "mov %rax, %dr0",
    "mov $0x4444, %eax",
    "mov %rax, %dr3",
    "out %al, $PORT_MARK",
    "mov %dr0, %rax",
    "mov %rax, RESULT",
    "mov %dr3, %rax",
    "mov %rax, RESULT + 8",
    "mov %dr7, %rax",
    "mov %rax, RESULT + 16",
    done!()
);

fn debug_registers_are_the_guests_own() -> Outcome {
    let guest = Guest::new(Chip::Kernel, debug_registers())?;
    guest.reach_mark()?;
    let debug: kvm_bindings::kvm_debugregs =
        guest.vcpu().receive(ioctl::GET_DEBUGREGS).granted("KVM_GET_DEBUGREGS")?;
    equal("DR0 and DR3 from outside", (debug.db[0], debug.db[3]), (0x1111, 0x4444))?;
    guest.finish()?;
    let got = [0, 1, 2].map(|index| guest.result(index));
    equal("DR0, DR3, DR7", got, [0x1111, 0x4444, 0x400])
}

guest_code!(
    hardware_breakpoint,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, RESULT",
    "mov %rax, %dr0",
    "mov $0x402, %eax",
    "mov %rax, %dr7",
    "lea 2f(%rip), %rax",
    "mov %rax, RESUME",
    "1: nop",
    "ud2",
    "2: xor %eax, %eax",
    "mov %rax, %dr7",
    done!()
);

fn a_hardware_breakpoint_of_the_guest_is_raised() -> Outcome {
    let guest = Guest::new(Chip::Kernel, hardware_breakpoint())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (1, 1, 0))?;
    equal("rip of the frame", guest.memory.read(FRAME_RIP), guest.result(0))?;
    equal("DR6", guest.memory.read(FRAME_DR6) & 0xf, 1)
}

guest_code!(
    single_steps,
    64,
    // The hook of #DB notes the RIP of each frame; the labels are noted for comparison.
    "lea 5f(%rip), %rax",
    "mov %rax, HOOKS + 8",
    "movq $RESULT, ARGUMENT",
    "lea 1f(%rip), %rax",
    "mov %rax, FREE",
    "lea 2f(%rip), %rax",
    "mov %rax, FREE + 8",
    "lea 3f(%rip), %rax",
    "mov %rax, FREE + 16",
    "lea 4f(%rip), %rax",
    "mov %rax, FREE + 24",
    "xor %eax, %eax",
    "mov $0xc0000082, %ecx",
    "pushfq",
    "orq $0x100, (%rsp)",
    "popfq",
    "cpuid",
    "1: mov $0xc0000082, %ecx",
    "2: rdmsr",
    "3: nop",
    "4: pushfq",
    "andq $~0x100, (%rsp)",
    "popfq",
    done!(),
    "5: mov ARGUMENT, %rcx",
    "mov 40(%rsp), %rax",
    "mov %rax, (%rcx)",
    "addq $8, ARGUMENT",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn single_steps_go_over_what_is_intercepted() -> Outcome {
    let guest = Guest::new(Chip::Kernel, single_steps())?;
    guest.finish()?;
    let got = [0, 1, 2, 3].map(|index| guest.result(index));
    let wanted = [0, 8, 16, 24].map(|offset| guest.memory.read(FREE + offset));
    equal("traps behind cpuid, mov, rdmsr, nop", got, wanted)?;
    equal("how many", guest.count(1), 7)
}

guest_code!(
    steps_over_devices,
    64,
    "lea 5f(%rip), %rax",
    "mov %rax, HOOKS + 8",
    "movq $RESULT, ARGUMENT",
    "lea 1f(%rip), %rax",
    "mov %rax, FREE",
    "lea 2f(%rip), %rax",
    "mov %rax, FREE + 8",
    "lea 3f(%rip), %rax",
    "mov %rax, FREE + 16",
    "mov $NOWHERE, %ebx",
    "pushfq",
    "orq $0x100, (%rsp)",
    "popfq",
    "out %al, $0x80",
    "1: in $0x80, %al",
    "2: mov %eax, (%rbx)",
    "3: pushfq",
    "andq $~0x100, (%rsp)",
    "popfq",
    done!(),
    "5: mov ARGUMENT, %rcx",
    "mov 40(%rsp), %rax",
    "mov %rax, (%rcx)",
    "addq $8, ARGUMENT",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn single_steps_go_over_ports_and_devices() -> Outcome {
    let guest = Guest::new(Chip::None, steps_over_devices())?;
    for exit in ["out", "in", "store"] {
        let got = guest.exit()?;
        let device = matches!(got, Exit::Io { .. } | Exit::Mmio { .. });
        holds(exit, device && !got.is_out(PORT_DONE), got)?;
    }
    guest.finish()?;
    let got = guest.steps(0);
    let wanted = [0, 8].map(|offset| guest.memory.read(FREE + offset));
    equal("traps behind out, in", got.get(..2), Some(&wanted[..]))?;
    // The stock module forgets the trap of a store that user space completes.
    let behind_store = guest.memory.read(FREE + 16);
    let also = oracle::documented(behind_store, behind_store + 1);
    one_of("trap behind the store", got.get(2), &[Some(&behind_store), Some(&also)])
}

guest_code!(stepped, 64, "nop", "1: cpuid", "nop", "out %al, $PORT_DONE");

fn is_intel() -> bool {
    oracle::vendor() == Vendor::Intel
}

fn user_space_can_single_step() -> Outcome {
    let guest = Guest::new(Chip::None, stepped())?;
    guest.system.require(kvm_bindings::KVM_CAP_SET_GUEST_DEBUG, "KVM_CAP_SET_GUEST_DEBUG")?;
    let mut debug = kvm_guest_debug { control: 0, ..Default::default() };
    debug.control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
    guest.vcpu().send(ioctl::SET_GUEST_DEBUG, &debug).granted("KVM_SET_GUEST_DEBUG")?;
    for offset in [1, 3, 4] {
        let before = guest.vcpu().regs()?.rip;
        loop {
            match guest.exit()? {
                // See `Guest::steps`.
                Exit::Debug { exception: 1, pc, .. } if pc == before && is_intel() => {}
                Exit::Debug { exception: 1, pc, .. } => {
                    equal("pc", pc, PROGRAM + offset)?;
                    break;
                }
                other => return holds("a debug exit", false, other),
            }
        }
    }
    debug.control = 0;
    guest.vcpu().send(ioctl::SET_GUEST_DEBUG, &debug).granted("off")?;
    guest.finish()
}

guest_code!(
    fpu,
    64,
    "fninit",
    "fld1",
    "fldpi",
    "movabs $0x0123456789abcdef, %rax",
    "movq %rax, %xmm7",
    "out %al, $PORT_MARK",
    "xor %eax, %eax",
    "cpuid",
    "fstpl RESULT",
    "fstpl RESULT + 8",
    "movq %xmm7, RESULT + 16",
    done!()
);

fn the_fpu_state_survives_exits() -> Outcome {
    let guest = Guest::new(Chip::Kernel, fpu())?;
    guest.reach_mark()?;
    // The host's own use must not matter.
    let mut sum = 0.0_f64;
    for index in 1..100 {
        sum += (f64::from(index)).sqrt();
    }
    holds("a sum", sum > 0.0, sum)?;
    guest.finish()?;
    let got = [0, 1].map(|index| f64::from_bits(guest.result(index)));
    equal("x87", got, [std::f64::consts::PI, 1.0])?;
    equal("xmm7", guest.result(2), 0x0123_4567_89ab_cdef)
}

guest_code!(
    to_protected_mode,
    16,
    // A GDT at 0x8000: null, flat code based at the program, flat data.
    "0:",
    "movl $0, 0x8000",
    "movl $0, 0x8004",
    "movl $0x0000ffff, 0x8008",
    "movl $0x00cf9b01, 0x800c",
    "movl $0x0000ffff, 0x8010",
    "movl $0x00cf9300, 0x8014",
    "movw $0x17, 0x8020",
    "movl $0x8000, 0x8022",
    "lgdt 0x8020",
    "mov %cr0, %eax",
    "or $1, %eax",
    "mov %eax, %cr0",
    "ljmp $8, $1f - 0b",
    ".code32",
    "1: mov $0x10, %ax",
    "mov %ax, %ds",
    "movl $0x12345678, 0x20000",
    "out %al, $PORT_DONE",
);

fn real_mode_can_become_protected_mode() -> Outcome {
    let guest = Guest::real(to_protected_mode())?;
    guest.finish()?;
    equal("what it stored", guest.memory.read(FREE) as u32, 0x1234_5678)
}

guest_code!(
    // SYSCALL under TF, in code of 32 bits, where these bytes say the same; what it has made, in code of 64.
    syscall_from_compatibility_mode,
    64,
    "pushfq",
    "orl $0x100, (%rsp)",
    "popfq",
    "syscall",
    "mov %rcx, RESULT",
    "mov %r11, RESULT + 8",
    "pushfq",
    "pop %rax",
    "mov %rax, RESULT + 16",
    "mov %cs, %eax",
    "mov %rax, RESULT + 24",
    "mov %ss, %eax",
    "mov %rax, RESULT + 32",
    done!()
);

guest_code!(
    writes_sysenter,
    64,
    "mov $0x175, %ecx",
    "mov $0x56789abc, %eax",
    "mov $0x1234, %edx",
    "wrmsr",
    "inc %ecx",
    "wrmsr",
    "out %al, $PORT_MARK",
    "rdmsr",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, RESULT",
    "mov $0x175, %ecx",
    "rdmsr",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, RESULT + 8",
    done!()
);

/// Tells the guest of a CPU of this make.
fn make(table: &mut CpuidTable, name: &[u8; 12]) {
    let word = |at: usize| u32::from_le_bytes([name[at], name[at + 1], name[at + 2], name[at + 3]]);
    for function in [0, 0x8000_0000] {
        if let Some(leaf) = table.find(function, 0) {
            (leaf.ebx, leaf.edx, leaf.ecx) = (word(0), word(4), word(8));
        }
    }
}

fn sysenters_msrs_are_as_wide_as_the_guests_make_has_them() -> Outcome {
    const ALL: u64 = 0x1234_5678_9abc;
    let guest = Guest::new(Chip::None, writes_sysenter())?;
    let mut table = guest.system.supported_cpuid()?;
    make(&mut table, b"GenuineIntel");
    guest.vcpu().set_cpuid(&table)?;
    guest.reach_mark()?;
    let told = (guest.vcpu().msr(0x175)?, guest.vcpu().msr(0x176)?);
    equal("user space", told, (Some(ALL), Some(ALL)))?;
    guest.finish()?;
    equal("the guest", (guest.result(0), guest.result(1)), (ALL, ALL))
}

/// On Intel's CPUs the instruction is #UD there: a guest that came from AMD's has 32-bit programs that use it.
fn syscall_from_32_bit_code_is_the_guests_makes() -> Outcome {
    const STAR: u32 = 0xc000_0081;
    const CSTAR: u32 = 0xc000_0083;
    const SFMASK: u32 = 0xc000_0084;
    const TF: u64 = 1 << 8;
    const IF: u64 = 1 << 9;
    const SCE: u64 = 1;
    let guest = Guest::new(Chip::None, syscall_from_compatibility_mode())?;
    let vcpu = guest.vcpu();
    let mut table = guest.system.supported_cpuid()?;
    make(&mut table, b"AuthenticAMD");
    if let Some(leaf) = table.find(0x8000_0001, 0) {
        leaf.edx |= 1 << 11;
    }
    vcpu.set_cpuid(&table)?;
    let (mut regs, mut sregs) = (vcpu.regs()?, vcpu.sregs()?);
    sregs.efer |= SCE;
    (sregs.cs.l, sregs.cs.db, sregs.cs.limit, sregs.cs.g) = (0, 1, u32::MAX, 1);
    vcpu.set_sregs(&sregs)?;
    regs.rflags |= IF;
    vcpu.set_regs(&regs)?;
    let (selector, next) = (u64::from(sregs.cs.selector & !3), regs.rip + 11);
    vcpu.set_msr(STAR, selector << 32)?;
    vcpu.set_msr(CSTAR, next)?;
    vcpu.set_msr(SFMASK, TF)?;
    guest.finish()?;
    equal("exceptions", guest.faults().0, 0)?;
    equal("RCX, R11", (guest.result(0), guest.result(1)), (next, regs.rflags | TF))?;
    // What SFMASK takes steps no more.
    equal("RFLAGS", guest.result(2), regs.rflags)?;
    equal("CS, SS", (guest.result(3), guest.result(4)), (selector, selector + 8))
}
