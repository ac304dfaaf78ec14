//! L1's EPT tables: what L1 set up for L2, what the hardware walks in their place, and what L1 hears of them.
//!
//! SDM vol. 3C §29.3 (EPT), §29.4.3 (INVEPT), table 28-7 (the qualification of an EPT violation).

use backend::{
    Event, Executed, Gprs, L1Flush, L1Memory, L1Tables, NestedPageFault, NestedPaging, RAX, RCX,
    TablesRefuse,
};
use cpu::Cpu;
use nested_vmx::apic_page;
use nested_vmx::leave::{Exit, Report};
use nested_vmx::machine::{Invalidation, Switch};
use nested_vmx::page_log::{self, Logged};
use x86::vmcs::{ApicAccess, ExitReason, ProcControls2, ept_violation, eptp, field};
use x86::{Direction, Exception, Gpa, Hpa};

use super::{
    access::{Block, Memory},
    kept::Nested,
};
use crate::{
    fields,
    state::{Vmx, attention},
};

impl<C: Cpu> NestedPaging for Vmx<C> {
    fn l1_tables(&self) -> Option<L1Tables> {
        let n = self.nested.as_ref().filter(|_| self.cold.of_l1.runs)?;
        let v = n.machine.vmcs12();
        let offered = n.machine.capabilities.ept_vpid;
        // By L1's controls: L0's own tree is not asked here.
        if !v.has_own_root() {
            return None;
        }
        let apic = v.apic_access_page().map(Gpa::gfn);
        if !v.has_ept() {
            // Accesses to one page exit: a tree of L0's own that leaves it out, and is else L1's memory.
            return apic.map(|apic| L1Tables::Flat { apic });
        }
        Some(L1Tables::Ept {
            pointer: v.get(field::EPT_POINTER),
            pages_2m: offered.large_2m(),
            pages_1g: offered.large_1g(),
            execute_only: offered.execute_only(),
            apic,
            logs: v.secondary().contains(ProcControls2::PML),
        })
    }

    fn set_nested_root(&mut self, root: Hpa, tracks: bool) {
        // Accessed and dirty flags are L0's to track, whether or not L1 has them.
        let flags = if tracks { eptp::ACCESSED_DIRTY } else { 0 };
        let pointer = root.0 | eptp::WRITE_BACK | eptp::LEVELS_4 | flags;
        // The current VMCS is L2's: who finds the root has just entered it.
        self.set_ept_pointer(pointer);
        if let Some(n) = &mut self.nested {
            n.made.root = pointer;
            // The root's pages were brought up to date before; what the CPU has of them was not. Another vCPU may
            // have filled its cache with what was old since L1's INVEPT: a flush at that time would be too early.
            if core::mem::take(&mut n.made.flush_due) {
                self.attention |= attention::FLUSH_TDP;
            }
        }
    }

    fn flush_nested(&mut self) {
        // Roots share what is below them.
        self.flush_all_roots();
    }

    fn nested_page_fault(&self) -> Option<NestedPageFault> {
        let by_tables = self.get(fields::EXIT_REASON) == u32::from(ExitReason::EptViolation.0);
        // Without tables of L1's a fault is in L0's own, as with L1.
        if !by_tables || !self.nested_tables_run() {
            return None;
        }
        Some(NestedPageFault::Violation {
            qualification: self.get(fields::EXIT_QUALIFICATION),
            gpa: self.get(fields::GUEST_PHYSICAL_ADDRESS),
        })
    }

    fn refuse(
        &mut self,
        gprs: &mut Gprs,
        at: Gpa,
        why: TablesRefuse,
        undelivered: Option<Event>,
        l1: &impl L1Memory,
    ) -> Executed {
        self.with_nested(|this, n| this.refuse_by_tables(n, gprs, at, why, undelivered, l1))
            .unwrap_or(Executed::Shutdown)
    }

