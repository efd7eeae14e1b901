//! Settings of speculation: tokens that are proposed, computed as further rows of a step and kept if they are sampled.

use baton_engine::{SpeculationConfig, SpeculationMethod};
use baton_node::config::{Check, Checker};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// How tokens are proposed, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculationSettings {
    /// `ngram`: what followed the last tokens where they occurred before, in prompt or answer; `off`: nothing.
    pub method: SpeculationMethod,
    /// Most proposed tokens of one sequence in one step.
    #[serde(alias = "num_speculative_tokens")]
    pub tokens_max: usize,
}

impl Default for SpeculationSettings {
    fn default() -> Self {
        let SpeculationConfig { method, tokens_max, step_time: _ } = SpeculationConfig::default();
        Self { method, tokens_max }
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
        SpeculationConfig { method: self.method, tokens_max: self.tokens_max, step_time: None }
    }
}

impl Check for SpeculationSettings {
    fn check(&self, at: &mut Checker) {
        at.range("tokens_max", self.tokens_max, 1..=SpeculationConfig::TOKENS_MAX);
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
                "{error}; give \"off\", \"ngram\" or {{\"method\": \"ngram\", \"num_speculative_tokens\": 1 to {}}}",
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
        assert_eq!(parse("off").unwrap(), SpeculationSettings { method: SpeculationMethod::Off, ..default });
        assert_eq!(parse("ngram").unwrap(), SpeculationSettings { method: SpeculationMethod::Ngram, ..default });
        let four = SpeculationSettings { method: SpeculationMethod::Ngram, tokens_max: 4 };
        assert_eq!(parse(r#"{"method": "ngram", "num_speculative_tokens": 4}"#).unwrap(), four);
        assert_eq!(parse(r#"{"method": "ngram", "tokens_max": 4}"#).unwrap(), four);
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
    fn numbers_have_a_range() {
        for (tokens_max, refused) in [(0, true), (1, false), (16, false), (17, true)] {
            let mut checker = Checker::default();
            SpeculationSettings { tokens_max, ..SpeculationSettings::default() }.check(&mut checker);
            assert_eq!(!checker.into_problems().is_empty(), refused, "{tokens_max}");
        }
    }
}
