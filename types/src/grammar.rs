//! What the text of an answer must match.

use crate::TokenId;
use serde::{Deserialize, Serialize};

/// What the text of an answer must match, whole. Tokens that would leave it are not drawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// A JSON value of this schema, itself JSON.
    JsonSchema(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A regular expression, without anchors.
    Regex(String),
    /// A context-free grammar in a variant of Lark's syntax, with a rule `start`.
    Lark(String),
    /// Calls of tools, and nothing else.
    Calls(CallsGrammar),
}

/// Calls of tools in a model's notation: `open`, then calls with `separator` between them, then `close`.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallsGrammar {
    pub open: Vec<GrammarPiece>,
    /// One of these, again and again.
    pub calls: Vec<CallGrammar>,
    /// Between two calls; `None`: there is one call.
    pub separator: Option<Vec<GrammarPiece>>,
    pub close: Vec<GrammarPiece>,
}

impl CallsGrammar {
    /// The same without control tokens, for checks that know no model.
    #[must_use]
    pub fn without_tokens(&self) -> Self {
        let pieces = |of: &[GrammarPiece]| {
            of.iter().filter(|piece| matches!(piece, GrammarPiece::Text(_))).cloned().collect::<Vec<_>>()
        };
        let call = |call: &CallGrammar| CallGrammar {
            open: pieces(&call.open),
            schema: call.schema.clone(),
            close: pieces(&call.close),
        };
        Self {
            open: pieces(&self.open),
            calls: self.calls.iter().map(call).collect(),
            separator: self.separator.as_deref().map(pieces),
            close: pieces(&self.close),
        }
    }
}

/// A part of a notation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarPiece {
    /// Text, of any tokens but control tokens.
    Text(String),
    /// A control token.
    Token(TokenId),
}

impl GrammarPiece {
    /// What it counts as, in bytes: an empty one takes memory too.
    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len().max(size_of::<TokenId>()),
            Self::Token(_) => size_of::<TokenId>(),
        }
    }
}

/// A call of one tool.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallGrammar {
    pub open: Vec<GrammarPiece>,
    /// JSON Schema of the arguments.
    pub schema: String,
    pub close: Vec<GrammarPiece>,
}

/// A grammar that is too large, or empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} must have {expected}, got {got}")]
pub struct GrammarSizeError {
    what: &'static str,
    expected: String,
    got: usize,
}

impl Grammar {
    /// Most bytes of a schema, and of all choices. A chain of references takes stack and time by its length.
    pub const SCHEMA_BYTES_MAX: usize = 64 << 10;
    /// Most bytes of a regular expression, of a Lark grammar, and of all patterns of a schema: what they take grows with the square of
    /// their length. 8 KiB of optional letters take 0.15 s and 70 MB.
    pub const PATTERN_BYTES_MAX: usize = 8 << 10;
    /// Most choices.
    pub const CHOICES_MAX: usize = 4096;
    /// Most tools that may be called (OpenAI's limit).
    pub const CALLS_MAX: usize = 128;

