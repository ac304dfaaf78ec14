//! L2's accesses to the APIC-access page that L1 leaves to its virtual-APIC page (SDM vol. 3C §30.4).
//!
//! The hardware is given neither page. An access of L2's to the first faults in L0's tables, which leave its frame out;
//! what of it L1 does not have to see is carried out here on L1's memory.

use x86::vmcs::{ProcControls, ProcControls2, field};
use x86::{Direction, Gpa, apic::reg};

use crate::priority::{self, Moved};
use crate::{GuestMemory, Vmcs12, virtual_interrupts};

/// Registers of which only the low part of the page matters here.
const EOI: u16 = reg::EOI as u16;
const ICR_LOW: u16 = reg::ICR as u16;
const ICR_HIGH: u16 = reg::ICR2 as u16;
const TPR: u16 = reg::TPR as u16;

/// Whether an access of four bytes at that offset, a plain one, is virtualized. Every other makes an exit.
pub fn serves(v: &Vmcs12, offset: u16, direction: Direction) -> bool {
    // Without a TPR shadow every access exits, and so does one that does not begin at a register: they lie 16 bytes
    // apart (§30.4.2, §30.4.3.1).
    if !v.primary().contains(ProcControls::TPR_SHADOW) || offset & 0xf != 0 {
        return false;
    }
    let second = v.secondary();
    // The manual's two lists decide alone then; TPR, EOI and ICR are in both.
    if second.contains(ProcControls2::APIC_REGISTERS) {
        return match direction {
            Direction::Read => is_read(offset),
            Direction::Write => is_written(offset),
        };
    }
    // Without it L2 reads the TPR alone, and EOI and ICR are written only where virtual interrupts are delivered.
    let by_interrupts = direction.is_write()
        && second.contains(ProcControls2::VIRTUAL_INTERRUPTS)
        && matches!(offset, EOI | ICR_LOW);
    offset == TPR || by_interrupts
}

/// Registers that are read from the page (§30.4.2).
fn is_read(offset: u16) -> bool {
    // PPR (A0h), the current count (390h) and CMCI (2F0h) are in neither list: L1 sees an exit for them.
    matches!(
        offset,
        0x20 | 0x30 | 0x80 | 0xb0 | 0xd0 | 0xe0 | 0xf0 | 0x280 | 0x300 | 0x310 | 0x380 | 0x3e0
    ) || matches!(offset, 0x100..=0x270 | 0x320..=0x370)
}

/// Registers that are written to the page (§30.4.3).
fn is_written(offset: u16) -> bool {
    // The version and the three sets of vectors can be read and not written.
    !matches!(offset, 0x30 | 0x100..=0x270) && is_read(offset)
}

fn place(v: &Vmcs12, offset: u16) -> Gpa {
    // An entry has checked that the page is aligned: the sum stays within it.
    Gpa(v.get(field::VIRTUAL_APIC_ADDR).wrapping_add(u64::from(offset)))
}

/// What a load of four bytes gives. Where no memory is all bits are ones.
pub fn read(v: &Vmcs12, offset: u16, memory: &impl GuestMemory) -> u32 {
    // A CPU never asks: it reads whatever lies there. L1 has named a page that it has not got.
    memory.read_u32(place(v, offset)).unwrap_or(u32::MAX)
}

/// Stores four bytes, and does what follows from that (§30.4.3.2).
pub fn write(v: &mut Vmcs12, offset: u16, value: u32, memory: &impl GuestMemory) -> Moved {
    // The CPU clears the rest of these two (§30.4.3.2).
    let kept = match offset {
        TPR => value & 0xff,
        ICR_HIGH => value & 0xff00_0000,
        _ => value,
    };
    // A store to where no memory is is lost, as on a bus.
    let _ = memory.write(place(v, offset), &kept.to_le_bytes());
    let by_interrupts = virtual_interrupts::are_on(v);
    match offset {
        // Bits 7:4 of the TPR are what CR8 has as its value.
        TPR => priority::moved(v, u64::from(kept >> 4), memory),
        // The upper half of the ICR does nothing by itself: it waits for the lower.
        ICR_HIGH => Moved::Stored,
        // The register is cleared first, then the interrupt ends: EOI virtualization reads as 0 whatever L2 wrote.
        EOI if by_interrupts => {
            let _ = memory.write(place(v, offset), &[0; 4]);
            Moved::ended(virtual_interrupts::end(v, memory))
        }
        // Every other IPI is L1's to send: it sees an exit behind the store.
        ICR_LOW if by_interrupts && let Some(vector) = virtual_interrupts::self_ipi(value) => {
            Moved::evaluated(virtual_interrupts::send_self(v, vector, memory))
        }
        _ => Moved::Written(offset),
    }
}

/// Frames that may be an APIC-access page: 16 TiB. One beyond is taken for no memory.
const FRAMES: u64 = u32::MAX as u64;

/// Whether L1 has an APIC-access page, or virtual interrupts: an entry has more to do then.
#[inline]
pub fn is_used(v: &Vmcs12) -> bool {
    let both = ProcControls2::VIRTUALIZE_APIC_ACCESSES.union(ProcControls2::VIRTUAL_INTERRUPTS);
    // Where secondary controls are off as a whole, who asks further sees that.
    v.get(field::PROC_CONTROLS2) & both.bits() != 0
}

/// Whether the APIC-access page lies where tables can leave it out.
pub(crate) fn is_in_reach(v: &Vmcs12) -> bool {
    v.apic_access_page().is_none_or(|page| page.gfn().0 < FRAMES)
}

