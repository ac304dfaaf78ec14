//! `docs/msrs.md` says what the table says. With GANNET_WRITE_DOCS set the test writes the document.

use std::fmt::Write;

use gannet_msr::rows::{Row, TABLE};
use gannet_msr::{Class, classify};

const BEGIN: &str = "<!-- from the table: begin -->\n";
const END: &str = "<!-- from the table: end -->\n";

fn rows() -> impl Iterator<Item = &'static Row> {
    TABLE.iter().flat_map(|section| section.rows)
}

fn number(row: &Row) -> String {
    match row.first == row.last {
        true => format!("{:#x}", row.first),
        false => format!("{:#x}–{:#x}", row.first, row.last),
    }
}

fn cell(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace(" :: ", "::")
        .replace(" : ", ": ")
        .replace('|', "\\|")
}

fn document() -> String {
    let mut text = String::new();
    for section in TABLE {
        let stored = section.rows.iter().any(|row| !row.read.is_empty());
        let head = match stored {
            true => {
                "| MSR | number | lists | power-up | read | write | notes |\n|---|---|---|---|---|---|---|\n"
            }
            false => "| MSR | number | lists | takes |\n|---|---|---|---|\n",
        };
        let (title, rest) = section.about.split_once(". ").unwrap_or((section.about, ""));
        writeln!(text, "\n## {}\n", title.trim_end_matches('.')).unwrap();
        if !rest.is_empty() {
            writeln!(text, "{rest}\n").unwrap();
        }
        text.push_str(head);
        for row in section.rows {
            let (name, number, lists) = (row.name, number(row), cell(row.saved));
            let check = if stored { "" } else { row.write };
            let note = match (check, row.note) {
                ("", note) => note.to_owned(),
                (check, note) => format!("{check}; {note}"),
            };
            let middle = match stored {
                true => {
                    format!(" {} | {} | {} |", cell(row.power_up), cell(row.read), cell(row.write))
                }
                false => String::new(),
            };
            writeln!(text, "| {name} | {number} | {lists} |{middle} {note} |").unwrap();
        }
    }
    text.push('\n');
    text
}

#[test]
fn the_document_is_the_tables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/msrs.md");
    let present = std::fs::read_to_string(path).expect("docs/msrs.md");
    let (before, rest) = present.split_once(BEGIN).expect("its begin mark");
    let (_, after) = rest.split_once(END).expect("its end mark");
    let wanted = format!("{before}{BEGIN}{}{END}{after}", document());
    if std::env::var_os("GANNET_WRITE_DOCS").is_some() {
        std::fs::write(path, &wanted).expect("docs/msrs.md can be written");
        return;
    }
    assert!(
        present == wanted,
        "docs/msrs.md is stale: run this test with GANNET_WRITE_DOCS=1 and look at the difference"
    );
}

#[test]
fn every_row_has_an_owner_and_every_number_one_row() {
    for row in rows() {
        for index in row.first..=row.last {
            assert_ne!(classify(index), Class::Unknown, "{} {index:#x}", row.name);
            let twice = rows().filter(|other| (other.first..=other.last).contains(&index)).count();
            assert_eq!(twice, 1, "{} {index:#x}", row.name);
        }
    }
    let ranges = [0..0x1_0000, 0x4b56_4d00..0x4b56_4e00, 0xc000_0000..0xc002_0000];
    for index in ranges.into_iter().flatten() {
        let there = rows().any(|row| (row.first..=row.last).contains(&index));
        let owned = !matches!(classify(index), Class::Unknown | Class::X2Apic);
        assert_eq!(there, owned, "{index:#x}");
    }
}
