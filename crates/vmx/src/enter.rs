//! One virtual CPU under VMX: its VMCS, the loop's two ends, and the world switch between them.
//!
//! The whole loop runs with interrupts off: with external-interrupt exiting a pending one ends the
//! guest's run, stays pending, and is taken by the host after the loop. A VM exit loads the host's
//! segment registers, so kernel calls are possible inside the loop as they are. What VM entry and
//! exit leave alone, CR2, KERNEL_GS_BASE, the SYSCALL MSRs, XCR0 and the like, stays the guest's
//! until the loop is left.
//!
//! Outside the loop the VMCS need not be current. What is set is noted and written at the next
//! entry; what is asked for and not known is read with interrupts off, after a VMPTRLD if need be.
//!
//! SDM vol. 3C chapters 25 to 28.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use backend::{Gprs, GuestLimits, Paging, RSP};
use cpu::{Cpu, Selectors, VmxSwitch};
use host::{KBox, NoMemory, hostcpu, irq, page::Page, smp};
use x86::{
    Hpa, msr,
    vmcs::{
        ENTRY_FAILURE, Field, ReadWrite, event,
        field::{self, Width},
        invept, invvpid,
    },
};

use crate::{
    exits,
    features::Features,
    fields::{self, Fields, Set, Slot},
    inject::Offer,
    mitigations,
    page_log::PageLog,
    percpu::{self, PerCpu},
    permission::MsrMap,
};

const CR4_VMXE: u64 = 1 << 13;
/// DR7's enable bits.
const DR7_ENABLES: u64 = 0xff;
/// What DR6 holds when nothing happened.
const DR6_QUIET: u64 = 0xffff_0ff0;

/// TSC ratio 1.0 (32.32 fixed point).
pub const RATIO_ONE: u64 = 1 << 32;

/// What the next entry has to do beside entering, as bits: usually nothing.
pub(crate) mod attention {
    /// Forget the translations of this guest's linear addresses.
    pub const FLUSH: u8 = 1 << 0;
    /// Forget everything that was made from its nested tables.
    pub const FLUSH_NESTED: u8 = 1 << 4;
    /// An interrupt is offered.
    pub const OFFER: u8 = 1 << 1;
    /// An event is injected: the exit takes it out of the VMCS.
    pub const INJECT: u8 = 1 << 2;
    /// VMX is off on this CPU: do not enter.
    pub const OFF: u8 = 1 << 3;
    /// Flush the L1 data cache.
    pub const FLUSH_L1D: u8 = 1 << 5;
}

/// The SYSCALL MSRs that the guest has live in long mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SyscallMsrs {
    pub star: u64,
    pub lstar: u64,
    pub mask: u64,
}

/// What of the host's state belongs to the thread that runs the vCPU, as it was when the run began.
#[derive(Clone, Copy, Debug, Default)]
struct HostThread {
    fs_base: u64,
    user_gs_base: u64,
    selectors: Selectors,
    ds: u16,
    es: u16,
}

