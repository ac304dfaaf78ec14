//! TDP faults that are device accesses: the local APIC's page inside the loop, everything
//! else outside it.

use backend::{Backend, TdpFault};
use emulate::{CodeSize, Decoded, Fetched, SimpleMmio};
use host::trace::Mmio;
use mmu::{PagingContext, Section};
use vm::settings::quirk;
use x86::cpuid::{Vendor, feature};

use x86::{Gfn, Gpa};

use crate::{Vcpu, run::Open, run::inner::Next, run::outcome::Outcome, run::user_exit::UserExit};

/// The timer's current count, the one register whose value needs the time.
const TIMER_CURRENT: u32 = 0x390;

/// A simple device access that was decoded inside the loop.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceAccess {
    gpa: Gpa,
    simple: SimpleMmio,
    next: u64,
}

impl DeviceAccess {
    /// Bytes, and whether they are written.
    const fn shape(&self) -> (u8, bool) {
        match self.simple {
            SimpleMmio::Load { size, .. } => (size, false),
            SimpleMmio::StoreReg { size, .. } | SimpleMmio::StoreImm { size, .. } => (size, true),
        }
    }
}

/// Where the last device access outside the loop went, and the one that is on its way there.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceSeen {
    page: Option<Gfn>,
    access: Option<DeviceAccess>,
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
}

impl<B: Backend> Vcpu<B> {
    /// How the guest addresses memory now.
    #[inline]
    pub(crate) fn paging(&self) -> PagingContext {
        let c = self.b.control();
        PagingContext {
            cr0: c.cr0,
            cr3: c.cr3,
            cr4: c.cr4,
            efer: c.efer,
            rflags_ac: self.b.rflags() & (1 << 18) != 0,
            cpl: self.b.cpl(),
            pkru: self.b.pkru(),
            maxphyaddr: self.cpuid.maxphyaddr(),
            gbpages: self.cpuid.has(feature::GBPAGES),
            amd: self.cpuid.vendor() == Vendor::Amd,
        }
    }

    /// The decoded instruction at RIP without sleeping.
    #[inline]
    pub(crate) fn decode_here(&mut self, s: Section<'_>) -> Option<Decoded> {
        let size = self.code_size();
        let assisted = self.b.insn_bytes();
        let fetched = if assisted.is_empty() {
            let (bytes, len) = self.fetch_here(s, size)?;
            Fetched::new(bytes.get(..usize::from(len))?, size)
        } else {
            Fetched::new(assisted, size)
        };
        self.decode.get(fetched).ok()
    }

