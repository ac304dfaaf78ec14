//! What has to be looked at after every exit of the inner loop, in one word, so that the usual
//! case, nothing, is one comparison: the interrupt that the hardware was offered, whether the
//! vCPU is observed, and whether a guest's guest runs.

use x86::Vector;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AfterExit(u16);

impl AfterExit {
    // The vector is the low byte, so that an offer and what stands beside it are one word to look
    // at.
    const OFFERED: u16 = 1 << 8;
    const OBSERVED: u16 = 1 << 9;
    const STEPPING: u16 = 1 << 10;
    const NESTED: u16 = 1 << 11;
    const OTHERS: u16 = Self::OBSERVED | Self::STEPPING | Self::NESTED;

    /// Whether there is anything.
    #[inline(always)]
    pub(crate) fn any(self) -> bool {
        self.0 != 0
    }

    /// The interrupt that the hardware was offered and that is out of the IRR.
    #[inline]
    pub(crate) fn offered(self) -> Option<Vector> {
        (self.0 & Self::OFFERED != 0).then_some(Vector(self.0 as u8))
    }

    /// Sets the interrupt that is offered, or that none is.
    #[inline]
    pub(crate) fn set_offered(&mut self, vector: Option<Vector>) {
        // An offer comes and goes at any exit; what others have set here must outlive it.
        let offer = vector.map_or(0, |v| Self::OFFERED | u16::from(v.0));
        self.0 = (self.0 & Self::OTHERS) | offer;
    }

    /// Takes the offered interrupt away.
    #[inline]
    pub(crate) fn take_offered(&mut self) -> Option<Vector> {
        let offered = self.offered();
        self.0 &= Self::OTHERS;
        offered
    }

    /// The guest was entered with a step of the backend's, which is to be ended.
    #[inline]
    pub(crate) fn set_stepping(&mut self) {
        self.0 |= Self::STEPPING;
    }

    /// Takes the stepping away: whether it was so.
    #[inline]
    pub(crate) fn take_stepping(&mut self) -> bool {
        let was = self.0 & Self::STEPPING != 0;
        self.0 &= !Self::STEPPING;
        was
    }

    /// Whether somebody looks at the exit before it is answered: an observer, or the guest's hypervisor.
    #[inline(always)]
    pub(crate) fn is_looked_at(self) -> bool {
        self.0 & (Self::OBSERVED | Self::NESTED) != 0
    }

    /// Whether a guest's guest runs.
    #[inline(always)]
    pub(crate) fn is_nested(self) -> bool {
        self.0 & Self::NESTED != 0
    }

    /// Sets whether a guest's guest runs.
    pub(crate) fn set_nested(&mut self, on: bool) {
        self.0 = (self.0 & !Self::NESTED) | if on { Self::NESTED } else { 0 };
    }

    /// Whether the vCPU is observed.
    #[inline]
    pub(crate) fn is_observed(self) -> bool {
        self.0 & Self::OBSERVED != 0
    }

    /// Sets whether the vCPU is observed.
    pub(crate) fn set_observed(&mut self, on: bool) {
        if on {
            self.0 |= Self::OBSERVED;
        } else {
            self.0 &= !Self::OBSERVED;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_and_observation_do_not_disturb_each_other() {
        let mut after = AfterExit::default();
        assert!(!after.any());
        after.set_offered(Some(Vector(0)));
        after.set_observed(true);
        assert_eq!((after.offered(), after.is_observed()), (Some(Vector(0)), true));
        assert_eq!(after.take_offered(), Some(Vector(0)));
        assert_eq!((after.offered(), after.any()), (None, true));
        after.set_offered(Some(Vector(255)));
        after.set_offered(Some(Vector(16)));
        after.set_observed(false);
        assert_eq!(after.offered(), Some(Vector(16)));
        after.set_offered(None);
        assert!(!after.any());
    }
}
