//! The two tables of the interface: commands and capabilities. They are tokens alone, handed to whoever takes
//! columns from them: `uapi::ioctl` and `uapi::capability` the numbers, `dispatch::commands` the handlers,
//! `caps` the answers of KVM_CHECK_EXTENSION, `rows` what `docs/abi.md` is made from.

/// Hands the commands to the macro `$with`, in a section for each kind of file, whose head names what the
/// handlers are given. A row is
///
/// ```text
/// NAME [direction Struct number] [capabilities] => handler, "note";
/// ```
///
/// The direction is that of the number, `io` where nothing is copied. The number is empty where another section
/// has given it. A handler is an expression: a `Reply`, or the `Result<(), Errno>` of a command that returns 0.
/// `gives` copies out what its closure makes, `takes` copies in what its closure is given. The capabilities are
/// those that tell a VMM of the command. The note is for the document; "the same" is that of the row above.
/// In the last section are numbers that are known and that no file serves.
macro_rules! commands {
    ($with:ident) => {
        $with! {
        (system: kvm, arg)
            // First of all, since VMMs ask it first and stop at another answer than 12.
            GET_API_VERSION [io 0x00] [] => without_argument(arg, API_VERSION),
                "12; EINVAL with an argument";
            CREATE_VM [io 0x01] [] => create_vm(kvm, arg),
                "a VM file; EINVAL for a type other than 0; EINTR: a signal came meanwhile, call again";
            CHECK_EXTENSION [io 0x03] [CAP_CHECK_EXTENSION_VM] => Ok(check_extension(kvm.offer(), arg)),
                "see [capabilities](#capabilities)";
            GET_VCPU_MMAP_SIZE [io 0x04] [] => without_argument(arg, VCPU_MMAP_SIZE as i32),
                "12288: `kvm_run`, the port I/O page, the ring of coalesced writes";
            GET_MSR_INDEX_LIST [iowr KvmMsrList 0x02] [] => lists::write_indices(arg, &kvm.msr_indices()?),
                "see [msrs.md](msrs.md); E2BIG with the number when there is too little room";
            GET_MSR_FEATURE_INDEX_LIST [iowr KvmMsrList 0x0a] [CAP_GET_MSR_FEATURES]
                => lists::write_indices(arg, &kvm.feature_msr_indices()?), "the same";
            GET_MSRS [iowr KvmMsrs 0x88] [CAP_GET_MSR_FEATURES]
                => lists::get_msrs(arg, |index| kvm.feature_msr(index)), "those of the feature list";
            GET_SUPPORTED_CPUID [iowr KvmCpuid2 0x05] [CAP_EXT_CPUID]
                => lists::write_cpuid(arg, || kvm.supported_cpuid()),
                "the host's CPUID cut down to what is virtualized; UMIP also on Intel CPUs without it, by exits \
                 (all but SMSW, as in stock KVM)";
            GET_EMULATED_CPUID [iowr KvmCpuid2 0x09] [CAP_EXT_EMUL_CPUID] => emulated_cpuid(kvm, arg),
                "leaves 0, 1 and 7, without a feature: no instruction is emulated that the host lacks";
            GET_SUPPORTED_HV_CPUID [iowr KvmCpuid2 0xc1] [CAP_SYS_HYPERV_CPUID]
                => hyperv_cpuid(kvm.offer(), arg, || kvm.hyperv_cpuid()),
                "what there is of Hyper-V's interface; ENOTTY where there is none";
            X86_GET_MCE_CAP_SUPPORTED [ior u64 0x9d] [CAP_MCE] => gives(arg, || kvm.offer().mce_cap),
                "MCG_CTL_P and MCG_SER_P; on Intel MCG_CMCI_P and MCG_LMCE_P too";
            HAS_DEVICE_ATTR [iow KvmDeviceAttr 0xe3] [CAP_SYS_ATTRIBUTES] => attribute(arg).map(|_| ()),
                "group 0, KVM_X86_XCOMP_GUEST_SUPP: the XSAVE components that a guest can have; ENXIO for others";
            GET_DEVICE_ATTR [iow KvmDeviceAttr 0xe2] [CAP_SYS_ATTRIBUTES] => get_attribute(kvm, arg), "the same";

        (vm: vm, arg)
            CREATE_VCPU [io 0x41] [] => create_vcpu(vm, arg),
                "EINVAL: id at or above KVM_CAP_MAX_VCPU_ID, or 4096 vCPUs; EEXIST: id taken";
            CHECK_EXTENSION [] [CAP_CHECK_EXTENSION_VM] => Ok(vm_extension(vm, arg)),
                "as on /dev/kvm; of X86_APIC_BUS_CYCLES_NS what is set";
            ENABLE_CAP [iow KvmEnableCap 0xa3] [CAP_ENABLE_CAP_VM] => setting::enable(vm, arg),
                "X2APIC_API, DISABLE_QUIRKS, DISABLE_QUIRKS2, X86_APIC_BUS_CYCLES_NS, EXCEPTION_PAYLOAD, \
                 X86_TRIPLE_FAULT_EVENT, HALT_POLL, MAX_VCPU_ID, MANUAL_DIRTY_LOG_PROTECT2, X86_USER_SPACE_MSR, \
                 SPLIT_IRQCHIP, X86_DISABLE_EXITS, MSR_PLATFORM_INFO, EXIT_ON_EMULATION_FAILURE: see \
                 [capabilities](#capabilities); EINVAL for others and for bits not offered";

            SET_USER_MEMORY_REGION [iow KvmUserspaceMemoryRegion 0x46] [CAP_USER_MEMORY] => memory::set_region(vm, arg),
                "bits 31:16 of the slot choose the address space, 0 or 1 (system-management mode); flags \
                 LOG_DIRTY_PAGES and READONLY; a slot can be made, moved, deleted, and its log switched. EEXIST: \
                 overlaps; EINVAL: unaligned, wraps, not user memory, unknown flag, a change of size, host address \
                 or READONLY, a deletion of nothing";
            SET_USER_MEMORY_REGION2 [iow KvmUserspaceMemoryRegion2 0x49] [CAP_USER_MEMORY2]
                => memory::set_region2(vm, arg), "the same";
            GET_DIRTY_LOG [iow KvmDirtyLog 0x42] [] => memory::dirty_log(vm, arg, Pointers::Bits64),
                "ENOENT: no such slot or no log. Never ENOMEM: what they need is there since the log was switched on";
            CLEAR_DIRTY_LOG [iowr KvmClearDirtyLog 0xc0] [CAP_MANUAL_DIRTY_LOG_PROTECT2]
                => memory::clear_dirty_log(vm, arg, Pointers::Bits64), "the same";
            REGISTER_COALESCED_MMIO [iow KvmCoalescedMmioZone 0x67] [CAP_COALESCED_MMIO]
                => memory::coalesce(vm, arg),
                "ENOSPC: 1000 zones of memory, or of ports; EINVAL: `pio` above 1";
            UNREGISTER_COALESCED_MMIO [iow KvmCoalescedMmioZone 0x68] [CAP_COALESCED_MMIO]
                => memory::uncoalesce(vm, arg),
                "ends every zone in which the given range lies, as stock KVM does it; none is fine";

            CREATE_IRQCHIP [io 0x60] [CAP_IRQCHIP] => vm.create_irqchip(),
                "EEXIST; EINVAL once there are vCPUs";
            GET_IRQCHIP [iowr KvmIrqchip 0x62] [CAP_IRQCHIP] => interrupts::get_irqchip(vm, arg),
                "both PICs and the I/O APIC; ENXIO without, with a split irqchip too";
            // _IOR in SET_IRQCHIP and SET_PIT, _IO in REINJECT_CONTROL: slips of the header, which
            // became the interface.
            SET_IRQCHIP [ior KvmIrqchip 0x63] [CAP_IRQCHIP] => interrupts::set_irqchip(vm, arg), "the same";
            CREATE_PIT [io 0x64] [CAP_PIT] => vm.create_pit(PIT_SPEAKER_DUMMY),
                "EEXIST; ENOENT: no in-kernel PIC";
            CREATE_PIT2 [iow KvmPitConfig 0x77] [CAP_PIT2] => interrupts::create_pit2(vm, arg), "the same";
            GET_PIT [iowr KvmPitState 0x65] [CAP_PIT] => interrupts::get_pit(vm, arg), "ENXIO: no PIT";
            SET_PIT [ior KvmPitState 0x66] [CAP_PIT] => interrupts::set_pit(vm, arg), "the same";
            GET_PIT2 [ior KvmPitState2 0x9f] [CAP_PIT_STATE2] => interrupts::get_pit2(vm, arg), "the same";
            SET_PIT2 [iow KvmPitState2 0xa0] [CAP_PIT_STATE2] => interrupts::set_pit2(vm, arg), "the same";
            REINJECT_CONTROL [io 0x71] [CAP_REINJECT_CONTROL] => interrupts::reinject_control(vm, arg), "the same";
            IRQ_LINE [iow KvmIrqLevel 0x61] [CAP_IRQCHIP] => interrupts::irq_line(vm, arg),
                "ENXIO without irqchip; with a split one the GSI's message is sent, if it has one";
            IRQ_LINE_STATUS [iowr KvmIrqLevel 0x67] [CAP_IRQ_INJECT_STATUS] => interrupts::irq_line_status(vm, arg),
                "the same";
            SIGNAL_MSI [iow KvmMsi 0xa5] [CAP_SIGNAL_MSI] => interrupts::signal_msi(vm, arg),
                "returns how many took it, 0 if it was coalesced";
            SET_GSI_ROUTING [iow KvmIrqRouting 0x6a] [CAP_IRQ_ROUTING] => interrupts::set_routes(vm, arg),
                "pins of the PICs and the I/O APIC (EINVAL where they are the VMM's), MSIs; at most 4096";
            IOEVENTFD [iow KvmIoeventfd 0x79] [CAP_IOEVENTFD] => interrupts::ioeventfd(vm, arg),
                "ports and memory; 1, 2, 4, 8 bytes or any length; datamatch; EBADF: the descriptor is not open, \
                 EINVAL: it is no eventfd";
            IRQFD [iow KvmIrqfd 0x76] [CAP_IRQFD] => interrupts::irqfd(vm, arg),
                "with resample where the I/O APIC is ours, ENOSPC beyond 4096 of those \
                 ([ADR 40](adr/0040-bounded-work-with-interrupts-off.md)); EBADF and EINVAL as above; ends with the \
                 VM's descriptor";

            SET_TSS_ADDR [io 0x47] [CAP_SET_TSS_ADDR] => set_tss_addr(vm, arg),
                "taken and kept; SVM does not need it";
            SET_IDENTITY_MAP_ADDR [iow u64 0x48] [CAP_SET_IDENTITY_MAP_ADDR] => set_identity_map_addr(vm, arg),
                "the same";
            SET_BOOT_CPU_ID [io 0x78] [CAP_SET_BOOT_CPU_ID] => set_boot_cpu_id(vm, arg),
                "EBUSY once there are vCPUs";
            SET_NR_MMU_PAGES [io 0x44] [CAP_MMU_SHADOW_CACHE_CONTROL] => set_nr_mmu_pages(vm, arg),
                "taken; EINVAL below 64";
            GET_CLOCK [ior KvmClockData 0x7c] [CAP_ADJUST_CLOCK] => gives(arg, || vm.clock()),
                "flags REALTIME, HOST_TSC, TSC_STABLE";
            SET_CLOCK [iow KvmClockData 0x7b] [CAP_ADJUST_CLOCK] => set_clock(vm, arg), "the same";
            GET_TSC_KHZ [io 0xa3] [CAP_GET_TSC_KHZ] => Ok(vm.tsc_khz() as i32), "";
            SET_TSC_KHZ [io 0xa2] [CAP_VM_TSC_CONTROL] => set_tsc_khz(vm, arg),
                "other frequencies than the host's only with TSC scaling";
            GET_STATS_FD [io 0xce] [CAP_BINARY_STATS_FD] => vm.stats_file(), "";
            X86_SET_MSR_FILTER [iow KvmMsrFilter 0xc6] [CAP_X86_MSR_FILTER] => msr_filter::set(vm, arg),
                "up to 16 ranges; EINVAL: unknown flags, no direction, more than 1 536 bytes of bitmap, denial of \
                 everything";
            CREATE_DEVICE [iowr KvmCreateDevice 0xe0] [CAP_DEVICE_CTRL] => create_device(arg),
                "ENODEV: there is no kind of device";

        (vm_compat: vm, arg)
            // The pointers make the structure shorter, and with it the number: there can be no
            // mistake which one was meant.
            X86_SET_MSR_FILTER_COMPAT [iow KvmMsrFilterCompat 0xc6] [CAP_X86_MSR_FILTER]
                => msr_filter::set_compat(vm, arg), "a structure of its own, hence a number";
            GET_DIRTY_LOG [] [] => memory::dirty_log(vm, arg, Pointers::Bits32),
                "the upper half of the bitmap's pointer means nothing";
            CLEAR_DIRTY_LOG [] [CAP_MANUAL_DIRTY_LOG_PROTECT2]
                => memory::clear_dirty_log(vm, arg, Pointers::Bits32), "the same";

        (run: vcpu, page, io_page, arg)
            // Apart from the other commands of a vCPU: it has the shared pages, and no match to go
            // through.
            RUN [io 0x80] [CAP_IMMEDIATE_EXIT] => run::run(vcpu, page, io_page, arg),
                "see [exits](#exits); EINTR: signal or `immediate_exit`; EAGAIN: an application processor was started, \
                 call again; EFAULT with KVM_EXIT_MEMORY_FAULT: memory of a slot that the VMM does not have; EIO: an \
                 SMI found no memory for its save area, and the VM is dead";

        (vcpu: vcpu, arg)
            GET_REGS [ior KvmRegs 0x81] [] => gives(arg, || vcpu.regs()), "";
            SET_REGS [iow KvmRegs 0x82] [] => takes(arg, |regs: &KvmRegs| vcpu.set_regs(regs)), "";
            GET_SREGS [ior KvmSregs 0x83] [] => gives(arg, || state::sregs(vcpu)),
                "PDPTRs are never told: under TDP the hardware loads them";
            SET_SREGS [iow KvmSregs 0x84] [] => takes(arg, |sregs| state::set_sregs(vcpu, sregs)), "the same";
            GET_SREGS2 [ior KvmSregs2 0xcc] [CAP_SREGS2] => gives(arg, || vcpu.sregs()), "the same";
            SET_SREGS2 [iow KvmSregs2 0xcd] [CAP_SREGS2] => takes(arg, |sregs| state::set_sregs2(vcpu, sregs)),
                "the same";
            GET_FPU [ior KvmFpu 0x8c] [] => state::get_fpu(vcpu, arg), "";
            SET_FPU [iow KvmFpu 0x8d] [] => takes(arg, |fpu: &KvmFpu| vcpu.set_fpu(fpu)), "";
            GET_XSAVE [ior KvmXsave 0xa4] [CAP_XSAVE] => state::get_xsave(vcpu, arg),
                "EINVAL where 4096 bytes do not suffice";
            // The number has the size of the smaller structure, and the command copies what
            // KVM_CAP_XSAVE2 says.
            GET_XSAVE2 [ior KvmXsave 0xcf] [CAP_XSAVE2] => state::get_xsave2(vcpu, arg), "";
            SET_XSAVE [iow KvmXsave 0xa5] [CAP_XSAVE] => state::set_xsave(vcpu, arg), "";
            GET_XCRS [ior KvmXcrs 0xa6] [CAP_XCRS] => gives(arg, || state::xcrs(vcpu)), "";
            SET_XCRS [iow KvmXcrs 0xa7] [CAP_XCRS] => takes(arg, |xcrs| state::set_xcrs(vcpu, xcrs)), "";
            GET_DEBUGREGS [ior KvmDebugregs 0xa1] [CAP_DEBUGREGS] => gives(arg, || vcpu.debugregs()), "";
            SET_DEBUGREGS [iow KvmDebugregs 0xa2] [CAP_DEBUGREGS] => takes(arg, |regs| state::set_debugregs(vcpu, regs)),
                "";
            GET_MSRS [] [] => lists::get_msrs(arg, |index| vcpu.msr(index)), "see [msrs.md](msrs.md)";
            SET_MSRS [iow KvmMsrs 0x89] [] => lists::set_msrs(arg, |index, value| vcpu.set_msr(index, value)),
                "the same";
            SET_CPUID [iow KvmCpuid 0x8a] [] => state::set_cpuid(vcpu, lists::read_cpuid(arg)?),
                "after the first KVM_RUN only the same table again";
            SET_CPUID2 [iow KvmCpuid2 0x90] [CAP_EXT_CPUID] => state::set_cpuid(vcpu, lists::read_cpuid2(arg)?),
                "the same";
            GET_CPUID2 [iowr KvmCpuid2 0x91] [CAP_EXT_CPUID] => lists::get_cpuid(arg, &vcpu.cpuid()?), "";

            GET_VCPU_EVENTS [ior KvmVcpuEvents 0x9f] [CAP_VCPU_EVENTS] => gives(arg, || vcpu.events()), "";
            SET_VCPU_EVENTS [iow KvmVcpuEvents 0xa0] [CAP_VCPU_EVENTS]
                => takes(arg, |events| state::set_events(vcpu, *events)),
                "EINVAL: an SMI or system-management mode for a vCPU that waits for a SIPI";
            GET_MP_STATE [ior KvmMpState 0x98] [CAP_MP_STATE]
                => gives(arg, || KvmMpState { mp_state: vcpu.mp_state() }), "";
            SET_MP_STATE [iow KvmMpState 0x99] [CAP_MP_STATE] => takes(arg, |state| state::set_mp_state(vcpu, state)),
                "without in-kernel irqchip only RUNNABLE";
            GET_LAPIC [ior KvmLapicState 0x8e] [CAP_IRQCHIP] => state::get_lapic(vcpu, arg),
                "EINVAL without in-kernel irqchip";
            SET_LAPIC [iow KvmLapicState 0x8f] [CAP_IRQCHIP] => state::set_lapic(vcpu, arg), "the same";
            INTERRUPT [iow KvmInterrupt 0x86] [] => takes(arg, |interrupt| state::interrupt(vcpu, interrupt)),
                "ENXIO where the PIC is ours; EEXIST: the last one still waits. With a split irqchip the local APIC has \
                 to take it (LINT0 unmasked in ExtINT mode, or the APIC disabled), and it is not in \
                 KVM_GET_VCPU_EVENTS before";
            NMI [io 0x9a] [CAP_USER_NMI] => vcpu.nmi(),
                "at most two are held; while one is handled further ones merge into one";
            SMI [io 0xb7] [CAP_X86_SMM] => vcpu.smi(),
                "taken before the next instruction, or at the end of the mode; see \
                 [ADR 24](adr/0024-system-management-mode.md)";
            X86_SETUP_MCE [iow u64 0x9c] [CAP_MCE] => takes(arg, |mcg_cap| state::setup_mce(vcpu, *mcg_cap)),
                "up to 32 banks";
            X86_SET_MCE [iow KvmX86Mce 0x9e] [CAP_MCE] => takes(arg, |mce| state::set_mce(vcpu, mce)),
                "An uncorrected error that asks for nothing (no PCC, S, AR, MCG_STATUS 0) is logged, and raises \
                 LVT_CMCI where MCG_CMCI_P and MCi_CTL2 have it";

            GET_TSC_KHZ [] [CAP_GET_TSC_KHZ] => Ok(vcpu.tsc_khz() as i32), "";
            SET_TSC_KHZ [] [CAP_TSC_CONTROL] => state::set_tsc_khz(vcpu, arg), "";
            HAS_DEVICE_ATTR [] [CAP_VCPU_ATTRIBUTES] => state::attribute(vcpu, arg, Attribute::Has),
                "KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET; ENXIO for others";
            GET_DEVICE_ATTR [] [CAP_VCPU_ATTRIBUTES] => state::attribute(vcpu, arg, Attribute::Get), "the same";
            SET_DEVICE_ATTR [iow KvmDeviceAttr 0xe1] [CAP_VCPU_ATTRIBUTES]
                => state::attribute(vcpu, arg, Attribute::Set), "the same";
            KVMCLOCK_CTRL [io 0xad] [CAP_KVMCLOCK_CTRL] => vcpu.kvmclock_ctrl(),
                "EINVAL: the guest has no kvmclock";
            SET_SIGNAL_MASK [iow KvmSignalMask 0x8b] [] => state::set_signal_mask(vcpu, arg), "";
            TRANSLATE [iowr KvmTranslation 0x85] [] => state::translate(vcpu, arg), "";
            SET_GUEST_DEBUG [iow KvmGuestDebug 0x9b] [CAP_SET_GUEST_DEBUG]
                => takes(arg, |debug| state::set_guest_debug(vcpu, debug)),
                "single step (also over instructions that exit), software and hardware breakpoints, injection of #DB \
                 and #BP, BLOCKIRQ. The guest keeps its own debug registers meanwhile";
            TPR_ACCESS_REPORTING [iowr KvmTprAccessCtl 0x92] [CAP_VAPIC] => state::tpr_access_reporting(vcpu, arg),
                "taken, no effect: KVM_CAP_VAPIC is 0";
            SET_VAPIC_ADDR [iow KvmVapicAddr 0x93] [CAP_VAPIC] => state::set_vapic_addr(vcpu, arg), "the same";
            GET_SUPPORTED_HV_CPUID [] [CAP_HYPERV_CPUID] => hyperv_cpuid(vcpu.offer(), arg, || vcpu.hyperv_cpuid()),
                "the same; the versions of the enlightened VMCS once that is enabled";
            ENABLE_CAP [] [CAP_ENABLE_CAP] => takes(arg, |cap| state::enable_cap(vcpu, cap)),
                "ENFORCE_PV_FEATURE_CPUID, HYPERV_ENLIGHTENED_VMCS; EINVAL for others";
            GET_NESTED_STATE [iowr KvmNestedState 0xbe] [CAP_NESTED_STATE]
                => nested::get(vcpu, arg),
                "stock KVM's format; E2BIG with the size that it takes";
            SET_NESTED_STATE [iow KvmNestedState 0xbf] [CAP_NESTED_STATE]
                => nested::set(vcpu, arg),
                "EINVAL and EFAULT as stock KVM, but nothing has changed then. L2 goes on in the next KVM_RUN";
            GET_STATS_FD [] [CAP_BINARY_STATS_FD] => vcpu.stats_file(), "";

        // Numbers of other architectures, or of what nobody calls: named so that a test sees that
        // they are ENOTTY.
        (unknown)
            GET_NR_MMU_PAGES [io 0x45] "";
            GET_ONE_REG [iow KvmOneReg 0xab] "";
            SET_ONE_REG [iow KvmOneReg 0xac] "";
            GET_REG_LIST [iowr KvmRegList 0xb0] "";
        }
    };
}

