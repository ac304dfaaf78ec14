//! The guest's own page walk in software: 32-bit, PAE, 4-level and 5-level paging.
//!
//! Used by the emulator, by KVM_TRANSLATE and by [`crate::fetch`]. Permissions are those of CR0.WP,
//! NX, SMEP, SMAP and protection keys (SDM vol. 3A §4.6, APM vol. 2 §5.6); accessed and dirty bits
//! are set in guest memory as hardware sets them (SDM vol. 3A §4.8).

use x86::exception::pf;
use x86::{Exception, Gpa};

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
    /// The same for 4 bytes.
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

/// The registers that govern a walk, and what the guest's CPUID says about entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagingContext {
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER.
    pub efer: u64,
    /// RFLAGS.AC.
    pub rflags_ac: bool,
    /// Current privilege level.
    pub cpl: u8,
    /// PKRU.
    pub pkru: u32,
    /// The guest's physical address width (CPUID 8000_0008h EAX[7:0]); 0 is taken for 52.
    pub maxphyaddr: u8,
    /// The guest has 1 GiB pages (CPUID 8000_0001h EDX[26]).
    pub gbpages: bool,
    /// AMD's rule: bit 8 of the upper levels' table pointers is reserved (APM vol. 2 §5.3.3).
    pub amd: bool,
}

const CR0_WP: u64 = 1 << 16;
const CR0_PG: u64 = 1 << 31;
const CR4_PSE: u64 = 1 << 4;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const CR4_SMEP: u64 = 1 << 20;
const CR4_SMAP: u64 = 1 << 21;
const CR4_PKE: u64 = 1 << 22;
const EFER_LMA: u64 = 1 << 10;
const EFER_NXE: u64 = 1 << 11;

const P: u64 = 1 << 0;
const W: u64 = 1 << 1;
const U: u64 = 1 << 2;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Data read.
    Read,
    /// Data write.
    Write,
    /// Instruction fetch.
    Fetch,
}

/// An access to be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Read, write or fetch.
    pub kind: AccessKind,
    /// A supervisor access whatever the CPL is: to descriptor tables, the TSS, on event delivery.
    pub implicit: bool,
}

impl Access {
    /// A data read by the program.
    pub const READ: Self = Self { kind: AccessKind::Read, implicit: false };
    /// A data write by the program.
    pub const WRITE: Self = Self { kind: AccessKind::Write, implicit: false };
    /// An instruction fetch.
    pub const FETCH: Self = Self { kind: AccessKind::Fetch, implicit: false };
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
        /// Why.
        error: E,
    },
}

impl PagingContext {
    /// Whether paging is on.
    #[inline]
    pub fn is_paging(&self) -> bool {
        self.cr0 & CR0_PG != 0
    }

    /// Whether long mode is active.
    #[inline]
    pub fn is_long_mode(&self) -> bool {
        self.efer & EFER_LMA != 0
    }

    fn shape(&self) -> Shape {
        if self.is_long_mode() {
            if self.cr4 & CR4_LA57 != 0 { Shape::Level5 } else { Shape::Level4 }
        } else if self.cr4 & CR4_PAE != 0 {
            Shape::Pae
        } else {
            Shape::Legacy
        }
    }

    /// Whether `va` is canonical for the paging mode (always so outside long mode).
    pub fn is_canonical(&self, va: u64) -> bool {
        let unused = match self.shape() {
            Shape::Level4 => 16,
            Shape::Level5 => 7,
            _ => return true,
        };
        ((va << unused) as i64 >> unused) as u64 == va
    }

