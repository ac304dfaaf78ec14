//! /dev/kvm.

use gannet_kvm_abi::Errno;
use gannet_kvm_abi::dispatch::system;
use gannet_kvm_abi::uapi::capability::*;
use gannet_kvm_abi::uapi::cpuid::*;
use gannet_kvm_abi::uapi::device::KvmDeviceAttr;
use gannet_kvm_abi::uapi::ioctl::*;
use gannet_kvm_abi::uapi::msr::*;

use crate::mock::{self, System};
use crate::{Buffer, refused};

fn kvm() -> System {
    System { offer: mock::offer() }
}

#[test]
fn the_version_is_12_and_the_mapping_has_three_pages() {
    assert_eq!(system(&kvm(), GET_API_VERSION, 0), Ok(12));
    assert_eq!(system(&kvm(), GET_VCPU_MMAP_SIZE, 0), Ok(12288));
    refused(system(&kvm(), GET_API_VERSION, 1), Errno::EINVAL);
    refused(system(&kvm(), GET_VCPU_MMAP_SIZE, 1), Errno::EINVAL);
}

#[test]
fn only_machine_type_0_can_be_made() {
    assert_eq!(system(&kvm(), CREATE_VM, 0), Ok(33));
    refused(system(&kvm(), CREATE_VM, 1), Errno::EINVAL);
    refused(system(&kvm(), CREATE_VM, u64::MAX), Errno::EINVAL);
}

#[test]
fn unknown_extensions_are_zero_and_no_error() {
    assert_eq!(system(&kvm(), CHECK_EXTENSION, CAP_IRQCHIP.into()), Ok(1));
    assert_eq!(system(&kvm(), CHECK_EXTENSION, 0xffff), Ok(0));
    assert_eq!(system(&kvm(), CHECK_EXTENSION, u64::MAX), Ok(0));
}

#[test]
fn a_short_msr_list_is_told_how_long_it_must_be() {
    let mut buffer = Buffer::with(&KvmMsrList { nmsrs: 2 }, &[9u32; 3]);
    refused(system(&kvm(), GET_MSR_INDEX_LIST, buffer.addr()), Errno::E2BIG);
    assert_eq!(buffer.get::<KvmMsrList>().nmsrs, 3);
    assert_eq!(buffer.at::<[u32; 3]>(4), [9; 3]);
    assert_eq!(system(&kvm(), GET_MSR_INDEX_LIST, buffer.addr()), Ok(0));
    assert_eq!(buffer.at::<[u32; 3]>(4), [0x10, 0x174, 0xc000_0080]);

    let mut one = Buffer::with(&KvmMsrList { nmsrs: 100 }, &[9u32; 2]);
    assert_eq!(system(&kvm(), GET_MSR_FEATURE_INDEX_LIST, one.addr()), Ok(0));
    assert_eq!((one.get::<KvmMsrList>().nmsrs, one.at::<[u32; 2]>(4)), (1, [0x10a, 9]));
}

#[test]
fn feature_msrs_are_counted_up_to_the_first_unknown() {
    let entry = |index| KvmMsrEntry { index, ..Default::default() };
    let head = KvmMsrs { nmsrs: 3, ..Default::default() };
    let mut buffer = Buffer::with(&head, &[entry(0x10a), entry(1), entry(0x10a)]);
    assert_eq!(system(&kvm(), GET_MSRS, buffer.addr()), Ok(1));
    let back: [KvmMsrEntry; 3] = buffer.at(8);
    assert_eq!(back.map(|e| e.data), [0xabcd, 0, 0]);
}

#[test]
fn too_many_msrs_at_once_are_refused_before_they_are_read() {
    let mut buffer = Buffer::new(&KvmMsrs { nmsrs: 256, ..Default::default() });
    refused(system(&kvm(), GET_MSRS, buffer.addr()), Errno::E2BIG);
    let mut none = Buffer::new(&KvmMsrs::default());
    assert_eq!(system(&kvm(), GET_MSRS, none.addr()), Ok(0));
}

