//! Who owns which MSR, the lists, and properties over all indices and values.

use gannet_msr::{
    By, Class, Flaws, GuestFacts, HostMsrs, MsrStore, VMX_COUNT, classify, holds_address, lists,
    pat_is_valid, spec_ctrl_is_valid,
};
use proptest::prelude::*;
use x86::cpuid::{Feature, Vendor, feature};
use x86::msr::*;

const AMD: HostMsrs = HostMsrs {
    amd: true,
    arch_capabilities: 0,
    ucode_rev: 5,
    de_cfg: 2,
    spec_ctrl: true,
    tsc_aux: true,
    lbr: true,
    lazy_deadline: true,
    hyperv: false,
    vmx: None,
};

#[test]
fn every_range_has_its_owner() {
    for (index, class) in [
        (TSC, Class::Backend),
        (EFER, Class::Backend),
        (TSC_AUX, Class::Backend),
        (PAT, Class::Backend),
        (SPEC_CTRL, Class::Backend),
        (APIC_BASE, Class::Apic),
        (TSC_DEADLINE, Class::Apic),
        (0x7ff, Class::Unknown),
        (0x800, Class::X2Apic),
        (0x83f, Class::X2Apic),
        (0x8ff, Class::X2Apic),
        (0x900, Class::Unknown),
        (KVM_WALL_CLOCK, Class::Pv),
        (0x4b56_4cff, Class::Unknown),
        (KVM_WALL_CLOCK_NEW, Class::Pv),
        (KVM_MIGRATION_CONTROL, Class::Pv),
        (KVM_LAZY_TSC_DEADLINE, Class::Pv),
        (0x4b56_4d0a, Class::Unknown),
        (PRED_CMD, Class::Store),
        (MTRR_CAP, Class::Store),
        (MC0_CTL, Class::Store),
        (0x47f, Class::Store),
        (VMX_BASIC, Class::Unknown),
        (HV_GUEST_OS_ID, Class::HyperV),
        (HV_VP_INDEX, Class::HyperV),
        (0x4000_0003, Class::Unknown),
        (HV_VP_RUNTIME, Class::Unknown),
        (HV_VP_ASSIST_PAGE, Class::HyperV),
        (0x4000_0074, Class::Unknown),
        (VIRT_SPEC_CTRL, Class::Outside),
        (SEV_STATUS, Class::Unknown),
        (F15H_PERF_CTL0, Class::Unknown),
        (0xdead_beef, Class::Unknown),
        (u32::MAX, Class::Unknown),
    ] {
        assert_eq!(classify(index), class, "{index:#x}");
    }
}

#[test]
fn what_is_classed_as_a_value_is_served_and_nothing_else() {
    let store = MsrStore::new(&AMD).expect("memory");
    let facts = GuestFacts {
        maxphyaddr: 48,
        osvw: true,
        arch_capabilities: true,
        pdcm: true,
        ..GuestFacts::default()
    };
    // There if MCG_CAP says so.
    let by_capability = [MCG_EXT_CTL];
    let write_only = [PRED_CMD, FLUSH_CMD, UCODE_WRITE, PATCH_LOADER, VM_IGNNE];
    let ranges = [0..0x1000, 0xc000_0000..0xc000_0400, 0xc001_0000..0xc001_1100];
    for index in ranges.into_iter().flatten() {
        let served = store.read(index, By::Vmm, &facts).is_ok() || write_only.contains(&index);
        let kept = classify(index) == Class::Store && !by_capability.contains(&index);
        // The list's MSRs of other owners read as zero here, and are never asked for here.
        let known = lists::SAVED.contains(&index) || classify(index) == Class::Outside;
        assert!(served == kept || (served && known), "{index:#x}");
    }
}

#[test]
fn the_lists_name_each_msr_once_and_only_msrs_that_exist() {
    for list in [&lists::SAVED[..], &lists::FEATURES[..]] {
        for (i, index) in list.iter().enumerate() {
            assert!(!list[i + 1..].contains(index), "{index:#x} twice");
            assert_ne!(classify(*index), Class::Unknown, "{index:#x}");
        }
    }
}

