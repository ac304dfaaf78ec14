//! Setting a table, the facts that follow from it, and the answers of CPUID exits.

mod hosts;

use gannet_cpuid::{DynamicInputs, Entry, Error, GuestCpuid, MAX_ENTRIES, Supported};
use hosts::{entry, leak, supported_amd, supported_intel};
use proptest::prelude::*;
use x86::cpuid::{Vendor, feature};
use x86::{Cr4, Efer, Xcr0};

const RUNNING: DynamicInputs =
    DynamicInputs { cr4_osxsave: true, cr4_pke: false, apic_enabled: true, xcr0: 7, xss: 0 };

fn guest_of(host: &'static Supported) -> GuestCpuid {
    let mut guest = GuestCpuid::new(host);
    guest.set(host.entries(), host, false).expect("accepted");
    guest
}

#[test]
fn facts_follow_from_the_table() {
    let guest = guest_of(supported_amd());
    assert_eq!(guest.vendor(), Vendor::Amd);
    assert_eq!(guest.maxphyaddr(), 48);
    assert_eq!(guest.signature(), 0x0080_0f12);
    assert_eq!(guest.xcr0_allowed(), Xcr0::from_bits_retain(7));
    assert!(guest.cr4_allowed().contains(Cr4::OSXSAVE | Cr4::SMEP));
    assert!(guest.efer_allowed().contains(Efer::NXE | Efer::LME));
    assert!(guest.has_spec_ctrl() && guest.has_pred_cmd());
    assert!(guest.has(feature::KVM_STEAL_TIME) && guest.has(feature::KVM_PV_UNHALT));
    assert!(guest.is_canonical(0xffff_8000_0000_0000) && !guest.is_canonical(1 << 47));
}

#[test]
fn a_guest_gets_no_control_bit_that_it_was_not_offered_or_that_the_host_lacks() {
    let host = supported_amd();
    let mut entries = host.entries().to_vec();
    for e in &mut entries {
        match e.leaf {
            7 if e.index == 0 => {
                e.ebx &= !feature::SMEP.mask();
                e.ecx |= feature::LA57.mask() | feature::PKU.mask();
            }
            0x8000_0001 => e.ecx |= feature::SVM.mask(),
            0xd if e.index == 0 => e.eax = 0xe7,
            _ => {}
        }
    }
    let mut guest = GuestCpuid::new(host);
    guest.set(&entries, host, false).expect("accepted");
    assert!(!guest.cr4_allowed().intersects(Cr4::SMEP | Cr4::LA57 | Cr4::PKE));
    assert!(guest.cr4_allowed().contains(Cr4::SMAP));
    assert!(!guest.efer_allowed().contains(Efer::SVME));
    assert_eq!(guest.xcr0_allowed(), Xcr0::from_bits_retain(7));
}

#[test]
fn speculation_control_needs_guest_and_host() {
    let bare = leak(Supported::read(|_, _| [0; 4], &Default::default()).expect("a table"));
    let mut guest = GuestCpuid::new(bare);
    guest.set(supported_amd().entries(), bare, false).expect("accepted");
    assert!(guest.has(feature::AMD_SSBD) && !guest.has_spec_ctrl() && !guest.has_pred_cmd());
}

#[test]
fn a_vcpu_without_a_table_may_use_what_the_host_has() {
    let mut guest = GuestCpuid::new(supported_amd());
    assert_eq!(guest.maxphyaddr(), 36);
    assert!(guest.cr4_allowed().contains(Cr4::FSGSBASE));
    assert!(guest.efer_allowed().contains(Efer::LME));
    assert_eq!(guest.lookup(1, 0, &RUNNING), [0; 4]);
    assert!(guest.is_empty());
}

#[test]
fn the_width_of_addresses_is_36_unless_the_table_tells() {
    let host = supported_amd();
    let mut guest = GuestCpuid::new(host);
    let sizes = Entry::new(0x8000_0008, 0, [0x3028, 0, 0, 0]);
    guest.set(&[sizes], host, false).expect("accepted");
    assert_eq!(guest.maxphyaddr(), 36);
    let last = Entry::new(0x8000_0000, 0, [0x8000_0008, 0, 0, 0]);
    guest.set(&[last, sizes], host, false).expect("accepted");
    assert_eq!(guest.maxphyaddr(), 40);
}

