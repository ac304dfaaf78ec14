//! From a message to the local APICs that it addresses. SDM vol. 3A §10.6.2.
//!
//! The common cases do not look at every vCPU: a physical destination is an APIC id, which is
//! nearly always the vCPU's, and an x2APIC cluster is sixteen of those.

use irqchip::{
    DeliveryMode, DestMode, IrqMessage, LineStatus, Shorthand,
    lapic::{Accepted, LapicMode},
    message::{BROADCAST, XAPIC_BROADCAST},
};

use crate::{
    vcpu_shared::{SharedVcpu, VcpuShared},
    vcpus::VcpuTable,
};

/// Counts what the receivers made of a message.
struct Tally(LineStatus);

impl Tally {
    const fn new() -> Self {
        Self(LineStatus::Ignored)
    }

    #[inline]
    fn give(&mut self, vcpu: &VcpuShared, msg: &IrqMessage) {
        let accepted = vcpu.lapic.accept(msg);
        let status = match accepted {
            Accepted::Ignored => LineStatus::Ignored,
            Accepted::Coalesced => LineStatus::Coalesced,
            Accepted::Pending
            | Accepted::Nmi
            | Accepted::Smi
            | Accepted::Init
            | Accepted::Sipi(_)
            | Accepted::ExtInt => LineStatus::Delivered(1),
        };
        self.0 = self.0.and(status);
        vcpu.deliver(accepted);
    }
}

/// Delivers a message; `from` is the sender of an IPI, whom a shorthand may mean. Any context.
#[inline]
pub fn deliver(vcpus: &VcpuTable, from: Option<&VcpuShared>, msg: &IrqMessage) -> LineStatus {
    if msg.shorthand == Shorthand::None
        && msg.dest_mode == DestMode::Physical
        && msg.dest != BROADCAST
        && msg.dest != XAPIC_BROADCAST
    {
        return to_id(vcpus, msg);
    }
    to_many(vcpus, from, msg)
}

/// A physical destination that is no broadcast: nearly always one APIC, whose vCPU has this id. Several
/// of one id all take it, as on a bus, unless they arbitrate.
#[inline]
fn to_id(vcpus: &VcpuTable, msg: &IrqMessage) -> LineStatus {
    let mut tally = Tally::new();
    // By index and not by search: an IPI to one of 200 vCPUs must not look at the other 199.
    match vcpus.by_id(msg.dest).filter(|v| v.lapic.matches(msg)) {
        // Above 255, or without aliases, nobody else answers to this id.
        Some(vcpu) if msg.dest > 0xff || !vcpus.census().aliases() => tally.give(vcpu, msg),
        // Nobody has another id than its vCPU's: the message goes nowhere.
        None if vcpus.census().is_plain() => {}
        // Ids that the guest has written, or of which an xAPIC shows the low byte.
        _ => return to_many(vcpus, None, msg),
    }
    tally.0
}

/// The vCPU with the id that is the destination, and no other: for a hypercall, whose ids are those of
/// vCPUs.
pub fn to_vcpu(vcpus: &VcpuTable, msg: &IrqMessage) -> LineStatus {
    let mut tally = Tally::new();
    // The hypercall names vCPUs by their ids; whether the guest's APIC is enabled still counts, as
    // on stock KVM.
    if let Some(vcpu) = vcpus.by_id(msg.dest).filter(|vcpu| vcpu.lapic.enabled()) {
        tally.give(vcpu, msg);
    }
    tally.0
}

