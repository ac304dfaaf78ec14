//! What the VMM does under a guest's page tables: slots come, go and move, its memory is taken away and replaced, the
//! dirty log is read; and KVM_TRANSLATE (KVM API §4.35, §4.8, §4.15).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::layout::PORT_MARK;
use crate::machine::memory::{Memory, PAGE};
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{Stage, in_each_mode, mark, tag};
use crate::oracle;
use crate::outcome::{Answer, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("paging_host":
    a_page_of_a_deleted_slot_is_gone_at_all_its_addresses,
    a_slot_with_other_memory_shows_it_at_all_addresses,
    a_moved_slot_takes_its_frames_along,
    a_slot_of_tables_deleted_and_made_again,
    a_slot_elsewhere_leaves_translations_alone,
    madvise_empties_a_page_at_all_its_addresses,
    memory_mapped_anew_is_seen_at_all_addresses,
    tables_survive_what_the_host_does_to_their_memory,
    tables_shared_with_a_forked_child_are_written,
    a_page_without_write_permission_of_the_host_is_efault,
    the_dirty_log_has_what_the_guest_writes_by_any_address,
    the_dirty_log_has_tables_that_the_guest_writes,
    the_dirty_log_has_accessed_and_dirty_bits,
    the_dirty_log_can_be_switched_on_under_tables,
    small_pages_of_the_guest_in_huge_pages_of_the_host,
    large_pages_of_the_guest_in_huge_pages_of_the_host,
    large_pages_of_the_guest_in_small_pages_of_the_host,
    a_large_page_over_two_slots,
    a_large_page_with_a_hole,
    tables_in_a_read_only_slot_are_walked,
    a_read_only_slot_refuses_writes_by_any_address,
    nothing_is_there_by_any_address,
    tables_written_by_the_vmm_count_after_kvm_set_sregs,
    translate_follows_the_tables,
    memory_of_a_device_is_read_at_all_addresses,
);

/// Where the further slot lies, in every paging mode's reach.
const ELSEWHERE: u64 = 0x1000_0000;

/// A stage with a further slot of so many pages, each marked with its index.
fn with_slot(paging: Paging, pages: u64, flags: u32) -> Outcome<(Stage, Memory)> {
    let stage = Stage::new(paging)?;
    let memory = numbered(pages, 0)?;
    stage.guest.vm.set_slot(1, flags, ELSEWHERE, memory.bytes(), memory.hva()).granted("slot")?;
    Ok((stage, memory))
}

/// Memory whose pages are marked with `base` and their index.
fn numbered(pages: u64, base: u64) -> Outcome<Memory> {
    let memory = Memory::aligned(pages * PAGE)?;
    let _ = memory.advise(0, memory.bytes(), libc::MADV_NOHUGEPAGE);
    (0..pages).for_each(|page| mark(&memory, page * PAGE, base + page));
    Ok(memory)
}

fn set(stage: &Stage, gpa: u64, memory: &Memory) -> Outcome {
    stage.guest.vm.set_slot(1, 0, gpa, memory.bytes(), memory.hva()).granted("slot").map(drop)
}

fn delete(stage: &Stage) -> Outcome {
    stage.guest.vm.set_slot(1, 0, ELSEWHERE, 0, 0).granted("delete").map(drop)
}

/// Maps a page of the further slot at three addresses: twice by small pages, once by a large one.
fn three_addresses(stage: &mut Stage, page: u64) -> [u64; 3] {
    let (va, span) = (stage.paging.at(), stage.paging.span(2));
    let gpa = ELSEWHERE + page * PAGE;
    stage.map(va, 1, gpa | ALL);
    stage.map(va + 5 * span, 1, gpa | ALL);
    stage.map(va + 8 * span, 2, ELSEWHERE | ALL);
    [va, va + 5 * span, va + 8 * span + page * PAGE]
}

fn a_page_of_a_deleted_slot_is_gone_at_all_its_addresses() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, _memory) = with_slot(paging, 16, 0)?;
        let addresses = three_addresses(&mut stage, 3);
        let mut list: Vec<Operation> = addresses.iter().map(|at| write(at + 16, 1)).collect();
        list.push(MARK);
        list.extend(addresses.iter().map(|at| read(at + 24)));
        list.extend(addresses.iter().map(|at| write(at + 32, 7)));
        let (mut reads, mut writes) = (0, 0);
        let gpa = ELSEWHERE + 3 * PAGE;
        let seen = stage.run_exits(&list, |exit| match exit {
            exit if exit.is_out(PORT_MARK) => delete(&stage),
            Exit::Mmio { write: false, address, .. } => {
                reads += 1;
                equal("address", *address, gpa + 24)?;
                stage.vcpu().answer(&[0x21, 0x43, 0, 0, 0, 0, 0, 0]);
                Ok(())
            }
            Exit::Mmio { write: true, address, data, .. } => {
                writes += 1;
                equal("address and data", (*address, data[0]), (gpa + 32, 7))
            }
            other => fail(format!("unexpected {other:x?}")),
        })?;
        equal("exits", (reads, writes), (3, 3))?;
        equal("what was read", &seen[4..7], [value(0x4321); 3].as_slice())
    })
}

