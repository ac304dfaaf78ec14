//! The table of MSRs: a row says who owns an MSR, whether a VMM saves it, what it holds at power-up and
//! what reading and writing it does. It is tokens alone: `class` takes the owners from it, `lists` what a
//! VMM saves, `store` the slots with their rules, `rows` what `docs/msrs.md` is made from.
//!
//! A row names one MSR by its constant in [`x86::msr`], or a range of numbers. Its columns:
//!
//! - **saved**: `[saved]` is in KVM_GET_MSR_INDEX_LIST on every host, `[saved if fact]` and
//!   `[saved unless fact]` where [`crate::HostMsrs`] says so, `[]` nowhere. `feature: value` puts the MSR
//!   into KVM_GET_MSR_FEATURE_INDEX_LIST, with the value that a VMM reads from /dev/kvm. The lists have the
//!   order of the rows. VMMs write MSRs back in that order, so TSC comes before TSC_ADJUST and the
//!   deadline, and an MSR that allows a bit before the one that has it.
//! - **check**, of the backend's: `[canonical]` holds a linear address.
//! - **power-up**, of MSRs with a slot. `, reset` where a reset puts the value back; INIT keeps all
//!   (SDM vol. 3A table 9-1).
//! - **read**: `value` is the slot's, a number is that number, `by rule` asks a method of the store,
//!   `refused` is #GP.
//! - **write**: `any` value is kept, `zero` takes 0 alone, `ignored` takes and forgets, `by rule` asks a
//!   method of the store, `refused` is #GP.
//! - read and write may end with `if condition`, a method of the store: elsewhere they are refused.
//! - a note for the document.

