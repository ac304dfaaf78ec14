//! What an observed vCPU does more: tracepoints, and the cycles from exit to re-entry.
//!
//! Nothing of it is on the inner loop's way. Who observes is looked at when the loop is entered
//! ([`host::trace::observed`]); a vCPU that is observed then has a bit set in each of the two words
//! that the loop looks at anyway: what is to be done after an exit
//! ([`AfterExit`](crate::run::after_exit::AfterExit)) and what is for the outer loop
//! ([`Events::leaves`](crate::run::events::Events)). Behind those bits are the functions here, all of
//! them cold. What a tracepoint calls is the kernel's, so inside the loop it runs between
//! [`Vcpu::with_kernel`]'s two ends.

use backend::{Backend, Exit, Gprs, RAX, RBX, RCX, RDX, RSI};
use emulate::{Fetched, SimpleMmio};
use host::trace::{self, CpuidAnswer, ExitRecord, Mmio, MsrAccess, Observed};
use mmu::Section;
use stats::{Reason, VcpuStats};
use x86::Direction;

use crate::{
    RunInput, UserExit, Vcpu,
    exits::code::CodeState as _,
    exits::device::{Device, padded, pio::mask, user_io::Completion},
    exits::table::reason_of,
    run::events::Outer,
    run::outcome::{Left, Next},
};

/// An exit whose re-entry is still to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exited {
    at: u64,
    reason: Reason,
    /// What was observed then: with the histograms off in between, the time says nothing.
    during: Observed,
}

/// What user space was asked for while observed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Asked {
    /// Nothing that is told of when it is answered.
    #[default]
    Nothing,
    /// IN.
    Port {
        /// The port.
        port: u16,
        /// Bytes of an item.
        size: u8,
        /// Items.
        count: u32,
    },
    /// A read of a device in memory.
    Memory {
        /// Guest-physical address.
        gpa: u64,
        /// Bytes.
        len: u8,
    },
}

/// What is noted of an exit until it was answered.
#[derive(Clone, Copy, Debug)]
struct Before {
    exit: Exit,
    gprs: Gprs,
    rip: u64,
    /// A TDP fault's instruction, if it is a plain device access.
    simple: Option<SimpleMmio>,
}

/// What an observed vCPU has yet to tell.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Observation {
    watch: Observed,
    /// What was asked for by the last exit.
    before: Option<Before>,
    /// It was handled outside.
    outside: bool,
    /// Telling of the exit has left work that waits outside.
    work: bool,
    exited: Option<Exited>,
    asked: Asked,
}

fn fault_address(exit: &Exit) -> Option<u64> {
    match exit {
        Exit::TdpFault(fault) => Some(fault.gpa.0),
        Exit::PageFault(fault) => Some(fault.address.0),
        _ => None,
    }
}

fn joined(low: u64, high: u64) -> u64 {
    (low & 0xffff_ffff) | high << 32
}

/// Room for the histograms, once they are wanted. Without memory there are none.
fn make_room(stats: &VcpuStats, watch: Observed) {
    if watch.cycles() {
        let _ = stats.prepare_cycles();
    }
}

/// What was loaded or stored by a plain access, of which the registers are `now` the result.
fn tell_simple(before: &Before, now: &Gprs, gpa: u64) {
    let of = |gprs: &Gprs, index: u8| gprs.get(index.into());
    let (kind, size, value) = match before.simple {
        Some(SimpleMmio::Load { size, dest, .. }) => (Mmio::Read, size, of(now, dest.index)),
        Some(SimpleMmio::StoreReg { size, src }) => {
            (Mmio::Write, size, src.extract(of(&before.gprs, src.index)))
        }
        Some(SimpleMmio::StoreImm { size, value }) => (Mmio::Write, size, value),
        None => return,
    };
    trace::mmio(kind, size.into(), gpa, mask(value, size.min(4)));
}

/// User space has answered.
fn tell_user_answer(device: &Device, watch: Observed, asked: Asked, mmio_data: [u8; 8]) {
    match asked {
        Asked::Port { port, size, count } if watch.pio() => {
            let value = mask(u64::from_le_bytes(device.io_data), size);
            trace::pio(Direction::Read, port, size, count, value as u32);
        }
        Asked::Memory { gpa, len } if watch.mmio() => {
            let data = mmio_data.get(..usize::from(len)).unwrap_or(&[]);
            trace::mmio(Mmio::Read, data.len(), gpa, u64::from_le_bytes(padded(data)));
        }
        _ => {}
    }
}

