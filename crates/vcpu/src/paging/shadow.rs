//! Shadow paging in the run loop (`npt=0`, `ept=0`): page faults, INVLPG and the paging registers, which the
//! guest owns under TDP, exit here.
//!
//! The hardware walks tables of ours ([`mmu::shadow`]), each derived from a table of the guest's. The guest
//! is told nothing of them, so everything that would make a CPU look at its tables again has to come here:
//! a load of CR3, INVLPG, a page fault, a bit of CR0, CR4 or EFER that changes what an entry means.
//!
//! Why work is noted and not done where it arises. One instruction may ask for several things, and some of
//! them twice: a write of CR4 flushes and changes the role, KVM_SET_SREGS writes all registers one by one.
//! And who asks may not be able to do it. The emulator runs outside the inner loop and may sleep; the inner
//! loop may neither sleep nor wait for a lock. So both note the same bits ([`work`]), and they are worked
//! off once, before the guest is entered. The inner loop does that at once where it needs no page and
//! nobody else holds the tables' lock; else it leaves, and the work is done before the next entry.
//!
//! Why page faults are answered inside the loop. With shadow paging they are most exits. Nearly all need
//! only what is there already: the guest's tables, read by way of the VM's tree, and a frame that the tree
//! knows. One that lacks a frame, or is a device's, goes outside and comes back as a TDP fault would.
//!
//! Why tables are settled outside. A guest table that has not changed for a while is write-protected, so
//! that a flush need not compare it. Until all CPUs have flushed, a TLB may still allow a write. That wait
//! is not for the inner loop, which is left for it ([`Vcpu::settle_shadow`]).
//!
//! The four entries that PAE paging loads with CR3 are in [`pdptes`](super::pdptes): there are such
//! registers without shadow paging too.

use backend::{Backend, Event, PageFault, TdpFault};
use emulate::Cause;
use host::{KBox, NoMemory, page::Page};
use mmu::{PagingContext, RootOutcome, Section, ShadowFault, ShadowRoots, Tlb};
use stats::VcpuCount;
use vm::memory::{MemoryError, ShadowOutcome, shadow::Caller};
use x86::{Cr4, Exception, Gpa, Gva, exception::pf};

use super::Mmu;
use super::pdptes::Pdptes;
use crate::{
    Vcpu, apic::apic_is_served, exits::code::CodeState as _, run::outcome::Next,
    run::outcome::Outcome, run::user_exit::UserExit,
};

/// What the shadow tables are asked for before the next entry.
mod work {
    /// The registers changed: look up the root.
    pub const SWITCH: u8 = 1 << 0;
    /// With [`SWITCH`]: CR3 was loaded with a flush.
    pub const LOAD: u8 = 1 << 1;
    /// The whole TLB was flushed.
    pub const FLUSH: u8 = 1 << 2;
    /// The PDPTEs have to be read: user space set the registers.
    pub const PDPTES: u8 = 1 << 3;
}

/// A vCPU's side of shadow paging.
#[derive(Debug)]
pub(crate) struct Shadow {
    roots: ShadowRoots,
    /// Those of the memory that the vCPU does not see now: see [`Vcpu::memory`].
    others: ShadowRoots,
    work: u8,
    /// Guest tables that stay as they are want write protection, outside the loop.
    unsettled: bool,
    pub(super) pdptes: Pdptes,
    /// PDPTEs that were read inside the loop for the write that is being handled, with their base.
    pub(super) fetched: Option<(u64, Pdptes)>,
}

impl Shadow {
    #[inline(never)]
    pub(crate) fn new() -> Result<KBox<Self>, NoMemory> {
        let (low, other_low) = (Page::zeroed_low()?, Page::zeroed_low()?);
        KBox::make(|| Self {
            roots: ShadowRoots::on(low),
            others: ShadowRoots::on(other_low),
            work: work::SWITCH | work::FLUSH,
            unsettled: false,
            pdptes: [0; 4],
            fetched: None,
        })
    }
}

impl Mmu {
    /// An instruction flushes the guest's whole TLB.
    #[inline]
    pub(crate) fn flush_guest_tlb(&mut self, b: &mut impl Backend) {
        if self.roots.is_shadow() {
            self.want(work::FLUSH);
        } else {
            b.flush_tlb();
        }
    }

    /// CR3 was loaded by the guest. Its bit 63 keeps the TLB, with PCIDs.
    #[inline]
    pub(crate) fn cr3_loaded(&mut self, b: &mut impl Backend, tlb: Tlb) {
        if self.roots.is_shadow() {
            self.want(match tlb {
                Tlb::Kept => work::SWITCH,
                Tlb::Flushed => work::SWITCH | work::LOAD,
            });
        } else {
            b.flush_tlb();
        }
    }

