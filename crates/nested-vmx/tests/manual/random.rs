//! Numbers at random, and values for fields.

use super::fields;

pub struct Random(pub u64);

/// Fields, and the bits of them that L1 may change and still enter L2, by themselves.
#[rustfmt::skip] // A table.
const HARMLESS: &[(u16, u64)] = &[
    (0x4004, 0xffff_ffff), (0x4006, 0x1f), (0x4008, 0x1f), (0x6000, 0xc005_003f), (0x6002, 0x7_07ff),
    (0x6004, 0xe005_003f), (0x6006, 0x7_27ff), (0x202c, 0x3ff), (0x2010, u64::MAX), (0x202e, u64::MAX),
    (0x4002, 0x7a19_9e84), (0x4002, 0x7a19_9e84), (0x4002, 0x0640_0000), (0x401e, 0x11_184e), (0x401e, 0x11_184e), (0x401e, 0x6000),
    (0x400c, 0x1c_9004), (0x400c, 0x3c_9004), (0x4012, 0x6004), (0x4000, 0x29), (0x6c14, u64::MAX),
    (0x6c16, 0x7fff_ffff), (0x6c02, 0xf_f000), (0x0c00, 0xfff8), (0x0c02, 0xff0), (0x0c04, 0xff0), (0x0c06, 0xfff8),
    (0x0c08, 0xfff8), (0x0c0a, 0xfff8), (0x6c06, 0x7fff_ffff_ffff), (0x6c08, 0x7fff_ffff_ffff), (0x6c0a, 0x7fff_ffff_ffff),
    (0x6c0c, 0x7fff_ffff_ffff), (0x6c0e, 0x7fff_ffff_ffff), (0x6c00, 0xe005_001e), (0x6c00, 0x1ffa_ffc0), (0x6c04, 0x2_0780),
    (0x2c04, 0xf), (0x2808, 0xf), (0x681e, 0x7fff_ffff), (0x681c, u64::MAX), (0x6820, 0x4_0cd5), (0x681a, 0x3ff), (0x2802, 3),
    (0x6800, 0x4005_000e), (0x6804, 0x79c), (0x6824, 0x7fff_ffff_ffff), (0x482a, 0xffff), (0x482e, u64::MAX),
    (0x2006, 0xfff0), (0x2008, 0xfff0), (0x200a, 0xfff0), (0x2004, 0xf000), (0x2000, 0xf000), (0x2002, 0xf000), (0x2018, 1),
    (0x401c, 0xf), (0x0810, 0xffff), (0x0812, 0x1ff), (0x201c, u64::MAX), (0x2022, u64::MAX), (0x2812, u64::MAX),
    (0x0000, 0xffff), (0x4016, 0x8000_0303), (0x6000, 0xf), (0x6000, 0xf), (0x6004, 0xf), (0x6004, 0xf),
];

impl Random {
    /// SplitMix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    /// Any field.
    pub fn field(&mut self) -> u16 {
        let n = self.below(fields::all().count() as u64);
        fields::all().nth(n as usize).unwrap()
    }

    /// What a field may be changed to.
    pub fn value(&mut self, old: u64, physical_bits: u8) -> u64 {
        match self.below(8) {
            // Of 64 bits, or of the upper half.
            0 => self.next() << (32 * self.below(2)),
            1 => old & !0xff | self.next() & 0xff,
            2 => self.below(16) << 12,
            3 => 1 << self.below(64),
            4 => self.of(&[
                0,
                u64::MAX,
                1 << physical_bits,
                (1 << physical_bits) - 0x1000,
                1 << 47,
                u64::MAX << 47,
            ]),
            _ => old ^ 1 << self.below(64),
        }
    }

    /// A field, and a value that by itself leaves a VMCS enterable.
    pub fn harmless(&mut self, here: impl Fn(u16) -> u64) -> (u64, u64) {
        let (field, bits) = self.of(HARMLESS);
        let changed = match self.below(4) {
            0 => self.next() & bits,
            1 => self.next() & self.next() & bits,
            _ => 1 << self.below(64) & bits,
        };
        (field.into(), here(field) ^ changed)
    }
}
