//! What the plugin of `lab/plugin` does for QEMU, for Bochs: counts what the machine executes, by kind, between two marker
//! instructions, and writes the same JSON line per pair of markers, with the host told from its guests and with the reasons for exits.
//!
//! Debian builds Bochs with the calls of its instrumentation in place, each to an exported function that does nothing. This library is
//! loaded before the emulator (LD_PRELOAD) and puts its own functions in the place of three of them (`hooks.rs`): an instruction was
//! decoded, one is about to be executed, a guest was left. Of SVM's exits there is no such call, and the emulator's own function for
//! them is entered by way of this library's. Bochs shows an instruction's bytes only when it decodes it; what they mean
//! is then noted under the number that the emulator gives to the form of the instruction (`forms.rs`). From VMLAUNCH, VMRESUME or VMRUN to the
//! VM exit it is the guest that executes, all else is the host.
//!
//! `GANNET_LAB_COUNTS` names the file to write. The machines that count have one CPU.

mod forms;
mod hooks;

use forms::{Form, Forms};
use gannet_lab::classify::{KINDS, Kind, Marker};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// One counter for each kind, then one for all instructions.
const COUNTERS: usize = KINDS.len() + 1;
const INSTRUCTIONS: usize = KINDS.len();

const HOST: usize = 0;
const GUEST: usize = 1;

static FORMS: Forms = Forms::new();
/// What was executed since the last start marker, by the host and by its guests. Written by the emulator's one CPU thread.
static COUNTS: [[AtomicU64; COUNTERS]; 2] = [const { [const { AtomicU64::new(0) }; COUNTERS] }; 2];
/// Between two markers.
static COUNTING: AtomicBool = AtomicBool::new(false);
static IN_GUEST: AtomicBool = AtomicBool::new(false);
static EXITS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());
static OUT: Mutex<Option<File>> = Mutex::new(None);

/// Bochs has decoded an instruction of 64-bit code: these are its bytes.
fn decoded(number: usize, instruction: &[u8], bytes: &[u8]) {
    FORMS.learn(number, instruction, bytes);
}

/// An instruction is about to be executed.
#[inline]
fn executed(number: usize, instruction: &[u8]) {
    let form = FORMS.of(number);
    if form == Form::MAY_MARK {
        match FORMS.marker(instruction) {
            Some(Marker::Start) => return start(),
            Some(Marker::Stop) => return stop(),
            None => {}
        }
    }
    let side = if IN_GUEST.load(Relaxed) { GUEST } else { HOST };
    if COUNTING.load(Relaxed) {
        let bump = |counter: &AtomicU64| counter.store(counter.load(Relaxed) + 1, Relaxed);
        bump(&COUNTS[side][INSTRUCTIONS]);
        for kind in form.kinds().into_iter().flatten() {
            bump(&COUNTS[side][kind as usize]);
        }
    }
    if side == HOST && form.enters() {
        IN_GUEST.store(true, Relaxed);
    }
}

/// A guest is left.
fn left(reason: &'static str) {
    IN_GUEST.store(false, Relaxed);
    if COUNTING.load(Relaxed)
        && let Ok(mut exits) = EXITS.lock()
    {
        *exits.entry(reason).or_default() += 1;
    }
}

fn start() {
    COUNTS.iter().flatten().for_each(|counter| counter.store(0, Relaxed));
    if let Ok(mut exits) = EXITS.lock() {
        exits.clear();
    }
    COUNTING.store(true, Relaxed);
}

fn stop() {
    if !COUNTING.swap(false, Relaxed) {
        return;
    }
    // What was counted wrongly is not told: the reader of the file misses a record and says so.
    if let Some(two) = FORMS.confused() {
        eprintln!("gannet-lab-bochs-plugin: one form, two kinds of instructions: {two}");
        return;
    }
    if let (Ok(mut out), Ok(exits)) = (OUT.lock(), EXITS.lock())
        && let Some(out) = out.as_mut()
    {
        let _ = out.write_all(record(&exits).as_bytes());
    }
}

/// One line: a flat JSON object of numbers, as the plugin for QEMU writes it.
fn record(exits: &BTreeMap<&'static str, u64>) -> String {
    let names = || KINDS.iter().map(|k| k.name()).chain(["instructions"]).enumerate();
    let of = |side: usize, i: usize| COUNTS[side][i].load(Relaxed);
    let all = names().map(|(i, name)| format!("\"{name}\":{}", of(HOST, i) + of(GUEST, i)));
    let host = names().map(|(i, name)| format!("\"host.{name}\":{}", of(HOST, i)));
    let exits = exits.iter().map(|(reason, count)| format!("\"exit.{reason}\":{count}"));
    format!("{{{}}}\n", all.chain(host).chain(exits).collect::<Vec<_>>().join(","))
}

impl Form {
    fn enters(self) -> bool {
        matches!(self.kinds()[0], Some(Kind::Vmlaunch | Kind::Vmresume | Kind::Vmrun))
    }
}
