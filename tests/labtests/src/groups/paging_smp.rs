//! Two vCPUs over the same tables: shootdowns by interrupt, one that changes while the other walks, bits that both set
//! (APM vol. 2 §5.5.2).

use std::time::Duration;

use crate::machine::layout::PORT_DONE;
use crate::machine::memory::PAGE;
use crate::machine::stage::layout::SHOOTDOWN;
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{Stage, in_each_mode, tag};
use crate::machine::threads::{Target, within};
use crate::outcome::{Answer, Outcome, equal, fail, holds};
use crate::runner::tests;

tests!("paging_smp":
    a_shootdown_ends_the_old_translation_on_the_other_vcpu,
    a_shootdown_takes_a_permission_away_on_the_other_vcpu,
    each_vcpu_has_its_own_root,
    one_changes_a_table_while_the_other_uses_it,
    both_make_tables_at_once,
    bits_that_one_clears_are_set_by_the_other,
);

/// What the shootdown's handler answers, and what it is to answer.
const ANSWER: u64 = SHOOTDOWN + 8;
const SEQUENCE: u64 = SHOOTDOWN + 16;
/// Words by which the two tell each other how far they are.
const FIRST: u64 = 0xe200;
const SECOND: u64 = 0xe240;

/// Runs both lists to their ends; what came of each.
fn both(stage: &Stage, lists: [&[Operation]; 2]) -> Outcome<[Vec<Seen>; 2]> {
    let targets = [Target::new(), Target::new()];
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|index| {
            stage.load(index, lists[index]);
            let target = &targets[index];
            scope.spawn(move || {
                target.is_me();
                match stage.guest.vcpus[index].run().granted("KVM_RUN")? {
                    exit if exit.is_out(PORT_DONE) => Ok(()),
                    exit => stage.stray(index, &exit),
                }
            })
        });
        let ended = within(Duration::from_secs(30), || threads.iter().all(|t| t.is_finished()));
        if !ended {
            for (vcpu, target) in stage.guest.vcpus.iter().zip(&targets) {
                vcpu.set_immediate_exit(1);
                target.kick();
            }
        }
        let mut outcomes = threads.map(|t| t.join().unwrap_or_else(|_| fail("a thread died")));
        holds("an end of both", ended, &outcomes)?;
        outcomes.iter_mut().try_for_each(|outcome| std::mem::replace(outcome, Ok(())))
    })?;
    Ok([0, 1].map(|index| stage.seen(index, lists[index].len())))
}

/// Runs both lists at once, on a vCPU each; every operation came out as expected.
fn both_expect(stage: &Stage, expected: [&[(Operation, Seen)]; 2]) -> Outcome {
    let lists = expected.map(|list| list.iter().map(|(step, _)| *step).collect::<Vec<_>>());
    let seen = both(stage, [&lists[0], &lists[1]])?;
    for vcpu in 0..2 {
        for (index, (seen, (step, expected))) in seen[vcpu].iter().zip(expected[vcpu]).enumerate() {
            equal(&format!("vCPU {vcpu}, step {index}, {step:x?}"), *seen, *expected)?;
        }
    }
    Ok(())
}

/// A shootdown in each round: the first vCPU changes the entry of `va` to what `entry` says, the second sees `seen` by
/// `operation` after.
fn shootdowns(
    entry: impl Fn(u64, [u64; 2]) -> u64,
    operation: impl Fn(u64) -> Operation,
    seen: impl Fn(u64, [u64; 2], u64) -> Seen,
) -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::with_vcpus(paging, 2)?;
        let va = paging.at();
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, entry(0, frames));
        stage.memory().write(SHOOTDOWN, va);
        // The second uses the old translation before the first begins.
        let mut first = vec![(wait(SECOND, 0x1000), DONE)];
        let mut second = vec![(operation(va), seen(0, frames, va)), (write(SECOND, 0x1000), DONE)];
        for round in 1..=40 {
            first.extend([
                (stage.set_entry(at, entry(round, frames)), DONE),
                (invlpg(va), DONE),
                (write(SEQUENCE, round), DONE),
                (send(1), DONE),
                (wait(ANSWER, round), DONE),
                (write(FIRST, round), DONE),
                (wait(SECOND, round), DONE),
            ]);
            second.extend([
                (wait(FIRST, round), DONE),
                (operation(va), seen(round, frames, va)),
                (write(SECOND, round), DONE),
            ]);
        }
        both_expect(&stage, [&first, &second])
    })
}

fn a_shootdown_ends_the_old_translation_on_the_other_vcpu() -> Outcome {
    let entry = |round, frames: [u64; 2]| frames[round as usize % 2] | ALL;
    let seen = |round, frames: [u64; 2], _| value(tag(frames[round as usize % 2]));
    shootdowns(entry, |va| read(va + 8), seen)?;
    shootdowns(entry, |va| fetch(va).user(), seen)
}

