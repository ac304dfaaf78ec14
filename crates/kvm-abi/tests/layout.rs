//! Every structure of the interface against `kvm-bindings`: size, alignment, and the offset of
//! every field.

use core::mem::{align_of, offset_of, size_of};

/// Compares a type of ours with one of `kvm-bindings`; `a as b` where a field has another name.
macro_rules! same_layout {
    (@theirs $theirs:ident $field:ident) => { offset_of!(kvm_bindings::$theirs, $field) };
    (@theirs $theirs:ident $field:ident $($other:ident).+) => {
        offset_of!(kvm_bindings::$theirs, $($other).+)
    };
    ($module:ident::$ours:ident = $theirs:ident {
        $($field:ident $(as $($other:ident).+)?),* $(,)?
    }) => {
        let name = stringify!($ours);
        assert_eq!(
            size_of::<gannet_kvm_abi::uapi::$module::$ours>(),
            size_of::<kvm_bindings::$theirs>(),
            "size of {name}",
        );
        assert_eq!(
            align_of::<gannet_kvm_abi::uapi::$module::$ours>(),
            align_of::<kvm_bindings::$theirs>(),
            "alignment of {name}",
        );
        $(
            assert_eq!(
                offset_of!(gannet_kvm_abi::uapi::$module::$ours, $field),
                same_layout!(@theirs $theirs $field $($($other).+)?),
                "offset of {name}.{}", stringify!($field),
            );
        )*
    };
}

#[test]
fn structures_of_registers_lie_as_in_the_kernel_headers() {
    same_layout!(
        registers::KvmRegs = kvm_regs {
            rax,
            rbx,
            rcx,
            rdx,
            rsi,
            rdi,
            rsp,
            rbp,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
            rip,
            rflags
        }
    );
    same_layout!(
        registers::KvmSegment = kvm_segment {
            base,
            limit,
            selector,
            type_,
            present,
            dpl,
            db,
            s,
            l,
            g,
            avl,
            unusable,
            padding
        }
    );
    same_layout!(registers::KvmDtable = kvm_dtable { base, limit, padding });
    same_layout!(
        registers::KvmSregs = kvm_sregs {
            cs,
            ds,
            es,
            fs,
            gs,
            ss,
            tr,
            ldt,
            gdt,
            idt,
            cr0,
            cr2,
            cr3,
            cr4,
            cr8,
            efer,
            apic_base,
            interrupt_bitmap
        }
    );
    same_layout!(
        registers::KvmSregs2 = kvm_sregs2 {
            cs,
            ds,
            es,
            fs,
            gs,
            ss,
            tr,
            ldt,
            gdt,
            idt,
            cr0,
            cr2,
            cr3,
            cr4,
            cr8,
            efer,
            apic_base,
            flags,
            pdptrs
        }
    );
    same_layout!(
        registers::KvmFpu =
            kvm_fpu { fpr, fcw, fsw, ftwx, pad1, last_opcode, last_ip, last_dp, xmm, mxcsr, pad2 }
    );
    same_layout!(registers::KvmDebugregs = kvm_debugregs { db, dr6, dr7, flags, reserved });
    same_layout!(registers::KvmXcr = kvm_xcr { xcr, reserved, value });
    same_layout!(registers::KvmXcrs = kvm_xcrs { nr_xcrs, flags, xcrs, padding });
    same_layout!(
        registers::KvmTranslation =
            kvm_translation { linear_address, physical_address, valid, writeable, usermode, pad }
    );
    same_layout!(registers::KvmXsave = kvm_xsave { region });
}

#[test]
fn structures_of_msr_lie_as_in_the_kernel_headers() {
    same_layout!(msr::KvmMsrEntry = kvm_msr_entry { index, reserved, data });
    same_layout!(msr::KvmMsrs = kvm_msrs { nmsrs, pad });
    same_layout!(msr::KvmMsrList = kvm_msr_list { nmsrs });
    same_layout!(msr::KvmMsrFilterRange = kvm_msr_filter_range { flags, nmsrs, base, bitmap });
    same_layout!(msr::KvmMsrFilter = kvm_msr_filter { flags, ranges });
}

