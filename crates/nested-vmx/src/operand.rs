//! Operands of VMX instructions, from the exit's instruction information and qualification
//! (SDM vol. 3C §28.2.5, tables 28-13 and 28-14).

use x86::reg::is_canonical;
use x86::segment::kind;
use x86::{Direction, Exception, Segment};

/// The instruction-information field of an exit for a VMX instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Information(pub u32);

impl Information {
    const fn bits(self, shift: u32, width: u32) -> u32 {
        self.0 >> shift & ((1 << width) - 1)
    }

    /// The first operand's register, for VMREAD and VMWRITE, and LLDT, SLDT and STR.
    pub const fn register1(self) -> u8 {
        self.bits(3, 4) as u8
    }

    /// The second operand's register: a field's encoding, or the kind of an invalidation.
    pub const fn register2(self) -> u8 {
        self.bits(28, 4) as u8
    }

    /// Which instruction of those that share the exit reason, for instructions of table registers (tables 28-10 and
    /// 28-11): SGDT, SIDT, LGDT, LIDT, or SLDT, STR, LLDT, LTR.
    pub const fn identity(self) -> u8 {
        self.bits(28, 2) as u8
    }

    /// The first operand is a register, for VMREAD and VMWRITE, and LLDT, SLDT and STR.
    pub const fn is_register(self) -> bool {
        self.bits(10, 1) != 0
    }

    /// The segment register, in encoding order. 6 and 7 are not used.
    pub const fn segment(self) -> u8 {
        self.bits(15, 3) as u8
    }

    const fn address_mask(self) -> u64 {
        // 2 is 64 bits. 3 is no size: taken for the widest, which an address is checked by anyway.
        match self.bits(7, 3) {
            0 => 0xffff,
            1 => 0xffff_ffff,
            _ => u64::MAX,
        }
    }
}

/// What an operand is decoded with.
pub struct Context<'a> {
    /// General registers in encoding order.
    pub gprs: &'a [u64; 16],
    /// The segment that [`Information::segment`] names.
    pub segment: Segment,
    /// The vCPU runs 64-bit code.
    pub is_64_bit: bool,
    /// Bits of a linear address: 48 or 57.
    pub linear_bits: u32,
}

/// The linear address of a memory operand of `length` bytes. `displacement` is the exit qualification.
pub fn linear(
    information: Information,
    displacement: u64,
    context: &Context<'_>,
    length: u32,
    using: Direction,
) -> Result<u64, Exception> {
    let offset = offset(information, displacement, context);
    // Through SS it is #SS, through all others #GP.
    let fault = if information.segment() == 2 { Exception::ss(0) } else { Exception::gp(0) };
    if context.is_64_bit {
        // FS and GS have a base in 64-bit mode, the others do not.
        // Limits and rights are not asked in 64-bit mode: whether the address is canonical is.
        let base = if information.segment() >= 4 { context.segment.base } else { 0 };
        let first = base.wrapping_add(offset);
        // The last byte too: an operand may run into the hole, or around the end of the address space.
        let last = first.wrapping_add(u64::from(length.saturating_sub(1)));
        let whole = is_canonical(first, context.linear_bits)
            && is_canonical(last, context.linear_bits)
            && last >= first;
        return if whole { Ok(first) } else { Err(fault) };
    }
    let segment = &context.segment;
    // Rights go before limits, and are #GP for SS, too. An unusable register is not present.
    if !allows(segment, using) {
        return Err(Exception::gp(0));
    }
    // A fault of SS's limit is #SS.
    if !is_within(segment, offset, length) {
        return Err(fault);
    }
    // Outside 64-bit mode a linear address wraps at 4 GiB.
    Ok(segment.base.wrapping_add(offset) & 0xffff_ffff)
}

/// The effective address.
fn offset(information: Information, displacement: u64, context: &Context<'_>) -> u64 {
    let register = |n: u32| {
        let at = n as usize;
        context.gprs[at & 15]
    };
    // The displacement is the qualification, sign-extended by the CPU. RIP-relative ones have RIP in it already.
    let mut sum = displacement;
    // The bits say that there is no such register: base, then index.
    if information.bits(27, 1) == 0 {
        sum = sum.wrapping_add(register(information.bits(23, 4)));
    }
    if information.bits(22, 1) == 0 {
        sum = sum.wrapping_add(register(information.bits(18, 4)) << information.bits(0, 2));
    }
    // Cut to the address size before the segment's base is added, as the CPU does.
    let sum = sum & information.address_mask();
    if context.is_64_bit { sum } else { sum & 0xffff_ffff }
}

/// Whether a segment of protected mode allows the use (SDM vol. 3A §5.5). What is unusable allows none.
fn allows(segment: &Segment, using: Direction) -> bool {
    let is_code = segment.kind() & 8 != 0;
    let second = segment.kind() & 2 != 0;
    // Read/write is the same bit for data, and readable for code.
    let type_allows = match using {
        Direction::Write => !is_code && second,
        Direction::Read => !is_code || second,
    };
    segment.is_present() && segment.is_code_or_data() && type_allows
}

