//! KVM_X86_SET_MSR_FILTER (KVM API §4.97).

use alloc::boxed::Box;
use alloc::vec::Vec;
use x86::Directions;

use super::Reply;
use super::ops::VmOps;
use crate::errno::Errno;
use crate::uapi::msr::*;
use crate::user;
use vm::msr_filter::{MsrFilter, MsrRange};
use zerocopy::FromZeros;

/// KVM_X86_SET_MSR_FILTER. `EINVAL`: unknown flags, a range that says nothing of any access or is
/// too long, or the denial of everything.
pub fn set<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let filter: Box<KvmMsrFilter> = user::read_boxed(arg)?;
    set_checked(vm, &filter)
}

/// KVM_X86_SET_MSR_FILTER of a 32-bit process, whose structure is a shorter one.
pub fn set_compat<V: VmOps>(vm: &V, arg: u64) -> Reply {
    let compat: Box<KvmMsrFilterCompat> = user::read_boxed(arg)?;
    let mut filter = KvmMsrFilter::new_box_zeroed()?;
    filter.flags = compat.flags;
    for (to, from) in filter.ranges.iter_mut().zip(&compat.ranges) {
        let KvmMsrFilterRangeCompat { flags, nmsrs, base, bitmap } = *from;
        // The pointer has half its width there, and needs no padding before it.
        *to = KvmMsrFilterRange { flags, nmsrs, base, pad: 0, bitmap: bitmap.into() };
    }
    set_checked(vm, &filter)
}

fn set_checked<V: VmOps>(vm: &V, filter: &KvmMsrFilter) -> Reply {
    let default_deny = filter.flags & MSR_FILTER_DEFAULT_DENY != 0;
    let used = || filter.ranges.iter().filter(|range| range.nmsrs != 0);
    // Denial without a range would be denial of everything: EINVAL (KVM API §4.97).
    if filter.flags & !MSR_FILTER_DEFAULT_DENY != 0 || (default_deny && used().next().is_none()) {
        return Err(Errno::EINVAL);
    }
    let mut ranges = Vec::new();
    // At most sixteen, so that no range has to be counted first.
    ranges.try_reserve_exact(filter.ranges.len())?;
    // A range without MSRs is none: its flags are not even looked at, as in stock KVM.
    for range in used() {
        ranges.push(read_range(range)?);
    }
    // Last: until every range was read the old filter holds whole.
    vm.set_msr_filter(MsrFilter { default_deny, ranges })?;
    Ok(0)
}

fn read_range(range: &KvmMsrFilterRange) -> Result<MsrRange, Errno> {
    const DIRECTIONS: u32 = MSR_FILTER_READ | MSR_FILTER_WRITE;
    // At most 2^26 words: their bytes cannot wrap, and nothing is allocated before they are looked
    // at.
    let words = (range.nmsrs as usize).div_ceil(64);
    if range.flags & !DIRECTIONS != 0
        || range.flags == 0
        || words * size_of::<u64>() > MSR_FILTER_MAX_BITMAP_SIZE
    {
        return Err(Errno::EINVAL);
    }
    let bits: Box<[u64]> = user::read_array(range.bitmap, words)?;
    Ok(MsrRange {
        base: range.base,
        count: range.nmsrs,
        over: Directions::READS.when(range.flags & MSR_FILTER_READ != 0)
            | Directions::WRITES.when(range.flags & MSR_FILTER_WRITE != 0),
        bitmap: bits.into_vec(),
    })
}
