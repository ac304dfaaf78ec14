//! The second translation of a guest's guest: L1's NPT or EPT tables, which lead from L2's physical addresses
//! to L1's.
//!
//! What L2's hardware walks is made of them in [`crate::shadow`]; [`walk`] is the same walk in software, for
//! the emulator. Here is what both share: which tables ([`Tables`]), which access, and what L1 hears of one
//! that its tables refuse ([`L1Fault`]).
#![forbid(unsafe_code)]

pub(crate) mod rules;
pub mod walk;

use x86::vmcb::npf;
use x86::vmcs::ApicAccess;
use x86::{Cr4, Efer, Gfn, Gpa, exception::pf};

use crate::grant::Grant;
use crate::role::PagingContext;
use crate::role::Role;
use crate::walk::AccessKind;

pub use crate::role::EptOffer;

/// L1's tables for L2: where they begin, and how they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tables {
    pub(crate) base: u64,
    pub(crate) role: Role,
    /// L1 has each page noted that becomes dirty.
    logs: bool,
    /// L1 hears that an access is a fetch.
    tells_fetch: bool,
}

impl Tables {
    /// NPT tables from VMCB12's nCR3, when VMRUN was executed in `l1`: CR0, CR4, EFER and what L1's CPUID says.
    /// `None`: L1 is in neither long mode nor PAE paging; such tables are not served.
    pub fn npt(ncr3: u64, l1: &PagingContext) -> Option<Self> {
        let role = Role::npt(ncr3, l1)?;
        let tells_fetch = l1.efer.contains(Efer::NXE) || l1.cr4.contains(Cr4::SMEP);
        Some(Self { base: role.base(ncr3), role, logs: false, tells_fetch })
    }

    /// EPT tables from VMCS12's EPT pointer, which was checked.
    pub fn ept(pointer: u64, offer: &EptOffer) -> Self {
        let role = Role::ept(pointer, offer);
        Self { base: role.base(pointer), role, logs: false, tells_fetch: true }
    }

    /// No tables: L2's physical addresses are L1's.
    pub const FLAT: Self = Self { base: 0, role: Role::FLAT, logs: false, tells_fetch: true };

    /// These tables, where an access that is to set a dirty flag is told as [`L1Fault::Unlogged`], and not done (`logs`); or
    /// done, since L1's log has it.
    #[must_use]
    pub const fn logging(self, logs: bool) -> Self {
        Self { logs, ..self }
    }

    /// Whether other tables are these, whatever is told of them.
    #[inline]
    pub(crate) fn are(&self, other: &Self) -> bool {
        self.base == other.base && self.role == other.role
    }

    /// Whether other tables begin where these do: a CPU knows what it keeps of EPT by that alone (SDM vol. 3C §29.4.1).
    pub(crate) fn have_root_of(&self, other: &Self) -> bool {
        self.base == other.base && self.is_ept() == other.is_ept()
    }

    /// These tables, where an access to one of L1's frames is told as [`L1Fault::ApicAccess`] and never done. `None`:
    /// the frame lies too far up, beyond 16 TiB.
    pub fn without_frame(self, frame: Gfn) -> Option<Self> {
        Some(Self { role: self.role.without_frame(frame)?, ..self })
    }

    /// Whether L1 wants accessed and dirty flags in EPT tables. The hardware's EPT pointer for L2 must say the
    /// same: it decides whether a walk of L2's own tables is a write (SDM vol. 3C §29.3.3.2).
    pub fn tracks_ept(&self) -> bool {
        self.role.is_ept() && self.role.tracks()
    }

    /// Whether these are EPT tables.
    pub fn is_ept(&self) -> bool {
        self.role.is_ept()
    }

    /// Whether an EPT pointer names these tables' root, whatever else it says: INVEPT goes by the address.
    pub fn has_root(&self, pointer: u64) -> bool {
        self.base == self.role.base(pointer)
    }