fn a_slot_with_other_memory_shows_it_at_all_addresses() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, first) = with_slot(paging, 16, 0)?;
        let second = numbered(16, 0x100)?;
        let addresses = three_addresses(&mut stage, 2);
        let mut expected = Vec::new();
        for round in 0..6 {
            let base = if round % 2 == 0 { 0 } else { 0x100 };
            for at in addresses {
                expected.push((read(at + 8), value(base + 2)));
                expected.push((fetch(at).user(), value(base + 2)));
                expected.push((write(at + 16, round), DONE));
            }
            expected.push((MARK, DONE));
        }
        stage.expect_with("by turns", &expected, |round| {
            delete(&stage)?;
            set(&stage, ELSEWHERE, if round % 2 == 0 { &second } else { &first })
        })
    })
}

fn a_moved_slot_takes_its_frames_along() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, 0)?;
        let addresses = three_addresses(&mut stage, 6);
        let mut expected = Vec::new();
        for page in [6, 5, 6, 5] {
            expected.extend(addresses.map(|at| (read(at + 8), value(page))));
            expected.extend(addresses.map(|at| (write(at + 16, page).user(), DONE)));
            expected.push((MARK, DONE));
        }
        stage.expect_with("to and fro", &expected, |round| {
            set(&stage, ELSEWHERE + if round % 2 == 0 { PAGE } else { 0 }, &memory)
        })
    })
}

fn a_slot_of_tables_deleted_and_made_again() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, first) = with_slot(paging, 16, 0)?;
        let second = numbered(16, 0)?;
        let va = paging.at();
        let link = stage.place_of(va, 2);
        paging.put(stage.memory(), link, ELSEWHERE | ALL);
        let frames = [stage.frame(), stage.frame()];
        let offset = paging.offset(va, 1);
        for (memory, frame) in [&first, &second].into_iter().zip(frames) {
            paging.put(memory, offset, frame | ALL);
        }
        let mut expected = Vec::new();
        for round in 0..8 {
            expected.extend([
                (cr3(stage.root), DONE),
                (read(va + 8), value(tag(frames[round % 2]))),
                (write(va + 16, 1).user(), DONE),
                (MARK, DONE),
            ]);
        }
        stage.expect_with("by turns", &expected, |round| {
            delete(&stage)?;
            set(&stage, ELSEWHERE, if round % 2 == 0 { &second } else { &first })
        })?;
        // Each has its own bits, set by the guest's walk.
        for memory in [&first, &second] {
            equal("bits", paging.get(memory, offset) & 0x60, ACCESSED | DIRTY)?;
        }
        Ok(())
    })
}

fn a_slot_elsewhere_leaves_translations_alone() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let memory = numbered(4, 0)?;
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        let mut expected = Vec::new();
        for round in 0..20 {
            expected.push((read(va + 8), value(tag(frame))));
            expected.push((add(va + 16, 1).user(), value(round)));
            expected.push((MARK, DONE));
        }
        stage.expect_with("slots come and go", &expected, |round| match round % 2 {
            0 => set(&stage, ELSEWHERE, &memory),
            _ => delete(&stage),
        })
    })
}

