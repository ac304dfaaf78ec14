//! The state of a guest that is a hypervisor, saved and restored: KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE
//! (KVM API §4.114, §4.115).

use kvm_bindings::{KVM_CAP_NESTED_STATE, kvm_vcpu_events};

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::{FREE, PROGRAM};
use crate::machine::memory::Memory;
use crate::machine::saved::{HEADER, LARGEST, Nested, Saved, nested, set_nested};
use crate::oracle::{self, Vendor, is_stock};
use crate::outcome::{Answer, Errno, Outcome, equal, fail, skip};
use crate::runner::tests;

use super::{nested_npt, nested_svm, nested_vmx, nested_vmx_ept};

tests!("nested_state":
    its_size_is_told_before_it_is_there,
    a_vcpu_without_a_hypervisor_has_a_state,
    a_hypervisor_is_saved_and_goes_on,
    vmx_operation_without_a_vmcs_is_a_state,
    l2_is_saved_and_goes_on_elsewhere,
    l2_on_tables_of_its_hypervisor_is_saved_and_goes_on_elsewhere,
    what_is_there_before_does_not_matter,
    a_state_that_contradicts_itself_is_refused,
    a_state_that_cannot_be_read_is_refused,
    a_state_is_taken_while_l2_runs,
    the_state_of_a_reset_ends_l2,
    events_set_while_l2_runs_are_l2s,
    events_are_given_before_the_state_or_behind_it,
    svm_an_event_of_the_state_outlives_one_of_before,
    a_mode_that_user_space_changes_ends_vmx_operation,
);

const GUEST_MODE: u16 = 1;
const RUN_PENDING: u16 = 2;
const GIF_SET: u16 = 0x100;
const VMXON: u64 = FREE;
const VMCS: u64 = FREE + 0x1000;
/// What L2 computes: sums of the first numbers.
const NUMBERS: u64 = 10;
const SUM: u64 = 8;

guest_code!(
    l2_sums,
    64,
    "mov $1, %r8d",
    "xor %r9d, %r9d",
    "1: add %r8, %r9",
    "mov %r9, RESULT + 64",
    "out %al, $PORT_MARK",
    "inc %r8",
    "cmp $11, %r8",
    "jne 1b",
    "cpuid",
    "hlt",
);

pub(super) fn is_amd() -> bool {
    oracle::vendor() == Vendor::Amd
}

/// A hypervisor whose guest computes. It has come to its first mark.
pub(super) fn hypervisor() -> Outcome<Guest> {
    let guest = if is_amd() {
        nested_svm::with(nested_svm::program(), l2_sums())?
    } else {
        nested_vmx::with(nested_vmx::program(), l2_sums())?
    };
    guest.reach_mark()?;
    Ok(guest)
}

/// The same, with tables of the hypervisor's for its guest.
pub(super) fn hypervisor_with_tables() -> Outcome<Guest> {
    if is_amd() { nested_npt::prepared(l2_sums()) } else { nested_vmx_ept::ready(l2_sums()) }
}

/// What L2 runs that computes.
pub(super) fn sums() -> &'static [u8] {
    l2_sums()
}

/// L2 goes on to its end, from the nth number on.
pub(super) fn computes(guest: &Guest, from: u64) -> Outcome {
    for number in from..=NUMBERS {
        guest.reach_mark()?;
        equal("the sum", guest.result(SUM), number * (number + 1) / 2)?;
    }
    guest.reach_mark()?;
    if is_amd() {
        equal("exit code", guest.result(0), nested_svm::EXIT_CPUID)
    } else {
        let exit = (nested_vmx::EXITED, nested_vmx::EXIT_CPUID);
        equal("exit", (guest.result(0), guest.result(1)), exit)
    }
}

/// The next run of L2 begins at its beginning.
pub(super) fn rewind(guest: &Guest) {
    if is_amd() {
        guest.memory.write(nested_svm::BLOCK + nested_svm::RIP, nested_svm::L2_CODE);
    }
}

/// L2 has come to its nth number, and L1 has heard of an earlier run of it.
pub(super) fn in_l2(guest: &Guest, number: u64) -> Outcome {
    for _ in 0..number {
        guest.reach_mark()?;
    }
    let rip = guest.vcpu().regs()?.rip;
    let code = nested_svm::L2_CODE..nested_svm::L2_CODE + 64;
    equal("L2 runs", code.contains(&rip), true)
}

