//! VMLAUNCH and VMRESUME of L1: vmcs02 is composed from what changed, and L2 is what runs.

use core::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use backend::{
    Executed, Gprs, L1Memory, ListAct, ListMsr, LiveRegisters, Msrs, RSP, Sleep, TSC_RATIO_ONE,
};
use cpu::Cpu;
use nested_vmx::apic_page;
use nested_vmx::checks::{Limits, controls::OTHER, guest::activity_state, is_pat};
use nested_vmx::events::{self, Sleeps};
use nested_vmx::leave::Report;
use nested_vmx::machine::{Entered, Invalidation, PendingEntry};
use nested_vmx::merge::{self, Flush, L0, Pages, Transition, time};
use nested_vmx::{EntryFailure, GuestMemory, Outside, Vmcs12, virtual_interrupts};
use x86::vmcs::{
    EntryControls, ExitControls, ExitReason, Group, Groups, PinControls, ProcControls,
    ProcControls2, event, field,
};
use x86::{Cr0, Cr4, Direction, Directions, Dr7, Efer, Gpa, msr};

use super::{
    access::{Blind, Block, Memory},
    kept::{Nested, OfL1},
    list::By,
    seconds::{Source, Sources},
};
use crate::{
    features::Features,
    fields::{self, counted},
    mitigations,
    passed::{Map, PASSED, Passed},
    permission::LISTED,
    state::{Vmx, attention},
};

/// What an entry does not load.
// CR0.CD and NW: caching on the machine is the host's (SDM vol. 3C §27.3.2.1).
const NOT_LOADED: u64 = Cr0::CD_NW.bits();
/// Windows that L0 opens for L1.
const WINDOWS: ProcControls = ProcControls::INTERRUPT_WINDOW.union(ProcControls::NMI_WINDOW);

/// The composed groups that follow from L0's words.
fn of_l0() -> Groups {
    // Not Apic and MsrLists: nothing of them comes from L0's words. Segments, flow and SYSENTER MSRs are L2's alone.
    [Group::ControlRegisters, Group::Msrs, Group::Controls, Group::Translation, Group::Time]
        .iter()
        .fold(Groups::of(Group::Bitmaps), |all, group| all.union(Groups::of(*group)))
}

/// Groups with which the secondary controls are composed, or what UMIP makes of them changes.
const WORDS: Groups = Groups::of(Group::Controls)
    .union(Groups::of(Group::Bitmaps))
    .union(Groups::of(Group::Apic))
    .union(Groups::of(Group::Time))
    .union(Groups::of(Group::Translation))
    .union(Groups::of(Group::ControlRegisters));

impl<C: Cpu> Vmx<C> {
    /// The words that L0's part of vmcs02 follows from. vmcs01 is the vCPU's.
    #[inline]
    fn sources(&self, n: &Nested) -> Sources {
        let (vmcs, cpu) = (&self.vmcs, &self.cpu);
        Sources {
            // They are opened for what waits for L1, and not for L2.
            // A window of L1's own is in VMCS12, and is composed from there.
            primary: Source::of(counted::PROC_CONTROLS, vmcs, cpu).without(WINDOWS.bits()),
            secondary: Source::of(counted::PROC_CONTROLS2, vmcs, cpu)
                // L2's VMREAD and VMWRITE always exit: the shadow VMCS is L1's.
                .without(ProcControls2::SHADOW_VMCS.union(self.watching_controls()).bits()),
            exit: Source::of(counted::EXIT_CONTROLS, vmcs, cpu),
            entry: Source::of(counted::ENTRY_CONTROLS, vmcs, cpu),
            exceptions: Source::of(counted::EXCEPTION_BITMAP, vmcs, cpu),
            cr0_mask: Source::of(counted::CR0_MASK, vmcs, cpu),
            cr4_mask: Source::of(counted::CR4_MASK, vmcs, cpu),
            // The offset and the ratio by L0's own words: the field of vmcs01 has the same, but would be a VMREAD.
            tsc_offset: self.tsc_offset,
            tsc_ratio: self.tsc_ratio,
            // Not read: where nothing was written yet no entry has taken place either, and each entry sets it.
            vpid: n.other.fields.get(fields::VPID).unwrap_or(0),
        }
    }

