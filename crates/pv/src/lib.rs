//! Paravirtual services to a guest that knows it runs under KVM: clock, end of interrupt,
//! interprocessor interrupts, steal time, hypercalls, lazy TSC deadline.
//! `Documentation/virt/kvm/x86/msr.rst` and `hypercalls.rst` define them, but for the last.
//!
//! Pure protocol: layouts, arithmetic and the order of stores. Where a structure lies in guest
//! memory is the caller's knowledge, who lends it as a [`Shared`].
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod clock;
pub mod eoi;
pub mod error;
pub mod hypercall;
pub mod hyperv;
pub mod ipi;
pub mod lazy_deadline;
pub mod msr;
pub mod steal;
pub mod vm_clock;

pub use clock::{ClockPage, ClockSample, Scale, WallClock};
pub use eoi::PvEoi;
pub use error::HypercallError;
pub use hypercall::{Hypercall, Registers};
pub use ipi::SendIpi;
pub use lazy_deadline::LazyDeadline;
pub use msr::{Gp, PvMsr};
pub use steal::{SharedTake, StealTime, take_flush};
pub use vm_clock::{ClockData, HostTime, VmClock};

/// A structure in guest memory, shared with the running guest.
///
/// Each store is to reach memory before the next, as stores do on x86.
pub trait Shared {
    /// Why memory cannot be reached.
    type Error;
    /// Reads bytes of the structure, from this offset on.
    fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), Self::Error>;
    /// Writes bytes of the structure, from this offset on.
    fn write(&self, offset: usize, data: &[u8]) -> Result<(), Self::Error>;

    /// Orders every store before it against every load behind it, as stores and loads alone are
    /// not ordered on x86 (SDM vol. 3A §8.2.3.4).
    #[inline]
    fn fence(&self) {
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    }

    /// Reads the `u32` at an offset.
    fn read_u32(&self, offset: usize) -> Result<u32, Self::Error> {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads the `u64` at an offset.
    fn read_u64(&self, offset: usize) -> Result<u64, Self::Error> {
        let mut bytes = [0; 8];
        self.read(offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// The version protocol of the clock, the wall clock and steal time: odd while the structure
/// changes, even and another when it is whole. Runs `body` between the two stores.
///
/// Starts from the version in guest memory, so that it never steps back after a migration, and is
/// odd again after an update that was cut short.
fn versioned<S: Shared>(
    shared: &S,
    version_offset: usize,
    body: impl FnOnce() -> Result<(), S::Error>,
) -> Result<(), S::Error> {
    // The guest's word, of which any value will do: wrapping, and made odd from whatever it was.
    let odd = shared.read_u32(version_offset)?.wrapping_add(1) | 1;
    shared.write(version_offset, &odd.to_le_bytes())?;
    // An error leaves the version odd: the guest waits, and the next update mends it.
    body()?;
    shared.write(version_offset, &odd.wrapping_add(1).to_le_bytes())
}

#[cfg(test)]
pub(crate) mod guest_memory {
    //! A structure in memory that remembers the order of stores.
    use core::cell::RefCell;
    use std::vec::Vec;

    use crate::Shared;

    pub struct Memory {
        pub bytes: RefCell<Vec<u8>>,
        pub stores: RefCell<Vec<(usize, Vec<u8>)>>,
        pub loads: RefCell<Vec<(usize, usize)>>,
    }

    impl Memory {
        pub fn new(size: usize) -> Self {
            let bytes = RefCell::new(std::vec![0; size]);
            Self { bytes, stores: RefCell::default(), loads: RefCell::default() }
        }
    }

    impl crate::SharedTake for Memory {
        fn take(&self, offset: usize) -> Result<u8, Self::Error> {
            let mut old = [0];
            self.read(offset, &mut old)?;
            self.write(offset, &[0])?;
            Ok(old[0])
        }
    }

    impl Shared for Memory {
        type Error = ();
        fn read(&self, offset: usize, data: &mut [u8]) -> Result<(), ()> {
            let bytes = self.bytes.borrow();
            data.copy_from_slice(bytes.get(offset..offset + data.len()).ok_or(())?);
            self.loads.borrow_mut().push((offset, data.len()));
            Ok(())
        }
        fn write(&self, offset: usize, data: &[u8]) -> Result<(), ()> {
            let mut bytes = self.bytes.borrow_mut();
            bytes.get_mut(offset..offset + data.len()).ok_or(())?.copy_from_slice(data);
            self.stores.borrow_mut().push((offset, data.to_vec()));
            Ok(())
        }
    }
}
