//! The three kinds of files over real VMs and vCPUs, on a model CPU and the standard library's port
//! of the kernel: what a VMM does with them, and what it must not.

use std::ffi::c_void;
use std::sync::OnceLock;

use cpu::Model;
use cpuid::{HostFacts, Supported};
use gannet_kvm_abi::Errno;
use gannet_kvm_abi::bind::{Host, MakeBackend, SystemHandle};
use gannet_kvm_abi::caps::Offer;
use gannet_kvm_abi::dispatch::{self, SystemOps};
use gannet_kvm_abi::uapi::clock::KvmClockData;
use gannet_kvm_abi::uapi::cpuid::KvmCpuidEntry2;
use gannet_kvm_abi::uapi::device::{KvmDeviceAttr, KvmEnableCap};
use gannet_kvm_abi::uapi::event::KvmIrqfd;
use gannet_kvm_abi::uapi::irqchip::*;
use gannet_kvm_abi::uapi::memory::*;
use gannet_kvm_abi::uapi::msr::KvmMsrEntry;
use gannet_kvm_abi::uapi::registers::*;
use gannet_kvm_abi::uapi::vcpu_state::*;
use gannet_kvm_abi::uapi::{capability, ioctl};
use host::NoMemory;
use host::std_port::test;
use msr::HostMsrs;
use svm::{Features, Svm, percpu};
use vcpu::Offered;
use vm::vm::{Format, HostLimits};

struct OnModel;

impl MakeBackend for OnModel {
    type B = Svm<Model>;
    fn make() -> Result<Self::B, NoMemory> {
        Svm::new(Model::default(), features())
    }
}

fn features() -> Features {
    Features { asids: 16, npt: true, ..Features::default() }
}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        percpu::set_up(features(), 4).unwrap();
        let cpuid = |leaf: u32, _: u32| match leaf {
            0 => [1, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
            1 => [0x0080_0f12, 0, 1 << 21, (1 << 9) | (1 << 6) | (1 << 5) | (1 << 4)],
            0x8000_0000 => [0x8000_0008, 0, 0, 0],
            0x8000_0001 => [0, 0, 0, (1 << 29) | (1 << 20)],
            0x8000_0008 => [0x3030, 0, 0, 0],
            _ => [0; 4],
        };
        let supported = Supported::read(cpuid, &HostFacts::default()).unwrap();
        let offered = Offered {
            cpuid: Box::leak(Box::new(supported)),
            msrs: Box::leak(Box::new(HostMsrs { amd: true, ..HostMsrs::default() })),
        };
        Host {
            offer: Offer {
                max_vcpus: 3,
                max_vcpu_id: 16,
                tsc_khz: host::clock::tsc_khz(),
                max_tsc_khz: host::clock::tsc_khz(),
                split_irqchip: true,
                x2apic_api: 1,
                halt_poll: true,
                mce_banks: 32,
                mce_cap: 1 << 8,
                guest_debug: 0xf_0003,
                exception_payload: true,
                triple_fault_event: true,
                manual_dirty_log: 1,
                tsc_offset: true,
                ..Offer::default()
            },
            limits: HostLimits {
                tables: Format::npt(4, 0),
                maxphyaddr: 48,
                halt_poll_ns: 0,
                paging: vm::vm::Paging::default(),
            },
            offered,
        }
    })
}

fn system() -> SystemHandle<OnModel> {
    SystemHandle::new(host())
}

/// A descriptor that is closed at the end of the test.
struct Fd(i32);

impl Drop for Fd {
    fn drop(&mut self) {
        test::close(self.0);
    }
}

impl Fd {
    fn call(&self, command: u32, argument: u64) -> i64 {
        test::ioctl(self.0, command, argument)
    }
    fn with<T>(&self, command: u32, argument: &T) -> i64 {
        self.call(command, std::ptr::from_ref(argument) as u64)
    }
    fn fill<T>(&self, command: u32, argument: &mut T) -> i64 {
        self.call(command, std::ptr::from_mut(argument).cast::<c_void>() as u64)
    }
    fn vcpu(&self, id: u32) -> Fd {
        let fd = self.call(ioctl::CREATE_VCPU, id.into());
        assert!(fd >= 0, "{fd}");
        Fd(fd as i32)
    }
    fn get<T: Default>(&self, command: u32) -> T {
        let mut value = T::default();
        assert_eq!(self.fill(command, &mut value), 0);
        value
    }
}

