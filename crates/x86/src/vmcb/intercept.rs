//! The intercept words of the control area (APM vol. 2 table B-1), but for that of exceptions, which is
//! [`Exceptions`](crate::exception::Exceptions).

use bitflags::bitflags;

bitflags! {
    /// Intercept vector 0 (offset 0x00): control registers.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct InterceptCr: u32 {
        /// Reads of CR0.
        const READ_CR0 = 1 << 0;
        /// Reads of CR3.
        const READ_CR3 = 1 << 3;
        /// Reads of CR4.
        const READ_CR4 = 1 << 4;
        /// Reads of CR8.
        const READ_CR8 = 1 << 8;
        /// Writes of CR0.
        const WRITE_CR0 = 1 << 16;
        /// Writes of CR3.
        const WRITE_CR3 = 1 << 19;
        /// Writes of CR4.
        const WRITE_CR4 = 1 << 20;
        /// Writes of CR8.
        const WRITE_CR8 = 1 << 24;
    }

    /// Intercept vector 1 (offset 0x04): debug registers.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct InterceptDr: u32 {
        /// Reads of DR0 to DR7.
        const READS = 0xff;
        /// Writes of DR0 to DR7.
        const WRITES = 0xff << 16;
    }

    /// Intercept vector 3 (offset 0x0c).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Intercept3: u32 {
        /// A physical interrupt exits.
        const INTR = 1 << 0;
        /// An NMI exits.
        const NMI = 1 << 1;
        /// An SMI exits.
        const SMI = 1 << 2;
        /// An INIT exits.
        const INIT = 1 << 3;
        /// Virtual interrupt (the window).
        const VINTR = 1 << 4;
        /// CR0 writes that change more than TS and MP.
        // TS and MP change with each switch of a task's FPU, which nobody needs to see.
        const CR0_SEL_WRITE = 1 << 5;
        /// The instruction RDPMC exits.
        const RDPMC = 1 << 15;
        /// The instruction CPUID exits.
        const CPUID = 1 << 18;
        /// The instruction RSM exits.
        const RSM = 1 << 19;
        /// The instruction IRET exits.
        const IRET = 1 << 20;
        /// The instruction INVD exits.
        const INVD = 1 << 22;
        /// The instruction PAUSE exits.
        const PAUSE = 1 << 23;
        /// The instruction HLT exits.
        const HLT = 1 << 24;
        /// The instruction INVLPG exits.
        const INVLPG = 1 << 25;
        /// The instruction INVLPGA exits.
        const INVLPGA = 1 << 26;
        /// I/O ports by permission map.
        // Without the bit no map is looked at, and every port is the guest's.
        const IOIO = 1 << 27;
        /// MSRs by permission map.
        const MSR = 1 << 28;
        /// Every task switch exits.
        const TASK_SWITCH = 1 << 29;
        /// Processor freezing on FERR.
        const FERR_FREEZE = 1 << 30;
        /// A shutdown (triple fault) exits.
        const SHUTDOWN = 1 << 31;
    }

    /// Intercept vector 4 (offset 0x10).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Intercept4: u32 {
        /// VMRUN; must be set.
        // A guest's VMRUN would enter any block that it names, with the host's own rights.
        const VMRUN = 1 << 0;
        /// The instruction VMMCALL exits.
        const VMMCALL = 1 << 1;
        /// The instruction VMLOAD exits.
        const VMLOAD = 1 << 2;
        /// The instruction VMSAVE exits.
        const VMSAVE = 1 << 3;
        /// The instruction STGI exits.
        const STGI = 1 << 4;
        /// The instruction CLGI exits.
        const CLGI = 1 << 5;
        /// The instruction SKINIT exits.
        const SKINIT = 1 << 6;
        /// The instruction RDTSCP exits.
        const RDTSCP = 1 << 7;
        /// The instruction ICEBP exits.
        const ICEBP = 1 << 8;
        /// WBINVD and WBNOINVD.
        const WBINVD = 1 << 9;
        /// MONITOR and MONITORX.
        const MONITOR = 1 << 10;
        /// MWAIT and MWAITX.
        const MWAIT = 1 << 11;
        /// The instruction XSETBV exits.
        const XSETBV = 1 << 13;
        /// The instruction RDPRU exits.
        const RDPRU = 1 << 14;
    }

    /// Intercept vector 5 (offset 0x14).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Intercept5: u32 {
        /// The instruction INVLPGB exits.
        const INVLPGB = 1 << 0;
        /// An INVLPGB that is refused.
        const INVLPGB_ILLEGAL = 1 << 1;
        /// The instruction INVPCID exits.
        const INVPCID = 1 << 2;
        /// The instruction MCOMMIT exits.
        const MCOMMIT = 1 << 3;
        /// The instruction TLBSYNC exits.
        const TLBSYNC = 1 << 4;
    }
}