fn madvise_empties_a_page_at_all_its_addresses() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, 0)?;
        let addresses = three_addresses(&mut stage, 4);
        let mut expected = Vec::new();
        for round in 1..6 {
            expected.extend(addresses.map(|at| (read(at + 16), value(0))));
            expected.push((write(addresses[round % 3] + 16, 5), DONE));
            expected.extend(addresses.map(|at| (read(at + 16).user(), value(5))));
            expected.push((MARK, DONE));
        }
        let advise = |_| memory.advise(4 * PAGE, PAGE, libc::MADV_DONTNEED).granted("madvise");
        stage.expect_with("emptied", &expected, advise)
    })
}

/// Replaces pages of `memory` by fresh ones.
fn map_anew(memory: &Memory, offset: u64, bytes: u64) -> Outcome {
    let place = memory.hva() + offset;
    // SAFETY: replaces a part of our own mapping by another one of the same size.
    let mapped = unsafe {
        libc::mmap(
            place as *mut _,
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    equal("where", mapped as u64, place)
}

fn memory_mapped_anew_is_seen_at_all_addresses() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, 0)?;
        let addresses = three_addresses(&mut stage, 4);
        let mut expected = Vec::new();
        for round in 0..6 {
            let number = if round == 0 { 4 } else { 0x300 + round - 1 };
            expected.extend(addresses.map(|at| (read(at + 8), value(number))));
            expected.extend(addresses.map(|at| (fetch(at), value(number))));
            expected.push((write(addresses[0] + 16, 1).user(), DONE));
            expected.push((MARK, DONE));
        }
        stage.expect_with("replaced", &expected, |round| {
            map_anew(&memory, 4 * PAGE, PAGE)?;
            mark(&memory, 4 * PAGE, 0x300 + round);
            Ok(())
        })
    })
}

/// A table in the further slot's first page, with a data frame; the frame's address and the entry's offset.
fn table_in_slot(stage: &mut Stage, memory: &Memory) -> (u64, u64, u64) {
    let (paging, va) = (stage.paging, stage.paging.at());
    let link = stage.place_of(va, 2);
    paging.put(stage.memory(), link, ELSEWHERE | ALL);
    // Nothing but entries in it.
    (0..PAGE).step_by(8).for_each(|at| memory.write(at, 0));
    let (frame, offset) = (stage.frame(), paging.offset(va, 1));
    paging.put(memory, offset, frame | ALL);
    (va, frame, offset)
}

fn tables_survive_what_the_host_does_to_their_memory() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, 0)?;
        let (va, frame, offset) = table_in_slot(&mut stage, &memory);
        let other = stage.frame();
        let mut expected = Vec::new();
        for round in 0..12 {
            let shown = if round % 2 == 0 { frame } else { other };
            expected.extend([
                (MARK, DONE),
                (read(va + 8), if round == 0 { value(tag(frame)) } else { value(tag(other)) }),
                (stage.set_entry(ELSEWHERE + offset, shown | ALL), DONE),
                (invlpg(va), DONE),
                (write(va + 16, round).user(), DONE),
                (MARK, DONE),
                (read(va + 8), value(tag(shown))),
                (stage.set_entry(ELSEWHERE + offset, other | PRESENT), DONE),
                (invlpg(va), DONE),
                (write(va + 16, 1), fault(P | W, va + 16)),
            ]);
        }
        // The guest writes its table where the slot is mapped one to one, too.
        for page in 0..2 {
            stage.map(ELSEWHERE + page * PAGE, 1, (ELSEWHERE + page * PAGE) | PRESENT | WRITABLE);
        }
        stage.expect_with("the same content", &expected, |round| {
            let content = memory.read_bytes(0, PAGE as usize);
            match round % 3 {
                0 => {
                    memory.protect(0, PAGE, libc::PROT_NONE).granted("mprotect")?;
                    memory
                        .protect(0, PAGE, libc::PROT_READ | libc::PROT_WRITE)
                        .granted("mprotect")?;
                }
                1 => {
                    map_anew(&memory, 0, PAGE)?;
                    memory.write_bytes(0, &content);
                }
                _ => drop(memory.advise(0, memory.bytes(), libc::MADV_PAGEOUT)),
            }
            Ok(())
        })
    })
}

