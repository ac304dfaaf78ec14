//! What KVM_GET_SUPPORTED_CPUID tells on two hosts.

mod hosts;

use gannet_cpuid::{FeatureWords, HostFacts, PV_FEATURES, Supported};
use hosts::{amd, entry, intel, supported_amd, supported_intel};
use proptest::prelude::*;
use x86::cpuid::{Vendor, feature};
use x86::{Cr4, Efer, Xcr0};

#[test]
fn nested_virtualization_and_other_absent_hardware_is_not_offered() {
    for host in [supported_amd(), supported_intel()] {
        for hidden in [
            feature::VMX,
            feature::SVM,
            feature::MONITOR,
            feature::MWAITX,
            feature::PDCM,
            feature::DS,
            feature::OSXSAVE,
            feature::OSPKE,
            feature::TSC_DEADLINE,
            feature::INTEL_PT,
            feature::SGX,
            feature::MPX,
            feature::IBS,
            feature::PERFCTR_CORE,
            feature::HTT,
            feature::SEV,
            feature::NPT,
        ] {
            assert!(!host.has(hidden), "{hidden:?}");
        }
    }
    let table = supported_intel();
    assert_eq!(entry(table.entries(), 0xa, 0).answer(), [0; 4]);
    assert_eq!(entry(table.entries(), 5, 0).answer(), [0; 4]);
    assert_eq!(entry(table.entries(), 0x14, 0).answer(), [0; 4]);
}

#[test]
fn what_is_emulated_is_offered_on_any_host() {
    // A part that knows nothing but its leaves.
    let plain = |leaf, _| match leaf {
        0 => [7, 0, 0, 0],
        0x8000_0000 => [0x8000_0021, 0, 0, 0],
        _ => [0; 4],
    };
    let plain = Supported::read(plain, &HostFacts::default()).expect("a table");
    for host in [supported_amd(), supported_intel(), &plain] {
        for forced in [feature::X2APIC, feature::HYPERVISOR, feature::TSC_ADJUST] {
            let told = entry(host.entries(), forced.leaf, forced.subleaf).answer();
            assert!(host.has(forced) && forced.is_in(&told), "{forced:?}");
        }
    }
}

#[test]
fn the_vendors_name_speculation_control_for_each_other() {
    let from_amd = supported_amd();
    assert!(from_amd.has(feature::AMD_SSBD) && from_amd.has(feature::SPEC_CTRL_SSBD));
    assert!(from_amd.has(feature::AMD_IBPB) && from_amd.has(feature::SPEC_CTRL));
    let from_intel = supported_intel();
    assert!(from_intel.has(feature::AMD_IBRS) && from_intel.has(feature::AMD_STIBP));
}

#[test]
fn virtual_ssbd_is_offered_where_the_host_can_do_it() {
    let bits = |ls_cfg_ssbd, amd_ssbd: u32| {
        let host = move |leaf, subleaf| match leaf {
            0x8000_0008 => amd(leaf, subleaf).map(|word| word & !(1 << 24)).zip_ebx(amd_ssbd),
            _ => amd(leaf, subleaf),
        };
        let facts = HostFacts { ls_cfg_ssbd, ..HostFacts::default() };
        Supported::read(host, &facts).expect("a table").has(feature::VIRT_SSBD)
    };
    assert!(!bits(false, 0) && bits(true, 0) && bits(false, 1 << 24));
    let facts = HostFacts { ls_cfg_ssbd: true, ..HostFacts::default() };
    assert!(!Supported::read(intel, &facts).expect("a table").has(feature::VIRT_SSBD));
}

trait ZipEbx {
    fn zip_ebx(self, bits: u32) -> Self;
}

impl ZipEbx for [u32; 4] {
    fn zip_ebx(self, bits: u32) -> Self {
        let [eax, ebx, ecx, edx] = self;
        [eax, ebx | bits, ecx, edx]
    }
}

#[test]
fn the_leaf_of_lfence_is_made_up_where_the_host_has_the_one_of_caches() {
    // A part whose leaves end with the topology, and one whose leaves end before its caches.
    for (last, told) in [(0x8000_001e, true), (0x8000_001c, false)] {
        let host = move |leaf, subleaf| match leaf {
            0x8000_0000 => [last, 0, 0, 0],
            _ => amd(leaf, subleaf),
        };
        for (lfence, null) in [(true, false), (false, true), (false, false)] {
            let facts = HostFacts {
                lfence_serializes: lfence,
                null_selector_clears_base: null,
                ..HostFacts::default()
            };
            let table = Supported::read(host, &facts).expect("a table");
            let end = if told && (lfence || null) { 0x8000_0021 } else { last };
            assert_eq!(entry(table.entries(), 0x8000_0000, 0).eax, end);
            for leaf in 0x8000_0000..=end {
                assert!(table.entries().iter().any(|e| e.leaf == leaf), "{leaf:#x}");
            }
            if end == 0x8000_0021 {
                let eax = entry(table.entries(), end, 0).eax;
                assert_eq!((eax & 4 != 0, eax & 1 << 6 != 0), (lfence, null));
            }
        }
    }
}

