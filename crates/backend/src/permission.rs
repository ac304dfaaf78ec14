//! What a guest may do without an exit.

use x86::{Cr4, Directions};

/// What a guest may do without an exit, derived from its CPUID by the run loop.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestLimits {
    /// CR4 bits that its CPUID offers.
    pub cr4_allowed: Cr4,
    /// SPEC_CTRL exists for it, on this CPU too.
    pub spec_ctrl: bool,
    /// PRED_CMD exists for it, on this CPU too.
    pub pred_cmd: bool,
    /// FLUSH_CMD exists for it, on this CPU too.
    pub flush_cmd: bool,
    /// RDTSCP or RDPID exists for it: TSC_AUX is live.
    pub tsc_aux: bool,
    /// XSAVE exists for it.
    pub xsave: bool,
    /// INVPCID exists for it.
    pub invpcid: bool,
    /// RDRAND exists for it.
    pub rdrand: bool,
    /// RDSEED exists for it.
    pub rdseed: bool,
    /// VMX exists for it.
    pub vmx: bool,
    /// Transactional regions exist for it, on this CPU too.
    pub rtm: bool,
    /// Its CPUID tells of a vendor whose SYSENTER_ESP and SYSENTER_EIP have 64 bits; those of AMD's CPUs have 32.
    pub wide_sysenter: bool,
    /// EFER bits that its CPUID offers.
    pub efer_allowed: u64,
    /// Bits of its physical addresses.
    pub maxphyaddr: u8,
    /// SVM's features that its CPUID offers (Fn8000_000A EDX); 0 where it has no SVM.
    pub svm_features: u32,
}

/// Exits that a VMM gives up for guests that have their CPUs to themselves
/// (KVM_CAP_X86_DISABLE_EXITS).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FewerExits {
    /// MONITOR and MWAIT are the guest's.
    pub mwait: bool,
    /// HLT is: the guest's run goes on, without instructions, until an interrupt comes.
    pub hlt: bool,
    /// Loops of PAUSE are not left.
    pub pause: bool,
    /// The guest reads how long its core was in which C-state.
    pub cstate: bool,
}

/// Exceptions of the guest that the VMM's debugger wants to see (KVM_SET_GUEST_DEBUG).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DebuggerWants {
    /// Breakpoints in the code: #BP.
    pub breakpoints: bool,
    /// Single steps: #DB.
    pub steps: bool,
}

/// What exits, as far as the guest's CPUID and the VMM decide.
pub trait Permissions {
    /// Sets what the guest may do without an exit.
    fn set_limits(&mut self, limits: GuestLimits);
    /// Makes accesses of MSRs exit that the hardware would serve; `denied` says which. After [`set_limits`](Permissions::set_limits) anew.
    fn set_msr_filter(&mut self, denied: impl Fn(u32) -> Directions);
    /// Gives up exits. Once, before the first entry.
    fn give_up_exits(&mut self, exits: FewerExits);
    /// Sets which exceptions the VMM's debugger wants to see: guest-debug exits.
    fn set_guest_debug(&mut self, wanted: DebuggerWants);
}
