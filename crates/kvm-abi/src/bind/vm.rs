//! A VM file: the VM that user space holds by a descriptor.

use core::ffi::CStr;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::Relaxed;

use ::vm::irq::{self, Source};
use ::vm::vcpus::{MAX_VCPU_ID, MAX_VCPUS};
use ::vm::{
    Vm, VmRef,
    settings::quirk,
    vcpu_shared::{SharedVcpu, VcpuShared},
};
use host::file::Pointers;
use host::{
    Arc, Fault,
    file::{FileObject, NewFile},
};

use irqchip::{
    DestRules,
    lapic::{CpuRole, Lint0},
    pic,
};

use mmu::AddressSpace;

use super::{Host, MakeBackend, VcpuFile, belongs_to_caller, convert, stats};
use crate::caps::Offer;
use crate::dispatch::{self, Irqchip, MemoryRegion, Setting, SlotId, VmOps};
use crate::errno::Errno;
use crate::uapi::capability::{X2APIC_API_DISABLE_BROADCAST_QUIRK, X2APIC_API_USE_32BIT_IDS};
use crate::uapi::clock::{CLOCK_REALTIME, KvmClockData};
use crate::uapi::event::*;
use crate::uapi::irqchip::*;
use crate::uapi::memory::KvmCoalescedMmioZone;

/// Where the identity-map page lies unless the VMM says otherwise (KVM API §4.41).
const DEFAULT_IDENTITY_MAP: u64 = 0xfffb_c000;

/// How destinations are understood, as KVM_CAP_X2APIC_API says.
fn rules_of(flags: u64) -> DestRules {
    DestRules {
        wide: flags & X2APIC_API_USE_32BIT_IDS != 0,
        no_broadcast_quirk: flags & X2APIC_API_DISABLE_BROADCAST_QUIRK != 0,
    }
}

/// The chip that KVM_GET_IRQCHIP and KVM_SET_IRQCHIP name: one of the two PICs.
fn pic_of(which: u32) -> pic::Which {
    // The dispatch has refused every other number.
    if which == IRQCHIP_PIC_SLAVE { pic::Which::Slave } else { pic::Which::Master }
}

/// A VM by its file. The vCPUs hold the VM too: it lives until the last of the files is closed.
pub struct VmFile<M> {
    vm: VmRef,
    host: &'static Host,
    /// The thread that made it.
    tid: u32,
    make: PhantomData<M>,
}

impl<M: MakeBackend> VmFile<M> {
    /// A file for `vm`, which this thread has made.
    pub fn new(vm: VmRef, host: &'static Host) -> Self {
        // The thread that makes the VM: statistics are named after it.
        Self { vm, host, tid: host::task::current_tid(), make: PhantomData }
    }

    /// Shows the VM in debugfs, by the descriptor that it will have.
    pub(super) fn show_in_debugfs(&self, fd: i32) {
        self.vm.debug.add_vm(self.tid, fd, self.vm.statistics());
    }

    /// Whether there is no vCPU; what may be set only before the first is set under the same lock.
    fn without_vcpus<R>(&self, set: impl FnOnce(&Vm) -> R) -> Result<R, Errno> {
        // KVM_CREATE_VCPU holds the lock until its vCPU counts. Without it a vCPU could come
        // between the look and the setting, with the old value.
        let _making = self.vm.making.lock();
        if self.vm.vcpus().count() != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(set(&self.vm))
    }

    /// A backend, out of line: it is large, and no other stack frame is to hold it.
    #[inline(never)]
    fn backend() -> Result<host::KBox<M::B>, host::NoMemory> {
        host::KBox::new(M::make()?)
    }

    /// The file of a vCPU, out of line because the hardware half is made on the stack.
    #[inline(never)]
    fn vcpu_file(&self, shared: &SharedVcpu) -> Result<Arc<VcpuFile<M::B>>, Errno> {
        // The backend on the heap first: what follows is made beside it, and not on one stack frame
        // with it.
        let file = VcpuFile::new(Self::backend()?, shared.clone(), self.vm.clone(), self.host)?;
        Ok(Arc::new(file)?)
    }

