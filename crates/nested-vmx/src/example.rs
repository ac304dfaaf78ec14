//! A VMCS12 that every check lets pass, and a CPU that can do everything: what tests of this crate, of the backend and of the
//! vCPU begin with.

pub use x86::vmcs::field;

use gannet_nested_vmx::Vmcs12;
use gannet_nested_vmx::capabilities::Host;

/// Sets fields of a VMCS12 by their names: `set!(v, GUEST_RIP = 0x1000, GUEST_RSP = 0)`.
#[macro_export]
macro_rules! set {
    ($v:expr, $($name:ident = $value:expr),* $(,)?) => {
        $($v.set($crate::example::field::$name, $value);)*
    };
}

/// A CPU that can do everything.
pub const EVERYTHING: Host = Host {
    basic: 1 << 54,
    pin: u64::MAX << 32,
    primary: u64::MAX << 32,
    secondary: u64::MAX << 32,
    exit: u64::MAX << 32,
    entry: u64::MAX << 32,
    misc: u64::MAX,
    cr0_fixed1: 0xffff_ffff,
    cr4_fixed1: 0x77_27ff,
    ept_vpid: u64::MAX,
};

/// A guest in 64-bit mode under a host in 64-bit mode.
pub fn good() -> Vmcs12 {
    let mut v = Vmcs12::new();
    set!(
        v,
        PIN_CONTROLS = 0x16 | 1 | 8,
        PROC_CONTROLS = 0x0400_6172 | 1 << 7 | 1 << 31,
        PROC_CONTROLS2 = 0,
        EXIT_CONTROLS = 0x3_6dfb | 1 << 9 | 1 << 21,
        ENTRY_CONTROLS = 0x11fb | 1 << 9 | 1 << 15,
        VMCS_LINK = u64::MAX,
        HOST_CR0 = 0x8005_0033,
        HOST_CR3 = 0x1000,
        HOST_CR4 = 0x2020,
        HOST_CS_SELECTOR = 8,
        HOST_TR_SELECTOR = 0x40,
        HOST_SS_SELECTOR = 16,
        HOST_EFER = 0xd01,
        HOST_RIP = 0x8000,
        HOST_RSP = 0x9000,
        HOST_PAT = 0x0007_0406_0007_0406,
        GUEST_CR0 = 0x8005_0033,
        GUEST_CR3 = 0x2000,
        GUEST_CR4 = 0x2020,
        GUEST_EFER = 0xd01,
        GUEST_PAT = 0x0007_0406_0007_0406,
        GUEST_DR7 = 0x400,
        GUEST_RIP = 0x4000,
        GUEST_RSP = 0x5000,
        GUEST_RFLAGS = 0x202,
        GUEST_CS_SELECTOR = 8,
        GUEST_CS_LIMIT = u32::MAX,
        GUEST_CS_RIGHTS = 0xa09b,
        GUEST_SS_SELECTOR = 16,
        GUEST_SS_LIMIT = u32::MAX,
        GUEST_SS_RIGHTS = 0xc093,
        GUEST_DS_RIGHTS = 0x1_0000,
        GUEST_ES_RIGHTS = 0x1_0000,
        GUEST_FS_RIGHTS = 0x1_0000,
        GUEST_GS_RIGHTS = 0x1_0000,
        GUEST_LDTR_RIGHTS = 0x1_0000,
        GUEST_TR_SELECTOR = 0x40,
        GUEST_TR_LIMIT = 0x67,
        GUEST_TR_RIGHTS = 0x8b,
        GUEST_GDTR_LIMIT = 0x7f,
        GUEST_IDTR_LIMIT = 0xfff,
    );
    v
}
