//! kvmclock: the page from which a guest computes the time out of its TSC, and the wall clock.
//! `msr.rst`, MSR_KVM_SYSTEM_TIME_NEW and MSR_KVM_WALL_CLOCK_NEW.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{Shared, versioned};

/// Flags of the clock page.
pub mod flags {
    /// All vCPUs' clocks agree; readings on different vCPUs can be compared.
    pub const TSC_STABLE: u8 = 1 << 0;
    /// The VMM stopped the guest; its watchdogs should forgive (KVM_KVMCLOCK_CTRL).
    pub const GUEST_STOPPED: u8 = 1 << 1;
}

/// The clock page, `struct pvclock_vcpu_time_info`: 32 bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ClockPage {
    /// Odd while the rest changes.
    pub version: u32,
    /// Always zero: aligns what follows.
    pub pad0: u32,
    /// Guest TSC at `system_time`.
    pub tsc_timestamp: u64,
    /// Nanoseconds at `tsc_timestamp`.
    pub system_time: u64,
    /// The factor: [`Scale::mul`].
    pub tsc_to_system_mul: u32,
    /// The exponent of two: [`Scale::shift`].
    pub tsc_shift: i8,
    /// What holds of the page: [`flags`].
    pub flags: u8,
    /// Always zero: fills 32 bytes.
    pub pad: [u8; 2],
}
const _: () = assert!(size_of::<ClockPage>() == 32);
const FLAGS_OFFSET: usize = core::mem::offset_of!(ClockPage, flags);

/// The wall clock, `struct pvclock_wall_clock`: when the guest's clock was zero.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct WallClock {
    /// Odd while the rest changes.
    pub version: u32,
    /// Seconds since 1970.
    pub sec: u32,
    /// Nanoseconds beside the seconds.
    pub nsec: u32,
}
const _: () = assert!(size_of::<WallClock>() == 12);

/// How ticks become nanoseconds: `((ticks << shift) * mul) >> 32`, shifting right for a negative
/// shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// 0.32 fixed point.
    pub mul: u32,
    /// The binary exponent; negative shifts right.
    pub shift: i8,
}

impl Scale {
    /// The scale of a TSC of `khz` (at least 1).
    pub const fn from_khz(khz: u32) -> Self {
        const NS_PER_S: u64 = 1_000_000_000;
        // Zero would be doubled below without an end.
        let mut hz = if khz == 0 { 1000 } else { khz as u64 * 1000 };
        // Bring the frequency between one and two gigahertz, where the multiplier has 32
        // significant bits.
        let mut shift = 0;
        while hz > 2 * NS_PER_S {
            hz >>= 1;
            shift -= 1;
        }
        while hz <= NS_PER_S {
            hz <<= 1;
            shift += 1;
        }
        // Fits 32 bits: the frequency is above one gigahertz here.
        Self { mul: ((NS_PER_S << 32) / hz) as u32, shift }
    }

    /// Nanoseconds in `ticks`, computed as the guest computes it.
    #[inline]
    pub const fn ns(self, ticks: u64) -> u64 {
        let shifted = if self.shift < 0 {
            ticks.wrapping_shr(self.shift.unsigned_abs() as u32)
        } else {
            ticks.wrapping_shl(self.shift as u32)
        };
        // After some seconds of uptime the product has more than 64 bits.
        ((shifted as u128 * self.mul as u128) >> 32) as u64
    }
}

/// One instant in both clocks of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSample {
    /// The guest's TSC.
    pub guest_tsc: u64,
    /// The guest's clock.
    pub system_time: u64,
    /// From the TSC's frequency.
    pub scale: Scale,
    /// Every vCPU's page is computed from the same host instant.
    pub stable: bool,
}

impl ClockPage {
    /// What a guest with this page reads at `guest_tsc`.
    pub fn time_at(&self, guest_tsc: u64) -> u64 {
        let scale = Scale { mul: self.tsc_to_system_mul, shift: self.tsc_shift };
        self.system_time.wrapping_add(scale.ns(guest_tsc.wrapping_sub(self.tsc_timestamp)))
    }

    /// Writes the page of one vCPU. `stopped`: tell the guest that it was stopped; a flag that the
    /// guest has not cleared yet stays.
    ///
    /// # Errors
    /// Those of the memory; the version may be left odd then, and the next update mends it.
    pub fn publish<S: Shared>(
        shared: &S,
        sample: &ClockSample,
        stopped: bool,
    ) -> Result<(), S::Error> {
        versioned(shared, 0, || {
            // The guest clears this flag itself, and must find it until then.
            let mut present = [0];
            // Not atomic with the store below: it is cleared by the vCPU whose page it is, which
            // does not run now.
            shared.read(FLAGS_OFFSET, &mut present)?;
            // Of what stands there one bit is believed; the page is the guest's.
            let mut flags = present[0] & flags::GUEST_STOPPED;
            if sample.stable {
                flags |= flags::TSC_STABLE;
            }
            if stopped {
                flags |= flags::GUEST_STOPPED;
            }
            let page = Self {
                tsc_timestamp: sample.guest_tsc,
                system_time: sample.system_time,
                tsc_to_system_mul: sample.scale.mul,
                tsc_shift: sample.scale.shift,
                flags,
                ..Self::default()
            };
            // The version is written around the body, not with it, so that a reader sees it change.
            // All but the version.
            let (_, body) = page.as_bytes().split_at(4);
            shared.write(4, body)
        })
    }
}

