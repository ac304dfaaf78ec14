//! MSR filters and MSR exits to user space (KVM API §4.97, §7.21, §7.22).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, System};
use crate::kvm::{ioctl, pointer};
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::outcome::{Answer, Outcome, Reply, equal, fail, one_of};
use crate::runner::tests;

tests!("msr_exits":
    capabilities_say_that_they_are_there,
    a_denied_msr_is_a_general_protection,
    a_denied_msr_exits_where_that_was_asked_for,
    user_space_can_refuse,
    msrs_that_do_not_exit_obey_the_filter,
    reads_and_writes_are_filtered_apart,
    the_first_range_counts,
    denial_by_default_leaves_the_x2apic,
    an_unknown_msr_exits,
    an_invalid_value_exits,
    an_exit_that_was_not_asked_for_is_none,
    a_filter_can_be_taken_away,
    the_filter_is_not_the_vmms,
    bad_filters_are_refused,
    bad_reasons_are_refused,
    another_rip_abandons_the_access,
);

const READ: u32 = KVM_MSR_FILTER_READ;
const WRITE: u32 = KVM_MSR_FILTER_WRITE;
const INVALID: u32 = 1;
const UNKNOWN: u32 = 2;
const DENIED: u32 = 4;

const KERNEL_GS_BASE: u32 = 0xc000_0102;
const MTRR_DEF_TYPE: u32 = 0x2ff;
const EXISTS_NOWHERE: u32 = 0x4564_0000;

/// Ranges of (flags, first, bits).
fn filter(guest: &Guest, flags: u32, ranges: &[(u32, u32, &[u8])]) -> Reply {
    let mut filter = kvm_msr_filter { flags, ..Default::default() };
    let mut bitmaps = Vec::new();
    for (slot, (flags, base, bits)) in filter.ranges.iter_mut().zip(ranges) {
        let mut bitmap = [0_u8; 8];
        for (n, bit) in bits.iter().enumerate() {
            bitmap[n / 8] |= bit << (n % 8);
        }
        bitmaps.push(Box::new(bitmap));
        let bitmap = bitmaps.last_mut().map_or(std::ptr::null_mut(), |b| b.as_mut_ptr());
        *slot =
            kvm_msr_filter_range { flags: *flags, nmsrs: bits.len() as u32, base: *base, bitmap };
    }
    guest.vm.send(ioctl::X86_SET_MSR_FILTER, &filter)
}

fn deny(guest: &Guest, msr: u32) -> Outcome {
    filter(guest, 0, &[(READ | WRITE, msr, &[0])]).granted("filter").map(drop)
}

/// KVM_CAP_X86_USER_SPACE_MSR.
fn ask_for(guest: &Guest, reasons: u32) -> Reply {
    let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, ..Default::default() };
    cap.args[0] = reasons.into();
    guest.vm.send(ioctl::ENABLE_CAP, &cap)
}

/// What an exit said of an MSR.
#[derive(Debug, PartialEq, Eq)]
struct Access {
    write: bool,
    reason: u32,
    index: u32,
    data: u64,
}

fn access(guest: &Guest) -> Outcome<Access> {
    let write = match guest.exit()? {
        Exit::Other(KVM_EXIT_X86_RDMSR) => false,
        Exit::Other(KVM_EXIT_X86_WRMSR) => true,
        exit => return fail(format!("expected an access to an MSR got {exit:x?}")),
    };
    // SAFETY: the member of the union that the reason names.
    let msr = unsafe { (*guest.vcpu().page()).__bindgen_anon_1.msr };
    let data = if write { msr.data } else { 0 };
    Ok(Access { write, reason: msr.reason, index: msr.index, data })
}

fn answer(guest: &Guest, error: u8, data: u64) {
    // SAFETY: the member of the union that the last exit used.
    unsafe {
        let msr = &raw mut (*guest.vcpu().page()).__bindgen_anon_1.msr;
        (*msr).error = error;
        (*msr).data = data;
    }
}

