//! Lists of model-specific registers (KVM API §4.3, §4.18, §4.19).

uapi! {
    /// One MSR and its value.
    struct KvmMsrEntry {
        index: u32,
        reserved: u32,
        data: u64,
    }

    /// Head of an array of [`KvmMsrEntry`] (KVM_GET_MSRS, KVM_SET_MSRS).
    struct KvmMsrs {
        nmsrs: u32,
        pad: u32,
        entries: [KvmMsrEntry; 0],
    }

    /// Head of an array of `u32` indices (KVM_GET_MSR_INDEX_LIST, KVM_GET_MSR_FEATURE_INDEX_LIST).
    struct KvmMsrList {
        nmsrs: u32,
    }

    /// One range of KVM_X86_SET_MSR_FILTER; `bitmap` is a user pointer.
    struct KvmMsrFilterRange {
        flags: u32,
        nmsrs: u32,
        base: u32,
        pad: u32,
        bitmap: u64,
    }

    /// Argument of KVM_X86_SET_MSR_FILTER.
    struct KvmMsrFilter {
        flags: u32,
        pad: u32,
        ranges: [KvmMsrFilterRange; 16],
    }
}

/// Entries that one KVM_GET_MSRS or KVM_SET_MSRS may carry, plus one.
pub const MAX_IO_MSRS: u32 = 256;
