//! Between the structures of user space and the types of the floors below. Pure functions.

use alloc::vec::Vec;

use ::vcpu::state::registers::{Regs, SavedEvents, Sregs};
use ::vcpu::state::smm::SavedSmi;
use ::vm::irq::{IoEvent, Space, Zone};
use backend::ShadowBy;
use irqchip::{Chip, IoApicState, Msi, PicState, PitChannelState, PitState, Route, Target};
use mmu::Region;
use x86::segment::{Attributes, DescriptorTable, Segment};
use x86::{Cr0, Cr4, Efer, Exception, Rflags, Vector};

use crate::caps::Offer;
use crate::dispatch::MemoryRegion;
use crate::errno::Errno;
use crate::uapi::cpuid::{CPUID_FLAG_SIGNIFCANT_INDEX, KvmCpuidEntry2};
use crate::uapi::event::*;
use crate::uapi::irqchip::*;
use crate::uapi::memory::{KvmCoalescedMmioZone, MEM_LOG_DIRTY_PAGES, MEM_READONLY};
use crate::uapi::registers::*;
use crate::uapi::vcpu_state::*;

/// General registers, from encoding order.
pub fn regs(r: &Regs) -> KvmRegs {
    // The API has the order of its C structure, the vCPU that of ModRM (SDM vol. 2A table 2-2).
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] = r.gpr;
    KvmRegs {
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rdi,
        rsp,
        rbp,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip: r.rip,
        // All bits, reserved ones too: KVM_SET_REGS gets back what was given.
        rflags: r.rflags.bits(),
    }
}

/// The vCPU's registers from user space's.
pub fn from_regs(r: &KvmRegs) -> Regs {
    Regs {
        gpr: [
            r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11,
            r.r12, r.r13, r.r14, r.r15,
        ],
        rip: r.rip,
        // Not judged: what RFLAGS a guest may have is the vCPU's to say.
        rflags: Rflags::from_bits_retain(r.rflags),
    }
}

/// A segment register. One that is not present is unusable.
pub fn segment(s: &Segment) -> KvmSegment {
    let a = s.attributes();
    KvmSegment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: a.kind,
        present: a.present.into(),
        dpl: a.dpl,
        db: a.db.into(),
        s: a.s.into(),
        l: a.long.into(),
        g: a.granularity.into(),
        avl: a.avl.into(),
        // The bit is VMX's (SDM vol. 3C table 25-2). Under SVM it follows from P, in stock KVM as
        // well.
        unusable: (!a.present).into(),
        padding: 0,
    }
}

/// The vCPU's segment from user space's. Fields are cut to their widths.
pub fn from_segment(s: &KvmSegment) -> Segment {
    let attributes = Attributes {
        // No field is refused: `pack` cuts each to its width, as stock KVM does.
        kind: s.type_,
        s: s.s & 1 != 0,
        dpl: s.dpl,
        // A VMCB has no bit for an unusable segment; P clear stands for it.
        present: s.present & 1 != 0 && s.unusable == 0,
        avl: s.avl & 1 != 0,
        long: s.l & 1 != 0,
        db: s.db & 1 != 0,
        granularity: s.g & 1 != 0,
    };
    Segment { base: s.base, limit: s.limit, selector: s.selector, attr: attributes.pack() }
}

fn table(t: &DescriptorTable) -> KvmDtable {
    // Named, for these bytes go to user space with the rest.
    KvmDtable { base: t.base, limit: t.limit, padding: [0; 3] }
}

fn from_table(t: &KvmDtable) -> DescriptorTable {
    DescriptorTable { base: t.base, limit: t.limit }
}

