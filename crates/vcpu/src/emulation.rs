//! The vCPU as the instruction emulator sees it, and the replay of accesses that user space
//! answers.
//!
//! The emulator commits registers only when an instruction is complete. When an access needs user
//! space the vCPU leaves, and on the next KVM_RUN the instruction is emulated from its beginning:
//! accesses that were answered before are answered from the log in the same order.

use backend::{Backend, SegmentName};
use emulate::{Access, CodeSize, Decoded, Fetched, Machine, SegReg, Stop};
use host::trace::Mmio;
use mmu::{WalkError, translate, walk};
use stats::VcpuCount;
use vm::memory::MemoryError;
use x86::{Exception, Gpa, Gva};

use crate::{
    Vcpu,
    exit::{ERROR_EMULATION, ErrorData, UserExit},
    run::Open,
};

/// Stands for a port where the log has an address.
const PORT: u64 = u64::MAX;

/// Guest memory is not mapped in the nested tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotMapped;

/// Device accesses of one instruction (or one REP iteration) that can be remembered.
const LOG: usize = 16;

/// An access that user space has to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Mmio { gpa: Gpa, len: u8, write: bool, data: [u8; 8] },
    Port { port: u16, size: u8, write: bool, data: [u8; 8] },
}

/// The log of answered device accesses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Replay {
    answers: [(u64, [u8; 8]); LOG],
    answered: usize,
    cursor: usize,
    wanted: Option<Wanted>,
}

impl Replay {
    /// The answer that user space gave to the access it was asked for.
    pub(crate) fn answer(&mut self, mmio: [u8; 8], port: [u8; 8]) {
        match self.wanted.take() {
            Some(Wanted::Mmio { gpa, .. }) => self.record(gpa.0, mmio),
            Some(Wanted::Port { .. }) => self.record(PORT, port),
            None => {}
        }
    }

    fn record(&mut self, at: u64, answer: [u8; 8]) {
        if let Some(slot) = self.answers.get_mut(self.answered) {
            *slot = (at, answer);
            self.answered += 1;
        }
    }

    /// Records an access that the kernel answered, and moves past it.
    fn record_done(&mut self, at: u64, answer: [u8; 8]) {
        self.record(at, answer);
        self.cursor = self.answered;
    }

    /// The answer to the access at `at`, if it is the next that was answered before. Asked before
    /// anything else: what was a device then may be memory now.
    fn next(&mut self, at: u64) -> Option<[u8; 8]> {
        if self.cursor >= self.answered {
            return None;
        }
        let (key, answer) = self.answers.get(self.cursor).copied()?;
        if key != at {
            return None;
        }
        self.cursor += 1;
        Some(answer)
    }

    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

pub(crate) fn padded(data: &[u8]) -> [u8; 8] {
    let mut all = [0; 8];
    for (to, from) in all.iter_mut().zip(data) {
        *to = *from;
    }
    all
}

impl<B: Backend> Vcpu<B> {
    /// Emulates the instruction at RIP.
    pub(crate) fn emulate_here(&mut self) -> Option<UserExit> {
        let decoded = match self.slow_decode() {
            Ok(decoded) => decoded,
            Err(exit) => return exit,
        };
        self.replay.cursor = 0;
        self.stats.count(VcpuCount::InsnEmulation);
        let result = emulate::emulate(self, &decoded);
        match result {
            Ok(done) => {
                self.replay.forget();
                let complete = done.outcome == emulate::Outcome::Done;
                self.b.set_rflags(done.rflags);
                if complete {
                    self.retire(done.rip);
                    self.b.set_interrupt_shadow(done.interrupt_shadow);
                } else {
                    self.b.set_rip(done.rip);
                }
                self.recheck = true;
                None
            }
            Err(Stop::Fault(exception)) => {
                self.replay.forget();
                self.raise(exception);
                None
            }
            // The answers so far stay: the same instruction asks for them again.
            Err(Stop::Retry) => None,
            Err(Stop::NeedUser) => self.ask_user(),
            Err(Stop::Unsupported) => {
                self.replay.forget();
                self.emulation_failed()
            }
        }
    }

