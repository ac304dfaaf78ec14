//! From the exit reason and qualification to the neutral [`Exit`].
//!
//! SDM vol. 3C appendix C, §28.2. The comparison chain is ordered by how often an exit is seen,
//! because kernel code is built without jump tables. The inner loop has one of its own, in
//! [`dispatch`](backend::Turn::dispatch).

use backend::{
    CrAccess, DrAccess, Event, Exit, Exits, Gprs, IoExit, PageFault, TableAccess, TaskSource,
    TaskSwitchExit, TdpFault,
};
use cpu::Cpu;
use x86::{
    Exception, Gpa, Gva, Vector,
    exception::vector,
    vmcs::{ENTRY_FAILURE, ExitReason, cr, dr, ept_violation, event, interruptibility, io},
};

use crate::{
    fields, inject, paging,
    state::{Vmx, attention},
};

/// In the place of an exit reason: the entry failed without an exit.
pub(crate) const NOT_ENTERED: u32 = u32::MAX;

const fn bit(reason: ExitReason) -> u64 {
    // All reasons that are listed so lie below 64.
    1 << reason.0
}

/// Instructions whose handling cannot concern RSP, and exits that are answered without looking at
/// the guest: RSP is read when the loop is left for one.
const WITHOUT_RSP: u64 = bit(ExitReason::ExternalInterrupt)
    | bit(ExitReason::InterruptWindow)
    | bit(ExitReason::NmiWindow)
    | bit(ExitReason::Cpuid)
    | bit(ExitReason::Hlt)
    | bit(ExitReason::Invd)
    | bit(ExitReason::Rdpmc)
    | bit(ExitReason::Vmcall)
    | bit(ExitReason::Vmresume)
    | bit(ExitReason::Vmlaunch)
    | bit(ExitReason::Io)
    | bit(ExitReason::Rdmsr)
    | bit(ExitReason::Wrmsr)
    | bit(ExitReason::Pause)
    | bit(ExitReason::TprBelowThreshold)
    | bit(ExitReason::VirtualizedEoi)
    | bit(ExitReason::PreemptionTimer)
    | bit(ExitReason::Wbinvd)
    | bit(ExitReason::Xsetbv);

/// Exits that can hit in the middle of the delivery of an event (SDM vol. 3C §28.2.4): an exception,
/// a task switch, accesses of memory. A triple fault has nothing left to deliver; interrupts and
/// windows are taken between instructions.
const INSIDE_DELIVERY: u64 = bit(ExitReason::ExceptionOrNmi)
    | bit(ExitReason::TaskSwitch)
    | bit(ExitReason::ApicAccess)
    | bit(ExitReason::EptViolation)
    | bit(ExitReason::EptMisconfiguration)
    | bit(ExitReason::ApicWrite)
    | bit(ExitReason::PmlFull);

/// Whether an exit's handling may look at RSP.
#[inline(always)]
pub(crate) fn needs_rsp(reason: u32) -> bool {
    // A failed entry, and what lies beyond the word, is looked at.
    reason >= u64::BITS || WITHOUT_RSP & (1 << reason) == 0
}

/// Whether an exit may have interrupted the delivery of an event.
#[inline]
pub(crate) fn may_be_inside_delivery(reason: u32) -> bool {
    reason < u64::BITS && INSIDE_DELIVERY & (1 << reason) != 0
}

