//! What KVM_SET_USER_MEMORY_REGION and KVM_GET_DIRTY_LOG refuse (KVM API §4.35, §4.8).

use kvm_bindings::*;

use crate::kvm::file::{Commands, System, Vm};
use crate::kvm::{ioctl, pointer};
use crate::machine::memory::Memory;
use crate::outcome::{Answer, Outcome, equal, holds};
use crate::runner::tests;

tests!("slots":
    an_unaligned_address_or_size_is_einval,
    a_wrapping_range_is_einval,
    an_overlap_is_eexist_and_changes_nothing,
    neighbours_do_not_overlap,
    a_slot_id_out_of_range_is_einval,
    unknown_flags_are_einval,
    deleting_what_is_not_there_is_einval,
    deleting_frees_the_range,
    changing_the_size_is_einval,
    changing_the_backing_is_einval,
    moving_onto_another_slot_is_eexist,
    toggling_read_only_is_einval,
    toggling_the_dirty_log_succeeds,
    an_address_of_the_kernel_is_einval,
    a_hole_may_back_a_slot,
    a_null_or_unmapped_argument_is_efault,
    as_many_slots_as_promised_exist,
    a_dirty_log_of_an_unknown_slot_is_refused,
    a_dirty_log_into_bad_memory_is_efault,
);

const SIZE: u64 = 0x4000;

fn fixture() -> Outcome<(Vm, Memory)> {
    Ok((System::open()?.create_vm()?, Memory::new(1 << 20)?))
}

fn an_unaligned_address_or_size_is_einval() -> Outcome {
    let (vm, memory) = fixture()?;
    let hva = memory.hva();
    vm.set_slot(0, 0, 0x1001, SIZE, hva).refused("gpa", libc::EINVAL)?;
    vm.set_slot(0, 0, 0x1800, SIZE, hva).refused("gpa by half a page", libc::EINVAL)?;
    vm.set_slot(0, 0, 0x1000, SIZE + 1, hva).refused("size", libc::EINVAL)?;
    vm.set_slot(0, 0, 0x1000, 0xfff, hva).refused("size below a page", libc::EINVAL)?;
    vm.set_slot(0, 0, 0x1000, SIZE, hva + 8).refused("hva", libc::EINVAL)?;
    vm.set_slot(0, 0, 0x1000, SIZE, hva).granted("all aligned").map(drop)
}

fn a_wrapping_range_is_einval() -> Outcome {
    let (vm, memory) = fixture()?;
    let hva = memory.hva();
    vm.set_slot(0, 0, u64::MAX - 0xfff, 0x2000, hva).refused("gpa + size", libc::EINVAL)?;
    vm.set_slot(0, 0, 0x1000, u64::MAX - 0xfff, hva).refused("size", libc::EINVAL)?;
    vm.set_slot(0, 0, 0, 1 << 63, hva).refused("too many pages", libc::EINVAL)?;
    vm.set_slot(0, 0, 0, 1 << 44, hva).refused("2^32 pages", libc::EINVAL)?;
    vm.set_slot(0, 0, 0, SIZE, u64::MAX - 0xfff).refused("hva + size", libc::EINVAL)
}

fn an_overlap_is_eexist_and_changes_nothing() -> Outcome {
    let (vm, memory) = fixture()?;
    let hva = memory.hva();
    vm.set_slot(0, 0, 0x10000, SIZE, hva).granted("first")?;
    for (what, gpa, size) in [
        ("the same", 0x10000, SIZE),
        ("its first page", 0xf000, 0x2000),
        ("its last page", 0x13000, 0x2000),
        ("inside", 0x11000, 0x1000),
        ("around", 0, 0x20000),
    ] {
        vm.set_slot(1, 0, gpa, size, hva).refused(what, libc::EEXIST)?;
    }
    vm.set_slot(1, 0, 0x20000, SIZE, hva).granted("elsewhere, with the refused id").map(drop)
}

