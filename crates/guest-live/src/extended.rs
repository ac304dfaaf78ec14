//! Extended state's control registers: XCR0, IA32_XSS and PKRU.
//!
//! The registers that they are about are loaded with the guest's FPU; these three are loaded as late as
//! the loop's beginning, because the host's own XSAVE must not run with the guest's XCR0.
//!
//! A guest cannot see XCR0 while its CR4.OSXSAVE is clear. The host's stays loaded then, so that a
//! guest without XSAVE costs no XSETBV at all.

use cpu::Cpu;
use x86::msr;

/// Which of the registers the CPU has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Has {
    /// The CPU has IA32_XSS.
    pub xsaves: bool,
    /// The CPU has PKRU.
    pub pku: bool,
}

/// A guest's XCR0, IA32_XSS and PKRU, and the host's.
#[derive(Clone, Copy, Debug)]
pub struct Extended {
    has: Has,
    xcr0: u64,
    xss: u64,
    pkru: u32,
    host_pkru: u32,
    /// 0: not read yet.
    host_xcr0: u64,
    host_xss: u64,
    /// What the hardware holds while the loop runs; XCR0 is 0 else.
    live_xcr0: u64,
    live_xss: u64,
}

impl Extended {
    /// The values after power-up. `host_xss`: the host's IA32_XSS, which never changes.
    pub fn new(has: Has, host_xss: u64) -> Self {
        Self {
            has,
            // x87 alone, as after RESET (SDM vol. 1 §13.3).
            xcr0: 1,
            xss: 0,
            pkru: 0,
            host_pkru: 0,
            host_xcr0: 0,
            host_xss,
            live_xcr0: 0,
            live_xss: 0,
        }
    }

    /// The guest's XCR0.
    #[inline]
    pub fn xcr0(&self) -> u64 {
        self.xcr0
    }

    /// Sets the guest's XCR0. [`sync`](Self::sync) brings it to the hardware.
    #[inline]
    pub fn set_xcr0(&mut self, value: u64) {
        self.xcr0 = value;
    }

    /// The guest's IA32_XSS.
    #[inline]
    pub fn xss(&self) -> u64 {
        self.xss
    }

    /// Sets the guest's IA32_XSS. [`sync`](Self::sync) brings it to the hardware.
    #[inline]
    pub fn set_xss(&mut self, value: u64) {
        self.xss = value;
    }

    /// The guest's PKRU as it was when the loop was left last.
    #[inline]
    pub fn pkru(&self) -> u32 {
        self.pkru
    }

    /// Sets the guest's PKRU. The hardware gets it when the loop is entered.
    #[inline]
    pub fn set_pkru(&mut self, value: u32) {
        self.pkru = value;
    }

    /// Whether the guest's values are loaded: [`load`](Self::load) was called, and not yet
    /// [`unload`](Self::unload).
    #[inline]
    pub fn is_loaded(&self) -> bool {
        self.live_xcr0 != 0
    }

    /// XCR0 as the guest runs with it.
    #[inline(always)]
    fn shown_xcr0(&self, sees_xcr0: bool) -> u64 {
        let Self { xcr0, host_xcr0, .. } = *self;
        // XGETBV is #UD without CR4.OSXSAVE: the guest cannot see whose it is.
        if sees_xcr0 { xcr0 } else { host_xcr0 }
    }

    /// Whether [`load`](Self::load) may have anything to do: the guest's values may be others than the
    /// host's. PKRU may always be, and what is not known may be too.
    pub fn may_differ(&self, sees_xcr0: bool) -> bool {
        self.has.pku
            // Not known yet, so that `load` has to look.
            || self.host_xcr0 == 0
            || self.shown_xcr0(sees_xcr0) != self.host_xcr0
            || (self.has.xsaves && self.xss != self.host_xss)
    }

    /// The loop is entered: exchanges the host's values for the guest's. `sees_xcr0`: the guest has
    /// CR4.OSXSAVE.
    #[inline]
    pub fn load<C: Cpu>(&mut self, cpu: &mut C, sees_xcr0: bool) {
        self.begin_load(cpu);
        self.sync(cpu, sees_xcr0);
    }

    /// The first half of [`load`](Self::load), which does not depend on what the guest sees. Whoever asks
    /// for that only now and calls [`sync`](Self::sync) spares a guest that does not see XCR0 the look at it.
    #[inline(always)]
    pub fn begin_load<C: Cpu>(&mut self, cpu: &mut C) {
        if self.host_xcr0 == 0 {
            // Once: the kernel sets it when it boots, and never after.
            self.host_xcr0 = cpu.xcr0();
        }
        self.live_xcr0 = self.host_xcr0;
        self.live_xss = self.host_xss;
        if self.has.pku {
            // The thread's own, which user space changes without a system call.
            self.host_pkru = cpu.pkru();
            if self.pkru != self.host_pkru {
                cpu.set_pkru(self.pkru);
            }
        }
    }

