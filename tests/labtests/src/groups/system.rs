//! `/dev/kvm` itself: version, capabilities, lists, and what it refuses (KVM API §4.1 to §4.7).

use kvm_bindings::*;

use crate::kvm::file::{Commands, CpuidTable, System};
use crate::kvm::{ioctl, pointer};
use crate::oracle::documented;
use crate::outcome::{Answer, Outcome, equal, holds};
use crate::runner::tests;

tests!("system":
    the_api_version_is_12,
    the_api_version_takes_no_argument,
    an_unknown_command_is_enotty_on_every_kind_of_file,
    a_command_of_another_kind_of_file_is_enotty,
    a_wrong_size_in_a_command_is_enotty,
    an_unknown_vm_type_is_einval,
    unknown_capabilities_are_zero,
    what_firecracker_needs_is_there,
    capabilities_are_the_same_on_a_vm,
    the_mmap_size_holds_a_run_page_and_an_io_page,
    the_mmap_size_takes_no_argument,
    supported_cpuid_without_room_is_e2big,
    supported_cpuid_with_too_much_room_succeeds,
    supported_cpuid_at_a_bad_address_is_efault,
    supported_cpuid_names_the_hypervisor,
    supported_cpuid_has_the_paravirtual_features_that_are_promised,
    the_msr_list_says_how_much_room_it_needs,
    the_msr_list_at_a_bad_address_is_efault,
    the_msr_list_has_no_duplicates_and_the_clock_msrs,
);

fn the_api_version_is_12() -> Outcome {
    equal("version", System::open()?.call(ioctl::GET_API_VERSION, 0), Ok(12))
}

fn the_api_version_takes_no_argument() -> Outcome {
    System::open()?.call(ioctl::GET_API_VERSION, 1).refused("argument 1", libc::EINVAL)
}

/// The stock module answers EINVAL to unknown commands on `/dev/kvm` and on vCPUs, and ENOTTY on
/// VMs; ENOTTY is what says "no such command".
fn unknown() -> i32 {
    documented(libc::ENOTTY, libc::EINVAL)
}

fn an_unknown_command_is_enotty_on_every_kind_of_file() -> Outcome {
    let system = System::open()?;
    let vm = system.create_vm()?;
    let vcpu = vm.create_vcpu(0)?;
    let requests = [ioctl::io(0xfe), ioctl::iowr::<[u64; 8]>(0xfd), 0x5401, 0, u64::from(u32::MAX)];
    for request in requests {
        let what = format!("request {request:#x}");
        system.call(request, 0).refused(&format!("{what} on /dev/kvm"), unknown())?;
        vm.call(request, 0).refused(&format!("{what} on a VM"), libc::ENOTTY)?;
        let on_vcpu = if request >> 8 & 0xff == 0xae { unknown() } else { libc::EINVAL };
        let on_vcpu = documented(libc::ENOTTY, on_vcpu);
        vcpu.call(request, 0).refused(&format!("{what} on a vCPU"), on_vcpu)?;
    }
    Ok(())
}

fn a_command_of_another_kind_of_file_is_enotty() -> Outcome {
    let system = System::open()?;
    let vm = system.create_vm()?;
    let vcpu = vm.create_vcpu(0)?;
    for (name, request) in [("CREATE_VCPU", ioctl::CREATE_VCPU), ("RUN", ioctl::RUN)] {
        system.call(request, 0).refused(&format!("{name} on /dev/kvm"), unknown())?;
    }
    for (name, request) in [("CREATE_VM", ioctl::CREATE_VM), ("RUN", ioctl::RUN)] {
        vm.call(request, 0).refused(&format!("{name} on a VM"), libc::ENOTTY)?;
    }
    let mut regs = kvm_regs::default();
    vm.exchange(ioctl::GET_REGS, &mut regs).refused("GET_REGS on a VM", libc::ENOTTY)?;
    for (name, request) in [
        ("CREATE_VM", ioctl::CREATE_VM),
        ("CREATE_VCPU", ioctl::CREATE_VCPU),
        ("CREATE_IRQCHIP", ioctl::CREATE_IRQCHIP),
        ("SET_USER_MEMORY_REGION", ioctl::SET_USER_MEMORY_REGION),
    ] {
        vcpu.call(request, 0).refused(&format!("{name} on a vCPU"), unknown())?;
    }
    Ok(())
}

