//! The guest's FPU and extended state, kept by the kernel's own guest FPU containers: they know
//! the XSAVE layout, dynamic features (AMX) and XFD.
//!
//! Why the kernel's container and not an area of our own: while the guest's state is in the registers the task can be
//! preempted, and the scheduler saves what it finds to where the task's state points. With an area of ours it would
//! be saved over the VMM's own. The layout, too, is the kernel's to know: it grows with AMX, and compacts.

use core::cell::UnsafeCell;

use crate::error::NoMemory;
use crate::sys;

/// Bytes of an image in user space's layout at least.
const LEAST_IMAGE: usize = 4096;

/// A user-space image of the state was refused (`-EINVAL`): reserved bits or features not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadState;

/// One vCPU's extended state. It knows whose it is while it is loaded: a task whose state points at a
/// container must not lose it.
#[derive(Debug)]
pub struct GuestFpu {
    raw: UnsafeCell<sys::FpuRaw>,
    /// The task whose state it is now; 0: none's.
    owner: u64,
}

// SAFETY: the container belongs to one vCPU and is used under its mutex; see the methods.
unsafe impl Send for GuestFpu {}

impl GuestFpu {
    /// A container in the reset state, with the features the process may use.
    pub fn alloc() -> Result<Self, NoMemory> {
        let mut raw = sys::FpuRaw::new();
        // SAFETY: raw is the container's storage, which may move (the kernel links nothing to it).
        match unsafe { sys::gnt_fpu_alloc(&raw mut raw) } {
            0 => Ok(Self { raw: UnsafeCell::new(raw), owner: 0 }),
            _ => Err(NoMemory),
        }
    }

    /// Makes the guest's state the current task's, and keeps the task's own aside. Interrupts on;
    /// pairs with [`GuestFpu::put`]. The task may be preempted in between. Nothing happens if it is some
    /// task's already.
    pub fn load(&mut self) {
        // SAFETY: allocated; the owner is looked at and noted there.
        unsafe { sys::gnt_fpu_swap(self.raw.get(), 1, &mut self.owner) }
    }

    /// Gives the task its own state back. Nothing happens if this is not loaded, or by another task.
    pub fn put(&mut self) {
        // SAFETY: allocated; the owner is looked at and cleared there.
        unsafe { sys::gnt_fpu_swap(self.raw.get(), 0, &mut self.owner) }
    }

    /// Copies the state to `out` in the layout of `KVM_GET_XSAVE` (non-compacted), restricted to
    /// `xfeatures`: as much as there is room for, and nothing into less than 4096 bytes. `pkru` is the
    /// guest's, which lives outside the container.
    pub fn to_uabi(&self, out: &mut [u8], xfeatures: u64, pkru: u32) {
        // Less than the legacy area and the header would be written past its end.
        if out.len() < LEAST_IMAGE {
            return;
        }
        // SAFETY: out is writable for its length, which is at least that of the legacy area and the
        // header; the kernel keeps to the length with all else.
        unsafe {
            sys::gnt_fpu_to_uabi(self.raw.get(), out.as_mut_ptr(), out.len(), xfeatures, pkru);
        }
    }

    /// Takes the state from `KVM_SET_XSAVE`'s layout. At least 4096 bytes, and
    /// [`GuestFpu::uabi_size`]. `pkru` receives the guest's PKRU if the image has one.
    pub fn from_uabi(&mut self, from: &[u8], xcr0: u64, pkru: &mut u32) -> Result<(), BadState> {
        // The kernel reads by its own size, whatever the caller thinks.
        if from.len() < self.uabi_size() {
            return Err(BadState);
        }
        // SAFETY: the image is long enough for what the kernel reads.
        match unsafe { sys::gnt_fpu_from_uabi(self.raw.get(), from.as_ptr(), xcr0, pkru) } {
            0 => Ok(()),
            _ => Err(BadState),
        }
    }