    fn split_irqchip(&self, reserved: u32) -> Result<(), Errno> {
        let _making = self.vm.making.lock();
        // Stock KVM does not tell the two apart here.
        if self.vm.irq().kind() != Irqchip::None || self.vm.vcpus().count() != 0 {
            return Err(Errno::EEXIST);
        }
        Ok(self.vm.irq().create_split(reserved)?)
    }

    fn set_max_vcpu_id(&self, limit: u32) -> Result<(), Errno> {
        let _making = self.vm.making.lock();
        // Under the lock: KVM_CREATE_VCPU compares with both.
        let settings = &self.vm.settings;
        let present = settings.max_vcpu_id.load(Relaxed);
        // An id equal to the limit passes, though no vCPU can have it: stock KVM compares so.
        if settings.boot_cpu_id.load(Relaxed) > limit {
            return Err(Errno::EINVAL);
        }
        // Stock KVM keeps 0 for "not set", which 0 is equal to.
        let unset = present == MAX_VCPU_ID;
        if present == limit || (unset && limit == 0) {
            return Ok(());
        }
        // It can be set once, before there are vCPUs. The default tells that it has not been.
        if !unset || limit == 0 || self.vm.vcpus().count() != 0 {
            return Err(Errno::EINVAL);
        }
        settings.max_vcpu_id.store(limit, Relaxed);
        Ok(())
    }

    fn disable_exits(&self, bits: u64) -> Result<(), Errno> {
        let _making = self.vm.making.lock();
        // What exits is written into the control block when a vCPU is made (KVM API §7.13).
        if self.vm.vcpus().count() != 0 {
            return Err(Errno::EINVAL);
        }
        // Added: an exit that was given up is not had back, as on stock KVM.
        self.vm.settings.disable_exits.fetch_or(bits, Relaxed);
        Ok(())
    }

    fn set_bus_cycle(&self, ns: u32) -> Result<(), Errno> {
        let _making = self.vm.making.lock();
        // Asked first, as in stock KVM: without local APICs it is ENXIO, vCPUs or not.
        if self.vm.irq().kind() == Irqchip::None {
            return Err(Errno::ENXIO);
        }
        if self.vm.vcpus().count() != 0 {
            return Err(Errno::EINVAL);
        }
        self.vm.settings.apic_bus_cycle_ns.store(ns, Relaxed);
        Ok(())
    }

    fn dest_rules(&self) -> DestRules {
        rules_of(self.vm.settings.x2apic_api.load(Relaxed))
    }
}

impl<M: MakeBackend> FileObject for VmFile<M> {
    const NAME: &'static CStr = c"kvm-vm";

    fn ioctl(this: &Arc<Self>, command: u32, argument: u64, caller: Pointers) -> i64 {
        // By the calling thread and not by the file: one process may make 32-bit calls and others
        // on one descriptor.
        let of = match caller {
            Pointers::Bits32 => dispatch::vm_compat,
            Pointers::Bits64 => dispatch::vm,
        };
        dispatch::code(of(&**this, command, argument))
    }

    fn released(&self) {
        // Not left to the end of the VM, which vCPUs' files may keep: a VMM that makes its VM anew uses the same eventfds,
        // and the kernel may allow an eventfd one irqfd alone. A KVM_IRQFD of another thread holds the file, so none comes
        // behind this.
        self.vm.irq().release_irqfds();
    }
}

impl<M: MakeBackend> VmOps for VmFile<M> {
    fn belongs_to_caller(&self) -> bool {
        belongs_to_caller(&self.vm)
    }

    fn offer(&self) -> &Offer {
        &self.host.offer
    }

    fn stats_file(&self) -> Result<i32, Errno> {
        stats::of_vm(self.vm.statistics(), self.tid)
    }

    fn bus_cycle_ns(&self) -> u32 {
        // 0: the VMM has said nothing, and a cycle is the nanosecond of all earlier KVMs.
        self.vm.settings.apic_bus_cycle_ns.load(Relaxed).max(1)
    }

    fn created_vcpus(&self) -> u32 {
        self.vm.vcpus().count()
    }

