//! The debug registers that a control block has no room for: DR0 to DR3, and on Intel DR6.
//!
//! They are the host's until the guest touches one. From then on the guest has them in the hardware until
//! the loop is left, and from one run to the next while one of its breakpoints is enabled.

use cpu::Cpu;
use x86::{Dr6, Dr7};

/// A guest's DR0 to DR3.
#[derive(Clone, Copy, Debug, Default)]
pub struct DebugRegs {
    addresses: [u64; 4],
    owned: bool,
    watched: bool,
}

impl DebugRegs {
    /// DR0 to DR3 as they were when the loop was left last.
    pub fn addresses(&self) -> [u64; 4] {
        self.addresses
    }

    /// Sets DR0 to DR3. The hardware gets them when the loop is entered.
    pub fn set_addresses(&mut self, addresses: [u64; 4]) {
        self.addresses = addresses;
    }

    /// Whether the guest has the hardware's debug registers while it runs.
    #[inline]
    pub fn owned(&self) -> bool {
        self.owned
    }

    /// Whether the guest's accesses of debug registers have to exit: it does not own them, or somebody
    /// wants to see the accesses all the same.
    pub fn exits(&self) -> bool {
        !self.owned || self.watched
    }

    /// Has accesses exit although the guest owns the registers, or not.
    pub fn watch(&mut self, on: bool) {
        self.watched = on;
    }

    /// The guest uses its debug registers: it owns them from now on. True: it did not until now.
    pub fn give(&mut self) -> bool {
        !core::mem::replace(&mut self.owned, true)
    }

    /// Gives the guest DR0 to DR3 of the hardware.
    pub fn load<C: Cpu>(&self, cpu: &mut C) {
        // The host's breakpoints must not hit at the guest's addresses until the entry loads DR7.
        cpu.set_debug_reg(7, 0);
        for (n, value) in self.addresses.into_iter().enumerate() {
            cpu.set_debug_reg(n as u8, value);
        }
    }

    /// Takes DR0 to DR3 back out of the hardware. The guest goes on owning them, to be loaded with the
    /// next run, if `dr7`, which is its own, enables a breakpoint.
    pub fn save<C: Cpu>(&mut self, cpu: &mut C, dr7: Dr7) {
        // The guest has written them without an exit.
        self.addresses = [0, 1, 2, 3].map(|n| cpu.debug_reg(n));
        // Without an enabled one the registers need not be in the CPU: the next access exits and brings them back.
        self.owned = dr7.has_breakpoints();
    }
}

/// A guest's DR6, where no control block holds it.
#[derive(Clone, Copy, Debug)]
pub struct LiveDr6(Dr6);

impl Default for LiveDr6 {
    fn default() -> Self {
        Self(Dr6::RESET)
    }
}

impl LiveDr6 {
    /// The guest's DR6 as it was when the loop was left last.
    pub fn get(&self) -> Dr6 {
        self.0
    }

    /// Sets the guest's DR6. The hardware gets it when the loop is entered.
    pub fn set(&mut self, value: Dr6) {
        self.0 = value;
    }

    /// Loads the guest's DR6.
    pub fn load<C: Cpu>(&self, cpu: &mut C) {
        // A VMCS holds DR7 and no DR6: the guest's lies in the register while it runs.
        cpu.set_debug_reg(6, self.0.bits());
    }

    /// Takes the guest's DR6 out of the hardware, and leaves there what the kernel's #DB handler leaves.
    pub fn save<C: Cpu>(&mut self, cpu: &mut C) {
        self.0 = Dr6::new(cpu.debug_reg(6));
        // The host's handler must not take the guest's bits for its own.
        cpu.set_debug_reg(6, Dr6::RESET.bits());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::{Counting, Model, Op};

    const BREAKPOINT: u64 = 0x401;

    #[test]
    fn breakpoints_are_off_before_the_guests_addresses_are_loaded() {
        let mut cpu = Model::default();
        cpu.set_debug_reg(7, BREAKPOINT);
        let mut regs = DebugRegs::default();
        regs.set_addresses([1, 2, 3, 4]);
        regs.load(&mut cpu);
        assert_eq!(cpu.debug_regs[..4], [1, 2, 3, 4]);
        assert_eq!(cpu.debug_regs[7], 0);
    }

    #[test]
    fn the_guest_keeps_them_while_it_has_a_breakpoint() {
        let mut cpu = Model::default();
        let mut regs = DebugRegs::default();
        assert!(regs.exits());
        assert!(regs.give() && !regs.give());
        assert!(regs.owned() && !regs.exits());
        cpu.set_debug_reg(2, 0x1000);
        regs.save(&mut cpu, Dr7::new(BREAKPOINT));
        assert!(regs.owned() && !regs.exits());
        assert_eq!(regs.addresses(), [0, 0, 0x1000, 0]);
        regs.save(&mut cpu, Dr7::new(0x400));
        assert!(!regs.owned() && regs.exits());
    }

    #[test]
    fn who_watches_sees_accesses_of_registers_that_the_guest_owns() {
        let mut regs = DebugRegs::default();
        regs.watch(true);
        assert!(regs.give());
        assert!(regs.owned() && regs.exits());
        regs.watch(false);
        assert!(!regs.exits());
    }

    #[test]
    fn dr6_comes_back_and_leaves_the_reset_value() {
        let mut cpu = Counting::new(Model::default());
        let mut dr6 = LiveDr6::default();
        dr6.set(Dr6::new(0xffff_0ff1));
        let before = cpu.counts();
        dr6.load(&mut cpu);
        assert_eq!(cpu.counts().since(&before).of(Op::DebugReg), 1);
        cpu.set_debug_reg(6, 0xffff_0ff2);
        dr6.save(&mut cpu);
        assert_eq!(dr6.get().bits(), 0xffff_0ff2);
        assert_eq!(cpu.debug_reg(6), Dr6::RESET.bits());
    }
}
