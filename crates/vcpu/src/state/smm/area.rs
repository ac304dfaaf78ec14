//! The state-save area of system-management mode: 512 bytes at SMBASE + FE00h.
//!
//! Two maps: that of AMD64 (APM vol. 2 §10.2.3, table 10-1), and the legacy map of CPUs without long
//! mode, as KVM lays it out. Like KVM both have the interrupt shadow in a reserved byte, and no
//! instruction is ever restarted: the fields for that are zero and are not read.

use backend::ShadowBy;
use x86::{
    Cr0, Cr4, Efer, Gpa, Rflags,
    segment::{DescriptorTable, Segment, attr},
};

/// Bytes of the save area.
pub const SIZE: usize = 512;
/// Where it lies, from SMBASE.
pub const OFFSET: u64 = 0xfe00;

/// The save area.
pub type Area = [u8; SIZE];

/// Revision with a relocatable base and the AMD64 map.
const REVISION_64: u32 = 0x0002_0064;
/// Revision with a relocatable base and the legacy map.
const REVISION_32: u32 = 0x0002_0000;

/// What the save area holds of a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // Named as in the manual.
pub struct SavedCpu {
    /// The general registers in encoding order.
    pub gpr: [u64; 16],
    pub rip: u64,
    pub rflags: Rflags,
    pub dr6: u64,
    pub dr7: u64,
    pub cr0: Cr0,
    pub cr3: u64,
    pub cr4: Cr4,
    /// `None` in the legacy map.
    pub efer: Option<Efer>,
    pub smbase: u64,
    /// The instruction that has made an interrupt shadow, if there is one.
    pub shadow: Option<ShadowBy>,
    /// ES, CS, SS, DS, FS, GS, LDTR, TR.
    pub segments: [Segment; 8],
    pub gdtr: DescriptorTable,
    pub idtr: DescriptorTable,
    /// Where L1 describes the guest of its own that ran. `None`: it ran itself. AMD64's map alone.
    pub guest: Option<Gpa>,
}

/// What the byte of the interrupt shadow says, as KVM has it: bit 0 is MOV SS, bit 1 STI, both are a CPU that does not say.
fn shadow_byte(shadow: Option<ShadowBy>) -> u8 {
    match shadow {
        None => 0,
        Some(ShadowBy::MovSs) => 1,
        Some(ShadowBy::Sti) => 2,
        Some(ShadowBy::Unknown) => 3,
    }
}

/// The shadow that the byte says, in which firmware may have written anything.
fn shadow_of(byte: u8) -> Option<ShadowBy> {
    match byte {
        0 => None,
        1 => Some(ShadowBy::MovSs),
        2 => Some(ShadowBy::Sti),
        _ => Some(ShadowBy::Unknown),
    }
}

/// Offsets in the AMD64 map.
mod at64 {
    /// ES, CS, SS, DS, FS, GS, LDTR, TR.
    pub const SEGMENTS: [usize; 8] = [0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x70, 0x90];
    pub const GDTR: usize = 0x60;
    pub const IDTR: usize = 0x80;
    /// A reserved byte.
    pub const INTERRUPT_SHADOW: usize = 0xcb;
    pub const EFER: usize = 0xd0;
    /// Not 0: a guest of the guest's ran, by the block at the address behind.
    pub const GUEST_RAN: usize = 0xd8;
    pub const GUEST: usize = 0xe0;
    pub const REVISION: usize = 0xfc;
    pub const SMBASE: usize = 0x100;
    pub const CR4: usize = 0x148;
    pub const CR3: usize = 0x150;
    pub const CR0: usize = 0x158;
    pub const DR7: usize = 0x160;
    pub const DR6: usize = 0x168;
    pub const RFLAGS: usize = 0x170;
    pub const RIP: usize = 0x178;
    /// RAX; the others go down from here in encoding order.
    pub const RAX: usize = 0x1f8;
}

