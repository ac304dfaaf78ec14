//! MSRs that are only values: what they read, what they take, what they tell others.

use gannet_msr::{
    By, Class, Effect, GuestFacts, HostMsrs, McReport, McVerdict, MsrStore, Refused, classify,
    lists,
};
use x86::Reset;
use x86::msr::*;

const AMD: HostMsrs = HostMsrs {
    amd: true,
    arch_capabilities: 0x61,
    ucode_rev: 0x0830_1034,
    de_cfg: 2,
    spec_ctrl: true,
    tsc_aux: true,
    lbr: true,
    lazy_deadline: true,
    hyperv: false,
    vmx: None,
};

const FACTS: GuestFacts = GuestFacts {
    spec_ctrl: 7,
    host_spec_ctrl: 0x87,
    pred_cmd: 1,
    host_pred_cmd: 0x81,
    maxphyaddr: 40,
    amd: true,
    flush_l1d: false,
    host_flush_l1d: false,
    tsc_adjust: true,
    arch_capabilities: true,
    pdcm: false,
    osvw: true,
    virt_ssbd: true,
    sse3: true,
    vmx: false,
    tsc_ratio: false,
};

const GUEST: By = By::Guest;
const VMM: By = By::Vmm;

fn store() -> MsrStore {
    MsrStore::new(&AMD).expect("memory")
}

#[track_caller]
fn takes(store: &mut MsrStore, index: u32, value: u64, by: By) {
    assert!(store.write(index, value, by, &FACTS).is_ok(), "{index:#x} = {value:#x}");
    assert_eq!(store.read(index, by, &FACTS), Ok(value), "{index:#x}");
}

#[track_caller]
fn refuses(store: &mut MsrStore, index: u32, value: u64, by: By) {
    let before = store.read(index, VMM, &FACTS);
    assert_eq!(store.write(index, value, by, &FACTS), Err(Refused), "{index:#x}");
    assert_eq!(store.read(index, VMM, &FACTS), before, "{index:#x} changed");
}

/// The write is accepted and changes nothing.
#[track_caller]
fn ignores(store: &mut MsrStore, index: u32, value: u64) {
    let before = store.read(index, VMM, &FACTS);
    assert_eq!(store.write(index, value, GUEST, &FACTS), Ok(Effect::None), "{index:#x}");
    assert_eq!(store.read(index, VMM, &FACTS), before, "{index:#x} changed");
}

#[test]
fn a_guest_that_moves_tsc_adjust_moves_its_tsc_and_a_vmm_does_not() {
    let mut store = store();
    let write = |s: &mut MsrStore, value, host| s.write(TSC_ADJUST, value, host, &FACTS);
    assert_eq!(write(&mut store, 100, GUEST), Ok(Effect::TscAdjusted { delta: 100 }));
    assert_eq!(write(&mut store, 30, GUEST), Ok(Effect::TscAdjusted { delta: -70 }));
    assert_eq!(write(&mut store, u64::MAX, VMM), Ok(Effect::None));
    assert_eq!(write(&mut store, 1, GUEST), Ok(Effect::TscAdjusted { delta: 2 }));
    store.adjust_tsc(-5);
    assert_eq!(store.read(TSC_ADJUST, GUEST, &FACTS), Ok(u64::MAX - 3));
    let without = GuestFacts { tsc_adjust: false, ..FACTS };
    assert_eq!(store.write(TSC_ADJUST, 9, GUEST, &without), Ok(Effect::None));
    assert_eq!(store.tsc_adjust(), u64::MAX - 3);
}

#[test]
fn mtrrs_take_only_types_that_exist() {
    let mut store = store();
    for value in [0, 0x0606_0606_0606_0606, 0x0001_0405_0600_0104] {
        takes(&mut store, MTRR_FIX16K_80000, value, GUEST);
    }
    for value in [2, 3, 7, 8, 0x0600_0000_0000_0006 | 0x70_0000] {
        refuses(&mut store, MTRR_FIX16K_80000, value, GUEST);
    }
    takes(&mut store, MTRR_DEF_TYPE, 0xc06, GUEST);
    for value in [0x1000, 0x100, 0x202, 2, 1 << 63] {
        refuses(&mut store, MTRR_DEF_TYPE, value, GUEST);
    }
}