fn to_many(vcpus: &VcpuTable, from: Option<&VcpuShared>, msg: &IrqMessage) -> LineStatus {
    let mut tally = Tally::new();
    let is_sender = |v: &SharedVcpu| from.is_some_and(|f| f.index == v.index);
    // Shorthands mean the APICs that are on, and compare no ids (SDM vol. 3A §10.6.1).
    let is_named = |v: &SharedVcpu| match msg.shorthand {
        Shorthand::None => v.lapic.matches(msg),
        Shorthand::SelfOnly => is_sender(v),
        Shorthand::All => v.lapic.enabled(),
        Shorthand::AllButSelf => v.lapic.enabled() && !is_sender(v),
    };
    if msg.shorthand == Shorthand::SelfOnly {
        // A shorthand of a device's has no self.
        if let Some(vcpu) = from {
            tally.give(vcpu, msg);
        }
        return tally.0;
    }
    if msg.delivery == DeliveryMode::LowestPriority {
        return to_one(vcpus, msg, is_named);
    }
    let logical = msg.shorthand == Shorthand::None && msg.dest_mode == DestMode::Logical;
    if logical && to_cluster(vcpus, msg, &mut tally) {
        return tally.0;
    }
    for vcpu in vcpus.iter().filter(|v| is_named(v)) {
        tally.give(vcpu, msg);
    }
    tally.0
}

/// To one of those that `is_named` says, whose priority is the lowest.
fn to_one(
    vcpus: &VcpuTable,
    msg: &IrqMessage,
    is_named: impl Fn(&SharedVcpu) -> bool,
) -> LineStatus {
    let mut tally = Tally::new();
    if let Some(vcpu) = lowest_priority(vcpus, msg, is_named) {
        tally.give(vcpu, msg);
    }
    tally.0
}

/// An x2APIC logical destination: a cluster of sixteen ids and a mask. True when everybody whom it
/// can mean was where the id says; nothing was delivered otherwise.
fn to_cluster(vcpus: &VcpuTable, msg: &IrqMessage, tally: &mut Tally) -> bool {
    // Broadcast means everybody, whatever the cluster; and in eight bits an xAPIC finds its logical id, too, which the
    // guest has chosen.
    if msg.dest == BROADCAST || msg.dest <= 0xff && vcpus.census().has_xapics() {
        return false;
    }
    // Bits 31:16 of a logical id are the x2APIC id's bits above 3 (SDM vol. 3A §10.12.10.2).
    let first = msg.dest >> 16 << 4;
    let members =
        || (0..16).filter(|bit| msg.dest & 1 << bit != 0).map(|bit| vcpus.by_id(first | bit));
    // All or none: if one is not where its id says, everybody is asked.
    let all_there = members()
        .all(|v| v.is_some_and(|v| v.lapic.mode() == LapicMode::X2Apic && v.lapic.matches(msg)));
    if all_there {
        members().flatten().for_each(|v| tally.give(v, msg));
    }
    all_there
}

/// Of those named and enabled, one of the lowest priority class. Among equals the vector
/// decides, so that a device's interrupts stay on one vCPU and different devices' spread.
fn lowest_priority<'a>(
    vcpus: &'a VcpuTable,
    msg: &IrqMessage,
    is_named: impl Fn(&SharedVcpu) -> bool,
) -> Option<&'a SharedVcpu> {
    // A local APIC that software has switched off takes part in no arbitration.
    let candidates = || vcpus.iter().filter(|v| v.lapic.software_enabled() && is_named(v));
    let (mut best, mut equals) = (u8::MAX, 0usize);
    for vcpu in candidates() {
        // By priority class: the low half of PPR does not hold interrupts back (SDM vol. 3A
        // §10.8.3.1).
        let class = vcpu.lapic.ppr() >> 4;
        if class < best {
            (best, equals) = (class, 1);
        } else if class == best {
            equals += 1;
        }
    }
    // None addressed: the message is lost, as on a bus.
    let chosen = usize::from(msg.vector.0).checked_rem(equals)?;
    // A priority may have changed meanwhile; then any candidate will do.
    candidates().filter(|v| v.lapic.ppr() >> 4 == best).nth(chosen).or_else(|| candidates().next())
}

