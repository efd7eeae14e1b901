//! Rotary tables: angles in f64, rounded once to f32.
//!
//! The functions come from the Rust crate `libm`, not from the platform's C library: the table determines KV bits, and two hosts of one
//! numerics class may have different C libraries.

use super::ModelError;
use crate::families::{AttentionSpec, Rope, RopeScaling};
use baton_kernels::device::RopeTable;
use std::f64::consts::TAU;

/// `a * cos(p * f[i])` and `a * sin(p * f[i])`, `a` being the amplitude of YaRN or LongRoPE or 1, for positions `0 .. positions` and the inverse frequencies `f`, `[positions, dim / 2]`.
///
/// Without a rotary embedding all angles are 0: `x * 1 - y * 0` is `x`.
pub fn rope_table(attention: &AttentionSpec, positions: usize) -> Result<RopeTable, ModelError> {
    let dim = attention.rope.as_ref().map_or(attention.head_dim, |rope| rope.dim);
    let frequencies = match &attention.rope {
        Some(rope) => inverse_frequencies(rope)?,
        None => vec![0.0; dim / 2],
    };
    let amplitude = attention.rope.as_ref().map_or(1.0, |rope| f64::from(rope.amplitude()));
    let angles = || (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f64 * f));
    let table = |f: fn(f64) -> f64| {
        // The iterator does not know its length: without a capacity the vector could take twice its size.
        let mut table = Vec::with_capacity(positions * frequencies.len());
        table.extend(angles().map(|angle| (f(angle) * amplitude) as f32));
        table
    };
    Ok(RopeTable { cos: table(libm::cos), sin: table(libm::sin), dim })
}

/// Radians per position of each rotated pair, `[dim / 2]`: `theta^(-2i / dim)` (Su et al., "RoFormer", arXiv:2104.09864), scaled as the
/// model specifies.
///
/// Fails where `Factors` has another length than `dim / 2`.
pub fn inverse_frequencies(rope: &Rope) -> Result<Vec<f64>, ModelError> {
    let dim = rope.dim;
    let base = (0..dim / 2).map(|i| libm::pow(f64::from(rope.theta), -((2 * i) as f64) / dim as f64));
    Ok(match &rope.scaling {
        RopeScaling::None => base.collect(),
        RopeScaling::Linear { factor } => base.map(|f| f / f64::from(*factor)).collect(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let scaling = Llama3 {
                factor: f64::from(*factor),
                low: f64::from(*low_freq_factor),
                high: f64::from(*high_freq_factor),
                original_context: *original_context as f64,
            };
            base.map(|f| scaling.apply(f)).collect()
        }
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            // The pair that makes so many turns within the original context, as a real number.
            let pair_of = |turns: f32| {
                let context = *original_context as f64;
                dim as f64 * libm::log(context / (f64::from(turns) * TAU)) / (2.0 * libm::log(f64::from(rope.theta)))
            };
            let (mut low, mut high) = (pair_of(*beta_fast), pair_of(*beta_slow));
            if *truncate {
                (low, high) = (libm::floor(low), libm::ceil(high));
            }
            let (low, high) = (low.max(0.0), high.min((dim - 1) as f64));
            // As in the authors' code: no division by zero.
            let width = if high == low { 0.001 } else { high - low };
            let blend = |(i, f): (usize, f64)| {
                let divided = ((i as f64 - low) / width).clamp(0.0, 1.0);
                f / f64::from(*factor) * divided + f * (1.0 - divided)
            };
            base.enumerate().map(blend).collect()
        }
        RopeScaling::Long { short, long, original_context, served_context, .. } => {
            divided(base, if served_context > original_context { long } else { short }, dim)?
        }
        RopeScaling::Dynamic { factor, original_context, served_context } => {
            // theta grows so that the slowest pair makes as many turns in the served context as it made in the original one.
            let longer = (*served_context).max(*original_context) as f64 / *original_context as f64;
            let growth = f64::from(*factor) * longer - (f64::from(*factor) - 1.0);
            let theta = f64::from(rope.theta) * libm::pow(growth, dim as f64 / (dim as f64 - 2.0));
            (0..dim / 2).map(|i| libm::pow(theta, -((2 * i) as f64) / dim as f64)).collect()
        }
        RopeScaling::Factors(factors) => divided(base, factors, dim)?,
    })
}

fn divided(base: impl Iterator<Item = f64>, factors: &[f32], dim: usize) -> Result<Vec<f64>, ModelError> {
    if factors.len() != dim / 2 {
        let expected = format!("{} numbers, one for each rotated pair", dim / 2);
        return Err(ModelError::Config { name: "rope factors", expected, got: factors.len() });
    }
    Ok(base.zip(factors).map(|(f, factor)| f / f64::from(*factor)).collect())
}

/// Llama 3.1's scaling by wavelength, as `rope_type: llama3` is defined in Hugging Face configurations. Frequencies with many turns within
/// the original context stay, those with too few turns are divided, and between them the two are blended linearly in the number of turns.
struct Llama3 {
    factor: f64,
    low: f64,
    high: f64,
    original_context: f64,
}

impl Llama3 {
    fn apply(&self, frequency: f64) -> f64 {
        let turns = self.original_context * frequency / TAU;
        if turns >= self.high {
            frequency
        } else if turns < self.low {
            frequency / self.factor
        } else {
            let keep = (turns - self.low) / (self.high - self.low);
            (1.0 - keep) * frequency / self.factor + keep * frequency
        }
    }
}
