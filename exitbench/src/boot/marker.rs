//! Looks for a marker in a stream of console output, whatever pieces it comes in.

/// Finds one byte sequence in a stream.
#[derive(Clone, Debug)]
pub struct Marker {
    wanted: Vec<u8>,
    /// The last bytes of the stream, at most as many as the marker has.
    tail: Vec<u8>,
    seen: bool,
}

impl Marker {
    /// Looks for `wanted`. An empty marker is never seen.
    pub fn new(wanted: &str) -> Self {
        Self { wanted: wanted.as_bytes().to_vec(), tail: Vec::new(), seen: false }
    }

    /// Whether it came by.
    pub fn seen(&self) -> bool {
        self.seen
    }

    /// Takes the next piece of the stream. `true` when the marker is complete for the first time.
    pub fn feed(&mut self, piece: &[u8]) -> bool {
        if self.seen || self.wanted.is_empty() {
            return false;
        }
        for &byte in piece {
            if self.tail.len() == self.wanted.len() {
                self.tail.remove(0);
            }
            self.tail.push(byte);
            if self.tail == self.wanted {
                self.seen = true;
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_in_pieces_is_seen_once() {
        let mut marker = Marker::new("HELLO");
        let first: Vec<bool> =
            ["xHE", "L", "LO\nHELLO"].iter().map(|p| marker.feed(p.as_bytes())).collect();
        assert_eq!(first, [false, false, true]);
        assert!(!marker.feed(b"HELLO"));
        assert!(marker.seen());
    }

    #[test]
    fn a_false_start_does_not_hide_the_marker() {
        assert!(Marker::new("aab").feed(b"aaab"));
    }

    #[test]
    fn part_of_a_marker_is_none() {
        let mut marker = Marker::new("HELLO");
        assert!(!marker.feed(b"HELL HELL O"));
        assert!(!marker.seen());
        assert!(!Marker::new("").feed(b"anything"));
    }
}
