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
    BUCKETS, Reason, VcpuStats, reason,
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

    /// The directory of one more vCPU.
    pub fn add_vcpu(&self, vcpu: &SharedVcpu) {
        // A VM without a directory has none for its vCPUs either.
        let Some(parent) = self.vm.get() else { return };
        let mut dirs = self.vcpus.lock();
        // The vCPU exists already, and is not given up for its directory.
        if dirs.try_reserve(1).is_err() {
            return;
        }
        let Ok(object) = Arc::new(OneVcpu(vcpu.stats.clone())) else { return };
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

/// What the directory of a vCPU shows.
struct OneVcpu(Arc<VcpuStats>);

impl DebugObject for OneVcpu {
    const FILES: u32 = 2;
    const NUMBERS: u32 = 0;

    fn name(file: u32) -> &'static CStr {
        table_name(file)
    }

    fn value(&self, _: u32) -> u64 {
        0
    }

    fn show(&self, file: u32, to: &mut Text<'_>) {
        show_table(file, to, |of, n| of.word(&self.0, n));
    }
}
