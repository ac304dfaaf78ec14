//! What KVM_GET_SUPPORTED_CPUID answers: the host's CPUID, leaf by leaf, cut down to what this
//! hypervisor virtualizes (KVM API §4.46).
//!
//! Made once at load, on one CPU; a table made on a hybrid or asymmetric host would differ, which
//! KVM does not support either.

use crate::derived::{cr4_bits, efer_bits};
use crate::masks::{
    FORCED, NEEDS_AVX, NEEDS_AVX512, NEEDS_XSAVE, NESTED_SVM, PASSED, PV_FEATURES, REPEATED_1_EDX,
};
use crate::{Entry, Error, FeatureWords, MAX_ENTRIES};
use alloc::vec::Vec;
use x86::cpuid::{Feature, KVM_SIGNATURE, Reg, Vendor, feature, leaf};
use x86::{Cr4, Efer, Xcr0};
use xstate::{Form, Layout};

/// Instructions that are emulated although the host lacks them (KVM_GET_EMULATED_CPUID): none. The
/// leaves that would name them are there, as in stock KVM, for a VMM that looks a bit up in them.
pub const EMULATED: &[Entry] =
    &[Entry::new(0, 0, [7, 0, 0, 0]), Entry::new(1, 0, [0; 4]), Entry::new(7, 0, [0; 4])];

/// Highest basic leaf that is described.
// As far as stock KVM goes: what is behind brings state that nobody here keeps.
const LAST_BASIC: u32 = 0x1f;
/// Highest extended leaf that is described.
const LAST_EXTENDED: u32 = 0x8000_0022;
/// Subleaves of the cache leaves at most; the hardware says which is the last.
const CACHES: u32 = 32;

/// What the table depends on beyond the host's CPUID.
#[derive(Clone, Copy, Debug)]
pub struct HostFacts<'a> {
    /// XCR0 as the host's kernel set it; 0 without XSAVE.
    pub xcr0: u64,
    /// Supervisor components that the backend can hold for a guest; 0 as in stock KVM on AMD.
    pub xss: u64,
    /// Levels of the TDP tables, 4 or 5: four reach 48 bits of guest-physical address. 0 without
    /// TDP: what is told of its reach is then 0.
    pub tdp_levels: u8,
    /// LFENCE serializes on this host (DE_CFG bit 1, or the CPUID bit).
    pub lfence_serializes: bool,
    /// A load of a null selector clears the base, whether CPUID says so or not.
    pub null_selector_clears_base: bool,
    /// The kernel can switch off speculative store bypass by a register of the model's own (AMD).
    pub ls_cfg_ssbd: bool,
    /// Features that the backend cannot honour or that the host's kernel switched off.
    pub withheld: &'a [Feature],
    /// Features that the backend gives to guests by exits, whether the host has them or not.
    pub by_exits: &'a [Feature],
    /// Paravirtual features to offer, a subset of [`PV_FEATURES`].
    pub pv_features: u32,
    /// Guests' sizes in leaf 0xD come from the table that was read at load. `false`: from CPUID,
    /// executed anew for each component whenever an input changes (to measure against).
    pub xstate_cache: bool,
    /// Guests may be hypervisors.
    pub nested: bool,
}

impl Default for HostFacts<'_> {
    fn default() -> Self {
        Self {
            xcr0: 0,
            xss: 0,
            tdp_levels: 4,
            lfence_serializes: false,
            null_selector_clears_base: false,
            ls_cfg_ssbd: false,
            withheld: &[],
            by_exits: &[],
            pv_features: PV_FEATURES,
            xstate_cache: true,
            nested: false,
        }
    }
}

/// What this host can offer to guests.
#[derive(Clone, Debug, Default)]
pub struct Supported {
    uncached: bool,
    entries: Vec<Entry>,
    words: FeatureWords,
    layout: Layout,
    xcr0: Xcr0,
    xss: u64,
    vendor: Vendor,
}