fn its_size_is_told_before_it_is_there() -> Outcome {
    let guest = hypervisor()?;
    let largest = if is_amd() { HEADER + 4096 } else { LARGEST };
    equal("capability", guest.system.extension(KVM_CAP_NESTED_STATE), largest as i32)?;
    in_l2(&guest, 1)?;
    crate::machine::saved::finish_access(guest.vcpu())?;
    let whole = HEADER + 4096;
    for room in [0, 8, HEADER - 1, HEADER, whole - 1] {
        let mut state = Nested::with_room(room);
        let got = guest.vcpu().call(ioctl::GET_NESTED_STATE, state.0.as_mut_ptr() as u64);
        equal("too little room", got, Err(Errno(libc::E2BIG)))?;
        // SVM's header tells of its data only if there is room for it.
        let told = if is_amd() && room < HEADER { HEADER } else { whole };
        equal("the size", state.size(), told as u32)?;
    }
    let mut state = Nested::with_room(whole);
    let got = guest.vcpu().call(ioctl::GET_NESTED_STATE, state.0.as_mut_ptr() as u64);
    equal("room enough", got, Ok(0))?;
    equal("nowhere", guest.vcpu().call(ioctl::GET_NESTED_STATE, 0), Err(Errno(libc::EFAULT)))
}

fn a_vcpu_without_a_hypervisor_has_a_state() -> Outcome {
    let guest = Guest::new(Chip::Kernel, l2_sums())?;
    let state = nested(guest.vcpu())?;
    equal("size", state.size(), HEADER as u32)?;
    if is_amd() {
        equal("flags", state.flags(), GIF_SET)?;
        equal("block", state.0[1], 0)?;
    } else {
        equal("flags", state.flags(), 0)?;
        equal("regions", (state.0[1], state.0[2]), (u64::MAX, u64::MAX))?;
    }
    equal("given back", set_nested(guest.vcpu(), &state), Ok(0))?;
    let inside = state.with(0, &(state.flags() | GUEST_MODE).to_le_bytes());
    let inside = inside.with(4, &(LARGEST as u32).to_le_bytes());
    equal("L2 without its hypervisor", set_nested(guest.vcpu(), &inside), EINVAL)?;
    guest.reach_mark()
}

const EINVAL: Result<i32, Errno> = Err(Errno(libc::EINVAL));
const EFAULT: Result<i32, Errno> = Err(Errno(libc::EFAULT));

fn a_hypervisor_is_saved_and_goes_on() -> Outcome {
    let guest = hypervisor()?;
    for round in 0..2 {
        rewind(&guest);
        let saved = Saved::of(&guest)?;
        let state = saved.nested();
        if is_amd() {
            // Behind an exit GIF is clear.
            let gif = if round == 0 { GIF_SET } else { 0 };
            equal("flags", (state.flags(), state.size()), (gif, HEADER as u32))?;
        } else {
            equal("flags", (state.flags(), state.size()), (0, HEADER as u32 + 4096))?;
            equal("regions", (state.0[1], state.0[2]), (VMXON, VMCS))?;
        }
        for memory_last in [false, true] {
            computes(&saved.restored(memory_last)?, 1)?;
        }
        computes(&guest, 1)?;
    }
    Ok(())
}

guest_code!(
    without_current,
    64,
    nested_vmx::operation!(),
    "vmclear (%rsp)",
    "out %al, $PORT_MARK",
    "vmptrld (%rsp)",
    "pushf",
    "pop RESULT",
    done!()
);

fn vmx_operation_without_a_vmcs_is_a_state() -> Outcome {
    if is_amd() {
        return crate::outcome::skip("the CPU has no VMX");
    }
    let guest = nested_vmx::with(without_current(), &[])?;
    guest.reach_mark()?;
    let saved = Saved::of(&guest)?;
    let state = saved.nested();
    equal("flags", (state.flags(), state.size()), (0, HEADER as u32))?;
    equal("regions", (state.0[1], state.0[2]), (VMXON, u64::MAX))?;
    let other = saved.restored(true)?;
    other.finish()?;
    equal("VMPTRLD", other.result(0) & (nested_vmx::ZERO | 1), 0)
}

