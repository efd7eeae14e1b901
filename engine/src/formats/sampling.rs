//! Ranges of a model's sampling defaults: the same as for requests.

use baton_types::{SamplingDefaults, SamplingParams};

/// Checks a model's defaults; the message names the parameter.
pub(super) fn check_sampling(defaults: SamplingDefaults) -> Result<(), String> {
    let neutral = SamplingParams::default();
    let params = SamplingParams {
        temperature: defaults.temperature.unwrap_or(neutral.temperature),
        top_p: defaults.top_p.unwrap_or(neutral.top_p),
        top_k: defaults.top_k.unwrap_or(neutral.top_k),
        repetition_penalty: defaults.repetition_penalty.unwrap_or(neutral.repetition_penalty),
        ..neutral
    };
    params.try_new().map(drop).map_err(|error| error.to_string())
}
