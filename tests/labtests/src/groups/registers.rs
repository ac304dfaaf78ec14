//! A vCPU's registers from outside: what was set is read back, and what cannot be is refused and
//! changes nothing (KVM API §4.11 to §4.14, §4.31 to §4.42).

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::oracle;
use crate::outcome::{Answer, Outcome, Reply, equal, holds};
use crate::runner::tests;

tests!("registers":
    the_general_registers_are_read_back,
    the_fixed_flag_is_always_set,
    the_guest_starts_with_what_was_set,
    the_special_registers_are_read_back,
    reserved_bits_of_cr4_are_einval_and_change_nothing,
    long_mode_without_pae_or_lma_is_einval,
    lma_without_paging_is_einval,
    a_64_bit_code_segment_outside_of_long_mode_is_einval,
    a_cr3_beyond_the_physical_addresses_is_einval,
    impossible_bits_of_cr0_are_einval,
    reserved_bits_of_the_apic_base_are_einval,
    the_apic_base_of_a_vmms_own_apic_is_kept,
    the_fpu_is_read_back,
    the_xsave_area_is_read_back,
    reserved_bits_of_mxcsr_are_einval,
    unknown_components_in_an_xsave_area_are_einval,
    xcr0_is_read_back,
    impossible_values_of_xcr0_are_einval,
    the_debug_registers_are_read_back,
    upper_halves_of_dr6_and_dr7_are_einval,
    pending_events_are_read_back,
    impossible_events_are_einval,
    the_run_state_is_read_back,
    an_unknown_run_state_is_einval,
    a_run_state_needs_an_irqchip,
    the_local_apic_is_read_back,
    a_local_apic_needs_an_irqchip,
    a_new_vcpu_is_as_after_reset,
);

guest_code!(
    store_registers,
    64,
    "mov %rax, RESULT",
    "mov %rbx, RESULT + 8",
    "mov %r8, RESULT + 16",
    "mov %r15, RESULT + 24",
    "mov %rbp, RESULT + 32",
    "mov %rsp, RESULT + 40",
    "pushfq",
    "pop %rax",
    "mov %rax, RESULT + 48",
    "mov $0x99, %r15",
    "out %al, $PORT_DONE",
);

fn guest() -> Outcome<Guest> {
    Guest::new(Chip::Kernel, store_registers())
}

fn distinct_regs() -> kvm_regs {
    let base = 0x1111_2222_3333_0000_u64;
    kvm_regs {
        rax: base + 1,
        rbx: base + 2,
        rcx: base + 3,
        rdx: base + 4,
        rsi: base + 5,
        rdi: base + 6,
        rsp: STACKS + 0x800,
        rbp: base + 8,
        r8: base + 9,
        r9: base + 10,
        r10: base + 11,
        r11: base + 12,
        r12: base + 13,
        r13: base + 14,
        r14: base + 15,
        r15: base + 16,
        rip: PROGRAM,
        rflags: 0x8d7,
    }
}

fn the_general_registers_are_read_back() -> Outcome {
    let guest = guest()?;
    guest.vcpu().set_regs(&distinct_regs())?;
    equal("registers", guest.vcpu().regs()?, distinct_regs())
}

fn the_fixed_flag_is_always_set() -> Outcome {
    let guest = guest()?;
    guest.vcpu().set_regs(&kvm_regs { rflags: 0, ..distinct_regs() })?;
    equal("rflags", guest.vcpu().regs()?.rflags, 2)
}

fn the_guest_starts_with_what_was_set() -> Outcome {
    let guest = guest()?;
    let regs = distinct_regs();
    guest.vcpu().set_regs(&regs)?;
    guest.finish()?;
    let got: Vec<u64> = (0..7).map(|index| guest.result(index)).collect();
    equal(
        "rax, rbx, r8, r15, rbp, rsp, rflags",
        got,
        vec![regs.rax, regs.rbx, regs.r8, regs.r15, regs.rbp, regs.rsp, 0x8d7],
    )?;
    equal("r15 afterwards", guest.vcpu().regs()?.r15, 0x99)
}

fn the_special_registers_are_read_back() -> Outcome {
    let guest = guest()?;
    let mut sregs = guest.vcpu().sregs()?;
    sregs.cr2 = 0x1234_5678_9abc;
    sregs.cr8 = 5;
    sregs.fs.base = 0x7f00_1234_5000;
    sregs.gs.base = 0xffff_8880_0000_1000;
    sregs.gdt.limit = 0x77;
    sregs.ldt.base = 0x5000;
    guest.vcpu().set_sregs(&sregs)?;
    equal("special registers", guest.vcpu().sregs()?, sregs)
}

