//! What an exit to user space leaves open, and how the next KVM_RUN completes it with the answer.
//!
//! An instruction that is not emulated makes one access: its [`Completion`] says where the answer goes
//! and where RIP goes on. One that is emulated may make several, and the emulator keeps nothing in its
//! middle. So it is emulated again from its beginning after every answer, and the [`AccessLog`] has what
//! was answered before, in order.
//!
//! Meanwhile the VMM, or another vCPU, may change what an address is made of. As long as the instruction has only read,
//! an answer of another place is none, and it reads there anew. Once a store or an OUT was answered (by user space or by a
//! device of the kernel's) the log is settled: nothing goes from it, and what it has is taken before any address is
//! translated, so that no answered write is dropped or done again. A page that is replaced leaves the offset in it: by
//! that a settled access is known. What the instruction read from plain memory is there for it too: noted as it is read,
//! it goes if the instruction is tried again and nothing was written. A settled instruction that has to be tried again is
//! begun again at once, a few times, or for a signal by the next KVM_RUN, and not by the guest, which would do all of it.
//! What is left is a fault behind a write, of which the guest's handler comes back to all of the instruction: of a page that
//! another vCPU takes from the guest's tables between the halves of a store, of what ENTER reads between its stores, and,
//! of a guest's guest, of a page that its hypervisor's tables refuse by then. What does not pass by a few tries ends so, too.

use backend::Backend;
use emulate::{Fetched, STRING_RUN_BYTES, SimpleMmio, Stop};
use host::{KBox, NoMemory};
use x86::{Direction, Gva};

use super::DeviceAccess;
use crate::{
    Vcpu,
    run::{outcome::Outcome, user_exit::RunInput},
};

/// What is done with what user space answers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Completion {
    /// Nothing was asked.
    #[default]
    Nothing,
    /// OUT or a store: user space has done it, and the instruction retires.
    Retire {
        /// RIP after the instruction.
        next: u64,
    },
    /// IN: the answer goes to RAX.
    In {
        /// Bytes.
        size: u8,
        /// RIP after the instruction.
        next: u64,
    },
    /// A plain load.
    Load {
        /// What is done with the answer.
        simple: SimpleMmio,
        /// RIP after the instruction.
        next: u64,
    },
    /// RDMSR or WRMSR.
    Msr {
        /// RDMSR or WRMSR.
        direction: Direction,
        /// RIP after the instruction.
        next: u64,
        /// It is refused.
        error: bool,
        /// What is read.
        data: u64,
    },
    /// An emulated instruction goes on from its beginning with one more answer in the [`AccessLog`].
    Emulation,
}

/// Accesses of one instruction (or one REP iteration) that can be remembered: what it reads from memory too. That is 16 of a
/// device, and as many reads of memory.
const LOG: usize = 32;

/// Who has answered an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// User space or a device of the kernel's: not to be made twice.
    Device,
    /// Plain memory was read: it may be read again, as long as nothing was written.
    Memory,
}

/// An access that was answered.
#[derive(Clone, Copy, Debug)]
struct Answered {
    access: DeviceAccess,
    by: By,
    /// The instruction has come to it since it was begun anew.
    taken: bool,
}

/// The part of an address that its translation leaves.
const PAGE_OFFSET: u64 = x86::addr::PAGE_SIZE - 1;

/// Why an instruction is executed in software.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Execution {
    /// Its exit asks for it.
    Emulated,
    /// The guest is one that the CPU cannot run.
    Interpreted,
}

/// An instruction that was begun: no other has its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    /// Its address.
    pub(crate) rip: u64,
    /// Its bytes.
    pub(crate) fetched: Fetched,
    /// L2 executes it. L1 may come to the same bytes at the same address.
    pub(crate) nested: bool,
}

/// The accesses of an emulated instruction that were answered, in order, with the answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct AccessLog {
    answered: [Option<Answered>; LOG],
    count: usize,
    /// A write is among them: nothing goes any more.
    settled: bool,
    /// What user space was asked for last.
    asked: Option<DeviceAccess>,
    /// Several items of one port that INS asks for at once.
    items: Option<Items>,
    /// The instruction that these are the accesses of. It is completed as it began, whatever lies there by then.
    begun: Option<Begun>,
    /// The instruction is executed for a guest that the CPU cannot run, and completed so.
    interpreted: bool,
}

