//! Counts privileged operations by kind. The budgets of the exit path are stated in these counts.

use core::cell::Cell;

use crate::{Cpu, Selectors, SpecCtrl, VmxCpu, VmxSwitch};
use backend::Gprs;
use x86::{Cr0, Cr4, Hpa, vmcb::Vmcb};

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
    Vmread,
    Vmwrite,
    Vmptrld,
    Vmclear,
    Invept,
    Invvpid,
    Verw,
    VmxEnter,
    VmxOnOff,
    SvmOnOff,
    HostNmi,
}

/// Number of [`Op`]s.
pub const OPS: usize = 28;

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
}

/// A [`Cpu`] that counts what is executed on another.
#[derive(Clone, Debug, Default)]
pub struct Counting<C> {
    inner: C,
    counts: [Cell<u64>; OPS],
}

impl<C> Counting<C> {
    /// A CPU that counts what `inner` is asked for.
    pub fn new(inner: C) -> Self {
        Self { inner, counts: Default::default() }
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        Counts(core::array::from_fn(|i| self.counts.get(i).map_or(0, Cell::get)))
    }

    fn add(&self, op: Op) {
        if let Some(n) = self.counts.get(op as usize) {
            n.set(n.get().wrapping_add(1));
        }
    }

    /// The wrapped CPU.
    pub fn inner(&mut self) -> &mut C {
        &mut self.inner
    }
}

macro_rules! counted {
    ($($op:ident: fn $name:ident(& $this:ident $(, $arg:ident: $ty:ty)*) $(-> $ret:ty)?;)*) => {
        $(fn $name(&$this $(, $arg: $ty)*) $(-> $ret)? {
            $this.add(Op::$op);
            $this.inner.$name($($arg),*)
        })*
    };
    ($($op:ident: fn $name:ident(&mut self $(, $arg:ident: $ty:ty)*) $(-> $ret:ty)?;)*) => {
        $(fn $name(&mut self $(, $arg: $ty)*) $(-> $ret)? {
            self.add(Op::$op);
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
        MovCr: fn cr4(&mut self) -> Cr4;
        SvmOnOff: fn svm_on(&mut self) -> bool;
        SvmOnOff: fn svm_off(&mut self);
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

impl<C: Cpu> VmxCpu for Counting<C> {
    counted! {
        VmxOnOff: fn vmxon(&self, region: Hpa) -> bool;
        VmxOnOff: fn vmxoff(&self);
        Vmptrld: fn vmptrld(&self, vmcs: Hpa);
        Vmclear: fn vmclear(&self, vmcs: Hpa);
        Vmread: fn vmread(&self, field: u32) -> u64;
        Vmwrite: fn vmwrite(&self, field: u32, value: u64);
        Invept: fn invept(&self, kind: u64, ept_pointer: u64);
        Invvpid: fn invvpid(&self, kind: u64, vpid: u16, address: u64);
        Verw: fn verw(&self);
        MovCr: fn cr0(&self) -> Cr0;
        MovCr: fn cr2(&self) -> u64;
        MovCr: fn set_cr2(&self, value: u64);
        MovCr: fn cr3(&self) -> u64;
        MovCr: fn cr4_now(&self) -> Cr4;
        Selectors: fn data_selectors(&self) -> (u16, u16);
    }
    counted! {
        HostNmi: fn host_nmi(&mut self);
        Selectors: fn load_data_selectors(&mut self, ds: u16, es: u16);
    }

    /// With the accesses of SPEC_CTRL that the world switch makes, on a kernel that does not write it at
    /// every entry of its own (IBRS).
    fn vmx_enter(&mut self, gprs: &mut Gprs, switch: &mut VmxSwitch) -> bool {
        self.add(Op::VmxEnter);
        if switch.guest_spec_ctrl != switch.host_spec_ctrl {
            self.add(Op::Wrmsr);
        }
        let entered = self.inner.vmx_enter(gprs, switch);
        if switch.flags & VmxSwitch::READ_SPEC_CTRL != 0 {
            self.add(Op::Rdmsr);
        }
        if switch.guest_spec_ctrl != switch.host_spec_ctrl {
            self.add(Op::Wrmsr);
        }
        entered
    }

    fn vmx_exit_address(&self) -> u64 {
        self.inner.vmx_exit_address()
    }
}