/// One virtual CPU under VMX.
#[derive(Debug)]
pub struct Vmx<C: Cpu> {
    pub(crate) cpu: C,
    pub(crate) fields: KBox<Fields>,
    /// Between load and unload: the VMCS is current, and what is written goes to the hardware.
    pub(crate) loaded: Cell<bool>,
    /// [`attention`].
    pub(crate) attention: u8,
    /// An instruction was retired in software since the exit: what the VMCS says of the shadow of
    /// STI and MOV SS is over.
    pub(crate) shadow_over: Cell<bool>,
    /// The VM-instruction error of an entry that failed without an exit.
    pub(crate) refused: u32,
    pub(crate) switch: VmxSwitch,
    pub(crate) offer: Offer,
    pub(crate) features: Features,
    vmcs: Page,
    pub(crate) apic_page: Page,
    pub(crate) msr_map: MsrMap,
    /// Where the CPU has one.
    pub(crate) page_log: Option<PageLog>,
    /// The fields that never change are in the VMCS.
    initialised: Cell<bool>,
    /// The CPU on which the VMCS is active, and the generation of that CPU's VMX operation.
    active_on: Cell<Option<usize>>,
    active_in: Cell<u64>,
    /// There was no room to note it as active there.
    unnoted: Cell<bool>,
    here: Option<&'static PerCpu>,
    last_cpu: usize,
    vpid_generation: u64,
    id: u64,
    pub(crate) cr2: u64,
    pub(crate) cr0: u64,
    pub(crate) cr4: u64,
    pub(crate) efer: u64,
    pub(crate) syscall: SyscallMsrs,
    pub(crate) cstar: u64,
    pub(crate) kernel_gs_base: u64,
    pub(crate) limits: GuestLimits,
    pub(crate) paging: Paging,
    pub(crate) xcr0: u64,
    pub(crate) xss: u64,
    pub(crate) pkru: u32,
    pub(crate) tsc_aux: u64,
    pub(crate) spec_ctrl: u64,
    pub(crate) tsc_offset: u64,
    pub(crate) tsc_ratio: u64,
    pub(crate) dr: [u64; 4],
    pub(crate) dr6: u64,
    pub(crate) dr_owned: bool,
    host: HostThread,
    host_xcr0: u64,
    host_xss: u64,
    host_pkru: u32,
    host_debugctl: u64,
    host_syscall: SyscallMsrs,
    /// What the hardware holds while loaded.
    live_syscall: SyscallMsrs,
    live_gs_base: u64,
    live_xcr0: u64,
    live_xss: u64,
    live_tsc_aux: u64,
    host_tsc_aux: u64,
}

static IDS: AtomicU64 = AtomicU64::new(1);

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

impl<C: Cpu> Vmx<C> {
    /// A vCPU in its power-up state.
    #[inline(never)]
    pub fn new(cpu: C, features: Features) -> Result<Self, NoMemory> {
        let vmcs = Page::zeroed()?;
        // The CPU recognises a VMCS by its first four bytes.
        if let Some(first) = vmcs.table().first() {
            first.store(features.revision.into(), Relaxed);
        }
        let mut this = Self {
            cpu,
            fields: empty_fields()?,
            loaded: Cell::new(false),
            attention: attention::FLUSH | attention::FLUSH_NESTED,
            shadow_over: Cell::new(false),
            refused: 0,
            switch: VmxSwitch::default(),
            offer: Offer::default(),
            features,
            vmcs,
            apic_page: Page::zeroed()?,
            msr_map: MsrMap::all()?,
            page_log: if features.pml { Some(PageLog::new()?) } else { None },
            initialised: Cell::new(false),
            active_on: Cell::new(None),
            active_in: Cell::new(0),
            unnoted: Cell::new(false),
            here: None,
            last_cpu: usize::MAX,
            vpid_generation: 0,
            id: IDS.fetch_add(1, Relaxed),
            cr2: 0,
            cr0: 0,
            cr4: 0,
            efer: 0,
            syscall: SyscallMsrs::default(),
            cstar: 0,
            kernel_gs_base: 0,
            limits: GuestLimits::default(),
            paging: Paging::default(),
            xcr0: 1,
            xss: 0,
            pkru: 0,
            tsc_aux: 0,
            spec_ctrl: 0,
            tsc_offset: 0,
            tsc_ratio: RATIO_ONE,
            dr: [0; 4],
            dr6: DR6_QUIET,
            dr_owned: false,
            host: HostThread::default(),
            host_xcr0: 0,
            host_xss: hostcpu::host_xss(),
            host_pkru: 0,
            host_debugctl: 0,
            host_syscall: SyscallMsrs::default(),
            live_syscall: SyscallMsrs::default(),
            live_gs_base: 0,
            live_xcr0: 0,
            live_xss: 0,
            live_tsc_aux: 0,
            host_tsc_aux: 0,
        };
        this.init_control();
        Ok(this)
    }

    /// The privileged operations, for the counts in tests.
    pub fn cpu(&mut self) -> &mut C {
        &mut self.cpu
    }

    /// A field.
    #[inline(always)]
    pub(crate) fn get<W: Width, A>(&self, slot: Slot<W, A>) -> W::Value {
        match self.fields.get(slot) {
            Some(value) => value,
            None => {
                let raw = if self.loaded.get() {
                    self.cpu.vmread(slot.encoding())
                } else {
                    self.read_outside(slot.encoding())
                };
                self.fields.learn(slot, raw);
                W::from_raw(raw)
            }
        }
    }

