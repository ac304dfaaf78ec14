//! The state of a vCPU, part by part: what KVM_GET_* copies out and KVM_SET_* copies in and checks.

use alloc::boxed::Box;

use x86::msr::mce::BANK_VALID;
use x86::{Cr0, Cr4, Efer};
use zerocopy::FromZeros;

use super::ops::{Irqchip, VcpuOps, has_lapic, requested_tsc_khz};
use super::{Done, lists};
use crate::errno::Errno;
use crate::uapi::capability::{CAP_ENFORCE_PV_FEATURE_CPUID, CAP_HYPERV_ENLIGHTENED_VMCS};
use crate::uapi::cpuid::KvmCpuidEntry2;
use crate::uapi::debug::KvmGuestDebug;
use crate::uapi::device::{KvmDeviceAttr, KvmEnableCap, VCPU_TSC_CTRL, VCPU_TSC_OFFSET};
use crate::uapi::irqchip::{KvmLapicState, KvmTprAccessCtl, KvmVapicAddr};
use crate::uapi::registers::*;
use crate::uapi::vcpu_state::*;
use crate::user;

/// The system registers in the older form: the interrupt being injected in place of the PDPTRs.
pub fn sregs<V: VcpuOps>(vcpu: &mut V) -> KvmSregs {
    let mut interrupt_bitmap = [0u64; 4];
    if let Some(vector) = vcpu.interrupt_in_injection()
        && let Some(word) = interrupt_bitmap.get_mut(usize::from(vector >> 6))
    {
        *word = 1 << (vector & 63);
    }
    // Behind the interrupt: both are looked at under the vCPU's mutex, so that they belong
    // together.
    let s = vcpu.sregs();
    KvmSregs {
        cs: s.cs,
        ds: s.ds,
        es: s.es,
        fs: s.fs,
        gs: s.gs,
        ss: s.ss,
        tr: s.tr,
        ldt: s.ldt,
        gdt: s.gdt,
        idt: s.idt,
        cr0: s.cr0,
        cr2: s.cr2,
        cr3: s.cr3,
        cr4: s.cr4,
        cr8: s.cr8,
        efer: s.efer,
        apic_base: s.apic_base,
        interrupt_bitmap,
    }
}

/// Sets the system registers from the older form. The lowest vector of the bitmap is injected.
pub fn set_sregs<V: VcpuOps>(vcpu: &mut V, s: &KvmSregs) -> Done {
    let mut interrupt = None;
    for (word, base) in s.interrupt_bitmap.iter().zip([0u8, 64, 128, 192]) {
        // One bit by contract (KVM API §4.13). Of several stock KVM takes the lowest, too.
        if *word != 0 {
            interrupt = Some(base | word.trailing_zeros() as u8);
            break;
        }
    }
    let sregs = KvmSregs2 {
        cs: s.cs,
        ds: s.ds,
        es: s.es,
        fs: s.fs,
        gs: s.gs,
        ss: s.ss,
        tr: s.tr,
        ldt: s.ldt,
        gdt: s.gdt,
        idt: s.idt,
        cr0: s.cr0,
        cr2: s.cr2,
        cr3: s.cr3,
        cr4: s.cr4,
        cr8: s.cr8,
        efer: s.efer,
        apic_base: s.apic_base,
        // No PDPTRs in this form: the vCPU loads them from memory, where CR3 says.
        flags: 0,
        pdptrs: [0; 4],
    };
    vcpu.set_sregs(&sregs, interrupt)
}

/// KVM_SET_SREGS2. PDPTRs may come only with the paging mode that has them.
pub fn set_sregs2<V: VcpuOps>(vcpu: &mut V, sregs: &KvmSregs2) -> Done {
    let (cr0, cr4) = (Cr0::from_bits_retain(sregs.cr0), Cr4::from_bits_retain(sregs.cr4));
    // CR4.PAE is set in long mode, too, which has no PDPTE registers (SDM vol. 3A §4.4.1).
    let long = Efer::from_bits_retain(sregs.efer).is_long();
    let pae = cr0.contains(Cr0::PG) && cr4.contains(Cr4::PAE) && !long;
    if sregs.flags & !SREGS2_FLAGS_PDPTRS_VALID != 0 || (sregs.flags != 0 && !pae) {
        return Err(Errno::EINVAL);
    }
    vcpu.set_sregs(sregs, None)
}

/// KVM_GET_FPU: x87 and SSE registers (KVM API §4.22).
#[inline(never)]
pub fn get_fpu<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    // What is filled in only in part must not show the kernel's stack.
    let mut fpu = KvmFpu::new_zeroed();
    vcpu.fpu(&mut fpu)?;
    user::write(arg, &fpu)
}

