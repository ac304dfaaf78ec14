//! Which of the two backends this host has: chosen once at load, looked at where CPUs come and go
//! and where `/dev/kvm` itself is called. A VM's files carry their backend in their type, so nothing
//! is chosen on a vCPU's way.

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

use cpu::{Cpu, Native};
use host::mitigation::{Facts, NxHugePages};
use host::{NoMemory, err, hostcpu, info, params, params::Use, smp, warn};
use mmu::{EptSupport, Format};
use svm::HostState;
use vmx::mitigations;
use x86::Cr4;
use x86::cpuid::{Feature, Vendor, feature, leaf};
use x86::msr::ARCH_CAPABILITIES;

const EBUSY: i32 = -16;
const EOPNOTSUPP: i32 = -95;
/// The TSC ratio is an 8.32 fixed-point number under SVM, a 16.48 one under VMX.
const SVM_TSC_RATIO: u64 = 0xff;
const VMX_TSC_RATIO: u64 = 0xffff;

/// A backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Chosen {
    None = 0,
    Svm = 1,
    Vmx = 2,
}

static CHOSEN: AtomicU8 = AtomicU8::new(Chosen::None as u8);

/// The backend that [`find`] has found.
#[inline]
pub fn chosen() -> Chosen {
    match CHOSEN.load(Relaxed) {
        1 => Chosen::Svm,
        2 => Chosen::Vmx,
        _ => Chosen::None,
    }
}

/// What the floors above want to know of it, whichever it is.
#[derive(Clone, Copy, Debug)]
pub struct Common {
    /// What TDP tables are made for.
    pub tables: Format,
    /// The largest integer part of a TSC ratio, where the CPU scales.
    pub tsc_ratio: Option<u64>,
    /// SPEC_CTRL exists.
    pub spec_ctrl: bool,
    /// TSC_AUX exists.
    pub tsc_aux: bool,
    /// Guests have records of branches.
    pub lbr: bool,
    /// ARCH_CAPABILITIES of the CPU, or 0.
    pub arch_capabilities: u64,
    /// Features that cannot be given to guests.
    pub withheld: [Option<Feature>; 5],
    /// A feature that guests have by exits, whether the CPU has it or not.
    pub by_exits: Option<Feature>,
    /// Guests may be hypervisors.
    pub nested: bool,
    /// The VMX capability MSRs that these see.
    pub vmx: Option<[u64; msr::VMX_COUNT]>,
}

/// A refusal that was logged; what the module's load returns.
pub struct Refused(pub i32);

fn refuse(reason: &str, in_use: bool) -> Refused {
    err!("cannot be used on CPU {}: {reason}", smp::cpu_id());
    Refused(if in_use { EBUSY } else { EOPNOTSUPP })
}

fn svm_refused(why: svm::Unusable) -> Refused {
    refuse(why.reason(), why == svm::Unusable::InUse)
}

fn vmx_refused(why: vmx::Unusable) -> Refused {
    refuse(why.reason(), why == vmx::Unusable::InUse)
}

/// The features of the chosen backend.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    Svm(svm::Features),
    Vmx(vmx::Features),
}

/// Finds out which backend this CPU has and whether it can be used.
pub fn find() -> Result<Found, Refused> {
    let vendor = Vendor::from_leaf0(&Native.cpuid(leaf::VENDOR, 0));
    if vendor.is_amd_like() { find_svm().map(Found::Svm) } else { find_vmx().map(Found::Vmx) }
}

#[inline(never)]
fn find_svm() -> Result<svm::Features, Refused> {
    let mut here = Native;
    let host_cr4 = here.cr4();
    // The kernel takes away features that its CPUs have in name only. CR4 is another matter: what the CPU takes counts there.
    let cpuid = |leaf, subleaf| {
        let answer = Native.cpuid(leaf, subleaf);
        let is_svms = matches!(leaf, leaf::ADDRESS_SIZES | leaf::SVM);
        if is_svms { hostcpu::without_unused_features(leaf, subleaf, answer) } else { answer }
    };
    if !params::ept() {
        return Err(refuse("ept=0 is for Intel CPUs: on this one shadow paging is npt=0", false));
    }
    let mut features = svm::Features::read(cpuid, host_cr4).map_err(svm_refused)?;
    params::enable_apicv(false);
    params::enable_shadow_vmcs(false);
    if params::host_state_by_msr() {
        features.host_state = HostState::Msr;
    }
    // VM_CR exists wherever CPUID reports SVM. Looked at on this CPU before anything is allocated.
    svm::percpu::check(&mut here).map_err(svm_refused)?;
    Ok(features)
}