/// VMMs write MSRs back in the order of the list.
#[test]
fn what_a_write_depends_on_comes_first() {
    let place = |wanted| lists::SAVED.iter().position(|index| *index == wanted).expect("listed");
    for (first, then) in [
        (TSC, TSC_ADJUST),
        (TSC, TSC_DEADLINE),
        (TSC, KVM_SYSTEM_TIME_NEW),
        (TSC_ADJUST, TSC_DEADLINE),
        (KVM_LAZY_TSC_DEADLINE, TSC_DEADLINE),
        (PLATFORM_INFO, MISC_FEATURES_ENABLES),
        // Which turns recording on, and brings the records into the block where they are then.
        (DEBUGCTL, LAST_BRANCH_FROM),
    ] {
        assert!(place(first) < place(then), "{first:#x} before {then:#x}");
    }
}

#[test]
fn the_list_follows_the_host() {
    let has = |host: &HostMsrs, wanted| lists::saved(host).any(|index| index == wanted);
    let plain = HostMsrs::default();
    for index in [SPEC_CTRL, TSC_AUX, VM_HSAVE_PA, TSC_RATIO, KVM_LAZY_TSC_DEADLINE, LAST_INT_TO] {
        assert!(has(&AMD, index) && !has(&plain, index), "{index:#x}");
    }
    assert!(has(&plain, STAR) && has(&plain, KVM_STEAL_TIME));
    assert_eq!(lists::features(&AMD).count(), 4);
    assert_eq!(lists::features(&plain).count(), 3);
    assert_eq!(AMD.feature(UCODE_REV), Some(5));
    assert_eq!(AMD.feature(VMX_BASIC), None);
    assert_eq!(plain.feature(DE_CFG), None);
}

#[test]
fn capabilities_of_vmx_are_listed_where_guests_may_have_it() {
    let without = HostMsrs { amd: false, ..AMD };
    assert!(!lists::saved(&without).chain(lists::features(&without)).any(|i| i >> 4 == 0x48));
    let mut values = [0; VMX_COUNT];
    (values[0], values[17]) = (5, 7);
    let with = HostMsrs { vmx: Some(values), ..without };
    assert_eq!(lists::features(&with).count(), lists::features(&without).count() + VMX_COUNT);
    assert_eq!(lists::saved(&with).count(), lists::saved(&without).count() + 12);
    assert_eq!(
        [0x47f, 0x480, 0x491, 0x492].map(|i| with.feature(i)),
        [None, Some(5), Some(7), None]
    );
}

#[test]
fn an_amd_host_tells_which_flaws_it_does_not_have() {
    use x86::msr::arch_capabilities as cap;
    let amd = HostMsrs::offered_by_flaws(0, Flaws { ssb: true, ..Flaws::default() });
    assert_eq!(amd & cap::SSB_NO, 0);
    for bit in [cap::RDCL_NO, cap::MDS_NO, cap::GDS_NO, cap::RFDS_NO, cap::ITS_NO] {
        assert_ne!(amd & bit, 0, "{bit:#x}");
    }
}

#[test]
fn speculation_bits_need_an_enumeration_and_the_cpu() {
    let all = |_: Feature| true;
    let none = |_: Feature| false;
    let ssbd_only = |f: Feature| f == feature::AMD_SSBD;
    let facts = GuestFacts::derive(ssbd_only, all, Vendor::Amd, 48);
    assert_eq!(facts.spec_ctrl, 1 << 2);
    assert!(spec_ctrl_is_valid(4, &facts, By::Guest) && !spec_ctrl_is_valid(1, &facts, By::Guest));
    assert!(
        spec_ctrl_is_valid(7, &facts, By::Vmm)
            && !spec_ctrl_is_valid(1 << 4 | 1 << 9, &facts, By::Vmm)
    );
    let poor = GuestFacts::derive(all, none, Vendor::Intel, 48);
    assert_eq!((poor.spec_ctrl, poor.pred_cmd, poor.flush_l1d), (0, 0, false));
    assert!(!spec_ctrl_is_valid(1, &poor, By::Vmm) && spec_ctrl_is_valid(0, &poor, By::Vmm));
}

#[test]
fn addresses_are_those_of_the_manual() {
    for index in [FS_BASE, GS_BASE, KERNEL_GS_BASE, LSTAR, CSTAR] {
        assert!(holds_address(index));
    }
    for index in [STAR, SYSCALL_MASK, SYSENTER_ESP, TSC, EFER] {
        assert!(!holds_address(index));
    }
}

