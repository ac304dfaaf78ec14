//! System-management mode: the way in, what is saved, what waits for its end, and RSM (APM vol. 2
//! §10, KVM API §4.99 and §4.31).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, System};
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::Memory;
use crate::machine::smram::*;
use crate::machine::tables;
use crate::oracle;
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds, one_of, skip};
use crate::runner::tests;

tests!("smm":
    capabilities_say_that_it_is_there,
    an_smi_enters_and_rsm_returns,
    the_handler_begins_in_the_documented_state,
    the_save_area_holds_the_state,
    a_cpu_without_long_mode_has_the_legacy_map,
    rsm_takes_what_the_handler_changed,
    rsm_outside_is_an_invalid_opcode,
    rsm_into_a_bad_state_is_a_shutdown,
    smbase_can_be_set_by_the_vmm_alone,
    a_second_smi_waits_for_the_end_of_the_first,
    an_nmi_waits_for_the_end,
    an_smi_inside_an_nmi_handler_keeps_nmis_masked,
    an_interrupt_waits_for_the_end,
    an_smi_wakes_a_halted_guest,
    a_message_can_be_an_smi,
    a_vcpu_sends_an_smi_to_itself,
    an_init_waits_for_the_end,
    a_vcpu_moves_within_the_mode,
    a_pending_smi_is_saved_and_set,
    an_smi_goes_before_the_wait_for_a_sipi,
    a_single_step_goes_over_rsm,
    an_smi_beside_an_exception_comes_after_it,
    without_memory_for_the_save_area_nothing_runs_on,
);

guest_code!(mark, 64, "0: mov $0x11, %al", "out %al, $PORT_MARK", "jmp 0b");
guest_code!(handler, 16, "mov $0x55, %al", "out %al, $PORT_MARK", "rsm");

const IN_HANDLER: u8 = 0x55;
const OUTSIDE: u8 = 0x11;

/// The next exit has to be a mark with this byte.
fn expect_mark(guest: &Guest, byte: u8) -> Outcome {
    match guest.exit()? {
        Exit::Io { write: true, port: PORT_MARK, data, .. } if data == [byte] => {
            let inside = byte != OUTSIDE;
            equal("KVM_RUN_X86_SMM", in_smm(guest.vcpu()), inside)
        }
        exit => fail(format!("expected mark {byte:#x} got {exit:x?}")),
    }
}

