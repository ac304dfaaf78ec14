//! What is done at VM entry and exit against the CPU's leaks.
//!
//! The kernel decides by the CPU's bugs and its own parameters, and most of it is an alternative in
//! the world switch that it patches (`linux/vmx_enter.S`). What is left to choose here is what stock
//! KVM chooses for itself: when the L1 data cache is flushed (L1TF), and whether large pages may be
//! executed (iTLB multihit).
//!
//! L1TF: an entry of a page table that is not present still names a frame to a CPU that speculates,
//! and gives what the L1 cache holds of it. For the host's own tables the kernel inverts such
//! addresses; entries of TDP tables that are not present are zero or have theirs inverted. But a
//! guest writes what it likes into its own tables, so nothing secret may be in the cache while it
//! runs.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

use host::NoMemory;
use host::mitigation::{self, Facts, L1dFlush, L1tf, NxHugePages};
use x86::msr::arch_capabilities;

/// The hypervisor below flushes, or there is no need.
const SKIP_L1D_FLUSH: u64 = arch_capabilities::SKIP_L1DFL_VMENTRY;

/// The mode in use, as an [`L1dFlush`]. It may be changed while guests run.
static MODE: AtomicU8 = AtomicU8::new(L1dFlush::NotRequired as u8);

/// Whether entries of guests that reach a device's memory clear the CPU's buffers.
static CLEARS: AtomicBool = AtomicBool::new(false);

/// Chooses the mode for a CPU with these `facts` and ARCH_CAPABILITIES (0 where it has none).
pub fn choose(facts: Facts, arch_capabilities: u64, asked: L1dFlush) -> L1dFlush {
    // The hypervisor below flushes at its own entries.
    if !facts.any(Facts::L1TF) || arch_capabilities & SKIP_L1D_FLUSH != 0 {
        return L1dFlush::NotRequired;
    }
    match (asked, facts.l1tf()) {
        // l1tf=full,force is for good.
        (_, L1tf::FullForce) => L1dFlush::Always,
        (L1dFlush::Auto, L1tf::Off) => L1dFlush::Never,
        (L1dFlush::Auto, L1tf::Flush) => L1dFlush::Cond,
        (L1dFlush::Auto, L1tf::Full) => L1dFlush::Always,
        // The module's parameter counts over the kernel's, as in stock KVM.
        (asked, _) => asked,
    }
}

/// Chooses, gets ready and tells the kernel. At load, and when the parameter is written. May sleep.
pub fn set_up(facts: Facts, arch_capabilities: u64) -> Result<(), NoMemory> {
    let mode = choose(facts, arch_capabilities, L1dFlush::asked());
    // Memory for the software flush, where the CPU has no command for it.
    if matches!(mode, L1dFlush::Cond | L1dFlush::Always) {
        mitigation::prepare_l1d_flush()?;
    }
    // Behind the preparation: an entry that sees the mode may flush.
    MODE.store(mode as u8, Relaxed);
    CLEARS.store(clears(facts), Relaxed);
    // Told on for /sys/devices/system/cpu/vulnerabilities.
    mode.announce();
    Ok(())
}

/// The mode in use.
pub fn mode() -> L1dFlush {
    match u32::from(MODE.load(Relaxed)) {
        1 => L1dFlush::Never,
        2 => L1dFlush::Cond,
        3 => L1dFlush::Always,
        _ => L1dFlush::NotRequired,
    }
}

/// Whether large pages are split where instructions are fetched: where a change of a page's size under
/// an instruction fetch can stop the machine (iTLB multihit), unless the administrator says otherwise.
pub fn splits_at_fetch(facts: Facts, asked: NxHugePages) -> bool {
    match asked {
        NxHugePages::Auto => facts.any(Facts::ITLB_MULTIHIT) && !facts.any(Facts::ALL_OFF),
        NxHugePages::Off => false,
        NxHugePages::Force => true,
    }
}

/// Whether buffers are to be cleared before guests that reach a device's memory, and nothing else does it at each entry.
pub fn clears(facts: Facts) -> bool {
    facts.any(Facts::VERW_DEVICES) && !facts.any(Facts::VERW)
}

/// As [`clears`] of the facts at load.
pub(crate) fn clears_for_devices() -> bool {
    CLEARS.load(Relaxed)
}

/// The loop begins: whether its first entry is to flush. The host ran on this CPU meanwhile, which
/// is what `cond` waits for; in the loop itself nothing of it runs but the few handlers there.
#[inline]
pub(crate) fn flush_wanted() -> bool {
    let mode = MODE.load(Relaxed);
    // Two comparisons, no match: this is on the path of each run of the loop.
    mode == L1dFlush::Cond as u8 || mode == L1dFlush::Always as u8
}

/// Right before the world switch: flushes. True: the next entry of the same loop need not.
#[cold]
#[inline(never)]
pub(crate) fn flush_before_entry() -> bool {
    mitigation::flush_l1d();
    // `cond`: the loop's first entry is enough, as nothing of the host's secrets is touched in it.
    mode() != L1dFlush::Always
}

