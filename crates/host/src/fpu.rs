//! The guest's FPU and extended state, kept by the kernel's own guest FPU containers: they know
//! the XSAVE layout, dynamic features (AMX) and XFD.

use core::cell::UnsafeCell;

use crate::error::NoMemory;
use crate::sys;

/// A user-space image of the state was refused (`-EINVAL`): reserved bits or features not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadState;

/// One vCPU's extended state.
#[derive(Debug)]
pub struct GuestFpu {
    raw: UnsafeCell<sys::FpuRaw>,
}

// SAFETY: the container belongs to one vCPU and is used under its mutex; see the methods.
unsafe impl Send for GuestFpu {}

impl GuestFpu {
    /// A container in the reset state, with the features the process may use.
    pub fn alloc() -> Result<Self, NoMemory> {
        let mut raw = sys::FpuRaw::new();
        // SAFETY: raw is the container's storage, which may move (the kernel links nothing to it).
        match unsafe { sys::gnt_fpu_alloc(&raw mut raw) } {
            0 => Ok(Self { raw: UnsafeCell::new(raw) }),
            _ => Err(NoMemory),
        }
    }

    /// Makes the guest's state the current task's, and keeps the task's own aside. Interrupts on;
    /// pairs with [`GuestFpu::put`]. The task may be preempted in between.
    pub fn load(&mut self) {
        // SAFETY: allocated; the caller's unique borrow excludes another load.
        unsafe { sys::gnt_fpu_swap(self.raw.get(), 1) }
    }

    /// Gives the task its own state back.
    pub fn put(&mut self) {
        // SAFETY: as in load().
        unsafe { sys::gnt_fpu_swap(self.raw.get(), 0) }
    }

    /// Copies the state to `out` in the layout of `KVM_GET_XSAVE` (non-compacted), restricted to
    /// `xfeatures`. `pkru` is the guest's, which lives outside the container.
    pub fn to_uabi(&self, out: &mut [u8], xfeatures: u64, pkru: u32) {
        // SAFETY: out is writable for its length, and the kernel writes no more.
        unsafe {
            sys::gnt_fpu_to_uabi(self.raw.get(), out.as_mut_ptr(), out.len(), xfeatures, pkru);
        }
    }

    /// Takes the state from `KVM_SET_XSAVE`'s layout. At least 4096 bytes, and
    /// [`GuestFpu::uabi_size`]. `pkru` receives the guest's PKRU if the image has one.
    pub fn from_uabi(&mut self, from: &[u8], xcr0: u64, pkru: &mut u32) -> Result<(), BadState> {
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

    /// Resets the state as INIT does: everything but x87/SSE initialised when `init_only`, else
    /// all of it as at power-on. Not while loaded.
    pub fn reset(&mut self) -> Result<(), NoMemory> {
        *self = Self::alloc()?;
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
        // SAFETY: allocated by alloc(), freed once.
        unsafe { sys::gnt_fpu_free(self.raw.get()) }
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
    fn a_feature_that_the_guest_may_not_use_is_refused() {
        let mut fpu = GuestFpu::alloc().unwrap();
        let mut image = vec![0u8; 4096];
        image[512] = 7;
        assert_eq!(fpu.from_uabi(&image, 3, &mut 0), Err(BadState));
    }
}
