//! The memory-type range registers, as values. Nothing here decides a memory type: TDP
//! takes it from the guest's PAT and the host.
//!
//! SDM vol. 3A §11.11, APM vol. 2 §7.7.

use crate::Refused;
use host::GuestIndex;
use x86::msr::*;

/// MTRR_CAP: eight variable pairs, fixed ranges, write combining.
const CAP: u64 = MTRR_VARIABLE as u64 | mtrr::CAP_FIXED | mtrr::CAP_WC;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mtrrs {
    // Values and no ranges: without passed-through devices guest memory is write-back whatever they
    // say.
    default_type: u64,
    fixed: [u64; MTRR_FIXED.len()],
    variable: [u64; 2 * MTRR_VARIABLE],
}

impl Mtrrs {
    pub(crate) fn read(&self, index: u32) -> Result<u64, Refused> {
        match index {
            MTRR_CAP => Ok(CAP),
            MTRR_DEF_TYPE => Ok(self.default_type),
            _ => self.slot(index).ok_or(Refused),
        }
    }

    pub(crate) fn write(&mut self, index: u32, value: u64, maxphyaddr: u8) -> Result<(), Refused> {
        // Checked though nothing follows from the value: a guest tests which bits stick.
        if !is_valid(index, value, maxphyaddr) {
            return Err(Refused);
        }
        let slot = match index {
            MTRR_DEF_TYPE => Some(&mut self.default_type),
            0x200..0x250 => variable_position(index).of_mut(&mut self.variable),
            // Eleven that do not lie side by side: searched.
            _ => fixed_position(index).and_then(|at| self.fixed.get_mut(at)),
        };
        *slot.ok_or(Refused)? = value;
        Ok(())
    }

    fn slot(&self, index: u32) -> Option<u64> {
        match index {
            0x200..0x250 => variable_position(index).of(&self.variable).copied(),
            _ => fixed_position(index).and_then(|at| self.fixed.get(at)).copied(),
        }
    }
}

fn variable_position(index: u32) -> GuestIndex {
    GuestIndex::from(index.wrapping_sub(MTRR_PHYSBASE0))
}

fn fixed_position(index: u32) -> Option<usize> {
    MTRR_FIXED.iter().position(|fixed| *fixed == index)
}

/// Types 0 (UC), 1 (WC), 4 (WT), 5 (WP) and 6 (WB); PAT's UC- is not one of them.
const fn is_type(value: u64) -> bool {
    matches!(value & 0xff, 0 | 1 | 4 | 5 | 6)
}

fn is_valid(index: u32, value: u64, maxphyaddr: u8) -> bool {
    // The width is the VMM's by CPUID: any byte.
    let above = if maxphyaddr >= 64 { 0 } else { u64::MAX << maxphyaddr };
    match index {
        // Read-only, for a VMM as well: it says what is here.
        MTRR_CAP => false,
        MTRR_DEF_TYPE => value & !(0xff | mtrr::FIXED_ENABLE | mtrr::ENABLE) == 0 && is_type(value),
        // Base: type in bits 7:0, bits 11:8 reserved. Mask: bits 10:0 reserved.
        0x200..0x250 if index & 1 == 0 => value & (above | 0xf00) == 0 && is_type(value),
        0x200..0x250 => value & (above | 0x7ff) == 0,
        _ => value.to_le_bytes().into_iter().all(|field| is_type(field.into())),
    }
}
