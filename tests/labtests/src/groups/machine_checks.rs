//! Machine checks that a VMM gives its guest, and the interrupt that tells of those nobody has to act on
//! (KVM API §4.104 to §4.106, SDM vol. 3B §16.5).

use kvm_bindings::*;

use crate::kvm::file::{Commands, System};
use crate::kvm::ioctl;
use crate::machine::code::{done, guarded, guest_code, x2apic};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::oracle::{Vendor, vendor};
use crate::outcome::{Answer, Outcome, Reply, equal, holds, skip};
use crate::runner::tests;

tests!("machine_checks":
    what_can_be_switched_on_is_told,
    what_is_not_told_is_not_taken,
    an_error_that_asks_for_nothing_is_logged_only,
    the_local_apic_has_a_vector_more,
    without_it_there_is_no_such_vector,
    an_error_that_asks_for_nothing_interrupts,
    a_bank_that_does_not_ask_for_it_interrupts_nobody,
    a_masked_vector_interrupts_nobody,
    the_vector_is_saved_and_restored,
    local_machine_checks_need_the_firmwares_leave,
);

const GET_CAP: u64 = ioctl::ior::<u64>(0x9d);
const SETUP: u64 = ioctl::iow::<u64>(0x9c);
const SET: u64 = ioctl::iow::<kvm_x86_mce>(0x9e);

const CTL_P: u64 = 1 << 8;
const CMCI_P: u64 = 1 << 10;
const SER_P: u64 = 1 << 24;
const LMCE_P: u64 = 1 << 27;

const VALID: u64 = 1 << 63;
const UNCORRECTED: u64 = 1 << 61;
const ENABLED: u64 = 1 << 60;
/// Bank 4.
const BANK: u8 = 4;
const STATUS: u32 = 0x401 + 4 * BANK as u32;
const CTL2: u32 = 0x280 + BANK as u32;
const CMCI_ENABLE: u64 = 1 << 30;
const VECTOR: u8 = 0x45;

fn supported() -> Outcome<u64> {
    System::open()?.receive(GET_CAP).granted("KVM_X86_GET_MCE_CAP_SUPPORTED")
}

fn what_can_be_switched_on_is_told() -> Outcome {
    let expected = match vendor() {
        Vendor::Intel => CTL_P | SER_P | CMCI_P | LMCE_P,
        Vendor::Amd => CTL_P | SER_P,
    };
    equal("KVM_X86_GET_MCE_CAP_SUPPORTED", supported()?, expected)
}

guest_code!(idle, 64, "0: out %al, $PORT_MARK", "jmp 0b");

fn set_up(guest: &Guest, cap: u64) -> Reply {
    guest.vcpu().send(SETUP, &cap)
}

fn what_is_not_told_is_not_taken() -> Outcome {
    let guest = Guest::new(Chip::Kernel, idle())?;
    let told = supported()?;
    for bit in [9, 10, 11, 12, 24, 25, 26, 27, 28, 63] {
        let answer = set_up(&guest, 1 << bit | 8);
        match told & 1 << bit {
            0 => answer.refused(&format!("bit {bit}"), libc::EINVAL)?,
            _ => answer.granted(&format!("bit {bit}")).map(drop)?,
        }
    }
    set_up(&guest, told).refused("no bank", libc::EINVAL)?;
    set_up(&guest, told | 33).refused("33 banks", libc::EINVAL)?;
    set_up(&guest, told | 32).granted("32 banks").map(drop)
}

fn error() -> kvm_x86_mce {
    kvm_x86_mce {
        status: VALID | UNCORRECTED | ENABLED | 1 << 58 | 0x134,
        addr: 0xabcd_e000,
        misc: 0x8c,
        bank: BANK,
        ..Default::default()
    }
}

fn give(guest: &Guest) -> Outcome {
    guest.vcpu().send(SET, &error()).granted("KVM_X86_SET_MCE").map(drop)
}

fn an_error_that_asks_for_nothing_is_logged_only() -> Outcome {
    let guest = Guest::new(Chip::Kernel, idle())?;
    set_up(&guest, CTL_P | SER_P | 8).granted("KVM_X86_SETUP_MCE")?;
    guest.reach_mark()?;
    // CR4.MCE is clear: one that asks for something would be a shutdown.
    give(&guest)?;
    guest.reach_mark()?;
    for (index, value) in [(0, error().status), (1, error().addr), (2, error().misc)] {
        equal(&format!("register {index}"), guest.vcpu().msr(STATUS + index)?, Some(value))?;
    }
    equal("exceptions", guest.faults().0, 0)
}

guest_code!(
    // RESULT: the version; RESULT + 8: faults of LVT_CMCI and MCi_CTL2. ARGUMENT is what is written to the
    // former, ARGUMENT + 8 what is written to the latter.
    cmci,
    64,
    x2apic!(),
    "mov $0x803, %ecx",
    "rdmsr",
    "mov %eax, RESULT",
    "mov $0x82f, %ecx",
    "mov ARGUMENT, %eax",
    "xor %edx, %edx",
    guarded!("wrmsr"),
    "mov $0x284, %ecx",
    "mov ARGUMENT + 8, %eax",
    guarded!("wrmsr"),
    "mov FAULTS, %rax",
    "mov %rax, RESULT + 8",
    "mov $0x82f, %ecx",
    "xor %eax, %eax",
    guarded!("rdmsr"),
    "mov %eax, RESULT + 16",
    "sti",
    "out %al, $PORT_MARK",
    "nop",
    "mov $0x411, %ecx",
    "rdmsr",
    "mov %eax, RESULT + 24",
    "mov %edx, RESULT + 28",
    done!()
);