    /// L0's part of vmcs02, but for registers that an entry keeps. Not from vmcs01 but by `s`, whose changes are seen.
    #[cold]
    #[inline(never)]
    fn l0_part(features: &Features, n: &Nested, s: &Sources) -> L0 {
        L0 {
            // The base word, and not vmcs01's: the pin controls never change.
            pin: PinControls::from_bits_retain(features.pin.base.bits()),
            primary: ProcControls::from_bits_retain(s.primary.value()),
            secondary: ProcControls2::from_bits_retain(s.secondary.value()),
            exit: ExitControls::from_bits_retain(s.exit.value()),
            entry: EntryControls::from_bits_retain(s.entry.value()),
            exceptions: s.exceptions.value(),
            // With EPT a page fault is L2's own, or L1's.
            page_faults: false,
            // VMX fixes the two to 1, but not for a guest that may run without them.
            cr0_ones: ((features.cr0_fixed - Cr0::PG_PE) | Cr0::ET).bits(),
            cr0_mask: s.cr0_mask.value(),
            cr4_ones: (features.cr4_fixed | Cr4::MCE).bits(),
            cr4_mask: s.cr4_mask.value(),
            tsc: tsc_by(s.tsc_ratio, s.tsc_offset),
            // The longest time: whoever watches a deadline sets another.
            preemption_timer: features.preemption_timer.map(|_| u32::MAX),
            vpid: s.vpid,
            pages: Pages {
                msr_bitmap: Some(n.other.msr_map.hpa()),
                exit_tsc: Some(n.exit_tsc.hpa()),
                ..Pages::default()
            },
            // No registers yet: those below are L1's of the moment of the entry.
            efer: 0,
            dr7: 0,
            debugctl: 0,
            pat: 0,
        }
    }

    /// L1's TSC, from the host's.
    pub(super) fn tsc_of_l1(&self) -> time::Tsc {
        tsc_by(self.tsc_ratio, self.tsc_offset)
    }

    /// Whether all words are as they were at the entry before. vmcs01 is the vCPU's.
    #[inline]
    fn has_same_sources(&self, n: &Nested) -> bool {
        // By a count, where new values come by: who changes a word of L0's need not know that there is an L2.
        n.made.changes.get() == self.vmcs.fields.changes()
            // The others are no fields of vmcs01's.
            && n.made.sources.get().is_some_and(|of| {
                of.tsc_offset == self.tsc_offset
                    && of.tsc_ratio == self.tsc_ratio
                    && of.vpid == n.other.fields.get(fields::VPID).unwrap_or(0)
            })
    }

    /// One of the words may be another than at the entry before.
    #[cold]
    #[inline(never)]
    fn look_at_sources(&self, n: &mut Nested) {
        let now = self.sources(n);
        // By value: most changes are windows, which come and go.
        if n.made.sources.get() != Some(now) {
            n.made.sources.set(Some(now));
            n.made.l0 = Self::l0_part(&self.features, n, &now);
            n.machine.touch(of_l0());
        }
        // Behind the reads, of which a first one counts as a change.
        n.made.changes.set(self.vmcs.fields.changes());
    }

    /// Makes the groups dirty that follow from a word of L0's that is another than at the entry before.
    #[inline]
    fn note_l0(&self, n: &mut Nested) {
        // A few words compared, in place of a dozen and of composing what follows from them.
        if self.has_same_sources(n) {
            debug_assert_eq!(n.made.sources.get(), Some(self.sources(n)));
        } else {
            self.look_at_sources(n);
        }
        // By value: L1 changes it without telling, and L2 has it where its entry does not load another.
        n.machine.note_l1_efer(self.efer.bits());
        // For measurements, and to find out whether a fault is one of tracking: all is composed, all is checked.
        if n.without_tracking {
            n.machine.touch_whole();
        }
    }

