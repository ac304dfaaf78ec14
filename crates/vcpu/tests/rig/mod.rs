//! A vCPU on the model CPU, and the steps that its guest takes.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod nested;
pub mod nested_vmx;
pub mod vmx;

use std::cell::RefCell;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use backend::{Backend, Gprs};
use cpu::{Counting, Counts, Model, Op};
use cpuid::{Entry, HostFacts, Supported};
use gannet_vcpu::{
    Offered, RunInput, UserExit, Vcpu,
    state::registers::{GivenEvents, SavedEvents},
};
use host::KBox;
use irqchip::lapic::CpuRole;
use msr::HostMsrs;
use svm::{Features, Svm, percpu};
use vm::VmRef;
use vm::vcpu_shared::VcpuShared;
use vm::vm::{Format, HostLimits, Paging, Vm};
use x86::cpuid::feature;
use x86::vmcb::{ExitCode, Vmcb};

pub type Cpu = Counting<Model>;
pub type TestVcpu = KBox<Vcpu<Svm<Cpu>>>;

const CPUS: usize = 4;

/// What a test chooses.
#[derive(Clone, Copy)]
pub struct Machine {
    pub features: Features,
    pub xstate_cache: bool,
    /// PIC, I/O APIC and local APIC in the kernel.
    pub irqchip: bool,
    pub paging: Paging,
    /// The guest may be a hypervisor.
    pub nested: bool,
    /// The host's TSC when the vCPU is made.
    pub tsc: u64,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            features: features(),
            xstate_cache: true,
            irqchip: true,
            paging: Paging::default(),
            nested: false,
            tsc: 0,
        }
    }
}

/// A CPU with NRIP save, XSAVE, RDTSCP: as real ones are.
pub fn features() -> Features {
    Features {
        asids: 64,
        npt: true,
        nrip_save: true,
        clean_bits: true,
        flush_by_asid: true,
        decode_assists: true,
        rdtscp: true,
        xsave: true,
        ..Features::default()
    }
}

/// CPUID of the host: XSAVE with AVX and a component behind it that XSS may enable.
pub fn host_cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    match (leaf, subleaf) {
        (0, _) => [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65],
        (1, _) => [
            0x0080_0f12,
            0,
            (1 << 28) | (1 << 26) | (1 << 21),
            (1 << 13) | (1 << 9) | (1 << 5) | (1 << 4),
        ],
        (7, 0) => [0, (1 << 20) | (1 << 7), 0, (1 << 28) | (1 << 26)],
        (0xd, 0) => [7, 832, 832, 0],
        (0xd, 1) => [0xf, 832, 0, 0],
        (0xd, 2) => [256, 576, 0, 0],
        (0x8000_0000, _) => [0x8000_0008, 0, 0, 0],
        (0x8000_0001, _) => [0, 0, 0, (1 << 29) | (1 << 27) | (1 << 20)],
        (0x8000_0008, _) => [0x3030, 0, 0, 0],
        _ => [0; 4],
    }
}

/// As [`offered`], and UMIP by the backend's exits.
pub fn offered_with_umip() -> Offered {
    static OFFERED: OnceLock<(Supported, HostMsrs)> = OnceLock::new();
    let (cpuid, msrs) = OFFERED.get_or_init(|| {
        let facts = HostFacts { xcr0: 7, by_exits: &[feature::UMIP], ..HostFacts::default() };
        (Supported::read(host_cpuid, &facts).unwrap(), HostMsrs::default())
    });
    Offered { cpuid, msrs }
}

pub fn offered(xstate_cache: bool) -> Offered {
    static OFFERED: [OnceLock<(Supported, HostMsrs)>; 2] = [OnceLock::new(), OnceLock::new()];
    let (cpuid, msrs) = OFFERED[usize::from(xstate_cache)].get_or_init(|| {
        let facts = HostFacts { xcr0: 7, xstate_cache, ..HostFacts::default() };
        let supported = Supported::read(host_cpuid, &facts).unwrap();
        (supported, HostMsrs { amd: true, lazy_deadline: true, ..HostMsrs::default() })
    });
    Offered { cpuid, msrs }
}

/// The CPUs of the model that are free. What is kept per CPU belongs to one test at a time.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static FREED: Condvar = Condvar::new();
static MADE: OnceLock<()> = OnceLock::new();

struct Claim(usize);

impl Claim {
    fn take() -> Self {
        MADE.get_or_init(|| FREE.lock().unwrap().extend(0..CPUS));
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(cpu) = free.pop() {
                host::std_port::test::set_cpu(cpu);
                return Self(cpu);
            }
            free = FREED.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
        FREED.notify_one();
    }
}

thread_local! {
    static CLAIM: RefCell<Option<Claim>> = const { RefCell::new(None) };
}

/// Makes this thread run on a CPU of the model that no other test uses.
pub fn claim_cpu() {
    CLAIM.with_borrow_mut(|claim| {
        claim.get_or_insert_with(Claim::take);
    });
}

