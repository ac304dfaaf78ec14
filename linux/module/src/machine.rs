//! What this host can offer its guests: found out once at load, kept until unload, and how a
//! vCPU's hardware half is made here.

use cpu::{Cpu, Native};
use cpuid::{HostFacts, Supported};
use host::mitigation::{Facts, L1dFlush};
use host::{NoMemory, clock, fpu, hostcpu, once::Once, params};
use kvm_abi::bind::{Host, MakeBackend};
use kvm_abi::caps::Offer;
use kvm_abi::uapi::capability::*;
use kvm_abi::uapi::debug::GUESTDBG_VALID_MASK;
use kvm_abi::uapi::vcpu_state::{NESTED_FORMAT_SVM, NESTED_FORMAT_VMX};
use msr::{Flaws, HostMsrs, MAX_BANKS, MsrStore};
use svm::Svm;
use vcpu::Offered;
use vm::settings::quirk;
use vm::vcpus::{MAX_VCPU_ID, MAX_VCPUS};
use vm::vm::{HostLimits, Paging};
use vmx::{Vmx, mitigations};
use x86::cpuid::{Vendor, feature, leaf};
use x86::msr::{UCODE_REV, de_cfg};

use crate::chosen::Common;

static SUPPORTED: Once<Supported> = Once::new();
static MSRS: Once<HostMsrs> = Once::new();
static HOST: Once<Host> = Once::new();

/// Microcode revisions that stock KVM shows a guest whose host does not tell its own.
const UCODE_DEFAULT_AMD: u64 = 0x0100_0065;
const UCODE_DEFAULT_INTEL: u64 = 0x1_0000_0000;
/// Highest TSC frequency that KVM knows, kHz.
const MAX_TSC_KHZ: u64 = 0x7fff_ffff;
/// MCG_CAP's bank count.
const MCG_BANKS: u64 = 0xff;

/// Makes SVM control blocks.
pub struct MakeSvm;

impl MakeBackend for MakeSvm {
    type B = Svm<Native>;

    fn make() -> Result<Self::B, NoMemory> {
        Svm::new(Native, svm::percpu::features())
    }
}

/// Makes VMCSs.
pub struct MakeVmx;

impl MakeBackend for MakeVmx {
    type B = Vmx<Native>;

    fn make() -> Result<Self::B, NoMemory> {
        Vmx::new(Native, vmx::percpu::features())
    }
}

/// What was found out, once [`find_out`] has succeeded.
pub fn host() -> Option<&'static Host> {
    HOST.get()
}

/// The paravirtual features to offer, as the parameters have it.
fn pv_features() -> u32 {
    let all = HostFacts::default().pv_features;
    if params::lazy_tscdeadline() { all } else { all & !feature::KVM_LAZY_TSC_DEADLINE.mask() }
}

/// CPUID, with what the host's kernel uses of its features. Five-level paging is a guest's own
/// business.
fn used_features(leaf: u32, subleaf: u32) -> [u32; 4] {
    let answer = Native.cpuid(leaf, subleaf);
    let mut used = hostcpu::without_unused_features(leaf, subleaf, answer);
    if (leaf, subleaf) == (leaf::EXTENDED_FEATURES, 0) {
        let [_, _, ecx, _] = &mut used;
        *ecx |= answer[2] & feature::LA57.mask();
    }
    used
}

/// Finds out what this host can offer, with a backend of which `common` is known.
#[inline(never)]
pub fn find_out(common: &Common) -> Result<(), NoMemory> {
    let mut here = Native;
    let mut ask = used_features;
    let amd = Vendor::from_leaf0(&ask(leaf::VENDOR, 0)).is_amd_like();
    // Below another hypervisor MSRs that it does not know may fault.
    let bare = ask(leaf::FEATURES, 0)[2] & feature::HYPERVISOR.mask() == 0;
    let kernel = Facts::read();
    let lfence = amd && kernel.any(Facts::LFENCE_SERIALIZES);
    // Filler: the slice below ends before it.
    let mut withheld = [feature::SVM; 5];
    let mut count = 0;
    for (slot, feature) in withheld.iter_mut().zip(common.withheld.iter().flatten()) {
        *slot = *feature;
        count += 1;
    }
    let facts = HostFacts {
        xcr0: fpu::host_xcr0(),
        tdp_levels: if params::tdp() { common.tables.levels() } else { 0 },
        withheld: withheld.get(..count).unwrap_or(&[]),
        by_exits: common.by_exits.as_slice(),
        lfence_serializes: lfence,
        null_selector_clears_base: amd && !kernel.any(Facts::NULL_SELECTOR_KEEPS_BASE),
        ls_cfg_ssbd: kernel.any(Facts::LS_CFG_SSBD),
        xstate_cache: params::xstate_cache(),
        nested: common.nested,
        pv_features: pv_features(),
        ..HostFacts::default()
    };
    SUPPORTED.set(Supported::read(&mut ask, &facts).map_err(|_| NoMemory)?)?;
    let supported = SUPPORTED.get().ok_or(NoMemory)?;

    let ucode_rev = match () {
        () if bare => here.rdmsr(UCODE_REV),
        () if amd => UCODE_DEFAULT_AMD,
        () => UCODE_DEFAULT_INTEL,
    };
    MSRS.set(HostMsrs {
        amd,
        arch_capabilities: arch_capabilities(common, kernel, amd),
        ucode_rev,
        de_cfg: if lfence { de_cfg::LFENCE_SERIALIZE } else { 0 },
        spec_ctrl: common.spec_ctrl,
        tsc_aux: common.tsc_aux,
        lbr: common.lbr,
        lazy_deadline: params::lazy_tscdeadline(),
        hyperv: common.vmx.is_some(),
        vmx: common.vmx,
    })?;
    let msrs = MSRS.get().ok_or(NoMemory)?;

    let maxphyaddr = (ask(leaf::ADDRESS_SIZES, 0)[0] & 0xff) as u8;
    HOST.set(Host {
        offer: offer(common, supported, maxphyaddr, amd),
        limits: HostLimits {
            tables: common.tables,
            maxphyaddr,
            halt_poll_ns: params::halt_poll_ns(),
            paging: Paging { tdp: params::tdp(), keep_roots: params::keep_roots() },
        },
        offered: Offered { cpuid: supported, msrs },
    })
}