    /// The registers changed in a way that may ask for another root.
    pub(crate) fn want_root(&mut self) {
        self.want(work::SWITCH);
    }

    fn want(&mut self, what: u8) {
        if let Some(shadow) = &mut self.shadow {
            shadow.work |= what;
            // So the work is done before the next entry, wherever it was noted.
            self.roots.set_due();
        }
    }

    /// Whether the loop is left so that tables can be settled.
    #[inline]
    pub(crate) fn is_unsettled(&self) -> bool {
        self.shadow.as_ref().is_some_and(|shadow| shadow.unsettled)
    }
}

impl<B: Backend> Vcpu<B> {
    /// User space set the paging registers, or they were reset.
    pub(crate) fn registers_replaced(&mut self) {
        self.mmu.want(work::SWITCH | work::FLUSH | work::PDPTES);
        if self.b.pdptes().is_some() && self.mmu.shadow.is_none() {
            self.replace_pdptes();
        }
    }

    /// Does the work inside the loop. `false`: not to be had there.
    #[inline(never)]
    pub(crate) fn shadow_work_in_loop(&mut self, s: Section<'_>) -> bool {
        let todo = self.mmu.shadow.as_ref().map_or(0, |shadow| shadow.work);
        // They are read from guest memory.
        if todo & work::PDPTES != 0 {
            return false;
        }
        let switches = todo & work::SWITCH != 0;
        let context =
            if switches { self.b.paging_context(&self.cpuid) } else { PagingContext::default() };
        let space = self.smm.space();
        let Self { b, mmu, .. } = self;
        let Some((shadow, memory, _)) = mmu.shadowed() else { return true };
        // With interrupts off nobody waits for the lock, which another vCPU may hold for long.
        let Some(mut guard) = memory.shadow().and_then(|mmu| mmu.try_lock()) else { return false };
        let view = memory.view(s);
        let tlb = Tlb::flushed_if(todo & work::LOAD != 0);
        if switches {
            let Shadow { roots, pdptes, .. } = &mut **shadow;
            match guard.switch(&view, roots, &context, pdptes, space, tlb) {
                RootOutcome::Ready(root) => b.set_shadow_root(root.cr3),
                RootOutcome::NeedPages(_) => return false,
            }
        }
        if todo & work::FLUSH != 0 {
            guard.flush(&view, &mut shadow.roots);
        }
        if todo & (work::LOAD | work::FLUSH) != 0 {
            b.flush_tlb();
        }
        // Only here, where nothing is left: the outer loop begins with all of it.
        shadow.work = 0;
        if guard.wants_settling() {
            shadow.unsettled = true;
            self.pending.raise();
        }
        true
    }

    /// Does the work outside the loop.
    pub(crate) fn shadow_work(&mut self) -> Result<(), NoMemory> {
        let (context, space) = (self.b.paging_context(&self.cpuid), self.smm.space());
        if self.mmu.shadow.as_ref().is_some_and(|s| s.work & work::PDPTES != 0) {
            self.reload_pdptes(&context);
        }
        let Self { b, vm, shared, mmu, .. } = self;
        let Some((shadow, memory, _)) = mmu.shadowed() else { return Ok(()) };
        let todo = core::mem::take(&mut shadow.work);
        let by = Caller { vcpu: shared, flush: &***vm };
        if todo & work::SWITCH != 0 {
            let tlb = Tlb::flushed_if(todo & work::LOAD != 0);
            let Shadow { roots, pdptes, .. } = &mut **shadow;
            let root = memory
                .shadow_switch(by, roots, &context, pdptes, space, tlb)
                // Nothing was done: without a root there is no entry.
                .inspect_err(|_| shadow.work = todo)?;
            b.set_shadow_root(root.cr3);
        }
        if todo & work::FLUSH != 0 {
            memory.shadow_flush(shared, &mut shadow.roots);
        }
        b.flush_tlb();
        Ok(())
    }

    /// The vCPU sees the memory of the other mode from now on. What was written there meanwhile, from
    /// the mode that was left, is told nobody: all tables that count as unchanged are looked at
    /// again.
    pub(crate) fn shadow_memory_changed(&mut self) {
        if let Some(shadow) = &mut self.mmu.shadow {
            let Shadow { roots, others, .. } = &mut **shadow;
            core::mem::swap(roots, others);
            // Before its roots are looked up.
            self.mmu.memory.shadow_doubt();
            self.registers_replaced();
        }
    }

