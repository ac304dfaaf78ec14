//! CPUID leaves and feature bits.
//!
//! SDM vol. 2A "CPUID", APM vol. 3 appendix E, and `Documentation/virt/kvm/x86/cpuid.rst` for
//! the leaves that KVM defines.

/// Output register of CPUID, in the order of a `[u32; 4]` answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // The names say it.
pub enum Reg {
    Eax = 0,
    Ebx = 1,
    Ecx = 2,
    Edx = 3,
}

impl Reg {
    /// The part of an answer that is in this register.
    #[inline]
    pub const fn of(self, answer: &[u32; 4]) -> u32 {
        let [eax, ebx, ecx, edx] = *answer;
        match self {
            Self::Eax => eax,
            Self::Ebx => ebx,
            Self::Ecx => ecx,
            Self::Edx => edx,
        }
    }
}

/// One feature bit: where CPUID says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The leaf: EAX before CPUID.
    pub leaf: u32,
    /// The subleaf: ECX before CPUID.
    pub subleaf: u32,
    /// The register that has the bit.
    pub reg: Reg,
    /// Bit number, 0 to 31.
    pub bit: u8,
}

impl Feature {
    /// The bit as a mask over its register.
    #[inline]
    pub const fn mask(self) -> u32 {
        // The mask bounds the shift for the compiler; a test holds the table to it.
        1 << (self.bit & 31)
    }

    /// Whether the answer of (leaf, subleaf) has the bit.
    #[inline]
    pub const fn is_in(self, answer: &[u32; 4]) -> bool {
        self.reg.of(answer) & self.mask() != 0
    }
}

/// The numbers of leaves.
pub mod leaf {
    /// Highest basic leaf, and the vendor.
    pub const VENDOR: u32 = 0;
    /// Family, model, basic features.
    pub const FEATURES: u32 = 1;
    /// Cache and TLB descriptors (Intel).
    pub const CACHE_DESCRIPTORS: u32 = 2;
    /// Deterministic cache parameters (Intel); subleaves.
    pub const CACHE: u32 = 4;
    /// MONITOR and MWAIT.
    pub const MWAIT: u32 = 5;
    /// Thermal and power.
    pub const POWER: u32 = 6;
    /// Structured extended features; subleaves.
    pub const EXTENDED_FEATURES: u32 = 7;
    /// Architectural performance monitoring.
    pub const PMU: u32 = 0xa;
    /// Extended topology; subleaves.
    pub const TOPOLOGY: u32 = 0xb;
    /// XSAVE: components and sizes, by subleaf.
    pub const XSAVE: u32 = 0xd;
    /// Processor trace; subleaves.
    pub const PT: u32 = 0x14;
    /// TSC and crystal frequencies.
    pub const TSC: u32 = 0x15;
    /// AMX tile information; subleaves.
    pub const TILE: u32 = 0x1d;
    /// TMUL information; subleaves.
    pub const TMUL: u32 = 0x1e;
    /// Second extended topology; subleaves.
    pub const TOPOLOGY_V2: u32 = 0x1f;
    /// AVX10: version and lengths, by subleaf.
    pub const AVX10: u32 = 0x24;
    /// First leaf for hypervisors: signature.
    pub const HYPERVISOR: u32 = 0x4000_0000;
    /// The features that KVM offers.
    pub const KVM_FEATURES: u32 = 0x4000_0001;
    /// Highest extended leaf, and the vendor.
    pub const EXTENDED: u32 = 0x8000_0000;
    /// AMD's features, and Intel's among them.
    pub const EXTENDED_1: u32 = 0x8000_0001;
    /// First third of the name; two more follow.
    pub const BRAND: u32 = 0x8000_0002;
    /// L1 cache and TLB (AMD).
    pub const L1: u32 = 0x8000_0005;
    /// L2 and L3 cache and TLB.
    pub const L2: u32 = 0x8000_0006;
    /// Advanced power management: invariant TSC.
    pub const APM: u32 = 0x8000_0007;
    /// Address sizes, and features.
    pub const ADDRESS_SIZES: u32 = 0x8000_0008;
    /// SVM: revision, ASIDs, features.
    pub const SVM: u32 = 0x8000_000a;
    /// TLB of 1 GiB pages (AMD).
    pub const TLB_1G: u32 = 0x8000_0019;
    /// Performance hints (AMD).
    pub const PERFORMANCE: u32 = 0x8000_001a;
    /// Cache topology (AMD); subleaves.
    pub const AMD_CACHE: u32 = 0x8000_001d;
    /// Processor topology (AMD).
    pub const AMD_TOPOLOGY: u32 = 0x8000_001e;
    /// Encrypted virtualization (AMD).
    pub const SEV: u32 = 0x8000_001f;
    /// Extended features 2 (AMD).
    pub const EXTENDED_21: u32 = 0x8000_0021;
    /// Performance monitoring (AMD).
    pub const AMD_PMU: u32 = 0x8000_0022;
    /// Highest Centaur leaf.
    pub const CENTAUR: u32 = 0xc000_0000;
    /// The features of Centaur's CPUs.
    pub const CENTAUR_1: u32 = 0xc000_0001;
}

