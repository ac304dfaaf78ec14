//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE in the VMX format: bytes, as stock KVM has them
//! (Documentation/virt/kvm/api.rst §4.114, §4.115), with stock KVM's checks in its order.

use x86::Gpa;
use x86::vmcs::place::{VMCS12_BYTES, VMCS12_REVISION};
use x86::vmcs::{ExitControls, event, field};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::checks::guest::activity_state;
use crate::checks::{self, Limits};
use crate::machine::{Level, Smm};
use crate::memory::is_page;
use crate::{Capabilities, GuestMemory, Machine, Vmcs12, apic_page};

/// Format number of VMX.
pub const FORMAT: u16 = 0;
/// Bytes of the header.
pub const HEADER: usize = 128;
/// Bytes of each image behind it.
pub const IMAGE: usize = 4096;
/// Bytes of the largest state.
pub const LARGEST: usize = HEADER + 2 * IMAGE;

/// Flags of the state.
pub mod flag {
    /// L2 runs.
    pub const GUEST_MODE: u16 = 1;
    /// An entry was executed and L2 has not run since.
    pub const RUN_PENDING: u16 = 2;
    /// The VMCS is an enlightened one.
    pub const EVMCS: u16 = 4;
    /// A monitor-trap exit is owed to L1.
    pub const MTF_PENDING: u16 = 8;
    /// SVM's; part of what the ioctl knows.
    pub const GIF_SET: u16 = 0x100;
    /// SMM has put aside that L2 ran.
    pub const SMM_GUEST_MODE: u16 = 1;
    /// SMM has put aside that the vCPU was in VMX operation.
    pub const SMM_VMXON: u16 = 2;
    /// The deadline of L1's preemption timer is valid.
    pub const DEADLINE: u32 = 1;
}

/// The header: `struct kvm_nested_state` without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // Named as KVM's fields.
pub struct Header {
    pub flags: u16,
    pub format: u16,
    pub size: u32,
    pub vmxon_pa: u64,
    pub vmcs12_pa: u64,
    pub smm_flags: u16,
    pub pad: u16,
    pub vmx_flags: u32,
    pub preemption_timer_deadline: u64,
    pub reserved: [u64; 11],
}

const _: () = assert!(size_of::<Header>() == HEADER && size_of::<Vmcs12>() == VMCS12_BYTES);

const NOWHERE: u64 = Vmcs12::NOWHERE;

/// Why a state is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is shorter than its header, or than what it needs (EINVAL).
    Short,
    /// It could not be read as far as it says that it goes (EFAULT).
    Missing,
    /// Flags that are not known, or not together (EINVAL).
    Flags,
    /// Not the VMX format (EINVAL).
    Format,
    /// An address that is none, or the same twice (EINVAL).
    Address,
    /// VMX is not offered to this vCPU (EINVAL).
    NotOffered,
    /// An image of another revision or kind (EINVAL).
    Image,
    /// L2 could not be entered with it (EINVAL).
    Checks,
}

/// What a restored state asks of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// Not in VMX operation.
    Off,
    /// L1 runs.
    L1,
    /// L2 runs: vmcs02 has to be composed from scratch.
    L2,
}

/// What the vCPU says about a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The vCPU's CPUID offers VMX.
    pub offered: bool,
    /// The vCPU is in SMM.
    pub smm: bool,
    /// The VMM has switched enlightened VMCSs on.
    pub enlightened: bool,
}

/// How many bytes the state has.
pub fn size(machine: &Machine) -> usize {
    // No current VMCS of either kind: the header has it all.
    if machine.current().is_none() && !machine.is_enlightened() {
        return HEADER;
    }
    // Where L1 runs the copy of the shadow VMCS means nothing.
    let shadow = machine.level() == Level::L2 && machine.vmcs12().shadow_pointer().is_some();
    if shadow { HEADER + 2 * IMAGE } else { HEADER + IMAGE }
}