fn tables_shared_with_a_forked_child_are_written() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, 0)?;
        let (va, frame, offset) = table_in_slot(&mut stage, &memory);
        stage.expect("before", &[(read(va + 8), value(tag(frame)))])?;
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
                libc::_exit((paging.get(&memory, offset) & 0x60) as i32);
            }
        }
        // The table is copied on write: by the processor's dirty bit, or by who sets it for it.
        stage.expect("after", &[(write(va + 16, 3).user(), DONE), (read(va + 16), value(3))])?;
        equal("bits here", paging.get(&memory, offset) & 0x60, ACCESSED | DIRTY)?;
        // SAFETY: our own end; the child's read then returns.
        unsafe { libc::close(ends[1]) };
        match crate::runner::await_end(child, std::time::Duration::from_secs(5)) {
            Some(status) => equal("bits in the child", libc::WEXITSTATUS(status), 0x20),
            None => fail("the child did not end"),
        }
    })
}

fn a_page_without_write_permission_of_the_host_is_efault() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, 0)?;
        let addresses = three_addresses(&mut stage, 4);
        let both = libc::PROT_READ | libc::PROT_WRITE;
        for at in addresses {
            stage.expect("writable", &[(write(at + 16, 1), DONE)])?;
            memory.protect(4 * PAGE, PAGE, libc::PROT_READ).granted("mprotect")?;
            stage.expect("read-only", &[(read(at + 16), value(1))])?;
            stage.load(0, &[write(at + 16, 2).user(), read(at + 16)]);
            stage.vcpu().run().refused("KVM_RUN", libc::EFAULT)?;
            memory.protect(4 * PAGE, PAGE, both).granted("mprotect back")?;
            holds("the end", stage.vcpu().run().is_ok(), "an error")?;
            equal("seen", stage.seen(0, 2), vec![DONE, value(2)])?;
        }
        Ok(())
    })
}

const LOGGED: u32 = KVM_MEM_LOG_DIRTY_PAGES;

/// The dirty log of the further slot, up to 64 pages of it.
fn dirty_pages(stage: &Stage) -> Outcome<Vec<u64>> {
    let mut bitmap = [0_u64; 16];
    let mut log = kvm_dirty_log { slot: 1, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
    stage.guest.vm.send(ioctl::GET_DIRTY_LOG, &log).granted("KVM_GET_DIRTY_LOG")?;
    Ok((0..64).filter(|page| bitmap[0] >> page & 1 != 0).collect())
}

fn the_dirty_log_has_what_the_guest_writes_by_any_address() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, _memory) = with_slot(paging, 64, LOGGED)?;
        let addresses = three_addresses(&mut stage, 4);
        dirty_pages(&stage)?;
        for round in 0..3 {
            for at in addresses {
                stage.expect("read", &[(read(at + 8), value(4))])?;
                // A page that the host has written may be mapped writable at once, and counts then.
                let log = dirty_pages(&stage)?;
                holds("at most the page read", log.is_empty() || log == [4], &log)?;
                let operation = write(at + 16, round);
                let operation = if round == 1 { operation.user() } else { operation };
                stage.expect(
                    "write",
                    &[(operation, DONE), (write(addresses[2] + PAGE + 16, 1), DONE)],
                )?;
                equal("log of a write", dirty_pages(&stage)?, vec![4, 5])?;
            }
        }
        Ok(())
    })
}