/// System registers. PDPTRs are told where the CPU has them as registers, as under VMX; under SVM's
/// TDP it reads them from memory.
pub fn sregs(s: &Sregs) -> KvmSregs2 {
    KvmSregs2 {
        cs: segment(&s.cs),
        ds: segment(&s.ds),
        es: segment(&s.es),
        fs: segment(&s.fs),
        gs: segment(&s.gs),
        ss: segment(&s.ss),
        tr: segment(&s.tr),
        ldt: segment(&s.ldt),
        gdt: table(&s.gdt),
        idt: table(&s.idt),
        cr0: s.cr0.bits(),
        cr2: s.cr2,
        cr3: s.cr3,
        cr4: s.cr4.bits(),
        // The task priority, by whatever the VM has for a local APIC.
        cr8: s.cr8,
        efer: s.efer.bits(),
        apic_base: s.apic_base,
        flags: if s.pdptes.is_some() { SREGS2_FLAGS_PDPTRS_VALID } else { 0 },
        // Zeros where the flag says that they mean nothing.
        pdptrs: s.pdptes.unwrap_or([0; 4]),
    }
}

/// The vCPU's special registers from user space's.
pub fn from_sregs(s: &KvmSregs2) -> Sregs {
    Sregs {
        cs: from_segment(&s.cs),
        ds: from_segment(&s.ds),
        es: from_segment(&s.es),
        fs: from_segment(&s.fs),
        gs: from_segment(&s.gs),
        ss: from_segment(&s.ss),
        tr: from_segment(&s.tr),
        ldt: from_segment(&s.ldt),
        gdt: from_table(&s.gdt),
        idt: from_table(&s.idt),
        // Retained, not cut: the vCPU has to see reserved bits of CR0 and CR4 to refuse them.
        cr0: Cr0::from_bits_retain(s.cr0),
        cr2: s.cr2,
        cr3: s.cr3,
        cr4: Cr4::from_bits_retain(s.cr4),
        cr8: s.cr8,
        efer: Efer::from_bits_retain(s.efer),
        apic_base: s.apic_base,
        // Without the flag the vCPU reads them from memory, as MOV to CR3 does.
        pdptes: (s.flags & SREGS2_FLAGS_PDPTRS_VALID != 0).then_some(s.pdptrs),
    }
}

/// Bytes of the legacy region of an XSAVE area (SDM vol. 1 §10.5.1).
const LEGACY: usize = 512;
// Of the FXSAVE image: registers of x87, then those of SSE.
const FPR: usize = 32;
const XMM: usize = 160;
/// Where XSTATE_BV lies, whose low two bits say that x87 and SSE are there.
const XSTATE_BV: usize = 512;

fn part<const N: usize>(area: &[u8], at: usize) -> [u8; N] {
    // Every area has the legacy region and its header: the zeros only spare a panic.
    area.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn put<const N: usize>(area: &mut [u8], at: usize, value: [u8; N]) {
    // Nothing is written beyond an area that is too short: the caller's sizes hold, and no panic
    // depends on it.
    if let Some(slot) = area.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *slot = value;
    }
}

/// Reads the legacy FPU state from an XSAVE area.
pub fn fpu(area: &[u8], into: &mut KvmFpu) {
    // Offsets of the FXSAVE image (SDM vol. 1 table 10-2).
    into.fcw = u16::from_le_bytes(part(area, 0));
    into.fsw = u16::from_le_bytes(part(area, 2));
    // The abridged tag word: a bit for each register that is not empty (SDM vol. 1 §10.5.1.1).
    [into.ftwx] = part(area, 4);
    into.last_opcode = u16::from_le_bytes(part(area, 6));
    into.last_ip = u64::from_le_bytes(part(area, 8));
    into.last_dp = u64::from_le_bytes(part(area, 16));
    // MXCSR stays 0, whatever the field's name promises: stock KVM leaves it out in both directions.
    // A register of ten bytes has a place of sixteen.
    for (slot, at) in into.fpr.iter_mut().zip((FPR..).step_by(16)) {
        *slot = part(area, at);
    }
    for (slot, at) in into.xmm.iter_mut().zip((XMM..LEGACY).step_by(16)) {
        *slot = part(area, at);
    }
}