impl Supported {
    /// Reads the host's CPUID with `cpuid(leaf, subleaf)` and cuts it down.
    pub fn read(
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
        facts: &HostFacts<'_>,
    ) -> Result<Self, Error> {
        Self::read_by(&mut cpuid, facts)
    }

    /// Of no type of its caller's: it is compiled with this crate, for size. Kept apart: its frame is most of a kilobyte.
    #[inline(never)]
    fn read_by(
        mut cpuid: &mut dyn FnMut(u32, u32) -> [u32; 4],
        facts: &HostFacts<'_>,
    ) -> Result<Self, Error> {
        let vendor = Vendor::from_leaf0(&cpuid(leaf::VENDOR, 0));
        // First, since a CPU answers beyond its last leaf, too.
        let bounds = Bounds::read(&mut cpuid);
        let mut host = FeatureWords::read(|leaf, subleaf| bounds.ask(&mut cpuid, leaf, subleaf));
        // A CPU may have XSAVE while its kernel does not use it (noxsave). Then nobody keeps the
        // components.
        let uses_xsave = facts.xcr0 != 0 && host.has(feature::XSAVE);
        let xcr0 = if uses_xsave { xstate::supported_xcr0(facts.xcr0) } else { Xcr0::empty() };
        let layout = if uses_xsave { Layout::read(&mut cpuid) } else { Layout::EMPTY };
        if facts.lfence_serializes {
            host.add(feature::LFENCE_RDTSC);
        }
        if facts.null_selector_clears_base {
            host.add(feature::NULL_SEL_CLR_BASE);
        }
        let mut words = offered(&host, xcr0, facts);
        let ssbd = facts.ls_cfg_ssbd || host.has(feature::AMD_SSBD);
        // Not the host's bit: it is a hypervisor's offer to its guests, and we are that hypervisor.
        words.set(feature::VIRT_SSBD, vendor.is_amd_like() && ssbd);
        // Without XSAVES a guest could not save supervisor components.
        let xss = if words.has(feature::XSAVES) { facts.xss } else { 0 };
        let uncached = !facts.xstate_cache;
        let mut table = Self { uncached, entries: Vec::new(), words, layout, xcr0, xss, vendor };
        table.entries.try_reserve(64).map_err(|_| Error::NoMemory)?;
        table.fill(&bounds, cpuid, facts)?;
        Ok(table)
    }

    /// The answer to KVM_GET_SUPPORTED_CPUID.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The features that may be offered.
    pub fn words(&self) -> &FeatureWords {
        &self.words
    }

    /// Whether `feature` may be offered.
    #[inline]
    pub fn has(&self, feature: Feature) -> bool {
        self.words.has(feature)
    }

    /// The XSAVE layout of this host.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether sizes of the XSAVE area are computed with CPUID and not from [`Self::layout`].
    pub fn is_uncached(&self) -> bool {
        self.uncached
    }

    /// Components that a guest's XCR0 may hold.
    pub fn xcr0(&self) -> Xcr0 {
        self.xcr0
    }

    /// Components that a guest's XSS may hold.
    pub fn xss(&self) -> u64 {
        self.xss
    }

    /// The host's vendor.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// CR4 bits that the host can give a guest.
    pub fn cr4(&self) -> Cr4 {
        cr4_bits(&self.words)
    }

    /// EFER bits that the host can give a guest.
    pub fn efer(&self) -> Efer {
        efer_bits(&self.words)
    }

    fn push(&mut self, leaf: u32, index: u32, answer: [u32; 4]) -> Result<(), Error> {
        if self.entries.len() >= MAX_ENTRIES {
            return Err(Error::TooMany);
        }
        self.entries.try_reserve(1).map_err(|_| Error::NoMemory)?;
        self.entries.push(Entry::new(leaf, index, answer));
        Ok(())
    }

    fn word(&self, leaf: u32, subleaf: u32, reg: Reg) -> u32 {
        self.words.word(leaf, subleaf, reg)
    }