/// Offsets in the legacy map.
mod at32 {
    /// Hidden state of ES, CS, SS, DS, FS, GS, LDTR, TR.
    pub const SEGMENTS: [usize; 8] = [0x184, 0x190, 0x19c, 0x12c, 0x138, 0x144, 0x178, 0x15c];
    /// Selectors of the same eight.
    pub const SELECTORS: [usize; 8] = [0x1a8, 0x1ac, 0x1b0, 0x1b4, 0x1b8, 0x1bc, 0x1c0, 0x1c4];
    pub const SMBASE: usize = 0xf8;
    pub const REVISION: usize = 0xfc;
    pub const CR4: usize = 0x114;
    /// A reserved byte.
    pub const INTERRUPT_SHADOW: usize = 0x11a;
    pub const IDTR: usize = 0x150;
    pub const GDTR: usize = 0x16c;
    pub const DR7: usize = 0x1c8;
    pub const DR6: usize = 0x1cc;
    /// EAX; the others follow in encoding order.
    pub const EAX: usize = 0x1d0;
    pub const EIP: usize = 0x1f0;
    pub const EFLAGS: usize = 0x1f4;
    pub const CR3: usize = 0x1f8;
    pub const CR0: usize = 0x1fc;
}

fn put<const N: usize>(area: &mut Area, at: usize, value: [u8; N]) {
    if let Some(slot) = area.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *slot = value;
    }
}

