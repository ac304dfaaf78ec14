//! What the hardware takes: the model refuses every operand that a real CPU answers with a fault, which in
//! the kernel would be the host's end.
//!
//! [`syscall`] is of another kind: the CPU would take it, and the host would leak.
//!
//! Each function names the reason. The models call [`demand`] for every instruction of the traits
//! that has an operand, so that a test which merely comes past a bad write fails there.
//!
//! SDM vol. 2 (MOV to DR, WRMSR, XSETBV), vol. 3C §27.2 and §27.3 (VM entry), vol. 4 ch. 2;
//! APM vol. 2 §15.5.1 (VMRUN), appendix A.

use x86::{
    Cr0, Cr4, Dr6, Efer, Hpa, Rflags, Xcr0, msr,
    reg::is_canonical,
    vmcb::{self, Clean, Intercept4, Vmcb, VmcbSegment},
    vmcs::{ProcControls, ProcControls2, event, field, interruptibility, invept, invvpid},
};

/// The CPU takes it, or the reason why not.
pub type Legal = Result<(), &'static str>;

/// The test ends here if the CPU would fault.
#[track_caller]
pub(crate) fn demand(what: core::fmt::Arguments<'_>, legal: Legal) {
    if let Err(why) = legal {
        panic!("{what}: the CPU refuses it, {why}");
    }
}

const fn unless(bad: bool, why: &'static str) -> Legal {
    if bad { Err(why) } else { Ok(()) }
}

/// What this CPU has, as far as it decides over operands.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Width of a linear address.
    pub linear_bits: u32,
    /// Width of a physical address.
    pub physical_bits: u32,
    /// The components that XCR0 may have.
    pub xcr0: Xcr0,
    /// The components that IA32_XSS may have.
    pub xss: Xcr0,
    /// IA32_FEATURE_CONTROL is locked: writes fault.
    pub feature_control_locked: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            linear_bits: 48,
            physical_bits: 52,
            xcr0: Xcr0::LEGACY
                .union(Xcr0::AVX)
                .union(Xcr0::MPX)
                .union(Xcr0::AVX512)
                .union(Xcr0::PKRU)
                .union(Xcr0::AMX),
            xss: Xcr0::PT
                .union(Xcr0::PASID)
                .union(Xcr0::CET_U)
                .union(Xcr0::CET_S)
                .union(Xcr0::HDC)
                .union(Xcr0::UINTR)
                .union(Xcr0::LBR)
                .union(Xcr0::HWP),
            feature_control_locked: false,
        }
    }
}

/// A page whose physical address an instruction takes.
pub fn page(at: Hpa, limits: &Limits) -> Legal {
    unless(at.0 & 0xfff != 0, "its address is not that of a page")?;
    unless(at.0 >> limits.physical_bits != 0, "its address is wider than the CPU's")
}

/// MOV to a debug register.
pub fn debug_register(n: u8, value: u64) -> Legal {
    match n {
        // Their addresses are not looked at (SDM vol. 3B §18.2.1).
        0..=3 => Ok(()),
        6 => unless(value >> 32 != 0, "DR6 has 32 bits"),
        7 => unless(value >> 32 != 0, "DR7 has 32 bits"),
        _ => Err("there is no such register"),
    }
}

/// XSETBV of XCR0 (SDM vol. 1 §13.3).
pub fn xcr0(value: u64, limits: &Limits) -> Legal {
    let bits = Xcr0::from_bits_retain(value);
    let partly = |all: Xcr0| bits.intersects(all) && !bits.contains(all);
    unless(!bits.contains(Xcr0::X87), "x87 state cannot be off")?;
    unless(value & !limits.xcr0.bits() != 0, "it has a component that the CPU lacks")?;
    unless(bits.contains(Xcr0::AVX) && !bits.contains(Xcr0::SSE), "AVX needs SSE")?;
    unless(partly(Xcr0::MPX), "both components of MPX go together")?;
    unless(
        partly(Xcr0::AVX512) || bits.contains(Xcr0::OPMASK) && !bits.contains(Xcr0::AVX),
        "the components of AVX-512 go together, and with AVX",
    )?;
    unless(partly(Xcr0::AMX), "both components of AMX go together")
}

/// A value of IA32_PAT: eight known memory types.
pub fn pat(value: u64) -> Legal {
    let unknown = |byte: &u8| !matches!(byte, 0 | 1 | 4..=7);
    unless(value.to_le_bytes().iter().any(unknown), "it has a memory type that there is not")
}

fn canonical(value: u64, limits: &Limits) -> Legal {
    unless(!is_canonical(value, limits.linear_bits), "the address is not canonical")
}

fn efer(value: u64) -> Legal {
    unless(value & !Efer::all().bits() != 0, "EFER has no such bit")
}

fn only(value: u64, bits: u64) -> Legal {
    unless(value & !bits != 0, "a reserved bit is set")
}

