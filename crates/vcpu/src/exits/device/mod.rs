//! Accesses to devices: what an instruction asks for, and who does it.
//!
//! A guest reaches a device by a port (IN, OUT, INS, OUTS) or by an address where no memory is. Either
//! way the access is one [`DeviceAccess`], and it takes one way: [`Vcpu::kernel_device`] tries what the
//! kernel has there, and what nobody has there is asked of user space.
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

use backend::{Backend, Gprs, Level, Nested, TdpFault};
use emulate::{Cause, Decoded, Fetched, SimpleMmio};
use host::gup::fault_in;
use mmu::Section;
use stats::VcpuCount;
use vm::{
    irq::Space,
    memory::{FaultAccess, FaultOutcome, MemoryError},
};
use x86::{Cr0, Direction, Efer, Exception, Gfn, Gpa};

use crate::{
    Vcpu,
    exits::code::CodeState as _,
    run::events::Outer,
    run::outcome::{Break, Next, Outcome},
    run::user_exit::{ERROR_DELIVERY, ErrorData, UserExit},
};
use user_io::Completion;

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

    /// A store of `data`; `None` for what is no single access: none, or more than 8 bytes.
    pub(crate) fn store_of(address: Gpa, data: &[u8]) -> Option<Self> {
        matches!(data.len(), 1..=8).then(|| Self::store(address, data.len() as u8, padded(data)))
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

    /// Whether the guest writes.
    const fn is_store(&self) -> bool {
        matches!(self.direction, Direction::Write)
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
    /// What it asks for, with what a store stores.
    access: DeviceAccess,
    simple: SimpleMmio,
    /// RIP after the instruction.
    next: u64,
}

impl PlainAccess {
    /// Whether it is the access that made `fault`. With shadow paging the guest's tables may lead elsewhere by
    /// now than when it was decoded.
    #[inline]
    fn is_of(&self, fault: TdpFault) -> bool {
        self.access.address == fault.gpa.0 && self.access.is_store() == fault.write
    }
}

/// Whether VMLOAD or VMSAVE can have named the block at `gpa`: what the CPU asks before it looks at the operand (APM vol.
/// 3, VMLOAD), and RAX.
fn may_name_block(b: &impl Backend, gprs: &Gprs, gpa: Gpa) -> bool {
    let c = b.control();
    let [rax, ..] = gprs.0;
    c.efer.contains(Efer::SVME)
        && c.cr0.contains(Cr0::PE)
        && b.cpl() == 0
        && Gpa(rax).gfn() == gpa.gfn()
}

/// Whether a fault can be one on the operand of an instruction of SVM's: L1's.
fn is_operand_of_l1(b: &impl Backend, fault: TdpFault) -> bool {
    let is_l1 = b.nested().is_some_and(|nested| nested.level() == Level::L1);
    is_l1 && !fault.fetch
}

/// Offset in its page of the memory operand, or [`UNKNOWN`]. FS and GS bases are not in the control block while the loop
/// runs, and are taken for the beginning of a page. Where one is not, the offset is none at which its access could have
/// faulted but one: the beginning of a second page, into which it crosses. So there it is not known where it began.
#[inline(always)]
pub(crate) fn page_offset(b: &impl Backend, gprs: &Gprs, decoded: &Decoded) -> u16 {
    let mut has_base = false;
    let at = decoded.page_offset(
        |i| gprs.get(i),
        b.rip(),
        |_| {
            has_base = true;
            0
        },
    );
    if has_base && at == 0 { UNKNOWN } else { at }
}

/// The offset of no fault.
const UNKNOWN: u16 = 0x1000;

/// Whether a fault tells of its instruction all that a plain access is known by.
const fn tells_access(fault: TdpFault) -> bool {
    // A present page is memory whose permissions failed, and a fetch or a walk says nothing of the
    // operand.
    fault.final_access && !fault.fetch && !fault.present
}

/// Where the last device access outside the loop went, and the one that is on its way there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceSeen {
    /// [`NOWHERE`] before the first.
    page: Gfn,
    access: Option<PlainAccess>,
}

/// The page of no access: a guest-physical address has at most 52 bits.
const NOWHERE: Gfn = Gfn(u64::MAX);

impl Default for DeviceSeen {
    fn default() -> Self {
        Self { page: NOWHERE, access: None }
    }
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
        self.page == gpa.gfn()
    }

    /// The loop begins, and none was decoded for the exit that it will be left for. Never kept longer: what a
    /// store stores was read from the registers when it was decoded.
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