#[inline(never)]
fn find_vmx() -> Result<vmx::Features, Refused> {
    let mut here = Native;
    let host_cr4 = here.cr4();
    let cpuid = |leaf, subleaf| Native.cpuid(leaf, subleaf);
    // FEATURE_CONTROL exists wherever CPUID reports VMX.
    if cpuid(leaf::FEATURES, 0)[2] & feature::VMX.mask() == 0 {
        return Err(vmx_refused(vmx::Unusable::Absent));
    }
    vmx::percpu::check(&mut here, hostcpu::vmx_allowed()).map_err(vmx_refused)?;
    let used =
        |leaf, subleaf| hostcpu::without_unused_features(leaf, subleaf, cpuid(leaf, subleaf));
    let features = vmx::Features::read(|index| Native.rdmsr(index), used, host_cr4, params::ept());
    if !params::npt() {
        return Err(refuse("npt=0 is for AMD CPUs: on this one shadow paging is ept=0", false));
    }
    let mut features = features.map_err(vmx_refused)?;
    // What L2's tables would be shadowed by is not there without TDP.
    features.nested = params::nested(features.ept);
    features.shadow_vmcs = params::enable_shadow_vmcs(features.nested && features.shadow_vmcs);
    features.apicv = params::enable_apicv(features.apicv);
    if !params::preemption_timer() {
        features = features.without_preemption_timer();
    }
    Ok(features)
}

impl Found {
    /// Allocates what every CPU needs, and makes the choice known.
    #[inline(never)]
    pub fn set_up(&self) -> Result<(), NoMemory> {
        match self {
            Self::Svm(features) => {
                svm::percpu::set_up(*features, smp::max_cpus())?;
                // Only now: who finds the backend needs its per-CPU state.
                CHOSEN.store(Chosen::Svm as u8, Relaxed);
            }
            Self::Vmx(features) => {
                vmx::percpu::set_up(*features, smp::max_cpus())?;
                CHOSEN.store(Chosen::Vmx as u8, Relaxed);
                let facts = Facts::read();
                mitigations::set_up(facts, arch_capabilities(facts))?;
            }
        }
        host::mitigation::announce_nx_huge_pages(splits_at_fetch());
        Ok(())
    }

    /// What the floors above want to know.
    #[inline(never)]
    pub fn common(&self) -> Common {
        // Shadow tables hold no keys.
        let keys = if params::tdp() { None } else { Some(feature::PKU) };
        match self {
            Self::Svm(features) => {
                // The host's own tables have five levels, and so have SVM's TDP ones (APM vol. 2 §15.25.3).
                let levels = if Native.cr4().contains(Cr4::LA57) { 5 } else { 4 };
                Common {
                    tables: with_large_pages(Format::npt(levels, 0)),
                    tsc_ratio: features.tsc_ratio.then_some(SVM_TSC_RATIO),
                    spec_ctrl: features.spec_ctrl,
                    tsc_aux: features.rdtscp,
                    lbr: features.lbr,
                    arch_capabilities: 0,
                    withheld: [keys, None, None, None, None],
                    by_exits: None,
                    // What L2's tables are shadowed by is not there without TDP.
                    nested: params::nested(params::tdp()),
                    vmx: None,
                }
            }
            Self::Vmx(features) => {
                let facts = Facts::read();
                let unless = |there: bool, what| if there { None } else { Some(what) };
                Common {
                    tables: with_large_pages(vmx_tables(features)),
                    tsc_ratio: features.tsc_scaling.then_some(VMX_TSC_RATIO),
                    spec_ctrl: features.spec_ctrl,
                    tsc_aux: features.rdtscp,
                    lbr: false,
                    arch_capabilities: arch_capabilities(facts),
                    withheld: [
                        keys,
                        unless(features.rdtscp, feature::RDTSCP),
                        unless(features.rdtscp, feature::RDPID),
                        unless(features.invpcid, feature::INVPCID),
                        unless(features.xsaves, feature::XSAVES),
                    ],
                    by_exits: features.umip_by_exits.then_some(feature::UMIP),
                    nested: features.nested,
                    vmx: features.nested.then(|| features.nested_capabilities()),
                }
            }
        }
    }

