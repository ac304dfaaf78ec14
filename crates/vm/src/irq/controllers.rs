//! The interrupt controllers behind their one lock, usable in hard interrupt context, and what
//! connects them: lines to pins, pins to messages, ends of interrupts back to their sources.
//!
//! Lock order: an eventfd's own lock, then this one. So resample eventfds are signalled after this
//! lock is released.
//!
//! Why the PIC's INTR line is kept in a word of its own: each vCPU asks for it on its way into the guest, millions
//! of times a second. With the lock there they would all meet at one line of cache.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::*};

use host::{
    Arc, KBox, NoMemory, clock,
    srcu::Srcu,
    steps,
    sync::SpinLock,
    timer::{TimerHandler, WithTimer},
};
use irqchip::{
    Chip, DestRules, IoApic, IrqMessage, Lapic, LineStatus, Msi, Pic, Pit, Routing, Target,
    Trigger,
    lapic::{Accepted, LocalVector},
};
use x86::{Vector, apic::VectorWords};

use super::{
    deliver::deliver,
    resample::{AtOnce, Owed, Owing, Resamplers},
};
use crate::{vcpu_shared::VcpuShared, vcpus::VcpuTable};

/// Who drives an interrupt line; a line is high while any of them drives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Source {
    /// User space: KVM_IRQ_LINE and irqfds.
    User = 0,
    /// Irqfds with a resample eventfd.
    Resample = 1,
    /// The PIT's channel 0.
    Pit = 2,
}

/// The GSI that the PIT's counter 0 drives.
const PIT_GSI: u32 = 0;
/// Pins of the I/O APIC and lines of the PIC.
const PINS_OF_ALL: u32 = irqchip::ioapic::PINS as u32 + 16;
/// Routes that are looked through under the lock in one go.
const ROUTES_AT_ONCE: usize = 128;
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
    /// All controllers are the kernel's: KVM_CREATE_IRQCHIP.
    Full = 2,
}

/// What the lock guards.
pub(super) struct State {
    pub pic: Pic,
    pub ioapic: IoApic,
    pub pit: Option<KBox<Pit>>,
    pub routing: Routing,
    /// Whom the ends of interrupts are told.
    pub resamplers: Arc<Resamplers>,
    owed: Owed,
    /// I/O APIC pins put off, and until when.
    put_off: u32,
    retry_ns: u64,
}

impl State {
    /// The guest has unmasked a pin.
    pub(super) fn unmasked(&mut self, chip: Chip, pin: u32) {
        if let Some(pit) = &mut self.pit
            && self.routing.gsi_of_pin(chip, pin) == Some(PIT_GSI)
        {
            pit.forget_owed();
        }
    }
}

/// The shared half: vCPUs, eventfd handlers and the timer all hold it.
pub struct IrqCore {
    // Words of their own, for they are asked for on the exit path, which takes no lock.
    /// Which [`Irqchip`] there is.
    kind: AtomicU8,
    /// The 8259A's INTR line, for a look without the lock.
    intr: AtomicBool,
    /// Some vCPU takes LINT0 as NMI, so the PIT is an NMI watchdog.
    nmi_watchdog: AtomicBool,
    /// MSIs have 32-bit destination ids.
    wide_dest: AtomicBool,
    /// A byte of ones is an id to x2APICs.
    no_broadcast_quirk: AtomicBool,
    /// GSIs below this are pins of the VMM's I/O APIC (KVM_CAP_SPLIT_IRQCHIP).
    reserved: AtomicU32,
    pub(super) state: SpinLock<State>,
    /// Entered by who sends an MSI of the routes without the lock; who replaces the routes waits for them.
    sending: Srcu<()>,
    vcpus: Arc<VcpuTable>,
}

/// The core as its holders have it: with the timer of the PIT.
pub type SharedCore = Arc<WithTimer<IrqCore>>;