    fn create_vcpu(&self, id: u32) -> Result<i32, Errno> {
        let vm = &self.vm;
        let _making = vm.making.lock();
        // The index is the place in the list, and vCPUs never go: it stays its own.
        let index = vm.vcpus().count();
        let most = self.host.offer.max_vcpus.min(MAX_VCPUS as u32);
        if index >= most || id >= vm.settings.max_vcpu_id.load(Relaxed) {
            return Err(Errno::EINVAL);
        }
        // The lock keeps the answer true until the vCPU is in the list.
        if vm.vcpus().by_id(id).is_some() {
            return Err(Errno::EEXIST);
        }
        let role = CpuRole::bootstrap_if(id == vm.settings.boot_cpu_id.load(Relaxed));
        // Decided here for ever: the irqchip cannot be made once there are vCPUs.
        let lapic = vm.irq().kind() != Irqchip::None;
        let shared = VcpuShared::new(id, index, role, lapic)?;
        // Before others can see the APIC: a timer that runs has one pace.
        shared.lapic.set_bus_cycle_ns(vm.settings.apic_bus_cycle_ns.load(Relaxed));
        if !vm.settings.has_quirk(quirk::LINT0_REENABLED) {
            // Made as firmware leaves it; without the quirk it is as the manuals have it (SDM vol.
            // 3A §10.4.7.1).
            shared.lapic.reset(role, Lint0::Masked);
        }
        let file = NewFile::new(self.vcpu_file(&shared)?, Some(id)).map_err(Errno::from_file)?;
        // Last what cannot be undone: debugfs keeps it until the VM goes.
        vm.add_vcpu(shared.clone())?;
        vm.debug.add_vcpu(&shared, self.host.offer.tsc_ratio_bits());
        // Only now: destinations are looked up among the vCPUs in the list.
        vm.irq().apic_changed();
        Ok(file.install())
    }

    fn set_memory_region(&self, region: &MemoryRegion) -> Result<(), Errno> {
        // System-management mode has memory of its own: the same numbers name other slots there.
        let memory = self.vm.memory_in(region.slot.space);
        Ok(memory.set_region(&convert::region(region), &**self.vm)?)
    }

    fn dirty_log(
        &self,
        slot: SlotId,
        out: impl FnOnce(&[u64]) -> Result<(), Fault>,
    ) -> Result<(), Errno> {
        // With manual protection KVM_CLEAR_DIRTY_LOG takes the bits, and this only shows them.
        let protect = self.vm.settings.manual_dirty_log.load(Relaxed) == 0;
        // By number and not by a slot that was looked up: it may be gone, and the memory's lock
        // says.
        let memory = self.vm.memory_in(slot.space);
        Ok(memory.dirty_log(slot.number.into(), protect, &**self.vm, out)?)
    }

    fn clear_dirty_log(
        &self,
        slot: SlotId,
        first: u64,
        pages: u32,
        read: impl FnOnce(&mut [u64]) -> Result<(), Fault>,
    ) -> Result<(), Errno> {
        let memory = self.vm.memory_in(slot.space);
        Ok(memory.clear_dirty_log(slot.number.into(), first, pages.into(), &**self.vm, read)?)
    }

    fn irqchip(&self) -> Irqchip {
        self.vm.irq().kind()
    }

    fn create_irqchip(&self) -> Result<(), Errno> {
        let _making = self.vm.making.lock();
        if self.vm.irq().kind() != Irqchip::None {
            return Err(Errno::EEXIST);
        }
        // Such a vCPU was made without a local APIC (KVM API §4.24).
        if self.vm.vcpus().count() != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(self.vm.irq().create(Irqchip::Full)?)
    }

    fn pic(&self, which: u32) -> Result<KvmPicState, Errno> {
        Ok(convert::pic(&self.vm.irq().pic(pic_of(which))))
    }

    fn set_pic(&self, which: u32, state: &KvmPicState) -> Result<(), Errno> {
        self.vm.irq().set_pic(pic_of(which), &convert::from_pic(state));
        Ok(())
    }

    fn ioapic(&self) -> Result<KvmIoapicState, Errno> {
        Ok(convert::ioapic(&self.vm.irq().ioapic()))
    }

    fn set_ioapic(&self, state: &KvmIoapicState) -> Result<(), Errno> {
        self.vm.irq().set_ioapic(&convert::from_ioapic(state));
        Ok(())
    }

    fn create_pit(&self, flags: u32) -> Result<(), Errno> {
        let _making = self.vm.making.lock();
        self.vm.irq().create_pit(flags & PIT_SPEAKER_DUMMY != 0).map_err(|error| match error {
            // ENOENT here; ENXIO of every other command of a PIT that is missing, as in stock KVM.
            irq::IrqError::Missing => Errno::ENOENT,
            error => error.into(),
        })
    }

