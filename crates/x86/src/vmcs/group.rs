//! What the table of fields says of a field's place in the VMCS12 and of what it changes with.

/// What changes together. A write of a field makes its group dirty; an entry of L2 composes the
/// dirty groups again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Group {
    /// RIP, RSP, RFLAGS, interruptibility, activity, pending debug exceptions.
    Flow,
    /// The event that an entry injects.
    Injection,
    /// Segment and descriptor-table registers.
    Segments,
    /// CR0, CR3, CR4, PDPTEs, guest/host masks and read shadows.
    ControlRegisters,
    /// The SYSENTER MSRs.
    Sysenter,
    /// DR7, EFER and other MSRs that entries load.
    Msrs,
    /// The state that an exit loads.
    Host,
    /// Control words and the exception bitmap.
    Controls,
    /// Addresses of bitmaps, exit bitmaps of XSAVES and ENCLS, the link to a shadow VMCS.
    Bitmaps,
    /// EPT, VPID, VM functions, page-modification log.
    Translation,
    /// TSC offset and multiplier.
    Time,
    /// APIC virtualization: pages, task priority, requests.
    Apic,
    /// Lists of MSRs to load and store.
    MsrLists,
    /// The guest's interrupt status, the index of the page-modification log, the preemption timer: L2's run goes by them as L0 does, and
    /// no check of an entry or field of the hardware's VMCS does.
    Status,
    /// What an exit reports.
    Exit,
}

/// A set of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups(u16);

impl Groups {
    /// The set of no group.
    pub const NONE: Self = Self(0);
    /// The set of every group.
    pub const ALL: Self = Self((1 << (Group::Exit as u16 + 1)) - 1);

    /// The set of one group.
    #[inline]
    pub const fn of(group: Group) -> Self {
        // Fifteen groups: sixteen bits hold a set.
        Self(1 << group as u16)
    }

    /// The groups of either set.
    #[inline]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The groups of both sets.
    #[inline]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The groups of this set that are not in the other.
    #[inline]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Adds a group.
    #[inline]
    pub const fn add(&mut self, group: Group) {
        self.0 |= 1 << group as u16;
    }

    /// Whether the set has the group.
    #[inline]
    pub const fn has(self, group: Group) -> bool {
        self.0 & 1 << group as u16 != 0
    }

    /// Whether the sets have a group in common.
    #[inline]
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether no group is in the set.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// What a shadow VMCS does for a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shadow {
    /// Nothing: VMREAD and VMWRITE exit.
    No,
    /// The shadow VMCS serves VMREAD.
    Read,
    /// The shadow VMCS serves VMREAD and VMWRITE.
    ReadWrite,
}

/// A field's place in the VMCS12 and its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Byte at which the field begins.
    pub offset: u16,
    /// The group that a write makes dirty.
    pub group: Group,
    /// Whether a shadow VMCS serves the field.
    pub shadow: Shadow,
}

/// A group of clean fields of an enlightened VMCS; its number is the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // Named by what is in them.
pub enum Clean {
    IoBitmaps,
    MsrBitmap,
    Controls2,
    Controls1,
    Proc,
    Event,
    Entry,
    Exceptions,
    Registers,
    Translation,
    Basic,
    Guest1,
    Guest2,
    HostPointers,
    Host1,
    /// What is no field: the enlightenments.
    Control,
    // From here on the groups are ours: the page has bits for the sixteen above.
    /// Never clean: read at each entry.
    Always,
    /// What an exit reports: not read at all.
    Report,
}

impl Clean {
    /// The group's bit in the word of clean fields.
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// A field's place in an enlightened VMCS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enlightened {
    /// Byte at which the field begins.
    pub offset: u16,
    /// The group whose bit says that it is unchanged.
    pub clean: Clean,
    /// An exit of L2 writes it.
    pub is_written: bool,
}
