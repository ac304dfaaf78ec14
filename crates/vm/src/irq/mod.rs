//! The interrupt half of a VM: controllers, routes, irqfds, ioeventfds, coalesced writes, and the
//! devices of the interrupt system that a guest reaches by port or by address.
//!
//! Why PIC, I/O APIC, PIT and routes stand behind one lock ([`IrqCore`]): one GSI drives pins of several
//! controllers, a pin has several sources, and the end of an interrupt changes lines again. With a lock for each,
//! two CPUs that raise and lower a line could be seen in one order by the PIC and in the other by the I/O APIC, and
//! one of them would keep a level that is over.
//!
//! Why that lock spins with interrupts off: an eventfd is signalled, and the PIT's timer fires, in hard interrupt
//! context. So nothing under it allocates, sleeps or walks what a VMM can make long (ADR 40).
//!
//! Why messages to local APICs need no lock: a local APIC is all atomics, and a sender only adds to it
//! (`irqchip::lapic`). An IPI takes no lock at all, and an irqfd's MSI takes this one only to look up its route.
//!
//! Why the ends of interrupts come back here at all: a level line is sent again if it is still high, an irqfd
//! with a resample eventfd lowers its line only then, and a PIT that makes up for lost ticks waits for them.

mod coalesced;
mod controllers;
mod deliver;
mod devices;
mod ioeventfd;
mod irqfd;
mod resample;
#[cfg(test)]
mod routes_tests;
#[cfg(test)]
mod steps_tests;
#[cfg(test)]
mod tests;

pub use self::{
    coalesced::{Coalesced, MAX_ZONES, RING_ENTRIES, Zone, ZoneError},
    controllers::{IrqCore, Irqchip, SharedCore, Source},
    ioeventfd::{IoEvent, IoEventError, IoEventFds, MAX_AT_ADDRESS, MAX_IOEVENTFDS, Space},
    irqfd::{IrqFdError, IrqFds, disconnect_in_order},
    resample::{MAX_RESAMPLERS, Owing},
};

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use host::{Arc, KBox, NoMemory, clock};
use irqchip::pic::Which;
use irqchip::{
    DestRules, IoApicState, IrqMessage, LineStatus, Msi, PicState, Pit, PitState, Route, Routing,
    RoutingError, Shorthand, lapic::Accepted,
};
use x86::Vector;

use crate::{
    vcpu_shared::{Request, VcpuShared},
    vcpus::VcpuTable,
};

/// Why controllers cannot be made or reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqError {
    /// The controllers are there already (EEXIST).
    Exists,
    /// There are no controllers (ENXIO, or ENOENT for a PIT without a PIC).
    Missing,
    /// No memory (ENOMEM).
    NoMemory,
}

impl From<NoMemory> for IrqError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

impl From<RoutingError> for IrqError {
    fn from(_: RoutingError) -> Self {
        // The standard table is valid.
        Self::NoMemory
    }
}

/// Who hears of an end of interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ended {
    /// The I/O APIC here, if anybody.
    Here(Owing),
    /// The VMM's I/O APIC hears of it.
    ForVmm,
}

/// Interrupt controllers, routes and eventfds of one VM.
pub struct VmIrq {
    core: SharedCore,
    irqfds: IrqFds,
    ioeventfds: IoEventFds,
    coalesced: Coalesced,
    /// Port 0x61 is ours (KVM_PIT_SPEAKER_DUMMY).
    speaker: AtomicBool,
    /// There is a PIT.
    pit: AtomicBool,
}

impl Drop for VmIrq {
    fn drop(&mut self) {
        // The handlers of eventfds hold the core: without this they would outlive the VM and raise
        // interrupts of nobody. First they: one that fires behind the cancel would arm the timer again.
        self.release_irqfds();
        self.core.cancel();
    }
}

