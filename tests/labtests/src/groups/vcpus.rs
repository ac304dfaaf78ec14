//! Creating vCPUs, the order of commands, and files whose VMM is another process or gone
//! (KVM API §4.7 and "General description").

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::file::{Commands, System};
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::PORT_MARK;
use crate::oracle;
use crate::outcome::{Answer, Errno, Outcome, Reply, equal, fail, holds, skip};
use crate::runner::{await_end, tests};

tests!("vcpus":
    an_id_out_of_range_is_einval,
    an_id_beyond_32_bits_is_einval,
    a_duplicate_id_is_eexist,
    ids_may_have_gaps,
    the_irqchip_comes_before_the_vcpus,
    a_second_irqchip_is_eexist,
    a_pit_without_irqchip_is_enoent,
    a_second_pit_is_eexist,
    the_boot_cpu_is_chosen_before_the_vcpus,
    the_identity_map_is_placed_before_the_vcpus,
    the_tss_must_lie_below_4_gib,
    the_cpuid_cannot_change_once_the_vcpu_has_run,
    a_vcpu_reports_halts_to_user_space_without_irqchip,
    another_process_gets_eio,
    mmap_beyond_the_shared_pages_is_a_bus_error,
    a_vm_cannot_be_mapped,
    a_vcpu_survives_the_close_of_its_vm,
    a_vm_survives_the_close_of_its_vcpu,
    the_id_of_a_closed_vcpu_stays_taken,
);

fn an_id_out_of_range_is_einval() -> Outcome {
    let system = System::open()?;
    let ids = system.extension(KVM_CAP_MAX_VCPU_ID) as u64;
    holds("room for some vCPUs", ids >= 4, ids)?;
    let vm = system.create_vm()?;
    for id in [ids, ids + 1, 1 << 31, u64::from(u32::MAX)] {
        vm.call(ioctl::CREATE_VCPU, id).refused(&format!("id {id:#x}"), libc::EINVAL)?;
    }
    Ok(())
}

fn an_id_beyond_32_bits_is_einval() -> Outcome {
    if oracle::is_stock() && oracle::kernel() < (6, 11) {
        return skip("this version of the stock module cuts the id off");
    }
    let vm = System::open()?.create_vm()?;
    for id in [1 << 32, u64::MAX] {
        vm.call(ioctl::CREATE_VCPU, id).refused(&format!("id {id:#x}"), libc::EINVAL)?;
    }
    Ok(())
}

fn a_duplicate_id_is_eexist() -> Outcome {
    let vm = System::open()?.create_vm()?;
    let _first = vm.create_vcpu(1)?;
    vm.call(ioctl::CREATE_VCPU, 1).refused("again", libc::EEXIST)?;
    vm.create_vcpu(0).map(drop)
}

fn ids_may_have_gaps() -> Outcome {
    let vm = System::open()?.create_vm()?;
    [3, 0, 2].into_iter().try_for_each(|id| vm.create_vcpu(id).map(drop))
}

fn the_irqchip_comes_before_the_vcpus() -> Outcome {
    let vm = System::open()?.create_vm()?;
    let _vcpu = vm.create_vcpu(0)?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).refused("after a vCPU", libc::EINVAL)
}

fn a_second_irqchip_is_eexist() -> Outcome {
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("first")?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).refused("second", libc::EEXIST)
}

fn a_pit_without_irqchip_is_enoent() -> Outcome {
    if oracle::is_stock() && oracle::kernel() < (6, 2) {
        return skip("this version of the stock module makes one all the same");
    }
    let vm = System::open()?.create_vm()?;
    vm.send(ioctl::CREATE_PIT2, &kvm_pit_config::default()).refused("PIT2", libc::ENOENT)
}

