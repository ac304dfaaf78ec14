//! What KVM_RUN leaves of the thread that calls it: segment bases, selectors, its local descriptor
//! table, and the ways into the kernel. The guest has all of them different, and hostile.

use std::arch::asm;
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use kvm_bindings::kvm_debugregs;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::guest::{Chip, Guest};
use crate::oracle::{Vendor, vendor};
use crate::outcome::{Answer, Errno, Outcome, equal, fail, holds, skip};
use crate::runner::tests;

tests!("host_thread":
    segment_bases_survive,
    a_selector_of_the_local_table_survives,
    a_local_selector_that_has_gone_harms_nobody,
    the_local_table_may_change_while_a_guest_runs,
    a_local_data_selector_may_go_while_a_guest_runs,
    threads_with_bases_of_their_own_keep_them,
    a_child_of_the_thread_has_its_segments,
    the_ways_into_the_kernel_survive,
    breakpoints_of_the_thread_stay_armed,
);

guest_code!(ask, 64, "0: incq RESULT", "out %al, $PORT_MARK", "jmp 0b");
guest_code!(spin, 64, "0: incq RESULT", "pause", "jmp 0b");

/// A guest whose every register that VMRUN leaves alone would be fatal in the host.
fn hostile(code: &[u8]) -> Outcome<Guest> {
    const KERNEL: u64 = 0xffff_8880_dead_0000;
    let guest = Guest::new(Chip::None, code)?;
    let vcpu = guest.vcpu();
    let mut sregs = vcpu.sregs()?;
    (sregs.fs.base, sregs.gs.base) = (KERNEL, KERNEL + 0x1000);
    sregs.ldt.base = KERNEL + 0x2000;
    sregs.ldt.limit = 0xffff;
    (sregs.ldt.selector, sregs.ldt.present, sregs.ldt.unusable) = (0x48, 1, 0);
    (sregs.ldt.type_, sregs.ldt.s) = (2, 0);
    vcpu.set_sregs(&sregs)?;
    // SYSENTER_CS, _ESP, _EIP, STAR, LSTAR, CSTAR, SYSCALL_MASK, KERNEL_GS_BASE.
    let msrs =
        [0x174, 0x175, 0x176, 0xc000_0081, 0xc000_0082, 0xc000_0083, 0xc000_0084, 0xc000_0102];
    for (n, msr) in (0u64..).zip(msrs) {
        let value = if msr == 0x174 { 0x68 } else { KERNEL + 0x3000 + n };
        holds("MSR taken", vcpu.set_msr(msr, value)?, msr)?;
    }
    Ok(guest)
}

fn run_some(guest: &Guest) -> Outcome {
    for _ in 0..20 {
        guest.reach_mark()?;
    }
    Ok(())
}

const ARCH_SET_GS: i32 = 0x1001;
const ARCH_GET_FS: i32 = 0x1003;
const ARCH_GET_GS: i32 = 0x1004;

fn set_gs_base(base: u64) -> Outcome {
    // SAFETY: nothing in this process uses GS.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) } {
        0 => Ok(()),
        _ => fail(format!("ARCH_SET_GS: {}", Errno::last())),
    }
}

fn base(which: i32) -> u64 {
    let mut base = 0u64;
    // SAFETY: the kernel writes a word.
    unsafe { libc::syscall(libc::SYS_arch_prctl, which, &raw mut base) };
    base
}

fn at_gs() -> u64 {
    let value;
    // SAFETY: GS names a word of ours.
    unsafe { asm!("mov {}, gs:[0]", out(reg) value, options(nostack, readonly)) };
    value
}

fn gs_selector() -> u16 {
    let selector: u16;
    // SAFETY: reads a register.
    unsafe { asm!("mov {:x}, gs", out(reg) selector, options(nomem, nostack)) };
    selector
}

fn load_gs(selector: u16) {
    // SAFETY: nothing but these tests uses GS; the selector names a data segment, or is null.
    unsafe { asm!("mov gs, {:x}", in(reg) selector, options(nostack)) };
}

