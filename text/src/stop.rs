//! Stop strings, matched while text streams.

use crate::TextError;

/// Most stop strings of one request.
pub const STOPS_MAX: usize = 16;
/// Longest stop string, in bytes; this much text at most is held back.
pub const STOP_BYTES_MAX: usize = 256;

/// A stop string was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    /// Its index in the list of the request.
    pub index: usize,
}

/// Finds the first stop string to be completed, and holds back text that could be the beginning of one.
///
/// The result does not depend on how the text is split into pieces. The match that ends first wins; of those that end
/// together, the one that starts first; of equal strings, the earlier in the list.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    held: String,
    found: Option<Stop>,
}

impl StopMatcher {
    /// Checks the strings: at most [`STOPS_MAX`], each of 1 to [`STOP_BYTES_MAX`] bytes.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, TextError> {
        if stops.len() > STOPS_MAX {
            return Err(TextError::Stop(format!("at most {STOPS_MAX} stop strings are allowed, got {}", stops.len())));
        }
        if stops.iter().any(|s| s.as_ref().is_empty() || s.as_ref().len() > STOP_BYTES_MAX) {
            return Err(TextError::Stop(format!("a stop string must have 1 to {STOP_BYTES_MAX} bytes")));
        }
        let patterns = stops.iter().map(|s| Pattern::new(s.as_ref().as_bytes())).collect();
        Ok(Self { patterns, held: String::new(), found: None })
    }

    /// Whether there are no stop strings.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Takes the next text; returns the text that may be shown now, and the stop if one is complete. The shown text
    /// ends before the stop string. After a stop, all further output is empty.
    pub fn push(&mut self, text: &str) -> (String, Option<Stop>) {
        if self.found.is_some() {
            return (String::new(), self.found);
        }
        let seen = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let mut longest: Option<(usize, usize)> = None;
            for (index, pattern) in self.patterns.iter_mut().enumerate() {
                if pattern.advance(byte) && longest.is_none_or(|(len, _)| pattern.bytes.len() > len) {
                    longest = Some((pattern.bytes.len(), index));
                }
            }
            if let Some((len, index)) = longest {
                self.held.truncate(seen + i + 1 - len);
                self.found = Some(Stop { index });
                return (std::mem::take(&mut self.held), self.found);
            }
        }
        // A pattern starts with a whole character, so what is held back does too.
        let held = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - held);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// Ends the text: returns what was held back.
    pub fn finish(&mut self) -> String {
        self.patterns.iter_mut().for_each(|p| p.matched = 0);
        std::mem::take(&mut self.held)
    }

    /// The string that was found, if any.
    pub fn found_string(&self) -> Option<&str> {
        let pattern = self.patterns.get(self.found?.index)?;
        std::str::from_utf8(&pattern.bytes).ok()
    }

    /// The stop found, if any.
    pub fn found(&self) -> Option<Stop> {
        self.found
    }
}

/// One string, and how much of it the end of the text matches (Knuth, Morris and Pratt, 1977).
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// `fallback[n]`: length of the longest proper border of the first `n` bytes.
    fallback: Box<[usize]>,
    matched: usize,
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut fallback = vec![0; bytes.len() + 1];
        let mut border = 0;
        for n in 1..bytes.len() {
            while border > 0 && bytes[n] != bytes[border] {
                border = fallback[border];
            }
            border += usize::from(bytes[n] == bytes[border]);
            fallback[n + 1] = border;
        }
        Self { bytes: bytes.into(), fallback: fallback.into(), matched: 0 }
    }

    /// Takes one byte; returns whether it completes the pattern.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops).unwrap();
        let mut shown = String::new();
        for piece in pieces {
            let (text, stop) = matcher.push(piece);
            shown += &text;
            assert_eq!(matcher.found_string(), stop.map(|stop| stops[stop.index]));
            if let Some(stop) = stop {
                return (shown, Some(stop.index));
            }
        }
        shown += &matcher.finish();
        (shown, None)
    }

    /// Stop strings, pieces of text, shown text, index of the stop.
    type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a str, Option<usize>);

    #[test]
    fn what_a_text_ended_with_is_no_beginning_of_the_next() {
        for rest in ["ND", "D"] {
            let mut matcher = StopMatcher::new(&["END"]).unwrap();
            assert_eq!((matcher.push("the EN"), matcher.finish()), (("the ".into(), None), "EN".into()));
            assert_eq!(matcher.push(rest), (rest.into(), None));
        }
    }

    #[test]
    fn finds_stops_across_pieces() {
        let cases: [Case<'_>; 9] = [
            (&[], &["anything"], "anything", None),
            (&["END"], &["the E", "N", "D of"], "the ", Some(0)),
            (&["END"], &["EEN", "EN", "x"], "EENENx", None),
            (&["\n\n", "stop"], &["a\n", "b\n", "\nc"], "a\nb", Some(0)),
            (&["bc", "abc"], &["xab", "c"], "x", Some(1)),
            (&["abc", "b"], &["xabc"], "xa", Some(1)),
            (&["aab"], &["aaaa", "ab"], "aaa", Some(0)),
            (&["né", "é"], &["Ren", "é"], "Re", Some(0)),
            (&["x", "x"], &["x"], "", Some(0)),
        ];
        for (stops, pieces, shown, found) in cases {
            assert_eq!(run(stops, pieces), (shown.to_owned(), found), "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn holds_back_only_what_could_be_a_stop() {
        let mut matcher = StopMatcher::new(&["</s>"]).unwrap();
        assert_eq!(matcher.push("a</"), ("a".to_owned(), None));
        assert_eq!(matcher.push("b<"), ("</b".to_owned(), None));
        assert_eq!(matcher.finish(), "<");
    }

    #[test]
    fn limits_are_checked() {
        assert!(StopMatcher::new(&[""]).is_err());
        assert!(StopMatcher::new(&["x".repeat(STOP_BYTES_MAX + 1)]).is_err());
        assert!(StopMatcher::new(&["x".repeat(STOP_BYTES_MAX)]).is_ok());
        assert!(StopMatcher::new(&["x"; STOPS_MAX + 1]).is_err());
        assert!(StopMatcher::new(&["x"; STOPS_MAX]).is_ok());
    }

    /// Checks every end, then every pattern, in the documented order.
    fn naive(stops: &[String], text: &str) -> (String, Option<usize>) {
        for end in 0..=text.len() {
            let ends = |s: &&(usize, &String)| text.as_bytes()[..end].ends_with(s.1.as_bytes());
            let all: Vec<_> = stops.iter().enumerate().collect();
            let best = all.iter().filter(ends).map(|(i, s)| (std::cmp::Reverse(s.len()), *i)).min();
            if let Some((std::cmp::Reverse(len), index)) = best {
                return (text[..end - len].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn equals_naive_search(stops in prop::collection::vec("[abé]{1,4}", 0..4), pieces in prop::collection::vec("[abé]{0,5}", 0..12)) {
            let views: Vec<&str> = stops.iter().map(String::as_str).collect();
            let parts: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&views, &parts), naive(&stops, &pieces.concat()));
        }
    }
}
