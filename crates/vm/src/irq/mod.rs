use crate::vcpu_shared::SharedVcpu;
use host::NoMemory;
use irqchip::IrqMessage;
use x86::{Gpa, Vector};
pub struct VmIrq;
impl VmIrq {
    pub fn new() -> Result<Self, NoMemory> {
        Ok(Self)
    }
}
impl crate::Vm {
    pub fn extint_pending(&self, _: &SharedVcpu) -> bool {
        false
    }
    pub fn extint_ack(&self) -> Option<Vector> {
        None
    }
    pub fn counts_eoi(&self, _: Vector) -> bool {
        false
    }
    pub fn eoi(&self, _: Vector, _: bool) {}
    pub fn apic_changed(&self) {}
    pub fn send_ipi(&self, _: &SharedVcpu, _: &IrqMessage) -> bool {
        false
    }
    pub fn kernel_has_port(&self, _: u16) -> bool {
        false
    }
    pub fn port_read(&self, _: u16, _: u8, _: &mut u32) -> bool {
        false
    }
    pub fn port_write(&self, _: u16, _: u8, _: u32) -> bool {
        false
    }
    pub fn mmio_read(&self, _: Gpa, _: &mut [u8]) -> bool {
        false
    }
    pub fn mmio_write(&self, _: Gpa, _: &[u8]) -> bool {
        false
    }
}
