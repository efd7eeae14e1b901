//! Sampling parameters and their defaults.

use super::ConvertError;
use crate::v1;
use crate::v1::grammar::Kind;
use crate::v1::grammar_piece;
use baton_types::{CallGrammar, CallsGrammar, Grammar, GrammarPiece, SamplingDefaults, SamplingParams, TokenId};
use std::sync::Arc;

impl From<SamplingParams> for v1::SamplingParams {
    fn from(p: SamplingParams) -> Self {
        Self {
            temperature: p.temperature,
            top_p: p.top_p,
            top_k: p.top_k,
            min_p: p.min_p,
            typical_p: (p.typical_p < 1.0).then_some(p.typical_p),
            bad_words: p.bad_words.into_iter().map(|ids| v1::TokenIds { ids }).collect(),
            presence_penalty: p.presence_penalty,
            frequency_penalty: p.frequency_penalty,
            repetition_penalty: p.repetition_penalty,
            seed: p.seed,
            max_tokens: p.max_tokens,
            ignore_eos: p.ignore_eos,
            stop_token_ids: p.stop_token_ids,
            logprobs: p.logprobs,
            min_tokens: p.min_tokens,
            logit_bias: bias_to(p.logit_bias),
            allowed_token_ids: p.allowed_token_ids,
            grammar: p.grammar.map(|grammar| grammar_to(&grammar)),
            prompt_logprobs: p.prompt_logprobs,
        }
    }
}

fn grammar_to(grammar: &Grammar) -> v1::Grammar {
    let kind = match grammar {
        Grammar::JsonSchema(schema) => Kind::JsonSchema(schema.clone()),
        Grammar::Choice(texts) => Kind::Choice(v1::Texts { texts: texts.clone() }),
        Grammar::Regex(regex) => Kind::Regex(regex.clone()),
        Grammar::Lark(lark) => Kind::Lark(lark.clone()),
        Grammar::Calls(calls) => Kind::Calls(calls_to(calls)),
    };
    v1::Grammar { kind: Some(kind) }
}

fn calls_to(calls: &CallsGrammar) -> v1::CallsGrammar {
    let call = |call: &CallGrammar| v1::CallGrammar {
        open: pieces_to(&call.open),
        schema: call.schema.clone(),
        close: pieces_to(&call.close),
    };
    v1::CallsGrammar {
        open: pieces_to(&calls.open),
        calls: calls.calls.iter().map(call).collect(),
        separator: calls.separator.as_deref().map(|pieces| v1::GrammarPieces { pieces: pieces_to(pieces) }),
        close: pieces_to(&calls.close),
    }
}

fn pieces_to(pieces: &[GrammarPiece]) -> Vec<v1::GrammarPiece> {
    let kind = |piece: &GrammarPiece| match piece {
        GrammarPiece::Text(text) => grammar_piece::Kind::Text(text.clone()),
        GrammarPiece::Token(token) => grammar_piece::Kind::TokenId(*token),
    };
    pieces.iter().map(|piece| v1::GrammarPiece { kind: Some(kind(piece)) }).collect()
}

fn calls_from(calls: v1::CallsGrammar) -> Result<CallsGrammar, ConvertError> {
    let call = |call: v1::CallGrammar| {
        Ok(CallGrammar { open: pieces_from(call.open)?, schema: call.schema, close: pieces_from(call.close)? })
    };
    Ok(CallsGrammar {
        open: pieces_from(calls.open)?,
        calls: calls.calls.into_iter().map(call).collect::<Result<_, _>>()?,
        separator: calls.separator.map(|separator| pieces_from(separator.pieces)).transpose()?,
        close: pieces_from(calls.close)?,
    })
}

fn pieces_from(pieces: Vec<v1::GrammarPiece>) -> Result<Vec<GrammarPiece>, ConvertError> {
    let piece = |piece: v1::GrammarPiece| match piece.kind {
        Some(grammar_piece::Kind::Text(text)) if text.is_empty() => {
            Err(ConvertError::invalid("grammar", "a piece of calls is not empty"))
        }
        Some(grammar_piece::Kind::Text(text)) => Ok(GrammarPiece::Text(text)),
        Some(grammar_piece::Kind::TokenId(token)) => Ok(GrammarPiece::Token(token)),
        None => Err(ConvertError::invalid("grammar", "a piece of calls is a text or a token_id")),
    };
    pieces.into_iter().map(piece).collect()
}

