//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE: [`nested_svm::saved`] applied to the two blocks.

use backend::{
    ControlRegisters, Gprs, L1Memory, Level, Nested, NestedState, RAX, RSP, Unrestorable,
};
use cpu::Cpu;
use host::KBox;
use nested_svm::{
    gif::Gif,
    saved::{self, Header, Onto, Running},
};
use x86::{
    Cr0, Rflags,
    vmcb::{Clean, Vmcb, event},
};
use zerocopy::IntoBytes;

use super::{Seen, paging::has_tables, run};
use crate::{
    l2::{Injected, State, is_by_instruction, is_interrupt},
    state::{Svm, Virq},
};

/// A state that was found good.
#[derive(Debug)]
pub struct Good {
    header: Header,
    running: Running,
    /// The block, and what L2 runs with where the vCPU has none yet, if L2 is to run.
    l2: Option<(KBox<Vmcb>, Option<KBox<State>>)>,
}

impl<C: Cpu> Svm<C> {
    fn running(&self) -> Running {
        let pending = |state: &KBox<State>| state.entry_pending;
        Running {
            level: match self.level {
                Level::L1 => nested_svm::Level::L1,
                Level::L2 => nested_svm::Level::L2,
            },
            gif: self.gif,
            entry_pending: self.nested.as_ref().is_some_and(pending),
        }
    }

    fn state_header(&self) -> Header {
        match &self.nested {
            Some(state) => saved::header(self.running(), &state.v12),
            None => Header { flags: if self.gif.is_set() { saved::GIF_SET } else { 0 }, vmcb: 0 },
        }
    }

    /// Reads a state and checks all of it.
    #[inline(never)]
    fn read_state(&mut self, bytes: &[u8], smm: bool) -> Result<Good, Unrestorable> {
        let (header, size) = Header::read(bytes).map_err(|_| Unrestorable::Invalid)?;
        let onto = Onto { enabled: self.is_enabled(), smm };
        let mut data = None;
        // The header says how long the state is; what could be read of it may be less.
        if header.size() == saved::LARGEST && size >= saved::LARGEST {
            let mut page = KBox::<Vmcb>::zeroed().map_err(|_| Unrestorable::NoMemory)?;
            let Some(from) = bytes.get(saved::HEADER..saved::LARGEST) else {
                // What the header alone says comes first.
                let wrong = saved::check(header, None, onto, &self.cold.offered);
                let address = matches!(wrong, Err(saved::Refused::Data));
                return Err(if address { Unrestorable::Missing } else { Unrestorable::Invalid });
            };
            page.as_mut_bytes().copy_from_slice(from);
            data = Some(page);
        }
        let running = saved::check(header, data.as_deref(), onto, &self.cold.offered)
            .map_err(|_| Unrestorable::Invalid)?;
        // Behind the header's checks: tables depend on L1's paging, which the vCPU has by now.
        if let Some(page) = &data
            && has_tables(&page.control)
            && (!run::may_have_tables(page, &self.block.vmcb().save)
                || run::lacks_levels(page, &mut self.cpu))
        {
            return Err(Unrestorable::Invalid);
        }
        let l2 = match data.filter(|_| running.level == nested_svm::Level::L2) {
            None => None,
            Some(data) if self.nested.is_some() => Some((data, None)),
            Some(data) => Some((data, Some(State::new().map_err(|_| Unrestorable::NoMemory)?))),
        };
        Ok(Good { header, running, l2 })
    }

    /// L1's registers into its block, L2's into the copy of its block. L1 runs.
    fn take_over(&mut self, header: Header, data: &Vmcb, gprs: &Gprs) {
        let hidden = Cr0::from_bits_retain(self.cr0_hidden.into());
        let b01 = self.block.vmcb_mut(Clean::ALL);
        let Some(state) = &mut self.nested else { return };
        saved::take_over(header, data, &mut state.v12, b01, hidden);
        let l2 = state.v12.registers();
        (l2.rax, l2.rsp) = (gprs.0[RAX], gprs.0[RSP]);
        self.restore_branch_records(&data.save);
        let b01 = self.block.vmcb_mut(Clean::ALL);
        let Some(state) = &mut self.nested else { return };
        state.l1_interrupts = b01.save.rflags & Rflags::IF.bits() != 0;
        let cr0 = Cr0::from_bits_retain(b01.save.cr0);
        self.set_cr0(cr0);
    }
}

