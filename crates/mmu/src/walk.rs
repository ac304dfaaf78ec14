//! The guest's own page walk in software: 32-bit, PAE, 4-level and 5-level paging.
//!
//! Used by the emulator, by KVM_TRANSLATE and by [`crate::fetch`]. Permissions are those of CR0.WP,
//! NX, SMEP, SMAP and protection keys (SDM vol. 3A §4.6, APM vol. 2 §5.6); accessed and dirty bits
//! are set in guest memory as hardware sets them (SDM vol. 3A §4.8).
//!
//! Why accessed and dirty bits are set by compare-and-exchange: the guest's other CPUs change the same entry, to withdraw
//! it for instance. A plain store would bring back what was just taken away. When the entry has changed, the walk begins
//! anew, since everything below it may have.

use x86::exception::pf;
use x86::{Cr0, Cr4, Direction, Exception, Gpa};

use crate::format::ADDRESS;
use crate::role::{AddressSpace, PagingContext, Role};
use crate::source::{A, D, NX, P, U, W};

/// Guest-physical memory as a walk sees it.
pub trait GuestMemory {
    /// Why memory cannot be read, as the caller wants to hear it.
    type Error;
    /// The aligned 8 bytes at `gpa`.
    fn read_u64(&self, gpa: Gpa) -> Result<u64, Self::Error>;
    /// The aligned 4 bytes at `gpa`.
    fn read_u32(&self, gpa: Gpa) -> Result<u32, Self::Error>;
    /// Atomically replaces `old` by `new` in the aligned 8 bytes at `gpa`.
    fn cmpxchg_u64(&self, gpa: Gpa, old: u64, new: u64) -> Result<Swap, Self::Error>;
    /// Atomically replaces `old` by `new` in the aligned 4 bytes at `gpa`.
    fn cmpxchg_u32(&self, gpa: Gpa, old: u32, new: u32) -> Result<Swap, Self::Error>;
}

/// What became of a compare-and-exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// The new value stands.
    Done,
    /// Another value stood there.
    Changed,
    /// The memory is read-only: a ROM. Its accessed and dirty bits are left as they are.
    ReadOnly,
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// A read of data.
    Read,
    /// A write of data.
    Write,
    /// A fetch of instructions.
    Fetch,
}

/// An access to be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Read, write or fetch.
    pub kind: AccessKind,
    /// A supervisor access whatever the CPL is: to descriptor tables, the TSS, on event delivery.
    pub implicit: bool,
    /// The entries on the way are marked accessed, and dirty, as hardware does it.
    pub marks: bool,
}

impl Access {
    /// A data read by the program.
    pub const READ: Self = Self { kind: AccessKind::Read, implicit: false, marks: true };
    /// A data write by the program.
    pub const WRITE: Self = Self { kind: AccessKind::Write, implicit: false, marks: true };
    /// An instruction fetch.
    pub const FETCH: Self = Self { kind: AccessKind::Fetch, implicit: false, marks: true };
}

/// A data access by the program.
impl From<Direction> for Access {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Read => Self::READ,
            Direction::Write => Self::WRITE,
        }
    }
}

/// Where a linear address leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Guest-physical address of the byte.
    pub gpa: Gpa,
    /// log2 of the page's size: 12, 21, 22, 30; 12 without paging.
    pub page_shift: u32,
    /// R/W is set at every level.
    pub writable: bool,
    /// U/S is set at every level.
    pub user: bool,
    /// Instructions may be fetched, as far as NX goes.
    pub exec: bool,
}

/// Why there is no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkError<E> {
    /// The guest's tables refuse: #PF with its error code and address.
    Fault(Exception),
    /// The address is not canonical: #GP or #SS, as the instruction says.
    NonCanonical,
    /// A paging entry at `gpa` cannot be read or updated.
    Memory {
        /// Where the entry is.
        gpa: Gpa,
        /// Why it cannot.
        error: E,
    },
}

/// Most entries that one walk can lose races for before it starts to look like a livelock.
const RESTARTS: u32 = 64;

/// Translates and checks like [`translate`], but leaves guest memory as it is: for KVM_TRANSLATE
/// and debuggers.
pub fn probe<M: GuestMemory + ?Sized>(
    memory: &M,
    context: &PagingContext,
    va: u64,
    access: Access,
) -> Result<Translation, WalkError<M::Error>> {
    translate(memory, context, va, Access { marks: false, ..access })
}

