//! Sequences of ioctls on real VMs and vCPUs, over the model CPU and the standard library's port of the kernel, from one
//! thread or two.
//!
//! Nothing panics; a command answers with what KVM may answer; one that the file does not have is ENOTTY; what is wrong
//! changes nothing; what a vCPU tells of itself can be set again; and when the last file is closed nothing is left.

use std::alloc::{Layout, alloc_zeroed};
use std::sync::OnceLock;

use cpu::Model;
use gannet_cpuid::{HostFacts, Supported};
use gannet_kvm_abi::Errno;
use gannet_kvm_abi::bind::{Host, MakeBackend, SystemHandle};
use gannet_kvm_abi::caps::Offer;
use gannet_kvm_abi::dispatch;
use gannet_kvm_abi::rows::{COMMANDS, Command, File};
use gannet_kvm_abi::uapi::ioctl;
use gannet_msr::HostMsrs;
use gannet_svm::{Features, Svm, percpu};
use gannet_vcpu::Offered;
use gannet_vm::vm::{Format, HostLimits, Paging};
use host::NoMemory;
use host::std_port::test;
use x86::Hva;

use crate::bytes::Bytes;

struct OnModel;

impl MakeBackend for OnModel {
    type B = Svm<Model>;
    fn make() -> Result<Self::B, NoMemory> {
        Svm::new(Model::default(), features())
    }
}

fn features() -> Features {
    Features {
        asids: 16,
        npt: true,
        nrip_save: true,
        clean_bits: true,
        flush_by_asid: true,
        decode_assists: true,
        rdtscp: true,
        xsave: true,
        ..Features::default()
    }
}

fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    match (leaf, subleaf) {
        (0, _) => [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
        (1, _) => [0x0080_0f12, 0, 1 << 28 | 1 << 26 | 1 << 21, 1 << 13 | 1 << 9 | 1 << 6 | 3 << 4],
        (7, 0) => [0, 1 << 20 | 1 << 7, 0, 1 << 28 | 1 << 26],
        (0xd, 0) => [7, 832, 832, 0],
        (0xd, 1) => [0xf, 832, 0, 0],
        (0xd, 2) => [256, 576, 0, 0],
        (0x8000_0000, _) => [0x8000_000a, 0, 0, 0],
        (0x8000_0001, _) => [0, 0, 1 << 2, 1 << 29 | 1 << 27 | 1 << 20],
        (0x8000_0008, _) => [0x3030, 1 << 12, 0, 0],
        (0x8000_000a, _) => [1, 8, 0, 1 | 1 << 1 | 1 << 3 | 1 << 4],
        _ => [0; 4],
    }
}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        percpu::set_up(features(), 4).unwrap();
        let facts = HostFacts { xcr0: 7, nested: true, ..HostFacts::default() };
        let supported = Supported::read(cpuid, &facts).unwrap();
        let msrs = HostMsrs { amd: true, ..HostMsrs::default() };
        Host {
            offer: Offer {
                max_vcpus: 4,
                max_vcpu_id: 16,
                xsave: true,
                xsave_bytes: 4096,
                xcr0: 7,
                tsc_khz: host::clock::tsc_khz(),
                max_tsc_khz: host::clock::tsc_khz(),
                split_irqchip: true,
                x2apic_api: 3,
                halt_poll: true,
                mce_banks: 32,
                mce_cap: 1 << 8,
                guest_debug: 0xf_0003,
                exception_payload: true,
                triple_fault_event: true,
                manual_dirty_log: 3,
                tsc_offset: true,
                gpa_bits: 48,
                ..Offer::default()
            },
            limits: HostLimits {
                tables: Format::npt(4, 0),
                maxphyaddr: 48,
                halt_poll_ns: 0,
                paging: Paging::default(),
            },
            offered: Offered {
                cpuid: Box::leak(Box::new(supported)),
                msrs: Box::leak(Box::new(msrs)),
            },
        }
    })
}

/// Where a thread's arguments lie, and behind them what it gives guests as memory.
const ARGUMENT: usize = 256 << 10;
const MEMORY: usize = 256 << 10;

/// Two threads' user memory. All else is a hole.
fn arena() -> u64 {
    static ARENA: OnceLock<u64> = OnceLock::new();
    *ARENA.get_or_init(|| {
        let layout = Layout::from_size_align(2 * (ARGUMENT + MEMORY), 4096).unwrap();
        // SAFETY: the layout has a size.
        unsafe { alloc_zeroed(layout) as u64 }
    })
}

