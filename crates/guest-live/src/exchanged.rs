//! An MSR of which the host needs its own value as soon as the loop is left.

use cpu::Cpu;

/// The MSR `INDEX` of a guest, and what the hardware holds while the loop runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exchanged<const INDEX: u32> {
    guest: u64,
    live: u64,
}

impl<const INDEX: u32> Exchanged<INDEX> {
    /// The guest's value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.guest
    }

    /// Sets the guest's value. [`sync`](Self::sync) brings it to the hardware.
    #[inline]
    pub fn set(&mut self, value: u64) {
        self.guest = value;
    }

    /// The loop is entered: the hardware holds `host`.
    #[inline]
    pub fn enter(&mut self, host: u64) {
        // Told and not read: RDMSR at each entry would cost more than the caller's look.
        self.live = host;
    }

    /// Brings the hardware to the guest's value, inside the loop.
    #[inline]
    pub fn sync<C: Cpu>(&mut self, cpu: &mut C) {
        // WRMSR serializes, and costs more than the rest of a short exit.
        if self.guest != self.live {
            self.live = self.guest;
            cpu.wrmsr(INDEX, self.guest);
        }
    }

    /// Reads what the guest may have changed without an exit, inside the loop.
    #[inline]
    pub fn read_back<C: Cpu>(&mut self, cpu: &mut C) {
        // Only where writes do not exit: else the value is known.
        self.guest = cpu.rdmsr(INDEX);
        self.live = self.guest;
    }

    /// The loop is left: brings the hardware to `host`.
    #[inline]
    pub fn leave<C: Cpu>(&self, cpu: &mut C, host: u64) {
        // By what the hardware holds, and not by what the guest has: the two differ where nothing was synchronised.
        if self.live != host {
            cpu.wrmsr(INDEX, host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::{Counting, Model, Op};
    use x86::msr::TSC_AUX;

    #[test]
    fn equal_values_are_never_written() {
        let mut cpu = Counting::new(Model::default());
        let mut aux = Exchanged::<TSC_AUX>::default();
        aux.set(7);
        aux.enter(7);
        aux.sync(&mut cpu);
        aux.leave(&mut cpu, 7);
        assert_eq!(cpu.counts().of(Op::Wrmsr), 0);
    }

    #[test]
    fn a_guests_value_is_written_once_and_the_hosts_comes_back() {
        let mut cpu = Counting::new(Model::default());
        let mut aux = Exchanged::<TSC_AUX>::default();
        aux.set(7);
        aux.enter(3);
        aux.sync(&mut cpu);
        aux.sync(&mut cpu);
        assert_eq!((cpu.rdmsr(TSC_AUX), cpu.counts().of(Op::Wrmsr)), (7, 1));
        aux.leave(&mut cpu, 3);
        assert_eq!((cpu.rdmsr(TSC_AUX), cpu.counts().of(Op::Wrmsr)), (3, 2));
        assert_eq!(aux.get(), 7);
    }

    #[test]
    fn what_the_guest_changed_itself_is_its_value() {
        let mut cpu = Counting::new(Model::default());
        let mut aux = Exchanged::<TSC_AUX>::default();
        aux.enter(3);
        cpu.wrmsr(TSC_AUX, 9);
        let before = cpu.counts();
        aux.read_back(&mut cpu);
        aux.sync(&mut cpu);
        assert_eq!((aux.get(), cpu.counts().since(&before).of(Op::Wrmsr)), (9, 0));
        aux.leave(&mut cpu, 9);
        assert_eq!(cpu.counts().since(&before).of(Op::Wrmsr), 0);
    }
}
