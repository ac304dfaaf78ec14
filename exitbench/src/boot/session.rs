//! One boot from start to end: a thread per vCPU, until the guest resets itself, fails or takes
//! too long.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kvm_ioctls::{VcpuExit, VcpuFd};
use serde::Serialize;

use super::console::{serial_port, time_stamp};
use super::devices::Devices;
use super::keyboard_controller::Request;
use super::linux::{self, Image};
use super::marker::Marker;
use super::{cpus, mp_table};
use crate::report::Unit;
use crate::vmm::failure::{self, Fatal};
use crate::vmm::hypervisor::Hypervisor;
use crate::vmm::memory::GuestMemory;
use crate::vmm::signal;
use crate::vmm::vm::{Irqchip, Vm};

/// What to boot, and what to wait for.
#[derive(Clone, Debug)]
pub struct Boot {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub cpus: u32,
    /// MiB.
    pub memory: u64,
    pub command_line: String,
    /// What the guest writes to the console where counting begins; empty: nothing does.
    pub from: String,
    /// What user space writes to the console.
    pub expect: String,
    /// End the VM as soon as the line with that has come.
    pub stop_at_marker: bool,
    pub timeout: Duration,
}

/// How a boot went, for `--report`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BootReport {
    pub unit: Unit,
    pub module: String,
    pub cpus: u32,
    /// From the first KVM_RUN to the marker on the console; absent if it never came.
    pub ticks_to_marker: Option<u64>,
    /// From the text that `--from` names to the marker; absent without one of them.
    pub ticks_between: Option<u64>,
    /// How the VM ended, in words.
    pub end: String,
}

/// How the VM ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// The guest reset itself.
    Reset,
    /// The marker came, and that was all we waited for.
    Marker,
    /// A vCPU cannot go on.
    Failed(String),
}

/// A boot that came to an end.
pub struct Ended {
    pub marker_seen: bool,
    pub ticks_to_marker: Option<u64>,
    pub ticks_between: Option<u64>,
    /// What the guest wrote to its console.
    pub console: String,
    pub end: Result<&'static str, String>,
}

impl Boot {
    /// Boots the guest. An error means that it could not even be started.
    pub fn run(&self, hypervisor: &Hypervisor) -> Result<Ended> {
        if !(1..=mp_table::MAX_CPUS).contains(&self.cpus) {
            bail!("a guest has 1 to {} CPUs", mp_table::MAX_CPUS);
        }
        let memory = linux::map_memory(self.memory)?;
        let image = Image {
            kernel: &self.kernel,
            initrd: &self.initrd,
            command_line: &self.command_line,
            cpus: self.cpus,
        };
        let entry = linux::load(&memory, image)?;
        let vm = Vm::new(hypervisor, Irqchip::KernelWithPit, memory.clone(), self.cpus)?;
        let serial = serial_port(&vm.fd, Marker::new(&self.from), Marker::new(&self.expect))?;
        let devices = Arc::new(Mutex::new(Devices::new(serial)));
        let vcpus = cpus::create(hypervisor, &vm, self.cpus, entry)?;
        signal::prepare()?;
        let started = time_stamp();
        let end = self.run_vcpus(vcpus, &memory, &devices);
        let mut devices = lock(&devices);
        devices.output_mut().flush().context("cannot write to standard output")?;
        let output = devices.output();
        Ok(Ended {
            marker_seen: output.marker_seen(),
            ticks_to_marker: output.marker_at().map(|at| at.wrapping_sub(started)),
            ticks_between: output.ticks_between(),
            console: output.text(),
            end,
        })
    }

    fn run_vcpus(
        &self,
        vcpus: Vec<VcpuFd>,
        memory: &GuestMemory,
        devices: &Arc<Mutex<Devices>>,
    ) -> Result<&'static str, String> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let threads: Vec<_> = vcpus
            .into_iter()
            .enumerate()
            .map(|(id, vcpu)| {
                let thread = VcpuThread {
                    id,
                    vcpu,
                    memory: memory.clone(),
                    devices: Arc::clone(devices),
                    stopping: Arc::clone(&stopping),
                    stop_at_marker: self.stop_at_marker,
                };
                let sender = sender.clone();
                // Nobody listens any more once another vCPU has ended the VM.
                thread::spawn(move || drop(sender.send(thread.run())))
            })
            .collect();
        let end = receiver.recv_timeout(self.timeout);
        if !signal::stop(&stopping, &threads) {
            return Err("a vCPU does not come out of the kernel".into());
        }
        match end {
            Ok(End::Reset) => Ok("the guest reset itself"),
            Ok(End::Marker) => Ok("the marker came"),
            Ok(End::Failed(reason)) => Err(reason),
            Err(RecvTimeoutError::Disconnected) => Err("a vCPU thread died".into()),
            Err(RecvTimeoutError::Timeout) => {
                let states = receiver.try_iter().filter_map(|end| match end {
                    End::Failed(state) => Some(state),
                    _ => None,
                });
                let states: Vec<String> = states.collect();
                Err(format!("timed out after {:?}\n{}", self.timeout, states.join("\n")))
            }
        }
    }
}

struct VcpuThread {
    id: usize,
    vcpu: VcpuFd,
    memory: GuestMemory,
    devices: Arc<Mutex<Devices>>,
    stopping: Arc<AtomicBool>,
    stop_at_marker: bool,
}

impl VcpuThread {
    fn run(mut self) -> End {
        loop {
            if self.stopping.load(Ordering::SeqCst) {
                let state = failure::state(&self.vcpu, &self.memory);
                return End::Failed(format!("vCPU {} when it was stopped:\n{state}", self.id));
            }
            let fatal = match self.vcpu.run() {
                Ok(VcpuExit::IoOut(port, data)) => {
                    let mut devices = lock(&self.devices);
                    if devices.write(port, data) == Request::Reset {
                        return End::Reset;
                    }
                    // The line is let to its end.
                    let line_ended = data.contains(&b'\n');
                    if self.stop_at_marker && line_ended && devices.output().marker_seen() {
                        return End::Marker;
                    }
                    continue;
                }
                Ok(VcpuExit::IoIn(port, data)) => {
                    lock(&self.devices).read(port, data);
                    continue;
                }
                // Nothing but memory and what the kernel serves answers by memory.
                Ok(VcpuExit::MmioRead(_, data)) => {
                    data.fill(0xff);
                    continue;
                }
                Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr) => continue,
                Ok(exit) => Fatal::of(&exit),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => continue,
                Err(error) => Fatal::Unexpected(format!("KVM_RUN failed: {error}")),
            };
            let reason = fatal.describe(&mut self.vcpu, &self.memory);
            return End::Failed(format!("vCPU {}: {reason}", self.id));
        }
    }
}

/// A thread that panicked while it held the devices has left them usable.
fn lock(devices: &Mutex<Devices>) -> MutexGuard<'_, Devices> {
    devices.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_report_names_its_unit_and_ticks() {
        let report = BootReport {
            unit: Unit::Instructions,
            module: "gannet".into(),
            cpus: 2,
            ticks_to_marker: Some(7),
            ticks_between: None,
            end: "the guest reset itself".into(),
        };
        let json = serde_json::to_value(report).unwrap();
        assert_eq!(json["unit"], "instructions");
        assert_eq!(json["ticks_to_marker"], 7);
    }
}
