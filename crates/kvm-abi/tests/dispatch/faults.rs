//! Bad pointers, wrong files and wrong sizes, for every command there is.

use gannet_kvm_abi::Errno;
use gannet_kvm_abi::dispatch::{system, vcpu, vm};
use gannet_kvm_abi::rows;
use gannet_kvm_abi::uapi::ioctl::*;
use host::std_port::test::{protect, unmap};
use x86::Hva;

use crate::Buffer;
use crate::mock::{File, System, Vm, offer};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    System,
    Vm,
    Vcpu,
}
use On::{System as S, Vcpu as C, Vm as V};

/// Command, the files that know it, whether it reads and whether it writes user memory.
const COMMANDS: &[(u32, &[On], bool, bool)] = &[
    (GET_MSR_INDEX_LIST, &[S], true, true),
    (GET_MSR_FEATURE_INDEX_LIST, &[S], true, true),
    (GET_SUPPORTED_CPUID, &[S], true, true),
    (GET_EMULATED_CPUID, &[S], true, true),
    (GET_SUPPORTED_HV_CPUID, &[S, C], true, true),
    (X86_GET_MCE_CAP_SUPPORTED, &[S], false, true),
    (GET_MSRS, &[S, C], true, true),
    (HAS_DEVICE_ATTR, &[S, C], true, false),
    (GET_DEVICE_ATTR, &[S, C], true, false),
    (SET_DEVICE_ATTR, &[C], true, false),
    (ENABLE_CAP, &[V, C], true, false),
    (SET_USER_MEMORY_REGION, &[V], true, false),
    (SET_USER_MEMORY_REGION2, &[V], true, false),
    (GET_DIRTY_LOG, &[V], true, false),
    (CLEAR_DIRTY_LOG, &[V], true, false),
    (REGISTER_COALESCED_MMIO, &[V], true, false),
    (UNREGISTER_COALESCED_MMIO, &[V], true, false),
    (IRQ_LINE, &[V], true, false),
    (IRQ_LINE_STATUS, &[V], true, true),
    (SIGNAL_MSI, &[V], true, false),
    (IOEVENTFD, &[V], true, false),
    (IRQFD, &[V], true, false),
    (SET_GSI_ROUTING, &[V], true, false),
    (GET_IRQCHIP, &[V], true, true),
    (SET_IRQCHIP, &[V], true, false),
    (CREATE_PIT2, &[V], true, false),
    (GET_PIT, &[V], true, true),
    (SET_PIT, &[V], true, false),
    (GET_PIT2, &[V], false, true),
    (SET_PIT2, &[V], true, false),
    (SET_IDENTITY_MAP_ADDR, &[V], true, false),
    (GET_CLOCK, &[V], false, true),
    (SET_CLOCK, &[V], true, false),
    (CREATE_DEVICE, &[V], true, false),
    (GET_REGS, &[C], false, true),
    (SET_REGS, &[C], true, false),
    (GET_SREGS, &[C], false, true),
    (SET_SREGS, &[C], true, false),
    (GET_SREGS2, &[C], false, true),
    (SET_SREGS2, &[C], true, false),
    (GET_FPU, &[C], false, true),
    (SET_FPU, &[C], true, false),
    (GET_XSAVE, &[C], false, true),
    (GET_XSAVE2, &[C], false, true),
    (SET_XSAVE, &[C], true, false),
    (GET_XCRS, &[C], false, true),
    (SET_XCRS, &[C], true, false),
    (GET_DEBUGREGS, &[C], false, true),
    (SET_DEBUGREGS, &[C], true, false),
    (GET_VCPU_EVENTS, &[C], false, true),
    (SET_VCPU_EVENTS, &[C], true, false),
    (GET_MP_STATE, &[C], false, true),
    (SET_MP_STATE, &[C], true, false),
    (GET_LAPIC, &[C], false, true),
    (SET_LAPIC, &[C], true, false),
    (SET_MSRS, &[C], true, false),
    (SET_CPUID, &[C], true, false),
    (SET_CPUID2, &[C], true, false),
    (GET_CPUID2, &[C], true, true),
    (INTERRUPT, &[C], true, false),
    (TRANSLATE, &[C], true, true),
    (SET_GUEST_DEBUG, &[C], true, false),
    (TPR_ACCESS_REPORTING, &[C], true, true),
    (SET_VAPIC_ADDR, &[C], true, false),
    (X86_SETUP_MCE, &[C], true, false),
    (X86_SET_MCE, &[C], true, false),
    (GET_NESTED_STATE, &[C], false, true),
    (SET_NESTED_STATE, &[C], true, false),
    (X86_SET_MSR_FILTER, &[V], true, false),
];