    /// A TDP fault inside the loop: answered if it is a simple access to the APIC's page. An
    /// access to another device is decoded here, where that is cheap, and finished outside.
    #[inline]
    pub(crate) fn answer_mmio(&mut self, s: Section<'_>, fault: TdpFault) -> Next {
        self.device_seen.access = None;
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
            self.note_device_access(fault, simple, &decoded);
            return self.answer_kernel_device(fault);
        }
        let offset = (fault.gpa.0 & 0xfff) as u32;
        // The fault names the first byte that faulted, which is not the access's first when that
        // began in another page. The segments that matter here are the loop's only in 64-bit mode.
        if offset > 0xffc
            || self.code_size() != CodeSize::Bits64
            || u32::from(self.page_offset(&decoded)) != offset
        {
            return Next::Leave;
        }
        let next = self.wrap_rip(self.b.rip().wrapping_add(u64::from(decoded.len())));
        match simple {
            SimpleMmio::Load { size: 4, dest, .. } if !fault.write => {
                if offset & 0xf != 0 || !self.settle_pv_eoi(s) {
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

    /// Keeps what a simple device access does, so that the outside need not decode it again.
    #[inline]
    fn note_device_access(&mut self, fault: TdpFault, simple: SimpleMmio, decoded: &Decoded) {
        let offset = (fault.gpa.0 & 0xfff) as u32;
        if offset > 0xff8
            || self.code_size() != CodeSize::Bits64
            || u32::from(self.page_offset(decoded)) != offset
        {
            return;
        }
        let next = self.b.rip().wrapping_add(u64::from(decoded.len()));
        let access = DeviceAccess { gpa: fault.gpa, simple, next };
        // Bytes that access it the other way came after the fault, and its page tables may forbid that.
        if access.shape().1 == fault.write {
            self.device_seen.access = Some(access);
        }
    }

    /// A simple access to a device other than the local APIC, inside the loop: done if the kernel
    /// has one there.
    fn answer_kernel_device(&mut self, fault: TdpFault) -> Next {
        let Some(access) = self.device_seen.access else { return Next::Leave };
        if !self.vm.irq().has_address(fault.gpa.0, fault.write) {
            return Next::Leave;
        }
        let (served, then) = self.with_kernel(|v| {
            // A slot may have come since the page was last found to be a device's.
            v.memory.slots().find(fault.gpa.gfn()).is_none() && v.kernel_device(&access)
        });
        if served {
            self.device_seen.access = None;
            then
        } else {
            Next::Leave
        }
    }

    /// Whether an address is in the page of an APIC that does not answer there: it is disabled or in
    /// x2APIC mode. Loads are all ones then and stores go nowhere, unless the VMM wants to hear of them
    /// (KVM_X86_QUIRK_LAPIC_MMIO_HOLE).
    pub(crate) fn is_apic_hole(&self, gpa: Gpa) -> bool {
        let lapic = &self.shared.lapic;
        self.shared.in_kernel_apic
            && gpa.0 & !0xfff == lapic.base() & !0xfff
            && lapic.mmio_base().is_none()
            && self.vm.settings.has_quirk(quirk::LAPIC_MMIO_HOLE)
    }

    /// A device in the kernel. False when there is none, or not for this access.
    fn kernel_device(&mut self, access: &DeviceAccess) -> bool {
        let mut data = self.stored(access.simple).unwrap_or(0).to_le_bytes();
        let (size, write) = access.shape();
        let hole = self.is_apic_hole(access.gpa);
        let Some(part) = data.get_mut(..usize::from(size)) else { return false };
        if hole {
            if write {
                self.retire(access.next);
            } else {
                part.fill(0xff);
                self.finish_load(access.simple, data, access.next);
            }
        } else if write {
            if !self.vm.irq().mmio_write(access.gpa.0, part) {
                return false;
            }
            self.tell_mmio(Mmio::Write, access.gpa.0, part);
            self.retire(access.next);
            self.recheck = true;
        } else {
            if !self.vm.irq().mmio_read(access.gpa.0, part) {
                return false;
            }
            self.tell_mmio(Mmio::Read, access.gpa.0, part);
            self.finish_load(access.simple, data, access.next);
        }
        true
    }

    /// What a store writes; `None` for a load.
    fn stored(&self, simple: SimpleMmio) -> Option<u64> {
        match simple {
            SimpleMmio::Load { .. } => None,
            SimpleMmio::StoreReg { src, .. } => {
                let whole = self.gprs.0.get(usize::from(src.index & 15)).copied().unwrap_or(0);
                Some(src.extract(whole))
            }
            SimpleMmio::StoreImm { value, .. } => Some(value),
        }
    }

    /// Finishes a simple device access outside the loop: a device in the kernel, else user space.
    /// False: there was none.
    pub(crate) fn finish_device_access(&mut self, fault: TdpFault) -> Outcome<bool> {
        self.device_seen.page = Some(fault.gpa.gfn());
        let Some(access) = self.device_seen.access.take() else { return Ok(false) };
        if access.gpa != fault.gpa {
            return Ok(false);
        }
        if self.kernel_device(&access) {
            return Ok(true);
        }
        let DeviceAccess { gpa, simple, next } = access;
        let stored = self.stored(simple);
        self.open = match stored {
            Some(_) => Open::Out { next },
            None => Open::Load { simple, next },
        };
        let (len, write) = access.shape();
        let data = stored.unwrap_or(0).to_le_bytes();
        Err(UserExit::Mmio { gpa: gpa.0, len, write, data }.into())
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
    #[inline]
    fn page_offset(&self, decoded: &Decoded) -> u16 {
        decoded.page_offset(|i| self.gprs.0.get(i & 15).copied().unwrap_or(0), self.b.rip(), |_| 0)
    }

    #[inline]
    fn apic_store(&mut self, s: Section<'_>, offset: u32, value: u32, next: u64) -> Next {
        if offset & 0xf != 0 || !self.settle_pv_eoi(s) {
            return Next::Leave;
        }
        self.sync_priority();
        self.retire(next);
        let effect = self.shared.lapic.write(offset, value);
        self.effect_in_loop(effect)
    }
}
