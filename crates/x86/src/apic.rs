//! The local APIC's and the I/O APIC's registers and fields.
//!
//! SDM vol. 3A ch. 10, APM vol. 2 ch. 16. Offsets are those of the xAPIC page; the x2APIC MSR of
//! a register is `0x800 + (offset >> 4)`.

/// Physical address of the xAPIC page after reset.
pub const DEFAULT_BASE: u64 = 0xfee0_0000;
/// Physical address of the I/O APIC on a PC.
pub const IOAPIC_DEFAULT_BASE: u64 = 0xfec0_0000;
/// Version register of KVM's local APIC: version 0x14, six LVT entries (KVM since 2.6.20).
// The number of entries less one; guests that see 0x14 take the APIC for an integrated one.
pub const VERSION: u32 = 0x14 | (5 << 16);

/// A set of vectors, 64 in each word.
pub type VectorWords = [u64; 4];

/// The highest member of a set; 0 when there is none.
#[inline]
pub const fn highest(words: &VectorWords) -> u8 {
    let [w0, w1, w2, w3] = *words;
    // The word first: one count of zeros is left, and no loop.
    let (word, base) = match (w3, w2, w1) {
        (0, 0, 0) => (w0, 0),
        (0, 0, _) => (w1, 64),
        (0, _, _) => (w2, 128),
        _ => (w3, 192),
    };
    match word {
        // Vectors below 16 are exceptions' (SDM vol. 3A §10.5.2), so that 0 is free to say "none".
        0 => 0,
        _ => base | (63 - word.leading_zeros() as u8),
    }
}

/// What a local APIC holds of interrupts that were requested and not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interrupts {
    /// IRR: the vectors that are requested.
    pub requested: VectorWords,
    /// ISR: the vectors that are in service.
    pub in_service: VectorWords,
    /// TPR, the task priority.
    pub tpr: u8,
}

/// Offsets of the local APIC's registers in its page.
#[allow(missing_docs)] // The names are the manual's (SDM vol. 3A table 10-1).
pub mod reg {
    pub const ID: u32 = 0x20;
    pub const VERSION: u32 = 0x30;
    pub const TPR: u32 = 0x80;
    pub const APR: u32 = 0x90;
    pub const PPR: u32 = 0xa0;
    pub const EOI: u32 = 0xb0;
    pub const RRD: u32 = 0xc0;
    pub const LDR: u32 = 0xd0;
    pub const DFR: u32 = 0xe0;
    pub const SVR: u32 = 0xf0;
    /// First of eight in-service registers, 0x10 apart.
    pub const ISR: u32 = 0x100;
    /// First of eight trigger-mode registers.
    pub const TMR: u32 = 0x180;
    /// First of eight interrupt-request registers.
    pub const IRR: u32 = 0x200;
    pub const ESR: u32 = 0x280;
    pub const LVT_CMCI: u32 = 0x2f0;
    pub const ICR: u32 = 0x300;
    pub const ICR2: u32 = 0x310;
    pub const LVT_TIMER: u32 = 0x320;
    pub const LVT_THERMAL: u32 = 0x330;
    pub const LVT_PMC: u32 = 0x340;
    pub const LVT_LINT0: u32 = 0x350;
    pub const LVT_LINT1: u32 = 0x360;
    pub const LVT_ERROR: u32 = 0x370;
    pub const TIMER_INITIAL: u32 = 0x380;
    pub const TIMER_CURRENT: u32 = 0x390;
    pub const TIMER_DIVIDE: u32 = 0x3e0;
    /// x2APIC only: self IPI.
    // Reserved in the page: a store there is an error of the xAPIC.
    pub const SELF_IPI: u32 = 0x3f0;
    /// AMD: extended features.
    pub const EXT_FEATURE: u32 = 0x400;
    /// AMD: extended control.
    pub const EXT_CONTROL: u32 = 0x410;
    /// AMD: specific end of interrupt.
    pub const SEOI: u32 = 0x420;
}

