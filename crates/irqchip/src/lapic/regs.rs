//! The registers as the guest reads and writes them: at an offset in the xAPIC page, or by MSR in
//! x2APIC mode. SDM vol. 3A §10.4.1 (table 10-1), §10.12.1.2 (table 10-6).
//!
//! A write changes the APIC and answers with what its owner has to do about it.

use host::GuestIndex;
use x86::{
    Vector,
    apic::{self, esr, lvt, reg, svr, version},
    msr,
};

use super::{
    FEATURE_CMCI, FEATURE_DIRECTED_EOI, FEATURE_TSC_DEADLINE, Gp, Lapic, LapicMode, LocalVector,
    TimerChange,
};
use crate::atomic::{AtomicU32, Ordering::*};
use crate::message::{DeliveryMode, DestMode, IrqMessage, Shorthand, Trigger};

/// x2APIC interrupt command register, 64 bits.
pub const ICR_MSR: u32 = msr::x2apic(reg::ICR);
/// x2APIC self-IPI register.
pub const SELF_IPI_MSR: u32 = msr::x2apic(reg::SELF_IPI);

/// Last registers of the three vector sets.
const ISR_END: u32 = reg::ISR + 0x70;
const TMR_END: u32 = reg::TMR + 0x70;
const IRR_END: u32 = reg::IRR + 0x70;

pub(super) const LVT_COUNT: usize = 7;
/// What can be written of each LVT entry, in the order of [`LocalVector`].
pub(super) const LVT_WRITABLE: [u32; LVT_COUNT] =
    // Delivery status and remote IRR are the APIC's; only LINT0 and LINT1 have polarity and trigger
    // mode.
    [0x7_00ff, 0x1_07ff, 0x1_07ff, 0x1_a7ff, 0x1_a7ff, 0x1_00ff, 0x1_07ff];
/// An LVT entry more, for corrected machine checks.
const VERSION_CMCI: u32 = 1 << 16;
/// ICR: delivery status, send pending.
const ICR_BUSY: u32 = 1 << 12;
/// ICR bits that can be written in x2APIC mode: all but delivery status and the reserved ones.
// Bits 13, 16, 17 and 20 up are reserved, and a WRMSR with one of them faults.
const ICR_LO_WRITABLE: u32 = 0x000c_cfff;

/// What the owner has to do after a register write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LapicEffect {
    /// The owner has nothing to do.
    None,
    /// An interrupt ended. A held-back interrupt may be deliverable now.
    Eoi {
        /// The vector that left service.
        vector: Vector,
        /// The I/O APIC is to be told: it was level-triggered, or its message asked for it
        /// ([`IrqMessage::notify_eoi`]).
        level: bool,
    },
    /// Deliver this to oneself: by [`Lapic::self_ipi_direct`], else by [`Lapic::accept_fixed`].
    /// It is not pending yet.
    SelfIpi(Vector),
    /// Deliver this message.
    SendIpi(IrqMessage),
    /// Call [`Lapic::timer_update`] with this.
    TimerChanged(TimerChange),
    /// The task priority changed: what is pending may be deliverable, or no longer.
    TprChanged,
    /// Enabled or disabled by the SVR.
    EnableChanged,
    /// LINT0's entry changed: who takes the 8259A's interrupts and the PIT's NMIs may change.
    Lint0Changed,
    /// Id, logical id or its format changed: other messages than before may be addressed here.
    AddressChanged,
}

