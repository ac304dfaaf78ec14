//! The local APIC, xAPIC and x2APIC: SDM vol. 3A chapter 10, APM vol. 2 chapter 16.
//!
//! One [`Lapic`] per vCPU, shared by reference. Its vCPU is the *owner* and the only one to take
//! interrupts out, to write registers and to end interrupts. Everybody else is a *sender*: reads
//! what is needed to match a destination and puts interrupts in. So all state is atomic; what only
//! the owner changes costs plain moves, and only the IRR needs locked instructions.
//!
//! Why no lock: senders are interrupt handlers and other vCPUs, and the owner looks here at each entry. A lock would
//! cost it a locked instruction each time and a wait behind every sender. Since only the owner takes out, a
//! sender's work is one bit and a hint, and neither has to know what the other is doing.
//!
//! Why a sender may read registers that the owner writes meanwhile: a message that races with a change of the APIC's
//! id or mode may be taken by the old state or by the new, as on a real bus. What may not happen is that it is
//! lost without having been taken or refused by either, and a bit in the IRR is not lost.
//!
//! Why the highest vector in service and the processor priority are kept though they follow from other registers:
//! "can this be taken now?" is asked at each entry and answered by a load or two; found anew it would be four words
//! of the ISR.
//!
//! Why an EOI that somebody waits for is known by vector (`eoi_notify`): nearly none is. The inner loop ends an
//! interrupt without leaving where neither this nor the TMR has the vector, as for most MSIs.

mod deliver;
mod priority;
mod regs;
mod served;
mod state;
#[cfg(test)]
mod tests;
mod timer;
mod vectors;

pub use deliver::{Accepted, LocalVector};
pub use regs::{ICR_MSR, LapicEffect, SELF_IPI_MSR};
pub use state::{REGISTER_PAGE, RestoreError};
pub use timer::{Expiry, GUARD_ADVANCE_NS, SwTimerExpired, TimerChange, TimerClock, TimerOp};
pub use x86::apic::{DEFAULT_BASE, base};

use host::{Arc, NoMemory, once::Once};
use x86::apic::{DeliveryMode, lvt};

use crate::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::*};
use crate::message::{BROADCAST, DestMode, IrqMessage, XAPIC_BROADCAST};
use regs::LVT_COUNT;
use timer::Timer;
use vectors::VectorSet;

/// The access is a general-protection fault with error code 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gp;

/// What a CPU is to its machine, as the base MSR's BSP bit says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuRole {
    /// The one that firmware starts.
    Bootstrap,
    /// One of the others, which wait to be started.
    Application,
}

impl CpuRole {
    /// The bootstrap processor where the condition holds.
    pub const fn bootstrap_if(condition: bool) -> Self {
        if condition { Self::Bootstrap } else { Self::Application }
    }

    /// Whether the APIC is the bootstrap processor's.
    pub const fn is_bootstrap(self) -> bool {
        matches!(self, Self::Bootstrap)
    }
}

/// How LINT0, to which a PC connects its 8259As, comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lint0 {
    /// Masked, as the manuals say.
    Masked,
    /// Unmasked in ExtINT mode, as firmware leaves it on the bootstrap processor
    /// (KVM_X86_QUIRK_LINT0_REENABLED).
    ExtInt,
}

impl Lint0 {
    /// The entry of the local vector table.
    const fn entry(self) -> u32 {
        match self {
            Self::Masked => lvt::MASKED,
            Self::ExtInt => (DeliveryMode::ExtInt as u32) << lvt::MODE_SHIFT,
        }
    }
}

/// The mode that the APIC base MSR selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LapicMode {
    /// Globally disabled: the CPU behaves as if it had none.
    Disabled = 0,
    /// Memory-mapped registers, 8-bit ids.
    XApic = 1,
    /// Registers in MSRs, 32-bit ids.
    X2Apic = 2,
}

/// What a write of the APIC base MSR is checked against.
#[derive(Clone, Copy, Debug)]
pub struct BaseRules {
    /// Guest physical address width in bits; address bits from there up are reserved.
    pub maxphyaddr: u8,
    /// CPUID offers x2APIC.
    pub x2apic: bool,
    /// The write comes from the VMM, which may make any transition but not an invalid state.
    pub host: bool,
}