fn vm() -> Fd {
    Fd(dispatch::system(&system(), ioctl::CREATE_VM, 0).unwrap())
}

fn error(errno: Errno) -> i64 {
    errno.code()
}

#[test]
fn a_signal_that_is_pending_interrupts_the_making_of_a_vm() {
    let made = || dispatch::system(&system(), ioctl::CREATE_VM, 0);
    test::set_signal_pending(true);
    let refused = [made(), made()];
    test::set_signal_pending(false);
    assert_eq!(refused, [Err(Errno::EINTR); 2]);
    // As VMMs do: again.
    let vm = Fd(made().unwrap());
    assert!(vm.call(ioctl::CREATE_VCPU, 0) >= 0);
}

#[test]
fn registers_come_back_as_they_were_set() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let regs = KvmRegs {
        rax: 1,
        rbx: 2,
        rsp: 3,
        r15: 4,
        rip: 5,
        rflags: 0x46,
        ..vcpu.get(ioctl::GET_REGS)
    };
    assert_eq!(vcpu.with(ioctl::SET_REGS, &regs), 0);
    assert_eq!(vcpu.get::<KvmRegs>(ioctl::GET_REGS), regs);

    let mut sregs: KvmSregs = vcpu.get(ioctl::GET_SREGS);
    assert_eq!((sregs.cs.selector, sregs.cs.base), (0xf000, 0xffff_0000));
    sregs.cr3 = 0x5000;
    sregs.gs.base = 0xffff_8000_0000_0000;
    sregs.gdt = KvmDtable { base: 0x1000, limit: 0x7f, ..Default::default() };
    assert_eq!(vcpu.with(ioctl::SET_SREGS, &sregs), 0);
    assert_eq!(vcpu.get::<KvmSregs>(ioctl::GET_SREGS), sregs);
    let bad = KvmSregs { cr0: 1 << 31, ..sregs };
    assert_eq!(vcpu.with(ioctl::SET_SREGS, &bad), error(Errno::EINVAL));
    assert_eq!(vcpu.get::<KvmSregs>(ioctl::GET_SREGS), sregs);
}

#[test]
fn the_legacy_fpu_state_goes_by_the_xsave_area() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let mut fpu: KvmFpu = vcpu.get(ioctl::GET_FPU);
    fpu.fcw = 0x37f;
    fpu.xmm[3] = [9; 16];
    assert_eq!(vcpu.with(ioctl::SET_FPU, &fpu), 0);
    assert_eq!(vcpu.get::<KvmFpu>(ioctl::GET_FPU), fpu);
    let mut area = vec![0u32; 1024];
    assert_eq!(vcpu.call(ioctl::GET_XSAVE, area.as_mut_ptr() as u64), 0);
    assert_eq!(area[0] & 0xffff, 0x37f);
}

#[test]
fn vcpus_are_counted_and_their_ids_are_unique() {
    let vm = vm();
    let _first = vm.vcpu(2);
    assert_eq!(vm.call(ioctl::CREATE_VCPU, 2), error(Errno::EEXIST));
    assert_eq!(vm.call(ioctl::CREATE_VCPU, 16), error(Errno::EINVAL));
    let (_second, _third) = (vm.vcpu(0), vm.vcpu(15));
    assert_eq!(vm.call(ioctl::CREATE_VCPU, 3), error(Errno::EINVAL));
}

#[test]
fn what_comes_before_vcpus_is_refused_after_them() {
    let vm = vm();
    let _vcpu = vm.vcpu(0);
    assert_eq!(vm.call(ioctl::CREATE_IRQCHIP, 0), error(Errno::EINVAL));
    assert_eq!(vm.call(ioctl::SET_BOOT_CPU_ID, 1), error(Errno::EBUSY));
    assert_eq!(vm.with(ioctl::SET_IDENTITY_MAP_ADDR, &0x1000u64), error(Errno::EINVAL));
    let split = KvmEnableCap {
        cap: capability::CAP_SPLIT_IRQCHIP,
        args: [24, 0, 0, 0],
        ..Default::default()
    };
    assert_eq!(vm.with(ioctl::ENABLE_CAP, &split), error(Errno::EEXIST));
    let halts = KvmEnableCap {
        cap: capability::CAP_X86_DISABLE_EXITS,
        args: [capability::X86_DISABLE_EXITS_HLT, 0, 0, 0],
        ..Default::default()
    };
    assert_eq!(vm.with(ioctl::ENABLE_CAP, &halts), error(Errno::EINVAL));
    let ids =
        KvmEnableCap { cap: capability::CAP_MAX_VCPU_ID, args: [8, 0, 0, 0], ..Default::default() };
    assert_eq!(vm.with(ioctl::ENABLE_CAP, &ids), error(Errno::EINVAL));
}

