//! debugfs, its directories by their path; and tracing, whose records go to a list in words.

use std::ffi::{CStr, c_char, c_void};

use crate::sys::DebugCalls;
use crate::sys::std_port::world::{Context, World};
use crate::trace::ExitRecord;

/// The text that a reader gathers.
pub(crate) struct SeqRaw(pub(crate) String);
pub(crate) struct DebugDirRaw {
    path: String,
    calls: &'static DebugCalls,
    object: *mut c_void,
}

pub(crate) unsafe fn gnt_seq_write(to: *mut SeqRaw, text: *const u8, len: usize) {
    // SAFETY: both by the contract.
    unsafe { (*to).0 += &String::from_utf8_lossy(std::slice::from_raw_parts(text, len)) }
}
pub(crate) unsafe fn gnt_debug_add(
    name: *const c_char,
    parent: *mut DebugDirRaw,
    calls: &'static DebugCalls,
    object: *mut c_void,
) -> *mut DebugDirRaw {
    // SAFETY: NUL-terminated, and the parent is alive or null, by the contract.
    let (name, parent) = unsafe { (CStr::from_ptr(name).to_string_lossy(), parent.as_ref()) };
    let path = parent.map_or(name.to_string(), |p| format!("{}/{name}", p.path));
    let world = World::current();
    let mut state = world.lock();
    if state.debug.contains_key(&path) {
        return std::ptr::null_mut();
    }
    state.debug.insert(path.clone(), (calls, Context(object)));
    Box::into_raw(Box::new(DebugDirRaw { path, calls, object }))
}
pub(crate) unsafe fn gnt_debug_remove(dir: *mut DebugDirRaw) {
    // SAFETY: made by gnt_debug_add, removed once.
    let dir = unsafe { Box::from_raw(dir) };
    World::current().lock().debug.remove(&dir.path);
    // SAFETY: the share that the directory held.
    unsafe { (dir.calls.release)(dir.object) }
}

// Tracing: what is said goes to a list, in words.

pub(crate) fn observed() -> u32 {
    World::current().lock().observed
}
fn traced(what: String) {
    World::current().lock().traced.push(what);
}
pub(crate) fn gnt_trace_entry(vcpu_id: u32, rip: u64) {
    traced(format!("entry {vcpu_id} {rip:#x}"));
}
pub(crate) fn gnt_trace_exit(r: &ExitRecord) {
    traced(format!("exit {} {:#x} {:#x} {:#x} {:#x}", r.vcpu_id, r.code, r.rip, r.info1, r.info2));
}
pub(crate) fn gnt_trace_pio(write: u32, port: u32, size: u32, count: u32, value: u32) {
    traced(format!("pio {write} {port:#x} {size} {count} {value:#x}"));
}
pub(crate) fn gnt_trace_mmio(kind: u32, len: u32, gpa: u64, value: u64) {
    traced(format!("mmio {kind} {len} {gpa:#x} {value:#x}"));
}
pub(crate) fn gnt_trace_msr(write: u32, index: u32, value: u64, faulted: u32) {
    traced(format!("msr {write} {index:#x} {value:#x} {faulted}"));
}
pub(crate) fn gnt_trace_cpuid(leaf: u32, subleaf: u32, answer: &[u32; 4], found: u32) {
    traced(format!("cpuid {leaf:#x} {subleaf} {answer:x?} {found}"));
}
pub(crate) fn gnt_trace_hypercall(call: &[u64; 5]) {
    traced(format!("hypercall {call:x?}"));
}
pub(crate) fn gnt_trace_inj_virq(vector: u32) {
    traced(format!("inj_virq {vector:#x}"));
}
pub(crate) fn gnt_trace_page_fault(vcpu_id: u32, rip: u64, address: u64, error: u64) {
    traced(format!("page_fault {vcpu_id} {rip:#x} {address:#x} {error:#x}"));
}