#[test]
fn supported_cpuid_comes_whole_or_not_at_all() {
    for nent in [0, 1, 2] {
        let mut short = Buffer::with(&KvmCpuid2 { nent, padding: 0 }, &[[0u64; 5]; 3]);
        refused(system(&kvm(), GET_SUPPORTED_CPUID, short.addr()), Errno::E2BIG);
        assert_eq!(short.get::<KvmCpuid2>().nent, nent);
        assert_eq!(short.at::<[u64; 5]>(8), [0; 5]);
    }
    for nent in [3, 4, 256, u32::MAX] {
        let mut enough = Buffer::with(&KvmCpuid2 { nent, padding: 0 }, &[[0u64; 5]; 4]);
        assert_eq!(system(&kvm(), GET_SUPPORTED_CPUID, enough.addr()), Ok(0));
        assert_eq!(enough.get::<KvmCpuid2>().nent, 3);
        assert_eq!(enough.at::<KvmCpuidEntry2>(8 + 80), mock::leaf(7));
    }
}

#[test]
fn hypervs_leaves_are_there_where_they_are_offered() {
    let mut buffer = Buffer::with(&KvmCpuid2 { nent: 4, padding: 0 }, &[[0u64; 5]; 4]);
    assert_eq!(system(&kvm(), GET_SUPPORTED_HV_CPUID, buffer.addr()), Ok(0));
    assert_eq!(buffer.get::<KvmCpuid2>().nent, 2);
    let mut without = kvm();
    without.offer.hyperv = false;
    refused(system(&without, GET_SUPPORTED_HV_CPUID, buffer.addr()), Errno::ENOTTY);
}

#[test]
fn emulated_cpuid_wants_clean_padding() {
    let mut entry = mock::leaf(0);
    entry.padding[2] = 1;
    let mut buffer = Buffer::with(&KvmCpuid2 { nent: 1, padding: 0 }, &[entry]);
    refused(system(&kvm(), GET_EMULATED_CPUID, buffer.addr()), Errno::EINVAL);
    let mut clean = Buffer::with(&KvmCpuid2 { nent: 1, padding: 0 }, &[mock::leaf(0)]);
    assert_eq!(system(&kvm(), GET_EMULATED_CPUID, clean.addr()), Ok(0));
    assert_eq!(clean.get::<KvmCpuid2>().nent, 0);
    let mut none = Buffer::new(&KvmCpuid2::default());
    refused(system(&kvm(), GET_EMULATED_CPUID, none.addr()), Errno::E2BIG);
}

#[test]
fn the_one_attribute_is_the_xsave_components() {
    let mut answer = Buffer::zeroed(8);
    let mut attr = KvmDeviceAttr { addr: answer.addr(), ..Default::default() };
    assert_eq!(system(&kvm(), HAS_DEVICE_ATTR, Buffer::new(&attr).addr()), Ok(0));
    assert_eq!(system(&kvm(), GET_DEVICE_ATTR, Buffer::new(&attr).addr()), Ok(0));
    assert_eq!(answer.get::<u64>(), 7);
    attr.addr = 0;
    refused(system(&kvm(), GET_DEVICE_ATTR, Buffer::new(&attr).addr()), Errno::EFAULT);
    attr.attr = 1;
    refused(system(&kvm(), GET_DEVICE_ATTR, Buffer::new(&attr).addr()), Errno::ENXIO);
    attr = KvmDeviceAttr { group: 1, ..Default::default() };
    refused(system(&kvm(), HAS_DEVICE_ATTR, Buffer::new(&attr).addr()), Errno::ENXIO);
}

#[test]
fn the_machine_check_capability_is_the_offers() {
    let mut answer = Buffer::zeroed(8);
    assert_eq!(system(&kvm(), X86_GET_MCE_CAP_SUPPORTED, answer.addr()), Ok(0));
    assert_eq!(answer.get::<u64>(), 0x0100_0000);
}