#[test]
fn tables_that_are_too_long_or_have_an_odd_address_width_are_refused() {
    let host = supported_amd();
    let mut guest = guest_of(host);
    let before = guest.lookup(1, 0, &RUNNING);
    let long = vec![Entry::default(); MAX_ENTRIES + 1];
    assert_eq!(guest.set(&long, host, false), Err(Error::TooMany));
    let odd = Entry::new(0x8000_0008, 0, [0x3128, 0, 0, 0]);
    assert_eq!(guest.set(&[odd], host, false), Err(Error::Invalid));
    assert_eq!(guest.lookup(1, 0, &RUNNING), before);
    for width in [0, 48, 57] {
        let fine = Entry::new(0x8000_0008, 0, [width << 8 | 40, 0, 0, 0]);
        assert_eq!(guest.set(&[fine], host, false), Ok(true));
    }
    let most = vec![Entry::default(); MAX_ENTRIES];
    assert_eq!(guest.set(&most, host, false), Ok(true));
}

#[test]
fn after_a_run_only_the_same_table_is_accepted() {
    let host = supported_amd();
    let mut guest = guest_of(host);
    let told = guest.entries(&RUNNING).to_vec();
    assert_ne!(told, host.entries());
    // Both what was set and what KVM_GET_CPUID2 told.
    assert_eq!(guest.set(host.entries(), host, true), Ok(false));
    assert_eq!(guest.set(&told, host, true), Ok(false));
    let mut other = told.clone();
    other[1].eax ^= 1;
    assert_eq!(guest.set(&other, host, true), Err(Error::Invalid));
    other = told.clone();
    other[1].ecx ^= feature::SSE3.mask();
    assert_eq!(guest.set(&other, host, true), Err(Error::Invalid));
    assert_eq!(guest.set(&told[1..], host, true), Err(Error::Invalid));
    assert_eq!(guest.entries(&RUNNING), told);
}

#[test]
fn osxsave_and_the_apic_flag_follow_the_machine() {
    let mut guest = guest_of(supported_amd());
    let off = DynamicInputs { cr4_osxsave: false, apic_enabled: false, ..RUNNING };
    for _ in 0..2 {
        let on = guest.lookup(1, 0, &RUNNING);
        assert!(feature::OSXSAVE.is_in(&on) && feature::APIC.is_in(&on));
        let answer = guest.lookup(1, 0, &off);
        assert!(!feature::OSXSAVE.is_in(&answer) && !feature::APIC.is_in(&answer));
    }
}

#[test]
fn ospke_follows_cr4_where_the_host_has_keys() {
    let pke = DynamicInputs { cr4_pke: true, ..RUNNING };
    let mut with = guest_of(supported_intel());
    assert!(feature::OSPKE.is_in(&with.lookup(7, 0, &pke)));
    assert!(!feature::OSPKE.is_in(&with.lookup(7, 0, &RUNNING)));
    let mut without = guest_of(supported_amd());
    assert!(!feature::OSPKE.is_in(&without.lookup(7, 0, &pke)));
}

#[test]
fn xsave_sizes_follow_xcr0() {
    let mut guest = guest_of(supported_intel());
    for (xcr0, standard, compacted) in
        [(1, 576, 576), (3, 576, 576), (7, 832, 832), (0xe7, 2688, 2432), (0x2e7, 2696, 2440)]
    {
        let inputs = DynamicInputs { xcr0, ..RUNNING };
        assert_eq!(guest.lookup(0xd, 0, &inputs)[1], standard, "{xcr0:#x}");
        assert_eq!(guest.lookup(0xd, 0, &inputs)[2], 2696);
        assert_eq!(guest.lookup(0xd, 1, &inputs)[1], compacted, "{xcr0:#x}");
        assert_eq!(guest.lookup(0xd, 2, &inputs), [256, 576, 0, 0]);
    }
}