    #[inline(never)]
    fn fill(
        &mut self,
        bounds: &Bounds,
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
        facts: &HostFacts<'_>,
    ) -> Result<(), Error> {
        for leaf in 0..=bounds.basic {
            self.basic(leaf, &mut cpuid)?;
        }
        let mut last = bounds.extended;
        // LFENCE and null-selector behaviour are told in a leaf that old parts do not have; it is
        // synthesized where the cache topology is there, so that nothing in between is a surprise.
        let told = self.has(feature::LFENCE_RDTSC) || self.has(feature::NULL_SEL_CLR_BASE);
        if last >= leaf::AMD_CACHE && told {
            last = last.max(leaf::EXTENDED_21);
        }
        if last >= leaf::EXTENDED {
            for leaf in leaf::EXTENDED..=last {
                let host = bounds.ask(&mut cpuid, leaf, 0);
                self.extended(leaf, last, host, facts, &mut cpuid)?;
            }
        }
        let [ebx, ecx, edx] = KVM_SIGNATURE;
        self.push(leaf::HYPERVISOR, 0, [leaf::KVM_FEATURES, ebx, ecx, edx])?;
        let features = self.word(leaf::KVM_FEATURES, 0, Reg::Eax);
        self.push(leaf::KVM_FEATURES, 0, [features, 0, 0, 0])
    }

    #[inline(never)]
    fn basic(
        &mut self,
        leaf: u32,
        cpuid: &mut impl FnMut(u32, u32) -> [u32; 4],
    ) -> Result<(), Error> {
        let [eax, ebx, ecx, edx] = cpuid(leaf, 0);
        let answer = match leaf {
            leaf::VENDOR => [eax.min(LAST_BASIC), ebx, ecx, edx],
            // EBX as this CPU has it: the APIC id and the CLFLUSH size are the VMM's to set.
            leaf::FEATURES => {
                [eax, ebx, self.word(leaf, 0, Reg::Ecx), self.word(leaf, 0, Reg::Edx)]
            }
            // Caches as they are: guests size their loops by them.
            leaf::CACHE_DESCRIPTORS => [eax, ebx, ecx, edx],
            leaf::CACHE => return self.caches(leaf, cpuid),
            // The local APIC's timer is one of the host's, which goes on in C-states.
            leaf::POWER => [feature::ARAT.mask(), 0, 0, 0],
            leaf::EXTENDED_FEATURES => return self.extended_features(eax.min(2)),
            leaf::XSAVE => return self.xsave(),
            // The PMU, topology (the VMM's business), SGX, processor trace, AMX, and all others.
            _ => [0; 4],
        };
        self.push(leaf, 0, answer)
    }

    fn extended_features(&mut self, last: u32) -> Result<(), Error> {
        let leaf = leaf::EXTENDED_FEATURES;
        let word = |this: &Self, subleaf, reg| this.word(leaf, subleaf, reg);
        let (ebx, ecx) = (word(self, 0, Reg::Ebx), word(self, 0, Reg::Ecx));
        self.push(leaf, 0, [last, ebx, ecx, word(self, 0, Reg::Edx)])?;
        if last >= 1 {
            self.push(leaf, 1, [word(self, 1, Reg::Eax), 0, 0, word(self, 1, Reg::Edx)])?;
        }
        if last >= 2 {
            self.push(leaf, 2, [0, 0, 0, word(self, 2, Reg::Edx)])?;
        }
        Ok(())
    }

    fn caches(
        &mut self,
        leaf: u32,
        cpuid: &mut impl FnMut(u32, u32) -> [u32; 4],
    ) -> Result<(), Error> {
        // The hardware ends the list. A hypervisor below ours may not.
        for subleaf in 0..CACHES {
            let answer = cpuid(leaf, subleaf);
            self.push(leaf, subleaf, answer)?;
            // The type 0 ends the list, and belongs to it.
            if answer[0] & 0x1f == 0 {
                break;
            }
        }
        Ok(())
    }