/// The bits of an address that the guest's physical addresses do not have.
fn reserved_above(rules: BaseRules) -> u64 {
    !((1 << u32::from(rules.maxphyaddr.clamp(32, 52))) - 1)
}

/// What a write of the APIC base MSR changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BaseChange {
    /// Enable or mode changed: matching, CPUID.1:EDX.APIC and MSR intercepts depend on it.
    pub mode: bool,
    /// The register page moved.
    pub address: bool,
}

/// Optional behaviours, from CPUID and capabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// The timer has TSC-deadline mode.
    pub tsc_deadline: bool,
    /// The guest may suppress EOI broadcasts (SVR bit 12); only with an I/O APIC in user space, which
    /// hears all the same of the ends it waits for ([`Lapic::await_ends`]), as under stock KVM.
    pub directed_eoi: bool,
    /// There is an LVT entry for corrected machine checks.
    pub cmci: bool,
}

const FEATURE_TSC_DEADLINE: u8 = 1;
const FEATURE_DIRECTED_EOI: u8 = 2;
const FEATURE_CMCI: u8 = 4;

/// A local APIC.
///
/// Layout: line 0 is what a sender and the entry path touch; line 1 what taking and ending an
/// interrupt touches; line 2 the timer; the rest is cold.
#[repr(C, align(64))]
pub struct Lapic {
    irr: VectorSet,
    /// Hint that `irr` may have a member: "nothing pending" is one load. Never false while a
    /// deliverable bit is set, but for the moment between a sender's two stores.
    irr_pending: AtomicU8,
    mode: AtomicU8,
    /// SVR bit 8.
    software_enabled: AtomicU8,
    /// Highest vector in service, 0 for none.
    isr_highest: AtomicU8,
    ppr: AtomicU8,
    tpr: AtomicU8,
    features: AtomicU8,
    /// Whether `eoi_notify` was ever used: spares the look into another cache line.
    any_notify: AtomicU8,
    /// Address of the CPU: 8 bits in xAPIC mode, 32 in x2APIC mode.
    // Kept as compared, and not as the register shows it: senders ask far more often than guests
    // read.
    id: AtomicU32,
    /// As the register shows it in the current mode.
    ldr: AtomicU32,
    dfr: AtomicU32,
    vcpu_id: u32,
    base: AtomicU64,

    isr: VectorSet,
    tmr: VectorSet,

    timer: Timer,

    /// Vectors whose next EOI is reported as that of a level interrupt.
    eoi_notify: VectorSet,
    lvt: [AtomicU32; LVT_COUNT],
    svr: AtomicU32,
    icr_lo: AtomicU32,
    icr_hi: AtomicU32,
    /// Errors the guest sees.
    esr: AtomicU32,
    /// Errors since the guest last wrote the ESR.
    esr_pending: AtomicU32,
    /// Where it is counted as one that is in xAPIC mode or answers to another id than its vCPU's, and as what.
    // Set behind the making: an APIC exists before its VM takes it in.
    census: Once<Arc<IdCensus>>,
    counted: AtomicU8,
}

/// How many local APICs of a VM answer to a physical id that is not their vCPU's own: only then may one
/// destination mean several. And how many have a logical id that the guest may choose.
#[derive(Debug, Default)]
pub struct IdCensus {
    /// In xAPIC mode, with an id that the guest has written.
    written: AtomicU32,
    /// In xAPIC mode, with the low byte of an id that does not fit.
    cut: AtomicU32,
    /// In xAPIC mode, with whatever id.
    xapics: AtomicU32,
    /// The VMM uses 32-bit ids.
    wide: AtomicBool,
}

impl IdCensus {
    /// Whether a destination of one byte may mean several. With 32-bit ids who has one that does not fit
    /// is addressed by it alone, as under stock KVM, if there is somebody of the shorter id.
    #[inline]
    pub fn aliases(&self) -> bool {
        // Relaxed: a message that races with a change of an id may go by the old one, as on a bus.
        self.written.load(Relaxed) != 0 || self.cut.load(Relaxed) != 0 && !self.wide.load(Relaxed)
    }

