//! What depends on who makes the CPU, or on a feature that CPUID shows: instructions of the other maker and
//! of a hypervisor, and MSRs that need a feature (SDM vol. 3C §25, vol. 4; APM vol. 2 §15, vol. 3).

use kvm_bindings::*;

use crate::kvm::file::{Commands, CpuidTable};
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::stage::operation::{DONE, cr3, invlpg, read, value, write64};
use crate::machine::stage::paging::{ALL, Paging};
use crate::machine::stage::{Stage, tag};
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, equal, skip};
use crate::runner::tests;

tests!("makers":
    instructions_of_intels_hypervisors_are_invalid_opcodes,
    the_other_makers_hypercall_is_an_invalid_opcode_where_nobody_mends_it,
    the_other_makers_hypercall_is_mended_in_the_guests_memory,
    feature_control_is_locked,
    misc_enable_is_what_was_set,
    arch_capabilities_are_the_vmms,
    speculation_control_needs_its_feature,
    xss_has_only_what_cpuid_offers,
    addresses_in_msrs_are_canonical,
    instructions_without_their_feature_are_invalid_opcodes,
    instructions_that_tell_of_tables_are_refused_to_user_mode,
    instructions_about_tables_do_their_work_in_the_kernel,
    every_cpu_of_intels_has_umip,
    the_four_top_entries_of_pae_are_loaded_with_cr3,
    user_space_gives_the_four_top_entries_of_pae,
);

/// Changes a guest's CPUID.
fn with_cpuid(guest: &Guest, change: impl FnOnce(&mut CpuidTable)) -> Outcome {
    let mut table = guest.system.supported_cpuid()?;
    change(&mut table);
    guest.vcpu().set_cpuid(&table)
}

fn of_intel(reason: &str) -> Outcome {
    match oracle::vendor() {
        Vendor::Intel => Ok(()),
        Vendor::Amd => skip(reason),
    }
}

guest_code!(
    vmx,
    64,
    "movq $1, FREE",
    guarded!("vmxon FREE"),
    guarded!("vmptrld FREE"),
    guarded!("vmptrst FREE"),
    guarded!("vmclear FREE"),
    guarded!("vmread %rax, %rbx"),
    guarded!("vmwrite %rax, %rbx"),
    guarded!("vmlaunch"),
    guarded!("vmresume"),
    guarded!("vmxoff"),
    guarded!("invept FREE, %rax"),
    guarded!("invvpid FREE, %rax"),
    guarded!(".byte 0x0f, 0x01, 0xd4"), // vmfunc
    guarded!(".byte 0x0f, 0x37"),       // getsec
    done!()
);

fn instructions_of_intels_hypervisors_are_invalid_opcodes() -> Outcome {
    of_intel("some of their encodings are other instructions with AMD")?;
    let guest = Guest::new(Chip::Kernel, vmx())?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (13, 6, 0))?;
    equal("invalid opcodes", guest.count(6), 13)
}

guest_code!(
    foreign_call,
    64,
    "mov $77, %eax",
    "cmpq $0, IS_INTEL",
    "jne 3f",
    guarded!("vmcall"),
    done!(),
    "3:",
    guarded!("vmmcall"),
    done!()
);

fn the_other_makers_hypercall_is_an_invalid_opcode_where_nobody_mends_it() -> Outcome {
    let guest = Guest::new(Chip::Kernel, foreign_call())?;
    let quirk = KVM_X86_QUIRK_FIX_HYPERCALL_INSN;
    if guest.system.extension(KVM_CAP_DISABLE_QUIRKS2) as u32 & quirk == 0 {
        return skip("the mending cannot be turned off");
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_DISABLE_QUIRKS2, ..Default::default() };
    cap.args[0] = quirk.into();
    guest.vm.send(ioctl::ENABLE_CAP, &cap).granted("KVM_ENABLE_CAP")?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (1, 6, 0))
}

