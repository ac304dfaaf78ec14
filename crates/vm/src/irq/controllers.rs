//! The interrupt controllers behind their one lock, usable in hard interrupt context, and what
//! connects them: lines to pins, pins to messages, ends of interrupts back to their sources.
//!
//! Lock order: an eventfd's own lock, then this one. So resample eventfds are signalled after this
//! lock is released.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::*};

use alloc::vec::Vec;
use host::{
    Arc, KBox, NoMemory, clock,
    event::EventFd,
    sync::SpinLock,
    timer::{TimerHandler, WithTimer},
};
use irqchip::{
    Chip, IoApic, IrqMessage, Lapic, LineStatus, Msi, Pic, Pit, Routing, Target, Trigger,
    lapic::{Accepted, LocalVector},
};
use x86::{Vector, apic::VectorWords};

use super::deliver::deliver;
use crate::{vcpu_shared::VcpuShared, vcpus::VcpuTable};

/// Who drives an interrupt line; a line is high while any of them drives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Source {
    /// User space: KVM_IRQ_LINE and irqfds.
    User = 0,
    /// Irqfds with a resample eventfd.
    Resample = 1,
    /// The PIT.
    Pit = 2,
}

/// The GSI that the PIT's counter 0 drives.
const PIT_GSI: u32 = 0;
/// How long an I/O APIC pin that is asserted at every end of interrupt has to wait.
const STORM_DELAY_NS: u64 = 10_000_000;

/// Which controllers a VM has in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Irqchip {
    /// None: the VMM has them all.
    None = 0,
    /// The local APICs; the others are the VMM's (KVM_CAP_SPLIT_IRQCHIP).
    Split = 1,
    /// All.
    Full = 2,
}

/// An irqfd whose line goes down, and whose eventfd is signalled, when the guest ends the interrupt.
pub(super) struct Resampler {
    pub gsi: u32,
    pub event: Arc<EventFd>,
}

/// What the lock guards.
pub(super) struct State {
    pub pic: Pic,
    pub ioapic: IoApic,
    pub pit: Option<KBox<Pit>>,
    pub routing: Routing,
    pub resamplers: Vec<Resampler>,
    /// I/O APIC pins put off, and until when.
    put_off: u32,
    retry_ns: u64,
}

/// The shared half: vCPUs, eventfd handlers and the timer all hold it.
pub struct IrqCore {
    /// [`Irqchip`].
    kind: AtomicU8,
    /// The 8259A's INTR line, for a look without the lock.
    intr: AtomicBool,
    /// Some vCPU takes LINT0 as NMI, so the PIT is an NMI watchdog.
    nmi_watchdog: AtomicBool,
    /// MSIs have 32-bit destination ids.
    wide_dest: AtomicBool,
    /// GSIs below this are pins of the VMM's I/O APIC (KVM_CAP_SPLIT_IRQCHIP).
    reserved: AtomicU32,
    pub(super) state: SpinLock<State>,
    vcpus: Arc<VcpuTable>,
}

/// The core as its holders have it: with the timer of the PIT.
pub type SharedCore = Arc<WithTimer<IrqCore>>;

impl IrqCore {
    /// Out of line, because it is made on the stack.
    #[inline(never)]
    pub(super) fn shared(vcpus: Arc<VcpuTable>) -> Result<SharedCore, NoMemory> {
        WithTimer::new(Self {
            kind: AtomicU8::new(Irqchip::None as u8),
            intr: AtomicBool::new(false),
            nmi_watchdog: AtomicBool::new(false),
            wide_dest: AtomicBool::new(false),
            reserved: AtomicU32::new(0),
            state: SpinLock::new(State {
                pic: Pic::new(),
                ioapic: IoApic::new(),
                pit: None,
                routing: Routing::empty(),
                resamplers: Vec::new(),
                put_off: 0,
                retry_ns: 0,
            }),
            vcpus,
        })
    }