/// One thread's part of it.
struct User(u64);

impl User {
    fn new(thread: usize) -> Self {
        Self(arena() + (thread * (ARGUMENT + MEMORY)) as u64)
    }

    fn argument(&mut self) -> &mut [u64] {
        // SAFETY: this thread's part of the arena, which is never freed and of which it has one.
        unsafe { std::slice::from_raw_parts_mut(self.0 as *mut u64, ARGUMENT / 8) }
    }

    fn memory(&self) -> u64 {
        self.0 + ARGUMENT as u64
    }

    /// A word as structures have them, now and then an address.
    fn word(&self, bytes: &mut Bytes<'_>) -> u64 {
        match bytes.u8() {
            0..32 => self.memory() + (u64::from(bytes.u8() & 63) << 12),
            32..40 => self.0 + u64::from(bytes.u16()),
            40..64 => u64::from(bytes.u8()) << 12,
            64..96 => u64::from(bytes.u8()) | u64::from(bytes.u8()) << 32,
            _ => bytes.value(),
        }
    }

    /// Fills the argument's beginning; the rest of it, as far as a command may look, becomes zeroes.
    fn fill(&mut self, bytes: &mut Bytes<'_>) {
        self.argument()[..1024].fill(0);
        for n in 0..usize::from(bytes.u8() & 15) {
            let word = self.word(bytes);
            self.argument()[n] = word;
        }
        if bytes.u8() & 15 == 0 {
            let (at, word) = (usize::from(bytes.u16()) % 1024, self.word(bytes));
            self.argument()[at] = word;
        }
    }
}

/// The files that are open, by kind.
#[derive(Clone, Default)]
struct Files {
    vms: Vec<i32>,
    vcpus: Vec<i32>,
    others: Vec<i32>,
}

impl Files {
    fn of(&self, file: File, n: u8) -> Option<i32> {
        let list = match file {
            File::System => return Some(-1),
            File::Vm | File::VmCompat => &self.vms,
            File::Vcpu => &self.vcpus,
            File::Nobody => &self.others,
        };
        list.get(usize::from(n) % list.len().max(1)).copied()
    }
}

fn call(fd: i32, command: u32, argument: u64) -> i64 {
    if fd < 0 {
        let system = SystemHandle::<OnModel>::new(host());
        return dispatch::system(&system, command, argument).map_or_else(Errno::code, i64::from);
    }
    test::ioctl(fd, command, argument)
}

/// What KVM's commands may answer. Memory there is.
fn may_answer(reply: i64) -> bool {
    const KNOWN: [i64; 17] = [1, 2, 4, 5, 6, 7, 9, 11, 14, 16, 17, 19, 22, 25, 28, 95, 524];
    reply >= 0 || KNOWN.contains(&-reply)
}

/// A vCPU's state that commands tell of, and that does not pass with time.
const STATE: &[(u32, u32)] = &[
    (ioctl::GET_REGS, ioctl::SET_REGS),
    (ioctl::GET_SREGS, ioctl::SET_SREGS),
    (ioctl::GET_SREGS2, ioctl::SET_SREGS2),
    (ioctl::GET_DEBUGREGS, ioctl::SET_DEBUGREGS),
    (ioctl::GET_VCPU_EVENTS, ioctl::SET_VCPU_EVENTS),
    (ioctl::GET_FPU, ioctl::SET_FPU),
    (ioctl::GET_XCRS, ioctl::SET_XCRS),
    (ioctl::GET_MP_STATE, ioctl::SET_MP_STATE),
    (ioctl::GET_LAPIC, ioctl::SET_LAPIC),
    (ioctl::GET_NESTED_STATE, ioctl::SET_NESTED_STATE),
];

/// A piece of state: the answer, and what was written.
fn piece(user: &mut User, vcpu: i32, command: u32) -> (i64, Vec<u64>) {
    let words = match command {
        ioctl::GET_NESTED_STATE => 600,
        _ => (command as usize >> 16 & 0x3fff).div_ceil(8),
    };
    user.argument()[..words].fill(0);
    if command == ioctl::GET_NESTED_STATE {
        user.argument()[0] = (words as u64 * 8) << 32;
    }
    let reply = call(vcpu, command, user.0);
    let mut written = user.argument()[..words].to_vec();
    if command == ioctl::GET_LAPIC {
        // The current count of the timer passes.
        written[0x390 / 8] = 0;
    }
    (reply, written)
}