/// Translates `va`, checks the access, and sets accessed and dirty bits.
///
/// Without paging the address itself comes back, truncated to 32 bits outside long mode.
pub fn translate<M: GuestMemory + ?Sized>(
    memory: &M,
    context: &PagingContext,
    va: u64,
    access: Access,
) -> Result<Translation, WalkError<M::Error>> {
    let va = context.linear(va);
    // Without paging there are no entries that could refuse the access or be marked.
    if !context.is_paging() {
        let gpa = Gpa(va);
        return Ok(Translation { gpa, page_shift: 12, writable: true, user: true, exec: true });
    }
    // The CPU looks at the form before it walks: such an address is never #PF.
    if !context.is_canonical(va) {
        return Err(WalkError::NonCanonical);
    }
    // SMM decides which memory is read, and not how.
    let role = Role::of(context, AddressSpace::Main);
    let walker = Walker { memory, context, role, va, access };
    for _ in 0..RESTARTS {
        let found = if role.is_narrow() { walker.legacy() } else { walker.wide() };
        match found {
            Err(Stop::Restart) => {}
            Err(Stop::Error(error)) => return Err(error),
            Ok(translation) => return Ok(translation),
        }
    }
    // The entries never held still: a spurious fault makes the guest try the access again.
    Err(walker.fault(0))
}

enum Stop<E> {
    Error(WalkError<E>),
    /// An entry changed while it was updated.
    Restart,
}

struct Walker<'a, M: ?Sized> {
    memory: &'a M,
    context: &'a PagingContext,
    /// How entries are read.
    role: Role,
    va: u64,
    access: Access,
}

