//! Accesses to devices: what an instruction asks for, and who does it.
//!
//! A guest reaches a device by a port (IN, OUT, INS, OUTS) or by an address where no memory is. Either
//! way the access is one [`DeviceAccess`], and it takes one way: [`Vcpu::kernel_device`] tries what the
//! kernel has there, and what nobody has there is asked of user space by [`Vcpu::ask_user`].
//!
//! Three callers make such accesses, because most of them need not be emulated:
//!
//! - a plain load or store, here. The fault has told the guest-physical address, and the CPU has walked the
//!   guest's page tables and checked its permissions. So of the instruction only the register, the size and
//!   the length matter. It has to go the way that the fault says, at the offset in the page that the fault
//!   says; else it is another instruction, which came there after the exit, or one that crosses pages, and
//!   is for the emulator (docs/adr/0041). Decoding is worth its time inside the loop only if the fault is not
//!   a missing page of memory: a page where a device was accessed before most likely is still a device's
//!   ([`DeviceSeen`]).
//! - [`pio`]: IN and OUT. The exit tells everything.
//! - [`emulation`](super::emulation): every other instruction, and strings.
//!
//! User space answers at the next KVM_RUN. What is left open until then, and how the answer completes
//! the instruction, is in [`user_io`]: one place for all three, because a VMM that sets registers or
//! resets the vCPU in between abandons whichever it is.

mod kernel;
pub(crate) mod pio;
pub mod user_io;

use backend::{Backend, Level, Nested, TdpFault};
use emulate::{Cause, Decoded, SimpleMmio};
use host::gup::fault_in;
use mmu::Section;
use stats::VcpuCount;
use vm::{
    irq::Space,
    memory::{FaultAccess, FaultOutcome, MemoryError},
};
use x86::{Exception, Gfn, Gpa};

use crate::{
    Vcpu,
    run::events::Outer,
    run::outcome::{Break, Next, Outcome},
    run::user_exit::{ERROR_DELIVERY, ErrorData, UserExit},
};
use user_io::Completion;

/// Which way the data of an access goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the guest: a load or IN.
    Read,
    /// To the device: a store or OUT.
    Write,
}

/// One access of an instruction to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAccess {
    /// Memory or ports.
    pub space: Space,
    /// Guest-physical address, or port.
    pub address: u64,
    /// Bytes: 1 to 8, and at most 4 of a port.
    pub size: u8,
    /// Which way the data goes.
    pub direction: Direction,
    /// What is written, or has been read: the first `size` bytes.
    pub data: [u8; 8],
}

impl DeviceAccess {
    /// A load from `address`.
    pub(crate) const fn load(address: Gpa, size: u8) -> Self {
        let (space, direction) = (Space::Memory, Direction::Read);
        Self { space, address: address.0, size, direction, data: [0; 8] }
    }

    /// A store of `data` to `address`.
    pub(crate) const fn store(address: Gpa, size: u8, data: [u8; 8]) -> Self {
        let (space, direction) = (Space::Memory, Direction::Write);
        Self { space, address: address.0, size, direction, data }
    }

    /// IN from `port`.
    pub(crate) const fn port_in(port: u16, size: u8) -> Self {
        let (space, direction) = (Space::Port, Direction::Read);
        Self { space, address: port as u64, size, direction, data: [0; 8] }
    }

    /// OUT of `data` to `port`.
    pub(crate) const fn port_out(port: u16, size: u8, data: [u8; 8]) -> Self {
        let (space, direction) = (Space::Port, Direction::Write);
        Self { space, address: port as u64, size, direction, data }
    }

    /// Whether `other` is the same access, whatever its data.
    fn is_at(&self, other: &Self) -> bool {
        self.address == other.address
            && self.space == other.space
            && self.size == other.size
            && self.direction == other.direction
    }
}

/// Up to eight bytes, filled up with zeros.
pub(crate) fn padded(data: &[u8]) -> [u8; 8] {
    let mut all = [0; 8];
    for (to, from) in all.iter_mut().zip(data) {
        *to = *from;
    }
    all
}

/// A plain load or store that was decoded.
#[derive(Clone, Copy, Debug)]
struct PlainAccess {
    gpa: Gpa,
    /// Where the instruction lies.
    rip: u64,
    simple: SimpleMmio,
    /// RIP after the instruction.
    next: u64,
}

impl PlainAccess {
    /// Whether it is the access that made `fault` at `rip`. One that was decoded for an earlier fault may
    /// still be there: that fault found its page after all, or became the guest's own.
    #[inline]
    fn is_of(&self, fault: TdpFault, rip: u64) -> bool {
        self.gpa == fault.gpa && self.rip == rip && is_store(self.simple) == fault.write
    }
}

const fn is_store(simple: SimpleMmio) -> bool {
    !matches!(simple, SimpleMmio::Load { .. })
}