#[test]
fn kvm_signs_its_leaf_and_offers_only_what_is_served() {
    let table = supported_amd();
    let signature = entry(table.entries(), 0x4000_0000, 0);
    assert_eq!(signature.answer(), [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]);
    let features = entry(table.entries(), 0x4000_0001, 0);
    assert_eq!(features.answer(), [PV_FEATURES, 0, 0, 0]);
    assert!(table.has(feature::KVM_ASYNC_PF) && table.has(feature::KVM_PV_EOI));
    assert!(!table.has(feature::KVM_ASYNC_PF_INT), "nobody would be told by it");

    let facts = HostFacts { pv_features: !(1 << 5), ..HostFacts::default() };
    let fewer = Supported::read(amd, &facts).expect("a table");
    assert!(!fewer.has(feature::KVM_STEAL_TIME) && !fewer.has(feature::KVM_PV_TLB_FLUSH));
    assert!(fewer.has(feature::KVM_CLOCKSOURCE2));
}

#[test]
fn xsave_leaves_describe_the_offered_components_only() {
    let table = supported_intel();
    assert_eq!(table.xcr0(), Xcr0::from_bits_retain(0x2e7));
    assert_eq!(entry(table.entries(), 0xd, 0).answer(), [0x2e7, 2696, 2696, 0]);
    let compacted = 576 + 256 + 64 + 512 + 1024 + 8;
    assert_eq!(entry(table.entries(), 0xd, 1).answer(), [0xf, compacted, 0, 0]);
    let indices: Vec<u32> =
        table.entries().iter().filter(|e| e.leaf == 0xd).map(|e| e.index).collect();
    assert_eq!(indices, [0, 1, 2, 5, 6, 7, 9]);
}

#[test]
fn without_host_xsave_nothing_that_needs_it_is_offered() {
    let table = Supported::read(intel, &HostFacts::default()).expect("a table");
    for gone in [feature::XSAVE, feature::AVX, feature::FMA, feature::AVX512F, feature::PKU] {
        assert!(!table.has(gone), "{gone:?}");
    }
    assert_eq!(entry(table.entries(), 0xd, 0).answer(), [0; 4]);
    assert!(!table.cr4().contains(Cr4::OSXSAVE));
}

#[test]
fn without_avx512_state_its_instructions_are_hidden() {
    let facts = HostFacts { xcr0: 7, ..HostFacts::default() };
    let table = Supported::read(intel, &facts).expect("a table");
    assert!(table.has(feature::AVX2) && !table.has(feature::AVX512F));
    assert!(!table.has(feature::AVX512VL));
}

#[test]
fn protection_keys_need_the_host_to_use_them() {
    // The Intel host has CR4.PKE set (OSPKE); without it the guest's PKRU would not be kept.
    assert!(supported_intel().has(feature::PKU));
    let facts = HostFacts { xcr0: 0x2ff, ..HostFacts::default() };
    let without = |leaf, subleaf| {
        let mut answer = intel(leaf, subleaf);
        if (leaf, subleaf) == (7, 0) {
            answer[2] &= !feature::OSPKE.mask();
        }
        answer
    };
    assert!(!Supported::read(without, &facts).expect("a table").has(feature::PKU));
}

#[test]
fn address_sizes_tell_how_far_the_tdp_tables_reach() {
    assert_eq!(entry(supported_amd().entries(), 0x8000_0008, 0).eax, 0x0030_3030);
    assert_eq!(entry(supported_intel().entries(), 0x8000_0008, 0).eax, 0x002e_302e);
    let wide = |leaf, subleaf| match leaf {
        0x8000_0008 => [0x3934, 0, 0, 0],
        _ => amd(leaf, subleaf),
    };
    let four = Supported::read(wide, &HostFacts::default()).expect("a table");
    assert_eq!(entry(four.entries(), 0x8000_0008, 0).eax, 0x0030_3934);
    let facts = HostFacts { tdp_levels: 5, ..HostFacts::default() };
    let five = Supported::read(wide, &facts).expect("a table");
    assert_eq!(entry(five.entries(), 0x8000_0008, 0).eax, 0x0034_3934);
}

#[test]
fn caches_are_passed_on_up_to_the_last() {
    let amd = supported_amd();
    let count = |table: &Supported, leaf| table.entries().iter().filter(|e| e.leaf == leaf).count();
    assert_eq!(count(amd, 0x8000_001d), 3);
    assert_eq!(count(supported_intel(), 4), 32); // The invented host never ends its list.
    assert_eq!(entry(amd.entries(), 0x8000_0006, 0).edx, 0x0200_9140);
}

