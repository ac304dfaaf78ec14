//! The TSC of L2, from that of L1 (SDM vol. 3C §26.3).

use x86::vmcs::{ProcControls, ProcControls2, field};

use crate::Vmcs12;
use crate::capabilities::TIMER_RATE;

/// A TSC made from another: times the multiplier, plus the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tsc {
    /// With 48 fractional bits.
    pub multiplier: u64,
    /// Two's complement.
    pub offset: u64,
}

/// The multiplier of a TSC that runs as fast as the other.
pub const ONE: u64 = 1 << 48;

fn scale(value: u64, multiplier: u64) -> u64 {
    // 48 fractional bits are dropped, as the CPU does: 128 bits hold the product.
    ((u128::from(value) * u128::from(multiplier)) >> 48) as u64
}

/// Two multipliers as one. A CPU refuses to enter with 0 (SDM vol. 3C §27.2.1.1), which two small ones make, and the field
/// does not reach what two large ones make: L1 may ask for either, and the entry is not L1's mistake.
fn compose(of_l1: u64, of_l2: u64) -> u64 {
    let product = (u128::from(of_l1) * u128::from(of_l2)) >> 48;
    u64::try_from(product).unwrap_or(u64::MAX).max(1)
}

/// Scales a signed number by its magnitude, as hardware-compatible offsets are.
fn scale_signed(value: u64, multiplier: u64) -> u64 {
    // An offset is signed: as it stands it would be scaled like a time in the far future.
    let signed = value as i64;
    let magnitude = scale(signed.unsigned_abs(), multiplier);
    if signed < 0 { magnitude.wrapping_neg() } else { magnitude }
}

impl Tsc {
    /// The TSC that it is made from, unchanged.
    pub const SAME: Self = Self { multiplier: ONE, offset: 0 };

    /// The time of this TSC at a time of the one that it is made from.
    pub fn at(self, base: u64) -> u64 {
        scale(base, self.multiplier).wrapping_add(self.offset)
    }

    /// What L1's VMCS makes of the TSC for L2: this one is L1's from the host's, the result L2's from the
    /// host's.
    pub fn of_l2(self, v: &Vmcs12) -> Self {
        // Without the offset control L1's scaling is off, too: L2 has L1's TSC (§26.3).
        if !v.primary().contains(ProcControls::TSC_OFFSET) {
            return self;
        }
        let offset = v.get(field::TSC_OFFSET);
        if !v.secondary().contains(ProcControls2::TSC_SCALING) {
            // Offsets add modulo 2^64.
            return Self { offset: self.offset.wrapping_add(offset), ..self };
        }
        let multiplier = v.get(field::TSC_MULTIPLIER);
        Self {
            // L1's offset is in L1's ticks: L2's multiplier scales it along with the time.
            multiplier: compose(self.multiplier, multiplier),
            offset: scale_signed(self.offset, multiplier).wrapping_add(offset),
        }
    }
}

/// L1's preemption timer as KVM_GET_NESTED_STATE carries it: the time at which it runs out, on L1's TSC divided
/// by the timer's rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(pub u64);

impl Deadline {
    /// The timer of an entry at this time of L1's TSC.
    pub fn start(v: &Vmcs12, tsc: u64) -> Self {
        // Counted from a moment of L1's TSC, in units of the rate that L1 sees: the host's own rate is nothing to a saved state.
        Self((tsc >> TIMER_RATE).wrapping_add(u64::from(v.get(field::PREEMPTION_TIMER))))
    }

    /// What is left of the timer, as its field has it; 0 has run out.
    pub fn left(self, tsc: u64) -> u32 {
        // A deadline that a VMM restores may lie further away than the field reaches.
        u32::try_from(self.0.saturating_sub(tsc >> TIMER_RATE)).unwrap_or(u32::MAX)
    }

    /// The deadline on an L1's TSC that was moved by `delta`, mod 2^64.
    #[must_use]
    pub fn moved(self, delta: u64) -> Self {
        // L1's TSC moves, the time that is left does not.
        Self(self.tsc().wrapping_add(delta) >> TIMER_RATE)
    }

    /// The time of L1's TSC at which it runs out.
    pub fn tsc(self) -> u64 {
        // A VMM restores any number: the product stays at the end of time.
        self.0.saturating_mul(1 << TIMER_RATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn vmcs(primary: u32, second: u32, offset: u64, multiplier: u64) -> Vmcs12 {
        let mut v = Vmcs12::new();
        v.set(field::PROC_CONTROLS, primary | 1 << 31);
        v.set(field::PROC_CONTROLS2, second);
        v.set(field::TSC_OFFSET, offset);
        v.set(field::TSC_MULTIPLIER, multiplier);
        v
    }

    #[test]
    fn without_offsetting_l2_has_l1s_tsc() {
        let l1 = Tsc { multiplier: ONE * 2, offset: 100 };
        assert_eq!(l1.of_l2(&vmcs(0, 1 << 25, 5, ONE * 3)), l1);
        let only = l1.of_l2(&vmcs(8, 0, (-300i64) as u64, ONE * 3));
        assert_eq!(only, Tsc { multiplier: ONE * 2, offset: (-200i64) as u64 });
    }

    #[test]
    fn no_multiplier_of_l1s_makes_one_that_the_cpu_refuses() {
        let slow = Tsc { multiplier: ONE / 2, offset: 0 };
        assert_eq!(slow.of_l2(&vmcs(8, 1 << 25, 0, 1)).multiplier, 1);
        let fast = Tsc { multiplier: ONE * 2, offset: 0 };
        assert_eq!(fast.of_l2(&vmcs(8, 1 << 25, 0, 1 << 63)).multiplier, u64::MAX);
    }

    #[test]
    fn the_preemption_timer_counts_down_on_l1s_tsc() {
        let mut v = vmcs(0, 0, 0, 0);
        v.set(field::PREEMPTION_TIMER, 10);
        let deadline = Deadline::start(&v, 3200);
        assert_eq!((deadline, deadline.tsc()), (Deadline(110), 3520));
        assert_eq!(
            [3200, 3231, 3232, 3519, 3520, 9999].map(|t| deadline.left(t)),
            [10, 10, 9, 1, 0, 0]
        );
        assert_eq!(deadline.moved(64), Deadline(112));
        assert_eq!(deadline.moved(64u64.wrapping_neg()), Deadline(108));
        // The end of a timer is moved as the TSC is, which wraps.
        assert_eq!(Deadline(110).moved(1 << 63).left(3200 + (1 << 63)), 10);
        assert_eq!(Deadline(u64::MAX).tsc(), u64::MAX);
        assert_eq!(Deadline(u64::MAX).left(0), u32::MAX);
    }

    proptest! {
        /// The composition is the second of the first, up to the rounding of each.
        #[test]
        fn scaling_composes(
            base in 0u64..1 << 50, first in ONE / 8..ONE * 8, second in ONE / 8..ONE * 8,
            offset in -1i64 << 40..1 << 40, inner in -1i64 << 40..1 << 40,
        ) {
            let l1 = Tsc { multiplier: first, offset: offset as u64 };
            let both = l1.of_l2(&vmcs(8, 1 << 25, inner as u64, second)).at(base) as i64;
            let time_of_l1 = l1.at(base) as i64;
            prop_assume!(time_of_l1 >= 0);
            let exact = Tsc { multiplier: second, offset: inner as u64 };
            let one_by_one = exact.at(time_of_l1 as u64) as i64;
            prop_assert!((both - one_by_one).abs() <= 64, "{both} {one_by_one}");
        }
    }
}
