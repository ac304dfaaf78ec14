//! Numbers of the capabilities that KVM_CHECK_EXTENSION and KVM_ENABLE_CAP know on x86-64 (KVM API
//! §4.4, §4.37, §6–8).
//!
//! The numbers stand in `table.rs`, with what we answer to each.

macro_rules! numbers {
    (($offer:ident) $($cap:ident $number:literal => $answer:expr, $note:literal;)*) => {
        $(pub const $cap: u32 = $number;)*
    };
}

capabilities!(numbers);

/// KVM_CAP_X2APIC_API: routes and messages carry 32-bit APIC ids.
pub const X2APIC_API_USE_32BIT_IDS: u64 = 1 << 0;
/// KVM_CAP_X2APIC_API: id 0xff is no broadcast in x2APIC mode.
pub const X2APIC_API_DISABLE_BROADCAST_QUIRK: u64 = 1 << 1;
/// Every bit of KVM_CAP_X2APIC_API.
pub const X2APIC_API_VALID_FLAGS: u64 =
    X2APIC_API_USE_32BIT_IDS | X2APIC_API_DISABLE_BROADCAST_QUIRK;

/// KVM_CAP_X86_DISABLE_EXITS: MWAIT and MONITOR.
pub const X86_DISABLE_EXITS_MWAIT: u64 = 1 << 0;
/// HLT does not exit.
pub const X86_DISABLE_EXITS_HLT: u64 = 1 << 1;
/// PAUSE does not exit.
pub const X86_DISABLE_EXITS_PAUSE: u64 = 1 << 2;
/// C-states of the host are the guest's.
pub const X86_DISABLE_EXITS_CSTATE: u64 = 1 << 3;
/// Every bit of KVM_CAP_X86_DISABLE_EXITS.
pub const X86_DISABLE_EXITS_VALID: u64 = 0xf;

/// KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: the log is cleared by KVM_CLEAR_DIRTY_LOG alone.
pub const DIRTY_LOG_MANUAL_PROTECT_ENABLE: u64 = 1 << 0;
/// All pages of a slot start dirty.
pub const DIRTY_LOG_INITIALLY_SET: u64 = 1 << 1;