/// Changes the special registers in a way that has to be refused.
fn refused_sregs(what: &str, change: impl FnOnce(&mut kvm_sregs)) -> Outcome {
    let guest = guest()?;
    let before = guest.vcpu().sregs()?;
    let mut sregs = before;
    sregs.cr2 = 0x4242;
    change(&mut sregs);
    guest.vcpu().send(ioctl::SET_SREGS, &sregs).refused(what, libc::EINVAL)?;
    equal("special registers after the refusal", guest.vcpu().sregs()?, before)?;
    guest.finish()
}

fn reserved_bits_of_cr4_are_einval_and_change_nothing() -> Outcome {
    for bit in [15, 19, 26, 31, 32, 63] {
        refused_sregs(&format!("bit {bit}"), |sregs| sregs.cr4 |= 1 << bit)?;
    }
    Ok(())
}

fn long_mode_without_pae_or_lma_is_einval() -> Outcome {
    refused_sregs("no PAE", |sregs| sregs.cr4 &= !0x20)?;
    refused_sregs("no LMA", |sregs| sregs.efer &= !0x400)
}

fn lma_without_paging_is_einval() -> Outcome {
    refused_sregs("no PG", |sregs| sregs.cr0 &= !(1 << 31))?;
    refused_sregs("no LME", |sregs| sregs.efer &= !0x100)
}

fn a_64_bit_code_segment_outside_of_long_mode_is_einval() -> Outcome {
    refused_sregs("CS.L", |sregs| {
        sregs.cr0 &= !(1 << 31);
        sregs.efer = 0;
        sregs.cs.l = 1;
    })
}

fn a_cr3_beyond_the_physical_addresses_is_einval() -> Outcome {
    refused_sregs("bit 52", |sregs| sregs.cr3 |= 1 << 52)?;
    refused_sregs("bit 62", |sregs| sregs.cr3 |= 1 << 62)?;
    refused_sregs("bit 63", |sregs| sregs.cr3 |= 1 << 63)
}

fn impossible_bits_of_cr0_are_einval() -> Outcome {
    if oracle::is_stock() && oracle::kernel() < (6, 5) {
        return crate::outcome::skip("this version of the stock module does not look");
    }
    refused_sregs("bit 32", |sregs| sregs.cr0 |= 1 << 32)?;
    refused_sregs("NW without CD", |sregs| sregs.cr0 |= 1 << 29)?;
    refused_sregs("PG without PE", |sregs| sregs.cr0 &= !1)
}

fn reserved_bits_of_the_apic_base_are_einval() -> Outcome {
    let guest = guest()?;
    for bits in [1 << 0, 1 << 9, 1 << 60] {
        let mut sregs = guest.vcpu().sregs()?;
        sregs.apic_base |= bits;
        let what = format!("bits {bits:#x}");
        guest.vcpu().send(ioctl::SET_SREGS, &sregs).refused(&what, libc::EINVAL)?;
    }
    let mut sregs = guest.vcpu().sregs()?;
    sregs.apic_base = sregs.apic_base & !0x800 | 0x400;
    guest.vcpu().send(ioctl::SET_SREGS, &sregs).refused("x2APIC, not enabled", libc::EINVAL)
}

fn the_apic_base_of_a_vmms_own_apic_is_kept() -> Outcome {
    let guest = Guest::new(Chip::None, store_registers())?;
    let mut sregs = guest.vcpu().sregs()?;
    sregs.apic_base = 0xfed0_0000;
    guest.vcpu().set_sregs(&sregs)?;
    equal("APIC base", guest.vcpu().sregs()?.apic_base, 0xfed0_0000)?;
    sregs.apic_base |= 1;
    guest.vcpu().send(ioctl::SET_SREGS, &sregs).refused("bit 0", libc::EINVAL)
}

