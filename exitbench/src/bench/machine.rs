//! The VM of one workload: memory laid out, vCPUs in 64-bit mode at the program's entries.

use anyhow::{Context, Result};
use guest_machine::long_mode::Tables;
use guest_machine::{descriptors, page_tables};
use kvm_bindings::{CpuId, KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_regs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::interrupts;
use super::layout::{
    FRESH_MEMORY, GDT, IDT, INTERRUPTS, PROGRAM, RESULTS, ROOT, SECOND_ROOT, mailbox, stack_top,
};
use super::workload::{Guest, Mapped, Plan, Workload};
use crate::vmm::cpuid::{self, Features, Topology};
use crate::vmm::hypervisor::Hypervisor;
use crate::vmm::long_mode;
use crate::vmm::memory::{self, Backing, GuestMemory, PAGE};
use crate::vmm::statistics::Statistics;
use crate::vmm::vm::{Irqchip, Vm};

/// The memslot of the fresh memory; the guest's own is slot 0.
const FRESH_SLOT: u32 = 1;
/// RFLAGS with interrupts disabled: the bit that is always set.
const RFLAGS: u64 = 2;

/// How often an operation runs.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    /// Samples that are thrown away.
    pub warm_up: u64,
    /// Samples that count.
    pub iterations: u64,
    /// Operations between the markers; none and no markers if 0.
    pub marker_iterations: u64,
}

impl Passes {
    fn samples(self) -> u64 {
        self.warm_up + self.iterations
    }
}

/// A VM ready to run one workload. The fresh memory must outlive the VM.
pub struct Machine {
    pub vm: Vm,
    pub vcpus: Vec<VcpuFd>,
    /// What the module counts, where it tells.
    pub statistics: Statistics,
    _fresh_memory: Option<GuestMemory>,
}

/// The machine as a guest of this workload will see it.
pub fn guest_of(hypervisor: &Hypervisor, workload: &Workload, lazy_timer: bool) -> Guest {
    let topology = Topology { apic_id: 0, vcpus: workload.vcpus };
    let cpuid: CpuId = cpuid::of_guest(hypervisor, workload.irqchip != Irqchip::None, topology);
    Guest { vendor: hypervisor.vendor(), features: Features::of(&cpuid), lazy_timer }
}

impl Machine {
    /// Builds the VM for `workload` as planned for `guest`.
    pub fn new(
        hypervisor: &Hypervisor,
        workload: &Workload,
        guest: &Guest,
        plan: &Plan,
        passes: Passes,
    ) -> Result<Self> {
        let size = (RESULTS + passes.samples() * 8).next_multiple_of(PAGE);
        let memory = memory::map(&[(GuestAddress(0), size as usize)], Backing::Default)?;
        lay_out(&memory, plan)?;
        let vm = Vm::new(hypervisor, workload.irqchip, memory, workload.vcpus)?;
        let fresh_pages = match plan.mapped {
            Some(mapped) => mapped.pages + page_tables::small_page_tables(mapped.pages),
            None if plan.fresh_pages => {
                let before = plan.argument.saturating_sub(FRESH_MEMORY) / PAGE;
                before + passes.samples() + passes.marker_iterations
            }
            None => 0,
        };
        let fresh_memory = if fresh_pages > 0 {
            let range = (GuestAddress(FRESH_MEMORY), (fresh_pages * PAGE) as usize);
            let fresh = memory::map(&[range], Backing::SmallPages)?;
            if let Some(mapped) = plan.mapped {
                let (low, pages) = (&vm.memory, mapped.pages);
                page_tables::write_small_pages(low, ROOT, &fresh, FRESH_MEMORY, pages)?;
            }
            if plan.host_has_them {
                memory::touch(&fresh)?;
            }
            memory::register(&vm.fd, &fresh, FRESH_SLOT)?;
            Some(fresh)
        } else {
            None
        };
        let vcpus: Vec<VcpuFd> = (0..workload.vcpus)
            .map(|id| create_vcpu(hypervisor, &vm, guest, plan, passes, id))
            .collect::<Result<_>>()?;
        let statistics = Statistics::open(hypervisor, &vm.fd, &vcpus)?;
        Ok(Self { vm, vcpus, statistics, _fresh_memory: fresh_memory })
    }
}

/// The samples that the guest stored, warm-up dropped.
pub fn samples(memory: &GuestMemory, passes: Passes) -> Result<Vec<u64>> {
    (passes.warm_up..passes.samples())
        .map(|index| memory.read_obj(GuestAddress(RESULTS + index * 8)))
        .collect::<Result<_, _>>()
        .context("the results are not in guest memory")
}

fn lay_out(memory: &GuestMemory, plan: &Plan) -> Result<()> {
    page_tables::write_identity_map(memory, ROOT, page_tables::TABLE)?;
    page_tables::write_second_root(memory, SECOND_ROOT, ROOT)?;
    descriptors::write_gdt(memory, GDT, 0)?;
    descriptors::write_idt(memory, IDT, |vector| interrupts::handler(vector, plan.apic))?;
    for (code, base) in [(interrupts::handlers(), INTERRUPTS), (plan.program.code, PROGRAM)] {
        memory.write_slice(code, GuestAddress(base)).context("no guest memory for the program")?;
    }
    Ok(())
}

fn create_vcpu(
    hypervisor: &Hypervisor,
    vm: &Vm,
    guest: &Guest,
    plan: &Plan,
    passes: Passes,
    id: u32,
) -> Result<VcpuFd> {
    let vcpu = vm.create_vcpu(hypervisor, id)?;
    let entry = if id == 0 { PROGRAM } else { PROGRAM + plan.program.secondary };
    let mapped = plan.mapped.unwrap_or(Mapped { pages: 0, touched: 0 });
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rflags: RFLAGS,
        rsp: stack_top(id),
        rbp: mailbox(id),
        rbx: plan.argument,
        r8: mapped.touched,
        r9: mapped.stride(),
        r10: mapped.pages,
        r12: RESULTS,
        r13: passes.samples(),
        r15: passes.marker_iterations,
        ..Default::default()
    })
    .context("KVM_SET_REGS failed")?;
    let tables = Tables { root: ROOT, gdt: GDT, idt: Some(IDT), task: 0 };
    long_mode::enter(&vcpu, tables, guest.features.no_execute)?;
    if id != 0 {
        // Without INIT and SIPI: our secondary vCPU starts in 64-bit mode too.
        vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })
            .context("KVM_SET_MP_STATE failed")?;
    }
    Ok(vcpu)
}
