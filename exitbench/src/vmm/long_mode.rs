//! The special registers of a vCPU that starts in 64-bit mode, without a way through real mode.

use anyhow::{Context, Result};
use kvm_bindings::{kvm_dtable, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::descriptors::{GDT_BYTES, IDT_BYTES, code_segment, data_segment, task_segment};

/// PE, MP, ET, NE, WP, AM, PG.
const CR0: u64 = 0x8005_0033;
/// PAE, PGE, OSFXSR, OSXMMEXCPT.
const CR4: u64 = 0x6a0;
/// SCE, LME, LMA, NXE: as a 64-bit kernel sets it.
const EFER: u64 = 0xd01;

/// Where the tables of a 64-bit guest lie, guest-physical.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    pub root: u64,
    pub gdt: u64,
    /// Linux brings its own.
    pub idt: Option<u64>,
}

/// Puts `vcpu` into 64-bit mode, at privilege level 0 with flat segments.
///
/// EFER.NXE is set only if `no_execute`, because a guest whose CPUID lacks it must not have it.
pub fn enter(vcpu: &VcpuFd, tables: Tables, no_execute: bool) -> Result<()> {
    let sregs = vcpu.get_sregs().context("KVM_GET_SREGS failed")?;
    vcpu.set_sregs(&special_registers(sregs, tables, no_execute)).context("KVM_SET_SREGS failed")
}

fn special_registers(sregs: kvm_sregs, tables: Tables, no_execute: bool) -> kvm_sregs {
    const NXE: u64 = 1 << 11;
    let data = data_segment();
    let table = |base, bytes: usize| kvm_dtable { base, limit: bytes as u16 - 1, padding: [0; 3] };
    kvm_sregs {
        cs: code_segment(),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: task_segment(),
        gdt: table(tables.gdt, GDT_BYTES),
        idt: tables.idt.map_or(kvm_dtable::default(), |base| table(base, IDT_BYTES)),
        cr0: CR0,
        cr3: tables.root,
        cr4: CR4,
        efer: if no_execute { EFER } else { EFER & !NXE },
        ..sregs
    }
}
