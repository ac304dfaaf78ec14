//! Debugging a guest from outside (KVM API §4.87).

uapi! {
    /// The argument of KVM_SET_GUEST_DEBUG.
    struct KvmGuestDebug {
        control: u32,
        pad: u32,
        debugreg: [u64; 8],
    }

    /// What KVM_EXIT_DEBUG reports.
    struct KvmDebugExitArch {
        exception: u32,
        pad: u32,
        pc: u64,
        dr6: u64,
        dr7: u64,
    }
}

// The low half is every architecture's, the high half x86's (KVM API §4.87).
pub const GUESTDBG_ENABLE: u32 = 1;
pub const GUESTDBG_SINGLESTEP: u32 = 2;
pub const GUESTDBG_USE_SW_BP: u32 = 0x0001_0000;
pub const GUESTDBG_USE_HW_BP: u32 = 0x0002_0000;
pub const GUESTDBG_INJECT_DB: u32 = 0x0004_0000;
pub const GUESTDBG_INJECT_BP: u32 = 0x0008_0000;
pub const GUESTDBG_BLOCKIRQ: u32 = 0x0010_0000;
/// Every bit that KVM_SET_GUEST_DEBUG knows.
pub const GUESTDBG_VALID_MASK: u32 = GUESTDBG_ENABLE
    | GUESTDBG_SINGLESTEP
    | GUESTDBG_USE_SW_BP
    | GUESTDBG_USE_HW_BP
    | GUESTDBG_INJECT_DB
    | GUESTDBG_INJECT_BP
    | GUESTDBG_BLOCKIRQ;
