//! Statistics: the files of KVM_GET_STATS_FD (KVM API §4.131) and what is counted there.

use std::os::fd::AsRawFd;

use super::nested_state;
use crate::kvm::file::System;
use crate::kvm::ioctl;
use crate::kvm::stats::{Described, Stats};
use crate::machine::code::{done, guest_code, hypercall};
use crate::machine::guest::{Chip, Guest};
use crate::machine::memory::Memory;
use crate::oracle;
use crate::outcome::{Answer, Errno, Outcome, equal, holds};
use crate::runner::tests;

tests!("statistics":
    the_first_names_are_kvms_in_kvms_order,
    the_parts_do_not_overlap_and_every_value_is_in_the_file,
    the_id_names_the_thread_that_made_it,
    any_piece_is_that_piece_of_the_whole,
    behind_the_end_there_is_nothing,
    offsets_that_cannot_be_are_refused,
    a_buffer_that_is_not_there_is_efault,
    the_file_is_for_reading_only,
    it_is_read_by_position_too,
    it_outlives_the_vm_and_its_vcpus,
    another_process_may_read_it,
    many_files_may_be_open,
    exits_are_counted,
    page_tables_and_pages_are_counted,
    runs_of_a_guests_guest_are_counted,
);

const CUMULATIVE: u32 = 0;
const INSTANT: u32 = 1;
const PEAK: u32 = 2;
const LOG_HISTOGRAM: u32 = 4;
const SECONDS: u32 = 2 << 4;
const BOOLEAN: u32 = 4 << 4;

/// Stock KVM of 6.12 has it not yet.
const SINCE_7_3: &str = "mmu_shadow_pages";

/// KVM's statistics of a VM: name, flags, exponent, words.
const VM: [(&str, u32, i16, u16); 16] = [
    ("remote_tlb_flush", CUMULATIVE, 0, 1),
    ("remote_tlb_flush_requests", CUMULATIVE, 0, 1),
    ("mmu_shadow_zapped", CUMULATIVE, 0, 1),
    ("mmu_pte_write", CUMULATIVE, 0, 1),
    ("mmu_pde_zapped", CUMULATIVE, 0, 1),
    ("mmu_flooded", CUMULATIVE, 0, 1),
    ("mmu_recycled", CUMULATIVE, 0, 1),
    ("mmu_cache_miss", CUMULATIVE, 0, 1),
    ("mmu_unsync", INSTANT, 0, 1),
    (SINCE_7_3, INSTANT, 0, 1),
    ("pages_4k", INSTANT, 0, 1),
    ("pages_2m", INSTANT, 0, 1),
    ("pages_1g", INSTANT, 0, 1),
    ("nx_lpage_splits", INSTANT, 0, 1),
    ("max_mmu_rmap_size", PEAK, 0, 1),
    ("max_mmu_page_hash_collisions", PEAK, 0, 1),
];

/// The statistics of a VM that the loaded module has.
pub fn of_vm() -> Vec<(&'static str, u32, i16, u16)> {
    let has_all = !oracle::is_stock() || oracle::kernel() > (6, 12);
    VM.into_iter().filter(|(name, ..)| has_all || *name != SINCE_7_3).collect()
}