impl Lapic {
    /// Reads the register at `offset` (a multiple of 16 below 4096) as the xAPIC page shows it.
    /// `now_ns` is asked only for the timer's current count.
    pub fn read(&self, offset: u32, now_ns: impl FnOnce() -> u64) -> u32 {
        match offset {
            reg::ID => match self.mode() {
                LapicMode::X2Apic => self.id(),
                // Eight bits in the upper byte; of a wider id only its low byte is to be seen.
                _ => self.id() << 24,
            },
            reg::VERSION => self.version(),
            reg::TPR => u32::from(self.tpr()),
            reg::PPR => u32::from(self.ppr()),
            // Arbitration is gone from every CPU since the Pentium 4; it reads as zero.
            reg::APR | reg::EOI | reg::RRD => 0,
            reg::LDR => self.ldr.load(Relaxed),
            reg::DFR => self.dfr.load(Relaxed),
            reg::SVR => self.svr.load(Relaxed),
            reg::ISR..=ISR_END => self.isr.register((offset - reg::ISR) >> 4),
            reg::TMR..=TMR_END => self.tmr.register((offset - reg::TMR) >> 4),
            reg::IRR..=IRR_END => self.irr.register((offset - reg::IRR) >> 4),
            reg::ESR => self.esr.load(Relaxed),
            reg::ICR => self.icr_lo.load(Relaxed),
            reg::ICR2 => self.icr_hi.load(Relaxed),
            reg::LVT_TIMER..=reg::LVT_ERROR => match self.lvt_at(offset) {
                Some(lvt) => lvt.load(Relaxed),
                None => 0,
            },
            reg::LVT_CMCI if self.has(FEATURE_CMCI) => self.lvt(LocalVector::Cmci),
            reg::TIMER_INITIAL => self.timer.initial(),
            // Time is asked for here alone: reading the clock costs more than all other registers.
            reg::TIMER_CURRENT => self.timer_current(now_ns),
            reg::TIMER_DIVIDE => self.timer.divide_register(),
            _ => {
                // An access to what does not exist is an error of the APIC, not a fault (SDM vol.
                // 3A §10.5.3).
                let _ = self.raise_error(esr::ILLEGAL_REGISTER);
                0
            }
        }
    }

    /// A guest load from the xAPIC page. False when it is not this APIC's business (not in xAPIC
    /// mode); else `data` is filled. Accesses of 1, 2 or 4 bytes within one register work; others
    /// read as zero.
    pub fn mmio_read(&self, offset: u32, data: &mut [u8], now_ns: impl FnOnce() -> u64) -> bool {
        if self.mode() != LapicMode::XApic {
            return false;
        }
        // Zeros first: a load across registers is undefined, and must show no old bytes.
        data.fill(0);
        // Sixteen bytes apart, of which four are the register.
        let within = (offset & 0xf) as usize;
        if within + data.len() <= 4 {
            let bytes = self.read(offset & !0xf, now_ns).to_le_bytes();
            for (out, byte) in data.iter_mut().zip(bytes.iter().skip(within)) {
                *out = *byte;
            }
        }
        true
    }

    /// A guest store to the xAPIC page. `None` when it is not this APIC's business. Only aligned
    /// stores of four bytes do anything (SDM vol. 3A §10.4.1).
    #[inline]
    pub fn mmio_write(&self, offset: u32, data: &[u8]) -> Option<LapicEffect> {
        if self.mode() != LapicMode::XApic {
            return None;
        }
        Some(match <[u8; 4]>::try_from(data) {
            Ok(bytes) if offset & 0xf == 0 => self.write(offset, u32::from_le_bytes(bytes)),
            // Nothing, and no error: stock KVM ignores such stores as well.
            _ => LapicEffect::None,
        })
    }

    /// Writes the register at `offset` (a multiple of 16) of the xAPIC page.
    #[inline]
    pub fn write(&self, offset: u32, value: u32) -> LapicEffect {
        match offset {
            // In the order of how often they are written. Any value ends an interrupt in xAPIC
            // mode.
            reg::EOI => self.eoi(),
            reg::ICR => self.write_icr_lo(value),
            reg::ICR2 => {
                // Only the upper byte exists; the rest reads as zero.
                self.icr_hi.store(value & 0xff00_0000, Relaxed);
                LapicEffect::None
            }
            reg::ID => {
                // By the one way that keeps the census right, though the mode stays.
                self.set_address(self.mode(), value >> 24);
                LapicEffect::AddressChanged
            }
            reg::LDR => {
                self.ldr.store(value & 0xff00_0000, Relaxed);
                LapicEffect::AddressChanged
            }
            reg::DFR => {
                // The other bits are reserved and read as ones: software tells flat from cluster by the whole word.
                self.dfr.store(value | 0x0fff_ffff, Relaxed);
                LapicEffect::AddressChanged
            }
            _ => self.write_shared(offset, value),
        }
    }

