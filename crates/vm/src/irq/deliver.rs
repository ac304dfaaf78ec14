//! From a message to the local APICs that it addresses. SDM vol. 3A §10.6.2.
//!
//! The common cases do not look at every vCPU: a physical destination is an APIC id, which is
//! nearly always the vCPU's place in the table, and so is an x2APIC cluster's.

use irqchip::{
    DeliveryMode, DestMode, IrqMessage, LineStatus, Shorthand,
    lapic::{Accepted, LapicMode},
    message::BROADCAST,
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
            _ => LineStatus::Delivered(1),
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
    {
        return to_one(vcpus, msg);
    }
    to_many(vcpus, from, msg)
}

/// A physical destination that is no broadcast.
#[inline]
fn to_one(vcpus: &VcpuTable, msg: &IrqMessage) -> LineStatus {
    let mut tally = Tally::new();
    if let Some(vcpu) = vcpus.get(msg.dest as usize)
        && vcpu.lapic.matches(msg)
    {
        tally.give(vcpu, msg);
        return tally.0;
    }
    // Ids that the VMM gave out of order, or that the guest changed.
    for vcpu in vcpus.iter().filter(|v| v.lapic.matches(msg)) {
        tally.give(vcpu, msg);
    }
    tally.0
}

fn to_many(vcpus: &VcpuTable, from: Option<&VcpuShared>, msg: &IrqMessage) -> LineStatus {
    let mut tally = Tally::new();
    let is_sender = |v: &SharedVcpu| from.is_some_and(|f| f.index == v.index);
    match msg.shorthand {
        Shorthand::SelfOnly => {
            if let Some(vcpu) = from {
                tally.give(vcpu, msg);
            }
        }
        Shorthand::All | Shorthand::AllButSelf => {
            let but_self = msg.shorthand == Shorthand::AllButSelf;
            for vcpu in vcpus.iter() {
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
    if msg.dest == BROADCAST {
        return false;
    }
    let first = (msg.dest >> 16 << 4) as usize;
    let members = || {
        (0..16).filter(|bit| msg.dest & 1 << bit != 0).map(|bit| vcpus.get(first + bit as usize))
    };
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
    let candidates = || vcpus.iter().filter(|v| v.lapic.software_enabled() && v.lapic.matches(msg));
    let (mut best, mut equals) = (u8::MAX, 0usize);
    for vcpu in candidates() {
        let class = vcpu.lapic.ppr() >> 4;
        if class < best {
            (best, equals) = (class, 1);
        } else if class == best {
            equals += 1;
        }
    }
    let chosen = usize::from(msg.vector.0).checked_rem(equals)?;
    // A priority may have changed meanwhile; then any candidate will do.
    candidates().filter(|v| v.lapic.ppr() >> 4 == best).nth(chosen).or_else(|| candidates().next())
}
