//! Newtypes for addresses and numbers that must not mix.
//!
//! A guest-physical address is not a host-virtual one; the compiler keeps them apart.

/// Bytes in a small page.
pub const PAGE_SIZE: u64 = 4096;
/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

macro_rules! newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        // Without From: each step out of the type shows as `.0` where it is taken.
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
    };
}

newtype!(/// Guest-physical address.
    Gpa(u64));
newtype!(/// Guest-linear (virtual, after segmentation) address.
    Gva(u64));
newtype!(/// Host-virtual address in the VMM's address space.
    Hva(u64));
newtype!(/// Host-physical address.
    Hpa(u64));
newtype!(/// Guest frame number: a [`Gpa`] shifted right by 12.
    Gfn(u64));
newtype!(/// Host frame number: an [`Hpa`] shifted right by 12.
    Pfn(u64));
newtype!(/// Interrupt or exception vector.
    Vector(u8));
newtype!(/// Local APIC id (8 bits in xAPIC mode, 32 in x2APIC mode).
    ApicId(u32));
newtype!(/// SVM address-space identifier.
    Asid(u32));
newtype!(/// A time-stamp counter value, guest or host as the context says.
    Tsc(u64));

impl Gpa {
    /// The frame this address lies in.
    pub const fn gfn(self) -> Gfn {
        // No check of the width: an address beyond MAXPHYADDR has a frame, which no slot contains.
        Gfn(self.0 >> PAGE_SHIFT)
    }
    /// Offset within its 4 KiB page.
    pub const fn page_offset(self) -> usize {
        (self.0 & (PAGE_SIZE - 1)) as usize
    }
}

impl Gva {
    /// Offset within its 4 KiB page.
    pub const fn page_offset(self) -> usize {
        (self.0 & (PAGE_SIZE - 1)) as usize
    }
}

impl Gfn {
    /// First address of the frame.
    pub const fn gpa(self) -> Gpa {
        Gpa(self.0 << PAGE_SHIFT)
    }
}

impl Pfn {
    /// First address of the frame.
    pub const fn hpa(self) -> Hpa {
        Hpa(self.0 << PAGE_SHIFT)
    }
}

impl Hpa {
    /// The frame this address lies in.
    pub const fn pfn(self) -> Pfn {
        Pfn(self.0 >> PAGE_SHIFT)
    }
}
