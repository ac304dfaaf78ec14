//! A vCPU file.

use std::sync::atomic::Ordering::Relaxed;

use gannet_kvm_abi::Errno;
use gannet_kvm_abi::dispatch::{Irqchip, vcpu};
use gannet_kvm_abi::exit::{ErrorData, RunInput, UserExit};
use gannet_kvm_abi::uapi::capability::{CAP_ENFORCE_PV_FEATURE_CPUID, CAP_HYPERV_ENLIGHTENED_VMCS};
use gannet_kvm_abi::uapi::cpuid::*;
use gannet_kvm_abi::uapi::debug::*;
use gannet_kvm_abi::uapi::device::*;
use gannet_kvm_abi::uapi::ioctl::*;
use gannet_kvm_abi::uapi::irqchip::*;
use gannet_kvm_abi::uapi::msr::*;
use gannet_kvm_abi::uapi::registers::*;
use gannet_kvm_abi::uapi::run::*;
use gannet_kvm_abi::uapi::vcpu_state::*;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::mock::{File, leaf};
use crate::{Buffer, refused};

fn give<T: IntoBytes + Immutable>(f: &File, cmd: u32, value: &T) -> Result<i32, Errno> {
    vcpu(f, cmd, Buffer::new(value).addr())
}

fn take<T: FromBytes>(f: &File, cmd: u32) -> T {
    let mut buffer = Buffer::zeroed(size_of::<T>());
    assert_eq!(vcpu(f, cmd, buffer.addr()), Ok(0));
    buffer.get()
}

/// The page as the VMM sees it.
fn page(f: &File) -> KvmRun {
    let words: Vec<u64> = f.page.iter().map(|word| word.load(Relaxed)).collect();
    KvmRun::read_from_prefix(words.as_bytes()).unwrap().0
}

#[test]
fn another_process_gets_eio_and_a_killed_thread_eintr() {
    let f = File { ours: false, ..File::new() };
    refused(vcpu(&f, RUN, 0), Errno::EIO);
    refused(vcpu(&f, u32::MAX, 0), Errno::EIO);
    let f = File::new();
    f.killed.set(true);
    refused(vcpu(&f, RUN, 0), Errno::EINTR);
    // A number of another kernel service is refused without waiting for the vCPU.
    refused(vcpu(&f, 0x5401, 0), Errno::ENOTTY);
}

#[test]
fn run_takes_no_argument() {
    let f = File::new();
    refused(vcpu(&f, RUN, 1), Errno::EINVAL);
    assert_eq!(f.vcpu.borrow().input, None);
    assert_eq!(page(&f).exit_reason, 0);
}

#[test]
fn run_reads_what_the_vmm_asks() {
    let f = File::new();
    f.page[0].store(0x0101, Relaxed);
    f.page[2].store(9, Relaxed);
    f.page[5].store(0x0807_0605_0403_0201, Relaxed);
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    let input = RunInput {
        request_interrupt_window: true,
        immediate_exit: true,
        cr8: None,
        mmio_data: [1, 2, 3, 4, 5, 6, 7, 8],
    };
    assert_eq!(f.vcpu.borrow().input, Some(input));
    assert_eq!(f.page[0].load(Relaxed), 0x0101);
}

#[test]
fn cr8_is_the_vmms_only_without_irqchip() {
    let f = File::new();
    f.vcpu.borrow_mut().irqchip = Irqchip::None;
    f.page[2].store(9, Relaxed);
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    assert_eq!(f.vcpu.borrow().input.unwrap().cr8, Some(9));
    f.page[2].store(16, Relaxed);
    refused(vcpu(&f, RUN, 0), Errno::EINVAL);
    f.vcpu.borrow_mut().irqchip = Irqchip::Split;
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
}

#[test]
fn every_return_shows_the_common_fields() {
    let f = File::new();
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    let run = page(&f);
    assert_eq!((run.exit_reason, run.cr8, run.apic_base), (EXIT_HLT, 3, 0xfee0_0900));
    assert_eq!((run.ready_for_interrupt_injection, run.if_flag, run.flags), (1, 1, 0));
}

