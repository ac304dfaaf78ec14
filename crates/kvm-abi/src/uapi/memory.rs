//! Memory slots, the dirty log and coalesced MMIO (KVM API §4.8, §4.35, §4.116, §4.117,
//! §4.140).

uapi! {
    /// KVM_SET_USER_MEMORY_REGION. Bits 16–31 of `slot` choose the address space.
    struct KvmUserspaceMemoryRegion {
        slot: u32,
        flags: u32,
        guest_phys_addr: u64,
        memory_size: u64,
        userspace_addr: u64,
    }

    /// The argument of KVM_SET_USER_MEMORY_REGION2.
    struct KvmUserspaceMemoryRegion2 {
        slot: u32,
        flags: u32,
        guest_phys_addr: u64,
        memory_size: u64,
        userspace_addr: u64,
        guest_memfd_offset: u64,
        guest_memfd: u32,
        pad1: u32,
        pad2: [u64; 14],
    }

    /// KVM_GET_DIRTY_LOG; `dirty_bitmap` is a user pointer.
    struct KvmDirtyLog {
        slot: u32,
        padding1: u32,
        dirty_bitmap: u64,
    }

    /// KVM_CLEAR_DIRTY_LOG; `dirty_bitmap` is a user pointer.
    struct KvmClearDirtyLog {
        slot: u32,
        num_pages: u32,
        first_page: u64,
        dirty_bitmap: u64,
    }

    /// The argument of KVM_REGISTER_COALESCED_MMIO and KVM_UNREGISTER_COALESCED_MMIO.
    struct KvmCoalescedMmioZone {
        addr: u64,
        size: u32,
        pio: u32,
    }

    /// One write in the ring of coalesced MMIO.
    struct KvmCoalescedMmio {
        phys_addr: u64,
        len: u32,
        pio: u32,
        data: [u8; 8],
    }
}

/// Region flag: keep a dirty bitmap.
pub const MEM_LOG_DIRTY_PAGES: u32 = 1 << 0;
/// Region flag: guest writes exit as MMIO.
pub const MEM_READONLY: u32 = 1 << 1;
/// Region flag: private memory behind a guest_memfd.
pub const MEM_GUEST_MEMFD: u32 = 1 << 2;
/// Address spaces that a slot can belong to: 0, and 1 for system-management mode.
pub const ADDRESS_SPACES: u32 = 2;
// 32,767, less three that stock KVM keeps for itself.
/// Slots that user space may number: 0 up to this.
pub const USER_MEM_SLOTS: u32 = 32764;
// Stock KVM's limit, whose bitmaps are walked with 31-bit numbers.
/// Most pages in one slot.
pub const MEM_MAX_NR_PAGES: u64 = (1 << 31) - 1;
