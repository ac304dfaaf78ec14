//! What the kernel knows of this CPU's leaks and decided about them, and the flush of the L1 data
//! cache that a hypervisor does itself.

/// A mode of the L1 data-cache flush at VM entry, numbered as the kernel numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum L1dFlush {
    /// As the kernel's `l1tf=` says; only asked for, never the outcome.
    Auto = 0,
    /// The L1 data cache is never flushed.
    Never = 1,
    /// Where the host ran since the last entry.
    Cond = 2,
    /// At every entry.
    Always = 3,
    /// The CPU needs none.
    NotRequired = 5,
}

/// What `nx_huge_pages` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NxHugePages {
    /// Where the CPU has the flaw, unless `mitigations=off`.
    Auto,
    /// Large pages may be executed.
    Off,
    /// Large pages may not be executed, on any CPU.
    Force,
}

impl NxHugePages {
    /// As the module was loaded with.
    pub fn asked() -> Self {
        // An unknown number is taken for what the kernel says by itself.
        match port::gnt_nx_huge_pages_asked() {
            1 => Self::Off,
            2 => Self::Force,
            _ => Self::Auto,
        }
    }
}

/// What the kernel's `l1tf=` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L1tf {
    /// Nothing is done.
    Off,
    /// Flush where the host ran; with or without a warning about SMT, or with SMT off.
    Flush,
    /// Flush always, SMT off; the administrator may change it later.
    Full,
    /// Flush always, SMT off, for good.
    FullForce,
}

/// Bugs of the CPU and decisions of the kernel, packed as `gnt_mitigation_facts` packs them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts(pub u64);

