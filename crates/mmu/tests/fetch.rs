//! Instruction bytes with interrupts off: hits honour every change that hardware would see.

mod mapped;
mod section;

use std::sync::atomic::Ordering;

use gannet_mmu::tdp::{FlushRemote, Thoroughness};
use gannet_mmu::{CodeFetch, CodeMode, Format, PagingContext, Tdp};
use host::page::Page;
use section::section;
use x86::{Cr0, Cr4, Direction, Efer, Gfn};

struct Nobody;
// SAFETY: nothing looks at the tables without a lock beside this thread.
unsafe impl FlushRemote for Nobody {
    fn flush_remote(&self) {}
}

const P: u64 = 1 | 1 << 5;

/// Guest memory of 16 pages, frame n backed by `pages[n]`; long-mode tables in frames 1 to 4 that
/// map VA 0x1000 to frame 8 and VA 0x2000 to frame 9.
struct Guest {
    tdp: Tdp<()>,
    pages: Vec<Page>,
    fetch: CodeFetch,
    context: PagingContext,
}

impl Guest {
    fn new() -> Self {
        let pages: Vec<Page> = (0..16).map(|_| Page::zeroed().unwrap()).collect();
        let guest = Self {
            tdp: Tdp::new(Format::npt(4, 0), ()).unwrap(),
            fetch: CodeFetch::new(),
            context: PagingContext {
                cr0: Cr0::PG | Cr0::PE,
                cr3: 0x1000,
                cr4: Cr4::PAE,
                efer: Efer::LME | Efer::LMA | Efer::NXE,
                maxphyaddr: 40,
                ..PagingContext::default()
            },
            pages,
        };
        (0..16).for_each(|gfn| guest.map(gfn, gfn));
        guest.set(1, 0, 0x2000 | P);
        guest.set(2, 0, 0x3000 | P);
        guest.set(3, 0, 0x4000 | P);
        guest.set(4, 1, 0x8000 | P);
        guest.set(4, 2, 0x9000 | P);
        for page in [8, 9, 10] {
            for word in 0..512 {
                guest.set(page, word, 0x0101_0101_0101_0100 * page as u64 + word as u64);
            }
        }
        guest
    }

    fn map(&self, gfn: u64, page: u64) {
        mapped::map(&self.tdp, Gfn(gfn), &self.pages[page as usize], Direction::Read);
    }

    fn zap(&self, gfn: u64) {
        self.tdp.zapper().zap(Gfn(gfn), Gfn(gfn + 1), Thoroughness::Leaves, &Nobody);
    }

    fn set(&self, page: usize, word: usize, value: u64) {
        self.pages[page].table()[word].store(value, Ordering::Relaxed);
    }

    fn fetch(&mut self, rip: u64) -> Option<Vec<u8>> {
        let Self { tdp, fetch, context, .. } = self;
        let found = section(|s| fetch.fetch(context, rip, &tdp.view(s)));
        found.map(|f| f.bytes[..f.len].to_vec())
    }

    fn expect(&self, page: usize, offset: usize) -> Option<Vec<u8>> {
        let bytes = self.pages[page].bytes();
        let end = (offset + 16).min(4096);
        Some((offset..end).map(|n| bytes[n].load(Ordering::Relaxed)).collect())
    }
}

#[test]
fn bytes_come_from_any_offset_and_end_with_the_page() {
    let mut guest = Guest::new();
    for offset in (0..40).chain(4060..4096) {
        for _ in 0..2 {
            assert_eq!(guest.fetch(0x1000 + offset as u64), guest.expect(8, offset), "{offset}");
        }
    }
}

#[test]
fn a_hit_needs_no_walk_and_a_stranger_is_no_hit() {
    let mut guest = Guest::new();
    let c = guest.context;
    let mode = CodeMode { cr0: c.cr0, cr3: c.cr3, cr4: c.cr4, efer: c.efer, cpl: 0 };
    let hit = |guest: &Guest, mode: &CodeMode, rip| {
        let found = section(|s| guest.fetch.first_bytes(mode, rip, &guest.tdp.view(s)));
        found.map(|bytes| bytes.to_le_bytes().to_vec())
    };
    assert_eq!(hit(&guest, &mode, 0x1010), None);
    guest.fetch(0x1000);
    let first = guest.expect(8, 16).map(|bytes| bytes[..8].to_vec());
    assert_eq!(hit(&guest, &mode, 0x1010), first);
    assert_eq!(hit(&guest, &mode, 0x1ff8).map(|b| b.len()), Some(8));
    assert_eq!(hit(&guest, &mode, 0x1ff9), None);
    for other in [
        CodeMode { cr0: c.cr0 ^ Cr0::MP, ..mode },
        CodeMode { cr3: c.cr3 ^ 8, ..mode },
        CodeMode { cr4: c.cr4 ^ Cr4::SMEP, ..mode },
        CodeMode { efer: c.efer ^ Efer::SCE, ..mode },
        CodeMode { cpl: 3, ..mode },
    ] {
        assert_eq!(hit(&guest, &other, 0x1010), None);
    }
    assert_eq!((hit(&guest, &mode, 0x2010), hit(&guest, &mode, 0x5010)), (None, None));
}

#[test]
fn what_is_forgotten_is_walked_again() {
    let mut guest = Guest::new();
    let c = guest.context;
    let mode = CodeMode { cr0: c.cr0, cr3: c.cr3, cr4: c.cr4, efer: c.efer, cpl: 0 };
    guest.fetch(0x1000);
    let is_known = |guest: &Guest| {
        section(|s| guest.fetch.first_bytes(&mode, 0x1010, &guest.tdp.view(s))).is_some()
    };
    assert!(is_known(&guest));
    guest.fetch.forget();
    assert!(!is_known(&guest));
    assert_eq!(guest.fetch(0x1010), guest.expect(8, 16));
    assert!(is_known(&guest));
}

