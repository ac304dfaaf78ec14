//! VM-execution, VM-exit and VM-entry controls (SDM vol. 3C §25.6 to §25.8).

use bitflags::bitflags;

bitflags! {
    /// Pin-based controls (SDM vol. 3C table 25-5).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct PinControls: u32 {
        /// External interrupts exit.
        const EXTERNAL_INTERRUPT = 1 << 0;
        /// NMIs of the host exit.
        const NMI = 1 << 3;
        /// NMI blocking is that of virtual NMIs.
        // With it the NMI mask is the guest's, and an IRET ends it without an exit.
        const VIRTUAL_NMIS = 1 << 5;
        /// The preemption timer counts.
        const PREEMPTION_TIMER = 1 << 6;
        /// Posted interrupts are processed.
        const POSTED_INTERRUPTS = 1 << 7;
        // A CPU may demand bits that nobody knew when this was written: they must survive.
        /// Bits whose meaning is not listed here.
        const _ = !0;
    }

    /// Primary processor-based controls (SDM vol. 3C table 25-6).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ProcControls: u32 {
        /// Exit when an interrupt can be taken.
        const INTERRUPT_WINDOW = 1 << 2;
        /// The TSC offset is used.
        const TSC_OFFSET = 1 << 3;
        /// Every HLT exits.
        const HLT = 1 << 7;
        /// Every INVLPG exits.
        const INVLPG = 1 << 9;
        /// Every MWAIT exits.
        const MWAIT = 1 << 10;
        /// Every RDPMC exits.
        const RDPMC = 1 << 11;
        /// Every RDTSC exits.
        const RDTSC = 1 << 12;
        /// MOV to CR3 exits.
        const CR3_LOAD = 1 << 15;
        /// MOV from CR3 exits.
        const CR3_STORE = 1 << 16;
        /// The tertiary controls are used.
        const TERTIARY = 1 << 17;
        /// MOV to CR8 exits.
        const CR8_LOAD = 1 << 19;
        /// MOV from CR8 exits.
        const CR8_STORE = 1 << 20;
        /// The virtual-APIC page holds the task priority.
        // CR8 is then the virtual-APIC page's, and needs no exit.
        const TPR_SHADOW = 1 << 21;
        /// Exit when an NMI can be taken.
        const NMI_WINDOW = 1 << 22;
        /// MOV of debug registers exits.
        const MOV_DR = 1 << 23;
        /// Every port access exits.
        const UNCONDITIONAL_IO = 1 << 24;
        /// The I/O bitmaps are used.
        const IO_BITMAPS = 1 << 25;
        /// Exit after each instruction.
        const MONITOR_TRAP = 1 << 27;
        /// The MSR bitmaps are used.
        const MSR_BITMAPS = 1 << 28;
        /// Every MONITOR exits.
        const MONITOR = 1 << 29;
        /// Every PAUSE exits.
        const PAUSE = 1 << 30;
        /// The secondary controls are used.
        // Without it the CPU takes the secondary controls for zeros, whatever the field holds.
        const SECONDARY = 1 << 31;
        /// Bits whose meaning is not listed here.
        const _ = !0;
    }

    /// Secondary processor-based controls (SDM vol. 3C table 25-7).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ProcControls2: u32 {
        /// Accesses of the APIC-access page are virtualised.
        const VIRTUALIZE_APIC_ACCESSES = 1 << 0;
        /// Guest-physical addresses go through EPT.
        const EPT = 1 << 1;
        /// LGDT, SIDT and their like exit.
        const DESCRIPTOR_TABLES = 1 << 2;
        /// RDTSCP and RDPID exist.
        const RDTSCP = 1 << 3;
        /// x2APIC accesses are virtualised.
        const VIRTUALIZE_X2APIC = 1 << 4;
        /// Translations are tagged by VPID.
        const VPID = 1 << 5;
        /// Every WBINVD exits.
        const WBINVD = 1 << 6;
        /// The guest may run without paging or protection.
        // Real mode and protected mode without paging by the CPU; without it the emulator has to do
        // that.
        const UNRESTRICTED_GUEST = 1 << 7;
        /// APIC registers are virtualised.
        const APIC_REGISTERS = 1 << 8;
        /// Virtual interrupts are delivered by the CPU.
        const VIRTUAL_INTERRUPTS = 1 << 9;
        /// A loop of PAUSEs exits.
        const PAUSE_LOOP = 1 << 10;
        /// Every RDRAND exits.
        const RDRAND = 1 << 11;
        /// The instruction INVPCID exists.
        const INVPCID = 1 << 12;
        /// The instruction VMFUNC exists.
        const VMFUNC = 1 << 13;
        /// A shadow VMCS serves VMREAD and VMWRITE.
        const SHADOW_VMCS = 1 << 14;
        /// ENCLS exits by bitmap.
        const ENCLS = 1 << 15;
        /// Every RDSEED exits.
        const RDSEED = 1 << 16;
        /// PML: pages made dirty are logged.
        const PML = 1 << 17;
        /// EPT violations may become exceptions.
        const EPT_VIOLATION_VE = 1 << 18;
        /// VMX is hidden from processor traces.
        const PT_CONCEAL_VMX = 1 << 19;
        /// XSAVES and XRSTORS exist.
        const XSAVES = 1 << 20;
        /// Mode-based execute control.
        const MODE_BASED_EXECUTE = 1 << 22;
        /// The TSC multiplier is used.
        const TSC_SCALING = 1 << 25;
        /// TPAUSE, UMONITOR and UMWAIT exist.
        const USER_WAIT = 1 << 26;
        /// ENCLV exits by bitmap.
        const ENCLV = 1 << 28;
        /// Bits whose meaning is not listed here.
        const _ = !0;
    }

    /// VM-exit controls (SDM vol. 3C table 25-13).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ExitControls: u32 {
        /// DR7 and DEBUGCTL are saved.
        const SAVE_DEBUG = 1 << 2;
        /// The host runs in 64-bit mode.
        // Said of the host: an exit to it is in 64-bit mode or fails.
        const HOST_64 = 1 << 9;
        /// PERF_GLOBAL_CTRL is loaded.
        const LOAD_PERF_GLOBAL_CTRL = 1 << 12;
        /// The interrupt is acknowledged.
        // Without it the interrupt stays with the host's local APIC, which delivers it when
        // interrupts are on again.
        const ACKNOWLEDGE_INTERRUPT = 1 << 15;
        /// PAT is saved.
        const SAVE_PAT = 1 << 18;
        /// PAT is loaded.
        const LOAD_PAT = 1 << 19;
        /// EFER is saved.
        const SAVE_EFER = 1 << 20;
        /// EFER is loaded.
        const LOAD_EFER = 1 << 21;
        /// The preemption timer is saved.
        const SAVE_PREEMPTION_TIMER = 1 << 22;
        /// BNDCFGS is cleared.
        const CLEAR_BNDCFGS = 1 << 23;
        /// VMX is hidden from processor traces.
        const PT_CONCEAL_VMX = 1 << 24;
        /// Bits whose meaning is not listed here.
        const _ = !0;
    }

    /// VM-entry controls (SDM vol. 3C table 25-15).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct EntryControls: u32 {
        /// DR7 and DEBUGCTL are loaded.
        const LOAD_DEBUG = 1 << 2;
        /// The guest is in IA-32e mode: EFER.LMA.
        const IA32E_GUEST = 1 << 9;
        /// Entry to SMM.
        const SMM = 1 << 10;
        /// PERF_GLOBAL_CTRL is loaded.
        const LOAD_PERF_GLOBAL_CTRL = 1 << 13;
        /// PAT is loaded.
        const LOAD_PAT = 1 << 14;
        /// EFER is loaded.
        const LOAD_EFER = 1 << 15;
        /// BNDCFGS is loaded.
        const LOAD_BNDCFGS = 1 << 16;
        /// VMX is hidden from processor traces.
        const PT_CONCEAL_VMX = 1 << 17;
        /// Bits whose meaning is not listed here.
        const _ = !0;
    }
}