/// A guest at its mark outside, then in the handler.
fn entered(chip: Chip) -> Outcome<SmmGuest> {
    let smm = SmmGuest::new(chip, mark(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    Ok(smm)
}

fn capabilities_say_that_it_is_there() -> Outcome {
    let system = System::open()?;
    equal("KVM_CAP_X86_SMM", system.extension(KVM_CAP_X86_SMM), 1)?;
    equal("address spaces", system.extension(KVM_CAP_MULTI_ADDRESS_SPACE), 2)?;
    let guest = Guest::new(Chip::None, mark())?;
    equal("SMBASE", guest.vcpu().msr(MSR_SMBASE)?, Some(SMBASE))
}

fn an_smi_enters_and_rsm_returns() -> Outcome {
    for chip in [Chip::None, Chip::Kernel] {
        let smm = SmmGuest::new(chip, mark(), handler())?;
        expect_mark(&smm.guest, OUTSIDE)?;
        let before = (smm.guest.vcpu().regs()?, smm.guest.vcpu().sregs()?);
        for count in 1..5_u64 {
            smm.smi()?;
            expect_mark(&smm.guest, IN_HANDLER)?;
            equal("events.smi.smm", smm.events()?.smi.smm, 1)?;
            expect_mark(&smm.guest, OUTSIDE)?;
            equal("events.smi.smm", smm.events()?.smi.smm, 0)?;
            equal("SMI_COUNT", smm.guest.vcpu().msr(0x34)?, Some(count))?;
            equal("registers", smm.guest.vcpu().regs()?, before.0)?;
            equal("system registers", smm.guest.vcpu().sregs()?, before.1)?;
        }
    }
    Ok(())
}

fn the_handler_begins_in_the_documented_state() -> Outcome {
    let smm = entered(Chip::Kernel)?;
    let (regs, s) = (smm.guest.vcpu().regs()?, smm.guest.vcpu().sregs()?);
    equal("rflags", regs.rflags, 2)?;
    holds("rip in the handler", (0x8000..0x8006).contains(&regs.rip), regs.rip)?;
    equal("cs", (s.cs.selector, s.cs.base, s.cs.limit), (0x3000, SMBASE, u32::MAX))?;
    for segment in [s.ds, s.es, s.ss, s.fs, s.gs] {
        equal("data", (segment.selector, segment.base, segment.limit), (0, 0, u32::MAX))?;
    }
    equal("cr0", s.cr0, tables::CR0 & !(1 << 31 | 1))?;
    equal("cr3, cr4, efer", (s.cr3, s.cr4, s.efer), (ROOT, 0, 0))?;
    equal("idt", (s.idt.base, s.idt.limit), (0, 0))?;
    equal("gdt stays", s.gdt.base, GDT)?;
    equal("task register stays", s.tr.base, TSS)?;
    let debug: kvm_debugregs =
        smm.guest.vcpu().receive(ioctl::GET_DEBUGREGS).granted("KVM_GET_DEBUGREGS")?;
    equal("dr7", debug.dr7, 0x400)?;
    equal("NMIs masked", smm.events()?.nmi.masked, 1)
}

fn the_save_area_holds_the_state() -> Outcome {
    let smm = SmmGuest::new(Chip::None, mark(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    let vcpu = smm.guest.vcpu();
    let regs = kvm_regs {
        rbx: 3,
        rcx: 1 << 63 | 1,
        rdx: 2,
        rbp: 5,
        rsi: 6,
        rdi: 7,
        r8: 8,
        r15: 0xfedc_ba98_7654_3210,
        rflags: 0x8d7 & !0x100,
        ..vcpu.regs()?
    };
    vcpu.set_regs(&regs)?;
    let s = vcpu.sregs()?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    for (what, at, value) in [
        ("rax", 0xfff8, regs.rax),
        ("rcx", 0xfff0, regs.rcx),
        ("rdx", 0xffe8, regs.rdx),
        ("rbx", 0xffe0, regs.rbx),
        ("rsp", 0xffd8, regs.rsp),
        ("rbp", 0xffd0, regs.rbp),
        ("rsi", 0xffc8, regs.rsi),
        ("rdi", 0xffc0, regs.rdi),
        ("r8", 0xffb8, regs.r8),
        ("r15", 0xff80, regs.r15),
        ("rflags", 0xff70, regs.rflags),
        ("dr7", 0xff60, 0x400),
        ("cr0", 0xff58, s.cr0),
        ("cr3", 0xff50, s.cr3),
        ("cr4", 0xff48, s.cr4),
        ("efer", 0xfed0, s.efer),
        ("base of TR", 0xfe98, s.tr.base),
        ("base of IDTR", 0xfe88, s.idt.base),
        ("base of GDTR", 0xfe68, s.gdt.base),
        ("restart fields", 0xfec0, 0),
    ] {
        equal(what, smm.saved(at), value)?;
    }
    // The OUT that was served had not yet retired when KVM_SMI was asked for.
    holds(
        "rip at the loop",
        (PROGRAM..PROGRAM + 8).contains(&smm.saved(0xff78)),
        smm.saved(0xff78),
    )?;
    equal("revision", smm.saved(0xfefc) as u32, 0x2_0064)?;
    equal("smbase", smm.saved(0xff00) as u32, SMBASE as u32)?;
    let (cs, ss) = (smm.saved(0xfe10), smm.saved(0xfe20));
    equal("cs", (cs as u16, cs >> 16 & 0xf0ff, cs >> 32), (0x10, 0xa09b, 0xffff_ffff))?;
    equal("ss", (ss as u16, ss >> 16 & 0xf0ff, ss >> 32), (0x18, 0xc093, 0xffff_ffff))?;
    equal("limits", (smm.saved(0xfe84) as u16, smm.saved(0xfe64) as u16), (0xfff, 63))
}

guest_code!(mark_real, 16, "0: mov $0x11, %al", "out %al, $PORT_MARK", "jmp 0b");

fn a_cpu_without_long_mode_has_the_legacy_map() -> Outcome {
    let guest = Guest::real(mark_real())?;
    let mut cpuid = guest.system.supported_cpuid()?;
    if let Some(leaf) = cpuid.find(0x8000_0001, 0) {
        leaf.edx &= !(1 << 29);
    }
    guest.vcpu().set_cpuid(&cpuid)?;
    let smm = SmmGuest::over(guest, handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    let before = kvm_regs { rcx: 0x1111_2222, rdi: 0x3333_4444, ..smm.guest.vcpu().regs()? };
    smm.guest.vcpu().set_regs(&before)?;
    let s = smm.guest.vcpu().sregs()?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    for (what, at, value) in [
        ("revision", 0xfefc, 0x2_0000),
        ("smbase", 0xfef8, SMBASE),
        ("cr0", 0xfffc, s.cr0),
        ("cr3", 0xfff8, s.cr3),
        ("eflags", 0xfff4, before.rflags),
        ("eax", 0xffd0, before.rax),
        ("ecx", 0xffd4, before.rcx),
        ("edi", 0xffec, before.rdi),
        ("selector of CS", 0xffac, s.cs.selector.into()),
        ("base of CS", 0xff98, s.cs.base),
        ("limit of the GDT", 0xff70, s.gdt.limit.into()),
        ("dr7", 0xffc8, 0x400),
    ] {
        let word = smm.smram.read_bytes(at, 4);
        equal(what, u32::from_le_bytes([word[0], word[1], word[2], word[3]]), value as u32)?;
    }
    expect_mark(&smm.guest, OUTSIDE)?;
    let after = smm.guest.vcpu().regs()?;
    equal("registers", (after.rcx, after.rdi), (before.rcx, before.rdi))?;
    equal("cs", smm.guest.vcpu().sregs()?.cs, s.cs)
}

guest_code!(
    store_rbx,
    64,
    "0: mov $0x11, %al",
    "out %al, $PORT_MARK",
    "mov %rbx, RESULT",
    "jmp 0b"
);

fn rsm_takes_what_the_handler_changed() -> Outcome {
    let smm = SmmGuest::new(Chip::None, store_rbx(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    smm.smram.write(0xffe0, 0x1234_5678_9abc_def0);
    smm.smram.write_bytes(0xff00, &0x2_8000_u32.to_le_bytes());
    // CR4.DE, which was clear.
    smm.smram.write(0xff48, smm.saved(0xff48) | 1 << 3);
    expect_mark(&smm.guest, OUTSIDE)?;
    equal("rbx", smm.guest.result(0), 0x1234_5678_9abc_def0)?;
    equal("SMBASE", smm.guest.vcpu().msr(MSR_SMBASE)?, Some(0x2_8000))?;
    equal("cr4", smm.guest.vcpu().sregs()?.cr4, tables::CR4 | 1 << 3)
}

guest_code!(rsm_outside, 64, guarded!("rsm"), done!());

fn rsm_outside_is_an_invalid_opcode() -> Outcome {
    let guest = Guest::new(Chip::None, rsm_outside())?;
    guest.finish()?;
    equal("exceptions, vector", (guest.faults().0, guest.faults().1), (1, 6))
}

fn rsm_into_a_bad_state_is_a_shutdown() -> Outcome {
    for (what, at, bits) in [
        ("a reserved bit of CR4", 0xff48, 1 << 31),
        ("a high bit of CR0", 0xff58, 1 << 40),
        ("CR0.NW without CD", 0xff58, 1 << 29),
        ("a reserved bit of CR3", 0xff50, 1 << 60),
        ("a reserved bit of EFER", 0xfed0, 1 << 20),
        ("a high bit of DR6", 0xff68, 1 << 32),
        ("a high bit of DR7", 0xff60, 1 << 63),
    ] {
        if at == 0xff58 && bits >> 32 != 0 && oracle::is_stock() && oracle::kernel() < (6, 2) {
            // This one reads 32 bits.
            continue;
        }
        let smm = entered(Chip::None)?;
        smm.smram.write(at, smm.saved(at) | bits);
        equal(what, smm.guest.exit()?, Exit::Shutdown)?;
        equal(what, in_smm(smm.guest.vcpu()), false)?;
    }
    for (what, at, bits) in
        [("paging without protection", 0xff58, 1_u64), ("long mode without PAE", 0xff48, 1 << 5)]
    {
        let smm = entered(Chip::None)?;
        smm.smram.write(at, smm.saved(at) & !bits);
        equal(what, smm.guest.exit()?, Exit::Shutdown)?;
    }
    Ok(())
}

guest_code!(
    read_smbase,
    64,
    "mov $0x9e, %ecx",
    guarded!("rdmsr"),
    "mov $0x9e, %ecx",
    guarded!("wrmsr"),
    "0: mov $0x11, %al",
    "out %al, $PORT_MARK",
    "jmp 0b"
);

fn smbase_can_be_set_by_the_vmm_alone() -> Outcome {
    let smm = SmmGuest::new(Chip::None, read_smbase(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    equal("exceptions, vector", (smm.guest.faults().0, smm.guest.faults().1), (2, 13))?;
    // Behind SMRAM, where both spaces have the same memory.
    let base = 0x10_0000;
    equal("KVM_SET_MSRS", smm.guest.vcpu().set_msr(MSR_SMBASE, base)?, true)?;
    smm.guest.memory.write_bytes(base + HANDLER, handler());
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    equal("cs", smm.guest.vcpu().sregs()?.cs.base, base)?;
    equal("smbase there", smm.guest.memory.read(base + 0xff00) as u32, base as u32)?;
    expect_mark(&smm.guest, OUTSIDE)
}

fn a_second_smi_waits_for_the_end_of_the_first() -> Outcome {
    let smm = entered(Chip::None)?;
    smm.smi()?;
    smm.smi()?;
    equal("pending", smm.events()?.smi.pending, 1)?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    equal("pending", smm.events()?.smi.pending, 0)?;
    expect_mark(&smm.guest, OUTSIDE)?;
    equal("SMI_COUNT", smm.guest.vcpu().msr(0x34)?, Some(2))
}

guest_code!(
    handler_with_two_marks,
    16,
    "mov $0x55, %al",
    "out %al, $PORT_MARK",
    "mov $0x56, %al",
    "out %al, $PORT_MARK",
    "rsm"
);

/// Skips the test where the guest has had no more than so many NMIs, and one waits, but the CPU says
/// that they are masked: the lab's emulated Intel CPU goes on masking the NMIs of all guests when a
/// hypervisor, and not an IRET, has unmasked those of one, as at the end of system-management mode.
fn nmis_are_not_stuck(smm: &SmmGuest, had: u64) -> Outcome {
    let masked = smm.events()?.nmi.masked != 0;
    if oracle::vendor() == oracle::Vendor::Intel && masked && smm.guest.count(2) == had {
        return skip("the emulated CPU keeps NMIs masked that the hypervisor has unmasked");
    }
    Ok(())
}

fn an_nmi_waits_for_the_end() -> Outcome {
    let smm = SmmGuest::new(Chip::None, mark(), handler_with_two_marks())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    smm.guest.vcpu().call(ioctl::NMI, 0).granted("KVM_NMI")?;
    expect_mark(&smm.guest, IN_HANDLER + 1)?;
    equal("NMIs in the handler", smm.guest.count(2), 0)?;
    equal("pending", smm.events()?.nmi.pending, 1)?;
    expect_mark(&smm.guest, OUTSIDE)?;
    nmis_are_not_stuck(&smm, 0)?;
    equal("NMIs behind it", smm.guest.count(2), 1)?;
    equal("masked", smm.events()?.nmi.masked, 0)
}

guest_code!(
    nmi_with_mark,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, HOOKS + 2 * 8",
    "0: mov $0x11, %al",
    "out %al, $PORT_MARK",
    "jmp 0b",
    "1: mov $0x11, %al",
    "out %al, $PORT_MARK",
    "incq RESULT",
    "out %al, $PORT_MARK",
    "pop %rdx",
    "pop %rcx",
    "pop %rax",
    "add $16, %rsp",
    "iretq",
);

fn an_smi_inside_an_nmi_handler_keeps_nmis_masked() -> Outcome {
    let smm = SmmGuest::new(Chip::None, nmi_with_mark(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.guest.vcpu().call(ioctl::NMI, 0).granted("KVM_NMI")?;
    expect_mark(&smm.guest, OUTSIDE)?;
    nmis_are_not_stuck(&smm, 0)?;
    equal("in the NMI's handler", (smm.guest.count(2), smm.events()?.nmi.masked), (1, 1))?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    equal("inside an NMI", smm.events()?.smi.smm_inside_nmi, 1)?;
    smm.guest.vcpu().call(ioctl::NMI, 0).granted("KVM_NMI")?;
    expect_mark(&smm.guest, OUTSIDE)?;
    equal("the NMI's handler goes on", (smm.guest.result(0), smm.guest.count(2)), (1, 1))?;
    equal("masked still", smm.events()?.nmi.masked, 1)?;
    expect_mark(&smm.guest, OUTSIDE)?;
    equal("the second NMI", smm.guest.count(2), 2)
}

guest_code!(mark_enabled, 64, "sti", "0: mov $0x11, %al", "out %al, $PORT_MARK", "jmp 0b");

fn an_interrupt_waits_for_the_end() -> Outcome {
    let smm = SmmGuest::new(Chip::None, mark_enabled(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    holds("a guest that is not ready", !smm.guest.vcpu().ready_for_interrupt(), true)?;
    smm.guest.vcpu().request_interrupt_window(1);
    smm.guest.expect("exit", Exit::InterruptWindow)?;
    equal("outside", in_smm(smm.guest.vcpu()), false)?;
    smm.guest.vcpu().request_interrupt_window(0);
    smm.guest.vcpu().send(ioctl::INTERRUPT, &kvm_interrupt { irq: 0x40 }).granted("interrupt")?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.guest.came(0x40, 1)
}

guest_code!(halt, 64, x2apic!(), "mov $0x11, %al", "out %al, $PORT_MARK", "sti", "hlt", done!());

fn an_smi_wakes_a_halted_guest() -> Outcome {
    let smm = SmmGuest::new(Chip::Kernel, halt(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    let vcpu = smm.guest.vcpu();
    // Halted by the VMM, so that nobody has to wait for the guest to get there.
    let after_halt =
        PROGRAM + halt().windows(2).position(|w| w == [0xfb, 0xf4]).unwrap_or(0) as u64 + 2;
    vcpu.set_immediate_exit(1);
    equal("the OUT retires", vcpu.run(), Err(Errno(libc::EINTR)))?;
    vcpu.set_immediate_exit(0);
    vcpu.set_regs(&kvm_regs { rip: after_halt, ..vcpu.regs()? })?;
    let halted = kvm_mp_state { mp_state: KVM_MP_STATE_HALTED };
    vcpu.send(ioctl::SET_MP_STATE, &halted).granted("KVM_SET_MP_STATE")?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    equal("rip in the save area", smm.saved(0xff78), after_halt)?;
    equal("restart of the halt", smm.smram.read_bytes(0xfec9, 1), vec![0])?;
    let state: kvm_mp_state = vcpu.receive(ioctl::GET_MP_STATE).granted("KVM_GET_MP_STATE")?;
    equal("MP state", state.mp_state, KVM_MP_STATE_RUNNABLE)?;
    smm.guest.finish()
}

guest_code!(mark_with_apic, 64, x2apic!(), "0: mov $0x11, %al", "out %al, $PORT_MARK", "jmp 0b");

guest_code!(
    smi_to_itself,
    64,
    x2apic!(),
    "mov $0x830, %ecx",
    // Shorthand: self; SMI.
    "mov $0x44200, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "incq RESULT",
    done!()
);

fn a_vcpu_sends_an_smi_to_itself() -> Outcome {
    let smm = SmmGuest::new(Chip::Kernel, smi_to_itself(), handler())?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    equal("behind the write", smm.guest.result(0), 0)?;
    smm.guest.finish()?;
    equal("SMI_COUNT", smm.guest.vcpu().msr(0x34)?, Some(1))
}

const DELIVERY_SMI: u32 = 2;
const DELIVERY_INIT: u32 = 5;

fn a_message_can_be_an_smi() -> Outcome {
    let smm = SmmGuest::new(Chip::Kernel, mark_with_apic(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.message(DELIVERY_SMI)?;
    equal("pending", smm.events()?.smi.pending, 1)?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    expect_mark(&smm.guest, OUTSIDE)
}

guest_code!(reset_vector, 16, "mov $0x77, %al", "out %al, $PORT_MARK", "0: hlt", "jmp 0b");

fn an_init_waits_for_the_end() -> Outcome {
    let smm = SmmGuest::new(Chip::Kernel, mark_with_apic(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    smm.smi()?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    let top = Memory::new(0x1000)?;
    top.write_bytes(0xff0, reset_vector());
    smm.guest.vm.set_slot(5, 0, 0xffff_f000, 0x1000, top.hva()).granted("reset vector")?;
    smm.message(DELIVERY_INIT)?;
    equal("latched", smm.events()?.smi.latched_init, 1)?;
    let state: kvm_mp_state =
        smm.guest.vcpu().receive(ioctl::GET_MP_STATE).granted("KVM_GET_MP_STATE")?;
    equal("MP state", state.mp_state, KVM_MP_STATE_RUNNABLE)?;
    equal("latched still", smm.events()?.smi.latched_init, 1)?;
    equal("cs", smm.guest.vcpu().sregs()?.cs.base, SMBASE)?;
    match smm.guest.exit()? {
        Exit::Io { port: PORT_MARK, data, .. } => equal("at the reset vector", data, vec![0x77])?,
        exit => return fail(format!("expected the reset vector's code got {exit:x?}")),
    }
    equal("outside", in_smm(smm.guest.vcpu()), false)?;
    equal("SMBASE stays", smm.guest.vcpu().msr(MSR_SMBASE)?, Some(SMBASE))
}

fn a_vcpu_moves_within_the_mode() -> Outcome {
    let from = entered(Chip::None)?;
    let vcpu = from.guest.vcpu();
    vcpu.set_immediate_exit(1);
    equal("the OUT retires", vcpu.run(), Err(Errno(libc::EINTR)))?;
    let (regs, sregs, events) = (vcpu.regs()?, vcpu.sregs()?, from.events()?);
    equal("in the mode", (events.smi.smm, events.flags & KVM_VCPUEVENT_VALID_SMM), (1, 8))?;
    let to = SmmGuest::new(Chip::None, mark(), handler())?;
    to.smram.write_bytes(0, &from.smram.read_bytes(0, SMRAM_BYTES as usize));
    to.guest.vcpu().set_sregs(&sregs)?;
    to.guest.vcpu().set_regs(&regs)?;
    to.set_events(&events)?;
    equal("came", to.events()?.smi.smm, 1)?;
    expect_mark(&to.guest, OUTSIDE)?;
    equal("cr0", to.guest.vcpu().sregs()?.cr0, tables::CR0)?;
    to.smi()?;
    expect_mark(&to.guest, IN_HANDLER)
}

fn a_pending_smi_is_saved_and_set() -> Outcome {
    let smm = SmmGuest::new(Chip::None, mark(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    let mut events = smm.events()?;
    events.smi.pending = 1;
    smm.set_events(&events)?;
    equal("pending", smm.events()?.smi.pending, 1)?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    expect_mark(&smm.guest, OUTSIDE)?;
    // Without the flag the fields say nothing.
    let mut events = smm.events()?;
    events.flags &= !KVM_VCPUEVENT_VALID_SMM;
    (events.smi.pending, events.smi.smm) = (1, 1);
    smm.set_events(&events)?;
    equal("not pending", (smm.events()?.smi.pending, smm.events()?.smi.smm), (0, 0))?;
    smm.smi()?;
    let mut events = smm.events()?;
    equal("asked for", events.smi.pending, 1)?;
    events.smi.pending = 0;
    smm.set_events(&events)?;
    expect_mark(&smm.guest, OUTSIDE)
}

fn an_smi_goes_before_the_wait_for_a_sipi() -> Outcome {
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, 2, mark())?;
    let vcpu = &guest.vcpus[1];
    let waiting = kvm_mp_state { mp_state: KVM_MP_STATE_INIT_RECEIVED };
    let received = kvm_mp_state { mp_state: KVM_MP_STATE_SIPI_RECEIVED };
    let mut pending = events(vcpu)?;
    pending.smi.pending = 1;
    vcpu.send(ioctl::SET_MP_STATE, &waiting).granted("wait for SIPI")?;
    vcpu.send(ioctl::SET_VCPU_EVENTS, &pending).refused("SMI in that wait", libc::EINVAL)?;
    let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
    vcpu.send(ioctl::SET_MP_STATE, &runnable).granted("runnable")?;
    vcpu.send(ioctl::SET_VCPU_EVENTS, &pending).granted("SMI")?;
    vcpu.send(ioctl::SET_MP_STATE, &waiting).refused("wait with an SMI", libc::EINVAL)?;
    vcpu.send(ioctl::SET_MP_STATE, &received).refused("SIPI with an SMI", libc::EINVAL)?;
    (pending.smi.pending, pending.smi.smm) = (0, 1);
    vcpu.send(ioctl::SET_VCPU_EVENTS, &pending).granted("SMM")?;
    vcpu.send(ioctl::SET_MP_STATE, &waiting).refused("wait in the mode", libc::EINVAL)?;
    pending.smi.smm = 0;
    vcpu.send(ioctl::SET_VCPU_EVENTS, &pending).granted("outside")?;
    vcpu.send(ioctl::SET_MP_STATE, &waiting).granted("wait for SIPI").map(drop)
}

guest_code!(at_once, 16, "nop", "rsm");

guest_code!(nops, 64, "mov $0x11, %al", "out %al, $PORT_MARK", "nop", "nop", done!());

fn a_single_step_goes_over_rsm() -> Outcome {
    if oracle::is_stock() {
        return skip("stock KVM forgets the step on the way into the mode");
    }
    let smm = SmmGuest::new(Chip::None, nops(), at_once())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    let debug = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    smm.guest.vcpu().send(ioctl::SET_GUEST_DEBUG, &debug).granted("KVM_SET_GUEST_DEBUG")?;
    smm.smi()?;
    let mut places = Vec::new();
    for _ in 0..4 {
        match smm.guest.exit()? {
            Exit::Debug { pc, .. } => places.push((pc, in_smm(smm.guest.vcpu()))),
            exit => return fail(format!("expected a step got {exit:x?} after {places:x?}")),
        }
    }
    let inside = SMBASE + HANDLER + 1;
    let outside = places.iter().filter(|(_, smm)| !smm).count();
    holds("a step in the handler", places.contains(&(inside, true)), &places)?;
    holds("steps outside", outside >= 2, &places)?;
    equal("rflags saved without the step", smm.saved(0xff70) & 0x100, 0)
}

guest_code!(
    expecting,
    64,
    "lea 1f(%rip), %rax",
    "mov %rax, RESUME",
    "0: mov $0x11, %al",
    "out %al, $PORT_MARK",
    "jmp 0b",
    "1: mov $0x11, %al",
    "out %al, $PORT_MARK",
    done!()
);

fn an_smi_beside_an_exception_comes_after_it() -> Outcome {
    let smm = SmmGuest::new(Chip::None, expecting(), handler())?;
    expect_mark(&smm.guest, OUTSIDE)?;
    let mut events = smm.events()?;
    events.exception.injected = 1;
    events.exception.nr = 13;
    events.exception.has_error_code = 1;
    events.smi.pending = 1;
    smm.set_events(&events)?;
    expect_mark(&smm.guest, IN_HANDLER)?;
    let rip = smm.saved(0xff78);
    holds("rip in the exception's handler", (HANDLERS..MAILBOX).contains(&rip), rip)?;
    expect_mark(&smm.guest, OUTSIDE)?;
    equal("exceptions, vector", (smm.guest.faults().0, smm.guest.faults().1), (1, 13))
}

fn without_memory_for_the_save_area_nothing_runs_on() -> Outcome {
    if oracle::is_stock() && oracle::kernel() < (6, 2) {
        return skip("this stock KVM runs on without having saved the state");
    }
    for base in [NOWHERE, u64::MAX - 0xfeff] {
        let smm = SmmGuest::new(Chip::None, mark(), handler())?;
        expect_mark(&smm.guest, OUTSIDE)?;
        equal("KVM_SET_MSRS", smm.guest.vcpu().set_msr(MSR_SMBASE, base)?, true)?;
        smm.smi()?;
        smm.guest.vcpu().run().refused("KVM_RUN", libc::EIO)?;
        let regs = smm.guest.vcpu().receive::<kvm_regs>(ioctl::GET_REGS);
        one_of("KVM_GET_REGS", regs.is_ok(), &[false])?;
    }
    Ok(())
}