impl WallClock {
    /// Writes the wall clock: `real_ns` is the time since 1970 at which the guest's clock shows
    /// `guest_ns`.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn publish<S: Shared>(shared: &S, real_ns: u64, guest_ns: u64) -> Result<(), S::Error> {
        // A VMM may have set the guest's clock beyond real time.
        let zero = real_ns.saturating_sub(guest_ns);
        // The format has 32 bits for the seconds.
        let sec = (zero / 1_000_000_000) as u32;
        let nsec = (zero % 1_000_000_000) as u32;
        // The version of the guest's memory, which another VMM may have written, goes on.
        versioned(shared, 0, || {
            let page = Self { version: 0, sec, nsec };
            // As above, all but the version.
            let (_, body) = page.as_bytes().split_at(4);
            shared.write(4, body)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::guest_memory::Memory;

    fn page(memory: &Memory) -> ClockPage {
        ClockPage::read_from_bytes(&memory.bytes.borrow()).unwrap()
    }

    const SAMPLE: ClockSample = ClockSample {
        guest_tsc: 1 << 40,
        system_time: 5_000_000_000,
        scale: Scale::from_khz(2_500_000),
        stable: true,
    };

    #[test]
    fn version_is_odd_while_the_page_changes_and_even_after() {
        let memory = Memory::new(32);
        ClockPage::publish(&memory, &SAMPLE, false).unwrap();
        let stores = memory.stores.borrow();
        assert_eq!(stores.len(), 3);
        assert_eq!(stores[0], (0, 1u32.to_le_bytes().to_vec()));
        assert_eq!(stores[1].0, 4);
        assert_eq!(stores[2], (0, 2u32.to_le_bytes().to_vec()));
    }

    #[test]
    fn version_goes_on_from_what_the_guest_has_even_after_a_torn_update() {
        let memory = Memory::new(32);
        memory.bytes.borrow_mut()[0] = 7;
        ClockPage::publish(&memory, &SAMPLE, false).unwrap();
        assert_eq!(page(&memory).version, 10);
        ClockPage::publish(&memory, &SAMPLE, false).unwrap();
        assert_eq!(page(&memory).version, 12);
    }

    #[test]
    fn stopped_flag_stays_until_the_guest_clears_it() {
        let memory = Memory::new(32);
        ClockPage::publish(&memory, &SAMPLE, true).unwrap();
        assert_eq!(page(&memory).flags, flags::TSC_STABLE | flags::GUEST_STOPPED);
        ClockPage::publish(&memory, &ClockSample { stable: false, ..SAMPLE }, false).unwrap();
        assert_eq!(page(&memory).flags, flags::GUEST_STOPPED);
        memory.bytes.borrow_mut()[FLAGS_OFFSET] = 0;
        ClockPage::publish(&memory, &SAMPLE, false).unwrap();
        assert_eq!(page(&memory).flags, flags::TSC_STABLE);
    }

    #[test]
    fn the_guest_reads_the_time_that_was_meant() {
        let memory = Memory::new(32);
        ClockPage::publish(&memory, &SAMPLE, false).unwrap();
        let page = page(&memory);
        assert_eq!(page.time_at(1 << 40), 5_000_000_000);
        let later = page.time_at((1 << 40) + 2_500_000_000);
        assert!(later.abs_diff(6_000_000_000) <= 1, "{later}");
    }

    #[test]
    fn wall_clock_is_the_time_at_the_guests_zero() {
        let memory = Memory::new(12);
        WallClock::publish(&memory, 1_700_000_000_500_000_000, 1_500_000_000).unwrap();
        let wall = WallClock::read_from_bytes(&memory.bytes.borrow()).unwrap();
        assert_eq!((wall.version, wall.sec, wall.nsec), (2, 1_699_999_999, 0));
    }

    proptest! {
        #[test]
        fn scale_is_right_to_a_few_parts_per_billion(khz in 1u32..=10_000_000, s in 1u64..100_000) {
            let scale = Scale::from_khz(khz);
            prop_assert!(scale.mul >= 1 << 31 || khz == 1_000_000);
            let ns = scale.ns(u64::from(khz) * 1000 * s);
            let wanted = s * 1_000_000_000;
            // The fixed point gives one part in 2^31; the halving of the frequency another.
            prop_assert!(ns.abs_diff(wanted) <= wanted / 400_000_000 + 8, "{ns} {wanted}");
        }

        #[test]
        fn time_never_steps_back(khz in 1u32..=10_000_000, a in 0u64..1 << 50, d in 0u64..1 << 50) {
            let scale = Scale::from_khz(khz);
            prop_assert!(scale.ns(a) <= scale.ns(a + d));
        }
    }
}
