//! Runs workloads one after another and collects their figures. A workload that cannot run, or
//! fails, or hangs, does not keep the others from running.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vm_memory::{Bytes, GuestAddress};

use super::interrupts::exception_name;
use super::layout::{PORT_COUNT, PORT_DONE, PORT_FAULT};
use super::machine::{Machine, Passes, guest_of, samples};
use super::workload::{Mapped, Plan, Unsupported, Workload};
use crate::report::Missing;
use crate::vmm::affinity;
use crate::vmm::failure::{self, Fatal};
use crate::vmm::hypervisor::Hypervisor;
use crate::vmm::memory::GuestMemory;
use crate::vmm::signal;
use crate::vmm::statistics::{Statistics, Sums, growth};
use crate::vmm::vm::Irqchip;

/// How the workloads are run.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    pub passes: Passes,
    /// The host's CPUs that the vCPUs are held on, one each; empty: on any.
    pub pinned: &'a [usize],
    /// After this time a workload has failed.
    pub timeout: Duration,
    /// Whether guests are to use the lazy TSC deadline.
    pub lazy_timer: bool,
}

/// What one run of a workload measured.
pub struct Repetition {
    /// At least one, warm-up dropped.
    pub samples: Vec<u64>,
    /// By how much the module's statistics grew in the counted pass.
    pub statistics: Sums,
}

/// What an exit means for the loop around KVM_RUN.
enum Step {
    Again,
    Count,
    Done,
    Fault(u8),
    Fatal(Fatal),
}

/// The module's statistics around the counted pass.
struct Counted {
    statistics: Statistics,
    readings: Mutex<Vec<Sums>>,
}

impl Counted {
    fn new(statistics: Statistics) -> Self {
        Self { statistics, readings: Mutex::new(Vec::new()) }
    }

    fn read(&self) -> Result<()> {
        let reading = self.statistics.read()?;
        self.readings.lock().map_err(|_| anyhow!("a reading failed before"))?.push(reading);
        Ok(())
    }

    /// What grew over the pass, without what one reading adds, which the first two show.
    fn growth(&self) -> Sums {
        let readings = self.readings.lock().map(|readings| readings.clone()).unwrap_or_default();
        let [first, second, third] = &readings[..] else { return Sums::new() };
        growth(&growth(first, second), &growth(second, third))
    }
}

/// Runs one workload in a VM of its own, a paged one with so many pages mapped; or says why it was skipped or failed.
pub fn run(
    hypervisor: &Hypervisor,
    workload: &Workload,
    mapped: Option<Mapped>,
    settings: Settings<'_>,
) -> Result<Repetition, Missing> {
    let skipped = |reason: &str| Missing::Skipped(reason.to_string());
    let guest = guest_of(hypervisor, workload, settings.lazy_timer);
    let plan = (workload.plan)(&guest).map_err(|Unsupported(reason)| skipped(reason))?;
    let plan = Plan { mapped, ..plan };
    if (1..workload.vcpus as usize).contains(&settings.pinned.len()) {
        return Err(skipped(
            "it has two vCPUs, and --cpu names one CPU: two on one measure Linux's scheduler",
        ));
    }
    Machine::new(hypervisor, workload, &guest, &plan, settings.passes)
        .and_then(|machine| measure(machine, workload, settings))
        .map_err(|error| Missing::Failed(format!("{error:#}")))
}

fn measure(
    mut machine: Machine,
    workload: &Workload,
    settings: Settings<'_>,
) -> Result<Repetition> {
    let memory = machine.vm.memory.clone();
    let counted = Arc::new(Counted::new(machine.statistics.take()));
    run_vcpus(machine, workload, settings, &counted)?;
    Ok(Repetition { samples: samples(&memory, settings.passes)?, statistics: counted.growth() })
}