    fn serves_apic_access(&self, access: ApicAccess) -> bool {
        self.nested.as_ref().is_some_and(|n| {
            let ApicAccess { offset, write, fetch, linear } = access;
            let direction = Direction::write_if(write);
            // A fetch, or an access without a linear address, is none that the page serves (§30.4).
            linear && !fetch && apic_page::serves(n.machine.vmcs12(), offset, direction)
        })
    }

    fn do_apic_access(
        &mut self,
        gprs: &mut Gprs,
        offset: u16,
        store: Option<u32>,
        next: u64,
        l1: &impl L1Memory,
    ) -> Result<u32, Executed> {
        self.with_nested(|this, n| this.access_apic(n, gprs, (offset, store), next, l1))
            .unwrap_or(Err(Executed::Shutdown))
    }

    fn log_dirty(&mut self, at: Gpa, l1: &impl L1Memory) -> bool {
        // No nesting, no log: the access goes on.
        self.nested.as_mut().is_none_or(|n| {
            page_log::log(n.machine.vmcs12_mut(), at, &Memory::new(l1)) != Logged::Full
        })
    }

    fn take_l1_flush(&mut self) -> L1Flush {
        self.nested.as_mut().map_or(L1Flush::None, |n| core::mem::take(&mut n.flushed))
    }
}

/// What an exit for an access to the APIC-access page tells (SDM vol. 3C table 28-6).
const fn qualification_of(access: ApicAccess, delivering: bool) -> u64 {
    let kind = match access {
        // The order is the manual's: what delivers an event is told as that, whatever it does.
        ApicAccess { linear: false, .. } if delivering => 10,
        ApicAccess { linear: false, .. } => 15,
        _ if delivering => 3,
        ApicAccess { fetch: true, .. } => 2,
        ApicAccess { write: true, .. } => 1,
        ApicAccess { .. } => 0,
    };
    kind << 12 | access.offset as u64
}

impl Nested {
    /// Notes what L1's INVEPT flushes.
    pub(super) fn note_flush(&mut self, what: Invalidation) {
        if matches!(what, Invalidation::Ept(_) | Invalidation::AllEpt) {
            self.made.flush_due = true;
            self.seconds.owe_flush();
        }
        // Two pointers are as much to note as all of them.
        self.flushed = match (what, self.flushed) {
            (Invalidation::Ept(pointer), L1Flush::None) => L1Flush::Of(pointer),
            (Invalidation::Ept(pointer), L1Flush::Of(noted)) if noted == pointer => {
                L1Flush::Of(pointer)
            }
            (Invalidation::Ept(_) | Invalidation::AllEpt, _) => L1Flush::All,
            // They leave translations of L2's physical addresses (SDM vol. 3C §29.4.3.1).
            (_, noted) => noted,
        };
    }
}

impl<C: Cpu> Vmx<C> {
    /// Sets the EPT pointer of L1 while L2 runs. True: L2 runs on another one.
    #[cold]
    #[inline(never)]
    pub(crate) fn set_l1_root(&mut self, pointer: u64) -> bool {
        let Some(n) = &self.nested else { return false };
        // vmcs01 is not loaded: it is written when it is.
        if n.other.set_ept_pointer(&self.cpu, pointer) {
            self.attention |= attention::FLUSH_TDP;
        }
        n.machine.vmcs12().has_own_root()
    }

    /// Whether L2 runs on a root of its own.
    pub(crate) fn nested_tables_run(&self) -> bool {
        let n = self.nested.as_ref().filter(|_| self.cold.of_l1.runs);
        n.is_some_and(|n| n.machine.vmcs12().has_own_root())
    }

    /// The EPT pointer of the VMCS that is not current, if the hardware may hold translations made from it.
    pub(crate) fn other_root(&self) -> Option<u64> {
        // One that both have is flushed once.
        let other = self.nested.as_ref()?.other.fields.get(fields::EPT_POINTER)?;
        // With 0 no entry was ever made.
        (other != 0 && Some(other) != self.vmcs.fields.get(fields::EPT_POINTER)).then_some(other)
    }

