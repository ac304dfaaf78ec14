//! `exitbench boot`, from its options to its report.

use std::time::Duration;

use anyhow::Result;

use super::session::{Boot, BootReport};
use crate::cli::BootArguments;
use crate::report::write;
use crate::vmm::hypervisor::Hypervisor;

/// Boots the guest that the command line names; whether its user space answered.
pub fn command(arguments: BootArguments) -> Result<bool> {
    let command_line = match &arguments.append {
        Some(more) => format!("{} {more}", arguments.cmdline),
        None => arguments.cmdline.clone(),
    };
    let boot = Boot {
        kernel: arguments.kernel,
        initrd: arguments.initrd,
        cpus: arguments.cpus,
        memory: arguments.memory,
        command_line,
        from: arguments.from.unwrap_or_default(),
        expect: arguments.expect,
        stop_at_marker: arguments.stop_at_marker,
        timeout: Duration::from_secs(arguments.timeout),
    };
    let hypervisor = Hypervisor::open(&arguments.device.device)?;
    let ended = boot.run(&hypervisor)?;
    if let Some(path) = &arguments.report {
        let report = BootReport {
            unit: arguments.device.unit,
            module: arguments.device.module(),
            cpus: boot.cpus,
            ticks_to_marker: ended.ticks_to_marker,
            ticks_between: ended.ticks_between,
            end: match &ended.end {
                Ok(end) => (*end).to_string(),
                Err(reason) => reason.lines().next().unwrap_or_default().to_string(),
            },
        };
        write(path, &(serde_json::to_string(&report)? + "\n"))?;
    }
    if let Err(reason) = &ended.end {
        eprintln!("exitbench: the VM ended: {}", reason.trim_end());
    }
    if !ended.marker_seen {
        eprintln!("exitbench: `{}` did not come on the console", boot.expect);
    }
    Ok(ended.marker_seen)
}
