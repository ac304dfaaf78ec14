//! What the manuals call some of the bits and MSRs in which the modules differ. A bit without a name here is told by its place alone.

const NAMES: &[(&str, &str)] = &[
    ("CPUID.1.0:ECX[24]", "TSC deadline"),
    ("CPUID.1.0:ECX[31]", "hypervisor"),
    ("CPUID.40000001.0:EAX[04]", "ASYNC_PF"),
    ("CPUID.40000001.0:EAX[09]", "PV_TLB_FLUSH"),
    ("CPUID.40000001.0:EAX[10]", "ASYNC_PF_VMEXIT"),
    ("CPUID.40000001.0:EAX[13]", "PV_SCHED_YIELD"),
    ("CPUID.40000001.0:EAX[14]", "ASYNC_PF_INT"),
    ("CPUID.40000001.0:EAX[18]", "Gannet's lazy deadline"),
    ("CPUID.8000000A.0:EDX[05]", "VMCB clean bits"),
    ("CPUID.8000000A.0:EDX[06]", "flush by ASID"),
    ("CPUID.80000021.0:EAX[17]", "CPUID faulting"),
    ("CPUID.80000021.0:ECX[01]", "TSA_SQ_NO"),
    ("CPUID.80000021.0:ECX[02]", "TSA_L1_NO"),
    ("MSR 3A", "IA32_FEATURE_CONTROL"),
    ("MSR CE[31]", "CPUID faulting"),
    ("MSR 483[44]", "exit controls: load PERF_GLOBAL_CTRL"),
    ("MSR 484[45]", "entry controls: load PERF_GLOBAL_CTRL"),
    ("MSR 489[11]", "CR4.UMIP"),
    ("MSR 48B[41]", "virtual-interrupt delivery"),
    ("MSR 48B[52]", "XSAVES"),
    ("MSR 48F[44]", "true exit controls: load PERF_GLOBAL_CTRL"),
    ("MSR 490[45]", "true entry controls: load PERF_GLOBAL_CTRL"),
    ("MSR 1D9", "DEBUGCTL"),
    ("MSR 1DB", "LASTBRANCHFROMIP"),
    ("MSR 1DC", "LASTBRANCHTOIP"),
    ("MSR 1DD", "LASTINTFROMIP"),
    ("MSR 1DE", "LASTINTTOIP"),
    ("MSR 2FF", "MTRRdefType"),
    ("MSR DA0", "XSS"),
    ("MSR C0010117", "VM_HSAVE_PA"),
];

/// A place with its name, if it has one.
pub fn named(place: &str) -> String {
    let known = NAMES.iter().find(|(known, _)| *known == place);
    known.map_or_else(|| place.to_owned(), |(_, name)| format!("{place} {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_keeps_its_number_beside_its_name() {
        assert_eq!(named("CPUID.1.0:ECX[24]"), "CPUID.1.0:ECX[24] TSC deadline");
        assert_eq!(named("MSR 483[00]"), "MSR 483[00]");
    }

    #[test]
    fn no_place_has_two_names() {
        let mut places: Vec<&str> = NAMES.iter().map(|(place, _)| *place).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
