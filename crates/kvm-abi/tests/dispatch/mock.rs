//! A VM, a vCPU and a /dev/kvm that only remember what they were asked.

use std::cell::{Cell, RefCell, RefMut};
use std::sync::atomic::AtomicU64;

use gannet_kvm_abi::Errno;
use gannet_kvm_abi::caps::Offer;
use gannet_kvm_abi::dispatch::*;
use gannet_kvm_abi::exit::{ErrorData, RunInput, RunOutput, UserExit};
use gannet_kvm_abi::uapi::capability::*;
use gannet_kvm_abi::uapi::clock::KvmClockData;
use gannet_kvm_abi::uapi::cpuid::KvmCpuidEntry2;
use gannet_kvm_abi::uapi::debug::*;
use gannet_kvm_abi::uapi::event::*;
use gannet_kvm_abi::uapi::irqchip::*;
use gannet_kvm_abi::uapi::memory::KvmCoalescedMmioZone;
use gannet_kvm_abi::uapi::registers::*;
use gannet_kvm_abi::uapi::vcpu_state::*;
use host::Fault;

/// Everything on offer.
pub fn offer() -> Offer {
    Offer {
        max_vcpus: 8,
        max_vcpu_id: 32,
        xsave: true,
        xsave_bytes: 4096,
        xcr0: 7,
        tsc_scaling: true,
        max_tsc_khz: 10_000_000,
        tsc_khz: 2_000_000,
        split_irqchip: true,
        x2apic_api: X2APIC_API_VALID_FLAGS,
        steal_time: true,
        halt_poll: true,
        mce_banks: 32,
        mce_cap: 0x0100_0000,
        quirks: 0xf,
        disable_exits: X86_DISABLE_EXITS_HLT,
        guest_debug: GUESTDBG_VALID_MASK,
        exception_payload: true,
        triple_fault_event: true,
        manual_dirty_log: 3,
        tsc_offset: true,
        emulated_cpuid: true,
        nested_format: NESTED_FORMAT_SVM,
        gpa_bits: 48,
        smaller_maxphyaddr: false,
        hyperv: true,
        no_smt: false,
    }
}

pub fn leaf(function: u32) -> KvmCpuidEntry2 {
    KvmCpuidEntry2 { function, eax: function ^ 0x5555, ..Default::default() }
}

pub struct System {
    pub offer: Offer,
}

impl SystemOps for System {
    fn offer(&self) -> &Offer {
        &self.offer
    }
    fn create_vm(&self) -> Result<i32, Errno> {
        Ok(33)
    }
    fn supported_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        Ok(vec![leaf(0), leaf(1), leaf(7)])
    }
    fn hyperv_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        Ok(vec![leaf(0x4000_0000), leaf(0x4000_0001)])
    }
    fn msr_indices(&self) -> Result<Vec<u32>, Errno> {
        Ok(vec![0x10, 0x174, 0xc000_0080])
    }
    fn feature_msr_indices(&self) -> Result<Vec<u32>, Errno> {
        Ok(vec![0x10a])
    }
    fn feature_msr(&self, index: u32) -> Result<u64, MsrRefused> {
        if index == 0x10a { Ok(0xabcd) } else { Err(MsrRefused) }
    }
}

/// Remembers each call that changes something, in words.
pub struct Vm {
    pub offer: Offer,
    pub ours: bool,
    pub irqchip: Irqchip,
    pub pit: bool,
    pub vcpus: u32,
    pub log_pages: Result<u64, Errno>,
    pub calls: RefCell<Vec<String>>,
}

