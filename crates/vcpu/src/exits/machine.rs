//! The vCPU as the instruction emulator sees it: registers, guest memory, devices.
//!
//! Memory and devices are told apart here, at each access: an address where a slot is is memory, and
//! every other is a device's.

use backend::{Backend, SegmentName};
use emulate::{Access, CodeSize, Machine, PortAccess, SegReg, Stop, Table};
use mmu::walk;
use vm::memory::MemoryError;
use x86::{
    Cr0, Cr0Write, Cr4, Direction, Gpa, Gva, Rflags,
    segment::{DescriptorTable, Segment},
};

use super::device::{DeviceAccess, padded};
use crate::{Vcpu, exits::code::CodeState as _, exits::cr::read_cr, paging::Mmu};

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
        // A signal waits. It is served before the instruction is begun again.
        MemoryError::Interrupted
        // The slot was there when memory and device were told apart, and went: the next try finds a device.
        | MemoryError::Unbacked
        | MemoryError::ReadOnly => Stop::Retry,
        // Another try would find the same.
        MemoryError::Fault | MemoryError::NoMemory => Stop::Unsupported,
    }
}

const fn walk_access(how: Access) -> walk::Access {
    match how {
        Access::Load => walk::Access::READ,
        Access::Store | Access::Modify => walk::Access::WRITE,
    }
}

fn fill(into: &mut [u8], data: &[u8]) {
    for (to, from) in into.iter_mut().zip(data) {
        *to = *from;
    }
}

impl Mmu {
    /// Whether a frame is RAM that the guest may read, or write.
    pub(crate) fn is_memory(&self, gpa: Gpa, way: Direction) -> bool {
        // At each access: a slot may go or come between two accesses of one instruction.
        let slots = self.memory.slots();
        slots.find(gpa.gfn()).is_some_and(|s| way == Direction::Read || !s.is_readonly())
    }
}

impl<B: Backend> Vcpu<B> {
    /// An access to a device that was not answered before: by the kernel's devices, else user space is to
    /// be asked. What was read.
    fn device(&mut self, mut access: DeviceAccess) -> Result<[u8; 8], Stop> {
        if !self.kernel_device(&mut access) {
            return Err(self.device.user_io.log.ask(access));
        }
        self.device.user_io.log.record_done(access);
        Ok(access.data)
    }

    /// An access that is complete, whatever is at its address by now.
    fn settled(&mut self, at: Gva, len: usize, way: Direction) -> Option<[u8; 8]> {
        self.device.user_io.log.next_settled(at, len, way)
    }
}

impl<B: Backend> Machine for Vcpu<B> {
    fn gpr(&self, index: usize) -> u64 {
        self.gprs.get(index)
    }

    fn set_gpr(&mut self, index: usize, value: u64) {
        if let Some(slot) = self.gprs.0.get_mut(index & 15) {
            *slot = value;
        }
    }

    fn rip(&self) -> u64 {
        self.b.rip()
    }

    fn rflags(&self) -> Rflags {
        self.b.rflags()
    }

    fn segment(&self, segment: SegReg) -> emulate::Segment {
        let s = self.b.segment(name_of(segment));
        emulate::Segment { selector: s.selector, attributes: s.attr, limit: s.limit, base: s.base }
    }

    fn code_size(&self) -> CodeSize {
        self.b.code_size()
    }

    fn cpl(&self) -> u8 {
        self.b.cpl()
    }

    fn cr0(&self) -> Cr0 {
        self.b.control().cr0
    }

    fn cr4(&self) -> Cr4 {
        self.b.control().cr4
    }

