//! A plugin for QEMU's software emulator: counts what an emulated machine executes, by kind, between two marker instructions, and
//! writes one JSON line per pair of markers. The counters are bumped in line by translated code, so counting costs little; only the
//! markers and the world switches call out. Everything on the machine is counted alike; what its guests executed is told from what the
//! host executed at the world switches (`worlds.rs`), and each switch back is counted by its reason (`reader.rs`).
//!
//! A line holds `KIND` and `instructions`, of the whole machine; `host.KIND` and `host.instructions`, of the host alone; and
//! `exit.REASON`. Argument: `out=FILE`.

mod qemu;
mod reader;
mod worlds;

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use gannet_lab::classify::{KINDS, Kind, Marker, classify, marker};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, OnceLock};
use worlds::Worlds;

/// Counters per emulated CPU: one for each kind, then one for all instructions.
const COUNTERS: usize = KINDS.len() + 1;
const INSTRUCTIONS: usize = KINDS.len();

/// Emulated CPUs that are told apart; the lab's machines have one or two.
const CPUS: usize = 16;

/// Bytes of VMRUN.
const VMRUN_BYTES: usize = 3;

struct Session {
    scores: *mut qemu::Scoreboard,
    state: Mutex<State>,
    /// Where VMRUNs return to, by their place in the emulator's memory, which no guest's own code shares.
    landings: Mutex<Vec<usize>>,
}

struct State {
    out: File,
    at_start: Option<Totals>,
    worlds: [Worlds; CPUS],
    exits: BTreeMap<&'static str, u64>,
}

/// All that a record is the difference of.
struct Totals {
    all: [u64; COUNTERS],
    guest: [u64; COUNTERS],
    exits: BTreeMap<&'static str, u64>,
}

// SAFETY: the scoreboard pointer is only handed back to QEMU, whose scoreboard functions may be called from any thread.
unsafe impl Send for Session {}
// SAFETY: as above; everything else is behind the mutexes.
unsafe impl Sync for Session {}

static SESSION: OnceLock<Session> = OnceLock::new();

/// The interface version that QEMU checks before anything else.
#[unsafe(no_mangle)]
pub static qemu_plugin_version: c_int = qemu::VERSION;

fn counter(session: &Session, index: usize) -> qemu::Counter {
    qemu::Counter { score: session.scores, offset: index * size_of::<u64>() }
}

fn counts_of(session: &Session, cpu: c_uint) -> [u64; COUNTERS] {
    // SAFETY: the scoreboard has COUNTERS elements of 8 bytes for every CPU and is never freed.
    core::array::from_fn(|i| unsafe { qemu::qemu_plugin_u64_get(counter(session, i), cpu) })
}

fn totals(session: &Session, state: &State) -> Totals {
    // SAFETY: asks for a number.
    let cpus = unsafe { qemu::qemu_plugin_num_vcpus() };
    let (mut all, mut guest) = ([0; COUNTERS], [0; COUNTERS]);
    for (cpu, worlds) in (0..c_uint::try_from(cpus).unwrap_or(0)).zip(&state.worlds) {
        let now = counts_of(session, cpu);
        let of_guest = worlds.guest(&now);
        for i in 0..COUNTERS {
            all[i] += now[i];
            guest[i] += of_guest[i];
        }
    }
    Totals { all, guest, exits: state.exits.clone() }
}

extern "C" fn at_start_marker(_cpu: c_uint, _data: *mut c_void) {
    let Some(session) = SESSION.get() else { return };
    if let Ok(mut state) = session.state.lock() {
        state.at_start = Some(totals(session, &state));
    }
}

extern "C" fn at_stop_marker(_cpu: c_uint, _data: *mut c_void) {
    let Some(session) = SESSION.get() else { return };
    let Ok(mut state) = session.state.lock() else { return };
    let Some(before) = state.at_start.take() else { return };
    let now = totals(session, &state);
    // A full disk shows as a missing record, which the reader of the file reports.
    let _ = state.out.write_all(record(&before, &now).as_bytes());
}

/// One line: a flat JSON object of numbers.
fn record(before: &Totals, now: &Totals) -> String {
    let names = || KINDS.iter().map(|k| k.name()).chain(["instructions"]).enumerate();
    let all = names().map(|(i, name)| format!("\"{name}\":{}", now.all[i] - before.all[i]));
    let host = names().map(|(i, name)| {
        let guest = now.guest[i] - before.guest[i];
        format!("\"host.{name}\":{}", (now.all[i] - before.all[i]).saturating_sub(guest))
    });
    let exits = now.exits.iter().filter_map(|(reason, count)| {
        let count = count - before.exits.get(reason).copied().unwrap_or(0);
        (count > 0).then(|| format!("\"exit.{reason}\":{count}"))
    });
    format!("{{{}}}\n", all.chain(host).chain(exits).collect::<Vec<_>>().join(","))
}

extern "C" fn at_vmrun(cpu: c_uint, _data: *mut c_void) {
    let Some(session) = SESSION.get() else { return };
    let Ok(mut state) = session.state.lock() else { return };
    if let Some(worlds) = state.worlds.get_mut(cpu as usize) {
        worlds.enter(counts_of(session, cpu));
    }
}