/// Items of a port, of which user space gives several in one exit. An iteration of INS asks for them once, and stores them
/// to plain memory, which asks for nothing.
#[derive(Clone, Copy, Debug)]
struct Items {
    access: DeviceAccess,
    /// How many; as many as fit into [`UserIo::string`].
    count: u16,
    /// How many of them iterations that are complete have taken.
    taken: u16,
    /// How many more the iteration takes that is going on.
    given: u16,
    answered: bool,
}

impl AccessLog {
    /// Begins an instruction, or begins it anew.
    pub(crate) fn begin(&mut self, begun: Begun, how: Execution) {
        self.interpreted = how == Execution::Interpreted;
        // Another instruction, or other bytes at the same place: answers to the old one are none to
        // this.
        if self.begun != Some(begun) {
            self.forget();
            self.begun = Some(begun);
        }
    }

    /// The instruction that was begun.
    pub(crate) fn begun(&self) -> Option<Begun> {
        self.begun
    }

    /// Whether the instruction was begun for a guest that the CPU cannot run.
    pub(crate) fn is_interpreted(&self) -> bool {
        self.interpreted
    }

    /// Begins at the first access again.
    pub(crate) fn rewind(&mut self) {
        self.answered.iter_mut().take(self.count).flatten().for_each(|a| a.taken = false);
    }

    /// The instruction has to be tried again. Whether the guest may begin it: it does not know of what is written.
    pub(crate) fn retry(&mut self) -> bool {
        self.forget_memory();
        !self.settled
    }

    /// What is to be replaced is read again: the instruction has to see what others have stored.
    pub(crate) fn forget_memory(&mut self) {
        self.keep(|answered| answered.by != By::Memory);
    }

    /// The accesses so far are complete, and the instruction goes on: a string's next iteration.
    pub(crate) fn commit(&mut self) {
        (self.count, self.settled, self.asked) = (0, false, None);
        // Items that nobody has taken yet stay: their port gives them once.
        self.items = self.items.and_then(Items::after_iteration);
    }

    /// The instruction is complete or given up.
    pub(crate) fn forget(&mut self) {
        self.commit();
        (self.begun, self.items) = (None, None);
    }

    /// Whether a write was answered: the instruction has to come to its end.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// The answer to `access`, if it was answered before. Looked for before anything else: what was a device then may be
    /// memory now.
    pub(crate) fn next(&mut self, access: &DeviceAccess) -> Option<[u8; 8]> {
        // Another vCPU may have changed what the address is made of: the answer is of another place then.
        self.take(|answered| answered.is_at(access))
    }

    /// The answer to the access of memory at the linear address `at`, if a write was answered. Looked for before `at` is
    /// translated: where it leads by now does not matter.
    pub(crate) fn next_settled(&mut self, at: Gva, len: usize, way: Direction) -> Option<[u8; 8]> {
        if !self.settled {
            return None;
        }
        self.take(|answered| {
            answered.space == vm::irq::Space::Memory
                && answered.direction == way
                && usize::from(answered.size) == len
                && answered.address & PAGE_OFFSET == at.0 & PAGE_OFFSET
        })
    }

    /// The first answer that the instruction has not come to. Not by its place in the log alone: the halves of a store
    /// change places if one of them becomes memory.
    fn take(&mut self, is_it: impl Fn(&DeviceAccess) -> bool) -> Option<[u8; 8]> {
        let mut all = self.answered.iter_mut().take(self.count).flatten();
        let found = all.find(|answered| !answered.taken && is_it(&answered.access))?;
        found.taken = true;
        Some(found.access.data)
    }

    fn record(&mut self, access: DeviceAccess, by: By, taken: bool) {
        // A full log drops what the kernel's devices and memory answer. Who asks user space with a full one is refused.
        if let Some(slot) = self.answered.get_mut(self.count) {
            *slot = Some(Answered { access, by, taken });
            self.count += 1;
            self.settled |= access.is_store();
        }
    }