fn the_other_makers_hypercall_is_mended_in_the_guests_memory() -> Outcome {
    let guest = Guest::new(Chip::Kernel, foreign_call())?;
    guest.finish()?;
    equal("exceptions", guest.faults().0, 0)?;
    let text = guest.memory.read_bytes(PROGRAM, foreign_call().len());
    let (wrong, right) = match oracle::vendor() {
        Vendor::Intel => ([0x0f, 0x01, 0xd9], [0x0f, 0x01, 0xc1]),
        Vendor::Amd => ([0x0f, 0x01, 0xc1], [0x0f, 0x01, 0xd9]),
    };
    let before = foreign_call();
    let Some(at) = before.windows(3).position(|bytes| bytes == wrong) else {
        return skip("no hypercall in the program");
    };
    // The guest's memory has the native one now, or the hypervisor did it without writing.
    let now = &text[at..at + 3];
    crate::outcome::holds("one of the two instructions", now == right || now == wrong, now)
}

guest_code!(
    // Reads an MSR, writes the argument into it, reads it again.
    touch_msr,
    64,
    "mov ARGUMENT, %ecx",
    "mov $-1, %eax",
    "mov $-1, %edx",
    guarded!("rdmsr"),
    "mov %eax, RESULT",
    "mov %edx, RESULT + 4",
    "mov ARGUMENT + 0x10, %eax",
    "mov ARGUMENT + 0x14, %edx",
    guarded!("wrmsr"),
    guarded!("rdmsr"),
    "mov %eax, RESULT + 8",
    "mov %edx, RESULT + 12",
    done!()
);

/// Has the guest read, write and read an MSR; the two values and the exceptions, all of them #GP(0).
fn touch(guest: &Guest, index: u32, written: u64) -> Outcome<(u64, u64, u64)> {
    guest.memory.write(ARGUMENT, index.into());
    guest.memory.write(ARGUMENT + 0x10, written);
    let before = guest.faults().0;
    guest.place(0, crate::machine::guest::Mode::Long)?;
    guest.finish()?;
    let (after, vector, error) = guest.faults();
    if after != before {
        equal("vector and error code", (vector, error), (13, 0))?;
    }
    Ok((guest.result(0), guest.result(1), after - before))
}

const FEATURE_CONTROL: u32 = 0x3a;
const MISC_ENABLE: u32 = 0x1a0;
const ARCH_CAPABILITIES: u32 = 0x10a;
const SPEC_CTRL: u32 = 0x48;
const PRED_CMD: u32 = 0x49;
const XSS: u32 = 0xda0;

fn feature_control_is_locked() -> Outcome {
    of_intel("an MSR of Intel's")?;
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    equal("locked by the VMM", guest.vcpu().set_msr(FEATURE_CONTROL, 1)?, true)?;
    equal("from outside", guest.vcpu().msr(FEATURE_CONTROL)?, Some(1))?;
    equal("for the guest: 1, a fault, 1", touch(&guest, FEATURE_CONTROL, 5)?, (1, 1, 1))?;
    let unknown = guest.vcpu().set_msr(FEATURE_CONTROL, 1 << 40)?;
    equal("an unknown bit taken", unknown, false)
}

fn misc_enable_is_what_was_set() -> Outcome {
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    let first = guest.vcpu().msr(MISC_ENABLE)?.unwrap_or_default();
    equal("taken", guest.vcpu().set_msr(MISC_ENABLE, first | 1)?, true)?;
    let got = touch(&guest, MISC_ENABLE, first & !1)?;
    equal("for the guest", got, (first | 1, first & !1, 0))?;
    equal("from outside", guest.vcpu().msr(MISC_ENABLE)?, Some(first & !1))
}

fn arch_capabilities_are_the_vmms() -> Outcome {
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    let mut table = guest.system.supported_cpuid()?;
    if table.find(7, 0).is_none_or(|leaf| leaf.edx >> 29 & 1 == 0) {
        return skip("no ARCH_CAPABILITIES");
    }
    let offered = guest.vcpu().msr(ARCH_CAPABILITIES)?.unwrap_or_default();
    equal("none", guest.vcpu().set_msr(ARCH_CAPABILITIES, 0)?, true)?;
    equal("for the guest: 0, a fault, 0", touch(&guest, ARCH_CAPABILITIES, 1)?, (0, 0, 1))?;
    // They do not change once a vCPU has run.
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    equal("all offered", guest.vcpu().set_msr(ARCH_CAPABILITIES, offered)?, true)?;
    equal("for the guest", touch(&guest, ARCH_CAPABILITIES, 0)?, (offered, offered, 1))?;
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    with_cpuid(&guest, |t| t.find(7, 0).into_iter().for_each(|leaf| leaf.edx &= !(1 << 29)))?;
    equal("faults without the feature", touch(&guest, ARCH_CAPABILITIES, 0)?.2, 3)
}

