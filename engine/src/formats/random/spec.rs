//! Parses specs: `random:hidden=600,layers=3,...`

use super::RandomModel;
use crate::families::{
    Activation, AttentionSpec, Choice, DecoderSpec, ExpertGroups, ExpertsSpec, GatedDeltaSpec, LatentSpec, LayerNorms,
    LayerSpec, QueryKeyNorm, Rope, RopeScaling, Scoring,
};
use crate::formats::WeightsError;
use std::collections::BTreeMap;

/// Most parameters: 64 GiB as f32, far above any useful size.
const PARAMETERS_MAX: u64 = 1 << 34;

const KEYS: &str = "hidden, layers, heads, kv_heads, head_dim, ffn, vocab, context, theta, tied, window, full_every, full_head_dim, full_kv_heads, nope_every, bias, qk_norm, norms, experts, used, biases, sinks, clamp, gelu, factor, soft_cap, rope_dim, latent, query_rank, value_dim, sigmoid, groups, groups_used, shared, dense, gate, delta, delta_keys, delta_key_dim, delta_dim, taps, attention_every, seed";

struct Pairs<'a> {
    spec: &'a str,
    values: BTreeMap<&'a str, &'a str>,
}

impl<'a> Pairs<'a> {
    fn split(spec: &'a str) -> Result<Self, WeightsError> {
        let refuse = |why: String| WeightsError::Spec(format!("`{spec}`: {why}"));
        let body =
            spec.strip_prefix(RandomModel::PREFIX).ok_or_else(|| refuse("a spec starts with `random:`".into()))?;
        let mut values = BTreeMap::new();
        for pair in body.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| refuse(format!("`{pair}` is no key=value")))?;
            if !KEYS.split(", ").any(|known| known == key) {
                return Err(refuse(format!("unknown key `{key}`; there are {KEYS}")));
            }
            if values.insert(key, value).is_some() {
                return Err(refuse(format!("`{key}` is given twice")));
            }
        }
        Ok(Self { spec, values })
    }

    fn get<T: std::str::FromStr>(&self, key: &str, kind: &str, default: T) -> Result<T, WeightsError> {
        let Some(value) = self.values.get(key) else { return Ok(default) };
        value.parse().map_err(|_| WeightsError::Spec(format!("`{}`: {key}={value} is no {kind}", self.spec)))
    }

    /// What one of these words means.
    fn one_of<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<Option<T>, WeightsError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match words.iter().find(|(word, _)| word == value) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => {
                let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
                Err(WeightsError::Spec(format!("`{}`: {key}={value} is none of {}", self.spec, words.join(", "))))
            }
        }
    }

    fn size(&self, key: &str, default: usize) -> Result<usize, WeightsError> {
        self.get(key, "whole number", default)
    }
}

/// Experts of a spec that has some.
fn experts(pairs: &Pairs<'_>, count: usize, biases: bool) -> Result<ExpertsSpec, WeightsError> {
    let sigmoid = pairs.get("sigmoid", "true or false", false)?;
    let groups = match pairs.size("groups", 0)? {
        0 => None,
        count => {
            let best = if sigmoid { 2 } else { 1 };
            Some(ExpertGroups { count, used: pairs.size("groups_used", 1)?, best })
        }
    };
    let scoring = if sigmoid { Scoring::Sigmoid } else { Scoring::Softmax };
    let softmax = ExpertsSpec::softmax(count, pairs.size("used", 2)?, true);
    Ok(ExpertsSpec {
        choice: Choice { scoring, groups, factor: if sigmoid { 1.5 } else { 1.0 }, ..softmax.choice },
        choice_bias: sigmoid,
        shared_ffn: Some(pairs.size("shared", 0)?).filter(|ffn| *ffn > 0),
        biases,
        ..softmax
    })
}

/// Gated delta rules in place of attention, in a spec that has some: in all layers but the last of each so many.
fn set_delta(pairs: &Pairs<'_>, layers: &mut [LayerSpec]) -> Result<(), WeightsError> {
    let value_heads = pairs.size("delta", 0)?;
    if value_heads == 0 {
        return Ok(());
    }
    let key_dim = pairs.size("delta_key_dim", 16)?;
    let delta = GatedDeltaSpec {
        key_heads: pairs.size("delta_keys", value_heads)?,
        value_heads,
        key_dim,
        value_dim: pairs.size("delta_dim", key_dim)?,
        taps: pairs.size("taps", 4)?,
        length_eps: 1e-6,
    };
    let every = pairs.size("attention_every", 4)?.max(1);
    for (number, layer) in (1usize..).zip(layers) {
        layer.delta = (!number.is_multiple_of(every)).then_some(delta);
    }
    Ok(())
}