    /// An access in software. NPT takes every access to L2's own tables for a write; EPT does with
    /// accessed and dirty flags.
    pub fn access(&self, gpa: Gpa, kind: AccessKind, part: Part) -> NestedAccess {
        // The CPU may have to set flags in L2's entries, so it takes their walk for a write at
        // once.
        let walks = part == Part::Table && self.role.tracks();
        let told = match (self.is_ept(), part) {
            (true, Part::Table) => violation::LINEAR,
            (true, Part::Page) => violation::LINEAR | violation::FINAL,
            (true, Part::Physical) => 0,
            (false, Part::Table) => npf::TABLE,
            (false, _) => npf::FINAL,
        };
        NestedAccess {
            gpa: gpa.0,
            // With the flags EPT calls a walk both a read and a write; NPT only a write.
            read: kind == AccessKind::Read || (walks && self.is_ept()),
            write: kind == AccessKind::Write || walks,
            fetch: kind == AccessKind::Fetch,
            told,
            logs: self.logs,
            tells_fetch: self.tells_fetch,
        }
    }

    /// The access of a fault on these tables' root.
    #[inline]
    #[must_use]
    pub const fn fault(&self, access: NestedAccess) -> NestedAccess {
        NestedAccess { logs: self.logs, tells_fetch: self.tells_fetch, ..access }
    }
}

/// Bits of an EPT violation's exit qualification (SDM vol. 3C table 28-7).
mod violation {
    pub(super) const READ: u64 = 1 << 0;
    pub(super) const WRITE: u64 = 1 << 1;
    pub(super) const FETCH: u64 = 1 << 2;
    /// Where what the entries allow together stands.
    pub(super) const RIGHTS_SHIFT: u32 = 3;
    /// The linear address is valid.
    pub(super) const LINEAR: u64 = 1 << 7;
    /// The access was to the linear address's page, not to a paging entry.
    pub(super) const FINAL: u64 = 1 << 8;
    /// NMIs were unblocked by IRET.
    pub(super) const NMI_UNBLOCKED: u64 = 1 << 12;
}

/// What of L2's translation an access in software belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A paging entry of L2's, on the way of a linear address.
    Table,
    /// The page that the linear address leads to.
    Page,
    /// There is no linear address: PDPTEs that MOV to CR3 loads.
    Physical,
}

/// An access to an L2-physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedAccess {
    /// The L2-physical address of the access.
    pub gpa: u64,
    /// Data are read.
    pub read: bool,
    /// Data are written.
    pub write: bool,
    /// Instructions are fetched.
    pub fetch: bool,
    /// What the hardware told of the access that is passed on to L1 as it is.
    told: u64,
    /// L1 has each page noted that becomes dirty, and this one is not.
    pub(crate) logs: bool,
    /// L1 hears of a fetch that it is one.
    tells_fetch: bool,
}

impl NestedAccess {
    /// The access, with no dirty flag of it to be logged.
    #[must_use]
    pub const fn unlogged(self) -> Self {
        Self { logs: false, ..self }
    }

    /// The access of a #VMEXIT(NPF): EXITINFO1 and EXITINFO2.
    #[inline]
    pub const fn npf(info: u64, gpa: u64) -> Self {
        // Only these two are the access's. The rest of EXITINFO1 tells what our entries lacked; L1
        // must hear of its own.
        let told = info & (npf::FINAL | npf::TABLE);
        let write = info & pf::WRITE as u64 != 0;
        // A paging entry is not fetched, whatever it is read for.
        let fetch = info & pf::FETCH as u64 != 0 && info & npf::TABLE == 0;
        Self { gpa, read: !write && !fetch, write, fetch, told, logs: false, tells_fetch: true }
    }