/// ARCH_CAPABILITIES for guests.
fn arch_capabilities(common: &Common, facts: Facts, amd: bool) -> u64 {
    let flaws = Flaws {
        meltdown: facts.any(Facts::MELTDOWN),
        ssb: facts.any(Facts::SSB),
        mds: facts.any(Facts::MDS),
        rfds: facts.any(Facts::RFDS),
        taa: facts.any(Facts::TAA),
        gds: facts.any(Facts::GDS),
        its: facts.any(Facts::ITS),
        rtm: facts.any(Facts::RTM),
        l1d_never_flushed: !amd && mitigations::mode() == L1dFlush::Never,
    };
    HostMsrs::offered_by_flaws(if amd { 0 } else { common.arch_capabilities }, flaws)
}

/// What KVM_CAP_X86_DISABLE_EXITS offers.
fn disable_exits() -> u64 {
    let always = X86_DISABLE_EXITS_HLT | X86_DISABLE_EXITS_PAUSE | X86_DISABLE_EXITS_CSTATE;
    if Facts::read().any(Facts::MWAIT) { always | X86_DISABLE_EXITS_MWAIT } else { always }
}

fn offer(common: &Common, supported: &Supported, maxphyaddr: u8, amd: bool) -> Offer {
    let tsc_khz = clock::tsc_khz();
    let max_khz = u64::from(tsc_khz).saturating_mul(common.tsc_ratio.unwrap_or(1)).min(MAX_TSC_KHZ);
    let reach: u32 = if common.tables.levels() == 5 { 57 } else { 48 };
    let xcr0 = supported.xcr0();
    Offer {
        max_vcpus: MAX_VCPUS as u32,
        max_vcpu_id: MAX_VCPU_ID,
        xsave: !xcr0.is_empty(),
        xsave_bytes: supported.layout().uabi_size(xcr0),
        xcr0: xcr0.bits(),
        tsc_scaling: common.tsc_ratio.is_some(),
        max_tsc_khz: if common.tsc_ratio.is_some() { max_khz as u32 } else { tsc_khz },
        tsc_khz,
        split_irqchip: true,
        x2apic_api: X2APIC_API_VALID_FLAGS,
        steal_time: true,
        halt_poll: true,
        mce_banks: MAX_BANKS as u32,
        mce_cap: MsrStore::supported_mcg_cap(amd) & !MCG_BANKS,
        quirks: quirk::ALL,
        disable_exits: disable_exits(),
        guest_debug: GUESTDBG_VALID_MASK,
        exception_payload: true,
        triple_fault_event: true,
        manual_dirty_log: DIRTY_LOG_MANUAL_PROTECT_ENABLE,
        tsc_offset: true,
        emulated_cpuid: true,
        nested_format: if amd { NESTED_FORMAT_SVM } else { NESTED_FORMAT_VMX },
        gpa_bits: u32::from(maxphyaddr).min(reach),
        smaller_maxphyaddr: !params::tdp(),
        hyperv: common.vmx.is_some(),
        no_smt: !Facts::read().any(Facts::SMT_POSSIBLE),
    }
}

/// Forgets it all. At unload, when no file is open any more.
pub fn forget() {
    // SAFETY: every holder of a reference is a file of ours or a command on one, and the module
    // is not unloaded while a file is open.
    unsafe {
        HOST.clear();
        MSRS.clear();
        SUPPORTED.clear();
    }
}
