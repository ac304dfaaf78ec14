//! MOV of CR8 by an L2 whose task priority is in L1's virtual-APIC page ([`nested_vmx::priority`]).

use backend::{Executed, Gprs, L1Memory, Nested as _, Turn};
use cpu::Cpu;
use nested_vmx::leave::Report;
use nested_vmx::priority::{self, Access, Moved};
use x86::vmcs::ExitReason;
use x86::{Dr6, Rflags};

use super::{access::Memory, kept::Nested};
use crate::{fields, state::Vmx};

impl<C: Cpu> Vmx<C> {
    /// Carries out the MOV that the last exit is for.
    #[cold]
    #[inline(never)]
    pub(super) fn move_priority<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        l1: &M,
    ) -> Executed {
        let memory = Memory::new(l1);
        let v = n.machine.vmcs12();
        let qualification = self.get(fields::EXIT_QUALIFICATION);
        let value = match priority::access(v, qualification, &gprs.0) {
            Some(Access::Write { value }) => value,
            Some(Access::Read { gpr }) => {
                let value = priority::read(v, &memory);
                if memory.has_missed() {
                    return Executed::Outside;
                }
                let at = usize::from(gpr);
                gprs.0[at & 15] = value;
                return Executed::Retired;
            }
            None => return Executed::Shutdown,
        };
        if priority::falls(v, value) && !Self::may_leave(n, &memory) {
            return Executed::Outside;
        }
        let moved = priority::write(v, value, &memory);
        if memory.has_missed() {
            return Executed::Outside;
        }
        match moved {
            Err(exception) => Executed::Fault(exception),
            Ok(Moved::On) => Executed::Retired,
            Ok(Moved::Fell) => {
                self.complete_move();
                let report = Report::plain(ExitReason::TprBelowThreshold, 0);
                self.leave_l2(n, gprs, &report, &memory)
            }
        }
    }

    /// The exit is behind the instruction: it has retired, and the exception that its step owes is told along
    /// (SDM vol. 3C §28.3.4).
    fn complete_move(&mut self) {
        if let Some(next) = self.next_rip() {
            self.retire(next);
        }
        let flags = Rflags::from_bits_retain(self.get(fields::GUEST_RFLAGS));
        self.set(fields::GUEST_RFLAGS, (flags - Rflags::RF).bits());
        if flags.contains(Rflags::TF) {
            self.keep_debug_trap(Dr6::BS);
        }
    }
}

#[cfg(test)]
#[path = "priority_tests.rs"]
mod tests;
