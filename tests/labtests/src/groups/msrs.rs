//! MSRs, CPUID, the TSC's rate and the VM's clock from outside (KVM API §4.18, §4.19, §4.20, §4.29,
//! §4.55).

use kvm_bindings::*;

use crate::kvm::file::{CPUID_ENTRIES, Commands, CpuidTable, MsrTable, System};
use crate::kvm::ioctl;
use crate::machine::clock::tsc_rate_is_right;
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest};
use crate::oracle;
use crate::outcome::{Answer, Outcome, Reply, equal, fail, holds, one_of};
use crate::runner::tests;

tests!("msrs":
    every_msr_of_the_list_can_be_read,
    msrs_are_read_back,
    an_unknown_msr_ends_the_list_there,
    too_many_msrs_are_e2big,
    no_msrs_are_no_error,
    impossible_values_are_not_taken,
    feature_msrs_are_read_from_the_system_file,
    the_tsc_has_a_rate,
    the_tsc_can_be_set,
    the_cpuid_is_read_back,
    too_many_cpuid_entries_are_e2big,
    reading_the_cpuid_without_room_is_e2big,
    the_clock_goes_forward,
    the_clock_can_be_set,
    unknown_flags_of_the_clock_are_einval,
);

const UNKNOWN: u32 = 0xdead_0000;
const KERNEL_GS_BASE: u32 = 0xc000_0102;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const SYSENTER_EIP: u32 = 0x176;
const PAT: u32 = 0x277;
const TSC: u32 = 0x10;
const APIC_BASE: u32 = 0x1b;

guest_code!(nothing, 64, "out %al, $PORT_DONE");

fn guest() -> Outcome<Guest> {
    Guest::new(Chip::Kernel, nothing())
}

#[repr(C)]
struct MsrIndices {
    count: u32,
    indices: [u32; 1024],
}

fn msr_list(system: &System, request: u64) -> Outcome<Vec<u32>> {
    let mut list = MsrIndices { count: 1024, indices: [0; 1024] };
    system.exchange(request, &mut list).granted("list of MSRs")?;
    Ok(list.indices[..list.count as usize].to_vec())
}

fn every_msr_of_the_list_can_be_read() -> Outcome {
    let guest = guest()?;
    let list = msr_list(&guest.system, ioctl::GET_MSR_INDEX_LIST)?;
    let mut refused = Vec::new();
    for index in list {
        if guest.vcpu().msr(index)?.is_none() {
            refused.push(index);
        }
    }
    equal("refused", refused, vec![])
}

fn msrs_are_read_back() -> Outcome {
    let guest = guest()?;
    let values = [
        (KERNEL_GS_BASE, 0xffff_8880_1234_5678),
        (STAR, 0x0023_0010_0000_0000),
        (LSTAR, 0xffff_ffff_8100_0000),
        (SYSENTER_EIP, 0x8200_0000),
        (PAT, 0x0007_0406_0007_0406),
        (0x174, 0x10),
        (0xc000_0084, 0x47700),
    ];
    let mut table = MsrTable::of(&values);
    let set = guest.vcpu().send(ioctl::SET_MSRS, &table);
    equal("set", set, Ok(values.len() as i32))?;
    guest.finish()?;
    table.entries.iter_mut().for_each(|entry| entry.data = 0);
    let read = guest.vcpu().exchange(ioctl::GET_MSRS, &mut table);
    equal("read", read, Ok(values.len() as i32))?;
    for (entry, (index, value)) in table.entries.iter().zip(values) {
        equal(&format!("MSR {index:#x}"), entry.data, value)?;
    }
    Ok(())
}

fn an_unknown_msr_ends_the_list_there() -> Outcome {
    let guest = guest()?;
    let values = [(STAR, 1 << 32), (UNKNOWN, 1), (LSTAR, 0x1000)];
    equal("set", guest.vcpu().send(ioctl::SET_MSRS, &MsrTable::of(&values)), Ok(1))?;
    equal("the one before", guest.vcpu().msr(STAR)?, Some(1 << 32))?;
    equal("the one behind", guest.vcpu().msr(LSTAR)?, Some(0))?;
    let mut table = MsrTable::of(&values);
    equal("read", guest.vcpu().exchange(ioctl::GET_MSRS, &mut table), Ok(1))?;
    let mut table = MsrTable::of(&values[1..]);
    equal("read the unknown first", guest.vcpu().exchange(ioctl::GET_MSRS, &mut table), Ok(0))
}

fn too_many_msrs_are_e2big() -> Outcome {
    let guest = guest()?;
    for count in [256, 1000, u32::MAX] {
        let mut table = MsrTable::of(&[(STAR, 0)]);
        table.nmsrs = count;
        let what = format!("{count} MSRs");
        guest.vcpu().exchange(ioctl::GET_MSRS, &mut table).refused(&what, libc::E2BIG)?;
        guest.vcpu().send(ioctl::SET_MSRS, &table).refused(&what, libc::E2BIG)?;
    }
    Ok(())
}

fn no_msrs_are_no_error() -> Outcome {
    let guest = guest()?;
    let mut table = MsrTable::of(&[]);
    equal("read", guest.vcpu().exchange(ioctl::GET_MSRS, &mut table), Ok(0))?;
    equal("set", guest.vcpu().send(ioctl::SET_MSRS, &table), Ok(0))
}

fn impossible_values_are_not_taken() -> Outcome {
    let guest = guest()?;
    for (name, index, value) in [
        ("EFER", 0xc000_0080, 1 << 63),
        ("PAT", PAT, 0x0202_0202_0202_0202),
        ("APIC_BASE", APIC_BASE, 1 << 63),
    ] {
        let before = guest.vcpu().msr(index)?;
        equal(name, guest.vcpu().set_msr(index, value)?, false)?;
        equal(name, guest.vcpu().msr(index)?, before)?;
    }
    Ok(())
}

