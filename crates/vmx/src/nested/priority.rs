//! MOV of CR8, RDMSR and WRMSR by an L2 whose task priority is in L1's virtual-APIC page ([`nested_vmx::priority`]).

use backend::{Executed, Gprs, L1Memory, MonitorTrap as _, RAX, RDX, Turn};
use cpu::Cpu;
use nested_vmx::apic_page;
use nested_vmx::leave::Report;
use nested_vmx::merge::bitmaps::Direction;
use nested_vmx::priority::{self, Access, Moved};
use x86::vmcs::ExitReason;
use x86::{Dr6, Rflags};

use super::{access::Memory, kept::Nested};
use crate::{fields, state::Vmx};

impl<C: Cpu> Vmx<C> {
    /// Carries out the access that the last exit is for.
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
        let access = match self.exit_reason() {
            ExitReason::Rdmsr => priority::msr_access(v, Direction::Read, &gprs.0),
            ExitReason::Wrmsr => priority::msr_access(v, Direction::Write, &gprs.0),
            _ => priority::access(v, self.get(fields::EXIT_QUALIFICATION), &gprs.0),
        };
        let falls = match access {
            Some(Access::Write { value }) => priority::falls(v, value),
            Some(Access::WriteMsr { value }) => priority::falls(v, value >> 4),
            Some(Access::Read { .. } | Access::ReadMsr { .. }) | None => false,
        };
        if falls && !Self::may_leave(n, &memory) {
            return Executed::Outside;
        }
        let moved = match access {
            Some(Access::Write { value }) => priority::write(v, value, &memory),
            Some(Access::WriteMsr { value }) => priority::write_msr(v, value, &memory),
            Some(Access::Read { gpr }) => {
                let value = priority::read(v, &memory);
                if memory.has_missed() {
                    return Executed::Outside;
                }
                let at = usize::from(gpr);
                gprs.0[at & 15] = value;
                return Executed::Retired;
            }
            Some(Access::ReadMsr { offset }) => {
                let value = priority::read_msr(v, offset, &memory);
                if memory.has_missed() {
                    return Executed::Outside;
                }
                gprs.0[RAX] = value & 0xffff_ffff;
                gprs.0[RDX] = value >> 32;
                return Executed::Retired;
            }
            None => return Executed::Shutdown,
        };
        if memory.has_missed() {
            return Executed::Outside;
        }
        match moved {
            Err(exception) => Executed::Fault(exception),
            Ok(Moved::On) => Executed::Retired,
            Ok(Moved::Fell) => {
                let next = self.next_rip();
                self.complete_move(next);
                let report = Report::plain(ExitReason::TprBelowThreshold, 0);
                self.leave_l2(n, gprs, &report, &memory)
            }
            // None of these does.
            Ok(Moved::Written(_)) => Executed::Shutdown,
        }
    }

    /// Carries out a plain access to the APIC-access page, at that offset, of an instruction behind which L2 goes on at
    /// `next`.
    #[cold]
    #[inline(never)]
    pub(super) fn access_apic<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        (offset, store): (u16, Option<u32>),
        next: u64,
        l1: &M,
    ) -> Result<u32, Executed> {
        let memory = Memory::new(l1);
        if store.is_some() && !Self::may_leave(n, &memory) {
            return Err(Executed::Outside);
        }
        let v = n.machine.vmcs12();
        let Some(value) = store else {
            let value = apic_page::read(v, offset, &memory);
            return if memory.has_missed() { Err(Executed::Outside) } else { Ok(value) };
        };
        let moved = apic_page::write(v, offset, value, &memory);
        if memory.has_missed() {
            return Err(Executed::Outside);
        }
        let report = match moved {
            Moved::On => return Ok(0),
            Moved::Fell => Report::plain(ExitReason::TprBelowThreshold, 0),
            Moved::Written(offset) => Report::plain(ExitReason::ApicWrite, u64::from(offset)),
        };
        self.complete_move(Some(next));
        Err(self.leave_l2(n, gprs, &report, &memory))
    }

    /// The exit is behind the instruction: it has retired, and the exception that its step owes is told along
    /// (SDM vol. 3C §28.3.4).
    fn complete_move(&mut self, next: Option<u64>) {
        if let Some(next) = next {
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
