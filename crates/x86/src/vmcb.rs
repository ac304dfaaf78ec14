//! The virtual machine control block of SVM: control area, state-save area, intercepts, exit codes.
//!
//! Layouts are those of APM vol. 2 appendix B (tables B-1 and B-2); offsets are asserted below.
//! The state-save area of a guest without SEV-ES.

mod intercept;

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A segment as the VMCB holds it (APM vol. 2 table B-2): selector, 12-bit attributes, limit, base.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct VmcbSegment {
    /// The selector that software sees.
    pub selector: u16,
    /// Bits 55:52 and 47:40 of the descriptor, concatenated.
    pub attrib: u16,
    /// Limit in bytes, already scaled by the granularity.
    pub limit: u32,
    /// The address where the segment begins.
    pub base: u64,
}

/// The control area, offsets 0 to 0x3ff (APM vol. 2 table B-1).
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Control {
    /// Intercept vectors 0 to 5: [`InterceptCr`], [`InterceptDr`], [`Exceptions`](crate::exception::Exceptions),
    /// [`Intercept3`], [`Intercept4`], [`Intercept5`].
    pub intercepts: [u32; 6],
    // Gaps are fields, so that the structure has no padding, which zerocopy refuses.
    _reserved1: [u32; 9],
    /// PAUSE filter threshold.
    pub pause_filter_thresh: u16,
    /// PAUSE filter count.
    pub pause_filter_count: u16,
    /// Physical address of the I/O permission map.
    pub iopm_base_pa: u64,
    /// Physical address of the MSR permission map.
    pub msrpm_base_pa: u64,
    /// Added to the TSC when the guest reads it.
    pub tsc_offset: u64,
    /// The guest's ASID; 0 is the host's.
    // The tag of what the TLB keeps: two guests with one number would see each other's memory.
    pub asid: u32,
    /// TLB control: 0 nothing, 1 flush all, 3 flush this ASID.
    // Carried out by each VMRUN for as long as it is there: taken back after the entry.
    pub tlb_ctl: u8,
    _reserved2: [u8; 3],
    /// V_TPR, V_IRQ, V_GIF, V_INTR_PRIO, V_IGN_TPR, V_INTR_MASKING ... (see [`vintr`]).
    pub int_ctl: u32,
    /// Vector of the virtual interrupt.
    pub int_vector: u32,
    /// Interrupt shadow (bit 0) and guest interrupt mask (bit 1).
    pub int_state: u64,
    /// Why the guest exited: [`ExitCode`].
    // All 64 bits: VMEXIT_INVALID is -1, and its lower half alone another number.
    pub exit_code: u64,
    /// First exit-specific word.
    pub exit_info_1: u64,
    /// Second exit-specific word.
    pub exit_info_2: u64,
    /// The event whose delivery was interrupted by the exit ([`event`] format).
    // What was on its way is lost to the guest unless it is injected again.
    pub exit_int_info: u64,
    /// NPT, SEV and related enables.
    pub np_ctl: u64,
    /// V_APIC_BAR, where AVIC finds the APIC's page.
    pub avic_vapic_bar: u64,
    /// GHCB physical address.
    pub ghcb_gpa: u64,
    /// The event to be injected at the next VMRUN ([`event`] format).
    pub event_inj: u64,
    /// Root of the TDP table.
    pub ncr3: u64,
    /// LBR virtualisation and virtual VMSAVE/VMLOAD.
    pub virt_ext: u64,
    /// VMCB clean bits ([`Clean`]).
    pub clean: u32,
    _reserved3: u32,
    /// RIP of the next instruction, where the CPU has NRIP save.
    pub next_rip: u64,
    /// Number of guest instruction bytes fetched (decode assists).
    pub insn_len: u8,
    /// The bytes of the instruction that exited.
    // The bytes are valid after nested page faults and intercepted page faults alone.
    pub insn_bytes: [u8; 15],
    /// AVIC backing page.
    pub avic_backing_page: u64,
    _reserved4: u64,
    /// AVIC logical table.
    pub avic_logical_id: u64,
    /// AVIC physical table.
    pub avic_physical_id: u64,
    _reserved5: u64,
    /// SEV-ES save area.
    pub vmsa_pa: u64,
    _reserved6: [u8; 0x400 - 0x110],
}