impl<C: Cpu> Vmx<C> {
    #[cold]
    #[inline(never)]
    fn decode_rare(&self, reason: ExitReason) -> Exit {
        match reason {
            ExitReason::ExceptionOrNmi => self.exception(),
            ExitReason::InterruptWindow => Exit::InterruptWindow,
            ExitReason::TprBelowThreshold => Exit::PriorityLowered,
            ExitReason::VirtualizedEoi => {
                Exit::Eoi(Vector(self.get(fields::EXIT_QUALIFICATION) as u8))
            }
            // The only write that the CPU leaves to us is that of SELF_IPI with a vector below 16.
            ExitReason::ApicWrite => Exit::IllegalSelfIpi,
            ExitReason::NmiWindow => Exit::NmiWindow,
            ExitReason::Pause => Exit::Pause,
            // Both ask that caches be written back, and neither may throw away what is the host's.
            ExitReason::Wbinvd | ExitReason::Invd => Exit::CacheFlush,
            ExitReason::Xsetbv => Exit::Xsetbv,
            ExitReason::DrAccess => self.dr_access(),
            ExitReason::Rdpmc => Exit::Rdpmc,
            ExitReason::Rsm => Exit::Rsm,
            ExitReason::TaskSwitch => self.task_switch(),
            ExitReason::GdtrIdtr => Exit::GdtrIdtr,
            ExitReason::LdtrTr => Exit::LdtrTr,
            ExitReason::Invlpg => Exit::Invlpg(Some(Gva(self.get(fields::EXIT_QUALIFICATION)))),
            // Under EPT the guest has it without an exit, or #UD.
            ExitReason::Invpcid if self.paging.shadow => Exit::Invpcid,
            ExitReason::TripleFault => Exit::Shutdown,
            // Signals of the host's, which takes them outside.
            ExitReason::Init | ExitReason::Sipi | ExitReason::IoSmi | ExitReason::OtherSmi => {
                Exit::HostSignal
            }
            // The log is handed over, and the write is made again: none of it has happened.
            ExitReason::PmlFull => Exit::PageLogFull,
            ExitReason::EptMisconfiguration => self.ept_misconfiguration(),
            // Told apart by nobody: both are idle, and MONITOR alone does nothing here.
            ExitReason::Mwait | ExitReason::Monitor => Exit::Mwait,
            ExitReason::Vmclear
            | ExitReason::Vmlaunch
            | ExitReason::Vmptrld
            | ExitReason::Vmptrst
            | ExitReason::Vmread
            | ExitReason::Vmresume
            | ExitReason::Vmwrite
            | ExitReason::Vmxoff
            | ExitReason::Vmxon
            | ExitReason::Invept
            | ExitReason::Invvpid => Exit::Virtualization,
            // Offered to no guest, or taken away by its CPUID: what the CPU would say without VMX.
            ExitReason::Getsec
            | ExitReason::Invpcid
            | ExitReason::Rdtscp
            | ExitReason::Vmfunc
            | ExitReason::Encls
            | ExitReason::Xsaves
            | ExitReason::Xrstors
            | ExitReason::Umwait
            | ExitReason::Tpause => Exit::Undefined,
            // A reason of a CPU that is newer than this table, and of a control that is off: told to user space.
            ExitReason(raw) => Exit::Unknown(raw.into()),
        }
    }

    /// SDM vol. 3C table 28-2.
    fn task_switch(&self) -> Exit {
        // Bits 31:30 say by what; the selector has the lower sixteen.
        let info = self.get(fields::EXIT_QUALIFICATION);
        let source = match info >> 30 & 3 {
            0 => TaskSource::Call,
            1 => TaskSource::Iret,
            2 => TaskSource::Jmp,
            _ => TaskSource::Gate,
        };
        Exit::TaskSwitch(TaskSwitchExit { selector: info as u16, source })
    }

    /// An access of memory that the TDP tables do not allow.
    #[inline(always)]
    pub(crate) fn ept_violation(&self) -> Exit {
        use ept_violation::{EXECUTABLE, FETCH, FINAL, LINEAR_VALID, READABLE, WRITABLE, WRITE};
        let info = self.get(fields::EXIT_QUALIFICATION);
        Exit::TdpFault(TdpFault {
            gpa: Gpa(self.get(fields::GUEST_PHYSICAL_ADDRESS)),
            write: info & WRITE != 0,
            fetch: info & FETCH != 0,
            // Bits 5:3: what the entries of all levels allow together.
            // Any right says that an entry was there: what is missing is a permission.
            present: info & (READABLE | WRITABLE | EXECUTABLE) != 0,
            reserved: false,
            // Without a valid linear address it was no access of an instruction (a load of the PDPTEs, say).
            final_access: info & (LINEAR_VALID | FINAL) == LINEAR_VALID | FINAL,
        })
    }

    /// An entry of the TDP tables that means nothing: a bug of ours, told as such.
    fn ept_misconfiguration(&self) -> Exit {
        Exit::TdpFault(TdpFault {
            gpa: Gpa(self.get(fields::GUEST_PHYSICAL_ADDRESS)),
            write: false,
            fetch: false,
            present: true,
            reserved: true,
            final_access: true,
        })
    }