    fn read(&mut self, at: Gva, into: &mut [u8], how: Access) -> Result<(), Stop> {
        if let Some(answer) = self.settled(at, into.len(), Direction::Read) {
            fill(into, &answer);
            return Ok(());
        }
        let gpa = self.translate(at, walk_access(how))?;
        let access = DeviceAccess::load(gpa, into.len() as u8);
        // The log first: an answered access must not be made a second time, for devices tell reads
        // apart.
        let data = match self.device.user_io.log.next(&access) {
            Some(answer) => answer,
            None if self.mmu.is_memory(gpa, Direction::Read) => {
                self.mmu.memory.read(gpa, into).map_err(memory_stop)?;
                // A write may be asked of user space behind it, and completes what was begun with this.
                let data = padded(into);
                self.device.user_io.log.record_memory(DeviceAccess { data, ..access });
                return Ok(());
            }
            None => self.device(access)?,
        };
        fill(into, &data);
        Ok(())
    }

    fn write(&mut self, at: Gva, data: &[u8], how: Access) -> Result<(), Stop> {
        // As for loads: a store that user space has done is not done again.
        if self.settled(at, data.len(), Direction::Write).is_some() {
            return Ok(());
        }
        let gpa = self.translate(at, walk_access(how))?;
        let store = DeviceAccess::store_of(gpa, data);
        if self.mmu.is_memory(gpa, Direction::Write) {
            return self.mmu.memory.write(gpa, data).map_err(memory_stop);
        }
        // A run of a string was for memory, which is gone from there: its elements are stored one by one.
        self.device(store.ok_or(Stop::Retry)?).map(|_| ())
    }

    fn probe_write(&mut self, at: Gva, _len: usize) -> Result<(), Stop> {
        // It was looked at before the first write, which is not to be taken back.
        if self.device.user_io.log.is_settled() {
            return Ok(());
        }
        // One page: the emulator splits what crosses into a second one.
        self.translate(at, walk::Access::WRITE).map(|_| ())
    }

    fn cmpxchg(&mut self, at: Gva, old: &[u8], new: &[u8]) -> Result<bool, Stop> {
        if self.settled(at, new.len(), Direction::Write).is_some() {
            return Ok(true);
        }
        let gpa = self.translate(at, walk::Access::WRITE)?;
        let store = DeviceAccess::store_of(gpa, new);
        if !self.mmu.is_memory(gpa, Direction::Write) {
            // A device has no old value to compare with. As on stock KVM the exchange is a store.
            return self.device(store.ok_or(Stop::Unsupported)?).map(|_| true);
        }
        let len = old.len();
        if !len.is_power_of_two() || len > 8 || gpa.0 % len as u64 != 0 {
            // Wider than the host exchanges on user memory, or split over two cache lines.
            return self.mmu.memory.write(gpa, new).map(|()| true).map_err(memory_stop);
        }
        let (old, new) = (u64::from_le_bytes(padded(old)), u64::from_le_bytes(padded(new)));
        let done = self.mmu.memory.cmpxchg(gpa, len, old, new).map_err(memory_stop)?;
        if !done {
            self.device.user_io.log.forget_memory();
        }
        Ok(done)
    }

    fn is_writable_ram(&mut self, at: Gva, _len: usize) -> Result<bool, Stop> {
        match self.translate(at, walk::Access::WRITE) {
            Ok(gpa) => Ok(self.mmu.is_memory(gpa, Direction::Write)),
            // Another vCPU has taken the page away, from what may be written already.
            Err(_) if self.device.user_io.log.is_settled() => {
                // If it was L1's tables, nobody accesses it there: the store is done.
                self.mmu.forget_refusal();
                Ok(false)
            }
            Err(stop) => Err(stop),
        }
    }

    fn steps(&self) -> bool {
        self.traps_each()
    }

    fn commit(&mut self) {
        self.device.user_io.log.commit();
        // Once for an instruction: with RF it is in its middle already.
        let flags = self.b.rflags();
        if !flags.contains(Rflags::RF) {
            self.b.set_rflags(flags | Rflags::RF);
            self.b.set_interrupt_shadow(false);
        }
    }

    fn long_mode(&self) -> bool {
        self.b.efer().is_long()
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
        if !self.mmu.is_memory(gpa, Direction::Read) {
            return Err(Stop::Unsupported);
        }
        self.mmu.memory.read(gpa, into).map_err(memory_stop)
    }

