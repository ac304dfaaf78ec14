//! The segments of a 64-bit guest, as they stand in its GDT and in KVM_SET_SREGS, and interrupt gates for its IDT (SDM vol. 3A §3.4.5
//! and §6.14.1). Selectors are those of Linux's boot protocol, and user mode's behind them.

use kvm_bindings::kvm_segment;

use crate::memory::{GuestBytes, NoMemory};

/// Of the 64-bit code segment.
pub const CODE_SELECTOR: u16 = 0x10;
/// Of the flat data segment.
pub const DATA_SELECTOR: u16 = 0x18;
/// Of the task state segment.
pub const TASK_SELECTOR: u16 = 0x20;

/// Null, unused, 64-bit code, data, a task state segment of 16 bytes, user mode's code and data.
pub const GDT_BYTES: usize = 8 * 8;
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
/// DPL 3 of a descriptor or a gate.
pub const USER: u64 = 3 << 45;

/// The flat 64-bit code segment.
pub fn code_segment() -> kvm_segment {
    kvm_segment { selector: CODE_SELECTOR, type_: CODE_TYPE, l: 1, ..flat_segment() }
}

/// The flat data segment.
pub fn data_segment() -> kvm_segment {
    kvm_segment { selector: DATA_SELECTOR, type_: DATA_TYPE, db: 1, ..flat_segment() }
}

/// The task state segment that lies at `base`, below 4 GiB.
pub fn task_segment(base: u64) -> kvm_segment {
    kvm_segment {
        selector: TASK_SELECTOR,
        type_: BUSY_TASK_TYPE,
        s: 0,
        g: 0,
        base,
        limit: 0x67,
        ..flat_segment()
    }
}

fn flat_segment() -> kvm_segment {
    kvm_segment { base: 0, limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..Default::default() }
}

/// Writes the GDT at `base`, for a task state segment at `task`.
pub fn write_gdt(memory: &impl GuestBytes, base: u64, task: u64) -> Result<(), NoMemory> {
    let (code, data) = (descriptor(&code_segment()), descriptor(&data_segment()));
    let task = descriptor(&task_segment(task));
    memory.put_words(base, &[0, 0, code, data, task, 0, code | USER, data | USER])
}

/// Writes the IDT at `base`: vector n goes to `handler(n)`.
pub fn write_idt(
    memory: &impl GuestBytes,
    base: u64,
    handler: impl Fn(u8) -> u64,
) -> Result<(), NoMemory> {
    let gates: Vec<u64> = (0..=255).flat_map(|vector| interrupt_gate(handler(vector))).collect();
    memory.put_words(base, &gates)
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

/// A gate of privilege level 0. Its first word, for a handler below 4 GiB, is the whole gate of a 32-bit guest.
pub fn interrupt_gate(handler: u64) -> [u64; 2] {
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
        assert_eq!(descriptor(&task_segment(0x3000)), 0x0000_8b00_3000_0067);
        assert_eq!(descriptor(&code_segment()) | USER, 0x00af_fb00_0000_ffff);
        assert_eq!(descriptor(&data_segment()) | USER, 0x00cf_f300_0000_ffff);
    }

    #[test]
    fn a_gate_holds_its_handler_in_three_pieces() {
        let [low, high] = interrupt_gate(0x1234_5678_9abc_def0);
        assert_eq!(low, 0x9abc_8e00_0010_def0);
        assert_eq!(high, 0x1234_5678);
    }
}