/// An NMI that merges with none: two can wait, and both are still there after KVM_SET_VCPU_EVENTS.
#[test]
fn as_many_nmis_wait_as_were_saved() {
    let vm = vm();
    let (from, to) = (vm.vcpu(0), vm.vcpu(1));
    for (given, kept) in [(1, 1), (2, 2), (3, 2), (0, 0)] {
        let mut events: KvmVcpuEvents = from.get(ioctl::GET_VCPU_EVENTS);
        events.nmi.pending = given;
        assert_eq!(from.with(ioctl::SET_VCPU_EVENTS, &events), 0);
        let events: KvmVcpuEvents = from.get(ioctl::GET_VCPU_EVENTS);
        assert_eq!(events.nmi.pending, kept);
        assert_eq!(to.with(ioctl::SET_VCPU_EVENTS, &events), 0);
        assert_eq!(to.get::<KvmVcpuEvents>(ioctl::GET_VCPU_EVENTS).nmi.pending, kept);
    }
}

#[test]
fn a_split_irqchip_is_the_local_apics_alone() {
    let vm = vm();
    let split = |routes| {
        let args = [routes, 0, 0, 0];
        let cap = capability::CAP_SPLIT_IRQCHIP;
        vm.with(ioctl::ENABLE_CAP, &KvmEnableCap { cap, args, ..Default::default() })
    };
    assert_eq!([4097, u64::MAX].map(split), [error(Errno::EINVAL); 2]);
    assert_eq!(split(4096), 0);
    assert_eq!([4096, 4097].map(split), [error(Errno::EEXIST), error(Errno::EINVAL)]);
    assert_eq!(vm.call(ioctl::CREATE_IRQCHIP, 0), error(Errno::EEXIST));
    assert_eq!(vm.with(ioctl::CREATE_PIT2, &KvmPitConfig::default()), error(Errno::ENOENT));
    let chip = KvmIrqchip { chip_id: IRQCHIP_IOAPIC, ..Default::default() };
    assert_eq!(vm.with(ioctl::SET_IRQCHIP, &chip), error(Errno::ENXIO));
    let vcpu = vm.vcpu(0);
    let interrupt = |irq| vcpu.with(ioctl::INTERRUPT, &KvmInterrupt { irq });
    assert_eq!(interrupt(256), error(Errno::EINVAL));
    assert_eq!([interrupt(0x40), interrupt(0x41)], [0, error(Errno::EEXIST)]);
    // It waits for the local APIC to take it, and is no state before.
    let events: KvmVcpuEvents = vcpu.get(ioctl::GET_VCPU_EVENTS);
    assert_eq!(events.interrupt.injected, 0);
    assert_eq!(vcpu.with(ioctl::SET_VCPU_EVENTS, &events), 0);
    assert_eq!(interrupt(0x41), error(Errno::EEXIST));
}

