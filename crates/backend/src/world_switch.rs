//! The inner loop's two ends.

use crate::Gprs;

/// Where the thread most likely goes when it has left the inner loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onward {
    /// Into the guest again, sooner or later: what the host needs only in user space may be put off.
    ToGuest,
    /// To user space, for this exit: nothing is gained by putting that off.
    ToUser,
}

/// Loading and unloading a guest. Between the two it makes its [`turns`](crate::Turn).
pub trait WorldSwitch {
    /// With interrupts off: whether CPU number `here`, on which this runs, may take the control block. It may
    /// not while another CPU holds it.
    fn may_run_on(&self, here: usize) -> bool;
    /// With interrupts on: has the CPU that holds the control block give it up.
    fn release_elsewhere(&mut self);

    /// A new KVM_RUN begins on this thread.
    fn begin_run(&mut self);
    /// Enters the inner loop on this CPU, number `here`: host state saved, guest state loaded, no interrupts.
    fn load(&mut self, here: usize);
    /// The loop is about to be left: completes what of the general registers was not read yet.
    fn complete(&mut self, gprs: &mut Gprs);
    /// Leaves the inner loop: undoes [`load`](WorldSwitch::load). Interrupts are still disabled.
    fn unload(&mut self, onward: Onward);

    /// Makes kernel calls possible without leaving the loop: loads the host's segment state.
    fn host_segments(&mut self);
    /// Undoes [`host_segments`](WorldSwitch::host_segments).
    fn guest_segments(&mut self);
}
