//! Why KVM_RUN returned (KVM API §5).

use kvm_bindings::*;

/// A copy of what `kvm_run` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    Io {
        write: bool,
        size: u8,
        port: u16,
        count: u32,
        data: Vec<u8>,
    },
    Mmio {
        write: bool,
        address: u64,
        len: u32,
        data: [u8; 8],
    },
    Hlt,
    Shutdown,
    InterruptWindow,
    /// KVM_EXIT_INTERNAL_ERROR.
    Internal {
        suberror: u32,
        data: Vec<u64>,
    },
    Debug {
        exception: u32,
        pc: u64,
        dr6: u64,
    },
    SystemEvent {
        kind: u32,
    },
    EndOfInterrupt {
        vector: u8,
    },
    FailEntry {
        reason: u64,
    },
    /// By its number.
    Other(u32),
}

impl Exit {
    /// A port write of one byte.
    pub fn is_out(&self, to: u16) -> bool {
        matches!(self, Self::Io { write: true, port, .. } if *port == to)
    }

    /// The bytes of a memory access that count.
    pub fn mmio(write: bool, address: u64, bytes: &[u8]) -> Self {
        let mut data = [0; 8];
        data[..bytes.len()].copy_from_slice(bytes);
        Self::Mmio { write, address, len: bytes.len() as u32, data }
    }

    /// Reads the exit from a shared page.
    ///
    /// # Safety
    /// The page and the one after it are mapped, and KVM_RUN has returned 0.
    pub unsafe fn read(page: *const kvm_run) -> Self {
        // SAFETY: the reason says which member of the union counts.
        unsafe {
            let detail = &(*page).__bindgen_anon_1;
            match (*page).exit_reason {
                KVM_EXIT_IO => {
                    let io = detail.io;
                    let bytes = usize::from(io.size) * io.count as usize;
                    let from = page.cast::<u8>().add(io.data_offset as usize);
                    let write = u32::from(io.direction) == KVM_EXIT_IO_OUT;
                    let data = match write {
                        true => std::slice::from_raw_parts(from, bytes).to_vec(),
                        false => Vec::new(),
                    };
                    Self::Io { write, size: io.size, port: io.port, count: io.count, data }
                }
                KVM_EXIT_MMIO => {
                    let mmio = detail.mmio;
                    let write = mmio.is_write != 0;
                    let mut data = if write { mmio.data } else { [0; 8] };
                    // What lies beyond the length is nobody's.
                    data.iter_mut().skip(mmio.len as usize).for_each(|byte| *byte = 0);
                    Self::Mmio { write, address: mmio.phys_addr, len: mmio.len, data }
                }
                KVM_EXIT_HLT => Self::Hlt,
                KVM_EXIT_SHUTDOWN => Self::Shutdown,
                KVM_EXIT_IRQ_WINDOW_OPEN => Self::InterruptWindow,
                KVM_EXIT_INTERNAL_ERROR => {
                    let internal = detail.internal;
                    let count = (internal.ndata as usize).min(internal.data.len());
                    Self::Internal {
                        suberror: internal.suberror,
                        data: internal.data[..count].to_vec(),
                    }
                }
                KVM_EXIT_DEBUG => {
                    let arch = detail.debug.arch;
                    Self::Debug { exception: arch.exception, pc: arch.pc, dr6: arch.dr6 }
                }
                KVM_EXIT_SYSTEM_EVENT => Self::SystemEvent { kind: detail.system_event.type_ },
                KVM_EXIT_IOAPIC_EOI => Self::EndOfInterrupt { vector: detail.eoi.vector },
                KVM_EXIT_FAIL_ENTRY => {
                    Self::FailEntry { reason: detail.fail_entry.hardware_entry_failure_reason }
                }
                other => Self::Other(other),
            }
        }
    }
}
