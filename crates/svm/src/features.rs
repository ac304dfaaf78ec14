//! What this CPU's SVM offers: CPUID Fn8000_000A, read once at load.
//!
//! APM vol. 3 appendix E.4.9.

use x86::Cr4;

use crate::host_state::HostState;

/// SVM features of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Number of ASIDs, the host's 0 included.
    pub asids: u32,
    /// TDP.
    pub npt: bool,
    /// DEBUGCTL and the branch records are virtualised in the control block.
    pub lbr: bool,
    /// NRIP save.
    pub nrip_save: bool,
    /// TSC ratio MSR.
    pub tsc_ratio: bool,
    /// VMCB clean bits.
    pub clean_bits: bool,
    /// Flush by ASID.
    pub flush_by_asid: bool,
    /// Decode assists.
    pub decode_assists: bool,
    /// PAUSE filter.
    pub pause_filter: bool,
    /// PAUSE filter threshold.
    pub pause_threshold: bool,
    /// VMLOAD and VMSAVE of a guest are carried out through TDP.
    pub v_vmload: bool,
    /// Virtual GIF.
    pub vgif: bool,
    /// SPEC_CTRL is virtualised in the control block.
    pub v_spec_ctrl: bool,
    /// Virtual NMI.
    pub vnmi: bool,
    /// VMRUN, VMLOAD and VMSAVE look at the intercept before they look at the address.
    pub svme_addr_check: bool,
    /// RDTSCP.
    pub rdtscp: bool,
    /// SPEC_CTRL exists.
    pub spec_ctrl: bool,
    /// XSAVE is enabled by the kernel.
    pub xsave: bool,
    /// XSAVES and IA32_XSS exist.
    pub xsaves: bool,
    /// Protection keys are enabled by the kernel.
    pub pku: bool,
    /// Bits of CR4 that the CPU knows.
    pub cr4_known: Cr4,
    /// How the host's state is kept: chosen at load, not by the CPU.
    pub host_state: HostState,
}

/// Why SVM cannot be used on this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// CPUID does not report SVM.
    Absent,
    /// No TDP.
    NoNpt,
    /// Family 10h (erratum 383).
    TlbErratum,
    /// VM_CR.SVMDIS is set: firmware switched it off.
    DisabledByFirmware,
    /// EFER.SVME is already set: another hypervisor owns this CPU.
    InUse,
}

impl Unusable {
    /// The reason in words, for the log.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Absent => "the CPU does not offer SVM",
            Self::NoNpt => "the CPU does not offer TDP",
            Self::TlbErratum => "a guest's page tables can stop this CPU (family 10h, erratum 383)",
            Self::DisabledByFirmware => "SVM is disabled by the firmware (VM_CR.SVMDIS)",
            Self::InUse => "another hypervisor has enabled SVM (EFER.SVME is set)",
        }
    }
}

impl Features {
    /// Reads them with `cpuid`; `cr4` is the host's, for what its kernel has enabled.
    pub fn read(
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
        host_cr4: Cr4,
    ) -> Result<Self, Unusable> {
        // Beyond the last leaf an answer means nothing, and could look like features.
        let max = cpuid(0x8000_0000, 0)[0];
        let amd = cpuid(0x8000_0001, 0);
        if max < 0x8000_000a || amd[2] & (1 << 2) == 0 {
            return Err(Unusable::Absent);
        }
        let svm = cpuid(0x8000_000a, 0);
        let bit = |n: u32| svm[3] & (1 << n) != 0;
        // With `npt=0` too: shadow paging is there to be measured, not for CPUs without nested paging.
        if !bit(0) {
            return Err(Unusable::NoNpt);
        }
        let basic = cpuid(1, 0);
        // A guest that makes a large page of small ones without a flush has a machine check, of which the host
        // dies, unless it patches the CPU and reads the banks: too much for CPUs that were last sold in 2012.
        if x86::cpuid::family(basic[0]) == 0x10 {
            return Err(Unusable::TlbErratum);
        }
        let seven = if cpuid(0, 0)[0] >= 7 { cpuid(7, 0) } else { [0; 4] };
        let ext8 = cpuid(0x8000_0008, 0);
        let xsaves = cpuid(0, 0)[0] >= 0xd && cpuid(0xd, 1)[0] & (1 << 3) != 0;
        Ok(Self {
            asids: svm[1],
            npt: true,
            lbr: bit(1),
            nrip_save: bit(3),
            tsc_ratio: bit(4),
            clean_bits: bit(5),
            flush_by_asid: bit(6),
            decode_assists: bit(7),
            pause_filter: bit(10),
            pause_threshold: bit(12),
            v_vmload: bit(15) && !reboots_by_vmload(basic[0]),
            vgif: bit(16),
            v_spec_ctrl: bit(20),
            vnmi: bit(25),
            svme_addr_check: bit(28),
            rdtscp: amd[3] & (1 << 27) != 0,
            // IBRS, STIBP or SSBD on AMD; the Intel-style bit as some hypervisors report it.
            spec_ctrl: ext8[1] & ((1 << 14) | (1 << 15) | (1 << 24)) != 0
                || seven[3] & (1 << 26) != 0,
            // By CR4 and not by CPUID: a kernel that does not use XSAVE keeps no components.
            xsave: host_cr4.contains(Cr4::OSXSAVE),
            xsaves,
            pku: host_cr4.contains(Cr4::PKE),
            cr4_known: cr4_known(&basic, &seven),
            host_state: HostState::default(),
        })
    }
}

