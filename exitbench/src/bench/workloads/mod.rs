//! All workloads, in the order in which they run: one file each.

use anyhow::{Result, bail};

use super::{nested, workload::Workload};

mod paged;

mod cpuid;
mod cr0_wp;
mod cr3_switch;
mod cr4_osxsave;
mod cr4_pge;
mod cr4_smep;
mod efer_nx;
mod hlt_loop;
mod invlpg;
mod ipi;
mod mmio_kernel;
mod mmio_user;
mod mov_cr8;
mod nothing;
mod page_fault;
mod pio_kernel;
mod pio_user;
mod rdmsr;
mod self_ipi;
mod timer_rearm;
mod tscdeadline;
mod tscdeadline_immed;
mod vmcall;
mod wbinvd;
mod wrmsr;
mod xsetbv;

/// Every workload. The order is that of `list`, of a run and of the markers an emulator sees.
pub const ALL: &[Workload] = &[
    nothing::WORKLOAD,
    cpuid::WORKLOAD,
    vmcall::WORKLOAD,
    hlt_loop::WORKLOAD,
    wbinvd::WORKLOAD,
    pio_kernel::WORKLOAD,
    pio_user::WORKLOAD,
    mmio_kernel::WORKLOAD,
    mmio_user::WORKLOAD,
    rdmsr::WORKLOAD,
    wrmsr::WORKLOAD,
    cr0_wp::WORKLOAD,
    cr4_pge::WORKLOAD,
    cr4_smep::WORKLOAD,
    efer_nx::WORKLOAD,
    cr3_switch::WORKLOAD,
    invlpg::WORKLOAD,
    xsetbv::WORKLOAD,
    cr4_osxsave::WORKLOAD,
    self_ipi::WORKLOAD,
    ipi::WORKLOAD,
    tscdeadline::WORKLOAD,
    tscdeadline_immed::WORKLOAD,
    timer_rearm::WORKLOAD,
    page_fault::WORKLOAD,
    mov_cr8::WORKLOAD,
];

/// Those of them whose cost may depend on how much the guest has mapped, as programs that map pages and touch them after each switch.
pub const PAGED: &[Workload] =
    &[cr0_wp::PAGED, cr4_pge::PAGED, cr4_smep::PAGED, efer_nx::PAGED, cr3_switch::PAGED];

/// The workloads called `names` among `all`, in the order of the latter; all of them if there are no names. Those of
/// nested virtualization run where they are named, behind the others.
pub fn choose(names: &[String], all: &'static [Workload]) -> Result<Vec<&'static Workload>> {
    for name in names {
        if all.iter().chain(nested_beside(all)).any(|workload| workload.name == name) {
            continue;
        }
        if ALL.iter().any(|workload| workload.name == name) {
            bail!("`{name}` does not take a number of pages");
        }
        bail!("there is no workload called `{name}`: see `exitbench list`");
    }
    let chosen =
        |workload: &&Workload| names.is_empty() || names.iter().any(|name| name == workload.name);
    let beside = nested_beside(all).iter().filter(|workload| !names.is_empty() && chosen(workload));
    Ok(all.iter().filter(chosen).chain(beside).collect())
}

/// What of nested virtualization can be named beside `all`: nothing beside the paged ones.
fn nested_beside(all: &'static [Workload]) -> &'static [Workload] {
    if std::ptr::eq(all, ALL) { nested::ALL } else { &[] }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{NESTED, PROGRAM};
    use super::super::program::{START_MARKER, STOP_MARKER};
    use super::super::workload::Guest;
    use super::*;
    use crate::vmm::cpuid::Features;
    use crate::vmm::hypervisor::Vendor;

    fn guests() -> impl Iterator<Item = Guest> {
        let all = Features {
            x2apic: true,
            tsc_deadline: true,
            tsc_adjust: true,
            xsave: true,
            smep: true,
            no_execute: true,
            lazy_deadline: true,
            svm: true,
            vmx: true,
        };
        let vendors = [Vendor::Intel, Vendor::Amd];
        vendors.into_iter().flat_map(move |vendor| {
            let guest = Guest { vendor, features: all, lazy_timer: false };
            let old = Features { x2apic: false, ..all };
            [guest, Guest { features: old, ..guest }]
                .into_iter()
                .flat_map(|guest| [guest, Guest { lazy_timer: true, ..guest }])
        })
    }

    fn count(code: &[u8], marker: &[u8]) -> usize {
        code.windows(marker.len()).filter(|window| *window == marker).count()
    }

    #[test]
    fn every_program_has_one_pair_of_markers_and_fits_its_place() {
        let all = ALL.iter().chain(PAGED).chain(nested::ALL);
        for (workload, guest) in all.flat_map(|w| guests().map(move |g| (w, g))) {
            let plan = (workload.plan)(&guest).unwrap();
            let code = plan.program.code;
            assert_eq!(count(code, &START_MARKER), 1, "{}", workload.name);
            assert_eq!(count(code, &STOP_MARKER), 1, "{}", workload.name);
            assert!(PROGRAM + (code.len() as u64) < NESTED, "{}", workload.name);
            assert!(plan.program.secondary < code.len() as u64, "{}", workload.name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> =
            ALL.iter().chain(nested::ALL).map(|workload| workload.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len() + nested::ALL.len());
    }

    #[test]
    fn chosen_workloads_run_in_the_order_of_the_list() {
        let chosen = choose(&["mov_cr8".into(), "cpuid".into()], ALL).unwrap();
        let names: Vec<_> = chosen.iter().map(|workload| workload.name).collect();
        assert_eq!(names, ["cpuid", "mov_cr8"]);
        assert_eq!(choose(&[], ALL).unwrap().len(), ALL.len());
    }

    #[test]
    fn an_unknown_name_is_refused() {
        let refusal = |name: &str, all| choose(&[name.to_owned()], all).err().unwrap().to_string();
        assert!(refusal("hlt_loop", PAGED).contains("pages"));
        assert!(choose(&["cpuidd".into()], ALL).err().unwrap().to_string().contains("cpuidd"));
    }

    #[test]
    fn what_the_guest_lacks_is_skipped_with_a_reason() {
        let guest = Guest { vendor: Vendor::Amd, features: Features::default(), lazy_timer: true };
        let skipped: Vec<_> =
            ALL.iter().filter(|w| (w.plan)(&guest).is_err()).map(|w| w.name).collect();
        assert_eq!(
            skipped,
            [
                "wrmsr",
                "cr4_smep",
                "efer_nx",
                "xsetbv",
                "cr4_osxsave",
                "tscdeadline",
                "tscdeadline_immed",
                "timer_rearm"
            ]
        );
    }
}