#[cfg(test)]
mod tests {
    use alloc::{vec, vec::Vec};
    use irqchip::{
        LapicEffect,
        lapic::{BaseRules, base},
    };
    use proptest::prelude::*;
    use x86::Vector;

    use super::*;
    use irqchip::Trigger;
    use irqchip::lapic::{CpuRole, Lint0};

    const SVR: u32 = 0xf0;
    const ID: u32 = 0x20;
    const LDR: u32 = 0xd0;
    const RULES: BaseRules = BaseRules { maxphyaddr: 40, x2apic: true, host: true };

    /// One change of a local APIC.
    fn change(vcpu: &VcpuShared, kind: u8, id: u8) {
        let at = |flags| 0xfee0_0000 | flags;
        let _ = match kind {
            0 => vcpu.lapic.set_base(at(base::ENABLE | base::EXTD), RULES),
            1 => vcpu.lapic.set_base(at(base::ENABLE), RULES),
            2 => vcpu.lapic.set_base(at(0), RULES),
            3 => {
                vcpu.lapic.reset(CpuRole::Application, Lint0::Masked);
                Ok(Default::default())
            }
            4 => {
                // None of the mode's that is forgotten in x2APIC mode.
                let at = (vcpu.lapic.mode() == LapicMode::XApic).then_some(LDR);
                let _ = at.map(|at| vcpu.lapic.write(at, u32::from(id) << 24));
                Ok(Default::default())
            }
            _ => {
                // As the guest does it: there is no such register in x2APIC mode.
                let at = (vcpu.lapic.mode() == LapicMode::XApic).then_some(ID);
                let _ = at.map(|at| vcpu.lapic.write(at, u32::from(id) << 24));
                Ok(Default::default())
            }
        };
        let _ = vcpu.lapic.write(SVR, 0x1ff);
    }

    proptest! {
        #[test]
        fn everybody_whom_a_destination_means_gets_it_and_nobody_else(
            ids in proptest::collection::hash_set(prop_oneof![0..6u32, 254..262u32, 510..515u32], 1..8),
            changes in proptest::collection::vec((0..8usize, 0..7u8, prop_oneof![0..6u8, 253..=255u8]), 0..12),
            messages in proptest::collection::vec(
                (
                    prop_oneof![0..6u32, 253..262u32, 510..515u32, 0x1_0000..0x1_0008u32, Just(BROADCAST)],
                    any::<bool>(),
                    any::<bool>(),
                    prop_oneof![3 => Just(Shorthand::None), 1 => Just(Shorthand::All), 1 => Just(Shorthand::AllButSelf)],
                ),
                1..8,
            ),
        ) {
            let table = VcpuTable::new().unwrap();
            for (index, id) in ids.iter().enumerate() {
                let vcpu = VcpuShared::new(*id, index as u32, CpuRole::bootstrap_if(index == 0), true).unwrap();
                let _ = vcpu.lapic.write(SVR, 0x1ff);
                table.add(vcpu).unwrap();
            }
            for (index, kind, id) in changes {
                if let Some(vcpu) = table.get(index % ids.len()) {
                    change(vcpu, kind, id);
                }
            }
            let from = table.get(0).unwrap();
            for (n, (dest, logical, one, shorthand)) in messages.into_iter().enumerate() {
                let message = IrqMessage {
                    delivery: if one { DeliveryMode::LowestPriority } else { DeliveryMode::Fixed },
                    dest_mode: if logical { DestMode::Logical } else { DestMode::Physical },
                    shorthand,
                    ..IrqMessage::fixed(Vector(0x40 + n as u8), dest)
                };
                let is_meant = |v: &&SharedVcpu| match shorthand {
                    Shorthand::None => v.lapic.matches(&message),
                    Shorthand::AllButSelf if v.index == from.index => false,
                    _ => v.lapic.enabled(),
                };
                let meant: Vec<u32> = table.iter().filter(is_meant).map(|v| v.id).collect();
                let status = deliver(&table, Some(from), &message);
                let got: Vec<u32> =
                    table.iter().filter(|v| has(v, message.vector)).map(|v| v.id).collect();
                if one {
                    prop_assert_eq!(got.len(), meant.len().min(1), "{:?}", message);
                    prop_assert!(got.iter().all(|id| meant.contains(id)), "{:?}", message);
                } else {
                    prop_assert_eq!(&got, &meant, "{:?}", message);
                }
                let expected = match got.len() as u32 {
                    0 => LineStatus::Ignored,
                    count => LineStatus::Delivered(count),
                };
                prop_assert_eq!(status, expected);
            }
        }
    }

