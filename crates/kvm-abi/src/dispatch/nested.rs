//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE (KVM API §4.114, §4.115), with stock KVM's checks in its order. What
//! lies behind the header is the backend's to know. A vCPU of an Intel CPU whose guest may be no hypervisor has one
//! state, which is saved and restored here.

use alloc::boxed::Box;

use zerocopy::{FromZeros, IntoBytes};

use super::ops::VcpuOps;
use crate::errno::Errno;
use crate::uapi::vcpu_state::{
    KvmNestedState, NESTED_FLAGS, NESTED_FORMAT_SVM, NESTED_GIF_SET, NESTED_GUEST_MODE,
    NESTED_NO_ADDRESS, NESTED_RUN_PENDING,
};
use crate::user;

const HEADER: usize = size_of::<KvmNestedState>();
/// Bytes of the image of a VMCS that mean something, and from one image to the next.
const VMCS12: usize = 1024;
const IMAGE: usize = 4096;
/// What counts in the header of VMX: where the VMXON region and the current vmcs12 are, and the
/// flags of system-management mode.
const VMX_HEADER: usize = 3;

/// The state of a vCPU without nested virtualization.
fn none(format: u16) -> KvmNestedState {
    let size = HEADER as u32;
    let mut state = KvmNestedState { format, size, ..Default::default() };
    if format == NESTED_FORMAT_SVM {
        // GIF is set where nobody has cleared it (APM vol. 2 §15.17).
        state.flags = NESTED_GIF_SET;
    } else {
        let [vmxon, vmcs12, ..] = &mut state.hdr;
        (*vmxon, *vmcs12) = (NESTED_NO_ADDRESS, NESTED_NO_ADDRESS);
    }
    state
}

/// KVM_GET_NESTED_STATE. E2BIG, with the size it takes, if there is too little room.
pub fn get<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Result<(), Errno> {
    // Flags and format are ours to say; the size, behind them, is the room that the VMM has.
    let [_, room]: [u32; 2] = user::read(arg)?;
    let size = vcpu.nested_state_size();
    let bytes = size.unwrap_or(HEADER);
    if (room as usize) < bytes {
        // The header of SVM tells of its data only if there is room for itself.
        let header = vcpu.offer().nested_format == NESTED_FORMAT_SVM && (room as usize) < HEADER;
        let told = if header { HEADER } else { bytes };
        user::write(arg.wrapping_add(4), &(told as u32))?;
        return Err(Errno::E2BIG);
    }
    if size.is_none() {
        return user::write(arg, &none(vcpu.offer().nested_format));
    }
    // Zeroed: what the backend does not fill goes to user space as it is.
    let mut state = <[u8]>::new_box_zeroed_with_elems(bytes)?;
    vcpu.nested_state(&mut state)?;
    user::write(arg, &*state)
}

/// KVM_SET_NESTED_STATE: the state of L1 and L2 back (KVM API §4.115).
pub fn set<V: VcpuOps>(vcpu: &mut V, arg: u64) -> Result<(), Errno> {
    let head: KvmNestedState = user::read(arg)?;
    // An entry that is pending enters an L2: without one it contradicts itself.
    let pending = head.flags & (NESTED_RUN_PENDING | NESTED_GUEST_MODE) == NESTED_RUN_PENDING;
    if (head.size as usize) < HEADER || head.flags & !NESTED_FLAGS != 0 || pending {
        return Err(Errno::EINVAL);
    }
    // After the header's own checks: those hold for every vCPU.
    if vcpu.nested_state_size().is_none() {
        return set_none(vcpu.offer().nested_format, &head);
    }
    let (state, read) = read_state(vcpu.offer().nested_format, &head, arg)?;
    vcpu.set_nested_state(state.get(..read).unwrap_or_default())
}

/// Reads as much of a state as is there; gives how much that is. Whether the rest is missed depends on the rest.
fn read_state(format: u16, head: &KvmNestedState, arg: u64) -> Result<(Box<[u8]>, usize), Errno> {
    let (images, bytes) = if format == NESTED_FORMAT_SVM { (1, IMAGE) } else { (2, VMCS12) };
    // Of a fixed size: what the header says of it is user space's, and is not allocated by.
    let mut state = <[u8]>::new_box_zeroed_with_elems(HEADER + images * IMAGE)?;
    let Some((to, data)) = state.split_at_mut_checked(HEADER) else { return Err(Errno::EINVAL) };
    // The header that was checked, and no second read of it.
    to.copy_from_slice(head.as_bytes());
    let mut read = HEADER;
    for (number, image) in data.chunks_exact_mut(IMAGE).enumerate() {
        let at = HEADER + number * IMAGE;
        let Some(to) = image.get_mut(..bytes).filter(|_| head.size as usize >= at + bytes) else {
            break;
        };
        // No error yet: whether this image is needed is said by what was read already.
        let Some(from) = arg.checked_add(at as u64) else { break };
        if host::user::read(x86::Hva(from), to).is_err() {
            break;
        }
        // Of a VMCS only its first KiB is read. The rest of its page stays zero.
        read = at + IMAGE;
    }
    Ok((state, read))
}

/// EINVAL for what only a vCPU with nested virtualization can be in.
fn set_none(format: u16, given: &KvmNestedState) -> Result<(), Errno> {
    let none = none(format);
    let counts = if format == NESTED_FORMAT_SVM { 0 } else { VMX_HEADER };
    let same = given.format == none.format
        && given.flags == none.flags
        && given.hdr.iter().zip(&none.hdr).take(counts).all(|(given, none)| given == none);
    if same { Ok(()) } else { Err(Errno::EINVAL) }
}
