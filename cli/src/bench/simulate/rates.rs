//! The behaviour and speed of simulated workers: `rates.toml`, or a file like it.

use anyhow::{Context as _, ensure};
use baton_simulation::rates::Rates;
use std::path::Path;

/// Reads the committed file, or another one. The file documents what each rate means and where the numbers come from.
pub(super) fn read(file: Option<&Path>) -> anyhow::Result<Rates> {
    let Some(path) = file else { return parse(include_str!("rates.toml")).context("rates.toml") };
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> anyhow::Result<Rates> {
    let rates: Rates = toml::from_str(text)?;
    let positive = [
        ("prefill.tokens_per_s", rates.prefill.tokens_per_s),
        ("decode.step_s", rates.decode.step_s),
        ("transfer.bytes_per_s", rates.transfer.bytes_per_s),
        ("router.round_trip_s", rates.router.round_trip_s),
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
        ensure!(value >= 0.0 && value.is_finite(), "{name} must be a number of at least 0, not {value}");
    }
    let counts = [
        ("kv.bytes_per_token", rates.kv.bytes_per_token),
        ("prefill.chunk_tokens", rates.prefill.chunk_tokens),
        ("decode.chunk_tokens", rates.decode.chunk_tokens),
        ("decode.running_max", rates.decode.running_max),
    ];
    for (name, value) in counts {
        ensure!(value > 0, "{name} must be at least 1");
    }
    Ok(rates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_rates_are_as_told() {
        let rates = read(None).unwrap();
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
        assert!(parse(&text.replace("tokens_per_s = 8000.0", "tokens_per_s = 0.0")).is_err());
        assert!(parse(&text.replace("chunk_tokens = 2048", "chunk_tokens = 0")).is_err());
        assert!(parse(&format!("{text}\nspeed = 3")).is_err());
    }
}
