//! Flaws of CPUs that are told by nothing but the CPU's signature.

/// Family, model and stepping in CPUID.1:EAX; the other bits are the type and reserved ones.
const SIGNATURE: u32 = 0x0fff_0fff;

/// Signatures of CPUs whose VMX-preemption timer does not count at the rate that IA32_VMX_MISC tells.
/// Intel's specification updates call it "VMX-Preemption Timer Does Not Count Down at the Rate
/// Specified"; their numbers and the erratum's follow.
const SLOW_PREEMPTION_TIMER: [u32; 9] = [
    // Nehalem: Core i7-900 (320836, AAJ124), Xeon 3500 (321333, AAM126), Xeon 5500 (321324, AAK139).
    0x0001_06a0,
    0x0001_06a1,
    0x0001_06a4,
    0x0001_06a5,
    // Lynnfield, Clarksfield: Core i7-800, i5-700 (322166, AAN92), i7-900, i7-800, i7-700 for laptops
    // (320767, AAP86), Xeon 3400 (322373, AAO95).
    0x0001_06e5,
    // Clarkdale, Arrandale: Core i5-600, i3-500, Pentium G6950 (322911, AAU65), i7-600, i5-500, i5-400,
    // i3-300 for laptops (322814, AAT59), Xeon L3406 (323056, AAX65).
    0x0002_0652,
    0x0002_0655,
    // Beckton: Xeon 7500 (323344, BA86).
    0x0002_06e6,
    // Ivy Bridge of an early stepping, seen with Xeon E3-1220 v2.
    0x0003_06a8,
];

/// Whether the VMX-preemption timer of a CPU with this CPUID.1:EAX cannot be relied on.
pub(crate) fn preemption_timer_is_slow(signature: u32) -> bool {
    // The other bits do not tell one erratum's CPU from another's.
    SLOW_PREEMPTION_TIMER.contains(&(signature & SIGNATURE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_listed_steppings_are_named() {
        assert!(preemption_timer_is_slow(0x0001_06a5));
        assert!(preemption_timer_is_slow(0x0002_0652 | 0x3000), "whatever the type is");
        // Nehalem's stepping between, Westmere-EP, Ivy Bridge as sold, Skylake-X.
        for signature in [0x0001_06a2, 0x0002_06c2, 0x0003_06a9, 0x0005_0654] {
            assert!(!preemption_timer_is_slow(signature), "{signature:x}");
        }
    }
}
