//! Control-register bits that follow from a set of features.
//!
//! SDM vol. 3A §2.5 and §2.2.1, APM vol. 2 §3.1.3 and §3.1.7: a bit whose feature is not
//! enumerated is reserved, and setting it raises #GP.

use crate::FeatureWords;
use x86::cpuid::{Feature, feature};
use x86::{Cr4, Efer};

/// Bits that need no feature, or one so old that KVM does not ask.
// Not by feature: stock KVM lets every guest set these, and VMMs with an empty table boot.
const CR4_ALWAYS: Cr4 = Cr4::VME
    .union(Cr4::PVI)
    .union(Cr4::TSD)
    .union(Cr4::DE)
    .union(Cr4::PSE)
    .union(Cr4::PAE)
    .union(Cr4::MCE)
    .union(Cr4::PGE)
    .union(Cr4::PCE)
    .union(Cr4::OSFXSR)
    .union(Cr4::OSXMMEXCPT);

// SMX, CET, LASS, LAM, FRED and user interrupts are missing: they are not offered, so their bits
// stay reserved.
const CR4_BY_FEATURE: [(Cr4, Feature); 9] = [
    // By what the guest is shown: without VMX the bit has to be #GP.
    (Cr4::VMXE, feature::VMX),
    (Cr4::UMIP, feature::UMIP),
    (Cr4::LA57, feature::LA57),
    (Cr4::FSGSBASE, feature::FSGSBASE),
    (Cr4::PCIDE, feature::PCID),
    (Cr4::OSXSAVE, feature::XSAVE),
    (Cr4::SMEP, feature::SMEP),
    (Cr4::SMAP, feature::SMAP),
    (Cr4::PKE, feature::PKU),
];

const EFER_BY_FEATURE: [(Efer, Feature); 6] = [
    (Efer::LME, feature::LM),
    // The CPU's own, but KVM_SET_SREGS carries it.
    (Efer::LMA, feature::LM),
    (Efer::NXE, feature::NX),
    (Efer::FFXSR, feature::FXSR_OPT),
    (Efer::AUTOIBRS, feature::AUTOIBRS),
    (Efer::SVME, feature::SVM),
];

/// CR4 bits that are not reserved with these features.
pub(crate) fn cr4_bits(words: &FeatureWords) -> Cr4 {
    CR4_BY_FEATURE
        .iter()
        .filter(|(_, feature)| words.has(*feature))
        .fold(CR4_ALWAYS, |bits, (bit, _)| bits | *bit)
}

/// EFER bits that are not reserved with these features.
pub(crate) fn efer_bits(words: &FeatureWords) -> Efer {
    EFER_BY_FEATURE
        .iter()
        .filter(|(_, feature)| words.has(*feature))
        // SCE needs no feature here: stock KVM does not ask for SYSCALL.
        .fold(Efer::SCE, |bits, (bit, _)| bits | *bit)
}