/// Hands the capabilities to the macro `$with`. A row is a name, its number, what KVM_CHECK_EXTENSION answers on
/// /dev/kvm and on a VM file alike, and a note for the document. A capability is 0 unless all commands behind it
/// work: a VMM then takes its other path.
macro_rules! capabilities {
    ($with:ident) => {
        $with! {
            (offer)
            CAP_IRQCHIP 0 => 1, "";
            CAP_HLT 1 => 1, "";
            CAP_MMU_SHADOW_CACHE_CONTROL 2 => 1, "";
            CAP_USER_MEMORY 3 => 1, "";
            CAP_SET_TSS_ADDR 4 => 1, "";
            // 0, though its two commands are taken: they have no effect, and a VMM that asks does
            // without.
            CAP_VAPIC 6 => 0, "";
            CAP_EXT_CPUID 7 => 1, "";
            CAP_CLOCKSOURCE 8 => 1, "";
            // A recommendation, as against CAP_MAX_VCPUS: more vCPUs than CPUs work, and wait for
            // each other.
            CAP_NR_VCPUS 9 => host::smp::online_cpus().min(offer.max_vcpus),
                "CPUs of the host that are online, at most 4096";
            CAP_NR_MEMSLOTS 10 => USER_MEM_SLOTS, "32764";
            CAP_PIT 11 => 1, "";
            CAP_NOP_IO_DELAY 12 => 1, "";
            CAP_MP_STATE 14 => 1, "";
            CAP_COALESCED_MMIO 15 => COALESCED_MMIO_PAGE_OFFSET as u32,
                "2, the page of the ring in the mapping of a vCPU";
            // Nothing is pinned: the VMM may unmap, move and merge the guest's memory.
            CAP_SYNC_MMU 16 => 1, "";
            // Old bugs of KVM, of whose mending a VMM is told; never 0 in a later one.
            CAP_DESTROY_MEMORY_REGION_WORKS 21 => 1, "";
            CAP_USER_NMI 22 => 1, "";
            CAP_SET_GUEST_DEBUG 23 => (offer.guest_debug != 0).into(), "1";
            CAP_REINJECT_CONTROL 24 => 1, "";
            CAP_IRQ_ROUTING 25 => MAX_IRQ_ROUTES, "4096";
            CAP_IRQ_INJECT_STATUS 26 => 1, "";
            CAP_JOIN_MEMORY_REGIONS_WORKS 30 => 1, "";
            CAP_MCE 31 => offer.mce_banks, "32; QEMU from 8.2 on refuses to start at 0";
            CAP_IRQFD 32 => 1, "";
            CAP_PIT2 33 => 1, "";
            CAP_SET_BOOT_CPU_ID 34 => 1, "";
            CAP_PIT_STATE2 35 => 1, "";
            CAP_IOEVENTFD 36 => 1, "";
            CAP_SET_IDENTITY_MAP_ADDR 37 => 1, "";
            CAP_XEN_HVM 38 => 0, "";
            CAP_ADJUST_CLOCK 39 => CLOCK_VALID_FLAGS, "0xe";
            CAP_INTERNAL_ERROR_DATA 40 => 1, "";
            CAP_VCPU_EVENTS 41 => 1, "";
            CAP_HYPERV 44 => offer.hyperv.into(),
                "1 on Intel CPUs whose guests may be hypervisors ([ADR 58](adr/0058-the-enlightened-vmcs.md))";
            CAP_HYPERV_VAPIC 45 => offer.hyperv.into(), "the same";
            CAP_HYPERV_SPIN 46 => 0, "";
            CAP_INTR_SHADOW 49 => 1, "";
            CAP_DEBUGREGS 50 => 1, "";
            CAP_X86_ROBUST_SINGLESTEP 51 => 1, "";
            CAP_ENABLE_CAP 54 => 1, "";
            CAP_XSAVE 55 => 1, "";
            // Without XSAVE there is no XCR0 to be read or set, and both commands are EINVAL.
            CAP_XCRS 56 => offer.xsave.into(), "1 where the host has XSAVE";
            CAP_ASYNC_PF 59 => 1, "";
            CAP_TSC_CONTROL 60 => offer.tsc_scaling.into(), "1 with TSC scaling";
            CAP_GET_TSC_KHZ 61 => 1, "";
            CAP_MAX_VCPUS 66 => offer.max_vcpus, "4096";
            CAP_ONE_REG 70 => 0, "";
            // Told here and not in CPUID, since it needs a local APIC in the kernel (KVM API
            // §4.46).
            CAP_TSC_DEADLINE_TIMER 72 => 1, "";
            CAP_SYNC_REGS 74 => SYNC_X86_VALID_FIELDS as u32, "7: registers, system registers and events";
            CAP_PCI_2_3 75 => 0, "";
            CAP_KVMCLOCK_CTRL 76 => 1, "";
            CAP_SIGNAL_MSI 77 => 1, "";
            CAP_READONLY_MEM 81 => 1, "";
            CAP_IRQFD_RESAMPLE 82 => 1, "";
            // 0, though KVM_CREATE_DEVICE is known: there is no kind of device to be made.
            CAP_DEVICE_CTRL 89 => 0, "";
            CAP_EXT_EMUL_CPUID 95 => offer.emulated_cpuid.into(), "1";
            CAP_HYPERV_TIME 96 => 0, "";
            // A line is high when its source says so: the polarity bits of an entry are kept and
            // mean nothing.
            CAP_IOAPIC_POLARITY_IGNORED 97 => 1, "";
            CAP_ENABLE_CAP_VM 98 => 1, "";
            CAP_IOEVENTFD_NO_LENGTH 100 => 1, "";
            CAP_VM_ATTRIBUTES 101 => 0, "";
            CAP_CHECK_EXTENSION_VM 105 => 1, "";
            CAP_DISABLE_QUIRKS 116 => (offer.quirks != 0).into(),
                "1; enabled, bits that are unknown are passed over";
            CAP_X86_SMM 117 => 1, "";
            CAP_MULTI_ADDRESS_SPACE 118 => ADDRESS_SPACES, "2: outside system-management mode, and in it";
            // Numbers that only Arm's answer: x86 always has four.
            CAP_GUEST_DEBUG_HW_BPS 119 => 0, "";
            CAP_GUEST_DEBUG_HW_WPS 120 => 0, "";
            CAP_SPLIT_IRQCHIP 121 => offer.split_irqchip.into(),
                "1; enabled, the local APICs are ours, PIC, I/O APIC and PIT the VMM's; `args[0]` GSIs are \
                 its I/O APIC's pins. EINVAL above 4096; EEXIST with an irqchip or with vCPUs";
            CAP_IOEVENTFD_ANY_LENGTH 122 => 1, "";
            CAP_HYPERV_SYNIC 123 => 0, "";
            CAP_VCPU_ATTRIBUTES 127 => offer.tsc_offset.into(), "1";
            CAP_MAX_VCPU_ID 128 => offer.max_vcpu_id, "16384; enabled, once and before there are vCPUs";
            CAP_X2APIC_API 129 => offer.x2apic_api as u32, "3: 32-bit ids; 0xff is an id to x2APICs";
            // A message's sender means nothing here: there is no ITS.
            CAP_MSI_DEVID 131 => 0, "";
            CAP_IMMEDIATE_EXIT 136 => 1, "";
            CAP_X86_DISABLE_EXITS 143 => offer.disable_exits as u32,
                "HLT, PAUSE, CSTATE; MWAIT where the CPU has it and its APIC timer goes on in C-states. \
                 Enabled, for the vCPUs ([ADR 43](adr/0043-exits-that-a-vmm-gives-up.md)); what the host cannot give \
                 is passed over; EINVAL for unknown bits, and with vCPUs";
            CAP_HYPERV_SYNIC2 148 => 0, "";
            CAP_HYPERV_VP_INDEX 149 => offer.hyperv.into(), "as CAP_HYPERV";
            CAP_GET_MSR_FEATURES 153 => 1, "";
            CAP_HYPERV_EVENTFD 154 => 0, "";
            CAP_HYPERV_TLBFLUSH 155 => 0, "";
            // A size and no yes or no: a VMM allocates it once, before it knows what a guest will
            // do.
            CAP_NESTED_STATE 157 => crate::uapi::vcpu_state::largest_nested_state(offer.nested_format),
                "8320 (VMX), 4224 (SVM), whatever `nested` says";
            CAP_MSR_PLATFORM_INFO 159 => 1, "";
            CAP_HYPERV_SEND_IPI 161 => 0, "";
            CAP_COALESCED_PIO 162 => 1, "";
            CAP_HYPERV_ENLIGHTENED_VMCS 163 => offer.hyperv.into(),
                "as CAP_HYPERV; enabled on a vCPU, the range of versions is written where `args[0]` points: 0x101";
            CAP_EXCEPTION_PAYLOAD 164 => offer.exception_payload.into(), "1";
            // The first form had faults, and the second took its place: stock KVM answers 0, too.
            CAP_MANUAL_DIRTY_LOG_PROTECT 166 => 0, "";
            CAP_HYPERV_CPUID 167 => offer.hyperv.into(), "as CAP_HYPERV";
            CAP_MANUAL_DIRTY_LOG_PROTECT2 168 => offer.manual_dirty_log as u32, "1: not \"initially set\"";
            CAP_PMU_EVENT_FILTER 173 => 0, "";
            CAP_HYPERV_DIRECT_TLBFLUSH 175 => 0, "";
            CAP_HALT_POLL 182 => offer.halt_poll.into(), "1; enabled, nanoseconds";
            CAP_ASYNC_PF_INT 183 => 0, "";
            CAP_LAST_CPU 184 => 0, "";
            CAP_SMALLER_MAXPHYADDR 185 => offer.smaller_maxphyaddr.into(),
                "1 where guest tables are walked in software";
            CAP_STEAL_TIME 187 => offer.steal_time.into(), "1";
            CAP_X86_USER_SPACE_MSR 188 => 1, "";
            CAP_X86_MSR_FILTER 189 => 1, "";
            CAP_ENFORCE_PV_FEATURE_CPUID 190 => 1, "";
            CAP_SYS_HYPERV_CPUID 191 => offer.hyperv.into(), "as CAP_HYPERV";
            CAP_DIRTY_LOG_RING 192 => 0, "";
            CAP_X86_BUS_LOCK_EXIT 193 => 0, "";
            CAP_SET_GUEST_DEBUG2 195 => offer.guest_debug, "0x1f0003";
            CAP_SGX_ATTRIBUTE 196 => 0, "";
            CAP_VM_COPY_ENC_CONTEXT_FROM 197 => 0, "";
            CAP_HYPERV_ENFORCE_CPUID 199 => 0, "";
            CAP_SREGS2 200 => 1, "";
            CAP_EXIT_HYPERCALL 201 => 0, "";
            CAP_BINARY_STATS_FD 203 => 1, "";
            CAP_EXIT_ON_EMULATION_FAILURE 204 => 1, "";
            CAP_VM_MOVE_ENC_CONTEXT_FROM 206 => 0, "";
            CAP_VM_GPA_BITS 207 => 0, "s390 alone";
            // At least what KVM_GET_XSAVE copies: a VMM that asks allocates by this answer.
            CAP_XSAVE2 208 => offer.xsave_bytes.max(4096), "bytes of the XSAVE area, at least 4096";
            CAP_SYS_ATTRIBUTES 209 => 1, "";
            CAP_PMU_CAPABILITY 212 => 0, "";
            CAP_DISABLE_QUIRKS2 213 => offer.quirks as u32,
                "0xff: LINT0_REENABLED and CD_NW_CLEARED (of vCPUs made, or sent INIT, after that), \
                 LAPIC_MMIO_HOLE, OUT_7E_INC_RIP, MISC_ENABLE_NO_MWAIT (of the register's next change), \
                 FIX_HYPERCALL_INSN, MWAIT_NEVER_UD_FAULTS, SLOT_ZAP_ALL. Of the last, switched off or \
                 not: the removal of a slot takes the slot's translations and no others. CD_NW_CLEARED \
                 changes nothing on Intel CPUs, as under stock KVM without passed-through devices";
            CAP_VM_TSC_CONTROL 214 => offer.tsc_scaling.into(), "1 with TSC scaling";
            CAP_SYSTEM_EVENT_DATA 215 => 1, "";
            CAP_X86_TRIPLE_FAULT_EVENT 218 => offer.triple_fault_event.into(), "1";
            CAP_X86_NOTIFY_VMEXIT 219 => 0, "";
            CAP_VM_DISABLE_NX_HUGE_PAGES 220 => 0, "";
            CAP_DIRTY_LOG_RING_ACQ_REL 223 => 0, "";
            CAP_DIRTY_LOG_RING_WITH_BITMAP 225 => 0, "";
            CAP_PMU_EVENT_MASKED_EVENTS 226 => 0, "";
            CAP_USER_MEMORY2 231 => 1, "";
            // 0, though such exits are made: a VMM that asks for this wants them of guest_memfd.
            CAP_MEMORY_FAULT_INFO 232 => 0, "";
            CAP_MEMORY_ATTRIBUTES 233 => 0, "";
            CAP_GUEST_MEMFD 234 => 0, "";
            // A mask of types: the ordinary one alone.
            CAP_VM_TYPES 235 => 1, "";
            CAP_PRE_FAULT_MEMORY 236 => 0, "";
            // On /dev/kvm the default; of a VM the dispatch answers what is set.
            CAP_X86_APIC_BUS_CYCLES_NS 237 => 1,
                "on a VM what is set; enabled, nanoseconds in a cycle; EINVAL: 0, or so long that the longest countdown does \
                 not fit into 64 bits of nanoseconds; ENXIO without local APICs; EINVAL with vCPUs";
            CAP_X86_GUEST_MODE 238 => 0, "";
        }
    };
}
