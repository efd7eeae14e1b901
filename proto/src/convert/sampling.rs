//! Sampling parameters and their defaults.

use super::ConvertError;
use crate::v1;
use crate::v1::grammar::Kind;
use baton_types::{CallGrammar, CallsGrammar, Grammar, SamplingDefaults, SamplingParams, TokenId};
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
    let CallsGrammar { open_token, open, calls, separator, close } = calls.clone();
    let call = |CallGrammar { open, schema, close }| v1::CallGrammar { open, schema, close };
    v1::CallsGrammar { open_token, open, calls: calls.into_iter().map(call).collect(), separator, close }
}

fn calls_from(calls: v1::CallsGrammar) -> CallsGrammar {
    let v1::CallsGrammar { open_token, open, calls, separator, close } = calls;
    let call = |v1::CallGrammar { open, schema, close }| CallGrammar { open, schema, close };
    CallsGrammar { open_token, open, calls: calls.into_iter().map(call).collect(), separator, close }
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
        Some(Kind::Calls(calls)) => Grammar::Calls(calls_from(calls)),
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
