//! Which values the MSRs of the backend take; the backend itself takes any.

use crate::{By, GuestFacts};

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
pub const fn spec_ctrl_is_valid(value: u64, facts: &GuestFacts, by: By) -> bool {
    let allowed = match by {
        By::Vmm => facts.host_spec_ctrl,
        By::Guest => facts.spec_ctrl,
    };
    value & !(allowed as u64) == 0
}