    /// Brings XCR0 and IA32_XSS, which are loaded, to what the guest is to see.
    #[inline(always)]
    pub fn sync<C: Cpu>(&mut self, cpu: &mut C, sees_xcr0: bool) {
        let xcr0 = self.shown_xcr0(sees_xcr0);
        if xcr0 != self.live_xcr0 {
            self.live_xcr0 = xcr0;
            cpu.set_xcr0(xcr0);
        }
        if self.has.xsaves && self.xss != self.live_xss {
            self.live_xss = self.xss;
            cpu.wrmsr(msr::XSS, self.xss);
        }
    }

    /// The loop is left: brings all that [`load`](Self::load) has loaded back to the host's.
    #[inline]
    pub fn unload<C: Cpu>(&mut self, cpu: &mut C) {
        if self.live_xcr0 != self.host_xcr0 {
            cpu.set_xcr0(self.host_xcr0);
        }
        // No value of XCR0 is 0: nothing is loaded.
        self.live_xcr0 = 0;
        // Without XSAVES both are 0, and the MSR is not touched.
        if self.live_xss != self.host_xss {
            cpu.wrmsr(msr::XSS, self.host_xss);
        }
        if self.has.pku {
            // WRPKRU is executed by the guest without an exit.
            self.pkru = cpu.pkru();
            if self.pkru != self.host_pkru {
                cpu.set_pkru(self.host_pkru);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::{Counting, Model, Op};

    const ALL: Has = Has { xsaves: true, pku: true };
    const HOST: u64 = 7;

    fn cpu() -> Counting<Model> {
        let mut model = Model::default();
        (model.xcr0, model.pkru) = (HOST, 0x5555_5554);
        model.msrs.insert(msr::XSS, 0);
        Counting::new(model)
    }

    fn writes(cpu: &Counting<Model>) -> [u64; 2] {
        [Op::Xsetbv, Op::Wrmsr].map(|op| cpu.counts().of(op))
    }

    #[test]
    fn a_guest_that_does_not_see_xcr0_runs_with_the_hosts() {
        let mut cpu = cpu();
        let mut state = Extended::new(Has::default(), 0);
        assert!(state.may_differ(false), "the host's is not known yet");
        state.load(&mut cpu, false);
        assert!(state.is_loaded());
        state.unload(&mut cpu);
        assert!(!state.is_loaded() && !state.may_differ(false) && state.may_differ(true));
        assert_eq!((writes(&cpu), cpu.inner().xcr0), ([0, 0], HOST));
    }

    #[test]
    fn each_is_written_where_it_differs_and_comes_back() {
        let mut cpu = cpu();
        let mut state = Extended::new(ALL, 0);
        state.set_xcr0(3);
        state.set_xss(0x100);
        state.set_pkru(8);
        for run in 1..=2 {
            state.load(&mut cpu, true);
            state.sync(&mut cpu, true);
            assert_eq!((cpu.xcr0(), cpu.rdmsr(msr::XSS), cpu.pkru()), (3, 0x100, 8));
            state.unload(&mut cpu);
            assert_eq!((cpu.xcr0(), cpu.rdmsr(msr::XSS), cpu.pkru()), (HOST, 0, 0x5555_5554));
            assert_eq!(writes(&cpu), [2 * run; 2]);
        }
    }

    #[test]
    fn what_changes_inside_the_loop_is_written_at_once() {
        let mut cpu = cpu();
        let mut state = Extended::new(ALL, 0);
        state.load(&mut cpu, false);
        state.set_xcr0(1);
        state.sync(&mut cpu, false);
        assert_eq!(cpu.xcr0(), HOST, "not seen");
        state.sync(&mut cpu, true);
        assert_eq!(cpu.xcr0(), 1);
        state.unload(&mut cpu);
        assert_eq!((cpu.xcr0(), state.xcr0()), (HOST, 1));
    }

    #[test]
    fn the_guests_own_write_of_pkru_is_kept() {
        let mut cpu = cpu();
        let mut state = Extended::new(ALL, 0);
        state.load(&mut cpu, true);
        cpu.set_pkru(0xc);
        state.unload(&mut cpu);
        assert_eq!((state.pkru(), cpu.pkru()), (0xc, 0x5555_5554));
    }

    #[test]
    fn without_xsaves_and_pku_neither_is_touched() {
        let mut cpu = cpu();
        let mut state = Extended::new(Has::default(), 0);
        state.set_xss(0x100);
        state.set_pkru(8);
        state.load(&mut cpu, true);
        state.unload(&mut cpu);
        assert_eq!((cpu.counts().of(Op::Pkru), cpu.counts().of(Op::Wrmsr)), (0, 0));
    }
}
