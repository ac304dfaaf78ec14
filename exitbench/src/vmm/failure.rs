//! Why a vCPU cannot go on, in words: the reason KVM gave, the instruction bytes at hand and the
//! registers, so that a report from afar is enough to start looking.

use std::fmt::Write;

use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
    KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, KVM_INTERNAL_ERROR_SIMUL_EX,
    KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vm_memory::{Bytes, GuestAddress};

use super::memory::GuestMemory;

/// The longest instruction (SDM vol. 2A §2.3.11).
const INSTRUCTION_BYTES: usize = 15;

/// An exit after which the vCPU cannot be entered again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fatal {
    /// KVM_EXIT_FAIL_ENTRY: the CPU refused the guest's state.
    FailEntry { reason: u64, cpu: u32 },
    /// KVM_EXIT_INTERNAL_ERROR: the hypervisor does not know how to go on.
    InternalError,
    /// KVM_EXIT_SHUTDOWN: a triple fault.
    Shutdown,
    /// An exit that these guests never cause.
    Unexpected(String),
}

impl Fatal {
    /// Takes over what an exit says. `Unexpected` for every exit that is not fatal in itself.
    pub fn of(exit: &VcpuExit<'_>) -> Self {
        match exit {
            VcpuExit::FailEntry(reason, cpu) => Self::FailEntry { reason: *reason, cpu: *cpu },
            VcpuExit::InternalError => Self::InternalError,
            VcpuExit::Shutdown => Self::Shutdown,
            other => Self::Unexpected(format!("{other:?}")),
        }
    }

    /// The reason in words, followed by lines of instruction bytes and registers.
    pub fn describe(&self, vcpu: &mut VcpuFd, memory: &GuestMemory) -> String {
        let mut text = match self {
            Self::FailEntry { reason, cpu } => {
                format!("KVM_EXIT_FAIL_ENTRY, hardware reason {reason:#x}, on host CPU {cpu}")
            }
            Self::InternalError => internal_error(vcpu),
            Self::Shutdown => "KVM_EXIT_SHUTDOWN: triple fault".to_string(),
            Self::Unexpected(exit) => format!("unexpected exit {exit}"),
        };
        text.push('\n');
        text.push_str(&state(vcpu, memory));
        text
    }
}

/// The bytes at RIP and the registers, a few lines.
pub fn state(vcpu: &VcpuFd, memory: &GuestMemory) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail, hence the results that are let go below.
    match vcpu.get_regs() {
        Err(error) => {
            let _ = writeln!(text, "  KVM_GET_REGS failed: {error}");
        }
        Ok(r) => {
            let cr3 = vcpu.get_sregs().map_or(0, |sregs| sregs.cr3);
            if let Some(bytes) = instruction_bytes(memory, cr3, r.rip) {
                let _ = writeln!(text, "  bytes at rip: {}", hexadecimal(&bytes));
            }
            let general = [
                [("rip", r.rip), ("rflags", r.rflags), ("rsp", r.rsp), ("rbp", r.rbp)],
                [("rax", r.rax), ("rbx", r.rbx), ("rcx", r.rcx), ("rdx", r.rdx)],
                [("rsi", r.rsi), ("rdi", r.rdi), ("r8", r.r8), ("r9", r.r9)],
                [("r10", r.r10), ("r11", r.r11), ("r12", r.r12), ("r13", r.r13)],
            ];
            general.iter().for_each(|line| push_registers(&mut text, line));
            push_registers(&mut text, &[("r14", r.r14), ("r15", r.r15)]);
        }
    }
    if let Ok(s) = vcpu.get_sregs() {
        push_registers(
            &mut text,
            &[("cr0", s.cr0), ("cr2", s.cr2), ("cr3", s.cr3), ("cr4", s.cr4), ("efer", s.efer)],
        );
        let _ = writeln!(
            text,
            "  cs={:#x} base {:#x} ss={:#x} tr={:#x} gdt {:#x} idt {:#x}",
            s.cs.selector, s.cs.base, s.ss.selector, s.tr.selector, s.gdt.base, s.idt.base
        );
    }
    text
}

fn push_registers(text: &mut String, registers: &[(&str, u64)]) {
    text.push(' ');
    for (name, value) in registers {
        let _ = write!(text, " {name}={value:#x}");
    }
    text.push('\n');
}

fn internal_error(vcpu: &mut VcpuFd) -> String {
    let run = vcpu.get_kvm_run();
    // SAFETY: all members of the union are plain integers, for which every value is valid.
    let (suberror, count, data) = unsafe {
        let internal = run.__bindgen_anon_1.internal;
        (internal.suberror, internal.ndata as usize, internal.data)
    };
    let meaning = match suberror {
        KVM_INTERNAL_ERROR_EMULATION => "instruction not emulated",
        KVM_INTERNAL_ERROR_SIMUL_EX => "exception within an exception",
        KVM_INTERNAL_ERROR_DELIVERY_EV => "exit while an event was delivered",
        KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "exit reason that KVM does not know",
        _ => "unknown suberror",
    };
    let data = data.get(..count).unwrap_or(&data);
    let mut text = format!("KVM_EXIT_INTERNAL_ERROR {suberror}: {meaning}");
    if let Some(bytes) = reported_bytes(suberror, data) {
        let _ = write!(text, ", instruction {}", hexadecimal(&bytes));
    } else if !data.is_empty() {
        let _ = write!(text, ", data {data:#x?}");
    }
    text
}

/// The instruction that could not be emulated, where KVM reports it: a word of flags, then a
/// length and up to 15 bytes (KVM API §5, `emulation_failure`).
fn reported_bytes(suberror: u32, data: &[u64]) -> Option<Vec<u8>> {
    let [flags, first, second, ..] = data else { return None };
    let has_bytes = flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0;
    if suberror != KVM_INTERNAL_ERROR_EMULATION || !has_bytes {
        return None;
    }
    let raw: Vec<u8> = [first, second].iter().flat_map(|word| word.to_le_bytes()).collect();
    let (&length, bytes) = raw.split_first()?;
    Some(bytes.get(..usize::from(length)).unwrap_or(bytes).to_vec())
}

/// Read through the guest's own tables: KVM_TRANSLATE is not everywhere.
fn instruction_bytes(memory: &GuestMemory, cr3: u64, rip: u64) -> Option<Vec<u8>> {
    let address = guest_machine::page_tables::translate(memory, cr3, rip)?;
    let mut bytes = vec![0; INSTRUCTION_BYTES];
    let read = memory.read(&mut bytes, GuestAddress(address)).ok()?;
    bytes.truncate(read);
    Some(bytes)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulation_failure_shows_the_instruction() {
        let data = [1, 0x0000_0000_00a2_0f02, 0];
        assert_eq!(reported_bytes(KVM_INTERNAL_ERROR_EMULATION, &data), Some(vec![0x0f, 0xa2]));
    }

    #[test]
    fn bytes_are_not_made_up_where_none_are_reported() {
        assert_eq!(reported_bytes(KVM_INTERNAL_ERROR_EMULATION, &[0, 7, 7]), None);
        assert_eq!(reported_bytes(KVM_INTERNAL_ERROR_EMULATION, &[]), None);
        assert_eq!(reported_bytes(KVM_INTERNAL_ERROR_SIMUL_EX, &[1, 2, 3]), None);
    }

    #[test]
    fn a_length_beyond_the_buffer_is_cut() {
        let bytes = reported_bytes(KVM_INTERNAL_ERROR_EMULATION, &[1, u64::MAX, u64::MAX]);
        assert_eq!(bytes.unwrap().len(), INSTRUCTION_BYTES);
    }
}
