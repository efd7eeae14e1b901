//! Model families: what a decoder computes, and how each family's files describe it.
//!
//! All families are one decoder, driven by a [`DecoderSpec`]. A family is one file of this folder and one row of `registry`: which names
//! it has in files, which keys it reads beyond the common ones, and what they change in the spec. The readers in [`crate::formats`] know no
//! family by name; they refuse keys and tensors that the family does not state.

mod deepseek;
mod delta;
mod ernie4_5;
mod family;
mod gemma2;
mod gemma3;
mod gpt_oss;
mod granite;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
pub(crate) mod registry;
mod rope;
mod smollm3;
mod spec;
mod tensors;

pub use baton_kernels::program::{Activation, Choice, ExpertGroups, Scoring};
pub use delta::GatedDeltaSpec;
pub(crate) use family::{ConfigFamily, ExpertNames, FusedTensor, GgufFamily, RotaryRows, StackedTensor};
pub use rope::{Rope, RopeScaling};
pub(crate) use rope::{YARN_LOG_MULTIPLIER, yarn_amplitude};
pub(crate) use spec::attention_scale;
pub use spec::{AttentionSpec, DecoderSpec, ExpertsSpec, LatentSpec, LayerNorms, LayerSpec, QueryKeyNorm};
pub(crate) use tensors::layer_index;
pub use tensors::{ExpertTensor, LayerTensor, TensorName};
