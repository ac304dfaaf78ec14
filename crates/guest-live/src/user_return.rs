//! MSRs whose value matters to the host in user space alone: those of SYSCALL, and TSC_AUX. A guest's
//! values stay in the CPU when the loop is left, until the CPU goes back to user space, whichever thread
//! does: the next run mostly finds them there.

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use cpu::Cpu;
use host::hostcpu;
use x86::msr::{LSTAR, STAR, SYSCALL_MASK, TSC_AUX};

/// The SYSCALL MSRs of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SyscallMsrs {
    pub star: u64,
    pub lstar: u64,
    pub mask: u64,
}

/// One of the lent MSRs on one CPU.
#[derive(Debug)]
struct Lent {
    index: u32,
    /// The host's, constant while the CPU is online.
    host: AtomicU64,
    /// What the CPU holds.
    live: AtomicU64,
}

impl Lent {
    const fn new(index: u32) -> Self {
        Self { index, host: AtomicU64::new(0), live: AtomicU64::new(0) }
    }
}

/// The lent MSRs of one CPU. Touched there alone, with interrupts off.
#[derive(Debug)]
pub struct UserReturn {
    star: Lent,
    lstar: Lent,
    mask: Lent,
    tsc_aux: Lent,
    state: AtomicU8,
}

/// All hold the host's value.
const HOST: u8 = 0;
/// Some hold a guest's; the kernel calls before it returns to user space.
const WATCHED: u8 = 1;
/// Some hold a guest's, and nobody will call.
const UNWATCHED: u8 = 2;

impl UserReturn {
    /// A CPU of which the host's values are not known yet.
    #[allow(clippy::new_without_default)] // It is for statics and tables alone.
    pub const fn new() -> Self {
        Self {
            star: Lent::new(STAR),
            lstar: Lent::new(LSTAR),
            mask: Lent::new(SYSCALL_MASK),
            tsc_aux: Lent::new(TSC_AUX),
            state: AtomicU8::new(HOST),
        }
    }

    fn all(&self) -> [&Lent; 4] {
        [&self.star, &self.lstar, &self.mask, &self.tsc_aux]
    }

    /// Notes the host's values. Without RDTSCP there is no TSC_AUX.
    pub fn read_host<C: Cpu>(&self, c: &mut C, rdtscp: bool) {
        for lent in self.all() {
            // RDMSR of an MSR that the CPU lacks would be #GP in the kernel.
            let value = if lent.index != TSC_AUX || rdtscp { c.rdmsr(lent.index) } else { 0 };
            lent.host.store(value, Relaxed);
            lent.live.store(value, Relaxed);
        }
        self.state.store(HOST, Relaxed);
    }

    /// Gives the SYSCALL MSRs a guest's values.
    #[inline]
    pub fn lend_syscall<C: Cpu>(&self, c: &mut C, msrs: SyscallMsrs) {
        self.lend(c, &self.star, msrs.star);
        self.lend(c, &self.lstar, msrs.lstar);
        self.lend(c, &self.mask, msrs.mask);
    }

    /// Gives TSC_AUX a guest's value.
    #[inline]
    pub fn lend_tsc_aux<C: Cpu>(&self, c: &mut C, value: u64) {
        self.lend(c, &self.tsc_aux, value);
    }

    /// Gives `lent`, which is one of these, a guest's value.
    #[inline]
    fn lend<C: Cpu>(&self, c: &mut C, lent: &Lent, value: u64) {
        // Most runs of the same vCPU find their values still there.
        if lent.live.load(Relaxed) != value {
            self.change(c, lent, value);
        }
    }

    #[inline(never)]
    fn change<C: Cpu>(&self, c: &mut C, lent: &Lent, value: u64) {
        // First: an NMI that finds the CPU gone for good restores what is noted.
        lent.live.store(value, Relaxed);
        c.wrmsr(lent.index, value);
        // `WATCHED` stays: the kernel calls in any case.
        if self.state.load(Relaxed) == HOST {
            self.state.store(UNWATCHED, Relaxed);
        }
    }

