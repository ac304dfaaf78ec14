//! Tables that are changed at random, used at random, and compared with a model after every access. The seed is in the
//! failure's text; `LABTESTS_SEEDS=100` runs so many instead of a few.

use std::collections::{HashMap, HashSet};

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::memory::PAGE;
use crate::machine::stage::model::{Access, Control, KINDS, Kind};
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{CR0, Stage, WP, in_each_mode, tag};
use crate::outcome::{Answer, Outcome, Trouble, equal, fail};
use crate::runner::tests;

tests!("paging_torture":
    random_tables_are_walked_as_the_model_says,
    random_tables_with_few_pages_for_shadows,
    random_tables_that_change_role,
);

/// Seeds that are tried, unless the environment asks for another number.
const SEEDS: u64 = 3;
/// Accesses and changes of one seed.
const STEPS: usize = 2500;

/// A generator of numbers that look random (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }

    fn one_in(&mut self, chance: u64) -> bool {
        self.below(chance) == 0
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }
}

/// The tables as they should be.
struct Model {
    paging: Paging,
    /// Entries of the pages that change, by their place; absent ones are zero.
    entries: HashMap<u64, u64>,
    /// Places whose accessed bit a walk that failed further down may have set.
    perhaps_accessed: HashSet<u64>,
    /// Entries of the roots that belong to the program.
    fixed: HashSet<u64>,
    /// Words of the data frames.
    words: HashMap<u64, u64>,
    control: Control,
    root: u64,
}

impl Model {
    fn entry(&self, at: u64) -> u64 {
        self.entries.get(&at).copied().unwrap_or(0)
    }

    /// The places and entries of a walk, as far as it gets, and the level where it ended.
    fn walk(&self, va: u64) -> (Vec<u64>, Vec<u64>, u32) {
        let (mut places, mut entries) = (Vec::new(), Vec::new());
        let mut table = self.root;
        for level in (1..=self.paging.levels()).rev() {
            let at = table + self.paging.offset(va, level);
            let entry = self.entry(at);
            places.push(at);
            entries.push(entry);
            if entry & PRESENT == 0 || level == 1 || entry & LARGE != 0 && level == 2 {
                return (places, entries, level);
            }
            table = self.paging.target(entry);
        }
        (places, entries, 0)
    }

    /// What an access comes to; sets the bits that it sets.
    fn access(&mut self, va: u64, access: Access, written: u64) -> Seen {
        let (places, entries, level) = self.walk(va);
        let top = usize::from(self.paging == Paging::Pae);
        if let Some(error) = self.control.fault(self.paging, &entries, access) {
            self.perhaps_accessed.extend(&places[top..]);
            return fault(error, va);
        }
        for place in &places[top..] {
            *self.entries.entry(*place).or_default() |= ACCESSED;
        }
        let Some((leaf, entry)) = places.last().zip(entries.last()) else { return DONE };
        let base = self.paging.target(*entry) & !(self.paging.span(level) - 1);
        let gpa = base + (va & (self.paging.span(level) - 1));
        match access.kind {
            Kind::Write => {
                *self.entries.entry(*leaf).or_default() |= DIRTY;
                self.words.insert(gpa, written);
                DONE
            }
            Kind::Read => match gpa % PAGE {
                8 => value(tag(gpa)),
                _ => value(self.words.get(&gpa).copied().unwrap_or(0)),
            },
            Kind::Fetch => value(tag(gpa)),
        }
    }
}

/// One run: the stage, the model, and the pages that they play with.
struct Game {
    stage: Stage,
    model: Model,
    dice: Dice,
    /// The pages that are tables of each level below the root's, by level from 1.
    tables: Vec<Vec<u64>>,
    roots: Vec<u64>,
    frames: Vec<u64>,
    larges: Vec<u64>,
    indices: Vec<Vec<u64>>,
    steps: Vec<(Operation, Seen)>,
}