/// Hands the rows to the macro `$with`.
macro_rules! msrs {
    ($with:ident) => {
        $with! {
        (host)

        Backend
            "In the control block or in hardware. The backend keeps it; what it takes is checked by \
             `vcpu`."
        {
            SYSENTER_CS        [saved]              []          "no exit; on Intel writes exit for a guest that is offered VMX";
            SYSENTER_ESP       [saved]              []          "no exit; on Intel writes exit for a guest that is offered VMX, on AMD both for one of Intel's make";
            SYSENTER_EIP       [saved]              []          "no exit; on Intel writes exit for a guest that is offered VMX, on AMD both for one of Intel's make";
            STAR               [saved]              []          "no exit";
            CSTAR              [saved]              [canonical] "no exit";
            KERNEL_GS_BASE     [saved]              [canonical] "no exit";
            SYSCALL_MASK       [saved]              []          "no exit";
            LSTAR              [saved]              [canonical] "no exit";
            FS_BASE            []                   [canonical] "no exit; saved by KVM_GET_SREGS";
            GS_BASE            []                   [canonical] "no exit; saved by KVM_GET_SREGS";
            EFER               []                   []
                "bits that the guest's CPUID offers; LME not while paging; LMA is the hardware's; \
                 saved by KVM_GET_SREGS";
            TSC                [saved]              []
                "a guest's write moves TSC_ADJUST along; writes by the host to all vCPUs close to \
                 each other give them one TSC";
            PAT                [saved]              []          "fields 0, 1, 4, 5, 6, 7";
            TSC_AUX            [saved if tsc_aux]   []
                "32 bits, the upper half refused, or ignored for a guest of AMD's; guest: with \
                 RDTSCP or RDPID, and reads do not exit then";
            SPEC_CTRL          [saved if spec_ctrl] []
                "guest: bits that were offered and that the host has, without an exit where the CPU \
                 virtualizes it; host: bits that the host has";
            XSS                [saved]              []
                "components that the guest may have (none on AMD); guest: with XSAVES";
            DEBUGCTL           [saved]              []
                "LBR and BTF; on Intel reads do not exit; on AMD 5:2 are ignored, and where the CPU virtualizes the records BTF is";
            LAST_BRANCH_FROM   [saved if lbr]       []
                "read only for a guest; host: any value where the CPU virtualizes the records, else 0";
            LAST_BRANCH_TO     [saved if lbr]       []          "as LAST_BRANCH_FROM";
            LAST_INT_FROM      [saved if lbr]       []          "as LAST_BRANCH_FROM";
            LAST_INT_TO        [saved if lbr]       []          "as LAST_BRANCH_FROM";
        }

        Pv
            "Paravirtual, KVM's own. With KVM_CAP_ENFORCE_PV_FEATURE_CPUID each is refused unless \
             its feature was offered in leaf 0x40000001; then a VMM reads 0, and may write 0."
        {
            KVM_WALL_CLOCK        [saved] "an address; the wall clock is written there once";
            KVM_SYSTEM_TIME       [saved] "an address, bit 0 switches on";
            KVM_WALL_CLOCK_NEW    [saved] "the same as KVM_WALL_CLOCK";
            KVM_SYSTEM_TIME_NEW   [saved] "the same as KVM_SYSTEM_TIME";
            KVM_ASYNC_PF_EN       [saved] "kept; no such fault comes";
            KVM_STEAL_TIME        [saved] "an address aligned to 64, bit 0 switches on";
            KVM_PV_EOI_EN         [saved] "an address aligned to 4, bit 0 switches on";
            KVM_POLL_CONTROL      [saved] "0 or 1; 1 at first";
            KVM_ASYNC_PF_INT      [saved] "a vector, kept";
            KVM_ASYNC_PF_ACK      [saved] "reads 0";
            KVM_MIGRATION_CONTROL []      "refused";
            KVM_LAZY_TSC_DEADLINE [saved if lazy_deadline]
                "an address aligned to 64, bit 0 switches on";
        }

        HyperV
            "Synthetic, Hyper-V's. On Intel CPUs whose guests may be hypervisors, for a guest whose CPUID names the interface \
             in leaf 0x40000001; a VMM reads and writes them in any case."
        {
            HV_GUEST_OS_ID    [saved if hyperv] "the VM's; 0 switches the page of hypercalls off";
            HV_HYPERCALL      [saved if hyperv]
                "the VM's; ignored while HV_GUEST_OS_ID is 0; an address, bit 0 switches on: VMCALL and RET are written there";
            HV_VP_INDEX       [saved if hyperv] "refused; host: below 4096; at first the vCPU's place in the VM";
            HV_EOI            [] "as the local APIC's register; refused without one";
            HV_ICR            [] "the same, both halves";
            HV_TPR            [] "the same";
            HV_VP_ASSIST_PAGE [saved if hyperv] "an address, bit 0 switches on: its first four bytes become 0";
        }

        Kept "Kept as values." {
            TSC_ADJUST            [saved] [0] [value] [by write_tsc_adjust]
                "guest: moves the TSC by the difference; host: the value alone; without the feature \
                 the write vanishes";
            // Offered on AMD's CPUs, too, as in stock KVM.
            ARCH_CAPABILITIES     [saved, feature: host.arch_capabilities] [host.arch_capabilities]
                [value if arch_capabilities] [any if vmm] "";
            MISC_ENABLE           [saved] [MISC_ENABLE_RESET, reset] [value] [by write_misc_enable]
                "BTS and PEBS unavailable, which a guest cannot change; MWAIT changes nothing (with \
                 the quirk MISC_ENABLE_NO_MWAIT off it needs SSE3 and CPUID's MONITOR bit follows)";
            FEATURE_CONTROL       [saved unless amd] [0] [value if intel] [by write_feature_control if intel]
                "guest, until locked: lock, LMCE with MCG_LMCE_P; host: those, VMX, SGX";
            // The VMM's alone: a guest learns of it by its save area.
            SMBASE                [saved] [0x3_0000, reset] [value if vmm] [any if vmm]
                "RSM sets it from the save area";
            SMI_COUNT             [saved] [0] [value] [any if vmm] "SMIs taken";
            PLATFORM_INFO         [saved] [cpuid_faulting::PLATFORM_INFO] [value]
                [by write_platform_info if vmm]
                "bit 31: CPUID faulting, emulated, so every guest has it, unless \
                 KVM_CAP_MSR_PLATFORM_INFO hides the MSR; the bit must not go while CPUID faulting \
                 is on";
            MISC_FEATURES_ENABLES [saved] [0, reset] [value] [by write_misc_features]
                "CPUID faulting, where PLATFORM_INFO says so";
            POWER_CTL             [saved] [0] [value] [any] "";
            UCODE_REV             [saved, feature: host.ucode_rev]
                [if host.amd { 0x0100_0065 } else { 0x1_0000_0000 }] [value] [by write_ucode_rev]
                "at first those of KVM, new enough that no guest knows an erratum for them; a \
                 guest's update is ignored, so that it does not try again for ever";
            HWCR                  [saved] [0, reset] [value] [by write_hwcr]
                "McStatusWrEn and TscFreqSel are kept, FFDIS, IGNNE and TLB-cache-disable ignored, \
                 others refused";
            VM_HSAVE_PA           [saved if amd] [0] [value] [by write_vm_hsave_pa]
                "guest: aligned, within the address width; host: any, cut to a page";
            TSC_RATIO             [saved if amd] [TSC_RATIO_ONE] [value if tsc_ratio] [by write_tsc_ratio if tsc_ratio]
                "of L2's TSC to L1's, 8.32 fixed point (APM vol. 2 §15.30.5); guest: with the feature; without it \
                 1.0, and a VMM's 0 is ignored";
            DE_CFG                [feature if amd: host.de_cfg & de_cfg::LFENCE_SERIALIZE]
                [0] [value if amd_host] [by write_de_cfg if amd_host]
                "bit 1, where LFENCE serializes on the host; a guest may only state it, a host also \
                 clear it";
            OSVW_ID_LENGTH        [] [3] [value if osvw] [any if osvw]
                "three known workarounds, none of which a guest has to apply";
            // 0: no workaround is needed of those that the length tells of.
            OSVW_STATUS           [] [0] [value if osvw] [any if osvw] "";
        }

        Outside
            "Kept as values too. A write takes effect where the kernel can be called, outside the \
             inner loop."
        {
            VIRT_SPEC_CTRL        [saved if amd] [0] [value if virt_ssbd]
                [by write_virt_spec_ctrl if virt_ssbd]
                "SSBD";
            VM_CR                 [] [0] [value if amd_host] [by write_vm_cr if amd_host]
                "five bits; SVMDIS and lock stay once set; SVMDIS keeps EFER.SVME from being \
                 set, and cannot be set while it is";
        }

        Fixed "Without a slot: constants, commands, memory types and machine checks." {
            // Write-only by the manuals (SDM vol. 4, table 2-2).
            PRED_CMD              [] [refused] [by write_pred_cmd]
                "guest: IBPB and SBPB where offered, done at once; host: where the host has it, and \
                 nothing is done";
            FLUSH_CMD             [] [refused] [by write_flush_cmd] "where offered, and on Intel then without an exit; one that exits for the VMM's filter flushes nothing";
            PERF_CAPABILITIES     [saved, feature: 0] [0 if pdcm] [zero if vmm] "guest: with PDCM";

            MCG_STATUS            [saved] [by read_machine_checks] [by write_machine_checks]
                "architectural checks, for a host wider ones";
            MCG_CTL               [saved] [by read_machine_checks] [by write_machine_checks]
                "where MCG_CAP has MCG_CTL_P: all or nothing";
            MCG_CAP               [] [by read_machine_checks] [refused] "set by KVM_X86_SETUP_MCE";
            MCG_EXT_CTL           [] [by read_mcg_ext_ctl if local_machine_checks]
                [by write_mcg_ext_ctl if local_machine_checks]
                "bit 0; guest: where FEATURE_CONTROL has LMCE (Intel)";
            MC0_CTL2 ..= 0x29f    [] [by read_machine_checks] [by write_machine_checks]
                "banks that there are";
            MC0_CTL ..= 0x47f     [] [by read_machine_checks] [by write_machine_checks]
                "banks that there are; read by number, not listed";
            P5_MC_ADDR            [] [0] [refused] "";
            P5_MC_TYPE            [] [0] [refused] "";

            MTRR_CAP              [] [by read_mtrr] [refused] "8 pairs, fixed ranges, WC";
            MTRR_DEF_TYPE         [saved] [by read_mtrr] [by write_mtrr]
                "valid types and masks; no effect on memory types, which come from the guest's PAT";
            MTRR_FIX64K_00000     [saved] [by read_mtrr] [by write_mtrr] "the same";
            MTRR_FIX16K_80000     [saved] [by read_mtrr] [by write_mtrr] "the same";
            MTRR_FIX16K_A0000     [saved] [by read_mtrr] [by write_mtrr] "the same";
            MTRR_FIX4K_C0000 ..= MTRR_FIX4K_F8000 [saved] [by read_mtrr] [by write_mtrr] "the same";
            MTRR_PHYSBASE0 ..= 0x20f [saved] [by read_mtrr] [by write_mtrr] "8 pairs, the same";

            // Read at boot by systems that do not ask CPUID: #GP would stop them. The values are
            // stock KVM's.
            FSB_FREQ              [] [3] [refused] "old systems compute clocks from it";
            EBC_FREQUENCY_ID      [] [1 << 24] [refused] "old systems compute clocks from it";
            PERF_STATUS           [] [1000 | 4 << 40] [refused] "";
            BBL_CR_CTL3           [] [0xbe70_2111] [ignored] "";
            K7_CLK_CTL            [] [0x2000_0000] [ignored] "";

            // Taken and forgotten: a watchdog that tries a counter finds that it does not count,
            // and gives up.
            PERFCTR0 ..= 0xc2     [] [0] [ignored] "no counter, so that a guest finds none";
            PERFEVTSEL0 ..= 0x187 [] [0] [ignored] "";
            K7_EVNTSEL0 ..= K7_PERFCTR3 [] [0] [ignored] "";
            NB_CFG                [] [0] [ignored] "";
            DC_CFG                [] [0] [ignored] "";
            TW_CFG                [] [0] [ignored] "";
            BU_CFG2               [] [0] [ignored] "";
            F15H_EX_CFG           [] [0] [ignored] "";
            // Updates of microcode are taken and forgotten: a guest that gets #GP here may stop.
            UCODE_WRITE           [] [refused] [ignored] "";
            PATCH_LOADER          [] [refused] [ignored] "";
            VM_IGNNE              [] [refused] [ignored] "";
            FAM10H_MMIO_CONF_BASE [] [0] [zero] "";

            // Zero as in stock KVM: kernels and firmware read these in passing.
            PLATFORM_ID           [] [0] [refused] "";
            EBL_CR_POWERON        [] [0] [refused] "";
            PERF_CTL              [] [0] [refused] "";
            RAPL_POWER_UNIT       [] [0] [refused] "";
            PKG_ENERGY_STATUS     [] [0] [refused] "";
            DRAM_ENERGY_STATUS    [] [0] [refused] "";
            PP0_ENERGY_STATUS     [] [0] [refused] "";
            PP1_ENERGY_STATUS     [] [0] [refused] "";
            SYSCFG                [] [0] [refused] "";
            HSMP_STATUS           [] [0] [refused] "";
            SMM_TSEG_ADDR         [] [0] [refused] "";
            SMM_TSEG_MASK         [] [0] [refused] "";
            IC_CFG                [] [0] [refused] "";
        }

        Apic "Of the local APIC, outside the x2APIC range." {
            APIC_BASE    []      "saved by KVM_GET_SREGS";
            TSC_DEADLINE [saved] "0 and ignored where the timer has another mode";
        }
        }
    };
}