/// Bits of IA32_APIC_BASE (SDM vol. 3A §10.4.4, §10.12.1).
pub mod base {
    /// The bootstrap processor.
    pub const BSP: u64 = 1 << 8;
    /// The APIC is in x2APIC mode.
    pub const EXTD: u64 = 1 << 10;
    /// APIC globally enabled.
    pub const ENABLE: u64 = 1 << 11;
    /// Page address, up to the physical-address width.
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
}

/// Bits of the spurious-interrupt vector register.
pub mod svr {
    /// Vector of the spurious interrupt.
    pub const VECTOR: u32 = 0xff;
    /// SVR: software has enabled the APIC.
    pub const ENABLE: u32 = 1 << 8;
    /// Focus-processor checking off.
    pub const FOCUS_OFF: u32 = 1 << 9;
    /// Do not broadcast EOI of level-triggered interrupts.
    // A guest that sets it tells the I/O APIC of ends itself, by a register that ours does not
    // have.
    pub const DIRECTED_EOI: u32 = 1 << 12;
    /// Value after reset.
    pub const RESET: u32 = 0xff;
}

/// Bits of the version register.
pub mod version {
    /// EOI broadcast can be suppressed.
    pub const DIRECTED_EOI: u32 = 1 << 24;
}

/// Bits of a local vector table entry (SDM vol. 3A fig. 10-8).
pub mod lvt {
    /// LVT: the interrupt's vector.
    pub const VECTOR: u32 = 0xff;
    /// Position of the delivery mode.
    pub const MODE_SHIFT: u32 = 8;
    /// Delivery mode, 3 bits.
    pub const MODE: u32 = 7 << 8;
    /// Delivery pending, read-only.
    pub const SEND_PENDING: u32 = 1 << 12;
    /// Active low (LINT0, LINT1).
    pub const POLARITY: u32 = 1 << 13;
    /// Remote IRR, read-only (LINT0, LINT1).
    pub const REMOTE_IRR: u32 = 1 << 14;
    /// Level-triggered (LINT0, LINT1).
    pub const LEVEL: u32 = 1 << 15;
    /// LVT: the entry is masked.
    pub const MASKED: u32 = 1 << 16;
    /// Position of the timer mode.
    pub const TIMER_MODE_SHIFT: u32 = 17;
    /// Timer mode, 2 bits.
    pub const TIMER_MODE: u32 = 3 << 17;
    /// Timer mode: count down and reload.
    pub const TIMER_PERIODIC: u32 = 1 << 17;
    /// Timer mode: fire when the TSC reaches IA32_TSC_DEADLINE.
    pub const TIMER_DEADLINE: u32 = 2 << 17;
}

/// Timer modes (field [`lvt::TIMER_MODE`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TimerMode {
    /// Count down once.
    OneShot = 0,
    /// Count down and reload.
    Periodic = 1,
    /// Fire when the TSC reaches IA32_TSC_DEADLINE.
    TscDeadline = 2,
    /// The encoding 3, which is reserved.
    Reserved = 3,
}

impl TimerMode {
    /// Reads the mode from the timer's LVT entry.
    #[inline]
    pub const fn from_lvt(lvt: u32) -> Self {
        // Four encodings, and all of them have a name: no write of a guest's is without an answer.
        match (lvt >> lvt::TIMER_MODE_SHIFT) & 3 {
            0 => Self::OneShot,
            1 => Self::Periodic,
            2 => Self::TscDeadline,
            _ => Self::Reserved,
        }
    }
}

/// Delivery modes of ICR, LVT, I/O APIC and MSI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DeliveryMode {
    /// To every CPU named.
    Fixed = 0,
    /// To the one with the lowest priority among those named.
    LowestPriority = 1,
    /// A system-management interrupt, SMI.
    Smi = 2,
    /// Reserved encoding 3 (remote read on old parts).
    Reserved = 3,
    /// A non-maskable interrupt, NMI.
    Nmi = 4,
    /// INIT: the processor is reset.
    Init = 5,
    /// Start-up IPI; reserved in LVT and I/O APIC.
    Sipi = 6,
    /// The 8259's interrupt.
    ExtInt = 7,
}