fn image(user: &mut User, vcpu: i32) -> Vec<(i64, Vec<u64>)> {
    let kept = user.argument()[..1024].to_vec();
    let image = STATE.iter().map(|(get, _)| piece(user, vcpu, *get)).collect();
    user.argument()[..1024].copy_from_slice(&kept);
    image
}

/// What a vCPU tells of itself it takes again, and is the same then.
fn set_again(user: &mut User, vcpu: i32) {
    for (get, set) in STATE {
        let before = image(user, vcpu);
        let (reply, words) = piece(user, vcpu, *get);
        if reply != 0 {
            continue;
        }
        user.argument()[..words.len()].copy_from_slice(&words);
        let reply = call(vcpu, *set, user.0);
        assert_eq!(reply, 0, "{set:#x} of what {get:#x} told: {words:x?}");
        let after = image(user, vcpu);
        for ((before, after), (get, _)) in before.iter().zip(&after).zip(STATE) {
            assert_eq!(before, after, "{get:#x} after {set:#x} of what was told");
        }
    }
}

fn name(command: &Command) -> String {
    format!("{:?} {}", command.file, command.name)
}

/// One command. `alone`: no other thread changes what is looked at.
fn step(bytes: &mut Bytes<'_>, files: &mut Files, user: &mut User, alone: bool) {
    let [kind, which, n] = bytes.take();
    let wanted = match kind {
        0..4 => return make_vm(files),
        4..12 => return make_vcpu(files, which, n),
        12..16 => {
            let list = if which & 1 == 0 { &mut files.vcpus } else { &mut files.others };
            if alone && !list.is_empty() {
                test::close(list.swap_remove(usize::from(n) % list.len()));
            }
            return;
        }
        16..22 => return tell_cpuid(files, user, n),
        22..26 if alone => {
            if let Some(vcpu) = files.of(File::Vcpu, n) {
                set_again(user, vcpu);
            }
            return;
        }
        26..40 => return slot(files, user, bytes, n),
        40..60 => File::System,
        60..130 => File::Vm,
        _ => File::Vcpu,
    };
    let mut list = COMMANDS.iter().filter(|command| command.file == wanted);
    let count = list.clone().count();
    let Some(command) = list.nth(usize::from(which) % count) else { return };
    // Now and then on a file of another kind.
    let file = match bytes.u8() {
        0..4 => File::System,
        4..8 => File::Vm,
        8..12 => File::Vcpu,
        12..14 => File::Nobody,
        _ => wanted,
    };
    let Some(fd) = files.of(file, n) else { return };
    let sized = command.number >> 16 & 0x3fff != 0;
    user.fill(bytes);
    // Mostly what is there, changed a little.
    let get = STATE.iter().find(|(_, set)| *set == command.number).map(|(get, _)| *get);
    if let Some(get) = get.filter(|_| file == File::Vcpu && bytes.u8() < 224) {
        let (_, words) = piece(user, fd, get);
        for _ in 0..bytes.u8() & 3 {
            let (at, word) = (usize::from(bytes.u8()) % words.len(), user.word(bytes));
            let old = user.argument()[at];
            user.argument()[at] = if bytes.bool() { word } else { old ^ 1 << (word & 63) };
        }
    }
    let argument = match bytes.u8() {
        0..4 => 0,
        4..6 => bytes.u64(),
        _ if sized => user.0,
        _ => u64::from(bytes.u8()),
    };
    if command.number == ioctl::CREATE_VM || command.number == ioctl::CREATE_VCPU {
        return;
    }
    if command.number == ioctl::RUN && file == File::Vcpu {
        let page = test::mmap_page(fd, 0);
        // SAFETY: the page shared with the vCPU, whose second byte says that KVM_RUN shall end at once.
        unsafe { std::ptr::write_volatile((page + 1) as *mut u8, 1) };
    }
    let before = (alone && file == File::Vcpu).then(|| image(user, fd));
    let reply = call(fd, command.number, argument);
    assert!(may_answer(reply), "{} answers {reply}", name(command));
    if reply >= 0 && matches!(command.number, ioctl::GET_STATS_FD) {
        files.others.push(reply as i32);
    }
    let there = COMMANDS.iter().any(|known| known.number == command.number && known.file == file);
    let compat = file == File::Vm
        && COMMANDS
            .iter()
            .any(|known| known.number == command.number && known.file == File::VmCompat);
    if !there && !compat {
        assert_eq!(reply, Errno::ENOTTY.code(), "{} on {file:?}", name(command));
    }
    // Without a mask there is none.
    if argument == 0 && sized && there && command.number != ioctl::SET_SIGNAL_MASK {
        assert!(reply < 0, "{} without an argument answers {reply}", name(command));
    }
    let partly = matches!(command.number, ioctl::RUN | ioctl::SET_MSRS);
    if let Some(before) = before.filter(|_| reply < 0 && !partly) {
        let after = image(user, fd);
        for ((before, after), (get, _)) in before.iter().zip(&after).zip(STATE) {
            assert_eq!(before, after, "{} answers {reply} and changes {get:#x}", name(command));
        }
    }
}