    fn xsave(&mut self) -> Result<(), Error> {
        let leaf = leaf::XSAVE;
        let xcr0 = self.xcr0.bits();
        // The leaf stays, for it lies below the last one that is named.
        if xcr0 == 0 {
            return self.push(leaf, 0, [0; 4]);
        }
        let size = self.layout.required_size(xcr0, Form::Standard);
        self.push(leaf, 0, [xcr0 as u32, size, size, (xcr0 >> 32) as u32])?;
        let features = self.word(leaf, 1, Reg::Eax);
        let compacted = self.has(feature::XSAVES) || self.has(feature::XSAVEC);
        let size =
            if compacted { self.layout.required_size(xcr0 | self.xss, Form::Compacted) } else { 0 };
        self.push(leaf, 1, [features, size, self.xss as u32, (self.xss >> 32) as u32])?;
        // x87 and SSE lie in the legacy region, and have no subleaf.
        for index in 2..64 {
            if (xcr0 | self.xss) & (1 << index) == 0 {
                continue;
            }
            let Some(component) = self.layout.component(index).copied() else { continue };
            // Without XFD no component is subject to it.
            self.push(leaf, index, [component.size, component.offset, component.flags & 3, 0])?;
        }
        Ok(())
    }

    #[inline(never)]
    fn extended(
        &mut self,
        leaf: u32,
        last: u32,
        host: [u32; 4],
        facts: &HostFacts<'_>,
        cpuid: &mut impl FnMut(u32, u32) -> [u32; 4],
    ) -> Result<(), Error> {
        let [eax, ebx, ecx, edx] = host;
        let answer = match leaf {
            leaf::EXTENDED => [last, ebx, ecx, edx],
            leaf::EXTENDED_1 => {
                let repeated = edx & REPEATED_1_EDX & self.word(leaf::FEATURES, 0, Reg::Edx);
                [
                    eax,
                    ebx & !0x0fff_0000,
                    self.word(leaf, 0, Reg::Ecx),
                    self.word(leaf, 0, Reg::Edx) | repeated,
                ]
            }
            leaf::L1 => host,
            // Bits 17:16 of EDX are reserved.
            leaf::L2 => [eax, ebx, ecx, edx & !0x0003_0000],
            leaf::APM => [0, 0, 0, self.word(leaf, 0, Reg::Edx)],
            leaf::ADDRESS_SIZES => {
                let physical = eax & 0xff;
                // Hypervisors below ours may leave it 0.
                let linear = ((eax >> 8) & 0xff).max(48);
                // Bits 23:16 tell how far memory can be mapped. MAXPHYADDR stays the host's:
                // reserved bits in the guest's tables follow it.
                let reach = match facts.tdp_levels {
                    0 => 0,
                    // Four levels of tables end there: memory above could not be mapped.
                    1..5 => physical.min(48),
                    _ => physical,
                };
                [
                    physical | linear << 8 | reach << 16,
                    self.word(leaf, 0, Reg::Ebx),
                    // The core count and the size of its id; not the RDPRU and TSC-width fields.
                    ecx & 0x0000_f0ff,
                    0,
                ]
            }
            leaf::TLB_1G => [eax, ebx, 0, 0],
            leaf::PERFORMANCE => [eax & 7, 0, 0, 0],
            // Whoever finds the leaf among ours reads its subleaves, TOPOEXT or not.
            leaf::AMD_CACHE => return self.caches(leaf, cpuid),
            leaf::EXTENDED_21 => [self.word(leaf, 0, Reg::Eax), 0, 0, 0],
            // Revision 1, and as many address-space ids as stock KVM offers.
            leaf::SVM if self.has(feature::SVM) => [1, 8, 0, self.word(leaf, 0, Reg::Edx)],
            // The name (the VMM chooses it), SVM that is not offered, topology, encryption, the PMU.
            _ => [0; 4],
        };
        self.push(leaf, 0, answer)
    }
}

/// How far the host's own leaves go. Beyond them CPUID answers with unrelated data on Intel.
struct Bounds {
    basic: u32,
    extended: u32,
    subleaves_of_7: u32,
}