fn cmci_guest(cap: u64, vector: u32, ctl2: u64) -> Outcome<Guest> {
    if cap & !supported()? & !0xff != 0 {
        return skip("no corrected machine-check interrupts");
    }
    let guest = Guest::new(Chip::Kernel, cmci())?;
    set_up(&guest, cap | 8).granted("KVM_X86_SETUP_MCE")?;
    guest.memory.write(ARGUMENT, vector.into());
    guest.memory.write(ARGUMENT + 8, ctl2);
    guest.reach_mark()?;
    Ok(guest)
}

fn the_local_apic_has_a_vector_more() -> Outcome {
    let guest = cmci_guest(CTL_P | CMCI_P, VECTOR.into(), CMCI_ENABLE)?;
    equal("highest vector", guest.result(0) >> 16 & 0xff, 6)?;
    equal("faults", guest.result(1), 0)?;
    equal("LVT_CMCI", guest.result(2), VECTOR.into())?;
    equal("MCi_CTL2", guest.vcpu().msr(CTL2)?, Some(CMCI_ENABLE))
}

fn without_it_there_is_no_such_vector() -> Outcome {
    let guest = cmci_guest(CTL_P, VECTOR.into(), CMCI_ENABLE)?;
    equal("highest vector", guest.result(0) >> 16 & 0xff, 5)?;
    equal("faults", guest.result(1), 2)?;
    equal("all faults", guest.faults(), (3, 13, 0))?;
    // A VMM may write zero.
    equal("zero from outside", guest.vcpu().set_msr(CTL2, 0)?, true)?;
    equal("the enable bit from outside", guest.vcpu().set_msr(CTL2, CMCI_ENABLE)?, false)
}

fn an_error_that_asks_for_nothing_interrupts() -> Outcome {
    let guest = cmci_guest(CTL_P | SER_P | CMCI_P, VECTOR.into(), CMCI_ENABLE | 1)?;
    equal("before", guest.count(VECTOR), 0)?;
    give(&guest)?;
    guest.finish()?;
    equal("interrupts", guest.count(VECTOR), 1)?;
    equal("status", guest.result(3), error().status)
}

fn a_bank_that_does_not_ask_for_it_interrupts_nobody() -> Outcome {
    let guest = cmci_guest(CTL_P | SER_P | CMCI_P, VECTOR.into(), 1)?;
    give(&guest)?;
    guest.finish()?;
    equal("interrupts", guest.count(VECTOR), 0)?;
    equal("status", guest.result(3), error().status)
}

fn a_masked_vector_interrupts_nobody() -> Outcome {
    let guest = cmci_guest(CTL_P | CMCI_P, 1 << 16 | u32::from(VECTOR), CMCI_ENABLE)?;
    give(&guest)?;
    guest.finish()?;
    equal("interrupts", guest.count(VECTOR), 0)?;
    equal("status", guest.result(3), error().status)
}

fn the_vector_is_saved_and_restored() -> Outcome {
    let guest = cmci_guest(CTL_P | CMCI_P, VECTOR.into(), CMCI_ENABLE)?;
    let saved: kvm_lapic_state = guest.vcpu().receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| saved.regs[at + n] as u8));
    equal("LVT_CMCI", word(0x2f0), VECTOR.into())?;
    equal("highest vector", word(0x30) >> 16 & 0xff, 6)?;
    let other = cmci_guest(CTL_P | CMCI_P, 1 << 16, CMCI_ENABLE)?;
    other.vcpu().send(ioctl::SET_LAPIC, &saved).granted("KVM_SET_LAPIC")?;
    give(&other)?;
    other.finish()?;
    equal("interrupts", other.count(VECTOR), 1)
}

fn local_machine_checks_need_the_firmwares_leave() -> Outcome {
    const FEATURE_CONTROL: u32 = 0x3a;
    const MCG_EXT_CTL: u32 = 0x4d0;
    const LMCE_ENABLED: u64 = 1 << 20;
    if supported()? & LMCE_P == 0 {
        return skip("no local machine checks");
    }
    let guest = Guest::new(Chip::Kernel, idle())?;
    let vcpu = guest.vcpu();
    set_up(&guest, LMCE_P | 8).granted("KVM_X86_SETUP_MCE")?;
    equal("MCG_EXT_CTL", vcpu.msr(MCG_EXT_CTL)?, Some(0))?;
    equal("more than its bit", vcpu.set_msr(MCG_EXT_CTL, 2)?, false)?;
    equal("its bit", vcpu.set_msr(MCG_EXT_CTL, 1)?, true)?;
    equal("read back", vcpu.msr(MCG_EXT_CTL)?, Some(1))?;
    equal("the firmware's leave", vcpu.set_msr(FEATURE_CONTROL, 1 | LMCE_ENABLED)?, true)?;
    holds("it is kept", vcpu.msr(FEATURE_CONTROL)? == Some(1 | LMCE_ENABLED), "another")
}
