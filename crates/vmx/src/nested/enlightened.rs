//! The enlightened VMCS of an L1 that uses one: taken over before an entry, with its map of MSRs.

use backend::{Executed, FlushTold, Gprs, L1Memory, RAX, RCX, Registers as _, TellFlush};
use cpu::Cpu;
use nested_vmx::machine::EntryBy;
use nested_vmx::machine::enlightened::{Loaded, UNDEFINED};
use nested_vmx::{Fail, leave::Report};
use x86::segment::attr;
use x86::vmcs::{ExitReason, enlightened::flush};

use super::{access::Memory, instruction::reason_of, kept::Nested};
use crate::state::Vmx;

impl<C: Cpu> Vmx<C> {
    /// Whether an exit of L2's is for a hypercall that L1 leaves to L0: one that flushes translations.
    #[cold]
    #[inline(never)]
    pub(super) fn is_flush_for_l2(&self, n: &Nested, gprs: &Gprs, report: &Report) -> bool {
        // By the code segment, as the control word is read when the call is answered.
        let is_64bit = self.is_long() && self.code_attributes() & attr::L != 0;
        let code = if is_64bit { gprs.0[RCX] } else { gprs.0[RAX] };
        // The reason first: most exits are none.
        report.reason == ExitReason::Vmcall
            && n.machine.told().is_some_and(|told| told.direct_flush)
            && flush::is(code as u16)
    }

    /// Behind such a flush: whether L1 can be asked if it wants to hear of it, and ends L2's run if it does and is to be told.
    #[cold]
    pub(super) fn tell_flush_of<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        how: TellFlush,
        l1: &M,
    ) -> FlushTold {
        let memory = Memory::new(l1);
        match n.machine.wants_flush_told(&memory) {
            None => FlushTold::Nowhere,
            Some(true) if how == TellFlush::Tell => {
                // Any reason will do here: the one that L1 reads is written behind the exit.
                let report = Report::plain(ExitReason::EptMisconfiguration, 0);
                let done = self.leave_l2(n, gprs, &report, &memory);
                // Behind the exit has been written: the reason in the page is the last word.
                n.machine.tell_flush(&memory);
                FlushTold::Yes(done)
            }
            Some(_) => FlushTold::No,
        }
    }

    /// Before an entry of an L1 that may name an enlightened VMCS. `Err`: what came of the instruction already.
    #[cold]
    #[inline(never)]
    pub(super) fn load_enlightened<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        by: EntryBy,
        memory: &Memory<'_, M>,
    ) -> Result<(), Executed> {
        // What the VMCS that may be given up has of L2.
        let behind = n.machine.behind();
        if !behind.is_empty() {
            self.fetch(n, behind);
        }
        // The VMCS that is current would be written into L1's memory: outside, where that cannot fail for want of a page.
        if n.machine.current().is_some() && !memory.is_whole() {
            return Err(Executed::Outside);
        }
        let cpu = self.nested_cpu(n, reason_of(by));
        let limits = self.nested_limits();
        let loaded = n.machine.load_enlightened(by, &cpu, &limits, memory);
        // What came of it on missing pages means nothing: it is done again outside.
        if memory.has_missed() {
            // The run loop brings in that page, and not the operand's.
            n.missed = n.machine.assist_page().filter(|_| loaded == Ok(Loaded::NoAssist));
            return Err(Executed::Outside);
        }
        match loaded {
            Ok(Loaded::Page) => {}
            Ok(Loaded::None | Loaded::NoAssist) => {
                // An assist page that is no memory names nothing.
                n.machine.give_up_enlightened(loaded == Ok(Loaded::NoAssist));
                n.msrs_kept = None;
                return Ok(());
            }
            Err(fail) => {
                let fail = match fail {
                    // No page of L1's: the VMCS that was current is given up, and the instruction is undefined (stock KVM: #UD, too).
                    Fail::Outside => {
                        n.machine.refuse_enlightened(memory);
                        UNDEFINED
                    }
                    fail => fail,
                };
                return Err(self.conclude(n, gprs, Err(fail), memory));
            }
        }
        // L1 has changed its bitmap, or says nothing of it: what was kept is of before.
        if !n.machine.keeps_msr_bitmap() {
            n.msrs_kept = None;
        }
        // Whatever comes of the entry is written there.
        // In the loop the page has to be writable now: the end of L2's run is not to wait for it.
        if !memory.is_whole() && !n.machine.reaches_enlightened(memory) {
            return Err(Executed::Outside);
        }
        if memory.is_whole() && !n.machine.keeps_enlightened(memory) {
            // A page that L1 can only read.
            n.machine.refuse_enlightened(memory);
            return Err(self.conclude(n, gprs, Err(UNDEFINED), memory));
        }
        // Read here once, for all entries that find it clean.
        Self::keep_msrs(n, memory);
        if memory.has_missed() { Err(Executed::Outside) } else { Ok(()) }
    }
}