fn the_dirty_log_has_tables_that_the_guest_writes() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, LOGGED)?;
        let (va, frame, offset) = table_in_slot(&mut stage, &memory);
        let other = stage.frame();
        stage.map(ELSEWHERE, 1, ELSEWHERE | PRESENT | WRITABLE);
        stage.expect("use", &[(write(va + 16, 1), DONE)])?;
        for round in 0..6 {
            dirty_pages(&stage)?;
            let shown = if round % 2 == 0 { other } else { frame };
            let entry = shown | ALL | ACCESSED | DIRTY;
            stage.expect("change", &[(stage.set_entry(ELSEWHERE + offset, entry), DONE)])?;
            equal("log of a change", dirty_pages(&stage)?, vec![0])?;
            stage.expect("use", &[(invlpg(va), DONE), (read(va + 8), value(tag(shown)))])?;
        }
        Ok(())
    })
}

fn the_dirty_log_has_accessed_and_dirty_bits() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, LOGGED)?;
        let (va, frame, offset) = table_in_slot(&mut stage, &memory);
        let other = va + PAGE;
        paging.put(&memory, paging.offset(other, 1), (ELSEWHERE + 9 * PAGE) | ALL);
        dirty_pages(&stage)?;
        stage.expect("read", &[(read(va + 8), value(tag(frame)))])?;
        equal(
            "accessed",
            (dirty_pages(&stage)?, paging.get(&memory, offset) & 0x60),
            (vec![0], ACCESSED),
        )?;
        stage.expect("write", &[(write(va + 16, 1), DONE)])?;
        equal(
            "dirty",
            (dirty_pages(&stage)?, paging.get(&memory, offset) & 0x60),
            (vec![0], 0x60),
        )?;
        // A page of the slot that is written: its table's bits, and itself.
        stage.expect("write a logged page", &[(write(other + 16, 1).user(), DONE)])?;
        equal("both", dirty_pages(&stage)?, vec![0, 9])?;
        stage.expect("write it again", &[(write(other + 24, 1), DONE)])?;
        let log = dirty_pages(&stage)?;
        // TDP takes every walk for a write of the table.
        holds("the page, and perhaps its table", log == [9] || log == [0, 9], &log)
    })
}

fn the_dirty_log_can_be_switched_on_under_tables() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 64, 0)?;
        let addresses = three_addresses(&mut stage, 4);
        let toggle =
            |flags| stage.guest.vm.set_slot(1, flags, ELSEWHERE, memory.bytes(), memory.hva());
        for round in 0..4 {
            for at in addresses {
                stage.expect("unlogged", &[(write(at + 16, round), DONE)])?;
                toggle(LOGGED).granted("on")?;
                stage.expect("read", &[(read(at + 16).user(), value(round))])?;
                let log = dirty_pages(&stage)?;
                holds("at most the page read", log.is_empty() || log == [4], &log)?;
                stage.expect("write", &[(write(at + 24, round), DONE)])?;
                equal("log", dirty_pages(&stage)?, vec![4])?;
                toggle(0).granted("off")?;
            }
        }
        Ok(())
    })
}

/// A stage with a further slot over memory that the host maps by huge pages if it can.
fn with_huge_slot(paging: Paging) -> Outcome<(Stage, Memory)> {
    let stage = Stage::new(paging)?;
    let memory = Memory::aligned(8 << 20)?;
    if memory.advise(0, memory.bytes(), libc::MADV_HUGEPAGE).is_err() {
        return skip("no transparent huge pages");
    }
    (0..memory.bytes() / PAGE).for_each(|page| mark(&memory, page * PAGE, page));
    set(&stage, ELSEWHERE, &memory)?;
    Ok((stage, memory))
}

fn small_pages_of_the_guest_in_huge_pages_of_the_host() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_huge_slot(paging)?;
        let va = paging.at();
        let mut expected = Vec::new();
        for index in 0..100 {
            let page = index * 41 % 2048;
            stage.map(va + index * PAGE, 1, (ELSEWHERE + page * PAGE) | ALL);
            expected.extend([
                (read(va + index * PAGE + 8), value(page)),
                (write(va + index * PAGE + 16, page).user(), DONE),
            ]);
        }
        stage.expect("scattered", &expected)?;
        memory.advise(41 * PAGE, PAGE, libc::MADV_DONTNEED).granted("madvise")?;
        stage.expect("emptied", &[(read(va + PAGE + 8), value(0)), (read(va + 8), value(0))])?;
        stage.expect("its neighbours", &[(read(va + 2 * PAGE + 8), value(82))])
    })
}

