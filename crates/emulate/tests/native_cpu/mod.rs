//! Runs one instruction on the real CPU: machine code around it loads all registers and flags
//! from a state block and stores them back, without a stack of its own in between.
//!
//! One mapping below 2 GiB (so that 32-bit addresses reach it): a page of code, a page of state,
//! two pages of data, between guard pages.

use std::ffi::{c_int, c_void};

const PAGE: usize = 4096;
const PROT_NONE: c_int = 0;
const PROT_READ: c_int = 1;
const PROT_WRITE: c_int = 2;
const PROT_EXEC: c_int = 4;
/// MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT
const FLAGS: c_int = 0x2 | 0x20 | 0x40;

unsafe extern "C" {
    fn mmap(
        addr: *mut c_void,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        at: i64,
    ) -> *mut c_void;
    fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int;
    fn munmap(addr: *mut c_void, len: usize) -> c_int;
}

/// All that an instruction can see or change, memory aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct State {
    pub xmm: [u128; 16],
    pub gpr: [u64; 16],
    pub rflags: u64,
    host_rsp: u64,
}

const GPR: usize = 256;
const RFLAGS: usize = GPR + 128;
const HOST_RSP: usize = RFLAGS + 8;

/// The trampoline. Not to be used from two threads at once (each test makes its own).
pub struct NativeCpu {
    map: *mut u8,
    epilogue: usize,
}

impl NativeCpu {
    const PAGES: usize = 6;

    pub fn new() -> Self {
        // SAFETY: a fresh private mapping, checked below; nothing else refers to it.
        let map = unsafe {
            mmap(std::ptr::null_mut(), Self::PAGES * PAGE, PROT_NONE, FLAGS, -1, 0).cast::<u8>()
        };
        assert!(map as isize != -1, "mmap below 2 GiB");
        // SAFETY: pages 1 to 4 of the mapping just made.
        let result =
            unsafe { mprotect(map.add(PAGE).cast(), 4 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) };
        assert_eq!(result, 0, "mprotect");
        let mut cpu = Self { map, epilogue: 0 };
        cpu.assemble();
        cpu
    }

    fn code(&self) -> u64 {
        self.map as u64 + PAGE as u64
    }
    fn state(&self) -> u64 {
        self.code() + PAGE as u64
    }
    /// Linear address of the data area.
    pub fn data(&self) -> u64 {
        self.state() + PAGE as u64
    }
    /// Bytes of the data area.
    pub fn data_len(&self) -> usize {
        2 * PAGE
    }
    /// Where an instruction under test ends, whatever its length.
    pub fn end_of_instruction(&self) -> u64 {
        self.code() + self.epilogue as u64
    }

    /// `opcode` with a RIP-relative operand at `offset` of the state block.
    fn state_operand(&self, code: &mut Vec<u8>, opcode: &[u8], reg: usize, offset: usize) {
        code.extend_from_slice(opcode);
        code.push(((reg & 7) << 3 | 5) as u8);
        let next = self.code() + code.len() as u64 + 4;
        let relative = (self.state() + offset as u64).wrapping_sub(next) as u32;
        code.extend_from_slice(&relative.to_le_bytes());
    }

    fn registers(&self, code: &mut Vec<u8>, gpr_opcode: u8, xmm_opcode: u8) {
        for n in 0..16 {
            let rex = if n >= 8 { 0x44 } else { 0x40 };
            self.state_operand(code, &[rex, 0x0f, xmm_opcode], n, n * 16);
        }
        for n in 0..16 {
            let rex = if n >= 8 { 0x4c } else { 0x48 };
            self.state_operand(code, &[rex, gpr_opcode], n, GPR + n * 8);
        }
    }

    fn assemble(&mut self) {
        // push rbx, rbp, r12 … r15
        let mut code = vec![0x53, 0x55, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56, 0x41, 0x57];
        self.state_operand(&mut code, &[0x48, 0x89], 4, HOST_RSP); // mov [host_rsp], rsp
        self.state_operand(&mut code, &[0xff], 6, RFLAGS); // push [rflags]
        code.push(0x9d); // popfq
        self.registers(&mut code, 0x8b, 0x10);
        code.extend_from_slice(&[0x90; 16]);
        self.epilogue = code.len();
        self.registers(&mut code, 0x89, 0x11);
        self.state_operand(&mut code, &[0x48, 0x8b], 4, HOST_RSP);
        code.push(0x9c); // pushfq
        self.state_operand(&mut code, &[0x8f], 0, RFLAGS); // pop [rflags]
        code.push(0xfc); // cld
        code.extend_from_slice(&[0x41, 0x5f, 0x41, 0x5e, 0x41, 0x5d, 0x41, 0x5c, 0x5d, 0x5b, 0xc3]);
        assert!(code.len() <= PAGE);
        // SAFETY: the code page is mapped writable and long enough.
        unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), self.code() as *mut u8, code.len());
        }
    }

    /// Executes `instruction` on `state` and `data`; returns both afterwards.
    ///
    /// The instruction must access nothing but the data area and must continue at
    /// [`Self::end_of_instruction`].
    pub fn run(&mut self, instruction: &[u8], state: &State, data: &[u8]) -> (State, Vec<u8>) {
        assert!(instruction.len() <= 15 && data.len() == self.data_len());
        let mut slot = [0x90u8; 16];
        slot[16 - instruction.len()..].copy_from_slice(instruction);
        // SAFETY: all copies stay in the mapping's writable pages. The code called keeps to the C
        // calling convention: it restores the callee-saved registers, the stack pointer and the
        // direction flag; the vector registers are caller-saved. The instruction under test was
        // emulated before and touched the data area only.
        unsafe {
            let slot_at = (self.end_of_instruction() - 16) as *mut u8;
            std::ptr::copy_nonoverlapping(slot.as_ptr(), slot_at, 16);
            (self.state() as *mut State).write(*state);
            std::ptr::copy_nonoverlapping(data.as_ptr(), self.data() as *mut u8, data.len());
            let enter: extern "C" fn() = std::mem::transmute(self.code() as *const ());
            enter();
            let after = (self.state() as *const State).read();
            let memory = std::slice::from_raw_parts(self.data() as *const u8, data.len()).to_vec();
            (State { host_rsp: 0, ..after }, memory)
        }
    }
}

impl Drop for NativeCpu {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, used by nobody any more.
        unsafe {
            munmap(self.map.cast(), Self::PAGES * PAGE);
        }
    }
}
