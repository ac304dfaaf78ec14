//! The local APIC as its vCPU sees it: kept in software, or served by the hardware.

pub(crate) mod lapic;
pub(crate) mod served;

use backend::{Backend, ServedApic};
use irqchip::lapic::Lapic;

/// Whether the hardware has the APIC's interrupts.
#[inline(always)]
pub(crate) fn apic_is_served(b: &impl Backend) -> bool {
    b.served_apic().is_some_and(ServedApic::is_serving)
}

/// The hardware serves the APIC no longer; it does not have the state.
#[inline]
pub(crate) fn stop_serving_apic(b: &mut impl Backend) {
    if let Some(apic) = b.served_apic_mut() {
        apic.stop();
    }
}

/// Whether the APIC that is served has an interrupt that its priority lets through.
#[inline]
pub(crate) fn served_interrupt_waits(b: &impl Backend, lapic: &Lapic) -> bool {
    let more = lapic.highest_requested();
    b.served_apic().is_some_and(|apic| apic.interrupt_waits(more))
}