#[test]
fn variable_mtrrs_end_at_the_address_width() {
    let mut store = store();
    takes(&mut store, 0x200, 0xff_ffff_f006, GUEST);
    takes(&mut store, 0x201, 0xff_ffff_f800, GUEST);
    takes(&mut store, 0x20f, 0x800, VMM);
    for value in [1 << 40, 0x100, 2] {
        refuses(&mut store, 0x200, value, GUEST);
    }
    for value in [1 << 40, 0x400, 1] {
        refuses(&mut store, 0x201, value, GUEST);
    }
    assert_eq!(store.write(MTRR_FIX4K_C0000, 0, GUEST, &FACTS), Ok(Effect::MtrrChanged));
    assert_eq!(store.read(MTRR_CAP, GUEST, &FACTS), Ok(0x508));
    refuses(&mut store, MTRR_CAP, 0x508, VMM);
    assert_eq!(classify(0x210), Class::Unknown);
    assert_eq!(classify(0x251), Class::Unknown);
}

#[test]
fn machine_check_banks_follow_what_the_vmm_set_up() {
    let mut store = store();
    assert_eq!(store.read(MCG_CAP, GUEST, &FACTS), Ok(32));
    assert_eq!(store.read(MCG_CTL, GUEST, &FACTS), Err(Refused));
    assert_eq!(store.set_up_mce(0), Err(Refused));
    assert_eq!(store.set_up_mce(33), Err(Refused));
    assert_eq!(store.set_up_mce(10 | mce::CAP_CMCI), Err(Refused));
    assert_eq!(store.set_up_mce(10 | mce::CAP_CTL | mce::CAP_SER), Ok(()));
    assert_eq!(store.read(MCG_CTL, GUEST, &FACTS), Ok(u64::MAX));
    assert_eq!(store.read(MC0_CTL + 4 * 9, GUEST, &FACTS), Ok(u64::MAX));
    assert_eq!(store.read(MC0_CTL + 4 * 10, GUEST, &FACTS), Err(Refused));
    assert_eq!(store.read(MC0_CTL2, GUEST, &FACTS), Err(Refused));
    takes(&mut store, MCG_CTL, 0, GUEST);
    refuses(&mut store, MCG_CTL, 1, VMM);
    refuses(&mut store, MC0_CTL + 4 * 10, 0, GUEST);
}

#[test]
fn bank_controls_are_all_or_nothing_but_for_two_old_habits() {
    let mut store = store();
    for value in [0, u64::MAX, !(1 << 10), !1] {
        takes(&mut store, MC0_CTL + 16, value, GUEST);
    }
    refuses(&mut store, MC0_CTL + 16, 2, GUEST);
    refuses(&mut store, MC0_CTL + 16, !2, GUEST);
    takes(&mut store, MC0_CTL + 2, 0x1234, GUEST);
}

#[test]
fn bank_status_is_writable_only_with_the_amd_switch() {
    let mut store = store();
    takes(&mut store, MC0_CTL + 1, 0, GUEST);
    refuses(&mut store, MC0_CTL + 1, 5, GUEST);
    takes(&mut store, MC0_CTL + 1, 5, VMM);
    takes(&mut store, HWCR, hwcr::MC_STATUS_WR_EN, GUEST);
    takes(&mut store, MC0_CTL + 1, 7, GUEST);
    let intel = GuestFacts { amd: false, ..FACTS };
    assert_eq!(store.write(MC0_CTL + 1, 9, GUEST, &intel), Err(Refused));
}

