//! The structures and numbers of `<linux/kvm.h>` and `<asm/kvm.h>` for x86-64.
//!
//! Every type is `repr(C)` without implicit padding, so that any bytes from user space are a value
//! of it and no byte of ours leaks into user space unwritten. `tests/layout.rs` compares size,
//! alignment and every offset with `kvm-bindings`. Names are the KVM API's own; its document
//! (Documentation/virt/kvm/api.rst) says what each field means.
#![allow(missing_docs, reason = "fields bear the names under which the KVM API documents them")]

/// Declares structures of the user-space interface: C layout, no padding, readable from and
/// writable to plain bytes.
macro_rules! uapi {
    ($(
        $(#[$attr:meta])*
        struct $name:ident { $($(#[$fattr:meta])* $field:ident : $ty:ty,)* }
    )*) => {$(
        $(#[$attr])*
        // IntoBytes does not derive for a type with padding: that is the proof that nothing leaks.
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
        )]
        #[repr(C)]
        pub struct $name { $($(#[$fattr])* pub $field: $ty,)* }

        impl Default for $name {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    )*};
}

pub mod capability;
pub mod clock;
pub mod cpuid;
pub mod debug;
pub mod device;
pub mod event;
pub mod ioctl;
pub mod irqchip;
pub mod memory;
pub mod msr;
pub mod registers;
pub mod run;
pub mod vcpu_state;
