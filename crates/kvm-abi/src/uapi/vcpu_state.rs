//! What else a vCPU holds: its scheduling state, events on their way, machine checks (KVM API
//! §4.16, §4.30–4.32, §4.38, §4.39, §4.105).

uapi! {
    /// The argument of KVM_GET_MP_STATE and KVM_SET_MP_STATE.
    struct KvmMpState {
        mp_state: u32,
    }

    /// The argument of KVM_INTERRUPT.
    struct KvmInterrupt {
        irq: u32,
    }

    /// Head of a signal set (KVM_SET_SIGNAL_MASK).
    struct KvmSignalMask {
        len: u32,
    }

    /// Exception on its way.
    struct KvmExceptionEvent {
        injected: u8,
        nr: u8,
        has_error_code: u8,
        pending: u8,
        error_code: u32,
    }

    /// External interrupt on its way.
    struct KvmInterruptEvent {
        injected: u8,
        nr: u8,
        soft: u8,
        shadow: u8,
    }

    /// NMI on its way.
    struct KvmNmiEvent {
        injected: u8,
        pending: u8,
        masked: u8,
        pad: u8,
    }

    /// System-management interrupt on its way.
    struct KvmSmiEvent {
        smm: u8,
        pending: u8,
        smm_inside_nmi: u8,
        latched_init: u8,
    }

    /// The argument of KVM_GET_VCPU_EVENTS and KVM_SET_VCPU_EVENTS.
    struct KvmVcpuEvents {
        exception: KvmExceptionEvent,
        interrupt: KvmInterruptEvent,
        nmi: KvmNmiEvent,
        // Taken and never given, as by stock KVM.
        sipi_vector: u32,
        flags: u32,
        smi: KvmSmiEvent,
        triple_fault_pending: u8,
        reserved: [u8; 26],
        // Behind the reserved bytes, where it was added: older VMMs leave it 0.
        exception_has_payload: u8,
        exception_payload: u64,
    }

    /// The argument of KVM_X86_SET_MCE.
    struct KvmX86Mce {
        status: u64,
        addr: u64,
        misc: u64,
        mcg_status: u64,
        bank: u8,
        pad1: [u8; 7],
        pad2: [u64; 3],
    }

    /// KVM_GET_ONE_REG, KVM_SET_ONE_REG; `addr` is a user pointer.
    struct KvmOneReg {
        id: u64,
        addr: u64,
    }

    /// Head of an array of register ids (KVM_GET_REG_LIST).
    struct KvmRegList {
        n: u64,
    }

    /// Head of a nested state (KVM_GET_NESTED_STATE, KVM_SET_NESTED_STATE). Its data follow: a page for SVM, up to two
    /// for VMX.
    struct KvmNestedState {
        flags: u16,
        format: u16,
        size: u32,
        hdr: [u64; 15],
    }
}

/// For [`KvmNestedState::format`]: the state is VMX's.
pub const NESTED_FORMAT_VMX: u16 = 0;
pub const NESTED_FORMAT_SVM: u16 = 1;
/// [`KvmNestedState::flags`]: the global interrupt flag is set.
pub const NESTED_GIF_SET: u16 = 0x100;
/// What the ioctl knows of [`KvmNestedState::flags`]: L2 runs, its entry is pending, the VMCS is an enlightened one, a
/// monitor-trap exit is pending, the global interrupt flag is set.
pub const NESTED_FLAGS: u16 =
    // Both vendors' flags: the ioctl refuses what nobody knows, the backend what is not its own.
    NESTED_GUEST_MODE | NESTED_RUN_PENDING | 1 << 2 | 1 << 3 | NESTED_GIF_SET;
pub const NESTED_GUEST_MODE: u16 = 1;
pub const NESTED_RUN_PENDING: u16 = 2;
/// Bytes of the largest state, which KVM_CAP_NESTED_STATE tells: two pages of data in the format of VMX, one in that of SVM.
pub const fn largest_nested_state(format: u16) -> u32 {
    // Under VMX L1 may have a shadow VMCS besides.
    let pages = if format == NESTED_FORMAT_SVM { 1 } else { 2 };
    size_of::<KvmNestedState>() as u32 + pages * 4096
}
/// No VMXON region, no current vmcs12.
// Not 0, which is an address of the guest's like any other.
pub const NESTED_NO_ADDRESS: u64 = u64::MAX;

// Those of x86 (KVM API §4.38).
pub const MP_STATE_RUNNABLE: u32 = 0;
pub const MP_STATE_UNINITIALIZED: u32 = 1;
pub const MP_STATE_INIT_RECEIVED: u32 = 2;
pub const MP_STATE_HALTED: u32 = 3;
pub const MP_STATE_SIPI_RECEIVED: u32 = 4;

/// [`KvmVcpuEvents::flags`]: `nmi.pending` is valid.
pub const VCPUEVENT_VALID_NMI_PENDING: u32 = 0x01;
/// `sipi_vector` is valid.
pub const VCPUEVENT_VALID_SIPI_VECTOR: u32 = 0x02;
/// `interrupt.shadow` is valid.
pub const VCPUEVENT_VALID_SHADOW: u32 = 0x04;
/// `smi` is valid.
pub const VCPUEVENT_VALID_SMM: u32 = 0x08;
/// `exception_payload` and `exception.pending` are valid.
pub const VCPUEVENT_VALID_PAYLOAD: u32 = 0x10;
/// `triple_fault_pending` is valid.
pub const VCPUEVENT_VALID_TRIPLE_FAULT: u32 = 0x20;

/// [`KvmInterruptEvent::shadow`]: after MOV SS or POP SS.
pub const X86_SHADOW_INT_MOV_SS: u8 = 1;
/// [`KvmInterruptEvent::shadow`]: after STI.
pub const X86_SHADOW_INT_STI: u8 = 2;
