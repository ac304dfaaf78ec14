//! Quirks of KVM's that a VMM may switch off (KVM API, KVM_CAP_DISABLE_QUIRKS2), and what a VMM without a
//! local APIC in the kernel hears of the task priority (KVM_EXIT_SET_TPR).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, System, Vm};
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::oracle::{is_stock, kernel};
use crate::outcome::{Answer, Outcome, Reply, equal, holds, skip};
use crate::runner::tests;

tests!("quirks":
    there_are_those_that_the_api_names,
    one_that_does_not_exist_cannot_be_switched_off,
    the_apic_page_is_all_ones_in_x2apic_mode,
    the_apic_page_is_all_ones_while_the_apic_is_disabled,
    the_emulator_finds_all_ones_in_the_apic_page,
    without_the_quirk_the_apic_page_is_the_vmms,
    lint0_comes_up_enabled_on_the_boot_processor,
    without_the_quirk_lint0_is_masked,
    a_foreign_hypercall_works,
    without_the_quirk_a_foreign_hypercall_is_undefined,
    misc_enable_leaves_the_monitor_feature_alone,
    without_the_quirk_misc_enable_switches_the_monitor_feature,
    a_lowered_task_priority_exits_without_apic,
    a_task_priority_does_not_exit_with_an_apic,
    a_bus_cycle_is_a_nanosecond_unless_it_is_set,
    what_a_bus_cycle_cannot_be_is_refused,
    the_timer_counts_bus_cycles,
);

const LINT0_REENABLED: u64 = 1 << 0;
const LAPIC_MMIO_HOLE: u64 = 1 << 2;
const MISC_ENABLE_NO_MWAIT: u64 = 1 << 4;
const FIX_HYPERCALL_INSN: u64 = 1 << 5;
/// All that kernel 6.1 has.
const OLD: i32 = 0x7f;
/// KVM_CAP_X86_APIC_BUS_CYCLES_NS.
const APIC_BUS_CYCLES_NS: u32 = 237;

fn enable(vm: &Vm, cap: u32, value: u64) -> Reply {
    let mut request = kvm_enable_cap { cap, ..Default::default() };
    request.args[0] = value;
    vm.send(ioctl::ENABLE_CAP, &request)
}

fn switch_off(vm: &Vm, quirks: u64) -> Outcome {
    enable(vm, KVM_CAP_DISABLE_QUIRKS2, quirks).granted("KVM_CAP_DISABLE_QUIRKS2").map(drop)
}

fn there_are_those_that_the_api_names() -> Outcome {
    let system = System::open()?;
    equal("KVM_CAP_DISABLE_QUIRKS", system.extension(KVM_CAP_DISABLE_QUIRKS), 1)?;
    let quirks = system.extension(KVM_CAP_DISABLE_QUIRKS2);
    let new = !is_stock() || kernel() >= (6, 12);
    let expected = if new { OLD | 0x80 } else { OLD };
    // Newer ones than kernel 6.12's own are the stock module's alone.
    equal("quirks", quirks & 0xff, expected)
}

fn one_that_does_not_exist_cannot_be_switched_off() -> Outcome {
    let vm = System::open()?.create_vm()?;
    for quirks in [1 << 31, 1 << 32, u64::MAX] {
        enable(&vm, KVM_CAP_DISABLE_QUIRKS2, quirks)
            .refused(&format!("{quirks:#x}"), libc::EINVAL)?;
    }
    enable(&vm, KVM_CAP_DISABLE_QUIRKS, u64::MAX).granted("the old command takes all").map(drop)
}

/// Loads and stores of every size at the APIC's page; what was loaded goes to RESULT.
macro_rules! touch {
    () => {
        "mov $0xfee00030, %ebx
         mov (%rbx), %al
         movzbl %al, %eax
         mov %rax, RESULT
         mov (%rbx), %ax
         movzwl %ax, %eax
         mov %rax, RESULT + 8
         mov (%rbx), %eax
         mov %rax, RESULT + 16
         mov (%rbx), %rax
         mov %rax, RESULT + 24
         movl $5, (%rbx)
         mov %al, 0x50(%rbx)
         movl $0, 0x50(%rbx)
         mov %rax, 0x250(%rbx)"
    };
}

