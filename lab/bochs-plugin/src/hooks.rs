//! The border to Bochs: which of its functions are replaced, how, and what they are given (Bochs 2.7, instrument/stubs/instrument.cc).

use crate::{OUT, decoded, executed, left};
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;

/// `bxInstruction_c`, as far as it is read here. `learn` finds what else it needs by looking.
#[repr(C)]
struct Instruction {
    handlers: [u64; 4],
    /// The number of the operation.
    operation: u16,
    length: u8,
    flags: u8,
    rest: [u8; 20],
}

const _: () = assert!(size_of::<Instruction>() == 0x38);

impl Instruction {
    fn number(&self) -> usize {
        usize::from(self.operation) << 8 | usize::from(self.flags)
    }
}

/// RCX among the emulator's general registers.
const RCX: c_uint = 1;

type Register = unsafe extern "C" fn(c_uint) -> u64;
static REGISTER: std::sync::OnceLock<Register> = std::sync::OnceLock::new();

unsafe extern "C" fn opcode(
    _cpu: c_uint,
    instruction: *const Instruction,
    bytes: *const u8,
    length: c_uint,
    _is_32: bool,
    is_64: bool,
) {
    if !is_64 || length > 15 {
        return;
    }
    // SAFETY: Bochs gives the instruction that it has decoded and as many of its bytes as it says.
    let (instruction, bytes) =
        unsafe { (&*instruction, std::slice::from_raw_parts(bytes, length as usize)) };
    if u32::from(instruction.length) == length {
        decoded(instruction.number(), &instruction.rest, bytes);
    }
}

unsafe extern "C" fn before_execution(_cpu: c_uint, instruction: *const Instruction) {
    // SAFETY: Bochs gives the instruction that it executes next.
    let instruction = unsafe { &*instruction };
    executed(instruction.number(), &instruction.rest);
}

unsafe extern "C" fn vmexit(_cpu: c_uint, reason: u32, qualification: u64) {
    // SAFETY: the debugger's function for a general register of the first CPU, which is in 64-bit mode or answers 0.
    let rcx = REGISTER.get().map_or(0, |register| unsafe { register(RCX) });
    left(reason, qualification, rcx as u32);
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int;
}

/// `RTLD_DEFAULT`, and `PROT_READ | PROT_WRITE | PROT_EXEC`.
const EVERYWHERE: *mut c_void = core::ptr::null_mut();
const ALL_RIGHTS: c_int = 7;

fn find(name: &CStr) -> Option<*mut u8> {
    // SAFETY: asks the dynamic linker for an address.
    let found = unsafe { dlsym(EVERYWHERE, name.as_ptr()) };
    (!found.is_null()).then_some(found.cast())
}

/// Puts a jump to `to` in the place of a function that does nothing. Whether it was one.
fn replace(function: *mut u8, to: usize) -> bool {
    const SLOT: usize = 16;
    const PAGE: usize = 4096;
    // `jmp *0(%rip)`, and the address behind it.
    let mut jump = [0u8; 14];
    jump[..2].copy_from_slice(&[0xff, 0x25]);
    jump[6..].copy_from_slice(&to.to_le_bytes());
    let from = function.addr() & !(PAGE - 1);
    let length = (function.addr() + SLOT).next_multiple_of(PAGE) - from;
    // SAFETY: `function` is code of the emulator, whose main has not begun, so that nobody executes it. Functions there are aligned to
    // SLOT, so that what follows a RET up to there is padding.
    unsafe {
        if !function.addr().is_multiple_of(SLOT) || *function != 0xc3 {
            return false;
        }
        if mprotect(function.with_addr(from).cast(), length, ALL_RIGHTS) != 0 {
            return false;
        }
        core::ptr::copy_nonoverlapping(jump.as_ptr(), function, jump.len());
    }
    true
}

/// Runs before the emulator's main, in whatever program this is loaded into.
extern "C" fn set_up() {
    let Some(path) = std::env::var_os("GANNET_LAB_COUNTS") else { return };
    let hooks: [(&CStr, usize); 3] = [
        (c"_Z15bx_instr_opcodejP15bxInstruction_cPKhjbb", opcode as *const () as usize),
        (
            c"_Z25bx_instr_before_executionjP15bxInstruction_c",
            before_execution as *const () as usize,
        ),
        (c"_Z15bx_instr_vmexitjjm", vmexit as *const () as usize),
    ];
    // SAFETY: a function of this type, in Bochs.
    let register = find(c"_Z22bx_dbg_get_reg64_valuej")
        .map(|found| unsafe { core::mem::transmute::<*mut u8, Register>(found) });
    let replaced = hooks.iter().all(|(name, to)| find(name).is_some_and(|f| replace(f, *to)));
    let (Some(register), true) = (register, replaced) else {
        eprintln!("gannet-lab-bochs-plugin: this is no Bochs with instrumentation as expected");
        return;
    };
    let _ = REGISTER.set(register);
    match File::create(&path) {
        Ok(file) => {
            if let Ok(mut out) = OUT.lock() {
                *out = Some(file);
            }
        }
        Err(error) => eprintln!("gannet-lab-bochs-plugin: {}: {error}", path.display()),
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static SET_UP: extern "C" fn() = set_up;
