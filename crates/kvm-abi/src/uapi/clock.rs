//! The paravirtual clock of a VM (KVM API §4.29).

uapi! {
    /// KVM_GET_CLOCK, KVM_SET_CLOCK. Nanoseconds and ticks.
    struct KvmClockData {
        clock: u64,
        flags: u32,
        pad0: u32,
        realtime: u64,
        host_tsc: u64,
        pad: [u32; 4],
    }
}

/// [`KvmClockData::flags`]: one host TSC serves every vCPU.
pub const CLOCK_TSC_STABLE: u32 = 2;
/// `realtime` is valid.
pub const CLOCK_REALTIME: u32 = 1 << 2;
/// `host_tsc` is valid.
pub const CLOCK_HOST_TSC: u32 = 1 << 3;
/// Flags that KVM_SET_CLOCK takes.
pub const CLOCK_VALID_FLAGS: u32 = CLOCK_TSC_STABLE | CLOCK_REALTIME | CLOCK_HOST_TSC;