    /// The registers that both modes write alike.
    fn write_shared(&self, offset: u32, value: u32) -> LapicEffect {
        match offset {
            reg::TPR => {
                self.set_tpr(value as u8);
                LapicEffect::TprChanged
            }
            reg::SVR => self.write_svr(value),
            reg::ESR => {
                // Writing is how the guest asks for the errors since it last asked.
                // One exchange: an error that a message raises meanwhile is in this answer or in
                // the next.
                self.esr.store(self.esr_pending.swap(0, Relaxed), Relaxed);
                LapicEffect::None
            }
            reg::LVT_TIMER..=reg::LVT_ERROR => self.write_lvt(offset, value),
            reg::LVT_CMCI if self.has(FEATURE_CMCI) => {
                self.write_lvt_entry(LocalVector::Cmci, value)
            }
            // The two ways to arm the timer exclude each other (SDM vol. 3A §10.5.4.1).
            reg::TIMER_INITIAL if self.tsc_deadline_mode() => LapicEffect::None,
            // The owner's caller arms the timer: nothing here knows the time.
            reg::TIMER_INITIAL => {
                self.timer.set_initial(value);
                LapicEffect::TimerChanged(TimerChange::Count)
            }
            reg::TIMER_DIVIDE => {
                // Bit 2 is reserved (SDM vol. 3A figure 10-10). The old pace is needed to know how
                // many counts are left.
                let old = self.timer.set_divide_register(value & 0xb);
                LapicEffect::TimerChanged(TimerChange::Divide { old })
            }
            reg::VERSION | reg::APR | reg::PPR | reg::RRD | reg::TIMER_CURRENT => LapicEffect::None,
            // Read-only: the store is dropped without an error, as under stock KVM.
            reg::ISR..=IRR_END if offset & 0xf == 0 => LapicEffect::None,
            _ => {
                let _ = self.raise_error(esr::ILLEGAL_REGISTER);
                LapicEffect::None
            }
        }
    }

    /// RDMSR of 0x800 to 0x8ff.
    ///
    /// # Errors
    /// [`Gp`] outside x2APIC mode, for write-only and for absent registers.
    pub fn read_x2(&self, msr: u32, now_ns: impl FnOnce() -> u64) -> Result<u64, Gp> {
        // With the APIC in xAPIC mode the MSRs do not exist (SDM vol. 3A §10.12.2).
        if self.mode() != LapicMode::X2Apic {
            return Err(Gp);
        }
        let offset = msr.wrapping_sub(msr::X2APIC_BASE).wrapping_shl(4);
        match offset {
            // One register of 64 bits in x2APIC mode, and atomic: there is no busy bit to be polled
            // (SDM vol. 3A §10.12.9).
            reg::ICR => {
                Ok(u64::from(self.icr_hi.load(Relaxed)) << 32
                    | u64::from(self.icr_lo.load(Relaxed)))
            }
            reg::ID
            | reg::VERSION
            | reg::TPR
            | reg::PPR
            | reg::LDR
            | reg::SVR
            | reg::ISR..=IRR_END
            | reg::ESR
            | reg::LVT_TIMER..=reg::LVT_ERROR
            | reg::TIMER_INITIAL
            | reg::TIMER_CURRENT
            | reg::TIMER_DIVIDE => Ok(u64::from(self.read(offset, now_ns))),
            reg::LVT_CMCI if self.has(FEATURE_CMCI) => Ok(self.read(offset, now_ns).into()),
            _ => Err(Gp),
        }
    }

    /// WRMSR of 0x800 to 0x8ff.
    ///
    /// # Errors
    /// [`Gp`] outside x2APIC mode, for read-only and absent registers, reserved bits, and a
    /// non-zero EOI or ESR.
    #[inline]
    pub fn write_x2(&self, msr: u32, value: u64) -> Result<LapicEffect, Gp> {
        if self.mode() != LapicMode::X2Apic {
            return Err(Gp);
        }
        match msr {
            // In the order of how often they are written: a guest sends and ends interrupts, and
            // the rest is set up once.
            SELF_IPI_MSR if value <= 0xff => Ok(self.self_ipi(value as u8)),
            ICR_MSR => self.write_icr_x2(value),
            0x80b if value == 0 => Ok(self.eoi()),
            _ => self.write_x2_other(msr, value),
        }
    }

