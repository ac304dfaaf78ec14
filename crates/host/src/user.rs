//! Memory of the VMM: copies that may sleep and fault pages in, and copies that may not.
//!
//! All of it works on the current task's address space.

use x86::Hva;

use crate::error::Fault;
use crate::sys;

fn done(left: i32) -> Result<(), Fault> {
    if left == 0 { Ok(()) } else { Err(Fault) }
}

/// Copies `into.len()` bytes from user memory. May sleep. On a fault `into` holds anything.
pub fn read(hva: Hva, into: &mut [u8]) -> Result<(), Fault> {
    sys::might_sleep();
    // SAFETY: the kernel checks the user range; the slice is writable for its length.
    done(unsafe { sys::gnt_user_read(into.as_mut_ptr(), hva.0, into.len()) })
}

/// Copies `from` to user memory. May sleep. On a fault a part may have been written.
pub fn write(hva: Hva, from: &[u8]) -> Result<(), Fault> {
    sys::might_sleep();
    // SAFETY: the kernel checks the user range; the slice is readable for its length.
    done(unsafe { sys::gnt_user_write(hva.0, from.as_ptr(), from.len()) })
}

/// Like [`read`], but never sleeps: a page that is not there is a [`Fault`]. Interrupts may be off.
#[inline]
pub fn read_nofault(hva: Hva, into: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: the kernel checks the user range; the slice is writable for its length.
    done(unsafe { sys::gnt_user_read_nofault(into.as_mut_ptr(), hva.0, into.len()) })
}

/// Like [`write`], but never sleeps. Interrupts may be off.
#[inline]
pub fn write_nofault(hva: Hva, from: &[u8]) -> Result<(), Fault> {
    // SAFETY: the kernel checks the user range; the slice is readable for its length.
    done(unsafe { sys::gnt_user_write_nofault(hva.0, from.as_ptr(), from.len()) })
}

/// Atomically replaces `old` by `new` in `size` bytes (1, 2, 4 or 8, naturally aligned) of user
/// memory. Returns whether it held `old`. May sleep.
pub fn cmpxchg(hva: Hva, size: usize, old: u64, new: u64) -> Result<bool, Fault> {
    sys::might_sleep();
    // Across two cache lines it would be a split lock, for which the host may raise #AC.
    if !matches!(size, 1 | 2 | 4 | 8) || !hva.0.is_multiple_of(size as u64) {
        return Err(Fault);
    }
    match sys::gnt_user_cmpxchg(hva.0, size as u32, old, new) {
        0 => Ok(true),
        1 => Ok(false),
        _ => Err(Fault),
    }
}

/// Zeroes `len` bytes of user memory. May sleep.
pub fn clear(hva: Hva, len: usize) -> Result<(), Fault> {
    sys::might_sleep();
    done(sys::gnt_user_clear(hva.0, len))
}

/// Whether `hva..hva + len` lies in the half of the address space that can be user memory.
pub fn range_ok(hva: Hva, len: u64) -> bool {
    sys::gnt_user_range_ok(hva.0, len) != 0
}

/// The first address that no user memory has (`TASK_SIZE_MAX`).
pub fn end() -> Hva {
    Hva(sys::gnt_user_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::std_port::test;

    fn hva<T>(v: &[T]) -> Hva {
        Hva(v.as_ptr() as u64)
    }

    #[test]
    fn user_memory_is_plain_memory_in_tests() {
        let memory = vec![0u8; 64];
        write(hva(&memory), b"gannet").unwrap();
        let mut back = [0; 6];
        read_nofault(hva(&memory), &mut back).unwrap();
        assert_eq!(&back, b"gannet");
    }

    #[test]
    fn null_and_unmapped_addresses_fault() {
        let memory = vec![0u8; 64];
        assert_eq!(read(Hva(0), &mut [0]), Err(Fault));
        assert_eq!(read(Hva(u64::MAX), &mut [0]), Err(Fault));
        let hole = test::unmap(hva(&memory), 64);
        assert_eq!(write(Hva(hva(&memory).0 + 63), &[1]), Err(Fault));
        drop(hole);
        assert_eq!(write(Hva(hva(&memory).0 + 63), &[1]), Ok(()));
    }

    #[test]
    fn cmpxchg_replaces_only_what_it_expects() {
        let memory = vec![5u64; 1];
        assert_eq!(cmpxchg(hva(&memory), 8, 5, 6), Ok(true));
        assert_eq!(cmpxchg(hva(&memory), 8, 5, 7), Ok(false));
        assert_eq!(cmpxchg(hva(&memory), 4, 6, 9), Ok(true));
        assert_eq!(cmpxchg(Hva(hva(&memory).0 + 1), 4, 6, 9), Err(Fault));
        assert_eq!(cmpxchg(hva(&memory), 3, 6, 9), Err(Fault));
        let mut back = [0; 8];
        read(hva(&memory), &mut back).unwrap();
        assert_eq!(u64::from_le_bytes(back), 9);
    }
}