fn get<const N: usize>(area: &Area, at: usize) -> [u8; N] {
    area.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn put32(area: &mut Area, at: usize, value: u64) {
    put(area, at, (value as u32).to_le_bytes());
}

fn put64(area: &mut Area, at: usize, value: u64) {
    put(area, at, value.to_le_bytes());
}

fn get16(area: &Area, at: usize) -> u16 {
    u16::from_le_bytes(get(area, at))
}

fn get32(area: &Area, at: usize) -> u32 {
    u32::from_le_bytes(get(area, at))
}

fn get64(area: &Area, at: usize) -> u64 {
    u64::from_le_bytes(get(area, at))
}

/// Attributes as a descriptor has them: the twelve bits with the limit's four between.
fn spread(packed: u16) -> u16 {
    (packed & 0xff) | (packed & 0xf00) << 4
}

/// The twelve bits of attributes together, as [`Segment`] has them.
fn pack(spread: u16) -> u16 {
    ((spread & 0xff) | (spread >> 4 & 0xf00)) & attr::ALL
}

/// Where the registers lie in the AMD64 map.
fn gpr64(n: usize) -> usize {
    at64::RAX.wrapping_sub(n.wrapping_mul(8))
}

/// Writes the AMD64 map.
pub fn store64(cpu: &SavedCpu, area: &mut Area) {
    for (segment, at) in cpu.segments.iter().zip(at64::SEGMENTS) {
        put(area, at, segment.selector.to_le_bytes());
        put(area, at + 2, spread(segment.attr).to_le_bytes());
        put(area, at + 4, segment.limit.to_le_bytes());
        put64(area, at + 8, segment.base);
    }
    for (table, at) in [(&cpu.gdtr, at64::GDTR), (&cpu.idtr, at64::IDTR)] {
        put32(area, at + 4, table.limit.into());
        put64(area, at + 8, table.base);
    }
    put(area, at64::INTERRUPT_SHADOW, [shadow_byte(cpu.shadow)]);
    put32(area, at64::REVISION, REVISION_64.into());
    put32(area, at64::SMBASE, cpu.smbase);
    for (value, at) in [
        (cpu.efer.map_or(0, |efer| efer.bits()), at64::EFER),
        (u64::from(cpu.guest.is_some()), at64::GUEST_RAN),
        (cpu.guest.map_or(0, |at| at.0), at64::GUEST),
        (cpu.cr4.bits(), at64::CR4),
        (cpu.cr3, at64::CR3),
        (cpu.cr0.bits(), at64::CR0),
        (cpu.dr7, at64::DR7),
        (cpu.dr6, at64::DR6),
        (cpu.rflags.bits(), at64::RFLAGS),
        (cpu.rip, at64::RIP),
    ] {
        put64(area, at, value);
    }
    for (n, value) in cpu.gpr.iter().enumerate() {
        put64(area, gpr64(n), *value);
    }
}

/// Reads the AMD64 map.
pub fn load64(area: &Area, cpu: &mut SavedCpu) {
    for (segment, at) in cpu.segments.iter_mut().zip(at64::SEGMENTS) {
        segment.selector = get16(area, at);
        segment.attr = pack(get16(area, at + 2));
        segment.limit = get32(area, at + 4);
        segment.base = get64(area, at + 8);
    }
    for (table, at) in [(&mut cpu.gdtr, at64::GDTR), (&mut cpu.idtr, at64::IDTR)] {
        table.limit = get32(area, at + 4) as u16;
        table.base = get64(area, at + 8);
    }
    let [shadow] = get(area, at64::INTERRUPT_SHADOW);
    cpu.shadow = shadow_of(shadow);
    cpu.smbase = get32(area, at64::SMBASE).into();
    cpu.efer = Some(Efer::from_bits_retain(get64(area, at64::EFER)));
    // Whatever firmware has left there is checked before it runs.
    cpu.guest = (get64(area, at64::GUEST_RAN) != 0).then(|| Gpa(get64(area, at64::GUEST)));
    cpu.cr4 = Cr4::from_bits_retain(get64(area, at64::CR4));
    cpu.cr3 = get64(area, at64::CR3);
    cpu.cr0 = Cr0::from_bits_retain(get64(area, at64::CR0));
    cpu.dr7 = get64(area, at64::DR7);
    cpu.dr6 = get64(area, at64::DR6);
    cpu.rflags = Rflags::from_bits_retain(get64(area, at64::RFLAGS));
    cpu.rip = get64(area, at64::RIP);
    for (n, value) in cpu.gpr.iter_mut().enumerate() {
        *value = get64(area, gpr64(n));
    }
}

/// Writes the legacy map. Of every register the low 32 bits, and of the general ones eight.
pub fn store32(cpu: &SavedCpu, area: &mut Area) {
    let places = at32::SEGMENTS.into_iter().zip(at32::SELECTORS);
    for (segment, (at, selector)) in cpu.segments.iter().zip(places) {
        put32(area, at, u64::from(spread(segment.attr)) << 8);
        put32(area, at + 4, segment.limit.into());
        put32(area, at + 8, segment.base);
        put32(area, selector, segment.selector.into());
    }
    for (table, at) in [(&cpu.gdtr, at32::GDTR), (&cpu.idtr, at32::IDTR)] {
        put32(area, at + 4, table.limit.into());
        put32(area, at + 8, table.base);
    }
    put(area, at32::INTERRUPT_SHADOW, [shadow_byte(cpu.shadow)]);
    for (value, at) in [
        (cpu.smbase, at32::SMBASE),
        (REVISION_32.into(), at32::REVISION),
        (cpu.cr4.bits(), at32::CR4),
        (cpu.dr7, at32::DR7),
        (cpu.dr6, at32::DR6),
        (cpu.rip, at32::EIP),
        (cpu.rflags.bits(), at32::EFLAGS),
        (cpu.cr3, at32::CR3),
        (cpu.cr0.bits(), at32::CR0),
    ] {
        put32(area, at, value);
    }
    for (n, value) in cpu.gpr.iter().take(8).enumerate() {
        put32(area, at32::EAX + 4 * n, *value);
    }
}

/// Reads the legacy map.
pub fn load32(area: &Area, cpu: &mut SavedCpu) {
    let places = at32::SEGMENTS.into_iter().zip(at32::SELECTORS);
    for (segment, (at, selector)) in cpu.segments.iter_mut().zip(places) {
        segment.attr = pack((get32(area, at) >> 8) as u16);
        segment.limit = get32(area, at + 4);
        segment.base = get32(area, at + 8).into();
        segment.selector = get16(area, selector);
    }
    for (table, at) in [(&mut cpu.gdtr, at32::GDTR), (&mut cpu.idtr, at32::IDTR)] {
        table.limit = get32(area, at + 4) as u16;
        table.base = get32(area, at + 8).into();
    }
    let [shadow] = get(area, at32::INTERRUPT_SHADOW);
    cpu.shadow = shadow_of(shadow);
    let word = |at| u64::from(get32(area, at));
    cpu.smbase = word(at32::SMBASE);
    // A CPU without long mode has no place for either, and RSM leaves EFER as it is.
    (cpu.efer, cpu.guest) = (None, None);
    cpu.cr4 = Cr4::from_bits_retain(word(at32::CR4));
    cpu.dr7 = word(at32::DR7);
    cpu.dr6 = word(at32::DR6);
    cpu.rip = word(at32::EIP);
    cpu.rflags = Rflags::from_bits_retain(word(at32::EFLAGS));
    cpu.cr3 = word(at32::CR3);
    cpu.cr0 = Cr0::from_bits_retain(word(at32::CR0));
    cpu.gpr = [0; 16];
    for (n, value) in cpu.gpr.iter_mut().take(8).enumerate() {
        *value = word(at32::EAX + 4 * n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every field different.
    fn cpu(wide: bool) -> SavedCpu {
        let mut next = 0x1122_3344_5566_0000u64;
        let mut number = || {
            next += 0x0101_0101_0101_0107;
            if wide { next } else { next & 0xffff_ffff }
        };
        let mut gpr = [0; 16];
        gpr.iter_mut().take(if wide { 16 } else { 8 }).for_each(|slot| *slot = number());
        let mut segments = [Segment::default(); 8];
        for segment in &mut segments {
            *segment = Segment {
                base: number(),
                limit: number() as u32,
                selector: number() as u16,
                attr: number() as u16 & attr::ALL,
            };
        }
        let mut table = || DescriptorTable { base: number(), limit: number() as u16 };
        let (gdtr, idtr) = (table(), table());
        SavedCpu {
            gpr,
            rip: number(),
            rflags: Rflags::from_bits_retain(number()),
            dr6: number(),
            dr7: number(),
            cr0: Cr0::from_bits_retain(number()),
            cr3: number(),
            cr4: Cr4::from_bits_retain(number()),
            efer: wide.then(|| Efer::from_bits_retain(number())),
            smbase: number() & 0xffff_ffff,
            shadow: Some(ShadowBy::Sti),
            segments,
            gdtr,
            idtr,
            guest: wide.then_some(Gpa(0x1234_5000)),
        }
    }

    #[test]
    fn both_maps_give_back_what_they_were_given() {
        let (mut area, mut back) = ([0; SIZE], SavedCpu::default());
        store64(&cpu(true), &mut area);
        load64(&area, &mut back);
        assert_eq!(back, cpu(true));
        let mut area = [0; SIZE];
        store32(&cpu(false), &mut area);
        load32(&area, &mut back);
        assert_eq!(back, cpu(false));
    }

    #[test]
    fn fields_lie_where_the_manual_has_them() {
        let mut area = [0; SIZE];
        let cpu = cpu(true);
        store64(&cpu, &mut area);
        let word = |at: usize| get64(&area, at - 0xfe00);
        assert_eq!(word(0xfff8), cpu.gpr[0]);
        assert_eq!(word(0xff80), cpu.gpr[15]);
        assert_eq!(word(0xff78), cpu.rip);
        assert_eq!(word(0xff50), cpu.cr3);
        assert_eq!(word(0xfed0), cpu.efer.unwrap().bits());
        assert_eq!((word(0xfed8), word(0xfee0)), (1, 0x1234_5000));
        assert_eq!(word(0xfe98), cpu.segments[7].base);
        assert_eq!(word(0xfe68), cpu.gdtr.base);
        assert_eq!(word(0xfe88), cpu.idtr.base);
        assert_eq!(get32(&area, 0xfefc - 0xfe00), 0x2_0064);
        assert_eq!(get32(&area, 0xff00 - 0xfe00), cpu.smbase as u32);
        // No instruction is restarted.
        assert_eq!(get16(&area, 0xfec8 - 0xfe00), 0);
        assert_eq!(spread(0xa9b), 0xa09b);
    }
}
