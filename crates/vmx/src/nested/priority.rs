//! MOV of CR8, RDMSR and WRMSR by an L2 whose task priority is in L1's virtual-APIC page ([`nested_vmx::priority`]).

use backend::{Executed, Gprs, L1Memory, MonitorTrap as _, RAX, RDX, Turn};
use cpu::Cpu;
use nested_vmx::apic_page;
use nested_vmx::leave::Report;
use nested_vmx::priority::{self, Access, Moved};
use nested_vmx::virtual_interrupts;
use x86::vmcs::{ExitReason, field};
use x86::{Direction, Dr6, Rflags, Vector, apic::reg};

use super::{access::Memory, kept::Nested};
use crate::{fields, state::Vmx};

/// Where the page has the task priority.
const TPR: u16 = reg::TPR as u16;

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
        // Asked again, by the state of now: nothing of the first look was kept.
        let v = n.machine.vmcs12_mut();
        let access = match self.exit_reason() {
            ExitReason::Rdmsr => priority::msr_access(v, Direction::Read, &gprs.0),
            ExitReason::Wrmsr => priority::msr_access(v, Direction::Write, &gprs.0),
            _ => priority::access(v, self.get(fields::EXIT_QUALIFICATION), &gprs.0),
        };
        // Found out before the page is written: the exit may need memory that is missing here.
        let falls = match access {
            Some(Access::Write { value }) => priority::falls(v, value),
            Some(Access::WriteMsr { offset: TPR, value }) => priority::falls(v, value >> 4),
            // What an end of interrupt or an IPI to itself comes to is known only when it is done.
            Some(Access::WriteMsr { .. }) => true,
            Some(Access::Read { .. } | Access::ReadMsr { .. }) | None => false,
        };
        if falls && !Self::may_leave(n, &memory) {
            // Nothing has been written: the same is done again outside.
            return Executed::Outside;
        }
        // Borrowed anew: the question above needed the rest.
        let v = n.machine.vmcs12_mut();
        // Kept to be put back: the page and the status are changed in one step or not at all.
        let status = v.get(field::GUEST_INTERRUPT_STATUS);
        let moved = match access {
            Some(Access::Write { value }) => priority::write(v, value, &memory),
            Some(Access::WriteMsr { offset, value }) => {
                priority::write_msr(v, offset, value, &memory)
            }
            Some(Access::Read { gpr }) => {
                // All ones where L1 has no page: but only if it is nowhere, not if it is missing here.
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
            // Whoever claimed the exit has found such an access in the same words: this does not happen.
            None => return Executed::Shutdown,
        };
        if memory.has_missed() {
            // The page keeps what was written: the same store comes again.
            n.machine.vmcs12_mut().set(field::GUEST_INTERRUPT_STATUS, status);
            return Executed::Outside;
        }
        // Before anything of L2 changes: RIP is that of the instruction.
        let next = self.next_rip();
        match moved {
            Err(exception) => Executed::Fault(exception),
            Ok(moved) => self.conclude_move(n, gprs, moved, next, &memory),
        }
    }

    /// Goes on behind a write to the virtual-APIC page: what it came to.
    fn conclude_move<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        moved: Moved,
        next: Option<u64>,
        memory: &Memory<'_, M>,
    ) -> Executed {
        // Nothing was looked at: what waited waits on.
        if moved == Moved::Stored {
            return Executed::Retired;
        }
        n.machine.interrupt_pending = moved == Moved::Waits;
        let report = match moved {
            Moved::On | Moved::Stored => return Executed::Retired,
            Moved::Waits => return Executed::Offering,
            Moved::Fell => Report::plain(ExitReason::TprBelowThreshold, 0),
            Moved::Written(offset) => Report::plain(ExitReason::ApicWrite, u64::from(offset)),
            Moved::Ended(vector) => Report::plain(ExitReason::VirtualizedEoi, u64::from(vector)),
        };
        // The exit comes behind the instruction, unlike all exits that L1's controls ask for.
        self.complete_move(next);
        self.leave_l2(n, gprs, &report, memory)
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
        // A load changes no priority, and cannot end L2's run.
        // By what can come of it: an end, a fall, a write that L1 sees.
        if store.is_some() && !Self::may_leave(n, &memory) {
            return Err(Executed::Outside);
        }
        let v = n.machine.vmcs12();
        let Some(value) = store else {
            let value = apic_page::read(v, offset, &memory);
            return if memory.has_missed() { Err(Executed::Outside) } else { Ok(value) };
        };
        let status = v.get(field::GUEST_INTERRUPT_STATUS);
        let moved = apic_page::write(n.machine.vmcs12_mut(), offset, value, &memory);
        if memory.has_missed() {
            n.machine.vmcs12_mut().set(field::GUEST_INTERRUPT_STATUS, status);
            return Err(Executed::Outside);
        }
        // L2 goes on behind the access, or has been left.
        match self.conclude_move(n, gprs, moved, Some(next), &memory) {
            Executed::Retired => Ok(0),
            done => Err(done),
        }
    }

    /// Takes the virtual interrupt that waits for L2.
    #[cold]
    #[inline(never)]
    pub(super) fn deliver_virtual<M: L1Memory>(
        n: &mut Nested,
        l1: &M,
    ) -> Result<Option<Vector>, backend::Outside> {
        let memory = Memory::new(l1);
        // Withdrawn since it was offered, by a priority that L2 has raised.
        if !n.machine.interrupt_pending {
            return Ok(None);
        }
        let v = n.machine.vmcs12_mut();
        let status = v.get(field::GUEST_INTERRUPT_STATUS);
        let vector = virtual_interrupts::deliver(v, &memory);
        // The page keeps a request twice rather than not at all.
        if memory.has_missed() {
            v.set(field::GUEST_INTERRUPT_STATUS, status);
            return Err(backend::Outside);
        }
        // Only now: an attempt that missed memory is made again outside, and has to find it waiting.
        n.machine.interrupt_pending = false;
        Ok(vector.ok().flatten().map(Vector))
    }

    /// Requests what L1 has posted, if the interrupt is the notification of that.
    #[cold]
    #[inline(never)]
    pub(super) fn post_virtual<M: L1Memory>(
        n: &mut Nested,
        vector: Vector,
        l1: &M,
    ) -> Result<bool, backend::Outside> {
        let memory = Memory::new(l1);
        // The descriptor gives up a request only by an exchange: what is missed here is still there outside.
        let posted = virtual_interrupts::post(n.machine.vmcs12_mut(), vector.0, &memory);
        // Nothing is lost: what was taken out of the descriptor is in the page.
        if memory.has_missed() {
            return Err(backend::Outside);
        }
        // Where there is no descriptor L1 hears of the interrupt.
        let Ok(Some(waits)) = posted else { return Ok(false) };
        n.machine.interrupt_pending = waits;
        Ok(true)
    }

    /// The exit is behind the instruction: it has retired, and the exception that its step owes is told along
    /// (SDM vol. 3C §28.3.4).
    fn complete_move(&mut self, next: Option<u64>) {
        if let Some(next) = next {
            self.retire(next);
        }
        let flags = Rflags::from_bits_retain(self.get(fields::GUEST_RFLAGS));
        // RF goes with a retired instruction (SDM vol. 3B §18.3.1.1).
        self.set(fields::GUEST_RFLAGS, (flags - Rflags::RF).bits());
        if flags.contains(Rflags::TF) {
            self.keep_debug_trap(Dr6::BS);
        }
    }
}

#[cfg(test)]
#[path = "priority_tests.rs"]
mod tests;
