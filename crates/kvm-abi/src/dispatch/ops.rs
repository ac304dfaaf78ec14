//! What the dispatch asks of the floors below. Everything an implementation gets has been copied
//! from user space and checked as far as that needs no state; every error is already an errno,
//! which `errno` makes from the floors' own errors.
//!
//! Methods with a body are optional: the body is what stock KVM does where the feature is missing.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::DerefMut;
use core::sync::atomic::AtomicU64;

pub use ::vm::irq::Irqchip;
use host::Fault;
use mmu::AddressSpace;
use x86::{Gfn, Hva};

use crate::caps::Offer;
use crate::errno::Errno;
use crate::exit::{ErrorData, RunInput, RunOutput, UserExit};
use crate::uapi::clock::KvmClockData;
use crate::uapi::cpuid::KvmCpuidEntry2;
use crate::uapi::debug::KvmGuestDebug;
use crate::uapi::event::{KvmIoeventfd, KvmIrqfd};
use crate::uapi::irqchip::*;
use crate::uapi::memory::KvmCoalescedMmioZone;
use crate::uapi::registers::*;
use crate::uapi::vcpu_state::{KvmVcpuEvents, KvmX86Mce};

/// An MSR that does not exist for this vCPU, or a value it does not take. The count that
/// KVM_GET_MSRS and KVM_SET_MSRS return ends before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrRefused;

/// What /dev/kvm can be asked.
pub trait SystemOps {
    /// What there is to offer.
    fn offer(&self) -> &Offer;
    /// Makes a VM of the current address space and a file for it. Returns its descriptor.
    fn create_vm(&self) -> Result<i32, Errno>;
    /// The CPUID that guests can be given.
    fn supported_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno>;
    /// What guests can be shown of Hyper-V's interface.
    fn hyperv_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno>;
    /// The CPUID that can be given because we emulate it.
    fn emulated_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno> {
        Ok(Vec::new())
    }
    /// MSRs that a VMM must save and restore.
    fn msr_indices(&self) -> Result<Vec<u32>, Errno>;
    /// MSRs that describe the host to a VMM.
    fn feature_msr_indices(&self) -> Result<Vec<u32>, Errno>;
    /// One of those.
    fn feature_msr(&self, index: u32) -> Result<u64, MsrRefused>;
}

/// Whether a VM has local APICs of ours.
#[inline]
pub fn has_lapic(irqchip: Irqchip) -> bool {
    // With a split irqchip the local APICs are ours all the same.
    irqchip != Irqchip::None
}

/// The frequency that KVM_SET_TSC_KHZ asks for; 0 is the host's.
pub fn requested_tsc_khz(offer: &Offer, arg: u64) -> Result<u32, Errno> {
    // Stock KVM cuts the argument to 32 bits, too.
    let khz = arg as u32;
    // Without scaling the limit says nothing: whoever sets the rate compares it with the host's.
    if offer.tsc_scaling && khz >= offer.max_tsc_khz {
        return Err(Errno::EINVAL);
    }
    // 0 stands for the host's rate in the API, so that no guest's clock can be stopped by it.
    Ok(if khz == 0 { offer.tsc_khz } else { khz })
}

/// A slot's number and the address space it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotId {
    /// The address space.
    pub space: AddressSpace,
    /// The number of the slot.
    pub number: u16,
}

/// A memory slot as user space describes it. Aligned, and within the 64 bits; whether it overlaps
/// another, or reaches beyond what the hardware can address, is for the VM to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Which slot it is.
    pub slot: SlotId,
    /// First guest frame.
    pub base: Gfn,
    /// Pages; 0 deletes the slot.
    pub pages: u64,
    /// Where it lies in the VMM.
    pub hva: Hva,
    /// Keep a dirty bitmap.
    pub log_dirty: bool,
    /// Guest writes exit as MMIO.
    pub read_only: bool,
}

