//! `exitbench man`: the manual page, made of what the command line says of itself, so that neither can be without the other.

use std::io::Write;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::cli::Cli;
use crate::output::print;

/// What the options do not say.
const END: &str = r#".SH EXIT STATUS
.TP
0
Everything was done.
.TP
1
A workload failed, a Linux guest's user space did not answer, or a workload is slower than \fBcompare \-\-fail\-above\fR allows.
.TP
2
There was nothing to work on: no /dev/kvm or no permission, a file that is no report, reports that do not compare, a wrong option.
.SH ENVIRONMENT
.TP
EXITBENCH_UNIT
What \fB\-\-unit\fR is where it is not given.
.TP
NO_COLOR
Where it is set, tables have no colours.
.SH FILES
.TP
/dev/kvm
The device that is measured. It has to be readable and writable; mostly the group \fBkvm\fR may.
.SH EXAMPLES
.nf
exitbench run \-\-cpu 2,3 \-\-json stock.json
exitbench run \-\-cpu 2,3 \-\-json gannet.json
exitbench compare stock.json gannet.json
exitbench compare \-\-fail\-above 1.01 before.json after.json
exitbench plot stock.json gannet.json \-o exits.svg
exitbench features | grep HYPERV
exitbench man >exitbench.1
.fi
.SH SEE ALSO
.BR perf\-kvm (1),
.BR taskset (1)
"#;

/// Writes the page to standard output.
pub fn command() -> Result<bool> {
    print(&page()?.trim_end())?;
    Ok(true)
}

/// The page of the command and all its subcommands.
fn page() -> Result<String> {
    let mut command = Cli::command().disable_help_subcommand(true).disable_help_flag(true);
    command.build();
    let mut page = Vec::new();
    let man = Man::new(command.clone().after_help(None::<&str>));
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    writeln!(page, ".SH COMMANDS")?;
    for sub in command.get_subcommands() {
        page.extend(section(sub)?.as_bytes());
    }
    page.extend(END.as_bytes());
    let page = String::from_utf8(page).context("the manual page is no text")?;
    // Each part that clap_mangen makes begins with the same two definitions; once is enough.
    let (definitions, rest): (Vec<&str>, Vec<&str>) =
        page.lines().partition(|line| line.starts_with(".ie ") || line.starts_with(".el "));
    let lines = definitions.into_iter().take(2).chain(rest);
    Ok(lines.map(|line| format!("{line}\n")).collect())
}

/// A subcommand's part: its synopsis, what it does, its options.
fn section(command: &Command) -> Result<String> {
    let name = command.get_name();
    let man = Man::new(command.clone());
    let (mut synopsis, mut rest) = (Vec::new(), Vec::new());
    man.render_synopsis_section(&mut synopsis)?;
    man.render_description_section(&mut rest)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(&mut rest)?;
    }
    if command.get_after_help().is_some() {
        man.render_extra_section(&mut rest)?;
    }
    // The sections of a page of its own become paragraphs of this one.
    let text = String::from_utf8(synopsis)? + &String::from_utf8(rest)?;
    let lines = text.lines().map(|line| if line.starts_with(".SH ") { ".PP" } else { line });
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    Ok(format!(".SS {name}\n{}", lines.replace(".PP\n.TP\n", ".TP\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_and_option_is_in_the_page() {
        let page = page().unwrap();
        let mut command = Cli::command().disable_help_flag(true);
        command.build();
        let mut options = 0;
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            let head = format!("\n.SS {}\n", sub.get_name());
            let own = page.split(&head).nth(1).unwrap_or_else(|| panic!("{head}"));
            let own = own.split("\n.S").next().unwrap();
            for long in sub.get_arguments().filter_map(|option| option.get_long()) {
                let written = format!("\\-\\-{}", long.replace('-', "\\-"));
                assert!(own.contains(&written), "{}: {written} is not in\n{own}", sub.get_name());
                options += 1;
            }
        }
        assert!(options > 40, "{options}");
    }

    #[test]
    fn the_page_has_the_sections_of_a_manual_page() {
        let page = page().unwrap();
        let mut rest = page.as_str();
        let names = ["NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "EXIT STATUS", "ENVIRONMENT"];
        for name in names.into_iter().chain(["FILES", "EXAMPLES", "SEE ALSO"]) {
            let quoted = [format!(".SH {name}\n"), format!(".SH \"{name}\"\n")];
            let at = quoted.iter().find_map(|head| rest.find(head.as_str()));
            rest = &rest[at.unwrap_or_else(|| panic!("{name} is not in its place"))..];
        }
    }
}
