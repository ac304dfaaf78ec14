//! Which features a guest may be offered, before looking at the host.
//!
//! The set is that of stock KVM 6.12, minus what this hypervisor does not virtualize: the PMU, SGX, AMX, processor trace, and the paravirtual services that are not
//! built. A bit belongs here only when every register and MSR that the feature brings is handled.

use crate::FeatureWords;
use x86::cpuid::feature::*;

/// Paravirtual features that this hypervisor serves: EAX of leaf 0x40000001
/// (`Documentation/virt/kvm/x86/cpuid.rst`).
pub const PV_FEATURES: u32 = KVM_CLOCKSOURCE.mask()
    | KVM_NOP_IO_DELAY.mask()
    | KVM_CLOCKSOURCE2.mask()
    // None comes, as on a host that swaps nothing; the interrupt by which newer guests are told is not offered. Every model of
    // QEMU's asks for this one, and counts as not usable without.
    | KVM_ASYNC_PF.mask()
    | KVM_STEAL_TIME.mask()
    | KVM_PV_EOI.mask()
    | KVM_PV_UNHALT.mask()
    | KVM_PV_SEND_IPI.mask()
    | KVM_POLL_CONTROL.mask()
    | KVM_LAZY_TSC_DEADLINE.mask()
    | KVM_CLOCKSOURCE_STABLE.mask();

/// Offered when the host has it.
#[rustfmt::skip]
pub(crate) const PASSED: FeatureWords = FeatureWords::of(&[
    // Leaf 1. No MONITOR (it would keep the CPU from the host), no OSXSAVE (it follows CR4), no
    // TSC_DEADLINE (it depends on the in-kernel APIC and is told by KVM_CAP_TSC_DEADLINE_TIMER,
    // KVM API §4.46), no PDCM (no PMU).
    SSE3, PCLMULQDQ, VMX, SSSE3, FMA, CX16, PCID, SSE4_1, SSE4_2, MOVBE, POPCNT, AES, XSAVE, AVX, F16C,
    RDRAND, FPU, VME, DE, PSE, TSC, MSR, PAE, MCE, CX8, APIC, SEP, MTRR, PGE, MCA, CMOV, PAT, PSE36,
    CLFSH, MMX, FXSR, SSE, SSE2, SS,
    // Leaf 7. No LAM (CR3's bits and tagged addresses are not followed everywhere).
    FSGSBASE, BMI1, HLE, AVX2, FDP_EXCPTN_ONLY, SMEP, BMI2, ERMS, INVPCID, RTM, ZERO_FCS_FDS,
    AVX512F, AVX512DQ, RDSEED, ADX, SMAP, AVX512IFMA, CLFLUSHOPT, CLWB, AVX512PF, AVX512ER,
    AVX512CD, SHA_NI, AVX512BW, AVX512VL, AVX512VBMI, UMIP, PKU, AVX512_VBMI2, GFNI, VAES,
    VPCLMULQDQ, AVX512_VNNI, AVX512_BITALG, AVX512_VPOPCNTDQ, LA57, RDPID, CLDEMOTE, MOVDIRI,
    MOVDIR64B, AVX512_4VNNIW, AVX512_4FMAPS, FSRM, AVX512_VP2INTERSECT, MD_CLEAR, SERIALIZE,
    TSXLDTRK, AVX512_FP16, SPEC_CTRL, INTEL_STIBP, FLUSH_L1D, SPEC_CTRL_SSBD, SHA512, SM3, SM4,
    AVX_VNNI, AVX512_BF16, CMPCCXADD, FZRM, FSRS, FSRC, AVX_IFMA, AVX_VNNI_INT8,
    AVX_NE_CONVERT, AVX_VNNI_INT16, PREFETCHITI, INTEL_PSFD, IPRED_CTRL, RRSBA_CTRL, DDPD_U,
    BHI_CTRL, MCDT_NO,
    // Leaf 0xD. No XFD (no AMX).
    XSAVEOPT, XSAVEC, XGETBV1, XSAVES,
    // Leaves 0x8000_0001 and on. LAHF_LM to TOPOEXT in ECX, the rest in EDX and elsewhere.
    LAHF_LM, CMP_LEGACY, CR8_LEGACY, ABM, SSE4A, MISALIGNSSE, PREFETCHW, OSVW, XOP, FMA4, TBM,
    TOPOEXT, SYSCALL, NX, MMXEXT, FXSR_OPT, GBPAGES, RDTSCP, LM, AMD_3DNOWEXT, AMD_3DNOW,
    INVARIANT_TSC, CLZERO, XSAVEERPTR, WBNOINVD, AMD_IBPB, AMD_IBRS, AMD_STIBP,
    AMD_STIBP_ALWAYS_ON, AMD_SSBD, AMD_SSB_NO, AMD_PSFD, AMD_IBPB_RET, NO_NESTED_DATA_BP,
    WRMSR_XX_BASE_NS, LFENCE_RDTSC, NULL_SEL_CLR_BASE, AUTOIBRS, SBPB, IBPB_BRTYPE, SRSO_NO,
    // For guests that are hypervisors.
    SVM, NPT, LBRV, NRIPS, TSC_SCALE, VMCB_CLEAN, FLUSH_BY_ASID, DECODE_ASSISTS, PAUSE_FILTER,
    PAUSE_THRESHOLD, V_VMSAVE_VMLOAD, VGIF, VNMI,
]);

