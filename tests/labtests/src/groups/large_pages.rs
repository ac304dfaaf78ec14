//! Large pages of the host's: what a guest executes from them, and what `nx_huge_pages` makes of it.

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_dirty_log};

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::kvm::stats::Stats;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::machine::memory::Memory;
use crate::oracle;
use crate::outcome::{Answer, Outcome, equal, holds, skip};
use crate::runner::tests;

tests!("large_pages":
    code_in_a_large_page_runs_and_may_split_it,
    code_in_a_large_page_runs_while_writes_are_logged,
    code_runs_where_nothing_was_touched_before,
);

const LARGE: u64 = 2 << 20;
const SMALL: u64 = 4096;
const MEMORY: u64 = 16 * LARGE;
/// Two pages of the guest's that nothing else lies in.
const FIRST: u64 = 4 * LARGE;
const SECOND: u64 = 5 * LARGE;
/// A function that returns a number: mov $7, %eax; ret.
const SEVEN: u64 = 0xc300_0000_07b8;
const NINE: u64 = 0xc300_0000_09b8;

// Writes the quadword at ARGUMENT + 8 to where ARGUMENT points, then calls what is there; a mark after
// each. What was returned is the result. Again and again.
guest_code!(
    writes_and_calls,
    64,
    "1: mov ARGUMENT, %rdi",
    "mov ARGUMENT + 8, %rax",
    "mov %rax, (%rdi)",
    "out %al, $PORT_MARK",
    "mov ARGUMENT, %rdi",
    "xor %eax, %eax",
    "call *%rdi",
    "mov %rax, RESULT",
    "out %al, $PORT_MARK",
    "jmp 1b",
    done!()
);

struct Bench {
    guest: Guest,
    vm: Stats,
}

impl Bench {
    /// A guest whose memory the host has in large pages.
    fn new() -> Outcome<Self> {
        if !oracle::tdp() {
            return skip("TDP alone maps large pages for sure");
        }
        let memory = Memory::aligned(MEMORY)?;
        if memory.advise(0, MEMORY, libc::MADV_HUGEPAGE).is_err() {
            return skip("the host's kernel has no transparent large pages");
        }
        let guest = Guest::over(memory, Chip::Kernel, Mode::Long, 1, writes_and_calls())?;
        let vm = Stats::of(&guest.vm)?;
        Ok(Self { guest, vm })
    }

    /// Has the guest write a function at `to`, and waits until it has.
    fn write(&self, to: u64, function: u64) -> Outcome {
        self.guest.memory.write(ARGUMENT, to);
        self.guest.memory.write(ARGUMENT + 8, function);
        self.guest.reach_mark()
    }

    /// Has it called.
    fn call(&self) -> Outcome<u64> {
        self.guest.reach_mark()?;
        Ok(self.guest.result(0))
    }

    /// Large pages that are mapped, and those that an instruction fetch has made small.
    fn pages(&self) -> Outcome<(u64, u64)> {
        Ok((self.vm.value("pages_2m")?, self.vm.value("nx_lpage_splits")?))
    }

    /// Has the guest touch its first page, so that it is mapped large; skips where the host did not
    /// come by a large page.
    fn first(&self) -> Outcome<(u64, u64)> {
        self.write(SECOND, SEVEN)?;
        equal("what the function returns", self.call()?, 7)?;
        let before = self.pages()?;
        self.write(FIRST, SEVEN)?;
        let after = self.pages()?;
        if after.0 == before.0 {
            return skip("the host has no large page for this");
        }
        equal("one more large page, none split by data", after, (before.0 + 1, before.1))?;
        Ok(after)
    }
}

/// Whether a fetch splits a large page: the parameter of either module.
fn splits() -> bool {
    ["kvm", "gannet"].iter().any(|module| {
        let file = format!("/sys/module/{module}/parameters/nx_huge_pages");
        std::fs::read_to_string(file).is_ok_and(|value| value.trim() == "Y")
    })
}

fn code_in_a_large_page_runs_and_may_split_it() -> Outcome {
    let bench = Bench::new()?;
    let (large, split) = bench.first()?;
    equal("what the function returns", bench.call()?, 7)?;
    let now = if splits() { (large - 1, split + 1) } else { (large, split) };
    equal("large pages and split ones", bench.pages()?, now)?;
    // What the page holds is what is executed, written by either side and near or far in it.
    for (to, function, value) in [(FIRST, NINE, 9), (FIRST + LARGE - 8, SEVEN, 7)] {
        bench.write(to, function)?;
        equal("what another returns", bench.call()?, value)?;
        equal("large pages and split ones", bench.pages()?, now)?;
    }
    bench.guest.vm.set_slot(0, 0, 0, 0, 0).granted("deleting the slot")?;
    equal("large pages and split ones without the slot", bench.pages()?, (0, 0))
}

fn code_in_a_large_page_runs_while_writes_are_logged() -> Outcome {
    let bench = Bench::new()?;
    bench.first()?;
    let Bench { guest, .. } = &bench;
    let (bytes, hva) = (guest.memory.bytes(), guest.memory.hva());
    guest.vm.set_slot(0, KVM_MEM_LOG_DIRTY_PAGES, 0, bytes, hva).granted("logging")?;
    equal("what the function returns", bench.call()?, 7)?;
    bench.write(FIRST + SMALL, NINE)?;
    equal("what another returns", bench.call()?, 9)?;
    let mut words = vec![0_u64; (bytes / SMALL / 64) as usize];
    let mut log = kvm_dirty_log { slot: 0, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = words.as_mut_ptr().cast();
    guest.vm.send(ioctl::GET_DIRTY_LOG, &log).granted("the log")?;
    let first = words.get((FIRST / SMALL / 64) as usize).copied().unwrap_or_default();
    holds("the page that was written, not the one that was executed", first & 3 == 2, first)?;
    guest.vm.set_slot(0, 0, 0, bytes, hva).granted("no log")?;
    bench.write(FIRST, NINE)?;
    equal("what the first function returns now", bench.call()?, 9)
}

fn code_runs_where_nothing_was_touched_before() -> Outcome {
    let bench = Bench::new()?;
    let (_, split) = bench.first()?;
    bench.guest.memory.write(SECOND + LARGE, NINE);
    // The guest writes to the first page and calls the other: its first access there is a fetch.
    bench.guest.memory.write(ARGUMENT, SECOND + LARGE);
    equal("what the function returns", bench.call()?, 9)?;
    equal("split pages", bench.pages()?.1, split + u64::from(splits()))
}