/// A page below 4 GiB, which a descriptor can name.
fn low_page() -> Outcome<*mut u8> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
    // SAFETY: a new mapping.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, kind, -1, 0) };
    if page == libc::MAP_FAILED {
        return fail(format!("memory below 4 GiB: {}", Errno::last()));
    }
    Ok(page.cast())
}

/// `struct user_desc`.
#[repr(C)]
struct UserDescriptor {
    entry: u32,
    base: u32,
    limit: u32,
    /// seg_32bit 0, contents 1-2, read_exec_only 3, limit_in_pages 4, seg_not_present 5, useable 6.
    flags: u32,
}

/// modify_ldt: entry 0 is a data segment at `base`, or is taken away.
fn set_local_descriptor(base: Option<u32>) -> Outcome {
    const WRITE: i32 = 0x11;
    let (limit, flags) = if base.is_some() { (0xfff, 0x41) } else { (0, 0x28) };
    let descriptor = UserDescriptor { entry: 0, base: base.unwrap_or(0), limit, flags };
    let bytes = size_of::<UserDescriptor>();
    // SAFETY: a whole structure.
    match unsafe { libc::syscall(libc::SYS_modify_ldt, WRITE, &raw const descriptor, bytes) } {
        0 => Ok(()),
        _ if Errno::last() == Errno(libc::ENOSYS) => skip("this kernel has no modify_ldt"),
        _ => fail(format!("modify_ldt: {}", Errno::last())),
    }
}

/// The selector of entry 0 of the local table.
const LOCAL: u16 = 7;

thread_local! {
    static OWN: AtomicU64 = const { AtomicU64::new(0) };
}

fn segment_bases_survive() -> Outcome {
    let guest = hostile(ask())?;
    let word = [0x1122_3344_5566_7788u64, 0];
    set_gs_base(word.as_ptr() as u64)?;
    OWN.with(|own| own.store(77, Relaxed));
    let before = base(ARCH_GET_FS);
    for _ in 0..20 {
        guest.reach_mark()?;
        equal("GS base", base(ARCH_GET_GS), word.as_ptr() as u64)?;
        equal("the word at GS", at_gs(), word[0])?;
        equal("FS base", base(ARCH_GET_FS), before)?;
        equal("a variable of the thread", OWN.with(|own| own.load(Relaxed)), 77)?;
    }
    Ok(())
}

fn a_selector_of_the_local_table_survives() -> Outcome {
    let guest = hostile(ask())?;
    let page = low_page()?;
    // SAFETY: our page.
    unsafe { page.cast::<u64>().write(0x5566) };
    set_local_descriptor(Some(page as u32))?;
    load_gs(LOCAL);
    for _ in 0..20 {
        guest.reach_mark()?;
        equal("GS", gs_selector(), LOCAL)?;
        equal("the word at GS", at_gs(), 0x5566)?;
        // The table itself is loaded: the selector can be loaded anew.
        load_gs(LOCAL);
        equal("the word at GS, loaded anew", at_gs(), 0x5566)?;
    }
    Ok(())
}

fn a_local_selector_that_has_gone_harms_nobody() -> Outcome {
    let guest = hostile(ask())?;
    let page = low_page()?;
    for _ in 0..20 {
        set_local_descriptor(Some(page as u32))?;
        load_gs(LOCAL);
        // The register keeps what it has; the table does not.
        set_local_descriptor(None)?;
        guest.reach_mark()?;
        holds("GS kept or emptied", matches!(gs_selector(), LOCAL | 0), gs_selector())?;
    }
    load_gs(0);
    run_some(&guest)
}

