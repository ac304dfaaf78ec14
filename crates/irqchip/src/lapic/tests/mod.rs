//! The local APIC held against SDM vol. 3A chapter 10.

mod interrupts;
mod properties;
mod registers;
mod saved;
mod timer;
mod watched;

use super::*;
use crate::message::Trigger;
use regs::LapicEffect;

const NOW: u64 = 1_000_000_000;

/// Offsets that the tests use.
const TPR: u32 = 0x80;
const EOI: u32 = 0xb0;
const SVR: u32 = 0xf0;
const ICR: u32 = 0x300;
const ICR2: u32 = 0x310;
const LVT_TIMER: u32 = 0x320;
const LVT_LINT0: u32 = 0x350;
const LVT_ERROR: u32 = 0x370;
const TMICT: u32 = 0x380;
const TMCCT: u32 = 0x390;
const TDCR: u32 = 0x3e0;

/// An xAPIC, enabled by software.
fn xapic(id: u32) -> Lapic {
    let lapic = Lapic::new(id, CpuRole::bootstrap_if(id == 0));
    let _ = lapic.write(SVR, 0x1ff);
    lapic
}

const RULES: BaseRules = BaseRules { maxphyaddr: 48, x2apic: true, host: false };

/// An x2APIC, enabled by software.
fn x2apic(id: u32) -> Lapic {
    let lapic = xapic(id);
    lapic.set_base(lapic.base() | base::EXTD, RULES).unwrap();
    lapic
}

fn read(lapic: &Lapic, offset: u32) -> u32 {
    lapic.read(offset, || NOW)
}

/// Takes the highest pending vector as a CPU does.
fn take(lapic: &Lapic) -> Option<u8> {
    let vector = lapic.highest_pending()?;
    lapic.ack(vector);
    Some(vector.0)
}

fn pend(lapic: &Lapic, vector: u8) -> Accepted {
    lapic.accept_fixed(x86::Vector(vector), Trigger::Edge)
}
