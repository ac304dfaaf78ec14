//! Permissions in all combinations of an entry's bits with CR0.WP, CR4.SMEP, CR4.SMAP, EFER.NXE and RFLAGS.AC, and
//! what holds right after one of them changed (APM vol. 2 §5.6).

use crate::machine::memory::PAGE;
use crate::machine::stage::model::{Access, Control, KINDS, Kind};
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{CR0, NXE, SMAP, SMEP, Stage, WP, in_each_mode, tag};
use crate::oracle;
use crate::outcome::{Outcome, equal};
use crate::runner::tests;

tests!("paging_protection":
    every_combination_is_as_the_architecture_says,
    every_combination_in_large_pages_is_as_the_architecture_says,
    permissions_of_all_levels_are_combined,
    every_toggle_takes_effect_at_once,
    nxe_takes_effect_after_a_flush,
    wp_off_shows_user_mode_nothing_new,
    a_page_written_without_wp_is_read_only_again,
    smep_and_wp_off_together_hold,
    widened_permissions_need_no_flush,
);

/// One page for each combination of writable, user and no-execute.
struct Pages {
    stage: Stage,
    va: u64,
    step: u64,
    pages: Vec<(u64, u64)>,
}

impl Pages {
    fn new(paging: Paging, level: u32) -> Outcome<Self> {
        let mut stage = Stage::new(paging)?;
        let (va, step) = (paging.at(), paging.span(level));
        let large = (level > 1).then(|| stage.large_frame());
        let combinations = if paging.has_nx() { 8 } else { 4 };
        let pages = (0..combinations).map(|index| {
            let frame = large.unwrap_or_else(|| stage.frame());
            let nx = if index & 4 != 0 { NX } else { 0 };
            let entry = frame | PRESENT | (index & 3) << 1 | nx;
            stage.map(va + index * step, level, entry);
            (entry, frame)
        });
        let pages = pages.collect();
        Ok(Self { stage, va, step, pages })
    }

    /// Each access of each page, and what the model says of it.
    fn all_accesses(&self, control: Control, expected: &mut Vec<(Operation, Seen)>) {
        for (index, (entry, frame)) in self.pages.iter().enumerate() {
            let va = self.va + index as u64 * self.step;
            for kind in KINDS {
                for (user, ac) in [(false, false), (false, true), (true, false)] {
                    if kind == Kind::Fetch && ac {
                        continue;
                    }
                    // Without WP a shadow of a read-only user page that the kernel has written is the kernel's
                    // (Linux, virt/kvm/x86/mmu.rst, "Emulating cr0.wp"), and SMAP does not hold it back then.
                    let converted = entry & ALL == PRESENT | USER && !control.wp && control.smap;
                    if converted && !user && !ac && !oracle::tdp() {
                        continue;
                    }
                    expected.push(self.access(
                        control,
                        va,
                        *entry,
                        *frame,
                        Access { kind, user, ac },
                    ));
                }
            }
        }
    }

    fn access(
        &self,
        control: Control,
        va: u64,
        entry: u64,
        frame: u64,
        access: Access,
    ) -> (Operation, Seen) {
        // The upper levels permit all.
        let mut entries = vec![ALL; self.stage.paging.levels() as usize - 1];
        entries.push(entry);
        let (operation, at, seen) = match access.kind {
            Kind::Read => (read(va + 8), va + 8, value(tag(frame))),
            Kind::Write => (write(va + 16, va), va + 16, DONE),
            Kind::Fetch => (fetch(va), va, value(tag(frame))),
        };
        let operation = match (access.user, access.ac) {
            (true, _) => operation.user(),
            (_, true) => operation.with_ac(),
            _ => operation,
        };
        let refused = control.fault(self.stage.paging, &entries, access);
        (operation, refused.map_or(seen, |error| fault(error, at)))
    }

    /// Sets the control bits that differ.
    fn switch(&self, from: Control, to: Control, expected: &mut Vec<(Operation, Seen)>) {
        if from.wp != to.wp {
            expected.push((cr0(if to.wp { CR0 } else { CR0 & !WP }), DONE));
        }
        if (from.smep, from.smap) != (to.smep, to.smap) {
            let smep = if to.smep { SMEP } else { 0 };
            let smap = if to.smap { SMAP } else { 0 };
            let value = self.stage.cr4() | smep | smap;
            expected.push((self.stage.switch_cr4(value), DONE));
        }
        if from.nxe != to.nxe {
            let efer_value = self.stage.efer();
            expected.push((efer(if to.nxe { efer_value | NXE } else { efer_value & !NXE }), DONE));
            expected.push((cr3(self.stage.root), DONE));
        }
    }