    /// Which controllers there are.
    #[inline]
    pub fn kind(&self) -> Irqchip {
        match self.kind.load(Acquire) {
            1 => Irqchip::Split,
            2 => Irqchip::Full,
            _ => Irqchip::None,
        }
    }

    pub(super) fn set_kind(&self, kind: Irqchip) {
        self.kind.store(kind as u8, Release);
    }

    pub(super) fn reserve(&self, gsis: u32) {
        self.reserved.store(gsis, Relaxed);
    }

    #[inline]
    pub(super) fn wide_dest(&self) -> bool {
        self.wide_dest.load(Relaxed)
    }

    pub(super) fn set_wide_dest(&self, wide: bool) {
        self.wide_dest.store(wide, Relaxed);
    }

    /// The vCPUs.
    #[inline]
    pub fn vcpus(&self) -> &VcpuTable {
        &self.vcpus
    }

    /// Sends an MSI.
    #[inline]
    pub fn signal_msi(&self, msi: &Msi) -> LineStatus {
        match msi.message(self.wide_dest()) {
            Some(message) => deliver(&self.vcpus, None, &message),
            None => LineStatus::Ignored,
        }
    }

    /// Drives a GSI. Any context.
    pub fn set_line(&self, gsi: u32, source: Source, level: bool) -> LineStatus {
        let mut state = self.state.lock();
        let status = self.drive(&mut state, gsi, source, level);
        self.settle(&mut state);
        status
    }

    /// An edge on a GSI: high and low again. Any context.
    pub fn pulse(&self, gsi: u32) -> LineStatus {
        let mut state = self.state.lock();
        if let Some(msi) = state.routing.msi(gsi) {
            drop(state);
            return self.signal_msi(&msi);
        }
        let status = self.drive(&mut state, gsi, Source::User, true);
        self.drive(&mut state, gsi, Source::User, false);
        self.settle(&mut state);
        status
    }

    /// One step of [`set_line`](Self::set_line): all targets of the GSI.
    pub(super) fn drive(
        &self,
        state: &mut State,
        gsi: u32,
        source: Source,
        level: bool,
    ) -> LineStatus {
        let State { pic, ioapic, routing, .. } = state;
        let mut sum = LineStatus::Ignored;
        let full = self.kind() == Irqchip::Full;
        for target in routing.targets(gsi) {
            let status = match target {
                Target::Msi(msi) if level => self.signal_msi(msi),
                Target::Pin { chip: Chip::IoApic, pin } if full => {
                    ioapic.set_line(*pin as usize, source as u8, level, &mut self.output())
                }
                Target::Pin { chip, pin } if full => {
                    let line = *pin as usize + if *chip == Chip::PicSlave { 8 } else { 0 };
                    pic.set_line(line, source as u8, level)
                }
                _ => LineStatus::Ignored,
            };
            sum = sum.and(status);
        }
        sum
    }

    /// Where the I/O APIC's messages go.
    pub(super) fn output(&self) -> impl FnMut(IrqMessage) -> bool {
        |message| matches!(deliver(&self.vcpus, None, &message), LineStatus::Delivered(_))
    }

    /// After the PIC may have changed: tells its sources what has ended, and the CPUs when INTR
    /// went high.
    pub(super) fn settle(&self, state: &mut State) {
        // An acknowledgement may make the PIT pulse its line, which the guest cannot end while we
        // hold the lock: this ends.
        let ended = state.pic.take_ended();
        if ended != 0 {
            for line in (0..16u32).filter(|line| ended & 1 << line != 0) {
                let chip = if line < 8 { Chip::PicMaster } else { Chip::PicSlave };
                if let Some(gsi) = state.routing.gsi_of_pin(chip, line & 7) {
                    self.acknowledged(state, gsi);
                }
            }
        }
        let intr = state.pic.output();
        if self.intr.load(Relaxed) != intr {
            self.intr.store(intr, SeqCst);
            if intr {
                self.kick_for_intr();
            }
        }
    }

