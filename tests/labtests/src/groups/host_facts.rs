//! What a guest and a VMM are told of the host, and registers whose first value means something.

use kvm_bindings::*;

use crate::kvm::file::{Commands, MsrTable, System};
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::oracle::{Vendor, vendor};
use crate::outcome::{Answer, Outcome, equal, holds, skip};
use crate::runner::tests;

tests!("host_facts":
    platform_info_tells_of_cpuid_faulting,
    platform_info_and_cpuid_faulting_fit_each_other,
    halt_polling_is_the_hosts_at_first,
    the_upper_half_of_tsc_aux,
    system_registers_at_the_reset_vector_start_the_boot_processor,
    system_registers_elsewhere_start_nothing,
    arch_capabilities_names_what_the_cpu_is_not_open_to,
    virtual_ssbd_is_offered_where_there_is_a_real_one,
    virtual_ssbd_is_one_bit,
    virtual_ssbd_is_for_guests_that_were_offered_it,
    the_caches_of_an_amd_host_are_told,
    the_lfence_leaf_is_told_where_the_cache_leaf_is,
);

const PLATFORM_INFO: u32 = 0xce;
const MISC_FEATURES: u32 = 0x140;
const CPUID_FAULT: u64 = 1 << 31;
const POLL_CONTROL: u32 = 0x4b56_4d05;
const TSC_AUX: u32 = 0xc000_0103;
const VIRT_SPEC_CTRL: u32 = 0xc001_011f;
const SSBD: u64 = 1 << 2;

guest_code!(
    // Reads the MSR of ARGUMENT into RESULT, writes ARGUMENT + 8 to it and reads it again.
    accesses,
    64,
    "mov ARGUMENT, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    guarded!("rdmsr"),
    "mov %eax, RESULT",
    "mov %edx, RESULT + 4",
    "mov FAULTS, %rax",
    "mov %rax, RESULT + 16",
    "mov ARGUMENT + 8, %eax",
    "mov ARGUMENT + 12, %edx",
    guarded!("wrmsr"),
    "mov FAULTS, %rax",
    "mov %rax, RESULT + 24",
    guarded!("rdmsr"),
    "mov %eax, RESULT + 8",
    "mov %edx, RESULT + 12",
    done!()
);

/// A guest that accesses an MSR: what it read before, faults until then, faults with the write, what it
/// reads after.
fn access(guest: &Guest, msr: u32, value: u64) -> Outcome<(u64, u64, u64, u64)> {
    guest.memory.write(ARGUMENT, msr.into());
    guest.memory.write(ARGUMENT + 8, value);
    // Behind it the place of RESULT + 8 is the second value.
    guest.finish()?;
    Ok((guest.result(0), guest.result(2), guest.result(3) - guest.result(2), guest.result(1)))
}

fn platform_info_tells_of_cpuid_faulting() -> Outcome {
    let guest = Guest::new(Chip::Kernel, accesses())?;
    equal("from outside", guest.vcpu().msr(PLATFORM_INFO)?, Some(CPUID_FAULT))?;
    let (read, faults, written, _) = access(&guest, PLATFORM_INFO, 0)?;
    equal("in the guest, without a fault", (read, faults), (CPUID_FAULT, 0))?;
    equal("faults of a write", written, 1)
}

fn platform_info_and_cpuid_faulting_fit_each_other() -> Outcome {
    let guest = Guest::new(Chip::Kernel, accesses())?;
    let (_, _, faults, after) = access(&guest, MISC_FEATURES, 1)?;
    equal("faults and value of the switch", (faults, after), (0, 1))?;
    let vcpu = guest.vcpu();
    equal("taken away while it is on", vcpu.set_msr(PLATFORM_INFO, 0)?, false)?;
    equal("switched off", vcpu.set_msr(MISC_FEATURES, 0)?, true)?;
    equal("taken away", vcpu.set_msr(PLATFORM_INFO, 0)?, true)?;
    equal("switched on without", vcpu.set_msr(MISC_FEATURES, 1)?, false)?;
    equal("given back", vcpu.set_msr(PLATFORM_INFO, CPUID_FAULT)?, true)?;
    equal("switched on", vcpu.set_msr(MISC_FEATURES, 1)?, true)
}

#[repr(C)]
struct MsrIndices {
    count: u32,
    indices: [u32; 1024],
}

fn is_listed(system: &System, index: u32) -> Outcome<bool> {
    let mut list = MsrIndices { count: 1024, indices: [0; 1024] };
    system.exchange(ioctl::GET_MSR_INDEX_LIST, &mut list).granted("list of MSRs")?;
    Ok(list.indices[..list.count as usize].contains(&index))
}