    fn start(&self) -> Control {
        Control { wp: true, nxe: self.stage.paging.has_nx(), ..Control::default() }
    }
}

/// The control bits by number.
fn control(bits: u32, nxe: bool) -> Control {
    Control { wp: bits & 1 != 0, smep: bits & 2 != 0, smap: bits & 4 != 0, nxe }
}

fn combinations(level: u32) -> Outcome {
    in_each_mode(|paging| {
        let pages = Pages::new(paging, level)?;
        let mut last = pages.start();
        for bits in 0..8 {
            let mut expected = Vec::new();
            let next = control(bits, paging.has_nx());
            pages.switch(last, next, &mut expected);
            // Twice: the first round fills the translation caches, the second uses them.
            pages.all_accesses(next, &mut expected);
            pages.all_accesses(next, &mut expected);
            pages.stage.expect(&format!("{next:?}"), &expected)?;
            last = next;
        }
        Ok(())
    })
}

fn every_combination_is_as_the_architecture_says() -> Outcome {
    combinations(1)
}

fn every_combination_in_large_pages_is_as_the_architecture_says() -> Outcome {
    combinations(2)
}

/// A generator of numbers that look random (xorshift64).
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn permissions_of_all_levels_are_combined() -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::new(paging)?;
        let va = paging.at();
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        let mut state = 0x9e37_79b9_7f4a_7c15 + u64::from(paging.levels());
        let places: Outcome<Vec<u64>> =
            (1..=paging.levels()).rev().map(|level| stage.tree().entry(va, level)).collect();
        let places = places?;
        let targets: Vec<u64> = places.iter().map(|at| paging.target(stage.entry(*at))).collect();
        let control = Control { wp: true, nxe: paging.has_nx(), ..Control::default() };
        for round in 0..40 {
            let (mut expected, mut entries) = (Vec::new(), Vec::new());
            for (index, (at, target)) in places.iter().zip(&targets).enumerate() {
                let dice = random(&mut state);
                let level = paging.levels() - index as u32;
                let mut flags = ALL;
                // Mostly one level refuses something.
                for bit in [WRITABLE, USER] {
                    flags &= if dice >> (bit * 3) & 3 == 0 { !bit } else { !0 };
                }
                flags |= if paging.has_nx() && dice >> 20 & 7 == 0 { NX } else { 0 };
                if paging.table_flags(level) == PRESENT && level != 1 {
                    flags = PRESENT;
                }
                entries.push(flags);
                expected.push((stage.set_entry(*at, target | flags), DONE));
            }
            expected.push((cr3(stage.root), DONE));
            for kind in KINDS {
                for user in [false, true] {
                    let access = Access { kind, user, ac: false };
                    let (operation, at, seen) = match kind {
                        Kind::Read => (read(va + 8), va + 8, value(tag(frame))),
                        Kind::Write => (write(va + 16, 1), va + 16, DONE),
                        Kind::Fetch => (fetch(va), va, value(tag(frame))),
                    };
                    let operation = if user { operation.user() } else { operation };
                    let refused = control.fault(paging, &entries, access);
                    expected.push((operation, refused.map_or(seen, |error| fault(error, at))));
                }
            }
            stage.expect(&format!("round {round}, {entries:x?}"), &expected)?;
        }
        Ok(())
    })
}

fn every_toggle_takes_effect_at_once() -> Outcome {
    in_each_mode(|paging| {
        let pages = Pages::new(paging, 1)?;
        let mut last = pages.start();
        // Each pair of states, there and back.
        for from in 0..8 {
            for to in 0..8 {
                let mut expected = Vec::new();
                for bits in [from, to] {
                    let next = control(bits, paging.has_nx());
                    pages.switch(last, next, &mut expected);
                    pages.all_accesses(next, &mut expected);
                    last = next;
                }
                pages.stage.expect(&format!("{from:03b} to {to:03b}"), &expected)?;
            }
        }
        Ok(())
    })
}

