//! MSR bitmaps of L0 and L1 in one page, and what L1's bitmaps say of one access.

use x86::vmcs::{ProcControls, ProcControls2, field};
use x86::{Direction, Gpa};

use crate::{GuestMemory, Vmcs12};

/// Words of eight bytes in an MSR bitmap. The quarters: reads of low MSRs, of high ones, writes of low, of high.
pub const WORDS: usize = 512;
/// Word at which the x2APIC registers' reads begin.
const X2APIC: usize = 0x800 / 64;
/// Words of the x2APIC registers.
const X2APIC_WORDS: usize = 4;
/// Word at which writes of low MSRs begin.
const WRITES: usize = WORDS / 2;

/// x2APIC registers as numbers within their range.
mod x2apic {
    pub const TASK_PRIORITY: usize = 0x08;
    pub const END_OF_INTERRUPT: usize = 0x0b;
    pub const SELF_IPI: usize = 0x3f;
}

/// How far L1 virtualises the x2APIC of L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X2Apic {
    /// The task priority is in the virtual-APIC page.
    pub priority: bool,
    /// All reads are.
    pub reads: bool,
    /// Ends of interrupts and self-IPIs are the CPU's.
    pub interrupts: bool,
}

impl X2Apic {
    /// What the VMCS12 asks for.
    pub fn of(v: &Vmcs12) -> Self {
        let second = v.secondary();
        let priority = second.contains(ProcControls2::VIRTUALIZE_X2APIC);
        Self {
            // Without that control the registers are L1's own: no MSR of theirs may pass.
            priority,
            reads: priority && second.contains(ProcControls2::APIC_REGISTERS),
            interrupts: priority && second.contains(ProcControls2::VIRTUAL_INTERRUPTS),
        }
    }

    /// Bits of a word of the x2APIC's reads that need not exit for L0's sake.
    fn free_reads(self, word: usize) -> u64 {
        if self.reads {
            return u64::MAX;
        }
        if self.priority { bit(word, x2apic::TASK_PRIORITY) } else { 0 }
    }

    /// Bits of a word of the x2APIC's writes that need not exit for L0's sake.
    fn free_writes(self, word: usize) -> u64 {
        let mut free = if self.priority { bit(word, x2apic::TASK_PRIORITY) } else { 0 };
        // An end of interrupt and a self-IPI are the CPU's only where it delivers virtual interrupts.
        if self.interrupts {
            free |= bit(word, x2apic::END_OF_INTERRUPT) | bit(word, x2apic::SELF_IPI);
        }
        free
    }
}

fn bit(word: usize, register: usize) -> u64 {
    if register / 64 == word { 1 << (register % 64) } else { 0 }
}

/// What a composed page was made from. It is composed again only if one of these differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// Where L1's bitmap lies.
    pub at: Gpa,
    /// Counts the changes of L0's own.
    pub l0: u64,
    /// Counts the changes of L1's page, as far as L0 sees them; the caller composes at every entry if it does
    /// not.
    pub l1: u64,
    /// L1's x2APIC for L2.
    pub x2apic: X2Apic,
}

/// One word of the page that vmcs02 gets: an access exits if either wants it to. The x2APIC registers are
/// L2's virtual ones, so L0's bits for L1's do not count there.
pub fn word(index: usize, l0: u64, l1: u64, x2apic: X2Apic) -> u64 {
    // Below the first word there is none: the subtraction says so.
    let within = |first: usize| index.checked_sub(first).filter(|n| *n < X2APIC_WORDS);
    if let Some(n) = within(X2APIC) {
        // L0's map says what of its own x2APIC L1 may reach: L2's is another.
        return l1 | !x2apic.free_reads(n);
    }
    if let Some(n) = within(X2APIC + WRITES) {
        return l1 | !x2apic.free_writes(n);
    }
    l0 | l1
}

/// Whether L1 wants the exit of an MSR access. Where its bitmap is no memory, it does.
pub fn msr_exits(v: &Vmcs12, msr: u32, direction: Direction, memory: &impl GuestMemory) -> bool {
    if !v.primary().contains(ProcControls::MSR_BITMAPS) {
        return true;
    }
    // Two ranges of 1024 bytes each; writes follow behind the reads of both.
    let high = match msr {
        0..=0x1fff => 0,
        0xc000_0000..=0xc000_1fff => 1024,
        // MSRs in neither range always exit (SDM vol. 3C §26.1.3).
        _ => return true,
    };
    // The halves of the page: reads, then writes.
    let write = if direction.is_write() { 2048 } else { 0 };
    let byte = u64::from(msr & 0x1fff) / 8 + high + write;
    is_set(v.get(field::MSR_BITMAP), byte, msr, memory)
}

/// Whether L1 wants the exit of a port access of so many bytes.
pub fn port_exits(v: &Vmcs12, port: u16, bytes: u8, memory: &impl GuestMemory) -> bool {
    // Without maps one control decides for all ports (§26.1.3).
    if !v.primary().contains(ProcControls::IO_BITMAPS) {
        return v.primary().contains(ProcControls::UNCONDITIONAL_IO);
    }
    // Each byte's port has its bit: an access is L1's if one of them is.
    (0..u32::from(bytes)).any(|n| {
        let port = u32::from(port) + n;
        let page = match port {
            0..=0x7fff => v.get(field::IO_BITMAP_A),
            0x8000..=0xffff => v.get(field::IO_BITMAP_B),
            // An access that wraps around exits (SDM vol. 3C §26.1.3).
            _ => return true,
        };
        is_set(page, u64::from(port & 0x7fff) / 8, port, memory)
    })
}