/// The bits of IA32_DEBUGCTL that some CPU has.
const DEBUGCTL: u64 = 0xffc7;

/// Whether there is such an MSR.
fn known(index: u32) -> Legal {
    let known = msr::name(index).is_some() || (msr::VMX_BASIC..=msr::VMX_LAST).contains(&index);
    unless(!known, "there is no such MSR")
}

/// Whether RDMSR of an MSR is legal.
pub fn rdmsr(index: u32) -> Legal {
    known(index)?;
    unless(matches!(index, msr::PRED_CMD | msr::FLUSH_CMD), "it can only be written")
}

/// Whether WRMSR of a value is legal.
pub fn wrmsr(index: u32, value: u64, limits: &Limits) -> Legal {
    use msr::*;
    known(index)?;
    match index {
        LSTAR | CSTAR | FS_BASE | GS_BASE | KERNEL_GS_BASE | SYSENTER_ESP | SYSENTER_EIP
        | DS_AREA => canonical(value, limits),
        SYSCALL_MASK | TSC_AUX => only(value, 0xffff_ffff),
        PAT => pat(value),
        msr::EFER => efer(value),
        SPEC_CTRL => only(value, 0x5ff),
        PRED_CMD => only(value, pred_cmd::IBPB | pred_cmd::SBPB),
        FLUSH_CMD => only(value, flush_cmd::L1D),
        msr::DEBUGCTL => only(value, self::DEBUGCTL),
        XSS => unless(value & !limits.xss.bits() != 0, "it has a component that the CPU lacks"),
        TSC_RATIO => only(value, 0xff_ffff_ffff),
        VM_HSAVE_PA => page(Hpa(value), limits),
        FEATURE_CONTROL => unless(limits.feature_control_locked, "it is locked"),
        _ => Ok(()),
    }
}

/// CR0 as an entry loads it.
fn cr0(value: u64) -> Legal {
    unless(value >> 32 != 0, "CR0 has 32 bits")?;
    let cr0 = Cr0::from_bits_retain(value);
    unless(cr0.contains(Cr0::NW) && !cr0.contains(Cr0::CD), "CR0.NW is set and CR0.CD clear")
}

fn cr4(value: u64) -> Legal {
    unless(value & !Cr4::all().bits() != 0, "CR4 has no such bit")
}

fn dr(dr6: u64, dr7: u64) -> Legal {
    debug_register(6, dr6)?;
    debug_register(7, dr7)
}

/// VMRUN: what makes it end with VMEXIT_INVALID, or worse.
pub fn vmrun(block: &Vmcb) -> Legal {
    let (save, control) = (&block.save, &block.control);
    cr0(save.cr0)?;
    cr4(save.cr4)?;
    efer(save.efer)?;
    dr(save.dr6, save.dr7)?;
    unless(save.efer & Efer::SVME.bits() == 0, "the guest's EFER.SVME is clear")?;
    unless(control.asid == 0, "the ASID is the host's")?;
    unless(control.intercepts[4] & 1 == 0, "VMRUN is not intercepted")?;
    let exits = |bit: u32| control.intercepts[4] & bit == bit;
    let moves = (Intercept4::VMLOAD | Intercept4::VMSAVE).bits();
    unless(
        !exits(moves) && control.virt_ext & 2 == 0,
        "VMLOAD and VMSAVE reach the host's memory by physical addresses",
    )?;
    let gif = (Intercept4::STGI | Intercept4::CLGI).bits();
    unless(
        !exits(gif) && control.int_ctl & vmcb::vintr::GIF_ENABLE == 0,
        "STGI and CLGI change the host's own flag",
    )?;
    unless(control.iopm_base_pa & 0xfff != 0, "the port map is not aligned")?;
    unless(control.msrpm_base_pa & 0xfff != 0, "the MSR map is not aligned")?;
    if control.np_ctl & 1 != 0 {
        unless(control.ncr3 & 0xfff != 0, "the TDP root is not aligned")?;
        pat(save.g_pat)?;
    }
    svm_event(control.event_inj)
}

/// The event that a VM entry injects, beside what blocks it (SDM vol. 3C §27.3.1.4, §27.3.1.5). `state` is the interruptibility.
pub fn injection(info: u32, rflags: u64, state: u32) -> Legal {
    if info & event::VALID == 0 {
        return Ok(());
    }
    let blocks = |bits: u32| state & bits != 0;
    match info & event::TYPE {
        event::INTR => {
            unless(rflags & Rflags::IF.bits() == 0, "it injects an interrupt, and IF is clear")?;
            let shadow = blocks(interruptibility::STI | interruptibility::MOV_SS);
            unless(shadow, "it injects an interrupt in a shadow")
        }
        event::NMI => {
            unless(blocks(interruptibility::MOV_SS), "it injects an NMI behind MOV SS")?;
            unless(blocks(interruptibility::STI), "some CPUs take no NMI behind STI")?;
            unless(blocks(interruptibility::NMI), "it injects an NMI, and NMIs are blocked")
        }
        _ => Ok(()),
    }
}

