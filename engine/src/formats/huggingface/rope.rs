//! Rotary embedding of a `config.json`, in the old spelling (`rope_theta`, `rope_scaling`) and the new (`rope_parameters`).
//!
//! Meaning of the parameters: `modeling_rope_utils.py` of transformers.

use super::json::JsonObject;
use crate::families::{Rope, RopeScaling, YARN_LOG_MULTIPLIER, yarn_amplitude};
use crate::formats::WeightsError;

/// Base of a configuration without one (transformers' default for Llama, which the first Llama models use).
const THETA_DEFAULT: f32 = 10_000.0;

impl JsonObject {
    /// The rotary embedding of heads of `head_dim` elements, all of which are rotated.
    pub(crate) fn rope(&self, head_dim: usize) -> Result<Rope, WeightsError> {
        self.rope_of(head_dim, &[])
    }

    /// As [`JsonObject::rope`], of families that read `partial_rotary_factor`.
    pub(crate) fn partial_rope(&self, head_dim: usize) -> Result<Rope, WeightsError> {
        self.rope_of(head_dim, &[PARTIAL])
    }

    /// As [`JsonObject::partial_rope`], of a rotary embedding of three axes, in all of which a token of text has its position.
    pub(crate) fn text_rope(&self, head_dim: usize) -> Result<Rope, WeightsError> {
        self.rope_of(head_dim, &[PARTIAL, "mrope_interleaved", "mrope_section"])
    }

    /// Whether the base is stated, in either spelling: some families have another one by default.
    pub(crate) fn need_theta(&self) -> Result<(), WeightsError> {
        self.need_of_rope("rope_theta")
    }

    /// Whether a key of the rotary embedding is stated, in either spelling.
    pub(crate) fn need_of_rope(&self, key: &str) -> Result<(), WeightsError> {
        let stated = self.object("rope_parameters")?.is_some_and(|rope| rope.get(key).is_some());
        self.need(key, self.get(key).map(drop).or(stated.then_some(())))
    }

    /// `own`: keys of `rope_parameters` that the family knows beyond those of each scaling.
    fn rope_of(&self, head_dim: usize, own: &[&str]) -> Result<Rope, WeightsError> {
        let (old, new) = (self.object("rope_scaling")?, self.object("rope_parameters")?);
        if old.is_some() && new.is_some() {
            return Err(self.damaged("both rope_scaling and rope_parameters are given; keep one"));
        }
        let same = |key: &str| {
            let outer = self.float(key)?;
            let inner = new.as_ref().map(|rope| rope.float(key)).transpose()?.flatten();
            if let (Some(a), Some(b)) = (outer, inner)
                && a != b
            {
                return Err(self.damaged(format!("{key} is {a} and in rope_parameters {b}")));
            }
            Ok(inner.or(outer))
        };
        let theta = same("rope_theta")?;
        let partial = if own.contains(&PARTIAL) { same(PARTIAL)? } else { None };
        let scaling = match old.or(new.clone()) {
            Some(rope) => self.scaling(&rope, own)?,
            None => RopeScaling::None,
        };
        Ok(Rope { dim: rotated(head_dim, partial), theta: theta.unwrap_or(THETA_DEFAULT), scaling })
    }

    /// As [`JsonObject::rope`], of an object that has the parameters of some layers.
    pub(crate) fn rope_parameters(&self, head_dim: usize) -> Result<Rope, WeightsError> {
        let theta = self.need("rope_theta", self.float("rope_theta")?)?;
        Ok(Rope { dim: head_dim, theta, scaling: self.scaling(self, &[])? })
    }

