//! A second walker of guest tables, written from the manual's tables instead of from the first one, and memory for
//! both.

use std::cell::RefCell;
use std::collections::BTreeMap;

use gannet_mmu::walk::{AccessKind, probe};
use gannet_mmu::{Access, GuestMemory, PagingContext, Swap, WalkError, translate};
use x86::{Cr4, Exception, Gpa};

const P: u64 = 1;
const W: u64 = 2;
const U: u64 = 4;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;

/// Sparse memory in 4-byte cells; a page in `rom` refuses writes, one in `holes` does not exist.
#[derive(Clone, Default, Debug)]
pub struct Memory {
    pub cells: RefCell<BTreeMap<u64, u32>>,
    pub rom: Vec<u64>,
    pub holes: Vec<u64>,
    /// The first compare-and-exchange finds that another CPU was faster, and this value.
    pub race: RefCell<Option<(u64, u64)>>,
}

impl Memory {
    pub fn cell(&self, at: u64) -> u32 {
        self.cells.borrow().get(&at).copied().unwrap_or(0)
    }
    pub fn set32(&self, at: u64, value: u32) {
        self.cells.borrow_mut().insert(at, value);
    }
    pub fn set(&self, at: u64, value: u64) {
        self.set32(at, value as u32);
        self.set32(at + 4, (value >> 32) as u32);
    }
    pub fn get(&self, at: u64) -> u64 {
        u64::from(self.cell(at)) | u64::from(self.cell(at + 4)) << 32
    }
}

impl GuestMemory for Memory {
    type Error = ();
    fn read_u64(&self, gpa: Gpa) -> Result<u64, ()> {
        assert_eq!(gpa.0 & 7, 0);
        if self.holes.contains(&(gpa.0 >> 12)) { Err(()) } else { Ok(self.get(gpa.0)) }
    }
    fn read_u32(&self, gpa: Gpa) -> Result<u32, ()> {
        assert_eq!(gpa.0 & 3, 0);
        if self.holes.contains(&(gpa.0 >> 12)) { Err(()) } else { Ok(self.cell(gpa.0)) }
    }
    fn cmpxchg_u64(&self, gpa: Gpa, old: u64, new: u64) -> Result<Swap, ()> {
        if let Some((at, value)) = self.race.take() {
            self.set(at, value);
        }
        if self.rom.contains(&(gpa.0 >> 12)) {
            return Ok(Swap::ReadOnly);
        }
        if self.get(gpa.0) != old {
            return Ok(Swap::Changed);
        }
        self.set(gpa.0, new);
        Ok(Swap::Done)
    }
    fn cmpxchg_u32(&self, gpa: Gpa, old: u32, new: u32) -> Result<Swap, ()> {
        if self.cell(gpa.0) != old {
            return Ok(Swap::Changed);
        }
        self.set32(gpa.0, new);
        Ok(Swap::Done)
    }
}

/// One level: address bits it uses, bytes per entry, and which bits are reserved in a pointer and
/// in a leaf (`None`: cannot be a leaf).
struct Level {
    shift: u32,
    bits: u32,
    pointer: u64,
    leaf: Option<u64>,
}

fn span(high: u32, low: u32) -> u64 {
    (low..=high).fold(0, |m, b| m | 1 << b)
}