/// Whether a CPU may take the host down when it carries out a guest's VMLOAD and VMSAVE: Zen 4 for clients, whose firmware
/// may offer it nevertheless. Newer kernels take the feature away there; older ones do not know of it.
fn reboots_by_vmload(leaf1_eax: u32) -> bool {
    x86::cpuid::family(leaf1_eax) == 0x19
        && matches!(x86::cpuid::model(leaf1_eax), 0x18..=0x1f | 0x60..=0x7f)
}

/// CR4 bits that CPUID leaves 1 and 7 imply (APM vol. 2 §3.1.3).
fn cr4_known(basic: &[u32; 4], seven: &[u32; 4]) -> Cr4 {
    let [_, _, ecx, edx] = *basic;
    let [_, ebx7, ecx7, edx7] = *seven;
    let bits = [
        (edx, 1, Cr4::VME | Cr4::PVI),
        (edx, 4, Cr4::TSD),
        (edx, 2, Cr4::DE),
        (edx, 3, Cr4::PSE),
        (edx, 6, Cr4::PAE),
        (edx, 7, Cr4::MCE),
        (edx, 13, Cr4::PGE),
        (edx, 24, Cr4::OSFXSR),
        (edx, 25, Cr4::OSXMMEXCPT),
        (ecx7, 2, Cr4::UMIP),
        (ecx7, 16, Cr4::LA57),
        (ebx7, 0, Cr4::FSGSBASE),
        (ecx, 17, Cr4::PCIDE),
        (ecx, 26, Cr4::OSXSAVE),
        (ebx7, 7, Cr4::SMEP),
        (ebx7, 20, Cr4::SMAP),
        (ecx7, 3, Cr4::PKE),
        (ecx7, 7, Cr4::CET),  // shadow stacks
        (edx7, 20, Cr4::CET), // branch tracking
    ];
    // PCE exists on every CPU with performance counters, which is every CPU with SVM.
    bits.iter()
        .filter(|(r, n, _)| r & (1 << n) != 0)
        .fold(Cr4::PCE, |known, (_, _, bits)| known | *bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpuid(leaf: u32, _sub: u32) -> [u32; 4] {
        match leaf {
            0 => [7, 0, 0, 0],
            1 => [0, 0, 1 << 26, (1 << 13) | (1 << 6)],
            7 => [0, 1 << 7, 0, 0],
            0x8000_0000 => [0x8000_001f, 0, 0, 0],
            0x8000_0001 => [0, 0, 1 << 2, 1 << 27],
            0x8000_000a => [1, 16, 0, 1 | (1 << 3)],
            _ => [0; 4],
        }
    }

    #[test]
    fn features_come_from_their_bits() {
        let f = Features::read(cpuid, Cr4::OSXSAVE).unwrap();
        assert!(f.nrip_save && f.rdtscp && f.xsave && !f.vnmi && !f.pku);
        assert_eq!(f.asids, 16);
        let known = Cr4::PCE | Cr4::PGE | Cr4::PAE | Cr4::OSXSAVE | Cr4::SMEP;
        assert_eq!(f.cr4_known, known);
    }

    /// Family 19h: models 11h and A0h are servers, 18h, 61h and 78h clients; so is family 1Ah, whose cores are newer.
    #[test]
    fn zen_4_for_clients_carries_out_no_vmload_of_guests() {
        let cases = [
            (0x00a1_0f11, true),
            (0x00aa_0f01, true),
            (0x00a1_0f81, false),
            (0x00a6_0f12, false),
            (0x00a7_0f80, false),
            (0x00b6_0f00, true),
        ];
        for (signature, offered) in cases {
            let with = |leaf, sub| match leaf {
                1 => [signature, 0, 0, 0],
                0x8000_000a => [1, 16, 0, 1 | 1 << 15],
                _ => cpuid(leaf, sub),
            };
            let f = Features::read(with, Cr4::empty()).unwrap();
            assert_eq!(f.v_vmload, offered, "{signature:#x}");
        }
    }

    /// Phenom II and the first 15h.
    #[test]
    fn a_cpu_that_a_guests_tables_can_stop_is_refused() {
        let with = |signature| {
            move |leaf, sub| if leaf == 1 { [signature, 0, 0, 0] } else { cpuid(leaf, sub) }
        };
        assert_eq!(Features::read(with(0x0010_0f43), Cr4::empty()), Err(Unusable::TlbErratum));
        assert!(Features::read(with(0x0060_0f12), Cr4::empty()).is_ok());
    }

    #[test]
    fn a_cpu_without_svm_or_npt_is_refused() {
        let none = |leaf, sub| if leaf == 0x8000_0001 { [0; 4] } else { cpuid(leaf, sub) };
        assert_eq!(Features::read(none, Cr4::empty()), Err(Unusable::Absent));
        let no_npt = |leaf, sub| if leaf == 0x8000_000a { [1, 16, 0, 8] } else { cpuid(leaf, sub) };
        assert_eq!(Features::read(no_npt, Cr4::empty()), Err(Unusable::NoNpt));
    }
}
