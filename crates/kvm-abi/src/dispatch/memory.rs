//! Memory slots, the dirty log and coalesced writes of a VM (KVM API §4.8, §4.35, §4.116, §4.117,
//! §4.140).

use host::file::Pointers;
use host::user as process;
use mmu::AddressSpace;
use x86::{Gfn, Hva};
use zerocopy::IntoBytes;

use super::Reply;
use super::ops::{MemoryRegion, SlotId, VmOps};
use crate::errno::Errno;
use crate::uapi::memory::*;
use crate::user;

const PAGE_MASK: u64 = x86::addr::PAGE_SIZE - 1;

/// KVM_SET_USER_MEMORY_REGION: makes, moves, changes or deletes a slot (KVM API §4.35).
pub fn set_region<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let region: KvmUserspaceMemoryRegion = user::read(arg)?;
    vm.set_memory_region(&check_region(&region)?)?;
    Ok(0)
}

/// KVM_SET_USER_MEMORY_REGION2, which adds what only guest_memfd uses.
pub fn set_region2<V: VmOps>(vm: &V, arg: u64) -> Reply {
    // Read whole and not field by field: a short structure at the end of a mapping is EFAULT.
    let region: KvmUserspaceMemoryRegion2 = user::read(arg)?;
    let region = KvmUserspaceMemoryRegion {
        slot: region.slot,
        flags: region.flags,
        guest_phys_addr: region.guest_phys_addr,
        memory_size: region.memory_size,
        userspace_addr: region.userspace_addr,
    };
    vm.set_memory_region(&check_region(&region)?)?;
    Ok(0)
}

/// What can be said of a region without looking at the VM. Every refusal is `EINVAL`.
fn check_region(region: &KvmUserspaceMemoryRegion) -> Result<MemoryRegion, Errno> {
    let slot = slot_id(region.slot)?;
    let (gpa, size, hva) = (region.guest_phys_addr, region.memory_size, region.userspace_addr);
    // One test for all three: tables map whole pages.
    let aligned = (gpa | size | hva) & PAGE_MASK == 0;
    let known = region.flags & !(MEM_LOG_DIRTY_PAGES | MEM_READONLY) == 0;
    // The limit on pages bounds the dirty bitmap, too.
    let pages = size >> x86::addr::PAGE_SHIFT;
    if !aligned
        || !known
        || !process::range_ok(Hva(hva), size)
        || gpa.checked_add(size).is_none()
        || pages > MEM_MAX_NR_PAGES
    {
        return Err(Errno::EINVAL);
    }
    Ok(MemoryRegion {
        slot,
        base: Gfn(gpa >> x86::addr::PAGE_SHIFT),
        pages,
        hva: Hva(hva),
        log_dirty: region.flags & MEM_LOG_DIRTY_PAGES != 0,
        read_only: region.flags & MEM_READONLY != 0,
    })
}

/// Bits 31:16 are the address space, the others the slot's number in it.
fn slot_id(slot: u32) -> Result<SlotId, Errno> {
    let (space, number) = (slot >> 16, slot as u16);
    // Numbers from USER_MEM_SLOTS on are the kernel's own slots on stock KVM.
    if space >= ADDRESS_SPACES || u32::from(number) >= USER_MEM_SLOTS {
        return Err(Errno::EINVAL);
    }
    Ok(SlotId { space: AddressSpace::smm_if(space != 0), number })
}

/// KVM_REGISTER_COALESCED_MMIO: writes into a zone wait in the ring.
pub fn coalesce<V: VmOps>(vm: &V, arg: u64) -> Reply {
    vm.register_zone(&zone(arg)?)?;
    Ok(0)
}

/// KVM_UNREGISTER_COALESCED_MMIO: writes into zones exit again.
pub fn uncoalesce<V: VmOps>(vm: &V, arg: u64) -> Reply {
    vm.unregister_zones(&zone(arg)?)?;
    Ok(0)
}

fn zone(arg: u64) -> Result<KvmCoalescedMmioZone, Errno> {
    // Neither address nor size is checked, as in stock KVM: in a zone that wraps no write lies.
    let zone: KvmCoalescedMmioZone = user::read(arg)?;
    // A third address space there is not.
    if zone.pio > 1 { Err(Errno::EINVAL) } else { Ok(zone) }
}

/// KVM_GET_DIRTY_LOG: which pages were written (KVM API §4.8).
pub fn dirty_log<V: VmOps>(vm: &V, arg: u64, pointers: Pointers) -> Reply {
    let log: KvmDirtyLog = user::read(arg)?;
    let slot = slot_id(log.slot)?;
    // How much is copied out is the slot's to say: the structure has no length.
    // Taken before they are copied out: with a bad pointer the bits are lost, as in stock KVM.
    let to = Hva(pointers.of(log.dirty_bitmap));
    vm.dirty_log(slot, |bitmap| process::write(to, bitmap.as_bytes()))?;
    Ok(0)
}

/// KVM_CLEAR_DIRTY_LOG: protects pages again (KVM API §4.117).
pub fn clear_dirty_log<V: VmOps>(vm: &V, arg: u64, pointers: Pointers) -> Reply {
    let log: KvmClearDirtyLog = user::read(arg)?;
    // Bits are taken word by word: a part begins with one.
    if !log.first_page.is_multiple_of(64) {
        return Err(Errno::EINVAL);
    }
    let slot = slot_id(log.slot)?;
    let from = Hva(pointers.of(log.dirty_bitmap));
    vm.clear_dirty_log(slot, log.first_page, log.num_pages, |mask| {
        // Of no pages the bits may lie anywhere: VMMs pass null.
        if mask.is_empty() { Ok(()) } else { process::read(from, mask.as_mut_bytes()) }
    })?;
    Ok(0)
}