fn a_mode_that_user_space_changes_ends_vmx_operation() -> Outcome {
    const GIVES_SMM: u32 = 8;
    if is_amd() {
        return crate::outcome::skip("the CPU has no VMX");
    }
    let guest = nested_vmx::with(without_current(), &[])?;
    guest.reach_mark()?;
    crate::machine::saved::finish_access(guest.vcpu())?;
    let region = || Ok(crate::machine::saved::nested(guest.vcpu())?.0[1]);
    equal("before", region()?, VMXON)?;
    for smm in [1, 0] {
        let mut events: kvm_vcpu_events =
            guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")?;
        events.smi.smm = smm;
        events.flags = GIVES_SMM;
        guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
        equal("region", region()?, u64::MAX)?;
    }
    Ok(())
}

fn travels(make: fn() -> Outcome<Guest>) -> Outcome {
    for number in [1, 4, NUMBERS] {
        let guest = make()?;
        // The second run: what the hypervisor kept of the first is there.
        computes(&guest, 1)?;
        rewind(&guest);
        in_l2(&guest, number)?;
        let saved = Saved::of(&guest)?;
        let gif = if is_amd() { GIF_SET } else { 0 };
        let state = saved.nested();
        equal("flags", state.flags(), GUEST_MODE | gif)?;
        equal("size", state.size(), HEADER as u32 + 4096)?;
        for memory_last in [false, true] {
            let other = saved.restored(memory_last)?;
            equal("RIP", other.vcpu().regs()?.rip, guest.vcpu().regs()?.rip)?;
            // What is restored can be saved again.
            let again = nested(other.vcpu())?;
            equal("header", &again.0[..3], &state.0[..3])?;
            computes(&other, number + 1)?;
        }
        computes(&guest, number + 1)?;
    }
    Ok(())
}

fn l2_is_saved_and_goes_on_elsewhere() -> Outcome {
    travels(hypervisor)
}

fn l2_on_tables_of_its_hypervisor_is_saved_and_goes_on_elsewhere() -> Outcome {
    travels(hypervisor_with_tables)
}

fn what_is_there_before_does_not_matter() -> Outcome {
    let guest = hypervisor()?;
    in_l2(&guest, 3)?;
    let saved = Saved::of(&guest)?;
    // SVM asks for EFER.SVME, which is among the system registers.
    let orders: &[&[usize]] = if is_amd() {
        &[&[0, 1, 2, 3, 4, 5, 6, 7, 8], &[4, 3, 2, 0, 5, 1, 8, 7, 6], &[0, 4, 2, 7, 1, 3, 5, 6, 8]]
    } else {
        &[&[4, 3, 2, 0, 5, 1, 8, 7, 6], &[1, 0, 2, 3, 4, 5, 6, 7, 8], &[0, 1, 0, 1, 2, 3, 4, 7, 8]]
    };
    for order in orders {
        computes(&saved.restored_in(order, true)?, 4)?;
    }
    Ok(())
}

const OF_L2: &str = "guest ";