#[test]
fn structures_of_cpuid_lie_as_in_the_kernel_headers() {
    same_layout!(cpuid::KvmCpuidEntry = kvm_cpuid_entry { function, eax, ebx, ecx, edx, padding });
    same_layout!(cpuid::KvmCpuid = kvm_cpuid { nent, padding });
    same_layout!(
        cpuid::KvmCpuidEntry2 =
            kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding }
    );
    same_layout!(cpuid::KvmCpuid2 = kvm_cpuid2 { nent, padding });
}

#[test]
fn structures_of_memory_lie_as_in_the_kernel_headers() {
    same_layout!(
        memory::KvmUserspaceMemoryRegion = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr,
            memory_size,
            userspace_addr
        }
    );
    same_layout!(
        memory::KvmUserspaceMemoryRegion2 = kvm_userspace_memory_region2 {
            slot,
            flags,
            guest_phys_addr,
            memory_size,
            userspace_addr,
            guest_memfd_offset,
            guest_memfd,
            pad1,
            pad2
        }
    );
    same_layout!(memory::KvmDirtyLog = kvm_dirty_log {
        slot, padding1, dirty_bitmap as __bindgen_anon_1.dirty_bitmap
    });
    same_layout!(memory::KvmClearDirtyLog = kvm_clear_dirty_log {
        slot, num_pages, first_page, dirty_bitmap as __bindgen_anon_1.dirty_bitmap
    });
    same_layout!(memory::KvmCoalescedMmioZone = kvm_coalesced_mmio_zone {
        addr, size, pio as __bindgen_anon_1.pio
    });
    same_layout!(memory::KvmCoalescedMmio = kvm_coalesced_mmio {
        phys_addr, len, pio as __bindgen_anon_1.pio, data
    });
}

#[test]
fn structures_of_irqchip_lie_as_in_the_kernel_headers() {
    same_layout!(irqchip::KvmIrqLevel = kvm_irq_level {
        irq as __bindgen_anon_1.irq, level
    });
    same_layout!(
        irqchip::KvmPicState = kvm_pic_state {
            last_irr,
            irr,
            imr,
            isr,
            priority_add,
            irq_base,
            read_reg_select,
            poll,
            special_mask,
            init_state,
            auto_eoi,
            rotate_on_auto_eoi,
            special_fully_nested_mode,
            init4,
            elcr,
            elcr_mask
        }
    );
    same_layout!(
        irqchip::KvmIoapicState =
            kvm_ioapic_state { base_address, ioregsel, id, irr, pad, redirtbl }
    );
    same_layout!(irqchip::KvmIrqchip = kvm_irqchip { chip_id, pad, chip });
    same_layout!(irqchip::KvmLapicState = kvm_lapic_state { regs });
    same_layout!(irqchip::KvmPitConfig = kvm_pit_config { flags, pad });
    same_layout!(
        irqchip::KvmPitChannelState = kvm_pit_channel_state {
            count,
            latched_count,
            count_latched,
            status_latched,
            status,
            read_state,
            write_state,
            write_latch,
            rw_mode,
            mode,
            bcd,
            gate,
            count_load_time
        }
    );
    same_layout!(irqchip::KvmPitState = kvm_pit_state { channels });
    same_layout!(irqchip::KvmPitState2 = kvm_pit_state2 { channels, flags, reserved });
    same_layout!(irqchip::KvmReinjectControl = kvm_reinject_control { pit_reinject, reserved });
    same_layout!(irqchip::KvmIrqRouting = kvm_irq_routing { nr, flags });
    same_layout!(irqchip::KvmIrqRoutingEntry = kvm_irq_routing_entry { gsi, type_, flags, pad, u });
    same_layout!(irqchip::KvmIrqRoutingIrqchip = kvm_irq_routing_irqchip { irqchip, pin });
    same_layout!(irqchip::KvmIrqRoutingMsi = kvm_irq_routing_msi {
        address_lo, address_hi, data, devid as __bindgen_anon_1.devid
    });
    same_layout!(irqchip::KvmMsi = kvm_msi { address_lo, address_hi, data, flags, devid, pad });
    same_layout!(irqchip::KvmTprAccessCtl = kvm_tpr_access_ctl { enabled, flags, reserved });
    same_layout!(irqchip::KvmVapicAddr = kvm_vapic_addr { vapic_addr });
}