    /// Whether everybody answers to the id of the vCPU, or to none.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.written.load(Relaxed) | self.cut.load(Relaxed) == 0
    }

    /// The VMM uses 32-bit ids.
    pub fn set_wide(&self, wide: bool) {
        self.wide.store(wide, Relaxed);
    }

    /// Whether there are APICs in xAPIC mode, whose logical ids are the guest's to choose.
    #[inline]
    pub fn has_xapics(&self) -> bool {
        self.xapics.load(Relaxed) != 0
    }

    /// The counters of these kinds.
    fn of(&self, kinds: u8) -> impl Iterator<Item = &AtomicU32> {
        let counters = [(ID_WRITTEN, &self.written), (ID_CUT, &self.cut), (XAPIC, &self.xapics)];
        counters.into_iter().filter(move |(kind, _)| kinds & kind != 0).map(|(_, counter)| counter)
    }
}

const ID_WRITTEN: u8 = 1;
const ID_CUT: u8 = 2;
const XAPIC: u8 = 4;

// One cache line for senders and entry, one for taking and ending, one for the timer.
const _: () = assert!(MODELLED || core::mem::offset_of!(Lapic, isr) == 64);
const _: () = assert!(MODELLED || core::mem::offset_of!(Lapic, timer) == 128);
/// A model's words are larger.
const MODELLED: bool = size_of::<AtomicU8>() > 1;

impl Lapic {
    /// The APIC of vCPU `vcpu_id` in its power-up state.
    pub fn new(vcpu_id: u32, role: CpuRole) -> Self {
        let lapic = Self {
            irr: VectorSet::default(),
            irr_pending: AtomicU8::new(0),
            mode: AtomicU8::new(LapicMode::XApic as u8),
            software_enabled: AtomicU8::new(0),
            isr_highest: AtomicU8::new(0),
            ppr: AtomicU8::new(0),
            tpr: AtomicU8::new(0),
            features: AtomicU8::new(FEATURE_TSC_DEADLINE),
            any_notify: AtomicU8::new(0),
            id: AtomicU32::new(0),
            ldr: AtomicU32::new(0),
            dfr: AtomicU32::new(0),
            vcpu_id,
            isr: VectorSet::default(),
            tmr: VectorSet::default(),
            timer: Timer::new(),
            eoi_notify: VectorSet::default(),
            base: AtomicU64::new(0),
            lvt: core::array::from_fn(|_| AtomicU32::new(lvt::MASKED)),
            svr: AtomicU32::new(0xff),
            icr_lo: AtomicU32::new(0),
            icr_hi: AtomicU32::new(0),
            esr: AtomicU32::new(0),
            esr_pending: AtomicU32::new(0),
            census: Once::new(),
            counted: AtomicU8::new(0),
        };
        // By the reset itself, so that power-up and reset cannot come to differ.
        lapic.reset(role, Lint0::Masked);
        lapic
    }

    /// Power-up reset (SDM vol. 3A §10.4.7.1): xAPIC mode at the default address.
    pub fn reset(&self, role: CpuRole, lint0: Lint0) {
        let bsp_bit = if role.is_bootstrap() { base::BSP } else { 0 };
        // The base before the registers: mode and id follow from it.
        self.base.store(DEFAULT_BASE | base::ENABLE | bsp_bit, Relaxed);
        self.set_address(LapicMode::XApic, self.vcpu_id & 0xff);
        self.ldr.store(0, Relaxed);
        self.reset_registers();
        // Behind reset_registers(), which masks every entry.
        self.set_lvt(LocalVector::Lint0, lint0.entry());
    }

    /// INIT (SDM vol. 3A §10.4.7.3): all registers but the id; base and mode stay.
    pub fn init(&self, lint0: Lint0) {
        // The logical id of an x2APIC follows from its id, which INIT leaves (SDM vol. 3A
        // §10.12.10.2).
        if self.mode() != LapicMode::X2Apic {
            self.ldr.store(0, Relaxed);
        }
        self.reset_registers();
        self.set_lvt(LocalVector::Lint0, lint0.entry());
    }