const ALL_ONES: [u64; 4] = [0xff, 0xffff, 0xffff_ffff, u64::MAX];

fn loaded(guest: &Guest) -> [u64; 4] {
    [0, 1, 2, 3].map(|index| guest.result(index))
}

guest_code!(in_x2apic_mode, 64, x2apic!(), touch!(), touch!(), done!());
guest_code!(
    disabled,
    64,
    "mov $0x1b, %ecx",
    "rdmsr",
    "and $~0x800, %eax",
    "wrmsr",
    touch!(),
    touch!(),
    done!()
);

fn the_apic_page_is_all_ones_in_x2apic_mode() -> Outcome {
    for chip in [Chip::Kernel, Chip::Split] {
        let guest = Guest::new(chip, in_x2apic_mode())?;
        guest.finish()?;
        equal("what was loaded", loaded(&guest), ALL_ONES)?;
    }
    Ok(())
}

fn the_apic_page_is_all_ones_while_the_apic_is_disabled() -> Outcome {
    let guest = Guest::new(Chip::Kernel, disabled())?;
    guest.finish()?;
    equal("what was loaded", loaded(&guest), ALL_ONES)
}

guest_code!(
    by_odd_instructions,
    64,
    x2apic!(),
    "mov $0xfee00080, %ebx",
    "mov $1, %eax",
    "add (%rbx), %eax",
    "mov %rax, RESULT",
    "xchg %rax, 0x10(%rbx)",
    "mov %rax, RESULT + 8",
    "mov %rbx, %rsi",
    "mov $RESULT + 16, %edi",
    "mov $2, %ecx",
    "cld",
    "rep movsl",
    "addl $1, (%rbx)",
    done!(),
);

fn the_emulator_finds_all_ones_in_the_apic_page() -> Outcome {
    let guest = Guest::new(Chip::Kernel, by_odd_instructions())?;
    guest.finish()?;
    equal("what was loaded", [0, 1, 2].map(|n| guest.result(n)), [0, u64::MAX, u64::MAX])
}

fn without_the_quirk_the_apic_page_is_the_vmms() -> Outcome {
    for code in [in_x2apic_mode(), disabled()] {
        let guest = Guest::new(Chip::Kernel, code)?;
        switch_off(&guest.vm, LAPIC_MMIO_HOLE)?;
        for len in [1, 2, 4, 8] {
            guest.expect("a load", Exit::mmio(false, 0xfee0_0030, &[0; 8][..len]))?;
            guest.vcpu().answer(&[0x11; 8][..len]);
        }
        guest.expect("a store", Exit::mmio(true, 0xfee0_0030, &[5, 0, 0, 0]))?;
        equal(
            "what was loaded",
            loaded(&guest),
            ALL_ONES.map(|ones| ones & 0x1111_1111_1111_1111),
        )?;
    }
    Ok(())
}

fn lint0(vm: &Vm, id: u64) -> Outcome<u32> {
    let vcpu = vm.create_vcpu(id)?;
    let apic: kvm_lapic_state = vcpu.receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    Ok(u32::from_le_bytes([0, 1, 2, 3].map(|byte| apic.regs[0x350 + byte] as u8)))
}

fn lint0_comes_up_enabled_on_the_boot_processor() -> Outcome {
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    equal("LINT0 of the first", lint0(&vm, 0)?, 0x700)?;
    equal("LINT0 of the second", lint0(&vm, 1)?, 0x1_0000)
}

fn without_the_quirk_lint0_is_masked() -> Outcome {
    let vm = System::open()?.create_vm()?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    switch_off(&vm, LINT0_REENABLED)?;
    equal("LINT0 of the first", lint0(&vm, 0)?, 0x1_0000)
}

guest_code!(
    calls,
    64,
    "mov $1000, %eax",
    guarded!("cmpq $0, IS_INTEL; je 15f; vmmcall; jmp 14f; 15: vmcall; 14:"),
    "mov %rax, RESULT",
    "mov 15b - 5(%rip), %rax",
    "mov %rax, RESULT + 8",
    done!(),
);

