//! A VMCS as an object: the page that the CPU keeps it in, what is known of its fields, and where it is
//! active.
//!
//! A vCPU has one. A vCPU whose guest is a hypervisor can have a second one for that guest's guest, so
//! nothing here may be true of the vCPU as a whole: its registers in the CPU, its limits and what it is
//! being told (interrupts, NMIs) stay outside. The words of [`cpu::VmxSwitch`] that belong to one VMCS,
//! HOST_RSP and LAUNCHED, are lent to the vCPU's between load and unload.
//!
//! A CPU may keep parts of a VMCS that was loaded there until it is told to write them back: VMCLEAR
//! on that CPU comes before VMPTRLD on another (SDM vol. 3C §25.11.1).

use core::cell::Cell;
use core::sync::atomic::Ordering::Relaxed;

use cpu::Cpu;
use host::{KBox, NoMemory, irq, page::Page, smp};
use x86::{
    Hpa,
    vmcs::{
        Field, ProcControls2, ReadWrite,
        field::{self, Width},
        invvpid,
    },
};

use crate::{
    features::Features,
    fields::{self, Fields, Set, Slot},
    percpu::{self, PerCpu},
    permission::MsrMap,
};

/// One VMCS with what the hypervisor knows of it.
#[derive(Debug)]
pub(crate) struct Vmcs {
    /// What is known of its fields, what has to be written yet, and where it is active.
    pub(crate) fields: KBox<Fields>,
    /// It is the one that VMREAD and VMWRITE reach, from load to unload: what is set is written at once.
    loaded: Cell<bool>,
    /// It was launched since it was cleared last.
    pub(crate) launched: Cell<bool>,
    /// Its preemption timer may hold less than the longest time, while another is the vCPU's: what
    /// `attention::TIMER` says of the vCPU's.
    pub(crate) timer_runs: Cell<bool>,
    /// HOST_RSP as this VMCS has it, while another is the vCPU's.
    pub(crate) host_rsp: Cell<u64>,
    /// The fields that never change are in it.
    initialised: Cell<bool>,
    /// There was no room to note it as active on its CPU.
    unnoted: Cell<bool>,
    /// What VMX keeps of the CPU on which it ran last.
    here: Option<&'static PerCpu>,
    page: Page,
    /// Which MSRs exit.
    pub(crate) msr_map: MsrMap,
}

/// Clears the VMCS at `vmcs` on the CPU this runs on, asked by the one that wants to have it.
extern "C" fn clear_here(vmcs: u64) {
    if let Some(here) = percpu::of(smp::cpu_id()) {
        here.clear(&cpu::Native, Hpa(vmcs));
    }
}

/// Out of line, and from a constant, so that it lies on no stack.
#[inline(never)]
fn empty_fields() -> Result<KBox<Fields>, NoMemory> {
    #[allow(clippy::declare_interior_mutable_const)] // A copy of it is what is wanted.
    const EMPTY: Fields = Fields::new();
    KBox::new(EMPTY)
}

impl Vmcs {
    /// A VMCS that is active nowhere and of which nothing is known, under which every MSR exits.
    pub(crate) fn new(revision: u32) -> Result<Self, NoMemory> {
        // From a page of zeroes: VMCLEAR makes the rest.
        let page = Page::zeroed()?;
        // The CPU recognises a VMCS by its first four bytes.
        if let Some(first) = page.table().first() {
            first.store(revision.into(), Relaxed);
        }
        Ok(Self {
            fields: empty_fields()?,
            loaded: Cell::new(false),
            launched: Cell::new(false),
            timer_runs: Cell::new(false),
            host_rsp: Cell::new(0),
            initialised: Cell::new(false),
            unnoted: Cell::new(false),
            here: None,
            page,
            // Closed: an MSR is opened by who knows that the guest may have it.
            msr_map: MsrMap::all()?,
        })
    }

    /// Reads a field: from the cache where it is known, else from the hardware.
    #[inline(always)]
    pub(crate) fn get<C: Cpu, W: Width, A>(&self, cpu: &C, slot: Slot<W, A>) -> W::Value {
        self.get_in(&self.fields, cpu, slot)
    }

    /// Reads two fields. What the first left in the cache need not be loaded again for the second, as it must
    /// be between two calls of [`get`](Self::get): there the cache may be another one.
    #[inline(always)]
    pub(crate) fn get_both<C: Cpu, V: Width, W: Width, A, B>(
        &self,
        cpu: &C,
        first: Slot<V, A>,
        second: Slot<W, B>,
    ) -> (V::Value, W::Value) {
        let fields = &*self.fields;
        (self.get_in(fields, cpu, first), self.get_in(fields, cpu, second))
    }

