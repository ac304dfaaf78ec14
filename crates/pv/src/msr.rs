//! The paravirtual MSRs: what a value written to one of them means, and which are refused.
//! `msr.rst`.

use x86::{Gpa, msr};

/// The write is a general-protection fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gp;

/// A valid write of a paravirtual MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PvMsr {
    /// Write a wall clock there once. `None`: nothing.
    WallClock(Option<Gpa>),
    /// The clock page is there from now on. `None`: off.
    SystemTime(Option<Gpa>),
    /// The steal-time page is there from now on. `None`: off.
    StealTime(Option<Gpa>),
    /// The PV EOI flag is there from now on. `None`: off.
    PvEoi(Option<Gpa>),
    /// Whether the host may poll when this vCPU halts.
    HaltPolling(bool),
    /// What a guest says of asynchronous page faults is kept, and none comes.
    AsyncPf(AsyncPf),
    /// The page of the lazy TSC deadline is there from now on. `None`: off.
    LazyDeadline(Option<Gpa>),
}

/// The MSRs of asynchronous page faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncPf {
    /// Where they are told, and how.
    Enable,
    /// By which vector.
    Vector,
    /// That one was taken.
    Ack,
}

/// Bits 5:4 of MSR_KVM_ASYNC_PF_EN.
const ASYNC_PF_RESERVED: u64 = 0x30;

/// Bit 0 of most of these MSRs.
const ENABLE: u64 = 1;

const fn address(value: u64) -> Option<Gpa> {
    if value & ENABLE != 0 { Some(Gpa(value & !ENABLE)) } else { None }
}

impl PvMsr {
    /// Checks a write. `None` for an MSR that is not of this kind.
    ///
    /// # Errors
    /// [`Gp`] for reserved bits.
    pub fn write(number: u32, value: u64) -> Option<Result<Self, Gp>> {
        Some(match number {
            msr::KVM_WALL_CLOCK | msr::KVM_WALL_CLOCK_NEW => {
                // The wall clock has no bit that switches it on.
                Ok(Self::WallClock(if value == 0 { None } else { Some(Gpa(value)) }))
            }
            msr::KVM_SYSTEM_TIME | msr::KVM_SYSTEM_TIME_NEW => Ok(Self::SystemTime(address(value))),
            // 64-byte alignment; bits 5:1 are reserved.
            msr::KVM_STEAL_TIME if value & 0x3e != 0 => Err(Gp),
            msr::KVM_STEAL_TIME => Ok(Self::StealTime(address(value))),
            // 4-byte alignment; bit 1 is reserved.
            msr::KVM_PV_EOI_EN if value & 2 != 0 => Err(Gp),
            msr::KVM_PV_EOI_EN => Ok(Self::PvEoi(address(value))),
            msr::KVM_POLL_CONTROL if value & !1 != 0 => Err(Gp),
            msr::KVM_POLL_CONTROL => Ok(Self::HaltPolling(value & 1 != 0)),
            msr::KVM_ASYNC_PF_EN if value & ASYNC_PF_RESERVED != 0 => Err(Gp),
            msr::KVM_ASYNC_PF_EN => Ok(Self::AsyncPf(AsyncPf::Enable)),
            msr::KVM_ASYNC_PF_INT if value > 0xff => Err(Gp),
            msr::KVM_ASYNC_PF_INT => Ok(Self::AsyncPf(AsyncPf::Vector)),
            msr::KVM_ASYNC_PF_ACK => Ok(Self::AsyncPf(AsyncPf::Ack)),
            // 64-byte alignment; bits 5:1 are reserved. No such page crosses into another frame.
            msr::KVM_LAZY_TSC_DEADLINE if value & 0x3e != 0 => Err(Gp),
            msr::KVM_LAZY_TSC_DEADLINE => Ok(Self::LazyDeadline(address(value))),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_numberings_of_the_clock_mean_the_same() {
        for number in [0x12, 0x4b56_4d01] {
            let got = PvMsr::write(number, 0x1001);
            assert_eq!(got, Some(Ok(PvMsr::SystemTime(Some(Gpa(0x1000))))));
            assert_eq!(PvMsr::write(number, 0x1000), Some(Ok(PvMsr::SystemTime(None))));
        }
        for number in [0x11, 0x4b56_4d00] {
            assert_eq!(PvMsr::write(number, 0x10), Some(Ok(PvMsr::WallClock(Some(Gpa(0x10))))));
            assert_eq!(PvMsr::write(number, 0), Some(Ok(PvMsr::WallClock(None))));
        }
    }

    #[test]
    fn reserved_bits_fault() {
        for bit in 1..6 {
            assert_eq!(PvMsr::write(0x4b56_4d03, 0x1001 | 1 << bit), Some(Err(Gp)));
            assert_eq!(PvMsr::write(0x4b56_4d09, 0x1001 | 1 << bit), Some(Err(Gp)));
        }
        assert_eq!(PvMsr::write(0x4b56_4d04, 0x1003), Some(Err(Gp)));
        assert_eq!(PvMsr::write(0x4b56_4d05, 2), Some(Err(Gp)));
        for bit in [0x10, 0x20] {
            assert_eq!(PvMsr::write(0x4b56_4d02, 0x1001 | bit), Some(Err(Gp)));
        }
        assert_eq!(PvMsr::write(0x4b56_4d06, 0x100), Some(Err(Gp)));
        let enabled = PvMsr::write(0x4b56_4d02, 0x1003);
        assert_eq!(enabled, Some(Ok(PvMsr::AsyncPf(AsyncPf::Enable))));
    }

    #[test]
    fn the_lazy_deadline_has_an_address_or_is_off() {
        let on = PvMsr::write(0x4b56_4d09, 0x1041);
        assert_eq!(on, Some(Ok(PvMsr::LazyDeadline(Some(Gpa(0x1040))))));
        assert_eq!(PvMsr::write(0x4b56_4d09, 0), Some(Ok(PvMsr::LazyDeadline(None))));
    }

    #[test]
    fn other_msrs_are_none_of_ours() {
        assert_eq!(PvMsr::write(0x10, 0), None);
        assert_eq!(PvMsr::write(0x4b56_4d08, 0), None);
    }
}
