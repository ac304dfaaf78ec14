//! DR6 and DR7 as the CPU holds them. A value of these types is one that a MOV to the register takes: they
//! are made only by functions that do with reserved bits what the architecture does.
//!
//! SDM vol. 3B §18.2, APM vol. 2 §13.1.1.

/// DR6, which tells what a #DB was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dr6(u64);

impl Dr6 {
    /// Breakpoints 0 to 3 met.
    pub const TRAPS: u64 = 0xf;
    /// Debug register accessed under DR7.GD.
    pub const BD: u64 = 1 << 13;
    /// BS: a single step was made.
    pub const BS: u64 = 1 << 14;
    /// A task asked for a trap when it is switched to.
    pub const BT: u64 = 1 << 15;
    /// What is one when nothing happened: reserved bits, and those of bus locks and transactions, which are
    /// clear when one was met.
    pub const ACTIVE_LOW: u64 = 0xffff_0ff0;
    // Without bits 16 and 11, which a MOV may clear where the CPU has bus locks or transactions to
    // tell of.
    const RESERVED_ONE: u64 = 0xfffe_07f0;
    /// What a MOV clears.
    pub const RESERVED_ZERO: u64 = 1 << 12;
    /// DR6 after reset.
    pub const RESET: Self = Self(Self::ACTIVE_LOW);

    /// The register after `raw` was written. A MOV whose upper half is not zero faults; here it is
    /// dropped.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        // What is written never faults here: who has to fault has looked at the upper half before.
        Self((raw as u32 as u64 | Self::RESERVED_ONE) & !Self::RESERVED_ZERO)
    }

    /// After a #DB for `payload`, in which every bit that is set says what happened. Which
    /// breakpoints were met is of this one alone; the others gather.
    #[inline]
    pub const fn after_db(self, payload: u64) -> Self {
        // First the bits that are clear where something happened are set, then those that the
        // payload names are cleared.
        let gathered = self.0 & !Self::TRAPS | Self::ACTIVE_LOW | payload;
        Self::new(gathered ^ payload & Self::ACTIVE_LOW)
    }

    /// The payload of a #DB that has left this: every bit that is set says what happened. A task's trap bit is none.
    #[inline]
    pub const fn payload(self) -> u64 {
        // The bits that are clear when something happened are turned round: in a payload all bits
        // mean the same.
        (self.0 ^ Self::ACTIVE_LOW) & !Self::BT
    }

    /// The register as a MOV reads it.
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl Default for Dr6 {
    fn default() -> Self {
        Self::RESET
    }
}

/// DR7, which enables breakpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dr7(u64);

impl Dr7 {
    /// The eight enables of breakpoints.
    pub const ENABLES: u64 = 0xff;
    /// The local enables of breakpoints, which are a task's own, and LE.
    pub const LOCAL: u64 = 0x155;
    /// General detect: MOV DR raises #DB.
    pub const GD: u64 = 1 << 13;
    /// What a MOV clears: bits 11, 12, 14 and 15.
    pub const RESERVED_ZERO: u64 = 0xd800;
    const RESERVED_ONE: u64 = 1 << 10;
    /// DR7 after reset.
    pub const RESET: Self = Self(Self::RESERVED_ONE);

    /// The register after `raw` was written. A MOV whose upper half is not zero faults; here it is
    /// dropped.
    #[inline]
    pub const fn new(raw: u64) -> Self {
        // What only a MOV clears stays: KVM_GET_DEBUGREGS gives back what a VMM has set, as in
        // stock KVM.
        Self(raw as u32 as u64 | Self::RESERVED_ONE)
    }

    /// As the handler of a #DB finds it.
    #[inline]
    pub const fn without_general_detect(self) -> Self {
        // The handler itself reads debug registers, and must not fault at the first.
        Self(self.0 & !Self::GD)
    }

    /// Whether a breakpoint is enabled.
    #[inline]
    pub const fn has_breakpoints(self) -> bool {
        // Local and global alike: the hypervisor switches no tasks by which they would differ.
        self.0 & Self::ENABLES != 0
    }

    /// The register as a MOV reads it.
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl Default for Dr7 {
    fn default() -> Self {
        Self::RESET
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reset_values_are_those_of_the_manual() {
        assert_eq!((Dr6::RESET.bits(), Dr7::RESET.bits()), (0xffff_0ff0, 0x400));
        assert_eq!((Dr6::new(0xffff_0ff0), Dr7::new(0x400)), (Dr6::RESET, Dr7::RESET));
    }

    #[test]
    fn reserved_bits_are_what_they_always_are() {
        assert_eq!(Dr6::new(u64::MAX).bits(), 0xffff_efff);
        assert_eq!(Dr6::new(0).bits(), 0xfffe_07f0);
        assert_eq!(Dr7::new(1 << 40).bits(), 0x400);
    }

    #[test]
    fn what_happened_gathers_but_for_breakpoints() {
        let step = Dr6::RESET.after_db(Dr6::BS | 1);
        assert_eq!(step.bits(), 0xffff_4ff1);
        assert_eq!(step.after_db(Dr6::BD).bits(), 0xffff_6ff0);
        assert_eq!(Dr6::RESET.after_db(1 << 16).bits(), 0xfffe_0ff0, "active low");
        assert_eq!(Dr6::RESET.after_db(1 << 40 | 1 << 12), Dr6::RESET);
        assert_eq!(step.payload(), Dr6::BS | 1);
        assert_eq!(Dr6::RESET.after_db(1 << 16).payload(), 1 << 16);
    }
}