fn neighbours_do_not_overlap() -> Outcome {
    let (vm, memory) = fixture()?;
    let hva = memory.hva();
    vm.set_slot(0, 0, 0x10000, SIZE, hva).granted("first")?;
    vm.set_slot(1, 0, 0x10000 - SIZE, SIZE, hva).granted("below")?;
    vm.set_slot(2, 0, 0x10000 + SIZE, SIZE, hva).granted("above").map(drop)
}

fn a_slot_id_out_of_range_is_einval() -> Outcome {
    let system = System::open()?;
    let (vm, memory) = fixture()?;
    let slots = system.extension(KVM_CAP_NR_MEMSLOTS) as u32;
    let hva = memory.hva();
    vm.set_slot(slots - 1, 0, 0, SIZE, hva).granted("the last id")?;
    // The upper half of the id is an address space; there are as many as the capability says.
    let spaces = system.extension(KVM_CAP_MULTI_ADDRESS_SPACE).max(1) as u32;
    for id in [slots, 0x7fff, 0xffff, spaces << 16, 0xffff_0000, u32::MAX] {
        vm.set_slot(id, 0, 0x100000, SIZE, hva).refused(&format!("id {id:#x}"), libc::EINVAL)?;
    }
    Ok(())
}

fn unknown_flags_are_einval() -> Outcome {
    let (vm, memory) = fixture()?;
    for flags in [1 << 3, 1 << 7, 1 << 31, u32::MAX] {
        let what = format!("flags {flags:#x}");
        vm.set_slot(0, flags, 0, SIZE, memory.hva()).refused(&what, libc::EINVAL)?;
    }
    Ok(())
}

fn deleting_what_is_not_there_is_einval() -> Outcome {
    let (vm, memory) = fixture()?;
    vm.set_slot(3, 0, 0, 0, memory.hva()).refused("never there", libc::EINVAL)?;
    vm.set_slot(3, 0, 0, SIZE, memory.hva()).granted("create")?;
    vm.set_slot(3, 0, 0, 0, 0).granted("delete")?;
    vm.set_slot(3, 0, 0, 0, 0).refused("deleted before", libc::EINVAL)
}

fn deleting_frees_the_range() -> Outcome {
    let (vm, memory) = fixture()?;
    vm.set_slot(0, 0, 0x10000, SIZE, memory.hva()).granted("create")?;
    vm.set_slot(0, 0, 0x10000, 0, memory.hva()).granted("delete")?;
    vm.set_slot(1, 0, 0x11000, SIZE, memory.hva()).granted("another there").map(drop)
}

fn changing_the_size_is_einval() -> Outcome {
    let (vm, memory) = fixture()?;
    vm.set_slot(0, 0, 0, SIZE, memory.hva()).granted("create")?;
    vm.set_slot(0, 0, 0, SIZE / 2, memory.hva()).refused("smaller", libc::EINVAL)?;
    vm.set_slot(0, 0, 0, SIZE * 2, memory.hva()).refused("larger", libc::EINVAL)
}

fn changing_the_backing_is_einval() -> Outcome {
    let (vm, memory) = fixture()?;
    vm.set_slot(0, 0, 0, SIZE, memory.hva()).granted("create")?;
    vm.set_slot(0, 0, 0, SIZE, memory.hva() + SIZE).refused("other hva", libc::EINVAL)
}

fn moving_onto_another_slot_is_eexist() -> Outcome {
    let (vm, memory) = fixture()?;
    vm.set_slot(0, 0, 0, SIZE, memory.hva()).granted("create")?;
    vm.set_slot(1, 0, SIZE, SIZE, memory.hva()).granted("create")?;
    vm.set_slot(1, 0, 0x1000, SIZE, memory.hva()).refused("onto the other", libc::EEXIST)?;
    vm.set_slot(1, 0, SIZE + 0x1000, SIZE, memory.hva()).granted("onto itself").map(drop)
}

fn toggling_read_only_is_einval() -> Outcome {
    let (vm, memory) = fixture()?;
    let hva = memory.hva();
    vm.set_slot(0, 0, 0, SIZE, hva).granted("writable")?;
    vm.set_slot(0, KVM_MEM_READONLY, 0, SIZE, hva).refused("to read-only", libc::EINVAL)?;
    vm.set_slot(1, KVM_MEM_READONLY, 0x10000, SIZE, hva).granted("read-only")?;
    vm.set_slot(1, 0, 0x10000, SIZE, hva).refused("to writable", libc::EINVAL)
}

