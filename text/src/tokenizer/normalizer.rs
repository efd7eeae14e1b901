//! SentencePiece's normalizer, for tokenizers that are made of its own rules. The tokenizers crate reads such rules too
//! (`Precompiled`), but applies them to clusters of characters, and of two rules for one place the shorter.
//!
//! In a `tokenizer.json` its type is `SentencePiece`. Only bundles of this project have it: a reader that does not know
//! it fails.

use serde::Deserialize;
use serde_json::{Value, json};
use tokenizers::tokenizer::{NormalizedString, Normalizer};

use super::charsmap::{self, Charsmap};
use crate::TextError;

/// What stands for a space in pieces.
pub(crate) const SPACE: char = '▁';

/// Replaces by rules, the longest that fits at each place, and then treats spaces.
pub(super) struct SentencePiece {
    rules: Charsmap,
    spaces: Spaces,
}

/// What becomes of spaces besides [`SPACE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Spaces {
    /// Whether a text gets a space in front.
    pub(crate) add_dummy_prefix: bool,
    /// Whether spaces at both ends are dropped, and of several in a row all but one.
    pub(crate) remove_extra_whitespaces: bool,
}

#[derive(Deserialize)]
struct Json {
    precompiled_charsmap: String,
    #[serde(flatten)]
    spaces: Spaces,
}

/// The part of a `tokenizer.json`.
pub(crate) fn sentencepiece(charsmap: &[u8], spaces: Spaces) -> Value {
    json!({
        "type": "SentencePiece",
        "precompiled_charsmap": charsmap::to_base64(charsmap),
        "add_dummy_prefix": spaces.add_dummy_prefix,
        "remove_extra_whitespaces": spaces.remove_extra_whitespaces,
    })
}

/// Checks the rules of a `normalizer` that the tokenizers crate applies: it looks for them wherever the trie says.
pub(super) fn check(normalizer: &Value) -> Result<(), TextError> {
    match normalizer["precompiled_charsmap"].as_str() {
        Some(charsmap) => Charsmap::from_base64(charsmap).map(drop),
        None => normalizer["normalizers"].as_array().into_iter().flatten().try_for_each(check),
    }
}

impl SentencePiece {
    /// Reads the `normalizer` of a `tokenizer.json`; `None` if it is of another type.
    pub(super) fn from_json(json: &Value) -> Result<Option<Self>, TextError> {
        if json["type"] != "SentencePiece" {
            return Ok(None);
        }
        let Json { precompiled_charsmap, spaces } =
            Json::deserialize(json).map_err(|e| TextError::Broken(format!("its normalizer: {e}")))?;
        Ok(Some(Self { rules: Charsmap::from_base64(&precompiled_charsmap)?, spaces }))
    }

    fn normalized(&self, text: &str) -> String {
        let Spaces { add_dummy_prefix, remove_extra_whitespaces } = self.spaces;
        let mut normalized = String::with_capacity(text.len() + SPACE.len_utf8());
        let (mut begun, mut after_space) = (false, remove_extra_whitespaces);
        // Takes what one rule, or no rule, makes of a place.
        let mut push = |part: &str| {
            if !begun {
                if remove_extra_whitespaces && part == " " {
                    return;
                }
                begun = true;
                if add_dummy_prefix {
                    normalized.push(SPACE);
                }
            }
            let part = if after_space { part.trim_start_matches(' ') } else { part };
            if !part.is_empty() {
                normalized.extend(part.chars().map(|c| if c == ' ' { SPACE } else { c }));
                after_space = remove_extra_whitespaces && part.ends_with(' ');
            }
        };
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let length = match self.rules.longest(rest) {
                Some((length, replacement)) => {
                    push(replacement);
                    length
                }
                None => {
                    push(&rest[..first.len_utf8()]);
                    first.len_utf8()
                }
            };
            rest = &rest[length..];
        }
        if remove_extra_whitespaces {
            normalized.truncate(normalized.trim_end_matches(SPACE).len());
        }
        normalized
    }
}

impl Normalizer for SentencePiece {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        *text = NormalizedString::from(self.normalized(text.get()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_are_as_the_settings_say() {
        for (add_dummy_prefix, remove_extra_whitespaces, text, is) in [
            (false, false, " a  b ", "▁a▁▁b▁"),
            (true, false, " a  b ", "▁▁a▁▁b▁"),
            (false, true, "  a   b  ", "a▁b"),
            (true, true, "  a   b  ", "▁a▁b"),
            (true, true, "  ", ""),
            (true, false, " ", "▁▁"),
            (true, false, "", ""),
            (true, true, "▁▁a▁", "▁▁▁a"),
        ] {
            let json = sentencepiece(&[], Spaces { add_dummy_prefix, remove_extra_whitespaces });
            let normalizer = SentencePiece::from_json(&json).unwrap().unwrap();
            assert_eq!(normalizer.normalized(text), is, "{text:?} {add_dummy_prefix} {remove_extra_whitespaces}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        let spaces = Spaces { add_dummy_prefix: true, remove_extra_whitespaces: true };
        let error = |json: Value| SentencePiece::from_json(&json).err().unwrap().to_string();
        assert!(error(sentencepiece(b"damaged", spaces)).contains("charsmap is damaged"));
        assert!(error(json!({"type": "SentencePiece", "precompiled_charsmap": ""})).contains("missing field"));
        let precompiled = |charsmap: &str| json!({"type": "Precompiled", "precompiled_charsmap": charsmap});
        assert!(SentencePiece::from_json(&precompiled("?")).unwrap().is_none());
        assert!(check(&precompiled("?")).unwrap_err().to_string().contains("no base64"));
        assert!(check(&json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, precompiled("AAAA")]})).is_err());
        assert!(check(&json!({"type": "Sequence", "normalizers": [{"type": "NFC"}]})).is_ok());
        assert!(check(&Value::Null).is_ok());
    }
}
