//! Lists of MSRs and of CPUID leaves, each a head with a count and an array behind it (KVM API
//! §4.3, §4.18–4.20, §4.46).

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::Reply;
use super::ops::MsrRefused;
use crate::errno::Errno;
use crate::uapi::cpuid::*;
use crate::uapi::msr::*;
use crate::user;

/// KVM_GET_MSR_INDEX_LIST: the count is always told, the list only where there is room.
pub fn write_indices(arg: u64, indices: &[u32]) -> Reply {
    let room: KvmMsrList = user::read(arg)?;
    let count = indices.len() as u32;
    // Before E2BIG: a VMM asks with 0 to learn how much room it takes (KVM API §4.3).
    user::write(arg, &KvmMsrList { nmsrs: count })?;
    if room.nmsrs < count {
        return Err(Errno::E2BIG);
    }
    user::write(user::after::<KvmMsrList>(arg)?, indices)?;
    Ok(0)
}

fn read_msrs(arg: u64) -> Result<Box<[KvmMsrEntry]>, Errno> {
    let head: KvmMsrs = user::read(arg)?;
    // The count that the name allows is refused, too, as in stock KVM. Before the allocation: the
    // VMM may ask for 2^32 entries.
    if head.nmsrs >= MAX_IO_MSRS {
        return Err(Errno::E2BIG);
    }
    user::read_array(user::after::<KvmMsrs>(arg)?, head.nmsrs as usize)
}

/// KVM_GET_MSRS: how many were read before the first that is refused.
pub fn get_msrs(arg: u64, mut get: impl FnMut(u32) -> Result<u64, MsrRefused>) -> Reply {
    let mut entries = read_msrs(arg)?;
    let mut done = 0;
    for entry in &mut entries {
        // Not an error of the command: the count tells the VMM which one it was.
        let Ok(value) = get(entry.index) else { break };
        entry.data = value;
        done += 1;
    }
    // Also what lies behind the refused one, unchanged: the count says how many are new.
    user::write(user::after::<KvmMsrs>(arg)?, &*entries)?;
    Ok(done)
}

/// KVM_SET_MSRS: how many were set before the first that is refused.
pub fn set_msrs(arg: u64, mut set: impl FnMut(u32, u64) -> Result<(), MsrRefused>) -> Reply {
    let entries = read_msrs(arg)?;
    let mut done = 0;
    for entry in &entries {
        // What was set before stays set, by contract: the count says how far it came (KVM API
        // §4.19).
        if set(entry.index, entry.data).is_err() {
            break;
        }
        done += 1;
    }
    Ok(done)
}

/// KVM_GET_SUPPORTED_CPUID: all or nothing. `nent` shrinks to what there is; where there is too
/// little room nothing is written back.
pub fn write_cpuid(
    arg: u64,
    entries: impl FnOnce() -> Result<Vec<KvmCpuidEntry2>, Errno>,
) -> Reply {
    let head: KvmCpuid2 = user::read(arg)?;
    // No room at all is E2BIG before anything is made.
    if head.nent == 0 {
        return Err(Errno::E2BIG);
    }
    let entries = entries()?;
    if entries.len() > head.nent as usize {
        // Not the count of KVM_GET_MSR_INDEX_LIST: this command tells none, so a VMM tries with
        // more (KVM API §4.46).
        return Err(Errno::E2BIG);
    }
    // The entries before the count: a fault in between leaves the VMM's count as it was.
    user::write(user::after::<KvmCpuid2>(arg)?, entries.as_slice())?;
    user::write(arg, &KvmCpuid2 { nent: entries.len() as u32, ..head })?;
    Ok(0)
}

/// KVM_GET_EMULATED_CPUID wants the padding of the entries it will overwrite to be 0, so that it
/// can be given a meaning one day.
pub fn check_padding(arg: u64) -> Result<(), Errno> {
    let head: KvmCpuid2 = user::read(arg)?;
    if head.nent == 0 {
        return Err(Errno::E2BIG);
    }
    // The count is the VMM's, up to 2^32. More entries than this are never overwritten.
    let count = head.nent.min(MAX_CPUID_ENTRIES) as usize;
    let entries: Box<[KvmCpuidEntry2]> = user::read_array(user::after::<KvmCpuid2>(arg)?, count)?;
    if entries.iter().any(|entry| entry.padding != [0; 3]) {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// KVM_GET_CPUID2: the guest's table.
pub fn get_cpuid(arg: u64, entries: &[KvmCpuidEntry2]) -> Reply {
    let head: KvmCpuid2 = user::read(arg)?;
    if (head.nent as usize) < entries.len() {
        return Err(Errno::E2BIG);
    }
    user::write(user::after::<KvmCpuid2>(arg)?, entries)?;
    user::write(arg, &KvmCpuid2 { nent: entries.len() as u32, ..head })?;
    Ok(0)
}

/// The table that KVM_SET_CPUID2 brings.
pub fn read_cpuid2(arg: u64) -> Result<Box<[KvmCpuidEntry2]>, Errno> {
    let head: KvmCpuid2 = user::read(arg)?;
    // Bounded before it is read: the number is the VMM's.
    if head.nent > MAX_CPUID_ENTRIES {
        return Err(Errno::E2BIG);
    }
    user::read_array(user::after::<KvmCpuid2>(arg)?, head.nent as usize)
}

/// The table that KVM_SET_CPUID brings, in the new form.
pub fn read_cpuid(arg: u64) -> Result<Box<[KvmCpuidEntry2]>, Errno> {
    use zerocopy::FromZeros;

    let head: KvmCpuid = user::read(arg)?;
    if head.nent > MAX_CPUID_ENTRIES {
        return Err(Errno::E2BIG);
    }
    let old: Box<[KvmCpuidEntry]> =
        user::read_array(user::after::<KvmCpuid>(arg)?, head.nent as usize)?;
    let mut new = <[KvmCpuidEntry2]>::new_box_zeroed_with_elems(old.len())?;
    // The older form knows no index: the leaf is the same for every ECX.
    for (new, old) in new.iter_mut().zip(&old) {
        new.function = old.function;
        new.eax = old.eax;
        new.ebx = old.ebx;
        new.ecx = old.ecx;
        new.edx = old.edx;
    }
    Ok(new)
}

/// Whether a guest can have these leaves: linear addresses have 48 or 57 bits.
pub fn cpuid_can_be(entries: &[KvmCpuidEntry2]) -> bool {
    entries
        .iter()
        .filter(|entry| entry.function == 0x8000_0008)
        // The walks know no other width. 0 is of VMMs that leave it out, and stock KVM takes it.
        .all(|entry| matches!(entry.eax >> 8 & 0xff, 0 | 48 | 57))
}
