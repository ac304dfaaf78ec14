//! Which local APICs a destination means: several under one id, ids beyond 254, broadcasts
//! (SDM vol. 3A §10.6.2, §10.12.10; KVM API, KVM_CAP_X2APIC_API).

use kvm_bindings::*;

use crate::kvm::file::{Commands, System, Vm};
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::oracle::{is_stock, kernel};
use crate::outcome::{Answer, Errno, Outcome, Reply, equal, holds, one_of, skip};
use crate::runner::tests;

tests!("apic_ids":
    a_message_reaches_all_of_one_id,
    an_ipi_reaches_all_of_one_id,
    an_id_beyond_a_byte_is_an_alias_in_xapic_mode,
    an_id_of_its_own_again_is_reached_alone,
    both_flags_of_the_x2apic_interface_are_offered,
    a_byte_of_ones_is_a_broadcast_to_x2apics_too,
    without_the_quirk_a_byte_of_ones_is_an_id_of_x2apics,
    without_the_quirk_a_byte_of_ones_is_still_a_broadcast_to_xapics,
    vcpus_are_as_many_as_the_stock_module_has,
    a_vcpu_of_the_highest_id_gets_its_messages,
    all_vcpus_can_be_made,
);

const ID: usize = 0x20;
const SVR: usize = 0xf0;
const IRR: usize = 0x200;

fn registers(vcpu: &Vcpu) -> Outcome<kvm_lapic_state> {
    vcpu.receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")
}

fn set_register(vcpu: &Vcpu, at: usize, value: u32) -> Outcome {
    let mut apic = registers(vcpu)?;
    for (byte, bits) in value.to_le_bytes().into_iter().enumerate() {
        apic.regs[at + byte] = bits as _;
    }
    vcpu.send(ioctl::SET_LAPIC, &apic).granted("KVM_SET_LAPIC").map(drop)
}

/// Whether vector 0x40 waits.
fn waits(vcpu: &Vcpu) -> Outcome<bool> {
    Ok(registers(vcpu)?.regs[IRR + 0x20] & 1 != 0)
}

fn all_wait(vcpus: &[Vcpu]) -> Outcome<Vec<bool>> {
    vcpus.iter().map(waits).collect()
}

/// A VM with local APICs, enabled, of these ids; `x2apic`: flags of KVM_CAP_X2APIC_API.
fn machine(ids: &[u64], x2apic: u64) -> Outcome<(Vm, Vec<Vcpu>)> {
    let system = System::open()?;
    let vm = system.create_vm()?;
    if x2apic != 0 {
        enable_x2apic(&vm, x2apic).granted("KVM_CAP_X2APIC_API")?;
    }
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    let cpuid = system.supported_cpuid()?;
    let mut vcpus = Vec::new();
    for &id in ids {
        let vcpu = vm.create_vcpu(id)?;
        vcpu.set_cpuid(&cpuid)?;
        set_register(&vcpu, SVR, 0x1ff)?;
        vcpus.push(vcpu);
    }
    Ok((vm, vcpus))
}

fn enable_x2apic(vm: &Vm, flags: u64) -> Reply {
    let mut cap = kvm_enable_cap { cap: KVM_CAP_X2APIC_API, ..Default::default() };
    cap.args[0] = flags;
    vm.send(ioctl::ENABLE_CAP, &cap)
}

fn to_x2apic_mode(vcpu: &Vcpu) -> Outcome {
    let mut sregs = vcpu.sregs()?;
    sregs.apic_base |= 0xc00;
    vcpu.set_sregs(&sregs)
}

/// A message with vector 0x40 to a physical destination.
fn message(vm: &Vm, dest: u32) -> Reply {
    let msi = kvm_msi {
        address_lo: 0xfee0_0000 | (dest & 0xff) << 12,
        address_hi: dest & !0xff,
        data: 0x40,
        ..Default::default()
    };
    vm.send(ioctl::SIGNAL_MSI, &msi)
}

/// The stock module told the first of several under one id alone until kernel 6.2.
fn not_before_6_2() -> Outcome {
    match is_stock() && kernel() < (6, 2) {
        true => skip("this version of the stock module tells the first of them alone"),
        false => Ok(()),
    }
}

fn a_message_reaches_all_of_one_id() -> Outcome {
    not_before_6_2()?;
    let (vm, vcpus) = machine(&[0, 1, 2, 3], 0)?;
    set_register(&vcpus[3], ID, 1 << 24)?;
    equal("takers", message(&vm, 1), Ok(2))?;
    equal("who has it", all_wait(&vcpus)?, [false, true, false, true].to_vec())
}

guest_code!(
    // In xAPIC mode: an interrupt to whoever has id 1.
    sends,
    64,
    "mov $0xfee000f0, %eax",
    "movl $0x1ff, (%rax)",
    "mov $0xfee00310, %eax",
    "movl $0x01000000, (%rax)",
    "mov $0xfee00300, %eax",
    "movl $0x4040, (%rax)",
    done!(),
);

fn an_ipi_reaches_all_of_one_id() -> Outcome {
    not_before_6_2()?;
    let guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, 4, sends())?;
    for vcpu in &guest.vcpus[1..] {
        set_register(vcpu, SVR, 0x1ff)?;
    }
    set_register(&guest.vcpus[3], ID, 1 << 24)?;
    guest.finish()?;
    equal("who has it", all_wait(&guest.vcpus)?, [false, true, false, true].to_vec())
}

