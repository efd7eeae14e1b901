//! Models with seeded random weights, of any shape: for tests and benchmarks, where only speed and bits matter.
//!
//! Weights are a function of (seed, tensor, index) alone. So they do not depend on which tensors are read, in which order, or on how many
//! threads.

mod spec;
mod text;

use super::{ModelSource, StoredTensor, TextSource, WeightsError};
use crate::families::{DecoderSpec, LayerTensor, TensorName};
use baton_kernels::storage::StorageFormat;
use baton_types::{Digest, SamplingDefaults, TokenId};

/// A model whose weights are computed instead of read.
///
/// # Spec
/// `random:` and then `key=value` pairs with commas between; each key may be left out:
///
/// | Key | Default | |
/// |---|---|---|
/// | `hidden` | 64 | width of the residual stream |
/// | `layers` | 2 | |
/// | `heads` | 4 | query heads |
/// | `kv_heads` | `heads` | divides `heads` |
/// | `head_dim` | `hidden / heads` | even |
/// | `ffn` | 2 `hidden` | width of the MLP |
/// | `vocab` | 300 | |
/// | `context` | 1024 | |
/// | `theta` | 10000 | rotary base |
/// | `tied` | `false` | whether the output matrix is the embedding |
/// | `window` | none | tokens of a sliding window in every layer, the newest included |
/// | `full_every` | none | the last layer of each so many has no window |
/// | `full_head_dim`, `full_kv_heads` | `head_dim`, `kv_heads` | the same of layers that `full_every` leaves without a window |
/// | `nope_every` | none | the last layer of each so many has no rotary embedding |
/// | `bias` | `false` | whether queries, keys and values have biases |
/// | `qk_norm` | none | `heads`: each head of queries and keys passes an RMSNorm; `all`: all heads together |
/// | `norms` | `before` | where the RMSNorms of attention and MLP are: `before`, `behind` or `both` |
/// | `experts`, `used` | none, 2 | experts in place of every layer's MLP, and how many of them are used for a token |
/// | `biases` | `false` | whether all linears of attention, and experts with their router, have biases |
/// | `sinks` | `false` | whether each query head has an attention sink |
/// | `clamp` | none | bound of gpt-oss's gated unit, in place of SiLU |
/// | `gelu` | `false` | GELU instead of SiLU |
/// | `factor` | 1 | of the embedding, of what each layer adds, and of the logits |
/// | `soft_cap` | none | bound of scores and logits |
/// | `rope_dim` | `head_dim` | elements of a head that are rotated |
/// | `latent` | none | latent attention, and the rank of its compressed keys and values; `rope_dim` is to be less than `head_dim` |
/// | `query_rank`, `value_dim` | none, `head_dim` | rank of the compressed query, and elements of a value, with `latent` |
/// | `sigmoid` | `false` | experts are chosen by sigmoids and a bias, and have a factor of 1.5 |
/// | `groups`, `groups_used` | none, 1 | groups of experts, and how many of them may be used for a token |
/// | `shared` | none | width of an expert that all tokens use |
/// | `dense` | 0 | first layers with an MLP in place of experts |
/// | `gate` | `false` | whether attention has a gate of its output |
/// | `delta` | none | value heads of a gated delta rule in place of attention |
/// | `attention_every` | 4 | the last layer of each so many keeps its attention, with `delta` |
/// | `delta_keys` | `delta` | key heads of a gated delta rule |
/// | `delta_key_dim`, `delta_dim` | 16, `delta_key_dim` | elements of a key and of a value of a gated delta rule |
/// | `taps` | 4 | of the convolution before a gated delta rule |
/// | `seed` | 0 | |
///
/// With a vocabulary of at least [`RandomModel::TEXT_VOCAB_MIN`] it also brings a byte-level tokenizer and a chat template.
#[derive(Clone, Debug)]
pub struct RandomModel {
    name: String,
    spec: DecoderSpec,
    seed: u64,
    end_tokens: Vec<TokenId>,
}

impl RandomModel {
    /// Smallest vocabulary with a tokenizer: 256 bytes, the special tokens, and some to generate.
    pub const TEXT_VOCAB_MIN: usize = 300;

    /// Prefix of a spec.
    pub const PREFIX: &str = "random:";

    /// Parses a spec; see the type's documentation.
    pub fn parse(spec: &str) -> Result<Self, WeightsError> {
        let (decoder, seed) = spec::parse(spec)?;
        Ok(Self::new(decoder, seed).named(spec))
    }

    /// A model of this spec, which must pass [`DecoderSpec::check`] (otherwise reading its tensors may panic).
    pub fn new(spec: DecoderSpec, seed: u64) -> Self {
        let end_tokens = if spec.vocab >= Self::TEXT_VOCAB_MIN { vec![text::END] } else { Vec::new() };
        Self { name: format!("random-{seed}"), spec, seed, end_tokens }
    }

    /// The same model under another name.
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }
}

/// splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection whose output bits each depend on all input bits.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A number per tensor that does not change when layers are added.
fn tensor_number(name: TensorName) -> u64 {
    match name {
        TensorName::Embedding => 1,
        TensorName::FinalNorm => 2,
        TensorName::Output => 3,
        TensorName::Layer(layer, tensor) => ((layer as u64 + 1) << 8) | tensor as u64,
        TensorName::Expert(layer, expert, tensor) => {
            (1 << 48) | ((layer as u64 + 1) << 24) | ((expert as u64) << 8) | tensor as u64
        }
    }
}

/// Uniform in [-1, 1) in steps of 2^-23, exact in f32.
fn uniform(key: u64, index: usize) -> f32 {
    // With splitmix64's golden-ratio increment, neighbouring indices give independent numbers.
    let bits = mix(key.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    ((bits >> 40) as i32 - (1 << 23)) as f32 / (1 << 23) as f32
}

impl ModelSource for RandomModel {
    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// Matrices have zero mean and a standard deviation of 1 / sqrt(fan in), so activations keep their size through the
    /// layers; the output matrix twice that, so that logits differ by more than rounding. Norms lie in 1 +- 0.25, biases in
    /// 0 +- 0.5, and logarithms of decays in -1.5 +- 1.5.
    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError> {
        if !self.spec.has_tensor(name) {
            return Err(WeightsError::damaged(&self.name, format!("there is no tensor {name}")));
        }
        let [rows, columns] = self.spec.tensor_dims(name);
        let (offset, scale) = if name.is_norm() {
            (1.0, 0.25)
        } else if name.is_bias() {
            (0.0, 0.5)
        } else if matches!(name, TensorName::Layer(_, LayerTensor::DeltaDecay)) {
            // Of some heads a state stays for long, of others it does not.
            (-1.5, 1.5)
        } else {
            // sqrt(3): the inverse of the standard deviation of a uniform number in [-1, 1).
            let gain = if name == TensorName::Output { 2.0 } else { 1.0 };
            (0.0, gain * (3.0 / columns as f32).sqrt())
        };
        let key = mix(mix(self.seed) ^ tensor_number(name));
        let values = (0..rows * columns).map(|index| offset + scale * uniform(key, index));
        let bytes = values.flat_map(f32::to_le_bytes).collect::<Vec<_>>().into();
        Ok(StoredTensor { format: StorageFormat::F32, bytes })
    }

    fn fingerprint(&self) -> Digest {
        let identity = format!("random model, version 2, seed {}: {:?}", self.seed, self.spec);
        Digest(*blake3::hash(identity.as_bytes()).as_bytes())
    }

    fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        SamplingDefaults::default()
    }

    fn text(&self) -> TextSource {
        if self.spec.vocab < Self::TEXT_VOCAB_MIN {
            return TextSource::None;
        }
        TextSource::Bundle(Box::new(text::bundle(self.spec.vocab)))
    }

    fn name(&self) -> &str {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(spec: &str) -> RandomModel {
        RandomModel::parse(spec).unwrap()
    }

    #[test]
    fn weights_are_pinned() {
        // A change of these values changes every recorded result on random models: raise the version in `fingerprint` too.
        let small = model("random:hidden=6,heads=3,ffn=10,vocab=5,seed=7");
        let up = small.tensor(TensorName::Layer(1, LayerTensor::Up)).unwrap();
        expect_test::expect!["[0.0669517, -0.32369646, -0.4273284, -0.16173717]"].assert_eq(&format!("{:?}", &up[..4]));
    }

    #[test]
    fn tensors_differ_by_seed_layer_and_name_only() {
        let (a, b) = (model("random:layers=2,seed=1"), model("random:layers=9,seed=1"));
        let other = model("random:layers=2,seed=2");
        let mut seen = std::collections::HashSet::new();
        for name in a.spec().tensor_names() {
            let values = a.tensor(name).unwrap();
            assert_eq!(values, b.tensor(name).unwrap(), "{name} depends on the number of layers");
            assert_ne!(values, other.tensor(name).unwrap(), "{name} ignores the seed");
            let head: Vec<u32> = values[..8].iter().map(|v| v.to_bits()).collect();
            assert!(seen.insert(head), "{name} repeats another tensor");
        }
        assert_ne!(a.fingerprint(), b.fingerprint());
        assert_ne!(a.fingerprint(), other.fingerprint());
    }

    #[test]
    fn matrices_are_scaled_by_fan_in() {
        let model = model("random:hidden=256,heads=4,ffn=512");
        let down = model.tensor(TensorName::Layer(0, LayerTensor::Down)).unwrap();
        let n = down.len() as f64;
        let mean = down.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = down.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 1e-3 && (variance * 512.0 - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }

    #[test]
    fn tied_models_have_no_output_matrix() {
        let tied = model("random:tied=true");
        assert!(tied.tensor(TensorName::Output).is_err());
        assert!(tied.spec().tensor_names().all(|name| name != TensorName::Output));
        assert!(tied.tensor(TensorName::Layer(2, LayerTensor::Up)).is_err());
    }

    #[test]
    fn text_comes_with_room_for_it() {
        assert!(matches!(model("random:vocab=299").text(), TextSource::None));
        assert!(model("random:vocab=299").end_tokens().is_empty());
        assert!(matches!(model("random:vocab=300").text(), TextSource::Bundle(_)));
        assert_eq!(model("random:vocab=300").end_tokens(), [text::END]);
    }
}
