//! What a write of an MSR asks of others.

/// What a write asks of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The write asks nothing of others.
    None,
    /// TSC_ADJUST moved by `delta`: so must the TSC offset. Only of a guest's write.
    TscAdjusted {
        /// By how many TSC ticks it moved.
        delta: i64,
    },
    /// The guest asked for an indirect-branch prediction barrier.
    PredictionBarrier,
    /// The guest asked for an L1 data-cache flush.
    FlushL1d,
    /// A memory-type range changed.
    MtrrChanged,
    /// MISC_ENABLE's MONITOR bit changed: see `GuestCpuid::set_mwait`.
    MonitorChanged {
        /// MONITOR is to be offered.
        on: bool,
    },
    /// VIRT_SPEC_CTRL was written: whether the guest runs without speculative store bypass.
    VirtSsbd {
        /// The guest runs without speculative store bypass.
        on: bool,
    },
    /// TSC_RATIO was written: how L2's TSC is made from L1's.
    TscRatioOfL2 {
        /// 8.32 fixed point.
        ratio: u64,
    },
    /// CPUID faulting was switched: with it on, CPUID outside CPL 0 raises #GP.
    CpuidFaulting {
        /// The new state.
        on: bool,
    },
}