    /// Drops all but what is `wanted`: the one way by which a single answer goes, and there is none once a write was
    /// answered.
    fn keep(&mut self, wanted: impl Fn(&Answered) -> bool) {
        if self.settled {
            return;
        }
        let mut kept = 0;
        for n in 0..core::mem::take(&mut self.count) {
            let answered = self.answered.get(n).copied().flatten();
            if let (Some(answered), Some(slot)) =
                (answered.filter(&wanted), self.answered.get_mut(kept))
            {
                *slot = Some(answered);
                kept += 1;
            }
        }
        self.count = kept;
    }

    /// What the instruction has not come to goes: it is of places that the instruction no longer asks for. Kept, it would
    /// fill the log.
    fn drop_rest(&mut self) {
        self.keep(|answered| answered.taken);
    }

    /// Records an access that a device of the kernel's has answered, of which some have side effects.
    pub(crate) fn record_done(&mut self, access: DeviceAccess) {
        self.drop_rest();
        self.record(access, By::Device, true);
    }

    /// Records what was read from memory. What a device has answered stays: it may be come to yet.
    pub(crate) fn record_memory(&mut self, access: DeviceAccess) {
        self.keep(|answered| answered.taken || answered.by == By::Device);
        self.record(access, By::Memory, true);
    }

    /// Has user space asked for an access. More than the log holds is none that an instruction makes
    /// which is emulated in earnest.
    pub(crate) fn ask(&mut self, access: DeviceAccess) -> Stop {
        self.drop_rest();
        // Refused and not dropped: an answer that is not remembered would be asked for without an
        // end.
        if self.count >= LOG {
            return Stop::Unsupported;
        }
        self.asked = Some(access);
        Stop::NeedUser
    }

    /// How many of `wanted` items of a port may be had at once: no more than were answered, if they were, since the VMM may
    /// have set other registers meanwhile.
    pub(crate) fn items_at_once(&self, access: &DeviceAccess, wanted: u64) -> u64 {
        // An item is on its way to a device, or was when it was asked for: it is the one that this iteration stores.
        if self.count != 0 {
            return 1;
        }
        match self.items {
            Some(items) if items.answers(access) => wanted.min(items.left().into()),
            _ => wanted,
        }
    }

    /// Whether items of a port were answered that nobody has taken.
    pub(crate) fn has_items(&self) -> bool {
        self.items.is_some_and(|items| items.answered)
    }

    /// Gives the iteration `bytes` of those that were answered: where they lie in [`UserIo::string`].
    pub(crate) fn give_items(&mut self, access: &DeviceAccess, bytes: usize) -> Option<usize> {
        // Those of another port go: the VMM has set other registers, and nobody would ever take them.
        self.items = self.items.filter(|items| !items.answered || items.answers(access));
        let items = self.items.as_mut().filter(|items| items.answers(access))?;
        // Not cut: `items_at_once` has bounded what the iteration asks for.
        items.given = bytes.checked_div(access.size.into())? as u16;
        Some(usize::from(items.taken).saturating_mul(access.size.into()))
    }

    /// Has user space asked for `count` items.
    pub(crate) fn ask_items(&mut self, access: DeviceAccess, count: u16) -> Stop {
        // Of INS the port comes first: what was answered before is of other registers.
        self.commit();
        self.items = Some(Items { access, count, taken: 0, given: 0, answered: false });
        self.ask(access)
    }

    /// What user space is to be asked for, and how many of it.
    pub(crate) fn asked(&self) -> Option<(DeviceAccess, u16)> {
        Some((self.asked?, self.open_items().map_or(1, |items| items.count)))
    }

    /// Items that user space was asked for and has not answered.
    fn open_items(&self) -> Option<Items> {
        self.items.filter(|items| !items.answered)
    }

    /// User space has answered: `mmio` if it was asked for memory, `port` if for a port.
    fn answer(&mut self, mmio: [u8; 8], port: [u8; 8]) {
        // A VMM that calls again without having answered gets what lies there for its answer.
        if let Some(asked) = self.asked.take() {
            // `take_items` has put the answer into a place of its own.
            if let Some(items) = self.items.as_mut().filter(|items| !items.answered) {
                items.answered = true;
                return;
            }
            let data = match asked.space {
                vm::irq::Space::Memory => mmio,
                vm::irq::Space::Port => port,
            };
            self.record(DeviceAccess { data, ..asked }, By::Device, false);
        }
    }
}

