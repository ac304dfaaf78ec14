//! Devices, attributes, statistics (KVM API §4.79–4.81, §4.136).

uapi! {
    /// The argument of KVM_CREATE_DEVICE.
    struct KvmCreateDevice {
        type_: u32,
        fd: u32,
        flags: u32,
    }

    /// KVM_SET/GET/HAS_DEVICE_ATTR; `addr` is a user pointer.
    struct KvmDeviceAttr {
        flags: u32,
        group: u32,
        attr: u64,
        addr: u64,
    }

    /// Head of a statistics file (KVM_GET_STATS_FD).
    struct KvmStatsHeader {
        flags: u32,
        name_size: u32,
        num_desc: u32,
        id_offset: u32,
        desc_offset: u32,
        data_offset: u32,
    }

    /// One statistic; its name follows.
    struct KvmStatsDesc {
        flags: u32,
        exponent: i16,
        size: u16,
        offset: u32,
        bucket_size: u32,
    }
}

/// Attribute of /dev/kvm, group 0: the XSAVE components a guest may be given.
pub const X86_XCOMP_GUEST_SUPP: u64 = 0;
/// Attribute group of a vCPU: its TSC.
pub const VCPU_TSC_CTRL: u32 = 0;
/// Attribute in [`VCPU_TSC_CTRL`]: guest TSC minus host TSC.
pub const VCPU_TSC_OFFSET: u64 = 0;

uapi! {
    /// The argument of KVM_ENABLE_CAP.
    struct KvmEnableCap {
        cap: u32,
        flags: u32,
        args: [u64; 4],
        pad: [u8; 64],
    }
}
