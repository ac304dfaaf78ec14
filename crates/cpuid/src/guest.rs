//! A vCPU's CPUID: the table that the VMM set, checked, and the facts that follow from it.
//!
//! KVM API §4.20 (KVM_SET_CPUID and KVM_SET_CPUID2). The facts are computed when the table is set, because CR4,
//! EFER, XCR0 and MSR writes ask for them far more often than a VMM sets CPUID.

use crate::derived::{cr4_bits, efer_bits};
use crate::dynamic::{Dynamic, DynamicInputs};
use crate::entry::{Entry, Error, MAX_ENTRIES, NONE, find, position};
use crate::hyperv::Shown;
use crate::lines::{INVALID, LINES, Line};
use crate::supported::Supported;
use crate::words::FeatureWords;
use alloc::vec::Vec;
use msr::GuestFacts;
use x86::cpuid::{Feature, KVM_SIGNATURE, Reg, Vendor, feature, leaf};
use x86::{Cr4, Efer, Xcr0};
use xstate::Layout;

/// Physical-address width where CPUID does not tell (SDM vol. 3A §4.1.4).
const DEFAULT_MAXPHYADDR: u8 = 36;

static NO_LAYOUT: Layout = Layout::EMPTY;

/// The guest's CPUID. The fields of the lookup come first.
#[derive(Clone, Debug)]
pub struct GuestCpuid {
    pub(crate) lines: [Line; LINES],
    /// The inputs that the dynamic bits were last computed from.
    pub(crate) inputs: DynamicInputs,
    /// Whether the dynamic bits in `entries` are those of `inputs`.
    pub(crate) fresh: bool,
    /// How often the dynamic bits were computed.
    pub(crate) updates: u64,
    pub(crate) dynamic: Dynamic,
    pub(crate) entries: Vec<Entry>,
    pub(crate) vendor: Vendor,
    pub(crate) layout: &'static Layout,
    uncached: bool,
    words: FeatureWords,
    facts: Facts,
    msr: GuestFacts,
    hyperv: Shown,
}

#[derive(Clone, Copy, Debug)]
struct Facts {
    cr4: Cr4,
    efer: Efer,
    xcr0: Xcr0,
    xss: u64,
    maxphyaddr: u8,
    signature: u32,
}

impl Default for GuestCpuid {
    /// No table and no host: CR4 and EFER may hold only what needs no feature, whatever table is
    /// set. For tests; a vCPU is made with [`GuestCpuid::new`].
    fn default() -> Self {
        Self::without_table(&NO_LAYOUT)
    }
}

impl GuestCpuid {
    fn without_table(layout: &'static Layout) -> Self {
        let words = FeatureWords::NONE;
        Self {
            lines: INVALID,
            inputs: DynamicInputs::default(),
            fresh: false,
            updates: 0,
            dynamic: Dynamic::NONE,
            entries: Vec::new(),
            vendor: Vendor::Other,
            layout,
            uncached: false,
            words,
            facts: Facts {
                cr4: cr4_bits(&words),
                efer: efer_bits(&words),
                xcr0: Xcr0::empty(),
                xss: 0,
                maxphyaddr: DEFAULT_MAXPHYADDR,
                signature: 0,
            },
            msr: GuestFacts { maxphyaddr: DEFAULT_MAXPHYADDR, ..GuestFacts::default() },
            hyperv: Shown::default(),
        }
    }

    /// A vCPU whose VMM has not set CPUID yet: every answer is zero, but control registers may
    /// hold whatever the host can give, as KVM allows.
    #[inline(never)]
    pub fn new(host: &'static Supported) -> Self {
        let mut this = Self::without_table(host.layout());
        this.uncached = host.is_uncached();
        // VMMs set registers before CPUID, or never set it.
        this.facts.cr4 = host.cr4();
        this.facts.efer = host.efer();
        this.msr = this.derive_msr_facts(host);
        this
    }