fn nxe_takes_effect_after_a_flush() -> Outcome {
    oracle::not_of_stock_shadow_paging("its pages do not know EFER.NXE")?;
    in_each_mode(|paging| {
        if !paging.has_nx() {
            return Ok(());
        }
        let pages = Pages::new(paging, 1)?;
        let mut last = pages.start();
        for bits in [1, 3, 7, 5, 4, 6, 2, 0] {
            for nxe in [false, true] {
                let mut expected = Vec::new();
                let next = control(bits, nxe);
                pages.switch(last, next, &mut expected);
                pages.all_accesses(next, &mut expected);
                pages.stage.expect(&format!("{next:?}"), &expected)?;
                last = next;
            }
        }
        Ok(())
    })
}

fn wp_off_shows_user_mode_nothing_new() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | PRESENT | USER);
        let number = value(tag(frame));
        let mut expected = vec![(cr0(CR0 & !WP), DONE)];
        for _ in 0..3 {
            expected.extend([
                (write(va + 16, 1), DONE),
                // The kernel has written; user mode may still read, and only read.
                (read(va + 8).user(), number),
                (write(va + 16, 2).user(), fault(P | W | U, va + 16)),
                (fetch(va).user(), number),
                (add(va + 16, 1), value(1)),
                (fetch(va), number),
                (write(va + 24, 2).user(), fault(P | W | U, va + 24)),
            ]);
        }
        expected.extend([(cr0(CR0), DONE), (write(va + 16, 9), fault(P | W, va + 16))]);
        stage.expect("without WP", &expected)?;
        equal("memory", stage.memory().read(frame + 16) & 0xffff_ffff, 2)
    })
}

fn a_page_written_without_wp_is_read_only_again() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let mut expected = Vec::new();
        for page in 0..8 {
            let (frame, user) = (stage.frame(), if page % 2 == 0 { USER } else { 0 });
            let at = va + page * PAGE;
            stage.map(at, 1, frame | PRESENT | user);
            for round in 0..3 {
                expected.extend([
                    (write(at + 16, round), fault(P | W, at + 16)),
                    (cr0(CR0 & !WP), DONE),
                    (write(at + 16, round), DONE),
                    (cr0(CR0), DONE),
                    (write(at + 16, 9), fault(P | W, at + 16)),
                    (read(at + 16), value(round)),
                ]);
            }
        }
        stage.expect("toggled", &expected)
    })
}

fn smep_and_wp_off_together_hold() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | PRESENT | USER);
        let with = stage.cr4() | SMEP;
        let number = value(tag(frame));
        let mut expected = vec![(cr0(CR0 & !WP), DONE)];
        let switch = |value| (stage.switch_cr4(value), DONE);
        expected.push(switch(with));
        expected.extend([
            (write(va + 16, 1), DONE),
            (fetch(va), fault(P | F, va)),
            (fetch(va).user(), number),
            (write(va + 16, 2), DONE),
            (fetch(va), fault(P | F, va)),
        ]);
        expected.push(switch(with & !SMEP));
        expected.extend([(fetch(va), number), (write(va + 16, 3), DONE), (fetch(va), number)]);
        expected.push(switch(with | SMAP));
        expected.extend([
            (write(va + 16, 4), fault(P | W, va + 16)),
            (write(va + 16, 5).with_ac(), DONE),
            (fetch(va), fault(P | F, va)),
            (read(va + 16).user(), value(5)),
            (read(va + 16), fault(P, va + 16)),
        ]);
        expected.push(switch(with & !SMEP));
        expected.push((read(va + 16), value(5)));
        stage.expect("a page that the kernel may write and not execute", &expected)
    })
}

/// After more was permitted, an access is refused once at most: what is left of the old translation goes by that fault.
fn widened_permissions_need_no_flush() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let nx = if paging.has_nx() { NX } else { 0 };
        let at = stage.map(va, 1, frame | PRESENT | nx);
        let steps: [(u64, &[Operation]); 3] = [
            (PRESENT | USER | nx, &[read(va + 8).user()]),
            (ALL | nx, &[write(va + 16, 1), write(va + 16, 2).user()]),
            (ALL, &[fetch(va), fetch(va).user()]),
        ];
        stage.run(&[read(va + 8), write(va, 0), read(va).user(), fetch(va)])?;
        for (flags, operations) in steps {
            stage.one(stage.set_entry(at, frame | flags | ACCESSED))?;
            for operation in operations {
                let seen = stage.run(&[*operation, *operation])?;
                let done = matches!(seen[1], Seen::Value(_));
                crate::outcome::holds(&format!("{operation:x?} done at last"), done, &seen)?;
            }
        }
        Ok(())
    })
}