/// Whether the APIC-access page that an entry names is memory. No CPU asks; stock KVM leaves it to the VMM.
pub fn is_there(v: &Vmcs12, memory: &impl GuestMemory) -> bool {
    // One byte tells: a page is memory as a whole, or not at all.
    is_in_reach(v) && v.apic_access_page().is_none_or(|page| memory.read_u8(page).is_ok())
}

/// Whether L2 is left right behind an entry, before its first instruction: with an APIC-access page that is what a
/// priority below the threshold leads to (§27.7.7).
pub fn falls_at_entry(v: &Vmcs12, memory: &impl GuestMemory) -> bool {
    // With virtual interrupts the threshold is not used, and 0 is above no priority: the page is not read then.
    let second = v.secondary();
    second.contains(ProcControls2::VIRTUALIZE_APIC_ACCESSES)
        && !second.contains(ProcControls2::VIRTUAL_INTERRUPTS)
        && v.primary().contains(ProcControls::TPR_SHADOW)
        && v.get(field::TPR_THRESHOLD) & 0xf != 0
        && priority::falls(v, priority::read(v, memory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Memory, good, set};
    use std::vec::Vec;

    const PAGE: u64 = 0x7000;
    const SHADOW: u32 = 1 << 21 | 1 << 31;
    const ACCESSES: u32 = 1;
    const REGISTERS: u32 = 1 << 8;
    const INTERRUPTS: u32 = 1 << 9;

    fn with(primary: u32, second: u32) -> Vmcs12 {
        let mut v = good();
        let base = v.get(field::PROC_CONTROLS) & !SHADOW;
        set!(
            v,
            PROC_CONTROLS = base | primary,
            PROC_CONTROLS2 = second,
            VIRTUAL_APIC_ADDR = PAGE,
            TPR_THRESHOLD = 5
        );
        v
    }

    fn served(v: &Vmcs12, direction: Direction) -> Vec<u16> {
        (0..0x1000).filter(|offset| serves(v, *offset, direction)).collect()
    }

    #[test]
    fn the_controls_say_which_registers_are_the_pages() {
        let none: [u16; 0] = [];
        for way in [Direction::Read, Direction::Write] {
            assert_eq!(served(&with(1 << 31, ACCESSES | REGISTERS | INTERRUPTS), way), none);
            assert_eq!(served(&with(SHADOW, ACCESSES), way), [0x80]);
        }
        let interrupts = with(SHADOW, ACCESSES | INTERRUPTS);
        assert_eq!(served(&interrupts, Direction::Read), [0x80]);
        assert_eq!(served(&interrupts, Direction::Write), [0x80, 0xb0, 0x300]);
        // The manual's two lists.
        let low = [0x20, 0x30, 0x80, 0xb0, 0xd0, 0xe0, 0xf0];
        let in_service_to_requested = (0x100..0x280).step_by(16);
        let high = [0x280, 0x300, 0x310, 0x320, 0x330, 0x340, 0x350, 0x360, 0x370, 0x380, 0x3e0];
        let reads: Vec<u16> = low.into_iter().chain(in_service_to_requested).chain(high).collect();
        let writes: Vec<u16> =
            low.into_iter().filter(|offset| *offset != 0x30).chain(high).collect();
        for second in [REGISTERS, REGISTERS | INTERRUPTS] {
            let v = with(SHADOW, ACCESSES | second);
            assert_eq!(served(&v, Direction::Read), reads);
            assert_eq!(served(&v, Direction::Write), writes);
        }
    }

    #[test]
    fn what_is_written_is_in_the_page_and_l1_hears_of_most() {
        let memory = Memory::new();
        memory.put(PAGE, &[0xff; 0x400]);
        let mut v = with(SHADOW, ACCESSES | REGISTERS);
        let v = &mut v;
        assert_eq!(write(v, 0x80, 0x1234_5651, &memory), Moved::On);
        assert_eq!(read(v, 0x80, &memory), 0x51);
        assert_eq!(write(v, 0x80, 0x4f, &memory), Moved::Fell);
        assert_eq!(write(v, 0x310, 0x1234_5678, &memory), Moved::Stored);
        assert_eq!(read(v, 0x310, &memory), 0x1200_0000);
        for offset in [0x20, 0xb0, 0xf0, 0x300, 0x380] {
            assert_eq!(write(v, offset, 0x8765_4321, &memory), Moved::Written(offset));
            assert_eq!(read(v, offset, &memory), 0x8765_4321);
            assert_eq!(read(v, offset + 4, &memory), u32::MAX);
        }
        let mut nowhere = with(SHADOW, ACCESSES | REGISTERS);
        set!(nowhere, VIRTUAL_APIC_ADDR = 1 << 39);
        assert_eq!(read(&nowhere, 0x80, &memory), u32::MAX);
        assert_eq!(write(&mut nowhere, 0x80, 0, &memory), Moved::Fell);
    }

    #[test]
    fn a_priority_below_the_threshold_ends_the_run_at_its_beginning() {
        let memory = Memory::new();
        let falls = |second, priority: u8| {
            memory.put(PAGE + 0x80, &[priority]);
            falls_at_entry(&with(SHADOW, second), &memory)
        };
        assert!(falls(ACCESSES, 0x4f));
        assert!(!falls(ACCESSES, 0x50));
        assert!(!falls(0, 0x4f), "the entry itself fails then");
        assert!(!falls(ACCESSES | INTERRUPTS, 0x4f));
        assert!(!falls_at_entry(&with(1 << 31, ACCESSES), &memory));
    }
}
