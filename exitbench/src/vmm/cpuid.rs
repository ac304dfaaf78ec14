//! The CPUID that a guest sees: what the hypervisor supports, with the bits that are for the VMM
//! to decide (SDM vol. 2A, CPUID; KVM API §4.46).

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::Cap;

use super::hypervisor::Hypervisor;

const LEAF1_ECX_VMX: u32 = 1 << 5;
const LEAF1_ECX_X2APIC: u32 = 1 << 21;
const LEAF1_ECX_TSC_DEADLINE: u32 = 1 << 24;
const LEAF1_ECX_XSAVE: u32 = 1 << 26;
const LEAF1_ECX_HYPERVISOR: u32 = 1 << 31;
const LEAF1_EDX_HTT: u32 = 1 << 28;
const LEAF7_EBX_TSC_ADJUST: u32 = 1 << 1;
const LEAF7_EBX_SMEP: u32 = 1 << 7;
const LEAF40000001_EAX_LAZY_DEADLINE: u32 = 1 << 18;
const LEAF80000001_EDX_NX: u32 = 1 << 20;
const LEAF80000001_ECX_SVM: u32 = 1 << 2;

/// A vCPU's place: all vCPUs are cores, without threads, of one package.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    pub apic_id: u32,
    pub vcpus: u32,
}

/// The features that workloads depend on, as the guest sees them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    pub x2apic: bool,
    pub tsc_deadline: bool,
    pub tsc_adjust: bool,
    pub xsave: bool,
    pub smep: bool,
    pub no_execute: bool,
    pub lazy_deadline: bool,
    /// The guest may be a hypervisor by SVM.
    pub svm: bool,
    /// The guest may be a hypervisor by VMX.
    pub vmx: bool,
}

impl Features {
    /// Reads the features out of a guest's CPUID.
    pub fn of(cpuid: &CpuId) -> Self {
        let leaf = |function| {
            let mut entries = cpuid.as_slice().iter();
            entries.find(|entry| entry.function == function && entry.index == 0)
        };
        let ecx1 = leaf(1).map_or(0, |leaf| leaf.ecx);
        let ebx7 = leaf(7).map_or(0, |leaf| leaf.ebx);
        let eax_kvm = leaf(0x4000_0001).map_or(0, |leaf| leaf.eax);
        let edx_extended = leaf(0x8000_0001).map_or(0, |leaf| leaf.edx);
        let ecx_extended = leaf(0x8000_0001).map_or(0, |leaf| leaf.ecx);
        Self {
            x2apic: ecx1 & LEAF1_ECX_X2APIC != 0,
            tsc_deadline: ecx1 & LEAF1_ECX_TSC_DEADLINE != 0,
            xsave: ecx1 & LEAF1_ECX_XSAVE != 0,
            tsc_adjust: ebx7 & LEAF7_EBX_TSC_ADJUST != 0,
            smep: ebx7 & LEAF7_EBX_SMEP != 0,
            no_execute: edx_extended & LEAF80000001_EDX_NX != 0,
            lazy_deadline: eax_kvm & LEAF40000001_EAX_LAZY_DEADLINE != 0,
            vmx: ecx1 & LEAF1_ECX_VMX != 0,
            svm: ecx_extended & LEAF80000001_ECX_SVM != 0,
        }
    }
}

/// The CPUID for one vCPU. The TSC deadline is offered wherever the kernel emulates the local APIC
/// and says that it can do it: KVM_GET_SUPPORTED_CPUID leaves that bit out (KVM API §4.46).
pub fn of_guest(hypervisor: &Hypervisor, local_apic: bool, topology: Topology) -> CpuId {
    let mut cpuid = hypervisor.supported_cpuid.clone();
    let tsc_deadline = local_apic && hypervisor.has(Cap::TscDeadlineTimer);
    for entry in cpuid.as_mut_slice() {
        decide(entry, local_apic, tsc_deadline);
        place(entry, topology);
    }
    cpuid
}

fn decide(entry: &mut kvm_cpuid_entry2, local_apic: bool, tsc_deadline: bool) {
    if entry.function != 1 {
        return;
    }
    entry.ecx |= LEAF1_ECX_HYPERVISOR;
    set(&mut entry.ecx, LEAF1_ECX_TSC_DEADLINE, tsc_deadline);
    if !local_apic {
        set(&mut entry.ecx, LEAF1_ECX_X2APIC, false);
    }
}

/// Replaces the place of the host CPU that answered by that of the vCPU.
fn place(entry: &mut kvm_cpuid_entry2, Topology { apic_id, vcpus }: Topology) {
    let id_bits = vcpus.next_power_of_two().trailing_zeros();
    match entry.function {
        1 => {
            entry.ebx = (entry.ebx & 0xffff) | (vcpus & 0xff) << 16 | (apic_id & 0xff) << 24;
            set(&mut entry.edx, LEAF1_EDX_HTT, vcpus > 1);
        }
        // Cores and sharing of caches, each less one.
        4 => entry.eax = (entry.eax & 0x3fff) | (vcpus - 1) << 26,
        0xb | 0x1f => {
            const THREAD: u32 = 1 << 8;
            const CORE: u32 = 2 << 8;
            (entry.eax, entry.ebx, entry.ecx) = match entry.index {
                0 => (0, 1, THREAD),
                1 => (id_bits, vcpus, 1 | CORE),
                other => (0, 0, other),
            };
            entry.edx = apic_id;
        }
        0x8000_0008 => entry.ecx = (vcpus - 1) | id_bits << 12,
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (apic_id, apic_id & 0xff, 0),
        _ => {}
    }
}

fn set(register: &mut u32, bits: u32, on: bool) {
    if on {
        *register |= bits;
    } else {
        *register &= !bits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, ..Default::default() }
    }

    #[test]
    fn the_tsc_deadline_is_offered_with_a_local_apic_alone() {
        let mut entry = leaf(1, 0);
        decide(&mut entry, true, true);
        assert_eq!(entry.ecx, LEAF1_ECX_HYPERVISOR | LEAF1_ECX_TSC_DEADLINE);
        entry.ecx |= LEAF1_ECX_X2APIC;
        decide(&mut entry, false, false);
        assert_eq!(entry.ecx, LEAF1_ECX_HYPERVISOR);
    }

    #[test]
    fn each_vcpu_has_its_own_apic_id_in_every_leaf() {
        let topology = Topology { apic_id: 2, vcpus: 3 };
        let mut entry = leaf(1, 0);
        place(&mut entry, topology);
        assert_eq!(entry.ebx, 2 << 24 | 3 << 16);
        let mut entry = leaf(0xb, 1);
        place(&mut entry, topology);
        assert_eq!((entry.eax, entry.ebx, entry.ecx, entry.edx), (2, 3, 0x201, 2));
        let mut entry = leaf(0x8000_001e, 0);
        place(&mut entry, topology);
        assert_eq!(entry.eax, 2);
    }

    #[test]
    fn features_are_read_from_the_guests_leaves() {
        let mut one = leaf(1, 0);
        one.ecx = LEAF1_ECX_XSAVE;
        let mut seven = leaf(7, 0);
        seven.ebx = LEAF7_EBX_SMEP;
        let features = Features::of(&CpuId::from_entries(&[one, seven]).unwrap());
        assert!(features.xsave && features.smep);
        assert!(!features.x2apic && !features.tsc_deadline && !features.no_execute);
    }
}