    fn ask_user(&mut self) -> Option<UserExit> {
        self.open = Open::Emulation;
        match self.replay.wanted {
            Some(Wanted::Mmio { gpa, len, write, data }) => {
                Some(UserExit::Mmio { gpa: gpa.0, len, write, data })
            }
            Some(Wanted::Port { port, size, write, data }) => {
                self.io_data = data;
                Some(UserExit::Io { write, size, port, count: 1 })
            }
            None => self.emulation_failed(),
        }
    }

    /// KVM_EXIT_INTERNAL_ERROR with the bytes at RIP. Outside CPL 0 the guest gets #UD instead, so
    /// that its user programs cannot stop it.
    fn emulation_failed(&mut self) -> Option<UserExit> {
        self.stats.count(VcpuCount::InsnEmulationFail);
        if self.b.cpl() != 0 {
            self.raise(Exception::ud());
            return None;
        }
        let mut bytes = [0; 15];
        let len = self.read_code(&mut bytes).unwrap_or(0);
        let raw = self.b.exit_raw();
        Some(UserExit::InternalError {
            suberror: ERROR_EMULATION,
            data: ErrorData::emulation(bytes.get(..len).unwrap_or(&[]), &raw),
        })
    }

    /// Reads the bytes at RIP through the guest's page tables; may sleep. The number of bytes: fewer
    /// than 15 when the next page cannot be fetched.
    pub(crate) fn read_code(&mut self, bytes: &mut [u8; 15]) -> Result<usize, Stop> {
        let mut done = 0;
        let rip = self.linear_rip();
        while done < bytes.len() {
            let at = rip.wrapping_add(done as u64);
            let in_page = (4096 - (at & 0xfff) as usize).min(bytes.len() - done);
            let gpa = match self.translate(Gva(at), walk::Access::FETCH) {
                Ok(gpa) => gpa,
                Err(_) if done != 0 => break,
                Err(stop) => return Err(stop),
            };
            let Some(part) = bytes.get_mut(done..done + in_page) else { break };
            if self.memory.read(gpa, part).is_err() {
                if done != 0 {
                    break;
                }
                return Err(Stop::Unsupported);
            }
            done += in_page;
        }
        Ok(done)
    }

    /// The decoded instruction at RIP. `Err` is what to do instead.
    fn slow_decode(&mut self) -> Result<Decoded, Option<UserExit>> {
        let size = self.code_size();
        let mut bytes = [0; 15];
        let len = match self.read_code(&mut bytes) {
            Ok(len) => len,
            Err(Stop::Fault(exception)) => {
                self.raise(exception);
                return Err(None);
            }
            Err(Stop::Retry) => return Err(None),
            Err(_) => return Err(self.emulation_failed()),
        };
        let fetched = Fetched::new(bytes.get(..len).unwrap_or(&[]), size);
        match self.decode.get(fetched) {
            Ok(decoded) => Ok(decoded),
            Err(emulate::DecodeError::Truncated) if len < 15 => {
                // The instruction goes on in a page that cannot be fetched: that page's fault.
                let next = self.linear_rip().wrapping_add(len as u64);
                match self.translate(Gva(next), walk::Access::FETCH) {
                    Err(Stop::Fault(exception)) => {
                        self.raise(exception);
                        Err(None)
                    }
                    _ => Err(self.emulation_failed()),
                }
            }
            Err(emulate::DecodeError::TooLong) => {
                self.raise(Exception::gp(0));
                Err(None)
            }
            Err(_) => Err(self.emulation_failed()),
        }
    }

    /// RIP of the next instruction, by reading through user space where need be.
    pub(crate) fn slow_next_rip(&mut self) -> Result<u64, Option<UserExit>> {
        if let Some(rip) = self.b.next_rip() {
            return Ok(rip);
        }
        let decoded = self.slow_decode()?;
        Ok(self.wrap_rip(self.b.rip().wrapping_add(u64::from(decoded.len()))))
    }

    fn translate(&mut self, at: Gva, access: walk::Access) -> Result<Gpa, Stop> {
        let context = self.paging();
        match translate(&*self.memory, &context, at.0, access) {
            Ok(t) => Ok(t.gpa),
            Err(WalkError::Fault(e)) => Err(Stop::Fault(e)),
            Err(WalkError::NonCanonical) => Err(Stop::Fault(Exception::gp(0))),
            Err(WalkError::Memory { .. }) => Err(Stop::Unsupported),
        }
    }