/// What is done, a line for each leak: for debugfs, and in short for the log.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    facts: Facts,
    l1d: L1dFlush,
    splits: bool,
}

impl Report {
    /// As things stand now.
    pub fn now() -> Self {
        let facts = Facts::read();
        Self { facts, l1d: mode(), splits: splits_at_fetch(facts, NxHugePages::asked()) }
    }

    /// For the tests.
    pub fn of(facts: Facts, l1d: L1dFlush) -> Self {
        Self { facts, l1d, splits: splits_at_fetch(facts, NxHugePages::Auto) }
    }

    fn lines(&self) -> [(&'static str, &'static str); 11] {
        let has = |bits| self.facts.any(bits);
        let when = |affected: bool, done: bool, what| match (affected, done) {
            (_, true) => what,
            // What is done counts over what is needed: a kernel may do it without a bug to be named.
            (true, false) => "vulnerable: the kernel has switched it off",
            (false, false) => "not affected",
        };
        let l1tf = match self.l1d {
            L1dFlush::NotRequired => "not affected",
            L1dFlush::Never | L1dFlush::Auto => "vulnerable: no cache flush (vmentry_l1d_flush)",
            L1dFlush::Cond if has(Facts::SMT) => "conditional cache flush; SMT vulnerable",
            L1dFlush::Cond => "conditional cache flush",
            L1dFlush::Always if has(Facts::SMT) => "cache flush at every entry; SMT vulnerable",
            L1dFlush::Always => "cache flush at every entry",
        };
        let verw = has(Facts::VERW);
        let itlb = match (has(Facts::ITLB_MULTIHIT), self.splits) {
            (_, true) => "large pages are split where instructions are fetched",
            (true, false) => "vulnerable: large pages may be executed (nx_huge_pages)",
            (false, false) => "not affected",
        };
        let rsb = match () {
            () if has(Facts::RSB_VMEXIT) => "filled after exits",
            () if has(Facts::RSB_VMEXIT_LITE) => "one return retired after exits",
            () => "not filled",
        };
        let spec_ctrl = match (has(Facts::SPEC_CTRL), has(Facts::KERNEL_IBRS)) {
            (false, _) => "not there",
            (true, true) => "switched; IBRS written after every exit",
            (true, false) => "switched where guest and host differ",
        };
        let returns = match () {
            () if has(Facts::IBPB_ON_VMEXIT) => "IBPB after exits",
            () if has(Facts::UNRET) => "untrained after exits",
            () if has(Facts::SPEC_REDUCE) => "reduced while virtualization is on",
            () => "not untrained",
        };
        let mmio = match (has(Facts::MMIO_STALE_DATA), verw) {
            (false, _) => "not affected",
            (true, true) => "VERW before entries",
            (true, false) if clears(self.facts) => {
                "VERW before entries of guests that reach a device's memory"
            }
            (true, false) => "vulnerable: no VERW",
        };
        [
            ("l1tf", l1tf),
            ("mds, taa", when(has(Facts::MDS | Facts::TAA), verw, "VERW before entries")),
            ("rfds", when(has(Facts::RFDS), verw && has(Facts::RFDS), "VERW before entries")),
            ("mmio_stale_data", mmio),
            ("spec_ctrl", spec_ctrl),
            ("rsb", rsb),
            ("bhb", if has(Facts::CLEAR_BHB) { "cleared after exits" } else { "not cleared" }),
            (
                "ibpb",
                if has(Facts::IBPB_ON_SWITCH) { "when another vCPU ran last" } else { "none" },
            ),
            ("tsa", when(has(Facts::TSA), has(Facts::VERW_VM), "VERW before entries")),
            ("returns", returns),
            ("itlb_multihit", itlb),
        ]
    }
}

/// A report in one line.
#[derive(Clone, Copy, Debug)]
pub struct Short(Report);

impl Report {
    /// In one line, for the log: what is done, and what is left open.
    pub fn short(self) -> Short {
        Short(self)
    }
}

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.0.lines().into_iter().filter(|(_, what)| what.starts_with("vulnerable"));
        let has = |bits| self.0.facts.any(bits);
        let yes = |on: bool| if on { "yes" } else { "no" };
        let rsb = has(Facts::RSB_VMEXIT | Facts::RSB_VMEXIT_LITE);
        write!(f, "VERW {}, RSB {}, ", yes(has(Facts::VERW)), yes(rsb))?;
        write!(f, "IBPB {}, BHB {}", yes(has(Facts::IBPB_ON_SWITCH)), yes(has(Facts::CLEAR_BHB)))?;
        let mut first = true;
        for (leak, _) in open {
            write!(f, "{}{leak}", if core::mem::take(&mut first) { "; open: " } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (leak, what) in self.lines() {
            writeln!(f, "{leak}: {what}")?;
        }
        let srbds = if self.facts.any(Facts::SRBDS) {
            "the kernel's, by microcode"
        } else {
            "not affected"
        };
        writeln!(f, "srbds: {srbds}")
    }
}

