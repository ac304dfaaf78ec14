//! The shadow VMCS with which the hardware serves L1's VMREAD and VMWRITE of some fields (SDM vol. 3C §25.10).
//!
//! While L1 runs, the fields that it writes there count there, and the VMCS12 is behind. They are taken over
//! when the VMCS12 is needed; what an exit of L2 has changed is given back before L1 runs. Both as far as the one
//! can differ from the other.

use x86::vmcs::place::{SERVED, SHADOWED, Served, WRITTEN};
use x86::vmcs::{PinControls, ProcControls, ProcControls2, event, field};

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
    /// The VMCS12 may have other values that L1 is to read there, or L1 may not write there yet without being lost:
    /// it is given before L1 runs.
    pub(super) due: bool,
}

const _: () = assert!(SERVED <= 32);

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
    while at < WRITTEN {
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

/// A line that there is; the last for one that there is not.
const fn line(at: usize) -> Served {
    SHADOWED[if at < SERVED { at } else { SERVED - 1 }]
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
        Self { values: [0; SERVED], known: 0, ahead: 0, absent: 0, due: true };

    /// The VMCS12 is another one: what L1 wrote into the shadow VMCS counts no more.
    pub(super) fn drop_writes(&mut self) {
        // L1 may have written them: what the hardware holds there is not known.
        self.known &= !self.ahead;
        self.ahead = 0;
        self.due = true;
    }
}

impl Machine {
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
        if self.mirror.ahead == ALL_WRITTEN {
            // As nearly always: each line with its places as constants.
            each_line!(self, take_line, &mut read);
            // The others were not taken, and stay ahead.
            self.mirror.ahead = SELDOM;
        } else {
            self.take_lines(self.mirror.ahead & !SELDOM, &mut read);
        }
        // Asked of VMCS12 behind the lines above: L1 may have switched it on by a line among them.
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
        // A field that no control makes an entry look at stays where L1 wrote it. That is a VMREAD spared for each.
        if self.mirror.ahead & more != 0 {
            self.take_lines(self.mirror.ahead & more, &mut read);
        }
    }

    #[inline(always)]
    fn take_line<const AT: usize>(&mut self, read: &mut impl FnMut(u32) -> u64) {
        // Constants: the branch is gone in the code that is made.
        if AT >= WRITTEN || SELDOM & 1 << AT != 0 {
            return;
        }
        let served = const { &line(AT) };
        let value = read(served.encoding.into());
        if let Some(held) = self.mirror.values.get_mut(AT) {
            *held = value;
        }
        // Compared before anything is called: most lines are what they were.
        if self.vmcs12.served(served) != value {
            // A constant: most lines have nothing that follows.
            self.dirty = self.dirty.union(const { follows(line(AT).encoding as u32) });
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
    /// of it.
    #[inline]
    pub fn give_mirror(&mut self, mut write: impl FnMut(u32, u64)) {
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
        // From here on L1 runs, and may write any of them without an exit.
        self.mirror.ahead = ALL_WRITTEN;
        self.mirror.due = false;
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
    use x86::vmcs::{Group, Groups};

    use super::*;
    use crate::testing::{capabilities, good};

    /// The shadow VMCS as the hardware has it.
    struct Hardware(std::collections::BTreeMap<u32, u64>);

    impl Hardware {
        fn give(&mut self, machine: &mut Machine) -> usize {
            let mut written = 0;
            machine.give_mirror(|encoding, value| {
                self.0.insert(encoding, value);
                written += 1;
            });
            written
        }

        fn take(&mut self, machine: &mut Machine) -> usize {
            let mut read = 0;
            machine.take_mirror_for_entry(|encoding| {
                read += 1;
                self.0.get(&encoding).copied().unwrap_or(0)
            });
            read
        }
    }

    /// Fields that each entry looks at.
    const ALWAYS: usize = WRITTEN - 6;

    fn machine() -> (Machine, Hardware) {
        let mut machine = Machine::new(capabilities());
        *machine.vmcs12_mut() = good();
        (machine, Hardware(Default::default()))
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
}
