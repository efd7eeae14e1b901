//! What the layers of a model store, per token or as a state, and the KV layout that follows from it.

use crate::{Dtype, GroupKind, KvGroup, KvLayout, KvPlane, LayoutError};

/// What one layer stores: per token, or as a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKv {
    /// A key and a value for each KV head. Multi-head attention has as many KV heads as query heads, multi-query attention has one, and
    /// grouped-query attention has a number in between.
    Heads {
        /// Number of KV heads.
        kv_heads: u32,
        /// Elements of a key, and of a value.
        head_dim: u32,
    },
    /// One vector shared by all heads: the compressed keys and values, and the rotated part of the key (MLA).
    Latent {
        /// Elements: rank of the compression and rotated dimensions together.
        dim: u32,
    },
    /// The state of a gated delta rule and of the convolution before it, in f32 whatever the type of KV: rounding errors of a state would add
    /// up over all tokens.
    State {
        /// Heads of the state, each a matrix `[key_dim, value_dim]`.
        heads: u32,
        /// Rows of each head's matrix.
        key_dim: u32,
        /// Columns of each head's matrix.
        value_dim: u32,
        /// Inputs of the convolution that are kept: one less than it has taps.
        inputs: u32,
        /// Channels of the convolution.
        channels: u32,
    },
}

/// Layers that attend to a bounded number of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens in the window, including the newest.
    pub tokens: u32,
    /// The layers with a window, ascending. All other layers attend to every token.
    pub layers: Vec<u32>,
}

/// Layers that store the same per token, and attend to the same part of the past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionGroup {
    /// The layers, ascending.
    pub layers: Vec<u32>,
    /// Tokens that a token attends to, including itself; `None`: all before it.
    pub window: Option<u32>,
    /// What each of the layers stores.
    pub kv: LayerKv,
}

/// The properties of a model's attention that decide the size of its KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Groups that attend to every token, then those with a window, then those with a state; each in the order of their first layers. No layer
    /// is in two.
    pub groups: Vec<AttentionGroup>,
}

impl Attention {
    /// Of what each layer attends to and stores, in the order of the layers.
    pub fn of_layers(layers: impl IntoIterator<Item = (Option<u32>, LayerKv)>) -> Self {
        let mut groups: Vec<AttentionGroup> = Vec::new();
        for (layer, (window, kv)) in (0..).zip(layers) {
            match groups.iter_mut().find(|group| (group.window, group.kv) == (window, kv)) {
                Some(group) => group.layers.push(layer),
                None => groups.push(AttentionGroup { layers: vec![layer], window, kv }),
            }
        }
        // The sort keeps the order of those that are alike.
        groups.sort_by_key(|group| (matches!(group.kv, LayerKv::State { .. }), group.window.is_some()));
        Self { groups }
    }

    /// Of so many layers that all store the same, some of them with a window.
    pub fn alike(layers: u32, kv: LayerKv, window: Option<&SlidingWindow>) -> Self {
        let of = |layer| window.filter(|window| window.layers.contains(&layer)).map(|window| window.tokens);
        Self::of_layers((0..layers).map(|layer| (of(layer), kv)))
    }