#[test]
fn controllers_are_made_once_and_keep_their_state() {
    let vm = vm();
    let mut chip = KvmIrqchip { chip_id: IRQCHIP_IOAPIC, ..Default::default() };
    assert_eq!(vm.fill(ioctl::GET_IRQCHIP, &mut chip), error(Errno::ENXIO));
    assert_eq!(vm.with(ioctl::CREATE_PIT2, &KvmPitConfig::default()), error(Errno::ENOENT));
    assert_eq!(vm.call(ioctl::CREATE_IRQCHIP, 0), 0);
    assert_eq!(vm.call(ioctl::CREATE_IRQCHIP, 0), error(Errno::EEXIST));
    assert_eq!(vm.with(ioctl::CREATE_PIT2, &KvmPitConfig::default()), 0);
    assert_eq!(vm.with(ioctl::CREATE_PIT2, &KvmPitConfig::default()), error(Errno::EEXIST));

    assert_eq!(vm.fill(ioctl::GET_IRQCHIP, &mut chip), 0);
    let mut state: KvmIoapicState = chip.read();
    assert_eq!(state.base_address, 0xfec0_0000);
    state.redirtbl[5] = 0x1_0000 | 0x35;
    chip.write(&state);
    assert_eq!(vm.with(ioctl::SET_IRQCHIP, &chip), 0);
    chip.write(&KvmIoapicState::default());
    assert_eq!(vm.fill(ioctl::GET_IRQCHIP, &mut chip), 0);
    assert_eq!(chip.read::<KvmIoapicState>(), state);

    let mut pit: KvmPitState2 = vm.get(ioctl::GET_PIT2);
    pit.flags = 2;
    assert_eq!(vm.with(ioctl::SET_PIT2, &pit), 0);
    assert_eq!(vm.get::<KvmPitState2>(ioctl::GET_PIT2).flags, 2);
}

#[test]
fn a_vcpu_with_a_local_apic_saves_its_page_and_one_without_has_none() {
    let with = vm();
    assert_eq!(with.call(ioctl::CREATE_IRQCHIP, 0), 0);
    let vcpu = with.vcpu(1);
    let mut page = KvmLapicState { regs: [0; 1024] };
    assert_eq!(vcpu.fill(ioctl::GET_LAPIC, &mut page), 0);
    assert_eq!(page.regs[0x23], 1);
    page.regs[0x80] = 0x20;
    assert_eq!(vcpu.with(ioctl::SET_LAPIC, &page), 0);
    assert_eq!(vcpu.get::<KvmSregs>(ioctl::GET_SREGS).cr8, 2);
    assert_eq!(vcpu.get::<KvmMpState>(ioctl::GET_MP_STATE).mp_state, MP_STATE_UNINITIALIZED);

    let without = vm();
    let vcpu = without.vcpu(0);
    assert_eq!(vcpu.fill(ioctl::GET_LAPIC, &mut page), error(Errno::EINVAL));
    assert_eq!(vcpu.get::<KvmMpState>(ioctl::GET_MP_STATE).mp_state, MP_STATE_RUNNABLE);
    let interrupt = KvmInterrupt { irq: 0x41 };
    assert_eq!(vcpu.with(ioctl::INTERRUPT, &interrupt), 0);
    // Without a local APIC in the kernel the second takes the place of the first.
    assert_eq!(vcpu.with(ioctl::INTERRUPT, &interrupt), 0);
}

#[test]
fn slots_are_made_and_logged() {
    let vm = vm();
    let memory = vec![0u64; 3 * 512];
    let base = (memory.as_ptr() as u64).next_multiple_of(4096);
    let region = KvmUserspaceMemoryRegion {
        slot: 1,
        flags: MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: 0x10000,
        memory_size: 0x2000,
        userspace_addr: base,
    };
    assert_eq!(vm.with(ioctl::SET_USER_MEMORY_REGION, &region), 0);
    let other = KvmUserspaceMemoryRegion { slot: 2, guest_phys_addr: 0x11000, ..region };
    assert_eq!(vm.with(ioctl::SET_USER_MEMORY_REGION, &other), error(Errno::EEXIST));
    let mut bits = [u64::MAX];
    let log = KvmDirtyLog { slot: 1, dirty_bitmap: bits.as_mut_ptr() as u64, ..Default::default() };
    assert_eq!(vm.with(ioctl::GET_DIRTY_LOG, &log), 0);
    assert_eq!(bits, [0]);
    let absent = KvmDirtyLog { slot: 2, ..log };
    assert_eq!(vm.with(ioctl::GET_DIRTY_LOG, &absent), error(Errno::ENOENT));
    assert_eq!(
        vm.with(ioctl::GET_DIRTY_LOG, &KvmDirtyLog { slot: 40_000, ..log }),
        error(Errno::EINVAL)
    );
}

/// A VM with slot 1 of `pages` pages, whose writes are logged, over memory that nobody touches.
fn logging(pages: u64) -> Fd {
    let vm = vm();
    let region = KvmUserspaceMemoryRegion {
        slot: 1,
        flags: MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: 0x10000,
        memory_size: pages << 12,
        userspace_addr: 1 << 32,
    };
    assert_eq!(vm.with(ioctl::SET_USER_MEMORY_REGION, &region), 0);
    vm
}