impl Vm {
    pub fn full() -> Self {
        Self {
            offer: offer(),
            ours: true,
            irqchip: Irqchip::Full,
            pit: true,
            vcpus: 0,
            log_pages: Ok(130),
            calls: RefCell::default(),
        }
    }
    fn note(&self, what: impl std::fmt::Debug) -> Result<(), Errno> {
        self.calls.borrow_mut().push(format!("{what:?}"));
        Ok(())
    }
    pub fn take(&self) -> Vec<String> {
        self.calls.take()
    }
    fn pit_or_not(&self) -> Result<(), Errno> {
        if self.pit { Ok(()) } else { Err(Errno::ENXIO) }
    }
}

impl VmOps for Vm {
    fn bus_cycle_ns(&self) -> u32 {
        40
    }
    fn belongs_to_caller(&self) -> bool {
        self.ours
    }
    fn offer(&self) -> &Offer {
        &self.offer
    }
    fn stats_file(&self) -> Result<i32, Errno> {
        Ok(44)
    }
    fn created_vcpus(&self) -> u32 {
        self.vcpus
    }
    fn create_vcpu(&self, id: u32) -> Result<i32, Errno> {
        self.note(("vcpu", id)).map(|()| 44)
    }
    fn set_memory_region(&self, region: &MemoryRegion) -> Result<(), Errno> {
        self.note(region)
    }
    fn dirty_log(
        &self,
        slot: SlotId,
        out: impl FnOnce(&[u64]) -> Result<(), Fault>,
    ) -> Result<(), Errno> {
        let bitmap = vec![0x1111; self.log_pages?.div_ceil(64) as usize];
        out(&bitmap)?;
        self.note(("dirty", slot.number, bitmap.len()))
    }
    fn clear_dirty_log(
        &self,
        slot: SlotId,
        first: u64,
        pages: u32,
        read: impl FnOnce(&mut [u64]) -> Result<(), Fault>,
    ) -> Result<(), Errno> {
        let mut bits = vec![0; pages.div_ceil(64) as usize];
        read(&mut bits)?;
        self.note(("clear", slot.number, first, pages, &bits))
    }
    fn irqchip(&self) -> Irqchip {
        self.irqchip
    }
    fn create_irqchip(&self) -> Result<(), Errno> {
        self.note("irqchip")
    }
    fn pic(&self, which: u32) -> Result<KvmPicState, Errno> {
        Ok(KvmPicState { elcr_mask: 0xa0 + which as u8, ..Default::default() })
    }
    fn set_pic(&self, which: u32, state: &KvmPicState) -> Result<(), Errno> {
        self.note(("pic", which, state.elcr_mask))
    }
    fn ioapic(&self) -> Result<KvmIoapicState, Errno> {
        Ok(KvmIoapicState { redirtbl: [7; 24], ..Default::default() })
    }
    fn set_ioapic(&self, state: &KvmIoapicState) -> Result<(), Errno> {
        self.note(("ioapic", state.redirtbl))
    }
    fn create_pit(&self, flags: u32) -> Result<(), Errno> {
        self.note(("pit", flags))
    }
    fn has_pit(&self) -> bool {
        self.pit
    }
    fn pit(&self) -> Result<KvmPitState2, Errno> {
        self.pit_or_not().map(|()| KvmPitState2 { flags: 2, ..Default::default() })
    }
    fn set_pit(&self, c: &[KvmPitChannelState; 3], flags: Option<u32>) -> Result<(), Errno> {
        self.pit_or_not()?;
        self.note(("set pit", c[2].count, flags))
    }
    fn set_pit_reinject(&self, on: bool) -> Result<(), Errno> {
        self.pit_or_not()?;
        self.note(("reinject", on))
    }
    fn set_irq_line(&self, gsi: u32, level: bool) -> Result<i32, Errno> {
        self.note(("line", gsi, level)).map(|()| -1)
    }
    fn signal_msi(&self, msi: &KvmMsi) -> Result<i32, Errno> {
        self.note(msi).map(|()| 3)
    }
    fn set_routes(&self, routes: &[KvmIrqRoutingEntry]) -> Result<(), Errno> {
        for route in routes {
            assert!(route.gsi < MAX_IRQ_ROUTES && matches!(route.type_, 1 | 2));
        }
        self.note(("routes", routes.len()))
    }
    fn assign_ioeventfd(&self, what: &KvmIoeventfd) -> Result<(), Errno> {
        assert!(what.addr.checked_add(u64::from(what.len)).is_some());
        self.note(("+ioeventfd", what.len))
    }
    fn deassign_ioeventfd(&self, what: &KvmIoeventfd) -> Result<(), Errno> {
        self.note(("-ioeventfd", what.len))
    }
    fn register_zone(&self, zone: &KvmCoalescedMmioZone) -> Result<(), Errno> {
        self.note(("+zone", zone.addr, zone.size, zone.pio))
    }
    fn unregister_zones(&self, zone: &KvmCoalescedMmioZone) -> Result<(), Errno> {
        self.note(("-zone", zone.addr, zone.size, zone.pio))
    }
    fn assign_irqfd(&self, what: &KvmIrqfd) -> Result<(), Errno> {
        self.note(("+irqfd", what.gsi))
    }
    fn deassign_irqfd(&self, what: &KvmIrqfd) -> Result<(), Errno> {
        self.note(("-irqfd", what.gsi))
    }
    fn set_tss_addr(&self, addr: u32) -> Result<(), Errno> {
        self.note(("tss", addr))
    }
    fn set_identity_map_addr(&self, addr: u64) -> Result<(), Errno> {
        self.note(("identity", addr))
    }
    fn set_boot_cpu_id(&self, id: u32) -> Result<(), Errno> {
        self.note(("boot", id))
    }
    fn clock(&self) -> KvmClockData {
        KvmClockData { clock: 5, ..Default::default() }
    }
    fn set_clock(&self, data: &KvmClockData) -> Result<(), Errno> {
        self.note(("clock", data.clock))
    }
    fn tsc_khz(&self) -> u32 {
        2_500_000
    }
    fn set_tsc_khz(&self, khz: u32) -> Result<(), Errno> {
        self.note(("tsc khz", khz))
    }
    fn set_msr_filter(&self, filter: vm::msr_filter::MsrFilter) -> Result<(), Errno> {
        self.note(filter)
    }
    fn set(&self, setting: Setting) -> Result<(), Errno> {
        self.note(setting)
    }
}