/// Gives the translated address or the #PF code, per the manual's tables; `None` for non-canonical.
/// `path` gets the addresses of the entries read.
fn reference(
    memory: &Memory,
    c: &PagingContext,
    va: u64,
    access: Access,
    path: &mut Vec<u64>,
) -> Option<Result<u64, u32>> {
    let on = |register: u64, bit: u32| register >> bit & 1 == 1;
    let (cr0, cr4, efer) = (c.cr0.bits(), c.cr4.bits(), c.efer.bits());
    let (long, pae, nxe) = (on(efer, 10), on(cr4, 5), on(efer, 11));
    let five = on(cr4, 12) && long;
    let user = c.cpl == 3 && !access.implicit;
    let (write, fetch) = (access.kind == AccessKind::Write, access.kind == AccessKind::Fetch);
    let base = (if write { 2 } else { 0 })
        | (if user { 4 } else { 0 })
        | (if fetch && ((nxe && pae) || on(cr4, 20)) { 16 } else { 0 });
    let width = u32::from(c.maxphyaddr);
    let wide = span(51, width) | if nxe { 0 } else { NX };
    let amd8 = if c.amd { 1 << 8 } else { 0 };
    let no_giant = if c.gbpages { 0 } else { PS };
    let levels: Vec<Level> = if long {
        let top = if five { 57 } else { 48 };
        let sign = va >> (top - 1);
        if sign != 0 && sign != u64::MAX >> (top - 1) {
            return None;
        }
        let mut levels = vec![
            Level { shift: 39, bits: 9, pointer: wide | PS | amd8, leaf: None },
            Level {
                shift: 30,
                bits: 9,
                pointer: wide | amd8,
                leaf: Some(wide | span(29, 13) | no_giant),
            },
            Level { shift: 21, bits: 9, pointer: wide, leaf: Some(wide | span(20, 13)) },
            Level { shift: 12, bits: 9, pointer: 0, leaf: Some(wide) },
        ];
        if five {
            levels.insert(0, Level { shift: 48, bits: 9, pointer: wide | PS | amd8, leaf: None });
        }
        levels
    } else if pae {
        let wide = wide | span(62, 52);
        vec![
            Level {
                shift: 30,
                bits: 2,
                // Not bit 5: some CPUs set it, see `mmu::source`.
                pointer: span(63, width) | span(8, 6) | span(2, 1),
                leaf: None,
            },
            Level { shift: 21, bits: 9, pointer: wide, leaf: Some(wide | span(20, 13)) },
            Level { shift: 12, bits: 9, pointer: 0, leaf: Some(wide) },
        ]
    } else {
        let pse = on(cr4, 4);
        let top = width.min(40);
        let high = 1 << 21 | if top < 40 { span(20, top - 32 + 13) } else { 0 };
        vec![
            Level { shift: 22, bits: 10, pointer: 0, leaf: pse.then_some(high) },
            Level { shift: 12, bits: 10, pointer: 0, leaf: Some(0) },
        ]
    };
    let narrow = !long && !pae;
    let mut table = match (long, pae) {
        (true, _) => c.cr3 & span(51, 12),
        (false, true) => c.cr3 & span(31, 5),
        _ => c.cr3 & span(31, 12),
    };
    let (mut all, mut any) = (u64::MAX, 0);
    let count = levels.len();
    for (n, level) in levels.iter().enumerate() {
        let index = va >> level.shift & ((1 << level.bits) - 1);
        path.push(table + index * if narrow { 4 } else { 8 });
        let entry = if narrow {
            u64::from(memory.cell(table + index * 4))
        } else {
            memory.get(table + index * 8)
        };
        if entry & P == 0 {
            return Some(Err(base));
        }
        let last = n == count - 1;
        let is_leaf = last || (entry & PS != 0 && level.leaf.is_some());
        let reserved = if is_leaf { level.leaf.unwrap() } else { level.pointer };
        if entry & reserved != 0 {
            return Some(Err(base | 1 | 8));
        }
        let grants = level.bits != 2;
        if grants {
            all &= entry;
            any |= entry;
        }
        if !is_leaf {
            table = entry & if narrow { span(31, 12) } else { span(51, 12) };
            continue;
        }
        let (user_page, writable) = (all & U != 0, all & W != 0);
        let wp = on(cr0, 16);
        let mut allowed = match (user, write, fetch) {
            (true, false, false) => user_page,
            (true, true, _) => user_page && writable,
            (true, _, true) => user_page && !(any & NX != 0 && nxe && !narrow),
            (false, false, false) => true,
            (false, true, _) => writable || !wp,
            (false, _, true) => !(any & NX != 0 && nxe && !narrow || user_page && on(cr4, 20)),
        };
        if !user && user_page && !fetch && on(cr4, 21) && (!c.rflags_ac || access.implicit) {
            allowed = false;
        }
        let mut key_bit = 0;
        if on(cr4, 22) && long && user_page && !fetch {
            let key = (entry >> 59 & 15) as u32;
            let (ad, wd) = (c.pkru >> (2 * key) & 1 == 1, c.pkru >> (2 * key + 1) & 1 == 1);
            if ad || (wd && write && (user || wp)) {
                (allowed, key_bit) = (false, 32);
            }
        }
        if !allowed {
            return Some(Err(base | 1 | key_bit));
        }
        let within = span(level.shift - 1, 0);
        let mut page = entry & span(51, 12) & !within;
        if narrow {
            page = entry & span(31, 12) & !within;
            if level.shift == 22 {
                page |= (entry >> 13 & 0xff) << 32;
            }
        }
        return Some(Ok(page | va & within));
    }
    unreachable!()
}