macro_rules! facts {
    ($($name:ident = $bit:literal, $doc:literal;)*) => {
        impl Facts {
            $(#[doc = $doc] pub const $name: u64 = 1 << $bit;)*
        }
    };
}

facts! {
    L1TF = 0, "L1 terminal fault.";
    MDS = 1, "Microarchitectural data sampling.";
    TAA = 2, "TSX asynchronous abort.";
    MMIO_STALE_DATA = 3, "Stale data by way of memory-mapped I/O.";
    RFDS = 4, "Register-file data sampling.";
    SRBDS = 5, "Special-register buffer data sampling.";
    ITLB_MULTIHIT = 6, "A change of page size under a fetch can stop the machine.";
    MELTDOWN = 7, "Meltdown.";
    SSB = 8, "Speculative store bypass.";
    GDS = 9, "Gather data sampling, not mitigated by microcode.";
    ITS = 10, "Indirect target selection.";
    TSA = 11, "Transient scheduler attacks (AMD).";
    FLUSH_L1D = 16, "The CPU has an instruction that flushes the L1 data cache.";
    VERW = 17, "The kernel has VERW clear the CPU's buffers before entries of VMX.";
    RSB_VMEXIT = 18, "The return stack is to be filled after a VM exit.";
    RSB_VMEXIT_LITE = 19, "One return is to be retired after a VM exit.";
    KERNEL_IBRS = 20, "SPEC_CTRL.IBRS is written at every entry into the kernel.";
    IBPB_ON_SWITCH = 21, "An IBPB where another vCPU ran last.";
    CLEAR_BHB = 22, "The branch history is to be cleared after a VM exit.";
    SMT = 23, "Hardware threads share cores.";
    ALL_OFF = 24, "`mitigations=off`.";
    RTM = 25, "The CPU has transactional memory.";
    SPEC_CTRL = 26, "SPEC_CTRL exists.";
    ARCH_CAPABILITIES = 27, "ARCH_CAPABILITIES exists.";
    VERW_VM = 28, "The kernel has VERW clear the CPU's buffers before VMRUN.";
    UNRET = 29, "Return predictions are untrained at every entry into the kernel (AMD).";
    IBPB_ON_VMEXIT = 30, "An IBPB after a VM exit (AMD).";
    LS_CFG_SSBD = 31, "The kernel switches speculative store bypass by LS_CFG (AMD).";
    LFENCE_SERIALIZES = 32, "LFENCE serializes.";
    NULL_SELECTOR_KEEPS_BASE = 33, "Loading a null selector leaves the base as it was (AMD).";
    MWAIT = 34, "MWAIT can be given to guests: it works, and the APIC timer goes on in C-states.";
    SMT_POSSIBLE = 35, "Hardware threads share cores, or may come to.";
    VERW_DEVICES = 36, "The kernel wants buffers cleared before guests that reach a device's memory.";
    SPEC_REDUCE = 37, "Return predictions are left to the hypervisor, which has branch prediction reduced (AMD).";
}

impl Facts {
    /// Whether any of `bits` holds.
    #[inline]
    pub const fn any(self, bits: u64) -> bool {
        self.0 & bits != 0
    }

    /// The kernel's choice about L1TF.
    pub const fn l1tf(self) -> L1tf {
        match self.0 >> 56 {
            0 => L1tf::Off,
            1 => L1tf::Flush,
            2 => L1tf::Full,
            _ => L1tf::FullForce,
        }
    }

    /// The facts of this CPU, as they stand now.
    pub fn read() -> Self {
        Self(port::gnt_mitigation_facts())
    }
}

impl L1dFlush {
    /// What `vmentry_l1d_flush` asks for.
    pub fn asked() -> Self {
        match port::gnt_l1d_flush_asked() {
            1 => Self::Never,
            2 => Self::Cond,
            3 => Self::Always,
            _ => Self::Auto,
        }
    }

    /// Tells the kernel the mode that was chosen. It shows that under
    /// `/sys/devices/system/cpu/vulnerabilities`.
    pub fn announce(self) {
        port::gnt_l1d_flush_chosen(self)
    }
}

/// Gets ready for [`flush_l1d`]. May sleep.
pub fn prepare_l1d_flush() -> Result<(), crate::NoMemory> {
    // SAFETY: process context, as the caller promises; made once, kept until unload.
    if unsafe { port::gnt_l1d_flush_prepare() } == 0 { Ok(()) } else { Err(crate::NoMemory) }
}

/// Flushes the L1 data cache. Right before an entry, with interrupts off.
#[inline]
pub fn flush_l1d() {
    port::gnt_l1d_flush()
}

/// Tells the kernel, and whoever reads the parameter, whether large pages are split at fetches.
pub fn announce_nx_huge_pages(splits: bool) {
    port::gnt_nx_huge_pages_chosen(splits)
}

/// At unload: nothing is done by this module any more.
pub fn forget() {
    // SAFETY: no vCPU is left that could flush.
    unsafe { port::gnt_mitigations_exit() }
}

#[cfg(target_os = "none")]
mod port {
    unsafe extern "C" {
        pub safe fn gnt_mitigation_facts() -> u64;
        pub safe fn gnt_l1d_flush_asked() -> u32;
        /// The kernel shows it by its number, which is the enum's: no other number may come.
        pub safe fn gnt_l1d_flush_chosen(state: super::L1dFlush);
        pub fn gnt_l1d_flush_prepare() -> i32;
        pub safe fn gnt_l1d_flush();
        pub safe fn gnt_nx_huge_pages_asked() -> u32;
        pub safe fn gnt_nx_huge_pages_chosen(splits: bool);
        pub fn gnt_mitigations_exit();
    }
}

/// Outside the kernel the CPU leaks nothing; flushes are counted.
#[cfg(not(target_os = "none"))]
pub mod port {
    #![allow(missing_docs)]
    use std::cell::Cell;

    std::thread_local! {
        /// Flushes of this thread.
        pub static FLUSHES: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn gnt_mitigation_facts() -> u64 {
        0
    }
    pub(super) fn gnt_l1d_flush_asked() -> u32 {
        0
    }
    pub(super) fn gnt_l1d_flush_chosen(_: super::L1dFlush) {}
    pub(super) unsafe fn gnt_l1d_flush_prepare() -> i32 {
        0
    }
    pub(super) fn gnt_l1d_flush() {
        FLUSHES.set(FLUSHES.get() + 1);
    }
    pub(super) fn gnt_nx_huge_pages_asked() -> u32 {
        0
    }
    pub(super) fn gnt_nx_huge_pages_chosen(_: bool) {}
    pub(super) unsafe fn gnt_mitigations_exit() {}
}
