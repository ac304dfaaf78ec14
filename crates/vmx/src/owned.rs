//! Which bits of CR0 and CR4 are the guest's own.
//!
//! Of CR0 the guest owns TS and WP, of CR4 the bits that only it is concerned with, as far as its
//! CPUID offers them; the other bits it reads from a shadow without an exit, and a write that
//! changes one exits. WP and PGE are not the guest's where the run loop has to see changes of how
//! paging entries are read ([`Paging::watch_roles`]).
//!
//! Every look at CR0 or CR4 needs this, to know where a bit is kept. So it is kept itself, and made anew
//! when what it follows from changes.

use backend::{GuestLimits, Paging};
use x86::{Cr0, Cr4};

/// CR4 bits that a guest may own.
const CR4_OWNABLE: Cr4 = Cr4::PVI
    .union(Cr4::TSD)
    .union(Cr4::DE)
    .union(Cr4::PGE)
    .union(Cr4::PCE)
    .union(Cr4::OSFXSR)
    .union(Cr4::OSXMMEXCPT)
    .union(Cr4::FSGSBASE);

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Owned {
    /// Bits of CR0.
    pub cr0: Cr0,
    /// Bits of CR4.
    pub cr4: Cr4,
}

impl Owned {
    /// What the guest owns with this way of paging and this CPUID.
    pub fn of(paging: Paging, limits: &GuestLimits) -> Self {
        let cr4 = CR4_OWNABLE & limits.cr4_allowed;
        // By CPUID: a bit that the guest was not offered has to exit, so that #GP can be told.
        if paging.watch_roles || paging.shadow {
            // A change of WP or PGE changes roles: the loop has to see it.
            Self { cr0: Cr0::TS, cr4: cr4 - Cr4::PGE }
        } else {
            Self { cr0: Cr0::TS | Cr0::WP, cr4 }
        }
    }
}
