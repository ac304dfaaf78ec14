//! Commands of a 32-bit VMM: those whose structures hold pointers look different there. This program
//! has 64 bits; the kernel takes a system call by INT 0x80 as that of a 32-bit program all the same.

use core::arch::asm;

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::{guarded, guest_code};
use crate::machine::guest::{Chip, Guest};
use crate::machine::layout::*;
use crate::machine::threads::{Target, prepare};
use crate::outcome::{Answer, Errno, Outcome, Reply, equal, fail, skip};
use crate::runner::tests;

tests!("compat":
    plain_commands_work,
    a_filter_of_msrs_by_its_own_number,
    a_filter_of_msrs_by_the_other_number,
    bad_filters_are_refused,
    the_upper_half_of_the_dirty_logs_pointer_means_nothing,
    the_signal_mask_has_two_words,
);

/// Memory that 32 bits can name.
struct Low(*mut u8);

const LOW_BYTES: usize = 0x1_0000;

impl Low {
    fn new() -> Outcome<Self> {
        // SAFETY: a new mapping.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LOW_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT,
                -1,
                0,
            )
        };
        match at as usize {
            usize::MAX => fail(format!("no memory: {}", Errno::last())),
            _ => Ok(Self(at.cast())),
        }
    }

    /// Puts a value there and gives its address.
    fn put<T>(&self, offset: usize, value: T) -> u32 {
        assert!(offset + size_of::<T>() <= LOW_BYTES && offset.is_multiple_of(8));
        // SAFETY: within the mapping, which nobody has a reference into.
        unsafe { self.0.add(offset).cast::<T>().write(value) };
        (self.0 as usize + offset) as u32
    }

    fn read(&self, offset: usize) -> u64 {
        assert!(offset + 8 <= LOW_BYTES);
        // SAFETY: within the mapping, which nobody has a reference into; any bytes are a u64.
        unsafe { self.0.add(offset).cast::<u64>().read_unaligned() }
    }
}

