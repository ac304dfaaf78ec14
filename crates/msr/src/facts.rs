//! What MSR rules ask about the guest and the host, reduced to a few bits when CPUID is set, so
//! that no MSR exit searches a CPUID table.

use x86::cpuid::{Feature, Vendor, feature};
use x86::msr::{VMX_BASIC, VMX_VMFUNC, arch_capabilities, pred_cmd, spec_ctrl};

/// The guest's CPUID, as far as MSRs ask. Sixteen bytes; passed by reference or by value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestFacts {
    /// SPEC_CTRL bits that the guest may set: offered to it, and known to the host's CPU.
    pub spec_ctrl: u16,
    /// SPEC_CTRL bits that the host's CPU knows; a VMM may set them.
    pub host_spec_ctrl: u16,
    /// PRED_CMD bits that the guest may write.
    pub pred_cmd: u8,
    /// PRED_CMD bits that the host's CPU knows.
    pub host_pred_cmd: u8,
    /// Bits of a guest-physical address.
    pub maxphyaddr: u8,
    /// The guest sees an AMD or Hygon CPU.
    pub amd: bool,
    /// FLUSH_CMD exists: offered, and the host's CPU has it.
    pub flush_l1d: bool,
    /// FLUSH_CMD exists on the host's CPU.
    pub host_flush_l1d: bool,
    /// The MSR TSC_ADJUST exists.
    pub tsc_adjust: bool,
    /// The MSR ARCH_CAPABILITIES exists.
    pub arch_capabilities: bool,
    /// The MSR PERF_CAPABILITIES exists.
    pub pdcm: bool,
    /// OSVW_ID_LENGTH and OSVW_STATUS exist.
    pub osvw: bool,
    /// The MSR VIRT_SPEC_CTRL exists.
    pub virt_ssbd: bool,
    /// SSE3, without which MISC_ENABLE's MONITOR bit must not change.
    pub sse3: bool,
    /// The MSRs of VMX exist.
    pub vmx: bool,
    /// The MSR TSC_RATIO exists.
    pub tsc_ratio: bool,
}

impl GuestFacts {
    /// Derives the facts. `guest` and `host` tell whether a feature is offered to the guest, and
    /// whether the host can give it.
    pub fn derive(
        guest: impl Fn(Feature) -> bool,
        host: impl Fn(Feature) -> bool,
        vendor: Vendor,
        maxphyaddr: u8,
    ) -> Self {
        let host_spec_ctrl = spec_ctrl_bits(&host);
        let host_pred_cmd = pred_cmd_bits(&host);
        let host_flush_l1d = host(feature::FLUSH_L1D);
        Self {
            // Both: a bit that the host's CPU does not know would be #GP in the host.
            spec_ctrl: spec_ctrl_bits(&guest) & host_spec_ctrl,
            host_spec_ctrl,
            pred_cmd: pred_cmd_bits(&guest) & host_pred_cmd,
            host_pred_cmd,
            maxphyaddr,
            amd: vendor.is_amd_like(),
            flush_l1d: guest(feature::FLUSH_L1D) && host_flush_l1d,
            host_flush_l1d,
            tsc_adjust: guest(feature::TSC_ADJUST),
            arch_capabilities: guest(feature::ARCH_CAPABILITIES),
            pdcm: guest(feature::PDCM),
            osvw: guest(feature::OSVW),
            virt_ssbd: guest(feature::VIRT_SSBD),
            sse3: guest(feature::SSE3),
            vmx: guest(feature::VMX),
            // L2's ratio is composed with ours, which takes hardware that scales.
            tsc_ratio: guest(feature::SVM) && guest(feature::TSC_SCALE) && host(feature::TSC_SCALE),
        }
    }
}

fn spec_ctrl_bits(has: &impl Fn(Feature) -> bool) -> u16 {
    let any = |features: &[Feature]| features.iter().any(|feature| has(*feature));
    let mut bits = 0;
    if any(&[feature::SPEC_CTRL, feature::AMD_IBRS]) {
        // STIBP may be set wherever IBRS may; without STIBP it does nothing (SDM vol. 4,
        // IA32_SPEC_CTRL).
        bits |= spec_ctrl::IBRS | spec_ctrl::STIBP;
    }
    // Either vendor's bit: a guest of one make may run on the other's CPU.
    if any(&[feature::INTEL_STIBP, feature::AMD_STIBP]) {
        bits |= spec_ctrl::STIBP;
    }
    if any(&[feature::SPEC_CTRL_SSBD, feature::AMD_SSBD]) {
        bits |= spec_ctrl::SSBD;
    }
    if any(&[feature::AMD_PSFD, feature::INTEL_PSFD]) {
        bits |= spec_ctrl::PSFD;
    }
    if has(feature::IPRED_CTRL) {
        // For user mode and, one bit above, for the supervisor: the feature brings both.
        bits |= spec_ctrl::IPRED_DIS_U | spec_ctrl::IPRED_DIS_U << 1;
    }
    if has(feature::RRSBA_CTRL) {
        // The supervisor's bit has the user's below it.
        bits |= spec_ctrl::RRSBA_DIS_S | spec_ctrl::RRSBA_DIS_S >> 1;
    }
    if has(feature::BHI_CTRL) {
        bits |= spec_ctrl::BHI_DIS_S;
    }
    bits as u16
}

