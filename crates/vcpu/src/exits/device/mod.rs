//! Accesses to devices: what an instruction asks for, and who does it.
//!
//! A guest reaches a device by a port (IN, OUT, INS, OUTS) or by an address where no memory is. Either
//! way the access is one [`DeviceAccess`], and it takes one way: [`Vcpu::kernel_device`] tries what the
//! kernel has there, and what nobody has there is asked of user space by [`Vcpu::ask_user`]. What the
//! kernel has is the local APIC's page, the I/O APIC, the PIC and the PIT, and writes for which an
//! ioeventfd or a coalesced zone waits.
//!
//! Three callers make such accesses, because most of them need not be emulated:
//!
//! - [`mmio`]: a plain load or store. The fault has told the address and the guest's page tables were
//!   walked by the CPU, so the instruction only says which register is meant. Seen inside the inner loop
//!   where that is cheap: the APIC's page is done there, and so is a device of the kernel's.
//! - [`pio`]: IN and OUT. The exit tells everything.
//! - [`emulation`](super::emulation): every other instruction, and strings.
//!
//! User space answers at the next KVM_RUN. What is left open until then, and how the answer completes
//! the instruction, is in [`user_io`]: one place for all three, because a VMM that sets registers or
//! resets the vCPU in between abandons whichever it is.

pub(crate) mod mmio;
pub(crate) mod pio;
pub mod user_io;

use backend::Backend;
use host::trace::Mmio;
use vm::{irq::Space, settings::quirk};
use x86::Gpa;

use crate::{
    Vcpu,
    run::{outcome::Break, user_exit::UserExit},
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

    /// Whether a device in the kernel may take an access to memory: a few loads.
    #[inline(always)]
    pub(crate) fn may_be_kernel_memory(&self, access: &DeviceAccess) -> bool {
        let write = access.direction == Direction::Write;
        self.is_apic_page(access.address) || self.vm.irq().has_address(access.address, write)
    }

    #[inline]
    fn kernel_memory(&mut self, access: &mut DeviceAccess) -> bool {
        let DeviceAccess { address, size, direction, .. } = *access;
        let apic = self.is_apic_page(address);
        let Some(data) = access.data.get_mut(..usize::from(size)) else { return false };
        let done = apic && self.apic_page_access(address, direction, data)
            || match direction {
                Direction::Read => self.vm.irq().mmio_read(address, data),
                Direction::Write => self.vm.irq().mmio_write(address, data),
            };
        if !done {
            return false;
        }
        match direction {
            Direction::Read => self.tell_mmio(Mmio::Read, address, data),
            Direction::Write => {
                self.tell_mmio(Mmio::Write, address, data);
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
                self.note_owing(owing);
                access.data = u64::from(value).to_le_bytes();
            }
            Direction::Write => {
                let value = u64::from_le_bytes(access.data) as u32;
                let Some(owing) = self.vm.irq().pio_write(port, size, value) else {
                    return false;
                };
                self.note_owing(owing);
            }
        }
        // The 8259A's output may have risen.
        self.pending.raise_if(self.vm.irq().extint_pending());
        true
    }

    /// Whether an address is in the local APIC's page, enabled there or not.
    #[inline]
    fn is_apic_page(&self, address: u64) -> bool {
        self.shared.in_kernel_apic && address & !0xfff == self.shared.lapic.base() & !0xfff
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

    /// Leaves for user space, which does the access. `then` completes the instruction at the next KVM_RUN.
    #[inline]
    pub(crate) fn ask_user(&mut self, access: &DeviceAccess, then: Completion) -> Break {
        self.user_io.completion = then;
        let DeviceAccess { space, address, size, direction, data } = *access;
        let write = direction == Direction::Write;
        match space {
            Space::Memory => UserExit::Mmio { gpa: address, len: size, write, data }.into(),
            Space::Port => {
                self.io_data = data;
                UserExit::Io { write, size, port: address as u16, count: 1 }.into()
            }
        }
    }
}
