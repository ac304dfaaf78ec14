//! Names for what ended a stretch of guest execution on an SVM machine (APM vol. 2, appendix C): the exit code of the control block, and
//! for MSRs the register. Used by the emulator plugin, so it allocates nothing.

/// Offset of EXITCODE in the control block (APM vol. 2, table B-1); EXITINFO1 follows it.
pub const EXITCODE: u64 = 0x70;

const MSR: u64 = 0x7c;

/// The reason for an exit, from EXITCODE, EXITINFO1 and the guest's ECX.
pub fn reason(code: u64, info: u64, ecx: u32) -> &'static str {
    match code {
        0x00..=0x0f => "read_cr",
        0x10..=0x1f => "write_cr",
        0x20..=0x2f => "read_dr",
        0x30..=0x3f => "write_dr",
        0x4e => "page_fault",
        0x40..=0x5f => "exception",
        0x60 => "interrupt",
        0x61 => "nmi",
        0x62 => "smi",
        0x64 => "interrupt_window",
        // A write of CR0 that changes more than TS and MP.
        0x65 => "write_cr",
        0x6e | 0x87 => "rdtsc",
        0x70 | 0x71 => "pushf_popf",
        0x72 => "cpuid",
        0x74 => "iret",
        0x76 => "invd",
        0x77 => "pause",
        0x78 => "hlt",
        0x79 | 0x7a => "invlpg",
        0x7b => "io",
        MSR if info == 0 => "rdmsr",
        MSR => wrmsr(ecx),
        0x7f => "shutdown",
        0x80..=0x86 => {
            if code == 0x81 {
                "hypercall"
            } else {
                "svm_instruction"
            }
        }
        0x89 => "wbinvd",
        0x8a | 0x8b => "monitor_mwait",
        0x8d => "xsetbv",
        0x400 => "nested_page_fault",
        _ => "other",
    }
}

/// Writes of the MSRs that timers and interrupts use are counted apart.
fn wrmsr(ecx: u32) -> &'static str {
    match ecx {
        0x6e0 => "wrmsr_tsc_deadline",
        0x80b => "wrmsr_eoi",
        0x830 | 0x83f => "wrmsr_ipi",
        0xc000_0080 => "wrmsr_efer",
        _ => "wrmsr",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_told_from_other_msrs() {
        assert_eq!(reason(MSR, 1, 0x6e0), "wrmsr_tsc_deadline");
        assert_eq!(reason(MSR, 1, 0x10), "wrmsr");
        assert_eq!(reason(MSR, 0, 0x6e0), "rdmsr");
    }

    #[test]
    fn every_code_has_a_name() {
        assert_eq!(reason(0x72, 0, 0), "cpuid");
        assert_eq!(reason(0x400, 0, 0), "nested_page_fault");
        assert_eq!(reason(0x10, 0, 0), reason(0x65, 0, 0));
        assert_eq!(reason(0x81, 0, 0), "hypercall");
        assert_eq!(reason(0x80, 0, 0), "svm_instruction");
        assert_eq!(reason(u64::MAX, 0, 0), "other", "VMEXIT_INVALID");
    }
}