    /// A port access.
    #[inline(always)]
    pub(crate) fn io(&self) -> Exit {
        let info = self.get(fields::EXIT_QUALIFICATION);
        let string = info & io::STRING != 0;
        Exit::Io(IoExit {
            port: (info >> io::PORT_SHIFT) as u16,
            size: (info & io::SIZE) as u8 + 1,
            input: info & io::IN != 0,
            string,
            rep: info & io::REP != 0,
            // The length is read only where it is asked for.
            next_rip: 0,
        })
    }

    /// An access of a control register. CLTS and LMSW name no general register.
    #[inline(always)]
    pub(crate) fn cr_access(&self) -> Exit {
        let info = self.get(fields::EXIT_QUALIFICATION);
        let access = info & cr::ACCESS;
        let moves = access == cr::MOV_TO || access == cr::MOV_FROM;
        Exit::Cr(CrAccess {
            cr: (info & cr::NUMBER) as u8,
            write: access != cr::MOV_FROM,
            gpr: moves.then_some((info >> cr::GPR_SHIFT) as u8 & 0xf),
        })
    }

    fn dr_access(&self) -> Exit {
        let info = self.get(fields::EXIT_QUALIFICATION);
        Exit::DebugReg(DrAccess { dr: (info & dr::NUMBER) as u8, write: info & dr::MOV_FROM == 0 })
    }

    fn exception(&self) -> Exit {
        let info = self.get(fields::EXIT_INTERRUPTION);
        // NMIs first: with them the vector says nothing more.
        if info & event::TYPE == event::NMI {
            return Exit::Nmi;
        }
        let raised = Vector((info & event::VECTOR) as u8);
        match raised.0 {
            // The others are the guest's own.
            // Without EPT each one exits, and the guest's tables say whose it is.
            vector::PF if self.paging.shadow => Exit::PageFault(PageFault {
                address: Gva(self.get(fields::EXIT_QUALIFICATION)),
                code: self.get(fields::EXIT_ERROR_CODE),
            }),
            vector::MC => Exit::MachineCheck,
            // What DR6 would have taken (SDM vol. 3C table 28-1).
            vector::DB => Exit::Exception(Exception::db(self.get(fields::EXIT_QUALIFICATION))),
            _ => Exit::Exception(Exception {
                vector: raised,
                error_code: (info & event::ERROR_VALID != 0)
                    .then(|| self.get(fields::EXIT_ERROR_CODE)),
                payload: None,
            }),
        }
    }

    /// Right after an exit that is no plain instruction: an NMI is the host's, at once, for it
    /// blocks further ones; and a fault of the guest's IRET has not ended its own handling.
    pub(crate) fn take_exit_events(&mut self, reason: u32) {
        // Only these exits tell of NMIs that an IRET has unblocked (§28.2.3).
        let reblock = match ExitReason::of(reason) {
            ExitReason::ExceptionOrNmi => {
                let info = self.get(fields::EXIT_INTERRUPTION);
                // The exit has blocked NMIs: none of the host's gets lost while it is handled.
                if info & event::TYPE == event::NMI {
                    return self.cpu.host_nmi();
                }
                // IRET unblocks NMIs before it faults. For #DF the bit is undefined (SDM vol. 3C §28.2.2).
                info & event::NMI_UNBLOCKED != 0 && info & event::VECTOR != u32::from(vector::DF)
            }
            ExitReason::EptViolation | ExitReason::PmlFull => {
                self.get(fields::EXIT_QUALIFICATION) & ept_violation::NMI_UNBLOCKED != 0
            }
            _ => false,
        };
        // Asked for when the loop is left, at the latest: cheaper here.
        if may_be_inside_delivery(reason) {
            self.get(fields::IDT_VECTORING);
        }
        // With an event in delivery the bit is undefined (SDM vol. 3C §28.2.2).
        // The field as it stands behind the exit: IRET has cleared it.
        if reblock && self.get(fields::IDT_VECTORING) & event::VALID == 0 {
            let state = self.get(fields::GUEST_INTERRUPTIBILITY);
            self.set(fields::GUEST_INTERRUPTIBILITY, state | interruptibility::NMI);
        }
    }
}

impl<C: Cpu> Exits for Vmx<C> {
    /// The exit reason with the bit that says that an entry failed.
    type Raw = u32;

    const KEEPS_STATE_AT_SHUTDOWN: bool = true;
    const HYPERCALL: u8 = 0xc1;
    const HAS_LEGACY_SYSCALL: bool = false;

