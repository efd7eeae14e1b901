//! Cost of requests: token prices by model, and the formula.

use baton_node::config::{Check, Checker};
use baton_types::Usage;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Prices are per this many tokens.
const TOKENS: f64 = 1e6;
/// Highest price; a larger one is probably a mistake.
const PRICE_MAX: f64 = 1e9;
/// Most models with a price.
const MODELS_MAX: usize = 1024;

/// Settings in the section `prices`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PricesConfig {
    /// The currency of the prices, as answers name it.
    pub currency: String,
    /// Keyed by the id of the model; its aliases are not valid here.
    pub models: BTreeMap<String, Price>,
}

impl Default for PricesConfig {
    fn default() -> Self {
        Self { currency: "USD".into(), models: BTreeMap::new() }
    }
}

/// Prices of one model, per million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Prompt tokens that were computed.
    pub input: f64,
    /// Prompt tokens read from a prefix cache; `input` where unset.
    #[serde(default)]
    pub cached_input: Option<f64>,
    /// Prompt tokens computed and stored in a prefix cache; `input` where unset.
    #[serde(default)]
    pub cache_write: Option<f64>,
    /// Tokens of the answer.
    pub output: f64,
}

impl Price {
    /// Every prompt token is of one kind: cached, written or neither. Tokens that were computed again are not charged,
    /// since the client did not cause that.
    fn of(&self, usage: &Usage) -> f64 {
        let reused = usage.cached_tokens.saturating_add(usage.cache_write_tokens);
        let parts = [
            (usage.prompt_tokens.saturating_sub(reused), self.input),
            (usage.cached_tokens, self.cached_input.unwrap_or(self.input)),
            (usage.cache_write_tokens, self.cache_write.unwrap_or(self.input)),
            (usage.completion_tokens, self.output),
        ];
        // Divided once, at the end: prices in whole cents then give sums without rounding digits.
        parts.iter().map(|(tokens, price)| f64::from(*tokens) * price).sum::<f64>() / TOKENS
    }
}

/// The cost of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// The price of all tokens, in `currency`.
    pub amount: f64,
    /// As the operator names it.
    pub currency: String,
}

impl PricesConfig {
    /// The cost of a request's usage; `None` if its model has no price.
    pub(crate) fn cost(&self, model: &str, usage: &Usage) -> Option<Cost> {
        let price = self.models.get(model)?;
        Some(Cost { amount: price.of(usage), currency: self.currency.clone() })
    }
}

impl Check for PricesConfig {
    fn check(&self, at: &mut Checker) {
        let named = (1..=16).contains(&self.currency.len()) && self.currency.bytes().all(|b| b.is_ascii_graphic());
        at.require("currency", named, "1 to 16 printable ASCII characters, e.g. USD").range(
            "models",
            self.models.len(),
            0..=MODELS_MAX,
        );
        for (model, price) in &self.models {
            let prices = [
                ("input", Some(price.input)),
                ("cached_input", price.cached_input),
                ("cache_write", price.cache_write),
                ("output", Some(price.output)),
            ];
            for (name, price) in prices {
                if price.is_some_and(|price| !(0.0..=PRICE_MAX).contains(&price)) {
                    at.problem("models", format!("{name} of {model:?} must be 0 to {PRICE_MAX}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(prompt_tokens: u32, cached_tokens: u32, cache_write_tokens: u32, completion_tokens: u32) -> Usage {
        Usage { prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens, recomputed_tokens: 99 }
    }

    #[test]
    fn each_token_is_paid_once() {
        let whole = Price { input: 2.0, cached_input: Some(0.2), cache_write: Some(2.5), output: 8.0 };
        let plain = Price { cached_input: None, cache_write: None, ..whole };
        let million = 1_000_000;
        let cases = [
            (usage(million, 0, 0, 0), 2.0, 2.0),
            (usage(million, million, 0, 0), 0.2, 2.0),
            (usage(million, 0, million, 0), 2.5, 2.0),
            (usage(0, 0, 0, million), 8.0, 8.0),
            (usage(1_000, 500, 400, 10), 0.00138, 0.00208),
            // A worker that reports more than the prompt has.
            (usage(10, 10, 10, 0), 0.000_027, 0.000_04),
        ];
        for (usage, expected, expected_plain) in cases {
            assert!((whole.of(&usage) - expected).abs() < 1e-12, "{usage:?} {}", whole.of(&usage));
            assert!((plain.of(&usage) - expected_plain).abs() < 1e-12, "{usage:?} {}", plain.of(&usage));
        }
    }

    #[test]
    fn models_without_a_price_cost_nothing_that_is_said() {
        let price = Price { input: 1.0, cached_input: None, cache_write: None, output: 1.0 };
        let prices = PricesConfig { currency: "EUR".into(), models: [("m".into(), price)].into() };
        let cost = Cost { amount: 0.000_003, currency: "EUR".into() };
        assert_eq!(prices.cost("m", &usage(1, 0, 0, 2)), Some(cost));
        assert_eq!(prices.cost("n", &usage(1, 0, 0, 2)), None);
    }
}
