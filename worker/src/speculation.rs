//! Settings of speculation: tokens that are proposed, computed as further rows of a step and kept if they are sampled.

use baton_engine::{SpeculationConfig, SpeculationMethod};
use baton_node::config::{ByteSize, Check, Checker};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// How tokens are proposed, and how many.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculationSettings {
    /// `ngram`: what followed the last tokens where they occurred before, in prompt or answer, and what the draft model says; `off`: nothing.
    pub method: SpeculationMethod,
    /// Most proposed tokens of one sequence in one step.
    #[serde(alias = "num_speculative_tokens")]
    pub tokens_max: usize,
    /// A smaller model with the same tokens, named like `model.model`, that proposes too; empty: none.
    #[serde(alias = "model")]
    pub draft_model: String,
    /// Size of the draft model's KV pool; 0: a quarter of `kv_cache_bytes`, beside it.
    pub draft_kv_cache_bytes: ByteSize,
}

impl Default for SpeculationSettings {
    fn default() -> Self {
        let SpeculationConfig { method, tokens_max, .. } = SpeculationConfig::default();
        Self { method, tokens_max, draft_model: String::new(), draft_kv_cache_bytes: ByteSize(0) }
    }
}

impl SpeculationSettings {
    /// Without proposals.
    pub fn off() -> Self {
        Self { method: SpeculationMethod::Off, ..Self::default() }
    }

    /// With proposals of prompt lookup.
    pub fn ngram() -> Self {
        Self { method: SpeculationMethod::Ngram, ..Self::default() }
    }

    /// As the engine's type.
    pub(crate) fn config(&self) -> SpeculationConfig {
        let (method, tokens_max) = (self.method, self.tokens_max);
        SpeculationConfig { method, tokens_max, ..SpeculationConfig::default() }
    }
}

impl Check for SpeculationSettings {
    fn check(&self, at: &mut Checker) {
        let is_used = self.method != SpeculationMethod::Off || self.draft_model.is_empty();
        let size = self.draft_kv_cache_bytes;
        at.range("tokens_max", self.tokens_max, 1..=SpeculationConfig::TOKENS_MAX)
            .range("draft_kv_cache_bytes", size, ByteSize(0)..=ByteSize(1 << 44))
            .require("draft_model", is_used, "empty where method is \"off\": then nothing is proposed");
    }
}

/// The value of the flag: a method, or a JSON object with the keys of the settings; vLLM's `num_speculative_tokens` is one of them.
impl FromStr for SpeculationSettings {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let json = if text.trim_start().starts_with('{') {
            serde_json::from_str(text)
        } else {
            serde_json::from_value(serde_json::json!({ "method": text }))
        };
        json.map_err(|error| {
            format!(
                "{error}; give \"off\", \"ngram\" or {{\"method\": \"ngram\", \"model\": a draft model, \"num_speculative_tokens\": 1 to {}}}",
                SpeculationConfig::TOKENS_MAX
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_takes_a_method_or_what_vllm_takes() {
        let default = SpeculationSettings::default();
        let parse = |text: &str| text.parse::<SpeculationSettings>();
        let off = SpeculationSettings { method: SpeculationMethod::Off, ..default.clone() };
        assert_eq!((parse("off").unwrap(), parse("ngram").unwrap()), (off, default.clone()));
        let four = SpeculationSettings { tokens_max: 4, ..default };
        assert_eq!(parse(r#"{"method": "ngram", "num_speculative_tokens": 4}"#).unwrap(), four);
        assert_eq!(parse(r#"{"method": "ngram", "tokens_max": 4}"#).unwrap(), four);
        let drafted = SpeculationSettings { draft_model: "org/small".into(), ..four };
        assert_eq!(parse(r#"{"model": "org/small", "num_speculative_tokens": 4}"#).unwrap(), drafted);
        for (text, why) in [
            ("eagle", "unknown variant `eagle`"),
            (r#"{"method": "ngram", "prompt_lookup_max": 4}"#, "unknown field `prompt_lookup_max`"),
            ("{", "EOF"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why) && error.contains("num_speculative_tokens"), "{error}");
        }
    }

    #[test]
    fn a_draft_model_needs_speculation() {
        for method in [SpeculationMethod::Off, SpeculationMethod::Ngram] {
            let mut checker = Checker::default();
            let draft_model = "random:layers=1".into();
            SpeculationSettings { method, draft_model, ..SpeculationSettings::default() }.check(&mut checker);
            assert_eq!(checker.into_problems().is_empty(), method != SpeculationMethod::Off);
        }
    }

    #[test]
    fn numbers_have_a_range() {
        for (tokens_max, refused) in [(0, true), (1, false), (16, false), (17, true)] {
            let mut checker = Checker::default();
            SpeculationSettings { tokens_max, ..SpeculationSettings::default() }.check(&mut checker);
            assert_eq!(!checker.into_problems().is_empty(), refused, "{tokens_max}");
        }
    }
}