#[test]
fn monitor_and_unhalt_follow_their_switches() {
    let host = supported_amd();
    let mut entries = host.entries().to_vec();
    for e in entries.iter_mut().filter(|e| e.leaf == 0x4000_0001) {
        e.eax |= feature::KVM_PV_UNHALT.mask();
    }
    let mut guest = GuestCpuid::new(host);
    guest.set(&entries, host, false).expect("accepted");
    assert!(!feature::MONITOR.is_in(&guest.lookup(1, 0, &RUNNING)));
    assert!(!guest.has_monitor());
    guest.set_mwait(Some(true));
    assert!(guest.has_monitor());
    assert!(feature::MONITOR.is_in(&guest.lookup(1, 0, &RUNNING)));
    guest.set_mwait(Some(false));
    assert!(!feature::MONITOR.is_in(&guest.lookup(1, 0, &RUNNING)));
    assert!(feature::KVM_PV_UNHALT.is_in(&guest.lookup(0x4000_0001, 0, &RUNNING)));
    guest.set_hlt_in_guest(true);
    assert!(!feature::KVM_PV_UNHALT.is_in(&guest.lookup(0x4000_0001, 0, &RUNNING)));
}

#[test]
fn another_hypervisors_leaf_names_no_features_of_ours() {
    let host = supported_amd();
    let mut entries = host.entries().to_vec();
    for e in entries.iter_mut().filter(|e| e.leaf == 0x4000_0000) {
        e.ebx = 0x7263_694d;
    }
    let mut guest = GuestCpuid::new(host);
    guest.set(&entries, host, false).expect("accepted");
    assert!(!guest.has(feature::KVM_STEAL_TIME) && !guest.has(feature::KVM_CLOCKSOURCE));
}