#[test]
fn an_uncorrected_error_raises_once_and_then_shuts_down() {
    let mut store = store();
    store.set_up_mce(4 | mce::CAP_CTL).expect("valid");
    let fatal = McReport {
        status: mce::BANK_VALID | mce::BANK_UC | 0x11,
        address: 0x1000,
        misc: 0x8c,
        mcg_status: mce::STATUS_MCIP,
        bank: 2,
    };
    assert_eq!(store.inject_mce(&fatal, true), Ok(McVerdict::Raise));
    assert_eq!(store.read(MC0_CTL + 9, GUEST, &FACTS), Ok(fatal.status));
    assert_eq!(store.read(MC0_CTL + 10, GUEST, &FACTS), Ok(0x1000));
    assert_eq!(store.read(MCG_STATUS, GUEST, &FACTS), Ok(mce::STATUS_MCIP));
    assert_eq!(store.inject_mce(&fatal, true), Ok(McVerdict::TripleFault));
    takes(&mut store, MCG_STATUS, 0, GUEST);
    assert_eq!(store.inject_mce(&fatal, false), Ok(McVerdict::TripleFault));
    assert_eq!(store.inject_mce(&fatal, true), Ok(McVerdict::Raise));
    let status = store.read(MC0_CTL + 9, GUEST, &FACTS);
    assert_eq!(status, Ok(fatal.status | mce::BANK_OVERFLOW));
}

#[test]
fn a_corrected_error_never_hides_an_uncorrected_one() {
    let mut store = store();
    store.set_up_mce(4).expect("valid");
    let corrected = McReport { status: mce::BANK_VALID | 1, address: 1, ..Default::default() };
    assert_eq!(store.inject_mce(&corrected, true), Ok(McVerdict::Logged));
    // One that asks for nothing is logged alone; see the labtests' group machine_checks.
    let fatal = McReport {
        status: mce::BANK_VALID | mce::BANK_UC | 1 << 57 | 2,
        address: 2,
        ..Default::default()
    };
    assert_eq!(store.inject_mce(&fatal, true), Ok(McVerdict::Raise));
    assert_eq!(store.inject_mce(&corrected, true), Ok(McVerdict::Logged));
    assert_eq!(store.read(MC0_CTL + 2, GUEST, &FACTS), Ok(2));
    let nowhere = McReport { bank: 4, ..corrected };
    assert_eq!(store.inject_mce(&nowhere, true), Err(Refused));
    let invalid = McReport { status: 1, ..corrected };
    assert_eq!(store.inject_mce(&invalid, true), Err(Refused));
}

#[test]
fn a_guest_asks_for_barriers_only_where_it_was_offered_them() {
    let mut store = store();
    let write =
        |s: &mut MsrStore, value, facts: &GuestFacts| s.write(PRED_CMD, value, GUEST, facts);
    assert_eq!(write(&mut store, 1, &FACTS), Ok(Effect::PredictionBarrier));
    assert_eq!(write(&mut store, 0, &FACTS), Ok(Effect::None));
    assert_eq!(write(&mut store, 0x80, &FACTS), Err(Refused));
    assert_eq!(write(&mut store, 2, &FACTS), Err(Refused));
    let none = GuestFacts { pred_cmd: 0, ..FACTS };
    assert_eq!(write(&mut store, 0, &none), Err(Refused));
    assert_eq!(store.write(PRED_CMD, 0x80, VMM, &FACTS), Ok(Effect::None));
    assert_eq!(store.read(PRED_CMD, GUEST, &FACTS), Err(Refused));
    assert_eq!(store.write(FLUSH_CMD, 1, GUEST, &FACTS), Err(Refused));
    let with = GuestFacts { flush_l1d: true, ..FACTS };
    assert_eq!(store.write(FLUSH_CMD, 1, GUEST, &with), Ok(Effect::FlushL1d));
    assert_eq!(store.write(FLUSH_CMD, 2, GUEST, &with), Err(Refused));
}