/// The statistics of a vCPU.
pub const VCPU: [(&str, u32, i16, u16); 45] = [
    ("halt_successful_poll", CUMULATIVE, 0, 1),
    ("halt_attempted_poll", CUMULATIVE, 0, 1),
    ("halt_poll_invalid", CUMULATIVE, 0, 1),
    ("halt_wakeup", CUMULATIVE, 0, 1),
    ("halt_poll_success_ns", CUMULATIVE | SECONDS, -9, 1),
    ("halt_poll_fail_ns", CUMULATIVE | SECONDS, -9, 1),
    ("halt_wait_ns", CUMULATIVE | SECONDS, -9, 1),
    ("halt_poll_success_hist", LOG_HISTOGRAM | SECONDS, -9, 32),
    ("halt_poll_fail_hist", LOG_HISTOGRAM | SECONDS, -9, 32),
    ("halt_wait_hist", LOG_HISTOGRAM | SECONDS, -9, 32),
    ("blocking", INSTANT | BOOLEAN, 0, 1),
    ("pf_taken", CUMULATIVE, 0, 1),
    ("pf_fixed", CUMULATIVE, 0, 1),
    ("pf_emulate", CUMULATIVE, 0, 1),
    ("pf_spurious", CUMULATIVE, 0, 1),
    ("pf_fast", CUMULATIVE, 0, 1),
    ("pf_mmio_spte_created", CUMULATIVE, 0, 1),
    ("pf_guest", CUMULATIVE, 0, 1),
    ("tlb_flush", CUMULATIVE, 0, 1),
    ("invlpg", CUMULATIVE, 0, 1),
    ("exits", CUMULATIVE, 0, 1),
    ("io_exits", CUMULATIVE, 0, 1),
    ("mmio_exits", CUMULATIVE, 0, 1),
    ("signal_exits", CUMULATIVE, 0, 1),
    ("irq_window_exits", CUMULATIVE, 0, 1),
    ("nmi_window_exits", CUMULATIVE, 0, 1),
    ("l1d_flush", CUMULATIVE, 0, 1),
    ("halt_exits", CUMULATIVE, 0, 1),
    ("request_irq_exits", CUMULATIVE, 0, 1),
    ("irq_exits", CUMULATIVE, 0, 1),
    ("host_state_reload", CUMULATIVE, 0, 1),
    ("fpu_reload", CUMULATIVE, 0, 1),
    ("insn_emulation", CUMULATIVE, 0, 1),
    ("insn_emulation_fail", CUMULATIVE, 0, 1),
    ("hypercalls", CUMULATIVE, 0, 1),
    ("irq_injections", CUMULATIVE, 0, 1),
    ("nmi_injections", CUMULATIVE, 0, 1),
    ("req_event", CUMULATIVE, 0, 1),
    ("nested_run", CUMULATIVE, 0, 1),
    ("directed_yield_attempted", CUMULATIVE, 0, 1),
    ("directed_yield_successful", CUMULATIVE, 0, 1),
    ("preemption_reported", CUMULATIVE, 0, 1),
    ("preemption_other", CUMULATIVE, 0, 1),
    ("guest_mode", INSTANT | BOOLEAN, 0, 1),
    ("notify_window_exits", CUMULATIVE, 0, 1),
];

guest_code!(nothing, 64, done!());
guest_code!(
    work,
    64,
    "mov $50, %esi",
    "0: xor %eax, %eax",
    "xor %ecx, %ecx",
    "cpuid",
    "dec %esi",
    "jnz 0b",
    "out %al, $PORT_MARK",
    "mov NOWHERE, %eax",
    "out %al, $PORT_MARK",
    hypercall!(),
    done!()
);
guest_code!(
    touches,
    64,
    "mov $FREE, %edi",
    "mov $64, %ecx",
    "0: movq $1, (%rdi)",
    "add $0x1000, %rdi",
    "dec %ecx",
    "jnz 0b",
    "out %al, $PORT_MARK",
    done!()
);

fn guest() -> Outcome<Guest> {
    let system = System::open()?;
    system.require(kvm_bindings::KVM_CAP_BINARY_STATS_FD, "KVM_CAP_BINARY_STATS_FD")?;
    Guest::new(Chip::Kernel, nothing())
}

/// The files of a VM and of its first vCPU.
fn both(guest: &Guest) -> Outcome<[Stats; 2]> {
    Ok([Stats::of(&guest.vm)?, Stats::of(guest.vcpu())?])
}

fn compare(got: &[Described], expected: &[(&str, u32, i16, u16)]) -> Outcome {
    for (n, (name, flags, exponent, size)) in expected.iter().enumerate() {
        let got = got.get(n).map(|d| (d.name.as_str(), d.flags, d.exponent, d.size));
        equal("a statistic", got, Some((*name, *flags, *exponent, *size)))?;
    }
    if oracle::is_stock() {
        return equal("number of statistics", got.len(), expected.len());
    }
    Ok(())
}

