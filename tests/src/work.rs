//! What the benchmark has a model compute, and what that takes of a machine at least: operations of a prompt, bytes of a decode step.

use baton_engine::families::{AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, TensorName};
use baton_engine::formats::{ModelSource, WeightsError};
use baton_types::Dtype;
use std::ops::RangeInclusive;

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A prompt of so many tokens.
    Prefill(usize),
    /// One step of so many sequences with so many tokens each.
    Decode(usize, usize),
}

impl Work {
    /// Tokens that it computes.
    pub fn tokens(self) -> usize {
        match self {
            Self::Prefill(tokens) => tokens,
            Self::Decode(sequences, _) => sequences,
        }
    }

    /// For names of figures.
    pub fn name(self) -> String {
        match self {
            Self::Prefill(tokens) => format!("pp{tokens}"),
            Self::Decode(sequences, context) => format!("b{sequences}_context{context}"),
        }
    }
}

/// How weights lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Each in bf16.
    Bf16,
    /// Matrices that are quantized in the model's file as the file has them, all others in bf16.
    Stored,
}

impl Weights {
    /// Bytes of the matrices that a decode step reads. An embedding that is not the output too is not among them: a step reads a row of it
    /// for each token.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn bytes(self, source: &dyn ModelSource) -> Result<usize, WeightsError> {
        let spec = source.spec();
        let is_read = |name: &TensorName| !name.is_vector() && (spec.tied || *name != TensorName::Embedding);
        let bytes = |name| {
            let wide = Dtype::Bf16.bytes() * spec.tensor_dims(name).iter().product::<usize>();
            if self == Self::Bf16 {
                return Ok(wide);
            }
            let stored = source.stored(name)?;
            Ok(if stored.format.is_quantized() { stored.bytes.len() } else { wide })
        };
        spec.tensor_names().filter(is_read).map(bytes).sum()
    }
}

/// Bytes of KV that a decode step of one sequence reads after `context` tokens.
pub fn kv_bytes(spec: &DecoderSpec, kv: Dtype, context: usize) -> usize {
    let attended = |of: &AttentionSpec| of.window.map_or(context, |window| context.min(window as usize));
    let stored = |of: &AttentionSpec| of.latent.map_or(2 * of.kv_dim(), |latent| latent.rank + of.rotated());
    let layer = |layer: &LayerSpec| stored(&layer.attention) * kv.bytes() * attended(&layer.attention);
    spec.layers.iter().map(layer).sum()
}

/// Floating point operations of the matrices of the layers for each token; a product and its addition are two.
pub fn matrix_operations(spec: &DecoderSpec) -> usize {
    spec.layers.iter().map(|layer| qkv_operations(spec, layer) + other_operations(spec, layer)).sum()
}

/// Floating point operations of a prompt of `tokens` in its matrices and in attention, of each token over those up to itself. All layers
/// count for all tokens; the head does not count.
pub fn prompt_operations(spec: &DecoderSpec, tokens: usize) -> usize {
    let attention: usize = spec.layers.iter().map(|layer| attention_operations(&layer.attention, 1..=tokens)).sum();
    tokens * matrix_operations(spec) + attention
}

/// As [`prompt_operations`], less what the engine leaves out: the last layer after its queries, keys and values, for all tokens but the
/// last, which alone is sampled.
///
/// # Panics
/// If there are no tokens.
pub fn computed_operations(spec: &DecoderSpec, tokens: usize) -> usize {
    let left_out = |layer: &LayerSpec| {
        (tokens - 1) * other_operations(spec, layer) + attention_operations(&layer.attention, 1..=tokens - 1)
    };
    prompt_operations(spec, tokens) - spec.layers.last().map_or(0, left_out)
}

/// Of the matrices of queries, keys and values, for each token.
fn qkv_operations(spec: &DecoderSpec, layer: &LayerSpec) -> usize {
    let attention = &layer.attention;
    let Some(LatentSpec { query_rank, rank, .. }) = attention.latent else {
        return 2 * spec.hidden * (attention.query_dim() + 2 * attention.kv_dim());
    };
    // Queries, compressed or not, pass what makes keys of latents.
    let (down, up) = query_rank.map_or((attention.query_dim(), 0), |rank| (rank, rank * attention.query_dim()));
    let keys = attention.heads * (attention.head_dim - attention.rotated()) * rank;
    2 * (spec.hidden * (down + rank + attention.rotated()) + up + keys)
}

/// Of the other matrices of a layer, for each token.
fn other_operations(spec: &DecoderSpec, layer: &LayerSpec) -> usize {
    // Each token passes the router and the experts that it uses.
    let (router, ffn) = layer.experts.map_or((0, layer.ffn), |experts| {
        (experts.count, experts.choice.used * layer.ffn + experts.shared_ffn.unwrap_or(0))
    });
    let values = layer.attention.latent.map_or(0, |latent| layer.attention.attended_dim() * latent.rank);
    2 * (spec.hidden * (layer.attention.attended_dim() + router + 3 * ffn) + values)
}