#[test]
fn the_log_is_cleared_by_words_or_to_the_slots_end() {
    let vm = logging(130);
    let bits = [0u64; 4];
    let whole = KvmClearDirtyLog {
        slot: 1,
        num_pages: 130,
        first_page: 0,
        dirty_bitmap: bits.as_ptr() as u64,
    };
    let clear = |first_page, num_pages, dirty_bitmap| {
        let part = KvmClearDirtyLog { first_page, num_pages, dirty_bitmap, ..whole };
        vm.with(ioctl::CLEAR_DIRTY_LOG, &part)
    };
    for (first, pages) in [(0, 130), (0, 64), (64, 66), (128, 2)] {
        assert_eq!(clear(first, pages, whole.dirty_bitmap), 0, "{first} {pages}");
    }
    for (first, pages) in [(1, 1), (0, 131), (0, 10), (64, 67), (192, 1), (!63, 64)] {
        let refused = clear(first, pages, whole.dirty_bitmap);
        assert_eq!(refused, error(Errno::EINVAL), "{first} {pages}");
        // Before the bits are read, as on stock KVM.
        assert_eq!(clear(first, pages, 0), error(Errno::EINVAL), "{first} {pages}");
    }
    assert_eq!(clear(0, 130, 0), error(Errno::EFAULT));
    assert_eq!(clear(128, 0, 0), 0);
    let absent = KvmClearDirtyLog { slot: 2, ..whole };
    assert_eq!(vm.with(ioctl::CLEAR_DIRTY_LOG, &absent), error(Errno::ENOENT));
}

#[test]
fn slots_may_lie_where_the_host_has_user_memory() {
    let region = KvmUserspaceMemoryRegion {
        slot: 1,
        memory_size: 0x2000,
        userspace_addr: 1 << 50,
        ..Default::default()
    };
    let last = KvmUserspaceMemoryRegion { userspace_addr: (1 << 47) - 0x3000, ..region };
    let set = |region| vm().with(ioctl::SET_USER_MEMORY_REGION, region);
    let beyond =
        KvmUserspaceMemoryRegion { userspace_addr: last.userspace_addr + 0x1000, ..region };
    assert_eq!([&region, &last, &beyond].map(set), [error(Errno::EINVAL), 0, error(Errno::EINVAL)]);
    test::set_five_levels(true);
    let last = KvmUserspaceMemoryRegion { userspace_addr: (1 << 56) - 0x3000, ..region };
    let beyond =
        KvmUserspaceMemoryRegion { userspace_addr: last.userspace_addr + 0x1000, ..region };
    assert_eq!([&region, &last, &beyond].map(set), [0, 0, error(Errno::EINVAL)]);
    test::set_five_levels(false);
}

#[test]
fn the_clock_and_the_tsc_are_set_and_read() {
    let vm = vm();
    assert_eq!(
        vm.with(ioctl::SET_CLOCK, &KvmClockData { clock: 1 << 40, ..Default::default() }),
        0
    );
    assert_eq!(vm.get::<KvmClockData>(ioctl::GET_CLOCK).clock, 1 << 40);
    let vcpu = vm.vcpu(0);
    let khz = i64::from(host().offer.tsc_khz);
    assert_eq!(vcpu.call(ioctl::GET_TSC_KHZ, 0), khz);
    assert_eq!(vcpu.call(ioctl::SET_TSC_KHZ, khz as u64), 0);
    // Without scaling no other can be had.
    assert_eq!(vcpu.call(ioctl::SET_TSC_KHZ, khz as u64 / 2), error(Errno::EINVAL));
    assert_eq!(vcpu.call(ioctl::GET_TSC_KHZ, 0), khz);
}

#[repr(C)]
struct Msrs {
    count: u32,
    pad: u32,
    entries: [KvmMsrEntry; 2],
}

