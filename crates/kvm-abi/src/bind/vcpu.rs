//! A vCPU file: the vCPU behind its mutex, and the three pages that user space maps, of which one is
//! the VM's.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ffi::CStr;
use core::ops::DerefMut;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ::vcpu::{Vcpu, state::registers::GivenEvents};
use ::vm::{
    VmRef,
    vcpu_shared::{MpState, SharedVcpu},
};
use backend::Backend;
use host::file::Pointers;
use host::{Arc, KBox, file::FileObject, page::Page, sync::Mutex};
use irqchip::Accepted;
use msr::{By, McReport};
use x86::Vector;
use zerocopy::FromZeros;

use super::{Host, belongs_to_caller, convert, stats};
use crate::caps::Offer;
use crate::dispatch::{self, Irqchip, MsrRefused, VcpuFile as VcpuFileOps, VcpuOps};
use crate::errno::Errno;
use crate::exit::{ErrorData, RunInput, RunOutput, UserExit};
use crate::uapi::cpuid::KvmCpuidEntry2;
use crate::uapi::debug::*;
use crate::uapi::irqchip::KvmLapicState;
use crate::uapi::registers::*;
use crate::uapi::run::{COALESCED_MMIO_PAGE_OFFSET, PIO_PAGE_OFFSET};
use crate::uapi::vcpu_state::*;

/// What the mutex of a vCPU guards.
pub struct BoundVcpu<B: Backend> {
    vcpu: KBox<Vcpu<B>>,
    vm: VmRef,
    host: &'static Host,
    /// The thread that made it.
    tid: u32,
    /// Where a start-up IPI sends the vCPU that a VMM restores with one pending.
    sipi_vector: u8,
}

/// A vCPU by its file. It holds the VM.
pub struct VcpuFile<B: Backend> {
    vcpu: Mutex<BoundVcpu<B>>,
    vm: VmRef,
    /// The page of `struct kvm_run`.
    run: Page,
    /// The data of port I/O.
    pio: Page,
}

impl<B: Backend + 'static> VcpuFile<B> {
    /// The vCPU that others know by `shared`, on a fresh backend.
    #[inline(never)]
    pub fn new(
        backend: KBox<B>,
        shared: SharedVcpu,
        vm: VmRef,
        host: &'static Host,
    ) -> Result<Self, Errno> {
        let vcpu = Vcpu::on(backend, shared, vm.clone(), host.offered)?;
        let bound = BoundVcpu {
            vcpu,
            vm: vm.clone(),
            host,
            // For the name of its statistics file alone; another thread may run it.
            tid: host::task::current_tid(),
            sipi_vector: 0,
        };
        // Zeroed: user space maps both pages, and reads them before the first KVM_RUN.
        Ok(Self { vcpu: Mutex::new(bound), vm, run: Page::zeroed()?, pio: Page::zeroed()? })
    }
}

impl<B: Backend + 'static> FileObject for VcpuFile<B> {
    const NAME: &'static CStr = c"kvm-vcpu";
    const MAPPABLE: bool = true;

    fn ioctl(this: &Arc<Self>, command: u32, argument: u64, _: Pointers) -> i64 {
        // No structure of these commands is another one in a 32-bit process; even a signal set has
        // eight bytes there.
        dispatch::code(dispatch::vcpu(&**this, command, argument))
    }

    fn mmap_page(&self, offset: u64) -> Option<&Page> {
        match offset {
            // By pages. The pages live as long as the file, which each mapping holds.
            0 => Some(&self.run),
            PIO_PAGE_OFFSET => Some(&self.pio),
            // One page for all vCPUs of the VM, as on stock KVM (KVM API §4.116).
            COALESCED_MMIO_PAGE_OFFSET => Some(self.vm.irq().coalesced().page()),
            // No other page: an offset behind the three is not the kernel's memory.
            _ => None,
        }
    }
}

