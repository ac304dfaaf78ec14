//! What a vCPU's own thread knows to be pending.
//!
//! The inner loop looks at no request, signal or `need_resched` between two entries. It need not: whoever
//! makes something pending from another CPU sends an interrupt, and that ends the guest's run
//! (docs/adr/0005). So only what the loop itself does can change what the guest is to be given next: an
//! answer raises an exception, an end of interrupt lets a lower one through, a write of CR8 or RFLAGS
//! opens the guest for what waited. Each of those says so by [`Pending::raise`], and the loop looks once
//! after an answer, at one byte.
//!
//! What then happens to an interrupt has four names, here as everywhere:
//!
//! - it is *raised*: something may have become deliverable, so that it is looked for before the next
//!   entry. It is wrong to forget it and harmless to raise it too often;
//! - it is *offered*: the highest interrupt leaves the IRR, and the hardware delivers it as soon as the
//!   guest can take it, without an exit ([`AfterExit`]);
//! - it is *taken*: the guest has, which is seen after the next exit;
//! - it is *withdrawn*: back into the IRR, because somebody wants to see the whole state of the local
//!   APIC, or because a higher one came.
//!
//! What comes from elsewhere is not here: requests of other CPUs are in [`vm::vcpu_shared`], the events
//! themselves in [`Events`](crate::run::events::Events).

use vm::vcpu_shared::VcpuShared;

use crate::run::after_exit::AfterExit;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    raised: bool,
    /// Events are asked where they go: a guest's guest runs, or the guest's hypervisor holds events back.
    pub gated: bool,
    /// A virtual interrupt of the guest's hypervisor waits for its guest.
    pub offered_by_l1: bool,
    /// A PV EOI is offered to the guest: the APIC is to be touched only after looking at it.
    pub pv_eoi_offered: bool,
    /// What has to be looked at after every exit.
    pub after_exit: AfterExit,
    /// The VMM wants KVM_RUN to return as soon as the guest can take an interrupt.
    pub window_wanted: bool,
    /// The HLT that the loop was left for has retired already.
    pub hlt_retired: bool,
    /// The task priority that was last taken from the hardware.
    pub cr8_seen: u8,
}

impl Default for Pending {
    /// Nothing is known of what waits.
    fn default() -> Self {
        Self {
            raised: true,
            gated: false,
            offered_by_l1: false,
            pv_eoi_offered: false,
            after_exit: AfterExit::default(),
            window_wanted: false,
            hlt_retired: false,
            cr8_seen: 0,
        }
    }
}

impl Pending {
    /// Something may have become deliverable: it is looked for before the next entry.
    #[inline(always)]
    pub(crate) fn raise(&mut self) {
        self.raised = true;
    }

    /// Raises, if `so`: as [`Pending::raise`].
    #[inline(always)]
    pub(crate) fn raise_if(&mut self, so: bool) {
        self.raised |= so;
    }

    /// Whether something may have become deliverable since the last look.
    #[inline(always)]
    pub(crate) fn is_raised(&self) -> bool {
        self.raised
    }

    /// A look for what is deliverable begins: what is raised from now on is for the next.
    #[inline(always)]
    pub(crate) fn take(&mut self) {
        self.raised = false;
    }

    /// Whether the VMM waits for the moment at which an interrupt of its own could be injected, and it can come: not
    /// where the local APIC takes none of a PIC.
    pub(crate) fn awaits_window(&self, shared: &VcpuShared) -> bool {
        self.window_wanted && (!shared.in_kernel_apic || shared.lapic.accepts_pic())
    }

    /// Puts an offered interrupt back into the IRR; the hardware's offer stands until the next.
    #[inline]
    pub(crate) fn put_back_offer(&mut self, shared: &VcpuShared) {
        if let Some(vector) = self.after_exit.take_offered() {
            // The VMM's own waits where it gave it to us, until it is taken.
            if shared.in_kernel_apic {
                shared.lapic.set_irr(vector);
            }
        }
    }
}