#[test]
fn structures_of_event_lie_as_in_the_kernel_headers() {
    same_layout!(event::KvmIoeventfd = kvm_ioeventfd { datamatch, addr, len, fd, flags, pad });
    same_layout!(event::KvmIrqfd = kvm_irqfd { fd, gsi, flags, resamplefd, pad });
}

#[test]
fn structures_of_vcpu_state_lie_as_in_the_kernel_headers() {
    same_layout!(vcpu_state::KvmMpState = kvm_mp_state { mp_state });
    same_layout!(vcpu_state::KvmInterrupt = kvm_interrupt { irq });
    same_layout!(vcpu_state::KvmSignalMask = kvm_signal_mask { len });
    same_layout!(
        vcpu_state::KvmExceptionEvent =
            kvm_vcpu_events__bindgen_ty_1 { injected, nr, has_error_code, pending, error_code }
    );
    same_layout!(
        vcpu_state::KvmInterruptEvent =
            kvm_vcpu_events__bindgen_ty_2 { injected, nr, soft, shadow }
    );
    same_layout!(
        vcpu_state::KvmNmiEvent = kvm_vcpu_events__bindgen_ty_3 { injected, pending, masked, pad }
    );
    same_layout!(
        vcpu_state::KvmSmiEvent =
            kvm_vcpu_events__bindgen_ty_4 { smm, pending, smm_inside_nmi, latched_init }
    );
    same_layout!(vcpu_state::KvmVcpuEvents = kvm_vcpu_events {
        exception, interrupt, nmi, sipi_vector, flags, smi, triple_fault_pending as
        triple_fault.pending, reserved, exception_has_payload, exception_payload
    });
    same_layout!(
        vcpu_state::KvmX86Mce = kvm_x86_mce { status, addr, misc, mcg_status, bank, pad1, pad2 }
    );
    same_layout!(vcpu_state::KvmOneReg = kvm_one_reg { id, addr });
    same_layout!(vcpu_state::KvmRegList = kvm_reg_list { n });
    same_layout!(vcpu_state::KvmNestedState = kvm_nested_state { flags, format, size, hdr });
}

#[test]
fn structures_of_debug_lie_as_in_the_kernel_headers() {
    same_layout!(debug::KvmGuestDebug = kvm_guest_debug {
        control, pad, debugreg as arch.debugreg
    });
    same_layout!(debug::KvmDebugExitArch = kvm_debug_exit_arch { exception, pad, pc, dr6, dr7 });
}

#[test]
fn structures_of_clock_lie_as_in_the_kernel_headers() {
    same_layout!(
        clock::KvmClockData = kvm_clock_data { clock, flags, pad0, realtime, host_tsc, pad }
    );
}

#[test]
fn structures_of_device_lie_as_in_the_kernel_headers() {
    same_layout!(device::KvmCreateDevice = kvm_create_device { type_, fd, flags });
    same_layout!(device::KvmDeviceAttr = kvm_device_attr { flags, group, attr, addr });
    same_layout!(
        device::KvmStatsHeader =
            kvm_stats_header { flags, name_size, num_desc, id_offset, desc_offset, data_offset }
    );
    same_layout!(
        device::KvmStatsDesc = kvm_stats_desc { flags, exponent, size, offset, bucket_size }
    );
    same_layout!(device::KvmEnableCap = kvm_enable_cap { cap, flags, args, pad });
}

#[test]
fn structures_of_run_lie_as_in_the_kernel_headers() {
    same_layout!(run::KvmRun = kvm_run {
        request_interrupt_window, immediate_exit, padding1, exit_reason,
        ready_for_interrupt_injection, if_flag, flags, cr8, apic_base, exit as
        __bindgen_anon_1, kvm_valid_regs, kvm_dirty_regs, sync as s.regs
    });
    same_layout!(run::KvmSyncRegs = kvm_sync_regs { regs, sregs, events });
}