// Reads the MSR of ARGUMENT into RESULT, then writes ARGUMENT + 8 to it, again and again.
guest_code!(
    accesses,
    64,
    "1: out %al, $PORT_MARK",
    "mov ARGUMENT, %ecx",
    "mov $0x11112222, %eax",
    "mov $0x33334444, %edx",
    guarded!("rdmsr"),
    "mov %eax, RESULT",
    "mov %edx, RESULT + 4",
    "mov ARGUMENT + 8, %eax",
    "mov ARGUMENT + 12, %edx",
    guarded!("wrmsr"),
    "incq RESULT + 8",
    "jmp 1b",
);

fn guest(msr: u32, value: u64) -> Outcome<Guest> {
    let guest = Guest::new(Chip::Kernel, accesses())?;
    guest.system.require(KVM_CAP_X86_MSR_FILTER, "KVM_CAP_X86_MSR_FILTER")?;
    guest.system.require(KVM_CAP_X86_USER_SPACE_MSR, "KVM_CAP_X86_USER_SPACE_MSR")?;
    guest.memory.write(ARGUMENT, msr.into());
    guest.memory.write(ARGUMENT + 8, value);
    guest.reach_mark()?;
    Ok(guest)
}

/// Exceptions so far, which all have to be #GP(0).
fn protections(guest: &Guest) -> Outcome<u64> {
    let (count, vector, error) = guest.faults();
    if count != 0 {
        equal("exception", (vector, error), (13, 0))?;
    }
    Ok(count)
}

fn capabilities_say_that_they_are_there() -> Outcome {
    let system = System::open()?;
    equal("KVM_CAP_X86_MSR_FILTER", system.extension(KVM_CAP_X86_MSR_FILTER), 1)?;
    equal("KVM_CAP_X86_USER_SPACE_MSR", system.extension(KVM_CAP_X86_USER_SPACE_MSR), 1)
}

fn a_denied_msr_is_a_general_protection() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 0xc06)?;
    guest.reach_mark()?;
    equal("before", (protections(&guest)?, guest.result(1)), (0, 1))?;
    deny(&guest, MTRR_DEF_TYPE)?;
    guest.reach_mark()?;
    equal("both accesses", protections(&guest)?, 2)?;
    equal("registers stay", guest.result(0), 0x3333_4444_1111_2222)
}

fn a_denied_msr_exits_where_that_was_asked_for() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 0x1234_5678_9abc_def0)?;
    ask_for(&guest, DENIED).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
    deny(&guest, MTRR_DEF_TYPE)?;
    let index = MTRR_DEF_TYPE;
    let read = Access { write: false, reason: DENIED, index, data: 0 };
    equal("read", access(&guest)?, read)?;
    answer(&guest, 0, 0xaaaa_bbbb_cccc_dddd);
    let write = Access { write: true, reason: DENIED, index, data: 0x1234_5678_9abc_def0 };
    equal("write", access(&guest)?, write)?;
    answer(&guest, 0, 0);
    guest.reach_mark()?;
    equal("value", guest.result(0), 0xaaaa_bbbb_cccc_dddd)?;
    equal("exceptions", protections(&guest)?, 0)
}

fn user_space_can_refuse() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 6)?;
    ask_for(&guest, DENIED).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
    deny(&guest, MTRR_DEF_TYPE)?;
    for count in 1..3 {
        access(&guest)?;
        answer(&guest, 1, 5);
        access(&guest)?;
        answer(&guest, 1, 5);
        guest.reach_mark()?;
        equal("exceptions", protections(&guest)?, 2 * count)?;
        equal("registers stay", guest.result(0), 0x3333_4444_1111_2222)?;
    }
    Ok(())
}

