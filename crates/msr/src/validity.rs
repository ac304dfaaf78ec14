//! Which values the MSRs of the backend take; the backend itself takes any.

use crate::GuestFacts;

/// Whether PAT may hold `value`: each of the eight fields is UC, WC, WT, WP, WB or UC- (SDM vol. 3A
/// §11.12.2).
#[inline]
pub const fn pat_is_valid(value: u64) -> bool {
    // Bits 3 to 7 of a field are reserved; of the types 0 to 7, 2 and 3 are: bit 1 needs bit 2.
    value & 0xf8f8_f8f8_f8f8_f8f8 == 0 && ((value & 0x0202_0202_0202_0202) << 1) & !value == 0
}

/// Whether SPEC_CTRL may hold `value`. A guest may set what it was offered, a VMM what the host's
/// CPU knows: writing more would fault on the host.
#[inline]
pub const fn spec_ctrl_is_valid(value: u64, facts: &GuestFacts, from_host: bool) -> bool {
    let allowed = if from_host { facts.host_spec_ctrl } else { facts.spec_ctrl };
    value & !(allowed as u64) == 0
}