    #[inline(always)]
    fn get_in<C: Cpu, W: Width, A>(&self, fields: &Fields, cpu: &C, slot: Slot<W, A>) -> W::Value {
        match fields.get(slot) {
            Some(value) => value,
            None => {
                // Outside the loop a miss costs an IPI at worst; `know_for_outside` is there for that.
                let raw = if self.loaded.get() {
                    cpu.vmread(slot.encoding())
                } else {
                    self.read_outside(cpu, slot.encoding())
                };
                fields.learn(slot, raw);
                W::from_raw(raw)
            }
        }
    }

    /// Sets a field: in the hardware now, or when the VMCS is loaded.
    #[inline(always)]
    pub(crate) fn set<C: Cpu, W: Width>(&self, cpu: &C, slot: Slot<W, ReadWrite>, value: W::Value) {
        // Unchanged, nothing is written: for most fields a VMWRITE costs more than the comparison.
        if self.fields.set(slot, value) == Set::Changed {
            if self.loaded.get() {
                cpu.vmwrite(slot.encoding(), value.into());
            } else {
                self.fields.defer(slot);
            }
        }
    }

    /// As [`get`](Self::get), by a call.
    #[cold]
    #[inline(never)]
    pub(crate) fn get_rarely<C: Cpu, W: Width, A>(&self, cpu: &C, slot: Slot<W, A>) -> W::Value {
        self.get(cpu, slot)
    }

    /// As [`set`](Self::set), by a call: for what is done seldom the copies of its code are too many.
    #[cold]
    #[inline(never)]
    pub(crate) fn set_rarely<C: Cpu, W: Width>(
        &self,
        cpu: &C,
        slot: Slot<W, ReadWrite>,
        value: W::Value,
    ) {
        self.set(cpu, slot, value);
    }

    /// Sets a field, and writes it if it has that value already, too.
    pub(crate) fn set_again<C: Cpu, W: Width>(
        &self,
        cpu: &C,
        slot: Slot<W, ReadWrite>,
        value: W::Value,
    ) {
        let same = self.fields.set(slot, value) == Set::Unchanged;
        if self.loaded.get() {
            cpu.vmwrite(slot.encoding(), value.into());
        } else if !same {
            self.fields.defer(slot);
        }
    }

    /// Sets or clears secondary controls.
    #[cold]
    pub(crate) fn change_proc2<C: Cpu>(&self, cpu: &C, bits: ProcControls2, on: bool) {
        let old = self.get(cpu, fields::PROC_CONTROLS2);
        let new = if on { old | bits.bits() } else { old & !bits.bits() };
        self.set(cpu, fields::PROC_CONTROLS2, new);
    }

    /// Sets the EPT pointer. True: it is another than before, and what the CPU made of its tables at some other time
    /// may be old. Flushes reach the pointers that VMCSs hold, and this one was in none.
    #[inline(always)]
    #[must_use]
    pub(crate) fn set_ept_pointer<C: Cpu>(&self, cpu: &C, pointer: u64) -> bool {
        // By the cache: an EPT pointer is nobody's to change but ours.
        let changed = self.fields.set_tag(fields::EPT_POINTER, pointer) == Set::Changed;
        if changed {
            if self.loaded.get() {
                cpu.vmwrite(fields::EPT_POINTER.encoding(), pointer);
            } else {
                self.fields.defer(fields::EPT_POINTER);
            }
        }
        changed
    }

    /// Whether VMREAD and VMWRITE reach this VMCS.
    #[inline(always)]
    pub(crate) fn is_loaded(&self) -> bool {
        self.loaded.get()
    }

    /// The VMCS is current and stays so until [`Vmcs::unload`]: writes what was set meanwhile.
    #[inline]
    pub(crate) fn load<C: Cpu>(&self, cpu: &C) {
        // First: what is set while the list is written is written at once.
        self.loaded.set(true);
        if self.fields.has_unwritten() {
            self.fields.write_all(|encoding, value| cpu.vmwrite(encoding, value));
        }
    }

    /// From now on what is set is noted, and written when the VMCS is loaded again.
    #[inline]
    pub(crate) fn unload(&self) {
        self.loaded.set(false);
    }

    /// Clears the VMCS, which was unloaded, if its CPU has not noted that it is active there.
    #[inline]
    pub(crate) fn give_up_unnoted<C: Cpu>(&self, cpu: &C, here: &PerCpu) {
        // There is a place for 512 on each CPU: more are cleared each time.
        if self.unnoted.get() {
            here.clear(cpu, self.page.hpa());
            self.fields.cpus.active_on.set(None);
        }
    }

    /// Where the CPU keeps it.
    pub(crate) fn hpa(&self) -> Hpa {
        self.page.hpa()
    }