    fn reset_registers(&self) {
        self.dfr.store(u32::MAX, Relaxed);
        self.tpr.store(0, Relaxed);
        self.svr.store(0xff, Relaxed);
        // Before the vectors are cleared: from here on senders put nothing more in, but for those
        // on their way.
        self.software_enabled.store(0, Relaxed);
        for lvt in &self.lvt {
            lvt.store(lvt::MASKED, Relaxed);
        }
        self.icr_lo.store(0, Relaxed);
        self.icr_hi.store(0, Relaxed);
        self.esr.store(0, Relaxed);
        self.esr_pending.store(0, Relaxed);
        // The expiry goes before the IRR is cleared: a timer that fires now finds nothing to
        // deliver.
        self.timer.reset();
        // The hint first: a sender that comes between leaves it set, and a look that finds nothing
        // is harmless.
        self.irr_pending.store(0, Relaxed);
        self.irr.clear();
        self.isr.clear();
        self.tmr.clear();
        self.eoi_notify.clear();
        self.any_notify.store(0, Relaxed);
        self.isr_highest.store(0, Relaxed);
        // Last: it follows from TPR and from what is in service.
        self.update_ppr();
    }

    /// Chooses the optional behaviours.
    pub fn set_features(&self, features: Features) {
        let mut bits = 0;
        if features.tsc_deadline {
            bits |= FEATURE_TSC_DEADLINE;
        }
        if features.directed_eoi {
            bits |= FEATURE_DIRECTED_EOI;
        }
        if features.cmci {
            bits |= FEATURE_CMCI;
        }
        // Only on a change: what the guest has in the entry outlasts features that are set again.
        if features.cmci != self.has(FEATURE_CMCI) {
            // An entry that comes is masked, and one that goes interrupts nobody.
            self.set_lvt(LocalVector::Cmci, lvt::MASKED);
        }
        let ran_for_deadline = self.tsc_deadline_mode();
        self.features.store(bits, Relaxed);
        if ran_for_deadline && !self.tsc_deadline_mode() {
            // A deadline without its mode would come and interrupt nobody, again and again.
            self.timer.stop();
        }
    }

    #[inline]
    fn has(&self, feature: u8) -> bool {
        self.features.load(Relaxed) & feature != 0
    }

    /// The mode that the base MSR selected.
    #[inline]
    pub fn mode(&self) -> LapicMode {
        match self.mode.load(Relaxed) {
            1 => LapicMode::XApic,
            2 => LapicMode::X2Apic,
            _ => LapicMode::Disabled,
        }
    }

    /// Whether IA32_APIC_BASE enables the APIC globally.
    #[inline]
    pub fn enabled(&self) -> bool {
        self.mode.load(Relaxed) != LapicMode::Disabled as u8
    }

    /// Globally enabled, and by the spurious-interrupt vector register too.
    #[inline]
    pub fn software_enabled(&self) -> bool {
        self.enabled() && self.software_enabled.load(Relaxed) != 0
    }

    /// The APIC id as destinations are compared with it.
    #[inline]
    pub fn id(&self) -> u32 {
        self.id.load(Relaxed)
    }

    /// The id of its vCPU: the x2APIC id, and the xAPIC id until the guest writes another.
    #[inline]
    pub fn vcpu_id(&self) -> u32 {
        self.vcpu_id
    }

    /// The APIC base MSR.
    #[inline]
    pub fn base(&self) -> u64 {
        self.base.load(Relaxed)
    }

    /// Where the xAPIC register page lies, when there is one.
    #[inline]
    pub fn mmio_base(&self) -> Option<u64> {
        (self.mode() == LapicMode::XApic).then(|| self.base() & !0xfff)
    }

    /// Writes the APIC base MSR.
    ///
    /// # Errors
    /// [`Gp`] for reserved bits, EXTD without ENABLE, and, for a guest, the transitions that
    /// SDM vol. 3A §10.12.5 forbids: x2APIC to xAPIC, and disabled to x2APIC.
    pub fn set_base(&self, value: u64, rules: BaseRules) -> Result<BaseChange, Gp> {
        let new_mode = self.checked_mode(value, rules)?;
        // The owner's read of what only the owner writes: nothing comes in between.
        let old_mode = self.mode();
        // Checked before: a refused value has changed nothing.
        // Exchanged for the old value alone; nobody else writes it.
        let old = self.base.swap(value, Relaxed);
        if new_mode != old_mode {
            self.enter_mode(old_mode, new_mode);
        }
        Ok(BaseChange {
            mode: new_mode != old_mode,
            // Only the address bits: enable and mode have their own word.
            address: (old ^ value) & !0xfff & !reserved_above(rules) != 0,
        })
    }