fn feature_msrs_are_read_from_the_system_file() -> Outcome {
    let system = System::open()?;
    for index in msr_list(&system, ioctl::GET_MSR_FEATURE_INDEX_LIST)? {
        let mut table = MsrTable::of(&[(index, 0)]);
        let read = system.exchange(ioctl::GET_MSRS, &mut table);
        equal(&format!("MSR {index:#x}"), read, Ok(1))?;
    }
    let mut table = MsrTable::of(&[(UNKNOWN, 0)]);
    equal("an unknown one", system.exchange(ioctl::GET_MSRS, &mut table), Ok(0))
}

fn the_tsc_has_a_rate() -> Outcome {
    tsc_rate_is_right()?;
    let guest = guest()?;
    let khz = guest.vcpu().call(ioctl::GET_TSC_KHZ, 0).granted("KVM_GET_TSC_KHZ")?;
    holds("a rate", khz > 1000, khz)?;
    guest.vcpu().call(ioctl::SET_TSC_KHZ, khz as u64).granted("the same rate")?;
    equal("rate", guest.vcpu().call(ioctl::GET_TSC_KHZ, 0), Ok(khz))
}

fn the_tsc_can_be_set() -> Outcome {
    let guest = guest()?;
    let target = 1_u64 << 50;
    equal("set", guest.vcpu().set_msr(TSC, target)?, true)?;
    let now = guest.vcpu().msr(TSC)?.unwrap_or(0);
    holds("2^50 and a little", (target..target + (1 << 40)).contains(&now), now)
}

fn cpuid_of(guest: &Guest) -> Outcome<Box<CpuidTable>> {
    let mut table = CpuidTable::empty();
    guest.vcpu().exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
    Ok(table)
}

fn the_cpuid_is_read_back() -> Outcome {
    let guest = guest()?;
    let mut table = guest.system.supported_cpuid()?;
    if let Some(entry) = table.find(0x8000_0002, 0) {
        entry.eax = 0x7473_6574;
    }
    guest.vcpu().set_cpuid(&table)?;
    let mut after = cpuid_of(&guest)?;
    // Old versions of the stock module leave the count as it was when there is more room.
    let counts = oracle::changed((6, 2), CPUID_ENTRIES as u32, table.nent);
    one_of("entries", after.nent, &counts)?;
    for (got, wanted) in after.used().iter().zip(table.used().iter()) {
        let what = format!("leaf {:#x}.{:#x}", wanted.function, wanted.index);
        equal(&what, (got.function, got.index), (wanted.function, wanted.index))?;
        // In these leaves bits follow the vCPU's state: OSXSAVE, APIC, OSPKE, the size of XSAVE.
        if !matches!(wanted.function, 1 | 7 | 0xd | 0x8000_0001) {
            equal(&what, (got.eax, got.ebx), (wanted.eax, wanted.ebx))?;
            equal(&what, (got.ecx, got.edx), (wanted.ecx, wanted.edx))?;
        }
    }
    Ok(())
}

fn too_many_cpuid_entries_are_e2big() -> Outcome {
    let guest = guest()?;
    for nent in [257, 5000, u32::MAX] {
        let mut table = CpuidTable::empty();
        table.nent = nent;
        let answer = guest.vcpu().send(ioctl::SET_CPUID2, &*table);
        answer.refused(&format!("{nent} entries"), libc::E2BIG)?;
    }
    Ok(())
}

fn reading_the_cpuid_without_room_is_e2big() -> Outcome {
    let guest = guest()?;
    let all = guest.system.supported_cpuid()?.nent;
    for nent in [0, 1, all - 1] {
        let mut table = CpuidTable::empty();
        table.nent = nent;
        let answer = guest.vcpu().exchange(ioctl::GET_CPUID2, &mut *table);
        answer.refused(&format!("room for {nent}"), libc::E2BIG)?;
    }
    Ok(())
}

fn clock(guest: &Guest) -> Outcome<kvm_clock_data> {
    guest.vm.receive(ioctl::GET_CLOCK).granted("KVM_GET_CLOCK")
}

fn the_clock_goes_forward() -> Outcome {
    let guest = guest()?;
    let first = clock(&guest)?;
    std::thread::sleep(std::time::Duration::from_millis(5));
    let second = clock(&guest)?;
    let passed = second.clock.saturating_sub(first.clock);
    holds("5 ms to 5 s", (5_000_000..5_000_000_000).contains(&passed), passed)
}

fn set_clock(guest: &Guest, clock: u64, flags: u32) -> Reply {
    let data = kvm_clock_data { clock, flags, ..Default::default() };
    guest.vm.send(ioctl::SET_CLOCK, &data)
}

fn the_clock_can_be_set() -> Outcome {
    let guest = guest()?;
    for hours in [1000, 1, 500] {
        let wanted = hours * 3_600_000_000_000_u64;
        set_clock(&guest, wanted, 0).granted("KVM_SET_CLOCK")?;
        let now = clock(&guest)?.clock;
        if !(wanted..wanted + 5_000_000_000).contains(&now) {
            return fail(format!("clock: expected a little more than {wanted} got {now}"));
        }
    }
    Ok(())
}

fn unknown_flags_of_the_clock_are_einval() -> Outcome {
    let guest = guest()?;
    for flags in [1 << 0, 1 << 4, 1 << 31, u32::MAX] {
        set_clock(&guest, 1, flags).refused(&format!("flags {flags:#x}"), libc::EINVAL)?;
    }
    Ok(())
}