/// A setting of a VM (KVM_ENABLE_CAP). Only what the offer has is ever asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Local APICs are ours, and so many routes are kept for the VMM's I/O APIC. `EEXIST` with an
    /// irqchip or with vCPUs.
    SplitIrqchip(u32),
    /// The flags of KVM_CAP_X2APIC_API.
    X2apicApi(u64),
    /// These quirks are off.
    DisableQuirks(u64),
    /// Nanoseconds in a cycle of the local APIC timers' clock. `ENXIO` without local APICs, `EINVAL` with
    /// vCPUs.
    ApicBusCycles(u32),
    /// Exceptions are saved with their payload.
    ExceptionPayload(bool),
    /// A pending triple fault is saved.
    TripleFaultEvent(bool),
    /// The guest may read MSR_PLATFORM_INFO.
    MsrPlatformInfo(bool),
    /// These exits are off, beside those that are already, for vCPUs that are made from now on.
    DisableExits(u64),
    /// What cannot be emulated exits at any privilege level.
    ExitOnEmulationFailure(bool),
    /// Nanoseconds of halt polling.
    HaltPoll(u32),
    /// vCPU ids are below this. `EINVAL` if set otherwise before, or when the boot id is higher.
    MaxVcpuId(u32),
    /// The flags of KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.
    ManualDirtyLog(u64),
    /// Which refused accesses to MSRs exit: KVM_CAP_X86_USER_SPACE_MSR.
    UserSpaceMsr(u64),
}

/// A VM file.
#[allow(unused_variables, reason = "the bodies stand for what is missing")]
pub trait VmOps {
    /// Whether the caller's address space is the VM's and the VM is alive.
    fn belongs_to_caller(&self) -> bool;
    /// What there is to offer.
    fn offer(&self) -> &Offer;
    /// Makes a file with the VM's statistics; returns the descriptor.
    fn stats_file(&self) -> Result<i32, Errno>;
    /// Nanoseconds in a cycle of the local APIC timers' clock.
    fn bus_cycle_ns(&self) -> u32;
    /// vCPUs made so far.
    fn created_vcpus(&self) -> u32;
    /// Makes a vCPU and a file for it; returns the descriptor. `EEXIST`: the id is taken.
    /// `EINVAL`: there are enough.
    fn create_vcpu(&self, id: u32) -> Result<i32, Errno>;

    /// Makes, moves, changes or deletes a slot. `EEXIST`: overlaps another. `EINVAL`: nothing to
    /// delete, or a change that a slot cannot have.
    fn set_memory_region(&self, region: &MemoryRegion) -> Result<(), Errno>;
    /// Gives `out` the bitmap of a slot, one bit per page; cleared unless clearing is manual. `EINVAL`: no such number.
    /// `ENOENT`: no bitmap. `EFAULT`: `out` failed.
    fn dirty_log(
        &self,
        slot: SlotId,
        out: impl FnOnce(&[u64]) -> Result<(), Fault>,
    ) -> Result<(), Errno>;
    /// Clears the bits that `read` gives, the first of which is page `first`. `EINVAL`: pages that the slot has not, or a part
    /// that does not end with a word or with the slot. `ENOENT`: no bitmap. `EFAULT`: `read` failed, and nothing is cleared.
    fn clear_dirty_log(
        &self,
        slot: SlotId,
        first: u64,
        pages: u32,
        read: impl FnOnce(&mut [u64]) -> Result<(), Fault>,
    ) -> Result<(), Errno>;

    /// Which interrupt controllers are ours.
    fn irqchip(&self) -> Irqchip;
    /// Makes them. `EEXIST`: there already. `EINVAL`: there are vCPUs.
    fn create_irqchip(&self) -> Result<(), Errno>;
    /// State of the master (0) or slave (1) PIC.
    fn pic(&self, which: u32) -> Result<KvmPicState, Errno>;
    /// Sets the state of the master (0) or slave (1) PIC.
    fn set_pic(&self, which: u32, state: &KvmPicState) -> Result<(), Errno>;
    /// State of the I/O APIC.
    fn ioapic(&self) -> Result<KvmIoapicState, Errno>;
    /// Sets the state of the I/O APIC.
    fn set_ioapic(&self, state: &KvmIoapicState) -> Result<(), Errno>;

