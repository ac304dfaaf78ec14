//! The shadow VMCS with which the hardware serves L1's VMREAD and VMWRITE of some fields (SDM vol. 3C §25.10).
//!
//! While L1 runs, the fields that it writes there count there, and the VMCS12 is behind. They are taken over
//! when the VMCS12 is needed; what an exit of L2 has changed is given back before L1 runs. Both as far as the one
//! can differ from the other.
//!
//! Each line costs a VMREAD at each entry, or at each exit, whether or not L1 uses it. So a line that L1 does not use
//! is closed: the access exits, and opens it again ([`Closed`]).

use x86::Direction;
use x86::vmcs::place::{Named, SERVED, SHADOWED, Served, WRITTEN};
use x86::vmcs::{PinControls, ProcControls, ProcControls2, Shadow, event, field};

use super::Machine;
use crate::merge::follows;

/// What is known of the shadow VMCS. A bit stands for a line of [`SHADOWED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mirror {
    /// The values that it holds.
    values: [u64; SERVED],
    /// The value is known.
    known: u32,
    /// L1 may have written another value since it was taken over or given.
    ahead: u32,
    /// The CPU has no such field: accesses of it exit.
    absent: u32,
    /// Which of them L1 uses.
    use_of: Use,
    /// The VMCS12 may have other values that L1 is to read there, or L1 may not write there yet without being lost:
    /// it is given before L1 runs.
    pub(super) due: bool,
}

const _: () = assert!(SERVED <= 32);

/// Lines whose accesses exit, because L1 did not use them of late: VMWRITE of those that L1 writes, VMREAD of those
/// that it only reads. The bitmaps have to say so before L1 runs with a shadow VMCS that was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Closed(u32);

impl Closed {
    /// The lines that are closed in one set and not in the other: what the accesses are, the encoding, and whether
    /// they exit in this one.
    pub fn changes(self, before: Self) -> impl Iterator<Item = (Direction, u16, bool)> {
        Lines(self.0 ^ before.0).filter_map(move |at| {
            let line = SHADOWED.get(at)?;
            Some((Direction::write_if(at < WRITTEN), line.encoding, self.0 & 1 << at != 0))
        })
    }
}

/// Which lines L1 uses. Time is counted in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    closed: u32,
    /// Lines that L1 has written since the last time was over.
    written: u32,
    /// Lines that were opened by an exit: they stay open for many times, lest an L1 that uses one seldom pays for it
    /// often.
    opened: u32,
    /// Entries since the last time was over.
    entries: u8,
    /// Entries of a time.
    time: u8,
    /// Times since the last of the long ones was over.
    times: u8,
}

/// Entries after which a line that L1 has not written is closed.
const TIME: u8 = 128;
/// Times after which a line that was opened by an exit may be closed again.
const LONG: u8 = 32;

impl Use {
    /// All is open.
    const NONE: Self = Self { closed: 0, written: 0, opened: 0, entries: 0, time: TIME, times: 0 };

    /// A time is over. What L1 only reads leaves no trace: it is closed to find out.
    #[cold]
    #[inline(never)]
    fn end_time(&mut self) {
        self.closed = MAY_CLOSE & !(self.written | self.opened);
        (self.written, self.entries) = (0, 0);
        self.times = self.times.wrapping_add(1);
        if self.times >= LONG {
            (self.opened, self.times) = (0, 0);
        }
    }
}

/// Fields that L1 writes.
const ALL_WRITTEN: u32 = (1 << WRITTEN) - 1;

/// Every line.
const ALL: u32 = ((1u64 << SERVED) - 1) as u32;

/// The lines of a set, from the lowest.
struct Lines(u32);

impl Iterator for Lines {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let at = self.0.trailing_zeros();
        self.0 &= self.0.wrapping_sub(1);
        (at < 32).then_some(at as usize)
    }
}

const fn bit(encoding: u32) -> u32 {
    let mut at = 0;
    while at < SERVED {
        // Encodings are even: a field's upper half has none of its own here.
        if SHADOWED[at].encoding as u32 == encoding {
            return 1 << at;
        }
        at += 1;
    }
    0
}

