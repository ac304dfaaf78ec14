//! What lies behind a slot: memory that is shared, that a file has, that the kernel itself cannot reach, that is taken for
//! clean and reclaimed; and who pays for the tables over it.

use std::os::fd::{AsRawFd, OwnedFd};

use kvm_bindings::*;

use super::lifecycle::leaves_nothing;
use crate::kvm::file::own;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::{Memory, PAGE};
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("backing":
    pages_of_a_shared_mapping_are_given_back,
    pages_of_a_file_that_is_mapped_privately_are_given_back,
    what_a_guest_writes_into_a_shared_page_outlives_its_reclaim,
    memory_that_the_kernel_cannot_reach_is_efault,
    tables_are_charged_to_the_vmms_control_group,
    what_a_slot_takes_is_charged_to_the_vmms_control_group,
);

const ELSEWHERE: u64 = 0x4000_0000;
/// Of the mappings: so many that a reference lost to each page is more than a debug kernel keeps of what was freed.
const BYTES: u64 = 4 << 20;

guest_code!(
    // Reads a word at every ARGUMENT + 16 bytes of [ARGUMENT, ARGUMENT + 8), then adds 1 to each.
    read_and_write,
    64,
    "mov ARGUMENT + 16, %rdx",
    "mov ARGUMENT, %rbx",
    "0: mov (%rbx), %rax",
    "add %rdx, %rbx",
    "cmp ARGUMENT + 8, %rbx",
    "jb 0b",
    "mov ARGUMENT, %rbx",
    "1: incq (%rbx)",
    "add %rdx, %rbx",
    "cmp ARGUMENT + 8, %rbx",
    "jb 1b",
    done!()
);

/// A guest over `memory` that will read and write a word of it every `stride` bytes.
fn reader_and_writer(memory: &Memory, stride: u64) -> Outcome<Guest> {
    let guest = Guest::new(Chip::None, read_and_write())?;
    guest.vm.set_slot(1, 0, ELSEWHERE, memory.bytes(), memory.hva()).granted("slot")?;
    guest.memory.write(ARGUMENT, ELSEWHERE);
    guest.memory.write(ARGUMENT + 8, ELSEWHERE + memory.bytes());
    guest.memory.write(ARGUMENT + 16, stride);
    Ok(guest)
}

/// A file that is memory and nothing else, full of zeroes.
fn memory_file(bytes: u64) -> Outcome<OwnedFd> {
    // SAFETY: a string of ours.
    let fd = unsafe { libc::memfd_create(c"labtests".as_ptr(), libc::MFD_CLOEXEC) };
    sized(fd, "memfd_create", bytes)
}

/// The descriptor of a new file, with a size, or the reason why there is none.
fn sized(fd: i32, what: &str, bytes: u64) -> Outcome<OwnedFd> {
    if fd < 0 {
        return skip(format!("{what}: {}", Errno::last()));
    }
    let fd = own(fd);
    // SAFETY: plain numbers.
    match unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } {
        0 => Ok(fd),
        _ => fail(format!("ftruncate: {}", Errno::last())),
    }
}

fn pages_of_a_shared_mapping_are_given_back() -> Outcome {
    leaves_nothing(BYTES as i64 / 2048, || {
        let memory = Memory::of_descriptor(&memory_file(BYTES)?, libc::MAP_SHARED, BYTES)?;
        reader_and_writer(&memory, PAGE)?.finish()?;
        equal("what the guest wrote", memory.read(BYTES - PAGE), 1)
    })
}

fn pages_of_a_file_that_is_mapped_privately_are_given_back() -> Outcome {
    leaves_nothing(BYTES as i64 / 2048, || {
        let file = memory_file(BYTES)?;
        let shared = Memory::of_descriptor(&file, libc::MAP_SHARED, BYTES)?;
        (0..BYTES / PAGE).for_each(|page| shared.write(page * PAGE, 6));
        // Read, they are the file's own; written, copies of it.
        let memory = Memory::of_descriptor(&file, libc::MAP_PRIVATE, BYTES)?;
        reader_and_writer(&memory, PAGE)?.finish()?;
        equal("what the guest wrote", memory.read(BYTES - PAGE), 7)?;
        equal("what the file has", shared.read(BYTES - PAGE), 6)
    })
}

fn what_a_guest_writes_into_a_shared_page_outlives_its_reclaim() -> Outcome {
    // The guest reads first, so that its pages become writable by faults that were no writes: nothing but who maps them
    // tells the host that they may be written. A page that is taken for clean is thrown away.
    for touched in [false, true] {
        let memory = Memory::of_descriptor(&memory_file(BYTES)?, libc::MAP_SHARED, BYTES)?;
        if touched {
            // Then the host has them all, and the guest's first fault maps its neighbours along.
            (0..BYTES / PAGE).for_each(|page| _ = memory.read(page * PAGE));
        }
        let guest = reader_and_writer(&memory, PAGE)?;
        guest.finish()?;
        if memory.advise(0, BYTES, libc::MADV_PAGEOUT).is_err() {
            return skip("no MADV_PAGEOUT");
        }
        let written = (0..BYTES / PAGE).filter(|page| memory.read(page * PAGE) == 1).count();
        equal("pages that have what the guest wrote", written as u64, BYTES / PAGE)?;
        guest.place(0, Mode::Long)?;
        guest.finish()?;
        equal("after the second time", memory.read(BYTES - PAGE), 2)?;
    }
    Ok(())
}