#[test]
fn misc_enable_keeps_its_read_only_bits_from_guests() {
    let mut store = store();
    let reset = misc_enable::BTS_UNAVAILABLE | misc_enable::PEBS_UNAVAILABLE;
    assert_eq!(store.read(MISC_ENABLE, GUEST, &FACTS), Ok(reset));
    refuses(&mut store, MISC_ENABLE, 0, GUEST);
    ignores(&mut store, MISC_ENABLE, reset | misc_enable::PERFMON);
    takes(&mut store, MISC_ENABLE, reset | misc_enable::FAST_STRING, GUEST);
    let monitor = reset | misc_enable::MWAIT;
    assert_eq!(
        store.write(MISC_ENABLE, monitor, GUEST, &FACTS),
        Ok(Effect::MonitorChanged { on: true })
    );
    let old = GuestFacts { sse3: false, ..FACTS };
    assert_eq!(store.write(MISC_ENABLE, reset, GUEST, &old), Err(Refused));
    takes(&mut store, MISC_ENABLE, misc_enable::PERFMON, VMM);
}

#[test]
fn hwcr_keeps_two_bits_and_drops_three() {
    let mut store = store();
    takes(&mut store, HWCR, 1 << 24 | 1 << 18, GUEST);
    assert_eq!(store.write(HWCR, 0x148 | 1 << 24, GUEST, &FACTS), Ok(Effect::None));
    assert_eq!(store.read(HWCR, GUEST, &FACTS), Ok(1 << 24));
    refuses(&mut store, HWCR, 1, GUEST);
    refuses(&mut store, HWCR, 1 << 35, VMM);
}

#[test]
fn lfence_serializes_as_the_host_says() {
    let mut store = store();
    takes(&mut store, DE_CFG, 2, GUEST);
    refuses(&mut store, DE_CFG, 0, GUEST);
    refuses(&mut store, DE_CFG, 3, VMM);
    takes(&mut store, DE_CFG, 0, VMM);
    let mut plain = MsrStore::new(&HostMsrs { de_cfg: 0, ..AMD }).expect("memory");
    refuses(&mut plain, DE_CFG, 2, GUEST);
}

#[test]
fn microcode_is_what_the_vmm_says() {
    let mut store = store();
    assert_eq!(store.read(UCODE_REV, GUEST, &FACTS), Ok(0x0100_0065));
    ignores(&mut store, UCODE_REV, 7);
    takes(&mut store, UCODE_REV, 7, VMM);
    ignores(&mut store, PATCH_LOADER, 0xffff_8000_0000_0000);
    ignores(&mut store, UCODE_WRITE, 1);
    let intel = MsrStore::new(&HostMsrs::default()).expect("memory");
    assert_eq!(intel.read(UCODE_REV, GUEST, &FACTS), Ok(0x1_0000_0000));
}

#[test]
fn facts_about_flaws_are_read_only_and_only_where_offered() {
    let mut store = store();
    assert_eq!(store.read(ARCH_CAPABILITIES, GUEST, &FACTS), Ok(0x61));
    refuses(&mut store, ARCH_CAPABILITIES, 0, GUEST);
    takes(&mut store, ARCH_CAPABILITIES, 0x41, VMM);
    let without = GuestFacts { arch_capabilities: false, ..FACTS };
    assert_eq!(store.read(ARCH_CAPABILITIES, GUEST, &without), Err(Refused));
    assert_eq!(store.read(PERF_CAPABILITIES, GUEST, &FACTS), Err(Refused));
    assert_eq!(store.read(PERF_CAPABILITIES, VMM, &FACTS), Ok(0));
    refuses(&mut store, PERF_CAPABILITIES, 1, VMM);
}

#[test]
fn cpuid_faulting_exists_only_where_platform_info_says_so() {
    let mut store = store();
    // It is there from the beginning, and told of.
    assert_eq!(store.read(PLATFORM_INFO, GUEST, &FACTS), Ok(1 << 31));
    takes(&mut store, PLATFORM_INFO, 0, VMM);
    refuses(&mut store, MISC_FEATURES_ENABLES, 1, GUEST);
    refuses(&mut store, PLATFORM_INFO, 1 << 31, GUEST);
    takes(&mut store, PLATFORM_INFO, 1 << 31, VMM);
    assert_eq!(
        store.write(MISC_FEATURES_ENABLES, 1, GUEST, &FACTS),
        Ok(Effect::CpuidFaulting { on: true })
    );
    assert!(store.cpuid_faulting());
    refuses(&mut store, MISC_FEATURES_ENABLES, 3, GUEST);
    // Zero is in the list of what may be restored, and yet must not take the feature away.
    refuses(&mut store, PLATFORM_INFO, 0, VMM);
}