/// What an entry looks at only with an event to be injected.
const WITH_EVENT: u32 =
    bit(field::ENTRY_ERROR_CODE.encoding()) | bit(field::ENTRY_INSTRUCTION_LENGTH.encoding());
/// What it looks at only with a TPR shadow.
const WITH_PRIORITY: u32 = bit(field::TPR_THRESHOLD.encoding());
/// What it looks at only with a preemption timer.
const WITH_TIMER: u32 = bit(field::PREEMPTION_TIMER.encoding());
/// What it looks at only with virtual-interrupt delivery.
const WITH_INTERRUPTS: u32 = bit(field::GUEST_INTERRUPT_STATUS.encoding());
/// What it looks at only with a page-modification log.
const WITH_LOG: u32 = bit(field::PML_INDEX.encoding());
/// What it does not look at each time.
const SELDOM: u32 = WITH_EVENT | WITH_PRIORITY | WITH_TIMER | WITH_INTERRUPTS | WITH_LOG;

/// The line of RIP.
const RIP: usize = bit(field::GUEST_RIP.encoding()).trailing_zeros() as usize;
/// The rights of SS: L1 only reads them, and an entry looks at them for an L2 that halts alone.
const SS_RIGHTS: u32 = bit(field::GUEST_SS_RIGHTS.encoding());
/// Lines that are looked at each time, and may be closed.
const MAY_CLOSE: u32 = ALL_WRITTEN & !SELDOM | SS_RIGHTS;

/// A line that there is; the last for one that there is not.
const fn line(at: usize) -> Served {
    SHADOWED[if at < SERVED { at } else { SERVED - 1 }]
}

/// What is taken over: the lines that L1 may have written, and VMREAD of the shadow VMCS.
struct Taking<'a, R> {
    ahead: u32,
    read: &'a mut R,
}

