//! The host's registers that a VM exit does not bring back by itself, as values: what belongs to a CPU, and what
//! to the thread that runs the vCPU.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cpu::{Cpu, Selectors};
use host::hostcpu;
use x86::msr::{self, EFER, PAT, SYSENTER_CS, SYSENTER_EIP, SYSENTER_ESP};

/// What of the host's state is the same on a CPU as long as it is online: read when VMX is switched
/// on there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct HostConstants {
    pub tables: hostcpu::HostTables,
    pub sysenter_cs: u64,
    pub sysenter_esp: u64,
    pub sysenter_eip: u64,
    pub pat: u64,
    pub efer: u64,
}

/// [`HostConstants`] in a form that can be filled in where nothing may be allocated.
pub(crate) type Words = [AtomicU64; 9];

impl HostConstants {
    pub(crate) fn store(&self, to: &Words) {
        let Self { tables, .. } = self;
        // Where nothing may be allocated and no lock taken: words, in an order that both directions share.
        let selectors = [tables.cs, tables.ss, tables.tr, 0];
        let selectors = selectors.iter().rev().fold(0, |all, s| all << 16 | u64::from(*s));
        let words = [
            tables.gdt,
            tables.idt,
            tables.task,
            selectors,
            self.sysenter_cs,
            self.sysenter_esp,
            self.sysenter_eip,
            self.pat,
            self.efer,
        ];
        for (slot, word) in to.iter().zip(words) {
            slot.store(word, Relaxed);
        }
    }

    pub(crate) fn load(from: &Words) -> Self {
        let words = from.each_ref().map(|word| word.load(Relaxed));
        let [gdt, idt, task, selectors, rest @ ..] = words;
        let [sysenter_cs, sysenter_esp, sysenter_eip, pat, efer] = rest;
        let [cs, ss, tr] = [0, 16, 32].map(|shift| (selectors >> shift) as u16);
        let tables = hostcpu::HostTables { gdt, idt, task, cs, ss, tr, reserved: 0 };
        Self { tables, sysenter_cs, sysenter_esp, sysenter_eip, pat, efer }
    }

    pub(crate) fn read<C: Cpu>(c: &mut C) -> Self {
        Self {
            // By MSRs and tables, not from the kernel's variables: what the CPU has is what an exit has to bring back.
            tables: hostcpu::host_tables(),
            sysenter_cs: c.rdmsr(SYSENTER_CS),
            sysenter_esp: c.rdmsr(SYSENTER_ESP),
            sysenter_eip: c.rdmsr(SYSENTER_EIP),
            pat: c.rdmsr(PAT),
            efer: c.rdmsr(EFER),
        }
    }
}

/// What of the host's state belongs to the thread that runs the vCPU, as it was when the run began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostThread {
    pub(crate) fs_base: u64,
    pub(crate) user_gs_base: u64,
    pub(crate) selectors: Selectors,
    pub(crate) ds: u16,
    pub(crate) es: u16,
}

impl HostThread {
    /// As it is now.
    #[inline]
    pub(crate) fn read<C: Cpu>(cpu: &mut C) -> Self {
        let (ds, es) = cpu.data_selectors();
        Self {
            // FS_BASE and the user's GS base are the thread's: the kernel's own GS base is the CPU's.
            fs_base: cpu.rdmsr(msr::FS_BASE),
            user_gs_base: cpu.rdmsr(msr::KERNEL_GS_BASE),
            selectors: cpu.selectors(),
            ds,
            es,
        }
    }

    /// Reads all selectors again, which may be others since.
    #[inline]
    pub(crate) fn read_selectors<C: Cpu>(&mut self, cpu: &mut C) {
        self.selectors = cpu.selectors();
        (self.ds, self.es) = cpu.data_selectors();
    }
}
