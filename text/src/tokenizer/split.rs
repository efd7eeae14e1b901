//! Pre-tokenization as ranges of the text: where the words of a byte-level model begin and end.
//!
//! The tokenizers crate keeps an origin for every byte of every word, which nobody here asks for and which takes most of its time and
//! memory. The splits that models ask for are few, and are done here on the text itself. Those that are not known here are left to it.

use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};
use serde_json::Value;

/// GPT-2's split, which `ByteLevel` with `use_regex` stands for.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// How the patterns of all families end: white space before a word leaves its last character to the word.
const SPACES_TAIL: &str = r"|\s+(?!\S)|\s+";
/// Which pattern of [`Stage::Pattern`] stands for [`SPACES_TAIL`].
const SPACES: usize = 1;

/// The pre-tokenizers of a model, the last of which maps bytes to characters and is no matter of this module.
#[derive(Debug)]
pub(super) struct Splitter(Vec<Stage>);

#[derive(Debug)]
enum Stage {
    /// Numeric characters apart from others, one by one or as runs.
    Digits { one_by_one: bool },
    /// Matches and what is between them. Which of both remain is told by two flags.
    Pattern { regex: Regex, matches: bool, gaps: bool },
}

impl Splitter {
    /// Reads the `pre_tokenizer` of a `tokenizer.json`; none where it is not one of a byte-level model, or not one that is known here.
    pub(super) fn from_json(json: &Value) -> Option<Self> {
        let steps = match json["pretokenizers"].as_array() {
            Some(steps) if json["type"] == "Sequence" => steps.as_slice(),
            _ => std::slice::from_ref(json),
        };
        let (last, before) = steps.split_last()?;
        if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
            return None;
        }
        let mut stages = before.iter().map(Stage::from_json).collect::<Option<Vec<_>>>()?;
        if last["use_regex"].as_bool().unwrap_or(true) {
            stages.push(Stage::pattern(GPT2, true, true)?);
        }
        Some(Self(stages))
    }

    /// Gives each word of the text to `word`, in order, and stops at its first error.
    pub(super) fn split<E>(&self, text: &str, word: &mut dyn FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        split_from(&self.0, text, word)
    }
}

/// Each stage sees a piece of the stage before it as a text of its own, as in the tokenizers crate.
fn split_from<E>(stages: &[Stage], text: &str, word: &mut dyn FnMut(&str) -> Result<(), E>) -> Result<(), E> {
    match stages.split_first() {
        None if text.is_empty() => Ok(()),
        None => word(text),
        Some((stage, rest)) => stage.split(text, &mut |piece| split_from(rest, piece, word)),
    }
}

impl Stage {
    fn from_json(json: &Value) -> Option<Self> {
        match json["type"].as_str()? {
            "Digits" => Some(Self::Digits { one_by_one: json["individual_digits"].as_bool()? }),
            "Split" => {
                let (matches, gaps) = match (json["behavior"].as_str()?, json["invert"].as_bool()?) {
                    ("Isolated", _) => (true, true),
                    ("Removed", false) => (false, true),
                    ("Removed", true) => (true, false),
                    _ => return None,
                };
                match (json["pattern"]["Regex"].as_str(), json["pattern"]["String"].as_str()) {
                    (Some(regex), _) => Self::pattern(regex, matches, gaps),
                    (None, Some(text)) => Self::pattern(&regex::escape(text), matches, gaps),
                    (None, None) => None,
                }
            }
            _ => None,
        }
    }

    /// None for a pattern that looks around itself elsewhere than in [`SPACES_TAIL`], or that matches nothing at some place.
    fn pattern(pattern: &str, matches: bool, gaps: bool) -> Option<Self> {
        let (pattern, spaces) = match pattern.strip_suffix(SPACES_TAIL) {
            Some(pattern) => (pattern, Some(r"\s+")),
            None => (pattern, None),
        };
        if syntax::parse(pattern).ok()?.properties().minimum_len()? == 0 {
            return None;
        }
        let patterns: Vec<&str> = std::iter::once(pattern).chain(spaces).collect();
        Some(Self::Pattern { regex: Regex::new_many(&patterns).ok()?, matches, gaps })
    }

    fn split<E>(&self, text: &str, piece: &mut dyn FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        let mut done = 0;
        match self {
            Self::Digits { one_by_one } => {
                let mut digits = false;
                for (at, c) in text.char_indices() {
                    let digit = c.is_numeric();
                    if (digit != digits || digit && *one_by_one) && done < at {
                        piece(&text[done..at])?;
                        done = at;
                    }
                    digits = digit;
                }
                piece(&text[done..])
            }
            Self::Pattern { regex, matches, gaps } => {
                while let Some((start, end)) = find(regex, text, done) {
                    if *gaps && done < start {
                        piece(&text[done..start])?;
                    }
                    if *matches {
                        piece(&text[start..end])?;
                    }
                    done = end;
                }
                if *gaps && done < text.len() { piece(&text[done..]) } else { Ok(()) }
            }
        }
    }
}

/// The next match from `at` on.
fn find(regex: &Regex, text: &str, at: usize) -> Option<(usize, usize)> {
    if at == text.len() {
        return None;
    }
    let input = Input::new(text).range(at..);
    // Nearly every match begins where the last one ended, and is found there in one pass.
    let (pattern, start, end) = match regex.search_half(&input.clone().anchored(Anchored::Yes)) {
        Some(half) => (half.pattern(), at, half.offset()),
        None => regex.search(&input).map(|m| (m.pattern(), m.start(), m.end()))?,
    };
    if pattern.as_usize() == SPACES && end < text.len() {
        // `\s+(?!\S)`, and `\s+` where that leaves nothing.
        let last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
        return Some((start, if start + last < end { end - last } else { end }));
    }
    Some((start, end))
}
