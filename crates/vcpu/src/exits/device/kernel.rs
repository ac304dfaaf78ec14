//! Devices in the kernel: the local APIC's page, the I/O APIC, the PIC and the PIT, and writes for which an
//! ioeventfd or a coalesced zone waits.
//!
//! Inside the loop a plain access to the APIC's page is done with no call of the kernel's; what has to call
//! it goes through [`Vcpu::with_kernel`]. Outside the loop all of them are one question,
//! [`Vcpu::kernel_device`].

use backend::{Backend, TdpFault};
use emulate::SimpleMmio;
use host::trace::Mmio;
use mmu::Section;
use vm::{irq::Space, settings::quirk};
use x86::Direction;

use super::{DeviceAccess, PlainAccess};
use crate::{Vcpu, exits::code::CodeState as _, observe::tell_mmio, run::outcome::Next};

/// The timer's current count, the one register whose value needs the time.
const TIMER_CURRENT: u32 = 0x390;

/// Inside the loop.
impl<B: Backend> Vcpu<B> {
    /// A plain access to the local APIC's page: `simple`, at `at` in its page, RIP `next` behind it.
    #[inline(always)]
    pub(super) fn answer_apic(
        &mut self,
        s: Section<'_>,
        fault: TdpFault,
        simple: SimpleMmio,
        at: u16,
        next: u64,
    ) -> Next {
        let offset = (fault.gpa.0 & 0xfff) as u32;
        // The fault names the first byte that faulted, which is not the access's first when that
        // began in another page. The segments that matter here are the loop's only in 64-bit mode.
        // From 0xffd on four bytes would go into the next page, of which the fault says nothing.
        if offset > 0xffc || !self.b.is_64bit_code() || u32::from(at) != offset {
            return Next::Leave;
        }
        match simple {
            SimpleMmio::Load { size: 4, dest, .. } if !fault.write => {
                // Registers lie 16 bytes apart. What lies between is the slow path's to answer.
                if offset & 0xf != 0 || !self.collect_pv_eoi(s) {
                    return Next::Leave;
                }
                // It may be TPR or PPR that is read, or IRR, from which an offered vector is missing.
                self.sync_priority();
                // Before the read, which is to show the vector as requested.
                self.withdraw_offer();
                let (value, then) = if offset == TIMER_CURRENT {
                    self.with_kernel(|v| v.shared.lapic.read(offset, host::clock::monotonic_ns))
                } else {
                    let value = self.shared.lapic.read(offset, || 0);
                    // A register that is not there is an error, which may have an interrupt of its own.
                    self.pending.raise_if(self.shared.lapic.maybe_pending());
                    (value, Next::Again)
                };
                // The number is masked: it comes from the guest's instruction.
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

    #[inline]
    fn apic_store(&mut self, s: Section<'_>, offset: u32, value: u32, next: u64) -> Next {
        if offset & 0xf != 0 || !self.collect_pv_eoi(s) {
            return Next::Leave;
        }
        self.sync_priority();
        // Before the write, which may leave the loop for the kernel: it must not be executed twice.
        self.retire(next);
        let effect = self.shared.lapic.write(offset, value);
        self.effect_in_loop(effect)
    }

    /// A plain access to a device other than the local APIC, inside the loop: done if the kernel has one
    /// there, else kept to be finished outside. Out of line: the local APIC's page would pay for its registers.
    #[inline(never)]
    pub(super) fn answer_plain(
        &mut self,
        fault: TdpFault,
        simple: SimpleMmio,
        at: u16,
        next: u64,
    ) -> Next {
        let Some(plain) = self.plain_of(fault, simple, at, next) else { return Next::Leave };
        if self.vm.irq().has_address(fault.gpa.0, Direction::write_if(fault.write)) {
            let (done, then) = self.with_kernel(|v| {
                // A slot may have come since the page was last found to be a device's.
                v.mmu.memory.slots().find(fault.gpa.gfn()).is_none() && v.kernel_plain(&plain)
            });
            if done {
                return then;
            }
        }
        // Kept for the way out: decoded anew there, the bytes could be another vCPU's work by then.
        self.device.seen.access = Some(plain);
        Next::Leave
    }
}

/// Outside it, or with the host's segments.
impl<B: Backend> Vcpu<B> {
    /// Does an access that a device in the kernel takes; what was read is in `access` then. False: no such
    /// device is there, and nothing was done. The kernel may be called.
    #[inline(always)]
    pub(crate) fn kernel_device(&mut self, access: &mut DeviceAccess) -> bool {
        match access.space {
            Space::Memory => self.kernel_memory(access),
            Space::Port => self.kernel_port(access),
        }
    }

    /// Has a device in the kernel do a plain load or store, and completes it. False: nothing was done.
    #[inline(always)]
    pub(super) fn kernel_plain(&mut self, plain: &PlainAccess) -> bool {
        let mut access = plain.access;
        if !self.kernel_memory(&mut access) {
            return false;
        }
        match access.direction {
            Direction::Read => self.finish_load(plain.simple, access.data, plain.next),
            Direction::Write => self.retire(plain.next),
        }
        true
    }

    /// Whether a device in the kernel may take an access to memory: a few loads.
    #[inline(always)]
    pub(crate) fn may_be_kernel_memory(&self, fault: TdpFault) -> bool {
        self.shared.is_apic_page(fault.gpa.0)
            || self.vm.irq().has_address(fault.gpa.0, Direction::write_if(fault.write))
    }

    #[inline]
    fn kernel_memory(&mut self, access: &mut DeviceAccess) -> bool {
        let DeviceAccess { address, size, direction, .. } = *access;
        let apic = self.shared.is_apic_page(address);
        let Some(data) = access.data.get_mut(..usize::from(size)) else { return false };
        // The APIC first: its page hides what lies below it, and it may be moved over another
        // device.
        let done = apic && self.apic_page_access(address, direction, data)
            || match direction {
                Direction::Read => self.vm.irq().mmio_read(address, data),
                Direction::Write => {
                    let owing = self.vm.irq().mmio_write(address, data);
                    owing
                        .inspect(|owing| self.events.note_owing(&mut self.pending, *owing))
                        .is_some()
                }
            };
        if !done {
            return false;
        }
        match direction {
            Direction::Read => tell_mmio(Mmio::Read, address, data),
            Direction::Write => {
                tell_mmio(Mmio::Write, address, data);
                // The device may have made an interrupt pending, for which no IPI comes to the CPU
                // that caused it.
                self.pending.raise();
            }
        }
        true
    }

    #[inline(always)]
    fn kernel_port(&mut self, access: &mut DeviceAccess) -> bool {
        let (port, size) = (access.address as u16, access.size);
        match access.direction {
            Direction::Read => {
                let mut value = 0;
                let Some(owing) = self.vm.irq().pio_read(port, size, &mut value) else {
                    return false;
                };
                self.events.note_owing(&mut self.pending, owing);
                access.data = u64::from(value).to_le_bytes();
            }
            Direction::Write => {
                let value = u64::from_le_bytes(access.data) as u32;
                let Some(owing) = self.vm.irq().pio_write(port, size, value) else {
                    return false;
                };
                self.events.note_owing(&mut self.pending, owing);
            }
        }
        // The 8259A's output may have risen.
        self.pending.raise_if(self.vm.irq().extint_pending());
        true
    }

    /// An access to that page. Where the APIC does not answer, for it is disabled or in x2APIC mode, loads
    /// are all ones and stores go nowhere, unless the VMM wants to hear of them
    /// (KVM_X86_QUIRK_LAPIC_MMIO_HOLE).
    #[inline(never)]
    fn apic_page_access(&mut self, address: u64, direction: Direction, data: &mut [u8]) -> bool {
        if self.shared.lapic.mmio_base().is_none() {
            let hole = self.vm.settings.has_quirk(quirk::LAPIC_MMIO_HOLE);
            if hole && direction == Direction::Read {
                data.fill(0xff);
            }
            return hole;
        }
        let offset = (address & 0xfff) as u32;
        // The registers are asked for the priority, which the guest may have set without an exit.
        self.sync_priority();
        match direction {
            Direction::Read => {
                self.withdraw_offer();
                self.shared.lapic.mmio_read(offset, data, host::clock::monotonic_ns)
            }
            Direction::Write => match self.shared.lapic.mmio_write(offset, data) {
                Some(effect) => {
                    self.effect(effect);
                    true
                }
                None => false,
            },
        }
    }
}
