//! Guests that mean harm to themselves while another vCPU, or the VMM, changes what they stand on: one vCPU that rewrites
//! pages at random, runs that may end in any way that an architecture knows, and the way back from there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_debugregs, kvm_mp_state, kvm_regs, kvm_vcpu_events};

pub mod drives;
pub mod shootdown;

use super::code::guest_code;
use super::guest::{Guest, Mode};
use super::layout::*;
use super::memory::PAGE;
use super::threads::Target;
use crate::kvm::exit::Exit;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::oracle::{Vendor, is_stock, vendor};
use crate::outcome::{Answer, Errno, Outcome, fail};

/// What the rewriting vCPU is told: a page of words. Its code lies behind.
const ORDERS: u64 = FREE + 0x4_0000;
const SCRIBBLER: u64 = FREE + 0x5_0000;
/// How many pages are rewritten; a page may stand there several times.
const TARGETS: u64 = 8;
/// Batches between two marks.
const BATCHES: u64 = 6;
/// A port that a guest's guest writes to in passing.
pub const PORT_PASSING: u16 = 0x80;

guest_code!(
    // For ever: puts four words back to what they are to be, and makes four others wrong, or half of them. RBX is the
    // dice. A wrong word is random, or has a wrong bit, or is all zeroes or ones.
    scribbles,
    64,
    "mov $FREE + 0x40000, %ebp",
    "mov (%rbp), %rbx",
    "0: mov 8(%rbp), %r12d",
    "1: lea 0x100(%rbp), %rsi",
    "mov $4, %ecx",
    "2: mov (%rsi), %rdi",
    "mov 8(%rsi), %rax",
    "mov %rax, (%rdi)",
    "add $16, %rsi",
    "dec %ecx",
    "jnz 2b",
    "lea 0x100(%rbp), %rsi",
    "mov $4, %ecx",
    "3: mov %rbx, %rax; shl $13, %rax; xor %rax, %rbx",
    "mov %rbx, %rax; shr $7, %rax; xor %rax, %rbx",
    "mov %rbx, %rax; shl $17, %rax; xor %rax, %rbx",
    "mov %ebx, %edx",
    "and $7, %edx",
    "mov %rbx, %r8",
    "shr $8, %r8",
    "and 0xc0(%rbp,%rdx,8), %r8",
    "mov 0x40(%rbp,%rdx,8), %rdi",
    "add %r8, %rdi",
    "mov 0x80(%rbp,%rdx,8), %r9",
    "mov (%r9,%r8), %rax",
    "mov %rdi, (%rsi)",
    "mov %rax, 8(%rsi)",
    "mov %ebx, %edx",
    "shr $24, %edx",
    "and $7, %edx",
    "cmp $4, %edx",
    "jae 6f",
    "cmp $1, %edx",
    "jb 4f",
    "ja 5f",
    "mov %rbx, %r10",
    "shr $32, %r10",
    "and $63, %r10",
    "btc %r10, %rax",
    "mov %rax, (%rdi)",
    "jmp 6f",
    "4: mov %rbx, (%rdi)",
    "jmp 6f",
    "5: sub $3, %edx",
    "movslq %edx, %rdx",
    "not %rdx",
    "sar $63, %rdx",
    "mov %rdx, (%rdi)",
    "6: add $16, %rsi",
    "dec %ecx",
    "jnz 3b",
    "pause",
    "dec %r12d",
    "jnz 1b",
    "mov %rbx, (%rbp)",
    "lock incq 24(%rbp)",
    "out %al, $PORT_MARK",
    "jmp 0b",
);

/// A page that is rewritten, a page of what is right there, and which bits of a word's offset are diced.
pub type Scribble = (u64, u64, u64);

/// What a run of a vCPU ended with.
pub enum Turn {
    /// Its mark.
    Mark,
    /// A write to [`PORT_PASSING`]: it goes on.
    Passing,
    /// Something that it does not go on from, in a word.
    Dies(String),
}

/// Runs a vCPU whose guest may do anything to itself: never an entry that the CPU refuses, nor an errno.
pub fn turn(vcpu: &Vcpu) -> Outcome<Turn> {
    let died = |how: &str| Ok(Turn::Dies(how.into()));
    match vcpu.run() {
        Ok(exit) if exit.is_out(PORT_MARK) => Ok(Turn::Mark),
        Ok(exit) if exit.is_out(PORT_PASSING) => Ok(Turn::Passing),
        Ok(exit) if exit.is_out(PORT_FAULT) => died("fault"),
        Ok(Exit::Io { .. }) => died("port"),
        Ok(Exit::Mmio { .. }) => died("device"),
        Ok(Exit::Hlt) => died("hlt"),
        Ok(Exit::Shutdown) => died("shutdown"),
        Ok(Exit::Internal { suberror, .. }) => died(&format!("internal error {suberror}")),
        Ok(Exit::FailEntry { .. }) if is_stock() => died("failed entry"),
        Ok(exit) => fail(format!("expected an end that the architecture knows got {exit:x?}")),
        Err(Errno(libc::EINTR)) => died("stuck"),
        Err(errno) if is_stock() => died(&format!("{errno}")),
        Err(errno) => fail(format!("KVM_RUN: expected an exit got {errno}")),
    }
}

/// How often something came.
#[derive(Debug, Default)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    /// Once more.
    pub fn count(&mut self, what: impl Into<String>) {
        *self.0.entry(what.into()).or_default() += 1;
    }

    /// How often it came.
    pub fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    /// Shows it to whoever asked for it by LABTESTS_TOLD.
    pub fn tell(&self, whose: &str) {
        if std::env::var_os("LABTESTS_TOLD").is_some() {
            println!("# {whose}: {:?}", self.0);
        }
    }
}

