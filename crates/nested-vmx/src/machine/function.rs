//! VMFUNC, executed by L2 (SDM vol. 3C §26.5.6).

use x86::Gpa;
use x86::vmcs::{Group, ProcControls2, field};

use super::Machine;
use crate::GuestMemory;
use crate::capabilities::EPTP_SWITCHING;
use crate::checks::{Limits, controls};

/// The last VM function that there can be.
const LAST: u32 = 63;
/// Entries of a list of EPT pointers.
const LIST: u32 = 512;

/// What VMFUNC does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// L2 goes on, with the EPT pointer that it had.
    Same,
    /// L2 goes on with this EPT pointer.
    Ept(u64),
    /// L1 sees the exit.
    Exit,
    /// The instruction is not enabled: #UD.
    Undefined,
}

impl Machine {
    /// VMFUNC with these values of EAX and ECX.
    pub fn vmfunc(
        &mut self,
        eax: u32,
        ecx: u32,
        limits: &Limits,
        memory: &impl GuestMemory,
    ) -> Switch {
        // Both are #UD, before any exit: L1 has not enabled the instruction, or there is no such function (§26.5.6.2).
        if !self.vmcs12.secondary().contains(ProcControls2::VMFUNC) || eax > LAST {
            return Switch::Undefined;
        }
        let functions = self.vmcs12.get(field::VM_FUNCTION_CONTROLS);
        // The function exists, and cannot be done: L1 sees the exit. 512 pointers are a page.
        if eax != 0 || functions & EPTP_SWITCHING == 0 || !self.vmcs12.has_ept() || ecx >= LIST {
            return Switch::Exit;
        }
        // The entry has checked the page: the mask is for the sum alone.
        let list = self.vmcs12.get(field::EPTP_LIST) & !0xfff;
        let Ok(pointer) = memory.read_u64(Gpa(list | (u64::from(ecx & (LIST - 1)) * 8))) else {
            return Switch::Exit;
        };
        // No tables change: what was made of them stays.
        if pointer == self.vmcs12.get(field::EPT_POINTER) {
            return Switch::Same;
        }
        // By the rules of an entry: what would fail one makes an exit (§26.5.6.3). Nothing has changed yet.
        if !controls::is_ept_pointer(pointer, &self.capabilities, limits) {
            return Switch::Exit;
        }
        self.vmcs12.set(field::EPT_POINTER, pointer);
        // vmcs02's pointer is L0's: the group is composed when L2 is entered next, with what L0 makes of L1's tables.
        self.dirty.add(Group::Translation);
        Switch::Ept(pointer)
    }
}