/// Puts the legacy FPU state into an XSAVE area and marks it as there. MXCSR stays what it is in the area: a VMM that
/// gives back what stock KVM gave would otherwise unmask every exception of SSE by the 0 in that field.
pub fn put_fpu(fpu: &KvmFpu, area: &mut [u8]) {
    put(area, 0, fpu.fcw.to_le_bytes());
    put(area, 2, fpu.fsw.to_le_bytes());
    put(area, 4, [fpu.ftwx]);
    put(area, 6, fpu.last_opcode.to_le_bytes());
    put(area, 8, fpu.last_ip.to_le_bytes());
    put(area, 16, fpu.last_dp.to_le_bytes());
    for (value, at) in fpu.fpr.iter().zip((FPR..).step_by(16)) {
        put(area, at, *value);
    }
    for (value, at) in fpu.xmm.iter().zip((XMM..LEGACY).step_by(16)) {
        put(area, at, *value);
    }
    // XRSTOR gives a component whose bit is clear its initial state, whatever lies in the legacy
    // region (SDM vol. 1 §13.8.1).
    let [bits] = part(area, XSTATE_BV);
    put(area, XSTATE_BV, [bits | 3]);
}

/// DR0 to DR3, DR6, DR7.
pub fn debugregs(regs: [u64; 6]) -> KvmDebugregs {
    let [a, b, c, d, dr6, dr7] = regs;
    KvmDebugregs { db: [a, b, c, d], dr6, dr7, flags: 0, reserved: [0; 9] }
}

/// The vCPU's debug registers from user space's.
pub fn from_debugregs(regs: &KvmDebugregs) -> [u64; 6] {
    let [a, b, c, d] = regs.db;
    [a, b, c, d, regs.dr6, regs.dr7]
}

/// Which of the VM's settings bear on saved events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventRules {
    /// KVM_CAP_EXCEPTION_PAYLOAD is on.
    pub payload: bool,
    /// KVM_CAP_X86_TRIPLE_FAULT_EVENT is on.
    pub triple_fault: bool,
}

/// Events on their way. Without payloads an exception that waits is told as injected, since the
/// VMM could not tell the difference.
pub fn events(e: &SavedEvents, rules: EventRules) -> KvmVcpuEvents {
    // Zeros first: the structure has reserved bytes, and all of it goes to user space.
    let mut out = KvmVcpuEvents::default();
    if let Some(x) = e.exception {
        out.exception = KvmExceptionEvent {
            // "Injected" is what an older VMM gives back unchanged; "pending" it would drop.
            injected: (e.exception_injected || !rules.payload).into(),
            nr: x.vector.0,
            has_error_code: x.error_code.is_some().into(),
            pending: (rules.payload && !e.exception_injected).into(),
            error_code: x.error_code.unwrap_or(0),
        };
        // An exception that was injected has put its payload into CR2 or DR6 already.
        if rules.payload && !e.exception_injected {
            out.exception_has_payload = x.payload.is_some().into();
            out.exception_payload = x.payload.unwrap_or(0);
        }
    }
    // One that was taken and not delivered. What is only requested is in the registers of
    // KVM_GET_LAPIC.
    if let Some(vector) = e.interrupt {
        out.interrupt.injected = 1;
        out.interrupt.nr = vector.0;
        out.interrupt.soft = e.interrupt_soft.into();
    }
    if e.interrupt_shadow {
        out.interrupt.shadow = match e.shadow_by {
            ShadowBy::Sti => X86_SHADOW_INT_STI,
            ShadowBy::MovSs => X86_SHADOW_INT_MOV_SS,
            // SVM does not say which of the two instructions made it.
            ShadowBy::Unknown => X86_SHADOW_INT_STI | X86_SHADOW_INT_MOV_SS,
        };
    }
    out.nmi = KvmNmiEvent {
        injected: e.nmi_injected.into(),
        // Two at most.
        pending: e.nmi_pending as u8,
        masked: e.nmi_masked.into(),
        pad: 0,
    };
    out.smi = KvmSmiEvent {
        smm: e.smi.smm.into(),
        pending: e.smi.pending.into(),
        smm_inside_nmi: e.smi.inside_nmi.into(),
        latched_init: e.smi.latched_init.into(),
    };
    // Never VALID_SIPI_VECTOR: a vector is told neither here nor by stock KVM.
    out.flags = VCPUEVENT_VALID_NMI_PENDING | VCPUEVENT_VALID_SHADOW | VCPUEVENT_VALID_SMM;
    // KVM_SET_VCPU_EVENTS refuses a flag whose capability is off: it is not told then either.
    if rules.payload {
        out.flags |= VCPUEVENT_VALID_PAYLOAD;
    }
    if rules.triple_fault {
        out.flags |= VCPUEVENT_VALID_TRIPLE_FAULT;
        out.triple_fault_pending = e.triple_fault.into();
    }
    out
}