    /// Lets go of all roots; the next one is looked up anew.
    pub(crate) fn drop_shadow_roots(&mut self) {
        let space = self.smm.space();
        let Self { vm, mmu, .. } = self;
        let Some((shadow, _, _)) = mmu.shadowed() else { return };
        vm.memory_in(space).shadow_release(&mut shadow.roots);
        vm.memory_in(space.other()).shadow_release(&mut shadow.others);
        shadow.work |= work::SWITCH;
    }

    /// Before an entry: what is better done now and then than never.
    #[inline]
    pub(crate) fn settle_shadow(&mut self) {
        let Self { vm, shared, mmu, .. } = self;
        let Some((shadow, memory, _)) = mmu.shadowed() else { return };
        if core::mem::take(&mut shadow.unsettled) {
            memory.shadow_settle(Caller { vcpu: shared, flush: &***vm });
        }
    }

    /// A page fault inside the loop.
    #[inline]
    pub(crate) fn answer_page_fault(&mut self, s: Section<'_>, fault: PageFault) -> Next {
        let context = self.b.paging_context(&self.cpuid);
        let mmu = &mut self.mmu;
        // Under TDP a #PF is the guest's own and does not exit.
        let Some((shadow, memory, _)) = mmu.shadowed() else { return Next::Leave };
        let Some(mut guard) = memory.shadow().and_then(|mmu| mmu.try_lock()) else {
            return Next::Leave;
        };
        let view = memory.view(s);
        let (roots, at) = (&mut shadow.roots, fault.address.0);
        let outcome = guard.fault(&view, roots, &context, at, fault.code);
        // The lock is not held over what may leave the loop or raise an event.
        drop(guard);
        match outcome {
            ShadowFault::Fixed => {
                self.stats.count(VcpuCount::PfFixed);
                self.keep_interrupted_delivery()
            }
            ShadowFault::Guest(exception) => {
                self.stats.count(VcpuCount::PfGuest);
                // Before the guest's fault is raised: which event it interrupted decides what the two become.
                let next = self.keep_interrupted_delivery();
                self.raise_in_delivery(exception);
                next
            }
            // Only the access itself can be a device's register. A table in a device is looked at outside.
            ShadowFault::NeedFrame(wanted) if wanted.table.is_none() => {
                self.answer_mmio(s, as_tdp(wanted.gpa, fault.code))
            }
            ShadowFault::NeedFrame(_) | ShadowFault::NeedPages(_) | ShadowFault::Emulate { .. } => {
                Next::Leave
            }
        }
    }

    /// A page fault outside the loop.
    pub(crate) fn page_fault(&mut self, fault: PageFault) -> Outcome {
        let context = self.b.paging_context(&self.cpuid);
        let Self { vm, shared, mmu, .. } = self;
        let Some((shadow, memory, tables)) = mmu.shadowed() else {
            return Ok(());
        };
        let (roots, at) = (&mut shadow.roots, fault.address.0);
        let by = Caller { vcpu: shared, flush: &***vm };
        let outcome = memory.shadow_fault(by, tables, roots, &context, at, fault.code);
        match outcome {
            ShadowOutcome::Fixed => {
                self.stats.count(VcpuCount::PfFixed);
                Ok(())
            }
            ShadowOutcome::Retry => Ok(()),
            ShadowOutcome::Guest(exception) => {
                self.stats.count(VcpuCount::PfGuest);
                self.raise_in_delivery(exception);
                Ok(())
            }
            ShadowOutcome::Mmio(gpa) | ShadowOutcome::ReadonlyWrite(gpa) => {
                self.stats.count(VcpuCount::PfEmulate);
                if self.events.again.is_some() {
                    // The tables, descriptors or stack that the delivery needs lie in device memory.
                    return Err(self.delivery_met_device(gpa));
                }
                self.device_access(as_tdp(gpa, fault.code))
            }
            ShadowOutcome::Emulate(_) => self.emulate_here(Cause::Any),
            ShadowOutcome::Error(MemoryError::Interrupted) => Err(UserExit::Intr.into()),
            ShadowOutcome::Error(_) => {
                Err(UserExit::MemoryFault { flags: 0, gpa: 0, size: 4096 }.into())
            }
        }
    }

    /// Raises a fault that the delivery of an event may have met. An interrupt or NMI goes back to
    /// where it waited; an exception makes another one of the two. What L1 has injected into L2 is lost, as in a CPU: it
    /// has not waited anywhere in L1's machine.
    pub(crate) fn raise_in_delivery(&mut self, exception: Exception) {
        self.put_back_again();
        self.raise(exception);
    }

