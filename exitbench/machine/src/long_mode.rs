//! The special registers of a vCPU that starts in 64-bit mode.

use kvm_bindings::{kvm_dtable, kvm_sregs};

use crate::descriptors::{GDT_BYTES, IDT_BYTES, code_segment, data_segment, task_segment};

/// PE, MP, ET, NE, WP, AM, PG.
pub const CR0: u64 = 0x8005_0033;
/// PAE, PGE, OSFXSR, OSXMMEXCPT.
pub const CR4: u64 = 0x6a0;
/// SCE, LME, LMA, NXE: as a 64-bit kernel sets it. A guest whose CPUID lacks NX must not have [`NXE`].
pub const EFER: u64 = 0xd01;
/// EFER.NXE.
pub const NXE: u64 = 1 << 11;

/// Where the tables of a 64-bit guest lie, guest-physical.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// CR3.
    pub root: u64,
    /// The GDT, as [`crate::descriptors::write_gdt`] writes it.
    pub gdt: u64,
    /// Linux brings its own.
    pub idt: Option<u64>,
    /// The task state segment; 0 for a guest that stays at privilege level 0.
    pub task: u64,
}

/// Privilege level 0 with flat segments, over these tables.
pub fn special_registers(sregs: kvm_sregs, tables: Tables, efer: u64) -> kvm_sregs {
    let data = data_segment();
    let table = |base, bytes: usize| kvm_dtable { base, limit: bytes as u16 - 1, padding: [0; 3] };
    kvm_sregs {
        cs: code_segment(),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: task_segment(tables.task),
        gdt: table(tables.gdt, GDT_BYTES),
        idt: tables.idt.map_or(kvm_dtable::default(), |base| table(base, IDT_BYTES)),
        cr0: CR0,
        cr3: tables.root,
        cr4: CR4,
        efer,
        ..sregs
    }
}
