//! The fields of a VMCS by SDM vol. 3C appendix B, written down once more: encodings as ranges, and no table of the code's.

/// First and last encoding of a run of fields, two apart. What is missing is of features that are not offered (EPTP switching
/// with #VE, PAUSE-loop exiting), or is missing on stock KVM too: the executive-VMCS pointer, SMBASE, CR3 targets, the registers
/// of an SMI.
#[rustfmt::skip] // A table.
const RUNS: &[(u16, u16)] = &[
    (0x0000, 0x0002), (0x0800, 0x0812), (0x0c00, 0x0c0c),
    (0x2000, 0x200a), (0x200e, 0x2028), (0x202c, 0x202e), (0x2032, 0x2032),
    (0x2400, 0x2400), (0x2800, 0x2812), (0x2c00, 0x2c04),
    (0x4000, 0x401e), (0x4400, 0x440e), (0x4800, 0x4826), (0x482a, 0x482a), (0x482e, 0x482e), (0x4c00, 0x4c00),
    (0x6000, 0x6006), (0x6400, 0x6400), (0x640a, 0x640a), (0x6800, 0x6826), (0x6c00, 0x6c16),
];

/// All fields that there are.
pub fn all() -> impl Iterator<Item = u16> {
    RUNS.iter().flat_map(|(first, last)| (*first..=*last).step_by(2))
}

/// Whether an encoding names a field, or the upper half of one of 64 bits (§25.11.2).
pub fn is_field(encoding: u64) -> bool {
    let high = encoding & 1 != 0;
    let whole = encoding & !1;
    let there =
        RUNS.iter().any(|(first, last)| (u64::from(*first)..=u64::from(*last)).contains(&whole));
    encoding >> 15 == 0 && there && (!high || encoding >> 13 & 3 == 1)
}

/// The read-only data area: type 1, in bits 11:10.
pub fn is_read_only(encoding: u64) -> bool {
    encoding >> 10 & 3 == 1
}

/// The guest-state area: type 2.
pub fn is_guest(encoding: u16) -> bool {
    encoding >> 10 & 3 == 2
}

/// The bits that a field has, by its width in bits 14:13.
pub fn mask(encoding: u16) -> u64 {
    match encoding >> 13 {
        0 => 0xffff,
        2 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

fn slot(encoding: u16) -> usize {
    usize::from((encoding >> 13 & 3) << 7 | (encoding >> 10 & 3) << 5 | encoding >> 1 & 31)
}

/// The values of all fields.
#[derive(Clone)]
pub struct Fields(Box<[u64; 512]>);

impl Fields {
    pub fn new() -> Self {
        Self(Box::new([0; 512]))
    }

    pub fn get(&self, encoding: u16) -> u64 {
        self.0[slot(encoding)]
    }

    pub fn set(&mut self, encoding: u16, value: u64) {
        self.0[slot(encoding)] = value & mask(encoding);
    }

    pub fn bit(&self, encoding: u16, number: u32) -> bool {
        self.get(encoding) >> number & 1 != 0
    }

    /// A primary control.
    pub fn primary(&self, number: u32) -> bool {
        self.bit(0x4002, number)
    }

    /// A secondary control, which counts only if they are activated (§25.6.2).
    pub fn secondary(&self, number: u32) -> bool {
        self.primary(31) && self.bit(0x401e, number)
    }

    /// VMREAD, of a half too (§25.11.2).
    pub fn read(&self, encoding: u64) -> u64 {
        let whole = self.get(encoding as u16 & !1);
        if encoding & 1 != 0 { whole >> 32 } else { whole }
    }

    /// VMWRITE. Of access rights the reserved bits are dropped, as some processors and stock KVM do.
    pub fn write(&mut self, encoding: u64, value: u64) {
        let (field, old) = (encoding as u16 & !1, self.get(encoding as u16 & !1));
        let rights = (0x4814..=0x4822).contains(&field);
        self.set(
            field,
            match encoding & 1 {
                0 if rights => value & 0x1_f0ff,
                0 => value,
                _ => old & 0xffff_ffff | value << 32,
            },
        );
    }
}
