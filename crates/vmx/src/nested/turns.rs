//! VMCS12s change: the vmcs02 that L2 is entered with gives way to the one that its VMCS12 had before.

use core::mem;

use host::KBox;
use nested_vmx::machine::Composed;
use x86::Gpa;

use super::{
    kept::Nested,
    seconds::{Second, choose},
};
use crate::state::attention;

impl Nested {
    /// Before an instruction after which another VMCS may be current. `other`: it makes another current.
    pub(super) fn set_down(&mut self, other: bool) {
        let m = &self.machine;
        // A shadow VMCS is never entered: vmcs02 stays that of the one before.
        let Some(at) = m.current().filter(|_| !self.without_tracking && !m.vmcs12().is_shadow())
        else {
            return;
        };
        let seconds = &mut self.seconds;
        // An L1 with one VMCS costs no memory, unless it makes that current once more.
        if seconds.composed.is_none() && other {
            seconds.composed = KBox::new(Composed::NOTHING).ok();
        }
        if let Some(composed) = &mut seconds.composed {
            m.set_down(composed);
            seconds.of = Some(at);
        }
    }

    /// Behind such an instruction: the VMCS12 that is current gets the vmcs02 that it had before. `before`: what was current
    /// then. `attention`: the vCPU's.
    pub(super) fn take_up(&mut self, before: Option<Gpa>, revision: u32, attention: u16) {
        let m = &mut self.machine;
        let Some(at) = m.current().filter(|at| Some(*at) != before && !m.vmcs12().is_shadow())
        else {
            return;
        };
        let seconds = &mut self.seconds;
        let Some(here) = seconds.composed.as_mut().filter(|_| !self.without_tracking) else {
            return;
        };
        let of = seconds.of.replace(at);
        if of == Some(at) {
            // A shadow VMCS was current meanwhile, or none.
            return m.take_up(here, here);
        }
        let make = || Second::new(revision, seconds.flushes);
        let Some(second) = choose(&mut seconds.all, at, make) else { return m.take_up(here, here) };
        mem::swap(&mut second.vmcs, &mut self.other);
        mem::swap(&mut second.made, &mut self.made);
        mem::swap(&mut second.composed, here);
        second.of = of;
        seconds.left = seconds.left.wrapping_add(1);
        second.left = seconds.left;
        // Which pointer it was that was flushed meanwhile is not asked.
        let then = mem::replace(&mut second.flushes, seconds.flushes);
        self.made.flush_due |= then != seconds.flushes;
        // What waits was for the one that goes, too, and reaches it no more.
        if attention & attention::FLUSH_TDP != 0 {
            seconds.flushes = seconds.flushes.wrapping_add(1);
        }
        if attention & attention::FLUSH != 0 {
            second.vmcs.drop_vpid();
        }
        if second.vmcs.is_unnoted() {
            // It was read outside the loop, and nobody would clear it later.
            second.vmcs.clear_elsewhere();
        }
        // It has the thread's words of another run.
        self.has_host = false;
        m.take_up(here, &second.composed);
    }
}