#[test]
fn a_route_reads_as_the_union_of_the_headers() {
    use gannet_kvm_abi::uapi::irqchip::KvmIrqRoutingEntry;
    use kvm_bindings::{kvm_irq_routing_entry, kvm_irq_routing_irqchip, kvm_irq_routing_msi};
    assert_eq!(offset_of!(kvm_irq_routing_entry, u.irqchip), 16);
    assert_eq!(offset_of!(kvm_irq_routing_entry, u.msi), 16);
    assert_eq!(offset_of!(kvm_irq_routing_irqchip, pin), 4);
    assert_eq!(offset_of!(kvm_irq_routing_msi, data), 8);
    let route = KvmIrqRoutingEntry {
        u: [0x2222_2222_1111_1111, 0x4444_4444_3333_3333, 0, 0],
        ..Default::default()
    };
    assert_eq!((route.irqchip().irqchip, route.irqchip().pin), (0x1111_1111, 0x2222_2222));
    assert_eq!((route.msi().address_lo, route.msi().address_hi), (0x1111_1111, 0x2222_2222));
    assert_eq!((route.msi().data, route.msi().devid), (0x3333_3333, 0x4444_4444));
}

/// The run page is written by word: the union's members must lie where `run_page` puts them.
#[test]
fn members_of_the_exit_union_lie_where_the_run_page_writes_them() {
    use kvm_bindings::kvm_run__bindgen_ty_1 as Union;
    assert_eq!(size_of::<Union>(), 256);
    assert_eq!(offset_of!(kvm_bindings::kvm_run, __bindgen_anon_1), 32);
    assert_eq!(offset_of!(kvm_bindings::kvm_run, kvm_valid_regs), 288);
    assert_eq!(offset_of!(kvm_bindings::kvm_run, s), 304);
    assert_eq!(offset_of!(Union, io.direction), 0);
    assert_eq!(offset_of!(Union, io.size), 1);
    assert_eq!(offset_of!(Union, io.port), 2);
    assert_eq!(offset_of!(Union, io.count), 4);
    assert_eq!(offset_of!(Union, io.data_offset), 8);
    assert_eq!(offset_of!(Union, mmio.phys_addr), 0);
    assert_eq!(offset_of!(Union, mmio.data), 8);
    assert_eq!(offset_of!(Union, mmio.len), 16);
    assert_eq!(offset_of!(Union, mmio.is_write), 20);
    assert_eq!(offset_of!(Union, hw.hardware_exit_reason), 0);
    assert_eq!(offset_of!(Union, fail_entry.hardware_entry_failure_reason), 0);
    assert_eq!(offset_of!(Union, fail_entry.cpu), 8);
    assert_eq!(offset_of!(Union, internal.suberror), 0);
    assert_eq!(offset_of!(Union, internal.ndata), 4);
    assert_eq!(offset_of!(Union, internal.data), 8);
    assert_eq!(offset_of!(Union, debug.arch), 0);
    assert_eq!(offset_of!(Union, system_event.type_), 0);
    assert_eq!(offset_of!(Union, system_event.ndata), 4);
    assert_eq!(offset_of!(Union, system_event.__bindgen_anon_1), 8);
    assert_eq!(offset_of!(Union, tpr_access.rip), 0);
    assert_eq!(offset_of!(Union, tpr_access.is_write), 8);
    assert_eq!(offset_of!(Union, eoi.vector), 0);
    assert_eq!(offset_of!(Union, msr.error), 0);
    assert_eq!(offset_of!(Union, msr.reason), 8);
    assert_eq!(offset_of!(Union, msr.index), 12);
    assert_eq!(offset_of!(Union, msr.data), 16);
    assert_eq!(offset_of!(Union, hypercall.nr), 0);
    assert_eq!(offset_of!(Union, hypercall.args), 8);
    assert_eq!(offset_of!(Union, hypercall.ret), 56);
    assert_eq!(offset_of!(Union, hypercall.__bindgen_anon_1), 64);
    assert_eq!(offset_of!(Union, memory_fault.flags), 0);
    assert_eq!(offset_of!(Union, memory_fault.gpa), 8);
    assert_eq!(offset_of!(Union, memory_fault.size), 16);
}
