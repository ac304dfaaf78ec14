//! How a report's JSON lies in its file: an object's fields in a line each, a series of numbers in one line.

use std::io::{self, Write};

use serde_json::ser::Formatter;

/// Two blanks for each level. What stands in an array begins a line only if it is an array or an object.
#[derive(Default)]
pub struct Layout {
    levels: Vec<Level>,
}

/// An array or an object that is being written.
struct Level {
    is_array: bool,
    /// Whether anything stands in it.
    filled: bool,
    /// Whether something in it has begun a line, so that its end does, too.
    lines: bool,
}

impl Layout {
    fn open(&mut self, is_array: bool, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        if self.levels.last().is_some_and(|level| level.is_array) {
            self.break_line(out)?;
        }
        self.levels.push(Level { is_array, filled: false, lines: false });
        out.write_all(if is_array { b"[" } else { b"{" })
    }

    fn close(&mut self, with: &[u8], out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        if self.levels.pop().is_some_and(|level| level.lines) {
            self.indent(out)?;
        }
        out.write_all(with)
    }

    fn break_line(&mut self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        if let Some(level) = self.levels.last_mut() {
            level.lines = true;
        }
        self.indent(out)
    }

    fn indent(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        out.write_all(b"\n")?;
        self.levels.iter().try_for_each(|_| out.write_all(b"  "))
    }

    /// Whether what comes is the first in its array or object.
    fn is_first(&mut self) -> bool {
        self.levels.last_mut().is_none_or(|level| !std::mem::replace(&mut level.filled, true))
    }
}

impl Formatter for Layout {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(true, out)
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(b"]", out)
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, _: bool) -> io::Result<()> {
        if self.is_first() { Ok(()) } else { out.write_all(b",") }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(false, out)
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(b"}", out)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, _: bool) -> io::Result<()> {
        if !self.is_first() {
            out.write_all(b",")?;
        }
        self.break_line(out)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;
    use serde_json::{Serializer, Value, json};

    fn lay_out(value: &Value) -> String {
        let mut text = Vec::new();
        value.serialize(&mut Serializer::with_formatter(&mut text, Layout::default())).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_series_stays_in_its_line() {
        let value = json!({"a": [{"n": "x", "s": [[1, 2], [3]]}, {}], "b": [], "c": {"d": null}});
        let expected = r#"{
  "a": [
    {
      "n": "x",
      "s": [
        [1,2],
        [3]
      ]
    },
    {}
  ],
  "b": [],
  "c": {
    "d": null
  }
}"#;
        assert_eq!(lay_out(&value), expected);
    }

    #[test]
    fn the_layout_changes_nothing_of_the_value() {
        for value in [json!(1), json!([]), json!([[], [1], {"a": ["b", {"c": [true, -1.5]}]}])] {
            assert_eq!(serde_json::from_str::<Value>(&lay_out(&value)).unwrap(), value);
        }
    }
}
