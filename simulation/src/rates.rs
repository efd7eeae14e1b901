//! The speeds of a worker. The file that `baton bench --simulate` reads documents what each number means, and where the default numbers
//! come from.

use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    pub prefill: PrefillRates,
    pub decode: DecodeRates,
    pub kv: KvRates,
    pub transfer: TransferRates,
    pub router: RouterRates,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillRates {
    pub tokens_per_s: f64,
    pub context_s_per_token: f64,
    pub prompt_s: f64,
    pub chunk_tokens: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeRates {
    pub step_s: f64,
    pub sequence_s: f64,
    pub context_s_per_token: f64,
    pub running_max: u32,
    pub chunk_tokens: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvRates {
    pub bytes_per_token: u32,
    pub pool_tokens: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferRates {
    pub bytes_per_s: f64,
    pub latency_s: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterRates {
    pub round_trip_s: f64,
}

impl Rates {
    /// Seconds to compute tokens `from..to` of a prompt.
    pub fn compute_s(&self, from: u64, to: u64) -> f64 {
        let (from, to) = (from as f64, to as f64);
        (to - from) / self.prefill.tokens_per_s + self.prefill.context_s_per_token * (to * to - from * from) / 2.0
    }

    /// Context length at which a token takes twice as long as the first one; 0 if context costs nothing.
    pub fn prefill_doubles_at_tokens(&self) -> f64 {
        let context = self.prefill.context_s_per_token * self.prefill.tokens_per_s;
        if context > 0.0 { 1.0 / context } else { 0.0 }
    }

    /// Seconds that the KV of this many tokens takes on the wire.
    pub fn moved_s(&self, tokens: u64) -> f64 {
        tokens as f64 * f64::from(self.kv.bytes_per_token) / self.transfer.bytes_per_s
    }

    /// Seconds of one decode step, without the prompt tokens computed with it; 0 without sequences.
    pub fn step_s(&self, sequences: usize, context_tokens: u64) -> f64 {
        let decode = &self.decode;
        let per_token = sequences as f64 * decode.sequence_s + context_tokens as f64 * decode.context_s_per_token;
        if sequences > 0 { decode.step_s + per_token } else { 0.0 }
    }
}
