//! Reads why a guest was left, at the first instruction after its #VMEXIT: RAX holds the physical address of the control block again,
//! RCX still is the guest's (APM vol. 2 §15.5.1, §15.6). The block is read through the host kernel's map of all memory, which lies
//! where it always does, as the lab's machines boot with `nokaslr` and four-level tables.

use crate::qemu;
use core::ffi::{CStr, c_uint};
use gannet_lab::exits::{EXITCODE, reason};
use std::sync::Mutex;

/// The host kernel's map of physical memory (Linux, Documentation/arch/x86/x86_64/mm.rst).
const DIRECT_MAP: u64 = 0xffff_8880_0000_0000;

/// What one CPU needs for it.
struct Reader {
    cpu: c_uint,
    rax: *mut qemu::Register,
    rcx: *mut qemu::Register,
    buffer: *mut qemu::Array,
}

// SAFETY: the pointers are QEMU's and GLib's, used by the thread of the CPU alone, under the lock.
unsafe impl Send for Reader {}

static READERS: Mutex<Vec<Reader>> = Mutex::new(Vec::new());

/// A CPU has come: finds its registers.
pub extern "C" fn on_cpu(_id: qemu::Id, cpu: c_uint) {
    // SAFETY: called in the CPU's own context, as both functions ask; the array of descriptors is ours and is kept for good.
    let (registers, buffer) =
        unsafe { (qemu::qemu_plugin_get_registers(), qemu::g_byte_array_new()) };
    if registers.is_null() || buffer.is_null() {
        return;
    }
    let named = |wanted: &CStr| {
        // SAFETY: the array holds as many descriptors as it says, with names that end in NUL.
        unsafe {
            let count = (*registers).length as usize;
            let list: *const qemu::RegisterDescriptor = (*registers).data.cast();
            let found =
                (0..count).map(|i| &*list.add(i)).find(|d| CStr::from_ptr(d.name) == wanted);
            found.map(|descriptor| descriptor.handle)
        }
    };
    if let (Some(rax), Some(rcx), Ok(mut readers)) = (named(c"rax"), named(c"rcx"), READERS.lock())
    {
        readers.push(Reader { cpu, rax, rcx, buffer });
    }
}

/// Why the guest was left. Only at the landing, in a callback that may read registers.
pub fn exit_reason(cpu: c_uint) -> Option<&'static str> {
    let readers = READERS.lock().ok()?;
    let reader = readers.iter().find(|reader| reader.cpu == cpu)?;
    let block = reader.register(reader.rax)?;
    let ecx = reader.register(reader.rcx)? as u32;
    let code = reader.memory(block + EXITCODE)?;
    let info = reader.memory(block + EXITCODE + 8)?;
    Some(reason(code, info, ecx))
}

impl Reader {
    fn register(&self, register: *mut qemu::Register) -> Option<u64> {
        // SAFETY: the buffer is a GByteArray, the register one of this CPU's.
        let length = unsafe {
            qemu::g_byte_array_set_size(self.buffer, 0);
            qemu::qemu_plugin_read_register(register, self.buffer)
        };
        (length == 8).then(|| self.taken())?
    }

    fn memory(&self, physical: u64) -> Option<u64> {
        // SAFETY: as above; memory that is not there is refused.
        let read = unsafe {
            qemu::g_byte_array_set_size(self.buffer, 0);
            qemu::qemu_plugin_read_memory_vaddr(DIRECT_MAP + physical, self.buffer, 8)
        };
        read.then(|| self.taken())?
    }

    fn taken(&self) -> Option<u64> {
        // SAFETY: the array holds as many bytes as it says.
        let bytes = unsafe {
            std::slice::from_raw_parts((*self.buffer).data, (*self.buffer).length as usize)
        };
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    }
}