    /// The scaling in `rope`, of a model with this configuration.
    fn scaling(&self, rope: &Self, own: &[&str]) -> Result<RopeScaling, WeightsError> {
        let (kind, legacy) = (rope.text("rope_type")?, rope.text("type")?);
        if let (Some(a), Some(b)) = (kind, legacy)
            && a != b
        {
            return Err(rope.damaged(format!("rope_type is `{a}` and type `{b}`")));
        }
        let kind = rope.need("rope_type", kind.or(legacy))?;
        let factor = || rope.need("factor", rope.float("factor")?);
        let (scaling, known): (_, &[&str]) = match kind {
            "default" => (RopeScaling::None, &[]),
            "linear" => (RopeScaling::Linear { factor: factor()? }, &["factor"]),
            "llama3" => {
                let scaling = RopeScaling::Llama3 {
                    factor: factor()?,
                    low_freq_factor: rope.need("low_freq_factor", rope.float("low_freq_factor")?)?,
                    high_freq_factor: rope.need("high_freq_factor", rope.float("high_freq_factor")?)?,
                    original_context: rope.need(ORIGINAL, rope.size(ORIGINAL)?)?,
                };
                (scaling, &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL])
            }
            "yarn" => (yarn(rope, factor()?)?, YARN),
            // The name of Phi-3's first release.
            "longrope" | "su" => (self.long(rope)?, LONG),
            "dynamic" => {
                let original_context = self.need("max_position_embeddings", self.size("max_position_embeddings")?)?;
                (RopeScaling::Dynamic { factor: factor()?, original_context, served_context: 0 }, &["factor"])
            }
            other => {
                let hint = "`default`, `linear`, `llama3`, `yarn`, `longrope` and `dynamic` are implemented";
                return Err(rope.unsupported(format!("rope_type `{other}`"), hint));
            }
        };
        for (key, value) in rope.keys() {
            let known = ["rope_type", "type", "rope_theta"].contains(&key.as_str()) || known.contains(&key.as_str());
            let own = own.contains(&key.as_str()) || (key == PARTIAL && value.as_f64() == Some(1.0));
            if !(known || own || value.is_null()) {
                let hint = "delete it if it has no meaning";
                return Err(rope.unsupported(format!("{key} with rope_type `{kind}`"), hint));
            }
        }
        Ok(scaling)
    }

    fn long(&self, rope: &Self) -> Result<RopeScaling, WeightsError> {
        let original_context = match (self.size(ORIGINAL)?, rope.size(ORIGINAL)?) {
            (Some(outer), Some(inner)) if outer != inner => {
                return Err(self.damaged(format!("{ORIGINAL} is {outer} and for the rotary embedding {inner}")));
            }
            (outer, inner) => self.need(ORIGINAL, outer.or(inner))?,
        };
        let stated = self.need("max_position_embeddings", self.size("max_position_embeddings")?)?;
        let factor = rope.float("factor")?.map_or(stated as f64 / original_context as f64, f64::from);
        // The paper's formula for what attention over a longer context needs.
        let amplitude = match rope.float("attention_factor")? {
            Some(stated) => stated,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + libm::log(factor) / libm::log(original_context as f64)).sqrt() as f32,
        };
        let factors = |key: &str| rope.need(key, rope.floats(key)?);
        let (short, long) = (factors("short_factor")?.into(), factors("long_factor")?.into());
        Ok(RopeScaling::Long { short, long, original_context, amplitude, served_context: 0 })
    }
}

/// The part of each head that is rotated.
const PARTIAL: &str = "partial_rotary_factor";

/// The context that a model was first trained for.
const ORIGINAL: &str = "original_max_position_embeddings";

/// Keys of [`JsonObject::long`].
const LONG: &[&str] = &["attention_factor", "factor", "long_factor", ORIGINAL, "short_factor"];

/// Elements that are rotated, cut as in transformers.
fn rotated(head_dim: usize, partial: Option<f32>) -> usize {
    partial.map_or(head_dim, |factor| (head_dim as f64 * f64::from(factor)) as usize)
}

/// Keys of [`yarn`].
const YARN: &[&str] =
    &["attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", ORIGINAL, "truncate"];

fn yarn(rope: &JsonObject, factor: f32) -> Result<RopeScaling, WeightsError> {
    // DeepSeek's configurations give the temperature of attention two scales.
    let scale = |of: f32| yarn_amplitude(factor, YARN_LOG_MULTIPLIER * f64::from(of));
    let amplitude = match (rope.float("attention_factor")?, rope.float("mscale")?, rope.float("mscale_all_dim")?) {
        (Some(stated), _, _) => stated,
        (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => (scale(one) / scale(all)) as f32,
        (None, _, _) => scale(1.0) as f32,
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_context: rope.need(ORIGINAL, rope.size(ORIGINAL)?)?,
        beta_fast: rope.float("beta_fast")?.unwrap_or(32.0),
        beta_slow: rope.float("beta_slow")?.unwrap_or(1.0),
        truncate: rope.bool("truncate")?.unwrap_or(true),
        amplitude,
    })
}