    /// The interrupt or NMI whose delivery was to be done again waits where it waited before; one that L1 has injected
    /// into L2 is lost, and so is INT n.
    #[cold]
    #[inline(never)]
    pub(crate) fn put_back_again(&mut self) {
        match self.events.again {
            Some(event) if self.is_l1s_for_l2(event) => self.events.again = None,
            // Its instruction is executed again behind the fault's handler. One that L1 has injected has none, and is lost.
            Some(Event::Software(_)) => self.events.again = None,
            Some(Event::Interrupt(vector)) => {
                self.events.again = None;
                if !self.shared.in_kernel_apic {
                    self.events.external = Some(vector);
                } else {
                    // What is in service may lie with the hardware.
                    if apic_is_served(&self.b) {
                        self.gather_interrupts();
                    }
                    // The vector may be the PIC's, which has none in service here.
                    if self.shared.lapic.in_service() == Some(vector) {
                        self.shared.lapic.unack(vector);
                    }
                }
            }
            Some(Event::Nmi) => {
                self.events.again = None;
                self.shared.add_nmi();
            }
            _ => {}
        }
    }

    /// INVLPG inside the loop.
    pub(crate) fn answer_invlpg(&mut self, s: Section<'_>, address: Option<Gva>) -> Next {
        let (at, next) = match (address, self.b.next_rip()) {
            (Some(at), Some(next)) => (at.0, next),
            _ => {
                let size = self.b.code_size();
                let Some((bytes, len)) = self.fetch_here(s, size) else { return Next::Leave };
                let Some(bytes) = bytes.get(..usize::from(len)) else { return Next::Leave };
                let Some(insn) = emulate::invlpg(bytes, size) else { return Next::Leave };
                let rip = self.b.rip();
                let gpr = |n: usize| self.gprs.get(n);
                let next = self.b.wrap_rip(rip.wrapping_add(u64::from(insn.length)));
                (insn.address(gpr, rip), next)
            }
        };
        // INVLPG of any other address does nothing (SDM vol. 2A, INVLPG).
        if self.b.paging_context(&self.cpuid).is_canonical(at) && !self.invlpg_in_loop(s, at) {
            self.mmu.want(work::FLUSH);
        }
        self.retire(next);
        self.switch_root_in_loop(s)
    }

    fn invlpg_in_loop(&mut self, s: Section<'_>, at: u64) -> bool {
        let Self { b, mmu, .. } = self;
        let Some((shadow, memory, _)) = mmu.shadowed() else { return false };
        let Some(mut guard) = memory.shadow().and_then(|mmu| mmu.try_lock()) else { return false };
        guard.invlpg(&memory.view(s), &mut shadow.roots, at);
        b.flush_tlb();
        if guard.wants_settling() {
            shadow.unsettled = true;
            self.pending.raise();
        }
        true
    }

    /// INVLPG outside the loop.
    pub(crate) fn flush_page(&mut self, at: Gva) {
        if self.b.paging_context(&self.cpuid).is_canonical(at.0) {
            let Self { b, shared, mmu, .. } = self;
            let Some((shadow, memory, _)) = mmu.shadowed() else { return };
            memory.shadow_invlpg(shared, &mut shadow.roots, at.0);
            b.flush_tlb();
        }
    }

    /// INVPCID (APM vol. 3): `kind` 0 is one address of one PCID, 1 a PCID, 2 and 3 all.
    pub(crate) fn flush_pcid(&mut self, kind: u8, pcid: u16, at: Gva) -> Result<(), Exception> {
        let c = self.b.control();
        let tagged = c.cr4.contains(Cr4::PCIDE);
        // SDM vol. 2A, INVPCID: a PCID is #GP while CR4.PCIDE is clear.
        if (kind < 2 && pcid != 0 && !tagged)
            || (kind == 0 && !self.b.paging_context(&self.cpuid).is_canonical(at.0))
        {
            return Err(Exception::gp(0));
        }
        let current = if tagged { c.cr3 & 0xfff } else { 0 };
        // Shadow pages have no PCIDs. What is of another one is flushed with all: more than asked for is allowed.
        if kind == 0 && u64::from(pcid) == current {
            self.flush_page(at);
        } else {
            self.mmu.flush_guest_tlb(&mut self.b);
        }
        Ok(())
    }
}

/// A device access as a TDP fault would tell it.
fn as_tdp(gpa: Gpa, code: u32) -> TdpFault {
    TdpFault {
        gpa,
        write: code & pf::WRITE != 0,
        fetch: code & pf::FETCH != 0,
        present: false,
        reserved: false,
        final_access: true,
    }
}
