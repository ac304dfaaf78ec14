//! Exits to user space: each that the interface names is made somewhere, and the hardware is told to
//! leave for those that depend on it.

mod rig;

use std::fs;
use std::path::Path;

use gannet_vcpu::{RunInput, UserExit};
use rig::vmx::{exit, features, play, step, vcpu_with};
use rig::{Machine, add_vcpu, shutdown, vm};
use vm::msr_filter::MsrFilter;
use vm::vm::Format;
use x86::msr;
use x86::vmcs::{ExitReason, event, field};

/// All text of the sources but those of `user_exit.rs`, which names the exits.
fn sources() -> String {
    let mut all = String::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|name| name != "user_exit.rs") {
                all += &fs::read_to_string(path).unwrap();
            }
        }
    }
    all
}

/// The names of the exits: the lines of the enum that begin with a capital letter.
fn names() -> Vec<String> {
    let source = include_str!("../src/run/user_exit.rs");
    let body = source.split("pub enum UserExit {").nth(1).unwrap().split("\n}").next().unwrap();
    let lines = body.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     "));
    let names = lines.map(|line| line.trim().split([' ', ',', '(']).next().unwrap_or(""));
    names.filter(|name| name.starts_with(char::is_uppercase)).map(String::from).collect()
}

#[test]
fn every_exit_of_the_interface_is_made_somewhere() {
    let (names, sources) = (names(), sources());
    assert!(names.len() > 10 && names.iter().any(|name| name == "SetTpr"), "{names:?}");
    let is_made = |name: &str| sources.contains(&format!("UserExit::{name}"));
    let missing: Vec<_> = names.iter().filter(|name| !is_made(name)).collect();
    assert!(missing.is_empty(), "named, shown to user space, and never made: {missing:?}");
}

#[test]
fn a_write_of_cr8_is_intercepted_where_the_local_apic_is_the_vmms() {
    const CR8_WRITE: u32 = 1 << 24;
    for irqchip in [false, true] {
        let vm = vm(&Machine { irqchip, ..Machine::default() });
        let mut v = add_vcpu(&Machine { irqchip, ..Machine::default() }, &vm, 0);
        v.backend().cpu().inner().then(move |vmcb, gprs| {
            assert_eq!(vmcb.control.intercepts[0] & CR8_WRITE != 0, !irqchip);
            shutdown(vmcb, gprs);
        });
        assert_eq!(v.run(&RunInput::default()), UserExit::Shutdown);
    }
}

#[test]
fn a_filter_of_msrs_binds_a_vcpu_that_is_made_behind_it() {
    let nothing = MsrFilter { default_deny: true, ranges: [].into() };
    for (filter, refused) in [(None, false), (Some(nothing), true)] {
        let mut v = vcpu_with(features(), Format::npt(4, 0), |vm| {
            filter.into_iter().for_each(|filter| vm.set_msr_filter(filter).unwrap());
        });
        let reads = step(|vmcs, gprs| {
            gprs.0[1] = msr::STAR.into();
            exit(ExitReason::Rdmsr)(vmcs, gprs);
        });
        let goes_on = step(move |vmcs, gprs| {
            let info = vmcs.get(field::ENTRY_INTERRUPTION);
            assert_eq!(info & 0xff == 13 && info & event::VALID != 0, refused, "{info:#x}");
            vmcs.set(field::ENTRY_INTERRUPTION, 0);
            exit(ExitReason::ExternalInterrupt)(vmcs, gprs);
        });
        play(&mut v, [reads, goes_on]);
    }
}