/// What a CPU keeps of a control block, by clean bits.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    intercepts: ([u32; 6], [u16; 2], u64),
    maps: [u64; 2],
    asid: u32,
    virtual_interrupts: [u32; 2],
    paging: [u64; 3],
    control_registers: [u64; 4],
    debug_registers: [u64; 2],
    tables: [VmcbSegment; 2],
    segments: ([VmcbSegment; 4], u8),
    cr2: u64,
    branches: [u64; 6],
}

impl Kept {
    /// What it keeps of this block.
    pub fn of(block: &Vmcb) -> Self {
        let (c, s) = (&block.control, &block.save);
        let [es, cs, ss, ds, _, _, gdt, _, idt, _] = s.segments;
        let pause = [c.pause_filter_thresh, c.pause_filter_count];
        let records = [s.br_from, s.br_to, s.last_excp_from, s.last_excp_to];
        let [a, b, d, e] = records;
        Self {
            intercepts: (c.intercepts, pause, c.tsc_offset),
            maps: [c.iopm_base_pa, c.msrpm_base_pa],
            asid: c.asid,
            virtual_interrupts: [c.int_ctl, c.int_vector],
            paging: [c.np_ctl, c.ncr3, s.g_pat],
            control_registers: [s.cr0, s.cr3, s.cr4, s.efer],
            debug_registers: [s.dr6, s.dr7],
            tables: [gdt, idt],
            segments: ([es, cs, ss, ds], s.cpl),
            cr2: s.cr2,
            branches: [c.virt_ext, s.dbgctl, a, b, d, e],
        }
    }

    /// VMRUN of a block of which the CPU keeps this: what is called clean it does not read again, so that a change is lost.
    pub fn vmrun(&self, block: &Vmcb) -> Legal {
        let (now, clean) = (Self::of(block), Clean::from_bits_retain(block.control.clean));
        let stale = |group, changed: bool| changed && clean.contains(group);
        unless(stale(Clean::INTERCEPTS, self.intercepts != now.intercepts), "intercepts, clean")?;
        unless(stale(Clean::PERM_MAP, self.maps != now.maps), "maps, clean")?;
        unless(stale(Clean::ASID, self.asid != now.asid), "an ASID, clean")?;
        let changed = self.virtual_interrupts != now.virtual_interrupts;
        unless(stale(Clean::INTR, changed), "virtual interrupts, clean")?;
        unless(stale(Clean::NPT, self.paging != now.paging), "nested paging, clean")?;
        let changed = self.control_registers != now.control_registers;
        unless(stale(Clean::CR, changed), "control registers, clean")?;
        let changed = self.debug_registers != now.debug_registers;
        unless(stale(Clean::DR, changed), "debug registers, clean")?;
        unless(stale(Clean::DT, self.tables != now.tables), "descriptor tables, clean")?;
        unless(stale(Clean::SEG, self.segments != now.segments), "segments, clean")?;
        unless(stale(Clean::CR2, self.cr2 != now.cr2), "CR2, clean")?;
        unless(stale(Clean::LBR, self.branches != now.branches), "branch records, clean")
    }
}

fn svm_event(bits: u64) -> Legal {
    use vmcb::event::*;
    if bits & VALID == 0 {
        return Ok(());
    }
    let vector = bits & VECTOR;
    match bits & TYPE {
        INTR | NMI | SOFT => Ok(()),
        EXCEPTION => unless(vector == 2 || vector > 31, "no exception has this vector"),
        _ => Err("there are no events of this type"),
    }
}

/// VMWRITE: fields that can be written, and values as wide as they are. `any`: the CPU takes read-only fields too.
pub fn vmwrite(encoding: u32, value: u64, any: bool) -> Legal {
    const EXIT_INFORMATION: u32 = 1;
    let read_only = (encoding >> 10) & 3 == EXIT_INFORMATION;
    unless(read_only && !any, "the field is read-only")?;
    let bits = match (encoding >> 13) & 3 {
        0 => 16,
        2 => 32,
        _ => 64,
    };
    unless(bits < 64 && value >> bits != 0, "the field is not as wide")
}

/// Whether INVEPT of a kind is legal.
pub fn invept(kind: u64) -> Legal {
    unless(!matches!(kind, invept::SINGLE | invept::ALL), "there is no such kind")
}

/// Whether INVVPID with its operand is legal.
pub fn invvpid(kind: u64, vpid: u16, address: u64, limits: &Limits) -> Legal {
    unless(kind > invvpid::SINGLE_NON_GLOBAL, "there is no such kind")?;
    unless(kind != invvpid::ALL && vpid == 0, "VPID 0 is the host's")?;
    if kind == invvpid::ADDRESS { canonical(address, limits) } else { Ok(()) }
}

