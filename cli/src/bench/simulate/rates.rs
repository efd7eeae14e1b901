//! What a simulated worker does, and how fast: `rates.toml`, or a file like it.

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use std::path::Path;

/// Rates of one kind of worker. What each means, and where the numbers come from, stands in the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rates {
    pub(super) prefill: Prefill,
    pub(super) decode: Decode,
    pub(super) kv: Kv,
    pub(super) transfer: Transfer,
    pub(super) router: Router,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Prefill {
    pub(super) tokens_per_s: f64,
    pub(super) context_s_per_token: f64,
    pub(super) prompt_s: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Decode {
    pub(super) step_s: f64,
    pub(super) sequence_s: f64,
    pub(super) context_s_per_token: f64,
    pub(super) running_max: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kv {
    pub(super) bytes_per_token: u32,
    pub(super) pool_tokens: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Transfer {
    pub(super) bytes_per_s: f64,
    pub(super) latency_s: f64,
    pub(super) layers: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Router {
    pub(super) round_trip_s: f64,
    pub(super) report_s: f64,
}

impl Rates {
    /// The committed file, or another one.
    pub(super) fn read(file: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = file else { return Self::parse(include_str!("rates.toml")).context("rates.toml") };
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let rates: Self = toml::from_str(text)?;
        let positive = [
            ("prefill.tokens_per_s", rates.prefill.tokens_per_s),
            ("decode.step_s", rates.decode.step_s),
            ("transfer.bytes_per_s", rates.transfer.bytes_per_s),
            ("router.round_trip_s", rates.router.round_trip_s),
            ("router.report_s", rates.router.report_s),
        ];
        for (name, value) in positive {
            ensure!(value > 0.0 && value.is_finite(), "{name} must be a number above 0, not {value}");
        }
        let others = [
            ("prefill.context_s_per_token", rates.prefill.context_s_per_token),
            ("prefill.prompt_s", rates.prefill.prompt_s),
            ("decode.sequence_s", rates.decode.sequence_s),
            ("decode.context_s_per_token", rates.decode.context_s_per_token),
            ("transfer.latency_s", rates.transfer.latency_s),
        ];
        for (name, value) in others {
            ensure!(value >= 0.0 && value.is_finite(), "{name} must be a number from 0 on, not {value}");
        }
        let granule = rates.transfer.layers * 4;
        ensure!(
            granule > 0 && rates.kv.bytes_per_token > 0 && rates.kv.bytes_per_token.is_multiple_of(granule),
            "kv.bytes_per_token must be a multiple of 4 bytes for each of transfer.layers, not {}",
            rates.kv.bytes_per_token
        );
        ensure!(rates.decode.running_max > 0, "decode.running_max must be at least 1");
        Ok(rates)
    }

    /// Seconds to compute tokens `from..to` of a prompt.
    pub(super) fn compute_s(&self, from: u64, to: u64) -> f64 {
        let (from, to) = (from as f64, to as f64);
        (to - from) / self.prefill.tokens_per_s + self.prefill.context_s_per_token * (to * to - from * from) / 2.0
    }

    /// Tokens before a token that takes twice as long as the first one; 0 where context costs nothing.
    pub(super) fn prefill_doubles_at_tokens(&self) -> f64 {
        let context = self.prefill.context_s_per_token * self.prefill.tokens_per_s;
        if context > 0.0 { 1.0 / context } else { 0.0 }
    }

    /// Seconds that the KV of so many tokens is on the wire.
    pub(super) fn moved_s(&self, tokens: u64) -> f64 {
        tokens as f64 * f64::from(self.kv.bytes_per_token) / self.transfer.bytes_per_s
    }

    /// Seconds of one decode step.
    pub(super) fn step_s(&self, sequences: usize, context_tokens: u64) -> f64 {
        let decode = &self.decode;
        decode.step_s + sequences as f64 * decode.sequence_s + context_tokens as f64 * decode.context_s_per_token
    }

    /// Seconds by which each step of so many sequences takes longer than the one before it.
    pub(super) fn step_growth_s(&self, sequences: usize) -> f64 {
        sequences as f64 * self.decode.context_s_per_token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_rates_are_as_told() {
        let rates = Rates::read(None).unwrap();
        assert_eq!(rates.prefill.tokens_per_s, 8_000.0);
        assert!((rates.prefill_doubles_at_tokens() / 53_900.0 - 1.0).abs() < 0.01);
        assert_eq!(rates.kv.bytes_per_token, 2 * 80 * 8 * 128 * 2);
        assert!((rates.compute_s(0, 8_000) - 1.0742).abs() < 1e-3, "{}", rates.compute_s(0, 8_000));
        let parts = rates.compute_s(0, 3_000) + rates.compute_s(3_000, 8_000);
        assert!((parts - rates.compute_s(0, 8_000)).abs() < 1e-9, "what is cached is what is saved");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let text = include_str!("rates.toml");
        assert!(Rates::parse(&text.replace("tokens_per_s = 8000.0", "tokens_per_s = 0.0")).is_err());
        assert!(Rates::parse(&text.replace("layers = 80", "layers = 81")).is_err());
        assert!(Rates::parse(&format!("{text}\nspeed = 3")).is_err());
    }
}