type Change = (&'static str, usize, Vec<u8>);

fn bad_of_svm(state: &Nested) -> Vec<Change> {
    let word = |at: usize| state.0[at / 8];
    let long = |value: u64| value.to_le_bytes().to_vec();
    let short = |value: u16| value.to_le_bytes().to_vec();
    let (control, save) = (HEADER, HEADER + 0x400);
    vec![
        ("another format", 2, short(0)),
        ("no header", 4, vec![127, 0, 0, 0]),
        ("no whole page", 4, vec![0x7f, 0x10, 0, 0]),
        ("a pending entry without L2", 0, short(GIF_SET | RUN_PENDING)),
        ("a flag of VMX", 0, short(GIF_SET | GUEST_MODE | 8)),
        ("a flag of nobody", 0, short(GIF_SET | GUEST_MODE | 0x200)),
        ("an address of no page", 8, long(word(8) | 8)),
        ("an address beyond memory", 8, long(!0xfff)),
        ("VMRUN is not intercepted", control + 0x10, vec![0]),
        ("ASID 0", control + 0x58, vec![0; 4]),
        ("a map beyond memory", control + 0x40, long(!0xfff)),
        ("CR0 without PG", save + 0x158, long(word(save + 0x158) & !(1 << 31))),
        ("CR0.NW without CD", save + 0x158, long(word(save + 0x158) | 1 << 29)),
        ("CR4 with a bit that does not exist", save + 0x148, long(1 << 40 | 1 << 5)),
        ("RFLAGS.VM", save + 0x170, long(1 << 17 | 2)),
        ("EFER without SVME", save + 0xd0, long(word(save + 0xd0) & !(1 << 12))),
        ("DR7's upper half", save + 0x160, long(1 << 32)),
    ]
}

fn bad_of_vmx(state: &Nested) -> Vec<Change> {
    let word = |at: usize| state.0[at / 8];
    let long = |value: u64| value.to_le_bytes().to_vec();
    let short = |value: u16| value.to_le_bytes().to_vec();
    let image = HEADER;
    vec![
        ("another format", 2, short(1)),
        ("no header", 4, vec![127, 0, 0, 0]),
        ("no VMCS", 4, vec![128, 0, 0, 0]),
        ("a pending entry without L2", 0, short(RUN_PENDING)),
        ("an enlightened VMCS", 0, short(GUEST_MODE | 4)),
        ("a flag of nobody", 0, short(GUEST_MODE | 0x200)),
        ("no VMXON region", 8, long(u64::MAX)),
        ("a VMXON region of no page", 8, long(word(8) | 8)),
        ("a VMXON region beyond memory", 8, long(1 << 60)),
        ("no current VMCS", 16, long(u64::MAX)),
        ("a VMCS of no page", 16, long(word(16) | 8)),
        ("a VMCS that is the VMXON region", 16, long(word(8))),
        ("SMM's flags outside SMM", 24, short(2)),
        ("L2 in and out of SMM", 24, short(3)),
        ("an unknown flag of SMM", 24, short(4)),
        ("an unknown flag of VMX", 28, vec![2, 0, 0, 0]),
        ("another revision", image, vec![0; 4]),
        ("pin controls", image + 744, vec![0; 4]),
        ("entry controls", image + 780, vec![0; 4]),
        ("host CR0", image + 584, long(0)),
        ("host RIP", image + 672, long(1 << 60)),
        ("guest CR3", image + 432, long(1 << 60)),
        ("guest RFLAGS", image + 552, long(0)),
        ("guest RIP", image + 544, long(1 << 60)),
        ("a link pointer of no page", image + 176, long(8)),
    ]
}

fn a_state_that_contradicts_itself_is_refused() -> Outcome {
    let guest = hypervisor()?;
    in_l2(&guest, 3)?;
    let saved = Saved::of(&guest)?;
    let good = saved.nested();
    let other = saved.restored(false)?;
    let bad = if is_amd() { bad_of_svm(&good) } else { bad_of_vmx(&good) };
    for (what, at, bytes) in bad {
        // Stock KVM leaves these to the hardware, and a bad CR3 answers with a number of its own.
        if is_stock() && what.starts_with(OF_L2) {
            continue;
        }
        equal(what, set_nested(other.vcpu(), &good.with(at, &bytes)), EINVAL)?;
        // Stock KVM has left L2 then.
        if !is_stock() {
            let now = nested(other.vcpu())?;
            equal(&format!("{what}: the state after"), now == good, true)?;
        }
    }
    if is_stock() {
        return computes(&saved.restored(false)?, 4);
    }
    computes(&other, 4)
}

fn a_state_that_cannot_be_read_is_refused() -> Outcome {
    let guest = hypervisor()?;
    in_l2(&guest, 3)?;
    let saved = Saved::of(&guest)?;
    let good = saved.nested();
    let other = saved.restored(false)?;
    let pages = Memory::new(0x4000)?;
    pages.protect(0x2000, 0x2000, libc::PROT_NONE).granted("mprotect")?;
    let at_end = |bytes: usize| 0x2000 - bytes as u64;
    let set = |at: u64| other.vcpu().call(ioctl::SET_NESTED_STATE, pages.hva() + at);
    pages.write_bytes(at_end(64), &good.bytes()[..64]);
    equal("half a header", set(at_end(64)), EFAULT)?;
    pages.write_bytes(at_end(HEADER), &good.bytes()[..HEADER]);
    equal("no data", set(at_end(HEADER)), EFAULT)?;
    // What the header says is looked at first.
    pages.write_bytes(at_end(HEADER), &good.with(2, &[9]).bytes()[..HEADER]);
    equal("another format, and no data", set(at_end(HEADER)), EINVAL)?;
    let unaligned = good.with(8, &[1]);
    pages.write_bytes(at_end(HEADER), &unaligned.bytes()[..HEADER]);
    equal("no address, and no data", set(at_end(HEADER)), EINVAL)?;
    if is_stock() {
        return computes(&saved.restored(false)?, 4);
    }
    computes(&other, 4)
}

fn a_state_is_taken_while_l2_runs() -> Outcome {
    let guest = hypervisor()?;
    in_l2(&guest, 2)?;
    let saved = Saved::of(&guest)?;
    equal("again", set_nested(guest.vcpu(), &saved.nested()), Ok(0))?;
    in_l2(&guest, 1)?;
    crate::machine::saved::finish_access(guest.vcpu())?;
    let state = nested(guest.vcpu())?;
    let flags = state.flags();
    equal("flags", flags & GUEST_MODE, GUEST_MODE)?;
    equal("its own", set_nested(guest.vcpu(), &state), Ok(0))?;
    computes(&guest, 4)?;
    // An entry that is still to come comes.
    let pending = saved.nested();
    let pending = pending.with(0, &(flags | RUN_PENDING).to_le_bytes());
    let mut saved = saved;
    saved.set_nested(&pending);
    computes(&saved.restored(false)?, 3)
}

fn restart(vcpu: &Vcpu, sregs: &kvm_bindings::kvm_sregs) -> Outcome {
    let mut sregs = *sregs;
    if !is_amd() {
        sregs.cr4 &= !(1 << 13);
    }
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.regs()?;
    regs.rip = PROGRAM;
    regs.rsp = crate::machine::layout::STACKS + 0x1000;
    vcpu.set_regs(&regs)
}

fn the_state_of_a_reset_ends_l2() -> Outcome {
    if is_stock() && !oracle::tdp() {
        return skip("under stock KVM's shadow paging L1 does not go on after it");
    }
    let guest = hypervisor()?;
    let sregs = guest.vcpu().sregs()?;
    in_l2(&guest, 3)?;
    crate::machine::saved::finish_access(guest.vcpu())?;
    let mut reset = Nested::with_room(HEADER);
    if is_amd() {
        reset.put(0, &GIF_SET.to_le_bytes());
        reset.put(2, &[1]);
    } else {
        reset.0[1] = u64::MAX;
        reset.0[2] = u64::MAX;
    }
    equal("reset", set_nested(guest.vcpu(), &reset), Ok(0))?;
    let state = nested(guest.vcpu())?;
    equal("state", &state.0[..3], &reset.0[..3])?;
    restart(guest.vcpu(), &sregs)?;
    guest.reach_mark()?;
    computes(&guest, 1)
}

fn events_set_while_l2_runs_are_l2s() -> Outcome {
    let guest = hypervisor()?;
    in_l2(&guest, 3)?;
    crate::machine::saved::finish_access(guest.vcpu())?;
    let get = || -> Outcome<kvm_vcpu_events> {
        guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")
    };
    let mut events = get()?;
    // An interrupt is delivered to who takes interrupts.
    let mut regs = guest.vcpu().regs()?;
    regs.rflags |= 1 << 9;
    guest.vcpu().set_regs(&regs)?;
    events.interrupt.injected = 1;
    events.interrupt.nr = 0x58;
    guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
    let saved = Saved::as_it_is(&guest)?;
    equal("injected", (get()?.interrupt.injected, get()?.interrupt.nr), (1, 0x58))?;
    for guest in [&saved.restored(false)?, &guest] {
        computes(guest, 4)?;
        guest.came(0x58, 1)?;
    }
    Ok(())
}

/// The events of a vCPU with this interrupt injected; 0: none.
fn injecting(guest: &Guest, vector: u8) -> Outcome<kvm_vcpu_events> {
    let mut events: kvm_vcpu_events =
        guest.vcpu().receive(ioctl::GET_VCPU_EVENTS).granted("KVM_GET_VCPU_EVENTS")?;
    (events.interrupt.injected, events.interrupt.nr) = (u8::from(vector != 0), vector);
    Ok(events)
}

/// A guest whose L2 runs and takes interrupts, with its state.
fn l2_with_interrupts() -> Outcome<(Guest, Nested)> {
    let guest = hypervisor()?;
    in_l2(&guest, 3)?;
    crate::machine::saved::finish_access(guest.vcpu())?;
    let mut regs = guest.vcpu().regs()?;
    regs.rflags |= 1 << 9;
    guest.vcpu().set_regs(&regs)?;
    let state = nested(guest.vcpu())?;
    Ok((guest, state))
}

fn events_are_given_before_the_state_or_behind_it() -> Outcome {
    for state_first in [true, false] {
        if !state_first && is_stock() && !is_amd() {
            return skip("stock KVM forgets them with the L2 that it leaves");
        }
        let (guest, state) = l2_with_interrupts()?;
        let events = injecting(&guest, 0x58)?;
        if state_first {
            equal("state", set_nested(guest.vcpu(), &state), Ok(0))?;
        }
        guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
        if !state_first {
            equal("state", set_nested(guest.vcpu(), &state), Ok(0))?;
        }
        computes(&guest, 4)?;
        guest.came(0x58, 1)?;
    }
    Ok(())
}

fn svm_an_event_of_the_state_outlives_one_of_before() -> Outcome {
    const EVENTINJ: usize = HEADER + 0xa8;
    const VALID: u64 = 1 << 31;
    if !is_amd() {
        return skip("not SVM");
    }
    for state_first in [true, false] {
        let (guest, state) = l2_with_interrupts()?;
        let state = state.with(EVENTINJ, &(VALID | 0x58).to_le_bytes());
        let state = state.with(0, &(state.flags() | RUN_PENDING).to_le_bytes());
        let (old, none) = (injecting(&guest, 0x59)?, injecting(&guest, 0)?);
        guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &old).granted("KVM_SET_VCPU_EVENTS")?;
        if state_first {
            equal("state", set_nested(guest.vcpu(), &state), Ok(0))?;
        }
        guest.vcpu().send(ioctl::SET_VCPU_EVENTS, &none).granted("KVM_SET_VCPU_EVENTS")?;
        if !state_first {
            equal("state", set_nested(guest.vcpu(), &state), Ok(0))?;
        }
        computes(&guest, 4)?;
        guest.came(0x58, 1)?;
        guest.came(0x59, 0)?;
    }
    Ok(())
}

