//! `docs/abi.md` names every command and capability of the tables. With GANNET_WRITE_DOCS set the test writes the
//! document.

use std::fmt::Write;

use gannet_kvm_abi::rows::{CAPABILITIES, COMMANDS, Capability, File};

const BEGIN: &str = "<!-- from the table: begin -->\n";
const END: &str = "<!-- from the table: end -->\n";

fn commands(text: &mut String, title: &str, file: File) {
    writeln!(text, "\n## {title}\n\n| command | capabilities | notes |\n|---|---|---|").unwrap();
    let mut rows = COMMANDS.iter().filter(|row| row.file == file).peekable();
    while let Some(row) = rows.next() {
        let mut names = format!("KVM_{}", row.name);
        let mut caps: Vec<&str> = row.capabilities.iter().map(|(name, _)| *name).collect();
        while let Some(next) = rows.next_if(|next| next.note == "the same") {
            write!(names, ", KVM_{}", next.name).unwrap();
            caps.extend(next.capabilities.iter().map(|(name, _)| *name));
        }
        caps.dedup();
        let caps = caps.join(", ").replace("CAP_", "");
        writeln!(text, "| {names} | {caps} | {} |", row.note).unwrap();
    }
}

fn capabilities() -> String {
    let names = |answer: &str| {
        let all = CAPABILITIES.iter().filter(|row| row.answer == answer && row.note.is_empty());
        all.map(|row| row.name.trim_start_matches("CAP_")).collect::<Vec<_>>().join(", ")
    };
    let mut text = String::from("\n| capability | answer |\n|---|---|\n");
    writeln!(text, "| {} | 1 |", names("1")).unwrap();
    for Capability { name, note, .. } in CAPABILITIES.iter().filter(|row| !row.note.is_empty()) {
        writeln!(text, "| {} | {note} |", name.trim_start_matches("CAP_")).unwrap();
    }
    writeln!(text, "| {} | 0 |\n", names("0")).unwrap();
    text
}

#[test]
fn the_document_is_the_tables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/abi.md");
    let present = std::fs::read_to_string(path).expect("docs/abi.md");
    let mut lists = String::new();
    commands(&mut lists, "/dev/kvm", File::System);
    commands(&mut lists, "A VM file", File::Vm);
    commands(&mut lists, "A VM file of a 32-bit process", File::VmCompat);
    commands(&mut lists, "A vCPU file", File::Vcpu);
    lists.push('\n');
    let mut wanted = String::new();
    let mut rest = present.as_str();
    for made in [lists, capabilities()] {
        let (before, after) = rest.split_once(BEGIN).expect("a begin mark");
        let (_, after) = after.split_once(END).expect("its end mark");
        write!(wanted, "{before}{BEGIN}{made}{END}").unwrap();
        rest = after;
    }
    wanted.push_str(rest);
    if std::env::var_os("GANNET_WRITE_DOCS").is_some() {
        std::fs::write(path, &wanted).expect("docs/abi.md can be written");
        return;
    }
    assert!(
        present == wanted,
        "docs/abi.md is stale: run this test with GANNET_WRITE_DOCS=1 and look at the difference"
    );
}

#[test]
fn a_command_is_told_of_by_capabilities_that_there_are() {
    for row in COMMANDS {
        for (name, number) in row.capabilities {
            let found = CAPABILITIES.iter().find(|capability| capability.number == *number);
            assert_eq!(found.map(|capability| capability.name), Some(*name), "{}", row.name);
        }
    }
    for (i, row) in CAPABILITIES.iter().enumerate() {
        let twice = CAPABILITIES.iter().skip(i + 1).any(|other| other.number == row.number);
        assert!(!twice, "{}", row.name);
    }
}