impl Game {
    fn new(paging: Paging, seed: u64) -> Outcome<Self> {
        let mut stage = Stage::new(paging)?;
        let mut dice = Dice(seed << 8 | u64::from(paging.levels()));
        let roots: Vec<u64> = vec![stage.light_root(), stage.light_root(), stage.light_root()];
        let (mut entries, mut fixed) = (HashMap::new(), HashSet::new());
        for root in &roots {
            for at in (*root..*root + PAGE).step_by(paging.entry_bytes() as usize) {
                entries.insert(at, stage.entry(at));
                fixed.extend((stage.entry(at) != 0).then_some(at));
            }
        }
        // The top of PAE stays as it is: its directories are the tables of level 2.
        let pae = paging == Paging::Pae;
        let mut tables = Vec::new();
        for level in 1..paging.levels() {
            let page = |index: usize| match pae && level == 2 {
                true => paging.target(entries[&(roots[index / 3] + (1 + index as u64 % 3) * 8)]),
                false => stage.tables.page(),
            };
            tables.push((0..if pae && level == 2 { 9 } else { 5 }).map(page).collect());
        }
        let frames = (0..6).map(|_| stage.frame()).collect();
        let larges = vec![stage.large_frame()];
        // A few indices of each level; those of the root's keep clear of the program's.
        let indices = (1..=paging.levels()).map(|level| {
            match (pae && level == 3, level == paging.levels()) {
                (true, _) => vec![1, 2, 3],
                (_, true) => vec![200, 257, 300],
                _ => vec![0, 1, dice.below(509) + 2, 511],
            }
        });
        let indices = indices.collect();
        let control = Control { wp: true, nxe: paging.has_nx(), ..Control::default() };
        let root = roots[0];
        let model = Model {
            paging,
            entries,
            perhaps_accessed: HashSet::new(),
            fixed,
            words: HashMap::new(),
            control,
            root,
        };
        let steps = vec![(cr3(root), DONE)];
        Ok(Self { stage, model, dice, tables, roots, frames, larges, indices, steps })
    }

    /// The place of an entry that may change, and its level.
    fn place(&mut self) -> (u64, u32) {
        let paging = self.model.paging;
        let highest = if paging == Paging::Pae { 2 } else { paging.levels() };
        let level = 1 + self.dice.below(highest.into()) as u32;
        let pages =
            if level == paging.levels() { &self.roots } else { &self.tables[level as usize - 1] };
        let page = self.dice.of(pages);
        let index = self.dice.of(&self.indices[level as usize - 1]);
        (page + index * paging.entry_bytes(), level)
    }

    /// An entry for a level.
    fn entry(&mut self, level: u32) -> u64 {
        let paging = self.model.paging;
        if self.dice.one_in(5) {
            return 0;
        }
        let mut entry = match level {
            1 => self.dice.of(&self.frames),
            2 if self.dice.one_in(6) => self.dice.of(&self.larges) | LARGE,
            _ => self.dice.of(&self.tables[level as usize - 2]),
        };
        entry |= ALL;
        for bit in [WRITABLE, USER] {
            entry &= if self.dice.one_in(6) { !bit } else { !0 };
        }
        entry |= if paging.has_nx() && self.dice.one_in(10) { NX } else { 0 };
        entry |= if self.dice.one_in(3) { ACCESSED } else { 0 };
        entry | if level == 1 && self.dice.one_in(4) { DIRTY } else { 0 }
    }

    /// Changes an entry, and flushes if that is needed.
    fn change(&mut self) {
        let mut flush = false;
        for _ in 0..1 + self.dice.below(3) {
            let (at, level) = self.place();
            let entry = self.entry(level);
            let old = self.model.entry(at);
            flush |= old & PRESENT != 0;
            let (paging, narrow) = (self.model.paging, self.dice.one_in(3));
            match paging {
                // In two halves, the one with the present bit last where it comes and first where it goes.
                Paging::Pae if narrow => {
                    let halves = [write(at, entry & 0xffff_ffff), write(at + 4, entry >> 32)];
                    let order = if entry & PRESENT == 0 { [0, 1] } else { [1, 0] };
                    let halves = order.map(|half| (halves[half], DONE));
                    if old & PRESENT != 0 && entry & PRESENT != 0 {
                        self.steps.push((write(at, 0), DONE));
                    }
                    self.steps.extend(halves);
                }
                _ => self.steps.push((self.stage.set_entry(at, entry), DONE)),
            }
            self.model.entries.insert(at, entry);
            self.model.perhaps_accessed.remove(&at);
        }
        if flush {
            self.steps.push((cr3(self.model.root), DONE));
        }
    }