/// Of products with keys and with values, for tokens that have so many up to themselves.
fn attention_operations(attention: &AttentionSpec, up_to_each: RangeInclusive<usize>) -> usize {
    let window = attention.window.map_or(usize::MAX, |window| window as usize);
    let attended = up_to_each.map(|up_to_it| up_to_it.min(window)).sum::<usize>();
    // Of latents the first elements are values too.
    let elements = attention
        .latent
        .map_or(2 * attention.query_dim(), |latent| attention.heads * (2 * latent.rank + attention.rotated()));
    2 * elements * attended
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::families::{Rope, RopeScaling};
    use baton_engine::formats::RandomModel;

    /// SmolLM2-135M.
    fn default_model() -> DecoderSpec {
        let rope = Rope { dim: 64, theta: 100_000.0, scaling: RopeScaling::None };
        let layer = LayerSpec::llama(AttentionSpec::llama(9, 3, 64, rope), 1536, 1e-5);
        DecoderSpec {
            vocab: 49_152,
            hidden: 576,
            context: 8192,
            layers: vec![layer; 30],
            final_rms_eps: 1e-5,
            tied: true,
            embedding_factor: 1.0,
            logit_factor: 1.0,
            logit_soft_cap: None,
        }
    }

    #[test]
    fn each_token_passes_all_matrices_of_the_layers() {
        // 30 layers of 576 x (576 queries, 192 keys, 192 values, 576 out, 3 x 1,536 of the MLP), two operations each.
        assert_eq!(matrix_operations(&default_model()), 30 * 576 * 6_144 * 2);
        assert_eq!(matrix_operations(&default_model()), 212_336_640);
    }

    #[test]
    fn a_prompt_has_its_matrices_and_causal_attention() {
        // Tokens attend to 1 + 2 + ... + n tokens; each takes 2 x 576 operations for QK and as many for PV in each of 30 layers.
        for (tokens, attended, want) in [
            (1, 1, 212_405_760),
            (128, 8_256, 27_749_744_640),
            (512, 131_328, 117_793_751_040),
            (2048, 2_098_176, 579_891_363_840),
        ] {
            assert_eq!(want, tokens * 212_336_640 + attended * 4 * 576 * 30, "the hand's own sum");
            assert_eq!(prompt_operations(&default_model(), tokens), want, "{tokens}");
        }
    }

    #[test]
    fn the_last_layer_ends_with_the_sampled_row() {
        // Of 511 tokens it leaves out 2 x 576 x (576 + 4,608) operations in matrices, and attention over 1 + ... + 511 tokens.
        let left_out = 511 * 5_971_968 + 130_816 * 4 * 576;
        assert_eq!(left_out, 3_353_075_712);
        assert_eq!(computed_operations(&default_model(), 512), 117_793_751_040 - left_out);
        assert_eq!(computed_operations(&default_model(), 1), prompt_operations(&default_model(), 1));
    }

    /// DeepSeek-V2-Lite: 16 heads of 128 and 64 rotated elements, latents of 512, 6 of 64 experts of 1,408 and two that all tokens use.
    #[test]
    fn latents_are_read_once_for_all_heads() {
        let shape = "random:hidden=2048,layers=2,heads=16,head_dim=192,rope_dim=64,latent=512,value_dim=128,ffn=1408,vocab=8,\
                     experts=64,used=6,shared=2816";
        let spec = RandomModel::parse(shape).unwrap().spec().clone();
        assert_eq!(kv_bytes(&spec, Dtype::Bf16, 100), 2 * 100 * 576 * 2);
        let projections = 2_048 * (16 * 192 + 576) + 16 * 128 * 512;
        let others = 16 * 128 * 512 + 2_048 * (16 * 128 + 64 + 3 * 1_408 * 8);
        assert_eq!(matrix_operations(&spec), 2 * 2 * (projections + others));
        let attention = 2 * 2 * 16 * (576 + 512);
        assert_eq!(prompt_operations(&spec, 2) - 2 * matrix_operations(&spec), 3 * attention);
    }

    #[test]
    fn a_token_reads_the_keys_and_values_of_its_context() {
        // 30 layers x (192 keys + 192 values) x 2 bytes = 23,040 bytes a token.
        assert_eq!(kv_bytes(&default_model(), Dtype::Bf16, 128), 2_949_120);
        assert_eq!(kv_bytes(&default_model(), Dtype::Bf16, 2048), 47_185_920);
        assert_eq!(kv_bytes(&default_model(), Dtype::F32, 128), 5_898_240);
    }

    #[test]
    fn a_window_bounds_what_is_attended_and_read() {
        let mut spec = default_model();
        spec.layers[0].attention.window = Some(100);
        // Of 128 tokens in one layer: 1 + ... + 100, then 28 times 100, instead of 8,256.
        let want = 27_749_744_640 - (8_256 - 5_050 - 2_800) * 4 * 576;
        assert_eq!(prompt_operations(&spec, 128), want);
        assert_eq!(kv_bytes(&spec, Dtype::Bf16, 128), 2_949_120 - 28 * 768);
        assert_eq!(kv_bytes(&spec, Dtype::Bf16, 100), 2_304_000, "a context within the window is read whole");
    }
}