/// KVM_GET_XSAVE, whose 4096 bytes must suffice.
pub fn get_xsave<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    // An older VMM has 4096 bytes on its stack. Cutting AMX off would lose a guest's registers without a word.
    if vcpu.xsave_bytes() > size_of::<KvmXsave>() {
        return Err(Errno::EINVAL);
    }
    get_xsave2(vcpu, arg)
}

/// KVM_GET_XSAVE2: the whole XSAVE area, however large (KVM API §4.42).
pub fn get_xsave2<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    let bytes = vcpu.xsave_bytes().max(size_of::<KvmXsave>());
    let mut area = <[u8]>::new_box_zeroed_with_elems(bytes)?;
    vcpu.xsave(&mut area)?;
    user::write(arg, &*area)
}

/// KVM_SET_XSAVE: the XSAVE area back (KVM API §4.43).
pub fn set_xsave<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    let bytes = vcpu.xsave_bytes().max(size_of::<KvmXsave>());
    // The structure has no length: how much is read depends on the vCPU alone.
    let area: Box<[u8]> = user::read_array(arg, bytes)?;
    vcpu.set_xsave(&area)
}

/// KVM_GET_XCRS: XCR0, the only one there is (KVM API §4.44).
pub fn xcrs<V: VcpuOps>(vcpu: &mut V) -> KvmXcrs {
    // Sixteen places, of which one is used: the others go out as zeros.
    let mut xcrs = KvmXcrs::new_zeroed();
    if let Some(value) = vcpu.xcr0() {
        xcrs.nr_xcrs = 1;
        let [first, ..] = &mut xcrs.xcrs;
        *first = KvmXcr { xcr: 0, reserved: 0, value };
    }
    xcrs
}

/// KVM_SET_XCRS. XCR0 is the only one; others are passed over.
pub fn set_xcrs<V: VcpuOps>(vcpu: &mut V, xcrs: &KvmXcrs) -> Done {
    // The count is the VMM's: beyond the array there is nothing to be looked at.
    if vcpu.xcr0().is_none() || xcrs.nr_xcrs as usize > MAX_XCRS || xcrs.flags != 0 {
        return Err(Errno::EINVAL);
    }
    // The first that names XCR0 counts: stock KVM stops at it.
    let given = xcrs.xcrs.iter().take(xcrs.nr_xcrs as usize);
    match given.into_iter().find(|xcr| xcr.xcr == 0) {
        Some(xcr0) => vcpu.set_xcr0(xcr0.value),
        None => Ok(()),
    }
}

/// KVM_SET_DEBUGREGS: DR0 to DR3, DR6 and DR7 (KVM API §4.34).
pub fn set_debugregs<V: VcpuOps>(vcpu: &mut V, regs: &KvmDebugregs) -> Done {
    // Only the upper halves are refused, where a MOV would be #GP. Other reserved bits pass, as on
    // stock KVM.
    if regs.flags != 0 || (regs.dr6 | regs.dr7) >> 32 != 0 {
        return Err(Errno::EINVAL);
    }
    vcpu.set_debugregs(regs)
}

/// KVM_SET_VCPU_EVENTS, and the events of the shared page. Without a payload an exception is injected or it is not; "pending" has
/// a meaning only with one.
pub fn set_events<V: VcpuOps>(vcpu: &mut V, mut events: KvmVcpuEvents) -> Done {
    const VALID: u32 = VCPUEVENT_VALID_NMI_PENDING
        | VCPUEVENT_VALID_SIPI_VECTOR
        | VCPUEVENT_VALID_SHADOW
        | VCPUEVENT_VALID_SMM
        | VCPUEVENT_VALID_PAYLOAD
        | VCPUEVENT_VALID_TRIPLE_FAULT;
    const NMI_VECTOR: u8 = 2;
    if events.flags & !VALID != 0 {
        return Err(Errno::EINVAL);
    }
    // "Pending" and "injected" exclude each other. With both set "pending" wins, as in stock KVM
    // (KVM API §4.32).
    if events.flags & VCPUEVENT_VALID_PAYLOAD != 0 {
        if events.exception.pending != 0 {
            events.exception.injected = 0;
        } else {
            events.exception_has_payload = 0;
        }
    } else {
        events.exception.pending = 0;
        events.exception_has_payload = 0;
    }
    let exception = &events.exception;
    // VMRUN fails with such an exception to inject (APM vol. 2 §15.20). An NMI has fields of its
    // own.
    let any = exception.injected | exception.pending != 0;
    if any && (exception.nr > 31 || exception.nr == NMI_VECTOR) {
        return Err(Errno::EINVAL);
    }
    vcpu.set_events(&events)
}