fn the_fpu_is_read_back() -> Outcome {
    let guest = guest()?;
    let mut fpu: kvm_fpu = guest.vcpu().receive(ioctl::GET_FPU).granted("get")?;
    equal("FCW after reset", fpu.fcw, 0x37f)?;
    // MXCSR is not part of this command, whatever the structure says: it goes by KVM_SET_XSAVE.
    equal("MXCSR", fpu.mxcsr, 0)?;
    fpu.mxcsr = 0xffff_ffff;
    fpu.fcw = 0x27f;
    for (i, xmm) in fpu.xmm.iter_mut().enumerate() {
        *xmm = [i as u8 + 1; 16];
    }
    guest.vcpu().send(ioctl::SET_FPU, &fpu).granted("set")?;
    let after: kvm_fpu = guest.vcpu().receive(ioctl::GET_FPU).granted("get again")?;
    equal("FPU", after, kvm_fpu { mxcsr: 0, ..fpu })?;
    equal("MXCSR in the XSAVE area", xsave(&guest)?.region[MXCSR], 0x1f80)
}

/// Words of `kvm_xsave` (SDM vol. 1 §13.4).
const MXCSR: usize = 6;
const XMM0: usize = 40;
const XSTATE_BV: usize = 128;

fn xsave(guest: &Guest) -> Outcome<kvm_xsave> {
    guest.vcpu().receive(ioctl::GET_XSAVE).granted("KVM_GET_XSAVE")
}

fn the_xsave_area_is_read_back() -> Outcome {
    let guest = guest()?;
    let mut area = xsave(&guest)?;
    // A control word that is not the initial one: what is initial need not be in XSTATE_BV.
    area.region[0] = area.region[0] & 0xffff_0000 | 0x27f;
    area.region[MXCSR] = 0x1fa0;
    area.region[XSTATE_BV] |= 3;
    for word in XMM0..XMM0 + 64 {
        area.region[word] = word as u32 * 0x0101;
    }
    guest.vcpu().send(ioctl::SET_XSAVE, &area).granted("set")?;
    guest.finish()?;
    let after = xsave(&guest)?;
    equal("FCW", after.region[0] & 0xffff, 0x27f)?;
    equal("MXCSR", after.region[MXCSR], 0x1fa0)?;
    equal("XMM", &after.region[XMM0..XMM0 + 64], &area.region[XMM0..XMM0 + 64])?;
    equal("components", after.region[XSTATE_BV] & 3, 3)
}

fn reserved_bits_of_mxcsr_are_einval() -> Outcome {
    let guest = guest()?;
    let mut area = xsave(&guest)?;
    let before = area.region[MXCSR];
    area.region[XSTATE_BV] |= 3;
    area.region[MXCSR] = 0xffff_0000;
    guest.vcpu().send(ioctl::SET_XSAVE, &area).refused("KVM_SET_XSAVE", libc::EINVAL)?;
    equal("MXCSR", xsave(&guest)?.region[MXCSR], before)
}

fn unknown_components_in_an_xsave_area_are_einval() -> Outcome {
    let guest = guest()?;
    for (word, bits) in [(XSTATE_BV, 1 << 30), (XSTATE_BV + 1, 1 << 20)] {
        let mut area = xsave(&guest)?;
        area.region[word] |= bits;
        guest.vcpu().send(ioctl::SET_XSAVE, &area).refused("KVM_SET_XSAVE", libc::EINVAL)?;
    }
    Ok(())
}

fn set_xcr0(guest: &Guest, change: impl FnOnce(&mut kvm_xcrs)) -> Reply {
    let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
    xcrs.xcrs[0] = kvm_xcr { xcr: 0, value: 1, ..Default::default() };
    change(&mut xcrs);
    guest.vcpu().send(ioctl::SET_XCRS, &xcrs)
}

fn xcr0(guest: &Guest) -> Outcome<u64> {
    let xcrs: kvm_xcrs = guest.vcpu().receive(ioctl::GET_XCRS).granted("KVM_GET_XCRS")?;
    equal("how many", (xcrs.nr_xcrs, xcrs.xcrs[0].xcr), (1, 0))?;
    Ok(xcrs.xcrs[0].value)
}

fn xcr0_is_read_back() -> Outcome {
    let guest = guest()?;
    equal("after reset", xcr0(&guest)?, 1)?;
    set_xcr0(&guest, |xcrs| xcrs.xcrs[0].value = 3).granted("x87 and SSE")?;
    equal("XCR0", xcr0(&guest)?, 3)?;
    guest.finish()?;
    equal("XCR0 after a run", xcr0(&guest)?, 3)
}