impl<B: Backend + 'static> VcpuFileOps for VcpuFile<B> {
    type Vcpu = BoundVcpu<B>;

    #[inline]
    fn belongs_to_caller(&self) -> bool {
        belongs_to_caller(&self.vm)
    }

    #[inline]
    fn run_page(&self) -> &[AtomicU64; 512] {
        // Words and no structure: user space writes to the page while we read.
        self.run.table()
    }

    #[inline]
    fn io_page(&self) -> &[AtomicU64; 512] {
        self.pio.table()
    }

    #[inline]
    fn lock(&self) -> Result<impl DerefMut<Target = BoundVcpu<B>>, Errno> {
        // Killable: a thread in KVM_RUN may hold the mutex for ever, and who waits for it must be
        // able to die.
        let mut bound = self.vcpu.lock_killable()?;
        bound.vcpu.follow_host_clock();
        Ok(bound)
    }
}

impl<B: Backend> BoundVcpu<B> {
    fn rules(&self) -> convert::EventRules {
        let settings = &self.vm.settings;
        convert::EventRules {
            // Relaxed: a thread that saves events while another switches the capability may get
            // either form; nothing else depends on the flag.
            payload: settings.exception_payload.load(Relaxed),
            triple_fault: settings.triple_fault_event.load(Relaxed),
        }
    }

    /// A buffer for the whole XSAVE area.
    fn area(&self) -> Result<Box<[u8]>, Errno> {
        // Zeroed: what the copy leaves out must be no old bytes of the kernel's.
        Ok(<[u8]>::new_box_zeroed_with_elems(self.vcpu.xsave_size())?)
    }
}

impl<B: Backend> VcpuOps for BoundVcpu<B> {
    fn offer(&self) -> &Offer {
        &self.host.offer
    }

    fn stats_file(&mut self) -> Result<i32, Errno> {
        stats::of_vcpu(self.vcpu.shared(), self.tid)
    }

    #[inline]
    fn irqchip(&self) -> Irqchip {
        self.vm.irq().kind()
    }

    #[inline]
    fn run(&mut self, input: &RunInput) -> UserExit {
        self.vcpu.run(input)
    }

    #[inline]
    fn io_data(&mut self) -> &mut [u8; 8] {
        self.vcpu.io_data()
    }

    #[inline]
    fn answer_rare(&mut self, msr: impl FnOnce() -> (bool, u64), items: impl FnOnce(&mut [u8])) {
        self.vcpu.answer_rare(msr, items);
    }

    #[inline]
    fn run_output(&self) -> RunOutput {
        self.vcpu.run_output()
    }

    fn error_data(&self) -> &ErrorData {
        self.vcpu.error_data()
    }

    fn set_signal_mask(&mut self, mask: Option<u64>) {
        self.vcpu.set_signal_mask(mask);
    }

    fn regs(&mut self) -> KvmRegs {
        convert::regs(&self.vcpu.regs())
    }

    fn set_regs(&mut self, regs: &KvmRegs) -> Result<(), Errno> {
        // Nothing is refused, as on stock KVM.
        self.vcpu.set_regs(&convert::from_regs(regs));
        Ok(())
    }

    fn sregs(&mut self) -> KvmSregs2 {
        convert::sregs(&self.vcpu.sregs())
    }

    fn interrupt_in_injection(&mut self) -> Option<u8> {
        self.vcpu.interrupt_in_injection().map(|vector| vector.0)
    }

    fn set_sregs(&mut self, sregs: &KvmSregs2, interrupt: Option<u8>) -> Result<(), Errno> {
        Ok(self.vcpu.set_sregs(&convert::from_sregs(sregs), interrupt.map(Vector))?)
    }

    fn fpu(&mut self, into: &mut KvmFpu) -> Result<(), Errno> {
        // By the standard format: what the kernel keeps may be compacted, and it alone knows how.
        let mut area = self.area()?;
        self.vcpu.xsave(&mut area);
        convert::fpu(&area, into);
        Ok(())
    }

    fn set_fpu(&mut self, fpu: &KvmFpu) -> Result<(), Errno> {
        let mut area = self.area()?;
        // The structure holds x87 and SSE alone: the other components must come back as they are.
        self.vcpu.xsave(&mut area);
        convert::put_fpu(fpu, &mut area);
        Ok(self.vcpu.set_xsave(&area)?)
    }

    fn xsave_bytes(&self) -> usize {
        self.vcpu.xsave_size()
    }

    fn xsave(&mut self, into: &mut [u8]) -> Result<(), Errno> {
        self.vcpu.xsave(into);
        Ok(())
    }

    fn set_xsave(&mut self, area: &[u8]) -> Result<(), Errno> {
        Ok(self.vcpu.set_xsave(area)?)
    }