impl DeliveryMode {
    /// Reads the three low bits.
    #[inline]
    pub const fn from_bits(bits: u32) -> Self {
        // Cut here, so that callers can pass a register shifted and not masked.
        match bits & 7 {
            0 => Self::Fixed,
            1 => Self::LowestPriority,
            2 => Self::Smi,
            3 => Self::Reserved,
            4 => Self::Nmi,
            5 => Self::Init,
            6 => Self::Sipi,
            _ => Self::ExtInt,
        }
    }
}

/// Destination shorthands of the ICR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Shorthand {
    /// The destination field counts.
    None = 0,
    /// The sending CPU alone.
    SelfOnly = 1,
    /// Every processor, the sender too.
    All = 2,
    /// Every CPU but this one.
    AllButSelf = 3,
}

impl Shorthand {
    /// Reads the shorthand from the low half of an ICR.
    #[inline]
    pub const fn from_icr(icr: u32) -> Self {
        match (icr >> icr::SHORTHAND_SHIFT) & 3 {
            0 => Self::None,
            1 => Self::SelfOnly,
            2 => Self::All,
            _ => Self::AllButSelf,
        }
    }
}

/// Bits of the low half of the interrupt-command register (SDM vol. 3A fig. 10-12).
pub mod icr {
    /// ICR: the interrupt's vector.
    pub const VECTOR: u32 = 0xff;
    /// Position of the delivery mode.
    pub const MODE_SHIFT: u32 = 8;
    /// Delivery mode, 3 bits.
    pub const MODE: u32 = 7 << 8;
    /// Logical destination mode.
    pub const LOGICAL: u32 = 1 << 11;
    /// Delivery pending (xAPIC, read-only; always 0 here).
    pub const BUSY: u32 = 1 << 12;
    /// Assert, as against INIT de-assert.
    pub const ASSERT: u32 = 1 << 14;
    /// ICR: the interrupt is level-triggered.
    pub const LEVEL: u32 = 1 << 15;
    /// Position of the destination shorthand.
    pub const SHORTHAND_SHIFT: u32 = 18;
    /// Destination shorthand, 2 bits.
    pub const SHORTHAND: u32 = 3 << 18;
    /// Bits of an x2APIC ICR write that raise #GP: 13, 16, 17 and 20 to 31. Bit 12 ([`BUSY`]) is
    /// tolerated and dropped.
    // The upper half is the destination, where all bits count.
    pub const X2APIC_RESERVED: u64 = 0xfff3_2000;
}

/// Bits of the error-status register (SDM vol. 3A fig. 10-9).
pub mod esr {
    /// A vector below 16 was sent.
    pub const SEND_ILLEGAL_VECTOR: u32 = 1 << 5;
    /// A vector below 16 was received.
    pub const RECEIVED_ILLEGAL_VECTOR: u32 = 1 << 6;
    /// A reserved register was accessed.
    pub const ILLEGAL_REGISTER: u32 = 1 << 7;
}

/// Destination-format register values.
pub mod dfr {
    /// Flat logical model.
    pub const FLAT: u32 = 0xffff_ffff;
    /// Cluster logical model.
    pub const CLUSTER: u32 = 0x0fff_ffff;
}

/// The I/O APIC (Intel 82093AA data sheet).
pub mod ioapic {
    /// Offset of the index register.
    pub const IOREGSEL: u64 = 0x00;
    /// Offset of the data window.
    pub const IOWIN: u64 = 0x10;
    /// Offset of the EOI register (version 0x20 parts).
    pub const EOI: u64 = 0x40;
    /// Index of the id register.
    pub const ID: u32 = 0x00;
    /// Index of the version register.
    pub const VERSION: u32 = 0x01;
    /// Index of the arbitration register.
    pub const ARBITRATION: u32 = 0x02;
    /// Index of the first redirection entry's low half; two indices per entry.
    pub const REDIRECTION: u32 = 0x10;
    /// How many pins, each with its redirection entry.
    pub const PINS: usize = 24;
    /// Bytes of the register window.
    pub const WINDOW: u64 = 0x100;