#[test]
fn msrs_are_set_up_to_the_first_that_is_refused() {
    const STAR: u32 = 0xc000_0081;
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let entry = |index, data| KvmMsrEntry { index, reserved: 0, data };
    let mut msrs = Msrs { count: 2, pad: 0, entries: [entry(STAR, 0x33), entry(0x1234_5678, 1)] };
    assert_eq!(vcpu.with(ioctl::SET_MSRS, &msrs), 1);
    msrs.entries[0].data = 0;
    assert_eq!(vcpu.fill(ioctl::GET_MSRS, &mut msrs), 1);
    assert_eq!(msrs.entries[0].data, 0x33);
    for index in system().msr_indices().unwrap() {
        msrs.count = 1;
        msrs.entries[0] = entry(index, 0);
        assert_eq!(vcpu.fill(ioctl::GET_MSRS, &mut msrs), 1, "{index:#x} is listed");
    }
}

#[repr(C)]
struct Cpuid {
    count: u32,
    pad: u32,
    entries: [KvmCpuidEntry2; 64],
}

#[test]
fn the_cpuid_that_is_supported_can_be_set_and_read() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let mut table = Cpuid { count: 64, pad: 0, entries: [KvmCpuidEntry2::default(); 64] };
    let arg = std::ptr::from_mut(&mut table) as u64;
    assert_eq!(dispatch::system(&system(), ioctl::GET_SUPPORTED_CPUID, arg), Ok(0));
    assert_eq!(vcpu.with(ioctl::SET_CPUID2, &table), 0);
    let count = table.count;
    let mut back = Cpuid { count: 64, pad: 0, entries: [KvmCpuidEntry2::default(); 64] };
    assert_eq!(vcpu.fill(ioctl::GET_CPUID2, &mut back), 0);
    assert_eq!(back.count, count);
    table.entries[0].eax ^= 1;
    assert_eq!(vcpu.with(ioctl::SET_CPUID2, &table), 0);
}

#[test]
fn events_with_a_payload_need_the_capability() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let mut events: KvmVcpuEvents = vcpu.get(ioctl::GET_VCPU_EVENTS);
    assert_eq!(events.flags & VCPUEVENT_VALID_PAYLOAD, 0);
    events.flags |= VCPUEVENT_VALID_PAYLOAD;
    assert_eq!(vcpu.with(ioctl::SET_VCPU_EVENTS, &events), error(Errno::EINVAL));
    let cap = KvmEnableCap {
        cap: capability::CAP_EXCEPTION_PAYLOAD,
        args: [1, 0, 0, 0],
        ..Default::default()
    };
    assert_eq!(vm.with(ioctl::ENABLE_CAP, &cap), 0);
    events.exception =
        KvmExceptionEvent { nr: 14, pending: 1, has_error_code: 1, error_code: 2, injected: 0 };
    events.exception_has_payload = 1;
    events.exception_payload = 0x1000;
    assert_eq!(vcpu.with(ioctl::SET_VCPU_EVENTS, &events), 0);
    assert_eq!(vcpu.get::<KvmVcpuEvents>(ioctl::GET_VCPU_EVENTS), events);
}

#[test]
fn a_page_fault_that_waits_leaves_its_address_in_cr2_where_payloads_are_not_saved() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let cap = |on| KvmEnableCap {
        cap: capability::CAP_EXCEPTION_PAYLOAD,
        args: [on, 0, 0, 0],
        ..Default::default()
    };
    assert_eq!(vm.with(ioctl::ENABLE_CAP, &cap(1)), 0);
    let events = KvmVcpuEvents {
        flags: VCPUEVENT_VALID_PAYLOAD,
        exception: KvmExceptionEvent {
            nr: 14,
            pending: 1,
            has_error_code: 1,
            ..Default::default()
        },
        exception_has_payload: 1,
        exception_payload: 0xabc000,
        ..Default::default()
    };
    assert_eq!(vcpu.with(ioctl::SET_VCPU_EVENTS, &events), 0);
    assert_eq!(vm.with(ioctl::ENABLE_CAP, &cap(0)), 0);
    assert_eq!(vcpu.get::<KvmVcpuEvents>(ioctl::GET_VCPU_EVENTS).exception.injected, 1);
    assert_eq!(vcpu.get::<KvmSregs>(ioctl::GET_SREGS).cr2, 0xabc000);
}

