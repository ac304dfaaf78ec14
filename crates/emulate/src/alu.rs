//! Arithmetic with flags, as pure functions of operands. Values are the low `size` bytes of a u64
//! (upper bits ignored on the way in, zero on the way out); flags are the RFLAGS bits that the
//! instruction defines; those that the manuals leave undefined get a fixed value or stay.
//!
//! SDM vol. 1 §3.4.3.1, vol. 2 per instruction.

use x86::Rflags;

use crate::register::{sign_extend, size_mask};

const NO_FLAGS: Rflags = Rflags::empty();

/// A result with the status flags; the flags replace the bits of the mask that the caller knows.
pub(crate) type Flagged = (u64, Rflags);

#[inline]
const fn bits(size: u8) -> u32 {
    size as u32 * 8
}

#[inline]
const fn top(value: u64, size: u8) -> bool {
    // The mask bounds the shift for the compiler; no size reaches it.
    (value >> (bits(size).wrapping_sub(1) & 63)) & 1 != 0
}

#[inline]
const fn flag(set: bool, bit: Rflags) -> Rflags {
    if set { bit } else { NO_FLAGS }
}

/// SF, ZF and PF of a result.
#[inline]
pub(crate) const fn sign_zero_parity(result: u64, size: u8) -> Rflags {
    flag(top(result, size), Rflags::SF)
        .union(flag(result & size_mask(size) == 0, Rflags::ZF))
        // Of the low byte alone, whatever the size (SDM vol. 1 §3.4.3.1).
        .union(flag((result as u8).count_ones() & 1 == 0, Rflags::PF))
}

/// `a + b + carry`.
#[inline]
pub(crate) const fn add(size: u8, a: u64, b: u64, carry: bool) -> Flagged {
    let result = a.wrapping_add(b).wrapping_add(carry as u64) & size_mask(size);
    // A carry comes out of a bit where both operands have it, or one has it and the result has not.
    let carries = (a & b) | ((a | b) & !result);
    let flags = flag(top(carries, size), Rflags::CF)
        .union(flag(carries & 8 != 0, Rflags::AF))
        .union(flag(top((a ^ result) & (b ^ result), size), Rflags::OF))
        .union(sign_zero_parity(result, size));
    (result, flags)
}

/// `a - b - borrow`.
#[inline]
pub(crate) const fn sub(size: u8, a: u64, b: u64, borrow: bool) -> Flagged {
    let result = a.wrapping_sub(b).wrapping_sub(borrow as u64) & size_mask(size);
    // The same for borrows: out of a bit that only `b` has, or that one of them forces and the
    // result shows.
    let borrows = (!a & b) | ((!a | b) & result);
    let flags = flag(top(borrows, size), Rflags::CF)
        .union(flag(borrows & 8 != 0, Rflags::AF))
        .union(flag(top((a ^ b) & (a ^ result), size), Rflags::OF))
        .union(sign_zero_parity(result, size));
    (result, flags)
}

/// The flags of AND, OR, XOR and TEST for their result; AF is undefined and cleared.
#[inline]
pub(crate) const fn logic(size: u8, result: u64) -> Flagged {
    let result = result & size_mask(size);
    (result, sign_zero_parity(result, size))
}

/// The shifts and rotates by one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shift {
    Rol,
    Ror,
    Rcl,
    Rcr,
    Shl,
    Shr,
    Sar,
}

