//! Exits to user space: each that the interface names is made somewhere, and the hardware is told to
//! leave for those that depend on it.

mod rig;

use std::fs;
use std::path::Path;

use gannet_vcpu::{RunInput, UserExit};
use rig::{Machine, add_vcpu, shutdown, vm};

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