/// The header of the state. `deadline` is that of L1's preemption timer, if it runs.
pub fn header(machine: &Machine, deadline: Option<u64>) -> Header {
    let mut header = Header {
        flags: 0,
        format: FORMAT,
        size: size(machine) as u32,
        vmxon_pa: NOWHERE,
        vmcs12_pa: NOWHERE,
        smm_flags: 0,
        pad: 0,
        vmx_flags: 0,
        preemption_timer_deadline: 0,
        reserved: [0; 11],
    };
    // Outside VMX operation all of it is as in a vCPU that never was in it.
    let Some(vmxon) = machine.vmxon() else { return header };
    header.vmxon_pa = vmxon.0;
    header.vmcs12_pa = machine.current().map_or(NOWHERE, |at| at.0);
    // An enlightened one has no address here: user space finds it by the VP assist page.
    header.flags |= if machine.is_enlightened() { flag::EVMCS } else { 0 };
    let Smm { vmxon, guest_mode } = machine.smm;
    header.smm_flags |= if vmxon { flag::SMM_VMXON } else { 0 };
    header.smm_flags |= if guest_mode { flag::SMM_GUEST_MODE } else { 0 };
    // Pending things are those of a running L2: with L1 there are none.
    if machine.level() == Level::L2 {
        header.flags |= flag::GUEST_MODE;
        header.flags |= if machine.run_pending { flag::RUN_PENDING } else { 0 };
        header.flags |= if machine.trap_pending { flag::MTF_PENDING } else { 0 };
    }
    // The timer of an L2 that RSM is to enter counts on meanwhile.
    if let Some(deadline) = deadline.filter(|_| machine.level() == Level::L2 || guest_mode) {
        header.vmx_flags |= flag::DEADLINE;
        header.preemption_timer_deadline = deadline;
    }
    header
}

/// Writes the state into a buffer of zeros and gives its length; `None` if the buffer is too short. L2's state
/// must have been saved into the VMCS12 before.
pub fn save(machine: &Machine, deadline: Option<u64>, into: &mut [u8]) -> Option<usize> {
    let size = size(machine);
    // All or nothing: a buffer that is too short gets nothing.
    let into = into.get_mut(..size)?;
    let (head, data) = into.split_at_mut_checked(HEADER)?;
    head.copy_from_slice(header(machine, deadline).as_bytes());
    let images = [machine.vmcs12(), machine.shadow12()];
    // The images are 4 KiB each, of which fields take the first; the rest stays zero.
    for (place, image) in data.chunks_exact_mut(IMAGE).zip(images) {
        place.get_mut(..VMCS12_BYTES)?.copy_from_slice(image.as_bytes());
    }
    Some(size)
}

/// What every format asks of the flags (the ioctl itself).
fn check_flags(header: &Header) -> Result<(), Refused> {
    // The ioctl's own flags, SVM's too: stock KVM refuses others before it asks for the format.
    let known =
        flag::GUEST_MODE | flag::RUN_PENDING | flag::EVMCS | flag::MTF_PENDING | flag::GIF_SET;
    // An entry can be pending for a running L2 alone.
    let pending_alone = header.flags & (flag::RUN_PENDING | flag::GUEST_MODE) == flag::RUN_PENDING;
    if header.flags & !known != 0 || pending_alone { Err(Refused::Flags) } else { Ok(()) }
}

fn check_header(h: &Header, context: Context, limits: &Limits) -> Result<(), Refused> {
    check_flags(h)?;
    // All are EINVAL; the order is stock KVM's.
    if h.format != FORMAT {
        return Err(Refused::Format);
    }
    if h.vmxon_pa == NOWHERE {
        // EVMCS alone is let pass: stock KVM set it once to say what the vCPU was able to.
        if h.smm_flags != 0 || h.flags & !flag::EVMCS != 0 {
            return Err(Refused::Flags);
        }
        if h.vmcs12_pa != NOWHERE {
            return Err(Refused::Address);
        }
    } else {
        // Stock KVM asks CPUID here, and not before: a state that is off suits every vCPU.
        if !context.offered {
            return Err(Refused::NotOffered);
        }
        if !is_page(h.vmxon_pa, limits.physical_bits) {
            return Err(Refused::Address);
        }
    }
    // Both would be two levels at once: L2 is entered now, or by RSM.
    let smm_guest = h.smm_flags & flag::SMM_GUEST_MODE != 0;
    let both = smm_guest && h.flags & flag::GUEST_MODE != 0;
    let unknown = h.smm_flags & !(flag::SMM_GUEST_MODE | flag::SMM_VMXON) != 0
        || h.vmx_flags & !flag::DEADLINE != 0;
    // SMM puts VMX operation aside, so that L2 cannot run in it; outside it nothing is put aside.
    let place = if context.smm {
        h.flags & (flag::GUEST_MODE | flag::RUN_PENDING) != 0
    } else {
        h.smm_flags != 0
    };
    // An L2 that RSM enters was left within VMX operation.
    let smm_off = smm_guest && h.smm_flags & flag::SMM_VMXON == 0;
    // Both have to know of it: the VMM by its capability, L1 by CPUID.
    let enlightened = h.flags & flag::EVMCS != 0 && !(context.enlightened && context.offered);
    if both || unknown || place || smm_off || enlightened {
        return Err(Refused::Flags);
    }
    Ok(())
}