fn large_page_use(stage: &mut Stage, memory: &Memory) -> Outcome {
    let (paging, va) = (stage.paging, stage.paging.at());
    let span = paging.span(2);
    for index in 0..memory.bytes() / span {
        stage.map(va + index * span, 2, (ELSEWHERE + index * span) | ALL);
    }
    let (mut expected, mut again) = (Vec::new(), Vec::new());
    for index in 0..100 {
        let page = index * 41 % 2048;
        let at = va + page * PAGE;
        expected.extend([(read(at + 8), value(page)), (write(at + 16, page).user(), DONE)]);
        again.extend([
            (read(at + 16).user(), value(if index == 7 { 0 } else { page })),
            (fetch(at + PAGE), value(page + 1)),
        ]);
    }
    stage.expect("large", &expected)?;
    memory.advise(7 * 41 * PAGE, PAGE, libc::MADV_DONTNEED).granted("madvise")?;
    stage.expect("with one page emptied", &again)?;
    // The dirty log takes the page apart.
    let toggle = |flags| stage.guest.vm.set_slot(1, flags, ELSEWHERE, memory.bytes(), memory.hva());
    toggle(LOGGED).granted("on")?;
    let mut bitmap = [0_u64; 32];
    let mut log = kvm_dirty_log { slot: 1, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
    stage.expect(
        "write",
        &[(write(va + 300 * PAGE + 16, 9), DONE), (read(va + 301 * PAGE + 8), value(301))],
    )?;
    stage.guest.vm.send(ioctl::GET_DIRTY_LOG, &log).granted("KVM_GET_DIRTY_LOG")?;
    let dirty: Vec<usize> =
        (0..2048).filter(|page| bitmap[page / 64] >> (page % 64) & 1 != 0).collect();
    // The page that was read may be mapped writable at once, and counts then.
    holds(
        "the page written, and no page not touched",
        dirty == [300] || dirty == [300, 301],
        &dirty,
    )?;
    toggle(0).granted("off")?;
    stage.expect(
        "and goes on",
        &[(read(va + 300 * PAGE + 16), value(9)), (write(va + 5 * PAGE + 16, 1), DONE)],
    )
}

fn large_pages_of_the_guest_in_huge_pages_of_the_host() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_huge_slot(paging)?;
        large_page_use(&mut stage, &memory)
    })
}

fn large_pages_of_the_guest_in_small_pages_of_the_host() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 2048, 0)?;
        large_page_use(&mut stage, &memory)
    })
}

fn a_large_page_over_two_slots() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, first) = with_slot(paging, 100, 0)?;
        let second = numbered(2048 - 100, 0x5000)?;
        let gpa = ELSEWHERE + 100 * PAGE;
        stage.guest.vm.set_slot(2, 0, gpa, second.bytes(), second.hva()).granted("second slot")?;
        let va = paging.at();
        stage.map(va, 2, ELSEWHERE | ALL);
        let mut expected = Vec::new();
        for page in [0, 99, 100, 101, 400] {
            let number = if page < 100 { page } else { 0x5000 + page - 100 };
            expected.extend([
                (read(va + page * PAGE + 8), value(number)),
                (write(va + page * PAGE + 16, page).user(), DONE),
                (fetch(va + page * PAGE), value(number)),
            ]);
        }
        stage.expect("two slots", &expected)?;
        equal("in each", (first.read(99 * PAGE + 16) & 0xffff, second.read(16) & 0xffff), (99, 100))
    })
}