/// KVM_SET_MP_STATE. Without a local APIC of ours there is nothing to wait for.
pub fn set_mp_state<V: VcpuOps>(vcpu: &mut V, state: &KvmMpState) -> Done {
    let mp_state = state.mp_state;
    let allowed = match mp_state {
        MP_STATE_RUNNABLE => true,
        MP_STATE_UNINITIALIZED
        | MP_STATE_HALTED
        | MP_STATE_INIT_RECEIVED
        | MP_STATE_SIPI_RECEIVED => has_lapic(vcpu.irqchip()),
        // The others are s390's, and one is SEV-ES's.
        _ => false,
    };
    if !allowed {
        return Err(Errno::EINVAL);
    }
    vcpu.set_mp_state(mp_state)
}

/// KVM_GET_LAPIC: the registers of the local APIC's page (KVM API §4.57).
pub fn get_lapic<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    if !has_lapic(vcpu.irqchip()) {
        return Err(Errno::EINVAL);
    }
    // A KiB, hence a box; zeroed, for all of it goes out.
    let mut state = KvmLapicState::new_box_zeroed()?;
    vcpu.lapic(&mut state)?;
    user::write(arg, &*state)
}

/// KVM_SET_LAPIC: the registers back (KVM API §4.58).
pub fn set_lapic<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    if !has_lapic(vcpu.irqchip()) {
        return Err(Errno::EINVAL);
    }
    let state: Box<KvmLapicState> = user::read_boxed(arg)?;
    vcpu.set_lapic(&state)
}

/// KVM_SET_CPUID2. After the first KVM_RUN the same table is taken, so that a VMM may repeat
/// itself, and no other.
pub fn set_cpuid<V: VcpuOps>(vcpu: &mut V, entries: Box<[KvmCpuidEntry2]>) -> Done {
    // After a run the table is only compared with one that has passed this.
    if !vcpu.has_run() && !lists::cpuid_can_be(&entries) {
        return Err(Errno::EINVAL);
    }
    vcpu.set_cpuid(entries)
}

/// KVM_SET_TSC_KHZ: the vCPU's TSC frequency (KVM API §4.55).
pub fn set_tsc_khz<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    let khz = requested_tsc_khz(vcpu.offer(), arg)?;
    vcpu.set_tsc_khz(khz)
}

/// KVM_INTERRUPT, for VMMs with their own PIC.
pub fn interrupt<V: VcpuOps>(vcpu: &mut V, interrupt: &KvmInterrupt) -> Done {
    // The vector before the irqchip: stock KVM's order.
    let vector = u8::try_from(interrupt.irq).map_err(|_| Errno::EINVAL)?;
    // With a split irqchip the VMM's PIC may still interrupt by this.
    if vcpu.irqchip() == Irqchip::Full {
        return Err(Errno::ENXIO);
    }
    vcpu.interrupt(vector)
}

/// KVM_SET_SIGNAL_MASK. A null pointer ends the masking.
pub fn set_signal_mask<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    let mask = if arg == 0 {
        None
    } else {
        // The length is a field of the VMM's, and is compared, not used.
        let head: KvmSignalMask = user::read(arg)?;
        // The kernel's own set and no libc's, which is larger (KVM API §4.21).
        if head.len != size_of::<u64>() as u32 {
            return Err(Errno::EINVAL);
        }
        Some(user::read::<u64>(user::after::<KvmSignalMask>(arg)?)?)
    };
    vcpu.set_signal_mask(mask);
    Ok(())
}

/// KVM_TRANSLATE: a linear address by the guest's tables (KVM API §4.15).
pub fn translate<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    let asked: KvmTranslation = user::read(arg)?;
    // Made anew: what the VMM had in the other fields does not come back as an answer.
    let mut answer = KvmTranslation { linear_address: asked.linear_address, ..Default::default() };
    vcpu.translate(&mut answer);
    user::write(arg, &answer)
}

/// KVM_SET_GUEST_DEBUG. To end what was never begun is fine.
pub fn set_guest_debug<V: VcpuOps>(vcpu: &mut V, debug: &KvmGuestDebug) -> Done {
    let offered = vcpu.offer().guest_debug;
    if debug.control & !offered != 0 {
        return Err(Errno::EINVAL);
    }
    if offered == 0 {
        return Ok(());
    }
    use crate::uapi::debug::{GUESTDBG_INJECT_BP, GUESTDBG_INJECT_DB};
    let injects = debug.control & (GUESTDBG_INJECT_DB | GUESTDBG_INJECT_BP) != 0;
    // Before anything is set: on EBUSY the old debugging goes on.
    if injects && vcpu.exception_pending() {
        return Err(Errno::EBUSY);
    }
    vcpu.set_guest_debug(debug)
}

