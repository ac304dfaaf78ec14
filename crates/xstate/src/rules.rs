//! Which values XCR0 may hold (SDM vol. 1 §13.3, SDM vol. 2C "XSETBV", APM vol. 2 §11.5.2).

use x86::Xcr0;

/// The components that guests are offered: x87, SSE, AVX, AVX-512 and PKRU. AMX is not among
/// them: its tile data needs XFD and state that grows on first use.
pub const SUPPORTED_XCR0: Xcr0 =
    Xcr0::LEGACY.union(Xcr0::AVX).union(Xcr0::AVX512).union(Xcr0::PKRU);

/// Why a value of XCR0 is refused. The guest gets #GP(0), a VMM -EINVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Xcr0Fault {
    /// The x87 bit is clear.
    X87Missing,
    /// A bit is set that the guest's CPUID does not offer.
    Unsupported,
    /// AVX without SSE.
    AvxNeedsSse,
    /// One of the MPX pair without the other.
    MpxPair,
    /// AVX-512 without AVX, or not all three of its components.
    Avx512Trio,
    /// One of the AMX pair without the other.
    AmxPair,
}

/// Checks a value for XCR0 against `supported`, the components that the guest was offered.
pub const fn xcr0_check(value: u64, supported: Xcr0) -> Result<Xcr0, Xcr0Fault> {
    let wanted = Xcr0::from_bits_retain(value);
    // XCR0[0] is fixed to 1 (SDM vol. 1 §13.3).
    if !wanted.contains(Xcr0::X87) {
        return Err(Xcr0Fault::X87Missing);
    }
    // x87 is there whatever CPUID offers.
    if value & !(supported.bits() | Xcr0::X87.bits()) != 0 {
        return Err(Xcr0Fault::Unsupported);
    }
    // AVX registers extend those of SSE, so hardware refuses one without the other.
    if wanted.contains(Xcr0::AVX) && !wanted.contains(Xcr0::SSE) {
        return Err(Xcr0Fault::AvxNeedsSse);
    }
    // Pairs and trios are enabled as a whole (SDM vol. 1 §13.3).
    if is_torn(wanted, Xcr0::MPX) {
        return Err(Xcr0Fault::MpxPair);
    }
    if is_torn(wanted, Xcr0::AVX512)
        || (wanted.intersects(Xcr0::AVX512) && !wanted.contains(Xcr0::AVX))
    {
        return Err(Xcr0Fault::Avx512Trio);
    }
    if is_torn(wanted, Xcr0::AMX) {
        return Err(Xcr0Fault::AmxPair);
    }
    Ok(wanted)
}

/// Whether XCR0 may hold `value` where `supported` is offered.
#[inline]
pub fn xcr0_valid(value: u64, supported: impl Into<u64>) -> bool {
    xcr0_check(value, Xcr0::from_bits_retain(supported.into())).is_ok()
}

/// The components to offer on a host whose kernel enabled `host_xcr0`: [`SUPPORTED_XCR0`], minus
/// what the host lacks, minus groups that would be torn. Empty when the host does not use XSAVE.
pub const fn supported_xcr0(host_xcr0: u64) -> Xcr0 {
    let mut offered = Xcr0::from_bits_retain(host_xcr0).intersection(SUPPORTED_XCR0);
    // A kernel without SSE in XCR0 does not use XSAVE.
    if !offered.contains(Xcr0::LEGACY) {
        return Xcr0::empty();
    }
    // The kernel may have switched off a part, and the guest could then enable none of them.
    if is_torn(offered, Xcr0::AVX512) || !offered.contains(Xcr0::AVX) {
        offered = offered.difference(Xcr0::AVX512);
    }
    offered
}

const fn is_torn(value: Xcr0, group: Xcr0) -> bool {
    value.intersects(group) && !value.contains(group)
}
