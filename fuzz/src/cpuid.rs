//! A guest's CPUID: the answers of a vCPU that keeps them against one that has just been told the same, and against a plain
//! search of the table.

use gannet_cpuid::{DynamicInputs, Entry, GuestCpuid, Supported};
use std::sync::OnceLock;

use crate::bytes::Bytes;

#[path = "../../crates/cpuid/tests/hosts/mod.rs"]
mod hosts;

fn host(amd: bool) -> &'static Supported {
    static HOSTS: OnceLock<[&Supported; 2]> = OnceLock::new();
    HOSTS.get_or_init(|| [hosts::supported_intel(), hosts::supported_amd()])[usize::from(amd)]
}

const LEAVES: [u32; 20] = [
    0,
    1,
    2,
    4,
    6,
    7,
    0xb,
    0xd,
    0x1f,
    0x15,
    0x4000_0000,
    0x4000_0001,
    0x4000_0100,
    0x8000_0000,
    0x8000_0001,
    0x8000_0008,
    0x8000_000a,
    0x8000_001d,
    0x8000_001e,
    0xc000_0000,
];

fn leaf(bytes: &mut Bytes<'_>) -> u32 {
    if bytes.u8() < 220 { bytes.of(&LEAVES) } else { bytes.value() as u32 }
}

fn inputs(bytes: &mut Bytes<'_>) -> DynamicInputs {
    let bits = bytes.u8();
    DynamicInputs {
        cr4_osxsave: bits & 1 != 0,
        cr4_pke: bits & 2 != 0,
        apic_enabled: bits & 4 != 0,
        xcr0: [1, 3, 7, 0xe7, 0x2ff][usize::from(bits >> 3) % 5],
        xss: u64::from(bits >> 7) << 8,
    }
}

/// Bits that follow from the machine's state.
fn is_dynamic(leaf: u32) -> bool {
    matches!(leaf, 1 | 7 | 0xd)
}

pub fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let bits = bytes.u8();
    let host = host(bits & 1 != 0);
    let mut table: Vec<Entry> = if bits & 2 != 0 { host.entries().to_vec() } else { Vec::new() };
    for _ in 0..bytes.u8() % 24 {
        let (leaf, index) = (leaf(bytes), u32::from(bytes.u8() & 3));
        let answer = std::array::from_fn(|_| bytes.value() as u32);
        let at = bytes.u8();
        match table.len() {
            len if at & 1 == 1 && len > 0 => {
                let at = usize::from(at >> 1) % len;
                table[at] = Entry::new(leaf, index, answer);
            }
            _ => table.push(Entry::new(leaf, index, answer)),
        }
    }
    let mut kept = GuestCpuid::new(host);
    if kept.set(&table, host, false).is_err() {
        assert!(kept.is_empty());
        return;
    }
    let mut steps = 0;
    while !bytes.is_empty() && steps < 60 {
        steps += 1;
        let (inputs, leaf, subleaf) = (inputs(bytes), leaf(bytes), u32::from(bytes.u8() & 7));
        let answer = kept.lookup(leaf, subleaf, &inputs);
        let mut fresh = GuestCpuid::new(host);
        fresh.set(&table, host, false).unwrap();
        assert_eq!(answer, fresh.lookup(leaf, subleaf, &inputs), "{leaf:#x}.{subleaf} {inputs:?}");
        assert_eq!(answer, kept.lookup(leaf, subleaf, &inputs), "{leaf:#x}.{subleaf} once more");
        let found = table.iter().find(|entry| entry.is_for(leaf, subleaf));
        if let Some(found) = found.filter(|_| !is_dynamic(leaf)) {
            assert_eq!(answer, found.answer(), "{leaf:#x}.{subleaf}");
        }
        // What is told can be set again, after a run too.
        let told = kept.entries(&inputs).to_vec();
        assert_eq!(kept.set(&told, host, true), Ok(false));
        assert_eq!(kept.set(&table, host, true), Ok(false));
        let _ = (kept.cr4_allowed(), kept.efer_allowed(), kept.maxphyaddr(), kept.xcr0_allowed());
        assert!(!kept.xcr0_allowed().intersects(!host.xcr0()), "more than the host has");
    }
}