fn a_wrong_size_in_a_command_is_enotty() -> Outcome {
    let system = System::open()?;
    let vm = system.create_vm()?;
    let vcpu = vm.create_vcpu(0)?;
    let mut room = [0_u8; 4096];
    for size_change in [8, u64::MAX - 7] {
        let other_size = |request: u64| request.wrapping_add(size_change << 16) & 0xffff_ffff;
        for (name, request) in [
            ("GET_REGS", ioctl::GET_REGS),
            ("SET_SREGS", ioctl::SET_SREGS),
            ("GET_LAPIC", ioctl::GET_LAPIC),
        ] {
            vcpu.exchange(other_size(request), &mut room).refused(name, unknown())?;
        }
        for (name, request) in
            [("SET_USER_MEMORY_REGION", ioctl::SET_USER_MEMORY_REGION), ("IRQFD", ioctl::IRQFD)]
        {
            vm.exchange(other_size(request), &mut room).refused(name, libc::ENOTTY)?;
        }
    }
    Ok(())
}

fn an_unknown_vm_type_is_einval() -> Outcome {
    let system = System::open()?;
    for kind in [2, 77, 1 << 31, u64::MAX] {
        system.call(ioctl::CREATE_VM, kind).refused(&format!("type {kind:#x}"), libc::EINVAL)?;
    }
    Ok(())
}

fn unknown_capabilities_are_zero() -> Outcome {
    let system = System::open()?;
    let vm = system.create_vm()?;
    for capability in [9999, 0x7fff_ffff, 0xffff_ffff, u64::MAX] {
        let what = format!("capability {capability:#x}");
        equal(&what, system.call(ioctl::CHECK_EXTENSION, capability), Ok(0))?;
        equal(&what, vm.call(ioctl::CHECK_EXTENSION, capability), Ok(0))?;
    }
    Ok(())
}

/// The list of Firecracker's `check_capabilities` on x86-64, and what follows from it.
const NEEDED: [(&str, u32); 22] = [
    ("IRQCHIP", KVM_CAP_IRQCHIP),
    ("IOEVENTFD", KVM_CAP_IOEVENTFD),
    ("IRQFD", KVM_CAP_IRQFD),
    ("USER_MEMORY", KVM_CAP_USER_MEMORY),
    ("SET_TSS_ADDR", KVM_CAP_SET_TSS_ADDR),
    ("PIT2", KVM_CAP_PIT2),
    ("PIT_STATE2", KVM_CAP_PIT_STATE2),
    ("ADJUST_CLOCK", KVM_CAP_ADJUST_CLOCK),
    ("DEBUGREGS", KVM_CAP_DEBUGREGS),
    ("MP_STATE", KVM_CAP_MP_STATE),
    ("VCPU_EVENTS", KVM_CAP_VCPU_EVENTS),
    ("XCRS", KVM_CAP_XCRS),
    ("XSAVE", KVM_CAP_XSAVE),
    ("EXT_CPUID", KVM_CAP_EXT_CPUID),
    ("IMMEDIATE_EXIT", KVM_CAP_IMMEDIATE_EXIT),
    ("SET_IDENTITY_MAP_ADDR", KVM_CAP_SET_IDENTITY_MAP_ADDR),
    ("IRQ_ROUTING", KVM_CAP_IRQ_ROUTING),
    ("SIGNAL_MSI", KVM_CAP_SIGNAL_MSI),
    ("GET_TSC_KHZ", KVM_CAP_GET_TSC_KHZ),
    ("READONLY_MEM", KVM_CAP_READONLY_MEM),
    ("SYNC_MMU", KVM_CAP_SYNC_MMU),
    ("DESTROY_MEMORY_REGION_WORKS", KVM_CAP_DESTROY_MEMORY_REGION_WORKS),
];

fn what_firecracker_needs_is_there() -> Outcome {
    let system = System::open()?;
    for (name, capability) in NEEDED {
        holds(&format!("{name} above 0"), system.extension(capability) > 0, 0)?;
    }
    Ok(())
}

fn capabilities_are_the_same_on_a_vm() -> Outcome {
    let system = System::open()?;
    let vm = system.create_vm()?;
    for (name, capability) in NEEDED {
        let on_vm = vm.call(ioctl::CHECK_EXTENSION, capability.into());
        equal(name, on_vm, Ok(system.extension(capability)))?;
    }
    Ok(())
}

fn the_mmap_size_holds_a_run_page_and_an_io_page() -> Outcome {
    let size = System::open()?.call(ioctl::GET_VCPU_MMAP_SIZE, 0).granted("mmap size")?;
    holds("whole pages, at least two", size >= 8192 && size % 4096 == 0, size)
}

fn the_mmap_size_takes_no_argument() -> Outcome {
    System::open()?.call(ioctl::GET_VCPU_MMAP_SIZE, 1).refused("argument 1", libc::EINVAL)
}