fn a_shootdown_takes_a_permission_away_on_the_other_vcpu() -> Outcome {
    let entry = |round: u64, frames: [u64; 2]| {
        let writable = round.is_multiple_of(2);
        frames[0] | PRESENT | USER | if writable { WRITABLE } else { 0 }
    };
    let seen = |round, _, va| if round % 2 == 0 { DONE } else { fault(P | W, va + 16) };
    shootdowns(entry, |va| write(va + 16, 1), seen)
}

fn each_vcpu_has_its_own_root() -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::with_vcpus(paging, 2)?;
        let va = paging.at();
        let roots = [stage.root, stage.light_root(), stage.light_root()];
        let frames = [stage.frame(), stage.frame(), stage.frame()];
        for (root, frame) in roots.into_iter().zip(frames) {
            stage.map_in(root, va, 1, frame | ALL);
        }
        let list = |vcpu: usize| {
            let mut expected = Vec::new();
            for round in 0..200 {
                let index = (round * (vcpu + 1) + vcpu) % 3;
                expected.push((cr3(roots[index]), DONE));
                expected.push((read(va + 8), value(tag(frames[index]))));
                expected.push((write(va + 16 + 8 * vcpu as u64, 1).user(), DONE));
            }
            expected
        };
        both_expect(&stage, [&list(0), &list(1)])
    })
}

fn one_changes_a_table_while_the_other_uses_it() -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::with_vcpus(paging, 2)?;
        let va = paging.at();
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL);
        let directory = stage.tree().entry(va, 2)?;
        let link = stage.entry(directory);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for round in 0..300 {
            first.push(match round % 4 {
                0 => stage.set_entry(at, frames[1] | ALL),
                1 => stage.set_entry(at, frames[0] | PRESENT | USER),
                2 => stage.set_entry(directory, 0),
                _ => stage.set_entry(directory, link),
            });
            first.push(invlpg(va));
            second.extend([read(va + 8), write(va + 16, 7).user(), invlpg(va)]);
        }
        first.extend([stage.set_entry(at, frames[1] | ALL), write(FIRST, 1)]);
        second.extend([wait(FIRST, 1), cr3(stage.root), read(va + 8)]);
        let seen = both(&stage, [&first, &second])?;
        let numbers = frames.map(|frame| value(tag(frame)));
        for steps in seen[1][..900].chunks(3) {
            let fine = numbers.contains(&steps[0]) || steps[0] == fault(0, va + 8);
            holds("a frame or a fault", fine, steps[0])?;
            let fine = [DONE, fault(P | W | U, va + 16), fault(W | U, va + 16)].contains(&steps[1]);
            holds("a write or a fault", fine, steps[1])?;
        }
        equal("at last", seen[1][902], numbers[1])
    })
}

fn both_make_tables_at_once() -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::with_vcpus(paging, 2)?;
        let va = paging.at();
        let mut lists = [Vec::new(), Vec::new()];
        for index in 0..120_u64 {
            let (frame, table) = (stage.frame(), stage.tables.page());
            let own = va + index * paging.span(2);
            let link = stage.place_of(own, 2);
            let at = table + paging.offset(own, 1);
            lists[index as usize % 2].extend([
                (fill(table, 0), DONE),
                (stage.set_entry(link, table | ALL), DONE),
                (read(own), fault(0, own)),
                (stage.set_entry(at, frame | ALL), DONE),
                (read(own + 8).user(), value(tag(frame))),
                (write(own + 16, index), DONE),
                (stage.set_entry(at, 0), DONE),
                (invlpg(own), DONE),
                (write(own + 16, index), fault(W, own + 16)),
            ]);
        }
        both_expect(&stage, [&lists[0], &lists[1]])
    })
}

fn bits_that_one_clears_are_set_by_the_other() -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::with_vcpus(paging, 2)?;
        let va = paging.at();
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | ALL);
        stage.memory().write(SHOOTDOWN, va);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let clean = frame | ALL;
        for round in 1..=40 {
            first.extend([
                (stage.set_entry(at, clean), DONE),
                (invlpg(va), DONE),
                (write(SEQUENCE, round), DONE),
                (send(1), DONE),
                (wait(ANSWER, round), DONE),
                (write(FIRST, round), DONE),
                (wait(SECOND, round), DONE),
                (read(at), value(clean | ACCESSED | if round % 2 == 0 { DIRTY } else { 0 })),
            ]);
            second.extend([
                (wait(FIRST, round), DONE),
                if round % 2 == 0 {
                    (write(va + 16, round).user(), DONE)
                } else {
                    (read(va + 8), value(tag(frame)))
                },
                (write(SECOND, round), DONE),
            ]);
        }
        stage.frame();
        stage.map(va + PAGE, 1, frame | ALL);
        both_expect(&stage, [&first, &second])
    })
}
