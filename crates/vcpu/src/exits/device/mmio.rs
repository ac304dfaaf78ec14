//! Plain loads and stores where no memory is: the local APIC's page and the kernel's devices inside the
//! loop, everything else outside it.
//!
//! The fault has told the guest-physical address, and the CPU has walked the guest's page tables and
//! checked its permissions. So a MOV needs no emulation: of the instruction only the register, the size
//! and the length matter. It has to go the way that the fault says, at the offset in the page that the
//! fault says; else it is another instruction, which came there after the exit, or one that crosses
//! pages, and is for the emulator (docs/adr/0041).
//!
//! Decoding is worth its time inside the loop only if the fault is not a missing page of memory. A page
//! where a device was accessed before most likely is still a device's ([`DeviceSeen`]).

use backend::{Backend, TdpFault};
use emulate::{Cause, Decoded, SimpleMmio};
use mmu::Section;
use stats::VcpuCount;
use vm::memory::{FaultAccess, FaultOutcome, MemoryError};
use x86::{Gfn, Gpa};

use super::{DeviceAccess, Direction, user_io::Completion};
use crate::{
    Vcpu,
    run::outcome::{Next, Outcome},
    run::user_exit::{ERROR_DELIVERY, ErrorData, UserExit},
};

/// The timer's current count, the one register whose value needs the time.
const TIMER_CURRENT: u32 = 0x390;

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

impl<B: Backend> Vcpu<B> {
    /// A TDP fault inside the loop: answered if it is a simple access to the APIC's page. An
    /// access to another device is decoded here, where that is cheap, and finished outside.
    #[inline]
    pub(crate) fn answer_mmio(&mut self, s: Section<'_>, fault: TdpFault) -> Next {
        self.device_seen.forget_decoded();
        if fault.present || !fault.final_access || fault.fetch {
            return Next::Leave;
        }
        let apic = fault.gpa.0 & !0xfff == self.shared.lapic.base() & !0xfff
            && self.shared.in_kernel_apic
            && self.shared.lapic.mmio_base().is_some();
        if !apic && !self.device_seen.is_near(fault.gpa) {
            return Next::Leave;
        }
        // The access interrupted a delivery: its event has to be kept, outside.
        if self.b.interrupted_delivery().is_some() {
            return Next::Leave;
        }
        let Some(decoded) = self.decode_here(s) else { return Next::Leave };
        let Some(simple) = decoded.simple_mmio() else { return Next::Leave };
        if !apic {
            self.device_seen.access = self.plain_of(fault, &decoded);
            return self.answer_kernel_device(fault);
        }
        let offset = (fault.gpa.0 & 0xfff) as u32;
        // The fault names the first byte that faulted, which is not the access's first when that
        // began in another page. The segments that matter here are the loop's only in 64-bit mode.
        if offset > 0xffc
            || !self.is_64bit_code()
            || u32::from(self.page_offset(&decoded)) != offset
        {
            return Next::Leave;
        }
        let next = self.wrap_rip(self.b.rip().wrapping_add(u64::from(decoded.len())));
        match simple {
            SimpleMmio::Load { size: 4, dest, .. } if !fault.write => {
                if offset & 0xf != 0 || !self.collect_pv_eoi(s) {
                    return Next::Leave;
                }
                self.sync_priority();
                self.withdraw_offer();
                let (value, then) = if offset == TIMER_CURRENT {
                    self.with_kernel(|v| v.shared.lapic.read(offset, host::clock::monotonic_ns))
                } else {
                    (self.shared.lapic.read(offset, || 0), Next::Again)
                };
                let index = usize::from(dest.index & 15);
                if let Some(slot) = self.gprs.0.get_mut(index)
                    && let Some(loaded) = simple.loaded(*slot, value.into())
                {
                    *slot = loaded;
                }
                self.retire(next);
                then
            }
            SimpleMmio::StoreReg { size: 4, src } if fault.write => {
                let index = usize::from(src.index & 15);
                let value = self.gprs.0.get(index).map_or(0, |v| src.extract(*v));
                self.apic_store(s, offset, value as u32, next)
            }
            SimpleMmio::StoreImm { size: 4, value } if fault.write => {
                self.apic_store(s, offset, value as u32, next)
            }
            _ => Next::Leave,
        }
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

    /// A plain access to a device other than the local APIC, inside the loop: done if the kernel has one
    /// there.
    fn answer_kernel_device(&mut self, fault: TdpFault) -> Next {
        let Some(plain) = self.device_seen.access else { return Next::Leave };
        if !self.vm.irq().has_address(fault.gpa.0, fault.write) {
            return Next::Leave;
        }
        let (done, then) = self.with_kernel(|v| {
            let mut access = v.access_of(&plain);
            // A slot may have come since the page was last found to be a device's.
            let done =
                v.memory.slots().find(fault.gpa.gfn()).is_none() && v.kernel_device(&mut access);
            if done {
                v.finish(&plain, &access);
            }
            done
        });
        if done {
            self.device_seen.access = None;
            then
        } else {
            Next::Leave
        }
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
        let outcome = self.memory.fault(&mut self.tables, &access, &**self.vm);
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
            // The tables that translate the guest's descriptors or stack lie in device memory.
            let data = ErrorData::new(&self.b.exit_raw());
            return Err(self.internal_error(ERROR_DELIVERY, data));
        }
        self.device_seen.page = Some(fault.gpa.gfn());
        let rip = self.b.rip();
        let decoded = self.device_seen.access.take().filter(|known| known.is_of(fault, rip));
        let plain = match decoded {
            Some(plain) => Some(plain),
            None => self.plain_outside(fault)?,
        };
        match plain {
            Some(plain) => self.do_plain(&plain),
            None => Ok(()),
        }
    }

    /// The access that made a fault, decoded outside the loop. `None`: it is not a plain one, and was emulated.
    #[inline(never)]
    fn plain_outside(&mut self, fault: TdpFault) -> Outcome<Option<PlainAccess>> {
        if self.events.again.is_some() || !fault.final_access || fault.fetch {
            // The fault tells nothing of the instruction.
            self.emulate_here(Cause::Any)?;
            return Ok(None);
        }
        let (fetched, decoded) = self.slow_decode()?;
        let plain = self.plain_of(fault, &decoded).filter(|_| !fault.present);
        if plain.is_none() {
            let cause = Cause::Memory { write: fault.write };
            self.emulate_decoded(cause, fetched, &decoded)?;
        }
        Ok(plain)
    }

    /// Does a plain access: a device in the kernel, else user space.
    #[inline(always)]
    fn do_plain(&mut self, plain: &PlainAccess) -> Outcome {
        let mut access = self.access_of(plain);
        if self.may_be_kernel_memory(&access) && self.kernel_device(&mut access) {
            self.finish(plain, &access);
            return Ok(());
        }
        let PlainAccess { simple, next, .. } = *plain;
        let then = match access.direction {
            Direction::Read => Completion::Load { simple, next },
            Direction::Write => Completion::Retire { next },
        };
        Err(self.ask_user(&access, then))
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
    fn page_offset(&self, decoded: &Decoded) -> u16 {
        decoded.page_offset(|i| self.gprs.0.get(i & 15).copied().unwrap_or(0), self.b.rip(), |_| 0)
    }

    #[inline]
    fn apic_store(&mut self, s: Section<'_>, offset: u32, value: u32, next: u64) -> Next {
        if offset & 0xf != 0 || !self.collect_pv_eoi(s) {
            return Next::Leave;
        }
        self.sync_priority();
        self.retire(next);
        let effect = self.shared.lapic.write(offset, value);
        self.effect_in_loop(effect)
    }
}