fn pred_cmd_bits(has: &impl Fn(Feature) -> bool) -> u8 {
    let mut bits = 0;
    // Intel's one bit stands for both MSRs (SDM vol. 2A "CPUID", leaf 7 EDX bit 26).
    if has(feature::SPEC_CTRL) || has(feature::AMD_IBPB) {
        bits |= pred_cmd::IBPB;
    }
    if has(feature::SBPB) {
        bits |= pred_cmd::SBPB;
    }
    bits as u8
}

/// The host's MSRs that guests see something of. Made at load; also what KVM_GET_MSRS on /dev/kvm
/// answers from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMsrs {
    /// AMD or Hygon.
    pub amd: bool,
    /// ARCH_CAPABILITIES for guests, see [`HostMsrs::offered_by_flaws`].
    pub arch_capabilities: u64,
    /// The host's own UCODE_REV.
    pub ucode_rev: u64,
    /// DE_CFG bits that hold on this host: bit 1 when LFENCE serializes, else 0.
    pub de_cfg: u64,
    /// The CPU has SPEC_CTRL.
    pub spec_ctrl: bool,
    /// The CPU has TSC_AUX.
    pub tsc_aux: bool,
    /// The CPU virtualizes the records of branches.
    pub lbr: bool,
    /// The lazy TSC deadline is offered to guests.
    pub lazy_deadline: bool,
    /// Guests may use Hyper-V's interface, as far as an enlightened VMCS needs it.
    pub hyperv: bool,
    /// VMX_BASIC to VMX_VMFUNC as guests are offered them, where they may be hypervisors on an Intel CPU.
    pub vmx: Option<[u64; VMX_COUNT]>,
}

/// How many VMX capability MSRs there are, from VMX_BASIC on.
// From the numbers of the first and the last, so that it cannot differ from the range.
pub const VMX_COUNT: usize = (VMX_VMFUNC - VMX_BASIC + 1) as usize;

/// What the host's CPU is vulnerable to, by the kernel's judgement, as far as ARCH_CAPABILITIES
/// tells guests of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Flaws {
    pub meltdown: bool,
    pub ssb: bool,
    pub mds: bool,
    pub rfds: bool,
    pub taa: bool,
    pub gds: bool,
    pub its: bool,
    /// Transactional memory is there.
    pub rtm: bool,
    /// `vmentry_l1d_flush=never` on a CPU with L1TF.
    pub l1d_never_flushed: bool,
}

// TSX_CTRL is missing because that MSR is not offered; bits that nobody here knows are missing
// because nobody knows what they promise.
/// ARCH_CAPABILITIES bits that a guest sees as the host's CPU has them.
const PASSED: u64 = {
    use arch_capabilities as cap;
    cap::RDCL_NO
        | cap::IBRS_ALL
        | cap::RSBA
        | cap::SKIP_L1DFL_VMENTRY
        | cap::SSB_NO
        | cap::MDS_NO
        | cap::PSCHANGE_MC_NO
        | cap::TAA_NO
        | cap::SBDR_SSDP_NO
        | cap::FBSDP_NO
        | cap::PSDP_NO
        | cap::FB_CLEAR
        | cap::RRSBA
        | cap::BHI_NO
        | cap::PBRSB_NO
        | cap::GDS_NO
        | cap::RFDS_NO
        | cap::RFDS_CLEAR
        | cap::ITS_NO
};

impl HostMsrs {
    /// ARCH_CAPABILITIES to offer on a host whose own value is `host` (0 where it has none, as on AMD).
    /// Page-size changes cannot stop the machine (this hypervisor sees to it), and where it flushes
    /// the L1 data cache a hypervisor in the guest need not.
    pub const fn offered_by_flaws(host: u64, flaws: Flaws) -> u64 {
        use arch_capabilities as cap;
        let mut value = host & PASSED | cap::PSCHANGE_MC_NO;
        // With the flush switched off a guest's own hypervisor is the only one left to make it.
        if !flaws.l1d_never_flushed {
            value |= cap::SKIP_L1DFL_VMENTRY;
        }
        // The kernel's judgement adds to the CPU's bits: it knows models that are not vulnerable
        // and do not say so. Stock KVM does the same.
        if !flaws.meltdown {
            value |= cap::RDCL_NO;
        }
        if !flaws.ssb {
            value |= cap::SSB_NO;
        }
        if !flaws.mds {
            value |= cap::MDS_NO;
        }
        if !flaws.rfds {
            value |= cap::RFDS_NO;
        }
        if !flaws.its {
            value |= cap::ITS_NO;
        }
        // Without TSX a guest has nothing to abort, but must not conclude that VERW is not needed.
        if !flaws.rtm {
            value &= !cap::TAA_NO;
        } else if !flaws.taa {
            value |= cap::TAA_NO;
        }
        if !flaws.gds {
            value |= cap::GDS_NO;
        }
        value
    }
}
