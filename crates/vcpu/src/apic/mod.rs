//! The local APIC as its vCPU sees it: kept in software, or served by the hardware.

pub(crate) mod lapic;
pub(crate) mod served;