fn impossible_values_of_xcr0_are_einval() -> Outcome {
    let guest = guest()?;
    for value in [0, 2, 5, 1 << 62 | 3, u64::MAX] {
        let what = format!("XCR0 {value:#x}");
        set_xcr0(&guest, |xcrs| xcrs.xcrs[0].value = value).refused(&what, libc::EINVAL)?;
    }
    set_xcr0(&guest, |xcrs| xcrs.nr_xcrs = 17).refused("too many", libc::EINVAL)?;
    set_xcr0(&guest, |xcrs| xcrs.flags = 1).refused("flags", libc::EINVAL)?;
    equal("XCR0", xcr0(&guest)?, 1)
}

fn the_debug_registers_are_read_back() -> Outcome {
    let guest = guest()?;
    let mut debug: kvm_debugregs = guest.vcpu().receive(ioctl::GET_DEBUGREGS).granted("get")?;
    equal("DR6 and DR7 after reset", (debug.dr6, debug.dr7), (0xffff_0ff0, 0x400))?;
    debug.db = [0x1000, 0x2000, 0x3000, 0x4000];
    debug.dr6 = 0xffff_0ff1;
    debug.dr7 = 0x700;
    guest.vcpu().send(ioctl::SET_DEBUGREGS, &debug).granted("set")?;
    let after: kvm_debugregs = guest.vcpu().receive(ioctl::GET_DEBUGREGS).granted("get")?;
    equal("debug registers", after, debug)
}

fn upper_halves_of_dr6_and_dr7_are_einval() -> Outcome {
    let guest = guest()?;
    let set = |change: fn(&mut kvm_debugregs)| -> Outcome<Reply> {
        let mut debug = guest.vcpu().receive(ioctl::GET_DEBUGREGS).granted("get")?;
        change(&mut debug);
        Ok(guest.vcpu().send(ioctl::SET_DEBUGREGS, &debug))
    };
    set(|debug| debug.dr6 |= 1 << 32)?.refused("DR6", libc::EINVAL)?;
    set(|debug| debug.dr7 |= 1 << 40)?.refused("DR7", libc::EINVAL)?;
    set(|debug| debug.flags = 1)?.refused("flags", libc::EINVAL)
}

fn events(guest: &Guest) -> Outcome<kvm_vcpu_events> {
    guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")
}

fn pending_events_are_read_back() -> Outcome {
    let guest = guest()?;
    let mut wanted = events(&guest)?;
    equal("NMI after reset", (wanted.nmi.pending, wanted.nmi.masked), (0, 0))?;
    wanted.flags = KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW;
    wanted.nmi.pending = 1;
    wanted.nmi.masked = 1;
    wanted.interrupt.shadow = 1;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &wanted).granted("set")?;
    let after = events(&guest)?;
    equal("NMI", (after.nmi.pending, after.nmi.masked), (1, 1))?;
    equal("shadow", after.interrupt.shadow != 0, true)?;
    wanted = kvm_vcpu_events::default();
    wanted.exception.injected = 1;
    wanted.exception.nr = 14;
    wanted.exception.has_error_code = 1;
    wanted.exception.error_code = 2;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &wanted).granted("set a fault")?;
    let fault = events(&guest)?.exception;
    let got = (fault.injected, fault.nr, fault.has_error_code, fault.error_code);
    equal("fault", got, (1, 14, 1, 2))
}

fn impossible_events_are_einval() -> Outcome {
    let guest = guest()?;
    let set = |change: fn(&mut kvm_vcpu_events)| {
        let mut events = kvm_vcpu_events::default();
        change(&mut events);
        guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events)
    };
    for bit in [6, 7, 31] {
        let unknown = kvm_vcpu_events { flags: 1 << bit, ..Default::default() };
        let answer = guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &unknown);
        answer.refused(&format!("flag {bit}"), libc::EINVAL)?;
    }
    set(|events| {
        events.exception.injected = 1;
        events.exception.nr = 2;
    })
    .refused("an NMI as an exception", libc::EINVAL)?;
    set(|events| {
        events.exception.injected = 1;
        events.exception.nr = 32;
    })
    .refused("exception 32", libc::EINVAL)?;
    set(|_| ()).granted("nothing").map(drop)
}

fn mp_state(guest: &Guest) -> Outcome<u32> {
    let state: kvm_mp_state = guest.vcpu().receive(ioctl::GET_MP_STATE).granted("get")?;
    Ok(state.mp_state)
}

fn set_mp_state(guest: &Guest, mp_state: u32) -> Reply {
    guest.vcpu().send(ioctl::SET_MP_STATE, &kvm_mp_state { mp_state })
}