    /// Bits of an 8-byte entry above the physical address width.
    fn beyond(&self) -> u64 {
        match self.maxphyaddr {
            width @ 32..=51 => ADDRESS & (u64::MAX << width),
            _ => 0,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Legacy,
    Pae,
    Level4,
    Level5,
}

/// Most entries that one walk can lose races for before it starts to look like a livelock.
const RESTARTS: u32 = 64;

/// Translates `va`, checks the access, and sets accessed and dirty bits.
///
/// Without paging the address itself comes back, truncated to 32 bits outside long mode.
pub fn translate<M: GuestMemory + ?Sized>(
    memory: &M,
    context: &PagingContext,
    va: u64,
    access: Access,
) -> Result<Translation, WalkError<M::Error>> {
    walk(memory, context, va, access, true)
}

/// Translates and checks like [`translate`], but leaves guest memory as it is: for KVM_TRANSLATE
/// and debuggers.
pub fn probe<M: GuestMemory + ?Sized>(
    memory: &M,
    context: &PagingContext,
    va: u64,
    access: Access,
) -> Result<Translation, WalkError<M::Error>> {
    walk(memory, context, va, access, false)
}

fn walk<M: GuestMemory + ?Sized>(
    memory: &M,
    context: &PagingContext,
    va: u64,
    access: Access,
    update: bool,
) -> Result<Translation, WalkError<M::Error>> {
    let va = if context.is_long_mode() { va } else { va & 0xffff_ffff };
    if !context.is_paging() {
        let gpa = Gpa(va);
        return Ok(Translation { gpa, page_shift: 12, writable: true, user: true, exec: true });
    }
    if !context.is_canonical(va) {
        return Err(WalkError::NonCanonical);
    }
    let walker = Walker { memory, context, va, access, update };
    for _ in 0..RESTARTS {
        let found = match context.shape() {
            Shape::Legacy => walker.legacy(),
            shape => walker.wide(shape),
        };
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
    va: u64,
    access: Access,
    update: bool,
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

    fn has_nx(&self) -> bool {
        self.context.efer & EFER_NXE != 0 && self.context.cr4 & CR4_PAE != 0
    }

    fn fault<E>(&self, bits: u32) -> WalkError<E> {
        let mut code = bits;
        if self.is_write() {
            code |= pf::WRITE;
        }
        if self.is_user() {
            code |= pf::USER;
        }
        // The fetch bit exists only where something can forbid fetching.
        if self.is_fetch() && (self.has_nx() || self.context.cr4 & CR4_SMEP != 0) {
            code |= pf::FETCH;
        }
        WalkError::Fault(Exception::pf(self.va, code))
    }

    fn refuse<T, E>(&self, bits: u32) -> Result<T, Stop<E>> {
        Err(Stop::Error(self.fault(bits)))
    }

    /// Reserved bits of an 8-byte entry at `level`, where `leaf` says whether it ends the walk.
    fn reserved(&self, shape: Shape, level: u32, leaf: bool) -> u64 {
        let context = self.context;
        let mut bits = context.beyond();
        if shape == Shape::Pae {
            if level == 3 {
                // A PDPTE: only P, PWT, PCD and the address mean something (SDM vol. 3A §4.4.1).
                // Bit 5 is let pass: QEMU's processor, under TDP, sets it as the
                // accessed bit, and the guest's own accesses go on.
                return bits | 0x7ff0_0000_0000_01c6 | NX;
            }
            bits |= 0x7ff0_0000_0000_0000;
        }
        if context.efer & EFER_NXE == 0 {
            bits |= NX;
        }
        match (level, leaf) {
            (1, _) => {}
            (2, true) => bits |= 0x001f_e000,
            (3, true) => {
                bits |= 0x3fff_e000;
                if !context.gbpages {
                    bits |= PS;
                }
            }
            (4.., _) => bits |= PS | if context.amd { 1 << 8 } else { 0 },
            (3, false) if context.amd => bits |= 1 << 8,
            _ => {}
        }
        bits
    }

    /// PAE, 4-level and 5-level paging: 8-byte entries, 9 bits of address each.
    fn wide(&self, shape: Shape) -> Result<Translation, Stop<M::Error>> {
        let top = match shape {
            Shape::Level5 => 5,
            Shape::Level4 => 4,
            _ => 3,
        };
        let mut table = match shape {
            Shape::Pae => self.context.cr3 & 0xffff_ffe0,
            _ => self.context.cr3 & ADDRESS & !self.context.beyond(),
        };
        let mut path = Path::new();
        let (mut granted, mut forbidden) = (W | U, 0);
        let mut level = top;
        loop {
            let shift = 12 + 9 * (level - 1);
            let index =
                (self.va >> shift) & if shape == Shape::Pae && level == 3 { 3 } else { 511 };
            let gpa = Gpa(table.wrapping_add(index * 8));
            let entry = self.read(gpa, self.memory.read_u64(gpa))?;
            if entry & P == 0 {
                return self.refuse(0);
            }
            let pdpte = shape == Shape::Pae && level == 3;
            let leaf = level == 1 || (entry & PS != 0 && level <= 3 && !pdpte);
            if entry & self.reserved(shape, level, leaf) != 0 {
                return self.refuse(pf::PRESENT | pf::RSVD);
            }
            if !pdpte {
                granted &= entry;
                forbidden |= entry & NX;
                path.push(gpa, entry);
            }
            if leaf {
                let key = (entry >> 59) as u32 & 15;
                self.permit(granted, forbidden, key)?;
                self.settle(&path)?;
                let within = (1u64 << shift) - 1;
                return Ok(Translation {
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
        let mut path = Path::new();
        let pde_at = Gpa((self.context.cr3 & 0xffff_f000) | ((self.va >> 22) << 2));
        let pde = u64::from(self.read(pde_at, self.memory.read_u32(pde_at))?);
        if pde & P == 0 {
            return self.refuse(0);
        }
        path.push(pde_at, pde);
        if pde & PS != 0 && self.context.cr4 & CR4_PSE != 0 {
            // PSE-36: bits 20:13 are address bits 39:32, as far as the guest has them; bit 21 is
            // reserved (SDM vol. 3A §4.3).
            let width = match self.context.maxphyaddr {
                width @ 32..=39 => u32::from(width),
                _ => 40,
            };
            let high = ((1u64 << (width - 32)) - 1) << 13;
            if pde & 0x003f_e000 & !high != 0 {
                return self.refuse(pf::PRESENT | pf::RSVD);
            }
            self.permit(pde, 0, 0)?;
            self.settle_legacy(&path)?;
            let page = (pde & 0xffc0_0000) | ((pde & high) >> 13 << 32);
            return Ok(Translation {
                gpa: Gpa(page | (self.va & 0x003f_ffff)),
                page_shift: 22,
                writable: pde & W != 0,
                user: pde & U != 0,
                exec: true,
            });
        }
        let pte_at = Gpa((pde & 0xffff_f000) | ((self.va >> 12 & 1023) << 2));
        let pte = u64::from(self.read(pte_at, self.memory.read_u32(pte_at))?);
        if pte & P == 0 {
            return self.refuse(0);
        }
        path.push(pte_at, pte);
        let granted = pde & pte;
        self.permit(granted, 0, 0)?;
        self.settle_legacy(&path)?;
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
        let guarded = self.is_user() || context.cr0 & CR0_WP != 0;
        let mut refused = self.is_user() && !user_page;
        refused |= self.is_write() && granted & W == 0 && guarded;
        refused |= self.is_fetch() && forbidden != 0;
        if !self.is_user() && user_page {
            if self.is_fetch() {
                refused |= context.cr4 & CR4_SMEP != 0;
            } else {
                let excused = context.rflags_ac && !self.access.implicit;
                refused |= context.cr4 & CR4_SMAP != 0 && !excused;
            }
        }
        let mut bits = pf::PRESENT;
        let keys = context.cr4 & CR4_PKE != 0 && context.is_long_mode();
        if keys && user_page && !self.is_fetch() {
            let rights = context.pkru >> (2 * key);
            if rights & 1 != 0 || (rights & 2 != 0 && self.is_write() && guarded) {
                refused = true;
                bits |= pf::PK;
            }
        }
        if refused { self.refuse(bits) } else { Ok(()) }
    }

    /// Sets what accessed and dirty bits are missing along the path.
    fn settle(&self, path: &Path) -> Result<(), Stop<M::Error>> {
        self.update(path, |gpa, old, new| self.memory.cmpxchg_u64(gpa, old, new))
    }

    fn settle_legacy(&self, path: &Path) -> Result<(), Stop<M::Error>> {
        self.update(path, |gpa, old, new| self.memory.cmpxchg_u32(gpa, old as u32, new as u32))
    }

    fn update(
        &self,
        path: &Path,
        swap: impl Fn(Gpa, u64, u64) -> Result<Swap, M::Error>,
    ) -> Result<(), Stop<M::Error>> {
        if !self.update {
            return Ok(());
        }
        let dirty = if self.is_write() { D } else { 0 };
        for (n, &(gpa, entry)) in path.steps.iter().enumerate().take(path.count) {
            let last = n.wrapping_add(1) == path.count;
            let wanted = entry | A | if last { dirty } else { 0 };
            if wanted != entry {
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
        if let Some(step) = self.steps.get_mut(self.count) {
            *step = (gpa, entry);
            self.count += 1;
        }
    }
}