impl IrqCore {
    /// Out of line, because it is made on the stack.
    #[inline(never)]
    pub(super) fn shared(vcpus: Arc<VcpuTable>) -> Result<SharedCore, NoMemory> {
        // First, so that nothing made on the stack waits for it.
        let (resamplers, owed) = (Arc::new(Resamplers::default())?, Owed::new()?);
        let sending = Srcu::new(KBox::new(())?)?;
        WithTimer::new(Self {
            kind: AtomicU8::new(Irqchip::None as u8),
            intr: AtomicBool::new(false),
            nmi_watchdog: AtomicBool::new(false),
            wide_dest: AtomicBool::new(false),
            no_broadcast_quirk: AtomicBool::new(false),
            reserved: AtomicU32::new(0),
            state: SpinLock::new(State {
                pic: Pic::new(),
                ioapic: IoApic::new(),
                pit: None,
                routing: Routing::empty(),
                resamplers,
                owed,
                put_off: 0,
                retry_ns: 0,
            }),
            sending,
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
    pub(super) fn dest_rules(&self) -> DestRules {
        DestRules {
            wide: self.wide_dest.load(Relaxed),
            no_broadcast_quirk: self.no_broadcast_quirk.load(Relaxed),
        }
    }

    pub(super) fn set_dest_rules(&self, rules: DestRules) {
        self.wide_dest.store(rules.wide, Relaxed);
        self.no_broadcast_quirk.store(rules.no_broadcast_quirk, Relaxed);
        // The census too: whether an APIC answers by one byte decides who has to be asked.
        self.vcpus.census().set_wide(rules.wide);
        self.state.lock().ioapic.set_dest_rules(rules);
    }

    /// The vCPUs that interrupts go to.
    #[inline]
    pub fn vcpus(&self) -> &VcpuTable {
        &self.vcpus
    }

    /// Sends an MSI.
    #[inline]
    pub fn signal_msi(&self, msi: &Msi) -> LineStatus {
        // A message whose destination the rules do not know goes nowhere.
        match msi.message(self.dest_rules()) {
            Some(message) => deliver(&self.vcpus, None, &message),
            None => LineStatus::Ignored,
        }
    }

    /// Drives a GSI. Any context.
    pub fn set_line(&self, gsi: u32, source: Source, level: bool) -> LineStatus {
        let mut state = self.state.lock();
        let status = self.drive(&mut state, gsi, source, level);
        self.update_pic(&mut state);
        status
    }

    /// An edge on a GSI: high and low again. Any context.
    pub fn pulse(&self, gsi: u32) -> LineStatus {
        // Before the look at the routes. Not the lock to the end: all queues of a device would meet there, and a delivery
        // may wake a thread.
        let sending = self.sending.read();
        let mut state = self.state.lock();
        if let Some(msi) = state.routing.msi(gsi) {
            drop(state);
            #[cfg(test)]
            test::before_an_msi();
            // The common irqfd: an MSI has no line whose two changes would have to stay together.
            return self.signal_msi(&msi);
        }
        drop(sending);
        // Both steps under one lock: else the pin would show a level in between that nobody drives.
        let status = self.drive(&mut state, gsi, Source::User, true);
        self.drive(&mut state, gsi, Source::User, false);
        self.update_pic(&mut state);
        status
    }

    /// The routes have been replaced: waits until nothing is sent any more by those of before, as a VMM that gives the
    /// interrupt of before to another device relies on. Process context, no lock.
    pub(super) fn wait_for_senders(&self) {
        self.sending.wait();
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
        // Asked once for all targets: it never goes back.
        let full = self.kind() == Irqchip::Full;
        for target in steps::each(routing.targets(gsi)) {
            let status = match target {
                // Under the lock, though it needs none: the other targets of the GSI do.
                Target::Msi(msi) if level => self.signal_msi(msi),
                Target::Pin { chip: Chip::IoApic, pin } if full => {
                    ioapic.set_line(*pin as usize, source as u8, level, &mut self.output())
                }
                Target::Pin { chip, pin } if full => {
                    let line = *pin as usize + if *chip == Chip::PicSlave { 8 } else { 0 };
                    pic.set_line(line, source as u8, level)
                }
                // A message is sent when the line rises; without controllers no pin is there.
                Target::Msi(_) | Target::Pin { .. } => LineStatus::Ignored,
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
    pub(super) fn update_pic(&self, state: &mut State) {
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
            // SeqCst, before the kick: a vCPU that is about to enter looks at this word after it
            // has set its mode.
            self.intr.store(intr, SeqCst);
            if intr {
                self.kick_for_intr();
            }
        }
    }

    fn kick_for_intr(&self) {
        // The first that takes it, as in stock KVM: the 8259A has one INTR line.
        if let Some(vcpu) = self.vcpus.iter().find(|v| v.lapic.accepts_pic()) {
            vcpu.deliver(Accepted::ExtInt);
        }
    }

    /// The guest has ended an interrupt of this GSI.
    fn acknowledged(&self, state: &mut State, gsi: u32) {
        // Only the PIT's own GSI: it holds back ticks until the guest has taken the last.
        if gsi == PIT_GSI && state.pit.as_mut().is_some_and(|pit| pit.acked()) {
            self.pulse_pit(state);
        }
        // The line goes down before the resamplers are told: who still wants it raises it, and that
        // has to be seen as a new edge.
        if state.resamplers.of(gsi).is_some() {
            self.drive(state, gsi, Source::Resample, false);
        }
    }

    /// Pins of the I/O APIC that the guest has let go are asserted: a device whose irqfd has a resample eventfd may have let
    /// go long ago, for it is asked at the end of an interrupt alone, and the guest's handler may serve it behind that. So its
    /// line goes down, and it is asked: one that still wants the interrupt raises it again. Whom to tell.
    pub(super) fn resample(&self, state: &mut State, pins: u32) -> AtOnce {
        if state.resamplers.is_empty() {
            return AtOnce::default();
        }
        for pin in (0..irqchip::ioapic::PINS as u32).filter(|pin| pins & 1 << pin != 0) {
            if let Some(gsi) = state.routing.gsi_of_pin(Chip::IoApic, pin)
                && state.resamplers.of(gsi).is_some()
            {
                self.drive(state, gsi, Source::Resample, false);
            }
        }
        self.update_pic(state);
        self.resamplers_of(state, pins.into())
    }

    fn pulse_pit(&self, state: &mut State) {
        self.drive(state, PIT_GSI, Source::Pit, true);
        self.drive(state, PIT_GSI, Source::Pit, false);
        // An NMI watchdog of the guest's programs LINT0 of each CPU as NMI and lives by the PIT's
        // ticks.
        if self.nmi_watchdog.load(Relaxed) {
            for vcpu in self.vcpus.iter().filter(|v| v.lapic.lint0_is_nmi()) {
                vcpu.deliver(vcpu.lapic.deliver_local(LocalVector::Lint0));
            }
        }
    }

    /// Whom the end of these pins is told at once. The others are owed.
    fn resamplers_of(&self, state: &mut State, pins: u64) -> AtOnce {
        let mut now = AtOnce::default();
        // Most VMs have none: no look at 40 pins then.
        if state.resamplers.is_empty() {
            return now;
        }
        let State { resamplers, routing, owed, .. } = state;
        for pin in (0..PINS_OF_ALL).filter(|pin| pins & 1 << pin != 0) {
            if let Some(gsi) = gsi_of(routing, pin)
                && let Some(members) = resamplers.of(gsi)
            {
                now.take(gsi, members, owed);
            }
        }
        now
    }

    /// Tells those for whom there was no time when the interrupt ended. Process context, interrupts on,
    /// no lock: it may take as long as there are resamplers. Each GSI once: what comes behind is for
    /// whoever made it.
    #[cold]
    pub fn signal_owed(&self) {
        let mut next = 0;
        // The lock is taken anew for each GSI, and let go before anybody is signalled.
        let take = |from| {
            let mut state = self.state.lock();
            let gsi = state.owed.take_from(from)?;
            Some((gsi, state.resamplers.of(gsi).cloned()))
        };
        while let Some((gsi, members)) = take(next) {
            // Whoever has gone meanwhile waits for nothing.
            if let Some(members) = members {
                members.signal();
            }
            next = gsi + 1;
        }
    }

    /// Whether the 8259A has an interrupt.
    #[inline]
    pub fn intr(&self) -> bool {
        self.intr.load(Relaxed)
    }

    /// The CPU's acknowledge cycle: the 8259A's vector, `None` when the request has gone.
    pub fn acknowledge_intr(&self) -> Option<(Vector, Owing)> {
        let mut state = self.state.lock();
        // Another vCPU may have acknowledged it first, or the line went down; both happen between
        // the look without the lock and here.
        if !state.pic.output() {
            return None;
        }
        let vector = state.pic.acknowledge();
        // With automatic EOI the interrupt has ended already.
        let told = self.ended_lines(&mut state);
        self.update_pic(&mut state);
        drop(state);
        Some((vector, told.signal()))
    }

    /// Whom the lines are told that the PIC has reported ended and [`update_pic`](Self::update_pic) has not seen
    /// yet; the report is left for it.
    pub(super) fn ended_lines(&self, state: &mut State) -> AtOnce {
        let ended = u64::from(state.pic.ended());
        self.resamplers_of(state, ended << irqchip::ioapic::PINS)
    }

    /// A local APIC ended `vector` and its effect said that the I/O APIC is to hear of it.
    pub fn eoi(&self, from: &VcpuShared, vector: Vector, start: impl FnOnce(u64)) -> Owing {
        // With a split irqchip the pins are the VMM's.
        if self.kind() != Irqchip::Full {
            return Owing::NOTHING;
        }
        let mut state = self.state.lock();
        let pins = state.ioapic.eoi(vector);
        if pins == 0 {
            // A vector that has found another use: no more reports of it. The lock keeps a pin from being given that vector
            // and asking for them meanwhile.
            from.lapic.forget_notify(vector);
            drop(state);
            return Owing::NOTHING;
        }
        for pin in (0..irqchip::ioapic::PINS as u32).filter(|pin| pins & 1 << pin != 0) {
            if let Some(gsi) = state.routing.gsi_of_pin(Chip::IoApic, pin) {
                self.acknowledged(&mut state, gsi);
            }
        }
        // After the lines were lowered: what is still high is sent again, what only the resampler
        // held is not.
        let put_off = state.ioapic.reassert(pins, &mut self.output());
        if put_off != 0 {
            state.put_off |= put_off;
            // A line that nobody serves would be delivered again at once and for ever. Put off, the
            // guest gets on, as on stock KVM.
            state.retry_ns = clock::monotonic_ns().saturating_add(STORM_DELAY_NS);
            if let Some(next) = state.next_expiry() {
                start(next);
            }
        }
        self.update_pic(&mut state);
        let told = self.resamplers_of(&mut state, pins.into());
        // The lock is let go before anybody is told: a resample eventfd may be an irqfd of this VM,
        // whose handler takes it.
        drop(state);
        told.signal()
    }

    /// Vectors of whose ends at this local APIC the VMM's I/O APIC is to hear: those that its
    /// level-triggered pins send here, or sent here and that have not ended yet.
    pub fn ends_to_report(&self, lapic: &Lapic) -> VectorWords {
        let mut vectors = VectorWords::default();
        let (reserved, rules) = (self.reserved.load(Relaxed), self.dest_rules());
        // Some at a time. If the routes are replaced in between, all vCPUs are asked to look again.
        for first in (0..).step_by(ROUTES_AT_ONCE) {
            let state = self.state.lock();
            let some = state.routing.targets_below(reserved).get(first..).unwrap_or(&[]);
            for target in steps::each(some.iter().take(ROUTES_AT_ONCE)) {
                let Target::Msi(msi) = target else { continue };
                let Some(message) = msi.message(rules) else { continue };
                if message.trigger == Trigger::Level
                    && (lapic.matches(&message) || lapic.has_not_ended(message.vector))
                {
                    let Vector(vector) = message.vector;
                    vectors[usize::from(vector >> 6)] |= 1 << (vector & 63);
                }
            }
            if some.len() <= ROUTES_AT_ONCE {
                break;
            }
        }
        vectors
    }

    /// A local APIC was enabled, disabled, or its LINT0 changed.
    pub fn apic_changed(&self) {
        // Asked of all, since one that still has it keeps the watchdog on.
        let watchdog = self.vcpus.iter().any(|v| v.lapic.lint0_is_nmi());
        self.nmi_watchdog.store(watchdog, Relaxed);
        if self.intr() {
            self.kick_for_intr();
        }
    }
}

/// The GSI of a pin of the I/O APIC, or of a line of the PIC by the numbers behind those.
fn gsi_of(routing: &Routing, pin: u32) -> Option<u32> {
    match pin.checked_sub(irqchip::ioapic::PINS as u32) {
        None => routing.gsi_of_pin(Chip::IoApic, pin),
        Some(line) if line < 8 => routing.gsi_of_pin(Chip::PicMaster, line),
        Some(line) => routing.gsi_of_pin(Chip::PicSlave, line & 7),
    }
}

impl State {
    /// Puts another table of resamplers in place. Who calls this holds the old one, too: it is not freed
    /// under the lock.
    pub(super) fn set_resamplers(&mut self, table: Arc<Resamplers>) {
        self.resamplers = table;
        self.refresh_listeners();
    }

    /// When the timer is needed next.
    pub(super) fn next_expiry(&self) -> Option<u64> {
        let pit = self.pit.as_ref().and_then(|pit| pit.next_expiry());
        // Two reasons to wake, one timer: whichever is first.
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
            if (pit && gsi == PIT_GSI) || self.resamplers.of(gsi).is_some() {
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
        self.update_pic(&mut state);
        state.next_expiry()
    }
}

/// Arms the host timer for what the state expects next. Sleepless, but not under the lock: waits for a
/// handler that is running.
pub(super) fn arm_timer(core: &SharedCore) {
    // First stopped: a handler that runs would arm it by what was before the change.
    core.cancel();
    let state = core.state.lock();
    if let Some(next) = state.next_expiry() {
        core.start(next);
    }
}

/// What a test has happen between the look at the routes and the MSI.
#[cfg(test)]
pub(super) mod test {
    extern crate std;
    use alloc::boxed::Box;
    use core::cell::RefCell;

    std::thread_local! {
        /// Of this thread.
        pub(crate) static BEFORE_AN_MSI: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    }

    pub(super) fn before_an_msi() {
        if let Some(happens) = BEFORE_AN_MSI.take() {
            happens();
        }
    }
}