/// The images of a state that is restored. It is large, and lives in a box.
#[derive(Clone, Debug, FromBytes, Immutable)]
pub struct Images {
    main: Vmcs12,
    shadow: Vmcs12,
}

impl Images {
    /// None yet.
    // A constant: it is copied to the heap, never by a stack.
    pub const NONE: Self = Self { main: Vmcs12::ZERO, shadow: Vmcs12::ZERO };
}

/// A state that was found good.
#[derive(Clone, Copy, Debug)]
pub struct Good {
    header: Header,
}

impl Good {
    /// SMM has put aside that L2 ran: RSM is to enter it.
    pub fn resumes_by_rsm(&self) -> bool {
        self.header.smm_flags & flag::SMM_GUEST_MODE != 0
    }

    /// The VMCS is an enlightened one.
    fn is_enlightened(&self) -> bool {
        self.header.flags & flag::EVMCS != 0 && self.header.vmcs12_pa == NOWHERE
    }
}

/// What a state is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Onto<'a> {
    /// What the vCPU says.
    pub context: Context,
    /// What L1 is shown.
    pub capabilities: &'a Capabilities,
    /// What the vCPU's CPUID and state say about values.
    pub limits: &'a Limits,
}

/// Checks a state as a whole and makes its images. Of L1's memory nothing has to be there, but for a link pointer.
/// `bytes` may be shorter than the state says, where the rest could not be read.
///
/// # Errors
/// Why it is refused.
pub fn check(
    bytes: &[u8],
    onto: &Onto<'_>,
    memory: &impl GuestMemory,
    images: &mut Images,
) -> Result<Good, Refused> {
    // What is there of the bytes is read once, by the caller: nobody can change it any more.
    let (header, _) = Header::read_from_prefix(bytes).map_err(|_| Refused::Short)?;
    // The length that the state names, not that of the buffer: a short copy is told as missing later.
    let data = header.size as usize;
    if data < HEADER {
        return Err(Refused::Short);
    }
    check_header(&header, onto.context, onto.limits)?;
    let good = Good { header };
    // Off: whatever follows the header is not looked at, as in stock KVM.
    if header.vmxon_pa == NOWHERE {
        return Ok(good);
    }
    if data < HEADER + VMCS12_BYTES {
        // Nothing but the region of VMXON, if nothing was current.
        if header.flags & (flag::GUEST_MODE | flag::EVMCS) != 0 || good.resumes_by_rsm() {
            return Err(Refused::Flags);
        }
        return if header.vmcs12_pa == NOWHERE { Ok(good) } else { Err(Refused::Address) };
    }
    let at = header.vmcs12_pa;
    // The VMXON region is no VMCS.
    let by_address = at != header.vmxon_pa && is_page(at, onto.limits.physical_bits);
    // An enlightened VMCS lies where L1's VP assist page says.
    if !(at == NOWHERE && good.is_enlightened() || at != NOWHERE && by_address) {
        return Err(Refused::Address);
    }
    // Behind the addresses: EINVAL goes before EFAULT, as in stock KVM.
    images.main = image(bytes, 0).ok_or(Refused::Missing)?;
    // Bit 31 may be set: a shadow VMCS can be current, and cannot be entered.
    if images.main.header() & 0x7fff_ffff != VMCS12_REVISION {
        return Err(Refused::Image);
    }
    // What runs, or is to run by RSM, is checked as an entry checks it: the hardware is not asked to.
    if header.flags & flag::GUEST_MODE != 0 || good.resumes_by_rsm() {
        check_l2(&header, bytes, onto, memory, images)?;
    }
    Ok(good)
}