fn the_first_names_are_kvms_in_kvms_order() -> Outcome {
    let [vm, vcpu] = both(&guest()?)?;
    compare(&vm.described()?, &of_vm())?;
    compare(&vcpu.described()?, &VCPU)
}

fn the_parts_do_not_overlap_and_every_value_is_in_the_file() -> Outcome {
    for stats in both(&guest()?)? {
        let (header, whole) = (stats.header()?, stats.whole()?);
        equal("flags and bytes of a name", (header.flags, header.name_size), (0, 48))?;
        equal("where the id begins", header.id, 24)?;
        equal("where the descriptors begin", header.descriptors, 24 + 48)?;
        equal("where the data begins", header.data, 24 + 48 + header.count * 64)?;
        let mut words = vec![false; (whole.len() - header.data as usize) / 8];
        for d in stats.described()? {
            equal("bucket size", d.bucket_size, 0)?;
            for n in 0..usize::from(d.size) {
                let word = words.get_mut(d.offset as usize / 8 + n);
                holds("a word of its own", word.as_deref() == Some(&false), &d.name)?;
                words[d.offset as usize / 8 + n] = true;
            }
        }
        holds("that every word is described", words.iter().all(|w| *w), words.len())?;
    }
    Ok(())
}

fn the_id_names_the_thread_that_made_it() -> Outcome {
    let guest = guest()?;
    let [vm, vcpu] = both(&guest)?;
    // SAFETY: no arguments.
    let me = unsafe { libc::gettid() };
    equal("id of the VM", vm.id()?, format!("kvm-{me}"))?;
    equal("id of the vCPU", vcpu.id()?, format!("kvm-{me}/vcpu-0"))?;
    let link = |stats: &Stats| {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", stats.0.as_raw_fd()));
        link.map(|l| l.to_string_lossy().into_owned()).unwrap_or_default()
    };
    equal("name of the VM's file", link(&vm), "anon_inode:kvm-vm-stats".into())?;
    equal("name of the vCPU's file", link(&vcpu), "anon_inode:kvm-vcpu-stats:0".into())
}

fn any_piece_is_that_piece_of_the_whole() -> Outcome {
    let guest = guest()?;
    for stats in both(&guest)? {
        let whole = stats.whole()?;
        for len in [0, 1, 3, 7, 8, 24, 100, 255, 256, 257, 5000] {
            for from in (0..whole.len() + 300).step_by(61) {
                let mut piece = vec![0x5a; len];
                let read = stats.read(from as i64, &mut piece).granted("a piece")?;
                let end = (from + len).min(whole.len());
                let expected = whole.get(from..end).unwrap_or(&[]);
                holds("that piece", piece.get(..read) == Some(expected), (from, len, read))?;
                holds("nothing behind it", piece[read..].iter().all(|b| *b == 0x5a), (from, len))?;
            }
        }
    }
    Ok(())
}

fn behind_the_end_there_is_nothing() -> Outcome {
    for stats in both(&guest()?)? {
        let end = stats.whole()?.len() as i64;
        let mut buffer = [0; 64];
        equal("the last byte", stats.read(end - 1, &mut buffer), Ok(1))?;
        for offset in [end, end + 1, 1 << 31, 1 << 32, 1 << 62] {
            equal("bytes behind the end", stats.read(offset, &mut buffer), Ok(0))?;
        }
    }
    Ok(())
}

fn offsets_that_cannot_be_are_refused() -> Outcome {
    for stats in both(&guest()?)? {
        let mut buffer = [0; 64];
        stats.read(-1, &mut buffer).refused("offset -1", libc::EINVAL)?;
        stats.read(i64::MIN, &mut buffer).refused("the least offset", libc::EINVAL)?;
        stats.read(i64::MAX - 8, &mut buffer).refused("an end beyond", libc::EINVAL)?;
    }
    Ok(())
}

