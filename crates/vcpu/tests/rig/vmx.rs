//! A vCPU on the model CPU under VMX.

use backend::Gprs;
use cpu::{Counting, Counts, Model, ModelVmcs, Op};
use cpuid::Entry;
use gannet_vcpu::{Offered, RunInput, UserExit, Vcpu};
use host::KBox;
use irqchip::lapic::CpuRole;
use vm::VmRef;
use vm::vcpu_shared::VcpuShared;
use vm::vm::{Format, HostLimits, Vm};
use vmx::{Controls, Features, Vmx, percpu};
use x86::vmcs::{
    EntryControls, ExitControls, ExitReason, PinControls, ProcControls, ProcControls2, field,
};

use super::{Cpu, claim_cpu, host_cpuid, offered};

pub type VmxVcpu = KBox<Vcpu<Vmx<Cpu>>>;

const CPUS: usize = 4;

fn all<B: bitflags::Flags + Copy>(base: B) -> Controls<B> {
    Controls { base, may: B::all() }
}

/// A CPU with VPID, INVEPT of one context, RDTSCP and XSAVE: as real ones are.
pub fn features() -> Features {
    Features {
        ept: true,
        revision: 4,
        pin: all(PinControls::EXTERNAL_INTERRUPT | PinControls::NMI | PinControls::VIRTUAL_NMIS),
        primary: all(ProcControls::HLT
            | ProcControls::TPR_SHADOW
            | ProcControls::MSR_BITMAPS
            | ProcControls::UNCONDITIONAL_IO
            | ProcControls::MOV_DR
            | ProcControls::SECONDARY),
        secondary: all(ProcControls2::EPT
            | ProcControls2::VPID
            | ProcControls2::UNRESTRICTED_GUEST),
        exit: all(ExitControls::HOST_64 | ExitControls::LOAD_EFER | ExitControls::LOAD_PAT),
        entry: all(EntryControls::LOAD_EFER | EntryControls::LOAD_PAT),
        cr0_fixed: x86::Cr0::PG | x86::Cr0::NE | x86::Cr0::PE,
        cr4_fixed: x86::Cr4::VMXE,
        cr4_allowed: x86::Cr4::from_bits_retain(u64::MAX),
        vpid: true,
        invvpid_single: true,
        invept_single: true,
        ept_dirty: true,
        rdtscp: true,
        spec_ctrl: true,
        xsave: true,
        ..Features::default()
    }
}

/// Such a CPU with the VMX-preemption timer, which counts every 32nd tick.
pub fn features_with_timer() -> Features {
    let mut features = features();
    features.pin.base |= PinControls::PREEMPTION_TIMER;
    Features { preemption_timer: Some(5), ..features }
}

/// A VM with the kernel's interrupt controllers.
pub fn vm() -> VmRef {
    let vm = bare_vm_of(features(), Format::npt(4, 0));
    vm.irq().create(vm::irq::Irqchip::Full).unwrap();
    vm
}

/// A CPU of this test's own, with VMX on, whose host has what each model's host has.
fn prepare(features: Features) {
    claim_cpu();
    percpu::set_up(features, CPUS).unwrap();
    let mut model = Model::default();
    model.cpuid = Some(host_cpuid);
    percpu::enable(&mut model, host::smp::cpu_id()).unwrap();
}

fn bare_vm_of(features: Features, tables: Format) -> VmRef {
    prepare(features);
    let limits = HostLimits { tables, maxphyaddr: 48, halt_poll_ns: 0, paging: Default::default() };
    Vm::new(&limits).unwrap()
}

/// A vCPU alone in its VM.
pub fn vcpu() -> VmxVcpu {
    vcpu_of(features(), Format::npt(4, 0)).0
}

/// A vCPU alone in its VM on a CPU that has these, with such TDP tables; and its VM.
pub fn vcpu_of(features: Features, tables: Format) -> (VmxVcpu, VmRef) {
    let vm = bare_vm_of(features, tables);
    vm.irq().create(vm::irq::Irqchip::Full).unwrap();
    (vcpu_in(&vm, features), vm)
}

/// A vCPU alone in a VM with which something is done first.
pub fn vcpu_with(features: Features, tables: Format, first: impl FnOnce(&VmRef)) -> VmxVcpu {
    let vm = bare_vm_of(features, tables);
    vm.irq().create(vm::irq::Irqchip::Full).unwrap();
    first(&vm);
    vcpu_in(&vm, features)
}

/// A vCPU alone in its VM where PIC and I/O APIC, with 24 pins, are the VMM's.
pub fn split_vcpu_of(features: Features, tables: Format) -> (VmxVcpu, VmRef) {
    let vm = bare_vm_of(features, tables);
    vm.irq().create_split(24).unwrap();
    (vcpu_in(&vm, features), vm)
}

/// A vCPU on a CPU that has these, in a VM with TDP tables whose VMM is offered this; and its VM.
pub fn vcpu_offered(features: Features, offered: Offered) -> (VmxVcpu, VmRef) {
    let vm = bare_vm_of(features, Format::npt(4, 0));
    vm.irq().create(vm::irq::Irqchip::Full).unwrap();
    (vcpu_offered_in(&vm, features, offered, true), vm)
}

