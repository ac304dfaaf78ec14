//! The half of a vCPU that other CPUs touch: its local APIC, its mode, its requests, its sleep.
//!
//! How a sender reaches a vCPU that may be in the guest: [`crate::kick`]. While the vCPU stays in the
//! inner loop nothing can become pending without an IPI, so the loop looks at nothing.
//!
//! Why there are two halves: the thread in KVM_RUN holds its own half (`vcpu::Vcpu`) for as long as the guest runs,
//! perhaps for ever. Nobody else can wait for that. What others need stands here, all of it atomic, so that an
//! interrupt handler can use it as well as a system call.
//!
//! Why requests are bits and not messages: a bit that is set twice is done once, and setting it cannot fail. Each
//! says only *that* something changed; the vCPU looks up *what* when it serves the request, so the last change wins
//! and no order between senders is needed.
//!
//! Why an interrupt is not a request of its own: it is in the IRR of the local APIC, and [`Request::Event`] makes
//! the vCPU look there. NMI, INIT and SIPI have no place in an APIC's registers, and so are words here.

use core::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{AcqRel, Acquire, SeqCst},
};

use host::{Arc, NoMemory, task::Waiter, timer::WithTimer};
use irqchip::lapic::{CpuRole, Lapic, Lint0, base};
use stats::VcpuStats;
use x86::Vector;

use crate::kick::KickState;

/// A vCPU as others hold it.
pub type SharedVcpu = Arc<WithTimer<VcpuShared>>;

/// Something that the vCPU has to look at before it enters the guest again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Request {
    /// TDP translations were withdrawn, or shadow tables changed: flush what was made from them.
    FlushTlb = 1 << 0,
    /// An interrupt, NMI, INIT or SIPI may be pending.
    Event = 1 << 1,
    /// The clock that the guest reads has to be published anew.
    Clock = 1 << 2,
    /// The VM is dead: leave; what is asked of it next gets EIO.
    Dead = 1 << 3,
    /// A TSC deadline has come of which the guest may have stored a later one.
    Deadline = 1 << 4,
    /// A system-management interrupt arrived.
    Smi = 1 << 5,
    /// The VM's filter of MSRs changed.
    MsrFilter = 1 << 6,
    /// Logging of written pages goes on or off.
    PageLog = 1 << 7,
    /// Routes whose ends the VMM's I/O APIC waits for changed, or what the local APIC takes of them.
    Routes = 1 << 8,
    /// The guest reaches memory of a device of the host's.
    Device = 1 << 9,
    /// The page of the guest's steal time is another one.
    StealTime = 1 << 10,
}

/// KVM_MP_STATE_* (KVM API §4.38).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MpState {
    /// Running or ready to.
    Runnable = 0,
    /// An application processor before INIT.
    Uninitialized = 1,
    /// INIT arrived; waits for SIPI.
    InitReceived = 2,
    /// The vCPU executed HLT and waits.
    Halted = 3,
    /// A SIPI arrived and was not yet acted upon.
    SipiReceived = 4,
}

impl MpState {
    /// From the number that user space gives.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Runnable,
            1 => Self::Uninitialized,
            2 => Self::InitReceived,
            3 => Self::Halted,
            4 => Self::SipiReceived,
            // The numbers above 4 are other architectures' and SEV-ES's.
            _ => return None,
        })
    }
}

const INIT: u32 = 1 << 8;
const SIPI: u32 = 1 << 9;

/// The shared half of a vCPU.
pub struct VcpuShared {
    /// KVM's vCPU id, also the initial APIC id.
    pub id: u32,
    /// The vCPU's place in the VM's table.
    pub index: u32,
    /// Whether the VM has an in-kernel irqchip.
    pub in_kernel_apic: bool,
    /// The local APIC; dormant when the irqchip is in user space.
    pub lapic: Lapic,
    /// Where it sleeps.
    pub waiter: Waiter,
    /// What its thread counts.
    pub stats: Arc<VcpuStats>,
    state: KickState,
    nmis: AtomicU32,
    init_sipi: AtomicU32,
    mp_state: AtomicU32,
    /// The next halt, or the one that lasts, is over: KVM_HC_KICK_CPU.
    unhalted: AtomicBool,
}