fn the_local_table_may_change_while_a_guest_runs() -> Outcome {
    let guest = hostile(spin())?;
    let pages = [low_page()?, low_page()?];
    for (n, page) in (0x10u64..).zip(pages) {
        // SAFETY: our page.
        unsafe { page.cast::<u64>().write(n) };
    }
    let bases = pages.map(|page| page as u32);
    set_local_descriptor(Some(bases[0]))?;
    let done = AtomicBool::new(false);
    let me = crate::machine::threads::Target::new();
    crate::machine::threads::prepare();
    me.is_me();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut turns = 0;
            while !done.load(Relaxed) {
                set_local_descriptor(Some(bases[turns % 2]))?;
                me.kick();
                turns += 1;
                std::thread::yield_now();
            }
            Ok(turns)
        });
        let mut result = Ok(());
        for _ in 0..200 {
            load_gs(LOCAL);
            let _ = guest.vcpu().run();
            load_gs(LOCAL);
            result = result.and(holds("one of the words", matches!(at_gs(), 0x10 | 0x11), at_gs()));
        }
        done.store(true, Relaxed);
        let turns = other.join().unwrap_or_else(|_| fail("the other thread died"))?;
        holds("changes", turns > 0, turns)?;
        result
    })
}

fn data_selectors() -> (u16, u16) {
    let (ds, es): (u16, u16);
    // SAFETY: reads registers.
    unsafe {
        asm!("mov {:x}, ds", "mov {:x}, es", out(reg) ds, out(reg) es, options(nomem, nostack))
    };
    (ds, es)
}

fn load_data_selectors(selector: u16) {
    // SAFETY: code of 64 bits uses neither; the selector names a data segment, or is null.
    unsafe { asm!("mov ds, {0:x}", "mov es, {0:x}", in(reg) selector, options(nostack)) };
}

/// The table changes by interrupts, behind which the same KVM_RUN goes on: the kernel empties the registers then.
fn a_local_data_selector_may_go_while_a_guest_runs() -> Outcome {
    if vendor() == Vendor::Amd {
        return skip("the lab's emulated AMD machine stands still then, with stock KVM as well");
    }
    let guest = hostile(spin())?;
    let base = low_page()? as u32;
    let me = crate::machine::threads::Target::new();
    crate::machine::threads::prepare();
    me.is_me();
    for _ in 0..10 {
        set_local_descriptor(Some(base))?;
        load_data_selectors(LOCAL);
        let before = guest.result(0);
        let (ended, ran) = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // The guest has to run, for the kernel to find the selectors away.
                let began = std::time::Instant::now();
                while guest.result(0) == before && began.elapsed().as_secs() < 20 {
                    std::thread::yield_now();
                }
                let mut result = Ok(());
                for _ in 0..20 {
                    result = result.and(set_local_descriptor(None));
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    result = result.and(set_local_descriptor(Some(base)));
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                result = result.and(set_local_descriptor(None));
                me.kick();
                result
            });
            let ran = guest.vcpu().run();
            (other.join(), ran)
        });
        ended.unwrap_or_else(|_| fail("the other thread died"))?;
        let _ = ran;
        let left = data_selectors();
        load_data_selectors(0);
        holds(
            "DS and ES kept or emptied",
            [left.0, left.1].iter().all(|s| matches!(*s, LOCAL | 0)),
            left.0,
        )?;
    }
    run_some(&hostile(ask())?)
}

fn threads_with_bases_of_their_own_keep_them() -> Outcome {
    let guest = hostile(ask())?;
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let word = [0xaaaa_u64];
            set_gs_base(word.as_ptr() as u64)?;
            while !ended.load(Relaxed) {
                std::thread::yield_now();
                equal("the other thread's word", at_gs(), word[0])?;
            }
            Ok(())
        });
        let word = [0xbbbb_u64];
        let mut result = set_gs_base(word.as_ptr() as u64);
        for _ in 0..200 {
            result = result.and(guest.reach_mark()).and(equal("this one's", at_gs(), word[0]));
            std::thread::yield_now();
        }
        ended.store(true, Relaxed);
        other.join().unwrap_or_else(|_| fail("the other thread died"))?;
        result
    })
}

