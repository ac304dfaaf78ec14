//! The MSRs that a backend keeps, and two questions to the host's CPU.

/// The refusal of an MSR that the backend does not own, or that the CPU alone has as long as the loop runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotMine;

/// MSRs that live in the control block or in hardware.
pub trait Msrs {
    /// Reads an MSR that lives in the control block or in hardware. Inside the loop one that the guest changes in the CPU
    /// without an exit is refused: nobody is given what the control block had of it before.
    fn msr(&self, index: u32) -> Result<u64, NotMine>;
    /// Writes such an MSR; the value was validated by the caller. Inside the loop one is refused that would be lost when the
    /// CPU gives its registers back.
    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), NotMine>;
    /// Makes an IBPB that the guest asked for; only where the CPU has PRED_CMD.
    fn prediction_barrier(&mut self);
    /// Has the guest run without speculative store bypass, by its VIRT_SPEC_CTRL. Outside of
    /// [`load`](crate::WorldSwitch::load) and [`unload`](crate::WorldSwitch::unload).
    fn set_virt_ssbd(&mut self, on: bool);
    /// The host's CPUID: EAX, EBX, ECX, EDX. Only to measure what it costs not to know them.
    fn host_cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4];
}