fn make_vm(files: &mut Files) {
    if files.vms.len() < 2 {
        let fd = call(-1, ioctl::CREATE_VM, 0);
        assert!(fd >= 0, "{fd}");
        files.vms.push(fd as i32);
    }
}

fn make_vcpu(files: &mut Files, which: u8, n: u8) {
    if files.vcpus.len() < 4
        && let Some(vm) = files.of(File::Vm, n)
    {
        let fd = call(vm, ioctl::CREATE_VCPU, u64::from(which & 31));
        assert!(may_answer(fd), "{fd}");
        if fd >= 0 {
            files.vcpus.push(fd as i32);
        }
    }
}

/// A vCPU learns the CPUID that is supported, so that what it allows is there.
fn tell_cpuid(files: &mut Files, user: &mut User, n: u8) {
    if let Some(vcpu) = files.of(File::Vcpu, n) {
        user.argument()[0] = 64;
        assert_eq!(call(-1, ioctl::GET_SUPPORTED_CPUID, user.0), 0);
        let reply = call(vcpu, ioctl::SET_CPUID2, user.0);
        assert!(may_answer(reply), "{reply}");
    }
}

/// A slot over a thread's own memory.
fn slot(files: &mut Files, user: &mut User, bytes: &mut Bytes<'_>, n: u8) {
    let Some(vm) = files.of(File::Vm, n) else { return };
    let [slot, flags, gpa, pages, at] = bytes.take();
    let (at, pages) = (u64::from(at & 31), u64::from(pages & 31));
    let hva = user.memory() + (at << 12);
    let words = [
        u64::from(slot & 3) | u64::from(slot >> 7) << 16 | u64::from(flags & 3) << 32,
        u64::from(gpa) << 12,
        pages << 12,
        hva,
    ];
    user.argument()[..4].copy_from_slice(&words);
    let reply = call(vm, ioctl::SET_USER_MEMORY_REGION, user.0);
    assert!(may_answer(reply), "{reply}");
}

fn steps(bytes: &[u8], files: &mut Files, thread: usize, alone: bool) {
    let (bytes, mut user) = (&mut Bytes::new(bytes), User::new(thread));
    let mut count = 0;
    while !bytes.is_empty() && count < 60 {
        count += 1;
        step(bytes, files, &mut user, alone);
    }
}

pub fn run(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    test::set_cpu(0);
    let world = test::clock();
    let (start, end) = (arena(), arena() + 2 * (ARGUMENT + MEMORY) as u64);
    let below = test::unmap(Hva(0), start);
    let above = test::unmap(Hva(end), u64::MAX - end);
    let mut files = Files::default();
    make_vm(&mut files);
    make_vcpu(&mut files, 0, 0);
    // One in eight with another thread, on the files that there are by then.
    if first & 7 == 7 {
        let (mine, theirs) = bytes.split_at(bytes.len() / 2);
        make_vcpu(&mut files, 1, 0);
        let mut of_theirs = Files { others: Vec::new(), ..files.clone() };
        let there = (files.vms.len(), files.vcpus.len());
        let (world, of_theirs_ref) = (&world, &mut of_theirs);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                test::adopt(world);
                test::set_cpu(1);
                steps(theirs, of_theirs_ref, 1, false);
            });
            steps(mine, &mut files, 0, false);
        });
        files.vms.extend(of_theirs.vms.split_off(there.0));
        files.vcpus.extend(of_theirs.vcpus.split_off(there.1));
        files.others.extend(of_theirs.others);
    } else {
        steps(bytes, &mut files, 0, true);
    }
    for fd in files.others.into_iter().chain(files.vcpus).chain(files.vms) {
        test::close(fd);
    }
    assert_eq!(world.armed_timers(), 0, "timers of no file");
    assert_eq!(test::srcu_waiters(), 0);
    drop((below, above));
}
