//! The MP table by which Linux finds its CPUs and the I/O APIC where there is no ACPI
//! (MultiProcessor Specification 1.4, chapter 4).

use anyhow::{Context, Result};
use vm_memory::{Bytes, GuestAddress};

use crate::vmm::memory::GuestMemory;

/// The last KiB of base memory, where a kernel looks for the floating pointer (§4).
pub const ADDRESS: u64 = 0x9_fc00;
/// As many CPUs as fit into that KiB beside the rest of the table.
pub const MAX_CPUS: u32 = 32;

const POINTER_BYTES: u64 = 16;
const SPECIFICATION: u8 = 4;
const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
const APIC_VERSION: u8 = 0x14;
const IO_APIC_VERSION: u8 = 0x11;
/// ISA interrupts 0 to 15.
const ISA_INTERRUPTS: u8 = 16;
const EVERY_LOCAL_APIC: u8 = 0xff;

const INTERRUPT: u8 = 0;
const NMI: u8 = 1;
const EXTERNAL_INTERRUPT: u8 = 3;

/// Writes pointer and table for `cpus` CPUs at [`ADDRESS`].
pub fn write(memory: &GuestMemory, cpus: u32) -> Result<()> {
    let table = table(cpus);
    let at = ADDRESS + POINTER_BYTES;
    memory
        .write_slice(&floating_pointer(at as u32), GuestAddress(ADDRESS))
        .and_then(|()| memory.write_slice(&table, GuestAddress(at)))
        .context("no guest memory for the MP table")
}

/// §4.1: points to the table; no default configuration; no PIC mode.
fn floating_pointer(table: u32) -> [u8; POINTER_BYTES as usize] {
    let mut pointer = [0; POINTER_BYTES as usize];
    pointer[..4].copy_from_slice(b"_MP_");
    pointer[4..8].copy_from_slice(&table.to_le_bytes());
    pointer[8] = 1; // length in 16-byte units
    pointer[9] = SPECIFICATION;
    pointer[10] = checksum(&pointer);
    pointer
}

/// §4.2: the header and its entries.
fn table(cpus: u32) -> Vec<u8> {
    let io_apic_id = cpus as u8;
    let mut entries: Vec<Vec<u8>> = Vec::new();
    entries.extend((0..cpus).map(|id| processor(id as u8)));
    entries.push(isa_bus());
    entries.push(io_apic(io_apic_id));
    entries.extend((0..ISA_INTERRUPTS).map(|irq| io_interrupt(irq, io_apic_id)));
    entries.push(local_interrupt(EXTERNAL_INTERRUPT, 0, 0));
    entries.push(local_interrupt(NMI, EVERY_LOCAL_APIC, 1));

    let body: Vec<u8> = entries.concat();
    let mut table = Vec::from(*b"PCMP");
    let length = 44 + body.len() as u16;
    table.extend(length.to_le_bytes());
    table.extend([SPECIFICATION, 0]); // and the checksum's place
    table.extend(b"GANNET  EXITBENCH   ");
    table.extend(0_u32.to_le_bytes()); // no OEM table
    table.extend(0_u16.to_le_bytes());
    table.extend((entries.len() as u16).to_le_bytes());
    table.extend(LOCAL_APIC.to_le_bytes());
    table.extend([0; 4]); // no extended table
    table.extend(body);
    table[7] = checksum(&table);
    table
}

/// §4.3.1: enabled; the first is the boot processor.
fn processor(id: u8) -> Vec<u8> {
    const ENABLED: u8 = 1;
    const BOOT: u8 = 2;
    const SIGNATURE: u32 = 0x600;
    const FEATURES: u32 = 0x201; // FPU and APIC on chip
    let flags = if id == 0 { ENABLED | BOOT } else { ENABLED };
    let mut entry = vec![0, id, APIC_VERSION, flags];
    entry.extend(SIGNATURE.to_le_bytes());
    entry.extend(FEATURES.to_le_bytes());
    entry.extend([0; 8]);
    entry
}

/// §4.3.2.
fn isa_bus() -> Vec<u8> {
    let mut entry = vec![1, 0];
    entry.extend(b"ISA   ");
    entry
}

/// §4.3.3.
fn io_apic(id: u8) -> Vec<u8> {
    let mut entry = vec![2, id, IO_APIC_VERSION, 1];
    entry.extend(IO_APIC.to_le_bytes());
    entry
}

/// §4.3.4: ISA interrupt n to pin n of the I/O APIC, which is how KVM routes them by default.
fn io_interrupt(irq: u8, io_apic_id: u8) -> Vec<u8> {
    vec![3, INTERRUPT, 0, 0, 0, irq, io_apic_id, irq]
}

/// §4.3.5.
fn local_interrupt(kind: u8, local_apic: u8, pin: u8) -> Vec<u8> {
    vec![4, kind, 0, 0, 0, 0, local_apic, pin]
}

/// The byte that makes all bytes add up to zero, where its own place holds 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, &byte| sum.wrapping_add(byte))
    }

    #[test]
    fn pointer_and_table_add_up_to_zero() {
        assert_eq!(sum(&floating_pointer(0x9_fc10)), 0);
        for cpus in 1..=MAX_CPUS {
            assert_eq!(sum(&table(cpus)), 0);
        }
    }

    #[test]
    fn the_header_tells_the_tables_true_length_and_count() {
        let table = table(2);
        assert_eq!(&table[..4], b"PCMP");
        assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
        let count = u16::from_le_bytes([table[34], table[35]]);
        assert_eq!(count, 2 + 1 + 1 + 16 + 2);
        assert_eq!(table[36..40], LOCAL_APIC.to_le_bytes());
        // Two processors of 20 bytes, everything else 8.
        assert_eq!(table.len(), 44 + 2 * 20 + (usize::from(count) - 2) * 8);
    }

    #[test]
    fn the_first_cpu_alone_is_the_boot_processor() {
        let flags: Vec<u8> = table(3)[44..].chunks(20).take(3).map(|cpu| cpu[3]).collect();
        assert_eq!(flags, [3, 1, 1]);
    }

    #[test]
    fn the_greatest_table_ends_within_base_memory() {
        assert!(POINTER_BYTES as usize + table(MAX_CPUS).len() <= 1024 + 512);
        assert!(ADDRESS + POINTER_BYTES + table(MAX_CPUS).len() as u64 <= 0xa_0000);
    }
}