    /// VMFUNC of L2's: the switch to tables of a list of L1's, or an exit that L1 sees.
    #[cold]
    #[inline(never)]
    pub(super) fn switch_by_function<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        l1: &M,
    ) -> Executed {
        let memory = Memory::new(l1);
        // Before the list is read, whose page may lead to the exit.
        if !Self::may_leave(n, &memory) {
            return Executed::Outside;
        }
        let limits = self.nested_limits();
        // EAX and ECX alone, also in 64-bit mode.
        let (eax, ecx) = (gprs.0[RAX] as u32, gprs.0[RCX] as u32);
        let switch = n.machine.vmfunc(eax, ecx, &limits, &memory);
        if memory.has_missed() {
            // Read as missing, the list makes an exit: not here, where it may be there.
            return Executed::Outside;
        }
        match switch {
            Switch::Same => Executed::Retired,
            Switch::Ept(_) => Executed::Switched,
            Switch::Undefined => Executed::Fault(Exception::ud()),
            Switch::Exit => {
                // The hardware's report of VMFUNC: no register is in it.
                let report = Report::of(&Block { cpu: &self.cpu, vmcs: &self.vmcs });
                self.leave_l2(n, gprs, &report, &memory)
            }
        }
    }

    fn refuse_by_tables<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        at: Gpa,
        why: TablesRefuse,
        undelivered: Option<Event>,
        l1: &M,
    ) -> Executed {
        let told = self.get(fields::EXIT_QUALIFICATION);
        // The fault may be one that software met: the VMCS tells of another exit then.
        // The emulator walks the same tables: what it meets has no qualification of the hardware's.
        let by_fault = self.get(fields::EXIT_REASON) == u32::from(ExitReason::EptViolation.0);
        let mut in_software = None;
        let (reason, mut qualification) = match why {
            TablesRefuse::LogFull => {
                let unblocked = if by_fault { told & ept_violation::NMI_UNBLOCKED } else { 0 };
                let mut report = Report::plain(ExitReason::PmlFull, unblocked);
                self.tell_undelivered(n, &mut report, undelivered);
                return self.leave_l2(n, gprs, &report, &Memory::new(l1));
            }
            TablesRefuse::ApicAccess { access, length } => {
                let qualification = qualification_of(access, undelivered.is_some());
                let mut report = Report::plain(ExitReason::ApicAccess, qualification);
                report.length = length.into();
                self.tell_undelivered(n, &mut report, undelivered);
                return self.leave_l2(n, gprs, &report, &Memory::new(l1));
            }
            TablesRefuse::Violation { qualification, linear } => {
                in_software = linear;
                (ExitReason::EptViolation, qualification)
            }
            // No qualification: the misconfiguration is in the tables (§28.2.1).
            TablesRefuse::Npf(_) | TablesRefuse::Misconfiguration => {
                (ExitReason::EptMisconfiguration, 0)
            }
        };
        // Each vCPU that runs here until L2 is entered again may leave translations under the same root.
        n.note_told();
        let mut linear = None;
        if qualification & ept_violation::LINEAR_VALID != 0 {
            if let Some(at) = in_software {
                linear = Some(at.0);
            } else if by_fault {
                let block = Block { cpu: &self.cpu, vmcs: &self.vmcs };
                linear = Some(block.get(field::GUEST_LINEAR_ADDRESS));
            } else {
                // Both bits: without an address it says nothing of which access it was.
                qualification &= !(ept_violation::LINEAR_VALID | ept_violation::FINAL);
            }
        }
        let mut report = Report::plain(reason, qualification);
        // Always valid: the physical address is what the tables were asked for (§28.2.1).
        (report.linear, report.physical) = (linear, Some(at.0));
        self.tell_undelivered(n, &mut report, undelivered);
        self.leave_l2(n, gprs, &report, &Memory::new(l1))
    }
}