fn a_large_page_with_a_hole() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, _memory) = with_slot(paging, 100, 0)?;
        let va = paging.at();
        stage.map(va, 2, ELSEWHERE | ALL);
        let hole = 200 * PAGE;
        let list = [
            read(va + 99 * PAGE + 8),
            read(va + hole),
            write(va + hole, 5).user(),
            read(va + 8),
            write(va + 50 * PAGE + 16, 1),
        ];
        let mut exits = Vec::new();
        let seen = stage.run_exits(&list, |exit| match exit {
            Exit::Mmio { write, address, .. } => {
                exits.push((*write, *address));
                stage.vcpu().answer(&[9, 0, 0, 0, 0, 0, 0, 0]);
                Ok(())
            }
            other => fail(format!("unexpected {other:x?}")),
        })?;
        equal("exits", exits, vec![(false, ELSEWHERE + hole), (true, ELSEWHERE + hole)])?;
        equal("seen", seen, vec![value(99), value(9), DONE, value(0), DONE])
    })
}

fn tables_in_a_read_only_slot_are_walked() -> Outcome {
    if oracle::tdp() {
        return skip("under TDP every walk is a write");
    }
    in_each_mode(|paging| {
        for bits in [ACCESSED | DIRTY, 0] {
            let stage = Stage::new(paging);
            let mut stage = stage?;
            let memory = numbered(16, 0)?;
            let (va, frame, offset) = table_in_slot(&mut stage, &memory);
            paging.put(&memory, offset, frame | ALL | bits);
            let flags = KVM_MEM_READONLY;
            stage
                .guest
                .vm
                .set_slot(1, flags, ELSEWHERE, memory.bytes(), memory.hva())
                .granted("slot")?;
            stage.expect(
                "through a ROM",
                &[
                    (read(va + 8), value(tag(frame))),
                    (fetch(va).user(), value(tag(frame))),
                    (write(va + 16, 4).user(), DONE),
                    (read(va + PAGE), fault(0, va + PAGE)),
                ],
            )?;
            equal("the entry", paging.get(&memory, offset), frame | ALL | bits)?;
        }
        Ok(())
    })
}

fn a_read_only_slot_refuses_writes_by_any_address() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, memory) = with_slot(paging, 16, KVM_MEM_READONLY)?;
        let addresses = three_addresses(&mut stage, 4);
        let mut list = Vec::new();
        for at in addresses {
            list.extend([
                read(at + 8),
                write(at + 8, 0x77),
                fetch(at).user(),
                write(at + 8, 0x88).user(),
            ]);
        }
        let mut exits = 0;
        let seen = stage.run_exits(&list, |exit| match exit {
            Exit::Mmio { write: true, address, .. } => {
                exits += 1;
                equal("address", *address, ELSEWHERE + 4 * PAGE + 8)
            }
            other => fail(format!("unexpected {other:x?}")),
        })?;
        equal("exits", exits, 6)?;
        for seen in seen.chunks(4) {
            equal("seen", seen, [value(4), DONE, value(4), DONE].as_slice())?;
        }
        equal("memory", memory.read(4 * PAGE + 8), 4)
    })
}

fn nothing_is_there_by_any_address() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, ELSEWHERE | ALL);
        stage.map(va + PAGE, 1, ELSEWHERE | PRESENT);
        let list = [
            read(va + 8),
            read(va + PAGE + 8),
            read(va + PAGE + 8).user(),
            write(va + PAGE + 8, 1),
            // The entry becomes memory, and nothing again.
            stage.set_entry(at, frame | ALL),
            invlpg(va),
            read(va + 8).user(),
            stage.set_entry(at, ELSEWHERE | PRESENT | USER),
            invlpg(va),
            write(va + 8, 1),
            read(va + 8).user(),
            stage.set_entry(at, ELSEWHERE),
            invlpg(va),
            read(va + 8),
        ];
        let mut exits = 0;
        let seen = stage.run_exits(&list, |exit| match exit {
            Exit::Mmio { write: false, address, .. } => {
                exits += 1;
                stage.vcpu().answer(&[6, 0, 0, 0, 0, 0, 0, 0]);
                equal("address", *address, ELSEWHERE + 8)
            }
            other => fail(format!("unexpected {other:x?}")),
        })?;
        let expected = vec![
            value(6),
            value(6),
            fault(P | U, va + PAGE + 8),
            fault(P | W, va + PAGE + 8),
            DONE,
            DONE,
            value(tag(frame)),
            DONE,
            DONE,
            fault(P | W, va + 8),
            value(6),
            DONE,
            DONE,
            fault(0, va + 8),
        ];
        equal("exits", exits, 3)?;
        equal("seen", seen, expected)
    })
}