/// The signature in EBX, ECX and EDX of [`leaf::HYPERVISOR`]: "KVMKVMKVM", zero-padded.
pub const KVM_SIGNATURE: [u32; 3] = [0x4b4d_564b, 0x564b_4d56, 0x0000_004d];

macro_rules! features {
    ($($leaf:literal . $sub:literal $reg:ident { $($name:ident = $bit:literal $doc:literal,)* })*) => {
        /// The feature bits by name.
        pub mod feature {
            use super::{Feature, Reg};

            $($(
                #[doc = $doc]
                pub const $name: Feature =
                    Feature { leaf: $leaf, subleaf: $sub, reg: Reg::$reg, bit: $bit };
            )*)*

            /// Every named feature, for logs and tests.
            pub const ALL: &[(&str, Feature)] = &[$($((stringify!($name), $name),)*)*];
        }
    };
}

// Features that no guest is offered have a name, too: the host is asked for some of them, and a VMM
// may show any to its guest.
features! {
    1 . 0 Ecx {
        SSE3 = 0 "SSE3.",
        PCLMULQDQ = 1 "Carry-less multiplication.",
        DTES64 = 2 "64-bit debug store.",
        MONITOR = 3 "MONITOR and MWAIT.",
        DS_CPL = 4 "CPL-qualified debug store.",
        VMX = 5 "VMX.",
        SMX = 6 "SMX.",
        EST = 7 "Enhanced SpeedStep.",
        TM2 = 8 "Thermal monitor 2.",
        SSSE3 = 9 "SSSE3.",
        FMA = 12 "Fused multiply-add.",
        CX16 = 13 "CMPXCHG16B.",
        XTPR = 14 "Task-priority update control.",
        PDCM = 15 "PERF_CAPABILITIES exists.",
        PCID = 17 "Process-context identifiers.",
        DCA = 18 "Direct cache access.",
        SSE4_1 = 19 "SSE4.1.",
        SSE4_2 = 20 "SSE4.2.",
        X2APIC = 21 "x2APIC mode.",
        MOVBE = 22 "MOVBE.",
        POPCNT = 23 "POPCNT.",
        TSC_DEADLINE = 24 "TSC-deadline mode of the APIC timer.",
        AES = 25 "AES instructions.",
        XSAVE = 26 "XSAVE.",
        OSXSAVE = 27 "CR4.OSXSAVE is set.",
        AVX = 28 "AVX.",
        F16C = 29 "Half-precision conversion.",
        RDRAND = 30 "RDRAND.",
        HYPERVISOR = 31 "Running under a hypervisor.",
    }
    1 . 0 Edx {
        FPU = 0 "x87.",
        VME = 1 "Virtual-8086 extensions.",
        DE = 2 "Debugging extensions.",
        PSE = 3 "4 MiB pages.",
        TSC = 4 "Time-stamp counter.",
        MSR = 5 "RDMSR and WRMSR.",
        PAE = 6 "Physical-address extension.",
        MCE = 7 "Machine-check exception.",
        CX8 = 8 "CMPXCHG8B.",
        APIC = 9 "Local APIC present and enabled.",
        SEP = 11 "SYSENTER.",
        MTRR = 12 "MTRRs.",
        PGE = 13 "Global pages.",
        MCA = 14 "Machine-check architecture.",
        CMOV = 15 "Conditional moves.",
        PAT = 16 "Page attribute table.",
        PSE36 = 17 "36-bit 4 MiB pages.",
        PSN = 18 "Serial number.",
        CLFSH = 19 "CLFLUSH.",
        DS = 21 "Debug store.",
        ACPI = 22 "Thermal MSRs.",
        MMX = 23 "MMX.",
        FXSR = 24 "FXSAVE.",
        SSE = 25 "SSE.",
        SSE2 = 26 "SSE2.",
        SS = 27 "Self-snoop.",
        HTT = 28 "More than one logical processor.",
        TM = 29 "Thermal monitor.",
        PBE = 31 "Pending-break enable.",
    }
    6 . 0 Eax {
        ARAT = 2 "The APIC timer runs in every sleep state.",
    }
    7 . 0 Ebx {
        FSGSBASE = 0 "RDFSBASE and its kin.",
        TSC_ADJUST = 1 "TSC_ADJUST exists.",
        SGX = 2 "SGX.",
        BMI1 = 3 "Bit manipulation 1.",
        HLE = 4 "Hardware lock elision.",
        AVX2 = 5 "AVX2.",
        FDP_EXCPTN_ONLY = 6 "x87 data pointer updated on exceptions only.",
        SMEP = 7 "Supervisor-mode execution prevention.",
        BMI2 = 8 "Bit manipulation 2.",
        ERMS = 9 "Fast REP MOVSB and STOSB.",
        INVPCID = 10 "INVPCID.",
        RTM = 11 "Restricted transactional memory.",
        CQM = 12 "Cache monitoring.",
        ZERO_FCS_FDS = 13 "x87 CS and DS are zero.",
        MPX = 14 "MPX.",
        RDT_A = 15 "Cache allocation.",
        AVX512F = 16 "AVX-512 foundation.",
        AVX512DQ = 17 "AVX-512 double and quad words.",
        RDSEED = 18 "RDSEED.",
        ADX = 19 "ADCX and ADOX.",
        SMAP = 20 "Supervisor-mode access prevention.",
        AVX512IFMA = 21 "AVX-512 integer fused multiply-add.",
        CLFLUSHOPT = 23 "CLFLUSHOPT.",
        CLWB = 24 "CLWB.",
        INTEL_PT = 25 "Processor trace.",
        AVX512PF = 26 "AVX-512 prefetch.",
        AVX512ER = 27 "AVX-512 exponential and reciprocal.",
        AVX512CD = 28 "AVX-512 conflict detection.",
        SHA_NI = 29 "SHA instructions.",
        AVX512BW = 30 "AVX-512 bytes and words.",
        AVX512VL = 31 "AVX-512 vector lengths.",
    }
    7 . 0 Ecx {
        PREFETCHWT1 = 0 "PREFETCHWT1.",
        AVX512VBMI = 1 "AVX-512 byte manipulation.",
        UMIP = 2 "User-mode instruction prevention.",
        PKU = 3 "Protection keys for user pages.",
        OSPKE = 4 "CR4.PKE is set.",
        WAITPKG = 5 "TPAUSE, UMONITOR, UMWAIT.",
        AVX512_VBMI2 = 6 "AVX-512 byte manipulation 2.",
        SHSTK = 7 "Shadow stacks.",
        GFNI = 8 "Galois-field instructions.",
        VAES = 9 "Vector AES.",
        VPCLMULQDQ = 10 "Vector carry-less multiplication.",
        AVX512_VNNI = 11 "AVX-512 neural-network instructions.",
        AVX512_BITALG = 12 "AVX-512 bit algorithms.",
        TME = 13 "Memory encryption.",
        AVX512_VPOPCNTDQ = 14 "AVX-512 population count.",
        LA57 = 16 "Five-level paging.",
        RDPID = 22 "RDPID.",
        KEY_LOCKER = 23 "Key Locker.",
        BUS_LOCK_DETECT = 24 "Bus-lock detection.",
        CLDEMOTE = 25 "CLDEMOTE.",
        MOVDIRI = 27 "MOVDIRI.",
        MOVDIR64B = 28 "MOVDIR64B.",
        ENQCMD = 29 "ENQCMD.",
        SGX_LC = 30 "SGX launch control.",
        PKS = 31 "Protection keys for supervisor pages.",
    }
    7 . 0 Edx {
        AVX512_4VNNIW = 2 "AVX-512 4VNNIW.",
        AVX512_4FMAPS = 3 "AVX-512 4FMAPS.",
        FSRM = 4 "Fast short REP MOVSB.",
        UINTR = 5 "User interrupts.",
        AVX512_VP2INTERSECT = 8 "AVX-512 VP2INTERSECT.",
        SRBDS_CTRL = 9 "SRBDS control.",
        MD_CLEAR = 10 "VERW clears buffers.",
        RTM_ALWAYS_ABORT = 11 "RTM always aborts.",
        SERIALIZE = 14 "SERIALIZE.",
        HYBRID = 15 "Hybrid part.",
        TSXLDTRK = 16 "TSX load tracking.",
        PCONFIG = 18 "PCONFIG.",
        ARCH_LBR = 19 "Architectural last-branch records.",
        IBT = 20 "Indirect-branch tracking.",
        AMX_BF16 = 22 "AMX bfloat16.",
        AVX512_FP16 = 23 "AVX-512 half precision.",
        AMX_TILE = 24 "AMX tiles.",
        AMX_INT8 = 25 "AMX 8-bit integers.",
        SPEC_CTRL = 26 "SPEC_CTRL.IBRS and PRED_CMD.IBPB (Intel).",
        INTEL_STIBP = 27 "SPEC_CTRL.STIBP (Intel).",
        FLUSH_L1D = 28 "FLUSH_CMD exists.",
        ARCH_CAPABILITIES = 29 "ARCH_CAPABILITIES exists.",
        CORE_CAPABILITIES = 30 "CORE_CAPABILITIES exists.",
        SPEC_CTRL_SSBD = 31 "SPEC_CTRL.SSBD (Intel).",
    }
    7 . 1 Eax {
        SHA512 = 0 "SHA-512 instructions.",
        SM3 = 1 "SM3 instructions.",
        SM4 = 2 "SM4 instructions.",
        AVX_VNNI = 4 "AVX neural-network instructions.",
        AVX512_BF16 = 5 "AVX-512 bfloat16.",
        LASS = 6 "Linear-address-space separation.",
        CMPCCXADD = 7 "CMPccXADD.",
        FZRM = 10 "Fast zero-length REP MOVSB.",
        FSRS = 11 "Fast short REP STOSB.",
        FSRC = 12 "Fast short REP CMPSB.",
        FRED = 17 "Flexible return and event delivery.",
        LKGS = 18 "LKGS.",
        AMX_FP16 = 21 "AMX half precision.",
        AVX_IFMA = 23 "AVX integer fused multiply-add.",
        LAM = 26 "Linear-address masking.",
    }
    7 . 1 Edx {
        AVX_VNNI_INT8 = 4 "AVX VNNI, 8 bits.",
        AVX_NE_CONVERT = 5 "AVX conversions without exceptions.",
        AMX_COMPLEX = 8 "AMX complex numbers.",
        AVX_VNNI_INT16 = 10 "AVX VNNI, 16 bits.",
        PREFETCHITI = 14 "Instruction prefetch.",
        AVX10 = 19 "AVX10.",
    }
    7 . 2 Edx {
        INTEL_PSFD = 0 "SPEC_CTRL.PSFD (Intel).",
        IPRED_CTRL = 1 "SPEC_CTRL.IPRED_DIS.",
        RRSBA_CTRL = 2 "SPEC_CTRL.RRSBA_DIS.",
        DDPD_U = 3 "SPEC_CTRL.DDPD_U.",
        BHI_CTRL = 4 "SPEC_CTRL.BHI_DIS_S.",
        MCDT_NO = 5 "Data operand independent timing without MXCSR control.",
    }
    0xd . 1 Eax {
        XSAVEOPT = 0 "XSAVEOPT.",
        XSAVEC = 1 "XSAVEC and the compacted format.",
        XGETBV1 = 2 "XGETBV with ECX 1.",
        XSAVES = 3 "XSAVES and XSS.",
        XFD = 4 "Extended feature disable.",
    }
    0x4000_0001 . 0 Eax {
        KVM_CLOCKSOURCE = 0 "kvmclock at the first MSR numbers.",
        KVM_NOP_IO_DELAY = 1 "No I/O delay needed.",
        // Bit 2 was KVM_FEATURE_MMU_OP, which is gone.
        KVM_CLOCKSOURCE2 = 3 "kvmclock at the present MSR numbers.",
        KVM_ASYNC_PF = 4 "Asynchronous page faults.",
        KVM_STEAL_TIME = 5 "Steal time.",
        KVM_PV_EOI = 6 "Paravirtual end of interrupt.",
        KVM_PV_UNHALT = 7 "Kick of a halted vCPU (spin locks).",
        KVM_PV_TLB_FLUSH = 9 "Paravirtual TLB flush.",
        KVM_ASYNC_PF_VMEXIT = 10 "Asynchronous page faults as L1 exits.",
        KVM_PV_SEND_IPI = 11 "Paravirtual IPIs.",
        KVM_POLL_CONTROL = 12 "Host polling control.",
        KVM_PV_SCHED_YIELD = 13 "Directed yield.",
        KVM_ASYNC_PF_INT = 14 "Asynchronous page-fault interrupt.",
        KVM_MSI_EXT_DEST_ID = 15 "Extended MSI destination.",
        KVM_HC_MAP_GPA_RANGE = 16 "Hypercall for page encryption status.",
        KVM_MIGRATION_CONTROL = 17 "Migration control.",
        KVM_LAZY_TSC_DEADLINE = 18 "Lazy TSC deadline.",
        KVM_CLOCKSOURCE_STABLE = 24 "kvmclock is monotonic across vCPUs.",
    }
    0x4000_0001 . 0 Edx {
        KVM_HINTS_REALTIME = 0 "vCPUs are never preempted for long.",
    }
    0x8000_0001 . 0 Ecx {
        LAHF_LM = 0 "LAHF and SAHF in long mode.",
        CMP_LEGACY = 1 "Legacy multi-processing.",
        SVM = 2 "SVM.",
        EXTAPIC = 3 "Extended APIC space.",
        CR8_LEGACY = 4 "LOCK MOV CR0 is MOV CR8.",
        ABM = 5 "LZCNT.",
        SSE4A = 6 "SSE4A.",
        MISALIGNSSE = 7 "Misaligned SSE.",
        PREFETCHW = 8 "PREFETCHW.",
        OSVW = 9 "OS-visible workarounds.",
        IBS = 10 "Instruction-based sampling.",
        XOP = 11 "XOP.",
        SKINIT = 12 "SKINIT.",
        WDT = 13 "Watchdog timer.",
        FMA4 = 16 "FMA4.",
        TCE = 17 "Translation-cache extension.",
        TBM = 21 "Trailing bit manipulation.",
        TOPOEXT = 22 "Topology leaves.",
        PERFCTR_CORE = 23 "Six core counters.",
        PERFCTR_NB = 24 "Northbridge counters.",
        PERFCTR_LLC = 28 "Last-level-cache counters.",
        MWAITX = 29 "MONITORX and MWAITX.",
    }
    0x8000_0001 . 0 Edx {
        SYSCALL = 11 "SYSCALL.",
        NX = 20 "No-execute pages.",
        MMXEXT = 22 "AMD's MMX extensions.",
        FXSR_OPT = 25 "Fast FXSAVE.",
        GBPAGES = 26 "1 GiB pages.",
        RDTSCP = 27 "RDTSCP.",
        LM = 29 "Long mode.",
        AMD_3DNOWEXT = 30 "3DNow! extensions.",
        AMD_3DNOW = 31 "3DNow!.",
    }
    0x8000_0007 . 0 Edx {
        INVARIANT_TSC = 8 "The TSC runs at one rate in every state.",
    }
    0x8000_0008 . 0 Ebx {
        CLZERO = 0 "CLZERO.",
        IRPERF = 1 "Instructions-retired counter.",
        XSAVEERPTR = 2 "FXSAVE always saves error pointers.",
        RDPRU = 4 "RDPRU.",
        WBNOINVD = 9 "WBNOINVD.",
        AMD_IBPB = 12 "PRED_CMD.IBPB (AMD).",
        AMD_IBRS = 14 "SPEC_CTRL.IBRS (AMD).",
        AMD_STIBP = 15 "SPEC_CTRL.STIBP (AMD).",
        AMD_STIBP_ALWAYS_ON = 17 "STIBP preferred always on.",
        AMD_PPIN = 23 "Protected processor inventory number.",
        AMD_SSBD = 24 "SPEC_CTRL.SSBD (AMD).",
        VIRT_SSBD = 25 "VIRT_SPEC_CTRL.",
        AMD_SSB_NO = 26 "Not vulnerable to speculative store bypass.",
        AMD_PSFD = 28 "SPEC_CTRL.PSFD (AMD).",
        BTC_NO = 29 "Not vulnerable to branch type confusion.",
        AMD_IBPB_RET = 30 "IBPB clears return predictions.",
    }
    0x8000_000a . 0 Edx {
        NPT = 0 "Nested paging.",
        LBRV = 1 "Last-branch virtualization.",
        SVM_LOCK = 2 "VM_CR can be locked.",
        NRIPS = 3 "Next RIP saved on exits.",
        TSC_SCALE = 4 "TSC_RATIO.",
        VMCB_CLEAN = 5 "VMCB clean bits.",
        FLUSH_BY_ASID = 6 "TLB flush of one ASID.",
        DECODE_ASSISTS = 7 "Decode assists.",
        PAUSE_FILTER = 10 "PAUSE filter.",
        PAUSE_THRESHOLD = 12 "PAUSE filter threshold.",
        AVIC = 13 "Virtual interrupt controller.",
        V_VMSAVE_VMLOAD = 15 "VMSAVE and VMLOAD in the guest.",
        VGIF = 16 "Virtual GIF.",
        V_SPEC_CTRL = 20 "SPEC_CTRL virtualized.",
        VNMI = 25 "NMIs virtualized.",
        SVME_ADDR_CHECK = 28 "VMRUN, VMSAVE and VMLOAD check addresses.",
    }
    0x8000_001f . 0 Eax {
        SME = 0 "Secure memory encryption.",
        SEV = 1 "Encrypted virtualization.",
        VM_PAGE_FLUSH = 2 "Page-flush MSR.",
        SEV_ES = 3 "Encrypted register state.",
        SME_COHERENT = 10 "Caches are coherent across encryption domains.",
    }
    0x8000_0021 . 0 Eax {
        NO_NESTED_DATA_BP = 0 "Nested data breakpoints are ignored.",
        WRMSR_XX_BASE_NS = 1 "WRMSR to the base registers does not serialize.",
        LFENCE_RDTSC = 2 "LFENCE always serializes.",
        NULL_SEL_CLR_BASE = 6 "A null selector clears base and limit.",
        AUTOIBRS = 8 "Automatic IBRS.",
        NO_SMM_CTL_MSR = 9 "SMM_CTL does not exist.",
        PREFETCHI = 20 "Instruction prefetch.",
        SBPB = 27 "PRED_CMD.SBPB.",
        IBPB_BRTYPE = 28 "IBPB flushes branch-type predictions.",
        SRSO_NO = 29 "Not vulnerable to speculative return-stack overflow.",
        SRSO_USER_KERNEL_NO = 30 "SRSO does not cross from user to kernel.",
    }
}