    /// Read by the exit itself.
    #[inline(always)]
    fn raw(&self) -> u32 {
        self.vmcs.fields.last(fields::EXIT_REASON)
    }

    fn exit(&self) -> Exit {
        let field = self.get(fields::EXIT_REASON);
        // A failed entry has a basic reason of its own; machine checks are the host's all the same.
        if field & ENTRY_FAILURE != 0 {
            return if ExitReason::of(field) == ExitReason::MachineCheck {
                Exit::MachineCheck
            } else {
                Exit::Refused
            };
        }
        match ExitReason::of(field) {
            ExitReason::ExternalInterrupt => Exit::Interrupt,
            ExitReason::Cpuid => Exit::Cpuid,
            ExitReason::Rdmsr => Exit::Rdmsr,
            ExitReason::Wrmsr => Exit::Wrmsr,
            ExitReason::EptViolation => self.ept_violation(),
            ExitReason::Io => self.io(),
            ExitReason::Hlt => Exit::Hlt,
            ExitReason::Vmcall => Exit::Hypercall,
            ExitReason::PreemptionTimer => Exit::Deadline,
            ExitReason::CrAccess => self.cr_access(),
            reason => self.decode_rare(reason),
        }
    }

    fn exit_raw(&self) -> [u64; 3] {
        // For KVM_EXIT_FAIL_ENTRY: there the number is the VM-instruction error, as stock KVM fills it in.
        let reason = match self.get(fields::EXIT_REASON) {
            // User space is told the VM-instruction error in the place of a reason.
            NOT_ENTERED => self.refused,
            reason => reason,
        };
        let qualification = self.get(fields::EXIT_QUALIFICATION);
        [reason.into(), qualification, self.get(fields::GUEST_PHYSICAL_ADDRESS)]
    }

    fn exit_record(&self) -> (u64, [u64; 2], u32, u32) {
        // What the field had at an exit before is no event of this one's.
        let reason = self.get(fields::EXIT_REASON);
        let vectoring =
            if self.was_delivering() { u64::from(self.get(fields::IDT_VECTORING)) } else { 0 };
        let info = [self.get(fields::EXIT_QUALIFICATION), vectoring];
        let event = self.get(fields::EXIT_INTERRUPTION);
        (reason.into(), info, event, self.get(fields::EXIT_ERROR_CODE))
    }

    fn table_access(&self, gprs: &Gprs) -> Option<TableAccess> {
        self.decode_table_access(gprs)
    }

    #[inline]
    fn was_delivering(&self) -> bool {
        // The reason first: at other exits the field is undefined, and reading it is a VMREAD for nothing.
        may_be_inside_delivery(self.get(fields::EXIT_REASON))
            && self.get(fields::IDT_VECTORING) & x86::vmcs::event::VALID != 0
    }

    fn interrupted_delivery(&self) -> Option<Event> {
        if !self.was_delivering() {
            return None;
        }
        let info = self.get(fields::IDT_VECTORING);
        inject::decode(info, self.get(fields::IDT_VECTORING_ERROR))
    }

    fn forget_interrupted_delivery(&mut self) {
        // The field itself is read-only: only what is known of it changes.
        self.vmcs.fields.learn(fields::IDT_VECTORING, 0);
    }

    /// Whether the guest's state is one that an entry refuses.
    #[inline]
    fn is_interpreted(&self) -> bool {
        // Either it was known before the entry, or the CPU has said so.
        self.paging.shadow
            && (self.attention & attention::INTERPRET != 0
                || self.get(fields::EXIT_REASON) == paging::INVALID_STATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_instructions_leave_rsp_unread() {
        for reason in [ExitReason::Cpuid, ExitReason::Wrmsr, ExitReason::Vmcall, ExitReason::Io] {
            assert!(!needs_rsp(reason.0.into()));
            assert!(!may_be_inside_delivery(reason.0.into()));
        }
        for reason in [ExitReason::EptViolation, ExitReason::CrAccess, ExitReason::TaskSwitch] {
            assert!(needs_rsp(reason.0.into()));
        }
        assert!(needs_rsp(ENTRY_FAILURE | 33) && needs_rsp(74) && needs_rsp(NOT_ENTERED));
        assert!(may_be_inside_delivery(ExitReason::EptViolation.0.into()));
        assert!(!may_be_inside_delivery(ENTRY_FAILURE | 33));
    }
}