    fn has_pit(&self) -> bool {
        self.vm.irq().has_pit()
    }

    fn pit(&self) -> Result<KvmPitState2, Errno> {
        Ok(convert::pit(&self.vm.irq().pit().ok_or(Errno::ENXIO)?))
    }

    fn set_pit(&self, channels: &[KvmPitChannelState; 3], flags: Option<u32>) -> Result<(), Errno> {
        let flags = match flags {
            Some(flags) => flags,
            // KVM_SET_PIT has no flags; what KVM_SET_PIT2 set stays.
            None => self.pit()?.flags,
        };
        Ok(self.vm.irq().set_pit(&convert::from_pit(channels, flags))?)
    }

    fn set_pit_reinject(&self, on: bool) -> Result<(), Errno> {
        Ok(self.vm.irq().set_pit_reinject(on)?)
    }

    fn set_irq_line(&self, gsi: u32, level: bool) -> Result<i32, Errno> {
        // User space is one source of several: its 0 does not lower what an irqfd or the PIT holds
        // up.
        Ok(self.vm.irq().set_irq_line(gsi, Source::User, level).code())
    }

    fn signal_msi(&self, msi: &KvmMsi) -> Result<i32, Errno> {
        let msi = convert::from_msi(msi);
        // At each message: a route is checked when it is set, and this one comes with none.
        if !msi.valid(self.dest_rules()) {
            return Err(Errno::EINVAL);
        }
        Ok(self.vm.irq().signal_msi(&msi).code())
    }

    fn set_routes(&self, routes: &[KvmIrqRoutingEntry]) -> Result<(), Errno> {
        // With a split irqchip the pins are the VMM's, and only messages are ours.
        let pins = self.irqchip() == Irqchip::Full;
        Ok(self.vm.irq().set_routes(&convert::from_routes(routes, pins)?)?)
    }

    fn assign_ioeventfd(&self, what: &KvmIoeventfd) -> Result<(), Errno> {
        let event = convert::from_ioeventfd(what)?;
        Ok(self.vm.irq().ioeventfds().assign(event, what.fd)?)
    }

    fn deassign_ioeventfd(&self, what: &KvmIoeventfd) -> Result<(), Errno> {
        let event = convert::from_ioeventfd(what)?;
        Ok(self.vm.irq().ioeventfds().deassign(event, what.fd)?)
    }

    fn register_zone(&self, zone: &KvmCoalescedMmioZone) -> Result<(), Errno> {
        Ok(self.vm.irq().register_zone(convert::from_zone(zone))?)
    }

    fn unregister_zones(&self, zone: &KvmCoalescedMmioZone) -> Result<(), Errno> {
        Ok(self.vm.irq().unregister_zones(convert::from_zone(zone))?)
    }

    fn assign_irqfd(&self, what: &KvmIrqfd) -> Result<(), Errno> {
        // Without the flag the second descriptor means nothing, and is not looked up.
        let resample = what.flags & IRQFD_FLAG_RESAMPLE != 0;
        let resamplefd = resample.then_some(what.resamplefd as i32);
        Ok(self.vm.irq().assign_irqfd(what.fd as i32, what.gsi, resamplefd)?)
    }

    fn deassign_irqfd(&self, what: &KvmIrqfd) -> Result<(), Errno> {
        Ok(self.vm.irq().deassign_irqfd(what.fd as i32, what.gsi)?)
    }

    fn set_tss_addr(&self, addr: u32) -> Result<(), Errno> {
        // Kept, and not used: real mode is run by the CPU (unrestricted guest) or, with `ept=0`, by
        // the emulator.
        self.vm.settings.tss_addr.store(addr, Relaxed);
        Ok(())
    }

    fn set_nr_mmu_pages(&self, pages: u64) -> Result<(), Errno> {
        // SMM's address space has shadow pages of its own.
        for space in AddressSpace::ALL {
            self.vm.memory_in(space).set_shadow_limit(pages, &**self.vm);
        }
        Ok(())
    }