/// The state-save area, offsets 0x400 on (APM vol. 2 table B-2).
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Save {
    /// ES, CS, SS, DS, FS, GS, GDTR, LDTR, IDTR, TR in this order; see the `SEG_*` constants.
    pub segments: [VmcbSegment; 10],
    _reserved1: [u8; 43],
    /// Current privilege level.
    // Apart from SS: the two differ where SS is null in 64-bit mode.
    pub cpl: u8,
    _reserved2: u32,
    /// The guest's EFER.
    pub efer: u64,
    _reserved3: [u8; 112],
    /// The guest's CR4.
    pub cr4: u64,
    /// The guest's CR3.
    pub cr3: u64,
    /// The guest's CR0.
    pub cr0: u64,
    /// The guest's DR7.
    pub dr7: u64,
    /// The guest's DR6.
    pub dr6: u64,
    /// The guest's RFLAGS.
    pub rflags: u64,
    /// The guest's RIP.
    pub rip: u64,
    _reserved4: [u8; 88],
    /// The guest's RSP.
    pub rsp: u64,
    /// The guest's S_CET.
    pub s_cet: u64,
    /// The guest's SSP.
    pub ssp: u64,
    /// The guest's ISST_ADDR.
    pub isst_addr: u64,
    /// The guest's RAX.
    pub rax: u64,
    /// The guest's STAR.
    pub star: u64,
    /// The guest's LSTAR.
    pub lstar: u64,
    /// The guest's CSTAR.
    pub cstar: u64,
    /// The guest's SFMASK.
    pub sfmask: u64,
    /// The guest's KernelGSBase.
    pub kernel_gs_base: u64,
    /// The guest's SYSENTER_CS.
    pub sysenter_cs: u64,
    /// The guest's SYSENTER_ESP.
    pub sysenter_esp: u64,
    /// The guest's SYSENTER_EIP.
    pub sysenter_eip: u64,
    /// The guest's CR2.
    pub cr2: u64,
    _reserved5: [u8; 32],
    /// Guest PAT, used with TDP.
    // Only with nested paging: without it the guest's PAT is the host's.
    pub g_pat: u64,
    /// The guest's DEBUGCTL.
    pub dbgctl: u64,
    /// Last branch from.
    pub br_from: u64,
    /// Last branch to.
    pub br_to: u64,
    /// Last exception from.
    pub last_excp_from: u64,
    /// Last exception to.
    pub last_excp_to: u64,
    _reserved6: [u8; 72],
    /// SPEC_CTRL, where the CPU virtualises it (CPUID Fn8000_000A EDX[20]).
    pub spec_ctrl: u64,
    _reserved7: [u8; 0xc00 - 0x2e8],
}

/// The whole control block, one page.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub struct Vmcb {
    /// The control area, offsets 0 to 0x3ff.
    pub control: Control,
    /// The state-save area, from offset 0x400.
    pub save: Save,
}

const _: () = {
    use core::mem::{offset_of, size_of};
    // A gap of a wrong size would move all that is behind it: one field at least is asked behind
    // each.
    assert!(size_of::<Vmcb>() == 4096);
    assert!(offset_of!(Control, pause_filter_thresh) == 0x3c);
    assert!(offset_of!(Control, iopm_base_pa) == 0x40);
    assert!(offset_of!(Control, tsc_offset) == 0x50);
    assert!(offset_of!(Control, asid) == 0x58);
    assert!(offset_of!(Control, int_ctl) == 0x60);
    assert!(offset_of!(Control, exit_code) == 0x70);
    assert!(offset_of!(Control, exit_int_info) == 0x88);
    assert!(offset_of!(Control, event_inj) == 0xa8);
    assert!(offset_of!(Control, ncr3) == 0xb0);
    assert!(offset_of!(Control, clean) == 0xc0);
    assert!(offset_of!(Control, next_rip) == 0xc8);
    assert!(offset_of!(Control, insn_bytes) == 0xd1);
    assert!(offset_of!(Control, vmsa_pa) == 0x108);
    assert!(offset_of!(Vmcb, save) == 0x400);
    assert!(offset_of!(Save, cpl) == 0xcb);
    assert!(offset_of!(Save, efer) == 0xd0);
    assert!(offset_of!(Save, cr4) == 0x148);
    assert!(offset_of!(Save, rip) == 0x178);
    assert!(offset_of!(Save, rsp) == 0x1d8);
    assert!(offset_of!(Save, rax) == 0x1f8);
    assert!(offset_of!(Save, cr2) == 0x240);
    assert!(offset_of!(Save, g_pat) == 0x268);
    assert!(offset_of!(Save, spec_ctrl) == 0x2e0);
};

/// Index of ES in [`Save::segments`].
pub const SEG_ES: usize = 0;
/// Index of CS.
pub const SEG_CS: usize = 1;
/// Index of SS.
pub const SEG_SS: usize = 2;
/// Index of DS.
pub const SEG_DS: usize = 3;
/// Index of FS.
pub const SEG_FS: usize = 4;
/// Index of GS.
pub const SEG_GS: usize = 5;
/// Index of GDTR.
pub const SEG_GDTR: usize = 6;
/// Index of LDTR.
pub const SEG_LDTR: usize = 7;
/// Index of IDTR.
pub const SEG_IDTR: usize = 8;
/// Index of TR.
pub const SEG_TR: usize = 9;