#[test]
fn a_port_write_brings_its_data_and_a_port_read_takes_it() {
    let f = File::new();
    f.vcpu.borrow_mut().exit = UserExit::Io { write: true, size: 2, port: 0xcf8, count: 4 };
    f.io_page[0].store(u64::from_le_bytes(*b"answered"), Relaxed);
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    assert_eq!(f.vcpu.borrow().answered, Some(*b"answered"));
    assert_eq!(f.io_page[0].load(Relaxed).to_le_bytes(), *b"guest wr");
    let run = page(&f);
    assert_eq!(run.exit_reason, EXIT_IO);
    assert_eq!(run.exit[0], 1 | 2 << 8 | 0xcf8 << 16 | 4 << 32);
    assert_eq!(run.exit[1], 4096);

    f.vcpu.borrow_mut().exit = UserExit::Io { write: false, size: 1, port: 0x60, count: 1 };
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    assert_eq!(page(&f).exit[0], 1 << 8 | 0x60 << 16 | 1 << 32);
    assert_eq!(f.io_page[0].load(Relaxed).to_le_bytes(), *b"guest wr");
}

#[test]
fn a_string_takes_more_of_the_port_page_than_its_first_word() {
    let f = File::new();
    f.vcpu.borrow_mut().exit = UserExit::Io { write: false, size: 1, port: 0x60, count: 20 };
    for (word, value) in f.io_page.iter().take(3).zip(1_u64..) {
        word.store(value * 0x0101_0101_0101_0101, Relaxed);
    }
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    let taken = [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3];
    assert_eq!(f.vcpu.borrow().calls, [format!("items {taken:?}")]);
}

#[test]
fn exits_stand_where_the_union_has_them() {
    let f = File::new();
    let show = |exit| {
        f.vcpu.borrow_mut().exit = exit;
        let reply = vcpu(&f, RUN, 0);
        (reply, page(&f).exit_reason, page(&f).exit)
    };
    let (_, reason, union) =
        show(UserExit::Mmio { gpa: 0xd000_0000, len: 4, write: true, data: *b"mmiodata" });
    assert_eq!((reason, union[0], union[2]), (EXIT_MMIO, 0xd000_0000, 4 | 1 << 32));
    assert_eq!(union[1].to_le_bytes(), *b"mmiodata");
    let (_, reason, union) = show(UserExit::FailEntry { reason: 0x8000_0021, cpu: 3 });
    assert_eq!((reason, union[0], union[1]), (EXIT_FAIL_ENTRY, 0x8000_0021, 3));
    f.vcpu.borrow_mut().error = ErrorData::emulation(b"\x0f\x0b", &[42]);
    let (_, reason, union) = show(UserExit::InternalError { suberror: 1 });
    assert_eq!((reason, union[0]), (EXIT_INTERNAL_ERROR, 1 | 4 << 32));
    assert_eq!((union[1], union[2] & 0xff_ffff, union[3], union[4]), (1, 0x0b_0f_02, 0, 42));
    let (_, reason, union) = show(UserExit::Exception { vector: 17, error_code: 5 });
    assert_eq!((reason, union[0]), (EXIT_EXCEPTION, 5 << 32 | 17));
    let (_, reason, union) = show(UserExit::Debug { exception: 1, pc: 2, dr6: 3, dr7: 4 });
    assert_eq!((reason, union[0], union[1], union[2], union[3]), (EXIT_DEBUG, 1, 2, 3, 4));
    assert_eq!(show(UserExit::IoapicEoi { vector: 0x31 }).2[0], 0x31);
    assert_eq!(show(UserExit::Shutdown).1, EXIT_SHUTDOWN);
    assert_eq!(show(UserExit::SetTpr).1, EXIT_SET_TPR);
    assert_eq!(show(UserExit::IrqWindowOpen).1, EXIT_IRQ_WINDOW_OPEN);
}

#[test]
fn a_run_that_fails_shows_why_all_the_same() {
    let f = File::new();
    let fault = UserExit::MemoryFault { flags: 1, gpa: 0x5000, size: 4096 };
    for (exit, errno, reason) in [
        (UserExit::Intr, Errno::EINTR, EXIT_INTR),
        (UserExit::Again, Errno::EAGAIN, EXIT_INTR),
        (fault, Errno::EFAULT, EXIT_MEMORY_FAULT),
    ] {
        f.vcpu.borrow_mut().exit = exit;
        refused(vcpu(&f, RUN, 0), errno);
        assert_eq!((page(&f).exit_reason, page(&f).cr8), (reason, 3));
    }
}