    fn set_identity_map_addr(&self, addr: u64) -> Result<(), Errno> {
        // 0 asks for the default (KVM API §4.40).
        let addr = if addr == 0 { DEFAULT_IDENTITY_MAP } else { addr };
        self.without_vcpus(|vm| vm.settings.identity_map.store(addr, Relaxed))
    }

    fn set_boot_cpu_id(&self, id: u32) -> Result<(), Errno> {
        self.without_vcpus(|vm| {
            // As with KVM_CAP_MAX_VCPU_ID, stock KVM lets the limit itself through.
            if id > vm.settings.max_vcpu_id.load(Relaxed) {
                return Err(Errno::EINVAL);
            }
            vm.settings.boot_cpu_id.store(id, Relaxed);
            Ok(())
        })
        // EBUSY as in stock KVM, whose other settings that come too late answer EINVAL.
        .map_err(|_| Errno::EBUSY)?
    }

    fn clock(&self) -> KvmClockData {
        let data = self.vm.clock_data();
        KvmClockData {
            clock: data.clock,
            flags: data.flags,
            pad0: 0,
            realtime: data.realtime,
            host_tsc: data.host_tsc,
            pad: [0; 4],
        }
    }

    fn set_clock(&self, data: &KvmClockData) -> Result<(), Errno> {
        // The other flags are taken and ignored (KVM API §4.30): what KVM_GET_CLOCK gave can be
        // given back whole.
        let realtime = data.flags & CLOCK_REALTIME != 0;
        self.vm.set_clock(data.clock, realtime.then_some(data.realtime));
        Ok(())
    }

    fn tsc_khz(&self) -> u32 {
        self.vm.tsc_khz()
    }

    fn set_tsc_khz(&self, khz: u32) -> Result<(), Errno> {
        // As of a vCPU: two hosts never calibrate alike, and a VMM gives back what another host's KVM told.
        if !self.host.offer.tsc_scaling && !vcpu::is_close(khz, self.host.offer.tsc_khz) {
            return Err(Errno::EINVAL);
        }
        // Only for vCPUs to come: one that is there has its own rate.
        self.without_vcpus(|vm| vm.settings.tsc_khz.store(khz, Relaxed))
    }

    fn set_msr_filter(&self, filter: ::vm::msr_filter::MsrFilter) -> Result<(), Errno> {
        Ok(self.vm.set_msr_filter(filter)?)
    }

    fn set(&self, setting: Setting) -> Result<(), Errno> {
        let settings = &self.vm.settings;
        match setting {
            Setting::SplitIrqchip(reserved) => return self.split_irqchip(reserved),
            Setting::X2apicApi(bits) => {
                // Two that add bits at a time must not leave the rules of one of them.
                let _making = self.vm.making.lock();
                // Bits are only added, as in stock KVM.
                settings.x2apic_api.fetch_or(bits, Relaxed);
                let flags = settings.x2apic_api.load(Relaxed);
                self.vm.irq().set_dest_rules(rules_of(flags));
            }
            Setting::ApicBusCycles(ns) => return self.set_bus_cycle(ns),
            // In place of the earlier ones, as in stock KVM 6.12: each call names all that are to
            // be off.
            Setting::DisableQuirks(bits) => settings.quirks_off.store(bits, Relaxed),
            Setting::ExceptionPayload(on) => settings.exception_payload.store(on, Relaxed),
            Setting::TripleFaultEvent(on) => settings.triple_fault_event.store(on, Relaxed),
            Setting::HaltPoll(ns) => settings.halt_poll_ns.store(ns.into(), Relaxed),
            Setting::MaxVcpuId(limit) => return self.set_max_vcpu_id(limit),
            Setting::UserSpaceMsr(bits) => settings.user_space_msr.store(bits as u32, Relaxed),
            Setting::ManualDirtyLog(bits) => settings.manual_dirty_log.store(bits, Relaxed),
            Setting::MsrPlatformInfo(on) => settings.platform_info_hidden.store(!on, Relaxed),
            Setting::DisableExits(bits) => return self.disable_exits(bits),
            Setting::ExitOnEmulationFailure(on) => {
                settings.exit_on_emulation_failure.store(on, Relaxed);
            }
        }
        Ok(())
    }
}

impl<M> core::fmt::Debug for VmFile<M> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "VmFile({} vCPUs)", self.vm.vcpus().count())
    }
}
