//! What every measurement on a machine needs, and its making.

use crate::module;
use crate::options::Options;
use anyhow::Result;
use gannet_lab::{Job, Layout, Module, programs};
use std::path::PathBuf;

/// The programs of a measurement.
pub struct Tools {
    pub exitbench: PathBuf,
    /// Of the machine's emulator.
    pub plugin: PathBuf,
}

impl Tools {
    /// A job that counts, with exitbench in its machine.
    pub fn job(&self, options: &Options, module: Module, parameters: &str, command: &str) -> Job {
        let mut job = Job::new(options.machine(), options.kernel, module, command)
            .file(&self.exitbench, "bin/exitbench");
        job.parameters = parameters.to_owned();
        job.counting = true;
        job.plugin = Some(self.plugin.clone());
        job
    }
}

/// Makes sure of the lab and builds exitbench and the emulator's plugin.
pub fn prepare(layout: &Layout, options: &Options) -> Result<Tools> {
    layout.ensure(&["toolchain", options.machine().group(), "busybox"])?;
    layout.ensure(&[options.kernel.group(), gannet_lab::guest::KERNEL.group()])?;
    let exitbench = programs::build_static(layout, "exitbench")?.join("exitbench");
    let plugin = programs::build_plugin(layout, options.machine())?;
    Ok(Tools { exitbench, plugin })
}

/// Builds the module, and says on the way out what that means when it cannot be built.
pub fn modules(layout: &Layout, options: &Options) -> Vec<Module> {
    match module::build(layout, options.kernel) {
        Ok(_) => vec![Module::Stock, Module::Gannet],
        Err(error) => {
            eprintln!("error: {error:#}");
            eprintln!("error: Gannet's half is missing below: gannet.ko does not build");
            vec![Module::Stock]
        }
    }
}
