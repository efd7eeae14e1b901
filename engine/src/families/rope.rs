//! Rotary embedding: which elements of a head are rotated, and how fast.

use super::spec::positive;
use std::sync::Arc;

/// Rotary embedding: base and scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Elements of a head that are rotated, its first ones, or with latents its last ones: even.
    pub dim: usize,
    /// Base `theta` of the rotary frequencies.
    pub theta: f32,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are scaled beyond the trained context.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as trained, without scaling.
    None,
    /// All frequencies divided by `factor`.
    Linear { factor: f32 },
    /// Llama 3.1: by wavelength.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f32,
        /// `low_freq_factor`: frequencies with a wavelength over `original_context` divided by this are divided by `factor`.
        low_freq_factor: f32,
        /// `high_freq_factor`: frequencies with a wavelength under `original_context` divided by this stay as they are.
        high_freq_factor: f32,
        /// `original_max_position_embeddings`: the context that the model was first trained for, in tokens.
        original_context: usize,
    },
    /// YaRN (Peng et al., arXiv:2309.00071): by the turns that a pair makes within the original context.
    Yarn {
        /// Divisor of frequencies with few turns.
        factor: f32,
        /// `original_max_position_embeddings`: the context that the model was first trained for, in tokens.
        original_context: usize,
        /// Pairs with more turns stay as they are.
        beta_fast: f32,
        /// Pairs with fewer turns are divided by `factor`.
        beta_slow: f32,
        /// Whether the first and the last pair of those between are whole numbers, as in the authors' code.
        truncate: bool,
        /// Factor of all queries and keys (`attention_factor`).
        amplitude: f32,
    },
    /// LongRoPE (Ding et al., arXiv:2402.13753): a divisor per frequency, `[dim / 2]`.
    Long {
        /// Where no longer context than the original one is served.
        short: Arc<[f32]>,
        /// Where a longer one is.
        long: Arc<[f32]>,
        /// `original_max_position_embeddings`: the context that the model was first trained for, in tokens.
        original_context: usize,
        /// Factor of all queries and keys (`attention_factor`).
        amplitude: f32,
        /// The context that is served.
        served_context: usize,
    },
    /// Dynamic NTK: a larger base for a longer context.
    Dynamic {
        /// How many times the original context may become.
        factor: f32,
        /// `max_position_embeddings`: the context that the model was trained for, in tokens.
        original_context: usize,
        /// The context that is served.
        served_context: usize,
    },
    /// A divisor per frequency, `[dim / 2]` (GGUF's `rope_freqs.weight`). Shared, since each layer refers to it.
    Factors(Arc<[f32]>),
}

/// [`yarn_amplitude`]'s part of the logarithm in the paper.
pub(crate) const YARN_LOG_MULTIPLIER: f64 = 0.1;

/// YaRN's factor of queries and keys for the temperature of attention (arXiv:2309.00071, equation 22), with this part of the logarithm.
pub(crate) fn yarn_amplitude(factor: f32, log_multiplier: f64) -> f64 {
    if factor > 1.0 { log_multiplier * libm::log(f64::from(factor)) + 1.0 } else { 1.0 }
}

impl Rope {
    /// The context that its scaling is for, where it says so.
    pub(crate) fn scaled_context(&self) -> usize {
        match self.scaling {
            RopeScaling::Yarn { factor, original_context, .. }
            | RopeScaling::Dynamic { factor, original_context, .. } => {
                (f64::from(factor) * original_context as f64) as usize
            }
            _ => 0,
        }
    }

    /// Factor of all queries and keys.
    pub(crate) fn amplitude(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { amplitude, .. } | RopeScaling::Long { amplitude, .. } => amplitude,
            _ => 1.0,
        }
    }

    /// See [`DecoderSpec::serve`].
    pub(super) fn serve(&mut self, context: usize) -> Option<usize> {
        match &mut self.scaling {
            RopeScaling::Long { original_context, served_context, .. } => {
                // All longer ones are alike.
                *served_context = context.clamp(*original_context, *original_context + 1);
                Some(*served_context)
            }
            RopeScaling::Dynamic { original_context, served_context, .. } => {
                *served_context = context.max(*original_context);
                Some(*served_context)
            }
            _ => None,
        }
    }
}

impl RopeScaling {
    pub(super) fn check(&self, dim: usize) -> Result<(), String> {
        match self {
            Self::None => Ok(()),
            Self::Linear { factor } => positive("rope scaling factor", *factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("rope scaling factor", *factor)?;
                positive("rope low_freq_factor", *low_freq_factor)?;
                positive("rope high_freq_factor", *high_freq_factor)?;
                if high_freq_factor <= low_freq_factor || *original_context == 0 {
                    return Err(
                        "llama3 rope scaling needs high_freq_factor over low_freq_factor and an original context"
                            .into(),
                    );
                }
                Ok(())
            }
            Self::Yarn { factor, original_context, beta_fast, beta_slow, amplitude, truncate: _ } => {
                positive("rope scaling factor", *factor)?;
                positive("rope beta_fast", *beta_fast)?;
                positive("rope beta_slow", *beta_slow)?;
                positive("rope attention_factor", *amplitude)?;
                if beta_fast < beta_slow || *original_context == 0 {
                    return Err(
                        "yarn rope scaling needs beta_fast of at least beta_slow and an original context".into()
                    );
                }
                Ok(())
            }
            Self::Long { short, long, original_context, amplitude, served_context: _ } => {
                positive("rope attention_factor", *amplitude)?;
                if *original_context == 0 {
                    return Err("longrope needs an original context".into());
                }
                check_factors(short, dim)?;
                check_factors(long, dim)
            }
            Self::Dynamic { factor, original_context, served_context: _ } => {
                positive("rope scaling factor", *factor)?;
                if *factor < 1.0 || *original_context == 0 || dim <= 2 {
                    return Err("dynamic rope scaling needs a factor of at least 1, a context and two pairs".into());
                }
                Ok(())
            }
            Self::Factors(factors) => check_factors(factors, dim),
        }
    }
}

fn check_factors(factors: &[f32], dim: usize) -> Result<(), String> {
    if factors.len() != dim / 2 {
        return Err(format!("{} rope factors for {} frequencies", factors.len(), dim / 2));
    }
    factors.iter().try_for_each(|&f| positive("rope factor", f))
}
