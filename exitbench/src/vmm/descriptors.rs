//! The segments of a 64-bit guest, as they stand in its GDT and in KVM_SET_SREGS, and interrupt
//! gates for its IDT (SDM vol. 3A §3.4.5 and §6.14.1). Selectors are those of Linux's boot protocol.

use anyhow::{Context, Result};
use kvm_bindings::kvm_segment;
use vm_memory::{Bytes, GuestAddress};

use super::memory::GuestMemory;

pub const CODE_SELECTOR: u16 = 0x10;
pub const DATA_SELECTOR: u16 = 0x18;
pub const TASK_SELECTOR: u16 = 0x20;

/// Null, unused, 64-bit code, data, and a task state segment of 16 bytes.
pub const GDT_BYTES: usize = 6 * 8;
/// 256 gates of 16 bytes.
pub const IDT_BYTES: usize = 256 * 16;

/// Execute, read, accessed.
const CODE_TYPE: u8 = 0xb;
/// Read, write, accessed.
const DATA_TYPE: u8 = 0x3;
/// 64-bit TSS, busy: VM entry demands that TR is loaded with one.
const BUSY_TASK_TYPE: u8 = 0xb;
/// Present interrupt gate of privilege level 0.
const INTERRUPT_GATE: u64 = 0x8e00;

/// The flat 64-bit code segment.
pub fn code_segment() -> kvm_segment {
    kvm_segment { selector: CODE_SELECTOR, type_: CODE_TYPE, l: 1, ..flat_segment() }
}

/// The flat data segment.
pub fn data_segment() -> kvm_segment {
    kvm_segment { selector: DATA_SELECTOR, type_: DATA_TYPE, db: 1, ..flat_segment() }
}

/// An empty task state segment.
pub fn task_segment() -> kvm_segment {
    kvm_segment {
        selector: TASK_SELECTOR,
        type_: BUSY_TASK_TYPE,
        s: 0,
        g: 0,
        limit: 0x67,
        ..flat_segment()
    }
}

fn flat_segment() -> kvm_segment {
    kvm_segment { base: 0, limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..Default::default() }
}

/// Writes the GDT at `base`.
pub fn write_gdt(memory: &GuestMemory, base: u64) -> Result<()> {
    let entries = [
        0,
        0,
        descriptor(&code_segment()),
        descriptor(&data_segment()),
        descriptor(&task_segment()),
        0, // upper half of the task segment's base
    ];
    for (address, entry) in (base..).step_by(8).zip(entries) {
        memory.write_obj(entry, GuestAddress(address)).context("no guest memory for the GDT")?;
    }
    Ok(())
}

/// Writes the IDT at `base`: vector n goes to `handler(n)`.
pub fn write_idt(memory: &GuestMemory, base: u64, handler: impl Fn(u8) -> u64) -> Result<()> {
    for vector in 0..=255_u8 {
        memory
            .write_obj(interrupt_gate(handler(vector)), GuestAddress(base + u64::from(vector) * 16))
            .context("no guest memory for the IDT")?;
    }
    Ok(())
}

fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = if segment.g == 1 { segment.limit >> 12 } else { segment.limit };
    let (limit, base) = (u64::from(limit), segment.base);
    let bit = |value: u8, shift: u32| u64::from(value) << shift;
    (limit & 0xffff)
        | (base & 0xff_ffff) << 16
        | bit(segment.type_, 40)
        | bit(segment.s, 44)
        | bit(segment.dpl, 45)
        | bit(segment.present, 47)
        | (limit >> 16 & 0xf) << 48
        | bit(segment.l, 53)
        | bit(segment.db, 54)
        | bit(segment.g, 55)
        | (base >> 24 & 0xff) << 56
}

fn interrupt_gate(handler: u64) -> [u64; 2] {
    let low = (handler & 0xffff)
        | u64::from(CODE_SELECTOR) << 16
        | INTERRUPT_GATE << 32
        | (handler >> 16 & 0xffff) << 48;
    [low, handler >> 32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_segments_have_their_well_known_descriptors() {
        assert_eq!(descriptor(&code_segment()), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&data_segment()), 0x00cf_9300_0000_ffff);
        assert_eq!(descriptor(&task_segment()), 0x0000_8b00_0000_0067);
    }

    #[test]
    fn a_gate_holds_its_handler_in_three_pieces() {
        let [low, high] = interrupt_gate(0x1234_5678_9abc_def0);
        assert_eq!(low, 0x9abc_8e00_0010_def0);
        assert_eq!(high, 0x1234_5678);
    }
}
