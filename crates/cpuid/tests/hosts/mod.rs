//! CPUID of two invented but plausible hosts, as a function.

#![allow(dead_code, reason = "each test file uses its part")]

use gannet_cpuid::{Entry, HostFacts, Supported};

/// Family 17h server part with AVX2, XSAVES and topology extensions.
pub fn amd(leaf: u32, subleaf: u32) -> [u32; 4] {
    match (leaf, subleaf) {
        (0, _) => [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
        (1, _) => [0x0080_0f12, 0x0002_0800, 0xffff_ffff, 0xffff_ffff],
        (6, _) => [0xff, 0xff, 0xff, 0xff],
        (7, 0) => [0, 0x209c_01ab, 0x0040_0004, 0],
        (0xd, 0) => [0x7, 832, 832, 0],
        (0xd, 1) => [0xf, 832, 0, 0],
        (0xd, 2) => [256, 576, 0, 0],
        (0x4000_0000, _) => [0x4000_0010, 0x1111, 0x2222, 0x3333],
        (0x8000_0000, _) => [0x8000_001f, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
        (0x8000_0001, _) => [0x0080_0f12, 0x4fff_0000, 0x35c2_33ff, 0x2fd3_fbff],
        (0x8000_0002..=0x8000_0004, _) => [0x2020_2020; 4],
        (0x8000_0005, _) => [0xff40_ff40, 0xff40_ff40, 0x2008_0140, 0x4004_0140],
        (0x8000_0006, _) => [0x2600_6400, 0x6600_6400, 0x0200_6140, 0x0203_9140],
        (0x8000_0007, _) => [0, 3, 0, 0x0000_67ff],
        // 48 physical and 48 linear bits; CLZERO, IBPB, IBRS, STIBP, SSBD and what KVM hides.
        (0x8000_0008, _) => [0x3030, 0x0100_d205, 0x0001_5007, 0x0001_0000],
        (0x8000_000a, _) => [1, 0x8000, 0, 0xffff_ffff],
        (0x8000_001a, _) => [0xff, 1, 1, 1],
        (0x8000_001d, 0) => [0x0000_4121, 0x01c0_003f, 63, 0],
        (0x8000_001d, 1) => [0x0000_4122, 0x00c0_003f, 255, 0],
        (0x8000_001e, _) => [5, 0x100, 0, 0],
        (0x8000_001f, _) => [0xf, 1, 1, 1],
        _ => [0; 4],
    }
}

/// Server part with AVX-512, protection keys and processor trace.
pub fn intel(leaf: u32, subleaf: u32) -> [u32; 4] {
    match (leaf, subleaf) {
        (0, _) => [0x16, 0x756e_6547, 0x6c65_746e, 0x4965_6e69],
        (1, _) => [0x0005_0654, 0x0010_0800, 0x7fff_fbff, 0xbfeb_fbff],
        (2, _) => [0x7603_6301, 0x00f0_b5ff, 0, 0x00c3_0000],
        (4, 0) => [0x1c00_4121, 0x01c0_003f, 63, 0],
        (4, 1) => [0x1c00_4122, 0x01c0_003f, 63, 0],
        (5, _) => [0x40, 0x40, 3, 0x2020],
        (7, 0) => [0, 0xd39f_fffb, 0x0000_0818, 0xbc00_0400],
        (0xa, _) => [0x0730_0404, 0, 0, 0x603],
        (0xb, 0) => [1, 2, 0x100, 9],
        (0xb, 1) => [5, 32, 0x201, 9],
        (0xd, 0) => [0x2ff, 2696, 2696, 0],
        (0xd, 1) => [0xf, 2568, 0x100, 0],
        (0xd, 2) => [256, 576, 0, 0],
        (0xd, 3) => [64, 960, 0, 0],
        (0xd, 4) => [64, 1024, 0, 0],
        (0xd, 5) => [64, 1088, 0, 0],
        (0xd, 6) => [512, 1152, 0, 0],
        (0xd, 7) => [1024, 1664, 0, 0],
        (0xd, 8) => [128, 0, 1, 0],
        (0xd, 9) => [8, 2688, 0, 0],
        (0x14, _) => [1, 0xf, 7, 0],
        (0x15, _) => [2, 168, 0, 0],
        (0x8000_0000, _) => [0x8000_0008, 0, 0, 0],
        (0x8000_0001, _) => [0, 0, 0x121, 0x2c10_0800],
        (0x8000_0006, _) => [0, 0, 0x0100_6040, 0],
        (0x8000_0007, _) => [0, 0, 0, 0x100],
        (0x8000_0008, _) => [0x302e, 0, 0, 0],
        // Beyond the end Intel answers with the last basic leaf.
        _ => [0xdead, 0xdead, 0xdead, 0xdead],
    }
}

/// As at load, a table lives as long as the program.
pub fn leak(table: Supported) -> &'static Supported {
    Box::leak(Box::new(table))
}

pub fn supported_amd() -> &'static Supported {
    let facts = HostFacts { xcr0: 7, lfence_serializes: true, ..HostFacts::default() };
    leak(Supported::read(amd, &facts).expect("a table"))
}

pub fn supported_intel() -> &'static Supported {
    let facts = HostFacts { xcr0: 0x2ff, ..HostFacts::default() };
    leak(Supported::read(intel, &facts).expect("a table"))
}

pub fn entry(entries: &[Entry], leaf: u32, index: u32) -> Entry {
    *entries
        .iter()
        .find(|e| e.is_for(leaf, index))
        .unwrap_or_else(|| panic!("no entry for {leaf:#x}.{index}"))
}