/// What is open between two calls of KVM_RUN.
pub(crate) struct UserIo {
    /// What is done with user space's answer.
    pub completion: Completion,
    /// The accesses of the instruction that is emulated.
    pub log: KBox<AccessLog>,
    /// Items of a port that user space has answered.
    pub string: KBox<[u8; STRING_RUN_BYTES]>,
}

impl UserIo {
    /// Nothing is open.
    #[inline(never)]
    pub(crate) fn new() -> Result<Self, NoMemory> {
        let log = KBox::new(AccessLog::default())?;
        let string = KBox::new([0; STRING_RUN_BYTES])?;
        Ok(Self { completion: Completion::Nothing, log, string })
    }

    /// Takes what user space has answered and is more than fits the exit's own words. `answer` fills what it is given.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_items(&mut self, answer: impl FnOnce(&mut [u8])) {
        let Some(items) = self.log.open_items() else { return };
        let len = usize::from(items.count).saturating_mul(items.access.size.into());
        // Bounded by the buffer again, whatever the count says.
        if let Some(data) = self.string.get_mut(..len) {
            answer(data);
        }
    }

    /// Whatever was asked is asked no more.
    pub(crate) fn forget(&mut self) {
        self.completion = Completion::Nothing;
        self.log.forget();
    }
}

impl Items {
    /// How many are left.
    const fn left(&self) -> u16 {
        self.count.saturating_sub(self.taken)
    }

    /// What is left when an iteration is complete.
    fn after_iteration(mut self) -> Option<Self> {
        self.taken = self.taken.saturating_add(core::mem::take(&mut self.given));
        (self.answered && self.left() != 0).then_some(self)
    }

    fn answers(&self, access: &DeviceAccess) -> bool {
        self.answered && self.access.is_at(access)
    }
}

impl<B: Backend> Vcpu<B> {
    /// Completes the instruction that left for user space.
    #[inline(always)]
    pub(crate) fn complete_user_io(&mut self, input: &RunInput) -> Outcome {
        // The usual case costs one comparison.
        if matches!(self.device.user_io.completion, Completion::Nothing) {
            return Ok(());
        }
        // L1 may hear of each instruction of L2's, and this one completes only now.
        if self.pending.after_exit.is_nested() {
            return self.complete_for_l2(input);
        }
        self.complete(input)
    }

    #[cold]
    #[inline(never)]
    fn complete_for_l2(&mut self, input: &RunInput) -> Outcome {
        self.owing_trap(|v| v.complete(input))
    }