pub struct Vcpu {
    pub offer: Offer,
    pub irqchip: Irqchip,
    pub ran: bool,
    pub pending: bool,
    pub xsave_bytes: usize,
    pub xcr0: Option<u64>,
    pub cpuid: Vec<KvmCpuidEntry2>,
    pub exit: UserExit,
    pub error: ErrorData,
    pub io: [u8; 8],
    pub answered: Option<[u8; 8]>,
    pub input: Option<RunInput>,
    pub mask: Option<u64>,
    pub calls: Vec<String>,
}

pub struct File {
    pub ours: bool,
    pub killed: Cell<bool>,
    pub page: [AtomicU64; 512],
    pub io_page: [AtomicU64; 512],
    pub vcpu: RefCell<Vcpu>,
}

impl File {
    pub fn new() -> Self {
        Self {
            ours: true,
            killed: Cell::new(false),
            page: std::array::from_fn(|_| AtomicU64::new(0)),
            io_page: std::array::from_fn(|_| AtomicU64::new(0)),
            vcpu: RefCell::new(Vcpu {
                offer: offer(),
                irqchip: Irqchip::Full,
                ran: false,
                pending: false,
                xsave_bytes: 4096,
                xcr0: Some(1),
                cpuid: vec![leaf(0), leaf(1)],
                exit: UserExit::Hlt,
                error: ErrorData::default(),
                io: [0; 8],
                answered: None,
                input: None,
                mask: None,
                calls: Vec::new(),
            }),
        }
    }
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.vcpu.borrow_mut().calls)
    }
}