#[test]
fn virtual_ssbd_is_one_bit_of_amds() {
    let mut store = store();
    assert_eq!(classify(VIRT_SPEC_CTRL), Class::Outside);
    let on = Ok(Effect::VirtSsbd { on: true });
    assert_eq!(store.write(VIRT_SPEC_CTRL, 4, GUEST, &FACTS), on);
    assert_eq!(store.read(VIRT_SPEC_CTRL, GUEST, &FACTS), Ok(4));
    for value in [1, 2, 8, 5, 1 << 63] {
        refuses(&mut store, VIRT_SPEC_CTRL, value, VMM);
    }
    let without = GuestFacts { virt_ssbd: false, ..FACTS };
    assert_eq!(store.read(VIRT_SPEC_CTRL, GUEST, &without), Err(Refused));
    assert_eq!(store.write(VIRT_SPEC_CTRL, 0, GUEST, &without), Err(Refused));
    assert_eq!(store.read(VIRT_SPEC_CTRL, VMM, &without), Ok(4));
    let mut intel = intel_store();
    assert_eq!(intel.write(VIRT_SPEC_CTRL, 4, VMM, &FACTS), Err(Refused));
}

fn intel_store() -> MsrStore {
    MsrStore::new(&HostMsrs { amd: false, ..AMD }).expect("memory")
}

#[test]
fn errors_that_ask_for_nothing_are_told_of_as_corrected_ones_are() {
    let nothing = McReport {
        status: mce::BANK_VALID | mce::BANK_UC | mce::BANK_ENABLED | 0x134,
        address: 7,
        misc: 9,
        bank: 2,
        ..Default::default()
    };
    // AMD's CPUs have no such interrupt.
    let mut amd = store();
    assert_eq!(amd.set_up_mce(4 | mce::CAP_CMCI), Err(Refused));
    assert_eq!(amd.set_up_mce(4 | mce::CAP_LMCE), Err(Refused));
    // Whatever CR4.MCE says, and even while another is handled.
    assert_eq!(amd.inject_mce(&nothing, false), Ok(McVerdict::Logged));
    assert_eq!(amd.read(MC0_CTL + 9, GUEST, &FACTS), Ok(nothing.status));
    let mut store = intel_store();
    assert!(!store.has_cmci());
    store.set_up_mce(4 | mce::CAP_CMCI).expect("valid");
    assert!(store.has_cmci());
    assert_eq!(store.inject_mce(&nothing, false), Ok(McVerdict::Logged));
    takes(&mut store, MC0_CTL2 + 2, mce::CTL2_CMCI_ENABLE | 5, GUEST);
    assert_eq!(store.inject_mce(&nothing, false), Ok(McVerdict::Interrupt));
    for (register, value) in [(1, nothing.status), (2, 7), (3, 9)] {
        assert_eq!(store.read(MC0_CTL + 8 + register, GUEST, &FACTS), Ok(value));
    }
    // Each of the three asks for something.
    for bit in [57, 56, 55] {
        let acts = McReport { status: nothing.status | 1 << bit, ..nothing };
        assert_eq!(store.inject_mce(&acts, false), Ok(McVerdict::TripleFault), "bit {bit}");
    }
    let announced = McReport { mcg_status: mce::STATUS_MCIP, ..nothing };
    assert_eq!(store.inject_mce(&announced, true), Ok(McVerdict::Raise));
}