/// Of the instruction set that guests run their own guests by, offered only where they may.
pub(crate) const NESTED_SVM: FeatureWords = FeatureWords::of(&[
    SVM,
    NPT,
    LBRV,
    NRIPS,
    TSC_SCALE,
    VMCB_CLEAN,
    FLUSH_BY_ASID,
    DECODE_ASSISTS,
    PAUSE_FILTER,
    PAUSE_THRESHOLD,
    V_VMSAVE_VMLOAD,
    VGIF,
    VNMI,
]);

/// Offered whatever the host has: emulated in software.
pub(crate) const FORCED: FeatureWords =
    FeatureWords::of(&[X2APIC, HYPERVISOR, TSC_ADJUST, ARCH_CAPABILITIES, NO_SMM_CTL_MSR]);

/// Needs AVX state in XCR0.
#[rustfmt::skip]
pub(crate) const NEEDS_AVX: FeatureWords = FeatureWords::of(&[
    AVX, FMA, F16C, AVX2, VAES, VPCLMULQDQ, XOP, FMA4, AVX_VNNI, AVX_IFMA, AVX_VNNI_INT8,
    AVX_NE_CONVERT, AVX_VNNI_INT16, SHA512, SM3, SM4,
]);

/// Needs AVX-512 state in XCR0.
#[rustfmt::skip]
pub(crate) const NEEDS_AVX512: FeatureWords = FeatureWords::of(&[
    AVX512F, AVX512DQ, AVX512IFMA, AVX512PF, AVX512ER, AVX512CD, AVX512BW, AVX512VL, AVX512VBMI,
    AVX512_VBMI2, AVX512_VNNI, AVX512_BITALG, AVX512_VPOPCNTDQ, AVX512_4VNNIW, AVX512_4FMAPS,
    AVX512_VP2INTERSECT, AVX512_FP16, AVX512_BF16,
]);

/// Needs XSAVE at all.
pub(crate) const NEEDS_XSAVE: FeatureWords =
    FeatureWords::of(&[XSAVE, XSAVEOPT, XSAVEC, XGETBV1, XSAVES]);

/// The low byte of EDX and more of leaf 0x8000_0001 repeats leaf 1 on AMD.
pub(crate) const REPEATED_1_EDX: u32 = FPU.mask()
    | VME.mask()
    | DE.mask()
    | PSE.mask()
    | TSC.mask()
    | MSR.mask()
    | PAE.mask()
    | MCE.mask()
    | CX8.mask()
    | APIC.mask()
    | MTRR.mask()
    | PGE.mask()
    | MCA.mask()
    | CMOV.mask()
    | PAT.mask()
    | PSE36.mask()
    | MMX.mask()
    | FXSR.mask();
