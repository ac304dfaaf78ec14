//! VMX against a model that is written from the manual alone (SDM vol. 3C chapters 25 to 31): the instructions with operands of all
//! kinds and any field, capabilities that a VMM has narrowed, entries by the oracle of `entry_checks`, what the hardware gets of L2's
//! state, whose an exit is, what the VMCS holds behind it and with which registers L1 goes on; L2's VMREAD, VMWRITE, VMFUNC and CR8,
//! and events that end its run.
//!
//! Not here: enlightened VMCSs (`tests/model`), composition by groups (the same), lists of MSRs and what the backend does of it all
//! (`crates/vmx`), virtual interrupts.
//!
//! `GANNET_NESTED_STEPS=10000000 cargo test --release -p gannet-nested-vmx --test manual long -- --nocapture` runs long, and says what
//! it did. GANNET_NESTED_SEED says where the sequence begins.

#[allow(dead_code, reason = "the tests of the checks use the rest")]
#[path = "entry_checks/bases.rs"]
mod bases;
#[allow(dead_code, reason = "the tests of the checks use the rest")]
#[path = "entry_checks/drive.rs"]
mod drive;
#[path = "../src/example.rs"]
mod example;
#[path = "manual/exits.rs"]
mod exits;
#[path = "manual/fields.rs"]
mod fields;
#[path = "entry_checks/guest.rs"]
mod guest;
#[path = "manual/l2.rs"]
mod l2;
#[path = "manual/left.rs"]
mod left;
#[path = "entry_checks/oracle.rs"]
mod oracle;
#[path = "manual/random.rs"]
mod random;
#[path = "manual/reference.rs"]
mod reference;
mod rig;
#[path = "manual/run.rs"]
mod run;

use run::{Counts, Run};

/// Steps of an ordinary run.
const STEPS: u64 = 60_000;
/// Bits of CR0 that no processor has.
const CR0_RESERVED: u64 = 0x1ffa_ffc0;

/// Errors of the model's, one to each part of it: the twins of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    VmxonPrivilege,
    StaysLaunched,
    NoShadow,
    NoPointer,
    UpperHalf,
    ReadOnly,
    EntryOrder,
    EntersShadow,
    FailedEntryClears,
    KindBehindOperand,
    NotCanonical,
    LostShadow,
    Dr7,
    PageFaultMask,
    Clts,
    LmswClears,
    PortWraps,
    MsrQuarter,
    Qualification,
    VectoringError,
    SavesEfer,
    ModeControl,
    HostMode,
    HostBases,
    FunctionList,
    Threshold,
}

const WRONGS: [Wrong; 26] = [
    Wrong::VmxonPrivilege,
    Wrong::StaysLaunched,
    Wrong::NoShadow,
    Wrong::NoPointer,
    Wrong::UpperHalf,
    Wrong::ReadOnly,
    Wrong::EntryOrder,
    Wrong::EntersShadow,
    Wrong::FailedEntryClears,
    Wrong::KindBehindOperand,
    Wrong::NotCanonical,
    Wrong::LostShadow,
    Wrong::Dr7,
    Wrong::PageFaultMask,
    Wrong::Clts,
    Wrong::LmswClears,
    Wrong::PortWraps,
    Wrong::MsrQuarter,
    Wrong::Qualification,
    Wrong::VectoringError,
    Wrong::SavesEfer,
    Wrong::ModeControl,
    Wrong::HostMode,
    Wrong::HostBases,
    Wrong::FunctionList,
    Wrong::Threshold,
];

fn number(name: &str, otherwise: u64) -> u64 {
    let asked = std::env::var(name).ok();
    asked.map_or(otherwise, |n| n.parse().expect("a number"))
}

/// How many steps it takes until the two differ, and how.
fn run(seed: u64, steps: u64, wrong: Option<Wrong>) -> (Counts, Option<(u64, String)>) {
    let mut run = Run::new(seed, wrong);
    for step in 0..steps {
        if let Err(why) = run.step() {
            return (run.counts, Some((step, why)));
        }
    }
    (run.counts, None)
}

/// GANNET_NESTED_STEPS says how many.
#[test]
fn a_long_sequence_does_what_the_manual_says() {
    let steps = number("GANNET_NESTED_STEPS", STEPS);
    let (counts, difference) = run(number("GANNET_NESTED_SEED", 1), steps, None);
    println!("{steps} steps: {counts:?}");
    assert_eq!(difference, None);
    assert!(counts.runs > steps / 30, "{counts:?}");
    let reflected: u64 = counts.reflected.values().sum();
    assert!(reflected > steps / 40 && counts.reflected.len() > 40, "{counts:?}");
    assert!(counts.served > 0 && counts.functions > 0 && counts.priority > 0, "{counts:?}");
    for error in [0, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 15, 26, 28] {
        assert!(counts.failed.contains_key(&error), "{error}: {counts:?}");
    }
    for fault in [6, 12, 13, 14] {
        assert!(counts.faults.contains_key(&fault), "{fault}: {counts:?}");
    }
}

/// The failing twins of the comparison.
#[test]
fn a_model_with_an_error_is_found_out() {
    for wrong in WRONGS {
        let found = (1..=8).find_map(|seed| {
            let (_, difference) = run(seed, STEPS, Some(wrong));
            difference.map(|(step, _)| (seed - 1) * STEPS + step)
        });
        println!("{wrong:?}: after {found:?} steps");
        assert!(found.is_some(), "{wrong:?}");
    }
}