/// The vCPU's events from user space's; fields have been checked. `EINVAL`: a flag that the VM has not enabled.
pub fn from_events(e: &KvmVcpuEvents, rules: EventRules) -> Result<SavedEvents, Errno> {
    // EINVAL as in stock KVM (KVM API §4.32): a VMM that asks for what it has not enabled would
    // lose it silently.
    let has = |flag: u32| e.flags & flag != 0;
    if (has(VCPUEVENT_VALID_PAYLOAD) && !rules.payload)
        || (has(VCPUEVENT_VALID_TRIPLE_FAULT) && !rules.triple_fault)
    {
        return Err(Errno::EINVAL);
    }
    // The structure's own booleans are bytes of any value: each is compared with 0.
    let x = &e.exception;
    let exception = (x.injected | x.pending != 0).then(|| Exception {
        vector: Vector(x.nr),
        error_code: (x.has_error_code != 0).then_some(x.error_code),
        // The dispatch has dropped a payload that came without a pending exception.
        payload: (e.exception_has_payload != 0).then_some(e.exception_payload),
    });
    Ok(SavedEvents {
        exception,
        exception_injected: x.injected != 0,
        // Any vector: the VMM's PIC may have its base anywhere, below 16 as well.
        interrupt: (e.interrupt.injected != 0).then_some(Vector(e.interrupt.nr)),
        interrupt_soft: e.interrupt.soft != 0,
        interrupt_shadow: e.interrupt.shadow != 0,
        shadow_by: match e.interrupt.shadow {
            X86_SHADOW_INT_STI => ShadowBy::Sti,
            // With both, of an SVM host, which cannot tell, MOV SS's holds off whatever it was: as on stock KVM.
            shadow if shadow & X86_SHADOW_INT_MOV_SS != 0 => ShadowBy::MovSs,
            _ => ShadowBy::Unknown,
        },
        nmi_injected: e.nmi.injected != 0,
        // Not checked: the vCPU keeps two at most.
        nmi_pending: e.nmi.pending.into(),
        nmi_masked: e.nmi.masked != 0,
        sipi_vector: e.sipi_vector,
        triple_fault: e.triple_fault_pending != 0,
        smi: SavedSmi {
            smm: e.smi.smm != 0,
            pending: e.smi.pending != 0,
            inside_nmi: e.smi.smm_inside_nmi != 0,
            latched_init: e.smi.latched_init != 0,
        },
    })
}

/// The leaves of Hyper-V's interface, with these versions of the enlightened VMCS.
pub fn hyperv_table(offer: &Offer, enlightened: u16) -> Result<Vec<KvmCpuidEntry2>, Errno> {
    let leaves = cpuid::HyperV { enlightened, vcpus: offer.max_vcpus, no_smt: offer.no_smt };
    cpuid_table(&leaves.entries())
}

