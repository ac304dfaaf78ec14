//! The FPU: the image as user space sees it, of x87, SSE and AVX.

use super::thread::{IRQS_ON, might_sleep};

#[derive(Debug)]
pub(crate) struct FpuRaw(Option<Box<[u8; 4096]>>);
impl FpuRaw {
    pub(crate) const fn new() -> Self {
        Self(None)
    }
}
pub(crate) unsafe fn gnt_fpu_alloc(f: *mut FpuRaw) -> i32 {
    super::thread::refuse_in_guest("gnt_fpu_alloc");
    let mut image = Box::new([0u8; 4096]);
    image[..2].copy_from_slice(&0x37fu16.to_le_bytes());
    image[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
    // SAFETY: f lives by the contract.
    unsafe { (*f).0 = Some(image) };
    0
}
pub(crate) unsafe fn gnt_fpu_free(f: *mut FpuRaw) {
    super::thread::refuse_in_guest("gnt_fpu_free");
    // SAFETY: f lives by the contract.
    unsafe { (*f).0 = None };
}
pub(crate) unsafe fn gnt_fpu_swap(_: *mut FpuRaw, enter: i32, owner: *mut u64) {
    super::thread::refuse_in_guest("gnt_fpu_swap");
    might_sleep();
    let me = IRQS_ON.with(|word| std::ptr::from_ref(word).addr() as u64);
    // SAFETY: the owner's word is the caller's.
    let owner = unsafe { &mut *owner };
    if *owner == if enter == 0 { me } else { 0 } {
        *owner = if enter == 0 { 0 } else { me };
    }
}
pub(crate) fn gnt_fpu_ensure() {
    super::thread::refuse_in_guest("gnt_fpu_ensure");
    assert!(!IRQS_ON.get(), "interrupts are off before the entry");
}
pub(crate) unsafe fn gnt_fpu_to_uabi(f: *mut FpuRaw, out: *mut u8, len: usize, _: u64, _: u32) {
    super::thread::refuse_in_guest("gnt_fpu_to_uabi");
    // SAFETY: f lives by the contract; out is writable for len bytes.
    unsafe {
        if let Some(image) = &(*f).0 {
            std::ptr::copy_nonoverlapping(image.as_ptr(), out, len.min(4096));
        }
    }
}
pub(crate) unsafe fn gnt_fpu_from_uabi(
    f: *mut FpuRaw,
    from: *const u8,
    xcr0: u64,
    _: *mut u32,
) -> i32 {
    super::thread::refuse_in_guest("gnt_fpu_from_uabi");
    // SAFETY: f lives by the contract; from is readable for 4096 bytes.
    unsafe {
        let features = from.add(512).cast::<u64>().read_unaligned();
        if features & !xcr0 != 0 {
            return -22;
        }
        if let Some(image) = &mut (*f).0 {
            std::ptr::copy_nonoverlapping(from, image.as_mut_ptr(), 4096);
        }
    }
    0
}
pub(crate) unsafe fn gnt_fpu_uabi_size(_: *const FpuRaw) -> usize {
    super::thread::refuse_in_guest("gnt_fpu_uabi_size");
    4096
}
pub(crate) unsafe fn gnt_fpu_enable_features(_: *mut FpuRaw, _: u64) -> i32 {
    super::thread::refuse_in_guest("gnt_fpu_enable_features");
    0
}
pub(crate) unsafe fn gnt_fpu_update_xfd(_: *mut FpuRaw, _: u64) {}
pub(crate) fn gnt_fpu_sync_xfd() {}
pub(crate) fn gnt_fpu_guest_xfeatures() -> u64 {
    super::thread::refuse_in_guest("gnt_fpu_guest_xfeatures");
    7
}
pub(crate) fn gnt_host_xcr0() -> u64 {
    super::thread::refuse_in_guest("gnt_host_xcr0");
    7
}