/// Commands whose argument is a number or nothing.
const WITHOUT_POINTER: &[(u32, &[On])] = &[
    (GET_API_VERSION, &[S]),
    (CREATE_VM, &[S]),
    (CHECK_EXTENSION, &[S, V]),
    (GET_VCPU_MMAP_SIZE, &[S]),
    (CREATE_VCPU, &[V]),
    (SET_NR_MMU_PAGES, &[V]),
    (SET_TSS_ADDR, &[V]),
    (CREATE_IRQCHIP, &[V]),
    (CREATE_PIT, &[V]),
    (SET_BOOT_CPU_ID, &[V]),
    (RUN, &[C]),
    (NMI, &[C]),
    (KVMCLOCK_CTRL, &[C]),
    (SET_TSC_KHZ, &[V, C]),
    (GET_TSC_KHZ, &[V, C]),
    (GET_STATS_FD, &[V, C]),
    (SMI, &[C]),
];

/// Commands with tests of their own below.
const APART: &[u32] = &[SET_SIGNAL_MASK, REINJECT_CONTROL];

/// Asks one file; also how many changes it was asked for.
fn ask(on: On, cmd: u32, arg: u64) -> (Result<i32, Errno>, usize) {
    match on {
        S => (system(&System { offer: offer() }, cmd, arg), 0),
        V => {
            let v = Vm::full();
            (vm(&v, cmd, arg), v.take().len())
        }
        C => {
            let f = File::new();
            (vcpu(&f, cmd, arg), f.take().len())
        }
    }
}

fn size_of_argument(cmd: u32) -> u64 {
    match cmd {
        REINJECT_CONTROL => 32,
        _ => u64::from(cmd >> 16 & 0x3fff),
    }
}

#[test]
fn null_and_unmapped_pointers_are_efault_and_change_nothing() {
    for &(cmd, files, ..) in COMMANDS {
        let mut buffer = Buffer::zeroed(8192);
        let addr = buffer.addr();
        let _hole = unmap(Hva(addr), 8192);
        for &on in files {
            for bad in [0, 8, addr, 0xffff_ffff_ffff_fff8, 0xffff_8000_0000_0000] {
                let (reply, changes) = ask(on, cmd, bad);
                assert_eq!(reply, Err(Errno::EFAULT), "{on:?} {cmd:#x} at {bad:#x}");
                assert_eq!(changes, 0, "{on:?} {cmd:#x} at {bad:#x}");
            }
        }
    }
}

#[test]
fn a_structure_that_ends_in_a_hole_is_efault_and_changes_nothing() {
    for &(cmd, files, reads, _) in COMMANDS {
        let size = size_of_argument(cmd);
        if !reads || size == 0 {
            continue;
        }
        let mut buffer = Buffer::zeroed(8192);
        let addr = buffer.addr();
        let _hole = unmap(Hva(addr + size - 1), 1);
        for &on in files {
            let (reply, changes) = ask(on, cmd, addr);
            assert_eq!((reply, changes), (Err(Errno::EFAULT), 0), "{on:?} {cmd:#x}");
        }
    }
}

#[test]
fn an_answer_to_read_only_memory_is_efault() {
    for &(cmd, files, _, writes) in COMMANDS {
        if !writes {
            continue;
        }
        // Room for everything a list can answer: one entry where the count comes first.
        let mut buffer = Buffer::zeroed(32768);
        if cmd >> 30 == 3 {
            buffer.0[0] = 200;
        }
        if matches!(cmd, GET_IRQCHIP | TPR_ACCESS_REPORTING) {
            buffer.0[0] = 0;
        }
        let addr = buffer.addr();
        let _wall = protect(Hva(addr), 32768);
        for &on in files {
            let (reply, _) = ask(on, cmd, addr);
            assert_eq!(reply, Err(Errno::EFAULT), "{on:?} {cmd:#x}");
        }
    }
}