/// A thread that runs a vCPU, for whoever looks after it.
pub struct Watched {
    target: Target,
    turns: AtomicU64,
    ended: AtomicBool,
}

impl Watched {
    /// Nobody yet.
    pub const fn new() -> Self {
        Self { target: Target::new(), turns: AtomicU64::new(0), ended: AtomicBool::new(false) }
    }

    /// The calling thread is the one.
    pub fn is_me(&self) {
        self.target.is_me();
    }

    /// A run has ended.
    pub fn turned(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
    }

    /// How many have.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::SeqCst)
    }

    /// There will be no more.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }
}

/// Interrupts the threads whose vCPU does not come back, until all have ended.
pub fn look_after(watched: &[&Watched]) {
    const PATIENCE: Duration = Duration::from_millis(150);
    let mut seen = vec![(u64::MAX, Instant::now()); watched.len()];
    loop {
        let mut left = 0;
        for (thread, seen) in watched.iter().zip(&mut seen) {
            if thread.ended.load(Ordering::SeqCst) {
                continue;
            }
            left += 1;
            let turns = thread.turns();
            if turns != seen.0 {
                *seen = (turns, Instant::now());
            } else if seen.1.elapsed() > PATIENCE {
                thread.target.kick();
                seen.1 = Instant::now();
            }
        }
        if left == 0 {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A guest, its memory when all was well, and where its vCPUs begin anew.
pub struct Storm<'a> {
    pub guest: &'a Guest,
    begin: u64,
    memory: Vec<u8>,
}

impl<'a> Storm<'a> {
    /// A guest as it is now; a vCPU that died begins at `begin`.
    pub fn over(guest: &'a Guest, begin: u64) -> Self {
        guest.memory.write_bytes(SCRIBBLER, scribbles());
        Self { guest, begin, memory: guest.memory.read_bytes(0, MEMORY_BYTES as usize) }
    }

    /// Has vCPU 1 rewrite these pages from its next run on.
    pub fn scribbles(&self, pages: [Scribble; TARGETS as usize], seed: u64) -> Outcome {
        let memory = &self.guest.memory;
        memory.write(ORDERS, seed);
        memory.write(ORDERS + 8, BATCHES);
        for (at, (page, right, offsets)) in (ORDERS..).step_by(8).zip(pages) {
            memory.write(at + 0x40, page);
            memory.write(at + 0x80, right);
            memory.write(at + 0xc0, offsets);
        }
        // Nothing is wrong so far.
        for at in (ORDERS + 0x100..ORDERS + 0x140).step_by(16) {
            memory.write(at, ORDERS + 0x800);
        }
        self.begin_scribbling()
    }

    fn begin_scribbling(&self) -> Outcome {
        self.guest.memory.write_bytes(SCRIBBLER, scribbles());
        self.place(1, SCRIBBLER)
    }

    /// How many batches vCPU 1 has done.
    pub fn batches(&self) -> u64 {
        self.guest.memory.read(ORDERS + 24)
    }

    /// The thread of vCPU 1 until `stop`; what it met.
    pub fn scribble(&self, watched: &Watched, stop: &AtomicBool) -> Outcome<Tally> {
        let mut tally = Tally::default();
        watched.is_me();
        let mut scribbling = || {
            while !stop.load(Ordering::SeqCst) {
                match turn(&self.guest.vcpus[1])? {
                    Turn::Mark => tally.count("marks"),
                    Turn::Passing => tally.count("passing"),
                    // A guest's guest without walls has written over it.
                    Turn::Dies(how) => {
                        tally.count(how);
                        self.begin_scribbling()?;
                    }
                }
                watched.turned();
                thread::yield_now();
            }
            Ok(())
        };
        let outcome = scribbling();
        watched.end();
        outcome.map(|()| tally)
    }

    /// Puts the memory back to what it was, but for what vCPU 1 is told.
    pub fn restore(&self) {
        let (before, behind) = self.memory.split_at(ORDERS as usize);
        self.guest.memory.write_bytes(0, before);
        self.guest.memory.write_bytes(ORDERS + PAGE, &behind[PAGE as usize..]);
    }

    /// Makes a vCPU that died one that begins.
    pub fn revive(&self, index: usize) -> Outcome {
        self.restore();
        self.place(index, self.begin)
    }

    /// Resets a vCPU, whatever it is in, and puts it at an instruction.
    pub fn place(&self, index: usize, rip: u64) -> Outcome {
        let vcpu = &self.guest.vcpus[index];
        vcpu.set_immediate_exit(1);
        let _ = vcpu.run();
        vcpu.set_immediate_exit(0);
        if vendor() == Vendor::Intel {
            const FEATURE_CONTROL: u32 = 0x3a;
            vcpu.set_msr(FEATURE_CONTROL, 0)?;
        }
        let events = kvm_vcpu_events::default();
        vcpu.send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
        self.guest.place(index, Mode::Long)?;
        vcpu.send(ioctl::SET_VCPU_EVENTS, &events).granted("KVM_SET_VCPU_EVENTS")?;
        let debug = kvm_debugregs { dr6: 0xffff_0ff0, dr7: 0x400, ..Default::default() };
        vcpu.send(ioctl::SET_DEBUGREGS, &debug).granted("KVM_SET_DEBUGREGS")?;
        let state = kvm_mp_state::default();
        vcpu.send(ioctl::SET_MP_STATE, &state).granted("KVM_SET_MP_STATE")?;
        vcpu.set_regs(&kvm_regs { rip, ..vcpu.regs()? })
    }
}

/// The page of a vCPU's stack, in whose first words it and the test speak.
pub const fn words_of(index: usize) -> u64 {
    STACKS + index as u64 * PAGE
}