fn a_buffer_that_is_not_there_is_efault() -> Outcome {
    let guest = guest()?;
    let memory = Memory::new(2 * 4096)?;
    // SAFETY: the second page of our own mapping.
    unsafe { libc::munmap((memory.hva() + 4096) as *mut libc::c_void, 4096) };
    for stats in both(&guest)? {
        let read = |address: u64, len: usize, offset: i64| {
            // SAFETY: the kernel refuses what is not there; what is there is ours.
            let read = unsafe { libc::pread(stats.0.as_raw_fd(), address as *mut _, len, offset) };
            usize::try_from(read).map_err(|_| Errno::last())
        };
        for address in [0, memory.hva() + 4096, u64::MAX - 4096, 1 << 63] {
            read(address, 100, 0).refused("a bad buffer", libc::EFAULT)?;
        }
        // The header fits, the descriptors do not.
        read(memory.hva() + 4096 - 24, 1000, 0).refused("half a buffer", libc::EFAULT)?;
        equal("what fits", read(memory.hva() + 4096 - 24, 24, 0), Ok(24))?;
    }
    Ok(())
}

fn the_file_is_for_reading_only() -> Outcome {
    for stats in both(&guest()?)? {
        let fd = stats.0.as_raw_fd();
        let text = [0_u8; 8];
        // SAFETY: the kernel refuses all of these; the buffer is ours.
        unsafe {
            equal("write", libc::write(fd, text.as_ptr().cast(), 8), -1)?;
            equal("errno of write", Errno::last(), Errno(libc::EBADF))?;
            equal("ioctl", libc::ioctl(fd, ioctl::GET_STATS_FD, 0), -1)?;
            equal("errno of ioctl", Errno::last(), Errno(libc::ENOTTY))?;
            let map =
                libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
            equal("mmap", map, libc::MAP_FAILED)?;
            equal("errno of mmap", Errno::last(), Errno(libc::ENODEV))?;
            equal("flags", libc::fcntl(fd, libc::F_GETFL) & libc::O_ACCMODE, libc::O_RDONLY)?;
            equal("close-on-exec", libc::fcntl(fd, libc::F_GETFD), libc::FD_CLOEXEC)?;
        }
    }
    Ok(())
}

fn it_is_read_by_position_too() -> Outcome {
    for stats in both(&guest()?)? {
        let whole = stats.whole()?;
        let mut all = Vec::new();
        let mut piece = [0; 1000];
        loop {
            // SAFETY: the buffer is ours.
            let read =
                unsafe { libc::read(stats.0.as_raw_fd(), piece.as_mut_ptr().cast(), piece.len()) };
            match usize::try_from(read) {
                Ok(0) => break,
                Ok(read) => all.extend_from_slice(&piece[..read]),
                Err(_) => return Err(Errno::last()).granted("read"),
            }
        }
        holds("the whole file", all == whole, (all.len(), whole.len()))?;
    }
    Ok(())
}

fn it_outlives_the_vm_and_its_vcpus() -> Outcome {
    let guest = guest()?;
    guest.finish()?;
    let [vm, vcpu] = both(&guest)?;
    let before = (vm.described()?, vcpu.value("exits")?);
    drop(guest);
    equal("the VM's statistics", vm.described()?, before.0)?;
    holds("exits of the vCPU that is gone", vcpu.value("exits")? >= before.1, before.1)
}