#[test]
fn local_machine_checks_need_the_firmwares_leave_and_the_capability() {
    let intel = GuestFacts { amd: false, ..FACTS };
    let mut store = intel_store();
    let lmce = feature_control::LOCK | feature_control::LMCE;
    assert_eq!(store.write(FEATURE_CONTROL, lmce, GUEST, &intel), Err(Refused));
    store.set_up_mce(4 | mce::CAP_LMCE).expect("valid");
    assert_eq!(store.read(MCG_EXT_CTL, GUEST, &intel), Err(Refused));
    assert_eq!(store.read(MCG_EXT_CTL, VMM, &intel), Ok(0));
    assert_eq!(store.write(FEATURE_CONTROL, lmce, GUEST, &intel), Ok(Effect::None));
    assert_eq!(store.write(MCG_EXT_CTL, 1, GUEST, &intel), Ok(Effect::None));
    assert_eq!(store.read(MCG_EXT_CTL, GUEST, &intel), Ok(1));
    assert_eq!(store.write(MCG_EXT_CTL, 2, GUEST, &intel), Err(Refused));
}

#[test]
fn the_smm_registers_are_the_vmms() {
    let mut store = store();
    assert_eq!(store.read(SMBASE, GUEST, &FACTS), Err(Refused));
    assert_eq!(store.read(SMBASE, VMM, &FACTS), Ok(0x3_0000));
    refuses(&mut store, SMBASE, 1, GUEST);
    refuses(&mut store, SMI_COUNT, 1, GUEST);
    takes(&mut store, SMI_COUNT, 1, VMM);
}

#[test]
fn svm_registers_check_what_hardware_checks() {
    let mut store = store();
    takes(&mut store, VM_HSAVE_PA, 0x1234_5000, GUEST);
    refuses(&mut store, VM_HSAVE_PA, 0x1234_5001, GUEST);
    refuses(&mut store, VM_HSAVE_PA, 1 << 40, GUEST);
    refuses(&mut store, VM_CR, 0x20, GUEST);
    takes(&mut store, VM_CR, vm_cr::SVMDIS | vm_cr::LOCK, GUEST);
    assert!(store.write(VM_CR, 0, GUEST, &FACTS).is_ok());
    assert_eq!(store.read(VM_CR, GUEST, &FACTS), Ok(vm_cr::SVMDIS | vm_cr::LOCK));
    assert_eq!(store.read(TSC_RATIO, GUEST, &FACTS), Err(Refused));
    assert_eq!(store.read(TSC_RATIO, VMM, &FACTS), Ok(1 << 32));
    assert!(store.write(TSC_RATIO, 0, VMM, &FACTS).is_ok());
    assert!(store.write(TSC_RATIO, 1 << 32, VMM, &FACTS).is_ok());
    refuses(&mut store, TSC_RATIO, 2 << 32, VMM);
    // For a guest that is offered it.
    let with = GuestFacts { tsc_ratio: true, ..FACTS };
    for value in [0, 2 << 32, 0xff_ffff_ffff] {
        let told = Ok(Effect::TscRatioOfL2 { ratio: value });
        assert_eq!(store.write(TSC_RATIO, value, GUEST, &with), told);
        assert_eq!(store.read(TSC_RATIO, GUEST, &with), Ok(value));
    }
    assert_eq!(store.write(TSC_RATIO, 1 << 40, VMM, &with), Err(Refused));
    ignores(&mut store, VM_IGNNE, 1);
}

#[test]
fn feature_control_locks_on_intel_and_is_absent_on_amd() {
    let mut store = store();
    assert_eq!(store.read(FEATURE_CONTROL, GUEST, &FACTS), Err(Refused));
    let intel = GuestFacts { amd: false, ..FACTS };
    let write = |s: &mut MsrStore, value, host| s.write(FEATURE_CONTROL, value, host, &intel);
    assert_eq!(write(&mut store, 4, GUEST), Err(Refused));
    assert_eq!(write(&mut store, 1, GUEST), Ok(Effect::None));
    assert_eq!(write(&mut store, 1, GUEST), Err(Refused));
    assert_eq!(write(&mut store, 0, VMM), Ok(Effect::None));
}

