//! The host's registers that VMRUN and #VMEXIT leave alone, and the two ways to keep them while a
//! guest runs (module parameter `host_state`).
//!
//! They are FS, GS, TR and LDTR with their hidden state, the SYSCALL and SYSENTER MSRs and
//! KERNEL_GS_BASE (APM vol. 2 §15.5.1). VMSAVE and VMLOAD move all of them at once. The other way
//! is what stock KVM did before it used these two for the host: each MSR by RDMSR and WRMSR, each
//! selector from its descriptor. The guest's half goes by VMLOAD and VMSAVE in both: nothing else
//! loads the hidden state that its control block holds.

use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::Relaxed};

use cpu::{Cpu, Selectors};
use x86::msr::{GS_BASE, KERNEL_GS_BASE};

/// How the host's state is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostState {
    /// By VMSAVE into the host's save area, and back by VMLOAD.
    #[default]
    Vmsave,
    /// Register by register.
    Msr,
}

/// What user space needs. The kernel itself needs GS_BASE alone.
///
/// Loading the selectors changes FS_BASE and KERNEL_GS_BASE, so both are written after that.
const OF_USER: [u32; 9] = [
    0xc000_0081, // STAR
    0xc000_0082, // LSTAR
    0xc000_0083, // CSTAR
    0xc000_0084, // SYSCALL_MASK
    KERNEL_GS_BASE,
    0xc000_0100, // FS_BASE
    0x174,       // SYSENTER_CS
    0x175,       // SYSENTER_ESP
    0x176,       // SYSENTER_EIP
];

/// One CPU's registers, of the run that its per-CPU state is tagged with. Touched on that CPU only, with
/// interrupts off.
#[derive(Debug, Default)]
pub(crate) struct HostRegisters {
    gs_base: AtomicU64,
    user_gs_base: AtomicU64,
    of_user: [AtomicU64; OF_USER.len()],
    fs: AtomicU16,
    gs: AtomicU16,
    ldt: AtomicU16,
    /// The host's state lies here, and not in the save area.
    pub(crate) hold_it: AtomicBool,
}

impl HostRegisters {
    #[cold]
    #[inline(never)]
    pub(crate) fn save<C: Cpu>(&self, cpu: &mut C) {
        self.gs_base.store(cpu.rdmsr(GS_BASE), Relaxed);
        for (slot, msr) in self.of_user.iter().zip(OF_USER) {
            let value = cpu.rdmsr(msr);
            slot.store(value, Relaxed);
            if msr == KERNEL_GS_BASE {
                self.user_gs_base.store(value, Relaxed);
            }
        }
        // FS and GS by selector, too: a process of 32 bits has its base in a descriptor.
        let Selectors { fs, gs, ldt } = cpu.selectors();
        self.fs.store(fs, Relaxed);
        self.gs.store(gs, Relaxed);
        self.ldt.store(ldt, Relaxed);
    }

    /// What the kernel needs, and what an NMI needs: its stack is found through TR, its per-CPU data
    /// through GS_BASE. Nothing of the kernel may run before.
    #[cold]
    #[inline(never)]
    pub(crate) fn restore_kernel<C: Cpu>(&self, cpu: &mut C) {
        cpu.wrmsr(GS_BASE, self.gs_base.load(Relaxed));
        // TR by its descriptor: only the kernel's own TSS is ever in it.
        cpu.load_task_register();
    }

    /// The rest, with GIF set: a selector may fault, and faults are the kernel's to mend.
    ///
    /// The kernel loads GS between two SWAPGS. An NMI there takes a negative base for the kernel's
    /// own, so what SWAPGS brings must not be the guest's any more.
    #[cold]
    #[inline(never)]
    pub(crate) fn restore_user<C: Cpu>(&self, cpu: &mut C) {
        cpu.wrmsr(KERNEL_GS_BASE, self.user_gs_base.load(Relaxed));
        let [fs, gs, ldt] = [&self.fs, &self.gs, &self.ldt].map(|s| s.load(Relaxed));
        cpu.load_selectors(Selectors { fs, gs, ldt });
        for (slot, msr) in self.of_user.iter().zip(OF_USER) {
            cpu.wrmsr(msr, slot.load(Relaxed));
        }
    }
}