impl VcpuFile for File {
    type Vcpu = Vcpu;
    fn belongs_to_caller(&self) -> bool {
        self.ours
    }
    fn run_page(&self) -> &[AtomicU64; 512] {
        &self.page
    }
    fn io_page(&self) -> &[AtomicU64; 512] {
        &self.io_page
    }
    fn lock(&self) -> Result<impl std::ops::DerefMut<Target = Vcpu>, Errno> {
        if self.killed.get() {
            return Err(Errno::EINTR);
        }
        let guard: RefMut<'_, Vcpu> = self.vcpu.borrow_mut();
        Ok(guard)
    }
}

impl Vcpu {
    fn note(&mut self, what: impl std::fmt::Debug) -> Result<(), Errno> {
        self.calls.push(format!("{what:?}"));
        Ok(())
    }
}

impl VcpuOps for Vcpu {
    fn offer(&self) -> &Offer {
        &self.offer
    }
    fn irqchip(&self) -> Irqchip {
        self.irqchip
    }
    fn stats_file(&mut self) -> Result<i32, Errno> {
        Ok(45)
    }
    fn run(&mut self, input: &RunInput) -> UserExit {
        self.input = Some(*input);
        self.answered = Some(self.io);
        if let UserExit::Io { write: true, .. } = self.exit {
            self.io = *b"guest wr";
        }
        self.exit
    }
    fn io_data(&mut self) -> &mut [u8; 8] {
        &mut self.io
    }
    fn answer_rare(&mut self, msr: impl FnOnce() -> (bool, u64), items: impl FnOnce(&mut [u8])) {
        if let UserExit::Msr { .. } = self.exit {
            self.calls.push(format!("msr {:?}", msr()));
        }
        if let UserExit::Io { count: 2.., .. } = self.exit {
            let mut data = [0; 20];
            items(&mut data);
            self.calls.push(format!("items {data:?}"));
        }
    }
    fn error_data(&self) -> &ErrorData {
        &self.error
    }