bitflags! {
    /// VMCB clean bits: what the CPU may take from its cache (APM vol. 2 §15.15.3).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Clean: u32 {
        /// Intercepts, TSC offset, pause filter.
        // A bit that is set lets the CPU keep what it has: whoever changes a field of the group has
        // to clear it.
        const INTERCEPTS = 1 << 0;
        /// IOPM and MSRPM addresses.
        const PERM_MAP = 1 << 1;
        /// The guest's ASID.
        const ASID = 1 << 2;
        /// Virtual interrupt fields.
        const INTR = 1 << 3;
        /// TDP: CR3, PAT, enable.
        const NPT = 1 << 4;
        /// CR0, CR3, CR4, EFER.
        const CR = 1 << 5;
        /// DR6 and DR7.
        const DR = 1 << 6;
        /// GDT and IDT.
        const DT = 1 << 7;
        /// CS, DS, SS, ES, CPL.
        const SEG = 1 << 8;
        /// The guest's CR2.
        const CR2 = 1 << 9;
        /// DEBUGCTL and the branch records.
        const LBR = 1 << 10;
        /// The addresses that AVIC uses.
        const AVIC = 1 << 11;
        /// S_CET, SSP, ISST_ADDR.
        const CET = 1 << 12;
        /// All that exist.
        const ALL = (1 << 13) - 1;
    }
}

/// Bits of [`Control::int_ctl`].
pub mod vintr {
    /// V_TPR, bits 3:0 (7:0).
    pub const TPR_MASK: u32 = 0x0f;
    /// V_IRQ: a virtual interrupt is pending.
    pub const IRQ: u32 = 1 << 8;
    /// V_GIF: the guest's GIF, if virtual.
    pub const GIF: u32 = 1 << 9;
    /// V_NMI: a virtual NMI is pending.
    pub const NMI: u32 = 1 << 11;
    /// V_NMI_MASK: virtual NMIs are masked.
    // Set by the CPU when it delivers a virtual NMI, and cleared by the IRET.
    pub const NMI_MASK: u32 = 1 << 12;
    /// Shift of V_INTR_PRIO.
    pub const PRIO_SHIFT: u32 = 16;
    /// V_IGN_TPR: the virtual interrupt ignores V_TPR.
    // For a window: it is to open by RFLAGS.IF alone.
    pub const IGN_TPR: u32 = 1 << 20;
    /// V_INTR_MASKING: RFLAGS.IF of the guest masks only virtual interrupts.
    pub const INTR_MASKING: u32 = 1 << 24;
    /// The guest has a GIF of its own, V_GIF.
    pub const GIF_ENABLE: u32 = 1 << 25;
    /// NMIs are injected by V_NMI.
    pub const NMI_ENABLE: u32 = 1 << 26;
}

/// Format of EVENTINJ and EXITINTINFO (APM vol. 2 §15.20).
pub mod event {
    /// The vector, bits 7:0.
    pub const VECTOR: u64 = 0xff;
    /// Shift of the type.
    pub const TYPE_SHIFT: u32 = 8;
    /// Mask of the type, in place.
    pub const TYPE: u64 = 7 << TYPE_SHIFT;
    /// External or virtual interrupt.
    // Type 0: a test for it has to compare the whole field.
    pub const INTR: u64 = 0 << TYPE_SHIFT;
    /// The type: an NMI.
    pub const NMI: u64 = 2 << TYPE_SHIFT;
    /// The type: an exception.
    pub const EXCEPTION: u64 = 3 << TYPE_SHIFT;
    /// Software interrupt (INTn).
    pub const SOFT: u64 = 4 << TYPE_SHIFT;
    /// An error code is pushed.
    // A code without the bit is not pushed: the two halves of the word are looked at apart.
    pub const ERROR_VALID: u64 = 1 << 11;
    /// The event is valid.
    pub const VALID: u64 = 1 << 31;
}

/// Interrupt shadow, in [`Control::int_state`].
pub const INT_SHADOW: u64 = 1;
/// DEBUGCTL and the branch records are the guest's own, in [`Control::virt_ext`].
pub const VIRTUAL_LBR: u64 = 1 << 0;
/// VMLOAD and VMSAVE of the guest are carried out, in [`Control::virt_ext`].
pub const VIRTUAL_VMLOAD: u64 = 1 << 1;
/// NP_ENABLE in [`Control::np_ctl`].
pub const NP_ENABLE: u64 = 1;

pub use exit_code::ExitCode;
pub use intercept::{Intercept3, Intercept4, Intercept5, InterceptCr, InterceptDr};

/// Exit codes; named as in the manual, where each is explained.
#[allow(missing_docs)]
mod exit_code {
    /// Why the guest exited (APM vol. 2 appendix C). Any value can be held, known or not.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(transparent)]
    pub struct ExitCode(pub u64);