    /// Writes the APIC base MSR where the registers are the VMM's: none is reset.
    ///
    /// # Errors
    /// As those of [`Lapic::set_base`].
    pub fn keep_base(&self, value: u64, rules: BaseRules) -> Result<(), Gp> {
        let mode = self.checked_mode(value, rules)?;
        // No reset: registers, and what a mode does to them, are the VMM's.
        self.base.store(value, Relaxed);
        self.set_address(mode, self.id());
        Ok(())
    }

    /// The mode that a write of the APIC base MSR selects, if it may be written.
    fn checked_mode(&self, value: u64, rules: BaseRules) -> Result<LapicMode, Gp> {
        // Bits 7:0 and 9 are reserved in every mode (SDM vol. 3A §10.4.4); bit 8 is BSP, which
        // software may write.
        // The bits above the guest's physical width too, for a VMM as for a guest: the page would
        // lie nowhere.
        let mut reserved = reserved_above(rules) | 0xff | (1 << 9);
        if !rules.x2apic {
            reserved |= base::EXTD;
        }
        let enable = value & base::ENABLE != 0;
        let extended = value & base::EXTD != 0;
        if value & reserved != 0 || (extended && !enable) {
            return Err(Gp);
        }
        let new_mode = match (enable, extended) {
            (false, _) => LapicMode::Disabled,
            (true, false) => LapicMode::XApic,
            (true, true) => LapicMode::X2Apic,
        };
        // The way back from x2APIC leads through disabled, and out of that into xAPIC first (SDM
        // vol. 3A §10.12.5).
        let forbidden = matches!(
            (self.mode(), new_mode),
            (LapicMode::X2Apic, LapicMode::XApic) | (LapicMode::Disabled, LapicMode::X2Apic)
        );
        if forbidden && !rules.host { Err(Gp) } else { Ok(new_mode) }
    }

    /// The only way to another mode or id, so that the census is right.
    fn set_address(&self, mode: LapicMode, id: u32) {
        // Two stores that a sender may see apart: for a moment the new id stands with the old mode.
        self.id.store(id, Relaxed);
        self.mode.store(mode as u8, Relaxed);
        self.be_counted();
    }

    fn be_counted(&self) {
        let Some(census) = self.census.get() else { return };
        // The low byte is what an xAPIC has to show for a vCPU of a larger id, and so another
        // vCPU's id.
        let kinds = match self.mode() {
            LapicMode::XApic if self.id() != self.vcpu_id & 0xff => XAPIC | ID_WRITTEN,
            LapicMode::XApic if self.vcpu_id > 0xff => XAPIC | ID_CUT,
            LapicMode::XApic => XAPIC,
            LapicMode::Disabled | LapicMode::X2Apic => 0,
        };
        // What it was counted as is kept here: the registers that say so have changed by now.
        let old = self.counted.swap(kinds, Relaxed);
        // The new ones first: never too few.
        for counter in census.of(kinds) {
            counter.fetch_add(1, SeqCst);
        }
        for counter in census.of(old) {
            counter.fetch_sub(1, SeqCst);
        }
    }

    /// Is counted from now on; once, before its vCPU runs.
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn join(&self, census: &Arc<IdCensus>) -> Result<(), NoMemory> {
        // The census first: a change of the id from here on is counted.
        self.census.set(census.clone())?;
        self.be_counted();
        Ok(())
    }

