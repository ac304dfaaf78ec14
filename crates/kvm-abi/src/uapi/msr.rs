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

    /// One range in a 32-bit process.
    struct KvmMsrFilterRangeCompat {
        flags: u32,
        nmsrs: u32,
        base: u32,
        bitmap: u32,
    }

    /// KVM_X86_SET_MSR_FILTER in a 32-bit process, where it has a number of its own.
    struct KvmMsrFilterCompat {
        flags: u32,
        ranges: [KvmMsrFilterRangeCompat; 16],
    }
}

/// [`KvmMsrFilter::flags`]: what no range says anything of is denied.
pub const MSR_FILTER_DEFAULT_DENY: u32 = 1 << 0;
/// [`KvmMsrFilterRange::flags`]: for reads.
pub const MSR_FILTER_READ: u32 = 1 << 0;
/// [`KvmMsrFilterRange::flags`]: for writes.
pub const MSR_FILTER_WRITE: u32 = 1 << 1;
/// Bytes that the bitmap of one range may have.
// 12,288 MSRs a range: what one VM can have the kernel keep is bounded.
pub const MSR_FILTER_MAX_BITMAP_SIZE: usize = 0x600;

/// Entries that one KVM_GET_MSRS or KVM_SET_MSRS may carry, plus one.
// Bounds what is allocated for one command.
pub const MAX_IO_MSRS: u32 = 256;