    /// Whether a frame is RAM that the guest may read, or write.
    fn is_memory(&self, gpa: Gpa, write: bool) -> bool {
        let slots = self.memory.slots();
        slots.find(gpa.gfn()).is_some_and(|s| !write || !s.is_readonly())
    }

    fn device_read(&mut self, gpa: Gpa, into: &mut [u8]) -> Result<(), Stop> {
        self.sync_priority();
        if self.apic_read(gpa, into) || self.vm.irq().mmio_read(gpa.0, into) {
            self.tell_mmio(Mmio::Read, gpa.0, into);
            self.replay.record_done(gpa.0, padded(into));
            return Ok(());
        }
        self.replay.wanted =
            Some(Wanted::Mmio { gpa, len: into.len() as u8, write: false, data: [0; 8] });
        Err(Stop::NeedUser)
    }

    fn device_write(&mut self, gpa: Gpa, data: &[u8]) -> Result<(), Stop> {
        if self.apic_write(gpa, data) || self.vm.irq().mmio_write(gpa.0, data) {
            self.tell_mmio(Mmio::Write, gpa.0, data);
            self.replay.record_done(gpa.0, [0; 8]);
            return Ok(());
        }
        self.replay.wanted =
            Some(Wanted::Mmio { gpa, len: data.len() as u8, write: true, data: padded(data) });
        Err(Stop::NeedUser)
    }

    fn apic_page(&self, gpa: Gpa) -> Option<u32> {
        if !self.shared.in_kernel_apic {
            return None;
        }
        let base = self.shared.lapic.mmio_base()?;
        (gpa.0 & !0xfff == base).then_some((gpa.0 & 0xfff) as u32)
    }

    fn apic_read(&mut self, gpa: Gpa, into: &mut [u8]) -> bool {
        if self.is_apic_hole(gpa) {
            into.fill(0xff);
            return true;
        }
        let Some(offset) = self.apic_page(gpa) else { return false };
        self.withdraw_offer();
        self.shared.lapic.mmio_read(offset, into, host::clock::monotonic_ns)
    }

    fn apic_write(&mut self, gpa: Gpa, data: &[u8]) -> bool {
        if self.is_apic_hole(gpa) {
            return true;
        }
        let Some(offset) = self.apic_page(gpa) else { return false };
        self.sync_priority();
        match self.shared.lapic.mmio_write(offset, data) {
            Some(effect) => {
                self.effect(effect);
                true
            }
            None => false,
        }
    }

    fn walk_access(how: Access) -> walk::Access {
        match how {
            Access::Load => walk::Access::READ,
            Access::Store | Access::Modify => walk::Access::WRITE,
        }
    }
}

/// Where the XMM registers and the component bits lie in an XSAVE area (SDM vol. 1 §13.4).
const XMM: usize = 160;
const XSTATE_BV: usize = 512;
const XSTATE_SSE: u8 = 1 << 1;

fn xmm_offset(n: u8) -> usize {
    XMM + usize::from(n & 15) * 16
}

impl<B: Backend> Vcpu<B> {
    /// Works on the guest's extended state in memory: slow, and only for the rare vector access to
    /// a device.
    fn with_extended_state<R>(
        &mut self,
        write: bool,
        f: impl FnOnce(&mut [u8]) -> Option<R>,
    ) -> Result<R, Stop> {
        let mut area = alloc::vec::Vec::new();
        let size = self.xsave_size();
        area.try_reserve_exact(size).map_err(|_| Stop::Unsupported)?;
        area.resize(size, 0u8);
        self.fpu.put();
        self.xsave(&mut area);
        let result = f(&mut area);
        let done = !write || self.set_xsave(&area).is_ok();
        self.fpu.load();
        result.filter(|_| done).ok_or(Stop::Unsupported)
    }
}

fn memory_stop(error: MemoryError) -> Stop {
    match error {
        MemoryError::Interrupted => Stop::Retry,
        _ => Stop::Unsupported,
    }
}

impl<B: Backend> Machine for Vcpu<B> {
    fn gpr(&self, index: usize) -> u64 {
        self.gprs.0.get(index & 15).copied().unwrap_or(0)
    }

