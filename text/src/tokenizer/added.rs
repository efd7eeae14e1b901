//! Splits a text at its added tokens before any other step, as Hugging Face's `AddedVocabulary` does, with one
//! difference: control tokens are recognized only where the caller marks them.

use aho_corasick::AhoCorasick;
use baton_types::TokenId;
use regex::Regex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::LazyLock;
use tokenizers::AddedToken;

use super::control::finder;
use crate::{ControlSpan, TextError};

/// A part of a text: an added token, or the text between two.
#[derive(Debug)]
pub(crate) struct Part {
    /// Its bytes in the text; never empty.
    pub(crate) range: Range<usize>,
    /// The added token, if it is one.
    pub(crate) token: Option<TokenId>,
}

/// The added tokens of one tokenizer.
pub(crate) struct AddedTokens {
    by_id: HashMap<TokenId, AddedToken>,
    /// Ordinary ones, matched against the text as it is.
    raw: Search,
    /// Ordinary ones, matched against the normalized text.
    normalized: Search,
}

struct Search {
    finder: AhoCorasick,
    ids: Vec<TokenId>,
}

impl Search {
    fn new(tokens: Vec<(TokenId, String)>) -> Result<Self, TextError> {
        let finder = finder("added tokens", tokens.iter().map(|(_, spelling)| spelling.as_str()))?;
        Ok(Self { finder, ids: tokens.into_iter().map(|(id, _)| id).collect() })
    }

    fn find(&self, text: &str, at: Range<usize>) -> impl Iterator<Item = ControlSpan> {
        self.finder.find_iter(&text[at.clone()]).map(move |m| ControlSpan {
            start: at.start + m.start(),
            end: at.start + m.end(),
            token: self.ids[m.pattern().as_usize()],
        })
    }
}

impl AddedTokens {
    /// `control` says whether a token is a control token; `normalize` is the tokenizer's normalizer.
    pub(crate) fn new(
        tokens: Vec<(TokenId, AddedToken)>,
        control: impl Fn(TokenId) -> bool,
        normalize: impl Fn(&str) -> Result<String, TextError>,
    ) -> Result<Self, TextError> {
        let (mut raw, mut normalized) = (Vec::new(), Vec::new());
        for (id, token) in tokens.iter().filter(|(id, token)| !control(*id) && !token.content.is_empty()) {
            match token.normalized {
                true => normalized.push((*id, normalize(&token.content)?)),
                false => raw.push((*id, token.content.clone())),
            }
        }
        normalized.retain(|(_, spelling)| !spelling.is_empty());
        Ok(Self { by_id: tokens.into_iter().collect(), raw: Search::new(raw)?, normalized: Search::new(normalized)? })
    }

    /// Splits the text as the user or the template wrote it: at the given control tokens, and at ordinary added tokens
    /// between them.
    pub(crate) fn split_raw(&self, text: &str, controls: &[ControlSpan]) -> Vec<Part> {
        let mut spans = Vec::new();
        let mut at = 0;
        for control in controls {
            spans.extend(self.raw.find(text, at..control.start));
            spans.push(*control);
            at = control.end;
        }
        spans.extend(self.raw.find(text, at..text.len()));
        self.cut(text, spans)
    }

    /// Splits a normalized part at ordinary added tokens that are matched after normalization.
    pub(crate) fn split_normalized(&self, text: &str) -> Vec<Part> {
        let spans = self.normalized.find(text, 0..text.len()).collect();
        self.cut(text, spans)
    }

    fn cut(&self, text: &str, spans: Vec<ControlSpan>) -> Vec<Part> {
        let mut parts = Vec::with_capacity(2 * spans.len() + 1);
        let mut push = |range: Range<usize>, token| {
            if !range.is_empty() {
                parts.push(Part { range, token });
            }
        };
        let mut done = 0;
        for ControlSpan { mut start, mut end, token } in spans {
            let flags = &self.by_id[&token];
            if flags.single_word && (text[..start].ends_with(is_word) || text[end..].starts_with(is_word)) {
                continue;
            }
            if flags.lstrip {
                start = text[..start].trim_end().len();
            }
            if flags.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            // The token before may have taken this white space.
            start = start.max(done);
            end = end.max(start);
            push(done..start, None);
            push(start..end, Some(token));
            done = end;
        }
        push(done..text.len(), None);
        parts
    }
}

/// A word character in the sense of `single_word`. `char::is_alphanumeric` differs in number letters and combining marks.
fn is_word(c: char) -> bool {
    static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w").expect("a class of characters"));
    WORD.is_match(c.encode_utf8(&mut [0; 4]))
}