/// Shifts or rotates `a` by `count`; `flags` are the flags before, the returned ones are complete.
pub(crate) fn shift(kind: Shift, size: u8, a: u64, count: u8, flags: Rflags) -> Flagged {
    let width = bits(size);
    // The CPU takes five bits of the count, six with 64-bit operands (SDM vol. 2B, SHL).
    let count = u32::from(count & if size == 8 { 0x3f } else { 0x1f });
    let a = a & size_mask(size);
    // A count of 0 changes no flag (SDM vol. 2B, SHL).
    if count == 0 {
        return (a, flags);
    }
    // Twice as wide, so that what is shifted out is still there to be the carry.
    let wide = u128::from(a);
    match kind {
        Shift::Shl => {
            // Bit `width` of the wide result is the last bit shifted out; 0 when all are gone.
            let shifted = wide.wrapping_shl(count);
            let result = shifted as u64 & size_mask(size);
            let carry = shifted.wrapping_shr(width) & 1 != 0;
            let overflow = top(result, size) != carry;
            shifted_flags(size, result, carry, overflow, flags)
        }
        Shift::Shr => {
            let result = wide.wrapping_shr(count) as u64;
            let carry = wide.wrapping_shr(count.wrapping_sub(1)) & 1 != 0;
            // Defined for counts of 1: the operand's sign. Hardware gives, for all counts, the
            // xor of the result's two top bits.
            let overflow = top(result ^ (result << 1), size);
            shifted_flags(size, result, carry, overflow, flags)
        }
        Shift::Sar => {
            // The sign goes on for ever: a count above the width leaves nothing but it.
            let signed = i128::from(sign_extend(a, size) as i64);
            let result = signed.wrapping_shr(count) as u64 & size_mask(size);
            let carry = signed.wrapping_shr(count.wrapping_sub(1)) & 1 != 0;
            shifted_flags(size, result, carry, false, flags)
        }
        Shift::Rol => {
            // By the width, while the flags change for every masked count but 0 (SDM vol. 2B,
            // RCL/RCR/ROL/ROR).
            let by = count & width.wrapping_sub(1);
            let result = (wide.wrapping_shl(by) | wide.wrapping_shr(width.wrapping_sub(by))) as u64
                & size_mask(size);
            let carry = result & 1 != 0;
            rotated_flags(result, carry, top(result, size) != carry, flags)
        }
        Shift::Ror => {
            let by = count & width.wrapping_sub(1);
            let result = (wide.wrapping_shr(by) | wide.wrapping_shl(width.wrapping_sub(by))) as u64
                & size_mask(size);
            let overflow = top(result ^ (result << 1), size);
            rotated_flags(result, top(result, size), overflow, flags)
        }
        Shift::Rcl | Shift::Rcr => {
            // The carry is the operand's bit `width`; rotate width + 1 bits.
            let ring = width.wrapping_add(1);
            // Of 8 and 16 bits a count of 31 goes round more than once.
            let by = count.checked_rem(ring).unwrap_or(0);
            let left =
                if matches!(kind, Shift::Rcl) || by == 0 { by } else { ring.wrapping_sub(by) };
            let with_carry = wide | u128::from(flags.contains(Rflags::CF)).wrapping_shl(width);
            let rotated =
                with_carry.wrapping_shl(left) | with_carry.wrapping_shr(ring.wrapping_sub(left));
            // Without a rotation both shifts above give the same bits shifted by the whole ring.
            let rotated = if left == 0 { with_carry } else { rotated };
            let result = rotated as u64 & size_mask(size);
            let carry = rotated.wrapping_shr(width) & 1 != 0;
            let overflow = if matches!(kind, Shift::Rcl) {
                top(result, size) != carry
            } else {
                top(result ^ (result << 1), size)
            };
            rotated_flags(result, carry, overflow, flags)
        }
    }
}

fn shifted_flags(size: u8, result: u64, carry: bool, overflow: bool, old: Rflags) -> Flagged {
    let new = flag(carry, Rflags::CF) | flag(overflow, Rflags::OF) | sign_zero_parity(result, size);
    (result, (old - Rflags::STATUS) | new)
}

fn rotated_flags(result: u64, carry: bool, overflow: bool, old: Rflags) -> Flagged {
    // Rotates leave SF, ZF, AF and PF as they were.
    let kept = old - (Rflags::CF | Rflags::OF);
    (result, kept | flag(carry, Rflags::CF) | flag(overflow, Rflags::OF))
}