#[test]
fn every_field_of_the_pat_is_checked() {
    assert!(pat_is_valid(PAT_RESET));
    for shift in (0..64).step_by(8) {
        for field in 0..=0xffu64 {
            let valid = matches!(field, 0 | 1 | 4 | 5 | 6 | 7);
            assert_eq!(pat_is_valid(field << shift), valid, "{field:#x} << {shift}");
        }
    }
}

fn indices() -> impl Strategy<Value = u32> {
    prop_oneof![
        0..0x1000u32,
        0xc000_0000..0xc000_0400u32,
        0xc001_0000..0xc001_1100u32,
        0x4b56_4d00..0x4b56_4e00u32,
        any::<u32>(),
    ]
}

fn values() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), (0..64u32).prop_map(|bit| 1 << bit), any::<u64>()]
}

fn facts() -> impl Strategy<Value = GuestFacts> {
    (any::<u64>(), any::<u64>(), any::<u8>(), any::<bool>()).prop_map(
        |(guest, host, width, amd)| {
            let bit = |set: u64, f: Feature| set >> ((f.leaf ^ u32::from(f.bit)) & 63) & 1 == 1;
            let vendor = if amd { Vendor::Amd } else { Vendor::Intel };
            GuestFacts::derive(|f| bit(guest, f), |f| bit(host, f), vendor, width)
        },
    )
}

proptest! {
    #[test]
    fn no_access_panics_and_no_refused_write_changes_anything(
        steps in proptest::collection::vec((indices(), values(), any::<bool>()), 1..64),
        facts in facts(),
        cap in values(),
    ) {
        let mut store = MsrStore::new(&AMD).expect("memory");
        let _ = store.set_up_mce(cap);
        for (index, value, vmm) in steps {
            let by = if vmm { By::Vmm } else { By::Guest };
            let _ = classify(index);
            let before = format!("{store:?}");
            let refused = store.write(index, value, by, &facts).is_err();
            let after = format!("{store:?}");
            prop_assert!(!refused || after == before);
            let _ = store.read(index, by, &facts);
        }
    }

    #[test]
    fn a_guest_never_reads_what_a_vmm_cannot(index in indices(), facts in facts()) {
        let store = MsrStore::new(&AMD).expect("memory");
        let guest = store.read(index, By::Guest, &facts);
        prop_assert!(guest.is_err() || guest == store.read(index, By::Vmm, &facts));
    }
}

#[test]
fn arch_capabilities_on_intel_follow_the_kernels_judgement() {
    use arch_capabilities as cap;
    let every = Flaws {
        meltdown: true,
        ssb: true,
        mds: true,
        rfds: true,
        taa: true,
        gds: true,
        its: true,
        rtm: true,
        l1d_never_flushed: true,
    };
    // An old CPU: nothing is promised but what this hypervisor does itself.
    assert_eq!(HostMsrs::offered_by_flaws(0, every), cap::PSCHANGE_MC_NO);
    // A sound one with TSX says so by itself; TSX_CTRL is never passed on.
    let sound = Flaws { rtm: true, ..Flaws::default() };
    let value = HostMsrs::offered_by_flaws(cap::TSX_CTRL | cap::IBRS_ALL, sound);
    let expected = cap::IBRS_ALL
        | cap::PSCHANGE_MC_NO
        | cap::SKIP_L1DFL_VMENTRY
        | cap::RDCL_NO
        | cap::SSB_NO
        | cap::MDS_NO
        | cap::RFDS_NO
        | cap::ITS_NO
        | cap::TAA_NO
        | cap::GDS_NO;
    assert_eq!(value, expected);
    // Without TSX the bit is taken away even where the CPU has it.
    let value = HostMsrs::offered_by_flaws(cap::TAA_NO, Flaws::default());
    assert_eq!(value & cap::TAA_NO, 0);
    let never = Flaws { l1d_never_flushed: true, ..Flaws::default() };
    assert_eq!(HostMsrs::offered_by_flaws(0, never) & cap::SKIP_L1DFL_VMENTRY, 0);
}
