//! Control registers and EFER, as the guest sees them.

use x86::{Cr0, Cr4, Efer};

use crate::ability::PdpteRegisters;

/// The control registers and EFER as the guest sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ControlRegs {
    pub cr0: Cr0,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: Cr4,
    pub efer: Efer,
}

/// Control registers and EFER. What is returned is what the guest sees, never what the hardware holds in
/// its place.
pub trait ControlRegisters {
    /// The PDPTEs, where they are part of a guest's state.
    type Pdptes: PdpteRegisters;

    /// The control registers and EFER, all at once.
    fn control(&self) -> ControlRegs;
    /// The guest's CR0 alone.
    fn cr0(&self) -> Cr0;
    /// The guest's CR4 alone.
    fn cr4(&self) -> Cr4;
    /// CR4 as far as CPUID shows it: OSXSAVE and PKE.
    fn cr4_shown(&self) -> Cr4;
    /// The guest's EFER alone.
    fn efer(&self) -> Efer;
    /// Sets the guest's CR0.
    fn set_cr0(&mut self, value: Cr0);
    /// Sets the guest's CR2.
    fn set_cr2(&mut self, value: u64);
    /// Sets the guest's CR3.
    fn set_cr3(&mut self, value: u64);
    /// Sets the guest's CR4.
    fn set_cr4(&mut self, value: Cr4);
    /// Sets the guest's EFER.
    fn set_efer(&mut self, value: Efer);
    /// Task priority as the hardware holds it, 0 to 15.
    fn cr8(&self) -> u8;
    /// Sets the task priority.
    fn set_cr8(&mut self, value: u8);
    /// Whether CR0.CD and CR0.NW are kept from the hardware, as they are unless this says otherwise. Nothing
    /// where the memory types of guests do not follow them.
    fn hide_cache_disable(&mut self, hide: bool);

    /// The PDPTEs where they are registers that the hardware does not load by itself.
    fn pdptes(&self) -> Option<&Self::Pdptes>;
    /// The PDPTEs, to be set, where they are such registers.
    fn pdptes_mut(&mut self) -> Option<&mut Self::Pdptes>;
}