fn msrs_that_do_not_exit_obey_the_filter() -> Outcome {
    let base = 0xffff_8000_1234_0000;
    let guest = guest(KERNEL_GS_BASE, base)?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    equal("without a filter", guest.result(0), base)?;
    deny(&guest, KERNEL_GS_BASE)?;
    guest.reach_mark()?;
    equal("denied", protections(&guest)?, 2)?;
    filter(&guest, 0, &[]).granted("no filter")?;
    guest.reach_mark()?;
    equal("allowed again", (protections(&guest)?, guest.result(0)), (2, base))?;
    filter(&guest, 1, &[(READ | WRITE, 0xc000_0080, &[1; 8])]).granted("others allowed")?;
    guest.reach_mark()?;
    equal("denied by default", protections(&guest)?, 4)
}

fn reads_and_writes_are_filtered_apart() -> Outcome {
    for msr in [KERNEL_GS_BASE, MTRR_DEF_TYPE] {
        for (flags, is_write) in [(READ, false), (WRITE, true)] {
            let guest = guest(msr, 6)?;
            ask_for(&guest, DENIED).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
            filter(&guest, 0, &[(flags, msr, &[0])]).granted("filter")?;
            equal("direction", access(&guest)?.write, is_write)?;
            answer(&guest, 0, 7);
            guest.reach_mark()?;
            equal("direction", access(&guest)?.write, is_write)?;
        }
    }
    Ok(())
}

fn the_first_range_counts() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 6)?;
    let (allowed, denied): (&[u8], &[u8]) = (&[1], &[0]);
    for (first, second, count) in [(allowed, denied, 0), (denied, allowed, 2)] {
        let ranges = [(READ | WRITE, MTRR_DEF_TYPE, first), (READ | WRITE, MTRR_DEF_TYPE, second)];
        filter(&guest, 0, &ranges).granted("filter")?;
        guest.reach_mark()?;
        equal("exceptions", protections(&guest)?, count)?;
    }
    Ok(())
}

guest_code!(x2apic_id, 64, x2apic!(), "mov $0x802, %ecx", "rdmsr", done!());

fn denial_by_default_leaves_the_x2apic() -> Outcome {
    let guest = Guest::new(Chip::Kernel, x2apic_id())?;
    guest.system.require(KVM_CAP_X86_MSR_FILTER, "KVM_CAP_X86_MSR_FILTER")?;
    filter(&guest, 1, &[(READ | WRITE, 0x1b, &[1])]).granted("filter")?;
    guest.finish()
}

fn an_unknown_msr_exits() -> Outcome {
    let guest = guest(EXISTS_NOWHERE, 0x77)?;
    ask_for(&guest, UNKNOWN).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
    let index = EXISTS_NOWHERE;
    equal("read", access(&guest)?, Access { write: false, reason: UNKNOWN, index, data: 0 })?;
    answer(&guest, 0, 0x1122_3344_5566_7788);
    equal("write", access(&guest)?, Access { write: true, reason: UNKNOWN, index, data: 0x77 })?;
    answer(&guest, 1, 0);
    guest.reach_mark()?;
    equal("value", guest.result(0), 0x1122_3344_5566_7788)?;
    equal("exceptions", protections(&guest)?, 1)
}

fn an_invalid_value_exits() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 0xff)?;
    ask_for(&guest, INVALID).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
    let index = MTRR_DEF_TYPE;
    equal("write", access(&guest)?, Access { write: true, reason: INVALID, index, data: 0xff })?;
    answer(&guest, 0, 0);
    guest.reach_mark()?;
    equal("exceptions", protections(&guest)?, 0)
}

fn an_exit_that_was_not_asked_for_is_none() -> Outcome {
    for (msr, reasons) in [(EXISTS_NOWHERE, INVALID | DENIED), (MTRR_DEF_TYPE, UNKNOWN | DENIED)] {
        let guest = guest(msr, 0xff)?;
        ask_for(&guest, reasons).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
        guest.reach_mark()?;
        let expected = if msr == MTRR_DEF_TYPE { 1 } else { 2 };
        equal("exceptions", protections(&guest)?, expected)?;
    }
    let guest = guest(MTRR_DEF_TYPE, 6)?;
    ask_for(&guest, UNKNOWN | INVALID).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
    deny(&guest, MTRR_DEF_TYPE)?;
    guest.reach_mark()?;
    equal("exceptions", protections(&guest)?, 2)
}