    /// The second half of VMLAUNCH and VMRESUME.
    pub(super) fn enter_l2<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        entry: PendingEntry,
        gprs: &mut Gprs,
        limits: &Limits,
        memory: &Memory<'_, M>,
    ) -> Executed {
        let lists = n.machine.vmcs12().get(field::ENTRY_MSR_LOAD_COUNT) != 0;
        // An entry that fails loads L1's host state, for which it may need memory that is missing here.
        // Asked for before anything of L2 is loaded: an entry that has begun is not to be taken back.
        if (lists || n.needs_memory_to_leave()) && !memory.is_whole() {
            return Executed::Outside;
        }
        // At each entry: L1 changes its map without an exit.
        self.map_msrs(n, memory);
        if memory.has_missed() {
            return Executed::Outside;
        }
        // Before `finish_entry`, which composes by what is dirty: a word of L0's makes groups so.
        self.note_l0(n);
        if lists {
            // A list that cannot be loaded gives L2's state up, which VMCS12 is to have then.
            let behind = n.machine.behind();
            self.fetch(n, behind);
        }
        let has_apic = apic_page::is_used(n.machine.vmcs12());
        let mut waits = false;
        // Behind the map and before the checks of L2's state: stock KVM looks for its pages there, too.
        if has_apic && (virtual_interrupts::are_on(n.machine.vmcs12()) || Self::has_new_apic(n)) {
            match Self::prepare_apic(n, memory) {
                Ok(found) => waits = found,
                Err(done) => return done,
            }
        }
        let mut entered = n.machine.finish_entry(limits, memory);
        // What was fetched is behind no more: this comes once.
        while let Entered::Fetch(groups) = entered {
            self.fetch(n, groups);
            entered = n.machine.finish_entry(limits, memory);
        }
        // Only of an L2 that runs: an entry that fails has another end.
        let falls = has_apic && matches!(entered, Entered::L2(_)) && Self::will_fall(n, memory);
        if memory.has_missed() {
            // The same entry is made again outside, from its checks on.
            n.machine.withdraw_entry();
            return Executed::Outside;
        }
        let dirty = match entered {
            Entered::L2(dirty) => dirty,
            Entered::Failed(failure) => return self.fail_entry(n, gprs, failure, memory),
            Entered::Fetch(_) => return Executed::Outside,
        };
        // From here on vmcs02 is the vCPU's: what fails now fails as an entry that was loaded.
        self.change_to_l2(n, gprs, dirty);
        // L1 that changes its own has it composed anew ([`Vmx::set_cr0`]). A state that is restored has L2's.
        if dirty.has(Group::ControlRegisters) {
            self.leave_caching(n);
        }
        // Before the list: what fails there is an entry that had begun, and VMLAUNCH is undone by it.
        n.machine.entered(entry);
        if lists && let Err(failure) = self.load_msr_list(n, memory) {
            return self.fail_loaded_entry(n, gprs, failure, memory);
        }
        if has_apic {
            // Falls first: an exit before L2's first instruction leaves no room for an interrupt.
            if falls {
                return self.fall(n, gprs, memory);
            }
            if waits {
                n.machine.interrupt_pending = true;
                return Self::offer_virtual(n);
            }
        }
        if n.machine.vmcs12().get(field::GUEST_ACTIVITY) == activity_state::ACTIVE {
            return Executed::Entered;
        }
        Self::put_to_sleep(n)
    }

    /// CD and NW stay as L1 has them, which an exit leaves in turn: VMCS12 is no way to them.
    #[cold]
    #[inline(never)]
    fn leave_caching(&mut self, n: &mut Nested) {
        // L1 owns all of its CR0: what it sees is what there is.
        let Some(of_l1) = n.other.fields.get(fields::CR0_SHADOW) else { return };
        let differs = (self.cr0 ^ Cr0::from_bits_retain(of_l1)) & Cr0::CD_NW;
        if differs.is_empty() {
            return;
        }
        self.cr0 ^= differs;
        let seen = (differs - self.cold.of_l1.cr0).bits();
        self.set(fields::CR0_SHADOW, self.get(fields::CR0_SHADOW) ^ seen);
        // What L1 owns is saved from here: the exit, or a saved state, has what the register had.
        let v = n.machine.vmcs12_mut();
        v.set(
            field::GUEST_CR0,
            (v.get(field::GUEST_CR0) & !NOT_LOADED) | (self.cr0.bits() & NOT_LOADED),
        );
    }

    /// Whether L2's run is to end at its first instruction for its priority; its end needs as much of L1's memory, which is
    /// looked for before anything has changed. What waits for a startup IPI does not fall (SDM vol. 3C §27.7.7).
    #[cold]
    #[inline(never)]
    fn will_fall<M: L1Memory>(n: &Nested, memory: &Memory<'_, M>) -> bool {
        let v = n.machine.vmcs12();
        let falls = v.get(field::GUEST_ACTIVITY) != activity_state::WAIT_FOR_SIPI
            && apic_page::falls_at_entry(v, memory);
        // As if memory had been missing: the caller makes the same entry again outside.
        if falls && !Self::may_leave(n, memory) {
            let _ = memory.miss();
        }
        falls
    }

    /// Whether L1 has changed what names its pages of the local APIC. That the page goes between two entries, which stock
    /// KVM would tell the VMM, is not looked for: nothing of it is used.
    fn has_new_apic(n: &Nested) -> bool {
        let dirty = n.machine.dirty();
        dirty.has(Group::Apic) || dirty.has(Group::Controls)
    }

    /// What an entry asks of L1's pages of the local APIC: whether a virtual interrupt waits for L2.
    #[cold]
    #[inline(never)]
    fn prepare_apic<M: L1Memory>(n: &Nested, memory: &Memory<'_, M>) -> Result<bool, Executed> {
        let v = n.machine.vmcs12();
        // A page that was found once is not looked for at each entry.
        let there = !Self::has_new_apic(n) || apic_page::is_there(v, memory);
        let waits = virtual_interrupts::are_on(v) && virtual_interrupts::evaluate(v, memory);
        if memory.has_missed() {
            return Err(Executed::Outside);
        }
        if there { Ok(waits) } else { Err(Executed::NoPage) }
    }

    /// L2 was entered, and a virtual interrupt waits for it.
    #[cold]
    #[inline(never)]
    fn offer_virtual(n: &mut Nested) -> Executed {
        let v = n.machine.vmcs12();
        // The flags are those that L2 is entered with: they were composed from here.
        // STI's shadow is not asked: an L2 that sleeps has none (§27.3.1.5).
        let open = v.get(field::GUEST_RFLAGS) & x86::Rflags::IF.bits() != 0;
        match v.get(field::GUEST_ACTIVITY) {
            activity_state::ACTIVE => Executed::EnteredOffering,
            // It wakes.
            activity_state::HLT if open => {
                n.machine.vmcs12_mut().set(field::GUEST_ACTIVITY, activity_state::ACTIVE);
                Executed::EnteredOffering
            }
            // It goes on sleeping with the interrupt waiting: IF is clear, and what wakes it is another event.
            _ => match Self::put_to_sleep(n) {
                // What the entry injects wakes it, or a window.
                Executed::Entered => Executed::EnteredOffering,
                asleep => asleep,
            },
        }
    }

    /// L2 was entered with a priority below L1's threshold: its run ends behind what the entry injects, and before its
    /// first instruction.
    #[cold]
    #[inline(never)]
    fn fall<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        memory: &Memory<'_, M>,
    ) -> Executed {
        let v = n.machine.vmcs12();
        let information = v.get(field::ENTRY_INTERRUPTION);
        // The exit of the monitor trap flag that an entry may inject comes behind this one, hence not at all (§27.7.8).
        let traps = information & (event::VALID | event::TYPE) == event::VALID | OTHER;
        if traps {
            self.drop_injection();
        }
        // An event is delivered before the priority is looked at.
        if information & event::VALID != 0 && !traps {
            n.machine.fall_pending = true;
            // It does not sleep meanwhile.
            n.machine.vmcs12_mut().set(field::GUEST_ACTIVITY, activity_state::ACTIVE);
            return Executed::EnteredOwing;
        }
        if n.lists.wait() {
            // The entry's MSRs are loaded before, and L2 does not run at all.
            (n.machine.fall_pending, n.machine.run_pending) = (true, false);
            return Executed::EnteredOwing;
        }
        let mut report = Report::plain(ExitReason::TprBelowThreshold, 0);
        // L2 was in that state all the same: L1 is told of it, and enters it again by itself.
        report.activity = v.get(field::GUEST_ACTIVITY);
        self.leave_l2(n, gprs, &report, memory)
    }

    /// L2 was entered in another state than the active one: the vCPU waits for it in that.
    #[cold]
    #[inline(never)]
    fn put_to_sleep(n: &mut Nested) -> Executed {
        let sleeps = events::sleeps(n.machine.vmcs12());
        let Some(sleeps) = sleeps else {
            n.machine.vmcs12_mut().set(field::GUEST_ACTIVITY, activity_state::ACTIVE);
            return Executed::Entered;
        };
        // There is nothing that the entry has yet to do.
        // L0 sleeps without entering: no later failure of the hardware's is this entry's.
        n.machine.run_pending = false;
        Executed::Asleep(match sleeps {
            Sleeps::Halt => Sleep::Halt,
            Sleeps::WaitForSipi => Sleep::WaitForSipi,
        })
    }

    /// L2 runs from now on with a state that was restored.
    #[cold]
    pub(super) fn begin_l2<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        gprs: &mut Gprs,
        memory: &Memory<'_, M>,
    ) {
        // What cannot be read of L1's map exits until L1's next entry.
        self.map_msrs(n, memory);
        self.note_l0(n);
        // vmcs02 may be that of another state: nothing of it counts.
        n.machine.touch_all();
        // What L1 has asked of another L2 goes with that.
        self.cold.of_l1 = OfL1::default();
        self.change_to_l2(n, gprs, Groups::ALL);
    }

    /// vmcs02, composed from these groups, is the vCPU's from now on.
    #[inline(always)]
    fn change_to_l2(&mut self, n: &mut Nested, gprs: &mut Gprs, dirty: Groups) {
        // At each entry: L1 changes it without VMWRITE, and L2's follows from it.
        n.made.l0.efer = self.efer.bits();
        self.cold.words_of_l1 = (self.cr0, self.cr4, self.efer);
        n.exit_tsc.begin();
        if dirty.has(Group::Msrs) {
            // Without that control L2 begins with L1's DR7, which vmcs02 does not have.
            // A VMREAD that is spared for those who load the register: DR7 is L1's to change without an exit.
            if !n.machine.vmcs12().entry().contains(EntryControls::LOAD_DEBUG) {
                n.made.l0.dr7 = self.get(fields::GUEST_DR7);
            }
            n.made.l0.debugctl = self.get(fields::GUEST_DEBUGCTL);
            n.made.l0.pat = self.get(fields::GUEST_PAT);
        }
        // What is read of vmcs01 is read above, while it is loaded.
        self.exchange(n);
        // Whoever runs the loop finds L2's root anew before L2 is entered.
        // Known or 0, which is no pointer: without tables of L1's L2 runs on what L1 runs on.
        let of_l1 = n.other.fields.get(fields::EPT_POINTER).unwrap_or(0);
        self.set_ept_pointer(if n.machine.vmcs12().has_own_root() { n.made.root } else { of_l1 });
        // Behind the exchange: from here on what is set goes into vmcs02.
        self.compose(n, dirty);
        self.load_l2(n, gprs, dirty);
    }

    /// Last branches are not virtualized, nor is the step from branch to branch. What is left has been checked by what the
    /// vCPU has. The check of a pending step went by L1's field: with BTF another pends in a shadow than the hardware wants.
    #[cold]
    #[inline(never)]
    fn mask_debugctl(&mut self) {
        let debug = self.get(fields::GUEST_DEBUGCTL);
        self.set(fields::GUEST_DEBUGCTL, debug & msr::debugctl::RTM);
        self.match_pending_step();
    }

    fn compose(&mut self, n: &Nested, dirty: Groups) {
        let l0 = &n.made.l0;
        let v = n.machine.vmcs12();
        let mut block = Block { cpu: &self.cpu, vmcs: &self.vmcs };
        // Only with nested_dirty_tracking=0.
        if n.without_tracking {
            compose_blind(n, dirty, block);
        } else {
            merge::compose(l0, v, dirty, &mut block);
        }
        if dirty.has(Group::ControlRegisters) {
            // The CPU has no such bit in CR4, and would refuse the entry.
            // Behind the composition, which knows what L1 has asked for and not what this CPU has.
            if self.features.umip_by_exits {
                let cr4 = self.get(fields::GUEST_CR4);
                self.set(fields::GUEST_CR4, cr4 & !Cr4::UMIP.bits());
            }
            let cr0 = self.get(fields::GUEST_CR0);
            if cr0 & NOT_LOADED != 0 {
                self.set(fields::GUEST_CR0, cr0 & !NOT_LOADED);
            }
        }
        // Whence the field may have anything. Nearly always 0.
        if v.get(field::GUEST_DEBUGCTL) | l0.debugctl != 0 {
            self.mask_debugctl();
        }
        // A log of L2's own physical addresses would be of no use.
        if l0.secondary.contains(ProcControls2::PML) && !v.has_own_root() {
            // L2's addresses are L1's own.
            let word = self.get(fields::PROC_CONTROLS2);
            self.set(fields::PROC_CONTROLS2, word | ProcControls2::PML.bits());
        }
    }

    /// What of L2's state the vCPU keeps, and what an entry does beside loading it.
    fn load_l2(&mut self, n: &mut Nested, gprs: &mut Gprs, dirty: Groups) {
        let l0 = &n.made.l0;
        let v = n.machine.vmcs12();
        // Before `own` and all that changes controls: from here on they respect what L1 wants of L2.
        let of_l1 = &mut self.cold.of_l1;
        // What is not set here is 0: the end of the run before has seen to that.
        debug_assert!(*of_l1 == OfL1::default());
        of_l1.runs = true;
        of_l1.primary = v.primary().bits();
        of_l1.secondary = v.secondary().difference(merge::words::BY_L0).bits();
        of_l1.exceptions = v.get(field::EXCEPTION_BITMAP);
        of_l1.cr0 = Cr0::from_bits_retain(v.get(field::CR0_MASK));
        of_l1.cr4 = Cr4::from_bits_retain(v.get(field::CR4_MASK));
        // Before CR0 and CR4 are looked at: which bits are L2's own follows from the word above.
        self.own();
        let (cr0, new) = match n.made.kept_by_l0 {
            // As vmcs02 has them: they were not composed, and the VMCS12 has older ones.
            Some(kept) if n.machine.behind().has(Group::ControlRegisters) => kept,
            _ => (
                Cr0::from_bits_retain(v.get(field::GUEST_CR0)),
                Cr4::from_bits_retain(v.get(field::GUEST_CR4)),
            ),
        };
        self.cr0 = cr0;
        // The old ones are L1's: what differs is done by `after_level_change`.
        let cr4 = core::mem::replace(&mut self.cr4, new);
        if self.features.umip_by_exits && dirty.meets(WORDS) {
            self.watch_tables(new.contains(Cr4::UMIP));
        }
        // As composed; an L2 that goes on gets its own back behind that.
        let efer = core::mem::replace(&mut self.efer, Efer::from_bits_retain(merge::efer(l0, v)));
        gprs.0[RSP] = v.get(field::GUEST_RSP);
        // The field is in vmcs02; the bit has the exit take it out again.
        if v.get(field::ENTRY_INTERRUPTION) & event::VALID != 0 {
            self.attention |= attention::INJECT;
        }
        // L2 has one VPID of ours: what L1 gave another VPID must not be found under it.
        let flush = merge::flush(v, n.made.last_vpid, Transition::Entry);
        if flush != Flush::None {
            self.attention |= attention::FLUSH;
        }
        match flush {
            Flush::None => {}
            Flush::L2 => {
                n.made.last_vpid = v.get(field::VPID);
                n.seconds.give_up_vpid(n.made.last_vpid);
            }
            // Without a VPID of its own L2 leaves under the tag what no VPID of L1's may find.
            Flush::Both => n.made.last_vpid = 0,
        }
        // Without a VPID the CPU forgets what it made of L1's tables, and looks at their flags anew (SDM vol. 3C §29.4.3.1):
        // L1 may clear them without INVEPT. Only for a log, which is what misses such a page: each such entry compares.
        let relogs = (flush == Flush::Both && v.secondary().contains(ProcControls2::PML))
            .then(|| v.get(field::EPT_POINTER));
        let has_timer = v.pin().contains(PinControls::PREEMPTION_TIMER);
        if mitigations::flush_wanted() {
            // L1 is told (ARCH_CAPABILITIES) that it need not flush its own lines before its guests.
            self.attention |= attention::FLUSH_L1D;
        }
        let loads = v.entry().contains(EntryControls::LOAD_DEBUG);
        let dr7 = if loads { v.get(field::GUEST_DR7) } else { self.get(fields::GUEST_DR7) };
        if Dr7::new(dr7).has_breakpoints() {
            // They are to hit at L2's addresses, not at those of the host.
            self.own_debug_regs();
        }
        if has_timer {
            self.start_timer(n);
        }
        if let Some(pointer) = relogs {
            n.note_flush(Invalidation::Ept(pointer));
        }
        self.after_level_change(cr4, efer);
    }

    /// CR4 and EFER are those of the other level.
    #[inline]
    pub(super) fn after_level_change(&mut self, cr4: Cr4, efer: Efer) {
        // Both levels are most often in one mode, with one set of features: nothing is called then.
        let same = !(cr4 ^ self.cr4).contains(Cr4::OSXSAVE) && efer == self.efer;
        if !(same && self.has_debug_regs_as_wanted()) {
            self.follow_level_change(cr4, efer);
        }
    }

    #[cold]
    #[inline(never)]
    fn follow_level_change(&mut self, cr4: Cr4, efer: Efer) {
        // Only what differs is done.
        if (cr4 ^ self.cr4).contains(Cr4::OSXSAVE) {
            self.sync_extended();
        }
        if efer != self.efer {
            self.sync_syscall();
        }
        self.intercept_debug_regs();
    }

    /// The MSRs that an entry loads from a list, L2's state loaded.
    #[cold]
    #[inline(never)]
    fn load_msr_list<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        memory: &Memory<'_, M>,
    ) -> Result<(), EntryFailure> {
        // vmcs02 gets words that VMCS12 does not name.
        n.machine.touch_whole();
        // One that an earlier entry left is of that entry.
        n.lists.forget();
        n.lists.load(By::Entry);
        // The number is the qualification of the failure (§27.8).
        self.load_list(n, memory).map_err(EntryFailure::msr)
    }

    /// Loads MSRs of the list that is being loaded, up to the next of those that the vCPU has. The error is the number of one
    /// that cannot be loaded.
    #[cold]
    #[inline(never)]
    pub(super) fn load_list<M: L1Memory>(
        &mut self,
        n: &mut Nested,
        memory: &Memory<'_, M>,
    ) -> Result<(), u32> {
        let limits = self.nested_limits();
        // Entry by entry, as a CPU does: those before a bad one are loaded (SDM vol. 3C §27.4). L1 may rewrite the list
        // meanwhile: each entry is read once, and none is kept.
        while let Some(step) = n.lists.step(&n.machine, &limits, memory) {
            let step = step.map_err(|bad| bad.0)?;
            if !self.load_list_msr(step.msr, step.value).map_err(|()| step.number)? {
                n.lists.leave(step.msr, step.value);
                break;
            }
        }
        Ok(())
    }

    /// What lists have for the vCPU next.
    #[cold]
    #[inline(never)]
    pub(super) fn next_of_lists<M: L1Memory>(&mut self, n: &mut Nested, l1: &M) -> Option<ListMsr> {
        if let Some(next) = n.lists.take() {
            return Some(next);
        }
        match self.load_list(n, &Memory::new(l1)) {
            Ok(()) => n.lists.take(),
            Err(_) => Some(ListMsr { index: 0, act: ListAct::Fail }),
        }
    }

    /// Loads an MSR as an entry of a list says, for the level that runs. False: it is the vCPU's.
    fn load_list_msr(&mut self, index: u32, value: u64) -> Result<bool, ()> {
        // The VMM's filter holds for lists as it does for WRMSR.
        if self.denies_in_list(index, Direction::Write) {
            return Err(());
        }
        // By this CPU's width: a wider value would be refused by the hardware later.
        let canonical = self.features.canonical(value) == value;
        // What follows is written by L0 in L2's stead: each rule is that of WRMSR.
        let good = match index {
            msr::STAR | msr::SYSCALL_MASK => true,
            msr::LSTAR | msr::CSTAR | msr::KERNEL_GS_BASE => canonical,
            msr::SYSENTER_ESP | msr::SYSENTER_EIP => canonical,
            msr::SYSENTER_CS => value >> 32 == 0,
            // An MSR that L1's CPUID does not have fails the entry.
            msr::TSC_AUX => self.cold.limits.tsc_aux && value >> 32 == 0,
            msr::PAT => is_pat(value),
            // EFER, the TSC and the rest have rules beyond this backend: the vCPU writes them before it goes on.
            _ => return Ok(false),
        };
        if !good {
            return Err(());
        }
        // The width was asked above: no value is changed on its way.
        self.set_msr(index, value).map(|()| true).map_err(|_| ())
    }

    /// Whether the VMM's filter denies this access of an MSR that a list names.
    pub(super) fn denies_in_list(&self, index: u32, direction: Direction) -> bool {
        let found =
            LISTED.iter().zip(self.cold.listed_denied).find(|(listed, _)| **listed == index);
        found.is_some_and(|(_, denied)| denied.contains(direction.into()))
    }

    /// Makes vmcs02's map of MSRs: what L0 lets L1 have without an exit, if L1 lets L2 have it. Where L1's page is no
    /// memory, everything exits.
    #[inline(always)]
    pub(super) fn map_msrs<M: L1Memory>(&self, n: &mut Nested, memory: &Memory<'_, M>) {
        let v: &Vmcs12 = n.machine.vmcs12();
        // Without a map every MSR exits (SDM vol. 3C §26.1.3).
        if v.primary().contains(ProcControls::MSR_BITMAPS) {
            self.map_msrs_of_both(n, memory);
        } else {
            n.made.map.close(&n.other.msr_map);
        }
    }

    /// Reads L1's map of MSRs, if its VMCS names one, to be kept for entries that say that it is as it was.
    pub(super) fn keep_msrs<M: L1Memory>(n: &mut Nested, memory: &Memory<'_, M>) {
        let v: &Vmcs12 = n.machine.vmcs12();
        // One that is kept is L1's promise that it is the same: it is not read again.
        if n.msrs_kept.is_none() && v.primary().contains(ProcControls::MSR_BITMAPS) {
            n.msrs_kept = passed_by(Gpa(v.get(field::MSR_BITMAP)), memory).ok();
        }
    }

    /// What is kept of L1's map is L1's word alone: L0's own map counts at each entry.
    #[inline(never)]
    fn map_msrs_of_both<M: L1Memory>(&self, n: &mut Nested, memory: &Memory<'_, M>) {
        let page = Gpa(n.machine.vmcs12().get(field::MSR_BITMAP));
        // A filter of the VMM's may have changed it since.
        let of_l0 = &self.vmcs.msr_map;
        let of_l1 = match n.msrs_kept {
            Some(kept) => Ok(kept),
            // Most entries find the map as it was: ten words compared, none written.
            None => match memory.page(page) {
                Some(words) if n.made.map.is_of(|at| word_of(words, at), of_l0) => return,
                Some(words) => Ok(Passed::of(|at| word_of(words, at))),
                None => passed_by_copies(page, memory),
            },
        };
        match of_l1 {
            Ok(of_l1) => n.made.map.open(of_l1, of_l0, &n.other.msr_map),
            Err(_) => n.made.map.close(&n.other.msr_map),
        }
    }

    /// L0's map of MSRs has changed: until its next entry L2 has none without an exit.
    pub(crate) fn close_msrs_of_l2(&mut self) {
        // Else the next entry makes it from what is open then.
        if !self.cold.of_l1.runs {
            return;
        }
        for index in PASSED {
            // Everything exits, which is slower and right: the next entry opens what may be open.
            self.vmcs.msr_map.intercept(index, Directions::all());
        }
        if let Some(n) = &mut self.nested {
            n.made.map = Map::Unknown;
        }
    }
}