impl VcpuShared {
    /// A vCPU at its place in the VM's table.
    #[inline(never)]
    pub fn new(
        id: u32,
        index: u32,
        role: CpuRole,
        in_kernel_apic: bool,
    ) -> Result<SharedVcpu, NoMemory> {
        // Without a local APIC of ours INIT and SIPI are the VMM's business: nobody else could
        // start it.
        let state = if role.is_bootstrap() || !in_kernel_apic {
            MpState::Runnable
        } else {
            MpState::Uninitialized
        };
        Self {
            id,
            index,
            in_kernel_apic,
            lapic: Lapic::new(id, role),
            waiter: Waiter::new()?,
            stats: VcpuStats::shared()?,
            // What the VM was told before this vCPU was there it learns at its first entry, by the way of any later change.
            state: KickState::new(
                Request::Clock as u32
                    | Request::MsrFilter as u32
                    | Request::PageLog as u32
                    | Request::Routes as u32
                    | Request::Device as u32,
            ),
            nmis: AtomicU32::new(0),
            init_sipi: AtomicU32::new(0),
            mp_state: AtomicU32::new(state as u32),
            unhalted: AtomicBool::new(false),
        }
        .with_timer()
    }

    /// Whether an address is in the local APIC's page, enabled there or not.
    #[inline]
    pub fn is_apic_page(&self, address: u64) -> bool {
        // Bits 11:0 of the base are flags.
        self.in_kernel_apic && address & !0xfff == self.lapic.base() & !0xfff
    }

    /// Out of line: with its timer it is a second thing of that size on the stack.
    #[inline(never)]
    fn with_timer(self) -> Result<SharedVcpu, NoMemory> {
        let role = CpuRole::bootstrap_if(self.lapic.base() & base::BSP != 0);
        let shared = WithTimer::new(self)?;
        // As firmware leaves it: the bootstrap processor takes the 8259A's interrupts.
        let lint0 = if role.is_bootstrap() { Lint0::ExtInt } else { Lint0::Masked };
        shared.lapic.reset(role, lint0);
        Ok(shared)
    }

    /// Makes a request visible. The vCPU is not kicked.
    #[inline]
    pub fn request(&self, request: Request) {
        self.state.request(request as u32);
    }

    /// Takes all requests.
    #[inline]
    pub fn take_requests(&self) -> u32 {
        self.state.take_requests()
    }

    /// Takes one kind of request alone, for the vCPU between runs. Whether it was there.
    pub fn take_request(&self, request: Request) -> bool {
        // Taken whole and put back in part: the word is exchanged and added to, nothing else, and that is model-checked.
        let (bit, all) = (request as u32, self.take_requests());
        if all & !bit != 0 {
            self.state.request(all & !bit);
        }
        all & bit != 0
    }

    /// Whether there is a request.
    #[inline]
    pub fn has_requests(&self) -> bool {
        self.state.has_requests()
    }

    /// The vCPU's mode, where it runs, its requests.
    #[inline]
    pub(crate) fn state(&self) -> &KickState {
        &self.state
    }

    /// The physical CPU it runs on, if it may be in guest mode and not have seen the latest request.
    pub fn running_on(&self) -> Option<usize> {
        self.state.running_on().map(|cpu| cpu as usize)
    }

    /// One more NMI. Of those that wait at most two count (APM vol. 2 §8.1.5: one to be handled, one
    /// behind it); the vCPU itself knows whether one is being handled, see
    /// [`limit_nmis`](Self::limit_nmis).
    pub fn add_nmi(&self) {
        let _ = self.nmis.fetch_update(AcqRel, Acquire, |n| Some((n + 1).min(2)));
        self.request(Request::Event);
    }

    /// While an NMI is handled only one more can wait; the others merge with it.
    pub fn limit_nmis(&self) {
        // While one is handled the processor latches one more (SDM vol. 3A §6.7.1).
        let _ = self.nmis.fetch_update(AcqRel, Acquire, |n| (n > 1).then_some(1));
    }

    /// Number of NMIs that wait.
    #[inline]
    pub fn nmis(&self) -> u32 {
        self.nmis.load(Acquire)
    }