/// A device in the kernel, or user space before, has answered an access in memory.
#[inline]
pub(crate) fn tell_mmio(kind: Mmio, gpa: u64, data: &[u8]) {
    if trace::observed().mmio() {
        trace::mmio(kind, data.len(), gpa, u64::from_le_bytes(padded(data)));
    }
}

impl Observation {
    /// KVM_RUN returns, observed.
    #[cold]
    #[inline(never)]
    pub(crate) fn observe_return(&mut self, device: &Device, exit: &UserExit, watch: Observed) {
        // What user space is asked for is told of here, or when it is answered.
        self.before = None;
        match *exit {
            UserExit::Io { write: false, size, port, count } => {
                self.asked = Asked::Port { port, size, count };
            }
            UserExit::Io { write: true, size, port, count } if watch.pio() => {
                let value = mask(u64::from_le_bytes(device.io_data), size);
                trace::pio(Direction::Write, port, size, count, value as u32);
            }
            UserExit::Mmio { write: false, gpa, len, .. } => {
                self.asked = Asked::Memory { gpa, len };
                if watch.mmio() {
                    trace::mmio(Mmio::Unsatisfied, len.into(), gpa, 0);
                }
            }
            UserExit::Mmio { write: true, gpa, len, data } if watch.mmio() => {
                trace::mmio(Mmio::Write, len.into(), gpa, u64::from_le_bytes(data));
            }
            _ => {}
        }
    }
}

/// What a trace tells of the last exit.
fn exit_record(b: &impl Backend, vcpu_id: u32) -> ExitRecord {
    let (code, [info1, info2], event, event_error) = b.exit_record();
    let rip = b.rip();
    ExitRecord { rip, info1, info2, code: code as u32, event, event_error, vcpu_id }
}

impl<B: Backend> Vcpu<B> {
    /// The loop is about to be entered, observed. False: leave at once.
    #[cold]
    #[inline(never)]
    pub(crate) fn begin_observation(&mut self, watch: Observed) -> bool {
        self.observation.watch = watch;
        // Both words, so that the loop comes by after an exit and before an entry.
        self.pending.after_exit.set_observed(true);
        self.events.outer.set(Outer::OBSERVED, true);
        self.tell_and_enter()
    }

    /// The loop was left, and what for is handled next. Interrupts are on.
    #[cold]
    #[inline(never)]
    pub(crate) fn end_observation(&mut self, left: &Left) {
        let watch = self.observation.watch;
        self.pending.after_exit.set_observed(false);
        self.events.outer.set(Outer::OBSERVED, false);
        // Told of right before the next entry.
        self.observation.outside = !left.is_handled();
        make_room(&self.stats, watch);
        if watch.page_fault()
            && let Left::Exit(exit) = left
            && let Some(address) = fault_address(exit)
        {
            let (_, [error, _], ..) = self.b.exit_record();
            trace::page_fault(self.shared.id, self.b.rip(), address, error);
        }
    }

    /// Right after an exit: tells of it, and notes what has to be told later.
    #[cold]
    #[inline(never)]
    pub(crate) fn observe_exit(&mut self, s: Section<'_>) {
        let watch = self.observation.watch;
        // So that the loop comes by again before the next entry.
        self.pending.raise();
        let exit = self.b.exit();
        if watch.cycles() {
            // As early as can be: what is told below is no part of the exit's cost.
            let (at, reason) = (self.b.host_tsc(), reason_of(&exit));
            self.observation.exited = Some(Exited { at, reason, during: watch });
        }
        let offered = self.pending.after_exit.offered();
        // The offer as it stood is compared with what is left of it.
        self.note_taken();
        let still = self.pending.after_exit.offered();
        let taken = offered.filter(|_| watch.inj_virq() && still.is_none());
        if watch.details() {
            let simple = match exit {
                Exit::TdpFault(_) if watch.mmio() => self.simple_access(s),
                _ => None,
            };
            // Of before the answer, which may overwrite what was asked for.
            let (gprs, rip) = (self.gprs, self.b.rip());
            self.observation.before = Some(Before { exit, gprs, rip, simple });
        }
        if !watch.exit() && taken.is_none() {
            return;
        }
        let record = exit_record(&self.b, self.shared.id);
        let ((), next) = self.with_kernel(|_| {
            if let Some(vector) = taken {
                trace::inj_virq(vector.0);
            }
            if watch.exit() {
                trace::exit(&record);
            }
        });
        self.observation.work |= next == Next::Done;
    }

