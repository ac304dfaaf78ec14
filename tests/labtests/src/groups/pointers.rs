//! Every command that takes a pointer, with pointers that lead nowhere: EFAULT, and nothing else.

use kvm_bindings::kvm_pit_config;

use crate::kvm::file::{Commands, System};
use crate::kvm::{ioctl, pointer};
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest};
use crate::machine::memory::{Memory, PAGE};
use crate::outcome::{Answer, Outcome};
use crate::runner::tests;

tests!("pointers":
    commands_of_the_system_file_refuse_bad_pointers,
    commands_of_a_vm_refuse_bad_pointers,
    commands_of_a_vcpu_refuse_bad_pointers,
    a_structure_that_ends_in_a_hole_is_refused,
    a_list_that_ends_in_a_hole_is_refused,
    what_is_read_only_cannot_be_answered_into,
);

guest_code!(nothing, 64, "hlt");

/// Name and number.
type Command = (&'static str, u64);

const OF_SYSTEM: [Command; 4] = [
    ("GET_MSR_INDEX_LIST", ioctl::GET_MSR_INDEX_LIST),
    ("GET_MSR_FEATURE_INDEX_LIST", ioctl::GET_MSR_FEATURE_INDEX_LIST),
    ("GET_SUPPORTED_CPUID", ioctl::GET_SUPPORTED_CPUID),
    ("GET_MSRS", ioctl::GET_MSRS),
];

const OF_VM: [Command; 18] = [
    ("SET_USER_MEMORY_REGION", ioctl::SET_USER_MEMORY_REGION),
    ("GET_DIRTY_LOG", ioctl::GET_DIRTY_LOG),
    ("SET_IDENTITY_MAP_ADDR", ioctl::SET_IDENTITY_MAP_ADDR),
    ("IRQ_LINE", ioctl::IRQ_LINE),
    ("IRQ_LINE_STATUS", ioctl::IRQ_LINE_STATUS),
    ("GET_IRQCHIP", ioctl::GET_IRQCHIP),
    ("SET_IRQCHIP", ioctl::SET_IRQCHIP),
    ("SET_GSI_ROUTING", ioctl::SET_GSI_ROUTING),
    ("IRQFD", ioctl::IRQFD),
    ("IOEVENTFD", ioctl::IOEVENTFD),
    ("SIGNAL_MSI", ioctl::SIGNAL_MSI),
    ("REGISTER_COALESCED_MMIO", ioctl::REGISTER_COALESCED_MMIO),
    ("UNREGISTER_COALESCED_MMIO", ioctl::UNREGISTER_COALESCED_MMIO),
    ("SET_CLOCK", ioctl::SET_CLOCK),
    ("GET_CLOCK", ioctl::GET_CLOCK),
    ("GET_PIT2", ioctl::GET_PIT2),
    ("SET_PIT2", ioctl::SET_PIT2),
    ("CREATE_PIT2", ioctl::CREATE_PIT2),
];

const OF_VCPU: [Command; 23] = [
    ("GET_REGS", ioctl::GET_REGS),
    ("SET_REGS", ioctl::SET_REGS),
    ("GET_SREGS", ioctl::GET_SREGS),
    ("SET_SREGS", ioctl::SET_SREGS),
    ("GET_MSRS", ioctl::GET_MSRS),
    ("SET_MSRS", ioctl::SET_MSRS),
    ("GET_FPU", ioctl::GET_FPU),
    ("SET_FPU", ioctl::SET_FPU),
    ("GET_LAPIC", ioctl::GET_LAPIC),
    ("SET_LAPIC", ioctl::SET_LAPIC),
    ("SET_CPUID2", ioctl::SET_CPUID2),
    ("GET_CPUID2", ioctl::GET_CPUID2),
    ("GET_MP_STATE", ioctl::GET_MP_STATE),
    ("SET_MP_STATE", ioctl::SET_MP_STATE),
    ("INTERRUPT", ioctl::INTERRUPT),
    ("GET_VCPU_EVENTS", ioctl::GET_VCPU_EVENTS),
    ("SET_VCPU_EVENTS", ioctl::SET_VCPU_EVENTS),
    ("GET_DEBUGREGS", ioctl::GET_DEBUGREGS),
    ("SET_DEBUGREGS", ioctl::SET_DEBUGREGS),
    ("GET_XSAVE", ioctl::GET_XSAVE),
    ("SET_XSAVE", ioctl::SET_XSAVE),
    ("GET_XCRS", ioctl::GET_XCRS),
    ("SET_XCRS", ioctl::SET_XCRS),
];

fn refuse_all(file: &impl Commands, commands: &[Command]) -> Outcome {
    for &(name, request) in commands {
        for address in [0, pointer::unmapped(), pointer::KERNEL, pointer::NON_CANONICAL, u64::MAX] {
            file.call(request, address).refused(&format!("{name} {address:#x}"), libc::EFAULT)?;
        }
    }
    Ok(())
}

fn commands_of_the_system_file_refuse_bad_pointers() -> Outcome {
    refuse_all(&System::open()?, &OF_SYSTEM)
}

fn commands_of_a_vm_refuse_bad_pointers() -> Outcome {
    // Without vCPUs, so that every command is in time.
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    vm.send(ioctl::CREATE_PIT2, &kvm_pit_config::default()).granted("KVM_CREATE_PIT2")?;
    refuse_all(&vm, &OF_VM)
}

fn commands_of_a_vcpu_refuse_bad_pointers() -> Outcome {
    let guest = Guest::new(Chip::Kernel, nothing())?;
    refuse_all(guest.vcpu(), &OF_VCPU)?;
    // Unlike the others this one gives NULL a meaning.
    guest.vcpu().call(ioctl::SET_SIGNAL_MASK, 0).granted("SET_SIGNAL_MASK 0")?;
    for address in [pointer::unmapped(), pointer::KERNEL] {
        let answer = guest.vcpu().call(ioctl::SET_SIGNAL_MASK, address);
        answer.refused(&format!("SET_SIGNAL_MASK {address:#x}"), libc::EFAULT)?;
    }
    Ok(())
}

/// A page with nothing behind it.
fn page_before_a_hole() -> Outcome<Memory> {
    let memory = Memory::new(2 * PAGE)?;
    memory.unmap(PAGE, PAGE);
    Ok(memory)
}

/// Bytes of a command's argument.
fn bytes_of(request: u64) -> u64 {
    request >> 16 & 0x3fff
}

fn a_structure_that_ends_in_a_hole_is_refused() -> Outcome {
    let guest = Guest::new(Chip::KernelAndPit, nothing())?;
    let memory = page_before_a_hole()?;
    // All but the last byte is there. What is there is zero, or of that command's own.
    for &(name, request) in OF_VM.iter().filter(|&&(_, request)| bytes_of(request) > 8) {
        let address = memory.hva() + PAGE - bytes_of(request) + 1;
        guest.vm.call(request, address).refused(name, libc::EFAULT)?;
    }
    for &(name, request) in OF_VCPU.iter().filter(|&&(_, request)| bytes_of(request) > 8) {
        let address = memory.hva() + PAGE - bytes_of(request) + 1;
        guest.vcpu().call(request, address).refused(name, libc::EFAULT)?;
    }
    Ok(())
}

fn a_list_that_ends_in_a_hole_is_refused() -> Outcome {
    let guest = Guest::new(Chip::Kernel, nothing())?;
    let memory = page_before_a_hole()?;
    // The count is the last thing that can be read.
    let place = PAGE - 8;
    let address = memory.hva() + place;
    memory.write(place, 3);
    for (name, request) in [
        ("GET_MSRS", ioctl::GET_MSRS),
        ("SET_MSRS", ioctl::SET_MSRS),
        ("SET_CPUID2", ioctl::SET_CPUID2),
    ] {
        guest.vcpu().call(request, address).refused(name, libc::EFAULT)?;
    }
    memory.write(place, 3);
    guest.vm.call(ioctl::SET_GSI_ROUTING, address).refused("SET_GSI_ROUTING", libc::EFAULT)?;
    memory.write(place, 200);
    let system = &guest.system;
    system.call(ioctl::GET_SUPPORTED_CPUID, address).refused("SUPPORTED_CPUID", libc::EFAULT)?;
    memory.write(place, 200);
    guest.vcpu().call(ioctl::GET_CPUID2, address).refused("GET_CPUID2", libc::EFAULT)?;
    memory.write(PAGE - 8, 0);
    memory.write(PAGE - 4 - 4, 1000 << 32);
    let last_word = memory.hva() + PAGE - 4;
    system.call(ioctl::GET_MSR_INDEX_LIST, last_word).refused("MSR_INDEX_LIST", libc::EFAULT)
}

fn what_is_read_only_cannot_be_answered_into() -> Outcome {
    let guest = Guest::new(Chip::KernelAndPit, nothing())?;
    let memory = Memory::new(2 * PAGE)?;
    memory.write(0, 0);
    memory.protect(0, 2 * PAGE, libc::PROT_READ).granted("mprotect")?;
    for (name, request) in OF_VCPU.iter().filter(|(_, request)| request >> 30 == 2) {
        guest.vcpu().call(*request, memory.hva()).refused(name, libc::EFAULT)?;
    }
    for (name, request) in [("GET_CLOCK", ioctl::GET_CLOCK), ("GET_PIT2", ioctl::GET_PIT2)] {
        guest.vm.call(request, memory.hva()).refused(name, libc::EFAULT)?;
    }
    Ok(())
}