    /// Takes one of them.
    pub fn take_nmi(&self) -> bool {
        self.nmis.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1)).is_ok()
    }

    /// Sets the number of waiting NMIs (KVM_SET_VCPU_EVENTS).
    pub fn set_nmis(&self, n: u32) {
        // The VMM's number, and the guest's limit: see `add_nmi`.
        self.nmis.store(n.min(2), core::sync::atomic::Ordering::Release);
    }

    pub(crate) fn init_received(&self) {
        // An INIT forgets a SIPI that came before it.
        self.init_sipi.store(INIT, SeqCst);
        self.request(Request::Event);
    }

    pub(crate) fn sipi_received(&self, page: Vector) {
        // INIT stays: it is served first, and the SIPI behind it starts the vCPU.
        // Only the last SIPI counts: a second one before the first was taken overwrites its page.
        let _ = self
            .init_sipi
            .fetch_update(AcqRel, Acquire, |bits| Some((bits & INIT) | SIPI | u32::from(page.0)));
        self.request(Request::Event);
    }

    /// Takes a pending INIT and a pending SIPI's start page.
    pub fn take_init_sipi(&self) -> (bool, Option<Vector>) {
        // A load first: this is asked on the way to an entry, and nearly always nothing is there.
        if self.init_sipi.load(Acquire) == 0 {
            return (false, None);
        }
        let bits = self.init_sipi.swap(0, AcqRel);
        // Both in one word, so that an INIT between the two takes cannot be lost or turned round.
        (bits & INIT != 0, (bits & SIPI != 0).then_some(Vector(bits as u8)))
    }

    /// Makes an INIT pending that was held back, or takes a pending one back. A SIPI stays.
    pub fn set_init(&self, pending: bool) {
        if pending {
            // Added, for a SIPI may wait behind it.
            self.init_sipi.fetch_or(INIT, SeqCst);
            self.request(Request::Event);
        } else {
            self.init_sipi.fetch_and(!INIT, SeqCst);
        }
    }

    /// Whether an INIT waits.
    pub fn has_init(&self) -> bool {
        self.init_sipi.load(Acquire) & INIT != 0
    }

    /// Whether an INIT or SIPI waits.
    #[inline]
    pub fn has_init_sipi(&self) -> bool {
        self.init_sipi.load(Acquire) != 0
    }

    /// Wakes the vCPU from HLT, or spares it the next one, whether or not it lets interrupts in (`hypercalls.rst`,
    /// KVM_HC_KICK_CPU).
    pub fn unhalt(&self) {
        self.unhalted.store(true, SeqCst);
        self.request_and_kick(Request::Event);
    }

    /// Whether it was woken so and has not gone on yet.
    pub fn is_unhalted(&self) -> bool {
        self.unhalted.load(SeqCst)
    }

    /// Takes such a waking, and says whether there was one.
    pub fn take_unhalt(&self) -> bool {
        self.unhalted.swap(false, SeqCst)
    }

    /// The multiprocessor state.
    #[inline]
    pub fn mp_state(&self) -> MpState {
        // Written by set_mp_state() alone: the default only spares a panic.
        MpState::from_raw(self.mp_state.load(Acquire)).unwrap_or(MpState::Runnable)
    }

    /// Sets the multiprocessor state.
    pub fn set_mp_state(&self, state: MpState) {
        self.mp_state.store(state as u32, core::sync::atomic::Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use irqchip::lapic::Accepted;

    fn vcpu() -> SharedVcpu {
        VcpuShared::new(0, 0, CpuRole::Bootstrap, true).unwrap()
    }

    #[test]
    fn an_init_forgets_an_earlier_sipi_and_a_later_one_stays() {
        let v = vcpu();
        v.deliver(Accepted::Sipi(Vector(8)));
        v.deliver(Accepted::Init);
        assert_eq!(v.take_init_sipi(), (true, None));
        v.deliver(Accepted::Init);
        v.deliver(Accepted::Sipi(Vector(9)));
        assert_eq!(v.take_init_sipi(), (true, Some(Vector(9))));
        assert_eq!(v.take_init_sipi(), (false, None));
    }

    #[test]
    fn no_more_than_two_nmis_are_held() {
        let v = vcpu();
        for _ in 0..5 {
            v.deliver(Accepted::Nmi);
        }
        assert!(v.take_nmi() && v.take_nmi() && !v.take_nmi());
    }
}