/// KVM_TPR_ACCESS_REPORTING: exits for writes of the task priority.
pub fn tpr_access_reporting<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    let control: KvmTprAccessCtl = user::read(arg)?;
    // Reserved, so that they can be given a meaning.
    if control.flags != 0 {
        return Err(Errno::EINVAL);
    }
    vcpu.set_tpr_reporting(control.enabled != 0)?;
    // Nothing has changed; the number says that it is copied back (_IOWR).
    user::write(arg, &control)
}

/// KVM_SET_VAPIC_ADDR: the page for those exits.
pub fn set_vapic_addr<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Done {
    if !has_lapic(vcpu.irqchip()) {
        return Err(Errno::EINVAL);
    }
    let KvmVapicAddr { vapic_addr } = user::read(arg)?;
    vcpu.set_vapic_addr(vapic_addr)
}

/// KVM_X86_SETUP_MCE: bits 0–7 of MCG_CAP count banks, bits 16–23 extended registers.
pub fn setup_mce<V: VcpuOps>(vcpu: &mut V, mcg_cap: u64) -> Done {
    // Counts and not capabilities, so that the mask of those does not hold for them.
    const COUNTS: u64 = 0x00ff_00ff;
    let offer = vcpu.offer();
    let banks = (mcg_cap & 0xff) as u32;
    if banks == 0 || banks > offer.mce_banks || mcg_cap & !(offer.mce_cap | COUNTS) != 0 {
        return Err(Errno::EINVAL);
    }
    vcpu.setup_mce(mcg_cap)
}

/// KVM_X86_SET_MCE: reports a machine check (KVM API §4.106).
pub fn set_mce<V: VcpuOps>(vcpu: &mut V, mce: &KvmX86Mce) -> Done {
    if u32::from(mce.bank) >= vcpu.offer().mce_banks || mce.status & BANK_VALID == 0 {
        return Err(Errno::EINVAL);
    }
    vcpu.set_mce(mce)
}

/// What a command does to an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// KVM_HAS_DEVICE_ATTR: whether the attribute exists (KVM API §4.81).
    Has,
    /// KVM_GET_DEVICE_ATTR: the value of the attribute (KVM API §4.80).
    Get,
    /// KVM_SET_DEVICE_ATTR: a new value for the attribute (KVM API §4.80).
    Set,
}

/// KVM_HAS/GET/SET_DEVICE_ATTR: the TSC offset. Unknown commands where it is not offered.
pub fn attribute<V: VcpuOps>(vcpu: &mut V, arg: u64, what: Attribute) -> Done {
    if !vcpu.offer().tsc_offset {
        return Err(Errno::ENOTTY);
    }
    let attr: KvmDeviceAttr = user::read(arg)?;
    // ENXIO for what exists nowhere; ENOTTY above is for hosts without the whole group.
    if attr.group != VCPU_TSC_CTRL || attr.attr != VCPU_TSC_OFFSET {
        return Err(Errno::ENXIO);
    }
    match what {
        Attribute::Has => Ok(()),
        Attribute::Get => user::write(attr.addr, &vcpu.tsc_offset()),
        Attribute::Set => {
            let offset: u64 = user::read(attr.addr)?;
            vcpu.set_tsc_offset(offset)
        }
    }
}

/// KVM_ENABLE_CAP on a vCPU (KVM API §4.37).
pub fn enable_cap<V: VcpuOps>(vcpu: &mut V, cap: &KvmEnableCap) -> Done {
    let [value, ..] = cap.args;
    match cap.cap {
        // No flag is defined (KVM API §4.37).
        _ if cap.flags != 0 => Err(Errno::EINVAL),
        CAP_ENFORCE_PV_FEATURE_CPUID => {
            vcpu.enforce_pv_features(value != 0);
            Ok(())
        }
        CAP_HYPERV_ENLIGHTENED_VMCS if vcpu.offer().hyperv => {
            // Switched on before the answer is written: with a bad pointer it stays on, as on stock
            // KVM.
            let versions = vcpu.enable_enlightened_vmcs();
            user::write(value, &versions)
        }
        // Known, and not possible on this host: not EINVAL, which is for what nobody knows.
        CAP_HYPERV_ENLIGHTENED_VMCS => Err(Errno::ENOTTY),
        _ => Err(Errno::EINVAL),
    }
}