/// SHLD and SHRD of `a`, filled from `fill`. Counts above the operand's width (16-bit
/// operands only) are undefined; here the operands continue as a ring.
pub(crate) fn double_shift(
    kind: DoubleShift,
    size: u8,
    a: u64,
    fill: u64,
    count: u8,
    flags: Rflags,
) -> Flagged {
    let left = kind == DoubleShift::Left;
    let width = bits(size);
    let count = u32::from(count & if size == 8 { 0x3f } else { 0x1f });
    let a = a & size_mask(size);
    let fill = fill & size_mask(size);
    if count == 0 {
        return (a, flags);
    }
    // 16-bit operands form a ring of three, so that counts above 16 have a value at all.
    let (result, carry) = if size == 2 {
        let ring = a << 32 | fill << 16 | a;
        if left {
            let shifted = ring.wrapping_shl(count);
            ((shifted >> 32) & 0xffff, (shifted >> 48) & 1 != 0)
        } else {
            (ring.wrapping_shr(count) & 0xffff, ring.wrapping_shr(count.wrapping_sub(1)) & 1 != 0)
        }
    } else if left {
        let pair = u128::from(a).wrapping_shl(width) | u128::from(fill);
        let result = pair.wrapping_shl(count).wrapping_shr(width) as u64 & size_mask(size);
        (result, u128::from(a).wrapping_shr(width.wrapping_sub(count)) & 1 != 0)
    } else {
        let pair = u128::from(fill).wrapping_shl(width) | u128::from(a);
        let result = pair.wrapping_shr(count) as u64 & size_mask(size);
        (result, pair.wrapping_shr(count.wrapping_sub(1)) & 1 != 0)
    };
    // Defined for counts of 1 only: the sign changed.
    let overflow =
        if left { top(result, size) != carry } else { top(result ^ (result << 1), size) };
    shifted_flags(size, result, carry, overflow, flags)
}

/// Unsigned `a * b`: low half, high half, CF and OF when the high half matters.
pub(crate) fn mul(size: u8, a: u64, b: u64) -> (u64, u64, Rflags) {
    let product = u128::from(a & size_mask(size)).wrapping_mul(u128::from(b & size_mask(size)));
    let high = product.wrapping_shr(bits(size)) as u64 & size_mask(size);
    (product as u64 & size_mask(size), high, flag(high != 0, Rflags::CF | Rflags::OF))
}

/// Signed `a * b`: low half, high half, CF and OF when the product does not fit the low half.
pub(crate) fn imul(size: u8, a: u64, b: u64) -> (u64, u64, Rflags) {
    let a = i128::from(sign_extend(a, size) as i64);
    let b = i128::from(sign_extend(b, size) as i64);
    let product = a.wrapping_mul(b);
    let low = product as u64 & size_mask(size);
    let high = product.wrapping_shr(bits(size)) as u64 & size_mask(size);
    // By comparison: a high half of all zeros or ones does not tell alone, the low half's sign
    // decides.
    let fits = i128::from(sign_extend(low, size) as i64) == product;
    (low, high, flag(!fits, Rflags::CF | Rflags::OF))
}

/// Unsigned `high:low / divisor`: quotient and remainder, `None` for #DE.
pub(crate) fn div(size: u8, high: u64, low: u64, divisor: u64) -> Option<(u64, u64)> {
    let mask = size_mask(size);
    let dividend = u128::from(high & mask).wrapping_shl(bits(size)) | u128::from(low & mask);
    let divisor = u128::from(divisor & mask);
    // A divisor of 0 gives no quotient: #DE by the same way as one that is too large.
    let quotient = dividend.checked_div(divisor)?;
    let remainder = dividend.checked_rem(divisor)?;
    (quotient <= u128::from(mask)).then_some((quotient as u64, remainder as u64))
}

