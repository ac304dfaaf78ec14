//! The tests, one file per group.

use crate::runner::Test;

mod apic_ids;
mod backing;
mod capabilities;
mod coalesced;
mod compat;
mod control_bits;
mod cpuid_table;
mod deadline;
mod debugger;
mod delivery;
mod emulated;
mod endless;
mod faults;
mod guest_memory;
mod host_facts;
mod host_thread;
mod hostile;
mod idle;
mod injection;
mod instructions;
mod irq_ioctls;
mod lapic;
mod large_pages;
mod lazy_deadline;
mod lazy_stress;
mod lifecycle;
mod lines;
mod machine_checks;
mod makers;
mod mmio;
mod modes;
mod msr_exits;
mod msrs;
mod nested_debugger;
mod nested_npt;
mod nested_outside;
mod nested_smm;
pub mod nested_state;
mod nested_svm;
mod nested_svm_hostile;
mod nested_svm_smp;
mod nested_vmx;
mod nested_vmx_activity;
mod nested_vmx_apic;
mod nested_vmx_enlightened;
mod nested_vmx_ept;
mod nested_vmx_events;
mod nested_vmx_host;
mod nested_vmx_interrupts;
mod nested_vmx_lists;
mod nested_vmx_log;
mod nested_vmx_shadowing;
mod nested_vmx_smp;
mod nested_vmx_timer;
mod nested_vmx_tpr;
mod paging_bits;
mod paging_faults;
mod paging_flushes;
mod paging_host;
mod paging_protection;
mod paging_roles;
mod paging_smm;
mod paging_smp;
mod paging_tables;
mod paging_torture;
mod paravirtual;
mod pointers;
mod ports;
mod quirks;
mod registers;
mod resampling;
mod running;
mod shadows;
mod slot_races;
mod slots;
mod smm;
mod smp;
mod smram;
mod split_irqchip;
mod statistics;
mod system;
mod tracing;
mod vcpus;
mod x2apic;

/// Every test, in the order in which they run.
pub fn all() -> impl Iterator<Item = Test> + Clone {
    [
        system::TESTS,
        slots::TESTS,
        slot_races::TESTS,
        guest_memory::TESTS,
        large_pages::TESTS,
        backing::TESTS,
        vcpus::TESTS,
        running::TESTS,
        registers::TESTS,
        cpuid_table::TESTS,
        host_thread::TESTS,
        msrs::TESTS,
        msr_exits::TESTS,
        host_facts::TESTS,
        capabilities::TESTS,
        compat::TESTS,
        machine_checks::TESTS,
        idle::TESTS,
        pointers::TESTS,
        faults::TESTS,
        paging_faults::TESTS,
        paging_bits::TESTS,
        paging_host::TESTS,
        paging_roles::TESTS,
        paging_smm::TESTS,
        paging_smp::TESTS,
        paging_torture::TESTS,
        paging_tables::TESTS,
        paging_flushes::TESTS,
        paging_protection::TESTS,
        mmio::TESTS,
        emulated::TESTS,
        endless::TESTS,
        ports::TESTS,
        coalesced::TESTS,
        instructions::TESTS,
        injection::TESTS,
        hostile::TESTS,
        nested_debugger::TESTS,
        nested_npt::TESTS,
        nested_outside::TESTS,
        nested_state::TESTS,
        nested_smm::TESTS,
        nested_svm::TESTS,
        nested_vmx::TESTS,
        nested_vmx_activity::TESTS,
        nested_vmx_apic::TESTS,
        nested_vmx_enlightened::TESTS,
        nested_vmx_ept::TESTS,
        nested_vmx_events::TESTS,
        nested_vmx_host::TESTS,
        nested_vmx_interrupts::TESTS,
        nested_vmx_log::TESTS,
        nested_vmx_lists::TESTS,
        nested_vmx_shadowing::TESTS,
        nested_vmx_smp::TESTS,
        nested_vmx_timer::TESTS,
        nested_vmx_tpr::TESTS,
        nested_svm_hostile::TESTS,
        nested_svm_smp::TESTS,
        delivery::TESTS,
        shadows::TESTS,
        debugger::TESTS,
        control_bits::TESTS,
        makers::TESTS,
        modes::TESTS,
        lapic::TESTS,
        x2apic::TESTS,
        split_irqchip::TESTS,
        deadline::TESTS,
        lines::TESTS,
        resampling::TESTS,
        quirks::TESTS,
        apic_ids::TESTS,
        smp::TESTS,
        paravirtual::TESTS,
        lazy_deadline::TESTS,
        lazy_stress::TESTS,
        irq_ioctls::TESTS,
        smm::TESTS,
        smram::TESTS,
        statistics::TESTS,
        tracing::TESTS,
        lifecycle::TESTS,
    ]
    .into_iter()
    .flatten()
    .copied()
}
