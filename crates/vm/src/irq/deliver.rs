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
/// of one id all take it, as on a bus.
#[inline]
fn to_id(vcpus: &VcpuTable, msg: &IrqMessage) -> LineStatus {
    let mut tally = Tally::new();
    // By index and not by search: an IPI to one of 200 vCPUs must not look at the other 199.
    let own = vcpus.by_id(msg.dest).filter(|v| v.lapic.matches(msg));
    if let Some(vcpu) = own {
        tally.give(vcpu, msg);
        // Above 255, or without aliases, nobody else answers to this id.
        if msg.dest > 0xff || !vcpus.census().aliases() {
            return tally.0;
        }
    } else if vcpus.census().is_plain() {
        // Nobody has another id than its vCPU's: the message goes nowhere.
        return tally.0;
    }
    // Ids that the guest has written, or of which an xAPIC shows the low byte.
    let is_own = |v: &SharedVcpu| own.is_some_and(|own| own.index == v.index);
    for vcpu in vcpus.iter().filter(|v| v.lapic.matches(msg) && !is_own(v)) {
        tally.give(vcpu, msg);
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
    match msg.shorthand {
        // A shorthand of a device's has no self.
        Shorthand::SelfOnly => {
            if let Some(vcpu) = from {
                tally.give(vcpu, msg);
            }
        }
        Shorthand::All | Shorthand::AllButSelf => {
            let but_self = msg.shorthand == Shorthand::AllButSelf;
            for vcpu in vcpus.iter() {
                // Shorthands mean the APICs that are on, and compare no ids (SDM vol. 3A §10.6.1).
                if vcpu.lapic.enabled() && !(but_self && is_sender(vcpu)) {
                    tally.give(vcpu, msg);
                }
            }
        }
        Shorthand::None if msg.delivery == DeliveryMode::LowestPriority => {
            if let Some(vcpu) = lowest_priority(vcpus, msg) {
                tally.give(vcpu, msg);
            }
        }
        Shorthand::None => {
            if msg.dest_mode == DestMode::Logical && to_cluster(vcpus, msg, &mut tally) {
                return tally.0;
            }
            for vcpu in vcpus.iter().filter(|v| v.lapic.matches(msg)) {
                tally.give(vcpu, msg);
            }
        }
    }
    tally.0
}

/// An x2APIC logical destination: a cluster of sixteen ids and a mask. True when everybody whom it
/// can mean was where the id says; nothing was delivered otherwise.
fn to_cluster(vcpus: &VcpuTable, msg: &IrqMessage, tally: &mut Tally) -> bool {
    // Broadcast means everybody, whatever the cluster.
    if msg.dest == BROADCAST {
        return false;
    }
    // Bits 31:16 of a logical id are the x2APIC id's bits above 3 (SDM vol. 3A §10.12.10.2).
    let first = msg.dest >> 16 << 4;
    let members =
        || (0..16).filter(|bit| msg.dest & 1 << bit != 0).map(|bit| vcpus.by_id(first | bit));
    // All or none: if one is not where its id says, an xAPIC may answer to these bits too, and
    // everybody has to be asked.
    let all_there = members()
        .all(|v| v.is_some_and(|v| v.lapic.mode() == LapicMode::X2Apic && v.lapic.matches(msg)));
    if all_there {
        members().flatten().for_each(|v| tally.give(v, msg));
    }
    all_there
}

/// Of those addressed and enabled, one of the lowest priority class. Among equals the vector
/// decides, so that a device's interrupts stay on one vCPU and different devices' spread.
fn lowest_priority<'a>(vcpus: &'a VcpuTable, msg: &IrqMessage) -> Option<&'a SharedVcpu> {
    // A local APIC that software has switched off takes part in no arbitration.
    let candidates = || vcpus.iter().filter(|v| v.lapic.software_enabled() && v.lapic.matches(msg));
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
            changes in proptest::collection::vec((0..8usize, 0..6u8, prop_oneof![0..6u8, 253..=255u8]), 0..12),
            dests in proptest::collection::vec(prop_oneof![0..6u32, 253..262u32, 510..515u32, Just(BROADCAST)], 1..8),
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
            for (n, dest) in dests.into_iter().enumerate() {
                let message = IrqMessage::fixed(Vector(0x40 + n as u8), dest);
                let meant: Vec<u32> =
                    table.iter().filter(|v| v.lapic.matches(&message)).map(|v| v.id).collect();
                let status = deliver(&table, None, &message);
                let got: Vec<u32> =
                    table.iter().filter(|v| has(v, message.vector)).map(|v| v.id).collect();
                prop_assert_eq!(&got, &meant, "destination {}", dest);
                let count = meant.len() as u32;
                let expected =
                    if count == 0 { LineStatus::Ignored } else { LineStatus::Delivered(count) };
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