/// Eight pages of tables, and an access through them.
#[derive(Clone, Debug)]
pub struct Case {
    /// Four for each page: at its first two places and its last two.
    pub entries: Vec<u64>,
    pub context: PagingContext,
    /// Which of these places each level takes.
    pub index: [u64; 5],
    pub offset: u64,
    pub kind: AccessKind,
    pub implicit: bool,
}

/// Both walkers say the same of a case.
pub fn agree(case: &Case) {
    let Case { entries, context, index, offset, kind, implicit } = case;
    let (context, offset, kind, implicit) = (*context, *offset, *kind, *implicit);
    let memory = Memory::default();
    let narrow = !context.cr4.contains(Cr4::PAE);
    let place = |n: u64| match n {
        0 => 0,
        1 => 1,
        2 => 510,
        _ => 511,
    };
    for (n, entry) in (0u64..).zip(entries) {
        let (page, at) = ((n / 4) << 12, n % 4);
        if narrow {
            let at = if at < 2 { at } else { 1020 + at };
            memory.set32(page + at * 4, *entry as u32);
        } else {
            memory.set(page + place(at) * 8, *entry);
        }
    }
    let va = if narrow {
        let ten = |n: u64| if n < 2 { n } else { 1020 + n };
        ten(index[0]) << 22 | ten(index[1]) << 12 | offset
    } else if !context.efer.is_long() {
        index[0] << 30 | place(index[1]) << 21 | place(index[2]) << 12 | offset
    } else {
        let low = index.iter().fold(0, |va, i| va << 9 | place(*i)) << 12 | offset;
        let unused = if context.cr4.contains(Cr4::LA57) { 7 } else { 16 };
        ((low << unused) as i64 >> unused) as u64
    };
    let access = Access { kind, implicit, marks: true };
    let before = memory.clone();
    let mut path = Vec::new();
    let wanted = reference(&before, &context, va, access, &mut path);
    let probed = probe(&memory, &context, va, access);
    assert_eq!(&*memory.cells.borrow(), &*before.cells.borrow());
    // A table that is its own child may change under the walk: its accessed bit is another
    // level's reserved bit. Hardware does the same there; the reference does not.
    let mut once = path.clone();
    once.sort_unstable();
    once.dedup();
    let found = if once.len() == path.len() {
        let found = translate(&memory, &context, va, access);
        assert_eq!(probed, found);
        found
    } else {
        probed
    };
    match (wanted, found) {
        (Some(Ok(gpa)), Ok(found)) => assert_eq!(found.gpa.0, gpa),
        (Some(Err(code)), Err(WalkError::Fault(e))) => {
            assert_eq!(e, Exception::pf(va, code));
            assert_eq!(&*memory.cells.borrow(), &*before.cells.borrow());
        }
        (None, Err(WalkError::NonCanonical)) => {}
        (wanted, found) => panic!("{wanted:x?} against {found:x?}"),
    }
}