    #[inline(always)]
    fn complete(&mut self, input: &RunInput) -> Outcome {
        // Taken first: an emulation that goes on may leave for user space again, and notes its own.
        match core::mem::take(&mut self.device.user_io.completion) {
            Completion::Nothing => {}
            Completion::In { size, next } => self.finish_in(size, self.device.io_data, next),
            Completion::Retire { next } => self.retire(next),
            Completion::Load { simple, next } => self.finish_load(simple, input.mmio_data, next),
            Completion::Msr { direction, next, error, data } => {
                self.finish_msr(direction, next, (!error).then_some(data));
            }
            Completion::Emulation => {
                self.device.user_io.log.answer(input.mmio_data, self.device.io_data);
                return self.emulate_again();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::Gpa;

    #[test]
    fn answers_come_back_in_order_and_run_out() {
        let mut log = AccessLog::default();
        let (port, load) = (DeviceAccess::port_in(1, 1), DeviceAccess::load(Gpa(0), 4));
        assert_eq!(log.ask(port), Stop::NeedUser);
        log.answer([9; 8], [1; 8]);
        assert_eq!(log.next(&port), Some([1; 8]));
        assert_eq!(log.ask(load), Stop::NeedUser);
        log.answer([2; 8], [9; 8]);
        log.rewind();
        assert_eq!(log.next(&port), Some([1; 8]));
        assert_eq!(log.next(&port), None);
        assert_eq!(log.next(&DeviceAccess::port_in(2, 1)), None);
        assert_eq!(log.next(&DeviceAccess::load(Gpa(0), 2)), None);
        assert_eq!(log.next(&load), Some([2; 8]));
        assert_eq!(log.next(&load), None);
        log.rewind();
        assert_eq!(log.next(&port), Some([1; 8]));
    }

    /// Another vCPU may remap the page between two answers, again and again.
    #[test]
    fn an_answer_is_found_behind_one_of_another_place() {
        let (was, is) = (DeviceAccess::load(Gpa(0), 4), DeviceAccess::load(Gpa(0x1000), 4));
        let mut log = AccessLog::default();
        for (before, now) in [(is, was), (was, is)].into_iter().cycle().take(2 * LOG) {
            log.rewind();
            assert_eq!((log.next(&now), log.ask(now)), (None, Stop::NeedUser));
            log.answer([7; 8], [9; 8]);
            log.rewind();
            assert_eq!((log.next(&before), log.next(&now)), (None, Some([7; 8])));
        }
        // A device of the kernel's in its place.
        log.rewind();
        log.record_done(DeviceAccess { data: [3; 8], ..was });
        log.rewind();
        assert_eq!((log.next(&was), log.next(&is)), (Some([3; 8]), None));
    }

    /// Whatever the address leads to by then.
    #[test]
    fn an_answered_write_is_neither_dropped_nor_asked_again() {
        const AT: Gva = Gva(0x7010);
        let places = [Gpa(0x1010), Gpa(0x2010)];
        let [(load, store), (other, _)] =
            places.map(|gpa| (DeviceAccess::load(gpa, 4), DeviceAccess::store(gpa, 4, [6; 8])));
        let mut log = AccessLog::default();
        log.record_memory(DeviceAccess { data: [1; 8], ..DeviceAccess::load(Gpa(0x3000), 1) });
        for (access, data) in [(load, [5; 8]), (store, [0; 8])] {
            assert_eq!(log.next_settled(AT, 4, access.direction), None, "nothing is written yet");
            assert_eq!(log.ask(access), Stop::NeedUser);
            log.answer(data, [9; 8]);
            log.rewind();
            assert_eq!(log.next(&DeviceAccess::load(Gpa(0x3000), 1)), Some([1; 8]));
            assert_eq!(log.next(&load), Some([5; 8]));
        }
        for _ in 0..2 * LOG {
            log.rewind();
            assert!(!log.retry(), "the guest would do all of it");
            let answers = [
                (Gva(0), 1, Direction::Read),
                (AT, 4, Direction::Read),
                (AT, 4, Direction::Write),
                (AT, 4, Direction::Write),
            ]
            .map(|(at, len, way)| log.next_settled(at, len, way).map(|data| data[0]));
            assert_eq!(answers, [Some(1), Some(5), Some(0), None]);
        }
        // Something else is read, or asked.
        log.rewind();
        log.record_memory(other);
        log.record_done(other);
        assert_eq!(log.ask(other), Stop::NeedUser);
        assert!(log.next(&store).is_some());
        log.commit();
        assert!(!log.is_settled());
    }

    #[test]
    fn what_memory_held_is_read_again_unless_something_was_written() {
        let (memory, port) = (DeviceAccess::load(Gpa(0), 4), DeviceAccess::port_in(1, 1));
        let mut log = AccessLog::default();
        log.record_memory(memory);
        log.record_done(port);
        assert!(log.retry());
        log.rewind();
        assert_eq!((log.next(&memory), log.next(&port)), (None, Some([0; 8])));
        // Of another page by now: what the port gave stays, and the log does not grow.
        for page in 1..2 * LOG as u64 {
            log.rewind();
            log.record_memory(DeviceAccess::load(Gpa(page << 12), 4));
            assert!(log.next(&port).is_some() && log.count == 2);
        }
    }

    #[test]
    fn an_item_that_was_asked_for_alone_is_not_lost_among_many() {
        let mut log = AccessLog::default();
        let port = DeviceAccess::port_in(0x80, 1);
        log.ask(port);
        log.answer([0; 8], [7; 8]);
        assert_eq!(log.items_at_once(&port, 100), 1);
        log.commit();
        assert_eq!(log.items_at_once(&port, 100), 100);
    }

    #[test]
    fn items_are_had_at_once_and_no_more_than_were_answered() {
        let mut log = AccessLog::default();
        let port = DeviceAccess::port_in(0x80, 2);
        assert_eq!(log.items_at_once(&port, 300), 300);
        assert_eq!(log.ask_items(port, 200), Stop::NeedUser);
        assert_eq!(log.asked(), Some((port, 200)));
        assert!(!log.has_items() && log.give_items(&port, 2).is_none(), "not yet");
        log.answer([0; 8], [0; 8]);
        assert!(log.has_items() && log.asked().is_none());
        assert_eq!([log.items_at_once(&port, 300), log.items_at_once(&port, 3)], [200, 3]);
        for other in [DeviceAccess::port_in(0x81, 2), DeviceAccess::port_in(0x80, 1)] {
            let mut log = log.clone();
            assert!(log.give_items(&other, 2).is_none() && !log.has_items(), "none of them waits");
        }
        // What they are stored to has become a device's meanwhile: one by one, each once, whatever is asked in between.
        assert_eq!(log.give_items(&port, 2), Some(0));
        let store = DeviceAccess::store(Gpa(0), 2, [1; 8]);
        assert_eq!(log.ask(store), Stop::NeedUser);
        assert_eq!(log.asked(), Some((store, 1)));
        log.answer([0; 8], [0; 8]);
        log.rewind();
        assert_eq!(log.give_items(&port, 2), Some(0));
        assert!(log.next(&store).is_some());
        log.commit();
        assert_eq!(log.give_items(&port, 2), Some(2));
        log.commit();
        assert_eq!((log.items_at_once(&port, 300), log.give_items(&port, 396)), (198, Some(4)));
        log.commit();
        assert!(!log.has_items());
    }

    /// Only the same bytes at the same address, executed by the same level, are the instruction that was answered.
    #[test]
    fn answers_are_those_of_one_instruction() {
        let fetched = |modrm| Fetched::new(&[0x8b, modrm], emulate::CodeSize::Bits64);
        let mov = Begun { rip: 0x1000, fetched: fetched(0), nested: true };
        let port = DeviceAccess::load(Gpa(0), 4);
        let others = [
            Begun { rip: 0x1001, ..mov },
            Begun { fetched: fetched(1), ..mov },
            Begun { nested: false, ..mov },
        ];
        for (now, kept) in others.map(|other| (other, false)).into_iter().chain([(mov, true)]) {
            let mut log = AccessLog::default();
            log.begin(mov, Execution::Emulated);
            log.ask(port);
            log.answer([2; 8], [9; 8]);
            log.begin(now, Execution::Emulated);
            log.rewind();
            assert_eq!(log.next(&port).is_some(), kept, "{now:?}");
        }
    }

    #[test]
    fn what_is_left_of_items_goes_with_the_instruction() {
        let mut log = AccessLog::default();
        let port = DeviceAccess::port_in(0x80, 1);
        log.ask_items(port, 9);
        log.answer([0; 8], [0; 8]);
        log.give_items(&port, 3);
        log.commit();
        assert!(log.has_items());
        log.forget();
        assert!(!log.has_items());
    }

    #[test]
    fn a_store_to_a_device_has_one_to_eight_bytes() {
        for length in 0..=600 {
            let store = DeviceAccess::store_of(Gpa(0), &[1; 600][..length]);
            assert_eq!(
                store.map(|access| access.size),
                (1..=8).contains(&length).then_some(length as u8)
            );
        }
    }

    #[test]
    fn more_accesses_than_the_log_holds_are_refused() {
        let mut log = AccessLog::default();
        for n in 0..LOG as u16 {
            log.record_done(DeviceAccess::port_in(n, 1));
        }
        assert_eq!(log.ask(DeviceAccess::port_in(0, 1)), Stop::Unsupported);
        log.commit();
        assert_eq!(log.ask(DeviceAccess::port_in(0, 1)), Stop::NeedUser);
    }
}