/// Signed `high:low / divisor`: quotient and remainder, `None` for #DE.
pub(crate) fn idiv(size: u8, high: u64, low: u64, divisor: u64) -> Option<(u64, u64)> {
    let mask = size_mask(size);
    let unused = 128u32.wrapping_sub(bits(size).wrapping_mul(2));
    let dividend = u128::from(high & mask).wrapping_shl(bits(size)) | u128::from(low & mask);
    // To the top and back: the sign bit of the pair becomes that of the wide number.
    let dividend = (dividend.wrapping_shl(unused) as i128).wrapping_shr(unused);
    let divisor = i128::from(sign_extend(divisor, size) as i64);
    // Checked for the overflow, too: the smallest number by -1 has no quotient.
    let quotient = dividend.checked_div(divisor)?;
    let remainder = dividend.checked_rem(divisor)?;
    // The quotient has to fit the size with its sign; -2^63 by -1 does not (#DE).
    let fits = i128::from(sign_extend(quotient as u64, size) as i64) == quotient;
    fits.then_some((quotient as u64 & mask, remainder as u64 & mask))
}

/// Which way a double shift goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DoubleShift {
    /// To the left: SHLD.
    Left,
    /// To the right: SHRD.
    Right,
}

/// The end at which a search for a bit begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// The lowest bit: BSF, TZCNT.
    Lowest,
    /// The highest bit: BSR, LZCNT.
    Highest,
}

/// What a bit-test instruction does to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BitChange {
    Set,
    Reset,
    Complement,
}

/// The bit `offset` (modulo the width) of `a` as CF; the other flags stay as `flags` has them.
pub(crate) const fn bit_test(size: u8, a: u64, offset: u64, flags: Rflags) -> Rflags {
    // The part of the offset beyond the width has chosen the address already.
    let bit = 1u64 << (offset & (bits(size) as u64).wrapping_sub(1));
    flags.difference(Rflags::CF).union(flag(a & bit != 0, Rflags::CF))
}

/// `a` with its bit `offset` (modulo the width) changed.
pub(crate) const fn bit_change(size: u8, a: u64, offset: u64, change: BitChange) -> u64 {
    let bit = 1u64 << (offset & (bits(size) as u64).wrapping_sub(1));
    match change {
        BitChange::Set => a | bit,
        BitChange::Reset => a & !bit,
        BitChange::Complement => a ^ bit,
    }
}

/// The number of zeros before the first one, `bits(size)` for 0.
pub(crate) const fn count_zeros(size: u8, a: u64, begin: Begin) -> u64 {
    let a = a & size_mask(size);
    if a == 0 {
        return bits(size) as u64;
    }
    let zeros = match begin {
        Begin::Highest => a.leading_zeros().wrapping_sub(64u32.wrapping_sub(bits(size))),
        Begin::Lowest => a.trailing_zeros(),
    };
    zeros as u64
}

/// LZCNT and TZCNT: CF for a zero source, ZF for a zero result; the rest undefined and kept.
pub(crate) const fn zero_count_flags(size: u8, source: u64, result: u64, flags: Rflags) -> Rflags {
    flags
        .difference(Rflags::CF.union(Rflags::ZF))
        .union(flag(source & size_mask(size) == 0, Rflags::CF))
        .union(flag(result == 0, Rflags::ZF))
}

/// Evaluates condition `code` (0 = O … 15 = NLE, as in Jcc opcodes) against `flags`.
pub(crate) const fn condition(code: u8, flags: Rflags) -> bool {
    let sign_differs = flags.contains(Rflags::SF) != flags.contains(Rflags::OF);
    let holds = match code >> 1 {
        0 => flags.contains(Rflags::OF),
        1 => flags.contains(Rflags::CF),
        2 => flags.contains(Rflags::ZF),
        3 => flags.intersects(Rflags::CF.union(Rflags::ZF)),
        4 => flags.contains(Rflags::SF),
        5 => flags.contains(Rflags::PF),
        6 => sign_differs,
        _ => flags.contains(Rflags::ZF) || sign_differs,
    };
    // Odd codes are the negations of the even ones before them.
    holds != (code & 1 != 0)
}
