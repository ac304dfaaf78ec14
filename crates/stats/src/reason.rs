//! Why a guest left: the reasons that exits are counted by. The run loop maps the neutral exit of
//! its backend to one of them.

use core::ffi::CStr;

/// A NUL-terminated name from pieces.
macro_rules! name {
    ($($piece:expr),*) => {
        match CStr::from_bytes_with_nul(concat!($($piece,)* "\0").as_bytes()) {
            Ok(name) => name,
            // The NUL that is put on is the only one: it cannot come to this.
            Err(_) => c"",
        }
    };
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Why a guest left.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Reason {
            $($(#[$doc])* $variant,)*
        }

        /// All reasons, in the order of their numbers.
        pub const ALL: &[Reason] = &[$(Reason::$variant,)*];
        /// How many there are.
        pub const REASONS: usize = ALL.len();

        impl Reason {
            /// The reason's name in statistics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The name of the statistic that counts its exits.
            pub const fn exits_name(self) -> &'static CStr {
                match self { $(Self::$variant => name!("exits_", $name),)* }
            }

            /// The name of the statistic that counts those answered in the inner loop.
            pub const fn answered_name(self) -> &'static CStr {
                match self { $(Self::$variant => name!("answered_", $name),)* }
            }

            /// The name of the histogram of cycles from exit to re-entry.
            pub const fn cycles_name(self) -> &'static CStr {
                match self { $(Self::$variant => name!("cycles_", $name),)* }
            }
        }
    };
}

reasons! {
    /// A physical interrupt.
    Interrupt = "interrupt",
    /// A physical NMI.
    Nmi = "nmi",
    /// A machine check.
    MachineCheck = "machine_check",
    /// CPUID was executed.
    Cpuid = "cpuid",
    /// RDMSR was executed.
    Rdmsr = "rdmsr",
    /// WRMSR was executed.
    Wrmsr = "wrmsr",
    /// VMMCALL or VMCALL.
    Hypercall = "hypercall",
    /// HLT was executed.
    Hlt = "hlt",
    /// PAUSE was executed, often enough to exit.
    Pause = "pause",
    /// WBINVD or INVD was executed.
    CacheFlush = "cache_flush",
    /// A port access.
    Io = "io",
    /// A TDP fault or EPT violation: missing memory, or a device.
    TdpFault = "tdp_fault",
    /// A guest page fault that is the hypervisor's to look at (shadow paging).
    PageFault = "page_fault",
    /// A control register.
    Cr = "cr",
    /// A debug register.
    DebugReg = "debug_reg",
    /// XSETBV was executed.
    Xsetbv = "xsetbv",
    /// RDPMC was executed.
    Rdpmc = "rdpmc",
    /// The guest can take an interrupt.
    InterruptWindow = "interrupt_window",
    /// The end of an interrupt that is reported, of a local APIC that the hardware serves.
    Eoi = "eoi",
    /// A write to such a local APIC that the hardware leaves to software.
    ApicWrite = "apic_write",
    /// The guest ends an NMI's handler.
    Iret = "iret",
    /// An exception that has no reason of its own.
    Exception = "exception",
    /// MONITOR or MWAIT was executed.
    Mwait = "mwait",
    /// An instruction that the guest does not have.
    Undefined = "undefined",
    /// An instruction for hypervisors: VMRUN, VMRESUME and their like.
    Virtualization = "virtualization",
    /// INVLPG or INVPCID was executed.
    Invlpg = "invlpg",
    /// The end of system-management mode.
    Rsm = "rsm",
    /// A task switch.
    TaskSwitch = "task_switch",
    /// A triple fault.
    Shutdown = "shutdown",
    /// INIT or SMI at the host.
    HostSignal = "host_signal",
    /// The hardware refused to run the state.
    Refused = "refused",
    /// The time that the backend watches: the VMX-preemption timer.
    Deadline = "preemption_timer",
    /// LGDT, SIDT and their like, of a guest whose CR4.UMIP is made by exits.
    DescriptorTable = "descriptor_table",
    /// Anything that has no reason of its own.
    Other = "other",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_the_places_in_the_list() {
        for (n, reason) in ALL.iter().enumerate() {
            assert_eq!(*reason as usize, n);
            assert!(reason.exits_name().to_str().unwrap().ends_with(reason.name()));
        }
    }
}
