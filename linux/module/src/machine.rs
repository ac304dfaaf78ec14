//! What this host can offer its guests: found out once at load, kept until unload, and how a
//! vCPU's hardware half is made here.

use cpu::{Cpu, Native};
use cpuid::{HostFacts, Supported};
use host::{NoMemory, clock, fpu, once::Once, params, smp};
use kvm_abi::bind::{Host, MakeBackend, SystemHandle};
use kvm_abi::caps::Offer;
use kvm_abi::uapi::capability::{DIRTY_LOG_MANUAL_PROTECT_ENABLE, X2APIC_API_USE_32BIT_IDS};
use kvm_abi::uapi::debug::{GUESTDBG_BLOCKIRQ, GUESTDBG_VALID_MASK};
use msr::{HostMsrs, MAX_BANKS, MsrStore};
use svm::{Features, Svm, percpu};
use vcpu::Offered;
use vm::vcpus::{MAX_VCPU_ID, MAX_VCPUS};
use vm::vm::{Format, HostLimits, Paging};
use x86::cpuid::{feature, leaf};
use x86::msr::{DE_CFG, UCODE_REV, de_cfg};

static SUPPORTED: Once<Supported> = Once::new();
static MSRS: Once<HostMsrs> = Once::new();
static HOST: Once<Host> = Once::new();

/// CR4 bit 12: the host's own tables have five levels, and so have nested ones (APM vol. 2 §15.25.3).
const CR4_LA57: u64 = 1 << 12;
/// Microcode revision that stock KVM shows an AMD guest whose host does not tell its own.
const UCODE_DEFAULT: u64 = 0x0100_0065;
/// Highest TSC frequency that KVM knows, kHz.
const MAX_TSC_KHZ: u64 = 0x7fff_ffff;
/// The TSC ratio is an 8.32 fixed-point number.
const MAX_TSC_RATIO: u64 = 0xff;
/// MCG_CAP's bank count.
const MCG_BANKS: u64 = 0xff;

/// Makes SVM control blocks.
pub struct MakeSvm;

impl MakeBackend for MakeSvm {
    type B = Svm<Native>;

    fn make() -> Result<Self::B, NoMemory> {
        Svm::new(Native, percpu::features())
    }
}

/// The device, once [`find_out`] has succeeded.
pub fn device() -> Option<SystemHandle<MakeSvm>> {
    HOST.get().map(SystemHandle::new)
}

/// The paravirtual features to offer, as the parameters have it.
fn pv_features() -> u32 {
    let all = HostFacts::default().pv_features;
    if params::lazy_tscdeadline() { all } else { all & !feature::KVM_LAZY_TSC_DEADLINE.mask() }
}

/// Finds out what this host can offer.
pub fn find_out(features: &Features) -> Result<(), NoMemory> {
    let mut here = Native;
    let host_cr4 = here.cr4();
    let mut ask = |leaf, subleaf| Native.cpuid(leaf, subleaf);
    // Below another hypervisor MSRs that it does not know may fault.
    let bare = ask(leaf::FEATURES, 0)[2] & feature::HYPERVISOR.mask() == 0;
    let lfence = bare && here.rdmsr(DE_CFG) & de_cfg::LFENCE_SERIALIZE != 0;
    let levels = if host_cr4 & CR4_LA57 != 0 { 5 } else { 4 };
    let facts = HostFacts {
        xcr0: fpu::host_xcr0(),
        nested_levels: if params::npt() { levels } else { 0 },
        // Shadow tables hold no keys.
        withheld: if params::npt() { &[] } else { &[feature::PKU] },
        lfence_serializes: lfence,
        xstate_cache: params::xstate_cache(),
        pv_features: pv_features(),
        ..HostFacts::default()
    };
    SUPPORTED.set(Supported::read(&mut ask, &facts).map_err(|_| NoMemory)?)?;
    let supported = SUPPORTED.get().ok_or(NoMemory)?;

    let ssb_no = ask(leaf::ADDRESS_SIZES, 0)[1] & (1 << 26) != 0;
    MSRS.set(HostMsrs {
        amd: supported.vendor().is_amd_like(),
        arch_capabilities: HostMsrs::offered_arch_capabilities(0, false, !ssb_no, false),
        ucode_rev: if bare { here.rdmsr(UCODE_REV) } else { UCODE_DEFAULT },
        de_cfg: if lfence { de_cfg::LFENCE_SERIALIZE } else { 0 },
        spec_ctrl: features.spec_ctrl,
        tsc_aux: features.rdtscp,
        lazy_deadline: params::lazy_tscdeadline(),
    })?;
    let msrs = MSRS.get().ok_or(NoMemory)?;

    let maxphyaddr = (ask(leaf::ADDRESS_SIZES, 0)[0] & 0xff) as u8;
    HOST.set(Host {
        offer: offer(features, supported, levels, maxphyaddr),
        limits: HostLimits {
            tables: Format::npt(levels, 0),
            maxphyaddr,
            halt_poll_ns: params::halt_poll_ns(),
            paging: Paging { nested: params::npt(), keep_roots: params::keep_roots() },
        },
        offered: Offered { cpuid: supported, msrs },
    })
}

fn offer(features: &Features, supported: &Supported, levels: u8, maxphyaddr: u8) -> Offer {
    let tsc_khz = clock::tsc_khz();
    let max_khz = u64::from(tsc_khz).saturating_mul(MAX_TSC_RATIO).min(MAX_TSC_KHZ);
    let reach: u32 = if levels == 5 { 57 } else { 48 };
    let xcr0 = supported.xcr0();
    Offer {
        online_cpus: smp::max_cpus() as u32,
        max_vcpus: MAX_VCPUS as u32,
        max_vcpu_id: MAX_VCPU_ID,
        xsave: !xcr0.is_empty(),
        xsave_bytes: supported.layout().uabi_size(xcr0),
        xcr0: xcr0.bits(),
        tsc_scaling: features.tsc_ratio,
        max_tsc_khz: if features.tsc_ratio { max_khz as u32 } else { tsc_khz },
        tsc_khz,
        // Ends of level-triggered interrupts are not reported to a VMM with an I/O APIC of its own.
        split_irqchip: false,
        x2apic_api: X2APIC_API_USE_32BIT_IDS,
        steal_time: true,
        halt_poll: true,
        mce_banks: MAX_BANKS as u32,
        mce_cap: MsrStore::supported_mcg_cap() & !MCG_BANKS,
        quirks: 0,
        disable_exits: 0,
        guest_debug: GUESTDBG_VALID_MASK & !GUESTDBG_BLOCKIRQ,
        exception_payload: true,
        triple_fault_event: true,
        msr_platform_info: false,
        manual_dirty_log: DIRTY_LOG_MANUAL_PROTECT_ENABLE,
        tsc_offset: true,
        emulated_cpuid: true,
        gpa_bits: u32::from(maxphyaddr).min(reach),
        smaller_maxphyaddr: !params::npt(),
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