/// Where the last device access outside the loop went, and the one that is on its way there.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceSeen {
    page: Option<Gfn>,
    access: Option<PlainAccess>,
}

impl DeviceSeen {
    /// Whether an access was decoded inside the loop, to be finished outside.
    #[inline]
    pub(crate) fn is_decoded(&self) -> bool {
        self.access.is_some()
    }

    /// Whether a fault is likely a device access and no missing page: worth decoding at once.
    #[inline]
    fn is_near(&self, gpa: Gpa) -> bool {
        self.page == Some(gpa.gfn())
    }

    /// An exit that may be a device access begins: none was decoded for it.
    #[inline]
    pub(crate) fn forget_decoded(&mut self) {
        self.access = None;
    }
}

/// What is open between a vCPU and devices.
pub(crate) struct Device {
    /// Where the last access went.
    pub(crate) seen: DeviceSeen,
    /// What user space was asked.
    pub(crate) user_io: user_io::UserIo,
    /// Bytes for the port I/O page: what the guest writes, or what user space answers.
    pub(crate) io_data: [u8; 8],
}

impl<B: Backend> Vcpu<B> {
    /// A TDP fault inside the loop: answered if it is a simple access to the APIC's page. An
    /// access to another device is decoded here, where that is cheap, and finished outside.
    #[inline]
    pub(crate) fn answer_mmio(&mut self, s: Section<'_>, fault: TdpFault) -> Next {
        self.device.seen.forget_decoded();
        if fault.present || !fault.final_access || fault.fetch {
            return Next::Leave;
        }
        let apic = fault.gpa.0 & !0xfff == self.shared.lapic.base() & !0xfff
            && self.shared.in_kernel_apic
            && self.shared.lapic.mmio_base().is_some();
        if !apic && !self.device.seen.is_near(fault.gpa) {
            return Next::Leave;
        }
        // The access interrupted a delivery: its event has to be kept, outside.
        if self.b.interrupted_delivery().is_some() {
            return Next::Leave;
        }
        let Some(decoded) = self.decode_here(s) else { return Next::Leave };
        let Some(simple) = decoded.simple_mmio() else { return Next::Leave };
        if !apic {
            self.device.seen.access = self.plain_of(fault, &decoded);
            return self.answer_kernel_device(fault);
        }
        self.answer_apic(s, fault, simple, &decoded)
    }

    /// The access that made a fault, if it is a plain one. Bytes that access it the other way came after
    /// the fault, and its page tables may forbid that.
    #[inline(always)]
    fn plain_of(&self, fault: TdpFault, decoded: &Decoded) -> Option<PlainAccess> {
        let simple = decoded.simple_mmio()?;
        let offset = (fault.gpa.0 & 0xfff) as u32;
        if offset > 0xff8
            || !self.is_64bit_code()
            || u32::from(self.page_offset(decoded)) != offset
            || is_store(simple) != fault.write
        {
            return None;
        }
        let rip = self.b.rip();
        let next = rip.wrapping_add(u64::from(decoded.len()));
        Some(PlainAccess { gpa: fault.gpa, rip, simple, next })
    }

    /// What a plain load or store asks for.
    #[inline]
    fn access_of(&self, plain: &PlainAccess) -> DeviceAccess {
        let (size, value) = match plain.simple {
            SimpleMmio::Load { size, .. } => return DeviceAccess::load(plain.gpa, size),
            SimpleMmio::StoreReg { size, src } => {
                let whole = self.gprs.0.get(usize::from(src.index & 15)).copied().unwrap_or(0);
                (size, src.extract(whole))
            }
            SimpleMmio::StoreImm { size, value } => (size, value),
        };
        DeviceAccess::store(plain.gpa, size, value.to_le_bytes())
    }

    /// A TDP fault: a page to be mapped, or a device.
    pub(crate) fn tdp_fault(&mut self, fault: TdpFault) -> Outcome {
        if fault.reserved {
            return self.unexpected_exit();
        }
        let access = FaultAccess {
            gpa: fault.gpa,
            write: fault.write,
            exec: fault.fetch,
            present: fault.present,
        };
        self.stats.count(VcpuCount::PfTaken);
        let (memory, tables) = (&self.mmu.memory, &mut self.mmu.tables);
        let outcome = memory.fault(tables, &access, &**self.vm, fault_in);
        match outcome {
            FaultOutcome::Mapped => {
                self.stats.count(VcpuCount::PfFixed);
                Ok(())
            }
            FaultOutcome::Retry => Ok(()),
            FaultOutcome::Mmio | FaultOutcome::ReadonlyWrite => {
                self.stats.count(VcpuCount::PfEmulate);
                self.device_access(fault)
            }
            FaultOutcome::Error(MemoryError::Interrupted) => Err(UserExit::Intr.into()),
            FaultOutcome::Error(_) => {
                Err(UserExit::MemoryFault { flags: 0, gpa: fault.gpa.0, size: 4096 }.into())
            }
        }
    }