/// VM entry: one field of the VMCS. What is wrong with the host's state can be the host's end; what is
/// wrong with the guest's, a guest that does not run.
pub fn vmcs_field(encoding: u32, value: u64, limits: &Limits) -> Legal {
    let is = |of: u32| encoding == of;
    if is(field::GUEST_DR7.encoding()) {
        return unless(value >> 32 != 0, "DR7 has 32 bits");
    }
    if is(field::HOST_PAT.encoding()) || is(field::GUEST_PAT.encoding()) {
        return pat(value);
    }
    if is(field::HOST_EFER.encoding()) || is(field::GUEST_EFER.encoding()) {
        return efer(value);
    }
    if is(field::GUEST_CR4.encoding()) || is(field::HOST_CR4.encoding()) {
        return cr4(value);
    }
    if is(field::GUEST_CR0.encoding()) || is(field::HOST_CR0.encoding()) {
        return unless(value >> 32 != 0, "CR0 has 32 bits");
    }
    if is(field::GUEST_DEBUGCTL.encoding()) {
        return only(value, DEBUGCTL);
    }
    if is(field::GUEST_RFLAGS.encoding()) {
        unless(value & Rflags::FIXED.bits() == 0, "bit 1 of RFLAGS is clear")?;
        return only(value, 0x3f_7fd7);
    }
    if is(field::ENTRY_INTERRUPTION.encoding()) {
        return vmx_event(value as u32);
    }
    let bases = [
        field::HOST_FS_BASE.encoding(),
        field::HOST_GS_BASE.encoding(),
        field::HOST_TR_BASE.encoding(),
        field::HOST_GDTR_BASE.encoding(),
        field::HOST_IDTR_BASE.encoding(),
        field::HOST_SYSENTER_ESP.encoding(),
        field::HOST_SYSENTER_EIP.encoding(),
        field::GUEST_SYSENTER_ESP.encoding(),
        field::GUEST_SYSENTER_EIP.encoding(),
        field::GUEST_FS_BASE.encoding(),
        field::GUEST_GS_BASE.encoding(),
        field::GUEST_GDTR_BASE.encoding(),
        field::GUEST_IDTR_BASE.encoding(),
    ];
    if bases.contains(&encoding) { canonical(value, limits) } else { Ok(()) }
}

/// An entry with SYSCALL enabled while LSTAR is the host's: the guest would be led to the host's own entry, and read its
/// address.
pub fn syscall(guest: u64, lstar: u64, of_host: u64) -> Legal {
    let usable = Efer::from_bits_retain(guest).contains(Efer::SCE | Efer::LMA);
    unless(usable && lstar == of_host, "SYSCALL is the guest's, and LSTAR the host's")
}

/// VM entry: behind STI and MOV SS a single step is pending exactly if the guest steps (SDM vol. 3C §27.3.1.5).
pub fn pending_step(interruptibility: u32, rflags: u64, debugctl: u64, pending: u64) -> Legal {
    const SHADOW: u32 = interruptibility::STI | interruptibility::MOV_SS;
    if interruptibility & SHADOW == 0 {
        return Ok(());
    }
    let steps = rflags & Rflags::TF.bits() != 0 && debugctl & msr::debugctl::BTF == 0;
    unless(
        steps != (pending & Dr6::BS != 0),
        "in a shadow a step is pending that the guest does not make, or none",
    )
}

/// VM entry: a threshold of the priority is not above the priority, where the CPU compares the two (SDM vol. 3C §27.2.1.1).
pub fn threshold(primary: u32, secondary: u32, threshold: u32, tpr: u8) -> Legal {
    let compares = ProcControls::from_bits_retain(primary).contains(ProcControls::TPR_SHADOW)
        && !ProcControls2::from_bits_retain(secondary).intersects(
            ProcControls2::VIRTUAL_INTERRUPTS | ProcControls2::VIRTUALIZE_APIC_ACCESSES,
        );
    unless(compares && threshold & 0xf > u32::from(tpr >> 4), "the threshold is above the priority")
}

fn vmx_event(info: u32) -> Legal {
    use event::*;
    if info & VALID == 0 {
        return Ok(());
    }
    let vector = info & VECTOR;
    unless(info & 0x7fff_f000 != 0, "a reserved bit of the injected event is set")?;
    match info & TYPE {
        INTR | SOFT => Ok(()),
        NMI => unless(vector != 2, "the NMI has another vector"),
        EXCEPTION | PRIVILEGED_SOFT_EXCEPTION | SOFT_EXCEPTION => {
            unless(vector > 31, "no exception has this vector")
        }
        _ => Err("there are no events of this type"),
    }
}
