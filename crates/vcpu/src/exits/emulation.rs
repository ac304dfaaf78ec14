//! The vCPU as the instruction emulator sees it, and the replay of accesses that user space
//! answers.
//!
//! The emulator commits registers only when an instruction is complete. When an access needs user
//! space the vCPU leaves, and on the next KVM_RUN the instruction is emulated from its beginning:
//! accesses that were answered before are answered from the log in the same order.

use core::sync::atomic::Ordering::Relaxed;

use backend::{Backend, RDX, SegmentName};
use emulate::{
    Access, Cause, CodeSize, Decoded, Fetched, Machine, PortAccess, SegReg, Stop, Table,
};
use host::trace::Mmio;
use mmu::{WalkError, translate, walk};
use stats::VcpuCount;
use vm::memory::MemoryError;
use x86::{
    Exception, Gpa, Gva,
    segment::{DescriptorTable, Segment},
};

use crate::{
    Vcpu,
    run::Open,
    run::events::Outer,
    run::outcome::{Break, Outcome},
    run::user_exit::{ERROR_EMULATION, ErrorData, UserExit},
};

/// A port access where the log has an address: no address has the top bit set.
const fn port_key(port: u16, size: u8, write: bool) -> u64 {
    1 << 63 | (write as u64) << 24 | (size as u64) << 16 | port as u64
}

/// Guest memory is not mapped in the TDP tables.
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
    /// The instruction that these are the accesses of, and its address. It is completed as it began,
    /// whatever lies there by then.
    begun: Option<(u64, Fetched)>,
}

impl Replay {
    /// The answer that user space gave to the access it was asked for.
    pub(crate) fn answer(&mut self, mmio: [u8; 8], port: [u8; 8]) {
        match self.wanted.take() {
            Some(Wanted::Mmio { gpa, .. }) => self.record(gpa.0, mmio),
            Some(Wanted::Port { port: number, size, write, .. }) => {
                self.record(port_key(number, size, write), port);
            }
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

    /// The accesses so far are complete, and the instruction goes on.
    fn commit(&mut self) {
        *self = Self { begun: self.begun, ..Self::default() };
    }

    /// Has user space asked for an access. More than the log holds is none that an instruction makes
    /// which is emulated in earnest.
    fn ask(&mut self, wanted: Wanted) -> Stop {
        if self.answered >= LOG {
            return Stop::Unsupported;
        }
        self.wanted = Some(wanted);
        Stop::NeedUser
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
    /// Emulates the instruction at RIP, if it can be the one that made the exit. Else its bytes have
    /// changed since: the guest goes on, and the CPU executes what is there now.
    pub(crate) fn emulate_here(&mut self, cause: Cause) -> Outcome {
        let (fetched, decoded) = self.slow_decode()?;
        let begun = Some((self.b.rip(), fetched));
        if self.replay.begun != begun {
            self.replay.forget();
            self.replay.begun = begun;
        }
        if !decoded.can_cause(cause, self.gprs.0[RDX] as u16) {
            self.replay.forget();
            return Ok(());
        }
        self.execute(&decoded)
    }

    /// Goes on with the instruction that user space has answered an access of. Its bytes are those that
    /// it began with. If the VMM has set RIP meanwhile, the guest goes on there.
    pub(crate) fn emulate_again(&mut self) -> Outcome {
        let decoded = match self.replay.begun {
            Some((rip, fetched)) if rip == self.b.rip() && fetched.size() == self.code_size() => {
                self.decode.get(fetched)
            }
            _ => {
                self.replay.forget();
                return Ok(());
            }
        };
        match decoded {
            Ok(decoded) => self.execute(&decoded),
            Err(_) => Err(self.emulation_failed()),
        }
    }

    fn execute(&mut self, decoded: &Decoded) -> Outcome {
        self.replay.cursor = 0;
        self.stats.count(VcpuCount::InsnEmulation);
        let result = emulate::emulate(self, decoded);
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
                    self.trap_iteration(done.rflags);
                }
                self.recheck = true;
                Ok(())
            }
            Err(Stop::Fault(exception)) => {
                self.replay.forget();
                self.raise(exception);
                Ok(())
            }
            // The answers so far stay: the same instruction asks for them again.
            Err(Stop::Retry) => Ok(()),
            Err(Stop::NeedUser) => Err(self.ask_user()),
            Err(Stop::Unsupported) => {
                self.replay.forget();
                Err(self.emulation_failed())
            }
        }
    }

    /// A REP string instruction that is not at its end traps after each iteration under TF, as it
    /// would in hardware (SDM vol. 3B §18.3.1.4).
    fn trap_iteration(&mut self, rflags: u64) {
        if rflags & emulate::rflags::TF == 0 {
            return;
        }
        if self.single_step {
            self.events.outer.set(Outer::STEPPED, true);
        } else {
            self.raise(Exception::db(DR6_BS));
        }
    }

