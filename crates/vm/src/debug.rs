//! What debugfs shows of a VM and of its vCPUs: a file per number, as KVM has them, and two tables,
//! exits by reason and the cycles from exit to re-entry.

use core::ffi::CStr;
use core::fmt::Write;

use alloc::vec::Vec;
use host::{
    Arc,
    debugfs::{DebugDir, DebugObject, Text},
    once::Once,
    sync::Mutex,
};
use stats::{
    BUCKETS, Reason, VcpuCount, VcpuStats, reason,
    table::{OfVcpu, OfVm, VCPU, VCPU_COUNTED, VM, VM_COUNTED},
};

use crate::{statistics::VmStatistics, vcpu_shared::SharedVcpu};

/// The directories of a VM.
#[derive(Default)]
pub struct DebugDirs {
    vcpus: Mutex<Vec<DebugDir>>,
    vm: Once<Arc<DebugDir>>,
}

/// `PID-FD` or `vcpuN` with its NUL.
struct Name([u8; 32], usize);

impl Write for Name {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for byte in text.bytes() {
            // A name that is cut would be another file's, so it fails.
            // The last byte stays a NUL.
            let last = self.0.len() - 1;
            let place = self.0.get_mut(self.1).filter(|_| self.1 < last);
            *place.ok_or(core::fmt::Error)? = byte;
            self.1 += 1;
        }
        Ok(())
    }
}

fn named<R>(name: core::fmt::Arguments<'_>, make: impl FnOnce(&CStr) -> Option<R>) -> Option<R> {
    let mut text = Name([0; 32], 0);
    text.write_fmt(name).ok()?;
    make(CStr::from_bytes_until_nul(&text.0).ok()?)
}

impl DebugDirs {
    /// The VM's directory, once its file has a descriptor. Without one there is nothing to see.
    pub fn add_vm(&self, tid: u32, fd: i32, statistics: &Arc<VmStatistics>) {
        let made =
            named(format_args!("{tid}-{fd}"), |name| DebugDir::new(name, None, statistics.clone()));
        // A convenience: without debugfs, memory or a free name the VM does without.
        if let Some(Ok(dir)) = made.map(Arc::new) {
            let _ = self.vm.set(dir);
        }
    }

    /// The directory of one more vCPU. `ratio_bits`: how many fractional bits the CPU's ratios of the TSC have, if it scales
    /// that.
    pub fn add_vcpu(&self, vcpu: &SharedVcpu, ratio_bits: Option<u32>) {
        match (vcpu.in_kernel_apic, ratio_bits) {
            (true, Some(bits)) => self.add_one::<true, true>(vcpu, bits),
            (true, None) => self.add_one::<true, false>(vcpu, 0),
            (false, Some(bits)) => self.add_one::<false, true>(vcpu, bits),
            (false, None) => self.add_one::<false, false>(vcpu, 0),
        }
    }

    fn add_one<const APIC: bool, const SCALES: bool>(&self, vcpu: &SharedVcpu, ratio_bits: u32) {
        // A VM without a directory has none for its vCPUs either.
        let Some(parent) = self.vm.get() else { return };
        let mut dirs = self.vcpus.lock();
        // The vCPU exists already, and is not given up for its directory.
        if dirs.try_reserve(1).is_err() {
            return;
        }
        let stats = vcpu.stats.clone();
        let Ok(object) = Arc::new(OneVcpu::<APIC, SCALES> { stats, ratio_bits }) else { return };
        let made = named(format_args!("vcpu{}", vcpu.id), |name| {
            DebugDir::new(name, Some(parent), object)
        });
        dirs.extend(made);
    }
}

const REASON_TABLE: u32 = 0;

fn table_name(table: u32) -> &'static CStr {
    if table == REASON_TABLE { c"exit_reasons" } else { c"exit_cycles" }
}

/// The two tables, from what gives the words of a vCPU's statistic.
fn show_table(table: u32, to: &mut Text<'_>, word: impl Fn(&OfVcpu, usize) -> u64) {
    if table == REASON_TABLE {
        let _ = writeln!(to, "{:<18} {:>20} {:>20}", "reason", "exits", "answered_inside");
    } else {
        let _ = writeln!(to, "{:<18} {:>20} {:>20}", "reason", "cycles_below", "exits");
    }
    for reason in reason::ALL {
        if table == REASON_TABLE {
            show_exits(*reason, to, &word);
        } else {
            show_cycles(*reason, to, &word);
        }
    }
}

fn show_exits(reason: Reason, to: &mut Text<'_>, word: &impl Fn(&OfVcpu, usize) -> u64) {
    let exits = word(&OfVcpu::By(reason), 0);
    // Most reasons never occur in a guest: they are left out.
    if exits != 0 {
        let answered = word(&OfVcpu::Answered(reason), 0);
        let _ = writeln!(to, "{:<18} {exits:>20} {answered:>20}", reason.name());
    }
}

