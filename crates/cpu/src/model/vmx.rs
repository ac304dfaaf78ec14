//! VMX on the scripted CPU: VMCSs are maps of fields, and every entry plays the next step of a
//! script of its own.
//!
//! It asserts what the hardware would refuse or what would be a bug: a field touched with no VMCS
//! current, VMRESUME of a VMCS that was cleared, a VMCS that is current on no CPU used.

use core::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use backend::Gprs;
use x86::{
    Cr0, Cr4, Hpa,
    vmcs::{EntryControls, Field, PinControls, ProcControls2, Width, event, field, invept},
};

use crate::{
    VmxCpu, VmxSwitch,
    legal::{self, demand},
};

use super::Model;

/// The fields of one VMCS.
#[derive(Clone, Debug, Default)]
pub struct ModelVmcs(HashMap<u32, u64>);

impl ModelVmcs {
    /// The fields that this one and another have otherwise: encoding, and both values.
    pub fn differences(&self, other: &Self) -> Vec<(u32, u64, u64)> {
        let all: BTreeSet<u32> = self.0.keys().chain(other.0.keys()).copied().collect();
        let value = |of: &Self, at: u32| of.0.get(&at).copied().unwrap_or(0);
        let both = all.into_iter().map(|at| (at, value(self, at), value(other, at)));
        both.filter(|(_, one, another)| one != another).collect()
    }

    /// The value of a field of the current VMCS.
    pub fn get<W: Width, A>(&self, field: Field<W, A>) -> W::Value {
        W::from_raw(self.0.get(&field.encoding()).copied().unwrap_or(0))
    }

    /// Sets a field, as the hardware may.
    pub fn set<W: Width, A>(&mut self, field: Field<W, A>, value: W::Value) {
        self.0.insert(field.encoding(), value.into());
    }
}

/// One step of a script: what the guest does until its next exit.
pub type VmxStep = Box<dyn FnMut(&mut ModelVmcs, &mut Gprs) + Send>;

/// What an entry may rely on of the translations that are cached under EPT pointers.
#[derive(Debug, Default)]
struct Tags {
    last: Option<u64>,
    forgotten: HashSet<u64>,
    all: bool,
}

impl Tags {
    /// An entry with an EPT pointer. While the VMCS had another, nobody could know that this one's translations were
    /// to be forgotten too: they have to be, before they are used again.
    fn enter(&mut self, pointer: u64) {
        let changed = self.last.is_some_and(|last| last != pointer);
        assert!(
            !changed || self.all || self.forgotten.contains(&pointer),
            "entry with another EPT pointer, {pointer:#x}, and no INVEPT of it"
        );
        *self = Self { last: Some(pointer), ..Self::default() };
    }
}

/// What the vCPU has forgotten since it came to the CPU on which it is. What it left there at another time may be
/// older than what was flushed meanwhile, where it was then.
#[derive(Debug, Default)]
struct Arrival {
    forgotten: HashSet<u64>,
    all: bool,
}