    /// The loop was left. The kernel is to call before it goes to user space.
    #[inline]
    pub fn left<C: Cpu>(&self, c: &mut C) {
        // Nothing is lent, or somebody will see to it.
        if self.state.load(Relaxed) != UNWATCHED {
            return;
        }
        // On the way to user space at once, the call would come at once.
        if hostcpu::watch_user_return() {
            self.state.store(WATCHED, Relaxed);
        } else {
            self.restore(c);
        }
    }

    /// The loop was left for user space, most likely, where nothing is gained by having the kernel call.
    #[inline]
    pub fn left_for_user<C: Cpu>(&self, c: &mut C) {
        if self.state.load(Relaxed) == UNWATCHED {
            self.restore(c);
        }
    }

    /// The CPU is about to run user space, or to be without VMX: the host's values come back.
    pub fn restore<C: Cpu>(&self, c: &mut C) {
        for lent in self.all() {
            let host = lent.host.load(Relaxed);
            if lent.live.load(Relaxed) != host {
                c.wrmsr(lent.index, host);
                lent.live.store(host, Relaxed);
            }
        }
        // Behind the writes: an NMI in between restores once more.
        self.state.store(HOST, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::{Counting, Model, Op};
    use host::std_port::test;

    fn cpu() -> Counting<Model> {
        let mut model = Model::default();
        for (index, value) in [(STAR, 1), (LSTAR, 2), (SYSCALL_MASK, 3), (TSC_AUX, 4)] {
            model.wrmsr(index, value);
        }
        Counting::new(model)
    }

    #[test]
    fn a_value_is_written_when_it_is_another_and_taken_back_once() {
        let (mut c, of) = (cpu(), UserReturn::new());
        of.read_host(&mut c, true);
        let before = c.counts();
        of.lend(&mut c, &of.star, 1);
        of.lend(&mut c, &of.lstar, 20);
        of.lend(&mut c, &of.lstar, 20);
        of.left(&mut c);
        of.lend(&mut c, &of.lstar, 20);
        of.left_for_user(&mut c);
        assert_eq!(c.counts().since(&before).of(Op::Wrmsr), 1);
        assert_eq!(c.rdmsr(LSTAR), 20);
        assert_eq!(test::user_return_watches(), 1);
        of.restore(&mut c);
        of.restore(&mut c);
        assert_eq!(c.counts().since(&before).of(Op::Wrmsr), 2);
        assert_eq!(c.rdmsr(LSTAR), 2);
        of.lend(&mut c, &of.mask, 30);
        of.left(&mut c);
        assert_eq!(test::user_return_watches(), 2, "watched anew");
    }

    #[test]
    fn on_the_way_to_user_space_nobody_is_asked_to_call() {
        let (mut c, of) = (cpu(), UserReturn::new());
        of.read_host(&mut c, true);
        of.lend(&mut c, &of.lstar, 20);
        of.left_for_user(&mut c);
        assert_eq!((c.rdmsr(LSTAR), test::user_return_watches()), (2, 0));
    }

    #[test]
    fn a_kernel_that_does_not_call_has_its_own_when_the_loop_is_left() {
        test::refuse_user_return_watches();
        let (mut c, of) = (cpu(), UserReturn::new());
        of.read_host(&mut c, true);
        of.lend(&mut c, &of.star, 10);
        of.lend(&mut c, &of.tsc_aux, 40);
        of.left(&mut c);
        assert_eq!((c.rdmsr(STAR), c.rdmsr(TSC_AUX)), (1, 4));
    }

    #[test]
    fn without_rdtscp_tsc_aux_is_left_alone() {
        let (mut c, of) = (cpu(), UserReturn::new());
        let before = c.counts();
        of.read_host(&mut c, false);
        assert_eq!(c.counts().since(&before).of(Op::Rdmsr), 3);
    }
}