/// A TSC of that ratio and offset to the host's.
fn tsc_by(ratio: u64, offset: u64) -> time::Tsc {
    let multiplier = match ratio {
        // 32 fractional bits become 48.
        TSC_RATIO_ONE => time::ONE,
        ratio => ratio << (48 - 32),
    };
    time::Tsc { multiplier, offset }
}

/// A word of L1's map; ones beyond it.
#[inline(always)]
fn word_of(words: &[AtomicU64; 512], at: usize) -> u64 {
    words.get(at).map_or(u64::MAX, |word| word.load(Relaxed))
}

/// What L1's map of MSRs at `page` lets L2 have.
fn passed_by<M: L1Memory>(page: Gpa, memory: &Memory<'_, M>) -> Result<Passed, Outside> {
    match memory.page(page) {
        Some(words) => Ok(Passed::of(|at| word_of(words, at))),
        None => passed_by_copies(page, memory),
    }
}

#[cold]
#[inline(never)]
fn passed_by_copies<M: L1Memory>(page: Gpa, memory: &Memory<'_, M>) -> Result<Passed, Outside> {
    let missing = Cell::new(None);
    // By words of eight bytes: each is read once, and closed if it is not there.
    let passed = Passed::of(|at| {
        let word = memory.read_u64(Gpa(page.0.wrapping_add(at as u64 * 8)));
        word.unwrap_or_else(|outside| {
            missing.set(Some(outside));
            u64::MAX
        })
    });
    missing.get().map_or(Ok(passed), Err)
}

/// What not knowing what vmcs02 has would cost: all of it is written.
#[cold]
#[inline(never)]
fn compose_blind<C: Cpu>(n: &Nested, dirty: Groups, block: Block<'_, C>) {
    merge::compose(&n.made.l0, n.machine.vmcs12(), dirty, &mut Blind(block));
}
