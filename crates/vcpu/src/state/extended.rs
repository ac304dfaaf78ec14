//! The guest's MMX and XMM registers for the emulator: rare, and taken from the extended state in memory.

use backend::Backend;
use emulate::Stop;
use x86::{Direction, Exception};

use crate::Vcpu;

/// Where things lie in an XSAVE area (SDM vol. 1 §13.4, §10.5.1).
const CONTROL_WORD: usize = 0;
const STATUS_WORD: usize = 2;
const TAGS: usize = 4;
const ST: usize = 32;
const XMM: usize = 160;
const XSTATE_BV: usize = 512;
const XSTATE_X87: u8 = 1 << 0;
const XSTATE_SSE: u8 = 1 << 1;
/// The x87 control word after FNINIT.
const INITIAL_CONTROL: u16 = 0x37f;
/// An unmasked exception waits.
const STATUS_ERROR: u16 = 1 << 7;
const STATUS_TOP: u16 = 7 << 11;

fn xmm_offset(n: u8) -> usize {
    XMM + usize::from(n & 15) * 16
}

fn word(area: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*area.get(at..at + 2)?.first_chunk()?))
}

/// Puts the x87 unit into the state that FNINIT leaves: the registers keep their values, and are empty (SDM vol. 2, FINIT).
fn init(area: &mut [u8]) -> Option<()> {
    // A component in its initial state has nothing in the area.
    if *area.get(XSTATE_BV)? & XSTATE_X87 == 0 {
        area.get_mut(ST..XMM)?.fill(0);
    }
    // The area holds the stack from its top on, which is register 0 from now on.
    let top = usize::from((word(area, STATUS_WORD)? & STATUS_TOP) >> 11);
    area.get_mut(ST..XMM)?.rotate_right(top * 16);
    // To FDP, and not MXCSR behind it, which FNINIT leaves.
    area.get_mut(..24)?.fill(0);
    area.get_mut(CONTROL_WORD..2)?.copy_from_slice(&INITIAL_CONTROL.to_le_bytes());
    *area.get_mut(XSTATE_BV)? |= XSTATE_X87;
    Some(())
}

/// The control word and the status word.
fn words(area: &[u8]) -> Option<[u16; 2]> {
    if *area.get(XSTATE_BV)? & XSTATE_X87 == 0 {
        return Some([INITIAL_CONTROL, 0]);
    }
    Some([word(area, CONTROL_WORD)?, word(area, STATUS_WORD)?])
}

/// The eight MMX registers, changed by `f`, in an area whose unit is in MMX's state afterwards: the top of
/// the stack is 0 and all registers are in use (SDM vol. 1 §9.6.2). `None`: an exception of the x87
/// unit waits.
fn mmx<R>(area: &mut [u8], f: impl FnOnce(&mut [u64; 8]) -> R) -> Option<Result<R, Exception>> {
    if *area.get(XSTATE_BV)? & XSTATE_X87 == 0 {
        init(area)?;
    }
    let status = word(area, STATUS_WORD)?;
    if status & STATUS_ERROR != 0 {
        return Some(Err(Exception::mf()));
    }
    // The area holds the stack from its top on, MMX counts the registers behind it.
    let top = usize::from((status & STATUS_TOP) >> 11);
    let mut registers = [(0u64, 0u16); 8];
    for (n, register) in registers.iter_mut().enumerate() {
        let at = ST + (n.wrapping_sub(top) & 7) * 16;
        *register =
            (u64::from_le_bytes(*area.get(at..at + 8)?.first_chunk()?), word(area, at + 8)?);
    }
    let mut values = registers.map(|(value, _)| value);
    let result = f(&mut values);
    for (n, ((old, exponent), new)) in registers.into_iter().zip(values).enumerate() {
        // A register that is written has an exponent of ones.
        let exponent = if old == new { exponent } else { 0xffff };
        let at = ST + n * 16;
        area.get_mut(at..at + 8)?.copy_from_slice(&new.to_le_bytes());
        area.get_mut(at + 8..at + 10)?.copy_from_slice(&exponent.to_le_bytes());
    }
    let status = status & !STATUS_TOP;
    area.get_mut(STATUS_WORD..STATUS_WORD + 2)?.copy_from_slice(&status.to_le_bytes());
    *area.get_mut(TAGS)? = 0xff;
    Some(Ok(result))
}

