//! The privileged instructions as a trait, so that everything above runs against a model in tests.
//!
//! [`Native`] is inline assembly and the world switch; [`Counting`] wraps any [`Cpu`] and counts
//! operations by kind, which is what the operation budgets are stated in; [`Model`] is a scripted
//! CPU for tests.
#![cfg_attr(target_os = "none", no_std)]

pub mod counting;
#[cfg(not(target_os = "none"))]
pub mod legal;
#[cfg(not(target_os = "none"))]
pub mod model;
pub mod native;
pub mod vmx;

pub use counting::{Counting, Counts, Op};
#[cfg(not(target_os = "none"))]
pub use model::{Model, vmx::ModelVmcs};
pub use native::Native;
pub use vmx::{VmxCpu, VmxSwitch};

use backend::Gprs;
use x86::{Cr4, Hpa, vmcb::Vmcb};

/// SPEC_CTRL around a world switch, on CPUs that do not virtualise it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecCtrl {
    /// The guest's value, written before entry when it differs from the host's.
    pub guest: u64,
    /// The host's value on this CPU, written after the exit when the guest's differs.
    pub host: u64,
}

/// The host's selectors that VMRUN and #VMEXIT leave alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selectors {
    /// FS.
    pub fs: u16,
    /// GS: user space's, whose base is in KERNEL_GS_BASE while the kernel runs.
    pub gs: u16,
    /// LDTR.
    pub ldt: u16,
}

/// What the hypervisor executes that user code cannot.
pub trait Cpu: VmxCpu + Send {
    /// RDMSR of an MSR that exists.
    fn rdmsr(&mut self, msr: u32) -> u64;
    /// WRMSR with a value that is valid for it.
    fn wrmsr(&mut self, msr: u32, value: u64);
    /// CPUID: EAX, EBX, ECX, EDX.
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Executes RDTSC: the host's time-stamp counter.
    fn rdtsc(&mut self) -> u64;
    /// Executes XGETBV: XCR0, whoever's is loaded.
    fn xcr0(&mut self) -> u64;
    /// Executes XSETBV: loads XCR0.
    fn set_xcr0(&mut self, value: u64);
    /// RDPKRU; only where CR4.PKE is set.
    fn pkru(&mut self) -> u32;
    /// WRPKRU; only where CR4.PKE is set.
    fn set_pkru(&mut self, value: u32);
    /// MOV from DR0-DR3 or DR6.
    fn debug_reg(&mut self, n: u8) -> u64;
    /// MOV to DR0-DR3, DR6 or DR7.
    fn set_debug_reg(&mut self, n: u8, value: u64);
    /// MOV from CR4.
    fn cr4(&mut self) -> Cr4;
    /// Has the kernel set EFER.SVME on this CPU; `false`: somebody else has it set.
    fn svm_on(&mut self) -> bool;
    /// Has the kernel clear EFER.SVME on this CPU. GIF is set.
    fn svm_off(&mut self);
    /// Executes CLGI: interrupts, NMIs and machine checks wait until STGI.
    fn clgi(&mut self);
    /// Executes STGI: what has waited since CLGI is taken.
    fn stgi(&mut self);
    /// Executes STI: with GIF clear it lets an interrupt end a guest's run.
    fn sti(&mut self);
    /// Executes CLI: maskable interrupts wait.
    fn cli(&mut self);
    /// Executes VMLOAD: segments and SYSCALL MSRs from a VMCB.
    fn vmload(&mut self, state: Hpa);
    /// Executes VMSAVE: segments and SYSCALL MSRs to a VMCB.
    fn vmsave(&mut self, state: Hpa);
    /// The host's selectors, before the guest's state is loaded.
    fn selectors(&mut self) -> Selectors;
    /// Loads the host's selectors from its descriptor tables. This changes FS_BASE and KERNEL_GS_BASE. The
    /// host's GS_BASE and TR are loaded, and GIF is set.
    fn load_selectors(&mut self, selectors: Selectors);
    /// Loads TR with the host's task-state segment, which an NMI's stack switch needs. The host's GS_BASE
    /// is loaded.
    fn load_task_register(&mut self);
    /// The world switch: loads `gprs`, VMRUN, saves `gprs`, with the mitigations of this host.
    /// RAX and RSP travel in the control block.
    fn vmrun(&mut self, vmcb: &mut Vmcb, at: Hpa, gprs: &mut Gprs, spec: SpecCtrl);
}