fn a_second_pit_is_eexist() -> Outcome {
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("irqchip")?;
    vm.send(ioctl::CREATE_PIT2, &kvm_pit_config::default()).granted("first")?;
    vm.send(ioctl::CREATE_PIT2, &kvm_pit_config::default()).refused("second", libc::EEXIST)
}

fn the_boot_cpu_is_chosen_before_the_vcpus() -> Outcome {
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::SET_BOOT_CPU_ID, 1).granted("before")?;
    let _vcpu = vm.create_vcpu(0)?;
    vm.call(ioctl::SET_BOOT_CPU_ID, 0).refused("after", libc::EBUSY)
}

fn the_identity_map_is_placed_before_the_vcpus() -> Outcome {
    let vm = System::open()?.create_vm()?;
    vm.send(ioctl::SET_IDENTITY_MAP_ADDR, &0xfffb_c000_u64).granted("before")?;
    let _vcpu = vm.create_vcpu(0)?;
    vm.send(ioctl::SET_IDENTITY_MAP_ADDR, &0xfffb_c000_u64).refused("after", libc::EINVAL)
}

fn the_tss_must_lie_below_4_gib() -> Outcome {
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::SET_TSS_ADDR, 0xffff_f000).refused("wrapping", libc::EINVAL)?;
    vm.call(ioctl::SET_TSS_ADDR, 0xfffb_d000).granted("as QEMU does").map(drop)
}

guest_code!(halt_for_ever, 64, "0: hlt", "jmp 0b");

fn the_cpuid_cannot_change_once_the_vcpu_has_run() -> Outcome {
    let guest = Guest::new(Chip::None, halt_for_ever())?;
    let mut table = crate::kvm::file::CpuidTable::empty();
    guest.vcpu().exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
    guest.vcpu().set_cpuid(&table)?;
    guest.expect("exit", crate::kvm::exit::Exit::Hlt)?;
    guest.vcpu().set_cpuid(&table)?;
    for entry in table.used().iter_mut().filter(|entry| entry.function == 1) {
        entry.eax ^= 0x10;
    }
    guest.vcpu().send(ioctl::SET_CPUID2, &*table).refused("another", libc::EINVAL)?;
    table.nent -= 1;
    guest.vcpu().send(ioctl::SET_CPUID2, &*table).refused("a shorter one", libc::EINVAL)
}

fn a_vcpu_reports_halts_to_user_space_without_irqchip() -> Outcome {
    let guest = Guest::new(Chip::None, halt_for_ever())?;
    for _ in 0..3 {
        guest.expect("exit", crate::kvm::exit::Exit::Hlt)?;
    }
    Ok(())
}

/// Runs `ask` in a child and gives its answer here.
fn in_a_child(ask: impl FnOnce() -> Reply) -> Outcome<Reply> {
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let errno = ask().map_or_else(|errno| errno.0, |_| 0);
        // SAFETY: ends the child.
        unsafe { libc::_exit(errno) };
    }
    match await_end(child, Duration::from_secs(5)) {
        Some(status) if libc::WIFEXITED(status) => Ok(match libc::WEXITSTATUS(status) {
            0 => Ok(0),
            errno => Err(Errno(errno)),
        }),
        other => fail(format!("expected an end of the child got {other:x?}")),
    }
}

fn another_process_gets_eio() -> Outcome {
    let guest = Guest::new(Chip::None, halt_for_ever())?;
    let (vm, vcpu, system) = (&guest.vm, guest.vcpu(), &guest.system);
    in_a_child(|| vcpu.call(ioctl::RUN, 0))?.refused("KVM_RUN", libc::EIO)?;
    let mut regs = kvm_regs::default();
    in_a_child(|| vcpu.exchange(ioctl::GET_REGS, &mut regs))?.refused("GET_REGS", libc::EIO)?;
    in_a_child(|| vm.call(ioctl::CREATE_VCPU, 7))?.refused("CREATE_VCPU", libc::EIO)?;
    in_a_child(|| vm.set_slot(5, 0, 1 << 30, 0x1000, 0))?.refused("SET_SLOT", libc::EIO)?;
    in_a_child(|| system.call(ioctl::GET_API_VERSION, 0))?.granted("GET_API_VERSION")?;
    // The child's end took nothing from us.
    guest.expect("exit", crate::kvm::exit::Exit::Hlt)
}