    /// Makes the PIT. `EEXIST`: there already. `ENOENT`: no PIC.
    fn create_pit(&self, flags: u32) -> Result<(), Errno>;
    /// Whether there is one.
    fn has_pit(&self) -> bool;
    /// The PIT's state. `ENXIO`: there is none.
    fn pit(&self) -> Result<KvmPitState2, Errno>;
    /// Sets the PIT's channels; also its flags where they are given. `ENXIO`: there is none.
    fn set_pit(&self, channels: &[KvmPitChannelState; 3], flags: Option<u32>) -> Result<(), Errno>;
    /// Whether missed ticks are injected again. `ENXIO`: there is no PIT.
    fn set_pit_reinject(&self, on: bool) -> Result<(), Errno>;

    /// Sets a line; returns what became of it: below 0 masked, 0 coalesced, above 0 delivered to
    /// so many.
    fn set_irq_line(&self, gsi: u32, level: bool) -> Result<i32, Errno>;
    /// Sends a message; returns the same.
    fn signal_msi(&self, msi: &KvmMsi) -> Result<i32, Errno>;
    /// Replaces all routes. Types, flags and GSIs have been checked; pins are the VM's to check.
    fn set_routes(&self, routes: &[KvmIrqRoutingEntry]) -> Result<(), Errno>;
    /// Joins a guest write with an eventfd. `EEXIST`: something else is there.
    fn assign_ioeventfd(&self, what: &KvmIoeventfd) -> Result<(), Errno>;
    /// Parts them. `ENOENT`: they were not joined.
    fn deassign_ioeventfd(&self, what: &KvmIoeventfd) -> Result<(), Errno>;
    /// Lets writes to a zone be coalesced. `ENOSPC`: there are enough zones.
    fn register_zone(&self, zone: &KvmCoalescedMmioZone) -> Result<(), Errno>;
    /// Ends it for every zone in which this one lies; fine if there is none.
    fn unregister_zones(&self, zone: &KvmCoalescedMmioZone) -> Result<(), Errno>;
    /// Joins an eventfd with an interrupt. `EBUSY`: the eventfd has one already.
    fn assign_irqfd(&self, what: &KvmIrqfd) -> Result<(), Errno>;
    /// Parts them; fine if they were not joined.
    fn deassign_irqfd(&self, what: &KvmIrqfd) -> Result<(), Errno>;

    /// Three pages that an Intel CPU needs for real mode.
    fn set_tss_addr(&self, addr: u32) -> Result<(), Errno> {
        // Taken where it is not needed, too: VMMs call it on any CPU and stop at an error.
        Ok(())
    }
    /// One page that an Intel CPU needs for real mode. `EINVAL`: there are vCPUs.
    fn set_identity_map_addr(&self, addr: u64) -> Result<(), Errno>;
    /// The vCPU that boots. `EBUSY`: there are vCPUs.
    fn set_boot_cpu_id(&self, id: u32) -> Result<(), Errno>;
    /// Most pages of shadow tables; a hint.
    fn set_nr_mmu_pages(&self, pages: u64) -> Result<(), Errno> {
        Ok(())
    }
    /// The VM's clock.
    fn clock(&self) -> KvmClockData;
    /// Sets the VM's clock: `clock`, and `realtime` if the flag says so.
    fn set_clock(&self, data: &KvmClockData) -> Result<(), Errno>;
    /// TSC frequency that new vCPUs get, in kHz.
    fn tsc_khz(&self) -> u32;
    /// Sets the TSC frequency that new vCPUs get. `EINVAL`: there are vCPUs.
    fn set_tsc_khz(&self, khz: u32) -> Result<(), Errno>;
    /// Which MSRs the guest may access.
    fn set_msr_filter(&self, filter: vm::msr_filter::MsrFilter) -> Result<(), Errno>;
    /// Makes a setting of KVM_ENABLE_CAP (KVM API §4.37).
    fn set(&self, setting: Setting) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
}

/// A vCPU file.
pub trait VcpuFile {
    /// What the lock guards.
    type Vcpu: VcpuOps;
    /// Whether the caller's address space is the VM's and the VM is alive.
    fn belongs_to_caller(&self) -> bool;
    /// The page shared with the VMM.
    fn run_page(&self) -> &[AtomicU64; 512];
    /// The page behind it, for the data of port I/O.
    fn io_page(&self) -> &[AtomicU64; 512];
    /// Waits for the vCPU's mutex. `EINTR`: killed while waiting.
    fn lock(&self) -> Result<impl DerefMut<Target = Self::Vcpu>, Errno>;
}

