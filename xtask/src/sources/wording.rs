//! What the C glue has to say in so many words, since no test can see that it is not said: an order of memory accesses that
//! the emulated machines keep anyway, a wait that is mostly none, a charge of a single page.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A file of `linux/glue`, a function of it (none: the whole file), what has to be there, and what may not be.
struct Rule {
    file: &'static str,
    function: &'static str,
    has: &'static str,
    lacks: &'static str,
}

const RULES: [Rule; 4] = [
    // The state is set before the condition is looked at: a full barrier, without which a wake-up can be lost.
    Rule {
        file: "sched.c",
        function: "gnt_waiter_prepare",
        has: "set_current_state(",
        lacks: "__set_current_state(",
    },
    // Who cancels frees: a handler that runs on another CPU is waited for.
    Rule {
        file: "timer.c",
        function: "gnt_timer_cancel",
        has: "hrtimer_cancel(",
        lacks: "hrtimer_try_to_cancel(",
    },
    // Who flushes frees: true is to wait.
    Rule { file: "smp.c", function: "gnt_sync_end", has: ", true);", lacks: ", false);" },
    // A VMM's memory is charged to it, and so is what a VM takes of the kernel's.
    Rule { file: "mm.c", function: "", has: "GFP_KERNEL_ACCOUNT", lacks: "GFP_KERNEL" },
];

/// What is missing in the glue of the workspace at `root`, or there in spite of a rule.
pub fn check(root: &Path, _crates: &[PathBuf]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for rule in &RULES {
        let path = root.join("linux/glue").join(rule.file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        findings.extend(broken(rule, &text));
    }
    Ok(findings)
}

/// What a text does against a rule.
fn broken(rule: &Rule, text: &str) -> Option<String> {
    let place = match rule.function {
        "" => rule.file.to_owned(),
        function => format!("{} {function}", rule.file),
    };
    let Some(body) = body(text, rule.function) else {
        return Some(format!("{place} is not there"));
    };
    if !words(body, rule.has) {
        return Some(format!("{place} has no {}", rule.has));
    }
    words(body, rule.lacks).then(|| format!("{place} has {}", rule.lacks))
}

/// A function from its name to the brace that ends it.
fn body<'a>(text: &'a str, function: &str) -> Option<&'a str> {
    if function.is_empty() {
        return Some(text);
    }
    let from = &text[text.find(&format!("{function}("))?..];
    Some(&from[..from.find("\n}")?])
}

/// Whether `text` has `wanted`, which no letter goes on with at either end.
fn words(text: &str, wanted: &str) -> bool {
    let letter = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let ends_in_one = letter(wanted.as_bytes().last());
    text.match_indices(wanted).any(|(at, _)| {
        let (before, after) = (&text.as_bytes()[..at], &text.as_bytes()[at + wanted.len()..]);
        let begins = !letter(wanted.as_bytes().first()) || !letter(before.last());
        begins && !(ends_in_one && letter(after.first()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_broken_by_what_is_missing_and_by_what_is_there() {
        let [state, _, _, charge] = &RULES;
        let function = |call| format!("void gnt_waiter_prepare(w)\n{{\n\t{call}(1);\n}}\n");
        assert_eq!(broken(state, &function("set_current_state")), None);
        assert!(broken(state, &function("__set_current_state")).is_some());
        assert!(broken(state, &function("nothing")).is_some());
        assert!(broken(state, "").is_some());
        assert_eq!(broken(charge, "a = GFP_KERNEL_ACCOUNT | x;"), None);
        assert!(broken(charge, "a = GFP_KERNEL_ACCOUNT; b = GFP_KERNEL;").is_some());
    }

    #[test]
    fn what_stands_behind_a_function_is_not_its_own() {
        let text = "int f(void)\n{\n\tone();\n}\n\nint g(void)\n{\n\ttwo();\n}\n";
        assert_eq!(body(text, "f"), Some("f(void)\n{\n\tone();"));
        assert_eq!(body(text, "h"), None);
    }
}
