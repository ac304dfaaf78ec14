//! The checks of VMLAUNCH and VMRESUME against an oracle that is written from the manual alone (SDM vol. 3C §27.2 and §27.3), for
//! guests of all modes of which one to three fields were changed. Each changed VMCS is entered twice: loaded from memory, where
//! nothing was checked before, and written by VMWRITE after L2 has run, where what is unchanged is not checked again.
//!
//! Not here: MSRs that cannot be loaded, SMM, capabilities that a VMM has narrowed, VMCSs of Hyper-V's kind.
//!
//! `GANNET_NESTED_CASES=10000000 cargo test --release -p gannet-nested-vmx --test entry_checks random -- --nocapture` runs long, and
//! says what it did.

#[path = "entry_checks/bases.rs"]
mod bases;
#[path = "entry_checks/drive.rs"]
mod drive;
#[path = "../src/example.rs"]
mod example;
#[path = "entry_checks/guest.rs"]
mod guest;
#[path = "entry_checks/oracle.rs"]
mod oracle;
mod rig;

use gannet_nested_vmx::{Capabilities, Vmcs12};

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use bases::{Base, Case, Controls, Event, case, fields};
use drive::Guest;
use oracle::{End, ends, judge};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

/// Cases of an ordinary run.
const CASES: u32 = 12_000;
/// Bits 63:32, and all of them but bit 32: the error that a test makes.
const DR7_ZEROS: u64 = 0xffff_ffff_0000_0000;
const DR7_WRONG: u64 = 0xffff_fffe_0000_0000;

fn number_of_cases() -> u32 {
    let asked = std::env::var("GANNET_NESTED_CASES").ok();
    asked.map_or(CASES, |n| n.parse().expect("a number of cases"))
}

/// What was met, so that a generator that breaks nothing is seen.
#[derive(Debug, Default)]
struct Counts {
    ends: BTreeMap<End, u64>,
    /// How often a rule alone has decided.
    alone: BTreeMap<(&'static str, &'static str), u64>,
}

impl Counts {
    /// Enters L2. What comes of it has to be what the manual says.
    fn compare(&mut self, guest: &mut Guest, dr7_zeros: u64) -> Result<End, String> {
        let broken = judge(&guest.whole(), guest.processor(dr7_zeros));
        let may = ends(&broken);
        let end = guest.enter();
        if !may.contains(&end) {
            return Err(format!("{end:x?}, and by the manual {may:x?} for {broken:x?}"));
        }
        *self.ends.entry(end).or_default() += 1;
        if let [only] = broken[..] {
            *self.alone.entry((only.of, only.rule)).or_default() += 1;
        }
        Ok(end)
    }

    /// Enters L2; where that fails once more, and a third time with the fields as they were.
    fn enter(
        &mut self,
        guest: &mut Guest,
        image: &Vmcs12,
        writes: &[(&str, u64, u64)],
        dr7_zeros: u64,
    ) -> Result<(), String> {
        let end = self.compare(guest, dr7_zeros)?;
        if end != End::Runs {
            let again = self.compare(guest, dr7_zeros)?;
            if again != end {
                return Err(format!("{again:x?} where the entry is tried again"));
            }
            for (_, encoding, _) in writes {
                let named = x86::vmcs::place::find(*encoding).unwrap();
                guest.write(*encoding, image.read(named));
            }
            self.compare(guest, dr7_zeros).map_err(|why| format!("mended: {why}"))?;
        }
        Ok(())
    }

    fn check(&mut self, case: &Case, c: &Capabilities, dr7_zeros: u64) -> Result<(), String> {
        let image = case.base.image(c);
        let writes = case.writes(&image);
        let told = |way: &str, why: String| format!("{way}: {writes:x?}: {why}");
        let mut loaded = Guest::new(&case.base, &case.changed(&image, &writes));
        self.enter(&mut loaded, &image, &writes, dr7_zeros)
            .map_err(|why| told("loaded from memory", why))?;
        // VMWRITE drops reserved bits of access rights.
        if case.raw {
            return Ok(());
        }
        let mut written = Guest::new(&case.base, &image);
        assert_eq!(written.enter(), End::Runs);
        for (_, encoding, value) in &writes {
            written.write(*encoding, *value);
        }
        self.enter(&mut written, &image, &writes, dr7_zeros)
            .map_err(|why| told("written after a run", why))
    }

    /// Flips one bit after the other, each in a VMCS that has been entered before.
    fn sweep(&mut self, base: &Base, c: &Capabilities, dr7_zeros: u64) -> Result<(), String> {
        let image = base.image(c);
        for (name, encoding, named) in fields() {
            let mut guest = Guest::new(base, &image);
            assert_eq!(guest.enter(), End::Runs);
            for bit in 0..bases::bits(*encoding) {
                guest.write(*encoding, image.read(*named) ^ 1 << bit);
                self.compare(&mut guest, dr7_zeros)
                    .map_err(|why| format!("{base:?}: {name} bit {bit}: {why}"))?;
            }
        }
        Ok(())
    }
}