/// The state of VMX.
#[derive(Default)]
pub struct VmxModel {
    script: VecDeque<VmxStep>,
    /// In VMX operation: the region.
    pub on: Cell<Option<Hpa>>,
    /// VMXON is refused.
    pub refuse_vmxon: bool,
    /// What comes by while CR4.VMXE is set and VMX is off, before VMXON and behind VMXOFF.
    pub in_between: Option<fn(&Model)>,
    /// VMCSs that were cleared, in order.
    pub cleared: RefCell<Vec<Hpa>>,
    stored: RefCell<HashMap<Hpa, ModelVmcs>>,
    launched: RefCell<HashSet<Hpa>>,
    current: Cell<Option<Hpa>>,
    /// By VMCS: the EPT pointer of its last entry, and what was forgotten since.
    tags: RefCell<HashMap<Hpa, Tags>>,
    /// Since the last [`come_to_another_cpu`](Self::come_to_another_cpu).
    arrival: RefCell<Option<Arrival>>,
    /// VMCSs whose preemption timer was written since their last entry.
    timers: RefCell<HashSet<Hpa>>,
    /// VMWRITE takes read-only fields too, as on CPUs whose IA32_VMX_MISC says so.
    pub writes_read_only: bool,
    /// Fields that were written with the value that they had.
    pub unchanged_writes: RefCell<Vec<u32>>,
    /// CR2 of the CPU.
    pub cr2: Cell<u64>,
    /// CR3 of the host.
    pub cr3: u64,
    /// CR4 of the host.
    pub cr4: Cell<Cr4>,
    /// DS and ES of the thread.
    pub data: (u16, u16),
    /// DS and ES were made null.
    pub data_is_null: bool,
    /// The next entry fails.
    pub refuse: bool,
    /// What the guest writes to SPEC_CTRL during its next run, without an exit.
    pub guest_writes_spec_ctrl: Option<u64>,
    /// What the guest writes to DR6 during its next run, without an exit.
    pub guest_writes_dr6: Option<u64>,
    /// What the guest's SWAPGS leaves in KERNEL_GS_BASE during its next run.
    pub guest_swaps_in: Option<u64>,
    /// SPEC_CTRL as the guest found it at its last entry.
    pub spec_ctrl_at_entry: u64,
    /// Every guest's run takes so many ticks of the TSC.
    pub run_ticks: u64,
}

impl VmxModel {
    /// Adds a step to the end of the script.
    pub fn then(
        &mut self,
        step: impl FnMut(&mut ModelVmcs, &mut Gprs) + Send + 'static,
    ) -> &mut Self {
        self.script.push_back(Box::new(step));
        self
    }

    /// The vCPU goes on on another CPU, where it may have been before: every VMCS was cleared, and each EPT pointer has
    /// to be forgotten there before an entry uses it.
    pub fn come_to_another_cpu(&self) {
        self.launched.borrow_mut().clear();
        self.current.set(None);
        *self.arrival.borrow_mut() = Some(Arrival::default());
    }

    /// Steps that were not played yet.
    pub fn steps_left(&self) -> usize {
        self.script.len()
    }

    /// The VMCS that is current.
    pub fn current(&self) -> Option<ModelVmcs> {
        self.stored.borrow().get(&self.current.get()?).cloned()
    }

    /// Outside of VMX operation all of its instructions but VMXON are #UD (SDM vol. 3C §31.3).
    fn demand_operation(&self, what: &str) {
        assert!(self.on.get().is_some(), "{what}: the CPU refuses it outside of VMX operation");
    }

    fn current_address(&self, what: &str) -> Hpa {
        self.demand_operation(what);
        self.current.get().unwrap_or_else(|| panic!("{what} without a current VMCS"))
    }
}