/// A vCPU on the model CPU whose local APIC is the VMM's.
pub fn vcpu_without_apic(features: Features, offered: Offered) -> (VmxVcpu, VmRef) {
    let vm = bare_vm_of(features, Format::npt(4, 0));
    (vcpu_offered_in(&vm, features, offered, false), vm)
}

/// A vCPU alone in its VM on a CPU whose EPT is not used, and its VM.
pub fn shadow_vcpu() -> (VmxVcpu, VmRef) {
    let mut features = Features { ept: false, ept_dirty: false, ..features() };
    features.secondary.base.remove(ProcControls2::EPT | ProcControls2::UNRESTRICTED_GUEST);
    prepare(features);
    let paging = vm::vm::Paging { tdp: false, keep_roots: true };
    let tables = Format::npt(4, 0);
    let vm = Vm::new(&HostLimits { tables, maxphyaddr: 48, halt_poll_ns: 0, paging }).unwrap();
    vm.irq().create(vm::irq::Irqchip::Full).unwrap();
    (vcpu_in(&vm, features), vm)
}

fn vcpu_in(vm: &VmRef, features: Features) -> VmxVcpu {
    vcpu_offered_in(vm, features, offered(true), true)
}

fn vcpu_offered_in(vm: &VmRef, features: Features, offered: Offered, apic: bool) -> VmxVcpu {
    let shared = VcpuShared::new(0, 0, CpuRole::Bootstrap, apic).unwrap();
    let mut model = Model::default();
    model.xcr0 = 7;
    model.cpuid = Some(host_cpuid);
    model.vmx.cr4.set(x86::Cr4::VMXE);
    model.vmx.on.set(Some(x86::Hpa(0)));
    let b = Vmx::new(Counting::new(model), features).unwrap();
    let mut vcpu = Vcpu::new(b, shared.clone(), vm.clone(), offered).unwrap();
    // In the order of KVM_CREATE_VCPU.
    vm.add_vcpu(shared).unwrap();
    let entries: Vec<Entry> = offered.cpuid.entries().to_vec();
    vcpu.set_cpuid(&entries).unwrap();
    vcpu
}

/// The guest exits for `reason`; the next instruction lies two bytes ahead.
pub fn exit(reason: ExitReason) -> impl FnMut(&mut ModelVmcs, &mut Gprs) + Send + 'static {
    move |vmcs, _| {
        vmcs.set(field::EXIT_REASON, reason.0.into());
        vmcs.set(field::EXIT_QUALIFICATION, 0);
        vmcs.set(field::IDT_VECTORING, 0);
        vmcs.set(field::INSTRUCTION_LENGTH, 2);
    }
}

pub fn shutdown(vmcs: &mut ModelVmcs, _: &mut Gprs) {
    vmcs.set(field::EXIT_REASON, ExitReason::TripleFault.0.into());
}

/// One thing that the guest does, and its exit.
pub type Step = Box<dyn FnMut(&mut ModelVmcs, &mut Gprs) + Send>;

pub fn step(f: impl FnMut(&mut ModelVmcs, &mut Gprs) + Send + 'static) -> Step {
    Box::new(f)
}

/// Plays the steps and an end; what it executed.
pub fn play(v: &mut VmxVcpu, steps: impl IntoIterator<Item = Step>) -> Counts {
    for step in steps.into_iter().chain([step(shutdown)]) {
        v.backend().cpu().inner().vmx.then(step);
    }
    let before = v.backend().cpu().counts();
    assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    assert_eq!(v.backend().cpu().inner().vmx.steps_left(), 0);
    v.backend().cpu().counts().since(&before)
}

/// What ten exits made by `step` cost inside the loop. No VMWRITE among them is of the value that
/// the field has.
pub fn cost_of(f: impl Fn(&mut ModelVmcs, &mut Gprs) + Send + Sync + Clone + 'static) -> Counts {
    cost_on(vcpu, f)
}

/// What ten exits made by `step` cost on such vCPUs.
pub fn cost_on(
    vcpu: impl Fn() -> VmxVcpu,
    f: impl Fn(&mut ModelVmcs, &mut Gprs) + Send + Sync + Clone + 'static,
) -> Counts {
    let run = |exits: usize| {
        let mut v = vcpu();
        let counts = play(&mut v, (0..exits).map(|_| step(f.clone())));
        assert_eq!(*v.backend().cpu().inner().vmx.unchanged_writes.borrow(), Vec::<u32>::new());
        counts
    };
    let (one, eleven) = (run(1), run(11));
    let ten = eleven.since(&one);
    assert_eq!(ten.of(Op::VmxEnter), 10);
    ten
}

/// VMREADs and VMWRITEs of one exit, and that nothing else that is privileged was executed.
pub fn reads_and_writes(ten: &Counts) -> (u64, u64) {
    for op in [
        Op::Rdmsr,
        Op::Wrmsr,
        Op::Cpuid,
        Op::Xsetbv,
        Op::Xgetbv,
        Op::DebugReg,
        Op::MovCr,
        Op::Vmptrld,
        Op::Vmclear,
        Op::Invept,
        Op::Invvpid,
    ] {
        assert_eq!(ten.of(op), 0, "{op:?}");
    }
    let (reads, writes) = (ten.of(Op::Vmread), ten.of(Op::Vmwrite));
    assert_eq!((reads % 10, writes % 10), (0, 0), "every exit costs the same");
    (reads / 10, writes / 10)
}
