//! Message-signalled interrupts: address and data to an [`IrqMessage`]. SDM vol. 3A §10.11.

use x86::Vector;

use crate::message::{DeliveryMode, DestMode, DestRules, IrqMessage, Shorthand, Trigger};

/// The two halves of an MSI as a device or KVM_SIGNAL_MSI gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Msi {
    /// Address bits 31:0.
    pub address_lo: u32,
    /// Address bits 63:32; with 32-bit destination ids its bits 31:8 are id bits 31:8.
    pub address_hi: u32,
    /// The data written.
    pub data: u32,
}

impl Msi {
    /// The message that this write stands for, `None` for the reserved delivery mode.
    ///
    #[inline]
    pub fn message(&self, rules: DestRules) -> Option<IrqMessage> {
        let dest_mode =
            if self.address_lo & (1 << 2) != 0 { DestMode::Logical } else { DestMode::Physical };
        let redirect = self.address_lo & (1 << 3) != 0;
        // The upper bits of the address are not checked: who sends here has decided that it is a
        // message.
        let low = (self.address_lo >> 12) as u8;
        // Else the high half is not looked at, as in stock KVM.
        let high = if rules.wide { self.address_hi & 0xffff_ff00 } else { 0 };
        // With a high half 0xff is no broadcast, for the id has more than eight bits.
        let dest = if high == 0 { rules.widen(low) } else { high | u32::from(low) };
        let delivery = match DeliveryMode::from_bits(self.data >> 8)? {
            // The redirection hint asks for one receiver out of those addressed.
            // Only fixed ones: an NMI or INIT goes to all that it names.
            DeliveryMode::Fixed | DeliveryMode::LowestPriority if redirect => {
                DeliveryMode::LowestPriority
            }
            mode => mode.to(dest_mode, high | u32::from(low)),
        };
        // A message is no line. The bit says how its end is told; whether it asserts (bit 14) is
        // not asked (SDM vol. 3A §10.11.2).
        let level = self.data & (1 << 15) != 0;
        Some(IrqMessage {
            vector: Vector(self.data as u8),
            delivery,
            dest_mode,
            trigger: if level { Trigger::Level } else { Trigger::Edge },
            assert: true,
            notify_eoi: false,
            shorthand: Shorthand::None,
            dest,
        })
    }

    /// Whether the address is one that KVM accepts: with 32-bit ids the low byte of the high half
    /// is reserved (KVM API §4.70).
    pub const fn valid(&self, rules: DestRules) -> bool {
        !rules.wide || self.address_hi & 0xff == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::BROADCAST;

    const NARROW: DestRules = DestRules { wide: false, no_broadcast_quirk: false };
    const WIDE: DestRules = DestRules { wide: true, no_broadcast_quirk: false };

    #[test]
    fn address_and_data_are_decoded() {
        let msi = Msi { address_lo: 0xfee0_5004, address_hi: 0, data: 0x8000 | 0x41 };
        let m = msi.message(NARROW).unwrap();
        assert_eq!(m.dest, 5);
        assert_eq!(m.dest_mode, DestMode::Logical);
        assert_eq!(m.vector, Vector(0x41));
        assert_eq!(m.trigger, Trigger::Level);
        assert_eq!(m.delivery, DeliveryMode::Fixed);
    }

    #[test]
    fn redirection_hint_asks_for_one_receiver() {
        let m = Msi { address_lo: 0xfee0_300c, address_hi: 0, data: 0x30 }.message(NARROW).unwrap();
        assert_eq!(m.delivery, DeliveryMode::LowestPriority);
    }

    #[test]
    fn nobody_arbitrates_for_a_physical_broadcast_but_by_the_hint() {
        let mode = |address_lo, address_hi, data| {
            Msi { address_lo, address_hi, data }.message(WIDE).unwrap().delivery
        };
        assert_eq!(mode(0xfeef_f000, 0, 0x130), DeliveryMode::Fixed);
        assert_eq!(mode(0xfeef_f008, 0, 0x130), DeliveryMode::LowestPriority);
        assert_eq!(mode(0xfeef_f008, 0, 0x030), DeliveryMode::LowestPriority);
        assert_eq!(mode(0xfeef_f004, 0, 0x130), DeliveryMode::LowestPriority, "logical");
        assert_eq!(mode(0xfeef_f000, 0x100, 0x130), DeliveryMode::LowestPriority, "an id");
    }

    #[test]
    fn wide_destinations_count_only_when_enabled() {
        let msi = Msi { address_lo: 0xfee0_1000, address_hi: 0x100, data: 0x30 };
        assert_eq!(msi.message(WIDE).unwrap().dest, 0x101);
        assert_eq!(msi.message(NARROW).unwrap().dest, 1);
        assert!(!Msi { address_hi: 1, ..msi }.valid(WIDE));
        assert!(Msi { address_hi: 1, ..msi }.valid(NARROW));
    }

    #[test]
    fn ff_is_a_broadcast_in_either_mode_unless_the_vmm_says_otherwise() {
        let m = Msi { address_lo: 0xfeef_f000, address_hi: 0, data: 0x30 };
        assert_eq!(m.message(NARROW).unwrap().dest, BROADCAST);
        // With wide ids 0x1ff is an ordinary id.
        assert_eq!(Msi { address_hi: 0x100, ..m }.message(WIDE).unwrap().dest, 0x1ff);
        for wide in [false, true] {
            let rules = DestRules { wide, no_broadcast_quirk: true };
            assert_eq!(m.message(rules).unwrap().dest, 0xff);
        }
        let logical = Msi { address_lo: 0xfeef_f004, ..m };
        assert_eq!(logical.message(NARROW).unwrap().dest, BROADCAST);
        let literal = DestRules { wide: false, no_broadcast_quirk: true };
        assert_eq!(logical.message(literal).unwrap().dest, 0xff);
    }

    #[test]
    fn reserved_delivery_mode_is_no_message() {
        assert!(
            Msi { address_lo: 0xfee0_0000, address_hi: 0, data: 0x330 }.message(NARROW).is_none()
        );
    }
}