    /// The layout with this block size and element type, with the same groups.
    pub fn layout(&self, block_tokens: u32, dtype: Dtype) -> Result<KvLayout, LayoutError> {
        let group = |AttentionGroup { layers, window, kv }: &AttentionGroup| {
            let (whole, planes) = match *kv {
                LayerKv::Heads { kv_heads, head_dim } => {
                    let plane = |name| KvPlane::try_new(name, kv_heads, head_dim, dtype);
                    (GroupKind::Full, vec![plane("k")?, plane("v")?])
                }
                LayerKv::Latent { dim } => (GroupKind::Latent, vec![KvPlane::try_new("latent", 1, dim, dtype)?]),
                LayerKv::State { heads, key_dim, value_dim, inputs, channels } => {
                    let conv = KvPlane::try_new("conv", inputs, channels, Dtype::F32)?;
                    let state = KvPlane::try_new("state", heads, key_dim.saturating_mul(value_dim), Dtype::F32)?;
                    (GroupKind::State, vec![conv, state])
                }
            };
            Ok(KvGroup { kind: window.map_or(whole, GroupKind::Window), layers: layers.clone(), planes })
        };
        KvLayout::try_new(block_tokens, self.groups.iter().map(group).collect::<Result<_, LayoutError>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: LayerKv = LayerKv::Heads { kv_heads: 2, head_dim: 8 };

    fn groups(attention: &Attention) -> Vec<(GroupKind, Vec<u32>, u32)> {
        let layout = attention.layout(16, Dtype::Bf16).unwrap();
        layout.groups().iter().map(|g| (g.kind, g.layers.clone(), g.planes[0].dim())).collect()
    }

    #[test]
    fn layers_with_a_window_form_a_group_of_their_own() {
        let attention = |layers: &[u32]| {
            let window = SlidingWindow { tokens: 64, layers: layers.to_vec() };
            Attention::alike(4, HEADS, Some(&window))
        };
        let (full, window) = (GroupKind::Full, GroupKind::Window(64));
        assert_eq!(groups(&attention(&[0, 2])), [(full, vec![1, 3], 8), (window, vec![0, 2], 8)]);
        assert_eq!(groups(&attention(&[0, 1, 2, 3])), [(window, vec![0, 1, 2, 3], 8)]);
        assert_eq!(groups(&attention(&[])), [(full, vec![0, 1, 2, 3], 8)]);
        let plain = Attention::alike(4, HEADS, None);
        assert_eq!(plain.layout(16, Dtype::Bf16), KvLayout::llama(16, 4, 2, 8, Dtype::Bf16));
        assert!(Attention::alike(0, HEADS, None).layout(16, Dtype::Bf16).is_err(), "no layers");
    }

    #[test]
    fn layers_that_store_another_size_form_a_group_of_their_own() {
        let wide = LayerKv::Heads { kv_heads: 1, head_dim: 32 };
        let layers = [(Some(8), HEADS), (None, wide), (Some(64), HEADS), (None, HEADS), (Some(8), HEADS), (None, wide)];
        let attention = Attention::of_layers(layers);
        let (full, window) = (GroupKind::Full, GroupKind::Window);
        let expected =
            [(full, vec![1, 5], 32), (full, vec![3], 8), (window(8), vec![0, 4], 8), (window(64), vec![2], 8)];
        assert_eq!(groups(&attention), expected);
        // k and v, of 2 bytes: 2 layers of 32 elements, 4 of 2 * 8.
        assert_eq!(attention.layout(16, Dtype::Bf16).unwrap().bytes_per_token(), 2 * 2 * (2 * 32 + 4 * 16));
    }

    #[test]
    fn a_latent_is_one_plane_whatever_the_heads() {
        // DeepSeek-V3: rank 512 and 64 rotated dimensions, 2 bytes each, in 61 layers.
        let attention = Attention::alike(61, LayerKv::Latent { dim: 512 + 64 }, None);
        let layout = attention.layout(16, Dtype::Bf16).unwrap();
        assert_eq!((layout.groups()[0].kind, layout.groups()[0].planes.len()), (GroupKind::Latent, 1));
        assert_eq!(layout.bytes_per_token(), 61 * 576 * 2);
    }

    #[test]
    fn states_are_groups_of_their_own_behind_all_others() {
        // Of Qwen3.5: three layers with a state, one with attention.
        let state = LayerKv::State { heads: 4, key_dim: 8, value_dim: 16, inputs: 3, channels: 96 };
        let attention = Attention::of_layers([(None, state), (None, state), (None, state), (None, HEADS)]);
        let layout = attention.layout(16, Dtype::Bf16).unwrap();
        let kinds: Vec<_> = layout.groups().iter().map(|g| (g.kind, g.layers.clone())).collect();
        assert_eq!(kinds, [(GroupKind::Full, vec![3]), (GroupKind::State, vec![0, 1, 2])]);
        let planes: Vec<_> =
            layout.groups()[1].planes.iter().map(|p| (p.name(), p.heads(), p.dim(), p.dtype())).collect();
        assert_eq!(planes, [("conv", 3, 96, Dtype::F32), ("state", 4, 128, Dtype::F32)]);
        assert_eq!(layout.bytes_per_token(), 2 * 2 * 16, "states are not counted");
    }
}