    /// The access of an EPT violation: its exit qualification and the guest-physical address.
    #[inline]
    pub const fn violation(qualification: u64, gpa: u64) -> Self {
        use violation::*;
        Self {
            gpa,
            read: qualification & READ != 0,
            write: qualification & WRITE != 0,
            fetch: qualification & FETCH != 0,
            // Without bits 5:3, which tell of our entries. What L1's allow is put in when the fault
            // is passed on.
            told: qualification & (LINEAR | FINAL | NMI_UNBLOCKED),
            logs: false,
            tells_fetch: true,
        }
    }

    /// Whether rights allow the access. Reading needs what NPT calls the user's right.
    #[inline]
    pub(crate) const fn is_allowed(&self, grant: Grant) -> bool {
        // Every access of NPT is a user's; EPT's U is the right to read, which a fetch does not need.
        (!self.read || grant.has(Grant::U))
            && (!self.write || grant.has(Grant::W))
            && (!self.fetch || grant.has(Grant::X))
    }
}

/// What L1 hears of an access that its tables refuse. The address is that of the access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L1Fault {
    /// #VMEXIT(NPF), APM vol. 2 §15.25.6.
    Npf {
        /// EXITINFO1, the error code of the fault, which tells of a fetch where L1 has what forbids one: EFER.NXE or CR4.SMEP,
        /// as for its own page faults.
        info: u64,
    },
    /// An EPT violation.
    Violation {
        /// The exit qualification.
        qualification: u64,
    },
    /// An EPT misconfiguration.
    Misconfiguration,
    /// L1's tables allow the access, and it is one to the frame that [`Tables::without_frame`] leaves out.
    ApicAccess(ApicAccess),
    /// L1's tables allow the access, which is to set a dirty flag, and L1 has such ones noted first ([`Tables::logging`]).
    Unlogged,
}

/// Why L1's tables refuse an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// An entry is not present, or cannot be read.
    Absent,
    /// An entry is broken.
    Broken,
    /// The entries together allow no more than this.
    Rights(Grant),
}

impl NestedAccess {
    /// Whether rights that were collected in `role` allow the access.
    #[inline]
    pub(crate) const fn passes(&self, role: Role, grant: Grant) -> bool {
        // An NPT page that is not the user's is nobody's.
        (role.is_ept() || grant.has(Grant::U)) && self.is_allowed(grant)
    }

    /// What L1 hears when its tables allow the access, to the frame that is left out.
    #[cold]
    pub(crate) const fn to_left_out(self) -> L1Fault {
        let linear = violation::LINEAR | violation::FINAL;
        L1Fault::ApicAccess(ApicAccess {
            offset: self.gpa as u16 & 0xfff,
            write: self.write,
            fetch: self.fetch,
            linear: self.told & linear == linear,
        })
    }

    /// What L1 hears when tables of `role` refuse the access.
    #[cold]
    pub(crate) fn refused(&self, role: Role, why: Refusal) -> L1Fault {
        if role.is_ept() {
            let rights = match why {
                Refusal::Broken => return L1Fault::Misconfiguration,
                // Bits 5:3 are the AND of all entries on the way (SDM vol. 3C table 28-7), and an
                // entry that is absent allows nothing.
                Refusal::Absent => 0,
                Refusal::Rights(grant) => grant.as_ept() << violation::RIGHTS_SHIFT,
            };
            let read = if self.read { violation::READ } else { 0 };
            let write = if self.write { violation::WRITE } else { 0 };
            let fetch = if self.fetch { violation::FETCH } else { 0 };
            return L1Fault::Violation { qualification: self.told | rights | read | write | fetch };
        }
        let mut code = match why {
            // U is always set: every access of nested paging is a user's (APM vol. 2 §15.25.6).
            Refusal::Absent => pf::USER,
            Refusal::Broken => pf::USER | pf::PRESENT | pf::RSVD,
            Refusal::Rights(_) => pf::USER | pf::PRESENT,
        };
        code |= if self.write { pf::WRITE } else { 0 };
        code |= if self.fetch && self.tells_fetch { pf::FETCH } else { 0 };
        L1Fault::Npf { info: self.told | u64::from(code) }
    }
}