fn a_filter_can_be_taken_away() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 0xc06)?;
    deny(&guest, MTRR_DEF_TYPE)?;
    guest.reach_mark()?;
    filter(&guest, 0, &[]).granted("no filter")?;
    guest.reach_mark()?;
    guest.reach_mark()?;
    equal("exceptions", protections(&guest)?, 2)?;
    equal("value", guest.result(0), 0xc06)
}

fn the_filter_is_not_the_vmms() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 6)?;
    deny(&guest, MTRR_DEF_TYPE)?;
    equal("KVM_SET_MSRS", guest.vcpu().set_msr(MTRR_DEF_TYPE, 0xc00)?, true)?;
    equal("KVM_GET_MSRS", guest.vcpu().msr(MTRR_DEF_TYPE)?, Some(0xc00))
}

fn bad_filters_are_refused() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 6)?;
    filter(&guest, 1, &[]).refused("denial of everything", libc::EINVAL)?;
    filter(&guest, 2, &[]).refused("an unknown flag", libc::EINVAL)?;
    filter(&guest, 0, &[(0, 0, &[1])]).refused("no direction", libc::EINVAL)?;
    filter(&guest, 0, &[(4, 0, &[1])]).refused("an unknown direction", libc::EINVAL)?;
    let mut long = kvm_msr_filter::default();
    long.ranges[3] =
        kvm_msr_filter_range { flags: READ, nmsrs: 0x600 * 8 + 1, ..Default::default() };
    guest.vm.send(ioctl::X86_SET_MSR_FILTER, &long).refused("too long", libc::EINVAL)?;
    long.ranges[3].nmsrs = u32::MAX;
    guest.vm.send(ioctl::X86_SET_MSR_FILTER, &long).refused("far too long", libc::EINVAL)?;
    for address in [0, pointer::unmapped(), pointer::KERNEL] {
        long.ranges[3].nmsrs = 8;
        long.ranges[3].bitmap = address as *mut u8;
        let reply = guest.vm.send(ioctl::X86_SET_MSR_FILTER, &long);
        reply.refused("a bitmap elsewhere", libc::EFAULT)?;
        guest.vm.call(ioctl::X86_SET_MSR_FILTER, address).refused("elsewhere", libc::EFAULT)?;
    }
    guest.reach_mark()?;
    equal("nothing changed", protections(&guest)?, 0)
}

fn bad_reasons_are_refused() -> Outcome {
    let guest = guest(MTRR_DEF_TYPE, 6)?;
    ask_for(&guest, 8).refused("an unknown reason", libc::EINVAL)?;
    ask_for(&guest, u32::MAX).refused("all bits", libc::EINVAL)?;
    ask_for(&guest, 7).granted("all reasons")?;
    ask_for(&guest, 0).granted("none").map(drop)
}

fn another_rip_abandons_the_access() -> Outcome {
    let guest = guest(EXISTS_NOWHERE, 6)?;
    ask_for(&guest, UNKNOWN).granted("KVM_CAP_X86_USER_SPACE_MSR")?;
    access(&guest)?;
    let rip = guest.vcpu().regs()?.rip;
    let code = guest.memory.read(rip) & 0xffff;
    // At the instruction itself: it is not done yet.
    one_of("RDMSR at rip", code, &[0x320f])?;
    guest.vcpu().set_regs(&kvm_regs { rip: rip + 2, rax: 9, rdx: 0, ..guest.vcpu().regs()? })?;
    equal("write", access(&guest)?.write, true)
}
