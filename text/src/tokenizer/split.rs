//! Pre-tokenization as ranges of the text: where the words of a byte-level model begin and end.
//!
//! The tokenizers crate copies every word, with the origin of each of its bytes. That takes most of its time and
//! memory, and this crate does not need origins. Models use only a few different splits, which are done here directly
//! on the text. Models with others use that crate.

use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};
use serde_json::Value;
use std::sync::LazyLock;

/// GPT-2's split (`encoder.py` of openai/gpt-2), the meaning of `ByteLevel` with `use_regex`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The common end of the patterns of all families: white space before a word leaves its last character to the word.
const SPACES_TAIL: &str = r"|\s+(?!\S)|\s+";
/// Index of the pattern of [`Stage::Pattern`] that means [`SPACES_TAIL`].
const SPACES: usize = 1;

/// The pre-tokenizers of a model, except the last one, which maps bytes to characters and is not needed here.
pub(super) struct Splitter(Vec<Stage>);

enum Stage {
    /// Splits numeric characters from others, one by one or as runs.
    Digits { one_by_one: bool },
    /// Splits into matches and the text between them. Two flags say which of both are kept.
    Pattern { regex: Regex, matches: bool, gaps: bool },
}

impl Splitter {
    /// Reads the `pre_tokenizer` of a `tokenizer.json`. An unsupported part is returned as the error.
    pub(super) fn from_json(json: &Value) -> Result<Self, String> {
        let steps = match json["pretokenizers"].as_array() {
            Some(steps) if json["type"] == "Sequence" => steps.as_slice(),
            _ => std::slice::from_ref(json),
        };
        let (last, before) = match steps.split_last() {
            Some((last, before)) if last["type"] == "ByteLevel" => (last, before),
            _ => return Err("its last pre-tokenizer is not ByteLevel".to_owned()),
        };
        if last["add_prefix_space"] != false {
            return Err("its pre-tokenizer adds a space before the text".to_owned());
        }
        let mut stages = before.iter().map(Stage::from_json).collect::<Result<Vec<_>, _>>()?;
        if last["use_regex"].as_bool().unwrap_or(true) {
            stages.push(Stage::pattern(GPT2, true, true)?);
        }
        Ok(Self(stages))
    }

    /// Passes each word of the text to `word`, in order, and stops at its first error.
    pub(super) fn split<E>(&self, text: &str, word: &mut dyn FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        split_from(&self.0, text, word)
    }
}

/// Each stage treats a piece of the stage before it as a separate text, as in the tokenizers crate.
fn split_from<E>(stages: &[Stage], text: &str, word: &mut dyn FnMut(&str) -> Result<(), E>) -> Result<(), E> {
    match stages.split_first() {
        None if text.is_empty() => Ok(()),
        None => word(text),
        Some((stage, rest)) => stage.split(text, &mut |piece| split_from(rest, piece, word)),
    }
}

impl Stage {
    fn from_json(json: &Value) -> Result<Self, String> {
        let unknown = || Err(format!("its pre-tokenizer has the step {json}"));
        match (json["type"].as_str(), json["individual_digits"].as_bool()) {
            (Some("Digits"), Some(one_by_one)) => return Ok(Self::Digits { one_by_one }),
            (Some("Split"), _) => {}
            _ => return unknown(),
        }
        let (matches, gaps) = match (json["behavior"].as_str(), json["invert"].as_bool()) {
            (Some("Isolated"), Some(_)) => (true, true),
            (Some("Removed"), Some(false)) => (false, true),
            (Some("Removed"), Some(true)) => (true, false),
            _ => return unknown(),
        };
        match (json["pattern"]["Regex"].as_str(), json["pattern"]["String"].as_str()) {
            (Some(regex), _) => Self::pattern(regex, matches, gaps),
            (None, Some(text)) => Self::pattern(&regex::escape(text), matches, gaps),
            (None, None) => unknown(),
        }
    }

    /// The library runs patterns with fancy-regex. Supported here are those with the same meaning in the regex crate:
    /// no look-around except [`SPACES_TAIL`], no possessive repetition, no empty match.
    fn pattern(pattern: &str, matches: bool, gaps: bool) -> Result<Self, String> {
        let (head, spaces) = match pattern.strip_suffix(SPACES_TAIL) {
            Some(head) => (head, Some(r"\s+")),
            None => (pattern, None),
        };
        let unknown = |why: &str| format!("its pre-tokenizer splits at {pattern:?}: {why}");
        let parsed = syntax::parse(head).map_err(|e| unknown(&e.to_string()))?;
        if is_possessive(head) {
            return Err(unknown("a possessive repetition"));
        }
        if !parsed.properties().look_set().is_empty() || parsed.properties().minimum_len().is_none_or(|len| len == 0) {
            return Err(unknown("it matches places, not only characters"));
        }
        let patterns: Vec<&str> = std::iter::once(head).chain(spaces).collect();
        let regex = Regex::new_many(&patterns).map_err(|e| unknown(&e.to_string()))?;
        Ok(Self::Pattern { regex, matches, gaps })
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

/// Whether a pattern may contain a possessive repetition like `a++`, which never backtracks; the regex crate reads it
/// as `(a+)+`.
fn is_possessive(pattern: &str) -> bool {
    static PLAIN: LazyLock<regex::Regex> = LazyLock::new(|| {
        regex::Regex::new(r"(?s)\\[pPxuU]\{\w+\}|\\.|\[(?:\\.|[^\]\\])*\]").expect("escapes and classes")
    });
    static TWICE: LazyLock<regex::Regex> = LazyLock::new(|| regex::Regex::new(r"[+*?}]\s*\+").expect("two signs"));
    TWICE.is_match(&PLAIN.replace_all(pattern, "x"))
}

/// The next match from `at` on.
fn find(regex: &Regex, text: &str, at: usize) -> Option<(usize, usize)> {
    if at == text.len() {
        return None;
    }
    let input = Input::new(text).range(at..);
    // Nearly every match begins at the end of the last one, and is found there in one pass.
    let (pattern, start, end) = match regex.search_half(&input.clone().anchored(Anchored::Yes)) {
        Some(half) => (half.pattern(), at, half.offset()),
        None => regex.search(&input).map(|m| (m.pattern(), m.start(), m.end()))?,
    };
    if pattern.as_usize() == SPACES && end < text.len() {
        // `\s+(?!\S)`, and `\s+` if that matches nothing.
        let last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
        return Some((start, if start + last < end { end - last } else { end }));
    }
    Some((start, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn possessive_repetitions_are_told_from_signs() {
        let cases =
            [("a++", true), ("a?+b", true), ("[a-z]*+", true), (r"\p{N}{1,3}+", true), ("a+ +", true), ("a+b", false)];
        let signs = [
            ("[*+]a", false),
            (r"\++", false),
            (r"\p{L}+", false),
            (r"\p{L}{2}+", true),
            (r"[^\]*+]+", false),
            (r"[()*+,\-./\\\]^]+", false),
        ];
        for (pattern, possessive) in cases.into_iter().chain(signs) {
            assert_eq!(is_possessive(pattern), possessive, "{pattern}");
        }
    }
}
