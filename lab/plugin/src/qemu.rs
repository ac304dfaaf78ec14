//! QEMU's plugin interface as far as it is used here, declared by hand: Debian ships no header. The shapes are those of interface
//! version 4 (QEMU 9.2 to 10.0); [`crate::qemu_plugin_install`] refuses to run where QEMU offers no version 4.

use core::ffi::{c_char, c_int, c_uint, c_void};

/// The interface version this plugin is written for.
pub const VERSION: c_int = 4;

/// `qemu_plugin_id_t`
pub type Id = u64;

/// `qemu_info_t`, up to the fields read here.
#[repr(C)]
pub struct Info {
    pub target_name: *const c_char,
    pub version_min: c_int,
    pub version_cur: c_int,
    pub system_emulation: bool,
}

/// `struct qemu_plugin_tb`: a block of instructions being translated; lives as long as the callback.
#[repr(C)]
pub struct Block {
    _opaque: [u8; 0],
}

/// `struct qemu_plugin_insn`: one instruction of a [`Block`].
#[repr(C)]
pub struct Instruction {
    _opaque: [u8; 0],
}

/// `struct qemu_plugin_scoreboard`: one element per emulated CPU.
#[repr(C)]
pub struct Scoreboard {
    _opaque: [u8; 0],
}

/// `qemu_plugin_u64`: a counter inside a scoreboard's element.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Counter {
    pub score: *mut Scoreboard,
    pub offset: usize,
}

/// `QEMU_PLUGIN_INLINE_ADD_U64`
pub const INLINE_ADD: c_int = 0;
/// `QEMU_PLUGIN_CB_NO_REGS`
pub const NO_REGISTERS: c_int = 0;
/// `QEMU_PLUGIN_CB_R_REGS`: the callback may read registers.
pub const READ_REGISTERS: c_int = 1;

/// `struct qemu_plugin_register`: names one register of a CPU.
#[repr(C)]
pub struct Register {
    _opaque: [u8; 0],
}

/// `qemu_plugin_reg_descriptor`
#[repr(C)]
pub struct RegisterDescriptor {
    pub handle: *mut Register,
    pub name: *const c_char,
    pub feature: *const c_char,
}

/// GLib's `GArray` and `GByteArray`, which begin alike.
#[repr(C)]
pub struct Array {
    pub data: *mut u8,
    pub length: c_uint,
}

pub type BlockCallback = extern "C" fn(Id, *mut Block);
pub type CpuCallback = extern "C" fn(Id, c_uint);
pub type InstructionCallback = extern "C" fn(c_uint, *mut c_void);

unsafe extern "C" {
    pub fn qemu_plugin_register_vcpu_tb_trans_cb(id: Id, callback: BlockCallback);
    pub fn qemu_plugin_tb_n_insns(block: *const Block) -> usize;
    pub fn qemu_plugin_tb_get_insn(block: *const Block, index: usize) -> *mut Instruction;
    pub fn qemu_plugin_insn_data(
        instruction: *const Instruction,
        destination: *mut c_void,
        length: usize,
    ) -> usize;
    pub fn qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(
        block: *mut Block,
        operation: c_int,
        counter: Counter,
        immediate: u64,
    );
    pub fn qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(
        instruction: *mut Instruction,
        operation: c_int,
        counter: Counter,
        immediate: u64,
    );
    pub fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut Instruction,
        callback: InstructionCallback,
        flags: c_int,
        data: *mut c_void,
    );
    pub fn qemu_plugin_scoreboard_new(element_size: usize) -> *mut Scoreboard;
    pub fn qemu_plugin_u64_get(counter: Counter, cpu: c_uint) -> u64;
    pub fn qemu_plugin_num_vcpus() -> c_int;
    pub fn qemu_plugin_register_vcpu_init_cb(id: Id, callback: CpuCallback);
    pub fn qemu_plugin_insn_haddr(instruction: *const Instruction) -> *mut c_void;
    /// Of the CPU that calls. The array is the caller's; the names are QEMU's.
    pub fn qemu_plugin_get_registers() -> *mut Array;
    /// Appends the value to the array. The length, or -1.
    pub fn qemu_plugin_read_register(register: *mut Register, into: *mut Array) -> c_int;
    /// Appends memory of the CPU that calls to the array.
    pub fn qemu_plugin_read_memory_vaddr(address: u64, into: *mut Array, length: usize) -> bool;
    /// GLib is QEMU's own.
    pub fn g_byte_array_new() -> *mut Array;
    pub fn g_byte_array_set_size(array: *mut Array, length: c_uint) -> *mut Array;
}