/// Whether all bytes lie within a segment's limit (SDM vol. 3A §5.3).
fn is_within(segment: &Segment, offset: u64, length: u32) -> bool {
    // Saturating: 64-bit offsets do not come here, but a limit is not to be passed by a wrap.
    let last = offset.saturating_add(u64::from(length.saturating_sub(1)));
    let limit = u64::from(segment.limit);
    let expands_down = segment.kind() & !(kind::DATA_RW_ACCESSED & 3) == 4;
    if expands_down {
        let top = if segment.is_default_big() { 0xffff_ffff } else { 0xffff };
        // Expand-down: what is valid lies above the limit.
        return offset > limit && last <= top;
    }
    last <= limit
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::segment::attr;

    const FLAT: Segment = Segment { base: 0, limit: u32::MAX, selector: 8, attr: 0xc93 };
    const GPRS: [u64; 16] =
        [0x1000, 0x20, 0, 0, 0xffff_f000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xffff_8000_0000_0000];

    fn long(segment: Segment) -> Context<'static> {
        Context { gprs: &GPRS, segment, is_64_bit: true, linear_bits: 48 }
    }

    fn legacy(segment: Segment) -> Context<'static> {
        Context { is_64_bit: false, ..long(segment) }
    }

    /// Scaling, address size, segment, index, base.
    fn info(
        scale: u32,
        size: u32,
        segment: u32,
        index: Option<u32>,
        base: Option<u32>,
    ) -> Information {
        let index = index.map_or(1 << 22, |r| r << 18);
        let base = base.map_or(1 << 27, |r| r << 23);
        Information(scale | size << 7 | segment << 15 | index | base)
    }

    fn read(i: Information, disp: u64, c: &Context<'_>) -> Result<u64, Exception> {
        linear(i, disp, c, 8, Direction::Read)
    }

    #[test]
    fn base_index_scale_and_displacement_add_up() {
        let i = info(2, 2, 3, Some(1), Some(0));
        assert_eq!(read(i, 0x10, &long(FLAT)), Ok(0x1000 + 0x80 + 0x10));
        assert_eq!(read(i, 0x1_0000_0000, &legacy(FLAT)), Ok(0x1080));
        assert!(read(info(0, 2, 3, None, None), (-4i64) as u64, &long(FLAT)).is_err());
        assert_eq!(
            read(info(0, 2, 3, None, None), (-16i64) as u64, &long(FLAT)),
            Ok(-16i64 as u64)
        );
    }

    #[test]
    fn the_address_size_cuts_the_offset() {
        assert_eq!(read(info(0, 0, 3, None, None), 0x1_2345, &legacy(FLAT)), Ok(0x2345));
        assert_eq!(read(info(0, 1, 3, None, None), 0x5_0000_0001, &long(FLAT)), Ok(1));
    }

    #[test]
    fn only_fs_and_gs_have_a_base_in_64_bit_mode() {
        let based = Segment { base: 0x7000, ..FLAT };
        for (segment, base) in [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0x7000), (5, 0x7000)] {
            let i = info(0, 2, segment, None, Some(0));
            assert_eq!(read(i, 0, &long(based)), Ok(0x1000 + base));
        }
    }

    #[test]
    fn what_is_not_canonical_faults() {
        let gp = Err(Exception::gp(0));
        assert_eq!(read(info(0, 2, 3, None, None), 0x8000_0000_0000, &long(FLAT)), gp);
        assert_eq!(read(info(0, 2, 3, None, None), 0x7fff_ffff_fffc, &long(FLAT)), gp);
        assert_eq!(read(info(0, 2, 3, None, Some(15)), 0, &long(FLAT)), Ok(GPRS[15]));
        let wide = Context { linear_bits: 57, ..long(FLAT) };
        assert!(read(info(0, 2, 3, None, None), 0x8000_0000_0000, &wide).is_ok());
        let ss = Err(Exception::ss(0));
        assert_eq!(read(info(0, 2, 2, None, None), 0x8000_0000_0000, &long(FLAT)), ss);
    }

    #[test]
    fn limits_hold_in_protected_mode() {
        let small = Segment { limit: 0x1006, ..FLAT };
        assert_eq!(read(info(0, 1, 3, None, Some(0)), 0, &legacy(small)), Err(Exception::gp(0)));
        assert_eq!(read(info(0, 1, 2, None, Some(0)), 0, &legacy(small)), Err(Exception::ss(0)));
        let enough = Segment { limit: 0x1007, ..FLAT };
        assert_eq!(read(info(0, 1, 3, None, Some(0)), 0, &legacy(enough)), Ok(0x1000));
        let down = Segment { limit: 0xfff, attr: 0xc97, ..FLAT };
        assert_eq!(read(info(0, 1, 3, None, Some(0)), 0, &legacy(down)), Ok(0x1000));
        let covered = Segment { limit: 0x1000, ..down };
        assert!(read(info(0, 1, 3, None, Some(0)), 0, &legacy(covered)).is_err());
    }

    #[test]
    fn rights_hold_in_protected_mode() {
        let i = info(0, 1, 2, None, Some(0));
        for (kind, reads, writes) in
            [(1, true, false), (3, true, true), (9, false, false), (11, true, false)]
        {
            let context = legacy(Segment { attr: 0xc90 | kind, ..FLAT });
            assert_eq!(linear(i, 0, &context, 8, Direction::Read).is_ok(), reads);
            assert_eq!(linear(i, 0, &context, 8, Direction::Write).is_ok(), writes);
        }
        let absent = legacy(Segment { attr: FLAT.attr & !attr::P, ..FLAT });
        assert_eq!(linear(i, 0, &absent, 8, Direction::Read), Err(Exception::gp(0)));
    }
}
