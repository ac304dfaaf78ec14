//! The walk of a guest's tables against the reference walker of `crates/mmu/tests/walk`.

use gannet_mmu::PagingContext;
use gannet_mmu::walk::AccessKind;
use x86::{Cr0, Cr4, Efer};

use crate::bytes::Bytes;

#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../crates/mmu/tests/walk/reference.rs"]
mod reference;

/// An entry that leads somewhere more often than not.
fn entry(bytes: &mut Bytes<'_>) -> u64 {
    let [choice, page] = bytes.take();
    let flags = [7, 7, 7, 3, 5, 0x87, 1 << 63 | 7, 1][usize::from(choice & 7)];
    let shift = if flags & 0x80 != 0 { 30 } else { 12 };
    let entry = flags | u64::from(page & 7) << shift | u64::from(page >> 4) << 59 & !(1 << 63);
    match choice >> 3 {
        0..20 => entry,
        20..28 => entry ^ 1 << (bytes.u8() & 63),
        28 => 0,
        _ => bytes.u64(),
    }
}

fn context(bytes: &mut Bytes<'_>) -> PagingContext {
    let [mode, low, high, width, root] = bytes.take();
    let on = |bit: bool, value: u64| if bit { value } else { 0 };
    let flag = |n: u8| low >> n & 1 != 0;
    let mode = usize::from(mode & 3);
    let wide = [Cr4::empty(), Cr4::PAE, Cr4::PAE, Cr4::PAE | Cr4::LA57][mode];
    let long = if mode > 1 { Efer::LMA | Efer::LME } else { Efer::empty() };
    let mut cr4 = wide;
    for (n, bit) in (0..).zip([Cr4::SMEP, Cr4::SMAP, Cr4::PKE, Cr4::PSE]) {
        cr4.set(bit, flag(n));
    }
    PagingContext {
        cr0: Cr0::PG | Cr0::PE | Cr0::from_bits_retain(on(flag(4), 1 << 16)),
        cr3: u64::from(root & 7) << 12 | u64::from(root & 0xf8),
        cr4,
        efer: Efer::from_bits_retain(on(flag(5), 1 << 11)) | long,
        rflags_ac: flag(6),
        cpl: if flag(7) { 3 } else { 0 },
        pkru: if high & 1 != 0 { bytes.u32() } else { 0 },
        maxphyaddr: [36, 40, 48, 52][usize::from(width & 3)],
        gbpages: high & 2 != 0,
        amd: high & 4 != 0,
    }
}

pub fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let context = context(bytes);
    let index = bytes.take::<5>().map(|n| u64::from(n & 3));
    let [kind, low, high] = bytes.take();
    reference::agree(&reference::Case {
        context,
        index,
        offset: (u64::from(high) << 8 | u64::from(low)) & 0xfff,
        kind: [AccessKind::Read, AccessKind::Write, AccessKind::Fetch][usize::from(kind % 3)],
        implicit: kind & 0x80 != 0,
        entries: (0..32).map(|_| entry(bytes)).collect(),
    });
}
