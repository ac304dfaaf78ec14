//! A plugin for QEMU's software emulator: counts what an emulated machine executes, by kind, between two marker instructions, and
//! writes one JSON line per pair of markers. The counters are bumped in line by translated code, so counting costs little; the
//! markers alone call out. Everything on the machine is counted alike, whether its L1 host or its L2 guest runs.
//!
//! Argument: `out=FILE`.

mod qemu;

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use gannet_lab::classify::{KINDS, Kind, Marker, classify, marker};
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, OnceLock};

/// Counters per emulated CPU: one for each kind, then one for all instructions.
const COUNTERS: usize = KINDS.len() + 1;

struct Session {
    scores: *mut qemu::Scoreboard,
    state: Mutex<State>,
}

struct State {
    out: File,
    at_start: Option<[u64; COUNTERS]>,
}

// SAFETY: the scoreboard pointer is only handed back to QEMU, whose scoreboard functions may be called from any thread.
unsafe impl Send for Session {}
// SAFETY: as above; everything else is behind the mutex.
unsafe impl Sync for Session {}

static SESSION: OnceLock<Session> = OnceLock::new();

/// The interface version that QEMU checks before anything else.
#[unsafe(no_mangle)]
pub static qemu_plugin_version: c_int = qemu::VERSION;

fn counter(session: &Session, index: usize) -> qemu::Counter {
    qemu::Counter { score: session.scores, offset: index * size_of::<u64>() }
}

fn totals(session: &Session) -> [u64; COUNTERS] {
    // SAFETY: the scoreboard has COUNTERS elements of 8 bytes and is never freed.
    core::array::from_fn(|i| unsafe { qemu::qemu_plugin_u64_sum(counter(session, i)) })
}

extern "C" fn at_start_marker(_cpu: c_uint, _data: *mut c_void) {
    let Some(session) = SESSION.get() else { return };
    let now = totals(session);
    if let Ok(mut state) = session.state.lock() {
        state.at_start = Some(now);
    }
}

extern "C" fn at_stop_marker(_cpu: c_uint, _data: *mut c_void) {
    let Some(session) = SESSION.get() else { return };
    let now = totals(session);
    let Ok(mut state) = session.state.lock() else { return };
    let Some(before) = state.at_start.take() else { return };
    let mut line = String::from("{");
    let names = KINDS.iter().map(|k| k.name()).chain(["instructions"]);
    for (i, name) in names.enumerate() {
        if i > 0 {
            line.push(',');
        }
        line.push_str(&format!("\"{name}\":{}", now[i] - before[i]));
    }
    line.push_str("}\n");
    // A full disk shows as a missing record, which the reader of the file reports.
    let _ = state.out.write_all(line.as_bytes());
}

extern "C" fn on_translation(_id: qemu::Id, block: *mut qemu::Block) {
    let Some(session) = SESSION.get() else { return };
    // SAFETY: QEMU keeps the block and its instructions alive for the length of this callback.
    unsafe {
        let count = qemu::qemu_plugin_tb_n_insns(block);
        qemu::qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(
            block,
            qemu::INLINE_ADD,
            counter(session, KINDS.len()),
            count as u64,
        );
        for index in 0..count {
            let instruction = qemu::qemu_plugin_tb_get_insn(block, index);
            let mut buffer = [0u8; 16];
            let length =
                qemu::qemu_plugin_insn_data(instruction, buffer.as_mut_ptr().cast(), buffer.len());
            let Some(bytes) = buffer.get(..length) else { continue };
            match marker(bytes) {
                Some(Marker::Start) => register(instruction, at_start_marker),
                Some(Marker::Stop) => register(instruction, at_stop_marker),
                None => {
                    for kind in classify(bytes).into_iter().flatten() {
                        let at = counter(session, kind as usize);
                        qemu::qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(
                            instruction,
                            qemu::INLINE_ADD,
                            at,
                            1,
                        );
                    }
                }
            }
        }
    }
}

/// # Safety
/// `instruction` belongs to the block of the translation callback that is running.
unsafe fn register(instruction: *mut qemu::Instruction, callback: qemu::InstructionCallback) {
    // SAFETY: the caller's promise.
    unsafe {
        qemu::qemu_plugin_register_vcpu_insn_exec_cb(
            instruction,
            callback,
            qemu::NO_REGISTERS,
            core::ptr::null_mut(),
        );
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
    let session = Session { scores, state: Mutex::new(State { out, at_start: None }) };
    if SESSION.set(session).is_err() {
        eprintln!("gannet-lab-plugin: loaded twice");
        return 1;
    }
    // SAFETY: the callback has the type that QEMU expects.
    unsafe { qemu::qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation) };
    0
}

const _: () = assert!(Kind::Vmrun as usize == 0);
