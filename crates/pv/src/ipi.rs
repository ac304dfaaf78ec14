//! KVM_HC_SEND_IPI: one interrupt to up to 128 APIC ids in one exit. `hypercalls.rst`, number 10.

use crate::error::HypercallError;

/// ICR bits that the hypercall takes: vector, delivery mode, assert, trigger mode.
const RESERVED: u64 = !0xc7ff;

/// A decoded KVM_HC_SEND_IPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendIpi {
    bitmap: u128,
    lowest: u32,
    /// ICR bits: vector in 7:0, delivery mode in 10:8.
    pub icr: u32,
}

impl SendIpi {
    /// The call that the arguments make: two words of bitmap (64 bits each, 32 outside long mode), the APIC id
    /// of bit 0, and the ICR.
    ///
    /// # Errors
    /// [`HypercallError::Invalid`] for a destination mode, a shorthand, or other bits that mean
    /// nothing here.
    pub fn new(
        low: u64,
        high: u64,
        lowest: u64,
        icr: u64,
        long: bool,
    ) -> Result<Self, HypercallError> {
        // A destination mode or a shorthand would contradict the bitmap.
        if icr & RESERVED != 0 {
            return Err(HypercallError::Invalid);
        }
        let bitmap = if long {
            u128::from(low) | u128::from(high) << 64
        } else {
            u128::from(low as u32) | u128::from(high as u32) << 32
        };
        // No APIC has an id beyond 32 bits: such a call reaches nobody.
        let (bitmap, lowest) = match u32::try_from(lowest) {
            Ok(lowest) => (bitmap, lowest),
            Err(_) => (0, 0),
        };
        Ok(Self { bitmap, lowest, icr: icr as u32 })
    }

    /// The APIC ids addressed, ascending.
    pub fn apic_ids(&self) -> impl Iterator<Item = u32> + use<> {
        let (mut left, lowest) = (self.bitmap, self.lowest);
        core::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let bit = left.trailing_zeros();
            // Before the sum: at an id that would overflow the walk ends.
            left &= left - 1;
            // Ids end at 2^32 - 1. The bits from there on, all that are left, name nobody.
            lowest.checked_add(bit)
        })
    }

    /// The vector of the interrupt.
    pub const fn vector(&self) -> u8 {
        self.icr as u8
    }

    /// Delivery mode field (ICR bits 10:8).
    pub const fn delivery_mode(&self) -> u32 {
        self.icr >> 8 & 7
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn ids(call: SendIpi) -> Vec<u32> {
        call.apic_ids().collect()
    }

    #[test]
    fn both_words_count_from_the_lowest_id() {
        let call = SendIpi::new(0b101, 1 << 63, 10, 0xfd, true).unwrap();
        assert_eq!(ids(call), [10, 12, 137]);
        assert_eq!((call.vector(), call.delivery_mode()), (0xfd, 0));
        let nmi = SendIpi::new(1, 0, 0, 0x400, true).unwrap();
        assert_eq!(nmi.delivery_mode(), 4);
    }

    #[test]
    fn outside_long_mode_a_word_has_32_bits() {
        let call = SendIpi::new(1 << 31 | 1 << 40, 1, 0, 0xfd, false).unwrap();
        assert_eq!(ids(call), [31, 32]);
    }

    #[test]
    fn a_destination_or_shorthand_in_the_icr_is_refused() {
        for bits in [1 << 18, 1 << 19, 1 << 32, 1 << 11] {
            assert_eq!(SendIpi::new(1, 0, 0, bits, true), Err(HypercallError::Invalid));
        }
    }

    #[test]
    fn ids_beyond_32_bits_do_not_wrap() {
        let call = SendIpi::new(u64::MAX, u64::MAX, 0xffff_fffe, 0xfd, true).unwrap();
        assert_eq!(ids(call), [0xffff_fffe, 0xffff_ffff]);
        assert_eq!(ids(SendIpi::new(1, 0, 1 << 32, 0xfd, true).unwrap()), []);
    }
}
