//! Whatever bytes user space brings: nothing panics, and what passes has been checked.

use gannet_kvm_abi::dispatch::{Irqchip, system, vcpu, vm};
use gannet_kvm_abi::uapi::ioctl::*;
use gannet_kvm_abi::uapi::memory::KvmUserspaceMemoryRegion;
use proptest::prelude::*;

use crate::Buffer;
use crate::mock::{File, System, Vm, offer};

const ANY: &[u32] = &[
    GET_MSR_INDEX_LIST,
    GET_SUPPORTED_CPUID,
    GET_EMULATED_CPUID,
    GET_MSRS,
    SET_MSRS,
    HAS_DEVICE_ATTR,
    GET_DEVICE_ATTR,
    SET_DEVICE_ATTR,
    ENABLE_CAP,
    SET_USER_MEMORY_REGION,
    SET_USER_MEMORY_REGION2,
    CLEAR_DIRTY_LOG,
    REGISTER_COALESCED_MMIO,
    UNREGISTER_COALESCED_MMIO,
    IRQ_LINE_STATUS,
    SIGNAL_MSI,
    IOEVENTFD,
    IRQFD,
    SET_GSI_ROUTING,
    GET_IRQCHIP,
    SET_IRQCHIP,
    SET_PIT,
    SET_PIT2,
    SET_CLOCK,
    SET_TSC_KHZ,
    SET_REGS,
    SET_SREGS,
    SET_SREGS2,
    SET_FPU,
    SET_XSAVE,
    SET_XCRS,
    SET_DEBUGREGS,
    SET_VCPU_EVENTS,
    SET_MP_STATE,
    SET_LAPIC,
    SET_CPUID,
    SET_CPUID2,
    GET_CPUID2,
    INTERRUPT,
    TRANSLATE,
    SET_SIGNAL_MASK,
    SET_GUEST_DEBUG,
    X86_SETUP_MCE,
    X86_SET_MCE,
    CREATE_VCPU,
    CHECK_EXTENSION,
    RUN,
];

/// Mostly small numbers and single bits, as real structures have, in 256 KiB of memory: more than
/// any list of ours.
fn words() -> impl Strategy<Value = Vec<u64>> {
    let word = prop_oneof![
        Just(0u64),
        0..512u64,
        (0..64u32).prop_map(|bit| 1 << bit),
        any::<u32>().prop_map(u64::from),
        any::<u64>(),
    ];
    proptest::collection::vec(word, 1..24).prop_map(|start| {
        let mut all = vec![0; 32768];
        all[..start.len()].copy_from_slice(&start);
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_input_makes_a_command_panic(
        cmd in proptest::sample::select(ANY),
        number in any::<u64>(),
        pointer in any::<bool>(),
        words in words(),
        mode in 0..3usize,
    ) {
        // These follow a pointer inside the structure, which the test's memory cannot check.
        prop_assume!(!matches!(cmd, GET_DEVICE_ATTR | SET_DEVICE_ATTR | CLEAR_DIRTY_LOG));
        let mut buffer = Buffer(words);
        let takes_pointer = cmd >> 16 != 0;
        let arg = if takes_pointer || pointer { buffer.addr() } else { number };
        let irqchip = [Irqchip::None, Irqchip::Split, Irqchip::Full][mode];
        let _ = system(&System { offer: offer() }, cmd, arg);
        let _ = vm(&Vm { irqchip, ..Vm::full() }, cmd, arg);
        let file = File::new();
        file.vcpu.borrow_mut().irqchip = irqchip;
        for (to, from) in file.page.iter().zip(&buffer.0) {
            to.store(*from, std::sync::atomic::Ordering::Relaxed);
        }
        let _ = vcpu(&file, cmd, arg);
    }

    #[test]
    fn a_region_that_passes_lies_within_both_address_spaces(
        slot in prop_oneof![0..40000u32, any::<u32>()],
        flags in 0..8u32,
        gpa in prop_oneof![any::<u64>().prop_map(|a| a & !0xfff), any::<u64>()],
        size in prop_oneof![(0..1u64 << 36).prop_map(|p| p << 12), any::<u64>()],
        hva in prop_oneof![(0..1u64 << 36).prop_map(|p| p << 12), any::<u64>()],
    ) {
        let region = KvmUserspaceMemoryRegion {
            slot, flags, guest_phys_addr: gpa, memory_size: size, userspace_addr: hva,
        };
        let v = Vm::full();
        let reply = vm(&v, SET_USER_MEMORY_REGION, Buffer::new(&region).addr());
        let passed = v.take().len() == 1;
        prop_assert_eq!(reply.is_ok(), passed);
        if passed {
            prop_assert!(slot >> 16 < 2 && slot & 0xffff < 32764 && flags < 4);
            prop_assert!((gpa | size | hva) & 0xfff == 0);
            prop_assert!(gpa.checked_add(size).is_some());
            prop_assert!(hva.checked_add(size).is_some_and(|end| end <= 1 << 47));
            prop_assert!(size >> 12 < 1 << 31);
        }
    }
}
