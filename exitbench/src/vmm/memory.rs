//! Guest memory: anonymous mappings, described to the hypervisor as memslots.

use anyhow::{Context, Result};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

/// Memory of a guest.
pub type GuestMemory = GuestMemoryMmap<()>;

pub use guest_machine::memory::PAGE;

/// How the host may back the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// As the host's policy says.
    Default,
    /// Never by huge pages, so that each 4 KiB page faults for itself.
    SmallPages,
}

/// Maps one piece of memory per range of (guest-physical address, bytes).
pub fn map(ranges: &[(GuestAddress, usize)], backing: Backing) -> Result<GuestMemory> {
    let memory = GuestMemory::from_ranges(ranges).with_context(|| {
        let bytes: usize = ranges.iter().map(|range| range.1).sum();
        format!("cannot map {} MiB of guest memory", bytes >> 20)
    })?;
    if backing == Backing::SmallPages {
        for region in memory.iter() {
            forbid_huge_pages(region)?;
        }
    }
    Ok(memory)
}

/// Writes to every page of `memory`, so that the host has it all.
pub fn touch(memory: &GuestMemory) -> Result<()> {
    for region in memory.iter() {
        for offset in (0..region.len()).step_by(PAGE as usize) {
            region.write_obj(0_u8, MemoryRegionAddress(offset)).context("memory is not mapped")?;
        }
    }
    Ok(())
}

/// Makes every region of `memory` a memslot, numbered from `first_slot` (KVM API §4.35).
pub fn register(vm: &VmFd, memory: &GuestMemory, first_slot: u32) -> Result<()> {
    for (slot, region) in (first_slot..).zip(memory.iter()) {
        let memslot = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: host_address(region)? as u64,
        };
        // SAFETY: the mapping is owned by `memory`, which every caller keeps until its VM is gone.
        unsafe { vm.set_user_memory_region(memslot) }.with_context(|| {
            format!(
                "KVM_SET_USER_MEMORY_REGION failed for slot {slot} at {:#x}",
                region.start_addr().0
            )
        })?;
    }
    Ok(())
}

fn host_address(region: &impl GuestMemoryRegion) -> Result<*mut u8> {
    region.get_host_address(MemoryRegionAddress(0)).context("guest memory is not mapped")
}

fn forbid_huge_pages(region: &impl GuestMemoryRegion) -> Result<()> {
    let address = host_address(region)?.cast();
    // SAFETY: advice on a mapping that we own does not change what it holds.
    let status = unsafe { libc::madvise(address, region.len() as usize, libc::MADV_NOHUGEPAGE) };
    let error = std::io::Error::last_os_error();
    // EINVAL: a kernel without transparent huge pages, where nothing has to be forbidden.
    if status != 0 && error.raw_os_error() != Some(libc::EINVAL) {
        return Err(error).context("madvise(MADV_NOHUGEPAGE) failed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_memory_that_was_touched_and_no_other() {
        let resident = |touched: bool| {
            let range = (GuestAddress(0), 8 * PAGE as usize);
            let memory = map(&[range], Backing::SmallPages).unwrap();
            if touched {
                touch(&memory).unwrap();
            }
            let mut pages = [0_u8; 8];
            let start = host_address(memory.iter().next().unwrap()).unwrap();
            // SAFETY: the mapping has 8 pages, and there is a byte for each.
            let status = unsafe { libc::mincore(start.cast(), range.1, pages.as_mut_ptr()) };
            assert_eq!(status, 0);
            pages.iter().filter(|page| **page & 1 != 0).count()
        };
        assert_eq!((resident(false), resident(true)), (0, 8));
    }
}