    /// KVM_SET_CPUID2. `has_run` says that the vCPU has executed KVM_RUN: then the same table is
    /// accepted and does nothing, and any other is refused. On error nothing has changed. Answers
    /// whether there is a new table, so that what follows from it has to be derived anew.
    pub fn set(
        &mut self,
        entries: &[Entry],
        host: &'static Supported,
        has_run: bool,
    ) -> Result<bool, Error> {
        // Asked here as well: who calls this need not be the dispatch.
        if entries.len() > MAX_ENTRIES {
            return Err(Error::TooMany);
        }
        // The guest has drawn its conclusions from the answers by now.
        if has_run {
            return if self.is_same(entries) { Ok(false) } else { Err(Error::Invalid) };
        }
        // The first entry counts, as for the guest.
        let linear = find(entries, leaf::ADDRESS_SIZES, 0).map_or(0, |e| (e.eax >> 8) & 0xff);
        if !matches!(linear, 0 | 48 | 57) {
            return Err(Error::Invalid);
        }
        // A copy made beside the old one: what fails for memory leaves that whole.
        let mut table = Vec::new();
        table.try_reserve_exact(entries.len()).map_err(|_| Error::NoMemory)?;
        table.extend_from_slice(entries);
        // Nothing from here on can fail: an error has to leave the old table whole.
        self.entries = table;
        self.layout = host.layout();
        self.uncached = host.is_uncached();
        self.derive(host);
        self.forget();
        Ok(true)
    }

    /// Whether sizes are computed with CPUID, and at once when an input changes, as stock KVM did:
    /// by [`Self::refresh_with`].
    #[inline]
    pub fn is_uncached(&self) -> bool {
        self.uncached
    }

    /// KVM_GET_CPUID2: the table with its dynamic bits as `inputs` have them.
    pub fn entries(&mut self, inputs: &DynamicInputs) -> &[Entry] {
        // A VMM that reads the table back sees what the guest would.
        self.refresh(inputs);
        &self.entries
    }

