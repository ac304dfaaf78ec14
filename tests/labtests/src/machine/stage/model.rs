//! What the architecture says about an access: the entries of a walk, the control bits, and the error code or none
//! (APM vol. 2 §5.6, §8.4.2).

use super::operation::{F, P, RSVD, U, W};
use super::paging::{NX, PRESENT, Paging, USER, WRITABLE};

/// How memory is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Fetch,
}

/// All three.
pub const KINDS: [Kind; 3] = [Kind::Read, Kind::Write, Kind::Fetch];

/// An access.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub kind: Kind,
    pub user: bool,
    /// RFLAGS.AC.
    pub ac: bool,
}

/// The control bits that count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Control {
    pub wp: bool,
    pub smep: bool,
    pub smap: bool,
    pub nxe: bool,
}

impl Control {
    /// The error code of an access through these entries, from the root down to the page's; `None` if it may pass.
    pub fn fault(&self, paging: Paging, entries: &[u64], access: Access) -> Option<u64> {
        let fetch = access.kind == Kind::Fetch;
        let tells_fetches = self.smep || self.nxe && paging.has_nx();
        let mut error = 0;
        error |= if access.kind == Kind::Write { W } else { 0 };
        error |= if access.user { U } else { 0 };
        error |= if fetch && tells_fetches { F } else { 0 };
        let (mut writable, mut user, mut executable) = (true, true, true);
        for (index, entry) in entries.iter().enumerate() {
            if entry & PRESENT == 0 {
                return Some(error);
            }
            if paging == Paging::Pae && index == 0 {
                continue;
            }
            if entry & NX != 0 && !self.nxe && paging.has_nx() {
                return Some(error | P | RSVD);
            }
            writable &= entry & WRITABLE != 0;
            user &= entry & USER != 0;
            executable &= entry & NX == 0 || !paging.has_nx();
        }
        let refused = match access.kind {
            Kind::Read => !access.user && user && self.smap && !access.ac,
            Kind::Write => {
                !access.user && user && self.smap && !access.ac
                    || !writable && (access.user || self.wp)
            }
            Kind::Fetch => !executable || !access.user && user && self.smep,
        };
        (refused || access.user && !user).then_some(error | P)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_writes_read_only_pages_without_wp() {
        let write = Access { kind: Kind::Write, user: false, ac: false };
        let with = Control { wp: true, ..Control::default() };
        assert_eq!(Control::default().fault(Paging::Legacy, &[7, 5], write), None);
        assert_eq!(with.fault(Paging::Legacy, &[7, 5], write), Some(P | W));
    }

    #[test]
    fn smap_yields_to_ac_and_smep_to_nothing() {
        let control = Control { smep: true, smap: true, ..Control::default() };
        let access = |kind, ac| Access { kind, user: false, ac };
        let of = |kind, ac| control.fault(Paging::Legacy, &[7, 7], access(kind, ac));
        assert_eq!(of(Kind::Read, false), Some(P));
        assert_eq!(of(Kind::Read, true), None);
        assert_eq!(of(Kind::Fetch, true), Some(P | F));
    }
}