    /// Sets a field.
    #[inline(always)]
    pub(crate) fn set<W: Width>(&self, slot: Slot<W, ReadWrite>, value: W::Value) {
        if self.fields.set(slot, value) == Set::Changed {
            if self.loaded.get() {
                self.cpu.vmwrite(slot.encoding(), value.into());
            } else {
                self.fields.defer(slot);
            }
        }
    }

    /// Reads a field outside the loop, where the task may be anywhere by now.
    #[cold]
    #[inline(never)]
    fn read_outside(&self, encoding: u32) -> u64 {
        if !self.initialised.get() {
            return 0;
        }
        let preemptible = irq::enabled();
        loop {
            if preemptible {
                irq::disable();
            }
            let here = percpu::of(smp::cpu_id()).filter(|_| self.is_settled());
            if let Some(here) = here {
                // With VMX off, on the way to a reboot, nothing can be read.
                let on = self.cpu.cr4_now() & CR4_VMXE != 0;
                if on {
                    self.make_current(here);
                }
                let value = if on { self.cpu.vmread(encoding) } else { 0 };
                if preemptible {
                    irq::enable();
                }
                return value;
            }
            if !preemptible {
                return 0;
            }
            irq::enable();
            self.clear_elsewhere();
        }
    }

    /// Whether the VMCS is active on this CPU or on none. Interrupts are off.
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        self.active_on.get().is_none_or(|at| at == smp::cpu_id())
    }

    /// Has the CPU on which the VMCS is active clear it. Interrupts are on.
    #[cold]
    pub(crate) fn clear_elsewhere(&self) {
        if let Some(at) = self.active_on.take() {
            // One that went offline has cleared it then.
            smp::run_on(at, clear_here, self.vmcs.hpa().0);
        }
    }

    /// Makes the VMCS current on this CPU, on which it is active or may be.
    #[inline]
    fn make_current(&self, here: &PerCpu) {
        if !here.is_current(self.vmcs.hpa()) || self.active_in.get() != here.generation() {
            self.switch_vmcs(here);
        }
    }

    #[inline(never)]
    fn switch_vmcs(&self, here: &PerCpu) {
        let at = smp::cpu_id();
        let vmcs = self.vmcs.hpa();
        if self.active_on.get() != Some(at) || self.active_in.get() != here.generation() {
            if !self.initialised.get() {
                // What the page holds besides the revision is for the CPU to make.
                self.cpu.vmclear(vmcs);
            }
            self.unnoted.set(!here.note_active(vmcs));
            self.active_on.set(Some(at));
            self.active_in.set(here.generation());
        }
        self.cpu.vmptrld(vmcs);
        here.set_current(vmcs);
        if !self.initialised.replace(true) {
            self.write_constants();
        }
    }

    fn write<W: Width>(&self, field: Field<W, ReadWrite>, value: W::Value) {
        self.cpu.vmwrite(field.encoding(), value.into());
    }

    /// The fields that have one value as long as the VMCS lives.
    fn write_constants(&self) {
        self.write(field::VMCS_LINK, u64::MAX);
        self.write(field::MSR_BITMAP, self.msr_map.hpa().0);
        self.write(field::VIRTUAL_APIC_ADDR, self.apic_page.hpa().0);
        self.write(field::PAGE_FAULT_MASK, 0);
        self.write(field::PAGE_FAULT_MATCH, 0);
        self.write(field::CR3_TARGET_COUNT, 0);
        self.write(field::EXIT_MSR_STORE_COUNT, 0);
        self.write(field::EXIT_MSR_LOAD_COUNT, 0);
        self.write(field::ENTRY_MSR_LOAD_COUNT, 0);
        self.write(field::GUEST_ACTIVITY, 0);
        self.write(field::HOST_RIP, self.cpu.vmx_exit_address());
        // The kernel runs with null selectors; what user space has is loaded when the loop is left.
        self.write(field::HOST_DS_SELECTOR, 0);
        self.write(field::HOST_ES_SELECTOR, 0);
        self.write(field::HOST_FS_SELECTOR, 0);
        self.write(field::HOST_GS_SELECTOR, 0);
        self.write_optional_constants();
    }

    /// A new KVM_RUN begins on this thread.
    pub(crate) fn new_run(&mut self) {
        let (ds, es) = self.cpu.data_selectors();
        self.host = HostThread {
            fs_base: self.cpu.rdmsr(msr::FS_BASE),
            user_gs_base: self.cpu.rdmsr(msr::KERNEL_GS_BASE),
            selectors: self.cpu.selectors(),
            ds,
            es,
        };
    }

    /// The vCPU runs on a CPU where it did not run last.
    #[cold]
    #[inline(never)]
    fn arrive(&mut self, at: usize, here: &'static PerCpu) {
        self.last_cpu = at;
        self.here = Some(here);
        self.vpid_generation = 0;
        // What this vCPU left behind here may be older than a flush since.
        self.attention |= attention::FLUSH | attention::FLUSH_NESTED;
        let host = here.constants();
        self.set(fields::HOST_CR0, self.cpu.cr0());
        self.set(fields::HOST_CS_SELECTOR, host.tables.cs);
        self.set(fields::HOST_SS_SELECTOR, host.tables.ss);
        self.set(fields::HOST_TR_SELECTOR, host.tables.tr);
        self.set(fields::HOST_TR_BASE, host.tables.task);
        self.set(fields::HOST_GDTR_BASE, host.tables.gdt);
        self.set(fields::HOST_IDTR_BASE, host.tables.idt);
        let gs_base = self.cpu.rdmsr(msr::GS_BASE);
        self.set(fields::HOST_GS_BASE, gs_base);
        self.set(fields::HOST_SYSENTER_CS, host.sysenter_cs as u32);
        self.set(fields::HOST_SYSENTER_ESP, host.sysenter_esp);
        self.set(fields::HOST_SYSENTER_EIP, host.sysenter_eip);
        self.set(fields::HOST_PAT, host.pat);
        self.set(fields::HOST_EFER, host.efer);
        self.host_syscall =
            SyscallMsrs { star: host.star, lstar: host.lstar, mask: host.syscall_mask };
        self.host_tsc_aux = host.tsc_aux;
    }

    /// Takes what the loop needs of this physical CPU and loads the guest's state.
    pub(crate) fn load_state(&mut self) {
        let at = smp::cpu_id();
        let here = if self.last_cpu == at { self.here } else { percpu::of(at) };
        let cr4 = self.cpu.cr4_now();
        let Some(here) = here.filter(|_| cr4 & CR4_VMXE != 0) else {
            self.attention |= attention::OFF;
            return;
        };
        if self.active_in.get() != here.generation() {
            // The host's constants may be others since VMX was switched on again.
            self.last_cpu = usize::MAX;
        }
        if self.last_cpu != at {
            self.arrive(at, here);
        }
        if self.vpid_generation != here.vpid_generation() {
            self.attention |= attention::FLUSH;
        }
        if self.active_on.get() != Some(at) || self.active_in.get() != here.generation() {
            self.switch.flags &= !VmxSwitch::LAUNCHED;
        }
        self.make_current(here);
        // A process that has an LDT may change it under this thread.
        if hostcpu::uses_ldt() {
            self.host.selectors = self.cpu.selectors();
        }
        self.set(fields::HOST_CR4, cr4);
        self.set(fields::HOST_CR3, self.cpu.cr3());
        self.set(fields::HOST_FS_BASE, self.host.fs_base);
        self.loaded.set(true);
        if self.fields.has_unwritten() {
            self.fields.write_all(|encoding, value| self.cpu.vmwrite(encoding, value));
        }
        if here.last_vcpu.load(Relaxed) != self.id {
            here.last_vcpu.store(self.id, Relaxed);
            if hostcpu::ibpb_on_switch() {
                self.cpu.wrmsr(msr::PRED_CMD, 1);
            }
        }
        if self.features.xsave {
            self.load_extended();
        }
        if self.dr_owned {
            self.load_debug_regs();
        }
        self.live_tsc_aux = self.host_tsc_aux;
        self.sync_tsc_aux();
        self.live_syscall = self.host_syscall;
        self.sync_syscall();
        self.live_gs_base = self.host.user_gs_base;
        self.sync_kernel_gs_base();
        self.host_debugctl = self.cpu.rdmsr(msr::DEBUGCTL);
        if self.features.spec_ctrl {
            self.switch.guest_spec_ctrl = self.spec_ctrl;
            self.switch.host_spec_ctrl = hostcpu::host_spec_ctrl();
        }
        self.cpu.set_cr2(self.cr2);
        if mitigations::flush_wanted() {
            self.attention |= attention::FLUSH_L1D;
        }
    }

    /// The reverse of [`Vmx::load_state`].
    pub(crate) fn unload_state(&mut self) {
        if self.attention & attention::OFF != 0 {
            self.attention &= !attention::OFF;
            return;
        }
        self.cr2 = self.cpu.cr2();
        self.kernel_gs_base = self.cpu.rdmsr(msr::KERNEL_GS_BASE);
        if self.kernel_gs_base != self.host.user_gs_base {
            self.cpu.wrmsr(msr::KERNEL_GS_BASE, self.host.user_gs_base);
        }
        self.load_syscall(self.host_syscall);
        if self.live_tsc_aux != self.host_tsc_aux {
            self.cpu.wrmsr(msr::TSC_AUX, self.host_tsc_aux);
        }
        if self.features.xsave {
            self.unload_extended();
        }
        if self.dr_owned {
            self.save_debug_regs();
        }
        self.loaded.set(false);
        // An exit leaves DR7 and DEBUGCTL disabled; a host that uses them gets them back.
        hostcpu::restore_debug_regs();
        if self.host_debugctl != 0 {
            self.cpu.wrmsr(msr::DEBUGCTL, self.host_debugctl);
        }
        hostcpu::restore_table_limits();
        self.restore_selectors();
        if self.unnoted.get()
            && let Some(here) = self.here
        {
            here.clear(&self.cpu, self.vmcs.hpa());
            self.active_on.set(None);
        }
    }

    /// User space's selectors, where it has any: a VM exit loads null ones, and clears LDTR.
    #[inline]
    fn restore_selectors(&mut self) {
        let HostThread { fs_base, user_gs_base, selectors: s, ds, es } = self.host;
        if s.fs | s.gs | s.ldt | ds | es != 0 {
            self.load_host_selectors(fs_base, user_gs_base, ds, es);
        }
    }

    /// KERNEL_GS_BASE is user space's already, so that an NMI between the two SWAPGS around the load
    /// of GS finds nothing of the guest's.
    #[cold]
    fn load_host_selectors(&mut self, fs_base: u64, user_gs_base: u64, ds: u16, es: u16) {
        self.cpu.load_selectors(self.host.selectors);
        self.cpu.load_data_selectors(ds, es);
        self.cpu.wrmsr(msr::FS_BASE, fs_base);
        self.cpu.wrmsr(msr::KERNEL_GS_BASE, user_gs_base);
    }

    /// Makes this guest's translations be forgotten: by their VPID, or by another VPID.
    #[inline(never)]
    fn forget_translations(&mut self) {
        let Some(here) = self.here else { return };
        if self.vpid_generation != here.vpid_generation() {
            self.take_vpid(here);
        } else if self.features.invvpid_single {
            self.cpu.invvpid(invvpid::SINGLE, self.get(fields::VPID), 0);
        } else if self.features.vpid {
            self.cpu.invvpid(invvpid::ALL, 0, 0);
        }
    }

    /// Makes what was made from its nested tables be forgotten, whatever the VPID.
    #[inline(never)]
    fn forget_nested(&mut self) {
        if self.features.invept_single {
            self.cpu.invept(invept::SINGLE, self.get(fields::EPT_POINTER));
        } else {
            self.cpu.invept(invept::ALL, 0);
        }
    }

    fn take_vpid(&mut self, here: &PerCpu) {
        self.vpid_generation = here.vpid_generation();
        if !self.features.vpid {
            return;
        }
        let (vpid, generation, all) = here.new_vpid();
        self.vpid_generation = generation;
        self.set(fields::VPID, vpid);
        if all {
            self.cpu.invvpid(invvpid::ALL, 0, 0);
        }
    }

    /// Gives the guest DR0 to DR3 and DR6 of the hardware.
    #[cold]
    fn load_debug_regs(&mut self) {
        // The host's breakpoints must not hit at the guest's addresses until the entry loads DR7.
        self.cpu.set_debug_reg(7, 0);
        for (n, value) in self.dr.into_iter().enumerate() {
            self.cpu.set_debug_reg(n as u8, value);
        }
        self.cpu.set_debug_reg(6, self.dr6);
    }

    /// Takes them back. The guest keeps them, to be loaded with the next run, while a breakpoint
    /// of its is enabled.
    #[cold]
    fn save_debug_regs(&mut self) {
        for n in 0..4u8 {
            let value = self.cpu.debug_reg(n);
            if let Some(slot) = self.dr.get_mut(usize::from(n)) {
                *slot = value;
            }
        }
        self.dr6 = self.cpu.debug_reg(6);
        self.cpu.set_debug_reg(6, DR6_QUIET);
        self.dr_owned = self.get(fields::GUEST_DR7) & DR7_ENABLES != 0;
        self.intercept_debug_regs(!self.dr_owned);
    }

    /// The guest uses its debug registers: they are its own from now on.
    pub(crate) fn give_debug_regs(&mut self) {
        if self.dr_owned {
            return;
        }
        self.dr_owned = true;
        self.intercept_debug_regs(false);
        if self.loaded.get() {
            self.load_debug_regs();
        }
    }

    /// DR6 as the guest sees it.
    pub(crate) fn dr6_now(&self) -> u64 {
        self.dr6
    }

    /// Sets it, in the hardware too where the guest owns it.
    pub(crate) fn set_dr6(&mut self, value: u64) {
        self.dr6 = value;
        if self.loaded.get() && self.dr_owned {
            self.cpu.set_debug_reg(6, value);
        }
    }

    /// Whether the guest can see XCR0: only with CR4.OSXSAVE, whose writes exit.
    fn sees_xcr0(&self) -> bool {
        self.limits.xsave && self.cr4 & (1 << 18) != 0
    }

    #[inline]
    fn load_extended(&mut self) {
        if self.host_xcr0 == 0 {
            self.host_xcr0 = self.cpu.xcr0();
        }
        self.live_xcr0 = self.host_xcr0;
        self.live_xss = self.host_xss;
        self.sync_extended();
        if self.features.pku {
            self.host_pkru = self.cpu.pkru();
            if self.pkru != self.host_pkru {
                self.cpu.set_pkru(self.pkru);
            }
        }
    }

    /// Brings XCR0 and IA32_XSS to what the guest is to see, when the loop is entered and when one
    /// of them changes inside it.
    pub(crate) fn sync_extended(&mut self) {
        if self.live_xcr0 == 0 {
            return;
        }
        let xcr0 = if self.sees_xcr0() { self.xcr0 } else { self.host_xcr0 };
        if xcr0 != self.live_xcr0 {
            self.live_xcr0 = xcr0;
            self.cpu.set_xcr0(xcr0);
        }
        if self.features.xsaves && self.xss != self.live_xss {
            self.live_xss = self.xss;
            self.cpu.wrmsr(msr::XSS, self.xss);
        }
    }

    #[inline]
    fn unload_extended(&mut self) {
        if self.live_xcr0 != self.host_xcr0 {
            self.cpu.set_xcr0(self.host_xcr0);
        }
        self.live_xcr0 = 0;
        if self.live_xss != self.host_xss {
            self.cpu.wrmsr(msr::XSS, self.host_xss);
        }
        if self.features.pku {
            self.pkru = self.cpu.pkru();
            if self.pkru != self.host_pkru {
                self.cpu.set_pkru(self.host_pkru);
            }
        }
    }

    /// Brings TSC_AUX to the guest's value.
    #[inline]
    pub(crate) fn sync_tsc_aux(&mut self) {
        if self.loaded.get() && self.features.rdtscp && self.tsc_aux != self.live_tsc_aux {
            self.live_tsc_aux = self.tsc_aux;
            self.cpu.wrmsr(msr::TSC_AUX, self.tsc_aux);
        }
    }

    /// Loads the guest's SYSCALL MSRs where it can use them. Until then the host's stay, and the
    /// guest does not see them, for reads exit.
    #[inline]
    pub(crate) fn sync_syscall(&mut self) {
        const SCE_LMA: u64 = 1 | 1 << 10;
        if self.loaded.get() && self.efer & SCE_LMA == SCE_LMA {
            self.load_syscall(self.syscall);
        }
    }

    #[inline]
    fn load_syscall(&mut self, want: SyscallMsrs) {
        let live = core::mem::replace(&mut self.live_syscall, want);
        if live.star != want.star {
            self.cpu.wrmsr(msr::STAR, want.star);
        }
        if live.lstar != want.lstar {
            self.cpu.wrmsr(msr::LSTAR, want.lstar);
        }
        if live.mask != want.mask {
            self.cpu.wrmsr(msr::SYSCALL_MASK, want.mask);
        }
    }

    /// Brings KERNEL_GS_BASE to the guest's value.
    #[inline]
    pub(crate) fn sync_kernel_gs_base(&mut self) {
        if self.loaded.get() && self.kernel_gs_base != self.live_gs_base {
            self.live_gs_base = self.kernel_gs_base;
            self.cpu.wrmsr(msr::KERNEL_GS_BASE, self.kernel_gs_base);
        }
    }

    /// KERNEL_GS_BASE, which SWAPGS changes while the guest runs.
    pub(crate) fn kernel_gs_base_now(&mut self) -> u64 {
        if self.loaded.get() {
            self.kernel_gs_base = self.cpu.rdmsr(msr::KERNEL_GS_BASE);
            self.live_gs_base = self.kernel_gs_base;
        }
        self.kernel_gs_base
    }

    /// What an entry does that is more than usual. False: it does not take place.
    #[cold]
    #[inline(never)]
    fn attend(&mut self) -> bool {
        if self.attention & attention::OFF != 0 {
            return false;
        }
        if self.attention & attention::FLUSH != 0 {
            self.attention &= !attention::FLUSH;
            self.forget_translations();
        }
        if self.attention & attention::FLUSH_NESTED != 0 {
            self.attention &= !attention::FLUSH_NESTED;
            self.forget_nested();
        }
        if self.attention & attention::OFFER != 0 {
            self.make_offer();
        }
        // The last of all: what is loaded after it can leak.
        if self.attention & attention::FLUSH_L1D != 0 && mitigations::flush_before_entry() {
            self.attention &= !attention::FLUSH_L1D;
        }
        true
    }

    /// The world switch.
    #[inline]
    pub(crate) fn enter_and_exit(&mut self, gprs: &mut Gprs) {
        // Not known: nobody has looked at it since the exit, so it is the guest's own.
        if let Some(rsp) = self.fields.get(fields::GUEST_RSP)
            && rsp != gprs.0[RSP]
        {
            self.set(fields::GUEST_RSP, gprs.0[RSP]);
        }
        if self.attention != 0 && !self.attend() {
            return self.refuse();
        }
        let entered = self.cpu.vmx_enter(gprs, &mut self.switch);
        self.fields.forget();
        self.shadow_over.set(false);
        if !entered {
            return self.refuse();
        }
        self.switch.flags |= VmxSwitch::LAUNCHED;
        if self.attention != 0 {
            self.settle_injection();
        }
        let reason = self.get(fields::EXIT_REASON);
        if exits::needs_rsp(reason) {
            self.look_after_exit(reason, gprs);
        }
    }

    /// The valid bit of what was injected is clear after an exit (SDM vol. 3C §28.2).
    #[cold]
    fn settle_injection(&mut self) {
        if self.attention & attention::INJECT != 0 {
            self.attention &= !attention::INJECT;
            let injected = self.get(fields::ENTRY_INTERRUPTION);
            self.fields.learn(fields::ENTRY_INTERRUPTION, u64::from(injected & !event::VALID));
        }
    }

    /// After the exits that are not plain instructions.
    #[inline(never)]
    fn look_after_exit(&mut self, reason: u32, gprs: &mut Gprs) {
        gprs.0[RSP] = self.get(fields::GUEST_RSP);
        if reason & ENTRY_FAILURE == 0 {
            self.take_exit_events(reason);
        }
    }

    /// The entry failed without an exit, or could not be tried: nothing of the guest has changed.
    #[cold]
    fn refuse(&mut self) {
        self.refused = if self.loaded.get() {
            self.cpu.vmread(field::INSTRUCTION_ERROR.encoding()) as u32
        } else {
            0
        };
        self.fields.learn(fields::EXIT_REASON, u64::from(exits::NOT_ENTERED));
    }
}

impl<C: Cpu> Drop for Vmx<C> {
    fn drop(&mut self) {
        // The page must not be written after it is freed.
        self.clear_elsewhere();
    }
}