/// Decoder and seed of a spec.
pub(super) fn parse(spec: &str) -> Result<(DecoderSpec, u64), WeightsError> {
    let pairs = Pairs::split(spec)?;
    let refuse = |why: String| WeightsError::Spec(format!("`{spec}`: {why}"));
    let (hidden, heads) = (pairs.size("hidden", 64)?, pairs.size("heads", 4)?);
    let head_dim = match pairs.values.get("head_dim") {
        Some(_) => pairs.size("head_dim", 0)?,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(refuse(format!("hidden={hidden} does not divide by heads={heads}; give head_dim"))),
    };
    let window = match pairs.values.get("window") {
        Some(_) => Some(pairs.get("window", "whole number", 0)?),
        None => None,
    };
    let rms_eps = 1e-5;
    let kv_heads = pairs.size("kv_heads", heads)?;
    let theta = pairs.get("theta", "number", 10_000.0)?;
    let rope = |head_dim| Ok(Rope { dim: pairs.size("rope_dim", head_dim)?, theta, scaling: RopeScaling::None });
    let soft_cap = match pairs.values.get("soft_cap") {
        Some(_) => Some(pairs.get("soft_cap", "number", 0.0)?),
        None => None,
    };
    let factor = pairs.get("factor", "number", 1.0)?;
    let biases = pairs.get("biases", "true or false", false)?;
    let activation = match (pairs.get("gelu", "true or false", false)?, pairs.get("clamp", "number", 0.0)?) {
        (gelu, 0.0) => {
            if gelu {
                Activation::GeluTanh
            } else {
                Activation::Silu
            }
        }
        (false, limit) => Activation::ClampedSwiglu { alpha: 1.702, limit },
        (true, _) => return Err(refuse("gelu and clamp exclude each other".into())),
    };
    let attention = AttentionSpec {
        window,
        qkv_bias: pairs.get("bias", "true or false", false)? || biases,
        query_key_norm: pairs.one_of("qk_norm", &[("heads", QueryKeyNorm::OfHeads), ("all", QueryKeyNorm::OfAll)])?,
        soft_cap,
        sinks: pairs.get("sinks", "true or false", false)?,
        output_bias: biases,
        output_gate: pairs.get("gate", "true or false", false)?,
        ..AttentionSpec::llama(heads, kv_heads, head_dim, rope(head_dim)?)
    };
    let attention = match pairs.size("latent", 0)? {
        0 => attention,
        rank => {
            let query_rank = Some(pairs.size("query_rank", 0)?).filter(|rank| *rank > 0);
            let latent = LatentSpec { query_rank, rank, value_dim: pairs.size("value_dim", head_dim)?, rms_eps };
            AttentionSpec { latent: Some(latent), ..attention }
        }
    };
    let norms = [("before", LayerNorms::Before), ("behind", LayerNorms::Behind), ("both", LayerNorms::Both)];
    let layer = LayerSpec {
        norms: pairs.one_of("norms", &norms)?.unwrap_or(LayerNorms::Before),
        residual_factor: factor,
        experts: match pairs.size("experts", 0)? {
            0 => None,
            count => Some(experts(&pairs, count, biases)?),
        },
        activation,
        ..LayerSpec::llama(attention, pairs.size("ffn", hidden.saturating_mul(2))?, rms_eps)
    };
    let mut layers = DecoderSpec::uniform_layers(layer, pairs.size("layers", 2)?).map_err(refuse)?;
    layers.iter_mut().take(pairs.size("dense", 0)?).for_each(|layer| layer.experts = None);
    // The last layer of each so many has no window.
    if let full_every @ 1.. = pairs.size("full_every", 0)? {
        let head_dim = pairs.size("full_head_dim", head_dim)?;
        let kv_heads = pairs.size("full_kv_heads", kv_heads)?;
        for layer in layers.iter_mut().skip(full_every - 1).step_by(full_every) {
            let AttentionSpec { scale, rope, .. } = AttentionSpec::llama(heads, kv_heads, head_dim, rope(head_dim)?);
            layer.attention =
                AttentionSpec { head_dim, kv_heads, scale, rope, window: None, ..layer.attention.clone() };
        }
    }
    // Of each so many, the last layer has no rotary embedding.
    if let nope_every @ 1.. = pairs.size("nope_every", 0)? {
        layers.iter_mut().skip(nope_every - 1).step_by(nope_every).for_each(|layer| layer.attention.rope = None);
    }
    set_delta(&pairs, &mut layers)?;
    let decoder = DecoderSpec {
        vocab: pairs.size("vocab", 300)?,
        hidden,
        context: pairs.size("context", 1024)?,
        layers,
        final_rms_eps: rms_eps,
        tied: pairs.get("tied", "true or false", false)?,
        embedding_factor: factor,
        logit_factor: factor,
        logit_soft_cap: soft_cap,
    };
    decoder.check().map_err(refuse)?;
    let parameters = decoder.parameters();
    if parameters > PARAMETERS_MAX {
        return Err(refuse(format!("{parameters} parameters; at most {PARAMETERS_MAX} are possible")));
    }
    Ok((decoder, pairs.get("seed", "whole number", 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_defaults() {
        let (decoder, seed) = parse("random:").unwrap();
        let layer = &decoder.layers[0];
        let AttentionSpec { head_dim, kv_heads, window, qkv_bias, query_key_norm, .. } = layer.attention;
        assert_eq!((decoder.hidden, head_dim, kv_heads, layer.ffn, seed), (64, 16, 4, 128, 0));
        assert_eq!((decoder.layers.len(), window, qkv_bias, query_key_norm), (2, None, false, None));
        let spec = "random:hidden=600,layers=3,heads=6,kv_heads=2,ffn=800,vocab=500,context=2048,seed=7,head_dim=64,\
                    theta=5e5,tied=true,window=9,bias=true,qk_norm=heads,norms=both,gelu=true,factor=0.5,soft_cap=30,rope_dim=48";
        let rope = Rope { dim: 48, theta: 5e5, scaling: RopeScaling::None };
        let attention = AttentionSpec {
            window: Some(9),
            qkv_bias: true,
            query_key_norm: Some(QueryKeyNorm::OfHeads),
            soft_cap: Some(30.0),
            ..AttentionSpec::llama(6, 2, 64, rope)
        };
        let layer = LayerSpec {
            norms: LayerNorms::Both,
            residual_factor: 0.5,
            activation: Activation::GeluTanh,
            ..LayerSpec::llama(attention, 800, 1e-5)
        };
        let expected = DecoderSpec {
            vocab: 500,
            hidden: 600,
            context: 2048,
            layers: vec![layer; 3],
            final_rms_eps: 1e-5,
            tied: true,
            embedding_factor: 0.5,
            logit_factor: 0.5,
            logit_soft_cap: Some(30.0),
        };
        assert_eq!(parse(spec).unwrap(), (expected, 7));
        let experts = |spec: &str| parse(spec).unwrap().0.layers[1].experts;
        let expected = |count, used| Some(ExpertsSpec::softmax(count, used, true));
        assert_eq!(
            ["random:", "random:experts=4", "random:experts=9,used=3"].map(experts),
            [None, expected(4, 2), expected(9, 3)]
        );
    }

    #[test]
    fn windows_alternate_with_layers_that_have_none() {
        let windows = |spec: &str| {
            let (decoder, _) = parse(spec).unwrap();
            decoder.layers.iter().map(|layer| layer.attention.window).collect::<Vec<_>>()
        };
        assert_eq!(windows("random:layers=5,window=9,full_every=2"), [Some(9), None, Some(9), None, Some(9)]);
        assert_eq!(windows("random:layers=2,window=9,full_every=3"), [Some(9); 2]);
        assert_eq!(windows("random:layers=2,window=9,full_every=1"), [None; 2]);
    }

    #[test]
    fn some_layers_have_a_gated_delta_rule() {
        let deltas = |spec: &str| parse(spec).unwrap().0.layers.iter().map(|layer| layer.delta).collect::<Vec<_>>();
        let of = |key_heads, value_heads, key_dim, value_dim, taps| {
            Some(GatedDeltaSpec { key_heads, value_heads, key_dim, value_dim, taps, length_eps: 1e-6 })
        };
        assert_eq!(deltas("random:layers=2"), [None; 2]);
        assert_eq!(
            deltas("random:layers=5,delta=2"),
            [2, 2, 2, 0, 2].map(|heads| of(2, heads, 16, 16, 4).filter(|_| heads > 0))
        );
        let own = "random:layers=2,delta=4,delta_keys=2,delta_key_dim=6,delta_dim=8,taps=3,attention_every=2,gate=true";
        assert_eq!(deltas(own), [of(2, 4, 6, 8, 3), None]);
        assert!(parse(own).unwrap().0.layers[1].attention.output_gate);
    }

    #[test]
    fn layers_without_a_window_may_have_heads_of_their_own() {
        let spec =
            "random:layers=4,heads=4,kv_heads=4,head_dim=8,window=9,full_every=2,full_head_dim=16,full_kv_heads=2";
        let (decoder, _) = parse(spec).unwrap();
        let of = |layer: usize| {
            let attention = &decoder.layers[layer].attention;
            let rotated = attention.rope.as_ref().map(|rope| rope.dim);
            (attention.window, attention.kv_heads, attention.head_dim, rotated, attention.scale)
        };
        assert_eq!([of(0), of(2)], [(Some(9), 4, 8, Some(8), 8f32.powf(-0.5)); 2]);
        assert_eq!([of(1), of(3)], [(None, 2, 16, Some(16), 0.25); 2]);
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        let check = |spec: &str, part: &str| {
            let message = parse(spec).unwrap_err().to_string();
            assert!(message.contains(spec) && message.contains(part), "{message}");
        };
        check("rnd:", "starts with");
        check("random:hidden", "no key=value");
        check("random:width=3", "unknown key `width`");
        check("random:seed=1,seed=2", "`seed` is given twice");
        check("random:layers=two", "layers=two is no whole number");
        check("random:tied=1", "tied=1 is no true or false");
        check("random:layers=-1", "layers=-1");
        check("random:layers=0", "layers is 0");
        check("random:vocab=99999999999", "vocab is 99999999999");
        check("random:hidden=64,heads=5", "give head_dim");
        check("random:heads=0", "give head_dim");
        check("random:heads=4,kv_heads=3", "do not divide among 3");
        check("random:head_dim=15", "needs it even");
        check("random:theta=0", "theta is 0");
        check("random:theta=NaN", "theta is NaN");
        check("random:hidden=2000000,heads=1,head_dim=2,ffn=2000000,layers=1", "parameters; at most 17179869184");
        check("random:layers=1024,hidden=2000000,ffn=2000000,heads=1,head_dim=2", "parameters; at most");
        check("random:layers=1025", "layers is 1025; 1 to 1024");
        check("random:window=0", "window is 0");
        check("random:window=all", "window=all is no whole number");
        check("random:bias=1", "bias=1 is no true or false");
        check("random:experts=2,used=3", "experts used is 3; 1 to 2");
        check("random:experts=4,norms=both", "experts with norms behind");
        check("random:experts=5000", "experts is 5000");
        check("random:norms=after", "norms=after is none of before, behind, both");
        check("random:qk_norm=true", "qk_norm=true is none of heads, all");
        check("random:soft_cap=0", "soft cap of logits is 0");
        check("random:factor=-1", "embedding factor is -1");
        check("random:clamp=-1", "bound of gate and up is -1");
        check("random:clamp=2,gelu=true", "gelu and clamp exclude each other");
        check("random:sinks=1", "sinks=1 is no true or false");
        check("random:gate=1", "gate=1 is no true or false");
        check("random:gate=true,bias=true", "a gate of attention's output with latents, or with biases");
        check("random:delta=4,delta_keys=3", "4 value heads do not divide among 3 key heads");
        check("random:delta=4,taps=1", "taps of a convolution is 1; 2 to 8");
        check("random:head_dim=8,rope_dim=9", "rotated elements of a head is 9");
        check("random:head_dim=8,rope_dim=3", "needs pairs");
    }
}