/// Whether L1 wants the exit of VMREAD or VMWRITE by L2.
pub fn field_exits(
    v: &Vmcs12,
    encoding: u64,
    direction: Direction,
    memory: &impl GuestMemory,
) -> bool {
    // Bits 63:15 of the operand name no field, and always exit (§26.1.3).
    if !v.secondary().contains(ProcControls2::SHADOW_VMCS) || encoding >> 15 != 0 {
        return true;
    }
    let page = match direction {
        Direction::Read => v.get(field::VMREAD_BITMAP),
        Direction::Write => v.get(field::VMWRITE_BITMAP),
    };
    is_set(page, encoding / 8, encoding as u32, memory)
}

fn is_set(page: u64, byte: u64, bit: u32, memory: &impl GuestMemory) -> bool {
    // No memory: L1 hears of everything, and can tell what is wrong.
    match memory.read_u8(Gpa(page.wrapping_add(byte))) {
        Ok(bits) => bits & 1 << (bit & 7) != 0,
        Err(crate::Outside) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Memory, good, set};

    #[test]
    fn an_msr_bit_is_where_the_manual_puts_it() {
        let memory = Memory::new();
        let mut v = good();
        assert!(msr_exits(&v, 0x10, Direction::Read, &memory), "no bitmap");
        set!(v, PROC_CONTROLS = 1 << 28, MSR_BITMAP = 0x1000);
        for (msr, direction, byte) in [
            (0x11, Direction::Read, 2),
            (0xc000_0081, Direction::Read, 1024 + 16),
            (0x11, Direction::Write, 2048 + 2),
            (0xc000_0081, Direction::Write, 3072 + 16),
        ] {
            assert!(!msr_exits(&v, msr, direction, &memory));
            memory.put(0x1000 + byte, &[2]);
            assert!(msr_exits(&v, msr, direction, &memory));
        }
        for msr in [0x2000, 0xbfff_ffff, 0xc000_2000, u32::MAX] {
            assert!(msr_exits(&v, msr, Direction::Read, &memory));
        }
        set!(v, MSR_BITMAP = 1 << 39);
        assert!(msr_exits(&v, 0x10, Direction::Read, &memory), "no memory");
    }

    #[test]
    fn ports_are_looked_at_one_by_one() {
        let memory = Memory::new();
        let mut v = good();
        assert!(!port_exits(&v, 0x80, 1, &memory));
        set!(v, PROC_CONTROLS = 1 << 24);
        assert!(port_exits(&v, 0x80, 1, &memory));
        set!(v, PROC_CONTROLS = 1 << 24 | 1 << 25, IO_BITMAP_A = 0x1000, IO_BITMAP_B = 0x2000);
        assert!(!port_exits(&v, 0x7ffd, 4, &memory));
        memory.put(0x2000, &[1]);
        assert!(port_exits(&v, 0x7ffd, 4, &memory));
        assert!(!port_exits(&v, 0x7ffd, 3, &memory));
        assert!(port_exits(&v, 0xffff, 2, &memory), "wraps around");
        assert!(!port_exits(&v, 0xffff, 1, &memory));
    }

    #[test]
    fn an_access_exits_if_either_wants_it() {
        let none = X2Apic { priority: false, reads: false, interrupts: false };
        assert_eq!(word(0, 5, 2, none), 7);
        assert_eq!(word(X2APIC, 0, 0, none), u64::MAX);
        assert_eq!(word(X2APIC + WRITES, 0, 0, none), u64::MAX);
        let some = X2Apic { priority: true, ..none };
        assert_eq!(word(X2APIC, u64::MAX, 0, some), !(1 << 8));
        assert_eq!(word(X2APIC, 0, 1 << 8, some), u64::MAX);
        let all = X2Apic { priority: true, reads: true, interrupts: true };
        assert_eq!(word(X2APIC + 3, u64::MAX, 0, all), 0);
        assert_eq!(word(X2APIC + WRITES, 0, 0, all), !(1 << 8 | 1 << 0xb | 1 << 0x3f));
        assert_eq!(word(X2APIC + WRITES + 1, 0, 0, all), u64::MAX);
        assert_eq!(word(X2APIC + 4, 1, 2, all), 3);
    }

    #[test]
    fn fields_of_l2_exit_by_their_bitmaps() {
        let memory = Memory::new();
        let mut v = good();
        assert!(field_exits(&v, 0x4402, Direction::Read, &memory));
        set!(v, PROC_CONTROLS2 = 1 << 14, VMREAD_BITMAP = 0x1000, VMWRITE_BITMAP = 0x2000);
        assert!(!field_exits(&v, 0x4402, Direction::Read, &memory));
        assert!(field_exits(&v, 0x8000, Direction::Read, &memory));
        memory.put(0x2000 + 0x4402 / 8, &[4]);
        assert!(field_exits(&v, 0x4402, Direction::Write, &memory));
        assert!(!field_exits(&v, 0x4402, Direction::Read, &memory));
    }
}
