//! The options of `exitbench boot` and `exitbench nested-linux`.

use std::path::PathBuf;

use clap::Args;

use super::DeviceArguments;

/// What Linux gets unless told otherwise: a serial console, reset by keyboard controller, and no
/// probing of what this VMM does not have.
pub const COMMAND_LINE: &str = "console=ttyS0 reboot=k panic=-1 nokaslr acpi=off pci=off tsc=reliable no_timer_check \
     random.trust_cpu=on 8250.nr_uarts=1 i8042.noaux i8042.nokbd";

/// The line by which the lab's guests say that their user space runs.
pub const MARKER: &str = "GANNET-GUEST-USERSPACE";

#[derive(Debug, Args)]
#[command(
    after_help = "The guest has its kernel's interrupt controllers and timer, a serial port at \
                  0x3f8 and an MP table that lists its CPUs. It ends the VM by a reset through \
                  port 0x64 (reboot=k)."
)]
pub struct BootArguments {
    /// An ELF vmlinux or a bzImage
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// An initramfs
    #[arg(long, value_name = "FILE")]
    pub initrd: PathBuf,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cpus: u32,
    /// Memory
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub memory: u64,
    /// Replaces the whole kernel command line
    #[arg(long, value_name = "TEXT", default_value = COMMAND_LINE)]
    pub cmdline: String,
    /// Adds to the kernel command line
    #[arg(long, value_name = "TEXT")]
    pub append: Option<String>,
    /// Exit 0 if this came on the console before the VM ended
    #[arg(long, value_name = "TEXT", default_value = MARKER)]
    pub expect: String,
    /// Count from this text on the console to the expected one, too: `ticks_between` of the
    /// report, and what an emulator's plugin counts
    #[arg(long, value_name = "TEXT")]
    pub from: Option<String>,
    /// End the VM as soon as the expected text has come
    #[arg(long)]
    pub stop_at_marker: bool,
    /// Print ticks from VM start to the expected text, as JSON, to FILE or standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub report: Option<PathBuf>,
    /// Seconds after which the VM is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub timeout: u64,
    #[command(flatten)]
    pub device: DeviceArguments,
}

#[derive(Debug, Args)]
#[command(
    after_help = "The initramfs loads KVM and runs what the kernel command line says, as the lab's \
                  does (lab/hypervisor-init.sh). Its console is streamed; the report comes over it."
)]
pub struct NestedLinuxArguments {
    /// Names of workloads, see `list`, and `boot`: a Linux guest, to its user space
    #[arg(value_name = "WORKLOAD", default_value = "cpuid")]
    pub workloads: Vec<String>,
    /// The hypervisor's kernel: an ELF vmlinux or a bzImage
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// Its initramfs
    #[arg(long, value_name = "FILE")]
    pub initrd: PathBuf,
    /// Parameters of its kvm-amd or kvm-intel, such as npt=0
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub kvm: String,
    /// Another module of the initramfs in their place, such as gannet
    #[arg(long, value_name = "NAME")]
    pub l1_module: Option<String>,
    /// Its CPUs; on each of them the workloads run, at the same time
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=8))]
    pub cpus: u32,
    /// Its memory
    #[arg(long, value_name = "MIB", default_value_t = 384)]
    pub memory: u64,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Samples per workload
    #[arg(long, value_name = "N", default_value_t = 200,
          value_parser = clap::value_parser!(u64).range(1..=200_000))]
    pub iterations: u64,
    /// Operations between the markers; 0 leaves the markers out
    #[arg(long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u64).range(0..=200_000))]
    pub marker_iterations: u64,
    /// Seconds after which the hypervisor is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    pub timeout: u64,
    #[command(flatten)]
    pub device: DeviceArguments,
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use clap::Parser;

    #[test]
    fn a_report_without_a_file_goes_to_standard_output() {
        let line = ["exitbench", "boot", "--kernel", "k", "--initrd", "i", "--report"];
        let Command::Boot(boot) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not understood as boot");
        };
        assert_eq!(boot.report, Some("-".into()));
    }
}
