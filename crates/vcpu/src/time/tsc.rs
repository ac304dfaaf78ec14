//! The guest's TSC, as its VMM and its own writes made it.

use backend::TSC_RATIO_ONE;

/// Frequencies that differ by less than this many parts per million count as the same: two hosts
/// never calibrate alike.
const TOLERANCE_PPM: u64 = 250;

/// How the guest's TSC follows from the host's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tsc {
    /// The frequency that the guest sees, kHz.
    pub khz: u32,
    /// The ratio of its frequency to the host's, 32.32 fixed point.
    pub ratio: u64,
    /// What is added to the host's TSC, scaled.
    pub offset: u64,
    /// What the host's TSC had lost by sleeps when the offset was made.
    pub lost: u64,
}

impl Tsc {
    /// A TSC of this frequency, in kHz, without an offset. Whether the hardware can have it is asked before.
    pub fn of(khz: u32) -> Self {
        let host_khz = host::clock::tsc_khz();
        let ratio = if is_close(khz, host_khz) {
            TSC_RATIO_ONE
        } else {
            (u64::from(khz) << 32) / u64::from(host_khz.max(1))
        };
        Self { khz, ratio, offset: 0, lost: host::clock::tsc_lost() }
    }
}

/// Whether the frequencies, in kHz, are the same within 250 parts per million.
pub fn is_close(guest_khz: u32, host_khz: u32) -> bool {
    let (guest, host) = (u64::from(guest_khz), u64::from(host_khz));
    guest.abs_diff(host).saturating_mul(1_000_000) <= host.saturating_mul(TOLERANCE_PPM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_at_half_the_hosts_frequency_has_half_the_ratio() {
        let host = host::clock::tsc_khz();
        assert_eq!(Tsc::of(host / 2).ratio >> 20, (TSC_RATIO_ONE / 2) >> 20);
        assert_eq!(Tsc::of(host).ratio, TSC_RATIO_ONE);
    }

    #[test]
    fn a_calibration_error_is_no_other_frequency() {
        assert!(is_close(3_000_000, 3_000_700));
        assert!(!is_close(3_000_000, 3_001_000));
        assert!(is_close(0, 0));
    }
}