fn a_child_of_the_thread_has_its_segments() -> Outcome {
    let guest = hostile(ask())?;
    let word = [0xcccc_u64];
    set_gs_base(word.as_ptr() as u64)?;
    run_some(&guest)?;
    // SAFETY: the child only looks at a register and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = at_gs() == word[0] && base(ARCH_GET_GS) == word.as_ptr() as u64;
        // SAFETY: ends the child.
        unsafe { libc::_exit(if right { 0 } else { 1 }) };
    }
    let patience = std::time::Duration::from_secs(10);
    equal("the child's verdict", crate::runner::await_end(child, patience), Some(0))
}

fn the_ways_into_the_kernel_survive() -> Outcome {
    // SYSENTER_CS, _ESP, _EIP, STAR, LSTAR, CSTAR, SYSCALL_MASK.
    const MSRS: [u64; 7] =
        [0x174, 0x175, 0x176, 0xc000_0081, 0xc000_0082, 0xc000_0083, 0xc000_0084];
    let Ok(cpu) = File::open("/dev/cpu/0/msr") else {
        return skip("the module msr is not loaded: its device shows the host's MSRs");
    };
    let read = || {
        MSRS.map(|msr| {
            let mut value = [0; 8];
            cpu.read_exact_at(&mut value, msr).map(|()| u64::from_le_bytes(value)).ok()
        })
    };
    let before = read();
    holds("MSRs that can be read", before.iter().all(Option::is_some), before)?;
    let guest = hostile(ask())?;
    for _ in 0..20 {
        guest.reach_mark()?;
        equal("the host's MSRs", read(), before)?;
    }
    Ok(())
}

/// Counts the thread's writes to a word by one of the CPU's breakpoints.
fn count_writes(word: &AtomicU64) -> Result<File, Errno> {
    // `struct perf_event_attr`, its second version: PERF_TYPE_BREAKPOINT and the size, no sampling, neither the kernel's writes nor a
    // hypervisor's, HW_BREAKPOINT_W, the address, eight bytes.
    const SIZE: usize = 72;
    let attributes: [u64; SIZE / 8] =
        [5 | (SIZE as u64) << 32, 0, 0, 0, 0, 1 << 5 | 1 << 6, 2 << 32, word.as_ptr() as u64, 8];
    // SAFETY: perf_event_open(2) of this thread on any CPU; it reads the attributes.
    let file =
        unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), 0, -1, -1, 0) };
    match i32::try_from(file) {
        // SAFETY: a new file of ours.
        Ok(file) if file >= 0 => Ok(unsafe { File::from_raw_fd(file) }),
        _ => Err(Errno::last()),
    }
}

fn breakpoints_of_the_thread_stay_armed() -> Outcome {
    static WORD: AtomicU64 = AtomicU64::new(0);
    let writes = match count_writes(&WORD) {
        Ok(file) => file,
        Err(errno) => return skip(format!("no breakpoint to be had: {errno}")),
    };
    let seen = || {
        let mut count = [0; 8];
        let read = (&writes).read(&mut count).is_ok_and(|n| n == count.len());
        read.then(|| u64::from_le_bytes(count))
    };
    WORD.store(1, Relaxed);
    let before = seen();
    if before != Some(1) {
        return skip(format!("the breakpoint counts {before:?} for one write without a guest"));
    }
    // The guest has all four, on other writes than its own.
    let guest = hostile(ask())?;
    let vcpu = guest.vcpu();
    let mut debug: kvm_debugregs = vcpu.receive(ioctl::GET_DEBUGREGS).granted("get")?;
    debug.db = [0x7000_0000, 0x7000_1000, 0x7000_2000, 0x7000_3000];
    debug.dr7 = 0x9999_04ff;
    vcpu.send(ioctl::SET_DEBUGREGS, &debug).granted("set")?;
    for n in 1..=20 {
        guest.reach_mark()?;
        WORD.store(n, Relaxed);
        equal("writes counted", seen(), Some(n + 1))?;
        let now: kvm_debugregs = vcpu.receive(ioctl::GET_DEBUGREGS).granted("get")?;
        equal("the guest's own", (now.db, now.dr7), (debug.db, debug.dr7))?;
    }
    Ok(())
}
