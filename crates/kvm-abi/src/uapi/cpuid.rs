//! CPUID tables (KVM API §4.20, §4.46).

uapi! {
    /// One leaf of the old form (KVM_SET_CPUID).
    struct KvmCpuidEntry {
        function: u32,
        eax: u32,
        ebx: u32,
        ecx: u32,
        edx: u32,
        padding: u32,
    }

    /// Head of an array of [`KvmCpuidEntry`].
    struct KvmCpuid {
        nent: u32,
        padding: u32,
    }

    /// One leaf or subleaf.
    struct KvmCpuidEntry2 {
        function: u32,
        index: u32,
        flags: u32,
        eax: u32,
        ebx: u32,
        ecx: u32,
        edx: u32,
        padding: [u32; 3],
    }

    /// Head of an array of [`KvmCpuidEntry2`].
    struct KvmCpuid2 {
        nent: u32,
        padding: u32,
    }
}

/// Most entries a table may have.
// Stock KVM's limit: a VMM's table fits there as here.
pub const MAX_CPUID_ENTRIES: u32 = 256;
/// [`KvmCpuidEntry2::flags`]: `index` is significant.
pub const CPUID_FLAG_SIGNIFCANT_INDEX: u32 = 1;