    fn set_gpr(&mut self, index: usize, value: u64) {
        if let Some(slot) = self.gprs.0.get_mut(index & 15) {
            *slot = value;
        }
    }

    fn rip(&self) -> u64 {
        self.b.rip()
    }

    fn rflags(&self) -> u64 {
        self.b.rflags()
    }

    fn segment(&self, segment: SegReg) -> emulate::Segment {
        let name = match segment {
            SegReg::Es => SegmentName::Es,
            SegReg::Cs => SegmentName::Cs,
            SegReg::Ss => SegmentName::Ss,
            SegReg::Ds => SegmentName::Ds,
            SegReg::Fs => SegmentName::Fs,
            SegReg::Gs => SegmentName::Gs,
        };
        let s = self.b.segment(name);
        emulate::Segment { selector: s.selector, attributes: s.attr, limit: s.limit, base: s.base }
    }

    fn code_size(&self) -> CodeSize {
        Vcpu::code_size(self)
    }

    fn cpl(&self) -> u8 {
        self.b.cpl()
    }

    fn cr0(&self) -> u64 {
        self.b.control().cr0
    }

    fn cr4(&self) -> u64 {
        self.b.control().cr4
    }

    fn read(&mut self, at: Gva, into: &mut [u8], how: Access) -> Result<(), Stop> {
        let gpa = self.translate(at, Self::walk_access(how))?;
        if let Some(answer) = self.replay.next(gpa.0) {
            for (to, from) in into.iter_mut().zip(answer) {
                *to = from;
            }
            return Ok(());
        }
        if self.is_memory(gpa, false) {
            return self.memory.read(gpa, into).map_err(memory_stop);
        }
        self.device_read(gpa, into)
    }

    fn write(&mut self, at: Gva, data: &[u8], how: Access) -> Result<(), Stop> {
        let gpa = self.translate(at, Self::walk_access(how))?;
        if self.replay.next(gpa.0).is_some() {
            return Ok(());
        }
        if self.is_memory(gpa, true) {
            return self.memory.write(gpa, data).map_err(memory_stop);
        }
        self.device_write(gpa, data)
    }

    fn probe_write(&mut self, at: Gva, _len: usize) -> Result<(), Stop> {
        self.translate(at, walk::Access::WRITE).map(|_| ())
    }

    fn cmpxchg(&mut self, at: Gva, old: &[u8], new: &[u8]) -> Result<bool, Stop> {
        let gpa = self.translate(at, walk::Access::WRITE)?;
        if self.replay.next(gpa.0).is_some() {
            return Ok(true);
        }
        if !self.is_memory(gpa, true) {
            // A device access has at most eight bytes.
            if new.len() > 8 {
                return Err(Stop::Unsupported);
            }
            return self.device_write(gpa, new).map(|()| true);
        }
        let len = old.len();
        if !len.is_power_of_two() || len > 8 || gpa.0 % len as u64 != 0 {
            // Wider than the host exchanges on user memory, or split over two cache lines.
            return self.memory.write(gpa, new).map(|()| true).map_err(memory_stop);
        }
        let (old, new) = (u64::from_le_bytes(padded(old)), u64::from_le_bytes(padded(new)));
        self.memory.cmpxchg(gpa, len, old, new).map_err(memory_stop)
    }

    fn is_ram(&mut self, at: Gva, len: usize, write: bool) -> Result<bool, Stop> {
        // The log of answers holds single elements: a string goes one by one.
        if len > 8 {
            return Ok(false);
        }
        let access = if write { walk::Access::WRITE } else { walk::Access::READ };
        let gpa = self.translate(at, access)?;
        Ok(self.is_memory(gpa, write))
    }

    fn commit(&mut self) {
        self.replay.forget();
    }

    fn io_allowed(&mut self, _port: u16, _size: u8) -> Result<bool, Stop> {
        // The hardware checked IOPL and the TSS before the exit (APM vol. 2 §15.10.2).
        Ok(true)
    }

