//! Names for what ended a stretch of guest execution: on an SVM machine the exit code of the control block (APM vol. 2, appendix C), on a
//! VMX machine the basic exit reason (SDM vol. 3, appendix C), and for MSRs the register. The same thing has the same name on both. Used
//! by the emulators' plugins, so it allocates nothing.

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

/// The name of an exit on a VMX machine, from the exit reason, the exit qualification and the guest's ECX.
pub fn vmx_reason(reason: u32, qualification: u64, ecx: u32) -> &'static str {
    if reason & 1 << 31 != 0 {
        return "entry_failed";
    }
    match reason & 0xffff {
        0 => "exception",
        1 => "interrupt",
        2 => "shutdown",
        7 => "interrupt_window",
        8 => "nmi_window",
        10 => "cpuid",
        12 => "hlt",
        13 => "invd",
        14 | 58 => "invlpg",
        16 | 51 => "rdtsc",
        18 => "hypercall",
        11 | 19..=27 | 50 | 53 => "vmx_instruction",
        // Bits 5 and 4: MOV to CR, MOV from CR, CLTS, LMSW.
        28 if qualification >> 4 & 3 == 1 => "read_cr",
        28 => "write_cr",
        29 if qualification & 1 << 4 != 0 => "read_dr",
        29 => "write_dr",
        30 => "io",
        31 => "rdmsr",
        32 => wrmsr(ecx),
        36 | 39 => "monitor_mwait",
        40 => "pause",
        43 => "tpr_below_threshold",
        44 | 56 => "apic_access",
        45 => "eoi",
        48 => "nested_page_fault",
        49 => "nested_misconfiguration",
        52 => "preemption_timer",
        54 => "wbinvd",
        55 => "xsetbv",
        62 => "page_log_full",
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
    fn the_same_exit_has_the_same_name_under_vmx() {
        assert_eq!(vmx_reason(10, 0, 0), reason(0x72, 0, 0));
        assert_eq!(vmx_reason(32, 0, 0x6e0), reason(MSR, 1, 0x6e0));
        assert_eq!(vmx_reason(31, 0, 0x6e0), reason(MSR, 0, 0x6e0));
        assert_eq!(vmx_reason(48, 0x181, 0), reason(0x400, 0, 0));
        assert_eq!((vmx_reason(28, 0x10, 0), vmx_reason(28, 0x24, 0)), ("read_cr", "write_cr"));
        assert_eq!(vmx_reason(0x8000_0021, 0, 0), "entry_failed");
        assert_eq!(vmx_reason(9, 0, 0), "other", "a task switch");
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