fn speculation_control_needs_its_feature() -> Outcome {
    for msr in [SPEC_CTRL, PRED_CMD] {
        let guest = Guest::new(Chip::Kernel, touch_msr())?;
        with_cpuid(&guest, |t| {
            t.find(7, 0).into_iter().for_each(|leaf| leaf.edx &= !(1 << 26 | 1 << 27 | 1 << 31));
            let amds = 1 << 12 | 1 << 14 | 1 << 15 | 1 << 24 | 1 << 28;
            t.find(0x8000_0008, 0).into_iter().for_each(|leaf| leaf.ebx &= !amds);
        })?;
        equal(&format!("faults of {msr:#x}"), touch(&guest, msr, 1)?.2, 3)?;
    }
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    if guest.system.supported_cpuid()?.find(7, 0).is_none_or(|leaf| leaf.edx >> 26 & 1 == 0) {
        return Ok(());
    }
    equal("IBRS", touch(&guest, SPEC_CTRL, 1)?, (0, 1, 0))?;
    equal("from outside", guest.vcpu().msr(SPEC_CTRL)?, Some(1))?;
    equal("an unknown bit faults", touch(&guest, SPEC_CTRL, 1 << 40)?, (1, 1, 1))?;
    // From the first use on it may be the guest's own; what it holds is seen all the same.
    equal("no IBRS", touch(&guest, SPEC_CTRL, 0)?, (1, 0, 0))?;
    equal("from outside", guest.vcpu().msr(SPEC_CTRL)?, Some(0))?;
    equal("set from outside", guest.vcpu().set_msr(SPEC_CTRL, 1)?, true)?;
    equal("for the guest", touch(&guest, SPEC_CTRL, 0)?, (1, 0, 0))?;
    equal("a barrier: two faults of reading", touch(&guest, PRED_CMD, 1)?.2, 2)
}

fn xss_has_only_what_cpuid_offers() -> Outcome {
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    let has = |t: &mut CpuidTable| t.find(0xd, 1).is_some_and(|leaf| leaf.eax >> 3 & 1 != 0);
    if !has(&mut *guest.system.supported_cpuid()?) {
        return equal("faults without XSAVES", touch(&guest, XSS, 0)?.2, 3);
    }
    equal("nothing", touch(&guest, XSS, 0)?, (0, 0, 0))?;
    equal("an unknown bit", touch(&guest, XSS, 1 << 62)?, (0, 0, 1))?;
    equal("x87 is none of it", touch(&guest, XSS, 1)?, (0, 0, 1))?;
    let guest = Guest::new(Chip::Kernel, touch_msr())?;
    with_cpuid(&guest, |t| t.find(0xd, 1).into_iter().for_each(|leaf| leaf.eax &= !8))?;
    equal("faults without XSAVES", touch(&guest, XSS, 0)?.2, 3)
}

fn addresses_in_msrs_are_canonical() -> Outcome {
    of_intel("the lab's emulated AMD CPU takes any address")?;
    for msr in [0xc000_0082, 0xc000_0083, 0xc000_0100, 0xc000_0101, 0xc000_0102] {
        let guest = Guest::new(Chip::Kernel, touch_msr())?;
        let what = format!("MSR {msr:#x}");
        let before = guest.vcpu().msr(msr)?.unwrap_or_default();
        equal(&what, touch(&guest, msr, 1 << 63)?, (before, before, 1))?;
        let high = 0xffff_8880_1234_5000;
        equal(&what, touch(&guest, msr, high)?, (before, high, 0))?;
    }
    Ok(())
}

guest_code!(
    featured,
    64,
    guarded!("rdtscp"),
    guarded!(".byte 0xf3, 0x0f, 0xc7, 0xf8"), // rdpid %rax
    "xor %eax, %eax",
    guarded!(".byte 0x66, 0x0f, 0x38, 0x82, 0x04, 0x25, 0x00, 0x00, 0x02, 0x00"), // invpcid FREE, %rax
    done!()
);