/// Does something with each line, out of straight code.
macro_rules! each_line {
    ($this:ident, $each:ident, $with:expr) => {{
        let with = $with;
        each_line!(@ $this, $each, with, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        each_line!(@ $this, $each, with, 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
    }};
    (@ $this:ident, $each:ident, $with:ident, $($at:literal)*) => {
        $($this.$each::<$at>($with);)*
    };
}

impl Mirror {
    pub(super) const UNKNOWN: Self =
        // Nothing is known, so that the first time all lines are written.
        Self {
            values: [0; SERVED],
            known: 0,
            ahead: 0,
            absent: 0,
            use_of: Use::NONE,
            due: true,
        };

    /// The VMCS12 is another one: what L1 wrote into the shadow VMCS counts no more.
    pub(super) fn drop_writes(&mut self) {
        // L1 may have written them: what the hardware holds there is not known.
        self.known &= !self.ahead;
        self.ahead = 0;
        self.due = true;
    }

    /// L1's access of a field that exits: if it does because its line was closed, it is open from now on. The line is
    /// given before L1 runs.
    pub(super) fn use_by_exit(&mut self, named: Named, using: Direction) {
        let served = match named.place.shadow {
            Shadow::No => false,
            Shadow::Read => !using.is_write(),
            Shadow::ReadWrite => using.is_write(),
        };
        if served && self.use_of.closed & line_of(named) != 0 {
            self.use_of.closed &= !line_of(named);
            self.use_of.opened |= line_of(named);
            self.due = true;
        }
    }

    /// Whether an exit of L2 leaves the rights of SS to be fetched.
    #[inline]
    pub(super) fn leaves_ss_rights(&self) -> bool {
        self.use_of.closed & SS_RIGHTS != 0
    }

    /// Whether an exit leaves a field to be fetched that L1 reads there as long as its line is open.
    pub(super) fn leaves(&self, named: Named) -> bool {
        self.use_of.closed & line_of(named) & !ALL_WRITTEN != 0
    }
}

/// The line of a field, if it is served.
fn line_of(named: Named) -> u32 {
    let at = SHADOWED.iter().position(|line| line.place.offset == named.place.offset);
    at.and_then(|at| 1u32.checked_shl(at as u32)).unwrap_or(0)
}

impl Machine {
    /// Has a line that L1 does not use be closed after as many entries. Tests do not want to wait.
    pub fn close_after(&mut self, entries: u8) {
        self.mirror.use_of.time = entries;
    }

    /// Tells which fields the CPU's own VMCSs have, before the shadow VMCS serves.
    pub fn serve(&mut self, has: impl Fn(u16) -> bool) {
        let lines = SHADOWED.iter().enumerate();
        self.mirror.absent =
            lines.filter(|(_, line)| !has(line.encoding)).fold(0, |all, (at, _)| all | 1 << at);
        // Only seldom ones may be missing: a line of straight code is not asked.
        // Straight code reads and writes the others.
        debug_assert!(self.mirror.absent & !SELDOM == 0);
    }

    /// Whether the shadow VMCS may hold values that the VMCS12 does not have.
    #[inline]
    pub fn is_mirror_ahead(&self) -> bool {
        self.mirror.ahead != 0
    }

    /// Whether the shadow VMCS has to be given ([`Self::give_mirror`]) before L1 runs. It has to whenever something
    /// was taken: what L1 writes there afterwards would not be taken again.
    #[inline]
    pub fn is_mirror_due(&self) -> bool {
        self.mirror.due
    }

    /// What L1 wrote into the shadow VMCS was taken over while it goes on to serve L1: it is given anew before that.
    pub fn mirror_taken(&mut self) {
        self.mirror.due = true;
    }

    /// Takes over all that L1 may have written into the shadow VMCS. `read` is VMREAD of it.
    pub fn take_mirror(&mut self, mut read: impl FnMut(u32) -> u64) {
        // Lines that L1 may not write cannot be ahead.
        self.take_lines(self.mirror.ahead, &mut read);
    }

    /// Takes over as much as an entry looks at.
    #[inline]
    pub fn take_mirror_for_entry(&mut self, mut read: impl FnMut(u32) -> u64) {
        // What is taken is L1's no more: it is given again before L1 runs, or its later writes would be lost.
        self.mirror.due = true;
        // Each line with its places as constants. What is closed is not ahead.
        let ahead = self.mirror.ahead;
        let taking = &mut Taking { ahead, read: &mut read };
        if ahead & !SELDOM == 1 << RIP {
            // As most often: past the instruction that has exited.
            self.take_line::<RIP>(taking);
        } else {
            each_line!(self, take_line, taking);
        }
        // The others were not taken, and stay ahead.
        self.mirror.ahead = ahead & SELDOM;
        // Behind the lines above: L1 may have switched on by one of them what others are for.
        let more = self.looked_at();
        // A field that no control makes an entry look at stays where L1 wrote it. That is a VMREAD spared for each.
        if self.mirror.ahead & more != 0 {
            self.take_lines(self.mirror.ahead & more, &mut read);
        }
    }

    /// An entry of L1's: whether it has to take something over ([`Self::take_mirror_for_entry`]).
    #[inline]
    pub fn asks_mirror(&mut self) -> bool {
        let of = &mut self.mirror.use_of;
        of.entries = of.entries.wrapping_add(1);
        if of.entries >= of.time {
            of.end_time();
            // What is closed from now on exits.
            self.mirror.due = true;
        }
        let ahead = self.mirror.ahead;
        // In this order: mostly the first is asked alone.
        ahead & !SELDOM != 0 || ahead & self.looked_at() != 0
    }

    /// Lines that are looked at seldom, and by the next entry.
    #[inline]
    fn looked_at(&self) -> u32 {
        let injects = self.vmcs12.get(field::ENTRY_INTERRUPTION) & event::VALID != 0;
        let mut more = if injects { WITH_EVENT } else { 0 };
        if self.vmcs12.primary().contains(ProcControls::TPR_SHADOW) {
            more |= WITH_PRIORITY;
        }
        if self.vmcs12.pin().contains(PinControls::PREEMPTION_TIMER) {
            more |= WITH_TIMER;
        }
        let second = self.vmcs12.secondary();
        if second.contains(ProcControls2::VIRTUAL_INTERRUPTS) {
            more |= WITH_INTERRUPTS;
        }
        if second.contains(ProcControls2::PML) {
            more |= WITH_LOG;
        }
        more
    }

    #[inline(always)]
    fn take_line<const AT: usize>(&mut self, taking: &mut Taking<impl FnMut(u32) -> u64>) {
        // Constants: the branch is gone in the code that is made.
        if AT >= WRITTEN || SELDOM & 1 << AT != 0 {
            return;
        }
        if taking.ahead & 1 << AT == 0 {
            return;
        }
        let served = const { &line(AT) };
        let value = (taking.read)(served.encoding.into());
        if let Some(held) = self.mirror.values.get_mut(AT) {
            *held = value;
        }
        // Compared before anything is called: most lines are what they were.
        if self.vmcs12.served(served) != value {
            // A constant: most lines have nothing that follows.
            self.dirty = self.dirty.union(const { follows(line(AT).encoding as u32) });
            self.mirror.use_of.written |= 1 << AT;
            self.change_line(AT, value);
        }
    }

    #[cold]
    #[inline(never)]
    fn change_line(&mut self, at: usize, value: u64) {
        // What an exit loads as L1's segments stays: none of the fields served here is among what
        // decides about it.
        if let Some(served) = SHADOWED.get(at)
            && self.vmcs12.take_served(served, value)
        {
            self.dirty.add(served.place.group);
            self.unchecked.add(served.place.group);
        }
    }

    #[inline(always)]
    fn give_line<const AT: usize>(&mut self, write: &mut impl FnMut(u32, u64)) {
        if AT >= SERVED || SELDOM & 1 << AT != 0 {
            return;
        }
        let served = const { &line(AT) };
        let value = self.vmcs12.served(served);
        if let Some(held) = self.mirror.values.get_mut(AT)
            && *held != value
        {
            *held = value;
            write(served.encoding.into(), value);
        }
    }

    #[cold]
    #[inline(never)]
    fn take_lines(&mut self, lines: u32, read: &mut impl FnMut(u32) -> u64) {
        // Ahead no more, absent lines too: those are in VMCS12 by their exits.
        self.mirror.ahead &= !lines;
        self.mirror.due = true;
        // Mostly there is one.
        for at in Lines(lines & ALL_WRITTEN & !self.mirror.absent) {
            let Some((served, held)) = SHADOWED.get(at).zip(self.mirror.values.get_mut(at)) else {
                return;
            };
            let value = read(served.encoding.into());
            *held = value;
            if self.vmcs12.take_served(served, value) {
                self.dirty.add(served.place.group);
                self.dirty = self.dirty.union(follows(served.encoding.into()));
                self.unchecked.add(served.place.group);
            }
        }
    }

    /// Writes into the shadow VMCS what it does not hold yet; L1 may write there from then on. `write` is VMWRITE
    /// of it. The accesses that it does not serve are told.
    #[inline]
    #[must_use = "L1 may write a line only if it is taken over later"]
    pub fn give_mirror(&mut self, mut write: impl FnMut(u32, u64)) -> Closed {
        // What is ahead and was not taken must not be overwritten: L1 wrote it later than VMCS12 has it.
        let seldom = SELDOM & !self.mirror.ahead;
        // The first time, or behind a VMCS12 that was exchanged, each line is looked at.
        if self.mirror.known != u32::MAX || self.mirror.ahead & !SELDOM != 0 {
            self.give_lines(u32::MAX, &mut write);
        } else {
            each_line!(self, give_line, &mut write);
            if seldom != 0 {
                self.give_lines(seldom, &mut write);
            }
        }
        // Lines that are ahead are not known in truth; they are taken before they are compared ([`Mirror::drop_writes`]).
        self.mirror.known = u32::MAX;
        // From here on L1 runs, and may write any of them without an exit that is open.
        let closed = self.mirror.use_of.closed;
        // What is ahead already stays so: it was not taken.
        self.mirror.ahead |= ALL_WRITTEN & !closed;
        self.mirror.due = false;
        Closed(closed)
    }

    #[cold]
    #[inline(never)]
    fn give_lines(&mut self, lines: u32, write: &mut impl FnMut(u32, u64)) {
        let Mirror { values, known, ahead, absent, .. } = &mut self.mirror;
        for at in Lines(lines & ALL & !(*absent | *ahead)) {
            let Some((served, held)) = SHADOWED.get(at).zip(values.get_mut(at)) else { return };
            let value = self.vmcs12.served(served);
            if *known & 1 << at == 0 || *held != value {
                *held = value;
                write(served.encoding.into(), value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use x86::vmcs::{ExitReason, Group, Groups};

    use super::*;
    use crate::leave::{REST, Report};
    use crate::machine::{Instruction, Place};
    use crate::testing::{KNOWN, Memory, Vmcs02, capabilities, good};

    /// The shadow VMCS as the hardware has it.
    struct Hardware(std::collections::BTreeMap<u32, u64>, Closed);

    impl Hardware {
        fn give(&mut self, machine: &mut Machine) -> usize {
            let mut written = 0;
            self.1 = machine.give_mirror(|encoding, value| {
                self.0.insert(encoding, value);
                written += 1;
            });
            written
        }

        fn take(&mut self, machine: &mut Machine) -> usize {
            let mut read = 0;
            if machine.asks_mirror() {
                machine.take_mirror_for_entry(|encoding| {
                    read += 1;
                    self.0.get(&encoding).copied().unwrap_or(0)
                });
            }
            read
        }
    }

    /// Fields that each entry looks at.
    const ALWAYS: usize = WRITTEN - 6;

    fn machine() -> (Machine, Hardware) {
        let mut machine = Machine::new(capabilities());
        *machine.vmcs12_mut() = good();
        (machine, Hardware(Default::default(), Closed::default()))
    }

    #[test]
    fn all_is_given_at_first_and_then_what_differs() {
        let (mut machine, mut hardware) = machine();
        assert!(machine.is_mirror_due() && !machine.is_mirror_ahead());
        assert_eq!(hardware.give(&mut machine), SERVED);
        assert_eq!(hardware.0[&field::GUEST_RIP.encoding()], 0x4000);
        assert_eq!(hardware.take(&mut machine), ALWAYS);
        machine.vmcs12_mut().set(field::EXIT_REASON, 10);
        machine.vmcs12_mut().set(field::GUEST_RIP, 0x4002);
        assert_eq!(hardware.give(&mut machine), 2);
        assert!(!machine.is_mirror_due() && machine.is_mirror_ahead());
    }

    #[test]
    fn what_l1_wrote_is_dirty_only_if_it_differs() {
        let (mut machine, mut hardware) = machine();
        hardware.give(&mut machine);
        machine.dirty = Groups::NONE;
        hardware.take(&mut machine);
        assert!(machine.dirty.is_empty());
        hardware.give(&mut machine);
        hardware.0.insert(field::GUEST_RIP.encoding(), 0x9999);
        hardware.take(&mut machine);
        assert!(machine.dirty.has(Group::Flow) && machine.unchecked.has(Group::Flow));
        assert!(!machine.dirty.has(Group::Time));
        // Bit 3, offsetting: what the offset is for goes with it.
        hardware.give(&mut machine);
        let word = field::PROC_CONTROLS.encoding();
        let before = u64::from(machine.vmcs12().get(field::PROC_CONTROLS));
        hardware.0.insert(word, before ^ 1 << 3);
        hardware.take(&mut machine);
        assert!(machine.dirty.has(Group::Time));
        assert_eq!(machine.vmcs12.get(field::GUEST_RIP), 0x9999);
    }

    #[test]
    fn what_an_entry_did_not_look_at_is_l1s_until_it_is_taken() {
        let (mut machine, mut hardware) = machine();
        let code = field::ENTRY_ERROR_CODE;
        hardware.give(&mut machine);
        hardware.0.insert(code.encoding(), 0x55);
        hardware.take(&mut machine);
        assert_eq!(machine.vmcs12.get(code), 0);
        hardware.give(&mut machine);
        assert_eq!(hardware.0[&code.encoding()], 0x55, "not overwritten");
        machine.take_mirror(|encoding| hardware.0[&encoding]);
        assert_eq!(machine.vmcs12.get(code), 0x55);
        // With an event to be injected it is looked at.
        hardware.give(&mut machine);
        hardware.0.insert(code.encoding(), 0x66);
        hardware.0.insert(field::ENTRY_INTERRUPTION.encoding(), 0x8000_0b0d);
        assert_eq!(hardware.take(&mut machine), ALWAYS + 2);
        assert_eq!(machine.vmcs12.get(code), 0x66);
    }

    #[test]
    fn with_a_tpr_shadow_an_entry_looks_at_the_threshold() {
        let (mut machine, mut hardware) = machine();
        let primary = machine.vmcs12.get(field::PROC_CONTROLS);
        machine.vmcs12.set(field::PROC_CONTROLS, primary | 1 << 21);
        let threshold = field::TPR_THRESHOLD;
        hardware.give(&mut machine);
        for value in [6, 5] {
            hardware.0.insert(threshold.encoding(), value);
            assert_eq!(hardware.take(&mut machine), ALWAYS + 1);
            assert_eq!(u64::from(machine.vmcs12.get(threshold)), value);
            assert_eq!(hardware.give(&mut machine), 0);
        }
        // What is taken seldom and changed by L0 is given as well.
        hardware.take(&mut machine);
        machine.vmcs12.set(threshold, 9);
        assert_eq!(hardware.give(&mut machine), 1);
        assert_eq!(hardware.0[&threshold.encoding()], 9);
    }

    #[test]
    fn the_index_of_a_log_is_looked_at_with_a_log() {
        let (mut machine, mut hardware) = machine();
        let index = field::PML_INDEX;
        let (primary, second) =
            (machine.vmcs12.get(field::PROC_CONTROLS), machine.vmcs12.get(field::PROC_CONTROLS2));
        machine.vmcs12.set(field::PROC_CONTROLS, primary | 1 << 31);
        hardware.give(&mut machine);
        hardware.0.insert(index.encoding(), 511);
        assert_eq!(hardware.take(&mut machine), ALWAYS);
        hardware.give(&mut machine);
        assert_eq!(hardware.0[&index.encoding()], 511, "L1's own");
        machine.vmcs12.set(field::PROC_CONTROLS2, second | ProcControls2::PML.bits());
        machine.dirty = Groups::NONE;
        assert_eq!(hardware.take(&mut machine), ALWAYS + 1);
        // No check looks at it, nor does it change a word.
        assert!(machine.dirty == Groups::of(Group::Status));
        machine.vmcs12.set(index, 510);
        assert_eq!(hardware.give(&mut machine), 1);
        assert_eq!(hardware.0[&index.encoding()], 510);
    }

    #[test]
    fn a_field_that_the_cpu_lacks_is_not_touched() {
        let (mut machine, mut hardware) = machine();
        let absent = [field::PML_INDEX, field::GUEST_INTERRUPT_STATUS].map(|f| f.encoding());
        machine.serve(|encoding| !absent.contains(&encoding.into()));
        assert_eq!(hardware.give(&mut machine), SERVED - 2);
        machine.take_mirror(|encoding| {
            assert!(!absent.contains(&encoding));
            0
        });
        assert!(!machine.is_mirror_ahead());
    }

    #[test]
    fn another_vmcs12_is_not_told_what_l1_wrote_into_the_one_before() {
        let (mut machine, mut hardware) = machine();
        hardware.give(&mut machine);
        hardware.0.insert(field::GUEST_RSP.encoding(), 0x7777);
        machine.set_regions(None, None);
        assert_eq!(hardware.take(&mut machine), 0);
        machine.vmcs12_mut().set(field::GUEST_RSP, 0x1234);
        hardware.give(&mut machine);
        assert_eq!(hardware.0[&field::GUEST_RSP.encoding()], 0x1234);
    }

    fn named(field: u32) -> Named {
        x86::vmcs::place::find(field.into()).unwrap()
    }

    /// Entries at which L1 has written RIP alone.
    fn enter(machine: &mut Machine, hardware: &mut Hardware, times: u64) {
        for rip in 0..times {
            hardware.give(machine);
            hardware.0.insert(field::GUEST_RIP.encoding(), 0x10_0000 + rip);
            hardware.take(machine);
        }
        hardware.give(machine);
    }

    fn exits(hardware: &Hardware, using: Direction, field: u32) -> bool {
        let mut all = hardware.1.changes(Closed::default());
        all.any(|(to, encoding, _)| (to, encoding.into()) == (using, field))
    }

    #[test]
    fn what_l1_does_not_write_is_looked_at_no_more() {
        let (mut machine, mut hardware) = machine();
        enter(&mut machine, &mut hardware, TIME.into());
        assert!(!exits(&hardware, Direction::Write, field::GUEST_RIP.encoding()));
        assert!(exits(&hardware, Direction::Write, field::GUEST_RSP.encoding()));
        assert!(exits(&hardware, Direction::Read, field::GUEST_SS_RIGHTS.encoding()));
        assert_eq!(hardware.1.changes(Closed::default()).count(), ALWAYS);
        hardware.0.insert(field::GUEST_RIP.encoding(), 0x9999);
        assert_eq!(hardware.take(&mut machine), 1);
        assert_eq!(machine.vmcs12.get(field::GUEST_RIP), 0x9999);
        // What is looked at seldom is not closed: it costs nothing where it is not looked at.
        assert!(!exits(&hardware, Direction::Write, field::ENTRY_ERROR_CODE.encoding()));
    }

    #[test]
    fn a_closed_field_that_l1_writes_is_open_for_long() {
        let (mut machine, mut hardware) = machine();
        enter(&mut machine, &mut hardware, TIME.into());
        let rsp = field::GUEST_RSP.encoding();
        // By an exit; L1 reads what it wrote without one.
        machine.set_field(rsp.into(), named(rsp), 0x7777);
        assert!(machine.is_mirror_due());
        assert_eq!(hardware.give(&mut machine), 1);
        assert!(hardware.0[&rsp] == 0x7777 && !exits(&hardware, Direction::Write, rsp));
        hardware.0.insert(rsp, 0x8888);
        assert_eq!(hardware.take(&mut machine), 2);
        assert_eq!(machine.vmcs12.get(field::GUEST_RSP), 0x8888);
        // The same value opens it, too: the hardware does not tell which are the same.
        enter(&mut machine, &mut hardware, u64::from(TIME) * u64::from(LONG - 2));
        assert!(!exits(&hardware, Direction::Write, rsp));
        enter(&mut machine, &mut hardware, u64::from(TIME) * 3);
        assert!(exits(&hardware, Direction::Write, rsp));
        machine.set_field(rsp.into(), named(rsp), 0x8888);
        hardware.give(&mut machine);
        assert!(!exits(&hardware, Direction::Write, rsp));
    }

    #[test]
    fn rights_of_ss_that_l1_does_not_read_are_left_where_they_are() {
        let (mut machine, mut hardware) = machine();
        let (rights, old) = (field::GUEST_SS_RIGHTS, machine.vmcs12.get(field::GUEST_SS_RIGHTS));
        enter(&mut machine, &mut hardware, TIME.into());
        let mut exit = Vmcs02::new();
        exit.put(rights, 0xc0f3);
        let report = Report::plain(ExitReason::Cpuid, 0);
        machine.leave(&exit, &report, &KNOWN, &Memory::new());
        assert_eq!(machine.vmcs12.get(rights), old);
        let read = Instruction::Vmread { field: rights.encoding().into(), to: Place::Register(0) };
        assert!(machine.needs(&read).has(Group::Segments));
        // An L2 that halts is of CPL 0, which the entry checks.
        (machine.dirty, machine.unchecked) = (Groups::NONE, Groups::NONE);
        assert!(machine.needs_to_enter().is_empty());
        machine.vmcs12.set(field::GUEST_ACTIVITY, 1);
        assert!(machine.needs_to_enter().has(Group::Segments));
        machine.vmcs12.set(field::GUEST_ACTIVITY, 0);
        machine.fetch(&exit, &KNOWN, REST);
        machine.mirror.use_by_exit(named(rights.encoding()), Direction::Read);
        hardware.give(&mut machine);
        assert_eq!(hardware.0[&rights.encoding()], 0xc0f3);
        assert!(!exits(&hardware, Direction::Read, rights.encoding()));
        machine.leave(&exit, &report, &KNOWN, &Memory::new());
        assert!(machine.needs(&read).is_empty());
    }
}