fn mmap_beyond_the_shared_pages_is_a_bus_error() -> Outcome {
    let vm = System::open()?.create_vm()?;
    let vcpu = vm.create_vcpu(0)?;
    let bytes = vm.run_bytes;
    // SAFETY: a new mapping; the child that touches it wrongly dies of it.
    let child = unsafe {
        let flags = (libc::PROT_READ, libc::MAP_SHARED);
        let pages =
            libc::mmap(std::ptr::null_mut(), bytes * 2, flags.0, flags.1, vcpu.descriptor(), 0);
        if pages == libc::MAP_FAILED {
            return equal("errno of mmap", Errno::last(), Errno(libc::EINVAL));
        }
        let child = libc::fork();
        if child == 0 {
            pages.cast::<u8>().add(bytes).read_volatile();
            libc::_exit(0);
        }
        child
    };
    match await_end(child, Duration::from_secs(5)) {
        Some(status) if libc::WIFSIGNALED(status) => {
            equal("signal", libc::WTERMSIG(status), libc::SIGBUS)
        }
        other => fail(format!("expected SIGBUS got wait status {other:x?}")),
    }
}

fn a_vm_cannot_be_mapped() -> Outcome {
    let vm = System::open()?.create_vm()?;
    // SAFETY: a new mapping, if it should succeed.
    let pages = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ,
            libc::MAP_SHARED,
            vm.descriptor(),
            0,
        )
    };
    holds("no mapping", pages == libc::MAP_FAILED, pages)?;
    equal("errno", Errno::last(), Errno(libc::ENODEV))
}

guest_code!(mark_for_ever, 64, "0: out %al, $PORT_MARK", "jmp 0b");

fn a_vcpu_survives_the_close_of_its_vm() -> Outcome {
    let Guest { vcpus, vm, memory, system } = Guest::new(Chip::Kernel, mark_for_ever())?;
    drop((vm, system));
    for _ in 0..3 {
        let exit = vcpus[0].run().granted("KVM_RUN")?;
        holds("the guest's mark", exit.is_out(PORT_MARK), exit)?;
    }
    drop(vcpus);
    drop(memory);
    Ok(())
}

fn a_vm_survives_the_close_of_its_vcpu() -> Outcome {
    let mut guest = Guest::with_vcpus(Chip::Kernel, Mode::Long, 2, mark_for_ever())?;
    guest.reach_mark()?;
    guest.vcpus.remove(0);
    guest.vm.set_slot(1, 0, 1 << 30, 0x1000, guest.memory.hva()).granted("a new slot")?;
    guest.vm.call(ioctl::CHECK_EXTENSION, 0).granted("CHECK_EXTENSION")?;
    // Its files may be duplicated, too.
    // SAFETY: the descriptor is open as long as `guest` is.
    let file = unsafe { BorrowedFd::borrow_raw(guest.vm.descriptor()) };
    let copy = file.try_clone_to_owned();
    let copy = copy.map_err(|_| crate::outcome::Trouble::Failed("no duplicate".into()))?;
    drop(guest);
    // SAFETY: plain number.
    let answer = unsafe { libc::ioctl(copy.as_raw_fd(), ioctl::CHECK_EXTENSION, 0) };
    holds("an answer of the duplicate", answer >= 0, answer)
}

fn the_id_of_a_closed_vcpu_stays_taken() -> Outcome {
    let vm = System::open()?.create_vm()?;
    drop(vm.create_vcpu(0)?);
    vm.call(ioctl::CREATE_VCPU, 0).refused("again", libc::EEXIST)
}