    /// Says in the log what was found.
    #[inline(never)]
    pub fn announce(&self) {
        if !matches!(self, Self::Vmx(features) if features.preemption_timer.is_some()) {
            params::no_preemption_timer();
        }
        self.show_uses();
        let tables = if params::tdp() { "TDP" } else { "shadow paging" };
        match self {
            Self::Svm(features) => {
                info!("SVM with {tables}, {} address-space ids", features.asids);
            }
            Self::Vmx(features) => {
                info!("VMX with {tables}: {features}");
                let l1d = mitigations::mode_name(mitigations::mode());
                info!("mitigations: L1D flush {l1d}; {}", mitigations::Report::now().short());
            }
        }
    }
}

impl Found {
    /// What the parameters of stock KVM's tell of it.
    #[inline(never)]
    fn show_uses(&self) {
        match self {
            Self::Svm(f) => params::uses(&[
                (Use::Lbr, f.lbr),
                (Use::NripSave, f.nrip_save),
                // Of guests that are hypervisors.
                (Use::VirtualVmload, f.v_vmload && params::nested(params::tdp())),
                (Use::VirtualNmi, f.vnmi),
                (Use::TscScaling, f.tsc_ratio),
            ]),
            Self::Vmx(f) => params::uses(&[
                (Use::Pml, f.ept && f.pml),
                (Use::Vpid, f.vpid),
                (Use::EptDirty, f.ept && f.ept_dirty),
            ]),
        }
    }
}

/// With shadow paging no CPU walks the VM's own tables, and they are of the ordinary format.
fn vmx_tables(features: &vmx::Features) -> Format {
    if !features.ept {
        return Format::npt(4, 0);
    }
    Format::ept(EptSupport {
        pages_2m: features.ept_2m,
        pages_1g: features.ept_1g,
        accessed_dirty: features.ept_dirty,
        page_log: features.pml,
    })
}

fn splits_at_fetch() -> bool {
    mitigations::splits_at_fetch(Facts::read(), NxHugePages::asked())
}

/// TDP tables as `nx_huge_pages` wants them. Shadow tables do not know of fetches from pages of the
/// host's: no page is large for them.
fn with_large_pages(tables: Format) -> Format {
    match (splits_at_fetch(), params::tdp()) {
        (false, _) => tables,
        (true, true) => tables.splitting_at_fetch(),
        (true, false) => tables.small(),
    }
}

/// ARCH_CAPABILITIES of the CPU, or 0.
fn arch_capabilities(facts: Facts) -> u64 {
    if facts.any(Facts::ARCH_CAPABILITIES) { Native.rdmsr(ARCH_CAPABILITIES) } else { 0 }
}

/// Switches virtualization on, on the CPU itself.
pub fn enable() -> Result<(), Refused> {
    let cpu = smp::cpu_id();
    let done = match chosen() {
        Chosen::Svm => svm::percpu::enable(&mut Native, cpu).map_err(svm_refused),
        Chosen::Vmx => vmx::percpu::enable(&mut Native, cpu).map_err(vmx_refused),
        Chosen::None => Err(Refused(EOPNOTSUPP)),
    };
    if done.is_err() {
        warn!("virtualization stays off on CPU {cpu}");
    }
    done
}

/// Switches it off, on the CPU itself; harmless where it is off. NMI context at a crash.
pub fn disable() {
    match chosen() {
        Chosen::Svm => svm::percpu::disable(&mut Native),
        Chosen::Vmx => vmx::percpu::disable(&mut Native, smp::cpu_id()),
        Chosen::None => {}
    }
}

/// This CPU is about to run user space. Only VMX leaves something of a guest's until then.
pub fn user_return() {
    if chosen() == Chosen::Vmx {
        vmx::percpu::user_return(&mut Native, smp::cpu_id());
    }
}

/// The parameter `vmentry_l1d_flush` was written.
pub fn l1d_flush_changed() -> Result<(), NoMemory> {
    if chosen() != Chosen::Vmx {
        return Ok(());
    }
    let facts = Facts::read();
    mitigations::set_up(facts, arch_capabilities(facts))
}

/// At unload, after it is off on every CPU.
pub fn forget() {
    // First: nobody is to find a backend whose per-CPU state goes.
    CHOSEN.store(Chosen::None as u8, Relaxed);
    svm::percpu::tear_down();
    vmx::percpu::tear_down();
    host::mitigation::forget();
}