    /// A fault where no memory is, outside the loop: a device in the kernel, else user space.
    pub(crate) fn device_access(&mut self, fault: TdpFault) -> Outcome {
        if self.events.again.is_some() && !fault.final_access {
            // The tables that translate the guest's descriptors or stack lie in device memory. A guest's guest
            // that has such is shut down instead of ending its hypervisor: a fault instead of the event could not be
            // delivered either.
            if self.pending.after_exit.is_nested() {
                self.events.again = None;
                self.events.outer.set(Outer::TRIPLE_FAULT, true);
                self.pending.raise();
                return Ok(());
            }
            let data = ErrorData::new(&self.b.exit_raw());
            return Err(self.internal_error(ERROR_DELIVERY, data));
        }
        self.device.seen.page = Some(fault.gpa.gfn());
        let rip = self.b.rip();
        let decoded = self.device.seen.access.take().filter(|known| known.is_of(fault, rip));
        let plain = match decoded {
            Some(plain) => plain,
            None => match self.plain_outside(fault)? {
                Some(plain) => plain,
                None => return Ok(()),
            },
        };
        let mut access = self.access_of(&plain);
        if self.may_be_kernel_memory(&access) && self.kernel_device(&mut access) {
            self.finish(&plain, &access);
            return Ok(());
        }
        let PlainAccess { simple, next, .. } = plain;
        let then = match access.direction {
            Direction::Read => Completion::Load { simple, next },
            Direction::Write => Completion::Retire { next },
        };
        Err(self.ask_user(&access, then))
    }

    /// The access that made a fault, decoded outside the loop. `None`: it is not a plain one, and was emulated.
    #[inline(never)]
    fn plain_outside(&mut self, fault: TdpFault) -> Outcome<Option<PlainAccess>> {
        let (fetched, decoded) = self.slow_decode()?;
        if decoded.moves_control_block() && self.is_operand_of_l1(fault) {
            // As where the backend carries it out: there is no block.
            self.raise(Exception::gp(0));
            return Ok(None);
        }
        if self.events.again.is_some() || !fault.final_access || fault.fetch {
            // The fault tells nothing of the instruction.
            self.emulate_decoded(Cause::Any, fetched, &decoded)?;
            return Ok(None);
        }
        let plain = self.plain_of(fault, &decoded).filter(|_| !fault.present);
        if plain.is_none() {
            let cause = Cause::Memory { write: fault.write };
            self.emulate_decoded(cause, fetched, &decoded)?;
        }
        Ok(plain)
    }

    /// Whether a fault can be one on the operand of an instruction of SVM's: L1's, and no event's.
    fn is_operand_of_l1(&self, fault: TdpFault) -> bool {
        let is_l1 = self.b.nested().is_some_and(|nested| nested.level() == Level::L1);
        is_l1 && self.events.again.is_none() && !fault.fetch
    }

    /// A device in the kernel has done the access of a plain load or store.
    #[inline(always)]
    fn finish(&mut self, plain: &PlainAccess, access: &DeviceAccess) {
        match access.direction {
            Direction::Read => self.finish_load(plain.simple, access.data, plain.next),
            Direction::Write => self.retire(plain.next),
        }
    }

    /// The answer to a simple load.
    pub(crate) fn finish_load(&mut self, simple: SimpleMmio, data: [u8; 8], next: u64) {
        if let SimpleMmio::Load { dest, .. } = simple
            && let Some(slot) = self.gprs.0.get_mut(usize::from(dest.index & 15))
            && let Some(loaded) = simple.loaded(*slot, u64::from_le_bytes(data))
        {
            *slot = loaded;
        }
        self.retire(next);
    }

    /// Offset in its page of the memory operand. FS and GS bases are not in the control block while
    /// the loop runs, but bases are page-aligned or the check fails, which is safe.
    #[inline(always)]
    pub(crate) fn page_offset(&self, decoded: &Decoded) -> u16 {
        decoded.page_offset(|i| self.gprs.0.get(i & 15).copied().unwrap_or(0), self.b.rip(), |_| 0)
    }

    /// Leaves for user space, which does the access. `then` completes the instruction at the next KVM_RUN.
    #[inline]
    pub(crate) fn ask_user(&mut self, access: &DeviceAccess, then: Completion) -> Break {
        self.device.user_io.completion = then;
        let DeviceAccess { space, address, size, direction, data } = *access;
        let write = direction == Direction::Write;
        match space {
            Space::Memory => UserExit::Mmio { gpa: address, len: size, write, data }.into(),
            Space::Port => {
                self.device.io_data = data;
                UserExit::Io { write, size, port: address as u16, count: 1 }.into()
            }
        }
    }
}