#[test]
fn what_is_changed_is_enterable_before() {
    let c = drive::capabilities();
    for mode in bases::MODES {
        for controls in bases::CONTROLS {
            for event in bases::EVENTS {
                for host in [false, true] {
                    let base = Base::new(mode, controls, event, host, 40);
                    let mut guest = Guest::new(&base, &base.image(&c));
                    assert_eq!(judge(&guest.whole(), guest.processor(DR7_ZEROS)), [], "{base:?}");
                    assert_eq!(guest.enter(), End::Runs, "{base:?}");
                }
            }
        }
    }
}

/// GANNET_NESTED_CASES says how many.
#[test]
fn random_changes_are_judged_as_the_manual_does() {
    let (c, counts) = (drive::capabilities(), RefCell::new(Counts::default()));
    let cases = number_of_cases();
    let config = ProptestConfig { cases, source_file: Some(file!()), ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    runner
        .run(&case(), |case| {
            counts.borrow_mut().check(&case, &c, DR7_ZEROS).map_err(TestCaseError::fail)
        })
        .unwrap();
    let counts = counts.into_inner();
    println!("{cases} cases, {} rules alone: {counts:?}", counts.alone.len());
    let failed = [0, 2, 4].map(oracle::failed);
    for end in [End::Runs, End::Error(7), End::Error(8)].iter().chain(&failed) {
        assert!(cases < CASES || counts.ends.contains_key(end), "{end:?}: {counts:?}");
    }
    assert!(cases < CASES || counts.alone.len() > 100, "{counts:?}");
}

/// What random changes meet by chance, one after the other.
#[test]
fn every_bit_of_every_field_is_judged_as_the_manual_does() {
    let (c, mut counts) = (drive::capabilities(), Counts::default());
    for mode in bases::MODES {
        let base = Base::new(mode, Controls::All, Event::None, false, 40);
        counts.sweep(&base, &c, DR7_ZEROS).unwrap();
    }
    for event in bases::EVENTS {
        let base = Base { event, ..Base::FIRST };
        counts.sweep(&base, &c, DR7_ZEROS).unwrap();
    }
    println!("{} rules alone: {:?}", counts.alone.len(), counts.ends);
}

/// How many cases it takes until an oracle that does not ask for DR7's bit 32 disagrees with the code.
fn cases_until_found(seed: u8, most: u32) -> Option<u32> {
    let c = drive::capabilities();
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), random);
    let strategy = case();
    (1..=most).find(|_| {
        let case = strategy.new_tree(&mut runner).unwrap().current();
        let image = case.base.image(&c);
        let changed = case.changed(&image, &case.writes(&image));
        // Only where DR7 is not good can the two oracles differ: the others need not be entered.
        let dr7 = changed.get(x86::vmcs::field::GUEST_DR7);
        let agrees = |zeros| Counts::default().check(&case, &c, zeros).is_ok();
        dr7 & DR7_ZEROS != 0 && !agrees(DR7_WRONG) && agrees(DR7_ZEROS)
    })
}

/// The failing twin of the comparison.
#[test]
fn an_oracle_that_misses_a_bit_of_dr7_is_found_out() {
    let found: Vec<_> = (1..=4).map(|seed| cases_until_found(seed, 10 * CASES)).collect();
    println!("found after {found:?} cases");
    assert!(found.iter().all(Option::is_some), "{found:?}");
    assert!(found.iter().flatten().any(|n| *n <= CASES), "{found:?}");
    // The bits of a good VMCS are among those that are tried in order.
    let base = Base { controls: Controls::All, ..Base::FIRST };
    let why = Counts::default().sweep(&base, &drive::capabilities(), DR7_WRONG).unwrap_err();
    assert!(why.contains("GUEST_DR7 bit 32"), "{why}");
}

/// What the oracle says of a few entries that the manual decides by the letter.
#[test]
fn the_oracle_knows_the_manual() {
    let c = drive::capabilities();
    let rules = |change: fn(&mut Vmcs12)| {
        let mut image = Base::FIRST.image(&c);
        change(&mut image);
        let guest = Guest::new(&Base::FIRST, &image);
        ends(&judge(&image, guest.processor(DR7_ZEROS)))
    };
    let failed = |qualification| BTreeSet::from([oracle::failed(qualification)]);
    assert_eq!(
        rules(|v| {
            set!(v, ENTRY_CONTROLS = 0x93ff, GUEST_DR7 = 1 << 32);
        }),
        failed(0)
    );
    assert_eq!(
        rules(|v| {
            set!(v, GUEST_RIP = 0x8000_0000_0000);
        }),
        BTreeSet::from([End::Runs])
    );
    assert_eq!(
        rules(|v| {
            set!(v, VMCS_LINK = 1);
        }),
        failed(4)
    );
    assert_eq!(
        rules(|v| {
            set!(v, HOST_RIP = 0x8000_0000_0000);
        }),
        BTreeSet::from([End::Error(8)])
    );
    assert_eq!(
        rules(|v| {
            set!(v, PIN_CONTROLS = 0, HOST_CR3 = u64::MAX, GUEST_DR7 = u64::MAX);
        }),
        BTreeSet::from([End::Error(7)])
    );
}
