//! The page-modification log that L1 asks for (SDM vol. 3C §29.3.6). L0 writes it when the walk of L1's tables
//! sets a dirty flag.

use x86::Gpa;
use x86::vmcs::{ProcControls2, field};

use crate::{GuestMemory, Vmcs12};

/// Entries of a log.
const ENTRIES: u16 = 512;

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logged {
    /// L1 asks for no log.
    Off,
    /// The entry is written.
    Done,
    /// The log is full: the access does not happen, and L1 sees an exit for that.
    Full,
}

/// Logs that L2 makes a page dirty, before its flag is set.
pub fn log(v: &mut Vmcs12, page: Gpa, memory: &impl GuestMemory) -> Logged {
    // Before memory is looked at: the field may name anything then.
    if !v.secondary().contains(ProcControls2::PML) {
        return Logged::Off;
    }
    // An index beyond 511 is full, whatever it is: L1 writes any value there (§29.3.6).
    let index = v.get(field::PML_INDEX);
    if index >= ENTRIES {
        return Logged::Full;
    }
    // Aligned, by the checks of an entry.
    let at = Gpa(v.get(field::PML_ADDRESS).wrapping_add(u64::from(index) * 8));
    // Where there is no memory the entry is lost, as a store of the CPU's would be.
    // Bits 11:0 of an entry are zero.
    let _ = memory.write(at, &(page.0 & !0xfff).to_le_bytes());
    // Below 0 it is 0xffff, and the log is full.
    v.set(field::PML_INDEX, index.wrapping_sub(1));
    Logged::Done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Memory, good, set};

    #[test]
    fn a_log_fills_from_its_end() {
        let memory = Memory::new();
        let mut v = good();
        assert_eq!(log(&mut v, Gpa(0x5123), &memory), Logged::Off);
        set!(v, PROC_CONTROLS2 = 1 << 17, PML_ADDRESS = 0x3000, PML_INDEX = 1);
        assert_eq!(log(&mut v, Gpa(0x5123), &memory), Logged::Done);
        assert_eq!(log(&mut v, Gpa(0x6123), &memory), Logged::Done);
        assert_eq!(v.get(field::PML_INDEX), 0xffff);
        assert_eq!(log(&mut v, Gpa(0x7123), &memory), Logged::Full);
        let at = |n: u64| memory.read_u64(Gpa(0x3000 + n * 8)).unwrap();
        assert_eq!((at(0), at(1)), (0x6000, 0x5000));
    }
}