#[test]
fn beyond_the_end_intel_guests_see_the_last_basic_leaf_and_amd_guests_zeros() {
    let host = supported_intel();
    let mut guest = GuestCpuid::new(host);
    let entries = [
        Entry::new(0, 0, [0x16, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
        Entry::new(0x16, 0, [1, 2, 3, 4]),
        Entry::new(0x8000_0000, 0, [0x8000_0008, 0, 0, 0]),
        Entry::new(0x4000_0000, 0, [0x4000_0001, 0, 0, 0]),
    ];
    guest.set(&entries, host, false).expect("accepted");
    for beyond in [0x17, 0x7fff_ffff, 0x8000_0009, 0x4000_0002, 0x4000_0100, 0xc000_0000, u32::MAX]
    {
        assert_eq!(guest.lookup(beyond, 0, &RUNNING), [1, 2, 3, 4], "{beyond:#x}");
    }
    // Within a class a missing leaf is zero.
    for within in [5, 0x8000_0005, 0x4000_0001] {
        assert_eq!(guest.lookup(within, 0, &RUNNING), [0; 4], "{within:#x}");
    }
    let mut amd = guest_of(supported_amd());
    for beyond in [0x17, 0x8000_0fff, 0x4000_0100, u32::MAX] {
        assert_eq!(amd.lookup(beyond, 0, &RUNNING), [0; 4], "{beyond:#x}");
    }
}

#[test]
fn a_redirected_leaf_uses_the_subleaf_that_was_asked_and_stays_dynamic() {
    let host = supported_intel();
    let mut guest = GuestCpuid::new(host);
    let entries = [
        Entry::new(0, 0, [0xd, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
        Entry::new(0xd, 0, [0x2e7, 0, 2696, 0]),
        Entry::new(0xd, 2, [256, 576, 0, 0]),
    ];
    guest.set(&entries, host, false).expect("accepted");
    assert_eq!(guest.lookup(0x99, 2, &RUNNING), [256, 576, 0, 0]);
    assert_eq!(guest.lookup(0x99, 0, &RUNNING), [0x2e7, 832, 2696, 0]);
    let wider = DynamicInputs { xcr0: 0xe7, ..RUNNING };
    assert_eq!(guest.lookup(0x99, 0, &wider), [0x2e7, 2688, 2696, 0]);
}

#[test]
fn topology_levels_beyond_the_last_pass_the_level_and_the_id() {
    let host = supported_intel();
    let mut guest = GuestCpuid::new(host);
    let entries = [
        Entry::new(0, 0, [0x16, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
        Entry::new(0xb, 0, [1, 2, 0x100, 9]),
        Entry::new(0xb, 1, [5, 32, 0x201, 9]),
    ];
    guest.set(&entries, host, false).expect("accepted");
    assert_eq!(guest.lookup(0xb, 1, &RUNNING), [5, 32, 0x201, 9]);
    assert_eq!(guest.lookup(0xb, 0x1234, &RUNNING), [0, 0, 0x34, 9]);
    assert_eq!(guest.lookup(0x1f, 0, &RUNNING), [0; 4]);
}

#[test]
fn kvm_features_are_found_where_another_hypervisor_stands_first() {
    let host = supported_amd();
    let mut guest = GuestCpuid::new(host);
    let entries = [
        Entry::new(0x4000_0000, 0, [0x4000_0005, 1, 2, 3]),
        Entry::new(0x4000_0001, 0, [0x3123_7648, 0, 0, 0]),
        Entry::new(0x4000_0100, 0, [0x4000_0101, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
        Entry::new(0x4000_0101, 0, [1 << 6, 0, 0, 0]),
    ];
    guest.set(&entries, host, false).expect("accepted");
    assert!(guest.has(feature::KVM_PV_EOI) && !guest.has(feature::KVM_CLOCKSOURCE2));
}

#[test]
fn a_new_table_makes_old_answers_forgotten() {
    let host = supported_amd();
    let mut guest = guest_of(host);
    let old = guest.lookup(0x8000_0008, 0, &RUNNING);
    assert_eq!(old, entry(host.entries(), 0x8000_0008, 0).answer());
    guest.set(&[], host, false).expect("accepted");
    assert_eq!(guest.lookup(0x8000_0008, 0, &RUNNING), [0; 4]);
}

/// The answer by the rules alone: no cache, no lazy update.
fn by_the_rules(entries: &[Entry], leaf: u32, subleaf: u32) -> Option<[u32; 4]> {
    entries.iter().find(|e| e.is_for(leaf, subleaf)).map(Entry::answer)
}

proptest! {
    #[test]
    fn cached_answers_are_those_of_the_table(
        asked in proptest::collection::vec(
            (prop_oneof![0..0x20u32, 0x4000_0000..0x4000_0003u32, 0x8000_0000..0x8000_0024u32,
                any::<u32>()], 0..4u32, any::<bool>(), any::<bool>(),
                prop_oneof![Just(1u64), Just(3), Just(7)]),
            1..64),
    ) {
        let host = supported_amd();
        let mut guest = guest_of(host);
        let mut second = guest_of(host);
        for (leaf, subleaf, cr4_osxsave, apic_enabled, xcr0) in asked {
            let inputs = DynamicInputs { cr4_osxsave, apic_enabled, xcr0, cr4_pke: false, xss: 0 };
            let answer = guest.lookup(leaf, subleaf, &inputs);
            let table = second.entries(&inputs);
            prop_assert_eq!(answer, by_the_rules(table, leaf, subleaf).unwrap_or([0; 4]));
        }
    }

    #[test]
    fn no_table_and_no_question_panics(
        raw in proptest::collection::vec(any::<(u32, u32, bool, [u32; 4])>(), 0..300),
        questions in proptest::collection::vec(any::<(u32, u32, u64, u64, bool)>(), 1..32),
        has_run: bool,
    ) {
        let host = supported_intel();
        let mut guest = guest_of(host);
        let entries: Vec<Entry> = raw
            .iter()
            .map(|&(leaf, index, significant_index, answer)| {
                let leaf = if leaf & 1 == 0 { leaf >> 27 } else { leaf };
                Entry { significant_index, ..Entry::new(leaf, index % 4, answer) }
            })
            .collect();
        let _ = guest.set(&entries, host, has_run);
        for (leaf, subleaf, xcr0, xss, flag) in questions {
            let inputs =
                DynamicInputs { cr4_osxsave: flag, cr4_pke: flag, apic_enabled: flag, xcr0, xss };
            let _ = guest.lookup(leaf, subleaf, &inputs);
            let _ = guest.lookup(leaf >> 27, subleaf % 4, &inputs);
            let _ = guest.entries(&inputs);
        }
        let _ = (guest.maxphyaddr(), guest.msr_facts(), guest.is_canonical(u64::MAX));
    }
}