impl Bounds {
    fn read(cpuid: &mut impl FnMut(u32, u32) -> [u32; 4]) -> Self {
        let [basic, ..] = cpuid(leaf::VENDOR, 0);
        let [extended, ..] = cpuid(leaf::EXTENDED, 0);
        let [subleaves_of_7, ..] = if basic >= leaf::EXTENDED_FEATURES {
            cpuid(leaf::EXTENDED_FEATURES, 0)
        } else {
            [0; 4]
        };
        Self { basic: basic.min(LAST_BASIC), extended: extended.min(LAST_EXTENDED), subleaves_of_7 }
    }

    /// CPUID, or zeros where the host has no such leaf. The hypervisor leaves are not asked: they
    /// are those of a hypervisor below, which is none of the guest's business.
    fn ask(
        &self,
        cpuid: &mut impl FnMut(u32, u32) -> [u32; 4],
        leaf: u32,
        subleaf: u32,
    ) -> [u32; 4] {
        let exists = match leaf {
            leaf::EXTENDED_FEATURES => leaf <= self.basic && subleaf <= self.subleaves_of_7,
            0..leaf::HYPERVISOR => leaf <= self.basic,
            leaf::EXTENDED.. => leaf <= self.extended,
            _ => false,
        };
        if exists { cpuid(leaf, subleaf) } else { [0; 4] }
    }
}

/// Cuts the host's features down to those that may be offered.
#[inline(never)]
fn offered(host: &FeatureWords, xcr0: Xcr0, facts: &HostFacts<'_>) -> FeatureWords {
    let mut words = host.intersection(&PASSED).union(&FORCED);
    // Each vendor's bits for speculation control imply the other's, so that a guest of either
    // vendor finds what it looks for.
    let ibrs = host.has(feature::SPEC_CTRL) || host.has(feature::AMD_IBRS);
    let ibpb = host.has(feature::SPEC_CTRL) || host.has(feature::AMD_IBPB);
    let stibp = host.has(feature::INTEL_STIBP) || host.has(feature::AMD_STIBP);
    let ssbd = host.has(feature::SPEC_CTRL_SSBD) || host.has(feature::AMD_SSBD);
    words.set(feature::SPEC_CTRL, ibrs && ibpb);
    words.set(feature::INTEL_STIBP, stibp);
    words.set(feature::SPEC_CTRL_SSBD, ssbd);
    words.set(feature::AMD_IBRS, ibrs);
    words.set(feature::AMD_IBPB, ibpb);
    words.set(feature::AMD_STIBP, stibp);
    words.set(feature::AMD_SSBD, ssbd);
    // Protection keys need the host's kernel to use them too: else PKRU is not kept.
    words.set(
        feature::PKU,
        words.has(feature::PKU) && host.has(feature::OSPKE) && xcr0.contains(Xcr0::PKRU),
    );
    if xcr0.is_empty() {
        words = words.without(&NEEDS_XSAVE);
    }
    if !xcr0.contains(Xcr0::AVX) {
        words = words.without(&NEEDS_AVX);
    }
    if !xcr0.contains(Xcr0::AVX512) {
        words = words.without(&NEEDS_AVX512);
    }
    if !facts.nested {
        words = words.without(&FeatureWords::of(&[feature::VMX]));
    }
    if facts.nested && words.has(feature::SVM) {
        // Checked in software, whatever the host does.
        words.add(feature::SVME_ADDR_CHECK);
    } else {
        words = words.without(&NESTED_SVM);
    }
    words = words.union(&FeatureWords::of(facts.by_exits));
    // Last: what is withheld may be among the features above.
    words = words.without(&FeatureWords::of(facts.withheld));
    for bit in 0..32 {
        let pv = Feature { leaf: leaf::KVM_FEATURES, subleaf: 0, reg: Reg::Eax, bit };
        words.set(pv, facts.pv_features & PV_FEATURES & pv.mask() != 0);
    }
    words
}