impl<B: Backend> Vcpu<B> {
    /// Works on the guest's extended state in memory, and takes it over if it is written.
    fn with_extended_state<R>(
        &mut self,
        direction: Direction,
        f: impl FnOnce(&mut [u8]) -> Option<R>,
    ) -> Result<R, Stop> {
        // On the heap: the area is larger than a stack frame may be here.
        let mut area = alloc::vec::Vec::new();
        let size = self.xsave_size();
        area.try_reserve_exact(size).map_err(|_| Stop::Unsupported)?;
        area.resize(size, 0u8);
        // The registers are in the CPU while the vCPU runs: the area has them only now.
        self.fpu.put();
        self.xsave(&mut area);
        let result = f(&mut area);
        let done = direction == Direction::Read || self.set_xsave(&area).is_ok();
        // Whatever came of it: the run goes on with the registers in the CPU.
        self.fpu.load();
        result.filter(|_| done).ok_or(Stop::Unsupported)
    }

    pub(crate) fn read_x87_words(&mut self) -> Result<[u16; 2], Stop> {
        self.with_extended_state(Direction::Read, |area| words(area))
    }

    pub(crate) fn init_x87(&mut self) -> Result<(), Stop> {
        self.with_extended_state(Direction::Write, init)
    }

    pub(crate) fn with_mmx<R>(&mut self, f: impl FnOnce(&mut [u64; 8]) -> R) -> Result<R, Stop> {
        self.with_extended_state(Direction::Write, |area| mmx(area, f))?.map_err(Stop::Fault)
    }

    pub(crate) fn read_xmm(&mut self, n: u8) -> Result<u128, Stop> {
        let at = xmm_offset(n);
        self.with_extended_state(Direction::Read, |area| {
            let bytes = area.get(at..at + 16)?.try_into().ok()?;
            // Without its bit in XSTATE_BV the component is in its initial state: zero.
            let live = area.get(XSTATE_BV)? & XSTATE_SSE != 0;
            Some(if live { u128::from_le_bytes(bytes) } else { 0 })
        })
    }

    pub(crate) fn write_xmm(&mut self, n: u8, value: u128) -> Result<(), Stop> {
        let at = xmm_offset(n);
        self.with_extended_state(Direction::Write, |area| {
            let live = area.get(XSTATE_BV)? & XSTATE_SSE != 0;
            // The other fifteen registers are zero, whatever the area holds.
            if !live {
                area.get_mut(XMM..XMM + 256)?.fill(0);
            }
            area.get_mut(at..at + 16)?.copy_from_slice(&value.to_le_bytes());
            *area.get_mut(XSTATE_BV)? |= XSTATE_SSE;
            Some(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mmx_counts_registers_and_the_area_the_stack() {
        let mut area = [0u8; 576];
        area[XSTATE_BV] = XSTATE_X87;
        area[STATUS_WORD..4].copy_from_slice(&(3u16 << 11).to_le_bytes());
        // ST(0) is register 3.
        area[ST..ST + 8].copy_from_slice(&0x1234u64.to_le_bytes());
        area[ST + 8] = 0x55;
        let seen = mmx(&mut area, |r| core::mem::replace(&mut r[1], 0x77)).unwrap().unwrap();
        assert_eq!(seen, 0);
        assert_eq!(word(&area, STATUS_WORD), Some(0));
        assert_eq!(area[TAGS], 0xff);
        assert_eq!((word(&area, ST + 48), area[ST + 56]), (Some(0x1234), 0x55));
        assert_eq!((word(&area, ST + 16), word(&area, ST + 24)), (Some(0x77), Some(0xffff)));
        area[STATUS_WORD] = 0x80;
        assert_eq!(mmx(&mut area, |_| ()), Some(Err(Exception::mf())));
    }

    #[test]
    fn fninit_empties_the_registers_and_keeps_what_they_hold() {
        let mut area = [0u8; 576];
        assert_eq!(words(&area), Some([INITIAL_CONTROL, 0]));
        area[XSTATE_BV] = XSTATE_X87;
        area[STATUS_WORD..4].copy_from_slice(&(3u16 << 11).to_le_bytes());
        (area[ST], area[TAGS]) = (0x34, 0xff);
        assert_eq!(words(&area), Some([0, 3 << 11]));
        assert_eq!(init(&mut area), Some(()));
        assert_eq!((words(&area), area[TAGS]), (Some([INITIAL_CONTROL, 0]), 0));
        // What was ST(0) is register 3 still.
        assert_eq!((area[ST], area[ST + 48]), (0, 0x34));
    }

    #[test]
    fn a_unit_that_was_never_used_begins_as_after_fninit() {
        let mut area = [0xaau8; 576];
        area[XSTATE_BV] = 0;
        assert_eq!(mmx(&mut area, |r| r[5]), Some(Ok(0)));
        assert_eq!(word(&area, CONTROL_WORD), Some(INITIAL_CONTROL));
        assert_eq!(area[XSTATE_BV], XSTATE_X87);
    }
}