impl VmIrq {
    /// No controllers, no routes. The table of vCPUs is the VM's own.
    ///
    /// # Errors
    /// [`NoMemory`].
    #[inline(never)]
    pub fn new(vcpus: Arc<VcpuTable>) -> Result<Self, NoMemory> {
        Ok(Self {
            core: IrqCore::shared(vcpus)?,
            irqfds: IrqFds::new(),
            ioeventfds: IoEventFds::new()?,
            coalesced: Coalesced::new()?,
            speaker: AtomicBool::new(false),
            pit: AtomicBool::new(false),
        })
    }

    /// Which controllers there are.
    #[inline]
    pub fn kind(&self) -> Irqchip {
        self.core.kind()
    }

    /// Whether the 8259A is ours.
    #[inline]
    pub fn has_pic(&self) -> bool {
        self.kind() == Irqchip::Full
    }

    /// KVM_CREATE_IRQCHIP, or the local half of it. The VM's making lock is held.
    ///
    /// # Errors
    /// `Exists`, `NoMemory`.
    pub fn create(&self, kind: Irqchip) -> Result<(), IrqError> {
        if self.kind() != Irqchip::None {
            return Err(IrqError::Exists);
        }
        if kind == Irqchip::Full {
            let mut routing = Routing::standard()?;
            // Under the lock, as an eventfd may be there before the controllers; the old table is
            // freed outside of it.
            core::mem::swap(&mut self.core.state.lock().routing, &mut routing);
        }
        // Last, with release order: who sees the kind finds the routes.
        self.core.set_kind(kind);
        Ok(())
    }

    /// KVM_CAP_SPLIT_IRQCHIP: the local APICs alone. GSIs below `reserved` are the pins of the VMM's
    /// I/O APIC. The VM's making lock is held.
    ///
    /// # Errors
    /// `Exists`.
    pub fn create_split(&self, reserved: u32) -> Result<(), IrqError> {
        if self.kind() != Irqchip::None {
            return Err(IrqError::Exists);
        }
        // Before the kind: a vCPU that sees a split irqchip looks at the reserved pins.
        self.core.reserve(reserved);
        self.create(Irqchip::Split)
    }

    /// KVM_CREATE_PIT2. `speaker`: port 0x61 too. The VM's making lock is held.
    ///
    /// # Errors
    /// `Exists`; `Missing` without a PIC.
    pub fn create_pit(&self, speaker: bool) -> Result<(), IrqError> {
        // Counter 0 drives a line of the PIC and of the I/O APIC; without them it would interrupt nobody.
        if self.kind() != Irqchip::Full {
            return Err(IrqError::Missing);
        }
        // Allocated before the lock, under which nothing may be.
        let pit = KBox::new(Pit::new(clock::monotonic_ns()))?;
        let mut state = self.core.state.lock();
        if state.pit.is_some() {
            return Err(IrqError::Exists);
        }
        state.pit = Some(pit);
        // An APIC pin reports ends only where somebody listens, and the PIT now does.
        state.refresh_listeners();
        drop(state);
        // Hints for the exit path: who follows them looks under the lock.
        self.speaker.store(speaker, Relaxed);
        self.pit.store(true, Relaxed);
        Ok(())
    }

    /// Whether there is a PIT.
    pub fn has_pit(&self) -> bool {
        self.pit.load(Relaxed)
    }

    /// How destinations of messages are understood from now on (KVM_CAP_X2APIC_API).
    pub fn set_dest_rules(&self, rules: DestRules) {
        self.core.set_dest_rules(rules);
    }

    /// KVM_SET_GSI_ROUTING: replaces all routes. Process context.
    ///
    /// # Errors
    /// See [`Routing::new`].
    pub fn set_routes(&self, routes: &[Route]) -> Result<(), RoutingError> {
        // Built and checked without the lock: as large as the VMM likes.
        let mut routing = Routing::new(routes, self.core.dest_rules())?;
        {
            let mut state = self.core.state.lock();
            core::mem::swap(&mut state.routing, &mut routing);
            state.refresh_listeners();
        }
        // What was sent here may go elsewhere from now on, and to another vector, however long the wait takes.
        self.ask_to_follow_routes();
        // Behind this call no interrupt comes by the old routes.
        self.core.wait_for_senders();
        // What came by them behind the first look is found by another: its end may be waited for by the new ones.
        self.ask_to_follow_routes();
        // The old table is freed here, without the lock.
        Ok(())
    }