    fn write_system(&mut self, at: Gva, data: &[u8]) -> Result<(), Stop> {
        let gpa = self.translate(at, SYSTEM_WRITE)?;
        if !self.mmu.is_memory(gpa, Direction::Write) {
            return Err(Stop::Unsupported);
        }
        // A task switch has done a part by then, and cannot be begun again for a slot that went.
        self.mmu.memory.write(gpa, data).map_err(|_| Stop::Unsupported)
    }

    fn probe_system(&mut self, at: Gva) -> Result<(), Stop> {
        let gpa = self.translate(at, SYSTEM_WRITE)?;
        if self.mmu.is_memory(gpa, Direction::Write) { Ok(()) } else { Err(Stop::Unsupported) }
    }

    fn port_run(&mut self, access: &PortAccess, at: Gva, elements: u64) -> Result<u64, Stop> {
        // Devices in the kernel answer one by one, from the log.
        if self.vm.irq().has_port(access.port()) || !self.is_writable_ram(at, 1)? {
            return Ok(1);
        }
        let access = DeviceAccess::port_in(access.port(), access.size());
        Ok(self.device.user_io.log.items_at_once(&access, elements))
    }

    fn has_port_items(&self) -> bool {
        self.device.user_io.log.has_items()
    }

    fn port_in(&mut self, access: &PortAccess, into: &mut [u8]) -> Result<(), Stop> {
        let access = DeviceAccess::port_in(access.port(), access.size());
        let user_io = &mut self.device.user_io;
        if let Some(from) = user_io.log.give_items(&access, into.len()) {
            fill(into, user_io.string.get(from..).unwrap_or(&[]));
            return Ok(());
        }
        let count = into.len().checked_div(access.size.into()).unwrap_or(1);
        if count > 1 {
            return Err(user_io.log.ask_items(access, count as u16));
        }
        let data = match user_io.log.next(&access) {
            Some(answer) => answer,
            None => self.device(access)?,
        };
        fill(into, &data);
        Ok(())
    }

    fn port_out(&mut self, access: &PortAccess, data: &[u8]) -> Result<(), Stop> {
        let access = DeviceAccess::port_out(access.port(), access.size(), padded(data));
        if self.device.user_io.log.next(&access).is_none() {
            self.device(access)?;
        }
        Ok(())
    }

    fn x87_words(&mut self) -> Result<[u16; 2], Stop> {
        self.read_x87_words()
    }

    fn x87_init(&mut self) -> Result<(), Stop> {
        self.init_x87()
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
        read_cr(&self.b, n).map_err(Stop::Fault)
    }

    fn write_cr(&mut self, n: u8, value: u64) -> Result<(), Stop> {
        // L1 may want to hear of some values alone, and the value is known only here.
        // Before the write: what L1 takes must not have happened for L2.
        if n == 0 && self.gives_cr0_to_l1(value, Cr0Write::Other) {
            return Err(Stop::Retry);
        }
        Vcpu::write_cr(self, n, value).map_err(Stop::Fault)
    }

    fn lmsw(&mut self, value: u64) -> Result<(), Stop> {
        if self.gives_cr0_to_l1(value, Cr0Write::Lmsw) {
            return Err(Stop::Retry);
        }
        Vcpu::write_cr(self, 0, value).map_err(Stop::Fault)
    }

    fn read_dr(&mut self, n: u8) -> Result<u64, Stop> {
        self.rare.debug.read(&mut self.b, n)
    }

    fn write_dr(&mut self, n: u8, value: u64) -> Result<(), Stop> {
        self.rare.debug.write(&mut self.b, n, value)
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
    fn a_slot_that_goes_behind_the_look_is_tried_again() {
        use MemoryError::*;
        let tried = [Unbacked, ReadOnly, Interrupted, Fault, NoMemory]
            .map(|e| memory_stop(e) == Stop::Retry);
        assert_eq!(tried, [true, true, true, false, false]);
    }
}
