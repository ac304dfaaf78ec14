//! What a guest sees of Hyper-V's interface beside CPUID and MSRs: hypercalls, none of which is there, and the code that
//! makes them (Hypervisor Top-Level Functional Specification, "Hypercall interface").

use x86::vmcs::enlightened::flush;

/// How a hypercall ends: bits 15:0 of its result.
pub mod status {
    /// The call was carried out.
    pub const SUCCESS: u64 = 0;
    /// There is no call of this number.
    pub const INVALID_CODE: u64 = 2;
    /// The call's control word or its input is malformed.
    pub const INVALID_INPUT: u64 = 3;
}

/// Bit 0 of an MSR that names a page.
pub const ENABLE: u64 = 1;

/// The page that an MSR names, if it is on.
pub const fn page(msr: u64) -> Option<x86::Gpa> {
    if msr & ENABLE != 0 { Some(x86::Gpa(msr & !0xfff)) } else { None }
}

/// The code of a hypercall: this CPU's instruction, of which the last byte differs, and RET.
pub const fn code(last: u8) -> [u8; 4] {
    [0x0f, 0x01, last, 0xc3]
}

/// The control word of a hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control(pub u64);

impl Control {
    /// Bits 31:27, 47:44 and 63:60.
    const RESERVED: u64 = 0xf000_f000_f800_0000;

    fn number(self) -> u16 {
        self.0 as u16
    }

    /// How a call of L1's ends: there is none.
    pub fn answer(self) -> u64 {
        // The word is judged before the number in it.
        if self.0 & Self::RESERVED != 0 { status::INVALID_INPUT } else { status::INVALID_CODE }
    }

    /// How a call that flushes ends: all that the caller may have meant was flushed. A list is a repeated call, of which
    /// all elements are done; a space is not.
    pub fn flushed(self) -> u64 {
        // Bits 43:32 and 59:48 (TLFS, "Hypercall inputs").
        let (count, start) = (self.0 >> 32 & 0xfff, self.0 >> 48 & 0xfff);
        let is_list = matches!(self.number(), flush::LIST | flush::LIST_EX);
        let is_extended = matches!(self.number(), flush::SPACE_EX | flush::LIST_EX);
        // Only the calls on a sparse set have a header of variable size.
        let variable = self.0 >> 17 & 0x3ff != 0 && !is_extended;
        let malformed = if is_list { count == 0 || start != 0 } else { count != 0 || start != 0 };
        if self.0 & Self::RESERVED != 0 || variable || malformed {
            return status::INVALID_INPUT;
        }
        status::SUCCESS | if is_list { count << 32 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_is_there() {
        for number in [0, 2, 8, 0x5c, 0x8001, 0xffff] {
            assert_eq!(Control(number).answer(), status::INVALID_CODE);
        }
        for bit in (27..32).chain(44..48).chain(60..64) {
            assert_eq!(Control(1 << bit).answer(), status::INVALID_INPUT, "{bit}");
        }
    }

    #[test]
    fn a_flush_of_a_list_does_all_of_it() {
        let fast = 1 << 16;
        assert_eq!(Control(2 | fast).flushed(), 0);
        assert_eq!(Control(3 | 5 << 32).flushed(), 5 << 32);
        assert_eq!(Control(0x14 | 5 << 32 | 3 << 17).flushed(), 5 << 32);
        for bad in [2 | 1 << 32, 3, 3 | 5 << 32 | 1 << 48, 2 | 1 << 17, 2 | 1 << 63] {
            assert_eq!(Control(bad).flushed(), status::INVALID_INPUT, "{bad:#x}");
        }
        assert!(flush::is(0x13) && !flush::is(4));
    }

    #[test]
    fn an_msr_names_a_page_if_bit_0_says_so() {
        assert_eq!(page(0x5000), None);
        assert_eq!(page(0x5fff), Some(x86::Gpa(0x5000)));
        assert_eq!(code(0xc1), [0x0f, 1, 0xc1, 0xc3]);
    }
}