    fn enter_mode(&self, old: LapicMode, new: LapicMode) {
        // What stays where the APIC is switched off; nobody matches it then.
        let mut id = self.id();
        // A logical id of x2APIC's form is none to the other mode. A guest gets there by way of no mode at all.
        if old == LapicMode::X2Apic {
            self.ldr.store(0, Relaxed);
            self.dfr.store(u32::MAX, Relaxed);
        }
        match new {
            // Its errors are those of an APIC that comes on again (SDM vol. 3A §10.4.3: as at power-up).
            LapicMode::Disabled => {
                self.esr.store(0, Relaxed);
                self.esr_pending.store(0, Relaxed);
            }
            LapicMode::XApic => {
                // The id of power-up, as in stock KVM: what the guest wrote is lost with the mode.
                id = self.vcpu_id & 0xff;
            }
            LapicMode::X2Apic => {
                // The x2APIC id cannot be written, and neither can what follows from it (SDM vol.
                // 3A §10.12.10).
                id = self.vcpu_id;
                self.ldr.store(x2apic_ldr(self.vcpu_id), Relaxed);
            }
        }
        self.set_address(new, id);
        self.refresh_pending();
    }

    /// Whether a message with this destination addresses this APIC; the shorthand is the sender's
    /// business. SDM vol. 3A §10.6.2, §10.12.10.
    #[inline]
    pub fn matches(&self, msg: &IrqMessage) -> bool {
        // Once: a mode that changes between two looks would match by half of each.
        let mode = self.mode();
        // An APIC that is off hears nothing, not even a broadcast.
        if mode == LapicMode::Disabled {
            return false;
        }
        match msg.dest_mode {
            DestMode::Physical if msg.dest == BROADCAST => true,
            DestMode::Physical if mode == LapicMode::XApic && msg.dest == XAPIC_BROADCAST => true,
            // An id that an xAPIC cannot show still addresses it: its vCPU may be about to start.
            DestMode::Physical if mode == LapicMode::XApic && msg.dest > 0xff => {
                msg.dest == self.vcpu_id
            }
            DestMode::Physical => msg.dest == self.id(),
            DestMode::Logical => self.matches_logical(mode, msg.dest),
        }
    }

    /// Whether a physical destination means this APIC and no other.
    #[inline]
    fn is_alone_at(&self, dest: u32) -> bool {
        // An xAPIC that shows the low byte of its id hears nothing of it if there is somebody of that id.
        let alone = dest > 0xff
            || self.census.get().is_none_or(|census| self.vcpu_id == dest && !census.aliases());
        dest == self.id() && dest != XAPIC_BROADCAST && alone
    }

    fn matches_logical(&self, mode: LapicMode, dest: u32) -> bool {
        // Both modes: 0xff of pins and MSIs was widened to it.
        if dest == BROADCAST {
            return true;
        }
        let ldr = self.ldr.load(Relaxed);
        // The cluster has to be the same, and one bit of the sixteen to meet (SDM vol. 3A
        // §10.12.10.1).
        if mode == LapicMode::X2Apic {
            return dest >> 16 == ldr >> 16 && dest & ldr & 0xffff != 0;
        }
        // An xAPIC's logical id has eight bits: a wider destination is an x2APIC's.
        if dest > 0xff {
            return false;
        }
        let logical = ldr >> 24;
        // Only these two models exist; with any other the APIC hears nothing.
        match self.dfr.load(Relaxed) >> 28 {
            _ if dest == 0xff => true,
            0xf => dest & logical != 0,
            // Cluster model: 0xf addresses all clusters, and the low half is a mask in each (SDM
            // vol. 3A §10.6.2.2).
            0x0 => (dest >> 4 == 0xf || dest >> 4 == logical >> 4) && dest & logical & 0xf != 0,
            _ => false,
        }
    }
}

impl Drop for Lapic {
    /// Is counted no more.
    fn drop(&mut self) {
        let Some(census) = self.census.get() else { return };
        for counter in census.of(self.counted.load(Relaxed)) {
            // Else one vCPU that was made and given up would have every message looked up the long
            // way for ever.
            counter.fetch_sub(1, SeqCst);
        }
    }
}

/// The read-only logical id of an x2APIC: cluster in bits 31:16, one bit of 16 below
/// (SDM vol. 3A §10.12.10.2).
const fn x2apic_ldr(id: u32) -> u32 {
    (id >> 4) << 16 | 1 << (id & 0xf)
}
