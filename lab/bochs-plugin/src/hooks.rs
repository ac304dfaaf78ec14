//! The border to Bochs: which of its functions are replaced, how, and what they are given (Bochs 2.7, instrument/stubs/instrument.cc).

use crate::{OUT, decoded, executed, left};
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use gannet_lab::exits;
use std::fs::File;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

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

/// The guest's, while it is being left.
fn ecx() -> u32 {
    // SAFETY: the debugger's function for a general register of the first CPU, which is in 64-bit mode or answers 0.
    REGISTER.get().map_or(0, |register| unsafe { register(RCX) }) as u32
}

unsafe extern "C" fn vmexit(_cpu: c_uint, reason: u32, qualification: u64) {
    left(exits::vmx_reason(reason, qualification, ecx()));
}

/// `BX_CPU_C::Svm_Vmexit`, of which the emulator tells nobody.
type SvmVmexit = unsafe extern "C" fn(*mut c_void, c_int, u64, u64);
/// Where its own beginning lies, with a jump to the rest.
static SVM_VMEXIT: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());

/// How it begins: nothing that depends on its place, and room for a jump.
const SVM_VMEXIT_BEGINS: [u8; 17] = [
    0x41, 0x55, // push %r13
    0x48, 0x89, 0xd0, // mov %rdx, %rax
    0x49, 0x89, 0xc9, // mov %rcx, %r9
    0x41, 0x89, 0xd0, // mov %edx, %r8d
    0x41, 0x54, // push %r12
    0x48, 0xc1, 0xe8, 0x20, // shr $32, %rax
];

unsafe extern "C" fn svm_vmexit(cpu: *mut c_void, code: c_int, info: u64, more: u64) {
    // The code is signed: -1 is VMEXIT_INVALID.
    left(exits::reason(i64::from(code) as u64, info, ecx()));
    let rest = SVM_VMEXIT.load(Relaxed);
    // SAFETY: `enter_by_way_of` has put a copy of the function's beginning there, which goes on in the function itself. It does not come
    // back but by longjmp, and nothing here waits to be dropped.
    unsafe { core::mem::transmute::<*mut u8, SvmVmexit>(rest)(cpu, code, info, more) }
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int;
    fn mmap(
        address: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
}

/// `RTLD_DEFAULT`, and `PROT_READ | PROT_WRITE | PROT_EXEC`.
const EVERYWHERE: *mut c_void = core::ptr::null_mut();
const ALL_RIGHTS: c_int = 7;
/// `MAP_PRIVATE | MAP_ANONYMOUS`
const NEW: c_int = 0x22;
const PAGE: usize = 4096;

fn find(name: &CStr) -> Option<*mut u8> {
    // SAFETY: asks the dynamic linker for an address.
    let found = unsafe { dlsym(EVERYWHERE, name.as_ptr()) };
    (!found.is_null()).then_some(found.cast())
}

/// Puts a jump to `to` in the place of a function that does nothing. Whether it was one.
fn replace(function: *mut u8, to: usize) -> bool {
    const SLOT: usize = 16;
    // SAFETY: `function` is code of the emulator, which is there to be read. Functions are aligned to SLOT, so that what follows a RET up
    // to there is padding.
    unsafe { function.addr().is_multiple_of(SLOT) && *function == 0xc3 && overwrite(function, to) }
}

/// `jmp *0(%rip)`, and the address behind it.
fn jump(to: usize) -> [u8; 14] {
    let mut jump = [0u8; 14];
    jump[..2].copy_from_slice(&[0xff, 0x25]);
    jump[6..].copy_from_slice(&to.to_le_bytes());
    jump
}

/// Writes a jump to `to` over the code at `function`. Whether it could be.
///
/// # Safety
/// `function` is code of the emulator, whose main has not begun, so that nobody executes it; and what the jump covers is the function's.
unsafe fn overwrite(function: *mut u8, to: usize) -> bool {
    let jump = jump(to);
    let from = function.addr() & !(PAGE - 1);
    let length = (function.addr() + jump.len()).next_multiple_of(PAGE) - from;
    // SAFETY: the pages are the emulator's code; the rest is what the caller says.
    unsafe {
        if mprotect(function.with_addr(from).cast(), length, ALL_RIGHTS) != 0 {
            return false;
        }
        core::ptr::copy_nonoverlapping(jump.as_ptr(), function, jump.len());
    }
    true
}

/// Has a function that begins with `begins` entered by way of `to`. Where the copy of its beginning lies, which goes on in the function.
fn enter_by_way_of(function: *mut u8, begins: &[u8], to: usize) -> Option<*mut u8> {
    let back = jump(function.addr() + begins.len());
    // SAFETY: the function is code of the emulator, longer than its beginning. The new page is nobody else's and has room for both parts.
    // The jump covers less than the beginning, which is known.
    unsafe {
        if core::slice::from_raw_parts(function, begins.len()) != begins
            || begins.len() < back.len()
        {
            return None;
        }
        let page = mmap(core::ptr::null_mut(), PAGE, ALL_RIGHTS, NEW, -1, 0);
        if page.addr() == usize::MAX {
            return None;
        }
        let copy: *mut u8 = page.cast();
        core::ptr::copy_nonoverlapping(begins.as_ptr(), copy, begins.len());
        core::ptr::copy_nonoverlapping(back.as_ptr(), copy.add(begins.len()), back.len());
        overwrite(function, to).then_some(copy)
    }
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
    let copy = find(c"_ZN8BX_CPU_C10Svm_VmexitEimm").and_then(|function| {
        enter_by_way_of(function, &SVM_VMEXIT_BEGINS, svm_vmexit as *const () as usize)
    });
    let (Some(register), Some(copy), true) = (register, copy, replaced) else {
        eprintln!("gannet-lab-bochs-plugin: this is no Bochs with instrumentation as expected");
        return;
    };
    let _ = REGISTER.set(register);
    SVM_VMEXIT.store(copy, Relaxed);
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