fn halt_polling_is_the_hosts_at_first() -> Outcome {
    let guest = Guest::new(Chip::Kernel, accesses())?;
    equal("listed", is_listed(&guest.system, POLL_CONTROL)?, true)?;
    equal("from outside", guest.vcpu().msr(POLL_CONTROL)?, Some(1))?;
    let (read, faults, written, after) = access(&guest, POLL_CONTROL, 0)?;
    equal("in the guest", (read, faults, written, after), (1, 0, 0, 0))
}

fn the_upper_half_of_tsc_aux() -> Outcome {
    let guest = Guest::new(Chip::Kernel, accesses())?;
    if guest.vcpu().msr(TSC_AUX)?.is_none() {
        return skip("no TSC_AUX");
    }
    let value = 0x1_0000_0005;
    let (_, before, faults, after) = access(&guest, TSC_AUX, value)?;
    match vendor() {
        // The CPUs ignore it and read zeros (APM vol. 2 does not say so).
        Vendor::Amd => equal("faults, value", (before, faults, after), (0, 0, 5))?,
        Vendor::Intel => equal("faults, value", (before, faults, after), (0, 1, 0))?,
    }
    let taken = guest.vcpu().set_msr(TSC_AUX, value + 1)?;
    equal("from outside", taken, vendor() == Vendor::Amd)?;
    let expected = if taken { 6 } else { after };
    equal("value", guest.vcpu().msr(TSC_AUX)?, Some(expected))
}

fn state(guest: &Guest, index: usize) -> Outcome<u32> {
    let state: kvm_mp_state =
        guest.vcpus[index].receive(ioctl::GET_MP_STATE).granted("KVM_GET_MP_STATE")?;
    Ok(state.mp_state)
}

/// Puts a vCPU into `mp_state`, then gives it system registers of real mode.
fn place(guest: &Guest, index: usize, mp_state: u32, rip: u64, base: u64) -> Outcome<u32> {
    let vcpu = &guest.vcpus[index];
    let mut sregs = vcpu.sregs()?;
    let mut regs = vcpu.regs()?;
    regs.rip = rip;
    vcpu.set_regs(&regs)?;
    vcpu.send(ioctl::SET_MP_STATE, &kvm_mp_state { mp_state }).granted("KVM_SET_MP_STATE")?;
    sregs.cs.selector = 0xf000;
    sregs.cs.base = base;
    vcpu.set_sregs(&sregs)?;
    state(guest, index)
}

fn system_registers_at_the_reset_vector_start_the_boot_processor() -> Outcome {
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Real, 2, accesses())?;
    for before in [KVM_MP_STATE_HALTED, KVM_MP_STATE_UNINITIALIZED] {
        let after = place(&guest, 0, before, 0xfff0, 0xffff_0000)?;
        equal(&format!("after state {before}"), after, KVM_MP_STATE_RUNNABLE)?;
    }
    // By KVM_SET_SREGS2 too.
    let halted = kvm_mp_state { mp_state: KVM_MP_STATE_HALTED };
    guest.vcpu().send(ioctl::SET_MP_STATE, &halted).granted("KVM_SET_MP_STATE")?;
    let sregs: kvm_sregs2 = guest.vcpu().receive(ioctl::GET_SREGS2).granted("KVM_GET_SREGS2")?;
    guest.vcpu().send(ioctl::SET_SREGS2, &sregs).granted("KVM_SET_SREGS2")?;
    equal("by the newer command", state(&guest, 0)?, KVM_MP_STATE_RUNNABLE)?;
    let other = place(&guest, 1, KVM_MP_STATE_HALTED, 0xfff0, 0xffff_0000)?;
    equal("another processor", other, KVM_MP_STATE_HALTED)
}

fn system_registers_elsewhere_start_nothing() -> Outcome {
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Real, 1, accesses())?;
    let halted = KVM_MP_STATE_HALTED;
    equal("another RIP", place(&guest, 0, halted, 0xfff1, 0xffff_0000)?, halted)?;
    equal("another base", place(&guest, 0, halted, 0xfff0, 0xf_0000)?, halted)
}

/// A feature MSR, as the system file gives it.
fn feature_msr(index: u32) -> Outcome<u64> {
    let system = System::open()?;
    let mut table = MsrTable::of(&[(index, 0)]);
    let read = system.exchange(ioctl::GET_MSRS, &mut table);
    equal("feature MSRs read", read, Ok(1))?;
    Ok(table.entries[0].data)
}

fn arch_capabilities_names_what_the_cpu_is_not_open_to() -> Outcome {
    let told = feature_msr(0x10a)?;
    for (file, bit) in [
        ("meltdown", 0),
        ("spec_store_bypass", 4),
        ("mds", 5),
        ("gather_data_sampling", 26),
        ("reg_file_data_sampling", 27),
        ("indirect_target_selection", 62),
    ] {
        let path = format!("/sys/devices/system/cpu/vulnerabilities/{file}");
        let Ok(said) = std::fs::read_to_string(path) else { continue };
        if said.trim() == "Not affected" {
            equal(file, told >> bit & 1, 1)?;
        }
    }
    let guest = Guest::new(Chip::Kernel, accesses())?;
    equal("a vCPU's", guest.vcpu().msr(0x10a)?, Some(told))
}