/// Vendor, as far as behaviour differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vendor {
    /// A CPU by "GenuineIntel".
    Intel,
    /// A CPU by "AuthenticAMD".
    Amd,
    /// A CPU by "HygonGenuine".
    Hygon,
    /// Centaur or Zhaoxin ("CentaurHauls", "  Shanghai  ").
    Centaur,
    /// Anything else, also no vendor at all.
    #[default]
    Other,
}

impl Vendor {
    /// Reads EBX, ECX and EDX of leaf 0.
    pub const fn from_leaf0(answer: &[u32; 4]) -> Self {
        let [_, ebx, ecx, edx] = *answer;
        // The letters come in this order of the registers (SDM vol. 2A "CPUID").
        match (ebx, edx, ecx) {
            (0x756e_6547, 0x4965_6e69, 0x6c65_746e) => Self::Intel,
            // The second is "AMDisbetter!" of early K5s, which is AMD for stock KVM, too.
            (0x6874_7541, 0x6974_6e65, 0x444d_4163) | (0x6944_4d41, 0x7465_6273, 0x2172_6574) => {
                Self::Amd
            }
            (0x6f67_7948, 0x6e65_476e, 0x656e_6975) => Self::Hygon,
            (0x746e_6543, 0x4872_7561, 0x736c_7561) | (0x6853_2020, 0x6867_6e61, 0x2020_6961) => {
                Self::Centaur
            }
            // No guess: an unknown make gets the rules that need no vendor.
            _ => Self::Other,
        }
    }