fn a_foreign_hypercall_works() -> Outcome {
    let guest = Guest::new(Chip::Kernel, calls())?;
    guest.finish()?;
    equal("faults", guest.faults().0, 0)?;
    // KVM_ENOSYS: there is no call of this number.
    equal("answer", guest.result(0) as i32, -1000)?;
    // The one that was executed has become the other, which is the CPU's.
    let [_, _, vmmcall, _, _, _, _, vmcall] = guest.result(1).to_le_bytes();
    equal("the last bytes of the two", vmmcall, vmcall)
}

fn without_the_quirk_a_foreign_hypercall_is_undefined() -> Outcome {
    let guest = Guest::new(Chip::Kernel, calls())?;
    switch_off(&guest.vm, FIX_HYPERCALL_INSN)?;
    guest.finish()?;
    equal("faults and vector", (guest.faults().0, guest.faults().1), (1, 6))?;
    equal("rax", guest.result(0), 1000)?;
    let [_, _, vmmcall, _, _, _, _, vmcall] = guest.result(1).to_le_bytes();
    equal("the last bytes of the two", (vmmcall, vmcall), (0xd9, 0xc1))
}

guest_code!(features, 64, "mov $1, %eax", "cpuid", "mov %rcx, RESULT", "out %al, $PORT_MARK");

/// CPUID.1:ECX.MONITOR as the guest sees it after MISC_ENABLE's bit 18 was set to `on`, when its VMM said
/// `given`.
fn monitor(quirk: bool, given: bool, on: bool) -> Outcome<bool> {
    const MWAIT: u64 = 1 << 18;
    let guest = Guest::new(Chip::Kernel, features())?;
    if !quirk {
        switch_off(&guest.vm, MISC_ENABLE_NO_MWAIT)?;
    }
    let mut table = guest.system.supported_cpuid()?;
    for entry in table.used().iter_mut().filter(|entry| entry.function == 1) {
        entry.ecx = entry.ecx & !8 | u32::from(given) << 3;
    }
    guest.vcpu().set_cpuid(&table)?;
    let old = guest.vcpu().msr(0x1a0)?.unwrap_or(0);
    // The bit changes in any case.
    for value in [old & !MWAIT | u64::from(!on) << 18, old & !MWAIT | u64::from(on) << 18] {
        holds("MISC_ENABLE taken", guest.vcpu().set_msr(0x1a0, value)?, value)?;
    }
    guest.reach_mark()?;
    Ok(guest.result(0) & 8 != 0)
}

fn misc_enable_leaves_the_monitor_feature_alone() -> Outcome {
    for (given, on) in [(false, false), (false, true), (true, false), (true, true)] {
        equal(&format!("MONITOR, {given}, {on}"), monitor(true, given, on)?, given)?;
    }
    Ok(())
}

fn without_the_quirk_misc_enable_switches_the_monitor_feature() -> Outcome {
    for (given, on) in [(false, false), (false, true), (true, false), (true, true)] {
        equal(&format!("MONITOR, {given}, {on}"), monitor(false, given, on)?, on)?;
    }
    Ok(())
}

guest_code!(
    priorities,
    64,
    "mov $8, %eax",
    "mov %rax, %cr8",
    "out %al, $PORT_MARK",
    "mov %rax, %cr8",
    "mov $9, %eax",
    "mov %rax, %cr8",
    "out %al, $PORT_MARK",
    "mov $3, %r8d",
    "mov %r8, %cr8",
    "mov %cr8, %rax",
    "mov %rax, RESULT",
    "xor %eax, %eax",
    "mov %rax, %cr8",
    "mov $2, %eax",
    guarded!("mov $16, %eax; mov %rax, %cr8"),
    done!(),
);

fn a_lowered_task_priority_exits_without_apic() -> Outcome {
    let guest = Guest::new(Chip::None, priorities())?;
    // SAFETY: a field of the shared page.
    let cr8 = || unsafe { (*guest.vcpu().page()).cr8 };
    guest.reach_mark()?;
    equal("CR8 after it rose", cr8(), 8)?;
    guest.reach_mark()?;
    equal("CR8 after it rose again", cr8(), 9)?;
    guest.expect("a lower priority", Exit::Other(KVM_EXIT_SET_TPR))?;
    equal("CR8 after it fell", cr8(), 3)?;
    guest.expect("no priority", Exit::Other(KVM_EXIT_SET_TPR))?;
    equal("what the guest read", guest.result(0), 3)?;
    equal("CR8 at last", cr8(), 0)?;
    guest.finish()?;
    equal("fault of a reserved bit", guest.faults().1, 13)
}