    fn access(&mut self) {
        let paging = self.model.paging;
        let mut va = 0;
        for level in 1..=paging.levels() {
            va += self.dice.of(&self.indices[level as usize - 1]) * paging.span(level);
        }
        let sign = match paging {
            Paging::Four => 47,
            Paging::Five => 56,
            _ => 63,
        };
        va |= if va >> sign & 1 != 0 { u64::MAX << sign } else { 0 };
        let access = Access { kind: self.dice.of(&KINDS), user: self.dice.one_in(2), ac: false };
        let number = self.dice.below(1 << 30);
        let (operation, va) = match access.kind {
            Kind::Read if self.dice.one_in(2) => (read(va + 8), va + 8),
            Kind::Read => (read(va + 16), va + 16),
            Kind::Write => (write(va + 16, number), va + 16),
            Kind::Fetch => (fetch(va), va),
        };
        let operation = if access.user { operation.user() } else { operation };
        let seen = self.model.access(va, access, number);
        self.steps.push((operation, seen));
    }

    fn other_root(&mut self) {
        self.model.root = self.dice.of(&self.roots);
        self.steps.push((cr3(self.model.root), DONE));
    }

    fn other_role(&mut self) {
        self.model.control.wp ^= true;
        self.steps.push((cr0(if self.model.control.wp { CR0 } else { CR0 & !WP }), DONE));
    }

    /// Does what was planned, compares it, and the tables and frames after it.
    fn play(&mut self) -> Outcome {
        for (index, steps) in self.steps.chunks(1500).enumerate() {
            self.stage.expect(&format!("part {index}"), steps)?;
        }
        self.steps.clear();
        let mask = if self.model.paging == Paging::Legacy { 0xffff_ffff } else { u64::MAX };
        let pages = self.tables.iter().flatten().chain(&self.roots);
        let bytes = self.model.paging.entry_bytes();
        for at in pages.flat_map(|page| (*page..page + PAGE).step_by(bytes as usize)) {
            let open = if self.model.perhaps_accessed.contains(&at) { ACCESSED } else { 0 };
            let (found, expected) = (self.stage.entry(at), self.model.entry(at) & mask);
            if self.model.fixed.contains(&at) {
                continue;
            }
            if (found ^ expected) & !open != 0 {
                return fail(format!("entry at {at:#x}: expected {expected:#x} got {found:#x}"));
            }
            // What it is, it stays.
            self.model.perhaps_accessed.remove(&at);
            if found != 0 || self.model.entries.contains_key(&at) {
                self.model.entries.insert(at, found);
            }
        }
        for (gpa, expected) in &self.model.words {
            let found = self.stage.memory().read_bytes(*gpa, 4);
            let found = u64::from(u32::from_le_bytes(found.try_into().unwrap_or_default()));
            equal(&format!("word at {gpa:#x}"), found, *expected)?;
        }
        Ok(())
    }
}

/// Plays with several seeds in each mode; `step` does one more step besides changes and accesses.
fn torture(prepare: impl Fn(&Stage) -> Outcome, step: impl Fn(&mut Game)) -> Outcome {
    let seeds = std::env::var("LABTESTS_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    in_each_mode(|paging| {
        for seed in 0..seeds.unwrap_or(SEEDS) {
            let named = |trouble| match trouble {
                Trouble::Failed(reason) => Trouble::Failed(format!("seed {seed}: {reason}")),
                skipped => skipped,
            };
            let mut game = Game::new(paging, seed).map_err(named)?;
            prepare(&game.stage).map_err(named)?;
            for part in 0..STEPS / 250 {
                while game.steps.len() < 250 {
                    match game.dice.below(12) {
                        0..=2 => game.change(),
                        // At first the tables have to come about.
                        3 if part == 0 => (0..8).for_each(|_| game.change()),
                        4 => step(&mut game),
                        5 if game.dice.one_in(4) => game.steps.push((CPUID, DONE)),
                        _ => game.access(),
                    }
                }
                game.play().map_err(named)?;
            }
        }
        Ok(())
    })
}

fn random_tables_are_walked_as_the_model_says() -> Outcome {
    torture(|_| Ok(()), Game::other_root)
}

fn random_tables_with_few_pages_for_shadows() -> Outcome {
    let few = |stage: &Stage| {
        stage.guest.vm.call(ioctl::SET_NR_MMU_PAGES, 64).granted("KVM_SET_NR_MMU_PAGES").map(drop)
    };
    torture(few, Game::other_root)
}

fn random_tables_that_change_role() -> Outcome {
    torture(
        |_| Ok(()),
        |game| if game.dice.one_in(3) { game.other_root() } else { game.other_role() },
    )
}