    /// The loop comes by after an answer, because of [`Self::observe_exit`] or because there is
    /// something to leave for. Whether it may go on.
    #[cold]
    #[inline(never)]
    pub(crate) fn observe_answer(&mut self, s: Section<'_>) -> bool {
        if !self.pending.after_exit.is_observed() || self.events.outer.any_but(Outer::OBSERVED) {
            return false;
        }
        // Before the entry is told, of which it is a part.
        self.inject_answer(s) && self.tell_and_enter()
    }

    /// Tells what became of the last exit, and that the guest is entered. False: leave instead.
    fn tell_and_enter(&mut self) -> bool {
        let watch = self.observation.watch;
        if watch.cycles()
            && let Some(exited) = self.observation.exited.take()
            && exited.during == watch
        {
            let now = self.b.host_tsc();
            self.stats.took(exited.reason, now.wrapping_sub(exited.at));
        }
        let before = self.observation.before.take();
        let outside = core::mem::take(&mut self.observation.outside);
        let mut work = core::mem::take(&mut self.observation.work);
        if before.is_some() || watch.entry() {
            let ((), next) = self.with_kernel(|v| {
                if let Some(before) = before {
                    v.tell_answer(&before, !outside);
                }
                if watch.entry() {
                    trace::entry(v.shared.id, v.b.rip());
                }
            });
            work |= next == Next::Done;
        }
        !work
    }

    /// What was asked for, and what became of it. `inside`: in the inner loop.
    fn tell_answer(&mut self, before: &Before, inside: bool) {
        let watch = self.observation.watch;
        let [rax, rbx, rcx, rdx, rsi] = [RAX, RBX, RCX, RDX, RSI].map(|i| before.gprs.get(i));
        let [eax, ebx, ecx, edx] = [RAX, RBX, RCX, RDX].map(|i| self.gprs.get(i));
        // A fault leaves RIP where it is.
        let faulted = self.b.rip() == before.rip;
        match before.exit {
            Exit::Cpuid if watch.cpuid() && !faulted => {
                let (leaf, subleaf) = (rax as u32, rcx as u32);
                let found = self.cpuid.has_leaf(leaf, subleaf);
                let answer = [eax, ebx, ecx, edx].map(|r| r as u32);
                trace::cpuid(&CpuidAnswer { leaf, subleaf, answer, found });
            }
            Exit::Rdmsr if watch.msr() => {
                let value = if faulted { 0 } else { joined(eax, edx) };
                let (direction, index) = (Direction::Read, rcx as u32);
                trace::msr(&MsrAccess { direction, index, value, faulted });
            }
            Exit::Wrmsr if watch.msr() => {
                let (direction, index) = (Direction::Write, rcx as u32);
                trace::msr(&MsrAccess { direction, index, value: joined(rax, rdx), faulted });
            }
            Exit::Hypercall if watch.hypercall() => {
                trace::hypercall(&[rax, rbx, rcx, rdx, rsi]);
            }
            Exit::Io(io) if watch.pio() && !io.string && !faulted => {
                let (direction, value) =
                    if io.input { (Direction::Read, eax) } else { (Direction::Write, rax) };
                let value = mask(value, io.size);
                trace::pio(direction, io.port, io.size, 1, value as u32);
            }
            // The local APIC's page. Other devices, and what is handled outside, are told of where
            // they answer.
            Exit::TdpFault(fault)
                if inside
                    && watch.mmio()
                    && !faulted
                    && self.shared.lapic.mmio_base() == Some(fault.gpa.0 & !0xfff) =>
            {
                tell_simple(before, &self.gprs, fault.gpa.0);
            }
            _ => {}
        }
    }

    /// The instruction at RIP, if it is a plain load or store. Not by way of what the loop itself
    /// calls, which is compiled into the loop because nobody else does.
    fn simple_access(&mut self, s: Section<'_>) -> Option<SimpleMmio> {
        let size = self.b.code_size();
        let (bytes, len) = self.fetch_here(s, size)?;
        let fetched = Fetched::new(bytes.get(..usize::from(len))?, size);
        self.code.decode.get(fetched).ok()?.simple_mmio()
    }

    /// KVM_RUN is called, observed.
    #[cold]
    #[inline(never)]
    pub(crate) fn observe_call(&mut self, input: &RunInput, watch: Observed) {
        make_room(&self.stats, watch);
        let asked = core::mem::take(&mut self.observation.asked);
        if self.device.user_io.completion != Completion::Nothing {
            tell_user_answer(&self.device, watch, asked, input.mmio_data);
        }
    }
}