/// A vCPU whose mutex is held.
#[allow(unused_variables, reason = "the bodies stand for what is missing")]
pub trait VcpuOps {
    /// What there is to offer.
    fn offer(&self) -> &Offer;
    /// Which interrupt controllers of the VM are ours.
    fn irqchip(&self) -> Irqchip;

    /// Makes a file with the vCPU's statistics; returns the descriptor.
    fn stats_file(&mut self) -> Result<i32, Errno>;
    /// Runs the guest until user space is needed.
    fn run(&mut self, input: &RunInput) -> UserExit;
    /// The first 8 bytes of the port I/O page: before [`Self::run`] what user space put there,
    /// after it what the guest writes (or what lies there still).
    fn io_data(&mut self) -> &mut [u8; 8];
    /// User space's answers that are looked for only after exits that want them: to an MSR exit whether it refuses the access
    /// and the value read, and what the port I/O page holds for a string instruction.
    fn answer_rare(&mut self, msr: impl FnOnce() -> (bool, u64), items: impl FnOnce(&mut [u8]));
    /// What the last [`Self::run`] left to be shown.
    fn run_output(&self) -> RunOutput;
    /// What accompanies an internal error that the last [`Self::run`] returned.
    fn error_data(&self) -> &ErrorData;
    /// Signals to be blocked during KVM_RUN, as bits; `None`: the thread's own.
    fn set_signal_mask(&mut self, mask: Option<u64>);

    /// The general registers, RIP and RFLAGS.
    fn regs(&mut self) -> KvmRegs;
    /// Sets them. Drops a pending exception.
    fn set_regs(&mut self, regs: &KvmRegs) -> Result<(), Errno>;
    /// System registers; PDPTRs where paging is PAE. `flags` says whether they are valid.
    fn sregs(&mut self) -> KvmSregs2;
    /// The interrupt being injected, if any.
    fn interrupt_in_injection(&mut self) -> Option<u8>;
    /// Sets the system registers; PDPTRs where `flags` says so, else they are loaded from memory.
    /// `interrupt`: the vector to be injected, if any. `EINVAL`: a state that cannot be.
    fn set_sregs(&mut self, sregs: &KvmSregs2, interrupt: Option<u8>) -> Result<(), Errno>;
    /// Legacy FPU state.
    fn fpu(&mut self, into: &mut KvmFpu) -> Result<(), Errno>;
    /// Sets the legacy FPU state.
    fn set_fpu(&mut self, fpu: &KvmFpu) -> Result<(), Errno>;
    /// Bytes of this vCPU's XSAVE area, standard format: at least 4096.
    fn xsave_bytes(&self) -> usize;
    /// The XSAVE area; `into` has [`Self::xsave_bytes`].
    fn xsave(&mut self, into: &mut [u8]) -> Result<(), Errno>;
    /// Sets the XSAVE area. `EINVAL`: components or MXCSR bits the guest cannot have.
    fn set_xsave(&mut self, area: &[u8]) -> Result<(), Errno>;
    /// XCR0; `None` without XSAVE.
    fn xcr0(&mut self) -> Option<u64>;
    /// Sets XCR0. `EINVAL`: a value XSETBV would refuse.
    fn set_xcr0(&mut self, value: u64) -> Result<(), Errno>;
    /// DR0 to DR3, DR6, DR7.
    fn debugregs(&mut self) -> KvmDebugregs;
    /// Sets them; DR6 and DR7 have no bit above 31.
    fn set_debugregs(&mut self, regs: &KvmDebugregs) -> Result<(), Errno>;

    /// An MSR, with host rights.
    fn msr(&mut self, index: u32) -> Result<u64, MsrRefused>;
    /// Sets an MSR, with host rights.
    fn set_msr(&mut self, index: u32, value: u64) -> Result<(), MsrRefused>;