/// Takes over a state that was found good, with its images. vmcs02 has to be composed from scratch if L2 runs. Gives
/// the deadline of L1's preemption timer too.
pub fn take_over(machine: &mut Machine, good: &Good, images: &Images) -> (Restored, Option<u64>) {
    let header = &good.header;
    // Everything of before is given up first: what is not in the state must not survive.
    machine.reset();
    if header.vmxon_pa == NOWHERE {
        return (Restored::Off, None);
    }
    let current = (header.vmcs12_pa != NOWHERE).then_some(Gpa(header.vmcs12_pa));
    // The images before the regions: those make all groups dirty.
    *machine.images().0 = images.main.clone();
    machine.set_regions(Some(Gpa(header.vmxon_pa)), current);
    if good.is_enlightened() {
        machine.unsettle_enlightened();
    }
    machine.smm = Smm {
        vmxon: header.smm_flags & flag::SMM_VMXON != 0,
        guest_mode: header.smm_flags & flag::SMM_GUEST_MODE != 0,
    };
    let deadline =
        (header.vmx_flags & flag::DEADLINE != 0).then_some(header.preemption_timer_deadline);
    if header.flags & flag::GUEST_MODE == 0 {
        // L1's timer runs while L2 does, and in SMM for an L2 that RSM enters.
        return (Restored::L1, deadline.filter(|_| good.resumes_by_rsm()));
    }
    *machine.images().1 = images.shadow.clone();
    // L1's memory may have an older one: the state's counts.
    machine.owe_shadow();
    machine.enter_l2();
    machine.run_pending = header.flags & flag::RUN_PENDING != 0;
    machine.trap_pending = header.flags & flag::MTF_PENDING != 0;
    (Restored::L2, deadline)
}

/// The first bytes of an image, as many as have fields.
fn image(bytes: &[u8], number: usize) -> Option<Vmcs12> {
    let at = HEADER.checked_add(number.checked_mul(IMAGE)?)?;
    // The rest of the page is not looked at.
    Vmcs12::read_from_bytes(bytes.get(at..at.checked_add(VMCS12_BYTES)?)?).ok()
}

/// Makes what L2 needs beside its VMCS and checks all of it, as an entry does.
fn check_l2(
    header: &Header,
    bytes: &[u8],
    onto: &Onto<'_>,
    memory: &impl GuestMemory,
    images: &mut Images,
) -> Result<(), Refused> {
    let Images { main: v, shadow } = images;
    // What RSM enters has it in L1's memory.
    // Too short for the second image is EINVAL; what could not be read is EFAULT, below.
    if v.shadow_pointer().is_some() && header.flags & flag::GUEST_MODE != 0 {
        if (header.size as usize) < HEADER + IMAGE + VMCS12_BYTES {
            return Err(Refused::Short);
        }
        *shadow = image(bytes, 1).ok_or(Refused::Missing)?;
        if shadow.header() != VMCS12_REVISION | 1 << 31 {
            return Err(Refused::Image);
        }
    }
    if matches!(v.get(field::GUEST_ACTIVITY), activity_state::HLT | activity_state::WAIT_FOR_SIPI) {
        // That L2 sleeps is said by KVM_SET_MP_STATE: L0 sleeps for it.
        v.set(field::GUEST_ACTIVITY, activity_state::ACTIVE);
    }
    let current = (header.vmcs12_pa != NOWHERE).then_some(Gpa(header.vmcs12_pa));
    let c = onto.capabilities;
    // L1 is in whatever mode its host state is for.
    let limits = Limits { long_mode: v.exit().contains(ExitControls::HOST_64), ..*onto.limits };
    // In an entry's order. Of L1's memory only the link is looked at: a VMM may restore memory later.
    checks::controls::check(v, c, &limits).map_err(|_| Refused::Checks)?;
    checks::host::check(v, c, &limits).map_err(|_| Refused::Checks)?;
    checks::guest::check_saved(v, c, &limits, current, memory).map_err(|_| Refused::Checks)?;
    // Beyond what tables can leave out the page would be plain memory for L2.
    if !apic_page::is_in_reach(v) {
        return Err(Refused::Checks);
    }
    if header.flags & flag::RUN_PENDING == 0 {
        // The entry is over: what it was to inject was injected.
        let information = v.get(field::ENTRY_INTERRUPTION);
        v.set(field::ENTRY_INTERRUPTION, information & !event::VALID);
    }
    Ok(())
}

#[cfg(test)]
#[path = "saved_tests.rs"]
mod tests;