impl<M: GuestMemory + ?Sized> Walker<'_, M> {
    fn is_user(&self) -> bool {
        self.context.cpl == 3 && !self.access.implicit
    }

    fn is_write(&self) -> bool {
        self.access.kind == AccessKind::Write
    }

    fn is_fetch(&self) -> bool {
        self.access.kind == AccessKind::Fetch
    }

    fn fault<E>(&self, bits: u32) -> WalkError<E> {
        // W/R and U/S tell of the access and not of the entries (SDM vol. 3A §4.7).
        let mut code = bits;
        if self.is_write() {
            code |= pf::WRITE;
        }
        if self.is_user() {
            code |= pf::USER;
        }
        // The fetch bit exists only where something can forbid fetching.
        if self.is_fetch() && (self.role.nx() || self.context.cr4.contains(Cr4::SMEP)) {
            code |= pf::FETCH;
        }
        WalkError::Fault(Exception::pf(self.va, code))
    }

    fn refuse<T, E>(&self, bits: u32) -> Result<T, Stop<E>> {
        Err(Stop::Error(self.fault(bits)))
    }

    /// PAE, 4-level and 5-level paging: 8-byte entries, 9 bits of address each.
    fn wide(&self) -> Result<Translation, Stop<M::Error>> {
        let root = self.role;
        // Under PAE paging the four entries that CR3 leads to are a level of their own.
        let mut level = if root.is_long() { root.level() } else { 3 };
        let mut table = root.base(self.context.cr3);
        let mut path = Path::new();
        // Rights are what all levels grant; one level is enough to forbid a fetch.
        let (mut granted, mut forbidden) = (W | U, 0);
        loop {
            let role = root.at_level(level);
            let shift = 12 + 9 * (u32::from(level) - 1);
            let pdpte = !root.is_long() && level == 3;
            // PAE paging has 32 address bits, of which two are left for the top.
            let index = (self.va >> shift) & if pdpte { 3 } else { 511 };
            let gpa = Gpa(table.wrapping_add(index * 8));
            let entry = self.read(gpa, self.memory.read_u64(gpa))?;
            // Of an entry that is not present all other bits are the guest's own.
            if entry & P == 0 {
                return self.refuse(0);
            }
            let leaf = role.is_leaf(entry);
            // Reserved bits come before rights: the CPU meets them on its way down, the rights
            // count at the leaf.
            if entry & role.reserved(leaf) != 0 {
                return self.refuse(pf::PRESENT | pf::RSVD);
            }
            // PDPTEs of PAE paging have neither rights nor an accessed bit (SDM vol. 3A §4.4.1).
            if !pdpte {
                granted &= entry;
                forbidden |= entry & NX;
                path.push(gpa, entry);
            }
            if leaf {
                let key = (entry >> 59) as u32 & 15;
                // Rights before bits: an access that faults must leave no dirty bit behind.
                self.permit(granted, forbidden, key)?;
                self.mark_used(&path)?;
                let within = (1u64 << shift) - 1;
                return Ok(Translation {
                    // Bit 12 of a large entry is PAT and no address.
                    gpa: Gpa((entry & ADDRESS & !within) | (self.va & within)),
                    page_shift: shift,
                    writable: granted & W != 0,
                    user: granted & U != 0,
                    exec: forbidden == 0,
                });
            }
            table = entry & ADDRESS;
            level -= 1;
        }
    }

    /// 32-bit paging: 4-byte entries, 10 bits of address each, 4 MiB pages with CR4.PSE.
    fn legacy(&self) -> Result<Translation, Stop<M::Error>> {
        let (role, mut path) = (self.role, Path::new());
        let pde_at = Gpa(role.base(self.context.cr3) | ((self.va >> 22) << 2));
        let pde = u64::from(self.read(pde_at, self.memory.read_u32(pde_at))?);
        if pde & P == 0 {
            return self.refuse(0);
        }
        path.push(pde_at, pde);
        // Without CR4.PSE bit 7 of a PDE is ignored.
        if role.is_leaf(pde) {
            if pde & role.reserved_in_leaf() != 0 {
                return self.refuse(pf::PRESENT | pf::RSVD);
            }
            self.permit(pde, 0, 0)?;
            self.mark_used_legacy(&path)?;
            return Ok(Translation {
                gpa: Gpa(role.leaf_frame(pde, 0).gpa().0 | (self.va & 0x003f_ffff)),
                page_shift: 22,
                writable: pde & W != 0,
                user: pde & U != 0,
                exec: true,
            });
        }
        // A table's address has 32 bits here, whatever the guest's width is.
        let pte_at = Gpa((pde & 0xffff_f000) | ((self.va >> 12 & 1023) << 2));
        let pte = u64::from(self.read(pte_at, self.memory.read_u32(pte_at))?);
        if pte & P == 0 {
            return self.refuse(0);
        }
        path.push(pte_at, pte);
        let granted = pde & pte;
        self.permit(granted, 0, 0)?;
        self.mark_used_legacy(&path)?;
        Ok(Translation {
            gpa: Gpa((pte & 0xffff_f000) | (self.va & 0xfff)),
            page_shift: 12,
            writable: granted & W != 0,
            user: granted & U != 0,
            exec: true,
        })
    }

    fn read<T>(&self, gpa: Gpa, value: Result<T, M::Error>) -> Result<T, Stop<M::Error>> {
        value.map_err(|error| Stop::Error(WalkError::Memory { gpa, error }))
    }

    /// Whether the access is allowed by W and U of `granted`, NX of `forbidden`, and the key.
    fn permit(&self, granted: u64, forbidden: u64, key: u32) -> Result<(), Stop<M::Error>> {
        let context = self.context;
        let user_page = granted & U != 0;
        // Where a write needs R/W: user mode always, supervisor mode with CR0.WP.
        let guarded = self.is_user() || context.cr0.contains(Cr0::WP);
        let mut refused = self.is_user() && !user_page;
        refused |= self.is_write() && granted & W == 0 && guarded;
        refused |= self.is_fetch() && forbidden != 0;
        // SMEP and SMAP guard the supervisor from pages of the user.
        if !self.is_user() && user_page {
            if self.is_fetch() {
                refused |= context.cr4.contains(Cr4::SMEP);
            } else {
                // AC excuses what the program asks for; an implicit access of the CPU is not asked
                // for.
                let excused = context.rflags_ac && !self.access.implicit;
                refused |= context.cr4.contains(Cr4::SMAP) && !excused;
            }
        }
        let mut bits = pf::PRESENT;
        // Keys exist in long mode alone, and only for user pages and data (SDM vol. 3A §4.6.2).
        let keys = context.cr4.contains(Cr4::PKE) && context.is_long_mode();
        if keys && user_page && !self.is_fetch() {
            let rights = context.pkru >> (2 * key);
            // Write-disable binds the supervisor only with CR0.WP, as R/W does; access-disable
            // always.
            if rights & 1 != 0 || (rights & 2 != 0 && self.is_write() && guarded) {
                refused = true;
                bits |= pf::PK;
            }
        }
        if refused { self.refuse(bits) } else { Ok(()) }
    }

    /// Sets what accessed and dirty bits are missing along the path.
    fn mark_used(&self, path: &Path) -> Result<(), Stop<M::Error>> {
        self.update(path, |gpa, old, new| self.memory.cmpxchg_u64(gpa, old, new))
    }

    fn mark_used_legacy(&self, path: &Path) -> Result<(), Stop<M::Error>> {
        self.update(path, |gpa, old, new| self.memory.cmpxchg_u32(gpa, old as u32, new as u32))
    }

    fn update(
        &self,
        path: &Path,
        swap: impl Fn(Gpa, u64, u64) -> Result<Swap, M::Error>,
    ) -> Result<(), Stop<M::Error>> {
        if !self.access.marks {
            return Ok(());
        }
        let dirty = if self.is_write() { D } else { 0 };
        for (n, &(gpa, entry)) in path.steps.iter().enumerate().take(path.count) {
            // Only the last entry has a dirty bit that means something (SDM vol. 3A §4.8).
            let last = n.wrapping_add(1) == path.count;
            let wanted = entry | A | if last { dirty } else { 0 };
            if wanted != entry {
                // Exchanged, since another CPU of the guest may have taken the entry away
                // meanwhile.
                match self.read(gpa, swap(gpa, entry, wanted))? {
                    Swap::Done | Swap::ReadOnly => {}
                    Swap::Changed => return Err(Stop::Restart),
                }
            }
        }
        Ok(())
    }
}

/// The entries of a walk from the top down.
struct Path {
    steps: [(Gpa, u64); 5],
    count: usize,
}

impl Path {
    fn new() -> Self {
        Self { steps: [(Gpa(0), 0); 5], count: 0 }
    }

    fn push(&mut self, gpa: Gpa, entry: u64) {
        // Five levels at most, so nothing is lost; the check spares a panic.
        if let Some(step) = self.steps.get_mut(self.count) {
            *step = (gpa, entry);
            self.count += 1;
        }
    }
}