    fn write_x2_other(&self, msr: u32, value: u64) -> Result<LapicEffect, Gp> {
        // All but ICR have 32 bits; bits 63:32 are reserved and fault.
        let value = u32::try_from(value).map_err(|_| Gp)?;
        // Id, LDR, PPR and the vector sets are read-only in this mode, and DFR and ICR2 are not
        // there: all fall through to #GP.
        let offset = msr.wrapping_sub(msr::X2APIC_BASE).wrapping_shl(4);
        match offset {
            // Reserved bits fault in this mode, where the page would drop them (SDM vol. 3A
            // §10.12.1.3).
            reg::TPR if value > 0xff => Err(Gp),
            reg::ESR if value != 0 => Err(Gp),
            reg::TPR
            | reg::SVR
            | reg::ESR
            | reg::LVT_TIMER..=reg::LVT_ERROR
            | reg::TIMER_INITIAL
            | reg::TIMER_DIVIDE => Ok(self.write_shared(offset, value)),
            reg::LVT_CMCI if self.has(FEATURE_CMCI) => Ok(self.write_shared(offset, value)),
            _ => Err(Gp),
        }
    }

    fn write_svr(&self, value: u32) -> LapicEffect {
        // Without the feature the bit must not stay: a guest tries it to see whether there is one.
        let suppress = if self.has(FEATURE_DIRECTED_EOI) { svr::DIRECTED_EOI } else { 0 };
        self.svr.store(value & (0x3ff | suppress), Relaxed);
        let enable = value & svr::ENABLE != 0;
        // A byte of its own beside the SVR: senders look at it for each message.
        let was = self.software_enabled.swap(u8::from(enable), Relaxed) != 0;
        if was == enable {
            return LapicEffect::None;
        }
        if !enable {
            // SDM vol. 3A §10.4.7.2: the mask bits are set, and stay set, while disabled.
            for lvt in &self.lvt {
                lvt.fetch_or(lvt::MASKED, Relaxed);
            }
        }
        LapicEffect::EnableChanged
    }

    fn lvt_at(&self, offset: u32) -> Option<&AtomicU32> {
        GuestIndex::from(offset.wrapping_sub(reg::LVT_TIMER) >> 4).of(&self.lvt)
    }

    #[inline]
    pub(super) fn lvt(&self, entry: LocalVector) -> u32 {
        self.lvt[entry as usize].load(Relaxed)
    }

    #[inline]
    pub(super) fn set_lvt(&self, entry: LocalVector, value: u32) {
        self.lvt[entry as usize].store(value, Relaxed);
    }

    fn write_lvt(&self, offset: u32, value: u32) -> LapicEffect {
        let entry = match (offset - reg::LVT_TIMER) >> 4 {
            0 => LocalVector::Timer,
            1 => LocalVector::Thermal,
            2 => LocalVector::Performance,
            3 => LocalVector::Lint0,
            4 => LocalVector::Lint1,
            _ => LocalVector::Error,
        };
        self.write_lvt_entry(entry, value)
    }

    fn version(&self) -> u32 {
        let eoi = if self.has(FEATURE_DIRECTED_EOI) { version::DIRECTED_EOI } else { 0 };
        let cmci = if self.has(FEATURE_CMCI) { VERSION_CMCI } else { 0 };
        (apic::VERSION | eoi) + cmci
    }

    fn write_lvt_entry(&self, entry: LocalVector, value: u32) -> LapicEffect {
        let writable = GuestIndex::from(entry as usize).of(&LVT_WRITABLE).copied().unwrap_or(0);
        let mut value = value & writable;
        // Without the feature the bit is reserved, and reads as zero.
        if entry == LocalVector::Timer && !self.has(FEATURE_TSC_DEADLINE) {
            value &= !lvt::TIMER_DEADLINE;
        }
        // A disabled APIC keeps its entries masked (SDM vol. 3A §10.4.7.2).
        if self.software_enabled.load(Relaxed) == 0 {
            value |= lvt::MASKED;
        }
        let old = self.lvt(entry);
        self.set_lvt(entry, value);
        match entry {
            LocalVector::Timer if (old ^ value) & lvt::TIMER_MODE != 0 => {
                // The mode before the mask: a change of both is told as the greater one.
                LapicEffect::TimerChanged(TimerChange::Mode { old })
            }
            LocalVector::Timer if (old ^ value) & lvt::MASKED != 0 => {
                LapicEffect::TimerChanged(TimerChange::Mask)
            }
            LocalVector::Lint0 if old != value => LapicEffect::Lint0Changed,
            LocalVector::Timer
            | LocalVector::Thermal
            | LocalVector::Performance
            | LocalVector::Lint0
            | LocalVector::Lint1
            | LocalVector::Error
            | LocalVector::Cmci => LapicEffect::None,
        }
    }