    fn port_in(&mut self, port: u16, size: u8, into: &mut [u8]) -> Result<(), Stop> {
        for part in into.chunks_mut(usize::from(size.max(1))) {
            if let Some(answer) = self.replay.next(PORT) {
                for (to, from) in part.iter_mut().zip(answer) {
                    *to = from;
                }
                continue;
            }
            let mut value = 0;
            if self.vm.irq().has_port(port) && self.vm.irq().pio_read(port, size, &mut value) {
                let bytes = value.to_le_bytes();
                for (to, from) in part.iter_mut().zip(bytes) {
                    *to = from;
                }
                self.replay.record_done(PORT, padded(part));
                continue;
            }
            self.replay.wanted = Some(Wanted::Port { port, size, write: false, data: [0; 8] });
            return Err(Stop::NeedUser);
        }
        Ok(())
    }

    fn port_out(&mut self, port: u16, size: u8, data: &[u8]) -> Result<(), Stop> {
        for part in data.chunks(usize::from(size.max(1))) {
            if self.replay.next(PORT).is_some() {
                continue;
            }
            let value = u64::from_le_bytes(padded(part)) as u32;
            if self.vm.irq().has_port(port) && self.vm.irq().pio_write(port, size, value) {
                self.replay.record_done(PORT, [0; 8]);
                continue;
            }
            self.replay.wanted = Some(Wanted::Port { port, size, write: true, data: padded(part) });
            return Err(Stop::NeedUser);
        }
        Ok(())
    }

    fn xmm(&mut self, n: u8) -> Result<u128, Stop> {
        let at = xmm_offset(n);
        self.with_extended_state(false, |area| {
            let bytes = area.get(at..at + 16)?.try_into().ok()?;
            // Without its bit in XSTATE_BV the component is in its initial state: zero.
            let live = area.get(XSTATE_BV)? & XSTATE_SSE != 0;
            Some(if live { u128::from_le_bytes(bytes) } else { 0 })
        })
    }

    fn set_xmm(&mut self, n: u8, value: u128) -> Result<(), Stop> {
        let at = xmm_offset(n);
        self.with_extended_state(true, |area| {
            let live = area.get(XSTATE_BV)? & XSTATE_SSE != 0;
            if !live {
                area.get_mut(XMM..XMM + 256)?.fill(0);
            }
            area.get_mut(at..at + 16)?.copy_from_slice(&value.to_le_bytes());
            *area.get_mut(XSTATE_BV)? |= XSTATE_SSE;
            Some(())
        })
    }

    fn read_cr(&mut self, n: u8) -> Result<u64, Stop> {
        self.read_cr_value(n).map_err(Stop::Fault)
    }

    fn write_cr(&mut self, n: u8, value: u64) -> Result<(), Stop> {
        Vcpu::write_cr(self, n, value).map_err(Stop::Fault)
    }

    fn read_dr(&mut self, n: u8) -> Result<u64, Stop> {
        self.read_debug_reg(n)
    }

    fn write_dr(&mut self, n: u8, value: u64) -> Result<(), Stop> {
        self.write_debug_reg(n, value)
    }

    fn invlpg(&mut self, at: Gva) -> Result<(), Stop> {
        self.flush_page(at);
        Ok(())
    }

    fn invpcid(&mut self, kind: u8, pcid: u16, at: Gva) -> Result<(), Stop> {
        self.flush_pcid(kind, pcid, at).map_err(Stop::Fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_back_in_order_and_run_out() {
        let wanted = Some(Wanted::Port { port: 1, size: 1, write: false, data: [0; 8] });
        let mut r = Replay { wanted, ..Replay::default() };
        r.answer([9; 8], [1; 8]);
        r.wanted = Some(Wanted::Mmio { gpa: Gpa(0), len: 4, write: false, data: [0; 8] });
        r.answer([2; 8], [9; 8]);
        assert_eq!(r.next(PORT), Some([1; 8]));
        assert_eq!(r.next(PORT), None);
        assert_eq!(r.next(0), Some([2; 8]));
        assert_eq!(r.next(0), None);
        r.cursor = 0;
        assert_eq!(r.next(PORT), Some([1; 8]));
    }
}
