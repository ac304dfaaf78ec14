//! Bits of the capability MSRs and of the control words, as far as this crate sets them at load.
//!
//! SDM vol. 3 appendix A and §24.6 to §24.8.
#![allow(missing_docs)]

/// Capability MSRs and their bits.
pub mod cap {
    pub const BASIC: u32 = 0x480;
    pub const PIN: u32 = 0x481;
    pub const PRIMARY: u32 = 0x482;
    pub const EXIT: u32 = 0x483;
    pub const ENTRY: u32 = 0x484;
    pub const MISC: u32 = 0x485;
    pub const CR0_FIXED0: u32 = 0x486;
    pub const CR4_FIXED0: u32 = 0x488;
    pub const CR4_FIXED1: u32 = 0x489;
    pub const SECONDARY: u32 = 0x48b;
    pub const EPT_VPID: u32 = 0x48c;
    pub const TRUE_PIN: u32 = 0x48d;
    pub const TRUE_PRIMARY: u32 = 0x48e;
    pub const TRUE_EXIT: u32 = 0x48f;
    pub const TRUE_ENTRY: u32 = 0x490;

    pub const BASIC_REVISION: u64 = 0x7fff_ffff;
    pub const BASIC_32BIT: u64 = 1 << 48;
    pub const BASIC_TYPE: u32 = 50;
    pub const BASIC_TRUE: u64 = 1 << 55;

    pub const MISC_TIMER_SHIFT: u64 = 0x1f;
    pub const MISC_ZERO_LENGTH: u64 = 1 << 30;

    pub const EPT_WALK_4: u64 = 1 << 6;
    pub const EPT_WB: u64 = 1 << 14;
    pub const EPT_2M: u64 = 1 << 16;
    pub const EPT_1G: u64 = 1 << 17;
    pub const INVEPT: u64 = 1 << 20;
    pub const EPT_DIRTY: u64 = 1 << 21;
    pub const INVEPT_SINGLE: u64 = 1 << 25;
    pub const INVEPT_ALL: u64 = 1 << 26;
    pub const INVVPID: u64 = 1 << 32;
    pub const INVVPID_ADDRESS: u64 = 1 << 40;
    pub const INVVPID_SINGLE: u64 = 1 << 41;
    pub const INVVPID_ALL: u64 = 1 << 42;
}

/// Pin-based controls.
pub mod pin {
    pub const INTERRUPT: u32 = 1 << 0;
    pub const NMI: u32 = 1 << 3;
    pub const VIRTUAL_NMI: u32 = 1 << 5;
    pub const PREEMPTION_TIMER: u32 = 1 << 6;
}

/// Primary processor-based controls.
pub mod primary {
    pub const INTERRUPT_WINDOW: u32 = 1 << 2;
    pub const TSC_OFFSET: u32 = 1 << 3;
    pub const HLT: u32 = 1 << 7;
    pub const INVLPG: u32 = 1 << 9;
    pub const MWAIT: u32 = 1 << 10;
    pub const RDPMC: u32 = 1 << 11;
    pub const CR3_LOAD: u32 = 1 << 15;
    pub const CR3_STORE: u32 = 1 << 16;
    pub const TPR_SHADOW: u32 = 1 << 21;
    pub const NMI_WINDOW: u32 = 1 << 22;
    pub const MOV_DR: u32 = 1 << 23;
    pub const UNCONDITIONAL_IO: u32 = 1 << 24;
    pub const MSR_BITMAPS: u32 = 1 << 28;
    pub const MONITOR: u32 = 1 << 29;
    pub const SECONDARY: u32 = 1 << 31;
}

/// Secondary processor-based controls.
pub mod secondary {
    pub const EPT: u32 = 1 << 1;
    pub const RDTSCP: u32 = 1 << 3;
    pub const VPID: u32 = 1 << 5;
    pub const WBINVD: u32 = 1 << 6;
    pub const UNRESTRICTED_GUEST: u32 = 1 << 7;
    pub const PAUSE_LOOP: u32 = 1 << 10;
    pub const INVPCID: u32 = 1 << 12;
    pub const ENCLS: u32 = 1 << 15;
    pub const PML: u32 = 1 << 17;
    pub const XSAVES: u32 = 1 << 20;
    pub const TSC_SCALING: u32 = 1 << 25;
}

/// VM-exit controls.
pub mod exit {
    pub const SAVE_DEBUG: u32 = 1 << 2;
    pub const HOST_64: u32 = 1 << 9;
    pub const LOAD_PAT: u32 = 1 << 19;
    pub const LOAD_EFER: u32 = 1 << 21;
}

/// VM-entry controls.
pub mod entry {
    pub const LOAD_DEBUG: u32 = 1 << 2;
    pub const GUEST_64: u32 = 1 << 9;
    pub const LOAD_PAT: u32 = 1 << 14;
    pub const LOAD_EFER: u32 = 1 << 15;
}

/// The EPT pointer.
pub mod ept {
    pub const WRITE_BACK: u64 = 6;
    pub const FOUR_LEVELS: u64 = 3 << 3;
    pub const DIRTY: u64 = 1 << 6;
}