    /// Whether AMD's rules hold (AMD and Hygon).
    #[inline]
    pub const fn is_amd_like(self) -> bool {
        // Hygon's CPUs are Zen by licence, and have AMD's MSRs and SVM.
        matches!(self, Self::Amd | Self::Hygon)
    }
}

/// The family as both vendors compute it from EAX of leaf 1 (SDM vol. 2A "CPUID", APM vol. 3
/// §E.3.2).
#[inline]
pub const fn family(leaf1_eax: u32) -> u32 {
    let base = (leaf1_eax >> 8) & 0xf;
    // Only for family 15, as both manuals have it.
    if base == 0xf { base + ((leaf1_eax >> 20) & 0xff) } else { base }
}

/// The model, with the extended model where the family has one.
#[inline]
pub const fn model(leaf1_eax: u32) -> u32 {
    let base = (leaf1_eax >> 4) & 0xf;
    // As Linux has it. The manuals have an extension for families 6 and 15 alone.
    if family(leaf1_eax) >= 6 { base | ((leaf1_eax >> 12) & 0xf0) } else { base }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &[u8; 12]) -> [u32; 3] {
        let word = |i: usize| u32::from_le_bytes([text[i], text[i + 1], text[i + 2], text[i + 3]]);
        [word(0), word(4), word(8)]
    }

    #[test]
    fn no_bit_has_two_names() {
        for (i, (name, feature)) in feature::ALL.iter().enumerate() {
            let twin = feature::ALL.iter().skip(i + 1).find(|(_, other)| other == feature);
            assert!(twin.is_none(), "{name} and {twin:?}");
            assert!(feature.bit < 32);
        }
    }

    #[test]
    fn vendors_are_read_from_their_twelve_letters() {
        let answer = |text| {
            let [ebx, edx, ecx] = words(text);
            [0, ebx, ecx, edx]
        };
        assert_eq!(Vendor::from_leaf0(&answer(b"GenuineIntel")), Vendor::Intel);
        assert_eq!(Vendor::from_leaf0(&answer(b"AuthenticAMD")), Vendor::Amd);
        assert_eq!(Vendor::from_leaf0(&answer(b"AMDisbetter!")), Vendor::Amd);
        assert_eq!(Vendor::from_leaf0(&answer(b"HygonGenuine")), Vendor::Hygon);
        assert_eq!(Vendor::from_leaf0(&answer(b"CentaurHauls")), Vendor::Centaur);
        assert_eq!(Vendor::from_leaf0(&answer(b"  Shanghai  ")), Vendor::Centaur);
        assert_eq!(Vendor::from_leaf0(&[0; 4]), Vendor::Other);
    }

    #[test]
    fn the_kvm_signature_spells_its_name() {
        assert_eq!(KVM_SIGNATURE, words(b"KVMKVMKVM\0\0\0"));
    }

    #[test]
    fn family_and_model_add_their_extensions() {
        // EPYC 7002: family 17h model 31h. Skylake-SP: family 6 model 55h.
        assert_eq!((family(0x0083_0f10), model(0x0083_0f10)), (0x17, 0x31));
        assert_eq!((family(0x0005_0654), model(0x0005_0654)), (6, 0x55));
    }
}
