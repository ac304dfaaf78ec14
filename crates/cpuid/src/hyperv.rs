//! The leaves of Hyper-V's interface, as far as it is there: what a guest's hypervisor needs that uses an enlightened VMCS
//! (Hypervisor Top-Level Functional Specification, "Feature and interface discovery").

use crate::entry::{Entry, find};

/// Leaf of the interface's name.
pub(crate) const INTERFACE: u32 = 0x4000_0001;
/// Leaf of what concerns nesting.
pub(crate) const NESTED: u32 = 0x4000_000a;

/// EAX of [`INTERFACE`]: "Hv#1".
const NAME: u32 = 0x3123_7648;
/// "Linux KVM Hv", as stock KVM names itself.
const VENDOR: [u32; 3] = [0x756e_694c, 0x564b_2078, 0x7648_204d];
/// The last leaf: those of a debugger's, which say that there is none.
const LAST: u32 = 0x4000_0082;
/// Build and version that stock KVM names: 10.0.14393.
const VERSION: [u32; 4] = [0x3839, 0x000a_0000, 0, 0];

/// Leaf 3 EAX: the MSRs HV_EOI, HV_ICR, HV_TPR and HV_VP_ASSIST_PAGE.
const HAS_APIC: u32 = 1 << 4;
/// Leaf 3 EAX: the MSRs HV_GUEST_OS_ID and HV_HYPERCALL.
const HAS_HYPERCALL: u32 = 1 << 5;
/// Leaf 3 EAX: the MSR HV_VP_INDEX.
const HAS_VP_INDEX: u32 = 1 << 6;

/// Leaf 4 EAX: the enlightened VMCS is recommended.
const USE_ENLIGHTENED: u32 = 1 << 14;
/// Leaf 4 EAX: no two virtual processors share a core unless they are siblings.
const CORES_NOT_SHARED: u32 = 1 << 18;
/// Leaf 4 EBX: a spinlock is never to call for help.
const NEVER: u32 = u32::MAX;

/// Leaf 0xA EAX: L0 carries out L2's hypercalls that flush translations.
const DIRECT_FLUSH: u32 = 1 << 17;
/// Leaf 0xA EAX: clean fields say whether the MSR bitmap has changed.
const MSR_BITMAP: u32 = 1 << 19;

/// Version 1 of the enlightened VMCS, as KVM_CAP_HYPERV_ENLIGHTENED_VMCS and leaf 0xA tell the range of versions.
pub const ENLIGHTENED_VERSIONS: u16 = 0x101;

/// Which leaves KVM_GET_SUPPORTED_HV_CPUID names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HyperV {
    /// Versions of the enlightened VMCS; 0: none.
    pub enlightened: u16,
    /// Most vCPUs in a VM.
    pub vcpus: u32,
    /// Hardware threads never share a core.
    pub no_smt: bool,
}

impl HyperV {
    /// The leaves: as many as stock KVM has, whose last three are those of a debugger.
    pub fn entries(&self) -> [Entry; 10] {
        let [ebx, ecx, edx] = VENDOR;
        let mut hints = if self.no_smt { CORES_NOT_SHARED } else { 0 };
        // Recommended only where it was switched on: a hypervisor that follows the hint would fail
        // else.
        if self.enlightened != 0 {
            hints |= USE_ENLIGHTENED;
        }
        let nested = u32::from(self.enlightened) | DIRECT_FLUSH | MSR_BITMAP;
        [
            (0x4000_0000, [LAST, ebx, ecx, edx]),
            (INTERFACE, [NAME, 0, 0, 0]),
            (0x4000_0002, VERSION),
            (0x4000_0003, [HAS_APIC | HAS_HYPERCALL | HAS_VP_INDEX, 0, 0, 0]),
            (0x4000_0004, [hints, NEVER, 0, 0]),
            // 64 logical processors, as Hyper-V 2016 says and stock KVM after it.
            (0x4000_0005, [self.vcpus, 64, 0, 0]),
            (0x4000_0080, [0; 4]),
            (0x4000_0081, [0; 4]),
            (LAST, [0; 4]),
            // Behind the debugger's leaves, in stock KVM's order.
            (NESTED, [nested, 0, 0, 0]),
        ]
        .map(|(leaf, answer)| Entry::new(leaf, 0, answer))
    }
}

/// What a guest was shown of the interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// The interface is named, which alone makes its MSRs exist.
    pub interface: bool,
    /// L0 carries out L2's hypercalls that flush translations.
    pub direct_flush: bool,
}

impl Shown {
    pub(crate) fn of(entries: &[Entry]) -> Self {
        let eax = |leaf| find(entries, leaf, 0).map_or(0, |entry| entry.eax);
        let interface = eax(INTERFACE) == NAME;
        // Without the name the other leaves are another hypervisor's.
        Self { interface, direct_flush: interface && eax(NESTED) & DIRECT_FLUSH != 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leaves_name_what_is_there() {
        let hv = HyperV { enlightened: ENLIGHTENED_VERSIONS, vcpus: 4096, no_smt: false };
        let entries = hv.entries();
        let eax = |leaf| find(&entries, leaf, 0).unwrap().eax;
        assert_eq!(eax(0x4000_0001).to_le_bytes(), *b"Hv#1");
        let vendor = entries[0];
        let name = [vendor.ebx, vendor.ecx, vendor.edx].map(u32::to_le_bytes).concat();
        assert_eq!(name, b"Linux KVM Hv");
        assert_eq!(eax(0x4000_0003), 0x70);
        assert_eq!(eax(0x4000_0004), 1 << 14);
        assert_eq!(eax(0x4000_000a), 0x101 | 1 << 17 | 1 << 19);
        assert_eq!(Shown::of(&entries), Shown { interface: true, direct_flush: true });
        assert_eq!(Shown::of(&entries[2..]), Shown::default());
        let none = HyperV { enlightened: 0, no_smt: true, ..hv }.entries();
        assert_eq!(find(&none, 0x4000_0004, 0).unwrap().eax, 1 << 18);
        assert_eq!(find(&none, 0x4000_000a, 0).unwrap().eax & 0xffff, 0);
    }
}