/// For `--save`: saves two guests whose guests run, one on tables of its hypervisor's.
pub fn save(path: &str) -> Outcome {
    for (name, make) in GUESTS {
        let guest = make()?;
        computes(&guest, 1)?;
        rewind(&guest);
        in_l2(&guest, 4)?;
        let bytes = Saved::of(&guest)?.to_bytes();
        if let Err(error) = std::fs::write(format!("{path}.{name}"), bytes) {
            return fail(format!("{path}.{name}: {error}"));
        }
    }
    Ok(())
}

/// For `--resume`: what was saved goes on to its end.
pub fn resume(path: &str) -> Outcome {
    for (name, _) in GUESTS {
        let bytes = std::fs::read(format!("{path}.{name}"));
        let saved = bytes.ok().as_deref().and_then(Saved::from_bytes);
        let Some(saved) = saved else { return fail(format!("{path}.{name} is no guest")) };
        let guest = saved.restored(false)?;
        equal(name, nested(guest.vcpu())?.flags() & GUEST_MODE, GUEST_MODE)?;
        computes(&guest, 5)?;
        // The hypervisor goes on, too.
        rewind(&guest);
        computes(&guest, 1)?;
    }
    Ok(())
}

type Maker = fn() -> Outcome<Guest>;
const GUESTS: [(&str, Maker); 2] = [("plain", hypervisor), ("tables", hypervisor_with_tables)];
