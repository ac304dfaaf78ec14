//! Hypercalls: which one, with what, and how it answers. `hypercalls.rst`.

use x86::Gpa;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::HypercallError;
use crate::ipi::SendIpi;

/// Numbers of hypercalls, which a guest puts into RAX.
pub mod number {
    /// Does nothing: an old way to make the host look for interrupts.
    pub const VAPIC_POLL_IRQ: u64 = 1;
    /// Wakes a halted vCPU.
    pub const KICK_CPU: u64 = 5;
    /// Reads host real time and TSC together.
    pub const CLOCK_PAIRING: u64 = 9;
    /// Sends an interrupt to many.
    pub const SEND_IPI: u64 = 10;
    /// Gives the CPU to a vCPU that was preempted.
    pub const SCHED_YIELD: u64 = 11;
    /// Says whether guest memory is shared or encrypted.
    pub const MAP_GPA_RANGE: u64 = 12;
}

/// What is in RAX after the call.
#[inline]
pub fn answer(result: Result<u64, HypercallError>, long: bool) -> u64 {
    let value = match result {
        Ok(value) => value,
        Err(error) => (error as u64).wrapping_neg(),
    };
    // Outside 64-bit code the answer is EAX, and the upper half is zero as after any write of it.
    if long { value } else { u64::from(value as u32) }
}

/// The registers of a call: number in RAX, arguments in RBX, RCX, RDX, RSI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// The hypercall's number, from RAX.
    pub rax: u64,
    /// The first argument, from RBX.
    pub rbx: u64,
    /// The second argument, from RCX.
    pub rcx: u64,
    /// The third argument, from RDX.
    pub rdx: u64,
    /// The fourth argument, from RSI.
    pub rsi: u64,
}

/// A hypercall that can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hypercall {
    /// Nothing to do; answers 0.
    VapicPollIrq,
    /// Wake the vCPU with this APIC id; answers 0.
    KickCpu {
        /// The APIC id of the vCPU to wake.
        apic_id: u32,
    },
    /// Write a [`ClockPairing`] there.
    ClockPairing {
        /// Where the guest wants it.
        address: Gpa,
    },
    /// Send an interrupt; answers how many took it.
    SendIpi(SendIpi),
    /// Yield to the vCPU with this APIC id; answers 0.
    SchedYield {
        /// The APIC id of the vCPU to yield to.
        apic_id: u32,
    },
}

/// Bits of CPUID 0x40000001:EAX that offer hypercalls.
pub mod feature {
    /// KVM_HC_KICK_CPU is offered.
    pub const UNHALT: u32 = 1 << 7;
    /// KVM_HC_SEND_IPI is offered.
    pub const SEND_IPI: u32 = 1 << 11;
    /// KVM_HC_SCHED_YIELD is offered.
    pub const SCHED_YIELD: u32 = 1 << 13;
}

impl Hypercall {
    /// Whether there is a call of this number; any other answers [`HypercallError::NoSuchCall`], or
    /// [`HypercallError::NotPrivileged`] outside CPL 0, whatever its arguments.
    #[inline(always)]
    pub fn is_known(number: u64) -> bool {
        // With holes: calls of other architectures and one long gone, which decode() refuses.
        (number::VAPIC_POLL_IRQ..=number::MAP_GPA_RANGE).contains(&number)
    }

    /// Decodes a hypercall. `long`: the guest runs 64-bit code; else registers count 32 bits.
    /// `features` is CPUID 0x40000001:EAX as far as it is to be enforced (all ones for not).
    ///
    /// # Errors
    /// What the guest is to be told, see [`answer`].
    #[inline]
    pub fn decode(
        regs: &Registers,
        long: bool,
        cpl: u8,
        features: u32,
    ) -> Result<Self, HypercallError> {
        // Cut once and here, so that no call can look at the upper half by mistake.
        let width = |value: u64| if long { value } else { u64::from(value as u32) };
        let (a0, a1) = (width(regs.rbx), width(regs.rcx));
        // Before the number is looked at, as in stock KVM.
        if cpl != 0 {
            return Err(HypercallError::NotPrivileged);
        }
        let offered = |bit| {
            // What CPUID does not offer does not exist (`hypercalls.rst`): the same answer as for
            // an unknown number.
            if features & bit != 0 { Ok(()) } else { Err(HypercallError::NoSuchCall) }
        };
        match width(regs.rax) {
            number::VAPIC_POLL_IRQ => Ok(Self::VapicPollIrq),
            // RBX has flags, of which none is defined (`hypercalls.rst`).
            number::KICK_CPU => {
                offered(feature::UNHALT)?;
                Ok(Self::KickCpu { apic_id: a1 as u32 })
            }
            number::CLOCK_PAIRING => match a1 {
                CLOCK_PAIRING_REALTIME => Ok(Self::ClockPairing { address: Gpa(a0) }),
                // KVM_EOPNOTSUPP for other clocks (`hypercalls.rst`).
                _ => Err(HypercallError::NotSupported),
            },
            number::SEND_IPI => {
                offered(feature::SEND_IPI)?;
                SendIpi::new(a0, a1, width(regs.rdx), width(regs.rsi), long).map(Self::SendIpi)
            }
            number::SCHED_YIELD => {
                offered(feature::SCHED_YIELD)?;
                Ok(Self::SchedYield { apic_id: a0 as u32 })
            }
            _ => Err(HypercallError::NoSuchCall),
        }
    }
}