#[test]
fn the_topology_and_the_name_are_left_to_the_vmm() {
    let table = supported_intel();
    assert_eq!(entry(table.entries(), 0xb, 0).answer(), [0; 4]);
    let table = supported_amd();
    assert_eq!(entry(table.entries(), 0x8000_001e, 0).answer(), [0; 4]);
    assert_eq!(entry(table.entries(), 0x8000_0002, 0).answer(), [0; 4]);
}

#[test]
fn a_serializing_lfence_is_told_in_a_leaf_that_the_part_lacks() {
    let table = supported_amd();
    assert_eq!(entry(table.entries(), 0x8000_0000, 0).eax, 0x8000_0021);
    let answer = entry(table.entries(), 0x8000_0021, 0).answer();
    assert!(feature::LFENCE_RDTSC.is_in(&answer));
}

#[test]
fn what_the_backend_gives_by_exits_is_offered() {
    let host = |leaf, subleaf| {
        let [eax, ebx, ecx, edx] = amd(leaf, subleaf);
        [eax, ebx, if leaf == 7 { ecx & !(1 << 2) } else { ecx }, edx]
    };
    for (by_exits, offered) in [(&[][..], false), (&[feature::UMIP], true)] {
        let facts = HostFacts { by_exits, ..HostFacts::default() };
        let table = Supported::read(host, &facts).expect("a table");
        assert_eq!(table.has(feature::UMIP), offered);
        assert_eq!(entry(table.entries(), 7, 0).ecx >> 2 & 1 != 0, offered);
        assert_eq!(table.cr4().contains(Cr4::UMIP), offered);
    }
}

#[test]
fn withheld_features_are_not_offered() {
    let withheld = [feature::PCID, feature::RDTSCP];
    let facts = HostFacts { withheld: &withheld, xcr0: 7, ..HostFacts::default() };
    let table = Supported::read(amd, &facts).expect("a table");
    assert!(!table.has(feature::PCID) && !table.has(feature::RDTSCP));
    assert!(!table.cr4().contains(Cr4::PCIDE));
}

#[test]
fn control_bits_follow_the_features() {
    let table = supported_amd();
    assert_eq!(table.vendor(), Vendor::Amd);
    assert!(table.cr4().contains(Cr4::SMEP | Cr4::SMAP | Cr4::UMIP | Cr4::FSGSBASE));
    assert!(!table.cr4().intersects(Cr4::VMXE | Cr4::SMXE | Cr4::LA57 | Cr4::PKE | Cr4::CET));
    assert!(table.efer().contains(Efer::LME | Efer::LMA | Efer::NXE | Efer::SCE | Efer::FFXSR));
    assert!(!table.efer().intersects(Efer::SVME | Efer::LMSLE));
}

#[test]
fn the_host_below_is_not_asked_beyond_its_last_leaf() {
    // The AMD host's basic leaves end at 0xd, and it has no subleaf 7.1.
    let asked = |leaf, subleaf| {
        assert!(leaf <= 0xd || leaf >= 0x8000_0000, "{leaf:#x}");
        assert!(leaf <= 0x8000_001f, "{leaf:#x}");
        assert!(leaf != 7 || subleaf == 0);
        amd(leaf, subleaf)
    };
    let facts = HostFacts { xcr0: 7, lfence_serializes: true, ..HostFacts::default() };
    assert!(Supported::read(asked, &facts).is_ok());
}

proptest! {
    #[test]
    fn any_host_gives_a_table_of_bounded_size(
        seed in any::<[u32; 4]>(),
        xcr0: u64,
        xss: u64,
        tdp_levels: u8,
        lfence_serializes: bool,
        null_selector_clears_base: bool,
        ls_cfg_ssbd: bool,
        pv_features: u32,
        xstate_cache: bool,
    ) {
        let host = |leaf: u32, subleaf: u32| {
            let mix = leaf.wrapping_mul(0x9e37_79b9) ^ subleaf.wrapping_mul(0x85eb_ca6b);
            seed.map(|word| word.rotate_left(mix >> 27) ^ mix)
        };
        let facts = HostFacts {
            xcr0, xss, tdp_levels, lfence_serializes, null_selector_clears_base, ls_cfg_ssbd,
            pv_features, withheld: &[], by_exits: &[],
            xstate_cache,
            nested: false,
        };
        let table = Supported::read(host, &facts).expect("a table");
        prop_assert!(table.entries().len() <= gannet_cpuid::MAX_ENTRIES);
        // What the table offers, read back from its entries, is what it says it offers.
        let read = FeatureWords::read(|leaf, subleaf| {
            table
                .entries()
                .iter()
                .find(|e| e.is_for(leaf, subleaf))
                .map_or([0; 4], |e| e.answer())
        });
        for (name, feature) in feature::ALL {
            prop_assert!(!read.has(*feature) || table.has(*feature), "{}", name);
        }
    }
}