impl<C: Cpu> NestedState for Svm<C> {
    type Checked = Good;

    fn state_size(&self) -> usize {
        self.state_header().size()
    }

    fn save_state(
        &mut self,
        _gprs: &Gprs,
        into: &mut [u8],
        _l1: &impl L1Memory,
    ) -> Result<(), Unrestorable> {
        let header = self.state_header();
        if !header.write(into) {
            return Err(Unrestorable::Missing);
        }
        let Some(state) = self.nested.as_ref().filter(|_| self.level == Level::L2) else {
            return Ok(());
        };
        // Zeroed: all of it goes to user space.
        let mut page = KBox::<Vmcb>::zeroed().map_err(|_| Unrestorable::NoMemory)?;
        let b01 = (state.other.vmcb(), u64::from(state.cr0_hidden));
        saved::data(&mut page, &state.v12, b01, &self.block.vmcb().control, state.window);
        if page.control.event_inj & event::VALID == 0 {
            // What is on its way is among the vCPU's events; that it is L1's they do not tell. What L1 injected before is no name of it.
            let named = state.injected.filter(|of_l1| !of_l1.is_nmi());
            page.control.event_inj = named.map_or(0, |of_l1| of_l1.event & !event::VALID);
            if let Some(of_l1) = named
                && is_by_instruction(of_l1.event)
            {
                page.control.next_rip = of_l1.next_rip;
            }
        }
        let place = into.get_mut(saved::HEADER..saved::LARGEST).ok_or(Unrestorable::Missing)?;
        place.copy_from_slice(page.as_bytes());
        Ok(())
    }

    fn check_state(
        &mut self,
        bytes: &[u8],
        smm: bool,
        _l1: &impl L1Memory,
    ) -> Result<Good, Unrestorable> {
        self.read_state(bytes, smm)
    }

    fn restore_state(&mut self, gprs: &mut Gprs, good: Good, l1: &impl L1Memory) {
        let set = |gif: Gif| gif.is_set();
        // Memory may be that of another time: what was made of L1's tables, and lies under L2's tag, is stale.
        self.flush_l2();
        self.flush_other_block();
        let Some((data, state)) = good.l2 else {
            if set(good.running.gif) {
                self.gif.set()
            } else {
                self.gif.clear()
            }
            return;
        };
        // Made when it was checked: restoring must not fail for a lack of memory.
        if state.is_some() {
            self.nested = state;
        }
        // A window of L1's is no part of what L2 is entered with.
        self.set_virq(Virq::Off);
        self.take_over(good.header, &data, gprs);
        // What cannot be read of L1's map exits until L1's next VMRUN.
        let msrpm = self.merge_msr_map(&Seen::new(l1)).unwrap_or_else(|_| self.closed_msr_map());
        self.start_l2(gprs, Clean::ALL, msrpm);
        // VMRUN has set it; a saved state may say otherwise.
        if !set(good.running.gif) {
            self.gif.clear();
        }
        if let Some(state) = &mut self.nested {
            let control = state.v12.control();
            let event = control.event_inj | event::VALID;
            let is_named = is_by_instruction(event) || is_interrupt(event);
            if control.event_inj & event::VALID == 0 && is_named {
                // It is on its way, and comes with KVM_SET_VCPU_EVENTS.
                let next_rip = control.next_rip;
                state.injected = Some(Injected { event, rip: None, next_rip });
            }
            // `start_l2` takes each entry for one to come.
            state.entry_pending = good.running.entry_pending;
            state.flushed = true;
        }
        self.block.request_flush();
    }
}
