//! The guest's TSC, as its VMM and its own writes made it.

/// How the guest's TSC follows from the host's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tsc {
    /// The frequency that the guest sees, kHz.
    pub khz: u32,
    /// The ratio of its frequency to the host's, 32.32 fixed point.
    pub ratio: u64,
    /// What is added to the host's TSC, scaled.
    pub offset: u64,
}
