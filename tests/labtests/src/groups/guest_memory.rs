//! A guest over its memory slots: what it reads and writes while they come, go and move, while the
//! host takes pages away, and what the dirty log says (KVM API §4.35, §4.8).

use std::time::Duration;

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::{Memory, PAGE};
use crate::machine::threads::{eventually, within};
use crate::outcome::{Answer, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("guest_memory":
    a_guest_reads_and_writes_its_memory,
    reading_where_no_slot_is_leaves_to_user_space,
    a_new_slot_is_seen_by_a_guest_that_was_there_before,
    a_deleted_slot_is_gone_for_the_guest,
    a_moved_slot_is_at_its_new_place_only,
    a_new_slot_over_other_memory_shows_that_memory,
    a_write_to_a_read_only_slot_leaves_to_user_space,
    a_read_only_slot_executes,
    the_dirty_log_names_exactly_the_written_pages,
    reading_untouched_pages_leaves_no_trace_in_the_dirty_log,
    the_dirty_log_begins_anew_when_it_has_been_read,
    a_dirty_log_switched_on_late_sees_later_writes,
    more_pages_than_a_cpu_logs_by_itself_are_all_in_the_dirty_log,
    a_dirty_log_switched_on_late_splits_large_pages,
    madvise_gives_the_guest_a_new_zero_page,
    madvise_while_the_guest_runs_gives_it_a_new_zero_page,
    mprotect_makes_the_guests_write_fail_with_efault,
    a_guest_in_unmapped_memory_gets_efault_and_goes_on_when_it_is_back,
    memory_mapped_anew_is_seen_by_the_guest,
    a_forked_child_does_not_see_the_guests_later_writes,
    transparent_huge_pages_work,
    hugetlbfs_pages_work,
    many_faults_of_two_vcpus_in_parallel,
    memory_above_4_gib_works,
);

guest_code!(
    // Waits for an order, obeys, waits: ARGUMENT is an address, +8 a value, +16 whether to write.
    obedient,
    64,
    "0:",
    "out %al, $PORT_MARK",
    "mov ARGUMENT, %rbx",
    "cmpq $0, ARGUMENT + 16",
    "jne 1f",
    "mov (%rbx), %rax",
    "mov %rax, RESULT",
    "jmp 0b",
    "1:",
    "mov ARGUMENT + 8, %rax",
    "mov %rax, (%rbx)",
    "jmp 0b",
);

/// A guest that obeys, with memory of its own up to [`MEMORY_BYTES`].
fn obedient_guest() -> Outcome<Guest> {
    let guest = Guest::new(Chip::None, obedient())?;
    guest.reach_mark()?;
    Ok(guest)
}

/// Runs the guest's load of 8 bytes up to its end, or up to whatever ends it.
fn load(guest: &Guest, gpa: u64) -> Outcome<Exit> {
    guest.memory.write(ARGUMENT, gpa);
    guest.memory.write(ARGUMENT + 16, 0);
    guest.exit()
}

/// Runs the guest's store of 8 bytes up to its end, or up to whatever ends it.
fn store(guest: &Guest, gpa: u64, value: u64) -> Outcome<Exit> {
    guest.memory.write(ARGUMENT, gpa);
    guest.memory.write(ARGUMENT + 8, value);
    guest.memory.write(ARGUMENT + 16, 1);
    guest.exit()
}

/// A load from memory; its value.
fn loaded(guest: &Guest, gpa: u64) -> Outcome<u64> {
    match load(guest, gpa)? {
        exit if exit.is_out(PORT_MARK) => Ok(guest.result(0)),
        exit => fail(format!("load from {gpa:#x}: expected memory got {exit:x?}")),
    }
}

/// A store to memory.
fn stored(guest: &Guest, gpa: u64, value: u64) -> Outcome {
    match store(guest, gpa, value)? {
        exit if exit.is_out(PORT_MARK) => Ok(()),
        exit => fail(format!("store to {gpa:#x}: expected memory got {exit:x?}")),
    }
}

/// A load from where no memory is, answered with `value`.
fn loaded_from_nothing(guest: &Guest, gpa: u64, value: u64) -> Outcome {
    equal("exit", load(guest, gpa)?, Exit::mmio(false, gpa, &[0; 8]))?;
    guest.vcpu().answer(&value.to_le_bytes());
    guest.reach_mark()?;
    equal("what was answered", guest.result(0), value)
}

const ELSEWHERE: u64 = 0x4000_0000;

fn a_guest_reads_and_writes_its_memory() -> Outcome {
    let guest = obedient_guest()?;
    guest.memory.write(FREE, 0x1122_3344_5566_7788);
    equal("load", loaded(&guest, FREE)?, 0x1122_3344_5566_7788)?;
    stored(&guest, FREE + 0x8000, 42)?;
    equal("store", guest.memory.read(FREE + 0x8000), 42)
}

fn reading_where_no_slot_is_leaves_to_user_space() -> Outcome {
    let guest = obedient_guest()?;
    loaded_from_nothing(&guest, ELSEWHERE, 0xfeed_f00d_dead_beef)?;
    loaded_from_nothing(&guest, ELSEWHERE, 7)?;
    let exit = store(&guest, ELSEWHERE + 8, 0x0102_0304_0506_0708)?;
    equal("store", exit, Exit::mmio(true, ELSEWHERE + 8, &[8, 7, 6, 5, 4, 3, 2, 1]))?;
    guest.reach_mark()
}

fn a_new_slot_is_seen_by_a_guest_that_was_there_before() -> Outcome {
    let guest = obedient_guest()?;
    loaded_from_nothing(&guest, ELSEWHERE, 1)?;
    let memory = Memory::new(PAGE)?;
    memory.write(0, 99);
    guest.vm.set_slot(1, 0, ELSEWHERE, PAGE, memory.hva()).granted("slot")?;
    equal("load", loaded(&guest, ELSEWHERE)?, 99)
}

fn a_deleted_slot_is_gone_for_the_guest() -> Outcome {
    let guest = obedient_guest()?;
    let memory = Memory::new(PAGE)?;
    guest.vm.set_slot(1, 0, ELSEWHERE, PAGE, memory.hva()).granted("slot")?;
    stored(&guest, ELSEWHERE, 5)?;
    guest.vm.set_slot(1, 0, ELSEWHERE, 0, memory.hva()).granted("delete")?;
    loaded_from_nothing(&guest, ELSEWHERE, 6)?;
    equal("what it wrote before", memory.read(0), 5)
}

fn a_moved_slot_is_at_its_new_place_only() -> Outcome {
    let guest = obedient_guest()?;
    let memory = Memory::new(2 * PAGE)?;
    guest.vm.set_slot(1, 0, ELSEWHERE, 2 * PAGE, memory.hva()).granted("slot")?;
    stored(&guest, ELSEWHERE + PAGE, 5)?;
    let place = ELSEWHERE + PAGE;
    guest.vm.set_slot(1, 0, place, 2 * PAGE, memory.hva()).granted("move")?;
    equal("at the new place", loaded(&guest, place + PAGE)?, 5)?;
    equal("where the old place overlaps", loaded(&guest, place)?, 0)?;
    loaded_from_nothing(&guest, ELSEWHERE, 1)
}

fn a_new_slot_over_other_memory_shows_that_memory() -> Outcome {
    let guest = obedient_guest()?;
    let (first, second) = (Memory::new(PAGE)?, Memory::new(PAGE)?);
    first.write(0, 1);
    second.write(0, 2);
    for round in 0..8 {
        let (memory, value) = if round % 2 == 0 { (&first, 1) } else { (&second, 2) };
        guest.vm.set_slot(1, 0, ELSEWHERE, PAGE, memory.hva()).granted("slot")?;
        equal("load", loaded(&guest, ELSEWHERE)?, value)?;
        guest.vm.set_slot(1, 0, ELSEWHERE, 0, 0).granted("delete")?;
    }
    Ok(())
}

fn a_write_to_a_read_only_slot_leaves_to_user_space() -> Outcome {
    let guest = obedient_guest()?;
    let memory = Memory::new(PAGE)?;
    memory.write(16, 3);
    guest.vm.set_slot(1, KVM_MEM_READONLY, ELSEWHERE, PAGE, memory.hva()).granted("slot")?;
    equal("load before", loaded(&guest, ELSEWHERE + 16)?, 3)?;
    let exit = store(&guest, ELSEWHERE + 16, 0xff)?;
    equal("store", exit, Exit::mmio(true, ELSEWHERE + 16, &[0xff, 0, 0, 0, 0, 0, 0, 0]))?;
    guest.reach_mark()?;
    equal("memory", memory.read(16), 3)?;
    equal("load after", loaded(&guest, ELSEWHERE + 16)?, 3)
}

guest_code!(
    call_elsewhere,
    64,
    "mov $0x40000000, %eax",
    "call *%rax",
    "mov %rax, RESULT",
    "out %al, $PORT_DONE",
);
guest_code!(answer_77, 64, "mov $77, %eax", "ret");

fn a_read_only_slot_executes() -> Outcome {
    let guest = Guest::new(Chip::None, call_elsewhere())?;
    let memory = Memory::new(PAGE)?;
    memory.write_bytes(0, answer_77());
    guest.vm.set_slot(1, KVM_MEM_READONLY, ELSEWHERE, PAGE, memory.hva()).granted("slot")?;
    guest.finish()?;
    equal("what it returned", guest.result(0), 77)
}

const LOGGED: u32 = KVM_MEM_LOG_DIRTY_PAGES;

/// The dirty log of slot 1, 128 pages of it.
fn dirty_pages(guest: &Guest) -> Outcome<Vec<usize>> {
    dirty_pages_of(guest, 128)
}

/// The dirty log of slot 1, which has so many pages.
fn dirty_pages_of(guest: &Guest, pages: usize) -> Outcome<Vec<usize>> {
    let mut bitmap = vec![0_u64; pages.div_ceil(64)];
    let mut log = kvm_dirty_log { slot: 1, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
    guest.vm.send(ioctl::GET_DIRTY_LOG, &log).granted("KVM_GET_DIRTY_LOG")?;
    Ok((0..pages).filter(|&page| bitmap[page / 64] >> (page % 64) & 1 != 0).collect())
}

fn logged_guest(flags: u32) -> Outcome<(Guest, Memory)> {
    let guest = obedient_guest()?;
    let memory = Memory::new(128 * PAGE)?;
    guest.vm.set_slot(1, flags, ELSEWHERE, 128 * PAGE, memory.hva()).granted("slot")?;
    Ok((guest, memory))
}

fn the_dirty_log_names_exactly_the_written_pages() -> Outcome {
    let (guest, _memory) = logged_guest(LOGGED)?;
    for page in [0, 3, 63, 64, 127] {
        stored(&guest, ELSEWHERE + page * PAGE + 8, page)?;
    }
    // Over the border of two pages.
    stored(&guest, ELSEWHERE + 101 * PAGE - 4, u64::MAX)?;
    equal("log", dirty_pages(&guest)?, vec![0, 3, 63, 64, 100, 101, 127])
}

fn reading_untouched_pages_leaves_no_trace_in_the_dirty_log() -> Outcome {
    // Of pages that nobody wrote: one that the host has written may be mapped writable at once, and
    // then counts as written.
    let (guest, _memory) = logged_guest(LOGGED)?;
    for page in 0..16 {
        loaded(&guest, ELSEWHERE + page * PAGE)?;
    }
    equal("log", dirty_pages(&guest)?, vec![])?;
    stored(&guest, ELSEWHERE + 5 * PAGE, 1)?;
    equal("log after a write", dirty_pages(&guest)?, vec![5])
}

fn the_dirty_log_begins_anew_when_it_has_been_read() -> Outcome {
    let (guest, _memory) = logged_guest(LOGGED)?;
    for round in 0..4 {
        stored(&guest, ELSEWHERE + 9 * PAGE, round)?;
        stored(&guest, ELSEWHERE + (20 + round) * PAGE, round)?;
        equal("log", dirty_pages(&guest)?, vec![9, 20 + round as usize])?;
        equal("log of nothing", dirty_pages(&guest)?, vec![])?;
    }
    Ok(())
}

fn a_dirty_log_switched_on_late_sees_later_writes() -> Outcome {
    let (guest, memory) = logged_guest(0)?;
    for page in 0..128 {
        stored(&guest, ELSEWHERE + page * PAGE, page)?;
    }
    guest.vm.set_slot(1, LOGGED, ELSEWHERE, 128 * PAGE, memory.hva()).granted("log on")?;
    stored(&guest, ELSEWHERE + 77 * PAGE, 1)?;
    equal("log", dirty_pages(&guest)?, vec![77])?;
    guest.vm.set_slot(1, 0, ELSEWHERE, 128 * PAGE, memory.hva()).granted("log off")?;
    stored(&guest, ELSEWHERE + 78 * PAGE, 1)?;
    equal("memory", memory.read(78 * PAGE), 1)
}

fn madvise_gives_the_guest_a_new_zero_page() -> Outcome {
    let guest = obedient_guest()?;
    for round in 1..8 {
        stored(&guest, FREE, round)?;
        equal("load", loaded(&guest, FREE)?, round)?;
        guest.memory.advise(FREE, PAGE, libc::MADV_DONTNEED).granted("madvise")?;
        equal("load after madvise", loaded(&guest, FREE)?, 0)?;
        guest.memory.write(FREE, 100 + round);
        equal("load of the host's write", loaded(&guest, FREE)?, 100 + round)?;
    }
    Ok(())
}

guest_code!(
    // Counts in RESULT while FREE holds what it was set to; then ends.
    watch,
    64,
    "sti",
    "movq $1, FREE",
    "0:",
    "incq RESULT",
    "cmpq $1, FREE",
    "je 0b",
    "out %al, $PORT_DONE",
);

fn madvise_while_the_guest_runs_gives_it_a_new_zero_page() -> Outcome {
    let guest = Guest::new(Chip::None, watch())?;
    std::thread::scope(|scope| {
        let run = scope.spawn(|| guest.finish());
        eventually("the guest runs", || guest.result(0) > 100)?;
        guest.memory.advise(FREE, PAGE, libc::MADV_DONTNEED).granted("madvise")?;
        eventually("the guest sees the new page", || run.is_finished())?;
        run.join().unwrap_or_else(|_| fail("the thread died"))
    })
}

fn mprotect_makes_the_guests_write_fail_with_efault() -> Outcome {
    let guest = obedient_guest()?;
    stored(&guest, FREE, 1)?;
    guest.memory.protect(FREE, PAGE, libc::PROT_READ).granted("mprotect")?;
    equal("load", loaded(&guest, FREE)?, 1)?;
    guest.memory.write(ARGUMENT + 8, 2);
    guest.memory.write(ARGUMENT + 16, 1);
    guest.vcpu().run().refused("KVM_RUN", libc::EFAULT)?;
    equal("memory", guest.memory.read(FREE), 1)?;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    guest.memory.protect(FREE, PAGE, both).granted("mprotect back")?;
    guest.reach_mark()?;
    equal("memory at last", guest.memory.read(FREE), 2)
}

fn a_guest_in_unmapped_memory_gets_efault_and_goes_on_when_it_is_back() -> Outcome {
    let guest = obedient_guest()?;
    stored(&guest, FREE, 1)?;
    guest.memory.protect(FREE, PAGE, libc::PROT_NONE).granted("mprotect")?;
    guest.memory.write(ARGUMENT + 16, 0);
    guest.vcpu().run().refused("KVM_RUN", libc::EFAULT)?;
    guest.vcpu().run().refused("KVM_RUN again", libc::EFAULT)?;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    guest.memory.protect(FREE, PAGE, both).granted("mprotect back")?;
    guest.reach_mark()?;
    equal("load", guest.result(0), 1)?;
    // For good.
    guest.memory.unmap(FREE, PAGE);
    guest.memory.write(ARGUMENT + 16, 0);
    guest.vcpu().run().refused("KVM_RUN over a hole", libc::EFAULT)
}

fn memory_mapped_anew_is_seen_by_the_guest() -> Outcome {
    let guest = obedient_guest()?;
    stored(&guest, FREE, 1)?;
    let place = guest.memory.hva() + FREE;
    // SAFETY: replaces a page of the guest's memory, which is ours.
    let mapped = unsafe {
        libc::mmap(
            place as *mut _,
            PAGE as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    equal("where", mapped as u64, place)?;
    guest.memory.write(FREE, 44);
    equal("load", loaded(&guest, FREE)?, 44)
}

fn a_forked_child_does_not_see_the_guests_later_writes() -> Outcome {
    let guest = obedient_guest()?;
    stored(&guest, FREE, 1)?;
    // Copy on write: the fork makes the page read-only under the guest; its write then must not
    // reach the page that the child has kept.
    let mut ends = [0; 2];
    // SAFETY: room for both.
    unsafe { libc::pipe(ends.as_mut_ptr()) };
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut byte = 0_u8;
        // SAFETY: plain system calls; the child ends here.
        unsafe {
            libc::close(ends[1]);
            libc::read(ends[0], (&raw mut byte).cast(), 1);
            libc::_exit(guest.memory.read(FREE) as i32);
        }
    }
    stored(&guest, FREE, 2)?;
    equal("here", guest.memory.read(FREE), 2)?;
    // SAFETY: our own end; the child's read then returns.
    unsafe { libc::close(ends[1]) };
    match crate::runner::await_end(child, Duration::from_secs(5)) {
        Some(status) => equal("in the child", libc::WEXITSTATUS(status), 1),
        None => fail("the child did not end"),
    }
}

guest_code!(
    // Writes to every page of [ARGUMENT, ARGUMENT + 8) its own number, and checks them after.
    sweep,
    64,
    "mov ARGUMENT, %rbx",
    "mov ARGUMENT + 8, %rcx",
    "0: mov %rbx, (%rbx)",
    "add $4096, %rbx",
    "cmp %rcx, %rbx",
    "jb 0b",
    "mov ARGUMENT, %rbx",
    "1: cmp %rbx, (%rbx)",
    "jne 2f",
    "add $4096, %rbx",
    "cmp %rcx, %rbx",
    "jb 1b",
    "out %al, $PORT_DONE",
    "2: mov %rbx, RESULT",
    "out %al, $PORT_FAULT",
);

/// Sweeps a guest over `memory` at a gpa that is a multiple of 2 MiB.
fn sweep_over(memory: &Memory, split: bool) -> Outcome {
    let guest = Guest::new(Chip::None, sweep())?;
    guest.vm.set_slot(1, 0, ELSEWHERE, memory.bytes(), memory.hva()).granted("slot")?;
    guest.memory.write(ARGUMENT, ELSEWHERE);
    guest.memory.write(ARGUMENT + 8, ELSEWHERE + memory.bytes());
    guest.finish()?;
    for page in (0..memory.bytes()).step_by(PAGE as usize) {
        equal("memory", memory.read(page), ELSEWHERE + page)?;
    }
    if split {
        // One small page of a large one goes away.
        memory.advise(5 * PAGE, PAGE, libc::MADV_DONTNEED).granted("madvise")?;
        guest.place(0, Mode::Long)?;
        guest.finish()?;
        equal("memory", memory.read(5 * PAGE), ELSEWHERE + 5 * PAGE)?;
    }
    Ok(())
}

/// The guest sweeps over the first `pages` pages of slot 1.
fn swept(guest: &Guest, pages: usize) -> Outcome {
    guest.place(0, Mode::Long)?;
    guest.memory.write(ARGUMENT, ELSEWHERE);
    guest.memory.write(ARGUMENT + 8, ELSEWHERE + pages as u64 * PAGE);
    guest.finish()
}

fn more_pages_than_a_cpu_logs_by_itself_are_all_in_the_dirty_log() -> Outcome {
    // The log of a CPU with PML has room for 512.
    const PAGES: usize = 1500;
    let guest = Guest::new(Chip::None, sweep())?;
    let memory = Memory::new(PAGES as u64 * PAGE)?;
    guest.vm.set_slot(1, LOGGED, ELSEWHERE, memory.bytes(), memory.hva()).granted("slot")?;
    for pages in [PAGES, PAGES, 512, 700, 1024, PAGES] {
        swept(&guest, pages)?;
        equal("log", dirty_pages_of(&guest, PAGES)?, (0..pages).collect())?;
        equal("log of nothing", dirty_pages_of(&guest, PAGES)?, vec![])?;
    }
    Ok(())
}

fn a_dirty_log_switched_on_late_splits_large_pages() -> Outcome {
    const PAGES: usize = 1024;
    let guest = Guest::new(Chip::None, sweep())?;
    let memory = Memory::aligned(PAGES as u64 * PAGE)?;
    if memory.advise(0, memory.bytes(), libc::MADV_HUGEPAGE).is_err() {
        return skip("no transparent huge pages");
    }
    let flags = |flags| guest.vm.set_slot(1, flags, ELSEWHERE, memory.bytes(), memory.hva());
    flags(0).granted("slot")?;
    for _ in 0..2 {
        swept(&guest, PAGES)?;
        flags(LOGGED).granted("log on")?;
        equal("log of nothing", dirty_pages_of(&guest, PAGES)?, vec![])?;
        for pages in [3, 700, 5, PAGES] {
            swept(&guest, pages)?;
            equal("log", dirty_pages_of(&guest, PAGES)?, (0..pages).collect())?;
        }
        flags(0).granted("log off")?;
    }
    Ok(())
}

fn transparent_huge_pages_work() -> Outcome {
    let memory = Memory::aligned(4 << 20)?;
    if memory.advise(0, memory.bytes(), libc::MADV_HUGEPAGE).is_err() {
        return skip("no transparent huge pages");
    }
    sweep_over(&memory, true)
}

fn hugetlbfs_pages_work() -> Outcome {
    if std::fs::write("/proc/sys/vm/nr_hugepages", "4").is_err() {
        return skip("no huge pages");
    }
    let memory = match Memory::with_flags(4 << 20, libc::MAP_HUGETLB | libc::MAP_POPULATE) {
        Ok(memory) => memory,
        Err(_) => return skip("no huge pages to be had"),
    };
    let outcome = sweep_over(&memory, false);
    drop(memory);
    let _ = std::fs::write("/proc/sys/vm/nr_hugepages", "0");
    outcome
}

guest_code!(
    // Adds 1 to every page of [ARGUMENT, ARGUMENT + 8), up or down as RDI says.
    increment,
    64,
    "mov ARGUMENT, %rbx",
    "mov ARGUMENT + 8, %rcx",
    "test %rdi, %rdi",
    "jnz 1f",
    "0: lock incq (%rbx)",
    "add $4096, %rbx",
    "cmp %rcx, %rbx",
    "jb 0b",
    "out %al, $PORT_DONE",
    "1: sub $4096, %rcx",
    "lock incq (%rcx)",
    "cmp %rcx, %rbx",
    "jb 1b",
    "out %al, $PORT_DONE",
);

fn many_faults_of_two_vcpus_in_parallel() -> Outcome {
    let guest = Guest::with_vcpus(Chip::None, Mode::Long, 2, increment())?;
    let memory = Memory::aligned(8 << 20)?;
    let _ = memory.advise(0, memory.bytes(), libc::MADV_NOHUGEPAGE);
    guest.vm.set_slot(1, 0, ELSEWHERE, memory.bytes(), memory.hva()).granted("slot")?;
    guest.memory.write(ARGUMENT, ELSEWHERE);
    guest.memory.write(ARGUMENT + 8, ELSEWHERE + memory.bytes());
    let mut regs = guest.vcpus[1].regs()?;
    regs.rdi = 1;
    guest.vcpus[1].set_regs(&regs)?;
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|index| {
            let guest = &guest;
            scope.spawn(move || guest.finish_of(index))
        });
        let ended = within(Duration::from_secs(15), || threads.iter().all(|t| t.is_finished()));
        holds("an end of both", ended, "none")?;
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| fail("a thread died")))
    })?;
    for page in (0..memory.bytes()).step_by(PAGE as usize) {
        equal("memory", memory.read(page), 2)?;
    }
    Ok(())
}

guest_code!(
    // Writes behind 4 GiB through a page table entry of its own.
    high,
    64,
    "movabs $0x100000000, %rbx",
    "mov %rbx, (%rbx)",
    "mov (%rbx), %rax",
    "mov %rax, RESULT",
    "out %al, $PORT_DONE",
);

fn memory_above_4_gib_works() -> Outcome {
    let guest = Guest::new(Chip::None, high())?;
    let memory = Memory::new(PAGE)?;
    // The fifth entry of the page directory pointers: a page directory in free memory.
    guest.memory.write(ROOT + PAGE + 4 * 8, FREE | 0x23);
    guest.memory.write(FREE, 1 << 32 | 0xe3);
    guest.vm.set_slot(1, 0, 1 << 32, PAGE, memory.hva()).granted("slot")?;
    guest.finish()?;
    equal("what the guest reads", guest.result(0), 1 << 32)?;
    equal("memory", memory.read(0), 1 << 32)
}
