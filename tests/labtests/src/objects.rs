//! What the kernel has in use, by its own accounts: finer than free memory, which others use as well.

use crate::outcome::{Outcome, fail, skip};

const ACCOUNT: &str = "/proc/slabinfo";

/// The objects of one kind that are in use, in all caches whose names begin so.
fn in_use(kind: &str) -> Option<i64> {
    let names = |text: &str| -> Vec<(String, i64)> {
        let line = |line: &str| {
            let mut words = line.split_whitespace();
            Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
        };
        text.lines().filter_map(line).filter(|(name, _)| name.starts_with(kind)).collect()
    };
    for (name, _) in names(&std::fs::read_to_string(ACCOUNT).ok()?) {
        // What CPUs keep for themselves counts as used until it is given back; so does what an address sanitizer holds back.
        let _ = std::fs::write(format!("/sys/kernel/slab/{name}/shrink"), "1");
    }
    let counts = names(&std::fs::read_to_string(ACCOUNT).ok()?);
    (!counts.is_empty()).then(|| counts.iter().map(|(_, count)| count).sum())
}

/// Does `work`, which makes `count` objects of a kind and has to give them back.
pub fn gives_back(kind: &str, count: i64, mut work: impl FnMut() -> Outcome) -> Outcome {
    // What is made once and kept is made here.
    work()?;
    let Some(before) = in_use(kind) else { return skip(format!("{ACCOUNT} tells of no {kind}")) };
    work()?;
    let mut kept = 0;
    // Some of it the kernel frees later.
    for _ in 0..20 {
        kept = in_use(kind).unwrap_or_default() - before;
        if kept < count / 2 {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    fail(format!("{kind}: expected all of {count} objects back got {kept} more in use"))
}