impl Device {
    /// Leaves for user space, which does the access of IN, OUT or an emulated instruction. `then` completes the
    /// instruction at the next KVM_RUN.
    #[inline]
    pub(crate) fn ask(&mut self, access: &DeviceAccess, then: Completion) -> Break {
        match access.space {
            Space::Memory => self.ask_memory(access, then),
            Space::Port => {
                self.user_io.completion = then;
                self.io_data = access.data;
                let (write, size, port) = (access.is_store(), access.size, access.address as u16);
                UserExit::Io { write, size, port, count: 1 }.into()
            }
        }
    }

    /// Leaves for user space, which does an access where no memory is. As [`Self::ask`].
    #[inline(always)]
    fn ask_memory(&mut self, access: &DeviceAccess, then: Completion) -> Break {
        self.user_io.completion = then;
        let DeviceAccess { address: gpa, size: len, data, .. } = *access;
        UserExit::Mmio { gpa, len, write: access.is_store(), data }.into()
    }

    /// Leaves for user space, which gives several items of a port at once.
    pub(crate) fn ask_items(&mut self, access: &DeviceAccess, count: u16) -> Break {
        self.user_io.completion = Completion::Emulation;
        let (size, port, count) = (access.size, access.address as u16, count.into());
        UserExit::Io { write: false, size, port, count }.into()
    }
}

impl<B: Backend> Vcpu<B> {
    /// A TDP fault inside the loop: answered if it is a simple access to the APIC's page. An
    /// access to another device is decoded here, where that is cheap, and finished outside.
    #[inline]
    pub(crate) fn answer_mmio(&mut self, s: Section<'_>, fault: TdpFault) -> Next {
        if !tells_access(fault) {
            return Next::Leave;
        }
        let apic = fault.gpa.0 & !0xfff == self.shared.lapic.base() & !0xfff
            && self.shared.in_kernel_apic
            && self.shared.lapic.mmio_base().is_some();
        // Most faults are of memory that is not mapped yet. Those are not decoded for nothing.
        if !apic && !self.device.seen.is_near(fault.gpa) {
            return Next::Leave;
        }
        // The access interrupted a delivery: its event has to be kept, outside.
        if self.b.interrupted_delivery().is_some() {
            return Next::Leave;
        }
        let Some(decoded) = self.decode_here(s) else { return Next::Leave };
        let Some(simple) = decoded.simple_mmio() else { return Next::Leave };
        let at = page_offset(&self.b, &self.gprs, &decoded);
        // Not cut to 32 bits: who uses it asks for 64-bit code first.
        let next = self.b.rip().wrapping_add(u64::from(decoded.len()));
        if apic {
            self.answer_apic(s, fault, simple, at, next)
        } else {
            self.answer_plain(fault, simple, at, next)
        }
    }

    /// The access that made a fault, if it is a plain one. Bytes that access it the other way came after
    /// the fault, and its page tables may forbid that.
    #[inline(always)]
    fn plain_of(
        &self,
        fault: TdpFault,
        simple: SimpleMmio,
        at: u16,
        next: u64,
    ) -> Option<PlainAccess> {
        // Eight bytes from there may lie in two pages, and of the second one the fault says nothing.
        if at > 0xff8 || u64::from(at) != fault.gpa.0 & 0xfff || !self.b.is_64bit_code() {
            return None;
        }
        let access = match simple {
            SimpleMmio::Load { size, .. } => DeviceAccess::load(fault.gpa, size),
            SimpleMmio::StoreReg { size, src } => {
                let whole = self.gprs.get(src.index.into());
                DeviceAccess::store(fault.gpa, size, src.extract(whole).to_le_bytes())
            }
            SimpleMmio::StoreImm { size, value } => {
                DeviceAccess::store(fault.gpa, size, value.to_le_bytes())
            }
        };
        // The guest's tables were checked for the fault's kind of access alone.
        if access.is_store() != fault.write {
            return None;
        }
        Some(PlainAccess { access, simple, next })
    }