    /// Events on their way.
    fn events(&mut self) -> KvmVcpuEvents;
    /// Sets those that `flags` names; fields have been checked. `EINVAL`: a flag not enabled here.
    fn set_events(&mut self, events: &KvmVcpuEvents) -> Result<(), Errno>;
    /// Whether an exception waits to be injected.
    fn exception_pending(&self) -> bool;
    /// One of `MP_STATE_*`. May take a pending INIT or SIPI first.
    fn mp_state(&mut self) -> u32;
    /// Sets the state: one of the five there are, and RUNNABLE without in-kernel irqchip.
    fn set_mp_state(&mut self, state: u32) -> Result<(), Errno>;
    /// Takes an interrupt from a VMM with its own PIC. `EEXIST`: the last one still waits.
    fn interrupt(&mut self, vector: u8) -> Result<(), Errno>;
    /// Makes an NMI pending.
    fn nmi(&mut self);
    /// Makes a system-management interrupt pending.
    fn smi(&mut self);
    /// The local APIC's registers. Only with an in-kernel one.
    fn lapic(&mut self, into: &mut KvmLapicState) -> Result<(), Errno>;
    /// Sets them. `EINVAL`: an id that cannot be.
    fn set_lapic(&mut self, state: &KvmLapicState) -> Result<(), Errno>;
    /// Where the VMM's option ROM keeps the TPR; 0: nowhere.
    fn set_vapic_addr(&mut self, addr: u64) -> Result<(), Errno> {
        // Taken though KVM_CAP_VAPIC is 0: nothing of it is lost, for no access is reported.
        Ok(())
    }
    /// Whether accesses to the TPR exit.
    fn set_tpr_reporting(&mut self, on: bool) -> Result<(), Errno> {
        Ok(())
    }

    /// The guest's CPUID as it was set.
    fn cpuid(&mut self) -> Result<Vec<KvmCpuidEntry2>, Errno>;
    /// Whether the vCPU ran already, so that its CPUID is fixed.
    fn has_run(&self) -> bool;
    /// Sets the guest's CPUID. `EINVAL`: cannot be, or it ran already with another.
    fn set_cpuid(&mut self, entries: Box<[KvmCpuidEntry2]>) -> Result<(), Errno>;
    /// TSC frequency in kHz.
    fn tsc_khz(&self) -> u32;
    /// Sets the TSC frequency, kHz. `EINVAL`: cannot be scaled so.
    fn set_tsc_khz(&mut self, khz: u32) -> Result<(), Errno>;
    /// Guest TSC minus host TSC.
    fn tsc_offset(&self) -> u64 {
        0
    }
    /// Sets guest TSC minus host TSC.
    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), Errno> {
        Err(Errno::ENXIO)
    }
    /// The guest may be a hypervisor that uses an enlightened VMCS: of which versions.
    fn enable_enlightened_vmcs(&mut self) -> u16;
    /// What the guest can be shown of Hyper-V's interface.
    fn hyperv_cpuid(&self) -> Result<Vec<KvmCpuidEntry2>, Errno>;
    /// Paravirtual services that the guest's CPUID does not offer are refused.
    fn enforce_pv_features(&mut self, on: bool);
    /// Tells the guest that it was stopped. `EINVAL`: it has no kvmclock.
    fn kvmclock_ctrl(&mut self) -> Result<(), Errno>;
    /// Fills in everything behind `linear_address`. Never fails: a page that is not there is not
    /// `valid`.
    fn translate(&mut self, translation: &mut KvmTranslation);
    /// Debugging from outside; only bits of the offer. `EBUSY` if it injects while an exception
    /// is pending.
    fn set_guest_debug(&mut self, debug: &KvmGuestDebug) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
    /// Bytes of the nested state now; `None`: the guest may be no hypervisor, and there is nothing to save.
    fn nested_state_size(&self) -> Option<usize> {
        None
    }
    /// Writes the nested state into as many zeros.
    fn nested_state(&mut self, into: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
    /// Restores a nested state. `EFAULT`: it says that it is longer than `bytes`, and that is needed. On an error
    /// nothing has changed.
    fn set_nested_state(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
    /// Sets MCG_CAP; its bank count is 1 to that of the offer, its other bits are the offer's.
    fn setup_mce(&mut self, mcg_cap: u64) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
    /// Injects a machine check.
    fn set_mce(&mut self, mce: &KvmX86Mce) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
}