/// Words of a line of /proc/cpuinfo.
fn cpuinfo(line: &str) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let found = text.lines().find(|candidate| candidate.split('\t').next() == Some(line));
    found.map_or(Vec::new(), |found| found.split_whitespace().map(str::to_owned).collect())
}

fn offers_virt_ssbd(system: &System) -> Outcome<bool> {
    let mut table = system.supported_cpuid()?;
    Ok(table.find(0x8000_0008, 0).is_some_and(|entry| entry.ebx & 1 << 25 != 0))
}

fn only_on_amd() -> Outcome {
    if vendor() == Vendor::Amd { Ok(()) } else { skip("AMD's alone") }
}

fn virtual_ssbd_is_offered_where_there_is_a_real_one() -> Outcome {
    let system = System::open()?;
    let real = cpuinfo("flags").iter().any(|flag| flag == "ssbd") && vendor() == Vendor::Amd;
    equal("VIRT_SSBD", offers_virt_ssbd(&system)?, real)
}

fn virtual_ssbd_is_one_bit() -> Outcome {
    let guest = Guest::new(Chip::Kernel, accesses())?;
    equal("listed", is_listed(&guest.system, VIRT_SPEC_CTRL)?, vendor() == Vendor::Amd)?;
    only_on_amd()?;
    let vcpu = guest.vcpu();
    equal("at first", vcpu.msr(VIRT_SPEC_CTRL)?, Some(0))?;
    for value in [1, 2, 8, SSBD | 1, 1 << 63] {
        equal(&format!("{value:#x}"), vcpu.set_msr(VIRT_SPEC_CTRL, value)?, false)?;
    }
    equal("SSBD", vcpu.set_msr(VIRT_SPEC_CTRL, SSBD)?, true)?;
    equal("read back", vcpu.msr(VIRT_SPEC_CTRL)?, Some(SSBD))?;
    guest.memory.write(ARGUMENT, POLL_CONTROL.into());
    guest.finish()?;
    equal("after a run", vcpu.msr(VIRT_SPEC_CTRL)?, Some(SSBD))
}

fn virtual_ssbd_is_for_guests_that_were_offered_it() -> Outcome {
    only_on_amd()?;
    for offered in [false, true] {
        let guest = Guest::new(Chip::Kernel, accesses())?;
        let mut table = guest.system.supported_cpuid()?;
        let Some(entry) = table.find(0x8000_0008, 0) else { return skip("no such leaf") };
        entry.ebx = entry.ebx & !(1 << 25) | u32::from(offered) << 25;
        guest.vcpu().set_cpuid(&table)?;
        let (_, before, faults, after) = access(&guest, VIRT_SPEC_CTRL, SSBD)?;
        match offered {
            true => equal("faults and value", (before, faults, after), (0, 0, SSBD))?,
            false => equal("faults", (before, faults), (1, 1))?,
        }
    }
    Ok(())
}

fn host_cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let answer = core::arch::x86_64::__cpuid_count(leaf, subleaf);
    [answer.eax, answer.ebx, answer.ecx, answer.edx]
}

fn the_caches_of_an_amd_host_are_told() -> Outcome {
    const CACHES: u32 = 0x8000_001d;
    let mut table = System::open()?.supported_cpuid()?;
    if host_cpuid(0x8000_0000, 0)[0] < CACHES {
        return equal("a leaf that the host lacks", table.find(CACHES, 0).is_some(), false);
    }
    for index in 0.. {
        let host = host_cpuid(CACHES, index);
        let told = table.find(CACHES, index).map(|e| [e.eax, e.ebx, e.ecx, e.edx]);
        equal(&format!("cache {index}"), told, Some(host))?;
        let flags = table.find(CACHES, index).map_or(0, |entry| entry.flags);
        equal("its flags", flags, KVM_CPUID_FLAG_SIGNIFCANT_INDEX)?;
        if host[0] & 0x1f == 0 {
            break;
        }
    }
    Ok(())
}

fn the_lfence_leaf_is_told_where_the_cache_leaf_is() -> Outcome {
    let mut table = System::open()?.supported_cpuid()?;
    let last = table.find(0x8000_0000, 0).map_or(0, |entry| entry.eax);
    let host = host_cpuid(0x8000_0000, 0)[0];
    let whole_selectors = !cpuinfo("bugs").iter().any(|bug| bug == "null_seg");
    if host >= 0x8000_001d && whole_selectors {
        holds("0x80000021 or more", last >= 0x8000_0021, last)?;
    }
    for leaf in 0x8000_0000..=last {
        let there = table.find(leaf, 0).is_some();
        equal(&format!("leaf {leaf:#x}"), there, true)?;
    }
    Ok(())
}