/// A VM as `machine` says.
pub fn vm(machine: &Machine) -> VmRef {
    claim_cpu();
    percpu::set_up(machine.features, CPUS).unwrap();
    let limits = HostLimits {
        tables: Format::npt(4, 0),
        maxphyaddr: 48,
        halt_poll_ns: 0,
        paging: machine.paging,
    };
    let vm = Vm::new(&limits).unwrap();
    if machine.irqchip {
        vm.irq().create(vm::irq::Irqchip::Full).unwrap();
    }
    vm
}

/// The vCPU `id` of it; the first is the one that boots.
pub fn add_vcpu(machine: &Machine, vm: &VmRef, id: u32) -> TestVcpu {
    let shared = VcpuShared::new(id, id, CpuRole::bootstrap_if(id == 0), machine.irqchip).unwrap();
    let mut model = Model::default();
    model.xcr0 = 7;
    model.tsc = machine.tsc;
    model.cpuid = Some(if machine.nested { nested::host_cpuid } else { host_cpuid });
    let offered = if machine.nested { nested::offered() } else { offered(machine.xstate_cache) };
    let b = Svm::new(Counting::new(model), machine.features).unwrap();
    let mut vcpu = Vcpu::new(b, shared.clone(), vm.clone(), offered).unwrap();
    // In the order of KVM_CREATE_VCPU.
    vm.add_vcpu(shared).unwrap();
    let entries: Vec<Entry> = offered.cpuid.entries().to_vec();
    vcpu.set_cpuid(&entries).unwrap();
    vcpu
}

/// A vCPU alone in its VM.
pub fn vcpu_of(machine: &Machine) -> TestVcpu {
    add_vcpu(machine, &vm(machine), 0)
}

/// A vCPU of the machine that most tests want.
pub fn vcpu() -> TestVcpu {
    vcpu_of(&Machine::default())
}

/// The guest exits with `code`; the next instruction lies two bytes ahead.
pub fn exit(code: ExitCode) -> impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static {
    move |vmcb, _| {
        vmcb.control.exit_code = code.0;
        vmcb.control.exit_info_1 = 0;
        vmcb.control.next_rip = vmcb.save.rip + 2;
    }
}

pub fn shutdown(vmcb: &mut Vmcb, _: &mut Gprs) {
    vmcb.control.exit_code = ExitCode::Shutdown.0;
}

/// An exit that nobody knows: the run ends with [`UNKNOWN`], and all state stays.
pub fn unknown(vmcb: &mut Vmcb, _: &mut Gprs) {
    vmcb.control.exit_code = 0x3ff;
}

pub const UNKNOWN: UserExit = UserExit::InternalError { suberror: 4 };

/// What one more exit, made by `step`, costs inside the loop: the difference between a run with
/// eleven and a run with one.
pub fn cost_of(step: impl Fn(&mut Vmcb, &mut Gprs) + Send + Sync + Clone + 'static) -> Counts {
    cost_with(&Machine::default(), step)
}

pub fn cost_with(
    machine: &Machine,
    step: impl Fn(&mut Vmcb, &mut Gprs) + Send + Sync + Clone + 'static,
) -> Counts {
    let run = |exits: usize| {
        let mut v = vcpu_of(machine);
        for _ in 0..exits {
            let step = step.clone();
            v.backend().cpu().inner().then(move |vmcb, gprs| step(vmcb, gprs));
        }
        v.backend().cpu().inner().then(shutdown);
        let before = v.backend().cpu().counts();
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
        let counts = v.backend().cpu().counts().since(&before);
        assert_eq!(v.backend().cpu().inner().steps_left(), 0);
        counts
    };
    let (one, eleven) = (run(1), run(11));
    let ten = eleven.since(&one);
    assert_eq!(ten.of(Op::Vmrun), 10);
    ten
}

/// An exit that is answered in the loop executes VMRUN and nothing else that is privileged.
pub fn assert_only_vmrun(ten: &Counts) {
    for op in [
        Op::Rdmsr,
        Op::Wrmsr,
        Op::Cpuid,
        Op::Xsetbv,
        Op::Xgetbv,
        Op::DebugReg,
        Op::MovCr,
        Op::Clgi,
        Op::Stgi,
        Op::StiCli,
        Op::Vmload,
        Op::Vmsave,
    ] {
        assert_eq!(ten.of(op), 0, "{op:?}");
    }
}

/// Gives a vCPU a nested state and events that were saved with it, in either order.
pub fn restore<B: Backend>(
    vcpu: &mut Vcpu<B>,
    state: &[u8],
    events: &SavedEvents,
    state_first: bool,
) {
    if state_first {
        vcpu.set_nested_state(state).unwrap();
    }
    vcpu.restore_events(events, GivenEvents::default());
    if !state_first {
        vcpu.set_nested_state(state).unwrap();
    }
}
