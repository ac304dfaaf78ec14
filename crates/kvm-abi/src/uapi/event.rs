//! Eventfds joined to guest accesses and interrupts (KVM API §4.59, §4.75).

uapi! {
    /// KVM_IOEVENTFD: a guest write signals an eventfd.
    struct KvmIoeventfd {
        datamatch: u64,
        addr: u64,
        len: u32,
        fd: i32,
        flags: u32,
        pad: [u8; 36],
    }

    /// KVM_IRQFD: an eventfd raises an interrupt.
    struct KvmIrqfd {
        fd: u32,
        gsi: u32,
        flags: u32,
        resamplefd: u32,
        pad: [u8; 16],
    }
}

/// [`KvmIoeventfd::flags`]: only a write of `datamatch` signals.
pub const IOEVENTFD_FLAG_DATAMATCH: u32 = 1 << 0;
/// [`KvmIoeventfd::flags`]: `addr` is a port.
pub const IOEVENTFD_FLAG_PIO: u32 = 1 << 1;
/// [`KvmIoeventfd::flags`]: take it away.
pub const IOEVENTFD_FLAG_DEASSIGN: u32 = 1 << 2;
/// [`KvmIoeventfd::flags`]: s390 only, yet part of the mask of valid flags.
pub const IOEVENTFD_FLAG_VIRTIO_CCW_NOTIFY: u32 = 1 << 3;
/// Flags that KVM_IOEVENTFD takes.
pub const IOEVENTFD_VALID_FLAG_MASK: u32 = 0xf;
/// [`KvmIrqfd::flags`]: take it away.
pub const IRQFD_FLAG_DEASSIGN: u32 = 1 << 0;
/// [`KvmIrqfd::flags`]: level-triggered, `resamplefd` is signalled at EOI.
pub const IRQFD_FLAG_RESAMPLE: u32 = 1 << 1;
