//! Which floor owns an MSR.
//!
//! On the exit path of RDMSR and WRMSR: a compare for the x2APIC range, the usual self-IPI and EOI,
//! then a search over sorted constants. The kernel is built without jump tables, so the order of
//! the arms costs nothing.

use x86::msr::*;

/// The owner of an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// In the control block or in hardware: the backend keeps it.
    Backend,
    /// Of the local APIC, outside the x2APIC range: APIC_BASE and TSC_DEADLINE.
    Apic,
    /// The x2APIC range, 0x800 to 0x8ff.
    X2Apic,
    /// Paravirtual, KVM's own.
    Pv,
    /// The synthetic ones that Hyper-V defines, of which a guest has what its CPUID shows.
    HyperV,
    /// Kept by [`crate::MsrStore`].
    Store,
    /// Kept by [`crate::MsrStore`] too; a write takes effect where the kernel can be called.
    Outside,
    /// An MSR that nobody knows: refused.
    Unknown,
}

macro_rules! canonical {
    ([canonical]) => {
        true
    };
    ([]) => {
        false
    };
}

macro_rules! classes {
    (
        ($host:ident)
        Backend $_b:literal { $($b:ident $b_saved:tt $b_check:tt $b_note:literal;)* }
        Pv $_p:literal { $($p:ident $p_saved:tt $p_note:literal;)* }
        HyperV $_h:literal { $($h:ident $h_saved:tt $h_note:literal;)* }
        Kept $_k:literal { $($k:ident $k_saved:tt $k_up:tt $k_read:tt $k_write:tt $k_note:literal;)* }
        Outside $_o:literal { $($o:ident $o_saved:tt $o_up:tt $o_read:tt $o_write:tt $o_note:literal;)* }
        Fixed $_f:literal { $(
            $f:tt $(..= $f_last:tt)? [$($f_saved:tt)*] $f_read:tt $f_write:tt $f_note:literal;
        )* }
        Apic $_a:literal { $($a:ident $a_saved:tt $a_note:literal;)* }
    ) => {
        /// The owner of MSR `index`.
        #[inline]
        pub fn classify(index: u32) -> Class {
            // One comparison for 256 numbers. First: guests that send and end interrupts by these
            // do nothing as often.
            if index.wrapping_sub(X2APIC_BASE) <= X2APIC_LAST - X2APIC_BASE {
                return Class::X2Apic;
            }
            match index {
                $($b)|* => Class::Backend,
                $($a)|* => Class::Apic,
                $($p)|* => Class::Pv,
                _ => classify_rare(index),
            }
        }

        // Out of the first match, so that what guests use while they run is found by few compares.
        fn classify_rare(index: u32) -> Class {
            match index {
                $($k)|* => Class::Store,
                $($f $(..= $f_last)?)|* => Class::Store,
                $($o)|* => Class::Outside,
                // Last of those that are known: few guests have any.
                $($h)|* => Class::HyperV,
                // Refused, and not ignored: a guest that finds #GP tries another way, and one that
                // reads 0 believes it.
                _ => Class::Unknown,
            }
        }

        /// Whether the MSR holds a linear address, which must be canonical. SYSENTER_ESP and
        /// SYSENTER_EIP are not among them: AMD takes any value (APM vol. 2 §6.1.2).
        #[inline]
        pub const fn holds_address(index: u32) -> bool {
            match index {
                $($b => canonical!($b_check),)*
                _ => false,
            }
        }
    };
}

msrs!(classes);