    fn ask_to_follow_routes(&self) {
        if self.kind() == Irqchip::Split {
            self.core.vcpus().request_all(Request::Routes);
        }
    }

    /// KVM_IRQ_LINE: user space drives a GSI.
    pub fn set_irq_line(&self, gsi: u32, source: Source, level: bool) -> LineStatus {
        self.core.set_line(gsi, source, level)
    }

    /// Sends a message as KVM_SIGNAL_MSI asks (KVM API §4.70).
    pub fn signal_msi(&self, msi: &Msi) -> LineStatus {
        self.core.signal_msi(msi)
    }

    /// Delivers an IPI of `from`. Any context.
    #[inline]
    pub fn send_ipi(&self, from: &VcpuShared, message: &IrqMessage) -> LineStatus {
        deliver::deliver(self.core.vcpus(), Some(from), message)
    }

    /// KVM_HC_SEND_IPI: one message to each of the ids; how many took it.
    pub fn send_pv_ipi(&self, call: &pv::SendIpi) -> u64 {
        // A mode that does not exist addresses nobody.
        let Some(delivery) = irqchip::DeliveryMode::from_bits(call.delivery_mode()) else {
            return 0;
        };
        let mut count = 0;
        for id in call.apic_ids() {
            let message = IrqMessage {
                delivery,
                shorthand: Shorthand::None,
                ..IrqMessage::fixed(Vector(call.vector()), id)
            };
            // 0xff is an id here, like any other.
            // What was pending already counts, as in stock KVM: the target will take it.
            count += match deliver::to_vcpu(self.core.vcpus(), &message) {
                LineStatus::Delivered(n) => u64::from(n),
                LineStatus::Coalesced => 1,
                LineStatus::Ignored => 0,
            };
        }
        count
    }

    /// A local APIC's EOI that the I/O APIC is to hear of. Not in hard interrupt context.
    pub fn eoi(&self, from: &VcpuShared, vector: Vector) -> Ended {
        // Ours, or nobody's: without an irqchip the core finds nothing to do.
        if self.kind() != Irqchip::Split {
            return Ended::Here(self.core.eoi(from, vector, |at| self.core.start(at)));
        }
        if from.lapic.awaits_end(vector) { Ended::ForVmm } else { Ended::Here(Owing::NOTHING) }
    }

    /// Tells those irqfds that wait ([`Owing`]). Process context with interrupts on.
    pub fn signal_owed(&self) {
        self.core.signal_owed();
    }

    /// The routes, or what a vCPU's local APIC takes of them, changed ([`Request::Routes`]): it reports
    /// the ends that the VMM's I/O APIC waits for. The vCPU alone calls this.
    pub fn follow_routes(&self, vcpu: &VcpuShared) {
        vcpu.lapic.await_ends(&self.core.ends_to_report(&vcpu.lapic));
    }

    /// Whether the 8259A has an interrupt; which vCPU takes it, its local APIC says. One load.
    #[inline]
    pub fn extint_pending(&self) -> bool {
        self.core.intr()
    }

    /// The acknowledge cycle: the 8259A's vector, `None` when the request has gone.
    #[must_use]
    pub fn extint_ack(&self) -> Option<(Vector, Owing)> {
        self.core.acknowledge_intr()
    }

    /// After [`EnableChanged`](irqchip::LapicEffect::EnableChanged),
    /// [`Lint0Changed`](irqchip::LapicEffect::Lint0Changed), a write of the APIC base, or a
    /// restored local APIC.
    pub fn apic_changed(&self) {
        self.core.apic_changed();
    }

    /// KVM_NMI: delivers to one vCPU whatever its local APIC says.
    pub fn nmi(&self, vcpu: &VcpuShared) {
        vcpu.deliver(Accepted::Nmi);
    }