fn the_run_state_is_read_back() -> Outcome {
    let guest = guest()?;
    equal("the boot CPU", mp_state(&guest)?, KVM_MP_STATE_RUNNABLE)?;
    for state in [KVM_MP_STATE_HALTED, KVM_MP_STATE_UNINITIALIZED, KVM_MP_STATE_RUNNABLE] {
        set_mp_state(&guest, state).granted(&format!("state {state}"))?;
        equal("state", mp_state(&guest)?, state)?;
    }
    let second = guest.vm.create_vcpu(1)?;
    let state: kvm_mp_state = second.receive(ioctl::GET_MP_STATE).granted("get")?;
    equal("another CPU", state.mp_state, KVM_MP_STATE_UNINITIALIZED)
}

fn an_unknown_run_state_is_einval() -> Outcome {
    let guest = guest()?;
    for state in [5, 99, u32::MAX] {
        set_mp_state(&guest, state).refused(&format!("state {state}"), libc::EINVAL)?;
    }
    equal("state", mp_state(&guest)?, KVM_MP_STATE_RUNNABLE)
}

fn a_run_state_needs_an_irqchip() -> Outcome {
    let guest = Guest::new(Chip::None, store_registers())?;
    set_mp_state(&guest, KVM_MP_STATE_INIT_RECEIVED).refused("INIT", libc::EINVAL)?;
    set_mp_state(&guest, KVM_MP_STATE_RUNNABLE).granted("runnable").map(drop)
}

fn the_local_apic_is_read_back() -> Outcome {
    let guest = guest()?;
    let mut apic: kvm_lapic_state = guest.vcpu().receive(ioctl::GET_LAPIC).granted("get")?;
    let word = |apic: &kvm_lapic_state, at: usize| {
        u32::from_le_bytes([0, 1, 2, 3].map(|byte| apic.regs[at + byte] as u8))
    };
    equal("version", word(&apic, 0x30) & 0xff, 0x14)?;
    // The boot CPU's takes the PIC's interrupts at once, as if a BIOS had been there.
    equal("LINT0 after reset", word(&apic, 0x350), 0x700)?;
    let mut set = |at: usize, value: u32| {
        for (byte, bits) in value.to_le_bytes().into_iter().enumerate() {
            apic.regs[at + byte] = bits as _;
        }
    };
    set(0x80, 0x30);
    set(0xf0, 0x1ff);
    set(0x320, 0x10055);
    set(0x3e0, 0xb);
    guest.vcpu().send(ioctl::SET_LAPIC, &apic).granted("set")?;
    let after: kvm_lapic_state = guest.vcpu().receive(ioctl::GET_LAPIC).granted("get")?;
    let got = [0x80, 0xf0, 0x320, 0x3e0].map(|at| word(&after, at));
    equal("TPR, SVR, timer, divider", got, [0x30, 0x1ff, 0x10055, 0xb])?;
    equal("CR8", guest.vcpu().sregs()?.cr8, 3)
}

fn a_local_apic_needs_an_irqchip() -> Outcome {
    let guest = Guest::new(Chip::None, store_registers())?;
    let apic: Result<kvm_lapic_state, _> = guest.vcpu().receive(ioctl::GET_LAPIC);
    apic.map(drop).refused("get", libc::EINVAL)?;
    let apic = kvm_lapic_state { regs: [0; 1024] };
    guest.vcpu().send(ioctl::SET_LAPIC, &apic).refused("set", libc::EINVAL)
}

fn a_new_vcpu_is_as_after_reset() -> Outcome {
    let guest = guest()?;
    let vcpu = guest.vm.create_vcpu(1)?;
    let (regs, sregs) = (vcpu.regs()?, vcpu.sregs()?);
    equal("rip, rflags", (regs.rip, regs.rflags), (0xfff0, 2))?;
    equal("CS", (sregs.cs.selector, sregs.cs.base, sregs.cs.limit), (0xf000, 0xffff_0000, 0xffff))?;
    equal("CR0", sregs.cr0, 0x6000_0010)?;
    equal("CR3, CR4, EFER", (sregs.cr3, sregs.cr4, sregs.efer), (0, 0, 0))?;
    equal("IDT", (sregs.idt.base, sregs.idt.limit), (0, 0xffff))?;
    holds("TR of a task", matches!(sregs.tr.type_, 3 | 11), sregs.tr.type_)?;
    let boot_bit = guest.vcpu().sregs()?.apic_base & 0x100;
    equal("who boots", (boot_bit, sregs.apic_base & 0x100), (0x100, 0))
}