impl VmxCpu for Model {
    fn vmxon(&self, region: Hpa) -> bool {
        if self.vmx.refuse_vmxon {
            return false;
        }
        demand(format_args!("VMXON {:#x}", region.0), legal::page(region, &self.limits));
        assert!(self.vmx.on.get().is_none(), "VMXON in VMX operation");
        self.vmx.cr4.set(self.vmx.cr4.get() | Cr4::VMXE);
        if let Some(act) = self.vmx.in_between {
            act(self);
        }
        self.vmx.on.set(Some(region));
        true
    }
    fn vmxoff(&self) {
        assert!(self.vmx.on.take().is_some(), "VMXOFF outside VMX operation");
        self.vmx.current.set(None);
        if let Some(act) = self.vmx.in_between {
            act(self);
        }
        self.vmx.cr4.set(self.vmx.cr4.get() - Cr4::VMXE);
    }
    fn vmptrld(&self, vmcs: Hpa) {
        self.vmx.demand_operation("VMPTRLD");
        demand(format_args!("VMPTRLD {:#x}", vmcs.0), legal::page(vmcs, &self.limits));
        self.vmx.stored.borrow_mut().entry(vmcs).or_default();
        self.vmx.current.set(Some(vmcs));
    }
    fn vmclear(&self, vmcs: Hpa) {
        self.vmx.demand_operation("VMCLEAR");
        demand(format_args!("VMCLEAR {:#x}", vmcs.0), legal::page(vmcs, &self.limits));
        self.vmx.launched.borrow_mut().remove(&vmcs);
        self.vmx.cleared.borrow_mut().push(vmcs);
        if self.vmx.current.get() == Some(vmcs) {
            self.vmx.current.set(None);
        }
    }
    fn vmread(&self, field: u32) -> u64 {
        let at = self.vmx.current_address("VMREAD");
        self.vmx.stored.borrow().get(&at).and_then(|v| v.0.get(&field).copied()).unwrap_or(0)
    }
    fn vmwrite(&self, field: u32, value: u64) {
        let legal = legal::vmwrite(field, value, self.vmx.writes_read_only);
        demand(format_args!("VMWRITE of {value:#x} to {field:#x}"), legal);
        let at = self.vmx.current_address("VMWRITE");
        if field == x86::vmcs::field::PREEMPTION_TIMER.encoding() {
            self.vmx.timers.borrow_mut().insert(at);
        }
        let mut stored = self.vmx.stored.borrow_mut();
        if stored.entry(at).or_default().0.insert(field, value) == Some(value) {
            self.vmx.unchanged_writes.borrow_mut().push(field);
        }
    }
    fn invept(&self, kind: u64, ept_pointer: u64) {
        self.vmx.demand_operation("INVEPT");
        demand(format_args!("INVEPT {kind}"), legal::invept(kind));
        for tags in self.vmx.tags.borrow_mut().values_mut() {
            tags.forgotten.insert(ept_pointer);
            tags.all |= kind == invept::ALL;
        }
        if let Some(arrival) = &mut *self.vmx.arrival.borrow_mut() {
            arrival.forgotten.insert(ept_pointer);
            arrival.all |= kind == invept::ALL;
        }
    }
    fn invvpid(&self, kind: u64, vpid: u16, address: u64) {
        self.vmx.demand_operation("INVVPID");
        let legal = legal::invvpid(kind, vpid, address, &self.limits);
        demand(format_args!("INVVPID {kind} of {vpid}, {address:#x}"), legal);
    }
    fn verw(&self) {}
    fn vmx_enter(&mut self, gprs: &mut Gprs, switch: &mut VmxSwitch) -> bool {
        let at = self.vmx.current_address("entry");
        let launched = switch.flags & VmxSwitch::LAUNCHED != 0;
        assert_eq!(
            self.vmx.launched.borrow().contains(&at),
            launched,
            "VMLAUNCH of a launched VMCS, or VMRESUME of one that is not"
        );
        if core::mem::take(&mut self.vmx.refuse) {
            return false;
        }
        let fields = self.vmx.stored.borrow().get(&at).cloned().unwrap_or_default();
        if fields.get(field::PROC_CONTROLS2) & ProcControls2::EPT.bits() != 0 {
            let mut tags = self.vmx.tags.borrow_mut();
            let pointer = fields.get(field::EPT_POINTER);
            tags.entry(at).or_default().enter(pointer);
            if let Some(arrival) = &*self.vmx.arrival.borrow() {
                assert!(
                    arrival.all || arrival.forgotten.contains(&pointer),
                    "entry on another CPU than before with EPT pointer {pointer:#x}, and no INVEPT of it there"
                );
            }
        }
        let timer = fields.get(field::PREEMPTION_TIMER);
        let counts = fields.get(field::PIN_CONTROLS) & PinControls::PREEMPTION_TIMER.bits() != 0;
        let set_anew = self.vmx.timers.borrow_mut().remove(&at);
        assert!(
            set_anew || !counts || timer == u32::MAX,
            "entry with the preemption timer of an earlier one, {timer:#x}"
        );
        let step = legal::pending_step(
            fields.get(field::GUEST_INTERRUPTIBILITY),
            fields.get(field::GUEST_RFLAGS),
            fields.get(field::GUEST_DEBUGCTL),
            fields.get(field::GUEST_PENDING_DEBUG),
        );
        demand(format_args!("entry"), step);
        let injection = legal::injection(
            fields.get(field::ENTRY_INTERRUPTION),
            fields.get(field::GUEST_RFLAGS),
            fields.get(field::GUEST_INTERRUPTIBILITY),
        );
        demand(format_args!("entry"), injection);
        let page = fields.get(field::VIRTUAL_APIC_ADDR);
        if page != 0 {
            // SAFETY: a page of the hypervisor's, whose physical address is the one it has here; TPR lies at 80h.
            let tpr = unsafe { ((page + 0x80) as *const u8).read_volatile() };
            let threshold = legal::threshold(
                fields.get(field::PROC_CONTROLS),
                fields.get(field::PROC_CONTROLS2),
                fields.get(field::TPR_THRESHOLD),
                tpr,
            );
            demand(format_args!("entry with priority {tpr:#x}"), threshold);
        }
        if fields.get(field::ENTRY_CONTROLS) & EntryControls::LOAD_EFER.bits() != 0 {
            self.demand_own_syscall(fields.get(field::GUEST_EFER));
        }
        for (field, value) in fields.0 {
            let legal = legal::vmcs_field(field, value, &self.limits);
            demand(format_args!("entry with {value:#x} in field {field:#x}"), legal);
        }
        for value in [switch.guest_spec_ctrl, switch.host_spec_ctrl] {
            let legal = legal::wrmsr(x86::msr::SPEC_CTRL, value, &self.limits);
            demand(format_args!("SPEC_CTRL of {value:#x}"), legal);
        }
        if let Some(dr6) = self.vmx.guest_writes_dr6.take() {
            self.debug_regs[6] = dr6;
        }
        if let Some(base) = self.vmx.guest_swaps_in.take() {
            crate::Cpu::wrmsr(self, x86::msr::KERNEL_GS_BASE, base);
        }
        let mut step = self.vmx.script.pop_front().expect("the script has ended");
        let mut vmcs = self.vmx.stored.borrow().get(&at).cloned().unwrap_or_default();
        self.vmx.spec_ctrl_at_entry = switch.guest_spec_ctrl;
        step(&mut vmcs, gprs);
        if let Some(value) = self.vmx.guest_writes_spec_ctrl.take() {
            let read = switch.flags & VmxSwitch::READ_SPEC_CTRL != 0;
            assert!(read, "the guest has SPEC_CTRL and nobody reads it after the exit");
            switch.guest_spec_ctrl = value;
        }
        self.tsc += self.vmx.run_ticks;
        if vmcs.get(field::EXIT_REASON) & (1 << 31) == 0 {
            // An entry that fails late launches nothing, and what was to be injected stands (SDM vol. 3C §27.8).
            self.vmx.launched.borrow_mut().insert(at);
            let injected = vmcs.get(field::ENTRY_INTERRUPTION);
            vmcs.set(field::ENTRY_INTERRUPTION, injected & !event::VALID);
        }
        let in_delivery = vmcs.get(field::IDT_VECTORING) & event::VALID != 0;
        self.vmx.stored.borrow_mut().insert(at, vmcs);
        self.entry_ended(in_delivery);
        true
    }
    fn vmx_exit_address(&self) -> u64 {
        0x1000
    }
    fn host_nmi(&mut self) {}
    fn cr0(&self) -> Cr0 {
        Cr0::from_bits_retain(0x8005_0033)
    }
    fn cr2(&self) -> u64 {
        self.vmx.cr2.get()
    }
    fn set_cr2(&self, value: u64) {
        self.vmx.cr2.set(value);
    }
    fn cr3(&self) -> u64 {
        self.vmx.cr3
    }
    fn cr4_now(&self) -> Cr4 {
        self.vmx.cr4.get()
    }
    fn data_selectors(&self) -> (u16, u16) {
        self.vmx.data
    }
    fn load_data_selectors(&mut self, ds: u16, es: u16) {
        // Without what the kernel's macros do about it this would be a fault in the kernel.
        assert!((ds, es) == (0, 0) || (ds, es) == self.vmx.data, "selectors of before");
        self.vmx.data_is_null = (ds, es) == (0, 0);
    }
}