    fn xcr0(&mut self) -> Option<u64> {
        // The host is asked and not the guest's CPUID: a VMM may restore XCR0 before that, and
        // stock KVM lets it.
        self.host.offer.xsave.then(|| self.vcpu.xcr0())
    }

    fn set_xcr0(&mut self, value: u64) -> Result<(), Errno> {
        Ok(self.vcpu.set_xcr0(value)?)
    }

    fn debugregs(&mut self) -> KvmDebugregs {
        convert::debugregs(self.vcpu.debug_regs())
    }

    fn set_debugregs(&mut self, regs: &KvmDebugregs) -> Result<(), Errno> {
        self.vcpu.set_debug_regs(convert::from_debugregs(regs));
        Ok(())
    }

    fn msr(&mut self, index: u32) -> Result<u64, MsrRefused> {
        // As the VMM: the guest's CPUID and the MSR filter are not asked.
        self.vcpu.read_msr(index, By::Vmm).map_err(|_| MsrRefused)
    }

    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), MsrRefused> {
        self.vcpu.write_msr(index, value, By::Vmm).map_err(|_| MsrRefused)
    }

    fn events(&mut self) -> KvmVcpuEvents {
        let rules = self.rules();
        if !rules.payload {
            // The structure has no field for the payload then. In CR2 or DR6 the VMM saves it with
            // the registers.
            self.vcpu.deliver_exception_payload();
        }
        convert::events(&self.vcpu.saved_events(), rules)
    }

    fn set_events(&mut self, events: &KvmVcpuEvents) -> Result<(), Errno> {
        // All checks before the first change: KVM_SET_VCPU_EVENTS is whole or nothing.
        let saved = convert::from_events(events, self.rules())?;
        let has = |flag: u32| events.flags & flag != 0;
        let smi = has(VCPUEVENT_VALID_SMM).then_some(saved.smi);
        // An INIT is held back in system-management mode, and an SMI goes before it.
        if smi.is_some_and(|smi| smi.smm || smi.pending)
            && self.vcpu.shared().mp_state() == MpState::InitReceived
        {
            return Err(Errno::EINVAL);
        }
        let given = GivenEvents {
            interrupt_shadow: has(VCPUEVENT_VALID_SHADOW),
            nmi_pending: has(VCPUEVENT_VALID_NMI_PENDING),
            triple_fault: has(VCPUEVENT_VALID_TRIPLE_FAULT),
        };
        // Nothing fails from here on: an error has left all events as they were.
        self.vcpu.restore_events(&saved, given);
        // Kept until KVM_SET_MP_STATE says that a SIPI was received: the vector alone starts
        // nobody.
        if has(VCPUEVENT_VALID_SIPI_VECTOR) {
            // Cut to the page's number: a start-up address is below 1 MiB.
            self.sipi_vector = events.sipi_vector as u8;
        }
        // Last: entering system-management mode changes what the events above are held back by.
        if let Some(smi) = smi {
            self.vcpu.restore_smi(&smi);
        }
        Ok(())
    }

    fn exception_pending(&self) -> bool {
        self.vcpu.exception_pending()
    }

    fn mp_state(&mut self) -> u32 {
        self.vcpu.mp_state() as u32
    }

    fn set_mp_state(&mut self, state: u32) -> Result<(), Errno> {
        let state = MpState::from_raw(state).ok_or(Errno::EINVAL)?;
        // An INIT waits while the vCPU is in system-management mode: no state that was saved has
        // both.
        if matches!(state, MpState::InitReceived | MpState::SipiReceived)
            && self.vcpu.holds_init_back()
        {
            return Err(Errno::EINVAL);
        }
        match state {
            // Nothing but the start-up IPI itself is left to be done.
            MpState::SipiReceived => {
                // The state first: a SIPI is dropped by a vCPU that does not wait for one.
                self.vcpu.set_mp_state(MpState::InitReceived);
                self.vcpu.shared().deliver(Accepted::Sipi(Vector(self.sipi_vector)));
            }
            state => self.vcpu.set_mp_state(state),
        }
        Ok(())
    }

    fn interrupt(&mut self, vector: u8) -> Result<(), Errno> {
        // With a split irqchip alone. Without a local APIC the new one takes the place of the old,
        // as on stock KVM, though the document has EEXIST there as well (KVM API §4.16).
        self.vcpu.queue_interrupt(Vector(vector)).map_err(|_| Errno::EEXIST)
    }

    fn nmi(&mut self) {
        self.vcpu.queue_nmi();
    }

    fn smi(&mut self) {
        self.vcpu.queue_smi();
    }

    fn lapic(&mut self, into: &mut KvmLapicState) -> Result<(), Errno> {
        self.vcpu.lapic_page(&mut into.regs);
        Ok(())
    }

    fn set_lapic(&mut self, state: &KvmLapicState) -> Result<(), Errno> {
        Ok(self.vcpu.set_lapic_page(&state.regs)?)
    }

    fn cpuid(&mut self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        convert::cpuid_table(self.vcpu.cpuid_entries())
    }

    fn has_run(&self) -> bool {
        self.vcpu.has_run()
    }

    fn set_cpuid(&mut self, entries: Box<[KvmCpuidEntry2]>) -> Result<(), Errno> {
        let table = convert::from_cpuid_table(&entries)?;
        Ok(self.vcpu.set_cpuid(&table)?)
    }

    fn tsc_khz(&self) -> u32 {
        self.vcpu.tsc_khz()
    }

    fn set_tsc_khz(&mut self, khz: u32) -> Result<(), Errno> {
        // Without scaling only the host's own rate can be had, within what calibration differs by.
        Ok(self.vcpu.set_tsc_khz(khz, self.host.offer.tsc_scaling)?)
    }

    fn tsc_offset(&self) -> u64 {
        self.vcpu.tsc_offset()
    }

    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), Errno> {
        self.vcpu.set_tsc_offset(offset);
        Ok(())
    }

    fn enable_enlightened_vmcs(&mut self) -> u16 {
        self.vcpu.enable_enlightened_vmcs()
    }

    fn hyperv_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        convert::hyperv_table(&self.host.offer, self.vcpu.enlightened_versions())
    }

    fn enforce_pv_features(&mut self, on: bool) {
        self.vcpu.enforce_pv_features(on);
    }

    fn kvmclock_ctrl(&mut self) -> Result<(), Errno> {
        Ok(self.vcpu.mark_stopped()?)
    }

    fn translate(&mut self, translation: &mut KvmTranslation) {
        // Stock KVM says writable and not user whatever the tables hold. The walk knows it, so it
        // is told.
        if let Some((gpa, writable, user)) = self.vcpu.translate_address(translation.linear_address)
        {
            translation.physical_address = gpa;
            translation.valid = 1;
            translation.writeable = writable.into();
            translation.usermode = user.into();
        }
    }

    fn nested_state_size(&self) -> Option<usize> {
        self.vcpu.nested_state_size()
    }

    fn nested_state(&mut self, into: &mut [u8]) -> Result<(), Errno> {
        Ok(self.vcpu.nested_state(into)?)
    }

    fn set_nested_state(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        Ok(self.vcpu.set_nested_state(bytes)?)
    }

    fn set_guest_debug(&mut self, debug: &KvmGuestDebug) -> Result<(), Errno> {
        // Injection is an act and no setting: kept in the control word it would be done again. #DB
        // goes before #BP where both are asked for, as in stock KVM.
        let injects = debug.control & (GUESTDBG_INJECT_DB | GUESTDBG_INJECT_BP);
        if injects != 0 {
            self.vcpu.inject_debug(injects & GUESTDBG_INJECT_DB == 0);
        }
        self.vcpu.set_guest_debug(debug.control & !injects, debug.debugreg);
        Ok(())
    }

    fn setup_mce(&mut self, mcg_cap: u64) -> Result<(), Errno> {
        Ok(self.vcpu.set_up_mce(mcg_cap)?)
    }

    fn set_mce(&mut self, mce: &KvmX86Mce) -> Result<(), Errno> {
        let report = McReport {
            status: mce.status,
            address: mce.addr,
            misc: mce.misc,
            mcg_status: mce.mcg_status,
            bank: mce.bank,
        };
        Ok(self.vcpu.inject_mce(&report)?)
    }
}

impl<B: Backend> core::fmt::Debug for VcpuFile<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "VcpuFile({:?})", self.run.hpa())
    }
}
