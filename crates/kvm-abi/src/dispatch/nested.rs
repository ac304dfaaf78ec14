//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE (KVM API §4.114, §4.115) of vCPUs without nested
//! virtualization: there is one state, and it can be saved and restored.

use crate::errno::Errno;
use crate::uapi::vcpu_state::{
    KvmNestedState, NESTED_FORMAT_SVM, NESTED_GIF_SET, NESTED_NO_ADDRESS,
};
use crate::user;

/// What counts in the header of VMX: where the VMXON region and the current vmcs12 are, and the
/// flags of system-management mode.
const VMX_HEADER: usize = 3;

/// The state of a vCPU without nested virtualization.
fn none(format: u16) -> KvmNestedState {
    let size = size_of::<KvmNestedState>() as u32;
    let mut state = KvmNestedState { format, size, ..Default::default() };
    if format == NESTED_FORMAT_SVM {
        state.flags = NESTED_GIF_SET;
    } else {
        let [vmxon, vmcs12, ..] = &mut state.hdr;
        (*vmxon, *vmcs12) = (NESTED_NO_ADDRESS, NESTED_NO_ADDRESS);
    }
    state
}

/// KVM_GET_NESTED_STATE. E2BIG, with the size it takes, if there is too little room.
pub fn get(format: u16, arg: u64) -> Result<(), Errno> {
    let [flags, room]: [u32; 2] = user::read(arg)?;
    let state = none(format);
    if room < state.size {
        user::write(arg, &[flags, state.size])?;
        return Err(Errno::E2BIG);
    }
    user::write(arg, &state)
}

/// KVM_SET_NESTED_STATE. EINVAL for what only a vCPU with nested virtualization can be in.
pub fn set(format: u16, given: &KvmNestedState) -> Result<(), Errno> {
    let none = none(format);
    let counts = if format == NESTED_FORMAT_SVM { 0 } else { VMX_HEADER };
    let same = given.format == none.format
        && given.flags == none.flags
        && given.size >= none.size
        && given.hdr.iter().zip(&none.hdr).take(counts).all(|(given, none)| given == none);
    if same { Ok(()) } else { Err(Errno::EINVAL) }
}