    #[test]
    fn an_ipi_reaches_the_vcpu_of_its_destination_and_not_a_sender_that_shows_the_same_byte() {
        const ICR: u32 = 0x300;
        const ICR2: u32 = 0x310;
        for wide in [false, true] {
            for (n, sender) in [0x105, 5].into_iter().enumerate() {
                let table = VcpuTable::new().unwrap();
                for (index, id) in [5, 0x105].into_iter().enumerate() {
                    let vcpu =
                        VcpuShared::new(id, index as u32, CpuRole::bootstrap_if(index == 0), true)
                            .unwrap();
                    let _ = vcpu.lapic.write(SVR, 0x1ff);
                    table.add(vcpu).unwrap();
                }
                table.census().set_wide(wide);
                let vector = Vector(0x40 + n as u8);
                let from = table.by_id(sender).unwrap();
                let _ = from.lapic.write(ICR2, 5 << 24);
                match from.lapic.write(ICR, vector.0.into()) {
                    LapicEffect::SelfIpi(vector) => {
                        let _ = from.lapic.accept_fixed(vector, Trigger::Edge);
                    }
                    LapicEffect::SendIpi(message) => {
                        deliver(&table, Some(from), &message);
                    }
                    effect => panic!("{effect:?}"),
                }
                let got: Vec<u32> = table.iter().filter(|v| has(v, vector)).map(|v| v.id).collect();
                let meant = if wide { vec![5] } else { vec![5, 0x105] };
                assert_eq!(got, meant, "from {sender:#x}, wide: {wide}");
            }
        }
    }

    #[test]
    fn an_xapic_is_named_beside_the_x2apics_that_are_all_there() {
        let table = VcpuTable::new().unwrap();
        for index in 0..2 {
            let role = CpuRole::bootstrap_if(index == 0);
            let vcpu = VcpuShared::new(index, index, role, true).unwrap();
            let _ = vcpu.lapic.write(SVR, 0x1ff);
            table.add(vcpu).unwrap();
        }
        let first = table.get(0).unwrap();
        change(first, 0, 0);
        change(table.get(1).unwrap(), 4, 1);
        let message =
            IrqMessage { dest_mode: DestMode::Logical, ..IrqMessage::fixed(Vector(0x40), 1) };
        assert_eq!(deliver(&table, Some(first), &message), LineStatus::Delivered(2));
        change(table.get(1).unwrap(), 0, 0);
        assert!(!table.census().has_xapics());
        let other = IrqMessage { vector: Vector(0x41), ..message };
        assert_eq!(deliver(&table, Some(first), &other), LineStatus::Delivered(1));
    }

    #[test]
    fn a_vcpu_that_is_dropped_is_counted_no_more() {
        let table = VcpuTable::new().unwrap();
        let vcpu = VcpuShared::new(0x105, 0, CpuRole::Application, true).unwrap();
        vcpu.lapic.join(&table.census).unwrap();
        assert!(!table.census().is_plain());
        drop(vcpu);
        assert!(table.census().is_plain());
    }

    fn has(vcpu: &VcpuShared, vector: Vector) -> bool {
        let word = vcpu.lapic.read(0x200 + u32::from(vector.0 >> 5) * 16, || 0);
        word & 1 << (vector.0 & 31) != 0
    }
}