#[test]
fn machine_checks_are_set_up_and_injected() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    assert_eq!(vcpu.with(ioctl::X86_SETUP_MCE, &(10u64 | 1 << 8)), 0);
    assert_eq!(vcpu.with(ioctl::X86_SETUP_MCE, &33u64), error(Errno::EINVAL));
    let report = KvmX86Mce { status: 1 << 63 | 5, bank: 9, ..Default::default() };
    assert_eq!(vcpu.with(ioctl::X86_SET_MCE, &report), 0);
    let outside = KvmX86Mce { bank: 10, ..report };
    assert_eq!(vcpu.with(ioctl::X86_SET_MCE, &outside), error(Errno::EINVAL));
    let mut msrs = Msrs {
        count: 1,
        pad: 0,
        entries: [KvmMsrEntry { index: 0x401 + 9 * 4, ..Default::default() }; 2],
    };
    assert_eq!(vcpu.fill(ioctl::GET_MSRS, &mut msrs), 1);
    assert_eq!(msrs.entries[0].data, 1 << 63 | 5);
}

#[test]
fn the_mapping_has_three_pages_and_no_more() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let pages: Vec<u64> = (0..4).map(|offset| test::mmap_page(vcpu.0, offset)).collect();
    assert!(pages[..3].iter().all(|page| *page != 0));
    assert_ne!(pages[0], pages[1]);
    assert_eq!(pages[3], 0);
}

#[test]
fn a_vcpu_outlives_the_vms_own_file() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    drop(vm);
    assert_eq!(vcpu.get::<KvmRegs>(ioctl::GET_REGS).rip, 0xfff0);
}

#[test]
fn without_its_address_space_a_vm_answers_eio() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    test::release_mm();
    assert_eq!(vm.call(ioctl::CREATE_VCPU, 1), error(Errno::EIO));
    assert_eq!(vcpu.call(ioctl::RUN, 0), error(Errno::EIO));
}

/// The value of a statistic in a whole statistics file, by its name.
fn statistic(file: &[u8], name: &str) -> Option<u64> {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    let (name_size, count, descs, data) = (word(4), word(8), word(16), word(20));
    let desc = (0..count).map(|n| descs + n * (16 + name_size)).find(|at| {
        let field = &file[at + 16..at + 16 + name_size];
        field.split(|b| *b == 0).next() == Some(name.as_bytes())
    })?;
    let at = data + word(desc + 8);
    Some(u64::from_le_bytes(file[at..at + 8].try_into().unwrap()))
}

fn whole(stats: &Fd) -> Vec<u8> {
    let mut file = vec![0; 32768];
    let len = test::read_at(stats.0, 0, &mut file);
    assert!(len > 0, "{len}");
    file.truncate(len as usize);
    file
}

#[test]
fn statistics_are_read_from_files_that_outlive_the_vm() {
    let vm = vm();
    let vcpu = vm.vcpu(2);
    let of_vm = Fd(vm.call(ioctl::GET_STATS_FD, 0) as i32);
    let of_vcpu = Fd(vcpu.call(ioctl::GET_STATS_FD, 0) as i32);
    drop(vcpu);
    drop(vm);
    let (vm, vcpu) = (whole(&of_vm), whole(&of_vcpu));
    assert!(vcpu[24..].starts_with(b"kvm-") && vcpu[24..72].ends_with(b"\0"));
    assert_eq!(statistic(&vcpu, "exits"), Some(0));
    assert_eq!(statistic(&vm, "page_tables_allocated"), Some(1));
    assert_eq!(statistic(&vm, "no_such_thing"), None);
    assert_eq!(of_vm.call(ioctl::GET_STATS_FD, 0), error(Errno::ENOTTY));
    let mut one = [0xffu8; 1];
    assert_eq!(test::read_at(of_vcpu.0, vcpu.len() as u64, &mut one), 0);
    assert_eq!(test::read_at(of_vcpu.0, u64::MAX, &mut one), 0);
    assert_eq!(test::read_at(of_vcpu.0, 4, &mut one), 1);
    assert_eq!(one, [48]);
}

#[test]
fn a_statistics_file_keeps_nothing_of_the_vm_alive() {
    let vm = vm();
    let directory = format!("{}-{}", host::task::current_tid(), vm.0);
    // Shown as long as the VM is there.
    let shown = || test::debug_file(&format!("{directory}/exits")).is_some();
    let vcpu = vm.vcpu(2);
    let _of_vm = Fd(vm.call(ioctl::GET_STATS_FD, 0) as i32);
    let _of_vcpu = Fd(vcpu.call(ioctl::GET_STATS_FD, 0) as i32);
    drop(vm);
    assert!(shown());
    drop(vcpu);
    assert!(!shown());
}