fn another_process_may_read_it() -> Outcome {
    let guest = guest()?;
    guest.finish()?;
    let [vm, vcpu] = both(&guest)?;
    // SAFETY: the child only reads and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = vm.value("remote_tlb_flush").is_ok() && vcpu.value("io_exits").is_ok();
        // SAFETY: ends the child.
        unsafe { libc::_exit(if good { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: our child; the status has a place.
    unsafe { libc::waitpid(child, &mut status, 0) };
    equal("status of the reader", status, 0)
}

fn many_files_may_be_open() -> Outcome {
    let guest = guest()?;
    let files: Vec<[Stats; 2]> = (0..100).map(|_| both(&guest)).collect::<Outcome<_>>()?;
    drop(guest);
    for [vm, vcpu] in &files {
        vm.value("pages_4k")?;
        vcpu.value("exits")?;
    }
    Ok(())
}

fn exits_are_counted() -> Outcome {
    let guest = Guest::new(Chip::Kernel, work())?;
    let [vm, vcpu] = both(&guest)?;
    let value = |name: &str| vcpu.value(name);
    equal("exits of a vCPU that never ran", value("exits")?, 0)?;
    guest.reach_mark()?;
    let (exits, io) = (value("exits")?, value("io_exits")?);
    holds("50 CPUID and a port", (51..10_000).contains(&exits), exits)?;
    equal("port exits", io, 1)?;
    guest.exit()?;
    equal("device exits to user space", value("mmio_exits")?, 1)?;
    guest.reach_mark()?;
    equal("hypercalls so far", value("hypercalls")?, 0)?;
    guest.finish()?;
    equal("hypercalls", value("hypercalls")?, 1)?;
    equal("port exits", value("io_exits")?, 3)?;
    equal("FPU swaps", value("fpu_reload")?, 4)?;
    if let Some(cpuids) = vcpu.value_if_any("exits_cpuid")? {
        equal("CPUID exits", cpuids, 50)?;
        equal("those answered in the loop", value("answered_cpuid")?, 50)?;
        equal("port exits answered in the loop", value("answered_io")?, 0)?;
        equal("the VM's sum", vm.value("exits_cpuid")?, 50)?;
        equal("returns of KVM_RUN", value("user_exits")?, 4)?;
    }
    Ok(())
}

fn page_tables_and_pages_are_counted() -> Outcome {
    let guest = Guest::new(Chip::Kernel, touches())?;
    let [vm, vcpu] = both(&guest)?;
    guest.reach_mark()?;
    let mapped = vm.value("pages_4k")? + 512 * vm.value("pages_2m")?;
    holds("64 pages mapped", mapped >= 64, mapped)?;
    let fixed = vcpu.value("pf_fixed")?;
    holds("faults that mapped something", fixed > 0 && vcpu.value("pf_taken")? >= fixed, fixed)?;
    let Some(tables) = vm.value_if_any("page_tables_allocated")? else { return Ok(()) };
    holds("some tables", tables >= 3, tables)?;
    let (small, freed) = (vm.value("pages_4k")?, vm.value("page_tables_freed")?);
    guest.vm.set_slot(0, 0, 0, 0, 0).granted("deleting the slot")?;
    equal("pages without a slot", vm.value("pages_4k")? + vm.value("pages_2m")?, 0)?;
    if small == 0 {
        // One large page: no table was the slot's alone.
        return Ok(());
    }
    holds("tables freed with the slot", vm.value("page_tables_freed")? > freed, freed)
}

fn runs_of_a_guests_guest_are_counted() -> Outcome {
    let guest = nested_state::hypervisor()?;
    let [vm, vcpu] = both(&guest)?;
    let seen = || Ok([vcpu.value("nested_run")?, vcpu.value("guest_mode")?]);
    let [runs, mode] = seen()?;
    equal("L1 at its mark", mode, 0)?;
    nested_state::in_l2(&guest, 1)?;
    equal("L2 at its mark", seen()?, [runs + 1, 1])?;
    nested_state::computes(&guest, 2)?;
    // L2's stops in user space and the exits that L1 does not ask for are no runs.
    equal("L1 behind it", seen()?, [runs + 1, 0])?;
    // Where L2 has tables of its own, or of L1's, they are shadowed.
    let pages = vm.value_if_any("mmu_shadow_pages")?;
    holds("shadow pages, if they are counted", pages.is_none_or(|n| n < 10_000), pages)
}