fn show_cycles(reason: Reason, to: &mut Text<'_>, word: &impl Fn(&OfVcpu, usize) -> u64) {
    for bucket in 0..BUCKETS {
        let exits = word(&OfVcpu::Cycles(reason), bucket);
        if exits == 0 {
            continue;
        }
        // The last bucket has no upper end.
        let _ = if bucket + 1 == BUCKETS {
            writeln!(to, "{:<18} {:>20} {exits:>20}", reason.name(), "-")
        } else {
            writeln!(to, "{:<18} {:>20} {exits:>20}", reason.name(), 1u64 << bucket)
        };
    }
}

const NUMBERS: u32 = (VM_COUNTED + VCPU_COUNTED) as u32;

/// Where the number of a VM's file comes from.
fn source(file: u32) -> OfVm {
    let at = file as usize;
    // The VM's own, then sums over its vCPUs: stock KVM shows both in the directory of a VM.
    match at.checked_sub(VM_COUNTED) {
        None => VM.get(at).map_or(OfVm::Zero, |desc| desc.source),
        Some(at) => VCPU.get(at).map_or(OfVm::Zero, |desc| OfVm::Sum(desc.source)),
    }
}

impl DebugObject for VmStatistics {
    const FILES: u32 = NUMBERS + 2;
    const NUMBERS: u32 = NUMBERS;

    fn name(file: u32) -> &'static CStr {
        if let Some(table) = file.checked_sub(NUMBERS) {
            return table_name(table);
        }
        let at = file as usize;
        match at.checked_sub(VM_COUNTED) {
            None => VM.get(at).map_or(c"", |desc| desc.name),
            Some(at) => VCPU.get(at).map_or(c"", |desc| desc.name),
        }
    }

    fn value(&self, file: u32) -> u64 {
        self.word(&source(file), 0)
    }

    fn show(&self, file: u32, to: &mut Text<'_>) {
        // The tables stand behind the numbers; debugfs asks for no other file.
        let table = file.saturating_sub(NUMBERS);
        show_table(table, to, |of, n| self.word(&OfVm::Sum(*of), n));
    }
}

/// What the directory of a vCPU shows: the tables, and what stock KVM has there. As there some files depend: on a local APIC
/// in the kernel, and on a CPU that scales the TSC.
struct OneVcpu<const APIC: bool, const SCALES: bool> {
    stats: Arc<VcpuStats>,
    ratio_bits: u32,
}

/// A file of a vCPU.
#[derive(Clone, Copy)]
enum OfOne {
    GuestMode,
    TscOffset,
    TimerAdvance,
    TscRatio,
    TscRatioBits,
    Table(u32),
}

impl<const APIC: bool, const SCALES: bool> OneVcpu<APIC, SCALES> {
    /// Which file that number is.
    fn file(file: u32) -> OfOne {
        match (file, APIC, SCALES) {
            (0, ..) => OfOne::GuestMode,
            (1, ..) => OfOne::TscOffset,
            (2, true, _) => OfOne::TimerAdvance,
            (2, false, true) | (3, true, true) => OfOne::TscRatio,
            (3, false, true) | (4, true, true) => OfOne::TscRatioBits,
            // The tables stand behind those.
            _ => OfOne::Table(file.saturating_sub(Self::FILES - TABLES)),
        }
    }
}

const TABLES: u32 = 2;

impl<const APIC: bool, const SCALES: bool> DebugObject for OneVcpu<APIC, SCALES> {
    const FILES: u32 = 2 + APIC as u32 + 2 * SCALES as u32 + TABLES;
    // The offset has a sign, so none of them is a number to the directory.
    const NUMBERS: u32 = 0;

    fn name(file: u32) -> &'static CStr {
        match Self::file(file) {
            OfOne::GuestMode => c"guest_mode",
            OfOne::TscOffset => c"tsc-offset",
            OfOne::TimerAdvance => c"lapic_timer_advance_ns",
            OfOne::TscRatio => c"tsc-scaling-ratio",
            OfOne::TscRatioBits => c"tsc-scaling-ratio-frac-bits",
            OfOne::Table(table) => table_name(table),
        }
    }

    fn value(&self, _: u32) -> u64 {
        0
    }

    fn show(&self, file: u32, to: &mut Text<'_>) {
        let count = |what| self.stats.get(what);
        let _ = match Self::file(file) {
            OfOne::GuestMode => writeln!(to, "{}", count(VcpuCount::GuestMode)),
            OfOne::TscOffset => writeln!(to, "{}", count(VcpuCount::TscOffset) as i64),
            // No timer is advanced.
            OfOne::TimerAdvance => writeln!(to, "0"),
            OfOne::TscRatio => {
                let more = self.ratio_bits.saturating_sub(RATIO_BITS);
                writeln!(to, "{}", count(VcpuCount::TscRatio) << more)
            }
            OfOne::TscRatioBits => writeln!(to, "{}", self.ratio_bits),
            OfOne::Table(table) => {
                show_table(table, to, |of, n| of.word(&self.stats, n));
                Ok(())
            }
        };
    }
}

/// Fractional bits of a ratio as it is counted.
const RATIO_BITS: u32 = 32;
