//! The feature words: those registers of CPUID whose bits name features, side by side, so that a
//! test for a known feature is one load and one AND.

use x86::cpuid::{Feature, Reg};

/// The registers that hold feature bits.
const WORDS: [(u32, u32, Reg); 17] = [
    (0x1, 0, Reg::Ecx),
    (0x1, 0, Reg::Edx),
    (0x7, 0, Reg::Ebx),
    (0x7, 0, Reg::Ecx),
    (0x7, 0, Reg::Edx),
    (0x7, 1, Reg::Eax),
    (0x7, 1, Reg::Edx),
    (0x7, 2, Reg::Edx),
    (0xd, 1, Reg::Eax),
    (0x4000_0001, 0, Reg::Eax),
    (0x8000_0001, 0, Reg::Ecx),
    (0x8000_0001, 0, Reg::Edx),
    (0x8000_0007, 0, Reg::Edx),
    (0x8000_0008, 0, Reg::Ebx),
    (0x8000_000a, 0, Reg::Edx),
    (0x8000_001f, 0, Reg::Eax),
    (0x8000_0021, 0, Reg::Eax),
];

/// One bit per feature that a CPUID table offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeatureWords([u32; WORDS.len()]);

/// Index into [`WORDS`]. With a constant feature the compiler folds the search away.
#[inline]
const fn slot(leaf: u32, subleaf: u32, reg: Reg) -> usize {
    let mut i = 0;
    while i < WORDS.len() {
        let (word_leaf, word_subleaf, word_reg) = WORDS[i];
        if word_leaf == leaf && word_subleaf == subleaf && word_reg as u8 == reg as u8 {
            return i;
        }
        i += 1;
    }
    WORDS.len()
}

impl FeatureWords {
    /// No feature at all.
    pub const NONE: Self = Self([0; WORDS.len()]);

    /// Collects the words with `cpuid(leaf, subleaf)`.
    pub fn read(mut cpuid: impl FnMut(u32, u32) -> [u32; 4]) -> Self {
        let mut words = Self::NONE;
        for (word, (leaf, subleaf, reg)) in words.0.iter_mut().zip(WORDS) {
            *word = reg.of(&cpuid(leaf, subleaf));
        }
        words
    }

    /// The set of exactly these features; one that lies in no known word is left out.
    pub const fn of(features: &[Feature]) -> Self {
        let mut words = Self::NONE;
        let mut i = 0;
        while i < features.len() {
            let feature = features[i];
            let slot = slot(feature.leaf, feature.subleaf, feature.reg);
            // A feature of no word is nobody's to offer: left out, and no panic when it is compiled
            // into a mask.
            if slot < WORDS.len() {
                words.0[slot] |= feature.mask();
            }
            i += 1;
        }
        words
    }

    /// Whether the feature is offered. A feature of an unknown word is not.
    #[inline]
    pub fn has(&self, feature: Feature) -> bool {
        // The length, for a register that is in no word: nobody has such a feature.
        let slot = slot(feature.leaf, feature.subleaf, feature.reg);
        self.0.get(slot).is_some_and(|word| word & feature.mask() != 0)
    }

    /// The whole word of a register; 0 for an unknown one.
    #[inline]
    pub fn word(&self, leaf: u32, subleaf: u32, reg: Reg) -> u32 {
        self.0.get(slot(leaf, subleaf, reg)).copied().unwrap_or(0)
    }

    /// Has the word offer `feature`.
    pub fn add(&mut self, feature: Feature) {
        *self = self.union(&Self::of(&[feature]));
    }

    /// Offers `feature` or not.
    pub fn set(&mut self, feature: Feature, on: bool) {
        if on {
            self.add(feature);
        } else {
            *self = self.without(&Self::of(&[feature]));
        }
    }

    /// Features of both.
    pub fn intersection(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & b)
    }

    /// Features of either.
    pub fn union(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a | b)
    }

    /// Features of this one that the other has not.
    pub fn without(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & !b)
    }

    fn zip(&self, other: &Self, combine: impl Fn(u32, u32) -> u32) -> Self {
        let mut out = *self;
        for (word, other) in out.0.iter_mut().zip(other.0) {
            *word = combine(*word, other);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::cpuid::feature;

    #[test]
    fn every_named_feature_but_the_hints_has_a_word() {
        for (name, feature) in feature::ALL {
            let known = FeatureWords::of(&[*feature]).has(*feature);
            let outside = matches!(*name, "ARAT" | "KVM_HINTS_REALTIME");
            assert_eq!(known, !outside, "{name}");
        }
    }

    #[test]
    fn sets_combine() {
        let a = FeatureWords::of(&[feature::AVX, feature::SMEP]);
        let b = FeatureWords::of(&[feature::SMEP, feature::NX]);
        assert!(a.intersection(&b).has(feature::SMEP) && !a.intersection(&b).has(feature::AVX));
        assert!(a.union(&b).has(feature::NX));
        assert!(a.without(&b).has(feature::AVX) && !a.without(&b).has(feature::SMEP));
    }
}