    /// Memory that it takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let pieces =
            |of: &[GrammarPiece]| of.iter().map(|piece| size_of::<GrammarPiece>() + piece.bytes()).sum::<usize>();
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(|choice| size_of::<String>() + choice.len()).sum(),
            Self::Calls(CallsGrammar { open, calls, separator, close }) => {
                let around = pieces(open) + pieces(close) + separator.as_deref().map_or(0, pieces);
                let of = |call: &CallGrammar| {
                    size_of::<CallGrammar>() + pieces(&call.open) + call.schema.len() + pieces(&call.close)
                };
                around + calls.iter().map(of).sum::<usize>()
            }
        }
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// What is too large, or empty.
    pub fn check(&self) -> Result<(), GrammarSizeError> {
        let check = |what, unit: &str, got: usize, max: usize| {
            let expected = format!("1 to {max} {unit}");
            if (1..=max).contains(&got) { Ok(()) } else { Err(GrammarSizeError { what, expected, got }) }
        };
        match self {
            Self::JsonSchema(schema) => check("a JSON schema", "bytes", schema.len(), Self::SCHEMA_BYTES_MAX),
            Self::Regex(regex) => check("a regular expression", "bytes", regex.len(), Self::PATTERN_BYTES_MAX),
            Self::Lark(lark) => check("a Lark grammar", "bytes", lark.len(), Self::PATTERN_BYTES_MAX),
            Self::Calls(CallsGrammar { open, calls, separator, close }) => {
                check("calls", "tools", calls.len(), Self::CALLS_MAX)?;
                let pieces = |of: &[GrammarPiece]| of.iter().map(GrammarPiece::bytes).sum::<usize>();
                let around = pieces(open) + pieces(close) + separator.as_deref().map_or(0, pieces);
                let of = |call: &CallGrammar| pieces(&call.open) + call.schema.len() + pieces(&call.close);
                let bytes = around + calls.iter().map(of).sum::<usize>();
                check("all tools together", "bytes", bytes, Self::SCHEMA_BYTES_MAX)
            }
            Self::Choice(choices) => {
                check("a choice", "texts", choices.len(), Self::CHOICES_MAX)?;
                let shortest = choices.iter().map(String::len).min().unwrap_or(0);
                check("a text to choose", "bytes", shortest, Self::SCHEMA_BYTES_MAX)?;
                let bytes = choices.iter().map(String::len).sum();
                check("all texts to choose together", "bytes", bytes, Self::SCHEMA_BYTES_MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_bounds() {
        let long = |bytes: usize| "x".repeat(bytes);
        let calls = |count: usize, bytes: usize| {
            let piece = || vec![GrammarPiece::Text(long(1))];
            let call = CallGrammar { open: piece(), schema: long(bytes), close: piece() };
            let open = vec![GrammarPiece::Token(7), GrammarPiece::Text(long(1))];
            Grammar::Calls(CallsGrammar { open, calls: vec![call; count], separator: None, close: piece() })
        };
        let call = CallGrammar { open: vec![], schema: long(1), close: vec![] };
        let open = vec![GrammarPiece::Text(String::new()); Grammar::SCHEMA_BYTES_MAX];
        let empty_pieces = Grammar::Calls(CallsGrammar { open, calls: vec![call], separator: None, close: vec![] });
        let fits = [
            Grammar::JsonSchema(long(Grammar::SCHEMA_BYTES_MAX)),
            Grammar::Regex(long(Grammar::PATTERN_BYTES_MAX)),
            Grammar::Lark(long(1)),
            Grammar::Choice(vec![long(1); Grammar::CHOICES_MAX]),
            calls(Grammar::CALLS_MAX, 1),
        ];
        let fits_not = [
            Grammar::JsonSchema(long(Grammar::SCHEMA_BYTES_MAX + 1)),
            Grammar::JsonSchema(String::new()),
            Grammar::Regex(long(Grammar::PATTERN_BYTES_MAX + 1)),
            Grammar::Lark(long(Grammar::PATTERN_BYTES_MAX + 1)),
            Grammar::Choice(vec![]),
            Grammar::Choice(vec![long(1), String::new()]),
            Grammar::Choice(vec![long(1); Grammar::CHOICES_MAX + 1]),
            Grammar::Choice(vec![long(Grammar::SCHEMA_BYTES_MAX), long(1)]),
            calls(0, 1),
            calls(Grammar::CALLS_MAX + 1, 1),
            calls(2, Grammar::SCHEMA_BYTES_MAX / 2),
            empty_pieces.clone(),
        ];
        fits.iter().for_each(|grammar| assert_eq!(grammar.check(), Ok(())));
        assert!(empty_pieces.memory_bytes() >= Grammar::SCHEMA_BYTES_MAX * size_of::<GrammarPiece>());
        fits_not.iter().for_each(|grammar| assert!(grammar.check().is_err(), "{grammar:.99?}"));
    }
}