    fn kick_for_intr(&self) {
        if let Some(vcpu) = self.vcpus.iter().find(|v| v.lapic.accepts_pic()) {
            vcpu.deliver(Accepted::ExtInt);
        }
    }

    /// The guest has ended an interrupt of this GSI.
    fn acknowledged(&self, state: &mut State, gsi: u32) {
        if gsi == PIT_GSI && state.pit.as_mut().is_some_and(|pit| pit.acked()) {
            self.pulse_pit(state);
        }
        if state.resamplers.iter().any(|r| r.gsi == gsi) {
            self.drive(state, gsi, Source::Resample, false);
        }
    }

    fn pulse_pit(&self, state: &mut State) {
        self.drive(state, PIT_GSI, Source::Pit, true);
        self.drive(state, PIT_GSI, Source::Pit, false);
        if self.nmi_watchdog.load(Relaxed) {
            for vcpu in self.vcpus.iter().filter(|v| v.lapic.lint0_is_nmi()) {
                vcpu.deliver(vcpu.lapic.deliver_local(LocalVector::Lint0));
            }
        }
    }

    /// Signals the resample eventfds of the GSIs in question. Without the lock: a listener may
    /// come back to us. Afterwards the line is up to the listener.
    fn signal_resamplers(&self, wanted: impl Fn(&Routing, u32) -> bool) {
        for skip in 0.. {
            let event = {
                let state = self.state.lock();
                let mut asked = state.resamplers.iter().filter(|r| wanted(&state.routing, r.gsi));
                asked.nth(skip).map(|r| r.event.clone())
            };
            match event {
                Some(event) => event.signal(1),
                None => return,
            }
        }
    }

    /// Whether the 8259A has an interrupt.
    #[inline]
    pub fn intr(&self) -> bool {
        self.intr.load(Relaxed)
    }

    /// The CPU's acknowledge cycle: the 8259A's vector, `None` when the request has gone.
    pub fn acknowledge_intr(&self) -> Option<Vector> {
        let mut state = self.state.lock();
        if !state.pic.output() {
            return None;
        }
        let vector = state.pic.acknowledge();
        // With automatic EOI the interrupt has ended already.
        let ended = self.ended_lines(&mut state);
        self.settle(&mut state);
        drop(state);
        self.signal_pic_resamplers(ended);
        Some(vector)
    }

    /// Lines that the PIC has reported ended and [`settle`](Self::settle) has not seen yet; left
    /// for it.
    pub(super) fn ended_lines(&self, state: &mut State) -> u16 {
        if state.resamplers.is_empty() { 0 } else { state.pic.ended() }
    }

    #[inline]
    pub(super) fn signal_pic_resamplers(&self, ended: u16) {
        if ended != 0 {
            self.signal_resamplers_of(ended);
        }
    }

    #[inline(never)]
    fn signal_resamplers_of(&self, ended: u16) {
        self.signal_resamplers(|routing, gsi| {
            (0..16u32).filter(|line| ended & 1 << line != 0).any(|line| {
                let chip = if line < 8 { Chip::PicMaster } else { Chip::PicSlave };
                routing.gsi_of_pin(chip, line & 7) == Some(gsi)
            })
        });
    }

