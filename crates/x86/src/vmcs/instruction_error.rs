//! VM-instruction error numbers.

/// Why a VMX instruction failed with a current VMCS (SDM vol. 3C §31.4, table 31-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)] // The manual's sentences, shortened.
pub enum InstructionError {
    VmcallInRoot = 1,
    VmclearAddress = 2,
    VmclearVmxonPointer = 3,
    VmlaunchNotClear = 4,
    VmresumeNotLaunched = 5,
    VmresumeAfterVmxoff = 6,
    InvalidControls = 7,
    InvalidHostState = 8,
    VmptrldAddress = 9,
    VmptrldVmxonPointer = 10,
    VmptrldRevision = 11,
    UnsupportedField = 12,
    ReadOnlyField = 13,
    VmxonInRoot = 15,
    ExecutiveVmcs = 16,
    ExecutiveVmcsNotLaunched = 17,
    ExecutiveVmcsNotVmxon = 18,
    VmcallNotClear = 19,
    VmcallExitControls = 20,
    VmcallRevision = 22,
    VmxoffUnderDualMonitor = 23,
    VmcallSmm = 24,
    EntryExecutionControls = 25,
    EntryBlockedByMovSs = 26,
    InvalidInvalidation = 28,
}

impl InstructionError {
    /// The number that the VM-instruction error field holds.
    pub const fn number(self) -> u32 {
        self as u32
    }
}
