//! The interrupt message: what an I/O APIC pin, an MSI write or an ICR write puts on the bus, and
//! what a local APIC accepts. SDM vol. 3A §10.6 and §10.11.

use x86::Vector;

/// The physical destination that addresses every local APIC. The 0xff of I/O APIC pins and MSIs is
/// widened to it when the message is built, unless the VMM says that it is an id
/// (KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK).
pub const BROADCAST: u32 = u32::MAX;
/// The physical destination that addresses every local APIC in xAPIC mode.
pub const XAPIC_BROADCAST: u32 = 0xff;

/// How the receiver is to treat the message (SDM vol. 3A §10.6.1, ICR bits 10:8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DeliveryMode {
    /// To the IRR of every destination.
    Fixed = 0,
    /// To the IRR of one of the destinations.
    LowestPriority = 1,
    /// System management interrupt.
    Smi = 2,
    /// A non-maskable interrupt.
    Nmi = 4,
    /// INIT: the processor is reset.
    Init = 5,
    /// Start-up IPI; the vector is the page of the first instruction.
    Startup = 6,
    /// The vector comes from the 8259A.
    ExtInt = 7,
}

impl DeliveryMode {
    /// The three-bit field as found in an ICR, an LVT, a redirection entry or MSI data. Three is
    /// reserved and gives `None`.
    #[inline]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        Some(match bits & 7 {
            0 => Self::Fixed,
            1 => Self::LowestPriority,
            2 => Self::Smi,
            4 => Self::Nmi,
            5 => Self::Init,
            6 => Self::Startup,
            7 => Self::ExtInt,
            // Remote read on old parts; reserved since (SDM vol. 3A §10.6.1).
            _ => return None,
        })
    }

    /// The mode of a message to `dest`, of eight bits: nobody arbitrates for a physical broadcast, all take it, as on
    /// stock KVM.
    #[inline]
    pub const fn to(self, mode: DestMode, dest: u32) -> Self {
        match (self, mode, dest) {
            (Self::LowestPriority, DestMode::Physical, XAPIC_BROADCAST) => Self::Fixed,
            (mode, ..) => mode,
        }
    }
}

/// How the destination field is compared (SDM vol. 3A §10.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestMode {
    /// Against the APIC id.
    Physical,
    /// Against the logical destination register.
    Logical,
}

/// Edge or level (SDM vol. 3A §10.6.1, ICR bit 15).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// An edge: asserted once.
    Edge,
    /// A level: its end of interrupt goes back to the I/O APIC.
    Level,
}

/// Destination shorthand (ICR bits 19:18).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shorthand {
    /// The destination field decides.
    None,
    /// The sender alone.
    SelfOnly,
    /// Every processor, the sender too.
    All,
    /// Everybody but the sender.
    AllButSelf,
}

/// One interrupt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqMessage {
    /// Vector (for a start-up IPI, the page number).
    pub vector: Vector,
    /// The delivery mode of the message.
    pub delivery: DeliveryMode,
    /// The destination mode: physical or logical.
    pub dest_mode: DestMode,
    /// The trigger mode: edge or level.
    pub trigger: Trigger,
    /// ICR level bit: false only in the INIT level de-assert message.
    pub assert: bool,
    /// Somebody waits for this interrupt's end though it is edge-triggered: the receiver reports
    /// its EOI as that of a level one.
    pub notify_eoi: bool,
    /// The destination shorthand of an IPI.
    pub shorthand: Shorthand,
    /// Destination: APIC id or logical mask; [`BROADCAST`] is everybody.
    pub dest: u32,
}

impl IrqMessage {
    /// An edge-triggered fixed interrupt to one APIC id.
    pub const fn fixed(vector: Vector, dest: u32) -> Self {
        Self {
            vector,
            delivery: DeliveryMode::Fixed,
            dest_mode: DestMode::Physical,
            trigger: Trigger::Edge,
            assert: true,
            notify_eoi: false,
            shorthand: Shorthand::None,
            dest,
        }
    }
}

/// How the VMM wants the destinations of messages understood (KVM_CAP_X2APIC_API).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DestRules {
    /// MSIs have 32-bit ids.
    pub wide: bool,
    /// A byte of ones is an id to x2APICs, not a broadcast.
    pub no_broadcast_quirk: bool,
}

impl DestRules {
    /// Widens an eight-bit destination: 0xff may be a broadcast to x2APICs too, physical or logical, as on stock KVM.
    #[inline]
    pub const fn widen(self, dest: u8) -> u32 {
        // By the VMM's choice alone: whether the receiver is in x2APIC mode is not known here.
        if dest == 0xff && !self.no_broadcast_quirk { BROADCAST } else { dest as u32 }
    }
}

/// What became of a change on an interrupt line, as KVM_IRQ_LINE_STATUS reports it (KVM API §4.25).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineStatus {
    /// Masked or not connected: lost.
    Ignored,
    /// The previous one is still pending.
    Coalesced,
    /// Delivered to this many CPUs.
    Delivered(u32),
}

impl LineStatus {
    /// The number that goes to user space: -1, 0 or the count.
    pub const fn code(self) -> i32 {
        match self {
            Self::Ignored => -1,
            Self::Coalesced => 0,
            Self::Delivered(n) => n as i32,
        }
    }

    /// The sum over the several targets of one GSI: an ignored one does not hide a delivery.
    pub const fn and(self, other: Self) -> Self {
        match (self, other) {
            // A GSI has pins of two chips, of which a guest uses one and masks the other.
            (Self::Ignored, x) | (x, Self::Ignored) => x,
            // One CPU that took it newly makes it a delivery: a guest that counts ticks has got
            // one.
            (Self::Coalesced, x) | (x, Self::Coalesced) => x,
            // The API counts CPUs over all targets.
            (Self::Delivered(a), Self::Delivered(b)) => Self::Delivered(a.saturating_add(b)),
        }
    }
}