impl Drop for Low {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`.
        unsafe { libc::munmap(self.0.cast(), LOW_BYTES) };
    }
}

/// ioctl as a 32-bit program calls it.
fn call(file: &impl Commands, request: u32, argument: u32) -> Reply {
    const IOCTL: u64 = 54;
    let answer: i64;
    // SAFETY: a system call; whether the kernel treats the argument well is what is being tested. RBX
    // is the compiler's own and comes back.
    unsafe {
        asm!(
            "xchg rbx, {fd}",
            "int 0x80",
            "xchg rbx, {fd}",
            fd = inout(reg) file.descriptor() as u64 => _,
            inlateout("rax") IOCTL => answer,
            in("rcx") u64::from(request),
            in("rdx") u64::from(argument),
            lateout("r8") _,
            lateout("r9") _,
            lateout("r10") _,
            lateout("r11") _,
        );
    }
    let answer = answer as i32;
    if answer < 0 { Err(Errno(-answer)) } else { Ok(answer) }
}

/// Skips where the kernel knows no 32-bit programs.
fn require() -> Outcome {
    let config = std::fs::read_to_string("/proc/sys/abi/vsyscall32");
    if config.is_err() { skip("no 32-bit programs on this kernel") } else { Ok(()) }
}

fn plain_commands_work() -> Outcome {
    require()?;
    let guest = Guest::new(Chip::Kernel, accesses())?;
    let low = Low::new()?;
    equal("version", call(&guest.system, ioctl::GET_API_VERSION as u32, 0), Ok(12))?;
    let at = low.put(0, [0_u64; 18]);
    call(guest.vcpu(), ioctl::GET_REGS as u32, at).granted("KVM_GET_REGS")?;
    equal("rip", low.read(16 * 8), guest.vcpu().regs()?.rip)
}

guest_code!(
    // Reads the MSR of ARGUMENT, again and again.
    accesses,
    64,
    "0: mov ARGUMENT, %ecx",
    guarded!("rdmsr"),
    "out %al, $PORT_MARK",
    "jmp 0b",
);

const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// `struct kvm_msr_filter_range` of a 32-bit program.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Range {
    flags: u32,
    nmsrs: u32,
    base: u32,
    bitmap: u32,
}

/// `struct kvm_msr_filter` of a 32-bit program.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Filter {
    flags: u32,
    ranges: [Range; 16],
}

const SET_FILTER: u32 = ioctl::iow::<Filter>(0xc6) as u32;

fn denial(low: &Low) -> Filter {
    let mut filter = Filter::default();
    let bitmap = low.put(0x8000, 0_u64);
    filter.ranges[0] = Range { flags: KVM_MSR_FILTER_READ, nmsrs: 1, base: KERNEL_GS_BASE, bitmap };
    filter
}

fn a_filter_of_msrs_by_its_own_number() -> Outcome {
    require()?;
    let low = Low::new()?;
    let guest = Guest::new(Chip::Kernel, accesses())?;
    guest.memory.write(ARGUMENT, KERNEL_GS_BASE.into());
    guest.reach_mark()?;
    equal("faults before", guest.faults().0, 0)?;
    let at = low.put(0, denial(&low));
    call(&guest.vm, SET_FILTER, at).granted("KVM_X86_SET_MSR_FILTER")?;
    guest.reach_mark()?;
    equal("faults after", guest.faults().0, 1)?;
    let at = low.put(0, Filter::default());
    call(&guest.vm, SET_FILTER, at).granted("none")?;
    guest.reach_mark()?;
    equal("faults without", guest.faults().0, 1)
}

fn a_filter_of_msrs_by_the_other_number() -> Outcome {
    require()?;
    let low = Low::new()?;
    let guest = Guest::new(Chip::Kernel, accesses())?;
    guest.memory.write(ARGUMENT, KERNEL_GS_BASE.into());
    let mut filter = kvm_msr_filter::default();
    let bitmap = low.put(0x8000, 0_u64);
    filter.ranges[0] = kvm_msr_filter_range {
        flags: KVM_MSR_FILTER_READ,
        nmsrs: 1,
        base: KERNEL_GS_BASE,
        bitmap: bitmap as usize as *mut u8,
    };
    // Of the 64-bit layout, by its number, also in a 32-bit call.
    let at = low.put(0, filter);
    call(&guest.vm, ioctl::X86_SET_MSR_FILTER as u32, at).granted("in a 32-bit call")?;
    guest.reach_mark()?;
    equal("faults", guest.faults().0, 1)?;
    // The number of 32-bit programs is no command of a 64-bit one.
    let at = low.put(0, denial(&low));
    let answer = guest.vm.call(SET_FILTER.into(), at.into());
    answer.refused("in a 64-bit call", libc::ENOTTY)
}

fn bad_filters_are_refused() -> Outcome {
    require()?;
    let low = Low::new()?;
    let guest = Guest::new(Chip::Kernel, accesses())?;
    let set = |filter: Filter| call(&guest.vm, SET_FILTER, low.put(0, filter));
    let good = denial(&low);
    set(Filter { flags: 2, ..good }).refused("flags", libc::EINVAL)?;
    set(Filter { flags: 1, ..Default::default() }).refused("denial of all", libc::EINVAL)?;
    let mut bad = good;
    bad.ranges[0].flags = 0;
    set(bad).refused("no direction", libc::EINVAL)?;
    let mut bad = good;
    bad.ranges[0].nmsrs = 0x600 * 8 + 1;
    set(bad).refused("too many", libc::EINVAL)?;
    let mut bad = good;
    bad.ranges[0].bitmap = 8;
    set(bad).refused("no bitmap", libc::EFAULT)?;
    call(&guest.vm, SET_FILTER, 8).refused("no filter", libc::EFAULT)
}

fn the_upper_half_of_the_dirty_logs_pointer_means_nothing() -> Outcome {
    require()?;
    let low = Low::new()?;
    let guest = Guest::new(Chip::Kernel, accesses())?;
    guest.memory.write(ARGUMENT, KERNEL_GS_BASE.into());
    let bytes = guest.memory.bytes();
    guest.vm.set_slot(0, 1, 0, bytes, guest.memory.hva()).granted("with a dirty log")?;
    guest.reach_mark()?;
    let words = (bytes / 4096 / 64) as usize;
    for (what, upper) in [("clear", 0), ("all ones", u32::MAX)] {
        let bitmap = low.put(0x8000, [0_u64; 64]);
        let log = [0_u32, 0, bitmap, upper];
        let at = low.put(0, log);
        let answer = call(&guest.vm, ioctl::GET_DIRTY_LOG as u32, at);
        answer.granted(&format!("upper half {what}"))?;
        let pages: u32 = (0..words).map(|n| low.read(0x8000 + n * 8).count_ones()).sum();
        equal("a page or more", pages > 0, true)?;
        guest.reach_mark()?;
        // The guest writes nothing by itself.
        guest.memory.write(ARGUMENT, 0x4567_0000);
        guest.reach_mark()?;
        guest.memory.write(ARGUMENT, KERNEL_GS_BASE.into());
    }
    if guest.system.extension(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2) == 0 {
        return Ok(());
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, ..Default::default() };
    cap.args[0] = 1;
    guest.vm.send(ioctl::ENABLE_CAP, &cap).granted("clearing by hand")?;
    const CLEAR: u32 = ioctl::iowr::<kvm_clear_dirty_log>(0xc0) as u32;
    for upper in [0, u32::MAX] {
        let bitmap = low.put(0x8000, [u64::MAX; 64]);
        let at = low.put(0, [0_u32, 64, 0, 0, bitmap, upper]);
        call(&guest.vm, CLEAR, at).granted("KVM_CLEAR_DIRTY_LOG")?;
    }
    Ok(())
}

guest_code!(spin, 64, "0: pause", "jmp 0b");

fn the_signal_mask_has_two_words() -> Outcome {
    require()?;
    let low = Low::new()?;
    let guest = Guest::new(Chip::None, spin())?;
    prepare();
    let mask = |len, words: [u32; 2]| {
        let at = low.put(0, [len, words[0], words[1]]);
        call(guest.vcpu(), ioctl::SET_SIGNAL_MASK as u32, at)
    };
    for len in [0, 4, 12, 16] {
        mask(len, [0; 2]).refused(&format!("{len} bytes"), libc::EINVAL)?;
    }
    let me = Target::new();
    me.is_me();
    set_blocked(libc::SIG_BLOCK);
    mask(8, [0; 2]).granted("nothing blocked")?;
    me.kick();
    let answer = guest.vcpu().run().map(drop);
    set_blocked(libc::SIG_UNBLOCK);
    answer.refused("KVM_RUN", libc::EINTR)?;
    call(guest.vcpu(), ioctl::SET_SIGNAL_MASK as u32, 0).granted("none").map(drop)
}

fn set_blocked(how: i32) {
    // SAFETY: a set of our own.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut set, libc::SIGUSR1);
        libc::pthread_sigmask(how, &set, std::ptr::null_mut());
    }
}
