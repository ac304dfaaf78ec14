//! Descriptors and page tables of a 64-bit guest (SDM vol. 3A §3.4.5, §4.5, §6.14.1).

use kvm_bindings::{kvm_dtable, kvm_segment, kvm_sregs};

use super::handlers;
use super::layout::{GDT, IDT, ROOT, SMALL_TABLE, TSS};
use super::memory::{Memory, PAGE};

pub const CODE_SELECTOR: u16 = 0x10;
pub const DATA_SELECTOR: u16 = 0x18;
pub const TASK_SELECTOR: u16 = 0x20;

/// PE, MP, ET, NE, WP, AM, PG.
pub const CR0: u64 = 0x8005_0033;
/// PAE, PGE, OSFXSR, OSXMMEXCPT.
pub const CR4: u64 = 0x6a0;
/// SCE, LME, LMA, NXE.
pub const EFER: u64 = 0xd01;

/// Present, writable, user, accessed and dirty: nothing is left for the CPU to write.
const TABLE: u64 = 0x67;
const LARGE_PAGE: u64 = 0xe3;
const LARGE_BYTES: u64 = 2 << 20;

/// Writes GDT (whose last two entries are user mode's, 0x33 and 0x3b), TSS, IDT, the handlers, and page tables that map the first 4 GiB one to one.
pub fn write(memory: &Memory) {
    let entries: [u64; 8] = [
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x0000_8b00_0000_0067 | TSS << 16,
        0,
        0x00af_fb00_0000_ffff,
        0x00cf_f300_0000_ffff,
    ];
    for (at, entry) in (GDT..).step_by(8).zip(entries) {
        memory.write(at, entry);
    }
    // The stack of privilege level 0 grows down from the task state segment's page.
    memory.write_bytes(TSS + 4, &(TSS + PAGE).to_le_bytes());
    // No map of permitted ports: it would begin behind the segment's limit.
    memory.write_bytes(TSS + 0x66, &0x68_u16.to_le_bytes());
    for vector in 0..=255_u8 {
        let (at, handler) = (IDT + u64::from(vector) * 16, handlers::entry(vector));
        let low = handler & 0xffff | u64::from(CODE_SELECTOR) << 16 | 0x8e00 << 32;
        memory.write(at, low | (handler >> 16 & 0xffff) << 48);
        memory.write(at + 8, handler >> 32);
    }
    memory.write_bytes(super::layout::HANDLERS, handlers::code());
    memory.write(ROOT, (ROOT + PAGE) | TABLE);
    for gib in 0..4 {
        let directory = ROOT + (2 + gib) * PAGE;
        memory.write(ROOT + PAGE + gib * 8, directory | TABLE);
        for index in 0..512 {
            let page = (gib * 512 + index) * LARGE_BYTES;
            memory.write(directory + index * 8, page | LARGE_PAGE);
        }
    }
}

/// Maps the first 2 MiB by 4 KiB pages instead, so that a test can change one of them.
pub fn split_first_large_page(memory: &Memory) {
    for index in 0..512 {
        memory.write(SMALL_TABLE + index * 8, (index * PAGE) | 0x63);
    }
    memory.write(ROOT + 2 * PAGE, SMALL_TABLE | TABLE);
}

/// The entry of a 4 KiB page in the first 2 MiB, after [`split_first_large_page`].
pub fn small_entry(gva: u64) -> u64 {
    SMALL_TABLE + gva / PAGE * 8
}

/// The special registers of 64-bit mode over these tables.
pub fn long_mode(sregs: kvm_sregs) -> kvm_sregs {
    let flat = kvm_segment { limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..Default::default() };
    let data = kvm_segment { selector: DATA_SELECTOR, type_: 3, db: 1, ..flat };
    kvm_sregs {
        cs: kvm_segment { selector: CODE_SELECTOR, type_: 11, l: 1, ..flat },
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: kvm_segment {
            selector: TASK_SELECTOR,
            type_: 11,
            s: 0,
            g: 0,
            base: TSS,
            limit: 0x67,
            ..flat
        },
        gdt: kvm_dtable { base: GDT, limit: 8 * 8 - 1, padding: [0; 3] },
        idt: kvm_dtable { base: IDT, limit: 256 * 16 - 1, padding: [0; 3] },
        cr0: CR0,
        cr3: ROOT,
        cr4: CR4,
        efer: EFER,
        ..sregs
    }
}