fn toggling_the_dirty_log_succeeds() -> Outcome {
    let (vm, memory) = fixture()?;
    for flags in [0, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_LOG_DIRTY_PAGES, 0, 0] {
        vm.set_slot(0, flags, 0, SIZE, memory.hva()).granted(&format!("flags {flags}"))?;
    }
    Ok(())
}

fn an_address_of_the_kernel_is_einval() -> Outcome {
    let (vm, _memory) = fixture()?;
    for hva in [pointer::KERNEL, pointer::NON_CANONICAL, 0xffff_ffff_8100_0000] {
        vm.set_slot(0, 0, 0, SIZE, hva).refused(&format!("hva {hva:#x}"), libc::EINVAL)?;
    }
    Ok(())
}

fn a_hole_may_back_a_slot() -> Outcome {
    let (vm, _memory) = fixture()?;
    vm.set_slot(0, 0, 0, SIZE, pointer::unmapped()).granted("unmapped hva")?;
    vm.set_slot(1, 0, 0x10000, SIZE, 0).granted("hva 0").map(drop)
}

fn a_null_or_unmapped_argument_is_efault() -> Outcome {
    let (vm, _memory) = fixture()?;
    for request in [ioctl::SET_USER_MEMORY_REGION, ioctl::GET_DIRTY_LOG] {
        for address in [0, pointer::unmapped(), pointer::KERNEL, pointer::NON_CANONICAL] {
            vm.call(request, address)
                .refused(&format!("{request:#x} {address:#x}"), libc::EFAULT)?;
        }
    }
    Ok(())
}

fn as_many_slots_as_promised_exist() -> Outcome {
    let slots = System::open()?.extension(KVM_CAP_NR_MEMSLOTS);
    holds("some hundreds at least", slots >= 509, slots)?;
    // A few hundred of them, from both ends, one page each.
    let (vm, memory) = fixture()?;
    for i in 0..200_u32 {
        let id = if i % 2 == 0 { i } else { slots as u32 - i };
        let gpa = u64::from(i) * 0x2000;
        vm.set_slot(id, 0, gpa, 0x1000, memory.hva()).granted(&format!("slot {id}"))?;
    }
    Ok(())
}

/// KVM_GET_DIRTY_LOG of a slot into a bitmap at an address.
fn dirty_log(slot: u32, bitmap: u64) -> kvm_dirty_log {
    let mut log = kvm_dirty_log { slot, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = bitmap as *mut _;
    log
}

fn a_dirty_log_of_an_unknown_slot_is_refused() -> Outcome {
    let (vm, memory) = fixture()?;
    let mut bitmap = [0_u64; 8];
    let address = bitmap.as_mut_ptr() as u64;
    let ask = |slot| vm.send(ioctl::GET_DIRTY_LOG, &dirty_log(slot, address));
    ask(0).refused("no such slot", libc::ENOENT)?;
    ask(0xffff).refused("id out of range", libc::EINVAL)?;
    ask(0xffff_0000).refused("address space out of range", libc::EINVAL)?;
    vm.set_slot(0, 0, 0, SIZE, memory.hva()).granted("create")?;
    ask(0).refused("no log", libc::ENOENT)?;
    vm.set_slot(0, KVM_MEM_LOG_DIRTY_PAGES, 0, SIZE, memory.hva()).granted("log")?;
    equal("with a log", ask(0), Ok(0))
}

fn a_dirty_log_into_bad_memory_is_efault() -> Outcome {
    let (vm, memory) = fixture()?;
    vm.set_slot(0, KVM_MEM_LOG_DIRTY_PAGES, 0, SIZE, memory.hva()).granted("create")?;
    for address in [0, pointer::unmapped(), pointer::KERNEL] {
        let log = dirty_log(0, address);
        vm.send(ioctl::GET_DIRTY_LOG, &log).refused(&format!("{address:#x}"), libc::EFAULT)?;
    }
    Ok(())
}