/// Runs every vCPU in a thread until vCPU 0 is done or any of them fails.
fn run_vcpus(
    mut machine: Machine,
    workload: &Workload,
    Settings { timeout, pinned, .. }: Settings<'_>,
    counted: &Arc<Counted>,
) -> Result<()> {
    let stopping = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let memory = machine.vm.memory.clone();
    let threads: Vec<_> = std::mem::take(&mut machine.vcpus)
        .into_iter()
        .enumerate()
        .map(|(index, mut vcpu)| {
            let cpu = pinned.get(index).copied();
            let (stopping, sender) = (Arc::clone(&stopping), sender.clone());
            let (memory, irqchip) = (memory.clone(), workload.irqchip);
            let counted = Arc::clone(counted);
            thread::spawn(move || {
                let end = cpu
                    .map_or(Ok(()), affinity::pin)
                    .and_then(|()| run_vcpu(&mut vcpu, &memory, irqchip, &stopping, &counted));
                // Nobody listens any more once another vCPU has ended the run.
                let _ = sender.send(end);
            })
        })
        .collect();
    let end = receiver.recv_timeout(timeout);
    if !signal::stop(&stopping, &threads) {
        // The stuck thread still uses the VM and its memory: neither may go.
        std::mem::forget(machine);
        bail!("a vCPU does not come out of the kernel");
    }
    match end {
        Ok(end) => end,
        Err(RecvTimeoutError::Disconnected) => bail!("a vCPU thread died"),
        Err(RecvTimeoutError::Timeout) => match receiver.try_recv() {
            Ok(Err(state)) => Err(state.context(format!("timed out after {timeout:?}"))),
            _ => bail!("timed out after {timeout:?}"),
        },
    }
}

/// `Ok` when the guest says that it is done; an error with the guest's state otherwise.
fn run_vcpu(
    vcpu: &mut VcpuFd,
    memory: &GuestMemory,
    irqchip: Irqchip,
    stopping: &AtomicBool,
    counted: &Counted,
) -> Result<()> {
    loop {
        if stopping.load(Ordering::SeqCst) {
            bail!("stopped while it ran\n{}", failure::state(vcpu, memory));
        }
        let step = match vcpu.run() {
            Ok(exit) => interpret(exit, irqchip),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => Step::Again,
            Err(error) => bail!("KVM_RUN failed: {error}\n{}", failure::state(vcpu, memory)),
        };
        match step {
            Step::Again => {}
            Step::Count => counted.read()?,
            Step::Done => return Ok(()),
            Step::Fault(vector) => bail!("{}", describe_fault(vector, vcpu, memory)),
            Step::Fatal(fatal) => bail!("{}", fatal.describe(vcpu, memory)),
        }
    }
}

/// Kept short: for workloads that leave to user space it is part of what is measured.
fn interpret(exit: VcpuExit<'_>, irqchip: Irqchip) -> Step {
    match exit {
        VcpuExit::Hlt if irqchip == Irqchip::None => Step::Again,
        VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data) => {
            data.fill(0xff);
            Step::Again
        }
        VcpuExit::IoOut(PORT_COUNT, _) => Step::Count,
        VcpuExit::IoOut(PORT_DONE, _) => Step::Done,
        VcpuExit::IoOut(PORT_FAULT, data) => Step::Fault(data.first().copied().unwrap_or(0)),
        VcpuExit::Intr => Step::Again,
        other => Step::Fatal(Fatal::of(&other)),
    }
}

/// The exception's frame lies on the guest's stack, an error code below it for some.
fn describe_fault(vector: u8, vcpu: &VcpuFd, memory: &GuestMemory) -> String {
    let name = exception_name(vector);
    let rsp = vcpu.get_regs().map_or(0, |regs| regs.rsp);
    let frame: Vec<String> = (0..4)
        .map_while(|word| memory.read_obj::<u64>(GuestAddress(rsp + word * 8)).ok())
        .map(|word| format!("{word:#x}"))
        .collect();
    format!(
        "the guest took {name} (vector {vector}); its stack: {}\n{}",
        frame.join(" "),
        failure::state(vcpu, memory)
    )
}