fn a_task_priority_does_not_exit_with_an_apic() -> Outcome {
    for chip in [Chip::Kernel, Chip::Split] {
        let guest = Guest::new(chip, priorities())?;
        guest.reach_mark()?;
        guest.reach_mark()?;
        guest.finish()?;
        equal("what the guest read", guest.result(0), 3)?;
    }
    Ok(())
}

fn with_bus_cycles() -> Outcome<System> {
    let system = System::open()?;
    system.require(APIC_BUS_CYCLES_NS, "KVM_CAP_X86_APIC_BUS_CYCLES_NS")?;
    Ok(system)
}

fn a_bus_cycle_is_a_nanosecond_unless_it_is_set() -> Outcome {
    let system = with_bus_cycles()?;
    equal("a bus cycle in ns", system.extension(APIC_BUS_CYCLES_NS), 1)
}

fn what_a_bus_cycle_cannot_be_is_refused() -> Outcome {
    let system = with_bus_cycles()?;
    let vm = system.create_vm()?;
    let set = |vm: &Vm, ns| enable(vm, APIC_BUS_CYCLES_NS, ns);
    set(&vm, 10).refused("without local APICs", libc::ENXIO)?;
    set(&vm, 0).refused("none, without local APICs", libc::EINVAL)?;
    vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    let most = u64::MAX / (u64::from(u32::MAX) * 128);
    for ns in [0, most + 1, 1 << 40, u64::MAX] {
        set(&vm, ns).refused(&format!("{ns} ns"), libc::EINVAL)?;
    }
    for ns in [most, 1, 40] {
        set(&vm, ns).granted(&format!("{ns} ns"))?;
    }
    let _vcpu = vm.create_vcpu(0)?;
    set(&vm, 40).refused("with a vCPU", libc::EINVAL)
}

guest_code!(
    // Lets the timer run down from all ones for two million ticks of the TSC; how far it came, and how
    // many ticks that was.
    counts,
    64,
    x2apic!(),
    "mov $0x83e, %ecx",
    "mov $0xb, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "mov $0x838, %ecx",
    "mov $0xffffffff, %eax",
    "wrmsr",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, %rsi",
    "0: pause",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "mov %rax, %rdi",
    "sub %rsi, %rax",
    "cmp $2000000, %rax",
    "jb 0b",
    "mov $0x839, %ecx",
    "rdmsr",
    "not %eax",
    "mov %rax, RESULT",
    "rdtsc",
    "shl $32, %rdx",
    "or %rdx, %rax",
    "sub %rsi, %rax",
    "mov %rax, RESULT + 8",
    done!(),
);

fn the_timer_counts_bus_cycles() -> Outcome {
    let system = with_bus_cycles()?;
    // Nanoseconds by the timer and by the TSC.
    let measured = |ns: u64| -> Outcome<(u64, u64)> {
        let vm = system.create_vm()?;
        vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
        enable(&vm, APIC_BUS_CYCLES_NS, ns).granted("KVM_CAP_X86_APIC_BUS_CYCLES_NS")?;
        let guest = Guest::on(vm, counts())?;
        guest.finish()?;
        let khz = guest.vcpu().call(ioctl::GET_TSC_KHZ, 0).granted("KVM_GET_TSC_KHZ")? as u64;
        Ok((guest.result(0) * ns, guest.result(1) * 1_000_000 / khz))
    };
    for ns in [1, 25, 1000] {
        // A machine that is put aside between two reads sees more of one than of the other.
        let mut all = Vec::new();
        for _ in 0..5 {
            let (counted, ticks) = measured(ns)?;
            if counted * 10 > ticks * 5 && counted * 10 < ticks * 15 {
                all.clear();
                break;
            }
            all.push((counted, ticks));
        }
        holds(&format!("as many ns in cycles of {ns}"), all.is_empty(), &all)?;
    }
    if is_stock() && kernel() < (6, 11) {
        return skip("not reached");
    }
    Ok(())
}