    /// A TDP fault: a page to be mapped, or a device.
    pub(crate) fn tdp_fault(&mut self, fault: TdpFault) -> Outcome {
        // The tables are ours, so it is a bug of ours. The access would fault again and again.
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
            // An invalidation of the host's came between: the access faults again, or finds the page.
            FaultOutcome::Retry => Ok(()),
            // A write to a read-only slot is the VMM's: flash memory takes commands so (KVM API, KVM_MEM_READONLY).
            FaultOutcome::Mmio | FaultOutcome::ReadonlyWrite => {
                self.stats.count(VcpuCount::PfEmulate);
                self.device_access(fault)
            }
            FaultOutcome::Error(MemoryError::Interrupted) => Err(UserExit::Intr.into()),
            FaultOutcome::Error(_) => {
                // EFAULT, as on stock KVM: the VMM has nothing mapped where the slot says.
                Err(UserExit::MemoryFault { flags: 0, gpa: fault.gpa.0, size: 4096 }.into())
            }
        }
    }

    /// A fault where no memory is, outside the loop: a device in the kernel, else user space.
    pub(crate) fn device_access(&mut self, fault: TdpFault) -> Outcome {
        // The delivery of an event has met a device: no instruction at RIP stands for it.
        if self.events.again.is_some() {
            return self.delivery_needs_device(fault.gpa);
        }
        // The next fault in this page most likely is the same device's.
        self.device.seen.page = fault.gpa.gfn();
        // What the loop has decoded is used only for the very access that it was decoded for.
        if !self.device.seen.access.as_ref().is_some_and(|plain| plain.is_of(fault)) {
            let (fetched, decoded) = self.slow_decode()?;
            let at = page_offset(&self.b, &self.gprs, &decoded);
            // Not cut to 32 bits: a plain access is one of 64-bit code.
            let next = self.b.rip().wrapping_add(u64::from(decoded.len()));
            let simple = decoded.simple_mmio().filter(|_| tells_access(fault));
            self.device.seen.access =
                simple.and_then(|simple| self.plain_of(fault, simple, at, next));
            if !self.device.seen.is_decoded() {
                return self.emulate_access(fault, fetched, &decoded);
            }
        }
        // The kernel's devices first, as everywhere: a VMM never sees the accesses that they take.
        if self.may_be_kernel_memory(fault)
            && self.device.seen.access.is_some_and(|plain| self.kernel_plain(&plain))
        {
            return Ok(());
        }
        let Some(PlainAccess { access, simple, next }) = self.device.seen.access else {
            return Ok(());
        };
        let then = match access.direction {
            Direction::Read => Completion::Load { simple, next },
            Direction::Write => Completion::Retire { next },
        };
        Err(self.device.ask_memory(&access, then))
    }

    /// The descriptors or the stack that a delivery needs, or the tables that translate them, lie in device memory. A
    /// guest's guest that has such is shut down instead of ending its hypervisor: a fault instead of the event
    /// could not be delivered either.
    #[cold]
    fn delivery_needs_device(&mut self, gpa: Gpa) -> Outcome {
        if self.pending.after_exit.is_nested() {
            self.events.again = None;
            self.events.outer.set(Outer::TRIPLE_FAULT, true);
            self.pending.raise();
            return Ok(());
        }
        Err(self.delivery_met_device(gpa))
    }

    /// KVM_EXIT_INTERNAL_ERROR for an event whose delivery has met a device at `gpa`, with the words that stock KVM gives.
    #[cold]
    pub(crate) fn delivery_met_device(&mut self, gpa: Gpa) -> Break {
        let (code, [info1, info2], ..) = self.b.exit_record();
        let cpu = host::smp::cpu_id() as u64;
        self.rare.internal_error(ERROR_DELIVERY, ErrorData::new(&[info2, code, info1, gpa.0, cpu]))
    }

    /// An access to a device by an instruction that is no plain load or store, or cannot be told to be one.
    #[inline(never)]
    fn emulate_access(&mut self, fault: TdpFault, fetched: Fetched, decoded: &Decoded) -> Outcome {
        if decoded.moves_control_block() && is_operand_of_l1(&self.b, fault) {
            if may_name_block(&self.b, &self.gprs, fault.gpa) {
                // As where the backend carries it out: there is no block.
                return Err(self.no_block());
            }
            // Nothing that has made this exit: another vCPU writes the code, perhaps a program's, which must not stop the VM.
            self.raise(Exception::gp(0));
            return Ok(());
        }
        // A fetch or a walk faulted: the fault tells nothing of the instruction.
        let told = fault.final_access && !fault.fetch;
        let cause = if told { Cause::Memory { write: fault.write } } else { Cause::Any };
        self.emulate_decoded(cause, fetched, decoded)
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
}