/// Memory of this process alone: the kernel's own map has it not.
fn secret_memory(bytes: u64) -> Outcome<Memory> {
    // SAFETY: plain numbers.
    let fd = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) } as i32;
    Memory::of_descriptor(&sized(fd, "memfd_secret", bytes)?, libc::MAP_SHARED, bytes)
}

fn memory_that_the_kernel_cannot_reach_is_efault() -> Outcome {
    let memory = secret_memory(4 * PAGE)?;
    // There before anybody asks for it: the host's page table alone does not tell what it is.
    (0..4).for_each(|page| memory.write(page * PAGE, 7));
    let guest = reader_and_writer(&memory, PAGE)?;
    guest.vcpu().run().refused("a load", libc::EFAULT)?;
    guest.vcpu().run().refused("the load again", libc::EFAULT)?;
    let regs = guest.vcpu().regs()?;
    guest.vcpu().set_regs(&kvm_regs { rip: ELSEWHERE, ..regs })?;
    guest.vcpu().run().refused("a fetch", libc::EFAULT)?;
    equal("memory", (memory.read(0), memory.read(3 * PAGE)), (7, 7))
}

/// A control group that this process is in, with an account of its memory.
struct Group(&'static str);

impl Group {
    const MOUNT: &str = "/tmp/labtests-cgroup";

    fn enter() -> Outcome<Self> {
        let _ = std::fs::create_dir(Self::MOUNT);
        let mount = std::ffi::CString::new(Self::MOUNT).unwrap_or_default();
        let kind = c"cgroup2".as_ptr();
        // SAFETY: strings of ours.
        let mounted = unsafe { libc::mount(kind, mount.as_ptr(), kind, 0, std::ptr::null()) };
        if mounted != 0 && Errno::last() != Errno(libc::EBUSY) {
            return skip(format!("no control groups: {}", Errno::last()));
        }
        if std::fs::write(format!("{}/cgroup.subtree_control", Self::MOUNT), "+memory").is_err() {
            return skip("no control groups for memory");
        }
        let group = Self("/tmp/labtests-cgroup/vmm");
        let _ = std::fs::create_dir(group.0);
        match std::fs::write(format!("{}/cgroup.procs", group.0), "0") {
            Ok(()) => Ok(group),
            Err(error) => fail(format!("entering a control group: {error}")),
        }
    }

    /// How much more memory the group has after `work`, in bytes.
    fn grows_by(&self, work: impl FnOnce() -> Outcome) -> Outcome<i64> {
        let path = format!("{}/memory.current", self.0);
        let current = || {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            text.trim().parse::<i64>().or_else(|_| fail(format!("{path} says {text:?}")))
        };
        let before = current()?;
        work()?;
        Ok(current()? - before)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::write(format!("{}/cgroup.procs", Self::MOUNT), "0");
        let _ = std::fs::remove_dir(self.0);
    }
}

fn tables_are_charged_to_the_vmms_control_group() -> Outcome {
    const BYTES: u64 = 1 << 30;
    /// What one table of small pages reaches.
    const REACH: u64 = 2 << 20;
    let memory = Memory::aligned(BYTES)?;
    let _ = memory.advise(0, BYTES, libc::MADV_NOHUGEPAGE);
    // The pages themselves, and the host's own tables, before the group is asked.
    (0..BYTES / REACH).for_each(|n| memory.write(n * REACH, 0));
    let guest = reader_and_writer(&memory, REACH)?;
    let group = Group::enter()?;
    let growth = group.grows_by(|| guest.finish())?;
    let tables = (BYTES / REACH * PAGE) as i64;
    // The account is kept in portions.
    let expected = format!("{tables} bytes of tables in the account");
    holds(&expected, growth >= tables / 4 * 3, growth)
}

fn what_a_slot_takes_is_charged_to_the_vmms_control_group() -> Outcome {
    const BYTES: u64 = 16 << 30;
    let memory = Memory::new(BYTES)?;
    let guest = Guest::new(Chip::None, read_and_write())?;
    let group = Group::enter()?;
    let growth = group.grows_by(|| {
        let flags = KVM_MEM_LOG_DIRTY_PAGES;
        guest.vm.set_slot(1, flags, ELSEWHERE, BYTES, memory.hva()).granted("slot").map(drop)
    })?;
    let log = (BYTES / PAGE / 8) as i64;
    holds(&format!("{log} bytes of a dirty log in the account"), growth >= log / 4 * 3, growth)
}