    fn ask_user(&mut self) -> Break {
        self.open = Open::Emulation;
        match self.replay.wanted {
            Some(Wanted::Mmio { gpa, len, write, data }) => {
                UserExit::Mmio { gpa: gpa.0, len, write, data }.into()
            }
            Some(Wanted::Port { port, size, write, data }) => {
                self.io_data = data;
                UserExit::Io { write, size, port, count: 1 }.into()
            }
            None => self.emulation_failed(),
        }
    }

    /// KVM_EXIT_INTERNAL_ERROR with the bytes at RIP, after which the guest gets #UD. Outside CPL 0 it
    /// gets that alone, so that its user programs cannot stop it; but a VMM may ask for the exit in
    /// any case, and does with the guest what it likes then.
    fn emulation_failed(&mut self) -> Break {
        self.stats.count(VcpuCount::InsnEmulationFail);
        if !self.vm.settings.exit_on_emulation_failure.load(Relaxed) {
            let program = self.b.cpl() != 0;
            self.raise(Exception::ud());
            if program {
                return Break::ToGuest;
            }
        }
        let mut bytes = [0; 15];
        let len = self.read_code(&mut bytes).unwrap_or(0);
        let raw = self.b.exit_raw();
        let data = ErrorData::emulation(bytes.get(..len).unwrap_or(&[]), &raw);
        self.internal_error(ERROR_EMULATION, data)
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

    /// The decoded instruction at RIP.
    fn slow_decode(&mut self) -> Outcome<(Fetched, Decoded)> {
        let size = self.code_size();
        let mut bytes = [0; 15];
        let len = match self.read_code(&mut bytes) {
            Ok(len) => len,
            Err(Stop::Fault(exception)) => {
                self.raise(exception);
                return Err(Break::ToGuest);
            }
            Err(Stop::Retry) => return Err(Break::ToGuest),
            Err(_) => return Err(self.emulation_failed()),
        };
        let fetched = Fetched::new(bytes.get(..len).unwrap_or(&[]), size);
        match self.decode.get(fetched) {
            Ok(decoded) => Ok((fetched, decoded)),
            Err(emulate::DecodeError::Truncated) if len < 15 => {
                // The instruction goes on in a page that cannot be fetched: that page's fault.
                let next = self.linear_rip().wrapping_add(len as u64);
                match self.translate(Gva(next), walk::Access::FETCH) {
                    Err(Stop::Fault(exception)) => {
                        self.raise(exception);
                        Err(Break::ToGuest)
                    }
                    _ => Err(self.emulation_failed()),
                }
            }
            Err(emulate::DecodeError::TooLong) => {
                self.raise(Exception::gp(0));
                Err(Break::ToGuest)
            }
            Err(_) => Err(self.emulation_failed()),
        }
    }

    /// RIP of the next instruction, by reading through user space where need be.
    pub(crate) fn slow_next_rip(&mut self) -> Outcome<u64> {
        if let Some(rip) = self.b.next_rip() {
            return Ok(rip);
        }
        let (_, decoded) = self.slow_decode()?;
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
        let len = into.len() as u8;
        Err(self.replay.ask(Wanted::Mmio { gpa, len, write: false, data: [0; 8] }))
    }

    fn device_write(&mut self, gpa: Gpa, data: &[u8]) -> Result<(), Stop> {
        if self.apic_write(gpa, data) || self.vm.irq().mmio_write(gpa.0, data) {
            self.tell_mmio(Mmio::Write, gpa.0, data);
            self.replay.record_done(gpa.0, [0; 8]);
            return Ok(());
        }
        let len = data.len() as u8;
        Err(self.replay.ask(Wanted::Mmio { gpa, len, write: true, data: padded(data) }))
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

const EFER_LMA: u64 = 1 << 10;
/// DR6: a single step.
const DR6_BS: u64 = 1 << 14;

/// Accesses that the processor makes for itself, with supervisor's rights.
const SYSTEM_READ: walk::Access = walk::Access { implicit: true, ..walk::Access::READ };
const SYSTEM_WRITE: walk::Access = walk::Access { implicit: true, ..walk::Access::WRITE };

const fn name_of(segment: SegReg) -> SegmentName {
    match segment {
        SegReg::Es => SegmentName::Es,
        SegReg::Cs => SegmentName::Cs,
        SegReg::Ss => SegmentName::Ss,
        SegReg::Ds => SegmentName::Ds,
        SegReg::Fs => SegmentName::Fs,
        SegReg::Gs => SegmentName::Gs,
        SegReg::Ldtr => SegmentName::Ldtr,
        SegReg::Tr => SegmentName::Tr,
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
        let s = self.b.segment(name_of(segment));
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
        self.replay.commit();
    }

    fn long_mode(&self) -> bool {
        self.b.efer() & EFER_LMA != 0
    }

    fn table(&self, table: Table) -> DescriptorTable {
        match table {
            Table::Global => self.b.gdtr(),
            Table::Interrupt => self.b.idtr(),
        }
    }

    fn set_table(&mut self, table: Table, value: DescriptorTable) {
        match table {
            Table::Global => self.b.set_gdtr(value),
            Table::Interrupt => self.b.set_idtr(value),
        }
    }

    fn set_segment(&mut self, segment: SegReg, value: emulate::Segment) {
        let emulate::Segment { selector, attributes: attr, limit, base } = value;
        self.b.set_segment(name_of(segment), Segment { base, limit, selector, attr });
    }

    fn read_system(&mut self, at: Gva, into: &mut [u8]) -> Result<(), Stop> {
        let gpa = self.translate(at, SYSTEM_READ)?;
        if !self.is_memory(gpa, false) {
            return Err(Stop::Unsupported);
        }
        self.memory.read(gpa, into).map_err(memory_stop)
    }

    fn write_system(&mut self, at: Gva, data: &[u8]) -> Result<(), Stop> {
        let gpa = self.translate(at, SYSTEM_WRITE)?;
        if !self.is_memory(gpa, true) {
            return Err(Stop::Unsupported);
        }
        self.memory.write(gpa, data).map_err(memory_stop)
    }

    fn probe_system(&mut self, at: Gva) -> Result<(), Stop> {
        let gpa = self.translate(at, SYSTEM_WRITE)?;
        if self.is_memory(gpa, true) { Ok(()) } else { Err(Stop::Unsupported) }
    }

    fn port_in(&mut self, access: &PortAccess, into: &mut [u8]) -> Result<(), Stop> {
        let (port, size) = (access.port(), access.size());
        let key = port_key(port, size, false);
        for part in into.chunks_mut(usize::from(size.max(1))) {
            if let Some(answer) = self.replay.next(key) {
                for (to, from) in part.iter_mut().zip(answer) {
                    *to = from;
                }
                continue;
            }
            let mut value = 0;
            if let Some(owing) = self.vm.irq().pio_read(port, size, &mut value) {
                self.note_owing(owing);
                let bytes = value.to_le_bytes();
                for (to, from) in part.iter_mut().zip(bytes) {
                    *to = from;
                }
                self.replay.record_done(key, padded(part));
                continue;
            }
            return Err(self.replay.ask(Wanted::Port { port, size, write: false, data: [0; 8] }));
        }
        Ok(())
    }

    fn port_out(&mut self, access: &PortAccess, data: &[u8]) -> Result<(), Stop> {
        let (port, size) = (access.port(), access.size());
        let key = port_key(port, size, true);
        for part in data.chunks(usize::from(size.max(1))) {
            if self.replay.next(key).is_some() {
                continue;
            }
            let value = u64::from_le_bytes(padded(part)) as u32;
            if let Some(owing) = self.vm.irq().pio_write(port, size, value) {
                self.note_owing(owing);
                self.replay.record_done(key, [0; 8]);
                continue;
            }
            let data = padded(part);
            return Err(self.replay.ask(Wanted::Port { port, size, write: true, data }));
        }
        Ok(())
    }

    fn mm(&mut self, n: u8) -> Result<u64, Stop> {
        self.with_mmx(|registers| registers.get(usize::from(n & 7)).copied().unwrap_or(0))
    }

    fn set_mm(&mut self, n: u8, value: u64) -> Result<(), Stop> {
        self.with_mmx(|registers| {
            if let Some(register) = registers.get_mut(usize::from(n & 7)) {
                *register = value;
            }
        })
    }

    fn xmm(&mut self, n: u8) -> Result<u128, Stop> {
        self.read_xmm(n)
    }

    fn set_xmm(&mut self, n: u8, value: u128) -> Result<(), Stop> {
        self.write_xmm(n, value)
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
        let key = port_key(1, 1, false);
        r.wanted = Some(Wanted::Mmio { gpa: Gpa(0), len: 4, write: false, data: [0; 8] });
        r.answer([2; 8], [9; 8]);
        assert_eq!(r.next(key), Some([1; 8]));
        assert_eq!(r.next(key), None);
        assert_eq!(r.next(port_key(2, 1, false)), None);
        assert_eq!(r.next(0), Some([2; 8]));
        assert_eq!(r.next(0), None);
        r.cursor = 0;
        assert_eq!(r.next(key), Some([1; 8]));
    }
}