    #[allow(non_upper_case_globals)] // Read like the variants of an enum.
    impl ExitCode {
        /// Whether the exit is an exception's.
        #[inline]
        pub const fn is_exception(self) -> bool {
            // By range: exceptions have the 32 codes from 40h on, in the order of their vectors.
            self.0 >= Self::Excp0.0 && self.0 <= Self::Excp31.0
        }

        pub const ReadCr0: Self = Self(0x000);
        pub const ReadCr15: Self = Self(0x00f);
        pub const WriteCr0: Self = Self(0x010);
        pub const WriteCr3: Self = Self(0x013);
        pub const WriteCr4: Self = Self(0x014);
        pub const WriteCr8: Self = Self(0x018);
        pub const WriteCr15: Self = Self(0x01f);
        pub const ReadDr0: Self = Self(0x020);
        pub const ReadDr15: Self = Self(0x02f);
        pub const WriteDr0: Self = Self(0x030);
        pub const WriteDr15: Self = Self(0x03f);
        pub const Excp0: Self = Self(0x040);
        pub const ExcpDb: Self = Self(0x041);
        pub const ExcpGp: Self = Self(0x04d);
        pub const ExcpPf: Self = Self(0x04e);
        pub const Excp31: Self = Self(0x05f);
        pub const Intr: Self = Self(0x060);
        pub const Nmi: Self = Self(0x061);
        pub const Smi: Self = Self(0x062);
        pub const Init: Self = Self(0x063);
        pub const Vintr: Self = Self(0x064);
        pub const Cr0SelWrite: Self = Self(0x065);
        pub const Rdpmc: Self = Self(0x06f);
        pub const Cpuid: Self = Self(0x072);
        pub const Rsm: Self = Self(0x073);
        pub const Iret: Self = Self(0x074);
        pub const Invd: Self = Self(0x076);
        pub const Pause: Self = Self(0x077);
        pub const Hlt: Self = Self(0x078);
        pub const Invlpg: Self = Self(0x079);
        pub const Invlpga: Self = Self(0x07a);
        pub const Ioio: Self = Self(0x07b);
        pub const Msr: Self = Self(0x07c);
        pub const TaskSwitch: Self = Self(0x07d);
        pub const FerrFreeze: Self = Self(0x07e);
        pub const Shutdown: Self = Self(0x07f);
        pub const Vmrun: Self = Self(0x080);
        pub const Vmmcall: Self = Self(0x081);
        pub const Vmload: Self = Self(0x082);
        pub const Vmsave: Self = Self(0x083);
        pub const Stgi: Self = Self(0x084);
        pub const Clgi: Self = Self(0x085);
        pub const Skinit: Self = Self(0x086);
        pub const Rdtscp: Self = Self(0x087);
        pub const Icebp: Self = Self(0x088);
        pub const Wbinvd: Self = Self(0x089);
        pub const Monitor: Self = Self(0x08a);
        pub const Mwait: Self = Self(0x08b);
        pub const MwaitConditional: Self = Self(0x08c);
        pub const Xsetbv: Self = Self(0x08d);
        pub const Rdpru: Self = Self(0x08e);
        pub const Invlpgb: Self = Self(0x0a0);
        pub const InvlpgbIllegal: Self = Self(0x0a1);
        pub const Invpcid: Self = Self(0x0a2);
        pub const Mcommit: Self = Self(0x0a3);
        pub const Tlbsync: Self = Self(0x0a4);
        pub const Npf: Self = Self(0x400);
        pub const Invalid: Self = Self(0xffff_ffff_ffff_ffff);
        /// No exit of a processor's: software says so that it has ended a guest's run (APM vol. 2 appendix C).
        pub const Software: Self = Self(0xf000_0000);
    }
}

/// Bits of EXITINFO1 after an I/O exit (APM vol. 2 §15.10.2).
pub mod ioio {
    /// IN rather than OUT.
    pub const IN: u64 = 1 << 0;
    /// The instruction is INS or OUTS.
    pub const STRING: u64 = 1 << 2;
    /// The instruction has a REP prefix.
    pub const REP: u64 = 1 << 3;
    /// Shift of the 3-bit operand size (1, 2 or 4 bytes, one-hot).
    pub const SIZE_SHIFT: u32 = 4;
    /// Shift of the port.
    pub const PORT_SHIFT: u32 = 16;
}

/// Bits of EXITINFO1 after a TDP fault (APM vol. 2 §15.25.6), beyond those of a #PF.
pub mod npf {
    /// The fault was on the guest's final physical address.
    pub const FINAL: u64 = 1 << 32;
    /// The fault was on a guest page-table page.
    pub const TABLE: u64 = 1 << 33;
}
