//! Counts what Bochs's debugger shows while it traces: one line per instruction that the machine executes, host and guest. The same
//! kinds between the same markers as the plugin counts for QEMU.
//!
//! A magic breakpoint (`xchg %bx,%bx`, which the workloads execute before and behind the markers) stops the emulator; the debugger's
//! script then switches the trace on or off and goes on. The machine's own time stands still meanwhile.

use crate::classify::{KINDS, Marker, classify, marker};
use crate::machine::Counts;

/// What the debugger says at a magic breakpoint.
pub const STOPPED: &[u8] = b"(0) Magic breakpoint\n";
/// What it says when the trace has been switched off.
pub const OFF: &[u8] = b"Tracing disabled for CPU0\n";
/// The debugger's script: as many traces as there may be workloads, and on to the machine's end.
pub fn script() -> String {
    "c\ntrace on\nc\ntrace off\n".repeat(200) + "c\n"
}

/// The first address that is the host kernel's and never that of a guest of the lab.
const KERNEL: u64 = 0xffff_8000_0000_0000;

/// Reads the trace.
#[derive(Debug, Default)]
pub struct Trace {
    /// Between two markers.
    current: Option<Record>,
    records: Vec<Counts>,
}

/// Counts of all of the machine, and of the host.
#[derive(Debug)]
struct Record {
    instructions: [u64; 2],
    kinds: [[u64; KINDS.len()]; 2],
}

impl Trace {
    /// Takes one line: `(0).[TIME] [PHYSICAL] CS:RIP (CONTEXT): MNEMONIC ; BYTES`.
    pub fn line(&mut self, line: &str) {
        let Some((place, bytes)) = instruction(line) else { return };
        match (marker(&bytes), &mut self.current) {
            (Some(Marker::Start), current) => *current = Some(Record::new()),
            (Some(Marker::Stop), current) => {
                self.records.extend(current.take().map(|record| record.counts()));
            }
            (None, Some(record)) => record.add(place, &bytes),
            (None, None) => {}
        }
    }

    /// One record per pair of markers.
    pub fn records(self) -> Vec<Counts> {
        self.records
    }
}

/// Where an instruction lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Host,
    Guest,
}

fn instruction(line: &str) -> Option<(Place, Vec<u8>)> {
    let (_, after) = line.strip_prefix("(0).[")?.split_once("] [")?;
    let (_, after) = after.split_once("] ")?;
    let (address, after) = after.split_once(' ')?;
    let (selector, offset) = address.split_once(':')?;
    let selector = u16::from_str_radix(selector, 16).ok()?;
    let offset = u64::from_str_radix(offset, 16).ok()?;
    // A workload runs in ring 0 of its guest, low; the host's programs run in ring 3.
    let place = if offset >= KERNEL || selector & 3 == 3 { Place::Host } else { Place::Guest };
    let digits = after.rsplit_once("; ")?.1.trim();
    let byte = |at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    let bytes = (0..digits.len()).step_by(2).map(byte).collect::<Option<_>>()?;
    Some((place, bytes))
}

impl Record {
    fn new() -> Self {
        Self { instructions: [0; 2], kinds: [[0; KINDS.len()]; 2] }
    }

    fn add(&mut self, place: Place, bytes: &[u8]) {
        let sides = if place == Place::Host { 2 } else { 1 };
        for side in 0..sides {
            self.instructions[side] += 1;
            for kind in classify(bytes).into_iter().flatten() {
                self.kinds[side][kind as usize] += 1;
            }
        }
    }

    fn counts(&self) -> Counts {
        let mut counts = Counts::new();
        for (side, prefix) in ["", "host."].into_iter().enumerate() {
            counts.insert(format!("{prefix}instructions"), self.instructions[side]);
            for kind in KINDS {
                counts.insert(format!("{prefix}{}", kind.name()), self.kinds[side][kind as usize]);
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [&str; 7] = [
        "(0).[90] [0x000000010000] 0008:0000000000010000 (unk. ctxt): cpuid                     ; 0fa2",
        "(0).[91] [0x000000010000] 0008:0000000000010000 (unk. ctxt): nop dword ptr ds:[rax+22302279] ; 0f1f80474e5401",
        "(0).[92] [0x000000010000] 0008:0000000000010007 (unk. ctxt): cpuid                     ; 0fa2",
        "(0).[93] [0x000001e01c56] 0010:ffffffff81e01c56 (unk. ctxt): vmread rax, rdx           ; 0f78d0",
        "(0).[94] [0x0000061c21fb] 0033:00000000004701fb (unk. ctxt): lock cmpxchg dword ptr ds:[rdi], ecx ; f00fb10f",
        "no instruction",
        "(0).[95] [0x000000010000] 0008:000000000001000c (unk. ctxt): nop dword ptr ds:[rax+39079495] ; 0f1f80474e5402",
    ];

    #[test]
    fn what_lies_between_the_markers_is_counted_by_kind_and_place() {
        let mut trace = Trace::default();
        LINES.iter().for_each(|line| trace.line(line));
        let records = trace.records();
        assert_eq!(records.len(), 1);
        let of = |name: &str| records[0][name];
        assert_eq!((of("instructions"), of("host.instructions")), (3, 2));
        assert_eq!((of("cpuid"), of("host.cpuid")), (1, 0));
        assert_eq!((of("vmread"), of("host.vmread"), of("locked")), (1, 1, 1));
    }

    #[test]
    fn a_trace_that_ends_early_leaves_no_record() {
        let mut trace = Trace::default();
        LINES[..5].iter().for_each(|line| trace.line(line));
        assert!(trace.records().is_empty());
    }
}
