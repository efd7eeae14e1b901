//! Converts metadata to [`DecoderSpec`]. A file with an unknown key under its architecture's name is refused.

use super::header::Header;
use super::names;
use super::value::Value;
use crate::families::{
    AttentionSpec, DecoderSpec, GgufFamily, LayerSpec, Rope, RopeScaling, RotaryRows, YARN_LOG_MULTIPLIER, registry,
    yarn_amplitude,
};
use crate::formats::{WeightsError, check_sampling};
use baton_types::SamplingDefaults;

/// Keys of an architecture that determine the spec, or that do not affect the computation.
const KNOWN: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    // Which of two checkpoint layouts a converter read; the tensors are laid out the same.
    "tensor_data_layout",
    "vocab_size",
];

/// Keys that are accepted only with the value that has no effect.
const HARMLESS_AT: &[(&str, Value<'_>)] = &[
    ("attention.causal", Value::Bool(true)),
    ("rope.scaling.attn_factor", Value::Float(1.0)),
    ("rope.scaling.yarn_attn_factor", Value::Float(1.0)),
    ("rope.scaling.yarn_ext_factor", Value::Float(1.0)),
    ("logit_scale", Value::Float(1.0)),
    ("embedding_scale", Value::Float(1.0)),
    ("residual_scale", Value::Float(1.0)),
];

/// Factor of all queries and keys, of families whose `keys` have it.
const AMPLITUDE: &str = "rope.scaling.attn_factor";

/// The base of rotary frequencies where a file states none (llama.cpp's default).
const THETA_DEFAULT: f32 = 10_000.0;

/// Divisors of rotary frequencies that a file has as tensors.
#[derive(Default)]
pub(super) struct RopeFactors {
    /// For any context.
    pub(super) all: Option<Vec<f32>>,
    /// LongRoPE, for no longer context than the original one.
    pub(super) short: Option<Vec<f32>>,
    /// LongRoPE, for longer ones.
    pub(super) long: Option<Vec<f32>>,
}

/// Metadata of one file, with the path for messages.
pub(crate) struct GgufConfig<'h, 'a> {
    path: &'h str,
    header: &'h Header<'a>,
    family: &'static GgufFamily,
}

impl<'h, 'a> GgufConfig<'h, 'a> {
    /// Checks the architecture and that every one of its keys is understood.
    pub(super) fn try_new(path: &'h str, header: &'h Header<'a>) -> Result<Self, WeightsError> {
        const ARCHITECTURE: &str = "general.architecture";
        let architecture = match header.metadata.get(ARCHITECTURE) {
            Some(Value::String(architecture)) => *architecture,
            _ => return Err(WeightsError::damaged(path, format!("{ARCHITECTURE} is missing or no text"))),
        };
        let family = registry::by_architecture(architecture).ok_or_else(|| {
            let hint = format!("one of {} is needed", registry::architectures());
            WeightsError::unsupported(path, format!("{ARCHITECTURE} `{architecture}`"), hint)
        })?;
        let config = Self { path, header, family };
        for (key, value) in &header.metadata {
            let name = key.strip_prefix(architecture).and_then(|rest| rest.strip_prefix('.'));
            let Some(name) = name else { continue };
            // For keys without a listed neutral value: zero, false and empty switch a feature off.
            let own = family.keys.contains(&name) || family.extra_layers == Some(name);
            let harmless = own
                || match HARMLESS_AT.iter().find(|(known, _)| name == *known) {
                    Some((_, neutral)) => value == neutral,
                    None => KNOWN.contains(&name) || value.is_off(),
                };
            if !harmless {
                let hint = "this key may change the mathematics, so the model is refused rather than computed wrongly";
                return Err(WeightsError::unsupported(path, key.to_string(), hint));
            }
        }
        Ok(config)
    }

    pub(crate) fn damaged(&self, message: impl Into<String>) -> WeightsError {
        WeightsError::damaged(self.path, message)
    }

    pub(crate) fn unsupported(&self, what: impl Into<String>, hint: &str) -> WeightsError {
        WeightsError::unsupported(self.path, what, hint)
    }

    pub(super) fn get(&self, key: &str) -> Option<Value<'a>> {
        self.header.metadata.get(key).copied()
    }

    /// A key of the architecture, with its prefix.
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.family.architecture)
    }

    pub(super) fn family(&self) -> &'static GgufFamily {
        self.family
    }

    fn size_or(&self, name: &str, default: Option<usize>) -> Result<usize, WeightsError> {
        let key = self.key(name);
        let Some(value) = self.get(&key) else {
            return default.ok_or_else(|| self.damaged(format!("{key} is missing")));
        };
        if let Value::Array(_) = value {
            return Err(WeightsError::unsupported(self.path, format!("{key} per layer"), "layers must be alike"));
        }
        let size = value.as_unsigned().and_then(|n| usize::try_from(n).ok());
        size.ok_or_else(|| self.damaged(format!("{key} is no size")))
    }

    /// A number of the architecture, if the file has it.
    pub(crate) fn own_float(&self, name: &str) -> Result<Option<f32>, WeightsError> {
        self.float(&self.key(name))
    }

    /// A size of the architecture, or what it is where the file does not say it.
    pub(crate) fn own_size_or(&self, name: &str, default: usize) -> Result<usize, WeightsError> {
        self.size_or(name, Some(default))
    }

    /// Tokens of a sliding window.
    pub(crate) fn own_window(&self, name: &str) -> Result<u32, WeightsError> {
        let window = self.own_size(name)?;
        u32::try_from(window).map_err(|_| self.damaged(format!("a sliding window of {window} tokens")))
    }

    /// A size of the architecture.
    pub(crate) fn own_size(&self, name: &str) -> Result<usize, WeightsError> {
        self.size_or(name, None)
    }

    /// Layers of the decoder, and those behind them, which only predict tokens after the next.
    pub(super) fn layers(&self) -> Result<(usize, usize), WeightsError> {
        let all = self.own_size("block_count")?;
        let Some(key) = self.family.extra_layers else { return Ok((all, 0)) };
        let extra = self.own_size_or(key, 0)?;
        let layers = all.checked_sub(extra).filter(|layers| *layers > 0 || extra == 0);
        let message = || format!("{} is {extra}, of {all} layers in all", self.key(key));
        Ok((layers.ok_or_else(|| self.damaged(message()))?, extra))
    }

    /// A choice of the architecture, or what it is where the file does not say it.
    pub(crate) fn own_bool_or(&self, name: &str, default: bool) -> Result<bool, WeightsError> {
        match self.get(&self.key(name)) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(_) => Err(self.damaged(format!("{} is no true or false", self.key(name)))),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f32>, WeightsError> {
        let read = |value: Value<'_>| value.as_f32().ok_or_else(|| self.damaged(format!("{key} is not a number")));
        self.get(key).map(read).transpose()
    }

    /// The spec. `vocab`, `tied` and `factors` come from the tensors.
    pub(super) fn spec(&self, vocab: usize, tied: bool, factors: RopeFactors) -> Result<DecoderSpec, WeightsError> {
        let hidden = self.size_or("embedding_length", None)?;
        let heads = self.size_or("attention.head_count", None)?;
        if heads == 0 {
            return Err(self.damaged(format!("{} is 0", self.key("attention.head_count"))));
        }
        let even_split = hidden.is_multiple_of(heads).then(|| hidden / heads);
        let head_dim = self.size_or("attention.key_length", even_split)?;
        let must_equal_head_dim = |name: &str, hint: &str| {
            let found = self.size_or(name, Some(head_dim))?;
            if found == head_dim {
                return Ok(());
            }
            let what = format!("{} = {found} with heads of {head_dim}", self.key(name));
            Err(WeightsError::unsupported(self.path, what, hint))
        };
        if !self.family.reads_lengths {
            must_equal_head_dim("attention.value_length", "keys and values must be equally long")?;
        }
        if self.family.rotary_rows == RotaryRows::Neighbours && !self.family.reads_lengths {
            must_equal_head_dim("rope.dimension_count", "rotary embedding must cover the whole head")?;
        }
        if self.size_or("vocab_size", Some(vocab))? != vocab {
            return Err(self.damaged(format!("{} is not the embedding's {vocab} rows", self.key("vocab_size"))));
        }
        let epsilon = self.key("attention.layer_norm_rms_epsilon");
        let rms_eps = self.float(&epsilon)?.ok_or_else(|| self.damaged(format!("{epsilon} is missing")))?;
        let theta = self.float(&self.key("rope.freq_base"))?.unwrap_or(THETA_DEFAULT);
        let dim = self.size_or("rope.dimension_count", Some(head_dim))?;
        let rope = Rope { dim, theta, scaling: self.scaling(factors)? };
        let kv_heads = self.size_or("attention.head_count_kv", Some(heads))?;
        let attention = AttentionSpec::llama(heads, kv_heads, head_dim, rope);
        let layer = LayerSpec::llama(attention, self.size_or("feed_forward_length", None)?, rms_eps);
        let layers = DecoderSpec::uniform_layers(layer, self.layers()?.0);
        let mut spec = DecoderSpec {
            vocab,
            hidden,
            context: self.size_or("context_length", None)?,
            layers: layers.map_err(|reason| self.damaged(reason))?,
            final_rms_eps: rms_eps,
            tied,
            embedding_factor: 1.0,
            logit_factor: 1.0,
            logit_soft_cap: None,
        };
        (self.family.read)(self, &mut spec)?;
        spec.check().map_err(|reason| self.damaged(reason))?;
        spec.serve(spec.context);
        Ok(spec)
    }

    /// As in llama.cpp: a factor without a type is linear, a factor of 0 means none, and per-frequency divisors multiply with the linear
    /// one. YaRN has the paper's temperature of attention.
    fn scaling(&self, factors: RopeFactors) -> Result<RopeScaling, WeightsError> {
        let RopeFactors { all: factors, short, long } = factors;
        let is_long = short.is_some() || long.is_some();
        let amplitude = self.own_float(AMPLITUDE)?.filter(|amplitude| *amplitude != 1.0);
        if amplitude.is_some() && !is_long {
            let what = format!("{} without {}", self.key(AMPLITUDE), names::ROPE_LONG);
            return Err(self.unsupported(what, "it is implemented for LongRoPE"));
        }
        let key = self.key("rope.scaling.type");
        let kind = match self.get(&key) {
            None => "linear",
            Some(Value::String(kind)) => kind,
            Some(_) => return Err(self.damaged(format!("{key} is not a string"))),
        };
        let factor = match kind {
            "none" => 1.0,
            "linear" => {
                let stated = self.float(&self.key("rope.scaling.factor"))?;
                let legacy = self.float(&self.key("rope.scale_linear"))?;
                stated.or(legacy).filter(|&f| f != 0.0).unwrap_or(1.0)
            }
            "longrope" if is_long => 1.0,
            "yarn" if factors.is_none() && !is_long => return self.yarn(),
            other => {
                let what = format!("{key} `{other}`");
                return Err(WeightsError::unsupported(self.path, what, "`none`, `linear` and `yarn` are implemented"));
            }
        };
        if is_long {
            let (Some(short), Some(long), None, 1.0) = (short, long, &factors, factor) else {
                let (short, long) = (names::ROPE_SHORT, names::ROPE_LONG);
                return Err(self.damaged(format!("{short} and {long} belong together, without other scaling")));
            };
            return Ok(RopeScaling::Long {
                short: short.into(),
                long: long.into(),
                original_context: self.own_size("rope.scaling.original_context_length")?,
                amplitude: amplitude.unwrap_or(1.0),
                served_context: 0,
            });
        }
        Ok(match factors {
            Some(factors) => RopeScaling::Factors(factors.into_iter().map(|f| f * factor).collect()),
            None if factor == 1.0 => RopeScaling::None,
            None => RopeScaling::Linear { factor },
        })
    }

    /// YaRN, with the paper's temperature of attention.
    fn yarn(&self) -> Result<RopeScaling, WeightsError> {
        let need = |name: &str| {
            let value = self.own_float(name)?;
            value.ok_or_else(|| self.damaged(format!("{} is missing", self.key(name))))
        };
        let factor = need("rope.scaling.factor")?;
        Ok(RopeScaling::Yarn {
            factor,
            original_context: self.own_size("rope.scaling.original_context_length")?,
            beta_fast: self.own_float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.own_float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            truncate: true,
            amplitude: yarn_amplitude(factor, YARN_LOG_MULTIPLIER) as f32,
        })
    }

    /// `general.sampling.*`, if the file has them.
    pub(super) fn sampling(&self) -> Result<SamplingDefaults, WeightsError> {
        let top_k = self.get("general.sampling.top_k").and_then(Value::as_unsigned);
        let defaults = SamplingDefaults {
            temperature: self.float("general.sampling.temp")?,
            top_p: self.float("general.sampling.top_p")?,
            top_k: top_k.and_then(|k| u32::try_from(k).ok()),
            repetition_penalty: self.float("general.sampling.penalty_repeat")?,
        };
        check_sampling(defaults).map_err(|reason| self.damaged(format!("general.sampling: {reason}")))?;
        Ok(defaults)
    }
}