fn tables_written_by_the_vmm_count_after_kvm_set_sregs() -> Outcome {
    oracle::not_of_stock_shadow_paging("it does not see what the VMM writes")?;
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        for level in 1..=if paging == Paging::Pae { 2 } else { paging.levels() } {
            let twin_va = va + paging.span(level);
            let frames = [stage.frame(), stage.frame()];
            stage.map(va, 1, frames[0] | ALL);
            stage.map(twin_va, 1, frames[1] | ALL);
            stage.start(0, stage.root)?;
            let at = stage.tree().entry(va, level)?;
            let entries = [stage.entry(at), stage.entry(stage.tree().entry(twin_va, level)?)];
            for round in 0..6 {
                stage.expect(
                    &format!("level {level}"),
                    &[
                        (read(va + 8), value(tag(frames[round % 2]))),
                        (write(va + 16, 1).user(), DONE),
                    ],
                )?;
                paging.put(stage.memory(), at, entries[(round + 1) % 2]);
                stage.vcpu().set_sregs(&stage.sregs(0, stage.root)?)?;
            }
            // As before, for the next level.
            paging.put(stage.memory(), at, entries[0]);
            stage.start(0, stage.root)?;
        }
        Ok(())
    })
}

/// What KVM_TRANSLATE says: the physical address, if there is one.
fn translated(stage: &Stage, va: u64) -> Outcome<Option<u64>> {
    let mut answer = kvm_translation { linear_address: va, ..Default::default() };
    stage.vcpu().exchange(ioctl::TRANSLATE, &mut answer).granted("KVM_TRANSLATE")?;
    Ok((answer.valid != 0).then_some(answer.physical_address))
}

fn translate_follows_the_tables() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let (frame, large) = (stage.frame(), stage.large_frame());
        let at = stage.map(va, 1, frame | PRESENT);
        let large_va = va + 3 * paging.span(2);
        stage.map(large_va, 2, large | ALL);
        let other = stage.light_root();
        stage.map_in(other, va, 1, large | ALL);
        equal("a page", translated(&stage, va + 0x123)?, Some(frame + 0x123))?;
        equal("a large page", translated(&stage, large_va + 0x5_4321)?, Some(large + 0x5_4321))?;
        equal("nothing", translated(&stage, va + PAGE)?, None)?;
        stage.expect(
            "change",
            &[(read(va + 8), value(tag(frame))), (stage.set_entry(at, 0), DONE)],
        )?;
        equal("no longer", translated(&stage, va)?, None)?;
        if paging == Paging::Pae {
            // The accessed bits that the lab's emulated CPU sets at the top are reserved; see `switch_cr4`.
            return Ok(());
        }
        stage.expect("the other", &[(cr3(other), DONE)])?;
        equal("by the other root", translated(&stage, va)?, Some(large))
    })
}

/// The firmware's ROM, which the kernel has no page for: as a device's memory that VFIO maps.
fn memory_of_a_device_is_read_at_all_addresses() -> Outcome {
    const ROM: u64 = 0xf0000;
    // Where the CPU begins: never empty.
    const START: u64 = 0xfff0;
    let rom = Memory::of_file("/dev/mem", ROM, 16 * PAGE)?;
    let begins = rom.read(START);
    holds("a ROM", begins != 0 && begins != u64::MAX, begins)?;
    in_each_mode(|paging| {
        let mut stage = Stage::new(paging)?;
        stage.guest.vm.set_slot(1, 0, ELSEWHERE, rom.bytes(), rom.hva()).granted("slot")?;
        let at = three_addresses(&mut stage, START / PAGE).map(|at| at + START % PAGE);
        let word = if stage.paging.is_wide() { u64::MAX } else { u32::MAX.into() };
        let seen = stage.run(&at.map(read))?;
        equal("what was read", &seen[..], [value(begins & word); 3].as_slice())?;
        delete(&stage)
    })
}
