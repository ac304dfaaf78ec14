//! PV EOI: a flag in guest memory by which a guest ends an edge interrupt without an exit.
//! `msr.rst`, MSR_KVM_PV_EOI_EN.
//!
//! The host sets bit 0 when it injects an interrupt whose end nobody needs to hear of at once. The
//! guest, instead of writing the EOI register, clears the bit if it is set. At the next exit the
//! host looks: a bit that is clear is an EOI that happened.
//!
//! Why at the next exit, whatever it is for: until the flag was looked at, what is in service is not known, and so not
//! what may be injected. Why the flag is withdrawn then: a guest that clears it later would end another interrupt than
//! the one that it was set for.

use x86::Gpa;

use crate::Shared;

const OWED: u8 = 1 << 0;

/// PV EOI of one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PvEoi {
    flag: Option<Gpa>,
    offered: bool,
}

impl PvEoi {
    /// A valid write of the MSR: where the flag is, or `None` for off. Whatever was offered is to
    /// be [`collect`](Self::collect)ed before.
    pub fn configure(&mut self, flag: Option<Gpa>) {
        // With another address an offer at the old one could not be collected.
        *self = Self { flag, offered: false };
    }

    /// Where the flag is, if the guest enabled it.
    #[inline]
    pub fn flag(&self) -> Option<Gpa> {
        self.flag
    }

    /// Whether the flag was set and not looked at since: the test to make on every exit.
    #[inline]
    pub fn offered(&self) -> bool {
        self.offered
    }

    /// Sets the flag for the interrupt being injected.
    ///
    /// # Errors
    /// Those of the memory: then nothing is offered, and the guest writes its EOI register.
    pub fn offer<S: Shared>(&mut self, shared: &S) -> Result<(), S::Error> {
        // One byte, as from stock KVM: of the word only bit 0 has a meaning.
        // The flag before the note: an offer that could not be stored must never be collected.
        shared.write(0, &[OWED])?;
        self.offered = true;
        Ok(())
    }

    /// After an exit with the flag offered: withdraws it. True when the guest has ended the
    /// interrupt, so that its EOI is to be done now.
    ///
    /// # Errors
    /// Those of the memory: the interrupt counts as not ended.
    pub fn collect<S: Shared>(&mut self, shared: &S) -> Result<bool, S::Error> {
        if !self.offered {
            return Ok(false);
        }
        // Before the look: after an error nothing is offered any more, and the guest writes its
        // register.
        self.offered = false;
        let mut flag = [0];
        shared.read(0, &mut flag)?;
        // Clear: the guest has ended the interrupt since the offer.
        if flag[0] & OWED == 0 {
            return Ok(true);
        }
        // Not atomic, and need not be: only this vCPU clears its flag, and it does not run.
        shared.write(0, &[flag[0] & !OWED])?;
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_memory::Memory;

    #[test]
    fn a_cleared_flag_is_an_eoi_once() {
        let (memory, mut eoi) = (Memory::new(1), PvEoi::default());
        eoi.configure(Some(Gpa(0x1000)));
        eoi.offer(&memory).unwrap();
        memory.bytes.borrow_mut()[0] &= !OWED;
        assert_eq!(eoi.collect(&memory), Ok(true));
        assert_eq!(eoi.collect(&memory), Ok(false));
    }

    #[test]
    fn an_untouched_flag_is_withdrawn_so_that_the_guest_writes_its_eoi() {
        let (memory, mut eoi) = (Memory::new(1), PvEoi::default());
        eoi.offer(&memory).unwrap();
        assert_eq!(memory.bytes.borrow()[0], OWED);
        assert_eq!(eoi.collect(&memory), Ok(false));
        assert_eq!(memory.bytes.borrow()[0], 0);
        assert!(!eoi.offered());
    }

    #[test]
    fn unreachable_memory_is_never_an_eoi() {
        let (memory, mut eoi) = (Memory::new(1), PvEoi::default());
        eoi.offer(&memory).unwrap();
        assert_eq!(eoi.collect(&Memory::new(0)), Err(()));
        assert!(!eoi.offered());
        assert_eq!(eoi.offer(&Memory::new(0)), Err(()));
        assert!(!eoi.offered());
    }
}
