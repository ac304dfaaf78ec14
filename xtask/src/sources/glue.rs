//! How much C there is. It is the part of the module that no compiler keeps safe, and all that a new kernel breaks: what can be
//! said in Rust is not said there.

use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Lines that are neither comment nor blank.
const MOST: usize = 3_800;

pub fn check(root: &Path, _: &[PathBuf]) -> Result<Vec<String>> {
    let lines = count(&root.join("linux/glue"))?;
    let over =
        (lines > MOST).then(|| format!("linux/glue has {lines} lines of code, {MOST} at most"));
    Ok(over.into_iter().collect())
}

fn count(folder: &Path) -> Result<usize> {
    let mut lines = 0;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "c" || kind == "h") {
            lines += lines_of_code(&fs::read_to_string(path)?);
        }
    }
    Ok(lines)
}

/// Lines of C with something other than comments and blanks.
fn lines_of_code(text: &str) -> usize {
    let mut in_comment = false;
    text.lines().filter(|line| is_code(line, &mut in_comment)).count()
}

fn is_code(line: &str, in_comment: &mut bool) -> bool {
    let (mut rest, mut code) = (line, false);
    while !rest.is_empty() {
        if *in_comment {
            let Some((_, behind)) = rest.split_once("*/") else { return code };
            (rest, *in_comment) = (behind, false);
            continue;
        }
        // No string of the glue's has a comment in it.
        let before = rest.find("/*").unwrap_or(rest.len());
        let (shown, behind) = rest.split_at(before);
        let (shown, ends) = match shown.split_once("//") {
            Some((shown, _)) => (shown, true),
            None => (shown, false),
        };
        code |= !shown.trim().is_empty();
        if ends {
            return code;
        }
        *in_comment = !behind.is_empty();
        rest = behind.get(2..).unwrap_or("");
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_blanks_are_no_code() {
        let text = "// SPDX\n/*\n * int a;\n */\n\n\t\nint b; /* c */\n/* d */ int e;\n/* f */\n} // g\n/* h\ni */ j\n";
        assert_eq!(lines_of_code(text), 4);
    }

    #[test]
    fn more_than_is_allowed_is_told() {
        let folder = std::env::temp_dir().join(format!("gannet-glue-{}", std::process::id()));
        let glue = folder.join("linux/glue");
        fs::create_dir_all(&glue).unwrap();
        let told = |lines: usize| {
            fs::write(glue.join("a.c"), "x;\n".repeat(lines)).unwrap();
            check(&folder, &[]).unwrap().len()
        };
        let found = [told(MOST), told(MOST + 1)];
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [0, 1]);
    }
}