    /// A local APIC ended `vector` and its effect said that the I/O APIC is to hear of it.
    pub fn eoi(&self, from: &VcpuShared, vector: Vector, start: impl FnOnce(u64)) {
        if self.kind() != Irqchip::Full {
            return;
        }
        let mut state = self.state.lock();
        let pins = state.ioapic.eoi(vector);
        if pins == 0 {
            drop(state);
            // A vector that has found another use: no more reports of it.
            from.lapic.forget_notify(vector);
            return;
        }
        for pin in (0..irqchip::ioapic::PINS as u32).filter(|pin| pins & 1 << pin != 0) {
            if let Some(gsi) = state.routing.gsi_of_pin(Chip::IoApic, pin) {
                self.acknowledged(&mut state, gsi);
            }
        }
        let put_off = state.ioapic.reassert(pins, &mut self.output());
        if put_off != 0 {
            state.put_off |= put_off;
            state.retry_ns = clock::monotonic_ns().saturating_add(STORM_DELAY_NS);
            if let Some(next) = state.next_expiry() {
                start(next);
            }
        }
        self.settle(&mut state);
        let resample = !state.resamplers.is_empty();
        drop(state);
        if resample {
            self.signal_resamplers(|routing, gsi| {
                (0..irqchip::ioapic::PINS as u32)
                    .filter(|pin| pins & 1 << pin != 0)
                    .any(|pin| routing.gsi_of_pin(Chip::IoApic, pin) == Some(gsi))
            });
        }
    }

    /// Vectors of whose ends at this local APIC the VMM's I/O APIC is to hear: those that its
    /// level-triggered pins send here, or sent here and that have not ended yet.
    pub fn ends_to_report(&self, lapic: &Lapic) -> VectorWords {
        let mut vectors = VectorWords::default();
        let (reserved, wide_dest) = (self.reserved.load(Relaxed), self.wide_dest());
        let state = self.state.lock();
        for target in state.routing.targets_below(reserved) {
            let Target::Msi(msi) = target else { continue };
            let Some(message) = msi.message(wide_dest) else { continue };
            let Vector(vector) = message.vector;
            if message.trigger == Trigger::Level
                && (lapic.matches(&message) || lapic.has_not_ended(message.vector))
            {
                vectors[usize::from(vector >> 6)] |= 1 << (vector & 63);
            }
        }
        vectors
    }

    /// A local APIC was enabled, disabled, or its LINT0 changed.
    pub fn apic_changed(&self) {
        let watchdog = self.vcpus.iter().any(|v| v.lapic.lint0_is_nmi());
        self.nmi_watchdog.store(watchdog, Relaxed);
        if self.intr() {
            self.kick_for_intr();
        }
    }
}

impl State {
    /// When the timer is needed next.
    pub(super) fn next_expiry(&self) -> Option<u64> {
        let pit = self.pit.as_ref().and_then(|pit| pit.next_expiry());
        let retry = (self.put_off != 0).then_some(self.retry_ns);
        match (pit, retry) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Asks the I/O APIC for reports of those ends of interrupt that somebody waits for.
    pub(super) fn refresh_listeners(&mut self) {
        let pit = self.pit.as_ref().is_some_and(|pit| pit.wants_acks());
        let mut pins = 0;
        for pin in 0..irqchip::ioapic::PINS as u32 {
            let Some(gsi) = self.routing.gsi_of_pin(Chip::IoApic, pin) else { continue };
            if (pit && gsi == PIT_GSI) || self.resamplers.iter().any(|r| r.gsi == gsi) {
                pins |= 1 << pin;
            }
        }
        self.ioapic.set_listeners(pins);
    }
}

impl TimerHandler for IrqCore {
    /// The PIT's counter 0 has run down, or a pin that was put off may go again.
    fn expired(&self) -> Option<u64> {
        let now = clock::monotonic_ns();
        let mut state = self.state.lock();
        if state.pit.as_mut().is_some_and(|pit| pit.expired(now)) {
            self.pulse_pit(&mut state);
        }
        if state.put_off != 0 && state.retry_ns <= now {
            let pins = core::mem::take(&mut state.put_off);
            state.ioapic.retry(pins, &mut self.output());
        }
        self.settle(&mut state);
        state.next_expiry()
    }
}

/// Winds the timer as the state now wants it. Sleepless, but not under the lock: waits for a
/// handler that is running.
pub(super) fn rewind(core: &SharedCore) {
    core.cancel();
    let state = core.state.lock();
    if let Some(next) = state.next_expiry() {
        core.start(next);
    }
}
