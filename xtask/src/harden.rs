//! `make harden`: the lab's tests on a kernel with everything on that finds faults (`lab/debug.config`, `lab/harden.list`). The kernel's
//! log has to stay empty of what its sanitizers, lockdep and kmemleak say.

use crate::options::Options;
use crate::tally::Tally;
use crate::{labtest, module, tools};
use anyhow::Result;
use gannet_lab::{Kernel, Layout, Module};

/// Builds the debug kernel where it is not in the cache, the module for it, and runs `lab/harden.list`; whether all passed.
pub fn run(layout: &Layout, options: &Options) -> Result<bool> {
    layout.ensure(&["toolchain", "busybox", "tcc", "kernel-6.12", "kernel-6.1"])?;
    let kernel = Kernel::Debug;
    module::build(layout, kernel)?;
    let mut tests = Vec::new();
    for options in options.for_machines().iter().rev() {
        let tools = tools::prepare(layout, options)?;
        tests.push(labtest::loads_and_unloads(options, kernel));
        for module in [Module::Stock, Module::Gannet] {
            tests.push(labtest::boots(layout, options, &tools, kernel, module, 1)?);
        }
        labtest::from_list(layout, options, &[kernel], "harden.list", &mut tests)?;
    }
    tests.retain(|test| test.name().contains(&options.filter));
    let mut tally = Tally::default();
    labtest::run_all(layout, tests, &mut tally);
    Ok(tally.finish())
}