#[test]
fn the_vms_file_takes_its_irqfds_with_it() {
    let old = vm();
    assert_eq!(old.call(ioctl::CREATE_IRQCHIP, 0), 0);
    let _vcpu = old.vcpu(0);
    let _stats = Fd(old.call(ioctl::GET_STATS_FD, 0) as i32);
    let event = test::eventfd();
    let irqfd = KvmIrqfd { fd: event as u32, gsi: 4, ..Default::default() };
    assert_eq!(old.with(ioctl::IRQFD, &irqfd), 0);
    // Somebody takes the signals.
    test::eventfd_signal(event, 1);
    assert_eq!(test::eventfd_read(event), 0);
    drop(old);
    test::eventfd_signal(event, 1);
    assert_eq!(test::eventfd_read(event), 1);
    let new = vm();
    assert_eq!(new.call(ioctl::CREATE_IRQCHIP, 0), 0);
    assert_eq!(new.with(ioctl::IRQFD, &irqfd), 0);
    test::eventfd_signal(event, 1);
    assert_eq!(test::eventfd_read(event), 0);
    test::eventfd_close(event);
}

#[test]
fn a_vm_is_seen_in_debugfs_until_the_last_of_its_files_is_closed() {
    let vm = vm();
    let directory = format!("{}-{}", host::task::current_tid(), vm.0);
    let file = |name: &str| test::debug_file(&format!("{directory}/{name}"));
    let vcpu = vm.vcpu(3);
    assert_eq!(file("page_tables_allocated").as_deref(), Some("1\n"));
    assert_eq!(file("exits").as_deref(), Some("0\n"));
    assert_eq!(file("halt_wait_hist").as_deref(), Some("0\n"));
    assert!(file("exit_reasons").unwrap().starts_with("reason "));
    assert!(file("vcpu3/exit_cycles").unwrap().starts_with("reason "));
    assert_eq!(file("vcpu0/exit_cycles"), None);
    drop(vm);
    assert!(file("exits").is_some());
    drop(vcpu);
    assert_eq!(file("exits"), None);
}

#[test]
fn a_vcpus_directory_has_what_stock_kvm_shows_there() {
    let files = |directory: &str| {
        ["guest_mode", "tsc-offset", "lapic_timer_advance_ns", "tsc-scaling-ratio"]
            .map(|name| test::debug_file(&format!("{directory}/vcpu0/{name}")))
    };
    for irqchip in [false, true] {
        let vm = vm();
        let directory = format!("{}-{}", host::task::current_tid(), vm.0);
        if irqchip {
            assert_eq!(vm.call(ioctl::CREATE_IRQCHIP, 0), 0);
        }
        let vcpu = vm.vcpu(0);
        let offset = u64::MAX - 41;
        let attribute =
            KvmDeviceAttr { flags: 0, group: 0, attr: 0, addr: std::ptr::from_ref(&offset) as u64 };
        assert_eq!(vcpu.with(ioctl::SET_DEVICE_ATTR, &attribute), 0);
        let [mode, offset, advance, ratio] = files(&directory);
        assert_eq!(mode.as_deref(), Some("0\n"));
        // It has a sign.
        assert_eq!(offset.as_deref(), Some("-42\n"));
        assert_eq!(advance.as_deref(), irqchip.then_some("0\n"));
        // This CPU does not scale.
        assert_eq!(ratio, None);
    }
}

/// The TSC of then would be less than what the VMM has read before.
#[test]
fn every_command_of_a_vcpu_knows_that_the_host_has_slept() {
    let vm = vm();
    let vcpu = vm.vcpu(0);
    let offset = |vcpu: &Fd| {
        let mut value = 0u64;
        let attribute = KvmDeviceAttr {
            flags: 0,
            group: 0,
            attr: 0,
            addr: std::ptr::from_mut(&mut value) as u64,
        };
        assert_eq!(vcpu.with(ioctl::GET_DEVICE_ATTR, &attribute), 0);
        value
    };
    let before = offset(&vcpu);
    test::clock().sleep(9, 1_000);
    assert_eq!(offset(&vcpu), before.wrapping_add(1_000));
}