fn instructions_without_their_feature_are_invalid_opcodes() -> Outcome {
    of_intel("AMD's hypervisors cannot intercept RDPID")?;
    let guest = Guest::new(Chip::Kernel, featured())?;
    with_cpuid(&guest, |t| {
        t.find(0x8000_0001, 0).into_iter().for_each(|leaf| leaf.edx &= !(1 << 27));
        t.find(7, 0).into_iter().for_each(|leaf| {
            leaf.ecx &= !(1 << 22);
            leaf.ebx &= !(1 << 10);
        });
    })?;
    guest.finish()?;
    equal("exceptions, vector, error code", guest.faults(), (3, 6, 0))
}

guest_code!(
    telling,
    64,
    "mov %cr4, %rax",
    "or ARGUMENT, %rax",
    "mov %rax, %cr4",
    "sgdt FREE",
    "lea 2f(%rip), %rax",
    "mov %rax, HOOKS + 6 * 8",
    "mov $0x20, %eax",
    "ltr %ax",
    "push $0x3b",
    "push $0x1bf00",
    "push $2",
    "push $0x33",
    "lea 1f(%rip), %rax",
    "push %rax",
    "iretq",
    "1:",
    guarded!("sgdt FREE"),
    guarded!("sidt FREE"),
    guarded!("sldt FREE"),
    guarded!("str FREE"),
    // The hook of #UD goes on in the kernel.
    "ud2",
    "2:",
    done!()
);

const UMIP: u64 = 1 << 11;

fn has_umip(guest: &Guest) -> Outcome<bool> {
    Ok(guest.system.supported_cpuid()?.find(7, 0).is_some_and(|leaf| leaf.ecx >> 2 & 1 != 0))
}

fn instructions_that_tell_of_tables_are_refused_to_user_mode() -> Outcome {
    for (bits, faults) in [(0, 0), (UMIP, 4)] {
        let guest = Guest::new(Chip::Kernel, telling())?;
        if bits != 0 && !has_umip(&guest)? {
            return skip("no UMIP");
        }
        crate::machine::tables::split_first_large_page(&guest.memory);
        for index in 0..512 {
            let at = SMALL_TABLE + index * 8;
            guest.memory.write(at, guest.memory.read(at) | 4);
        }
        let descriptor = guest.memory.read(GDT + 0x20);
        guest.memory.write(GDT + 0x20, descriptor & !(2 << 40));
        guest.memory.write(ARGUMENT, bits);
        guest.finish()?;
        equal("general protection faults", guest.count(13), faults)?;
    }
    Ok(())
}

guest_code!(
    telling_the_kernel,
    64,
    "mov %cr4, %rax",
    "or ARGUMENT, %rax",
    "mov %rax, %cr4",
    "sgdt RESULT",
    "sidt RESULT + 0x10",
    "mov $-1, %rax",
    "str %eax",
    "mov %rax, RESULT + 0x20",
    "str RESULT + 0x28",
    "sldt RESULT + 0x30",
    "lgdt RESULT",
    "lidt RESULT + 0x10",
    "xor %eax, %eax",
    "lldt %ax",
    // The descriptor of the task register, 0x20, is busy.
    "movb $0x89, 0x1025",
    "mov $0x20, %eax",
    "ltr %ax",
    guarded!("ud2"),
    guarded!("ltr ARGUMENT + 0x10"),
    "mov %cr4, %rax",
    "mov %rax, RESULT + 0x38",
    "and $~0x800, %rax",
    "mov %rax, %cr4",
    "sgdt RESULT + 0x40",
    done!()
);