#[test]
fn counters_that_count_nothing_take_any_value_and_read_zero() {
    let mut store = store();
    for index in [PERFCTR0, 0xc2, PERFEVTSEL0, 0x187, K7_EVNTSEL0, K7_EVNTSEL3, K7_PERFCTR3] {
        ignores(&mut store, index, 0x53_0076);
        assert_eq!(store.read(index, GUEST, &FACTS), Ok(0));
    }
    ignores(&mut store, NB_CFG, 1 << 46);
    refuses(&mut store, SYSCFG, 1, GUEST);
    refuses(&mut store, FAM10H_MMIO_CONF_BASE, 1, GUEST);
    ignores(&mut store, FAM10H_MMIO_CONF_BASE, 0);
}

#[test]
fn old_systems_find_the_constants_they_compute_clocks_from() {
    let store = store();
    let read = |index| store.read(index, GUEST, &FACTS);
    assert_eq!(read(FSB_FREQ), Ok(3));
    assert_eq!(read(PERF_STATUS), Ok(0x0400_0000_03e8));
    assert_eq!(read(EBC_FREQUENCY_ID), Ok(1 << 24));
    assert_eq!(read(K7_CLK_CTL), Ok(0x2000_0000));
}

#[test]
fn workarounds_exist_only_where_offered() {
    let mut store = store();
    assert_eq!(store.read(OSVW_ID_LENGTH, GUEST, &FACTS), Ok(3));
    takes(&mut store, OSVW_STATUS, 1, VMM);
    let without = GuestFacts { osvw: false, ..FACTS };
    assert_eq!(store.read(OSVW_ID_LENGTH, GUEST, &without), Err(Refused));
    assert_eq!(store.write(OSVW_STATUS, 0, GUEST, &without), Err(Refused));
}

#[test]
fn whatever_the_list_names_a_vmm_can_save_and_restore() {
    for facts in [FACTS, GuestFacts::default()] {
        let mut store = store();
        for index in lists::saved(&AMD).filter(|index| classify(*index) == Class::Store) {
            let value = store.read(index, VMM, &facts);
            let value = value.unwrap_or_else(|_| panic!("{index:#x} cannot be read"));
            assert!(store.write(index, value, VMM, &facts).is_ok(), "{index:#x} = {value:#x}");
            assert!(store.write(index, 0, VMM, &facts).is_ok(), "{index:#x} = 0");
        }
    }
}

#[test]
fn init_keeps_msrs_and_reset_clears_settings() {
    let mut store = store();
    takes(&mut store, HWCR, 1 << 24, GUEST);
    store.reset(Reset::Init);
    assert_eq!(store.read(HWCR, GUEST, &FACTS), Ok(1 << 24));
    store.reset(Reset::PowerUp);
    assert_eq!(store.read(HWCR, GUEST, &FACTS), Ok(0));
}

#[test]
fn what_is_amds_alone_does_not_exist_on_an_intel_host() {
    let mut store = MsrStore::new(&HostMsrs { amd: false, de_cfg: 0, ..AMD }).expect("memory");
    let facts = GuestFacts { amd: false, ..FACTS };
    for index in [VM_CR, DE_CFG] {
        assert_eq!(store.read(index, VMM, &facts), Err(Refused), "{index:#x}");
        assert_eq!(store.write(index, 0, VMM, &facts), Err(Refused), "{index:#x}");
    }
    // Intel's is there, and not listed for AMD.
    assert_eq!(store.read(FEATURE_CONTROL, GUEST, &facts), Ok(0));
    let host = HostMsrs { amd: false, ..AMD };
    assert!(lists::saved(&host).any(|index| index == FEATURE_CONTROL));
    assert!(!lists::saved(&AMD).any(|index| index == FEATURE_CONTROL));
}

#[test]
fn a_vmm_may_restore_zero_to_a_command_that_the_cpu_lacks() {
    let mut store = store();
    let facts = GuestFacts { pred_cmd: 0, host_pred_cmd: 0, ..FACTS };
    assert_eq!(store.write(PRED_CMD, 0, VMM, &facts), Ok(Effect::None));
    assert_eq!(store.write(PRED_CMD, 1, VMM, &facts), Err(Refused));
    assert_eq!(store.write(PRED_CMD, 0, GUEST, &facts), Err(Refused));
}