    /// How often the dynamic bits were computed anew.
    #[inline]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Whether the table has an entry for this leaf and subleaf.
    pub fn has_leaf(&self, leaf: u32, subleaf: u32) -> bool {
        find(&self.entries, leaf, subleaf).is_some()
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no table was set, or an empty one.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the guest was offered `feature`. One load and one AND for a constant feature.
    #[inline]
    pub fn has(&self, feature: Feature) -> bool {
        self.words.has(feature)
    }

    /// The guest's features.
    pub fn words(&self) -> &FeatureWords {
        &self.words
    }

    /// Whether SPEC_CTRL exists for the guest: offered by either vendor's enumeration, and given
    /// by the host.
    #[inline]
    pub fn has_spec_ctrl(&self) -> bool {
        // Bits and no feature: any of several features makes the MSR exist.
        self.msr.spec_ctrl != 0
    }

    /// Whether PRED_CMD exists for the guest: offered by either vendor's enumeration, and given by the
    /// host.
    #[inline]
    pub fn has_pred_cmd(&self) -> bool {
        self.msr.pred_cmd != 0
    }

    /// Whether a guest that is a hypervisor may expect that its own guests do not steer its indirect branches:
    /// IBRS, which has another name on AMD's processors, and automatic IBRS there.
    pub fn keeps_guests_apart(&self) -> bool {
        // By what the guest was told, for that is what its kernel relies on.
        let promised = if self.vendor().is_amd_like() {
            self.has(feature::AUTOIBRS) || self.has(feature::AMD_IBRS)
        } else {
            self.has(feature::SPEC_CTRL)
        };
        promised && self.has_pred_cmd()
    }

    /// What the rules of MSRs ask about this guest.
    #[inline]
    pub fn msr_facts(&self) -> &GuestFacts {
        &self.msr
    }

    /// What of Hyper-V's interface the guest is shown, and is there.
    #[inline]
    pub fn hyperv(&self) -> Shown {
        self.hyperv
    }

    /// Whether an address is canonical for the guest's linear-address width: 57 bits with LA57,
    /// else 48.
    #[inline]
    pub fn is_canonical(&self, address: u64) -> bool {
        // By the feature and not by CR4.LA57: this is asked for MSRs, which take wide addresses in
        // either mode.
        x86::reg::is_canonical(address, if self.has(feature::LA57) { 57 } else { 48 })
    }

    /// Whether TSC_AUX exists for the guest.
    pub fn has_tsc_aux(&self) -> bool {
        // Either instruction reads the MSR.
        self.has(feature::RDTSCP) || self.has(feature::RDPID)
    }

    /// The vendor that the guest sees.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// EAX of leaf 1, which RDX holds after reset; 0 without that leaf.
    pub fn signature(&self) -> u32 {
        self.facts.signature
    }

    /// Bits of a guest-physical address; 36 where the table does not tell.
    #[inline]
    pub fn maxphyaddr(&self) -> u8 {
        self.facts.maxphyaddr
    }

    /// CR4 bits that the guest may set: offered to it, and given by the host.
    #[inline]
    pub fn cr4_allowed(&self) -> Cr4 {
        self.facts.cr4
    }

    /// EFER bits that the guest may set.
    #[inline]
    pub fn efer_allowed(&self) -> Efer {
        self.facts.efer
    }

    /// VM_CR.SVMDIS keeps the guest from setting EFER.SVME, until the table is set anew.
    pub fn disable_svm(&mut self) {
        // VM_CR wins over CPUID, which still shows SVM (APM vol. 2 §15.30.1).
        self.facts.efer -= Efer::SVME;
    }

    /// SVM's features that the guest is offered (Fn8000_000A EDX); 0 where it has no SVM.
    pub fn svm_features(&self) -> u32 {
        if self.has(feature::SVM) { self.words.word(leaf::SVM, 0, Reg::Edx) } else { 0 }
    }

    /// XCR0 bits that the guest may set, subject to [`xstate::xcr0_check`].
    #[inline]
    pub fn xcr0_allowed(&self) -> Xcr0 {
        self.facts.xcr0
    }

    /// XSS bits that the guest may set.
    #[inline]
    pub fn xss_allowed(&self) -> u64 {
        self.facts.xss
    }

    /// MISC_ENABLE bit 18 changed, and the MONITOR feature follows it. `None` leaves the VMM's bit alone, as
    /// KVM's quirk KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT has it.
    pub fn set_mwait(&mut self, mwait: Option<bool>) {
        self.dynamic.mwait = mwait;
        self.forget();
    }

    /// Whether the guest is offered MONITOR and MWAIT now.
    pub fn has_monitor(&self) -> bool {
        self.dynamic.mwait.unwrap_or(self.has(feature::MONITOR))
    }

    /// HLT does not exit (KVM_CAP_X86_DISABLE_EXITS): PV_UNHALT is then hidden. What it was before.
    pub fn set_hlt_in_guest(&mut self, on: bool) -> bool {
        self.forget();
        core::mem::replace(&mut self.dynamic.hlt_in_guest, on)
    }

    /// Forgets cached answers and the state of the dynamic bits.
    fn forget(&mut self) {
        // Answers that do not change with the state may have changed with what was set.
        self.lines = INVALID;
        self.fresh = false;
    }

    /// Compares tables, blind to the dynamic bits: what KVM_GET_CPUID2 gave may be set again. So it
    /// does not matter whether ours are up to date.
    fn is_same(&self, entries: &[Entry]) -> bool {
        // In the same order, too: stock KVM compares the tables as they are.
        self.entries.len() == entries.len()
            && self.entries.iter().zip(entries).enumerate().all(|(position, (ours, theirs))| {
                let bits = self.dynamic.bits_at(position as u16, theirs, &self.inputs, |_, _| 0);
                bits.cleared(ours) == bits.cleared(theirs)
            })
    }

    fn derive(&mut self, host: &Supported) {
        let entries = &self.entries;
        let answer = |leaf, index| find(entries, leaf, index).map_or([0; 4], Entry::answer);
        // Positions and not entries: the dynamic bits are written there later.
        let at = |leaf, index| position(entries, leaf, index).unwrap_or(NONE);
        // Without our signature the leaf is another hypervisor's, or nobody's.
        let pv_leaf = kvm_base(entries).map(|base| base.wrapping_add(1));
        let words = FeatureWords::read(|leaf, index| match leaf {
            leaf::KVM_FEATURES => pv_leaf.map_or([0; 4], |leaf| answer(leaf, 0)),
            _ => answer(leaf, index),
        });
        let [_, _, _, xcr0_high] = answer(leaf::XSAVE, 0);
        let [xcr0_low, ..] = answer(leaf::XSAVE, 0);
        let [_, _, xss_low, xss_high] = answer(leaf::XSAVE, 1);
        // The VMM's choice of components is in leaf 0xD, and nowhere else.
        let xcr0 = u64::from(xcr0_low) | u64::from(xcr0_high) << 32;
        let xss = u64::from(xss_low) | u64::from(xss_high) << 32;
        let [last_extended, ..] = answer(leaf::EXTENDED, 0);
        let maxphyaddr = match find(entries, leaf::ADDRESS_SIZES, 0) {
            // The leaf counts only where the table says that it reaches so far, as in stock KVM.
            Some(sizes) if last_extended >= leaf::ADDRESS_SIZES => (sizes.eax & 0xff) as u8,
            _ => DEFAULT_MAXPHYADDR,
        };
        let [signature, ..] = answer(leaf::FEATURES, 0);
        self.vendor = Vendor::from_leaf0(&answer(leaf::VENDOR, 0));
        self.facts = Facts {
            cr4: cr4_bits(&words) & host.cr4(),
            // What the VMM shows and the host lacks must not reach a register of the hardware.
            efer: efer_bits(&words) & host.efer(),
            xcr0: Xcr0::from_bits_retain(xcr0) & host.xcr0(),
            xss: xss & host.xss(),
            maxphyaddr,
            signature,
        };
        self.dynamic = Dynamic {
            features: at(leaf::FEATURES, 0),
            extended: at(leaf::EXTENDED_FEATURES, 0),
            xsave: at(leaf::XSAVE, 0),
            xsave_compacted: at(leaf::XSAVE, 1),
            pv: pv_leaf.map_or(NONE, |leaf| at(leaf, 0)),
            host_xsave: host.has(feature::XSAVE),
            host_pku: host.has(feature::PKU),
            // These two follow MISC_ENABLE and KVM_CAP_X86_DISABLE_EXITS: a new table does not undo
            // them.
            mwait: self.dynamic.mwait,
            hlt_in_guest: self.dynamic.hlt_in_guest,
        };
        self.words = words;
        self.msr = self.derive_msr_facts(host);
        // Elsewhere nothing of it is there, whatever the VMM shows.
        self.hyperv =
            if host.has(feature::VMX) { Shown::of(&self.entries) } else { Shown::default() };
    }

    fn derive_msr_facts(&self, host: &Supported) -> GuestFacts {
        GuestFacts::derive(
            |feature| self.words.has(feature),
            |feature| host.has(feature),
            self.vendor,
            self.facts.maxphyaddr,
        )
    }
}

/// Where KVM's leaves begin: a VMM that shows another hypervisor first moves them up by 0x100s.
fn kvm_base(entries: &[Entry]) -> Option<u32> {
    (leaf::HYPERVISOR..0x4001_0000).step_by(0x100).find(|base| {
        find(entries, *base, 0).is_some_and(|e| {
            [Reg::Ebx, Reg::Ecx, Reg::Edx].map(|r| r.of(&e.answer())) == KVM_SIGNATURE
        })
    })
}