    #[inline]
    fn self_ipi(&self, vector: u8) -> LapicEffect {
        // Sending such a vector is the sender's error and sets another bit than receiving one (SDM
        // vol. 3A §10.5.3).
        // Checked by the sender too: the message is not sent at all (SDM vol. 3A §10.5.3).
        if vector < 16 {
            let _ = self.raise_error(esr::SEND_ILLEGAL_VECTOR);
            return LapicEffect::None;
        }
        LapicEffect::SelfIpi(Vector(vector))
    }

    #[inline]
    fn write_icr_lo(&self, value: u32) -> LapicEffect {
        // Reserved bits read back as written, as under stock KVM; delivery is always complete.
        // Before it is sent: a handler that runs at once may read it back.
        self.icr_lo.store(value & !ICR_BUSY, Relaxed);
        let mode = dest_mode(value);
        // 0xff is a broadcast to those in xAPIC mode only.
        self.send(value, mode, self.icr_hi.load(Relaxed) >> 24)
    }

    #[inline]
    fn write_icr_x2(&self, value: u64) -> Result<LapicEffect, Gp> {
        let low = value as u32;
        // The delivery status bit does not exist in x2APIC mode but may be written.
        // Checked before anything is stored: a write that faults changes nothing.
        if low & !(ICR_LO_WRITABLE | ICR_BUSY) != 0 {
            return Err(Gp);
        }
        let low = low & ICR_LO_WRITABLE;
        let dest = (value >> 32) as u32;
        self.icr_lo.store(low, Relaxed);
        self.icr_hi.store(dest, Relaxed);
        Ok(self.send(low, dest_mode(low), dest))
    }

    /// The message of an ICR value. SDM vol. 3A §10.6.1.
    #[inline]
    fn send(&self, icr: u32, dest_mode: DestMode, dest: u32) -> LapicEffect {
        let shorthand = match icr >> 18 & 3 {
            0 => Shorthand::None,
            1 => Shorthand::SelfOnly,
            2 => Shorthand::All,
            _ => Shorthand::AllButSelf,
        };
        // A reserved mode sends nothing; the register has been written all the same.
        let Some(delivery) = DeliveryMode::from_bits(icr >> 8) else {
            return LapicEffect::None;
        };
        let delivery = match shorthand {
            Shorthand::None => delivery.to(dest_mode, dest),
            _ => delivery,
        };
        let trigger = if icr & 1 << 15 != 0 { Trigger::Level } else { Trigger::Edge };
        let assert = icr & 1 << 14 != 0;
        match delivery {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => {
                // To itself alone: no other CPU is told, and it can be put into service at once.
                let to_self = shorthand == Shorthand::SelfOnly
                    || (shorthand == Shorthand::None
                        && dest_mode == DestMode::Physical
                        && self.is_alone_at(dest));
                if to_self {
                    return self.self_ipi(icr as u8);
                }
                // Vectors 0 to 15, by one test.
                if icr & 0xf0 == 0 {
                    let _ = self.raise_error(esr::SEND_ILLEGAL_VECTOR);
                    return LapicEffect::None;
                }
            }
            // The de-assert message only synchronised arbitration ids on old buses (SDM vol. 3A
            // §10.6.1).
            DeliveryMode::Init if trigger == Trigger::Level && !assert => return LapicEffect::None,
            // ExtINT is no IPI: the 8259A is not on the bus.
            DeliveryMode::ExtInt => return LapicEffect::None,
            DeliveryMode::Smi | DeliveryMode::Nmi | DeliveryMode::Init | DeliveryMode::Startup => {}
        }
        LapicEffect::SendIpi(IrqMessage {
            vector: Vector(icr as u8),
            delivery,
            dest_mode,
            // Interprocessor interrupts other than INIT are edge-triggered whatever the bit says.
            trigger: if delivery == DeliveryMode::Init { trigger } else { Trigger::Edge },
            assert,
            notify_eoi: false,
            shorthand,
            dest,
        })
    }
}

#[inline]
const fn dest_mode(icr: u32) -> DestMode {
    if icr & 1 << 11 != 0 { DestMode::Logical } else { DestMode::Physical }
}