fn instructions_about_tables_do_their_work_in_the_kernel() -> Outcome {
    for bits in [0, UMIP] {
        let guest = Guest::new(Chip::Kernel, telling_the_kernel())?;
        if bits != 0 && !has_umip(&guest)? {
            return skip("no UMIP");
        }
        guest.memory.write(ARGUMENT, bits);
        // A selector beyond the table.
        guest.memory.write(ARGUMENT + 0x10, 0x1000);
        guest.memory.write(RESULT + 0x30, 0xffff_ffff);
        guest.finish()?;
        let sregs = guest.vcpu().sregs()?;
        let told = |at| (guest.memory.read(at) as u16, guest.memory.read(at + 2));
        equal("GDTR", told(RESULT), (sregs.gdt.limit, sregs.gdt.base))?;
        equal("IDTR", told(RESULT + 0x10), (sregs.idt.limit, sregs.idt.base))?;
        equal("TR in a register", guest.result(4), 0x20)?;
        equal("TR in memory", guest.result(5), 0x20)?;
        equal("LDTR, two bytes of it", guest.result(6), 0xffff_0000)?;
        equal("UMIP as the guest reads it", guest.result(7) & UMIP, bits)?;
        equal("GDTR again", told(RESULT + 0x40), (sregs.gdt.limit, sregs.gdt.base))?;
        equal("exceptions, the last", guest.faults(), (2, 13, 0x1000))?;
        equal("the task is busy", guest.memory.read(GDT + 0x20) >> 40 & 0xff, 0x8b)?;
    }
    Ok(())
}

/// Where the CPU has none it is made by exits, which CPUs with EPT and unrestricted guests have.
fn every_cpu_of_intels_has_umip() -> Outcome {
    of_intel("AMD's older CPUs go without")?;
    let guest = Guest::new(Chip::Kernel, telling())?;
    equal("offered", has_umip(&guest)?, true)?;
    let mut sregs = guest.vcpu().sregs()?;
    sregs.cr4 |= UMIP;
    guest.vcpu().set_sregs(&sregs)?;
    equal("CR4.UMIP from outside", guest.vcpu().sregs()?.cr4 & UMIP, UMIP)
}

/// A stage in PAE mode: an address that two roots map differently, and the entries at the top of both.
fn two_directories() -> Outcome<(Stage, u64, [u64; 2], [u64; 2])> {
    let mut stage = Stage::new(Paging::Pae)?;
    let va = Paging::Pae.at();
    let frames = [stage.frame(), stage.frame()];
    let other = stage.light_root();
    stage.map(va, 1, frames[0] | ALL);
    stage.map_in(other, va, 1, frames[1] | ALL);
    let top = va >> 30;
    let entries = [stage.root, other].map(|root| stage.entry(root + top * 8));
    Ok((stage, va, frames, entries))
}

fn the_four_top_entries_of_pae_are_loaded_with_cr3() -> Outcome {
    of_intel("under NPT they are read from memory")?;
    if !oracle::tdp() {
        return skip("under TDP they are the CPU's registers");
    }
    let (stage, va, frames, entries) = two_directories()?;
    let (at, root) = (stage.root + (va >> 30) * 8, stage.root);
    let [first, second] = frames.map(|frame| value(tag(frame)));
    stage.expect(
        "the top of PAE",
        &[
            (read(va + 8), first),
            (write64(at, entries[1]), DONE),
            (invlpg(va), DONE),
            (read(va + 8), first),
            (cr3(root), DONE),
            (read(va + 8), second),
            (write64(at, entries[0]), DONE),
            (cr3(root), DONE),
            (read(va + 8), first),
        ],
    )
}

fn user_space_gives_the_four_top_entries_of_pae() -> Outcome {
    of_intel("under NPT they are read from memory")?;
    let (stage, va, frames, entries) = two_directories()?;
    stage.guest.system.require(KVM_CAP_SREGS2, "KVM_CAP_SREGS2")?;
    let [first, second] = frames.map(|frame| value(tag(frame)));
    equal("by the guest's tables", stage.one(read(va + 8))?, first)?;
    let top = (va >> 30) as usize;
    let mut sregs: kvm_sregs2 = stage.vcpu().receive(ioctl::GET_SREGS2).granted("get")?;
    equal("that they are given", sregs.flags, u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID))?;
    equal("the entry from outside", sregs.pdptrs[top], entries[0])?;
    sregs.pdptrs[top] = entries[1];
    stage.vcpu().send(ioctl::SET_SREGS2, &sregs).granted("set")?;
    equal("by what was given", stage.one(read(va + 8))?, second)?;
    // Without them they come from memory.
    let sregs = stage.vcpu().sregs()?;
    stage.vcpu().set_sregs(&sregs)?;
    equal("by the guest's tables again", stage.one(read(va + 8))?, first)
}
