//! One answer of CPUID as user space exchanges it, and what can be wrong with a table of them.

/// Entries that a table may have (KVM API §4.46; KVM_MAX_CPUID_ENTRIES).
// The number also bounds the search of a table, which an exit may have to make.
pub const MAX_ENTRIES: usize = 256;

/// The answer to one leaf, or to one subleaf of it: `struct kvm_cpuid_entry2` without its padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The leaf: EAX as the guest gives it.
    pub leaf: u32,
    /// ECX input; counts only with `significant_index`.
    pub index: u32,
    /// The answer depends on ECX (KVM_CPUID_FLAG_SIGNIFCANT_INDEX).
    pub significant_index: bool,
    /// EAX as the guest finds it.
    pub eax: u32,
    /// EBX as the guest finds it.
    pub ebx: u32,
    /// ECX as the guest finds it.
    pub ecx: u32,
    /// EDX as the guest finds it.
    pub edx: u32,
}

impl Entry {
    /// The entry for (leaf, index) with `answer`; the index counts for the leaves that the manuals
    /// list with subleaves.
    pub const fn new(leaf: u32, index: u32, answer: [u32; 4]) -> Self {
        let [eax, ebx, ecx, edx] = answer;
        Self { leaf, index, significant_index: has_subleaves(leaf), eax, ebx, ecx, edx }
    }

    /// EAX, EBX, ECX, EDX.
    #[inline]
    pub const fn answer(&self) -> [u32; 4] {
        [self.eax, self.ebx, self.ecx, self.edx]
    }

    /// Whether the entry answers (leaf, index).
    #[inline]
    pub const fn is_for(&self, leaf: u32, index: u32) -> bool {
        // Without the flag one entry answers every ECX, as KVM_SET_CPUID's older form has it.
        self.leaf == leaf && (!self.significant_index || self.index == index)
    }
}

/// Whether the manuals define subleaves for `leaf`.
pub(crate) const fn has_subleaves(leaf: u32) -> bool {
    matches!(
        leaf,
        // Stock KVM's list: for others it takes no account of ECX.
        0x4 | 0x7
            | 0xb
            | 0xd
            | 0xf
            | 0x10
            | 0x12
            | 0x14
            | 0x17
            | 0x18
            | 0x1d
            | 0x1e
            | 0x1f
            | 0x24
            | 0x8000_001d
    )
}

/// Why a table is refused. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// More than [`MAX_ENTRIES`] (-E2BIG).
    TooMany,
    /// The linear-address width is neither 48 nor 57, or the table differs from the one that a
    /// vCPU already ran with (-EINVAL).
    Invalid,
    /// Out of memory (-ENOMEM).
    NoMemory,
}

/// In the place of an entry's position: the table does not have it.
pub(crate) const NONE: u16 = u16::MAX;

/// The first entry for (leaf, index).
pub(crate) fn find(entries: &[Entry], leaf: u32, index: u32) -> Option<&Entry> {
    // The first: a VMM may give several, and stock KVM takes that one.
    entries.iter().find(|entry| entry.is_for(leaf, index))
}

/// Where the first entry for (leaf, index) stands.
pub(crate) fn position(entries: &[Entry], leaf: u32, index: u32) -> Option<u16> {
    entries.iter().position(|entry| entry.is_for(leaf, index)).map(|at| at as u16)
}