#[test]
fn arrays_behind_a_head_fault_too() {
    // MSRs, CPUID leaves, routes: the head is there, the array is not.
    for (on, cmd, head) in [
        (S, GET_MSRS, 8),
        (C, GET_MSRS, 8),
        (C, SET_MSRS, 8),
        (C, SET_CPUID, 8),
        (C, SET_CPUID2, 8),
        (C, GET_CPUID2, 8),
        (S, GET_SUPPORTED_CPUID, 8),
        (S, GET_MSR_INDEX_LIST, 4),
        (V, SET_GSI_ROUTING, 8),
    ] {
        let mut buffer = Buffer::zeroed(4096);
        buffer.0[0] = 10;
        let addr = buffer.addr();
        let _hole = unmap(Hva(addr + head), 4096);
        assert_eq!(ask(on, cmd, addr), (Err(Errno::EFAULT), 0), "{on:?} {cmd:#x}");
    }
    let mut mask = Buffer::zeroed(16);
    mask.0[0] = 8;
    let addr = mask.addr();
    let _hole = unmap(Hva(addr + 8), 8);
    assert_eq!(ask(C, SET_SIGNAL_MASK, addr), (Err(Errno::EFAULT), 0));
}

#[test]
fn a_reinject_control_has_32_bytes_that_its_number_does_not_tell() {
    let mut buffer = Buffer::zeroed(32);
    let addr = buffer.addr();
    assert_eq!(ask(V, REINJECT_CONTROL, addr), (Ok(0), 1));
    assert_eq!(ask(V, REINJECT_CONTROL, 0), (Err(Errno::EFAULT), 0));
    let _hole = unmap(Hva(addr + 31), 1);
    assert_eq!(ask(V, REINJECT_CONTROL, addr), (Err(Errno::EFAULT), 0));
}

fn files(number: u32) -> Vec<On> {
    let of = |file| rows::COMMANDS.iter().any(|row| row.number == number && row.file == file);
    let files = [(rows::File::System, S), (rows::File::Vm, V), (rows::File::Vcpu, C)];
    files.into_iter().filter(|(file, _)| of(*file)).map(|(_, on)| on).collect()
}

#[test]
fn the_lists_above_name_every_command_of_the_table() {
    for row in rows::COMMANDS {
        let with = COMMANDS.iter().map(|&(cmd, on, ..)| (cmd, on));
        let listed =
            with.chain(WITHOUT_POINTER.iter().copied()).find(|(cmd, _)| *cmd == row.number);
        let files = files(row.number);
        match listed {
            Some((_, on)) => assert_eq!(on, files, "{}", row.name),
            None => assert!(files.is_empty() || APART.contains(&row.number), "{}", row.name),
        }
    }
}

#[test]
fn each_file_serves_its_commands_and_says_enotty_to_all_others() {
    for row in rows::COMMANDS {
        for on in [S, V, C] {
            let answer = ask(on, row.number, 0);
            if files(row.number).contains(&on) {
                assert_ne!(answer.0, Err(Errno::ENOTTY), "{on:?} {}", row.name);
            } else {
                assert_eq!(answer, (Err(Errno::ENOTTY), 0), "{on:?} {}", row.name);
            }
        }
    }
}

#[test]
fn a_command_of_another_size_or_direction_is_enotty() {
    let mut buffer = Buffer::zeroed(16384);
    let addr = buffer.addr();
    let known = |cmd| {
        COMMANDS.iter().any(|c| c.0 == cmd)
            || WITHOUT_POINTER.iter().any(|c| c.0 == cmd)
            || APART.contains(&cmd)
    };
    for &(cmd, files, ..) in COMMANDS {
        for other in [cmd ^ 8 << 16, cmd ^ 1 << 30, cmd ^ 2 << 30, cmd ^ 1 << 8] {
            for &on in files {
                if !known(other) {
                    assert_eq!(ask(on, other, addr), (Err(Errno::ENOTTY), 0), "{other:#x}");
                }
            }
        }
    }
}

#[test]
fn numbers_that_nobody_knows_are_enotty() {
    for on in [S, V, C] {
        for cmd in [0, 0xae0f, 0xaeff, 0x5401, 0xc0de_aeee, u32::MAX] {
            assert_eq!(ask(on, cmd, 0), (Err(Errno::ENOTTY), 0), "{on:?} {cmd:#x}");
        }
    }
}