    /// Whether it is active, if at all, without being noted on its CPU.
    pub(crate) fn is_unnoted(&self) -> bool {
        self.unnoted.get()
    }

    /// Whether it is active on CPU `at`, which is `here`.
    pub(crate) fn is_active_on(&self, at: usize, here: &PerCpu) -> bool {
        // Both: the CPU, and the time since VMX was switched on there.
        self.fields.cpus.active_on.get() == Some(at)
            // VMX was switched off since: the CPU holds nothing of it.
            && self.fields.cpus.active_in.get() == here.generation()
    }

    /// What VMX keeps of the CPU on which this VMCS is to run or ran last.
    #[inline]
    pub(crate) fn here(&self) -> Option<&'static PerCpu> {
        self.here
    }

    /// What VMX keeps of CPU `at`, on which the VMCS is to run.
    #[inline]
    pub(crate) fn find(&self, at: usize) -> Option<&'static PerCpu> {
        // Nearly always the same: no look into the table of CPUs.
        if self.fields.cpus.last_cpu == at { self.here } else { percpu::of(at) }
    }

    /// Whether the host-state fields are those of CPU `at`, which is `here`. They may be others since VMX
    /// was switched on again.
    #[inline]
    pub(crate) fn has_host_of(&self, at: usize, here: &PerCpu) -> bool {
        self.fields.cpus.last_in == here.generation() && self.fields.cpus.last_cpu == at
    }

    /// The VMCS comes to CPU `at`, which is `here`: without a VPID.
    pub(crate) fn arrive(&mut self, at: usize, here: &'static PerCpu) {
        self.fields.cpus.last_cpu = at;
        self.fields.cpus.last_in = here.generation();
        self.here = Some(here);
        // 0 is no generation: it asks for a VPID before the next entry.
        self.fields.cpus.vpid_generation = 0;
    }

    /// The CPU on which it ran last.
    #[inline]
    pub(crate) fn last_cpu(&self) -> usize {
        self.fields.cpus.last_cpu
    }

    /// What lies under its VPID is given up: it gets another before it runs again.
    #[inline]
    pub(crate) fn drop_vpid(&mut self) {
        self.fields.cpus.vpid_generation = 0;
    }

    /// Whether the VMCS has a VPID of CPU `here` that is valid.
    #[inline]
    pub(crate) fn has_vpid_of(&self, here: &PerCpu) -> bool {
        self.fields.cpus.vpid_generation == here.vpid_generation()
    }

    /// Makes this guest's translations be forgotten: by their VPID, or by another VPID.
    #[inline(never)]
    pub(crate) fn forget_translations<C: Cpu>(&mut self, cpu: &C, features: &Features) {
        let Some(here) = self.here else { return };
        // A new one has nothing under it, and costs no INVVPID.
        if !self.has_vpid_of(here) {
            self.take_vpid(cpu, here, features);
        } else if features.invvpid_single {
            cpu.invvpid(invvpid::SINGLE, self.get(cpu, fields::VPID), 0);
        } else if features.vpid {
            // Without a single-context INVVPID all tags go, those of other guests too.
            cpu.invvpid(invvpid::ALL, 0, 0);
        }
    }

    fn take_vpid<C: Cpu>(&mut self, cpu: &C, here: &PerCpu, features: &Features) {
        self.fields.cpus.vpid_generation = here.vpid_generation();
        // All translations go at each entry and exit then.
        if !features.vpid {
            return;
        }
        let (vpid, generation, all) = here.new_vpid();
        self.fields.cpus.vpid_generation = generation;
        self.set(cpu, fields::VPID, vpid);
        // Once in 65535: whatever is under the old numbers goes.
        if all {
            cpu.invvpid(invvpid::ALL, 0, 0);
        }
    }

    /// Reads a field outside the loop, where the task may be anywhere by now.
    #[cold]
    #[inline(never)]
    pub(crate) fn read_outside<C: Cpu>(&self, cpu: &C, encoding: u32) -> u64 {
        // No CPU has made its contents: nothing was written but what the cache knows.
        // A VMCS that no CPU has seen has no field that could be read.
        if !self.initialised.get() {
            return 0;
        }
        // Ends: once the CPU that has it has cleared it, this one may take it, unless the thread moves again.
        loop {
            // A caller inside the loop's ends has them off already, and is on the right CPU.
            let off = irq::enabled().then(irq::disable);
            let here = percpu::of(smp::cpu_id()).filter(|_| self.may_run_on(smp::cpu_id()));
            if let Some(here) = here {
                // With VMX off, on the way to a reboot, nothing can be read.
                let on = here.is_on(cpu);
                if on {
                    // Another VMCS was: it is loaded anew before its next entry, by `make_current`.
                    let _ = self.make_current(cpu, here);
                }
                let value = if on { cpu.vmread(encoding) } else { 0 };
                if on && off.is_some() {
                    // No end of the loop comes for it: without a note it would be active here for good.
                    self.give_up_unnoted(cpu, here);
                }
                return value;
            }
            // Interrupts are off by somebody else: the other CPU must not be waited for.
            let Some(off) = off else { return 0 };
            irq::enable(off);
            // An IPI, and a wait: never with interrupts off.
            self.clear_elsewhere();
        }
    }

    /// Whether the VMCS is active on CPU `here` or on none. Interrupts are off.
    #[inline]
    pub(crate) fn may_run_on(&self, here: usize) -> bool {
        self.fields.cpus.active_on.get().is_none_or(|at| at == here)
    }

    /// Has the CPU on which the VMCS is active clear it. Interrupts are on.
    #[cold]
    #[inline(never)]
    pub(crate) fn clear_elsewhere(&self) {
        // Taken before: a VMCS that is cleared is active nowhere, and launched no more.
        if let Some(at) = self.fields.cpus.active_on.take() {
            // One that went offline has cleared it then.
            smp::run_on(at, clear_here, self.page.hpa().0);
        }
    }

    /// Makes the VMCS current on this CPU, on which it is active or may be. True: it is so for the first
    /// time, and the fields that never change have to be written.
    #[inline]
    #[must_use]
    pub(crate) fn make_current<C: Cpu>(&self, cpu: &C, here: &PerCpu) -> bool {
        // The address alone does not tell: VMX may have been off since.
        if !here.is_current(self.page.hpa())
            || self.fields.cpus.active_in.get() != here.generation()
        {
            return self.switch_to(cpu, here);
        }
        false
    }

    #[inline(never)]
    fn switch_to<C: Cpu>(&self, cpu: &C, here: &PerCpu) -> bool {
        // A word that is at hand, in place of a call of the kernel's.
        let at = here.number();
        debug_assert_eq!(at, smp::cpu_id());
        let vmcs = self.page.hpa();
        if self.fields.cpus.active_on.get() != Some(at)
            || self.fields.cpus.active_in.get() != here.generation()
        {
            // Once in its life: VMCLEAR of one that was written would throw away what it holds.
            if !self.initialised.get() {
                // What the page holds besides the revision is for the CPU to make.
                cpu.vmclear(vmcs);
            }
            // A VMCS that was cleared is entered by VMLAUNCH.
            self.launched.set(false);
            // Before VMPTRLD: a crash clears what is noted, and what is active without a note would be written back
            // later.
            self.unnoted.set(!here.note_active(vmcs));
            self.fields.cpus.active_on.set(Some(at));
            self.fields.cpus.active_in.set(here.generation());
        }
        // Also where it was active here: another was current meanwhile.
        cpu.vmptrld(vmcs);
        here.set_current(vmcs);
        !self.initialised.replace(true)
    }

    /// Writes the fields that have one value as long as the VMCS lives, whosever guest it runs.
    pub(crate) fn write_constants<C: Cpu>(&self, cpu: &C) {
        // L0's own guests have no shadow VMCS of their own; vmcs01 gets one later, by the cache.
        write(cpu, field::VMCS_LINK, u64::MAX);
        write(cpu, field::MSR_BITMAP, self.msr_map.hpa().0);
        // Under EPT no load of CR3 exits; without, each of them has to be seen.
        write(cpu, field::CR3_TARGET_COUNT, 0);
        // No lists: an MSR is exchanged where the two values differ, and a list would write it at each entry and exit.
        write(cpu, field::EXIT_MSR_STORE_COUNT, 0);
        write(cpu, field::EXIT_MSR_LOAD_COUNT, 0);
        write(cpu, field::ENTRY_MSR_LOAD_COUNT, 0);
        // Written once, though it may change later: before the first entry the page has anything there.
        write(cpu, field::GUEST_ACTIVITY, 0);
        write(cpu, field::HOST_RIP, cpu.vmx_exit_address());
        // The kernel runs with null selectors; what user space has is loaded when the loop is left.
        write(cpu, field::HOST_DS_SELECTOR, 0);
        write(cpu, field::HOST_ES_SELECTOR, 0);
        write(cpu, field::HOST_FS_SELECTOR, 0);
        write(cpu, field::HOST_GS_SELECTOR, 0);
    }
}

/// Writes a field that is not in the cache.
pub(crate) fn write<C: Cpu, W: Width>(cpu: &C, field: Field<W, ReadWrite>, value: W::Value) {
    cpu.vmwrite(field.encoding(), value.into());
}