/// A CPUID table.
pub fn cpuid_table(entries: &[cpuid::Entry]) -> Result<Vec<KvmCpuidEntry2>, Errno> {
    let mut table = Vec::new();
    // Fallible, here as everywhere: a VMM may make as many vCPUs as it likes at a bad moment.
    table.try_reserve_exact(entries.len())?;
    table.extend(entries.iter().map(|e| KvmCpuidEntry2 {
        function: e.leaf,
        index: e.index,
        // ECX counts for a leaf only with the flag: a VMM must not have to know which leaves have
        // subleaves.
        flags: if e.significant_index { CPUID_FLAG_SIGNIFCANT_INDEX } else { 0 },
        eax: e.eax,
        ebx: e.ebx,
        ecx: e.ecx,
        edx: e.edx,
        padding: [0; 3],
    }));
    Ok(table)
}

/// The vCPU's CPUID table from user space's.
pub fn from_cpuid_table(entries: &[KvmCpuidEntry2]) -> Result<Vec<cpuid::Entry>, Errno> {
    let mut table = Vec::new();
    table.try_reserve_exact(entries.len())?;
    table.extend(entries.iter().map(|e| cpuid::Entry {
        leaf: e.function,
        index: e.index,
        significant_index: e.flags & CPUID_FLAG_SIGNIFCANT_INDEX != 0,
        eax: e.eax,
        ebx: e.ebx,
        ecx: e.ecx,
        edx: e.edx,
    }));
    Ok(table)
}

/// A memory slot in the form of the memory's floor.
pub fn region(r: &MemoryRegion) -> Region {
    // By bits again: the memory's floor keeps flags in one word.
    let mut flags = 0;
    if r.log_dirty {
        flags |= MEM_LOG_DIRTY_PAGES;
    }
    if r.read_only {
        flags |= MEM_READONLY;
    }
    Region {
        slot: r.slot.number.into(),
        flags,
        // The dispatch has checked that neither this nor the end wraps.
        gpa: r.base.0 << x86::addr::PAGE_SHIFT,
        size: r.pages << x86::addr::PAGE_SHIFT,
        hva: r.hva.0,
    }
}