/// The grammar of a message, of a size that is compiled.
///
/// # Errors
/// If it has no kind that is known here, or another size.
pub fn grammar(grammar: v1::Grammar) -> Result<Grammar, ConvertError> {
    let grammar = match grammar.kind {
        Some(Kind::JsonSchema(schema)) => Grammar::JsonSchema(schema),
        Some(Kind::Choice(choice)) => Grammar::Choice(choice.texts),
        Some(Kind::Regex(regex)) => Grammar::Regex(regex),
        Some(Kind::Lark(lark)) => Grammar::Lark(lark),
        Some(Kind::Calls(calls)) => Grammar::Calls(calls_from(calls)?),
        None => {
            return Err(ConvertError::invalid(
                "grammar",
                "a grammar is a json_schema, a choice, a regex, lark or calls",
            ));
        }
    };
    grammar.check().map_err(|error| ConvertError::invalid("grammar", error))?;
    Ok(grammar)
}

fn bias_to(bias: Vec<(TokenId, f32)>) -> Vec<v1::TokenBias> {
    bias.into_iter().map(|(token_id, bias)| v1::TokenBias { token_id, bias }).collect()
}

/// Token and bias of each entry.
pub fn logit_bias(bias: Vec<v1::TokenBias>) -> Vec<(TokenId, f32)> {
    bias.into_iter().map(|v1::TokenBias { token_id, bias }| (token_id, bias)).collect()
}

impl TryFrom<v1::SamplingParams> for SamplingParams {
    type Error = ConvertError;

    fn try_from(p: v1::SamplingParams) -> Result<Self, ConvertError> {
        let unchecked = Self {
            temperature: p.temperature,
            top_p: p.top_p,
            top_k: p.top_k,
            min_p: p.min_p,
            typical_p: p.typical_p.unwrap_or(1.0),
            bad_words: p.bad_words.into_iter().map(|word| word.ids).collect(),
            presence_penalty: p.presence_penalty,
            frequency_penalty: p.frequency_penalty,
            repetition_penalty: p.repetition_penalty,
            seed: p.seed,
            max_tokens: p.max_tokens,
            ignore_eos: p.ignore_eos,
            stop_token_ids: p.stop_token_ids,
            logprobs: p.logprobs,
            min_tokens: p.min_tokens,
            logit_bias: logit_bias(p.logit_bias),
            allowed_token_ids: p.allowed_token_ids,
            grammar: p.grammar.map(grammar).transpose()?.map(Arc::new),
            prompt_logprobs: p.prompt_logprobs,
        };
        unchecked.try_new().map_err(|e| ConvertError::invalid(e.name, e))
    }
}

impl From<SamplingDefaults> for v1::SamplingDefaults {
    fn from(d: SamplingDefaults) -> Self {
        Self { temperature: d.temperature, top_p: d.top_p, top_k: d.top_k, repetition_penalty: d.repetition_penalty }
    }
}

impl TryFrom<v1::SamplingDefaults> for SamplingDefaults {
    type Error = ConvertError;

    fn try_from(d: v1::SamplingDefaults) -> Result<Self, ConvertError> {
        let base = SamplingParams::default();
        let filled = SamplingParams {
            temperature: d.temperature.unwrap_or(base.temperature),
            top_p: d.top_p.unwrap_or(base.top_p),
            top_k: d.top_k.unwrap_or(base.top_k),
            repetition_penalty: d.repetition_penalty.unwrap_or(base.repetition_penalty),
            ..base
        };
        filled.try_new().map_err(|e| ConvertError::invalid(e.name, e))?;
        Ok(Self {
            temperature: d.temperature,
            top_p: d.top_p,
            top_k: d.top_k,
            repetition_penalty: d.repetition_penalty,
        })
    }
}