#[test]
fn code_that_is_rewritten_is_seen() {
    let mut guest = Guest::new();
    guest.fetch(0x1000);
    guest.set(8, 0, 0xa20f);
    assert_eq!(guest.fetch(0x1000).unwrap()[..2], [0x0f, 0xa2]);
}

#[test]
fn a_changed_paging_entry_is_honoured_at_every_level() {
    for (page, word) in [(1, 0), (2, 0), (3, 0), (4, 1)] {
        let mut guest = Guest::new();
        assert_eq!(guest.fetch(0x1010), guest.expect(8, 16));
        let entry = guest.pages[page].table()[word].load(Ordering::Relaxed);
        guest.set(page, word, 0);
        assert_eq!(guest.fetch(0x1010), None);
        guest.set(page, word, entry);
        assert_eq!(guest.fetch(0x1010), guest.expect(8, 16));
    }
    let mut guest = Guest::new();
    guest.fetch(0x1010);
    guest.set(4, 1, 0x9000 | P);
    assert_eq!(guest.fetch(0x1010), guest.expect(9, 16));
}

#[test]
fn what_the_guest_may_not_execute_is_not_fetched() {
    let mut guest = Guest::new();
    guest.fetch(0x1010);
    guest.context.cpl = 3;
    assert_eq!(guest.fetch(0x1010), None);
    guest.context.cpl = 0;
    guest.set(4, 1, 0x8000 | P | 1 << 63);
    assert_eq!(guest.fetch(0x1010), None);
    guest.context.efer -= Efer::NXE;
    assert_eq!(guest.fetch(0x1010), None);
}

#[test]
fn an_entry_that_was_never_accessed_is_left_to_the_slow_walk() {
    let mut guest = Guest::new();
    guest.set(4, 1, 0x8001);
    assert_eq!(guest.fetch(0x1010), None);
    assert_eq!(guest.pages[4].table()[1].load(Ordering::Relaxed), 0x8001);
}

#[test]
fn another_cr3_is_another_walk() {
    let mut guest = Guest::new();
    guest.fetch(0x1010);
    guest.set(10, 0, 0x2000 | P);
    guest.context.cr3 = 0xa000;
    assert_eq!(guest.fetch(0x1010), guest.expect(8, 16));
    guest.context.cr3 = 0xb000;
    assert_eq!(guest.fetch(0x1010), None);
}

#[test]
fn a_withdrawn_page_is_not_read_and_its_successor_is() {
    for gfn in [1, 2, 3, 4, 8] {
        let mut guest = Guest::new();
        assert_eq!(guest.fetch(0x1010), guest.expect(8, 16));
        guest.zap(gfn);
        assert_eq!(guest.fetch(0x1010), None, "{gfn}");
    }
    let mut guest = Guest::new();
    guest.fetch(0x1010);
    guest.zap(8);
    guest.map(8, 10);
    assert_eq!(guest.fetch(0x1010), guest.expect(10, 16));
}

#[test]
fn two_machines_never_share_what_is_remembered() {
    let (mut one, two) = (Guest::new(), Guest::new());
    one.fetch(0x1010);
    assert_ne!(one.tdp.generation(), two.tdp.generation());
    two.set(8, 2, 7);
    one.tdp = two.tdp;
    assert_eq!(one.fetch(0x1010).unwrap()[0], 7);
}

#[test]
fn every_paging_mode_is_served() {
    // No paging.
    let mut guest = Guest::new();
    guest.context = PagingContext { maxphyaddr: 40, ..PagingContext::default() };
    for _ in 0..2 {
        assert_eq!(guest.fetch(0x8010), guest.expect(8, 16));
    }
    guest.zap(8);
    assert_eq!(guest.fetch(0x8010), None);
    // 32-bit: directory in frame 5, table in frame 6; VA 0x40_1000 to frame 9.
    let mut guest = Guest::new();
    guest.context =
        PagingContext { cr0: Cr0::PG | Cr0::PE, cr3: 0x5000, ..PagingContext::default() };
    guest.set(5, 0, (0x6000 | P) << 32);
    guest.set(6, 0, (0x9000 | P) << 32);
    for _ in 0..2 {
        assert_eq!(guest.fetch(0x40_1ffc), guest.expect(9, 4092));
    }
    guest.set(6, 0, (0x8000 | P) << 32);
    assert_eq!(guest.fetch(0x40_1010), guest.expect(8, 16));
    // PAE: PDPTEs in frame 5, which have no accessed bit.
    let mut guest = Guest::new();
    guest.context = PagingContext {
        cr0: Cr0::PG | Cr0::PE,
        cr3: 0x5000,
        cr4: Cr4::PAE,
        maxphyaddr: 40,
        ..PagingContext::default()
    };
    guest.set(5, 0, 0x3001);
    for _ in 0..2 {
        assert_eq!(guest.fetch(0x1010), guest.expect(8, 16));
    }
    // Five levels: frame 5 above the four.
    let mut guest = Guest::new();
    guest.context.cr4 |= Cr4::LA57;
    guest.context.cr3 = 0x5000;
    guest.set(5, 0, 0x1000 | P);
    for _ in 0..2 {
        assert_eq!(guest.fetch(0x1010), guest.expect(8, 16));
    }
    guest.set(4, 1, 0x9000 | P);
    assert_eq!(guest.fetch(0x1010), guest.expect(9, 16));
}