fn supported_cpuid_without_room_is_e2big() -> Outcome {
    let system = System::open()?;
    for room in [0, 1, 5] {
        let mut table = CpuidTable::empty();
        table.nent = room;
        let what = format!("room for {room}");
        system.exchange(ioctl::GET_SUPPORTED_CPUID, &mut *table).refused(&what, libc::E2BIG)?;
    }
    Ok(())
}

fn supported_cpuid_with_too_much_room_succeeds() -> Outcome {
    let mut table = System::open()?.supported_cpuid()?;
    let (nent, used) = (table.nent as usize, table.used().len());
    holds("a few dozen entries", used == nent && (10..200).contains(&nent), nent)?;
    // More room than KVM can fill is cut down.
    table.nent = 100_000;
    System::open()?.exchange(ioctl::GET_SUPPORTED_CPUID, &mut *table).granted("100000")?;
    equal("entries", table.nent as usize, nent)
}

fn supported_cpuid_at_a_bad_address_is_efault() -> Outcome {
    let system = System::open()?;
    for (name, address) in
        [("NULL", 0), ("a hole", pointer::unmapped()), ("the kernel's", pointer::KERNEL)]
    {
        system.call(ioctl::GET_SUPPORTED_CPUID, address).refused(name, libc::EFAULT)?;
    }
    Ok(())
}

fn supported_cpuid_names_the_hypervisor() -> Outcome {
    let mut table = System::open()?.supported_cpuid()?;
    let entry = table.find(0x4000_0000, 0).map(|entry| [entry.ebx, entry.ecx, entry.edx]);
    let name = entry.map(|words| words.map(u32::to_le_bytes).concat());
    equal("signature", name.as_deref(), Some(b"KVMKVMKVM\0\0\0".as_slice()))
}

fn supported_cpuid_has_the_paravirtual_features_that_are_promised() -> Outcome {
    let mut table = System::open()?.supported_cpuid()?;
    let features = table.find(0x4000_0001, 0).map_or(0, |entry| entry.eax);
    // Both clocks, steal time, PV EOI, PV IPIs, a clock that is stable over all vCPUs.
    let promised = [0, 3, 5, 6, 11, 24].iter().fold(0, |bits, bit| bits | 1 << bit);
    equal("features", features & promised, promised)
}

#[repr(C)]
struct MsrIndices {
    count: u32,
    indices: [u32; 1024],
}

/// What a list command gives.
fn msr_indices(system: &System) -> Outcome<Vec<u32>> {
    let mut list = MsrIndices { count: 1024, indices: [0; 1024] };
    system.exchange(ioctl::GET_MSR_INDEX_LIST, &mut list).granted("KVM_GET_MSR_INDEX_LIST")?;
    Ok(list.indices[..(list.count as usize).min(1024)].to_vec())
}

fn the_msr_list_says_how_much_room_it_needs() -> Outcome {
    let system = System::open()?;
    let all = msr_indices(&system)?;
    for request in [ioctl::GET_MSR_INDEX_LIST, ioctl::GET_MSR_FEATURE_INDEX_LIST] {
        let mut list = MsrIndices { count: 0, indices: [0; 1024] };
        system.exchange(request, &mut list).refused("room for none", libc::E2BIG)?;
        let wanted = list.count;
        if wanted > 0 {
            list.count = wanted - 1;
            system.exchange(request, &mut list).refused("room for one less", libc::E2BIG)?;
            equal("count after a refusal", list.count, wanted)?;
        }
        list.count = wanted;
        system.exchange(request, &mut list).granted("room for all")?;
        equal("count", list.count, wanted)?;
        if request == ioctl::GET_MSR_INDEX_LIST {
            equal("count again", wanted as usize, all.len())?;
        }
    }
    Ok(())
}

fn the_msr_list_at_a_bad_address_is_efault() -> Outcome {
    let system = System::open()?;
    for request in [ioctl::GET_MSR_INDEX_LIST, ioctl::GET_MSR_FEATURE_INDEX_LIST] {
        for address in [0, pointer::unmapped(), pointer::KERNEL] {
            system.call(request, address).refused(&format!("{address:#x}"), libc::EFAULT)?;
        }
    }
    Ok(())
}

fn the_msr_list_has_no_duplicates_and_the_clock_msrs() -> Outcome {
    let list = msr_indices(&System::open()?)?;
    let mut unique = list.clone();
    unique.sort_unstable();
    unique.dedup();
    equal("distinct indices", unique.len(), list.len())?;
    for index in [0x10, 0x174, 0x277, 0xc000_0081, 0x4b56_4d00, 0x4b56_4d01, 0x4b56_4d03] {
        holds(&format!("{index:#x} in the list"), unique.binary_search(&index).is_ok(), "none")?;
    }
    Ok(())
}