    /// The ioeventfds of the VM.
    #[inline]
    pub fn ioeventfds(&self) -> &IoEventFds {
        &self.ioeventfds
    }

    /// The zones whose writes are coalesced.
    #[inline]
    pub fn coalesced(&self) -> &Coalesced {
        &self.coalesced
    }

    /// KVM_REGISTER_COALESCED_MMIO. Process context.
    ///
    /// # Errors
    /// All of [`ZoneError`].
    pub fn register_zone(&self, zone: Zone) -> Result<(), ZoneError> {
        self.coalesced.register(zone, |space, bits| self.ioeventfds.set_others(space, bits))
    }

    /// KVM_UNREGISTER_COALESCED_MMIO: removes every zone in which `range` lies. Process context.
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn unregister_zones(&self, range: Zone) -> Result<(), NoMemory> {
        self.coalesced.unregister(range, |space, bits| self.ioeventfds.set_others(space, bits))
    }

    /// KVM_IRQFD.
    ///
    /// # Errors
    /// See [`IrqFds::assign`].
    pub fn assign_irqfd(
        &self,
        fd: i32,
        gsi: u32,
        resamplefd: Option<i32>,
    ) -> Result<(), IrqFdError> {
        self.irqfds.assign(&self.core, fd, gsi, resamplefd)
    }

    /// KVM_IRQFD with the deassign flag.
    ///
    /// # Errors
    /// See [`IrqFds::deassign`].
    pub fn deassign_irqfd(&self, fd: i32, gsi: u32) -> Result<(), IrqFdError> {
        self.irqfds.deassign(&self.core, fd, gsi)
    }

    /// The VM's file was closed: no eventfd raises anything any more, and each may raise interrupts of another VM. The VM
    /// may live on with its vCPUs' files, and its timer goes on then. Process context.
    pub fn release_irqfds(&self) {
        self.irqfds.release(&self.core);
    }

    /// State of one 8259A.
    pub fn pic(&self, which: Which) -> PicState {
        self.core.state.lock().pic.save(which)
    }

    /// Sets the state of one 8259A.
    pub fn set_pic(&self, which: Which, new: &PicState) {
        let mut state = self.core.state.lock();
        state.pic.restore(which, new);
        // Restoring may raise or lower INTR, which a vCPU that runs has to hear of.
        self.core.update_pic(&mut state);
    }

    /// State of the I/O APIC.
    pub fn ioapic(&self) -> IoApicState {
        self.core.state.lock().ioapic.save()
    }

    /// Sets the state of the I/O APIC; what it asserts is delivered.
    pub fn set_ioapic(&self, new: &IoApicState) {
        let mut state = self.core.state.lock();
        state.ioapic.restore(new, &mut self.core.output());
    }

    /// State of the PIT, if there is one.
    pub fn pit(&self) -> Option<PitState> {
        let state = self.core.state.lock();
        state.pit.as_ref().map(|pit| pit.save(clock::monotonic_ns()))
    }

    /// Sets the state of the PIT. Process context.
    ///
    /// # Errors
    /// `Missing`.
    pub fn set_pit(&self, new: &PitState) -> Result<(), IrqError> {
        {
            let mut state = self.core.state.lock();
            let pit = state.pit.as_mut().ok_or(IrqError::Missing)?;
            pit.restore(new, clock::monotonic_ns());
        }
        // Outside of the lock: arming waits for a handler that runs, and that takes it.
        controllers::arm_timer(&self.core);
        Ok(())
    }

    /// KVM_REINJECT_CONTROL.
    ///
    /// # Errors
    /// `Missing`.
    pub fn set_pit_reinject(&self, on: bool) -> Result<(), IrqError> {
        let mut state = self.core.state.lock();
        // Without reinjection nobody counts acknowledgements, so the I/O APIC need not report them.
        state.pit.as_mut().ok_or(IrqError::Missing)?.set_reinject(on);
        state.refresh_listeners();
        Ok(())
    }
}