/// The clock type of KVM_HC_CLOCK_PAIRING: CLOCK_REALTIME, the only one.
const CLOCK_PAIRING_REALTIME: u64 = 0;

/// What KVM_HC_CLOCK_PAIRING writes, `struct kvm_clock_pairing`: 64 bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ClockPairing {
    /// Host real time, seconds since 1970.
    pub sec: i64,
    /// Nanoseconds beside the seconds.
    pub nsec: i64,
    /// The guest's TSC at that time.
    pub tsc: u64,
    /// Always zero: none are defined.
    pub flags: u32,
    /// Always zero: room for more.
    pub pad: [u32; 9],
}
const _: () = assert!(size_of::<ClockPairing>() == 64);

impl ClockPairing {
    /// Real time `real_ns` since 1970 at guest TSC `tsc`.
    pub const fn new(real_ns: u64, tsc: u64) -> Self {
        Self {
            sec: (real_ns / 1_000_000_000) as i64,
            nsec: (real_ns % 1_000_000_000) as i64,
            tsc,
            flags: 0,
            pad: [0; 9],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(rax: u64, rbx: u64, rcx: u64) -> Registers {
        Registers { rax, rbx, rcx, rdx: 0, rsi: 0xfd }
    }

    #[test]
    fn known_calls_are_decoded() {
        let decode = |regs| Hypercall::decode(&regs, true, 0, u32::MAX);
        assert_eq!(decode(call(1, 0, 0)), Ok(Hypercall::VapicPollIrq));
        assert_eq!(decode(call(5, 0, 3)), Ok(Hypercall::KickCpu { apic_id: 3 }));
        assert_eq!(decode(call(11, 3, 0)), Ok(Hypercall::SchedYield { apic_id: 3 }));
        assert_eq!(
            decode(call(9, 0x1000, 0)),
            Ok(Hypercall::ClockPairing { address: Gpa(0x1000) })
        );
        assert_eq!(decode(call(9, 0x1000, 1)), Err(HypercallError::NotSupported));
        assert!(matches!(decode(call(10, 7, 0)), Ok(Hypercall::SendIpi(_))));
    }

    #[test]
    fn unknown_and_withheld_calls_do_not_exist() {
        for nr in [0, 2, 3, 4, 6, 7, 8, 12, 13, u64::MAX] {
            let got = Hypercall::decode(&call(nr, 0, 0), true, 0, u32::MAX);
            assert_eq!(got, Err(HypercallError::NoSuchCall), "{nr}");
        }
        for nr in [5, 10, 11] {
            let got = Hypercall::decode(&call(nr, 0, 0), true, 0, 0);
            assert_eq!(got, Err(HypercallError::NoSuchCall), "{nr}");
        }
    }

    #[test]
    fn user_mode_may_not_call() {
        let got = Hypercall::decode(&call(1, 0, 0), true, 3, u32::MAX);
        assert_eq!(got, Err(HypercallError::NotPrivileged));
    }

    #[test]
    fn answers_are_negative_errnos_of_the_guests_width() {
        assert_eq!(answer(Err(HypercallError::NoSuchCall), true), (-1000i64) as u64);
        assert_eq!(answer(Err(HypercallError::NoSuchCall), false), (-1000i32) as u32 as u64);
        assert_eq!(answer(Ok(7), true), 7);
    }

    #[test]
    fn outside_long_mode_upper_halves_do_not_count() {
        let regs = call(1 << 32 | 1, 0, 0);
        assert_eq!(Hypercall::decode(&regs, false, 0, 0), Ok(Hypercall::VapicPollIrq));
        assert!(Hypercall::decode(&regs, true, 0, 0).is_err());
    }
}
