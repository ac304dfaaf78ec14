//! Counts privileged operations by kind. The budgets of the exit path are stated in these counts.

use crate::{Cpu, Selectors, SpecCtrl};
use backend::Gprs;
use x86::{Hpa, vmcb::Vmcb};

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Op {
    Rdmsr,
    Wrmsr,
    Cpuid,
    Rdtsc,
    Xsetbv,
    Xgetbv,
    Pkru,
    DebugReg,
    MovCr,
    Clgi,
    Stgi,
    StiCli,
    Vmload,
    Vmsave,
    Vmrun,
    Selectors,
    TaskRegister,
}

/// Number of [`Op`]s.
pub const OPS: usize = 17;

/// Counts by [`Op`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts([u64; OPS]);

impl Counts {
    /// How often `op` was executed.
    pub fn of(&self, op: Op) -> u64 {
        self.0.get(op as usize).copied().unwrap_or(0)
    }

    /// What was executed since `earlier`.
    pub fn since(&self, earlier: &Counts) -> Counts {
        let mut out = *self;
        for (o, e) in out.0.iter_mut().zip(earlier.0) {
            *o = o.wrapping_sub(e);
        }
        out
    }

    fn add(&mut self, op: Op) {
        if let Some(n) = self.0.get_mut(op as usize) {
            *n = n.wrapping_add(1);
        }
    }
}

/// A [`Cpu`] that counts what is executed on another.
#[derive(Clone, Debug, Default)]
pub struct Counting<C> {
    inner: C,
    counts: Counts,
}

impl<C> Counting<C> {
    /// Wraps `inner`.
    pub fn new(inner: C) -> Self {
        Self { inner, counts: Counts::default() }
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The wrapped CPU.
    pub fn inner(&mut self) -> &mut C {
        &mut self.inner
    }
}

macro_rules! counted {
    ($($op:ident: fn $name:ident(&mut self $(, $arg:ident: $ty:ty)*) $(-> $ret:ty)?;)*) => {
        $(fn $name(&mut self $(, $arg: $ty)*) $(-> $ret)? {
            self.counts.add(Op::$op);
            self.inner.$name($($arg),*)
        })*
    };
}

impl<C: Cpu> Cpu for Counting<C> {
    counted! {
        Rdmsr: fn rdmsr(&mut self, msr: u32) -> u64;
        Wrmsr: fn wrmsr(&mut self, msr: u32, value: u64);
        Cpuid: fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4];
        Rdtsc: fn rdtsc(&mut self) -> u64;
        Xgetbv: fn xcr0(&mut self) -> u64;
        Xsetbv: fn set_xcr0(&mut self, value: u64);
        Pkru: fn pkru(&mut self) -> u32;
        Pkru: fn set_pkru(&mut self, value: u32);
        DebugReg: fn debug_reg(&mut self, n: u8) -> u64;
        DebugReg: fn set_debug_reg(&mut self, n: u8, value: u64);
        MovCr: fn cr4(&mut self) -> u64;
        Clgi: fn clgi(&mut self);
        Stgi: fn stgi(&mut self);
        StiCli: fn sti(&mut self);
        StiCli: fn cli(&mut self);
        Vmload: fn vmload(&mut self, state: Hpa);
        Vmsave: fn vmsave(&mut self, state: Hpa);
        Selectors: fn selectors(&mut self) -> Selectors;
        Selectors: fn load_selectors(&mut self, selectors: Selectors);
        TaskRegister: fn load_task_register(&mut self);
        Vmrun: fn vmrun(&mut self, vmcb: &mut Vmcb, at: Hpa, gprs: &mut Gprs, spec: SpecCtrl);
    }
}