/// The mode's name as the parameter spells it.
pub fn mode_name(mode: L1dFlush) -> &'static str {
    match mode {
        L1dFlush::Auto => "auto",
        L1dFlush::Never => "never",
        L1dFlush::Cond => "cond",
        L1dFlush::Always => "always",
        L1dFlush::NotRequired => "not required",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use host::mitigation::port::FLUSHES;

    const fn leaky(l1tf: u64) -> Facts {
        Facts(Facts::L1TF | l1tf << 56)
    }

    #[test]
    fn the_kernels_l1tf_parameter_decides_where_nothing_was_asked() {
        let chosen = [0, 1, 2, 3].map(|l1tf| choose(leaky(l1tf), 0, L1dFlush::Auto));
        use L1dFlush::{Always, Cond, Never};
        assert_eq!(chosen, [Never, Cond, Always, Always]);
    }

    #[test]
    fn what_was_asked_counts_but_against_force() {
        for asked in [L1dFlush::Never, L1dFlush::Cond, L1dFlush::Always] {
            for l1tf in 0..3 {
                assert_eq!(choose(leaky(l1tf), 0, asked), asked);
            }
            assert_eq!(choose(leaky(3), 0, asked), L1dFlush::Always);
        }
    }

    #[test]
    fn a_cpu_that_does_not_leak_is_never_flushed() {
        for asked in [L1dFlush::Auto, L1dFlush::Never, L1dFlush::Cond, L1dFlush::Always] {
            assert_eq!(choose(Facts(3 << 56), 0, asked), L1dFlush::NotRequired);
            assert_eq!(choose(leaky(3), SKIP_L1D_FLUSH, asked), L1dFlush::NotRequired);
        }
    }

    /// One test, for the mode is the machine's.
    #[test]
    fn cond_flushes_once_per_loop_and_always_at_every_entry() {
        let flushes = |entries: u32| {
            let before = FLUSHES.get();
            let mut due = flush_wanted();
            for _ in 0..entries {
                due = due && !flush_before_entry();
            }
            FLUSHES.get() - before
        };
        for (mode, wanted) in [
            (L1dFlush::NotRequired, 0),
            (L1dFlush::Never, 0),
            (L1dFlush::Cond, 1),
            (L1dFlush::Always, 5),
        ] {
            MODE.store(mode as u8, Relaxed);
            assert_eq!(super::mode(), mode);
            assert_eq!(flushes(5), wanted, "{mode:?}");
        }
        MODE.store(L1dFlush::NotRequired as u8, Relaxed);
    }

    #[test]
    fn large_pages_are_split_where_they_could_stop_the_machine() {
        use NxHugePages::{Auto, Force, Off};
        let flawed = Facts(Facts::ITLB_MULTIHIT);
        let unwanted = Facts(Facts::ITLB_MULTIHIT | Facts::ALL_OFF);
        let chosen =
            |asked| [Facts(0), flawed, unwanted].map(|facts| splits_at_fetch(facts, asked));
        assert_eq!(chosen(Auto), [false, true, false]);
        assert_eq!(chosen(Off), [false; 3]);
        assert_eq!(chosen(Force), [true; 3]);
    }

    #[test]
    fn buffers_are_cleared_for_devices_where_nothing_else_does() {
        let told = Facts::MMIO_STALE_DATA | Facts::VERW_DEVICES;
        let lines = [0, Facts::MMIO_STALE_DATA, told, told | Facts::VERW].map(|facts| {
            let report = Report::of(Facts(facts), L1dFlush::NotRequired);
            (
                clears(Facts(facts)),
                report.lines().iter().find(|l| l.0 == "mmio_stale_data").unwrap().1,
            )
        });
        let some = "VERW before entries of guests that reach a device's memory";
        assert_eq!(lines[..2], [(false, "not affected"), (false, "vulnerable: no VERW")]);
        assert_eq!(lines[2..], [(true, some), (false, "VERW before entries")]);
    }

    #[test]
    fn the_report_tells_mended_from_vulnerable() {
        let sound = Report::of(Facts(0), L1dFlush::NotRequired).to_string();
        assert!(!sound.contains("vulnerable"), "{sound}");
        let bugs = Facts::L1TF | Facts::MDS | Facts::TAA | Facts::RFDS | Facts::ITLB_MULTIHIT;
        let all = bugs | Facts::TSA | Facts::ALL_OFF;
        let off = Report::of(Facts(all), L1dFlush::Never).to_string();
        assert_eq!(off.matches("vulnerable").count(), 5, "{off}");
        let on = Report::of(Facts(bugs | Facts::VERW | Facts::RSB_VMEXIT), L1dFlush::Cond);
        let on = on.to_string();
        assert!(!on.contains("vulnerable"), "{on}");
        assert!(
            on.contains("l1tf: conditional cache flush\n") && on.contains("large pages are split")
        );
        let smt = Report::of(Facts(bugs | Facts::VERW | Facts::SMT), L1dFlush::Always);
        assert!(smt.to_string().contains("SMT vulnerable"));
    }
}
