//! The MSRs that KVM_GET_MSR_INDEX_LIST and KVM_GET_MSR_FEATURE_INDEX_LIST name (KVM API §4.3), by the
//! table's column "saved".
//!
//! EFER, FS_BASE, GS_BASE and APIC_BASE are not listed: they travel with KVM_GET_SREGS, the x2APIC
//! registers with KVM_GET_LAPIC. The banks of machine checks come with KVM_X86_SETUP_MCE and are read
//! by number.

use crate::HostMsrs;
use crate::facts::VMX_COUNT;
use crate::rows::List;
use x86::msr::*;

/// Every MSR that a VMM should save, on any host. A VMM may write 0 to any of them even where the
/// host lacks it.
// Made when this is compiled: a list and its length cannot differ.
pub static SAVED: [u32; List::Saved.count()] = List::Saved.numbers();

/// MSRs by which a VMM learns what the host can offer.
pub static FEATURES: [u32; List::Features.count()] = List::Features.numbers();

/// The column "saved": whether this host's list has the MSR.
macro_rules! is_on {
    ($host:ident [saved if $fact:ident]) => {
        $host.$fact
    };
    ($host:ident [saved unless $fact:ident]) => {
        !$host.$fact
    };
    ($host:ident [saved $(, $($feature:tt)*)?]) => {
        true
    };
    ($host:ident $other:tt) => {
        false
    };
}

/// The column "saved": what /dev/kvm answers for the MSR.
macro_rules! feature_value {
    ($host:ident [$(saved,)? feature: $value:expr]) => {
        Some($value)
    };
    ($host:ident [feature if $fact:ident: $value:expr]) => {
        $host.$fact.then_some($value)
    };
    ($host:ident $other:tt) => {
        None
    };
}

macro_rules! lists {
    (
        ($host:ident)
        Backend $_b:literal { $($b:ident $b_saved:tt $b_check:tt $b_note:literal;)* }
        Pv $_p:literal { $($p:ident $p_saved:tt $p_note:literal;)* }
        HyperV $_h:literal { $($h:ident $h_saved:tt $h_note:literal;)* }
        Kept $_k:literal { $(
            $k:ident $k_saved:tt $k_up:tt $k_read:tt $k_write:tt $k_note:literal;
        )* }
        Outside $_o:literal { $(
            $o:ident $o_saved:tt $o_up:tt $o_read:tt $o_write:tt $o_note:literal;
        )* }
        Fixed $_f:literal { $(
            $f:tt $(..= $f_last:tt)? [$($f_saved:tt)*] $f_read:tt $f_write:tt $f_note:literal;
        )* }
        Apic $_a:literal { $($a:ident $a_saved:tt $a_note:literal;)* }
    ) => {
        fn is_on(index: u32, $host: &HostMsrs) -> bool {
            match index {
                $($b => is_on!($host $b_saved),)*
                $($p => is_on!($host $p_saved),)*
                $($h => is_on!($host $h_saved),)*
                $($k => is_on!($host $k_saved),)*
                $($o => is_on!($host $o_saved),)*
                $($f $(..= $f_last)? => is_on!($host [$($f_saved)*]),)*
                $($a => is_on!($host $a_saved),)*
                _ => false,
            }
        }

        fn value(index: u32, $host: &HostMsrs) -> Option<u64> {
            match index {
                $($k => feature_value!($host $k_saved),)*
                $($f $(..= $f_last)? => feature_value!($host [$($f_saved)*]),)*
                _ => None,
            }
        }
    };
}

msrs!(lists);

/// The VMX capability MSRs that a VMM should save. The others follow from these and from CPUID: the control words
/// of CPUs without "true" ones (0x481 to 0x484), and the bits of CR0 and CR4 that may be one (0x487, 0x489).
const VMX_SAVED: [u32; 12] =
    [0x480, 0x48d, 0x48e, 0x48f, 0x490, 0x485, 0x486, 0x488, 0x48a, 0x48b, 0x48c, VMX_VMFUNC];

/// KVM_GET_MSR_INDEX_LIST on this host.
pub fn saved(host: &HostMsrs) -> impl Iterator<Item = u32> + use<> {
    let host = *host;
    // Where guests may be no hypervisors these MSRs do not exist, and a VMM could not write them
    // back.
    let vmx = VMX_SAVED.into_iter().filter(move |_| host.vmx.is_some());
    SAVED.iter().copied().filter(move |index| is_on(*index, &host)).chain(vmx)
}

/// KVM_GET_MSR_FEATURE_INDEX_LIST on this host.
pub fn features(host: &HostMsrs) -> impl Iterator<Item = u32> + use<> {
    let host = *host;
    // All of them here, the derived ones as well: a VMM composes its offer from this list.
    let vmx = (VMX_BASIC..=VMX_VMFUNC).filter(move |_| host.vmx.is_some());
    vmx.chain(FEATURES.iter().copied().filter(move |index| value(*index, &host).is_some()))
}

impl HostMsrs {
    /// A feature MSR, for KVM_GET_MSRS on /dev/kvm; `None` for one not in [`FEATURES`] or not of this
    /// vendor.
    pub fn feature(&self, index: u32) -> Option<u64> {
        let vmx = |values: [u64; VMX_COUNT]| {
            (VMX_BASIC..).zip(values).find(|(of, _)| *of == index).map(|(_, value)| value)
        };
        self.vmx.and_then(vmx).or_else(|| value(index, self))
    }
}