    /// Delivery pending, read-only.
    pub const RTE_SEND_PENDING: u64 = 1 << 12;
    /// RTE: the pin is active low.
    pub const RTE_POLARITY: u64 = 1 << 13;
    /// Accepted by a local APIC and not yet ended, read-only.
    pub const RTE_REMOTE_IRR: u64 = 1 << 14;
    /// RTE: the pin is level-triggered.
    pub const RTE_LEVEL: u64 = 1 << 15;
    /// RTE: the pin is masked.
    pub const RTE_MASKED: u64 = 1 << 16;
    /// Logical destination mode.
    pub const RTE_LOGICAL: u64 = 1 << 11;
    /// Position of the 8-bit destination.
    pub const RTE_DESTINATION_SHIFT: u32 = 56;
}

/// Fields of a message-signalled interrupt (SDM vol. 3A §10.11).
pub mod msi {
    /// Base of the address.
    pub const ADDRESS_BASE: u64 = 0xfee0_0000;
    /// Position of the destination in the address's low half.
    pub const DESTINATION_SHIFT: u32 = 12;
    /// Logical destination mode (address).
    pub const LOGICAL: u32 = 1 << 2;
    /// Redirection hint (address).
    pub const REDIRECTION_HINT: u32 = 1 << 3;
    /// MSI data: the message is level-triggered.
    pub const LEVEL: u32 = 1 << 15;
    /// MSI data: the level is asserted.
    pub const ASSERT: u32 = 1 << 14;
}

/// Timer divisor for a divide-configuration register: 1 to 128 (SDM vol. 3A fig. 10-10).
#[inline]
pub const fn timer_divisor(tdcr: u32) -> u32 {
    // Bit 2 is zero by the manual: the number is bits 3, 1 and 0. Its last value divides by 1,
    // where the sum wraps.
    let code = (tdcr & 3) | ((tdcr & 8) >> 1);
    1 << ((code + 1) & 7)
}

/// Logical id of an x2APIC: cluster in bits 31:16, one bit of sixteen below (SDM vol. 3A
/// §10.12.10.2).
#[inline]
pub const fn x2apic_ldr(id: u32) -> u32 {
    // Of the id alone: in x2APIC mode software does not choose a logical id.
    ((id >> 4) << 16) | (1 << (id & 0xf))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_divisor_is_the_manuals() {
        let table = [(0, 2), (1, 4), (2, 8), (3, 16), (8, 32), (9, 64), (10, 128), (11, 1)];
        for (tdcr, divisor) in table {
            assert_eq!(timer_divisor(tdcr), divisor, "tdcr {tdcr}");
        }
    }

    #[test]
    fn the_highest_vector_is_found_in_every_word() {
        assert_eq!(highest(&[0; 4]), 0);
        for vector in 0..=255u8 {
            let mut words = [1, 0, 0, 0];
            words[usize::from(vector >> 6)] |= 1 << (vector & 63);
            assert_eq!(highest(&words), vector);
        }
    }

    #[test]
    fn modes_round_trip_through_their_encodings() {
        for bits in 0..8 {
            assert_eq!(DeliveryMode::from_bits(bits) as u32, bits);
        }
        for bits in 0..4u32 {
            assert_eq!(TimerMode::from_lvt(bits << 17) as u32, bits);
            assert_eq!(Shorthand::from_icr(bits << 18) as u32, bits);
        }
    }

    #[test]
    fn x2apic_logical_ids_name_cluster_and_bit() {
        assert_eq!(x2apic_ldr(0), 1);
        assert_eq!(x2apic_ldr(0x25), 0x0002_0020);
    }
}