/// `data` is the length of the block that has just begun, whose instructions are counted already: they are the host's.
extern "C" fn at_landing(cpu: c_uint, data: *mut c_void) {
    let Some(session) = SESSION.get() else { return };
    let mut now = counts_of(session, cpu);
    now[INSTRUCTIONS] = now[INSTRUCTIONS].saturating_sub(data.addr() as u64);
    let reason = reader::exit_reason(cpu);
    let Ok(mut state) = session.state.lock() else { return };
    let back = state.worlds.get_mut(cpu as usize).is_some_and(|worlds| worlds.leave(&now));
    if back {
        *state.exits.entry(reason.unwrap_or("unread")).or_default() += 1;
    }
}

extern "C" fn on_translation(_id: qemu::Id, block: *mut qemu::Block) {
    let Some(session) = SESSION.get() else { return };
    // SAFETY: QEMU keeps the block and its instructions alive for the length of this callback.
    unsafe {
        let count = qemu::qemu_plugin_tb_n_insns(block);
        qemu::qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(
            block,
            qemu::INLINE_ADD,
            counter(session, INSTRUCTIONS),
            count as u64,
        );
        for index in 0..count {
            let instruction = qemu::qemu_plugin_tb_get_insn(block, index);
            let place = qemu::qemu_plugin_insn_haddr(instruction).addr();
            // Ahead of the instruction's own counting.
            if index == 0 && place != 0 && is_landing(session, place) {
                let length = core::ptr::without_provenance_mut(count);
                register(instruction, at_landing, qemu::READ_REGISTERS, length);
            }
            let mut buffer = [0u8; 16];
            let length =
                qemu::qemu_plugin_insn_data(instruction, buffer.as_mut_ptr().cast(), buffer.len());
            let Some(bytes) = buffer.get(..length) else { continue };
            let none = core::ptr::null_mut();
            match marker(bytes) {
                Some(Marker::Start) => {
                    register(instruction, at_start_marker, qemu::NO_REGISTERS, none);
                }
                Some(Marker::Stop) => {
                    register(instruction, at_stop_marker, qemu::NO_REGISTERS, none);
                }
                None => {
                    let kinds = classify(bytes);
                    for kind in kinds.into_iter().flatten() {
                        let at = counter(session, kind as usize);
                        qemu::qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(
                            instruction,
                            qemu::INLINE_ADD,
                            at,
                            1,
                        );
                    }
                    // Behind it.
                    if kinds.contains(&Some(Kind::Vmrun)) && place != 0 {
                        note_landing(session, place + VMRUN_BYTES);
                        register(instruction, at_vmrun, qemu::NO_REGISTERS, none);
                    }
                }
            }
        }
    }
}

fn is_landing(session: &Session, place: usize) -> bool {
    session.landings.lock().is_ok_and(|landings| landings.contains(&place))
}

fn note_landing(session: &Session, place: usize) {
    if let Ok(mut landings) = session.landings.lock()
        && !landings.contains(&place)
    {
        landings.push(place);
    }
}

/// # Safety
/// `instruction` belongs to the block of the translation callback that is running.
unsafe fn register(
    instruction: *mut qemu::Instruction,
    callback: qemu::InstructionCallback,
    registers: c_int,
    data: *mut c_void,
) {
    // SAFETY: the caller's promise.
    unsafe {
        qemu::qemu_plugin_register_vcpu_insn_exec_cb(instruction, callback, registers, data);
    }
}

/// QEMU's entry point. Returns 0, or 1 with a message on standard error, upon which QEMU does not start.
///
/// # Safety
/// Called by QEMU with its own structures and an argument vector of `argc` C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: qemu::Id,
    info: *const qemu::Info,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    // SAFETY: QEMU passes a valid structure.
    let (oldest, newest, machine) =
        unsafe { ((*info).version_min, (*info).version_cur, (*info).system_emulation) };
    if !(oldest..=newest).contains(&qemu::VERSION) || !machine {
        eprintln!(
            "gannet-lab-plugin: this QEMU speaks plugin interface {oldest}..{newest}, not {}",
            qemu::VERSION
        );
        return 1;
    }
    let arguments = (0..usize::try_from(argc).unwrap_or(0))
        // SAFETY: QEMU passes `argc` NUL-terminated strings.
        .map(|i| unsafe { CStr::from_ptr(*argv.add(i)) }.to_string_lossy().into_owned());
    let Some(path) = arguments.filter_map(|a| a.strip_prefix("out=").map(str::to_owned)).next()
    else {
        eprintln!("gannet-lab-plugin: the argument out=FILE is missing");
        return 1;
    };
    let out = match File::create(&path) {
        Ok(file) => file,
        Err(error) => {
            eprintln!("gannet-lab-plugin: {path}: {error}");
            return 1;
        }
    };
    // SAFETY: called during installation, as QEMU asks.
    let scores = unsafe { qemu::qemu_plugin_scoreboard_new(COUNTERS * size_of::<u64>()) };
    let state = State { out, at_start: None, worlds: [Worlds::NEW; CPUS], exits: BTreeMap::new() };
    let session = Session { scores, state: Mutex::new(state), landings: Mutex::new(Vec::new()) };
    if SESSION.set(session).is_err() {
        eprintln!("gannet-lab-plugin: loaded twice");
        return 1;
    }
    // SAFETY: the callbacks have the types that QEMU expects.
    unsafe {
        qemu::qemu_plugin_register_vcpu_init_cb(id, reader::on_cpu);
        qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    }
    0
}

const _: () = assert!(Kind::Vmrun as usize == 0);
