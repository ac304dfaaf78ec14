//! The state of a guest that is a hypervisor, as user space saves and restores it (KVM API §4.114, §4.115).

use crate::{L1Memory, ability::Absent};

/// Why a state is not restored. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unrestorable {
    /// It contradicts itself, or cannot be of this vCPU.
    Invalid,
    /// It says that it is longer than what could be read of it.
    Missing,
    /// There is no memory to restore it.
    NoMemory,
}

/// Saving and restoring what belongs to a guest that is a hypervisor, as bytes in KVM's format.
pub trait NestedState {
    /// A state that was found good, with all the memory that its restore takes. What was checked is what is restored:
    /// neither L1's memory nor the allocator has a say between the two, when L2's run has ended already.
    type Checked;

    /// Bytes that the state has now.
    fn state_size(&self) -> usize;

    /// Writes the state into zeros. Which level runs, and what it does, stays as it is. Outside the loop.
    ///
    /// # Errors
    /// There is no memory to do it.
    fn save_state(
        &mut self,
        gprs: &crate::Gprs,
        into: &mut [u8],
        l1: &impl L1Memory,
    ) -> Result<(), Unrestorable>;

    /// Whether a restored state waits for memory of L1's that it names ([`Self::settle_state`]).
    fn is_unsettled(&self) -> bool {
        // Only VMX has such a page: its enlightened control block stays in L1's memory.
        false
    }

    /// Whether system-management mode has put an L2 aside, that RSM enters as it was checked.
    fn has_l2_aside(&self) -> bool {
        // SVM keeps it in L1's memory, and RSM checks what it finds there.
        false
    }

    /// Before the first run with a restored state: what of it lies in L1's memory is looked for there.
    fn settle_state(&mut self, _l1: &impl L1Memory) {}

    /// Makes of these bytes what [`restore_state`](Self::restore_state) takes. `smm`: the vCPU is in system-management
    /// mode. Nothing changes.
    ///
    /// # Errors
    /// Why they are refused.
    fn check_state(
        &mut self,
        bytes: &[u8],
        smm: bool,
        l1: &impl L1Memory,
    ) -> Result<Self::Checked, Unrestorable>;

    /// Restores a state, while L1 runs. Of memory nothing has to be there yet.
    fn restore_state(&mut self, gprs: &mut crate::Gprs, checked: Self::Checked, l1: &impl L1Memory);
}

// No value of the type exists, so that none of these is ever called.
impl NestedState for Absent {
    type Checked = Self;

    fn state_size(&self) -> usize {
        match *self {}
    }
    fn save_state(
        &mut self,
        _: &crate::Gprs,
        _: &mut [u8],
        _: &impl L1Memory,
    ) -> Result<(), Unrestorable> {
        match *self {}
    }
    fn check_state(&mut self, _: &[u8], _: bool, _: &impl L1Memory) -> Result<Self, Unrestorable> {
        match *self {}
    }
    fn restore_state(&mut self, _: &mut crate::Gprs, _: Self, _: &impl L1Memory) {
        match *self {}
    }
}