#[test]
fn an_immediate_exit_leaves_the_last_reason_standing() {
    let f = File::new();
    f.vcpu.borrow_mut().exit = UserExit::Io { write: true, size: 1, port: 0x3f8, count: 1 };
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    f.vcpu.borrow_mut().exit = UserExit::Immediate;
    refused(vcpu(&f, RUN, 0), Errno::EINTR);
    assert_eq!(page(&f).exit_reason, EXIT_IO);
}

#[test]
fn shared_registers_go_both_ways() {
    let f = File::new();
    f.page[36].store(SYNC_X86_VALID_FIELDS, Relaxed);
    f.page[37].store(SYNC_X86_REGS | SYNC_X86_SREGS | SYNC_X86_EVENTS, Relaxed);
    f.page[38 + 16].store(0x7c00, Relaxed);
    f.page[38 + 18].store(0xabc, Relaxed);
    assert_eq!(vcpu(&f, RUN, 0), Ok(0));
    let calls = f.take();
    assert_eq!(calls[0], r#"("regs", 31744)"#);
    assert_eq!(calls[1], format!("{:?}", ("sregs", 0u64, 0u64, 0xabcu64, None::<u8>)));
    assert_eq!(calls.len(), 3);
    let run = page(&f);
    assert_eq!(run.kvm_dirty_regs, 0);
    assert_eq!((run.sync.regs.rip, run.sync.sregs.cr0, run.sync.events.flags), (0xfff0, 0x11, 5));
    assert_eq!(run.sync.sregs.interrupt_bitmap, [0, 1 << 6, 0, 0]);
    for index in [36, 37] {
        f.page[index].store(8, Relaxed);
        refused(vcpu(&f, RUN, 0), Errno::EINVAL);
        f.page[index].store(0, Relaxed);
    }
}

#[test]
fn general_and_system_registers() {
    let f = File::new();
    assert_eq!(take::<KvmRegs>(&f, GET_REGS).rip, 0xfff0);
    assert_eq!(give(&f, SET_REGS, &KvmRegs { rip: 5, ..Default::default() }), Ok(0));
    let mut sregs: KvmSregs = take(&f, GET_SREGS);
    assert_eq!((sregs.cr0, sregs.cs.base, sregs.interrupt_bitmap[1]), (0x11, 9, 1 << 6));
    assert_eq!(give(&f, SET_SREGS, &sregs), Ok(0));
    sregs.interrupt_bitmap = [0; 4];
    assert_eq!(give(&f, SET_SREGS, &sregs), Ok(0));
    assert_eq!(
        f.take(),
        [r#"("regs", 5)"#, r#"("sregs", 17, 0, 9, Some(70))"#, r#"("sregs", 17, 0, 9, None)"#]
    );
}

#[test]
fn pdptrs_come_only_with_pae_paging() {
    let f = File::new();
    let pae = KvmSregs2 { cr0: 1 << 31, cr4: 1 << 5, flags: 1, ..Default::default() };
    assert_eq!(give(&f, SET_SREGS2, &pae), Ok(0));
    assert_eq!(give(&f, SET_SREGS2, &KvmSregs2 { flags: 0, cr0: 0, ..pae }), Ok(0));
    for bad in [
        KvmSregs2 { flags: 2, ..pae },
        KvmSregs2 { flags: 3, ..pae },
        KvmSregs2 { cr0: 0, ..pae },
        KvmSregs2 { cr4: 0, ..pae },
        KvmSregs2 { efer: 1 << 10, ..pae },
    ] {
        refused(give(&f, SET_SREGS2, &bad), Errno::EINVAL);
    }
    assert_eq!(f.take().len(), 2);
    assert_eq!(take::<KvmSregs2>(&f, GET_SREGS2).cr0, 0x11);
}

#[test]
fn floating_point_and_extended_state() {
    let f = File::new();
    assert_eq!(take::<KvmFpu>(&f, GET_FPU).mxcsr, 0x1f80);
    assert_eq!(give(&f, SET_FPU, &KvmFpu { mxcsr: 6, ..Default::default() }), Ok(0));
    assert_eq!(take::<[u8; 4096]>(&f, GET_XSAVE), [0x77; 4096]);
    assert_eq!(vcpu(&f, SET_XSAVE, Buffer::zeroed(4096).addr()), Ok(0));
    f.vcpu.borrow_mut().xsave_bytes = 11008;
    let mut big = Buffer::zeroed(11008);
    refused(vcpu(&f, GET_XSAVE, big.addr()), Errno::EINVAL);
    assert_eq!(vcpu(&f, GET_XSAVE2, big.addr()), Ok(0));
    assert_eq!(big.at::<[u8; 8]>(11000), [0x77; 8]);
    assert_eq!(vcpu(&f, SET_XSAVE, big.addr()), Ok(0));
    assert_eq!(f.take(), [r#"("fpu", 6)"#, r#"("xsave", 4096)"#, r#"("xsave", 11008)"#]);
}

#[test]
fn xcr0_is_the_only_extended_control_register() {
    let f = File::new();
    let got: KvmXcrs = take(&f, GET_XCRS);
    assert_eq!((got.nr_xcrs, got.xcrs[0].value), (1, 1));
    let mut xcrs = KvmXcrs { nr_xcrs: 2, ..KvmXcrs::new_zeroed() };
    xcrs.xcrs[0] = KvmXcr { xcr: 1, reserved: 0, value: 99 };
    xcrs.xcrs[1] = KvmXcr { xcr: 0, reserved: 0, value: 7 };
    assert_eq!(give(&f, SET_XCRS, &xcrs), Ok(0));
    assert_eq!(f.take(), [r#"("xcr0", 7)"#]);
    assert_eq!(give(&f, SET_XCRS, &KvmXcrs { nr_xcrs: 1, ..xcrs }), Ok(0));
    assert_eq!(give(&f, SET_XCRS, &KvmXcrs { nr_xcrs: 0, ..xcrs }), Ok(0));
    refused(give(&f, SET_XCRS, &KvmXcrs { nr_xcrs: 17, ..xcrs }), Errno::EINVAL);
    refused(give(&f, SET_XCRS, &KvmXcrs { flags: 1, ..xcrs }), Errno::EINVAL);
    f.vcpu.borrow_mut().xcr0 = None;
    refused(give(&f, SET_XCRS, &xcrs), Errno::EINVAL);
    assert_eq!(take::<KvmXcrs>(&f, GET_XCRS).nr_xcrs, 0);
    assert!(f.take().is_empty());
}

#[test]
fn debug_registers_have_32_bits_and_no_flags() {
    let f = File::new();
    let regs: KvmDebugregs = take(&f, GET_DEBUGREGS);
    assert_eq!(give(&f, SET_DEBUGREGS, &regs), Ok(0));
    for bad in [
        KvmDebugregs { flags: 1, ..regs },
        KvmDebugregs { dr6: 1 << 32, ..regs },
        KvmDebugregs { dr7: 1 << 63, ..regs },
    ] {
        refused(give(&f, SET_DEBUGREGS, &bad), Errno::EINVAL);
    }
    assert_eq!(f.take(), [r#"("debugregs", 1024)"#]);
}

#[test]
fn msrs_stop_at_the_first_that_is_refused() {
    let f = File::new();
    let entry = |index, data| KvmMsrEntry { index, reserved: 0, data };
    let head = KvmMsrs { nmsrs: 3, ..Default::default() };
    let mut buffer = Buffer::with(&head, &[entry(1, 10), entry(500, 20), entry(2, 30)]);
    assert_eq!(vcpu(&f, SET_MSRS, buffer.addr()), Ok(1));
    assert_eq!(f.take(), [r#"("msr", 1, 10)"#]);
    assert_eq!(vcpu(&f, GET_MSRS, buffer.addr()), Ok(1));
    assert_eq!(buffer.at::<[KvmMsrEntry; 3]>(8).map(|e| e.data), [2, 20, 30]);
    let mut many = Buffer::new(&KvmMsrs { nmsrs: 256, ..Default::default() });
    refused(vcpu(&f, SET_MSRS, many.addr()), Errno::E2BIG);
    refused(vcpu(&f, GET_MSRS, many.addr()), Errno::E2BIG);
}

#[test]
fn events_without_payload_are_injected_or_not() {
    let f = File::new();
    let with = |flags, exception| KvmVcpuEvents { flags, exception, ..Default::default() };
    let gp = KvmExceptionEvent { injected: 1, nr: 13, pending: 1, ..Default::default() };
    assert_eq!(give(&f, SET_VCPU_EVENTS, &with(0, gp)), Ok(0));
    assert!(f.take()[0].contains("injected: 1, nr: 13, has_error_code: 0, pending: 0"));
    assert_eq!(give(&f, SET_VCPU_EVENTS, &with(VCPUEVENT_VALID_PAYLOAD, gp)), Ok(0));
    assert!(f.take()[0].contains("injected: 0, nr: 13, has_error_code: 0, pending: 1"));
    for nr in [2, 32, 255] {
        let bad = KvmExceptionEvent { nr, ..gp };
        refused(give(&f, SET_VCPU_EVENTS, &with(0, bad)), Errno::EINVAL);
        let none = KvmExceptionEvent { injected: 0, pending: 0, ..bad };
        assert_eq!(give(&f, SET_VCPU_EVENTS, &with(0, none)), Ok(0));
    }
    f.take();
    refused(give(&f, SET_VCPU_EVENTS, &with(0x40, gp)), Errno::EINVAL);
    let smm = KvmSmiEvent { smm: 1, ..Default::default() };
    let in_smm = KvmVcpuEvents { flags: VCPUEVENT_VALID_SMM, smi: smm, ..Default::default() };
    assert_eq!(give(&f, SET_VCPU_EVENTS, &in_smm), Ok(0));
    let clean = KvmVcpuEvents { smi: Default::default(), ..in_smm };
    assert_eq!(give(&f, SET_VCPU_EVENTS, &clean), Ok(0));
    assert_eq!(f.take().len(), 2);
    assert_eq!(take::<KvmVcpuEvents>(&f, GET_VCPU_EVENTS).flags, 5);
}

#[test]
fn scheduling_states_other_than_runnable_need_a_local_apic() {
    let f = File::new();
    assert_eq!(take::<KvmMpState>(&f, GET_MP_STATE).mp_state, MP_STATE_HALTED);
    for mp_state in 0..=4 {
        assert_eq!(give(&f, SET_MP_STATE, &KvmMpState { mp_state }), Ok(0));
    }
    for mp_state in [5, 9, u32::MAX] {
        refused(give(&f, SET_MP_STATE, &KvmMpState { mp_state }), Errno::EINVAL);
    }
    f.vcpu.borrow_mut().irqchip = Irqchip::None;
    assert_eq!(give(&f, SET_MP_STATE, &KvmMpState { mp_state: MP_STATE_RUNNABLE }), Ok(0));
    for mp_state in 1..=4 {
        refused(give(&f, SET_MP_STATE, &KvmMpState { mp_state }), Errno::EINVAL);
    }
    assert_eq!(f.take().len(), 6);
}

#[test]
fn the_local_apic_is_there_or_not() {
    let f = File::new();
    assert_eq!(take::<KvmLapicState>(&f, GET_LAPIC).regs[0x20], 5);
    let mut state = KvmLapicState::default();
    state.regs[0x20] = 8;
    assert_eq!(give(&f, SET_LAPIC, &state), Ok(0));
    assert_eq!(give(&f, SET_VAPIC_ADDR, &KvmVapicAddr { vapic_addr: 0 }), Ok(0));
    assert_eq!(f.take(), [r#"("lapic", 8)"#]);
    f.vcpu.borrow_mut().irqchip = Irqchip::None;
    refused(vcpu(&f, GET_LAPIC, 0), Errno::EINVAL);
    refused(vcpu(&f, SET_LAPIC, 0), Errno::EINVAL);
    refused(vcpu(&f, SET_VAPIC_ADDR, 0), Errno::EINVAL);
}

#[test]
fn an_interrupt_is_for_vmms_with_their_own_pic() {
    let f = File::new();
    refused(give(&f, INTERRUPT, &KvmInterrupt { irq: 32 }), Errno::ENXIO);
    refused(give(&f, INTERRUPT, &KvmInterrupt { irq: 256 }), Errno::EINVAL);
    f.vcpu.borrow_mut().irqchip = Irqchip::None;
    assert_eq!(give(&f, INTERRUPT, &KvmInterrupt { irq: 255 }), Ok(0));
    refused(give(&f, INTERRUPT, &KvmInterrupt { irq: 256 }), Errno::EINVAL);
    f.vcpu.borrow_mut().irqchip = Irqchip::Split;
    assert_eq!(give(&f, INTERRUPT, &KvmInterrupt { irq: 0 }), Ok(0));
    assert_eq!(vcpu(&f, NMI, 0), Ok(0));
    assert_eq!(f.take(), [r#"("interrupt", 255)"#, r#"("interrupt", 0)"#, r#""nmi""#]);
}

#[test]
fn cpuid_is_fixed_once_the_vcpu_ran() {
    let f = File::new();
    let set = |leaves: &[KvmCpuidEntry2]| {
        let head = KvmCpuid2 { nent: leaves.len() as u32, padding: 0 };
        vcpu(&f, SET_CPUID2, Buffer::with(&head, leaves).addr())
    };
    assert_eq!(set(&[leaf(0), leaf(7)]), Ok(0));
    assert_eq!(set(&[]), Ok(0));
    assert_eq!(f.take().len(), 2);
    f.vcpu.borrow_mut().ran = true;
    assert_eq!(set(&[leaf(0), leaf(1)]), Ok(0));
    refused(set(&[leaf(0), leaf(7)]), Errno::EINVAL);
    refused(set(&[leaf(0)]), Errno::EINVAL);
    refused(set(&[]), Errno::EINVAL);
    assert!(f.take().is_empty());
}

#[test]
fn a_cpuid_table_has_at_most_256_leaves_and_a_width_that_exists() {
    let f = File::new();
    let mut big = Buffer::new(&KvmCpuid2 { nent: 257, padding: 0 });
    refused(vcpu(&f, SET_CPUID2, big.addr()), Errno::E2BIG);
    refused(vcpu(&f, SET_CPUID, big.addr()), Errno::E2BIG);
    let width = |bits: u32| {
        let leaf = KvmCpuidEntry2 { eax: bits << 8 | 40, ..leaf(0x8000_0008) };
        vcpu(&f, SET_CPUID2, Buffer::with(&KvmCpuid2 { nent: 1, padding: 0 }, &[leaf]).addr())
    };
    for bits in [0, 48, 57] {
        assert_eq!(width(bits), Ok(0));
    }
    for bits in [1, 47, 64, 255] {
        refused(width(bits), Errno::EINVAL);
    }
}

#[test]
fn the_old_cpuid_form_becomes_the_new() {
    let f = File::new();
    let old = KvmCpuidEntry { function: 1, eax: 2, ebx: 3, ecx: 4, edx: 5, padding: 99 };
    let mut buffer = Buffer::with(&KvmCpuid { nent: 1, padding: 0 }, &[old]);
    assert_eq!(vcpu(&f, SET_CPUID, buffer.addr()), Ok(0));
    let new = KvmCpuidEntry2 { function: 1, eax: 2, ebx: 3, ecx: 4, edx: 5, ..Default::default() };
    assert_eq!(f.take(), [format!("{:?}", ("cpuid", [new]))]);
}

#[test]
fn the_guests_cpuid_comes_back_whole_or_not_at_all() {
    let f = File::new();
    let mut short = Buffer::with(&KvmCpuid2 { nent: 1, padding: 0 }, &[[0u64; 5]; 2]);
    refused(vcpu(&f, GET_CPUID2, short.addr()), Errno::E2BIG);
    let mut enough = Buffer::with(&KvmCpuid2 { nent: 9, padding: 0 }, &[[0u64; 5]; 2]);
    assert_eq!(vcpu(&f, GET_CPUID2, enough.addr()), Ok(0));
    assert_eq!(enough.get::<KvmCpuid2>().nent, 2);
    assert_eq!(enough.at::<KvmCpuidEntry2>(48), leaf(1));
}

#[test]
fn the_tsc_can_be_read_scaled_and_moved() {
    let f = File::new();
    assert_eq!(vcpu(&f, GET_TSC_KHZ, 0), Ok(2_400_000));
    assert_eq!(vcpu(&f, SET_TSC_KHZ, 0), Ok(0));
    refused(vcpu(&f, SET_TSC_KHZ, 10_000_000), Errno::EINVAL);
    let mut offset = Buffer::new(&77u64);
    let attr = KvmDeviceAttr { addr: offset.addr(), ..Default::default() };
    assert_eq!(give(&f, HAS_DEVICE_ATTR, &attr), Ok(0));
    assert_eq!(give(&f, SET_DEVICE_ATTR, &attr), Ok(0));
    assert_eq!(give(&f, GET_DEVICE_ATTR, &attr), Ok(0));
    assert_eq!(offset.get::<u64>(), 0x1234);
    assert_eq!(f.take(), [r#"("tsc khz", 2000000)"#, r#"("tsc offset", 77)"#]);
    refused(give(&f, HAS_DEVICE_ATTR, &KvmDeviceAttr { attr: 1, ..attr }), Errno::ENXIO);
    refused(give(&f, SET_DEVICE_ATTR, &KvmDeviceAttr { group: 1, ..attr }), Errno::ENXIO);
    refused(give(&f, SET_DEVICE_ATTR, &KvmDeviceAttr { addr: 0, ..attr }), Errno::EFAULT);
    f.vcpu.borrow_mut().offer.tsc_offset = false;
    refused(give(&f, HAS_DEVICE_ATTR, &attr), Errno::ENOTTY);
}

#[test]
fn a_signal_mask_has_64_signals() {
    let f = File::new();
    let mut mask = Buffer::with(&KvmSignalMask { len: 8 }, &[0x10u32, 0x20]);
    assert_eq!(vcpu(&f, SET_SIGNAL_MASK, mask.addr()), Ok(0));
    assert_eq!(f.vcpu.borrow().mask, Some(0x20_0000_0010));
    for len in [0, 4, 16, u32::MAX] {
        refused(give(&f, SET_SIGNAL_MASK, &KvmSignalMask { len }), Errno::EINVAL);
    }
    assert_eq!(f.vcpu.borrow().mask, Some(0x20_0000_0010));
    assert_eq!(vcpu(&f, SET_SIGNAL_MASK, 0), Ok(0));
    assert_eq!(f.vcpu.borrow().mask, None);
}

#[test]
fn an_address_is_translated() {
    let f = File::new();
    let asked = KvmTranslation { linear_address: 0x4000, usermode: 9, ..Default::default() };
    let mut buffer = Buffer::new(&asked);
    assert_eq!(vcpu(&f, TRANSLATE, buffer.addr()), Ok(0));
    let answer: KvmTranslation = buffer.get();
    assert_eq!((answer.physical_address, answer.valid, answer.usermode), (0x5000, 1, 0));
}

#[test]
fn debugging_takes_only_what_is_offered() {
    let f = File::new();
    let with =
        |control| give(&f, SET_GUEST_DEBUG, &KvmGuestDebug { control, ..Default::default() });
    assert_eq!(with(GUESTDBG_ENABLE | GUESTDBG_SINGLESTEP), Ok(0));
    refused(with(1 << 30), Errno::EINVAL);
    f.vcpu.borrow_mut().pending = true;
    refused(with(GUESTDBG_INJECT_DB), Errno::EBUSY);
    assert_eq!(with(GUESTDBG_ENABLE), Ok(0));
    assert_eq!(f.take().len(), 2);
    f.vcpu.borrow_mut().offer.guest_debug = 0;
    assert_eq!(with(0), Ok(0));
    refused(with(GUESTDBG_ENABLE), Errno::EINVAL);
    assert!(f.take().is_empty());
}

#[test]
fn machine_checks_keep_to_the_banks_on_offer() {
    let f = File::new();
    assert_eq!(give(&f, X86_SETUP_MCE, &0x0100_000au64), Ok(0));
    for bad in [0u64, 33, 1 << 60 | 10] {
        refused(give(&f, X86_SETUP_MCE, &bad), Errno::EINVAL);
    }
    let mce = KvmX86Mce { status: 1 << 63, bank: 4, ..Default::default() };
    assert_eq!(give(&f, X86_SET_MCE, &mce), Ok(0));
    refused(give(&f, X86_SET_MCE, &KvmX86Mce { bank: 32, ..mce }), Errno::EINVAL);
    refused(give(&f, X86_SET_MCE, &KvmX86Mce { status: 0, ..mce }), Errno::EINVAL);
    f.vcpu.borrow_mut().offer.mce_banks = 0;
    refused(give(&f, X86_SETUP_MCE, &1u64), Errno::EINVAL);
    assert_eq!(f.take().len(), 2);
}

#[test]
fn no_nested_state_is_a_state() {
    for (format, flags, hdr) in
        [(NESTED_FORMAT_SVM, NESTED_GIF_SET, 0), (NESTED_FORMAT_VMX, 0, NESTED_NO_ADDRESS)]
    {
        let f = File::new();
        f.vcpu.borrow_mut().offer.nested_format = format;
        let mut small = Buffer::new(&[0u32, 127]);
        refused(vcpu(&f, GET_NESTED_STATE, small.addr()), Errno::E2BIG);
        assert_eq!(small.get::<[u32; 2]>(), [0, 128]);
        let mut room = Buffer::new(&KvmNestedState { size: 4224, ..Default::default() });
        assert_eq!(vcpu(&f, GET_NESTED_STATE, room.addr()), Ok(0));
        let state = room.get::<KvmNestedState>();
        assert_eq!((state.format, state.flags, state.size), (format, flags, 128));
        assert_eq!(state.hdr[..4], [hdr, hdr, 0, 0]);
        assert_eq!(give(&f, SET_NESTED_STATE, &state), Ok(0));
        for other in [
            KvmNestedState { format: format ^ 1, ..state },
            KvmNestedState { flags: flags | 1, ..state },
            KvmNestedState { size: 127, ..state },
        ] {
            refused(give(&f, SET_NESTED_STATE, &other), Errno::EINVAL);
        }
        let mut inside = state;
        inside.hdr[0] = 0x1000;
        let expected = if format == NESTED_FORMAT_VMX { Err(Errno::EINVAL) } else { Ok(0) };
        assert_eq!(give(&f, SET_NESTED_STATE, &inside), expected);
    }
}

#[test]
fn a_vcpu_has_two_settings() {
    let f = File::new();
    for (value, call) in [(1, "true"), (0, "false"), (1 << 40, "true")] {
        let mut cap = KvmEnableCap { cap: CAP_ENFORCE_PV_FEATURE_CPUID, ..Default::default() };
        cap.args[0] = value;
        assert_eq!(give(&f, ENABLE_CAP, &cap), Ok(0));
        assert!(f.take().remove(0).contains(call), "{value}");
        refused(give(&f, ENABLE_CAP, &KvmEnableCap { flags: 1, ..cap }), Errno::EINVAL);
        refused(give(&f, ENABLE_CAP, &KvmEnableCap { cap: 159, ..cap }), Errno::EINVAL);
    }
    assert!(f.take().is_empty());
    let mut versions = Buffer::new(&[0xffff_u16; 2]);
    let mut cap = KvmEnableCap { cap: CAP_HYPERV_ENLIGHTENED_VMCS, ..Default::default() };
    cap.args[0] = versions.addr();
    assert_eq!(give(&f, ENABLE_CAP, &cap), Ok(0));
    assert_eq!(versions.get::<[u16; 2]>(), [0x101, 0xffff], "two bytes");
    assert!(f.take().remove(0).contains("enlightened"));
    cap.args[0] = 1;
    refused(give(&f, ENABLE_CAP, &cap), Errno::EFAULT);
}

#[test]
fn what_is_shown_of_hyperv_comes_whole_or_not_at_all() {
    let f = File::new();
    let mut none = Buffer::with(&KvmCpuid2::default(), &[[0u64; 5]; 1]);
    refused(vcpu(&f, GET_SUPPORTED_HV_CPUID, none.addr()), Errno::E2BIG);
    let mut more = Buffer::with(&KvmCpuid2 { nent: 9, padding: 0 }, &[[0u64; 5]; 9]);
    assert_eq!(vcpu(&f, GET_SUPPORTED_HV_CPUID, more.addr()), Ok(0));
    assert_eq!(more.get::<KvmCpuid2>().nent, 1);
    assert_eq!(more.at::<KvmCpuidEntry2>(8), leaf(0x4000_0000));
}

#[test]
fn what_is_not_offered_is_refused() {
    let f = File::new();
    refused(vcpu(&f, KVMCLOCK_CTRL, 0), Errno::EINVAL);
    refused(vcpu(&f, GET_REG_LIST, 0), Errno::ENOTTY);
    refused(vcpu(&f, GET_ONE_REG, 0), Errno::ENOTTY);
    refused(give(&f, ENABLE_CAP, &KvmEnableCap::default()), Errno::EINVAL);
    let reporting = KvmTprAccessCtl { enabled: 1, ..Default::default() };
    assert_eq!(give(&f, TPR_ACCESS_REPORTING, &reporting), Ok(0));
    let flags = KvmTprAccessCtl { flags: 1, ..reporting };
    refused(give(&f, TPR_ACCESS_REPORTING, &flags), Errno::EINVAL);
    assert!(f.take().is_empty());
}