fn an_id_beyond_a_byte_is_an_alias_in_xapic_mode() -> Outcome {
    not_before_6_2()?;
    let (vm, vcpus) = machine(&[0, 1, 0x101], 0)?;
    equal("takers", message(&vm, 1), Ok(2))?;
    equal("who has it", all_wait(&vcpus)?, [false, true, true].to_vec())
}

fn an_id_of_its_own_again_is_reached_alone() -> Outcome {
    let (vm, vcpus) = machine(&[0, 1, 2], 0)?;
    set_register(&vcpus[2], ID, 1 << 24)?;
    set_register(&vcpus[2], ID, 2 << 24)?;
    equal("takers", message(&vm, 1), Ok(1))?;
    equal("who has it", all_wait(&vcpus)?, [false, true, false].to_vec())
}

fn both_flags_of_the_x2apic_interface_are_offered() -> Outcome {
    let system = System::open()?;
    equal("KVM_CAP_X2APIC_API", system.extension(KVM_CAP_X2APIC_API), 3)?;
    let vm = system.create_vm()?;
    for flags in [4, 7, 1 << 32, u64::MAX] {
        enable_x2apic(&vm, flags).refused(&format!("{flags:#x}"), libc::EINVAL)?;
    }
    for flags in [0, 1, 2, 3] {
        enable_x2apic(&vm, flags).granted(&format!("{flags:#x}"))?;
    }
    Ok(())
}

/// Who gets a message to 0xff: an xAPIC, an x2APIC, and the x2APIC of that id.
fn of_a_byte_of_ones(flags: u64) -> Outcome<Vec<bool>> {
    let (vm, vcpus) = machine(&[0, 1, 255], flags)?;
    to_x2apic_mode(&vcpus[1])?;
    to_x2apic_mode(&vcpus[2])?;
    message(&vm, 0xff).granted("KVM_SIGNAL_MSI")?;
    all_wait(&vcpus)
}

fn a_byte_of_ones_is_a_broadcast_to_x2apics_too() -> Outcome {
    for flags in [0, 1] {
        equal("who has it", of_a_byte_of_ones(flags)?, [true; 3].to_vec())?;
    }
    Ok(())
}

fn without_the_quirk_a_byte_of_ones_is_an_id_of_x2apics() -> Outcome {
    for flags in [2, 3] {
        let (vm, vcpus) = machine(&[0, 1, 255], flags)?;
        vcpus.iter().try_for_each(to_x2apic_mode)?;
        equal("takers", message(&vm, 0xff), Ok(1))?;
        equal("who has it", all_wait(&vcpus)?, [false, false, true].to_vec())?;
    }
    Ok(())
}

fn without_the_quirk_a_byte_of_ones_is_still_a_broadcast_to_xapics() -> Outcome {
    for flags in [2, 3] {
        let (vm, vcpus) = machine(&[0, 1, 254], flags)?;
        equal("takers", message(&vm, 0xff), Ok(3))?;
        equal("who has it", all_wait(&vcpus)?, [true; 3].to_vec())?;
    }
    Ok(())
}

/// Most vCPUs and the highest id plus one.
fn limits() -> Outcome<(i32, i32)> {
    let system = System::open()?;
    Ok((system.extension(KVM_CAP_MAX_VCPUS), system.extension(KVM_CAP_MAX_VCPU_ID)))
}

fn vcpus_are_as_many_as_the_stock_module_has() -> Outcome {
    let limits = limits()?;
    if is_stock() {
        // As it was built: NR_CPUS decides.
        return holds("4096 and 16384, or 1024 and 4096", limits.1 == limits.0 * 4, limits);
    }
    equal("vCPUs and ids", limits, (4096, 16384))
}

fn a_vcpu_of_the_highest_id_gets_its_messages() -> Outcome {
    let id = limits()?.1 as u64 - 1;
    let (vm, vcpus) = machine(&[0, id, 300], 1)?;
    vcpus.iter().try_for_each(to_x2apic_mode)?;
    equal("takers", message(&vm, id as u32), Ok(1))?;
    equal("who has it", all_wait(&vcpus)?, [false, true, false].to_vec())?;
    equal("takers", message(&vm, 300), Ok(1))?;
    equal("who has it", all_wait(&vcpus)?, [false, true, true].to_vec())?;
    let nobody = message(&vm, id as u32 - 1);
    one_of("takers of an id that nobody has", nobody, &[Ok(0), Err(Errno(libc::EPERM))])
}

fn all_vcpus_can_be_made() -> Outcome {
    if is_stock() && kernel() < (6, 12) {
        return skip("asked of the newer one");
    }
    let most = limits()?.0 as u64;
    let limit = libc::rlimit { rlim_cur: 2 * most, rlim_max: 2 * most };
    // SAFETY: a whole structure.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
        return skip(format!("RLIMIT_NOFILE: {}", Errno::last()));
    }
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    for index in 0..most {
        match vm.call(ioctl::CREATE_VCPU, 4 * index + 3) {
            Ok(_) => {}
            Err(Errno(libc::ENOMEM)) => return skip(format!("no memory for more than {index}")),
            Err(errno) => return equal(&format!("vCPU {index}"), Err(errno), Ok(0)),
        }
    }
    vm.call(ioctl::CREATE_VCPU, 0).refused("one more", libc::EINVAL)
}