macro_rules! same_fields {
    ($(#[$doc:meta])* $to:ident, $back:ident: $from_ty:ident <=> $to_ty:ident { $($field:ident),* }) => {
        $(#[$doc])*
        pub fn $to(s: &$from_ty) -> $to_ty {
            $to_ty { $($field: s.$field),* }
        }
        /// From user space's structure, field by field.
        pub fn $back(s: &$to_ty) -> $from_ty {
            $from_ty { $($field: s.$field),* }
        }
    };
}

same_fields! {
    /// One 8259A, in both forms.
    pic, from_pic: PicState <=> KvmPicState {
        last_irr, irr, imr, isr, priority_add, irq_base, read_reg_select, poll, special_mask,
        init_state, auto_eoi, rotate_on_auto_eoi, special_fully_nested_mode, init4, elcr, elcr_mask
    }
}

same_fields! {
    /// One counter of the PIT.
    pit_channel, from_pit_channel: PitChannelState <=> KvmPitChannelState {
        count, latched_count, count_latched, status_latched, status, read_state, write_state,
        write_latch, rw_mode, mode, bcd, gate, count_load_time
    }
}

/// The I/O APIC.
pub fn ioapic(s: &IoApicState) -> KvmIoapicState {
    let IoApicState { base_address, ioregsel, id, irr, redirtbl } = *s;
    // The padding is named, for all bytes of it go to user space.
    KvmIoapicState { base_address, ioregsel, id, irr, pad: 0, redirtbl }
}

/// The I/O APIC's state from user space's.
pub fn from_ioapic(s: &KvmIoapicState) -> IoApicState {
    let KvmIoapicState { base_address, ioregsel, id, irr, redirtbl, .. } = *s;
    IoApicState { base_address, ioregsel, id, irr, redirtbl }
}

/// [`KvmPitState2::flags`]: the HPET drives line 0.
pub const PIT_HPET_LEGACY: u32 = 1;
/// [`KvmPitState2::flags`]: bit 1 of port 0x61.
pub const PIT_SPEAKER_DATA_ON: u32 = 2;

/// The PIT in the form of KVM_GET_PIT2.
pub fn pit(s: &PitState) -> KvmPitState2 {
    let mut flags = 0;
    if s.hpet_legacy {
        flags |= PIT_HPET_LEGACY;
    }
    if s.speaker_data {
        flags |= PIT_SPEAKER_DATA_ON;
    }
    let [a, b, c] = &s.channels;
    let channels = [pit_channel(a), pit_channel(b), pit_channel(c)];
    KvmPitState2 { channels, flags, reserved: [0; 9] }
}

/// The PIT's state from user space's.
pub fn from_pit(channels: &[KvmPitChannelState; 3], flags: u32) -> PitState {
    let [a, b, c] = channels;
    PitState {
        channels: [from_pit_channel(a), from_pit_channel(b), from_pit_channel(c)],
        hpet_legacy: flags & PIT_HPET_LEGACY != 0,
        speaker_data: flags & PIT_SPEAKER_DATA_ON != 0,
    }
}

/// A message from the form of KVM_SIGNAL_MSI.
pub fn from_msi(msi: &KvmMsi) -> Msi {
    // `devid` is for Arm's ITS alone (KVM_CAP_MSI_DEVID is 0 here).
    Msi { address_lo: msi.address_lo, address_hi: msi.address_hi, data: msi.data }
}

/// A routing table. `pins`: the VM has controllers with pins. `EINVAL`: a controller or a kind of
/// route that it does not have.
pub fn from_routes(routes: &[KvmIrqRoutingEntry], pins: bool) -> Result<Vec<Route>, Errno> {
    let mut table = Vec::new();
    table.try_reserve_exact(routes.len())?;
    for route in routes {
        let target = match route.type_ {
            // With a split irqchip it falls through to EINVAL: no pin of ours is there, and stock
            // KVM refuses it, too.
            IRQ_ROUTING_IRQCHIP if pins => {
                let KvmIrqRoutingIrqchip { irqchip, pin } = route.irqchip();
                Target::Pin { chip: Chip::from_id(irqchip).ok_or(Errno::EINVAL)?, pin }
            }
            // The upper half of an address is checked with the table, by the VM's rules of
            // destinations.
            IRQ_ROUTING_MSI => {
                let KvmIrqRoutingMsi { address_lo, address_hi, data, .. } = route.msi();
                Target::Msi(Msi { address_lo, address_hi, data })
            }
            _ => return Err(Errno::EINVAL),
        };
        table.push(Route { gsi: route.gsi, target });
    }
    Ok(table)
}

/// An ioeventfd. `EINVAL`: in an address space that only s390 has.
pub fn from_ioeventfd(what: &KvmIoeventfd) -> Result<IoEvent, Errno> {
    // The flag passes the mask of valid ones, which is every architecture's.
    if what.flags & IOEVENTFD_FLAG_VIRTIO_CCW_NOTIFY != 0 {
        return Err(Errno::EINVAL);
    }
    // Two address spaces, whose numbers overlap.
    let port = what.flags & IOEVENTFD_FLAG_PIO != 0;
    let matches = what.flags & IOEVENTFD_FLAG_DATAMATCH != 0;
    Ok(IoEvent {
        space: if port { Space::Port } else { Space::Memory },
        address: what.addr,
        len: what.len,
        // Whole, though the write may be narrower: the match cuts it.
        datamatch: matches.then_some(what.datamatch),
    })
}

/// A zone of coalesced writes.
pub fn from_zone(zone: &KvmCoalescedMmioZone) -> Zone {
    // One or zero: the dispatch has refused all others.
    let space = if zone.pio != 0 { Space::Port } else { Space::Memory };
    Zone { space, address: zone.addr, len: zone.size }
}

#[cfg(test)]
mod tests;