    fn run_output(&self) -> RunOutput {
        RunOutput {
            ready_for_interrupt_injection: true,
            if_flag: true,
            cr8: 3,
            apic_base: 0xfee0_0900,
            smm: false,
        }
    }
    fn set_signal_mask(&mut self, mask: Option<u64>) {
        self.mask = mask;
        self.note(("mask", mask)).unwrap();
    }
    fn regs(&mut self) -> KvmRegs {
        KvmRegs { rax: 1, rip: 0xfff0, ..Default::default() }
    }
    fn set_regs(&mut self, regs: &KvmRegs) -> Result<(), Errno> {
        self.note(("regs", regs.rip))
    }
    fn sregs(&mut self) -> KvmSregs2 {
        KvmSregs2 {
            cr0: 0x11,
            cs: KvmSegment { base: 9, ..Default::default() },
            ..Default::default()
        }
    }
    fn interrupt_in_injection(&mut self) -> Option<u8> {
        Some(70)
    }
    fn set_sregs(&mut self, sregs: &KvmSregs2, interrupt: Option<u8>) -> Result<(), Errno> {
        self.note(("sregs", sregs.cr0, sregs.flags, sregs.cs.base, interrupt))
    }
    fn fpu(&mut self, into: &mut KvmFpu) -> Result<(), Errno> {
        into.mxcsr = 0x1f80;
        Ok(())
    }
    fn set_fpu(&mut self, fpu: &KvmFpu) -> Result<(), Errno> {
        self.note(("fpu", fpu.mxcsr))
    }
    fn xsave_bytes(&self) -> usize {
        self.xsave_bytes
    }
    fn xsave(&mut self, into: &mut [u8]) -> Result<(), Errno> {
        assert_eq!(into.len(), self.xsave_bytes.max(4096));
        into.fill(0x77);
        Ok(())
    }
    fn set_xsave(&mut self, area: &[u8]) -> Result<(), Errno> {
        self.note(("xsave", area.len()))
    }
    fn xcr0(&mut self) -> Option<u64> {
        self.xcr0
    }
    fn set_xcr0(&mut self, value: u64) -> Result<(), Errno> {
        self.note(("xcr0", value))
    }
    fn debugregs(&mut self) -> KvmDebugregs {
        KvmDebugregs { dr7: 0x400, ..Default::default() }
    }
    fn set_debugregs(&mut self, regs: &KvmDebugregs) -> Result<(), Errno> {
        self.note(("debugregs", regs.dr7))
    }
    fn msr(&mut self, index: u32) -> Result<u64, MsrRefused> {
        if index < 100 { Ok(u64::from(index) + 1) } else { Err(MsrRefused) }
    }
    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), MsrRefused> {
        if index >= 100 {
            return Err(MsrRefused);
        }
        self.note(("msr", index, value)).map_err(|_| MsrRefused)
    }
    fn events(&mut self) -> KvmVcpuEvents {
        KvmVcpuEvents { flags: 5, ..Default::default() }
    }
    fn set_events(&mut self, events: &KvmVcpuEvents) -> Result<(), Errno> {
        self.note(events)
    }
    fn exception_pending(&self) -> bool {
        self.pending
    }
    fn mp_state(&mut self) -> u32 {
        MP_STATE_HALTED
    }
    fn set_mp_state(&mut self, state: u32) -> Result<(), Errno> {
        self.note(("mp", state))
    }
    fn interrupt(&mut self, vector: u8) -> Result<(), Errno> {
        self.note(("interrupt", vector))
    }
    fn nmi(&mut self) {
        self.note("nmi").unwrap();
    }
    fn smi(&mut self) {
        self.note("smi").unwrap();
    }
    fn lapic(&mut self, into: &mut KvmLapicState) -> Result<(), Errno> {
        into.regs[0x20] = 5;
        Ok(())
    }
    fn set_lapic(&mut self, state: &KvmLapicState) -> Result<(), Errno> {
        self.note(("lapic", state.regs[0x20]))
    }
    fn cpuid(&mut self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        Ok(self.cpuid.clone())
    }
    fn has_run(&self) -> bool {
        self.ran
    }
    fn set_cpuid(&mut self, entries: Box<[KvmCpuidEntry2]>) -> Result<(), Errno> {
        if self.ran {
            return if *self.cpuid == *entries { Ok(()) } else { Err(Errno::EINVAL) };
        }
        self.note(("cpuid", entries))
    }
    fn enable_enlightened_vmcs(&mut self) -> u16 {
        self.note("enlightened").unwrap();
        0x101
    }
    fn hyperv_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        Ok(vec![leaf(0x4000_0000)])
    }
    fn enforce_pv_features(&mut self, on: bool) {
        self.note(("enforce", on)).unwrap();
    }
    fn tsc_khz(&self) -> u32 {
        2_400_000
    }
    fn set_tsc_khz(&mut self, khz: u32) -> Result<(), Errno> {
        self.note(("tsc khz", khz))
    }
    fn tsc_offset(&self) -> u64 {
        0x1234
    }
    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), Errno> {
        self.note(("tsc offset", offset))
    }
    fn kvmclock_ctrl(&mut self) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
    fn translate(&mut self, t: &mut KvmTranslation) {
        t.physical_address = t.linear_address + 0x1000;
        t.valid = 1;
    }
    fn set_guest_debug(&mut self, debug: &KvmGuestDebug) -> Result<(), Errno> {
        self.note(("debug", debug.control))
    }
    fn setup_mce(&mut self, mcg_cap: u64) -> Result<(), Errno> {
        self.note(("mcg_cap", mcg_cap))
    }
    fn set_mce(&mut self, mce: &KvmX86Mce) -> Result<(), Errno> {
        self.note(("mce", mce.bank))
    }
}
