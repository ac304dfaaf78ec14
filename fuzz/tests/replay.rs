//! The corpus and some thousand random inputs, without an engine: what a fuzzer found once stays found.

use std::path::Path;

use gannet_fuzz::{TARGETS, Target};

/// splitmix64: the same sequence on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let entries =
        std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Every file of the corpus, and `count` inputs of random length, each at random bytes or a random change of a file.
fn replay(name: &str, count: u64) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let corpus = corpus(target);
    assert!(!corpus.is_empty(), "{name} has no corpus");
    for input in &corpus {
        assert!(input.len() <= target.longest);
        (target.run)(input);
    }
    let mut random = Random(1);
    for n in 0..count {
        let mut input = if n % 2 == 0 {
            let len = random.next() as usize % target.longest;
            (0..len).map(|_| random.next() as u8).collect()
        } else {
            corpus[random.next() as usize % corpus.len()].clone()
        };
        for _ in 0..random.next() % 4 {
            if !input.is_empty() {
                let at = random.next() as usize % input.len();
                input[at] = random.next() as u8;
            }
        }
        (target.run)(&input);
    }
}

macro_rules! targets {
    ($($name:ident: $count:literal;)*) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name), $count);
        })*

        #[test]
        fn every_target_is_replayed() {
            let names = [$(stringify!($name)),*];
            assert_eq!(TARGETS.iter().map(|target| target.name).collect::<Vec<_>>(), names);
        }
    };
}

targets! {
    walk: 10_000;
    shadow: 10;
    nested_tables: 10;
    emulate: 2_000;
    decode: 10_000;
    ioctl: 100;
    lapic: 1_000;
    msr: 200;
    cpuid: 500;
    nested_vmx: 500;
    nested_svm: 500;
}