    /// Bytes of the user-space image (`KVM_CAP_XSAVE2`), at least 4096.
    pub fn uabi_size(&self) -> usize {
        // SAFETY: allocated.
        unsafe { sys::gnt_fpu_uabi_size(self.raw.get()) }
    }

    /// Resets the state to that of power-on. Loaded, it stays loaded.
    pub fn reset(&mut self) -> Result<(), NoMemory> {
        // Made first: without memory the old state stays.
        let new = Self::alloc()?;
        let before = self.owner;
        self.put();
        // The owner has changed only where it was this task. Another task's state is not ours to
        // load.
        let loaded = self.owner != before;
        *self = new;
        if loaded {
            self.load();
        }
        Ok(())
    }

    /// Asks for dynamic features (AMX) of `xfeatures` for this guest. Sleeps.
    pub fn enable_features(&mut self, xfeatures: u64) -> Result<(), BadState> {
        // SAFETY: allocated, uniquely borrowed.
        match unsafe { sys::gnt_fpu_enable_features(self.raw.get(), xfeatures) } {
            0 => Ok(()),
            _ => Err(BadState),
        }
    }

    /// The guest wrote IA32_XFD: future swaps use the new value. Called with the state loaded.
    pub fn update_xfd(&mut self, xfd: u64) {
        // SAFETY: allocated, uniquely borrowed.
        unsafe { sys::gnt_fpu_update_xfd(self.raw.get(), xfd) }
    }
}

impl Drop for GuestFpu {
    fn drop(&mut self) {
        self.put();
        // Another task's state is never freed under it; there is no way to that but a lost put().
        if self.owner == 0 {
            // SAFETY: allocated by alloc(), freed once, and no task's state.
            unsafe { sys::gnt_fpu_free(self.raw.get()) }
        }
    }
}

/// Makes sure that the current task's (loaded guest's) state is in the registers: after a
/// preemption it may not be. Interrupts off, right before the guest is entered.
#[inline]
pub fn ensure_in_registers() {
    sys::gnt_fpu_ensure();
}

/// The guest ran with XFD writes not intercepted: tell the kernel. Interrupts off.
#[inline]
pub fn sync_xfd_after_exit() {
    sys::gnt_fpu_sync_xfd();
}

/// XCR0 as the host runs with.
pub fn host_xcr0() -> u64 {
    sys::gnt_host_xcr0()
}

/// The extended features that a guest of the current process may be offered (XCR0 bits), dynamic
/// ones included when the process holds the permission.
pub fn guest_xfeatures() -> u64 {
    sys::gnt_fpu_guest_xfeatures()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_taken_from_user_space_is_given_back() {
        let mut fpu = GuestFpu::alloc().unwrap();
        let mut image = vec![0u8; fpu.uabi_size()];
        image[0] = 0x7f;
        image[512] = 3;
        let mut pkru = 0;
        fpu.from_uabi(&image, 3, &mut pkru).unwrap();
        let mut out = vec![0u8; 4096];
        fpu.to_uabi(&mut out, 3, 0);
        assert_eq!(out[..], image[..4096]);
        assert_eq!(fpu.from_uabi(&image[..100], 3, &mut pkru), Err(BadState));
    }

    #[test]
    fn a_loaded_state_is_put_back_before_it_goes_and_once() {
        let mut fpu = GuestFpu::alloc().unwrap();
        fpu.load();
        fpu.load();
        assert_ne!(fpu.owner, 0);
        fpu.reset().unwrap();
        assert_ne!(fpu.owner, 0);
        fpu.put();
        fpu.put();
        assert_eq!(fpu.owner, 0);
        fpu.load();
        drop(fpu);
        // Too small an image is left alone.
        GuestFpu::alloc().unwrap().to_uabi(&mut [0; 64], 3, 0);
    }

    #[test]
    fn a_feature_that_the_guest_may_not_use_is_refused() {
        let mut fpu = GuestFpu::alloc().unwrap();
        let mut image = vec![0u8; 4096];
        image[512] = 7;
        assert_eq!(fpu.from_uabi(&image, 3, &mut 0), Err(BadState));
    }
}
